//! `libweft-sysfs.so`: programs that are run with it (`weft verbs`) find weft's devices in `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and
//! `/dev/infiniband`, and the devices' parents in `/sys/devices`.
//!
//! The files are in a private folder (module `root`), where libibverbs has written them. Each call with a path checks whether the path leads to one
//! of these places, and then passes the path in the folder to the C library; all others go straight to the C library. A returned path is the name in
//! `/sys` again. The kernel resolves every path that is relative to an open or a current folder.
//!
//! # Safety
//!
//! Each function has the type and the meaning of its manual page, and is as safe as that: the program promises that its pointers are valid.
#![allow(
    clippy::missing_safety_doc,
    clippy::not_unsafe_ptr_arg_deref,
    reason = "see above"
)]
#![allow(
    clippy::cast_possible_wrap,
    reason = "C counts with signed numbers, and paths are short"
)]

mod names;
mod open;
mod place;
mod root;
mod stat;
mod walk;

#[used]
// SAFETY: the loader calls this function once, before the program.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = root::start;
