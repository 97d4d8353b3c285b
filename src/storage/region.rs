//! One mapping of anonymous memory: lazily backed, so a page that was never written costs nothing.

use std::fmt;
use std::ptr::NonNull;
use std::str::FromStr;

use memmap2::{MmapOptions, MmapRaw};
use sysinfo::{MemoryRefreshKind, System};

use crate::error::{Error, Result};

/// Bytes of a huge page on `x86_64` and, with 4 KiB base pages, on aarch64.
pub const HUGE_PAGE: usize = 2 << 20;

/// Every region starts at a multiple of this at least: the smallest page of any system.
pub const BASE_PAGE: usize = 4096;

/// Whether the system is asked to back a region by huge pages.
///
/// Huge pages save address translations when attention walks scattered pages; in exchange the first
/// write to any byte takes the whole 2 MiB around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Where a huge page is small beside what it serves, if the system has them.
    #[default]
    Auto,
    /// Always; refused where the system has none.
    On,
    /// Never: memory is taken in base pages.
    Off,
}

impl HugePages {
    /// The name in the constructor's argument.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for HugePages {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        [Self::Auto, Self::On, Self::Off].into_iter().find(|choice| choice.name() == text).ok_or_else(|| {
            Error::Value(format!("huge_pages must be \"auto\", \"on\" or \"off\", not {text:?}"))
        })
    }
}

/// How a region is mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionOptions {
    /// Huge pages or base pages.
    pub huge_pages: HugePages,
    /// Allows more bytes than the machine has: only what is written takes memory.
    pub overcommit: bool,
}

/// An aligned block of zeroed memory, unmapped on drop.
#[derive(Debug)]
pub struct Region {
    /// Keeps the memory mapped; `None` for a region of 0 bytes.
    mapping: Option<MmapRaw>,
    base: NonNull<u8>,
    len: usize,
}

impl Region {
    /// Maps `len` bytes of zeros without reserving any: a base page (a huge page where those are
    /// used) is taken when it is first written.
    ///
    /// # Errors
    /// [`Error::Memory`] if `len` exceeds [`physical_memory`] and `overcommit` is off, if the system
    /// refuses the mapping, or if it has no huge pages and [`HugePages::On`] asks for them.
    pub fn map(len: usize, options: RegionOptions) -> Result<Self> {
        if len == 0 {
            return Ok(Self { mapping: None, base: NonNull::dangling(), len });
        }
        if !options.overcommit {
            check_fits(
                len as u64,
                physical_memory().map_err(|error| refused(len, "reading its size", error))?,
            )?;
        }
        let huge = match options.huge_pages {
            HugePages::Auto => len >= HUGE_PAGE,
            HugePages::On => true,
            HugePages::Off => false,
        };
        let align = if huge { HUGE_PAGE } else { BASE_PAGE };
        // Mappings start at a base page; what alignment costs is address space, not memory.
        let slack = if huge { HUGE_PAGE } else { 0 };
        let mapped = len.checked_add(slack).ok_or_else(|| refused(len, "mapping it", "size overflows"))?;
        let mapping: MmapRaw = MmapOptions::new()
            .len(mapped)
            .no_reserve_swap()
            .map_anon()
            .map_err(|error| refused(len, "mapping it", error))?
            .into();
        match advise_huge(&mapping, huge) {
            Err(error) if options.huge_pages == HugePages::On => {
                return Err(refused(len, "asking for huge pages", error));
            }
            // Without the advice the system's own default applies: slower or larger, never wrong.
            Ok(()) | Err(_) => {}
        }
        let start = mapping.as_mut_ptr();
        let base = NonNull::new(start.wrapping_add(start.align_offset(align)))
            .ok_or_else(|| refused(len, "mapping it", "it lies at address 0"))?;
        Ok(Self { mapping: Some(mapping), base, len })
    }

    /// First byte. Aligned to [`BASE_PAGE`], or to [`HUGE_PAGE`] where huge pages are used; dangling
    /// for 0 bytes.
    #[inline]
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.mapping.is_none()
    }
}

// SAFETY: a region owns its mapping and hands out an address only; whoever goes through it keeps
// readers and writers of a byte apart, as `PagesView::new` demands.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// Bytes of memory that this process can have: the machine's, or its control group's limit where
/// that is lower (a container).
pub fn physical_memory() -> Result<u64, sysinfo::Error> {
    let mut system = System::new()?;
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let limit = system.cgroup_limits().map_or(u64::MAX, |group| group.total_memory);
    Ok(system.total_memory().min(limit))
}

fn refused(len: usize, doing: &str, error: impl fmt::Display) -> Error {
    Error::Memory { bytes: len as u64, reason: format!("{doing} failed: {error}") }
}

fn check_fits(bytes: u64, available: u64) -> Result<()> {
    if bytes <= available {
        return Ok(());
    }
    let reason = format!(
        "only {available} bytes of physical memory; give the cache fewer pages, or allow overcommit \
         (memory is then taken page by page as it is written)"
    );
    Err(Error::Memory { bytes, reason })
}

#[cfg(target_os = "linux")]
fn advise_huge(mapping: &MmapRaw, huge: bool) -> std::io::Result<()> {
    use memmap2::Advice;
    mapping.advise(if huge { Advice::HugePage } else { Advice::NoHugePage })
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: &MmapRaw, huge: bool) -> std::io::Result<()> {
    if huge { Err(std::io::ErrorKind::Unsupported.into()) } else { Ok(()) }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn options(huge_pages: HugePages, overcommit: bool) -> RegionOptions {
        RegionOptions { huge_pages, overcommit }
    }

    /// Base pages behind `len` bytes from `base` on that memory stands behind.
    #[cfg(target_os = "linux")]
    pub(in crate::storage) fn resident_pages(base: *const u8, len: usize) -> usize {
        use std::os::unix::fs::FileExt;
        // One 64-bit word per base page; bit 63 says "present", bit 62 "swapped out".
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let mut words = vec![0_u8; len.div_ceil(BASE_PAGE) * 8];
        pagemap.read_exact_at(&mut words, (base as usize / BASE_PAGE * 8) as u64).unwrap();
        words.as_chunks::<8>().0.iter().filter(|word| u64::from_ne_bytes(**word) >> 62 != 0).count()
    }

    fn write(region: &Region, at: usize) {
        assert!(at < region.len());
        // SAFETY: `at` lies inside the region, which nobody else has.
        unsafe { region.base().add(at).write(1) };
    }

    #[test]
    fn zero_bytes_are_allowed() {
        let region = Region::map(0, RegionOptions::default()).unwrap();
        assert!(region.is_empty());
        assert_eq!(region.len(), 0);
    }

    #[test]
    fn memory_starts_as_zeros_and_aligned() {
        for (choice, align) in
            [(HugePages::Off, BASE_PAGE), (HugePages::On, HUGE_PAGE), (HugePages::Auto, BASE_PAGE)]
        {
            let region = Region::map(3 * BASE_PAGE + 1, options(choice, false)).unwrap();
            assert_eq!(region.base().align_offset(align), 0, "{choice}");
            // SAFETY: the region is ours, mapped and nobody writes to it.
            let bytes = unsafe { std::slice::from_raw_parts(region.base(), region.len()) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            write(&region, region.len() - 1);
        }
        let large = Region::map(HUGE_PAGE, RegionOptions::default()).unwrap();
        assert_eq!(large.base().align_offset(HUGE_PAGE), 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn an_unused_page_costs_no_memory() {
        let region = Region::map(1 << 30, options(HugePages::Off, true)).unwrap();
        assert_eq!(resident_pages(region.base(), region.len()), 0);
        for page in 0..100 {
            write(&region, page * 17 * BASE_PAGE + 5);
        }
        assert_eq!(resident_pages(region.base(), region.len()), 100);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_huge_page_is_taken_whole_or_not_at_all() {
        let region = Region::map(64 * HUGE_PAGE, options(HugePages::On, true)).unwrap();
        write(&region, 3 * HUGE_PAGE + 7);
        let touched = resident_pages(region.base(), region.len());
        // The system may have no huge page left; it never takes more than the one touched.
        assert!(touched == HUGE_PAGE / BASE_PAGE || touched == 1, "{touched} base pages");
    }

    #[test]
    fn more_than_the_machine_has_is_refused_unless_overcommitted() {
        let available = physical_memory().unwrap();
        assert!(available > 0);
        let too_much = usize::try_from(available).unwrap() + 1;
        let error = Region::map(too_much, options(HugePages::Off, false)).unwrap_err();
        let Error::Memory { bytes, reason } = &error else { panic!("{error}") };
        assert_eq!(*bytes, available + 1);
        assert!(reason.contains(&available.to_string()), "{reason}");
        let region = Region::map(too_much, options(HugePages::Off, true)).unwrap();
        write(&region, too_much - 1);
    }

    #[test]
    fn what_the_address_space_cannot_hold_is_an_error_even_when_overcommitted() {
        for len in [usize::MAX, isize::MAX as usize, 1 << 60] {
            let error = Region::map(len, options(HugePages::On, true)).unwrap_err();
            assert!(matches!(error, Error::Memory { bytes, .. } if bytes == len as u64), "{error}");
        }
    }

    #[test]
    fn names_round_trip() {
        for choice in [HugePages::Auto, HugePages::On, HugePages::Off] {
            assert_eq!(choice.name().parse::<HugePages>().unwrap(), choice);
        }
        assert!(matches!("yes".parse::<HugePages>(), Err(Error::Value(_))));
    }
}
