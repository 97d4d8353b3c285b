//! Cutting a call into tasks: blocks of neighbouring queries, and splits of long sequences.
//!
//! Splits that neighbouring sequences have in common are computed for all of them together
//! ([`cascade`](super::cascade)).
//!
//! How it is cut changes who computes what and when, never a bit of the result: splits lie at fixed
//! positions and are always joined first to last.

use std::ops::Range;

use super::ThreadPool;
use super::cascade::{self, Shared};
use super::check::Sequence;
use super::fold::Fold;
use crate::error::Result;
use crate::kernels::{self, Block, Call, Level, PREFILL, SPLIT, State};
use crate::storage::RowsViewMut;

/// Rows per KV head that a block of many queries aims at: enough to make a tile of keys ready for,
/// few enough for their sums to stay in a near cache.
const ROWS_PER_KV_HEAD: usize = 512;

/// Jobs for each thread, at least, where there are splits enough.
const JOBS: u64 = 16;

/// A block, and where its results go.
struct Task<'a> {
    block: Block<'a>,
    out: RowsViewMut<'a>,
    lse: Option<RowsViewMut<'a>>,
    /// Position of its sequence in the batch.
    sequence: usize,
    /// Multiply-adds, roughly.
    work: u64,
}

/// A task in several pieces.
struct Split<'a> {
    block: Block<'a>,
    sequence: usize,
    /// Number of its first split, and those that it has not in common with others, so many of them in one job.
    first: usize,
    own: Range<usize>,
    together: usize,
    parts: Fold<State, Task<'a>>,
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
    let shared = cascade::find(call, sequences);
    let mut shared_by = vec![Vec::new(); sequences.len() + 1];
    for (number, Shared { sequences, .. }) in shared.iter().enumerate() {
        shared_by[sequences.clone()].iter_mut().for_each(|numbers| numbers.push(number));
    }
    let covered = |numbers: &[usize]| numbers.last().map_or(0, |&number| shared[number].splits.end);
    let mut tasks = cut(call, sequences, out, lse)?;
    for task in &mut tasks {
        task.work -= work(call, &task.block, covered(&shared_by[task.sequence]) * SPLIT);
    }
    let common = shared.iter().map(|shared| work(call, &shared.block, shared.splits.len() * SPLIT));
    let total = tasks.iter().map(|task| task.work).chain(common).sum();
    let workers = threads.workers(total)?;
    let several = workers.count() > 1;
    // Threads wait for the last job no longer than one takes.
    let most = total.div_ceil(JOBS * workers.count() as u64).max(1);
    let (mut whole, mut split) = (Vec::new(), Vec::new());
    for task in tasks {
        let Task { block, sequence, work, .. } = task;
        let Range { start: first, end } = block.splits(call.mask);
        let own = first.max(covered(&shared_by[sequence]))..end;
        // Splits of one job.
        let together = ((own.len() as u64).saturating_mul(most) / work.max(1)).max(1) as usize;
        if own.start > first || several && together < own.len() {
            split.push(Split { block, sequence, first, own, together, parts: Fold::new(end - first, task) });
        } else {
            whole.push(task);
        }
    }
    let common_jobs = shared
        .iter()
        .flat_map(|shared| shared.splits.clone().map(move |number| Job::Common { shared, number }));
    let part_jobs = split.iter().flat_map(|of| {
        let starts = of.own.clone().step_by(of.together);
        starts.map(move |start| Job::Part { of, splits: start..of.own.end.min(start + of.together) })
    });
    let jobs = common_jobs.chain(part_jobs).chain(whole.into_iter().map(Job::Whole)).collect();
    let join = |whole: &mut State, next: &State| kernels::merge(level, whole, next);
    let add = |of: &Split, number: usize, part: State| {
        if let Some((whole, Task { out, lse, .. })) = of.parts.add(number - of.first, part, join) {
            whole.finish(call, &of.block, out, lse);
        }
    };
    workers.for_each(jobs, |job| match job {
        Job::Common { shared: Shared { sequences, block, .. }, number } => {
            kernels::attend(level, call, block, number..number + 1, &mut |state| {
                let first = split.partition_point(|of| of.sequence < sequences.start);
                for of in split[first..].iter().take_while(|of| of.sequence < sequences.end) {
                    add(of, number, state.part(block, &of.block, call.group()));
                }
            });
        }
        Job::Part { of, splits } => {
            let mut number = splits.start;
            kernels::attend(level, call, &of.block, splits, &mut |state| {
                add(of, number, state);
                number += 1;
            });
        }
        Job::Whole(Task { block, out, lse, .. }) => {
            let mut whole = None;
            kernels::attend(level, call, &block, block.splits(call.mask), &mut |state| match &mut whole {
                Some(whole) => join(whole, &state),
                None => whole = Some(state),
            });
            // One at least.
            if let Some(whole) = whole {
                whole.finish(call, &block, out, lse);
            }
        }
    });
    Ok(())
}

/// Multiply-adds of a block with so many keys.
fn work(call: &Call, block: &Block, keys: usize) -> u64 {
    let dims = call.key_pages.layout().head_dim + call.value_pages.layout().head_dim;
    (block.rows(call) * dims) as u64 * keys as u64
}

enum Job<'a, 'b> {
    /// One split that several sequences have in common.
    Common { shared: &'b Shared<'a>, number: usize },
    /// Some splits of a long block.
    Part { of: &'b Split<'a>, splits: Range<usize> },
    /// All splits of a block.
    Whole(Task<'a>),
}

/// Blocks in the order of their rows; rows of no sequence become blocks without keys.
///
/// A few queries keep all heads together, since memory holds a page's heads together; of many, each
/// KV head is a block of its own.
fn cut<'a>(
    call: &Call,
    sequences: &[Sequence<'a>],
    out: &'a mut RowsViewMut,
    lse: Option<&'a mut [f32]>,
) -> Result<Vec<Task<'a>>> {
    let k = call.key_pages.layout();
    let [tokens, num_heads, _] = call.query.shape();
    let most = (ROWS_PER_KV_HEAD / call.group()).max(1);
    let covered = sequences.last().map_or(0, |s| s.first_row + s.num_queries);
    let nobody = Sequence { pages: &[], first_row: covered, num_queries: tokens - covered, len: 0 };
    let mut out = out.reborrow();
    let mut lse = lse.map(|lse| RowsViewMut::from_slice(lse, [tokens, num_heads, 1])).transpose()?;
    let mut tasks = Vec::new();
    for (sequence, s) in sequences.iter().chain([&nobody]).enumerate() {
        let prefill = s.num_queries >= PREFILL;
        let num_kv_heads = if prefill { 1 } else { k.num_heads };
        for first in (0..s.num_queries).step_by(most) {
            let num_queries = most.min(s.num_queries - first);
            let (mut here, rest) = out.split_at(num_queries);
            out = rest;
            let mut lse_here = lse.take().map(|all| {
                let (here, rest) = all.split_at(num_queries);
                lse = Some(rest);
                here
            });
            for first_kv_head in (0..k.num_heads).step_by(num_kv_heads) {
                let heads = num_kv_heads * call.group();
                let (mine, rest) = here.split_heads_at(heads);
                here = rest;
                let lse = lse_here.take().map(|all| {
                    let (mine, rest) = all.split_heads_at(heads);
                    lse_here = Some(rest);
                    mine
                });
                let block = Block {
                    pages: s.pages,
                    len: s.len,
                    first_row: s.first_row + first,
                    num_queries,
                    position: s.len as i64 - s.num_queries as i64 + first as i64,
                    first_kv_head,
                    num_kv_heads,
                    prefill,
                };
                let keys = block.seen(call.mask).len();
                tasks.push(Task { block, out: mine, lse, sequence, work: work(call, &block, keys + 1) });
            }
        }
    }
    Ok(tasks)
}
