//! Connected streams.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use rustix::io::Errno;
use weft_sockets::bell::{Bell, Heard};
use weft_sockets::error::io_errno;
use weft_sockets::lock::lock;
use weft_sockets::stream::{Shutdown, Stream as _};
use weft_sockets::wait::Waits;
use weft_verbs::cm::{ConnParam, ConnectError};
use weft_verbs::{Device, Path};

use crate::driver::Conn;
use crate::send_stats::SendStats;
use crate::{Mode, Options, RecvFlags, Sink, Source};

/// The default time for which a close waits for bytes that have not arrived.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connected stream. Clones are handles of the same one; it is closed when the last one is dropped, or before.
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

struct Inner {
    conn: Arc<Conn>,
    bell: Arc<Bell>,
    waits: Waits,
    linger: Mutex<Option<Duration>>,
    closed: AtomicBool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn close(&self) {
        if !self.closed.swap(true, Ordering::SeqCst) {
            let linger = *lock(&self.linger);
            self.conn.close(linger.unwrap_or(PATIENCE));
            self.bell.ring();
        }
    }
}

impl Stream {
    pub(crate) fn of(conn: Arc<Conn>, bell: Arc<Bell>) -> Stream {
        Stream(Arc::new(Inner {
            conn,
            bell,
            waits: Waits::default(),
            linger: Mutex::default(),
            closed: AtomicBool::new(false),
        }))
    }

    /// Connect; waits up to `timeout` (`None`: as long as the link's options say).
    ///
    /// # Errors
    /// As `connect(2)`; `EPROTO` when the peer speaks no SDP.
    pub fn connect(
        device: &Device,
        addr: SocketAddr,
        options: &Options,
        timeout: Option<Duration>,
    ) -> Result<Stream, Errno> {
        let bell = Arc::new(Bell::new().map_err(|error| io_errno(&error))?);
        let conn = Conn::prepare(device, options, Arc::clone(&bell))?;
        let param = ConnParam {
            private_data: conn.hello().emit().to_vec(),
            options: options.link,
            ..ConnParam::default()
        };
        let told = Arc::new((Mutex::new(None), Condvar::new()));
        let (dialled, tell) = (Arc::clone(&conn), Arc::clone(&told));
        let done = move |outcome: Result<Vec<u8>, ConnectError>| {
            let result = match outcome {
                Ok(private_data) => dialled.established(&private_data),
                Err(error) => {
                    tracing::debug!(%error, "a connection could not be made");
                    Err(Errno::from_raw_os_error(error.raw_os_error()))
                }
            };
            *lock(&tell.0) = Some(result);
            tell.1.notify_all();
        };
        device.dial(addr, None, &conn.qp, &param, done);
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut result = lock(&told.0);
        loop {
            if let Some(result) = *result {
                result?;
                return Ok(Stream::of(conn, bell));
            }
            let left = deadline.map_or(Duration::from_secs(1), |end| {
                end.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Err(Errno::TIMEDOUT);
            }
            result = told
                .1
                .wait_timeout(result, left)
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        }
    }

    fn open(&self) -> Result<&Conn, Errno> {
        if self.0.closed.load(Ordering::SeqCst) {
            Err(Errno::BADF)
        } else {
            Ok(&self.0.conn)
        }
    }

    /// Send: all of it, or without waiting (as the stream is set, or `dont_wait` says) what there is room for. One piece of [`Source::Raw`] may
    /// go without a copy, as [`Stream::set_mode`] says; after [`Mode::AzBlock`] and [`Mode::AzCopy`] the program may read and write it at once, but
    /// settles it before it is unmapped ([`weft_verbs::protect::settle`]).
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `EPIPE`, `ECONNRESET`, `EBADF` after the close.
    pub fn send(&self, from: &[Source<'_>], dont_wait: bool) -> Result<usize, Errno> {
        let wait = self.0.waits.send_wait(dont_wait);
        self.open()?.send(from, wait)
    }

    /// Send one urgent byte (`MSG_OOB`).
    ///
    /// # Errors
    /// As [`Stream::send`].
    pub fn send_urgent(&self, byte: u8, dont_wait: bool) -> Result<(), Errno> {
        let wait = self.0.waits.send_wait(dont_wait);
        self.open()?.send_urgent(byte, wait)
    }

    /// Receives the available bytes, up to the place of an urgent byte; 0 at the end of the stream. Bytes in the sender's memory count as available: a
    /// call that does not wait fetches them, too.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ECONNRESET`, `EBADF` after the close.
    pub fn recv(&self, to: &mut [Sink<'_>], flags: RecvFlags) -> Result<usize, Errno> {
        let dont_wait = flags.contains(RecvFlags::DONTWAIT);
        let wait = self.0.waits.recv_wait(dont_wait);
        self.open()?.recv(to, flags, wait)
    }

    /// The urgent byte (`MSG_OOB`), which is left there with `peek`.
    ///
    /// # Errors
    /// `EINVAL` when there is none; `EAGAIN` when one is announced.
    pub fn recv_urgent(&self, peek: bool) -> Result<u8, Errno> {
        self.open()?.take_urgent(peek)
    }

    /// Whether the next byte to receive is the one after the urgent one (`sockatmark`).
    pub fn at_mark(&self) -> bool {
        self.0.conn.at_mark()
    }

    /// Sets whether later urgent bytes stay in the stream (`SO_OOBINLINE`).
    pub fn set_oob_inline(&self, inline: bool) {
        self.0.conn.set_inline(inline);
    }

    /// Bytes that can be received now (`FIONREAD`).
    pub fn readable(&self) -> u64 {
        self.0.conn.readable()
    }

    /// Whether a send would start now.
    pub fn is_writable(&self) -> bool {
        self.0.conn.may_send()
    }

    /// Sets how large sends move their bytes from now on.
    pub fn set_mode(&self, mode: Mode) {
        self.0.conn.set_mode(mode);
    }

    /// See [`Stream::set_mode`].
    pub fn mode(&self) -> Mode {
        self.0.conn.mode()
    }

    /// The statistics of the connection.
    pub fn send_stats(&self) -> SendStats {
        self.0.conn.send_stats()
    }

    /// Settings, as they are in effect.
    pub fn options(&self) -> Options {
        *self.0.conn.options()
    }

    /// Sets whether calls return `EAGAIN` instead of waiting.
    pub fn set_nonblocking(&self, on: bool) {
        self.0.waits.nonblocking.store(on, Ordering::Relaxed);
    }

    /// Sets the time limit of sends, after which they return `EAGAIN`, or what was sent. `None`, the default: no limit.
    pub fn set_send_timeout(&self, limit: Option<Duration>) {
        self.0.waits.send.set(limit);
    }

    /// Sets the time limit of receives, after which they return `EAGAIN`, or what was received. `None`, the default: no limit.
    pub fn set_recv_timeout(&self, limit: Option<Duration>) {
        self.0.waits.recv.set(limit);
    }

    /// Sets how long a close waits until everything has arrived. `None`: 10 s; zero: not at all, and the peer sees a reset.
    pub fn set_linger(&self, linger: Option<Duration>) {
        *lock(&self.0.linger) = linger;
    }

    /// End one direction, or both.
    ///
    /// # Errors
    /// `EBADF` after the close.
    pub fn shutdown(&self, how: Shutdown) -> Result<(), Errno> {
        let conn = self.open()?;
        if how != Shutdown::Write {
            conn.shut_read()?;
        }
        if how != Shutdown::Read {
            conn.shut_write()?;
        }
        Ok(())
    }

    /// Closes: sent bytes still arrive, see [`Stream::set_linger`]. After the return the program owns the memory of all sends again.
    pub fn close(&self) {
        self.0.close();
    }

    /// Our address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.0.conn.local_addr()
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.0.conn.peer_addr()
    }

    /// The transport of the connection.
    pub fn path(&self) -> Option<Path> {
        self.0.conn.path()
    }

    /// Takes the pending error, of a connection that broke (`SO_ERROR`).
    pub fn take_error(&self) -> Option<Errno> {
        self.0.conn.take_error()
    }

    /// The present readiness.
    pub fn ready(&self) -> PollFlags {
        self.0.conn.ready()
    }

    /// Sleep until it is ready for something of `wanted`, up to `timeout` (`None`: for ever); this thread drives it meanwhile.
    ///
    /// # Errors
    /// `EINTR` when a signal's handler ran.
    pub fn wait_ready(
        &self,
        wanted: PollFlags,
        timeout: Option<Duration>,
    ) -> Result<PollFlags, Errno> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.0.conn.wait_ready(wanted, deadline)
    }

    /// Before a sleep on its descriptor together with others: that is readable once something has changed. The program looks at [`Stream::ready`]
    /// once more after this. To be given back with [`Stream::disarm`].
    pub fn arm(&self) -> Heard {
        let heard = self.0.bell.arm();
        self.0.conn.leave_it();
        heard
    }

    /// After a sleep.
    pub fn disarm(&self, heard: Heard) {
        self.0.bell.disarm(heard);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.bell.as_fd()
    }
}
