//! Keys and values of eight bits: what writing makes of them, and how near attention comes to what they
//! were before.

use paged_kv::attention::{
    AttentionOptions, BatchTables, copy_tokens, paged_attention, reference, write_pages, write_rows,
};
use paged_kv::dtype::DType;
use paged_kv::error::Error;
use paged_kv::ids::PageId;
use paged_kv::layout::{CacheLayout, PageOrder, Which};

use crate::harness::{Case, isas, pool};
use crate::memory::{Array, Pages, Rng, rounded, stored_row};

pub(crate) const QUANTISED: [DType; 2] = [DType::I8, DType::F8E4M3];

fn layout(dtype: DType, head_scales: bool) -> CacheLayout {
    CacheLayout {
        num_layers: 1,
        num_pages: 7,
        page_size: 5,
        num_kv_heads: 2,
        head_dim: 70,
        v_head_dim: 3,
        dtype,
        head_scales,
        value_in_key: false,
        order: PageOrder::Hnd,
    }
}

/// Roughly normal: the sum of twelve uniform numbers.
pub(crate) fn gaussian(rng: &mut Rng, n: usize) -> Vec<f32> {
    (0..n).map(|_| (0..12).map(|_| rng.float() / 2.0).sum()).collect()
}

#[test]
fn every_row_is_stored_with_the_scale_that_makes_its_largest_number_the_types() {
    for dtype in QUANTISED {
        for from in DType::FLOATS {
            for head_scales in [false, true] {
                let mut pages = Pages::poisoned(&layout(dtype, head_scales));
                let slots = [34, -1, 0, 17, -1, 12];
                // Of all sizes, a token of zeros, one of numbers that are hardly any; padding may be NaN.
                let mut keys = Rng(3).floats(6 * 2 * 70);
                for (token, factor) in [(0, 1.0), (1, f32::NAN), (2, 0.0), (3, 3e-39), (5, 1e4)] {
                    keys[token * 140..][..140].iter_mut().for_each(|x| *x *= factor);
                }
                let key = Array::new(&keys, from);
                let value = Array::new(&Rng(4).floats(6 * 2 * 3), from);
                let (key_pages, value_pages) = pages.views();
                let (key_rows, value_rows) = (key.view([6, 2, 70]), value.view([6, 2, 3]));
                write_pages(key_rows, value_rows, key_pages, value_pages, &slots, pool(2)).unwrap();
                for (token, slot) in slots.into_iter().enumerate().filter(|(_, slot)| *slot >= 0) {
                    let (page, offset) = (slot as usize / 5, slot as usize % 5);
                    for (which, rows, dim) in [(Which::Key, &key, 70), (Which::Value, &value, 3)] {
                        for head in 0..2 {
                            let row = &rows.floats()[(token * 2 + head) * dim..][..dim];
                            let (got, scale) = pages.row(which, page, head, offset);
                            let given = (head_scales || scale == f32::MIN_POSITIVE).then_some(scale);
                            let (want, wanted_scale) = stored_row(row, dtype, given);
                            assert!((scale - wanted_scale).abs() <= 1e-7 * scale, "{scale} {wanted_scale}");
                            // A step more where a number lay in the middle of two.
                            let step =
                                |x: f32| if dtype == DType::I8 { scale } else { x.abs() / 8.0 + scale };
                            let wrong = |(&got, &want): (&f32, &f32)| (got - want).abs() > 1.001 * step(want);
                            assert!(
                                !got.iter().zip(&want).any(wrong),
                                "{dtype} from {from}: {got:?}, not {want:?}"
                            );
                            let differ =
                                got.iter().zip(&want).filter(|(a, b)| (**a - **b).abs() > 1e-6 * a.abs());
                            assert!(
                                differ.count() <= 1 + dim / 20,
                                "{dtype} from {from}: {got:?}, not {want:?}"
                            );
                        }
                    }
                }
                let poison = pages.scales.iter().filter(|scale| !scale.is_finite()).count();
                let bytes = layout(dtype, false).layer_bytes().unwrap();
                assert_eq!(
                    poison,
                    if head_scales { 0 } else { bytes / 4 - 4 * 4 },
                    "named slots alone changed"
                );
            }
        }
    }
}

#[test]
fn what_is_no_number_is_refused_before_anything_is_written() {
    for dtype in QUANTISED {
        for head_scales in [false, true] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut pages = Pages::poisoned(&layout(dtype, head_scales));
                let before = (pages.floats(), pages.scales.len());
                let mut values = vec![1.0; 3 * 2 * 3];
                values[2 * 6 + 4] = bad;
                let (key, value) =
                    (Array::new(&[1.0; 3 * 140], DType::F32), Array::new(&values, DType::BF16));
                let (key_pages, value_pages) = pages.views();
                let (key, value) = (key.view([3, 2, 70]), value.view([3, 2, 3]));
                let error = write_pages(key, value, key_pages, value_pages, &[1, 2, 3], pool(1)).unwrap_err();
                assert!(matches!(&error, Error::Value(text) if text.contains("value[2, 1]")), "{error}");
                let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits();
                assert!(pages.floats().iter().zip(&before.0).all(same), "{dtype}");
                assert!(head_scales || pages.scales.iter().all(|scale| !scale.is_finite()));
            }
        }
    }
}

#[test]
fn quantised_elements_come_in_pages_alone_and_pages_with_scales() {
    let rows = Array::new(&[1.0; 140], DType::I8);
    let mut pages = Pages::poisoned(&layout(DType::I8, false));
    let (key_pages, _) = pages.views();
    assert!(matches!(write_rows(rows.view([1, 2, 70]), key_pages, &[0], pool(1)), Err(Error::Layout(_))));
    // SAFETY: only less is said about the same memory.
    let bare = unsafe { key_pages.with_scales(None) };
    let floats = Array::new(&[1.0; 140], DType::F32);
    assert!(matches!(write_rows(floats.view([1, 2, 70]), bare, &[0], pool(1)), Err(Error::Layout(_))));
    let mut out = Array::new(&[0.0; 140], DType::F32);
    let tables = BatchTables { block_table: &[0], max_pages: 1, seq_lens: &[1], cu_seqlens_q: &[0, 1] };
    let mut attend = |query: &Array, keys, values| {
        let (options, out) = (AttentionOptions::default(), &mut out.view_mut([1, 2, 70]));
        paged_attention(query.view([1, 2, 70]), keys, values, &tables, &options, out, None, pool(1))
    };
    write_rows(floats.view([1, 2, 70]), key_pages, &[0], pool(1)).unwrap();
    assert!(attend(&floats, key_pages, key_pages).is_ok());
    assert!(matches!(attend(&rows, key_pages, key_pages), Err(Error::Layout(_))));
    assert!(matches!(attend(&floats, bare, key_pages), Err(Error::Layout(_))));
    assert!(matches!(attend(&floats, key_pages, bare), Err(Error::Layout(_))));
    let mut few = *key_pages.scales().unwrap();
    few.layout.num_pages -= 1;
    // SAFETY: as above.
    let few = unsafe { key_pages.with_scales(Some(few)) };
    assert!(matches!(attend(&floats, few, key_pages), Err(Error::Layout(_))));
    let scales = few.token_scales().unwrap();
    // SAFETY: as above.
    let scaled = unsafe { scales.with_scales(key_pages.scales().copied()) };
    let one = Array::new(&[1.0; 2], DType::F32);
    assert!(matches!(write_rows(one.view([1, 2, 1]), scaled, &[0], pool(1)), Err(Error::Layout(_))));
}

#[test]
fn a_copy_takes_scales_along_and_no_more_of_them_than_tokens() {
    for dtype in QUANTISED {
        let mut pages = Pages::poisoned(&layout(dtype, false));
        let rows = Array::new(&Rng(1).floats(5 * 2 * 70), DType::F32);
        let (key_pages, _) = pages.views();
        let slots: Vec<i64> = (30..35).collect();
        write_rows(rows.view([5, 2, 70]), key_pages, &slots, pool(1)).unwrap();
        copy_tokens(key_pages, PageId(6), PageId(2), 3).unwrap();
        for head in 0..2 {
            for token in 0..5 {
                let (source, copy) = [6, 2].map(|page| pages.row(Which::Key, page, head, token)).into();
                assert_eq!(source == copy, token < 3, "{dtype}: {token}");
                assert!(token < 3 || !copy.1.is_finite());
            }
        }
    }
}

/// The goals: relative errors on normal numbers, over decode and prefill.
#[test]
fn attention_is_near_what_it_was_before_quantisation() {
    for (dtype, goal) in [(DType::I8, 1e-2), (DType::F8E4M3, 4e-2)] {
        for (head_scales, head_dim, len, queries) in
            [(false, 128, 600, 1), (false, 128, 300, 40), (false, 64, 1000, 3), (true, 128, 600, 1)]
        {
            // Integers lie evenly: the scales of the tests' heads let too many go beyond the largest.
            if head_scales && dtype == DType::I8 {
                continue;
            }
            for (isa, query_dtype) in
                isas().into_iter().flat_map(|isa| [(isa, DType::F32), (isa, DType::BF16)])
            {
                let mut rng = Rng(len as u64);
                let (heads, group) = (2, 4);
                // Within the reach of a head's scale, where there is one.
                let factor = if head_scales { 0.2 } else { 1.0 };
                let mut rows = |n: usize, factor: f32| -> Vec<f32> {
                    gaussian(&mut rng, n * head_dim).into_iter().map(|x| x * factor).collect()
                };
                let query = rows(queries * heads * group, 1.0 / factor);
                let query: Vec<f32> = query.into_iter().map(|x| rounded(x, query_dtype)).collect();
                let [key, value] = [(); 2].map(|()| rows(len * heads, factor));
                let case = Case {
                    kv_dtype: dtype,
                    query_dtype,
                    head_scales,
                    head_dim,
                    v_head_dim: head_dim,
                    num_kv_heads: heads,
                    group,
                    sequences: vec![(len, queries)],
                    ..Case::default()
                };
                let got = case.run_given(isa, pool(2), &query, &key, &value);
                let shape = reference::Shape {
                    num_heads: heads * group,
                    num_kv_heads: heads,
                    head_dim,
                    v_head_dim: head_dim,
                };
                let (want, _) = reference::attention(shape, &query, &key, &value, &case.options(isa));
                let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
                let error = norm(&mut got.out.iter().zip(&want).map(|(&a, &b)| f64::from(a) - b));
                let relative = error / norm(&mut want.iter().copied());
                println!(
                    "{isa} {dtype} {query_dtype} {head_dim} {len} {queries} {head_scales}: {relative:.2e}"
                );
                assert!(relative <= goal, "{isa} {dtype}: {relative:e} of {goal:e}");
            }
        }
    }
}

#[test]
fn a_scale_that_is_no_number_shows_where_its_token_is_seen_and_nowhere_else() {
    // Dims that no way through the kernels takes in whole vectors, and that all do.
    for (dtype, dim, query_dtype) in QUANTISED.into_iter().flat_map(|dtype| {
        [(70, DType::F32), (64, DType::F32), (64, DType::BF16)].map(|(dim, query)| (dtype, dim, query))
    }) {
        for (isa, scale) in isas().into_iter().flat_map(|isa| [(isa, f32::NAN), (isa, f32::INFINITY)]) {
            let mut pages = Pages::poisoned(&CacheLayout { head_dim: dim, ..layout(dtype, false) });
            let rows = Array::new(&Rng(1).floats(9 * 2 * dim), DType::F32);
            let (key_pages, _) = pages.views();
            let slots: Vec<i64> = (0..9).collect();
            write_rows(rows.view([9, 2, dim]), key_pages, &slots, pool(1)).unwrap();
            let scales = key_pages.token_scales().unwrap();
            let bad = Array::new(&[scale, 1.0], DType::F32);
            write_rows(bad.view([1, 2, 1]), scales, &[8], pool(1)).unwrap();
            let query = Array::new(&vec![1.0; 3 * 2 * dim], query_dtype);
            let tables =
                BatchTables { block_table: &[0, 1], max_pages: 2, seq_lens: &[9], cu_seqlens_q: &[0, 3] };
            let options = AttentionOptions { isa: Some(isa), ..AttentionOptions::default() };
            let mut out = Array::new(&vec![0.0; 3 * 2 * dim], query_dtype);
            let (query, out_rows) = (query.view([3, 2, dim]), &mut out.view_mut([3, 2, dim]));
            paged_attention(query, key_pages, key_pages, &tables, &options, out_rows, None, pool(1)).unwrap();
            let (out, poisoned) = (out.floats(), 2 * 2 * dim..(2 * 2 + 1) * dim);
            for (i, x) in out.iter().enumerate() {
                assert_eq!(!x.is_finite(), poisoned.contains(&i), "{isa} {dtype} {dim} {scale} {i}: {x}");
            }
        }
    }
}

#[test]
fn a_query_that_is_no_number_gives_none_and_others_keep_their_bits() {
    for (kv_dtype, query_dtype) in
        QUANTISED.into_iter().flat_map(|kv| [DType::F32, DType::BF16].map(|query| (kv, query)))
    {
        for (isa, queries) in isas().into_iter().flat_map(|isa| [(isa, 3), (isa, 20)]) {
            let case = Case { kv_dtype, query_dtype, sequences: vec![(100, queries)], ..Case::default() };
            let (rows, dim) = (queries * case.num_heads(), case.head_dim);
            let mut rng = Rng(5);
            let [key, value] = [(); 2].map(|()| rng.floats(100 * case.num_kv_heads * dim));
            let mut query = rng.floats(rows * dim);
            let clean = case.run_given(isa, pool(1), &query, &key, &value).out;
            for bad in [f32::NAN, f32::INFINITY] {
                query[5 * dim + 17] = bad;
                let got = case.run_given(isa, pool(1), &query, &key, &value).out;
                for (i, (got, clean)) in got.iter().zip(&clean).enumerate() {
                    let same = got.to_bits() == clean.to_bits();
                    assert_eq!(same, i / dim != 5, "{isa} {kv_dtype} {query_dtype} {bad} {i}: {got}");
                    assert_eq!(got.is_nan(), i / dim == 5, "{isa} {kv_dtype} {query_dtype} {bad} {i}: {got}");
                }
            }
        }
    }
}

/// Where weights of a tile are rounded together, a large one leaves few bits for the others: of its logit, or
/// of its value's scale.
#[test]
fn the_heaviest_key_of_a_tile_costs_the_others_no_digits() {
    let case = Case {
        kv_dtype: DType::I8,
        num_kv_heads: 1,
        group: 1,
        scale: Some(1.0),
        sequences: vec![(64, 1)],
        ..Case::default()
    };
    let dim = case.head_dim;
    for isa in isas() {
        let check = |query: &[f32], key: &[f32], value: &[f32]| {
            let got = case.run_given(isa, pool(1), query, key, value).out;
            let shape = reference::Shape { num_heads: 1, num_kv_heads: 1, head_dim: dim, v_head_dim: dim };
            let (want, _) = reference::attention(shape, query, key, value, &case.options(isa));
            // What is stored is what was given, but for the first column.
            for (got, want) in got.iter().zip(&want).skip(1) {
                let error = (f64::from(*got) - want).abs();
                assert!(error <= 1.0 / 4096.0, "{isa}: {got}, not {want}");
            }
        };
        let (mut query, mut key) = (vec![0.0; dim], vec![0.0; 64 * dim]);
        key[0] = 1.0;
        let ones = vec![1.0; 64 * dim];
        let mut but_the_first = ones.clone();
        but_the_first[1..dim].fill(0.0);
        // All others weigh some half of a step.
        for logit in [0.0, 3.0, 5.0, 8.0, 10.0, 11.09, 11.1, 12.0, 20.0] {
            query[0] = logit;
            check(&query, &key, &ones);
            check(&query, &key, &but_the_first);
        }
        // One value, or several, in whose first column alone there is something.
        for (large, tokens) in [2.0, 10.0, 15.0, 17.0, 100.0, 1000.0, 2e4, 1e5]
            .into_iter()
            .flat_map(|large| [1, 8, 40].map(|tokens| (large, tokens)))
        {
            let mut value = ones.clone();
            for row in value.chunks_exact_mut(dim).take(tokens) {
                row.fill(0.0);
                row[0] = large;
            }
            check(&vec![0.0; dim], &vec![0.0; 64 * dim], &value);
        }
    }
}

/// Sums of 32 bits hold the products of so many elements at least as are multiplied as integers.
#[test]
fn the_longest_keys_overflow_nothing() {
    for head_dim in [2048, 4160] {
        let case = Case {
            kv_dtype: DType::I8,
            num_kv_heads: 1,
            group: 1,
            head_dim,
            sequences: vec![(3, 1)],
            ..Case::default()
        };
        let key: Vec<f32> = [1.0_f32, -1.0, -1.0].iter().flat_map(|&x| vec![x; head_dim]).collect();
        let value: Vec<f32> = [1.0_f32, -1.0, -1.0].iter().flat_map(|&x| vec![x; case.v_head_dim]).collect();
        for isa in isas() {
            let got = case.run_given(isa, pool(1), &vec![1.0; head_dim], &key, &value).out;
            assert!(got.iter().all(|&x| (x - 1.0).abs() < 1e-3), "{isa} {head_dim}: {got:?}");
        }
    }
}
