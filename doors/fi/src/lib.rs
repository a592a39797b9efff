//! Reliable messages with tags over unreliable datagrams, for MPI (docs/spec/fi.md; section 2.5 of the datagram-iWARP paper).
//!
//! * [`wire`] is the codec of packets.
//! * [`peer_stream`] makes the packets to and from one peer reliable and ordered: sequence numbers, acknowledgements, time-outs, a congestion window.
//! * [`machine`] is the protocol without I/O and clock: matching, small messages in packets, large ones by rendezvous and RDMA Write-Record.
//! * `rc` has the connections to the few busiest peers.
//! * [`endpoint`] drives the machine over a datagram queue pair of `weft-verbs`.
//!
//! The C surface, a provider of libfabric, is in `doors/libfi`.
#![forbid(unsafe_code)]

mod address;
mod completion;
pub mod endpoint;
mod faults;
mod host;
pub mod machine;
mod memory;
pub mod peer_stream;
pub mod ranges;
mod rc;
pub mod wire;
