//! Messages between siblings. Both ends run on one host for one user; what does not parse is dropped all the same.

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};

use weft_wire::roce::cm::PortSpace;

use super::probe::{PROBE_LEN, Probe};

/// Which port a message is about: its address, and the interface of a link-local one.
pub(in crate::roce) type PortName = (IpAddr, u32);

const HELLO: u8 = 1;
const PACKETS: u8 = 2;
const QUESTION: u8 = 3;
const PROBED: u8 = 4;
const SERVES: u8 = 5;

/// Bytes of the longest message without its packets.
pub(super) const HEADER: usize = 64;

/// A service of `rdma_cm` at a port: connections or datagrams, and its number.
pub(in crate::roce) type Service = (PortSpace, PortName, u16);

/// Packets that came to another process than the one that they are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::roce) struct Envelope {
    /// The port at which they came.
    pub(in crate::roce) port: PortName,
    pub(in crate::roce) from: SocketAddr,
    pub(in crate::roce) traffic_class: u8,
    /// The place of the first one in its train, and the bytes of each packet; the last may be shorter.
    pub(in crate::roce) number: u16,
    pub(in crate::roce) each: u32,
    /// A management datagram about which siblings are asked, and when it came, in nanoseconds of the host's clock: only those answer that it concerns.
    pub(in crate::roce) asked_at: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message<'a> {
    /// The first one of a connection: who speaks.
    Hello {
        slot: u8,
    },
    Packets(Envelope, &'a [u8]),
    /// The receiver's probe has come to the sender: the kernel numbers its socket so.
    Probed {
        port: PortName,
        probe: Probe,
    },
    /// The sender has the listener of a service that the receiver has asked for.
    Serves(Service),
}

/// The header of a message; packets follow it.
pub(super) fn emit(message: &Message<'_>) -> ([u8; HEADER], usize) {
    let mut out = [0; HEADER];
    let mut at = 0;
    let mut put = |bytes: &[u8]| {
        out[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    let addr = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    };
    match message {
        Message::Hello { slot } => put(&[HELLO, *slot]),
        Message::Packets(envelope, _) => {
            let kind = match envelope.asked_at {
                Some(_) => QUESTION,
                None => PACKETS,
            };
            let scope = match envelope.from {
                SocketAddr::V4(_) => 0,
                SocketAddr::V6(from) => from.scope_id(),
            };
            put(&[kind, envelope.traffic_class]);
            put(&envelope.number.to_ne_bytes());
            put(&envelope.each.to_ne_bytes());
            put(&addr(envelope.port.0));
            put(&envelope.port.1.to_ne_bytes());
            put(&addr(envelope.from.ip()));
            put(&scope.to_ne_bytes());
            put(&envelope.from.port().to_ne_bytes());
            if let Some(at) = envelope.asked_at {
                put(&at.to_ne_bytes());
            }
        }
        Message::Probed { port, probe } => {
            put(&[PROBED, 0]);
            put(&probe.emit());
            put(&addr(port.0));
            put(&port.1.to_ne_bytes());
        }
        Message::Serves((space, port, number)) => {
            put(&[SERVES, u8::from(*space == PortSpace::Udp)]);
            put(&number.to_ne_bytes());
            put(&addr(port.0));
            put(&port.1.to_ne_bytes());
        }
    }
    (out, at)
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn addr(&mut self) -> Option<(IpAddr, u32)> {
        let ip = Ipv6Addr::from(self.take::<16>()?);
        Some((ip.to_canonical(), self.word()?))
    }

    fn rest(&self) -> &'a [u8] {
        self.0
    }
}

pub(super) fn parse(bytes: &[u8]) -> Option<Message<'_>> {
    let mut fields = Fields(bytes);
    let [kind, second] = fields.take()?;
    match kind {
        HELLO => Some(Message::Hello { slot: second }),
        PACKETS | QUESTION => {
            let number = u16::from_ne_bytes(fields.take()?);
            let each = fields.word().filter(|each| *each > 0)?;
            let port = fields.addr()?;
            let (ip, scope) = fields.addr()?;
            let udp = u16::from_ne_bytes(fields.take()?);
            let from = match ip {
                IpAddr::V4(_) => SocketAddr::new(ip, udp),
                IpAddr::V6(ip) => SocketAddrV6::new(ip, udp, 0, scope).into(),
            };
            let asked_at = match kind {
                QUESTION => Some(u64::from_ne_bytes(fields.take()?)),
                _ => None,
            };
            let envelope = Envelope {
                port,
                from,
                traffic_class: second,
                number,
                each,
                asked_at,
            };
            Some(Message::Packets(envelope, fields.rest()))
        }
        PROBED => {
            let probe = Probe::parse(&fields.take::<PROBE_LEN>()?)?;
            let port = fields.addr()?;
            Some(Message::Probed { port, probe })
        }
        SERVES => {
            let space = if second == 0 {
                PortSpace::Tcp
            } else {
                PortSpace::Udp
            };
            let number = u16::from_ne_bytes(fields.take()?);
            Some(Message::Serves((space, fields.addr()?, number)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same(message: &Message<'_>) {
        let (mut raw, len) = {
            let (raw, len) = emit(message);
            (raw[..len].to_vec(), len)
        };
        if let Message::Packets(_, packets) = message {
            raw.extend_from_slice(packets);
        }
        assert_eq!(parse(&raw).as_ref(), Some(message));
        for cut in 0..len {
            assert_eq!(parse(&raw[..cut]), None, "{cut} of {len} bytes");
        }
    }

    #[test]
    fn messages_come_as_they_went() {
        same(&Message::Hello { slot: 9 });
        let port = ("192.0.2.1".parse().unwrap(), 0);
        let probe = Probe::parse(b"\xff\x03\x09\0\0\0\0\x07secretly").unwrap();
        same(&Message::Probed { port, probe });
        for space in [PortSpace::Tcp, PortSpace::Udp] {
            same(&Message::Serves((space, port, 7174)));
        }
        for from in ["192.0.2.7:4791", "[fe80::1%4]:700", "[2001:db8::1]:1"] {
            for asked_at in [None, Some(1 << 40)] {
                let envelope = Envelope {
                    port: ("fe80::2".parse().unwrap(), 4),
                    from: from.parse().unwrap(),
                    traffic_class: 3,
                    number: 60,
                    each: 4100,
                    asked_at,
                };
                same(&Message::Packets(envelope, b"packets"));
            }
        }
    }

    #[test]
    fn packets_of_no_length_are_no_message() {
        let envelope = Envelope {
            port: ("192.0.2.1".parse().unwrap(), 0),
            from: "192.0.2.7:4791".parse().unwrap(),
            traffic_class: 0,
            number: 0,
            each: 0,
            asked_at: None,
        };
        let (raw, len) = emit(&Message::Packets(envelope, &[]));
        assert_eq!(parse(&raw[..len]), None);
    }
}
