//! Tokens to pages. A division costs as much as the rest of a decode step's arithmetic, so the
//! usual page sizes, powers of two, shift instead.

/// Tokens of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageSize {
    size: u32,
    /// log2 of a power of two.
    shift: Option<u32>,
}

impl PageSize {
    pub(super) fn new(size: u32) -> Self {
        assert!(size > 0, "a page holds at least one token");
        Self { size, shift: size.is_power_of_two().then(|| size.ilog2()) }
    }

    #[inline]
    pub(super) fn get(self) -> u32 {
        self.size
    }

    /// The page of a position, and the offset in it.
    #[inline]
    pub(super) fn locate(self, position: u32) -> (u32, u32) {
        match self.shift {
            Some(shift) => (position >> shift, position & (self.size - 1)),
            None => (position / self.size, position % self.size),
        }
    }

    /// Slots of `num_pages` pages: what a decode step compares with instead of dividing.
    #[inline]
    pub(super) fn slots(self, num_pages: u32) -> u64 {
        u64::from(num_pages) * u64::from(self.size)
    }

    /// Pages that `tokens` tokens need.
    #[inline]
    pub(super) fn pages_for(self, tokens: u32) -> u32 {
        let (full, rest) = self.locate(tokens);
        full + u32::from(rest > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shifts_and_divisions_agree_with_arithmetic() {
        for size in [1, 2, 3, 5, 16, 24, 128, 1 << 31, u32::MAX] {
            for tokens in [0, 1, 15, 16, 17, 127, 128, 129, 1 << 31, u32::MAX - 1, u32::MAX] {
                let page_size = PageSize::new(size);
                assert_eq!(page_size.locate(tokens), (tokens / size, tokens % size));
                assert_eq!(page_size.pages_for(tokens), tokens.div_ceil(size));
                assert!(page_size.slots(tokens.div_ceil(size)) >= u64::from(tokens));
            }
        }
    }
}
