//! Scales of quantised keys and values: those that were adopted with the pages, and those that a
//! whole head shares.

use std::collections::HashSet;

use super::{KvStorage, Scales, check_memory, check_shape};
use crate::error::{Error, Result};
use crate::layout::{CacheLayout, Which};

impl KvStorage {
    /// Gives each head its scale: `key` and `value` hold one of every KV head, layer by layer.
    ///
    /// # Errors
    /// [`Error::Layout`] if the layout has no scales per head, or more or fewer of them;
    /// [`Error::Value`] for a scale that is not a positive number.
    pub fn with_head_scales(mut self, key: &[f32], value: &[f32]) -> Result<Self> {
        let layout = self.layout;
        if !(layout.dtype.is_quantised() && layout.head_scales) {
            return Err(Error::Layout(format!("pages of {} take no scale per head", layout.dtype)));
        }
        let count = layout.num_layers * layout.num_kv_heads;
        for (name, scales) in [("k_scale", key), ("v_scale", value)] {
            if scales.len() != count {
                return Err(Error::Layout(format!(
                    "{name} has {} entries for {} layers of {} heads",
                    scales.len(),
                    layout.num_layers,
                    layout.num_kv_heads
                )));
            }
            check_positive(name, scales)?;
        }
        if layout.value_in_key && key.iter().zip(value).any(|(key, value)| key.to_bits() != value.to_bits()) {
            let message = "values are part of the keys and share their scales: v_scale must be k_scale";
            return Err(Error::Layout(message.to_owned()));
        }
        let mut scales = [key, value].concat();
        // The planes name the vector's memory, which stays where it is when the vector moves.
        let first = scales.as_mut_ptr();
        for (layer, planes) in self.layers.iter_mut().enumerate() {
            for (which, plane) in [Which::Key, Which::Value].into_iter().zip(planes) {
                let place = which as usize * count + layer * layout.num_kv_heads;
                let base = first.wrapping_add(place).cast();
                plane.scales = Some(Scales { base, layout: layout.scales(which)?, per_head: true });
            }
        }
        self.head_scales = scales;
        Ok(self)
    }
}

/// The largest scale of a head: times the largest number of eight bits, and times the unit in which
/// these are loaded, it is finite.
const LARGEST: f32 = f32::MAX / 512.0;

/// Refuses a scale that is no positive number, or so large that numbers times it may not be finite.
pub fn check_positive(name: &str, scales: &[f32]) -> Result<()> {
    match scales.iter().position(|&scale| !(scale > 0.0 && scale <= LARGEST)) {
        Some(i) => {
            let scale = scales[i];
            Err(Error::Value(format!("{name}[{i}] is {scale}, not a positive number up to {LARGEST:e}")))
        }
        None => Ok(()),
    }
}

/// Says what keeps a plane's scales from being used, or that they are missing.
pub(super) fn check(
    scales: Option<&Scales>,
    layout: &CacheLayout,
    which: Which,
    bases: &mut HashSet<*mut u8>,
) -> std::result::Result<(), String> {
    let text = |error: Error| error.to_string();
    match (scales, layout.has_token_scales()) {
        (None, false) => Ok(()),
        (None, true) => Err(format!("{} pages need a scale per token and head", layout.dtype)),
        (Some(_), false) => Err(format!("{} pages have no scale per token", layout.dtype)),
        (Some(scales), true) => {
            check_shape(&scales.layout, &layout.scales(which).map_err(text)?)
                .and_then(|()| check_memory(scales.base, &scales.layout))
                .map_err(|what| format!("scales: {what}"))?;
            if scales.layout.span().map_err(text)? > 0 && !bases.insert(scales.base) {
                return Err(format!("the scales at {:p} were given before", scales.base));
            }
            Ok(())
        }
    }
}
