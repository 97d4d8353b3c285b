//! Panels: columns of a packed tile that are worked on together lie together.
//!
//! All rows of a block pass by one panel before the next. A panel fits in the nearest cache where a tile
//! doesn't, and is one run of memory, so that its lines don't compete for the same places there.

use super::columns::at_once;
use super::method::PACKED_ROWS;
use super::simd::Simd;

/// Vectors of a panel: as many as go through registers together with the most rows.
pub(super) const fn vectors<S: Simd>() -> usize {
    at_once::<S>(PACKED_ROWS)
}

/// Columns of a panel. Divides a tile.
pub(super) const fn width<S: Simd>() -> usize {
    vectors::<S>() * S::LANES
}
