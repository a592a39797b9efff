//! The messages between a program under `weft run --hosts` and the broker of its user.
//!
//! The broker listens on an abstract Unix socket of the network namespace, as the ends of a connection on one host do ([`crate::meet`]). A
//! program [registers](register) a connection whose peer is on another host, and continues. When the broker has found the other end
//! ([`Answer::Go`]), the program makes a segment and a bell, as for a peer on this host, and [hands](link) them over: the broker is the
//! responder. Neither waits for the other.
//!
//! Of datagrams the broker only learns which sockets take frames, and answers questions (module `ud`).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use weft_sys::process;
use weft_sys::unix::{self, Name};

use crate::addr::{ADDR, get_addr, put_addr};
use crate::connection::Carrier;
use crate::meet::{Ends, Why};

/// The default port that brokers listen on.
pub const PORT: u16 = 7479;
/// Environment variable, `auto` or `bsdp`, of programs whose connections to other hosts are followed.
pub const ENV: &str = "WEFT_RUN_HOSTS";
/// Bytes of each direction's beginning that both ends keep.
pub const BEGINNING: usize = 128;
/// Bytes of both directions together that have to be transferred before a connection is registered.
pub const ENOUGH: usize = 16;

const MAGIC: [u8; 8] = *b"weftrnH1";
const LINK: [u8; 8] = *b"weftlnk1";
/// The first message of a program's session for its UDP sockets, and the beginning of that of its questions to a host (`ud`).
pub(crate) const SESSION: [u8; 8] = *b"weftudS1";
pub(crate) const HOST: [u8; 8] = *b"weftudH1";
const REGISTER: usize = 8 + 4 + 2 * ADDR + 2 * BEGINNING;

/// The first bytes of a direction.
#[derive(Clone, PartialEq, Eq)]
pub struct Beginning {
    bytes: [u8; BEGINNING],
    len: u8,
}

impl Default for Beginning {
    fn default() -> Self {
        Beginning {
            bytes: [0; BEGINNING],
            len: 0,
        }
    }
}

// The bytes are left out: they may be passwords.
impl std::fmt::Debug for Beginning {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Beginning({} B)", self.len)
    }
}

impl Beginning {
    /// One that is known already.
    pub fn new(bytes: &[u8]) -> Self {
        let mut beginning = Beginning::default();
        beginning.note(0, bytes);
        beginning
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Notes `bytes` from `position` of the stream. Ignores bytes that do not directly follow the known ones, and bytes beyond
    /// [`BEGINNING`].
    pub fn note(&mut self, position: u64, bytes: &[u8]) {
        let len = usize::from(self.len);
        if position == len as u64 {
            let n = bytes.len().min(BEGINNING - len);
            self.bytes[len..len + n].copy_from_slice(&bytes[..n]);
            self.len = (len + n) as u8;
        }
    }
}

/// One end's description of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Its two addresses, as this end sees them.
    pub ends: Ends,
    /// This end has called `connect`; the other one `accept`.
    pub dialled: bool,
    /// The requested carrier.
    pub carrier: Carrier,
    /// The first bytes that it has sent.
    pub sent: Beginning,
    /// The first bytes that it has received.
    pub received: Beginning,
}

impl Registration {
    fn emit(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(REGISTER);
        out.extend(MAGIC);
        out.extend([
            self.dialled.into(),
            self.carrier as u8,
            self.sent.len,
            self.received.len,
        ]);
        out.extend(put_addr(self.ends.own));
        out.extend(put_addr(self.ends.peer));
        out.extend(self.sent.bytes);
        out.extend(self.received.bytes);
        out
    }

    /// Parses a program's message; `None` if it is not a registration.
    pub fn parse(bytes: &[u8]) -> Option<Registration> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        let ([dialled, carrier, sent_len, received_len], rest) = rest.split_first_chunk::<4>()?;
        let (own, rest) = rest.split_first_chunk::<ADDR>()?;
        let (peer, rest) = rest.split_first_chunk::<ADDR>()?;
        let (sent, rest) = rest.split_first_chunk::<BEGINNING>()?;
        let (received, rest) = rest.split_first_chunk::<BEGINNING>()?;
        let (sent, received) = (
            sent.get(..usize::from(*sent_len))?,
            received.get(..usize::from(*received_len))?,
        );
        if *magic != MAGIC || *dialled > 1 || !rest.is_empty() {
            return None;
        }
        Some(Registration {
            ends: Ends {
                own: get_addr(own),
                peer: get_addr(peer),
            },
            dialled: *dialled == 1,
            carrier: Carrier::of(u64::from(*carrier)),
            sent: Beginning::new(sent),
            received: Beginning::new(received),
        })
    }
}

/// A broker's answer to a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The other end is found: the program may hand over a segment and a bell. The value is the carrier.
    Go(Carrier),
    /// It stays on TCP, for this reason.
    No(Why),
}

const NO: u8 = 0x80;

impl Answer {
    /// As a message.
    pub fn emit(self) -> [u8; 1] {
        match self {
            Answer::Go(carrier) => [carrier as u8],
            Answer::No(why) => [NO | why as u8],
        }
    }

    fn parse(byte: u8) -> Option<Answer> {
        if byte & NO != 0 {
            return Some(Answer::No(Why::of(u32::from(byte & !NO))));
        }
        let carrier = Carrier::of(byte.into());
        (carrier != Carrier::Here).then_some(Answer::Go(carrier))
    }
}

/// The name of a user's broker.
fn name(uid: u32) -> Vec<u8> {
    format!("weft-run/1/broker/{uid}").into_bytes()
}

/// Makes the listening socket of this user's broker.
///
/// # Errors
/// `AddrInUse` when there is one already.
pub fn listen() -> io::Result<OwnedFd> {
    unix::listen(Name::Abstract(&name(process::uid())), 256)
}

/// Returns true if this user has a broker in this network namespace.
pub fn is_there() -> bool {
    dial().is_ok_and(|wire| wire.is_some())
}

/// Connects to the broker; `None` if none runs.
fn dial() -> Result<Option<OwnedFd>, Why> {
    let wire = match unix::connect(Name::Abstract(&name(process::uid()))) {
        Ok(wire) => wire,
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::WouldBlock
            ) =>
        {
            return Ok(None);
        }
        Err(_) => return Err(Why::System),
    };
    // Any process can bind a name.
    let cred = unix::peer_cred(&wire).map_err(|_| Why::System)?;
    if !cred.is_same_user() {
        return Err(Why::OtherUser);
    }
    Ok(Some(wire))
}

/// Registers a connection. `None` if there is no broker at the moment.
pub fn register(what: &Registration) -> Result<Option<OwnedFd>, Why> {
    greet(&what.emit())
}

/// Connects to the broker and sends a first message. `None` if none runs.
pub(crate) fn greet(first: &[u8]) -> Result<Option<OwnedFd>, Why> {
    let Some(wire) = dial()? else {
        return Ok(None);
    };
    unix::send_with_fds(&wire, first, &[]).map_err(|_| Why::System)?;
    Ok(Some(wire))
}

/// Returns the broker's answer; `None` while there is none.
pub fn answer(wire: impl AsFd) -> Result<Option<Answer>, Why> {
    let mut bytes = [0; 2];
    match unix::recv_with_fds(wire, &mut bytes, 0) {
        Ok(Some((1, _))) => Answer::parse(bytes[0]).ok_or(Why::Broken).map(Some),
        Ok(Some(_)) => Err(Why::Broken),
        Ok(None) => Err(Why::NoBroker),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(None),
        // The peer is gone, or the broker.
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => Err(Why::NotConfirmed),
        Err(_) => Err(Why::System),
    }
}

/// Hands the segment and the broker's end of the bell over.
pub fn link(wire: impl AsFd, segment: BorrowedFd<'_>, bell: BorrowedFd<'_>) -> Result<(), Why> {
    unix::send_with_fds(wire, &LINK, &[segment, bell]).map_err(|_| Why::System)
}

/// What a program wants of the broker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum First {
    /// A connection carried.
    Connection(Box<Registration>),
    /// To tell which of its UDP sockets take frames.
    Session,
    /// To ask this host about its UDP sockets.
    Host(IpAddr),
}

impl First {
    fn parse(bytes: &[u8]) -> Option<First> {
        if bytes == SESSION {
            return Some(First::Session);
        }
        if let Some(addr) = bytes.strip_prefix(&HOST) {
            return Some(First::Host(get_addr(addr.try_into().ok()?).ip()));
        }
        Registration::parse(bytes).map(|what| First::Connection(Box::new(what)))
    }
}

/// Receives a program's first message.
///
/// # Errors
/// `WouldBlock` when it has not come yet; `InvalidData` for anything else, or another user's.
pub fn take_first(wire: impl AsFd) -> io::Result<First> {
    if !unix::peer_cred(&wire)?.is_same_user() {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = [0; REGISTER + 1];
    unix::recv_with_fds(wire, &mut bytes, 0)?
        .and_then(|(n, _)| First::parse(&bytes[..n]))
        .ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Receives a program's second message: the segment, and our end of the bell.
///
/// # Errors
/// `WouldBlock` when it has not come yet; `InvalidData` for anything else; `UnexpectedEof` when the program has closed the connection.
pub fn take_link(wire: impl AsFd) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut bytes = [0; LINK.len() + 1];
    let Some((n, fds)) = unix::recv_with_fds(wire, &mut bytes, 2)? else {
        return Err(io::ErrorKind::UnexpectedEof.into());
    };
    match <[OwnedFd; 2]>::try_from(fds) {
        Ok([segment, bell]) if bytes[..n] == LINK => Ok((segment, bell)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration() -> Registration {
        Registration {
            ends: Ends {
                own: "10.0.0.1:80".parse().unwrap(),
                peer: "[2001:db8::7]:4711".parse().unwrap(),
            },
            dialled: true,
            carrier: Carrier::Bsdp,
            sent: Beginning::new(b"GET / HTTP/1.1"),
            received: Beginning::new(&[7; 300]),
        }
    }

    #[test]
    fn a_registration_is_read_back() {
        let sent = registration();
        let bytes = sent.emit();
        assert_eq!(bytes.len(), REGISTER);
        assert_eq!(Registration::parse(&bytes), Some(sent));
    }

    #[test]
    fn damaged_registrations_are_refused_or_harmless() {
        let bytes = registration().emit();
        for len in 0..bytes.len() {
            assert_eq!(Registration::parse(&bytes[..len]), None);
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] = 0xff;
            if let Some(read) = Registration::parse(&damaged) {
                assert!(read.sent.bytes().len() <= BEGINNING);
            }
        }
        assert_eq!(Registration::parse(&[&bytes[..], b"x"].concat()), None);
    }

    #[test]
    fn first_messages_are_told_apart() {
        let host = "2001:db8::7".parse().unwrap();
        let first = [&HOST[..], &put_addr(std::net::SocketAddr::new(host, 0))].concat();
        assert_eq!(First::parse(&first), Some(First::Host(host)));
        assert_eq!(First::parse(&SESSION), Some(First::Session));
        let what = registration();
        let first = First::parse(&what.emit());
        assert_eq!(first, Some(First::Connection(Box::new(what))));
        let longer = [&SESSION[..], b"x"].concat();
        for bad in [&b""[..], &SESSION[..7], &longer, &HOST] {
            assert_eq!(First::parse(bad), None);
        }
    }

    #[test]
    fn a_beginning_has_no_gaps() {
        let mut beginning = Beginning::default();
        beginning.note(0, b"abc");
        beginning.note(4, b"late");
        beginning.note(1, b"again");
        beginning.note(3, b"d");
        assert_eq!(beginning.bytes(), b"abcd");
        beginning.note(4, &[1; 500]);
        assert_eq!(beginning.bytes().len(), BEGINNING);
    }

    #[test]
    fn answers_are_read_back() {
        for answer in [Answer::Go(Carrier::Bsdp), Answer::No(Why::PlainHost)] {
            assert_eq!(Answer::parse(answer.emit()[0]), Some(answer));
        }
        assert_eq!(Answer::parse(0), None);
    }
}
