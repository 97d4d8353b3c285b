//! What attention over some of the keys leaves behind, and how such parts are joined.

use super::flash::{Block, Call};
use super::rows::store_row;
use super::softmax::rescale;
use crate::storage::RowsViewMut;

/// Unnormalised attention of a block's rows over a part of the keys.
///
/// Rows are in the order (KV head, query, head of its group), so that what shares keys lies together.
#[derive(Debug)]
pub(crate) struct State {
    /// `[rows, stride]`: sums of weight times value.
    pub(super) acc: Vec<f32>,
    /// Elements from a row of `acc` to the next: `v_head_dim` rounded up to whole vectors.
    pub(super) stride: usize,
    /// Largest logit of each row so far; -inf where it saw no key.
    pub(super) max: Vec<f32>,
    /// Sum of each row's weights, relative to `max`; 0 where it saw no key.
    pub(super) sum: Vec<f32>,
}

impl State {
    /// Rows that saw no key.
    pub(super) fn new(rows: usize, stride: usize) -> Self {
        Self {
            acc: vec![0.0; rows * stride],
            stride,
            max: vec![f32::NEG_INFINITY; rows],
            sum: vec![0.0; rows],
        }
    }

    /// A block that has not seen any key.
    pub(crate) fn unseen(call: &Call, block: &Block) -> Self {
        let num_heads = call.query.shape()[1];
        Self::new(block.num_queries * num_heads, call.value_pages.layout().head_dim)
    }

    /// Adds what the same rows saw in the next part of the keys.
    pub(crate) fn merge(&mut self, next: &Self) {
        assert_eq!(self.acc.len(), next.acc.len(), "parts of different blocks");
        for row in 0..self.max.len() {
            let max = self.max[row].max(next.max[row]);
            let (mine, theirs) = (rescale(self.max[row], max), rescale(next.max[row], max));
            self.max[row] = max;
            self.sum[row] = self.sum[row] * mine + next.sum[row] * theirs;
            let range = row * self.stride..(row + 1) * self.stride;
            for (a, &b) in self.acc[range.clone()].iter_mut().zip(&next.acc[range]) {
                *a = *a * mine + b * theirs;
            }
        }
    }

    /// Normalises and rounds into `out` (and `lse`), whose first row is the block's first query.
    pub(crate) fn finish(
        mut self,
        call: &Call,
        block: &Block,
        mut out: RowsViewMut,
        mut lse: Option<&mut [f32]>,
    ) {
        let [_, num_heads, dim] = out.shape();
        let group = num_heads / call.key_pages.layout().num_heads;
        for row in 0..self.max.len() {
            let (kv_head, rest) = (row / (block.num_queries * group), row % (block.num_queries * group));
            let (query, head) = (rest / group, kv_head * group + rest % group);
            let sink = call.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
            let max = self.max[row].max(sink);
            // Nothing seen at all: 0 and -inf, not 0/0.
            let mut sum = self.sum[row];
            let mut factor = 0.0;
            if max > f32::NEG_INFINITY {
                let kept = rescale(self.max[row], max);
                sum = sum * kept + (sink - max).exp();
                factor = kept / sum;
            } else if sum.is_nan() {
                factor = f32::NAN;
            }
            let acc = &mut self.acc[row * self.stride..][..dim];
            for x in &mut *acc {
                *x *= factor;
            }
            store_row(&mut out, query, head, acc);
            if let Some(lse) = lse.as_deref_mut() {
                lse[query * num_heads + head] = max + sum.ln();
            }
        }
    }
}
