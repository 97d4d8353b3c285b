//! Integers written into the caller's buffers, which may be larger and of any integer dtype.

use super::{Array, Element};
use crate::cache::BlockRows;
use crate::error::{Error, Result};
use crate::sync::{AtomicU32, Ordering, copy_entries_to};

/// What is written.
pub(in crate::python) enum Values<'a> {
    I32(&'a [i32]),
    I64(&'a [i64]),
    /// Rows of so many, one behind the other.
    Rows(&'a [i32], usize),
    /// A table that isn't built.
    Table(BlockRows<'a>),
}

impl Values<'_> {
    /// Rows and columns, or columns of a single axis.
    fn shape(&self) -> (Option<usize>, usize) {
        match self {
            Self::I32(values) => (None, values.len()),
            Self::I64(values) => (None, values.len()),
            // Without a column there is nothing to write, whatever the rows.
            Self::Rows(values, columns) => (Some(values.len().checked_div(*columns).unwrap_or(0)), *columns),
            Self::Table(table) => (Some(table.num_rows()), table.max_pages()),
        }
    }

    pub(in crate::python) fn last(&self) -> Option<i64> {
        match self {
            Self::I64(values) => values.last().copied(),
            Self::I32(values) | Self::Rows(values, _) => values.last().map(|&value| value.into()),
            Self::Table(_) => None,
        }
    }

    /// The least and the largest, `pad` included where `padded` or a row is shorter than others;
    /// both 0 if there are none.
    fn bounds(&self, pad: i64, padded: bool) -> (i64, i64) {
        fn bounds<T: Copy + Ord + Into<i64>>(values: &[T]) -> Option<(i64, i64)> {
            Some(((*values.iter().min()?).into(), (*values.iter().max()?).into()))
        }
        let join = |a: Option<(i64, i64)>, b: Option<(i64, i64)>| match (a, b) {
            (Some((low, high)), Some((least, most))) => Some((low.min(least), high.max(most))),
            (one, None) | (None, one) => one,
        };
        let mut found = padded.then_some((pad, pad));
        match self {
            Self::I64(values) => found = join(found, bounds(values)),
            Self::I32(values) | Self::Rows(values, _) => found = join(found, bounds(values)),
            Self::Table(table) => {
                for row in 0..table.num_rows() {
                    let mut columns = 0;
                    table.row(row, |_, pages| {
                        for page in pages {
                            found = join(found, bounds(&[page.load(Ordering::Relaxed)]));
                        }
                        columns += pages.len();
                    });
                    if columns < table.max_pages() {
                        found = join(found, Some((pad, pad)));
                    }
                }
            }
        }
        found.unwrap_or((0, 0))
    }
}

/// Values that were found to fit into a buffer.
pub(in crate::python) struct Fill<'py, 'a> {
    buffer: Array<'py>,
    values: Values<'a>,
    pad: i64,
}

impl<'py, 'a> Fill<'py, 'a> {
    /// Checks that `values` fit into `buffer`, by number and by size; what is left of the buffer
    /// gets `pad`. Writes nothing.
    pub(in crate::python) fn new(buffer: Array<'py>, values: Values<'a>, pad: i64) -> Result<Self> {
        let Element::Int { signed, bytes } = buffer.element else {
            return Err(buffer.refuse("must hold integers"));
        };
        buffer.check_writable()?;
        let (want, fits) = match (values.shape(), buffer.shape()) {
            ((None, columns), &[room]) => (format!("[{columns}]"), room >= columns),
            ((None, columns), _) => (format!("[{columns}]"), false),
            ((Some(rows), columns), shape) => (
                format!("[{rows}, {columns}]"),
                matches!(*shape, [height, width] if height >= rows && width >= columns),
            ),
        };
        if !fits {
            return Err(buffer.refuse(&format!("must have room for {want}")));
        }
        let bits = bytes * 8;
        let (low, high) = match (signed, bits) {
            (true, 64) => (i64::MIN, i64::MAX),
            (false, 64) => (0, i64::MAX),
            (true, _) => (-1 << (bits - 1), (1 << (bits - 1)) - 1),
            (false, _) => (0, (1 << bits) - 1),
        };
        // Where every value of the source's type fits, none need be looked at.
        let all_fit = match values {
            Values::I64(_) => low == i64::MIN,
            _ => low <= i32::MIN.into() && high >= i32::MAX.into(),
        };
        if !all_fit {
            let (rows, columns) = values.shape();
            let padded = buffer.shape().iter().product::<usize>() > rows.unwrap_or(1) * columns;
            let (least, most) = values.bounds(pad, padded);
            if least < low || most > high {
                let (name, dtype) = (buffer.name, buffer.element.name());
                return Err(Error::Value(format!(
                    "{name}: values from {least} to {most} do not fit into {dtype}"
                )));
            }
        }
        Ok(Self { buffer, values, pad })
    }

    /// Writes.
    pub(in crate::python) fn write(self) {
        match self.buffer.element {
            Element::Int { bytes: 1, .. } => self.write_as(|value| value as i8),
            Element::Int { bytes: 2, .. } => self.write_as(|value| value as i16),
            Element::Int { bytes: 4, .. } => self.write_as(|value| value as i32),
            _ => self.write_as(|value| value),
        }
    }

    /// Writes in the width of `D`; `new` checked that no value loses bits by that.
    fn write_as<D: Copy>(&self, convert: impl Fn(i64) -> D + Copy) {
        let array = &self.buffer;
        let (rows, width) = match *array.shape() {
            [rows, width] => (rows, width),
            _ => (1, array.shape()[0]),
        };
        let (row_stride, stride) = match *array.strides() {
            [row_stride, stride] => (row_stride, stride),
            _ => (0, array.strides()[0]),
        };
        for row in 0..rows {
            let start = array.base.cast::<D>().wrapping_offset(row as isize * row_stride);
            let row_of_buffer = Row { start, stride, width };
            let written = match &self.values {
                Values::I32(values) => row_of_buffer.put(0, values, convert),
                Values::I64(values) => row_of_buffer.put(0, values, convert),
                Values::Rows(values, columns) => {
                    let values = values.chunks_exact((*columns).max(1)).nth(row).unwrap_or_default();
                    row_of_buffer.put(0, values, convert)
                }
                Values::Table(table) => {
                    let mut written = 0;
                    if row < table.num_rows() {
                        table.row(row, |column, pages| {
                            written = row_of_buffer.put_pages(column, pages, convert);
                        });
                    }
                    written
                }
            };
            row_of_buffer.pad(written, convert(self.pad));
        }
    }
}

/// A row of a buffer, found to be writable and of integers as wide as `D`.
struct Row<D> {
    start: *mut D,
    stride: isize,
    width: usize,
}

impl<D: Copy> Row<D> {
    /// Writes values from a column on; returns the column behind them.
    fn put<S: Copy + Into<i64>>(&self, column: usize, values: &[S], convert: impl Fn(i64) -> D) -> usize {
        self.write(column, values.iter().map(|&value| convert(value.into())));
        column + values.len()
    }

    /// Writes pages of a table from a column on; returns the column behind them.
    fn put_pages(&self, column: usize, pages: &[AtomicU32], convert: impl Fn(i64) -> D) -> usize {
        assert!(column + pages.len() <= self.width, "inside the row");
        if self.stride == 1 && size_of::<D>() == size_of::<i32>() {
            // SAFETY: as in `write`; whoever writes 4 bytes of an integer gets what `convert` makes.
            unsafe { copy_entries_to(pages, self.start.wrapping_add(column).cast()) }
        } else {
            // Relaxed: the open batch keeps its pages in place.
            let page = |page: &AtomicU32| convert(page.load(Ordering::Relaxed).into());
            self.write(column, pages.iter().map(page));
        }
        column + pages.len()
    }

    /// Writes `pad` from a column to the end.
    fn pad(&self, column: usize, pad: D) {
        self.write(column, std::iter::repeat_n(pad, self.width - column));
    }

    fn write(&self, column: usize, values: impl ExactSizeIterator<Item = D>) {
        assert!(column + values.len() <= self.width, "inside the row");
        let write = |stride: isize| {
            let start = self.start.wrapping_offset(column as isize * stride);
            values.enumerate().for_each(|(i, value)| {
                // SAFETY: row and column lie inside the array, whose extent and alignment were
                // checked, and which was found to be writable and of integers as wide as `D`.
                unsafe { start.wrapping_offset(i as isize * stride).write(value) };
            });
        };
        // A constant, so that adjacent elements are written at the speed of memory.
        if self.stride == 1 { write(1) } else { write(self.stride) }
    }
}
