//! Panels: columns of a packed tile that are worked on together lie together.
//!
//! All rows of a block pass by one panel before the next. A panel fits in the nearest cache where a tile
//! doesn't, and is one run of memory, so that its lines don't compete for the same places there.

use super::simd::Simd;

/// Columns of a panel: as many vectors as go through registers together with up to six rows. Divides a tile.
pub(super) const fn width<S: Simd>() -> usize {
    S::REGISTERS / 8 * S::LANES
}
