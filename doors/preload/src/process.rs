//! Processes: fork, and programs that are started with our sockets.
//!
//! # Safety
//!
//! Each call is as safe as its manual page says.

use libc::{c_char, c_int, c_long, c_void, pid_t};
use std::cell::Cell;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Acquire, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32};

use weft_run::meet::Why;

use crate::chan::KEPT;
use crate::conn::{self, Conn, Locks, big};
use crate::io::opens_stream;
use crate::lend::memory::Sharing;
use crate::memory::{self, Blocks};
use crate::private::Held;
use crate::{
    containers, dgram, edges, fd, handlers, hidden, kernel, ledger, lend, lock, next,
    return_to_tcp, ring_poll, sets, signal, spawn, table,
};

/// Counters of processes that have a socket, for sockets without a channel: a mapping that all children share.
static COUNTERS: AtomicPtr<AtomicU32> = AtomicPtr::new(null_mut());
const COUNTER_BYTES: usize = 64 << 10;

fn counter() -> *mut AtomicU32 {
    let mut base = COUNTERS.load(Acquire);
    if base.is_null() {
        // SAFETY: a new mapping, which is never unmapped.
        let map = unsafe {
            libc::mmap(
                null_mut(),
                COUNTER_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return null_mut();
        }
        base = map.cast();
        COUNTERS.store(base, SeqCst);
    }
    for at in 0..COUNTER_BYTES / 4 {
        // SAFETY: inside the mapping.
        let counter = unsafe { base.add(at) };
        // SAFETY: as above.
        if unsafe { &*counter }
            .compare_exchange(0, 1, SeqCst, SeqCst)
            .is_ok()
        {
            return counter;
        }
    }
    null_mut()
}

/// The locks of the process (private.rs) but for that of datagrams.
type AllLocks = (
    Option<Held<Blocks>>,
    Option<edges::Map>,
    [Option<Held<()>>; 2],
    Option<Held<Vec<(usize, PathBuf)>>>,
    ring_poll::Lists,
    Locks,
);

thread_local! {
    /// Held from before a fork until after it, so that the child finds nothing half done.
    static HELD: Cell<Option<AllLocks>> = const { Cell::new(None) };
    static SHARING: Cell<Option<Sharing>> = const { Cell::new(None) };
}

/// The children of this process are in another PID namespace than itself.
static HAS_FOREIGN_CHILDREN: AtomicBool = AtomicBool::new(false);

/// To be called before `unshare` and `setns` for PID namespaces.
pub(crate) fn children_get_other_pids() {
    HAS_FOREIGN_CHILDREN.store(true, SeqCst);
}

/// A child in another PID namespace cannot share a channel: a lock there names its holder by a PID (lock.rs), and so does the channel its peer.
fn before_foreign_child() {
    dgram::everything_plain(Why::PidNamespace);
    table::each_socket(|_, conn: &'static Conn| return_to_tcp::downgrade(conn, Why::PidNamespace));
}

/// In a sandbox nothing is lent, UDP sockets are the kernel's, and no call may be made that the program does not make.
fn has_only_tcp() -> bool {
    handlers::are_given_back()
}

extern "C" fn before_fork() {
    if !has_only_tcp() {
        // These come first: they wait for peers, which may need the locks taken below.
        if HAS_FOREIGN_CHILDREN.load(SeqCst) {
            before_foreign_child();
        }
        let sharing = Sharing::begin();
        let _ = SHARING.try_with(|held| held.set(sharing));
        dgram::fork::before();
    }
    let locks = conn::before_fork();
    let lists = ring_poll::before_fork(locks.1.as_ref());
    conn::each(|_, conn| {
        let inside = conn.enter();
        if let Some(chan) = conn.chan(&inside) {
            chan.side().holders.fetch_add(1, SeqCst);
            sets::shared_by_fork();
        } else if conn.phase.load(SeqCst).may_meet() {
            let mut shared = conn.shared.load(SeqCst);
            if shared.is_null() {
                shared = counter();
                conn.shared.store(shared, SeqCst);
            }
            // SAFETY: a counter in the mapping.
            match unsafe { shared.as_ref() } {
                Some(shared) => _ = shared.fetch_add(1, SeqCst),
                None => conn.plain(Why::Forked),
            }
        }
    });
    let single = [hidden::LIMIT.lock_once(), KEPT.lock_once()];
    let edges = edges::before_fork();
    let folders = spawn::before_fork();
    // Nothing is allocated from here on.
    let memory = memory::BLOCKS.lock_once();
    let all = (memory, edges, single, folders, lists, locks);
    let _ = HELD.try_with(|held| held.set(Some(all)));
}

extern "C" fn in_parent() {
    let _ = HELD.try_with(Cell::take);
    let _ = SHARING.try_with(Cell::take);
    dgram::fork::in_parent();
}

pub(crate) extern "C" fn in_child() {
    if let Ok(Some((memory, edges, single, folders, lists, locks))) = HELD.try_with(Cell::take) {
        drop((memory, edges, single, folders));
        ring_poll::in_child(lists);
        drop(locks);
    }
    let _ = SHARING.try_with(Cell::take);
    HAS_FOREIGN_CHILDREN.store(false, SeqCst);
    if has_only_tcp() {
        lock::forget_own();
    } else {
        lock::know_own();
        dgram::fork::in_child();
    }
    lend::after_fork();
    ledger::after_fork();
    sets::after_fork();
    conn::each(|_, conn| {
        // The parent's threads are not here.
        conn.in_rx.store(0, SeqCst);
        conn.gate.in_child();
        conn.row.forget();
    });
    // A handler that interrupts a call goes back to it.
    if !signal::is_in_call() {
        conn::threads_are_gone();
    }
}

/// A fork for which the C library does not call the functions of [`watch_forks`].
pub(crate) fn raw_fork(flags: u64, call: impl FnOnce() -> c_long) -> c_long {
    if flags & libc::CLONE_NEWPID as u64 != 0 {
        before_foreign_child();
    }
    before_fork();
    let pid = call();
    let errno = crate::errno();
    if pid == 0 {
        in_child();
    } else {
        in_parent();
    }
    if pid < 0 {
        no_child();
        crate::set_errno(errno);
    }
    pid
}

/// A fork that failed has counted a child that is not there.
fn no_child() {
    let guard = big();
    conn::each(|_, conn| {
        if let Some(count) = conn.counter(conn.chan_slow(&guard)) {
            count.fetch_sub(1, SeqCst);
        }
    });
}

pub(crate) fn watch_forks() {
    // SAFETY: functions of the library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

/// An exec under way: what it undoes if the exec fails.
pub(crate) struct Exec {
    _nothing_lent: lend::Finishing,
    /// The new program gets the limits of now.
    own_limit: Option<Held<()>>,
    counted_out: Vec<&'static Conn>,
}

impl Drop for Exec {
    fn drop(&mut self) {
        self.own_limit = None;
        for conn in &self.counted_out {
            let inside = conn.enter();
            fd::count_in_again(conn, conn.chan(&inside));
        }
    }
}

/// This process is about to become another program.
pub(crate) fn before_exec() -> Exec {
    let nothing_lent = lend::finish();
    for conn in before_spawn() {
        return_to_tcp::end_with_unread_of_all(conn);
    }
    let mut staying: Vec<*const Conn> = Vec::new();
    table::each_socket(|number, conn: &'static Conn| {
        if !kernel::closes_on_exec(number) {
            staying.push(conn);
        }
    });
    let mut counted_out = Vec::new();
    // A child that shares our memory (`CLONE_VM`) becomes another program alone, and the kernel gives it descriptors of its own.
    if is_beside() {
        return Exec {
            _nothing_lent: nothing_lent,
            own_limit: None,
            counted_out,
        };
    }
    dgram::fork::at_end();
    conn::each(|_, conn| {
        let inside = conn.enter();
        let stays = staying.contains(&std::ptr::from_ref(conn));
        if !stays && fd::count_out_by_exec(conn, conn.chan(&inside)) {
            counted_out.push(conn);
        }
    });
    Exec {
        _nothing_lent: nothing_lent,
        own_limit: hidden::LIMIT.lock_once(),
        counted_out,
    }
}

/// Another program may get our sockets: those that it would inherit go back to TCP, and are returned. What we lend stays where it is.
pub(crate) fn before_spawn() -> Vec<&'static Conn> {
    dgram::fork::before_exec();
    let mut inherited = Vec::new();
    table::each_socket(|number, conn: &'static Conn| {
        if conn.phase.load(SeqCst).is_followed() && !kernel::closes_on_exec(number) {
            inherited.push(conn);
        }
    });
    for conn in &inherited {
        return_to_tcp::downgrade(conn, Why::Exec);
    }
    inherited
}

/// Returns true in a child that shares our memory (`CLONE_VM`).
fn is_beside() -> bool {
    lock::own() != std::process::id()
}

/// This process ends: what it lends is waited for, and its sockets are left.
pub(crate) fn end() {
    // In a sandbox nothing is lent, and the kernel leaves the sockets.
    if handlers::are_given_back() {
        return;
    }
    // A child that shares our memory ends alone.
    if is_beside() {
        return;
    }
    lend::finish_for_good();
    dgram::fork::at_end();
    containers::end();
    fd::leave_all();
}

weft_sys::interpose! {
    "C-unwind"

    fn _exit(status: c_int) -> ! {
        end();
        next::_exit(status);
        libc::abort()
    }

    fn _Exit(status: c_int) -> ! {
        _exit(status)
    }

    fn vfork() -> pid_t {
        // A child that shares our memory would change our tables.
        fork()
    }

    fn fork() -> pid_t {
        let pid = next::fork();
        if pid < 0 {
            let errno = crate::errno();
            no_child();
            crate::set_errno(errno);
        }
        pid
    }

    fn _Fork() -> pid_t { raw_fork(0, || next::_Fork().into()) as pid_t }

    fn posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, to: c_int) -> c_int {
        if let Some(conn) = conn::of(fd) { return_to_tcp::downgrade(conn, Why::Exec); }
        dgram::make_plain(fd, Why::Exec);
        next::posix_spawn_file_actions_adddup2(actions, fd, to)
    }

    fn system(command: *const c_char) -> c_int {
        before_spawn();
        next::system(command)
    }

    fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
        before_spawn();
        let _own_limit = hidden::LIMIT.lock_once();
        next::popen(command, mode)
    }

    fn fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE {
        opens_stream(fd, mode);
        next::fdopen(fd, mode)
    }

    fn fclose(file: *mut libc::FILE) -> c_int {
        let number = if file.is_null() { -1 } else { libc::fileno(file) };
        if conn::of(number).is_some() || dgram::of(number).is_some() {
            // What the stream still has to write belongs to the connection.
            libc::fflush(file);
        }
        fd::closed_by(number, || next::fclose(file))
    }
}
