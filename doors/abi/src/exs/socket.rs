//! The asynchronous calls on sockets, and those that never wait.

use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use libc::{sockaddr, socklen_t};
use rustix::io::Errno;
use smallvec::SmallVec;
use weft_exs::{FilePiece, Kind, Memory, Piece, Ready, RecvFlags, Sink, Socket};

use super::closing::OneClosing;
use super::memory::{elements, memory, vector};
use super::op::{Op, Ptr, What};
use super::plain;
use super::queue;
use super::region::Uses;
use super::started::QueueEntry;
use super::state::state;
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
    let socket = Socket::new(&state.context()?, ipv6, kind)?;
    let nonblock = options & libc::SOCK_NONBLOCK != 0;
    state.sockets.insert(socket, ipv6, nonblock)
}

/// A call on a kernel descriptor.
///
/// # Safety
/// As for the system call; it has at most five arguments after the descriptor.
pub(super) unsafe fn on_system<T: TryFrom<isize>>(
    number: libc::c_long,
    fd: c_int,
    args: &[usize],
) -> Result<T, Errno> {
    let mut all = [fd as usize, 0, 0, 0, 0, 0];
    all[1..=args.len()].copy_from_slice(args);
    // SAFETY: the caller's promise.
    let result = unsafe { system(number, all) }?;
    T::try_from(result).map_err(|_| Errno::OVERFLOW)
}

/// `exs_bind`
pub unsafe fn bind(fd: c_int, addr: *const sockaddr, len: socklen_t) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_bind, fd, &[addr as usize, len as usize]) };
    };
    // SAFETY: the caller's promise.
    entry.socket.bind(unsafe { address::read(addr, len) }?)?;
    Ok(0)
}

/// `exs_listen`
pub fn listen(fd: c_int, backlog: c_int) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: no pointers.
        return unsafe { on_system(libc::SYS_listen, fd, &[backlog as usize]) };
    };
    entry.socket.listen(u32::try_from(backlog).unwrap_or(0))?;
    entry.listening.store(true, Ordering::Release);
    Ok(0)
}

/// `exs_getsockname`
pub unsafe fn getsockname(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<c_int, Errno> {
    // SAFETY: the caller's promise.
    unsafe { name(libc::SYS_getsockname, Socket::local_addr, fd, addr, len) }
}

/// `exs_getpeername`
pub unsafe fn getpeername(
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<c_int, Errno> {
    // SAFETY: the caller's promise.
    unsafe { name(libc::SYS_getpeername, Socket::peer_addr, fd, addr, len) }
}

unsafe fn name(
    number: libc::c_long,
    of: fn(&Socket) -> Result<SocketAddr, Errno>,
    fd: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<c_int, Errno> {
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(number, fd, &[addr as usize, len as usize]) };
    };
    // SAFETY: the caller's promise.
    unsafe { address::write_with_len(of(&entry.socket)?, addr, len) }.map(|()| 0)
}

/// # Errors
/// `EOPNOTSUPP` for a flag that is not in `known`.
pub(super) fn flags(flags: c_int, known: c_int) -> Result<(), Errno> {
    if flags & !known != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    Ok(())
}

/// Send flags that have no effect here, or whose effect is the default.
pub(super) const SEND_FLAGS: c_int =
    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT | libc::MSG_MORE | libc::MSG_EOR;

/// # Errors
/// `EOPNOTSUPP` for a flag that receives do not support.
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

/// The arguments common to every send and receive.
struct Transfer {
    fd: c_int,
    entry: Arc<Entry>,
    queue: Arc<QueueEntry>,
    ah: AHandle,
    /// The regions that it uses.
    uses: Uses,
}

impl Transfer {
    /// # Errors
    /// `EBADF` and the other errors of [`State::operable`](super::state::State::operable).
    fn new(fd: c_int, qh: QHandle, ah: AHandle) -> Result<Transfer, Errno> {
        Ok(Transfer {
            fd,
            entry: state().operable(fd)?,
            queue: queue(qh)?,
            ah,
            uses: Uses::new(),
        })
    }

    fn start(
        self,
        what: What,
        start: impl FnOnce(&Socket, Sink) -> Result<(), Errno>,
    ) -> Result<c_int, Errno> {
        let mut op = Op::new(self.fd, &self.entry, self.ah, what);
        op.uses = self.uses;
        self.queue
            .start(op, |sink| start(&self.entry.socket, sink))?;
        Ok(0)
    }
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
            queue.start(Op::new(fd, &entry, ah, What::Connect), |sink| {
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
            queue.start(Op::new(fd, &entry, ah, what), |sink| {
                entry.socket.accept(sink)
            })?;
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
    let mut transfer = Transfer::new(fd, qh, ah)?;
    flags(flag, SEND_FLAGS)?;
    let buf = buf.cast_mut();
    // SAFETY: the caller's promise.
    let memory = unsafe { memory(buf, len, mh, &mut transfer.uses) }?;
    let buf = Ptr(buf);
    let what = What::Xfer { buf, len, mh };
    transfer.start(what, |socket, sink| socket.send(memory, sink))
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
    let mut transfer = Transfer::new(fd, qh, ah)?;
    let flag = recv_flags(flag, false)?;
    // SAFETY: the caller's promise.
    let memory = unsafe { memory(buf, len, mh, &mut transfer.uses) }?;
    let buf = Ptr(buf);
    let what = What::Xfer { buf, len, mh };
    transfer.start(what, |socket, sink| socket.recv(memory, flag, sink))
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
    let mut transfer = Transfer::new(fd, qh, ah)?;
    flags(flag, SEND_FLAGS)?;
    // SAFETY: the caller's promise.
    let memory = unsafe { message(msg, true, &mut transfer.uses) }?;
    transfer.start(What::Msg(Ptr(msg.cast_mut())), |socket, sink| {
        socket.send(memory, sink)
    })
}

/// `exs_recvmsg`
pub unsafe fn recvmsg(
    fd: c_int,
    msg: *mut MsgHdr,
    flag: c_int,
    qh: QHandle,
    ah: AHandle,
) -> Result<c_int, Errno> {
    let mut transfer = Transfer::new(fd, qh, ah)?;
    let flag = recv_flags(flag & !(EXS_IN_PLACE as c_int), false)?;
    // SAFETY: the caller's promise.
    let memory = unsafe { message(msg, false, &mut transfer.uses) }?;
    transfer.start(What::Msg(Ptr(msg)), |socket, sink| {
        socket.recv(memory, flag, sink)
    })
}

/// A piece of a file, with a duplicate of the descriptor.
fn file_piece(fd: c_int, offset: libc::off_t, len: usize) -> Result<FilePiece, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: not kept; an invalid number gives EBADF.
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
    let mut transfer = Transfer::new(fd, qh, ah)?;
    flags(flag, SEND_FLAGS)?;
    let mut pieces = Vec::new();
    for i in 0..elements(vec, n)? {
        // SAFETY: one of the elements.
        let piece = unsafe { vec.add(i).read() };
        pieces.push(match i64::from(piece.xf_type) {
            // SAFETY: the type selects the field; the caller's promise.
            EXS_IOVEC => unsafe {
                let iov = piece.xf_vec.xf_iovec;
                let memory = memory(
                    iov.iov_base,
                    iov.iov_len,
                    iov.iov_mhandle,
                    &mut transfer.uses,
                )?;
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
    transfer.start(What::File(Ptr(vec.cast_mut()), n), |socket, sink| {
        socket.send_file(pieces, sink)
    })
}

/// A file, or a part of it, as the pieces of a send, for `exs_sync_sendfile`.
pub(super) fn file(fd: c_int, offset: libc::off_t, len: usize) -> Result<Vec<Piece>, Errno> {
    Ok(vec![Piece::File(file_piece(fd, offset, len)?)])
}

/// `exs_poll`. Each descriptor is one operation. If not all could be started, the result is the number of those that were.
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
    let mut wanted: SmallVec<[(c_int, Arc<Entry>, Ready); 4]> = SmallVec::new();
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
        wanted.push((fd.pfd_fd, state().operable(fd.pfd_fd)?, ready));
    }
    for (started, (fd, entry, ready)) in wanted.iter().enumerate() {
        let op = Op::new(*fd, entry, ah, What::Poll);
        match queue.start(op, |sink| entry.socket.poll(*ready, sink)) {
            Ok(_) => {}
            Err(errno) if started == 0 => return Err(errno),
            Err(_) => return Ok(started as c_int),
        }
    }
    Ok(0)
}

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
    let entry = state().operable(fd)?;
    let queue = maybe_queue(qh)?;
    flags(flag, 0)?;
    if i64::from(how) != EXS_SHUT_WR {
        return Err(Errno::INVAL);
    }
    match queue {
        None => entry.socket.shutdown()?,
        Some(queue) => {
            queue.start(Op::new(fd, &entry, ah, What::Shutdown), |sink| {
                entry.socket.shutdown_with(sink)
            })?;
        }
    }
    Ok(0)
}

/// `exs_close`
pub fn close(fd: c_int, flag: c_int, qh: QHandle, ah: AHandle) -> Result<c_int, Errno> {
    let state = state();
    let queue = maybe_queue(qh)?;
    flags(flag, 0)?;
    if queue.is_some()
        && let Ok(Found::Exs(entry)) = state.sockets.find(fd)
        && entry.has_numbers(2)
    {
        // The socket stays, so there is no end that an event could report.
        return Err(Errno::BUSY);
    }
    let closed = state
        .sockets
        .remove(fd, |entry| start_close(fd, entry, queue.as_deref(), ah))?;
    // SAFETY: the program gives up its descriptor with this call.
    let give_up = || unsafe { on_system(libc::SYS_close, fd, &[]) };
    match closed {
        Removed::Exs(_) | Removed::Duplicate => Ok(0),
        // This process has no connection whose end an event could report.
        Removed::Inherited => give_up().and(Err(Errno::NOTCONN)),
        Removed::System => {
            // Outstanding operations hold a duplicate of the descriptor.
            if let Some(entry) = state.closable(fd, queue.is_some())? {
                start_close(fd, &entry, queue.as_deref(), ah)?;
            }
            state.forget_epoll(fd);
            give_up()
        }
    }
}

/// Starts the close of a socket. A program that exits before it is done waits for sent data to be delivered. Another process may share a kernel
/// connection, so only our descriptor is closed.
fn start_close(
    fd: c_int,
    entry: &Arc<Entry>,
    queue: Option<&QueueEntry>,
    ah: AHandle,
) -> Result<(), Errno> {
    let closing = Box::new(OneClosing::begin(&state().closing));
    let close = |sink| entry.socket.close_guarded(sink, closing);
    match queue {
        None => close(Sink::Nobody),
        Some(queue) => queue
            .start(Op::new(fd, entry, ah, What::Close), close)
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
            Found::System => sockets.known_plain(fd)?,
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
