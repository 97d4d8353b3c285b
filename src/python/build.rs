//! What `KvCache(...)` is given becomes what a cache is made of.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::array::{self, Array, LayerArrays, PlaneArrays};
use super::convert::{self, Number};
use crate::cache::{CacheOptions, KvCache};
use crate::dtype::DType;
use crate::error::Error;
use crate::layout::{CacheLayout, PageOrder, parse_bytes};
use crate::storage::{KvStorage, RegionOptions};

/// The arguments that have something to do with sizes, as they came.
pub(super) struct Sizes<'a, 'py> {
    pub(super) num_layers: usize,
    pub(super) num_kv_heads: Option<usize>,
    pub(super) head_dim: Option<usize>,
    pub(super) v_head_dim: Option<usize>,
    pub(super) page_size: Option<usize>,
    pub(super) page_bytes: Option<usize>,
    pub(super) num_pages: Option<usize>,
    pub(super) memory: Option<&'a Bound<'py, PyAny>>,
    pub(super) dtype: Option<&'a Bound<'py, PyAny>>,
    pub(super) order: PageOrder,
    pub(super) value_in_key: bool,
    pub(super) null_page: bool,
    /// `k_scale` and `v_scale`.
    pub(super) head_scales: [Option<&'a Bound<'py, PyAny>>; 2],
}

/// Everything else.
pub(super) struct Rest {
    pub(super) window_left: i64,
    pub(super) num_threads: Option<usize>,
    pub(super) region: RegionOptions,
}

impl Rest {
    /// All that a cache is made of.
    pub(super) fn options(&self, sizes: &Sizes<'_, '_>, layout: CacheLayout) -> CacheOptions {
        CacheOptions {
            layout,
            null_page: sizes.null_page,
            window_left: self.window_left,
            num_threads: self.num_threads,
            region: self.region,
        }
    }
}

/// A cache over `storage`, or over memory of its own.
pub(super) fn cache(
    py: Python<'_>,
    sizes: &Sizes<'_, '_>,
    rest: &Rest,
    storage: Option<&Bound<'_, PyAny>>,
) -> PyResult<KvCache> {
    let kept_back = usize::from(sizes.null_page);
    let (layout, arrays) = match storage {
        None => (layout(sizes)?, None),
        Some(storage) => {
            let arrays = arrays(storage, sizes.value_in_key)?;
            let physical = adopted_layout(sizes, &arrays)?;
            let num_pages = physical.num_pages.saturating_sub(kept_back);
            (CacheLayout { num_pages, ..physical }, Some(arrays))
        }
    };
    let options = rest.options(sizes, layout);
    let Some(scales) = head_scales(sizes, &layout)? else {
        return Ok(match arrays {
            None => py.detach(|| KvCache::new(&options))?,
            Some(arrays) => KvCache::with_storage(&options, array::adopt(options.checked()?, arrays)?)?,
        });
    };
    let physical = options.checked()?;
    let storage = match arrays {
        None => KvStorage::map(physical, rest.region)?,
        Some(arrays) => array::adopt(physical, arrays)?,
    };
    let [key, value] = &scales;
    Ok(KvCache::with_storage(&options, storage.with_head_scales(key, value)?)?)
}

/// `k_scale` and `v_scale`, one per layer and head, if they were given.
fn head_scales(sizes: &Sizes<'_, '_>, layout: &CacheLayout) -> PyResult<Option<[Vec<f32>; 2]>> {
    let per_head = |name, object| array::per_head(name, object, layout.num_layers, layout.num_kv_heads);
    match sizes.head_scales {
        [None, None] => Ok(None),
        _ if layout.num_layers == 0 => {
            Err(PyValueError::new_err("k_scale= and v_scale= are for a cache with layers"))
        }
        [Some(_), Some(_)] if sizes.value_in_key => {
            Err(PyValueError::new_err("values in keys have their scales: leave v_scale= out"))
        }
        [Some(key), None] if sizes.value_in_key => {
            let scales = per_head("k_scale", key)?;
            Ok(Some([scales.clone(), scales]))
        }
        [Some(key), Some(value)] => Ok(Some([per_head("k_scale", key)?, per_head("v_scale", value)?])),
        _ => Err(PyValueError::new_err("give both k_scale= and v_scale=, or neither")),
    }
}

/// The layout of memory of its own.
pub(super) fn layout(sizes: &Sizes<'_, '_>) -> PyResult<CacheLayout> {
    let needed = |name: &str, value: Option<usize>| match value {
        Some(value) => Ok(value),
        None if sizes.num_layers == 0 => Ok(0),
        None => Err(PyValueError::new_err(format!("{name} is needed, unless num_layers is 0"))),
    };
    let head_dim = needed("head_dim", sizes.head_dim)?;
    if sizes.value_in_key && sizes.v_head_dim.is_none() {
        return Err(v_head_dim_missing());
    }
    let layout = CacheLayout {
        num_layers: sizes.num_layers,
        num_pages: 1,
        page_size: 1,
        num_kv_heads: needed("num_kv_heads", sizes.num_kv_heads)?,
        head_dim,
        v_head_dim: sizes.v_head_dim.unwrap_or(head_dim),
        dtype: sizes.dtype.map_or(Ok(DType::BF16), convert::named)?,
        head_scales: sizes.head_scales[0].is_some(),
        value_in_key: sizes.value_in_key,
        order: sizes.order,
    };
    let layout = CacheLayout { page_size: page_size(sizes, &layout)?, ..layout };
    let num_pages = match (sizes.num_pages, sizes.memory) {
        (Some(num_pages), None) => num_pages,
        (None, Some(memory)) => {
            let pages = CacheOptions::pages_within(&layout, bytes(memory)?)?;
            // A null page takes its share of the budget too.
            let kept_back = usize::from(sizes.null_page);
            if pages <= kept_back {
                let message = "memory= holds the null page only; it has to hold one page more";
                return Err(Error::Layout(message.into()).into());
            }
            pages - kept_back
        }
        _ => return Err(PyValueError::new_err("give either num_pages= or memory=")),
    };
    Ok(CacheLayout { num_pages, ..layout })
}

fn v_head_dim_missing() -> PyErr {
    PyValueError::new_err("value_in_key= needs v_head_dim=: how much of a key is its value")
}

/// Tokens of a page: given, or what fits into `page_bytes` of keys and values of one layer.
fn page_size(sizes: &Sizes<'_, '_>, one_token: &CacheLayout) -> PyResult<usize> {
    match (sizes.page_size, sizes.page_bytes) {
        (Some(_), Some(_)) => Err(PyValueError::new_err("give page_size= or page_bytes=, not both")),
        (page_size, None) => Ok(page_size.unwrap_or(16)),
        (None, Some(page_bytes)) => {
            let token = one_token.page_bytes()?;
            match page_bytes.checked_div(token) {
                Some(page_size @ 1..) => Ok(page_size),
                _ => Err(Error::Layout(format!(
                    "page_bytes={page_bytes} holds no token of {token} bytes (keys and values of one layer)"
                ))
                .into()),
            }
        }
    }
}

/// A number of bytes, or a text such as `"4GiB"`.
fn bytes(memory: &Bound<'_, PyAny>) -> PyResult<u64> {
    match memory.cast::<PyString>() {
        Ok(text) => Ok(parse_bytes(&text.to_string_lossy())?),
        Err(_) => Ok(memory.extract::<Number<u64>>()?.0),
    }
}

/// `[(key_pages, value_pages), ...]`, with `key_scales` and `value_scales` behind them or not; None
/// where values are part of the keys.
fn arrays<'py>(storage: &Bound<'py, PyAny>, value_in_key: bool) -> PyResult<Vec<LayerArrays<'py>>> {
    let mut arrays = Vec::new();
    for (layer, given) in storage.try_iter()?.enumerate() {
        // Tuples, lists, an array with keys and values along its first axis; of anything longer no
        // more is looked at than shows that it is.
        let given = given?.try_iter()?.take(5).collect::<PyResult<Vec<_>>>()?;
        let ([key, value], scales) = match &given[..] {
            [key, value] => ([key, value], None),
            [key, value, key_scales, value_scales] => ([key, value], Some([key_scales, value_scales])),
            _ => {
                let message = format!(
                    "layer {layer} in storage is no pair (key_pages, value_pages), nor one with \
                     (key_scales, value_scales) behind it"
                );
                return Err(Error::Layout(message).into());
            }
        };
        let [key_scales, value_scales] = scales.map_or([None; 2], |scales| scales.map(Some));
        let key = PlaneArrays {
            pages: Array::new("key_pages in storage", key)?,
            scales: Array::optional("key_scales in storage", key_scales)?,
        };
        let value = if value_in_key {
            if !(value.is_none() && value_scales.is_none_or(PyAnyMethods::is_none)) {
                let message = format!("layer {layer} in storage: values in keys are given as None");
                return Err(Error::Layout(message).into());
            }
            None
        } else {
            Some(PlaneArrays {
                pages: Array::new("value_pages in storage", value)?,
                scales: Array::optional("value_scales in storage", value_scales)?,
            })
        };
        arrays.push(LayerArrays { key, value });
    }
    Ok(arrays)
}

/// The layout of adopted arrays, the null page counted in: sizes that were given must be theirs.
fn adopted_layout(sizes: &Sizes<'_, '_>, arrays: &[LayerArrays<'_>]) -> PyResult<CacheLayout> {
    if sizes.memory.is_some() || sizes.page_bytes.is_some() {
        return Err(PyValueError::new_err(
            "storage= brings its own sizes: leave memory= and page_bytes= out",
        ));
    }
    let Some(LayerArrays { key, value }) = arrays.first() else {
        return Err(PyValueError::new_err("storage= must hold one (key_pages, value_pages) per layer"));
    };
    let k = *key.pages.pages(sizes.order, false)?.layout();
    let v = match (value, sizes.v_head_dim) {
        (Some(value), _) => value.pages.pages(sizes.order, false)?.layout().head_dim,
        (None, Some(v_head_dim)) => v_head_dim,
        (None, None) => return Err(v_head_dim_missing()),
    };
    let kept_back = usize::from(sizes.null_page);
    Ok(CacheLayout {
        num_layers: sizes.num_layers,
        num_pages: sizes.num_pages.map_or(k.num_pages, |pages| pages.saturating_add(kept_back)),
        page_size: sizes.page_size.unwrap_or(k.page_size),
        num_kv_heads: sizes.num_kv_heads.unwrap_or(k.num_heads),
        head_dim: sizes.head_dim.unwrap_or(k.head_dim),
        v_head_dim: sizes.v_head_dim.or(sizes.head_dim).unwrap_or(v),
        dtype: sizes.dtype.map_or(Ok(k.dtype), convert::named)?,
        head_scales: sizes.head_scales[0].is_some(),
        value_in_key: sizes.value_in_key,
        order: sizes.order,
    })
}
