//! The soft RNIC: object tables, the progress engine, and the transports.
//!
//! Programs use the `weft-verbs` crate, which re-exports the objects of this crate and adds the connection manager.
//!
//! * [`Device`], [`Pd`], [`Cq`], [`Qp`], [`Srq`], [`Mr`], [`Mw`]: the objects of verbs.
//! * `qp`: posting, the transmit and receive sides, and the end of a connection.
//! * `engine`: which thread makes progress, and when.
//! * `establish`: TCP connections and MPA start-up.
//! * [`stat`]: the statistics of connections that other programs may query.
//! * `ext`: calls for layers that drive their queues themselves; programs need none of them.
//! * `tls_env`: the TLS settings in the environment.
//! * `ud`: unreliable datagram queue pairs.
//! * `roce`: queue pairs of `RoCE` v2.
//! * `sidr`: finding a datagram queue pair by the UDP port on which its program listens.
//! * `transport`: TCP, TLS, shared memory between processes of one host, and a simulated network with seeded faults.
//! * `meet`, `neighbours`: the handshake of two processes of one host for shared memory, and the state that a device shares with the other
//!   process.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod comp_counters;
mod cq;
mod device;
mod doorbell;
mod engine;
mod errors;
mod establish;
pub mod ext;
mod lock;
mod meet;
mod memory;
mod mr;
mod names;
mod neighbours;
mod pending_dereg;
mod pool;
mod port_lease;
mod qp;
mod queues;
mod report;
mod roce;
mod sidr;
mod signal;
mod srq;
pub mod stat;
#[cfg(test)]
mod testing;
mod timer;
mod tls_env;
mod transport;
mod types;
mod ud;
mod warnings;
mod xrc;

pub use comp_counters::{CompCounters, Counter, Work};
pub use cq::{CompChannel, Cq, EventWait};
pub use device::{Device, DeviceBuilder, Pd, Transport};
pub use doorbell::Doorbell;
pub use errors::CqOverrun;
pub use establish::{Bound, ConnParam, ConnectError, Dialed, Incoming, Listening};
pub use mr::{Mr, Mw};
pub use pending_dereg::PendingDereg;
pub use qp::{EndReason, Ender, Qp, QpInit};
pub use roce::{
    ROCE_REJECT_DATA, ROCE_REPLY_DATA, ROCE_REQUEST_DATA, RoceChange, RoceConn, RoceConnect,
    RoceCounters, RoceEnd, RoceEvent, RoceFault, RoceFaults, RoceInit, RoceListening, RoceLookup,
    RoceLookupRequest, RocePath, RocePort, RoceQp, RoceRequest, RoceSend, RoceServing, RoceTerms,
    RoceUdCounters, RoceUdInit, RoceUdQp, roce_mtu,
};
pub use sidr::{Found, Lookup, LookupError, LookupRequest, ServicePort, Serving};
pub use signal::Signal;
pub use srq::Srq;
pub use transport::sim::{SimFaults, SimNet};
pub use types::*;
pub use ud::{
    UD_GROUP, UD_MAX_MESSAGE, UD_MAX_SEGMENT, UD_MTU, UdCounters, UdDest, UdError, UdErrorKind,
    UdFault, UdInit, UdLocalPeer, UdPort, UdPortCounters, UdQp, UdReliable, ValidityMap,
    WriteRecord,
};
pub use weft_mem::{MemError, RawMemory, protect};
pub use weft_sys::PerProcess;
pub use weft_sys::diag::tcp_peer_uid;
/// The variables of the environment.
pub use weft_sys::settings;
pub use weft_sys::tcp::BindOptions;
pub use weft_tls as tls;
pub use weft_wire::dgram::Grh;
pub use weft_wire::roce::PORT as ROCE_PORT;
pub use xrc::XrcDomain;
