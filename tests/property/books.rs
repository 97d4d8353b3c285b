//! What statistics should say of a model's state.

use std::collections::BTreeMap;
use std::rc::Rc;

use paged_kv::table::TableStats;

use crate::model::{Batch, Held, Hold, Model, Page, SeqRef, Table};

impl Model {
    /// What the tables should say, `seqs` being all sequences whose handle exists.
    pub(crate) fn stats(&self, seqs: &[&SeqRef], batches: &[&Batch], handles: &[Page]) -> TableStats {
        #[derive(Default)]
        struct Use {
            heads: u32,
            drafts: u32,
            handles: u32,
            stored: u32,
        }
        let mut uses: BTreeMap<*const Held, Use> = BTreeMap::new();
        let mut stats = TableStats::default();
        for seq in seqs.iter().map(|seq| seq.borrow()).filter(|seq| !seq.freed) {
            let version = seq.table.as_ref().expect("held").borrow();
            stats.sequences += 1;
            stats.tokens += u64::from(version.computed);
            stats.reserved += u64::from(seq.len - version.computed);
            for (i, page) in version.pages.iter().enumerate() {
                let usage = uses.entry(Rc::as_ptr(page)).or_default();
                usage.heads += 1;
                let stored = version.computed.saturating_sub(i as u32 * self.page_size).min(self.page_size);
                usage.stored = usage.stored.max(stored);
            }
        }
        let mut note = |table: &Table, drafts: u32| {
            for page in &table.borrow().pages {
                uses.entry(Rc::as_ptr(page)).or_default().drafts += drafts;
            }
        };
        for item in batches.iter().flat_map(|batch| &batch.items) {
            match &item.hold {
                Hold::Pin(table) => note(table, 0),
                Hold::Claim { seq, draft, .. } => {
                    note(seq.borrow().table.as_ref().expect("held"), 0);
                    if let Some(draft) = draft {
                        note(draft, 1);
                    }
                }
            }
        }
        for page in handles {
            uses.entry(Rc::as_ptr(page)).or_default().handles += 1;
        }
        for usage in uses.values() {
            stats.held += u64::from(usage.heads > 0);
            stats.shared += u64::from(usage.heads > 1 || (usage.heads > 0 && usage.handles > 0));
            stats.deferred += u64::from(usage.heads + usage.drafts + usage.handles == 0);
            stats.stored += u64::from(usage.stored);
        }
        assert_eq!(uses.len() as u32 + self.free(), self.total, "the model's own books");
        stats
    }
}
