//! Memory of another process. A child is this very test program, told by the environment to play a part.

#![cfg(not(miri))] // processes

use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use weft_mem::{
    Access, Backing, ExportAddr, PdId, Peer, Process, RecvList, Region, SendList, Table, Target,
};
use weft_sys::liveness::{Liveness, PeerLiveness};
use weft_sys::memfd::Mapping;
use weft_sys::unix::{self, Name};
use weft_sys::{Interest, poll_fds, process};

const PD: PdId = PdId(3);
const QP: u32 = 7;
const COOKIE: [u8; 16] = *b"a child's cookie";
const WRITE: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);
const ALL: Access = WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);
const LONG: Option<Duration> = Some(Duration::from_secs(20));
const LEN: usize = 3 << 20;
/// A user without rights.
const NOBODY: u32 = 65534;

fn receive(fd: &OwnedFd) -> Option<(Vec<u64>, Vec<OwnedFd>)> {
    assert_eq!(poll_fds(&[(fd.as_fd(), Interest::READ)], LONG).unwrap(), 1);
    let mut buf = [0; 256];
    let (n, fds) = unix::recv_with_fds(fd, &mut buf, 8).unwrap()?;
    let (words, _) = buf[..n].as_chunks();
    Some((words.iter().map(|w| u64::from_ne_bytes(*w)).collect(), fds))
}

fn send(fd: &OwnedFd, words: &[u64], fds: &[BorrowedFd<'_>]) {
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    unix::send_with_fds(fd, &bytes, fds).unwrap();
}

/// Starts a child that plays `part`; it connects to us.
fn start(part: &str) -> (Child, OwnedFd) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let n = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("weft-test-{part}-{}-{n}", std::process::id());
    let listener = unix::listen(Name::Abstract(name.as_bytes()), 4).unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("WEFT_PART", part)
        .env("WEFT_NAME", name)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(
        poll_fds(&[(listener.as_fd(), Interest::READ)], LONG).unwrap(),
        1
    );
    (child, unix::accept(&listener).unwrap().unwrap())
}

/// Gives root up for good, if we have it.
fn become_nobody() {
    // SAFETY: these calls change the process's credentials and a flag only.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
            assert_eq!(libc::setgid(NOBODY), 0);
            assert_eq!(libc::setuid(NOBODY), 0);
            assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0), 0);
        }
        assert_ne!(libc::geteuid(), 0);
    }
}

/// Nobody can write through this descriptor.
fn cannot_be_written(fd: BorrowedFd<'_>) {
    assert!(Mapping::new(fd, 0, 4096, true).is_err());
    assert!(Mapping::new(fd, 0, 4096, false).is_ok());
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    match std::fs::File::options().read(true).write(true).open(path) {
        Ok(file) => assert!(Mapping::new(&file, 0, 4096, true).is_err()),
        Err(e) => assert_eq!(e.kind(), ErrorKind::PermissionDenied),
    }
}

/// The children's side of the tests; nothing when run as a test.
#[test]
fn child() {
    let Ok(part) = std::env::var("WEFT_PART") else {
        return;
    };
    let name = std::env::var("WEFT_NAME").unwrap();
    let conn = unix::connect(Name::Abstract(name.as_bytes())).unwrap();
    match part.as_str() {
        "owner" => owner(&conn),
        "nobody" => {
            become_nobody();
            let (_, fds) = receive(&conn).unwrap();
            for (i, fd) in fds.iter().enumerate().filter(|(i, _)| *i != 1) {
                eprintln!("file {i}");
                cannot_be_written(fd.as_fd());
            }
            // The same with files that this very user made.
            let domain = Table::new(10).domain(PD).unwrap();
            let fds = domain.fds(true);
            for i in [0, 2, 3] {
                eprintln!("own file {i}");
                cannot_be_written(fds[i]);
            }
            send(&conn, &[1], &[]);
        }
        "small-files" => {
            let limit = libc::rlimit {
                rlim_cur: 1 << 20,
                rlim_max: 1 << 20,
            };
            // SAFETY: it reads the limit only.
            let rc = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
            assert_eq!(rc, 0);
            let table = Table::new(10);
            assert!(table.domain(PD).is_err());
            let r = table
                .register(PD, Backing::Shared(4 << 20), 0, ALL)
                .unwrap();
            r.write((4 << 20) - 3, b"abc").unwrap();
            let span = table.local(PD, r.stag(), 0, 1, Access::empty()).unwrap();
            assert_eq!(span.place().space, 0);
            send(&conn, &[1], &[]);
        }
        _ => panic!("what part is {part}?"),
    }
}

/// Shows a domain, and does what it is told.
fn owner(conn: &OwnedFd) {
    let liveness = Liveness::start().unwrap();
    let table = Table::new(100);
    let domain = table.domain(PD).unwrap();
    let cookie = Box::new(COOKIE);
    let make = |backing, access| {
        let r = table.register(PD, backing, 0, access).unwrap();
        let bytes: Vec<u8> = (0..LEN).map(|i| i as u8 ^ 0x55).collect();
        r.write(0, &bytes).unwrap();
        r
    };
    let mut regions = [
        Some(make(Backing::Shared(LEN), ALL)),
        Some(make(Backing::Shared(LEN), Access::REMOTE_READ)),
        Some(make(Backing::Shared(LEN), Access::LOCAL_WRITE)),
        Some(make(Backing::Owned(vec![0; LEN]), ALL)),
    ];
    let mut hello = vec![cookie.as_ptr().addr() as u64];
    for r in regions.iter().flatten() {
        let span = table.local(PD, r.stag(), 0, 1, Access::empty()).unwrap();
        let ExportAddr { space, addr } = span.place();
        hello.extend([r.stag().into(), space.into(), addr]);
    }
    let mut fds = domain.fds(true);
    fds.push(liveness.fd());
    send(conn, &hello, &fds);
    while let Some((order, _)) = receive(conn) {
        let region = regions.get_mut(order[1] as usize).unwrap();
        let r = region.as_ref().unwrap();
        let answer = match order[0] {
            // How many bytes of a range are not this one?
            0 => {
                let mut bytes = vec![0; order[3] as usize];
                r.read(order[2] as usize, &mut bytes).unwrap();
                bytes.iter().filter(|b| u64::from(**b) != order[4]).count() as u64
            }
            1 => r.load_u64(order[2] as usize).unwrap(),
            2 => {
                assert!(region.take().unwrap().deregister().is_ok());
                0
            }
            // A child of ours must not harm what is ours.
            3 => fork_and_drop(&table, region),
            // Another program in our place.
            4 => {
                std::thread::spawn(|| {
                    let e = Command::new("/bin/sh").args(["-c", "read line"]).exec();
                    panic!("{e}");
                })
                .join()
                .unwrap();
                0
            }
            _ => panic!("what order is {}?", order[0]),
        };
        send(conn, &[answer], &[]);
    }
}

fn fork_and_drop(table: &Table, region: &mut Option<Region>) -> u64 {
    // SAFETY: only this thread and one that sleeps exist; the child ends without unwinding.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let own = table.register(PD, Backing::Shared(4096), 0, ALL).unwrap();
        let span = table.local(PD, own.stag(), 0, 1, Access::empty()).unwrap();
        // Not the arena's next bytes, which the parent may give away.
        let fine = span.place().space == 0 && table.domain(PD).is_err();
        drop((span, own, region.take()));
        // SAFETY: it is always allowed to end.
        unsafe { libc::_exit(i32::from(!fine)) };
    }
    let mut status = 0;
    // SAFETY: `status` is ours to fill.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    status as u64
}

/// A child that owns memory, as its peer sees it.
struct Other {
    child: Child,
    conn: OwnedFd,
    peer: Peer,
    cookie: u64,
    /// `STag`s and places of the regions.
    stags: Vec<u32>,
    places: Vec<ExportAddr>,
}

impl Other {
    fn new() -> Other {
        let (child, conn) = start("owner");
        let (hello, mut fds) = receive(&conn).unwrap();
        let liveness = PeerLiveness::open(fds.pop().unwrap()).unwrap();
        let peer = Peer::open(fds).unwrap();
        let regions: Vec<_> = hello[1..].chunks(3).collect();
        let stags: Vec<_> = regions.iter().map(|r| r[0] as u32).collect();
        assert!(
            peer.find(QP, stags[3], 0, 1, ALL - Access::LOCAL_WRITE)
                .is_none()
        );
        let pid = unix::peer_cred(&conn).unwrap().pid.unwrap();
        assert_eq!(pid, child.id());
        let pidfd = process::pidfd_open(pid).unwrap();
        peer.set_process(Process {
            pid,
            pidfd,
            liveness,
        });
        let place = |r: &&[u64]| ExportAddr {
            space: r[1] as u32,
            addr: r[2],
        };
        Other {
            child,
            peer,
            cookie: hello[0],
            stags,
            places: regions.iter().map(place).collect(),
            conn,
        }
    }

    fn order(&self, words: &[u64]) -> u64 {
        send(&self.conn, words, &[]);
        receive(&self.conn).unwrap().0[0]
    }

    fn find(&self, region: usize, to: usize, len: usize, need: Access) -> Option<Target> {
        let stag = self.stags[region];
        self.peer.find(QP, stag, to as u64, len as u32, need)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn memory_of_another_process_is_written_read_and_counted() {
    let other = Other::new();
    let peer = &other.peer;
    assert!(peer.alive());
    assert!(peer.probe(other.cookie, &COOKIE));
    assert!(!peer.probe(other.cookie, b"another's cookie"));
    assert!(!peer.probe(0, &COOKIE));
    assert_eq!(
        other.places.iter().map(|p| p.space).collect::<Vec<_>>(),
        [1, 2, 3, 0]
    );
    let original: Vec<u8> = (0..LEN).map(|i| i as u8 ^ 0x55).collect();
    // More pieces than the kernel takes in one call, and not all of one size.
    let sizes = || (0..2500).map(|i| 1 + i * 7 % 900);
    let total: usize = sizes().sum();
    let ours = Table::new(10);
    let text = ours
        .register(PD, Backing::Shared(total), 0, Access::LOCAL_WRITE)
        .unwrap();
    text.fill(0, total, 9).unwrap();
    let span = ours
        .local(PD, text.stag(), 0, total as u32, Access::empty())
        .unwrap();
    for region in [0, 3] {
        let mut list = SendList::new();
        let mut at = 0;
        for size in sizes() {
            list.push_span(&span, at, size);
            at += size;
        }
        let target = other.find(region, 12345, total, WRITE - Access::LOCAL_WRITE);
        peer.write(&target.unwrap(), &list).unwrap();
        let check = |from, len, byte| other.order(&[0, region as u64, from, len, byte]);
        assert_eq!(check(12345, total as u64, 9), 0);
        assert_eq!(check(12344, 1, u64::from(original[12344])), 0);
        let after = 12345 + total;
        assert_eq!(check(after as u64, 1, u64::from(original[after])), 0);

        let target = other.find(region, 8, 8, Access::REMOTE_ATOMIC).unwrap();
        let before = other.order(&[1, region as u64, 8]);
        let old = peer.fetch_add(&target, 5);
        assert_eq!(old, (region == 0).then_some(before));
        let now = other.order(&[1, region as u64, 8]);
        assert_eq!(now, if region == 0 { before + 5 } else { before });
    }
    for region in [0, 1, 3] {
        let mut bytes = vec![0; 100_000];
        let mut list = RecvList::new();
        for part in bytes.chunks_mut(33) {
            list.push_buf(part);
        }
        let from = LEN - 100_000;
        let target = other
            .find(region, from, 100_000, Access::REMOTE_READ)
            .unwrap();
        peer.read(&target, &mut list).unwrap();
        assert!(bytes == original[from..], "{region}");
    }
    assert!(other.find(1, 0, 1, Access::REMOTE_WRITE).is_none());
    assert!(other.find(2, 0, 1, Access::REMOTE_READ).is_none());
    // What the peer refers to itself may be anywhere.
    for place in &other.places {
        let mut bytes = [0; 50];
        let mut list = RecvList::new();
        let (a, b) = bytes.split_at_mut(11);
        list.push_buf(a);
        list.push_buf(b);
        let addr = place.addr + LEN as u64 - 40;
        peer.pull(ExportAddr { addr, ..*place }, &mut list, 10, 40)
            .unwrap();
        assert_eq!(bytes[..10], [0; 10]);
        assert_eq!(bytes[10..], original[LEN - 40..]);
    }
    // But not nowhere.
    let mut bytes = [0; 50];
    let mut list = RecvList::new();
    list.push_buf(&mut bytes);
    let e = peer.pull(ExportAddr { space: 0, addr: 0 }, &mut list, 0, 50);
    assert_eq!(e.unwrap_err().raw_os_error(), Some(libc::EFAULT));

    assert_eq!(other.order(&[3, 0]), 0, "a child of fork did harm");
    let target = other.find(0, 0, 10, Access::REMOTE_READ).unwrap();
    let mut list = RecvList::new();
    list.push_buf(&mut bytes[..10]);
    peer.read(&target, &mut list).unwrap();
    assert_eq!(bytes[..5], original[..5]);

    for region in [0, 1, 3] {
        other.order(&[2, region as u64]);
        assert!(other.find(region, 0, 1, Access::REMOTE_READ).is_none());
    }
}

#[test]
fn a_peer_that_is_killed_ends_a_copy_with_an_error() {
    for region in [3, 0] {
        let mut other = Other::new();
        let bytes = vec![1; LEN];
        let mut list = SendList::new();
        list.push_bytes(&bytes);
        let target = other.find(region, 0, LEN, Access::REMOTE_WRITE).unwrap();
        other.peer.write(&target, &list).unwrap();
        let pid = other.child.id();
        std::thread::scope(|s| {
            s.spawn(|| {
                // SAFETY: the number is that of our child, which nobody has reaped.
                assert_eq!(unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) }, 0);
            });
            while other.peer.alive() {
                match other.peer.write(&target, &list) {
                    Ok(()) => {}
                    Err(e) => {
                        assert_eq!(region, 3, "{e}");
                        assert_ne!(e.kind(), ErrorKind::Unsupported, "{e}");
                    }
                }
            }
        });
        other.child.wait().unwrap();
        // Files outlive their maker; address spaces do not.
        assert_eq!(other.peer.write(&target, &list).is_ok(), region == 0);
        assert!(!other.peer.probe(other.cookie, &COOKIE));
    }
}

#[test]
fn another_program_in_the_peers_process_is_left_alone() {
    let mut other = Other::new();
    let target = other.find(3, 0, 10, Access::REMOTE_WRITE).unwrap();
    send(&other.conn, &[4, 0], &[]);
    // exec closes the connection.
    assert!(receive(&other.conn).is_none());
    assert!(!other.peer.alive());
    let mut list = SendList::new();
    list.push_bytes(b"not for you");
    assert!(other.peer.write(&target, &list).is_err());
    list = SendList::new();
    list.push_bytes(b"for nobody");
    let e = other.peer.write(&target, &list).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::NotConnected);
    drop(other.child.stdin.take());
    assert!(!other.peer.probe(other.cookie, &COOKIE));
}

#[test]
fn a_user_without_rights_cannot_write_to_files_for_reading() {
    let (mut child, conn) = start("nobody");
    let table = Table::new(10);
    let domain = table.domain(PD).unwrap();
    send(&conn, &[0], &domain.fds(true));
    assert!(receive(&conn).is_some(), "see what the child printed");
    assert!(child.wait().unwrap().success());
}

#[test]
fn shared_memory_is_plain_where_files_may_not_be_large() {
    let (mut child, conn) = start("small-files");
    assert!(receive(&conn).is_some());
    assert!(child.wait().unwrap().success());
}
