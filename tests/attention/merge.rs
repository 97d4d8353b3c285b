//! `merge_states` against attention that was never split.

use paged_kv::attention::merge_states;
use paged_kv::dtype::DType;
use paged_kv::error::Error;

use crate::harness::{Case, isas, pool};
use crate::memory::Array;

#[test]
fn merged_parts_equal_the_whole() {
    for isa in isas() {
        for cut in [0, 1, 64, 130, 199, 200] {
            let whole = Case { causal: false, sequences: vec![(200, 3)], ..Case::default() };
            let sinks = Some(vec![1.0, -2.0, 0.0, 3.0]);
            let want = Case { sinks: sinks.clone(), ..whole.clone() }.run(isa, pool(1));
            let a = Case { sinks, ..whole.clone() }.run_keys(isa, pool(1), 0..cut);
            let b = whole.run_keys(isa, pool(1), cut..200);
            let shape = [3, whole.num_heads(), whole.v_head_dim];
            let (part_a, part_b) = (Array::new(&a.out, DType::F32), Array::new(&b.out, DType::F32));
            let mut out = Array::new(&vec![f32::NAN; want.out.len()], DType::F32);
            let mut lse = vec![f32::NAN; want.lse.len()];
            merge_states(
                part_a.view(shape),
                &a.lse,
                part_b.view(shape),
                &b.lse,
                &mut out.view_mut(shape),
                &mut lse,
            )
            .unwrap();
            let close = |got: &[f32], want: &[f32]| got.iter().zip(want).all(|(a, b)| (a - b).abs() <= 1e-6);
            assert!(close(&out.floats(), &want.out) && close(&lse, &want.lse), "{isa}, cut at {cut}");
        }
    }
}

#[test]
fn a_side_without_keys_counts_for_nothing_whatever_its_output_holds() {
    let shape = [1, 3, 2];
    let side = Array::new(&[0.1, 0.2, 0.3, 0.4, f32::NAN, f32::INFINITY], DType::F32);
    let unseen = Array::new(&[f32::NAN, f32::INFINITY, f32::NAN, f32::NAN, f32::NAN, f32::NAN], DType::F32);
    let (lse_a, lse_b) = ([0.7, -1e30, f32::NEG_INFINITY], [f32::NEG_INFINITY; 3]);
    for swapped in [false, true] {
        let mut out = Array::new(&[9.0; 6], DType::F32);
        let mut lse = [9.0; 3];
        let (a, b) = (side.view(shape), unseen.view(shape));
        if swapped {
            merge_states(b, &lse_b, a, &lse_a, &mut out.view_mut(shape), &mut lse).unwrap();
        } else {
            merge_states(a, &lse_a, b, &lse_b, &mut out.view_mut(shape), &mut lse).unwrap();
        }
        assert_eq!(out.floats(), [0.1, 0.2, 0.3, 0.4, 0.0, 0.0]);
        assert_eq!(lse, lse_a);
    }
}

#[test]
fn shapes_that_differ_are_refused() {
    let array = Array::new(&[0.0; 12], DType::F16);
    let mut out = Array::new(&[7.0; 12], DType::F16);
    let mut lse = [7.0; 6];
    let six = [0.0; 6];
    let a = array.view([2, 3, 2]);
    for (b, lse_b) in [(array.view([3, 2, 2]), &six[..]), (array.view([2, 3, 2]), &six[..5])] {
        let result = merge_states(a, &six, b, lse_b, &mut out.view_mut([2, 3, 2]), &mut lse);
        assert!(matches!(result, Err(Error::Layout(_))), "{result:?}");
    }
    assert_eq!((out.floats(), lse), (vec![7.0; 12], [7.0; 6]));
}
