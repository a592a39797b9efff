//! `weft fs mount`: a server as a file system, by FUSE without the C library.
//!
//! The kernel keeps pages of a file while it is open, as network file systems do: what others write is seen when it is opened again. All opens of a file share
//! one handle at the server, so they see one another's writes and truncations at once.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, KernelConfig, LockOwner, MountOption, OpenFlags, RenameFlags, ReplyAttr,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, Request, Session, SessionUnmounter, TimeOrNow, WriteFlags,
};
use weft_fs::name::Name;
use weft_fs::wire::{Attr, Flags};
use weft_fs::{Client, Error, File, OpenOptions};
use weft_service::lock;

/// How long the kernel believes names and attributes.
const TTL: Duration = Duration::from_millis(100);
/// The longest write in one request.
const MAX_WRITE: u32 = 1 << 20;
/// Threads that serve the kernel.
const THREADS: usize = 2;
/// The number of the root.
const ROOT: u64 = 1;

fn errno(e: &Error) -> Errno {
    Errno::from_i32(e.errno().raw_os_error())
}

/// Names that the kernel has numbers for.
struct Names {
    of: HashMap<u64, (Name, u64)>,
    numbers: HashMap<Name, u64>,
    next: u64,
}

impl Names {
    fn new() -> Self {
        Self {
            of: HashMap::from([(ROOT, (Name::default(), 1))]),
            numbers: HashMap::from([(Name::default(), ROOT)]),
            next: ROOT,
        }
    }

    fn name(&self, ino: INodeNo) -> Result<Name, Error> {
        let known = self.of.get(&ino.0).map(|(name, _)| name.clone());
        known.ok_or_else(|| weft_fs::Errno::STALE.into())
    }

    /// The number of a name, which the kernel is told once more.
    fn number(&mut self, name: &Name) -> u64 {
        let number = if let Some(&number) = self.numbers.get(name) {
            number
        } else {
            self.next += 1;
            self.numbers.insert(name.clone(), self.next);
            self.next
        };
        self.of.entry(number).or_insert((name.clone(), 0)).1 += 1;
        number
    }

    fn forget(&mut self, ino: u64, times: u64) {
        if ino == ROOT {
            return;
        }
        if let Some((name, count)) = self.of.get_mut(&ino) {
            *count = count.saturating_sub(times);
            if *count == 0 {
                if self.numbers.get(name) == Some(&ino) {
                    self.numbers.remove(name);
                }
                self.of.remove(&ino);
            }
        }
    }

    /// The name is gone; its number may still be in use.
    fn unlinked(&mut self, name: &Name) {
        self.numbers.remove(name);
    }

    fn renamed(&mut self, from: &Name, to: &Name) {
        self.numbers.remove(to);
        let moved: Vec<_> = self
            .numbers
            .iter()
            .filter_map(|(name, &number)| Some((name.clone(), name.renamed(from, to)?, number)))
            .collect();
        for (name, new, number) in moved {
            self.numbers.remove(&name);
            if let Ok(new) = new {
                self.numbers.insert(new.clone(), number);
                if let Some(known) = self.of.get_mut(&number) {
                    known.0 = new;
                }
            }
        }
    }
}

/// A server as a file system.
struct Mounted {
    client: Client,
    names: Mutex<Names>,
    /// One for each file that is open, by its number.
    files: Mutex<HashMap<u64, Weak<File>>>,
    handles: Mutex<(HashMap<u64, Arc<File>>, u64)>,
    user: (u32, u32),
    /// Other users of this host reach it too.
    others: bool,
}

impl Mounted {
    fn attr(&self, ino: u64, attr: &Attr) -> FileAttr {
        let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(attr.mtime);
        FileAttr {
            ino: INodeNo(ino),
            size: attr.size,
            blocks: attr.size.div_ceil(512),
            atime: time,
            mtime: time,
            ctime: time,
            crtime: time,
            kind: if attr.dir {
                FileType::Directory
            } else {
                FileType::RegularFile
            },
            // Executable: what a file is for is not known.
            perm: if attr.dir {
                0o755
            } else {
                self.perm(attr) | 0o111
            },
            nlink: if attr.dir { 2 } else { 1 },
            uid: self.user.0,
            gid: self.user.1,
            rdev: 0,
            blksize: 1 << 20,
            flags: 0,
        }
    }

    /// The mounter's class is what its key may do: the kernel is not to refuse what the server allows. Other users of the host, for whom the mounter's key
    /// speaks, never write.
    fn perm(&self, attr: &Attr) -> u16 {
        let others = if self.others { 0o055 } else { 0o077 };
        attr.rights << 6 | attr.mode & others
    }

    fn name(&self, ino: INodeNo) -> Result<Name, Error> {
        lock(&self.names).name(ino)
    }

    fn child(&self, parent: INodeNo, name: &OsStr) -> Result<Name, Error> {
        Ok(self.name(parent)?.join(name.as_bytes())?)
    }

    /// The file that is open under a number.
    fn opened(&self, ino: u64) -> Option<Arc<File>> {
        lock(&self.files).get(&ino).and_then(Weak::upgrade)
    }

    fn handle(&self, fh: FileHandle) -> Result<Arc<File>, Error> {
        let file = lock(&self.handles).0.get(&fh.0).cloned();
        file.ok_or_else(|| weft_fs::Errno::BADF.into())
    }

    fn entry(&self, name: &Name) -> Result<FileAttr, Error> {
        let attr = self.client.stat(name)?;
        let ino = lock(&self.names).number(name);
        // What is gathered counts.
        let attr = match self.opened(ino) {
            Some(file) => file.stat()?,
            None => attr,
        };
        Ok(self.attr(ino, &attr))
    }

    /// Opens a file, or shares it with those who have it open: for reading and writing where the server lets us, so that they can.
    fn open_shared(&self, ino: u64, name: &Name, flags: Flags) -> Result<u64, Error> {
        let made = Flags::CREATE.with(Flags::EXCLUSIVE).with(Flags::PRIVATE);
        let mut files = lock(&self.files);
        let known = files.get(&ino).and_then(Weak::upgrade);
        let file = match known {
            Some(file) if file.flags().has(flags.without(made)) => {
                // It may have been opened before a change of the rights.
                if !file.stat()?.allows(flags) {
                    return Err(weft_fs::Errno::ACCESS.into());
                }
                file
            }
            _ => {
                let both = flags.with(Flags::READ).with(Flags::WRITE);
                let options = |flags| OpenOptions { flags, size: 0 };
                let opened = match self.client.open(name, options(both)) {
                    Err(Error::Errno(weft_fs::Errno::ROFS | weft_fs::Errno::ACCESS)) => {
                        self.client.open(name, options(flags.without(made)))?
                    }
                    opened => opened?,
                };
                let file = Arc::new(opened);
                files.insert(ino, Arc::downgrade(&file));
                file
            }
        };
        files.retain(|_, file| file.strong_count() > 0);
        drop(files);
        let mut handles = lock(&self.handles);
        handles.1 += 1;
        let fh = handles.1;
        handles.0.insert(fh, file);
        Ok(fh)
    }

    fn stat(&self, ino: INodeNo, fh: Option<FileHandle>) -> Result<FileAttr, Error> {
        let open = match fh {
            Some(fh) => Some(self.handle(fh)?),
            None => self.opened(ino.0),
        };
        let attr = match open {
            Some(file) => file.stat()?,
            None => self.client.stat(&self.name(ino)?)?,
        };
        Ok(self.attr(ino.0, &attr))
    }

    fn resize(&self, ino: INodeNo, fh: Option<FileHandle>, size: u64) -> Result<(), Error> {
        let open = match fh {
            Some(fh) => Some(self.handle(fh)?),
            None => self.opened(ino.0),
        };
        // By name, the rights are those of now, and a handle that another program has opened need not have them.
        if fh.is_none() && !self.client.stat(&self.name(ino)?)?.allows(Flags::WRITE) {
            return Err(weft_fs::Errno::ACCESS.into());
        }
        if let Some(file) = open.filter(|file| fh.is_some() || file.flags().has(Flags::WRITE)) {
            return file.truncate(size);
        }
        let options = OpenOptions {
            flags: Flags::WRITE,
            size: 0,
        };
        let file = self.client.open(&self.name(ino)?, options)?;
        file.truncate(size)?;
        file.close()
    }

    /// Changes the rights of a file: of the one that is open, whatever its name is by now.
    fn chmod(&self, ino: INodeNo, mode: u32) -> Result<(), Error> {
        let open = self.opened(ino.0);
        let mut mode = mode & 0o666;
        if self.others {
            // These were hidden, and not taken away by who sets what he saw.
            let now = match &open {
                Some(file) => file.stat()?,
                None => self.client.stat(&self.name(ino)?)?,
            };
            mode |= u32::from(now.mode) & 0o022;
        }
        match open {
            Some(file) => file.chmod(mode),
            None => self.client.chmod(&self.name(ino)?, mode),
        }
    }

    fn make(
        &self,
        parent: INodeNo,
        name: &OsStr,
        flags: i32,
        mode: u32,
    ) -> Result<(FileAttr, u64), Error> {
        let name = self.child(parent, name)?;
        let mut wanted = Flags::WRITE.with(Flags::CREATE);
        if flags & rustix::fs::OFlags::EXCL.bits().cast_signed() != 0 {
            wanted = wanted.with(Flags::EXCLUSIVE);
        }
        if mode & OTHERS == 0 {
            wanted = wanted.with(Flags::PRIVATE);
        }
        let ino = lock(&self.names).number(&name);
        match self.open_shared(ino, &name, wanted) {
            Ok(fh) => {
                let attr = self.handle(FileHandle(fh))?.stat()?;
                Ok((self.attr(ino, &attr), fh))
            }
            Err(e) => {
                lock(&self.names).forget(ino, 1);
                Err(e)
            }
        }
    }

    fn list(&self, ino: INodeNo, offset: u64, reply: &mut ReplyDirectory) -> Result<(), Error> {
        let folder = self.name(ino)?;
        let entries = self.client.list(&folder)?;
        let own =
            [(".", true), ("..", true)].map(|(name, dir)| (name.as_bytes().to_vec(), dir, ino.0));
        let entries = entries
            .into_iter()
            .map(|entry| (entry.name, entry.attr.dir, entry.attr.ino));
        let all = own.into_iter().chain(entries);
        for (at, (name, dir, number)) in all.enumerate().skip(offset as usize) {
            let kind = if dir {
                FileType::Directory
            } else {
                FileType::RegularFile
            };
            let name = OsStr::from_bytes(&name);
            if reply.add(INodeNo(number.max(1)), at as u64 + 1, kind, name) {
                break;
            }
        }
        Ok(())
    }
}

/// The bits of a mode that are not the owner's.
const OTHERS: u32 = 0o077;

/// Replies with what came out.
macro_rules! answer {
    ($reply:ident, $done:expr, $value:pat => $ok:expr) => {
        match $done {
            Ok($value) => $ok,
            Err(e) => $reply.error(errno(&e)),
        }
    };
}

impl Filesystem for Mounted {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // As much as the kernel takes.
        let _ = config.set_max_write(MAX_WRITE);
        let _ = config.set_max_readahead(MAX_WRITE);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.child(parent, name).and_then(|name| self.entry(&name));
        answer!(reply, found, attr => reply.entry(&TTL, &attr, Generation(0)));
    }

    fn forget(&self, _: &Request, ino: INodeNo, times: u64) {
        lock(&self.names).forget(ino.0, times);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        answer!(reply, self.stat(ino, fh), attr => reply.attr(&TTL, &attr));
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        // Owners and times are the server's: what would change them is taken, and changes nothing.
        let done = size
            .map_or(Ok(()), |size| self.resize(ino, fh, size))
            .and_then(|()| mode.map_or(Ok(()), |mode| self.chmod(ino, mode)))
            .and_then(|()| self.stat(ino, fh));
        answer!(reply, done, attr => reply.attr(&TTL, &attr));
    }

    fn mkdir(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let made = self.child(parent, name).and_then(|name| {
            self.client.mkdir(&name)?;
            self.entry(&name)
        });
        answer!(reply, made, attr => reply.entry(&TTL, &attr, Generation(0)));
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let gone = self.child(parent, name).and_then(|name| {
            self.client.unlink(&name)?;
            lock(&self.names).unlinked(&name);
            Ok(())
        });
        answer!(reply, gone, () => reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let gone = self.child(parent, name).and_then(|name| {
            self.client.rmdir(&name)?;
            lock(&self.names).unlinked(&name);
            Ok(())
        });
        answer!(reply, gone, () => reply.ok());
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if !flags.is_empty() {
            return reply.error(Errno::EINVAL);
        }
        let done = self.child(parent, name).and_then(|from| {
            let to = self.child(newparent, newname)?;
            self.client.rename(&from, &to)?;
            let mut names = lock(&self.names);
            names.renamed(&from, &to);
            let number = names.numbers.get(&to).copied();
            drop(names);
            if let Some(file) = number.and_then(|number| self.opened(number)) {
                file.renamed(&to);
            }
            Ok(())
        });
        answer!(reply, done, () => reply.ok());
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let wanted = match flags.acc_mode() {
            fuser::OpenAccMode::O_RDONLY => Flags::READ,
            fuser::OpenAccMode::O_WRONLY => Flags::WRITE,
            fuser::OpenAccMode::O_RDWR => Flags::READ.with(Flags::WRITE),
        };
        let opened = self
            .name(ino)
            .and_then(|name| self.open_shared(ino.0, &name, wanted));
        answer!(reply, opened, fh => reply.opened(FileHandle(fh), FopenFlags::empty()));
    }

    fn access(&self, _: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let checked = self.name(ino).and_then(|name| {
            let attr = self.client.stat(&name)?;
            let wants = [
                (AccessFlags::R_OK, Flags::READ),
                (AccessFlags::W_OK, Flags::WRITE),
            ];
            let lacks =
                |(how, flag): (AccessFlags, Flags)| mask.contains(how) && !attr.allows(flag);
            if !attr.dir && wants.into_iter().any(lacks) {
                return Err(weft_fs::Errno::ACCESS.into());
            }
            Ok(())
        });
        answer!(reply, checked, () => reply.ok());
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        answer!(reply, self.make(parent, name, flags, mode), (attr, fh) => {
            reply.created(&TTL, &attr, Generation(0), FileHandle(fh), FopenFlags::empty());
        });
    }

    fn read(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        thread_local! {
            // Kept, so that it is not cleared for each request.
            static BYTES: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
        }
        BYTES.with_borrow_mut(|bytes| {
            let size = size as usize;
            if bytes.len() < size {
                bytes.resize(size, 0);
            }
            let read = self
                .handle(fh)
                .and_then(|file| file.pread(&mut bytes[..size], offset));
            answer!(reply, read, n => reply.data(&bytes[..n]));
        });
    }

    fn write(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let written = self.handle(fh).and_then(|file| file.pwrite(data, offset));
        answer!(reply, written, n => reply.written(n as u32));
    }

    fn flush(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let done = self.handle(fh).and_then(|file| settle(&file));
        answer!(reply, done, () => reply.ok());
    }

    fn fsync(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let done = self.handle(fh).and_then(|file| settle(&file));
        answer!(reply, done, () => reply.ok());
    }

    fn release(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let file = lock(&self.handles).0.remove(&fh.0);
        drop(file);
        reply.ok();
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        answer!(reply, self.list(ino, offset, &mut reply), () => reply.ok());
    }

    fn statfs(&self, _: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        answer!(reply, self.client.usage(), (quota, used) => {
            let free = quota.saturating_sub(used) / 4096;
            reply.statfs(quota / 4096, free, free, 0, 0, 4096, 255, 4096);
        });
    }

    fn fallocate(
        &self,
        _: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        if mode != 0 {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let done = self
            .handle(fh)
            .and_then(|file| file.grow(offset.saturating_add(length)));
        answer!(reply, done, () => reply.ok());
    }
}

fn settle(file: &File) -> Result<(), Error> {
    if file.flags().has(Flags::WRITE) {
        file.sync()
    } else {
        Ok(())
    }
}

/// A mounted server.
pub(crate) struct Mount {
    session: Session<Mounted>,
    unmounter: SessionUnmounter,
}

/// Mounts a server on a directory; `others`: for all users of this host, not its mounter alone.
///
/// # Errors
/// Those of opening `/dev/fuse` and of `mount(2)` or `fusermount3`.
pub(crate) fn mount(client: Client, dir: &Path, others: bool) -> io::Result<Mount> {
    let mut config = fuser::Config::default();
    config.mount_options = vec![
        MountOption::FSName(format!("/rdma/{}", client.endpoint())),
        MountOption::Subtype("weft".into()),
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoAtime,
    ];
    config.n_threads = Some(THREADS);
    if others {
        config.acl = fuser::SessionACL::All;
        config.mount_options.push(MountOption::DefaultPermissions);
    }
    let user = (
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let mounted = Mounted {
        client,
        names: Mutex::new(Names::new()),
        files: Mutex::default(),
        handles: Mutex::default(),
        user,
        others,
    };
    let mut session = Session::new(mounted, dir, &config)?;
    let unmounter = session.unmount_callable();
    Ok(Mount { session, unmounter })
}

/// Takes a mount that is in use out of the tree of files; it ends with its last open file.
///
/// # Errors
/// Those of `umount2(2)`.
pub(crate) fn detach(dir: &Path) -> io::Result<()> {
    Ok(rustix::mount::unmount(
        dir,
        rustix::mount::UnmountFlags::DETACH,
    )?)
}

/// Has the kernel read further ahead than its 128 KiB, where we may say so (as root). The file system has to be served already.
pub(crate) fn tune(dir: &Path) {
    let Ok(stat) = rustix::fs::stat(dir) else {
        return;
    };
    let (major, minor) = (
        rustix::fs::major(stat.st_dev),
        rustix::fs::minor(stat.st_dev),
    );
    let knob = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    if let Err(e) = std::fs::write(&knob, (MAX_WRITE / 1024).to_string()) {
        tracing::debug!("{knob}: {e}");
    }
}

impl Mount {
    /// What ends it, also from another thread.
    pub(crate) fn split(self) -> (impl FnOnce() -> io::Result<()>, SessionUnmounter) {
        let session = self.session;
        (move || session.run(), self.unmounter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name {
        Name::new(text.as_bytes()).unwrap()
    }

    #[test]
    fn numbers_follow_their_names() {
        let mut names = Names::new();
        let (a, b) = (names.number(&name("d/a")), names.number(&name("d")));
        assert_eq!(names.number(&name("d/a")), a);
        names.renamed(&name("d"), &name("e"));
        assert_eq!(names.name(INodeNo(a)).unwrap(), name("e/a"));
        assert_eq!(names.number(&name("e")), b);
        names.unlinked(&name("e/a"));
        let again = names.number(&name("e/a"));
        assert_ne!(again, a, "another file");
        assert_eq!(names.name(INodeNo(a)).unwrap(), name("e/a"));
        names.forget(a, 1);
        names.forget(a, 1);
        assert!(names.name(INodeNo(a)).is_err());
        assert_eq!(names.number(&name("e/a")), again);
    }
}
