//! Hostile peers, as programs of their own.
//!
//! The program `hostile` attacks a listening victim: as a peer on the network ([`network`]), which has nothing but TCP, and as a peer of the
//! same host and user ([`local`]), which also has the meeting protocol of docs/spec/local.md. A victim that speaks RoCE v2 has attackers of its own
//! ([`roce`]). Nothing here knows a crate of weft: what crosses the wire is made from the RFCs, InfiniBand's specification and the pages of docs/spec,
//! so that no mistake is made twice.
//!
//! The victims, the honest witnesses beside them and the judge are the test program tests/suite.
#![forbid(unsafe_code)]
#![allow(
    clippy::doc_markdown,
    reason = "STag, FetchAdd and the like are words of the field here"
)]

pub mod dialled;
pub mod frames;
pub mod local;
pub mod meeting;
pub mod network;
pub mod peer;
pub mod report;
pub mod rng;
pub mod roce;
pub mod shared;
pub mod target;
