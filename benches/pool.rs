//! The page pool beside the machine's limit and its peers. `cargo bench --features bench --bench pool`
//!
//! Prints first the table that `paged-kv bench pool` prints too: medians of interleaved
//! repetitions, as ratios to an uncontended compare-exchange pair of the same run. Then criterion
//! follows each contender over time, which shows regressions.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use paged_kv::bench::measure::{Case, lap};
use paged_kv::bench::pool::{Contender, contenders, pool};

const REPETITIONS: usize = 101;

fn table() {
    let records = pool(REPETITIONS).expect("a pool of 65536 pages");
    println!("{:<24} {:>7}  {:<28} {:>9} {:>7} {:>10}", "case", "threads", "who", "ns/page", "ratio", "kept");
    for r in records {
        let kept = format!("{}/{}", r.kept, r.kept + r.discarded);
        println!(
            "{:<24} {:>7}  {:<28} {:>9.2} {:>7.2} {kept:>10}",
            r.case, r.threads, r.implementation, r.value, r.ratio
        );
    }
}

fn main() {
    let mut criterion = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args();
    table();
    let contenders = contenders().expect("pools of 65536 pages");
    for n in [1_usize, 32] {
        let mut group = criterion.benchmark_group(format!("take_and_give_{n}"));
        group.throughput(Throughput::Elements(n as u64));
        for threads in [1, 2] {
            for Contender { name, work } in &contenders {
                group.bench_function(BenchmarkId::new(*name, threads), |bencher| {
                    bencher.iter_custom(|rounds| {
                        let work = Box::new(move |thread, rounds| work(thread, n, rounds));
                        lap(&Case { threads, operations: rounds, prepare: None, work }).elapsed
                    });
                });
            }
        }
        group.finish();
    }
    criterion.final_summary();
}
