//! The calls on sockets: asynchronous ones, and those that never wait.

use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use libc::{sockaddr, socklen_t};
use rustix::io::Errno;
use smallvec::SmallVec;
use weft_exs::{FilePiece, Kind, Memory, Piece, Ready, RecvFlags, Socket};

use super::event::{Op, Ptr, What};
use super::memory::{Uses, elements, memory, vector};
use super::plain;
use super::queue::{self, QueueEntry};
use super::state::{OneClosing, state};
use super::table::{Entry, Found, Removed};
use super::types::{
    AHandle, AcceptAddr, EXS_CAF_AHANDLE, EXS_CAF_FILDES, EXS_FDVEC, EXS_IN_PLACE, EXS_IOVEC,
    EXS_POLLIN, EXS_POLLOUT, EXS_QHANDLE_INVALID, EXS_SHUT_WR, MHandle, MsgHdr, PollFd, QHandle,
    XferFile,
};
use crate::address;
use crate::call::system;

/// `exs_socket`
pub fn socket(domain: c_int, kind: c_int, protocol: c_int) -> Result<c_int, Errno> {
    const OPTIONS: c_int = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    let ipv6 = match domain {
        libc::AF_INET => false,
        libc::AF_INET6 => true,
        _ => return Err(Errno::AFNOSUPPORT),
    };
    let (options, kind) = (kind & OPTIONS, kind & !OPTIONS);
    let kind = match (kind, protocol) {
        (libc::SOCK_STREAM, 0 | libc::IPPROTO_TCP) => Kind::Stream,
        (libc::SOCK_SEQPACKET, 0) => Kind::SeqPacket,
        (libc::SOCK_STREAM | libc::SOCK_SEQPACKET, _) => return Err(Errno::PROTONOSUPPORT),
        (libc::SOCK_DGRAM | libc::SOCK_RAW | libc::SOCK_RDM, _) => {
            return Err(Errno::SOCKTNOSUPPORT);
        }
        _ => return Err(Errno::INVAL),
    };
    let state = state();
    let entry = Entry::new(Socket::new(&state.context()?, ipv6, kind)?, ipv6)?;
    entry.set(|s| s.nonblock = options & libc::SOCK_NONBLOCK != 0);
    state.sockets.insert(Arc::new(entry))
}

/// `exs_bind`
pub unsafe fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> Result<c_int, Errno> {
    match state().sockets.find(fd)? {
        Found::Exs(entry) => {
            // SAFETY: the caller's promise.
            entry.socket.bind(unsafe { address::read(addr, len) }?)?;
            Ok(0)
        }
        // SAFETY: the caller's promise.
        Found::System => unsafe {
            on_system(libc::SYS_bind, fd, [addr as usize, len as usize, 0, 0])
        },
    }
}

/// `exs_listen`
pub fn listen(fd: c_int, backlog: c_int) -> Result<c_int, Errno> {
    match state().sockets.find(fd)? {
        Found::Exs(entry) => {
            entry.socket.listen(u32::try_from(backlog).unwrap_or(0))?;
            entry.listening.store(true, Ordering::Release);
            Ok(0)
        }
        // SAFETY: no pointers.
        Found::System => unsafe { on_system(libc::SYS_listen, fd, [backlog as usize, 0, 0, 0]) },
    }
}

/// A call for one of the system's descriptors.
///
/// # Safety
/// As for the system call.
pub(super) unsafe fn on_system(
    number: libc::c_long,
    fd: c_int,
    args: [usize; 4],
) -> Result<c_int, Errno> {
    let [a, b, c, d] = args;
    // SAFETY: the caller's promise.
    let result = unsafe { system(number, [fd as usize, a, b, c, d, 0]) }?;
    Ok(result as c_int)
}

/// `exs_getsockname`
pub unsafe fn getsockname(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<c_int, Errno> {
    match state().sockets.find(fd)? {
        Found::Exs(entry) => {
            let local = entry.socket.local_addr()?;
            // SAFETY: the caller's promise.
            unsafe { address::write_with_len(local, addr, len) }.map(|()| 0)
        }
        // SAFETY: the caller's promise.
        Found::System => unsafe {
            on_system(
                libc::SYS_getsockname,
                fd,
                [addr as usize, len as usize, 0, 0],
            )
        },
    }
}

/// `exs_getpeername`
pub unsafe fn getpeername(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<c_int, Errno> {
    match state().sockets.find(fd)? {
        Found::Exs(entry) => {
            let peer = entry.socket.peer_addr()?;
            // SAFETY: the caller's promise.
            unsafe { address::write_with_len(peer, addr, len) }.map(|()| 0)
        }
        // SAFETY: the caller's promise.
        Found::System => unsafe {
            on_system(
                libc::SYS_getpeername,
                fd,
                [addr as usize, len as usize, 0, 0],
            )
        },
    }
}

/// # Errors
/// `EOPNOTSUPP` for a flag that is not in `known`.
pub(super) fn flags(flags: c_int, known: c_int) -> Result<(), Errno> {
    if flags & !known != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(())
}

/// Flags of sends that mean nothing here, or what happens anyway.
pub(super) const SEND_FLAGS: c_int =
    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE | libc::MSG_EOR;

/// # Errors
/// `EOPNOTSUPP` for a flag that receives do not have.
pub(super) fn recv_flags(given: c_int, waits: bool) -> Result<RecvFlags, Errno> {
    let in_place = EXS_IN_PLACE as c_int;
    let known = libc::MSG_WAITALL | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    flags(given, if waits { known } else { known | in_place })?;
    let mut out = RecvFlags::empty();
    out.set(RecvFlags::WAITALL, given & libc::MSG_WAITALL != 0);
    out.set(RecvFlags::IN_PLACE, given & in_place != 0);
    out.set(
        RecvFlags::DONTWAIT,
        waits && given & libc::MSG_DONTWAIT != 0,
    );
    Ok(out)
}

fn queue(qh: QHandle) -> Result<Arc<QueueEntry>, Errno> {
    state().queues.get(qh)
}

/// `exs_connect`
pub unsafe fn connect(
    fd: c_int,
    addr: *const sockaddr,
    len: socklen_t,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let found = state().sockets.find(fd)?;
    let queue = queue(qh)?;
    flags(flag, 0)?;
    // SAFETY: the caller's promise.
    let to = unsafe { address::read(addr, len) }?;
    match found {
        Found::Exs(entry) => {
            queue.start(Op::new(&entry, ah, What::Connect), |sink| {
                entry.socket.connect(to, sink)
            })?;
        }
        Found::System => plain::connect(fd, to, &queue, ah)?,
    }
    Ok(0)
}

/// `exs_accept`
pub unsafe fn accept(
    fd: c_int,
    addr: *mut AcceptAddr,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let found = state().sockets.find(fd)?;
    let queue = queue(qh)?;
    flags(flag, 0)?;
    let what = What::Accept(Ptr(addr));
    match found {
        Found::Exs(entry) => {
            queue.start(Op::new(&entry, ah, what), |sink| entry.socket.accept(sink))?;
        }
        Found::System => plain::accept(fd, what, &queue, ah)?,
    }
    Ok(0)
}

/// `exs_send`
pub unsafe fn send(
    fd: c_int,
    buf: *const c_void,
    len: usize,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
    mh: MHandle,
) -> Result<c_int, Errno> {
    let entry = state().sockets.operable(fd)?;
    let queue = queue(qh)?;
    flags(flag, SEND_FLAGS)?;
    let buf = buf.cast_mut();
    let mut uses = Uses::new();
    // SAFETY: the caller's promise.
    let memory = unsafe { memory(buf, len, mh, &mut uses) }?;
    let buf = Ptr(buf);
    let mut op = Op::new(&entry, ah, What::Xfer { buf, len, mh });
    op.uses = uses;
    queue.start(op, |sink| entry.socket.send(memory, sink))?;
    Ok(0)
}

/// `exs_recv`
pub unsafe fn recv(
    fd: c_int,
    buf: *mut c_void,
    len: usize,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
    mh: MHandle,
) -> Result<c_int, Errno> {
    let entry = state().sockets.operable(fd)?;
    let queue = queue(qh)?;
    let flag = recv_flags(flag, false)?;
    let mut uses = Uses::new();
    // SAFETY: the caller's promise.
    let memory = unsafe { memory(buf, len, mh, &mut uses) }?;
    let buf = Ptr(buf);
    let mut op = Op::new(&entry, ah, What::Xfer { buf, len, mh });
    op.uses = uses;
    queue.start(op, |sink| entry.socket.recv(memory, flag, sink))?;
    Ok(0)
}

/// The memory of a message header.
///
/// # Errors
/// Those of [`vector`]; `EFAULT` for null, `EISCONN` for a send with an address.
///
/// # Safety
/// As for `exs_sendmsg`.
pub(super) unsafe fn message(
    msg: *const MsgHdr,
    sends: bool,
    uses: &mut Uses,
) -> Result<Memory, Errno> {
    if msg.is_null() {
        return Err(Errno::FAULT);
    }
    // SAFETY: the caller's promise.
    let header = unsafe { msg.read() };
    if sends && !header.msg_name.is_null() {
        return Err(Errno::ISCONN);
    }
    // SAFETY: the caller's promise.
    unsafe { vector(header.msg_iov, header.msg_iovlen, uses) }
}

/// `exs_sendmsg`
pub unsafe fn sendmsg(
    fd: c_int,
    msg: *const MsgHdr,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let entry = state().sockets.operable(fd)?;
    let queue = queue(qh)?;
    flags(flag, SEND_FLAGS)?;
    let mut uses = Uses::new();
    // SAFETY: the caller's promise.
    let memory = unsafe { message(msg, true, &mut uses) }?;
    let mut op = Op::new(&entry, ah, What::Msg(Ptr(msg.cast_mut())));
    op.uses = uses;
    queue.start(op, |sink| entry.socket.send(memory, sink))?;
    Ok(0)
}

/// `exs_recvmsg`
pub unsafe fn recvmsg(
    fd: c_int,
    msg: *mut MsgHdr,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let entry = state().sockets.operable(fd)?;
    let queue = queue(qh)?;
    let flag = recv_flags(flag & !(EXS_IN_PLACE as c_int), false)?;
    let mut uses = Uses::new();
    // SAFETY: the caller's promise.
    let memory = unsafe { message(msg, false, &mut uses) }?;
    let mut op = Op::new(&entry, ah, What::Msg(Ptr(msg)));
    op.uses = uses;
    queue.start(op, |sink| entry.socket.recv(memory, flag, sink))?;
    Ok(0)
}

/// A piece of a file, with a descriptor of our own.
fn file_piece(fd: c_int, offset: libc::off_t, len: usize) -> Result<FilePiece, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: not kept; a number that is no descriptor gives EBADF.
    let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
    let file: OwnedFd = rustix::io::fcntl_dupfd_cloexec(theirs, 0)?;
    Ok(FilePiece {
        file: Arc::new(file),
        offset: u64::try_from(offset).map_err(|_| Errno::INVAL)?,
        len: (len != usize::MAX).then_some(len as u64),
    })
}

/// `exs_sendfile`
pub unsafe fn sendfile(
    fd: c_int,
    vec: *const XferFile,
    n: c_int,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let entry = state().sockets.operable(fd)?;
    let queue = queue(qh)?;
    flags(flag, SEND_FLAGS)?;
    let mut uses = Uses::new();
    let mut pieces = Vec::new();
    for i in 0..elements(vec, n)? {
        // SAFETY: one of the elements.
        let piece = unsafe { vec.add(i).read() };
        pieces.push(match i64::from(piece.xf_type) {
            // SAFETY: the type says which it is; the caller's promise.
            EXS_IOVEC => unsafe {
                let iov = piece.xf_vec.xf_iovec;
                let memory = memory(iov.iov_base, iov.iov_len, iov.iov_mhandle, &mut uses)?;
                Piece::Memory(memory)
            },
            EXS_FDVEC => {
                // SAFETY: as above.
                let file = unsafe { piece.xf_vec.xf_fdvec };
                Piece::File(file_piece(file.fdv_fd, file.fdv_offset, file.fdv_len)?)
            }
            _ => return Err(Errno::INVAL),
        });
    }
    let mut op = Op::new(&entry, ah, What::File(Ptr(vec.cast_mut()), n));
    op.uses = uses;
    queue.start(op, |sink| entry.socket.send_file(pieces, sink))?;
    Ok(0)
}

/// A file, or a part of one, as pieces of a send: for `exs_sync_sendfile`.
pub(super) fn file(fd: c_int, offset: libc::off_t, len: usize) -> Result<Vec<Piece>, Errno> {
    Ok(vec![Piece::File(file_piece(fd, offset, len)?)])
}

/// `exs_poll`. Each descriptor is an operation; the result is how many were started if not all were.
pub unsafe fn poll(
    fds: *const PollFd,
    n: c_int,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let queue = queue(qh)?;
    flags(flag, 0)?;
    let count = elements(fds, n)?;
    if count == 0 {
        return Err(Errno::INVAL);
    }
    let mut wanted: SmallVec<[(Arc<Entry>, Ready); 4]> = SmallVec::new();
    for i in 0..count {
        // SAFETY: one of the elements.
        let fd = unsafe { fds.add(i).read() };
        let mut ready = Ready::empty();
        let events = i64::from(fd.pfd_events);
        ready.set(Ready::IN, events & EXS_POLLIN != 0);
        ready.set(Ready::OUT, events & EXS_POLLOUT != 0);
        if ready.is_empty() || events & !(EXS_POLLIN | EXS_POLLOUT) != 0 {
            return Err(Errno::INVAL);
        }
        wanted.push((state().sockets.operable(fd.pfd_fd)?, ready));
    }
    for (started, (entry, ready)) in wanted.iter().enumerate() {
        let op = Op::new(entry, ah, What::Poll);
        match queue.start(op, |sink| entry.socket.poll(*ready, sink)) {
            Ok(_) => {}
            Err(errno) if started == 0 => return Err(errno),
            Err(_) => return Ok(started as c_int),
        }
    }
    Ok(0)
}

/// A queue that there need not be.
fn maybe_queue(qh: QHandle) -> Result<Option<Arc<QueueEntry>>, Errno> {
    if i64::from(qh) == EXS_QHANDLE_INVALID {
        return Ok(None);
    }
    queue(qh).map(Some)
}

/// `exs_shutdown`
pub fn shutdown(
    fd: c_int,
    how: c_int,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let entry = state().sockets.operable(fd)?;
    let queue = maybe_queue(qh)?;
    flags(flag, 0)?;
    if i64::from(how) != EXS_SHUT_WR {
        return Err(Errno::INVAL);
    }
    match queue {
        None => entry.socket.shutdown()?,
        Some(queue) => {
            queue.start(Op::new(&entry, ah, What::Shutdown), |sink| {
                entry.socket.shutdown_with(sink)
            })?;
        }
    }
    Ok(0)
}

/// `exs_close`
pub fn close(fd: c_int, flag: c_int, qh: QHandle, ah: AHandle) -> Result<c_int, Errno> {
    let sockets = &state().sockets;
    let queue = maybe_queue(qh)?;
    flags(flag, 0)?;
    let closed = sockets.remove(fd, |entry| start_close(entry, queue.as_deref(), ah))?;
    // SAFETY: the program gives its descriptor up with this call.
    let give_up = || unsafe { on_system(libc::SYS_close, fd, [0; 4]) };
    match closed {
        Removed::Exs(_) => Ok(0),
        // There is no connection here whose end an event could tell.
        Removed::Inherited => give_up().and(Err(Errno::NOTCONN)),
        Removed::System => {
            // Operations that are outstanding hold a descriptor of their own.
            if let Some(entry) = sockets.closable(fd, queue.is_some())? {
                start_close(&entry, queue.as_deref(), ah)?;
            }
            give_up()
        }
    }
}

/// Starts the close of a socket. A program that ends before it is done waits for what was sent. A connection of the system may be another
/// process's as well: only our descriptor is given up.
fn start_close(entry: &Arc<Entry>, queue: Option<&QueueEntry>, ah: AHandle) -> Result<(), Errno> {
    let closing = Box::new(OneClosing::begin(&state().closing));
    let close = |sink| entry.socket.close_guarded(sink, closing);
    match queue {
        None => close(weft_exs::Sink::Nobody),
        Some(queue) => queue
            .start(Op::new(entry, ah, What::Close), close)
            .map(drop),
    }
}

/// `exs_cancel`
pub fn cancel(fd: c_int, flag: c_int, ah: AHandle) -> Result<c_int, Errno> {
    let by = i64::from(flag);
    if by == 0 || by & !(EXS_CAF_FILDES | EXS_CAF_AHANDLE) != 0 {
        return Err(Errno::INVAL);
    }
    let mut socket = None;
    if by & EXS_CAF_FILDES != 0 {
        let sockets = &state().sockets;
        socket = match sockets.find(fd)? {
            Found::Exs(entry) => Some(entry),
            Found::System => sockets.closable(fd, false)?,
        };
    }
    let wanted = |op: &Op, there| {
        (by & EXS_CAF_FILDES == 0 || op.is_of(fd, socket.as_ref(), there))
            && (by & EXS_CAF_AHANDLE == 0 || op.ahandle == ah)
    };
    Ok(queue::cancel(wanted) as c_int)
}

/// `exs_recycle_recv_buffer`
pub fn recycle_recv_buffer(fd: c_int, buffer: *mut c_void) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        return Err(Errno::BADF);
    };
    let mut kept = entry
        .in_place
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let in_place = kept.remove(&(buffer as usize)).ok_or(Errno::INVAL)?;
    drop(kept);
    in_place.recycle();
    Ok(0)
}
