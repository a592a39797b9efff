//! Sockets over RDMA with the wire protocol of rsockets.
#![forbid(unsafe_code)]

pub mod machine;
pub mod wire;
