//! Random shapes, dtypes and options.

use paged_kv::dtype::DType;
use paged_kv::layout::PageOrder;
use proptest::prelude::*;

use crate::harness::{Case, random};
use crate::memory::Rng;

/// Odd ones, seldom above 160, the usual ones, and MLA's 576.
fn dims() -> impl Strategy<Value = usize> {
    let usual = prop::sample::select(vec![32, 64, 80, 96, 128]);
    prop_oneof![10 => 1..160_usize, 6 => usual, 1 => 160..577_usize, 1 => Just(576_usize)]
}

/// Length and queries: decode, chunks, untouched and empty sequences; some beyond one split.
fn sequences() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let one = prop_oneof![
        4 => (0..300_usize, 0..4_usize),
        2 => (0..150_usize, 0..70_usize),
        1 => (500..1100_usize, 1..3_usize),
    ]
    .prop_map(|(len, queries)| (len, queries.min(len)));
    prop::collection::vec(one, 1..4)
}

/// Of keys and values, and of queries: also as bfloat16 is multiplied in pairs.
fn dtypes() -> impl Strategy<Value = (DType, DType)> {
    let any = (prop::sample::select(DType::ALL.to_vec()), prop::sample::select(DType::FLOATS.to_vec()));
    let pairs = prop::sample::select(vec![DType::BF16, DType::I8, DType::F8E4M3]);
    prop_oneof![3 => any, 1 => pairs.prop_map(|kv_dtype| (kv_dtype, DType::BF16))]
}

prop_compose! {
    pub(crate) fn cases()(
        (kv_dtype, query_dtype) in dtypes(),
        (head_scales, value_in_key) in (any::<bool>(), prop::bool::weighted(0.2)),
        (num_kv_heads, group) in prop_oneof![
            (1..4_usize, 1..5_usize),
            (Just(1_usize), 1..17_usize),
        ],
        (head_dim, v_head_dim) in prop_oneof![
            3 => dims().prop_map(|d| (d, d)),
            3 => (dims(), dims()),
            1 => (1..5_usize, 1..5_usize).prop_map(|(d, v)| (32 * d, 32 * v)),
            1 => (1..4_usize, 1..4_usize).prop_map(|(d, v)| (64 * d, 64 * v)),
        ],
        page_size in prop_oneof![prop::sample::select(vec![1, 8, 16, 32, 64, 128, 256]), 1..257_usize],
        order in prop::sample::select(vec![PageOrder::Hnd, PageOrder::Nhd]),
        sequences in sequences(),
        scale in prop::option::weighted(0.2, 0.01..0.5_f32),
        causal in prop::bool::weighted(0.75),
        window_left in prop_oneof![Just(-1_i64), 0..20_i64, 0..700_i64],
        soft_cap in prop_oneof![2 => Just(0.0), 1 => 0.5..60.0_f32],
        (alibi, sinks) in (prop::bool::weighted(0.3), prop::bool::weighted(0.3)),
        magnitude in prop_oneof![Just(1.0_f32), 0.0..8.0_f32],
        (seed, placement) in (any::<u64>(), any::<u64>()),
    ) -> Case {
        let num_heads = num_kv_heads * group;
        let value_in_key = value_in_key && v_head_dim <= head_dim;
        Case {
            value_in_key,
            kv_dtype, query_dtype, head_scales: head_scales && kv_dtype.is_quantised(), num_kv_heads, group, head_dim, v_head_dim, page_size, order, sequences,
            scale, causal, window_left, soft_cap, magnitude, seed, placement,
            slopes: alibi.then(|| paged_kv::attention::alibi_slopes(num_heads)),
            sinks: sinks.then(|| Rng(seed).floats(num_heads).iter().map(|x| 4.0 * x).collect()),
        }
    }
}

proptest! {
    #![proptest_config(random(192))]

    #[test]
    fn every_isa_agrees_with_the_definition(case in cases()) {
        case.check();
    }
}
