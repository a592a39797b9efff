//! The server.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_sys::settings;
use weft_sys::unix::{self, Name};
use weft_sys::{Event, Interest};

use super::{DEVICE, END, desk_name};
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;

/// Clients served at once; further ones are refused.
const MAX_CLIENTS: usize = 8;
/// Packets to one client before others get their turn.
const TURN: usize = 32;
/// The time limit for a client to read everything.
const PATIENCE: Duration = Duration::from_secs(5);

/// Devices of this process so far.
static DEVICES: AtomicU32 = AtomicU32::new(0);

/// A socket at which clients ask. The engine's slots own it: it closes with the engine.
struct StatServer {
    fd: OwnedFd,
    device: u32,
    registration: Registration,
    /// Each client has a clone.
    clients: Arc<()>,
}

/// Open this device's server, unless `WEFT_STAT=off`. Without one, `weft stat` does not see its connections.
pub(crate) fn serve_stat(engine: &Arc<Engine>) {
    if settings::STAT.is("off") != Ok(false) {
        return;
    }
    let opened = (|| {
        // The number is random so that another process cannot take the name before us, such as one with the same PID in another namespace.
        let random = getrandom::u32().map_err(|_| std::io::ErrorKind::Unsupported)?;
        let server = Arc::new(StatServer {
            fd: unix::listen(Name::Abstract(desk_name(random).as_bytes()), 8)?,
            device: DEVICES.fetch_add(1, Ordering::Relaxed),
            registration: Registration::new(engine),
            clients: Arc::new(()),
        });
        let source = Arc::clone(&server) as Arc<dyn Source>;
        server
            .registration
            .start(source, server.fd.as_fd(), Interest::READ)
    })();
    if let Err(error) = opened {
        tracing::debug!(%error, "weft stat will not see this device");
    }
}

impl StatServer {
    fn admit(&self, engine: &Arc<Engine>, wire: OwnedFd) {
        let allowed = unix::peer_cred(&wire).is_ok_and(|cred| cred.uid == 0 || cred.is_same_user());
        if !allowed || Arc::strong_count(&self.clients) > MAX_CLIENTS {
            return;
        }
        let teller = Arc::new(Teller {
            wire,
            next: Mutex::new(At::Start),
            device: self.device,
            registration: Registration::new(engine),
            _client: Arc::clone(&self.clients),
        });
        let source = Arc::clone(&teller) as Arc<dyn Source>;
        let started = teller
            .registration
            .start(source, teller.wire.as_fd(), Interest::WRITE);
        if started.is_ok() {
            teller.registration.set_timer(Instant::now() + PATIENCE);
        }
    }
}

impl Source for StatServer {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        for _ in 0..MAX_CLIENTS {
            match unix::accept(&self.fd) {
                Ok(Some(wire)) => self.admit(engine, wire),
                Ok(None) => break,
                Err(_) => {
                    // No descriptors: later, perhaps.
                    self.registration.set_timer(Instant::now() + PATIENCE);
                    return Next::Done;
                }
            }
        }
        self.registration.arm(self.fd.as_fd(), Interest::READ);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.registration.arm(self.fd.as_fd(), Interest::READ);
    }
}

/// The next part of the answer.
#[derive(Clone, Copy)]
enum At {
    Start,
    /// The connections from this slot of the engine on.
    Slot(usize),
}

/// A client that is being served. Only its position is kept: it does not get what it does not read.
struct Teller {
    wire: OwnedFd,
    next: Mutex<At>,
    device: u32,
    registration: Registration,
    _client: Arc<()>,
}

impl Teller {
    /// One packet. `Ok(false)` after the last.
    fn tell(&self, engine: &Engine, next: &mut At) -> std::io::Result<bool> {
        let send = |text: &str| unix::send_with_fds(&self.wire, text.as_bytes(), &[]);
        let At::Slot(mut slot) = *next else {
            send(&format!("{DEVICE}{}", self.device))?;
            *next = At::Slot(0);
            return Ok(true);
        };
        while let Some((index, source)) = engine.source_from(slot) {
            if let Some(connection) = source.stat() {
                send(&connection.to_string())?;
                *next = At::Slot(index + 1);
                return Ok(true);
            }
            slot = index + 1;
            *next = At::Slot(slot);
        }
        send(END)?;
        Ok(false)
    }
}

impl Source for Teller {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        let mut next = lock(&self.next);
        for _ in 0..TURN {
            match self.tell(engine, &mut next) {
                Ok(true) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
                Ok(false) | Err(_) => {
                    self.registration.end();
                    return Next::Done;
                }
            }
        }
        self.registration.arm(self.wire.as_fd(), Interest::WRITE);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.registration.end();
    }
}
