//! rdmacm-utils: programs on rsockets.

use std::time::Duration;

use weft_dropin::{Weft, free_port, have};

use super::carriers;

const PACKAGE: &str = "rdmacm-utils";

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[test]
fn rcopy() {
    if !have(&[("rcopy", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let port = free_port();
        let server = weft
            .clone()
            .dir(to.path())
            .start(&format!("rcopy -p {port}"));
        let server = server.listens(port);
        for len in [1, 65_537, 20 << 20] {
            let data = noise(len);
            let (source, name) = (from.path().join("source"), format!("copy-{len}"));
            std::fs::write(&source, &data).unwrap();
            let source = source.display();
            let done = weft.run(&format!("rcopy {source} 127.0.0.1:{name} -p {port}"));
            done.good();
            let copy = std::fs::read(to.path().join(&name)).unwrap_or_default();
            assert!(copy == data, "{name} differs: {}", done.show());
        }
        drop(server);
    }
}

fn stream(program: &str, weft: &Weft, address: &str, options: &str) {
    if !have(&[(program, PACKAGE)]) {
        return;
    }
    // riostream's server allows mapped memory only after rlisten(); a client may be faster, with rdma-core's library too.
    for attempt in 1.. {
        let port = free_port();
        let common = format!("-p {port} {options}");
        let server = weft.start(&format!("{program} -b {address} {common}"));
        let server = server.listens(port);
        let client = weft.run(&format!("{program} -s {address} {common}"));
        if attempt < 5 && client.text.contains("riomap: Cannot allocate memory") {
            continue;
        }
        client.good();
        server.end().good();
        // name bytes xfers iters total time Gb/sec usec/xfer
        let results = client.text.lines().filter(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            words.len() == 8 && words[7].parse::<f64>().is_ok_and(|time| time > 0.0)
        });
        assert!(results.count() > 0, "{}", client.show());
        return;
    }
}

#[test]
fn rstream() {
    for weft in carriers("weft0") {
        stream("rstream", &weft, "127.0.0.1", "-T v -S 64 -C 200");
        stream("rstream", &weft, "127.0.0.1", "-T v -S 100000 -C 50");
        stream("rstream", &weft, "127.0.0.1", "-S 1000000 -C 50");
        // Without verification it runs its whole list of sizes.
        stream("rstream", &weft, "127.0.0.1", "");
    }
}

#[test]
fn rstream_in_every_way_of_waiting() {
    for way in ["a", "b", "n"] {
        let options = format!("-T {way} -T v -S 5000 -C 100");
        stream("rstream", &Weft::on("weft0"), "127.0.0.1", &options);
    }
}

#[test]
fn rstream_with_a_forking_server() {
    stream(
        "rstream",
        &Weft::on("weft0"),
        "127.0.0.1",
        "-T f -T v -S 5000 -C 100",
    );
}

#[test]
fn rstream_over_ipv6() {
    stream(
        "rstream",
        &Weft::on("weft0"),
        "::1",
        "-f ipv6 -T v -S 5000 -C 100",
    );
}

#[test]
fn riostream() {
    for weft in carriers("weft0") {
        stream("riostream", &weft, "127.0.0.1", "-T v -S 64 -C 200");
        stream("riostream", &weft, "127.0.0.1", "-T v -S 100000 -C 50");
        // There and back, each side spinning on its own memory.
        stream("riostream", &weft, "127.0.0.1", "-S 64 -I 20 -C 1");
    }
}

/// Each way of waiting, with a server that answers every message, and with one that only counts them.
#[test]
fn udpong() {
    if !have(&[("udpong", PACKAGE)]) {
        return;
    }
    for weft in carriers("weft0") {
        for way in ["b", "n", "a"] {
            ping_pong(&weft, "127.0.0.1", &format!("-T {way} -S 1000 -C 200 -T e"));
            ping_pong(&weft, "127.0.0.1", &format!("-T {way} -S 64 -C 2000"));
        }
        ping_pong(&weft, "::1", "-T b -S 1500 -C 200 -T e");
    }
}

/// udpong derives the number of the expected message from the latest answer. If an answer took longer than its millisecond and another one was lost, it waits
/// for ever, over plain UDP too: the test then starts it again.
fn ping_pong(weft: &Weft, address: &str, options: &str) {
    const TRIES: u32 = 5;
    for left in (0..TRIES).rev() {
        let port = free_port();
        let common = format!("-p {port} {options}");
        let server = weft.start(&format!("udpong -b {address} {common}"));
        let server = server.hears(port, 1);
        let limited = weft.clone().limit(Duration::from_secs(10));
        let client = limited.run(&format!("udpong -s {address} {common}"));
        drop(server);
        // name bytes xfers total time Gb/sec usec/xfer
        let results = client.text.lines().filter(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            words.len() == 7 && words[6].parse::<f64>().is_ok_and(|time| time > 0.0)
        });
        if client.is_good() && results.count() == 1 {
            client.works();
            return;
        }
        assert!(left > 0, "{}", client.show());
    }
}
