//! A [`Link`] over RDMA: control messages by Send and Receive, blocks by one-sided Writes.
//!
//! Each side tells the other how many receives it has posted; every message grants as many more as have
//! been posted anew since the last. A side always keeps one credit back for a CREDIT message, and sends one
//! when it owes half of its receives, so that two sides with nothing else to say never starve each other.
//! Slots are filled by the kernel straight from files.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use weft_service::lock;
use weft_verbs::any::{Cq, Device, Mr, Pd, Qp, QpInit};
use weft_verbs::tls::TlsError;
use weft_verbs::{
    Access, CqOverrun, EndReason, Error, Path, RecvWr, RemoteAddr, SendWr, Wc, WcStatus,
};

use super::link::{Link, LinkError, Parcel};
use super::protocol::{MAX_MESSAGE, Message, RingAdvert};

/// Receives that a side posts.
const RECEIVES: u16 = 64;
/// Sends that may be outstanding.
const SENDS: u32 = 128;
/// Messages that are posted together, at most.
const BATCH: usize = 24;
/// Messages up to this length travel inline; only long paths make longer ones. An RNIC may take less ([`Qp::max_inline`]).
const INLINE: usize = 256;
/// How long sends may take to complete when an RNIC's connection is closed: it loses those that are not.
const DRAIN: Duration = Duration::from_secs(2);
/// How long the reason of a connection's end may take to be told.
const REASON: Duration = Duration::from_secs(1);

/// One side of a connection that is not there yet: receives are posted before the peer can send.
pub struct Prepared {
    pd: Pd,
    send_cq: Cq,
    recv_cq: Cq,
    recv: Mr,
}

impl Prepared {
    /// Creates the objects of one connection, in a protection domain of their own, so that keys known to one peer are useless to another.
    pub fn new(
        device: &Device,
        create: impl FnOnce(&Pd, &QpInit) -> Result<Qp, Error>,
    ) -> Result<(Self, Qp), Error> {
        let pd = device.alloc_pd()?;
        let send_cq = device.create_cq(2 * SENDS)?;
        let recv_cq = device.create_cq(2 * u32::from(RECEIVES))?;
        let recv = pd.alloc_mr(usize::from(RECEIVES) * MAX_MESSAGE, Access::LOCAL_WRITE)?;
        let init = QpInit {
            max_send_wr: SENDS,
            max_recv_wr: RECEIVES.into(),
            max_sge: 1,
            max_inline: INLINE as u32,
            ..QpInit::new(&send_cq, &recv_cq)
        };
        let qp = create(&pd, &init)?;
        let all: Vec<_> = (0..u64::from(RECEIVES))
            .map(|i| receive(&recv, i))
            .collect();
        qp.post_recv(&all).map_err(|_| Error::Invalid("receives"))?;
        Ok((
            Self {
                pd,
                send_cq,
                recv_cq,
                recv,
            },
            qp,
        ))
    }
}

fn receive(recv: &Mr, index: u64) -> RecvWr {
    RecvWr::new(index).sge(recv.sge(index as usize * MAX_MESSAGE, MAX_MESSAGE))
}

/// A connection over RDMA.
pub struct RdmaLink {
    // Dropped first, because the connection uses the memory.
    qp: Qp,
    base: Prepared,
    credits: Mutex<Credits>,
    granted: Condvar,
    post: Mutex<Post>,
    inbox: Mutex<Inbox>,
    ring: OnceLock<Ring>,
    closed: AtomicBool,
    /// The cause of its end, as a thread has seen it first: the others report the same.
    cause: OnceLock<LinkError>,
    /// How long to wait for credits or completions.
    patience: Duration,
}

struct Ring {
    mr: Mr,
    slot_len: usize,
    /// The peer's ring, or our own on the side that receives.
    remote: RemoteAddr,
}

struct Credits {
    /// Receives that the peer has for us.
    ours: u32,
    /// All that it ever has.
    most: u32,
    /// Receives posted again that were not reported to the peer.
    owed: u16,
}

#[derive(Default)]
struct Post {
    outstanding: u32,
    /// Long messages are sent from here.
    staging: Option<Mr>,
}

#[derive(Default)]
struct Inbox {
    messages: VecDeque<Message>,
    end: Option<LinkError>,
}

fn refused(e: &dyn std::fmt::Display) -> LinkError {
    LinkError::Gone(format!("cannot send: {e}"))
}

impl RdmaLink {
    /// Takes over the queue pair of `base`, once it is connected.
    pub fn new(base: Prepared, qp: Qp, patience: Duration) -> Self {
        Self {
            qp,
            base,
            // START and READY travel before any grant: each side has posted its receives.
            credits: Mutex::new(Credits {
                ours: 2,
                most: 2,
                owed: 0,
            }),
            granted: Condvar::new(),
            post: Mutex::default(),
            inbox: Mutex::default(),
            ring: OnceLock::new(),
            closed: AtomicBool::new(false),
            cause: OnceLock::new(),
            patience,
        }
    }

    fn ring(&self) -> &Ring {
        self.ring
            .get()
            .expect("the ring is made before slots are used")
    }

    fn at(&self, slot: u16, at: u32) -> usize {
        usize::from(slot) * self.ring().slot_len + at as usize
    }

    fn region(&self, slots: u16, slot_len: u32, access: Access) -> Result<Mr, LinkError> {
        let len = usize::from(slots) * slot_len as usize;
        let local = |e| LinkError::Local(format!("cannot register {len} bytes for the ring: {e}"));
        self.base.pd.alloc_mr(len, access).map_err(local)
    }

    fn set_ring(&self, mr: Mr, slot_len: u32, remote: RemoteAddr) -> Result<(), LinkError> {
        let ring = Ring {
            mr,
            slot_len: slot_len as usize,
            remote,
        };
        self.ring
            .set(ring)
            .map_err(|_| LinkError::Local("a second ring".into()))
    }

    /// The longest message that travels inline.
    fn inline(&self) -> usize {
        INLINE.min(self.qp.max_inline() as usize)
    }

    /// The cause of the connection's end, according to a failed request.
    fn why(&self, wc: &Wc) -> LinkError {
        if self.qp.soft().is_none() {
            return self.why_on_an_rnic(wc);
        }
        let cut = "the peer went away, or somebody cut the connection";
        LinkError::Gone(match (wc.status, self.qp.tls_error()) {
            (_, Some(TlsError::Truncated)) => cut.into(),
            (_, Some(e)) => format!("it was damaged or tampered with on the way ({e})"),
            (WcStatus::WrFlushErr, None) if wc.vendor_err == 0 => {
                // An end in order is one that the peer's TLS has announced. Its hook is called at once, since it has ended.
                if self.cipher().is_some() && self.end(Duration::ZERO) == Some(EndReason::Lost) {
                    cut.into()
                } else {
                    "the peer closed it or went away".into()
                }
            }
            (status, None) => format!("{status:?}, Terminate {:#06x}", wc.vendor_err),
        })
    }

    fn why_on_an_rnic(&self, wc: &Wc) -> LinkError {
        let device = self.qp.path().and_then(|path| path.reason);
        let device = device.as_deref().unwrap_or("the RNIC");
        LinkError::Gone(match wc.status {
            // What flushes the requests is told by another thread.
            WcStatus::WrFlushErr => match self.end(REASON) {
                _ if self.qp.is_gone() => format!("{device}: {}", EndReason::DeviceRemoved),
                Some(EndReason::DeviceRemoved) => {
                    format!("{device}: {}", EndReason::DeviceRemoved)
                }
                Some(EndReason::Disconnected) => {
                    format!("{device}: the peer closed it or went away")
                }
                _ => format!("{device}: the peer went away, or the network did"),
            },
            status => format!("{device}: {status}, vendor's error {:#x}", wc.vendor_err),
        })
    }

    /// How the connection has ended, if it has within this time.
    fn end(&self, patience: Duration) -> Option<EndReason> {
        let (tell, told) = mpsc::channel();
        self.qp.on_end(move |reason| {
            // Fails only if nobody waits any more.
            let _ = tell.send(reason);
        });
        told.recv_timeout(patience).ok()
    }

    /// The cause of its end, where a call has failed with this error.
    fn broken(&self, e: LinkError) -> LinkError {
        if self.qp.is_gone() {
            let flushed = Wc {
                status: WcStatus::WrFlushErr,
                ..Wc::default()
            };
            return self.why_on_an_rnic(&flushed);
        }
        e
    }

    fn overrun(&self, e: CqOverrun) -> LinkError {
        self.ended(self.broken(LinkError::Local(e.to_string())))
    }

    /// Notes what ended the connection; the first cause counts.
    fn ended(&self, cause: LinkError) -> LinkError {
        self.cause.get_or_init(|| cause).clone()
    }

    /// Waits until the peer has a receive beyond the one kept for CREDIT; takes as many as there are, up to `most`, and what we owe.
    fn take_credits(&self, most: usize) -> Result<(usize, u16), LinkError> {
        let deadline = Instant::now() + self.patience;
        let mut credits = lock(&self.credits);
        loop {
            if self.closed.load(Ordering::Acquire) {
                return Err(self.ended(LinkError::Gone("it was closed".into())));
            }
            if credits.ours >= 2 {
                let taken = most.min(credits.ours as usize - 1);
                credits.ours -= taken as u32;
                return Ok((taken, std::mem::take(&mut credits.owed)));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.ended(LinkError::Gone("the peer stopped receiving".into())));
            }
            credits = self
                .granted
                .wait_timeout(credits, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// The Write that brings a piece of a slot into the peer's slot.
    fn write_wr(&self, slot: u16, at: u32, len: u32) -> SendWr {
        let ring = self.ring();
        let at = self.at(slot, at);
        let remote = RemoteAddr {
            addr: ring.remote.addr + at as u64,
            rkey: ring.remote.rkey,
        };
        SendWr::write(0, remote).sge(ring.mr.sge(at, len as usize))
    }

    /// Posts requests that end in `messages` Sends, and collects completions until at most `most` are outstanding.
    fn post(
        &self,
        post: &mut Post,
        requests: &[SendWr],
        messages: u32,
        most: u32,
    ) -> Result<(), LinkError> {
        self.collect(post, SENDS - requests.len() as u32)?;
        let posted = self.qp.post_send(requests);
        posted.map_err(|e| self.broken(refused(&e)))?;
        post.outstanding += messages;
        self.collect(post, most)
    }

    /// Posts the requests of a batch.
    fn post_batch(&self, requests: &mut Vec<SendWr>, messages: u32) -> Result<(), LinkError> {
        if requests.is_empty() {
            return Ok(());
        }
        self.post(&mut lock(&self.post), requests, messages, SENDS / 2)?;
        requests.clear();
        Ok(())
    }

    /// Posts a message, after `write` if there is one, and collects completions.
    fn transmit(
        &self,
        write: Option<SendWr>,
        owed: u16,
        message: &Message,
    ) -> Result<(), LinkError> {
        let mut bytes = Vec::with_capacity(INLINE);
        message.encode(owed, &mut bytes);
        let mut post = lock(&self.post);
        let mut announce = SendWr::send(0).signaled();
        let is_inline = bytes.len() <= self.inline();
        if is_inline {
            announce = announce.inline(&bytes);
        } else {
            if post.staging.is_none() {
                let mr = self
                    .base
                    .pd
                    .alloc_mr(MAX_MESSAGE, Access::LOCAL_WRITE)
                    .map_err(|e| refused(&e))?;
                post.staging = Some(mr);
            }
            let staging = post.staging.as_ref().expect("just made");
            staging.write(0, &bytes).map_err(|e| refused(&e))?;
            announce = announce.sge(staging.sge(0, bytes.len()));
        }
        // The staging buffer is free again only after the message was sent.
        let most = if is_inline { SENDS / 2 } else { 0 };
        match write {
            Some(write) => self.post(&mut post, &[write, announce], 1, most),
            None => self.post(&mut post, &[announce], 1, most),
        }
    }

    /// Takes completions of sends; blocks while more than `most` are outstanding.
    fn collect(&self, post: &mut Post, most: u32) -> Result<(), LinkError> {
        self.collect_within(post, most, self.patience)
    }

    fn collect_within(
        &self,
        post: &mut Post,
        most: u32,
        patience: Duration,
    ) -> Result<(), LinkError> {
        let mut wcs = [Wc::default(); 32];
        // A Write and its announcement are two requests and one completion.
        let most = most / 2;
        loop {
            let got = if post.outstanding > most {
                self.base.send_cq.wait(&mut wcs, Some(patience))
            } else {
                self.base.send_cq.poll(&mut wcs)
            };
            let got = got.map_err(|e| self.overrun(e))?;
            if got == 0 && post.outstanding > most {
                return Err(self.ended(LinkError::Gone("the peer stopped receiving".into())));
            }
            for wc in &wcs[..got] {
                if wc.status != WcStatus::Success {
                    return Err(self.ended(self.why(wc)));
                }
                post.outstanding = post.outstanding.saturating_sub(1);
            }
            if got < wcs.len() && post.outstanding <= most {
                return Ok(());
            }
        }
    }

    /// Lets an RNIC complete what was sent. (A thread that holds the lock is sending, and finds the end itself.)
    fn drain(&self) {
        if self.qp.soft().is_none()
            && let Ok(mut post) = self.post.try_lock()
        {
            let _ = self.collect_within(&mut post, 0, DRAIN);
        }
    }

    /// Grants credits by themselves if that needs no waiting.
    fn send_credit(&self, at_least: u16) -> Result<(), LinkError> {
        let owed = {
            let mut credits = lock(&self.credits);
            if credits.owed < at_least || credits.ours == 0 || self.closed.load(Ordering::Acquire) {
                return Ok(());
            }
            credits.ours -= 1;
            std::mem::take(&mut credits.owed)
        };
        self.transmit(None, owed, &Message::Credit)
    }

    /// Takes one completed receive.
    fn take(&self, wc: &Wc, inbox: &mut Inbox) -> Result<(), LinkError> {
        let index = wc.wr_id;
        let mut bytes = vec![0; (wc.byte_len as usize).min(MAX_MESSAGE)];
        let local = |e: &dyn std::fmt::Display| LinkError::Local(e.to_string());
        self.base
            .recv
            .read(index as usize * MAX_MESSAGE, &mut bytes)
            .map_err(|e| local(&e))?;
        self.qp
            .post_recv(&[receive(&self.base.recv, index)])
            .map_err(|e| local(&e))?;
        let (granted, message) =
            Message::decode(&bytes).map_err(|e| LinkError::Violation(e.to_string()))?;
        {
            let mut credits = lock(&self.credits);
            credits.owed += 1;
            credits.ours += u32::from(granted);
            if granted > 0 {
                if credits.ours > credits.most {
                    return Err(LinkError::Violation("more credits than receives".into()));
                }
                self.granted.notify_all();
            }
        }
        inbox.messages.push_back(message);
        Ok(())
    }
}

impl Link for RdmaLink {
    fn path(&self) -> Path {
        self.qp.path().unwrap_or(Path {
            transport: "tcp",
            reason: None,
        })
    }

    fn binding(&self) -> [u8; 32] {
        self.qp.tls().map_or([0; 32], |tls| tls.binding)
    }

    fn cipher(&self) -> Option<&'static str> {
        let tls = self.qp.tls()?;
        (self.path().transport != "local").then_some(tls.cipher)
    }

    fn receives(&self) -> u16 {
        RECEIVES
    }

    fn set_peer_receives(&self, receives: u16) {
        let mut credits = lock(&self.credits);
        // Messages sent before (START or REFUSE) are subtracted until they are granted again.
        let used = credits.most - credits.ours.min(credits.most);
        credits.most = receives.into();
        credits.ours = credits.most.saturating_sub(used);
        self.granted.notify_all();
    }

    fn create_ring(&self, slots: u16, slot_len: u32) -> Result<RingAdvert, LinkError> {
        let mr = self.region(slots, slot_len, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let at = mr.remote(0);
        self.set_ring(mr, slot_len, at)?;
        Ok(RingAdvert {
            slots,
            slot_len,
            rkey: at.rkey,
            addr: at.addr,
        })
    }

    fn use_ring(&self, ring: RingAdvert) -> Result<(), LinkError> {
        let mr = self.region(ring.slots, ring.slot_len, Access::LOCAL_WRITE)?;
        self.set_ring(
            mr,
            ring.slot_len,
            RemoteAddr {
                addr: ring.addr,
                rkey: ring.rkey,
            },
        )
    }

    fn send(&self, message: &Message) -> Result<(), LinkError> {
        let (_, owed) = self.take_credits(1)?;
        self.transmit(None, owed, message)
    }

    fn push(&self, slot: u16, len: u32, message: &Message) -> Result<(), LinkError> {
        let (_, owed) = self.take_credits(1)?;
        self.transmit(Some(self.write_wr(slot, 0, len)), owed, message)
    }

    fn write(&self, slot: u16, at: u32, len: u32) -> Result<(), LinkError> {
        let write = self.write_wr(slot, at, len).signaled();
        self.post(&mut lock(&self.post), &[write], 1, SENDS / 2)
    }

    fn send_all(&self, mut parcels: &[Parcel]) -> Result<(), LinkError> {
        let mut requests = Vec::with_capacity(2 * BATCH);
        let mut bytes = Vec::with_capacity(INLINE);
        while !parcels.is_empty() {
            let (taken, mut owed) = self.take_credits(parcels.len().min(BATCH))?;
            let (now, later) = parcels.split_at(taken);
            parcels = later;
            let mut messages = 0;
            for parcel in now {
                let (write, message) = match parcel {
                    Parcel::Message(message) => (None, message),
                    Parcel::Block { slot, len, message } => {
                        (Some(self.write_wr(*slot, 0, *len)), message)
                    }
                };
                let owed = std::mem::take(&mut owed);
                bytes.clear();
                message.encode(owed, &mut bytes);
                if bytes.len() > self.inline() {
                    self.post_batch(&mut requests, std::mem::take(&mut messages))?;
                    self.transmit(write, owed, message)?;
                    continue;
                }
                requests.extend(write);
                requests.push(SendWr::send(0).inline(&bytes).signaled());
                messages += 1;
            }
            self.post_batch(&mut requests, messages)?;
        }
        Ok(())
    }

    fn heard(&self) -> Option<Message> {
        lock(&self.inbox).messages.pop_front()
    }

    fn keepalive(&self) -> Result<(), LinkError> {
        self.send_credit(0)
    }

    fn recv(&self, timeout: Duration) -> Result<Option<Message>, LinkError> {
        let mut inbox = lock(&self.inbox);
        if let Some(message) = inbox.messages.pop_front() {
            return Ok(Some(message));
        }
        if let Some(end) = &inbox.end {
            return Err(end.clone());
        }
        let mut wcs = [Wc::default(); 16];
        let got = self
            .base
            .recv_cq
            .wait(&mut wcs, Some(timeout))
            .map_err(|e| self.overrun(e))?;
        for wc in &wcs[..got] {
            let taken = if wc.status == WcStatus::Success {
                self.take(wc, &mut inbox).map_err(|e| self.broken(e))
            } else {
                Err(self.why(wc))
            };
            if let Err(e) = taken {
                inbox.end = Some(self.ended(e));
                break;
            }
        }
        if inbox.end.is_none() {
            self.send_credit(RECEIVES / 2)?;
        }
        match inbox.messages.pop_front() {
            Some(message) => Ok(Some(message)),
            None => inbox.end.clone().map_or(Ok(None), Err),
        }
    }

    fn slot_from_file(
        &self,
        slot: u16,
        at: u32,
        file: BorrowedFd<'_>,
        offset: u64,
        len: u32,
    ) -> io::Result<usize> {
        self.ring()
            .mr
            .read_from_file(file, Some(offset), self.at(slot, at), len as usize)
    }

    fn slot_from_buf(&self, slot: u16, at: u32, bytes: &[u8]) -> io::Result<()> {
        self.ring()
            .mr
            .write(self.at(slot, at), bytes)
            .map_err(io::Error::other)
    }

    fn slot_to_buf(&self, slot: u16, at: u32, into: &mut [u8]) -> io::Result<()> {
        self.ring()
            .mr
            .read(self.at(slot, at), into)
            .map_err(io::Error::other)
    }

    fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.granted.notify_all();
        self.drain();
        self.qp.disconnect();
    }
}

impl Drop for RdmaLink {
    fn drop(&mut self) {
        self.drain();
    }
}
