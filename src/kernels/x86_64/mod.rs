//! Instruction sets of x86-64.

mod avx2;

pub(super) use avx2::Avx2;
