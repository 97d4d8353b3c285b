//! The threads that the free functions share; a cache has its own.

use std::sync::{Arc, Mutex, PoisonError};

use crate::attention::ThreadPool;
use crate::error::Result;

/// A pool of `num_threads` threads (`None`: all that the process may use), started at first use.
///
/// Pools are kept, one per size, since starting threads costs more than a decode step. They belong
/// to one process: the child of a `fork` has none of its parent's threads and starts its own.
pub(super) fn shared(num_threads: Option<usize>) -> Result<Arc<ThreadPool>> {
    struct Kept {
        process: u32,
        num_threads: Option<usize>,
        pool: Arc<ThreadPool>,
    }
    static POOLS: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

    let process = std::process::id();
    let find = |pools: &[Kept]| {
        let same = |kept: &&Kept| kept.process == process && kept.num_threads == num_threads;
        pools.iter().find(same).map(|kept| Arc::clone(&kept.pool))
    };
    // Nothing panics while the lock is held, and what it guards is whole at every step.
    if let Some(pool) = find(&POOLS.lock().unwrap_or_else(PoisonError::into_inner)) {
        return Ok(pool);
    }
    let pool = Arc::new(ThreadPool::new(num_threads)?);
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = find(&pools) {
        return Ok(pool);
    }
    // A parent's pools stay where they are: dropping them here would wait for threads that are not.
    pools.push(Kept { process, num_threads, pool: Arc::clone(&pool) });
    Ok(pool)
}
