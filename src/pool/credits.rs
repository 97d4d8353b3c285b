//! How many pages are available, counted without a word that every thread writes.
//!
//! A *credit* is the right to find one page. A page's credit is given after its bit is set, and a
//! taker takes credits before it looks for pages, so whoever holds n credits finds n pages.
//!
//! Credits lie in one word per shard and in a central one. A taker uses its own shard; if that is
//! short, it merges other shards into the central word and takes all it needs there by one
//! compare-exchange. So it never holds a part while it waits for the rest: a request that is doomed
//! takes nothing away from one that is not (invariant I4).
//!
//! A merge changes two words, so it is announced, and any thread can carry on with it:
//!
//! ```text
//!            central                          shard i
//! announce   pending: none -> i
//! move                                        credits -> aside
//! finish     credits += aside, pending: none
//! clear                                       aside -> none
//! ```
//!
//! - *Announce* needs an empty aside, seen after the central word that the compare-exchange expects.
//! - *Move* needs the announcement to stand, seen after the shard word that the compare-exchange
//!   expects. As only a move lets an announcement end, it still stands when the exchange succeeds.
//! - *Finish* expects the very announcement (its version) under which the aside was seen.
//! - *Clear* needs the announcement to be over, seen after the shard word that it expects.
//!
//! Versions grow with every give and every merge step, so no word returns to an earlier value
//! unless its state is the same. A taker fails only if no version moved between two looks at all
//! words: until the second look began only takes happened, and the sum was already too small.

use crate::sync::{AtomicU64, CachePadded, Ordering, Preload};

/// Fewer credits than requested were available at one instant during the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// How many there were at that instant, at most.
    pub available: u64,
}

/// The most credits there may be in all.
pub(super) const MAX_CREDITS: u64 = (1 << Central::CREDIT_BITS) - 1;

/// `version 39 | aside valid 1 | aside 12 | credits 12`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Shard(u64);

impl Shard {
    const CREDIT_BITS: u32 = 12;
    /// The most credits a shard keeps; more go to the central word.
    const CAP: u64 = (1 << Self::CREDIT_BITS) - 1;
    const ASIDE_SHIFT: u32 = Self::CREDIT_BITS;
    const ASIDE_VALID: u64 = 1 << (2 * Self::CREDIT_BITS);
    const VERSION: u64 = Self::ASIDE_VALID << 1;

    #[inline]
    const fn credits(self) -> u64 {
        self.0 & Self::CAP
    }

    const fn aside(self) -> Option<u64> {
        if self.0 & Self::ASIDE_VALID == 0 { None } else { Some(self.0 >> Self::ASIDE_SHIFT & Self::CAP) }
    }

    const fn version(self) -> u64 {
        self.0 / Self::VERSION
    }

    #[inline]
    const fn taken(self, n: u64) -> Self {
        Self(self.0 - n)
    }

    #[inline]
    const fn given(self, n: u64) -> Self {
        Self(self.0 + n).next_version()
    }

    const fn moved_aside(self) -> Self {
        let version = self.version() * Self::VERSION;
        Self(version | Self::ASIDE_VALID | (self.credits() << Self::ASIDE_SHIFT)).next_version()
    }

    const fn cleared(self) -> Self {
        Self((self.version() * Self::VERSION) | self.credits())
    }

    #[inline]
    const fn next_version(self) -> Self {
        Self(self.0.wrapping_add(Self::VERSION))
    }
}

/// `version 31 | pending shard + 1, or 0: 5 | credits 28`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Central(u64);

impl Central {
    const CREDIT_BITS: u32 = 28;
    const PENDING_BITS: u32 = 5;
    const PENDING_MAX: usize = (1 << Self::PENDING_BITS) - 1;
    const PENDING: u64 = 1 << Self::CREDIT_BITS;
    const VERSION: u64 = Self::PENDING << Self::PENDING_BITS;

    const fn credits(self) -> u64 {
        self.0 & MAX_CREDITS
    }

    const fn pending(self) -> Option<usize> {
        ((self.0 % Self::VERSION / Self::PENDING) as usize).checked_sub(1)
    }

    const fn version(self) -> u64 {
        self.0 / Self::VERSION
    }

    const fn taken(self, n: u64) -> Self {
        Self(self.0 - n)
    }

    const fn given(self, n: u64) -> Self {
        Self(self.0 + n).next_version()
    }

    /// From no merge to a merge of `shard`.
    const fn announced(self, shard: usize) -> Self {
        Self(self.0 + (shard as u64 + 1) * Self::PENDING).next_version()
    }

    /// The end of a merge that brought `n`.
    const fn merged(self, n: u64) -> Self {
        Self((self.version() * Self::VERSION) | (self.credits() + n)).next_version()
    }

    const fn next_version(self) -> Self {
        Self(self.0.wrapping_add(Self::VERSION))
    }
}

/// Credits in `SHARDS` words and a central one.
#[derive(Debug)]
pub(super) struct Credits<const SHARDS: usize> {
    shards: [CachePadded<AtomicU64>; SHARDS],
    central: CachePadded<AtomicU64>,
}

impl<const SHARDS: usize> Credits<SHARDS> {
    const SHARDS_FIT: () = assert!(
        SHARDS > 0 && SHARDS <= Central::PENDING_MAX,
        "a shard's number must fit into the central word"
    );

    /// `credits` of them (at most [`MAX_CREDITS`]): half spread over the shards, as far as they
    /// hold that many, and the rest in the middle.
    pub(super) fn new(credits: u64) -> Self {
        let () = Self::SHARDS_FIT;
        let share = (credits / 2 / SHARDS as u64).min(Shard::CAP);
        let padded = |value| CachePadded::new(AtomicU64::new(value));
        Self {
            shards: std::array::from_fn(|_| padded(share)),
            central: padded(credits - share * SHARDS as u64),
        }
    }

    /// Takes `n` credits, or none. `shard` is the caller's own.
    #[inline]
    pub(super) fn take(&self, shard: usize, n: u64) -> Result<(), Shortage> {
        let own = &self.shards[shard % SHARDS];
        let mut seen = Shard(own.preload());
        while seen.credits() >= n {
            // Acquire: pairs with the Release in `give`: the pages of these credits can be found.
            // Release: pairs with the Acquire of a failing taker's looks: whoever sees this take
            // also sees the gives before it.
            match own.compare_exchange_weak(seen.0, seen.taken(n).0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return Ok(()),
                Err(now) => seen = Shard(now),
            }
        }
        self.take_merged(n)
    }

    /// Gives `n` credits, whose pages can be found by now. `shard` is the caller's own.
    #[inline]
    pub(super) fn give(&self, shard: usize, n: u64) {
        let own = &self.shards[shard % SHARDS];
        let mut seen = Shard(own.preload());
        while let room @ 1.. = Shard::CAP - seen.credits() {
            let part = n.min(room);
            // Release: pairs with the Acquire in `take`, directly or through a merge.
            match own.compare_exchange_weak(seen.0, seen.given(part).0, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) if part == n => return,
                Ok(_) => return self.give_central(n - part),
                Err(now) => seen = Shard(now),
            }
        }
        self.give_central(n);
    }

    /// All credits. Exact when nothing runs.
    pub(super) fn total(&self) -> u64 {
        let central = self.settled();
        central.credits() + (0..SHARDS).map(|i| self.shard(i).credits()).sum::<u64>()
    }

    /// The versions of all words, for telling whether anything happened.
    pub(super) fn words(&self) -> impl Iterator<Item = u64> {
        std::iter::once(self.central().0).chain((0..SHARDS).map(|i| self.shard(i).0))
    }

    #[cold]
    fn give_central(&self, n: u64) {
        let mut seen = Central(self.central.preload());
        // Release: as in `give`.
        while let Err(now) = self.replace_central(seen, seen.given(n)) {
            seen = now;
        }
    }

    /// Takes `n` credits from the central word after merging as many shards as that needs.
    #[cold]
    fn take_merged(&self, n: u64) -> Result<(), Shortage> {
        loop {
            let central = self.settled();
            if central.credits() >= n {
                if self.replace_central(central, central.taken(n)).is_ok() {
                    return Ok(());
                }
                continue;
            }
            let shards: [Shard; SHARDS] = std::array::from_fn(|i| self.shard(i));
            let available = central.credits() + shards.iter().map(|shard| shard.credits()).sum::<u64>();
            if available >= n {
                let richest = (0..SHARDS).max_by_key(|&i| shards[i].credits()).unwrap_or(0);
                self.merge(central, richest);
                continue;
            }
            // The second look. Versions suffice: takes between the looks only lower the sum.
            let still = self.central();
            if still.version() == central.version()
                && (0..SHARDS).all(|i| self.shard(i).version() == shards[i].version())
            {
                return Err(Shortage { available });
            }
        }
    }

    /// The central word with no merge pending, after helping one that was.
    fn settled(&self) -> Central {
        loop {
            let central = self.central();
            match central.pending() {
                None => return central,
                Some(shard) => self.help(central, shard),
            }
        }
    }

    /// Announces a merge of `shard` on top of `central` and carries it out. Does nothing if another
    /// thread was faster; the caller looks again.
    fn merge(&self, central: Central, shard: usize) {
        let seen = self.shard(shard);
        if seen.aside().is_some() {
            // Seen again after the shard: no merge is pending, so this aside has been counted.
            if self.central() != central || self.replace_shard(shard, seen, seen.cleared()).is_err() {
                return;
            }
        }
        let announced = central.announced(shard);
        if self.replace_central(central, announced).is_ok() {
            self.help(announced, shard);
        }
    }

    /// Carries the merge of `shard` announced by `central` as far as it can.
    fn help(&self, central: Central, shard: usize) {
        let mut seen = self.shard(shard);
        if seen.aside().is_none() {
            // Seen after the shard: the announcement stands.
            if self.central().pending() != Some(shard) {
                return;
            }
            let moved = seen.moved_aside();
            if self.replace_shard(shard, seen, moved).is_err() {
                return;
            }
            seen = moved;
        }
        if let Some(aside) = seen.aside() {
            // Failing means that another thread finished it, or took or gave: the caller looks again.
            let _ = self.replace_central(central, central.merged(aside));
        }
    }

    fn central(&self) -> Central {
        // Acquire: pairs with the Release in `replace_central`.
        Central(self.central.load(Ordering::Acquire))
    }

    fn shard(&self, index: usize) -> Shard {
        // Acquire: pairs with the Release in `take`, `give` and `replace_shard`.
        Shard(self.shards[index].load(Ordering::Acquire))
    }

    fn replace_central(&self, from: Central, to: Central) -> Result<(), Central> {
        // AcqRel: carries the gives that it counts from the shards to whoever takes them here.
        let result = self.central.compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed);
        result.map(drop).map_err(Central)
    }

    fn replace_shard(&self, index: usize, from: Shard, to: Shard) -> Result<(), Shard> {
        // AcqRel: as in `replace_central`.
        let result = self.shards[index].compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed);
        result.map(drop).map_err(Shard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn i4_a_helper_that_comes_late_changes_nothing() {
        let credits = Credits::<2>::new(8);
        let announced = credits.central().announced(0);
        // As if it had read this announcement before others carried it out.
        for _ in 0..2 {
            let before: Vec<u64> = credits.words().collect();
            credits.help(announced, 0);
            assert_eq!(credits.words().collect::<Vec<_>>(), before);
            // And once more when the shard has been merged and its aside is still there.
            credits.take(1, 7).expect("seven of eight, by merging both shards");
            credits.give(0, 7);
        }
        assert_eq!(credits.total(), 8);
    }

    #[test]
    fn more_than_a_shard_holds_goes_to_the_middle() {
        let credits = Credits::<2>::new(100_000);
        credits.take(0, 90_000).expect("all but ten thousand");
        credits.give(0, 90_000);
        assert_eq!(credits.shard(0).credits(), Shard::CAP);
        assert_eq!(credits.total(), 100_000);
    }

    proptest! {
        /// Any mix of takes and gives leaves the sum right, and a take fails only if it must.
        #[test]
        fn i4_alone_a_take_fails_exactly_when_there_are_too_few(
            total in 0..20_000_u64,
            ops in prop::collection::vec((0..3_usize, 0..9_000_u64, any::<bool>()), 0..50),
        ) {
            let credits = Credits::<3>::new(total);
            let mut taken = 0;
            for (shard, n, give) in ops {
                if give {
                    let n = n.min(taken);
                    credits.give(shard, n);
                    taken -= n;
                } else {
                    let available = total - taken;
                    match credits.take(shard, n) {
                        Ok(()) => taken += n,
                        Err(shortage) => prop_assert_eq!(shortage, Shortage { available }),
                    }
                    prop_assert!(taken <= total);
                    prop_assert_eq!(credits.total(), total - taken);
                }
            }
        }
    }
}
