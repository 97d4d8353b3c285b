//! Measuring the library beside the machine's limit and its peers, in one process and one run.
//!
//! Absolute times move from machine to machine and from day to day; the ratio to a limit measured
//! in the same minute does not. So every [`Record`] carries both. Criterion (`benches/`) and the
//! command line (`paged-kv bench`) print the same records.

pub mod attention;
pub mod measure;
pub mod peers;
pub mod pool;
mod shapes;

/// One measured figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Which benchmark.
    pub bench: &'static str,
    /// What was done.
    pub case: String,
    /// Who did it: this library, a peer, or the machine itself.
    pub implementation: String,
    /// Threads at once.
    pub threads: usize,
    /// Median over the repetitions that were kept.
    pub value: f64,
    /// The quartiles of those: half of them lie between.
    pub quartiles: [f64; 2],
    /// Unit of `value`, `quartiles` and `limit`.
    pub unit: &'static str,
    /// What `limit` is the figure of.
    pub yardstick: String,
    /// What the same machine reached at the yardstick, in the same run.
    pub limit: f64,
    /// `value / limit`.
    pub ratio: f64,
    /// Repetitions that the median is taken over.
    pub kept: usize,
    /// Repetitions thrown away because a thread waited for a core.
    pub discarded: usize,
}
