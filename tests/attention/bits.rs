//! Same bits: a sequence's result depends on nothing but its own tokens.

use paged_kv::dtype::DType;
use paged_kv::layout::PageOrder;

use crate::harness::{Case, Outcome, isas, pool};

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

#[test]
fn a_sequence_has_the_same_bits_alone_and_in_a_batch() {
    for isa in isas() {
        let together = batch().run(isa, pool(3));
        let (mut out, mut lse) = (Vec::new(), Vec::new());
        for sequence in batch().sequences {
            let alone = Case { sequences: vec![sequence], ..batch() }.run(isa, pool(1));
            out.extend(alone.out);
            lse.extend(alone.lse);
        }
        assert_eq!(together.bits(), Outcome { out, lse }.bits(), "{isa}");
    }
}

#[test]
fn threads_placement_page_size_and_order_change_no_bit() {
    for isa in isas() {
        for (kv_dtype, head_dim) in [(DType::BF16, 40), (DType::F32, 64), (DType::F16, 64)] {
            let case = Case { kv_dtype, head_dim, ..batch() };
            let want = case.run(isa, pool(1)).bits();
            for page_size in [1, 3, 16, 128, 1000] {
                for (threads, order) in [(1, PageOrder::Nhd), (2, PageOrder::Hnd), (3, PageOrder::Nhd)] {
                    let placement = (page_size * threads) as u64;
                    let got = Case { page_size, order, placement, ..case.clone() }.run(isa, pool(threads));
                    assert!(got.bits() == want, "{isa} {kv_dtype} page size {page_size}, {threads} threads");
                }
            }
        }
    }
}

/// Beyond the promise: decoding a token gives the bits that a prefill of it gives, so a prefix may
/// be computed in chunks of any size, and drafts verified together.
#[test]
fn chunks_of_queries_change_no_bit() {
    for isa in isas() {
        for kv_dtype in DType::ALL {
            let case = Case { kv_dtype, group: 3, sequences: vec![(600, 130)], ..Case::default() };
            let whole = case.run(isa, pool(2));
            let row = case.num_heads() * case.v_head_dim;
            for (from, to) in [(0, 1), (0, 7), (60, 130), (129, 130), (63, 64)] {
                let part = case.run_queries(isa, pool(1), from..to);
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&part.out), bits(&whole.out[from * row..to * row]), "{isa} {from}..{to}");
            }
        }
    }
}
