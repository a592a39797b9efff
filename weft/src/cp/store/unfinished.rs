//! Unfinished files and their journals: files of this user alone, whoever else can write to the directory.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use indicatif::HumanBytes;
use rustix::fs::{self, AtFlags, FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::{Code, Digest, FileSpec, StoreError, errno, printable};
use crate::cp::digest::{BlockList, digest, zeros};

const JOURNAL_MAGIC: [u8; 8] = *b"weftcpj1";
const JOURNAL_HEADER: u64 = 56;
/// How often to retry a name that others take or remove meanwhile.
const TRIES: usize = 8;

/// `.NAME.weft-XXXX.SUFFIX`, NAME cut so that the whole stays a legal name.
pub(super) fn temp_name(name: &[u8], id: &Digest, suffix: &str) -> Vec<u8> {
    let mut out = vec![b'.'];
    let mut cut = name.len().min(200);
    while cut > 0 && cut < name.len() && name[cut] & 0xc0 == 0x80 {
        cut -= 1;
    }
    out.extend(&name[..cut]);
    out.extend(b".weft-");
    // A shortened name is distinguished by its digest.
    let id = u64::from_be_bytes(*id.first_chunk().expect("16 bytes"));
    let name = u64::from_be_bytes(*digest(name).first_chunk().expect("16 bytes"));
    out.extend(format!("{:016x}.{suffix}", id ^ name).bytes());
    out
}

/// A temporary name that no other transfer has.
pub(super) fn new_temp_name(name: &[u8]) -> Result<Vec<u8>, StoreError> {
    let mut id = [0; 16];
    getrandom::fill(&mut id)
        .map_err(|_| StoreError::new(Code::Io, "no randomness for a temporary name"))?;
    Ok(temp_name(name, &id, "part"))
}

/// A file of this user that no other user can have open for writing, and that has no second name.
fn is_ours(stat: &fs::Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
        && stat.st_uid == rustix::process::geteuid().as_raw()
        && stat.st_mode & 0o7077 == 0
        && stat.st_nlink == 1
}

/// Opens the file of this name if it is ours. What others have put there is removed, and a new file made.
fn open_ours(parent: &OwnedFd, name: &[u8]) -> Result<(OwnedFd, fs::Stat), StoreError> {
    let cannot = errno("cannot make a temporary file in the directory");
    let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let new = flags | OFlags::CREATE | OFlags::EXCL;
    // NONBLOCK: something else than a file must not make the open wait.
    let old = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    for _ in 0..TRIES {
        match fs::openat(parent, name, new, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST) => {}
            made => {
                let fd = made.map_err(&cannot)?;
                let stat = fs::fstat(&fd).map_err(&cannot)?;
                return Ok((fd, stat));
            }
        }
        match fs::openat(parent, name, old, Mode::empty()) {
            Ok(fd) => {
                let stat = fs::fstat(&fd).map_err(&cannot)?;
                if is_ours(&stat) {
                    return Ok((fd, stat));
                }
            }
            Err(Errno::NOENT) => continue,
            Err(e @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM)) => return Err(cannot(e)),
            Err(_) => {}
        }
        match fs::unlinkat(parent, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => {
                return Err(StoreError::new(
                    Code::BadPath,
                    format!(
                        "something else has the temporary file's name {} and cannot be removed: {e}",
                        printable(name)
                    ),
                ));
            }
        }
    }
    Err(contended())
}

fn contended() -> StoreError {
    StoreError::new(Code::Busy, "other transfers of the same file are under way")
}

/// Whether this file still has this name.
fn has_name(stat: &fs::Stat, parent: &OwnedFd, name: &[u8]) -> bool {
    fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|named| (named.st_dev, named.st_ino) == (stat.st_dev, stat.st_ino))
}

/// Opens and locks the temporary file, so that two transfers never write to one.
fn open_part(parent: &OwnedFd, name: &[u8]) -> Result<File, StoreError> {
    for _ in 0..TRIES {
        let (fd, stat) = open_ours(parent, name)?;
        match fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) => {
                return Err(StoreError::new(
                    Code::Busy,
                    "another transfer of the same file is under way",
                ));
            }
            other => other.map_err(errno("cannot lock the temporary file"))?,
        }
        // The former owner of the lock may have renamed or removed the file just before it released the lock.
        if has_name(&stat, parent, name) {
            return Ok(File::from(fd));
        }
    }
    Err(contended())
}

/// A file without a name, if the file system supports it: no other process can open it, and it is removed if it is not finished.
fn open_nameless(parent: &OwnedFd) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = fs::openat(parent, ".", flags, Mode::RUSR | Mode::WUSR).ok()?;
    Some(File::from(fd))
}

/// An unfinished file. Dropped without commit it stays for a resume if it has a journal with blocks, else
/// it is removed.
pub struct Incoming {
    pub(super) parent: Arc<OwnedFd>,
    pub(super) part: File,
    /// The temporary name, if the file has one.
    pub(super) part_name: Vec<u8>,
    named: bool,
    journal: Option<File>,
    journal_name: Vec<u8>,
    /// Digests that the journal holds and that have not been verified.
    held: Vec<Digest>,
    list: BlockList,
    pub(super) spec: FileSpec,
    block_len: u32,
    /// The digest of a whole block of zeros, once there was one.
    zeros: Option<Digest>,
    keep: bool,
}

impl Incoming {
    /// Opens the unfinished file of a source in the directory of its name, with the contents of an earlier transfer.
    pub(super) fn open(
        parent: Arc<OwnedFd>,
        spec: FileSpec,
        block_len: u32,
    ) -> Result<Self, StoreError> {
        let (_, name) = spec.path.split();
        // Only a file that can be resumed needs a name.
        let no_wait = spec.flags.no_wait;
        let nameless = no_wait.then(|| open_nameless(&parent)).flatten();
        let named = nameless.is_none();
        let (part, part_name) = if let Some(part) = nameless {
            (part, Vec::new())
        } else {
            let part_name = temp_name(name, &spec.source, "part");
            (open_part(&parent, &part_name)?, part_name)
        };
        let journal_name = if no_wait {
            Vec::new()
        } else {
            temp_name(name, &spec.source, "journal")
        };
        let mut incoming = Self {
            part,
            parent,
            part_name,
            named,
            journal: None,
            journal_name,
            held: Vec::new(),
            list: BlockList::default(),
            spec,
            block_len,
            zeros: None,
            keep: false,
        };
        if !incoming.spec.flags.no_wait {
            incoming.check_space()?;
            incoming.open_journal()?;
        }
        Ok(incoming)
    }

    /// Whether it is complete and correct; from then on it is not kept for a resume. Its end may be a hole.
    pub(super) fn check_complete(&mut self, complete: &Digest) -> Result<(), StoreError> {
        let list = std::mem::take(&mut self.list);
        self.keep = false;
        let spec = &self.spec;
        if list.blocks() != spec.size.div_ceil(u64::from(self.block_len)) {
            return Err(StoreError::new(
                Code::Corrupt,
                "the end came before all blocks",
            ));
        }
        if list.complete(spec.size) != *complete {
            return Err(StoreError::new(
                Code::Corrupt,
                "the checksum of the file does not match",
            ));
        }
        let stat = fs::fstat(&self.part).map_err(errno("cannot look at the temporary file"))?;
        if self.named && !has_name(&stat, &self.parent, &self.part_name) {
            return Err(StoreError::new(
                Code::Io,
                "somebody else has removed or replaced the temporary file",
            ));
        }
        if u64::try_from(stat.st_size) != Ok(spec.size) {
            fs::ftruncate(&self.part, spec.size).map_err(errno("cannot set the length"))?;
        }
        Ok(())
    }

    fn check_space(&self) -> Result<(), StoreError> {
        let vfs = fs::fstatvfs(&self.part).map_err(errno("cannot ask for the free space"))?;
        let stat = fs::fstat(&self.part).map_err(errno("cannot look at the temporary file"))?;
        let free = vfs.f_bavail.saturating_mul(vfs.f_frsize);
        let have = u64::try_from(stat.st_blocks)
            .unwrap_or(0)
            .saturating_mul(512);
        if free.saturating_add(have) < self.spec.room {
            return Err(StoreError::new(
                Code::NoSpace,
                format!(
                    "no space: {} are needed and {} are free",
                    HumanBytes(self.spec.room - have.min(self.spec.room)),
                    HumanBytes(free)
                ),
            ));
        }
        Ok(())
    }

    fn journal_header(&self) -> [u8; JOURNAL_HEADER as usize] {
        let mut h = [0; JOURNAL_HEADER as usize];
        h[..8].copy_from_slice(&JOURNAL_MAGIC);
        h[8..12].copy_from_slice(&self.block_len.to_be_bytes());
        h[16..24].copy_from_slice(&self.spec.size.to_be_bytes());
        h[24..32].copy_from_slice(&self.spec.meta.mtime.secs.to_be_bytes());
        h[32..36].copy_from_slice(&self.spec.meta.mtime.nanos.to_be_bytes());
        h[40..56].copy_from_slice(&self.spec.source);
        h
    }

    fn open_journal(&mut self) -> Result<(), StoreError> {
        let (fd, _) = open_ours(&self.parent, &self.journal_name)?;
        let mut journal = File::from(fd);
        let io = |e: io::Error| StoreError::io("cannot read the journal", &e);
        let mut header = Vec::new();
        (&mut journal)
            .take(JOURNAL_HEADER)
            .read_to_end(&mut header)
            .map_err(io)?;
        if header == self.journal_header() {
            let stat = fs::fstat(&self.part).map_err(errno("cannot look at the temporary file"))?;
            let whole = u64::try_from(stat.st_size).unwrap_or(0).min(self.spec.size);
            let most = if whole == self.spec.size {
                whole.div_ceil(u64::from(self.block_len))
            } else {
                whole / u64::from(self.block_len)
            };
            let mut bytes = Vec::new();
            (&mut journal)
                .take(most.saturating_mul(16))
                .read_to_end(&mut bytes)
                .map_err(io)?;
            self.held = bytes.as_chunks::<16>().0.to_vec();
        } else {
            journal.set_len(0).map_err(io)?;
            journal.seek(SeekFrom::Start(0)).map_err(io)?;
            journal
                .write_all(&self.journal_header())
                .map_err(|e| StoreError::io("cannot write the journal", &e))?;
        }
        self.keep = !self.held.is_empty();
        self.journal = Some(journal);
        Ok(())
    }

    /// The destination of the file, for messages.
    pub fn path(&self) -> String {
        self.spec.path.to_string()
    }

    /// Whether the sender waits for an OFFER.
    pub fn waits(&self) -> bool {
        self.journal.is_some()
    }

    /// Verifies the prefix that an earlier transfer left: the whole blocks that are right, and their digest.
    pub fn offer(&mut self) -> Result<(u64, Digest), StoreError> {
        let mut block = vec![0; self.block_len as usize];
        for held in std::mem::take(&mut self.held) {
            let len = self.len_of(self.list.blocks()) as usize;
            let at = self.list.blocks() * u64::from(self.block_len);
            let read = std::os::unix::fs::FileExt::read_exact_at(&self.part, &mut block[..len], at);
            if read.is_err() || digest(&block[..len]) != held {
                break;
            }
            self.list.push(&held);
        }
        Ok((self.list.blocks(), self.list.prefix()))
    }

    /// The length of block `index`.
    fn len_of(&self, index: u64) -> u32 {
        let at = index.saturating_mul(u64::from(self.block_len));
        u64::from(self.block_len).min(self.spec.size.saturating_sub(at)) as u32
    }

    /// Continues from `block`: the one of [`Self::offer`], or 0. `None` if it is neither. What the file has behind it is removed: it
    /// would show in holes.
    pub fn start(&mut self, block: u64) -> Option<Result<(), StoreError>> {
        if block == 0 {
            self.list = BlockList::default();
        } else if block != self.list.blocks() {
            return None;
        }
        self.keep = block > 0;
        let end = block.saturating_mul(u64::from(self.block_len));
        let journal = self.journal.as_mut()?;
        if let Err(e) = fs::ftruncate(&self.part, end.min(self.spec.size)) {
            return Some(Err(errno("cannot set the length")(e)));
        }
        let at = JOURNAL_HEADER + block * 16;
        Some(
            journal
                .set_len(at)
                .and_then(|()| journal.seek(SeekFrom::Start(at)).map(drop))
                .map_err(|e| StoreError::io("cannot write the journal", &e)),
        )
    }

    /// The destination of the block, if it is the next one and has the right length.
    pub fn expect(&self, index: u64, len: u32) -> Option<(BorrowedFd<'_>, u64)> {
        let next = index == self.list.blocks() && len != 0 && len == self.len_of(index);
        next.then(|| (self.part.as_fd(), index * u64::from(self.block_len)))
    }

    /// Leaves a hole of so many blocks, if the first of them is the next one.
    pub fn hole(&mut self, index: u64, blocks: u32) -> Option<Result<(), StoreError>> {
        let total = self.spec.size.div_ceil(u64::from(self.block_len));
        let end = index
            .checked_add(blocks.into())
            .filter(|&end| end <= total)?;
        if index != self.list.blocks() {
            return None;
        }
        let whole = *self.zeros.get_or_insert_with(|| zeros(self.block_len));
        let mut digests = Vec::with_capacity(blocks as usize);
        for block in index..end {
            let len = self.len_of(block);
            digests.push(if len == self.block_len {
                whole
            } else {
                zeros(len)
            });
        }
        let end = (end * u64::from(self.block_len)).min(self.spec.size);
        let extended = fs::ftruncate(&self.part, end).map_err(errno("cannot set the length"));
        Some(extended.and_then(|()| self.note(&digests)))
    }

    /// Notes that the expected block is in the file.
    pub fn written(&mut self, digest: &Digest) -> Result<(), StoreError> {
        self.note(std::slice::from_ref(digest))
    }

    fn note(&mut self, digests: &[Digest]) -> Result<(), StoreError> {
        if let Some(journal) = &mut self.journal {
            journal
                .write_all(digests.as_flattened())
                .map_err(|e| StoreError::io("cannot write the journal", &e))?;
            self.keep = true;
        }
        for digest in digests {
            self.list.push(digest);
        }
        Ok(())
    }

    /// Whether it has no name yet, not even a temporary one.
    pub(super) fn has_no_name(&self) -> bool {
        !self.named
    }

    /// Gives a file without a name this one, if nothing has it.
    pub(super) fn link_as(&self, name: &[u8]) -> Result<(), Errno> {
        let parent = &self.parent;
        match fs::linkat(&self.part, "", parent, name, AtFlags::EMPTY_PATH) {
            // Linux before 6.10 gives this to privileged processes only.
            Err(Errno::NOENT | Errno::PERM | Errno::INVAL) => {
                let path = format!("/proc/self/fd/{}", self.part.as_raw_fd());
                fs::linkat(fs::CWD, path, parent, name, AtFlags::SYMLINK_FOLLOW)
            }
            done => done,
        }
    }

    /// Gives a file without a name a temporary one that no other transfer has.
    pub(super) fn link_as_part(&mut self) -> Result<(), StoreError> {
        let (_, name) = self.spec.path.split();
        self.part_name = new_temp_name(name)?;
        self.link_as(&self.part_name)
            .map_err(errno("cannot make a temporary file in the directory"))?;
        // Removed again if it does not get its own name.
        self.named = true;
        Ok(())
    }

    /// Removes the unfinished file rather than keeping it for a resume.
    pub fn discard(mut self) {
        self.keep = false;
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if self.keep || !self.named {
            return;
        }
        if self.journal.is_some() {
            let _ = fs::unlinkat(&self.parent, &self.journal_name, AtFlags::empty());
        }
        // After a commit the temporary name does not exist, or belongs to a later transfer that holds the lock of another inode.
        if fs::fstat(&self.part).is_ok_and(|ours| has_name(&ours, &self.parent, &self.part_name)) {
            let _ = fs::unlinkat(&self.parent, &self.part_name, AtFlags::empty());
        }
    }
}
