//! Arithmetic on raw memory: the algorithms, written once over the instruction set.
//!
//! Functions here are safe to call with any arguments: views carry checked memory, and page
//! numbers are checked again where they become addresses.

#![expect(unsafe_code, reason = "views are raw memory; instructions are chosen at run time")]
#![expect(clippy::inline_always, reason = "generic code becomes vector code only where it is inlined")]

#[cfg(target_arch = "aarch64")]
mod aarch64;
mod bound;
mod columns;
mod flash;
mod gather;
mod gather_pairs;
mod integers;
mod isa;
#[cfg(feature = "bench")]
mod limits;
mod mask;
mod math;
mod method;
mod pack;
mod pairs;
mod panels;
mod pass;
mod places;
mod prepared;
mod product;
mod quantise;
mod query;
mod rows;
mod scalar;
mod scales;
mod score;
mod scratch;
mod simd;
mod softmax;
mod state;
mod stepped;
mod stored;
mod tile;
mod tokens;
mod walk;
mod weigh;
mod weighted;
mod words;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use std::ops::Range;

pub(crate) use flash::{Block, Call, PREFILL, SPLIT};
pub(crate) use isa::Level;
pub use isa::{Isa, set_isa};
#[cfg(feature = "bench")]
pub use limits::{multiply_add, multiply_add_pairs, read_pages};
pub(crate) use mask::Mask;
pub(crate) use quantise::row_scale;
pub(crate) use rows::{copy_slots, load_row, store_row, write_slot};
pub(crate) use state::State;

/// Bounds on what quantisation put into each row of a block of one query and one KV head.
pub(crate) fn error_bound(level: Level, call: &Call, block: &Block) -> Vec<f64> {
    isa::dispatch!(level, simd => bound::error_bound(simd, call, block))
}

/// Attention of a block over the keys of some splits: gives `each` what its rows saw in one of them, first to
/// last, or that they saw nothing if there are none.
pub(crate) fn attend(
    level: Level,
    call: &Call,
    block: &Block,
    splits: Range<usize>,
    each: &mut dyn FnMut(State),
) {
    #[cfg(target_arch = "x86_64")]
    {
        let done = match level {
            Level::Scalar(_) => false,
            Level::Avx2(simd) => flash::attend_in_steps(simd, call, block, splits.clone(), each),
            // Sums of integers are exact: they have the same bits with one instruction as with two.
            Level::Avx512(simd) => match x86_64::Avx512::<{ x86_64::VNNI }>::new() {
                Some(simd) => flash::attend_in_steps(simd, call, block, splits.clone(), each),
                None => flash::attend_in_steps(simd, call, block, splits.clone(), each),
            },
            Level::Avx512Bf16(simd) => flash::attend_in_steps(simd, call, block, splits.clone(), each),
        };
        if done {
            return;
        }
        if let Level::Avx512Bf16(simd) = level {
            return flash::attend_in_pairs(simd, call, block, splits, each);
        }
    }
    isa::dispatch!(level, simd => flash::attend(simd, call, block, splits, each));
}

/// Adds to what some rows saw what the same rows saw in the next part of the keys.
pub(crate) fn merge(level: Level, state: &mut State, next: &State) {
    isa::dispatch!(level, simd => state.merge(simd, next));
}
