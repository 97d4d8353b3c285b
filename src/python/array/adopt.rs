//! Storage over arrays of someone else.

use std::any::Any;

use pyo3::prelude::*;

use super::{Array, Owner, dlpack};
use crate::error::{Error, Result};
use crate::layout::{CacheLayout, PagesLayout};
use crate::storage::{KvStorage, LayerPages, Scales};

/// Keeps adopted arrays alive, from whatever thread the cache is dropped in.
enum Keeper {
    Object(#[expect(dead_code, reason = "held for its drop alone")] Py<PyAny>),
    Capsule(Option<dlpack::Managed>),
}

// SAFETY: the tensor is only given back, by `drop`, which attaches to the interpreter first.
unsafe impl Send for Keeper {}
// SAFETY: as above; nothing can be done through a shared reference.
unsafe impl Sync for Keeper {}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Self::Capsule(managed) = self
            && let Some(managed) = managed.take()
        {
            // Without an interpreter there is nobody to give it back to.
            let mut managed = Some(managed);
            if Python::try_attach(|_| drop(managed.take())).is_none() {
                std::mem::forget(managed);
            }
        }
    }
}

/// What is adopted of one layer: keys and values, if those are not part of the keys, each with its
/// scales where they live with tokens.
pub(in crate::python) struct LayerArrays<'py> {
    pub(in crate::python) key: PlaneArrays<'py>,
    pub(in crate::python) value: Option<PlaneArrays<'py>>,
}

/// Pages, and their scales.
pub(in crate::python) struct PlaneArrays<'py> {
    pub(in crate::python) pages: Array<'py>,
    pub(in crate::python) scales: Option<Array<'py>>,
}

/// Storage of `layout` over the arrays of each layer, which must be apart in memory.
pub(in crate::python) fn adopt(layout: CacheLayout, arrays: Vec<LayerArrays<'_>>) -> Result<KvStorage> {
    let (mut layers, mut apart) = (Vec::new(), Vec::new());
    for (number, layer) in arrays.iter().enumerate() {
        let key = plane(&layer.key, &layout)?;
        apart.push((key, number));
        let value = match &layer.value {
            Some(value) => plane(value, &layout)?,
            None => LayerPages { layout: PagesLayout { head_dim: layout.v_head_dim, ..key.layout }, ..key },
        };
        apart.extend(layer.value.is_some().then_some((value, number)));
        layers.push([key, value]);
    }
    check_disjoint(apart)?;
    let keepers: Vec<Keeper> = arrays
        .into_iter()
        .flat_map(|layer| [Some(layer.key), layer.value].into_iter().flatten())
        .flat_map(|plane| [Some(plane.pages), plane.scales].into_iter().flatten())
        .map(keeper)
        .collect();
    let owner: Box<dyn Any + Send + Sync> = Box::new(keepers);
    // SAFETY: the producers vouch for memory of the shapes and strides that were checked when the
    // arrays came in, until the keepers are dropped; `check_disjoint` keeps the arrays apart. That
    // nobody else writes pages in use is what whoever lends storage promises: the docs say so.
    unsafe { KvStorage::adopt(layout, layers, owner) }
}

fn plane(arrays: &PlaneArrays<'_>, layout: &CacheLayout) -> Result<LayerPages> {
    let view = arrays.pages.pages(layout.order, true)?;
    let scales = arrays.scales.as_ref().map(|scales| scales.scales(layout.order, true)).transpose()?;
    Ok(LayerPages { base: view.base(), layout: *view.layout(), scales })
}

fn keeper(array: Array<'_>) -> Keeper {
    match array.owner {
        Owner::Object(object) => Keeper::Object(object.unbind()),
        Owner::Capsule(managed) => Keeper::Capsule(Some(managed)),
    }
}

/// Refuses arrays that could share an element. Each comes with its layer.
fn check_disjoint(mut planes: Vec<(LayerPages, usize)>) -> Result<()> {
    let of_scales = |(plane, layer): &(LayerPages, usize)| {
        let Scales { base, layout, .. } = plane.scales?;
        Some((LayerPages { base, layout, scales: None }, *layer))
    };
    planes.extend(planes.iter().filter_map(of_scales).collect::<Vec<_>>());
    planes.sort_unstable_by_key(|(plane, _)| plane.base.addr());
    for (i, (low, layer)) in planes.iter().enumerate() {
        let end = low.base.addr() + low.layout.span()? * low.layout.dtype.size();
        for (high, other) in planes[i + 1..].iter().take_while(|(plane, _)| plane.base.addr() < end) {
            if !interleave(low, high, high.base.addr() - low.base.addr()) {
                return Err(Error::Layout(format!(
                    "the arrays of layers {layer} and {other} in storage overlap in memory"
                )));
            }
        }
    }
    Ok(())
}

/// Whether two arrays, `offset` bytes apart, take turns along a stride that both have: then what lies
/// inside that stride decides, and the rest repeats it.
fn interleave(low: &LayerPages, high: &LayerPages, offset: usize) -> bool {
    // In bytes.
    let axes = |layout: &PagesLayout| {
        let axes = [
            (layout.page_stride, layout.num_pages),
            (layout.head_stride, layout.num_heads),
            (layout.token_stride, layout.page_size),
        ];
        let size = layout.dtype.size();
        axes.into_iter().filter(|axis| axis.1 > 1).map(|axis| (axis.0 * size, axis.1)).collect::<Vec<_>>()
    };
    let row = |layout: &PagesLayout| layout.head_dim * layout.dtype.size();
    let (a, b) = (axes(&low.layout), axes(&high.layout));
    // Bytes spanned inside one period, if all other axes step by whole periods.
    let inside = |axes: &[(usize, usize)], row: usize, period: usize| {
        let mut span = row;
        for &(stride, count) in axes {
            if stride < period {
                span += stride * (count - 1);
            } else if stride % period != 0 {
                return None;
            }
        }
        Some(span)
    };
    a.iter().map(|axis| axis.0).filter(|&period| period > 0).any(|period| {
        let (Some(first), Some(second)) =
            (inside(&a, row(&low.layout), period), inside(&b, row(&high.layout), period))
        else {
            return false;
        };
        let at = offset % period;
        first <= at && at + second <= period
    })
}
