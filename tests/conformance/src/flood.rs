//! As many messages of all lengths as a connection carries, both ways at once. On each side two threads post, a third sleeps until their sends complete, and a
//! fourth receives slowly and checks each byte.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use weft_verbs::{Mr, PostReason, RecvWr, RemoteAddr, SendWr, WcStatus};

use crate::bed::{End, Rng, assert_bytes, pattern, until};

/// Bytes of each region of a twin.
pub const REGION: usize = 4 << 20;
/// The number of receives that a twin has posted. They begin at the start of its first region.
pub const RECVS: u64 = 16;
/// Bytes of each receive.
pub const RECV: usize = 64 << 10;
/// Messages of each poster.
const COUNT: u64 = 500;
const POSTERS: u64 = 2;
/// The number of receives once all are posted: the ring between the two holds far less.
const MOST: u64 = 48;
/// Buffers of each poster: enough for all receives, so that only the ring stops a poster.
const SLOTS: [u64; POSTERS as usize] = [MOST, 15];
/// The place where the peer writes how many receives it has posted so far.
const GRANT: usize = REGION - 8;

/// The content of a poster's message.
fn message(poster: u64, seq: u64) -> Vec<u8> {
    let seed = poster << 32 | seq;
    let mut rng = Rng::new(seed);
    // Most messages are just too short for the peer to pull them from a program's own memory: those fill the ring.
    let len = if rng.chance(3) {
        rng.pick(&[16, 100, 2000, 4095, 4096, 16_384, 40_000, RECV])
    } else {
        14_000 + rng.below(2000)
    };
    let mut bytes = pattern(seed, len);
    bytes[..8].copy_from_slice(&poster.to_ne_bytes());
    bytes[8..16].copy_from_slice(&seq.to_ne_bytes());
    bytes
}

struct Flood<'a> {
    end: &'a End,
    /// Receives and the second poster's messages; the peer maps this region.
    arena: &'a Mr,
    /// The first poster's messages: copied through the ring up to some length.
    ordinary: &'a Mr,
    /// Messages posted, by both.
    posted: AtomicU64,
}

impl Flood<'_> {
    fn buffer(&self, poster: u64, slot: u64) -> (&Mr, usize) {
        let first = if poster == 0 { 0 } else { MOST as usize * RECV };
        let mr = [self.ordinary, self.arena][poster as usize];
        (mr, first + slot as usize * RECV)
    }

    fn post(&self, poster: u64, free: &Receiver<u64>) {
        for seq in 0..COUNT {
            let slot = free.recv().expect("the sleeper lives");
            let (mr, at) = self.buffer(poster, slot);
            let bytes = message(poster, seq);
            mr.write(at, &bytes).expect("within");
            // A message that finds no receive ends the connection.
            let place = self.posted.fetch_add(1, Ordering::Relaxed);
            until("a receive at the peer", || {
                place < self.arena.load_u64(GRANT).expect("within").max(RECVS)
            });
            let wr = SendWr::send(poster << 32 | slot).sge(mr.sge(at, bytes.len()));
            self.request(&wr.signaled());
        }
    }

    /// Posts one once there is room. A place is in use until the request is complete. The peer answers a grant with more messages, each with a grant, as soon
    /// as it has the grant, which is before the request completes.
    fn request(&self, wr: &SendWr) {
        until("room in the send queue", || {
            let posted = self.end.qp.post_send_one(wr.clone());
            let full = posted.as_ref().is_err_and(|e| e.reason == PostReason::Full);
            assert!(posted.is_ok() || full, "{posted:?}");
            !full
        });
    }

    fn sleep(&self, free: &[Sender<u64>]) {
        for _ in 0..POSTERS * COUNT {
            let wc = self.end.sent();
            assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            // No poster waits for the last slots.
            let _ = free[(wc.wr_id >> 32) as usize].send(wc.wr_id & 0xffff_ffff);
        }
    }

    fn receive(&self, grants: RemoteAddr) {
        let post = |id| {
            let sge = self.arena.sge(id as usize * RECV, RECV);
            self.end.post_recv(RecvWr::new(id).sge(sge));
        };
        let grant = |count: u64| {
            self.request(&SendWr::write(0, grants).inline(&count.to_ne_bytes()));
        };
        (RECVS..MOST).for_each(post);
        grant(MOST);
        let mut next = [0; POSTERS as usize];
        for done in 1..=POSTERS * COUNT {
            let wc = self.end.received();
            assert_eq!(wc.status, WcStatus::Success, "{wc:?}");
            let at = wc.wr_id as usize * RECV;
            let poster = self.arena.load_u64(at).expect("within");
            let seq = &mut next[poster as usize];
            let want = message(poster, *seq);
            assert_eq!(wc.byte_len as usize, want.len());
            assert_bytes(self.arena, at, &want, "a message");
            *seq += 1;
            if done % 50 == 0 {
                // The pace of the receiver, not a synchronisation.
                std::thread::sleep(Duration::from_millis(1));
            }
            post(wc.wr_id);
            grant(MOST + done);
        }
        assert_eq!(next, [COUNT; POSTERS as usize]);
    }
}

/// Runs the flood both ways; the peer does the same, and its first region has this key.
pub fn both_ways(end: &End, [arena, ordinary]: &[Mr; 2], rkey: u32) {
    let flood = Flood {
        end,
        arena,
        ordinary,
        posted: AtomicU64::new(0),
    };
    let grants = RemoteAddr {
        addr: GRANT as u64,
        rkey,
    };
    std::thread::scope(|scope| {
        let flood = &flood;
        let mut free = Vec::new();
        for poster in 0..POSTERS {
            let (give, take) = channel();
            (0..SLOTS[poster as usize])
                .for_each(|slot| give.send(slot).expect("the other end is here"));
            scope.spawn(move || flood.post(poster, &take));
            free.push(give);
        }
        scope.spawn(move || flood.sleep(&free));
        flood.receive(grants);
    });
    until("every place of the send queue free", || {
        end.qp.outstanding() == 0
    });
}
