//! The responder's side of the shared-memory handshake: a Unix socket for each listening TCP port, to which initiators send their Hello
//! (see [`crate::meet`]).

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};
use std::{io, mem};

use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use weft_sys::unix::{self, Name};
use weft_sys::{Event, Interest, process};

use super::listener::Listener;
use crate::device::{Counted, DeviceInner};
use crate::engine::{Engine, Next, Registration, Source};
use crate::lock::lock;
use crate::meet::{Hello, ShmAccepted};
use crate::names::Names;
use crate::types::LocalMode;

/// The time limit from an initiator's connection to its Hello.
const PATIENCE: Duration = Duration::from_millis(500);
/// A TCP connection can come in a moment after the hello about it: when to look again, counted from the hello.
const LOOK_AGAIN: [Duration; 3] = [
    Duration::from_millis(1),
    Duration::from_millis(10),
    Duration::from_millis(50),
];

/// The Unix sockets of a TCP port, as they are before somebody listens to peers there: what peers send waits.
#[derive(Default)]
pub(super) struct ShmSockets {
    listening: Vec<io::Result<(OwnedFd, Option<PathBuf>)>>,
    /// The name is taken, and nobody listens: the kernel tells no user of it.
    silent: Option<OwnedFd>,
}

impl ShmSockets {
    /// Opens those of an address. A peer looks for them as soon as it has connected, so this is before the port listens.
    pub(super) fn open(device: &DeviceInner, addr: SocketAddr) -> ShmSockets {
        if device.local == LocalMode::Off {
            return ShmSockets::default();
        }
        let names = Names::at(addr, device.local_dir.as_deref());
        let abstracts = names.abstracts.iter().map(|name| Name::Abstract(name));
        let paths = names.paths.iter().map(|path| Name::Path(path));
        let open = |name: Name<'_>| {
            let path = match name {
                Name::Path(path) => Some(path.to_owned()),
                Name::Abstract(_) => None,
            };
            let fd = unix::listen(name, 128)?;
            unix::ask_for_senders(&fd, true)?;
            Ok((fd, path))
        };
        ShmSockets {
            listening: abstracts.chain(paths).map(open).collect(),
            silent: None,
        }
    }

    /// As [`ShmSockets::open`], where no other process may have the abstract name. Without shared memory, and where our user namespace does not know our user,
    /// nobody listens on it.
    ///
    /// # Errors
    /// `AddrInUse` if another process has it.
    pub(super) fn claim(device: &DeviceInner, addr: SocketAddr) -> io::Result<ShmSockets> {
        if device.local == LocalMode::Off || process::uid() == unix::OVERFLOW_UID {
            return Ok(ShmSockets {
                listening: Vec::new(),
                silent: Some(take_name(&Names::at(addr, None))?),
            });
        }
        let mut sockets = ShmSockets::open(device, addr);
        // The abstract name is the first.
        if let Some(Err(_)) = sockets.listening.first() {
            sockets.listening.swap_remove(0)?;
        }
        Ok(sockets)
    }

    /// Watches them for a listener. Without any, its connections stay on TCP. The second value keeps the name.
    pub(super) fn watch(
        mut self,
        device: &Arc<DeviceInner>,
        listener: &Arc<Listener>,
    ) -> (Vec<Arc<ShmListener>>, Option<OwnedFd>) {
        let mut shm_listeners = Vec::new();
        for socket in mem::take(&mut self.listening) {
            let watched = socket.and_then(|(fd, path)| {
                let shm_listener = Arc::new(ShmListener {
                    fd,
                    path,
                    device: Arc::downgrade(device),
                    listener: Arc::downgrade(listener),
                    registration: Registration::new(&device.engine),
                });
                let source = Arc::clone(&shm_listener) as Arc<dyn Source>;
                let registration = &shm_listener.registration;
                registration.start(source, shm_listener.fd.as_fd(), Interest::READ)?;
                Ok(shm_listener)
            });
            match watched {
                Ok(shm_listener) => shm_listeners.push(shm_listener),
                Err(error) => {
                    tracing::warn!(addr = %listener.addr, %error, "no socket for peers of this host: they stay on TCP");
                }
            }
        }
        (shm_listeners, self.silent.take())
    }
}

/// Binds a socket of the listener's kind: who connects to it is refused.
fn take_name(names: &Names) -> io::Result<OwnedFd> {
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let fd = net::socket_with(kind.0, kind.1, SocketFlags::CLOEXEC, None)?;
    for name in &names.abstracts {
        net::bind(&fd, &SocketAddrUnix::new_abstract_name(name)?)?;
    }
    Ok(fd)
}

impl Drop for ShmSockets {
    fn drop(&mut self) {
        for (_, path) in self.listening.iter().flatten() {
            path.as_deref().map(std::fs::remove_file);
        }
    }
}

/// The Unix socket of a listening TCP port.
pub(super) struct ShmListener {
    fd: OwnedFd,
    path: Option<PathBuf>,
    device: Weak<DeviceInner>,
    listener: Weak<Listener>,
    registration: Registration,
}

impl ShmListener {
    pub(super) fn close(&self) {
        self.registration.release(self.fd.as_fd());
        if let Some(path) = &self.path {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Source for ShmListener {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        let (Some(device), Some(listener)) = (self.device.upgrade(), self.listener.upgrade())
        else {
            return Next::Done;
        };
        for _ in 0..64 {
            match unix::accept(&self.fd) {
                Ok(Some(wire)) => greet(engine, &device, &listener, wire),
                Ok(None) => break,
                Err(error) => {
                    let what = "accepting a peer of this host failed";
                    listener.reception.warn(what, None, Some(&error));
                    let later = Instant::now() + Duration::from_millis(50);
                    self.registration.set_timer(later);
                    return Next::Done;
                }
            }
        }
        self.registration.arm(self.fd.as_fd(), Interest::READ);
        Next::Soon
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.registration.arm(self.fd.as_fd(), Interest::READ);
    }
}

fn greet(engine: &Arc<Engine>, device: &Arc<DeviceInner>, listener: &Arc<Listener>, wire: OwnedFd) {
    let Some(accepted) = ShmAccepted::admit(wire) else {
        return;
    };
    let Some(permit) = device.take_pending() else {
        accepted.decline("too many connections in start-up".into());
        return;
    };
    let handshake = Arc::new(ShmHandshake {
        listener: Arc::downgrade(listener),
        state: Mutex::new(Some(HandshakeState {
            accepted,
            hello: None,
            permit,
        })),
        registration: Registration::new(engine),
    });
    let state = lock(&handshake.state);
    let Some(begun) = &*state else { return };
    let source = Arc::clone(&handshake) as Arc<dyn Source>;
    let registration = &handshake.registration;
    match registration.start(source, begun.accepted.fd(), Interest::READ) {
        Ok(()) => registration.set_timer(Instant::now() + PATIENCE),
        Err(error) => {
            let what = "cannot watch a peer of this host";
            listener.reception.warn(what, None, Some(&error));
        }
    }
}

struct HandshakeState {
    accepted: ShmAccepted,
    /// Its Hello, the time, and the number of attempts to find its TCP connection.
    hello: Option<(Hello, SocketAddr, Instant, usize)>,
    #[allow(dead_code)] // holds its place
    permit: Counted,
}

/// The handshake with one initiator, until its TCP connection is found.
struct ShmHandshake {
    listener: Weak<Listener>,
    state: Mutex<Option<HandshakeState>>,
    registration: Registration,
}

impl ShmHandshake {
    /// Done with it: the engine watches it no more.
    fn leave(&self, state: &mut Option<HandshakeState>) -> Option<HandshakeState> {
        let handshake = state.take()?;
        // It may live on, and be watched by another source.
        self.registration.release(handshake.accepted.fd());
        Some(handshake)
    }

    fn decline(&self, state: &mut Option<HandshakeState>, why: &str) {
        if let Some(handshake) = self.leave(state) {
            tracing::debug!(why, "a peer of this host stays on TCP");
            handshake.accepted.decline(why.to_owned());
        }
    }

    fn step(&self, engine: &Arc<Engine>) {
        let mut state = lock(&self.state);
        let Some(listener) = self.listener.upgrade() else {
            self.decline(&mut state, "the listener has closed");
            return;
        };
        let Some(handshake) = &mut *state else {
            return;
        };
        if handshake.hello.is_none() {
            match handshake.accepted.hello() {
                Ok(None) => {
                    self.registration
                        .arm(handshake.accepted.fd(), Interest::READ);
                    return;
                }
                Ok(Some((hello, from))) => handshake.hello = Some((hello, from, Instant::now(), 0)),
                Err(why) => {
                    self.decline(&mut state, &why);
                    return;
                }
            }
        }
        let Some((_, from, since, looks)) = &mut handshake.hello else {
            return;
        };
        if let Err(error) = listener.accept_some(engine) {
            tracing::debug!(%error, "accepting a connection failed");
        }
        if let Some(greeting) = listener.reception.find(*from) {
            if let Some(handshake) = self.leave(&mut state)
                && let Some((hello, ..)) = handshake.hello
            {
                match handshake.accepted.welcome(hello) {
                    Ok(shm_peer) => greeting.set_shm_peer(shm_peer),
                    Err(why) => tracing::debug!(why, "a peer of this host stays on TCP"),
                }
            }
            return;
        }
        match LOOK_AGAIN.get(*looks) {
            Some(delay) => {
                self.registration.set_timer(*since + *delay);
                *looks += 1;
            }
            None => self.decline(
                &mut state,
                "no such TCP connection here: another process has that port, or the address is translated",
            ),
        }
    }
}

impl Source for ShmHandshake {
    fn ready(self: Arc<Self>, engine: &Arc<Engine>, _event: Event) -> Next {
        self.step(engine);
        Next::Soon
    }

    fn expired(self: Arc<Self>, engine: &Arc<Engine>) {
        let said = lock(&self.state)
            .as_ref()
            .is_some_and(|handshake| handshake.hello.is_some());
        if said {
            self.step(engine);
        } else {
            self.decline(&mut lock(&self.state), "no hello in time");
        }
    }
}
