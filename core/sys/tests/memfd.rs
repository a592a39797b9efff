//! Files of shared memory.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};
use weft_sys::memfd::{Mapping, check, create};

fn byte(map: &Mapping, at: usize) -> &AtomicU8 {
    assert!(at < map.len());
    // SAFETY: inside the mapping, and only ever reached through atomics.
    unsafe { AtomicU8::from_ptr(map.as_ptr().add(at)) }
}

#[test]
fn two_mappings_show_the_same_bytes() {
    let fd = create("weft-test", 8192).unwrap();
    assert_eq!(check(&fd).unwrap(), 8192);
    let whole = Mapping::new(&fd, 0, 8192, true).unwrap();
    let second_page = Mapping::new(&fd, 4096, 4096, false).unwrap();
    drop(fd);
    assert_eq!((whole.len(), second_page.len()), (8192, 4096));
    byte(&whole, 4096 + 17).store(42, Relaxed);
    assert_eq!(byte(&second_page, 17).load(Relaxed), 42);
    assert_eq!(byte(&second_page, 18).load(Relaxed), 0);
}

#[test]
fn the_size_and_the_seals_cannot_be_changed() {
    let fd = create("weft-test", 4096).unwrap();
    let file = File::from(fd);
    for len in [0, 4095, 4097] {
        assert_eq!(
            file.set_len(len).unwrap_err().kind(),
            ErrorKind::PermissionDenied
        );
    }
    assert!(rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).is_err());
    let mode = rustix::fs::fstat(&file).unwrap().st_mode;
    assert_eq!(mode & 0o7777, 0o600);
    let flags = rustix::io::fcntl_getfd(&file).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

#[test]
fn what_could_shrink_is_refused() {
    let refused = |fd: std::os::fd::BorrowedFd<'_>| {
        assert_eq!(check(fd).unwrap_err().kind(), ErrorKind::InvalidData);
    };
    refused(File::open("/proc/self/exe").unwrap().as_fd());
    refused(std::io::pipe().unwrap().0.as_fd());
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    let fd = memfd_create("weft-test", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, 4096).unwrap();
    refused(fd.as_fd());
    fcntl_add_seals(&fd, SealFlags::GROW).unwrap();
    refused(fd.as_fd());
    fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    assert_eq!(check(&fd).unwrap(), 4096);
}

#[test]
fn senseless_mappings_are_errors() {
    let fd = create("weft-test", 8192).unwrap();
    assert!(Mapping::new(&fd, 0, 0, true).is_err());
    assert!(Mapping::new(&fd, 100, 4096, true).is_err());
    assert!(create("zero\0byte", 1).is_err());
    let read_only = File::open(format!(
        "/proc/self/fd/{}",
        std::os::fd::AsRawFd::as_raw_fd(&fd)
    ))
    .unwrap();
    assert!(Mapping::new(&read_only, 0, 4096, true).is_err());
    assert!(Mapping::new(&read_only, 0, 4096, false).is_ok());
}
