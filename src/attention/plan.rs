//! Cutting a call into tasks: blocks of neighbouring queries, and splits of long sequences.
//!
//! How it is cut changes who computes what and when, never a bit of the result: splits lie at fixed
//! positions and are always joined first to last.

use super::ThreadPool;
use super::check::Sequence;
use crate::error::Result;
use crate::kernels::{self, Block, Call, Level, State};
use crate::storage::RowsViewMut;

/// Rows per KV head that one block aims at: enough to use a tile of keys often, few enough for
/// their sums to stay in a near cache.
const ROWS_PER_KV_HEAD: usize = 64;

/// A block, and where its results go.
struct Task<'a> {
    block: Block<'a>,
    out: RowsViewMut<'a>,
    lse: Option<&'a mut [f32]>,
    /// Multiply-adds per row, roughly.
    work: u64,
}

/// Computes every row of `out` and `lse`; arguments are checked.
///
/// # Errors
/// If no thread can be started; nothing is written then.
pub(super) fn run(
    level: Level,
    call: &Call,
    sequences: &[Sequence],
    out: &mut RowsViewMut,
    lse: Option<&mut [f32]>,
    threads: &ThreadPool,
) -> Result<()> {
    let tasks = cut(call, sequences, out, lse);
    let work = tasks.iter().map(|task| task.work).sum();
    let workers = threads.workers(work)?;
    let (mut whole, mut split) = (Vec::new(), Vec::new());
    for task in tasks {
        // Worth splitting: more than its share of a thread's work.
        let long = task.work * 4 * threads.num_threads() as u64 > work && threads.num_threads() > 1;
        if long && task.block.splits(call.mask).len() > 1 {
            let parts = task.block.splits(call.mask).map(|_| None::<State>).collect::<Vec<_>>();
            split.push((task, parts));
        } else {
            whole.push(task);
        }
    }
    let part_jobs = split.iter_mut().flat_map(|(task, parts)| {
        let block = task.block;
        block.splits(call.mask).zip(parts).map(move |(number, part)| Job::Part { block, number, part })
    });
    let jobs = part_jobs.chain(whole.into_iter().map(Job::Whole)).collect();
    workers.for_each(jobs, |job| match job {
        Job::Part { block, number, part } => *part = Some(kernels::attend(level, call, &block, number)),
        Job::Whole(task) => {
            let parts = task.block.splits(call.mask).map(|n| kernels::attend(level, call, &task.block, n));
            join(call, &task.block, parts).finish(call, &task.block, task.out, task.lse);
        }
    });
    workers.for_each(split, |(task, parts)| {
        let parts = parts.into_iter().flatten();
        join(call, &task.block, parts).finish(call, &task.block, task.out, task.lse);
    });
    Ok(())
}

enum Job<'a, 'b> {
    /// One split of a long block.
    Part { block: Block<'a>, number: usize, part: &'b mut Option<State> },
    /// All splits of a block.
    Whole(Task<'a>),
}

/// Joins parts, first to last.
fn join(call: &Call, block: &Block, mut parts: impl Iterator<Item = State>) -> State {
    let mut sum = parts.next().unwrap_or_else(|| State::unseen(call, block));
    for part in parts {
        sum.merge(&part);
    }
    sum
}

/// Blocks in the order of their rows; rows of no sequence become blocks without keys.
fn cut<'a>(
    call: &Call,
    sequences: &[Sequence<'a>],
    out: &'a mut RowsViewMut,
    mut lse: Option<&'a mut [f32]>,
) -> Vec<Task<'a>> {
    let (k, v) = (call.key_pages.layout(), call.value_pages.layout());
    let [tokens, num_heads, head_dim] = call.query.shape();
    let most = (ROWS_PER_KV_HEAD * k.num_heads / num_heads).max(1);
    let covered = sequences.last().map_or(0, |s| s.first_row + s.num_queries);
    let nobody = Sequence { pages: &[], first_row: covered, num_queries: tokens - covered, len: 0 };
    let mut out = out.reborrow();
    let mut tasks = Vec::new();
    for s in sequences.iter().chain([&nobody]) {
        for first in (0..s.num_queries).step_by(most) {
            let num_queries = most.min(s.num_queries - first);
            let (mine, rest) = out.split_at(num_queries);
            out = rest;
            let lse = lse.take().map(|all| {
                let (mine, rest) = all.split_at_mut(num_queries * num_heads);
                lse = Some(rest);
                mine
            });
            let block = Block {
                pages: s.pages,
                len: s.len,
                first_row: s.first_row + first,
                num_queries,
                position: s.len as i64 - s.num_queries as i64 + first as i64,
            };
            let keys = block.seen(call.mask).len();
            let work = (num_queries * num_heads * (head_dim + v.head_dim)) as u64 * (keys as u64 + 1);
            tasks.push(Task { block, out: mine, lse, work });
        }
    }
    tasks
}
