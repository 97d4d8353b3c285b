//! The facade: pages with bytes behind them, batches with arrays, several caches at once.
#![cfg(not(loom))]

use paged_kv::attention::{AttentionOptions, reference};
use paged_kv::cache::{BatchView, CacheOptions, KvCache, LeaseHolder, Step};
use paged_kv::dtype::DType;
use paged_kv::error::Error;
use paged_kv::layout::{CacheLayout, PageOrder, Which};
use paged_kv::storage::{RegionOptions, RowsView, RowsViewMut};
use paged_kv::table::{NewTokens, PageState, Pick, Sequence};

fn options(num_layers: usize, num_pages: usize) -> CacheOptions {
    CacheOptions {
        layout: CacheLayout {
            num_layers,
            num_pages,
            page_size: 4,
            num_kv_heads: 2,
            head_dim: 8,
            v_head_dim: 6,
            dtype: DType::F32,
            head_scales: false,
            value_in_key: false,
            order: PageOrder::Hnd,
        },
        null_page: false,
        window_left: -1,
        num_threads: Some(1),
        region: RegionOptions::default(),
    }
}

/// Numbers that differ everywhere.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Writes `n` tokens and commits; returns their keys and values.
fn write(cache: &KvCache, sequence: &Sequence, n: u32, seed: u64) -> (Vec<f32>, Vec<f32>) {
    let batch = cache.batch(&[sequence], NewTokens::Each(n), None, None).unwrap();
    let tokens = n as usize;
    let (key, value) = (noise(tokens * 16, seed), noise(tokens * 12, seed + 1));
    let rows = |data, dim| RowsView::from_slice(data, [tokens, 2, dim]).unwrap();
    for layer in 0..cache.layout().num_layers {
        cache.write(layer, rows(&key, 8), rows(&value, 6), Step::Batch(&batch)).unwrap();
    }
    batch.commit(None).unwrap();
    (key, value)
}

#[test]
fn attention_over_a_fork_equals_attention_over_the_same_tokens_in_one_piece() {
    let cache = KvCache::new(&options(2, 32)).unwrap();
    let parent = cache.sequence(&[]);
    let (mut key, mut value) = write(&cache, &parent, 6, 1);
    let child = parent.fork().unwrap();
    write(&cache, &parent, 3, 2);
    let more = write(&cache, &child, 5, 3);
    key.extend(more.0);
    value.extend(more.1);
    let query = noise(4 * 8, 9);
    let batch = cache.batch(&[&child], NewTokens::Each(0), None, Some(NewTokens::Each(1))).unwrap();
    let mut out = vec![f32::NAN; 4 * 6];
    cache
        .attend(
            1,
            RowsView::from_slice(&query, [1, 4, 8]).unwrap(),
            Step::Batch(&batch),
            &AttentionOptions::default(),
            &mut RowsViewMut::from_slice(&mut out, [1, 4, 6]).unwrap(),
            None,
        )
        .unwrap();
    let shape = reference::Shape { num_heads: 4, num_kv_heads: 2, head_dim: 8, v_head_dim: 6 };
    let (expected, _) = reference::attention(shape, &query, &key, &value, &AttentionOptions::default());
    for (got, want) in out.iter().zip(expected) {
        assert!((f64::from(*got) - want).abs() < 1e-5, "{got} {want}");
    }
    batch.close();
    drop(batch);
    drop((parent, child));
    cache.validate().unwrap();
    assert_eq!(cache.pool().num_free(), 32);
}

#[test]
fn arrays_agree_with_each_other_and_end_with_the_batch() {
    let cache = KvCache::new(&CacheOptions { null_page: true, ..options(0, 32) }).unwrap();
    let sequences: Vec<Sequence> = (0..3).map(|_| cache.sequence(&[])).collect();
    let refs: Vec<&Sequence> = sequences.iter().collect();
    let batch = cache.batch(&refs, NewTokens::Counts(&[5, 0, 8]), None, None).unwrap();
    let (table, max_pages) = batch.block_table().unwrap();
    assert_eq!((table.len(), max_pages), (6, 2));
    assert_eq!(&table[2..4], [0, 0], "a null page pads");
    assert_eq!(batch.seq_lens().unwrap(), [5, 0, 8]);
    assert_eq!(batch.cu_seqlens_q(), [0, 5, 5, 13]);
    assert_eq!(batch.positions().unwrap(), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(batch.kv_indptr().unwrap(), [0, 2, 2, 4]);
    assert_eq!(batch.kv_indices().unwrap(), [&table[..2], &table[4..]].concat());
    assert_eq!(batch.kv_last_page_len().unwrap(), [1, 0, 4]);
    let slots: Vec<i64> = [0, 4]
        .into_iter()
        .zip([5, 8])
        .flat_map(|(row, n)| (0..n).map(move |p| (row, p)))
        .map(|(row, p)| i64::from(table[row + p / 4]) * 4 + (p % 4) as i64)
        .collect();
    assert_eq!(batch.slot_mapping().unwrap(), slots);
    let view = batch.view().unwrap();
    batch.close();
    assert_eq!(batch.view().unwrap(), view, "what was built stays readable");
    assert!(matches!(batch.commit(None), Err(Error::Value(_))));
    drop(batch);
    let ended = cache.batch(&refs, NewTokens::Each(1), None, None).unwrap();
    ended.commit(None).unwrap();
    assert!(matches!(ended.block_table(), Err(Error::Value(_))), "never built, and the lease is gone");
}

#[test]
fn a_view_drives_another_cache_of_the_same_shape_and_no_other() {
    let scheduler = KvCache::new(&options(0, 16)).unwrap();
    let rank = KvCache::new(&options(1, 16)).unwrap();
    let parent = scheduler.sequence(&[]);
    let mut expected = Vec::new();
    let mut step = |sequence: &Sequence, n: u32, seed: u64| -> BatchView {
        let batch = scheduler.batch(&[sequence], NewTokens::Each(n), None, None).unwrap();
        let view = batch.view().unwrap();
        rank.copy_pages(&view.copies).unwrap();
        let (key, value) = (noise(n as usize * 16, seed), noise(n as usize * 12, seed));
        let rows = |data, dim| RowsView::from_slice(data, [n as usize, 2, dim]).unwrap();
        rank.write(0, rows(&key, 8), rows(&value, 6), Step::View(&view)).unwrap();
        expected.extend(key);
        batch.commit(None).unwrap();
        view
    };
    step(&parent, 6, 1);
    let child = parent.fork().unwrap();
    let view = step(&child, 1, 2);
    assert_eq!(view.copies.len(), 1);
    let keys = rank.pages(0, Which::Key, false).unwrap();
    for position in 0..7 {
        let (page, offset) = child.locate(position).unwrap();
        let address = rank.layout().pages(Which::Key).unwrap().offset(page.index(), 1, offset as usize);
        let base = keys.slot(0, 0, 0).addr();
        assert_eq!(keys.slot(page.index(), 1, offset as usize).addr(), base + address * 4);
    }
    let other = KvCache::new(&options(1, 17)).unwrap();
    let empty: [f32; 0] = [];
    let rows = |dim| RowsView::from_slice(&empty, [0, 2, dim]).unwrap();
    assert!(matches!(other.write(0, rows(8), rows(6), Step::View(&view)), Err(Error::Layout(_))));
}

#[test]
fn batches_and_sequences_of_another_cache_are_refused_and_touch_no_page() {
    let (ours, theirs) = (KvCache::new(&options(1, 16)).unwrap(), KvCache::new(&options(1, 16)).unwrap());
    let (sequence, foreign) = (ours.sequence(&[]), theirs.sequence(&[]));
    let (key, _) = write(&ours, &sequence, 4, 1);
    let batch = theirs.batch(&[&foreign], NewTokens::Each(4), None, None).unwrap();
    let rows = |data, dim| RowsView::from_slice(data, [4, 2, dim]).unwrap();
    let (other_key, other_value) = (noise(4 * 16, 5), noise(4 * 12, 6));
    let written = ours.write(0, rows(&other_key, 8), rows(&other_value, 6), Step::Batch(&batch));
    assert!(matches!(written, Err(Error::Value(_))), "{written:?}");
    let mut out = [0.0_f32; 4 * 4 * 6];
    let attended = ours.attend(
        0,
        RowsView::from_slice(&[0.0_f32; 4 * 4 * 8], [4, 4, 8]).unwrap(),
        Step::Batch(&batch),
        &AttentionOptions::default(),
        &mut RowsViewMut::from_slice(&mut out, [4, 4, 6]).unwrap(),
        None,
    );
    assert!(matches!(attended, Err(Error::Value(_))), "{attended:?}");
    assert!(matches!(ours.prefetch(&foreign, 1 << 20), Err(Error::Value(_))));
    assert!(matches!(ours.physical_offset(&foreign, 0), Err(Error::Value(_))));
    assert!(matches!(ours.physical_address(&foreign, 0, 0, Which::Key, 0), Err(Error::Value(_))));
    let mixed = ours.batch(&[&sequence, &foreign], NewTokens::Each(1), None, None).map(drop);
    assert!(matches!(mixed, Err(Error::Value(_))), "{mixed:?}");
    assert!(matches!(ours.reorder(&[&foreign], &[0]).map(drop), Err(Error::Value(_))));
    // What was refused wrote nothing: attention still finds the first key where it was.
    let shape = reference::Shape { num_heads: 2, num_kv_heads: 2, head_dim: 8, v_head_dim: 6 };
    let lease = ours.batch(&[&sequence], NewTokens::Each(0), None, Some(NewTokens::Each(1))).unwrap();
    let (mut out, value) = ([0.0_f32; 2 * 6], noise(4 * 12, 2));
    let query = noise(2 * 8, 7);
    ours.attend(
        0,
        RowsView::from_slice(&query, [1, 2, 8]).unwrap(),
        Step::Batch(&lease),
        &AttentionOptions::default(),
        &mut RowsViewMut::from_slice(&mut out, [1, 2, 6]).unwrap(),
        None,
    )
    .unwrap();
    let (expected, _) = reference::attention(shape, &query, &key, &value, &AttentionOptions::default());
    assert!(out.iter().zip(expected).all(|(got, want)| (f64::from(*got) - want).abs() < 1e-5));
}

#[test]
fn reorder_moves_the_first_pick_forks_the_rest_and_frees_the_unpicked() {
    let cache = KvCache::new(&options(1, 32)).unwrap();
    let sequences: Vec<Sequence> = (0..3).map(|_| cache.sequence(&[])).collect();
    for (sequence, seed) in sequences.iter().zip(0..) {
        write(&cache, sequence, 5, seed);
    }
    let refs: Vec<&Sequence> = sequences.iter().collect();
    assert!(matches!(cache.reorder(&refs, &[0, 3]), Err(Error::Value(_))));
    let batch = cache.batch(&refs[1..2], NewTokens::Each(1), None, None).unwrap();
    assert!(matches!(cache.reorder(&refs, &[0]), Err(Error::SequenceBusy { index: Some(1), .. })));
    batch.close();
    let free = cache.pool().num_free();
    let picks = cache.reorder(&refs, &[2, 2, 0]).unwrap();
    assert_eq!(cache.pool().num_free(), free + 2, "sequence 1 was freed");
    assert!(matches!(picks[..], [Pick::Moved(2), Pick::Forked(_), Pick::Moved(0)]));
    assert!(sequences[1].is_freed());
    let Pick::Forked(fork) = &picks[1] else { unreachable!() };
    assert_eq!(fork.block_table().unwrap(), sequences[2].block_table().unwrap());
    drop(picks);
    drop(batch);
    drop(refs);
    drop(sequences);
    cache.validate().unwrap();
    assert_eq!(cache.pool().num_free(), 32);
}

#[test]
fn i1_the_states_sum_to_the_total_and_say_what_is_shared() {
    let cache = KvCache::new(&options(1, 32)).unwrap();
    let parent = cache.sequence(&[]);
    write(&cache, &parent, 6, 1);
    let child = parent.fork().unwrap();
    write(&cache, &child, 1, 2);
    let handles = cache.pool().alloc(3).unwrap();
    let lease = cache.batch(&[&parent], NewTokens::Each(0), None, None).unwrap();
    parent.truncate(3).unwrap();
    let stats = cache.stats(true).unwrap();
    assert_eq!(stats.total_pages, 32);
    assert_eq!(stats.free_pages + stats.live_pages + stats.cached_pages + stats.deferred_pages, 32);
    // The parent keeps its first page, shared with the child; only the lease keeps its second; the
    // child copied that one.
    assert_eq!((stats.live_pages, stats.shared_pages, stats.deferred_pages), (5, 1, 1));
    assert_eq!((stats.sequences, stats.tokens, stats.stored_tokens, stats.copied_pages), (2, 10, 7, 1));
    assert_eq!(stats.detail.len(), 2);
    let page = cache.pool().handle(child.locate(0).unwrap().0);
    let mut owners = cache.owners(page).unwrap();
    owners.sort_unstable();
    let mut expected = [parent.id(), child.id()];
    expected.sort_unstable();
    assert_eq!(owners, expected);
    cache.pool().release(&handles).unwrap();
    drop(lease);
    drop((parent, child));
    cache.validate().unwrap();
    assert_eq!(cache.stats(false).unwrap().free_pages, 32);
}

#[test]
fn i1_every_page_has_one_holder_and_the_sums_are_those_of_the_statistics() {
    let cache = KvCache::new(&CacheOptions { null_page: true, ..options(1, 32) }).unwrap();
    let parent = cache.sequence(&[]);
    write(&cache, &parent, 6, 1);
    let child = parent.fork().unwrap();
    write(&cache, &child, 1, 2);
    let handles = cache.pool().alloc(3).unwrap();
    let reader = cache.batch(&[&parent], NewTokens::Each(0), None, None).unwrap();
    parent.truncate(3).unwrap();
    let grandchild = child.fork().unwrap();
    // Its tail is shared, so the open batch writes to a copy.
    let writer = cache.batch(&[&grandchild], NewTokens::Each(1), None, None).unwrap();
    let why = cache.explain(&[&reader, &writer], 8).unwrap();
    assert_eq!(why.stats, cache.stats(false).unwrap());
    assert_eq!((why.sequence_pages, why.batch_pages, why.handle_pages), (2, 1, 3));
    assert_eq!((why.stats.live_pages, why.stats.deferred_pages, why.stats.free_pages), (6, 1, 25));
    let of = |sequence: &Sequence| {
        let holder = why.sequences.iter().find(|holder| holder.stats.id == sequence.id()).unwrap();
        (holder.stats.num_pages, holder.exclusive_pages)
    };
    assert_eq!((of(&parent), of(&child), of(&grandchild)), ((1, 0), (2, 0), (2, 0)));
    let held = |num_pages, deferred_pages| Some(LeaseHolder { num_sequences: 1, num_pages, deferred_pages });
    assert_eq!(why.leases, [held(2, 1), held(2, 0)]);

    let map = cache.page_map();
    let count = |state: PageState| map.states.iter().map(|&s| usize::from(s == state as u8)).sum::<usize>();
    assert_eq!((map.states.len(), map.states[0]), (33, PageState::Null as u8));
    assert_eq!([PageState::Free, PageState::Private, PageState::Shared].map(count), [25, 4, 2]);
    assert_eq!([PageState::Cached, PageState::Deferred, PageState::Null].map(count), [0, 1, 1]);
    assert_eq!(map.copied.iter().filter(|&&copied| copied).count(), 2, "the child's tail and its child's");
    let first = child.locate(0).unwrap().0.index();
    // By three sequences, a replaced table and a draft; the parent has the lowest slot.
    assert_eq!((map.ref_counts[first], map.owners[first]), (5, parent.id() as i64));
    assert!(map.copied[child.locate(4).unwrap().0.index()]);

    let cells = why.cells.unwrap();
    assert_eq!((cells.pages_per_cell, cells.counts.len()), (4, 8));
    let sum = |state: PageState| cells.counts.iter().map(|counts| counts[state as usize]).sum::<u32>();
    assert_eq!([PageState::Free, PageState::Shared, PageState::Deferred].map(sum), [25, 2, 1]);
    assert_eq!((cells.copied.iter().sum::<u32>(), why.freed_pages), (2, 0));

    drop((reader, writer));
    cache.pool().release(&handles).unwrap();
    drop((parent, child, grandchild));
    let why = cache.explain(&[], 1).unwrap();
    assert_eq!((why.stats.free_pages, why.freed_pages, why.sequences.len()), (32, 7, 0));
    assert_eq!(why.cells.unwrap().counts, [[32, 0, 0, 0, 0]]);
    let map = cache.page_map();
    assert!(!map.copied.contains(&true) && map.owners.iter().all(|&owner| owner == -1));
}

#[test]
fn a_cell_belongs_to_the_sequence_that_holds_most_of_it() {
    let cache = KvCache::new(&options(0, 16)).unwrap();
    let sequences: Vec<Sequence> = (0..4).map(|_| cache.sequence(&[])).collect();
    for (sequence, pages) in sequences.iter().zip([2, 5, 1, 8]) {
        sequence.append(pages * 4).unwrap();
    }
    let owners = |max_cells| cache.explain(&[], max_cells).unwrap().cells.unwrap().owners;
    assert_eq!(owners(2), [sequences[1].id() as i64, sequences[3].id() as i64]);
    assert_eq!(owners(1000).len(), 16, "a cell has a page at least");
    assert_eq!(cache.explain(&[], 0).unwrap().cells, None);
    let ended = cache.batch(&[&sequences[0]], NewTokens::Each(0), None, None).unwrap();
    ended.close();
    assert_eq!(cache.explain(&[&ended], 0).unwrap().leases, [None]);
}

#[test]
fn physical_addresses_and_offsets_are_checked_and_agree_with_the_table() {
    let cache = KvCache::new(&options(2, 8)).unwrap();
    let sequence = cache.sequence(&[]);
    write(&cache, &sequence, 6, 1);
    let base = cache.pages(1, Which::Value, false).unwrap().slot(0, 0, 0).addr();
    let (page, offset) = sequence.locate(5).unwrap();
    let strides = cache.layout().pages(Which::Value).unwrap();
    let expected = base + strides.offset(page.index(), 1, offset as usize) * 4;
    assert_eq!(cache.physical_address(&sequence, 1, 5, Which::Value, 1).unwrap(), expected);
    assert!(matches!(cache.physical_address(&sequence, 2, 5, Which::Key, 0), Err(Error::Value(_))));
    assert!(matches!(cache.physical_address(&sequence, 0, 6, Which::Key, 0), Err(Error::Value(_))));
    assert!(matches!(cache.physical_address(&sequence, 0, u64::MAX, Which::Key, 0), Err(Error::Value(_))));
    assert!(matches!(cache.physical_address(&sequence, 0, 0, Which::Key, 2), Err(Error::Value(_))));
    let bytes = cache.layout().page_bytes().unwrap() as u64;
    let table = sequence.block_table().unwrap();
    assert_eq!(cache.physical_offset(&sequence, bytes + 7).unwrap(), table[1] as u64 * bytes + 7);
    assert!(matches!(cache.physical_offset(&sequence, 2 * bytes), Err(Error::Value(_))));
    assert_eq!(cache.prefetch(&sequence, 100).unwrap(), 64);
    assert_eq!(cache.prefetch(&sequence, usize::MAX).unwrap(), 2 * 2 * bytes as usize / 64 * 64);
}

#[test]
fn sizes_that_make_no_sense_are_refused() {
    let refuse = |change: fn(&mut CacheOptions)| {
        let mut bad = options(1, 8);
        change(&mut bad);
        KvCache::new(&bad).map(drop).unwrap_err()
    };
    assert!(matches!(refuse(|o| o.layout.page_size = 0), Error::Layout(_)));
    assert!(matches!(refuse(|o| o.layout.num_pages = 0), Error::Layout(_)));
    assert!(matches!(refuse(|o| o.layout.head_dim = 0), Error::Layout(_)));
    assert!(matches!(refuse(|o| o.layout.num_pages = usize::MAX), Error::Layout(_)));
    assert!(matches!(refuse(|o| o.window_left = -2), Error::Value(_)));
    assert!(matches!(refuse(|o| o.num_threads = Some(0)), Error::Value(_)));
    assert!(matches!(refuse(|o| o.layout.num_pages = 1 << 30), Error::Memory { .. }));
}

#[test]
fn new_tokens_beyond_32_bits_in_all_are_refused_and_change_nothing() {
    let mut options = options(0, 40_000);
    options.layout.page_size = 1 << 16;
    let cache = KvCache::new(&options).unwrap();
    let sequences = [cache.sequence(&[]), cache.sequence(&[])];
    let before = cache.stats(false);
    let both = [&sequences[0], &sequences[1]];
    let refused = cache.batch(&both, NewTokens::Each(1 << 30), None, None).unwrap_err();
    assert!(refused.to_string().contains("at most 2^31 - 1 tokens in all"), "{refused}");
    assert_eq!(cache.stats(false), before);
    // One less fits, and so does the same where rows are counted otherwise.
    cache.batch(&both, NewTokens::Counts(&[1 << 30, (1 << 30) - 1]), None, None).unwrap().close();
    cache.batch(&both, NewTokens::Each(1 << 30), None, Some(NewTokens::Each(1))).unwrap().close();
    cache.validate().unwrap();
}
