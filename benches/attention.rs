//! How near attention comes to the machine's limits. `cargo bench --features bench --bench attention`
//!
//! Prints what `paged-kv bench attention` prints too: medians of interleaved repetitions beside the
//! bandwidth of reading the same memory (decode), the same batch without a shared prefix (cascade) or
//! the rate of multiply-adds, or of products of bfloat16 in pairs where the CPU has them (prefill).
//!
//! Words behind `--` choose: names of cases (`d1` to `d6`, `c1`, `p1`, `p2`), dtypes (`bfloat16`), page
//! sizes (`page=16`), threads (`threads=1`), repetitions (`times=9`), instruction sets (`isa=avx2`). Of
//! several sets, rows of the second and later ones stand beside those of the first. Without any it is
//! the process's, which `PAGED_KV_ISA` chooses.

use paged_kv::bench::attention::{Plan, SHAPES, attention};
use paged_kv::kernels::Isa;

fn main() {
    let mut plan = Plan::default();
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with("--")).collect();
    let numbers = |name: &str| -> Vec<usize> {
        words.iter().filter_map(|word| word.strip_prefix(name)?.parse().ok()).collect()
    };
    let choose = |chosen: &mut Vec<usize>, numbers: Vec<usize>| {
        if !numbers.is_empty() {
            *chosen = numbers;
        }
    };
    choose(&mut plan.page_sizes, numbers("page="));
    choose(&mut plan.threads, numbers("threads="));
    plan.rotated = numbers("rotated=").first().copied().unwrap_or(plan.rotated);
    plan.repetitions = numbers("times=").first().copied().unwrap_or(plan.repetitions);
    let named: Vec<_> = words.iter().filter(|word| SHAPES.iter().any(|shape| shape.name == *word)).collect();
    if !named.is_empty() {
        plan.cases = named.into_iter().cloned().collect();
    }
    let dtypes: Vec<_> = words.iter().filter_map(|word| word.parse().ok()).collect();
    if !dtypes.is_empty() {
        plan.dtypes = dtypes;
    }
    let isas = words.iter().filter_map(|word| word.strip_prefix("isa="));
    plan.isas = isas.map(|name| name.parse().expect("an instruction set of this CPU")).collect();
    let measured = if plan.isas.is_empty() {
        vec![Isa::current().expect("a CPU that has it")]
    } else {
        plan.isas.clone()
    };
    let several = measured.len() > 1;
    let width = if several { 46 } else { 34 };
    println!("instruction set: {}", measured.iter().map(|isa| isa.name()).collect::<Vec<_>>().join(", "));
    println!(
        "{:<width$} {:>7} {:>9} {:>15} {:>9} {:>6} {:>8}",
        "case", "threads", "value", "quartiles", "limit", "ratio", "kept"
    );
    let print = |records: &[paged_kv::bench::Record]| {
        // The limits of later sets are the yardstick of none: shown themselves.
        for r in records.iter().filter(|r| several || r.implementation == "paged_kv") {
            let kept = format!("{}/{}", r.kept, r.kept + r.discarded);
            let quartiles = format!("{:.1} - {:.1}", r.quartiles[0], r.quartiles[1]);
            println!(
                "{:<width$} {:>7} {:>9.1} {quartiles:>15} {:>9.1} {:>6.2} {kept:>8}",
                r.case, r.threads, r.value, r.limit, r.ratio
            );
        }
    };
    attention(&plan, print).expect("memory and threads");
}
