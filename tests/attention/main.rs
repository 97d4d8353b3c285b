//! Paged attention against its definition in f64: every instruction set this CPU has, with NaN and
//! infinity in every slot that must not be read.

#![expect(unsafe_code, reason = "views of test memory")]
#![expect(clippy::float_cmp, reason = "what must be exact is compared exactly")]

mod accuracy;
mod arguments;
mod bits;
mod bound;
mod cascade;
mod edges;
mod field;
mod float8;
mod harness;
mod memory;
mod merge;
mod placement;
mod property;
mod quantised;
mod write;
