//! Failures that other implementations had in the field, each with its case.

use paged_kv::attention::{AttentionOptions, BatchTables, alibi_slopes, paged_attention};
use paged_kv::dtype::DType;
use paged_kv::error::Error;
use paged_kv::kernels::{Isa, set_isa};
use paged_kv::layout::{PageOrder, PagesLayout};
use paged_kv::storage::{PagesView, RowsView, RowsViewMut};

use crate::harness::{Case, isas, pool};
use crate::memory::Rng;

/// Lanes beyond the last key took part in the softmax: with a query of zeros the result is the mean
/// of the values, and a padded lane would show.
#[test]
fn field_c57_padding_does_not_take_part_in_the_softmax() {
    for isa in isas() {
        for len in [1, 3, 4, 5, 7, 63, 64, 65, 130, 513] {
            let case = Case { causal: false, magnitude: 0.0, sequences: vec![(len, 1)], ..Case::default() };
            let got = case.run(isa, pool(1));
            let value = case.contents((len, 1)).value;
            for (i, &x) in got.out.iter().enumerate() {
                let (head, d) = (i / 64, i % 64);
                let column = (0..len).map(|t| f64::from(value[(t * 2 + head / 2) * 64 + d]));
                let mean = column.sum::<f64>() / len as f64;
                assert!((f64::from(x) - mean).abs() < 1e-6, "{isa}, {len} keys: {x}, not {mean}");
            }
            assert!(got.lse.iter().all(|lse| (lse - (len as f32).ln()).abs() < 1e-6));
        }
    }
}

/// NaN where a whole partition lies outside the window, or where a sink overflows.
#[test]
fn field_c58_empty_partitions_and_huge_sinks_stay_finite() {
    for (len, queries, window_left) in [(7, 1, 2), (7, 7, 2), (1500, 3, 2), (1200, 700, 0), (1025, 2, 511)] {
        Case { sequences: vec![(len, queries)], window_left, ..Case::default() }.check();
    }
    for sink in [1e5, -1e5, 88.8, f32::NEG_INFINITY, f32::MIN, f32::MAX] {
        for isa in isas() {
            let case = Case { sinks: Some(vec![sink; 4]), ..Case::default() };
            let got = case.run(isa, pool(1));
            assert!(got.out.iter().all(|x| x.is_finite()), "{isa}, sink {sink}");
            let plain = Case { sinks: None, ..case }.run(isa, pool(1));
            if sink > 1e4 {
                assert!(got.lse.iter().all(|&lse| lse == sink) && got.out.iter().all(|&x| x == 0.0));
            } else if sink < -1e4 {
                assert_eq!(got.bits(), plain.bits(), "{isa}, sink {sink}");
            }
            // A row that sees the sink and no key.
            let alone = Case { causal: false, sequences: vec![(0, 2)], ..Case::default() };
            let got = Case { sinks: Some(vec![sink; 4]), ..alone }.run(isa, pool(1));
            assert!(got.out.iter().all(|&x| x == 0.0) && got.lse.iter().all(|&lse| lse == sink), "{sink}");
        }
    }
}

/// Logits of +-1e5: differences count, not magnitudes.
#[test]
fn field_c58_huge_logits_stay_finite() {
    for isa in isas() {
        let case = Case { magnitude: 3e5, scale: Some(1.0), sequences: vec![(600, 2)], ..Case::default() };
        let (want, _) = case.expected();
        let got = case.run(isa, pool(1));
        for (got, want) in got.out.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 0.5 && got.is_finite(), "{isa}: {got}, not {want}");
        }
    }
}

#[test]
fn field_c59_decode_honours_the_window() {
    for len in [513, 600, 1100] {
        Case { sequences: vec![(len, 1), (len, 4)], window_left: 511, ..Case::default() }.check();
    }
}

/// The last page is only as full as the length says, also where it alone is left of the window.
#[test]
fn field_c60_the_last_page_counts_only_its_tokens() {
    Case { sequences: vec![(4097, 1)], window_left: 4095, head_dim: 16, v_head_dim: 16, ..Case::default() }
        .check();
    Case { sequences: vec![(4097, 2)], window_left: 3, ..Case::default() }.check();
}

/// A window of W tokens includes the query's own.
#[test]
fn field_c61_the_window_counts_the_query_itself() {
    for isa in isas() {
        let case = Case { sequences: vec![(50, 50)], window_left: 0, ..Case::default() };
        let got = case.run(isa, pool(1));
        let value = case.contents((50, 50)).value;
        for (i, x) in got.out.iter().enumerate() {
            let (token, head, d) = (i / 256, i / 64 % 4, i % 64);
            assert_eq!(x.to_bits(), value[(token * 2 + head / 2) * 64 + d].to_bits(), "only itself");
        }
        // With a query of zeros lse is the logarithm of the number of keys seen.
        for window in [1_u8, 2, 16, 17, 64] {
            let case = Case { magnitude: 0.0, window_left: i64::from(window) - 1, ..case.clone() };
            let lse = case.run(isa, pool(1)).lse;
            for (row, lse) in lse.iter().enumerate() {
                let seen = (row / 4 + 1).min(usize::from(window)) as f32;
                assert!((lse - seen.ln()).abs() < 1e-6, "window {window}, row {row}");
            }
        }
    }
}

#[test]
fn field_c62_alibi_bias_falls_with_distance() {
    for group in [1, 6, 7] {
        let slopes = Some(alibi_slopes(2 * group));
        Case { group, slopes: slopes.clone(), sequences: vec![(300, 5), (60, 60)], ..Case::default() }
            .check();
        Case { group, slopes, causal: false, sequences: vec![(90, 20)], ..Case::default() }.check();
    }
    for isa in isas() {
        // Query of zeros, one key to the left: lse is ln(1 + e^-slope).
        let slopes = alibi_slopes(6);
        let (slope_of, case) = (slopes.clone(), Case { magnitude: 0.0, group: 3, ..Case::default() });
        let got = Case { slopes: Some(slopes), sequences: vec![(2, 1)], ..case }.run(isa, pool(1));
        for (lse, slope) in got.lse.iter().zip(slope_of) {
            assert!((lse - (1.0 + (-slope).exp()).ln()).abs() < 1e-6, "{isa}: {lse}");
        }
    }
}

#[test]
fn field_c63_any_number_of_query_heads_per_kv_head() {
    for group in [1, 5, 6, 7, 9, 16, 64] {
        let dims = Case { group, head_dim: 32, v_head_dim: 32, ..Case::default() };
        Case { sequences: vec![(80, 1), (70, 6)], ..dims }.check();
    }
}

#[test]
fn field_c64_any_head_dim() {
    for dim in [1, 2, 7, 56, 80, 96, 100, 112, 256, 512] {
        for kv_dtype in DType::ALL {
            let case = Case { head_dim: dim, v_head_dim: dim, kv_dtype, ..Case::default() };
            Case { sequences: vec![(70, 2)], ..case }.check();
        }
    }
}

#[test]
fn field_c65_values_may_be_narrower_or_wider_than_keys() {
    for (head_dim, v_head_dim) in [(192, 128), (576, 512), (8, 100), (65, 1)] {
        Case { head_dim, v_head_dim, sequences: vec![(90, 3)], ..Case::default() }.check();
    }
}

/// The latent of MLA: one KV head of 512 elements and 64 of position, of which the value is the first 512.
#[test]
fn values_may_be_the_first_elements_of_keys() {
    for kv_dtype in DType::ALL {
        let mla = Case {
            kv_dtype,
            num_kv_heads: 1,
            head_dim: 576,
            v_head_dim: 512,
            value_in_key: true,
            scale: Some(0.07),
            ..Case::default()
        };
        Case { group: 16, sequences: vec![(150, 1), (70, 3), (80, 20)], ..mla.clone() }.check();
        Case { group: 128, sequences: vec![(70, 1)], order: PageOrder::Nhd, page_size: 7, ..mla }.check();
        // Not whole vectors, several heads.
        let odd = Case { kv_dtype, head_dim: 21, v_head_dim: 13, value_in_key: true, ..Case::default() };
        Case { sequences: vec![(90, 2), (40, 40)], ..odd }.check();
    }
}

#[test]
fn field_c67_any_page_size() {
    for page_size in [1, 2, 3, 8, 16, 64, 100, 128, 4096] {
        for order in [PageOrder::Hnd, PageOrder::Nhd] {
            Case { page_size, order, sequences: vec![(200, 2), (15, 15)], ..Case::default() }.check();
        }
    }
}

/// A type of keys and values worked until a prompt came whose beginning was there already, since that
/// path lacked it: every type takes every path.
#[test]
fn field_c70_every_dtype_on_every_path() {
    for kv_dtype in DType::ALL {
        for (len, queries) in [
            // A whole prompt, long and short; one that is there but for its last tokens, many and few.
            (90, 90),
            (9, 9),
            (600, 40),
            (600, 15),
            // Decoding, in one split and in several.
            (90, 1),
            (1100, 1),
        ] {
            for window_left in [-1, 50] {
                let case = Case { kv_dtype, window_left, group: 3, ..Case::default() };
                Case { sequences: vec![(len, queries), (33, 1)], ..case }.check();
            }
        }
    }
}

#[test]
fn field_c72_an_instruction_set_can_be_forced_and_what_the_cpu_lacks_is_refused() {
    assert!(Isa::Scalar.is_available() && Isa::detect().is_available());
    for isa in Isa::ALL {
        match (isa.is_available(), isa.name().parse::<Isa>()) {
            (true, Ok(parsed)) => assert_eq!(parsed, isa),
            (false, Err(Error::Value(message))) => assert!(message.contains(isa.name()), "{message}"),
            other => panic!("{isa}: {other:?}"),
        }
    }
    assert!(matches!(set_isa("avx9000"), Err(Error::Value(_))));
    set_isa("scalar").unwrap();
    assert_eq!(Isa::current().unwrap(), Isa::Scalar);
    set_isa(Isa::detect().name()).unwrap();
    assert_eq!(Isa::current().unwrap(), Isa::detect());
}

/// Run by the next test in a process of its own, with the variable set.
#[test]
#[ignore = "needs PAGED_KV_ISA; field_c72_the_environment_chooses runs it"]
fn the_environment_chose() {
    match std::env::var("PAGED_KV_ISA").as_deref() {
        Ok("scalar") => assert_eq!(Isa::current().unwrap(), Isa::Scalar),
        Ok("avx9000") => assert!(matches!(Isa::current(), Err(Error::Value(_)))),
        other => panic!("{other:?}"),
    }
}

#[test]
fn field_c72_the_environment_chooses() {
    for name in ["scalar", "avx9000"] {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "field::the_environment_chose", "--ignored"])
            .env("PAGED_KV_ISA", name)
            .output()
            .unwrap();
        assert!(status.status.success(), "{name}: {}", String::from_utf8_lossy(&status.stdout));
    }
}

/// Sliced queries, outputs and pages: strides are honoured and what lies between is untouched.
#[test]
fn field_c80_strided_arrays() {
    let (tokens, num_heads, kv_heads, dim, page_size, num_pages) = (5, 4, 2, 24, 4, 9);
    let mut rng = Rng(80);
    let memory = rng.floats(num_pages * 1000);
    let layout = PagesLayout {
        dtype: DType::F32,
        num_pages,
        num_heads: kv_heads,
        page_size,
        head_dim: dim,
        page_stride: 1000,
        head_stride: 37,
        token_stride: 91,
    };
    let (query, lens, table) = (rng.floats(tokens * 300), [30], [8, 3, 5, 0, 1, 7, 2, 6]);
    let mut key = Vec::new();
    for t in 0..30 {
        for h in 0..kv_heads {
            let at = layout.offset(table[t / page_size] as usize, h, t % page_size);
            key.extend_from_slice(&memory[at..at + dim]);
        }
    }
    let dense_query: Vec<f32> = (0..tokens * num_heads)
        .flat_map(|i| query[i / num_heads * 300 + i % num_heads * 50..][..dim].to_vec())
        .collect();
    let shape = paged_kv::attention::reference::Shape {
        num_heads,
        num_kv_heads: kv_heads,
        head_dim: dim,
        v_head_dim: dim,
    };
    let (want, _) = paged_kv::attention::reference::attention(
        shape,
        &dense_query,
        &key,
        &key,
        &AttentionOptions::default(),
    );
    for isa in isas() {
        let mut out = vec![7.0_f32; tokens * 500];
        // SAFETY: all arrays span their shapes with these strides, and rows of `out` are apart.
        let (pages, rows, mut out_rows) = unsafe {
            (
                PagesView::new(memory.as_ptr().cast_mut().cast(), layout, false),
                RowsView::new(query.as_ptr().cast(), DType::F32, [tokens, num_heads, dim], [300, 50]),
                RowsViewMut::new(out.as_mut_ptr().cast(), DType::F32, [tokens, num_heads, dim], [500, 31]),
            )
        };
        let tables =
            BatchTables { block_table: &table, max_pages: 8, seq_lens: &lens, cu_seqlens_q: &[0, 5] };
        let options = AttentionOptions { isa: Some(isa), ..AttentionOptions::default() };
        paged_attention(rows, pages, pages, &tables, &options, &mut out_rows, None, pool(1)).unwrap();
        for (i, &x) in out.iter().enumerate() {
            let (token, head, d) = (i / 500, i % 500 / 31, i % 500 % 31);
            if head < num_heads && d < dim {
                let want = want[(token * num_heads + head) * dim + d];
                assert!((f64::from(x) - want).abs() < 1e-6, "{isa}: {x}, not {want}");
            } else {
                assert_eq!(x, 7.0, "element {i} lies between rows");
            }
        }
    }
}
