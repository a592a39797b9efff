//! What a socket can be set to.

use std::time::Duration;

use rustix::io::Errno;
use weft_verbs::LinkOptions;
use weft_wire::exs::MAX_SMALL;
pub use weft_wire::exs::{Design, Mode};

/// How long a connection that its program has closed may go on without sending a byte.
pub(crate) const LINGER: Duration = Duration::from_secs(30);
/// What a socket carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Bytes (`SOCK_STREAM`).
    Stream,
    /// Messages (`SOCK_SEQPACKET`).
    SeqPacket,
}

/// Settings of a socket. Those that a connection is made with can be changed until then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How a stream moves its bytes, in both directions. Default: dynamic.
    pub mode: Mode,
    /// How sequenced packets are moved; both sides need the same. Default: [`Design::Advert`].
    pub design: Design,
    /// Control receives that we keep posted: the peer's send credits. 4 to 65,535, default 256.
    pub credits: u32,
    /// Data up to so many bytes travels in the message that announces it (`small_packet_max_size`, EXS interface 5.1). 0 turns that off;
    /// at most 65,536, default 256. What the peer may send small, our setting says; what we may, the peer's.
    pub small_packet_max: u32,
    /// Bytes of our intermediate buffer. 4 KiB to 1 GiB, default 1 MiB.
    pub buffer: u32,
    /// Ask for a CRC on every FPDU where the connection stays on TCP. Default on.
    pub crc: bool,
    /// Use immediate data where the peer can; off, each Write is followed by a Send. Default on.
    pub immediate: bool,
    /// Limit for making a connection. Default 10 s.
    pub connect_timeout: Duration,
    /// Limit of sends. Default none.
    pub send_timeout: Option<Duration>,
    /// Limit of receives. Default none.
    pub recv_timeout: Option<Duration>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mode: Mode::Dynamic,
            design: Design::Advert,
            credits: 256,
            small_packet_max: 256,
            buffer: 1 << 20,
            crc: true,
            immediate: true,
            connect_timeout: Duration::from_secs(10),
            send_timeout: None,
            recv_timeout: None,
        }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<(), Errno> {
        let fine = (4..=65_535).contains(&self.credits)
            && self.small_packet_max <= MAX_SMALL
            && (4096..=1 << 30).contains(&self.buffer);
        if fine { Ok(()) } else { Err(Errno::INVAL) }
    }
    /// The wire protocol's part.
    pub(crate) fn link(&self) -> LinkOptions {
        LinkOptions {
            crc: self.crc,
            timeout: self.connect_timeout,
            ..LinkOptions::default()
        }
    }
    /// Whether the two differ only in what may change at any time.
    pub(crate) fn same_connection(&self, other: &Options) -> bool {
        let timeless = |o: &Options| Options {
            send_timeout: None,
            recv_timeout: None,
            ..o.clone()
        };
        timeless(self) == timeless(other)
    }
}
