//! Calls after which this process may not read a peer's memory, or may not be read. What peers lend to us is read before, and they lend no more over the
//! connections of now; what we lend is waited for.
//!
//! Supplementary groups are not among the kernel's conditions (`ptrace(2)`, "Ptrace access mode checking").
//!
//! # Safety
//!
//! Each call is as safe as its manual page says.

use libc::{c_int, c_long, c_ulong, c_void, gid_t, uid_t};

use crate::lend::{Finishing, finish};
use crate::{conn, fetch, next, signal};

/// To be called before; nothing is lent while what it returns lives.
fn change() -> Finishing {
    let errno = crate::errno();
    conn::each(|_, conn| {
        // A handler that has interrupted its thread in a call on this socket leaves it alone: the thread may hold the lock.
        let Some(_busy) = signal::enter(conn) else {
            return;
        };
        let inside = conn.enter();
        if let Some(chan) = conn.chan(&inside) {
            fetch::keep(chan);
        }
    });
    let finishing = finish();
    crate::set_errno(errno);
    finishing
}

fn is_of_prctl(op: c_int) -> bool {
    matches!(op, libc::PR_SET_DUMPABLE | libc::PR_SET_SECCOMP)
}

/// The same for a system call that the program makes by its number.
pub(crate) fn before_call(number: c_long, a: c_long) -> Option<Finishing> {
    let is_one = match number {
        libc::SYS_prctl => is_of_prctl(a as c_int),
        libc::SYS_seccomp
        | libc::SYS_landlock_restrict_self
        | libc::SYS_capset
        | libc::SYS_unshare
        | libc::SYS_setns
        | libc::SYS_setuid
        | libc::SYS_setgid
        | libc::SYS_setreuid
        | libc::SYS_setregid
        | libc::SYS_setresuid
        | libc::SYS_setresgid
        | libc::SYS_setfsuid
        | libc::SYS_setfsgid => true,
        _ => false,
    };
    is_one.then(change)
}

weft_sys::doors! {
    "C-unwind"

    fn setuid(user: uid_t) -> c_int {
        let _nothing_lent = change();
        next::setuid(user)
    }

    fn setgid(group: gid_t) -> c_int {
        let _nothing_lent = change();
        next::setgid(group)
    }

    fn seteuid(user: uid_t) -> c_int {
        let _nothing_lent = change();
        next::seteuid(user)
    }

    fn setegid(group: gid_t) -> c_int {
        let _nothing_lent = change();
        next::setegid(group)
    }

    fn setreuid(real: uid_t, effective: uid_t) -> c_int {
        let _nothing_lent = change();
        next::setreuid(real, effective)
    }

    fn setregid(real: gid_t, effective: gid_t) -> c_int {
        let _nothing_lent = change();
        next::setregid(real, effective)
    }

    fn setresuid(real: uid_t, effective: uid_t, saved: uid_t) -> c_int {
        let _nothing_lent = change();
        next::setresuid(real, effective, saved)
    }

    fn setresgid(real: gid_t, effective: gid_t, saved: gid_t) -> c_int {
        let _nothing_lent = change();
        next::setresgid(real, effective, saved)
    }

    fn setfsuid(user: uid_t) -> c_int {
        let _nothing_lent = change();
        next::setfsuid(user)
    }

    fn setfsgid(group: gid_t) -> c_int {
        let _nothing_lent = change();
        next::setfsgid(group)
    }

    fn capset(head: *mut c_void, data: *const c_void) -> c_int {
        let _nothing_lent = change();
        next::capset(head, data)
    }

    fn unshare(flags: c_int) -> c_int {
        let _nothing_lent = (flags & libc::CLONE_NEWUSER != 0).then(change);
        next::unshare(flags)
    }

    fn setns(fd: c_int, kind: c_int) -> c_int {
        let _nothing_lent = change();
        next::setns(fd, kind)
    }

    fn prctl(op: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
        let _nothing_lent = is_of_prctl(op).then(change);
        next::prctl(op, a, b, c, d)
    }
}
