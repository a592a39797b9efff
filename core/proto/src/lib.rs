//! Sans-io protocol machines: MPA start-up, RDMAP streams, and messages in datagrams.
//!
//! Nothing here opens a socket, reads a clock or writes memory. The machines take bytes or parsed headers and return actions for the
//! caller: bytes to send, payload to place, payload to fetch, completed work. Everything from a peer is treated as hostile: it is checked
//! before it changes any state, and no peer can make a machine hold more than its configured limits.
//!
//! * [`mpa`]: the two sides of the connection start-up (RFC 5044 section 7.1, RFC 6581).
//! * [`dgram`]: messages in datagrams: segmentation and pacing.
//! * [`rdmap`]: one DDP/RDMAP stream, both directions (RFC 5040, RFC 5041, RFC 7306).
//! * [`roce`]: both directions of a connected queue pair of RoCE v2.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod dgram;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod mpa;
pub mod rdmap;
pub mod roce;
