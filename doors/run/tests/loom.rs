//! Sends beside a join, in every order of their steps that the memory model allows (up to a number of preemptions). To run:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p weft-run --release --test loom --target-dir target/loom
//! ```
#![cfg(loom)]

use loom::sync::atomic::AtomicU64;
use loom::sync::atomic::Ordering::SeqCst;
use loom::sync::{Arc, Mutex};
use loom::thread;
use weft_run::gate::{Gate, Join};

/// The connection: bytes in TCP, the count that the peer sees (`u64::MAX`: not joined), and the lock of joins.
struct Shared {
    gate: Gate,
    tcp: AtomicU64,
    word: AtomicU64,
    big: Mutex<()>,
}

/// One send of a thread, as the preload library makes it: by the gate, or counted in the word.
fn send(shared: &Shared) {
    loop {
        if shared.gate.enter() {
            shared.tcp.fetch_add(1, SeqCst);
            shared.gate.leave(1);
            return;
        }
        let _big = shared.big.lock().unwrap();
        if shared.gate.is_joined() {
            shared.word.fetch_add(1, SeqCst);
            shared.tcp.fetch_add(1, SeqCst);
            return;
        }
    }
}

fn join(shared: &Shared) -> Join {
    let _big = shared.big.lock().unwrap();
    shared.gate.join(|count| {
        shared.word.store(count, SeqCst);
        true
    })
}

#[test]
fn no_send_beside_a_join_is_missing_from_the_count() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let shared = Arc::new(Shared {
            gate: Gate::default(),
            tcp: AtomicU64::new(0),
            word: AtomicU64::new(u64::MAX),
            big: Mutex::new(()),
        });
        let senders: Vec<_> = (0..2)
            .map(|_| {
                let shared = shared.clone();
                thread::spawn(move || send(&shared))
            })
            .collect();
        let joined = join(&shared);
        for sender in senders {
            sender.join().unwrap();
        }
        let joined = joined == Join::Done || join(&shared) == Join::Done;
        assert!(joined, "no send is under way any more");
        assert_eq!(shared.tcp.load(SeqCst), 2);
        assert_eq!(shared.word.load(SeqCst), 2);
    });
}
