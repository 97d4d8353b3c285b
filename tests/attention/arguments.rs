//! Arguments that don't fit: a typed error, and nothing written.

use paged_kv::attention::{AttentionOptions, BatchTables, ThreadPool, paged_attention};
use paged_kv::dtype::DType;
use paged_kv::error::{Error, Result};
use paged_kv::layout::{CacheLayout, PageOrder};

use crate::harness::pool;
use crate::memory::{Array, Pages};

/// Two sequences of 20 and 9 tokens with 2 and 1 queries, pages of 8.
struct Arguments<'a> {
    query: (DType, [usize; 3]),
    out: (DType, [usize; 3]),
    num_lse: usize,
    table: &'a [i32],
    max_pages: usize,
    lens: &'a [i32],
    cu: &'a [i32],
    options: AttentionOptions<'a>,
}

const GOOD: Arguments = Arguments {
    query: (DType::F32, [3, 4, 16]),
    out: (DType::F32, [3, 4, 12]),
    num_lse: 12,
    table: &[0, 1, 2, 3, 4, -1],
    max_pages: 3,
    lens: &[20, 9],
    cu: &[0, 2, 3],
    options: AttentionOptions {
        scale: None,
        causal: true,
        window_left: -1,
        logits_soft_cap: 0.0,
        alibi_slopes: None,
        sinks: None,
        isa: None,
    },
};

impl Arguments<'_> {
    /// The result, and whether `out` and `lse` are as before.
    fn call(&self) -> (Result<()>, bool) {
        let array =
            |(dtype, shape): (DType, [usize; 3]), x: f32| Array::new(&vec![x; shape.iter().product()], dtype);
        let mut pages = Pages::poisoned(&CacheLayout {
            num_layers: 1,
            num_pages: 5,
            page_size: 8,
            num_kv_heads: 2,
            head_dim: 16,
            v_head_dim: 12,
            dtype: DType::F16,
            head_scales: false,
            value_in_key: false,
            order: PageOrder::Hnd,
        });
        let (key_pages, value_pages) = pages.views();
        let query = array(self.query, 0.0);
        let mut out = array(self.out, 7.0);
        let mut lse = vec![7.0; self.num_lse];
        let tables = BatchTables {
            block_table: self.table,
            max_pages: self.max_pages,
            seq_lens: self.lens,
            cu_seqlens_q: self.cu,
        };
        let result = paged_attention(
            query.view(self.query.1),
            key_pages,
            value_pages,
            &tables,
            &self.options,
            &mut out.view_mut(self.out.1),
            Some(&mut lse),
            pool(1),
        );
        (result, out.floats().iter().chain(&lse).all(|&x| x == 7.0))
    }

    #[track_caller]
    fn refused(&self, pattern: fn(&Error) -> bool) {
        let (result, untouched) = self.call();
        let error = result.unwrap_err();
        assert!(pattern(&error) && untouched, "{error:?}, untouched: {untouched}");
    }
}

fn layout(error: &Error) -> bool {
    matches!(error, Error::Layout(_))
}

fn value(error: &Error) -> bool {
    matches!(error, Error::Value(_))
}

#[test]
fn good_arguments_are_taken() {
    let (result, untouched) = GOOD.call();
    assert!(result.is_ok() && !untouched);
}

#[test]
fn shapes_and_dtypes_must_agree() {
    Arguments { query: (DType::F32, [3, 4, 15]), ..GOOD }.refused(layout);
    Arguments { query: (DType::F32, [3, 5, 16]), out: (DType::F32, [3, 5, 12]), num_lse: 15, ..GOOD }
        .refused(layout);
    Arguments { query: (DType::F32, [3, 0, 16]), out: (DType::F32, [3, 0, 12]), num_lse: 0, ..GOOD }
        .refused(layout);
    Arguments { out: (DType::F32, [3, 4, 16]), ..GOOD }.refused(layout);
    Arguments { out: (DType::F32, [2, 4, 12]), ..GOOD }.refused(layout);
    Arguments { out: (DType::BF16, [3, 4, 12]), ..GOOD }.refused(layout);
    Arguments { num_lse: 11, ..GOOD }.refused(layout);
}

#[test]
fn tables_must_cover_the_batch() {
    Arguments { table: &[0, 1, 2, 3, 4], ..GOOD }.refused(layout);
    Arguments { table: &[0, 1, 3, 4], max_pages: 2, ..GOOD }.refused(layout);
    Arguments { max_pages: usize::MAX, ..GOOD }.refused(layout);
    Arguments { lens: &[20], ..GOOD }.refused(layout);
    Arguments { cu: &[0, 3], ..GOOD }.refused(layout);
    Arguments { cu: &[], lens: &[], table: &[], ..GOOD }.refused(layout);
    Arguments { cu: &[1, 2, 3], ..GOOD }.refused(value);
    Arguments { cu: &[0, 3, 2], ..GOOD }.refused(value);
    Arguments { cu: &[0, 2, 4], ..GOOD }.refused(value);
    Arguments { cu: &[0, 2, -1], ..GOOD }.refused(value);
    Arguments { lens: &[20, -9], ..GOOD }.refused(value);
    Arguments { lens: &[1, 9], ..GOOD }.refused(value);
    Arguments { lens: &[i32::MAX, 9], ..GOOD }.refused(layout);
}

#[test]
fn pages_must_be_in_the_pool_where_they_are_needed() {
    for (table, bad) in [
        ([0, 1, 5, 3, 4, -1], 5),
        ([0, 1, 2, -1, 4, -1], -1),
        ([i32::MIN, 1, 2, 3, 4, -1], i64::from(i32::MIN)),
    ] {
        let (result, untouched) = Arguments { table: &table, ..GOOD }.call();
        match result {
            Err(Error::InvalidPage { page, num_pages: 5, .. }) if page == bad && untouched => {}
            other => panic!("{other:?}"),
        }
    }
    // Behind the window, behind the length, or of a sequence without queries: not looked at.
    let window = AttentionOptions { window_left: 8, ..GOOD.options };
    assert!(Arguments { table: &[-1, 1, 2, 3, 4, 99], options: window, ..GOOD }.call().0.is_ok());
    assert!(Arguments { table: &[-1, -1, -1, 3, 4, 99], cu: &[0, 0, 3], ..GOOD }.call().0.is_ok());
    Arguments {
        table: &[-1, 1, 2, 3, 4, 99],
        options: AttentionOptions { window_left: 11, ..window },
        ..GOOD
    }
    .refused(|error| matches!(error, Error::InvalidPage { page: -1, .. }));
}

#[test]
fn numbers_must_be_finite_and_in_range() {
    let with = |options: AttentionOptions| Arguments { options, ..GOOD }.refused(value);
    for bad in [f32::NAN, f32::INFINITY] {
        with(AttentionOptions { scale: Some(bad), ..GOOD.options });
        with(AttentionOptions { logits_soft_cap: bad, ..GOOD.options });
        with(AttentionOptions { alibi_slopes: Some(&[1.0, bad, 1.0, 1.0]), ..GOOD.options });
        with(AttentionOptions { sinks: Some(&[1.0, 1.0, 1.0, bad]), ..GOOD.options });
    }
    with(AttentionOptions { logits_soft_cap: -1.0, ..GOOD.options });
    with(AttentionOptions { window_left: -2, ..GOOD.options });
    let three = Some(&[1.0; 3][..]);
    Arguments { options: AttentionOptions { alibi_slopes: three, ..GOOD.options }, ..GOOD }.refused(layout);
    Arguments { options: AttentionOptions { sinks: three, ..GOOD.options }, ..GOOD }.refused(layout);
}

#[test]
fn rows_of_no_sequence_and_sequences_of_no_token_see_no_key() {
    for (lens, cu) in [([20, 0], [0, 2, 3]), ([20, 9], [0, 2, 2])] {
        let mut out = Array::new(&[f32::NAN; 3 * 4 * 12], DType::F32);
        let mut lse = [f32::NAN; 12];
        let mut pages = Pages::poisoned(&CacheLayout {
            num_layers: 1,
            num_pages: 5,
            page_size: 8,
            num_kv_heads: 2,
            head_dim: 16,
            v_head_dim: 12,
            dtype: DType::F16,
            head_scales: false,
            value_in_key: false,
            order: PageOrder::Hnd,
        });
        let (key_pages, value_pages) = pages.views();
        paged_attention(
            Array::new(&[f32::NAN; 3 * 4 * 16], DType::F32).view([3, 4, 16]),
            key_pages,
            value_pages,
            &BatchTables { block_table: GOOD.table, max_pages: 3, seq_lens: &lens, cu_seqlens_q: &cu },
            &GOOD.options,
            &mut out.view_mut([3, 4, 12]),
            Some(&mut lse),
            pool(1),
        )
        .unwrap();
        assert!(out.floats()[2 * 48..].iter().all(|x| x.to_bits() == 0));
        assert_eq!(lse[8..], [f32::NEG_INFINITY; 4]);
        // The others read NaN queries and poisoned pages: that must show.
        assert!(out.floats()[..2 * 48].iter().all(|x| x.is_nan()) && lse[..8].iter().all(|x| x.is_nan()));
    }
}

#[test]
fn an_empty_batch_is_fine() {
    let empty = Arguments {
        query: (DType::F32, [0, 4, 16]),
        out: (DType::F32, [0, 4, 12]),
        num_lse: 0,
        table: &[],
        lens: &[],
        cu: &[0],
        ..GOOD
    };
    assert!(empty.call().0.is_ok());
}

#[test]
fn a_pool_has_a_sane_number_of_threads() {
    for bad in [0, 1025, 65_536, usize::MAX] {
        assert!(matches!(ThreadPool::new(Some(bad)), Err(Error::Value(_))), "{bad}");
    }
    assert_eq!(ThreadPool::new(Some(1)).unwrap().num_threads(), 1);
    assert_eq!(ThreadPool::new(Some(3)).unwrap().num_threads(), 3);
    assert!(ThreadPool::new(None).unwrap().num_threads() >= 1);
}
