//! MPEG-TS over RTP (RFC 3550, RFC 2250), in the form that ordinary players receive from the network, paced by the stream's own clock.

use std::io;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use crate::cut::CutError;
use crate::ts::{Follower, PACKET};

/// Packets of the transport stream in a datagram: 1,316 bytes fit into an Ethernet frame.
const BUNDLE: usize = 7;
const HEADER: usize = 12;
/// Payload type of an MPEG-2 transport stream (RFC 3551).
const MP2T: u8 = 33;
/// How far ahead of the stream's clock datagrams are sent.
const AHEAD: Duration = Duration::from_millis(200);
/// A clock that jumps further than this starts again.
const JUMP: u64 = 2_000_000;

/// Why a stream cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum RtpError {
    /// It is not a transport stream.
    #[error("{0}")]
    Stream(#[from] CutError),
    /// As `send(2)`.
    #[error("cannot send: {0}")]
    Io(#[from] io::Error),
}

/// Sends a transport stream.
pub struct Sender {
    socket: UdpSocket,
    follower: Follower,
    /// Bytes that are no whole packet yet.
    rest: Vec<u8>,
    datagram: Vec<u8>,
    sequence: u16,
    source: u32,
    /// The time of a clock value.
    base: Option<(Instant, u64)>,
    clock: u64,
    /// Datagrams sent.
    pub sent: u64,
}

impl Sender {
    /// On a socket that is connected to the receiver. `source` is the synchronisation source, a random number.
    pub fn new(socket: UdpSocket, source: u32) -> Self {
        Self {
            socket,
            follower: Follower::default(),
            rest: Vec::new(),
            datagram: Vec::new(),
            sequence: source as u16,
            source,
            base: None,
            clock: 0,
            sent: 0,
        }
    }

    /// Takes the next bytes of the stream; sleeps until it is time to send them.
    ///
    /// # Errors
    /// [`RtpError`].
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), RtpError> {
        self.rest.extend_from_slice(bytes);
        let rest = std::mem::take(&mut self.rest);
        let (packets, left) = rest.as_chunks::<PACKET>();
        for packet in packets {
            let look = self.follower.look(packet).ok_or(CutError::Sync)?;
            if let Some(clock) = look.clock {
                self.pace(clock);
            }
            if self.datagram.is_empty() {
                self.begin();
            }
            self.datagram.extend_from_slice(packet);
            if self.datagram.len() >= HEADER + BUNDLE * PACKET {
                self.send()?;
            }
        }
        self.rest = left.to_vec();
        Ok(())
    }

    /// Sends the rest.
    ///
    /// # Errors
    /// [`RtpError`].
    pub fn finish(mut self) -> Result<u64, RtpError> {
        if !self.datagram.is_empty() {
            self.send()?;
        }
        Ok(self.sent)
    }

    fn pace(&mut self, clock: u64) {
        let now = Instant::now();
        let jumped = clock < self.clock || clock - self.clock > JUMP;
        self.clock = clock;
        let Some((begun, first)) = self.base.filter(|_| !jumped) else {
            self.base = Some((now, clock));
            return;
        };
        let due = begun + Duration::from_micros(clock - first);
        if let Some(wait) = due.checked_duration_since(now + AHEAD) {
            std::thread::sleep(wait);
        }
    }

    fn begin(&mut self) {
        // 90 kHz.
        let stamp = (u128::from(self.clock) * 9 / 100) as u32;
        self.datagram.extend([0x80, MP2T]);
        self.datagram.extend(self.sequence.to_be_bytes());
        self.datagram.extend(stamp.to_be_bytes());
        self.datagram.extend(self.source.to_be_bytes());
        self.sequence = self.sequence.wrapping_add(1);
    }

    fn send(&mut self) -> Result<(), RtpError> {
        match self.socket.send(&self.datagram) {
            // The port is not open yet, or a queue is full: datagrams may be lost.
            Err(e)
                if !matches!(
                    e.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
                ) =>
            {
                return Err(e.into());
            }
            _ => self.sent += 1,
        }
        self.datagram.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_carry_whole_packets_in_order() {
        let receiver = UdpSocket::bind("127.0.0.1:0").unwrap();
        receiver
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(receiver.local_addr().unwrap()).unwrap();
        let mut stream = Vec::new();
        for i in 0..16_u8 {
            let mut packet = [i; PACKET];
            packet[..4].copy_from_slice(&[0x47, 0x01, 0x00, 0x10]);
            stream.extend(packet);
        }
        let mut sender = Sender::new(socket, 0xffff_fffe);
        for piece in stream.chunks(100) {
            sender.feed(piece).unwrap();
        }
        assert_eq!(sender.finish().unwrap(), 3);
        let mut got = Vec::new();
        for sequence in [0xfffe_u16, 0xffff, 0] {
            let mut buf = [0; 2000];
            let n = receiver.recv(&mut buf).unwrap();
            assert_eq!(buf[..2], [0x80, 33]);
            assert_eq!(buf[2..4], sequence.to_be_bytes());
            got.extend_from_slice(&buf[HEADER..n]);
        }
        assert_eq!(got, stream);
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(receiver.local_addr().unwrap()).unwrap();
        let mut sender = Sender::new(socket, 1);
        assert!(sender.feed(&[0; PACKET]).is_err());
    }
}
