//! `free` and dropped handles against everything else: pages and slots come back exactly once.

use loom::sync::Arc;

use paged_kv::error::Error;
use paged_kv::table::Outcome;

use crate::world::{World, model, spawn, went_through};

#[test]
fn i10_a_free_during_a_change_is_carried_out_once_by_the_writer() {
    model(6, || {
        let world = World::new(3, 2);
        let sequence = world.computed(&[1]);
        let writer = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || went_through(world.decode(&sequence, &[2, 3])))
        };
        sequence.free();
        writer.join().expect("no panic");
        world.at_rest(3);
        assert!(matches!(sequence.len(), Err(Error::SequenceFreed { .. })));
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i10_a_free_during_copy_on_write_gives_back_draft_and_head() {
    model(4, || {
        let world = World::new(3, 2);
        let sequence = world.computed(&[1]);
        let sharer = sequence.fork().expect("held");
        let writer = {
            let (world, sequence) = (world.clone(), Arc::clone(&sequence));
            spawn(move || went_through(world.decode(&sequence, &[2])))
        };
        sequence.free();
        writer.join().expect("no panic");
        world.at_rest(2);
        assert_eq!(world.view(&sharer), Some(vec![1]));
        drop((sequence, sharer));
        world.ends();
    });
}

/// Batch and handle go at the same time.
fn drop_against_end(keep: bool) {
    model(6, move || {
        let world = World::new(3, 2);
        let sequence = world.tables.sequence(&[]);
        world.decode(&sequence, &[1]).expect("enough pages");
        let batch = world.open(&[&sequence], 2).expect("enough pages");
        world.write(&batch, 0, &[2, 3]);
        let outcome = if keep { Outcome::Commit(None) } else { Outcome::Close };
        let ender = spawn(move || batch.end(&outcome));
        drop(sequence);
        assert!(ender.join().expect("no panic"));
        world.ends();
    });
}

#[test]
fn i9_a_handle_dropped_while_its_batch_commits_leaves_nothing() {
    drop_against_end(true);
}

#[test]
fn i9_a_handle_dropped_while_its_batch_closes_leaves_nothing() {
    drop_against_end(false);
}

#[test]
fn i12_of_two_threads_that_end_a_batch_one_does() {
    model(5, || {
        let world = World::new(2, 2);
        let sequence = world.computed(&[1]);
        let batch = Arc::new(world.open(&[&sequence], 2).expect("enough pages"));
        world.write(&batch, 0, &[2, 3]);
        let closer = {
            let batch = Arc::clone(&batch);
            spawn(move || batch.end(&Outcome::Close))
        };
        let committed = batch.end(&Outcome::Commit(None));
        assert!(committed != closer.join().expect("no panic"), "one of them");
        assert_eq!(world.view(&sequence), Some(if committed { vec![1, 2, 3] } else { vec![1] }));
        world.at_rest(u64::from(!committed));
        drop((sequence, batch));
        world.ends();
    });
}

#[test]
fn i5_a_slot_is_reused_only_after_its_writer_and_its_handle_are_gone() {
    model(3, || {
        let world = World::new(2, 1);
        let sequence = world.tables.sequence(&[7]);
        let old = sequence.id();
        let batch = world.open(&[&sequence], 1).expect("enough pages");
        world.write(&batch, 0, &[1]);
        let ender = spawn(move || batch.end(&Outcome::Commit(None)));
        drop(sequence);
        // May get the slot that was just given back, never one that the ender still uses.
        let next = world.tables.sequence(&[8, 9]);
        assert_ne!(next.id(), old, "a number is used once");
        world.decode(&next, &[2]).expect("nobody else changes it");
        assert!(ender.join().expect("no panic"));
        assert_eq!(next.pending_ids().expect("alive"), [9]);
        assert_eq!(world.view(&next), Some(vec![2]));
        world.at_rest(1);
        drop(next);
        world.ends();
    });
}

#[test]
fn i2_of_two_frees_one_gives_the_pages_back() {
    model(5, || {
        let world = World::new(2, 1);
        let sequence = world.computed(&[1, 2]);
        let other = {
            let sequence = Arc::clone(&sequence);
            spawn(move || sequence.free())
        };
        sequence.free();
        other.join().expect("no panic");
        world.at_rest(2);
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i10_a_fork_of_a_sequence_that_is_freed_has_all_its_tokens_or_is_refused() {
    model(5, || {
        let world = World::new(3, 1);
        let sequence = world.computed(&[1, 2, 3]);
        let forker = {
            let sequence = Arc::clone(&sequence);
            spawn(move || sequence.fork())
        };
        sequence.free();
        match forker.join().expect("no panic") {
            Ok(child) => {
                assert_eq!(world.view(&child), Some(vec![1, 2, 3]));
                world.at_rest(0);
            }
            Err(Error::SequenceFreed { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i9_the_last_of_lease_and_sequence_gives_the_pages_back() {
    model(6, || {
        let world = World::new(2, 1);
        let sequence = world.computed(&[1, 2]);
        let lease = world.open(&[&sequence], 0).expect("held");
        let reader = spawn(move || drop(lease));
        drop(sequence);
        reader.join().expect("no panic");
        world.ends();
    });
}
