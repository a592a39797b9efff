//! The private folder: its place, and the process that writes it.
//!
//! The first process that looks makes a tree of files, once for the same devices and addresses of this host, below a folder that the processes of a
//! user share: `WEFT_SYSFS`, which `weft verbs` names after the process that it becomes and which that process removes when it ends; else
//! `/dev/shm/weft-sysfs-UID`, which stays. It is written under another name and renamed, so that no process finds half of one.
//!
//! # Safety
//!
//! The loader's functions are called with C strings, and the function of libibverbs with the type that it has there.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, OsStr, OsString, c_char, c_int};
use std::fs::{self, Permissions};
use std::hash::Hasher;
use std::io::{self, Write as _};
use std::net::IpAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use weft_sys::interfaces::InterfaceAddress;

/// Names the folder; the name ends with `-PID-START` of the process that removes it.
const SETTING: &str = "WEFT_SYSFS";
const LIBRARY: &str = "libibverbs.so.1";
/// Digits of a tree's name.
const DIGITS: usize = 16;

/// The tree of this process: a string that is never freed.
static ROOT: AtomicPtr<c_char> = AtomicPtr::new(null_mut());
/// It was tried in vain, and said so.
static FAILED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// This thread makes a tree: what it opens is the machine's.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// The folder in which `/sys/class/infiniband` and the other places are, made now if need be.
pub(crate) fn root() -> Option<&'static CStr> {
    if BUSY.get() {
        return None;
    }
    let known = ROOT.load(Ordering::Acquire);
    if !known.is_null() {
        // SAFETY: such a string.
        let known = unsafe { CStr::from_ptr(known) };
        // The process that removes it may have ended.
        if Path::new(OsStr::from_bytes(known.to_bytes())).is_dir() {
            return Some(known);
        }
    }
    if FAILED.load(Ordering::Relaxed) {
        return None;
    }
    match busy(find) {
        Ok(path) => {
            let path = CString::new(path.into_os_string().into_vec()).ok()?;
            let path = path.into_raw();
            // Another thread may have been here too; both names are good for ever.
            ROOT.store(path, Ordering::Release);
            // SAFETY: never freed.
            Some(unsafe { CStr::from_ptr(path) })
        }
        Err(error) => {
            if !FAILED.swap(true, Ordering::Relaxed) {
                let text = format!("weft: no devices in /sys/class/infiniband: {error}\n");
                let _ = io::stderr().write_all(text.as_bytes());
            }
            None
        }
    }
}

/// Returns true if this thread is at work on the tree.
pub(crate) fn is_busy() -> bool {
    BUSY.get()
}

/// Does something in which all paths are the machine's.
fn busy<T>(work: impl FnOnce() -> T) -> T {
    let before = BUSY.replace(true);
    let done = work();
    BUSY.set(before);
    done
}

/// A path as the kernel says it, so that it is known again; its last component need not be there.
fn canonical(base: &Path) -> Option<PathBuf> {
    let folder = fs::canonicalize(base.parent()?).ok()?;
    Some(folder.join(base.file_name()?))
}

/// The folders that trees can be in, the best first.
pub(crate) fn bases() -> &'static [PathBuf] {
    static BASES: AtomicPtr<Vec<PathBuf>> = AtomicPtr::new(null_mut());
    let mut bases = BASES.load(Ordering::Acquire);
    if bases.is_null() {
        // SAFETY: no arguments.
        let name = format!("weft-sysfs-{}", unsafe { libc::geteuid() });
        let named = std::env::var_os(SETTING).map(PathBuf::from);
        let temporary = std::env::temp_dir();
        let common = [Path::new("/dev/shm"), &temporary].map(|folder| folder.join(&name));
        let all = named.into_iter().chain(common);
        let all = all.filter(|base| base.is_absolute());
        let all = busy(|| all.filter_map(|base| canonical(&base)).collect());
        bases = Box::into_raw(Box::new(all));
        // Whichever thread comes last: all are equal and stay.
        BASES.store(bases, Ordering::Release);
    }
    // SAFETY: never freed, and never written to.
    unsafe { &*bases }
}

/// The length of the name of a tree in `base`, if the path begins with one.
pub(crate) fn length_below(base: &Path, path: &[u8]) -> Option<usize> {
    let rest = path.strip_prefix(base.as_os_str().as_bytes())?;
    let name = rest.strip_prefix(b"/")?;
    let (name, after) = name.split_at_checked(DIGITS)?;
    let whole =
        name.iter().all(u8::is_ascii_hexdigit) && matches!(after.first(), None | Some(b'/'));
    whole.then(|| path.len() - after.len())
}

/// Finds the tree, or makes it.
fn find() -> io::Result<PathBuf> {
    let library = beside(LIBRARY)?;
    let name = name(&library)?;
    let mut first = None;
    for base in bases() {
        match in_base(base, &name, &library) {
            Ok(tree) => return Ok(tree),
            Err(error) => {
                let error = io::Error::new(error.kind(), format!("{}: {error}", base.display()));
                first.get_or_insert(error);
            }
        }
    }
    Err(first.unwrap_or_else(|| io::ErrorKind::NotFound.into()))
}

/// Makes a folder that everyone may read and only its owner may change, independent of the program's umask.
fn make_folder(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().mode(0o700).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o755))
}

/// Refuses a folder that others can write to, because they could put any files there.
fn trusted(path: &Path) -> io::Result<()> {
    let about = fs::symlink_metadata(path)?;
    // SAFETY: no arguments.
    let me = unsafe { libc::geteuid() };
    let closed = about.is_dir() && about.permissions().mode() & 0o022 == 0;
    if closed && (about.uid() == me || about.uid() == 0) {
        Ok(())
    } else {
        Err(io::Error::other("it belongs to somebody else"))
    }
}

fn in_base(base: &Path, name: &str, library: &Path) -> io::Result<PathBuf> {
    match make_folder(base) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    trusted(base)?;
    let tree = base.join(name);
    if tree.is_dir() {
        trusted(&tree)?;
        return Ok(tree);
    }
    // Containers that share the folder can have threads of one number.
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    // SAFETY: no arguments.
    let thread = unsafe { libc::gettid() };
    let new = base.join(format!("new-{thread}-{}", now.as_nanos()));
    make_folder(&new)?;
    let made = make(&new, library).and_then(|()| fs::rename(&new, &tree));
    if made.is_err() {
        let _ = fs::remove_dir_all(&new);
    }
    match made {
        // Another process was faster.
        Err(_) if tree.is_dir() => Ok(tree),
        made => made.map(|()| tree),
    }
}

/// Makes libibverbs write its devices, and adds the machine's devices.
fn make(dir: &Path, library: &Path) -> io::Result<()> {
    let path = CString::new(library.as_os_str().as_bytes())?;
    let folder = CString::new(dir.as_os_str().as_bytes())?;
    // SAFETY: a string; the library is weft's, and stays.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        return Err(io::Error::other(format!(
            "cannot load {}",
            library.display()
        )));
    }
    // SAFETY: strings, and a library that is open.
    let tree = unsafe {
        libc::dlvsym(
            handle,
            c"weft_sysfs_tree".as_ptr(),
            c"WEFT_PRIVATE_1".as_ptr(),
        )
    };
    if tree.is_null() {
        let what = format!("{} is of another version of weft", library.display());
        return Err(io::Error::other(what));
    }
    // SAFETY: the function of this name has this type.
    let tree = unsafe {
        std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn(*const c_char) -> c_int>(tree)
    };
    // SAFETY: a string.
    match unsafe { tree(folder.as_ptr()) } {
        0 => neighbours(dir),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// Adds links to the machine's siblings of the tree's folders, so that `..` leads from the tree to the right place.
fn neighbours(dir: &Path) -> io::Result<()> {
    for folder in [
        "sys",
        "sys/devices",
        "sys/class",
        "sys/class/infiniband",
        "sys/class/infiniband_verbs",
        "dev/infiniband",
    ] {
        let Ok(entries) = fs::read_dir(Path::new("/").join(folder)) else {
            continue;
        };
        for entry in entries.flatten() {
            // The kernel's links lead to their devices by a path that is not one of ours.
            let path = entry.path();
            let to = match fs::canonicalize(&path) {
                Ok(to) if entry.file_type()?.is_symlink() => to,
                _ => path,
            };
            match symlink(to, dir.join(folder).join(entry.file_name())) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// A file in the folder of this library.
fn beside(name: &str) -> io::Result<PathBuf> {
    // SAFETY: all zeros is a value of the type.
    let mut about: libc::Dl_info = unsafe { std::mem::zeroed() };
    let here: fn(&str) -> io::Result<PathBuf> = beside;
    // SAFETY: an address of this library, and a place for the result.
    let found = unsafe { libc::dladdr(here as *const libc::c_void, &raw mut about) };
    if found == 0 || about.dli_fname.is_null() {
        return Err(io::Error::other("the loader does not know this library"));
    }
    // SAFETY: the loader's string, which stays while this library does.
    let path = unsafe { CStr::from_ptr(about.dli_fname) };
    let path = fs::canonicalize(OsStr::from_bytes(path.to_bytes()))?;
    Ok(path.with_file_name(name))
}

/// The tree's name: another one where the devices, the addresses or the library are others.
#[allow(
    deprecated,
    reason = "the one hasher of the standard library that is the same in all processes and versions"
)]
fn name(library: &Path) -> io::Result<String> {
    let mut hasher = std::hash::SipHasher::new();
    let about = fs::metadata(library)?;
    for number in [about.dev(), about.ino(), about.mtime() as u64] {
        hasher.write_u64(number);
    }
    hasher.write(
        std::env::var_os("WEFT_DEVICES")
            .unwrap_or_default()
            .as_bytes(),
    );
    hasher.write_u8(0);
    if let Ok(about) = fs::metadata("/proc/self/ns/net") {
        hasher.write_u64(about.ino());
    }
    for (interface, address) in addresses() {
        hasher.write(interface.as_bytes_with_nul());
        hasher.write(address.to_string().as_bytes());
        hasher.write_u8(0);
    }
    let real = |folder| fs::read_dir(folder).into_iter().flatten().flatten();
    let names: BTreeSet<OsString> = real("/sys/class/infiniband")
        .map(|entry| entry.file_name())
        .collect();
    for name in names {
        hasher.write(name.as_bytes());
        hasher.write_u8(0);
    }
    Ok(format!("{:0DIGITS$x}", hasher.finish()))
}

/// The addresses of the interfaces that are up, with their interfaces.
fn addresses() -> BTreeSet<(CString, IpAddr)> {
    let all = weft_sys::interfaces::addresses().unwrap_or_default();
    all.into_iter()
        .filter(InterfaceAddress::is_up)
        .map(|address| (address.name, address.ip))
        .collect()
}

/// The process that removes the folder is this one: `WEFT_SYSFS` ends with its number and when it started.
fn owned() -> Option<PathBuf> {
    let base = PathBuf::from(std::env::var_os(SETTING)?);
    let name = base.file_name()?.to_str()?;
    let mut words = name.strip_prefix("weft-sysfs-")?.split('-').skip(1);
    let pid: u32 = words.next()?.parse().ok()?;
    (pid == std::process::id()).then_some(base)
}

/// The folder that this process removes: its number, and a string that is never freed.
static OWNER: AtomicU32 = AtomicU32::new(0);
static OWNED: AtomicPtr<c_char> = AtomicPtr::new(null_mut());

/// Removes the folder, if this process owns it. It allocates no memory and takes no lock: a program can end itself at any point.
pub(crate) extern "C" fn remove() {
    let folder = OWNED.load(Ordering::Acquire);
    if folder.is_null() || std::process::id() != OWNER.load(Ordering::Relaxed) {
        return;
    }
    clear(libc::AT_FDCWD, folder);
}

/// Removes a folder with all that is in it; whether it is gone.
fn clear(parent: c_int, name: *const c_char) -> bool {
    let how = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC;
    // SAFETY: a string.
    let fd = unsafe { libc::syscall(libc::SYS_openat, parent, name, how) } as c_int;
    if fd < 0 {
        return false;
    }
    // Each removal moves the other entries, so the scan starts again until nothing can be removed.
    while clear_once(fd) {
        // SAFETY: a descriptor of ours.
        unsafe { libc::syscall(libc::SYS_lseek, fd, 0, libc::SEEK_SET) };
    }
    // SAFETY: as above, and a string.
    unsafe {
        libc::syscall(libc::SYS_close, fd);
        libc::syscall(libc::SYS_unlinkat, parent, name, libc::AT_REMOVEDIR) == 0
    }
}

/// Removes the entries of an open folder. Returns whether there were any.
fn clear_once(fd: c_int) -> bool {
    /// Offsets of the length and the name in an entry: see getdents64(2).
    const LEN: usize = 16;
    const NAME: usize = 19;
    let mut buf = [0_u8; 2048];
    let mut removed = false;
    loop {
        // SAFETY: there is as much room as is said.
        let got = unsafe { libc::syscall(libc::SYS_getdents64, fd, buf.as_mut_ptr(), buf.len()) };
        let Ok(got @ 1..) = usize::try_from(got) else {
            return removed;
        };
        let mut at = 0;
        while at + NAME < got {
            let len = usize::from(u16::from_ne_bytes([buf[at + LEN], buf[at + LEN + 1]]));
            let name = &buf[at + NAME..got];
            at += len.max(1);
            if name.starts_with(b".\0") || name.starts_with(b"..\0") {
                continue;
            }
            // SAFETY: the kernel's string.
            if unsafe { libc::syscall(libc::SYS_unlinkat, fd, name.as_ptr(), 0) } == 0 {
                removed = true;
            } else {
                removed |= clear(fd, name.as_ptr().cast());
            }
        }
    }
}

pub(crate) extern "C" fn start() {
    let Some(folder) = owned().and_then(|path| CString::new(path.into_os_string().into_vec()).ok())
    else {
        return;
    };
    OWNED.store(folder.into_raw(), Ordering::Release);
    OWNER.store(std::process::id(), Ordering::Relaxed);
    // SAFETY: a function that stays.
    unsafe { libc::atexit(remove) };
}
