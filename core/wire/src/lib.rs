//! Codecs for everything that crosses a wire: MPA (RFC 5044, RFC 6581), DDP (RFC 5041), RDMAP (RFC 5040, RFC 7306),
//! RoCE v2 and CRC-32C.
//!
//! Nothing here does I/O or keeps connection state, and nothing allocates on the data path. Every decoder takes bytes
//! that a hostile peer may have chosen: it returns a value or an error, and never panics. Every value prints the way a
//! packet analyser would show it.
//!
//! | module | contents |
//! |---|---|
//! | [`mpa`] | start-up frames, FPDU arithmetic, markers |
//! | [`ddp`] | tagged and untagged segment headers, with the RDMAP opcode they carry |
//! | [`rdmap`] | opcodes, Read Request, atomics, Terminate |
//! | [`dgram`] | datagrams of unreliable datagram queue pairs |
//! | [`sidr`] | requests for the datagram queue pair of a program that listens on a UDP port |
//! | [`local`] | the shared-memory handshake of two processes of one host |
//! | [`exs`] | greetings and control messages of EXS sockets |
//! | [`roce`] | RoCE v2: packets, the ICRC, messages of the connection manager |
//! | [`crc`] | CRC-32C |
//!
//! ```
//! use weft_wire::{ddp, rdmap::Opcode};
//!
//! let header = ddp::Header::Tagged(ddp::Tagged { opcode: Opcode::Write, last: true, stag: 0x1234, to: 64 });
//! let mut buf = [0; ddp::MAX_LEN];
//! let len = header.emit(&mut buf);
//! assert_eq!(ddp::Header::parse(&buf[..len]), Ok(header));
//! assert_eq!(header.to_string(), "Write, stag 0x00001234, to 0x40, last");
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]
#![allow(
    clippy::doc_markdown,
    reason = "STag, FetchAdd, SOCK_STREAM and the like are words of the field here"
)]

pub mod crc;
pub mod ddp;
pub mod dgram;
pub mod exs;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod local;
pub mod mpa;
mod opcode;
pub mod rdmap;
pub mod roce;
pub mod sidr;
