//! The tests of this crate but for those that fork, handle signals, set the environment, or look at what a process does once.

#[cfg(feature = "verbs")]
mod cm;
#[cfg(any(feature = "exs", feature = "verbs"))]
mod common;
#[cfg(feature = "exs")]
#[path = "common/sockets.rs"]
mod sockets;

mod exs_edges;
mod layout;
mod verbs_cm;
mod verbs_cm_addresses;
mod verbs_cm_datagrams;
mod verbs_layout;
