//! Shapes, strides and byte sizes of a cache; all arithmetic is checked in 64 bits.

use std::fmt;
use std::str::FromStr;

use crate::dtype::DType;
use crate::error::{Error, Result};

/// Bytes of a scale.
const SCALE: usize = size_of::<f32>();

/// Order of the axes inside one page of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageOrder {
    /// `[num_kv_heads, page_size, head_dim]`: the tokens of one head lie together.
    Hnd,
    /// `[page_size, num_kv_heads, head_dim]`: the heads of one token lie together.
    Nhd,
}

impl PageOrder {
    /// The name used by the field.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hnd => "HND",
            Self::Nhd => "NHD",
        }
    }
}

impl fmt::Display for PageOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PageOrder {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "HND" => Ok(Self::Hnd),
            "NHD" => Ok(Self::Nhd),
            _ => Err(Error::Layout(format!("layout {text:?} is not one of \"HND\", \"NHD\""))),
        }
    }
}

/// Where the keys, or the values, of one layer lie: strides count elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagesLayout {
    /// Element type.
    pub dtype: DType,
    /// Physical pages, the null page included.
    pub num_pages: usize,
    /// KV heads.
    pub num_heads: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// Elements of one token of one head; these lie together.
    pub head_dim: usize,
    /// From a page to the next.
    pub page_stride: usize,
    /// From a head to the next inside a page.
    pub head_stride: usize,
    /// From a token to the next inside a page.
    pub token_stride: usize,
}

impl PagesLayout {
    /// Elements from the first to one past the last, or an error where that overflows.
    pub fn span(&self) -> Result<usize> {
        let last = |count: usize, stride: usize| count.saturating_sub(1).checked_mul(stride);
        if self.num_pages == 0 {
            return Ok(0);
        }
        last(self.num_pages, self.page_stride)
            .and_then(|n| n.checked_add(last(self.num_heads, self.head_stride)?))
            .and_then(|n| n.checked_add(last(self.page_size, self.token_stride)?))
            .and_then(|n| n.checked_add(self.head_dim))
            .filter(|n| n.checked_mul(self.dtype.size()).is_some_and(|b| isize::try_from(b).is_ok()))
            .ok_or_else(|| Error::Layout(format!("pages overflow the address space: {self:?}")))
    }

    /// Bytes from a page's first element to one past its last: in dense memory, those of the page.
    pub fn page_bytes(&self) -> usize {
        let (heads, tokens) = (self.num_heads.saturating_sub(1), self.page_size.saturating_sub(1));
        (heads * self.head_stride + tokens * self.token_stride + self.head_dim) * self.dtype.size()
    }

    /// Element offset of one token of one head.
    #[inline]
    pub fn offset(&self, page: usize, head: usize, token: usize) -> usize {
        page * self.page_stride + head * self.head_stride + token * self.token_stride
    }
}

/// Which half of a page is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Which {
    /// Keys.
    Key,
    /// Values.
    Value,
}

impl FromStr for Which {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "key" => Ok(Self::Key),
            "value" => Ok(Self::Value),
            _ => Err(Error::Value(format!("which must be \"key\" or \"value\", not {text:?}"))),
        }
    }
}

/// The shape of a whole cache. Per layer `[num_pages, 2 (K, V), one page in PageOrder]`, so that
/// one page of one layer is one contiguous block. Scales of a quantised type (float32, one per
/// token and head, `[2 (K, V), the same order]`) are the block's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Layers; 0 keeps tables only.
    pub num_layers: usize,
    /// Physical pages, the null page included.
    pub num_pages: usize,
    /// Tokens of a page.
    pub page_size: usize,
    /// KV heads.
    pub num_kv_heads: usize,
    /// Elements of a key.
    pub head_dim: usize,
    /// Elements of a value.
    pub v_head_dim: usize,
    /// Element type.
    pub dtype: DType,
    /// Of a quantised type: whether each head has one scale, given beforehand, instead of one per
    /// token that lives with the page.
    pub head_scales: bool,
    /// Whether values are the first `v_head_dim` elements of each key (the latent of MLA): they are not
    /// stored twice, and share the keys' scales.
    pub value_in_key: bool,
    /// Order of the axes in a page.
    pub order: PageOrder,
}

impl CacheLayout {
    /// Elements of one token's keys and values in one layer.
    fn token_elements(&self) -> Result<usize> {
        let own = if self.value_in_key { 0 } else { self.v_head_dim };
        self.head_dim
            .checked_add(own)
            .and_then(|dims| dims.checked_mul(self.num_kv_heads))
            .ok_or_else(|| self.overflow())
    }

    /// What has memory of its own: keys, and values that are not part of them.
    pub fn stored(&self) -> &'static [Which] {
        if self.value_in_key { &[Which::Key] } else { &[Which::Key, Which::Value] }
    }

    /// Bytes of one page in one layer: K and V together, and their scales.
    pub fn page_bytes(&self) -> Result<usize> {
        let elements = self
            .token_elements()?
            .checked_mul(self.page_size)
            .and_then(|n| n.checked_mul(self.dtype.size()))
            .ok_or_else(|| self.overflow())?;
        if !self.has_token_scales() {
            return Ok(elements);
        }
        elements
            .checked_next_multiple_of(SCALE)
            .and_then(|n| n.checked_add(self.scale_plane()?.checked_mul(self.stored().len())?))
            .ok_or_else(|| self.overflow())
    }

    /// Whether scales live with the pages.
    pub fn has_token_scales(&self) -> bool {
        self.dtype.is_quantised() && !self.head_scales
    }

    /// Bytes of the scales of one page's keys, or values.
    fn scale_plane(&self) -> Option<usize> {
        self.num_kv_heads.checked_mul(self.page_size)?.checked_mul(SCALE)
    }

    /// Bytes of one layer.
    pub fn layer_bytes(&self) -> Result<usize> {
        self.page_bytes()?.checked_mul(self.num_pages).ok_or_else(|| self.overflow())
    }

    /// Bytes of the whole cache.
    pub fn total_bytes(&self) -> Result<usize> {
        self.layer_bytes()?
            .checked_mul(self.num_layers)
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| self.overflow())
    }

    /// Strides of the keys or the values of one layer. The values of a page lie
    /// [`value_offset`](Self::value_offset) elements behind its keys.
    pub fn pages(&self, which: Which) -> Result<PagesLayout> {
        let head_dim = match which {
            Which::Key => self.head_dim,
            Which::Value => self.v_head_dim,
        };
        let row = if self.value_in_key { self.head_dim } else { head_dim };
        let (head_stride, token_stride) = match self.order {
            PageOrder::Hnd => (self.page_size * row, row),
            PageOrder::Nhd => (row, self.num_kv_heads * row),
        };
        Ok(PagesLayout {
            dtype: self.dtype,
            num_pages: self.num_pages,
            num_heads: self.num_kv_heads,
            page_size: self.page_size,
            head_dim,
            page_stride: self.page_bytes()? / self.dtype.size(),
            head_stride,
            token_stride,
        })
    }

    /// Strides of the scales of one layer's keys or values, as pages of one float32 per token. A
    /// page's first lies [`scale_offset`](Self::scale_offset) bytes behind its first key; scales per
    /// head are not in the pages.
    pub fn scales(&self, which: Which) -> Result<PagesLayout> {
        let pages = self.pages(which)?;
        let (head_stride, token_stride) = match self.order {
            PageOrder::Hnd => (self.page_size, 1),
            PageOrder::Nhd => (1, self.num_kv_heads),
        };
        let scales = PagesLayout { dtype: DType::F32, head_dim: 1, ..pages };
        Ok(if self.head_scales {
            PagesLayout { page_stride: 0, head_stride: 1, token_stride: 0, ..scales }
        } else {
            PagesLayout { page_stride: self.page_bytes()? / SCALE, head_stride, token_stride, ..scales }
        })
    }

    /// Bytes from a page's first key to the first scale of its keys, or of its values.
    pub fn scale_offset(&self, which: Which) -> usize {
        let tokens = self.num_kv_heads * self.page_size;
        let (own, planes) = if self.value_in_key { (0, 0) } else { (self.v_head_dim, which as usize) };
        let elements = tokens * (self.head_dim + own);
        (elements * self.dtype.size()).next_multiple_of(SCALE) + planes * tokens * SCALE
    }

    /// Elements from a page's first key to its first value.
    pub fn value_offset(&self) -> usize {
        if self.value_in_key { 0 } else { self.num_kv_heads * self.page_size * self.head_dim }
    }

    fn overflow(&self) -> Error {
        Error::Layout(format!("the cache's size overflows 64 bits: {self:?}"))
    }
}

/// Bytes that one token of context costs over all layers: `layers · kv_heads · (head_dim +
/// v_head_dim) · bytes per element`, and 8 bytes of scales per layer and KV head for a quantised
/// type (4 without values of their own: `v_head_dim` 0).
pub fn kv_bytes_per_token(
    num_layers: usize,
    num_kv_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
    dtype: DType,
) -> Result<usize> {
    let one_token = CacheLayout {
        num_layers,
        num_pages: 1,
        page_size: 1,
        num_kv_heads,
        head_dim,
        v_head_dim,
        dtype,
        head_scales: false,
        value_in_key: v_head_dim == 0,
        order: PageOrder::Hnd,
    };
    one_token.total_bytes()
}

/// Reads a size such as `4GiB`, `1.5 GB`, `512MiB` or `65536` (bytes).
pub fn parse_bytes(text: &str) -> Result<u64> {
    let bad = || {
        Error::Value(format!(
            "size {text:?} is not a number of bytes such as \"4GiB\", \"512MiB\", \"1.5GB\" or \"65536\""
        ))
    };
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let unit = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1_u64,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(bad()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(bad);
    }
    let bytes = number.parse::<f64>().map_err(|_| bad())? * unit as f64;
    if bytes < u64::MAX as f64 { Ok(bytes as u64) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(order: PageOrder) -> CacheLayout {
        CacheLayout {
            num_layers: 3,
            num_pages: 5,
            page_size: 4,
            num_kv_heads: 2,
            head_dim: 8,
            v_head_dim: 6,
            dtype: DType::BF16,
            head_scales: false,
            value_in_key: false,
            order,
        }
    }

    #[test]
    fn a_page_of_a_layer_is_one_block_with_keys_before_values() {
        for order in [PageOrder::Hnd, PageOrder::Nhd] {
            let cache = layout(order);
            assert_eq!(cache.page_bytes().unwrap(), 4 * 2 * (8 + 6) * 2);
            let (key, value) = (cache.pages(Which::Key).unwrap(), cache.pages(Which::Value).unwrap());
            let mut seen = vec![false; cache.page_bytes().unwrap() / 2 * 5];
            for page in 0..5 {
                for head in 0..2 {
                    for token in 0..4 {
                        let keys = key.offset(page, head, token);
                        let values = cache.value_offset() + value.offset(page, head, token);
                        for i in (keys..keys + 8).chain(values..values + 6) {
                            assert!(!std::mem::replace(&mut seen[i], true), "element {i} twice");
                        }
                    }
                }
            }
            assert!(seen.into_iter().all(|x| x), "gap in {order}");
        }
    }

    #[test]
    fn scales_are_the_end_of_the_block_they_belong_to() {
        for order in [PageOrder::Hnd, PageOrder::Nhd] {
            // 3 tokens of 2 heads of 13 bytes: the scales begin at the next multiple of 4.
            let shape = CacheLayout { page_size: 3, head_dim: 8, v_head_dim: 5, ..layout(order) };
            let cache = CacheLayout { dtype: DType::I8, ..shape };
            assert_eq!(cache.page_bytes().unwrap(), 80 + 2 * 6 * 4);
            let mut seen = vec![false; cache.page_bytes().unwrap() * 5];
            for which in [Which::Key, Which::Value] {
                let scales = cache.scales(which).unwrap();
                for (page, head, token) in (0..5 * 6).map(|i| (i / 6, i / 3 % 2, i % 3)) {
                    let at = cache.scale_offset(which) + 4 * scales.offset(page, head, token);
                    assert!(at >= page * 128 + 80, "behind the page's elements");
                    seen[at..at + 4].iter_mut().for_each(|seen| assert!(!std::mem::replace(seen, true)));
                }
            }
            assert_eq!(seen.iter().filter(|&&seen| seen).count(), 5 * 2 * 6 * 4);
            let heads = CacheLayout { head_scales: true, ..cache };
            assert_eq!(heads.page_bytes().unwrap(), 3 * 2 * 13);
            assert_eq!(heads.scales(Which::Value).unwrap().offset(4, 1, 2), 1);
        }
    }

    #[test]
    fn values_in_keys_take_no_memory_and_lie_where_keys_do() {
        for dtype in [DType::BF16, DType::I8] {
            let plain = CacheLayout { v_head_dim: 0, dtype, ..layout(PageOrder::Nhd) };
            let cache = CacheLayout { v_head_dim: 6, value_in_key: true, ..plain };
            let scales = if dtype == DType::I8 { 4 * 2 * 4 } else { 0 };
            assert_eq!(cache.page_bytes().unwrap(), 4 * 2 * 8 * dtype.size() + scales);
            let (key, value) = (cache.pages(Which::Key).unwrap(), cache.pages(Which::Value).unwrap());
            assert_eq!(value, PagesLayout { head_dim: 6, ..key });
            assert_eq!(cache.value_offset(), 0);
            assert_eq!(cache.scale_offset(Which::Key), cache.scale_offset(Which::Value));
            assert_eq!(cache.stored(), [Which::Key]);
        }
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let mut cache = layout(PageOrder::Hnd);
        cache.num_pages = usize::MAX / 64;
        assert!(matches!(cache.total_bytes(), Err(Error::Layout(_))));
        let mut pages = layout(PageOrder::Hnd).pages(Which::Key).unwrap();
        pages.page_stride = usize::MAX / 2;
        assert!(matches!(pages.span(), Err(Error::Layout(_))));
    }

    #[test]
    fn llama_3_70b_takes_320_kib_per_token() {
        assert_eq!(kv_bytes_per_token(80, 8, 128, 128, DType::BF16).unwrap(), 320 << 10);
        assert_eq!(kv_bytes_per_token(80, 8, 128, 128, DType::I8).unwrap(), (160 << 10) + 80 * 8 * 8);
    }

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        assert_eq!(parse_bytes("4GiB").unwrap(), 4 << 30);
        assert_eq!(parse_bytes(" 1.5 GB ").unwrap(), 1_500_000_000);
        assert_eq!(parse_bytes("65536").unwrap(), 65536);
        for bad in ["", "GiB", "-1", "4 parsecs", "99999999999999999999TiB", "1e30", "NaN"] {
            assert!(parse_bytes(bad).is_err(), "{bad:?}");
        }
    }
}
