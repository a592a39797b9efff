//! What happens to a connection at a moment when something else happens to it: another thread closes it, a process that shares it is killed, the program starts
//! another program, the peer has stopped reading. Each test is one of `c/moments.c`, and holds on plain TCP too.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use weft_run_tests::{have, library};

fn program() -> Option<&'static Path> {
    static MADE: OnceLock<bool> = OnceLock::new();
    let program = Path::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/moments"));
    let source = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/c/moments.c"));
    let is_made = *MADE.get_or_init(|| {
        have(&[("cc", "gcc")]) && {
            let mut cc = Command::new("cc");
            cc.args(["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]);
            let done = cc.arg(program).arg(source).status().expect("cc runs");
            assert!(done.success());
            true
        }
    });
    is_made.then_some(program)
}

fn holds(test: &str) {
    let Some(program) = program() else { return };
    for library in [None, Some(library())] {
        let mut command = Command::new(program);
        command.arg(test);
        if let Some(library) = library {
            command.env("LD_PRELOAD", library);
        }
        let done = command.output().expect("the program runs");
        let said = String::from_utf8_lossy(&done.stderr);
        let how = library.map_or("plain TCP", |_| "weft run");
        assert!(done.status.success(), "{how}: {} {said}", done.status);
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            holds(stringify!($name));
        })*
    };
}

tests! {
    given_back
    given_back_beside_a_reader
    large_send_after_shut_rd
    number_is_reused_by_a_sender
    number_is_reused_by_a_receiver
    sibling_is_killed
    reset_behind_the_ring
    edges_of_what_is_looked_at
    edges_of_room
    connects_again
    retries_without_poll
}
