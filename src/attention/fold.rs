//! The parts of something that several threads work on, joined in order as they come.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Parts, each joined with those before it as soon as these are there: then few are kept, and little is left to do
/// after the last. What comes of them goes into `T`.
pub(super) struct Fold<P, T>(Mutex<Joined<P, T>>);

struct Joined<P, T> {
    /// The first parts, joined; of those, so many.
    whole: Option<P>,
    count: usize,
    /// Those that are there before one that goes before them.
    waiting: Vec<Option<P>>,
    /// Whether a thread has `whole` in its hands.
    joining: bool,
    goal: Option<T>,
}

impl<P, T> Fold<P, T> {
    /// Of so many parts.
    pub(super) fn new(parts: usize, goal: T) -> Self {
        let waiting = std::iter::repeat_with(|| None).take(parts).collect();
        Self(Mutex::new(Joined { whole: None, count: 0, waiting, joining: false, goal: Some(goal) }))
    }

    /// Takes part number `number`, and joins what can be joined, unless another thread does so already: that one
    /// will find this part. Gives all of them, joined, to the thread that joins the last.
    pub(super) fn add(&self, number: usize, part: P, join: impl Fn(&mut P, &P)) -> Option<(P, T)> {
        let mut joined = self.lock();
        joined.waiting[number] = Some(part);
        if std::mem::replace(&mut joined.joining, true) {
            return None;
        }
        let mut whole = joined.whole.take();
        while let Some(part) = joined.take_next() {
            drop(joined);
            match &mut whole {
                Some(whole) => join(whole, &part),
                None => whole = Some(part),
            }
            joined = self.lock();
        }
        if joined.count == joined.waiting.len() {
            return whole.zip(joined.goal.take());
        }
        joined.whole = whole;
        joined.joining = false;
        None
    }

    fn lock(&self) -> MutexGuard<'_, Joined<P, T>> {
        // A thread that panicked left nothing half done here.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P, T> Joined<P, T> {
    fn take_next(&mut self) -> Option<P> {
        let part = self.waiting.get_mut(self.count)?.take()?;
        self.count += 1;
        Some(part)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::Fold;

    #[test]
    fn parts_are_joined_in_order_whatever_the_order_they_come_in() {
        // All orders of five.
        let mut orders: Vec<Vec<usize>> = vec![Vec::new()];
        for n in 0..5 {
            orders = orders
                .into_iter()
                .flat_map(|order| {
                    (0..=n).map(move |at| {
                        let mut longer = order.clone();
                        longer.insert(at, n);
                        longer
                    })
                })
                .collect();
        }
        assert_eq!(orders.len(), 120);
        for order in orders {
            let fold = Fold::new(5, "goal");
            let (last, first) = order.split_last().unwrap();
            for &number in first {
                assert!(fold.add(number, vec![number], |all, next| all.extend(next)).is_none(), "{order:?}");
            }
            let whole = fold.add(*last, vec![*last], |all, next| all.extend(next));
            assert_eq!(whole, Some((vec![0, 1, 2, 3, 4], "goal")), "{order:?}");
        }
    }

    #[test]
    fn one_of_several_threads_gets_the_whole() {
        for parts in [1, 2, 7, 200] {
            let (fold, got) = (Fold::new(parts, ()), Mutex::new(Vec::new()));
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let (fold, got) = (&fold, &got);
                    scope.spawn(move || {
                        for number in (0..parts).filter(|number| number * 7 % 4 == thread) {
                            got.lock().unwrap().extend(fold.add(number, vec![number], |a, b| a.extend(b)));
                        }
                    });
                }
            });
            assert_eq!(got.into_inner().unwrap(), [((0..parts).collect::<Vec<_>>(), ())]);
        }
    }
}
