//! Reading folders: a `DIR` of ours for remote ones.
//!
//! # Safety
//!
//! See the crate's. A `DIR` of ours is a [`Folder`] that [`FOLDERS`] knows; every other one is the C library's.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_long, c_void};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use libc::{DIR, dirent64};
use weft_fs::name::RemotePath;
use weft_fs::wire::{Entry, Op, Request};
use weft_fs::{Errno, Error, name::Name};

use weft_sys::{interpose, next::set_errno, real};

use crate::table::{Kind, kind, lock, table};
use crate::{fail, link, resolve};

struct Folder {
    fd: c_int,
    /// Its parent cannot be named.
    is_root: bool,
    state: Mutex<Reading>,
}

struct Reading {
    entries: Vec<Entry>,
    next: usize,
    /// The entry that `readdir` returns a pointer to.
    current: Box<dirent64>,
}

static FOLDERS: LazyLock<Mutex<HashMap<usize, Arc<Folder>>>> = LazyLock::new(Mutex::default);
/// Number of open folders: at 0 no `DIR` is looked up.
static OPEN: AtomicUsize = AtomicUsize::new(0);

fn ours(dir: *mut DIR) -> Option<Arc<Folder>> {
    if OPEN.load(Ordering::Acquire) == 0 {
        return None;
    }
    lock(&FOLDERS).get(&dir.addr()).cloned()
}

/// All entries, as reported by the server on this host or another one.
fn entries(path: &RemotePath) -> Result<Vec<Entry>, Error> {
    let mut all: Vec<Entry> = Vec::new();
    if link::is_servers(path) {
        return Ok(all);
    }
    loop {
        let after = match all.last() {
            Some(entry) => Name::new(&entry.name)?,
            None => Name::default(),
        };
        let request = Request {
            other: after,
            ..Request::named(Op::List, &path.name)
        };
        let Some((reply, _)) = link::here(path, &request)? else {
            return table().client(&path.endpoint)?.list(&path.name);
        };
        if reply.entries.is_empty() {
            return Ok(all);
        }
        all.extend(reply.entries);
    }
}

fn begin(fd: c_int) -> *mut DIR {
    let found = table()
        .path(fd)
        .ok_or(Errno::BADF.into())
        .and_then(|path| Ok((path.name.is_root(), entries(&path)?)));
    let (is_root, entries) = match found {
        Ok(found) => found,
        Err(e) => {
            fail(&e);
            return std::ptr::null_mut();
        }
    };
    let folder = Arc::new(Folder {
        fd,
        is_root,
        state: Mutex::new(Reading {
            entries,
            next: 0,
            // SAFETY: numbers, for which zero is a value.
            current: Box::new(unsafe { MaybeUninit::zeroed().assume_init() }),
        }),
    });
    let key = Arc::as_ptr(&folder);
    lock(&FOLDERS).insert(key.addr(), folder);
    OPEN.fetch_add(1, Ordering::AcqRel);
    key.cast_mut().cast()
}

pub(crate) fn open(path: Result<RemotePath, Errno>) -> *mut DIR {
    let how = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
    let fd = crate::open::open_path(path, how, 0);
    if fd < 0 {
        return std::ptr::null_mut();
    }
    let dir = begin(fd);
    if dir.is_null() {
        // SAFETY: opened above.
        unsafe { crate::open::close(fd) };
    }
    dir
}

fn next(folder: &Folder) -> *mut dirent64 {
    let mut reading = lock(&folder.state);
    let reading = &mut *reading;
    if reading.next == 1 && folder.is_root {
        reading.next = 2;
    }
    let at = reading.next;
    let (name, is_dir, ino): (&[u8], bool, u64) = match at {
        0 => (b".", true, 1),
        1 => (b"..", true, 1),
        _ => match reading.entries.get(at - 2) {
            Some(entry) => (&entry.name, entry.attr.dir, entry.attr.ino),
            None => return std::ptr::null_mut(),
        },
    };
    let out = &mut *reading.current;
    out.d_ino = ino;
    out.d_off = at as i64 + 1;
    out.d_reclen = size_of::<dirent64>() as u16;
    out.d_type = if is_dir { libc::DT_DIR } else { libc::DT_REG };
    let len = name.len().min(out.d_name.len() - 1);
    for (to, from) in out.d_name.iter_mut().zip(&name[..len]) {
        *to = *from as c_char;
    }
    out.d_name[len] = 0;
    reading.next += 1;
    out
}

interpose! {

    "C"
    fn opendir(path: *const c_char) -> *mut DIR {
        match resolve(libc::AT_FDCWD, path) {
            Some(path) => open(path),
            None => real!(opendir(*const c_char) -> *mut DIR)(path),
        }
    }
    fn fdopendir(fd: c_int) -> *mut DIR {
        if kind(fd) == Kind::Folder {
            return begin(fd);
        }
        real!(fdopendir(c_int) -> *mut DIR)(fd)
    }
    fn readdir(dir: *mut DIR) -> *mut dirent64 {
        match ours(dir) {
            Some(folder) => next(&folder),
            None => real!(readdir(*mut DIR) -> *mut dirent64)(dir),
        }
    }
    fn readdir64(dir: *mut DIR) -> *mut dirent64 {
        match ours(dir) {
            Some(folder) => next(&folder),
            None => real!(readdir64(*mut DIR) -> *mut dirent64)(dir),
        }
    }
    fn closedir(dir: *mut DIR) -> c_int {
        if OPEN.load(Ordering::Acquire) > 0 {
            let folder = lock(&FOLDERS).remove(&dir.addr());
            if let Some(folder) = folder {
                OPEN.fetch_sub(1, Ordering::AcqRel);
                // The folder's own.
                return crate::open::close(folder.fd);
            }
        }
        real!(closedir(*mut DIR) -> c_int)(dir)
    }
    fn dirfd(dir: *mut DIR) -> c_int {
        match ours(dir) {
            Some(folder) => folder.fd,
            None => real!(dirfd(*mut DIR) -> c_int)(dir),
        }
    }
    fn rewinddir(dir: *mut DIR) -> () {
        match ours(dir) {
            Some(folder) => lock(&folder.state).next = 0,
            None => real!(rewinddir(*mut DIR) -> ())(dir),
        }
    }
    fn telldir(dir: *mut DIR) -> c_long {
        match ours(dir) {
            Some(folder) => lock(&folder.state).next as c_long,
            None => real!(telldir(*mut DIR) -> c_long)(dir),
        }
    }
    fn seekdir(dir: *mut DIR, to: c_long) -> () {
        match ours(dir) {
            Some(folder) => lock(&folder.state).next = usize::try_from(to).unwrap_or(0),
            None => real!(seekdir(*mut DIR, c_long) -> ())(dir, to),
        }
    }
    fn getdents64(fd: c_int, to: *mut c_void, len: usize) -> isize {
        if kind(fd) == Kind::Folder {
            set_errno(libc::ENOTSUP);
            return -1;
        }
        real!(getdents64(c_int, *mut c_void, usize) -> isize)(fd, to, len)
    }
}
