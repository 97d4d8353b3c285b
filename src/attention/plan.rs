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
use crate::error::Result;
use crate::kernels::{self, Block, Call, Level, PREFILL, SPLIT, State};
use crate::storage::RowsViewMut;

/// Rows per KV head that a block of many queries aims at: enough to make a tile of keys ready for,
/// few enough for their sums to stay in a near cache.
const ROWS_PER_KV_HEAD: usize = 512;

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
    task: Task<'a>,
    /// What it has in common with others, by number, in ascending order of splits.
    shared: Vec<usize>,
    /// Its own splits, behind those.
    parts: Vec<Option<State>>,
}

/// `None` for each of so many splits.
fn no_parts(splits: usize) -> Vec<Option<State>> {
    std::iter::repeat_with(|| None).take(splits).collect()
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
    let (mut whole, mut split) = (Vec::new(), Vec::new());
    for task in tasks {
        // Worth splitting: more than its share of a thread's work.
        let long = task.work * 4 * threads.num_threads() as u64 > total && threads.num_threads() > 1;
        let splits = task.block.splits(call.mask).len();
        let shared = shared_by[task.sequence].clone();
        if !shared.is_empty() || long && splits > 1 {
            let parts = no_parts(splits - covered(&shared));
            split.push(Split { task, shared, parts });
        } else {
            whole.push(task);
        }
    }
    let mut common: Vec<_> = shared.iter().map(|shared| no_parts(shared.splits.len())).collect();
    let common_jobs = shared.iter().zip(&mut common).flat_map(|(shared, parts)| {
        let job = |(number, part)| Job::Part { block: shared.block, number, part };
        shared.splits.clone().zip(parts).map(job)
    });
    let part_jobs = split.iter_mut().flat_map(|Split { task, shared, parts }| {
        let Range { start, end } = task.block.splits(call.mask);
        let block = task.block;
        let own = start.max(covered(shared))..end;
        own.zip(parts).map(move |(number, part)| Job::Part { block, number, part })
    });
    let jobs = common_jobs.chain(part_jobs).chain(whole.into_iter().map(Job::Whole)).collect();
    workers.for_each(jobs, |job| match job {
        Job::Part { block, number, part } => {
            *part = Some(kernels::attend(level, call, &block, number..number + 1));
        }
        Job::Whole(task) => {
            let splits = task.block.splits(call.mask);
            kernels::attend(level, call, &task.block, splits).finish(call, &task.block, task.out, task.lse);
        }
    });
    workers.for_each(split, |Split { task, shared: numbers, parts }| {
        let begin = numbers.into_iter().flat_map(|number| {
            let parts = common[number].iter().flatten();
            parts.map(move |part| (number, part))
        });
        let begin = begin.map(|(number, part)| part.part(&shared[number].block, &task.block, call.group()));
        let whole = begin.chain(parts.into_iter().flatten()).reduce(|mut whole, part| {
            whole.merge(&part);
            whole
        });
        // One at least: tasks of one piece are whole.
        if let Some(whole) = whole {
            whole.finish(call, &task.block, task.out, task.lse);
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
    /// One split of a long block.
    Part { block: Block<'a>, number: usize, part: &'b mut Option<State> },
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
