//! Leases of work on a device: which pages stay, what is copied, what comes back.
#![cfg(not(loom))]

use std::collections::HashSet;
use std::sync::Arc;

use paged_kv::pool::PagePool;
use paged_kv::table::{NewTokens, Outcome, Sequence, TableBatch, TableLease, Tables};

type Small = Arc<Tables<4, 2>>;
type Seq = Sequence<4, 2>;

const PAGE_SIZE: u32 = 4;

fn tables(num_pages: u32) -> Small {
    Arc::new(Tables::with_leases(PagePool::new(num_pages, 0).unwrap(), PAGE_SIZE))
}

fn open(tables: &Small, sequence: &Seq, n: u32) -> TableBatch<4, 2> {
    tables.open(&[sequence], NewTokens::Each(n), None).unwrap()
}

/// A batch of `n` tokens, whose work is still under way when it has ended.
fn decode(tables: &Small, sequence: &Seq, n: u32) -> TableLease<4, 2> {
    let batch = open(tables, sequence, n);
    let lease = batch.lease().unwrap();
    batch.end(&Outcome::Commit(None));
    lease
}

fn rest(tables: &Small) {
    tables.validate().unwrap();
    assert_eq!(tables.pool().num_free(), u64::from(tables.pool().num_pages()));
}

#[test]
fn i9_pages_come_back_when_the_lease_goes_and_not_before() {
    let tables = tables(40);
    for tokens in [1, 3, 4, 5, 16, 17, 33, 64] {
        let sequence = tables.sequence(&[]);
        let lease = decode(&tables, &sequence, tokens);
        let held = u64::from(tokens.div_ceil(PAGE_SIZE));
        sequence.free();
        assert_eq!(tables.pool().num_free(), 40 - held);
        assert_eq!(tables.stats().deferred, held);
        tables.validate().unwrap();
        drop(lease);
        assert_eq!(tables.pool().num_free(), 40);
    }
    rest(&tables);
}

#[test]
fn i9_pages_of_rejected_tokens_and_of_closed_batches_stay_until_the_lease_goes() {
    let tables = tables(40);
    let sequence = tables.sequence(&[]);
    drop(decode(&tables, &sequence, 6));
    for outcome in [Outcome::Commit(Some(vec![1])), Outcome::Close] {
        let before = tables.pool().num_free();
        let batch = open(&tables, &sequence, 16 - sequence.len().unwrap());
        let lease = batch.lease().unwrap();
        batch.end(&outcome);
        assert_eq!(tables.pool().num_free(), before - 2, "{outcome:?}");
        drop(lease);
        assert_eq!(tables.pool().num_free(), before, "{outcome:?}");
    }
    sequence.free();
    rest(&tables);
}

#[test]
fn i7_truncate_and_append_under_a_lease_copies_only_what_another_sequence_holds() {
    let tables = tables(200);
    // The last leaf, of 16 tokens, is counted page by page, and the one before it.
    for (tokens, left) in [(6, 5), (17, 15), (32, 18), (33, 18), (100, 85)] {
        let sequence = tables.sequence(&[]);
        let first = decode(&tables, &sequence, tokens);
        let second = decode(&tables, &sequence, 1);
        sequence.truncate(left).unwrap();
        let batch = open(&tables, &sequence, 3);
        assert_eq!(batch.copies(), [], "{tokens} tokens, {left} left");
        batch.end(&Outcome::Commit(None));
        sequence.truncate(left).unwrap();
        let fork = sequence.fork().unwrap();
        let batch = open(&tables, &sequence, 3);
        assert_eq!(batch.copies().len(), usize::from(left % PAGE_SIZE != 0), "{tokens}, {left}");
        batch.end(&Outcome::Commit(None));
        drop((first, second, fork));
        tables.validate().unwrap();
    }
    rest(&tables);
}

#[test]
fn i7_an_open_batch_has_its_pages_copied_even_if_it_leases_them() {
    let tables = tables(40);
    let sequence = tables.sequence(&[]);
    drop(decode(&tables, &sequence, 6));
    let reader = open(&tables, &sequence, 0);
    let lease = reader.lease().unwrap();
    sequence.truncate(5).unwrap();
    let writer = open(&tables, &sequence, 1);
    assert_eq!(writer.copies().len(), 1, "the reader may still launch work on the page");
    drop(writer);
    reader.end(&Outcome::Close);
    assert_eq!(open(&tables, &sequence, 1).copies(), [], "its work is ordered before the writer's");
    drop((lease, sequence));
    rest(&tables);
}

#[test]
fn the_source_of_a_copy_stays_until_the_lease_goes() {
    let tables = tables(40);
    let (parent, free) = (tables.sequence(&[]), |tables: &Small| tables.pool().num_free());
    drop(decode(&tables, &parent, 2));
    let child = parent.fork().unwrap();
    let batch = open(&tables, &child, 1);
    assert_eq!(batch.copies().len(), 1);
    let lease = batch.lease().unwrap();
    batch.end(&Outcome::Commit(None));
    parent.free();
    assert_eq!(free(&tables), 38);
    drop(lease);
    assert_eq!(free(&tables), 39);
    child.free();
    rest(&tables);
}

/// The steps that a scheduler makes, with up to 40 batches whose work is under way. No page that one
/// of them sees may be in the hands of anyone who didn't have it when the batch was opened.
#[test]
fn i9_no_page_in_flight_is_handed_out() {
    let tables = tables(64);
    let mut random = 12345_u64;
    let mut next = move |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let mut sequences: Vec<Seq> = vec![tables.sequence(&[])];
    let mut flights: Vec<(HashSet<u32>, TableLease<4, 2>)> = Vec::new();
    let (mut refused, mut handed_out) = (0, 0);
    for _ in 0..20_000 {
        let i = next(sequences.len());
        match next(7) {
            0 if sequences.len() < 8 => sequences.push(sequences[i].fork().unwrap()),
            1 => {
                let len = sequences[i].len().unwrap();
                sequences[i].truncate(next(len as usize + 1) as u32).unwrap();
            }
            2 if sequences.len() > 1 => drop(sequences.swap_remove(i)),
            3 if !flights.is_empty() => drop(flights.swap_remove(next(flights.len()))),
            _ => {
                let n = next(11) as u32;
                let held: HashSet<u32> = pages_of(&tables, &sequences);
                let Ok(batch) = tables.open(&[&sequences[i]], NewTokens::Each(n), None) else {
                    refused += 1;
                    flights.truncate(flights.len() / 2);
                    continue;
                };
                let item = batch.items().next().unwrap();
                let seen: HashSet<u32> = (0..item.seq_len()).map(|at| batch.page(0, at).0).collect();
                for page in seen.difference(&held) {
                    handed_out += 1;
                    assert!(flights.iter().all(|(pages, _)| !pages.contains(page)), "page {page}");
                }
                flights.push((seen, batch.lease().unwrap()));
                let outcome = match next(3) {
                    0 => Outcome::Close,
                    1 => Outcome::Commit(Some(vec![next(n as usize + 1) as u32])),
                    _ => Outcome::Commit(None),
                };
                batch.end(&outcome);
            }
        }
    }
    assert!(refused > 50 && handed_out > 1000, "{refused} refused, {handed_out} pages handed out");
    tables.validate().unwrap();
    drop((sequences, flights));
    rest(&tables);
}

fn pages_of(tables: &Small, sequences: &[Seq]) -> HashSet<u32> {
    let pages = |sequence: &Seq| sequence.block_table().unwrap().into_iter().map(|page| page as u32);
    let held = sequences.iter().flat_map(pages).collect();
    assert!(tables.pool().num_free() <= 64);
    held
}
