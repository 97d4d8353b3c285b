//! Storage over arrays of someone else.

use std::any::Any;

use pyo3::prelude::*;

use super::apart::overlap;
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
    check_disjoint(&apart)?;
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
fn check_disjoint(planes: &[(LayerPages, usize)]) -> Result<()> {
    let of_plane = |&(plane, layer): &(LayerPages, usize)| {
        let scales = plane.scales.map(|scales| (scales.base, scales.layout, layer));
        [Some((plane.base, plane.layout, layer)), scales].into_iter().flatten()
    };
    match overlap(planes.iter().flat_map(of_plane).collect())? {
        None => Ok(()),
        Some([layer, other]) => Err(Error::Layout(format!(
            "the arrays of layers {layer} and {other} in storage overlap in memory"
        ))),
    }
}
