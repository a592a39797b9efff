//! The Sockets Direct Protocol (SDP) over verbs: byte streams with the manners of sockets, of which large sends need no copy.
//!
//! * BSDP copies into a send buffer, with credits, and puts the bytes of several sends into one message where credits are short.
//! * ZSDP lets the receiver fetch from the sender's memory (SOURCE AVAIL, RDMA Read, GET COMPLETE), while the send waits.
//! * AZ-SDP write-protects the memory and returns at once, with many sources in flight. A thread that writes to it waits, or has the bytes
//!   copied first ([`Mode::AzBlock`], [`Mode::AzCopy`]).
//!
//! The paper is Balaji, Bhagvat, Jin and Panda, *Asynchronous Zero-copy Communication for Synchronous Sockets in the Sockets Direct Protocol
//! (SDP) over `InfiniBand`*; docs/spec/sdp.md has the messages and the rules.
//!
//! * [`wire`]: the bytes.
//! * [`machine`]: the protocol, without sockets, clock or memory.
//! * [`Listener`] and [`Stream`]: sockets over verbs.
//!
//! Only memory under a [`RawMemory`](weft_verbs::RawMemory) promise is sent without a copy. The bytes of a Rust slice belong to the borrower
//! again when a call returns, so they go through the send buffer. Before memory that was sent asynchronously is unmapped, or written by a
//! system call, settle it ([`weft_verbs::protect::settle`]).
//!
//! ```
//! use weft_sdp::{Listener, Options, RecvFlags, Sink, Source, Stream};
//! use weft_verbs::Device;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open()?;
//! let listener = Listener::bind(&device, "127.0.0.1:0".parse()?, 8, &Options::default())?;
//! let client = Stream::connect(&device, listener.local_addr(), &Options::default(), None)?;
//! let server = listener.accept(None)?;
//!
//! client.send(&[Source::Bytes(b"hello, SDP")], false)?;
//! let mut text = [0; 10];
//! let n = server.recv(&mut [Sink::Bytes(&mut text)], RecvFlags::WAITALL)?;
//! assert_eq!(&text[..n], b"hello, SDP");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod driver;
mod listener;
pub mod machine;
mod options;
mod send_stats;
mod stream;
pub mod wire;

pub use listener::Listener;
pub use machine::policy::Mode;
pub use options::Options;
pub use send_stats::{Reasons, SendStats};
pub use stream::Stream;
pub use weft_sockets::bell::Heard;
pub use weft_sockets::memory::{Sink, Source};
pub use weft_sockets::stream::Shutdown;

bitflags::bitflags! {
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct RecvFlags: u32 {
        /// Do not wait.
        const DONTWAIT = 1;
        /// Leave the bytes where they are.
        const PEEK = 2;
        /// Wait until the memory is full, or the stream ends.
        const WAITALL = 4;
    }
}
