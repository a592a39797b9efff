//! The soft RNIC: object tables, the progress engine, and the transports.
//!
//! Programs use the `weft-verbs` crate, which gives this one's objects out and adds the connection manager.
//!
//! * [`Device`], [`Pd`], [`Cq`], [`Qp`], [`Srq`], [`Mr`], [`Mw`]: the objects of verbs.
//! * `qp`: posting, the transmit and receive sides, and the end of a connection.
//! * `engine`: who makes progress, and when.
//! * `establish`: TCP connections and MPA start-up.
//! * [`stat`]: what other programs may ask about our connections, and how.
//! * `ud`: unreliable datagram queue pairs.
//! * `sidr`: finding a datagram queue pair by the UDP port that its program listens at.
//! * `transport`: TCP, UDP, and a simulated network with seeded faults.
#![forbid(unsafe_code)]

mod cq;
mod device;
mod engine;
mod establish;
mod lock;
mod meet;
mod mr;
mod pool;
mod qp;
mod sidr;
mod signal;
mod srq;
pub mod stat;
mod transport;
mod types;
mod ud;

pub use cq::{CompChannel, Cq, CqOverrun};
pub use device::{Device, DeviceBuilder, Pd, Transport};
pub use establish::{Bound, ConnParam, ConnectError, Dialed, Incoming, Listening};
pub use mr::{Mr, Mw};
pub use qp::{EndReason, Ender, Qp, QpInit};
pub use sidr::{Found, Lookup, LookupError, LookupRequest, ServicePort, Serving};
pub use signal::Signal;
pub use srq::Srq;
pub use transport::sim::{SimFaults, SimNet};
pub use transport::udp::{UdPort, UdPortCounters};
pub use types::*;
pub use ud::{UD_GROUP, UD_MTU, UdCounters, UdDest, UdInit, UdQp};
pub use weft_mem::{MemError, RawMemory};
pub use weft_sys::tcp::BindOptions;
pub use weft_wire::dgram::Grh;
