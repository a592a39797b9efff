//! Registered memory: regions, `STags`, access rights, windows, and the copies in and out.
//!
//! A [`Table`] is the `STag` table of one device (RFC 5040 calls the handle *Steering Tag*, the
//! verbs *rkey* and *lkey*). [`Table::register`] takes a buffer and gives its owner a [`Region`];
//! a peer's `STag`, offset and length become a [`Span`] through [`Table::remote`], the owner's own
//! scatter/gather elements through [`Table::local`]. A span is a range whose `STag`, protection
//! domain, rights and bounds were checked; while it lives, the memory cannot go away.
//! [`SendList`] and [`RecvList`] gather spans and plain buffers for one system call.
//!
//! Processes of one host can reach each other's memory without a system call: a [`Domain`] is the exported part of a protection domain, a
//! [`Peer`] is another process's domain as seen from here, and [`Backing::Shared`] is memory that both can map.
//!
//! ```
//! use weft_mem::{Access, Backing, PdId, Table};
//! # fn main() -> Result<(), weft_mem::MemError> {
//! let table = Table::new(16);
//! let pd = PdId(1);
//! let region = table.register(pd, Backing::Owned(vec![0; 8]), 0x1000, Access::REMOTE_WRITE | Access::LOCAL_WRITE)?;
//! let span = table.remote(pd, 7, region.stag(), 0x1002, 3, Access::REMOTE_WRITE)?;
//! span.copy_in(0, b"abc");
//! drop(span);
//! let buffer = region.deregister().map_err(|(_, e)| e)?;
//! assert_eq!(buffer.unwrap(), b"\0\0abc\0\0\0");
//! # Ok(())
//! # }
//! ```
//!
//! # Safety
//!
//! Registered memory may change at any time: the owner writes it, peers write it, the kernel fills
//! it, all at once. So no `&[u8]` or `&mut [u8]` over it is ever formed; bytes move by the copies of
//! one module, whose reasons are in `docs/adr/0001-racing-copies.md`. The owner of an
//! [`Backing::Owned`] buffer gives it up when registering it and gets it back at
//! [`Region::deregister`], after the last span is gone; [`Table::register_raw`] leaves that promise to
//! its caller.
//!
//! Peers of the same host are bound by the access rules of the host's users, not by this crate: a peer that may trace this process, or has
//! the descriptors of a [`Domain`], can write at any time to all memory that it can reach. This crate guarantees that its own process stays
//! sound whatever they write ([`Peer`]), and that a correct peer has left the memory before its owner gets it back.
#![warn(missing_docs)]

pub mod checked;
mod copy;
mod domain;
mod export;
mod export_addr;
mod keys;
mod list;
mod peer;
pub mod protect;
mod raw;
mod region;
mod registered;
mod span;
mod table;

pub use copy::{load as racing_load, store as racing_store};
pub use domain::{Domain, PEER_LIMIT, Reader};
pub use export_addr::ExportAddr;
pub use keys::{KeyGuard, KeyLock, KeySpan, Keys};
pub use list::{Piece, RecvList, SendList};
pub use peer::{LastStretch, Peer, Process, Target};
pub use raw::RawMemory;
pub use region::{PendingRelease, Region};
pub use registered::Backing;
pub use span::Span;
pub use table::{Table, Window, WindowType};

bitflags::bitflags! {
    /// The allowed uses of a region or window. The owner may always read.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Access: u32 {
        /// Work requests of the owner may write it. The remote write and atomic rights need it.
        const LOCAL_WRITE = 1;
        /// Peers may write it.
        const REMOTE_WRITE = 2;
        /// Peers may read it.
        const REMOTE_READ = 4;
        /// Peers may use atomics on it (RFC 7306).
        const REMOTE_ATOMIC = 8;
        /// Windows may be bound to it.
        const MW_BIND = 16;
        /// Not a right: addresses of the region or window begin at 0.
        const ZERO_BASED = 32;
    }
}

impl Access {
    /// The rights that let peers in.
    pub(crate) const REMOTE: Access = Access::REMOTE_READ
        .union(Access::REMOTE_WRITE)
        .union(Access::REMOTE_ATOMIC);

    /// The verbs' rule: peers may not have a right to change memory that the owner does not have.
    fn needs_local_write(self) -> bool {
        self.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
    }
}

/// A protection domain's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PdId(pub u32);

/// Why memory was refused. RFC 5040 (section 4.8) has a Terminate code for each that a peer can cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemError {
    /// The `STag` is unknown, was deregistered, or belongs to an unbound window.
    #[error("invalid STag")]
    InvalidStag,
    /// The range is not inside the region or window.
    #[error("base or bounds violation")]
    Bounds,
    /// A right is missing.
    #[error("access rights violation")]
    Access,
    /// The `STag` belongs to another protection domain, or a window to another queue pair.
    #[error("STag not associated with this stream")]
    Pd,
    /// Offset and length pass the end of the 64-bit address space.
    #[error("address and length pass the end of the 64-bit address space")]
    Wrap,
    /// Windows are bound to the region, the window is bound already, or the memory is still in use.
    #[error("in use")]
    InUse,
    /// The table has its full number of regions and windows.
    #[error("the device's limit of memory regions and windows is reached (max_mr)")]
    Limit,
    /// The system has no memory left, or none that long.
    #[error("the system refuses the memory")]
    NoMemory,
    /// The system refuses to lock the memory.
    #[error("the limit of locked memory is reached (ulimit -l)")]
    LockedMemory,
    /// The system has no random numbers, without which no `STag` is made.
    #[error("the system gives no random numbers")]
    NoRandom,
    /// An atomic's address is not a multiple of 8.
    #[error("misaligned atomic")]
    Misaligned,
    /// The `STag` is a region's; only windows can be invalidated.
    #[error("STag cannot be invalidated")]
    CannotInvalidate,
    /// [`Access::REMOTE_WRITE`] or [`Access::REMOTE_ATOMIC`] without [`Access::LOCAL_WRITE`]: a peer may not change what its owner may not.
    #[error("the rights REMOTE_WRITE and REMOTE_ATOMIC need LOCAL_WRITE as well")]
    NeedsLocalWrite,
    /// An argument makes no sense (a null pointer, a bind of no bytes, a window's right that windows do not have).
    #[error(
        "an argument that can never work: a null pointer, no bytes, or a right that windows do not have"
    )]
    BadArgument,
}
