//! The bodies of the fuzz targets in `fuzz/`, and the replay of its corpus by plain `cargo test`.
//!
//! # Safety
//!
//! The scribbler reaches the mapped bytes through atomics only, inside the mapping; plain reads happen when no other thread runs.

mod stream;

pub use stream::stream_scribble;

use crate::{End, Front, Ref, Role, Segment};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use weft_mem::{RecvList, SendList};
use weft_sys::memfd::Mapping;

const RING: usize = 16 << 10;
const CONTROL: usize = 4096;
const LEN: usize = CONTROL + 2 * RING;
/// Bytes around a buffer that nothing may touch.
const MARGIN: usize = 64;

/// Bytes that run out as zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let n = N.min(self.0.len());
        out[..n].copy_from_slice(&self.0[..n]);
        self.0 = &self.0[n..];
        out
    }
    fn u8(&mut self) -> u8 {
        self.take::<1>()[0]
    }
    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// The segment as a peer sees it that keeps no rules.
struct Wild(Mapping);

impl Wild {
    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < LEN / 8);
        // SAFETY: inside the mapping, and aligned.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr().add(8 * index).cast()) }
    }

    fn byte(&self, at: usize) -> &AtomicU8 {
        assert!(at < LEN);
        // SAFETY: inside the mapping.
        unsafe { AtomicU8::from_ptr(self.0.as_ptr().add(at)) }
    }

    /// The bytes, as words.
    ///
    /// # Safety
    /// No thread may write them while the slice lives.
    unsafe fn still(&self) -> &[u64] {
        // SAFETY: all of the mapping, which is aligned to pages.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), LEN / 8) }
    }
}

/// First word of a side's control lines, and of its ring.
fn words_of(side: usize) -> (usize, usize) {
    (16 * (1 + 8 * side), (CONTROL + RING * side) / 8)
}

struct Sides<'a> {
    ends: [End; 2],
    wild: &'a Wild,
    before: Vec<u64>,
}

impl Sides<'_> {
    /// Checks that `side` has changed only its own words: of the peer's words only the sleeping flags, to 0, and of its own ring nothing
    /// from `kept.0` up to `kept.1`.
    fn check_writes(&mut self, side: usize, kept: (u64, u64)) {
        // SAFETY: one thread, which is here.
        let after = unsafe { self.wild.still() };
        let (mine, _) = words_of(side);
        let (control, ring) = words_of(1 - side);
        for flag in [control + 2 * 16, control + 3 * 16] {
            if after[flag] == 0 {
                self.before[flag] = 0;
            }
        }
        for unchanged in [0..mine, mine + 128..CONTROL / 8, ring..ring + RING / 8] {
            assert!(self.before[unchanged.clone()] == after[unchanged]);
        }
        let (_, ring) = words_of(side);
        let (first, len) = (kept.0 as usize % RING / 8, (kept.1 - kept.0) as usize / 8);
        let to_end = len.min(RING / 8 - first);
        for kept in [first..first + to_end, 0..len - to_end] {
            let kept = ring + kept.start..ring + kept.end;
            assert!(
                self.before[kept.clone()] == after[kept],
                "not consumed, yet overwritten"
            );
        }
    }

    /// One operation of an honest side. `calm`: no scribbler runs meanwhile.
    fn operate(&mut self, side: usize, op: u8, input: &mut Input<'_>, calm: bool) {
        if calm {
            self.before.clear();
            // SAFETY: one thread, which is here.
            self.before.extend_from_slice(unsafe { self.wild.still() });
        }
        let end = &self.ends[side];
        let pushed = end.pushed();
        let kept = match (op % 16, end.consumed()) {
            (0..=3, Ok(consumed)) => (consumed, pushed),
            _ => (0, 0),
        };
        match op % 16 {
            0..=2 => {
                let (skip, n, cut) = (input.u8(), input.u16(), input.u8());
                let bytes = vec![input.u8() | 1; usize::from(n)];
                let (head, tail) = bytes.split_at(usize::from(cut).min(bytes.len()));
                let mut list = SendList::new();
                list.push_bytes(head);
                list.push_bytes(tail);
                let (skip, n) = (usize::from(skip), bytes.len().div_ceil(2));
                let room = end.room();
                if let Ok(room) = room {
                    assert!(room <= RING - 16 && room.is_multiple_of(8));
                }
                if let Ok(done) = end.push(&list, skip, n) {
                    assert!(done <= n.min(bytes.len().saturating_sub(skip)));
                    assert!(!calm || room.is_err() || done <= room.unwrap_or(0));
                    assert!(end.pushed() - pushed <= RING as u64);
                }
            }
            3 => {
                let r = Ref {
                    space: u32::from(input.u8()),
                    addr: u64::from(input.u16()),
                    len: 1 + u64::from(input.u8()),
                };
                let _ = end.push_ref(r);
            }
            4 | 5 => {
                let _ = end.publish();
            }
            6..=8 => match end.front() {
                Ok(Front::Bytes(left)) => {
                    assert!(left > 0 && left <= RING - 16);
                    let (len, skip, n) = (input.u16(), input.u8(), input.u16());
                    let (len, skip, n) = (usize::from(len), usize::from(skip), usize::from(n));
                    let mut buffer = vec![0xa5; len + 2 * MARGIN];
                    let (head, tail) = buffer[MARGIN..MARGIN + len].split_at_mut(len / 3);
                    let mut list = RecvList::new();
                    list.push_buf(head);
                    list.push_buf(tail);
                    let done = end.take(&mut list, skip, n).expect("bytes at the front");
                    drop(list);
                    assert_eq!(done, left.min(n).min(len.saturating_sub(skip)));
                    let (start, stop) = (MARGIN + skip.min(len), MARGIN + skip.min(len) + done);
                    let untouched = buffer[..start].iter().chain(&buffer[stop..]);
                    assert!(untouched.copied().all(|b| b == 0xa5));
                    match end.front() {
                        Ok(Front::Bytes(n)) if done < left => assert_eq!(n, left - done),
                        front => assert!(done == left, "{front:?}"),
                    }
                }
                Ok(Front::Ref(r)) => {
                    assert!(r.len > 0 && r.addr.checked_add(r.len).is_some());
                    let n = input.u64() % r.len + u64::from(input.u8() & 1);
                    end.advance_ref(n);
                    if n < r.len {
                        let rest = Ref {
                            addr: r.addr + n,
                            len: r.len - n,
                            ..r
                        };
                        assert_eq!(end.front(), Ok(Front::Ref(rest)));
                    }
                }
                _ => {}
            },
            9 => {
                let _ = end.release(input.u8() & 1 != 0);
            }
            what @ (10 | 11) => {
                if what == 10 && end.sleep_on_data() || what == 11 && end.sleep_on_room(input.u64())
                {
                    end.awake();
                }
            }
            12 => {
                let known = end.consumed();
                if let (Ok(first), true) = (known, calm) {
                    assert!(first <= end.pushed());
                    assert_eq!(end.consumed(), Ok(first));
                }
            }
            13 => {
                end.enter(u32::from(input.u8()) + 1);
                let _ = (end.peer_access_open(), end.peer_mark(), end.peer_caps());
                end.leave();
            }
            14 => {
                end.open_access();
                end.close_access();
                end.set_caps(input.u8().into());
                let _ = end.peer_aborted();
            }
            _ => {
                let _ = if input.u8().is_multiple_of(8) {
                    end.abort()
                } else {
                    end.finish()
                };
            }
        }
        if calm {
            self.check_writes(side, kept);
        }
    }

    /// Writes a word or a byte, often where it matters.
    fn scribble(&self, input: &mut Input<'_>) {
        let (place, what) = (input.u8(), input.u8());
        let side = usize::from(place & 1);
        let (control, ring) = words_of(side);
        let pushed = self.ends[side].pushed();
        // The other side's consumer position in this one's ring, according to its own word.
        let head = self.wild.word(words_of(1 - side).0).load(Relaxed);
        let index = match place >> 1 & 7 {
            0 => control,
            1 => control + 16 * usize::from(input.u8() % 8),
            2 => usize::from(input.u16()) % (LEN / 8),
            3 => ring + usize::from(input.u16()) % (RING / 8),
            4 => ring + pushed as usize % RING / 8,
            5 => ring + (head as usize % RING / 8 + usize::from(input.u8() % 8)) % (RING / 8),
            _ => ring + head as usize % RING / 8,
        };
        let value = match what & 7 {
            0 => input.u64(),
            1 => 1 << 32 | u64::from(input.u16()),
            2 => (2 << 32) + 24,
            3 => self.ends[1 - side]
                .pushed()
                .wrapping_sub(8 * u64::from(input.u8())),
            4 => input.u8().into(),
            5 => (RING as u64).wrapping_sub(u64::from(input.u8())),
            6 => u64::MAX.wrapping_sub(u64::from(input.u8())),
            _ => {
                self.wild
                    .byte(index * 8 + usize::from(what >> 5))
                    .store(input.u8(), Relaxed);
                return;
            }
        };
        self.wild.word(index).store(value, Relaxed);
    }

    fn run(&mut self, input: &mut Input<'_>, calm: bool) {
        while !input.0.is_empty() {
            let op = input.u8();
            if op & 0x40 != 0 {
                self.scribble(input);
            } else {
                self.operate(usize::from(op >> 7), op, input, calm);
            }
        }
    }
}

/// Scribbles without end on what steers the sides, and now and then anywhere.
fn storm(wild: &Wild, begun: &AtomicBool, stop: &AtomicBool, mut random: u64) {
    while !stop.load(Acquire) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (place, value) = (random >> 32, random & 0xffff);
        let index = match place % 4 {
            0 => 16 * (1 + place / 4 % 16) as usize,
            1 => (place / 4) as usize % (LEN / 8),
            _ => CONTROL / 8 + (place / 4 % 64) as usize + RING / 8 * (place >> 20 & 1) as usize,
        };
        let kind = (random >> 28 & 3) << 32;
        wild.word(index).store(kind | value, Relaxed);
        begun.store(true, Release);
    }
}

/// Two honest sides, and a scribbler that writes any word or byte of their segment between their operations, or (for some inputs) all the
/// time: no side panics, hangs, accesses memory outside its list, or writes words that are not its own.
pub fn ring_scribble(data: &[u8]) {
    let mut input = Input(data);
    let (mine, fd) = Segment::create(RING as u32).expect("a segment");
    let wild = Wild(Mapping::new(&fd, 0, LEN, true).expect("a mapping"));
    let theirs = Segment::open(fd).expect("a good segment");
    let mut sides = Sides {
        ends: [
            End::new(Arc::new(mine), Role::Initiator),
            End::new(Arc::new(theirs), Role::Responder),
        ],
        wild: &wild,
        before: Vec::new(),
    };
    let first = input.u8();
    if first & 31 != 31 {
        sides.run(&mut input, true);
        return;
    }
    let (begun, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|s| {
        let thread = s.spawn(|| storm(&wild, &begun, &stop, u64::from(first) + 1));
        while !begun.load(Acquire) {
            std::thread::yield_now();
        }
        sides.run(&mut input, false);
        stop.store(true, Release);
        // The scope by itself does not wait for the thread's own clean-up, which then looks like a leak.
        thread.join().expect("nothing to panic at");
    });
}

#[cfg(test)]
mod tests {
    fn replay(target: &str, body: fn(&[u8])) {
        let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fuzz/corpus")
            .join(target);
        let mut seeds = 0;
        for entry in std::fs::read_dir(dir).expect("a corpus") {
            let path = entry.expect("a directory entry").path();
            // Shown by the test harness if the body panics.
            println!("{}", path.display());
            body(&std::fs::read(&path).expect("a readable seed"));
            seeds += 1;
        }
        assert_ne!(seeds, 0, "no seeds");
    }

    #[test]
    fn ring_scribble() {
        replay("ring_scribble", super::ring_scribble);
    }

    #[test]
    fn stream_scribble() {
        replay("stream_scribble", super::stream_scribble);
    }
}
