//! One of the threads that share a cache: what it owns, what it knows, what it does at random.

use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use paged_kv::error::{Error, Result};
use paged_kv::ids::PageHandle;
use paged_kv::table::{Outcome, Pick, Sequence};

use crate::backend::Backend;
use crate::common::Random;

/// Sequences that a thread owns, tokens that a sequence grows to, things held at once.
const OWNED: usize = 10;
const LONGEST: usize = 30;
const HELD: usize = 6;
/// Sequences that everybody sees.
const BOARD: usize = 8;

/// A sequence and the contents it has had. The owner notes each content before it takes effect.
pub(crate) struct Shared<const LEAF: usize, const SHARDS: usize> {
    seq: Sequence<LEAF, SHARDS>,
    log: Mutex<Vec<Vec<u64>>>,
}

impl<const LEAF: usize, const SHARDS: usize> Shared<LEAF, SHARDS> {
    fn log(&self) -> std::sync::MutexGuard<'_, Vec<Vec<u64>>> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The entry that counts now: the last one, or the one before if that is still to come.
    fn now(&self) -> usize {
        self.log().len().saturating_sub(2)
    }

    fn had_since(&self, start: usize, content: &[u64]) -> bool {
        self.log()[start..].iter().any(|entry| entry == content)
    }
}

struct Own<const LEAF: usize, const SHARDS: usize> {
    shared: Arc<Shared<LEAF, SHARDS>>,
    content: Vec<u64>,
}

impl<const LEAF: usize, const SHARDS: usize> Own<LEAF, SHARDS> {
    fn new(seq: Sequence<LEAF, SHARDS>, content: Vec<u64>) -> Self {
        let log = Mutex::new(vec![content.clone()]);
        Self { shared: Arc::new(Shared { seq, log }), content }
    }

    fn announce(&self, content: &[u64]) {
        self.shared.log().push(content.to_vec());
    }

    fn withdraw(&self) {
        self.shared.log().pop();
    }
}

/// A batch held open, and what each of its sequences shows.
struct Lease<B> {
    batch: B,
    views: Vec<Vec<u64>>,
}

pub(crate) type Gift<const LEAF: usize, const SHARDS: usize> = (Sequence<LEAF, SHARDS>, Vec<u64>);
pub(crate) type Board<const LEAF: usize, const SHARDS: usize> = Mutex<Vec<Arc<Shared<LEAF, SHARDS>>>>;

pub(crate) struct Worker<'a, const LEAF: usize, const SHARDS: usize, B: Backend<LEAF, SHARDS>> {
    backend: &'a B,
    board: &'a Board<LEAF, SHARDS>,
    inbox: Receiver<Gift<LEAF, SHARDS>>,
    outboxes: Vec<Sender<Gift<LEAF, SHARDS>>>,
    random: Random,
    stamp: u64,
    owns: Vec<Own<LEAF, SHARDS>>,
    leases: Vec<Lease<B::Batch>>,
    open: Vec<(Lease<B::Batch>, Vec<Own<LEAF, SHARDS>>)>,
    pages: Vec<(PageHandle, Vec<u64>)>,
    /// How often operations went well, found no pages, somebody busy, or a sequence freed.
    pub(crate) outcomes: [u64; 4],
}

impl<'a, const LEAF: usize, const SHARDS: usize, B: Backend<LEAF, SHARDS>> Worker<'a, LEAF, SHARDS, B> {
    /// Thread number `me`.
    pub(crate) fn new(
        backend: &'a B,
        board: &'a Board<LEAF, SHARDS>,
        inbox: Receiver<Gift<LEAF, SHARDS>>,
        outboxes: Vec<Sender<Gift<LEAF, SHARDS>>>,
        seed: u64,
        me: u64,
    ) -> Self {
        Self {
            backend,
            board,
            inbox,
            outboxes,
            random: Random::new(seed.wrapping_mul(1 << 20).wrapping_add(me)),
            stamp: (me << 40) + 1,
            owns: Vec::new(),
            leases: Vec::new(),
            open: Vec::new(),
            pages: Vec::new(),
            outcomes: [0; 4],
        }
    }
}

#[expect(clippy::unnecessary_wraps, reason = "all operations have one signature")]
impl<const LEAF: usize, const SHARDS: usize, B: Backend<LEAF, SHARDS>> Worker<'_, LEAF, SHARDS, B> {
    pub(crate) fn run(&mut self, ops: u64) {
        for _ in 0..ops {
            self.owns.extend(self.inbox.try_iter().map(|(seq, content)| Own::new(seq, content)));
            while self.owns.len() > OWNED {
                self.drop_one();
            }
            let result = match self.random.below(24) {
                0 | 1 => self.begin(),
                2..=6 => self.open(),
                7..=10 => self.end(),
                11 => self.truncate(),
                12 => self.append(),
                13 => self.fork(),
                14 => self.give(),
                15 => self.reorder(),
                16 => self.lease_own(),
                17 => self.lease_foreign(),
                18 => self.fork_foreign(),
                19 => self.claim_foreign(),
                20 => self.take_pages(),
                21 => self.give_pages(),
                22 => self.show(),
                _ => self.seldom(),
            };
            let outcome = match result {
                Ok(()) => 0,
                Err(Error::OutOfPages { .. }) => 1,
                Err(Error::SequenceBusy { .. }) => 2,
                Err(Error::SequenceFreed { .. }) => 3,
                Err(error) => panic!("{error}"),
            };
            self.outcomes[outcome] += 1;
        }
    }

    fn stamps(&mut self, n: u32) -> Vec<u64> {
        let first = self.stamp;
        self.stamp += u64::from(n);
        (first..self.stamp).collect()
    }

    /// A sequence of ours, out of the list.
    fn pick(&mut self) -> Option<Own<LEAF, SHARDS>> {
        (!self.owns.is_empty()).then(|| self.owns.swap_remove(self.random.below(self.owns.len())))
    }

    /// Back into the list, unless somebody freed it.
    fn put(&mut self, own: Own<LEAF, SHARDS>) {
        self.put_all([own]);
    }

    fn put_all(&mut self, owns: impl IntoIterator<Item = Own<LEAF, SHARDS>>) {
        self.owns.extend(owns.into_iter().filter(|own| !own.shared.seq.is_freed()));
    }

    fn foreign(&mut self) -> Option<Arc<Shared<LEAF, SHARDS>>> {
        let board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        (!board.is_empty()).then(|| Arc::clone(&board[self.random.below(board.len())]))
    }

    fn drop_one(&mut self) {
        if let Some(own) = self.pick() {
            own.shared.seq.free();
        }
    }

    fn begin(&mut self) -> Result<()> {
        self.owns.push(Own::new(self.backend.tables().sequence(&[]), Vec::new()));
        Ok(())
    }

    /// Opens a batch over a few of our sequences and writes its new tokens.
    fn open(&mut self) -> Result<()> {
        if self.open.len() >= HELD {
            return self.end();
        }
        let mut owns: Vec<_> = (0..=self.random.below(3)).filter_map(|_| self.pick()).collect();
        owns.retain(|own| !own.shared.seq.is_freed());
        let counts: Vec<u32> = owns.iter().map(|_| self.random.below(7) as u32).collect();
        let seqs: Vec<&Sequence<LEAF, SHARDS>> = owns.iter().map(|own| &own.shared.seq).collect();
        match self.backend.open(&seqs, &counts) {
            Err(error) => {
                self.put_all(owns);
                Err(error)
            }
            Ok(batch) => {
                let stamps = self.stamps(counts.iter().sum());
                self.backend.write(&batch, &stamps);
                let mut rest = stamps.as_slice();
                let views = owns.iter().zip(counts).map(|(own, n)| {
                    let (new, behind) = rest.split_at(n as usize);
                    rest = behind;
                    [&own.content, new].concat()
                });
                let views = views.collect();
                self.open.push((Lease { batch, views }, owns));
                Ok(())
            }
        }
    }

    /// Ends a batch of ours: commits all or a part, or closes it.
    fn end(&mut self) -> Result<()> {
        if self.open.is_empty() {
            return Ok(());
        }
        let (lease, mut owns) = self.open.swap_remove(self.random.below(self.open.len()));
        self.check(&lease);
        let items = self.backend.items(&lease.batch);
        if self.random.once_in(4) {
            if self.random.once_in(2) {
                self.backend.end(&lease.batch, &Outcome::Close);
            }
            drop(lease);
        } else {
            let keep: Vec<u32> =
                items.iter().map(|item| self.random.below(item.new_tokens as usize + 1) as u32).collect();
            for ((own, view), (item, keep)) in owns.iter_mut().zip(lease.views).zip(items.iter().zip(&keep)) {
                if item.new_tokens > 0 {
                    own.content = view[..(item.computed + keep) as usize].to_vec();
                    own.announce(&own.content);
                }
            }
            self.backend.end(&lease.batch, &Outcome::Commit(Some(keep)));
        }
        owns.retain(|own| own.content.len() <= LONGEST || (own.shared.seq.free(), false).1);
        self.put_all(owns);
        Ok(())
    }

    fn check(&self, lease: &Lease<B::Batch>) {
        for (i, view) in lease.views.iter().enumerate() {
            assert_eq!(&self.read(&lease.batch, i), view, "a lease's view changed");
        }
    }

    fn read(&self, batch: &B::Batch, i: usize) -> Vec<u64> {
        let page_size = self.backend.tables().page_size() as usize;
        let (row, len) = (self.backend.row(batch, i), self.backend.items(batch)[i].seq_len() as usize);
        (0..len).map(|p| self.backend.read(row[p / page_size], p % page_size)).collect()
    }

    fn truncate(&mut self) -> Result<()> {
        let Some(mut own) = self.pick() else { return Ok(()) };
        let n = self.random.below(own.content.len() + 1);
        own.announce(&own.content[..n]);
        let truncated = own.shared.seq.truncate(n as u32);
        match truncated {
            Ok(()) => own.content.truncate(n),
            Err(_) => own.withdraw(),
        }
        self.put(own);
        truncated
    }

    fn append(&mut self) -> Result<()> {
        let Some(own) = self.pick() else { return Ok(()) };
        let appended = own.shared.seq.append(self.random.below(9) as u32);
        self.put(own);
        appended
    }

    /// A fork of one of our own, which nobody else changes.
    fn child(&mut self) -> Result<Option<Gift<LEAF, SHARDS>>> {
        let Some(own) = self.pick() else { return Ok(None) };
        let child = own.shared.seq.fork().map(|child| Some((child, own.content.clone())));
        self.put(own);
        child
    }

    fn fork(&mut self) -> Result<()> {
        let child = self.child()?;
        self.owns.extend(child.map(|(seq, content)| Own::new(seq, content)));
        Ok(())
    }

    fn give(&mut self) -> Result<()> {
        if let Some(gift) = self.child()? {
            let to = self.random.below(self.outboxes.len());
            self.outboxes[to].send(gift).expect("every thread keeps its inbox");
        }
        Ok(())
    }

    fn reorder(&mut self) -> Result<()> {
        let owns: Vec<_> = (0..=self.random.below(3)).filter_map(|_| self.pick()).collect();
        let n = if owns.is_empty() { 0 } else { self.random.below(4) };
        let indices: Vec<usize> = (0..n).map(|_| self.random.below(owns.len())).collect();
        let seqs: Vec<&Sequence<LEAF, SHARDS>> = owns.iter().map(|own| &own.shared.seq).collect();
        let picks = self.backend.tables().reorder(&seqs, &indices);
        let forks = |(pick, index): (Pick<LEAF, SHARDS>, usize)| match pick {
            Pick::Forked(seq) => Some(Own::new(seq, owns[index].content.clone())),
            Pick::Moved(_) => None,
        };
        let forked = picks.map(|picks| picks.into_iter().zip(indices).filter_map(forks).collect::<Vec<_>>());
        self.put_all(owns);
        self.owns.extend(forked?);
        Ok(())
    }

    fn keep_lease(&mut self, lease: Lease<B::Batch>) {
        self.leases.push(lease);
        if self.leases.len() > HELD {
            let lease = self.leases.swap_remove(self.random.below(HELD));
            self.check(&lease);
        }
    }

    fn lease_own(&mut self) -> Result<()> {
        let Some(own) = self.pick() else { return Ok(()) };
        let opened = self.backend.open(&[&own.shared.seq], &[0]);
        let view = own.content.clone();
        self.put(own);
        let lease = Lease { batch: opened?, views: vec![view] };
        self.check(&lease);
        self.keep_lease(lease);
        Ok(())
    }

    fn lease_foreign(&mut self) -> Result<()> {
        let Some(shared) = self.foreign() else { return Ok(()) };
        let start = shared.now();
        let batch = self.backend.open(&[&shared.seq], &[0])?;
        let view = self.read(&batch, 0);
        assert!(shared.had_since(start, &view), "a lease found {view:?}, which the sequence never held");
        self.keep_lease(Lease { batch, views: vec![view] });
        Ok(())
    }

    fn fork_foreign(&mut self) -> Result<()> {
        let Some(shared) = self.foreign() else { return Ok(()) };
        let start = shared.now();
        let seq = shared.seq.fork()?;
        let batch = self.backend.open(&[&seq], &[0])?;
        let content = self.read(&batch, 0);
        assert!(shared.had_since(start, &content), "a fork holds {content:?}, which its parent never held");
        self.owns.push(Own::new(seq, content));
        Ok(())
    }

    /// Takes the claim away from the owner for a moment; closing leaves no trace.
    fn claim_foreign(&mut self) -> Result<()> {
        let Some(shared) = self.foreign() else { return Ok(()) };
        let n = 1 + self.random.below(5) as u32;
        let batch = self.backend.open(&[&shared.seq], &[n])?;
        let stamps = self.stamps(n);
        self.backend.write(&batch, &stamps);
        assert!(self.read(&batch, 0).ends_with(&stamps), "somebody else wrote into our slots");
        self.backend.end(&batch, &Outcome::Close);
        Ok(())
    }

    fn take_pages(&mut self) -> Result<()> {
        let tables = self.backend.tables();
        if self.pages.len() >= HELD {
            return self.give_pages();
        }
        for handle in tables.pool().alloc(1 + self.random.below(3))? {
            let stamps = self.stamps(tables.page_size());
            for (offset, &stamp) in stamps.iter().enumerate() {
                self.backend.write_slot(handle.page(), offset, stamp);
            }
            self.pages.push((handle, stamps));
        }
        Ok(())
    }

    fn give_pages(&mut self) -> Result<()> {
        let Some((handle, stamps)) = self.pages.pop() else { return Ok(()) };
        let found = (0..stamps.len()).map(|offset| self.backend.read(handle.page(), offset));
        assert!(found.eq(stamps), "somebody wrote into a page that a handle holds");
        let pool = self.backend.tables().pool();
        pool.release(&[handle])?;
        assert!(matches!(pool.release(&[handle]), Err(Error::RefCount { .. })), "released twice");
        Ok(())
    }

    /// Puts one of ours on the board; what leaves the board lives as long as somebody uses it.
    fn show(&mut self) -> Result<()> {
        let Some(own) = self.pick() else { return Ok(()) };
        let mut board = self.board.lock().unwrap_or_else(PoisonError::into_inner);
        let gone = if board.len() < BOARD { None } else { Some(board.swap_remove(self.random.below(BOARD))) };
        board.push(Arc::clone(&own.shared));
        drop(board);
        drop(gone);
        self.put(own);
        Ok(())
    }

    fn seldom(&mut self) -> Result<()> {
        match self.random.below(6) {
            0 => {
                if let Some(shared) = self.foreign() {
                    shared.seq.free();
                    assert!(matches!(shared.seq.fork().map(drop), Err(Error::SequenceFreed { .. })));
                }
            }
            1 => self.backend.check_sums(),
            2 => {
                self.backend.tables().deferred_pages();
            }
            3 => {
                if let Some(own) = self.owns.first()
                    && let Ok((page, _)) = own.shared.seq.locate(0)
                {
                    let _ = self.backend.tables().owners(self.backend.tables().pool().handle(page));
                }
            }
            _ => self.drop_one(),
        }
        Ok(())
    }

    /// Everything this thread knows is so. At rest.
    pub(crate) fn check_all(&self) {
        self.open.iter().map(|(lease, _)| lease).chain(&self.leases).for_each(|lease| self.check(lease));
        for own in self.owns.iter().filter(|own| !own.shared.seq.is_freed()) {
            let batch = self.backend.open(&[&own.shared.seq], &[0]).expect("nobody runs");
            assert_eq!(self.read(&batch, 0), own.content);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.open.clear();
        self.leases.clear();
        self.owns.clear();
        while !self.pages.is_empty() {
            self.give_pages().expect("held");
        }
        self.inbox.try_iter().for_each(drop);
    }
}
