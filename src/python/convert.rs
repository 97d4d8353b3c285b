//! Arguments that are names: dtypes, layouts, sizes.

use std::str::FromStr;

use pyo3::prelude::*;

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
