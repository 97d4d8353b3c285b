//! The threads that attention runs on.

use std::fmt;
use std::mem;

use rayon::iter::{IndexedParallelIterator, IntoParallelIterator, ParallelIterator};

use crate::error::{Error, Result};
use crate::sync::OnceBox;

/// A number of threads of one's own: nothing here touches rayon's global pool, so two caches, or a
/// cache and its host program, don't share settings.
///
/// They start with the first call that is worth it: a cache that only keeps tables, or serves one
/// short sequence, has none. They belong to one process: the child of a `fork` has none of its
/// parent's threads, and starts its own.
pub struct ThreadPool {
    num_threads: usize,
    started: OnceBox<Started>,
}

/// The threads of one process.
struct Started {
    process: u32,
    /// None only while being dropped.
    pool: Option<rayon::ThreadPool>,
    /// Those of a child of that process.
    of_child: OnceBox<Started>,
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            // Ending threads takes locks that they may have held when the process was copied.
            mem::forget(self.pool.take());
        }
    }
}

/// Where one call's work runs; `None` is the caller's thread.
#[derive(Clone, Copy)]
pub(super) struct Workers<'a>(Option<&'a rayon::ThreadPool>);

/// More threads than the largest machines have cores: a mistake that would bring this one down.
const MOST_THREADS: usize = 1024;

/// Below this many multiply-adds (some 20 microseconds of one core) waking threads costs more than
/// it saves, and the caller's thread does the work.
const WORTH_WAKING: u64 = 400_000;

impl ThreadPool {
    /// A pool of `num_threads`; `None` takes as many as the process may use at once. One thread
    /// means the caller's.
    ///
    /// # Errors
    /// [`Error::Value`] for 0 or more than 1024 threads.
    pub fn new(num_threads: Option<usize>) -> Result<Self> {
        let available = || std::thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS));
        match num_threads.unwrap_or_else(available) {
            num_threads @ 1..=MOST_THREADS => Ok(Self { num_threads, started: OnceBox::new() }),
            n => Err(Error::Value(format!("num_threads must be 1 to {MOST_THREADS}, not {n}"))),
        }
    }

    /// Threads that share the work.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Threads for `work` multiply-adds.
    ///
    /// # Errors
    /// [`Error::Value`] where the system refuses to start them; a later call tries again.
    pub(super) fn workers(&self, work: u64) -> Result<Workers<'_>> {
        if self.num_threads == 1 || work < WORTH_WAKING {
            return Ok(Workers(None));
        }
        let process = std::process::id();
        let mut place = &self.started;
        loop {
            match place.get() {
                Some(started) if started.process == process => {
                    return Ok(Workers(started.pool.as_ref()));
                }
                Some(started) => place = &started.of_child,
                None => {
                    let pool = Some(self.start()?);
                    // If another thread was faster, its threads are used and these end.
                    place.get_or_make(|| Started { process, pool, of_child: OnceBox::new() });
                }
            }
        }
    }

    fn start(&self) -> Result<rayon::ThreadPool> {
        rayon::ThreadPoolBuilder::new()
            .num_threads(self.num_threads)
            .thread_name(|i| format!("paged-kv-{i}"))
            .build()
            .map_err(|e| Error::Value(format!("cannot start {} threads: {e}", self.num_threads)))
    }
}

impl Workers<'_> {
    /// How many there are.
    pub(super) fn count(self) -> usize {
        self.0.map_or(1, rayon::ThreadPool::current_num_threads)
    }

    /// Runs `run` on every task, in any order.
    pub(super) fn for_each<T: Send>(self, tasks: Vec<T>, run: impl Fn(T) + Sync + Send) {
        match self.0 {
            Some(pool) if tasks.len() > 1 => {
                // A task may be a thousand times another: each may move to an idle thread.
                pool.install(|| tasks.into_par_iter().with_max_len(1).for_each(run));
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
