//! Attention beside the machine's limits.
//!
//! - Decode: one new token per sequence reads all of its keys and values once. The yardstick is the
//!   bandwidth of reading the same pages, first to last, with as many threads.
//! - Decode of sequences that share a prefix. The yardstick is the same batch without sharing, which is
//!   measured as above.
//! - Prefill: a chunk of new tokens. The yardstick is fused multiply-adds in registers; for bfloat16 and
//!   eight bits, where the instruction set multiplies them in pairs, such products.
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
use crate::kernels;

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
            rotated: 1 << 30,
            repetitions: 5,
        }
    }
}

/// Measures what the plan says; `report` sees each group of records as it is done.
///
/// # Errors
/// If the plan names no case or page size that there is, or if memory or threads can't be had.
pub fn attention(plan: &Plan, mut report: impl FnMut(&[Record])) -> Result<Vec<Record>> {
    let known = |name: &String| SHAPES.iter().any(|shape| shape.name == name);
    if let Some(name) = plan.cases.iter().find(|name| !known(name)) {
        let names = SHAPES.map(|shape| shape.name).join(", ");
        return Err(Error::Value(format!("case {name:?} is not one of {names}")));
    }
    if plan.page_sizes.contains(&0) {
        return Err(Error::Value("a page size is 0".to_owned()));
    }
    let mut all = Vec::new();
    for shape in SHAPES.iter().filter(|shape| plan.cases.iter().any(|name| name == shape.name)) {
        for &dtype in &plan.dtypes {
            for &page_size in &plan.page_sizes {
                let records = match dtype {
                    DType::F32 => group::<f32>(plan, shape, dtype, page_size)?,
                    DType::F16 => group::<half::f16>(plan, shape, dtype, page_size)?,
                    DType::BF16 | DType::I8 | DType::F8E4M3 => {
                        group::<half::bf16>(plan, shape, dtype, page_size)?
                    }
                };
                report(&records);
                all.extend(records);
            }
        }
    }
    Ok(all)
}

/// Measures one shape with one dtype and page size: threads, places and the limit in turn.
fn group<T: Element>(plan: &Plan, shape: &Shape, dtype: DType, page_size: usize) -> Result<Vec<Record>> {
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
    let arithmetic = Arithmetic::of(dtype)?;
    // A limit takes a pass over all memory, or some hundredth of a second.
    let (limit_work, unit) = if decode {
        (prepared.bytes()? * prepared.batches() as f64, "GB/s")
    } else {
        (arithmetic.run(1)? as f64 * MULTIPLY_ADDS as f64, "GFLOP/s")
    };
    let work = if decode { prepared.bytes()? } else { prepared.operations() };
    let calls = if decode { prepared.batches() as u64 } else { 1 };
    let mut cases = Vec::new();
    let mut labels = Vec::new();
    for (&threads, pool) in plan.threads.iter().zip(&pools) {
        labels.push((threads, None, if decode { limit_work } else { limit_work * threads as f64 }));
        cases.push(Case {
            threads,
            operations: 1,
            prepare: None,
            work: Box::new(move |thread, _| {
                note(if decode {
                    prepared.read(thread, threads)
                } else {
                    arithmetic.run(MULTIPLY_ADDS).map(|_| ())
                });
            }),
        });
        let places = match (decode, shape.shared) {
            (true, 0) => SHARED,
            (true, _) => PLACES.len(),
            (false, _) => 1,
        };
        for place in 0..places {
            labels.push((threads, Some(place), work));
            let run = move |_, calls| (0..calls).for_each(|_| note(prepared.attend(place, pool)));
            cases.push(Case { threads: 1, operations: calls, prepare: None, work: Box::new(run) });
        }
    }
    let summaries = interleaved(&cases, plan.repetitions);
    drop(cases);
    if let Some(error) = failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
        return Err(error);
    }
    let machine = if decode { READ } else { arithmetic.name() };
    let what = format!("{} {dtype} page {page_size}", shape.name);
    // The machine's, and that of adjacent pages.
    let mut limits = [f64::NAN; 2];
    let record = |((threads, place, work), summary): ((usize, Option<usize>, f64), Summary)| {
        let value = work / summary.nanos;
        let (case, implementation) = if let Some(place) = place {
            (format!("{what} {}", PLACES[place]), "paged_kv")
        } else {
            (format!("{what} limit"), machine)
        };
        if place.is_none_or(|place| place == ADJACENT) {
            limits[usize::from(place.is_some())] = value;
        }
        let (yardstick, limit) = match place {
            Some(SHARED) => (format!("{what} {}", PLACES[ADJACENT]), limits[1]),
            _ => (machine.to_owned(), limits[0]),
        };
        let [fast, slow] = summary.quartiles;
        Record {
            bench: "attention",
            case,
            implementation: implementation.into(),
            threads,
            value,
            quartiles: [work / slow, work / fast],
            unit,
            yardstick,
            limit,
            ratio: value / limit,
            kept: summary.kept,
            discarded: summary.discarded,
        }
    };
    Ok(labels.into_iter().zip(summaries).map(record).collect())
}

/// What prefill's inner loops do.
#[derive(Clone, Copy)]
enum Arithmetic {
    Floats,
    Pairs,
}

impl Arithmetic {
    /// Of keys and values of a type, with queries of this benchmark.
    fn of(dtype: DType) -> Result<Self> {
        let pairs = !matches!(dtype, DType::F32 | DType::F16) && kernels::multiply_add_pairs(1)?.is_some();
        Ok(if pairs { Self::Pairs } else { Self::Floats })
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Floats => FMA,
            Self::Pairs => PAIRS,
        }
    }

    /// Does it in registers; returns the operations.
    fn run(self, times: usize) -> Result<u64> {
        match self {
            Self::Floats => kernels::multiply_add(times),
            Self::Pairs => Ok(kernels::multiply_add_pairs(times)?.unwrap_or(0)),
        }
    }
}

/// Rounds of the multiply-add loop in one repetition.
const MULTIPLY_ADDS: usize = 1 << 22;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_stands_beside_its_limit() {
        let plan = Plan {
            cases: vec!["d2".to_owned()],
            page_sizes: vec![16],
            threads: vec![1, 2],
            rotated: 1 << 20,
            repetitions: 1,
            ..Plan::default()
        };
        let mut reported = 0;
        let records = attention(&plan, |records| reported += records.len()).expect("some hundred MiB");
        // Of each element type the limit, adjacent pages and scattered ones, on one thread and on two.
        assert_eq!((records.len(), reported), (30, 30));
        let nothing = Plan { cases: vec!["d9".to_owned()], ..plan };
        assert!(matches!(attention(&nothing, |_| {}), Err(Error::Value(message)) if message.contains("d9")));
        let shared = Plan {
            cases: vec!["c1".to_owned()],
            dtypes: vec![DType::I8],
            page_sizes: vec![128],
            threads: vec![2],
            ..nothing
        };
        let shared = attention(&shared, |_| {}).expect("some hundred MiB");
        assert_eq!(shared.len(), 4);
        assert_eq!((&shared[3].yardstick, shared[3].limit), (&shared[1].case, shared[1].value));
        for record in records.into_iter().chain(shared) {
            assert!(record.value > 0.0 && record.quartiles[0] <= record.quartiles[1], "{record:?}");
            assert!((record.ratio - record.value / record.limit).abs() < 1e-9, "{record:?}");
            assert_eq!(record.implementation == READ, record.case.ends_with("limit"));
        }
    }
}
