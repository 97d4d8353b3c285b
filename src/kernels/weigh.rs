//! From dot products to weights, all rows of one tile.

use std::f32::consts::LOG2_E;
use std::marker::PhantomData;

use super::method::Method;
use super::simd::{Job, Simd};
use super::softmax::{Logit, Row};
use super::tile::Tile;

/// Turns all rows' dot products into weights.
pub(super) struct Weigh<'a, 'b, S, M, const N: usize>(
    pub(super) &'a mut Tile<'b, S, N>,
    pub(super) PhantomData<M>,
);

impl<S: Simd, M: Method<S>, const N: usize> Job<S> for Weigh<'_, '_, S, M, N> {
    type Output = ();

    #[inline(always)]
    unsafe fn run(self, simd: S) {
        let Self(tile, _) = self;
        let (dim, group) = (tile.value_dim, tile.call.group());
        *tile.finer = false;
        for query in 0..tile.reference.len() / group {
            let seen = tile.seen(query * group);
            if seen.is_empty() {
                if M::COUNTS {
                    // They weigh nothing where others see something.
                    let rows = query * group..(query + 1) * group;
                    tile.scores[rows.start * N..rows.end * N].fill(0.0);
                    tile.steps[rows].fill(0.0);
                }
                continue;
            }
            let uneven = M::COUNTS && tile.scales.is_some_and(|scales| scales.uneven(seen.clone()));
            let distance = (tile.start as i64 - tile.block.position - query as i64) as f32;
            let (tiles, _) = tile.scores.as_chunks_mut::<N>();
            for head in 0..group {
                let row = query * group + head;
                let step = &mut tile.steps[row];
                let row = Row {
                    scores: &mut tiles[row],
                    seen: seen.clone(),
                    logit: Logit {
                        scale: LOG2_E * tile.call.scale * tile.query_steps[row],
                        soft_cap: LOG2_E * tile.call.soft_cap,
                        slope: LOG2_E * tile.call.slopes.map_or(0.0, |slopes| slopes[tile.first_head + head]),
                        distance,
                    },
                    scales: tile.scales,
                    uneven,
                    reference: &mut tile.reference[row],
                    sum: &mut tile.sum[row],
                    acc: &mut tile.acc[row * dim..][..dim],
                };
                let counted = row.weigh::<S, M>(simd);
                *step = counted.step;
                *tile.finer |= counted.finer;
            }
        }
    }
}
