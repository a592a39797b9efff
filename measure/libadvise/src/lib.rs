//! `libweft-advise.so`: counts the socket calls of the programs that `weft advise` starts. It passes every call on unchanged, and returns its result
//! and errno unchanged. The counts go into the record that `weft advise` shares (`weft_advise::record`).
//!
//! Nothing here allocates, locks or waits. So calls may come from signal handlers, from several threads, and after `fork` or `vfork`. Without
//! `WEFT_ADVISE` in the environment, or without a record in that file, all calls are passed on and nothing else happens.
//!
//! # Safety
//!
//! Every exported function is as safe as its manual page says.

#![allow(
    unreachable_pub,
    clippy::cast_possible_wrap,
    clippy::many_single_char_names,
    reason = "the C library's names and types, exported for the loader"
)]

mod conn;
mod fds;
mod io;
mod next;
mod slot;
mod wait;
mod watch;

pub(crate) use weft_sys::next::{errno, set_errno};

// SAFETY: the loader calls the functions of these sections, at the start and at the end.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = slot::start;
// SAFETY: as above.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = slot::end;
