//! The KV cache of LLM serving as paged virtual memory.
//!
//! Data flows one way: errors and ids, dtype and layout, sync, pool, storage, table, kernels,
//! attention, cache, python. Each module may use only those before it (`tests/layering.rs`).
//! `docs/design.md` explains the life of a page, the protocols and their proofs.

pub mod attention;
pub mod cache;
pub mod dtype;
pub mod error;
pub mod ids;
pub mod kernels;
pub mod layout;
pub mod pool;
pub mod storage;
pub mod sync;
pub mod table;

#[cfg(feature = "bench")]
pub mod bench;
#[cfg(feature = "python")]
mod python;
