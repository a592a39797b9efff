//! Who is attacked, and how an honest peer would begin with it.

use std::io;
use std::net::SocketAddr;

use crate::frames::{REJECT, Startup};
use crate::peer::Peer;
use crate::shared::files::Files;

/// What stands on the verbs of a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Nothing: the victim program of the suite.
    Verbs,
    Exs,
    /// An EXS socket of sequenced packets.
    Packets,
    Rsockets,
}

impl Kind {
    pub fn parse(name: &str) -> Option<Kind> {
        Some(match name {
            "verbs" => Kind::Verbs,
            "exs" => Kind::Exs,
            "packets" => Kind::Packets,
            "rsockets" => Kind::Rsockets,
            _ => return None,
        })
    }
}

/// A place in a victim's memory, as it was told.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub stag: u32,
    /// The tagged offset of its first byte.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}

#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What it is.
    pub kind: Kind,
    pub addr: SocketAddr,
    /// Whether connections with it go to shared memory.
    pub shared: bool,
}

/// A connection with which nothing is wrong yet.
#[derive(Debug)]
pub struct Session {
    pub peer: Peer,
    /// Our files, in shared memory.
    pub files: Option<Files>,
    /// What the victim told with its reply.
    pub reply: Vec<u8>,
    /// The place that is open for Writes.
    pub open: Place,
    /// What the victim program of the suite tells besides, in the order of [`Told`]; empty for others.
    pub told: Vec<Place>,
}

/// Places that the verbs victim tells with its reply, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// The middle third of a region, open for Writes, Reads and atomics.
    Open,
    /// A whole region, open for the same.
    Whole,
    /// A region that may be read.
    ReadOnly,
    /// A region without remote rights.
    Closed,
    /// A region of another protection domain.
    Foreign,
    /// A region that is gone.
    Stale,
}

/// The greeting of an EXS socket with these control receives, payload, and no buffer that anybody would look at.
pub fn exs_greeting(packets: bool, receives: u32, payload: u32) -> Vec<u8> {
    let mut out = b"wexs".to_vec();
    out.extend([1, if packets { 2 } else { 1 }, u8::from(packets), 7]);
    out.extend(receives.to_be_bytes());
    out.extend(payload.to_be_bytes());
    out.extend(0x1000_u64.to_be_bytes());
    out.extend(0x1234_5600_u32.to_be_bytes());
    out.extend(65536_u32.to_be_bytes());
    out
}

/// The greeting of an rsocket of rdma-core on a little-endian host, with room for four mappings.
pub fn rsockets_greeting() -> Vec<u8> {
    let mut out = vec![1, 2];
    out.extend(384_u16.to_be_bytes());
    out.extend([0, 0, 0, 4]);
    out.extend(0x1000_u64.to_be_bytes());
    out.extend(0x1234_5600_u32.to_be_bytes());
    out.extend(2_u32.to_be_bytes());
    out.extend(0x8000_u64.to_be_bytes());
    out.extend(0x1234_5601_u32.to_be_bytes());
    out.extend(65536_u32.to_be_bytes());
    out
}

/// The place in these sixteen bytes: address, STag, length.
fn place(bytes: &[u8]) -> Place {
    Place {
        addr: u64::from_be_bytes(bytes[..8].try_into().expect("eight")),
        stag: u32::from_be_bytes(bytes[8..12].try_into().expect("four")),
        len: u32::from_be_bytes(bytes[12..16].try_into().expect("four")),
    }
}

impl Target {
    /// Private data with which the victim takes a connection.
    pub fn hello(&self) -> Vec<u8> {
        match self.kind {
            Kind::Verbs => Vec::new(),
            Kind::Exs => exs_greeting(false, 64, 256),
            Kind::Packets => exs_greeting(true, 64, 256),
            Kind::Rsockets => rsockets_greeting(),
        }
    }

    /// The rest of [`Target::join`], from the reply on.
    pub fn joined(&self, peer: Peer, reply: &Startup) -> io::Result<Session> {
        if reply.flags & REJECT != 0 || reply.private.len() < 4 {
            return Err(io::Error::other(format!("rejected: {reply:?}")));
        }
        let reply = reply.private[4..].to_vec();
        let mut told = Vec::new();
        let short = || io::Error::other("a short reply");
        let open = match self.kind {
            Kind::Verbs => {
                told.extend(reply.chunks_exact(16).map(place));
                *told.first().ok_or_else(short)?
            }
            Kind::Exs | Kind::Packets => place(&reply.get(..32).ok_or_else(short)?[16..]),
            Kind::Rsockets => {
                let half = place(&reply.get(..40).ok_or_else(short)?[24..]);
                // Both halves are one region.
                let len = 2 * half.len;
                Place { len, ..half }
            }
        };
        Ok(Session {
            peer,
            files: None,
            reply,
            open,
            told,
        })
    }
}
