//! Sockets, the public interface. Each is an idle socket, a listener, a connection over verbs, or a plain TCP connection.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::{Path, Signal};

use crate::bell::deadline;
use crate::driver::{Conn, Target, file_end};
use crate::event::{Event, EventKind};
use crate::file::Outcome;
use crate::listener::{Listener, Parent};
use crate::machine::Stats;
use crate::plain::{EndDone, Plain, PlainOp};
use crate::{Context, Error, Kind, Memory, Options, Piece, Ready, RecvFlags, Sink};

mod dial;
mod wait;

/// A socket. Clones are handles of the same socket. Dropping the last one closes it as [`Socket::close`] does.
#[derive(Clone)]
pub struct Socket(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) context: Context,
    pub(crate) kind: Kind,
    ipv6: bool,
    pub(crate) signal: Arc<Signal>,
    options: Mutex<Options>,
    state: Mutex<State>,
    /// Set once, on connect, so that the data path needs no lock.
    conn: OnceLock<Arc<Conn>>,
    /// Set for an ordinary TCP connection, which replaces the others.
    plain: Option<Arc<Plain>>,
    closed: AtomicBool,
    /// The time limits for sends and receives in nanoseconds; 0: none.
    limits: [AtomicU64; 2],
}

enum State {
    /// Unused or bound: a kernel socket reserves the address.
    Idle(Option<(SocketAddr, OwnedFd)>),
    /// The connection is not there yet while an RNIC looks for the peer.
    Connecting(Option<Arc<Conn>>),
    Connected,
    Listening(Arc<Listener>),
    Closed,
}

impl std::fmt::Debug for Socket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Socket({})", self.0.fd())
    }
}

impl Inner {
    /// A socket in the given state, with the default settings.
    fn new(context: &Context, kind: Kind, ipv6: bool, signal: Arc<Signal>, state: State) -> Inner {
        Inner {
            context: context.clone(),
            kind,
            ipv6,
            signal,
            options: Mutex::default(),
            state: Mutex::new(state),
            conn: OnceLock::new(),
            plain: None,
            closed: AtomicBool::new(false),
            limits: Default::default(),
        }
    }

    /// Store the time limits where each operation reads them without a lock.
    fn limit(&self, options: &Options) {
        for (kept, limit) in self
            .limits
            .iter()
            .zip([options.send_timeout, options.recv_timeout])
        {
            let nanos = limit.map_or(0, |l| l.as_nanos().clamp(1, u64::MAX.into()) as u64);
            kept.store(nanos, Ordering::Relaxed);
        }
    }

    /// The unspecified address of the socket's family.
    fn any_addr(&self) -> SocketAddr {
        if self.ipv6 {
            (Ipv6Addr::UNSPECIFIED, 0).into()
        } else {
            (Ipv4Addr::UNSPECIFIED, 0).into()
        }
    }

    pub(crate) fn fd(&self) -> i32 {
        self.signal.as_fd().as_raw_fd()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if let Some(conn) = self.conn.get()
            && !self.closed.load(Ordering::SeqCst)
        {
            conn.close(None);
        }
        if let Some(plain) = &self.plain
            && !self.closed.load(Ordering::SeqCst)
        {
            // Queued data is sent first; the reference keeps the connection alive until then.
            let kept = Arc::clone(plain);
            plain.close_shared(Box::new(move |_| drop(kept)));
        }
        let state = self.state.get_mut();
        if let State::Listening(listener) = state.unwrap_or_else(PoisonError::into_inner) {
            listener.close();
        }
    }
}

impl Socket {
    /// A new socket for IPv4 or IPv6.
    ///
    /// # Errors
    /// `EMFILE` and `ENFILE` without a free descriptor.
    pub fn new(context: &Context, ipv6: bool, kind: Kind) -> Result<Socket, Errno> {
        let signal = Arc::new(Signal::new().map_err(Error::from)?);
        let inner = Inner::new(context, kind, ipv6, signal, State::Idle(None));
        Ok(Socket(Arc::new(inner)))
    }

    /// An ordinary connected TCP socket: the same operations and events over plain TCP, with any peer. The socket owns the descriptor from now on.
    ///
    /// # Errors
    /// `ENOTSOCK`, `EOPNOTSUPP` for other kinds of socket, `ENOTCONN`.
    pub fn from_tcp(context: &Context, fd: OwnedFd) -> Result<Socket, Errno> {
        rustix::net::getpeername(&fd)?;
        Self::from_ended_tcp(context, fd)
    }

    /// Like [`Socket::from_tcp`], for a connection that may have ended: to close it.
    ///
    /// # Errors
    /// `ENOTSOCK`, `EOPNOTSUPP` for other kinds of socket.
    pub fn from_ended_tcp(context: &Context, fd: OwnedFd) -> Result<Socket, Errno> {
        let plain = Plain::new(fd)?;
        let ipv6 = plain.local_addr().is_ok_and(|addr| addr.is_ipv6());
        let signal = Arc::new(Signal::new().map_err(Error::from)?);
        let mut inner = Inner::new(context, Kind::Stream, ipv6, signal, State::Connected);
        inner.plain = Some(plain);
        Ok(Socket(Arc::new(inner)))
    }

    /// The ordinary connection, if this is one and it is open.
    fn plain(&self) -> Result<Option<&Arc<Plain>>, Errno> {
        match &self.0.plain {
            Some(_) if self.0.closed.load(Ordering::Relaxed) => Err(Errno::BADF),
            plain => Ok(plain.as_ref()),
        }
    }

    /// Start an operation on it.
    fn plain_op(
        &self,
        kind: EventKind,
        memory: Memory,
        flags: RecvFlags,
        limit: Option<Duration>,
        sink: (Target, u64),
    ) -> PlainOp {
        let (target, token) = sink;
        let fd = self.number();
        PlainOp {
            memory,
            flags,
            token,
            deadline: deadline(limit),
            done: Box::new(move |outcome| told_plain(target, (kind, token, fd), outcome)),
        }
    }

    /// A receive that does not wait (`DONTWAIT`).
    fn plain_recv_now(
        &self,
        plain: &Plain,
        kind: EventKind,
        memory: Memory,
        (target, token): (Target, u64),
    ) -> Result<(), Errno> {
        let about = (kind, token, self.number());
        let tell = move |target, outcome| told_plain(target, about, outcome);
        plain
            .recv_now(memory, target, tell)
            .map_err(|target| refused((Errno::AGAIN, target)))
    }

    fn number(&self) -> i32 {
        self.as_fd().as_raw_fd()
    }

    /// A connected socket of a listener.
    fn accepted(
        (context, kind, ipv6): (&Context, Kind, bool),
        options: Options,
        signal: Arc<Signal>,
        conn: Arc<Conn>,
    ) -> Socket {
        let mut inner = Inner::new(context, kind, ipv6, signal, State::Connected);
        inner.limit(&options);
        inner.options = Mutex::new(options);
        inner.conn = OnceLock::from(conn);
        Socket(Arc::new(inner))
    }

    /// The socket's descriptor, a real one for `epoll`. It is readable while data, a connection or the end of the stream can be taken.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0.plain {
            Some(plain) => plain.as_fd(),
            None => self.0.signal.as_fd(),
        }
    }

    /// The kind: stream or messages.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The settings.
    pub fn options(&self) -> Options {
        lock(&self.0.options).clone()
    }

    /// Change settings. `f` may call the socket. `f` runs again if another thread changed settings meanwhile.
    ///
    /// # Errors
    /// `EINVAL` for values out of range; `EISCONN` for settings that determine a connection, once the socket is connected or listens.
    pub fn set_options(&self, mut f: impl FnMut(&mut Options)) -> Result<(), Errno> {
        loop {
            let old = self.options();
            let mut new = old.clone();
            f(&mut new);
            new.check()?;
            let state = lock(&self.0.state);
            let mut options = lock(&self.0.options);
            if *options != old {
                continue;
            }
            if !matches!(*state, State::Idle(_)) && !new.same_connection(&old) {
                return Err(Errno::ISCONN);
            }
            self.0.limit(&new);
            *options = new;
            return Ok(());
        }
    }

    /// Bind the socket to a local address.
    ///
    /// # Errors
    /// As `bind(2)`; `EAFNOSUPPORT` for an address of the other family, `EINVAL` when the socket is bound already.
    pub fn bind(&self, addr: SocketAddr) -> Result<(), Errno> {
        self.check_family(addr)?;
        let mut state = lock(&self.0.state);
        let State::Idle(bound @ None) = &mut *state else {
            return Err(Errno::INVAL);
        };
        *bound = Some(reserve(addr)?);
        Ok(())
    }

    /// Listen; up to `backlog` connections wait to be accepted, and no more than have 4 GiB of control receives and buffers, because peers can fill those:
    /// 16 with small packets of 16 MiB. Further ones are refused. A socket without an address gets one.
    ///
    /// # Errors
    /// As `listen(2)`.
    pub fn listen(&self, backlog: u32) -> Result<(), Errno> {
        let mut state = lock(&self.0.state);
        let bound = match &mut *state {
            State::Idle(bound) => bound,
            State::Listening(_) => return Ok(()),
            State::Closed => return Err(Errno::BADF),
            State::Connecting(_) | State::Connected => return Err(Errno::INVAL),
        };
        if bound.is_none() {
            *bound = Some(reserve(self.0.any_addr())?);
        }
        let Some((addr, kept)) = bound.take() else {
            return Err(Errno::INVAL);
        };
        // No other socket can take the address in between: the kernel does not assign an address that a listener uses.
        drop(kept);
        let (context, kind, ipv6) = (self.0.context.clone(), self.0.kind, self.0.ipv6);
        let parent = Parent {
            context: context.clone(),
            kind,
            signal: Arc::clone(&self.0.signal),
            options: self.options(),
            accepted: Box::new(move |options, signal, conn| {
                Socket::accepted((&context, kind, ipv6), options, signal, conn)
            }),
        };
        let listener = Listener::new(parent, addr, backlog.max(1))?;
        *state = State::Listening(listener);
        Ok(())
    }

    /// The local address.
    ///
    /// # Errors
    /// None at present: an unbound socket returns the unspecified address.
    pub fn local_addr(&self) -> Result<SocketAddr, Errno> {
        if let Some(plain) = &self.0.plain {
            return plain.local_addr();
        }
        if let Some(addr) = self.0.conn.get().and_then(|conn| conn.local_addr()) {
            return Ok(addr);
        }
        match &*lock(&self.0.state) {
            State::Idle(Some((addr, _))) => Ok(*addr),
            State::Listening(listener) => Ok(listener.local_addr()),
            State::Closed => Err(Errno::BADF),
            _ => Ok(self.0.any_addr()),
        }
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `ENOTCONN`.
    pub fn peer_addr(&self) -> Result<SocketAddr, Errno> {
        if let Some(plain) = self.plain()? {
            return plain.peer_addr();
        }
        self.conn()?.peer_addr().ok_or(Errno::NOTCONN)
    }

    fn check_family(&self, addr: SocketAddr) -> Result<(), Errno> {
        if addr.is_ipv6() == self.0.ipv6 {
            Ok(())
        } else {
            Err(Errno::AFNOSUPPORT)
        }
    }

    fn conn(&self) -> Result<&Arc<Conn>, Errno> {
        let conn = self.0.conn.get().ok_or(Errno::NOTCONN)?;
        if self.0.closed.load(Ordering::Relaxed) {
            return Err(Errno::BADF);
        }
        Ok(conn)
    }

    /// Connect. The event is of [`EventKind::Connect`].
    ///
    /// # Errors
    /// `EISCONN`, `EALREADY`, `EINVAL` (it listens), `EBADF` (it is closed), `EAFNOSUPPORT`, `EAGAIN` (the queue is full), and the errors of
    /// creating the connection's objects.
    pub fn connect(&self, addr: SocketAddr, sink: Sink) -> Result<(), Errno> {
        let (target, token) = Target::new(sink)?;
        self.connect_to(addr, target, token)
    }

    /// Accept the next connection. The event is of [`EventKind::Accept`]; several may be outstanding.
    ///
    /// # Errors
    /// `EINVAL` when it does not listen, `EBADF` when it is closed, `EAGAIN` when the queue is full.
    pub fn accept(&self, sink: Sink) -> Result<(), Errno> {
        let listener = self.listener()?;
        let (target, token) = Target::new(sink)?;
        listener.accept(target, token);
        Ok(())
    }

    pub(crate) fn listener(&self) -> Result<Arc<Listener>, Errno> {
        match &*lock(&self.0.state) {
            State::Listening(listener) => Ok(Arc::clone(listener)),
            State::Closed => Err(Errno::BADF),
            _ => Err(Errno::INVAL),
        }
    }

    /// Send. The event is of [`EventKind::Send`] (`SendMsg` for a list); with it the memory belongs to the program again.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF` (closed), `EPIPE` (after a shutdown, or the peer has gone), `ECONNRESET`, `EMSGSIZE` (a message longer than 1 GiB), `EAGAIN`
    /// (the queue is full).
    pub fn send(&self, memory: Memory, sink: Sink) -> Result<(), Errno> {
        self.send_within(self.limits().0, memory, sink)
    }

    /// Like [`Socket::send`], without the socket's time limit: for data that the writer has been promised to send. A send cut short would leave a
    /// hole in the stream.
    ///
    /// # Errors
    /// As [`Socket::send`].
    pub fn send_without_limit(&self, memory: Memory, sink: Sink) -> Result<(), Errno> {
        self.send_within(None, memory, sink)
    }

    fn send_within(
        &self,
        limit: Option<Duration>,
        memory: Memory,
        sink: Sink,
    ) -> Result<(), Errno> {
        if let Some(plain) = self.plain()? {
            let kind = EventKind::of_send(&memory);
            plain.send(self.plain_op(kind, memory, RecvFlags::empty(), limit, Target::new(sink)?));
            return Ok(());
        }
        let conn = self.conn()?;
        let (target, token) = Target::new(sink)?;
        conn.send(memory, target, token, limit)
            .map(drop)
            .map_err(refused)
    }

    /// Receive. The event is of [`EventKind::Recv`] (`RecvMsg` for a list); 0 bytes mean the end of the stream.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF` (closed), `EAGAIN` (the queue is full; or no data, with `DONTWAIT`).
    pub fn recv(&self, memory: Memory, flags: RecvFlags, sink: Sink) -> Result<(), Errno> {
        let limit = self.limits().1;
        if let Some(plain) = self.plain()? {
            let kind = EventKind::of_recv(&memory);
            if flags.contains(RecvFlags::DONTWAIT) {
                return self.plain_recv_now(plain, kind, memory, Target::new(sink)?);
            }
            plain.recv(self.plain_op(kind, memory, flags, limit, Target::new(sink)?));
            return Ok(());
        }
        let conn = self.conn()?;
        let (target, token) = Target::new(sink)?;
        conn.recv(memory, flags, target, token, limit)
            .map(drop)
            .map_err(refused)
    }

    /// Send memory and parts of files, in order. The event is of [`EventKind::SendFile`]; later sends wait behind it. A file shorter than
    /// requested contributes the bytes that it has.
    ///
    /// # Errors
    /// As [`Socket::send`]; `EOPNOTSUPP` on a socket for messages.
    pub fn send_file(&self, pieces: Vec<Piece>, sink: Sink) -> Result<(), Errno> {
        self.send_file_within(self.limits().0, pieces, sink)
    }

    /// Like [`Socket::send_file`], without the socket's time limit: for a caller that cancels it itself.
    ///
    /// # Errors
    /// As [`Socket::send_file`].
    pub fn send_file_without_limit(&self, pieces: Vec<Piece>, sink: Sink) -> Result<(), Errno> {
        self.send_file_within(None, pieces, sink)
    }

    fn send_file_within(
        &self,
        limit: Option<Duration>,
        pieces: Vec<Piece>,
        sink: Sink,
    ) -> Result<(), Errno> {
        if self.0.kind == Kind::SeqPacket {
            return Err(Errno::OPNOTSUPP);
        }
        if let Some(plain) = self.plain()? {
            let (target, token) = Target::new(sink)?;
            let fd = self.number();
            let limit = deadline(limit);
            let (done, take_back) = file_end(target, token, fd);
            let sent = plain.send_file(&self.0.context, pieces, token, limit, done);
            return sent.inspect_err(|_| take_back().forget());
        }
        let conn = self.conn()?;
        let (target, token) = Target::new(sink)?;
        conn.send_file(pieces, target, token, limit)
            .map_err(refused)
    }

    /// The time limits for sends and for receives.
    pub fn limits(&self) -> (Option<Duration>, Option<Duration>) {
        let limit = |kept: &AtomicU64| match kept.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(Duration::from_nanos(nanos)),
        };
        let [send, recv] = &self.0.limits;
        (limit(send), limit(recv))
    }

    /// Report once when the socket is ready for one of the conditions `wanted`, or has failed. The event is of [`EventKind::Poll`].
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF` (closed), `EAGAIN` (the queue is full).
    pub fn poll(&self, wanted: Ready, sink: Sink) -> Result<(), Errno> {
        if let Ok(listener) = self.listener() {
            let (target, token) = Target::new(sink)?;
            listener.poll(wanted, target, token);
            return Ok(());
        }
        if let Some(plain) = self.plain()? {
            let (target, token) = Target::new(sink)?;
            let fd = self.number();
            let done = move |ready: Result<Ready, Errno>| {
                let mut event = Event::new(EventKind::Poll, token, fd, ready.map(|_| 0));
                event.ready = ready.unwrap_or_default();
                target.tell_now(event);
            };
            plain.poll(wanted, token, Box::new(done));
            return Ok(());
        }
        let conn = self.conn()?;
        let (target, token) = Target::new(sink)?;
        conn.poll(wanted, target, token);
        Ok(())
    }

    /// Cancel the operations with this token, or all. Returns their number. Each still produces its event: with `ECANCELED`, or with its normal
    /// result when it was too late.
    pub fn cancel(&self, token: Option<u64>) -> usize {
        if let Ok(listener) = self.listener() {
            return listener.cancel(token);
        }
        if let Ok(Some(plain)) = self.plain() {
            return plain.cancel(token);
        }
        self.conn().map_or(0, |conn| conn.cancel(token))
    }

    /// Close the sending direction: queued data is sent, then the peer sees the end of the stream.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF`.
    pub fn shutdown(&self) -> Result<(), Errno> {
        self.shutdown_with(Sink::Nobody)
    }

    /// Like [`Socket::shutdown`]; the event, of [`EventKind::Shutdown`], comes when everything has been handed to the transport.
    ///
    /// # Errors
    /// As [`Socket::shutdown`], and `EAGAIN` when the queue is full.
    pub fn shutdown_with(&self, sink: Sink) -> Result<(), Errno> {
        if let Some(plain) = self.plain()? {
            let told = Target::new(sink)?;
            plain.shutdown(self.plain_end(EventKind::Shutdown, told));
            return Ok(());
        }
        let conn = self.conn()?;
        let told = Target::new(sink)?;
        conn.shutdown(Some(told)).map_err(refused)
    }

    /// End the current and all later blocking receives with `ECANCELED` (`shutdown(SHUT_RD)`): the socket is readable from now on. The peer is not
    /// informed; its data goes to receives with an event.
    ///
    /// # Errors
    /// `ENOTCONN`, `EBADF`.
    pub fn stop_waiting(&self) -> Result<(), Errno> {
        self.conn()?.stop_waiting();
        Ok(())
    }

    fn plain_end(&self, kind: EventKind, (target, token): (Target, u64)) -> EndDone {
        let fd = self.number();
        // Keeps the connection alive until its result is reported, so that queued data is sent.
        let keep = self.0.plain.clone();
        Box::new(move |result| {
            let event = Event::new(kind, token, fd, result.map(|()| 0));
            target.tell_now(event);
            drop(keep);
        })
    }

    /// Close the socket: receives are cancelled, queued data is sent, then the peer sees the end, even on an ordinary connection for which
    /// the program has other descriptors. The event is of [`EventKind::Close`].
    ///
    /// # Errors
    /// `EBADF` when it is closed, `EAGAIN` when the queue is full; the socket is unchanged then.
    pub fn close(&self, sink: Sink) -> Result<(), Errno> {
        self.close_to(true, || Target::new(sink))
    }

    /// Like [`Socket::close`]; `guard` is dropped when the end has been reported, even if no thread takes the event. As with `close(2)`, the peer of an
    /// ordinary connection sees the end when the last descriptor is closed, in this process or in another. Ours is closed with the last handle.
    ///
    /// # Errors
    /// As [`Socket::close`].
    pub fn close_guarded(&self, sink: Sink, guard: Box<dyn Send>) -> Result<(), Errno> {
        self.close_to(false, || {
            let (target, token) = Target::new(sink)?;
            Ok((Target::Guarded(Box::new((target, guard))), token))
        })
    }

    fn close_to(
        &self,
        ends: bool,
        target: impl FnOnce() -> Result<(Target, u64), Errno>,
    ) -> Result<(), Errno> {
        if self.0.closed.load(Ordering::SeqCst) {
            return Err(Errno::BADF);
        }
        let (target, token) = target()?;
        if self.0.closed.swap(true, Ordering::SeqCst) {
            target.forget();
            return Err(Errno::BADF);
        }
        let old = std::mem::replace(&mut *lock(&self.0.state), State::Closed);
        if let Some(conn) = self.0.conn.get() {
            conn.close(Some((target, token)));
            return Ok(());
        }
        if let Some(plain) = &self.0.plain {
            let told = self.plain_end(EventKind::Close, (target, token));
            if ends {
                plain.close(told);
            } else {
                plain.close_shared(told);
            }
            return Ok(());
        }
        match old {
            State::Listening(listener) => listener.close(),
            // When the connect completes, it finds the socket closed.
            State::Connecting(Some(conn)) => conn.close(None),
            _ => {}
        }
        let event = Event::new(EventKind::Close, token, self.0.fd(), Ok(0));
        target.tell_now(event);
        Ok(())
    }

    /// The conditions that the socket is ready for.
    pub fn ready(&self) -> Ready {
        if let Ok(listener) = self.listener() {
            return listener.ready();
        }
        if let Ok(Some(plain)) = self.plain() {
            return plain.ready();
        }
        match self.conn() {
            Ok(conn) => conn.ready(),
            Err(_) => Ready::empty(),
        }
    }

    /// Bytes that have arrived and that no receive has taken; of messages, those of the first.
    pub fn available(&self) -> u64 {
        self.conn().map(|conn| conn.available()).unwrap_or_default()
    }

    /// Counters of the connection.
    pub fn stats(&self) -> Stats {
        self.conn().map(|conn| conn.stats()).unwrap_or_default()
    }

    /// The pending error of the connection that no call has returned yet (`SO_ERROR`); reading clears it.
    pub fn take_error(&self) -> Option<Errno> {
        self.conn().ok()?.take_error()
    }

    /// The path that carries the connection.
    pub fn path(&self) -> Option<Path> {
        self.conn().ok()?.path()
    }
}

/// Report the end of a send or receive on an ordinary connection.
fn told_plain(target: Target, (kind, token, fd): (EventKind, u64, i32), outcome: Outcome) {
    let mut event = Event::new(kind, token, fd, outcome.result);
    event.bytes = outcome.bytes;
    event.memory = Some(outcome.memory);
    target.tell_now(event);
}

/// Release the resources of a refused operation.
fn refused((errno, target): (Errno, Target)) -> Errno {
    target.forget();
    errno
}

/// Let the kernel reserve an address for this socket.
fn reserve(addr: SocketAddr) -> Result<(SocketAddr, OwnedFd), Errno> {
    use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
    let family = if addr.is_ipv6() {
        AddressFamily::INET6
    } else {
        AddressFamily::INET
    };
    let fd = net::socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    sockopt::set_socket_reuseaddr(&fd, true)?;
    if addr.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    net::bind(&fd, &addr)?;
    let addr = SocketAddr::try_from(net::getsockname(&fd)?)?;
    Ok((addr, fd))
}
