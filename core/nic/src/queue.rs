//! Completion queues.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use weft_cverbs::{IBV_WC_SUCCESS, IBV_WC_WITH_IMM, ibv_cq, ibv_recv_wr, ibv_sge, ibv_wc};

use crate::channel::Channel;
use crate::context::Context;
use crate::error::{Error, last, status};
use crate::life::{Handle, Kind};
use crate::memory::Sge;

impl Context {
    /// A new completion queue with room for `entries` at least; the channel is of this queue alone, and [`Cq::take`] sleeps on it.
    ///
    /// # Errors
    /// As `ibv_create_cq`.
    pub fn create_cq(&self, entries: u32, channel: Option<&Channel>) -> Result<Cq, Error> {
        self.new_cq(entries, channel, false)
    }

    /// As [`Context::create_cq`], with a channel whose events the program takes ([`Channel::event`]): it may be of several queues.
    ///
    /// # Errors
    /// As there.
    pub fn create_cq_on(&self, entries: u32, channel: &Channel) -> Result<Cq, Error> {
        self.new_cq(entries, Some(channel), true)
    }

    fn new_cq(
        &self,
        entries: u32,
        channel: Option<&Channel>,
        is_shared: bool,
    ) -> Result<Cq, Error> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let calling = self.enter()?;
        let calls = &self.libraries().verbs;
        if channel.is_some_and(|channel| !channel.context().is(self)) {
            return Err(self.failed(
                "ibv_create_cq with a channel of another device",
                libc::EINVAL,
            ));
        }
        let raw = channel.map_or(ptr::null_mut(), Channel::raw);
        let more = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|e| self.failed("eventfd", e.raw_os_error()))?;
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        // Comes back with the queue's events.
        let program = ptr::without_provenance_mut(number as usize);
        // SAFETY: an open context and its channel; the library does not use the pointer.
        let cq = unsafe { (calls.ibv_create_cq)(self.raw(), entries as c_int, program, raw, 0) };
        if cq.is_null() {
            let needed = entries as usize * size_of::<ibv_wc>();
            return Err(self.lacks_memory("ibv_create_cq", last(), needed));
        }
        // SAFETY: ours, once; every queue pair of it was destroyed before, and every event of it is acknowledged.
        let destroy = move |cq| unsafe { (calls.ibv_destroy_cq)(cq) };
        Ok(Cq(Arc::new(CqInner {
            cq: Handle::new(self.life(), &calling, Kind::Cq, cq, destroy),
            number,
            channel: channel.cloned(),
            is_shared,
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
    cq: Handle<ibv_cq>,
    number: u32,
    channel: Option<Channel>,
    /// The channel's events belong to the program.
    is_shared: bool,
    /// Threads in [`Cq::take`].
    waiting: AtomicUsize,
    /// Readable when one of them has left completions for another.
    more: OwnedFd,
    context: Context,
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
        self.0.cq.raw()
    }

    /// Its number, by which a [`Channel`] names it: none of the process has the same.
    pub fn number(&self) -> u32 {
        self.0.number
    }

    /// Takes completions without waiting; returns their number.
    ///
    /// # Errors
    /// As `ibv_poll_cq`.
    pub fn poll(&self, completions: &mut [Wc]) -> Result<usize, Error> {
        self.poll_each(completions.len(), |at, wc| completions[at] = wc)
    }

    /// Takes up to `room` completions without waiting, and calls this with the place and each of them; returns their number.
    ///
    /// # Errors
    /// As `ibv_poll_cq`.
    #[inline]
    pub fn poll_each(&self, room: usize, mut each: impl FnMut(usize, Wc)) -> Result<usize, Error> {
        const MOST: usize = 16;
        let mut taken = [const { MaybeUninit::<ibv_wc>::uninit() }; MOST];
        let room = room.min(MOST);
        let context = &self.0.context;
        let call = context.ops().poll_cq;
        let call = call.ok_or_else(|| context.failed("ibv_poll_cq", libc::EOPNOTSUPP))?;
        let cq = &self.0.cq;
        let places = taken.as_mut_ptr().cast();
        // SAFETY: the table's own call, a queue that lives, and room for so many.
        let count = cq.with(|cq| unsafe { call(cq, room as c_int, places) })?;
        let count = usize::try_from(count).map_err(|_| context.failed("ibv_poll_cq", last()))?;
        for (at, wc) in taken[..count].iter().enumerate() {
            // SAFETY: the call has filled in so many.
            each(at, Wc::of(unsafe { wc.assume_init_ref() }));
        }
        Ok(count)
    }

    /// Asks for one event of the channel at the next completion, or at the next that the peer has marked as solicited or that is an error.
    ///
    /// # Errors
    /// As `ibv_req_notify_cq`.
    pub fn arm(&self, solicited_only: bool) -> Result<(), Error> {
        let context = &self.0.context;
        let call = context.ops().req_notify_cq;
        let call = call.ok_or_else(|| context.failed("ibv_req_notify_cq", libc::EOPNOTSUPP))?;
        let cq = &self.0.cq;
        // SAFETY: as in `poll`.
        let answer = cq.with(|cq| unsafe { call(cq, solicited_only.into()) })?;
        status(answer).map_err(|errno| context.failed("ibv_req_notify_cq", errno))
    }

    /// Waits for completions and takes them; returns their number, 0 if none came in this time (`None`: for ever). Sleeps on the channel if
    /// that is of this queue alone; else it looks every 50 us. Several threads may wait.
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
        let own = self.0.channel.as_ref().filter(|_| !self.0.is_shared);
        let Some(channel) = own else {
            return self.take_by_looking(out, end);
        };
        loop {
            self.arm(false)?;
            // What came before it was armed makes no event.
            let count = self.poll(out)?;
            if count > 0 {
                return Ok(count);
            }
            if !self.sleep(channel, end)? {
                return self.poll(out);
            }
        }
    }

    /// Without asking for events: those of a program's channel are the program's.
    fn take_by_looking(&self, out: &mut [Wc], end: Option<Instant>) -> Result<usize, Error> {
        const PAUSE: Duration = Duration::from_micros(50);
        loop {
            let count = self.poll(out)?;
            if count > 0 || end.is_some_and(|end| Instant::now() >= end) {
                return Ok(count);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Sleeps until something may have come; false if the time is over.
    fn sleep(&self, channel: &Channel, end: Option<Instant>) -> Result<bool, Error> {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Ok(false);
        }
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
        channel.try_event()?;
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
