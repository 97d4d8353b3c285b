//! Arrays of any dtype, pages full of poison, and where their contents come from.

use half::{bf16, f16};
use paged_kv::dtype::DType;
use paged_kv::layout::{CacheLayout, PagesLayout, Which};
use paged_kv::storage::{PagesView, RowsView, RowsViewMut};

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

/// Dense elements of any dtype.
#[derive(Clone)]
pub(crate) enum Array {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

impl Array {
    pub(crate) fn new(values: &[f32], dtype: DType) -> Self {
        match dtype {
            DType::F16 => Self::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
            DType::BF16 => Self::BF16(values.iter().map(|&x| bf16::from_f32(x)).collect()),
            _ => Self::F32(values.to_vec()),
        }
    }

    pub(crate) fn view(&self, shape: [usize; 3]) -> RowsView<'_> {
        match self {
            Self::F32(v) => RowsView::from_slice(v, shape),
            Self::F16(v) => RowsView::from_slice(v, shape),
            Self::BF16(v) => RowsView::from_slice(v, shape),
        }
        .unwrap()
    }

    pub(crate) fn view_mut(&mut self, shape: [usize; 3]) -> RowsViewMut<'_> {
        match self {
            Self::F32(v) => RowsViewMut::from_slice(v, shape),
            Self::F16(v) => RowsViewMut::from_slice(v, shape),
            Self::BF16(v) => RowsViewMut::from_slice(v, shape),
        }
        .unwrap()
    }

    pub(crate) fn floats(&self) -> Vec<f32> {
        match self {
            Self::F32(v) => v.clone(),
            Self::F16(v) => v.iter().map(|x| x.to_f32()).collect(),
            Self::BF16(v) => v.iter().map(|x| x.to_f32()).collect(),
        }
    }

    fn address(&mut self) -> *mut u8 {
        match self {
            Self::F32(v) => v.as_mut_ptr().cast(),
            Self::F16(v) => v.as_mut_ptr().cast(),
            Self::BF16(v) => v.as_mut_ptr().cast(),
        }
    }
}

/// Pages of one layer in memory of their own, full of NaN and infinities.
pub(crate) struct Pages {
    memory: Array,
    pub(crate) key: PagesLayout,
    pub(crate) value: PagesLayout,
    value_offset: usize,
}

impl Pages {
    pub(crate) fn poisoned(layout: &CacheLayout) -> Self {
        let elements = layout.layer_bytes().unwrap() / layout.dtype.size();
        let poison = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        let values: Vec<f32> = (0..elements).map(|i| poison[i % 3]).collect();
        Self {
            memory: Array::new(&values, layout.dtype),
            key: layout.pages(Which::Key).unwrap(),
            value: layout.pages(Which::Value).unwrap(),
            value_offset: layout.value_offset(),
        }
    }

    pub(crate) fn views(&mut self) -> (PagesView<'_>, PagesView<'_>) {
        let base = self.memory.address();
        let value_base = base.wrapping_add(self.value_offset * self.value.dtype.size());
        // SAFETY: the layouts come from the `CacheLayout` that sized `memory`; each test uses its
        // own, one call at a time.
        unsafe { (PagesView::new(base, self.key, true), PagesView::new(value_base, self.value, true)) }
    }

    pub(crate) fn floats(&self) -> Vec<f32> {
        self.memory.floats()
    }
}
