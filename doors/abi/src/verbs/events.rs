//! Events of completion queues and of other objects, and their acknowledgement: an object can be destroyed only when the program has acknowledged all its
//! events.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;
use rustix::io::{Errno, IoSliceMut, ReadWriteFlags, preadv2, read, write};

use super::object::lock;

/// The source of events. An object has one for each queue that its events may be in.
pub(crate) struct Subject {
    /// C's handle of the object.
    pub(super) handle: usize,
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Default)]
struct Counts {
    /// Events that the program fetched, and the acknowledged ones of them.
    given: u32,
    acked: u32,
    /// Threads that wait until all are acknowledged.
    waiting: u32,
    /// The subject makes no more events.
    closed: bool,
}

impl Subject {
    pub(crate) fn new<T>(handle: *mut T) -> Arc<Subject> {
        Arc::new(Subject {
            handle: handle as usize,
            counts: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// The program acknowledges `count` events.
    pub(crate) fn ack(&self, count: u32) {
        let mut counts = lock(&self.counts);
        counts.acked = counts.acked.wrapping_add(count);
        let awaited = counts.waiting > 0;
        drop(counts);
        // A notification is a system call even if no thread waits.
        if awaited {
            self.changed.notify_all();
        }
    }

    /// The object ends: takes back the unfetched events and waits until the fetched ones are acknowledged.
    pub(crate) fn close<T>(self: &Arc<Self>, queue: &EventQueue<T>) {
        lock(&self.counts).closed = true;
        drop(queue.take_back(self));
        self.settle();
    }

    /// Waits until the program has acknowledged all fetched events.
    pub(crate) fn settle(&self) {
        let mut counts = lock(&self.counts);
        // More events acknowledged than fetched is the program's mistake, and no reason to wait.
        let open = |counts: &mut Counts| (counts.given.wrapping_sub(counts.acked) as i32) > 0;
        counts.waiting += 1;
        let mut counts = self
            .changed
            .wait_while(counts, open)
            .unwrap_or_else(PoisonError::into_inner);
        counts.waiting -= 1;
    }
}

/// Events for the program, oldest first. Each is one count of the descriptor: programs wait for it with `poll` or `epoll`, edge-triggered too, and choose with
/// `O_NONBLOCK` whether fetching blocks.
pub(crate) struct EventQueue<T> {
    list: Mutex<VecDeque<(Arc<Subject>, T)>>,
    fd: OwnedFd,
    /// Counts of the descriptor whose events were taken back before the counts were written.
    owed: AtomicU32,
}

impl<T> EventQueue<T> {
    pub(crate) fn new() -> Result<Arc<Self>, Errno> {
        Ok(Arc::new(EventQueue {
            list: Mutex::default(),
            fd: eventfd(0, EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC)?,
            owed: AtomicU32::new(0),
        }))
    }

    pub(crate) fn fd(&self) -> c_int {
        self.fd.as_raw_fd()
    }

    pub(crate) fn is_empty(&self) -> bool {
        lock(&self.list).is_empty()
    }

    /// True if the program has set `O_NONBLOCK`.
    pub(crate) fn is_nonblocking(&self) -> bool {
        rustix::fs::fcntl_getfl(&self.fd).is_ok_and(|flags| flags.contains(OFlags::NONBLOCK))
    }

    pub(crate) fn push(&self, subject: &Arc<Subject>, what: T) {
        {
            let mut list = lock(&self.list);
            if lock(&subject.counts).closed {
                return;
            }
            list.push_back((Arc::clone(subject), what));
        }
        // Without the lock: the woken thread probably preempts this one and takes the lock at once. The write blocks only past 2^64 events.
        let _ = write(&self.fd, &1_u64.to_ne_bytes());
        if self.owed.load(Ordering::SeqCst) > 0 {
            let _one = lock(&self.list);
            if self.owed.load(Ordering::SeqCst) > 0 && self.take_count() {
                self.owed.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    /// Takes a count of the descriptor, if there is one. The caller holds the list's lock.
    fn take_count(&self) -> bool {
        let mut count = [0_u8; 8];
        let mut bufs = [IoSliceMut::new(&mut count)];
        preadv2(&self.fd, &mut bufs, u64::MAX, ReadWriteFlags::NOWAIT).is_ok()
    }

    /// The next event.
    ///
    /// # Errors
    /// As `read(2)`: `EAGAIN` where the program has set `O_NONBLOCK`, `EINTR`.
    pub(crate) fn next(&self) -> Result<(Arc<Subject>, T), Errno> {
        loop {
            read(&self.fd, &mut [0_u8; 8])?;
            if let Some(next) = self.fetch() {
                return Ok(next);
            }
        }
    }

    /// The event that a count was read for; `None` when it has been taken back.
    pub(crate) fn fetch(&self) -> Option<(Arc<Subject>, T)> {
        let mut list = lock(&self.list);
        let Some((subject, what)) = list.pop_front() else {
            // The count was that of an event which was taken back.
            let less = |owed: u32| owed.checked_sub(1);
            let _ = self
                .owed
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
            return None;
        };
        lock(&subject.counts).given += 1;
        Some((subject, what))
    }

    /// True if the program has not fetched all events of a subject.
    pub(crate) fn has(&self, subject: &Arc<Subject>) -> bool {
        lock(&self.list)
            .iter()
            .any(|(of, _)| Arc::ptr_eq(of, subject))
    }

    /// Removes and returns a subject's unfetched events.
    pub(crate) fn take_back(&self, subject: &Arc<Subject>) -> Vec<T> {
        let mut list = lock(&self.list);
        let (taken, left): (Vec<_>, Vec<_>) = std::mem::take(&mut *list)
            .into_iter()
            .partition(|(of, _)| Arc::ptr_eq(of, subject));
        *list = left.into();
        for _ in &taken {
            // Before the check, so that a thread that is about to write the count sees it afterwards. Another thread may have the count already, and will find
            // no event.
            self.owed.fetch_add(1, Ordering::SeqCst);
            if self.take_count() {
                self.owed.fetch_sub(1, Ordering::SeqCst);
            }
        }
        taken.into_iter().map(|(_, what)| what).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn readable(queue: &EventQueue<u32>) -> bool {
        let mut fds = [rustix::event::PollFd::new(
            &queue.fd,
            rustix::event::PollFlags::IN,
        )];
        rustix::event::poll(&mut fds, Some(&rustix::event::Timespec::default())).unwrap() == 1
    }

    #[test]
    fn each_event_is_one_count_and_what_nobody_fetched_goes_with_its_object() {
        let queue = EventQueue::new().unwrap();
        let of = |handle| Subject::new::<u8>(std::ptr::without_provenance_mut(handle));
        let (one, two) = (of(1), of(2));
        queue.push(&one, 1);
        queue.push(&two, 2);
        queue.push(&one, 3);
        assert_eq!(queue.next().unwrap().1, 1);
        one.ack(1);
        one.close(&queue);
        queue.push(&one, 4);
        assert_eq!(queue.next().unwrap().1, 2);
        assert!(!readable(&queue));
        rustix::io::ioctl_fionbio(&queue.fd, true).unwrap();
        assert_eq!(queue.next().err(), Some(Errno::AGAIN));
        queue.push(&two, 5);
        assert!(readable(&queue));
        assert_eq!(queue.next().unwrap().1, 5);
    }

    #[test]
    fn as_many_counts_as_events_whoever_takes_events_back() {
        const ROUNDS: usize = 3000;
        let queue = EventQueue::new().unwrap();
        let stays = Subject::new::<u8>(std::ptr::without_provenance_mut(1));
        let goes = Subject::new::<u8>(std::ptr::without_provenance_mut(2));
        std::thread::scope(|scope| {
            for (subject, what) in [(&stays, 1), (&goes, 2)] {
                let queue = &queue;
                scope.spawn(move || (0..ROUNDS).for_each(|_| queue.push(subject, what)));
            }
            let takers = scope.spawn(|| (0..ROUNDS).map(|_| queue.take_back(&goes).len()).sum());
            let fetched = (0..ROUNDS).filter(|_| queue.next().unwrap().1 == 1).count();
            let _: usize = takers.join().unwrap();
            for _ in fetched..ROUNDS {
                while queue.next().unwrap().1 != 1 {}
            }
        });
        queue.take_back(&goes);
        assert!(queue.is_empty() && !readable(&queue));
        queue.push(&goes, 3);
        assert!(readable(&queue) && queue.next().unwrap().1 == 3);
        assert!(!readable(&queue));
    }

    #[test]
    fn an_object_waits_for_its_events() {
        let queue = EventQueue::new().unwrap();
        let subject = Subject::new::<u8>(std::ptr::null_mut());
        queue.push(&subject, ());
        queue.push(&subject, ());
        let _ = (queue.next().unwrap(), queue.next().unwrap());
        let (done, is_done) = std::sync::mpsc::channel();
        let closing = {
            let (queue, subject) = (Arc::clone(&queue), Arc::clone(&subject));
            std::thread::spawn(move || {
                subject.close(&queue);
                done.send(()).unwrap();
            })
        };
        subject.ack(1);
        assert!(is_done.recv_timeout(Duration::from_millis(50)).is_err());
        subject.ack(1);
        is_done.recv().unwrap();
        closing.join().unwrap();
    }
}
