//! The device: its limits, its tables, and its objects.

use std::any::Any;
use std::collections::{HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use weft_mem::{Domain, PdId, Table};
use weft_sys::settings;
use weft_sys::{EventFd, Interest, poll_fds};
use weft_tls::Tls;

use crate::engine::{Engine, guarded};
use crate::ext::DeviceExt;
use crate::lock::lock;
use crate::neighbours::Neighbours;
use crate::pool::Pool;
use crate::stat;
use crate::timer;
use crate::tls_env;
use crate::transport::sim::SimNet;
use crate::types::{AsyncEvent, DeviceAttr, Error, LimitReached, Limits, LocalMode};

/// Asynchronous events kept for a program that does not fetch them.
const MAX_EVENTS: usize = 1024;

/// The transport of a device's connections.
#[derive(Clone, Default)]
pub enum Transport {
    /// TCP, wire-compatible with RNICs and the kernel's siw.
    #[default]
    Tcp,
    /// A simulated network inside the process.
    Sim(SimNet),
}

/// Counts objects of a kind against a limit; gives the place back when dropped.
pub(crate) struct Counted(Arc<AtomicU32>);

impl Counted {
    pub(crate) fn take(
        counter: &Arc<AtomicU32>,
        limit: u32,
        what: &'static str,
        field: &'static str,
    ) -> Result<Counted, Error> {
        let taken = counter.fetch_add(1, Ordering::Relaxed);
        let counted = Counted(Arc::clone(counter));
        LimitReached::check(what, field, taken.saturating_add(1), limit)?;
        Ok(counted)
    }

    /// Count without a limit.
    pub(crate) fn unlimited(counter: &Arc<AtomicU32>) -> Counted {
        counter.fetch_add(1, Ordering::Relaxed);
        Counted(Arc::clone(counter))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The number of a queue pair: no other one of the device has it until this is dropped.
pub(crate) struct QpNumber {
    pub(crate) num: u32,
    device: Arc<DeviceInner>,
}

impl QpNumber {
    pub(crate) fn take(device: &Arc<DeviceInner>, wanted: Option<u32>) -> Result<QpNumber, Error> {
        let mut taken = lock(&device.qp_numbers);
        let num = match wanted {
            Some(0) => return Err(Error::Invalid("0 is no number of a queue pair")),
            Some(num) => Some(num).filter(|num| taken.insert(*num)),
            None => {
                std::iter::repeat_with(|| device.id()).find(|num| *num != 0 && taken.insert(*num))
            }
        };
        let num = num.ok_or(Error::Invalid("another queue pair has this number"))?;
        Ok(QpNumber {
            num,
            device: Arc::clone(device),
        })
    }
}

impl Drop for QpNumber {
    fn drop(&mut self) {
        lock(&self.device.qp_numbers).remove(&self.num);
    }
}

/// A connection in start-up, which counts against [`Limits::max_pending`].
pub(crate) trait StartUp: Send + Sync {
    /// End it, for this reason.
    fn give_up(&self, why: &str);
}

type EventHook = Box<dyn Fn(AsyncEvent) + Send + Sync>;

pub(crate) struct DeviceInner {
    pub(crate) limits: Limits,
    pub(crate) table: Table,
    pub(crate) engine: Arc<Engine>,
    pub(crate) transport: Transport,
    pending: Arc<AtomicU32>,
    /// Connections in start-up, oldest first.
    pub(crate) greetings: Mutex<VecDeque<Weak<dyn StartUp>>>,
    pub(crate) local: LocalMode,
    /// The directory, mounted into each container, with the Unix sockets of listeners (`WEFT_LOCAL_DIR`).
    pub(crate) local_dir: Option<PathBuf>,
    pub(crate) neighbours: Neighbours,
    /// For connections whose [`ConnParam`](crate::ConnParam) says nothing of it.
    pub(crate) tls: Option<Tls>,
    pool: Pool,
    /// Bytes that wait for receives, of all queue pairs.
    pub(crate) held: Arc<AtomicUsize>,
    next_id: AtomicU32,
    pub(crate) qps: Arc<AtomicU32>,
    qp_numbers: Mutex<HashSet<u32>>,
    pub(crate) cqs: Arc<AtomicU32>,
    pub(crate) srqs: Arc<AtomicU32>,
    /// The ports of RoCE that are open.
    pub(crate) roce_ports: Mutex<HashMap<(IpAddr, u32), Weak<dyn Any + Send + Sync>>>,
    /// What the device has of the others that share its addresses.
    pub(crate) roce_siblings: Mutex<Option<Box<dyn Any + Send + Sync>>>,
    /// See [`DeviceBuilder::numbers_with_ports`].
    pub(crate) numbers_have_ports: bool,
    seed: AtomicU64,
    events: Mutex<VecDeque<AsyncEvent>>,
    events_fd: EventFd,
    event_hook: OnceLock<EventHook>,
}

impl DeviceInner {
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Reports an asynchronous event; the oldest are dropped if the program does not fetch them.
    pub(crate) fn raise(&self, event: AsyncEvent) {
        let mut events = lock(&self.events);
        if let Some(hook) = self.event_hook.get() {
            drop(events);
            guarded(|| hook(event));
            return;
        }
        if events.len() == MAX_EVENTS {
            events.pop_front();
        }
        events.push_back(event);
        self.events_fd.signal();
    }

    /// A number that a peer cannot foresee.
    pub(crate) fn random_u32(&self) -> u32 {
        getrandom::u32().unwrap_or_else(|_| {
            // Only without any source of randomness (then STags cannot be made either).
            (self
                .seed
                .fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed)
                >> 32) as u32
        })
    }

    pub(crate) fn take_pending(&self) -> Option<Counted> {
        Counted::take(
            &self.pending,
            self.limits.max_pending,
            "connections in start-up",
            "max_pending",
        )
        .ok()
    }

    /// Connections are TCP's, not a simulated network's.
    pub(crate) fn is_tcp(&self) -> bool {
        matches!(self.transport, Transport::Tcp)
    }

    /// A number for an object of the device.
    pub(crate) fn id(&self) -> u32 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for DeviceInner {
    fn drop(&mut self) {
        self.engine.shut_down();
    }
}

/// A soft RNIC. Clones are handles of the same device; it ends when the last handle and the last object are dropped.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<DeviceInner>);

/// Settings of a device to be.
#[derive(Clone, Default)]
pub struct DeviceBuilder {
    transport: Transport,
    limits: Limits,
    local: Option<LocalMode>,
    tls: Option<Tls>,
    numbers_have_ports: bool,
}

impl DeviceBuilder {
    /// Uses TLS for all connections, and refuses others, unless [`ConnParam::tls`](crate::ConnParam::tls) has settings of its own. No
    /// effect on a simulated network and on datagrams. Default: the settings in the environment (`WEFT_TLS`, `WEFT_TLS_KEY`,
    /// `WEFT_TLS_PEERS`, see docs/tls.md); without them no TLS.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// As [`DeviceBuilder::tls`], with a key for this device only and any peer, if `addr` (on which a program listens, or to which it
    /// connects) is beyond this host and the environment has no `WEFT_TLS`. It protects the data against passive attackers.
    ///
    /// # Errors
    /// [`Error::Setting`] if no key can be made.
    pub fn tls_beyond_host(mut self, addr: IpAddr) -> Result<Self, Error> {
        if !addr.to_canonical().is_loopback() && !tls_env::is_set() {
            self.tls = Some(tls_env::ephemeral().map_err(Error::Setting)?);
        }
        Ok(self)
    }

    /// Whether connections to peers on the same host use shared memory. Default: [`LocalMode::from_env`]. No effect on a simulated network.
    #[must_use]
    pub fn local(mut self, mode: LocalMode) -> Self {
        self.local = Some(mode);
        self
    }

    /// The transport of its connections. Default TCP.
    #[must_use]
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// Its queue pairs may have numbers that contain the TCP port of a listener and are good for RoCE too: the device takes a slot whose numbers are those of
    /// ports from 32,768 on ([`Device::ports_of_numbers`]). Default: numbers of RoCE alone, below 2^23.
    #[must_use]
    pub fn numbers_with_ports(mut self, yes: bool) -> Self {
        self.numbers_have_ports = yes;
        self
    }

    /// Its limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Open it. Starts the engine's thread.
    ///
    /// # Errors
    /// [`Error::Os`] if the process may have no more threads or descriptors; [`Error::Invalid`] for an unknown value of `WEFT_LOCAL`;
    /// [`Error::Setting`] if the environment asks for TLS and it cannot be set up.
    pub fn open(self) -> Result<Device, Error> {
        let cores = weft_sys::cpu_count();
        let local = match (&self.transport, self.local) {
            (Transport::Sim(_), _) => LocalMode::Off,
            (Transport::Tcp, Some(mode)) => mode,
            (Transport::Tcp, None) => LocalMode::from_env()?,
        };
        settings::STAT.read()?;
        let tls = match (&self.transport, self.tls) {
            (Transport::Sim(_), _) => None,
            (Transport::Tcp, Some(tls)) => Some(tls),
            (Transport::Tcp, None) => tls_env::from_env().inspect_err(|error| {
                // Programs with C's error numbers could not say more than that an argument is wrong.
                tracing::error!(%error, "TLS cannot be had as the environment asks for it");
            })?,
        };
        let engine = Engine::start(cores, local != LocalMode::Off)
            .map_err(Error::os("starting the engine"))?;
        if matches!(self.transport, Transport::Tcp) {
            stat::serve_stat(&engine);
        }
        Ok(Device(Arc::new(DeviceInner {
            limits: self.limits,
            table: Table::new(self.limits.max_mr as usize),
            local,
            local_dir: settings::LOCAL_DIR.path(),
            neighbours: Neighbours::default(),
            tls,
            engine,
            transport: self.transport,
            pending: Arc::default(),
            greetings: Mutex::default(),
            pool: Pool::default(),
            held: Arc::default(),
            next_id: AtomicU32::new(1),
            qps: Arc::default(),
            qp_numbers: Mutex::default(),
            cqs: Arc::default(),
            srqs: Arc::default(),
            roce_ports: Mutex::default(),
            roce_siblings: Mutex::default(),
            numbers_have_ports: self.numbers_have_ports,
            seed: AtomicU64::new(1),
            events: Mutex::default(),
            events_fd: EventFd::new().map_err(Error::os("eventfd"))?,
            event_hook: OnceLock::new(),
        })))
    }
}

impl DeviceExt for Device {
    fn after(&self, time: Duration, run: impl FnOnce() + Send + 'static) {
        let mut run = Some(run);
        timer::after(&self.0.engine, time, move || {
            run.take()?();
            None
        });
    }
}

impl Device {
    /// A device over TCP with the default limits.
    ///
    /// # Errors
    /// As [`DeviceBuilder::open`].
    pub fn open() -> Result<Device, Error> {
        DeviceBuilder::default().open()
    }

    /// A device with other settings.
    pub fn builder() -> DeviceBuilder {
        DeviceBuilder::default()
    }

    /// The capabilities of the device.
    pub fn attr(&self) -> DeviceAttr {
        let transport = match self.0.transport {
            Transport::Tcp => "tcp",
            Transport::Sim(_) => "sim",
        };
        DeviceAttr {
            limits: self.0.limits,
            transport,
            atomics: true,
            immediate: true,
            srq: true,
            windows: true,
        }
    }

    /// A protection domain: queue pairs reach only the memory of their own.
    ///
    /// # Errors
    /// None now; a device with a limit may have one.
    pub fn alloc_pd(&self) -> Result<Pd, Error> {
        Ok(Pd(Arc::new(PdInner {
            id: PdId(self.0.id()),
            domain: OnceLock::new(),
            device: Arc::clone(&self.0),
        })))
    }

    /// Sets a function for all asynchronous events, including pending ones; [`Device::get_async_event`] returns none from then on. Only the
    /// first hook counts. It is called on any thread, with locks held: it must not block, and must not call this library.
    pub fn on_async_event(&self, hook: impl Fn(AsyncEvent) + Send + Sync + 'static) {
        let earlier = {
            let mut events = lock(&self.0.events);
            let _ = self.0.event_hook.set(Box::new(hook));
            std::mem::take(&mut *events)
        };
        if let Some(hook) = self.0.event_hook.get() {
            earlier.into_iter().for_each(hook);
        }
    }

    /// The next asynchronous event; waits up to `timeout` (`None`: for ever). `None` when the time is up.
    pub fn get_async_event(&self, timeout: Option<Duration>) -> Option<AsyncEvent> {
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            {
                let mut events = lock(&self.0.events);
                self.0.events_fd.drain();
                if let Some(event) = events.pop_front() {
                    if !events.is_empty() {
                        self.0.events_fd.signal();
                    }
                    return Some(event);
                }
            }
            let left = match deadline {
                None => None,
                Some(end) => Some(end.checked_duration_since(Instant::now())?),
            };
            let _ = poll_fds(&[(self.0.events_fd.as_fd(), Interest::READ)], left);
        }
    }
}

pub(crate) struct PdInner {
    pub(crate) id: PdId,
    /// The state exported to peers of this host, created with the first peer.
    pub(crate) domain: OnceLock<Arc<Domain>>,
    pub(crate) device: Arc<DeviceInner>,
}

/// A protection domain. Clones are handles of the same one.
#[derive(Clone)]
pub struct Pd(pub(crate) Arc<PdInner>);

impl Pd {
    /// The device.
    pub fn device(&self) -> Device {
        Device(Arc::clone(&self.0.device))
    }
}
