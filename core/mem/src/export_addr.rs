//! The place of memory, as peers of this host name it.

/// The arena of regions that peers may change.
pub(crate) const RW: u32 = 1;

/// The place of a byte, for a peer of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportAddr {
    /// 0: the process's address space; 1, 2, 3: the domain's arenas of memory that peers may write, may read, may not reach.
    pub space: u32,
    /// An address of the process, or an offset in the arena.
    pub addr: u64,
}
