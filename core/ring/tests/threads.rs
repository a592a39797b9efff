//! Both ends in threads of their own.
#![cfg(not(loom))]

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use weft_mem::{RecvList, SendList};
use weft_ring::{End, Front, Ref, Role, Segment};

/// Long enough for any machine; a lost wake-up shows as a failure and not as a hang.
const LOST: Duration = Duration::from_mins(1);

/// Numbers that look random, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }
}

fn byte(at: u64) -> u8 {
    (at ^ at >> 8 ^ at >> 16) as u8
}

/// The peer's wake-up, and one's own.
struct Bell {
    ring: Sender<()>,
    rings: Receiver<()>,
}

impl Bell {
    fn pair() -> (Bell, Bell) {
        let ((a, to_b), (b, to_a)) = (channel(), channel());
        (
            Bell {
                ring: a,
                rings: to_a,
            },
            Bell {
                ring: b,
                rings: to_b,
            },
        )
    }

    fn tell(&self, wake: bool) {
        if wake {
            // The peer may be through already.
            let _ = self.ring.send(());
        }
    }

    fn wait(&self) {
        self.rings.recv_timeout(LOST).expect("a lost wake-up");
    }
}

/// Sends `total` bytes in random pieces, with a reference now and then; sleeps when there is no room.
fn send(end: &End, bell: &Bell, total: u64, most: usize, seed: u64) {
    let mut random = Random(seed);
    let mut sent = 0;
    while sent < total {
        let n = (1 + random.below(most)).min((total - sent) as usize);
        let position = end.consumed().unwrap();
        let done = if random.below(16) == 0 {
            let r = Ref {
                space: 0,
                addr: sent,
                len: n as u64,
            };
            if end.push_ref(r).unwrap() { n } else { 0 }
        } else {
            let data: Vec<u8> = (sent..sent + n as u64).map(byte).collect();
            let (head, tail) = data.split_at(random.below(n));
            let mut list = SendList::new();
            list.push_bytes(head);
            list.push_bytes(tail);
            end.push(&list, 0, n).unwrap()
        };
        sent += done as u64;
        if done == 0 || random.below(3) == 0 {
            bell.tell(end.publish());
        }
        if done == 0 && end.sleep_on_room(position) {
            bell.wait();
            end.awake();
        }
    }
    bell.tell(end.finish());
    // Until the peer has everything.
    loop {
        let position = end.consumed().unwrap();
        if position == end.pushed() {
            return;
        }
        if end.sleep_on_room(position) {
            bell.wait();
            end.awake();
        }
    }
}

/// Receives in random pieces until the end; sleeps when there is nothing.
fn receive(end: &End, bell: &Bell, most: usize, seed: u64) -> u64 {
    let mut random = Random(seed);
    let mut got = 0;
    loop {
        let n = 1 + random.below(most);
        match end.front().unwrap() {
            Front::Bytes(_) => {
                let mut data = vec![0; n];
                let at = random.below(n);
                let mut list = RecvList::new();
                let (head, tail) = data.split_at_mut(at);
                list.push_buf(head);
                list.push_buf(tail);
                let n = end.take(&mut list, 0, n).unwrap();
                drop(list);
                assert!(data[..n].iter().zip(got..).all(|(&b, at)| b == byte(at)));
                got += n as u64;
            }
            Front::Ref(r) => {
                assert_eq!(r.addr, got);
                let n = r.len.min(n as u64);
                end.advance_ref(n);
                got += n;
            }
            Front::Empty => {
                bell.tell(end.release(false));
                if end.sleep_on_data() {
                    bell.wait();
                    end.awake();
                }
            }
            Front::End => {
                bell.tell(end.release(true));
                return got;
            }
            Front::Aborted => panic!("nobody aborted"),
        }
        bell.tell(end.release(false));
    }
}

fn ends(ring: u32) -> (End, End) {
    let (mine, fd) = Segment::create(ring).unwrap();
    let theirs = Segment::open(fd).unwrap();
    (
        End::new(Arc::new(mine), Role::Initiator),
        End::new(Arc::new(theirs), Role::Responder),
    )
}

/// One direction of `total` bytes; pieces of up to `most` bytes.
fn stream(ring: u32, total: u64, most: (usize, usize)) {
    let (a, b) = ends(ring);
    let (bell_a, bell_b) = Bell::pair();
    std::thread::scope(|s| {
        let a = &a;
        s.spawn(move || send(a, &bell_a, total, most.0, 0x5eed));
        let got = receive(&b, &bell_b, most.1, 0x1234_5678);
        assert_eq!(got, total);
    });
}

#[test]
fn large_pieces() {
    stream(64 << 10, 256 << 20, (100_000, 100_000));
}

#[test]
fn small_pieces_both_sleep_often() {
    stream(16 << 10, 16 << 20, (100, 300));
}

#[test]
fn pieces_that_fill_the_ring() {
    stream(16 << 10, 64 << 20, (40_000, 7));
}

/// Each message waits for its answer, and every wait sleeps: the Dekker protocol all the time.
#[test]
fn ping_pong_asleep() {
    let (a, b) = ends(16 << 10);
    let (bell_a, bell_b) = Bell::pair();
    let turns = 50_000_u32;
    let side = move |end: &End, bell: &Bell, first: bool| {
        let receive = |want: u32| {
            while end.front().unwrap() == Front::Empty {
                bell.tell(end.release(true));
                if end.sleep_on_data() {
                    bell.wait();
                    end.awake();
                }
            }
            let mut got = [0; 4];
            let mut list = RecvList::new();
            list.push_buf(&mut got);
            assert_eq!(end.take(&mut list, 0, 4), Ok(4));
            assert_eq!(u32::from_ne_bytes(got), want);
        };
        for i in 0..turns {
            if !first {
                receive(i);
            }
            let message = i.to_ne_bytes();
            let mut list = SendList::new();
            list.push_bytes(&message);
            assert_eq!(end.push(&list, 0, 4), Ok(4));
            bell.tell(end.publish());
            if first {
                receive(i);
            }
        }
    };
    std::thread::scope(|s| {
        let (a, side) = (&a, &side);
        s.spawn(move || side(a, &bell_a, true));
        side(&b, &bell_b, false);
    });
}
