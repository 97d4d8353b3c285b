//! Memory that this library lends to Python: its description, and who keeps it alive.

use std::any::Any;
use std::sync::Arc;

use pyo3::prelude::*;

use super::{Array, Element, OutputKind, Owner, reserve};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::PageOrder;
use crate::python::tensor::Tensor;
use crate::storage::{PagesView, RowsViewMut};

/// Where new arrays begin: a cache line, which is also the widest vector.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

/// A strided array in memory that `owner` keeps alive. Strides count elements.
pub(in crate::python) struct Memory {
    base: *mut u8,
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<isize>,
    writable: bool,
    owner: Arc<dyn Any + Send + Sync>,
}

impl Memory {
    /// A new array of zeros, C-contiguous.
    pub(in crate::python) fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        let bytes = shape
            .iter()
            .try_fold(dtype.size(), |bytes, &length| bytes.checked_mul(length))
            .filter(|&bytes| isize::try_from(bytes).is_ok())
            .ok_or_else(|| {
                Error::Layout(format!("an array of shape {shape:?} overflows the address space"))
            })?;
        let lines = bytes.div_ceil(size_of::<Line>());
        let mut buffer = reserve(lines)?;
        buffer.resize(lines, Line { _bytes: [0; 64] });
        let base = buffer.as_mut_ptr().cast();
        let mut strides = vec![1; shape.len()];
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis] as isize;
        }
        Ok(Self { base, dtype, shape: shape.to_vec(), strides, writable: true, owner: Arc::new(buffer) })
    }

    /// The pages that `view` finds in `owner`, which stay alive as long as the result does.
    pub(in crate::python) fn of_pages<O: Send + Sync + 'static>(
        owner: Arc<O>,
        order: PageOrder,
        writable: bool,
        view: impl for<'a> FnOnce(&'a O) -> Result<PagesView<'a>>,
    ) -> Result<Self> {
        // `view` works for every lifetime, so the memory belongs to `owner` (or to nobody); an Arc
        // neither moves nor drops what it holds, nor lends it mutably, while we hold a clone.
        let pages = view(&owner)?;
        let layout = *pages.layout();
        let base = pages.base();
        let writable = writable && pages.writable();
        let [head, token] = [(layout.num_heads, layout.head_stride), (layout.page_size, layout.token_stride)];
        let [outer, inner] = match order {
            PageOrder::Hnd => [head, token],
            PageOrder::Nhd => [token, head],
        };
        let axes = [(layout.num_pages, layout.page_stride), outer, inner, (layout.head_dim, 1)];
        Ok(Self {
            base,
            dtype: layout.dtype,
            shape: axes.iter().map(|axis| axis.0).collect(),
            strides: axes.iter().map(|axis| axis.1 as isize).collect(),
            writable,
            owner,
        })
    }

    /// The same without its last axis, which has one element.
    pub(in crate::python) fn without_last_axis(mut self) -> Self {
        assert_eq!(self.shape.pop(), Some(1), "one element");
        self.strides.pop();
        self
    }

    pub(in crate::python) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(in crate::python) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(in crate::python) fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(in crate::python) fn strides(&self) -> &[isize] {
        &self.strides
    }

    pub(in crate::python) fn writable(&self) -> bool {
        self.writable
    }

    /// Bytes of all elements, gaps between them not counted.
    pub(in crate::python) fn num_bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.size()
    }

    /// `values` as a new array.
    pub(super) fn of_floats(mut values: Vec<f32>, shape: [usize; 2]) -> Self {
        Self {
            base: values.as_mut_ptr().cast(),
            dtype: DType::F32,
            shape: shape.to_vec(),
            strides: vec![shape[1] as isize, 1],
            writable: true,
            owner: Arc::new(values),
        }
    }

    /// Rows `[tokens, heads, dim]` to write, of memory that nobody else has seen yet.
    pub(super) fn rows_mut(&mut self) -> RowsViewMut<'_> {
        let [tokens, heads, dim] = self.shape[..] else { unreachable!("made with three axes") };
        let strides = [self.strides[0], self.strides[1]];
        // SAFETY: `zeros` allocated the dense array, `&mut self` is the only way to it, and the
        // buffer is borrowed as long as the view lives.
        unsafe { RowsViewMut::new(self.base, self.dtype, [tokens, heads, dim], strides) }
    }

    /// A C-contiguous copy.
    pub(in crate::python) fn copy(&self) -> Result<Self> {
        let copy = Self::zeros(self.dtype, &self.shape)?;
        let size = self.dtype.size();
        // Whole runs at once: the trailing axes that lie densely.
        let mut run = 1;
        let mut outer = self.shape.len();
        while outer > 0 && (self.shape[outer - 1] == 1 || self.strides[outer - 1] == run as isize) {
            outer -= 1;
            run *= self.shape[outer];
        }
        let runs: usize = self.shape[..outer].iter().product();
        let mut position = vec![0; outer];
        for index in 0..if run == 0 { 0 } else { runs } {
            let offset: isize = position
                .iter()
                .zip(&self.strides)
                .map(|(&at, &stride): (&usize, _)| at as isize * stride)
                .sum();
            // SAFETY: the run lies inside this array, which its owner keeps alive, and inside the
            // fresh one of the same shape. Its slots may be written meanwhile by whoever holds the
            // cache: the copy then mixes, as the docs of `key_pages` say of every look at it.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    self.base.offset(offset * size as isize),
                    copy.base.add(index * run * size),
                    run * size,
                );
            }
            for axis in (0..outer).rev() {
                position[axis] += 1;
                if position[axis] < self.shape[axis] {
                    break;
                }
                position[axis] = 0;
            }
        }
        Ok(copy)
    }

    /// Another description of the same memory.
    pub(in crate::python) fn share(&self) -> Self {
        Self {
            base: self.base,
            dtype: self.dtype,
            shape: self.shape.clone(),
            strides: self.strides.clone(),
            writable: self.writable,
            owner: Arc::clone(&self.owner),
        }
    }
}

impl<'py> Array<'py> {
    /// A tensor of this library, as DLPack would describe it.
    pub(super) fn of_tensor(name: &'static str, tensor: &Bound<'py, Tensor>) -> Result<Self> {
        let memory = tensor.get().memory();
        let element = match memory.dtype {
            DType::I8 => Element::Int { signed: true, bytes: 1 },
            dtype => Element::Float(dtype),
        };
        let axes = memory.shape.iter().copied().zip(memory.strides.iter().copied());
        let owner = Owner::Object(tensor.clone().into_any());
        Self::build(name, memory.base, element, axes, memory.writable, OutputKind::Tensor, owner)
    }
}

// SAFETY: the owner is `Send + Sync`, and `base` is only an address: what reads or writes through
// it are the libraries that the memory is lent to.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}
