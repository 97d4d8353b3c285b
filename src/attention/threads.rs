//! The threads that attention runs on.

use std::fmt;

use rayon::iter::{IntoParallelIterator, ParallelIterator};

use crate::error::{Error, Result};

/// A number of threads of one's own: nothing here touches rayon's global pool, so two caches, or a
/// cache and its host program, don't share settings.
pub struct ThreadPool {
    /// `None`: the caller's thread does everything.
    pool: Option<rayon::ThreadPool>,
}

/// More threads than the largest machines have cores: a mistake that would bring this one down.
const MOST_THREADS: usize = 1024;

/// Below this many multiply-adds (some 20 microseconds of one core) waking threads costs more than
/// it saves, and the caller's thread does the work.
const WORTH_WAKING: u64 = 400_000;

impl ThreadPool {
    /// Starts `num_threads` threads; `None` takes as many as the process may use at once. One
    /// thread means the caller's: none is started.
    ///
    /// # Errors
    /// [`Error::Value`] for 0 or more than 1024 threads, or where the system refuses to start them.
    pub fn new(num_threads: Option<usize>) -> Result<Self> {
        let available = || std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS));
        let pool = match num_threads.unwrap_or_else(available) {
            1 => None,
            n @ 2..=MOST_THREADS => Some(
                rayon::ThreadPoolBuilder::new()
                    .num_threads(n)
                    .thread_name(|i| format!("paged-kv-{i}"))
                    .build()
                    .map_err(|e| Error::Value(format!("cannot start {n} threads: {e}")))?,
            ),
            n => {
                return Err(Error::Value(format!("num_threads must be 1 to {MOST_THREADS}, not {n}")));
            }
        };
        Ok(Self { pool })
    }

    /// Threads that share the work.
    pub fn num_threads(&self) -> usize {
        self.pool.as_ref().map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Runs `run` on every task, in any order; `work` estimates the multiply-adds of all of them.
    pub(crate) fn for_each<T: Send>(&self, tasks: Vec<T>, work: u64, run: impl Fn(T) + Sync + Send) {
        match &self.pool {
            Some(pool) if tasks.len() > 1 && work >= WORTH_WAKING => {
                pool.install(|| tasks.into_par_iter().for_each(run));
            }
            _ => tasks.into_iter().for_each(run),
        }
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool").field("num_threads", &self.num_threads()).finish()
    }
}
