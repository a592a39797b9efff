//! The remote descriptors and the buffers behind them.
//!
//! An open remote buffer has a *placeholder*: a sealed memory file named [`MARK`] that holds its path and flags. The kernel keeps the file offset and the access
//! mode in its description, so `dup`, `fork` and `exec` share them as they do for any file. A process's other state of a placeholder (the
//! connection, the bytes read ahead) is in [`Table`]. A process that has only inherited the placeholder makes it again from that.
//!
//! # Safety
//!
//! System calls that take numbers and pointers to values that outlive them.

use std::collections::HashMap;
use std::ffi::CStr;
use std::fmt::Write as _;
use std::fs::File as StdFile;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use libc::c_int;
use weft_fs::name::{Endpoint, Name, RemotePath};
use weft_fs::wire::{Attr, Flags};
use weft_fs::{Client, Errno, Error, File, OpenOptions, Settings};
pub(crate) use weft_verbs::ext::lock;

use weft_sys::{
    next::{errno, set_errno},
    real,
};

/// The name of placeholders.
const MARK: &CStr = c"weft-fs-remote";
/// Beginning of a placeholder's text.
const MAGIC: &str = "weft-fs placeholder";

/// Kind of a descriptor, for the check that every call makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Nothing of ours.
    Plain = 0,
    /// A placeholder of a buffer.
    Remote = 1,
    /// The memory file of a buffer of this host.
    Local = 2,
    Folder = 3,
    /// The library's own.
    Own = 4,
}

/// Descriptors from here on are never ours.
const MOST: usize = 65_536;
static KINDS: [AtomicU8; MOST] = [const { AtomicU8::new(0) }; MOST];

/// Returns the kind of a descriptor.
#[inline]
pub(crate) fn kind(fd: c_int) -> Kind {
    let cell = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd));
    match cell.map_or(0, |cell| cell.load(Ordering::Acquire)) {
        1 => Kind::Remote,
        2 => Kind::Local,
        3 => Kind::Folder,
        4 => Kind::Own,
        _ => Kind::Plain,
    }
}

fn set_kind(fd: c_int, kind: Kind) {
    if let Some(cell) = usize::try_from(fd).ok().and_then(|fd| KINDS.get(fd)) {
        cell.store(kind as u8, Ordering::Release);
    }
}

/// An open remote buffer; descriptors that were duplicated share it.
pub(crate) struct Entry {
    pub(crate) file: File,
    pub(crate) flags: Flags,
    /// Held while the offset is read, used and set. True if it is to be behind what was appended last, whose place is not known before it is sent.
    pub(crate) offset: Mutex<bool>,
}

impl Entry {
    /// Holds the offset of a descriptor of it, which is as it is with any file from here on.
    pub(crate) fn offset(&self, fd: c_int) -> Result<MutexGuard<'_, bool>, Error> {
        let mut offset = lock(&self.offset);
        if std::mem::take(&mut *offset) {
            let end = self.file.stat()?.size as libc::off_t;
            // SAFETY: numbers.
            unsafe {
                real!(lseek64(c_int, libc::off_t, c_int) -> libc::off_t)(fd, end, libc::SEEK_SET)
            };
        }
        Ok(offset)
    }
}

/// The path of an open buffer or folder.
#[derive(Clone)]
struct Place {
    path: RemotePath,
    /// The buffer's number; a new buffer of the same name has another one.
    ino: u64,
    /// Of a buffer of this host: its rights, as far as this process knows. A file of the served folder has its own.
    mode: Option<u16>,
}

/// This process's state.
#[derive(Default)]
pub(crate) struct Table {
    clients: Mutex<HashMap<Endpoint, Client>>,
    remote: Mutex<HashMap<c_int, Arc<Entry>>>,
    /// The paths of all descriptors, as renames of this process have made them.
    paths: Mutex<HashMap<c_int, Place>>,
    /// The working directory, if it is on a server.
    pub(crate) cwd: Mutex<Option<RemotePath>>,
}

static TABLE: AtomicPtr<Table> = AtomicPtr::new(std::ptr::null_mut());

pub(crate) fn table() -> &'static Table {
    let mut now = TABLE.load(Ordering::Acquire);
    if now.is_null() {
        let fresh = Box::into_raw(Box::<Table>::default());
        match TABLE.compare_exchange(now, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => now = fresh,
            Err(other) => {
                // SAFETY: made above, and no other thread has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                now = other;
            }
        }
    }
    // SAFETY: tables are never freed.
    unsafe { &*now }
}

/// The process whose memory this is.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// This process owns its memory.
pub(crate) fn own() {
    // SAFETY: no arguments.
    OWNER.store(unsafe { libc::getpid() }, Ordering::Release);
}

/// Returns true if this is the child of `vfork`, which has its own descriptors and its parent's memory: the table must not note what it closes and duplicates.
pub(crate) fn is_guest() -> bool {
    // SAFETY: no arguments.
    OWNER.load(Ordering::Acquire) != unsafe { libc::getpid() }
}

/// A child is to see what its parent has written.
pub(crate) extern "C" fn before_fork() {
    table().flush();
}

/// Starts with an empty table in the child of a fork: the connections are the parent's, and threads that hold locks do not exist. Its placeholders stay.
pub(crate) extern "C" fn after_fork() {
    own();
    let old = TABLE.load(Ordering::Acquire);
    if old.is_null() {
        return;
    }
    // SAFETY: never freed. The lock may be held by a thread that is not here: then the paths are lost.
    let paths = unsafe { &*old }.paths.try_lock();
    let paths = paths.map_or_else(|_| HashMap::new(), |paths| paths.clone());
    let fresh = Table {
        paths: Mutex::new(paths),
        ..Table::default()
    };
    TABLE.store(Box::into_raw(Box::new(fresh)), Ordering::Release);
}

fn open_fds() -> Vec<c_int> {
    let Ok(dir) = std::fs::read_dir("/proc/self/fd") else {
        return Vec::new();
    };
    dir.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

impl Table {
    /// The connection to a server.
    pub(crate) fn client(&self, endpoint: &Endpoint) -> Result<Client, Error> {
        let mut clients = lock(&self.clients);
        if let Some(client) = clients.get(endpoint) {
            return Ok(client.clone());
        }
        let before = open_fds();
        let settings = Settings::new(weft_fs::keys::from_env()?);
        let client = Client::connect(endpoint, settings)?;
        // The program must not close the descriptors of the connection.
        for fd in open_fds() {
            if !before.contains(&fd) && kind(fd) == Kind::Plain {
                set_kind(fd, Kind::Own);
            }
        }
        clients.insert(endpoint.clone(), client.clone());
        Ok(client)
    }

    /// Returns the entry of a remote descriptor.
    ///
    /// # Errors
    /// `EBADF`, `ESTALE` if the name belongs to another buffer now, and those of opening it again.
    pub(crate) fn entry(&self, fd: c_int) -> Result<Arc<Entry>, Error> {
        if let Some(entry) = lock(&self.remote).get(&fd) {
            return Ok(Arc::clone(entry));
        }
        let was = read_placeholder(fd).ok_or(Errno::BADF)?;
        let path = self.path(fd).ok_or(Errno::BADF)?;
        let fresh = Flags::CREATE.with(Flags::EXCLUSIVE).with(Flags::TRUNCATE);
        let fresh = fresh.with(Flags::PRIVATE);
        let entry = self
            .open(&path, was.flags.without(fresh))
            .map_err(Error::of_reopening)?;
        if entry.file.ino() != was.place.ino {
            return Err(Errno::STALE.into());
        }
        let entry = Arc::new(entry);
        Ok(Arc::clone(lock(&self.remote).entry(fd).or_insert(entry)))
    }

    fn open(&self, path: &RemotePath, flags: Flags) -> Result<Entry, Error> {
        let client = self.client(&path.endpoint)?;
        let options = OpenOptions {
            flags,
            size: path.size,
        };
        Ok(Entry {
            file: client.open(&path.name, options)?,
            flags,
            offset: Mutex::default(),
        })
    }

    /// Opens a remote buffer; `how` has the flags of `open(2)`.
    pub(crate) fn open_remote(
        &self,
        path: &RemotePath,
        flags: Flags,
        how: c_int,
    ) -> Result<c_int, Error> {
        let entry = self.open(path, flags)?;
        let ino = entry.file.ino();
        let fd = make_placeholder(path, flags, ino, how)?;
        lock(&self.remote).insert(fd, Arc::new(entry));
        self.note(fd, path, ino, Kind::Remote);
        Ok(fd)
    }

    pub(crate) fn open_folder(&self, path: &RemotePath, how: c_int) -> Result<c_int, Error> {
        let fd = make_placeholder(path, Flags(0), 0, how)?;
        self.note(fd, path, 0, Kind::Folder);
        Ok(fd)
    }

    fn note(&self, fd: c_int, path: &RemotePath, ino: u64, kind: Kind) {
        let path = path.clone();
        let mode = None;
        lock(&self.paths).insert(fd, Place { path, ino, mode });
        set_kind(fd, kind);
    }

    /// Notes a buffer, or a file of the served folder, of this host.
    pub(crate) fn note_local(&self, fd: c_int, path: &RemotePath, attr: &Attr) {
        if usize::try_from(fd).is_ok_and(|fd| fd < MOST) {
            self.note(fd, path, attr.ino, Kind::Local);
            if attr.writable {
                self.note_mode(&path.endpoint, attr.ino, attr.mode);
            }
        }
    }

    /// Notes the rights of a buffer of this host for all its descriptors.
    pub(crate) fn note_mode(&self, endpoint: &Endpoint, ino: u64, mode: u16) {
        for place in lock(&self.paths).values_mut() {
            if place.ino == ino && place.path.endpoint == *endpoint {
                place.mode = Some(mode);
            }
        }
    }

    /// The rights of a descriptor's buffer of this host.
    pub(crate) fn mode(&self, fd: c_int) -> Option<u16> {
        lock(&self.paths).get(&fd)?.mode
    }

    /// Returns the path of a descriptor.
    pub(crate) fn path(&self, fd: c_int) -> Option<RemotePath> {
        self.place(fd).map(|place| place.path)
    }

    fn place(&self, fd: c_int) -> Option<Place> {
        if let Some(place) = lock(&self.paths).get(&fd) {
            return Some(place.clone());
        }
        match kind(fd) {
            Kind::Remote | Kind::Folder => read_placeholder(fd).map(|was| was.place),
            _ => None,
        }
    }

    /// Returns the path of a buffer of this host, and its number.
    pub(crate) fn local(&self, fd: c_int) -> Option<(RemotePath, u64)> {
        self.place(fd).map(|place| (place.path, place.ino))
    }

    /// Descriptors of a buffer of this host.
    pub(crate) fn locals(&self, endpoint: &Endpoint, ino: u64) -> Vec<c_int> {
        let paths = lock(&self.paths);
        let same = |(fd, of): (&c_int, &Place)| {
            let same = of.ino == ino && of.path.endpoint == *endpoint;
            (kind(*fd) == Kind::Local && same).then_some(*fd)
        };
        paths.iter().filter_map(same).collect()
    }

    /// Follows a rename: descriptors below the old name are opened again under the new one.
    pub(crate) fn renamed(&self, from: &RemotePath, to: &Name) {
        for (fd, place) in &mut *lock(&self.paths) {
            if place.path.endpoint != from.endpoint {
                continue;
            }
            let Some(Ok(new)) = place.path.name.renamed(&from.name, to) else {
                continue;
            };
            if let Some(entry) = lock(&self.remote).get(fd) {
                entry.file.renamed(&new);
            }
            place.path.name = new;
        }
    }

    /// `to` is another name for `from`.
    pub(crate) fn duplicated(&self, from: c_int, to: c_int) {
        let what = kind(from);
        if is_guest() || matches!(what, Kind::Plain | Kind::Own) {
            return;
        }
        let entry = lock(&self.remote).get(&from).cloned();
        if let Some(entry) = entry {
            lock(&self.remote).insert(to, entry);
        }
        if let Some(place) = self.place(from) {
            lock(&self.paths).insert(to, place);
        }
        set_kind(to, what);
    }

    /// A descriptor is about to be closed, or to become another one. Returns the result of its last close.
    pub(crate) fn closed(&self, fd: c_int) -> Result<(), Error> {
        let what = kind(fd);
        if what == Kind::Plain || is_guest() {
            return Ok(());
        }
        set_kind(fd, Kind::Plain);
        lock(&self.paths).remove(&fd);
        let entry = lock(&self.remote).remove(&fd);
        match entry.map(Arc::try_unwrap) {
            Some(Ok(entry)) => entry.file.close(),
            // Another descriptor shares the entry; as with any file, the writes through this one must not be lost.
            Some(Err(shared)) if shared.flags.has(Flags::WRITE) => shared.file.sync(),
            _ => Ok(()),
        }
    }

    /// Sends buffered writes to the servers; the next write, `fsync` or `close` reports what fails.
    pub(crate) fn flush(&self) {
        // A `vfork` child does not have the descriptors that the connections need.
        if is_guest() {
            return;
        }
        let entries: Vec<_> = lock(&self.remote)
            .iter()
            .map(|(&fd, entry)| (fd, Arc::clone(entry)))
            .collect();
        for (fd, entry) in entries {
            if entry.flags.has(Flags::WRITE) {
                entry.file.sync_in_background();
                // The kernel has it, for the child too.
                drop(entry.offset(fd));
            }
        }
    }

    /// Descriptors of a range that are ours in any way.
    pub(crate) fn ours(first: usize, last: usize) -> Vec<(c_int, Kind)> {
        (first..=last.min(MOST - 1))
            .filter_map(|fd| {
                let fd = fd as c_int;
                let what = kind(fd);
                (what != Kind::Plain).then_some((fd, what))
            })
            .collect()
    }
}

/// Looks for placeholders that were inherited.
pub(crate) fn adopt() {
    for fd in open_fds() {
        let Ok(link) = std::fs::read_link(format!("/proc/self/fd/{fd}")) else {
            continue;
        };
        let link = link.to_string_lossy();
        if link.starts_with("/memfd:weft-fs-remote")
            && let Some(was) = read_placeholder(fd)
        {
            let folder = was.flags.0 == 0;
            set_kind(fd, if folder { Kind::Folder } else { Kind::Remote });
            // This process opened it, and has executed another program since: no other process may have it open.
            if !folder && was.maker == std::process::id() {
                let _ = table().entry(fd);
            }
        }
    }
}

fn os() -> Errno {
    Errno::from_raw_os_error(errno())
}

/// Makes a placeholder with the access mode, `O_APPEND` and `O_CLOEXEC` of `how`.
fn make_placeholder(path: &RemotePath, flags: Flags, ino: u64, how: c_int) -> Result<c_int, Errno> {
    let seal = libc::MFD_ALLOW_SEALING | libc::MFD_CLOEXEC;
    // SAFETY: a C string and flags.
    let fd = unsafe { libc::memfd_create(MARK.as_ptr(), seal) };
    if fd < 0 {
        return Err(os());
    }
    // SAFETY: just made, and nothing else uses it.
    let mut file = unsafe { StdFile::from_raw_fd(fd) };
    let mut name = String::new();
    for byte in path.name.as_bytes() {
        let _ = write!(name, "{byte:02x}");
    }
    let text = format!(
        "{MAGIC}\n{} {} {} {} {ino}\n{} {name}\n/rdma/{}/{}: this program was run without libweft-fs.so\n",
        flags.0,
        path.size,
        path.endpoint.port,
        std::process::id(),
        path.endpoint.host,
        path.endpoint,
        path.name
    );
    let written = file.write_all(text.as_bytes());
    written.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    let seals = libc::F_SEAL_WRITE | libc::F_SEAL_GROW | libc::F_SEAL_SHRINK | libc::F_SEAL_SEAL;
    // SAFETY: numbers. A program that writes without this library is to fail.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    let kept = how & (libc::O_ACCMODE | libc::O_APPEND | libc::O_CLOEXEC | libc::O_NONBLOCK);
    let link = format!("/proc/self/fd/{}\0", file.as_raw_fd());
    let open = real!(open(*const libc::c_char, c_int, libc::c_uint) -> c_int);
    // SAFETY: a C string and flags.
    let fd = unsafe { open(link.as_ptr().cast(), kept, 0) };
    if fd < 0 {
        return Err(os());
    }
    if fd as usize >= MOST {
        // SAFETY: just opened.
        drop(unsafe { StdFile::from_raw_fd(fd) });
        return Err(Errno::MFILE);
    }
    Ok(fd)
}

struct Placeholder {
    /// As it was opened.
    place: Place,
    flags: Flags,
    /// The process that made it.
    maker: u32,
}

fn read_placeholder(fd: c_int) -> Option<Placeholder> {
    let errno = errno();
    let text = read_text(fd);
    set_errno(errno);
    let text = text?;
    let mut lines = text.lines();
    if lines.next()? != MAGIC {
        return None;
    }
    let mut numbers = lines.next()?.split(' ');
    let flags = Flags(numbers.next()?.parse().ok()?);
    let size = numbers.next()?.parse().ok()?;
    let port = numbers.next()?.parse().ok()?;
    let maker = numbers.next()?.parse().ok()?;
    let ino = numbers.next()?.parse().ok()?;
    let (host, hex) = lines.next()?.split_once(' ')?;
    let name: Option<Vec<u8>> = (0..hex.len() / 2)
        .map(|i| u8::from_str_radix(hex.get(2 * i..2 * i + 2)?, 16).ok())
        .collect();
    let path = RemotePath {
        endpoint: Endpoint {
            host: host.into(),
            port,
        },
        name: weft_fs::name::Name::new(&name?).ok()?,
        size,
    };
    Some(Placeholder {
        place: Place {
            path,
            ino,
            mode: None,
        },
        flags,
        maker,
    })
}

fn read_text(fd: c_int) -> Option<String> {
    // A description of our own: the offset of the other one is the program's, and it may be for writing only.
    let mut file = StdFile::open(format!("/proc/self/fd/{fd}")).ok()?;
    file.seek(SeekFrom::Start(0)).ok()?;
    let mut text = String::new();
    file.take(8192).read_to_string(&mut text).ok()?;
    Some(text)
}

/// Releases the ownership of a descriptor and returns its number.
pub(crate) fn number(fd: std::os::fd::OwnedFd) -> c_int {
    fd.into_raw_fd()
}
