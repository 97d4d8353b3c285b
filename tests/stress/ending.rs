//! A batch that one thread ends while another still uses it: the last to leave carries it out.

use std::sync::Barrier;

use paged_kv::cache::{CacheOptions, KvCache, Step};
use paged_kv::dtype::DType;
use paged_kv::error::Error;
use paged_kv::layout::{CacheLayout, PageOrder};
use paged_kv::storage::{RegionOptions, RowsView};
use paged_kv::table::NewTokens;

use crate::setting::setting;

#[test]
fn i12_a_batch_ended_by_one_thread_while_others_write_ends_once_and_whole() {
    let layout = CacheLayout {
        num_layers: 1,
        num_pages: 16,
        page_size: 4,
        num_kv_heads: 1,
        head_dim: 4,
        v_head_dim: 4,
        dtype: DType::F32,
        head_scales: false,
        value_in_key: false,
        order: PageOrder::Nhd,
    };
    let (null_page, window_left, num_threads) = (true, -1, Some(1));
    let region = RegionOptions::default();
    let options = CacheOptions { layout, null_page, window_left, num_threads, region };
    let cache = KvCache::new(&options).unwrap();
    let rows = [1.0_f32; 20];
    let rows = RowsView::from_slice(&rows, [5, 1, 4]).unwrap();
    let rounds = setting("PAGED_KV_OPS", 20_000) / 20;
    for round in 0..rounds {
        let sequence = cache.sequence(&[]);
        let batch = cache.batch(&[&sequence], NewTokens::Each(5), None, None).unwrap();
        let start = Barrier::new(3);
        let ended = std::thread::scope(|scope| {
            let write = || {
                start.wait();
                let ended = |error| matches!(error, Error::Value(_));
                cache.write(0, rows, rows, Step::Batch(&batch)).is_err_and(|error| !ended(error))
            };
            let end = || {
                start.wait();
                if round % 2 == 0 { batch.commit(None).is_ok() } else { (batch.close(), false).1 }
            };
            let (writer, ender) = (scope.spawn(write), scope.spawn(end));
            start.wait();
            let second = round % 3 == 0 && batch.commit(Some(vec![2])).is_ok();
            assert!(!writer.join().unwrap(), "a write fails only because the batch has ended");
            (ender.join().unwrap(), second)
        });
        let len = match ended {
            (true, false) => 5,
            (false, true) => 2,
            (false, false) => 0,
            (true, true) => panic!("committed twice"),
        };
        assert_eq!((sequence.len(), sequence.num_computed_tokens()), (Ok(len), Ok(len)), "round {round}");
    }
    cache.validate().unwrap();
    assert_eq!(cache.pool().num_free(), 16);
}
