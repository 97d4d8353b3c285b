//! The bytes of a cache: who owns them, and views of them that kernels may read and write.

#![expect(unsafe_code, reason = "memory enters the library here")]

mod region;
mod scales;
mod view;

use std::any::Any;
use std::collections::HashSet;

use crate::error::{Error, Result};
use crate::layout::{CacheLayout, PagesLayout, Which};

pub use region::{BASE_PAGE, HUGE_PAGE, HugePages, Region, RegionOptions, physical_memory};
pub use scales::check_positive;
pub use view::{PagesView, RowsView, RowsViewMut, Scales};

/// With [`HugePages::Auto`], layers shorter than this stay on base pages. A page of the cache has a
/// part in every layer, so the first one takes a huge page per layer: at most 1/16 of all.
const AUTO_FROM: usize = 16 * HUGE_PAGE;

/// The keys, or the values, of one layer: an address without a lifetime.
#[derive(Clone, Copy, Debug)]
pub struct LayerPages {
    /// The first element.
    pub base: *mut u8,
    /// Shape and strides.
    pub layout: PagesLayout,
    /// Of a quantised type: what elements are multiplied by. Scales per head come later, with
    /// [`KvStorage::with_head_scales`].
    pub scales: Option<Scales>,
}

/// Keys and values of every layer in host memory, owned by the cache or by someone else.
///
/// Kernels see [`PagesView`]s and can't tell which. What keeps the memory alive lives in here, so a
/// view can't outlive it.
#[derive(Debug)]
pub struct KvStorage {
    layout: CacheLayout,
    /// Keys and values per layer.
    layers: Vec<[LayerPages; 2]>,
    bytes: u64,
    /// Scales per head, held for planes, which name their memory.
    head_scales: Vec<f32>,
    /// The mapping, or the arrays' owner; dropped last of all that names the memory.
    _owner: Box<dyn Any + Send + Sync>,
}

impl KvStorage {
    /// Maps memory for a whole cache: one region, layer behind layer, all zeros, of which a page
    /// takes memory when it is first written.
    ///
    /// # Errors
    /// [`Error::Layout`] if the size overflows, [`Error::Memory`] if it can't be had
    /// (see [`Region::map`]).
    pub fn map(layout: CacheLayout, options: RegionOptions) -> Result<Self> {
        let bytes = layout.total_bytes()?;
        let layer_bytes = layout.layer_bytes()?;
        let plane = |which, offset| -> Result<_> {
            let scales = (layout.scales(which)?, layout.scale_offset(which));
            Ok((layout.pages(which)?, offset, layout.has_token_scales().then_some(scales)))
        };
        let value_offset = layout.value_offset() * layout.dtype.size();
        let planes = [plane(Which::Key, 0)?, plane(Which::Value, value_offset)?];
        let huge_pages = match options.huge_pages {
            HugePages::Auto if layer_bytes < AUTO_FROM => HugePages::Off,
            choice => choice,
        };
        let region = Region::map(bytes, RegionOptions { huge_pages, ..options })?;
        let layers = (0..layout.num_layers)
            .map(|layer| {
                planes.map(|(layout, offset, scales)| {
                    let base = region.base().wrapping_add(layer * layer_bytes);
                    let scales = scales.map(|(layout, offset)| Scales {
                        base: base.wrapping_add(offset),
                        layout,
                        per_head: false,
                    });
                    LayerPages { base: base.wrapping_add(offset), layout, scales }
                })
            })
            .collect();
        let (bytes, owner) = (bytes as u64, Box::new(region));
        Ok(Self { layout, layers, bytes, head_scales: Vec::new(), _owner: owner })
    }

    /// Takes over memory of someone else, who stays its owner: `owner` is dropped with the storage.
    ///
    /// `layout` gives the shape that every layer must have; strides are each array's own.
    ///
    /// # Errors
    /// [`Error::Layout`] if a layer is missing or of another shape, if an array is not aligned for
    /// its dtype, if its strides let two slots overlap, or if two arrays are the same memory.
    ///
    /// # Safety
    /// - Each `base`, also of scales, is valid for `layout.span()` elements of reads and writes until
    ///   `owner` is dropped, from any thread.
    /// - Arrays of different layers, keys, values and scales share no element.
    /// - Until then nobody else writes slots of pages that the cache has handed out.
    pub unsafe fn adopt(
        layout: CacheLayout,
        layers: Vec<[LayerPages; 2]>,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        if layers.len() != layout.num_layers {
            return Err(Error::Layout(format!(
                "storage has {} layers, the cache {}",
                layers.len(),
                layout.num_layers
            )));
        }
        let mut bases = HashSet::new();
        for (layer, planes) in layers.iter().enumerate() {
            for (which, plane) in [Which::Key, Which::Value].into_iter().zip(planes) {
                let wrong = |what: String| Error::Layout(format!("layer {layer}, {which:?}: {what}"));
                check_shape(&plane.layout, &layout.pages(which)?).map_err(wrong)?;
                if layout.value_in_key && which == Which::Value {
                    if plane.base != planes[0].base {
                        return Err(wrong("values must be part of the keys".to_owned()));
                    }
                    continue;
                }
                check_memory(plane.base, &plane.layout).map_err(wrong)?;
                if plane.layout.span()? > 0 && !bases.insert(plane.base) {
                    return Err(wrong(format!("the array at {:p} was given before", plane.base)));
                }
                scales::check(plane.scales.as_ref(), &layout, which, &mut bases).map_err(wrong)?;
            }
        }
        let bytes = layout.total_bytes()? as u64;
        Ok(Self { layout, layers, bytes, head_scales: Vec::new(), _owner: owner })
    }

    /// The shape.
    pub fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Bytes of all keys and values, touched or not.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The keys or values of one layer; values that are part of keys are read-only.
    ///
    /// # Errors
    /// [`Error::Value`] if there is no such layer.
    #[inline]
    pub fn pages(&self, layer: usize, which: Which, writable: bool) -> Result<PagesView<'_>> {
        let Some(planes) = self.layers.get(layer) else {
            return Err(Error::Value(format!("layer {layer} is not below {} layers", self.layers.len())));
        };
        let plane = &planes[which as usize];
        // Values that are part of keys are written with them.
        let writable = writable && self.layout.stored().contains(&which);
        // SAFETY: `map` lays every layer inside its region and `adopt`'s caller vouches for its
        // arrays; `owner` lives as long as the borrow of `self`. That no slot is written while
        // another thread uses it is promised by those who go through the view: they hold leases.
        Ok(unsafe { PagesView::new(plane.base, plane.layout, writable).with_scales(plane.scales) })
    }
}

// SAFETY: the addresses are used through `PagesView` only, whose users keep threads apart; the
// memory itself is valid in every thread (a mapping, or by the contract of `adopt`).
unsafe impl Send for KvStorage {}
// SAFETY: as above.
unsafe impl Sync for KvStorage {}

const _: () = assert!(Which::Key as usize == 0 && Which::Value as usize == 1, "pages() indexes by it");

/// Says what differs from the shape that is wanted.
fn check_shape(found: &PagesLayout, want: &PagesLayout) -> Result<(), String> {
    if found.dtype != want.dtype {
        return Err(format!("dtype {} instead of {}", found.dtype, want.dtype));
    }
    for (name, found, want) in [
        ("pages", found.num_pages, want.num_pages),
        ("heads", found.num_heads, want.num_heads),
        ("tokens per page", found.page_size, want.page_size),
        ("elements per token", found.head_dim, want.head_dim),
    ] {
        if found != want {
            return Err(format!("{found} {name} instead of {want}"));
        }
    }
    Ok(())
}

/// Says what keeps an array from being used.
fn check_memory(base: *mut u8, l: &PagesLayout) -> Result<(), String> {
    if l.span().map_err(|error| error.to_string())? == 0 {
        return Ok(());
    }
    if base.is_null() || base.align_offset(l.dtype.size()) != 0 {
        return Err(format!("address {base:p} is not aligned for {}", l.dtype));
    }
    let mut axes =
        [(l.page_stride, l.num_pages), (l.head_stride, l.num_heads), (l.token_stride, l.page_size)];
    axes.sort_unstable();
    // From the innermost axis out, each step must clear all that lies inside it.
    let mut extent = l.head_dim;
    for (stride, count) in axes.into_iter().filter(|&(_, count)| count > 1) {
        if stride < extent {
            return Err(format!(
                "strides of {} (page), {} (head), {} (token) elements let slots of {} overlap",
                l.page_stride, l.head_stride, l.token_stride, l.head_dim
            ));
        }
        extent += stride * (count - 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
