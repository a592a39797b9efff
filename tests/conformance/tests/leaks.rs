//! The resources of many connections in shared memory and over RoCE, and their release. In a process of its own, because it counts all of that.

use weft_conformance::bed::{Bed, Half, Memory, Setup, until};
use weft_conformance::gauge::{descriptors, given_back};
use weft_conformance::waits::alone;
use weft_verbs::{Device, RecvWr, SendWr};

fn maps() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    // A device keeps its own liveness page.
    let shared = maps.lines().filter(|line| line.contains("weft-"));
    shared
        .filter(|line| !line.contains("weft-liveness"))
        .count()
}

/// Connects, exchanges messages and closes, `count` pairs at a time.
fn round(bed: &Bed, count: usize, shared: bool) {
    let listener = bed.listener(64);
    let half = |device: &Device| {
        let cq = || device.create_cq(16, None).expect("a CQ");
        Half {
            max_send_wr: 4,
            max_recv_wr: 4,
            depth: 8,
            cqs: shared.then(|| (cq(), cq())),
            pd: shared.then(|| device.alloc_pd().expect("a PD")),
            ..Half::default()
        }
    };
    let (near, far) = (half(&bed.a), half(&bed.b));
    let mut pairs = Vec::new();
    for _ in 0..count {
        let (a, b) = bed.pair_through(&listener, &near, &far);
        b.post_recv(RecvWr::new(1));
        a.run(SendWr::send(1));
        b.received();
        pairs.push((a.mr(64), b.mr(64), a, b));
    }
    for (near, far, a, _) in &pairs {
        a.run(SendWr::write(2, far.remote(0)).sge(near.whole()));
    }
}

#[test]
fn everything_is_given_back() {
    if !alone("leaks::everything_is_given_back") {
        return;
    }
    let bed = Bed::new(Setup::local(Memory::Both)).expect("a bed");
    round(&bed, 2, false);
    until("the first ones are gone", || maps() == 0);
    let before = descriptors();
    for _ in 0..5 {
        round(&bed, 20, false);
    }
    given_back(before);
    until("all mappings are given back", || maps() == 0);

    // Two thousand at once, where that many descriptors are allowed: this process has both ends.
    let limits = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let room = limits.current.unwrap_or(1 << 20) as usize;
    let count = (room / 8).min(2000);
    println!("{count} connections");
    round(&bed, count, true);
    given_back(before);
    until("all mappings are given back", || maps() == 0);
}

/// Connections of RoCE have no descriptors: their port has one, and a listener.
#[test]
fn everything_of_roce_is_given_back() {
    if !alone("leaks::everything_of_roce_is_given_back") {
        return;
    }
    let bed = Bed::new(Setup::roce()).expect("a bed");
    round(&bed, 2, false);
    let before = descriptors();
    let listener = bed.listener(64);
    let listening = descriptors();
    let pairs: Vec<_> = (0..50)
        .map(|_| bed.pair_through(&listener, &Half::default(), &Half::default()))
        .collect();
    assert!(descriptors() <= listening, "{listening} before");
    drop((pairs, listener));
    for _ in 0..5 {
        round(&bed, 20, false);
    }
    given_back(before);
}
