//! Forks at a moment when a call of the library is under way, children that share something with us, and handlers that have interrupted `malloc`. Each test is one of
//! `c/forks.c`, and holds on plain TCP and UDP too.

use weft_run_tests::weft;

weft_run_tests::as_on_tcp! { "forks":
    in_an_allocation
    polls_in_an_allocation
    beside_sent_faults
    beside_sent_aborts
    in_a_read
    in_a_receive_of_datagrams
    in_a_sandbox
    by_vfork
    beside_us
    with_our_descriptors
}

/// A child in another PID namespace is not found by its number: it cannot share a ring.
#[test]
fn in_other_pids() {
    let Some(program) = program() else { return };
    let done = weft().run(&format!("{} in_other_pids", program.display()));
    done.good();
    if !done.text.contains("no namespaces") {
        assert!(done.text.contains("PID namespace"), "{}", done.show());
    }
}
