//! Elements of pages, as vectors load them.

use half::{bf16, f16};

use super::simd::{MOST_LANES, Simd};
use crate::dtype::{Element, F8E4M3};

/// An element type of pages, as vectors load it.
pub(super) trait Stored: Element {
    /// What [`load`](Self::load) must be multiplied by to be the element: a power of two, which scales
    /// take along.
    const UNIT: f32 = 1.0;

    /// Loads and widens `LANES` elements.
    ///
    /// # Safety
    /// - `from` is valid for reads of `LANES` elements; any alignment.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32;
    /// Among how many vectors [`load_dealt`](Self::load_dealt) deals neighbours: 1, 2 or 4.
    ///
    /// Elements that share a word are widened by a shift or a mask, once they may go to vectors of their own;
    /// kept in order they would have to be spread first. Sums don't mind, as long as the other factor is
    /// [dealt](deal_neighbours) likewise.
    #[inline(always)]
    fn vectors<S: Simd>() -> usize {
        1
    }
    /// Loads as many vectors as neighbours are dealt among, and widens number `which` of them. Where not `ANY`, all
    /// elements are [plain](Self::all_plain); the vector is the same, sooner.
    ///
    /// # Safety
    /// - `from` is valid for reads of so many vectors of elements; any alignment.
    #[inline(always)]
    unsafe fn load_dealt<S: Simd, const ANY: bool>(simd: S, from: *const Self, which: usize) -> S::F32 {
        debug_assert_eq!(which, 0, "of one vector");
        // SAFETY: the caller's promise.
        unsafe { Self::load(simd, from) }
    }
    /// Whether there are elements that aren't plain: that take longer to widen.
    #[inline(always)]
    fn can_be_slow<S: Simd>() -> bool {
        false
    }
    /// Whether all elements of `K` tokens are plain, of `count` each, which is a multiple of as many vectors as
    /// neighbours are dealt among.
    ///
    /// # Safety
    /// - Each token is valid for reads of `count` elements.
    #[inline(always)]
    unsafe fn all_plain<S: Simd, const K: usize>(_: S, _tokens: [*const Self; K], _count: usize) -> bool {
        true
    }
}

/// Vector number `c` from a block on of those among which neighbours are dealt, one block after the other.
///
/// # Safety
/// - As for [`Stored::load_dealt`], of the block that the vector is of.
#[inline(always)]
pub(super) unsafe fn load_dealt<S: Simd, T: Stored, const ANY: bool>(
    simd: S,
    from: *const T,
    c: usize,
) -> S::F32 {
    let vectors = T::vectors::<S>();
    // SAFETY: the caller's promise.
    unsafe { T::load_dealt::<S, ANY>(simd, from.add(c / vectors * vectors * S::LANES), c % vectors) }
}

/// Brings a row into the order of vectors among which neighbours are [dealt](Stored::vectors), in each
/// `vectors * lanes`; what is left over stays.
pub(super) fn deal_neighbours(row: &mut [f32], lanes: usize, vectors: usize) {
    match vectors {
        2 => deal::<2>(row, lanes),
        4 => deal::<4>(row, lanes),
        _ => assert_eq!(vectors, 1, "vectors among which neighbours are dealt"),
    }
}

/// The way back.
pub(super) fn gather_neighbours(row: &mut [f32], lanes: usize, vectors: usize) {
    match vectors {
        2 => gather::<2>(row, lanes),
        4 => gather::<4>(row, lanes),
        _ => assert_eq!(vectors, 1, "vectors among which neighbours are dealt"),
    }
}

fn deal<const V: usize>(row: &mut [f32], lanes: usize) {
    let mut dealt = [0.0; 4 * MOST_LANES];
    for block in row.chunks_exact_mut(V * lanes) {
        for (i, neighbours) in block.as_chunks::<V>().0.iter().enumerate() {
            for (number, &x) in neighbours.iter().enumerate() {
                dealt[vector_of::<V>(number) * lanes + i] = x;
            }
        }
        block.copy_from_slice(&dealt[..V * lanes]);
    }
}

fn gather<const V: usize>(row: &mut [f32], lanes: usize) {
    let mut gathered = [0.0; 4 * MOST_LANES];
    for block in row.chunks_exact_mut(V * lanes) {
        let neighbours = gathered[..V * lanes].as_chunks_mut::<V>().0;
        for (i, neighbours) in neighbours.iter_mut().enumerate() {
            for (number, x) in neighbours.iter_mut().enumerate() {
                *x = block[vector_of::<V>(number) * lanes + i];
            }
        }
        block.copy_from_slice(&gathered[..V * lanes]);
    }
}

/// The vector to which one of `V` neighbours is dealt: even ones before odd ones and, among four vectors, of each of
/// these again.
const fn vector_of<const V: usize>(number: usize) -> usize {
    if V == 4 { number % 2 * 2 + number / 2 } else { number }
}

impl Stored for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load(from) }
    }
}

impl Stored for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f16(from) }
    }
}

impl Stored for bf16 {
    #[inline(always)]
    fn vectors<S: Simd>() -> usize {
        2
    }

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_bf16(from) }
    }

    #[inline(always)]
    unsafe fn load_dealt<S: Simd, const ANY: bool>(simd: S, from: *const Self, which: usize) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { if which == 0 { simd.load_even_bf16(from) } else { simd.load_odd_bf16(from) } }
    }
}

impl Stored for i8 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_i8(from) }
    }
}

impl Stored for F8E4M3 {
    const UNIT: f32 = 256.0;

    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { simd.load_f8(from) }
    }

    #[inline(always)]
    fn vectors<S: Simd>() -> usize {
        if S::DEALS_F8 { 4 } else { 1 }
    }

    #[inline(always)]
    unsafe fn load_dealt<S: Simd, const ANY: bool>(simd: S, from: *const Self, which: usize) -> S::F32 {
        // SAFETY: the caller's promise.
        unsafe { if S::DEALS_F8 { simd.load_of_four_f8::<ANY>(from, which) } else { simd.load_f8(from) } }
    }

    #[inline(always)]
    fn can_be_slow<S: Simd>() -> bool {
        S::DEALS_F8
    }

    #[inline(always)]
    unsafe fn all_plain<S: Simd, const K: usize>(simd: S, tokens: [*const Self; K], count: usize) -> bool {
        // SAFETY: the caller's promise.
        !S::DEALS_F8 || unsafe { simd.all_normal_f8(tokens, count) }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::isa::{dispatch, tested};
    use super::super::simd::tests::lanes;
    use super::super::simd::{MOST_LANES, Simd};
    use super::{Stored, deal_neighbours, gather_neighbours};
    use crate::dtype::{Element, F8E4M3};

    /// Elements in whole blocks of the vectors that neighbours are dealt among.
    fn check_dealt<S: Simd, T: Stored, const ANY: bool>(simd: S, elements: &[T]) {
        let vectors = T::vectors::<S>();
        for block in elements.chunks_exact(vectors * S::LANES) {
            // SAFETY: so many are there.
            let dealt = |which| unsafe { T::load_dealt::<S, ANY>(simd, block.as_ptr(), which) };
            let got = (0..vectors).map(|which| lanes(simd, dealt(which))).collect::<Vec<_>>().concat();
            let mut want: Vec<f32> = block.iter().map(|x| x.to_f32() / T::UNIT).collect();
            deal_neighbours(&mut want, S::LANES, vectors);
            let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&want), "any: {ANY}");
        }
    }

    /// Numbers of eight bits that are dealt: all of these codes, and those of them that are normal.
    fn check_f8<S: Simd>(simd: S, codes: &[F8E4M3]) {
        check_dealt::<S, F8E4M3, true>(simd, codes);
        // Each code in each place.
        let mut turned = codes.to_vec();
        for _ in 0..4 * S::LANES {
            turned.rotate_left(1);
            check_dealt::<S, F8E4M3, true>(simd, &turned);
        }
        let mut normal: Vec<F8E4M3> = codes.iter().copied().filter(|x| x.0 & 0x78 != 0).collect();
        normal.resize(256, F8E4M3(0x08));
        for _ in 0..4 * S::LANES {
            normal.rotate_left(1);
            check_dealt::<S, F8E4M3, false>(simd, &normal);
        }
        // What no vector's `load` gives where neighbours aren't dealt.
        for which in 0..4 {
            let from = [0, 2, 1, 3][which];
            let want: Vec<f32> =
                codes.iter().skip(from).step_by(4).take(S::LANES).map(|x| x.to_f32() / 256.0).collect();
            // SAFETY: so many are there.
            let got = unsafe { simd.load_of_four_f8::<true>(codes.as_ptr(), which) };
            assert_eq!(lanes(simd, got), want, "number {which}");
        }
        // Codes of NaN are not looked for, either way.
        for bits in [0x7F, 0xFF] {
            let block = vec![F8E4M3(bits); 4 * S::LANES];
            let want = vec![if bits == 0x7F { 1.875 } else { -1.875 }; S::LANES];
            for which in 0..4 {
                // SAFETY: so many are there.
                let [any, normal] = unsafe {
                    [
                        simd.load_of_four_f8::<true>(block.as_ptr(), which),
                        simd.load_of_four_f8::<false>(block.as_ptr(), which),
                    ]
                };
                assert_eq!([lanes(simd, any), lanes(simd, normal)], [want.clone(), want.clone()]);
            }
        }
        // One that isn't normal, wherever it is, and none.
        let count = 8 * S::LANES;
        let all_normal = |tokens: &[Vec<F8E4M3>; 3]| {
            let tokens = tokens.each_ref().map(Vec::as_ptr);
            // SAFETY: so many are there.
            unsafe { simd.all_normal_f8(tokens, count) }
        };
        let mut tokens = [0, 1, 2].map(|i| normal[i..=i + count].to_vec());
        assert!(all_normal(&tokens));
        for bits in [0x00, 0x80, 0x01, 0x87] {
            tokens[0][count] = F8E4M3(bits);
            assert!(all_normal(&tokens), "behind the last");
            for at in 0..3 * count {
                let was = std::mem::replace(&mut tokens[at / count][at % count], F8E4M3(bits));
                assert!(!all_normal(&tokens), "{bits:#x} at {at}");
                tokens[at / count][at % count] = was;
            }
        }
    }

    /// Each type against the plainest reading of the trait; only what the CPU has.
    fn check<S: Simd>(simd: S) {
        let halves: Vec<bf16> = (0..2 * MOST_LANES as u16).map(|x| bf16::from_f32(f32::from(x))).collect();
        assert_eq!(bf16::vectors::<S>(), 2);
        check_dealt::<S, bf16, true>(simd, &halves);
        check_dealt::<S, bf16, false>(simd, &halves);
        for vectors in [1, 2, 4] {
            // Half a block more than one, which stays.
            let row: Vec<f32> = (0..vectors * S::LANES * 3 / 2).map(|i| i as f32).collect();
            let mut dealt = row.clone();
            deal_neighbours(&mut dealt, S::LANES, vectors);
            assert_eq!(dealt[vectors * S::LANES..], row[vectors * S::LANES..]);
            gather_neighbours(&mut dealt, S::LANES, vectors);
            assert_eq!(dealt, row);
        }

        let bytes: Vec<i8> = (i8::MIN..=i8::MAX).collect();
        for from in bytes.chunks_exact(S::LANES) {
            // SAFETY: so many are there.
            let loaded = lanes(simd, unsafe { i8::load(simd, from.as_ptr()) });
            assert_eq!(loaded, from.iter().map(|&x| f32::from(x)).collect::<Vec<_>>());
        }
        // All codes but those of NaN, which are the last of each sign.
        let codes: Vec<F8E4M3> =
            (0..=255).map(|bits| F8E4M3(if bits & 0x7F == 0x7F { 0 } else { bits })).collect();
        for from in codes.chunks_exact(S::LANES) {
            // SAFETY: so many are there.
            let loaded = lanes(simd, unsafe { F8E4M3::load(simd, from.as_ptr()) });
            assert_eq!(loaded, from.iter().map(|x| x.to_f32() / 256.0).collect::<Vec<_>>());
        }

        check_f8(simd, &codes);
    }

    #[test]
    fn every_instruction_set_loads_what_the_types_stand_for() {
        for level in tested() {
            dispatch!(level, simd => check(simd));
        }
    }
}
