//! Peers for RDMA programs that we did not write, and the tests against them.
//!
//! The modules speak the protocols of other people's tools, over [`weft_verbs`] or, for RoCE, over the protocol machines; the tests in `tests/` run them against
//! those tools in a guest with the kernel's siw driver, and have tshark look at what goes over the wire.
#![forbid(unsafe_code)]

pub mod guest;
pub mod perftest;
pub mod roce;
pub mod rping;
