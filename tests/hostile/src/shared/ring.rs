//! The rings of a segment, from one side.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::shared::unix_socket::UnixSocket;

/// Words of a side's part of the control page, as offsets from its beginning.
pub mod word {
    pub const HEAD: u64 = 0;
    pub const END: u64 = 128;
    pub const WANT_DATA: u64 = 256;
    pub const WANT_ROOM: u64 = 384;
    pub const MARK: u64 = 512;
    pub const DOORS: u64 = 640;
    pub const CAPS: u64 = 768;
}

/// A record of bytes.
pub const BYTES: u32 = 1;
/// A record that refers to memory of the sender's.
pub const REFERENCE: u32 = 2;

/// Our side of a connection in shared memory.
#[derive(Debug)]
pub struct Ring {
    pub segment: File,
    /// The socket of the meeting: wake-ups.
    pub socket: UnixSocket,
    /// Bytes of a ring.
    pub len: u64,
    /// Where our words are, and the other side's.
    pub words: (u64, u64),
    rings: (u64, u64),
    /// How far we have pushed, and consumed.
    pub at: (u64, u64),
    /// What is left of the record that is being consumed.
    left: u64,
    /// Files of the other side: liveness, table, arenas.
    pub theirs: Vec<OwnedFd>,
}

impl Ring {
    /// Of the initiator, or of the responder.
    pub fn new(
        segment: File,
        socket: UnixSocket,
        len: u32,
        initiator: bool,
        theirs: Vec<OwnedFd>,
    ) -> Ring {
        let (near, far) = ((128, 4096), (1152, 4096 + u64::from(len)));
        let (us, them) = if initiator { (near, far) } else { (far, near) };
        Ring {
            segment,
            socket,
            len: u64::from(len),
            words: (us.0, them.0),
            rings: (us.1, them.1),
            at: (0, 0),
            left: 0,
            theirs,
        }
    }

    /// Stores a word of ours.
    pub fn store(&self, word: u64, value: u64) -> io::Result<()> {
        self.segment
            .write_all_at(&value.to_ne_bytes(), self.words.0 + word)
    }

    /// Loads a word of theirs.
    pub fn load(&self, word: u64) -> io::Result<u64> {
        self.word(self.words.1 + word)
    }

    fn word(&self, at: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.segment.read_exact_at(&mut bytes, at)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Writes to our ring at a position.
    fn put(&self, position: u64, bytes: &[u8]) -> io::Result<()> {
        let at = position % self.len;
        let first = bytes.len().min((self.len - at) as usize);
        self.segment
            .write_all_at(&bytes[..first], self.rings.0 + at)?;
        self.segment.write_all_at(&bytes[first..], self.rings.0)
    }

    /// Pushes and publishes a record, whatever its header says. Waits for room.
    pub fn record(&mut self, header: u64, body: &[u8]) -> io::Result<()> {
        let needs = 8 + (body.len() as u64).next_multiple_of(8) + 8;
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.at.0 + needs - self.load(word::HEAD)?.min(self.at.0) > self.len {
            if self.load(word::END)? != 0 {
                return Err(ErrorKind::BrokenPipe.into());
            }
            if Instant::now() > deadline {
                return Err(ErrorKind::TimedOut.into());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        let (begin, end) = (self.at.0, self.at.0 + needs - 8);
        self.put(begin + 8, body)?;
        self.put(end, &[0; 8])?;
        self.put(begin, &header.to_ne_bytes())?;
        self.at.0 = end;
        self.wake()
    }

    /// Pushes stream bytes, in records of at most a quarter of the ring.
    pub fn bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        for piece in bytes.chunks((self.len / 4) as usize) {
            self.record(header(BYTES, piece.len() as u32), piece)?;
        }
        Ok(())
    }

    pub fn frame(&mut self, ulpdu: &[u8]) -> io::Result<()> {
        let mut frame = (ulpdu.len() as u32).to_le_bytes().to_vec();
        frame.extend(ulpdu);
        self.bytes(&frame)
    }

    /// Pushes a reference to stream bytes.
    pub fn reference(&mut self, space: u64, addr: u64, len: u64) -> io::Result<()> {
        let mut body = space.to_ne_bytes().to_vec();
        body.extend(addr.to_ne_bytes());
        body.extend(len.to_ne_bytes());
        self.record(header(REFERENCE, 24), &body)
    }

    /// Wakes the other side, whether it sleeps or not.
    pub fn wake(&self) -> io::Result<()> {
        match self.socket.send(&[1], &[]) {
            Err(e) if e.kind() != ErrorKind::WouldBlock => Err(e),
            _ => Ok(()),
        }
    }

    /// Takes up to `most` bytes of the stream, if there are any. What is referred to is taken for zeros.
    pub fn take(&mut self, most: usize) -> io::Result<Vec<u8>> {
        if self.left == 0 {
            let head = self.word(self.rings.1 + self.at.1 % self.len)?;
            if head == 0 {
                return Ok(Vec::new());
            }
            let (len, kind) = (head & 0xffff_ffff, head >> 32);
            if len > self.len || !(1..=2).contains(&kind) {
                // Our own lies have come here.
                return Err(ErrorKind::InvalidInput.into());
            }
            if kind == u64::from(REFERENCE) {
                let mut body = [0; 24];
                self.get(self.at.1 + 8, &mut body)?;
                self.at.1 += 8 + 24;
                self.store(word::HEAD, self.at.1)?;
                self.wake()?;
                let len = u64::from_ne_bytes(body[16..].try_into().expect("eight"));
                return Ok(vec![0; len.min(1 << 20) as usize]);
            }
            self.left = len;
            self.at.1 += 8;
        }
        let n = self.left.min(most as u64);
        let mut bytes = vec![0; n as usize];
        self.get(self.at.1, &mut bytes)?;
        self.at.1 += n;
        self.left -= n;
        if self.left == 0 {
            self.at.1 = self.at.1.next_multiple_of(8);
            self.store(word::HEAD, self.at.1)?;
            self.wake()?;
        }
        Ok(bytes)
    }

    /// Reads their ring at a position.
    fn get(&self, position: u64, bytes: &mut [u8]) -> io::Result<()> {
        let at = position % self.len;
        let first = bytes.len().min((self.len - at) as usize);
        self.segment
            .read_exact_at(&mut bytes[..first], self.rings.1 + at)?;
        self.segment
            .read_exact_at(&mut bytes[first..], self.rings.1)
    }

    /// Whether the other side says that it has ended, or has closed the socket.
    pub fn is_over(&self) -> bool {
        if self.load(word::END).unwrap_or(2) != 0 {
            return true;
        }
        loop {
            match self.socket.packet(Duration::ZERO) {
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(e) => return e.kind() != ErrorKind::TimedOut,
            }
        }
    }
}

/// A record's header.
pub fn header(kind: u32, len: u32) -> u64 {
    u64::from(kind) << 32 | u64::from(len)
}
