//! Media over RDMA (thesis chapter 6): a server that does nothing while its viewers watch.
//!
//! A viewer's request names a title; the reply grants a region: address, length, `STag` ([`wire`]). From then on the viewer fetches by RDMA
//! Reads ([`client`]): a paused viewer reads nothing, a seek reads at another offset. The server ([`server`]) keeps each movie in memory,
//! in a protection domain of its own ([`shelf`]), or blocks of those that do not fit ([`blocks`]). A live server ([`live`]) keeps a ring of fragments, which [`cut`] makes of a stream and
//! [`watch`] follows. [`http`] is a proxy for browsers and players.
//!
//! The protocol is described in docs/spec/media.md; docs/adr/0014 and 0093 say why movies are copied into memory.
#![forbid(unsafe_code)]

pub mod blocks;
pub mod boxes;
pub mod client;
pub mod cut;
pub mod desk;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
#[cfg(feature = "http")]
pub mod http;
pub mod live;
pub mod names;
pub mod rtp;
pub mod server;
pub mod shelf;
pub mod stamp;
pub mod ts;
pub mod viewers;
pub mod watch;
pub mod wire;

pub use weft_service::endpoint::port::{HTTP as HTTP_PORT, LIVE as LIVE_PORT, MEDIA as SERVE_PORT};
