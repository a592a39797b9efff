//! `clone(2)`: threads, forks, and what is between them.
//!
//! Our tables are in the process's memory, and stand for its descriptors. A child that has only one of the two in common with us cannot go by them:
//!
//! - with copies of the descriptors, in our memory, and awaited until it executes a program or ends (`CLONE_VM` and `CLONE_VFORK`): it gets a copy of the
//!   memory too, as by `vfork`
//! - the same beside us: as a thread that takes descriptors of its own, so all sockets are the kernel's
//!
//! # Safety
//!
//! As `clone(2)`.

use libc::{c_int, c_long, c_void};

use crate::lend::Finishing;
use crate::process::{in_child, raw_fork};
use crate::{next, privileges};
use weft_ring::checked;

enum Child {
    /// It has our memory and our descriptors.
    Thread,
    /// It has our memory and copies of the descriptors. Nothing is lent while it is made.
    Beside(Finishing),
    /// It has copies of both, by these flags.
    Fork(u64),
}

fn child_of(flags: u64) -> Child {
    let has = |flag: c_int| flags & flag as u64 != 0;
    if !has(libc::CLONE_VM) {
        return Child::Fork(flags);
    }
    if has(libc::CLONE_FILES) {
        return Child::Thread;
    }
    if has(libc::CLONE_VFORK) && !has(libc::CLONE_THREAD) {
        let of_memory = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_SIGHAND;
        return Child::Fork(flags & !(of_memory as u64));
    }
    Child::Beside(privileges::own_descriptors())
}

/// A child that begins where this call returns: `call` makes it by the flags that it gets.
pub(crate) fn by_flags(flags: u64, call: impl FnOnce(u64) -> c_long) -> c_long {
    match child_of(flags) {
        Child::Thread => call(flags),
        Child::Beside(_nothing_lent) => call(flags),
        Child::Fork(flags) => raw_fork(flags, || call(flags)),
    }
}

/// `clone3`.
///
/// # Safety
/// As its manual page says.
pub(crate) unsafe fn by_structure(args: *const c_void, len: usize) -> c_long {
    let call = |args: *const c_void| {
        let (args, len) = (args.expose_provenance() as c_long, len as c_long);
        // SAFETY: the caller's promise.
        unsafe { next::syscall(libc::SYS_clone3, args, len, 0, 0, 0, 0) }
    };
    let mut copy = [0_u64; 16];
    let bytes = copy.as_mut_ptr().cast::<u8>();
    // A structure that is not mapped, or longer, is the kernel's to refuse.
    let is_copied = (8..=size_of_val(&copy)).contains(&len)
        // SAFETY: as many bytes as there is room for.
        && unsafe { checked::copy(bytes, args.cast(), len) } == len;
    if !is_copied {
        return call(args);
    }
    by_flags(copy[0], |flags| {
        if flags == copy[0] {
            return call(args);
        }
        copy[0] = flags;
        call(copy.as_ptr().cast())
    })
}

/// What the child of `clone` runs. It is in the memory of which the child has a copy.
struct Start {
    run: *mut c_void,
    arg: *mut c_void,
}

extern "C" fn child_starts(start: *mut c_void) -> c_int {
    in_child();
    // SAFETY: `clone` below has passed it, and its own caller's function and argument in it.
    unsafe {
        let start = &*start.cast::<Start>();
        let run: extern "C" fn(*mut c_void) -> c_int = std::mem::transmute(start.run);
        run(start.arg)
    }
}

weft_sys::interpose! {
    "C-unwind"

    fn clone(run: *mut c_void, stack: *mut c_void, flags: c_int, arg: *mut c_void, parent: *mut c_void, tls: *mut c_void, child: *mut c_void) -> c_int {
        let start = Start { run, arg };
        let flags = u64::from(flags.cast_unsigned());
        match child_of(flags) {
            Child::Fork(flags) => {
                let first = (&raw const start).cast_mut().cast();
                let flags_of_call = (flags as u32).cast_signed();
                raw_fork(flags, || next::clone(child_starts as *mut c_void, stack, flags_of_call, first, parent, tls, child).into()) as c_int
            }
            Child::Thread | Child::Beside(_) => next::clone(run, stack, flags as c_int, arg, parent, tls, child),
        }
    }
}
