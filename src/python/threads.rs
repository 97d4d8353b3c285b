//! The threads that the free functions share; a cache has its own.

use std::sync::{Arc, Mutex, PoisonError};

use crate::attention::ThreadPool;
use crate::error::Result;

/// A pool, by the number of threads that was asked for.
type Kept = (Option<usize>, Arc<ThreadPool>);

/// A pool of `num_threads` threads (`None`: all that the process may use), started at first use.
///
/// Pools are kept, one per size, since starting threads costs more than a decode step.
pub(super) fn shared(num_threads: Option<usize>) -> Result<Arc<ThreadPool>> {
    static POOLS: Mutex<Vec<Kept>> = Mutex::new(Vec::new());
    let lock = || POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    let find = |pools: &[Kept]| {
        pools.iter().find(|(kept, _)| *kept == num_threads).map(|(_, pool)| Arc::clone(pool))
    };
    if let Some(pool) = find(&lock()) {
        return Ok(pool);
    }
    // Outside the lock, so that nothing fails inside. And once: to find out how many threads the process
    // may use, the standard library reads files, which takes longer than attention to a short sequence.
    let new = Arc::new(ThreadPool::new(num_threads)?);
    let mut pools = lock();
    Ok(find(&pools).unwrap_or_else(|| {
        pools.push((num_threads, Arc::clone(&new)));
        new
    }))
}
