//! Repetitions on several threads, interleaved between cases, without those in which a thread
//! waited for a core.

use std::time::{Duration, Instant};

use crate::sync::{AtomicUsize, Ordering};

/// The share of a repetition that a thread may have waited for a core.
const TOLERATED_WAIT: f64 = 0.002;

/// One repetition.
#[derive(Clone, Copy, Debug)]
pub struct Lap {
    /// From the start to the end of the slowest thread.
    pub elapsed: Duration,
    /// Whether every thread of the process had a core all the time it wanted one. Always true where the system doesn't tell.
    pub undisturbed: bool,
}

/// Something to measure: how many operations a thread does in one repetition, and how.
pub struct Case<'a> {
    /// Threads at once.
    pub threads: usize,
    /// Operations of each thread per repetition.
    pub operations: u64,
    /// Brings about the state to start from. Not measured; called once per repetition, between the
    /// warm-up and the start.
    pub prepare: Option<Box<dyn Fn() + Sync + 'a>>,
    /// `work(thread, operations)`; none at all must do nothing.
    pub work: Box<dyn Fn(usize, u64) + Sync + 'a>,
}

/// What came out for one case, in nanoseconds per operation of one thread.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    /// The median.
    pub nanos: f64,
    /// The quartiles: half of the repetitions lie between them.
    pub quartiles: [f64; 2],
    /// Repetitions that these are taken over.
    pub kept: usize,
    /// Repetitions thrown away.
    pub discarded: usize,
}

/// Measures the cases in turn, `repetitions` times each, so that slow changes of the machine hit
/// all of them alike. Disturbed repetitions are repeated up to three times over; if still fewer
/// than `repetitions` were undisturbed, the median is over those, and over all if there were none
/// (then `kept` is 0).
pub fn interleaved(cases: &[Case], repetitions: usize) -> Vec<Summary> {
    let mut laps: Vec<Vec<Lap>> = cases.iter().map(|_| Vec::new()).collect();
    for _ in 0..4 * repetitions {
        let mut complete = true;
        for (case, laps) in cases.iter().zip(&mut laps) {
            if laps.iter().filter(|lap| lap.undisturbed).count() < repetitions {
                laps.push(lap(case));
                complete = false;
            }
        }
        if complete {
            break;
        }
    }
    cases.iter().zip(laps).map(|(case, laps)| summary(case, &laps)).collect()
}

/// One repetition: all threads warm up, meet, and do their operations.
pub fn lap(case: &Case) -> Lap {
    let Case { threads, operations, prepare, work } = case;
    let (threads, operations) = (*threads, *operations);
    let arrived = AtomicUsize::new(0);
    let one = |thread: usize| {
        work(thread, operations / 8 + 1);
        if let Some(prepare) = prepare.as_ref().filter(|_| thread == 0) {
            prepare();
        }
        // AcqRel and Acquire: they pair with each other, so that all start after all have warmed up.
        arrived.fetch_add(1, Ordering::AcqRel);
        // Spinning, since being woken takes longer than a repetition should.
        while arrived.load(Ordering::Acquire) < threads {
            std::thread::yield_now();
        }
        let waited = run_queue_wait();
        // Whatever state was prepared, the call itself is not what is measured.
        work(thread, 0);
        let start = Instant::now();
        work(thread, operations);
        (start, Instant::now(), run_queue_wait().saturating_sub(waited))
    };
    let times: Vec<_> = std::thread::scope(|scope| {
        let one = &one;
        let others: Vec<_> = (1..threads).map(|thread| scope.spawn(move || one(thread))).collect();
        let mut times = vec![one(0)];
        times.extend(others.into_iter().filter_map(|other| other.join().ok()));
        times
    });
    let elapsed = times.iter().map(|(start, end, _)| *end - *start).max().unwrap_or_default();
    let waited = times.iter().map(|(.., waited)| *waited).max().unwrap_or_default();
    // Threads that ran one after the other measured nothing of each other.
    let last_start = times.iter().map(|(start, ..)| *start).max();
    let first_end = times.iter().map(|(_, end, _)| *end).min();
    let overlap = match (last_start, first_end) {
        (Some(start), Some(end)) => end.saturating_duration_since(start),
        _ => Duration::ZERO,
    };
    let undisturbed =
        waited.as_secs_f64() <= TOLERATED_WAIT * elapsed.as_secs_f64() && overlap > elapsed.mul_f64(0.5);
    Lap { elapsed, undisturbed }
}

fn summary(case: &Case, laps: &[Lap]) -> Summary {
    let nanos = |lap: &Lap| lap.elapsed.as_secs_f64() * 1e9 / case.operations as f64;
    let kept: Vec<f64> = laps.iter().filter(|lap| lap.undisturbed).map(nanos).collect();
    let discarded = laps.len() - kept.len();
    let mut values = if kept.is_empty() { laps.iter().map(nanos).collect() } else { kept.clone() };
    values.sort_unstable_by(f64::total_cmp);
    let quartile = |n: usize| values[(values.len() - 1) * n / 4];
    Summary { nanos: quartile(2), quartiles: [quartile(1), quartile(3)], kept: kept.len(), discarded }
}

/// How long this process's threads have waited for a core so far.
fn run_queue_wait() -> Duration {
    // Linux: "time on the core, time waiting for it, time slices", in nanoseconds.
    let nanos = |task: std::fs::DirEntry| -> Option<u64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().nth(1)?.parse().ok()
    };
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    Duration::from_nanos(tasks.filter_map(nanos).sum())
}
