//! A peer that ends, and whose process number another process gets: what is done to that one's memory.
//!
//! Three processes. The *peer* meets the victim and hands its sockets and files to the *heir*, who goes on in its name when it is dead. The
//! *bystander* gets the peer's number. While all this happens the victim is stopped, so that it finds the lie and the death at once.

use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, kill_process};

use crate::frames::Untagged;
use crate::frames::opcode;
use crate::meeting::{self, RING};
use crate::peer::PATIENCE;
use crate::report::Report;
use crate::rng::Rng;
use crate::shared::files::Entry;
use crate::shared::ring::{Ring, word};
use crate::shared::unix_socket::{UnixSocket, remember};
use crate::target::Target;

/// Bytes of memory that is looked at.
const LEN: usize = 4096;
/// What is in them.
const CANARY: u8 = 0x5c;

/// Memory of this process, whose address is told.
fn memory() -> &'static [u8] {
    let memory: &'static [u8] = Box::leak(vec![CANARY; LEN].into_boxed_slice());
    println!("at {:x}", memory.as_ptr() as u64);
    memory
}

/// The life of the peer: meets, gives all away, waits for its end.
pub fn peer(target: &Target) -> io::Result<()> {
    let heir = UnixSocket(std::io::stdin().as_fd().try_clone_to_owned()?);
    let (met, files) = meeting::meet(*target, &mut Rng::new(1))?;
    let memory = memory();
    let peer = met.session.peer;
    let ring = peer
        .ring
        .ok_or_else(|| io::Error::other("it stayed on TCP"))?;
    let fds = [
        ring.segment.as_fd(),
        ring.socket.0.as_fd(),
        peer.tcp.as_fd(),
        files.own.0.as_fd(),
    ];
    heir.send(b"yours", &fds)?;
    std::thread::sleep(PATIENCE);
    std::hint::black_box(memory);
    Ok(())
}

/// The life of the bystander.
pub fn bystander() -> io::Result<()> {
    let memory = memory();
    std::thread::sleep(PATIENCE);
    std::hint::black_box(memory);
    Ok(())
}

/// Starts this program in another role; its address comes with it.
fn start(words: &[&str], stdin: Stdio) -> io::Result<(Child, u64)> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(words)
        .stdin(stdin)
        .stdout(Stdio::piped())
        .spawn()?;
    let stdout = child.stdout.take().expect("a pipe");
    for line in BufReader::new(stdout).lines() {
        if let Some(addr) = line?.strip_prefix("at ") {
            let addr = u64::from_str_radix(addr, 16).map_err(io::Error::other)?;
            return Ok((child, addr));
        }
    }
    Err(io::Error::other("it did not come so far"))
}

/// Whether a process's memory is as it was.
fn is_whole(child: &Child, addr: u64) -> io::Result<bool> {
    Ok(remember(child.id(), addr, LEN)?
        .iter()
        .all(|b| *b == CANARY))
}

struct Heir {
    ring: Ring,
    table: std::fs::File,
    _tcp: OwnedFd,
    msn: u32,
}

impl Heir {
    /// Has the victim write to `addr` in the peer's address space.
    fn order(&mut self, addr: u64) -> io::Result<()> {
        let entry = Entry {
            generation: 2,
            stag: 0x0055_aa01,
            qp: 0,
            base: 0,
            len: LEN as u64,
            rights: !0,
            space: 0,
            at: addr,
        };
        self.table.write_all_at(&entry.bytes(), entry.place())?;
        let mut order = vec![b'W'];
        order.extend(entry.stag.to_be_bytes());
        order.extend(0_u64.to_be_bytes());
        order.extend((LEN as u32).to_be_bytes());
        let send = Untagged::new(opcode::SEND, 0, self.msn, &order);
        self.msn += 1;
        self.ring.frame(&send.bytes())
    }
}

/// All of it, against a verbs victim. `Ok(false)`: the system does not let us choose a process's number.
fn heir(target: &Target) -> Result<bool, String> {
    let text = |e: io::Error| e.to_string();
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| e.to_string())?;
    let addr = target.addr.to_string();
    let (mut peer, at) =
        start(&["reuse-peer", "verbs", &addr], Stdio::from(theirs)).map_err(text)?;
    let (_, fds) = UnixSocket(ours)
        .packet(PATIENCE)
        .map_err(text)?
        .ok_or("the peer gave nothing away")?;
    let [segment, socket, tcp, table]: [OwnedFd; 4] =
        fds.try_into().map_err(|_| "not four descriptors")?;
    let socket = UnixSocket(socket);
    let victim =
        Pid::from_raw(socket.process().map_err(text)?.cast_signed()).ok_or("no process")?;
    let mut heir = Heir {
        ring: Ring::new(segment.into(), socket, RING, true, Vec::new()),
        table: table.into(),
        _tcp: tcp,
        msn: 1,
    };
    heir.ring.store(word::CAPS, 1).map_err(text)?;
    // With the peer alive the way is open: else the rest would show nothing.
    heir.order(at).map_err(text)?;
    let written = (0..200).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        is_whole(&peer, at).is_ok_and(|whole| !whole)
    });
    if !written {
        let _ = peer.kill();
        return Err("the victim does not write to a living peer's memory".into());
    }
    let stop = |signal| kill_process(victim, signal).map_err(|e| e.to_string());
    stop(Signal::STOP)?;
    await_stop(victim)?;
    let number = peer.id();
    let outcome = in_its_place(&mut heir, &mut peer, number);
    stop(Signal::CONT)?;
    let Some((mut bystander, at)) = outcome? else {
        return Ok(false);
    };
    // Until the victim has seen the end.
    for _ in 0..100 {
        if heir.ring.is_over() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_millis(100));
    let whole = is_whole(&bystander, at);
    let _ = bystander.kill();
    let _ = bystander.wait();
    match whole {
        Ok(true) => Ok(true),
        other => Err(format!(
            "memory of a process that only has the number: {other:?}"
        )),
    }
}

/// Waits until every thread of a process has stopped: the signal takes a moment.
fn await_stop(process: Pid) -> Result<(), String> {
    let tasks = format!("/proc/{}/task", process.as_raw_nonzero());
    let stopped = |stat: &str| {
        stat.rsplit(')')
            .next()
            .is_some_and(|rest| rest.starts_with(" T"))
    };
    for _ in 0..1000 {
        let tasks = std::fs::read_dir(&tasks).map_err(|e| e.to_string())?;
        let mut stats = tasks
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
        if stats.all(|stat| stopped(&stat)) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err("the victim cannot be stopped".into())
}

/// Ends the peer, gives another process its number, and has the victim write there.
fn in_its_place(
    heir: &mut Heir,
    peer: &mut Child,
    number: u32,
) -> Result<Option<(Child, u64)>, String> {
    let text = |e: io::Error| e.to_string();
    peer.kill().map_err(text)?;
    peer.wait().map_err(text)?;
    for _ in 0..50 {
        let last = (number - 1).to_string();
        if std::fs::write("/proc/sys/kernel/ns_last_pid", last).is_err() {
            return Ok(None);
        }
        let (mut bystander, at) = start(&["reuse-bystander"], Stdio::null()).map_err(text)?;
        if bystander.id() == number {
            for _ in 0..4 {
                heir.order(at).map_err(text)?;
            }
            return Ok(Some((bystander, at)));
        }
        let _ = bystander.kill();
        let _ = bystander.wait();
    }
    Ok(None)
}

/// Reports what came of it.
pub fn run(target: &Target, report: &mut Report) {
    for round in 0..3 {
        let outcome = match heir(target) {
            Ok(true) => Ok(()),
            Ok(false) => {
                println!("note a process's number cannot be chosen here");
                Ok(())
            }
            Err(e) => Err(e),
        };
        report.case(format!("a number used again, {round}"), outcome);
    }
}
