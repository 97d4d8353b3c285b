//! The threads that the free functions share; a cache has its own.

use std::sync::{Arc, Mutex, PoisonError};

use crate::attention::ThreadPool;
use crate::error::Result;

/// A pool of `num_threads` threads (`None`: all that the process may use), started at first use.
///
/// Pools are kept, one per size, since starting threads costs more than a decode step.
pub(super) fn shared(num_threads: Option<usize>) -> Result<Arc<ThreadPool>> {
    type Kept = (Option<usize>, Arc<ThreadPool>);
    static POOLS: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

    // Made before the lock is taken, and cheap until it starts threads; so nothing fails inside.
    let new = Arc::new(ThreadPool::new(num_threads)?);
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, pool)) = pools.iter().find(|(kept, _)| *kept == num_threads) {
        return Ok(Arc::clone(pool));
    }
    pools.push((num_threads, Arc::clone(&new)));
    Ok(new)
}
