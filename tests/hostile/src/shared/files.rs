//! Files of memory: those that a meeting needs, and forged ones.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// The exported table's length.
pub const TABLE: u64 = 4_198_400;
/// An arena's length.
pub const ARENA: u64 = 1 << 46;
/// Seals that a file needs so that it cannot shrink.
pub const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// A file of memory with a beginning, a length and seals of one's choice.
pub fn memory(begins: &[u8], len: u64, seals: SealFlags) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("hostile", flags)?);
    file.set_len(len)?;
    file.write_all_at(begins, 0)?;
    if !seals.is_empty() {
        fcntl_add_seals(&file, seals)?;
    }
    Ok(file)
}

/// The same file, for reading only.
pub fn read_only(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The head of a segment with rings of this length.
pub fn segment_head(version: u32, ring: u32) -> Vec<u8> {
    let mut head = b"weftring".to_vec();
    head.extend(version.to_ne_bytes());
    head.extend(ring.to_ne_bytes());
    head
}

/// A segment as it should be.
pub fn segment(ring: u32) -> io::Result<File> {
    memory(&segment_head(1, ring), 4096 + 2 * u64::from(ring), SEALS)
}

/// A page as an engine's liveness: its word says that this thread holds it.
pub fn liveness() -> io::Result<File> {
    let holder = rustix::thread::gettid().as_raw_nonzero().get();
    memory(&holder.to_ne_bytes(), 4096, SEALS | SealFlags::FUTURE_WRITE)
}

/// The head of an exported table of this domain.
pub fn table_head(domain: &[u8; 16]) -> Vec<u8> {
    let mut head = b"weftPD\0\x01".to_vec();
    head.extend(1_u64.to_ne_bytes());
    head.extend(domain);
    head
}

/// One entry of an exported table.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Generation; odd while it is being written.
    pub generation: u64,
    pub stag: u32,
    /// The one queue pair of ours that it is for; 0: any.
    pub qp: u32,
    /// The address of its first byte.
    pub base: u64,
    pub len: u64,
    pub rights: u32,
    pub space: u32,
    /// Where it is in the space.
    pub at: u64,
}

impl Entry {
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.generation.to_ne_bytes().to_vec();
        out.extend(self.stag.to_ne_bytes());
        out.extend(self.qp.to_ne_bytes());
        out.extend(self.base.to_ne_bytes());
        out.extend(self.len.to_ne_bytes());
        out.extend(self.rights.to_ne_bytes());
        out.extend(self.space.to_ne_bytes());
        out.extend(self.at.to_ne_bytes());
        out.extend([0; 16]);
        out
    }

    /// Where in the table: the first entry of its bucket.
    pub fn place(&self) -> u64 {
        4096 + u64::from((self.stag >> 8) & 0x1fff) * 8 * 64
    }
}

/// What goes beside a Join or an Attach.
#[derive(Debug)]
pub struct Files {
    /// Segment (of a Join).
    pub segment: Option<File>,
    pub liveness: OwnedFd,
    pub table: OwnedFd,
    /// Arenas: to write, to read, and perhaps the private one.
    pub arenas: Vec<OwnedFd>,
    /// The table and the first arena once more: for ourselves.
    pub own: (File, File),
}

impl Files {
    /// As they should be, but for a table that we can go on writing to.
    pub fn new(ring: u32, domain: &[u8; 16]) -> io::Result<Files> {
        let table = memory(&table_head(domain), TABLE, SEALS)?;
        let rw = memory(&[], ARENA, SEALS)?;
        let ro = memory(&[], ARENA, SEALS)?;
        let private = memory(&[], ARENA, SEALS)?;
        Ok(Files {
            segment: Some(segment(ring)?),
            liveness: liveness()?.into(),
            table: read_only(&table)?.into(),
            arenas: vec![
                rw.try_clone()?.into(),
                read_only(&ro)?.into(),
                read_only(&private)?.into(),
            ],
            own: (table, rw),
        })
    }

    /// In the order of the page.
    pub fn all(&self) -> Vec<std::os::fd::BorrowedFd<'_>> {
        let mut all = Vec::new();
        all.extend(self.segment.iter().map(AsFd::as_fd));
        all.push(self.liveness.as_fd());
        all.push(self.table.as_fd());
        all.extend(self.arenas.iter().map(AsFd::as_fd));
        all
    }
}
