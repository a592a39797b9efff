//! Stream sockets. Each is idle, a listener, a connection, or a connection that is being made.

use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sockets::bell::{Bell, Heard};
use weft_sockets::error::io_errno;
use weft_sockets::lock::lock;
use weft_sockets::stream::{Shutdown, Stream as _};
use weft_sockets::wait::Wait;
use weft_verbs::cm::{Bound, ConnParam, ConnectError};
use weft_verbs::{Device, Path, RawMemory};

use crate::common::Common;
use crate::driver::Conn;
use crate::keepalive::Alive;
use crate::listener::Listener;
use crate::poll::Pollable;
use crate::{Options, RecvFlags, Sink, Source};

/// The default time for which a close waits for unsent bytes.
const PATIENCE: Duration = Duration::from_secs(10);

/// A stream socket. Clones are handles of the same one; it is closed when the last one is dropped, or before.
#[derive(Clone)]
pub struct Socket(Arc<Inner>);

struct Inner {
    common: Common,
    state: Mutex<State>,
    conn: OnceLock<Arc<Conn>>,
    /// How long a close waits.
    linger: Mutex<Option<Duration>>,
}

enum State {
    Idle(Option<Bound>),
    Connecting,
    /// The connection failed, and the program has not seen the error.
    Failed(Errno),
    Connected,
    Listening(Arc<Listener>),
    Closed,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl Alive for Inner {
    fn keep_alive(&self) {
        if let Some(conn) = self.conn.get() {
            conn.keep_alive();
        }
    }
}

impl Deref for Socket {
    type Target = Common;

    fn deref(&self) -> &Common {
        &self.0.common
    }
}

impl Inner {
    fn close(&self) {
        let before = std::mem::replace(&mut *lock(&self.state), State::Closed);
        // Ring before the next wait, so that threads that wait for a connection notice it.
        self.common.bell.ring();
        if let State::Listening(listener) = &before {
            listener.close();
        }
        if !matches!(before, State::Closed)
            && let Some(conn) = self.conn.get()
        {
            let linger = *lock(&self.linger);
            conn.close(linger.unwrap_or(PATIENCE));
        }
        self.common.bell.ring();
    }
}

impl Socket {
    fn with(common: Common, state: State) -> Inner {
        Inner {
            common,
            state: Mutex::new(state),
            conn: OnceLock::new(),
            linger: Mutex::default(),
        }
    }

    /// An idle socket.
    ///
    /// # Errors
    /// `EMFILE`.
    pub fn new(device: &Device, ipv6: bool) -> Result<Socket, Errno> {
        let common = Common::new(device, ipv6)?;
        Ok(Socket(Arc::new(Self::with(common, State::Idle(None)))))
    }

    /// Sets how long a close waits until everything is sent: `None`: the default; zero: not at all, and the peer sees a reset.
    pub fn set_linger(&self, linger: Option<Duration>) {
        *lock(&self.0.linger) = linger;
    }

    /// The options that were set, or that are in effect.
    pub fn options(&self) -> Options {
        match self.0.conn.get() {
            Some(conn) => conn.options(),
            None => *lock(&self.0.common.options),
        }
    }

    /// Whether it is connected, or connecting.
    pub fn has_begun(&self) -> bool {
        matches!(*lock(&self.0.state), State::Connecting | State::Connected)
    }

    pub fn is_listening(&self) -> bool {
        matches!(*lock(&self.0.state), State::Listening(_))
    }

    /// Take an address; port 0: any free one.
    ///
    /// # Errors
    /// `EAFNOSUPPORT`, `EINVAL` when it has one, and as `bind(2)`.
    pub fn bind(&self, addr: SocketAddr) -> Result<(), Errno> {
        self.check_family(addr)?;
        let mut state = lock(&self.0.state);
        let State::Idle(bound @ None) = &mut *state else {
            return Err(Errno::INVAL);
        };
        *bound = Some(self.device.bind(addr).map_err(|e| io_errno(&e))?);
        Ok(())
    }

    /// Listen, at any free port where none was bound.
    ///
    /// # Errors
    /// `EINVAL` for a socket that is connected, and as `listen(2)`.
    pub fn listen(&self, backlog: u32) -> Result<(), Errno> {
        let mut state = lock(&self.0.state);
        let bound = match &mut *state {
            State::Idle(bound) => bound.take(),
            State::Listening(_) => return Ok(()),
            State::Closed => return Err(Errno::BADF),
            _ => return Err(Errno::INVAL),
        };
        let bound = if let Some(bound) = bound {
            bound
        } else {
            let any = self.device.bind(self.any_addr());
            any.map_err(|e| io_errno(&e))?
        };
        let (options, bell) = (Arc::clone(&self.options), Arc::clone(&self.bell));
        let listener = Listener::new(&self.device, bound, backlog, options, bell)?;
        *state = State::Listening(listener);
        Ok(())
    }

    /// The next connection, and its peer's address.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `EINVAL` for a socket that does not listen.
    pub fn accept(&self) -> Result<(Socket, SocketAddr), Errno> {
        let listener = match &*lock(&self.0.state) {
            State::Listening(listener) => Arc::clone(listener),
            State::Closed => return Err(Errno::BADF),
            _ => return Err(Errno::INVAL),
        };
        let (conn, bell) = listener.accept(self.recv_wait(false))?;
        let peer = conn.peer_addr().unwrap_or_else(|| self.any_addr());
        let common = Common::with(&self.device, self.is_ipv6(), bell);
        common.set_options(|options| *options = conn.options());
        common.set_send_timeout(self.send_timeout());
        common.set_recv_timeout(self.recv_timeout());
        let mut inner = Self::with(common, State::Connected);
        inner.conn = OnceLock::from(conn);
        inner.linger = Mutex::new(*lock(&self.0.linger));
        Ok((Socket(Arc::new(inner)), peer))
    }

    /// Connects. Without waiting, [`Socket::take_error`] returns the result once the socket is ready.
    ///
    /// # Errors
    /// `EINTR` if a signal handler ran (connecting continues); `EINPROGRESS`, `EALREADY`, `EISCONN`, `EAFNOSUPPORT`, and as `connect(2)`.
    pub fn connect(&self, addr: SocketAddr) -> Result<(), Errno> {
        self.check_family(addr)?;
        let inner = &self.0;
        let mut state = lock(&inner.state);
        let bound = match &mut *state {
            State::Idle(bound) => bound.take(),
            State::Failed(_) => None,
            State::Connecting => return Err(Errno::ALREADY),
            State::Connected => return Err(Errno::ISCONN),
            State::Listening(_) => return Err(Errno::INVAL),
            State::Closed => return Err(Errno::BADF),
        };
        let bell = Arc::clone(&self.bell);
        let conn = Conn::prepare(&self.device, *lock(&self.options), bell)?;
        let param = ConnParam {
            private_data: conn.greeting().emit().to_vec(),
            options: conn.options().link,
            ..ConnParam::default()
        };
        *state = State::Connecting;
        drop(state);
        let weak = Arc::downgrade(inner);
        let dialled = Arc::clone(&conn);
        let done = move |outcome: Result<Vec<u8>, ConnectError>| {
            let result = match outcome {
                Ok(private_data) => dialled.established(&private_data),
                Err(error) => {
                    tracing::debug!(%error, "a connection could not be made");
                    Err(Errno::from_raw_os_error(error.raw_os_error()))
                }
            };
            let Some(inner) = weak.upgrade() else { return };
            let mut state = lock(&inner.state);
            if !matches!(*state, State::Connecting) {
                return;
            }
            *state = match result {
                Ok(()) => {
                    let _ = inner.conn.set(Arc::clone(&dialled));
                    State::Connected
                }
                Err(errno) => State::Failed(errno),
            };
            drop(state);
            inner.common.bell.ring();
        };
        match bound {
            Some(bound) => bound.dial(addr, &conn.qp, &param, done),
            None => self.device.dial(addr, None, &conn.qp, &param, done),
        }
        let wait = self.send_wait(false);
        if wait.waits() {
            self.connected(wait)
        } else {
            match &*lock(&inner.state) {
                State::Connected => Ok(()),
                // The program gets a failure, too, only when it asks for it.
                _ => Err(Errno::INPROGRESS),
            }
        }
    }

    /// Waits until the connection is made: `EINPROGRESS` if it is not made in time, `EINTR` if a signal handler ran; connecting continues.
    /// A failure is reported once.
    fn connected(&self, wait: Wait) -> Result<(), Errno> {
        let made = wait.until(&self.bell, || {
            let mut state = lock(&self.0.state);
            Some(match &*state {
                State::Connecting => return None,
                State::Connected => Ok(()),
                State::Failed(errno) => {
                    let errno = *errno;
                    *state = State::Idle(None);
                    Err(errno)
                }
                State::Closed => Err(Errno::BADF),
                State::Idle(_) | State::Listening(_) => Err(Errno::NOTCONN),
            })
        });
        made.map_err(|errno| match errno {
            Errno::AGAIN => Errno::INPROGRESS,
            errno => errno,
        })
        .flatten()
    }

    /// The connection for a transfer.
    fn conn(&self, wait: Wait) -> Result<&Arc<Conn>, Errno> {
        if let Some(conn) = self.0.conn.get() {
            return Ok(conn);
        }
        self.connected(wait).map_err(|errno| match errno {
            Errno::INPROGRESS => Errno::AGAIN,
            errno => errno,
        })?;
        self.0.conn.get().ok_or(Errno::NOTCONN)
    }

    /// Send: all of it, or without waiting (as the socket is set, or `dont_wait` says) what there is room for.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ENOTCONN`, `EPIPE`, `ECONNRESET`.
    pub fn send(&self, from: &[Source<'_>], dont_wait: bool) -> Result<usize, Errno> {
        let wait = self.send_wait(dont_wait);
        self.conn(wait)?.send(from, wait)
    }

    /// Receive what there is; 0 at the end of the stream.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ENOTCONN`, `ECONNRESET`.
    pub fn recv(&self, to: &mut [Sink<'_>], flags: RecvFlags) -> Result<usize, Errno> {
        let dont_wait = flags.contains(RecvFlags::DONTWAIT);
        let wait = self.recv_wait(dont_wait);
        self.conn(wait)?.recv(to, flags, wait)
    }

    /// Open memory to the peer at `offset` (`None`: at its address) until [`Socket::unmap`]; without `writable` it is only registered.
    ///
    /// # Errors
    /// `ENOTCONN`; `ENOMEM` when the peer has no room for more.
    pub fn map(
        &self,
        memory: &RawMemory,
        writable: bool,
        offset: Option<u64>,
    ) -> Result<u64, Errno> {
        self.conn(self.send_wait(false))?
            .map(memory, writable, offset)
    }

    /// Close memory again, named by its address and length.
    ///
    /// # Errors
    /// `EINVAL` when it is not mapped.
    pub fn unmap(&self, addr: usize, len: usize) -> Result<(), Errno> {
        self.conn(Wait::Not)?.unmap(addr, len)
    }

    /// Writes into memory that the peer has mapped at `offset`. Returns the bytes written, up to the end of the mapping. The peer's program
    /// is not notified.
    ///
    /// # Errors
    /// As [`Socket::send`].
    pub fn write_at(
        &self,
        from: &[Source<'_>],
        offset: u64,
        dont_wait: bool,
    ) -> Result<usize, Errno> {
        let wait = self.send_wait(dont_wait);
        self.conn(wait)?.write_at(from, offset, wait)
    }

    /// End one direction, or both.
    ///
    /// # Errors
    /// `ENOTCONN`.
    pub fn shutdown(&self, how: Shutdown) -> Result<(), Errno> {
        let conn = self.0.conn.get().ok_or(Errno::NOTCONN)?;
        if how != Shutdown::Write {
            conn.shut_read()?;
        }
        if how != Shutdown::Read {
            conn.shut_write()?;
        }
        Ok(())
    }

    /// Closes: sent bytes still arrive, see [`Socket::set_linger`]. Calls on other handles end.
    pub fn close(&self) {
        self.0.close();
    }

    /// Our address; before it has one, that of any address and port 0.
    ///
    /// # Errors
    /// `EBADF` after the close.
    pub fn local_addr(&self) -> Result<SocketAddr, Errno> {
        if let Some(addr) = self.0.conn.get().and_then(|conn| conn.local_addr()) {
            return Ok(addr);
        }
        match &*lock(&self.0.state) {
            State::Idle(Some(bound)) => Ok(bound.local_addr()),
            State::Listening(listener) => listener.local_addr().ok_or(Errno::INVAL),
            State::Closed => Err(Errno::BADF),
            _ => Ok(self.any_addr()),
        }
    }

    /// The peer's address.
    ///
    /// # Errors
    /// `ENOTCONN`.
    pub fn peer_addr(&self) -> Result<SocketAddr, Errno> {
        let addr = self.0.conn.get().and_then(|conn| conn.peer_addr());
        addr.ok_or(Errno::NOTCONN)
    }

    /// The transport of the connection.
    pub fn path(&self) -> Option<Path> {
        self.0.conn.get().and_then(|conn| conn.path())
    }

    /// Takes the pending error: of a connection that could not be made, or that broke.
    pub fn take_error(&self) -> Option<Errno> {
        if let Some(conn) = self.0.conn.get() {
            return conn.take_error();
        }
        let mut state = lock(&self.0.state);
        let State::Failed(errno) = *state else {
            return None;
        };
        *state = State::Idle(None);
        Some(errno)
    }

    /// Send something that the peer's program does not notice, to find out whether its host is still there.
    pub fn keep_alive(&self) {
        Alive::keep_alive(&*self.0);
    }

    /// Do that again and again, so far apart; `None`: no more.
    ///
    /// # Errors
    /// `EAGAIN` when there can be no thread for it.
    pub fn set_keep_alive(&self, every: Option<Duration>) -> Result<(), Errno> {
        let alive: Arc<dyn Alive> = Arc::clone(&self.0) as _;
        crate::keepalive::set(&alive, every)
    }
}

impl Pollable for Socket {
    fn ready(&self) -> PollFlags {
        if let Some(conn) = self.0.conn.get() {
            return conn.ready();
        }
        match &*lock(&self.0.state) {
            State::Listening(listener) if listener.is_ready() => PollFlags::IN,
            State::Listening(_) | State::Connecting | State::Connected => PollFlags::empty(),
            // As TCP has it.
            State::Idle(_) => PollFlags::OUT | PollFlags::HUP,
            State::Failed(_) => PollFlags::IN | PollFlags::OUT | PollFlags::ERR | PollFlags::HUP,
            State::Closed => PollFlags::NVAL,
        }
    }

    fn arm(&self) -> Heard {
        let heard = self.bell.arm();
        if let Some(conn) = self.0.conn.get() {
            conn.leave_it();
        }
        heard
    }

    fn bell(&self) -> &Bell {
        &self.0.common.bell
    }

    fn wait_ready(
        &self,
        wanted: PollFlags,
        deadline: Option<Instant>,
    ) -> Option<Result<PollFlags, Errno>> {
        Some(self.0.conn.get()?.wait_ready(wanted, deadline))
    }
}
