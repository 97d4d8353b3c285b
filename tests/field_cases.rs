//! Faults that other KV caches had, as kinds: one test for each, named after its row in
//! the project's list of such faults. Those of the kernels stand with the kernels' tests.
#![cfg(not(loom))]

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use common::{Random, World};
use paged_kv::cache::{CacheOptions, KvCache};
use paged_kv::dtype::DType;
use paged_kv::error::Error;
use paged_kv::ids::{PageHandle, PageId};
use paged_kv::layout::{CacheLayout, PageOrder};
use paged_kv::storage::RegionOptions;
use paged_kv::table::{NewTokens, Outcome, Pick, Sequence};

fn options(num_pages: usize, page_size: usize, num_layers: usize) -> CacheOptions {
    CacheOptions {
        layout: CacheLayout {
            num_layers,
            num_pages,
            page_size,
            num_kv_heads: 2,
            head_dim: 8,
            v_head_dim: 8,
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

fn tables_only(num_pages: usize, page_size: usize) -> KvCache {
    KvCache::new(&options(num_pages, page_size, 0)).expect("tables alone")
}

/// Computes `n` tokens whose contents don't matter.
fn compute(cache: &KvCache, sequence: &Sequence, n: u32) {
    let batch = cache.batch(&[sequence], NewTokens::Each(n), None, None).expect("room");
    batch.commit(None).expect("open");
}

/// Takes all that is free, page by page, and gives it back.
fn walk_free(world: &World) -> BTreeSet<PageId> {
    let pool = world.tables.pool();
    let mut pages = BTreeSet::new();
    let handles: Vec<PageHandle> = std::iter::from_fn(|| pool.alloc(1).ok()).flatten().collect();
    for handle in &handles {
        assert!(pages.insert(handle.page()), "{handle:?} was handed out twice");
    }
    pool.release(&handles).expect("each once");
    pages
}

#[test]
fn field_c01_a_page_given_back_twice_is_in_the_free_set_once() {
    let world = World::<4, 2>::new(12, 4);
    let sequence = world.sequence();
    world.decode(&sequence, 10);
    let child = sequence.fork().unwrap();
    sequence.truncate(2).unwrap();
    for _ in 0..3 {
        sequence.free();
        assert_eq!(walk_free(&world).len() as u64, world.free());
    }
    let handles = world.tables.pool().alloc(2).unwrap();
    let twice = [handles[0], handles[1], handles[0]];
    assert!(matches!(world.tables.pool().release(&twice), Err(Error::RefCount { .. })));
    assert_eq!((world.free(), walk_free(&world).len()), (7, 7), "the refused list gave nothing back");
    world.tables.pool().release(&handles).unwrap();
    drop((sequence, child));
    assert_eq!(walk_free(&world).len(), 12);
    world.rest();
}

#[test]
fn field_c02_each_table_drops_exactly_the_references_it_holds() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let world = World::<4, 2>::new(64, 4);
        let parent = world.sequence();
        let prompt = world.decode(&parent, 21);
        let (left, right) = (parent.fork().unwrap(), parent.fork().unwrap());
        world.decode(&left, 7);
        right.truncate(9).unwrap();
        let mut alive = [Some(parent), Some(left), Some(right)];
        for i in order {
            alive[i] = None;
            for sequence in alive.iter().flatten() {
                let content = world.read(sequence);
                let shared = content.len().min(21);
                assert_eq!(content[..shared], prompt[..shared]);
            }
            world.tables.validate().unwrap();
        }
        world.rest();
    }
}

#[test]
fn field_c05_usage_is_between_nothing_and_everything_in_every_snapshot() {
    let cache = tables_only(64, 4);
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (cache, running) = (&cache, &running);
            scope.spawn(move || {
                let mut random = Random::new(seed);
                while running.load(Ordering::Relaxed) {
                    let sequence = cache.sequence(&[]);
                    let _ = sequence.append(random.below(60) as u32);
                    let _ = sequence.commit(None);
                    let child = sequence.fork();
                    let _ = child.map(|child| child.truncate(random.below(3) as u32));
                }
            });
        }
        for _ in 0..2_000 {
            let s = cache.stats(false).unwrap();
            let states = [s.free_pages, s.live_pages, s.cached_pages, s.deferred_pages];
            assert!(states.iter().all(|&n| n <= 64) && states.iter().sum::<u64>() == 64, "{s:?}");
            assert!(s.used_bytes <= s.total_bytes && (0.0..=1.0).contains(&s.waste), "{s:?}");
        }
        running.store(false, Ordering::Relaxed);
    });
    assert_eq!(cache.stats(false).unwrap().free_pages, 64);
}

#[test]
fn field_c06_what_looks_like_a_leak_has_a_gauge_of_its_own() {
    let cache = tables_only(32, 4);
    let sequences: Vec<Sequence> = (0..4).map(|_| cache.sequence(&[])).collect();
    for sequence in &sequences {
        compute(&cache, sequence, 7);
    }
    let handles = cache.pool().alloc(3).unwrap();
    let lease = cache.batch(&[&sequences[0]], NewTokens::Each(0), None, None).unwrap();
    sequences[0].free();
    let gauges = || {
        let s = cache.stats(false).unwrap();
        [s.free_pages, s.live_pages, s.cached_pages, s.deferred_pages]
    };
    assert_eq!(gauges(), [21, 9, 0, 2], "three sequences and three handles live, a lease defers");
    lease.close();
    assert_eq!(gauges(), [23, 9, 0, 0]);
    drop(sequences);
    assert_eq!(gauges(), [29, 3, 0, 0]);
    cache.pool().release(&handles).unwrap();
    assert_eq!(gauges(), [32, 0, 0, 0]);
}

#[test]
fn field_c15_freeing_a_sibling_that_is_gone_does_nothing_and_the_group_goes_on() {
    let world = World::<4, 2>::new(64, 4);
    let parent = world.sequence();
    let prompt = world.decode(&parent, 6);
    let beams: Vec<_> = (0..3).map(|_| parent.fork().unwrap()).collect();
    let own: Vec<Vec<u64>> = beams.iter().map(|beam| world.decode(beam, 3)).collect();
    let group: Vec<_> = beams.iter().collect();
    let batch = world.tables.open(&group, NewTokens::Each(1), None).unwrap();
    beams[1].free();
    beams[1].free();
    assert!(batch.end(&Outcome::Commit(None)));
    drop(batch);
    beams[1].free();
    match world.tables.reorder(&group, &[0, 1, 2]) {
        Err(Error::SequenceFreed { indices }) => assert_eq!(indices, [1]),
        other => panic!("{other:?}"),
    }
    match world.tables.open(&group, NewTokens::Each(1), None).map(drop) {
        Err(Error::SequenceFreed { indices }) => assert_eq!(indices, [1]),
        other => panic!("{other:?}"),
    }
    for i in [0, 2] {
        assert_eq!(beams[i].len().unwrap(), 10);
        assert_eq!(world.read(&beams[i])[..9], [prompt.clone(), own[i].clone()].concat());
    }
    let picks = world.tables.reorder(&[&beams[0], &beams[2]], &[1, 1]).unwrap();
    assert!(matches!(picks[..], [Pick::Moved(1), Pick::Forked(_)]) && beams[0].is_freed());
    drop((picks, parent));
    drop(beams);
    world.rest();
}

#[test]
fn field_c16_a_full_last_page_counts_full_and_its_count_starts_at_one() {
    for page_size in [1, 3, 16] {
        let cache = tables_only(16, page_size);
        let sequence = cache.sequence(&[]);
        for pages in 1..=3 {
            compute(&cache, &sequence, page_size as u32);
            let batch = cache.batch(&[&sequence], NewTokens::Each(0), None, None).unwrap();
            assert_eq!(batch.kv_last_page_len().unwrap(), [page_size as i32]);
            assert_eq!(batch.kv_indptr().unwrap(), [0, pages]);
            assert_eq!(batch.kv_indices().unwrap().len(), pages as usize);
        }
        for page in sequence.block_table().unwrap() {
            assert_eq!(cache.pool().ref_count(PageId(page as u32)), 1);
        }
        let batch = cache.batch(&[&sequence], NewTokens::Each(1), None, None).unwrap();
        assert_eq!(batch.kv_last_page_len().unwrap(), [1]);
        batch.close();
        let page = cache.pool().handle(sequence.locate(0).unwrap().0);
        sequence.free();
        assert!(matches!(cache.pool().release(&[page]), Err(Error::RefCount { ref_count: 0, .. })));
        assert_eq!(cache.pool().num_free(), 16);
    }
}

#[test]
fn field_c36_preempting_what_a_lease_holds_says_deferred_not_free() {
    let world = World::<4, 2>::new(8, 4);
    let victims: Vec<_> = (0..2).map(|_| world.sequence()).collect();
    for victim in &victims {
        world.decode(victim, 12);
    }
    let leases: Vec<_> =
        victims.iter().map(|v| world.tables.open(&[v], NewTokens::Each(0), None).unwrap()).collect();
    let urgent = world.sequence();
    victims.iter().for_each(Sequence::free);
    for (ended, lease) in leases.into_iter().enumerate() {
        let (free, deferred) = (2 + 3 * ended as u64, 6 - 3 * ended as u64);
        assert_eq!((world.free(), world.tables.deferred_pages()), (free, deferred));
        match urgent.append(32) {
            Err(Error::OutOfPages { requested: 8, free: f, deferred: d, .. }) => {
                assert_eq!((f, d), (free, deferred));
            }
            other => panic!("{other:?}"),
        }
        drop(lease);
    }
    urgent.append(32).unwrap();
    drop((victims, urgent));
    world.rest();
}

#[test]
fn field_c37_a_request_that_never_fits_is_told_apart_from_one_that_must_wait() {
    let world = World::<4, 2>::new(4, 4);
    let (running, next) = (world.sequence(), world.sequence());
    world.decode(&running, 8);
    assert!(matches!(next.append(17), Err(Error::NeverFits { requested: 5, total: 4, .. })));
    assert!(matches!(next.append(16), Err(Error::OutOfPages { requested: 4, free: 2, .. })));
    let both = world.tables.open(&[&running, &next], NewTokens::Counts(&[8, 17]), None).map(drop);
    assert!(matches!(both, Err(Error::NeverFits { index: Some(1), .. })), "{both:?}");
    // Each fits, only their sum does not: a smaller batch would do, so this is a shortage.
    let sum = world.tables.open(&[&running, &next], NewTokens::Counts(&[8, 16]), None).map(drop);
    assert!(matches!(sum, Err(Error::OutOfPages { requested: 6, free: 2, index: Some(1), .. })), "{sum:?}");
    running.free();
    next.append(16).unwrap();
    drop((running, next));
    world.rest();
}

#[test]
fn field_c39_a_request_succeeds_exactly_if_enough_pages_are_free_however_scattered() {
    let world = World::<4, 2>::new(64, 1);
    let sequences: Vec<_> = (0..64).map(|_| world.sequence()).collect();
    for sequence in &sequences {
        world.decode(sequence, 1);
    }
    let mut random = Random::new(39);
    let mut free = 0;
    for sequence in &sequences {
        if random.once_in(2) {
            sequence.free();
            free += 1;
        }
    }
    let long = world.sequence();
    assert!(matches!(long.append(free + 1), Err(Error::OutOfPages { .. })));
    long.append(free).unwrap();
    let distinct: BTreeSet<i32> = long.block_table().unwrap().into_iter().collect();
    assert_eq!((distinct.len(), world.free()), (free as usize, 0));
    drop((sequences, long));
    world.rest();
}

#[test]
fn field_c41_a_step_in_flight_never_writes_into_the_pages_of_the_next_request() {
    let world = World::<4, 2>::new(8, 2);
    let finished = world.sequence();
    world.decode(&finished, 3);
    let step = world.tables.open(&[&finished], NewTokens::Each(4), None).unwrap();
    finished.free();
    drop(finished);
    let next = world.sequence();
    assert!(matches!(next.append(10), Err(Error::OutOfPages { deferred: 4, .. })));
    let content = world.decode(&next, 8);
    // The step's kernel runs late.
    (3..7).for_each(|position| world.stamps.write(step.page(0, position), position as usize % 2, 999));
    assert_eq!(world.read(&next), content);
    assert!(step.end(&Outcome::Commit(None)));
    assert_eq!(world.free(), 4);
    assert_eq!(world.read(&next), content);
    drop((step, next));
    world.rest();
}

#[test]
fn field_c48_a_release_too_many_is_an_error_that_names_the_page_and_its_owners() {
    let world = World::<4, 2>::new(8, 4);
    let sequence = world.sequence();
    world.decode(&sequence, 3);
    let handle = world.tables.pool().handle(sequence.locate(0).unwrap().0);
    world.tables.pool().retain(&[handle]).unwrap();
    let child = sequence.fork().unwrap();
    assert_eq!(world.tables.pool().ref_count_of(handle), Ok(3));
    let all = world.tables.pool().release(&[handle; 4]);
    let Err(Error::RefCount { page, .. }) = all else { panic!("{all:?}") };
    assert_eq!((page, world.tables.pool().ref_count_of(handle)), (handle.page().0, Ok(3)));
    let mut owners = world.tables.owners(handle).unwrap();
    owners.sort_unstable();
    let mut expected = [sequence.id(), child.id()];
    expected.sort_unstable();
    assert_eq!(owners, expected);
    world.tables.pool().release(&[handle]).unwrap();
    drop((sequence, child));
    assert!(matches!(world.tables.owners(handle), Err(Error::RefCount { ref_count: 0, .. })));
    world.rest();
}

#[test]
fn field_c51_rejected_drafts_around_a_page_edge_leak_nothing() {
    for page_size in 1..=5 {
        let world = World::<4, 2>::new(64, page_size);
        let (sequence, mut random) = (world.sequence(), Random::new(51));
        let mut expected = 0;
        for _ in 0..200 {
            let drafts = 1 + random.below(7) as u32;
            let keep = random.below(drafts as usize + 1) as u32;
            if expected + drafts > 40 {
                expected = random.below(expected as usize) as u32;
                sequence.truncate(expected).unwrap();
            } else {
                let batch = world.tables.open(&[&sequence], NewTokens::Each(drafts), None).unwrap();
                assert!(batch.end(&Outcome::Commit(Some(vec![keep]))));
                expected += keep;
            }
            assert_eq!(sequence.len().unwrap(), expected);
            assert_eq!(world.free(), u64::from(64 - expected.div_ceil(page_size)));
            world.tables.validate().unwrap();
        }
        drop(sequence);
        world.rest();
    }
}

#[test]
fn field_c52_truncate_leaves_exactly_n_tokens() {
    for page_size in [1, 4, 7] {
        for n in 0..=20 {
            let world = World::<4, 2>::new(64, page_size);
            let sequence = world.sequence();
            let content = world.decode(&sequence, 20);
            sequence.append(5).unwrap();
            sequence.truncate(n).unwrap();
            assert_eq!((sequence.len(), sequence.num_computed_tokens()), (Ok(n), Ok(n)));
            assert_eq!(world.read(&sequence), content[..n as usize]);
            let more = world.decode(&sequence, 3);
            assert_eq!(world.read(&sequence), [&content[..n as usize], &more].concat());
            drop(sequence);
            world.rest();
        }
    }
}

#[test]
fn field_c53_only_accepted_tokens_count_as_computed_whoever_looks() {
    let world = World::<4, 2>::new(64, 4);
    let sequence = world.sequence();
    let content = world.decode(&sequence, 3);
    let drafts = world.tables.open(&[&sequence], NewTokens::Each(6), None).unwrap();
    (3..9).for_each(|position| {
        let stamp = 1000 + u64::from(position);
        world.stamps.write(drafts.page(0, position), position as usize % 4, stamp);
    });
    let early = sequence.fork().unwrap();
    let lease = world.tables.open(&[&sequence], NewTokens::Each(0), None).unwrap();
    assert_eq!(lease.items().next().unwrap().seq_len(), 3);
    drafts.end(&Outcome::Commit(Some(vec![2])));
    let late = sequence.fork().unwrap();
    assert_eq!((early.len(), late.len(), sequence.num_computed_tokens()), (Ok(3), Ok(5), Ok(5)));
    assert_eq!(world.read(&early), content);
    assert_eq!(world.read(&late), [content, vec![1003, 1004]].concat());
    drop((lease, drafts, early, late, sequence));
    world.rest();
}

#[test]
fn field_c73_a_budget_in_bytes_is_kept_and_one_beyond_the_machine_is_refused() {
    let layout = options(1, 16, 4).layout;
    let page = layout.total_bytes().unwrap() as u64;
    for budget in [page, 10 * page - 1, 1 << 20, 3 << 20] {
        let num_pages = CacheOptions::pages_within(&layout, budget).unwrap();
        let bytes = CacheLayout { num_pages, ..layout }.total_bytes().unwrap() as u64;
        assert!(bytes <= budget && budget - bytes < page, "{budget} bytes asked for, {bytes} taken");
    }
    assert!(matches!(CacheOptions::pages_within(&layout, page - 1), Err(Error::Layout(_))));
    let too_much = (1_usize << 46) / page as usize;
    match KvCache::new(&options(too_much, 16, 4)).map(drop) {
        Err(Error::Memory { bytes, .. }) => assert!(bytes >= 1 << 45),
        other => panic!("{other:?}"),
    }
}
