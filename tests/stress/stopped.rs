//! Promise: a thread stopped at any instruction blocks no other. A signal stops one that is busy
//! in the tables wherever it happens to be; meanwhile everything must go on without it.
//!
//! Only a stop within this program's own code counts: the system's allocator has locks, and a
//! thread stopped inside it stops others there, which is not what is tested.
#![expect(unsafe_code, reason = "signals")]

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::ops::Range;
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use paged_kv::table::{NewTokens, Outcome, Sequence};

use crate::common::{Random, World};
use crate::setting::setting;

/// What the stopped thread and the one that stops it tell each other.
const RUNNING: u32 = 0;
const ASKED: u32 = 1;
const STOPPED: u32 = 2;
const MISSED: u32 = 3;
const RELEASED: u32 = 4;
static STATE: AtomicU32 = AtomicU32::new(RUNNING);
/// The instruction before which the thread was stopped last.
static LAST: AtomicUsize = AtomicUsize::new(0);
static TEXT: OnceLock<Range<usize>> = OnceLock::new();

/// Addresses of this program's code: the mapping that holds `address`.
fn text(address: usize) -> Range<usize> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("Linux tells");
    let range = |line: &str| {
        let (start, end) = line.split_whitespace().next()?.split_once('-')?;
        Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
    };
    maps.lines().filter_map(range).find(|range| range.contains(&address)).expect("code is mapped")
}

/// Where the interrupted thread stood.
fn instruction(context: *mut c_void) -> usize {
    // SAFETY: the kernel hands a handler installed with SA_SIGINFO a valid ucontext.
    let context = unsafe { &*context.cast::<libc::ucontext_t>() };
    #[cfg(target_arch = "x86_64")]
    return context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    #[cfg(target_arch = "aarch64")]
    return context.uc_mcontext.pc as usize;
}

extern "C" fn stop(_: i32, _: *mut libc::siginfo_t, context: *mut c_void) {
    if !TEXT.get().is_some_and(|text| text.contains(&instruction(context))) {
        return STATE.store(MISSED, Ordering::Release);
    }
    LAST.store(instruction(context), Ordering::Relaxed);
    STATE.store(STOPPED, Ordering::Release);
    while STATE.load(Ordering::Acquire) == STOPPED {
        // SAFETY: allowed in a handler; no descriptors, only the time-out.
        unsafe { libc::poll(std::ptr::null_mut(), 0, 1) };
    }
    STATE.store(RUNNING, Ordering::Release);
}

fn install() {
    TEXT.get_or_init(|| text(stop as *const () as usize));
    // SAFETY: an all-zero sigaction is a valid one; the handler does only what handlers may.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = stop as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// Works on its own sequences and on the shared one until told to end.
fn victim(world: &World<4, 2>, shared: &Sequence<4, 2>, end: &AtomicBool) {
    let mut random = Random::new(1);
    let own: Vec<_> = (0..3).map(|_| world.sequence()).collect();
    while !end.load(Ordering::Relaxed) {
        let all: Vec<_> = own.iter().chain([shared]).collect();
        let batch = world.tables.open(&all, NewTokens::Each(1 + random.below(6) as u32), None);
        if let Ok(batch) = batch {
            batch.end(&if random.once_in(3) { Outcome::Close } else { Outcome::Commit(None) });
        }
        let child = own[random.below(3)].fork().expect("not freed");
        let _ = child.append(random.below(9) as u32);
        for sequence in &all {
            if sequence.len().expect("not freed") > 24 {
                let _ = sequence.truncate(random.below(24) as u32);
            }
        }
        let handles = world.tables.pool().alloc(1 + random.below(5)).expect("room");
        world.tables.pool().release(&handles).expect("ours");
    }
}

/// All that another thread may want meanwhile: nothing waits, and nothing of its own fails.
fn others_go_on(world: &World<4, 2>, shared: &Sequence<4, 2>) {
    let own = world.sequence();
    let content = world.decode(&own, 13);
    let lease = world.tables.open(&[&own, shared], NewTokens::Each(0), None).expect("readers never fail");
    own.truncate(5).expect("nobody else's");
    let more = world.decode(&own, 9);
    assert_eq!(world.read(&own), [&content[..5], &more].concat());
    let seen = (0..13).map(|p| world.stamps.read(lease.page(0, p), p as usize % 4));
    assert!(seen.eq(content));
    let child = shared.fork().expect("forkers never fail");
    world.decode(&child, 3);
    let _ = shared.append(1).map(|()| shared.truncate(0));
    child.free();
    let handles = world.tables.pool().alloc(40).expect("room");
    world.tables.pool().release(&handles).expect("ours");
    world.tables.stats();
    world.tables.deferred_pages();
}

#[test]
fn i10_a_thread_stopped_at_any_instruction_blocks_no_other() {
    install();
    let world = Arc::new(World::<4, 2>::new(512, 4));
    let shared = Arc::new(world.sequence());
    let end = Arc::new(AtomicBool::new(false));
    let thread = {
        let (world, shared, end) = (Arc::clone(&world), Arc::clone(&shared), Arc::clone(&end));
        std::thread::spawn(move || victim(&world, &shared, &end))
    };
    // Whoever is blocked all the same must not block this test for ever.
    let late = {
        let end = Arc::clone(&end);
        move || {
            let start = Instant::now();
            while !end.load(Ordering::Relaxed) {
                if start.elapsed() > Duration::from_mins(5) {
                    eprintln!("a thread is blocked by a stopped one");
                    std::process::abort();
                }
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    };
    let watchdog = std::thread::spawn(late);
    let stops = setting("PAGED_KV_OPS", 4000) / 10;
    let mut random = Random::new(2);
    let mut places = BTreeSet::new();
    for _ in 0..stops {
        // Some way on from the last stop.
        std::thread::sleep(Duration::from_micros(random.below(200) as u64));
        STATE.store(ASKED, Ordering::Release);
        // SAFETY: the thread is not joined before the loop has ended.
        let sent = unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) };
        assert_eq!(sent, 0);
        while STATE.load(Ordering::Acquire) == ASKED {
            std::thread::yield_now();
        }
        if STATE.load(Ordering::Acquire) == STOPPED {
            places.insert(LAST.load(Ordering::Relaxed));
            (0..3).for_each(|_| others_go_on(&world, &shared));
            STATE.store(RELEASED, Ordering::Release);
            while STATE.load(Ordering::Acquire) == RELEASED {
                std::thread::yield_now();
            }
        }
    }
    end.store(true, Ordering::Relaxed);
    thread.join().expect("the stopped thread was well");
    watchdog.join().expect("in time");
    println!("stopped at {} different instructions in {stops} attempts", places.len());
    assert!(places.len() as u64 > stops / 10, "{} places in {stops} attempts", places.len());
    drop(shared);
    world.rest();
}
