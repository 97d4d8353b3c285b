//! Zeros and subnormal numbers among those of eight bits: some ways of widening leave them out, and where there are
//! any, another is taken. That must not show.

use paged_kv::attention::reference;
use paged_kv::dtype::{DType, Element, F8E4M3};

use crate::harness::{Case, isas, pool};
use crate::memory::Rng;

const LEN: usize = 200;

/// Tokens that have such numbers: here and there in every second run of 16.
fn rare(token: usize) -> bool {
    token / 16 % 2 == 1 && token % 5 == 2
}

/// Dims of whole vectors among which neighbours are dealt, of such and others, and of no whole vector.
fn cases() -> impl Iterator<Item = Case> {
    [16, 24, 48, 64, 80, 96, 112, 128, 192, 576].into_iter().flat_map(|dim| {
        [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (3, 3), (2, 5)].map(
            |(group, queries)| Case {
                kv_dtype: DType::F8E4M3,
                group,
                head_dim: dim,
                v_head_dim: dim,
                sequences: vec![(LEN, queries)],
                seed: (dim * group) as u64,
                scale: Some(1.0),
                ..Case::default()
            },
        )
    })
}

/// Tokens of the type's smallest numbers but zero and subnormal ones; where it is `rare`, these in their place, in every
/// `every`-th column from the last on. The first is the largest, so that all are stored as they are.
fn rows(rng: &mut Rng, case: &Case, every: usize, rare: fn(usize) -> bool) -> Vec<f32> {
    let (heads, dim) = (case.num_kv_heads, case.head_dim);
    let mut code = |token: usize, column: usize| {
        let random = rng.next();
        let [exponent, mantissa, sign, other] = [0, 16, 32, 48].map(|shift| (random >> shift) as u16);
        let other = [other as u8 & 0x87, 0x00, 0x80][other as usize / 256 % 3];
        let bits = ((1 + exponent % 3) << 3) | (mantissa % 8) | ((sign % 2) << 7);
        match column {
            0 => F8E4M3::from_f32(448.0),
            _ if rare(token) && (dim - 1 - column).is_multiple_of(every) => F8E4M3(other),
            _ => F8E4M3(bits as u8),
        }
    };
    let row = |i: usize| (0..dim).map(move |column| (i / heads, column));
    (0..LEN * heads).flat_map(row).map(|(token, column)| code(token, column).to_f32()).collect()
}

#[test]
fn rows_with_zeros_and_subnormal_numbers_are_right() {
    for case in cases() {
        let (heads, dim) = (case.num_kv_heads, case.head_dim);
        let mut rng = Rng(case.seed);
        let mut query = rng.floats(case.sequences[0].1 * case.num_heads() * dim);
        query.iter_mut().step_by(dim).for_each(|x| *x = 0.0);
        let [key, value] = [3, 7].map(|every| rows(&mut rng, &case, every, rare));
        let shape = reference::Shape {
            num_heads: case.num_heads(),
            num_kv_heads: heads,
            head_dim: dim,
            v_head_dim: dim,
        };
        for isa in isas() {
            let got = case.run_given(isa, pool(2), &query, &key, &value);
            let (want, lse) = reference::attention(shape, &query, &key, &value, &case.options(isa));
            let pairs = got.out.iter().zip(&want).chain(got.lse.iter().zip(&lse));
            for (i, (&got, &want)) in pairs.enumerate() {
                let error = (f64::from(got) - want).abs();
                assert!(
                    error <= 1e-5 * (1.0 + want.abs()),
                    "{isa} {dim} {}: {i}: {got}, not {want}",
                    case.group
                );
            }
        }
    }
}

/// Of keys, where queries are 0; of values, in some columns: nothing else has other bits.
#[test]
fn zeros_and_subnormal_numbers_change_no_bit_of_other_elements() {
    let every = 7;
    for case in cases() {
        let dim = case.head_dim;
        let changes = |column: usize| column == 0 || (dim - 1 - column).is_multiple_of(every);
        let query = Rng(case.seed).floats(case.sequences[0].1 * case.num_heads() * dim);
        let query: Vec<f32> =
            query.iter().enumerate().map(|(i, &x)| if changes(i % dim) { 0.0 } else { x }).collect();
        for isa in isas() {
            let [none, some, all] = [|_| false, rare, |_| true].map(|rare: fn(usize) -> bool| {
                let mut rng = Rng(case.seed + 1);
                let [key, value] = [(); 2].map(|()| rows(&mut rng, &case, every, rare));
                let (mut out, lse) = case.run_given(isa, pool(1), &query, &key, &value).bits();
                out.iter_mut().enumerate().filter(|(i, _)| changes(i % dim)).for_each(|(_, x)| *x = 0);
                (out, lse)
            });
            assert!(none == some && none == all, "{isa} {dim} {} {:?}", case.group, case.sequences);
        }
    }
}
