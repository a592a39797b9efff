//! Settings of a socket.

use std::time::Duration;

use rustix::io::Errno;
use weft_verbs::LinkOptions;
pub use weft_wire::exs::{Design, Mode};
use weft_wire::exs::{HEADER_LEN, MAX_LEN, MAX_SMALL};

/// How long a closed connection may continue without sending a byte.
pub(crate) const LINGER: Duration = Duration::from_secs(30);
/// The most bytes of the control receives of a connection. A peer can fill them before the program receives anything.
const CONTROL_MEMORY: usize = 256 << 20;
/// The most bytes of the connections of a listener that wait to be accepted, which peers can fill.
const WAITING_MEMORY: usize = 4 << 30;

/// The unit of a socket's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Bytes (`SOCK_STREAM`).
    Stream,
    /// Messages (`SOCK_SEQPACKET`).
    SeqPacket,
}

/// Settings of a socket. Those that determine a connection can be changed until it is made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How a stream moves its bytes in both directions. Default: dynamic. With [`Mode::Published`] this end uses the policy of the paper, whatever
    /// the peer's is.
    pub mode: Mode,
    /// How sequenced packets are moved; both sides need the same. Default: [`Design::Advert`].
    pub design: Design,
    /// Control receives that this end keeps posted: the peer's send credits. 4 to 65,535, default 256. Each has room for the longest small packet;
    /// if they had more than 256 MiB in all, fewer are posted: 15 with small packets of 16 MiB.
    pub credits: u32,
    /// Data up to this many bytes travels in the message that announces it (`small_packet_max_size`, EXS interface 5.1). 0 disables this;
    /// at most 16 MiB, default 256. Our setting limits what the peer sends this way; the peer's setting limits what we send.
    pub small_packet_max: u32,
    /// Bytes of this end's intermediate buffer. 4 KiB to 1 GiB, default 1 MiB.
    pub buffer: u32,
    /// Request a CRC on every FPDU if the connection stays on TCP. Default on.
    pub crc: bool,
    /// Use immediate data if the peer supports it; otherwise each Write is followed by a Send. Default on.
    pub immediate: bool,
    /// Time limit for making a connection. Default 10 s.
    pub connect_timeout: Duration,
    /// Time limit for sends. Default none.
    pub send_timeout: Option<Duration>,
    /// Time limit for receives. Default none.
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
    /// The bytes of a control receive.
    pub(crate) fn control_slot(&self) -> usize {
        (self.small_packet_max as usize + HEADER_LEN)
            .max(MAX_LEN)
            .next_multiple_of(64)
    }
    /// The control receives that are posted.
    pub(crate) fn control_receives(&self) -> u32 {
        self.credits
            .min((CONTROL_MEMORY / self.control_slot()) as u32)
    }
    /// The connections that may wait to be accepted, whatever the backlog.
    pub(crate) fn most_waiting(&self) -> usize {
        let control = self.control_slot() * self.control_receives() as usize;
        WAITING_MEMORY / (control + self.buffer as usize)
    }
    /// The settings of the wire protocol.
    pub(crate) fn link(&self) -> LinkOptions {
        LinkOptions {
            crc: self.crc,
            timeout: self.connect_timeout,
            ..LinkOptions::default()
        }
    }
    /// True if the two differ only in settings that may change at any time.
    pub(crate) fn same_connection(&self, other: &Options) -> bool {
        let timeless = |o: &Options| Options {
            send_timeout: None,
            recv_timeout: None,
            ..o.clone()
        };
        timeless(self) == timeless(other)
    }
}
