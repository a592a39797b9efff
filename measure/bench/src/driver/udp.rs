//! Bare UDP: sendmmsg with `UDP_SEGMENT` and recvmmsg with `UDP_GRO`, no headers, no CRC, one copy into the message's buffer.
//!
//! The receiver acknowledges bytes, so that the sender does not overrun it; lost messages are sent again, as with weft's.

use super::{Initiator, Kind, Responder, Spec, Stack, lap};
use crate::error::{BenchError, Result};
use crate::patience::PATIENCE;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use weft_sys::udp::{PLACES, RecvBatch, TRAIN, UdpSocket};
use weft_sys::{Interest, poll_fds};

/// The longest datagram; longer messages are several.
const LONGEST: usize = 65_408;
const TRAIN_BYTES: usize = 65_000;
const ROOM: usize = 4 << 20;
/// Bytes in flight at most; each datagram counts for [`OVERHEAD`] more. The receiver acknowledges after each quarter of it.
const WINDOW: u64 = 1 << 20;
const OVERHEAD: u64 = 1280;
const AGAIN: Duration = Duration::from_millis(50);
/// Notes are longer than any data of their first byte's value.
const NOTE: usize = 19;
const MARK: u8 = 0xa5;
const HELLO: u8 = 1;
const END: u8 = 2;
const COUNT: u8 = 3;
const TAKEN: u8 = 4;

pub struct Listening {
    socket: UdpSocket,
    spec: Spec,
}

struct End {
    socket: UdpSocket,
    spec: Spec,
    len: usize,
    peer: SocketAddr,
    /// The messages of one system call.
    source: Vec<u8>,
    target: Vec<u8>,
    batch: RecvBatch,
    /// Bytes sent, acknowledged, and considered lost.
    sent: u64,
    taken: u64,
    lost: u64,
    /// Bytes received, and acknowledged.
    got: u64,
    told: u64,
    question: u64,
    /// [`WINDOW`], or what the receiver's socket has room for: both ends have the same system.
    window: u64,
}

/// The kind of a note, its number and its sender.
type Note = (u8, u64, SocketAddr);

pub(super) fn listen(spec: &Spec) -> Result<Listening> {
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let socket = UdpSocket::bind(addr, ROOM).map_err(BenchError::system("bind a UDP port"))?;
    if spec.stack == Stack::Udp {
        socket.receive_trains();
    }
    Ok(Listening {
        socket,
        spec: *spec,
    })
}

impl Listening {
    pub(super) fn addr(&self) -> Result<SocketAddr> {
        let addr = self.socket.local_addr();
        addr.map_err(BenchError::system("read a socket's address"))
    }

    fn end(self, peer: SocketAddr) -> Result<End> {
        let len = self.spec.len()?.max(1);
        let single = self.spec.stack == Stack::UdpSingle;
        let copies = if len > TRAIN_BYTES || single {
            1
        } else {
            (TRAIN_BYTES / len).min(TRAIN)
        };
        let room = self.socket.receive_room();
        let room = room.map_err(BenchError::system("read a socket's buffer size"))? as u64;
        Ok(End {
            window: WINDOW.min(room / 2),
            socket: self.socket,
            spec: self.spec,
            len,
            peer,
            source: vec![0x5a; len * copies],
            target: vec![0; len],
            batch: RecvBatch::new(if single { 1 } else { PLACES }, 0, 1 << 16),
            sent: 0,
            taken: 0,
            lost: 0,
            got: 0,
            told: 0,
            question: 0,
        })
    }

    pub(super) fn accept(self) -> Result<Box<dyn Responder>> {
        let mut end = self.end(SocketAddr::from((Ipv4Addr::LOCALHOST, 1)))?;
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            let (_, note) = end.receive(AGAIN)?;
            if let Some((HELLO, _, from)) = note {
                end.peer = from;
                end.note(HELLO, 0)?;
                return Ok(Box::new(end));
            }
        }
        Err(BenchError::Stuck(PATIENCE.as_secs(), "the peer's datagram"))
    }
}

pub(super) fn connect(spec: &Spec, addr: SocketAddr) -> Result<Box<dyn Initiator>> {
    let mut end = listen(spec)?.end(addr)?;
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        end.note(HELLO, 0)?;
        if let (_, Some((HELLO, ..))) = end.receive(AGAIN)? {
            return Ok(Box::new(end));
        }
    }
    Err(BenchError::Stuck(PATIENCE.as_secs(), "the peer's datagram"))
}

impl End {
    fn note(&self, what: u8, number: u64) -> Result<()> {
        let mut raw = [MARK; NOTE];
        raw[1] = what;
        raw[2..10].copy_from_slice(&number.to_be_bytes());
        match self.socket.send(&raw, self.peer, None) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => {
                Err(BenchError::system("send a datagram")(error))
            }
            _ => Ok(()),
        }
    }

    /// Receives what is there, or arrives within the time: bytes of messages, and the last note.
    fn receive(&mut self, limit: Duration) -> Result<(u64, Option<Note>)> {
        let start = Instant::now();
        let spin = self.spec.busy || self.spec.kind == Kind::Stream;
        loop {
            match self.socket.recv_batch(&mut self.batch) {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(BenchError::system("receive datagrams")(error)),
            }
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok((0, None));
            }
            if spin {
                // The peer may be waiting for this core.
                std::thread::yield_now();
            } else {
                let _ = poll_fds(&[(self.socket.as_fd(), Interest::READ)], Some(left));
            }
        }
        let (mut bytes, mut note) = (0, None);
        for at in 0..self.batch.len() {
            let Some((train, buffer)) = self.batch.get(at) else {
                continue;
            };
            for datagram in buffer.chunks(train.each.max(1)) {
                if datagram.len() == NOTE && datagram.iter().skip(10).all(|b| *b == MARK) {
                    let number = datagram[2..].first_chunk().map(|n| u64::from_be_bytes(*n));
                    let number = number.unwrap_or(0);
                    if datagram[1] == TAKEN {
                        self.taken = self.taken.max(number);
                    }
                    note = Some((datagram[1], number, train.arrival.from));
                } else {
                    let n = datagram.len().min(self.target.len());
                    self.target[..n].copy_from_slice(&datagram[..n]);
                    bytes += n as u64;
                    self.got += n as u64 + OVERHEAD;
                }
            }
        }
        if self.got - self.told >= self.window / 4 {
            self.told = self.got;
            self.note(TAKEN, self.got)?;
        }
        Ok((bytes, note))
    }

    /// Sends consecutive messages, as far as the receiver has room for them.
    fn send(&mut self, mut messages: u64) -> Result<()> {
        while messages > 0 {
            let now = (self.source.len() / self.len).min(messages as usize);
            let each = self.len.min(LONGEST);
            let parts = self.len.div_ceil(each) * now;
            let bytes = now * self.len;
            let cost = bytes as u64 + parts as u64 * OVERHEAD;
            let start = Instant::now();
            while self.flight() > 0 && self.flight() + cost > self.window {
                self.receive(Duration::ZERO)?;
                if start.elapsed() > AGAIN {
                    self.settle();
                }
            }
            let mut at = 0;
            while at < bytes {
                let rest = &self.source[at..bytes];
                match self.socket.send_train(rest, each, self.peer, None, 0) {
                    Ok(n) => at += n,
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(BenchError::system("send datagrams")(error)),
                }
            }
            self.sent += cost;
            messages -= now as u64;
        }
        Ok(())
    }

    /// Bytes in flight.
    fn flight(&self) -> u64 {
        self.sent.saturating_sub(self.taken + self.lost)
    }

    /// Counts all bytes in flight as lost.
    fn settle(&mut self) {
        self.lost = self.sent.saturating_sub(self.taken);
    }

    fn message(&mut self) -> Result<()> {
        let start = Instant::now();
        let mut got = 0;
        while got < self.len as u64 {
            got += self.receive(AGAIN)?.0;
            if start.elapsed() > PATIENCE {
                return Err(BenchError::Stuck(PATIENCE.as_secs(), "a datagram"));
            }
        }
        Ok(())
    }

    fn stream(&mut self, count: u64) -> Result<()> {
        let mut left = count;
        while left > 0 {
            self.send(left)?;
            self.question += 1;
            let start = Instant::now();
            left = loop {
                self.note(END, self.question)?;
                let asked = Instant::now();
                let mut answer = None;
                while answer.is_none() && asked.elapsed() < AGAIN {
                    if let (_, Some((COUNT, n, _))) = self.receive(AGAIN)?
                        && n >> 32 == self.question
                    {
                        answer = Some(n & 0xffff_ffff);
                    }
                }
                if let Some(missing) = answer {
                    // Bytes that the receiver has not acknowledged by now were lost.
                    self.settle();
                    break missing;
                }
                if start.elapsed() > PATIENCE {
                    return Err(BenchError::Stuck(PATIENCE.as_secs(), "an answer"));
                }
            };
        }
        Ok(())
    }

    fn serve_stream(&mut self, count: u64) -> Result<()> {
        let wanted = count * self.len as u64;
        let (mut got, start) = (0, Instant::now());
        let mut last = start;
        loop {
            let (bytes, note) = self.receive(AGAIN)?;
            got += bytes;
            if bytes > 0 {
                last = Instant::now();
            } else if last.elapsed() > PATIENCE {
                return Err(BenchError::Stuck(PATIENCE.as_secs(), "datagrams"));
            }
            if let Some((END, question, _)) = note {
                let missing = wanted.saturating_sub(got).div_ceil(self.len as u64);
                self.told = self.got;
                self.note(TAKEN, self.got)?;
                for _ in 0..if missing == 0 { 3 } else { 1 } {
                    self.note(COUNT, question << 32 | missing)?;
                }
                if missing == 0 {
                    return Ok(());
                }
            }
        }
    }
}

impl Initiator for End {
    fn drive(&mut self, count: u64, laps: &mut Vec<f64>) -> Result<()> {
        if self.spec.kind == Kind::Stream {
            return self.stream(count);
        }
        let mut start = Instant::now();
        for _ in 0..count {
            self.send(1)?;
            self.message()?;
            laps.push(lap(&mut start) / 2.0);
        }
        Ok(())
    }
}

impl Responder for End {
    fn serve(&mut self, count: u64) -> Result<()> {
        if self.spec.kind == Kind::Stream {
            return self.serve_stream(count);
        }
        for _ in 0..count {
            self.message()?;
            self.send(1)?;
        }
        Ok(())
    }
}
