//! Completion queues with their channels, and shared receive queues.

use std::ffi::c_int;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use weft_cverbs::{
    IBV_WC_SUCCESS, IBV_WC_WITH_IMM, Zeroed, ibv_comp_channel, ibv_cq, ibv_recv_wr, ibv_sge,
    ibv_srq, ibv_srq_init_attr, ibv_wc,
};

use crate::context::{Context, Pd};
use crate::error::{Error, last, status};
use crate::memory::Sge;

/// Waits until something can be read, at most until `end`; false if nothing came.
pub(crate) fn readable(fd: BorrowedFd<'_>, end: Instant) -> Result<bool, Errno> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
    }
}

/// Calls on this descriptor do not block.
pub(crate) fn without_blocking(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    fcntl_setfl(fd, fcntl_getfl(fd)? | OFlags::NONBLOCK)
}

/// A completion channel: a descriptor that says which completion queue has a completion. Clones are the same one.
#[derive(Clone)]
pub struct Channel(Arc<ChannelInner>);

struct ChannelInner {
    channel: *mut ibv_comp_channel,
    context: Context,
}

// SAFETY: as `Context`.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: ours, once; every queue of it has held it.
        unsafe { (self.context.libraries().verbs.ibv_destroy_comp_channel)(self.channel) };
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel's descriptor, which is open as long as it.
        unsafe { BorrowedFd::borrow_raw((*self.0.channel).fd) }
    }
}

impl Context {
    /// A new completion channel.
    ///
    /// # Errors
    /// As `ibv_create_comp_channel`.
    pub fn create_channel(&self) -> Result<Channel, Error> {
        // SAFETY: an open context.
        let channel = unsafe { (self.libraries().verbs.ibv_create_comp_channel)(self.raw()) };
        if channel.is_null() {
            return Err(self.failed("ibv_create_comp_channel", last()));
        }
        let context = self.clone();
        let channel = Channel(Arc::new(ChannelInner { channel, context }));
        without_blocking(channel.as_fd()).map_err(|e| self.failed("fcntl", e.raw_os_error()))?;
        Ok(channel)
    }

    /// A new completion queue with room for `entries` at least.
    ///
    /// # Errors
    /// As `ibv_create_cq`.
    pub fn create_cq(&self, entries: u32, channel: Option<&Channel>) -> Result<Cq, Error> {
        if channel.is_some_and(|channel| !channel.0.context.is(self)) {
            return Err(self.failed(
                "ibv_create_cq with a channel of another device",
                libc::EINVAL,
            ));
        }
        let raw = channel.map_or(ptr::null_mut(), |channel| channel.0.channel);
        let more = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|e| self.failed("eventfd", e.raw_os_error()))?;
        // SAFETY: an open context and its channel.
        let cq = unsafe {
            let create = self.libraries().verbs.ibv_create_cq;
            create(self.raw(), entries as c_int, ptr::null_mut(), raw, 0)
        };
        if cq.is_null() {
            let needed = entries as usize * size_of::<ibv_wc>();
            return Err(self.lacks_memory("ibv_create_cq", last(), needed));
        }
        Ok(Cq(Arc::new(CqInner {
            cq,
            channel: channel.cloned(),
            waiting: AtomicUsize::new(0),
            more,
            context: self.clone(),
        })))
    }
}

/// A completion queue. Clones are the same one.
#[derive(Clone)]
pub struct Cq(Arc<CqInner>);

struct CqInner {
    cq: *mut ibv_cq,
    channel: Option<Channel>,
    /// Threads in [`Cq::take`].
    waiting: AtomicUsize,
    /// Readable when one of them has left completions for another.
    more: OwnedFd,
    context: Context,
}

// SAFETY: as `Context`.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}

impl Drop for CqInner {
    fn drop(&mut self) {
        // SAFETY: ours, once; every queue pair of it has held it, and every event of it was acknowledged.
        unsafe { (self.context.libraries().verbs.ibv_destroy_cq)(self.cq) };
    }
}

/// A work completion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    /// The number of the work request.
    pub id: u64,
    status: u32,
    /// `IBV_WC_SEND` and so on; meaningless after an error.
    pub opcode: u32,
    /// Bytes received or read.
    pub len: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// The queue pair.
    pub qp: u32,
    /// The driver's number of an error.
    pub vendor_error: u32,
}

impl Wc {
    fn of(wc: &ibv_wc) -> Self {
        let with_imm = wc.status == IBV_WC_SUCCESS && wc.wc_flags & IBV_WC_WITH_IMM != 0;
        Self {
            id: wc.wr_id,
            status: wc.status,
            opcode: wc.opcode,
            len: wc.byte_len,
            imm: with_imm.then(|| u32::from_be(wc.imm_data)),
            qp: wc.qp_num,
            vendor_error: wc.vendor_err,
        }
    }

    /// Its status, an `ibv_wc_status`.
    pub fn status(&self) -> u32 {
        self.status
    }

    /// True if the work request has succeeded.
    pub fn is_success(&self) -> bool {
        self.status == IBV_WC_SUCCESS
    }
}

impl Cq {
    pub(crate) fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_cq {
        self.0.cq
    }

    /// Takes completions without waiting; returns their number.
    ///
    /// # Errors
    /// As `ibv_poll_cq`.
    pub fn poll(&self, completions: &mut [Wc]) -> Result<usize, Error> {
        const MOST: usize = 16;
        let mut taken = [ibv_wc::zeroed(); MOST];
        let room = completions.len().min(MOST);
        let context = &self.0.context;
        let call = context.ops().poll_cq;
        // SAFETY: the table's own call, a queue that lives, and room for so many.
        let count = call.map(|call| unsafe { call(self.0.cq, room as c_int, taken.as_mut_ptr()) });
        let count = count.ok_or_else(|| context.failed("ibv_poll_cq", libc::EOPNOTSUPP))?;
        let count = usize::try_from(count).map_err(|_| context.failed("ibv_poll_cq", last()))?;
        for (to, from) in completions.iter_mut().zip(&taken[..count]) {
            *to = Wc::of(from);
        }
        Ok(count)
    }

    /// Asks for one event of the channel at the next completion.
    ///
    /// # Errors
    /// As `ibv_req_notify_cq`.
    pub fn arm(&self) -> Result<(), Error> {
        let context = &self.0.context;
        let call = context.ops().req_notify_cq;
        // SAFETY: as in `poll`.
        let answer = call.map_or(libc::EOPNOTSUPP, |call| unsafe { call(self.0.cq, 0) });
        status(answer).map_err(|errno| context.failed("ibv_req_notify_cq", errno))
    }

    /// Waits on the channel for the event that was asked for; false if none came in this time, or there is no channel.
    ///
    /// # Errors
    /// As `ibv_get_cq_event`.
    pub fn event(&self, patience: Duration) -> Result<bool, Error> {
        let (context, end) = (&self.0.context, Instant::now() + patience);
        let Some(channel) = &self.0.channel else {
            return Ok(false);
        };
        loop {
            let came = readable(channel.as_fd(), end);
            if !came.map_err(|e| context.failed("poll", e.raw_os_error()))? {
                return Ok(false);
            }
            // If not, another thread has taken it.
            if self.take_event(channel)? {
                return Ok(true);
            }
        }
    }

    /// Takes an event of the channel, if one is there.
    fn take_event(&self, channel: &Channel) -> Result<bool, Error> {
        let context = &self.0.context;
        let calls = &context.libraries().verbs;
        let (mut cq, mut program) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a channel that lives, and places for the answer.
        let answer =
            unsafe { (calls.ibv_get_cq_event)(channel.0.channel, &raw mut cq, &raw mut program) };
        if answer == 0 {
            // SAFETY: the queue lives until its event is acknowledged.
            unsafe { (calls.ibv_ack_cq_events)(cq, 1) };
            return Ok(true);
        }
        match last() {
            libc::EAGAIN | libc::EINTR => Ok(false),
            errno => Err(context.failed("ibv_get_cq_event", errno)),
        }
    }

    /// Waits for completions and takes them; returns their number, 0 if none came in this time (`None`: for ever). Sleeps on the channel, which must be
    /// of this queue alone; without one it looks every 50 us. Several threads may wait.
    ///
    /// # Errors
    /// As `ibv_poll_cq`, `ibv_req_notify_cq` and `ibv_get_cq_event`.
    pub fn take(&self, out: &mut [Wc], patience: Option<Duration>) -> Result<usize, Error> {
        let count = self.poll(out)?;
        if count > 0 || out.is_empty() || patience == Some(Duration::ZERO) {
            return Ok(count);
        }
        let end = patience.and_then(|time| Instant::now().checked_add(time));
        self.0.waiting.fetch_add(1, Ordering::SeqCst);
        let taken = self.take_later(out, end);
        let others = self.0.waiting.fetch_sub(1, Ordering::SeqCst) > 1;
        // They have slept through the event that this thread took.
        if others && !matches!(taken, Ok(0)) {
            let _ = rustix::io::write(&self.0.more, &1u64.to_ne_bytes());
        }
        taken
    }

    fn take_later(&self, out: &mut [Wc], end: Option<Instant>) -> Result<usize, Error> {
        loop {
            self.arm()?;
            // What came before it was armed makes no event.
            let count = self.poll(out)?;
            if count > 0 {
                return Ok(count);
            }
            if !self.sleep(end)? {
                return self.poll(out);
            }
        }
    }

    /// Sleeps until something may have come; false if the time is over.
    fn sleep(&self, end: Option<Instant>) -> Result<bool, Error> {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(false);
        }
        let Some(channel) = &self.0.channel else {
            std::thread::sleep(Duration::from_micros(50));
            return Ok(true);
        };
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [
            PollFd::new(channel, PollFlags::IN),
            PollFd::new(&self.0.more, PollFlags::IN),
        ];
        match poll(&mut fds, left.as_ref()) {
            Ok(0) => return Ok(false),
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(self.0.context.failed("poll", e.raw_os_error())),
        }
        let [_, more] = fds.map(|fd| !fd.revents().is_empty());
        if more {
            let _ = rustix::io::read(&self.0.more, &mut [0; 8]);
        }
        self.take_event(channel)?;
        Ok(true)
    }

    /// Waits for one completion, see [`Cq::take`].
    ///
    /// # Errors
    /// As there; `None` if none came in this time.
    pub fn wait(&self, patience: Duration) -> Result<Option<Wc>, Error> {
        let mut wc = [Wc::default()];
        let count = self.take(&mut wc, Some(patience))?;
        let [wc] = wc;
        Ok((count == 1).then_some(wc))
    }

    /// The library's words for the status of a completion.
    pub fn words(&self, wc: &Wc) -> String {
        self.0.context.libraries().words(wc.status)
    }
}

/// A shared receive queue. Clones are the same one.
#[derive(Clone)]
pub struct Srq(Arc<SrqInner>);

struct SrqInner {
    srq: *mut ibv_srq,
    pd: Pd,
}

// SAFETY: as `Context`.
unsafe impl Send for SrqInner {}
// SAFETY: as above.
unsafe impl Sync for SrqInner {}

impl Drop for SrqInner {
    fn drop(&mut self) {
        // SAFETY: ours, once; every queue pair of it has held it.
        unsafe { (self.pd.context().libraries().verbs.ibv_destroy_srq)(self.srq) };
    }
}

impl Pd {
    /// A new shared receive queue for `max_wr` receives of one piece.
    ///
    /// # Errors
    /// As `ibv_create_srq`.
    pub fn create_srq(&self, max_wr: u32) -> Result<Srq, Error> {
        let context = self.context();
        let mut init = ibv_srq_init_attr::zeroed();
        (init.attr.max_wr, init.attr.max_sge) = (max_wr, 1);
        // SAFETY: a domain that lives, and its attributes.
        let srq = unsafe { (context.libraries().verbs.ibv_create_srq)(self.raw(), &raw mut init) };
        if srq.is_null() {
            let needed = max_wr as usize * size_of::<ibv_recv_wr>();
            return Err(context.lacks_memory("ibv_create_srq", last(), needed));
        }
        let pd = self.clone();
        Ok(Srq(Arc::new(SrqInner { srq, pd })))
    }
}

impl Srq {
    pub(crate) fn context(&self) -> &Context {
        self.0.pd.context()
    }

    pub(crate) fn raw(&self) -> *mut ibv_srq {
        self.0.srq
    }

    /// Posts a receive.
    ///
    /// # Errors
    /// As `ibv_post_srq_recv`.
    pub fn post_recv(&self, id: u64, sges: &[Sge<'_>]) -> Result<(), Error> {
        let context = self.0.pd.context();
        let (mut wr, mut bad) = (receive(id, list(sges), sges.len()), ptr::null_mut());
        let call = context.ops().post_srq_recv;
        // SAFETY: the table's own call, a queue that lives, and a work request with its list.
        let answer = call.map_or(libc::EOPNOTSUPP, |call| unsafe {
            call(self.0.srq, &raw mut wr, &raw mut bad)
        });
        status(answer).map_err(|errno| context.failed("ibv_post_srq_recv", errno))
    }
}

/// A receive.
pub(crate) fn receive(id: u64, sges: *const ibv_sge, count: usize) -> ibv_recv_wr {
    ibv_recv_wr {
        wr_id: id,
        next: ptr::null_mut(),
        // The calls only read it.
        sg_list: sges.cast_mut(),
        num_sge: count as c_int,
    }
}

/// The list as the calls take it; they only read it.
pub(crate) fn list(sges: &[Sge<'_>]) -> *mut ibv_sge {
    // An `Sge` is an `ibv_sge` (`repr(transparent)`).
    sges.as_ptr().cast::<ibv_sge>().cast_mut()
}
