//! Integers written into the caller's buffers, which may be larger and of any integer dtype.

use super::{Array, Element};
use crate::error::{Error, Result};

/// What is written.
#[derive(Clone, Copy)]
pub(in crate::python) enum Values<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl Values<'_> {
    fn len(self) -> usize {
        match self {
            Self::I32(values) => values.len(),
            Self::I64(values) => values.len(),
        }
    }

    pub(in crate::python) fn last(self) -> Option<i64> {
        match self {
            Self::I32(values) => values.last().map(|&value| value.into()),
            Self::I64(values) => values.last().copied(),
        }
    }

    fn bounds(self) -> Option<(i64, i64)> {
        fn bounds<T: Copy + Ord + Into<i64>>(values: &[T]) -> Option<(i64, i64)> {
            Some(((*values.iter().min()?).into(), (*values.iter().max()?).into()))
        }
        match self {
            Self::I32(values) => bounds(values),
            Self::I64(values) => bounds(values),
        }
    }
}

/// Values that were found to fit into a buffer.
pub(in crate::python) struct Fill<'py, 'a> {
    buffer: Array<'py>,
    values: Values<'a>,
    /// Values of one row; rows follow each other.
    columns: usize,
    pad: i64,
}

impl<'py, 'a> Fill<'py, 'a> {
    /// Checks that `values`, of this shape (`columns` for two axes), fit into `buffer`, by number
    /// and by size; what is left of the buffer gets `pad`. Writes nothing.
    pub(in crate::python) fn new(
        buffer: Array<'py>,
        values: Values<'a>,
        columns: Option<usize>,
        pad: i64,
    ) -> Result<Self> {
        let Element::Int { signed, bytes } = buffer.element else {
            return Err(buffer.refuse("must hold integers"));
        };
        buffer.check_writable()?;
        let fits = match (columns, buffer.shape()) {
            (None, &[room]) => room >= values.len(),
            (Some(columns), &[rows, width]) => {
                width >= columns && rows >= values.len().checked_div(columns).unwrap_or(0)
            }
            _ => false,
        };
        if !fits {
            let want = match columns {
                None => format!("[{}]", values.len()),
                Some(columns) => {
                    format!("[{}, {columns}]", values.len().checked_div(columns).unwrap_or(0))
                }
            };
            return Err(buffer.refuse(&format!("must have room for {want}")));
        }
        let bits = bytes * 8;
        let (low, high) = match (signed, bits) {
            (true, 64) => (i64::MIN, i64::MAX),
            (false, 64) => (0, i64::MAX),
            (true, _) => (-1 << (bits - 1), (1 << (bits - 1)) - 1),
            (false, _) => (0, (1 << bits) - 1),
        };
        let padded = buffer.shape().iter().product::<usize>() > values.len();
        // Where every value of the source's type fits, none need be looked at.
        let (least, most) = match values {
            Values::I32(_) if low <= i32::MIN.into() && high >= i32::MAX.into() => (0, 0),
            Values::I64(_) if low == i64::MIN => (0, 0),
            _ => values.bounds().unwrap_or((0, 0)),
        };
        let least = if padded { least.min(pad) } else { least };
        let most = if padded { most.max(pad) } else { most };
        if least < low || most > high {
            let (name, dtype) = (buffer.name, buffer.element.name());
            return Err(Error::Value(format!(
                "{name}: values from {least} to {most} do not fit into {dtype}"
            )));
        }
        Ok(Self { columns: columns.unwrap_or(values.len()), buffer, values, pad })
    }

    /// Writes.
    pub(in crate::python) fn write(self) {
        match self.values {
            Values::I32(values) => self.write_from(values),
            Values::I64(values) => self.write_from(values),
        }
    }

    fn write_from<S: Copy + Into<i64>>(&self, values: &[S]) {
        match self.buffer.element {
            Element::Int { bytes: 1, .. } => self.write_as(values, |value| value as i8),
            Element::Int { bytes: 2, .. } => self.write_as(values, |value| value as i16),
            Element::Int { bytes: 4, .. } => self.write_as(values, |value| value as i32),
            _ => self.write_as(values, |value| value),
        }
    }

    /// Writes in the width of `D`; `new` checked that no value loses bits by that.
    fn write_as<S: Copy + Into<i64>, D: Copy>(&self, values: &[S], convert: impl Fn(i64) -> D) {
        let array = &self.buffer;
        let (rows, width) = match *array.shape() {
            [rows, width] => (rows, width),
            _ => (1, array.shape()[0]),
        };
        let (row_stride, stride) = match *array.strides() {
            [row_stride, stride] => (row_stride, stride),
            _ => (0, array.strides()[0]),
        };
        let pad = convert(self.pad);
        let mut source = values.chunks_exact(self.columns.max(1));
        for row in 0..rows {
            let given = source.next().unwrap_or_default();
            let start = array.base.cast::<D>().wrapping_offset(row as isize * row_stride);
            let write_row = |stride: isize| {
                let padding = std::iter::repeat_n(pad, width - given.len());
                let write = |column: usize, value: D| {
                    // SAFETY: row and column lie inside the array, which `new` found to be writable
                    // and of integers as wide as `D`; its extent and alignment were checked.
                    unsafe { start.wrapping_offset(column as isize * stride).write(value) };
                };
                let converted = given.iter().map(|&value| convert(value.into()));
                converted.enumerate().for_each(|(column, value)| write(column, value));
                padding.enumerate().for_each(|(column, pad)| write(given.len() + column, pad));
            };
            // A constant, so that adjacent elements are written at the speed of memory.
            if stride == 1 { write_row(1) } else { write_row(stride) }
        }
    }
}
