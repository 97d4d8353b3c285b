//! Arithmetic on raw memory: the algorithms, written once over the instruction set.
//!
//! Functions here are safe to call with any arguments: views carry checked memory, and page
//! numbers are checked again where they become addresses.

#![expect(unsafe_code, reason = "views are raw memory; instructions are chosen at run time")]
#![expect(clippy::inline_always, reason = "generic code becomes vector code only where it is inlined")]

mod blocks;
mod flash;
mod isa;
mod mask;
mod math;
mod rows;
mod scalar;
mod simd;
mod softmax;
mod state;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86_64;

pub(crate) use flash::{Block, Call};
pub(crate) use isa::Level;
pub use isa::{Isa, set_isa};
pub(crate) use mask::Mask;
pub(crate) use rows::{copy_slots, load_row, store_row, write_slot};
pub(crate) use state::State;

/// Attention of a block over the keys of one split, the one point of dispatch.
pub(crate) fn attend(level: Level, call: &Call, block: &Block, split: usize) -> State {
    match level {
        Level::Scalar(scalar) => flash::attend(scalar, call, block, split),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(avx2) => flash::attend(avx2, call, block, split),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(avx512) => flash::attend(avx512, call, block, split),
    }
}
