//! `weft cp`: files moved with one-sided RDMA Writes.
//!
//! The pieces, from pure to busy: [`path`], [`protocol`] (messages), [`auth`] (the key), [`digest`] (checksums),
//! [`target`], [`open_below`] and [`walk`] (what goes where), [`opener`] (opening what was found), [`source`] (what is read of it), [`attributes`] (what else it has), [`store`] (the receiver's directory), [`link`] with [`rdma`]
//! and [`tcp`] (connections), [`pace`] (a limit of the rate), [`sender`] and [`receiver`], [`fetch`] (with their roles exchanged),
//! [`session`] (the sender's connection) and [`listener`] that join them. The protocol is described in docs/spec/cp.md.

use std::time::Duration;

pub mod attributes;
pub mod auth;
pub mod digest;
pub mod fetch;
pub mod link;
pub mod listener;
pub mod open_below;
pub mod opener;
pub mod pace;
pub mod path;
pub mod protocol;
pub mod rdma;
pub mod receiver;
pub mod sender;
pub mod session;
pub mod source;
pub mod store;
pub mod target;
pub mod tcp;
pub mod walk;

pub use weft_service::endpoint::port::CP as DEFAULT_PORT;
/// The default number of slots in a ring.
pub const DEFAULT_SLOTS: u16 = 16;
/// The default length of a slot in bytes.
pub const DEFAULT_SLOT_LEN: u32 = 1 << 20;
/// The maximum length of a slot in bytes on shared memory, where there is no distance: the sender's data should still be in the cache when
/// the receiver reads it.
pub const LOCAL_SLOT_LEN: u32 = 256 << 10;
/// The time limit for each step of the start.
pub const START_PATIENCE: Duration = Duration::from_secs(10);

/// CPU time that this process has used, user and system.
pub fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(t.tv_sec).unwrap_or(0),
        u32::try_from(t.tv_nsec).unwrap_or(0),
    )
}
