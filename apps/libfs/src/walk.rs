//! Lists of folders and of trees: `glob`, `scandir`, `fts` and `nftw`, whose folders the C library reads inside itself.
//!
//! # Safety
//!
//! See the crate's. A `FTS` of ours is a [`Walk`] that [`WALKS`] knows; its entries are freed by nobody else.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_long, c_short, c_ushort, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};

use libc::{DIR, dirent64, stat as Stat};

use weft_sys::{
    interpose,
    next::{errno, set_errno},
    real,
};

use crate::open::remote;
use crate::table::lock;
use crate::{bytes, cwd, dir, resolve, stat};

type Order = Option<unsafe extern "C" fn(*const c_void, *const c_void) -> c_int>;

/// The functions that `glob(3)` reads folders with, and what it returns.
#[repr(C)]
pub(crate) struct Glob {
    count: usize,
    paths: *mut *mut c_char,
    offset: usize,
    flags: c_int,
    close: Option<unsafe extern "C" fn(*mut c_void)>,
    read: Option<unsafe extern "C" fn(*mut c_void) -> *mut dirent64>,
    open: Option<unsafe extern "C" fn(*const c_char) -> *mut c_void>,
    lstat: Option<unsafe extern "C" fn(*const c_char, *mut Stat) -> c_int>,
    stat: Option<unsafe extern "C" fn(*const c_char, *mut Stat) -> c_int>,
}

unsafe extern "C" fn glob_close(dir: *mut c_void) {
    // SAFETY: opened by `glob_open`; this and the next two.
    unsafe { dir::closedir(dir.cast()) };
}

unsafe extern "C" fn glob_read(dir: *mut c_void) -> *mut dirent64 {
    // SAFETY: as above.
    unsafe { dir::readdir64(dir.cast()) }
}

unsafe extern "C" fn glob_open(path: *const c_char) -> *mut c_void {
    // SAFETY: the C library's promise.
    unsafe { dir::opendir(path).cast() }
}

/// Lets `glob` read folders through this library, where its pattern can be remote and the program has no functions of its own.
///
/// # Safety
/// As for `glob(3)`.
unsafe fn by_ours(pattern: *const c_char, how: c_int, found: *mut Glob) -> c_int {
    const ALTERNATIVE: c_int = 1 << 9;
    // SAFETY: the caller's promise.
    let pattern = unsafe { bytes(pattern) };
    // Within braces it does not begin with it.
    let prefix = weft_fs::name::PREFIX;
    let is_remote =
        cwd::remote().is_some() || pattern.windows(prefix.len()).any(|part| part == prefix);
    if how & ALTERNATIVE != 0 || !is_remote {
        return how;
    }
    // SAFETY: the caller's promise.
    unsafe {
        (*found).close = Some(glob_close);
        (*found).read = Some(glob_read);
        (*found).open = Some(glob_open);
        (*found).lstat = Some(stat::lstat64);
        (*found).stat = Some(stat::stat64);
    }
    how | ALTERNATIVE
}

/// Memory of zeros that `free` frees. Without any the program ends, as it does where Rust allocates.
fn memory(len: usize) -> *mut c_void {
    // SAFETY: numbers.
    let memory = unsafe { libc::calloc(1, len) };
    if memory.is_null() {
        std::process::abort();
    }
    memory
}

/// Reads the folder into a list that the program frees.
///
/// # Safety
/// As for `scandir(3)`.
unsafe fn scan(
    dir: *mut DIR,
    list: *mut *mut *mut dirent64,
    select: Option<unsafe extern "C" fn(*const dirent64) -> c_int>,
    order: Order,
) -> c_int {
    if dir.is_null() {
        return -1;
    }
    let mut all: Vec<*mut dirent64> = Vec::new();
    // SAFETY: a folder that is open, entries that are valid until the next one, and copies of their used length.
    unsafe {
        loop {
            let entry = dir::readdir64(dir);
            if entry.is_null() {
                break;
            }
            if select.is_some_and(|select| select(entry) == 0) {
                continue;
            }
            let len = bytes((&raw const (*entry).d_name).cast()).len();
            let used = std::mem::offset_of!(dirent64, d_name) + len + 1;
            let copy = memory(used).cast::<dirent64>();
            copy.cast::<u8>()
                .copy_from_nonoverlapping(entry.cast(), used);
            (&raw mut (*copy).d_reclen).write(used as c_ushort);
            all.push(copy);
        }
        dir::closedir(dir);
        sort(&mut all, order);
        let room = memory(all.len().max(1) * size_of::<*mut dirent64>());
        let room = room.cast::<*mut dirent64>();
        room.copy_from_nonoverlapping(all.as_ptr(), all.len());
        list.write(room);
    }
    all.len() as c_int
}

/// # Safety
/// The order is one of such pointers.
unsafe fn sort<T>(all: &mut [*mut T], order: Order) {
    let size = size_of::<*mut T>();
    if order.is_some() {
        // SAFETY: the caller's promise.
        unsafe { libc::qsort(all.as_mut_ptr().cast(), all.len(), size, order) };
    }
}

/// An entry, as in fts.h. Its name follows it in memory.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Entry {
    cycle: *mut Entry,
    parent: *mut Entry,
    link: *mut Entry,
    number: c_long,
    pointer: *mut c_void,
    access_path: *mut c_char,
    path: *mut c_char,
    errno: c_int,
    symfd: c_int,
    path_len: c_ushort,
    name_len: c_ushort,
    ino: u64,
    dev: u64,
    nlink: u64,
    level: c_short,
    info: c_ushort,
    flags: c_ushort,
    instruction: c_ushort,
    stat: *mut Stat,
    name: [c_char; 1],
}

const COMFOLLOW: c_int = 1;
const LOGICAL: c_int = 2;
const XDEV: c_int = 0x40;

const DIRECTORY: c_ushort = 1;
const CYCLE: c_ushort = 2;
const UNREADABLE: c_ushort = 4;
const DIRECTORY_END: c_ushort = 6;
const FILE: c_ushort = 8;
const NO_STAT: c_ushort = 10;
const SYMLINK: c_ushort = 12;
const DANGLING: c_ushort = 13;

const AGAIN: c_ushort = 1;
const FOLLOW: c_ushort = 2;
const NO_INSTRUCTION: c_ushort = 3;
const SKIP: c_ushort = 4;

/// Entries of one folder, and the number of the one whose turn it is.
#[derive(Default)]
struct Level {
    entries: Vec<*mut Entry>,
    at: usize,
}

impl Drop for Level {
    fn drop(&mut self) {
        for &entry in &self.entries {
            // SAFETY: made by `make`, and the program does not use entries of a folder that it has left.
            unsafe { free(entry) };
        }
    }
}

/// # Safety
/// Made by [`make`].
unsafe fn free(entry: *mut Entry) {
    // SAFETY: the caller's promise.
    unsafe {
        libc::free((*entry).path.cast());
        libc::free((*entry).stat.cast());
        libc::free(entry.cast());
    }
}

/// A walk through trees.
pub(crate) struct Walk {
    options: c_int,
    order: Order,
    /// The parent of the first entries.
    top: *mut Entry,
    levels: Vec<Level>,
    /// The folder that was left last: the program may still look at it.
    left: Option<Level>,
    /// Has returned an entry.
    begun: bool,
    /// Entries below the present one, if they have been asked for.
    below: Option<Level>,
}

/// An entry, with its attributes.
fn make(path: &[u8], name: &[u8], parent: *mut Entry, level: c_short, follow: bool) -> *mut Entry {
    // SAFETY: memory of the entry's and the name's length, all of which is written.
    unsafe {
        let entry = memory(size_of::<Entry>() + name.len()).cast::<Entry>();
        (*entry).path = crate::copied(path);
        (*entry).access_path = (*entry).path;
        (*entry).parent = parent;
        (*entry).level = level;
        (*entry).instruction = NO_INSTRUCTION;
        (*entry).path_len = path.len() as c_ushort;
        (*entry).name_len = name.len() as c_ushort;
        let to = (&raw mut (*entry).name).cast::<u8>();
        to.copy_from_nonoverlapping(name.as_ptr(), name.len());
        (*entry).stat = memory(size_of::<Stat>()).cast();
        look(entry, follow);
        entry
    }
}

/// Finds out what an entry is.
///
/// # Safety
/// One of [`make`].
unsafe fn look(entry: *mut Entry, follow: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let (path, to) = ((*entry).path, (*entry).stat);
        let mut rc = if follow {
            stat::stat(path, to)
        } else {
            stat::lstat(path, to)
        };
        let mut dangling = false;
        if rc < 0 && follow {
            rc = stat::lstat(path, to);
            dangling = rc == 0;
        }
        if rc < 0 {
            ((*entry).info, (*entry).errno) = (NO_STAT, errno());
            return;
        }
        ((*entry).ino, (*entry).dev) = ((*to).st_ino, (*to).st_dev);
        (*entry).nlink = (*to).st_nlink;
        (*entry).info = match (*to).st_mode & libc::S_IFMT {
            libc::S_IFDIR => DIRECTORY,
            libc::S_IFREG => FILE,
            libc::S_IFLNK if dangling => DANGLING,
            libc::S_IFLNK => SYMLINK,
            _ => 3,
        };
        let mut above = (*entry).parent;
        while (*entry).info == DIRECTORY && !above.is_null() {
            if ((*above).ino, (*above).dev) == ((*entry).ino, (*entry).dev) {
                ((*entry).info, (*entry).cycle) = (CYCLE, above);
            }
            above = (*above).parent;
        }
    }
}

impl Walk {
    fn new(paths: &[&[u8]], options: c_int, order: Order) -> Self {
        let top = make(b"", b"", null_mut(), -1, false);
        let follow = options & (LOGICAL | COMFOLLOW) != 0;
        let roots = paths.iter().map(|path| {
            let trimmed = path.strip_suffix(b"/").unwrap_or(path);
            let name = trimmed.rsplit(|&b| b == b'/').next().unwrap_or(trimmed);
            make(path, name, top, 0, follow)
        });
        let mut walk = Self {
            options,
            order,
            top,
            levels: Vec::new(),
            left: None,
            begun: false,
            below: None,
        };
        let roots = walk.ordered(roots.collect());
        walk.levels.push(roots);
        walk
    }

    fn ordered(&self, mut entries: Vec<*mut Entry>) -> Level {
        // SAFETY: the program's order is one of entries, and these are all of one folder.
        unsafe {
            sort(&mut entries, self.order);
            for pair in entries.windows(2) {
                (*pair[0]).link = pair[1];
            }
        }
        Level { entries, at: 0 }
    }

    /// The entry whose turn it is.
    fn current(&self) -> Option<*mut Entry> {
        let level = self.levels.last()?;
        level.entries.get(level.at).copied()
    }

    /// Reads a folder.
    ///
    /// # Safety
    /// An entry of this walk.
    unsafe fn read(&self, folder: *mut Entry) -> Result<Level, c_int> {
        let mut entries = Vec::new();
        // SAFETY: the caller's promise; a folder that is open, and entries that are valid until the next one.
        unsafe {
            let dir = dir::opendir((*folder).path);
            if dir.is_null() {
                return Err(errno());
            }
            loop {
                let entry = dir::readdir64(dir);
                if entry.is_null() {
                    break;
                }
                let name = bytes((&raw const (*entry).d_name).cast());
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let path = bytes((*folder).path);
                let path = [path.strip_suffix(b"/").unwrap_or(path), b"/", name].concat();
                let follow = self.options & LOGICAL != 0;
                entries.push(make(&path, name, folder, (*folder).level + 1, follow));
            }
            dir::closedir(dir);
        }
        Ok(self.ordered(entries))
    }

    /// The next entry, folders before and after what is in them; null at the end.
    fn next(&mut self) -> *mut Entry {
        self.left = None;
        if !std::mem::replace(&mut self.begun, true) {
            return self.current().unwrap_or(null_mut());
        }
        let Some(entry) = self.current() else {
            return null_mut();
        };
        // SAFETY: an entry of this walk.
        unsafe {
            let instruction = std::mem::replace(&mut (*entry).instruction, NO_INSTRUCTION);
            match instruction {
                AGAIN => {
                    look(entry, self.options & LOGICAL != 0);
                    return entry;
                }
                FOLLOW if matches!((*entry).info, SYMLINK | DANGLING) => {
                    look(entry, true);
                    return entry;
                }
                _ => {}
            }
            if (*entry).info == DIRECTORY {
                let elsewhere = self.options & XDEV != 0 && (*entry).dev != (*self.root()).dev;
                if instruction == SKIP || elsewhere {
                    self.below = None;
                    (*entry).info = DIRECTORY_END;
                    return entry;
                }
                let below = self.below.take();
                match below.map_or_else(|| self.read(entry), Ok) {
                    Ok(level) => self.levels.push(level),
                    Err(errno) => {
                        ((*entry).info, (*entry).errno) = (UNREADABLE, errno);
                        return entry;
                    }
                }
            } else if let Some(level) = self.levels.last_mut() {
                level.at += 1;
            }
            if let Some(entry) = self.current() {
                return entry;
            }
            if self.levels.len() == 1 {
                return null_mut();
            }
            self.left = self.levels.pop();
            let folder = self.current().unwrap_or(null_mut());
            if !folder.is_null() {
                (*folder).info = DIRECTORY_END;
            }
            folder
        }
    }

    /// The first entry that the present one is in or is.
    fn root(&self) -> *mut Entry {
        let level = &self.levels[0];
        level.entries[level.at]
    }

    /// Entries below the present one.
    fn children(&mut self) -> *mut Entry {
        let first = |level: &Level| level.entries.first().copied().unwrap_or(null_mut());
        set_errno(0);
        let Some(entry) = self.current() else {
            return null_mut();
        };
        if !self.begun {
            return entry;
        }
        // SAFETY: an entry of this walk.
        if unsafe { (*entry).info } != DIRECTORY {
            return null_mut();
        }
        if self.below.is_none() {
            // SAFETY: as above.
            match unsafe { self.read(entry) } {
                Ok(level) => self.below = Some(level),
                Err(errno) => {
                    set_errno(errno);
                    return null_mut();
                }
            }
        }
        self.below.as_ref().map_or(null_mut(), first)
    }
}

impl Drop for Walk {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        unsafe { free(self.top) };
    }
}

/// Walks that are under way.
static WALKS: LazyLock<Mutex<HashSet<usize>>> = LazyLock::new(Mutex::default);
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// # Safety
/// Of `fts_open`.
unsafe fn ours<'a>(walk: *mut c_void) -> Option<&'a mut Walk> {
    if OPEN.load(Ordering::Acquire) == 0 || !lock(&WALKS).contains(&walk.addr()) {
        return None;
    }
    // SAFETY: made by `begin`, and a program uses it in one thread at a time.
    Some(unsafe { &mut *walk.cast::<Walk>() })
}

/// Begins a walk, if one of the paths is remote.
///
/// # Safety
/// As for `fts_open(3)`.
unsafe fn begin(paths: *const *const c_char, options: c_int, order: Order) -> Option<*mut c_void> {
    let mut all: Vec<&[u8]> = Vec::new();
    let mut remote = false;
    // SAFETY: the caller's promise.
    unsafe {
        let mut at = paths;
        while !(*at).is_null() {
            remote |= resolve(libc::AT_FDCWD, *at).is_some();
            all.push(bytes(*at));
            at = at.add(1);
        }
    }
    if !remote {
        return None;
    }
    let walk = Box::into_raw(Box::new(Walk::new(&all, options, order)));
    lock(&WALKS).insert(walk.addr());
    OPEN.fetch_add(1, Ordering::AcqRel);
    Some(walk.cast())
}

macro_rules! walks {
    ($($open:ident, $read:ident, $children:ident, $set:ident, $close:ident;)*) => { interpose! {"C" $(
        fn $open(paths: *const *const c_char, options: c_int, order: Order) -> *mut c_void {
            begin(paths, options, order).unwrap_or_else(|| {
                real!($open(*const *const c_char, c_int, Order) -> *mut c_void)(paths, options, order)
            })
        }
        fn $read(walk: *mut c_void) -> *mut Entry {
            let Some(walk) = ours(walk) else {
                return real!($read(*mut c_void) -> *mut Entry)(walk);
            };
            let entry = walk.next();
            if entry.is_null() {
                set_errno(0);
            }
            entry
        }
        fn $children(walk: *mut c_void, how: c_int) -> *mut Entry {
            match ours(walk) {
                Some(walk) => walk.children(),
                None => real!($children(*mut c_void, c_int) -> *mut Entry)(walk, how),
            }
        }
        fn $set(walk: *mut c_void, entry: *mut Entry, instruction: c_int) -> c_int {
            if ours(walk).is_none() {
                return real!($set(*mut c_void, *mut Entry, c_int) -> c_int)(walk, entry, instruction);
            }
            (*entry).instruction = instruction as c_ushort;
            0
        }
        fn $close(walk: *mut c_void) -> c_int {
            if ours(walk).is_none() {
                return real!($close(*mut c_void) -> c_int)(walk);
            }
            lock(&WALKS).remove(&walk.addr());
            OPEN.fetch_sub(1, Ordering::AcqRel);
            drop(Box::from_raw(walk.cast::<Walk>()));
            0
        }
    )*} };
}

walks! {
    fts_open, fts_read, fts_children, fts_set, fts_close;
    fts64_open, fts64_read, fts64_children, fts64_set, fts64_close;
}

/// The place of an entry, as in ftw.h.
#[repr(C)]
pub(crate) struct Position {
    base: c_int,
    level: c_int,
}

type EachOld = unsafe extern "C" fn(*const c_char, *const Stat, c_int) -> c_int;
type Each = unsafe extern "C" fn(*const c_char, *const Stat, c_int, *mut Position) -> c_int;

const FTW_PHYS: c_int = 1;
const FTW_MOUNT: c_int = 2;
const FTW_CHDIR: c_int = 4;
const FTW_DEPTH: c_int = 8;
const FTW_ACTIONRETVAL: c_int = 16;

/// Calls the program for each entry of a tree.
///
/// # Safety
/// As for `nftw(3)`.
unsafe fn tree(
    path: *const c_char,
    flags: c_int,
    each: impl Fn(*const c_char, *const Stat, c_int, *mut Position) -> c_int,
) -> c_int {
    if flags & FTW_CHDIR != 0 {
        set_errno(libc::ENOTSUP);
        return -1;
    }
    let mut options = if flags & FTW_PHYS == 0 { LOGICAL } else { 0 };
    if flags & FTW_MOUNT != 0 {
        options |= XDEV;
    }
    // SAFETY: the caller's promise.
    let mut walk = Walk::new(&[unsafe { bytes(path) }], options, None);
    loop {
        let entry = walk.next();
        if entry.is_null() {
            return 0;
        }
        // SAFETY: an entry of this walk.
        let (entry, depth) = unsafe { (&mut *entry, flags & FTW_DEPTH != 0) };
        let kind = match entry.info {
            NO_STAT if entry.level == 0 => {
                set_errno(entry.errno);
                return -1;
            }
            DIRECTORY if depth => continue,
            DIRECTORY_END if !depth => continue,
            DIRECTORY => 1,
            UNREADABLE => 2,
            NO_STAT => 3,
            SYMLINK => 4,
            DIRECTORY_END => 5,
            DANGLING => 6,
            // As the C library does, a folder on the way to itself is not entered.
            CYCLE => continue,
            _ => 0,
        };
        let mut position = Position {
            base: c_int::from(entry.path_len - entry.name_len),
            level: entry.level.into(),
        };
        let answer = each(entry.path, entry.stat, kind, &raw mut position);
        match answer {
            0 => {}
            2 if flags & FTW_ACTIONRETVAL != 0 => entry.instruction = SKIP,
            3 if flags & FTW_ACTIONRETVAL != 0 => walk.skip_siblings(),
            other => return other,
        }
    }
}

impl Walk {
    /// Leaves out the rest of the present folder.
    fn skip_siblings(&mut self) {
        if let Some(entry) = self.current() {
            // SAFETY: an entry of this walk.
            unsafe { (*entry).info = DIRECTORY_END };
        }
        if let Some(level) = self.levels.last_mut() {
            level.at = level.entries.len().saturating_sub(1);
            if let Some(&last) = level.entries.get(level.at) {
                // SAFETY: as above.
                unsafe { (*last).info = DIRECTORY_END };
            }
        }
    }
}

macro_rules! lists {
    ($($glob:ident, $scandir:ident, $scandirat:ident, $nftw:ident, $ftw:ident;)*) => { interpose! {"C" $(
        fn $glob(pattern: *const c_char, how: c_int, on_error: *const c_void, found: *mut Glob) -> c_int {
            let how = by_ours(pattern, how, found);
            real!($glob(*const c_char, c_int, *const c_void, *mut Glob) -> c_int)(pattern, how, on_error, found)
        }
        fn $scandir(
            path: *const c_char,
            list: *mut *mut *mut dirent64,
            select: Option<unsafe extern "C" fn(*const dirent64) -> c_int>,
            order: Order
        ) -> c_int {
            if remote!(path).is_some() {
                return scan(dir::opendir(path), list, select, order);
            }
            real!($scandir(*const c_char, *mut *mut *mut dirent64, Option<unsafe extern "C" fn(*const dirent64) -> c_int>, Order) -> c_int)
                (path, list, select, order)
        }
        fn $scandirat(
            fd: c_int,
            path: *const c_char,
            list: *mut *mut *mut dirent64,
            select: Option<unsafe extern "C" fn(*const dirent64) -> c_int>,
            order: Order
        ) -> c_int {
            if let Some(path) = remote!(fd, path) {
                return scan(dir::open(path), list, select, order);
            }
            real!($scandirat(c_int, *const c_char, *mut *mut *mut dirent64, Option<unsafe extern "C" fn(*const dirent64) -> c_int>, Order) -> c_int)
                (fd, path, list, select, order)
        }
        fn $nftw(path: *const c_char, each: Each, fds: c_int, flags: c_int) -> c_int {
            if remote!(path).is_some() {
                // SAFETY: the program's function.
                return tree(path, flags, |path, stat, kind, at| unsafe { each(path, stat, kind, at) });
            }
            real!($nftw(*const c_char, Each, c_int, c_int) -> c_int)(path, each, fds, flags)
        }
        fn $ftw(path: *const c_char, each: EachOld, fds: c_int) -> c_int {
            if remote!(path).is_some() {
                // SAFETY: the program's function.
                return tree(path, 0, |path, stat, kind, _| unsafe { each(path, stat, kind) });
            }
            real!($ftw(*const c_char, EachOld, c_int) -> c_int)(path, each, fds)
        }
    )*} };
}

lists! {
    glob, scandir, scandirat, nftw, ftw;
    glob64, scandir64, scandirat64, nftw64, ftw64;
}
