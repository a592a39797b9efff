//! Locks and generations in every order of their steps that the memory model allows (up to a number of preemptions). To run:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p weft-lock --release --test loom --target-dir target/loom
//! ```
#![cfg(loom)]

use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use loom::sync::{Arc, Mutex};
use loom::thread;
use weft_lock::{Generation, Holder, ShortLock, Transport, Wake};

fn model(f: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(f);
}

#[test]
fn one_holder_at_a_time() {
    model(|| {
        let lock = Arc::new(ShortLock::new(0));
        let other = Arc::clone(&lock);
        let second = thread::spawn(move || *other.lock() += 1);
        *lock.lock() += 1;
        second.join().unwrap();
        assert_eq!(*lock.lock(), 2);
    });
}

/// One thread uses an object that it remembers; another one takes the object away and reuses its memory.
#[test]
fn nobody_uses_what_was_taken_away() {
    model(|| {
        const TAG: u32 = 7;
        let holder = Arc::new(Holder::default());
        let generation = Arc::new(Generation::default());
        assert!(generation.add(&holder));
        // Whether the object is in the table, and what its memory holds: 1 as long as it is the object's.
        let memory = Arc::new(AtomicU32::new(1));
        holder.word.begin();
        holder.remember(0, TAG);
        let known = generation.now();
        holder.word.end();

        let owner = {
            let (generation, memory) = (Arc::clone(&generation), Arc::clone(&memory));
            thread::spawn(move || {
                generation.end(TAG).wait();
                memory.store(2, Relaxed);
            })
        };
        if holder.word.try_begin() {
            if generation.now() == known {
                assert_eq!(memory.load(Relaxed), 1, "the owner has it again");
            }
            holder.word.end();
        }
        owner.join().unwrap();
    });
}

/// The same where the holder has used the object once, and remembers another one in its place since.
#[test]
fn what_was_done_before_is_seen() {
    model(|| {
        const TAG: u32 = 7;
        let holder = Arc::new(Holder::default());
        let generation = Arc::new(Generation::default());
        assert!(generation.add(&holder));
        let memory = Arc::new(loom::cell::UnsafeCell::new(1));
        holder.word.begin();
        holder.remember(0, TAG);
        holder.word.end();
        let owner = {
            let (generation, memory) = (Arc::clone(&generation), Arc::clone(&memory));
            thread::spawn(move || {
                generation.end(TAG).wait();
                // loom fails where this is not ordered after the holder's use.
                memory.with_mut(|_| ());
            })
        };
        if holder.word.try_begin() {
            if generation.now() == 1 {
                memory.with_mut(|_| ());
            }
            holder.word.end();
        }
        if holder.word.try_begin() {
            holder.remember(0, TAG + 1);
            holder.word.end();
        }
        owner.join().unwrap();
    });
}

/// An object that threads drive under a lock that is only tried, as `weft-rnic` drives its queue pairs.
struct Driven {
    wake: Wake,
    core: ShortLock<u32>,
    /// Posted requests, and whether there are any: the flag alone is read without the lock.
    inbox: Mutex<u32>,
    has_inbox: AtomicBool,
    /// Whether the engine's epoll waits for room. As in the kernel, calls have an order, and a later one sees what was done before an earlier one.
    watched: Mutex<bool>,
    /// Engine's and sleepers' ways to learn that they have to drive.
    drives: fn(&Driven),
}

impl Driven {
    fn new(drives: fn(&Driven)) -> Arc<Driven> {
        Arc::new(Driven {
            wake: Wake::default(),
            core: ShortLock::new(0),
            inbox: Mutex::new(0),
            has_inbox: AtomicBool::new(false),
            watched: Mutex::new(false),
            drives,
        })
    }

    fn put(&self) {
        let mut inbox = self.inbox.lock().unwrap();
        *inbox += 1;
        self.has_inbox.store(true, Release);
    }

    fn work(&self, core: &mut u32) {
        if self.has_inbox.load(Acquire) {
            let mut inbox = self.inbox.lock().unwrap();
            *core += std::mem::take(&mut *inbox);
            self.has_inbox.store(false, Relaxed);
        }
    }

    /// `QpInner::drive_for`.
    fn drive(&self) {
        loop {
            let Some(mut core) = self.wake.take_or_leave(|| self.core.try_lock()) else {
                return;
            };
            self.wake.take_left();
            self.work(&mut core);
            self.wake.let_go(core);
            if !self.wake.seen().is_left() {
                return;
            }
        }
    }

    /// `QpInner::drive_for` with the order that [`Wake`] requires turned around: the mark is looked for before the lock is free.
    fn drive_and_look_too_early(&self) {
        loop {
            let Some(mut core) = self.wake.take_or_leave(|| self.core.try_lock()) else {
                return;
            };
            self.wake.take_left();
            self.work(&mut core);
            let left = self.wake.seen().is_left();
            self.wake.let_go(core);
            if !left {
                return;
            }
        }
    }

    /// `QpInner::ring`: drives, unless the request may wait for the owner's next poll.
    fn post(&self) {
        self.put();
        let seen = self.wake.defer(1);
        if seen.posts() == 0 || seen.is_armed() || seen.has_sleepers() {
            (self.drives)(self);
        }
    }

    /// `QpInner::rearm`.
    fn watch(&self) {
        self.wake.arm();
        loop {
            let blocked = self.wake.seen().transport().blocked;
            *self.watched.lock().unwrap() = blocked;
            if self.wake.seen().transport().blocked == blocked {
                return;
            }
        }
    }

    fn block(&self) {
        let core = self.core.lock();
        self.wake.publish(Transport {
            blocked: true,
            ..Transport::default()
        });
        self.wake.let_go(core);
    }

    fn done(&self) -> u32 {
        *self.core.lock()
    }
}

/// Runs `first` beside `second`, and then `check`.
fn beside(
    object: fn() -> Arc<Driven>,
    first: fn(&Driven),
    second: fn(&Driven),
    check: fn(&Driven),
) {
    model(move || {
        let object = object();
        let other = Arc::clone(&object);
        let thread = thread::spawn(move || first(&other));
        second(&object);
        thread.join().unwrap();
        check(&object);
    });
}

fn two_posters(drives: fn(&Driven)) {
    let put_and_drive = move |object: &Driven| {
        object.put();
        (object.drives)(object);
    };
    model(move || {
        let object = Driven::new(drives);
        let other = Arc::clone(&object);
        let thread = thread::spawn(move || put_and_drive(&other));
        put_and_drive(&object);
        thread.join().unwrap();
        assert_eq!(object.done(), 2, "work was left");
    });
}

/// A thread that does not get the lock leaves its work to the holder, which looks for it after it has let go.
#[test]
fn no_work_is_left_behind() {
    two_posters(Driven::drive);
}

#[test]
#[should_panic(expected = "work was left")]
fn work_is_left_behind_by_a_holder_that_looks_before_it_lets_go() {
    two_posters(Driven::drive_and_look_too_early);
}

/// One request was sent since the owner's last poll, and the owner has the lease: a further request is deferred.
fn leased() -> Arc<Driven> {
    let object = Driven::new(Driven::drive);
    object.wake.defer(1);
    object
}

fn post_two(object: &Driven) {
    object.post();
    object.post();
}

fn both_sent(object: &Driven) {
    assert_eq!(object.done(), 2, "a deferred request was left");
}

/// The owner gives the lease back while another thread posts: either the poster sees that the engine watches, or the owner the request.
#[test]
fn no_deferred_request_is_left_when_the_lease_is_given_up() {
    let give_up = |object: &Driven| {
        object.wake.arm();
        if object.wake.take_deferred() {
            object.drive();
        }
    };
    beside(leased, post_two, give_up, both_sent);
}

#[test]
#[should_panic(expected = "a deferred request was left")]
fn a_deferred_request_is_left_by_an_owner_that_looks_before_it_arms() {
    let turned_around = |object: &Driven| {
        if object.wake.take_deferred() {
            object.drive();
        }
        object.wake.arm();
    };
    beside(leased, post_two, turned_around, both_sent);
}

/// The same with an owner that falls asleep.
#[test]
fn no_deferred_request_is_left_when_the_owner_falls_asleep() {
    let sleep = |object: &Driven| {
        if object.wake.fall_asleep().has_deferred() {
            object.drive();
        }
    };
    beside(leased, post_two, sleep, both_sent);
}

fn block_and_watch(object: &Driven) {
    object.block();
    let seen = object.wake.seen();
    if seen.is_armed() || seen.has_sleepers() {
        object.watch();
    }
}

fn waits_for_room(object: &Driven) {
    assert!(*object.watched.lock().unwrap(), "nobody waits for room");
}

/// Sending is blocked by one thread while another hands the object to the engine: the engine is told to wait for room.
#[test]
fn the_engine_watches_for_room() {
    beside(leased, block_and_watch, Driven::watch, waits_for_room);
}

#[test]
#[should_panic(expected = "nobody waits for room")]
fn the_engine_does_not_watch_for_room_without_a_second_look() {
    let arm_once = |object: &Driven| {
        object.wake.arm();
        let blocked = object.wake.seen().transport().blocked;
        *object.watched.lock().unwrap() = blocked;
    };
    beside(leased, block_and_watch, arm_once, waits_for_room);
}

/// The same with an owner that falls asleep: it waits for room itself, or the engine does.
#[test]
fn a_sleeper_or_the_engine_waits_for_room() {
    let sleep = |object: &Driven| {
        object.wake.fall_asleep();
        if object.wake.seen().transport().blocked {
            *object.watched.lock().unwrap() = true;
        }
    };
    beside(leased, block_and_watch, sleep, waits_for_room);
}

/// The owner takes the lease while the engine has an event: one of them drives.
#[test]
fn the_engine_and_the_owner_do_not_both_take_it() {
    fn armed() -> Arc<Driven> {
        let object = Driven::new(Driven::drive);
        object.wake.arm();
        object
    }
    fn take(object: &Driven) {
        if object.wake.disarm() {
            *object.inbox.lock().unwrap() += 1;
        }
    }
    beside(armed, take, take, |object| {
        assert_eq!(*object.inbox.lock().unwrap(), 1, "both, or none");
    });
}

/// A message without a receive announces that, and looks once more; a thread that posts a receive looks for the announcement.
#[test]
fn no_message_starves_beside_a_receive() {
    let waits = |object: &Driven| {
        let take = || {
            let mut receives = object.inbox.lock().unwrap();
            let one = *receives > 0;
            *receives -= u32::from(one);
            one
        };
        let found = take() || {
            object.wake.starve();
            take()
        };
        *object.core.lock() += u32::from(found);
    };
    let posts = |object: &Driven| {
        *object.inbox.lock().unwrap() += 1;
        // The message is received, by this thread, if it still waits.
        if object.wake.feed() {
            let mut receives = object.inbox.lock().unwrap();
            *object.core.lock() += std::mem::take(&mut *receives);
        }
    };
    beside(leased, waits, posts, |object| {
        assert_eq!(object.done(), 1, "a message starves");
    });
}

/// A completion queue's sleeper and its filler: the sleeper says that it sleeps, then takes the lock once; the filler looks for sleepers
/// after it has let go.
#[test]
fn a_sleeper_is_woken() {
    model(|| {
        let ring = Arc::new(ShortLock::new(0));
        let waiters = Arc::new(AtomicU64::new(0));
        let woken = Arc::new(AtomicBool::new(false));
        let filler = {
            let (ring, waiters, woken) = (ring.clone(), waiters.clone(), woken.clone());
            thread::spawn(move || {
                *ring.lock() += 1;
                if waiters.load(SeqCst) > 0 {
                    woken.store(true, Relaxed);
                }
            })
        };
        waiters.fetch_add(1, SeqCst);
        let sleeps = *ring.lock() == 0;
        filler.join().unwrap();
        assert!(!sleeps || woken.load(Relaxed), "nobody woke the sleeper");
    });
}
