use std::sync::Arc;

use super::*;
use crate::dtype::DType;
use crate::layout::PageOrder;

fn layout(num_layers: usize) -> CacheLayout {
    CacheLayout {
        num_layers,
        num_pages: 5,
        page_size: 4,
        num_kv_heads: 2,
        head_dim: 8,
        v_head_dim: 6,
        dtype: DType::BF16,
        head_scales: false,
        value_in_key: false,
        order: PageOrder::Hnd,
    }
}

/// Memory for the keys or values of one layer, dense.
fn array(shape: CacheLayout, which: Which) -> (Vec<u16>, PagesLayout) {
    let mut pages = shape.pages(which).unwrap();
    pages.page_stride = pages.num_heads * pages.head_stride;
    (vec![0; pages.span().unwrap()], pages)
}

/// Owned arrays for every layer, and what `adopt` is told about them.
fn arrays(shape: CacheLayout) -> (Vec<Vec<u16>>, Vec<[LayerPages; 2]>) {
    let mut owned = Vec::new();
    let layers = (0..shape.num_layers)
        .map(|_| {
            [Which::Key, Which::Value].map(|which| {
                let (mut memory, layout) = array(shape, which);
                let base = memory.as_mut_ptr().cast();
                owned.push(memory);
                LayerPages { base, layout, scales: None }
            })
        })
        .collect();
    (owned, layers)
}

type Break = fn(&mut Vec<[LayerPages; 2]>);

/// Adopts arrays that outlive the storage; `break_it` changes what is said about them.
fn adopt_with(break_it: impl FnOnce(&mut Vec<[LayerPages; 2]>)) -> Result<KvStorage> {
    let shape = layout(2);
    let (owned, mut layers) = arrays(shape);
    break_it(&mut layers);
    // SAFETY: `arrays` gives each layer memory of its own, owned by what is passed along; what
    // `break_it` makes worse must be refused, and nothing is read or written here.
    unsafe { KvStorage::adopt(shape, layers, Box::new(owned)) }
}

#[test]
fn every_slot_of_a_mapped_cache_has_memory_of_its_own() {
    let shape = layout(3);
    let storage = KvStorage::map(shape, RegionOptions::default()).unwrap();
    assert_eq!(storage.bytes(), shape.total_bytes().unwrap() as u64);
    let mut seen = HashSet::new();
    for layer in 0..3 {
        for (which, dim) in [(Which::Key, 8), (Which::Value, 6)] {
            let pages = storage.pages(layer, which, true).unwrap();
            for (page, head, token) in
                (0..5).flat_map(|p| (0..2).flat_map(move |h| (0..4).map(move |t| (p, h, t))))
            {
                let slot = pages.slot(page, head, token);
                for i in 0..dim * shape.dtype.size() {
                    assert!(seen.insert(slot.wrapping_add(i)), "{layer} {which:?} {page} {head} {token}");
                }
                // SAFETY: the slot lies inside the storage, which no other thread has.
                unsafe { slot.write_bytes(0xff, dim * shape.dtype.size()) };
            }
        }
    }
    assert_eq!(seen.len(), shape.total_bytes().unwrap());
}

#[test]
fn a_cache_of_tables_only_has_no_bytes() {
    let storage = KvStorage::map(layout(0), RegionOptions::default()).unwrap();
    assert_eq!(storage.bytes(), 0);
    assert!(matches!(storage.pages(0, Which::Key, false), Err(Error::Value(_))));
}

#[test]
fn adopted_memory_is_the_owners_and_lives_as_long_as_the_storage() {
    let shape = layout(1);
    let (owned, layers) = arrays(shape);
    let bases = layers[0].map(|plane| plane.base);
    let owner = Arc::new(owned);
    // SAFETY: the arrays belong to `owner`, and nobody else uses them.
    let storage = unsafe { KvStorage::adopt(shape, layers, Box::new(Arc::clone(&owner))) }.unwrap();
    assert_eq!(storage.bytes(), shape.total_bytes().unwrap() as u64);
    for (which, base) in [Which::Key, Which::Value].into_iter().zip(bases) {
        assert_eq!(storage.pages(0, which, true).unwrap().slot(0, 0, 0), base);
    }
    assert_eq!(Arc::strong_count(&owner), 2);
    drop(storage);
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn arrays_that_do_not_fit_are_refused_by_name() {
    let cases: [(&str, Break); 8] = [
        ("storage has 1 layers, the cache 2", |layers| layers.truncate(1)),
        ("layer 1, Key: dtype float16", |layers| layers[1][0].layout.dtype = DType::F16),
        ("layer 0, Value: 7 elements per token instead of 6", |layers| layers[0][1].layout.head_dim = 7),
        ("layer 0, Key: 4 pages instead of 5", |layers| layers[0][0].layout.num_pages = 4),
        ("not aligned", |layers| layers[0][0].base = layers[0][0].base.wrapping_add(1)),
        ("was given before", |layers| layers[1][0].base = layers[0][0].base),
        ("overlap", |layers| layers[0][0].layout.token_stride = 0),
        ("overflow", |layers| layers[0][0].layout.page_stride = usize::MAX / 2),
    ];
    for (expected, break_it) in cases {
        let error = adopt_with(break_it).unwrap_err();
        assert!(matches!(&error, Error::Layout(text) if text.contains(expected)), "{expected}: {error}");
    }
}

#[test]
fn strided_views_of_larger_arrays_are_accepted() {
    // Heads of a neighbour lie between ours, and tokens lie outside heads.
    let storage = adopt_with(|layers| {
        for planes in layers {
            for plane in planes {
                let dim = plane.layout.head_dim;
                plane.layout.head_stride = 2 * dim;
                plane.layout.token_stride = 4 * dim;
                plane.layout.page_stride = 16 * dim;
            }
        }
    });
    assert_eq!(storage.unwrap().pages(0, Which::Key, false).unwrap().layout().page_stride, 128);
}

#[test]
fn long_layers_start_at_a_huge_page() {
    let num_pages = AUTO_FROM / layout(1).page_bytes().unwrap() + 1;
    let storage = KvStorage::map(CacheLayout { num_pages, ..layout(2) }, RegionOptions::default()).unwrap();
    let first = storage.pages(0, Which::Key, false).unwrap().slot(0, 0, 0);
    assert_eq!(first.align_offset(HUGE_PAGE), 0);
}

#[test]
#[cfg(target_os = "linux")]
fn a_page_of_short_layers_takes_a_base_page_in_each() {
    let num_pages = (AUTO_FROM / 2) / layout(1).page_bytes().unwrap();
    let shape = CacheLayout { num_pages, ..layout(4) };
    let storage = KvStorage::map(shape, RegionOptions::default()).unwrap();
    for layer in 0..4 {
        let slot = storage.pages(layer, Which::Key, true).unwrap().slot(0, 0, 0);
        // SAFETY: the slot lies inside the storage, which no other thread has.
        unsafe { slot.write_bytes(0xff, 2) };
    }
    let first = storage.pages(0, Which::Key, false).unwrap().slot(0, 0, 0);
    assert_eq!(region::tests::resident_pages(first, shape.total_bytes().unwrap()), 4);
}

#[test]
fn rows_are_parted_by_tokens_and_by_heads() {
    let mut memory: Vec<f32> = vec![0.0; 5 * 6 * 2];
    let base = memory.as_mut_ptr().cast::<u8>();
    let rows = RowsViewMut::from_slice(&mut memory, [5, 6, 2]).unwrap();
    let (first, rest) = rows.split_at(2);
    assert_eq!((first.shape(), rest.shape()), ([2, 6, 2], [3, 6, 2]));
    let (left, right) = rest.split_heads_at(4);
    assert_eq!((left.shape(), right.shape()), ([3, 4, 2], [3, 2, 2]));
    let row = |token: usize, head: usize| base.wrapping_add((token * 6 + head) * 8);
    assert_eq!((left.row(1, 3), right.row(1, 1)), (row(3, 3), row(3, 5)));
    let (all, none) = right.split_heads_at(2);
    assert_eq!((all.row(2, 0), none.shape()), (row(4, 4), [3, 0, 2]));
}
