//! Tokens that several sequences begin with are attended to once, without a changed bit.

use paged_kv::attention::{AttentionOptions, BatchTables, paged_attention, write_pages};
use paged_kv::dtype::DType;
use paged_kv::kernels::Isa;
use paged_kv::layout::{CacheLayout, PageOrder};
use proptest::prelude::*;

use crate::harness::{Outcome, isas, pool, random};
use crate::memory::{Array, Pages, Rng};

/// Sequences, each of which begins with some pages of the one before it.
#[derive(Clone, Debug)]
struct Family {
    page_size: usize,
    kv_dtype: DType,
    query_dtype: DType,
    num_kv_heads: usize,
    group: usize,
    head_dim: usize,
    /// Tokens that the sequence begins with as the one before it does, all its tokens, and queries.
    sequences: Vec<(usize, usize, usize)>,
    causal: bool,
    soft_cap: f32,
    sinks: bool,
}

impl Family {
    /// Attends to the sequences at once, or to each alone.
    fn run(&self, isa: Isa, threads: usize, together: bool) -> Outcome {
        let Self { page_size, num_kv_heads, head_dim, .. } = *self;
        let num_heads = num_kv_heads * self.group;
        let mut rng = Rng(3);
        let mut rows: Vec<Vec<i32>> = Vec::new();
        let mut num_pages = 0;
        for &(common, len, _) in &self.sequences {
            let before = rows.last().map_or(&[][..], Vec::as_slice);
            let needed = len.div_ceil(page_size);
            let mut row = before[..(common / page_size).min(needed).min(before.len())].to_vec();
            while row.len() < needed {
                row.push(num_pages);
                num_pages += 1;
            }
            rows.push(row);
        }
        let layout = CacheLayout {
            num_layers: 1,
            num_pages: num_pages as usize + 1,
            page_size,
            num_kv_heads,
            head_dim,
            v_head_dim: head_dim,
            dtype: self.kv_dtype,
            head_scales: false,
            value_in_key: false,
            order: PageOrder::Nhd,
        };
        let mut pages = Pages::poisoned(&layout);
        let (key_pages, value_pages) = pages.views();
        let stored = num_pages as usize * page_size;
        let mut tokens = || Array::new(&rng.floats(stored * num_kv_heads * head_dim), DType::F32);
        let (key, value) = (tokens(), tokens());
        let shape = [stored, num_kv_heads, head_dim];
        let slots: Vec<i64> = (0..stored as i64).collect();
        write_pages(key.view(shape), value.view(shape), key_pages, value_pages, &slots, pool(1)).unwrap();

        let sinks = vec![0.5; num_heads];
        let options = AttentionOptions {
            causal: self.causal,
            logits_soft_cap: self.soft_cap,
            sinks: self.sinks.then_some(&sinks[..]),
            isa: Some(isa),
            ..AttentionOptions::default()
        };
        let queries: usize = self.sequences.iter().map(|s| s.2).sum();
        let query = rng.floats(queries * num_heads * head_dim);
        let mut outcome = Outcome { out: Vec::new(), lse: Vec::new() };
        let mut attend = |sequences: std::ops::Range<usize>, first: usize| {
            let max_pages = rows[sequences.clone()].iter().map(Vec::len).max().unwrap_or(0);
            let (mut table, mut lens, mut cu) = (Vec::new(), Vec::new(), vec![0]);
            for (row, &(_, len, queries)) in rows[sequences.clone()].iter().zip(&self.sequences[sequences]) {
                table.extend_from_slice(row);
                table.resize(table.len() + max_pages - row.len(), -1);
                lens.push(len as i32);
                cu.push(cu[cu.len() - 1] + queries as i32);
            }
            let count = cu[cu.len() - 1] as usize;
            let size = count * num_heads * head_dim;
            let query = Array::new(&query[first * num_heads * head_dim..][..size], self.query_dtype);
            let mut out = Array::new(&vec![f32::NAN; size], self.query_dtype);
            let mut lse = vec![f32::NAN; count * num_heads];
            let shape = [count, num_heads, head_dim];
            paged_attention(
                query.view(shape),
                key_pages,
                value_pages,
                &BatchTables { block_table: &table, max_pages, seq_lens: &lens, cu_seqlens_q: &cu },
                &options,
                &mut out.view_mut(shape),
                Some(&mut lse),
                pool(threads),
            )
            .unwrap();
            outcome.out.extend(out.floats());
            outcome.lse.extend(lse);
            first + count
        };
        if together {
            attend(0..rows.len(), 0);
        } else {
            (0..rows.len()).fold(0, |first, i| attend(i..i + 1, first));
        }
        outcome
    }

    fn check(&self) {
        for isa in isas() {
            let alone = self.run(isa, 1, false);
            assert!(alone.out.iter().all(|x| x.is_finite()), "{self:?}");
            for threads in [1, 2, 3] {
                let together = self.run(isa, threads, true);
                assert_eq!(together.bits(), alone.bits(), "{isa}, {threads} threads, {self:?}");
            }
        }
    }
}

/// Answers to one prompt, two of them to its continuation, a stranger, and drafts to be verified.
fn family() -> Family {
    Family {
        page_size: 16,
        kv_dtype: DType::BF16,
        query_dtype: DType::F32,
        num_kv_heads: 2,
        group: 3,
        head_dim: 64,
        sequences: vec![
            (0, 1400, 1),
            (1100, 1500, 1),
            (1500, 2100, 4),
            (1024, 1024, 1),
            (0, 700, 1),
            (0, 600, 20),
            (600, 700, 1),
            (640, 640, 15),
        ],
        causal: true,
        soft_cap: 0.0,
        sinks: true,
    }
}

#[test]
fn what_sequences_have_in_common_changes_no_bit() {
    family().check();
    Family { query_dtype: DType::BF16, ..family() }.check();
    Family { kv_dtype: DType::F32, head_dim: 40, soft_cap: 3.0, ..family() }.check();
    Family { kv_dtype: DType::I8, group: 1, ..family() }.check();
    Family { page_size: 7, causal: false, sinks: false, ..family() }.check();
}

#[test]
fn many_answers_to_one_prompt_are_cut_into_blocks() {
    let sequences = (0..70).map(|i| (600, 513 + i, 1)).collect();
    Family { group: 4, num_kv_heads: 1, sequences, ..family() }.check();
}

proptest! {
    #![proptest_config(random(12))]

    #[test]
    fn any_family_has_the_bits_of_its_members(
        page_size in prop::sample::select(vec![1, 16, 100, 512]),
        kv_dtype in prop::sample::select(DType::ALL.to_vec()),
        query_dtype in prop::sample::select(vec![DType::F32, DType::BF16]),
        group in 1..6_usize,
        sequences in prop::collection::vec((0..2000_usize, 1..1800_usize, 0..18_usize), 1..7),
        causal: bool,
    ) {
        let fits = |(common, len, queries): (usize, usize, usize)| (common, len, queries.min(len));
        let sequences = sequences.into_iter().map(fits).collect();
        Family { page_size, kv_dtype, query_dtype, group, num_kv_heads: 1, head_dim: 32, sequences, causal, ..family() }.check();
    }
}
