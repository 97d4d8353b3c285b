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
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
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
    // SAFETY: `to` has as many places.
    unsafe { copy_entries_to(from, to.as_mut_ptr()) }
}

/// [`copy_entries`] to memory that others may look at meanwhile.
///
/// # Safety
/// - `to` is valid for writes of as many `i32`.
#[inline]
pub unsafe fn copy_entries_to(from: &[AtomicU32], to: *mut i32) {
    // SAFETY: the caller's promise.
    let done = unsafe { copy_blocks(from, to) };
    for (i, entry) in from.iter().enumerate().skip(done) {
        // SAFETY: the caller's promise. Relaxed: the caller's Acquire load came before.
        unsafe { to.add(i).write(entry.load(Ordering::Relaxed) as i32) }
    }
}

/// Copies blocks of entries; returns how many entries that were. An atomic load of four bytes is an
/// ordinary one on this architecture, so four together are four such loads; the compiler won't join
/// them by itself, and assembly is outside its notion of a data race.
///
/// # Safety
/// - As for `copy_entries_to`.
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
#[inline]
unsafe fn copy_blocks(from: &[AtomicU32], to: *mut i32) -> usize {
    let (blocks, rest) = from.as_chunks::<64>();
    let wide = is_x86_feature_detected!("avx512f");
    for (i, block) in blocks.iter().enumerate() {
        if wide {
            // SAFETY: both point to 64 entries; the CPU has AVX-512 F.
            unsafe { copy_block_by_lines(block, to.add(i * 64)) }
            continue;
        }
        // SAFETY: both point to 64 entries; SSE2 is part of the architecture; unaligned forms are
        // used; no flag or stack is touched. What is to be written next is asked for, which has no
        // effect that a program can see, whatever the address.
        unsafe {
            std::arch::asm!(
                ".irp line, 0, 64, 128, 192",
                "movups xmm0, [{s} + \\line]",
                "movups xmm1, [{s} + \\line + 16]",
                "movups xmm2, [{s} + \\line + 32]",
                "movups xmm3, [{s} + \\line + 48]",
                "prefetcht0 [{t} + \\line + 512]",
                "movups [{t} + \\line], xmm0",
                "movups [{t} + \\line + 16], xmm1",
                "movups [{t} + \\line + 32], xmm2",
                "movups [{t} + \\line + 48], xmm3",
                ".endr",
                s = in(reg) block.as_ptr(),
                t = in(reg) to.add(i * 64),
                out("xmm0") _,
                out("xmm1") _,
                out("xmm2") _,
                out("xmm3") _,
                options(nostack, preserves_flags),
            );
        }
    }
    let (lines, rest) = rest.as_chunks::<16>();
    for (i, line) in lines.iter().enumerate() {
        // SAFETY: as above, of 16 entries.
        unsafe {
            std::arch::asm!(
                "movups xmm0, [{s}]",
                "movups xmm1, [{s} + 16]",
                "movups xmm2, [{s} + 32]",
                "movups xmm3, [{s} + 48]",
                "movups [{t}], xmm0",
                "movups [{t} + 16], xmm1",
                "movups [{t} + 32], xmm2",
                "movups [{t} + 48], xmm3",
                s = in(reg) line.as_ptr(),
                t = in(reg) to.add(blocks.len() * 64 + i * 16),
                out("xmm0") _,
                out("xmm1") _,
                out("xmm2") _,
                out("xmm3") _,
                options(nostack, preserves_flags),
            );
        }
    }
    from.len() - rest.len()
}

/// Copies 64 entries, a cache line at once.
///
/// # Safety
/// - `to` is valid for writes of 64 `i32`; the CPU has AVX-512 F.
#[cfg(all(target_arch = "x86_64", not(loom), not(miri)))]
#[inline]
unsafe fn copy_block_by_lines(block: &[AtomicU32; 64], to: *mut i32) {
    // SAFETY: the caller's promise; else as in `copy_blocks`. Registers that narrower instructions
    // don't know, so nothing need be cleared behind.
    unsafe {
        std::arch::asm!(
            "vmovups zmm16, [{s}]",
            "vmovups zmm17, [{s} + 64]",
            "vmovups zmm18, [{s} + 128]",
            "vmovups zmm19, [{s} + 192]",
            "prefetcht0 [{t} + 512]",
            "prefetcht0 [{t} + 576]",
            "prefetcht0 [{t} + 640]",
            "prefetcht0 [{t} + 704]",
            "vmovups [{t}], zmm16",
            "vmovups [{t} + 64], zmm17",
            "vmovups [{t} + 128], zmm18",
            "vmovups [{t} + 192], zmm19",
            s = in(reg) block.as_ptr(),
            t = in(reg) to,
            out("zmm16") _,
            out("zmm17") _,
            out("zmm18") _,
            out("zmm19") _,
            options(nostack, preserves_flags),
        );
    }
}

#[cfg(not(all(target_arch = "x86_64", not(loom), not(miri))))]
#[inline]
unsafe fn copy_blocks(_: &[AtomicU32], _: *mut i32) -> usize {
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
