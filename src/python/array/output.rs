//! Where results go: into the caller's `out`, or into a new array of the query's kind.

use numpy::{PyArray1, PyArrayDescr, PyArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{Array, Memory, numpy as np};
use crate::error::Result;
use crate::python::tensor::Tensor;
use crate::storage::{PagesView, RowsViewMut};

/// What a new array should be: that of the array it answers.
#[derive(Clone)]
pub(in crate::python) enum OutputKind<'py> {
    /// A numpy array of this dtype.
    Numpy(Bound<'py, PyArrayDescr>),
    /// A [`Tensor`].
    Tensor,
}

/// An array to be filled.
pub(in crate::python) enum Output<'py> {
    /// The caller's, and the object to hand back.
    Given(Array<'py>, Bound<'py, PyAny>),
    /// A new tensor.
    Tensor(Memory),
}

impl<'py> Output<'py> {
    /// `out` if given, which must have `shape`, the dtype of `like`, and share no memory with
    /// `inputs`; else a new array of the kind of `like`.
    pub(in crate::python) fn rows(
        like: &Array<'py>,
        shape: [usize; 3],
        out: Option<&Bound<'py, PyAny>>,
        inputs: &[&Array<'py>],
    ) -> PyResult<Self> {
        if let Some(object) = out {
            let array = Array::new("out", object)?;
            if array.shape() != shape || array.dtype()? != like.dtype()? {
                let want = like.dtype()?;
                return Err(array.refuse(&format!("must be {want} with shape {shape:?}")).into());
            }
            array.check_apart(inputs)?;
            return Ok(Self::Given(array, object.clone()));
        }
        match like.kind() {
            OutputKind::Numpy(dtype) => {
                let object = np::empty(&dtype, &shape)?;
                Ok(Self::Given(Array::new("out", &object)?, object))
            }
            OutputKind::Tensor => Ok(Self::Tensor(Memory::zeros(like.dtype()?, &shape)?)),
        }
    }

    /// The rows to fill.
    pub(in crate::python) fn rows_mut(&mut self) -> Result<RowsViewMut<'_>> {
        match self {
            Self::Given(array, _) => array.rows_mut(),
            Self::Tensor(memory) => Ok(memory.rows_mut()),
        }
    }

    /// The object to hand back.
    pub(in crate::python) fn into_object(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Given(_, object) => Ok(object),
            Self::Tensor(memory) => Ok(Bound::new(py, Tensor::new(memory))?.into_any()),
        }
    }

    /// The object to hand back, with those of `more` in the form of `kind` that there are.
    pub(in crate::python) fn into_objects(
        self,
        py: Python<'py>,
        kind: &OutputKind<'py>,
        more: [Option<Vec<f32>>; 2],
        shape: [usize; 2],
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut objects = vec![self.into_object(py)?];
        for values in more.into_iter().flatten() {
            objects.push(kind.floats(py, values, shape)?);
        }
        match objects.len() {
            1 => Ok(objects.remove(0)),
            _ => Ok(PyTuple::new(py, objects)?.into_any()),
        }
    }

    /// See [`Array::check_outside`].
    pub(in crate::python) fn check_outside(&self, pages: &PagesView<'_>) -> Result<()> {
        match self {
            Self::Given(array, _) => array.check_outside(pages),
            Self::Tensor(_) => Ok(()),
        }
    }
}

impl<'py> OutputKind<'py> {
    /// `values` as a float32 array of this kind.
    pub(in crate::python) fn floats(
        &self,
        py: Python<'py>,
        values: Vec<f32>,
        shape: [usize; 2],
    ) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Numpy(_) => Ok(PyArray1::from_vec(py, values).reshape(shape)?.into_any()),
            Self::Tensor => Ok(Bound::new(py, Tensor::new(Memory::of_floats(values, shape)))?.into_any()),
        }
    }
}
