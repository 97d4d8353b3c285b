//! Arrays of any dtype, pages full of poison, and where their contents come from.

use half::{bf16, f16};
use paged_kv::dtype::{DType, Element, F8E4M3};
use paged_kv::layout::{CacheLayout, PagesLayout, Which};
use paged_kv::storage::{PagesView, RowsView, RowsViewMut, Scales};

/// `SplitMix64`.
#[derive(Clone)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In -1..1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }

    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, (self.next() % (i as u64 + 1)) as usize);
        }
    }
}

pub(crate) fn rounded(x: f32, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

/// One token of one head as quantised pages hold it, and its scale: given, or that which makes its
/// largest number the type's.
pub(crate) fn stored_row(row: &[f32], dtype: DType, given: Option<f32>) -> (Vec<f32>, f32) {
    let most = if dtype == DType::I8 { 127.0 } else { 448.0 };
    let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let scale = given.unwrap_or(largest / most);
    let element = |x: f32| match dtype {
        _ if scale == 0.0 => 0.0,
        DType::I8 => (x / scale).clamp(-most, most).round_ties_even(),
        _ => F8E4M3::from_f32(x / scale).to_f32(),
    };
    (row.iter().map(|&x| element(x) * scale).collect(), scale)
}

/// Dense elements of any dtype.
#[derive(Clone)]
pub(crate) enum Array {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I8(Vec<i8>),
    F8(Vec<F8E4M3>),
}

impl Array {
    pub(crate) fn new(values: &[f32], dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
            DType::BF16 => Self::BF16(values.iter().map(|&x| bf16::from_f32(x)).collect()),
            DType::I8 => Self::I8(values.iter().map(|&x| Element::from_f32(x)).collect()),
            DType::F8E4M3 => Self::F8(values.iter().map(|&x| Element::from_f32(x)).collect()),
            _ => Self::F32(values.to_vec()),
        }
    }

    pub(crate) fn view(&self, shape: [usize; 3]) -> RowsView<'_> {
        match self {
            Self::F32(v) => RowsView::from_slice(v, shape),
            Self::F16(v) => RowsView::from_slice(v, shape),
            Self::BF16(v) => RowsView::from_slice(v, shape),
            Self::I8(v) => RowsView::from_slice(v, shape),
            Self::F8(v) => RowsView::from_slice(v, shape),
        }
        .unwrap()
    }

    pub(crate) fn view_mut(&mut self, shape: [usize; 3]) -> RowsViewMut<'_> {
        match self {
            Self::F32(v) => RowsViewMut::from_slice(v, shape),
            Self::F16(v) => RowsViewMut::from_slice(v, shape),
            Self::BF16(v) => RowsViewMut::from_slice(v, shape),
            Self::I8(v) => RowsViewMut::from_slice(v, shape),
            Self::F8(v) => RowsViewMut::from_slice(v, shape),
        }
        .unwrap()
    }

    pub(crate) fn floats(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Self::BF16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Self::I8(v) => v.iter().map(|&x| x.into()).collect(),
            Self::F8(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }

    fn address(&mut self) -> *mut u8 {
        match self {
            Self::F32(v) => v.as_mut_ptr().cast(),
            Self::F16(v) => v.as_mut_ptr().cast(),
            Self::BF16(v) => v.as_mut_ptr().cast(),
            Self::I8(v) => v.as_mut_ptr().cast(),
            Self::F8(v) => v.as_mut_ptr().cast(),
        }
    }
}

/// Pages of one layer in memory of their own, full of NaN and infinities; where elements can't be
/// those, their scales are.
pub(crate) struct Pages {
    memory: Array,
    /// As large as `memory` in bytes, with scales where a cache has them; or one per head.
    pub(crate) scales: Vec<f32>,
    pub(crate) layout: CacheLayout,
    pub(crate) key: PagesLayout,
    pub(crate) value: PagesLayout,
}

impl Pages {
    pub(crate) fn poisoned(layout: &CacheLayout) -> Self {
        let bytes = layout.layer_bytes().unwrap();
        let poison = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let poisoned = |n: usize| -> Vec<f32> { (0..n).map(|i| poison[i % 3]).collect() };
        Self {
            memory: Array::new(&poisoned(bytes / layout.dtype.size()), layout.dtype),
            scales: match (layout.has_token_scales(), layout.head_scales) {
                (true, _) => poisoned(bytes / 4),
                (false, true) => (0..2 * layout.num_kv_heads).map(head_scale).collect(),
                _ => Vec::new(),
            },
            layout: *layout,
            key: layout.pages(Which::Key).unwrap(),
            value: layout.pages(Which::Value).unwrap(),
        }
    }

    pub(crate) fn views(&mut self) -> (PagesView<'_>, PagesView<'_>) {
        let layout = self.layout;
        let base = self.memory.address();
        let value_base = base.wrapping_add(layout.value_offset() * layout.dtype.size());
        let scales = self.scales.as_mut_ptr();
        let scales_of = |which| {
            let place = if layout.head_scales {
                if layout.value_in_key { 0 } else { which as usize * layout.num_kv_heads }
            } else {
                layout.scale_offset(which) / 4
            };
            layout.dtype.is_quantised().then(|| Scales {
                base: scales.wrapping_add(place).cast(),
                layout: layout.scales(which).unwrap(),
                per_head: layout.head_scales,
            })
        };
        // SAFETY: the layouts come from the `CacheLayout` that sized `memory` and `scales`; each test
        // uses its own, one call at a time.
        unsafe {
            (
                PagesView::new(base, self.key, true).with_scales(scales_of(Which::Key)),
                PagesView::new(value_base, self.value, true).with_scales(scales_of(Which::Value)),
            )
        }
    }

    pub(crate) fn floats(&self) -> Vec<f32> {
        self.memory.floats()
    }

    /// What one token of one head stands for, and its scale.
    pub(crate) fn row(&mut self, which: Which, page: usize, head: usize, token: usize) -> (Vec<f32>, f32) {
        let (keys, values) = self.views();
        stored(if which == Which::Key { &keys } else { &values }, page, head, token)
    }
}

/// What one token of one head of quantised pages stands for, and its scale.
pub(crate) fn stored(pages: &PagesView, page: usize, head: usize, token: usize) -> (Vec<f32>, f32) {
    let layout = pages.layout();
    let (slot, scales) = (pages.slot(page, head, token), pages.scale_pages().unwrap());
    // SAFETY: both slots were checked, and nobody else uses the pages of a test.
    let (bytes, scale) = unsafe {
        let bytes = std::slice::from_raw_parts(slot.cast_const(), layout.head_dim);
        (bytes, scales.slot(page, head, token).cast::<f32>().read_unaligned())
    };
    let element = |&bits: &u8| match layout.dtype {
        DType::I8 => f32::from(bits.cast_signed()),
        _ => F8E4M3(bits).to_f32(),
    };
    (bytes.iter().map(|bits| element(bits) * scale).collect(), scale)
}

/// The scale of a head where it has one: the first half are those of keys. Some let nothing in
/// -1..1 go beyond the largest of eight bits, some do.
pub(crate) fn head_scale(i: usize) -> f32 {
    1.0 / [300.0, 500.0, 440.0][i % 3]
}
