//! The building blocks of `sync` under every interleaving that loom finds within the preemption
//! bound stated with each model.

#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use paged_kv::sync::{OnceBox, Segments, TryCell};

/// `LOOM_MAX_PREEMPTIONS` in the environment takes the place of the bound.
fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.check(f);
}

#[test]
fn a_try_cell_lets_one_in_and_turns_the_others_away() {
    model(5, || {
        let cell = Arc::new(TryCell::new(0));
        let others: Vec<_> = (0..2)
            .map(|_| {
                let cell = Arc::clone(&cell);
                thread::spawn(move || cell.try_with(|value| *value += 1).is_some())
            })
            .collect();
        let entered = others.into_iter().map(|other| other.join().expect("no panic"));
        let entered = entered.filter(|&entered| entered).count();
        assert!(entered >= 1, "whoever comes first finds it free");
        assert_eq!(cell.try_with(|value| *value), Some(entered));
    });
}

#[test]
fn a_try_cell_hands_on_what_the_last_one_wrote() {
    model(5, || {
        let cell = Arc::new(TryCell::new([0; 2]));
        let other = {
            let cell = Arc::clone(&cell);
            thread::spawn(move || cell.try_with(|value| *value = [1; 2]).is_some())
        };
        // Loom itself fails the model if the two are in the cell at once.
        if let Some(value) = cell.try_with(|value| *value) {
            assert!(value == [0; 2] || value == [1; 2]);
        }
        assert!(other.join().expect("no panic") || cell.try_with(|value| *value) == Some([0; 2]));
    });
}

/// Written after it was made: who sees it whole sees 2.
fn written(made: &AtomicUsize) -> AtomicUsize {
    // Relaxed: a count, read after all threads were joined.
    made.fetch_add(1, Ordering::Relaxed);
    let value = AtomicUsize::new(1);
    value.store(2, Ordering::Relaxed);
    value
}

#[test]
fn a_once_box_shows_everybody_one_value_and_shows_it_whole() {
    model(5, || {
        let (once, made) = (Arc::new(OnceBox::new()), Arc::new(AtomicUsize::new(0)));
        let look = |once: &OnceBox<AtomicUsize>, made: &AtomicUsize| {
            if let Some(value) = once.get() {
                assert_eq!(value.load(Ordering::Relaxed), 2);
            }
            let value = once.get_or_make(|| written(made));
            assert_eq!(value.load(Ordering::Relaxed), 2);
            std::ptr::from_ref(value).addr()
        };
        let other = {
            let (once, made) = (Arc::clone(&once), Arc::clone(&made));
            thread::spawn(move || look(&once, &made))
        };
        let mine = look(&once, &made);
        assert_eq!(mine, other.join().expect("no panic"), "one value for all");
        assert!((1..=2).contains(&made.load(Ordering::Relaxed)));
    });
}

#[test]
fn segments_made_twice_are_one_and_are_seen_whole() {
    model(5, || {
        let (segments, made) = (Arc::new(Segments::new()), Arc::new(AtomicUsize::new(0)));
        let look = |segments: &Segments<AtomicUsize>, made: &AtomicUsize| {
            segments.make(0, || written(made));
            assert_eq!(segments.get(1).load(Ordering::Relaxed), 2);
            std::ptr::from_ref(segments.get(1)).addr()
        };
        let other = {
            let (segments, made) = (Arc::clone(&segments), Arc::clone(&made));
            thread::spawn(move || look(&segments, &made))
        };
        let mine = look(&segments, &made);
        assert_eq!(mine, other.join().expect("no panic"), "one place for all");
    });
}
