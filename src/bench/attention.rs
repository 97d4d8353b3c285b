//! Attention beside the machine's limits.
//!
//! - Decode: one new token per sequence reads all of its keys and values once. The yardstick is the
//!   bandwidth of reading the same pages, first to last, with as many threads.
//! - Decode of sequences that share a prefix. The yardstick is the same batch without sharing, which is
//!   measured as above.
//! - Prefill: a chunk of new tokens. The yardstick is fused multiply-adds in registers; for bfloat16 and
//!   eight bits, where the instruction set multiplies them in pairs, such products.
//!
//! Several instruction sets can be compared. The yardstick of a row of the second and later ones is the
//! same row of the first, so that its ratio is that of their speeds.
//!
//! Calls rotate through more memory than caches hold, which was written before; all that is compared
//! takes turns.

use std::sync::{Mutex, PoisonError};

use super::Record;
use super::measure::{Case, Summary, interleaved};
use super::shapes::{ADJACENT, PLACES, Prepared, SHARED};
pub use super::shapes::{SHAPES, Shape};
use crate::attention::ThreadPool;
use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::kernels::{self, Isa};

/// Who attends.
const US: &str = "paged_kv";
/// Name of decode's yardstick.
pub const READ: &str = "reading the pages";
/// Name of prefill's yardstick.
pub const FMA: &str = "multiply-adds";
/// Name of prefill's yardstick where bfloat16 are multiplied in pairs.
pub const PAIRS: &str = "bfloat16 products in pairs";

/// What to measure.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Names of [`SHAPES`].
    pub cases: Vec<String>,
    /// Types of keys and values, and of queries; beside quantised ones, queries are bfloat16.
    pub dtypes: Vec<DType>,
    /// Tokens per page.
    pub page_sizes: Vec<usize>,
    /// Numbers of threads.
    pub threads: Vec<usize>,
    /// Instruction sets that each case is measured with, the one to compare with first; if there are
    /// none, with the process's.
    pub isas: Vec<Isa>,
    /// Bytes of keys and values that decode rotates through.
    pub rotated: usize,
    /// Repetitions of each case; all that have a yardstick in common take turns.
    pub repetitions: usize,
}

impl Default for Plan {
    /// Everything, with one thread and with all.
    fn default() -> Self {
        let all = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut threads = vec![1, all];
        threads.dedup();
        Self {
            cases: SHAPES.map(|shape| shape.name.to_owned()).to_vec(),
            dtypes: DType::ALL.to_vec(),
            page_sizes: vec![16, 128],
            threads,
            isas: Vec::new(),
            rotated: 1 << 30,
            repetitions: 5,
        }
    }
}

/// Measures what the plan says; `report` sees each group of records as it is done.
///
/// # Errors
/// If the plan names no case or page size that there is, an instruction set twice or one that this CPU
/// lacks, or if memory or threads can't be had.
pub fn attention(plan: &Plan, mut report: impl FnMut(&[Record])) -> Result<Vec<Record>> {
    let known = |name: &String| SHAPES.iter().any(|shape| shape.name == name);
    if let Some(name) = plan.cases.iter().find(|name| !known(name)) {
        let names = SHAPES.map(|shape| shape.name).join(", ");
        return Err(Error::Value(format!("case {name:?} is not one of {names}")));
    }
    if plan.page_sizes.contains(&0) {
        return Err(Error::Value("a page size is 0".to_owned()));
    }
    let isas = if plan.isas.is_empty() { vec![Isa::current()?] } else { plan.isas.clone() };
    for (i, isa) in isas.iter().enumerate() {
        isa.level()?;
        if isas[..i].contains(isa) {
            return Err(Error::Value(format!("instruction set {isa} is given twice")));
        }
    }
    let mut all = Vec::new();
    for shape in SHAPES.iter().filter(|shape| plan.cases.iter().any(|name| name == shape.name)) {
        for &dtype in &plan.dtypes {
            for &page_size in &plan.page_sizes {
                let records = match dtype {
                    DType::F32 => group::<f32>(plan, &isas, shape, dtype, page_size)?,
                    DType::F16 => group::<half::f16>(plan, &isas, shape, dtype, page_size)?,
                    DType::BF16 | DType::I8 | DType::F8E4M3 => {
                        group::<half::bf16>(plan, &isas, shape, dtype, page_size)?
                    }
                };
                report(&records);
                all.extend(records);
            }
        }
    }
    Ok(all)
}

/// A row to be.
struct Row {
    case: String,
    implementation: &'static str,
    threads: usize,
    /// Bytes or operations of one call.
    work: f64,
    /// Which row is its yardstick: an earlier one, or itself.
    beside: usize,
}

/// Measures one shape with one dtype and page size: threads, places, instruction sets and limits in turn.
fn group<T: Element>(
    plan: &Plan,
    isas: &[Isa],
    shape: &Shape,
    dtype: DType,
    page_size: usize,
) -> Result<Vec<Record>> {
    let prepared = &Prepared::<T>::new(*shape, dtype, page_size, plan.rotated)?;
    let decode = shape.queries == 1;
    let pools = plan.threads.iter().map(|&n| ThreadPool::new(Some(n))).collect::<Result<Vec<_>>>()?;
    let failed = Mutex::new(None);
    let failed = &failed;
    let note = move |result: Result<()>| {
        if let Err(error) = result {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    let (work, unit) = if decode { (prepared.bytes()?, "GB/s") } else { (prepared.operations(), "GFLOP/s") };
    let calls = if decode { prepared.batches() as u64 } else { 1 };
    let what = format!("{} {dtype} page {page_size}", shape.name);
    let suffix = |isa: Isa| if isas.len() > 1 { format!(" {isa}") } else { String::new() };
    let mut cases = Vec::new();
    let mut rows = Vec::new();
    for (&threads, pool) in plan.threads.iter().zip(&pools) {
        let first = rows.len();
        let mut limit = |case: String, implementation, work, run: Box<dyn Fn(usize) -> Result<()> + Sync>| {
            rows.push(Row { case, implementation, threads, work, beside: first });
            let work = Box::new(move |thread, _| note(run(thread)));
            cases.push(Case { threads, operations: 1, prepare: None, work });
        };
        // A limit takes a pass over all memory, or some hundredth of a second. Memory is as fast whoever
        // attends, so one reading serves all instruction sets; arithmetic is each set's own.
        if decode {
            let read = move |thread| prepared.read(thread, threads);
            limit(format!("{what} limit"), READ, work * prepared.batches() as f64, Box::new(read));
        } else {
            for &isa in isas {
                let arithmetic = Arithmetic::of(isa, dtype)?;
                let work = (arithmetic.run(1)? * MULTIPLY_ADDS as u64) as f64 * threads as f64;
                let run = move |_| arithmetic.run(MULTIPLY_ADDS).map(|_| ());
                let case = format!("{what} limit{}", suffix(isa));
                limit(case, arithmetic.name(), work, Box::new(run));
            }
        }
        let places = match (decode, shape.shared) {
            (true, 0) => SHARED,
            (true, _) => PLACES.len(),
            (false, _) => 1,
        };
        let behind_limits = rows.len();
        for (place, name) in PLACES.iter().enumerate().take(places) {
            let here = rows.len();
            for (set, &isa) in isas.iter().enumerate() {
                let beside = match (set, place) {
                    (0, SHARED) => behind_limits + ADJACENT * isas.len(),
                    (0, _) => first,
                    _ => here,
                };
                let case = format!("{what} {name}{}", suffix(isa));
                rows.push(Row { case, implementation: US, threads, work, beside });
                let run = move |_, calls| (0..calls).for_each(|_| note(prepared.attend(place, isa, pool)));
                cases.push(Case { threads: 1, operations: calls, prepare: None, work: Box::new(run) });
            }
        }
    }
    let summaries = interleaved(&cases, plan.repetitions);
    drop(cases);
    if let Some(error) = failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Err(error);
    }
    let values: Vec<f64> =
        rows.iter().zip(&summaries).map(|(row, summary)| row.work / summary.nanos).collect();
    let record = |(i, summary): (usize, &Summary)| {
        let (row, value) = (&rows[i], values[i]);
        let yardstick = &rows[row.beside];
        // The machine is called by what it does; what stands beside its like, by the case.
        let like = i != row.beside && (row.implementation == US) == (yardstick.implementation == US);
        let limit = values[row.beside];
        let [fast, slow] = summary.quartiles;
        Record {
            bench: "attention",
            case: row.case.clone(),
            implementation: row.implementation.into(),
            threads: row.threads,
            value,
            quartiles: [row.work / slow, row.work / fast],
            unit,
            yardstick: if like { yardstick.case.clone() } else { yardstick.implementation.to_owned() },
            limit,
            ratio: value / limit,
            kept: summary.kept,
            discarded: summary.discarded,
        }
    };
    Ok(summaries.iter().enumerate().map(record).collect())
}

/// What prefill's inner loops do.
#[derive(Clone, Copy)]
struct Arithmetic {
    isa: Isa,
    pairs: bool,
}

impl Arithmetic {
    /// Of keys and values of a type, with queries of this benchmark.
    fn of(isa: Isa, dtype: DType) -> Result<Self> {
        let becomes_pairs = !matches!(dtype, DType::F32 | DType::F16);
        let pairs = becomes_pairs && kernels::multiply_add_pairs(isa, 1)?.is_some();
        Ok(Self { isa, pairs })
    }

    const fn name(self) -> &'static str {
        if self.pairs { PAIRS } else { FMA }
    }

    /// Does it in registers; returns the operations.
    fn run(self, times: usize) -> Result<u64> {
        if self.pairs {
            Ok(kernels::multiply_add_pairs(self.isa, times)?.unwrap_or(0))
        } else {
            kernels::multiply_add(self.isa, times)
        }
    }
}

/// Rounds of the multiply-add loop in one repetition.
const MULTIPLY_ADDS: usize = 1 << 22;

#[cfg(test)]
mod tests;
