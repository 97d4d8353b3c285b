//! The threads that attention runs on.

use std::fmt;
use std::mem;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::sync::{AtomicUsize, OnceBox, Ordering, hint};

/// A number of threads, the caller's among them: nothing here touches rayon's global pool, so two caches, or a
/// cache and its host program, don't share settings.
///
/// They start with the first call that is worth it: a cache that only keeps tables, or serves one
/// short sequence, has none. They belong to one process: the child of a `fork` has none of its
/// parent's threads, and starts its own.
pub struct ThreadPool {
    num_threads: usize,
    started: OnceBox<Started>,
}

/// The threads of one process, besides callers'.
struct Started {
    process: u32,
    /// None only while being dropped.
    pool: Option<rayon::ThreadPool>,
    /// Those that no call has taken.
    idle: AtomicUsize,
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

/// Where one call's work runs: on the caller's thread, and on others that are idle then.
#[derive(Clone, Copy)]
pub(super) struct Workers<'a>(Option<&'a Started>);

/// More threads than the largest machines have cores: a mistake that would bring this one down.
const MOST_THREADS: usize = 1024;

/// Below this many multiply-adds (some 20 microseconds of one core) waking threads costs more than
/// it saves, and the caller's thread does the work.
const WORTH_WAKING: u64 = 400_000;

/// So long at most, and half as long as it worked, the caller's thread looks whether the others are done before it
/// sleeps: about what waking it takes. It doesn't yield, as another process might keep the core for milliseconds.
const PATIENCE: Duration = Duration::from_micros(200);

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

    /// Threads that share a call's work, the caller's among them.
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
                    return Ok(Workers(Some(started)));
                }
                Some(started) => place = &started.of_child,
                None => {
                    let (pool, idle) = (Some(self.start()?), AtomicUsize::new(self.num_threads - 1));
                    // If another thread was faster, its threads are used and these end.
                    place.get_or_make(|| Started { process, pool, idle, of_child: OnceBox::new() });
                }
            }
        }
    }

    fn start(&self) -> Result<rayon::ThreadPool> {
        rayon::ThreadPoolBuilder::new()
            .num_threads(self.num_threads - 1)
            .thread_name(|i| format!("paged-kv-{i}"))
            .build()
            .map_err(|e| Error::Value(format!("cannot start {} threads: {e}", self.num_threads - 1)))
    }
}

impl Started {
    /// Takes idle threads, as many as there are up to `most`.
    fn take(&self, most: usize) -> Taken<'_> {
        let take = |idle: usize| Some(idle - idle.min(most));
        // Relaxed, here and where they are given back: a number of threads, and tasks pass through the pool.
        let idle = self.idle.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).unwrap_or(0);
        Taken { idle: &self.idle, count: idle.min(most) }
    }
}

/// Threads taken by a call.
struct Taken<'a> {
    idle: &'a AtomicUsize,
    count: usize,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.idle.fetch_add(self.count, Ordering::Relaxed);
    }
}

impl Workers<'_> {
    /// How many there are, if all are idle.
    pub(super) fn count(self) -> usize {
        let pool = self.0.and_then(|started| started.pool.as_ref());
        1 + pool.map_or(0, rayon::ThreadPool::current_num_threads)
    }

    /// Runs `run` on every task: they begin in order, each as soon as a thread is free, for one may be a thousand
    /// times another. Threads at work for another call are not waited for.
    pub(super) fn for_each<T: Send>(self, tasks: Vec<T>, run: impl Fn(T) + Sync + Send) {
        let most = tasks.len().saturating_sub(1);
        let others = self.0.map(|started| (started, started.take(most)));
        let Some((Started { pool: Some(pool), .. }, Taken { count: others @ 1.., .. })) = &others else {
            return tasks.into_iter().for_each(run);
        };
        let tasks: Vec<_> = tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
        let (begun, ended, start) = (AtomicUsize::new(0), AtomicUsize::new(0), Instant::now());
        let work = || {
            // Relaxed: numbers are given once each, and nothing else goes by them.
            while let Some(task) = tasks.get(begun.fetch_add(1, Ordering::Relaxed)) {
                let task = task.lock().unwrap_or_else(PoisonError::into_inner).take();
                task.into_iter().for_each(&run);
            }
        };
        pool.in_place_scope(|scope| {
            for _ in 0..*others {
                scope.spawn(|_| {
                    work();
                    // Relaxed, as below: results pass through the end of the scope.
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            }
            work();
            let worked = start.elapsed();
            let until = worked + PATIENCE.min(worked / 2);
            while ended.load(Ordering::Relaxed) < *others && start.elapsed() < until {
                hint::spin_loop();
            }
        });
    }
}

impl fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadPool").field("num_threads", &self.num_threads()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::mpsc::channel;
    use std::sync::{Barrier, Mutex};
    use std::thread;
    use std::time::Duration;

    use super::ThreadPool;

    fn run<T: Send>(pool: &ThreadPool, tasks: Vec<T>, run: impl Fn(T) + Sync + Send) {
        pool.workers(u64::MAX).unwrap().for_each(tasks, run);
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 3, 7] {
            let pool = ThreadPool::new(Some(threads)).unwrap();
            assert_eq!(pool.workers(u64::MAX).unwrap().count(), threads);
            for count in [0, 1, 2, 7, 1000] {
                let done = Mutex::new(Vec::new());
                run(&pool, (0..count).collect(), |task: usize| done.lock().unwrap().push(task));
                let mut done = done.into_inner().unwrap();
                done.sort_unstable();
                assert_eq!(done, (0..count).collect::<Vec<_>>(), "{threads} threads");
            }
        }
    }

    #[test]
    fn as_many_threads_work_as_were_asked_for_and_the_callers_is_one_of_them() {
        let pool = ThreadPool::new(Some(3)).unwrap();
        // Nobody gets past it before all three are there.
        let (barrier, seen) = (Barrier::new(3), Mutex::new(Vec::new()));
        run(&pool, vec![(); 3], |()| {
            barrier.wait();
            seen.lock().unwrap().push(thread::current().id());
        });
        let seen = seen.into_inner().unwrap();
        assert!(seen.contains(&thread::current().id()) && seen.len() == 3);
    }

    #[test]
    fn a_call_does_not_wait_for_threads_at_work_for_another() {
        let pool = ThreadPool::new(Some(2)).unwrap();
        thread::scope(|scope| {
            let (begun, both_begun) = channel();
            let (end, told_to_end) = channel::<()>();
            let told_to_end = Mutex::new(told_to_end);
            let pool = &pool;
            scope.spawn(move || {
                run(pool, vec![begun.clone(), begun], |begun| {
                    begun.send(()).unwrap();
                    // Until the other side is gone.
                    _ = told_to_end.lock().unwrap().recv();
                });
            });
            both_begun.recv().unwrap();
            both_begun.recv().unwrap();
            let (done, is_done) = channel();
            scope.spawn(move || {
                let caller = thread::current().id();
                run(pool, vec![(); 10], |()| assert_eq!(thread::current().id(), caller));
                done.send(()).unwrap();
            });
            let in_time = is_done.recv_timeout(Duration::from_secs(100));
            drop(end);
            in_time.expect("a call of its own thread");
        });
        // Both are idle again.
        let barrier = Barrier::new(2);
        run(&pool, vec![(); 2], |()| {
            barrier.wait();
        });
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_leaves_all_threads_idle() {
        let pool = ThreadPool::new(Some(3)).unwrap();
        for _ in 0..10 {
            let tasks = || run(&pool, (0..100).collect(), |task: usize| assert!(task % 7 != 3, "on purpose"));
            catch_unwind(AssertUnwindSafe(tasks)).unwrap_err();
        }
        let barrier = Barrier::new(3);
        run(&pool, vec![(); 3], |()| {
            barrier.wait();
        });
    }
}
