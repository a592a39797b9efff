//! Identifiers and event channels: the objects, the stages of an identifier, and the channel of its events.
//!
//! ```text
//!   initiator: Idle ─[bind_addr]─ Bound ─ resolve_addr ─ Resolved ─ resolve_route ─ Routed ─ connect ─ Joining ─> Joined
//!              Routed ─ connect ─ Choosing ─ Joining, where a queue pair can take two wires
//!   responder: Idle ─ bind_addr ─ Bound ─ listen ─ Listening
//!              Requested (a new identifier, with the event) ─ accept ─> Joined, or reject ─> Over
//!   datagrams: … Routed ─ connect ─ Joining ─ Asking ─> Found, or Over; Requested ─ accept ─> Found
//!   both:      Joined ─ disconnect, or the peer does, or the connection breaks ─> Over
//! ```
//!
//! Locks are taken in this order: an identifier's setup, its place, a channel's queue. None is held while a connection is requested, answered or ended, because
//! the layers below call back.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use rustix::io::Errno;
use weft_verbs::RoceTerms;
use weft_verbs::cm::{Bound, Lookup, gid_of};

use super::addrinfo::Answer;
use super::device::Nic;
use super::exchange::Remote;
use super::link::Link;
use super::news::{Membership, News};
use super::port::Port;
use super::request::Request;
use super::roce_datagram::{RoceInquiry, RoceServer};
use super::roce_link::{RoceLink, RoceListener};
use super::terms::Retries;
use super::types::{rdma_cm_id, rdma_event_channel, rdma_port_space};
use crate::verbs::events::{EventQueue, Subject};
use crate::verbs::object::{Kind as _, find, kind, lock, turn};
use crate::verbs::types::{
    IBV_MTU_4096, Zeroed as _, ibv_gid, ibv_qp_init_attr, ibv_qp_type, ibv_sa_path_rec,
};

/// Reads a field of an identifier's part that C sees.
macro_rules! get {
    ($core:expr, $($field:ident).+) => {
        // SAFETY: the memory of identifiers is never freed, and any bytes are valid for these fields' types.
        unsafe { (&raw const (*$core.handle()).$($field).+).read() }
    };
}

/// Writes a field of an identifier's part that C sees.
macro_rules! set {
    ($core:expr, $($field:ident).+ = $value:expr) => {
        // SAFETY: as for reading; the program does not access an identifier during a call on it.
        unsafe { (&raw mut (*$core.handle()).$($field).+).write($value) }
    };
}

pub(super) use {get, set};

#[derive(Default)]
pub(super) enum Stage {
    #[default]
    Idle,
    Bound,
    Resolved,
    Routed,
    Listening(#[allow(dead_code)] Listener), // listens until it is dropped
    Requested(Box<Request>),
    /// The wire to the listener is chosen: nobody else connects meanwhile.
    Choosing,
    Joining,
    /// Datagrams: the peer is asked for its queue pair.
    Asking(#[allow(dead_code)] Asking), // asks until it is dropped
    /// Datagrams: asked and answered.
    Found,
    Joined(Link),
    /// The program has disconnected.
    Leaving,
    /// The connection has ended or failed. Its queue pair may not have been notified yet.
    Over(Option<Link>),
    Gone,
}

#[allow(dead_code)] // until it is dropped
pub(super) enum Listener {
    /// And by RoCE, where the wire is chosen.
    Stream(weft_verbs::cm::Listening, Option<RoceListener>),
    Datagram(weft_verbs::cm::Serving),
    /// While the port number stays taken.
    Roce(RoceListener, Option<Bound>),
    RoceDatagram(RoceServer),
}

#[allow(dead_code)] // until it is dropped
pub(super) enum Asking {
    Datagram(Lookup),
    Roce(RoceInquiry),
}

#[derive(Default)]
pub(super) struct Setup {
    pub(super) stage: Stage,
    pub(super) port: Option<Port>,
    pub(super) src: Option<SocketAddr>,
    pub(super) dst: Option<SocketAddr>,
    /// The peer's queue pair, where programs move their queue pairs themselves.
    pub(super) remote: Option<Remote>,
    /// What such a queue pair needs, on RoCE.
    pub(super) terms: Option<RoceTerms>,
    /// Reads and atomics: how many we accept, and how many we may have outstanding.
    pub(super) depths: (u16, u16),
    /// Those of the request.
    pub(super) retries: Retries,
    pub(super) reuse: bool,
    /// IPv6 only, if the program has set it.
    pub(super) only_v6: bool,
    /// The ACK time-out that `ibv_query_qp` reports, if the program has set it.
    pub(super) ack_timeout: Option<u8>,
    /// The attributes of the queue pairs of its requests' identifiers (`rdma_create_ep(3)`).
    pub(super) template: Option<Template>,
    /// Multicast groups that it is in.
    pub(super) groups: Vec<Membership>,
    /// The prefix of the private data (`rdma_create_ep(3)`).
    pub(super) preface: Vec<u8>,
    /// The result of `rdma_resolve_addrinfo(3)`.
    pub(super) answer: Option<Answer>,
    /// The connection of RoCE that was asked for.
    pub(super) dials: Option<RoceLink>,
}

/// Attributes for future queue pairs, with pointers of the program in them.
#[derive(Clone, Copy)]
pub(super) struct Template(pub(super) ibv_qp_init_attr);

// SAFETY: addresses only, passed to calls that check them.
unsafe impl Send for Template {}

/// The channel of events.
pub(super) struct Place {
    pub(super) channel: Arc<Channel>,
    /// The channel is the identifier's own, and calls wait for their event.
    pub(super) sync: bool,
}

pub(super) struct Core {
    handle: AtomicPtr<rdma_cm_id>,
    pub(super) ps: rdma_port_space,
    setup: Mutex<Setup>,
    pub(super) place: Mutex<Option<Place>>,
    pub(super) subject: Arc<Subject>,
    /// The path record that C sees.
    path: OnceLock<Path>,
}

/// A record that C reads, and may write.
struct Path(UnsafeCell<ibv_sa_path_rec>);

// SAFETY: it is written once, before C sees it, and not read here.
unsafe impl Send for Path {}
// SAFETY: as above.
unsafe impl Sync for Path {}

/// An identifier as C holds it.
pub(super) struct Held(pub(super) Arc<Core>);

kind!(Held as rdma_cm_id, 0x636d_6964);

/// The identifier at an address.
pub(super) fn core(id: *mut rdma_cm_id) -> Result<Arc<Core>, Errno> {
    Ok(Arc::clone(&find::<Held>(id)?.0))
}

/// A new identifier; without a channel, one whose calls block.
pub(super) fn create(
    channel: Option<Arc<Channel>>,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
    stage: Stage,
) -> Result<Arc<Core>, Errno> {
    let sync = channel.is_none();
    let channel = match channel {
        Some(channel) => channel,
        None => Channel::create()?,
    };
    let events = channel.handle();
    let core = Arc::new(Core {
        handle: AtomicPtr::default(),
        ps,
        setup: Mutex::new(Setup {
            stage,
            ..Setup::default()
        }),
        place: Mutex::new(Some(Place { channel, sync })),
        subject: Subject::new(std::ptr::null_mut::<rdma_cm_id>()),
        path: OnceLock::new(),
    });
    let held = Held(Arc::clone(&core));
    Held::pool().make(held, |c, handle| {
        core.handle.store(handle, Ordering::Relaxed);
        c.channel = events;
        c.context = context;
        c.ps = ps;
        c.qp_type = qp_type;
    })?;
    Ok(core)
}

impl Core {
    pub(super) fn handle(&self) -> *mut rdma_cm_id {
        self.handle.load(Ordering::Relaxed)
    }

    pub(super) fn setup(&self) -> MutexGuard<'_, Setup> {
        lock(&self.setup)
    }

    /// Sets the device and the addresses.
    pub(super) fn at(&self, nic: &Nic, src: SocketAddr, dst: Option<SocketAddr>) {
        {
            let mut setup = self.setup();
            setup.src = Some(src);
            setup.dst = dst.or(setup.dst);
        }
        self.show(src, dst);
        set!(self, verbs = nic.context);
        set!(self, port_num = 1);
        if get!(self, pd).is_null() {
            set!(self, pd = nic.pd);
        }
    }

    /// Shows the path to the peer. An RNIC has no path records.
    pub(super) fn show_path(&self, nic: &Nic) {
        let (src, dst) = {
            let setup = self.setup();
            (setup.src, setup.dst)
        };
        let (true, Some(src), Some(dst)) = (nic.persona, src, dst) else {
            return;
        };
        let path = self.path.get_or_init(|| {
            let mut path = ibv_sa_path_rec::zeroed();
            path.sgid = ibv_gid {
                raw: gid_of(src.ip()),
            };
            path.dgid = ibv_gid {
                raw: gid_of(dst.ip()),
            };
            path.hop_limit = 64;
            path.reversible = 1;
            path.numb_path = 1;
            path.pkey = 0xffff;
            path.mtu_selector = 2;
            path.mtu = IBV_MTU_4096 as u8;
            Path(UnsafeCell::new(path))
        });
        set!(self, route.path_rec = path.0.get());
        set!(self, route.num_paths = 1);
    }

    /// Writes the addresses where C reads them.
    pub(super) fn show(&self, src: SocketAddr, dst: Option<SocketAddr>) {
        let c = self.handle();
        let room = size_of::<libc::sockaddr_storage>() as u32;
        // SAFETY: room for a `sockaddr_storage`, in memory that is never freed.
        unsafe { crate::address::write(src, (&raw mut (*c).route.addr.src).cast(), room) };
        if let Some(dst) = dst {
            // SAFETY: as above.
            unsafe { crate::address::write(dst, (&raw mut (*c).route.addr.dst).cast(), room) };
        }
    }

    /// True if the program has events to fetch.
    pub(super) fn has_events(&self) -> Result<bool, Errno> {
        Ok(self.channel()?.events()?.has(&self.subject))
    }

    /// An event for the program.
    pub(super) fn tell(self: &Arc<Self>, news: News) {
        let place = lock(&self.place);
        if let Some(place) = &*place {
            place.channel.push(self, news);
        }
    }

    pub(super) fn is_sync(&self) -> bool {
        lock(&self.place).as_ref().is_some_and(|place| place.sync)
    }

    /// Its channel; `EINVAL` once it is destroyed.
    pub(super) fn channel(&self) -> Result<Arc<Channel>, Errno> {
        let place = lock(&self.place);
        let place = place.as_ref().ok_or(Errno::INVAL)?;
        Ok(Arc::clone(&place.channel))
    }

    /// Removes the request, to answer it.
    pub(super) fn request(&self) -> Result<Box<Request>, Errno> {
        let mut setup = self.setup();
        match std::mem::replace(&mut setup.stage, Stage::Joining) {
            Stage::Requested(request) => Ok(request),
            other => {
                setup.stage = other;
                Err(Errno::INVAL)
            }
        }
    }
}

/// An event, and its identifier.
pub(super) struct Waiting {
    pub(super) about: Arc<Core>,
    pub(super) news: News,
}

pub(super) struct Channel {
    /// None once it is destroyed.
    events: Mutex<Option<Arc<EventQueue<Waiting>>>>,
    handle: AtomicPtr<rdma_event_channel>,
}

/// The channel as C holds it.
struct HeldChannel(Arc<Channel>);

kind!(HeldChannel as rdma_event_channel, 0x636d_6368);

impl Channel {
    pub(super) fn create() -> Result<Arc<Channel>, Errno> {
        let events = EventQueue::new()?;
        let fd = events.fd();
        let channel = Arc::new(Channel {
            events: Mutex::new(Some(events)),
            handle: AtomicPtr::default(),
        });
        let held = HeldChannel::pool().make(HeldChannel(Arc::clone(&channel)), |c, _| c.fd = fd)?;
        channel.handle.store(held.handle(), Ordering::Release);
        Ok(channel)
    }

    pub(super) fn handle(&self) -> *mut rdma_event_channel {
        self.handle.load(Ordering::Acquire)
    }

    /// Closes the descriptor and drops the waiting events. A thread that still waits for an event does so for ever, as with the real library: programs exit
    /// with a thread in that call.
    pub(super) fn destroy(&self) {
        if let Ok(turn) = turn::<HeldChannel>(self.handle()) {
            drop(turn.retire());
        }
        let events = lock(&self.events).take();
        drop(events);
    }

    pub(super) fn events(&self) -> Result<Arc<EventQueue<Waiting>>, Errno> {
        lock(&self.events).clone().ok_or(Errno::BADF)
    }

    /// Queues an event.
    pub(super) fn push(&self, about: &Arc<Core>, news: News) {
        if let Ok(events) = self.events() {
            let waiting = Waiting {
                about: Arc::clone(about),
                news,
            };
            events.push(&about.subject, waiting);
        }
    }

    /// Moves an identifier's events to another channel, from now on.
    pub(super) fn hand_over(&self, about: &Arc<Core>, to: &Channel) {
        if let Ok(events) = self.events() {
            for waiting in events.take_back(&about.subject) {
                to.push(about, waiting.news);
            }
        }
    }
}

/// The program's channel.
pub(super) fn channel(handle: *mut rdma_event_channel) -> Result<Arc<Channel>, Errno> {
    Ok(Arc::clone(&find::<HeldChannel>(handle)?.0))
}
