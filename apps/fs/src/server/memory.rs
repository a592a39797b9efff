//! Memory of buffers, and the quota.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use weft_service::Permit;
use weft_sys::memfd;

use crate::lock;

/// What all buffers together may have: bytes, where lengths count, whether their pages are there yet or not; and descriptors, because an empty buffer
/// has one too.
#[derive(Debug)]
pub(crate) struct Quota {
    pub(crate) limit: u64,
    used: Mutex<u64>,
    most_files: usize,
    files: Arc<AtomicUsize>,
}

impl Quota {
    pub(crate) fn new(limit: u64, most_files: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: Mutex::new(0),
            most_files,
            files: Arc::default(),
        })
    }

    fn file(&self) -> io::Result<Permit> {
        Permit::take(&self.files, self.most_files).ok_or_else(|| Errno::NFILE.into())
    }

    pub(crate) fn used(&self) -> u64 {
        *lock(&self.used)
    }

    fn take(&self, more: u64) -> Result<(), Errno> {
        let mut used = lock(&self.used);
        let sum = used.checked_add(more).filter(|&sum| sum <= self.limit);
        *used = sum.ok_or(Errno::NOSPC)?;
        Ok(())
    }

    /// Existing data counts, also beyond the limit.
    fn note(&self, more: u64) {
        let mut used = lock(&self.used);
        *used = used.saturating_add(more);
    }

    fn give(&self, less: u64) {
        let mut used = lock(&self.used);
        *used = used.saturating_sub(less);
    }
}

/// A memory file that grows and never shrinks: one generation of a buffer. Its quota is returned when it is no longer referenced, also by mappings.
#[derive(Debug)]
pub(crate) struct Memory {
    fd: OwnedFd,
    charged: AtomicU64,
    quota: Arc<Quota>,
    _file: Permit,
}

impl Memory {
    pub(crate) fn new(quota: &Arc<Quota>) -> io::Result<Arc<Self>> {
        let file = quota.file()?;
        Ok(Arc::new(Self {
            fd: memfd::create_growing("weft-fs")?,
            charged: AtomicU64::new(0),
            quota: Arc::clone(quota),
            _file: file,
        }))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn quota(&self) -> &Quota {
        &self.quota
    }

    /// Its length. Programs of this host that have the file make it longer without asking; that counts from here on.
    pub(crate) fn size(&self) -> u64 {
        let size = rustix::fs::fstat(&self.fd).map_or(0, |stat| stat.st_size as u64);
        let before = self.charged.fetch_max(size, Ordering::SeqCst);
        if size > before {
            self.quota.note(size - before);
        }
        size
    }

    /// Makes it at least so long. Callers serialise this for one memory.
    pub(crate) fn grow(&self, to: u64) -> Result<(), Errno> {
        let size = self.size();
        if to <= size {
            return Ok(());
        }
        if to > i64::MAX as u64 || usize::try_from(to).is_err() {
            return Err(Errno::FBIG);
        }
        self.quota.take(to - size)?;
        match memfd::grow(&self.fd, to) {
            Ok(()) => {
                let before = self.charged.fetch_max(to, Ordering::SeqCst);
                // A program of this host was quicker, and has been counted already.
                self.quota.give(before.min(to).saturating_sub(size));
                Ok(())
            }
            Err(e) => {
                self.quota.give(to - size);
                Err(errno(&e))
            }
        }
    }

    /// A description of its own for a program of this host.
    pub(crate) fn lend(&self, flags: OFlags) -> Result<OwnedFd, Errno> {
        let lent = memfd::reopen(&self.fd, flags).map_err(|e| errno(&e));
        if !matches!(lent, Err(Errno::ACCESS)) {
            return lent;
        }
        // A program that has inherited a descriptor, and knows nothing of us, has changed its mode.
        rustix::fs::fchmod(&self.fd, Mode::RUSR | Mode::WUSR)?;
        memfd::reopen(&self.fd, flags).map_err(|e| errno(&e))
    }

    /// Whether programs of this host still have a lent descriptor. True if the kernel cannot tell.
    pub(crate) fn is_lent(&self) -> bool {
        !memfd::is_ours_alone(&self.fd).unwrap_or(false)
    }

    /// Copies the first bytes of a file in, as many as this memory has.
    pub(crate) fn fill_from(&self, from: impl AsFd, len: u64) -> Result<(), Errno> {
        let mut at = 0_u64;
        while at < len {
            let most = usize::try_from((len - at).min(1 << 30)).unwrap_or(1 << 30);
            match rustix::fs::sendfile(&self.fd, &from, Some(&mut at), most) {
                // It has been cut since it was looked at: the rest reads as zeros.
                Ok(0) => return Ok(()),
                Ok(_) | Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.quota.give(self.charged.load(Ordering::SeqCst));
    }
}

/// A page whose first word is where the next appender writes.
#[derive(Debug)]
pub(crate) struct End {
    page: OwnedFd,
    mapping: memfd::Mapping,
    _file: Permit,
}

impl End {
    pub(crate) const LEN: usize = 4096;

    pub(crate) fn new(quota: &Quota) -> io::Result<Self> {
        let file = quota.file()?;
        let page = memfd::create("weft-fs-append", Self::LEN as u64)?;
        let mapping = memfd::Mapping::new(&page, 0, Self::LEN, true)?;
        Ok(Self {
            page,
            mapping,
            _file: file,
        })
    }

    pub(crate) fn page(&self) -> BorrowedFd<'_> {
        self.page.as_fd()
    }

    pub(crate) fn set(&self, to: u64) {
        self.mapping.word(0).store(to, Ordering::SeqCst);
    }

    /// Appenders do not write below this.
    pub(crate) fn raise(&self, to: u64) {
        self.mapping.word(0).fetch_max(to, Ordering::SeqCst);
    }
}

pub(crate) fn errno(e: &io::Error) -> Errno {
    Errno::from_io_error(e).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_quota_counts_what_is_there() {
        let quota = Quota::new(10_000, 2);
        let a = Memory::new(&quota).unwrap();
        let b = Memory::new(&quota).unwrap();
        Memory::new(&quota).unwrap_err();
        a.grow(6000).unwrap();
        a.grow(5000).unwrap();
        assert_eq!((a.size(), quota.used()), (6000, 6000));
        assert_eq!(b.grow(4001), Err(Errno::NOSPC));
        assert_eq!(b.grow(u64::MAX), Err(Errno::FBIG));
        b.grow(4000).unwrap();
        assert_eq!(quota.used(), 10_000);
        // A program of this host writes past the end.
        let lent = b.lend(OFlags::RDWR).unwrap();
        assert!(b.is_lent() && !a.is_lent());
        rustix::io::pwrite(&lent, b"x", 19_999).unwrap();
        assert_eq!((b.size(), quota.used()), (20_000, 26_000));
        assert_eq!(a.grow(6001), Err(Errno::NOSPC));
        assert!(rustix::fs::ftruncate(&lent, 0).is_err(), "it never shrinks");
        drop(lent);
        assert!(!b.is_lent());
        drop(b);
        assert_eq!(quota.used(), 6000);
        drop(a);
        assert_eq!(quota.used(), 0);
    }
}
