//! TLS 1.3 over TCP: the whole byte stream of a connection, MPA start-up included, is one TLS connection.
//!
//! Sent bytes are copied once, into the buffer in which they are encrypted; received bytes are copied once, out of the buffer in which they were
//! decrypted. A record is checked before any of its bytes is passed on.

use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, OnceLock};

use weft_mem::{RecvList, SendList};
use weft_sys::Interest;
use weft_tls::{RECORD_PLAIN, Session, TlsError, TlsInfo};

use super::tcp::TcpLink;
use super::{ByteStream, Received};
use crate::lock::lock;

/// Plaintext that is encrypted before it is handed to the socket. Half as much costs the receiver a twentieth more CPU time (more and
/// smaller calls); more than this leaves the cache before it is sent.
const BATCH: usize = 16 * RECORD_PLAIN;
/// Ciphertext that one call reads, at least: a record.
const MIN_READ: usize = RECORD_PLAIN + 1024;
/// Ciphertext that one call reads, at most.
const MAX_READ: usize = 256 * 1024;
/// Calls that read one after another without any data.
const MAX_READS: u32 = 8;

/// A TLS connection over a connected TCP socket.
pub(crate) struct TlsLink {
    tcp: TcpLink,
    state: Mutex<State>,
    info: OnceLock<TlsInfo>,
    /// The reason why nothing more can be received.
    broken: OnceLock<TlsError>,
}

struct State {
    session: Session,
    /// Ciphertext that was received and not decrypted: `incoming[start..end]`.
    incoming: Vec<u8>,
    start: usize,
    end: usize,
    /// Plaintext that was not taken: `plain[taken..]`.
    plain: Vec<u8>,
    taken: usize,
    /// Ciphertext that the socket has not taken: `outgoing[sent..]`.
    outgoing: Vec<u8>,
    sent: usize,
    /// Plaintext in `outgoing` that was not yet reported to the sender as sent. The sender offers the same bytes again, as for every
    /// partial send, and gets the report once they are sent.
    owed: usize,
    /// Our direction has to be closed once `outgoing` is sent.
    closing: bool,
}

impl TlsLink {
    pub(crate) fn new(tcp: TcpLink, session: Session) -> Self {
        TlsLink {
            tcp,
            state: Mutex::new(State {
                session,
                incoming: Vec::new(),
                start: 0,
                end: 0,
                plain: Vec::new(),
                taken: 0,
                outgoing: Vec::new(),
                sent: 0,
                owed: 0,
                closing: false,
            }),
            info: OnceLock::new(),
            broken: OnceLock::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Continues the handshake. `Ok(false)`: it has to wait, see [`ByteStream::watch`].
    pub(crate) fn handshake(&self) -> io::Result<bool> {
        let mut state = self.state();
        loop {
            // The peer's word first: it may be why nothing can be sent.
            let read = state.decrypt(None).and_then(|()| {
                self.flush(&mut state)?;
                Ok(())
            });
            if let Err(error) = read {
                let _ = self.flush(&mut state);
                return Err(error);
            }
            if let Some(info) = state.session.info() {
                let _ = self.info.set(info.clone());
                return Ok(state.outgoing.is_empty());
            }
            match self.read(&mut state) {
                Ok(0) => return Err(failed(TlsError::ClosedInHandshake)),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(failed(TlsError::ClosedInHandshake));
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn note(&self, error: &io::Error) {
        if let Some(error) = error.get_ref().and_then(|e| e.downcast_ref::<TlsError>()) {
            let _ = self.broken.set(error.clone());
        }
    }

    /// Hands ciphertext to the socket. `Ok(true)`: all of it is out.
    fn flush(&self, state: &mut State) -> io::Result<bool> {
        while state.sent < state.outgoing.len() {
            let mut list = SendList::new();
            list.push_bytes(&state.outgoing[state.sent..]);
            match self.tcp.send(&list) {
                Ok(n) => state.sent += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        state.outgoing.clear();
        state.sent = 0;
        if state.closing {
            state.closing = false;
            self.tcp.shutdown_write();
        }
        Ok(true)
    }

    /// Reads ciphertext: one system call.
    fn read(&self, state: &mut State) -> io::Result<usize> {
        let State {
            incoming,
            start,
            end,
            ..
        } = state;
        incoming.copy_within(*start..*end, 0);
        *end -= *start;
        *start = 0;
        if incoming.len() < MIN_READ {
            incoming.resize(MIN_READ, 0);
        }
        if *end == incoming.len() {
            return Err(failed(TlsError::Protocol("a message is too long".into())));
        }
        let mut list = RecvList::new();
        list.push_buf(&mut incoming[*end..]);
        let n = list.recv(self.tcp.fd())?;
        *end += n;
        if *end == incoming.len() && *end < MAX_READ {
            incoming.resize(MAX_READ.min(2 * *end), 0);
        }
        Ok(n)
    }
}

impl State {
    /// Decrypts the bytes read, into `to` if given; the rest is kept.
    fn decrypt(&mut self, to: Option<(&mut RecvList<'_>, &mut usize)>) -> io::Result<()> {
        let State {
            session,
            incoming,
            start,
            end,
            plain,
            outgoing,
            ..
        } = self;
        let (mut list, mut none) = (None, 0);
        let filled = match to {
            Some((to, filled)) => {
                list = Some(to);
                filled
            }
            None => &mut none,
        };
        let mut take = |bytes: &[u8]| {
            let n = list.as_mut().map_or(0, |list| list.fill_at(*filled, bytes));
            *filled += n;
            plain.extend_from_slice(&bytes[n..]);
            plain.is_empty() && list.as_ref().is_some_and(|list| *filled < list.len_bytes())
        };
        *start += session
            .receive(&mut incoming[*start..*end], &mut take, outgoing)
            .map_err(failed)?;
        Ok(())
    }

    /// There is plaintext, or a record that may hold some.
    fn is_ready(&self) -> bool {
        self.taken < self.plain.len() || Session::has_record(&self.incoming[self.start..self.end])
    }

    /// Gives back what bulk transfer took.
    fn rest(&mut self) {
        if self.start == self.end && self.incoming.len() > MIN_READ {
            (self.start, self.end) = (0, 0);
            self.incoming = Vec::new();
        }
        if self.outgoing.is_empty() && self.outgoing.capacity() > MIN_READ {
            self.outgoing = Vec::new();
        }
        if self.plain.is_empty() && self.plain.capacity() > MIN_READ {
            self.plain = Vec::new();
        }
    }
}

fn failed(error: TlsError) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl ByteStream for TlsLink {
    fn send(&self, list: &SendList<'_>) -> io::Result<usize> {
        let mut state = self.state();
        let state = &mut *state;
        if !self.flush(state)? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let total = list.len_bytes();
        let mut done = state.owed.min(total);
        state.owed -= done;
        while done < total {
            let mut batch = 0;
            while done + batch < total && batch < BATCH {
                batch += state
                    .session
                    .seal(&mut state.outgoing, |out| {
                        list.copy_range(done + batch, out, RECORD_PLAIN);
                    })
                    .map_err(failed)?;
            }
            if !self.flush(state)? {
                state.owed = batch;
                break;
            }
            done += batch;
        }
        if done == 0 && total > 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(done)
    }

    fn recv(&self, list: &mut RecvList<'_>) -> io::Result<Received> {
        let mut state = self.state();
        let state = &mut *state;
        if !state.outgoing.is_empty() {
            // The sender gets this error; received data can still be read.
            let _ = self.flush(state);
        }
        let mut filled = list.fill_at(0, &state.plain[state.taken..]);
        state.taken += filled;
        if state.taken == state.plain.len() {
            state.plain.clear();
            state.taken = 0;
        }
        let room = list.len_bytes();
        let mut drained = false;
        // A peer may send any number of records without data, but other connections need their turn.
        let mut reads = 0;
        while filled < room {
            let outcome = state.decrypt(Some((&mut *list, &mut filled)));
            if outcome.is_err() || !state.outgoing.is_empty() {
                // An answer, or why this is the end.
                let _ = self.flush(state);
            }
            outcome.inspect_err(|error| self.note(error))?;
            if filled > 0 || state.session.peer_closed() {
                break;
            }
            reads += 1;
            if reads > MAX_READS {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let space = state.incoming.len().max(MIN_READ) - (state.end - state.start);
            let n = self.read(state)?;
            if n == 0 {
                let error = failed(TlsError::Truncated);
                self.note(&error);
                return Err(error);
            }
            drained = n < space;
        }
        Ok(Received {
            n: filled,
            drained: drained && !state.is_ready(),
        })
    }

    fn tls_error(&self) -> Option<TlsError> {
        self.broken.get().cloned()
    }

    fn pause(&self) -> bool {
        self.tcp.pause()
    }

    fn is_closed_behind(&self) -> bool {
        self.tcp.is_closed_behind()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.tcp.fd()
    }

    fn watch(&self, interest: Interest) -> Option<Interest> {
        let mut state = self.state();
        if interest.contains(Interest::READ) && state.is_ready() {
            return None;
        }
        state.rest();
        let pending = !state.outgoing.is_empty();
        Some(if pending {
            interest | Interest::WRITE
        } else {
            interest
        })
    }

    fn shutdown_write(&self) {
        let mut state = self.state();
        let state = &mut *state;
        state.session.close(&mut state.outgoing);
        state.closing = true;
        if self.flush(state).is_err() {
            self.tcp.shutdown_write();
        }
    }

    fn abort(&self) {
        self.tcp.abort();
    }

    fn cut(&self) {
        self.tcp.cut();
    }

    fn local_addr(&self) -> SocketAddr {
        self.tcp.local_addr()
    }

    fn peer_addr(&self) -> SocketAddr {
        self.tcp.peer_addr()
    }

    fn name(&self) -> &'static str {
        "tls"
    }

    fn max_fpdu(&self) -> Option<u32> {
        // Records, not FPDUs, are what segments of TCP hold.
        None
    }

    fn cipher(&self) -> Option<&'static str> {
        self.info.get().map(|info| info.cipher)
    }

    fn tls(&self) -> Option<&TlsInfo> {
        self.info.get()
    }
}
