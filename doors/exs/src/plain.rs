//! Ordinary connected TCP sockets under the same asynchronous operations: the peer is a plain program.
//!
//! Work that can be done at once is done in the caller. The rest waits in a queue for each direction, and one thread of the process
//! continues it when the socket is ready. The program shares the socket, so its flags are not changed: each system call
//! requests non-blocking behaviour itself.
//!
//! Lock order: `watch`, then a lane, then `polls`. Results are reported without a lock held, one after another in the order of the lane, by
//! the first thread that comes.

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
use crate::poller::{Poller, Watched};
use crate::{Context, Memory, Piece, Ready, RecvFlags};
use transfer::{Attempt, Cursor, Way, advance};
use weft_sockets::lock::lock;

/// Reports the result of a shutdown or close.
pub(crate) type EndDone = Box<dyn FnOnce(Result<(), Errno>) + Send>;
/// Reports the result of a poll.
pub(crate) type PollDone = Box<dyn FnOnce(Result<Ready, Errno>) + Send>;

/// A send or receive that may wait.
pub(crate) struct PlainOp {
    pub(crate) memory: Memory,
    /// For receives; only `WAITALL` counts.
    pub(crate) flags: RecvFlags,
    pub(crate) token: u64,
    /// When it ends with `ETIMEDOUT`, unless complete.
    pub(crate) deadline: Option<Instant>,
    pub(crate) done: Done,
}

/// Bytes moved for one socket before it is the turn of others, and before an asynchronous call returns.
const BUDGET: usize = 1 << 20;

/// An operation and its progress.
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

    /// Continue; returns the result if that ended the operation.
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

/// A job that waits in a lane.
enum Job {
    Move(Moving),
    File(FileJob),
    Shutdown(EndDone),
    Close(Closing),
}

/// A close that waits for the jobs queued before it.
struct Closing {
    /// The peer sees the end at once, even if other descriptors exist.
    ends: bool,
    done: EndDone,
}

/// A file send under way. The reader thread supplies its parts one after another.
struct FileJob {
    id: u64,
    token: u64,
    deadline: Option<Instant>,
    parts: VecDeque<Moving>,
    /// Set when the file send must not continue.
    stopped: Option<Errno>,
    /// Set when all its parts have ended; called when the file send reaches the head.
    over: Option<Box<dyn FnOnce() + Send>>,
    /// `None` only until it has started.
    send: Option<FileSend>,
}

/// A result that has not been reported to the program.
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

/// The lane is empty.
const IDLE: u8 = 0;
/// The head waits for the socket.
const WAITS: u8 = 1;
/// The head waits for something other than the socket.
const HELD: u8 = 2;

#[derive(Default)]
struct Lane {
    queue: VecDeque<Job>,
    finished: VecDeque<Finished>,
    /// A thread is reporting the results in `finished`.
    telling: bool,
    /// Keeps waiting jobs alive after the program's last handle is gone.
    keep: Option<Arc<Plain>>,
    closed: bool,
    /// For the sends of a closed socket: the time at which it is abandoned, unless a byte is sent before.
    patience: Option<Instant>,
    /// The error that kept some of them from being sent; the close reports it.
    lost: Option<Errno>,
    /// No later than `patience` and than any deadline in the queue.
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
    /// The events that the thread waits for; `None` after it has reported one.
    armed: Option<epoll::EventFlags>,
    timer: Option<Instant>,
}

pub(crate) struct Plain {
    me: Weak<Plain>,
    fd: OwnedFd,
    send: Mutex<Lane>,
    recv: Mutex<Lane>,
    send_state: AtomicU8,
    recv_state: AtomicU8,
    polls: Mutex<Vec<PollOp>>,
    watch: Mutex<Watch>,
    /// [`LINGER`], except in tests.
    linger: Duration,
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Plain {
    /// Operations on a stream socket. The caller checks that it is or was connected.
    ///
    /// # Errors
    /// `ENOTSOCK`, `EOPNOTSUPP` for other kinds of socket.
    pub(crate) fn new(fd: OwnedFd) -> Result<Arc<Plain>, Errno> {
        Self::lingering(fd, LINGER)
    }

    /// Like [`Self::new`]; when closed, it continues for `linger` without a byte sent.
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

    /// The socket. It is open as long as this value exists.
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

    pub(crate) fn send(&self, op: PlainOp) {
        self.submit(Way::Send, Job::Move(Moving::new(op)));
    }

    /// Receives the available data, or with `WAITALL` all that fits; 0 bytes at the end of the stream.
    pub(crate) fn recv(&self, op: PlainOp) {
        self.submit(Way::Recv, Job::Move(Moving::new(op)));
    }

    /// Receives available data without waiting for the peer or for earlier receives. `tell` gets the target and the result
    /// in the order of receives. If nothing can be received now, the target is returned.
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

    /// Sends memory and parts of files, in order. Later sends wait until the file send is over.
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
        // Queued first, to reserve its place; it cannot move before it has parts.
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
                // Absent: the job is over already, or the socket was closed before. Stopping a finished file send does nothing.
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

    /// Reports once, when the socket is ready for one of the conditions `wanted`, has failed or is closed in both directions.
    pub(crate) fn poll(&self, wanted: Ready, token: u64, done: PollDone) {
        let lane = lock(&self.recv);
        if lane.closed {
            drop(lane);
            return done(Err(Errno::BADF));
        }
        // Pushed under the lane's lock: a close has either come before, or will find it.
        lock(&self.polls).push(PollOp {
            wanted,
            token,
            done,
        });
        drop(lane);
        self.check_polls();
        self.arm(None);
    }

    /// Ends the operations with this token (all of them with `None`) with `ECANCELED`; returns their number.
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

    /// Closes the sending direction when all queued data has been sent.
    pub(crate) fn shutdown(&self, done: EndDone) {
        self.submit(Way::Send, Job::Shutdown(done));
    }

    /// Ends receives and polls now, refuses later operations with `EBADF`, and sends all queued data. Then the peer sees the end, and `done` is
    /// called. The descriptor is closed with the last handle.
    ///
    /// A peer that accepts nothing for 30 seconds loses the connection: queued sends and the close then end with `ETIMEDOUT`.
    pub(crate) fn close(&self, done: EndDone) {
        self.close_as(Closing { ends: true, done });
    }

    /// Like [`Self::close`], but the peer sees the end only when the last descriptor is closed: callers of libexs continue to use
    /// descriptors that they own, and forked processes theirs.
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
                // The thread that sends the file finds that the job is absent.
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

    /// Moves the jobs of a lane forward as far as possible.
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
                    // As close(2) on the last descriptor: the kernel sends the data that it has before the end, and answers further data of the peer
                    // with a reset. A listener or a lost connection has no peer.
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

    /// After a change: arm the thread for the waiting jobs, and report results.
    fn settle(&self, lane: MutexGuard<'_, Lane>, way: Way) {
        if lane.queue.is_empty() {
            return self.finish(lane, way);
        }
        let earliest = lane.earliest;
        drop(lane);
        self.arm(earliest);
        self.finish(self.lane(way), way);
    }

    /// Keep the socket alive while jobs wait, and report results.
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

    /// Reports the results in order, unless another thread is doing that.
    fn tell<'a>(&'a self, mut lane: MutexGuard<'a, Lane>, way: Way) {
        if lane.telling {
            return;
        }
        lane.telling = true;
        while let Some(finished) = lane.finished.pop_front() {
            drop(lane);
            // A panic in the program's call must not stop the operations of others.
            let told = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| finished.tell()));
            if told.is_err() {
                tracing::error!("a completion call panicked");
            }
            lane = self.lane(way);
        }
        lane.telling = false;
    }

    /// Removes jobs from a lane and ends them with `why`; returns their number. The caller arms the thread.
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
                    // The job stays until its reader releases it; the end of the parts makes it do so.
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
            // The queue may have a new head.
            self.pump(&mut lane, way);
        }
        // Before the results of the parts are reported, so that the file send ends with `why` and not with their errors.
        for file in files {
            file.stop(why);
        }
        self.finish(lane, way);
        ended
    }

    /// Reports the polls that are ready.
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

    /// Arms the thread for the events that operations wait for.
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
            // A new send would not start behind other sends, even if the socket is writable.
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
                let id = poller.add(self.fd.as_fd(), self.me.clone())?;
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

    /// Ends the connection of a closed socket whose peer has accepted nothing for a long time, even if other descriptors exist.
    fn give_up(&self, now: Instant) {
        let mut lane = lock(&self.send);
        if lane.queue.is_empty() || lane.patience.is_none_or(|end| now < end) {
            return;
        }
        lane.patience = None;
        lane.lost.get_or_insert(Errno::TIMEDOUT);
        // Before the close, or the peer would take the part that it received for the whole. The kernel refuses this while the
        // program waits in its own call on the socket; then the last close(2) has the same effect.
        let _ = rustix::net::sockopt::set_socket_linger(self.as_fd(), Some(Duration::ZERO));
        let _ = rustix::net::connect_unspec(self.as_fd());
        drop(lane);
        let told_last = |job: &Job| matches!(job, Job::Close(_));
        self.take(Way::Send, |job| !told_last(job), Errno::TIMEDOUT);
    }
}

impl Watched for Plain {
    /// The socket is ready for one of the awaited events.
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

    /// Called when a deadline may have passed.
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

/// The place in the queue where a file's parts are sent.
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
            // A cancelled or refused file send does not wait for its turn.
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
