//! The protocols of the page tables under every interleaving that loom finds within the preemption
//! bound stated with each model. `make loom`, or
//! `RUSTFLAGS="--cfg loom" cargo test --profile loom --test loom_table`
//!
//! No loop of the tables yields, so an execution in which a thread waited for a stopped one would
//! exceed loom's limit of branches and fail: passing also shows that nobody waits.

#![cfg(loom)]

mod flight;
mod frees;
mod gate;
mod leases;
mod sharing;
mod world;
