//! What two processes can do with and learn of each other. A child is this very test program, told by
//! the environment to play a part.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use weft_sys::liveness::{Liveness, PeerLiveness};
use weft_sys::memfd::{self, Mapping};
use weft_sys::unix::{self, Name};
use weft_sys::{Interest, poll_fds, process};

const LONG: Option<Duration> = Some(Duration::from_secs(20));

/// A name nobody else uses.
fn name(test: &str) -> String {
    format!("weft-test-{test}-{}", std::process::id())
}

fn readable(fd: impl AsFd) {
    assert_eq!(poll_fds(&[(fd.as_fd(), Interest::READ)], LONG).unwrap(), 1);
}

fn receive(fd: impl AsFd, max: usize) -> Option<(Vec<u8>, Vec<OwnedFd>)> {
    readable(&fd);
    let mut buf = [0; 64];
    let (n, fds) = unix::recv_with_fds(&fd, &mut buf, max).unwrap()?;
    Some((buf[..n].to_vec(), fds))
}

/// Two ends of a connection.
fn pair(test: &str) -> (OwnedFd, OwnedFd) {
    let name = name(test);
    let listener = unix::listen(Name::Abstract(name.as_bytes()), 4).unwrap();
    let near = unix::connect(Name::Abstract(name.as_bytes())).unwrap();
    readable(&listener);
    (near, unix::accept(&listener).unwrap().unwrap())
}

/// Starts a child that plays `part`; it connects to us.
fn start(part: &str) -> (Child, OwnedFd) {
    let name = name(part);
    let listener = unix::listen(Name::Abstract(name.as_bytes()), 4).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("WEFT_PART", part)
        .env("WEFT_NAME", name)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    readable(&listener);
    (child, unix::accept(&listener).unwrap().unwrap())
}

/// The children's side of the tests; nothing when run as a test.
#[test]
fn child() {
    let Ok(part) = std::env::var("WEFT_PART") else {
        return;
    };
    let name = std::env::var("WEFT_NAME").unwrap();
    let conn = unix::connect(Name::Abstract(name.as_bytes())).unwrap();
    let say = |what: &[u8], fds: &[&OwnedFd]| {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        unix::send_with_fds(&conn, what, &fds).unwrap();
    };
    if part == "memory" {
        let cookie = Box::new(*b"0123456789abcdef");
        say(&(cookie.as_ptr().addr() as u64).to_ne_bytes(), &[]);
        assert!(receive(&conn, 0).is_some());
        // SAFETY: a live box; the parent writes to it between two messages.
        let now = unsafe { std::ptr::from_ref(&*cookie).read_volatile() };
        say(&now, &[]);
        let _ = receive(&conn, 0);
        return;
    }
    let liveness = Liveness::start().unwrap();
    let mark = process::ForkDetector::new().unwrap();
    assert!(mark.is_here());
    unix::send_with_fds(&conn, b"liveness", &[liveness.fd()]).unwrap();
    assert!(receive(&conn, 0).is_some());
    match part.as_str() {
        "exit" => {}
        "thread-ends" => std::mem::forget(liveness),
        "drop" => {
            drop(liveness);
            say(b"dropped", &[]);
            let _ = receive(&conn, 0);
        }
        "exec" => {
            std::thread::spawn(|| {
                let e = Command::new("/bin/sh").args(["-c", "read line"]).exec();
                panic!("{e}");
            })
            .join()
            .unwrap();
        }
        "fork" => {
            // SAFETY: the child only ends.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                drop(liveness);
                // SAFETY: it is always allowed to end.
                unsafe { libc::_exit(i32::from(mark.is_here())) };
            }
            let mut status = 0;
            // SAFETY: `status` is ours to fill.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert!(mark.is_here() && status == 0);
            say(b"reaped", &[]);
            let _ = receive(&conn, 0);
        }
        "killed" => {
            let _ = receive(&conn, 0);
        }
        _ => panic!("what part is {part}?"),
    }
}

/// A child with a liveness page.
fn shown(part: &str) -> (Child, OwnedFd, PeerLiveness) {
    let (child, conn) = start(part);
    let (text, fds) = receive(&conn, 1).unwrap();
    assert_eq!(text, b"liveness");
    let liveness = PeerLiveness::open(&fds[0]).unwrap();
    assert!(liveness.beats());
    assert!(Mapping::new(&fds[0], 0, 4096, true).is_err(), "not ours");
    (child, conn, liveness)
}

#[test]
fn a_heart_stops_when_its_process_exits() {
    let (mut child, conn, liveness) = shown("exit");
    unix::send_with_fds(&conn, b"go", &[]).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(!liveness.beats());
}

#[test]
fn a_heart_stops_when_its_process_is_killed() {
    let (mut child, conn, liveness) = shown("killed");
    let pidfd = process::pidfd_open(child.id()).unwrap();
    unix::send_with_fds(&conn, b"go", &[]).unwrap();
    assert!(process::pidfd_alive(&pidfd));
    child.kill().unwrap();
    readable(&pidfd);
    // Before anybody reaps it, so before its number can be another's.
    assert!(!process::pidfd_alive(&pidfd));
    assert!(!liveness.beats());
    child.wait().unwrap();
    assert!(process::pidfd_open(u32::MAX).is_err());
}

#[test]
fn a_heart_stops_when_its_thread_ends() {
    let (mut child, conn, liveness) = shown("thread-ends");
    unix::send_with_fds(&conn, b"go", &[]).unwrap();
    child.wait().unwrap();
    assert!(!liveness.beats());
}

#[test]
fn a_heart_stops_when_its_process_runs_another_program() {
    let (mut child, conn, liveness) = shown("exec");
    let pidfd = process::pidfd_open(child.id()).unwrap();
    unix::send_with_fds(&conn, b"go", &[]).unwrap();
    // The connection is closed by exec.
    assert!(receive(&conn, 0).is_none());
    assert!(process::pidfd_alive(&pidfd), "the number lives on");
    assert!(!liveness.beats());
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn a_heart_outlives_children_of_fork_and_stops_when_dropped() {
    let (mut child, conn, liveness) = shown("fork");
    unix::send_with_fds(&conn, b"go", &[]).unwrap();
    assert_eq!(receive(&conn, 0).unwrap().0, b"reaped");
    assert!(liveness.beats());
    drop(conn);
    child.wait().unwrap();
    assert!(!liveness.beats());

    let (mut child, conn, liveness) = shown("drop");
    unix::send_with_fds(&conn, b"go", &[]).unwrap();
    assert_eq!(receive(&conn, 0).unwrap().0, b"dropped");
    assert!(!liveness.beats());
    drop(conn);
    child.wait().unwrap();
}

#[test]
fn a_heart_is_judged_by_its_file() {
    assert!(PeerLiveness::open(File::open("/dev/null").unwrap()).is_err());
    let dead = memfd::create("weft-test", 4096).unwrap();
    assert_eq!(
        PeerLiveness::open(&dead).unwrap_err().kind(),
        ErrorKind::NotConnected
    );
    let short = memfd::create("weft-test", 100).unwrap();
    assert!(PeerLiveness::open(&short).is_err());
}

#[test]
fn another_process_is_read_and_written() {
    let (mut child, conn) = start("memory");
    let (at, _) = receive(&conn, 0).unwrap();
    let remote = [libc::iovec {
        iov_base: std::ptr::without_provenance_mut(
            u64::from_ne_bytes(at.try_into().unwrap()) as usize
        ),
        iov_len: 16,
    }];
    let mut bytes = [0; 16];
    let (a, b) = bytes.split_at_mut(5);
    let local = [a, b].map(|part| libc::iovec {
        iov_base: part.as_mut_ptr().cast(),
        iov_len: part.len(),
    });
    // SAFETY: the local ranges are two halves of a buffer that nothing refers to during the calls.
    unsafe {
        assert_eq!(process::vm_readv(child.id(), &local, &remote).unwrap(), 16);
        assert_eq!(&bytes, b"0123456789abcdef");
        bytes.reverse();
        assert_eq!(process::vm_writev(child.id(), &local, &remote).unwrap(), 16);
        let nowhere = [libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 16,
        }];
        let e = process::vm_readv(child.id(), &local, &nowhere).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::EFAULT));
        unix::send_with_fds(&conn, b"look", &[]).unwrap();
        assert_eq!(receive(&conn, 0).unwrap().0, b"fedcba9876543210");
        drop(conn);
        child.wait().unwrap();
        let e = process::vm_readv(child.id(), &local, &remote).unwrap_err();
        assert_eq!(e.raw_os_error(), Some(libc::ESRCH));
    }
}

#[test]
fn messages_say_who_sent_them() {
    let (near, far) = pair("signed");
    let from = || unix::recv(&far, &mut [0; 8], 1).unwrap().unwrap().sender;
    unix::send_signed(&near, b"one", &[]).unwrap();
    assert!(from().is_none(), "nobody has asked");
    unix::send_signed(&near, b"two", &[near.as_fd()]).unwrap();
    unix::send_with_fds(&near, b"three", &[]).unwrap();
    unix::ask_for_senders(&far, true).unwrap();
    let sender = from().unwrap();
    assert_eq!(sender.cred, unix::peer_cred(&far).unwrap());
    assert!(sender.cred.is_same_user());
    if let Some(pidfd) = sender.pidfd {
        assert!(process::shares_user_namespace(&pidfd));
        let number = |fd: &std::os::fd::OwnedFd| process::pidfd_number(fd);
        let me = process::pidfd_open(std::process::id()).unwrap();
        assert_eq!(number(&pidfd), number(&me));
        assert_eq!(process::pidfd_number(&far), None);
    }
    let unsigned = from().unwrap().cred;
    assert!(!unsigned.is_same_user(), "{unsigned:?}");
    unix::ask_for_senders(&far, false).unwrap();
    unix::send_signed(&near, b"four", &[]).unwrap();
    assert!(from().is_none());
}

#[test]
fn messages_carry_descriptors() {
    let (near, far) = pair("carry");
    assert_eq!(
        unix::recv_with_fds(&far, &mut [0; 8], 1)
            .unwrap_err()
            .kind(),
        ErrorKind::WouldBlock
    );
    let cred = unix::peer_cred(&far).unwrap();
    assert_eq!(cred.pid, Some(std::process::id()));
    assert_eq!(cred.uid, rustix::process::geteuid().as_raw());
    assert!(unix::peer_cred(File::open("/dev/null").unwrap()).is_err());

    let fd = memfd::create("weft-test", 4096).unwrap();
    unix::send_with_fds(&near, b"one", &[fd.as_fd()]).unwrap();
    unix::send_with_fds(&near, b"two", &[fd.as_fd(), near.as_fd()]).unwrap();
    let (text, fds) = receive(&far, 3).unwrap();
    assert_eq!((text.as_slice(), fds.len()), (&b"one"[..], 1));
    assert_eq!(memfd::check(&fds[0]).unwrap(), 4096);
    let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    let (text, fds) = receive(&far, 2).unwrap();
    assert_eq!((text.as_slice(), fds.len()), (&b"two"[..], 2));
    assert!(unix::send_with_fds(&near, b"", &[]).is_err());
    let many = vec![fd.as_fd(); unix::MAX_FDS + 1];
    assert!(unix::send_with_fds(&near, b"many", &many).is_err());
    unix::send_with_fds(&near, b"most", &many[1..]).unwrap();
    assert_eq!(receive(&far, unix::MAX_FDS).unwrap().1.len(), 253);
    drop((fds, near));
    assert!(receive(&far, 1).is_none());
}

/// Open descriptors of this process that are memory files called so.
fn open_files(called: &str) -> usize {
    let target = |e: std::io::Result<std::fs::DirEntry>| e.ok()?.path().read_link().ok();
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(target)
        .filter(|t| t.to_string_lossy().contains(called))
        .count()
}

#[test]
fn too_much_is_refused_and_closed() {
    let (near, far) = pair("too-much");
    let fd = memfd::create("weft-too-much", 4096).unwrap();
    for max in 0..4 {
        unix::send_with_fds(&near, b"text", &[fd.as_fd(); 5]).unwrap();
        let e = unix::recv_with_fds(&far, &mut [0; 8], max).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidData, "{max}");
        assert_eq!(open_files("weft-too-much"), 1, "{max}");
    }
    unix::send_with_fds(&near, b"much text", &[fd.as_fd()]).unwrap();
    let e = unix::recv_with_fds(&far, &mut [0; 8], 1).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidData);
    assert_eq!(open_files("weft-too-much"), 1);
}

#[test]
fn names_in_the_file_system() {
    let dir = std::env::temp_dir().join(name("names"));
    std::fs::create_dir(&dir).unwrap();
    let path = dir.join("socket");
    let first = unix::listen(Name::Path(&path), 0).unwrap();
    let mode = rustix::fs::stat(&path).unwrap().st_mode;
    assert_eq!(mode & 0o7777, 0o600);
    let e = unix::listen(Name::Path(&path), 1).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::AddrInUse);
    // The attempt to see whether it lives waits in the backlog of one.
    assert_eq!(
        unix::connect(Name::Path(&path)).unwrap_err().kind(),
        ErrorKind::WouldBlock
    );
    assert!(unix::accept(&first).unwrap().is_some());
    assert!(unix::accept(&first).unwrap().is_none());
    drop(first);
    assert_eq!(
        unix::connect(Name::Path(&path)).unwrap_err().kind(),
        ErrorKind::ConnectionRefused
    );
    let second = unix::listen(Name::Path(&path), 4).unwrap();
    assert!(unix::connect(Name::Path(&path)).is_ok());
    drop(second);

    let plain = dir.join("plain");
    File::create(&plain).unwrap().write_all(b"mine").unwrap();
    let e = unix::listen(Name::Path(&plain), 4).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::AddrInUse);
    assert_eq!(std::fs::read(&plain).unwrap(), b"mine");
    std::fs::remove_dir_all(&dir).unwrap();
    assert!(unix::listen(Name::Abstract(&[b'x'; 200]), 4).is_err());
}

#[test]
fn a_readers_descriptor_cannot_write() {
    let fd = memfd::create("weft-test", 1 << 46).unwrap();
    let reader = memfd::reader(&fd).unwrap();
    assert_eq!(memfd::check(&reader).unwrap(), 1 << 46);
    let mode = rustix::fs::fstat(&reader).unwrap().st_mode;
    assert_eq!(mode & 0o7777, 0o400);
    let far = (1 << 46) - 4096;
    assert!(Mapping::new(&reader, far, 4096, true).is_err());
    let ours = Mapping::new(&fd, far, 4096, true).unwrap();
    let theirs = Mapping::new(&reader, far, 4096, false).unwrap();
    // SAFETY: inside the mappings; no references.
    unsafe {
        ours.as_ptr().write_volatile(7);
        assert_eq!(theirs.as_ptr().read_volatile(), 7);
        assert!(memfd::punch(&reader, far, 4096).is_err());
        memfd::punch(&fd, far, 4096).unwrap();
        assert_eq!(theirs.as_ptr().read_volatile(), 0);
    }
    ours.populate(0, 4096);
    theirs.populate(0, 8192);

    let (fd, ours) = memfd::create_owned("weft-test", 4096).unwrap();
    assert!(Mapping::new(&fd, 0, 4096, true).is_err());
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let again = File::options().read(true).write(true).open(path).unwrap();
    assert!(Mapping::new(&again, 0, 4096, true).is_err());
    assert!((&again).write(b"x").is_err());
    let theirs = Mapping::new(&fd, 0, 4096, false).unwrap();
    // SAFETY: as above.
    unsafe {
        ours.as_ptr().write_volatile(9);
        assert_eq!(theirs.as_ptr().read_volatile(), 9);
    }
}
