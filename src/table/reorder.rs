//! Beam search and continuous batching: one sequence per pick, from those there were.

use std::sync::Arc;

use super::sequence::Claim;
use super::{Sequence, Tables};
use crate::error::{Error, Result};

/// What stands at one place after [`Tables::reorder`].
#[derive(Debug)]
pub enum Pick<const LEAF: usize = 64, const SHARDS: usize = 16> {
    /// The sequence that was at this index.
    Moved(usize),
    /// A fork of it: it was picked before.
    Forked(Sequence<LEAF, SHARDS>),
}

impl<const LEAF: usize, const SHARDS: usize> Tables<LEAF, SHARDS> {
    /// One sequence for each index: the first pick of a sequence moves it, further picks fork it,
    /// and sequences nobody picks are freed. Takes no pages; all or nothing.
    ///
    /// # Errors
    /// `Value` for an index out of range, a duplicate or a sequence of another cache;
    /// `SequenceBusy`, `SequenceFreed`, `RefCount`. Nothing is changed then.
    pub fn reorder(
        self: &Arc<Self>,
        sequences: &[&Sequence<LEAF, SHARDS>],
        indices: &[usize],
    ) -> Result<Vec<Pick<LEAF, SHARDS>>> {
        if let Some(i) = sequences.iter().position(|s| !Arc::ptr_eq(s.tables(), self)) {
            return Err(Error::Value(format!("the sequence at index {i} belongs to another cache")));
        }
        if let Some(index) = indices.iter().find(|&&index| index >= sequences.len()) {
            let n = sequences.len();
            return Err(Error::Value(format!("index {index} is not below {n} sequences")));
        }
        let _claims = claim_all(sequences)?;
        let mut picked = vec![false; sequences.len()];
        let picks: Vec<Pick<LEAF, SHARDS>> = indices
            .iter()
            .map(|&index| {
                if std::mem::replace(&mut picked[index], true) {
                    let forked = sequences[index].fork().map(Pick::Forked);
                    forked.map_err(|error| super::batch::at(error, index, sequences))
                } else {
                    Ok(Pick::Moved(index))
                }
            })
            .collect::<Result<_>>()?;
        // Nothing can fail any more. The claims carry the frees out when they end.
        let unpicked = sequences.iter().zip(&picked).filter(|&(_, &picked)| !picked);
        unpicked.for_each(|(sequence, _)| sequence.free());
        Ok(picks)
    }
}

/// Claims all, in ascending id as a batch does.
fn claim_all<'a, const LEAF: usize, const SHARDS: usize>(
    sequences: &[&'a Sequence<LEAF, SHARDS>],
) -> Result<Vec<Claim<'a, LEAF, SHARDS>>> {
    let mut order: Vec<usize> = (0..sequences.len()).collect();
    order.sort_unstable_by_key(|&i| sequences[i].slot_index());
    let same = |pair: &&[usize]| sequences[pair[0]].slot_index() == sequences[pair[1]].slot_index();
    if let Some(pair) = order.windows(2).find(same) {
        let (first, second) = (pair[0].min(pair[1]), pair[0].max(pair[1]));
        return Err(Error::Value(format!(
            "the sequence at index {second} is the one at index {first} again"
        )));
    }
    let claim = |i: usize| sequences[i].claim().map_err(|error| super::batch::at(error, i, sequences));
    order.into_iter().map(claim).collect()
}
