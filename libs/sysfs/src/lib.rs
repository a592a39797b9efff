//! `libweft-sysfs.so`: programs that are run with it (`weft verbs`) find weft's devices in `/sys/class/infiniband`, `/sys/class/infiniband_verbs` and
//! `/dev/infiniband`, and the devices' parents in `/sys/devices`.
//!
//! The files are in a private folder (module `root`), where libibverbs has written them. Each call that takes a path looks whether the path leads to one
//! of these places, and then hands the C library the path in the folder; all others go straight to the C library. What comes back as a path is the name in
//! `/sys` again. Everything that is relative to an open or a current folder is the kernel's work.
//!
//! # Safety
//!
//! Each function has the type and the meaning that its manual page gives it, and is as safe as that: pointers are the program's promise.
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
// SAFETY: the loader calls what stands here, once, before the program.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = root::start;
