//! Who is free: a set of numbers as a tree of bits.
//!
//! Level 0 has one bit per item. A bit of level k + 1 says that word of level k *may* be non-zero,
//! so the lowest item is found in as many steps as there are levels (four for 16 million items).
//!
//! ```text
//! level 1                    1 0 1 . . .
//!                           /      \
//! level 0     0 0 1 0 1 . . .       0 0 0 0 0 1 . . .
//! ```
//!
//! Each word changes by itself, so an upper level can lag:
//! - *give* sets bits by one addition, then the bit above if the word was zero;
//! - *claim* clears bits by one compare-exchange; if the word became zero it clears the bit above,
//!   then looks at the word again and sets that bit once more if someone gave meanwhile.
//!
//! When nothing runs, every non-zero word has its bit above set: whoever made it non-zero set the
//! bit, and whoever cleared the bit after that saw the word non-zero and set it again. While a
//! thread stands between two of these steps a word can be hidden; then [`Bitmap::take_word`] walks
//! level 0. So a stopped thread hides nothing from others.

use std::num::NonZeroU64;
use std::ops::Range;

use super::lines::{Lines, WORDS_PER_LINE};
use crate::sync::{Ordering, Preload};

/// Items in one word.
pub const WORD_BITS: u32 = 64;

/// Items in one cache-line pair of level 0: threads that keep to different blocks share no line.
pub const BLOCK_ITEMS: u32 = WORD_BITS * WORDS_PER_LINE as u32;

/// Some bits of one word of level 0: items `word * 64 + bit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits {
    /// Index of the word.
    pub word: u32,
    /// The bits. Not being zero, they tell `None` apart, so that `Option<Bits>` goes in registers.
    pub mask: NonZeroU64,
}

impl Bits {
    /// These bits of that word, if there are any.
    #[inline]
    pub fn new(word: u32, mask: u64) -> Option<Self> {
        NonZeroU64::new(mask).map(|mask| Self { word, mask })
    }

    /// The lowest item.
    #[inline]
    pub fn first(self) -> u32 {
        self.word * WORD_BITS + self.mask.trailing_zeros()
    }

    /// The `max` lowest of them.
    #[inline]
    fn lowest(self, max: u32) -> Option<Self> {
        Self::new(self.word, lowest(self.mask.get(), max))
    }

    /// The items, ascending.
    pub fn items(self) -> impl Iterator<Item = u32> {
        let first = self.word * WORD_BITS;
        let mut rest = self.mask.get();
        std::iter::from_fn(move || {
            let bit = (rest != 0).then(|| rest.trailing_zeros())?;
            rest &= rest - 1;
            Some(first + bit)
        })
    }
}

/// What became of an attempt to take a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// Taken; this is its first item.
    Taken(u32),
    /// There was a run, but another thread took of it first.
    Lost,
    /// No run of that length was seen.
    Absent,
}

/// A set of the numbers `0..len` that threads take from and give to without waiting.
#[derive(Debug)]
pub struct Bitmap {
    /// Level 0, apart from the others because every operation goes there.
    items: Lines,
    /// Levels 1 and up.
    upper: Box<[Lines]>,
    len: u32,
}

impl Bitmap {
    /// The set that holds every number below `len`.
    pub fn new_full(len: u32) -> Self {
        Self::new_from(0, len)
    }

    /// The empty set.
    pub fn new_empty(len: u32) -> Self {
        Self::new_from(len, len)
    }

    /// The set `first..len`.
    pub fn new_from(first: u32, len: u32) -> Self {
        // Bits `low..high` that fall into the word; the same rule serves every level.
        let word = |low: usize, high: usize| {
            move |index: usize| {
                let below = |limit: usize| match limit.saturating_sub(index * 64) {
                    64.. => u64::MAX,
                    bits => (1 << bits) - 1,
                };
                below(high) & !below(low)
            }
        };
        let (mut low, mut high) = (first.min(len) as usize, len as usize);
        let mut level = || {
            let words = high.div_ceil(64).max(1);
            let level = Lines::new(words, word(low, high));
            // An empty set has no word to point at.
            (low, high) = (if low == high { words } else { low / 64 }, words);
            level
        };
        let items = level();
        let mut upper = Vec::new();
        let mut words = items.len();
        while words > 1 {
            upper.push(level());
            words = words.div_ceil(64);
        }
        Self { items, upper: upper.into(), len }
    }

    /// Numbers the set ranges over.
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether the set holds nothing. Exact when nothing runs.
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// How many numbers the set holds. Exact when nothing runs.
    pub fn count(&self) -> u64 {
        (0..self.words()).map(|word| u64::from(self.word(word).count_ones())).sum()
    }

    /// Whether `item` is in the set.
    pub fn contains(&self, item: u32) -> bool {
        item < self.len && self.word((item / WORD_BITS) as usize) >> (item % WORD_BITS) & 1 == 1
    }

    /// Takes the lowest number at or above `from`, or else the lowest below it. `None`: as for
    /// [`take_word`](Self::take_word).
    #[inline]
    pub fn take_lowest(&self, from: u32) -> Option<u32> {
        // Mostly the very word of `from` has one, and nobody else takes it.
        if let Some(bits) = self.here(from).and_then(|seen| seen.lowest(1))
            && self.claim(bits)
        {
            return Some(bits.first());
        }
        self.take_word(from, 1).map(Bits::first)
    }

    /// Takes up to `max` of the lowest numbers at or above `from` (or else below it) that share a
    /// word, by one compare-exchange. `None`: nothing was seen in a walk over all of level 0.
    #[inline(never)]
    pub fn take_word(&self, from: u32, max: u32) -> Option<Bits> {
        loop {
            let bits = self.find(from).or_else(|| self.find_anywhere())?.lowest(max)?;
            if self.claim(bits) {
                return Some(bits);
            }
        }
    }

    /// Like [`take_lowest`](Self::take_lowest), by the tree alone: `None` costs a look at each level,
    /// and may overlook a number that is being given at this moment.
    #[inline]
    pub fn take_seen(&self, from: u32) -> Option<u32> {
        loop {
            let bits = self.find(from).or_else(|| self.find(0))?.lowest(1)?;
            if self.claim(bits) {
                return Some(bits.first());
            }
        }
    }

    /// Takes the lowest run of `n` numbers within `range`.
    pub fn take_run(&self, range: Range<u32>, n: u32) -> Run {
        let Some(first) = self.find_run(range, n) else { return Run::Absent };
        let pieces = || run_pieces(first, n);
        match pieces().position(|bits| !self.claim(bits)) {
            None => Run::Taken(first),
            Some(claimed) => {
                pieces().take(claimed).for_each(|bits| self.give(bits));
                Run::Lost
            }
        }
    }

    /// Puts numbers into the set. They must have been taken from it.
    #[inline]
    pub fn give(&self, bits: Bits) {
        // Release: pairs with the Acquire in `claim`; what the giver did to the items happens
        // before what the next taker does. Acquire: a later `settle` must see at least this state.
        // An addition, since these bits are clear and nobody else sets them: on x86 it tells what was
        // there before, for which `fetch_or` takes a load and a loop of compare-exchanges.
        let before = self.items.get(bits.word as usize).fetch_add(bits.mask.get(), Ordering::AcqRel);
        debug_assert_eq!(before & bits.mask.get(), 0, "given twice");
        if before == 0 {
            self.raise(1, bits.word as usize);
        }
    }

    /// Puts one number into the set. It must have been taken from it.
    #[inline]
    pub fn give_item(&self, item: u32) {
        if let Some(bits) = Bits::new(item / WORD_BITS, 1 << (item % WORD_BITS)) {
            self.give(bits);
        }
    }

    /// Checks that no non-zero word is hidden and no bit lies outside the set's range.
    /// Means something only when nothing runs.
    pub fn validate(&self) -> Result<(), String> {
        for level in 0..=self.upper.len() {
            let words = self.level(level);
            let items = if level == 0 { self.len as usize } else { self.level(level - 1).len() };
            for index in 0..words.len() {
                let word = words.get(index).load(Ordering::Acquire);
                let inside = items - index * 64;
                if inside < 64 && word >> inside != 0 {
                    return Err(format!("bitmap level {level} word {index}: a bit beyond {items} is set"));
                }
                let above = self.upper.get(level).map(|words| words.get(index / 64));
                if word != 0
                    && let Some(above) = above
                    && above.load(Ordering::Acquire) >> (index % 64) & 1 == 0
                {
                    return Err(format!("bitmap level {level} word {index} is not empty but hidden"));
                }
            }
        }
        Ok(())
    }

    /// Word `index` of level 0.
    #[inline]
    pub(super) fn word(&self, index: usize) -> u64 {
        // Acquire: pairs with the Release in `claim` and `give`. Whoever sees a claim also sees the
        // gives that its taker had seen, so a holder of credits never misses pages for good.
        self.items.get(index).load(Ordering::Acquire)
    }

    /// Words of level 0.
    pub(super) fn words(&self) -> usize {
        self.items.len()
    }

    /// The words of a level that there is.
    #[inline]
    fn level(&self, level: usize) -> &Lines {
        level.checked_sub(1).map_or(&self.items, |above| &self.upper[above])
    }

    /// Takes exactly these bits, or nothing if one of them is gone.
    #[inline]
    fn claim(&self, bits: Bits) -> bool {
        let word = self.items.get(bits.word as usize);
        let mut seen = word.preload();
        let mask = bits.mask.get();
        while seen & mask == mask {
            let rest = seen & !mask;
            // Acquire: pairs with the Release in `give`. Release: pairs with the Acquire in `word`.
            match word.compare_exchange_weak(seen, rest, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => {
                    if rest == 0 {
                        self.settle(0, bits.word as usize);
                    }
                    return true;
                }
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Sets the bit for word `index` of `level - 1` in `level`, and further up as far as needed.
    #[cold]
    fn raise(&self, level: usize, mut index: usize) {
        for words in &self.upper[level - 1..] {
            // Release: pairs with the Acquire in `settle`: whoever clears this bit later sees the
            // word below as it was when it was raised, or newer.
            let before = words.get(index / 64).fetch_or(1 << (index % 64), Ordering::AcqRel);
            if before != 0 {
                return;
            }
            index /= 64;
        }
    }

    /// Word `index` of `level` was seen to be zero: clears the bit above it, and sets it again if
    /// the word is not zero after all.
    #[cold]
    fn settle(&self, level: usize, index: usize) {
        let Some(above) = self.upper.get(level) else { return };
        let bit = 1 << (index % 64);
        // Acquire: pairs with the Release in `raise`, so that the look below sees what was given.
        let before = above.get(index / 64).fetch_and(!bit, Ordering::AcqRel);
        if before == bit {
            self.settle(level + 1, index / 64);
        }
        if self.level(level).get(index).load(Ordering::Acquire) != 0 {
            self.raise(level + 1, index);
        }
    }

    /// The items at or above `from` in its own word.
    #[inline]
    fn here(&self, from: u32) -> Option<Bits> {
        // Acquire: as in `word`.
        let word = self.items.find((from / WORD_BITS) as usize)?.load(Ordering::Acquire);
        Bits::new(from / WORD_BITS, word & (u64::MAX << (from % WORD_BITS)))
    }

    /// The first word with items at or above `from`, as the tree shows it.
    #[inline]
    fn find(&self, from: u32) -> Option<Bits> {
        let (mut level, mut item, mut descended) = (0, from as usize, false);
        loop {
            let (words, index) = (self.level(level), item / 64);
            if index < words.len() {
                // Acquire: as in `word`.
                let mask = words.get(index).load(Ordering::Acquire) & (u64::MAX << (item % 64));
                if mask != 0 && level == 0 {
                    return Bits::new(index as u32, mask);
                }
                if mask != 0 {
                    item = (index * 64 + mask.trailing_zeros() as usize) * 64;
                    level -= 1;
                    descended = true;
                    continue;
                }
                if descended {
                    // The bit above promised more: it lags.
                    self.settle(level, index);
                }
            }
            level += 1;
            item = index + 1;
            descended = false;
            if level > self.upper.len() {
                return None;
            }
        }
    }

    /// Any word with items: by the tree from the start, else by a walk over level 0.
    #[cold]
    fn find_anywhere(&self) -> Option<Bits> {
        self.find(0).or_else(|| (0..self.words()).find_map(|index| Bits::new(index as u32, self.word(index))))
    }

    /// First item of the lowest run of `n` within `range`.
    fn find_run(&self, range: Range<u32>, n: u32) -> Option<u32> {
        let mut from = range.start;
        // The run that reaches the end of the words walked so far: its start, and where it ends.
        let mut open = 0..0;
        while let Some(bits) = self.find(from) {
            let (base, mut mask) = (bits.word * WORD_BITS, bits.mask.get());
            if base >= range.end {
                return None;
            }
            if range.end - base < WORD_BITS {
                mask &= (1 << (range.end - base)) - 1;
            }
            if open.end != base {
                open = base..base;
            }
            // Continue the open run, then look inside the word, then open the one at its end.
            let low = mask.trailing_ones();
            if open.end - open.start + low >= n {
                return Some(open.start);
            }
            if let Some(bit) = run_in_word(mask, n) {
                return Some(base + bit);
            }
            let start = if mask == u64::MAX { open.start } else { base + WORD_BITS - mask.leading_ones() };
            open = start..base + WORD_BITS;
            from = base + WORD_BITS;
        }
        None
    }
}

/// The lowest `max` bits of `mask`.
#[inline]
fn lowest(mask: u64, max: u32) -> u64 {
    if max == 1 {
        return mask & mask.wrapping_neg();
    }
    let mut rest = mask;
    for _ in 0..max.min(WORD_BITS) {
        rest &= rest.wrapping_sub(1);
    }
    mask & !rest
}

/// Lowest position of `n` adjacent bits in `mask`.
#[inline]
fn run_in_word(mut mask: u64, n: u32) -> Option<u32> {
    if n > WORD_BITS {
        return None;
    }
    // After each step a bit stands for a run of `have` bits that begins there.
    let mut have = 1;
    while have < n && mask != 0 {
        let more = have.min(n - have);
        mask &= mask >> more;
        have += more;
    }
    (mask != 0).then(|| mask.trailing_zeros())
}

/// The run `first..first + n`, word by word.
fn run_pieces(first: u32, n: u32) -> impl Iterator<Item = Bits> {
    let (mut item, end) = (first, first + n);
    std::iter::from_fn(move || {
        let (word, bit) = (item / WORD_BITS, item % WORD_BITS);
        let bits = (WORD_BITS - bit).min(end - item);
        let mask = (bits > 0).then(|| (u64::MAX >> (WORD_BITS - bits)) << bit)?;
        item += bits;
        Bits::new(word, mask)
    })
}
