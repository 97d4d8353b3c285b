//! Arguments that are names (dtypes, layouts, sizes) or numbers.

use std::str::FromStr;

use pyo3::conversion::FromPyObjectOwned;
use pyo3::exceptions::{PyOverflowError, PyValueError};
use pyo3::prelude::*;

use super::array::Integer;
use crate::error::Error;

/// Reads a name from a string, or from any object (`torch.bfloat16`, `numpy.float16`) by its
/// `str()`; numpy's type objects (`numpy.float16`, a class) by their `__name__`.
pub(super) fn named<T: FromStr<Err = Error>>(object: &Bound<'_, PyAny>) -> PyResult<T> {
    let text = match object.cast::<pyo3::types::PyType>() {
        Ok(class) => class.name()?.to_string(),
        Err(_) => object.str()?.to_string(),
    };
    Ok(text.parse()?)
}

/// An integer argument. One that is too large or too small is a `ValueError` which says what was
/// given and what would do.
#[derive(Clone, Copy)]
pub(super) struct Number<T>(pub(super) T);

impl<'py, T: Integer + FromPyObjectOwned<'py>> FromPyObject<'_, 'py> for Number<T> {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        object.extract().map(Self).map_err(|error| in_range::<T>(&object, error.into()))
    }
}

/// Says in a `ValueError` which integers would do, where `error` says that `object` is none; other
/// errors stay what they are.
pub(super) fn in_range<T: Integer>(object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyOverflowError>(object.py()) {
        return error;
    }
    // The interpreter refuses to print a number of thousands of digits.
    let given = object.str().map_or_else(|_| "the number".to_owned(), |text| text.to_string());
    PyValueError::new_err(format!("{given} is not an integer from {} to {}", T::LEAST, T::MOST))
}

/// The number, if there is one.
pub(super) fn given<T>(number: Option<Number<T>>) -> Option<T> {
    number.map(|number| number.0)
}
