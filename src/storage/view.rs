//! Borrowed views of raw memory: rows (queries, keys, values, outputs) and pages.
//!
//! A view is made once, unsafely, where memory enters the library (`storage/`, `python/array.rs`).
//! From then on it carries what is needed to check every access.

use std::marker::PhantomData;

use crate::dtype::{DType, Element};
use crate::error::{Error, Result};
use crate::layout::PagesLayout;

/// `[tokens, heads, dim]` elements to read; the last axis is contiguous, strides count elements.
#[derive(Clone, Copy, Debug)]
pub struct RowsView<'a> {
    base: *const u8,
    dtype: DType,
    shape: [usize; 3],
    strides: [isize; 2],
    life: PhantomData<&'a [u8]>,
}

/// Like [`RowsView`], to write; no two elements share memory.
#[derive(Debug)]
pub struct RowsViewMut<'a> {
    base: *mut u8,
    dtype: DType,
    shape: [usize; 3],
    strides: [isize; 2],
    life: PhantomData<&'a mut [u8]>,
}

/// The keys, or the values, of one layer.
///
/// Other threads may write other slots meanwhile, so no reference to the memory is ever formed;
/// kernels go through raw pointers and touch only slots that the caller's lease names.
#[derive(Clone, Copy, Debug)]
pub struct PagesView<'a> {
    base: *mut u8,
    layout: PagesLayout,
    scales: Option<Scales>,
    writable: bool,
    life: PhantomData<&'a [u8]>,
}

/// What elements of a quantised type are multiplied by: float32, an address without a lifetime.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// The first.
    pub base: *mut u8,
    /// Shape and strides, as of pages whose tokens have one element.
    pub layout: PagesLayout,
    /// Whether a head's tokens share one, which was given and isn't written.
    pub per_head: bool,
}

impl<'a> RowsView<'a> {
    /// Wraps raw memory.
    ///
    /// # Safety
    /// - `base` is aligned for `dtype`, and for every index inside `shape` the element at
    ///   `strides` from it is valid for reads during `'a`.
    /// - Nobody writes those elements during `'a`.
    pub unsafe fn new(base: *const u8, dtype: DType, shape: [usize; 3], strides: [isize; 2]) -> Self {
        Self { base, dtype, shape, strides, life: PhantomData }
    }

    /// Borrows a dense slice.
    pub fn from_slice<T: Element>(slice: &'a [T], shape: [usize; 3]) -> Result<Self> {
        check_len(slice.len(), shape)?;
        let strides = dense(shape);
        Ok(Self { base: slice.as_ptr().cast(), dtype: T::DTYPE, shape, strides, life: PhantomData })
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// `[tokens, heads, dim]`.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Address of the first element of one row.
    ///
    /// # Panics
    /// If `token` or `head` is out of range.
    #[inline]
    pub fn row(&self, token: usize, head: usize) -> *const u8 {
        assert!(token < self.shape[0] && head < self.shape[1], "row out of range");
        self.base.wrapping_offset(row_offset(self.strides, token, head) * self.dtype.size() as isize)
    }
}

impl<'a> RowsViewMut<'a> {
    /// Wraps raw memory.
    ///
    /// # Safety
    /// - `base` is aligned for `dtype`, and for every index inside `shape` the element at
    ///   `strides` from it is valid for reads and writes during `'a`.
    /// - Distinct indices name distinct elements, and nobody else touches them during `'a`.
    pub unsafe fn new(base: *mut u8, dtype: DType, shape: [usize; 3], strides: [isize; 2]) -> Self {
        Self { base, dtype, shape, strides, life: PhantomData }
    }

    /// Borrows a dense slice.
    pub fn from_slice<T: Element>(slice: &'a mut [T], shape: [usize; 3]) -> Result<Self> {
        check_len(slice.len(), shape)?;
        let strides = dense(shape);
        Ok(Self { base: slice.as_mut_ptr().cast(), dtype: T::DTYPE, shape, strides, life: PhantomData })
    }

    /// The same rows for a shorter time.
    pub fn reborrow(&mut self) -> RowsViewMut<'_> {
        RowsViewMut { life: PhantomData, ..*self }
    }

    /// The rows of the first `tokens` tokens and those of the others.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_at(self, tokens: usize) -> (Self, Self) {
        let [all, heads, dim] = self.shape;
        assert!(tokens <= all, "split out of range");
        let behind = row_offset(self.strides, tokens, 0) * self.dtype.size() as isize;
        let first = Self { shape: [tokens, heads, dim], ..self };
        // Distinct indices name distinct elements, so the two share nothing.
        let rest =
            Self { base: self.base.wrapping_offset(behind), shape: [all - tokens, heads, dim], ..self };
        (first, rest)
    }

    /// The rows of the first `heads` heads of every token and those of the others.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn split_heads_at(self, heads: usize) -> (Self, Self) {
        let [tokens, all, dim] = self.shape;
        assert!(heads <= all, "split out of range");
        let behind = row_offset(self.strides, 0, heads) * self.dtype.size() as isize;
        let first = Self { shape: [tokens, heads, dim], ..self };
        // Distinct indices name distinct elements, so the two share nothing.
        let rest =
            Self { base: self.base.wrapping_offset(behind), shape: [tokens, all - heads, dim], ..self };
        (first, rest)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// `[tokens, heads, dim]`.
    pub fn shape(&self) -> [usize; 3] {
        self.shape
    }

    /// Address of the first element of one row. Two threads may write two different rows.
    ///
    /// # Panics
    /// If `token` or `head` is out of range.
    #[inline]
    pub fn row(&self, token: usize, head: usize) -> *mut u8 {
        assert!(token < self.shape[0] && head < self.shape[1], "row out of range");
        self.base.wrapping_offset(row_offset(self.strides, token, head) * self.dtype.size() as isize)
    }
}

impl<'a> PagesView<'a> {
    /// Wraps raw memory.
    ///
    /// # Safety
    /// - `base` is aligned for the dtype and valid for `layout.span()` elements of reads, and of
    ///   writes if `writable`, during `'a`.
    /// - Whoever writes through it, or reads, holds a lease on the slots concerned: no slot is
    ///   written while another thread reads or writes it.
    pub unsafe fn new(base: *mut u8, layout: PagesLayout, writable: bool) -> Self {
        Self { base, layout, scales: None, writable, life: PhantomData }
    }

    /// The same pages with their scales.
    ///
    /// # Safety
    /// - As for [`new`](Self::new), but scales per head lie one behind the other, and nobody writes
    ///   them.
    #[must_use]
    pub unsafe fn with_scales(self, scales: Option<Scales>) -> Self {
        Self { scales, ..self }
    }

    /// What elements are multiplied by, if their type asks for it.
    #[inline]
    pub fn scales(&self) -> Option<&Scales> {
        self.scales.as_ref()
    }

    /// The scales of whole heads, one each.
    pub fn head_scales(&self) -> Option<&'a [f32]> {
        let Scales { base, layout, per_head: true } = self.scales? else { return None };
        // SAFETY: as `with_scales` was promised.
        Some(unsafe { std::slice::from_raw_parts(base.cast(), layout.num_heads) })
    }

    /// All scales as pages of one element per token; those of whole heads are read-only.
    pub fn scale_pages(&self) -> Option<Self> {
        let Scales { base, layout, per_head } = self.scales?;
        Some(Self { base, layout, scales: None, writable: self.writable && !per_head, ..*self })
    }

    /// The scales that live with tokens, as pages of one element per token.
    pub fn token_scales(&self) -> Option<Self> {
        self.scale_pages().filter(|_| self.scales.is_some_and(|scales| !scales.per_head))
    }

    /// The first elements of every row, read-only: the values of keys that hold them.
    ///
    /// # Errors
    /// [`Error::Layout`] where rows are shorter.
    pub fn first_elements(self, head_dim: usize) -> Result<Self> {
        if head_dim > self.layout.head_dim {
            let found = self.layout.head_dim;
            return Err(Error::Layout(format!("keys of {found} elements hold no values of {head_dim}")));
        }
        Ok(Self { layout: PagesLayout { head_dim, ..self.layout }, writable: false, ..self })
    }

    /// Shape and strides.
    #[inline]
    pub fn layout(&self) -> &PagesLayout {
        &self.layout
    }

    /// Whether writing is allowed.
    pub fn writable(&self) -> bool {
        self.writable
    }

    /// Address of page 0's first element.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Address of one token of one head.
    ///
    /// # Panics
    /// If an index is out of range.
    #[inline]
    pub fn slot(&self, page: usize, head: usize, token: usize) -> *mut u8 {
        let l = &self.layout;
        assert!(page < l.num_pages && head < l.num_heads && token < l.page_size, "slot out of range");
        self.base.wrapping_add(l.offset(page, head, token) * l.dtype.size())
    }
}

fn dense(shape: [usize; 3]) -> [isize; 2] {
    [(shape[1] * shape[2]) as isize, shape[2] as isize]
}

#[inline]
fn row_offset(strides: [isize; 2], token: usize, head: usize) -> isize {
    token as isize * strides[0] + head as isize * strides[1]
}

fn check_len(len: usize, shape: [usize; 3]) -> Result<()> {
    let want = shape.into_iter().try_fold(1_usize, usize::checked_mul);
    if want == Some(len) {
        Ok(())
    } else {
        Err(Error::Layout(format!("{len} elements do not make the shape {shape:?}")))
    }
}

// SAFETY: a view is a borrow: sending it is sending `&[T]`; the elements are plain numbers.
unsafe impl Send for RowsView<'_> {}
// SAFETY: as above.
unsafe impl Sync for RowsView<'_> {}
// SAFETY: sending it is sending `&mut [T]`.
unsafe impl Send for RowsViewMut<'_> {}
// SAFETY: a shared `&RowsViewMut` hands out addresses only; writing through one takes an unsafe
// block, whose author keeps rows apart between threads.
unsafe impl Sync for RowsViewMut<'_> {}
// SAFETY: as for `RowsViewMut`; leases keep readers and writers of a slot apart.
unsafe impl Send for PagesView<'_> {}
// SAFETY: as above.
unsafe impl Sync for PagesView<'_> {}
