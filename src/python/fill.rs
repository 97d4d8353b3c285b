//! `fill` of a batch and of its view: arrays into the caller's larger buffers.

use pyo3::prelude::*;

use super::array::{Array, Fill, Values};
use crate::cache::{Batch, BatchView};
use crate::error::Result;

/// One of a batch's arrays of integers.
#[derive(Clone, Copy)]
pub(super) enum Field {
    BlockTable,
    SeqLens,
    CuSeqlensQ,
    SlotMapping,
    Positions,
    KvIndptr,
    KvIndices,
    KvLastPageLen,
}

impl Field {
    fn name(self) -> &'static str {
        match self {
            Self::BlockTable => "block_table",
            Self::SeqLens => "seq_lens",
            Self::CuSeqlensQ => "cu_seqlens_q",
            Self::SlotMapping => "slot_mapping",
            Self::Positions => "positions",
            Self::KvIndptr => "kv_indptr",
            Self::KvIndices => "kv_indices",
            Self::KvLastPageLen => "kv_last_page_len",
        }
    }

    /// What fills the rest of a larger buffer; `no_page` stands for a page that is not there.
    fn pad(self, values: &Values<'_>, no_page: i64) -> i64 {
        match self {
            Self::BlockTable | Self::KvIndices => no_page,
            Self::SlotMapping => -1,
            Self::SeqLens | Self::Positions | Self::KvLastPageLen => 0,
            Self::CuSeqlensQ | Self::KvIndptr => values.last().unwrap_or(0),
        }
    }
}

/// What has these arrays.
pub(super) trait Fields {
    /// The array's integers.
    fn field(&self, field: Field) -> Result<Values<'_>>;
}

impl Fields for Batch {
    fn field(&self, field: Field) -> Result<Values<'_>> {
        Ok(match field {
            Field::BlockTable if self.has_block_table() => {
                let (table, width) = self.block_table()?;
                Values::Rows(table, width)
            }
            Field::BlockTable => Values::Table(self.block_rows()?),
            Field::SeqLens => Values::I32(self.seq_lens()?),
            Field::CuSeqlensQ => Values::I32(self.cu_seqlens_q()),
            Field::SlotMapping => Values::I64(self.slot_mapping()?),
            Field::Positions => Values::I64(self.positions()?),
            Field::KvIndptr => Values::I32(self.kv_indptr()?),
            Field::KvIndices => Values::I32(self.kv_indices()?),
            Field::KvLastPageLen => Values::I32(self.kv_last_page_len()?),
        })
    }
}

impl Fields for BatchView {
    fn field(&self, field: Field) -> Result<Values<'_>> {
        Ok(match field {
            Field::BlockTable => Values::Rows(&self.block_table, self.max_pages),
            Field::SeqLens => Values::I32(&self.seq_lens),
            Field::CuSeqlensQ => Values::I32(&self.cu_seqlens_q),
            Field::SlotMapping => Values::I64(&self.slot_mapping),
            Field::Positions => Values::I64(&self.positions),
            Field::KvIndptr => Values::I32(&self.kv_indptr),
            Field::KvIndices => Values::I32(&self.kv_indices),
            Field::KvLastPageLen => Values::I32(&self.kv_last_page_len),
        })
    }
}

/// Checks every buffer that is given, then writes all of them.
pub(super) fn fill(
    source: &impl Fields,
    no_page: i64,
    buffers: [(Field, Option<&Bound<'_, PyAny>>); 8],
) -> PyResult<()> {
    let mut fills = Vec::new();
    for (field, buffer) in buffers {
        if let Some(buffer) = buffer {
            let values = source.field(field)?;
            let buffer = Array::new(field.name(), buffer)?;
            let pad = field.pad(&values, no_page);
            fills.push(Fill::new(buffer, values, pad)?);
        }
    }
    fills.into_iter().for_each(Fill::write);
    Ok(())
}
