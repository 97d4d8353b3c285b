//! Everything that synchronises threads comes from here: std, or loom's model of it under
//! `--cfg loom`. No other module names either, so the code that loom explores is the code that runs.

#![expect(unsafe_code, reason = "a cell behind a try-lock, a lazily made box, vector loads, prefetch")]

#[cfg(loom)]
pub use loom::{
    hint,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};
#[cfg(not(loom))]
pub use std::{
    hint,
    sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
};

pub use crossbeam_utils::CachePadded;

/// Whether loom runs the code: then sizes are small, so that it can explore all orders.
pub const MODELLED: bool = cfg!(loom);

mod gate;
mod memory;
mod once_box;
mod preload;
mod segments;
mod serial;
mod thread_number;
mod try_cell;

pub use gate::Gate;
pub use memory::{copy_entries, copy_entries_to, prefetch, prefetch_address};
pub use once_box::OnceBox;
pub use preload::Preload;
pub use segments::Segments;
pub use serial::serial_number;
#[cfg(loom)]
pub use thread_number::set_thread_number;
pub use thread_number::thread_number;
pub use try_cell::TryCell;
