//! One end of a TCP connection, in the hands of an attacker.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::frames::{self, Received, Startup, Tagged, Untagged, fpdu, opcode};
use crate::shared::ring::{Ring, word};

/// A limit that only turns a hang into an error: no victim takes so long over anything that has no limit of its own.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How the victim left a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Not at all, in the time given.
    Open,
    /// In order.
    Closed,
    Reset,
}

/// How a connection ended, seen from here.
#[derive(Clone, Copy, Debug)]
pub struct Ending {
    pub end: End,
    /// What the Terminate said, if there was one: layer, type and code.
    pub terminate: Option<u16>,
    /// How long that took.
    pub took: Duration,
    /// Segments that came meanwhile.
    pub segments: usize,
}

#[derive(Debug)]
pub struct Peer {
    pub tcp: TcpStream,
    /// Shared memory, once the connection has moved there.
    pub ring: Option<Ring>,
    inbox: Vec<u8>,
    /// Sequence numbers of the next message on each untagged queue.
    pub msn: [u32; 4],
}

impl Peer {
    /// Connects, from this address if one is given.
    pub fn connect(addr: SocketAddr, from: Option<Ipv4Addr>) -> io::Result<Peer> {
        let family = if addr.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let socket = rustix::net::socket_with(
            family,
            SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )?;
        if let Some(from) = from {
            rustix::net::bind(&socket, &SocketAddr::new(IpAddr::V4(from), 0))?;
        }
        rustix::net::connect(&socket, &addr)?;
        Peer::of(TcpStream::from(socket))
    }

    /// The next one that dials this listener.
    pub fn accept(listener: &TcpListener) -> io::Result<Peer> {
        Peer::of(listener.accept()?.0)
    }

    fn of(tcp: TcpStream) -> io::Result<Peer> {
        tcp.set_nodelay(true)?;
        tcp.set_write_timeout(Some(PATIENCE))?;
        Ok(Peer {
            tcp,
            ring: None,
            inbox: Vec::new(),
            msn: [1; 4],
        })
    }

    /// Sends bytes as they are, by TCP.
    pub fn raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.tcp.write_all(bytes)
    }

    /// Sends an FPDU, or what stands for one in shared memory.
    pub fn fpdu(&mut self, ulpdu: &[u8]) -> io::Result<()> {
        match &mut self.ring {
            Some(ring) => ring.frame(ulpdu),
            None => self.raw(&fpdu(ulpdu)),
        }
    }

    /// Sends a segment of tagged memory.
    pub fn tagged(&mut self, segment: &Tagged) -> io::Result<()> {
        self.fpdu(&segment.bytes())
    }

    /// Sends a segment of an untagged message.
    pub fn untagged(&mut self, segment: &Untagged) -> io::Result<()> {
        self.fpdu(&segment.bytes())
    }

    /// A whole message of queue 0 with the right number.
    pub fn send(&mut self, payload: &[u8]) -> io::Result<()> {
        self.message(opcode::SEND, 0, payload)
    }

    /// A whole message with the right number.
    pub fn message(&mut self, opcode: u8, queue: u32, payload: &[u8]) -> io::Result<()> {
        let msn = self.next_msn(queue);
        self.untagged(&Untagged::new(opcode, queue, msn, payload))
    }

    /// The number of the next message of a queue; it is taken.
    pub fn next_msn(&mut self, queue: u32) -> u32 {
        let next = &mut self.msn[queue as usize & 3];
        *next = next.wrapping_add(1);
        next.wrapping_sub(1)
    }

    /// Sends a request and waits for the reply.
    pub fn start(&mut self, request: &Startup) -> io::Result<Startup> {
        self.raw(&request.bytes())?;
        self.startup_frame()
    }

    /// The start-up frame that comes next.
    pub fn startup_frame(&mut self) -> io::Result<Startup> {
        self.startup_frame_within(PATIENCE)
    }

    /// The same, if it comes in time.
    pub fn startup_frame_within(&mut self, patience: Duration) -> io::Result<Startup> {
        let deadline = Instant::now() + patience;
        let head = self.bytes(20, deadline)?;
        let claimed = u16::from_be_bytes([head[18], head[19]]);
        let private = self.bytes(usize::from(claimed), deadline)?;
        Ok(Startup {
            key: head[..16].try_into().expect("sixteen"),
            flags: head[16],
            revision: head[17],
            claimed,
            private,
        })
    }

    /// The segment that comes next.
    pub fn segment(&mut self, patience: Duration) -> io::Result<Received> {
        let deadline = Instant::now() + patience;
        if self.ring.is_some() {
            let length = self.bytes(4, deadline)?;
            let length = u32::from_le_bytes(length.try_into().expect("four"));
            let ulpdu = self.bytes(length as usize, deadline)?;
            return Received::parse(&ulpdu).ok_or_else(|| ErrorKind::InvalidData.into());
        }
        let length = self.bytes(2, deadline)?;
        let length = usize::from(u16::from_be_bytes([length[0], length[1]]));
        let rest = self.bytes(length + (4 - (length + 2) % 4) % 4 + 4, deadline)?;
        Received::parse(&rest[..length]).ok_or_else(|| ErrorKind::InvalidData.into())
    }

    /// The message of queue 0 that comes next, whole; other segments are skipped.
    pub fn receive(&mut self, patience: Duration) -> io::Result<Vec<u8>> {
        let deadline = Instant::now() + patience;
        let mut message = Vec::new();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let came = self.segment(left)?;
            match came.opcode {
                opcode::TERMINATE => {
                    let said = format!("a Terminate: {:02x?}", came.payload);
                    return Err(io::Error::other(said));
                }
                opcode::SEND..=opcode::SEND_SOLICITED_INVALIDATE if came.tagged.is_none() => {
                    message.extend(came.payload);
                    if came.last {
                        return Ok(message);
                    }
                }
                _ => {}
            }
        }
    }

    /// So many bytes of the stream.
    fn bytes(&mut self, len: usize, deadline: Instant) -> io::Result<Vec<u8>> {
        while self.inbox.len() < len {
            if self.fill(deadline)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(self.inbox.drain(..len).collect())
    }

    /// Takes in what there is; 0 at the end of the stream.
    fn fill(&mut self, deadline: Instant) -> io::Result<usize> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        if let Some(ring) = &mut self.ring {
            let piece = loop {
                let piece = ring.take(1 << 20)?;
                if Instant::now() > deadline {
                    return Err(ErrorKind::TimedOut.into());
                }
                if !piece.is_empty() || ring.is_over() {
                    break piece;
                }
                std::thread::sleep(Duration::from_micros(500));
            };
            self.inbox.extend(&piece);
            return Ok(piece.len());
        }
        self.tcp.set_read_timeout(Some(left))?;
        let mut piece = [0; 8192];
        match self.tcp.read(&mut piece) {
            Ok(n) => {
                self.inbox.extend(&piece[..n]);
                Ok(n)
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
            Err(e) => Err(e),
        }
    }

    /// Waits until the victim leaves.
    pub fn ending(&mut self, patience: Duration) -> Ending {
        let start = Instant::now();
        let deadline = start + patience;
        let mut ending = Ending {
            end: End::Open,
            terminate: None,
            took: Duration::ZERO,
            segments: 0,
        };
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.segment(left) {
                Ok(came) => {
                    ending.segments += 1;
                    if came.opcode == opcode::TERMINATE && came.payload.len() >= 2 {
                        let said = u16::from_be_bytes([came.payload[0], came.payload[1]]);
                        ending.terminate.get_or_insert(said);
                    }
                    continue;
                }
                Err(e) if e.kind() == ErrorKind::InvalidData => continue,
                Err(e) if e.kind() == ErrorKind::TimedOut => {}
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => ending.end = End::Closed,
                Err(_) => ending.end = End::Reset,
            }
            ending.took = start.elapsed();
            return ending;
        }
    }

    pub fn reset(self) {
        let _ = sockopt::set_socket_linger(&self.tcp, Some(Duration::ZERO));
    }

    /// Says nothing more, and goes on listening.
    pub fn half_close(&self) {
        if let Some(ring) = &self.ring {
            let _ = ring.store(word::END, 1).and_then(|()| ring.wake());
        }
        let _ = self.tcp.shutdown(Shutdown::Write);
    }
}

/// A request of an honest peer with this for the program.
pub fn request(private: &[u8]) -> Startup {
    Startup::new(frames::REQUEST, private)
}
