//! Arithmetic on raw memory: the algorithms, written once over the instruction set.
//!
//! Functions here are safe to call with any arguments: views carry checked memory, and page
//! numbers are checked again where they become addresses.

#![expect(unsafe_code, reason = "views are raw memory; instructions are chosen at run time")]

mod isa;
mod rows;

pub use isa::{Isa, set_isa};
pub(crate) use rows::{copy_slots, load_row, load_slot, store_row, write_slot};
