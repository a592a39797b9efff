//! Calls after which this process may not read a peer's memory, or may not be read. What peers lend to us is read before, and they lend no more over the
//! connections of now; what we lend is waited for.
//!
//! Supplementary groups are not among the kernel's conditions (`ptrace(2)`, "Ptrace access mode checking").
//!
//! # Safety
//!
//! Each call is as safe as its manual page says.

use libc::{c_int, c_long, c_uint, c_ulong, c_void, gid_t, pid_t, rlimit, uid_t};

use weft_ring::checked;
use weft_run::connection::Carrier;
use weft_run::meet::Why;

use crate::chan::Chan;
use crate::conn::{self, Conn};
use crate::lend::{Finishing, finish};
use crate::{
    dgram, fd, fetch, handlers, hidden, kernel, next, process, return_to_tcp, settings, signal,
    table,
};

/// Moves every socket back to the kernel for good, because the library does not see what the process does from now on, or may not do what it does.
pub(crate) fn everything_back(why: Why) {
    settings::turn_off();
    dgram::everything_plain(why);
    let mut all = Vec::new();
    table::each_socket(|fd, conn: &'static Conn| all.push((fd, conn)));
    for &(_, conn) in &all {
        return_to_tcp::downgrade(conn, why);
    }
    if why == Why::Sandbox {
        // The program's own calls are the allowed ones: what TCP carries is not followed any more.
        for (fd, conn) in all {
            let inside = conn.enter();
            let is_carried = |chan: &Chan| chan.carrier != Carrier::Here || chan.is_on_ring();
            if !conn.chan(&inside).is_some_and(is_carried) {
                fd::forget(fd);
            }
        }
    }
}

/// A process that limits its own system calls (seccomp) gives them, and its handlers, to the kernel as they are. `None`: it has done so already.
fn sandbox() -> Option<Finishing> {
    if handlers::are_given_back() {
        return None;
    }
    let finishing = own_descriptors();
    let errno = crate::errno();
    handlers::give_back();
    crate::set_errno(errno);
    Some(finishing)
}

/// A thread is about to have descriptors of its own: what this library knows of numbers holds for the others only, so all sockets are the kernel's alone.
pub(crate) fn own_descriptors() -> Finishing {
    let finishing = change();
    everything_back(Why::Sandbox);
    finishing
}

/// The same for the flags of `unshare`.
fn before_unshare(flags: c_int) -> Option<Finishing> {
    if flags & libc::CLONE_NEWPID != 0 {
        process::children_get_other_pids();
    }
    if flags & libc::CLONE_FILES != 0 && kernel::has_threads() {
        return Some(own_descriptors());
    }
    (flags & libc::CLONE_NEWUSER != 0).then(change)
}

/// With fewer descriptors allowed the kernel refuses the lists by which this library waits (`poll(2)`: `EINVAL`).
const FEWEST_DESCRIPTORS: u64 = 8;

/// A limit of this process is about to be set.
unsafe fn before_limit(resource: c_uint, new: *const rlimit) {
    let mut limit = rlimit {
        rlim_cur: u64::MAX,
        rlim_max: 0,
    };
    if resource != libc::RLIMIT_NOFILE || new.is_null() {
        return;
    }
    let errno = crate::errno();
    // SAFETY: a value of ours. What is not mapped is the kernel's to refuse.
    let n = unsafe { checked::copy((&raw mut limit).cast(), new.cast(), size_of::<rlimit>()) };
    if n == size_of::<rlimit>() && limit.rlim_cur < FEWEST_DESCRIPTORS {
        everything_back(Why::Descriptors);
    }
    crate::set_errno(errno);
}

/// The same for a limit of any process.
unsafe fn before_limit_of(process: pid_t, resource: c_uint, new: *const rlimit) {
    if process == 0 || process.cast_unsigned() == std::process::id() {
        // SAFETY: the caller's promise.
        unsafe { before_limit(resource, new) }
    }
}

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

/// The same for the kind of `setns`; 0 is any.
fn before_setns(kind: c_int) -> Finishing {
    if kind == 0 || kind & libc::CLONE_NEWPID != 0 {
        process::children_get_other_pids();
    }
    change()
}

/// The same for an operation of `prctl`.
fn before_prctl(op: c_int) -> Option<Finishing> {
    match op {
        libc::PR_SET_DUMPABLE => Some(change()),
        libc::PR_SET_SECCOMP => sandbox(),
        _ => None,
    }
}

/// Returns true if an operation of `seccomp(2)` limits the process; others ask.
fn sets_filter(op: c_long) -> bool {
    const MODE_STRICT: c_long = 0;
    const MODE_FILTER: c_long = 1;
    matches!(op, MODE_STRICT | MODE_FILTER)
}

/// The same for a system call that the program makes by its number.
pub(crate) fn before_call(number: c_long, a: c_long, b: c_long) -> Option<Finishing> {
    let is_one = match number {
        libc::SYS_prctl => return before_prctl(a as c_int),
        libc::SYS_seccomp => return sets_filter(a).then(sandbox).flatten(),
        libc::SYS_unshare => return before_unshare(a as c_int),
        libc::SYS_setns => return Some(before_setns(b as c_int)),
        libc::SYS_landlock_restrict_self
        | libc::SYS_capset
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

macro_rules! changes {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => { weft_sys::interpose! {"C-unwind" $(
        fn $name($($arg: $type),*) -> c_int {
            let _nothing_lent = change();
            next::$name($($arg),*)
        }
    )*}};
}

changes! {
    setuid(user: uid_t);
    setgid(group: gid_t);
    seteuid(user: uid_t);
    setegid(group: gid_t);
    setreuid(real: uid_t, effective: uid_t);
    setregid(real: gid_t, effective: gid_t);
    setresuid(real: uid_t, effective: uid_t, saved: uid_t);
    setresgid(real: gid_t, effective: gid_t, saved: gid_t);
    setfsuid(user: uid_t);
    setfsgid(group: gid_t);
    capset(head: *mut c_void, data: *const c_void);
}

weft_sys::interpose! {
    "C-unwind"

    fn unshare(flags: c_int) -> c_int {
        let _nothing_lent = before_unshare(flags);
        next::unshare(flags)
    }

    fn setns(fd: c_int, kind: c_int) -> c_int {
        let _nothing_lent = before_setns(kind);
        next::setns(fd, kind)
    }

    fn getrlimit(resource: c_uint, old: *mut rlimit) -> c_int {
        let _own = hidden::LIMIT.lock_once();
        next::getrlimit(resource, old)
    }

    fn getdtablesize() -> c_int {
        let _own = hidden::LIMIT.lock_once();
        next::getdtablesize()
    }

    fn getrlimit64(resource: c_uint, old: *mut rlimit) -> c_int { getrlimit(resource, old) }

    fn setrlimit(resource: c_uint, new: *const rlimit) -> c_int {
        before_limit(resource, new);
        let _own = hidden::LIMIT.lock_once();
        next::setrlimit(resource, new)
    }

    fn setrlimit64(resource: c_uint, new: *const rlimit) -> c_int { setrlimit(resource, new) }

    fn prlimit(process: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int {
        before_limit_of(process, resource, new);
        let _own = hidden::LIMIT.lock_once();
        next::prlimit(process, resource, new, old)
    }

    fn prlimit64(process: pid_t, resource: c_uint, new: *const rlimit, old: *mut rlimit) -> c_int {
        prlimit(process, resource, new, old)
    }

    fn prctl(op: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
        let _nothing_lent = before_prctl(op);
        next::prctl(op, a, b, c, d)
    }
}
