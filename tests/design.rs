//! The table of invariants in `docs/design.md` names exactly the tests that name an invariant.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const INVARIANTS: u32 = 12;

type Table = BTreeMap<u32, BTreeSet<String>>;

/// Invariants that a test's name begins with: `i1_i3_…` is 1 and 3, `i1_to_i12_…` all between.
fn named(test: &str) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut range_from = None;
    for word in test.trim_start_matches("test_").split('_') {
        let number = word.strip_prefix('i').and_then(|digits| digits.parse::<u32>().ok());
        match (word, number) {
            ("to", _) => range_from = found.last().copied(),
            (_, Some(number)) => {
                found.extend(range_from.take().unwrap_or(number)..=number);
            }
            _ => break,
        }
    }
    found
}

/// Names of the functions defined in a file.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let line = line.trim_start();
        let rest = line.strip_prefix("fn ").or_else(|| line.strip_prefix("def "))?;
        rest.split(['(', '<']).next()
    })
}

fn walk(folder: &Path, tests: &mut Table) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, tests);
        } else if path.extension().is_some_and(|end| end == "rs" || end == "py") {
            let text = fs::read_to_string(&path).unwrap();
            for test in functions(&text) {
                for number in named(test) {
                    tests.entry(number).or_default().insert(test.to_owned());
                }
            }
        }
    }
}

/// The rows `| I7 | … | `a`, `b` |` of the design's table.
fn documented(text: &str) -> Table {
    let rows = text.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| I")?.split('|');
        let number = cells.next()?.trim().parse().ok()?;
        let names = cells.nth(1)?.split('`').skip(1).step_by(2).map(str::to_owned);
        Some((number, names.collect()))
    });
    rows.collect()
}

#[test]
fn every_invariant_has_tests_and_the_design_lists_them_all() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut tests = Table::new();
    walk(&root.join("src"), &mut tests);
    walk(&root.join("tests"), &mut tests);
    let design = documented(&fs::read_to_string(root.join("docs/design.md")).unwrap());
    for number in 1..=INVARIANTS {
        let none = BTreeSet::new();
        let (found, listed) = (tests.get(&number).unwrap_or(&none), design.get(&number).unwrap_or(&none));
        assert!(!found.is_empty(), "no test names I{number}");
        let missing: Vec<_> = found.difference(listed).collect();
        let stale: Vec<_> = listed.difference(found).collect();
        assert!(missing.is_empty() && stale.is_empty(), "I{number}: not listed {missing:?}; gone {stale:?}");
    }
}

#[test]
fn names_are_read_as_they_are_meant() {
    let numbers = |test: &str| named(test).into_iter().collect::<Vec<_>>();
    assert_eq!(numbers("i3_two_takers"), [3]);
    assert_eq!(numbers("test_i4_i12_of_two"), [4, 12]);
    assert_eq!(numbers("i9_to_i12_threads"), [9, 10, 11, 12]);
    assert_eq!(numbers("it_is_none"), []);
    let sample = "| I2 | text | `i2_a`, `i2_b` |\n| I | x | `no` |\n";
    assert_eq!(documented(sample), Table::from([(2, ["i2_a".to_owned(), "i2_b".to_owned()].into())]));
}
