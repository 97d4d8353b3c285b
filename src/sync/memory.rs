//! Two things the language has no safe word for: fetching a line ahead, and copying many atomics
//! at the speed of memory.

use super::{AtomicU32, Ordering};

/// Asks the processor to fetch the line that holds `value`. Nothing is read or changed.
#[inline]
pub fn prefetch<T>(value: &T) {
    prefetch_address(std::ptr::from_ref(value).cast());
}

/// Asks the processor to fetch the line at `address`, which may be any.
#[inline]
pub fn prefetch_address(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: prefetching has no effect that a program can see, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// Copies entries that were published before and that nobody writes meanwhile (were one written
/// meanwhile, its copy would hold the old or the new value).
///
/// # Panics
/// If the lengths differ.
#[inline]
pub fn copy_entries(from: &[AtomicU32], to: &mut [i32]) {
    assert_eq!(from.len(), to.len(), "as many entries as places");
    let done = copy_blocks(from, to);
    for (from, to) in from[done..].iter().zip(&mut to[done..]) {
        // Relaxed: the caller's Acquire load came before.
        *to = from.load(Ordering::Relaxed) as i32;
    }
}

/// Copies blocks of sixteen entries; returns how many entries that were. An atomic load of four
/// bytes is an ordinary one on this architecture, so four together are four such loads; the
/// compiler won't join them by itself, and assembly is outside its notion of a data race.
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
#[inline]
fn copy_blocks(from: &[AtomicU32], to: &mut [i32]) -> usize {
    let blocks = from.len() / 16;
    for block in 0..blocks {
        let source = from[block * 16..][..16].as_ptr();
        let target = to[block * 16..][..16].as_mut_ptr();
        // SAFETY: both point to sixteen entries; SSE2 is part of the architecture; unaligned forms
        // are used; no flag or stack is touched.
        unsafe {
            std::arch::asm!(
                "movups {a}, [{s}]",
                "movups {b}, [{s} + 16]",
                "movups {c}, [{s} + 32]",
                "movups {d}, [{s} + 48]",
                "movups [{t}], {a}",
                "movups [{t} + 16], {b}",
                "movups [{t} + 32], {c}",
                "movups [{t} + 48], {d}",
                s = in(reg) source,
                t = in(reg) target,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack, preserves_flags),
            );
        }
    }
    blocks * 16
}

#[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
#[inline]
fn copy_blocks(_: &[AtomicU32], _: &mut [i32]) -> usize {
    0
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn entries_of_every_length_arrive() {
        let from: Vec<AtomicU32> = (0..100).map(|i| AtomicU32::new(i * 7)).collect();
        for len in 0..100 {
            for start in 0..100 - len {
                let mut to = vec![-1; len];
                copy_entries(&from[start..start + len], &mut to);
                assert!(to.iter().enumerate().all(|(i, &v)| v == ((start + i) * 7) as i32));
            }
        }
    }
}
