//! How exact attention is, on inputs that make it hard.
//!
//! A logit is computed in f32 from `n = head_dim` products: with `u = 2^-24` and
//! `S = scale · Σ |q·k|` it is off by at most `(n + 3)·u·S` (n products and sums, the scale, its
//! product), and less the maximum `m`, or up to 4 less, by `u·(|x − m| + 4)` more. That absolute error of a logit is the
//! relative error of its weight: at logits of 1e5 with `n = 1` some 2 %, whatever else is done in f32.
//! [`Exact::bound`] adds that up over the keys, weighted as the keys are.
//!
//! Where bfloat16 are multiplied in pairs, products are exact and sums as above, but three things are
//! lost besides:
//! - A weight is rounded to 8 bits, by a factor within `1 ± 2^-8`. The sum that divides is not, so
//!   that the output is off by at most `2^-8 · Σ w·|v| / Σ w`: as much as rounding it to bfloat16.
//! - An element below `2^-126` counts as 0: a logit is off by its product.
//! - A weight, a product or a sum below `2^-126` is 0. The largest weight is 1 at least, and so the sum
//!   of all: the output of `len` keys is off by `2^-126 · len · (2 + |v|)` at most. Outputs
//!   that are subnormal themselves may be 0.

use paged_kv::attention::reference;
use paged_kv::dtype::DType;
use paged_kv::kernels::Isa;

use crate::harness::{Case, isas, pool};
use crate::memory::{Rng, rounded};

/// Half a unit in the last place of f32, relative.
const U: f64 = 1.0 / (1 << 24) as f64;
/// The same of bfloat16.
const U16: f64 = 1.0 / 256.0;
/// The smallest normal number of both.
const NORMAL: f64 = f32::MIN_POSITIVE as f64;
/// Dims that are multiplied in pairs.
const WIDE: [usize; 2] = [64, 32];

/// One query, all of whose heads are the same, and what they give.
struct Exact {
    query: Vec<f32>,
    key: Vec<f32>,
    value: Vec<f32>,
    case: Case,
    out: Vec<f64>,
    lse: f64,
}

impl Exact {
    /// Contents are rounded to what `case` stores.
    fn new(case: Case, query: &[f32], key: &[f32], value: &[f32]) -> Self {
        let stored = |x: &[f32], dtype| -> Vec<f32> { x.iter().map(|&x| rounded(x, dtype)).collect() };
        let query = stored(query, case.query_dtype);
        let (key, value) = (stored(key, case.kv_dtype), stored(value, case.kv_dtype));
        let case = Case {
            num_kv_heads: 1,
            group: if case.query_dtype == DType::BF16 { 2 } else { 1 },
            head_dim: query.len(),
            v_head_dim: value.len() * query.len() / key.len(),
            sequences: vec![(key.len() / query.len(), 1)],
            ..case
        };
        let shape = reference::Shape {
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: case.head_dim,
            v_head_dim: case.v_head_dim,
        };
        let (out, lse) = reference::attention(shape, &query, &key, &value, &case.options(Isa::Scalar));
        Self { query, key, value, case, out, lse: lse[0] }
    }

    /// The same in bfloat16, such that it is multiplied in pairs: elements of queries and keys spread
    /// among zeros, of which sums stay exact, and those of values repeated.
    fn wide(&self) -> Self {
        let Case { head_dim, v_head_dim, .. } = self.case;
        let spread = |rows: &[f32]| -> Vec<f32> {
            let of_row = |row: &[f32]| {
                let mut wide = vec![0.0; WIDE[0]];
                for (i, &x) in row.iter().enumerate() {
                    // In either half of a word.
                    wide[i * 17 % WIDE[0]] = x;
                }
                wide
            };
            rows.chunks_exact(head_dim).flat_map(of_row).collect()
        };
        let repeated = |row: &[f32]| row.iter().copied().cycle().take(WIDE[1]).collect::<Vec<_>>();
        let value: Vec<f32> = self.value.chunks_exact(v_head_dim).flat_map(repeated).collect();
        let scale = self.case.scale.unwrap_or_else(|| (head_dim as f32).sqrt().recip());
        let dtype = DType::BF16;
        let case = Case { kv_dtype: dtype, query_dtype: dtype, scale: Some(scale), ..self.case.clone() };
        Self::new(case, &spread(&self.query), &spread(&self.key), &value)
    }

    /// Per element of the output, the largest error that f32 logits, weights and sums can lead to, in
    /// pairs or not, and the dtype of the output.
    fn bound(&self, in_pairs: bool) -> Vec<f64> {
        let (head_dim, dim) = (self.case.head_dim, self.case.v_head_dim);
        let scale = self.case.scale.map_or_else(|| (head_dim as f64).sqrt().recip(), f64::from).abs();
        // Adding 0 rounds nothing.
        let n = self.query.iter().filter(|&&q| q != 0.0).count();
        let flushed = |x: f32| in_pairs && x.is_subnormal();
        // Each with the error of its sum.
        let logits: Vec<(f64, f64)> = self
            .key
            .chunks_exact(head_dim)
            .map(|key| {
                let (mut x, mut error) = (0.0, if in_pairs { n as f64 * NORMAL * scale } else { 0.0 });
                for (&q, &k) in self.query.iter().zip(key) {
                    let product = f64::from(q) * f64::from(k) * scale;
                    let lost = if flushed(q) || flushed(k) { 1.0 } else { (n + 3) as f64 * U };
                    x += product;
                    error += lost * product.abs();
                }
                (x, error)
            })
            .collect();
        let max = logits.iter().fold(f64::NEG_INFINITY, |max, &(x, _)| max.max(x));
        // Sums run over the keys of a split (at most 4096), then over splits (at least 512); exp, and
        // carrying sums over to a new maximum, err by a few roundings.
        let depth = logits.len().min(4096) + logits.len() / 512 + 64;
        // Below the smallest normal float, roundings are absolute.
        let mut bound = vec![logits.len() as f64 * f64::from(f32::from_bits(1)); dim];
        let (mut sum, mut of_sum) = (0.0, 0.0);
        let weights: Vec<(f64, f64)> = logits
            .iter()
            .map(|&(x, error)| {
                let weight = (x - max).exp();
                let error = (error + U * (x - max).abs() + depth as f64 * U).exp_m1();
                sum += weight;
                of_sum += weight * error;
                (weight, error)
            })
            .collect();
        let of_sum = of_sum / sum;
        let of_weight = if in_pairs { U16 } else { 0.0 };
        for ((weight, error), value) in weights.into_iter().zip(self.value.chunks_exact(dim)) {
            let error = error + (1.0 + error) * of_weight;
            for (bound, &v) in bound.iter_mut().zip(value) {
                let v = f64::from(v.abs());
                *bound += weight / sum * (error + of_sum) / (1.0 - of_sum).max(0.5) * v;
                // An element or product, a sum and, times the element, a weight; the largest weight is 1 at least.
                *bound += if in_pairs { NORMAL * (2.0 + v) } else { 0.0 };
            }
        }
        if self.case.query_dtype == DType::BF16 {
            for (bound, out) in bound.iter_mut().zip(&self.out) {
                *bound += (out.abs() + *bound + NORMAL) * U16;
            }
        }
        bound
    }

    /// Compares every instruction set, on the way of decoding and on that of prefill; no element's bound
    /// may be above `most`, else it says nothing.
    fn check(&self, most: f64) {
        let (len, dtype) = (self.case.sequences[0].0, self.case.kv_dtype);
        let bounds = [false, true].map(|in_pairs| self.bound(in_pairs));
        for (isa, queries) in isas().into_iter().flat_map(|isa| [1, 5, 16].map(|queries| (isa, queries))) {
            let case = Case { causal: false, sequences: vec![(len, queries)], ..self.case.clone() };
            let bound = &bounds[usize::from(case.in_pairs(isa, queries))];
            assert!(bound.iter().all(|&bound| bound <= most), "{bound:?} says less than {most}");
            let query = self.query.repeat(queries * case.group);
            let got = case.run_given(isa, pool(2), &query, &self.key, &self.value);
            for (i, &got) in got.out.iter().enumerate() {
                let (want, allowed) = (self.out[i % bound.len()], bound[i % bound.len()]);
                let error = (f64::from(got) - want).abs();
                assert!(error <= allowed, "{isa} {dtype}: element {i} is {got}, not {want} +- {allowed:e}");
            }
            let allowed = 4.0 * U * self.lse.abs() + most;
            let good = |lse: f32| (f64::from(lse) - self.lse).abs() <= allowed;
            assert!(
                got.lse.iter().all(|&lse| good(lse)),
                "{isa} {dtype}: lse {:?}, not {}",
                got.lse,
                self.lse
            );
        }
    }
}

/// `||got - want|| / ||want||`.
fn relative(got: &[f32], want: &[f64]) -> f64 {
    let square = |x: f64| x * x;
    let error: f64 = got.iter().zip(want).map(|(&got, &want)| square(f64::from(got) - want)).sum();
    (error / want.iter().map(|&want| square(want)).sum::<f64>()).sqrt()
}

#[test]
fn of_logits_up_to_30_a_millionth_is_lost_and_four_thousandths_in_16_bits() {
    for (head_dim, sequences) in
        [(64, vec![(700, 1), (40, 33)]), (128, vec![(2000, 2)]), (96, vec![(300, 100)])]
    {
        for dtype in DType::FLOATS {
            // Uniform in -m..m against -1..1: `m / 3 · sqrt(head_dim)` is one standard deviation of the
            // dot product, and 30 is some four of them.
            let magnitude = 3.0 * 7.0;
            let case = Case {
                head_dim,
                v_head_dim: head_dim,
                sequences: sequences.clone(),
                kv_dtype: dtype,
                query_dtype: dtype,
                magnitude,
                ..Case::default()
            };
            let (want, lse) = case.expected();
            assert!(lse.iter().all(|&lse| lse < 30.0 + 8.0) && lse.iter().any(|&lse| lse > 20.0));
            for isa in isas() {
                let error = relative(&case.run(isa, pool(2)).out, &want);
                let allowed = if dtype == DType::F32 { 1e-6 } else { 4e-3 };
                assert!(error <= allowed, "{isa} {dtype} head_dim {head_dim}: {error:e}");
            }
        }
    }
}

/// Logits near +-1e5, whose differences are a few units: the bound is that of the logits' last bits.
#[test]
fn huge_logits_are_as_exact_as_their_last_bits() {
    for sign in [1.0, -1.0] {
        for (kv_dtype, query, unit) in [
            // Steps of a key's last bits: 1/8 in 1000, 1/2 in 1000 and 4 in 1000.
            (DType::F32, 100.0, 0.01),
            (DType::F16, 100.0, 0.5),
            (DType::BF16, 100.0, 4.0),
        ] {
            let mut rng = Rng(5);
            let key: Vec<f32> = (0..300).map(|_| sign * (1000.0 - unit * (rng.next() % 4) as f32)).collect();
            let value: Vec<f32> = rng.floats(300 * 3);
            let case = Case { kv_dtype, scale: Some(1.0), ..Case::default() };
            let exact = Exact::new(case, &[query], &key, &value);
            exact.check(0.03);
            if kv_dtype == DType::BF16 {
                exact.wide().check(0.04);
            }
        }
    }
    // Of more products the bound grows with their number.
    let mut rng = Rng(6);
    let key: Vec<f32> = (0..200 * 4).map(|_| 250.0 + rng.float() / 100.0).collect();
    let value = rng.floats(200 * 5);
    let case = Case { scale: Some(1.0), ..Case::default() };
    Exact::new(case, &[100.0; 4], &key, &value).check(0.1);
    let key: Vec<f32> = (0..200 * WIDE[0]).map(|_| 250.0 + (rng.next() % 3) as f32).collect();
    let (dtype, value) = (DType::BF16, rng.floats(200 * WIDE[1]));
    let case = Case { kv_dtype: dtype, query_dtype: dtype, scale: Some(1.0), ..Case::default() };
    // Logits near 4000.
    Exact::new(case, &[0.25; WIDE[0]], &key, &value).check(0.06);
}

/// One key outweighs all others beyond what f32 tells from 0: its value comes out bit by bit, wherever
/// it stands.
#[test]
fn a_one_hot_softmax_gives_the_value_itself() {
    for kv_dtype in DType::FLOATS {
        for len in [1, 2, 63, 65, 700, 1500] {
            for hot in [0, len / 2, len - 1] {
                let mut rng = Rng(len as u64);
                let mut key: Vec<f32> = (0..len * 2).map(|_| -100.0 - rng.float()).collect();
                key[hot * 2..][..2].fill(100.0);
                let case = Case { kv_dtype, scale: Some(1.0), ..Case::default() };
                let exact = Exact::new(case, &[1.0, 1.0], &key, &rng.floats(len * 7));
                let wide = (kv_dtype == DType::BF16).then(|| exact.wide());
                for exact in std::iter::once(exact).chain(wide) {
                    let Case { group, v_head_dim: dim, .. } = exact.case;
                    let query = exact.query.repeat(group);
                    for isa in isas() {
                        let got = exact.case.run_given(isa, pool(1), &query, &exact.key, &exact.value);
                        let want = exact.value[hot * dim..][..dim].repeat(group);
                        assert_eq!(got.out, want, "{isa} {kv_dtype}, {hot} of {len}");
                        assert_eq!(got.lse, vec![200.0; group], "{isa} {kv_dtype}, {hot} of {len}");
                    }
                }
            }
        }
    }
}

/// Each tile's logits lie above those before it, by what leaves weights relative to the first tile and by what
/// doesn't: sums of large values keep their digits, and don't overflow.
#[test]
fn weights_stay_small_where_logits_rise() {
    for rise in [0.3, 4.125, 4.1875, 5.5, 8.25, 60.0] {
        for steps in [1, 16] {
            let mut rng = Rng(11);
            let key: Vec<f32> = (0..1064).map(|i| rise * (i / 64).min(steps) as f32).collect();
            let value: Vec<f32> = (0..1064 * 3).map(|_| 5e33 * (1.0 + rng.float() / 2.0)).collect();
            let exact = Exact::new(Case { scale: Some(1.0), ..Case::default() }, &[1.0], &key, &value);
            exact.check(1.6e31);
            let case = Case { kv_dtype: DType::BF16, ..exact.case.clone() };
            Exact::new(case, &[1.0], &key, &value).wide().check(1.6e32);
        }
    }
}

/// A million keys: errors of sums grow with the keys of a part and with the parts, not with the keys.
#[test]
fn a_million_keys_cost_no_digits() {
    let len = 1_000_000;
    for kv_dtype in [DType::F32, DType::BF16] {
        let mut rng = Rng(9);
        let key = rng.floats(len * 4);
        // Mostly of one sign, else the output is nothing but the error.
        let value: Vec<f32> = (0..len * 4).map(|_| 1.0 + rng.float()).collect();
        let exact = Exact::new(Case { kv_dtype, ..Case::default() }, &[2.0, -3.0, 1.0, 0.5], &key, &value);
        exact.check(2e-3);
        for isa in isas() {
            let got = exact.case.run_given(isa, pool(2), &exact.query, &exact.key, &exact.value);
            let error = relative(&got.out, &exact.out);
            assert!(error <= 3e-6, "{isa} {kv_dtype}: {error:e}");
        }
    }
    // In pairs a tenth of them, of sixteen times the elements.
    let mut rng = Rng(10);
    let len = len / 10;
    let key = rng.floats(len * 4);
    let value: Vec<f32> = (0..len * 4).map(|_| 1.0 + rng.float()).collect();
    let exact = Exact::new(Case::default(), &[2.0, -3.0, 1.0, 0.5], &key, &value).wide();
    exact.check(0.02);
    for isa in isas() {
        let got = exact.case.run_given(isa, pool(2), &exact.query.repeat(2), &exact.key, &exact.value);
        let error = relative(&got.out, &exact.out.repeat(2));
        assert!(error <= 4e-3, "{isa} in pairs: {error:e}");
    }
}

/// Numbers below the smallest normal one are numbers: nothing is flushed to zero, nor scaled away. In
/// pairs they may be 0, and then no more is lost than they are.
#[test]
fn subnormal_numbers_count() {
    for (kv_dtype, tiny) in [(DType::F32, 1e-40_f32), (DType::BF16, 3e-39), (DType::F16, 1e-6)] {
        let mut rng = Rng(11);
        let tiny_value: Vec<f32> = (0..130 * 6).map(|_| tiny * (1.5 + rng.float())).collect();
        let key: Vec<f32> = rng.floats(130 * 4);
        let case = Case { kv_dtype, ..Case::default() };
        let exact = Exact::new(case.clone(), &[1.0, -2.0, 0.5, 3.0], &key, &tiny_value);
        assert!(exact.out.iter().all(|&x| x > f64::from(tiny) / 2.0));
        exact.check(f64::from(tiny) / 100.0);
        if kv_dtype == DType::BF16 {
            exact.wide().check(300.0 * NORMAL);
        }
        // As keys, with a query that makes ordinary logits of them.
        let query = [1.0 / tiny.max(1e-37); 4];
        let tiny_key: Vec<f32> = (0..130 * 4).map(|_| tiny * rng.float()).collect();
        let exact = Exact::new(Case { scale: Some(1.0), ..case }, &query, &tiny_key, &rng.floats(130 * 6));
        exact.check(1e-4);
        if kv_dtype == DType::BF16 {
            exact.wide().check(0.3);
        }
    }
}

/// All logits equal, and large: the output is the mean, and lse the logit plus the logarithm of the
/// number of keys.
#[test]
fn equal_logits_give_the_mean() {
    for kv_dtype in DType::FLOATS {
        for (len, at) in [(1, 0.5), (64, -20.0), (65, 30.0), (3000, 1000.0)] {
            let mut rng = Rng(13);
            let value = rng.floats(len * 5);
            let case = Case { kv_dtype, scale: Some(1.0), ..Case::default() };
            let exact = Exact::new(case, &[at; 1], &vec![1.0; len], &value);
            let mean = (0..len).map(|t| f64::from(exact.value[t * 5])).sum::<f64>() / len as f64;
            assert!(
                (exact.out[0] - mean).abs() < 1e-12
                    && (exact.lse - f64::from(at) - (len as f64).ln()).abs() < 1e-9
            );
            exact.check(1e-3);
            // Of equal values it is that value, but for sums that all round the same way.
            let same = Exact::new(exact.case.clone(), &[at; 1], &vec![1.0; len], &vec![0.3; len]);
            same.check(1e-3);
            if kv_dtype == DType::BF16 {
                exact.wide().check(0.01);
                same.wide().check(0.01);
            }
        }
    }
}
