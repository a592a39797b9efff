//! The protocols between the two ends, in every order of their steps that the memory model allows (up to
//! a number of preemptions). To run:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p weft-ring --release --test loom --target-dir target/loom
//! ```
#![cfg(loom)]

use loom::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use loom::sync::atomic::{AtomicBool, AtomicU64, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;
use weft_mem::{RecvList, SendList};
use weft_ring::stream::{Published, Stream, Wish};
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
        b.open_access();
        let memory = Arc::new(loom::cell::UnsafeCell::new(0));
        let target = memory.clone();
        let initiator = thread::spawn(move || {
            a.enter(7);
            if a.peer_access_open() {
                // SAFETY: loom checks that nobody else is at it.
                target.with_mut(|p| unsafe { *p += 1 });
            }
            a.leave();
        });
        b.close_access();
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

/// One direction of a connection of `weft run`: TCP, the ring, and the bell between two ends.
struct Way {
    stream: Stream,
    tcp: Mutex<Vec<u64>>,
    ring: Mutex<Vec<u64>>,
    bell: AtomicU64,
}

const SENDER: Role = Role::Initiator;

impl Way {
    fn new() -> Arc<Way> {
        let way = Way {
            stream: Stream::model(1 << 14),
            tcp: Mutex::new(Vec::new()),
            ring: Mutex::new(Vec::new()),
            bell: AtomicU64::new(0),
        };
        way.stream.join(SENDER, 0);
        Arc::new(way)
    }

    /// Sends a number over TCP or by the ring. `tail`: the sender's position there.
    fn send(&self, number: u64, tail: &mut u64) {
        let by_tcp = |way: &Way| way.tcp.lock().unwrap().push(number);
        if self.stream.begin_tcp(SENDER) {
            by_tcp(self);
            return self.stream.end_tcp(SENDER, 1);
        }
        self.ring.lock().unwrap().push(number);
        match self.stream.publish(SENDER, *tail, *tail + 1).unwrap() {
            Published::Closed => {
                self.ring.lock().unwrap().pop();
                while self.stream.is_held(SENDER) {
                    thread::yield_now();
                }
                return by_tcp(self);
            }
            Published::Ring => _ = self.bell.fetch_add(1, Release),
            Published::Quietly => {}
        }
        *tail += 1;
    }

    /// A thread that sends the numbers 0 and 1.
    fn start_sender(way: &Arc<Way>) -> thread::JoinHandle<()> {
        let way = way.clone();
        thread::spawn(move || {
            let mut tail = 0;
            for number in 0..2 {
                way.send(number, &mut tail);
            }
        })
    }

    /// Sleeps until the bell has been rung.
    fn wait(&self) {
        while self.bell.load(Acquire) == 0 {
            thread::yield_now();
        }
        self.bell.fetch_sub(1, Acquire);
    }
}

#[test]
fn a_direction_that_switches_loses_and_reorders_nothing_and_its_sleeper_is_rung() {
    model(3, || {
        let way = Way::new();
        let sender = Way::start_sender(&way);
        let mut got = Vec::new();
        // As a receiver that reads what TCP has, and tries to switch each time.
        let mut head = 0;
        let mut switched = false;
        while got.len() < 2 {
            if !switched {
                way.stream.arm(SENDER, head, Wish::Once);
                switched = way.stream.switch(SENDER, got.len() as u64);
                if !switched {
                    let mut tcp = way.tcp.lock().unwrap();
                    got.append(&mut tcp);
                    drop(tcp);
                    thread::yield_now();
                }
                continue;
            }
            let (ready, _) = way.stream.ready(SENDER, head).unwrap();
            if ready > 0 {
                let ring = way.ring.lock().unwrap();
                got.extend_from_slice(&ring[head as usize..head as usize + ready]);
                head += ready as u64;
                continue;
            }
            let (rung, stood) = way.stream.arm(SENDER, head, Wish::Once);
            if rung > 0 {
                // The ring of the bytes that are consumed is taken from the bell.
                (0..rung).for_each(|_| way.wait());
                continue;
            }
            if !stood && way.stream.ready(SENDER, head).unwrap().0 > 0 {
                continue;
            }
            way.wait();
            way.stream.take_rung(SENDER);
        }
        sender.join().unwrap();
        assert_eq!(got, [0, 1]);
        assert!(way.tcp.lock().unwrap().is_empty() || !switched);
    });
}

#[test]
fn bytes_that_a_receiver_puts_back_into_tcp_stay_in_front_of_later_ones() {
    model(3, || {
        let way = Way::new();
        assert!(way.stream.switch(SENDER, 0));
        let sender = Way::start_sender(&way);
        way.stream.hold(SENDER);
        let (ready, closed) = way.stream.ready(SENDER, 0).unwrap();
        assert!(closed);
        let back = way.ring.lock().unwrap()[..ready].to_vec();
        way.tcp.lock().unwrap().extend(back);
        way.stream.release(SENDER);
        sender.join().unwrap();
        assert_eq!(*way.tcp.lock().unwrap(), [0, 1]);
    });
}
