//! Arguments that are objects of this library, alone or in sequences.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::array::integers;
use super::batch::Batch;
use super::batch_view::BatchView;
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
        match object.extract::<i64>() {
            Ok(count) => match u32::try_from(count) {
                Ok(count) => Ok(Self::Each(count)),
                Err(_) => Err(PyValueError::new_err(format!("{name} is {count}, which is no uint32"))),
            },
            Err(_) => Ok(Self::List(integers(name, object)?)),
        }
    }

    pub(super) fn borrow(&self) -> NewTokens<'_> {
        match self {
            Self::Each(count) => NewTokens::Each(*count),
            Self::List(counts) => NewTokens::Counts(counts),
        }
    }
}

/// The sequences in a Python sequence; they stay alive as long as the result does.
pub(super) fn sequences<'py>(seqs: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, Sequence>>> {
    // Only a list is sure to hold as many objects as it says.
    let mut found = Vec::with_capacity(seqs.cast::<PyList>().map_or(0, PyListMethods::len));
    for item in seqs.try_iter()? {
        let sequence = item?
            .cast_into::<Sequence>()
            .map_err(|error| PyTypeError::new_err(format!("seqs must hold sequences only: {error}")))?;
        found.push(sequence);
    }
    Ok(found)
}

pub(super) fn inner<'a>(seqs: &'a [Bound<'_, Sequence>]) -> Vec<&'a table::Sequence> {
    seqs.iter().map(|sequence| sequence.get().inner()).collect()
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
