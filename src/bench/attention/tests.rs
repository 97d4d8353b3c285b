//! Which rows there are, and what each stands beside; never how fast anything is.

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
    let twice = Plan { isas: vec![Isa::Scalar, Isa::Scalar], ..plan.clone() };
    assert!(matches!(attention(&twice, |_| {}), Err(Error::Value(text)) if text.contains("twice")));
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

const SMALL: Shape = Shape {
    name: "small",
    batch: 2,
    len: 128,
    queries: 1,
    shared: 64,
    num_heads: 4,
    num_kv_heads: 2,
    head_dim: 32,
};

/// Measures a small shape with these instruction sets.
fn compared(isas: &[Isa], shape: Shape) -> Result<Vec<Record>> {
    let plan = Plan { threads: vec![1, 2], rotated: 1, repetitions: 1, ..Plan::default() };
    group::<half::bf16>(&plan, isas, &shape, DType::BF16, 16)
}

#[test]
fn later_instruction_sets_stand_beside_the_first() {
    let isas = [Isa::detect(), Isa::Scalar];
    let [first, later] = isas;
    let decode = compared(&isas, SMALL).expect("some KiB");
    // On one thread and on two, a limit and three places with each set.
    assert_eq!(decode.len(), 2 * (1 + 3 * 2));
    for rows in decode.chunks(7) {
        assert_eq!((&*rows[0].case, &*rows[0].yardstick), ("small bfloat16 page 16 limit", READ));
        for (place, pair) in PLACES.iter().zip(rows[1..].chunks(2)) {
            assert_eq!(pair[0].case, format!("small bfloat16 page 16 {place} {first}"));
            assert_eq!(pair[1].case, format!("small bfloat16 page 16 {place} {later}"));
            assert_eq!((&pair[1].yardstick, pair[1].limit), (&pair[0].case, pair[0].value));
            assert!((pair[1].ratio - pair[1].value / pair[0].value).abs() < 1e-9);
        }
        for row in [&rows[1], &rows[3]] {
            assert_eq!((&*row.yardstick, row.limit), (READ, rows[0].value));
        }
        assert_eq!((&rows[5].yardstick, rows[5].limit), (&rows[1].case, rows[1].value));
    }
    let prefill = compared(&isas, Shape { queries: 128, ..SMALL }).expect("some KiB");
    assert_eq!(prefill.len(), 2 * 2 * 2);
    for rows in prefill.chunks(4) {
        let [limit, other_limit, ours, other] = rows else { unreachable!("chunks of 4") };
        // Each set has a limit of its own.
        assert_eq!(limit.case, format!("small bfloat16 page 16 limit {first}"));
        assert_eq!(other_limit.implementation, FMA);
        assert_eq!((&other_limit.yardstick, other_limit.limit), (&limit.case, limit.value));
        assert_eq!((&ours.yardstick, ours.limit), (&limit.implementation, limit.value));
        assert_eq!((&other.yardstick, other.limit), (&ours.case, ours.value));
    }
}

#[test]
fn each_row_is_of_the_instruction_set_that_it_names() {
    let lacking = Isa::ALL.into_iter().find(|isa| !isa.is_available());
    let lacking = lacking.expect("no CPU has both AVX2 and NEON");
    for queries in [1, 128] {
        // Whichever comes second is called as well.
        let refused = compared(&[Isa::Scalar, lacking], Shape { queries, ..SMALL });
        assert!(matches!(refused, Err(Error::Value(text)) if text.contains(&format!("lacks {lacking}"))));
    }
    let plan = Plan { isas: vec![lacking], ..Plan::default() };
    let nothing = attention(&plan, |_| unreachable!("it is refused before anything is measured"));
    assert!(matches!(nothing, Err(Error::Value(text)) if text.contains(lacking.name())));
}

#[test]
fn one_instruction_set_is_not_named() {
    let rows = compared(&[Isa::Scalar], Shape { queries: 128, ..SMALL }).expect("some KiB");
    let words: Vec<_> = rows.iter().map(|row| row.case.rsplit(' ').next().expect("a word")).collect();
    assert_eq!(words, ["limit", "adjacent", "limit", "adjacent"]);
    assert!(rows.iter().all(|row| row.yardstick == FMA));
}
