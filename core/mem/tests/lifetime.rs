//! Memory stays while a span lives, comes back after, and copies may race.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, mpsc};
use std::thread;
use std::time::Duration;
use weft_mem::{Access, Backing, MemError, PdId, RawMemory, Table, WindowType};

const PD: PdId = PdId(1);
const QP: u32 = 7;
const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);

fn rounds(native: usize, miri: usize) -> usize {
    if cfg!(miri) { miri } else { native }
}

#[test]
fn deregistering_waits_for_a_span_elsewhere() {
    let table = Table::new(4);
    let r = table
        .register(PD, Backing::Owned(vec![0; 8]), 0, ALL)
        .unwrap();
    let stag = r.stag();
    let span = table
        .remote(PD, QP, stag, 0, 8, Access::REMOTE_WRITE)
        .unwrap();
    let (tx, rx) = mpsc::channel();
    thread::scope(|s| {
        s.spawn(|| tx.send(r.deregister().unwrap().unwrap()).unwrap());
        // The STag dies first, then the call waits for us.
        while table.remote(PD, QP, stag, 0, 1, ALL).is_ok() {
            thread::yield_now();
        }
        assert!(rx.recv_timeout(Duration::from_millis(20)).is_err());
        span.copy_in(0, b"in time!");
        drop(span);
        assert_eq!(rx.recv().unwrap(), b"in time!");
    });
}

#[test]
fn the_wait_is_bounded_and_may_be_repeated() {
    let table = Table::new(4);
    let r = table
        .register(PD, Backing::Owned(vec![5; 3]), 0, ALL)
        .unwrap();
    let span = table.local(PD, r.stag(), 0, 3, ALL).unwrap();
    let (r, e) = r.deregister().expect_err("a span lives");
    assert_eq!(e, MemError::InUse);
    let dead = table.local(PD, r.stag(), 0, 3, ALL);
    assert_eq!(dead.err(), Some(MemError::InvalidStag));
    drop(span);
    assert_eq!(r.deregister().unwrap().unwrap(), [5; 3]);
}

#[test]
fn a_span_outlives_a_dropped_region() {
    let table = Table::new(4);
    let r = table
        .register(PD, Backing::Owned(vec![9; 100]), 0, ALL)
        .unwrap();
    let span = table.local(PD, r.stag(), 50, 2, ALL).unwrap();
    drop(r);
    drop(table);
    let mut two = [0; 2];
    span.copy_out(0, &mut two);
    assert_eq!(two, [9, 9]);
}

#[test]
fn raw_memory_is_not_touched_after_the_drop() {
    let table = Table::new(4);
    let mut buffer = vec![0_u8; 64];
    for round in 0..rounds(2000, 10) as u8 {
        let start = Barrier::new(2);
        // SAFETY: `buffer` is not used until the region is gone.
        let r = unsafe { table.register_raw(PD, buffer.as_mut_ptr(), 64, 0, ALL) }.unwrap();
        let stag = r.stag();
        thread::scope(|s| {
            s.spawn(|| {
                start.wait();
                while let Ok(span) = table.remote(PD, QP, stag, 0, 64, ALL) {
                    span.copy_in(0, &[round; 64]);
                }
            });
            start.wait();
            drop(r);
            // Plain writes: miri reports a race if the other thread were still at it.
            buffer.fill(0xEE);
        });
        assert!(buffer.iter().all(|&b| b == 0xEE));
    }
    let null = std::ptr::null_mut();
    // SAFETY: refused.
    let refused = unsafe { table.register_raw(PD, null, 1, 0, ALL) };
    assert_eq!(refused.err(), Some(MemError::BadArgument));
    // SAFETY: no bytes.
    assert!(unsafe { table.register_raw(PD, null, 0, 0, ALL) }.is_ok());
}

/// Owners register and deregister while peers place: each buffer comes back whole, and holds
/// only what was placed under its own `STag`.
#[test]
fn registering_while_peers_place() {
    let table = Table::new(64);
    let current = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let placed = AtomicU64::new(0);
    thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let stag = current.load(Ordering::Relaxed) as u32;
                    if let Ok(span) = table.remote(PD, QP, stag, 0, 16, Access::REMOTE_WRITE) {
                        for i in 0..4 {
                            span.copy_in(i * 4, &stag.to_ne_bytes());
                        }
                        placed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let mut buffer = vec![0; 16];
        let least = rounds(20_000, 20);
        let mut round = 0;
        while round < least || placed.load(Ordering::Relaxed) == 0 {
            buffer.fill(0);
            let r = table.register(PD, Backing::Owned(buffer), 0, ALL).unwrap();
            let stag = r.stag();
            current.store(stag.into(), Ordering::Relaxed);
            if round % 64 == 0 {
                thread::yield_now();
            }
            buffer = r.deregister().map_err(|(_, e)| e).unwrap().unwrap();
            let words: Vec<_> = buffer
                .chunks_exact(4)
                .map(|w| u32::from_ne_bytes(w.try_into().unwrap()))
                .collect();
            assert!(words.iter().all(|&w| w == words[0]) && (words[0] == 0 || words[0] == stag));
            round += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// Binding, invalidating and dropping from different threads: no window outlives its region.
#[test]
fn binding_while_the_region_goes() {
    let table = Table::new(64);
    for round in 0..rounds(3000, 20) {
        let r = table
            .register(PD, Backing::Owned(vec![0; 16]), 0, ALL)
            .unwrap();
        let stag = r.stag();
        let window = table.alloc_window(PD, WindowType::Type2).unwrap();
        let start = Barrier::new(2);
        thread::scope(|s| {
            let binder = s.spawn(|| {
                start.wait();
                table.bind(PD, window.stag(), 1, QP, stag, 0, 16, Access::REMOTE_READ)
            });
            start.wait();
            if round % 2 == 0 {
                drop(r);
                if let Ok(bound) = binder.join().unwrap() {
                    let get = table.remote(PD, QP, bound, 0, 1, Access::REMOTE_READ);
                    assert_eq!(get.err(), Some(MemError::InvalidStag));
                }
            } else {
                let gone = r.deregister();
                let bound = binder.join().unwrap();
                assert!(
                    gone.is_ok() != bound.is_ok(),
                    "either the bind or the deregistration"
                );
                if let Ok(bound) = bound {
                    table.invalidate(PD, QP, bound).unwrap();
                }
                if let Err((r, _)) = gone {
                    r.deregister().unwrap();
                }
            }
        });
    }
}

/// Several threads copy in and out of the same bytes. Nothing is promised about the mix, but every
/// byte is one that somebody wrote.
#[test]
fn racing_copies() {
    let table = Table::new(4);
    let len = rounds(5000, 70);
    let r = table
        .register(PD, Backing::Owned(vec![1; len]), 0, ALL)
        .unwrap();
    let span = || table.remote(PD, QP, r.stag(), 0, len as u32, ALL).unwrap();
    let other = table
        .register(PD, Backing::Owned(vec![1; len]), 0, ALL)
        .unwrap();
    let mut bytes = vec![1; len];
    // SAFETY: `bytes` is not used otherwise.
    let raw = unsafe { RawMemory::new(bytes.as_mut_ptr(), len) }.unwrap();
    thread::scope(|s| {
        for byte in 1..3 {
            let span = span();
            s.spawn(move || {
                let src = vec![byte; len];
                for i in 0..rounds(5000, 4) {
                    span.copy_in(i % len, &src[i % len..]);
                }
            });
        }
        for _ in 0..rounds(5000, 4) {
            let mut all = Vec::new();
            span().extend(0, len, &mut all);
            assert!(all.iter().all(|b| matches!(b, 1..=3)));
            r.fill(len / 2, 10, 3).unwrap();
            // From shared memory to shared memory.
            r.copy_to(0, &other, 1, len - 1).unwrap();
            r.copy_to(1, &r, 0, len - 1).unwrap();
            r.copy_to_raw(0, &raw).unwrap();
            r.copy_from_raw(0, &raw).unwrap();
            assert!(matches!(r.load_u8(len / 2), Ok(1..=3)));
        }
    });
}

/// The bit-by-bit definition of RFC 7306's masked addition: a carry is lost where the mask has a bit.
fn add_by_bits(a: u64, b: u64, mask: u64) -> u64 {
    let (mut out, mut carry) = (0, 0);
    for bit in 0..64 {
        let sum = (a >> bit & 1) + (b >> bit & 1) + carry;
        out |= (sum & 1) << bit;
        carry = if mask >> bit & 1 == 1 { 0 } else { sum >> 1 };
    }
    out
}

#[test]
fn atomics_one_by_one() {
    let table = Table::new(4);
    let r = table
        .register(PD, Backing::Owned(vec![0; 32]), 0, ALL)
        .unwrap();
    let at = r.as_ptr().align_offset(8);
    let word = |off, len| {
        table
            .remote(PD, QP, r.stag(), off as u64, len, Access::REMOTE_ATOMIC)
            .unwrap()
    };
    let w = word(at, 8);
    assert_eq!(w.fetch_add(5), Ok(0));
    assert_eq!(w.fetch_add(u64::MAX), Ok(5), "wraps");
    assert_eq!(w.swap(100), Ok(4));
    assert_eq!(w.compare_swap(99, 1), Ok(100));
    assert_eq!(w.compare_swap(100, 0xFFFF), Ok(100));
    assert_eq!(w.swap_masked(0x1234, 0xFF00), Ok(0xFFFF));
    assert_eq!(r.load_u64(at), Ok(0x12FF));
    assert_eq!(
        w.compare_swap_masked(0x1300, 0xFF00, 0, u64::MAX),
        Ok(0x12FF)
    );
    assert_eq!(r.load_u64(at), Ok(0x12FF), "unequal");
    assert_eq!(w.compare_swap_masked(0x1200, 0xFF00, 0, 0xF), Ok(0x12FF));
    assert_eq!(r.load_u64(at), Ok(0x12F0));
    // Host order in memory.
    let mut raw = [0; 8];
    r.read(at, &mut raw).unwrap();
    assert_eq!(u64::from_ne_bytes(raw), 0x12F0);

    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for mask in [0, u64::MAX, 1 << 63, 0x8000_8000_8000_8000, 1] {
        for _ in 0..rounds(1000, 5) {
            let (old, add, mask) = (random(), random(), mask & (random() | random()));
            r.store_u64(at, old).unwrap();
            assert_eq!(w.fetch_add_masked(add, mask), Ok(old));
            assert_eq!(r.load_u64(at), Ok(add_by_bits(old, add, mask)));
        }
    }

    for wrong in [word(at + 1, 8), word(at + 4, 12)] {
        assert_eq!(wrong.fetch_add(1), Err(MemError::Misaligned));
        assert_eq!(wrong.fetch_add_masked(1, 1), Err(MemError::Misaligned));
        assert_eq!(wrong.swap(1), Err(MemError::Misaligned));
        assert_eq!(wrong.swap_masked(1, 1), Err(MemError::Misaligned));
        assert_eq!(wrong.compare_swap(1, 1), Err(MemError::Misaligned));
        assert_eq!(
            wrong.compare_swap_masked(1, 1, 1, 1),
            Err(MemError::Misaligned)
        );
    }
    assert_eq!(word(at, 7).fetch_add(1), Err(MemError::Bounds));
}

#[test]
fn atomics_against_the_owner() {
    let table = Table::new(4);
    let words = 4;
    let r = table
        .register(PD, Backing::Owned(vec![0; 8 * words + 8]), 0, ALL)
        .unwrap();
    let at = r.as_ptr().align_offset(8);
    let each = rounds(100_000, 50) as u64;
    thread::scope(|s| {
        for peer in 0..2 {
            let w = table
                .remote(PD, QP, r.stag(), at as u64, 8, Access::REMOTE_ATOMIC)
                .unwrap();
            s.spawn(move || {
                for _ in 0..each {
                    if peer == 0 {
                        w.fetch_add(1).unwrap();
                    } else {
                        w.fetch_add_masked(1, 1 << 63).unwrap();
                    }
                }
            });
        }
        // SAFETY: aligned, inside the region, and only ever used by atomics here.
        let own = unsafe { AtomicU64::from_ptr(r.as_ptr().add(at).cast()) };
        for i in 0..each {
            if i % 2 == 0 {
                own.fetch_add(1, Ordering::Relaxed);
            } else {
                let mut old = own.load(Ordering::Relaxed);
                while let Err(now) =
                    own.compare_exchange_weak(old, old + 1, Ordering::Relaxed, Ordering::Relaxed)
                {
                    old = now;
                }
            }
        }
    });
    assert_eq!(r.load_u64(at), Ok(3 * each));
}
