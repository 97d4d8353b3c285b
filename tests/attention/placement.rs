//! Where keys and values lie: every element in its place, and found there.

use paged_kv::attention::{
    AttentionOptions, BatchTables, copy_tokens, paged_attention, reference, write_pages, write_rows,
};
use paged_kv::dtype::DType;
use paged_kv::ids::PageId;
use paged_kv::layout::{CacheLayout, PageOrder, PagesLayout};
use paged_kv::storage::{PagesView, RowsView, RowsViewMut};

use crate::harness::{Case, isas, pool};
use crate::memory::{Array, Pages, Rng};

const HEADS: usize = 2;
const DIMS: [usize; 2] = [2, 5];

/// Says which token, head and element it is.
fn marker(token: usize, head: usize, d: usize) -> f32 {
    (token * 100 + head * 10 + d) as f32
}

/// Halves of a page that hold keys and values were taken for each other where a page was larger than
/// what a kernel takes at once: here every value says where it belongs, pages are larger than a tile,
/// and each query picks one token out.
#[test]
fn field_c82_of_pages_larger_than_a_tile_every_element_is_found_in_its_place() {
    for order in [PageOrder::Hnd, PageOrder::Nhd] {
        for page_size in [16, 128, 200, 1000] {
            let len = 300_usize;
            let num_pages = len.div_ceil(page_size) + 1;
            let mut pages = Pages::poisoned(&CacheLayout { page_size, num_pages, order, ..layout() });
            let slot = |token: usize| (num_pages - 1 - token / page_size) * page_size + token % page_size;
            let slots: Vec<i64> = (0..len).map(|token| slot(token) as i64).collect();
            // On a parabola: of all keys, `(t, -t²/2)` has the largest product with `(t, 1)`.
            let key: Vec<f32> = (0..len * HEADS)
                .flat_map(|i| [(i / HEADS) as f32, (i / HEADS).pow(2) as f32 / -2.0])
                .collect();
            let value: Vec<f32> = (0..len * HEADS)
                .flat_map(|i| (0..DIMS[1]).map(move |d| marker(i / HEADS, i % HEADS, d)))
                .collect();
            write(&mut pages, &key, &value, &slots);

            // In memory: page, keys then values, then heads and tokens in the order's order.
            let memory = pages.floats();
            let page_elements = HEADS * page_size * (DIMS[0] + DIMS[1]);
            for (token, head) in (0..len).flat_map(|token| (0..HEADS).map(move |head| (token, head))) {
                let (page, in_page) = (slot(token) / page_size, slot(token) % page_size);
                let row = match order {
                    PageOrder::Hnd => head * page_size + in_page,
                    PageOrder::Nhd => in_page * HEADS + head,
                };
                let values = page * page_elements + HEADS * page_size * DIMS[0];
                let at = [page * page_elements + row * DIMS[0], values + row * DIMS[1]];
                assert_eq!(memory[at[0]].to_bits(), (token as f32).to_bits(), "{order} {page_size} {token}");
                for d in 0..DIMS[1] {
                    assert_eq!(memory[at[1] + d], marker(token, head, d), "{order} {page_size} {token}");
                }
            }

            // By attention: all queries at once, and a few alone.
            let table: Vec<i32> = (0..num_pages - 1).map(|i| (num_pages - 1 - i) as i32).collect();
            for picked in [(0..len).collect(), vec![0], vec![64, 127], vec![len - 1, 15, 199]] {
                let (key_pages, value_pages) = pages.views();
                for isa in isas() {
                    let query: Vec<f32> =
                        picked.iter().flat_map(|&t| [400.0 * t as f32, 400.0].repeat(HEADS)).collect();
                    let query = Array::new(&query, DType::F32);
                    let mut out = Array::new(&vec![f32::NAN; picked.len() * HEADS * DIMS[1]], DType::F32);
                    let case = Case { causal: false, scale: Some(1.0), ..Case::default() };
                    paged_attention(
                        query.view([picked.len(), HEADS, DIMS[0]]),
                        key_pages,
                        value_pages,
                        &BatchTables {
                            block_table: &table,
                            max_pages: table.len(),
                            seq_lens: &[len as i32],
                            cu_seqlens_q: &[0, picked.len() as i32],
                        },
                        &case.options(isa),
                        &mut out.view_mut([picked.len(), HEADS, DIMS[1]]),
                        None,
                        pool(1),
                    )
                    .unwrap();
                    let want = picked.iter().flat_map(|&t| {
                        (0..HEADS * DIMS[1]).map(move |i| marker(t, i / DIMS[1], i % DIMS[1]))
                    });
                    assert_eq!(out.floats(), want.collect::<Vec<_>>(), "{isa} {order} {page_size}");
                }
            }
        }
    }
}

/// The tokens of a page that two prompts share are copied, the page's rest is not: what stands behind
/// them stays out, and the source stays as it was.
#[test]
fn field_c88_a_page_of_which_only_some_tokens_are_shared() {
    for (order, shared) in
        [PageOrder::Hnd, PageOrder::Nhd].into_iter().flat_map(|o| [1, 7, 15].map(|n| (o, n)))
    {
        let mut pages = Pages::poisoned(&CacheLayout { order, ..layout() });
        let mut rng = Rng(88);
        // A prompt of 32 tokens on pages 4 and 1. Another has 16 + `shared` of them in common, and goes
        // on for 3 tokens on page 2, then 0.
        let (key, value) = (rng.floats(32 * HEADS * DIMS[0]), rng.floats(32 * HEADS * DIMS[1]));
        let slots: Vec<i64> = (64..80).chain(16..32).collect();
        write(&mut pages, &key, &value, &slots);
        let before = pages.floats();
        let (key_pages, value_pages) = pages.views();
        copy_tokens(key_pages, PageId(1), PageId(2), shared).unwrap();
        copy_tokens(value_pages, PageId(1), PageId(2), shared).unwrap();
        let (own_key, own_value) = (rng.floats(3 * HEADS * DIMS[0]), rng.floats(3 * HEADS * DIMS[1]));
        let slots: Vec<i64> = (32 + shared as i64..48).chain(0..).take(3).collect();
        write(&mut pages, &own_key, &own_value, &slots);

        let page = before.len() / 5;
        let bits = |memory: &[f32]| memory[page..2 * page].iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&pages.floats()), bits(&before), "the source");
        let common = 16 + shared;
        let len = common + 3;
        let dense_key = [&key[..common * HEADS * DIMS[0]], &own_key].concat();
        let dense_value = [&value[..common * HEADS * DIMS[1]], &own_value].concat();
        let shape = reference::Shape {
            num_heads: HEADS,
            num_kv_heads: HEADS,
            head_dim: DIMS[0],
            v_head_dim: DIMS[1],
        };
        let query = rng.floats(3 * HEADS * DIMS[0]);
        for isa in isas() {
            let case = Case::default();
            let options = case.options(isa);
            let (want, _) = reference::attention(shape, &query, &dense_key, &dense_value, &options);
            let (key_pages, value_pages) = pages.views();
            let rows = Array::new(&query, DType::F32);
            let mut out = Array::new(&[f32::NAN; 3 * HEADS * DIMS[1]], DType::F32);
            paged_attention(
                rows.view([3, HEADS, DIMS[0]]),
                key_pages,
                value_pages,
                &BatchTables {
                    block_table: &[4, 2, 0],
                    max_pages: 3,
                    seq_lens: &[len as i32],
                    cu_seqlens_q: &[0, 3],
                },
                &options,
                &mut out.view_mut([3, HEADS, DIMS[1]]),
                None,
                pool(1),
            )
            .unwrap();
            for (got, want) in out.floats().iter().zip(want) {
                assert!((f64::from(*got) - want).abs() < 1e-6, "{isa} {order}, {shared} shared: {got}");
            }
        }
    }
}

/// Offsets beyond 2^31 elements and 2^32 bytes, between pages, heads or tokens, on memory that is mapped
/// but mostly never touched.
#[test]
fn offsets_are_64_bits_wide() {
    const FAR: usize = (1 << 31) + 40;
    let (dim, page_size) = (8, 4);
    for [page_stride, head_stride, token_stride] in
        [[FAR, 32, 8], [8 * page_size, FAR, 8], [16, 8, FAR], [4 * FAR, 2 * FAR, FAR / 4 + 30]]
    {
        let layout = PagesLayout {
            dtype: DType::BF16,
            num_pages: 3,
            num_heads: HEADS,
            page_size,
            head_dim: dim,
            page_stride,
            head_stride,
            token_stride,
        };
        let bytes = layout.span().unwrap() * 2;
        let mut memory = memmap2::MmapOptions::new().len(bytes).no_reserve_swap().map_anon().unwrap();
        // SAFETY: the mapping spans the layout and is used by this test alone.
        let pages = unsafe { PagesView::new(memory.as_mut_ptr(), layout, true) };
        let mut rng = Rng(31);
        let rows = Array::new(&rng.floats(8 * HEADS * dim), DType::BF16);
        let slots: Vec<i64> = (4..12).collect();
        write_rows(rows.view([8, HEADS, dim]), pages, &slots, pool(1)).unwrap();
        let last = 2 * page_stride + head_stride + 3 * token_stride;
        let written = &memory[last * 2..][..dim * 2];
        assert!(written.iter().any(|&x| x != 0), "the last token lies where it should");
        // The last page again as the first, copied.
        copy_tokens(pages, PageId(2), PageId(0), 4).unwrap();

        let query = rng.floats(HEADS * dim);
        let shape =
            reference::Shape { num_heads: HEADS, num_kv_heads: HEADS, head_dim: dim, v_head_dim: dim };
        let key = rows.floats();
        let (want, _) = reference::attention(shape, &query, &key, &key, &AttentionOptions::default());
        for isa in isas() {
            for table in [[1, 2], [1, 0]] {
                let mut out = vec![0.0; HEADS * dim];
                let tables =
                    BatchTables { block_table: &table, max_pages: 2, seq_lens: &[8], cu_seqlens_q: &[0, 1] };
                let options = AttentionOptions { isa: Some(isa), ..AttentionOptions::default() };
                let mut out_rows = RowsViewMut::from_slice(&mut out, [1, HEADS, dim]).unwrap();
                let query = RowsView::from_slice(&query, [1, HEADS, dim]).unwrap();
                paged_attention(query, pages, pages, &tables, &options, &mut out_rows, None, pool(1))
                    .unwrap();
                for (got, want) in out.iter().zip(&want) {
                    assert!((f64::from(*got) - want).abs() < 1e-6, "{isa}: {got}, not {want}");
                }
            }
        }
    }
}

fn write(pages: &mut Pages, key: &[f32], value: &[f32], slots: &[i64]) {
    let (k, v) = (Array::new(key, DType::F32), Array::new(value, DType::F32));
    let (key_pages, value_pages) = pages.views();
    let (k, v) = (k.view([slots.len(), HEADS, DIMS[0]]), v.view([slots.len(), HEADS, DIMS[1]]));
    write_pages(k, v, key_pages, value_pages, slots, pool(2)).unwrap();
}

fn layout() -> CacheLayout {
    CacheLayout {
        num_layers: 1,
        num_pages: 5,
        page_size: 16,
        num_kv_heads: HEADS,
        head_dim: DIMS[0],
        v_head_dim: DIMS[1],
        dtype: DType::F32,
        head_scales: false,
        value_in_key: false,
        order: PageOrder::Hnd,
    }
}
