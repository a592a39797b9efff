//! Plain TCP, as efficient as possible with one socket and blocking calls (or a spinning receiver).

use super::{Initiator, Kind, Patience, Responder, Spec, lap};
use crate::error::{BenchError, Result};
use crate::patience::PATIENCE;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;

/// The receiver of small messages reads many of them in one call.
const BIG_READ: usize = 64 << 10;
/// The request of a pulling initiator: as large as an RDMA Read Request's address and length.
const REQUEST: usize = 16;

pub(super) fn listen() -> Result<TcpListener> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(BenchError::system("listen"))
}

pub(super) fn connect(spec: &Spec, addr: SocketAddr) -> Result<Box<dyn Initiator>> {
    let stream = open(addr)?;
    set_mode(&stream, spec)?;
    Ok(Box::new(End::new(stream, spec)?))
}

pub(super) fn accept(listener: &TcpListener, spec: &Spec) -> Result<Box<dyn Responder>> {
    let stream = take(listener)?;
    set_mode(&stream, spec)?;
    Ok(Box::new(End::new(stream, spec)?))
}

/// A connected socket, which blocks.
pub(super) fn open(addr: SocketAddr) -> Result<TcpStream> {
    let stream = TcpStream::connect(addr).map_err(BenchError::system("connect"))?;
    prepare_stream(&stream)?;
    Ok(stream)
}

/// The next connection's socket, which blocks.
pub(super) fn take(listener: &TcpListener) -> Result<TcpStream> {
    let (stream, _) = listener.accept().map_err(BenchError::system("accept"))?;
    prepare_stream(&stream)?;
    Ok(stream)
}

/// Makes the socket blocking or not, as `spec` requires.
pub(super) fn set_mode(stream: &TcpStream, spec: &Spec) -> Result<()> {
    stream
        .set_nonblocking(spec.busy)
        .map_err(BenchError::system("set a socket's mode"))
}

/// One end of a connection: a socket, or a layer on a socket.
pub(super) struct End<S> {
    stream: S,
    spec: Spec,
    /// The message, sent from and received to: touched before the clock starts.
    buffer: Vec<u8>,
}

impl<S: Read + Write> End<S> {
    /// `stream` must be non-blocking if the ends of `spec` spin.
    pub(super) fn new(stream: S, spec: &Spec) -> Result<Self> {
        let len = match spec.kind {
            Kind::Stream => spec.len()?.max(BIG_READ),
            Kind::PingPong => spec.len()?.max(REQUEST),
        };
        Ok(Self {
            stream,
            spec: *spec,
            buffer: vec![0x5a; len],
        })
    }

    fn message(&self) -> usize {
        self.spec.bytes as usize
    }

    fn write(&mut self, len: usize) -> Result<()> {
        let mut patience = Patience::new();
        let mut done = 0;
        loop {
            let step = if done < len {
                self.stream.write(&self.buffer[done..len])
            } else {
                // Data that TLS still holds; a bare socket holds none.
                self.stream.flush().map(|()| 1)
            };
            match step {
                Ok(0) => return Err(BenchError::PeerGone("connection closed".to_owned())),
                Ok(_) if done == len => return Ok(()),
                Ok(count) => done += count,
                Err(error) if self.spec.busy && error.kind() == ErrorKind::WouldBlock => {
                    patience.spin("a socket with room")?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(BenchError::system("write to a socket")(error)),
            }
        }
    }

    /// Reads at least one byte into `buffer[from..to]`.
    fn read_some(&mut self, from: usize, to: usize) -> Result<usize> {
        let mut patience = Patience::new();
        loop {
            match self.stream.read(&mut self.buffer[from..to]) {
                Ok(0) => return Err(BenchError::PeerGone("connection closed".to_owned())),
                Ok(count) => return Ok(count),
                Err(error) if self.spec.busy && error.kind() == ErrorKind::WouldBlock => {
                    patience.spin("data on a socket")?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(BenchError::system("read from a socket")(error)),
            }
        }
    }

    fn read(&mut self, len: usize) -> Result<()> {
        let mut done = 0;
        while done < len {
            done += self.read_some(done, len)?;
        }
        Ok(())
    }

    fn write_all_messages(&mut self, count: u64) -> Result<()> {
        for _ in 0..count {
            self.write(self.message())?;
        }
        Ok(())
    }

    /// Receives the bytes of `count` messages, message after message into the same buffer; small ones many at a time.
    fn read_all_messages(&mut self, count: u64) -> Result<()> {
        let size = self.buffer.len();
        let mut left = count.saturating_mul(self.spec.bytes);
        let mut at = 0;
        while left > 0 {
            let room = (size - at).min(usize::try_from(left).unwrap_or(usize::MAX));
            let got = self.read_some(at, at + room)?;
            left -= got as u64;
            at = (at + got) % size;
        }
        Ok(())
    }
}

impl<S: Read + Write> Initiator for End<S> {
    fn drive(&mut self, count: u64, laps: &mut Vec<f64>) -> Result<()> {
        let pulls = self.spec.op.pulls();
        match (self.spec.kind, pulls) {
            (Kind::Stream, false) => {
                self.write_all_messages(count)?;
                self.read(1)
            }
            (Kind::Stream, true) => {
                self.write(1)?;
                self.read_all_messages(count)
            }
            (Kind::PingPong, _) => {
                let request = if pulls { REQUEST } else { self.message() };
                let share = if pulls { 1.0 } else { 0.5 };
                let mut start = Instant::now();
                for _ in 0..count {
                    self.write(request)?;
                    self.read(self.message())?;
                    laps.push(lap(&mut start) * share);
                }
                Ok(())
            }
        }
    }
}

impl<S: Read + Write> Responder for End<S> {
    fn serve(&mut self, count: u64) -> Result<()> {
        let pulls = self.spec.op.pulls();
        match (self.spec.kind, pulls) {
            (Kind::Stream, false) => {
                self.read_all_messages(count)?;
                self.write(1)
            }
            (Kind::Stream, true) => {
                self.read(1)?;
                self.write_all_messages(count)
            }
            (Kind::PingPong, _) => {
                let request = if pulls { REQUEST } else { self.message() };
                for _ in 0..count {
                    self.read(request)?;
                    self.write(self.message())?;
                }
                Ok(())
            }
        }
    }
}

/// One transfer of a connection's short life: all of `buffer` one way, one byte back.
pub fn transfer_whole(mut stream: &TcpStream, buffer: &mut [u8], push: bool) -> Result<()> {
    prepare_stream(stream)?;
    let done = if push {
        stream
            .write_all(buffer)
            .and_then(|()| stream.read_exact(&mut [0]))
    } else {
        stream
            .read_exact(buffer)
            .and_then(|()| stream.write_all(&[1]))
    };
    done.map_err(BenchError::system("transfer over a socket"))
}

pub fn prepare_stream(stream: &TcpStream) -> Result<()> {
    stream
        .set_nodelay(true)
        .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
        .and_then(|()| stream.set_write_timeout(Some(PATIENCE)))
        .map_err(BenchError::system("set a socket's options"))
}

#[cfg(test)]
mod tests {
    use super::super::{Op, Stack};
    use super::*;

    fn both_ends(op: Op, kind: Kind, busy: bool, bytes: u64, count: u64) -> Vec<f64> {
        let spec = Spec {
            stack: Stack::Tcp,
            op,
            kind,
            bytes,
            busy,
            ..Spec::BASE
        };
        let listener = listen().unwrap();
        let addr = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            let mut end = accept(&listener, &spec).unwrap();
            end.serve(count).unwrap();
            end.serve(count).unwrap();
        });
        let mut end = connect(&spec, addr).unwrap();
        let mut laps = Vec::new();
        end.drive(count, &mut laps).unwrap();
        end.drive(count, &mut laps).unwrap();
        server.join().unwrap();
        laps
    }

    #[test]
    fn every_kind_ends_where_it_began() {
        for op in [Op::Send, Op::Read] {
            for bytes in [1, 1000, 100_000] {
                assert!(both_ends(op, Kind::Stream, false, bytes, 50).is_empty());
                for busy in [false, true] {
                    let laps = both_ends(op, Kind::PingPong, busy, bytes, 20);
                    assert_eq!(laps.len(), 40);
                    assert!(laps.iter().all(|lap| *lap > 0.0));
                }
            }
        }
    }
}
