//! What a thread works on, outside of the kernel.

use std::cell::Cell;

/// A socket, or [`Library`].
pub(crate) trait Work {
    /// A handler has left the call of this thread by a jump, while it waited.
    fn abandoned(&'static self) {}
}

/// Work on no particular socket.
pub(crate) struct Library;

impl Work for Library {}

pub(crate) static LIBRARY: Library = Library;

pub(crate) type What = Option<&'static dyn Work>;

thread_local! {
    pub(crate) static BUSY: Cell<What> = const { Cell::new(None) };
}

/// Returns true if a handler has to be put off.
pub(crate) fn is_busy() -> bool {
    BUSY.try_with(|busy| busy.get().is_some()).unwrap_or(false)
}
