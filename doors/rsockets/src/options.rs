//! Options that are set on a socket before it is connected.

use weft_verbs::cm::LinkOptions;

use crate::machine::SPARE;
use crate::wire::{from_scale, to_scale};

/// Sizes of a connection. Accepted sockets have those of their listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes of the receive buffer. Default 256 KiB.
    pub recv_buffer: u32,
    /// Bytes of the send buffer. Default 256 KiB.
    pub send_buffer: u32,
    /// Sends outstanding at once. Default 384.
    pub send_queue: u16,
    /// Messages that the peer may send beyond those that have been read. Default 384.
    pub recv_queue: u16,
    /// Sends up to this many bytes are carried in their work requests. Default 64.
    pub inline: u16,
    /// Mappings that the peer may make ([`crate::Socket::map`] at its end). Default 0.
    pub maps: u16,
    /// Parameters of the connection.
    pub link: LinkOptions,
}

/// Fewest entries of a queue.
const QUEUE_MIN: u16 = 16;
/// Most entries of a queue.
const QUEUE_MAX: u16 = 0xfffe;
/// Smallest buffer, in bytes.
const BUFFER_MIN: u32 = 4096;
/// Largest buffer, in bytes.
const BUFFER_MAX: u32 = 1 << 28;
/// Most bytes in a work request.
const INLINE_MAX: u16 = 4096;

impl Default for Options {
    fn default() -> Self {
        Options {
            recv_buffer: 256 << 10,
            send_buffer: 256 << 10,
            send_queue: 384,
            recv_queue: 384,
            inline: 64,
            maps: 0,
            link: LinkOptions::default(),
        }
    }
}

impl Options {
    /// Everything within its bounds.
    #[must_use]
    pub fn clamped(self) -> Options {
        let buffer = |bytes: u32| bytes.clamp(BUFFER_MIN, BUFFER_MAX).next_multiple_of(16);
        Options {
            recv_buffer: buffer(self.recv_buffer),
            send_buffer: buffer(self.send_buffer),
            send_queue: self.send_queue.clamp(QUEUE_MIN, QUEUE_MAX),
            recv_queue: self.recv_queue.clamp(QUEUE_MIN, QUEUE_MAX),
            inline: self.inline.min(INLINE_MAX),
            maps: from_scale(to_scale(self.maps)),
            link: self.link,
        }
    }

    /// Receives posted: those of credits, and those of messages that need none.
    pub(crate) fn receives(&self) -> usize {
        usize::from(self.recv_queue) + usize::from(SPARE)
    }
}
