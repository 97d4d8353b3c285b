//! Paged attention against its definition in f64: every instruction set this CPU has, with NaN and
//! infinity in every slot that must not be read.

#![expect(unsafe_code, reason = "views of test memory")]

mod harness;
mod property;
