//! A small number for each living thread, so that per-thread shares of a structure can be found
//! without hashing and without two busy threads landing on the same share.

#[cfg(loom)]
mod imp {
    use std::cell::Cell;

    loom::thread_local! {
        static NUMBER: Cell<usize> = Cell::new(0);
    }

    /// The calling thread's number: 0 until [`set_thread_number`] says otherwise.
    pub fn thread_number() -> usize {
        NUMBER.with(Cell::get)
    }

    /// Gives the calling thread a number. Models choose theirs, so that every execution is the same.
    pub fn set_thread_number(number: usize) {
        NUMBER.with(|cell| cell.set(number));
    }
}

#[cfg(not(loom))]
mod imp {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    const WORDS: usize = 4;

    /// Numbers in use, one bit each.
    static IN_USE: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

    struct Number(usize);

    impl Number {
        /// The lowest number no living thread has; all are in use: one that is shared.
        fn claim() -> Self {
            for (index, word) in IN_USE.iter().enumerate() {
                // Relaxed: the number orders nothing, it only spreads threads.
                let mut bits = word.load(Ordering::Relaxed);
                while bits != u64::MAX {
                    let bit = bits.trailing_ones();
                    match word.compare_exchange_weak(
                        bits,
                        bits | 1 << bit,
                        Ordering::Relaxed,
                        Ordering::Relaxed,
                    ) {
                        Ok(_) => return Self(index * 64 + bit as usize),
                        Err(seen) => bits = seen,
                    }
                }
            }
            Self(WORDS * 64)
        }
    }

    impl Drop for Number {
        fn drop(&mut self) {
            // Destructors that run later share number 0.
            KNOWN.set(1);
            if let Some(word) = IN_USE.get(self.0 / 64) {
                word.fetch_and(!(1 << (self.0 % 64)), Ordering::Relaxed);
            }
        }
    }

    thread_local! {
        static NUMBER: Number = Number::claim();
        /// The number plus one, or 0 while it isn't known. Having neither an initialiser to run nor a
        /// destructor, it is there at once.
        static KNOWN: Cell<usize> = const { Cell::new(0) };
    }

    /// The calling thread's number: the lowest that no other living thread had when it first asked.
    #[inline]
    pub fn thread_number() -> usize {
        KNOWN.get().checked_sub(1).unwrap_or_else(first_asked)
    }

    #[cold]
    fn first_asked() -> usize {
        let number = NUMBER.try_with(|number| number.0).unwrap_or(0);
        KNOWN.set(number + 1);
        number
    }
}

#[cfg(loom)]
pub use imp::set_thread_number;
pub use imp::thread_number;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn living_threads_have_different_numbers_and_dead_ones_give_theirs_back() {
        let mine = thread_number();
        let mut numbers = Vec::new();
        for _ in 0..1000 {
            let number = std::thread::spawn(thread_number).join().expect("the thread returns its number");
            assert_ne!(number, mine);
            numbers.push(number);
        }
        assert!(numbers.iter().all(|&number| number < 256));
    }
}
