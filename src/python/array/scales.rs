//! Scales of quantised pages: with every token of every head, or one per head.

use pyo3::prelude::*;

use super::Array;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::layout::{PageOrder, PagesLayout};
use crate::storage::{PagesView, Scales, check_positive};

/// `k_scale` or `v_scale` as the functions without a cache take it.
pub(in crate::python) enum Scale<'py> {
    /// One per token and head: an array of pages.
    Token(Array<'py>),
    /// One per head, or one for all of them.
    Head(Vec<f32>),
}

impl<'py> Scale<'py> {
    /// A number, `[num_kv_heads]`, or the three axes of pages without `head_dim`.
    pub(in crate::python) fn new(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let Some(array) = Array::import(name, object)? else {
            let scale = object.extract::<f32>()?;
            check_positive(name, &[scale])?;
            return Ok(Self::Head(vec![scale]));
        };
        match array.shape().len() {
            1 => {
                let scales = array.floats()?;
                check_positive(name, &scales)?;
                Ok(Self::Head(scales))
            }
            3 => Ok(Self::Token(array)),
            _ => Err(array
                .refuse("must be a number or have 1 axis (per head) or 3 (per token and head)")
                .into()),
        }
    }

    /// Like [`new`](Self::new), and `None` for Python's `None`.
    pub(in crate::python) fn optional(
        name: &'static str,
        object: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Self>> {
        object.map(|object| Self::new(name, object)).transpose()
    }

    /// The array that holds one per token.
    pub(in crate::python) fn array(&self) -> Option<&Array<'py>> {
        match self {
            Self::Token(array) => Some(array),
            Self::Head(_) => None,
        }
    }

    /// Brings one scale for all heads to the number of heads.
    pub(in crate::python) fn spread(&mut self, num_heads: usize) {
        if let Self::Head(scales) = self
            && let [scale] = scales[..]
        {
            *scales = vec![scale; num_heads];
        }
    }
}

impl Array<'_> {
    /// Heads of an array of pages; 0 where it is none.
    pub(in crate::python) fn kv_heads(&self, order: PageOrder) -> usize {
        match (self.shape(), order) {
            (&[_, heads, _, _], PageOrder::Hnd) | (&[_, _, heads, _], PageOrder::Nhd) => heads,
            _ => 0,
        }
    }

    /// The pages of one layer, as [`pages`](Self::pages) says, with their scales.
    pub(in crate::python) fn scaled_pages<'a>(
        &'a self,
        scale: Option<&'a Scale<'_>>,
        order: PageOrder,
        write: bool,
    ) -> Result<PagesView<'a>> {
        let pages = self.pages(order, write)?;
        let scales = match scale {
            None => return Ok(pages),
            Some(Scale::Token(array)) => array.scales(order, write)?,
            Some(Scale::Head(scales)) => Scales {
                base: scales.as_ptr().cast_mut().cast(),
                layout: PagesLayout {
                    dtype: DType::F32,
                    num_heads: scales.len(),
                    head_dim: 1,
                    page_stride: 0,
                    head_stride: 1,
                    token_stride: 0,
                    ..*pages.layout()
                },
                per_head: true,
            },
        };
        // SAFETY: `scales` checked the array as `pages` did; a vector's elements lie one behind the
        // other. Both are borrowed as long as the view lives.
        Ok(unsafe { pages.with_scales(Some(scales)) })
    }

    /// Scales per token and head, with axes in `order`.
    pub(super) fn scales(&self, order: PageOrder, write: bool) -> Result<Scales> {
        let axes = match order {
            PageOrder::Hnd => "[num_pages, num_kv_heads, page_size]",
            PageOrder::Nhd => "[num_pages, page_size, num_kv_heads]",
        };
        if self.axes != 3 {
            return Err(self.refuse(&format!("must have the 3 axes {axes}")));
        }
        if self.dtype()? != DType::F32 {
            return Err(self.refuse("must be float32"));
        }
        // A fourth axis of one element.
        let (mut shape, mut strides) = (self.shape, self.strides);
        (shape[3], strides[3]) = (1, 1);
        let pages = self.pages_of(DType::F32, order, shape, strides, write)?;
        Ok(Scales { base: pages.base(), layout: *pages.layout(), per_head: false })
    }
}

/// One scale per layer and head, from a number, `[num_kv_heads]` or `[num_layers, num_kv_heads]`.
pub(in crate::python) fn per_head(
    name: &'static str,
    object: &Bound<'_, PyAny>,
    num_layers: usize,
    num_heads: usize,
) -> PyResult<Vec<f32>> {
    let count =
        num_layers.checked_mul(num_heads).ok_or_else(|| Error::Layout(format!("{name} overflows")))?;
    let Some(array) = Array::import(name, object)? else {
        return Ok(vec![object.extract::<f32>()?; count]);
    };
    match *array.shape() {
        [heads] if heads == num_heads => Ok(array.floats()?.repeat(num_layers)),
        [layers, heads] if (layers, heads) == (num_layers, num_heads) => Ok(array.floats()?),
        _ => {
            let shapes = format!("[{num_heads}] (heads) or [{num_layers}, {num_heads}] (layers, heads)");
            Err(array.refuse(&format!("must be a number or have shape {shapes}")).into())
        }
    }
}
