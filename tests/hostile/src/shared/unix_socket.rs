//! The Unix socket of a meeting, and what is said on it.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use crate::frames::crc32c;
use crate::rng::Rng;

pub mod kind {
    pub const HELLO: u16 = 1;
    pub const WELCOME: u16 = 2;
    pub const ATTACH: u16 = 3;
    pub const DECLINE: u16 = 4;
    pub const JOIN: u16 = 5;
}

pub const VERSION: u16 = 2;

/// A message: its head and its body.
pub fn message(version: u16, kind: u16, body: &[u8]) -> Vec<u8> {
    let mut out = b"weft".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(kind.to_le_bytes());
    out.extend(body);
    out
}

/// A message that came.
#[derive(Debug)]
pub struct Received {
    pub kind: u16,
    /// What follows the head.
    pub body: Vec<u8>,
    /// What came beside it.
    pub fds: Vec<OwnedFd>,
}

/// The name of a listener's socket.
pub fn name(addr: SocketAddr) -> Vec<u8> {
    format!("weft/1/{}/{}", addr.ip().to_canonical(), addr.port()).into_bytes()
}

/// A socket of the meeting.
#[derive(Debug)]
pub struct UnixSocket(pub OwnedFd);

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

impl UnixSocket {
    /// Connects to the socket of this listener.
    pub fn knock(addr: SocketAddr) -> io::Result<UnixSocket> {
        let socket = socket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(&name(addr))?)?;
        Ok(UnixSocket(socket))
    }

    /// Opens a socket of our own beside a listener.
    pub fn open(addr: SocketAddr) -> io::Result<UnixSocket> {
        let socket = socket()?;
        sockopt::set_socket_passcred(&socket, true)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new_abstract_name(&name(addr))?)?;
        rustix::net::listen(&socket, 64)?;
        Ok(UnixSocket(socket))
    }

    /// The next visitor of our own socket.
    pub fn visitor(&self) -> io::Result<UnixSocket> {
        let flags = SocketFlags::CLOEXEC;
        Ok(UnixSocket(rustix::net::accept_with(&self.0, flags)?))
    }

    /// The process at the other end.
    pub fn process(&self) -> io::Result<u32> {
        let peer = sockopt::socket_peercred(&self.0)?;
        Ok(peer.pid.as_raw_nonzero().get().cast_unsigned())
    }

    /// Sends bytes as one packet, with descriptors.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); 2048];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !beside.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(ErrorKind::InvalidInput.into());
        }
        rustix::net::sendmsg(
            &self.0,
            &[IoSlice::new(bytes)],
            &mut beside,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )?;
        Ok(())
    }

    /// The packet that comes next; `None` at the end.
    pub fn packet(&self, patience: Duration) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
        if !readable(&self.0, patience)? {
            return Err(ErrorKind::TimedOut.into());
        }
        let mut bytes = vec![0; 4096];
        let mut space = [MaybeUninit::uninit(); 2048];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let got = rustix::net::recvmsg(
            &self.0,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut beside,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        let mut fds = Vec::new();
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        bytes.truncate(got.bytes);
        Ok((got.bytes > 0).then_some((bytes, fds)))
    }

    /// The message that comes next; wake-ups (packets of one byte) are skipped.
    pub fn message(&self, patience: Duration) -> io::Result<Received> {
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let (bytes, fds) = self.packet(left)?.ok_or(ErrorKind::UnexpectedEof)?;
            if bytes.len() >= 8 && bytes.starts_with(b"weft") {
                return Ok(Received {
                    kind: u16::from_le_bytes([bytes[6], bytes[7]]),
                    body: bytes[8..].to_vec(),
                    fds,
                });
            }
        }
    }
}

/// Whether something can be read within that time.
pub fn readable(fd: &impl AsFd, patience: Duration) -> io::Result<bool> {
    let time = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    Ok(poll(&mut fds, Some(&time))? > 0)
}

/// Our cell: where the other side looks for its challenge and our secret.
#[derive(Debug)]
pub struct Cell {
    memory: &'static [AtomicU8; 32],
    /// The challenge that we send.
    pub challenge: [u8; 16],
    secret: [u8; 16],
}

impl Cell {
    /// A new one. It is never freed: a victim may look at any time.
    pub fn new(rng: &mut Rng) -> Cell {
        let cell = Cell {
            memory: Box::leak(Box::new([const { AtomicU8::new(0) }; 32])),
            challenge: rng.bytes(16).try_into().expect("sixteen"),
            secret: rng.bytes(16).try_into().expect("sixteen"),
        };
        cell.put(16, &cell.secret);
        cell
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        for (cell, byte) in self.memory[at..].iter().zip(bytes) {
            cell.store(*byte, Ordering::SeqCst);
        }
    }

    /// Shows the other side's challenge.
    pub fn show(&self, challenge: &[u8]) {
        self.put(0, challenge);
    }

    /// As messages have it.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = (self.memory.as_ptr() as u64).to_le_bytes().to_vec();
        out.extend(self.challenge);
        out
    }

    /// The body of a Hello for a TCP connection from this address.
    pub fn hello(&self, from: SocketAddr) -> Vec<u8> {
        let mut body = self.bytes();
        body.extend(crc32c(&self.secret).to_le_bytes());
        let ip = match from.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        body.extend(ip.octets());
        body.extend(from.port().to_le_bytes());
        body
    }

    /// What we find in the cell of which a Welcome or a Hello tells: its owner's secret, if it shows our challenge.
    pub fn secret_of(&self, process: u32, told: &[u8]) -> Option<[u8; 16]> {
        let addr = u64::from_le_bytes(told.get(..8)?.try_into().ok()?);
        let found = remember(process, addr, 32).ok()?;
        (found[..16] == self.challenge).then(|| found[16..].try_into().expect("sixteen"))
    }
}

/// Bytes of another process's memory.
pub fn remember(process: u32, addr: u64, len: usize) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    let memory = std::fs::File::open(format!("/proc/{process}/mem"))?;
    let mut bytes = vec![0; len];
    memory.read_exact_at(&mut bytes, addr)?;
    Ok(bytes)
}
