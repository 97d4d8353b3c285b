//! The bytes of a cache: who owns them, and views of them that kernels may read and write.

#![expect(unsafe_code, reason = "memory enters the library here")]

mod view;

pub use view::{PagesView, RowsView, RowsViewMut};
