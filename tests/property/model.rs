//! Page tables as anyone would write them for one thread: lists, `Rc` and `RefCell`. A page is
//! free when the last `Rc` to it is gone.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use paged_kv::error::{Error, Result};

/// A page that somebody holds.
pub(crate) struct Held(Rc<Cell<u32>>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}

pub(crate) type Page = Rc<Held>;

/// A table of which readers see the computed part.
pub(crate) struct Version {
    pub(crate) pages: Vec<Page>,
    pub(crate) computed: u32,
}

pub(crate) type Table = Rc<RefCell<Version>>;

pub(crate) struct Seq {
    /// None once freed and left by its batch.
    pub(crate) table: Option<Table>,
    pub(crate) len: u32,
    /// Stamps of computed tokens.
    pub(crate) content: Vec<u64>,
    /// Ids from the first uncomputed token on; the first `prompt` stay until computed.
    pub(crate) known: Vec<Option<u32>>,
    prompt: usize,
    busy: bool,
    pub(crate) freed: bool,
    /// Order in which batches look at sequences.
    pub(crate) place: u32,
}

pub(crate) type SeqRef = Rc<RefCell<Seq>>;

pub(crate) enum Hold {
    Pin(Table),
    Claim { seq: SeqRef, draft: Option<Table>, pages_before: usize, len_before: u32 },
}

/// One sequence in an open batch.
pub(crate) struct Item {
    pub(crate) hold: Hold,
    pub(crate) computed: u32,
    /// Stamps of all tokens that the batch sees, new ones behind the computed ones.
    pub(crate) view: Vec<u64>,
    target: u32,
}

impl Item {
    pub(crate) fn new_tokens(&self) -> u32 {
        self.target - self.computed
    }
}

pub(crate) struct Batch {
    pub(crate) items: Vec<Item>,
}

pub(crate) struct Model {
    pub(crate) page_size: u32,
    pub(crate) total: u32,
    free: Rc<Cell<u32>>,
    /// Whether `append` may copy, there being somebody to carry it out.
    pub(crate) copier: bool,
    pub(crate) copied: u64,
}

pub(crate) fn freed() -> Error {
    Error::SequenceFreed { indices: Vec::new() }
}

pub(crate) fn busy(index: Option<usize>) -> Error {
    Error::SequenceBusy { sequence: 0, index }
}

pub(crate) fn value() -> Error {
    Error::Value(String::new())
}

impl Seq {
    pub(crate) fn computed(&self) -> u32 {
        self.table.as_ref().expect("held").borrow().computed
    }

    fn claimable(&self, index: Option<usize>) -> Result<()> {
        match (self.freed, self.busy) {
            (true, _) => Err(freed()),
            (_, true) => Err(busy(index)),
            _ => Ok(()),
        }
    }

    fn mismatch(&self, from: usize, ids: &[u32]) -> bool {
        self.known.iter().skip(from).zip(ids).any(|(known, id)| known.is_some_and(|known| known != *id))
    }

    fn advance_ids(&mut self, computed: usize, keep: usize) {
        self.known.drain(..computed.min(self.known.len()));
        self.prompt = self.prompt.saturating_sub(computed);
        self.known.truncate(keep.max(self.prompt));
    }
}

impl Model {
    pub(crate) fn new(total: u32, page_size: u32, copier: bool) -> Self {
        Self { page_size, total, free: Rc::new(Cell::new(total)), copier, copied: 0 }
    }

    pub(crate) fn free(&self) -> u32 {
        self.free.get()
    }

    pub(crate) fn pages_for(&self, tokens: u32) -> usize {
        tokens.div_ceil(self.page_size) as usize
    }

    pub(crate) fn take(&self, n: u32) -> Vec<Page> {
        self.free.set(self.free.get().checked_sub(n).expect("checked before"));
        (0..n).map(|_| Rc::new(Held(Rc::clone(&self.free)))).collect()
    }

    fn adopt(pages: Vec<Page>, computed: u32, content: Vec<u64>, prompt: &[u32], place: u32) -> SeqRef {
        Rc::new(RefCell::new(Seq {
            table: Some(Rc::new(RefCell::new(Version { pages, computed }))),
            len: computed,
            content,
            known: prompt.iter().copied().map(Some).collect(),
            prompt: prompt.len(),
            busy: false,
            freed: false,
            place,
        }))
    }

    pub(crate) fn sequence(prompt: &[u32], place: u32) -> SeqRef {
        Self::adopt(Vec::new(), 0, Vec::new(), prompt, place)
    }

    pub(crate) fn fork(&self, seq: &SeqRef, place: u32) -> Result<SeqRef> {
        let seq = seq.borrow();
        if seq.freed {
            return Err(freed());
        }
        let table = seq.table.as_ref().expect("held").borrow();
        let pages = table.pages[..self.pages_for(table.computed)].to_vec();
        Ok(Self::adopt(pages, table.computed, seq.content.clone(), &[], place))
    }

    /// Slots that were only reserved go at once, whoever still holds the table.
    fn retire(&self, table: &Table) {
        let mut version = table.borrow_mut();
        let seen = self.pages_for(version.computed);
        version.pages.truncate(seen);
    }

    fn move_head(&self, seq: &mut Seq, table: Table) {
        let old = seq.table.replace(table).expect("held");
        self.retire(&old);
    }

    pub(crate) fn free_seq(&self, seq: &SeqRef) {
        let mut seq = seq.borrow_mut();
        seq.freed = true;
        if !seq.busy
            && let Some(table) = seq.table.take()
        {
            self.retire(&table);
        }
    }

    fn is_shared_tail(&self, seq: &Seq) -> bool {
        let version = seq.table.as_ref().expect("held").borrow();
        let (index, offset) = (version.computed / self.page_size, version.computed % self.page_size);
        offset != 0 && Rc::strong_count(&version.pages[index as usize]) > 1
    }

    /// Reserves up to each target (`None`: a reader), all or nothing; returns the drafts that
    /// copy-on-write asks for.
    fn prepare(&mut self, wanted: &[(&SeqRef, Option<u32>)], cow: bool) -> Result<Vec<Option<Table>>> {
        let total = u64::from(self.total);
        let mut needs = Vec::new();
        for (i, (seq, target)) in wanted.iter().enumerate() {
            let seq = seq.borrow();
            let Some(target) = *target else {
                needs.push((0, false));
                continue;
            };
            let pages = self.pages_for(target);
            if pages as u64 > total {
                return Err(Error::NeverFits { requested: pages as u64, total, index: Some(i) });
            }
            let copies = cow && target > seq.computed() && self.is_shared_tail(&seq);
            let held = seq.table.as_ref().expect("held").borrow().pages.len();
            needs.push((pages.saturating_sub(held) as u64 + u64::from(copies), copies));
        }
        let requested = needs.iter().map(|need| need.0).sum::<u64>();
        let first_beyond = |available: u64| {
            let mut sum = 0;
            needs.iter().position(|need| {
                sum += need.0;
                sum > available
            })
        };
        let (free, deferred) = (u64::from(self.free()), 0);
        if requested > free {
            let index = first_beyond(free);
            return Err(Error::OutOfPages { requested, free, evictable: 0, deferred, index });
        }
        let grow = |(&(need, copies), (seq, _)): (&(u64, bool), &(&SeqRef, Option<u32>))| {
            let mut pages = self.take(need as u32);
            let seq = seq.borrow();
            let head = seq.table.as_ref()?;
            let draft = copies.then(|| {
                let version = head.borrow();
                let mut all = version.pages.clone();
                all[(version.computed / self.page_size) as usize] = pages.remove(0);
                Rc::new(RefCell::new(Version { pages: all, computed: version.computed }))
            });
            draft.as_ref().unwrap_or(head).borrow_mut().pages.extend(pages);
            draft
        };
        let drafts: Vec<Option<Table>> = needs.iter().zip(wanted).map(grow).collect();
        self.copied += drafts.iter().flatten().count() as u64;
        Ok(drafts)
    }

    pub(crate) fn reserve(&mut self, seq: &SeqRef, n: u32, ids: &[u32]) -> Result<()> {
        seq.borrow().claimable(None)?;
        if n == 0 {
            return Ok(());
        }
        let (len, ahead) = (seq.borrow().len, (seq.borrow().len - seq.borrow().computed()) as usize);
        if seq.borrow().mismatch(ahead, ids) {
            return Err(value());
        }
        let prepared = self.prepare(&[(seq, Some(len + n))], self.copier).map_err(|error| match error {
            Error::OutOfPages { requested, free, evictable, deferred, .. } => {
                Error::OutOfPages { requested, free, evictable, deferred, index: None }
            }
            Error::NeverFits { requested, total, .. } => Error::NeverFits { requested, total, index: None },
            other => other,
        });
        let draft = prepared?.pop().expect("one sequence");
        let mut seq = seq.borrow_mut();
        seq.len = len + n;
        if let Some(draft) = draft {
            self.move_head(&mut seq, draft);
        }
        if !ids.is_empty() {
            let room = seq.known.len().max(ahead + ids.len());
            seq.known.resize(room, None);
            seq.known[ahead..ahead + ids.len()]
                .copy_from_slice(&ids.iter().copied().map(Some).collect::<Vec<_>>());
        }
        Ok(())
    }

    pub(crate) fn truncate(&self, seq: &SeqRef, n: u32) -> Result<()> {
        let mut seq = seq.borrow_mut();
        seq.claimable(None)?;
        if n > seq.len {
            return Err(value());
        }
        if n == seq.len {
            return Ok(());
        }
        seq.len = n;
        let computed = seq.computed();
        let keep = n.saturating_sub(computed) as usize;
        seq.prompt = seq.prompt.min(keep);
        seq.known.truncate(keep);
        let kept = self.pages_for(n);
        if n >= computed {
            seq.table.as_ref().expect("held").borrow_mut().pages.truncate(kept);
        } else {
            seq.content.truncate(n as usize);
            let pages = seq.table.as_ref().expect("held").borrow().pages[..kept].to_vec();
            self.move_head(&mut seq, Rc::new(RefCell::new(Version { pages, computed: n })));
        }
        Ok(())
    }

    /// Whether `commit` may declare the first `n` tokens computed.
    pub(crate) fn may_commit(&self, seq: &SeqRef, n: u32) -> Result<()> {
        let seq = seq.borrow();
        seq.claimable(None)?;
        let parted = self.copier || n == seq.computed() || !self.is_shared_tail(&seq);
        if (seq.computed()..=seq.len).contains(&n) && parted { Ok(()) } else { Err(value()) }
    }

    pub(crate) fn commit(seq: &SeqRef, n: u32, stamps: &[u64]) {
        let mut seq = seq.borrow_mut();
        let (more, keep) = ((n - seq.computed()) as usize, (seq.len - n) as usize);
        seq.advance_ids(more, keep);
        seq.content.extend(stamps);
        seq.table.as_ref().expect("held").borrow_mut().computed = n;
    }

    /// `counts`: `None` takes what is reserved.
    pub(crate) fn open(
        &mut self,
        seqs: &[&SeqRef],
        counts: &[Option<u32>],
        ids: Option<&[u32]>,
    ) -> Result<Batch> {
        let at = |error: Error, index: usize| match error {
            Error::SequenceFreed { .. } => Error::SequenceFreed { indices: all_freed(seqs, index) },
            other => other,
        };
        let mut targets = vec![None; seqs.len()];
        for (i, repeated) in in_order(seqs) {
            let seq = seqs[i].borrow();
            if repeated {
                return Err(value());
            }
            if counts[i] == Some(0) {
                if seq.freed {
                    return Err(at(freed(), i));
                }
                continue;
            }
            seq.claimable(Some(i)).map_err(|error| at(error, i))?;
            targets[i] = match counts[i] {
                Some(n) => Some(seq.computed() + n),
                None => (seq.len > seq.computed()).then_some(seq.len),
            };
        }
        let new_tokens =
            |i: usize| targets[i].map_or(0, |target| (target - seqs[i].borrow().computed()) as usize);
        if let Some(mut rest) = ids {
            if rest.len() != (0..seqs.len()).map(new_tokens).sum::<usize>() {
                return Err(value());
            }
            for (i, seq) in seqs.iter().enumerate() {
                let (own, behind) = rest.split_at(new_tokens(i));
                rest = behind;
                if seq.borrow().mismatch(0, own) {
                    return Err(value());
                }
            }
        }
        let wanted: Vec<_> = seqs.iter().copied().zip(targets.iter().copied()).collect();
        let before: Vec<usize> =
            seqs.iter().map(|seq| seq.borrow().table.as_ref().expect("held").borrow().pages.len()).collect();
        let drafts = self.prepare(&wanted, true)?;
        let items =
            wanted.into_iter().zip(drafts).zip(before).map(|(((seq, target), draft), pages_before)| {
                let mut own = seq.borrow_mut();
                let (computed, view) = (own.computed(), own.content.clone());
                let hold = match target {
                    None => Hold::Pin(Rc::clone(own.table.as_ref().expect("held"))),
                    Some(target) => {
                        let len_before = own.len;
                        own.len = own.len.max(target);
                        own.busy = true;
                        Hold::Claim { seq: Rc::clone(seq), draft, pages_before, len_before }
                    }
                };
                Item { hold, computed, view, target: target.unwrap_or(computed) }
            });
        Ok(Batch { items: items.collect() })
    }

    /// Ends a batch; `keep` of `None` closes it.
    pub(crate) fn end(&self, batch: Batch, keep: Option<&[u32]>) {
        for (i, item) in batch.items.into_iter().enumerate() {
            let Hold::Claim { seq, draft, pages_before, len_before } = item.hold else { continue };
            let mut seq = seq.borrow_mut();
            if let Some(keep) = keep.filter(|_| !seq.freed) {
                let n = item.computed + keep[i];
                seq.advance_ids(keep[i] as usize, 0);
                seq.len = n;
                seq.content = item.view[..n as usize].to_vec();
                let pages = self.pages_for(n);
                let table = draft.filter(|_| keep[i] > 0);
                let next = table.as_ref().or(seq.table.as_ref()).expect("held");
                next.borrow_mut().computed = n;
                next.borrow_mut().pages.truncate(pages);
                if let Some(table) = table {
                    self.move_head(&mut seq, table);
                }
            } else {
                drop(draft);
                seq.len = len_before;
                seq.table.as_ref().expect("held").borrow_mut().pages.truncate(pages_before);
            }
            seq.busy = false;
            if seq.freed {
                let table = seq.table.take().expect("held");
                self.retire(&table);
            }
        }
    }

    /// One sequence per index; `None` where the sequence itself stays.
    pub(crate) fn reorder(&self, seqs: &[&SeqRef], indices: &[usize]) -> Result<Vec<Option<SeqRef>>> {
        if indices.iter().any(|&index| index >= seqs.len()) {
            return Err(value());
        }
        let order = in_order(seqs);
        if order.iter().any(|&(_, repeated)| repeated) {
            return Err(value());
        }
        for (i, _) in order {
            let claimed = seqs[i].borrow().claimable(Some(i));
            claimed.map_err(|error| match error {
                Error::SequenceFreed { .. } => Error::SequenceFreed { indices: all_freed(seqs, i) },
                other => other,
            })?;
        }
        let mut picked = vec![false; seqs.len()];
        let pick = |&index: &usize| {
            if std::mem::replace(&mut picked[index], true) {
                self.fork(seqs[index], 0).map(Some)
            } else {
                Ok(None)
            }
        };
        let picks = indices.iter().map(pick).collect::<Result<_>>()?;
        seqs.iter().zip(picked).filter(|(_, picked)| !picked).for_each(|(seq, _)| self.free_seq(seq));
        Ok(picks)
    }
}

/// Positions in the order of the sequences' places, and whether an earlier one names the same
/// sequence.
fn in_order(seqs: &[&SeqRef]) -> Vec<(usize, bool)> {
    let mut order: Vec<usize> = (0..seqs.len()).collect();
    order.sort_by_key(|&i| (seqs[i].borrow().place, i));
    let repeated = |at: usize| {
        let same = |&before: &usize| Rc::ptr_eq(seqs[before], seqs[order[at]]);
        order[..at].iter().any(same)
    };
    (0..order.len()).map(|at| (order[at], repeated(at))).collect()
}

fn all_freed(seqs: &[&SeqRef], index: usize) -> Vec<usize> {
    (0..seqs.len()).filter(|&i| i == index || seqs[i].borrow().freed).collect()
}
