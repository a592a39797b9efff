//! Ordinary connected TCP sockets under the same asynchronous operations: the peer is a plain program.
//!
//! What can be done at once is done in the caller; the rest waits in a queue per direction, and one thread of the process goes
//! on with it when the socket is ready. The socket's own flags stay as they are, because the program shares them: each system call
//! says for itself that it does not wait.
//!
//! Locks: `watch` before a lane, and that before `polls`; outcomes are told without any. A lane's outcomes are told one after another, in order, by
//! whichever thread came first.

mod poller;
#[cfg(test)]
mod tests;
mod transfer;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketType};

use crate::file::{Done, FileDone, FileLane, FileSend, Outcome};
use crate::options::LINGER;
use crate::{Context, Memory, Piece, Ready, RecvFlags};
use poller::Poller;
use transfer::{Attempt, Cursor, Way, advance};
use weft_sockets::lock::lock;

/// Where a shutdown or close tells its end.
pub(crate) type EndDone = Box<dyn FnOnce(Result<(), Errno>) + Send>;
/// Where a poll tells its end.
pub(crate) type PollDone = Box<dyn FnOnce(Result<Ready, Errno>) + Send>;

/// A send or receive that may wait.
pub(crate) struct PlainOp {
    pub(crate) memory: Memory,
    /// Of receives: only `WAITALL` counts.
    pub(crate) flags: RecvFlags,
    pub(crate) token: u64,
    /// `ETIMEDOUT` when it is not complete then.
    pub(crate) deadline: Option<Instant>,
    pub(crate) done: Done,
}

/// Bytes moved for one socket before others have their turn, and before an asynchronous call returns.
const BUDGET: usize = 1 << 20;

/// An operation and how far it has got.
struct Moving {
    op: PlainOp,
    cursor: Cursor,
}

impl Moving {
    fn new(op: PlainOp) -> Moving {
        Moving {
            op,
            cursor: Cursor::default(),
        }
    }

    /// Goes on; the result if that ended it.
    fn step(&mut self, fd: BorrowedFd<'_>, way: Way) -> Option<Result<usize, Errno>> {
        let attempt = advance(fd, way, &mut self.op.memory, &mut self.cursor, BUDGET);
        let done = self.cursor.done;
        let any_will_do = way == Way::Recv && !self.op.flags.contains(RecvFlags::WAITALL);
        match attempt {
            Attempt::Full | Attempt::End => Some(Ok(done)),
            Attempt::Later | Attempt::Enough if any_will_do && done > 0 => Some(Ok(done)),
            Attempt::Later | Attempt::Enough => None,
            Attempt::Failed(e) => Some(Err(e)),
        }
    }

    fn end(self, result: Result<usize, Errno>) -> Finished {
        let outcome = Outcome {
            result,
            bytes: self.cursor.done,
            memory: self.op.memory,
        };
        Finished::Moved(self.op.done, outcome)
    }
}

/// What waits in a lane.
enum Job {
    Move(Moving),
    File(FileJob),
    Shutdown(EndDone),
    Close(Closing),
}

/// A close that waits for what was queued before.
struct Closing {
    /// The peer sees the end at once, whoever still has a descriptor.
    ends: bool,
    done: EndDone,
}

/// A file on its way: its parts come one after another from the thread that reads them.
struct FileJob {
    id: u64,
    token: u64,
    deadline: Option<Instant>,
    parts: VecDeque<Moving>,
    /// Set when it is not to go on.
    stopped: Option<Errno>,
    /// Its parts have ended: when its turn is over, this is told.
    over: Option<Box<dyn FnOnce() + Send>>,
    /// Absent only until it has begun.
    send: Option<FileSend>,
}

/// An end that the program has not been told of.
enum Finished {
    Moved(Done, Outcome),
    File(Box<dyn FnOnce() + Send>),
    Ended(EndDone, Result<(), Errno>),
}

impl Finished {
    fn tell(self) {
        match self {
            Finished::Moved(done, outcome) => done(outcome),
            Finished::File(tell) => tell(),
            Finished::Ended(done, result) => done(result),
        }
    }
}

/// Nothing waits.
const IDLE: u8 = 0;
/// The head waits for the socket.
const WAITS: u8 = 1;
/// The head waits for something else.
const HELD: u8 = 2;

/// One direction.
#[derive(Default)]
struct Lane {
    queue: VecDeque<Job>,
    finished: VecDeque<Finished>,
    /// Somebody is telling what is in `finished`.
    telling: bool,
    /// What waits is not lost with the program's last handle.
    keep: Option<Arc<Plain>>,
    closed: bool,
    /// Of a closed socket's sends: when it is given up, unless a byte goes out before.
    patience: Option<Instant>,
    /// Why something of them was not sent: the close says so.
    lost: Option<Errno>,
    /// Not later than that, and than any deadline in the queue.
    earliest: Option<Instant>,
}

struct PollOp {
    wanted: Ready,
    token: u64,
    done: PollDone,
}

#[derive(Default)]
struct Watch {
    poller: Option<(Arc<Poller>, u64)>,
    /// What the thread will be told of; nothing once it was.
    armed: Option<epoll::EventFlags>,
    timer: Option<Instant>,
}

/// An ordinary connected socket.
pub(crate) struct Plain {
    me: Weak<Plain>,
    fd: OwnedFd,
    send: Mutex<Lane>,
    recv: Mutex<Lane>,
    send_state: AtomicU8,
    recv_state: AtomicU8,
    polls: Mutex<Vec<PollOp>>,
    watch: Mutex<Watch>,
    /// [`LINGER`], save in tests.
    linger: Duration,
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Plain {
    /// Operations on a stream socket that is connected, or was: that is for the caller to see to.
    ///
    /// # Errors
    /// `ENOTSOCK`, `EOPNOTSUPP` for other kinds of socket.
    pub(crate) fn new(fd: OwnedFd) -> Result<Arc<Plain>, Errno> {
        Self::lingering(fd, LINGER)
    }

    /// As [`Self::new`]; closed, it goes on for so long without sending a byte.
    fn lingering(fd: OwnedFd, linger: Duration) -> Result<Arc<Plain>, Errno> {
        if rustix::net::sockopt::socket_type(&fd)? != SocketType::STREAM {
            return Err(Errno::OPNOTSUPP);
        }
        Ok(Arc::new_cyclic(|me| Plain {
            me: Weak::clone(me),
            fd,
            send: Mutex::default(),
            recv: Mutex::default(),
            send_state: AtomicU8::new(IDLE),
            recv_state: AtomicU8::new(IDLE),
            polls: Mutex::default(),
            watch: Mutex::default(),
            linger,
        }))
    }

    /// The socket. It is open as long as this is.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(crate) fn local_addr(&self) -> Result<SocketAddr, Errno> {
        SocketAddr::try_from(rustix::net::getsockname(&self.fd)?)
    }

    pub(crate) fn peer_addr(&self) -> Result<SocketAddr, Errno> {
        let addr = rustix::net::getpeername(&self.fd)?.ok_or(Errno::NOTCONN)?;
        SocketAddr::try_from(addr)
    }

    /// Sends all of the memory.
    pub(crate) fn send(&self, op: PlainOp) {
        self.submit(Way::Send, Job::Move(Moving::new(op)));
    }

    /// Receives: what there is, or with `WAITALL` all that fits; 0 at the end of the stream.
    pub(crate) fn recv(&self, op: PlainOp) {
        self.submit(Way::Recv, Job::Move(Moving::new(op)));
    }

    /// Receives what is there, and never waits: not for the peer, nor for receives that came before. `tell` gets the target and the end
    /// in the order of receives; where nothing can be received now, the target comes back.
    pub(crate) fn recv_now<T: Send + 'static>(
        &self,
        mut memory: Memory,
        target: T,
        tell: impl FnOnce(T, Outcome) + Send + 'static,
    ) -> Result<(), T> {
        let mut cursor = Cursor::default();
        let mut lane = self.lane(Way::Recv);
        let result = if lane.closed {
            Err(Errno::BADF)
        } else if !lane.queue.is_empty() {
            return Err(target);
        } else {
            match advance(self.as_fd(), Way::Recv, &mut memory, &mut cursor, BUDGET) {
                Attempt::Later if cursor.done == 0 => return Err(target),
                Attempt::Failed(e) => Err(e),
                Attempt::Full | Attempt::Later | Attempt::Enough | Attempt::End => Ok(cursor.done),
            }
        };
        let outcome = Outcome {
            result,
            bytes: cursor.done,
            memory,
        };
        let done = Box::new(move |outcome| tell(target, outcome));
        lane.finished.push_back(Finished::Moved(done, outcome));
        self.tell(lane, Way::Recv);
        Ok(())
    }

    /// Sends memory and parts of files, in order. Later sends wait until it is over.
    ///
    /// # Errors
    /// As [`FileSend::start`]; `done` is not called then.
    pub(crate) fn send_file(
        self: &Arc<Self>,
        context: &Context,
        pieces: Vec<Piece>,
        token: u64,
        deadline: Option<Instant>,
        done: FileDone,
    ) -> Result<(), Errno> {
        let id = FileSend::next_id();
        let part = Arc::new(Part {
            plain: Arc::clone(self),
            id,
        });
        // In the queue first, so that its place is sure; it cannot move before it has parts.
        self.submit(
            Way::Send,
            Job::File(FileJob {
                id,
                token,
                deadline,
                parts: VecDeque::new(),
                stopped: None,
                over: None,
                send: None,
            }),
        );
        let started = FileSend::start(context, pieces, part.clone(), done);
        let mut lane = lock(&self.send);
        let job = find(&mut lane.queue, id);
        match started {
            Ok(send) => {
                // Not there: it is over already, or the socket was closed before. Stopping what is over does nothing.
                let stop = match job {
                    Some(job) if job.stopped.is_none() => {
                        job.send = Some(send);
                        return Ok(());
                    }
                    Some(job) => job.stopped,
                    None => Some(Errno::BADF),
                };
                drop(lane);
                send.stop(stop.unwrap_or(Errno::CANCELED));
                Ok(())
            }
            Err(e) => {
                drop(lane);
                part.release();
                Err(e)
            }
        }
    }

    /// What the socket is ready for now.
    pub(crate) fn ready(&self) -> Ready {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN | PollFlags::OUT)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let seen = match rustix::event::poll(&mut fds, Some(&now)) {
            Ok(_) => fds[0].revents(),
            Err(_) => PollFlags::empty(),
        };
        let mut ready = Ready::empty();
        ready.set(Ready::IN, seen.intersects(PollFlags::IN | PollFlags::HUP));
        ready.set(
            Ready::OUT,
            seen.contains(PollFlags::OUT) && self.state(Way::Send).load(Ordering::Acquire) == IDLE,
        );
        ready.set(Ready::ERR, seen.contains(PollFlags::ERR));
        ready.set(Ready::HUP, seen.contains(PollFlags::HUP));
        ready
    }

    /// Tells once, when the socket is ready for something of `wanted`, has failed or is closed both ways.
    pub(crate) fn poll(&self, wanted: Ready, token: u64, done: PollDone) {
        let lane = lock(&self.recv);
        if lane.closed {
            drop(lane);
            return done(Err(Errno::BADF));
        }
        // Still under the lane's lock: a close comes before, or finds it.
        lock(&self.polls).push(PollOp {
            wanted,
            token,
            done,
        });
        drop(lane);
        self.check_polls();
        self.arm(None);
    }

    /// Ends the operations with this token (all of them with `None`) with `ECANCELED`; returns how many there were.
    pub(crate) fn cancel(&self, token: Option<u64>) -> usize {
        let named = |t: u64| token.is_none_or(|wanted| wanted == t);
        let mut ended = 0;
        for way in [Way::Send, Way::Recv] {
            ended += self.take(
                way,
                |job| match job {
                    Job::Move(moving) => named(moving.op.token),
                    Job::File(file) => named(file.token),
                    Job::Shutdown(_) | Job::Close(_) => false,
                },
                Errno::CANCELED,
            );
        }
        let polls: Vec<PollOp> = lock(&self.polls)
            .extract_if(.., |p| named(p.token))
            .collect();
        ended += polls.len();
        for poll in polls {
            (poll.done)(Err(Errno::CANCELED));
        }
        self.check_polls();
        self.arm(None);
        ended
    }

    /// Closes our direction when everything queued has been sent.
    pub(crate) fn shutdown(&self, done: EndDone) {
        self.submit(Way::Send, Job::Shutdown(done));
    }

    /// Ends receives and polls now, refuses what comes later with `EBADF`, sends everything queued, then has the peer see the end and
    /// tells. The descriptor is closed with the last handle.
    ///
    /// A peer that takes nothing for 30 seconds loses the connection: what is queued ends with `ETIMEDOUT` then, and the close, too.
    pub(crate) fn close(&self, done: EndDone) {
        self.close_as(Closing { ends: true, done });
    }

    /// As [`Self::close`], but the peer sees the end when the last descriptor is closed, and not before: libexs's callers go on with
    /// descriptors of their own, and forked processes with theirs.
    pub(crate) fn close_shared(&self, done: EndDone) {
        self.close_as(Closing { ends: false, done });
    }

    fn close_as(&self, closing: Closing) {
        lock(&self.recv).closed = true;
        self.take(Way::Recv, |_| true, Errno::CANCELED);
        let polls = std::mem::take(&mut *lock(&self.polls));
        for poll in polls {
            (poll.done)(Err(Errno::CANCELED));
        }
        self.submit(Way::Send, Job::Close(closing));
    }

    fn lane(&self, way: Way) -> MutexGuard<'_, Lane> {
        lock(match way {
            Way::Send => &self.send,
            Way::Recv => &self.recv,
        })
    }

    fn state(&self, way: Way) -> &AtomicU8 {
        match way {
            Way::Send => &self.send_state,
            Way::Recv => &self.recv_state,
        }
    }

    fn submit(&self, way: Way, job: Job) {
        let mut lane = self.lane(way);
        if lane.closed {
            let ended = match job {
                Job::Move(moving) => Some(moving.end(Err(Errno::BADF))),
                Job::Shutdown(done) | Job::Close(Closing { done, .. }) => {
                    Some(Finished::Ended(done, Err(Errno::BADF)))
                }
                // Its sender finds that it is not there.
                Job::File(_) => None,
            };
            lane.finished.extend(ended);
        } else {
            if matches!(job, Job::Close(_)) {
                lane.closed = true;
                lane.patience = Instant::now().checked_add(self.linger);
            }
            let deadline = match &job {
                Job::Move(moving) => moving.op.deadline,
                Job::File(file) => file.deadline,
                Job::Shutdown(_) => None,
                Job::Close(_) => lane.patience,
            };
            lane.queue.push_back(job);
            if lane.queue.len() == 1 {
                self.pump(&mut lane, way);
            }
            if !lane.queue.is_empty() {
                lane.earliest = earlier(lane.earliest, deadline);
            }
        }
        self.settle(lane, way);
    }

    /// Goes on with what waits in a lane, as far as it goes.
    fn pump(&self, lane: &mut Lane, way: Way) {
        let fd = self.fd.as_fd();
        let mut moved = 0;
        let state = loop {
            let Some(job) = lane.queue.front_mut() else {
                break IDLE;
            };
            let moving = match job {
                Job::Move(moving) => Some(moving),
                Job::File(file) => match file.parts.front_mut() {
                    None if file.over.is_none() => break HELD,
                    front => front,
                },
                Job::Shutdown(_) | Job::Close(_) => None,
            };
            if let Some(moving) = moving {
                if moved >= BUDGET {
                    break WAITS;
                }
                let before = moving.cursor.done;
                let result = moving.step(fd, way);
                moved += moving.cursor.done - before;
                let Some(result) = result else {
                    break WAITS;
                };
                if lane.closed
                    && let Err(why) = result
                {
                    lane.lost.get_or_insert(why);
                }
                if let Job::File(file) = job {
                    let part = file.parts.pop_front();
                    lane.finished.extend(part.map(|p| p.end(result)));
                    continue;
                }
                if let Some(Job::Move(moving)) = lane.queue.pop_front() {
                    lane.finished.push_back(moving.end(result));
                }
                continue;
            }
            match lane.queue.pop_front() {
                Some(Job::Shutdown(done)) => {
                    let result = rustix::net::shutdown(fd, Shutdown::Write);
                    lane.finished.push_back(Finished::Ended(done, result));
                }
                Some(Job::Close(closing)) => {
                    // As close(2), which waits for the last descriptor: what the kernel has goes out before the end, and what the peer
                    // still sends is answered with a reset. A listener or a lost connection has no peer.
                    if closing.ends && rustix::net::getpeername(fd).is_ok() {
                        let _ = rustix::net::shutdown(fd, Shutdown::Both);
                    }
                    let result = lane.lost.map_or(Ok(()), Err);
                    let ended = Finished::Ended(closing.done, result);
                    lane.finished.push_back(ended);
                }
                Some(Job::File(file)) => lane.finished.extend(file.over.map(Finished::File)),
                Some(Job::Move(_)) | None => {}
            }
        };
        self.state(way).store(state, Ordering::Release);
        if moved > 0 && lane.patience.is_some() {
            lane.patience = Instant::now().checked_add(self.linger);
        }
    }

    /// After a change: the thread knows what to wait for, and ends are told.
    fn settle(&self, lane: MutexGuard<'_, Lane>, way: Way) {
        if lane.queue.is_empty() {
            return self.finish(lane, way);
        }
        let earliest = lane.earliest;
        drop(lane);
        self.arm(earliest);
        self.finish(self.lane(way), way);
    }

    /// What waits keeps the socket, and ends are told.
    fn finish(&self, mut lane: MutexGuard<'_, Lane>, way: Way) {
        let mut released = None;
        if lane.queue.is_empty() {
            released = lane.keep.take();
            lane.earliest = None;
            lane.patience = None;
        } else if lane.keep.is_none() {
            lane.keep = self.me.upgrade();
        }
        self.tell(lane, way);
        drop(released);
    }

    /// Tells the ends in order, unless somebody is doing that.
    fn tell<'a>(&'a self, mut lane: MutexGuard<'a, Lane>, way: Way) {
        if lane.telling {
            return;
        }
        lane.telling = true;
        while let Some(finished) = lane.finished.pop_front() {
            drop(lane);
            // What the program does there must not stop the others' operations.
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| finished.tell()));
            if told.is_err() {
                tracing::error!("a completion call panicked");
            }
            lane = self.lane(way);
        }
        lane.telling = false;
    }

    /// Takes jobs out of a lane and ends them with `why`; returns how many there were. The caller arms.
    fn take(&self, way: Way, mut which: impl FnMut(&Job) -> bool, why: Errno) -> usize {
        let mut lane = self.lane(way);
        let mut files = Vec::new();
        let mut ended = 0;
        for mut job in std::mem::take(&mut lane.queue) {
            if !which(&job) {
                lane.queue.push_back(job);
                continue;
            }
            ended += 1;
            match job {
                Job::Move(moving) => lane.finished.push_back(moving.end(Err(why))),
                Job::Shutdown(done) | Job::Close(Closing { done, .. }) => {
                    lane.finished.push_back(Finished::Ended(done, Err(why)));
                }
                Job::File(ref mut file) if file.stopped.is_none() => {
                    // It stays until its reader lets go, for which its parts end.
                    file.stopped = Some(why);
                    for part in std::mem::take(&mut file.parts) {
                        lane.finished.push_back(part.end(Err(why)));
                    }
                    files.extend(file.send.take());
                    lane.queue.push_back(job);
                }
                Job::File(_) => {
                    ended -= 1;
                    lane.queue.push_back(job);
                }
            }
        }
        if ended > 0 {
            // There may be another head now.
            self.pump(&mut lane, way);
        }
        // Before the parts' ends are told: the reader is to say why, not what its parts said.
        for file in files {
            file.stop(why);
        }
        self.finish(lane, way);
        ended
    }

    /// Tells polls whose time has come.
    fn check_polls(&self) {
        let mut polls = lock(&self.polls);
        if polls.is_empty() {
            return;
        }
        let ready = self.ready();
        let seen: Vec<PollOp> = polls
            .extract_if(.., |p| ready.intersects(p.wanted | Ready::ERR | Ready::HUP))
            .collect();
        drop(polls);
        for poll in seen {
            (poll.done)(Ok(ready & (poll.wanted | Ready::ERR | Ready::HUP)));
        }
    }

    /// Has the thread wait for what operations wait for.
    fn arm(&self, earliest: Option<Instant>) {
        if let Err(e) = self.try_arm(earliest) {
            tracing::error!("an ordinary socket cannot be waited for: {e}");
            for way in [Way::Send, Way::Recv] {
                self.take(way, |_| true, e);
            }
            for poll in std::mem::take(&mut *lock(&self.polls)) {
                (poll.done)(Err(e));
            }
        }
    }

    fn try_arm(&self, earliest: Option<Instant>) -> Result<(), Errno> {
        use epoll::EventFlags as F;
        let mut watch = lock(&self.watch);
        let mut wanted = F::empty();
        let send = self.send_state.load(Ordering::Acquire);
        wanted.set(F::OUT, send == WAITS);
        wanted.set(
            F::IN | F::RDHUP,
            self.recv_state.load(Ordering::Acquire) == WAITS,
        );
        let mut any = !wanted.is_empty();
        for poll in &*lock(&self.polls) {
            any = true;
            wanted.set(
                F::IN | F::RDHUP,
                wanted.contains(F::IN) || poll.wanted.contains(Ready::IN),
            );
            // Behind other sends a new one would not start, whatever the socket says.
            if send == IDLE && poll.wanted.contains(Ready::OUT) {
                wanted |= F::OUT;
            }
        }
        let timer = earliest.filter(|e| watch.timer.is_none_or(|t| *e < t));
        let arm = any && watch.armed.is_none_or(|armed| !armed.contains(wanted));
        if !arm && timer.is_none() {
            return Ok(());
        }
        let poller = Poller::get()?;
        let id = match &watch.poller {
            Some((of, id)) if Arc::ptr_eq(of, &poller) => *id,
            _ => {
                let id = poller.add(self.fd.as_fd(), Weak::clone(&self.me))?;
                watch.poller = Some((Arc::clone(&poller), id));
                watch.armed = None;
                id
            }
        };
        if arm {
            let all = watch.armed.unwrap_or(F::empty()) | wanted;
            poller.arm(self.fd.as_fd(), id, all)?;
            watch.armed = Some(all);
        }
        if let Some(when) = timer {
            watch.timer = Some(when);
            poller.at(id, when);
        }
        Ok(())
    }

    /// The socket is ready for something that was waited for.
    fn on_ready(&self) {
        lock(&self.watch).armed = None;
        for way in [Way::Recv, Way::Send] {
            let mut lane = self.lane(way);
            if !lane.queue.is_empty() {
                self.pump(&mut lane, way);
                self.settle(lane, way);
            }
        }
        self.check_polls();
        self.arm(None);
    }

    /// Where the socket is closed and its peer has taken nothing for long, the connection is over, whoever still has a descriptor.
    fn give_up(&self, now: Instant) {
        let mut lane = lock(&self.send);
        if lane.queue.is_empty() || lane.patience.is_none_or(|end| now < end) {
            return;
        }
        lane.patience = None;
        lane.lost.get_or_insert(Errno::TIMEDOUT);
        // Before the close's turn comes, or the peer would take the part that it got for the whole. The kernel refuses while the
        // program waits in a call of its own there; the last close(2) does the same then.
        let _ = rustix::net::sockopt::set_socket_linger(self.as_fd(), Some(Duration::ZERO));
        let _ = rustix::net::connect_unspec(self.as_fd());
        drop(lane);
        let told_last = |job: &Job| matches!(job, Job::Close(_));
        self.take(Way::Send, |job| !told_last(job), Errno::TIMEDOUT);
    }

    /// A deadline may have passed.
    fn on_time(&self) {
        lock(&self.watch).timer = None;
        let now = Instant::now();
        self.give_up(now);
        let deadline = |job: &Job| match job {
            Job::Move(moving) => moving.op.deadline,
            Job::File(file) if file.stopped.is_none() => file.deadline,
            _ => None,
        };
        for way in [Way::Send, Way::Recv] {
            self.take(
                way,
                |job| deadline(job).is_some_and(|d| d <= now),
                Errno::TIMEDOUT,
            );
            let mut lane = self.lane(way);
            let first = lane.queue.iter().filter_map(deadline).min();
            lane.earliest = earlier(first, lane.patience);
            self.settle(lane, way);
        }
        self.check_polls();
        self.arm(None);
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let watch = self.watch.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some((poller, id)) = watch.poller.take() {
            poller.remove(self.fd.as_fd(), id);
        }
    }
}

fn find(queue: &mut VecDeque<Job>, id: u64) -> Option<&mut FileJob> {
    queue.iter_mut().find_map(|job| match job {
        Job::File(file) if file.id == id => Some(file),
        _ => None,
    })
}

/// The place in the queue that a file's parts are sent at.
struct Part {
    plain: Arc<Plain>,
    id: u64,
}

impl FileLane for Part {
    fn send(&self, memory: Memory, done: Done) {
        let plain = &self.plain;
        let mut part = Moving::new(PlainOp {
            memory,
            flags: RecvFlags::empty(),
            token: 0,
            deadline: None,
            done,
        });
        let mut lane = lock(&plain.send);
        match find(&mut lane.queue, self.id) {
            Some(file) if file.stopped.is_none() => {
                file.parts.push_back(part);
                if matches!(lane.queue.front(), Some(Job::File(file)) if file.id == self.id && file.parts.len() == 1)
                {
                    plain.pump(&mut lane, Way::Send);
                }
            }
            stopped => {
                let why = stopped.and_then(|file| file.stopped).unwrap_or(Errno::BADF);
                part.cursor = Cursor::default();
                lane.finished.push_back(part.end(Err(why)));
            }
        }
        plain.settle(lane, Way::Send);
    }

    fn release(&self) {
        self.end(Box::new(|| ()));
    }

    fn end(&self, tell: Box<dyn FnOnce() + Send>) {
        let plain = &self.plain;
        let mut lane = lock(&plain.send);
        match find(&mut lane.queue, self.id) {
            Some(file) if file.stopped.is_none() => file.over = Some(tell),
            // What is cancelled does not wait for its turn; nor does what was refused.
            _ => {
                let id = self.id;
                lane.queue
                    .retain(|job| !matches!(job, Job::File(file) if file.id == id));
                lane.finished.push_back(Finished::File(tell));
            }
        }
        plain.pump(&mut lane, Way::Send);
        plain.settle(lane, Way::Send);
        plain.check_polls();
        plain.arm(None);
    }
}
