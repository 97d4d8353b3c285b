//! How queries meet keys, and weights values.

use std::marker::PhantomData;

use half::bf16;

use super::gather::Gather;
use super::gather_pairs::{InTwos, TwoByTwo};
use super::pack::{Widen, Zip};
use super::pairs::Pairs;
use super::query::QueryRow;
use super::simd::Simd;
use super::state::Order;
use super::stored::{Stored, load_dealt};
use super::tokens::Tokens;
use super::words::Words;

/// Rows that go through a packed tile together, at most.
pub(super) const PACKED_ROWS: usize = 6;

/// What attention multiplies by what.
pub(super) trait Method<S: Simd> {
    /// What pages hold.
    type Element: Stored;
    /// The same where words were made ready in a buffer.
    type Prepared: Method<S, Element = f32>;
    /// Elements in a word, which is what a lane multiplies at once.
    const PER_WORD: usize;
    /// Bytes in which pages hold a word.
    const STORED: usize;
    /// Rows of queries that go through a tile together, at most: 6, or 8 where registers allow.
    const ROWS: usize;
    /// Whether queries and weights are counted in steps: these, rows of whole vectors, are made ready by
    /// [`count_weights`](Self::count_weights), and sums of values begin with each tile.
    const COUNTS: bool = false;

    /// The order of sums over values, and of queries, where keys and values are taken as they lie, or
    /// where they are made ready.
    fn order(as_they_lie: bool) -> Order;
    /// Makes words of a row of queries; returns what products with it are to be multiplied by. Where these are
    /// counted, `room` is as long as the row.
    ///
    /// # Safety
    /// - What [`QueryRow`] says is so, and `into` has room for the row's words.
    unsafe fn load_query(simd: S, row: QueryRow, room: &mut [f32], into: &mut [f32]) -> f32;
    /// Vectors that are loaded at once, 2 or 4, from a token's first word on and as often as they fit; what is left
    /// over is loaded one by one.
    #[inline(always)]
    fn at_once() -> usize {
        2
    }
    /// Vector `c` of `C` vectors of a token's words from number `word` on. `C` is 1, or as many as are
    /// loaded [at once](Self::at_once), or a multiple; then they are in the order of [`order`](Self::order), and where
    /// not `ANY`, all elements are [plain](Self::all_plain).
    ///
    /// # Safety
    /// - So many words are valid for reads.
    unsafe fn load<const C: usize, const ANY: bool>(
        simd: S,
        token: *const Self::Element,
        word: usize,
        c: usize,
    ) -> S::F32;
    /// Whether all elements of `K` tokens are plain, as far as their first `words` are loaded several vectors at once.
    ///
    /// # Safety
    /// - So many words of each token are valid for reads.
    #[inline(always)]
    unsafe fn all_plain<const K: usize>(_: S, _tokens: [*const Self::Element; K], _words: usize) -> bool {
        true
    }
    /// `c` plus the products of the elements of `a`'s words and of `b`'s.
    fn multiply_add(simd: S, a: S::F32, b: S::F32, c: S::F32) -> S::F32;
    /// Sums of such products as floats.
    #[inline(always)]
    fn to_floats(_: S, sums: S::F32) -> S::F32 {
        sums
    }
    /// Of two tokens in a word of values, number `which`, and 0 in place of the other.
    fn only(simd: S, words: S::F32, which: usize) -> S::F32;
    /// Packs the first `count` of a tile's values: words of as many tokens as weights share, so many columns as a
    /// `panel` has together; padding stays as it is.
    ///
    /// # Safety
    /// - All tokens of the tile are valid for reads of `dim` elements.
    unsafe fn pack_values(
        simd: S,
        tokens: Tokens<Self::Element>,
        dim: usize,
        count: usize,
        panel: usize,
        into: &mut [f32],
    );
    /// Adds weighted values that lie anywhere.
    ///
    /// # Safety
    /// - What [`Gather`] asks for; weights are those that [`store_weights`](Self::store_weights) stored and
    ///   [`count_weights`](Self::count_weights) made ready.
    unsafe fn gather<const R: usize, const N: usize>(simd: S, job: Gather<Self::Element, R, N>);
    /// Stores the weights of tokens `i..i + LANES` of a row, of which there are at most as many as that
    /// row has floats: two in a word where a word holds two.
    ///
    /// # Safety
    /// - `row` is valid for writes of `i + LANES` floats.
    unsafe fn store_weights(simd: S, row: *mut f32, i: usize, weights: S::F32);
    /// Makes a whole row of stored weights ready, 0 where they were not stored; `uneven` says whether few of
    /// them may be much larger than others that count.
    #[inline(always)]
    fn count_weights<const N: usize>(_: S, _: &mut [f32; N], _uneven: bool) -> Counted {
        Counted { step: 1.0, finer: false }
    }
}

/// How weights were counted.
#[derive(Clone, Copy)]
pub(super) struct Counted {
    /// What sums of values are multiplied by.
    pub(super) step: f32,
    /// Whether something is left of weights, in steps that are [finer](FINER).
    pub(super) finer: bool,
}

/// Of a step: what is left of a number that was rounded to whole steps is half of one at most, and half of what
/// 16 bits count.
pub(super) const FINER: f32 = 1.0 / 32768.0;

/// Each element becomes a float32.
pub(super) struct Widened<T>(PhantomData<T>);

impl<S: Simd, T: Stored> Method<S> for Widened<T> {
    type Element = T;
    type Prepared = Widened<f32>;
    const PER_WORD: usize = 1;
    const STORED: usize = size_of::<T>();
    const ROWS: usize = if S::REGISTERS >= 32 { 8 } else { PACKED_ROWS };

    fn order(as_they_lie: bool) -> Order {
        match T::vectors::<S>() {
            vectors @ 2.. if as_they_lie => Order::Dealt { lanes: S::LANES, vectors },
            _ => Order::Straight,
        }
    }

    unsafe fn load_query(simd: S, row: QueryRow, _: &mut [f32], into: &mut [f32]) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { row.widen(simd, into) }
        1.0
    }

    #[inline(always)]
    fn at_once() -> usize {
        T::vectors::<S>().max(2)
    }

    #[inline(always)]
    unsafe fn load<const C: usize, const ANY: bool>(
        simd: S,
        token: *const T,
        word: usize,
        c: usize,
    ) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe {
            let from = token.add(word);
            if C == 1 { T::load(simd, from) } else { load_dealt::<S, T, ANY>(simd, from, c) }
        }
    }

    #[inline(always)]
    unsafe fn all_plain<const K: usize>(simd: S, tokens: [*const T; K], words: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe {
            T::all_plain(simd, tokens, words / (T::vectors::<S>() * S::LANES) * T::vectors::<S>() * S::LANES)
        }
    }

    #[inline(always)]
    fn multiply_add(simd: S, a: S::F32, b: S::F32, c: S::F32) -> S::F32 {
        simd.mul_add(a, b, c)
    }

    #[inline(always)]
    fn only(_: S, words: S::F32, _: usize) -> S::F32 {
        words
    }

    unsafe fn pack_values(
        simd: S,
        tokens: Tokens<T>,
        dim: usize,
        count: usize,
        panel: usize,
        into: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { simd.call(Widen { tokens, dim, count, panel, into }) }
    }

    unsafe fn gather<const R: usize, const N: usize>(simd: S, job: Gather<T, R, N>) {
        // SAFETY: the caller's promise.
        unsafe { simd.call(job) }
    }

    #[inline(always)]
    unsafe fn store_weights(simd: S, row: *mut f32, i: usize, weights: S::F32) {
        // SAFETY: the caller's promise.
        unsafe { simd.store(row.add(i), weights) }
    }
}

/// Queries are bfloat16, keys, values and weights become it: products are exact, and added two by two.
pub(super) struct Paired<T>(PhantomData<T>);

impl<S: Pairs, T: Words> Method<S> for Paired<T> {
    type Element = T;
    type Prepared = Paired<f32>;
    const PER_WORD: usize = 2;
    const STORED: usize = T::PER_WORD * size_of::<T>();
    const ROWS: usize = 8;

    fn order(as_they_lie: bool) -> Order {
        let vectors = if as_they_lie && T::ZIPPED { 4 } else { 2 };
        Order::Zipped { lanes: S::LANES, vectors }
    }

    unsafe fn load_query(_: S, row: QueryRow, _: &mut [f32], into: &mut [f32]) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { row.copy(into) }
        1.0
    }

    #[inline(always)]
    unsafe fn load<const C: usize, const ANY: bool>(
        simd: S,
        token: *const T,
        word: usize,
        c: usize,
    ) -> S::F32 {
        let at = |c: usize| token.wrapping_add((word + c * S::LANES) * T::PER_WORD);
        // SAFETY: the caller's promise; of an even number, both of two are there.
        unsafe { if C == 1 { T::one(simd, at(0)) } else { T::two(simd, at(c & !1))[c % 2] } }
    }

    #[inline(always)]
    fn multiply_add(simd: S, a: S::F32, b: S::F32, c: S::F32) -> S::F32 {
        simd.dot(a, b, c)
    }

    #[inline(always)]
    fn only(simd: S, words: S::F32, which: usize) -> S::F32 {
        simd.only(words, which)
    }

    unsafe fn pack_values(
        simd: S,
        tokens: Tokens<T>,
        dim: usize,
        count: usize,
        panel: usize,
        into: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { simd.call(Zip { tokens, dim, count, panel, into }) }
    }

    unsafe fn gather<const R: usize, const N: usize>(simd: S, job: Gather<T, R, N>) {
        // SAFETY: the caller's promise.
        unsafe { simd.call(TwoByTwo { gather: job, method: PhantomData::<Self> }) }
    }

    #[inline(always)]
    unsafe fn store_weights(simd: S, row: *mut f32, i: usize, weights: S::F32) {
        // SAFETY: half of what the caller promises.
        unsafe { simd.store_bf16(row.cast::<bf16>().add(i), weights) }
    }
}

impl<S: Pairs, T: Words> InTwos<S> for Paired<T> {
    const ZIPPED: bool = T::ZIPPED;
}
