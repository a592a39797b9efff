//! The kind of memory of a range, as the kernel reports it.
//!
//! # Safety
//!
//! One `ioctl` that fills a structure of ours; and the bounds of this thread's stack from the C library.

use super::Refused;
use crate::PerProcess;
use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The mapped object: a file's device and inode. Anonymous shared memory is a file of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) device: (u32, u32),
    pub(super) inode: u64,
}

/// The part of an object in a shared mapping, which other mappings can show too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) object: Object,
    from: u64,
    to: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping {
    start: usize,
    end: usize,
    writable: bool,
    /// Readable and writable, and nothing else: the protection to restore afterwards.
    plain: bool,
    shared: bool,
    /// The main thread's stack.
    stack: bool,
    object: Object,
    /// The offset of its first byte in the object.
    offset: u64,
}

/// Checks that all of the range is readable and writable, and not a stack. Returns its part of the object if it is a shared mapping.
pub(super) fn check(start: usize, end: usize) -> Result<Option<Part>, Refused> {
    let (low, high) = own_stack();
    if start < high && low < end {
        return Err(Refused::Stack);
    }
    let mut at = start;
    let mut part: Option<Part> = None;
    while at < end {
        let mapping = mapping_at(at).ok_or(Refused::ReadOnly)?;
        if mapping.stack {
            return Err(Refused::Stack);
        }
        if !mapping.plain {
            return Err(Refused::ReadOnly);
        }
        if mapping.shared {
            let from = mapping.offset + (at - mapping.start) as u64;
            let to = from + (mapping.end.min(end) - at) as u64;
            let object = mapping.object;
            part = match part {
                None if at == start => Some(Part { object, from, to }),
                Some(before) if before.object == object && before.to == from => {
                    Some(Part { to, ..before })
                }
                _ => return Err(Refused::Shared),
            };
        } else if part.is_some() {
            return Err(Refused::Shared);
        }
        at = mapping.end;
    }
    Ok(part)
}

/// The object of the shared mapping at this address.
pub(super) fn object_at(at: usize) -> Option<Object> {
    let mapping = mapping_at(at)?;
    mapping.shared.then_some(mapping.object)
}

/// Calls `f` with the addresses of each other mapping through which the part can be written; it is mapped at `start` too.
pub(super) fn aliases(
    part: &Part,
    start: usize,
    mut f: impl FnMut(usize, usize) -> Result<(), Refused>,
) -> Result<(), Refused> {
    let own = start..start + (part.to - part.from) as usize;
    let mut found = |mapping: Mapping| {
        let until = mapping.offset + (mapping.end - mapping.start) as u64;
        let (from, to) = (part.from.max(mapping.offset), part.to.min(until));
        if mapping.object != part.object || !mapping.shared || !mapping.writable || from >= to {
            return Ok(());
        }
        let at = mapping.start + (from - mapping.offset) as usize;
        if own.contains(&at) {
            return Ok(());
        }
        if !mapping.plain {
            return Err(Refused::Shared);
        }
        f(at, at + (to - from) as usize)
    };
    if BY_IOCTL.load(Ordering::Relaxed) {
        let mut at = 0;
        loop {
            match ask(at, NEXT | SHARED) {
                Ok(mapping) => {
                    at = mapping.end;
                    found(mapping)?;
                }
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
                Err(_) => return Err(Refused::System),
            }
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(|_| Refused::System)?;
    maps.lines().filter_map(parse).try_for_each(found)
}

/// False once the kernel does not know the question; that holds as long as it runs.
static BY_IOCTL: AtomicBool = AtomicBool::new(true);

fn mapping_at(at: usize) -> Option<Mapping> {
    if BY_IOCTL.load(Ordering::Relaxed) {
        match ask(at, 0) {
            Ok(mapping) => return Some(mapping),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return None,
            Err(_) => BY_IOCTL.store(false, Ordering::Relaxed),
        }
    }
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let found = maps.lines().filter_map(parse);
    found
        .into_iter()
        .find(|map| map.start <= at && at < map.end)
}

/// A line of `/proc/PID/maps`.
fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let rights = words.next()?.as_bytes();
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let (major, minor) = words.next()?.split_once(':')?;
    Some(Mapping {
        start: usize::from_str_radix(start, 16).ok()?,
        end: usize::from_str_radix(end, 16).ok()?,
        writable: rights.get(1) == Some(&b'w'),
        plain: rights.get(..3) == Some(b"rw-"),
        shared: rights.get(3) == Some(&b's'),
        object: Object {
            device: (
                u32::from_str_radix(major, 16).ok()?,
                u32::from_str_radix(minor, 16).ok()?,
            ),
            inode: words.next()?.parse().ok()?,
        },
        offset,
        stack: words.next() == Some("[stack]"),
    })
}

/// `struct procmap_query` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Query {
    size: u64,
    flags: u64,
    addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

// Flags of a request, and of its answer.
const WRITABLE: u64 = 2;
const SHARED: u64 = 8;
/// The next mapping where there is none.
const NEXT: u64 = 0x10;

/// The mapping of an address by `PROCMAP_QUERY` (Linux 6.11 and later); `ENOENT` where there is none.
fn ask(at: usize, flags: u64) -> io::Result<Mapping> {
    // _IOWR('f', 17, struct procmap_query)
    const PROCMAP_QUERY: libc::c_ulong =
        3 << 30 | (size_of::<Query>() as libc::c_ulong) << 16 | 0x66 << 8 | 0x11;
    const RIGHTS: u64 = 7;
    const NAME: usize = 32;
    static MAPS: PerProcess<File> = PerProcess::new();
    let maps = MAPS.get(|| File::open("/proc/self/maps").map(Arc::new))?;
    let mut name = [0_u8; NAME];
    let mut query = Query {
        size: size_of::<Query>() as u64,
        addr: at as u64,
        flags,
        vma_name_size: NAME as u32,
        vma_name_addr: name.as_mut_ptr().expose_provenance() as u64,
        ..Query::default()
    };
    let call = |query: &mut Query| {
        // SAFETY: the kernel fills `query`, and at most `vma_name_size` bytes at the name's address; both are ours.
        unsafe {
            libc::syscall(
                libc::SYS_ioctl,
                maps.as_raw_fd(),
                PROCMAP_QUERY,
                std::ptr::from_mut(query),
            )
        }
    };
    if call(&mut query) < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ENAMETOOLONG) {
            return Err(error);
        }
        // Some file's name, which is no stack's.
        query.vma_name_size = 0;
        query.vma_name_addr = 0;
        if call(&mut query) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(Mapping {
        start: query.vma_start as usize,
        end: query.vma_end as usize,
        writable: query.vma_flags & WRITABLE != 0,
        plain: query.vma_flags & RIGHTS == WRITABLE | 1,
        shared: query.vma_flags & SHARED != 0,
        object: Object {
            device: (query.dev_major, query.dev_minor),
            inode: query.inode,
        },
        offset: query.vma_offset,
        stack: name.starts_with(b"[stack]"),
    })
}

/// The bounds of the calling thread's stack; `(0, 0)` if the system does not report them.
fn own_stack() -> (usize, usize) {
    thread_local! {
        static STACK: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
    }
    STACK.with(|known| {
        let bounds = known.get().unwrap_or_else(ask_for_stack);
        known.set(Some(bounds));
        bounds
    })
}

fn ask_for_stack() -> (usize, usize) {
    // SAFETY: the attributes are initialised by the first call, read by the second, and destroyed by the third.
    unsafe {
        let mut attr: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attr) != 0 {
            return (0, 0);
        }
        let (mut low, mut len) = (std::ptr::null_mut(), 0);
        let known = libc::pthread_attr_getstack(&raw const attr, &raw mut low, &raw mut len) == 0;
        libc::pthread_attr_destroy(&raw mut attr);
        if known {
            (low.addr(), low.addr().saturating_add(len))
        } else {
            (0, 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_are_told_apart_by_ioctl_and_by_text() {
        let page = crate::protect::page_size();
        let heap = crate::map::map_anonymous(4 * page).unwrap();
        let at = heap.as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let text = maps.lines().filter_map(parse);
        let text = text.into_iter().find(|m| m.start <= at && at < m.end);
        let text = text.unwrap();
        assert!(text.writable && !text.shared && !text.stack);
        match ask(at, 0) {
            Ok(asked) => assert_eq!(
                (asked.plain, asked.shared, asked.stack),
                (true, false, false)
            ),
            Err(error) => println!("skipped: {error}"),
        }
        assert_eq!(check(at, at + 4 * page), Ok(None));
        let code =
            check as fn(usize, usize) -> Result<Option<Part>, Refused> as usize / page * page;
        assert_eq!(check(code, code + page), Err(Refused::ReadOnly));
        let local = 0_u8;
        let here = (&raw const local).addr() / page * page;
        assert_eq!(check(here, here + page), Err(Refused::Stack));
        assert_eq!(check(0, page), Err(Refused::ReadOnly));
        // SAFETY: mapped above, and used by nobody else.
        unsafe { crate::map::unmap(heap, 4 * page) }.unwrap();
    }

    #[test]
    fn the_main_stack_has_its_name() {
        let line = "7ffc0a-7ffc0b rw-p 00000000 00:00 0                          [stack]";
        let map = parse(line).unwrap();
        assert!(map.stack && map.writable && !map.shared);
        let shared = parse("10-20 rw-s 00003000 00:1f 5 /dev/zero (deleted)").unwrap();
        assert!(shared.shared && shared.plain && shared.offset == 0x3000);
        let object = Object {
            device: (0, 0x1f),
            inode: 5,
        };
        assert_eq!(shared.object, object);
        let code = parse("10-20 rwxp 00000000 00:00 0").unwrap();
        assert!(code.writable && !code.plain);
    }
}
