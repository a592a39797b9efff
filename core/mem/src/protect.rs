//! Promised memory that its owner may not write while it is sent: [`weft_sys::protect`] for safe code.
//!
//! # Safety
//!
//! The address comes from a [`RawMemory`], whose promise covers what `guard` asks for.

use crate::RawMemory;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

pub use weft_sys::protect::{
    Counters, Hold, Refused, counters, forget_bell, handler_address, is_guarded, page_size, settle,
    swap_program_action, use_sigaction,
};

/// The whole pages in a range: offset of the first one, and bytes; none of less than a page.
pub fn whole_pages(memory: &RawMemory) -> Option<(usize, usize)> {
    let page = page_size();
    let start = memory.as_ptr().addr();
    let first = start.checked_next_multiple_of(page)?;
    let end = start.checked_add(memory.len())? / page * page;
    (end > first).then(|| (first - start, end - first))
}

/// Protect whole pages against writing, and hold them, see [`weft_sys::protect::guard`].
///
/// # Errors
/// [`Refused`]: nothing has changed.
pub fn guard(pages: &RawMemory, bell: BorrowedFd<'_>) -> Result<Hold, Refused> {
    let start = NonNull::new(pages.as_ptr()).ok_or(Refused::ReadOnly)?;
    // SAFETY: who promised the memory has promised that it is settled before it is unmapped or protected otherwise.
    unsafe { weft_sys::protect::guard(start, pages.len(), bell) }
}
