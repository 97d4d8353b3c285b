//! Storage over arrays of someone else.

use std::any::Any;

use pyo3::prelude::*;

use super::{Array, Owner, dlpack};
use crate::error::{Error, Result};
use crate::layout::{CacheLayout, PagesLayout};
use crate::storage::{KvStorage, LayerPages};

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

/// Storage of `layout` over one pair of arrays per layer, which must be apart in memory.
pub(in crate::python) fn adopt(layout: CacheLayout, arrays: Vec<[Array<'_>; 2]>) -> Result<KvStorage> {
    let mut layers = Vec::new();
    for pair in &arrays {
        let [key, value] = pair.each_ref().map(|array| plane(array, &layout));
        layers.push([key?, value?]);
    }
    check_disjoint(&layers)?;
    let keepers: Vec<Keeper> = arrays.into_iter().flatten().map(keeper).collect();
    let owner: Box<dyn Any + Send + Sync> = Box::new(keepers);
    // SAFETY: the producers vouch for memory of the shapes and strides that were checked when the
    // arrays came in, until the keepers are dropped; `check_disjoint` keeps the arrays apart. That
    // nobody else writes pages in use is what whoever lends storage promises: the docs say so.
    unsafe { KvStorage::adopt(layout, layers, owner) }
}

fn plane(array: &Array<'_>, layout: &CacheLayout) -> Result<LayerPages> {
    let view = array.pages(layout.order, true)?;
    Ok(LayerPages { base: view.base(), layout: *view.layout() })
}

fn keeper(array: Array<'_>) -> Keeper {
    match array.owner {
        Owner::Object(object) => Keeper::Object(object.unbind()),
        Owner::Capsule(managed) => Keeper::Capsule(Some(managed)),
    }
}

/// Refuses arrays that could share an element.
fn check_disjoint(layers: &[[LayerPages; 2]]) -> Result<()> {
    let mut planes: Vec<(&LayerPages, usize)> = layers
        .iter()
        .enumerate()
        .flat_map(|(layer, pair)| pair.iter().map(move |plane| (plane, layer)))
        .collect();
    planes.sort_unstable_by_key(|(plane, _)| plane.base.addr());
    for (i, &(low, layer)) in planes.iter().enumerate() {
        let size = low.layout.dtype.size();
        let end = low.base.addr() + low.layout.span()? * size;
        for &(high, other) in planes[i + 1..].iter().take_while(|(plane, _)| plane.base.addr() < end) {
            if !interleave(low, high, (high.base.addr() - low.base.addr()) / size) {
                return Err(Error::Layout(format!(
                    "the arrays of layers {layer} and {other} in storage overlap in memory"
                )));
            }
        }
    }
    Ok(())
}

/// Whether two arrays, `offset` elements apart, take turns along a stride that both have: then
/// what lies inside that stride decides, and the rest repeats it.
fn interleave(low: &LayerPages, high: &LayerPages, offset: usize) -> bool {
    let axes = |layout: &PagesLayout| {
        let axes = [
            (layout.page_stride, layout.num_pages),
            (layout.head_stride, layout.num_heads),
            (layout.token_stride, layout.page_size),
        ];
        axes.into_iter().filter(|axis| axis.1 > 1).collect::<Vec<_>>()
    };
    let (a, b) = (axes(&low.layout), axes(&high.layout));
    // Elements spanned inside one period, if all other axes step by whole periods.
    let inside = |axes: &[(usize, usize)], head_dim: usize, period: usize| {
        let mut span = head_dim;
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
            (inside(&a, low.layout.head_dim, period), inside(&b, high.layout.head_dim, period))
        else {
            return false;
        };
        let at = offset % period;
        first <= at && at + second <= period
    })
}
