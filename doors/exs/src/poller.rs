//! The thread that drives what the soft RNIC does not: ordinary sockets with waiting operations, and connections over an RNIC of the machine.
//! The process has one; the first of them starts it.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::process::{Pid, getpid};
use weft_sockets::lock::lock;
use weft_verbs::PerProcess;

/// What waits for a descriptor or for a time.
pub(crate) trait Watched: Send + Sync {
    /// Called when an event of [`Poller::arm`] has happened.
    fn on_ready(&self);

    /// Called when a time of [`Poller::at`] has come.
    fn on_time(&self) {}
}

/// Id of the thread's own descriptor.
const WAKE: u64 = 0;
/// Sockets processed between two checks of the timers.
const BATCH: usize = 64;
/// The kernel limits waits to an `int` of milliseconds; one wake-up an hour costs nothing.
const LONGEST: Duration = Duration::from_hours(1);

pub(crate) struct Poller {
    /// The owner: a forked child inherits the same epoll instance and must not touch it.
    pid: Pid,
    epoll: OwnedFd,
    wake: OwnedFd,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    sockets: HashMap<u64, Weak<dyn Watched>>,
    timers: BTreeSet<(Instant, u64)>,
    last: u64,
}

impl Poller {
    pub(crate) fn get() -> Result<Arc<Poller>, Errno> {
        static POLLER: PerProcess<Poller> = PerProcess::new();
        POLLER.get(|| {
            let poller = Arc::new(Poller {
                pid: getpid(),
                epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
                wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
                table: Mutex::default(),
            });
            epoll::add(
                &poller.epoll,
                &poller.wake,
                epoll::EventData::new_u64(WAKE),
                epoll::EventFlags::IN,
            )?;
            let run = Arc::clone(&poller);
            std::thread::Builder::new()
                .name("weft-exs".into())
                .spawn(move || run.run())
                .map_err(|_| Errno::AGAIN)?;
            Ok(poller)
        })
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Adds a socket, without events until [`Self::arm`]; returns its id.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, socket: Weak<dyn Watched>) -> Result<u64, Errno> {
        let mut table = self.table();
        table.last += 1;
        let id = table.last;
        epoll::add(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(id),
            epoll::EventFlags::ONESHOT,
        )?;
        table.sockets.insert(id, socket);
        Ok(id)
    }

    /// Requests one call of [`Watched::on_ready`] when an event in `flags` happens.
    pub(crate) fn arm(
        &self,
        fd: BorrowedFd<'_>,
        id: u64,
        flags: epoll::EventFlags,
    ) -> Result<(), Errno> {
        epoll::modify(
            &self.epoll,
            fd,
            epoll::EventData::new_u64(id),
            flags | epoll::EventFlags::ONESHOT,
        )
    }

    /// Requests one call of [`Watched::on_time`], not before `when`.
    pub(crate) fn at(&self, id: u64, when: Instant) {
        let mut table = self.table();
        let first = table.timers.first().is_none_or(|t| when < t.0);
        table.timers.insert((when, id));
        drop(table);
        if first {
            // A full counter wakes the thread as well.
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }

    /// Removes a socket. The program may have other descriptors for it, so closing ours alone is not enough.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>, id: u64) {
        if self.pid != getpid() {
            return;
        }
        let _ = epoll::delete(&self.epoll, fd);
        self.table().sockets.remove(&id);
    }

    fn socket(&self, id: u64) -> Option<Arc<dyn Watched>> {
        self.table().sockets.get(&id).and_then(Weak::upgrade)
    }

    /// The next socket whose deadline has passed, or the time until the next deadline.
    fn due(&self) -> Result<u64, Option<Duration>> {
        let mut table = self.table();
        let Some(&(when, id)) = table.timers.first() else {
            return Err(None);
        };
        let left = when.saturating_duration_since(Instant::now());
        if left.is_zero() {
            table.timers.pop_first();
            return Ok(id);
        }
        Err(Some(left))
    }

    fn run(&self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(BATCH);
        loop {
            let timeout = loop {
                match self.due() {
                    Ok(id) => {
                        if let Some(socket) = self.socket(id) {
                            socket.on_time();
                        }
                    }
                    Err(left) => break left,
                }
            };
            let timeout = timeout.map(|left| {
                let ms = left.min(LONGEST).as_nanos().div_ceil(1_000_000) as i64;
                Timespec {
                    tv_sec: ms / 1000,
                    tv_nsec: ms % 1000 * 1_000_000,
                }
            });
            events.clear();
            match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                // This happens only if other code in the process has closed or replaced the descriptor.
                Err(e) => {
                    tracing::error!("sockets can no longer be waited for: {e}");
                    return;
                }
            }
            for event in &events {
                let id = event.data.u64();
                if id == WAKE {
                    let _ = rustix::io::read(&self.wake, &mut [0; 8]);
                } else if let Some(socket) = self.socket(id) {
                    socket.on_ready();
                }
            }
        }
    }
}
