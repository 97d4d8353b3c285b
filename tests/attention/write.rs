//! Writing into pages and copying between them.

use half::bf16;
use paged_kv::attention::{copy_tokens, write_pages, write_rows};
use paged_kv::dtype::DType;
use paged_kv::error::Error;
use paged_kv::ids::PageId;
use paged_kv::layout::{CacheLayout, PageOrder};
use paged_kv::storage::PagesView;

use crate::harness::pool;
use crate::memory::{Array, Pages, Rng, rounded};

fn layout(dtype: DType, order: PageOrder) -> CacheLayout {
    CacheLayout {
        num_layers: 1,
        num_pages: 7,
        page_size: 5,
        num_kv_heads: 2,
        head_dim: 70,
        v_head_dim: 3,
        dtype,
        head_scales: false,
        value_in_key: false,
        order,
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}

#[test]
fn every_dtype_is_converted_into_every_other_and_only_named_slots_change() {
    for order in [PageOrder::Hnd, PageOrder::Nhd] {
        for from in DType::FLOATS {
            for to in DType::FLOATS {
                let cache = layout(to, order);
                let mut pages = Pages::poisoned(&cache);
                let before = pages.floats();
                let (key_layout, value_layout) = (pages.key, pages.value);
                let slots = [34, -1, 0, 17, -1, 12];
                let mut rng = Rng(3);
                let (keys, values) = (rng.floats(6 * 2 * 70), rng.floats(6 * 2 * 3));
                let (key, value) = (Array::new(&keys, from), Array::new(&values, from));
                let (key_pages, value_pages) = pages.views();
                write_pages(
                    key.view([6, 2, 70]),
                    value.view([6, 2, 3]),
                    key_pages,
                    value_pages,
                    &slots,
                    pool(2),
                )
                .unwrap();
                let mut want = before;
                for (token, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                    let (page, offset) = (slot as usize / 5, slot as usize % 5);
                    for head in 0..2 {
                        for d in 0..70 {
                            let x = rounded(keys[(token * 2 + head) * 70 + d], from);
                            want[key_layout.offset(page, head, offset) + d] = rounded(x, to);
                        }
                        for d in 0..3 {
                            let x = rounded(values[(token * 2 + head) * 3 + d], from);
                            let at = cache.value_offset() + value_layout.offset(page, head, offset) + d;
                            want[at] = rounded(x, to);
                        }
                    }
                }
                assert!(same(&pages.floats(), &want), "{from} to {to}, {order}");
            }
        }
    }
}

#[test]
fn of_two_tokens_for_one_slot_the_later_wins_with_any_number_of_threads() {
    // Enough elements to wake threads.
    let tokens = 8000;
    let slots: Vec<i64> = (0..tokens).map(|i| i64::from(i * 7919 % 35)).collect();
    let values: Vec<f32> = (0..tokens).flat_map(|i| [i as f32; 140]).collect();
    let rows = Array::new(&values, DType::F32);
    for threads in 1..=3 {
        let mut pages = Pages::poisoned(&layout(DType::F32, PageOrder::Hnd));
        let key_layout = pages.key;
        let (key_pages, _) = pages.views();
        write_rows(rows.view([tokens as usize, 2, 70]), key_pages, &slots, pool(threads)).unwrap();
        let memory = pages.floats();
        for slot in 0..35_usize {
            let last = slots.iter().rposition(|&s| s == slot as i64).unwrap();
            let at = key_layout.offset(slot / 5, 1, slot % 5);
            assert!(same(&memory[at..at + 70], &[last as f32; 70]), "slot {slot}, {threads} threads");
        }
    }
}

#[test]
fn a_copy_takes_the_first_tokens_of_every_head_and_nothing_else() {
    for order in [PageOrder::Hnd, PageOrder::Nhd] {
        for tokens in [0, 1, 3, 5] {
            let mut pages = Pages::poisoned(&layout(DType::BF16, order));
            let key_layout = pages.key;
            let rows = Array::new(&Rng(1).floats(35 * 2 * 70), DType::BF16);
            let (key_pages, _) = pages.views();
            let slots: Vec<i64> = (0..35).collect();
            write_rows(rows.view([35, 2, 70]), key_pages, &slots, pool(1)).unwrap();
            let mut want = pages.floats();
            let (key_pages, _) = pages.views();
            copy_tokens(key_pages, PageId(6), PageId(2), tokens).unwrap();
            for head in 0..2 {
                for token in 0..tokens {
                    let from = key_layout.offset(6, head, token);
                    want.copy_within(from..from + 70, key_layout.offset(2, head, token));
                }
            }
            assert!(same(&pages.floats(), &want), "{order}, {tokens} tokens");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let mut pages = Pages::poisoned(&layout(DType::F32, PageOrder::Hnd));
    let before = pages.floats();
    let (key, value) = (Array::new(&[0.0; 280], DType::F32), Array::new(&[0.0; 12], DType::F32));
    let (key_pages, value_pages) = pages.views();
    let (k, v) = (key.view([2, 2, 70]), value.view([2, 2, 3]));
    let write = |slots: &[i64]| write_pages(k, v, key_pages, value_pages, slots, pool(1));
    assert!(matches!(write(&[0, 35]), Err(Error::InvalidPage { page: 7, num_pages: 7, .. })));
    assert!(matches!(write(&[0, i64::MAX]), Err(Error::InvalidPage { .. })));
    assert!(matches!(write(&[0, -2]), Err(Error::Value(_))));
    assert!(matches!(write(&[0]), Err(Error::Layout(_))));
    let swapped = write_pages(k, v, value_pages, key_pages, &[0, 1], pool(1));
    assert!(matches!(swapped, Err(Error::Layout(_))));

    let copy = |from, to, tokens| copy_tokens(key_pages, PageId(from), PageId(to), tokens);
    assert!(matches!(copy(7, 0, 1), Err(Error::InvalidPage { page: 7, .. })));
    assert!(matches!(copy(0, u32::MAX, 1), Err(Error::InvalidPage { .. })));
    assert!(matches!(copy(1, 1, 1), Err(Error::InvalidPage { page: 1, .. })));
    assert!(matches!(copy(0, 1, 6), Err(Error::Layout(_))));
    assert!(same(&pages.floats(), &before));
}

#[test]
fn pages_that_are_read_only_or_overlap_are_not_written() {
    let mut memory = vec![bf16::ONE; 7 * 5 * 2 * 70];
    let good = paged_kv::layout::PagesLayout {
        dtype: DType::BF16,
        num_pages: 7,
        num_heads: 2,
        page_size: 5,
        head_dim: 70,
        page_stride: 700,
        head_stride: 350,
        token_stride: 70,
    };
    let rows = Array::new(&[0.0; 140], DType::F32);
    for (layout, writable) in [
        (good, false),
        (paged_kv::layout::PagesLayout { token_stride: 69, ..good }, true),
        (paged_kv::layout::PagesLayout { head_stride: 0, ..good }, true),
        (paged_kv::layout::PagesLayout { page_stride: 630, ..good }, true),
    ] {
        // SAFETY: `memory` spans the good layout, and the others are smaller.
        let pages = unsafe { PagesView::new(memory.as_mut_ptr().cast(), layout, writable) };
        let written = write_rows(rows.view([1, 2, 70]), pages, &[3], pool(1));
        assert!(matches!(written, Err(Error::Layout(_))), "{layout:?}");
        let copied = copy_tokens(pages, PageId(0), PageId(1), 2);
        assert!(matches!(copied, Err(Error::Layout(_))), "{layout:?}");
    }
    assert!(memory.iter().all(|&x| x == bf16::ONE));
}
