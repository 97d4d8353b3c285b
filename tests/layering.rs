//! The layers of `src/`, held by a test: data flows one way, and `unsafe`, atomics and locks stay
//! where `docs/design.md` says they are.
//!
//! Files are read as tokens, so comments and strings never count, and macro bodies do.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};

/// Every module of the crate root; each may name only those before it, and itself.
const LAYERS: [&str; 15] = [
    "error",
    "ids",
    "dtype",
    "layout",
    "sync",
    "pool",
    "storage",
    "table",
    "prefix",
    "policy",
    "kernels",
    "attention",
    "cache",
    "bench",
    "python",
];

/// Where memory and instructions are reached by hand.
const UNSAFE_ALLOWED: [&str; 6] =
    ["sync.rs", "sync/", "storage/", "kernels/", "python/array.rs", "python/array/"];

/// The only place that names atomics or loom, so that the code loom explores is the code that runs.
const ATOMICS_ALLOWED: [&str; 3] = ["sync.rs", "sync/", SETTING];

/// A setting of the whole process, outside every protocol; loom's atomics can't be statics.
const SETTING: &str = "kernels/isa.rs";

/// Layers that promise never to wait.
const LOCK_FREE: [&str; 6] = ["sync", "pool", "storage", "table", "kernels", "cache"];
const LOCKS: [&str; 6] = ["Mutex", "RwLock", "Condvar", "Barrier", "LazyLock", "OnceLock"];

const MAX_LINES: usize = 500;

/// One broken rule at one place.
struct Violation {
    file: String,
    line: usize,
    what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.what)
    }
}

/// Reads one file. `file` is its path below `src/`, with `/` between parts.
struct Reader<'a> {
    file: &'a str,
    layer: &'a str,
    found: Vec<Violation>,
}

/// Where in the tree of modules a token stands.
#[derive(Clone, Copy)]
struct Place {
    /// `super`s that lead to the crate root.
    depth: usize,
    in_tests: bool,
}

impl Reader<'_> {
    fn report(&mut self, at: &TokenTree, what: String) {
        self.found.push(Violation { file: self.file.to_owned(), line: at.span().start().line, what });
    }

    fn stream(&mut self, stream: TokenStream, place: Place) {
        let tokens: Vec<TokenTree> = stream.into_iter().collect();
        for (i, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Ident(ident) => self.ident(&ident.to_string(), &tokens, i, place),
                TokenTree::Group(group) => self.group(group, &tokens[..i], place),
                TokenTree::Punct(_) | TokenTree::Literal(_) => {}
            }
        }
    }

    /// Enters a group; behind `mod name`, one module deeper.
    fn group(&mut self, group: &Group, before: &[TokenTree], place: Place) {
        let place = match before {
            [.., TokenTree::Ident(word), TokenTree::Ident(name)] if word == "mod" => {
                Place { depth: place.depth + 1, in_tests: place.in_tests || name == "tests" }
            }
            _ => place,
        };
        self.stream(group.stream(), place);
    }

    fn ident(&mut self, ident: &str, tokens: &[TokenTree], i: usize, place: Place) {
        let at = &tokens[i];
        match ident {
            "unsafe" if !starts_with_any(self.file, &UNSAFE_ALLOWED) => {
                self.report(at, format!("unsafe outside {UNSAFE_ALLOWED:?}"));
            }
            "loom" if !starts_with_any(self.file, &ATOMICS_ALLOWED) => {
                self.report(at, "loom is named outside crate::sync".to_owned());
            }
            "atomic" if !starts_with_any(self.file, &ATOMICS_ALLOWED) => {
                self.report(at, "std's atomics are named outside crate::sync".to_owned());
            }
            lock if LOCKS.contains(&lock) && self.never_waits(place) => {
                self.report(at, format!("{lock} in a layer that never waits"));
            }
            "crate" => {
                for name in names_after(tokens, i) {
                    self.layer_named(at, &name);
                }
            }
            "super" if !follows_super(tokens, i) && supers_from(tokens, i) >= place.depth => {
                self.report(at, "super reaches the crate root; write crate::…".to_owned());
            }
            _ => {}
        }
    }

    fn never_waits(&self, place: Place) -> bool {
        LOCK_FREE.contains(&self.layer) && self.file != SETTING && !place.in_tests
    }

    fn layer_named(&mut self, at: &TokenTree, name: &str) {
        let rank = |layer: &str| LAYERS.iter().position(|&known| known == layer);
        match (rank(name), rank(self.layer)) {
            (Some(named), Some(own)) if named > own => {
                self.report(at, format!("{} uses crate::{name}, which stands above it", self.layer));
            }
            (Some(_), Some(_)) => {}
            _ => self.report(at, format!("crate::{name} in {}: not one of the layers", self.layer)),
        }
    }
}

fn starts_with_any(file: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| file.starts_with(prefix))
}

fn is_path_separator(tokens: &[TokenTree], i: usize) -> bool {
    let colon = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(p)) if p.as_char() == ':');
    colon(tokens.get(i)) && colon(tokens.get(i + 1))
}

/// The first names of the paths that go on behind `tokens[i]`: `a` of `::a::b`, `a` and `c` of
/// `::{a::b, c}`.
fn names_after(tokens: &[TokenTree], i: usize) -> Vec<String> {
    if !is_path_separator(tokens, i + 1) {
        return Vec::new();
    }
    match tokens.get(i + 3) {
        Some(TokenTree::Ident(ident)) => vec![ident.to_string()],
        Some(TokenTree::Group(group)) if group.delimiter() == Delimiter::Brace => {
            let inner: Vec<TokenTree> = group.stream().into_iter().collect();
            inner
                .split(|token| matches!(token, TokenTree::Punct(p) if p.as_char() == ','))
                .filter_map(|part| part.first().map(ToString::to_string))
                .collect()
        }
        _ => vec!["*".to_owned()],
    }
}

/// Length of the chain `super::super::…` that starts at `tokens[i]`.
fn supers_from(tokens: &[TokenTree], i: usize) -> usize {
    let mut length = 1;
    while is_path_separator(tokens, i + 3 * length - 2)
        && matches!(tokens.get(i + 3 * length), Some(TokenTree::Ident(ident)) if ident == "super")
    {
        length += 1;
    }
    length
}

fn follows_super(tokens: &[TokenTree], i: usize) -> bool {
    i >= 3
        && is_path_separator(tokens, i - 2)
        && matches!(&tokens[i - 3], TokenTree::Ident(ident) if ident == "super")
}

/// Everything that is wrong with one file of `src/`.
fn check(file: &str, text: &str) -> Vec<Violation> {
    let parts: Vec<&str> = file.trim_end_matches(".rs").split('/').filter(|part| *part != "mod").collect();
    let depth = if parts == ["lib"] { 0 } else { parts.len() };
    let in_tests = parts.last() == Some(&"tests");
    let mut reader = Reader { file, layer: parts[0], found: Vec::new() };
    let lines = text.lines().count();
    if lines > MAX_LINES {
        let what = format!("{lines} lines, more than {MAX_LINES}: split it");
        reader.found.push(Violation { file: file.to_owned(), line: MAX_LINES, what });
    }
    match text.parse::<TokenStream>() {
        Ok(stream) => reader.stream(stream, Place { depth, in_tests }),
        Err(error) => {
            let what = format!("not Rust: {error}");
            reader.found.push(Violation { file: file.to_owned(), line: 1, what });
        }
    }
    reader.found
}

fn rust_files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, into);
        } else if path.extension().is_some_and(|end| end == "rs") {
            into.push(path);
        }
    }
}

fn files_of(folder: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut paths = Vec::new();
    if root.is_dir() {
        rust_files(&root, &mut paths);
    }
    let read = |path: PathBuf| {
        let parts = path.strip_prefix(&root).unwrap().components();
        let name = parts.map(|part| part.as_os_str().to_str().unwrap()).collect::<Vec<_>>().join("/");
        (name, fs::read_to_string(&path).unwrap())
    };
    paths.into_iter().map(read).collect()
}

#[test]
fn every_layer_uses_only_those_before_it() {
    let files = files_of("src");
    assert!(files.len() > 10, "src/ was not found");
    let found: Vec<String> =
        files.iter().flat_map(|(file, text)| check(file, text)).map(|v| format!("\n  src/{v}")).collect();
    assert!(found.is_empty(), "{}", found.concat());
}

#[test]
fn the_crate_root_declares_layers_and_holds_no_code() {
    let text = files_of("src").into_iter().find(|(file, _)| file == "lib.rs").unwrap().1;
    for (i, line) in text.lines().enumerate() {
        if let Some(name) = line.trim_end_matches(';').split_once("mod ").map(|(_, name)| name) {
            assert!(LAYERS.contains(&name), "lib.rs:{}: {name} is not a layer", i + 1);
        } else {
            let harmless = line.is_empty()
                || line.starts_with("//")
                || line.starts_with('#')
                || line.starts_with("pub use ");
            assert!(harmless, "lib.rs:{}: {line}", i + 1);
        }
    }
}

#[test]
fn tests_and_benches_are_short_files_too() {
    for folder in ["tests", "benches"] {
        for (file, text) in files_of(folder) {
            let lines = text.lines().count();
            assert!(lines <= MAX_LINES, "{folder}/{file}: {lines} lines");
        }
    }
}

/// Each rule on a sample that breaks it and on one that doesn't: a rule that never fires is no rule.
mod the_rules_fire {
    use super::check;

    fn fires(file: &str, text: &str, expected: &str) {
        let found = check(file, text);
        assert!(
            found.iter().any(|violation| violation.what.contains(expected)),
            "{file}: {text:?} should be refused for {expected:?}; found {:?}",
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        );
    }

    fn passes(file: &str, text: &str) {
        let found: Vec<String> = check(file, text).iter().map(ToString::to_string).collect();
        assert!(found.is_empty(), "{file}: {text:?}: {found:?}");
    }

    #[test]
    fn on_layers() {
        fires("pool/mod.rs", "use crate::table::Leaf;", "stands above it");
        fires("dtype.rs", "fn f() -> crate::cache::KvCache { todo!() }", "stands above it");
        fires("pool/bits.rs", "use crate::{error::Error, attention};", "stands above it");
        fires("pool/bits.rs", "macro_rules! m { () => { crate::python::f() } }", "stands above it");
        fires("cache.rs", "use crate::util::helper;", "not one of the layers");
        fires("helpers.rs", "use crate::error::Error;", "not one of the layers");
        fires("cache.rs", "use crate::*;", "not one of the layers");
        passes("table/mod.rs", "use crate::{error::Error, pool::PagePool, table::leaf};");
        passes("pool/mod.rs", "// crate::table\n/// [`crate::cache`]\nconst A: &str = \"crate::table\";");
        passes("pool/mod.rs", "pub(crate) fn f() {}");
    }

    #[test]
    fn on_super() {
        fires("pool/bits.rs", "use super::super::table::Leaf;", "crate root");
        fires("dtype.rs", "use super::error::Error;", "crate root");
        fires("pool/mod.rs", "mod tests { use super::super::table; }", "crate root");
        passes("pool/bits.rs", "use super::credits::Credits; mod tests { use super::super::credits; }");
        passes("dtype.rs", "mod tests { use super::*; }");
    }

    #[test]
    fn on_unsafe() {
        fires("pool/mod.rs", "fn f() { unsafe { g() } }", "unsafe outside");
        fires("python/cache.rs", "unsafe impl Send for A {}", "unsafe outside");
        for file in
            ["sync.rs", "sync/cell.rs", "storage/view.rs", "kernels/x86_64/avx2.rs", "python/array.rs"]
        {
            passes(file, "fn f() { unsafe { g() } }");
        }
        passes("pool/mod.rs", "// unsafe\n#![deny(unsafe_code)]");
    }

    #[test]
    fn on_atomics_and_loom() {
        fires("pool/mod.rs", "use std::sync::atomic::AtomicU64;", "atomics");
        fires("pool/mod.rs", "use std::sync::{Arc, atomic};", "atomics");
        fires("table/mod.rs", "static A: core::sync::atomic::AtomicU8 = x();", "atomics");
        fires("pool/mod.rs", "#[cfg(loom)] use loom::thread;", "loom");
        passes("sync.rs", "pub use std::sync::atomic::AtomicU64;");
        passes("pool/mod.rs", "use crate::sync::{AtomicU64, Ordering};");
    }

    #[test]
    fn on_locks() {
        fires("pool/mod.rs", "use std::sync::Mutex;", "never waits");
        fires("cache.rs", "struct A { b: parking_lot::RwLock<u8> }", "never waits");
        passes("bench/pool.rs", "use std::sync::Mutex;");
        passes("pool/mod.rs", "mod tests { use std::sync::Barrier; }");
        passes("storage/tests.rs", "use std::sync::Barrier;");
    }

    #[test]
    fn on_length_and_on_what_is_not_rust() {
        fires("pool/mod.rs", &"//\n".repeat(501), "more than 500");
        passes("pool/mod.rs", &"//\n".repeat(500));
        fires("pool/mod.rs", "fn f( {", "not Rust");
    }
}
