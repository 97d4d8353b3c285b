//! Forks, copy-on-write and batches of several writers.

use loom::sync::Arc;

use paged_kv::error::Error;
use paged_kv::table::{Outcome, Pick};

use crate::world::{Sequence, World, model, spawn, went_through};

#[test]
fn i6_a_fork_during_a_commit_has_exactly_the_computed_tokens() {
    model(4, || {
        let world = World::new(4, 2);
        let parent = world.computed(&[1]);
        let forker = {
            let parent = Arc::clone(&parent);
            spawn(move || parent.fork().expect("never freed, never busy"))
        };
        world.decode(&parent, &[2, 3]).expect("no other writer");
        let child = forker.join().expect("no panic");
        let seen = world.view(&child).expect("alive");
        assert!([&[1][..], &[1, 2, 3]].contains(&&seen[..]), "saw {seen:?}");
        assert_eq!(child.len().expect("alive") as usize, seen.len(), "nothing is reserved");
        // A parent that saw the fork in time has copied the page.
        let first_page = |sequence: &Sequence| sequence.locate(0).expect("computed").0;
        world.at_rest(if first_page(&parent) == first_page(&child) { 2 } else { 1 });
        // Both write on; neither sees the other's token.
        world.decode(&child, &[4]).expect("enough pages");
        world.decode(&parent, &[5]).expect("enough pages");
        assert_eq!(world.view(&child), Some([&seen[..], &[4]].concat()));
        assert_eq!(world.view(&parent), Some(vec![1, 2, 3, 5]));
        drop((parent, child));
        world.ends();
    });
}

#[test]
fn i6_a_fork_during_a_close_has_exactly_the_computed_tokens() {
    model(5, || {
        let world = World::new(4, 2);
        let parent = world.computed(&[1]);
        let forker = {
            let parent = Arc::clone(&parent);
            spawn(move || parent.fork().expect("never freed, never busy"))
        };
        let batch = world.open(&[&parent], 3).expect("enough pages");
        world.write(&batch, 0, &[2, 3, 4]);
        assert!(batch.end(&Outcome::Close));
        let child = forker.join().expect("no panic");
        assert_eq!(world.view(&child), Some(vec![1]));
        assert_eq!((parent.len(), child.len()), (Ok(1), Ok(1)));
        drop(batch);
        world.at_rest(3);
        drop((parent, child));
        world.ends();
    });
}

#[test]
fn i6_a_fork_that_appends_at_once_never_meets_the_parent_in_a_slot() {
    model(3, || {
        let world = World::new(3, 2);
        let parent = world.computed(&[1]);
        let forker = {
            let (world, parent) = (world.clone(), Arc::clone(&parent));
            spawn(move || {
                let child = parent.fork().expect("never freed, never busy");
                world.decode(&child, &[9]).expect("a page for the copy");
                child
            })
        };
        let batch = world.open(&[&parent], 1).expect("enough pages");
        world.write(&batch, 0, &[2]);
        assert!(batch.end(&Outcome::Commit(None)));
        drop(batch);
        let child = forker.join().expect("no panic");
        assert_eq!(world.view(&parent), Some(vec![1, 2]));
        let seen = world.view(&child).expect("alive");
        assert!([&[1, 9][..], &[1, 2, 9]].contains(&&seen[..]), "saw {seen:?}");
        drop((parent, child));
        world.ends();
    });
}

#[test]
fn i6_two_forks_that_append_at_once_never_both_write_in_place() {
    model(3, || {
        let world = World::new(3, 2);
        let (first, second) = {
            let parent = world.computed(&[1]);
            (parent.fork().expect("held"), parent.fork().expect("held"))
        };
        let other = {
            let world = world.clone();
            spawn(move || {
                world.decode(&second, &[3]).expect("a page for a copy");
                second
            })
        };
        world.decode(&first, &[2]).expect("a page for a copy");
        let second = other.join().expect("no panic");
        assert_eq!(world.view(&first), Some(vec![1, 2]));
        assert_eq!(world.view(&second), Some(vec![1, 3]));
        // Both copied and the last gave the old page back, or one has it.
        world.at_rest(1);
        drop((first, second));
        world.ends();
    });
}

#[test]
fn i6_copy_on_write_against_the_release_of_the_sharer() {
    model(4, || {
        let world = World::new(2, 2);
        let owner = world.computed(&[1]);
        let sharer = owner.fork().expect("held");
        let other = spawn(move || drop(sharer));
        world.decode(&owner, &[2]).expect("a page for a copy");
        other.join().expect("no panic");
        assert_eq!(world.view(&owner), Some(vec![1, 2]));
        world.at_rest(1);
        drop(owner);
        world.ends();
    });
}

#[test]
fn i4_a_copy_that_does_not_fit_fails_only_while_the_sharer_is_there() {
    model(5, || {
        let world = World::new(1, 2);
        let owner = world.computed(&[1]);
        let sharer = owner.fork().expect("held");
        let other = spawn(move || drop(sharer));
        let done = match world.decode(&owner, &[2]) {
            Ok(()) => true,
            Err(Error::OutOfPages { requested: 1, free: 0, .. }) => false,
            Err(other) => panic!("{other}"),
        };
        other.join().expect("no panic");
        assert!(done || world.decode(&owner, &[2]).is_ok(), "the page is the owner's alone");
        assert_eq!(world.view(&owner), Some(vec![1, 2]));
        world.at_rest(0);
        drop(owner);
        world.ends();
    });
}

#[test]
fn i4_a_copy_that_became_needless_never_fails() {
    model(4, || {
        let world = World::new(2, 2);
        let owner = world.computed(&[1]);
        let sharer = owner.fork().expect("held");
        let next = world.sequence();
        let other = {
            let (world, next) = (world.clone(), Arc::clone(&next));
            spawn(move || {
                drop(sharer);
                world.decode(&next, &[9]).is_ok()
            })
        };
        // At every instant there is a page for the copy, or no need of one.
        world.decode(&owner, &[2]).expect("it always fits");
        let decoded = other.join().expect("no panic") || world.decode(&next, &[9]).is_ok();
        assert!(decoded, "the sharer's page or the free one is left");
        assert_eq!(world.view(&owner), Some(vec![1, 2]));
        world.at_rest(0);
        drop((owner, next));
        world.ends();
    });
}

#[test]
fn i2_a_truncated_fork_and_its_parent_release_a_shared_leaf_once() {
    model(5, || {
        let world = World::new(3, 1);
        // One full leaf, shared as a whole; truncating the child counts its pages one by one.
        let parent = world.computed(&[1, 2]);
        let child = parent.fork().expect("held");
        let other = {
            let world = world.clone();
            spawn(move || {
                child.truncate(1).expect("no other writer");
                world.decode(&child, &[3]).expect("a page is left");
                child
            })
        };
        parent.truncate(0).expect("no other writer");
        let child = other.join().expect("no panic");
        assert_eq!(world.view(&child), Some(vec![1, 3]));
        world.at_rest(1);
        drop((parent, child));
        world.ends();
    });
}

#[test]
fn i10_of_two_overlapping_batches_one_gets_through() {
    model(5, || {
        let world = World::new(4, 1);
        let (a, b) = (world.sequence(), world.sequence());
        let other = {
            let (world, a, b) = (world.clone(), Arc::clone(&a), Arc::clone(&b));
            spawn(move || {
                let batch = world.open(&[&b, &a], 1)?;
                world.write(&batch, 0, &[3]);
                world.write(&batch, 1, &[3]);
                assert!(batch.end(&Outcome::Commit(None)));
                Ok(())
            })
        };
        let mine = went_through(world.open(&[&a, &b], 1).map(|batch| {
            world.write(&batch, 0, &[2]);
            world.write(&batch, 1, &[2]);
            assert!(batch.end(&Outcome::Commit(None)));
        }));
        let theirs = went_through(other.join().expect("no panic"));
        assert!(mine || theirs, "each failed because of the other");
        let tokens = u64::from(mine) + u64::from(theirs);
        assert_eq!(world.view(&a), world.view(&b));
        assert_eq!(world.view(&a).expect("alive").len() as u64, tokens);
        world.at_rest(4 - 2 * tokens);
        drop((a, b));
        world.ends();
    });
}

#[test]
fn i4_i12_of_two_batches_that_do_not_fit_together_one_gets_its_pages() {
    model(6, || {
        let world = World::new(3, 1);
        let (a, b) = (world.sequence(), world.sequence());
        let other = {
            let (world, b) = (world.clone(), Arc::clone(&b));
            spawn(move || world.decode(&b, &[3, 4]).is_ok())
        };
        let mine = world.decode(&a, &[1, 2]).is_ok();
        let theirs = other.join().expect("no panic");
        assert!(mine != theirs, "two pages of three for one of them");
        assert_eq!(world.view(if mine { &b } else { &a }), Some(vec![]));
        assert_eq!(a.len().expect("alive") + b.len().expect("alive"), 2);
        world.at_rest(1);
        drop((a, b));
        world.ends();
    });
}

#[test]
fn i10_different_sequences_never_conflict() {
    model(3, || {
        let world = World::new(2, 1);
        // So that every slab has its first segment.
        drop(world.computed(&[0]));
        let other = {
            let world = world.clone();
            spawn(move || {
                let sequence = world.tables.sequence(&[]);
                world.decode(&sequence, &[2]).expect("a page each");
                assert_eq!(world.view(&sequence), Some(vec![2]));
            })
        };
        let sequence = world.tables.sequence(&[]);
        world.decode(&sequence, &[1]).expect("a page each");
        assert_eq!(world.view(&sequence), Some(vec![1]));
        other.join().expect("no panic");
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i12_a_reorder_against_a_free_moves_all_or_nothing() {
    model(4, || {
        let world = World::new(2, 1);
        let (a, b) = (world.computed(&[1]), world.computed(&[2]));
        let other = {
            let b = Arc::clone(&b);
            spawn(move || b.free())
        };
        let picks = match world.tables.reorder(&[&a, &b], &[1, 1]) {
            Ok(picks) => picks,
            Err(Error::SequenceFreed { indices }) => {
                assert_eq!(indices, [1], "the freed one is named");
                Vec::new()
            }
            Err(other) => panic!("{other}"),
        };
        other.join().expect("no panic");
        assert_eq!(a.is_freed(), !picks.is_empty(), "unpicked, or nothing happened");
        if let [Pick::Moved(1), Pick::Forked(fork)] = &picks[..] {
            assert_eq!(world.view(fork), Some(vec![2]));
        } else {
            assert!(picks.is_empty(), "{picks:?}");
        }
        drop((a, b, picks));
        world.ends();
    });
}
