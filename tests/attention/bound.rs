//! The certified error: never exceeded, whatever the rows, and no empty promise.

use paged_kv::attention::{AttentionOptions, BatchTables, error_bound, reference};
use paged_kv::dtype::DType;
use paged_kv::error::Error;
use paged_kv::kernels::Isa;
use paged_kv::layout::{CacheLayout, PageOrder};
use proptest::prelude::*;

use crate::harness::{Case, isas, pool, random};
use crate::memory::{Array, Pages, Rng};
use crate::property::cases;
use crate::quantised::{QUANTISED, gaussian};

/// Rows as they are before they are quantised: mild, or such that the bound is put to the test.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Uniform,
    Gaussian,
    /// Every number in the middle of two steps, on the side of the query's sign.
    Adversarial,
    /// A few numbers far above all others.
    Outliers,
}

impl Kind {
    fn rows(self, rng: &mut Rng, count: usize, dim: usize, dtype: DType) -> Vec<f32> {
        let mut rows = match self {
            Self::Gaussian => gaussian(rng, count * dim),
            _ => rng.floats(count * dim),
        };
        for row in rows.chunks_exact_mut(dim) {
            match self {
                Self::Outliers => row[dim / 2] *= 300.0,
                Self::Adversarial => {
                    let (most, step) = if dtype == DType::I8 { (127.0, 1.0) } else { (448.0, 0.0) };
                    // The largest keeps the scale at 1; the rest is rounded as far as can be.
                    for x in row.iter_mut() {
                        let whole = (*x * most * 0.99).trunc();
                        let step = if step > 0.0 {
                            step
                        } else {
                            (whole.abs().max(1.0).log2().floor() - 3.0).exp2()
                        };
                        let on_grid = (whole / step).trunc() * step;
                        *x = on_grid + 0.499 * step;
                    }
                    row[0] = most;
                }
                _ => {}
            }
        }
        rows
    }
}

struct Checked {
    /// The largest ratio of an error that was found to its bound.
    tightest: f64,
    /// The largest bound.
    bound: f64,
    /// The largest element of the outputs.
    output: f64,
}

/// Holds what attention gives, and its bound, against the rows before they were quantised.
fn check(case: &Case, kind: Kind) -> Checked {
    let sequence @ (len, queries) = case.sequences[0];
    let mut rng = Rng(case.seed ^ len as u64);
    let query = case.contents(sequence).query;
    let key = kind.rows(&mut rng, len * case.num_kv_heads, case.head_dim, case.kv_dtype);
    let value = if case.value_in_key {
        key.chunks_exact(case.head_dim).flat_map(|row| row[..case.v_head_dim].to_vec()).collect()
    } else {
        kind.rows(&mut rng, len * case.num_kv_heads, case.v_head_dim, case.kv_dtype)
    };
    let shape = reference::Shape {
        num_heads: case.num_heads(),
        num_kv_heads: case.num_kv_heads,
        head_dim: case.head_dim,
        v_head_dim: case.v_head_dim,
    };
    let (want, _) = reference::attention(shape, &query, &key, &value, &case.options(Isa::Scalar));
    let mut found = Checked { tightest: 0.0, bound: 0.0, output: 0.0 };
    let largest = value.iter().fold(0.0_f64, |largest, x| largest.max(f64::from(x.abs())));
    for isa in isas() {
        let (stored, bound) = case.run_bound(isa, pool(2), &query, &key, &value);
        assert_eq!(bound.len(), queries * case.num_heads());
        // The result over what is stored, in f64, so that nothing but quantisation is between the two.
        let [key, value] = stored;
        let (got, _) = reference::attention(shape, &query, &key, &value, &case.options(isa));
        for (row, &bound) in bound.iter().enumerate() {
            for i in row * case.v_head_dim..(row + 1) * case.v_head_dim {
                let error = (got[i] - want[i]).abs();
                // What is stored was told in float32.
                let bound = f64::from(bound) + 1e-6 * largest;
                assert!(error <= bound, "{isa} row {row}: {error:e} above {bound:e}: {kind:?} {case:?}");
                found.tightest = found.tightest.max(error / bound);
            }
            found.bound = found.bound.max(bound.into());
        }
    }
    found.output = got_largest(&want);
    found
}

fn got_largest(want: &[f64]) -> f64 {
    want.iter().fold(0.0, |largest, x| largest.max(x.abs()))
}

proptest! {
    #![proptest_config(random(96))]

    #[test]
    fn no_error_is_above_its_bound(
        mut case in cases(),
        dtype in prop::sample::select(QUANTISED.to_vec()),
        kind in prop::sample::select(vec![Kind::Uniform, Kind::Gaussian, Kind::Adversarial, Kind::Outliers]),
    ) {
        case.sequences.truncate(1);
        case.kv_dtype = dtype;
        case.head_scales = false;
        check(&case, kind);
    }
}

/// How tight it is: on numbers as models have them, the bound says far more than that the output is a
/// mean of the values.
#[test]
fn on_normal_numbers_the_bound_is_far_below_the_values() {
    for (kv_dtype, part_of_values, times_error) in [(DType::I8, 0.05, 200.0), (DType::F8E4M3, 0.4, 200.0)] {
        let case = Case {
            kv_dtype,
            head_dim: 128,
            v_head_dim: 128,
            sequences: vec![(500, 2)],
            magnitude: 3_f32.sqrt(),
            ..Case::default()
        };
        let found = check(&case, Kind::Gaussian);
        println!("{kv_dtype}: bound {:.2e}, largest error {:.4} of it", found.bound, found.tightest);
        assert!(found.bound <= part_of_values * 4.0, "{kv_dtype}: {:e}", found.bound);
        assert!(found.tightest >= 1.0 / times_error, "{kv_dtype}: {:e}", found.tightest);
    }
}

/// One key has all the weight: what is left is the rounding of its value.
#[test]
fn where_one_key_has_all_the_weight_the_bound_is_that_of_its_value() {
    let dim = 8;
    let key: Vec<f32> = (0..20 * 2).flat_map(|i| vec![if i / 2 == 7 { 1.0 } else { -1.0 }; dim]).collect();
    let value = Rng(3).floats(20 * 2 * dim);
    let query = vec![60.0; 4 * dim];
    let case = Case {
        kv_dtype: DType::I8,
        head_dim: dim,
        v_head_dim: dim,
        sequences: vec![(20, 1)],
        ..Case::default()
    };
    let (_, bound) = case.run_bound(Isa::Scalar, pool(1), &query, &key, &value);
    for (row, bound) in bound.into_iter().enumerate() {
        let value = &value[(7 * 2 + row / 2) * dim..][..dim];
        let largest = value.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        assert!(bound >= largest / 254.0 && bound <= 1.01 * largest / 254.0, "{bound} of {largest}");
    }
}

#[test]
fn what_has_no_bound_is_refused() {
    for (dtype, head_scales) in [(DType::BF16, false), (DType::F8E4M3, true)] {
        let mut pages = Pages::poisoned(&CacheLayout {
            num_layers: 1,
            num_pages: 1,
            page_size: 4,
            num_kv_heads: 2,
            head_dim: 8,
            v_head_dim: 8,
            dtype,
            head_scales,
            value_in_key: false,
            order: PageOrder::Hnd,
        });
        let query = Array::new(&[1.0; 2 * 8], DType::F32);
        let (keys, values) = pages.views();
        let tables = BatchTables { block_table: &[0], max_pages: 1, seq_lens: &[1], cu_seqlens_q: &[0, 1] };
        let mut bound = [7.0; 2];
        let rows = query.view([1, 2, 8]);
        let options = AttentionOptions::default();
        let error = error_bound(rows, keys, values, &tables, &options, &mut bound, pool(1)).unwrap_err();
        assert!(matches!(error, Error::Layout(_)) && bound == [7.0; 2], "{error}");
    }
}
