//! Datagrams between processes of one host and user: each pair of UDP ports shares two rings. The kernel's socket carries wake-ups of
//! sleeping ports, and datagrams to all other peers (docs/spec/dgram.md, docs/adr/0037).

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};

use weft_lock::ShortLock;
use weft_sys::udp::UdpSocket;
use weft_wire::dgram::Control;
use weft_wire::dgram::segment::PROBE_LEN;

use super::UdDest;
use crate::device::DeviceInner;
use crate::lock::lock;
use crate::neighbours::Why;
use crate::types::LocalMode;

mod pipe;
mod rendezvous;

pub(super) use pipe::{Pipe, Taken};
use rendezvous::RendezvousListener;

/// Pipes of one port. Further peers use the kernel.
const MAX_PIPES: usize = 256;
/// Pipes to one socket: two that send at the same time may come to one each.
const MAX_TWINS: usize = 2;
/// Destinations that are counted.
const MAX_ROUTES: usize = 4096;

/// A destination, and the own address that it is to see.
pub(super) type Key = (SocketAddr, Option<IpAddr>);

/// A port that shares memory with other ports of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdLocalPeer {
    /// Its address.
    pub addr: SocketAddr,
    /// Datagrams sent to it through shared memory.
    pub sent: u64,
    /// Datagrams received from it through shared memory.
    pub received: u64,
    /// Datagrams that found no room, and are lost.
    pub lost: u64,
}

/// The calls of pipes to their port.
pub(super) trait Looks: Send + Sync {
    /// There are other pipes than before.
    fn look_again(&self);
    /// A knock could not be sent: call [`Locals::knock_again`] soon.
    fn knock_later(&self);
}

#[derive(Default)]
struct Route {
    /// Asked for so often.
    count: u32,
    pipe: Option<Arc<Pipe>>,
}

/// A port's peers on this host.
pub(super) struct Locals {
    /// Dead when the port is on its own.
    device: Weak<DeviceInner>,
    socket: Arc<UdpSocket>,
    addr: SocketAddr,
    /// The socket's number.
    cookie: u64,
    rendezvous: OnceLock<Arc<RendezvousListener>>,
    port: OnceLock<Weak<dyn Looks>>,
    pipes: RwLock<Vec<Arc<Pipe>>>,
    /// Counts changes of `pipes`.
    changes: AtomicU32,
    has_pipes: AtomicBool,
    routes: Mutex<HashMap<Key, Route>>,
    /// The destination that was looked for last: mostly it is the next one, too.
    recent: ShortLock<Option<(Key, Arc<Pipe>)>>,
    wanted: Mutex<Vec<Key>>,
}

impl Locals {
    /// The pipes of a port. It opens its rendezvous unless the device does not use shared memory. Without a rendezvous it is not found, and does not
    /// look for peers.
    pub(super) fn open(
        device: &Arc<DeviceInner>,
        socket: &Arc<UdpSocket>,
        addr: SocketAddr,
        is_group: bool,
    ) -> Arc<Locals> {
        let wants = device.local != LocalMode::Off && !is_group;
        let cookie = socket.cookie();
        let locals = Arc::new(Locals {
            device: Arc::downgrade(device),
            socket: Arc::clone(socket),
            addr,
            cookie: *cookie.as_ref().unwrap_or(&0),
            rendezvous: OnceLock::new(),
            port: OnceLock::new(),
            pipes: RwLock::default(),
            changes: AtomicU32::new(0),
            has_pipes: AtomicBool::new(false),
            routes: Mutex::default(),
            recent: ShortLock::new(None),
            wanted: Mutex::default(),
        });
        if wants && cookie.is_ok() {
            match RendezvousListener::open(&locals, &device.engine) {
                Ok(rendezvous) => drop(locals.rendezvous.set(rendezvous)),
                Err(error) => {
                    tracing::warn!(%addr, %error, "no socket for ports of this host: datagrams stay with the kernel");
                }
            }
        }
        locals
    }

    pub(super) fn set_port(&self, port: Weak<dyn Looks>) {
        let _ = self.port.set(port);
    }

    pub(super) fn close(&self) {
        if let Some(rendezvous) = self.rendezvous.get() {
            rendezvous.close();
        }
        for pipe in self.pipes() {
            self.remove(&pipe);
        }
    }

    /// Whether there are pipes.
    #[inline]
    pub(super) fn any(&self) -> bool {
        self.has_pipes.load(Ordering::Acquire)
    }

    /// Changes whenever [`Locals::pipes`] does.
    #[inline]
    pub(super) fn changes(&self) -> u32 {
        self.changes.load(Ordering::Acquire)
    }

    pub(super) fn pipes(&self) -> Vec<Arc<Pipe>> {
        let pipes = self.pipes.read().unwrap_or_else(PoisonError::into_inner);
        pipes.clone()
    }

    pub(super) fn peers(&self) -> Vec<UdLocalPeer> {
        let told = |pipe: Arc<Pipe>| {
            let [sent, received, lost] = pipe.counts();
            UdLocalPeer {
                addr: pipe.peer,
                sent,
                received,
                lost,
            }
        };
        self.pipes().into_iter().map(told).collect()
    }

    /// The pipe to a destination. Those that are sent to more than a few times are asked for one.
    #[inline]
    pub(super) fn pipe(&self, dest: &UdDest) -> Option<Arc<Pipe>> {
        // Rings have no traffic class.
        if dest.traffic_class != 0 {
            return None;
        }
        if self.any()
            && let Some((key, pipe)) = &*self.recent.lock()
            && *key == (dest.addr, dest.from)
            && pipe.is_open()
        {
            return Some(Arc::clone(pipe));
        }
        let found = self.find(dest);
        if let Some(pipe) = &found {
            *self.recent.lock() = Some(((dest.addr, dest.from), Arc::clone(pipe)));
        }
        found
    }

    fn find(&self, dest: &UdDest) -> Option<Arc<Pipe>> {
        if !rendezvous::is_candidate(self.addr.ip(), dest.addr.ip()) {
            return None;
        }
        let rendezvous = self.rendezvous.get()?;
        let key = (rendezvous::canonical(dest.addr), dest.from);
        let mut routes = lock(&self.routes);
        if routes.len() >= MAX_ROUTES && !routes.contains_key(&key) {
            routes.retain(|_, route| route.pipe.is_some());
            if routes.len() >= MAX_ROUTES {
                return None;
            }
        }
        let route = routes.entry(key).or_default();
        if let Some(pipe) = &route.pipe {
            if pipe.is_open() {
                return Some(Arc::clone(pipe));
            }
            *route = Route::default();
        }
        route.count = route.count.saturating_add(1);
        if !matches!(route.count, 4 | 64 | 1024 | 16_384) {
            return None;
        }
        // The peer may have made one.
        let ours = |pipe: &&Arc<Pipe>| {
            let from = dest.from.is_none_or(|from| from == pipe.ours.ip());
            from && pipe.peer == key.0 && pipe.is_open()
        };
        route.pipe = {
            let pipes = self.pipes.read().unwrap_or_else(PoisonError::into_inner);
            pipes.iter().find(ours).cloned()
        };
        let found = route.pipe.clone();
        drop(routes);
        if found.is_none() {
            lock(&self.wanted).push(key);
            rendezvous.registration.poke();
        }
        found
    }

    fn take_wanted(&self) -> Vec<Key> {
        std::mem::take(&mut *lock(&self.wanted))
    }

    /// Whether there may be one more pipe, to that socket.
    fn has_room_for(&self, cookie: u64) -> Result<(), Why> {
        let pipes = self.pipes.read().unwrap_or_else(PoisonError::into_inner);
        let twins = pipes.iter().filter(|pipe| pipe.cookie == cookie).count();
        if pipes.len() >= MAX_PIPES || twins >= MAX_TWINS {
            return Err("too many pipes".into());
        }
        Ok(())
    }

    fn add(&self, pipe: Arc<Pipe>) {
        {
            let mut routes = lock(&self.routes);
            for (key, route) in routes.iter_mut() {
                let from = key.1.is_none_or(|from| from == pipe.ours.ip());
                if key.0 == pipe.peer && from && route.pipe.is_none() {
                    route.pipe = Some(Arc::clone(&pipe));
                }
            }
        }
        self.change(|pipes| pipes.push(pipe));
        if let Some(port) = self.port.get().and_then(Weak::upgrade) {
            port.look_again();
        }
    }

    fn change(&self, f: impl FnOnce(&mut Vec<Arc<Pipe>>)) {
        let mut pipes = self.pipes.write().unwrap_or_else(PoisonError::into_inner);
        f(&mut pipes);
        self.has_pipes.store(!pipes.is_empty(), Ordering::Release);
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// The peer has closed. The rest of the ring is still received; then the pipe ends.
    fn peer_left(&self, pipe: &Pipe) {
        pipe.send_no_more();
        if let Some(port) = self.port.get().and_then(Weak::upgrade) {
            port.look_again();
        }
    }

    /// Removes a pipe: later datagrams to its peer use the kernel's socket.
    pub(super) fn remove(&self, pipe: &Arc<Pipe>) {
        if pipe.close() {
            self.knock(pipe);
        }
        self.change(|pipes| pipes.retain(|other| !Arc::ptr_eq(other, pipe)));
        let this = |p: &Arc<Pipe>| Arc::ptr_eq(p, pipe);
        lock(&self.routes).retain(|_, route| !route.pipe.as_ref().is_some_and(this));
        self.recent.lock().take_if(|(_, p)| this(p));
        if let Some(wire) = pipe.wire.upgrade() {
            wire.release();
        }
    }

    /// Wakes the peer, which sleeps.
    pub(super) fn knock(&self, pipe: &Pipe) {
        let mut raw = Vec::with_capacity(PROBE_LEN);
        Control::Knock.emit(&mut raw);
        pipe.knocks.fetch_add(1, Ordering::Relaxed);
        let from = Some(pipe.ours.ip());
        if let Err(error) = self.socket.send(&raw, pipe.peer, from) {
            tracing::debug!(%error, to = %pipe.peer, "a knock has not gone out");
            pipe.owes_knock.store(true, Ordering::SeqCst);
            if let Some(port) = self.port.get().and_then(Weak::upgrade) {
                port.knock_later();
            }
        }
    }

    /// See [`Looks::knock_later`].
    pub(super) fn knock_again(&self) {
        for pipe in self.pipes() {
            if pipe.owes_knock.swap(false, Ordering::SeqCst) {
                self.knock(&pipe);
            }
        }
    }
}
