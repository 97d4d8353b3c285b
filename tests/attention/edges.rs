//! Where the run of keys that a row sees begins and ends, infinity and NaN beside it: tokens are multiplied
//! in tiles, for several rows at once and, of bfloat16, two by two.

use paged_kv::dtype::DType;

use crate::harness::{Case, isas, pool};

/// Every token of a chunk, in its turn, is no number: rows that see it are none either, the others keep
/// their bits. There are prompts of odd and even lengths, chunks of many queries and of few, rows that go
/// through a tile together and see the same or not, runs that begin and end between two of a pair.
#[test]
fn what_a_row_does_not_see_does_not_reach_it() {
    let bad = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY];
    for (dtype, group, window_left) in [DType::BF16, DType::F32]
        .into_iter()
        .flat_map(|dtype| [1, 3, 4, 8].map(|group| (dtype, group, -1)))
        .chain([(DType::BF16, 4, 7), (DType::BF16, 1, 20), (DType::BF16, 6, 0), (DType::F32, 3, 6)])
    {
        for (len, queries) in [(17, 17), (83, 40), (142, 23), (77, 5), (34, 15), (131, 2)] {
            let case = Case {
                kv_dtype: dtype,
                query_dtype: dtype,
                num_kv_heads: 1,
                group,
                window_left,
                sequences: vec![(len, queries)],
                ..Case::default()
            };
            let contents = case.contents((len, queries));
            let row = group * case.v_head_dim;
            for isa in isas() {
                let run = |key: &[f32], value: &[f32]| {
                    case.run_given(isa, pool(1), &contents.query, key, value).out
                };
                let want = run(&contents.key, &contents.value);
                for token in (case.first_seen((len, queries))..len).rev().take(queries + 9) {
                    let (mut key, mut value) = (contents.key.clone(), contents.value.clone());
                    let bad = bad[token % 3];
                    value[token * case.v_head_dim..][..case.v_head_dim].fill(bad);
                    if token % 2 == 0 {
                        key[token * case.head_dim..][..case.head_dim].fill(f32::NAN);
                    }
                    for (query, (got, want)) in
                        run(&key, &value).chunks(row).zip(want.chunks(row)).enumerate()
                    {
                        let position = len - queries + query;
                        let first = position.saturating_sub(usize::try_from(window_left).unwrap_or(len));
                        let what = format!("{isa}: query {query}, token {token} is {bad} in {case:?}");
                        if (first..=position).contains(&token) {
                            assert!(got.iter().all(|x| !x.is_finite()), "{what}");
                        } else {
                            let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                            assert!(bits(got) == bits(want), "{what}");
                        }
                    }
                }
            }
        }
    }
}

/// All rows of a chunk see one run, which may end between two of a pair; what follows in the page is
/// poison.
#[test]
fn without_causality_runs_may_have_any_length() {
    for len in [16, 17, 63, 64, 65, 127, 129] {
        for (kv_heads, group) in [(1, 1), (2, 3), (1, 8)] {
            for query_dtype in [DType::F32, DType::BF16] {
                Case {
                    kv_dtype: DType::BF16,
                    query_dtype,
                    num_kv_heads: kv_heads,
                    group,
                    causal: false,
                    sequences: vec![(len, 16)],
                    ..Case::default()
                }
                .check();
            }
        }
    }
}
