//! Instruction sets of x86-64.

mod avx2;
mod avx512;
mod avx512_bf16;
mod avx512_f8;
mod avx512_vnni;

pub(super) use avx2::Avx2;
pub(super) use avx512::{Avx512, BF16, PLAIN, VNNI};
