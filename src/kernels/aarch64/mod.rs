//! Instruction sets of 64-bit Arm.

mod neon;

pub(super) use neon::Neon;
