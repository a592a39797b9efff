//! What may happen between two steps of a meeting, and what must not come of it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use weft_ring::Role;
use weft_ring::stream::Stream;
use weft_run::meet::{self, Ends, Offer, Pending};
use weft_run_tests::{free_port, have, library, python, say, switched, weft};
use weft_sys::process::end_with_us;

use crate::guests::{as_user, offered_by};
use crate::lend::{everybody, let_in, make_offer};
use crate::lies::connected;
use crate::users::{USERS, by, can_be_others};

/// What the victim is waited for.
const PATIENCE: Timespec = Timespec {
    tv_sec: 10,
    tv_nsec: 0,
};

/// Bytes of a ring.
const RING: u32 = 256 << 10;

/// A connection to a program that echoes it.
struct Echo {
    victim: Child,
    said: BufReader<ChildStdout>,
    tcp: TcpStream,
    ends: Ends,
    listener: Option<OwnedFd>,
    dialled: Option<OwnedFd>,
    pending: Pending<OwnedFd>,
}

impl Echo {
    /// As this role to a program of a user. `None`: it cannot be run here.
    fn new(user: Option<u32>, role: Role) -> Option<Echo> {
        if !have(&[weft_run_tests::PYTHON]) || user.is_some() && !can_be_others() {
            return None;
        }
        let (victim, said, tcp, ends) = connected("meets.py", user, "0,12345", role);
        tcp.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Some(Echo {
            victim,
            said,
            tcp,
            ends,
            listener: None,
            dialled: None,
            pending: Vec::new(),
        })
    }

    fn echo(&mut self, byte: u8) {
        self.tcp.write_all(&[byte]).unwrap();
        self.tcp.read_exact(&mut [0]).unwrap();
    }

    /// Echoes until something has come, so often at most.
    fn until<T>(&mut self, most: usize, mut what: impl FnMut(&mut Echo) -> Option<T>) -> T {
        for _ in 0..most {
            if let Some(it) = what(self) {
                return it;
            }
            self.echo(b'x');
        }
        panic!("nothing has come in {most} echoes");
    }

    /// The wire, once the victim lets us in.
    fn let_in(&mut self) -> Option<OwnedFd> {
        let_in(&self.ends, &mut self.dialled)
    }

    fn listen(&mut self) {
        self.listener = Some(meet::listen(&self.ends).unwrap());
    }

    fn take(&mut self) -> Option<Offer> {
        let listener = self.listener.as_ref().unwrap();
        meet::take(listener, &mut self.pending, &self.tcp, &everybody()).unwrap()
    }

    /// Lets the victim close the connection, and meets it by the next one.
    fn meets_by_the_next(&mut self) {
        self.tcp.write_all(b"C").unwrap();
        let port = self.tcp.peer_addr().unwrap();
        self.ends = loop {
            self.tcp = TcpStream::connect(port).unwrap();
            let ends = Ends::of(&self.tcp).unwrap();
            if ends.role() == Role::Initiator {
                break ends;
            }
        };
        let wire = self.until(40, Echo::let_in);
        self.offer(&wire, 40);
    }

    /// Makes an offer, which the victim has to take after so many echoes.
    fn offer(&mut self, wire: &OwnedFd, most: usize) {
        let (stream, segment) = Stream::create_filled(RING).unwrap();
        make_offer(&self.tcp, wire, segment.as_fd());
        self.until(most, |_| stream.has_joined(Role::Responder).then_some(()));
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
    }
}

#[test]
fn a_program_that_takes_the_low_numbers_does_not_take_a_wire() {
    let Some(mut echo) = Echo::new(None, Role::Initiator) else {
        return;
    };
    let wire = echo.until(40, Echo::let_in);
    echo.echo(b'D');
    echo.offer(&wire, 40);
    // The next bytes would have to come by the ring.
    echo.tcp.write_all(b"?").unwrap();
    let mut line = String::new();
    echo.said.read_line(&mut line).unwrap();
    assert_eq!(line, "all are open\n");
}

#[test]
fn a_meeting_that_begins_late_goes_on_soon() {
    // Of 8,192 echoes the victim looks at the last one.
    const LATE: usize = 8_000;
    const SOON: usize = 8_192 + 64 - LATE;
    let Some(mut echo) = Echo::new(None, Role::Initiator) else {
        return;
    };
    (0..LATE).for_each(|_| echo.echo(b'x'));
    let wire = echo.until(SOON, Echo::let_in);
    echo.offer(&wire, 40);
    let mut echo = Echo::new(None, Role::Responder).unwrap();
    (0..LATE).for_each(|_| echo.echo(b'x'));
    echo.listen();
    echo.until(SOON, Echo::take);
}

#[test]
fn a_child_that_closes_the_connection_leaves_the_wire_of_its_parent() {
    let Some(mut echo) = Echo::new(Some(USERS[0]), Role::Initiator) else {
        return;
    };
    let wire = echo.until(40, Echo::let_in);
    echo.echo(b'F');
    echo.offer(&wire, 40);
}

#[test]
fn a_child_that_has_closed_the_connection_does_not_hold_its_bell() {
    let Some(mut echo) = Echo::new(Some(USERS[0]), Role::Initiator) else {
        return;
    };
    let _child_lives = echo.victim.stdin.take();
    let wire = echo.until(40, Echo::let_in);
    echo.echo(b'K');
    echo.offer(&wire, 40);
    echo.victim.kill().unwrap();
    let mut end = [PollFd::new(&wire, PollFlags::RDHUP)];
    assert_eq!(rustix::event::poll(&mut end, Some(&PATIENCE)), Ok(1));
}

#[test]
fn a_process_that_leaves_the_connection_to_its_child_leaves_the_wire() {
    let Some(mut echo) = Echo::new(Some(USERS[0]), Role::Initiator) else {
        return;
    };
    let _parent_lives = echo.victim.stdin.take();
    let wire = echo.until(40, Echo::let_in);
    echo.echo(b'P');
    // Who has let it in has closed the wire.
    echo.offer(&wire, 40);
}

#[test]
fn a_user_that_changes_between_dial_and_offer_dials_again() {
    if !can_be_others() {
        return;
    }
    let mut echo = Echo::new(None, Role::Responder).unwrap();
    echo.listen();
    // It has dialled, and waits.
    (0..6).for_each(|_| echo.echo(b'x'));
    echo.echo(b'E');
    for _ in 0..6 {
        assert!(echo.take().is_none());
        echo.echo(b'x');
    }
    echo.echo(b'R');
    echo.until(100, Echo::take);
}

#[test]
fn two_ends_whose_group_has_no_number_meet() {
    if !can_be_others() || !have(&[("unshare", "util-linux")]) {
        return;
    }
    let (one, other) = (free_port(), free_port());
    let line = python(&format!("both.py named.py {one} {other}"));
    let user = USERS[0];
    let done = weft().run(&by(user, &format!("unshare -U --map-user={user} {line}")));
    if done.text.contains("unshare failed") {
        say("skipped: no user namespaces here");
        return;
    }
    done.good().says("all bytes came back");
    assert_eq!(switched(&done.text), 2, "{}", done.show());
}

#[test]
fn a_connection_that_ends_before_its_offer_is_taken_bars_nobody() {
    let Some(mut echo) = Echo::new(Some(USERS[0]), Role::Initiator) else {
        return;
    };
    let wire = echo.until(40, Echo::let_in);
    // It waits for the next byte, and then closes the connection at once.
    let (_stream, segment) = Stream::create_filled(RING).unwrap();
    make_offer(&echo.tcp, &wire, segment.as_fd());
    echo.meets_by_the_next();
}

/// Sets the limit of a victim of another user from outside: one that sets its own is left alone by the library.
fn limit_descriptors(pid: u32, to: u64) {
    let line = by(USERS[0], &format!("prlimit --pid {pid} --nofile={to}:"));
    let mut words = line.split(' ');
    let mut command = Command::new(words.next().unwrap());
    assert!(command.args(words).status().unwrap().success());
}

#[test]
fn a_moment_without_free_numbers_bars_nobody() {
    if !have(&[("prlimit", "util-linux")]) {
        return;
    }
    let Some(mut echo) = Echo::new(Some(USERS[0]), Role::Initiator) else {
        return;
    };
    let wire = echo.until(40, Echo::let_in);
    let (_stream, segment) = Stream::create_filled(RING).unwrap();
    make_offer(&echo.tcp, &wire, segment.as_fd());
    let pid = echo.victim.id();
    let free = (0..1024).find(|n| !Path::new(&format!("/proc/{pid}/fd/{n}")).exists());
    limit_descriptors(pid, free.unwrap());
    // It looks, and gives up.
    (0..40).for_each(|_| echo.echo(b'x'));
    limit_descriptors(pid, 1024);
    echo.meets_by_the_next();
}

#[test]
fn a_program_gets_one_descriptor_of_another_user_and_not_as_its_standard_input() {
    let Some(mut echo) = Echo::new(Some(USERS[0]), Role::Initiator) else {
        return;
    };
    let wire = echo.until(40, Echo::let_in);
    echo.echo(b'Z');
    let (one, other) = std::io::pipe().unwrap();
    weft_sys::unix::send_with_fds(&wire, b"x", &[one.as_fd(), other.as_fd()]).unwrap();
    (0..40).for_each(|_| echo.echo(b'x'));
    echo.echo(b'N');
    let mut line = String::new();
    echo.said.read_line(&mut line).unwrap();
    assert_eq!(line, "1 new, 0 of them low, 0 can be closed\n");
}

/// Bytes that a file has memory for.
fn allocated(file: &OwnedFd) -> u64 {
    File::from(file.try_clone().unwrap())
        .metadata()
        .unwrap()
        .blocks()
        * 512
}

/// The connections of such a peer are not counted.
#[test]
fn a_peer_that_the_kernel_does_not_show_costs_no_memory_that_is_not_used() {
    if !can_be_others() {
        return;
    }
    // It is built by root.
    library();
    let met = || {
        // A process in which a thread has changed its user is not shown to that user.
        let mut echo = Echo::new(None, Role::Responder).unwrap();
        echo.listen();
        let made = echo.until(40, Echo::take).segment;
        let mut echo = Echo::new(None, Role::Initiator).unwrap();
        let wire = echo.until(40, Echo::let_in);
        let (stream, taken) = Stream::create(RING).unwrap();
        make_offer(&echo.tcp, &wire, taken.as_fd());
        echo.until(40, |_| stream.has_joined(Role::Responder).then_some(()));
        [made, taken].map(|segment| allocated(&segment))
    };
    let allocated = as_user(USERS[0], met);
    assert!(
        allocated.iter().all(|&n| n < u64::from(RING)),
        "{allocated:?}"
    );
}

/// Serves files whose `close` by another user waits until this is dropped.
struct Fuse {
    served: Child,
    /// One of them. The folder is gone.
    file: OwnedFd,
}

impl Fuse {
    /// `None`: there is no FUSE here.
    fn new() -> Option<Fuse> {
        if !can_be_others() || File::open("/dev/fuse").is_err() {
            say("skipped: no FUSE here");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        let line = python("fuse.py");
        let mut words = line.split(' ');
        let mut command = Command::new(words.next().unwrap());
        command
            .args(words)
            .arg(folder.path())
            .arg(USERS[0].to_string())
            .stdout(Stdio::piped());
        let mut served = end_with_us(&mut command).spawn().unwrap();
        let mut said = String::new();
        let mut out = BufReader::new(served.stdout.take().unwrap());
        out.read_line(&mut said).unwrap();
        assert_eq!(said, "ready\n");
        let file = File::open(folder.path().join("file")).unwrap().into();
        let mut unmount = Command::new("umount");
        unmount.arg("-l").arg(folder.path());
        assert!(unmount.status().unwrap().success());
        Some(Fuse { served, file })
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        self.served.kill().unwrap();
        self.served.wait().unwrap();
    }
}

#[test]
fn a_file_of_fuse_delays_nothing() {
    for how in 0..3 {
        let Some(fuse) = Fuse::new() else { return };
        let mut victim = offered_by(0, &format!("way {how}"), |tcp, wire| match how {
            0 => make_offer(tcp, wire, fuse.file.as_fd()),
            1 => weft_sys::unix::send_with_fds(wire, b"x", &[fuse.file.as_fd(); 2]).unwrap(),
            _ => {
                let (_stream, good) = Stream::create_filled(RING).unwrap();
                make_offer(tcp, wire, good.as_fd());
                let _ = weft_sys::unix::send_with_fds(wire, b"x", &[fuse.file.as_fd()]);
            }
        });
        drop(fuse);
        victim.kill().unwrap();
        victim.wait().unwrap();
    }
}
