//! Arrays of other libraries, without copying: numpy or DLPack in, numpy or DLPack out.
//!
//! An [`Array`] keeps the memory it describes alive. Its strides, alignment and extent are checked
//! once, here, in 64 bits; what comes out are the views of `storage/`, which kernels trust.
//!
//! Elements are read and written where they lie, with the interpreter free to run other threads:
//! as with numpy itself, a program that changes an array while a call reads it gets mixed values.
//! Integers that address memory (page tables, slots, lengths) are therefore copied before they are
//! checked, so that what was checked is what is used.

#![expect(unsafe_code, reason = "memory of other libraries enters and leaves the library here")]

mod adopt;
mod apart;
mod dlpack;
mod fill;
mod integers;
mod memory;
mod numpy;
mod output;
mod scales;

use std::ops::Range;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

pub(super) use adopt::{LayerArrays, PlaneArrays, adopt};
pub(super) use apart::check_written;
pub(super) use dlpack::export as export_capsule;
pub(super) use fill::{Fill, Values};
pub(super) use integers::{Integer, integers, named};
pub(super) use memory::Memory;
pub(super) use numpy::{export as export_numpy, lend};
pub(super) use output::{Output, OutputKind};
pub(super) use scales::{Scale, per_head};

use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{PageOrder, PagesLayout};
use crate::python::tensor::Tensor;
use crate::storage::{PagesView, RowsView, RowsViewMut};

/// Axes of pages, which have the most; arrays with more are refused by their number of axes.
const MAX_AXES: usize = 4;

/// What one element is, as far as this library tells elements apart.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Element {
    Float(DType),
    Float64,
    Int { signed: bool, bytes: usize },
    Other { name: String, bytes: usize },
}

impl Element {
    fn size(&self) -> usize {
        match self {
            Self::Float(dtype) => dtype.size(),
            Self::Float64 => 8,
            Self::Int { bytes, .. } | Self::Other { bytes, .. } => *bytes,
        }
    }

    fn name(&self) -> String {
        match self {
            Self::Float(dtype) => dtype.name().into(),
            Self::Float64 => "float64".into(),
            Self::Int { signed, bytes } => format!("{}int{}", if *signed { "" } else { "u" }, bytes * 8),
            Self::Other { name, .. } => name.clone(),
        }
    }
}

/// Keeps the memory of an [`Array`] alive.
enum Owner<'py> {
    Object(Bound<'py, PyAny>),
    Capsule(dlpack::Managed),
}

/// A strided array in host memory. Strides count elements and may have either sign.
pub(super) struct Array<'py> {
    /// The argument's name, for messages.
    name: &'static str,
    base: *mut u8,
    element: Element,
    axes: usize,
    shape: [usize; MAX_AXES],
    strides: [isize; MAX_AXES],
    writable: bool,
    kind: OutputKind<'py>,
    owner: Owner<'py>,
}

impl<'py> Array<'py> {
    /// Takes a numpy array, or anything that speaks DLPack, as the argument called `name`.
    pub(super) fn new(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Some(array) = Self::import(name, object)? {
            return Ok(array);
        }
        let class = object.get_type().name()?;
        Err(PyTypeError::new_err(format!(
            "{name} must be a numpy array or have __dlpack__ (torch, jax, …), not {class}"
        )))
    }

    /// Like [`new`](Self::new), and `None` for what is no array.
    pub(super) fn import(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        // The pages of most calls are one: nobody speaks DLPack with himself.
        if let Ok(tensor) = object.cast::<Tensor>() {
            return Ok(Some(Self::of_tensor(name, tensor)?));
        }
        match numpy::import(name, object)? {
            None => dlpack::import(name, object),
            found => Ok(found),
        }
    }

    /// Like [`new`](Self::new), and `None` for Python's `None`.
    pub(super) fn optional(name: &'static str, object: Option<&Bound<'py, PyAny>>) -> PyResult<Option<Self>> {
        object.map(|object| Self::new(name, object)).transpose()
    }

    /// Puts an array together and checks what every use relies on.
    fn build(
        name: &'static str,
        base: *mut u8,
        element: Element,
        axes: impl ExactSizeIterator<Item = (usize, isize)>,
        writable: bool,
        kind: OutputKind<'py>,
        owner: Owner<'py>,
    ) -> Result<Self> {
        let count = axes.len();
        if count > MAX_AXES {
            return Err(Error::Layout(format!(
                "{name} has {count} axes; no argument has more than {MAX_AXES}"
            )));
        }
        let (mut shape, mut strides) = ([0; MAX_AXES], [0; MAX_AXES]);
        for (axis, (length, stride)) in axes.enumerate() {
            (shape[axis], strides[axis]) = (length, stride);
        }
        let array = Self { name, base, element, axes: count, shape, strides, writable, kind, owner };
        array.extent()?;
        if array.shape().iter().try_fold(1_isize, |n, &length| n.checked_mul(length as isize)).is_none() {
            return Err(array.refuse("has more elements than memory could hold"));
        }
        // Where nothing can be read, the address need not be aligned (nor be one).
        let size = array.element.size();
        if size.is_power_of_two() && !array.is_empty() && !base.addr().is_multiple_of(size) {
            return Err(
                array.refuse(&format!("lies at {:#x}, not aligned to its {size}-byte elements", base.addr()))
            );
        }
        Ok(array)
    }

    pub(super) fn shape(&self) -> &[usize] {
        &self.shape[..self.axes]
    }

    fn strides(&self) -> &[isize] {
        &self.strides[..self.axes]
    }

    fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// What an output that matches this array has to be.
    pub(super) fn kind(&self) -> OutputKind<'py> {
        self.kind.clone()
    }

    /// The type of an element of pages: bytes are quantised, unsigned ones the bits of `float8_e4m3fn`.
    fn pages_dtype(&self) -> Result<DType> {
        match self.element {
            Element::Float(dtype @ DType::F8E4M3) => Ok(dtype),
            Element::Int { signed: true, bytes: 1 } => Ok(DType::I8),
            Element::Int { signed: false, bytes: 1 } => Ok(DType::F8E4M3),
            _ => self.float("uint16 as the bits of bfloat16, int8 and float8_e4m3fn, and uint8 as its bits"),
        }
    }

    /// The element type; unsigned 16-bit integers are the bits of bfloat16.
    pub(super) fn dtype(&self) -> Result<DType> {
        self.float("and uint16 as the bits of bfloat16")
    }

    /// The element type, if not quantised; what else is supported is for the error.
    fn float(&self, others: &str) -> Result<DType> {
        match self.element {
            Element::Float(dtype) if !dtype.is_quantised() => Ok(dtype),
            Element::Int { signed: false, bytes: 2 } => Ok(DType::BF16),
            _ => {
                let known = DType::FLOATS.map(DType::name).join(", ");
                let has = self.element.name();
                Err(self.refuse(&format!("has dtype {has}; supported are {known}, {others}")))
            }
        }
    }

    /// Rows `[tokens, heads, dim]` to read.
    pub(super) fn rows(&self) -> Result<RowsView<'_>> {
        let dtype = self.dtype()?;
        let ([tokens, heads, dim], [token, head, _]) = self.contiguous_rows("[tokens, heads, dim]")?;
        // SAFETY: `build` checked alignment and extent of what the producer vouched for, and the
        // owner keeps it alive as long as `self` is borrowed. That nobody writes meanwhile is the
        // calling program's part, as the module header says.
        Ok(unsafe { RowsView::new(self.base, dtype, [tokens, heads, dim], [token, head]) })
    }

    /// Rows `[tokens, heads, dim]` to write: of an array that is writable and has no two elements
    /// in one place.
    pub(super) fn rows_mut(&mut self) -> Result<RowsViewMut<'_>> {
        let dtype = self.dtype()?;
        self.check_writable()?;
        let ([tokens, heads, dim], [token, head, _]) = self.contiguous_rows("[tokens, heads, dim]")?;
        // SAFETY: as in `rows`; `check_writable` refused read-only memory and overlap, and `&mut
        // self` keeps a second view of this array away.
        Ok(unsafe { RowsViewMut::new(self.base, dtype, [tokens, heads, dim], [token, head]) })
    }

    /// The pages of one layer, with axes in `order`, to read or, if `write`, to write.
    pub(super) fn pages(&self, order: PageOrder, write: bool) -> Result<PagesView<'_>> {
        let axes = match order {
            PageOrder::Hnd => "[num_pages, num_kv_heads, page_size, head_dim]",
            PageOrder::Nhd => "[num_pages, page_size, num_kv_heads, head_dim]",
        };
        let dtype = self.pages_dtype()?;
        let (shape, strides) = self.contiguous_rows::<4>(axes)?;
        self.pages_of(dtype, order, shape, strides, write)
    }

    /// Pages of so many axes, the last of which is contiguous.
    fn pages_of(
        &self,
        dtype: DType,
        order: PageOrder,
        shape: [usize; 4],
        strides: [isize; 4],
        write: bool,
    ) -> Result<PagesView<'_>> {
        if write {
            self.check_writable()?;
        }
        let stride = |axis: usize| {
            // An axis of one element is never stepped along.
            let stride = if shape[axis] > 1 { strides[axis] } else { 0 };
            usize::try_from(stride)
                .map_err(|_| self.refuse(&format!("runs backwards along axis {axis} (stride {stride})")))
        };
        let (head, token) = match order {
            PageOrder::Hnd => (1, 2),
            PageOrder::Nhd => (2, 1),
        };
        let layout = PagesLayout {
            dtype,
            num_pages: shape[0],
            num_heads: shape[head],
            page_size: shape[token],
            head_dim: shape[3],
            page_stride: stride(0)?,
            head_stride: stride(head)?,
            token_stride: stride(token)?,
        };
        layout.span()?;
        // SAFETY: `build` checked alignment and extent of what the producer vouched for, which for
        // strides that are not negative is `layout.span()`; the owner keeps it alive. `write` was
        // granted only for writable memory without overlap. Keeping readers and writers of a slot
        // apart is the caller's part, as the functions that take bare pages document.
        Ok(unsafe { PagesView::new(self.base, layout, write) })
    }

    /// Refuses to write into this array if it shares memory with any of `others`.
    pub(super) fn check_apart(&self, others: &[&Self]) -> Result<()> {
        let Some(own) = self.extent()? else { return Ok(()) };
        for other in others {
            if let Some(range) = other.extent()?
                && own.start < range.end
                && range.start < own.end
            {
                return Err(self.refuse(&format!("overlaps {} in memory", other.name)));
            }
        }
        Ok(())
    }

    /// Refuses an array that shares memory with the cache's pages of the layer concerned.
    pub(super) fn check_outside(&self, pages: &PagesView<'_>) -> Result<()> {
        let start = pages.base().addr();
        let end = start + pages.layout().span()? * pages.layout().dtype.size();
        match self.extent()? {
            Some(own) if own.start < end && start < own.end => {
                Err(self.refuse("overlaps the cache's own pages in memory"))
            }
            _ => pages.token_scales().map_or(Ok(()), |scales| self.check_outside(&scales)),
        }
    }

    /// Shape and strides of an array of `N` axes, the last of which is contiguous.
    fn contiguous_rows<const N: usize>(&self, axes: &str) -> Result<([usize; N], [isize; N])> {
        let (Ok(shape), Ok(strides)) = (self.shape().try_into(), self.strides().try_into()) else {
            return Err(self.refuse(&format!("must have the {N} axes {axes}")));
        };
        let stride = self.strides[N - 1];
        if stride != 1 && self.shape[N - 1] > 1 && !self.is_empty() {
            return Err(self.refuse(&format!("must be contiguous along its last axis (stride {stride})")));
        }
        Ok((shape, strides))
    }

    fn check_writable(&self) -> Result<()> {
        if !self.writable {
            return Err(self.refuse("is read-only (or a copy that its library made for this call)"));
        }
        // Sorted by stride, each axis must step over all that the smaller ones span. This refuses
        // a few exotic interleavings that would be fine, and nothing that libraries produce.
        let mut axes: Vec<_> = self.shape().iter().zip(self.strides()).filter(|axis| *axis.0 > 1).collect();
        axes.sort_unstable_by_key(|axis| axis.1.unsigned_abs());
        let mut span = 0;
        for (&length, &stride) in axes {
            if !self.is_empty() && stride.unsigned_abs() <= span {
                return Err(self.refuse("holds several elements in one place, so it can't be written"));
            }
            span += (length - 1) * stride.unsigned_abs();
        }
        Ok(())
    }

    /// The addresses between the first and the last byte, or `None` if there are none.
    fn extent(&self) -> Result<Option<Range<usize>>> {
        if self.is_empty() {
            return Ok(None);
        }
        let size = self.element.size();
        let bounds = || {
            let (mut low, mut high) = (0_isize, 0_isize);
            for (&length, &stride) in self.shape().iter().zip(self.strides()) {
                let reach = isize::try_from(length - 1).ok()?.checked_mul(stride)?;
                let bound = if reach < 0 { &mut low } else { &mut high };
                *bound = bound.checked_add(reach)?;
            }
            let size = isize::try_from(size).ok()?;
            let start = self.base.addr().checked_add_signed(low.checked_mul(size)?)?;
            let end = self.base.addr().checked_add_signed(high.checked_add(1)?.checked_mul(size)?)?;
            isize::try_from(end - start).ok()?;
            Some(start..end)
        };
        bounds().map(Some).ok_or_else(|| self.refuse("reaches beyond the address space"))
    }

    /// The error that says what is wrong with this argument, and what was given.
    pub(super) fn refuse(&self, what: &str) -> Error {
        Error::Layout(format!(
            "{} {what}: got {} with shape {:?} and strides {:?}",
            self.name,
            self.element.name(),
            self.shape(),
            self.strides()
        ))
    }
}

/// An empty vector with room for `count` values, or an error where the memory can't be had.
pub(super) fn reserve<T>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).map_err(|error| Error::Memory {
        bytes: (count as u64).saturating_mul(size_of::<T>() as u64),
        reason: error.to_string(),
    })?;
    Ok(values)
}
