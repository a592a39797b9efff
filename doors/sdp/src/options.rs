//! Options that are set on a stream before it is connected.

use std::time::Duration;

use weft_verbs::cm::LinkOptions;

use crate::machine::policy::Mode;
use crate::wire::{MAX_SOURCES, MIN_RECEIVES};

/// Settings of a connection. Accepted streams have those of their listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How large sends move their bytes. Default [`Mode::Bsdp`]; [`crate::Stream::set_mode`] changes it at any time.
    pub mode: Mode,
    /// Receives posted, of [`Options::payload`] bytes each. Default 32, from 6 to 4096.
    pub receives: u16,
    /// Bytes of stream that fit one receive. Default 16 KiB, from 64 B to 1 MiB.
    pub payload: u32,
    /// Bytes of the send buffer. Default 256 KiB, from 4 KiB to 256 MiB.
    pub send_buffer: u32,
    /// Sends of at least this many bytes go from the program's memory, where the mode says so. Default 32 KiB, at least one page.
    pub zero_copy: usize,
    /// Sources that either end may have in flight in [`Mode::AzBlock`] and [`Mode::AzCopy`]. Default 16, from 1 to 1024.
    pub sources: u16,
    /// Threads that may have to wait for a buffer among 32 asynchronous sends, before these are given up for a while. Default 16; more
    /// than 32: never given up.
    pub fault_limit: u32,
    /// How long a synchronous send, or a thread that writes to a buffer in flight, waits for a receiver that does not fetch. Then the bytes
    /// are copied. `None`: without a limit. Default 100 ms.
    pub patience: Option<Duration>,
    /// Bytes of such copies that may exist at a time. Default 16 MiB.
    pub copies: usize,
    /// Receives that wait open their memory to the peer (SINK AVAIL). Default true; not in [`Mode::Bsdp`].
    pub sinks: bool,
    /// Parameters of the connection.
    pub link: LinkOptions,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            mode: Mode::default(),
            receives: 32,
            payload: 16 << 10,
            send_buffer: 256 << 10,
            zero_copy: 32 << 10,
            sources: 16,
            fault_limit: 16,
            patience: Some(Duration::from_millis(100)),
            copies: 16 << 20,
            sinks: true,
            link: LinkOptions::default(),
        }
    }
}

impl Options {
    /// Everything within its bounds.
    #[must_use]
    pub fn clamped(self) -> Options {
        Options {
            receives: self.receives.clamp(MIN_RECEIVES, 4096),
            payload: self.payload.clamp(64, 1 << 20),
            send_buffer: self.send_buffer.clamp(4 << 10, 256 << 20),
            zero_copy: self.zero_copy.max(4 << 10),
            sources: self.sources.clamp(1, MAX_SOURCES),
            ..self
        }
    }
}
