//! What the dynamic loader will do with a program, as far as it matters to somebody who wants to slip a library under it.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, openat, statat};
use rustix::io::Errno;

/// Sizes in ELF64.
const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
const DYNAMIC_ENTRY: usize = 16;
/// More than any program has; a damaged file must not cost memory.
const MAX_SEGMENTS: usize = 4096;
const MAX_DYNAMIC: u64 = 1 << 20;
const MAX_PATH_LIST: usize = 1 << 16;

const LOAD: u32 = 1;
const DYNAMIC: u32 = 2;
const INTERPRETER: u32 = 3;
const NOTE: u32 = 4;
/// The name in the note that Go's linker leaves in each program.
const GO: &[u8] = b"Go\0\0";

const NEEDED: u64 = 1;
const STRING_TABLE: u64 = 5;
const RPATH: u64 = 15;
const RUNPATH: u64 = 29;

/// The beginning of a program's file says what it is.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// For the dynamic loader of this machine.
    Dynamic {
        /// `DT_RPATH`, unless there is a `DT_RUNPATH` that makes the loader ignore it: these folders come before
        /// `LD_LIBRARY_PATH`.
        rpath: Option<OsString>,
    },
    /// No dynamic loader runs.
    Static,
    /// For another machine or word length than this program.
    Foreign,
    /// `#!`, and the interpreter.
    Script(OsString),
    /// Nothing known.
    Other,
}

struct Segment {
    kind: u32,
    offset: u64,
    addr: u64,
    len: u64,
}

/// The kernel follows so many scripts to their interpreters.
const SCRIPTS: u32 = 5;

/// Opens a program's file. `None`: it is no regular file, or cannot be read. What else has the name is left alone.
pub fn open(path: &Path) -> Option<OwnedFd> {
    let about = statat(CWD, path, AtFlags::empty()).ok()?;
    if FileType::from_raw_mode(about.st_mode) != FileType::RegularFile {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    openat(CWD, path, flags, Mode::empty()).ok()
}

/// The last interpreter that a script leads to, which may be a script itself: the program that is executed, which is not looked for. `folder`: where relative
/// paths begin, if it is not where this process is. `None`: the file is no script, or there are more steps than the kernel takes.
pub fn interpreter(file: impl AsFd, folder: &Path) -> Option<PathBuf> {
    let mut last = None;
    let mut now = kind(file).ok()?;
    for _ in 0..=SCRIPTS {
        let Kind::Script(path) = now else {
            return last;
        };
        let path = folder.join(path);
        let next = open(&path).and_then(|file| kind(&file).ok());
        last = Some(path);
        match next {
            Some(next) => now = next,
            None => return last,
        }
    }
    None
}

/// Looks at a program.
///
/// # Errors
/// Those of reading.
pub fn kind(file: impl AsFd) -> io::Result<Kind> {
    let mut start = [0; 256];
    let file = file.as_fd();
    let got = read(file, &mut start, 0)?;
    let start = &start[..got];
    if let Some(line) = start.strip_prefix(b"#!") {
        return Ok(first_word(line).map_or(Kind::Other, Kind::Script));
    }
    if !start.starts_with(b"\x7fELF") || start.len() < HEADER {
        return Ok(Kind::Other);
    }
    let machine = match std::env::consts::ARCH {
        "x86_64" => 62,
        "aarch64" => 183,
        _ => return Ok(Kind::Other),
    };
    if start[4..6] != [2, 1] || short(start, 18) != machine {
        return Ok(Kind::Foreign);
    }
    let segments = segments(file, start)?;
    if !segments.iter().any(|s| s.kind == INTERPRETER) {
        return Ok(Kind::Static);
    }
    Ok(Kind::Dynamic {
        rpath: rpath(file, &segments)?,
    })
}

/// The segments of a program of this word length.
fn all_segments(file: BorrowedFd<'_>) -> io::Result<Vec<Segment>> {
    let mut start = [0; HEADER];
    if read(file, &mut start, 0)? < HEADER || !start.starts_with(b"\x7fELF\x02\x01") {
        return Ok(Vec::new());
    }
    segments(file, &start)
}

/// Whether Go's linker made the program: its packages make system calls without the C library.
///
/// # Errors
/// Those of reading.
pub fn is_go(file: impl AsFd) -> io::Result<bool> {
    let file = file.as_fd();
    for note in all_segments(file)?.iter().filter(|s| s.kind == NOTE) {
        let mut bytes = vec![0; note.len.min(4096) as usize];
        let got = read(file, &mut bytes, note.offset)?;
        // Sizes of name and text, a type, and the name.
        if bytes[..got]
            .windows(16)
            .any(|w| w[..4] == [4, 0, 0, 0] && &w[12..] == GO)
        {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Why the program does not start, or complains, with a library for the GNU C library of this machine in `LD_PRELOAD`.
///
/// # Errors
/// Those of reading.
pub fn refuses_preload(file: impl AsFd) -> io::Result<Option<&'static str>> {
    let file = file.as_fd();
    Ok(match kind(file)? {
        Kind::Foreign => Some("it is for another kind of machine than the library"),
        Kind::Dynamic { .. } => {
            let segments = all_segments(file)?;
            if is_musl(file, &segments)? {
                Some("it is linked with musl, and the library is for the GNU C library")
            } else if needs_asan(file, &segments)? {
                Some("it is built with AddressSanitizer, which has to be the first library")
            } else {
                None
            }
        }
        _ => None,
    })
}

/// Whether the program's dynamic loader is musl's.
fn is_musl(file: BorrowedFd<'_>, segments: &[Segment]) -> io::Result<bool> {
    let Some(path) = segments.iter().find(|s| s.kind == INTERPRETER) else {
        return Ok(false);
    };
    let mut text = vec![0; path.len.min(4096) as usize];
    let got = read(file, &mut text, path.offset)?;
    let mut names = text[..got].split(|&b| b == b'/');
    Ok(names
        .next_back()
        .is_some_and(|name| name.starts_with(b"ld-musl-")))
}

/// Whether the program needs GCC's or Clang's address sanitizer as a library.
fn needs_asan(file: BorrowedFd<'_>, segments: &[Segment]) -> io::Result<bool> {
    const NAMES: [&[u8]; 2] = [b"libasan.", b"libclang_rt.asan"];
    const MOST: usize = 16;
    const MOST_LIBRARIES: usize = 1024;
    let entries = dynamic(file, segments)?;
    let needed = entries.iter().filter(|entry| entry.0 == NEEDED);
    for needed in needed.take(MOST_LIBRARIES) {
        let text = string(file, segments, &entries, needed.1, MOST)?.unwrap_or_default();
        if NAMES.iter().any(|name| text.starts_with(name)) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn first_word(line: &[u8]) -> Option<OsString> {
    let line = line.split(|&b| b == b'\n').next()?;
    let name = line
        .split(u8::is_ascii_whitespace)
        .find(|word| !word.is_empty())?;
    Some(OsString::from_vec(name.to_vec()))
}

fn segments(file: BorrowedFd<'_>, header: &[u8]) -> io::Result<Vec<Segment>> {
    let (at, count) = (long(header, 32), usize::from(short(header, 56)));
    if usize::from(short(header, 54)) != PROGRAM_HEADER || count > MAX_SEGMENTS {
        return Ok(Vec::new());
    }
    let mut table = vec![0; count * PROGRAM_HEADER];
    let got = read(file, &mut table, at)?;
    Ok(table[..got]
        .chunks_exact(PROGRAM_HEADER)
        .map(|s| Segment {
            kind: word(s, 0),
            offset: long(s, 8),
            addr: long(s, 16),
            len: long(s, 32),
        })
        .collect())
}

/// The entries of the dynamic section: tags and values.
fn dynamic(file: BorrowedFd<'_>, segments: &[Segment]) -> io::Result<Vec<(u64, u64)>> {
    let Some(dynamic) = segments.iter().find(|s| s.kind == DYNAMIC) else {
        return Ok(Vec::new());
    };
    let mut table = vec![0; dynamic.len.min(MAX_DYNAMIC) as usize];
    let got = read(file, &mut table, dynamic.offset)?;
    let entries = table[..got].chunks_exact(DYNAMIC_ENTRY);
    Ok(entries
        .map(|entry| (long(entry, 0), long(entry, 8)))
        .take_while(|entry| entry.0 != 0)
        .collect())
}

/// The text at a place of the string table, up to `most` bytes of it.
fn string(
    file: BorrowedFd<'_>,
    segments: &[Segment],
    entries: &[(u64, u64)],
    at: u64,
    most: usize,
) -> io::Result<Option<Vec<u8>>> {
    let Some(&(_, strings)) = entries.iter().find(|entry| entry.0 == STRING_TABLE) else {
        return Ok(None);
    };
    let place = segments.iter().find_map(|s| {
        let within = strings.checked_sub(s.addr).filter(|at| *at < s.len)?;
        (s.kind == LOAD).then_some(s.offset.checked_add(within)?.checked_add(at)?)
    });
    let Some(place) = place else { return Ok(None) };
    let mut text = vec![0; most];
    let got = read(file, &mut text, place)?;
    text.truncate(text[..got].iter().position(|&b| b == 0).unwrap_or(got));
    Ok(Some(text))
}

fn rpath(file: BorrowedFd<'_>, segments: &[Segment]) -> io::Result<Option<OsString>> {
    let entries = dynamic(file, segments)?;
    let value = |tag| entries.iter().find(|entry| entry.0 == tag);
    let (None, Some(name)) = (value(RUNPATH), value(RPATH)) else {
        return Ok(None);
    };
    let text = string(file, segments, &entries, name.1, MAX_PATH_LIST)?;
    Ok(text.map(OsString::from_vec))
}

/// As much as there is of what is asked for.
fn read(file: BorrowedFd<'_>, into: &mut [u8], at: u64) -> io::Result<usize> {
    let mut got = 0;
    while got < into.len() {
        let Some(from) = at.checked_add(got as u64) else {
            break;
        };
        match rustix::io::pread(file, &mut into[got..], from) {
            // The end, or an offset that no file can have.
            Ok(0) | Err(Errno::INVAL) => break,
            Ok(n) => got += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(got)
}

fn bytes<const N: usize>(from: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&from[at..at + N]);
    out
}

fn short(from: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes(from, at))
}

fn word(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes(from, at))
}

fn long(from: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes(from, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Write;

    use rustix::fs::{MemfdFlags, memfd_create, mknodat};

    fn file(bytes: &[u8]) -> File {
        let mut file = File::from(memfd_create("program", MemfdFlags::CLOEXEC).unwrap());
        file.write_all(bytes).unwrap();
        file
    }

    fn of(bytes: &[u8]) -> Kind {
        kind(file(bytes)).unwrap()
    }

    fn put(into: &mut [u8], at: usize, value: &[u8]) {
        into[at..at + value.len()].copy_from_slice(value);
    }

    /// A program of three segments: what is loaded (the whole file, at 0x400000), its interpreter, its dynamic section.
    fn program(dynamic: &[(u64, u64)]) -> Vec<u8> {
        let mut file = vec![0; 1024];
        put(&mut file, 0, b"\x7fELF\x02\x01\x01");
        let machine: u16 = if cfg!(target_arch = "aarch64") {
            183
        } else {
            62
        };
        put(&mut file, 18, &machine.to_le_bytes());
        put(&mut file, 32, &64u64.to_le_bytes());
        put(&mut file, 54, &56u16.to_le_bytes());
        put(&mut file, 56, &3u16.to_le_bytes());
        let segments = [
            (LOAD, 0u64, 0x40_0000u64, 1024u64),
            (INTERPRETER, 0, 0x40_0000, 8),
            (DYNAMIC, 512, 0x40_0200, dynamic.len() as u64 * 16),
        ];
        for (n, (kind, offset, addr, len)) in segments.into_iter().enumerate() {
            let at = 64 + n * 56;
            put(&mut file, at, &kind.to_le_bytes());
            put(&mut file, at + 8, &offset.to_le_bytes());
            put(&mut file, at + 16, &addr.to_le_bytes());
            put(&mut file, at + 32, &len.to_le_bytes());
        }
        for (n, (tag, value)) in dynamic.iter().enumerate() {
            put(&mut file, 512 + n * 16, &tag.to_le_bytes());
            put(&mut file, 520 + n * 16, &value.to_le_bytes());
        }
        put(&mut file, 768, b"\0/opt/lib:$ORIGIN\0");
        file
    }

    #[test]
    fn scripts_name_their_interpreter() {
        assert_eq!(
            of(b"#! /usr/bin/env python3\nx"),
            Kind::Script("/usr/bin/env".into())
        );
        assert_eq!(of(b"#!/bin/sh"), Kind::Script("/bin/sh".into()));
        assert_eq!(of(b"#!  \n"), Kind::Other);
        assert_eq!(of(b"hello"), Kind::Other);
        assert_eq!(of(b""), Kind::Other);
        assert_eq!(of(b"\x7fELF\x02"), Kind::Other);
    }

    #[test]
    fn an_rpath_counts_unless_a_runpath_is_there() {
        let table = (STRING_TABLE, 0x40_0300);
        let dynamic = |rpath: Option<&str>| Kind::Dynamic {
            rpath: rpath.map(Into::into),
        };
        assert_eq!(of(&program(&[table])), dynamic(None));
        let found = of(&program(&[(RPATH, 1), table]));
        assert_eq!(found, dynamic(Some("/opt/lib:$ORIGIN")));
        assert_eq!(
            of(&program(&[(RPATH, 1), table, (RUNPATH, 1)])),
            dynamic(None)
        );
    }

    #[test]
    fn static_and_foreign_programs_are_told_apart() {
        let mut no_interpreter = program(&[]);
        put(&mut no_interpreter, 64 + 56, &LOAD.to_le_bytes());
        assert_eq!(of(&no_interpreter), Kind::Static);
        let mut other = program(&[]);
        other[4] = 1;
        assert_eq!(of(&other), Kind::Foreign);
    }

    #[test]
    fn go_is_known_by_its_note() {
        let mut bytes = program(&[]);
        put(&mut bytes, 64 + 56, &NOTE.to_le_bytes());
        put(&mut bytes, 64 + 56 + 8, &900u64.to_le_bytes());
        put(&mut bytes, 64 + 56 + 32, &32u64.to_le_bytes());
        let is_go = |bytes: &[u8]| is_go(file(bytes)).unwrap();
        assert!(!is_go(&bytes));
        put(&mut bytes, 900, &[4, 0, 0, 0, 8, 0, 0, 0, 4, 0, 0, 0]);
        put(&mut bytes, 912, GO);
        assert!(is_go(&bytes));
        assert!(!is_go(b"#!/bin/sh"));
    }

    #[test]
    fn musl_and_address_sanitizer_refuse_a_library() {
        let refused = |bytes: &[u8]| refuses_preload(file(bytes)).unwrap();
        let needs = [(NEEDED, 1), (STRING_TABLE, 0x40_0300)];
        let mut asan = program(&needs);
        assert_eq!(refused(&asan), None);
        put(&mut asan, 768, b"\0libasan.so.8\0");
        assert!(refused(&asan).unwrap().contains("Sanitizer"));
        let mut musl = program(&needs);
        let path = b"/lib/ld-musl-x86_64.so.1\0";
        put(&mut musl, 900, path);
        put(&mut musl, 64 + 56 + 8, &900u64.to_le_bytes());
        put(&mut musl, 64 + 56 + 32, &(path.len() as u64).to_le_bytes());
        assert!(refused(&musl).unwrap().contains("musl"));
        assert_eq!(refused(b"#!/bin/sh\n"), None);
    }

    #[test]
    fn damaged_files_are_taken_as_they_are() {
        let whole = program(&[(RPATH, 1), (STRING_TABLE, 0x40_0300)]);
        for len in 0..whole.len() {
            of(&whole[..len]);
            refuses_preload(file(&whole[..len])).unwrap();
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] = 0xff;
            of(&damaged);
            refuses_preload(file(&damaged)).unwrap();
        }
    }

    #[test]
    fn this_program_is_dynamic() {
        let file = File::open("/proc/self/exe").unwrap();
        assert!(matches!(kind(&file).unwrap(), Kind::Dynamic { .. }));
    }

    #[test]
    fn scripts_lead_to_the_program_that_is_executed() {
        let dir = std::env::temp_dir().join(format!("weft-elf-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let script = |name: &str, interpreter: &str| {
            std::fs::write(dir.join(name), format!("#!{interpreter} -x\n")).unwrap();
        };
        std::fs::write(dir.join("program"), program(&[])).unwrap();
        script("0", "program");
        for step in 1..=5 {
            script(&step.to_string(), &(step - 1).to_string());
        }
        let found = |name: &str| interpreter(open(&dir.join(name)).unwrap(), &dir);
        for name in ["0", "4"] {
            assert_eq!(found(name), Some(dir.join("program")), "{name}");
        }
        // The kernel does not take that many steps.
        assert_eq!(found("5"), None);
        assert_eq!(found("program"), None);
        script("missing", "nothing");
        assert_eq!(found("missing"), Some(dir.join("nothing")));
        // An open of it would wait for a writer.
        let fifo = dir.join("fifo");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR, 0).unwrap();
        script("of_fifo", "fifo");
        assert_eq!(found("of_fifo"), Some(fifo));
        std::fs::remove_dir_all(dir).unwrap();
    }
}
