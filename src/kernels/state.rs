//! What attention over some of the keys leaves behind, and how such parts are joined.

use std::f64::consts::LN_2;

use super::flash::{Block, Call};
use super::pairs::unzip;
use super::rows::store_row;
use super::scratch::Scratch;
use super::simd::{Job, Simd};
use super::softmax::rescale;
use super::stored::gather_neighbours;
use crate::storage::RowsViewMut;

/// The order of elements in a row that vectors of so many lanes work on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Their own.
    Straight,
    /// As [`deal_neighbours`](super::stored::deal_neighbours) leaves them.
    Dealt {
        /// Of a vector.
        lanes: usize,
        /// Among which neighbours are dealt.
        vectors: usize,
    },
    /// Of sums over values that [`zip`](super::integers::Integers::zip) put together; queries are straight where that
    /// takes 2 `vectors`, and their [words zipped](super::pairs::zip_words) where it takes 4.
    Zipped {
        /// Of a vector.
        lanes: usize,
        /// Among which neighbours are dealt.
        vectors: usize,
    },
}

/// Unnormalised attention of a block's rows over a part of the keys.
///
/// Rows are in the order (KV head, query, head of its group), so that what shares keys lies together.
#[derive(Debug)]
pub(crate) struct State {
    /// `[rows, stride]`: sums of weight times value.
    pub(super) acc: Scratch,
    /// Elements from a row of `acc` to the next: `v_head_dim` rounded up to whole vectors.
    pub(super) stride: usize,
    pub(super) order: Order,
    /// The logit, as a power of 2, that each row's weights are relative to: its largest so far, or one little less;
    /// -inf where it saw no key.
    pub(super) reference: Vec<f32>,
    /// Sum of each row's weights; 0 where it saw no key.
    pub(super) sum: Vec<f32>,
}

impl State {
    /// Rows that saw no key.
    pub(super) fn new(rows: usize, stride: usize, order: Order) -> Self {
        Self {
            acc: Scratch::zeros(rows * stride),
            stride,
            order,
            reference: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
        }
    }

    /// Rows of the same shape that saw no key.
    pub(super) fn like(&self) -> Self {
        Self::new(self.reference.len(), self.stride, self.order)
    }

    /// What some of a block's queries saw: those of `part`, which has the same heads.
    pub(crate) fn part(&self, block: &Block, part: &Block, group: usize) -> Self {
        let (all, rows) = (block.num_queries * group, part.num_queries * group);
        let first = (part.first_row - block.first_row) * group;
        let mut state = Self::new(rows * part.num_kv_heads, self.stride, self.order);
        for kv_head in 0..part.num_kv_heads {
            let (from, into) = (kv_head * all + first, kv_head * rows);
            state.reference[into..][..rows].copy_from_slice(&self.reference[from..][..rows]);
            state.sum[into..][..rows].copy_from_slice(&self.sum[from..][..rows]);
            state.acc[into * self.stride..][..rows * self.stride]
                .copy_from_slice(&self.acc[from * self.stride..][..rows * self.stride]);
        }
        state
    }

    /// Adds what the same rows saw in the next part of the keys.
    pub(super) fn merge<S: Simd>(&mut self, simd: S, next: &Self) {
        assert_eq!(self.acc.len(), next.acc.len(), "parts of different blocks");
        // SAFETY: it asks for nothing.
        unsafe { simd.call(Merge { state: self, next }) }
    }

    /// Normalises and rounds into `out` (and `lse`, of width 1), whose rows are the block's queries
    /// and heads.
    pub(crate) fn finish(
        mut self,
        call: &Call,
        block: &Block,
        mut out: RowsViewMut,
        mut lse: Option<RowsViewMut>,
    ) {
        let [_, _, dim] = out.shape();
        let group = call.group();
        for row in 0..self.reference.len() {
            let (kv_head, rest) = (row / (block.num_queries * group), row % (block.num_queries * group));
            let (query, head) = (rest / group, kv_head * group + rest % group);
            let first_head = block.first_kv_head * group;
            // As a sink has it, which is to come back as it was where it is all that counts.
            let reference = f64::from(self.reference[row]) * LN_2;
            let sink = call.sinks.map_or(f64::NEG_INFINITY, |sinks| f64::from(sinks[first_head + head]));
            let max = reference.max(sink);
            // Nothing seen at all: 0 and -inf, not 0/0.
            let mut sum = self.sum[row];
            let mut factor = 0.0;
            if max > f64::NEG_INFINITY {
                let [kept, of_sink] = [reference, sink].map(|logit| (logit - max).exp() as f32);
                sum = sum * kept + of_sink;
                factor = kept / sum;
            } else if sum.is_nan() {
                factor = f32::NAN;
            }
            let acc = &mut self.acc[row * self.stride..][..self.stride];
            match self.order {
                Order::Straight => {}
                Order::Dealt { lanes, vectors } => gather_neighbours(acc, lanes, vectors),
                Order::Zipped { lanes, vectors } => unzip(acc, lanes, vectors),
            }
            for x in &mut acc[..dim] {
                *x *= factor;
            }
            store_row(&mut out, query, head, &acc[..dim]);
            if let Some(lse) = &mut lse {
                store_row(lse, query, head, &[max as f32 + sum.ln()]);
            }
        }
    }
}

/// Adds what the same rows saw in the next part of the keys.
struct Merge<'a> {
    state: &'a mut State,
    next: &'a State,
}

impl<S: Simd> Job<S> for Merge<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, _: S) {
        let Self { state, next } = self;
        for row in 0..state.reference.len() {
            let max = state.reference[row].max(next.reference[row]);
            let (mine, theirs) = (rescale(state.reference[row], max), rescale(next.reference[row], max));
            state.reference[row] = max;
            state.sum[row] = state.sum[row] * mine + next.sum[row] * theirs;
            let range = row * state.stride..(row + 1) * state.stride;
            for (a, &b) in state.acc[range.clone()].iter_mut().zip(&next.acc[range]) {
                *a = *a * mine + b * theirs;
            }
        }
    }
}
