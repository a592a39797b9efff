//! Event channels: events of identifiers wait here until the program fetches them.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::thread::Timespec;

use super::device::{self, datagrams};
use super::id::{self, Channel, Core, Place, Stage, Waiting, core, get, set};
use super::news::News;
use super::qp;
use super::request::{Request, Unseen};
use super::types::{
    RDMA_CM_EVENT_MULTICAST_ERROR, RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_UNREACHABLE,
    rdma_cm_event, rdma_cm_event_param, rdma_cm_event_type, rdma_cm_id, rdma_conn_param,
    rdma_event_channel, rdma_ud_param,
};
use crate::call::{pointer, run, wait_and_fetch};
use crate::verbs::object::{Kind as _, kind, lock, turn};
use crate::verbs::types::{Zeroed as _, ibv_ah_attr};

/// An event that the program has fetched. Acknowledged when it is dropped.
struct Fetched(Arc<Core>);

impl Drop for Fetched {
    fn drop(&mut self) {
        self.0.subject.ack(1);
    }
}

/// An event as C holds it, until it is acknowledged.
struct Event {
    #[allow(dead_code)] // counts until it is dropped
    fetched: Fetched,
    #[allow(dead_code)] // C points to it
    private_data: Box<[u8]>,
}

kind!(Event as rdma_cm_event, 0x636d_6576);

/// Makes the identifier of a request to `listener`.
fn requested(listener: &Arc<Core>, request: Request) -> Result<Arc<Core>, Errno> {
    let channel = match &*lock(&listener.place) {
        Some(Place { sync: true, .. }) => None,
        Some(Place { channel, .. }) => Some(Arc::clone(channel)),
        None => return Err(Errno::INVAL),
    };
    let nic = device::of(listener.ps)?;
    let (local, peer) = request.addrs();
    let (depths, retries, remote) = (request.depths(), request.retries(), request.remote());
    let terms = request.roce_terms();
    let core = id::create(
        channel,
        get!(listener, context),
        listener.ps,
        get!(listener, qp_type),
        Stage::Requested(Box::new(request)),
    )?;
    {
        let mut setup = core.setup();
        (setup.depths, setup.retries) = (depths, retries);
        setup.remote = remote;
        setup.terms = terms;
    }
    core.at(&nic, local, Some(peer));
    core.show_path(&nic);
    Ok(core)
}

impl Channel {
    /// The next event, in C's form.
    pub(super) fn get(&self) -> Result<*mut rdma_cm_event, Errno> {
        let (_, waiting) = self.events()?.next()?;
        Self::show(waiting)
    }

    fn show(Waiting { about, mut news }: Waiting) -> Result<*mut rdma_cm_event, Errno> {
        let fetched = Fetched(about);
        let about = fetched.0.handle();
        let (id, listen_id) = match news.request.take().and_then(Unseen::fetch) {
            // A request for which no identifier can be made is dropped, which rejects it.
            Some(request) => (requested(&fetched.0, *request)?.handle(), about),
            None => (about, std::ptr::null_mut()),
        };
        let private_data = news.private_data.into_boxed_slice();
        let at = private_data.as_ptr();
        let len = u8::try_from(private_data.len()).unwrap_or(u8::MAX);
        let at = if len == 0 {
            std::ptr::null()
        } else {
            at.cast()
        };
        let depth = |depth: u16| u8::try_from(depth).unwrap_or(u8::MAX);
        let conn = rdma_conn_param {
            private_data: at,
            private_data_len: len,
            responder_resources: depth(news.depths.0),
            initiator_depth: depth(news.depths.1),
            flow_control: 0,
            retry_count: news.retries.count,
            rnr_retry_count: news.retries.rnr,
            srq: 0,
            qp_num: news.qp_num,
        };
        let param = if datagrams(fetched.0.ps) {
            let way = news.ud.map(|ud| qp::way(&fetched.0, ud.dgid));
            let at = news
                .join
                .as_ref()
                .map_or(at, |join| join.context as *const c_void);
            let joined = news
                .join
                .map(|join| fetched.0.joined_group(join.membership));
            if let Some(Err(errno)) = way {
                // The address has been removed meanwhile.
                news.status = -errno.raw_os_error();
                news.event = RDMA_CM_EVENT_UNREACHABLE;
            }
            if let Some(result) = joined
                && let Err(errno) = result.and(way.map_or(Ok(()), |way| way.map(drop)))
            {
                news.status = -errno.raw_os_error();
                news.event = RDMA_CM_EVENT_MULTICAST_ERROR;
            }
            rdma_cm_event_param {
                ud: rdma_ud_param {
                    private_data: at,
                    private_data_len: len,
                    ah_attr: way.and_then(Result::ok).unwrap_or_else(ibv_ah_attr::zeroed),
                    qp_num: news.qp_num,
                    qkey: news.ud.map_or(0, |ud| ud.qkey),
                },
            }
        } else {
            rdma_cm_event_param { conn }
        };
        let event = Event {
            fetched,
            private_data,
        };
        let made = Event::pool().make(event, |c, _| {
            c.id = id;
            c.listen_id = listen_id;
            c.event = news.event;
            c.status = news.status;
            c.param = param;
            if let Some(arg) = news.arg {
                // SAFETY: the first member of the union, in rdma-core 62 and later.
                unsafe { (&raw mut c.param).cast::<u64>().write(arg) };
            }
        })?;
        Ok(made.handle())
    }
}

pub(super) fn ack(event: *mut rdma_cm_event) -> Result<(), Errno> {
    drop(turn::<Event>(event)?.retire());
    Ok(())
}

impl Core {
    /// Acknowledges the event that the identifier itself keeps.
    pub(super) fn ack_own(&self) {
        let event = get!(self, event);
        set!(self, event = std::ptr::null_mut());
        if !event.is_null() {
            // The program can write the field: a value that is not an event is ignored.
            let _ = ack(event);
        }
    }

    /// The end of every call that makes an event: waits for the event if the program has no channel.
    pub(super) fn complete(&self) -> Result<c_int, Errno> {
        if !self.is_sync() {
            return Ok(0);
        }
        self.ack_own();
        let event = self.channel()?.get()?;
        set!(self, event = event);
        // SAFETY: an event that the program has not seen yet.
        let (kind, status) = unsafe { ((*event).event, (*event).status) };
        match status {
            0 => Ok(0),
            _ if kind == RDMA_CM_EVENT_REJECTED => Err(Errno::CONNREFUSED),
            // InfiniBand's number of a reason.
            status if status > 0 && kind == RDMA_CM_EVENT_UNREACHABLE => Err(Errno::CONNREFUSED),
            status => Err(Errno::from_raw_os_error(status.saturating_abs())),
        }
    }
}

/// `rdma_create_event_channel(3)`.
///
/// # Safety
/// None is needed.
pub unsafe fn rdma_create_event_channel() -> *mut rdma_event_channel {
    pointer(|| Ok(Channel::create()?.handle()))
}

/// `rdma_destroy_event_channel(3)`. Identifiers that still exist get no more events.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    run(|| {
        id::channel(channel)?.destroy();
        Ok(0)
    });
}

/// `rdma_write_cm_event(3)`: queues an event that the program made.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_write_cm_event(
    id: *mut rdma_cm_id,
    event: rdma_cm_event_type,
    status: c_int,
    arg: u64,
) -> c_int {
    const RDMA_CM_EVENT_USER: rdma_cm_event_type = 18;
    run(|| {
        if event != RDMA_CM_EVENT_USER {
            return Err(Errno::INVAL);
        }
        core(id)?.tell(News {
            arg: Some(arg),
            ..News::status(event, status)
        });
        Ok(0)
    })
}

/// Some programs (rping, ucmatose) destroy a channel and exit while one of their threads is returning to [`rdma_get_cm_event`]. If that call fails before the
/// exit, the thread ends the program with its failure. A thread that is already in the call would wait for ever.
fn linger(channel: *mut rdma_event_channel) {
    if !channel.is_null() {
        // Not libc's call, which is a cancellation point.
        let _ = rustix::thread::nanosleep(&Timespec {
            tv_sec: 0,
            tv_nsec: 300_000_000,
        });
    }
}

/// `rdma_get_cm_event(3)`.
///
/// # Safety
/// As its manual page: a place for a pointer at `event`.
pub unsafe fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    let fetch = || {
        let Some((_, waiting)) = id::channel(channel)?.events()?.fetch() else {
            return Ok(false);
        };
        let got = Channel::show(waiting)?;
        // SAFETY: the caller's promise.
        unsafe { event.write(got) };
        Ok(true)
    };
    let count_of = || {
        let events = id::channel(channel).and_then(|channel| channel.events());
        let fd = events.inspect_err(|_| linger(channel))?.fd();
        if event.is_null() {
            Err(Errno::INVAL)
        } else {
            Ok(fd)
        }
    };
    // SAFETY: an event queue's descriptor.
    unsafe { wait_and_fetch(count_of, fetch) }
}

/// `rdma_ack_cm_event(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    run(|| ack(event).map(|()| 0))
}
