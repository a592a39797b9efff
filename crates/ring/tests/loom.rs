//! The protocols between the two ends, in every order of their steps that the memory model allows (up to
//! a number of preemptions). To run:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p weft-ring --release --test loom --target-dir target/loom
//! ```
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicBool, AtomicU64, fence};
use loom::thread;
use weft_mem::{RecvList, SendList};
use weft_ring::{End, Front, Ref, Role, Segment};

fn model(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(f);
}

fn ends(capacity: usize) -> (End, End) {
    let segment = std::sync::Arc::new(Segment::model(capacity));
    (
        End::new(segment.clone(), Role::Initiator),
        End::new(segment, Role::Responder),
    )
}

fn push(end: &End, bytes: &[u8]) -> usize {
    let mut list = SendList::new();
    list.push_bytes(bytes);
    end.push(&list, 0, bytes.len()).unwrap()
}

fn take(end: &End) -> Vec<u8> {
    let mut got = vec![0; 64];
    let mut list = RecvList::new();
    list.push_buf(&mut got);
    let n = end.take(&mut list, 0, 64).unwrap();
    drop(list);
    got.truncate(n);
    got
}

/// A wake-up that is not lost when it comes before the wait: an eventfd, say.
#[derive(Default)]
struct Bell(loom::sync::Mutex<bool>, loom::sync::Condvar);

impl Bell {
    fn ring(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }

    /// Loom reports a deadlock if nobody ever rings.
    fn wait(&self) {
        let mut rung = self.0.lock().unwrap();
        while !*rung {
            rung = self.1.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// Whatever is seen is whole and in order, around the end of the ring and over stale bytes that look like headers.
#[test]
fn publish_and_consume() {
    model(3, || {
        let (a, b) = ends(64);
        // A lap of bodies that are headers of one byte.
        let stale = (1_u64 << 32 | 1).to_ne_bytes();
        for _ in 0..3 {
            assert_eq!(push(&a, &[stale, stale].concat()), 16);
            let _ = a.publish();
            assert_eq!(b.front(), Ok(Front::Bytes(16)));
            take(&b);
            let _ = b.release(true);
        }
        let sender = thread::spawn(move || {
            assert_eq!(push(&a, b"first"), 5);
            assert_eq!(push(&a, b"second"), 6);
            let _ = a.publish();
            let r = Ref {
                space: 1,
                addr: 2,
                len: 3,
            };
            if a.push_ref(r).unwrap() {
                let _ = a.publish();
            }
            a
        });
        let mut got = Vec::new();
        for _ in 0..3 {
            match b.front().unwrap() {
                Front::Bytes(n) => {
                    got.push(take(&b));
                    assert_eq!(got.last().unwrap().len(), n);
                    let _ = b.release(true);
                }
                Front::Ref(r) => {
                    assert_eq!(
                        (r, got.len()),
                        (
                            Ref {
                                space: 1,
                                addr: 2,
                                len: 3
                            },
                            2
                        )
                    );
                    b.advance_ref(3);
                }
                Front::Empty => {}
                end => panic!("{end:?}"),
            }
        }
        let want: [&[u8]; 2] = [b"first", b"second"];
        assert_eq!(got, want[..got.len()]);
        let a = sender.join().unwrap();
        assert!(a.consumed().unwrap() <= a.pushed());
    });
}

/// The sender overwrites what was consumed, and only that.
#[test]
fn room_is_what_was_consumed() {
    model(3, || {
        let (a, b) = ends(32);
        assert_eq!(push(&a, b"1"), 1);
        assert_eq!(push(&a, b"x"), 0, "a header, a word, the zero: full");
        let _ = a.publish();
        let sender = thread::spawn(move || {
            if push(&a, b"2") == 1 {
                let _ = a.publish();
            }
        });
        assert_eq!(b.front(), Ok(Front::Bytes(1)));
        assert_eq!(take(&b), b"1");
        let _ = b.release(true);
        if b.front() == Ok(Front::Bytes(1)) {
            assert_eq!(take(&b), b"2");
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_sleeper_on_data_is_woken() {
    model(3, || {
        let (a, b) = ends(64);
        let bell = Arc::new(Bell::default());
        let rings = bell.clone();
        let sender = thread::spawn(move || {
            assert_eq!(push(&a, b"x"), 1);
            if a.publish() {
                rings.ring();
            }
            if a.finish() {
                rings.ring();
            }
        });
        let mut got = 0;
        loop {
            match b.front().unwrap() {
                Front::Empty => {
                    if b.sleep_on_data() {
                        bell.wait();
                        b.awake();
                    }
                }
                Front::Bytes(_) => got += take(&b).len(),
                Front::End => break,
                front => panic!("{front:?}"),
            }
        }
        assert_eq!(got, 1);
        sender.join().unwrap();
    });
}

/// The sender waits for room; the receiver, which had thought what it consumed not worth telling, goes to sleep as well.
#[test]
fn a_sleeper_on_room_is_woken() {
    model(3, || {
        let (a, b) = ends(128);
        let (bell_a, bell_b) = (Arc::new(Bell::default()), Arc::new(Bell::default()));
        assert_eq!(push(&a, b"x"), 1);
        let _ = a.publish();
        let (mine, theirs) = (bell_a.clone(), bell_b.clone());
        let sender = thread::spawn(move || {
            loop {
                let position = a.consumed().unwrap();
                if position == a.pushed() {
                    break;
                }
                if a.sleep_on_room(position) {
                    mine.wait();
                    a.awake();
                }
            }
            if a.finish() {
                theirs.ring();
            }
        });
        loop {
            match b.front().unwrap() {
                Front::Empty => {
                    if b.release(false) {
                        bell_a.ring();
                    }
                    if b.sleep_on_data() {
                        bell_b.wait();
                        b.awake();
                    }
                }
                Front::Bytes(_) => {
                    take(&b);
                    if b.release(false) {
                        bell_a.ring();
                    }
                }
                Front::End => break,
                front => panic!("{front:?}"),
            }
        }
        sender.join().unwrap();
    });
}

/// `release` that tells at once, against a sender that waits for room.
#[test]
fn telling_wakes_a_sleeper_on_room() {
    model(3, || {
        let (a, b) = ends(64);
        let bell = Arc::new(Bell::default());
        assert_eq!(push(&a, b"x"), 1);
        let _ = a.publish();
        assert_eq!(b.front(), Ok(Front::Bytes(1)));
        let rings = bell.clone();
        let receiver = thread::spawn(move || {
            take(&b);
            if b.release(true) {
                rings.ring();
            }
        });
        while a.consumed() == Ok(0) {
            if a.sleep_on_room(0) {
                bell.wait();
                a.awake();
            }
        }
        receiver.join().unwrap();
    });
}

/// What the sender is told of has been dealt with, whichever thread of the receiver tells, and the ring's bytes are not
/// read any more.
#[test]
fn what_is_told_was_dealt_with() {
    model(3, || {
        let (a, b) = ends(64);
        assert_eq!(push(&a, b"x"), 1);
        let _ = a.publish();
        let b = std::sync::Arc::new(b);
        let placed = Arc::new(AtomicBool::new(false));
        let (receiver, done) = (b.clone(), placed.clone());
        let receiver = thread::spawn(move || {
            assert_eq!(receiver.front(), Ok(Front::Bytes(1)));
            assert_eq!(take(&receiver), b"x");
            done.store(true, Relaxed);
            let _ = receiver.release(false);
        });
        let sleeper = thread::spawn(move || {
            let _ = b.sleep_on_data();
        });
        if a.consumed() == Ok(a.pushed()) {
            assert!(placed.load(Relaxed));
        }
        receiver.join().unwrap();
        sleeper.join().unwrap();
    });
}

#[test]
fn an_abort_wakes_both_sleeps() {
    model(3, || {
        let (a, b) = ends(64);
        let bell = Arc::new(Bell::default());
        assert_eq!(push(&a, b"x"), 1);
        let _ = a.publish();
        let rings = bell.clone();
        let peer = thread::spawn(move || {
            if b.abort() {
                rings.ring();
            }
        });
        while a.front() == Ok(Front::Empty) {
            if a.sleep_on_room(0) {
                if a.sleep_on_data() {
                    bell.wait();
                }
                a.awake();
            }
        }
        assert_eq!(a.front(), Ok(Front::Aborted));
        peer.join().unwrap();
    });
}

#[test]
fn an_abort_wakes_who_waits_for_room_alone() {
    model(3, || {
        let (a, b) = ends(64);
        let bell = Arc::new(Bell::default());
        assert_eq!(push(&a, b"x"), 1);
        let _ = a.publish();
        let rings = bell.clone();
        let peer = thread::spawn(move || {
            if b.abort() {
                rings.ring();
            }
        });
        while !a.peer_aborted() {
            if a.sleep_on_room(0) {
                bell.wait();
                a.awake();
            }
        }
        peer.join().unwrap();
    });
}

/// A retraction: the entry is made invalid; then, once no mark is seen, the memory is the owner's alone.
#[test]
fn after_a_retraction_nobody_touches_the_memory() {
    model(4, || {
        let (a, b) = ends(64);
        let entry = Arc::new(AtomicBool::new(true));
        let memory = Arc::new(loom::cell::UnsafeCell::new(0));
        let (found, target) = (entry.clone(), memory.clone());
        let initiator = thread::spawn(move || {
            for stag in [7, 9] {
                a.enter(stag);
                if stag == 7 && found.load(Acquire) {
                    // SAFETY: loom checks that nobody else is at it.
                    target.with_mut(|p| unsafe { *p += 1 });
                }
                a.leave();
            }
        });
        entry.store(false, Relaxed);
        fence(SeqCst);
        if b.peer_mark() != 7 {
            // SAFETY: as above.
            memory.with_mut(|p| unsafe { *p += 10 });
        }
        initiator.join().unwrap();
    });
}

#[test]
fn behind_shut_doors_nobody_touches_the_memory() {
    model(4, || {
        let (a, b) = ends(64);
        b.open_doors();
        let memory = Arc::new(loom::cell::UnsafeCell::new(0));
        let target = memory.clone();
        let initiator = thread::spawn(move || {
            a.enter(7);
            if a.peer_doors_open() {
                // SAFETY: loom checks that nobody else is at it.
                target.with_mut(|p| unsafe { *p += 1 });
            }
            a.leave();
        });
        b.shut_doors();
        if b.peer_mark() == 0 {
            // SAFETY: as above.
            memory.with_mut(|p| unsafe { *p += 10 });
        }
        initiator.join().unwrap();
    });
}

/// What was pulled before `peer_aborted` says no was not yet given to another use.
#[test]
fn pulled_before_an_abort() {
    model(4, || {
        let (a, b) = ends(64);
        let source = Arc::new(AtomicU64::new(1));
        let reused = source.clone();
        let peer = thread::spawn(move || {
            let _ = a.abort();
            reused.store(2, Release);
        });
        let pulled = source.load(Relaxed);
        if !b.peer_aborted() {
            assert_eq!(pulled, 1);
        }
        peer.join().unwrap();
    });
}
