//! Random operations against plain models. Every slot carries a stamp that no other token ever
//! had, so a page that is overwritten, lost, torn or handed to two owners shows.
//!
//! | module | threads | model |
//! |---|---|---|
//! | `single` | one | knows everything: lengths, tables, free pages, statistics, each error; shrinks |
//! | `threads` | many on one cache | each thread knows the sequences it owns |
//!
//! `named` tells single stories.
#![cfg(not(loom))]

mod backend;
mod books;
#[path = "../common/mod.rs"]
mod common;
mod model;
mod named;
#[path = "../common/setting.rs"]
mod setting;
mod single;
mod threads;
mod worker;
