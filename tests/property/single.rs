//! One thread: after every operation the library agrees with the model in results, errors and
//! their numbers, lengths, tables, free pages, statistics and contents; a failed one has changed
//! nothing. Failures shrink to a short list of operations.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::rc::Rc;
use std::sync::Arc;

use paged_kv::error::{Error, Result};
use paged_kv::ids::{PageHandle, PageId};
use paged_kv::pool::PagePool;
use paged_kv::table::{CopyPages, NewTokens, Outcome, PageState, Pick, Sequence, TableBatch, Tables};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::common::{Copier, Stamps};
use crate::model::{self, Batch, Model, Page, SeqRef};

#[derive(Clone, Debug)]
enum Op {
    Sequence { prompt: u32 },
    Append { at: Index, n: u32 },
    Extend { at: Index, n: u32, odd: bool },
    Fork { at: Index },
    Truncate { at: Index, to: Index },
    Commit { at: Index, n: Option<Index> },
    Free { at: Index },
    Drop { at: Index },
    Open { picks: Vec<(Index, u32)>, how: How, distinct: bool, ids: bool, odd: bool },
    End { at: Index, how: Ending },
    Reorder { picks: Vec<Index>, indices: Vec<usize>, distinct: bool },
    Alloc { n: usize },
    Retain { at: Index, page: Index },
    Release { at: Index },
}

#[derive(Clone, Copy, Debug)]
enum Ending {
    Commit,
    Keep(Index),
    Close,
    Drop,
}

#[derive(Clone, Copy, Debug)]
enum How {
    Each,
    Counts,
    Reserved,
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<Index>;
    let picks =
        || prop::collection::vec((index(), prop_oneof![1 => Just(0), 6 => 1_u32..5, 1 => 5_u32..20]), 1..5);
    let how = prop_oneof![Just(How::Each), Just(How::Counts), Just(How::Counts), Just(How::Reserved)];
    let ending = prop_oneof![
        3 => Just(Ending::Commit),
        4 => index().prop_map(Ending::Keep),
        2 => Just(Ending::Close),
        1 => Just(Ending::Drop),
    ];
    let usually = || prop::bool::weighted(0.9);
    let rarely = || prop::bool::weighted(0.1);
    prop_oneof![
        4 => (0_u32..6).prop_map(|prompt| Op::Sequence { prompt }),
        2 => (index(), 0_u32..9).prop_map(|(at, n)| Op::Append { at, n }),
        2 => (index(), 0_u32..6, rarely()).prop_map(|(at, n, odd)| Op::Extend { at, n, odd }),
        6 => index().prop_map(|at| Op::Fork { at }),
        3 => (index(), index()).prop_map(|(at, to)| Op::Truncate { at, to }),
        2 => (index(), prop::option::of(index())).prop_map(|(at, n)| Op::Commit { at, n }),
        1 => index().prop_map(|at| Op::Free { at }),
        2 => index().prop_map(|at| Op::Drop { at }),
        10 => (picks(), how, usually(), any::<bool>(), rarely()).prop_map(
            |(picks, how, distinct, ids, odd)| Op::Open { picks, how, distinct, ids, odd }
        ),
        9 => (index(), ending).prop_map(|(at, how)| Op::End { at, how }),
        1 => (prop::collection::vec(index(), 0..4), prop::collection::vec(0_usize..4, 0..5), usually())
            .prop_map(|(picks, indices, distinct)| Op::Reorder { picks, indices, distinct }),
        1 => (0_usize..8).prop_map(|n| Op::Alloc { n }),
        1 => (index(), index()).prop_map(|(at, page)| Op::Retain { at, page }),
        2 => index().prop_map(|at| Op::Release { at }),
    ]
}

struct Machine<const LEAF: usize, const SHARDS: usize> {
    tables: Arc<Tables<LEAF, SHARDS>>,
    stamps: Arc<Stamps>,
    model: Model,
    seqs: Vec<(Sequence<LEAF, SHARDS>, SeqRef)>,
    batches: Vec<(TableBatch<LEAF, SHARDS>, Batch)>,
    handles: Vec<(PageHandle, Page)>,
    stale: Vec<PageHandle>,
    next: u64,
}

/// The library's result and the model's are of one kind, with the same numbers.
fn agree<T, U>(real: Result<T>, expected: Result<U>, deferred: u64) -> Option<(T, U)> {
    let (error, wanted) = match (real, expected) {
        (Ok(real), Ok(expected)) => return Some((real, expected)),
        (Err(error), Err(wanted)) => (error, wanted),
        (Ok(_), Err(wanted)) => panic!("it went well instead of failing: {wanted:?}"),
        (Err(error), Ok(_)) => panic!("{error:?} for no reason"),
    };
    match (&error, wanted) {
        (Error::Value(_), Error::Value(_)) => {}
        (Error::SequenceBusy { index, .. }, Error::SequenceBusy { index: wanted, .. }) => {
            assert_eq!(*index, wanted);
        }
        (_, Error::OutOfPages { requested, free, evictable, index, .. }) => {
            assert_eq!(error, Error::OutOfPages { requested, free, evictable, deferred, index });
        }
        (_, wanted) => assert_eq!(error, wanted),
    }
    None
}

#[track_caller]
fn same<T: PartialEq + Debug>(what: &str, real: &T, model: &T) {
    assert_eq!(real, model, "{what}: the library has the first, the model the second");
}

impl<const LEAF: usize, const SHARDS: usize> Machine<LEAF, SHARDS> {
    fn new(num_pages: u32, page_size: u32, first_page: u32, copier: bool) -> Self {
        let stamps = Stamps::new(first_page + num_pages, page_size);
        let copies = copier.then(|| Box::new(Copier(Arc::clone(&stamps))) as Box<dyn CopyPages>);
        let pool = PagePool::new(num_pages, first_page).expect("a small pool");
        Self {
            tables: Arc::new(Tables::new(pool, page_size, copies)),
            stamps,
            model: Model::new(num_pages, page_size, copier),
            seqs: Vec::new(),
            batches: Vec::new(),
            handles: Vec::new(),
            stale: Vec::new(),
            next: 1,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn ids(&mut self, n: u32) -> Vec<u32> {
        (0..n).map(|_| self.fresh() as u32).collect()
    }

    fn write(&mut self, page: PageId, position: u32) -> u64 {
        let stamp = self.fresh();
        self.stamps.write(page, (position % self.model.page_size) as usize, stamp);
        stamp
    }

    fn run(&mut self, op: &Op) {
        let deferred = self.stats().deferred;
        let seq = |at: &Index| (!self.seqs.is_empty()).then(|| at.index(self.seqs.len()));
        match op {
            Op::Sequence { prompt } => {
                let ids = self.ids(*prompt);
                let real = self.tables.sequence(&ids);
                let place = real.id() as u32;
                self.seqs.push((real, Model::sequence(&ids, place)));
            }
            Op::Append { at, n } => {
                let Some(at) = seq(at) else { return };
                let (real, model) = &self.seqs[at];
                agree(real.append(*n), self.model.reserve(model, *n, &[]), deferred);
            }
            Op::Extend { at, n, odd } => {
                let Some(at) = seq(at) else { return };
                let ids = self.ids_to_extend(at, *n, *odd);
                let (real, model) = &self.seqs[at];
                agree(real.extend(&ids), self.model.reserve(model, *n, &ids), deferred);
            }
            Op::Fork { at } => {
                let Some(at) = seq(at) else { return };
                let (real, model) = &self.seqs[at];
                if let Some((real, child)) = agree(real.fork(), self.model.fork(model, 0), deferred) {
                    self.adopt(real, child);
                }
            }
            Op::Truncate { at, to } => {
                let Some(at) = seq(at) else { return };
                let (real, model) = &self.seqs[at];
                let to = to.index(model.borrow().len as usize + 2) as u32;
                agree(real.truncate(to), self.model.truncate(model, to), deferred);
            }
            Op::Commit { at, n } => {
                let Some(at) = seq(at) else { return };
                let n = n.map(|n| n.index(self.seqs[at].1.borrow().len as usize + 2) as u32);
                self.commit(at, n);
            }
            Op::Free { at } => {
                let Some(at) = seq(at) else { return };
                self.seqs[at].0.free();
                self.model.free_seq(&self.seqs[at].1);
            }
            Op::Drop { at } => {
                let Some(at) = seq(at) else { return };
                let (real, model) = self.seqs.swap_remove(at);
                drop(real);
                self.model.free_seq(&model);
            }
            Op::Open { picks, how, distinct, ids, odd } => {
                let mut picks: Vec<(usize, u32)> =
                    picks.iter().filter_map(|(at, n)| Some((seq(at)?, *n))).collect();
                if *distinct {
                    let mut seen = Vec::new();
                    picks.retain(|(at, _)| !seen.contains(at) && (seen.push(*at), true).1);
                }
                self.open(&picks, *how, ids.then_some(*odd), deferred);
            }
            Op::End { at, how } => {
                if !self.batches.is_empty() {
                    let batch = self.batches.swap_remove(at.index(self.batches.len()));
                    self.end(batch, *how);
                }
            }
            Op::Reorder { picks, indices, distinct } => {
                let mut picks: Vec<usize> = picks.iter().filter_map(seq).collect();
                if *distinct {
                    picks.sort_unstable();
                    picks.dedup();
                }
                self.reorder(&picks, indices, deferred);
            }
            Op::Alloc { n } => {
                let (requested, total) = (*n as u64, u64::from(self.model.total));
                let free = u64::from(self.model.free());
                let expected = if requested > total {
                    Err(Error::NeverFits { requested, total, index: None })
                } else if requested > free {
                    Err(Error::OutOfPages { requested, free, evictable: 0, deferred: 0, index: None })
                } else {
                    Ok(self.model.take(*n as u32))
                };
                if let Some((handles, pages)) = agree(self.tables.pool().alloc(*n), expected, 0) {
                    self.handles.extend(handles.into_iter().zip(pages));
                }
            }
            Op::Retain { at, page } => {
                let Some(at) = seq(at) else { return };
                let (real, model) = &self.seqs[at];
                let Some(table) = real.block_table().ok().filter(|table| !table.is_empty()) else { return };
                let i = page.index(table.len());
                let handle = self.tables.pool().handle(PageId(table[i] as u32));
                self.tables.pool().retain(&[handle]).expect("a live page");
                let page = Rc::clone(&model.borrow().table.as_ref().expect("held").borrow().pages[i]);
                self.handles.push((handle, page));
            }
            Op::Release { at } => self.release(*at),
        }
    }

    fn adopt(&mut self, real: Sequence<LEAF, SHARDS>, model: SeqRef) {
        model.borrow_mut().place = real.id() as u32;
        self.seqs.push((real, model));
    }

    /// Ids for the next reserved tokens: those known already, where there are any.
    fn ids_to_extend(&mut self, at: usize, n: u32, odd: bool) -> Vec<u32> {
        let ahead = {
            let seq = self.seqs[at].1.borrow();
            if seq.table.is_some() { (seq.len - seq.computed()) as usize } else { 0 }
        };
        self.agreeing_ids(at, ahead, n, odd)
    }

    fn agreeing_ids(&mut self, at: usize, from: usize, n: u32, odd: bool) -> Vec<u32> {
        let fresh = self.ids(n);
        let seq = self.seqs[at].1.borrow();
        let known = |i: usize| if odd { None } else { seq.known.get(from + i).copied().flatten() };
        fresh.iter().enumerate().map(|(i, &id)| known(i).unwrap_or(id)).collect()
    }

    /// Writes into reserved slots without a batch, then declares them computed.
    fn commit(&mut self, at: usize, n: Option<u32>) {
        let (real, model) = (&self.seqs[at].0, Rc::clone(&self.seqs[at].1));
        let wanted = n.unwrap_or(model.borrow().len);
        let allowed = self.model.may_commit(&model, wanted);
        let mut stamps = Vec::new();
        if allowed.is_ok() {
            let slots: Vec<PageId> = (model.borrow().computed()..wanted)
                .map(|position| real.locate(u64::from(position)).expect("a reserved token").0)
                .collect();
            let computed = model.borrow().computed();
            stamps.extend(slots.iter().zip(computed..).map(|(&page, position)| self.write(page, position)));
        }
        if agree(self.seqs[at].0.commit(n), allowed, 0).is_some() {
            Model::commit(&model, wanted, &stamps);
        }
    }

    fn open(&mut self, picks: &[(usize, u32)], how: How, ids: Option<bool>, deferred: u64) {
        let counts: Vec<u32> = picks.iter().map(|pick| pick.1).collect();
        let each = counts.first().copied().unwrap_or(1);
        let (new_tokens, wanted): (_, Vec<Option<u32>>) = match how {
            How::Each => (NewTokens::Each(each), vec![Some(each); picks.len()]),
            How::Counts => (NewTokens::Counts(&counts), counts.iter().copied().map(Some).collect()),
            How::Reserved => (NewTokens::Reserved, vec![None; picks.len()]),
        };
        let ids = ids.map(|odd| {
            let mut all = Vec::new();
            for (&(at, _), n) in picks.iter().zip(&wanted) {
                let n = n.unwrap_or_else(|| {
                    let seq = self.seqs[at].1.borrow();
                    if seq.table.is_some() { seq.len - seq.computed() } else { 0 }
                });
                all.extend(self.agreeing_ids(at, 0, n, odd));
            }
            all
        });
        let real: Vec<&Sequence<LEAF, SHARDS>> = picks.iter().map(|pick| &self.seqs[pick.0].0).collect();
        let opened = self.tables.open(&real, new_tokens, ids.as_deref());
        let seqs: Vec<&SeqRef> = picks.iter().map(|pick| &self.seqs[pick.0].1).collect();
        let expected = self.model.open(&seqs, &wanted, ids.as_deref());
        let Some((batch, mut model)) = agree(opened, expected, deferred) else { return };
        if !self.model.copier {
            self.stamps.copy(batch.copies());
        }
        for (i, item) in model.items.iter_mut().enumerate() {
            let new = item.computed..item.computed + item.new_tokens();
            item.view.extend(new.map(|position| self.write(batch.page(i, position), position)));
        }
        self.batches.push((batch, model));
    }

    fn end(&mut self, (real, model): (TableBatch<LEAF, SHARDS>, Batch), how: Ending) {
        let new_tokens = || model.items.iter().map(model::Item::new_tokens);
        let keep: Option<Vec<u32>> = match how {
            Ending::Commit => Some(new_tokens().collect()),
            Ending::Keep(at) => Some(new_tokens().map(|n| at.index(n as usize + 1) as u32).collect()),
            Ending::Close | Ending::Drop => None,
        };
        self.model.end(model, keep.as_deref());
        let outcome = match how {
            Ending::Drop => return,
            Ending::Close => Outcome::Close,
            Ending::Commit => Outcome::Commit(None),
            Ending::Keep(_) => Outcome::Commit(keep),
        };
        if let Outcome::Commit(Some(keep)) = &outcome {
            real.check_keep(keep).expect("no more than there are");
        }
        assert!(real.end(&outcome) && !real.end(&outcome), "it ends once");
    }

    fn reorder(&mut self, picks: &[usize], indices: &[usize], deferred: u64) {
        let real: Vec<&Sequence<LEAF, SHARDS>> = picks.iter().map(|&at| &self.seqs[at].0).collect();
        let seqs: Vec<&SeqRef> = picks.iter().map(|&at| &self.seqs[at].1).collect();
        let expected = self.model.reorder(&seqs, indices);
        let Some((real, model)) = agree(self.tables.reorder(&real, indices), expected, deferred) else {
            return;
        };
        for (real, model) in real.into_iter().zip(model) {
            match (real, model) {
                (Pick::Forked(real), Some(child)) => self.adopt(real, child),
                (Pick::Moved(_), None) => {}
                other => panic!("moved or forked? {:?}", other.0),
            }
        }
    }

    fn release(&mut self, at: Index) {
        if let Some(&stale) = self.stale.last() {
            let refused = self.tables.pool().release(&[stale]);
            assert!(matches!(refused, Err(Error::RefCount { .. })), "{refused:?} of a stale handle");
        }
        if !self.handles.is_empty() {
            let (handle, page) = self.handles.swap_remove(at.index(self.handles.len()));
            self.tables.pool().release(&[handle]).expect("held");
            if Rc::strong_count(&page) == 1 {
                self.stale.push(handle);
            }
        }
    }

    fn stats(&self) -> paged_kv::table::TableStats {
        let seqs: Vec<&SeqRef> = self.seqs.iter().map(|(_, model)| model).collect();
        let batches: Vec<&Batch> = self.batches.iter().map(|(_, model)| model).collect();
        let handles: Vec<Page> = self.handles.iter().map(|(_, page)| Rc::clone(page)).collect();
        self.model.stats(&seqs, &batches, &handles)
    }

    /// A walk over all pages says the same as the statistics, and of each page what it is.
    fn check_survey(&self) {
        let mut states = [0_u64; 6];
        let survey = self.tables.survey(|view| {
            states[view.state as usize] += 1;
            same("references", &view.ref_count, &self.tables.pool().ref_count(view.page));
            let handle = self.tables.pool().handle(view.page);
            match view.owner {
                Some(owner) => assert!(self.tables.owners(handle).expect("held").contains(&owner)),
                None => assert!(
                    self.tables.owners(handle).is_ok_and(|owners| owners.is_empty())
                        || view.state == PageState::Free
                ),
            }
        });
        let stats = self.stats();
        same("statistics of the walk", &survey.stats, &stats);
        let by = [survey.by_sequences, survey.by_batches, survey.by_handles];
        let live = u64::from(self.model.total) - u64::from(self.model.free()) - stats.deferred;
        same("pages by holder", &[by[0], by.iter().sum()], &[stats.held, live]);
        let [free, _, shared, cached, deferred, null] = states;
        let all = [u64::from(self.model.free()), stats.shared, 0, stats.deferred, 0];
        same("pages by state", &[free, shared, cached, deferred, null], &all);
        for holder in &survey.sequences {
            assert!(holder.exclusive_pages <= holder.stats.num_pages);
        }
    }

    /// Everything that can be observed is what the model says.
    fn check(&self) {
        same("free pages", &self.tables.pool().num_free(), &u64::from(self.model.free()));
        same("statistics", &self.tables.stats(), &self.stats());
        same("deferred pages", &self.tables.deferred_pages(), &self.stats().deferred);
        same("copied pages", &self.tables.copied_pages(), &self.model.copied);
        self.check_survey();
        self.tables.validate().expect("valid");
        // One physical page for each page of the model.
        let mut pages: BTreeMap<i32, *const model::Held> = BTreeMap::new();
        for (real, seq) in &self.seqs {
            let seq = seq.borrow();
            if seq.freed {
                assert!(matches!(real.len(), Err(Error::SequenceFreed { .. })));
                continue;
            }
            let version = seq.table.as_ref().expect("held").borrow();
            let table = real.block_table().expect("live");
            same("length", &real.len().expect("live"), &seq.len);
            same("computed", &real.num_computed_tokens().expect("live"), &version.computed);
            same("pages", &table.len(), &version.pages.len());
            for (&physical, page) in table.iter().zip(&version.pages) {
                let before = pages.insert(physical, Rc::as_ptr(page));
                assert!(before.is_none_or(|before| before == Rc::as_ptr(page)), "page {physical} is two");
            }
            same("content", &self.stamps.read_table(&table, version.computed), &seq.content);
            if let Ok(pending) = real.pending_ids() {
                same("ids", &pending, &seq.known.iter().map_while(|id| *id).collect());
            }
        }
        for (real, model) in &self.batches {
            for (i, (got, item)) in real.items().zip(&model.items).enumerate() {
                same("batch", &(got.computed, got.new_tokens), &(item.computed, item.new_tokens()));
                let mut row = vec![-1; self.model.pages_for(got.seq_len())];
                real.copy_row(i, &mut row);
                same("view", &self.stamps.read_table(&row, got.seq_len()), &item.view);
            }
        }
    }

    fn finish(mut self) {
        self.batches.clear();
        self.seqs.clear();
        for (handle, _) in self.handles.drain(..) {
            self.tables.pool().release(&[handle]).expect("held");
        }
        self.tables.validate().expect("valid");
        same("free pages at the end", &self.tables.pool().num_free(), &u64::from(self.model.total));
    }
}

fn drive<const LEAF: usize, const SHARDS: usize>(shape: (u32, u32, u32, bool), ops: &[Op]) {
    let (num_pages, page_size, first_page, copier) = shape;
    let mut machine = Machine::<LEAF, SHARDS>::new(num_pages, page_size, first_page, copier);
    let first = [Op::Sequence { prompt: 0 }, Op::Sequence { prompt: 3 }];
    for op in first.iter().chain(ops) {
        machine.run(op);
        machine.check();
    }
    machine.finish();
}

fn shape() -> impl Strategy<Value = (u32, u32, u32, bool)> {
    let page_size = prop::sample::select(vec![1_u32, 2, 3, 4, 5, 7, 16]);
    (prop_oneof![1 => 1_u32..8, 4 => 8_u32..80], page_size, 0_u32..2, any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 20_000, ..ProptestConfig::default() })]

    #[test]
    fn i12_any_operations_in_any_order_agree_with_the_model(
        shape in shape(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        drive::<4, 2>(shape, &ops);
    }

    #[test]
    fn i6_tables_of_many_small_leaves_agree_with_the_model(
        shape in shape(),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        drive::<2, 1>(shape, &ops);
    }
}
