//! The sending half of a datagram queue pair in the reliable mode: each message is kept until its receiver has acknowledged it
//! (docs/spec/dgram.md, "Reliable mode").

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_mem::MemError;
use weft_proto::dgram::{Failure, Now, Pair, PairConfig, Transmit, WindowConfig};
use weft_wire::dgram::{self, Control, FaultCode, Segment, segment};

use super::send::{AHEAD, LONG, Train, what_is_sent};
use super::{UdDest, UdError, UdErrorKind, UdInner};
use crate::lock::lock;
use crate::types::{PostReason, QpState, SendWr, WcStatus};

/// Settings of a datagram queue pair in the reliable mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdReliable {
    /// How long a silent receiver is retried. Default 10 s. It is retried three times at least.
    pub give_up: Duration,
    /// How long a receiver that answers, and has no receive, is retried. Default: as long as it answers.
    pub not_ready: Option<Duration>,
}

impl Default for UdReliable {
    fn default() -> Self {
        UdReliable {
            give_up: WindowConfig::default().patience,
            not_ready: None,
        }
    }
}

/// However short the time is.
const TRIES: u32 = 3;
/// The number of destinations above which unused ones are removed.
const MANY: usize = 1024;
/// A destination that was not used for so long is forgotten then.
const UNUSED: Duration = Duration::from_mins(1);

type Key = (SocketAddr, u32);

struct Path {
    pair: Pair<SendWr>,
    dest: UdDest,
    /// Whether it is in one of the queues.
    queued: bool,
    /// The earliest of its times in the heap.
    timer: Option<Now>,
    /// Segments sent again that are counted.
    resent: u64,
}

/// The sends of a queue pair, to all of its destinations.
pub(super) struct Reliable {
    config: PairConfig,
    start: Instant,
    paths: Mutex<Paths>,
}

#[derive(Default)]
struct Paths {
    of: HashMap<Key, Path>,
    many: usize,
    /// Those that may have something to send.
    ready: VecDeque<Key>,
    /// Those that wait for a report of their destination.
    parked: Vec<Key>,
    train: Train,
    timers: BinaryHeap<Reverse<(Now, Key)>>,
    /// When the port looks again.
    timed: Option<Now>,
    silent: u32,
}

impl Paths {
    fn queue(&mut self, key: Key) {
        if let Some(path) = self.of.get_mut(&key)
            && !std::mem::replace(&mut path.queued, true)
        {
            self.ready.push_back(key);
        }
    }

    fn forget_unused(&mut self, now: Now) {
        self.of.retain(|_, path| {
            let unused = now.saturating_sub(path.pair.last_used()) >= UNUSED;
            // One that has failed stays so until the program resets it.
            path.queued || !path.pair.is_idle() || path.pair.failure().is_some() || !unused
        });
        self.many = self.of.len() * 2;
    }
}

impl Reliable {
    pub(super) fn new(settings: UdReliable, segment: usize) -> Reliable {
        Reliable {
            config: PairConfig {
                window: WindowConfig {
                    patience: settings.give_up,
                    timeouts: TRIES,
                    ..WindowConfig::default()
                },
                not_ready: settings.not_ready,
                segment,
            },
            start: Instant::now(),
            paths: Mutex::default(),
        }
    }

    pub(super) fn since(&self, now: Instant) -> Now {
        now.saturating_duration_since(self.start)
    }

    pub(super) fn at(&self, time: Now) -> Instant {
        self.start + time
    }

    /// Drops waiting sends without completions.
    pub(super) fn clear(&self) {
        *lock(&self.paths) = Paths::default();
    }

    pub(super) fn state_of(&self, to: &UdDest) -> QpState {
        let paths = lock(&self.paths);
        let path = paths.of.get(&(to.addr, to.qp_num));
        match path.and_then(|path| path.pair.failure()) {
            Some(_) => QpState::Error,
            None => QpState::Rts,
        }
    }

    /// Ends the error state of a destination; returns whether there was one.
    pub(super) fn reset(&self, to: &UdDest) -> bool {
        let mut paths = lock(&self.paths);
        let key = (to.addr, to.qp_num);
        let failed = paths.of.get(&key);
        let failed = failed.is_some_and(|path| path.pair.failure().is_some());
        if failed {
            paths.of.remove(&key);
            paths.ready.retain(|other| *other != key);
            paths.parked.retain(|other| *other != key);
        }
        failed
    }
}

/// Why sending stops.
enum Stall {
    /// The socket has no room.
    Socket,
    /// The destination has none, until this time at most.
    Pace(Instant),
}

/// The length of a datagram with so much of a message.
fn packet_len(wr: &SendWr, payload: u32) -> usize {
    let header = match what_is_sent(wr) {
        (None, imm) => segment::UNTAGGED_LEN + imm.map_or(0, |_| dgram::IMM_LEN),
        (Some(_), imm) => segment::TAGGED_LEN + imm.map_or(0, |_| dgram::IMM_LEN),
    };
    header + segment::RELIABLE_LEN + payload as usize + dgram::CRC_LEN
}

impl UdInner {
    pub(super) fn post_reliable<'a>(
        self: &Arc<Self>,
        reliable: &Reliable,
        posts: impl Iterator<Item = (&'a SendWr, &'a UdDest)>,
    ) -> Result<(), (usize, PostReason)> {
        let mut paths = lock(&reliable.paths);
        let now = reliable.since(Instant::now());
        let mut result = Ok(());
        for (index, (wr, to)) in posts.enumerate() {
            if let Err(reason) = self.take_post(reliable, &mut paths, now, wr, to) {
                result = Err((index, reason));
                break;
            }
        }
        self.pump(reliable, &mut paths);
        drop(paths);
        self.queues.call_hooks();
        result
    }

    fn take_post(
        &self,
        reliable: &Reliable,
        paths: &mut Paths,
        now: Now,
        wr: &SendWr,
        to: &UdDest,
    ) -> Result<(), PostReason> {
        let len = self.check_post(wr)?;
        if to.is_group() {
            return Err(PostReason::Group);
        }
        if self.sq_used.load(Ordering::Relaxed) >= self.max_send_wr {
            return Err(PostReason::Full);
        }
        self.count_used(1);
        let key = (to.addr, to.qp_num);
        if paths.of.len() >= paths.many.max(MANY) && !paths.of.contains_key(&key) {
            paths.forget_unused(now);
        }
        let path = paths.of.entry(key).or_insert_with(|| Path {
            pair: Pair::new(reliable.config, self.num, to.qp_num, self.qkey_for(to)),
            dest: *to,
            queued: false,
            timer: None,
            resent: 0,
        });
        if self.state() == QpState::Error || path.pair.failure().is_some() {
            self.finished(&mut paths.silent, wr, WcStatus::WrFlushErr, 0);
            return Ok(());
        }
        let random = || self.pd.device.random_u32();
        path.pair.push(now, wr.clone(), len, random);
        if !std::mem::replace(&mut path.queued, true) {
            paths.ready.push_back(key);
        }
        Ok(())
    }

    /// Sends what may be sent. `false`: some waits for room in the socket.
    fn pump(self: &Arc<Self>, reliable: &Reliable, paths: &mut Paths) -> bool {
        let mut room = true;
        while let Some(key) = paths.ready.pop_front() {
            let Some(mut path) = paths.of.remove(&key) else {
                continue;
            };
            path.queued = false;
            let stall = self.send_path(reliable, paths, &mut path);
            match stall {
                Ok(()) => {
                    if let Some(at) = path.pair.next_time()
                        && path.timer.is_none_or(|timer| at < timer)
                    {
                        path.timer = Some(at);
                        paths.timers.push(Reverse((at, key)));
                    }
                }
                // For a stalled destination its own time may have passed already. The event that it waits for has a timer, too.
                Err(Stall::Pace(until)) => {
                    path.queued = true;
                    paths.parked.push(key);
                    let this = Arc::downgrade(self);
                    self.port.wait_for_report(until, &path.dest, this);
                }
                Err(Stall::Socket) => {
                    path.queued = true;
                    paths.ready.push_front(key);
                    room = false;
                }
            }
            paths.of.insert(key, path);
            if !room {
                break;
            }
        }
        if room && self.flush_packets(&mut paths.train).is_err() {
            room = false;
        }
        if !room {
            self.port.wait_for_room(Arc::downgrade(self));
        }
        if let Some(&Reverse((at, _))) = paths.timers.peek()
            && paths.timed.is_none_or(|timed| at < timed)
        {
            paths.timed = Some(at);
            let this = Arc::downgrade(self);
            self.port.set_alarm(reliable.start + at, this);
        }
        room
    }

    fn send_path(
        &self,
        reliable: &Reliable,
        paths: &mut Paths,
        path: &mut Path,
    ) -> Result<(), Stall> {
        let now = reliable.since(Instant::now());
        path.pair.tick(now);
        while let Some((len, wr)) = path.pair.ready(now) {
            // Exact size: a datagram longer than the train's first one does not join the train.
            let size = wr.map_or(segment::PROBE_LEN, |wr| packet_len(wr, len));
            if !paths.train.takes(size, &path.dest) {
                self.flush_packets(&mut paths.train)?;
            }
            let ahead = if size > LONG { 1 } else { AHEAD };
            if paths.train.count.is_multiple_of(ahead)
                && let Err(until) = self.port.may_send(&path.dest, size * ahead)
            {
                self.flush_packets(&mut paths.train)?;
                return Err(Stall::Pace(until));
            }
            match path.pair.transmit(now) {
                Some(Transmit::Control(control)) => {
                    if !self.is_down() {
                        self.port.send_control(control, &path.dest);
                    }
                }
                Some(transmit) => {
                    if let Err(error) = self.stage_packet(&mut paths.train, &path.dest, &transmit) {
                        tracing::debug!(%error, "a message cannot be read");
                        self.pair_failed(paths, path, WcStatus::LocProtErr);
                        return Ok(());
                    }
                }
                None => break,
            }
        }
        let resent = path.pair.resent() - std::mem::replace(&mut path.resent, path.pair.resent());
        self.counters.resent.fetch_add(resent, Ordering::Relaxed);
        self.look_for_failure(paths, path);
        Ok(())
    }

    /// Copied from the memory of the request, which is the program's again when the message is acknowledged.
    fn stage_packet(
        &self,
        train: &mut Train,
        dest: &UdDest,
        transmit: &Transmit<'_, SendWr>,
    ) -> Result<(), MemError> {
        let &Transmit::Segment {
            token: wr,
            incarnation,
            packet,
            msn,
            message,
            offset,
            len,
        } = transmit
        else {
            return Ok(());
        };
        let (target, imm) = what_is_sent(wr);
        let segment = Segment {
            dst_qp: dest.qp_num,
            src_qp: self.num,
            qkey: self.qkey_for(dest),
            incarnation,
            msn,
            len: message,
            offset,
            target,
            imm,
            solicited: wr.solicited,
            reliable: Some(packet),
        };
        let start = train.bytes.len();
        segment.emit(len as usize, &mut train.bytes);
        self.append(None, wr, offset, len, &mut train.bytes, start)?;
        debug_assert_eq!(train.bytes.len() - start, packet_len(wr, len));
        train.appended(start, dest);
        Ok(())
    }

    fn flush_packets(&self, train: &mut Train) -> Result<(), Stall> {
        train.seal();
        while train.gone < train.bytes.len()
            && let Some(to) = &train.to
            && !self.is_down()
        {
            match self
                .port
                .send_train(&train.bytes[train.gone..], train.each, to, None)
            {
                Ok(0) => return Err(Stall::Socket),
                Ok(taken) => train.gone += taken,
                Err(error) => {
                    // As if lost: it is sent again, or the receiver is given up.
                    tracing::debug!(%error, to = %to.addr, "datagrams are lost");
                    break;
                }
            }
        }
        let count = train.count as u64;
        self.counters.sent.fetch_add(count, Ordering::Relaxed);
        train.clear();
        Ok(())
    }

    fn look_for_failure(&self, paths: &mut Paths, path: &mut Path) {
        let Some(failure) = path.pair.failure().filter(|_| !path.pair.is_idle()) else {
            return;
        };
        let (status, kind, msn) = match failure {
            Failure::Unreachable => (WcStatus::RetryExcErr, UdErrorKind::Unreachable, 0),
            Failure::Refused { code, msn } => {
                let status = match code {
                    FaultCode::NotReady => WcStatus::RnrRetryExcErr,
                    FaultCode::TooLong => WcStatus::RemInvReqErr,
                    FaultCode::Access => WcStatus::RemAccessErr,
                    FaultCode::Operation => WcStatus::RemOpErr,
                    FaultCode::Unknown => WcStatus::RemAbortErr,
                };
                (status, UdErrorKind::Refused(code), msn)
            }
        };
        self.report(UdError {
            kind,
            peer: Some(path.dest.addr),
            qp_num: path.dest.qp_num,
            msn,
        });
        self.pair_failed(paths, path, status);
    }

    /// Ends only the sends to this destination: the first message gets this status, the others are flushed.
    fn pair_failed(&self, paths: &mut Paths, path: &mut Path, status: WcStatus) {
        if path.pair.failure().is_none() {
            path.pair.fail(Failure::Unreachable);
        }
        let mut status = status;
        for wr in path.pair.drain() {
            self.finished(&mut paths.silent, &wr, status, 0);
            status = WcStatus::WrFlushErr;
        }
    }

    /// An acknowledgement, a fault or a welcome has come.
    pub(crate) fn answered(self: &Arc<Self>, from: SocketAddr, control: &Control) {
        let (Some(reliable), Some(flow)) = (&self.reliable, control.flow()) else {
            return;
        };
        if self.is_down() || self.state() == QpState::Error {
            return;
        }
        let mut paths = lock(&reliable.paths);
        let now = reliable.since(Instant::now());
        let key = (from, flow.src_qp);
        let Paths { of, silent, .. } = &mut *paths;
        let Some(path) = of.get_mut(&key) else {
            return;
        };
        path.pair.control(now, control, |wr| {
            let len = wr.len().unwrap_or(0);
            self.finished(silent, &wr, WcStatus::Success, len);
        });
        paths.queue(key);
        self.pump(reliable, &mut paths);
        drop(paths);
        self.queues.call_hooks();
    }

    /// There may be room again, or a report has come, or the time of some is up: `false` when the socket has no room.
    pub(super) fn reliable_on(self: &Arc<Self>, reliable: &Reliable) -> bool {
        let mut paths = lock(&reliable.paths);
        let now = reliable.since(Instant::now());
        let parked = std::mem::take(&mut paths.parked);
        paths.ready.extend(parked);
        while let Some(&Reverse((at, key))) = paths.timers.peek()
            && at <= now
        {
            paths.timers.pop();
            if let Some(path) = paths.of.get_mut(&key)
                && path.timer == Some(at)
            {
                path.timer = None;
                paths.queue(key);
            }
        }
        if paths.timed.is_some_and(|at| at <= now) {
            paths.timed = None;
        }
        self.pump(reliable, &mut paths)
    }

    pub(super) fn flush_reliable(&self, reliable: &Reliable) {
        let mut held = lock(&reliable.paths);
        let mut paths = std::mem::take(&mut *held);
        for path in paths.of.values_mut() {
            for wr in path.pair.drain() {
                self.finished(&mut paths.silent, &wr, WcStatus::WrFlushErr, 0);
            }
        }
    }
}
