//! What the rings cost: `cargo bench -p weft-ring`.
//!
//! Medians over rounds; with two threads, which need two free processors, also the best round.

#![cfg(not(loom))]

use std::hint::{black_box, spin_loop};
use std::sync::Arc;
use std::time::Instant;
use weft_mem::{RecvList, SendList};
use weft_ring::{End, Front, Role, Segment};

fn ends(ring: u32) -> (End, End) {
    let (mine, fd) = Segment::create(ring).unwrap();
    let theirs = Segment::open(fd).unwrap();
    (
        End::new(Arc::new(mine), Role::Initiator),
        End::new(Arc::new(theirs), Role::Responder),
    )
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// The median time of a round, and the least.
fn median_and_best(times: Vec<f64>) -> (f64, f64) {
    let best = times.iter().copied().fold(f64::INFINITY, f64::min);
    (median(times), best)
}

fn push(end: &End, bytes: &[u8]) -> usize {
    let mut list = SendList::new();
    list.push_bytes(bytes);
    end.push(&list, 0, bytes.len()).unwrap()
}

fn take(end: &End, into: &mut [u8]) -> usize {
    let n = into.len();
    let mut list = RecvList::new();
    list.push_buf(into);
    end.take(&mut list, 0, n).unwrap()
}

/// Nanoseconds of a push with its publish, and of a front with take and release, on one thread.
fn one_thread(size: usize) -> (f64, f64) {
    const BATCH: u32 = 100;
    let (a, b) = ends(256 << 10);
    let message = vec![1; size];
    let mut buffer = vec![0; size];
    let (mut pushes, mut takes) = (Vec::new(), Vec::new());
    for _ in 0..20_000 {
        let start = Instant::now();
        for _ in 0..BATCH {
            assert_eq!(push(&a, black_box(&message)), size);
            black_box(a.publish());
        }
        pushes.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH));
        let start = Instant::now();
        for _ in 0..BATCH {
            assert!(matches!(b.front(), Ok(Front::Bytes(_))));
            take(&b, black_box(&mut buffer));
            black_box(b.release(false));
        }
        takes.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(BATCH));
    }
    (median(pushes), median(takes))
}

/// Receives one whole message of `into.len()` bytes.
fn receive(end: &End, into: &mut [u8]) {
    let mut at = 0;
    while at < into.len() {
        match end.front().unwrap() {
            Front::Bytes(_) => at += take(end, &mut into[at..]),
            Front::Empty => spin_loop(),
            end => panic!("{end:?}"),
        }
    }
    black_box(end.release(false));
}

/// Microseconds of one way of a ping-pong between two threads that spin.
fn ping_pong(size: usize) -> (f64, f64) {
    const TURNS: u32 = 2000;
    const ROUNDS: u32 = 101;
    let (a, b) = ends(64 << 10);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut buffer = vec![0; size];
            for _ in 0..TURNS * ROUNDS {
                receive(&b, &mut buffer);
                assert_eq!(push(&b, &buffer), size);
                black_box(b.publish());
            }
        });
        let mut buffer = vec![0; size];
        let times = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            for _ in 0..TURNS {
                assert_eq!(push(&a, &buffer), size);
                black_box(a.publish());
                receive(&a, &mut buffer);
            }
            start.elapsed().as_secs_f64() * 1e6 / f64::from(2 * TURNS)
        });
        median_and_best(times.collect())
    })
}

/// Where a chunk is stamped with its number: figures count only if what arrives is what was sent.
fn stamps(chunk: &mut [u8]) -> impl Iterator<Item = &mut [u8; 8]> {
    let (words, _) = chunk.as_chunks_mut();
    words.iter_mut().step_by(128)
}

/// Seconds that a gigabyte in chunks of `size` bytes takes from thread to thread through a ring.
fn stream(ring: u32, size: usize) -> (f64, f64) {
    const ROUNDS: usize = 21;
    let chunks = (64 << 20) / size;
    let (a, b) = ends(ring);
    std::thread::scope(|s| {
        s.spawn(|| {
            let mut chunk = vec![7; size];
            for number in 0..ROUNDS * chunks {
                stamps(&mut chunk).for_each(|stamp| *stamp = number.to_ne_bytes());
                let mut list = SendList::new();
                list.push_bytes(&chunk);
                let mut done = 0;
                while done < size {
                    let n = a.push(&list, done, size - done).unwrap();
                    black_box(a.publish());
                    done += n;
                    if n == 0 {
                        spin_loop();
                    }
                }
            }
        });
        let mut buffer = vec![0; size];
        let mut number = 0_usize;
        let times = (0..ROUNDS).map(|_| {
            let start = Instant::now();
            for _ in 0..chunks {
                receive(&b, &mut buffer);
                assert!(stamps(&mut buffer).all(|stamp| *stamp == number.to_ne_bytes()));
                number += 1;
            }
            start.elapsed().as_secs_f64() * 1e9 / (chunks * size) as f64
        });
        median_and_best(times.collect())
    })
}

fn main() {
    println!("one thread        push+publish ns   front+take+release ns");
    for size in [8, 64, 96, 256, 1024] {
        let (push, take) = one_thread(size);
        println!("{size:>8} B {push:>19.1} {take:>23.1}");
    }
    println!("two threads, spinning, one way");
    for size in [8, 64, 96, 1024, 4096] {
        let (median, best) = ping_pong(size);
        println!("{size:>8} B {median:>10.3} us, best {best:.3}");
    }
    println!("two threads, chunks through a ring");
    for ring in [128 << 10, 256 << 10, 1 << 20, 4 << 20] {
        for size in [4 << 10, 16 << 10, 64 << 10] {
            let (median, best) = stream(ring, size);
            println!(
                "{:>6} KiB ring {:>6} KiB chunks {:>6.1} GB/s, best {:.1}",
                ring >> 10,
                size >> 10,
                1.0 / median,
                1.0 / best
            );
        }
    }
}
