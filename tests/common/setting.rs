//! Settings of a run.

/// A number from the environment, for longer runs and for bringing a failure back.
pub(crate) fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}
