//! Stream sockets over RDMA with the wire protocol of rsockets: they talk to the `r*` calls of librdmacm on any iWARP peer, and, through
//! the C library, are those calls. And datagram sockets over datagram queue pairs, between peers that are weft.
//!
//! * [`wire`]: the bytes, as docs/spec/rsockets.md has them.
//! * [`machine`]: the protocol's state, without sockets, clock or memory.
//! * [`Socket`]: sockets over verbs; [`DatagramSocket`]: those for messages; [`poll`] waits for several.
//!
//! ```
//! use weft_rsockets::{RecvFlags, Sink, Socket, Source};
//! use weft_verbs::Device;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = Device::open()?;
//! let listener = Socket::new(&device, false)?;
//! listener.bind("127.0.0.1:0".parse()?)?;
//! listener.listen(8)?;
//!
//! let client = Socket::new(&device, false)?;
//! client.connect(listener.local_addr()?)?;
//! let (server, _) = listener.accept()?;
//!
//! client.send(&[Source::Bytes(b"hello, rsockets")], false)?;
//! client.close();
//! let mut text = [0; 64];
//! let n = server.recv(&mut [Sink::Bytes(&mut text)], RecvFlags::WAITALL)?;
//! assert_eq!(&text[..n], b"hello, rsockets");
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod common;
mod datagram;
mod driver;
mod keepalive;
mod listener;
pub mod machine;
mod options;
pub mod poll;
mod socket;
pub mod wire;

pub use common::Common;
pub use datagram::{DatagramSocket, MAX_DATAGRAM, Received};
pub use options::Options;
pub use socket::Socket;
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
