//! The pipeline of `weft cp` over a plain TCP stream, without RDMA: what `weft demo` compares with.
//!
//! Messages follow each other on the stream; the header's length frames them, and a BLOCK or PACK is followed by
//! its bytes. TCP's own flow control does what credits do over RDMA.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};

use weft_verbs::Path;

use super::link::{Link, LinkError};
use super::protocol::{HEADER_LEN, HELLO_LEN, Message, RingAdvert};

/// A connection over plain TCP.
pub struct TcpLink {
    stream: TcpStream,
    send: Mutex<Vec<u8>>,
    ring: OnceLock<Vec<Mutex<Box<[u8]>>>>,
    /// How long a peer may stay silent in the middle of a message.
    patience: Duration,
}

impl TcpLink {
    /// Takes a connected stream over.
    pub fn new(stream: TcpStream, patience: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Self {
            stream,
            send: Mutex::default(),
            ring: OnceLock::new(),
            patience,
        })
    }

    /// Sends this side's hello; over RDMA it is private data of the start-up frames.
    pub fn send_hello(&self, hello: &[u8; HELLO_LEN]) -> Result<(), LinkError> {
        (&self.stream).write_all(hello).map_err(gone)
    }

    /// The peer's hello, which has to be there, all of it, within `patience`.
    pub fn recv_hello(&self, patience: Duration) -> Result<[u8; HELLO_LEN], LinkError> {
        let mut out = [0; HELLO_LEN];
        self.read_by(&mut out, Instant::now() + patience)?;
        Ok(out)
    }

    fn read_by(&self, mut rest: &mut [u8], end: Instant) -> Result<(), LinkError> {
        while !rest.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(gone(io::ErrorKind::TimedOut.into()));
            }
            self.stream.set_read_timeout(Some(left)).map_err(gone)?;
            match (&self.stream).read(rest) {
                Ok(0) => return Err(gone(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => rest = &mut rest[n..],
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(gone(e)),
            }
        }
        Ok(())
    }

    fn make(&self, slots: u16, slot_len: u32) {
        self.ring.get_or_init(|| {
            (0..slots)
                .map(|_| Mutex::new(vec![0; slot_len as usize].into_boxed_slice()))
                .collect()
        });
    }

    fn slot(&self, slot: u16) -> MutexGuard<'_, Box<[u8]>> {
        let ring = self
            .ring
            .get()
            .expect("the ring is made before slots are used");
        ring[usize::from(slot)]
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn sender(&self) -> MutexGuard<'_, Vec<u8>> {
        self.send
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "the shape that map_err wants"
)]
fn gone(e: io::Error) -> LinkError {
    LinkError::Gone(match e.kind() {
        io::ErrorKind::UnexpectedEof => "the peer closed it".into(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "the peer stopped answering".into(),
        _ => e.to_string(),
    })
}

impl Link for TcpLink {
    fn path(&self) -> Path {
        Path {
            transport: "plain-tcp",
            reason: None,
        }
    }

    fn binding(&self) -> [u8; 32] {
        [0; 32]
    }

    fn cipher(&self) -> Option<&'static str> {
        None
    }

    fn receives(&self) -> u16 {
        4096
    }

    fn set_peer_receives(&self, _receives: u16) {}

    fn create_ring(&self, slots: u16, slot_len: u32) -> Result<RingAdvert, LinkError> {
        self.make(slots, slot_len);
        Ok(RingAdvert {
            slots,
            slot_len,
            rkey: 0,
            addr: 0,
        })
    }

    fn use_ring(&self, ring: RingAdvert) -> Result<(), LinkError> {
        self.make(ring.slots, ring.slot_len);
        Ok(())
    }

    fn send(&self, message: &Message) -> Result<(), LinkError> {
        let mut buf = self.sender();
        buf.clear();
        message.encode(0, &mut buf);
        (&self.stream).write_all(&buf).map_err(gone)
    }

    fn push(&self, slot: u16, len: u32, message: &Message) -> Result<(), LinkError> {
        let mut buf = self.sender();
        buf.clear();
        message.encode(0, &mut buf);
        (&self.stream).write_all(&buf).map_err(gone)?;
        (&self.stream)
            .write_all(&self.slot(slot)[..len as usize])
            .map_err(gone)
    }

    fn write(&self, _slot: u16, _at: u32, _len: u32) -> Result<(), LinkError> {
        // The bytes of a slot follow its message here.
        Err(LinkError::Local("a plain stream has no Writes".into()))
    }

    fn keepalive(&self) -> Result<(), LinkError> {
        // A sender that holds the lock is busy sending, which is a sign of life in itself.
        if self.send.try_lock().is_ok() {
            self.send(&Message::Credit)
        } else {
            Ok(())
        }
    }

    fn recv(&self, timeout: Duration) -> Result<Option<Message>, LinkError> {
        let mut stream = &self.stream;
        stream
            .set_read_timeout(Some(timeout.max(Duration::from_millis(1))))
            .map_err(gone)?;
        let mut header = [0; HEADER_LEN];
        let got = loop {
            match stream.read(&mut header) {
                Ok(0) => return Err(LinkError::Gone("the peer closed it".into())),
                Ok(n) => break n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e)
                    if matches!(
                        e.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                    ) =>
                {
                    return Ok(None);
                }
                Err(e) => return Err(gone(e)),
            }
        };
        let end = Instant::now() + self.patience;
        self.read_by(&mut header[got..], end)?;
        let violation = |e: super::protocol::DecodeError| LinkError::Violation(e.to_string());
        let len = Message::length(header).map_err(violation)?;
        let mut bytes = vec![0; len];
        bytes[..HEADER_LEN].copy_from_slice(&header);
        self.read_by(&mut bytes[HEADER_LEN..], end)?;
        let (_, message) = Message::decode(&bytes).map_err(violation)?;
        if let Some((slot, len)) = message.filled() {
            let ring = self.ring.get().map_or(0, Vec::len);
            if usize::from(slot) >= ring || len as usize > self.slot(slot).len() {
                return Err(LinkError::Violation("a block outside the ring".into()));
            }
            stream.set_read_timeout(Some(self.patience)).map_err(gone)?;
            stream
                .read_exact(&mut self.slot(slot)[..len as usize])
                .map_err(gone)?;
        }
        Ok(Some(message))
    }

    fn slot_from_file(
        &self,
        slot: u16,
        at: u32,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u32,
    ) -> io::Result<usize> {
        let at = at as usize;
        Ok(rustix::io::pread(
            file,
            &mut self.slot(slot)[at..at + len as usize],
            offset,
        )?)
    }

    fn slot_from_buf(&self, slot: u16, at: u32, bytes: &[u8]) -> io::Result<()> {
        let at = at as usize;
        self.slot(slot)[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn slot_to_buf(&self, slot: u16, at: u32, into: &mut [u8]) -> io::Result<()> {
        let at = at as usize;
        into.copy_from_slice(&self.slot(slot)[at..at + into.len()]);
        Ok(())
    }

    fn close(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
