//! Tokens that several sequences begin with, attended to once for all of them (Juravsky et al.,
//! "Hydragen"; Ye et al., "Cascade inference").
//!
//! A few queries take as long as reading their keys takes. Where neighbours in the batch have the same
//! first pages, such as answers to one prompt or prompts behind one system prompt, the keys in those
//! pages are read once, by a block that holds the queries of all of them; sequences that have more in
//! common than their neighbours share that as well. What a row sees of a split depends neither on
//! the rows beside it nor on where the split is computed, so no bit of the result changes.

use std::ops::Range;

use super::check::Sequence;
use crate::kernels::{Block, Call, PREFILL, SPLIT};

/// Rows per KV head that a block of several sequences has at least, if there are so many: below
/// that, reading keys still takes longer than using them.
const ROWS_PER_KV_HEAD: usize = 64;

/// Neighbouring sequences, and splits whose pages they have in common.
pub(super) struct Shared<'a> {
    /// Positions in the batch.
    pub(super) sequences: Range<usize>,
    /// All their queries, over the common pages.
    pub(super) block: Block<'a>,
    pub(super) splits: Range<usize>,
}

/// What is worth sharing. The splits of any one sequence follow each other, from the first on.
pub(super) fn find<'a>(call: &Call, sequences: &[Sequence<'a>]) -> Vec<Shared<'a>> {
    // A window hides keys, and a slope weighs them, by the position of each query.
    if call.mask.window_left.is_some() || call.slopes.is_some() {
        return Vec::new();
    }
    let layout = call.key_pages.layout();
    let common = sequences.windows(2).map(|pair| {
        let pages = pair[0].pages.iter().zip(pair[1].pages).take_while(|(a, b)| a == b).count();
        let tokens = (pages * layout.page_size).min(decoded(call, &pair[0])).min(decoded(call, &pair[1]));
        tokens / SPLIT
    });
    let mut found = Vec::new();
    share(&common.collect::<Vec<_>>(), 0..sequences.len(), 0, &mut |run, splits| {
        let rows: usize = sequences[run.clone()].iter().map(|s| s.num_queries * call.group()).sum();
        for sequences_of_block in cut(run, rows) {
            let of_block = &sequences[sequences_of_block.clone()];
            let len = splits.end * SPLIT;
            let block = Block {
                pages: of_block[0].pages,
                len,
                first_row: of_block[0].first_row,
                num_queries: of_block.iter().map(|s| s.num_queries).sum(),
                // Behind all of these keys, as every query is.
                position: len as i64,
                first_kv_head: 0,
                num_kv_heads: layout.num_heads,
                prefill: false,
            };
            found.push(Shared { sequences: sequences_of_block, block, splits: splits.clone() });
        }
    });
    found
}

/// Tokens that each of a sequence's queries sees, if these are few enough to be decoded.
fn decoded(call: &Call, sequence: &Sequence) -> usize {
    match sequence.num_queries {
        n @ 1..PREFILL if call.mask.causal => (sequence.len + 1).saturating_sub(n),
        1..PREFILL => sequence.len,
        _ => 0,
    }
}

/// Finds, among the sequences of `range`, runs that have splits in common from `from` on, where
/// `common[i]` is how many sequence `i` has in common with the next: `found(sequences, splits)`, and
/// then what some of these have in common beyond.
fn share(
    common: &[usize],
    range: Range<usize>,
    from: usize,
    found: &mut impl FnMut(Range<usize>, Range<usize>),
) {
    let mut start = range.start;
    while start + 1 < range.end {
        let links = common[start..range.end - 1].iter().take_while(|&&common| common > from);
        let (links, to) = links.fold((0, usize::MAX), |(links, to), &common| (links + 1, to.min(common)));
        let run = start..start + links + 1;
        start = run.end;
        if links > 0 {
            found(run.clone(), from..to);
            share(common, run, to, found);
        }
    }
}

/// Blocks of about as many sequences each, and of more than one.
fn cut(run: Range<usize>, rows: usize) -> impl Iterator<Item = Range<usize>> {
    let blocks = (rows / ROWS_PER_KV_HEAD).clamp(1, run.len() / 2);
    let start = move |block: usize| run.start + run.len() * block / blocks;
    (0..blocks).map(move |block| start(block)..start(block + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(common: &[usize]) -> Vec<(Range<usize>, Range<usize>)> {
        let mut found = Vec::new();
        share(common, 0..common.len() + 1, 0, &mut |run, splits| found.push((run, splits)));
        found
    }

    #[test]
    fn neighbours_share_what_all_have_in_common_and_then_what_some_have() {
        assert_eq!(shared(&[]), []);
        assert_eq!(shared(&[0, 0]), []);
        assert_eq!(shared(&[3]), [(0..2, 0..3)]);
        assert_eq!(shared(&[2, 2, 0, 1]), [(0..3, 0..2), (3..5, 0..1)]);
        assert_eq!(shared(&[1, 4, 1, 2]), [(0..5, 0..1), (1..3, 1..4), (3..5, 1..2)]);
        assert_eq!(shared(&[1, 2, 3]), [(0..4, 0..1), (1..4, 1..2), (2..4, 2..3)]);
    }

    #[test]
    fn no_sequence_is_left_alone_with_a_block() {
        for len in 2..100 {
            for rows in [1, 63, 64, 200, 100_000] {
                let blocks: Vec<_> = cut(7..7 + len, rows).collect();
                assert_eq!((blocks[0].start, blocks[blocks.len() - 1].end), (7, 7 + len));
                assert!(blocks.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(blocks.iter().all(|block| block.len() > 1), "{len} sequences, {rows} rows");
            }
        }
    }
}
