//! rdma-core's own programs on both sides: here on the drop-in libraries, in the guest on the kernel's driver.

use weft_dropin::{Weft, free_port, have};

use super::{LONG, STEP, Siw, say, siw};
use crate::guest::HOST;

const RPING: &[(&str, &str)] = &[("rping", "rdmacm-utils")];
const ROUNDS: u32 = 200;

fn weft() -> Weft {
    Weft::on("weft0").limit(LONG)
}

fn last(line: &str) -> String {
    format!("{line}: rdma-ping-{}: ", ROUNDS - 1)
}

impl Siw {
    /// Run a client in the guest against a program here that listens on `port`.
    fn client_of(&mut self, port: u16, line: &str) -> super::guest::Output {
        let limit = LONG.as_secs();
        let line = format!("timeout {limit} {line} -a {HOST} -p {port}");
        self.guest.run(&line, LONG + STEP)
    }
}

#[test]
fn rping_of_the_guest_pings_rping_on_our_libraries() {
    if !have(RPING) {
        return;
    }
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    for size in [64, 1461, 60_000] {
        let port = free_port();
        let options = format!("-v -V -C {ROUNDS} -S {size}");
        let server = weft().start(&format!("rping -s -a 127.0.0.1 -p {port} {options}"));
        let server = server.listens(port);
        let client = siw.client_of(port, &format!("rping -c {options}"));
        assert!(
            client.status == 0 && client.text.contains(&last("ping data")),
            "{}\nserver: {}",
            client.text,
            server.text()
        );
        server.end().good().says(&last("server ping data"));
        say(&format!(
            "siw rping -c -> rping -s on our libraries, {ROUNDS} rounds of {size} B"
        ));
    }
}

#[test]
fn rping_on_our_libraries_pings_rping_of_the_guest() {
    if !have(RPING) {
        return;
    }
    let Some(mut siw) = siw() else { return };
    siw.driver(&[]);
    for size in [64, 1461, 60_000] {
        let port = siw.server().port();
        let line = format!("rping -c -a 127.0.0.1 -p {port} -v -V -C {ROUNDS} -S {size}");
        let client = weft().run(&line);
        // Also fetches what the server printed.
        let said = siw.guest.run("true", STEP).text;
        assert!(client.is_good(), "{}\nserver: {said}", client.show());
        client.says(&last("ping data")).never_says("mismatch");
        say(&format!(
            "rping -c on our libraries -> siw rping -s, {ROUNDS} rounds of {size} B"
        ));
    }
}
