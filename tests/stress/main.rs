//! What needs more than a test's ordinary means: threads stopped at any instruction, and hammering
//! one batch from two sides.
#![cfg(not(loom))]

#[path = "../common/mod.rs"]
mod common;
mod ending;
#[path = "../common/setting.rs"]
mod setting;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod stopped;
