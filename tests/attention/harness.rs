//! A case: shapes, options and contents from a seed; how it is stored, run and judged.

use std::ops::Range;

use paged_kv::attention::{
    AttentionOptions, BatchTables, ThreadPool, error_bound, paged_attention, reference, write_pages,
    write_rows,
};
use paged_kv::dtype::DType;
use paged_kv::kernels::Isa;
use paged_kv::layout::{CacheLayout, PageOrder};
use paged_kv::storage::{PagesView, RowsView};
use proptest::test_runner::Config as ProptestConfig;

use crate::memory::{Array, Pages, Rng, head_scale, rounded, stored, stored_row};

/// The instruction sets to test: that of `PAGED_KV_ISA`, else all; those that this CPU lacks are
/// reported by name.
pub(crate) fn isas() -> Vec<Isa> {
    if let Ok(name) = std::env::var("PAGED_KV_ISA") {
        return vec![name.parse().unwrap()];
    }
    let (here, absent): (Vec<_>, Vec<_>) = Isa::ALL.into_iter().partition(|isa| isa.is_available());
    for isa in absent {
        println!("SKIPPED: this CPU lacks {isa}");
    }
    here
}

/// So many random cases, or as many as `PROPTEST_CASES` says.
pub(crate) fn random(cases: u32) -> ProptestConfig {
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => config,
        None => ProptestConfig { cases, ..config },
    }
}

/// What is attended to, and how.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) kv_dtype: DType,
    pub(crate) query_dtype: DType,
    pub(crate) num_kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
    pub(crate) v_head_dim: usize,
    pub(crate) page_size: usize,
    pub(crate) order: PageOrder,
    /// Of quantised dtypes: one scale per head.
    pub(crate) head_scales: bool,
    /// Values are the first elements of keys.
    pub(crate) value_in_key: bool,
    /// Length and queries of each sequence.
    pub(crate) sequences: Vec<(usize, usize)>,
    pub(crate) scale: Option<f32>,
    pub(crate) causal: bool,
    pub(crate) window_left: i64,
    pub(crate) soft_cap: f32,
    pub(crate) slopes: Option<Vec<f32>>,
    pub(crate) sinks: Option<Vec<f32>>,
    /// Queries lie in -magnitude..magnitude, keys and values in -1..1.
    pub(crate) magnitude: f32,
    pub(crate) seed: u64,
    /// Seed of where the pages lie.
    pub(crate) placement: u64,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            kv_dtype: DType::F32,
            query_dtype: DType::F32,
            num_kv_heads: 2,
            group: 2,
            head_dim: 64,
            v_head_dim: 64,
            page_size: 16,
            order: PageOrder::Hnd,
            head_scales: false,
            value_in_key: false,
            sequences: vec![(100, 1)],
            scale: None,
            causal: true,
            window_left: -1,
            soft_cap: 0.0,
            slopes: None,
            sinks: None,
            magnitude: 1.0,
            seed: 1,
            placement: 1,
        }
    }
}

/// One sequence's contents, as stored.
pub(crate) struct Contents {
    pub(crate) query: Vec<f32>,
    pub(crate) key: Vec<f32>,
    pub(crate) value: Vec<f32>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) out: Vec<f32>,
    pub(crate) lse: Vec<f32>,
}

impl Outcome {
    /// For comparing bit by bit.
    pub(crate) fn bits(&self) -> (Vec<u32>, Vec<u32>) {
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect();
        (bits(&self.out), bits(&self.lse))
    }
}

impl Case {
    pub(crate) fn num_heads(&self) -> usize {
        self.num_kv_heads * self.group
    }

    pub(crate) fn options(&self, isa: Isa) -> AttentionOptions<'_> {
        AttentionOptions {
            scale: self.scale,
            causal: self.causal,
            window_left: self.window_left,
            logits_soft_cap: self.soft_cap,
            alibi_slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
            isa: Some(isa),
        }
    }

    /// Contents depend on the sequence's length and queries only, not on its neighbours.
    pub(crate) fn contents(&self, (len, queries): (usize, usize)) -> Contents {
        let mut rng = Rng(self.seed ^ (len as u64) << 20 ^ queries as u64);
        let mut make = |n: usize, factor: f32, dtype: DType| -> Vec<f32> {
            rng.floats(n).into_iter().map(|x| rounded(x * factor, dtype)).collect()
        };
        let query = make(queries * self.num_heads() * self.head_dim, self.magnitude, self.query_dtype);
        let key = self.stored(0, &make(len * self.num_kv_heads * self.head_dim, 1.0, self.kv_dtype));
        let value = if self.value_in_key {
            self.values_of(&key)
        } else {
            self.stored(1, &make(len * self.num_kv_heads * self.v_head_dim, 1.0, self.kv_dtype))
        };
        Contents { query, key, value }
    }

    /// The first elements of keys.
    pub(crate) fn values_of(&self, key: &[f32]) -> Vec<f32> {
        key.chunks_exact(self.head_dim).flat_map(|row| row[..self.v_head_dim].to_vec()).collect()
    }

    /// What pages make of keys (0) or values (1).
    fn stored(&self, which: usize, rows: &[f32]) -> Vec<f32> {
        if !self.kv_dtype.is_quantised() {
            return rows.to_vec();
        }
        let dim = [self.head_dim, self.v_head_dim][which];
        let of_row = |(i, row)| {
            let head = which * self.num_kv_heads + i % self.num_kv_heads;
            stored_row(row, self.kv_dtype, self.head_scales.then(|| head_scale(head))).0
        };
        rows.chunks_exact(dim).enumerate().flat_map(of_row).collect()
    }

    /// The first token that any query of a sequence sees.
    pub(crate) fn first_seen(&self, (len, queries): (usize, usize)) -> usize {
        if queries == 0 {
            return len;
        }
        let position = len as i64 - queries as i64;
        if self.window_left < 0 { 0 } else { (position - self.window_left).clamp(0, len as i64) as usize }
    }

    /// Stores what is seen, nothing else, and attends with `threads` threads.
    pub(crate) fn run(&self, isa: Isa, threads: &ThreadPool) -> Outcome {
        self.run_contents(isa, threads, Self::contents)
    }

    /// The one sequence as it was when `queries` of its new tokens were the last: those before are
    /// long computed, those behind not yet there.
    pub(crate) fn run_queries(&self, isa: Isa, threads: &ThreadPool, queries: Range<usize>) -> Outcome {
        let (len, all) = self.sequences[0];
        let now = len - (all - queries.end);
        let part = Self { sequences: vec![(now, queries.len())], ..self.clone() };
        let row = self.num_heads() * self.head_dim;
        part.run_contents(isa, threads, |_, _| {
            let c = self.contents((len, all));
            Contents {
                query: c.query[queries.start * row..queries.end * row].to_vec(),
                key: c.key[..now * self.num_kv_heads * self.head_dim].to_vec(),
                value: c.value[..now * self.num_kv_heads * self.v_head_dim].to_vec(),
            }
        })
    }

    /// The one sequence's queries over some of its keys.
    pub(crate) fn run_keys(&self, isa: Isa, threads: &ThreadPool, keys: Range<usize>) -> Outcome {
        let (len, queries) = self.sequences[0];
        let part = Self { sequences: vec![(keys.len(), queries)], ..self.clone() };
        part.run_contents(isa, threads, |_, _| {
            let c = self.contents((len, queries));
            let (k, v) = (self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim);
            Contents {
                query: c.query,
                key: c.key[keys.start * k..keys.end * k].to_vec(),
                value: c.value[keys.start * v..keys.end * v].to_vec(),
            }
        })
    }

    /// The one sequence with contents of its own, as pages make them.
    pub(crate) fn run_given(
        &self,
        isa: Isa,
        threads: &ThreadPool,
        query: &[f32],
        key: &[f32],
        value: &[f32],
    ) -> Outcome {
        self.run_contents(isa, threads, |_, _| Contents {
            query: query.to_vec(),
            key: key.to_vec(),
            value: value.to_vec(),
        })
    }

    fn run_contents(
        &self,
        isa: Isa,
        threads: &ThreadPool,
        contents: impl Fn(&Self, (usize, usize)) -> Contents,
    ) -> Outcome {
        self.with_pages(threads, contents, |query, keys, values, tables| {
            let [tokens, heads, _] = query.shape();
            let mut out = Array::new(&vec![f32::NAN; tokens * heads * self.v_head_dim], self.query_dtype);
            let mut lse = vec![f32::NAN; tokens * heads];
            let rows = &mut out.view_mut([tokens, heads, self.v_head_dim]);
            let options = self.options(isa);
            paged_attention(query, keys, values, tables, &options, rows, Some(&mut lse), threads).unwrap();
            Outcome { out: out.floats(), lse }
        })
    }

    /// What the one sequence's keys and values became in quantised pages, and the bounds that are
    /// certified for its rows.
    pub(crate) fn run_bound(
        &self,
        isa: Isa,
        threads: &ThreadPool,
        query: &[f32],
        key: &[f32],
        value: &[f32],
    ) -> ([Vec<f32>; 2], Vec<f32>) {
        let (query, key, value) = (query.to_vec(), key.to_vec(), value.to_vec());
        let (len, _) = self.sequences[0];
        let first = self.first_seen(self.sequences[0]);
        let contents =
            |_: &Self, _| Contents { query: query.clone(), key: key.clone(), value: value.clone() };
        self.with_pages(threads, contents, |query, keys, values, tables| {
            let [tokens, heads, _] = query.shape();
            let mut bound = vec![f32::NAN; tokens * heads];
            let options = self.options(isa);
            error_bound(query, keys, values, tables, &options, &mut bound, threads).unwrap();
            let stored = [keys, values].map(|pages| {
                // What nobody sees was not stored.
                let mut rows = vec![0.0; first * self.num_kv_heads * pages.layout().head_dim];
                for token in first..len {
                    let page = tables.block_table[token / self.page_size] as usize;
                    for head in 0..self.num_kv_heads {
                        rows.extend(stored(&pages, page, head, token % self.page_size).0);
                    }
                }
                rows
            });
            (stored, bound)
        })
    }

    /// Stores what is seen, and lends it.
    fn with_pages<R>(
        &self,
        threads: &ThreadPool,
        contents: impl Fn(&Self, (usize, usize)) -> Contents,
        run: impl FnOnce(RowsView, PagesView, PagesView, &BatchTables) -> R,
    ) -> R {
        let Self { page_size, num_kv_heads, head_dim, v_head_dim, .. } = *self;
        let max_pages = self.sequences.iter().map(|s| s.0.div_ceil(page_size)).max().unwrap_or(0) + 1;
        let num_pages = self.sequences.iter().map(|s| s.0.div_ceil(page_size)).sum::<usize>() + 2;
        let layout = CacheLayout {
            num_layers: 1,
            num_pages,
            page_size,
            num_kv_heads,
            head_dim,
            v_head_dim,
            dtype: self.kv_dtype,
            head_scales: self.head_scales,
            value_in_key: self.value_in_key,
            order: self.order,
        };
        let mut pages = Pages::poisoned(&layout);
        let mut free: Vec<i32> = (0..num_pages as i32).collect();
        Rng(self.placement).shuffle(&mut free);

        // -1 and far-off numbers where no page is needed.
        let mut table = vec![-1; max_pages * self.sequences.len()];
        for entry in table.iter_mut().skip(1).step_by(2) {
            *entry = i32::MAX;
        }
        let (mut query, mut cu, mut lens) = (Vec::new(), vec![0], Vec::new());
        let (key_pages, value_pages) = pages.views();
        for (index, &sequence) in self.sequences.iter().enumerate() {
            let (len, queries) = sequence;
            let contents = contents(self, sequence);
            let first = self.first_seen(sequence);
            let row = &mut table[index * max_pages..][..max_pages];
            for entry in &mut row[first / page_size..len.div_ceil(page_size).max(first / page_size)] {
                *entry = free.pop().unwrap();
            }
            let slots: Vec<i64> = (first..len)
                .map(|token| {
                    i64::from(row[token / page_size]) * page_size as i64 + (token % page_size) as i64
                })
                .collect();
            let rows_dtype = if self.kv_dtype.is_quantised() { DType::F32 } else { self.kv_dtype };
            let key = Array::new(&contents.key[first * num_kv_heads * head_dim..], rows_dtype);
            let value = Array::new(&contents.value[first * num_kv_heads * v_head_dim..], rows_dtype);
            let key = key.view([len - first, num_kv_heads, head_dim]);
            if self.value_in_key {
                write_rows(key, key_pages, &slots, threads).unwrap();
            } else {
                let value = value.view([len - first, num_kv_heads, v_head_dim]);
                write_pages(key, value, key_pages, value_pages, &slots, threads).unwrap();
            }
            query.extend(contents.query);
            cu.push(cu[index] + queries as i32);
            lens.push(len as i32);
        }
        let tokens = cu[self.sequences.len()] as usize;
        let query = Array::new(&query, self.query_dtype);
        let tables = BatchTables { block_table: &table, max_pages, seq_lens: &lens, cu_seqlens_q: &cu };
        run(query.view([tokens, self.num_heads(), head_dim]), key_pages, value_pages, &tables)
    }

    /// What the definition says.
    pub(crate) fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let shape = reference::Shape {
            num_heads: self.num_heads(),
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
            v_head_dim: self.v_head_dim,
        };
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for &sequence in &self.sequences {
            let c = self.contents(sequence);
            let options = self.options(Isa::Scalar);
            let (o, l) = reference::attention(shape, &c.query, &c.key, &c.value, &options);
            out.extend(o);
            lse.extend(l);
        }
        (out, lse)
    }

    /// Whether a sequence of so many queries is counted in steps of a 32767th of the largest number.
    pub(crate) fn in_steps(&self, isa: Isa, queries: usize) -> bool {
        let together = match isa {
            Isa::Avx2 => 16,
            Isa::Avx512 | Isa::Avx512Bf16 => 32,
            _ => return false,
        };
        self.kv_dtype == DType::I8
            && [self.head_dim, self.v_head_dim].iter().all(|dim| dim.is_multiple_of(together))
            && queries < 16
    }

    /// Whether a sequence of so many queries has its products taken in pairs of bfloat16.
    pub(crate) fn in_pairs(&self, isa: Isa, queries: usize) -> bool {
        let together = match self.kv_dtype {
            DType::BF16 => 32,
            DType::I8 | DType::F8E4M3 => 64,
            _ => return false,
        };
        isa == Isa::Avx512Bf16
            && self.query_dtype == DType::BF16
            && [self.head_dim, self.v_head_dim].iter().all(|dim| dim.is_multiple_of(together))
            && (self.group > 1 || queries >= 16 || self.kv_dtype == DType::F8E4M3)
            && !self.in_steps(isa, queries)
    }

    /// Largest errors of output (values lie in -1..1) and lse that are allowed: a few roundings of
    /// the logits, whose absolute error becomes a relative one of the weights, and of the output; in
    /// pairs, of the weights to eight bits too; in steps, of queries and of a tile's weights to a 32767th of
    /// the largest.
    fn tolerances(&self, isa: Isa, queries: usize) -> (f64, f64) {
        let scale = self.scale.map_or_else(|| (self.head_dim as f64).sqrt().recip(), f64::from);
        // Typical, not worst, case of the sum of head_dim products and of the largest bias.
        let root = (self.head_dim as f64).sqrt();
        let logit = 3.0 * f64::from(self.magnitude) * scale.abs() * root + f64::from(self.soft_cap.min(8.0));
        // A sum of n products, one after the other, errs by some sqrt(n) roundings.
        let logit = logit * (1.0 + root / 12.0);
        let bias = self.slopes.iter().flatten().fold(0.0_f64, |max, &s| max.max(f64::from(s.abs())));
        let far = self.sequences.iter().map(|s| s.0).max().unwrap_or(0) as f64;
        let sink = self.sinks.iter().flatten().fold(0.0_f64, |max, &s| max.max(f64::from(s.abs())));
        // Half a step of the query for each element of a key, mostly of different signs.
        let in_steps = if self.in_steps(isa, queries) { 1.0 / 32767.0 } else { 0.0 };
        let query = in_steps * f64::from(self.magnitude) * scale.abs() * root;
        let rounding =
            query + 1e-7 * (4.0 + logit + 0.3 * bias * far.min(40.0 / bias.max(1e-3)) + 0.3 * sink);
        let output = match self.query_dtype {
            DType::F16 => 1.0 / 4096.0,
            DType::BF16 => 1.0 / 512.0,
            _ => 0.0,
        };
        // Eight bits of floating point in steps that a head's scale sets may lie beyond 1, where the output's
        // are twice as far apart.
        let output = if self.head_scales { 2.0 * output } else { output };
        // Half a step for each key of a tile is no more than 2^-12 of their weight.
        let weights = if self.in_pairs(isa, queries) { 1.0 / 256.0 } else { 8.0 * in_steps };
        (rounding + output + weights, 2.0 * rounding + 1e-7 * bias * far)
    }

    /// Runs every instruction set with a few numbers of threads and compares.
    pub(crate) fn check(&self) {
        let (want_out, want_lse) = self.expected();
        for isa in isas() {
            let got = self.run(isa, pool(1 + self.seed as usize % 2));
            let row_dim = self.v_head_dim;
            let of_sequence = |&(_, queries): &(usize, usize)| {
                let tolerances = self.tolerances(isa, queries);
                std::iter::repeat_n(tolerances, queries * self.num_heads())
            };
            let of_row: Vec<_> = self.sequences.iter().flat_map(of_sequence).collect();
            for (i, (&got, &want)) in got.out.iter().zip(&want_out).enumerate() {
                let error = (f64::from(got) - want).abs();
                let (out_tolerance, _) = of_row[i / row_dim];
                assert!(
                    error <= out_tolerance,
                    "{isa}: row {}, element {}: {got}, not {want} (error {error:e}, allowed {out_tolerance:e}) in {self:?}",
                    i / row_dim,
                    i % row_dim,
                );
            }
            for (row, (&got, &want)) in got.lse.iter().zip(&want_lse).enumerate() {
                let good = if want == f64::NEG_INFINITY {
                    got == f32::NEG_INFINITY
                } else {
                    (f64::from(got) - want).abs() <= of_row[row].1 + 1.2e-7 * want.abs()
                };
                assert!(good, "{isa}: lse of row {row}: {got}, not {want} in {self:?}");
            }
            assert_eq!((got.out.len(), got.lse.len()), (want_out.len(), want_lse.len()));
        }
    }
}

/// Pools are made once: starting threads is not what is tested.
pub(crate) fn pool(threads: usize) -> &'static ThreadPool {
    static POOLS: [std::sync::OnceLock<ThreadPool>; 7] = [const { std::sync::OnceLock::new() }; 7];
    POOLS[threads - 1].get_or_init(|| ThreadPool::new(Some(threads)).unwrap())
}
