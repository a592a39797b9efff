//! rdma-core's rsockets in the guest, on the kernel's driver, and those of our libraries here: rstream and riostream both ways.

use weft_dropin::{Weft, free_port, have};

use super::{GUEST, HOST, LONG, PING_PORT, STEP, Siw, listening, say, siw};

const PROGRAMS: &[(&str, &str)] = &[("rstream", "rdmacm-utils"), ("riostream", "rdmacm-utils")];
/// Rounds, transfers a round, bytes a transfer; the data is checked. No more in the last round than the peer has room for at once: siw resets a connection that
/// is closed while grants are on their way to it, and loses what it has not sent.
const TRANSFERS: [(u32, u32, u32); 3] = [(50, 1, 64), (20, 20, 1461), (5, 4, 60_000)];

/// Large transfers without CRC, see docs/adr/0006; the programs compare the data.
fn weft(size: u32) -> Weft {
    let crc = if size > 20_000 { "off" } else { "on" };
    Weft::on("weft0").limit(LONG).env("WEFT_CRC", crc)
}

/// A program, our side's mode, what both are told, and the size. The guest's side blocks: rdma-core's `rpoll` tells of the peer's farewell
/// before the data that came with it has been read, and the programs then give up.
fn tests() -> impl Iterator<Item = (&'static str, &'static str, String, u32)> {
    let modes = [
        ("rstream", "-T b"),
        ("rstream", "-T a"),
        ("rstream", "-T n"),
        ("riostream", "-T b"),
    ];
    modes.into_iter().flat_map(|(program, mode)| {
        TRANSFERS.map(|(rounds, count, size)| {
            let args = format!("-T v -I {rounds} -C {count} -S {size}");
            (program, mode, args, size)
        })
    })
}

impl Siw {
    /// The guest's server for one client; where it is reached from here.
    fn rsocket_server(&mut self, line: &str) -> (u16, String) {
        self.stop_server();
        let limit = LONG.as_secs();
        let line = format!(
            "timeout {limit} {line} -b {GUEST} -p {PING_PORT} &{}",
            listening(PING_PORT)
        );
        let said = self.guest.must(&line, STEP);
        (self.forwarded, said)
    }
}

#[test]
fn rsockets_of_the_guest_talk_to_a_server_on_our_libraries() {
    if !have(PROGRAMS) {
        return;
    }
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    for (program, mode, args, size) in tests() {
        let port = free_port();
        let server = weft(size).start(&format!("{program} -b 127.0.0.1 -p {port} {mode} {args}"));
        let server = server.listens(port);
        let limit = LONG.as_secs();
        let line = format!("timeout {limit} {program} -s {HOST} -p {port} -T b {args}");
        let client = siw.guest.run(&line, LONG + STEP);
        assert!(
            client.status == 0 && client.text.contains("custom"),
            "{program} {args}: {}\nserver: {}",
            client.text,
            server.text()
        );
        server.end().good().says("custom");
        say(&format!(
            "siw {program} -> {program} on our libraries {mode}, {args}"
        ));
    }
}

#[test]
fn rsockets_on_our_libraries_talk_to_a_server_in_the_guest() {
    if !have(PROGRAMS) {
        return;
    }
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    // riostream says how many mappings it allows after it has begun to listen, which rdma-core does not notice in time.
    for (program, mode, args, size) in tests().filter(|test| test.0 == "rstream") {
        let (port, _) = siw.rsocket_server(&format!("{program} -T b {args}"));
        let client = weft(size).run(&format!("{program} -s 127.0.0.1 -p {port} {mode} {args}"));
        if !client.is_good() {
            let said = siw
                .guest
                .run(&format!("killall {program}; wait"), LONG)
                .text;
            panic!("{program} {mode} {args}: {}\nserver: {said}", client.show());
        }
        let said = siw.guest.run("wait", LONG).text;
        assert!(
            said.contains("custom"),
            "{program} {mode} {args}: server: {said}"
        );
        client.says("custom");
        say(&format!(
            "{program} {mode} on our libraries -> siw {program}, {args}"
        ));
    }
}
