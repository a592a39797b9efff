//! The blocking calls: those of sockets, under other names. Descriptors that are not EXS sockets are passed to the kernel, so that a program can
//! rename all its calls at once.

use std::cell::RefCell;
use std::ffi::{c_int, c_ulong, c_void};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{iovec, msghdr, off_t, sockaddr, socklen_t, ssize_t};
use rustix::io::Errno;
use weft_exs::{Event, Kind, Memory, Queue, Ready, RecvFlags, Sink, Socket};

use super::closing::{Done, OneClosing};
use super::event::{enter, received};
use super::memory::{memory, plain_vector, vector};
use super::option::{SIOCATMARK, linger_of};
use super::queue::own_token;
use super::region::Uses;
use super::socket::{self, SEND_FLAGS, flags, message, on_system, recv_flags};
use super::state::{State, state};
use super::sync_poll::await_readable;
use super::table::{Entry, Found, Removed};
use super::types::{IoVec, MHandle, MsgHdr};
use crate::address;
use crate::call::signed;

pub use super::duplicate::{dup, dup2, dup3};
pub use super::epoll::{epoll_create, epoll_create1, epoll_ctl, epoll_pwait, epoll_pwait2};
pub use super::option::{getsockopt, ioctl, plain_fcntl as fcntl, setsockopt};
pub use super::socket::{bind, getpeername, getsockname, listen, socket};
pub use super::sync_poll::{poll, ppoll, pselect, select};

/// Depth of a thread's own queue: the most operations that one call may need. A large depth costs no memory.
const OWN_DEPTH: usize = 1 << 20;

thread_local! {
    /// The queue on which this thread waits, with its state: a forked child needs another.
    static OWN: RefCell<Option<(&'static State, Queue)>> = const { RefCell::new(None) };
}

pub(super) fn own_queue() -> Result<Queue, Errno> {
    let current = state();
    OWN.with_borrow_mut(|own| match own {
        Some((of, queue)) if std::ptr::eq(*of, current) => Ok(queue.clone()),
        _ => {
            let queue = Queue::new(&current.context()?, OWN_DEPTH)?;
            // The parent's queue is leaked: its threads do not exist here.
            std::mem::forget(own.replace((current, queue.clone())));
            Ok(queue)
        }
    })
}

/// Runs one operation, which has no time limit itself, and waits for its event; after the limit it is cancelled.
fn carry_out(
    socket: &Socket,
    limit: Option<Duration>,
    start: impl FnOnce(Sink) -> Result<(), Errno>,
) -> Result<Event, Errno> {
    let token = own_token(1);
    let queue = own_queue()?;
    start(queue.sink(token))?;
    let mut events = Vec::new();
    let mut result = queue.dequeue(&mut events, 1, 1, limit).map(|_| ());
    if events.is_empty() {
        // Time is up, or a signal came. The operation uses the memory until its event, so that is awaited.
        socket.cancel(Some(token));
        while events.is_empty() {
            if let Err(errno) = queue.dequeue(&mut events, 1, 1, None)
                && errno != Errno::INTR
            {
                return Err(errno);
            }
        }
        result = result.and(Err(Errno::AGAIN));
    }
    let event = events.pop().ok_or(Errno::IO)?;
    if event.bytes > 0 || event.result.is_ok() {
        return Ok(event);
    }
    match (event.result, result) {
        (Err(Errno::CANCELED), Err(why)) => Err(why),
        (Err(errno), _) => Err(errno),
        (Ok(_), _) => Ok(event),
    }
}

/// `exs_sync_connect`
pub unsafe fn connect(fd: c_int, addr: *const sockaddr, len: socklen_t) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_connect, fd, &[addr as usize, len as usize]) };
    };
    // SAFETY: the caller's promise.
    let to = unsafe { address::read(addr, len) }?;
    entry.connect_begins()?;
    let of = Arc::downgrade(&entry);
    let started = entry.socket.connect(
        to,
        Sink::call(move |event| {
            if let Some(entry) = of.upgrade() {
                if let Err(errno) = event.result {
                    entry.error.store(errno.raw_os_error(), Ordering::Release);
                }
                entry.connect_ends();
            }
        }),
    );
    match started {
        Ok(()) if entry.nonblock() => Err(Errno::INPROGRESS),
        Ok(()) => {
            if let Some(end) = entry.connecting() {
                // A signal handler ends the wait; the connect continues.
                await_readable(end.as_fd())?;
            }
            failed_before(&entry).map(|()| 0)
        }
        Err(errno) => {
            entry.connect_ends();
            Err(errno)
        }
    }
}

/// `exs_sync_accept4`, and `exs_sync_accept` without flags.
pub unsafe fn accept4(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
    flag: c_int,
) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        let args = [addr as usize, len as usize, flag as usize];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_accept4, fd, &args) };
    };
    if flag & !(libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC) != 0 {
        return Err(Errno::INVAL);
    }
    if !addr.is_null() && len.is_null() {
        return Err(Errno::FAULT);
    }
    let limit = if entry.nonblock() {
        Some(Duration::ZERO)
    } else {
        entry.socket.options().recv_timeout
    };
    let socket = entry.socket.accept_wait(limit);
    entry.used(Ready::IN);
    let nonblock = flag & libc::SOCK_NONBLOCK != 0;
    let (new, peer) = enter(socket?, entry.settings().ipv6, nonblock)?;
    if !addr.is_null()
        && let Some(peer) = peer
    {
        // SAFETY: the caller's promise.
        unsafe { address::write_with_len(peer, addr, len) }?;
    }
    Ok(new)
}

/// Sends, according to the socket's options and the flags.
fn send_memory(entry: &Arc<Entry>, memory: Memory, flag: c_int) -> Result<ssize_t, Errno> {
    flags(flag, SEND_FLAGS)?;
    failed_before(entry)?;
    let sent = if entry.nonblock() || flag & libc::MSG_DONTWAIT != 0 {
        send_copy(entry, &memory)
    } else {
        entry.socket.send_wait(memory).map(signed)
    };
    entry.used(Ready::OUT);
    sent
}

/// The error of an earlier non-blocking send, reported once.
fn failed_before(entry: &Entry) -> Result<(), Errno> {
    match entry.error.swap(0, Ordering::AcqRel) {
        0 => Ok(()),
        errno => Err(Errno::from_raw_os_error(errno)),
    }
}

/// Sends a copy of as many bytes as there is room for, without waiting.
fn send_copy(entry: &Arc<Entry>, memory: &Memory) -> Result<ssize_t, Errno> {
    if entry.connecting().is_some() {
        return Err(Errno::AGAIN);
    }
    let room = entry.send_buffer();
    let whole = memory.len();
    let mut take = 0;
    let enough = |unsent: usize| {
        let free = room.saturating_sub(unsent);
        take = match entry.socket.kind() {
            Kind::Stream => whole.min(free),
            // A message is sent whole, and one longer than the send buffer is sent alone.
            Kind::SeqPacket if whole <= free || unsent == 0 => whole,
            Kind::SeqPacket => 0,
        };
        (take > 0 || whole == 0).then_some(unsent + take)
    };
    entry
        .unsent
        .fetch_update(Ordering::AcqRel, Ordering::Acquire, enough)
        .map_err(|_| Errno::AGAIN)?;
    let copy = first_bytes(memory, take);
    let of = Arc::downgrade(entry);
    // The program is told that the data is accepted, so no time limit may cut it short: limits are for calls that wait.
    let started = entry.socket.send_without_limit(
        Memory::Owned(copy),
        Sink::call(move |event| {
            if let Some(entry) = of.upgrade() {
                entry.unsent.fetch_sub(take, Ordering::AcqRel);
                if let Err(errno) = event.result {
                    entry.error.store(errno.raw_os_error(), Ordering::Release);
                }
            }
        }),
    );
    started.inspect_err(|_| {
        entry.unsent.fetch_sub(take, Ordering::AcqRel);
    })?;
    Ok(signed(take))
}

/// A copy of the first bytes.
fn first_bytes(memory: &Memory, len: usize) -> Vec<u8> {
    fn add(out: &mut Vec<u8>, memory: &Memory, len: usize) {
        let want = len - out.len();
        match memory {
            Memory::List(list) => {
                for piece in list {
                    add(out, piece, len);
                }
            }
            Memory::Raw(raw) => {
                let cut = raw.slice(0, want.min(raw.len()));
                out.extend(cut.map(|cut| cut.to_vec()).unwrap_or_default());
            }
            other => {
                let mut bytes = other.to_vec();
                bytes.truncate(want);
                out.append(&mut bytes);
            }
        }
    }
    let mut out = Vec::with_capacity(len);
    add(&mut out, memory, len);
    out
}

/// Receives, according to the socket's options and the flags.
fn recv_memory(entry: &Entry, memory: &Memory, flag: c_int) -> Result<ssize_t, Errno> {
    recv_whole(entry, memory, flag).map(|(count, _)| count)
}

/// Like [`recv_memory`], and also returns whether a message was longer. After a shutdown there is nothing to receive.
fn recv_whole(entry: &Entry, memory: &Memory, flag: c_int) -> Result<(ssize_t, bool), Errno> {
    let mut flag = recv_flags(flag, true)?;
    if entry.nonblock() {
        flag |= RecvFlags::DONTWAIT;
    }
    let shut = || entry.read_shut.load(Ordering::Acquire);
    if shut() {
        return Ok((0, false));
    }
    let got = match entry.socket.kind() {
        Kind::Stream => entry.socket.recv_wait(memory, flag).map(|n| (n, false)),
        Kind::SeqPacket => entry.socket.recv_message_wait(memory, flag),
    };
    entry.used(Ready::IN);
    match got {
        Err(Errno::CANCELED) if shut() => Ok((0, false)),
        got => got.map(|(bytes, longer)| (signed(bytes), longer)),
    }
}

/// `exs_sync_send_mh`
pub unsafe fn send_mh(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    flag: c_int,
    mh: MHandle,
) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_sendto, fd, &[buf as usize, len, flag as usize]) };
    };
    let mut uses = Uses::new();
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { memory(buf.cast_mut(), len, mh, &mut uses) }?;
    send_memory(&entry, memory, flag)
}

/// `exs_sync_recv_mh`
pub unsafe fn recv_mh(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    flag: c_int,
    mh: MHandle,
) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_recvfrom, fd, &[buf as usize, len, flag as usize]) };
    };
    let mut uses = Uses::new();
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { memory(buf, len, mh, &mut uses) }?;
    recv_memory(&entry, &memory, flag)
}

/// `exs_sync_write_mh`, and `exs_sync_write` without a handle.
pub unsafe fn write_mh(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    mh: MHandle,
) -> Result<ssize_t, Errno> {
    let Found::Exs(_) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_write, fd, &[buf as usize, len]) };
    };
    // SAFETY: the caller's promise.
    unsafe { send_mh(fd, buf, len, 0, mh) }
}

/// `exs_sync_read_mh`, and `exs_sync_read` without a handle.
pub unsafe fn read_mh(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    mh: MHandle,
) -> Result<ssize_t, Errno> {
    let Found::Exs(_) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_read, fd, &[buf as usize, len]) };
    };
    // SAFETY: the caller's promise.
    unsafe { recv_mh(fd, buf, len, 0, mh) }
}

/// `exs_sync_sendto`
pub unsafe fn sendto(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    flag: c_int,
    addr: *const sockaddr,
    addrlen: socklen_t,
) -> Result<ssize_t, Errno> {
    let Found::Exs(_) = state().sockets.find(fd)? else {
        let (addr, addrlen) = (addr as usize, addrlen as usize);
        let args = [buf as usize, len, flag as usize, addr, addrlen];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_sendto, fd, &args) };
    };
    if !addr.is_null() {
        return Err(Errno::ISCONN);
    }
    // SAFETY: the caller's promise.
    unsafe { send_mh(fd, buf, len, flag, 0) }
}

/// `exs_sync_recvfrom`
pub unsafe fn recvfrom(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    flag: c_int,
    addr: *mut sockaddr,
    addrlen: *mut socklen_t,
) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        let (addr, addrlen) = (addr as usize, addrlen as usize);
        let args = [buf as usize, len, flag as usize, addr, addrlen];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_recvfrom, fd, &args) };
    };
    if !addr.is_null() && addrlen.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let count = unsafe { recv_mh(fd, buf, len, flag, 0) }?;
    if !addr.is_null() {
        let peer = entry.socket.peer_addr()?;
        // SAFETY: the caller's promise.
        unsafe { address::write_with_len(peer, addr, addrlen) }?;
    }
    Ok(count)
}

/// `exs_sync_readv`
pub unsafe fn readv(fd: c_int, iov: *const iovec, count: c_int) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_readv, fd, &[iov as usize, count as usize]) };
    };
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { plain_vector(iov, count) }?;
    recv_memory(&entry, &memory, 0)
}

/// `exs_sync_writev`
pub unsafe fn writev(fd: c_int, iov: *const iovec, count: c_int) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_writev, fd, &[iov as usize, count as usize]) };
    };
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { plain_vector(iov, count) }?;
    send_memory(&entry, memory, 0)
}

/// `exs_sync_readv_mh`, on EXS sockets only.
pub unsafe fn readv_mh(fd: c_int, iov: *const IoVec, count: c_int) -> Result<ssize_t, Errno> {
    let entry = ours(fd)?;
    let mut uses = Uses::new();
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { vector(iov, count, &mut uses) }?;
    recv_memory(&entry, &memory, 0)
}

/// `exs_sync_writev_mh`, on EXS sockets only.
pub unsafe fn writev_mh(fd: c_int, iov: *const IoVec, count: c_int) -> Result<ssize_t, Errno> {
    let entry = ours(fd)?;
    let mut uses = Uses::new();
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { vector(iov, count, &mut uses) }?;
    send_memory(&entry, memory, 0)
}

/// # Errors
/// `EOPNOTSUPP` for a kernel descriptor, whose calls use another type of vector.
fn ours(fd: c_int) -> Result<Arc<Entry>, Errno> {
    match state().sockets.find(fd)? {
        Found::Exs(entry) => Ok(entry),
        Found::System => {
            // SAFETY: not kept; an invalid number gives EBADF.
            rustix::io::fcntl_getfd(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) })?;
            Err(Errno::OPNOTSUPP)
        }
    }
}

/// `exs_sync_sendmsg`
pub unsafe fn sendmsg(fd: c_int, msg: *const msghdr, flag: c_int) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_sendmsg, fd, &[msg as usize, flag as usize]) };
    };
    // SAFETY: the caller's promise.
    unsafe { send_message(&entry, msg, flag) }.map(|(sent, _)| sent)
}

/// Sends a message. Returns the bytes that were sent, and the bytes that it has.
///
/// # Safety
/// As for `sendmsg`.
pub(super) unsafe fn send_message(
    entry: &Arc<Entry>,
    msg: *const msghdr,
    flag: c_int,
) -> Result<(ssize_t, usize), Errno> {
    if msg.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let header = unsafe { msg.read() };
    if !header.msg_name.is_null() {
        return Err(Errno::ISCONN);
    }
    if header.msg_controllen != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { plain_vector(header.msg_iov, header.msg_iovlen) }?;
    let whole = memory.len();
    Ok((send_memory(entry, memory, flag)?, whole))
}

/// `exs_sync_recvmsg`
pub unsafe fn recvmsg(fd: c_int, msg: *mut msghdr, flag: c_int) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_recvmsg, fd, &[msg as usize, flag as usize]) };
    };
    if msg.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let mut header = unsafe { msg.read() };
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { plain_vector(header.msg_iov, header.msg_iovlen) }?;
    let (count, truncated) = recv_whole(&entry, &memory, flag)?;
    let peer = entry.socket.peer_addr().ok();
    header.msg_namelen = match peer {
        // SAFETY: the caller's promise.
        Some(peer) if !header.msg_name.is_null() => unsafe {
            address::write(peer, header.msg_name.cast(), header.msg_namelen)
        },
        _ => 0,
    };
    header.msg_controllen = 0;
    header.msg_flags = if truncated { libc::MSG_TRUNC } else { 0 };
    // SAFETY: the caller's promise.
    unsafe { msg.write(header) };
    Ok(count)
}

/// `exs_sync_sendmsg_mh`, on EXS sockets only.
pub unsafe fn sendmsg_mh(fd: c_int, msg: *const MsgHdr, flag: c_int) -> Result<ssize_t, Errno> {
    let entry = ours(fd)?;
    let mut uses = Uses::new();
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { message(msg, true, &mut uses) }?;
    send_memory(&entry, memory, flag)
}

/// `exs_sync_recvmsg_mh`, on EXS sockets only.
pub unsafe fn recvmsg_mh(fd: c_int, msg: *mut MsgHdr, flag: c_int) -> Result<ssize_t, Errno> {
    let entry = ours(fd)?;
    let mut uses = Uses::new();
    // SAFETY: the caller's promise, for as long as the call.
    let memory = unsafe { message(msg, false, &mut uses) }?;
    let (count, truncated) = recv_whole(&entry, &memory, flag)?;
    // SAFETY: the caller's promise.
    unsafe { received(msg, entry.socket.peer_addr().ok(), truncated) };
    Ok(count)
}

/// `exs_sync_sendfile`
pub unsafe fn sendfile(
    out: c_int,
    file: c_int,
    offset: *mut off_t,
    count: usize,
) -> Result<ssize_t, Errno> {
    let Found::Exs(entry) = state().sockets.find(out)? else {
        // SAFETY: the caller's promise.
        return unsafe {
            on_system(
                libc::SYS_sendfile,
                out,
                &[file as usize, offset as usize, count],
            )
        };
    };
    failed_before(&entry)?;
    let start: off_t = if offset.is_null() {
        // SAFETY: no pointers.
        unsafe { on_system(libc::SYS_lseek, file, &[0, libc::SEEK_CUR as usize]) }?
    } else {
        // SAFETY: the caller's promise.
        unsafe { *offset }
    };
    // usize::MAX would mean "to the end of the file"; no file is that long.
    let pieces = socket::file(file, start, count.min(isize::MAX as usize))?;
    let limit = entry.socket.options().send_timeout;
    let event = carry_out(&entry.socket, limit, |sink| {
        entry.socket.send_file_without_limit(pieces, sink)
    });
    entry.used(Ready::OUT);
    let event = event?;
    let after = start.saturating_add(event.bytes as off_t);
    if offset.is_null() {
        let args = [after as usize, libc::SEEK_SET as usize];
        // SAFETY: no pointers.
        unsafe { on_system::<off_t>(libc::SYS_lseek, file, &args) }?;
    } else {
        // SAFETY: the caller's promise.
        unsafe { *offset = after };
    }
    Ok(signed(event.bytes))
}

/// `exs_sync_shutdown`
pub fn shutdown(fd: c_int, how: c_int) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: no pointers.
        return unsafe { on_system(libc::SYS_shutdown, fd, &[how as usize]) };
    };
    let (read, write) = match how {
        libc::SHUT_RD => (true, false),
        libc::SHUT_WR => (false, true),
        libc::SHUT_RDWR => (true, true),
        _ => return Err(Errno::INVAL),
    };
    if write {
        entry.socket.shutdown()?;
    } else {
        entry.socket.peer_addr()?; // ENOTCONN
    }
    if read {
        entry.read_shut.store(true, Ordering::Release);
        entry.socket.stop_waiting()?;
    }
    entry.used(Ready::all());
    Ok(0)
}

/// `exs_sync_socketpair`: a pair of the kernel, for there are no others.
pub unsafe fn socketpair(
    domain: c_int,
    kind: c_int,
    protocol: c_int,
    fds: *mut c_int,
) -> Result<c_int, Errno> {
    let args = [kind as usize, protocol as usize, fds as usize];
    // SAFETY: the caller's promise.
    unsafe { on_system(libc::SYS_socketpair, domain, &args) }
}

/// `exs_sync_sockatmark`
pub fn sockatmark(fd: c_int) -> Result<c_int, Errno> {
    let mut answer: c_int = 0;
    // SAFETY: room for the answer.
    unsafe { ioctl(fd, SIOCATMARK as c_ulong, &raw mut answer as usize) }?;
    Ok(answer)
}

/// `exs_sync_close`: waits until sent data is delivered, at most for the linger time.
pub fn close(fd: c_int) -> Result<c_int, Errno> {
    let state = state();
    let done = Arc::new(Done::default());
    let closed = state.sockets.remove(fd, |entry| {
        let closing = OneClosing::begin(&state.closing);
        let tell = Arc::clone(&done);
        entry.socket.close(Sink::call(move |_| {
            tell.set();
            drop(closing);
        }))
    })?;
    match closed {
        Removed::Duplicate => Ok(0),
        Removed::Exs(entry) => {
            if !entry.nonblock() {
                done.wait(linger_of(&entry));
            }
            Ok(0)
        }
        Removed::Inherited | Removed::System => {
            state.forget_epoll(fd);
            // SAFETY: the program gives up its descriptor with this call.
            unsafe { on_system(libc::SYS_close, fd, &[]) }
        }
    }
}
