//! Same bits: a sequence's result depends on nothing but its own tokens.

use paged_kv::dtype::DType;
use paged_kv::layout::PageOrder;
use proptest::prelude::*;

use crate::harness::{Case, Outcome, isas, pool, random};
use crate::property::cases;

/// Decode, a chunk, an untouched sequence, and one long enough to be split over threads.
fn batch() -> Case {
    Case {
        kv_dtype: DType::BF16,
        group: 3,
        head_dim: 40,
        v_head_dim: 24,
        sequences: vec![(70, 1), (2500, 2), (90, 33), (17, 0), (700, 1)],
        window_left: 1900,
        sinks: Some(vec![0.5; 6]),
        slopes: Some(paged_kv::attention::alibi_slopes(6)),
        ..Case::default()
    }
}

/// The same, such that bfloat16 are multiplied in pairs, and with drafts.
fn pairs() -> Case {
    let mut case = Case { query_dtype: DType::BF16, head_dim: 64, v_head_dim: 32, ..batch() };
    case.sequences.extend([(1100, 5), (33, 14)]);
    case
}

/// The same of bytes, twice as many of which go together.
fn pairs_of(kv_dtype: DType) -> Case {
    Case { kv_dtype, v_head_dim: 64, ..pairs() }
}

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_a_batch() {
    for (isa, case) in isas().into_iter().flat_map(|isa| {
        [(isa, batch()), (isa, pairs()), (isa, pairs_of(DType::I8)), (isa, pairs_of(DType::F8E4M3))]
    }) {
        let together = case.run(isa, pool(3));
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for &sequence in &case.sequences {
            let alone = Case { sequences: vec![sequence], ..case.clone() }.run(isa, pool(1));
            out.extend(alone.out);
            lse.extend(alone.lse);
        }
        assert_eq!(together.bits(), Outcome { out, lse }.bits(), "{isa} {}", case.query_dtype);
    }
}

/// Of keys and values, and of queries: all ways through a kernel.
fn dtypes() -> impl Iterator<Item = (DType, DType)> {
    DType::ALL
        .into_iter()
        .map(|kv| (kv, DType::F32))
        .chain([DType::BF16, DType::I8, DType::F8E4M3].map(|kv| (kv, DType::BF16)))
}

/// Results of batches of more than one sequence were wrong on Arm: each must have the bits it has alone.
#[test]
fn field_c71_batches_of_any_size_have_the_bits_of_one() {
    for isa in isas() {
        for (kv_dtype, query_dtype) in dtypes() {
            let pairs = query_dtype == DType::BF16;
            let (head_dim, v_head_dim) =
                if pairs { (64, 64) } else { (Case::default().head_dim, Case::default().v_head_dim) };
            let case = Case {
                kv_dtype,
                query_dtype,
                head_dim,
                v_head_dim,
                group: 4,
                sequences: vec![(150, 1)],
                ..Case::default()
            };
            case.check();
            let alone = case.run(isa, pool(1));
            for size in [2, 3, 8, 17] {
                let batch = Case { sequences: vec![(150, 1); size], ..case.clone() }.run(isa, pool(2));
                let want = Outcome { out: alone.out.repeat(size), lse: alone.lse.repeat(size) };
                assert_eq!(batch.bits(), want.bits(), "{isa} {kv_dtype} {query_dtype}, batch of {size}");
            }
        }
    }
}

#[test]
fn threads_placement_page_size_and_order_change_no_bit() {
    for isa in isas() {
        let of = |kv_dtype, head_dim| Case { kv_dtype, head_dim, ..batch() };
        for case in [
            of(DType::BF16, 40),
            pairs(),
            // Prompts in pairs, single tokens not.
            Case { group: 1, num_kv_heads: 6, ..pairs() },
            Case { value_in_key: true, ..pairs() },
            pairs_of(DType::I8),
            Case { group: 1, num_kv_heads: 6, ..pairs_of(DType::F8E4M3) },
            Case { value_in_key: true, ..pairs_of(DType::F8E4M3) },
            of(DType::F32, 64),
            of(DType::F16, 64),
            of(DType::I8, 64),
            // Sums of quantised values in keys, too.
            Case { value_in_key: true, ..of(DType::I8, 40) },
            of(DType::F8E4M3, 64),
        ] {
            let kv_dtype = case.kv_dtype;
            let want = case.run(isa, pool(1)).bits();
            for page_size in [1, 3, 16, 24, 32, 128, 1000] {
                for (threads, order) in
                    [(1, PageOrder::Nhd), (2, PageOrder::Hnd), (3, PageOrder::Nhd), (7, PageOrder::Hnd)]
                {
                    let placement = (page_size * threads) as u64;
                    let got = Case { page_size, order, placement, ..case.clone() }.run(isa, pool(threads));
                    assert!(got.bits() == want, "{isa} {kv_dtype} page size {page_size}, {threads} threads");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(random(24))]

    /// Whatever the batch: each sequence's bits are those it has alone, on any number of threads,
    /// with its pages anywhere and of any size.
    #[test]
    fn of_any_batch_every_sequence_has_the_bits_it_has_alone(
        mut case in cases(),
        long in prop::option::of((600..2000_usize, 1..40_usize)),
    ) {
        // Enough work to be shared by threads, and a sequence that is cut in any case.
        case.sequences.extend(long);
        for isa in isas() {
            let alone = |&sequence: &(usize, usize)| {
                let case = Case { sequences: vec![sequence], page_size: 16, placement: 7, ..case.clone() };
                case.run(isa, pool(1))
            };
            let (mut out, mut lse) = (Vec::new(), Vec::new());
            for Outcome { out: o, lse: l } in case.sequences.iter().map(alone) {
                out.extend(o);
                lse.extend(l);
            }
            let want = Outcome { out, lse }.bits();
            for (threads, page_size) in [(1, 128), (2, 1), (3, 16), (7, case.page_size), (7, 128)] {
                let placement = case.placement ^ threads as u64;
                let got = Case { page_size, placement, ..case.clone() }.run(isa, pool(threads)).bits();
                prop_assert!(got == want, "{isa}, {threads} threads, pages of {page_size}");
            }
        }
    }
}

/// Beyond the promise: a prompt may be computed in chunks of any size from 16 on, and a token
/// decoded alone has the bits of one that is verified with up to 14 drafts.
#[test]
fn chunks_of_queries_change_no_bit() {
    for isa in isas() {
        for (kv_dtype, query_dtype) in dtypes() {
            // In pairs of bfloat16, one query head per KV head has a way of its own.
            let group = if kv_dtype == DType::BF16 && query_dtype == DType::BF16 { [1, 3] } else { [3, 3] };
            let of =
                |group| Case { kv_dtype, query_dtype, group, sequences: vec![(600, 130)], ..Case::default() };
            for case in group.map(of) {
                let row = case.num_heads() * case.v_head_dim;
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let parts = [(0, 16), (60, 130), (114, 130), (50, 67)];
                let drafts = [(100, 101), (100, 107), (109, 110), (113, 115), (114, 115)];
                for (whole, parts) in [(0..130, &parts[..]), (100..115, &drafts[..])] {
                    let out = case.run_queries(isa, pool(2), whole.clone()).out;
                    for &(from, to) in parts {
                        let part = case.run_queries(isa, pool(1), from..to).out;
                        let same = &out[(from - whole.start) * row..(to - whole.start) * row];
                        assert!(
                            bits(&part) == bits(same),
                            "{isa} {kv_dtype} {query_dtype} {from}..{to} of {whole:?}"
                        );
                    }
                }
            }
        }
    }
}
