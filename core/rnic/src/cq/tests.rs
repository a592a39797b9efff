//! Sleeps that end.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use weft_mem::Access;

use crate::ext::CqExt;
use crate::testing::{PATIENCE, connected};
use crate::{Device, SendWr, Wc};

/// A program that polls the queue looks for Writes in its memory as well: it does not sleep through them beside busy threads.
#[test]
fn a_write_ends_the_sleep_of_a_poller() {
    let pair = connected(&Device::open().unwrap());
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    let target = pair.far.pd.alloc_mr(64, access).unwrap();
    let result = pair.near.pd.alloc_mr(8, access).unwrap();
    let remote = target.remote(0);
    for wr in [
        SendWr::write(1, remote).inline(b"new"),
        SendWr::write(2, remote).sge(result.whole()),
        SendWr::fetch_add(3, remote, 1).sge(result.whole()),
    ] {
        let sleep = || {
            let begun = Instant::now();
            let cq = &pair.far.cq.0;
            cq.rest(Some(PATIENCE), &|| false, |member| member.doze());
            assert!(begun.elapsed() < PATIENCE, "not woken");
        };
        std::thread::scope(|scope| {
            let sleeper = scope.spawn(sleep);
            // The first may come before the sleep.
            while !sleeper.is_finished() {
                pair.near.qp.post_send(std::slice::from_ref(&wr)).unwrap();
                std::thread::sleep(Duration::from_millis(20));
                pair.near.cq.poll(&mut [Wc::default(); 4]).unwrap();
            }
        });
    }
}

/// Of two sleeping threads, the one that runs first sleeps again at once: it must not consume the other's wake-up.
#[test]
fn everybody_who_sleeps_is_woken() {
    const ROUNDS: u32 = 3000;
    let cq = Device::open().unwrap().create_cq(1, None).unwrap();
    let start = cq.epoch();
    let seen = [AtomicU32::new(0), AtomicU32::new(0)];
    std::thread::scope(|scope| {
        for mine in &seen {
            let cq = &cq;
            scope.spawn(move || {
                while mine.load(Ordering::SeqCst) < ROUNDS {
                    let epoch = start.wrapping_add(mine.load(Ordering::SeqCst));
                    let begun = Instant::now();
                    cq.watch(epoch, false, Some(Duration::from_secs(20)));
                    assert!(begun.elapsed() < Duration::from_secs(10), "not woken");
                    mine.store(cq.epoch().wrapping_sub(start), Ordering::SeqCst);
                }
            });
        }
        for round in 0..ROUNDS {
            cq.interrupt();
            // The next one comes when one of them has seen it, and both once a while.
            let behind = |wanted: u32| {
                let far = |s: &AtomicU32| s.load(Ordering::SeqCst) < wanted;
                if round % 2 == 0 {
                    seen.iter().any(far)
                } else {
                    seen.iter().all(far)
                }
            };
            let begun = Instant::now();
            while behind(round + 1) {
                assert!(begun.elapsed() < Duration::from_secs(30), "not seen");
                std::thread::yield_now();
            }
        }
    });
}
