//! Other processes of this host, and the state that a device shares with them.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};

use weft_mem::{Peer, Process};
use weft_sys::liveness::PeerLiveness;
use weft_sys::{Event, Interest, process};
use weft_wire::local::SideInfo;

use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;

mod peer_process;

pub(crate) use peer_process::{ChallengeCell, PeerProcess, admitted};

/// Why a connection is not on shared memory: a text for people.
pub(crate) type Why = String;

pub(crate) fn why(what: &'static str) -> impl Fn(io::Error) -> Why {
    move |error| format!("{what}: {error}")
}

/// A peer's domain: its process as the kernel names it, its own name for it, and how much of its memory we can reach.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct DomainKey {
    process: u64,
    domain: [u8; 16],
    by_number: bool,
    trusted: bool,
}

/// The state that all connections of a device on this host share.
#[derive(Default)]
pub(crate) struct Neighbours {
    domains: Mutex<HashMap<DomainKey, Weak<Peer>>>,
    processes: Mutex<HashMap<u64, Weak<Neighbour>>>,
}

/// Another process of this host, watched so that its death is noticed even when its children keep its sockets open.
pub(crate) struct Neighbour {
    pidfd: OwnedFd,
    qps: Mutex<Vec<Weak<dyn PeerWatch>>>,
    #[allow(dead_code)] // ends with it
    registration: Registration,
}

impl Neighbour {
    /// Whether the process is alive.
    pub(crate) fn is_alive(&self) -> bool {
        process::pidfd_alive(&self.pidfd)
    }

    /// Registers a queue pair to be notified when the process ends. False if it has ended.
    pub(crate) fn add(&self, qp: Weak<dyn PeerWatch>) -> bool {
        let mut qps = lock(&self.qps);
        if qps.len() == qps.capacity() {
            qps.retain(|qp| qp.strong_count() > 0);
        }
        qps.push(qp);
        drop(qps);
        self.is_alive()
    }
}

/// A connection that is notified when its peer's process ends.
pub(crate) trait PeerWatch: Send + Sync {
    /// The peer's process has ended.
    fn peer_died(self: Arc<Self>);
}

/// The engine's hold on a neighbour, which must not keep it.
struct Watch(Weak<Neighbour>);

impl Source for Watch {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if let Some(neighbour) = self.0.upgrade() {
            let qps = std::mem::take(&mut *lock(&neighbour.qps));
            for qp in qps.iter().filter_map(Weak::upgrade) {
                qp.peer_died();
            }
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {}
}

impl Neighbours {
    pub(crate) fn neighbour(
        &self,
        engine: &Arc<Engine>,
        number: u64,
        pidfd: BorrowedFd<'_>,
    ) -> io::Result<Arc<Neighbour>> {
        let mut processes = lock(&self.processes);
        if let Some(known) = processes.get(&number).and_then(Weak::upgrade)
            && process::pidfd_alive(&known.pidfd)
        {
            return Ok(known);
        }
        processes.retain(|_, known| known.strong_count() > 0);
        let neighbour = Arc::new(Neighbour {
            pidfd: pidfd.try_clone_to_owned()?,
            qps: Mutex::default(),
            registration: Registration::new(engine),
        });
        let watch = Arc::new(Watch(Arc::downgrade(&neighbour)));
        let pidfd = neighbour.pidfd.as_fd();
        neighbour.registration.start(watch, pidfd, Interest::READ)?;
        processes.insert(number, Arc::downgrade(&neighbour));
        Ok(neighbour)
    }

    /// The peer's domain: mapped once, however many connections lead there.
    pub(crate) fn domain(
        &self,
        who: &PeerProcess,
        party: &SideInfo,
        by_number: bool,
        mut fds: Vec<OwnedFd>,
    ) -> io::Result<Arc<Peer>> {
        if fds.len() < 2 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let liveness = fds.remove(0);
        let open = || {
            let peer = Peer::open(fds)?;
            let liveness = PeerLiveness::open(&liveness)?;
            if let (Some(pid), Some(pidfd), true) = (who.pid, &who.pidfd, by_number) {
                let pidfd = pidfd.try_clone()?;
                peer.set_process(Process {
                    pid,
                    pidfd,
                    liveness,
                });
            }
            Ok::<_, io::Error>(Arc::new(peer))
        };
        let Some(process) = who.number() else {
            // Any domain could have this name.
            return open();
        };
        let key = DomainKey {
            process,
            domain: party.domain,
            by_number,
            trusted: party.trusted,
        };
        let mut domains = lock(&self.domains);
        if let Some(known) = domains.get(&key).and_then(Weak::upgrade)
            && known.alive()
        {
            return Ok(known);
        }
        domains.retain(|_, known| known.strong_count() > 0);
        let peer = open()?;
        domains.insert(key, Arc::downgrade(&peer));
        Ok(peer)
    }
}
