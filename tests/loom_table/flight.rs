//! Leases of work on a device, which end whenever that has passed.

use loom::sync::Arc;

use paged_kv::table::{Outcome, TableLease};

use crate::world::{Sequence, World, model, spawn};

/// Computes tokens by a batch whose work goes on.
fn launch(world: &World, sequence: &Sequence, stamps: &[u64]) -> TableLease<2, 2> {
    let batch = world.open(&[sequence], stamps.len() as u32).expect("enough pages");
    let lease = batch.lease().expect("few references");
    world.write(&batch, 0, stamps);
    assert!(batch.end(&Outcome::Commit(None)));
    lease
}

#[test]
fn i6_a_lease_that_ends_meanwhile_never_makes_a_shared_page_look_private() {
    model(3, || {
        let world = World::on_device(3, 2);
        let parent = world.computed(&[1]);
        let child = parent.fork().expect("held");
        let lease = world.open(&[&parent], 0).expect("a reader").lease().expect("few references");
        let other = spawn(move || drop(lease));
        let batch = world.open(&[&child], 1).expect("enough pages");
        assert_eq!(batch.copies().len(), 1, "the parent holds the page");
        drop(batch);
        other.join().expect("no panic");
        world.decode(&child, &[2]).expect("enough pages");
        assert_eq!(world.view(&parent), Some(vec![1]));
        assert_eq!(world.view(&child), Some(vec![1, 2]));
        world.at_rest(1);
        drop((parent, child));
        world.ends();
    });
}

#[test]
fn i7_truncate_and_append_while_a_lease_ends_copies_or_writes_in_place() {
    model(3, || {
        let world = World::on_device(3, 2);
        let sequence = world.sequence();
        let lease = launch(&world, &sequence, &[1, 2]);
        let other = spawn(move || drop(lease));
        sequence.truncate(1).expect("no other writer");
        world.decode(&sequence, &[3]).expect("a page for a needless copy");
        other.join().expect("no panic");
        assert_eq!(world.view(&sequence), Some(vec![1, 3]));
        world.at_rest(2);
        drop(sequence);
        world.ends();
    });
}

#[test]
fn i9_the_last_of_lease_and_sequence_gives_the_pages_back_once() {
    model(4, || {
        let world = World::on_device(2, 2);
        let sequence = world.sequence();
        let lease = launch(&world, &sequence, &[1, 2, 3]);
        let other = {
            let sequence = Arc::clone(&sequence);
            spawn(move || sequence.free())
        };
        drop(lease);
        other.join().expect("no panic");
        world.at_rest(2);
        drop(sequence);
        world.ends();
    });
}
