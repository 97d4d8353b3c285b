//! Versions: one state of one sequence's page table, in a slot whose type never changes.
//!
//! Readers pin a version and may then look at its computed tokens for as long as they like. The
//! sequence's writer grows it in place, beyond what any reader looks at; whatever would change
//! what a reader sees (copy-on-write, truncation) makes a new version instead.

use super::slab::Vacant;
use crate::ids::PageId;
use crate::sync::{AtomicU32, AtomicU64, MODELLED, OnceBox, Ordering, Segments, prefetch};

/// Leaf numbers in the version itself.
const FIRST: usize = if MODELLED { 2 } else { 6 };
/// Leaf numbers behind those, in one piece: with the pointer to the rest four cache lines.
const MORE: usize = if MODELLED { 2 } else { 62 };

/// What a version is to its sequence. Statistics tell live from deferred pages by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Role {
    /// Built by a writer, seen by nobody else. Dropping it undoes the writer's change.
    Draft = 0,
    /// Named by a sequence's head.
    Head = 1,
    /// Replaced; only leases still hold it.
    Retired = 2,
}

/// Leaf numbers of one version plus its counts: one cache line, all that a decode step needs.
#[repr(C, align(64))]
pub(super) struct Version {
    /// generation 32 | count 32. The sequence holds one count on its head, each pin one.
    word: AtomicU64,
    /// Tokens that readers see. Only grows.
    computed: AtomicU32,
    /// Pages in the leaves, reserved ones too. Only the writer, or the last holder, looks beyond
    /// the computed ones.
    num_pages: AtomicU32,
    /// The leaf that holds the last page: spares the decode step the list.
    tail: AtomicU32,
    /// The last page: spares it the leaf.
    tail_page: AtomicU32,
    /// A [`Role`].
    role: AtomicU32,
    first: [AtomicU32; FIRST],
    /// Leaves from `FIRST` on; made on demand, kept with the slot.
    more: OnceBox<More>,
}

/// Leaf numbers of a long table: one step from the version, and only of a very long one a second.
#[repr(C, align(64))]
struct More {
    numbers: [AtomicU32; MORE],
    rest: OnceBox<Segments<AtomicU32>>,
}

impl More {
    fn new() -> Self {
        Self { numbers: std::array::from_fn(|_| AtomicU32::new(0)), rest: OnceBox::new() }
    }
}

const _: () = assert!(MODELLED || size_of::<Version>() == 64, "a decode step touches one line of it");
const _: () = assert!(MODELLED || size_of::<More>() == 256, "as its comment says");

impl Vacant for Version {
    fn vacant() -> Self {
        Self {
            word: AtomicU64::new(0),
            computed: AtomicU32::new(0),
            num_pages: AtomicU32::new(0),
            tail: AtomicU32::new(0),
            tail_page: AtomicU32::new(PageId::NONE.0),
            role: AtomicU32::new(Role::Draft as u32),
            first: std::array::from_fn(|_| AtomicU32::new(0)),
            more: OnceBox::new(),
        }
    }
}

impl Version {
    /// Starts the life of a vacant slot with one count and returns its generation. Not yet visible to
    /// anyone: the head's Release store publishes it.
    pub(super) fn start(&self, computed: u32) -> u32 {
        let word = self.word.load(Ordering::Relaxed);
        debug_assert_eq!(word as u32, 0, "the slot is in use");
        self.computed.store(computed, Ordering::Relaxed);
        self.num_pages.store(0, Ordering::Relaxed);
        self.set_role(Role::Draft);
        // Release: pairs with the Acquire of a stale `try_pin`, which then sees count 1 of a
        // generation it doesn't ask for.
        self.word.store(word | 1, Ordering::Release);
        (word >> 32) as u32
    }

    /// Ends the life: stale numbers will find another generation.
    pub(super) fn end(&self) {
        let generation = ((self.word.load(Ordering::Relaxed) >> 32) as u32).wrapping_add(1);
        self.num_pages.store(0, Ordering::Relaxed);
        // Release: pairs with the Acquire load in `try_pin`.
        self.word.store(u64::from(generation) << 32, Ordering::Release);
    }

    /// One more count, unless this life is over.
    #[inline]
    pub(super) fn try_pin(&self, generation: u32) -> bool {
        // Acquire: pairs with the AcqRel of `unpin` and the Release of `end`, so that whoever
        // finds the version gone also sees the head that replaced it.
        let mut word = self.word.load(Ordering::Acquire);
        loop {
            if (word >> 32) as u32 != generation || word as u32 == 0 {
                return false;
            }
            // Acquire: pairs with the Release of earlier decrements.
            match self.word.compare_exchange_weak(word, word + 1, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return true,
                Err(now) => word = now,
            }
        }
    }

    /// One count less; true for the last, who must drop the version.
    #[inline]
    pub(super) fn unpin(&self) -> bool {
        // AcqRel: the Release half pairs with the Acquire half of whoever comes last, so that it
        // sees all that every holder did.
        self.word.fetch_sub(1, Ordering::AcqRel) as u32 == 1
    }

    /// Counts of the current life.
    pub(super) fn count(&self) -> u32 {
        self.word.load(Ordering::Acquire) as u32
    }

    pub(super) fn word(&self) -> u64 {
        self.word.load(Ordering::Acquire)
    }

    /// The generation of the current life.
    pub(super) fn generation(&self) -> u32 {
        (self.word() >> 32) as u32
    }

    /// Tokens that readers may see; all pages and slots below were written before.
    #[inline]
    pub(super) fn computed(&self) -> u32 {
        // Acquire: pairs with the Release in `set_computed`.
        self.computed.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn set_computed(&self, computed: u32) {
        // Release: pairs with the Acquire in `computed`: the tokens' slots and the pages' entries
        // come before their number.
        self.computed.store(computed, Ordering::Release);
    }

    #[inline]
    pub(super) fn num_pages(&self) -> u32 {
        // Acquire: pairs with the Release in `set_num_pages`, for walkers that hold no claim.
        self.num_pages.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn set_num_pages(&self, num_pages: u32) {
        // Release: pairs with the Acquire in `num_pages`.
        self.num_pages.store(num_pages, Ordering::Release);
    }

    /// The leaf that holds the last page, if there is one.
    #[inline]
    pub(super) fn tail(&self) -> u32 {
        // Acquire: pairs with the Release in `set_leaf`, so that who looks without a pin, to
        // prefetch, at least finds the leaf made.
        self.tail.load(Ordering::Acquire)
    }

    /// The last page, if there is one. Relaxed: for the writer, and as a hint to others.
    #[inline]
    pub(super) fn tail_page(&self) -> PageId {
        PageId(self.tail_page.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn set_tail_page(&self, page: PageId) {
        self.tail_page.store(page.0, Ordering::Relaxed);
    }

    pub(super) fn set_role(&self, role: Role) {
        // Relaxed: read by statistics only.
        self.role.store(role as u32, Ordering::Relaxed);
    }

    pub(super) fn role(&self) -> Role {
        match self.role.load(Ordering::Relaxed) {
            0 => Role::Draft,
            1 => Role::Head,
            _ => Role::Retired,
        }
    }

    /// Number of the `k`-th leaf.
    #[inline]
    pub(super) fn leaf(&self, k: usize) -> u32 {
        // Acquire: pairs with the Release in `set_leaf`, so that who looks beyond the computed
        // pages while they change at least finds the leaf made.
        self.cell(k).load(Ordering::Acquire)
    }

    /// Numbers of the first `count` leaves, as many at a time as lie together.
    #[inline]
    pub(super) fn leaves(&self, count: usize) -> impl Iterator<Item = &[AtomicU32]> {
        let mut rest = count;
        let mut some_of = move |numbers: &'_ [AtomicU32]| {
            let len = rest.min(numbers.len());
            rest -= len;
            len
        };
        let first = some_of(&self.first);
        let more = self.more.get();
        let near = more.map_or(0, |more| some_of(&more.numbers));
        let far = (0..).map_while(move |segment| {
            let numbers = more?.rest.get()?.segment(segment)?;
            Some(&numbers[..some_of(numbers)]).filter(|numbers| !numbers.is_empty())
        });
        std::iter::once(&self.first[..first]).chain(more.map(|more| &more.numbers[..near])).chain(far)
    }

    /// Asks for what lists the leaves behind the first.
    #[inline]
    pub(super) fn prefetch_leaves(&self) {
        if let Some(more) = self.more.get() {
            prefetch(more);
        }
    }

    /// Sets the `k`-th leaf, which becomes the last.
    pub(super) fn set_leaf(&self, k: usize, leaf: u32) {
        self.make_room(k + 1);
        // Release: pairs with the Acquire in `leaf`, in `tail` and of who is given a leaf's number.
        self.cell(k).store(leaf, Ordering::Release);
        self.tail.store(leaf, Ordering::Release);
    }

    /// Lists the first `count` leaves of `base`, and no others.
    pub(super) fn set_leaves(&self, base: &Self, count: usize) {
        let Some(last) = count.checked_sub(1) else { return };
        self.make_room(count);
        for (own, theirs) in self.leaves(count).zip(base.leaves(count)) {
            for (own, theirs) in own.iter().zip(theirs) {
                // Acquire, Release: as in `leaf` and `set_leaf`.
                own.store(theirs.load(Ordering::Acquire), Ordering::Release);
            }
        }
        self.set_tail(last);
    }

    /// Makes places for the numbers of `count` leaves.
    fn make_room(&self, count: usize) {
        if count > FIRST {
            let more = self.more.get_or_make(More::new);
            if let Some(last) = count.checked_sub(FIRST + MORE + 1) {
                let rest = more.rest.get_or_make(Segments::new);
                let (segment, _) = Segments::<AtomicU32>::locate(last as u32);
                (0..=segment).for_each(|segment| rest.make(segment, || AtomicU32::new(0)));
            }
        }
    }

    /// Makes the `k`-th leaf the last again, after those behind it were popped.
    pub(super) fn set_tail(&self, k: usize) {
        // Release: pairs with the Acquire in `tail`.
        self.tail.store(self.leaf(k), Ordering::Release);
    }

    #[inline]
    fn cell(&self, k: usize) -> &AtomicU32 {
        const MADE: &str = "a leaf's number has a place";
        let Some(k) = k.checked_sub(FIRST) else { return &self.first[k] };
        let more = self.more.get().expect(MADE);
        let Some(k) = k.checked_sub(MORE) else { return &more.numbers[k] };
        more.rest.get().expect(MADE).get(k as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_keep_their_place_through_segments() {
        let version = Version::vacant();
        for k in 0..1000 {
            version.set_leaf(k, k as u32 * 3);
        }
        for k in 0..1000 {
            assert_eq!(version.leaf(k), k as u32 * 3);
        }
        assert_eq!(version.tail(), 999 * 3);
        for count in [0, 1, FIRST, FIRST + 1, FIRST + MORE, FIRST + MORE + 1, 1000] {
            let other = Version::vacant();
            other.set_leaves(&version, count);
            assert!((0..count).all(|k| other.leaf(k) == k as u32 * 3), "{count}");
            assert!(count == 0 || other.tail() == version.leaf(count - 1), "{count}");
        }
    }

    #[test]
    fn i5_a_stale_generation_cannot_pin() {
        let version = Version::vacant();
        let generation = version.start(0);
        assert!(version.try_pin(generation));
        assert!(!version.unpin());
        assert!(version.unpin());
        assert!(!version.try_pin(generation), "count 0");
        version.end();
        assert_eq!(version.start(0), generation + 1);
        assert!(!version.try_pin(generation), "another life");
    }
}
