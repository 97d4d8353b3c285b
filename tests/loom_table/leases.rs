//! Readers against writers: what a lease shows.

use loom::sync::Arc;

use paged_kv::error::Error;

use crate::world::{World, model, spawn};

#[test]
fn i7_a_lease_outlives_its_version_and_the_reuse_of_the_slot() {
    model(2, || {
        let world = World::new(4, 2);
        let sequence = world.computed(&[1, 2]);
        let reader = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || world.view(&sequence).expect("never freed"))
        };
        // Each makes a new version; the second lives in the slot of the first if that is over.
        sequence.truncate(1).expect("no other writer");
        sequence.truncate(0).expect("no other writer");
        let seen = reader.join().expect("no panic");
        assert!([&[1, 2][..], &[1], &[]].contains(&&seen[..]), "saw {seen:?}");
        world.at_rest(4);
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i5_a_lease_never_shows_the_next_owner_of_version_leaf_and_page() {
    model(3, || {
        let world = World::new(1, 1);
        let sequence = world.computed(&[1]);
        let reader = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || world.view(&sequence))
        };
        sequence.free();
        let next = world.sequence();
        // The only page: ours once the reader is through with it.
        let decoded = world.decode(&next, &[2]).is_ok();
        let seen = reader.join().expect("no panic");
        assert!(seen.is_none() || seen == Some(vec![1]), "saw {seen:?}");
        assert!(decoded || world.decode(&next, &[2]).is_ok(), "the page is back");
        assert_eq!(world.view(&next), Some(vec![2]));
        drop((sequence, next));
        world.ends();
    });
}

#[test]
fn i7_of_a_commit_in_place_a_lease_shows_all_or_nothing() {
    model(4, || {
        let world = World::new(4, 1);
        let sequence = world.computed(&[1]);
        let reader = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || world.view(&sequence).expect("never freed"))
        };
        // Fills the first leaf and begins another.
        world.decode(&sequence, &[2, 3]).expect("no other writer");
        let seen = reader.join().expect("no panic");
        assert!([&[1][..], &[1, 2, 3]].contains(&&seen[..]), "saw {seen:?}");
        world.at_rest(1);
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i7_of_a_commit_with_copy_on_write_a_lease_shows_all_or_nothing() {
    model(4, || {
        let world = World::new(3, 2);
        let sequence = world.computed(&[1]);
        let sharer = sequence.fork().expect("held");
        let reader = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || world.view(&sequence).expect("never freed"))
        };
        world.decode(&sequence, &[2, 3]).expect("no other writer");
        let seen = reader.join().expect("no panic");
        assert!([&[1][..], &[1, 2, 3]].contains(&&seen[..]), "saw {seen:?}");
        world.at_rest(0);
        assert_eq!(world.view(&sharer), Some(vec![1]));
        drop((sequence, sharer));
        world.ends();
    });
}

#[test]
fn i7_a_close_shows_nobody_anything() {
    model(6, || {
        let world = World::new(3, 2);
        let sequence = world.computed(&[1]);
        let sharer = sequence.fork().expect("held");
        let reader = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || world.view(&sequence))
        };
        let batch = world.open(&[&sequence], 2).expect("no other writer");
        world.write(&batch, 0, &[2, 3]);
        drop(batch);
        assert_eq!(reader.join().expect("no panic"), Some(vec![1]));
        world.at_rest(2);
        drop((sequence, sharer));
        world.ends();
    });
}

#[test]
fn i6_i7_truncate_then_append_writes_in_place_only_after_the_last_lease() {
    model(5, || {
        let world = World::new(2, 2);
        let sequence = world.computed(&[1, 2]);
        let lease = world.open(&[&sequence], 0).expect("held");
        let reader = {
            let world = world.clone();
            spawn(move || world.read(&lease, 0))
        };
        sequence.truncate(1).expect("no other writer");
        // The slot of the second token is written again: a copy of the page while the lease is
        // there, the page itself after the lease is gone, which loom orders after its reads.
        world.decode(&sequence, &[3]).expect("a page for the copy");
        assert_eq!(reader.join().expect("no panic"), [1, 2]);
        assert_eq!(world.view(&sequence), Some(vec![1, 3]));
        world.at_rest(1);
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i9_a_page_is_taken_again_only_after_the_last_lease() {
    model(5, || {
        let world = World::new(1, 1);
        let sequence = world.computed(&[1]);
        let lease = world.open(&[&sequence], 0).expect("held");
        let reader = {
            let world = world.clone();
            spawn(move || world.read(&lease, 0))
        };
        sequence.truncate(0).expect("no other writer");
        let early = world.decode(&sequence, &[2]).is_ok();
        assert_eq!(reader.join().expect("no panic"), [1]);
        assert!(early || world.decode(&sequence, &[2]).is_ok(), "the lease is gone, the page is back");
        assert_eq!(world.view(&sequence), Some(vec![2]));
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i9_a_lease_defers_no_page_that_only_was_reserved() {
    model(5, || {
        let world = World::new(2, 1);
        let sequence = world.computed(&[1]);
        sequence.append(1).expect("enough pages");
        let lease = world.open(&[&sequence], 0).expect("held");
        let next = world.sequence();
        let reader = {
            let world = world.clone();
            spawn(move || world.read(&lease, 0))
        };
        drop(sequence);
        world.decode(&next, &[2]).expect("the reserved page is back, whether or not the lease is");
        assert_eq!(reader.join().expect("no panic"), [1]);
        world.at_rest(1);
        drop(next);
        world.ends();
    });
}

#[test]
fn i9_pages_of_a_shared_leaf_are_taken_again_only_after_the_last_lease() {
    model(4, || {
        let world = World::new(2, 1);
        // A full leaf: the fork shares it as a whole, and each page is counted once.
        let sequence = world.computed(&[1, 2]);
        let fork = sequence.fork().expect("held");
        let next = world.sequence();
        let reader = {
            let world = world.clone();
            spawn(move || {
                assert_eq!(world.view(&fork), Some(vec![1, 2]));
                drop(fork);
            })
        };
        drop(sequence);
        let early = world.decode(&next, &[3, 4]).is_ok();
        reader.join().expect("no panic");
        assert!(early || world.decode(&next, &[3, 4]).is_ok(), "both are gone, the pages are back");
        assert_eq!(world.view(&next), Some(vec![3, 4]));
        world.at_rest(0);
        drop(next);
        world.ends();
    });
}

/// The opener of a batch looks at the tail leaf before it holds anything, the reader of a table at
/// leaves beyond the computed ones. Neither is ordered after the making of a new segment of leaves.
#[test]
fn the_number_of_a_tail_that_is_replaced_names_a_leaf_that_exists() {
    model(4, || {
        let world = World::new(4, 1);
        let sequence = world.computed(&[1]);
        sequence.append(1).expect("enough pages");
        // With these, the first segment of leaves is full.
        let other = world.computed(&[2]);
        let forks = [other.fork().expect("held"), other.fork().expect("held")];
        let reader = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || world.view(&sequence))
        };
        sequence.append(1).expect("enough pages");
        assert_eq!(reader.join().expect("no panic"), Some(vec![1]));
        drop((sequence, other, forks));
        world.ends();
    });
}

#[test]
fn the_number_of_a_leaf_that_is_replaced_names_a_leaf_that_exists() {
    model(3, || {
        let world = World::new(4, 1);
        let sequence = world.computed(&[1]);
        sequence.append(2).expect("enough pages");
        let other = world.computed(&[2]);
        let fork = other.fork().expect("held");
        let reader = {
            let sequence = Arc::clone(&sequence);
            spawn(move || sequence.block_table().expect("never freed"))
        };
        sequence.truncate(1).expect("no other writer");
        // Takes the leaf that was just given up, so that the next comes from a new segment.
        let second = other.fork().expect("held");
        sequence.append(2).expect("enough pages");
        let (seen, table) = (reader.join().expect("no panic"), sequence.block_table().expect("alive"));
        assert_eq!(seen[0], table[0], "the computed page stays");
        assert!(seen.iter().all(|page| (0..4).contains(page)), "saw {seen:?}");
        drop((sequence, other, fork, second));
        world.ends();
    });
}

#[test]
fn a_reserved_token_is_located_in_a_page_or_not_at_all() {
    model(5, || {
        let world = World::new(3, 1);
        let sequence = world.computed(&[1]);
        sequence.append(2).expect("enough pages");
        let reader = {
            let sequence = Arc::clone(&sequence);
            spawn(move || sequence.locate(2))
        };
        sequence.truncate(1).expect("no other writer");
        match reader.join().expect("no panic") {
            Ok((page, offset)) => assert_eq!((page.index(), offset), (2, 0)),
            Err(error) => assert!(matches!(error, Error::Value(_)), "{error}"),
        }
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i1_a_walker_keeps_nothing_and_breaks_nothing() {
    model(2, || {
        let world = World::new(2, 1);
        let sequence = world.computed(&[1, 2]);
        let walker = {
            let world = world.clone();
            spawn(move || world.tables.stats())
        };
        sequence.truncate(1).expect("no other writer");
        let stats = walker.join().expect("no panic");
        assert!(stats.sequences == 1 && (1..=2).contains(&stats.tokens), "{stats:?}");
        world.at_rest(1);
        drop(sequence);
        world.ends();
    });
}
