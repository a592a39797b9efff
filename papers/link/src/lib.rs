//! A long link on one machine: two network namespaces, a TUN device in each, and a thread each way that forwards packets
//! when they have been under way long enough.
//!
//! It stands in for a network emulator between two hosts (the stream paper's IV.B.2 had one of 48 ms): programs started in
//! the two [`Namespace`]s see each other as hosts of a network, with the kernel's own TCP between them. Making one needs
//! `CAP_SYS_ADMIN` and `CAP_NET_ADMIN`: root, or a user namespace (`unshare -Ur PROGRAM`); and the program `ip` of iproute2.
//!
//! TCP segments are forwarded before the kernel cuts them for the wire, up to 64 KiB a packet: that is what lets one core carry
//! gigabits. A dropped packet therefore is a larger loss than on a real link.
#![forbid(unsafe_code)]

mod forward;
mod network;
mod shape;

pub use network::{MOST_HOSTS, Network, host_address};
pub use shape::Shape;

use forward::{Counters, Direction, Way};
use nix::sched::{CloneFlags, setns, unshare};
use shape::Shaper;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::thread::JoinHandle;
use weft_sys::EventFd;
use weft_sys::tun::open_tun;

/// The address of the near end; from the block for such tests (RFC 2544).
pub const NEAR: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The address of the far end.
pub const FAR: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// The interface's name in either namespace.
const INTERFACE: &str = "weft0";
/// Packets that may wait for the forwarding thread.
const TX_QUEUE: &str = "10000";
/// The largest window that TCP may grow to, each way: 10 Gb/s over 200 ms.
const LARGEST_WINDOW: u32 = 256 << 20;

/// Why there is no link.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The privilege is missing.
    #[error("making network namespaces needs root, or a user namespace (`unshare -Ur PROGRAM`)")]
    Privilege,
    /// There are no TUN devices here.
    #[error("this machine has no TUN devices (/dev/net/tun): {0}")]
    NoTun(io::Error),
    /// The program `ip` is missing, or refused.
    #[error("`ip {what}` failed: {why} (the package iproute2 has `ip`)")]
    Ip {
        /// Its arguments.
        what: String,
        /// Its error text.
        why: String,
    },
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The attempted operation.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> LinkError {
    move |source| LinkError::System { what, source }
}

/// One end: a network namespace with one interface, besides the loopback.
#[derive(Debug)]
pub struct Namespace {
    file: File,
}

impl Namespace {
    /// Creates a namespace and its device in a new thread, because a namespace belongs to threads.
    /// `address`: what `ip addr add` gets before the device.
    fn create(address: &[&str], mtu: u32) -> Result<(Self, OwnedFd), LinkError> {
        let address: Vec<String> = address.iter().map(|word| (*word).to_owned()).collect();
        let make = move || {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|error| match error {
                nix::Error::EPERM => LinkError::Privilege,
                other => system("make a network namespace")(other.into()),
            })?;
            let file =
                File::open("/proc/thread-self/ns/net").map_err(system("open the namespace"))?;
            let device = open_tun(INTERFACE).map_err(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => LinkError::Privilege,
                _ => LinkError::NoTun(error),
            })?;
            let mtu = mtu.to_string();
            ip(&["link", "set", "lo", "up"])?;
            ip(&[
                "link",
                "set",
                INTERFACE,
                "mtu",
                &mtu,
                "txqueuelen",
                TX_QUEUE,
                "up",
            ])?;
            let mut words = vec!["addr", "add"];
            words.extend(address.iter().map(String::as_str));
            words.extend(["dev", INTERFACE]);
            ip(&words)?;
            tune()?;
            Ok((Self { file }, device))
        };
        let thread = std::thread::Builder::new().spawn(make);
        let thread = thread.map_err(system("start a thread"))?;
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// A file by which nsenter(1) enters it, as long as this lives.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd()).into()
    }

    /// Runs `work` in a new thread in this namespace: sockets opened, threads and programs started there belong to the
    /// namespace from then on.
    ///
    /// # Errors
    /// When the namespace may not be entered, or no thread can be started.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        std::thread::scope(|scope| {
            let inside = || {
                setns(&self.file, CloneFlags::CLONE_NEWNET)?;
                Ok(work())
            };
            let thread = std::thread::Builder::new().spawn_scoped(scope, inside)?;
            thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// Runs `ip` in the calling thread's namespace.
fn ip(args: &[&str]) -> Result<(), LinkError> {
    let failed = |why: String| LinkError::Ip {
        what: args.join(" "),
        why,
    };
    let output = Command::new("ip").args(args).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        Ok(())
    } else {
        Err(failed(
            String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        ))
    }
}

/// Sets TCP up for a long link, in the calling thread's namespace: windows that hold the bytes under way, and nothing
/// remembered from one connection to the next, so that runs do not depend on each other.
fn tune() -> Result<(), LinkError> {
    for (name, value) in [
        ("tcp_rmem", format!("4096 131072 {LARGEST_WINDOW}")),
        ("tcp_wmem", format!("4096 65536 {LARGEST_WINDOW}")),
        ("tcp_no_metrics_save", "1".to_owned()),
        ("tcp_slow_start_after_idle", "0".to_owned()),
    ] {
        std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value)
            .map_err(system("set a namespace's TCP options"))?;
    }
    // The rest of a datagram that lost a packet is not to keep others out for half a minute, when the link loses packets. Not every
    // kernel lets a namespace choose.
    for (name, value) in [("ipfrag_time", "1"), ("ipfrag_high_thresh", "67108864")] {
        let _ = std::fs::write(format!("/proc/sys/net/ipv4/{name}"), value);
    }
    Ok(())
}

/// Counts of one direction of a link so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets that arrived.
    pub packets: u64,
    /// Their bytes, IP headers included.
    pub bytes: u64,
    /// Dropped packets: the queue was full, or the other end did not accept them.
    pub dropped: u64,
}

/// A link. When it is dropped packets stop; the namespaces go with their last process.
#[derive(Debug)]
pub struct Link {
    ends: [Namespace; 2],
    counters: [Arc<Counters>; 2],
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Link {
    /// Makes the namespaces and starts forwarding. `mtu` is the interfaces' (68 to 65,535 bytes): it sets the size of TCP's segments.
    ///
    /// # Errors
    /// Without privilege, without TUN devices, without `ip`.
    pub fn new(shape: Shape, mtu: u32) -> Result<Self, LinkError> {
        let end = |ours: Ipv4Addr, theirs: Ipv4Addr| {
            Namespace::create(&[&ours.to_string(), "peer", &theirs.to_string()], mtu)
        };
        let (near, near_device) = end(NEAR, FAR)?;
        let (far, far_device) = end(FAR, NEAR)?;
        let devices = [Arc::new(near_device), Arc::new(far_device)];
        let mut link = Self {
            ends: [near, far],
            counters: <[Arc<Counters>; 2]>::default(),
            stop: Arc::new(EventFd::new().map_err(system("make an event descriptor"))?),
            threads: Vec::new(),
        };
        for (index, name) in ["weft-link-out", "weft-link-back"].into_iter().enumerate() {
            let direction = Direction {
                from: Arc::clone(&devices[index]),
                to: Way::Link(Arc::clone(&devices[1 - index])),
                stop: Arc::clone(&link.stop),
                counters: Arc::clone(&link.counters[index]),
                shaper: Shaper::new(shape, index as u64),
            };
            let thread = std::thread::Builder::new().name(name.to_owned());
            let thread = thread.spawn(|| direction.run());
            link.threads.push(thread.map_err(system("start a thread"))?);
        }
        Ok(link)
    }

    /// The near end, with the address [`NEAR`].
    pub fn near(&self) -> &Namespace {
        &self.ends[0]
    }

    /// The far end, with the address [`FAR`].
    pub fn far(&self) -> &Namespace {
        &self.ends[1]
    }

    /// Returns the forwarded traffic from near to far, and back.
    pub fn traffic(&self) -> [Traffic; 2] {
        [0, 1].map(|index| self.counters[index].traffic())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.stop.signal();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
