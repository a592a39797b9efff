//! Connections by addresses: librdmacm.
//!
//! A connection begins with [`Outgoing::resolve`] on one side and [`Listener::bind`] on the other. Either side learns there which device the address belongs
//! to, makes its queue pair on that device, posts its receives, and then connects or accepts.

use std::ffi::{CStr, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use weft_cverbs::Zeroed;
use weft_cverbs::cm::{
    RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST,
    RDMA_CM_EVENT_DEVICE_REMOVAL, RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_ESTABLISHED,
    RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_ROUTE_RESOLVED, RDMA_CM_EVENT_UNREACHABLE, RDMA_PS_TCP,
    rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_conn_param, rdma_event_channel,
};

use crate::context::{Context, Keeper, Pd};
use crate::error::{Error, last, status};
use crate::fork;
use crate::library::{CmCalls, Libraries};
use crate::qp::{Qp, QpInit};

use crate::life::{Calling, Handle, Kind, Life};
use crate::watch::{End, Source, Watched, lock, readable, without_blocking};

/// Where errors without a device come from.
const CM: &str = "librdmacm";

/// Reads of each side on their way; every device that has them takes one.
const READS: u8 = 1;
/// Again and again (7), as long as the peer has no receive.
const RNR_RETRY: u8 = 7;
const RETRIES: u8 = 7;

/// Of InfiniBand's reasons of a rejection: the peer's program.
const CONSUMER: c_int = 28;

/// An identifier of librdmacm, with an event channel of its own.
pub(crate) struct Id {
    libraries: &'static Libraries,
    calls: &'static CmCalls,
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
    /// That of its device, once it is known.
    life: OnceLock<Arc<Life>>,
    /// Held by calls that use its queue pair, or destroy that: the watching thread disconnects while the program drops the queue pair.
    using_qp: Mutex<()>,
}

// SAFETY: the library's calls may come from any thread.
unsafe impl Send for Id {}
// SAFETY: as above.
unsafe impl Sync for Id {}
impl Keeper for Id {}

impl Drop for Id {
    fn drop(&mut self) {
        // In a child of fork it is the parent's.
        if fork::is_child() {
            return;
        }
        // It reads the context, which may be closed with its last identifier.
        drop(self.life.take());
        // SAFETY: ours, once; every event was acknowledged, and the queue pair destroyed.
        unsafe {
            (self.calls.rdma_destroy_id)(self.id);
            (self.calls.rdma_destroy_event_channel)(self.channel);
        }
    }
}

/// What an event says.
struct Event {
    kind: rdma_cm_event_type,
    status: c_int,
    id: *mut rdma_cm_id,
    private_data: Vec<u8>,
    /// Reads that the peer wants to have on their way, and that it takes.
    reads: (u8, u8),
}

impl Event {
    /// # Safety
    /// An event that is not acknowledged.
    unsafe fn of(event: &rdma_cm_event) -> Self {
        let has_data = matches!(
            event.event,
            RDMA_CM_EVENT_CONNECT_REQUEST | RDMA_CM_EVENT_ESTABLISHED | RDMA_CM_EVENT_REJECTED
        );
        // SAFETY: numbers, and a pointer that is looked at for these events only.
        let conn = unsafe { event.param.conn };
        let private_data = if has_data && !conn.private_data.is_null() {
            let len = usize::from(conn.private_data_len);
            // SAFETY: the library's bytes, which stay until the event is acknowledged.
            unsafe { std::slice::from_raw_parts(conn.private_data.cast::<u8>(), len).to_vec() }
        } else {
            Vec::new()
        };
        Self {
            kind: event.event,
            status: event.status,
            id: event.id,
            private_data,
            reads: (conn.responder_resources, conn.initiator_depth),
        }
    }
}

fn channel(calls: &CmCalls) -> Result<*mut rdma_event_channel, Error> {
    // SAFETY: no arguments.
    let channel = unsafe { (calls.rdma_create_event_channel)() };
    if channel.is_null() {
        let errno = last();
        let error = Error::call(CM, "rdma_create_event_channel", errno);
        return Err(match errno {
            libc::ENOENT | libc::ENODEV | libc::ENXIO => error.remedy(
                "/dev/infiniband/rdma_cm is missing: `modprobe rdma_ucm`, as root; in a container, start it with --device=/dev/infiniband",
            ),
            libc::EACCES | libc::EPERM => {
                error.remedy("let this user read and write /dev/infiniband/rdma_cm")
            }
            _ => error,
        });
    }
    // SAFETY: the descriptor of a channel that lives.
    let fd = unsafe { BorrowedFd::borrow_raw((*channel).fd) };
    without_blocking(fd).map_err(|e| {
        // SAFETY: ours, once.
        unsafe { (calls.rdma_destroy_event_channel)(channel) };
        Error::call(CM, "fcntl", e.raw_os_error())
    })?;
    Ok(channel)
}

impl Id {
    fn new() -> Result<Self, Error> {
        let libraries = Libraries::get()?;
        let calls = libraries.cm()?;
        let (channel, mut id) = (channel(calls)?, ptr::null_mut());
        // SAFETY: a channel that lives, and a place for the answer.
        let answer =
            unsafe { (calls.rdma_create_id)(channel, &raw mut id, ptr::null_mut(), RDMA_PS_TCP) };
        if let Err(errno) = status(answer) {
            // SAFETY: ours, once.
            unsafe { (calls.rdma_destroy_event_channel)(channel) };
            return Err(Error::call(CM, "rdma_create_id", errno));
        }
        Ok(Self {
            libraries,
            calls,
            id,
            channel,
            life: OnceLock::new(),
            using_qp: Mutex::default(),
        })
    }

    /// One that came with a connection request; gives it a channel of its own.
    fn of_request(&self, id: *mut rdma_cm_id) -> Result<Self, Error> {
        let calls = self.calls;
        let own = channel(calls);
        let moved = own.and_then(|own| {
            // SAFETY: an identifier that is ours, without events that nobody has acknowledged.
            let answer = unsafe { (calls.rdma_migrate_id)(id, own) };
            status(answer).map(|()| own).map_err(|errno| {
                // SAFETY: ours, once.
                unsafe { (calls.rdma_destroy_event_channel)(own) };
                self.failed("rdma_migrate_id", errno)
            })
        });
        match moved {
            Ok(channel) => Ok(Self {
                libraries: self.libraries,
                calls,
                id,
                channel,
                life: OnceLock::new(),
                using_qp: Mutex::default(),
            }),
            Err(error) => {
                // SAFETY: ours, once.
                unsafe { (calls.rdma_destroy_id)(id) };
                Err(error)
            }
        }
    }

    /// The name of the device that it is bound to.
    fn device(&self) -> Option<String> {
        // SAFETY: an identifier that lives; its context, if it has one, has a device with a name.
        unsafe {
            let context = (*self.id).verbs;
            if context.is_null() {
                return None;
            }
            let name = CStr::from_ptr((*(*context).device).name.as_ptr());
            Some(name.to_string_lossy().into_owned())
        }
    }

    fn failed(&self, call: &str, errno: i32) -> Error {
        Error::call(self.device().as_deref().unwrap_or(CM), call, errno)
    }

    /// The device is gone, as an event of it says.
    fn removed(&self) -> Error {
        if let Some(life) = self.life.get() {
            life.end();
        }
        Error::removed(self.device().as_deref().unwrap_or(CM))
    }

    /// A child of fork would take the parent's events.
    fn refuse_child(&self) -> Result<(), Error> {
        if fork::is_child() {
            return Err(fork::error(self.device().as_deref().unwrap_or(CM)));
        }
        Ok(())
    }

    /// Before a call that uses its queue pair, which takes `using_qp` then.
    fn enter(&self) -> Result<Option<Calling<'_>>, Error> {
        self.refuse_child()?;
        self.life.get().map(|life| life.enter()).transpose()
    }

    fn check(&self, call: &str, answer: c_int) -> Result<(), Error> {
        status(answer).map_err(|errno| self.failed(call, errno))
    }

    /// The next event, at most until `end` (`None`: for ever).
    fn event(&self, end: Option<Instant>) -> Result<Option<Event>, Error> {
        loop {
            self.refuse_child()?;
            if !readable(self.as_fd(), end).map_err(|e| self.failed("poll", e.raw_os_error()))? {
                return Ok(None);
            }
            if let Some(event) = self.try_event()? {
                return Ok(Some(event));
            }
        }
    }

    /// An event that is there already.
    fn try_event(&self) -> Result<Option<Event>, Error> {
        self.refuse_child()?;
        let mut event = ptr::null_mut();
        let answer = {
            // The library modifies the queue pair for some events.
            let _calling = self.life.get().map(|life| life.calling());
            let _using = lock(&self.using_qp);
            // SAFETY: a channel that lives, and a place for the answer; the queue pair is not destroyed meanwhile.
            unsafe { (self.calls.rdma_get_cm_event)(self.channel, &raw mut event) }
        };
        match status(answer) {
            Err(libc::EAGAIN | libc::EINTR) => return Ok(None),
            other => other.map_err(|errno| self.failed("rdma_get_cm_event", errno))?,
        }
        // SAFETY: an event, which lives until it is acknowledged, once.
        Ok(Some(unsafe {
            let taken = Event::of(&*event);
            (self.calls.rdma_ack_cm_event)(event);
            taken
        }))
    }

    /// Its own address, or that of the peer.
    fn address(&self, peer: bool) -> Option<SocketAddr> {
        // SAFETY: an identifier that lives; an address in it is a number for each byte.
        unsafe {
            let addr = &(*self.id).route.addr;
            from_sockaddr(if peer {
                &addr.dst.dst_storage
            } else {
                &addr.src.src_storage
            })
        }
    }

    /// Waits for this event.
    fn expect(&self, call: &str, kind: rdma_cm_event_type, end: Instant) -> Result<Event, Error> {
        let event = self.event(Some(end))?;
        let event = event.ok_or_else(|| self.failed(call, libc::ETIMEDOUT))?;
        if event.kind == kind {
            return Ok(event);
        }
        if event.kind == RDMA_CM_EVENT_DEVICE_REMOVAL {
            return Err(self.removed());
        }
        // SAFETY: the library returns a string that stays.
        let name = unsafe { CStr::from_ptr((self.calls.rdma_event_str)(event.kind)) };
        let name = name.to_string_lossy();
        let is_rejection = event.kind == RDMA_CM_EVENT_REJECTED;
        // The status is an error number with a minus, or a reason of the transport.
        let error = if event.status < 0 {
            self.failed(&format!("{call} ended with {name}"), -event.status)
        } else {
            let what = format!("{call} ended with {name}, status {}", event.status);
            let error = Error::new(Some(self.device().as_deref().unwrap_or(CM)), what);
            if is_rejection {
                error.with_errno(libc::ECONNREFUSED)
            } else {
                error
            }
        };
        // iWARP has one reason for everything, an error number. InfiniBand's rejections always have private data.
        let by_program =
            event.status == CONSUMER || (event.status < 0 && !event.private_data.is_empty());
        Err(if is_rejection && by_program {
            error.rejected_with(event.private_data)
        } else {
            error
        })
    }
}

impl Source for Id {
    fn try_end(&self) -> Result<Option<End>, Error> {
        while let Some(event) = self.try_event()? {
            match event.kind {
                RDMA_CM_EVENT_DISCONNECTED => {
                    // An error of the queue pair came before, and says why.
                    if let Some(life) = self.life.get() {
                        life.take_events();
                    }
                    let is_lost = event.status < 0;
                    return Ok(Some(if is_lost {
                        End::Lost
                    } else {
                        End::Disconnected
                    }));
                }
                // After `Incoming::accept`.
                RDMA_CM_EVENT_CONNECT_ERROR
                | RDMA_CM_EVENT_UNREACHABLE
                | RDMA_CM_EVENT_REJECTED => return Ok(Some(End::Lost)),
                RDMA_CM_EVENT_DEVICE_REMOVAL => {
                    self.removed();
                    return Ok(Some(End::DeviceRemoved));
                }
                _ => {}
            }
        }
        Ok(None)
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.as_fd()
    }

    fn disconnect(&self) {
        if fork::is_child() {
            return;
        }
        let _calling = self.life.get().map(|life| life.calling());
        let _using = lock(&self.using_qp);
        // SAFETY: an identifier that lives; its queue pair is not destroyed meanwhile.
        unsafe { (self.calls.rdma_disconnect)(self.id) };
    }
}

impl AsFd for Id {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor of a channel that lives.
        unsafe { BorrowedFd::borrow_raw((*self.channel).fd) }
    }
}

fn bind(id: &Id, address: SocketAddr) -> Result<(), Error> {
    let mut raw = sockaddr(address);
    // SAFETY: an identifier that lives, and an address.
    let answer = unsafe { (id.calls.rdma_bind_addr)(id.id, (&raw mut raw).cast()) };
    id.check(&format!("rdma_bind_addr to {address}"), answer).map_err(|error| match error.errno() {
        Some(libc::ENODEV | libc::EADDRNOTAVAIL) => error.remedy(format!(
            "no RDMA device has a GID for {}: `rdma link` shows the interfaces of devices, `ip addr` their addresses",
            address.ip()
        )),
        _ => error,
    })
}

fn context(id: &Arc<Id>) -> Result<Context, Error> {
    id.refuse_child()?;
    // SAFETY: an identifier that lives.
    let raw = unsafe { (*id.id).verbs };
    if raw.is_null() {
        return Err(Error::new(
            Some(CM),
            "the address belongs to no RDMA device",
        ));
    }
    let keeper: Arc<dyn Keeper> = Arc::<Id>::clone(id);
    // SAFETY: the context of an identifier is open as long as the identifier lives.
    let context = unsafe { Context::borrowed(id.libraries, raw, keeper, || monitor(id)) }?;
    let _ = id.life.set(Arc::clone(context.life()));
    Ok(context)
}

/// An identifier on the same device, which only waits for the removal of the device. `None`: the address leads to another device, or to none.
fn monitor(id: &Id) -> Result<Option<Arc<dyn Source>>, Error> {
    let own = Id::new()?;
    let is_bound = |address: SocketAddr| bind(&own, (address.ip(), 0).into()).is_ok();
    if !id.address(false).is_some_and(is_bound) {
        return Ok(None);
    }
    // SAFETY: identifiers that live.
    let is_same = unsafe { (*own.id).verbs == (*id.id).verbs };
    Ok(is_same.then(|| Arc::new(own) as Arc<dyn Source>))
}

fn create_qp(id: &Arc<Id>, pd: &Pd, init: &QpInit<'_>) -> Result<Qp, Error> {
    let own = context(id)?;
    init.check(&own)?;
    if !pd.context().is(&own) {
        return Err(own.failed("rdma_create_qp in a domain of another device", libc::EINVAL));
    }
    let calling = own.enter()?;
    let mut attributes = init.attributes();
    // SAFETY: an identifier that lives; the domain and the queues are of its device.
    let answer = unsafe { (id.calls.rdma_create_qp)(id.id, pd.raw(), &raw mut attributes) };
    status(answer).map_err(|errno| own.lacks_memory("rdma_create_qp", errno, init.memory()))?;
    let owner = Arc::clone(id);
    let destroy = move |_| {
        let _using = lock(&owner.using_qp);
        // SAFETY: the identifier's own queue pair, once, and the identifier lives.
        unsafe { (owner.calls.rdma_destroy_qp)(owner.id) };
        0
    };
    let keeper: Arc<dyn Keeper> = Arc::<Id>::clone(id);
    let inline = attributes.cap.max_inline_data;
    // SAFETY: the queue pair that the identifier has got.
    let (qp, number) = unsafe { ((*id.id).qp, (*(*id.id).qp).qp_num) };
    let qp = Handle::new(own.life(), &calling, Kind::Qp, qp, destroy);
    Ok(Qp::of_cm(qp, number, inline, init, pd, keeper))
}

/// What one side says to the other.
#[derive(Clone, Copy, Debug)]
pub struct Param<'a> {
    /// For the peer's program. `InfiniBand` takes 56 bytes in a request and 196 in a reply, `librdmacm` 255 at most.
    pub private_data: &'a [u8],
    /// Reads and atomics of each side that are on their way at once; at most as many as the device takes.
    pub reads: u8,
}

impl Default for Param<'_> {
    fn default() -> Self {
        Self {
            private_data: &[],
            reads: READS,
        }
    }
}

impl Id {
    fn parameters(&self, param: &Param<'_>) -> Result<rdma_conn_param, Error> {
        let mut parameters = rdma_conn_param::zeroed();
        parameters.private_data = param.private_data.as_ptr().cast();
        parameters.private_data_len = u8::try_from(param.private_data.len())
            .map_err(|_| self.failed("private data of more than 255 bytes", libc::EINVAL))?;
        parameters.responder_resources = param.reads;
        parameters.initiator_depth = param.reads;
        parameters.retry_count = RETRIES;
        parameters.rnr_retry_count = RNR_RETRY;
        Ok(parameters)
    }
}

/// A connection on its way out: its device is known.
pub struct Outgoing(Arc<Id>);

impl Outgoing {
    /// Finds the device and the route to an address, within this time.
    ///
    /// # Errors
    /// As `rdma_resolve_addr` and `rdma_resolve_route`; no device has the local address.
    pub fn resolve(
        local: Option<IpAddr>,
        peer: SocketAddr,
        patience: Duration,
    ) -> Result<Self, Error> {
        let (id, end) = (Id::new()?, Instant::now() + patience);
        if let Some(local) = local {
            bind(&id, (local, 0).into())?;
        }
        let ms = c_int::try_from(patience.as_millis()).unwrap_or(c_int::MAX);
        let mut raw = sockaddr(peer);
        let call = format!("rdma_resolve_addr of {peer}");
        // SAFETY: an identifier that lives, and an address.
        let answer = unsafe {
            (id.calls.rdma_resolve_addr)(id.id, ptr::null_mut(), (&raw mut raw).cast(), ms)
        };
        id.check(&call, answer)?;
        id.expect(&call, RDMA_CM_EVENT_ADDR_RESOLVED, end)?;
        // SAFETY: an identifier that lives.
        id.check("rdma_resolve_route", unsafe {
            (id.calls.rdma_resolve_route)(id.id, ms)
        })?;
        id.expect("rdma_resolve_route", RDMA_CM_EVENT_ROUTE_RESOLVED, end)?;
        Ok(Self(Arc::new(id)))
    }

    /// The device that it goes through; open as long as an object of it is there.
    ///
    /// # Errors
    /// The address belongs to no device.
    pub fn context(&self) -> Result<Context, Error> {
        context(&self.0)
    }

    /// The queue pair of the connection, on its device.
    ///
    /// # Errors
    /// As `rdma_create_qp`.
    pub fn create_qp(&self, pd: &Pd, init: &QpInit<'_>) -> Result<Qp, Error> {
        create_qp(&self.0, pd, init)
    }

    /// Its own address: the device's.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.0.address(false)
    }

    /// Connects its queue pair, within this time.
    ///
    /// # Errors
    /// As `rdma_connect`; the peer refuses, or does not answer.
    pub fn connect(&self, param: &Param<'_>, patience: Duration) -> Result<Connection, Error> {
        let (id, end) = (&self.0, Instant::now() + patience);
        let mut parameters = id.parameters(param)?;
        let answer = {
            let _calling = id.enter()?;
            let _using = lock(&id.using_qp);
            // SAFETY: an identifier that lives, and parameters; the queue pair is not destroyed meanwhile.
            unsafe { (id.calls.rdma_connect)(id.id, &raw mut parameters) }
        };
        id.check("rdma_connect", answer)?;
        let event = id.expect("rdma_connect", RDMA_CM_EVENT_ESTABLISHED, end)?;
        Connection::new(id, event.private_data)
    }
}

/// Takes connections.
pub struct Listener {
    id: Arc<Id>,
    /// Readable while events are there, and once its device is gone; `None`: it listens on all devices.
    ready: Option<OwnedFd>,
}

impl Listener {
    /// Listens on an address of a device; port 0 chooses one.
    ///
    /// # Errors
    /// As `rdma_bind_addr` and `rdma_listen`; no device has the address.
    pub fn bind(address: SocketAddr) -> Result<Self, Error> {
        const BACKLOG: c_int = 16;
        let id = Id::new()?;
        bind(&id, address)?;
        // SAFETY: an identifier that lives.
        let answer = unsafe { (id.calls.rdma_listen)(id.id, BACKLOG) };
        id.check("rdma_listen", answer)?;
        let id = Arc::new(id);
        let ready = if id.device().is_some() {
            let ready = context(&id)?.life().readable_or_gone(id.as_fd());
            Some(ready.map_err(|e| id.failed("epoll_ctl", e.raw_os_error()))?)
        } else {
            None
        };
        Ok(Self { id, ready })
    }

    /// The name of the device whose address it is; `None`: of all devices.
    pub fn device(&self) -> Option<String> {
        self.id.device()
    }

    /// The port that it listens on.
    pub fn port(&self) -> u16 {
        // SAFETY: an identifier that lives.
        u16::from_be(unsafe { (self.id.calls.rdma_get_src_port)(self.id.id) })
    }

    /// The address that it listens on.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        let ip = self.id.address(false)?.ip();
        Some(SocketAddr::new(ip, self.port()))
    }

    /// The device that it listens on, unless it listens on all.
    ///
    /// # Errors
    /// It listens on all devices.
    pub fn context(&self) -> Result<Context, Error> {
        context(&self.id)
    }

    /// The next connection request; `None` if none comes within this time (`None`: for ever).
    ///
    /// # Errors
    /// As `rdma_get_cm_event`; the device is removed or has failed, unless it listens on all. After an error that [is of the request alone](Error::is_of_a_request) others can follow.
    pub fn request(&self, patience: Option<Duration>) -> Result<Option<Incoming>, Error> {
        let end = patience.and_then(|time| Instant::now().checked_add(time));
        loop {
            self.id.refuse_child()?;
            let came = readable(self.as_fd(), end);
            if !came.map_err(|e| self.id.failed("poll", e.raw_os_error()))? {
                return Ok(None);
            }
            let Some(event) = self.id.try_event()? else {
                // Perhaps it is the end of the device.
                drop(self.id.enter()?);
                continue;
            };
            match event.kind {
                RDMA_CM_EVENT_CONNECT_REQUEST => {
                    let id = self.id.of_request(event.id);
                    return Ok(Some(Incoming {
                        id: Arc::new(id.map_err(Error::of_a_request)?),
                        private_data: event.private_data,
                        reads: event.reads,
                        is_answered: false,
                    }));
                }
                RDMA_CM_EVENT_DEVICE_REMOVAL => return Err(self.id.removed()),
                _ => {}
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.ready {
            Some(ready) => ready.as_fd(),
            None => self.id.as_fd(),
        }
    }
}

/// A connection request. Dropping it rejects it.
pub struct Incoming {
    id: Arc<Id>,
    private_data: Vec<u8>,
    /// Reads that the peer wants to have on their way, and that it takes.
    reads: (u8, u8),
    is_answered: bool,
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.is_answered {
            let _ = self.answer(&[]);
        }
    }
}

impl Incoming {
    /// The device that it came through; open as long as an object of it is there.
    ///
    /// # Errors
    /// The request has no device.
    pub fn context(&self) -> Result<Context, Error> {
        context(&self.id)
    }

    /// The private data of the peer's program. Zero bytes can follow them.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The address that the peer dialled.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.address(false)
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.address(true)
    }

    /// The queue pair of the connection, on its device.
    ///
    /// # Errors
    /// As `rdma_create_qp`.
    pub fn create_qp(&self, pd: &Pd, init: &QpInit<'_>) -> Result<Qp, Error> {
        create_qp(&self.id, pd, init)
    }

    /// Accepts, without waiting until the peer knows it: if the peer has gone, the connection ends.
    ///
    /// # Errors
    /// As `rdma_accept`.
    pub fn accept(mut self, param: &Param<'_>) -> Result<Connection, Error> {
        let id = &self.id;
        let mut parameters = id.parameters(param)?;
        // More than the peer asks for is an error. A peer with the first revision of MPA does not say.
        let at_most = |asked: u8| param.reads.min(if asked == 0 { READS } else { asked });
        parameters.responder_resources = at_most(self.reads.0);
        parameters.initiator_depth = at_most(self.reads.1);
        let answer = {
            let _calling = id.enter()?;
            let _using = lock(&id.using_qp);
            // SAFETY: an identifier that lives, and parameters; the queue pair is not destroyed meanwhile.
            unsafe { (id.calls.rdma_accept)(id.id, &raw mut parameters) }
        };
        id.check("rdma_accept", answer)?;
        self.is_answered = true;
        let private_data = std::mem::take(&mut self.private_data);
        Connection::new(&self.id, private_data)
    }

    /// Rejects, with private data for the peer's program.
    ///
    /// # Errors
    /// As `rdma_reject`.
    pub fn reject(mut self, private_data: &[u8]) -> Result<(), Error> {
        self.answer(private_data)
    }

    fn answer(&mut self, private_data: &[u8]) -> Result<(), Error> {
        if fork::is_child() {
            return Ok(());
        }
        self.is_answered = true;
        let id = &self.id;
        let len = u8::try_from(private_data.len())
            .map_err(|_| id.failed("private data of more than 255 bytes", libc::EINVAL))?;
        // SAFETY: an identifier that lives, and so many bytes.
        let answer = unsafe { (id.calls.rdma_reject)(id.id, private_data.as_ptr().cast(), len) };
        id.check("rdma_reject", answer)
    }
}

/// A connection of a queue pair; dropping it ends it.
pub struct Connection {
    watched: Arc<Watched>,
    id: Arc<Id>,
    private_data: Vec<u8>,
}

impl Connection {
    fn new(id: &Arc<Id>, private_data: Vec<u8>) -> Result<Self, Error> {
        let watched = Watched::new(Arc::<Id>::clone(id))?;
        // SAFETY: an identifier that lives.
        let qp = unsafe { (*id.id).qp }.addr();
        if let Some(life) = id.life.get() {
            life.watch(qp, &watched);
        }
        Ok(Self {
            watched,
            id: Arc::clone(id),
            private_data,
        })
    }

    /// The private data of the peer's program. Zero bytes can follow them.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// Its own address.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.address(false)
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.address(true)
    }

    /// Ends it. What is not complete is lost with `InfiniBand`.
    pub fn disconnect(&self) {
        self.id.disconnect();
    }

    /// How it ended, if it has.
    pub fn end(&self) -> Option<End> {
        self.watched.end()
    }

    /// Calls this once when it ends, on a thread of the library; at once if it has ended.
    pub fn on_end(&self, hook: impl FnOnce(End) + Send + 'static) {
        self.watched.on_end(Box::new(hook));
    }
}

/// The address that C's form has.
fn from_sockaddr(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let at = ptr::from_ref(storage);
    // SAFETY: the storage is long and aligned enough for either; every bit is good in numbers.
    unsafe {
        match i32::from(storage.ss_family) {
            libc::AF_INET => {
                let v4 = &*at.cast::<libc::sockaddr_in>();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some((ip, u16::from_be(v4.sin_port)).into())
            }
            libc::AF_INET6 => {
                let v6 = &*at.cast::<libc::sockaddr_in6>();
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some((ip, u16::from_be(v6.sin6_port)).into())
            }
            _ => None,
        }
    }
}

/// The address in C's form.
fn sockaddr(address: SocketAddr) -> libc::sockaddr_storage {
    // SAFETY: numbers.
    let mut storage: libc::sockaddr_storage = unsafe { std::mem::zeroed() };
    let at: *mut c_void = (&raw mut storage).cast();
    match address {
        SocketAddr::V4(v4) => {
            let raw = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from(*v4.ip()).to_be(),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: the storage has room for every kind of address.
            unsafe { at.cast::<libc::sockaddr_in>().write(raw) }
        }
        SocketAddr::V6(v6) => {
            let raw = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { at.cast::<libc::sockaddr_in6>().write(raw) }
        }
    }
    storage
}
