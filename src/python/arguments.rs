//! Arguments that are objects of this library, alone or in sequences.

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::array::integers;
use super::batch::Batch;
use super::batch_view::BatchView;
use super::convert::in_range;
use super::sequence::Sequence;
use crate::cache::Step;
use crate::table::{self, NewTokens};

/// One number for all sequences, or one for each.
pub(super) enum Counts {
    Each(u32),
    List(Vec<u32>),
}

impl Counts {
    pub(super) fn parse(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        match object.extract::<u32>() {
            Ok(count) => Ok(Self::Each(count)),
            Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
                let error = in_range::<u32>(object, error);
                Err(PyValueError::new_err(format!("{name}: {}", error.value(object.py()))))
            }
            Err(_) => Ok(Self::List(integers(name, object)?)),
        }
    }

    /// Their sum over `len` sequences.
    pub(super) fn total(&self, len: usize) -> u64 {
        match self {
            Self::Each(count) => u64::from(*count) * len as u64,
            Self::List(counts) => counts.iter().copied().map(u64::from).sum(),
        }
    }

    pub(super) fn borrow(&self) -> NewTokens<'_> {
        match self {
            Self::Each(count) => NewTokens::Each(*count),
            Self::List(counts) => NewTokens::Counts(counts),
        }
    }
}

/// The sequences in an iterable of them; they stay alive as long as this does.
pub(super) struct Sequences<'py>(Bound<'py, PyTuple>);

impl<'py> Sequences<'py> {
    pub(super) fn new(seqs: &Bound<'py, PyAny>) -> PyResult<Self> {
        // The interpreter turns a list into a tuple at two instructions an item.
        if let Ok(list) = seqs.cast_exact::<PyList>() {
            Ok(Self(list.to_tuple()))
        } else if let Ok(tuple) = seqs.cast_exact::<PyTuple>() {
            Ok(Self(tuple.clone()))
        } else {
            // Item by item, whatever it says about its length; it may have no end.
            let mut items = Vec::new();
            for item in seqs.try_iter()? {
                let item = item?;
                sequence(item.as_borrowed())?;
                items.push(item);
            }
            Ok(Self(PyTuple::new(seqs.py(), items)?))
        }
    }

    /// The table's part of each.
    pub(super) fn inner(&self) -> PyResult<Vec<&table::Sequence>> {
        let mut inner = Vec::with_capacity(self.0.len());
        for item in self.0.iter_borrowed() {
            inner.push(sequence(item)?.get().inner());
        }
        Ok(inner)
    }

    /// One of them as the object that it is.
    pub(super) fn object(&self, index: usize) -> PyResult<Bound<'py, Sequence>> {
        Ok(sequence(self.0.get_borrowed_item(index)?)?.to_owned())
    }
}

#[inline]
fn sequence<'a, 'py>(item: Borrowed<'a, 'py, PyAny>) -> PyResult<Borrowed<'a, 'py, Sequence>> {
    item.cast().map_err(|error| PyTypeError::new_err(format!("seqs must hold sequences only: {error}")))
}

/// What `write` and `attend` take as a batch.
pub(super) enum BatchArgument<'py> {
    Batch(Bound<'py, Batch>),
    View(Bound<'py, BatchView>),
}

impl BatchArgument<'_> {
    pub(super) fn step(&self) -> Step<'_> {
        match self {
            Self::Batch(batch) => Step::Batch(batch.get().inner()),
            Self::View(view) => Step::View(view.get().inner()),
        }
    }
}

impl<'py> TryFrom<&Bound<'py, PyAny>> for BatchArgument<'py> {
    type Error = PyErr;

    fn try_from(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        if let Ok(batch) = object.cast::<Batch>() {
            Ok(Self::Batch(batch.clone()))
        } else if let Ok(view) = object.cast::<BatchView>() {
            Ok(Self::View(view.clone()))
        } else {
            let class = object.get_type().name()?;
            Err(PyTypeError::new_err(format!("batch must be a Batch or a BatchView, not {class}")))
        }
    }
}
