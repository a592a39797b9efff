//! Datagrams of unmodified programs to other hosts as Sends of unreliable datagram queue pairs (`weft run --hosts --datagrams`): what goes into a UDP
//! socket and comes out of one, and the messages by which a sender learns that its receiver speaks it.
//!
//! The UDP socket of the program is the queue pair: its number is that of the port, and its `Q_Key` is the broker's, so all programs of a user understand
//! what is sent to any of them. A sender asks the broker of the receiver's host through its own broker ([`Message`]); until the answer, and whenever
//! a frame does not fit, the program's datagram goes as it is. The receiver tells frames from other datagrams by number, `Q_Key` and CRC. The frames
//! are in `docs/spec/dgram.md`, the messages in `docs/spec/run.md`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use sha2::{Digest, Sha256};
use weft_sys::{process, unix};
use weft_wire::dgram::{self, CRC_LEN, Datagram, segment};

use crate::addr::{ADDR, get_addr, put_addr};
use crate::dgram::Route;
use crate::hosts;
use crate::meet::Why;

/// The most bytes of the program's datagram that a frame carries.
pub const MAX_PAYLOAD: usize = segment::MAX_PAYLOAD;
/// The most bytes that a frame has more than its payload.
pub const MAX_OVERHEAD: usize = segment::UNTAGGED_LEN + CRC_LEN;
/// How long an answer counts, in milliseconds. A sender that goes on asks again after half of it.
pub const LEASE_MS: u64 = 10_000;

const MAGIC: u8 = b'W';
const VERSIONS: [u8; 2] = [1, 2];

/// The queue pair number of the UDP socket with this port.
#[must_use]
pub fn number(port: u16) -> u32 {
    u32::from(port) << 8
}

/// An incarnation for the frames of a process: not 0.
#[must_use]
pub fn incarnation() -> u32 {
    let mut bytes = [0; 4];
    // Without random numbers it is still none of an earlier process of this port, most likely.
    if getrandom::fill(&mut bytes).is_err() {
        bytes = std::process::id().to_ne_bytes();
    }
    u32::from_ne_bytes(bytes).max(1)
}

/// The queue pairs of a frame, and its place among those of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The sender's queue pair.
    pub from: u32,
    /// The receiver's.
    pub to: u32,
    /// The receiver's `Q_Key`.
    pub qkey: u32,
    /// Chosen at random by the sending process.
    pub incarnation: u32,
    /// Message sequence number.
    pub msn: u32,
}

/// The bytes that a frame has more than its payload of `len` bytes: in front of it, and in all.
#[must_use]
pub fn overhead(len: usize) -> (usize, usize) {
    let front = if len <= dgram::MAX_PAYLOAD {
        dgram::HEADER_LEN
    } else {
        segment::UNTAGGED_LEN
    };
    (front, front + CRC_LEN)
}

impl Frame {
    /// Completes a frame whose payload of `len` bytes is at its place in `room`. Returns the length of the whole; `None`: it does not fit.
    pub fn complete(&self, room: &mut [u8], len: usize) -> Option<usize> {
        if len > MAX_PAYLOAD {
            return None;
        }
        let (front, more) = overhead(len);
        let mut head = Vec::with_capacity(front);
        if len <= dgram::MAX_PAYLOAD {
            let header = dgram::Header {
                dst_qp: self.to,
                src_qp: self.from,
                qkey: self.qkey,
                msn: self.msn,
                solicited: false,
                imm: None,
            };
            header.emit(&mut head);
        } else {
            let header = dgram::Segment {
                dst_qp: self.to,
                src_qp: self.from,
                qkey: self.qkey,
                incarnation: self.incarnation,
                msn: self.msn,
                len: len as u32,
                offset: 0,
                target: None,
                imm: None,
                solicited: false,
                reliable: None,
            };
            header.emit(len, &mut head);
        }
        let frame = room.get_mut(..len + more)?;
        frame.get_mut(..front)?.copy_from_slice(&head);
        dgram::seal_all(frame, len + more);
        Some(len + more)
    }
}

/// What a received datagram is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// None of ours: it is the program's as it is.
    Plain,
    /// The program's datagram is in this range.
    Payload(Range<usize>),
    /// It has a `Q_Key` of ours, and is for another queue pair, damaged, or of a kind that no socket takes: it is the program's as it is.
    Refused,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..)?.first_chunk()?;
    Some(u32::from_be_bytes(*word))
}

/// Returns true if a datagram begins as frames do.
#[inline]
#[must_use]
pub fn may_be_frame(datagram: &[u8]) -> bool {
    datagram.first() == Some(&MAGIC)
        && VERSIONS.contains(&(datagram[1..].first().map_or(0, |byte| byte >> 4)))
}

/// Returns true if a datagram is addressed to a queue pair with one of these `Q_Key`s.
#[inline]
fn is_ours(datagram: &[u8], qkeys: &[u32]) -> bool {
    may_be_frame(datagram) && word(datagram, 10).is_some_and(|qkey| qkeys.contains(&qkey))
}

/// Looks at a datagram that came to a socket. `own` is asked for the number of its queue pair only if the datagram may be a frame.
#[inline]
pub fn open(datagram: &[u8], qkeys: &[u32], own: impl FnOnce() -> Option<u32>) -> Opened {
    if !is_ours(datagram, qkeys) {
        return Opened::Plain;
    }
    if word(datagram, 2) != own() {
        return Opened::Refused;
    }
    match dgram::read(datagram) {
        Ok(Datagram::Message(header, payload)) if header.imm.is_none() => Opened::Payload(payload),
        Ok(Datagram::Segment(segment, payload))
            if segment.target.is_none()
                && segment.imm.is_none()
                && segment.reliable.is_none()
                && segment.len as usize == payload.len() =>
        {
            Opened::Payload(payload)
        }
        _ => Opened::Refused,
    }
}

/// Bytes of a [`Message`].
pub const MESSAGE: usize = 8 + 2 * ADDR;

/// Meaning of a [`Message`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Does the socket that gets these datagrams take frames?
    Find = 1,
    /// It does, with this `Q_Key`.
    Found = 2,
    /// It does not.
    None = 3,
    /// It does not any more.
    Lost = 4,
}

/// What a sender asks, and what the broker of the receiver's host answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its meaning.
    pub kind: Kind,
    /// With [`Kind::Found`], else 0.
    pub qkey: u32,
    /// The datagrams that it is about.
    pub route: Route,
}

impl Message {
    /// As bytes.
    #[must_use]
    pub fn emit(&self) -> [u8; MESSAGE] {
        let mut out = [0; MESSAGE];
        out[0] = self.kind as u8;
        out[4..8].copy_from_slice(&self.qkey.to_be_bytes());
        out[8..26].copy_from_slice(&put_addr(self.route.from));
        out[26..].copy_from_slice(&put_addr(self.route.to));
        out
    }

    /// Parses one; `None` for what no honest peer sends.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Message> {
        let bytes: &[u8; MESSAGE] = bytes.try_into().ok()?;
        let kind = match bytes[0] {
            1 => Kind::Find,
            2 => Kind::Found,
            3 => Kind::None,
            4 => Kind::Lost,
            _ => return None,
        };
        let addr = |at: usize| get_addr(&std::array::from_fn(|i| bytes[at + i]));
        (bytes[1..4] == [0; 3]).then(|| Message {
            kind,
            qkey: word(bytes, 4).unwrap_or_default(),
            route: Route::new(addr(8), addr(26)),
        })
    }
}

const KEY: [u8; 8] = *b"weftudK1";
const LEFT: [u8; 8] = *b"weftudL1";
/// Bytes of a [`Note`].
const NOTE: usize = 9;

/// What a program tells its broker of a socket, whose `SO_COOKIE` it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// It takes frames.
    Takes(u64),
    /// It does not any more.
    Gone(u64),
    /// It does not any more, and the program waits for [`Heard::Left`].
    Part(u64),
}

/// What the broker tells a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Its `Q_Key`, first of all.
    Key(u32),
    /// A socket that has parted takes no frames any more, and whether another host was ever told that it does.
    Left { cookie: u64, was_found: bool },
}

/// Opens a program's session with the broker; `None` if none runs. The first answer is [`Heard::Key`].
///
/// # Errors
/// [`Why::OtherUser`] when another user has the broker's name.
pub fn session() -> Result<Option<OwnedFd>, Why> {
    hosts::greet(&hosts::SESSION)
}

/// What the broker says; `None` while it says nothing.
///
/// # Errors
/// [`Why::NoBroker`] if the broker has gone.
pub fn heard(wire: impl AsFd) -> Result<Option<Heard>, Why> {
    let mut bytes = [0; LEFT.len() + NOTE + 1];
    let (magic, rest) = match unix::recv_bytes(wire, &mut bytes) {
        Ok(Some(n)) => bytes[..n].split_first_chunk::<8>().ok_or(Why::Broken)?,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
        Ok(None) | Err(_) => return Err(Why::NoBroker),
    };
    match (*magic, rest) {
        (KEY, &[a, b, c, d]) => Ok(Some(Heard::Key(u32::from_be_bytes([a, b, c, d])))),
        (LEFT, [was_found @ (0 | 1), cookie @ ..]) if cookie.len() == 8 => {
            let cookie = u64::from_be_bytes(std::array::from_fn(|i| cookie[i]));
            let was_found = *was_found == 1;
            Ok(Some(Heard::Left { cookie, was_found }))
        }
        _ => Err(Why::Broken),
    }
}

/// Answers [`Note::Part`].
///
/// # Errors
/// Those of sending.
pub fn left(wire: impl AsFd, cookie: u64, was_found: bool) -> io::Result<()> {
    let mut note = [0; NOTE];
    note[0] = was_found.into();
    note[1..].copy_from_slice(&cookie.to_be_bytes());
    unix::send_pieces(wire, [&LEFT, &note])
}

/// The `Q_Key` of all brokers of this user in this network namespace until the machine starts anew: whoever has it from one broker understands
/// what is sent to the sockets of the next. Other hosts cannot guess it.
///
/// # Errors
/// Those of random numbers, where the system does not tell what it is made of.
pub fn qkey() -> io::Result<u32> {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id");
    let network = std::fs::metadata("/proc/self/ns/net");
    let mut key = [0; 4];
    if let (Ok(boot), Ok(network)) = (boot, network) {
        let mut hash = Sha256::new_with_prefix(b"weft datagrams Q_Key 1");
        hash.update(&boot);
        hash.update(network.dev().to_be_bytes());
        hash.update(network.ino().to_be_bytes());
        hash.update(process::uid().to_be_bytes());
        key.copy_from_slice(&hash.finalize()[..4]);
    } else {
        getrandom::fill(&mut key).map_err(io::Error::other)?;
    }
    // A Q_Key with the highest bit stands for another one in send requests.
    Ok(u32::from_be_bytes(key) & !(1 << 31))
}

/// Answers a program's session.
///
/// # Errors
/// Those of sending.
pub fn welcome(wire: impl AsFd, qkey: u32) -> io::Result<()> {
    unix::send_pieces(wire, [&KEY, &qkey.to_be_bytes()])
}

/// Tells the broker of a socket.
///
/// # Errors
/// `WouldBlock` if the broker is behind; others if it has gone.
pub fn tell(wire: impl AsFd, note: Note) -> io::Result<()> {
    let (kind, cookie) = match note {
        Note::Takes(cookie) => (1, cookie),
        Note::Gone(cookie) => (2, cookie),
        Note::Part(cookie) => (3, cookie),
    };
    unix::send_pieces(wire, [&[kind], &cookie.to_be_bytes()])
}

/// Takes what a program says of a socket. `None`: the program has ended.
///
/// # Errors
/// `WouldBlock` while it says nothing; `InvalidData` for anything else.
pub fn told(wire: impl AsFd) -> io::Result<Option<Note>> {
    let mut bytes = [0; NOTE + 1];
    let Some(n) = unix::recv_bytes(wire, &mut bytes)? else {
        return Ok(None);
    };
    let cookie = u64::from_be_bytes(std::array::from_fn(|i| bytes[1 + i]));
    match (n, bytes[0]) {
        (NOTE, 1) => Ok(Some(Note::Takes(cookie))),
        (NOTE, 2) => Ok(Some(Note::Gone(cookie))),
        (NOTE, 3) => Ok(Some(Note::Part(cookie))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// Opens the way of a program's questions to another host; `None` if no broker runs.
///
/// # Errors
/// As [`session`].
pub fn ask_host(ip: IpAddr) -> Result<Option<OwnedFd>, Why> {
    let addr = put_addr(SocketAddr::new(ip, 0));
    hosts::greet(&[&hosts::HOST[..], &addr].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAME: Frame = Frame {
        from: 0x0012_3400,
        to: 0x00ab_cd00,
        qkey: 0x5eed_5eed,
        incarnation: 7,
        msn: 3,
    };

    fn framed(payload: &[u8]) -> Vec<u8> {
        let (front, more) = overhead(payload.len());
        let mut room = vec![0; payload.len() + more];
        room[front..front + payload.len()].copy_from_slice(payload);
        assert_eq!(
            FRAME.complete(&mut room, payload.len()),
            Some(payload.len() + more)
        );
        room
    }

    fn opened(datagram: &[u8]) -> Opened {
        open(datagram, &[1, FRAME.qkey], || Some(FRAME.to))
    }

    #[test]
    fn datagrams_of_every_length_are_read_back() {
        for len in [0, 1, 1472, 4096, 4097, 9000, MAX_PAYLOAD] {
            let payload: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
            let datagram = framed(&payload);
            let Opened::Payload(range) = opened(&datagram) else {
                panic!("{len}: {:?}", opened(&datagram));
            };
            assert_eq!(datagram[range], payload);
        }
        let mut room = vec![0; MAX_PAYLOAD + 100];
        assert_eq!(FRAME.complete(&mut room, MAX_PAYLOAD + 1), None);
        assert_eq!(FRAME.complete(&mut room[..100], 65), None);
    }

    #[test]
    fn what_is_not_addressed_to_us_is_the_programs() {
        let datagram = framed(b"hello");
        for at in [0, 1, 10, 13] {
            let mut other = datagram.clone();
            other[at] ^= 0x40;
            assert_eq!(opened(&other), Opened::Plain, "{at}");
        }
        for len in 0..14 {
            assert_eq!(opened(&datagram[..len]), Opened::Plain, "{len}");
        }
        assert_eq!(open(&datagram, &[], || panic!()), Opened::Plain);
    }

    #[test]
    fn what_is_addressed_to_us_and_is_no_send_is_refused() {
        for payload in [&b"hello"[..], &[9; 5000]] {
            let datagram = framed(payload);
            for at in (0..datagram.len()).filter(|at| ![0, 1, 10, 11, 12, 13].contains(at)) {
                let mut bad = datagram.clone();
                bad[at] ^= 0x40;
                assert_eq!(opened(&bad), Opened::Refused, "{at}");
            }
            for len in 14..datagram.len() {
                assert_eq!(opened(&datagram[..len]), Opened::Refused, "{len}");
            }
        }
        // Whole, and of a kind that sockets do not take: a Write-Record, immediate data, a part of a message.
        let segment = dgram::Segment {
            dst_qp: FRAME.to,
            src_qp: FRAME.from,
            qkey: FRAME.qkey,
            incarnation: 7,
            msn: 3,
            len: 5,
            offset: 0,
            target: None,
            imm: None,
            solicited: false,
            reliable: None,
        };
        let seal = |segment: dgram::Segment, payload: &[u8]| {
            let mut out = Vec::new();
            segment.emit(payload.len(), &mut out);
            out.extend_from_slice(payload);
            dgram::seal(&mut out);
            opened(&out)
        };
        assert!(matches!(seal(segment, b"hello"), Opened::Payload(_)));
        assert_eq!(seal(segment, b"hell"), Opened::Refused);
        let target = Some(dgram::Target { stag: 1, to: 0 });
        let others = [
            dgram::Segment { target, ..segment },
            dgram::Segment {
                imm: Some(1),
                ..segment
            },
            dgram::Segment {
                reliable: Some(dgram::Packet { psn: 1, cookie: 0 }),
                ..segment
            },
        ];
        for other in others {
            assert_eq!(seal(other, b"hello"), Opened::Refused);
        }
    }

    #[test]
    fn brokers_of_a_user_have_one_key() {
        let key = qkey().unwrap();
        assert_eq!(qkey().unwrap(), key);
        assert_eq!(key >> 31, 0);
    }

    #[test]
    fn messages_are_read_back_and_others_are_not() {
        let route = Route::new(
            "10.0.0.1:5060".parse().unwrap(),
            "[2001:db8::7]:5061".parse().unwrap(),
        );
        for kind in [Kind::Find, Kind::Found, Kind::None, Kind::Lost] {
            let sent = Message {
                kind,
                qkey: 0x0102_0304,
                route,
            };
            let bytes = sent.emit();
            assert_eq!(Message::parse(&bytes), Some(sent));
            for len in 0..MESSAGE {
                assert_eq!(Message::parse(&bytes[..len]), None);
            }
            for (at, value) in [(0, 0), (0, 5), (1, 1), (3, 1)] {
                let mut bad = bytes;
                bad[at] = value;
                assert_eq!(Message::parse(&bad), None);
            }
        }
    }
}
