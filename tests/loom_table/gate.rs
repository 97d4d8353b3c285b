//! A batch that is closed while operations on it are in flight ends once, after the last of them.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};

use paged_kv::sync::Gate;
use paged_kv::table::Outcome;

use crate::world::{Batch, Sequence, World, model, spawn};

/// What an open batch is to its users: the table's transaction behind a gate.
struct Guarded {
    world: World,
    batch: Batch,
    gate: Gate,
    next: Arc<Sequence>,
    finished: AtomicUsize,
}

impl Guarded {
    /// The only page is the batch's; whoever ends the batch writes into it for another sequence,
    /// which loom allows only if all that operations did was before.
    fn finish(&self) {
        // Relaxed: read after all threads were joined.
        self.finished.fetch_add(1, Ordering::Relaxed);
        assert!(self.batch.end(&Outcome::Close), "nobody ended it before");
        self.world.decode(&self.next, &[9]).expect("the page is back");
    }

    fn leave(&self) {
        if self.gate.leave() {
            self.finish();
        }
    }
}

fn guarded(new_tokens: u32) -> (Arc<Sequence>, Arc<Guarded>) {
    let world = World::new(1, 2);
    let (sequence, next) = (world.sequence(), world.sequence());
    let batch = world.open(&[&sequence], new_tokens).expect("a page");
    let (gate, finished) = (Gate::new(), AtomicUsize::new(0));
    (sequence, Arc::new(Guarded { world, batch, gate, next, finished }))
}

/// Closes the gate and sees to it that the batch ended once.
fn close(sequence: Arc<Sequence>, guarded: &Arc<Guarded>, others: Vec<loom::thread::JoinHandle<()>>) {
    if guarded.gate.close() {
        guarded.finish();
    }
    for other in others {
        other.join().expect("no panic");
    }
    assert_eq!(guarded.finished.load(Ordering::Relaxed), 1);
    assert!(!guarded.gate.enter(), "closed for good");
    assert_eq!(guarded.world.view(&guarded.next), Some(vec![9]));
    assert_eq!(sequence.len(), Ok(0));
    guarded.world.at_rest(0);
}

#[test]
fn i7_a_batch_closed_by_another_thread_ends_after_the_writer_in_flight() {
    model(6, || {
        let (sequence, guarded) = guarded(1);
        let writer = {
            let guarded = Arc::clone(&guarded);
            spawn(move || {
                if guarded.gate.enter() {
                    guarded.world.write(&guarded.batch, 0, &[1]);
                    guarded.leave();
                }
            })
        };
        close(sequence, &guarded, vec![writer]);
    });
}

#[test]
fn i7_a_batch_closed_by_another_thread_ends_after_all_readers_in_flight() {
    model(3, || {
        let (sequence, guarded) = guarded(1);
        guarded.world.write(&guarded.batch, 0, &[1]);
        let readers = (0..2).map(|_| {
            let guarded = Arc::clone(&guarded);
            spawn(move || {
                if guarded.gate.enter() {
                    assert_eq!(guarded.world.written(&guarded.batch, 0), [1]);
                    guarded.leave();
                }
            })
        });
        let readers = readers.collect();
        close(sequence, &guarded, readers);
    });
}
