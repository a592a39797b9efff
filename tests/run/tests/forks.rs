//! Forks at a moment when a call of the library is under way. Each test is one of `c/forks.c`, and holds on plain TCP and UDP too.

weft_run_tests::as_on_tcp! { "forks":
    in_an_allocation
    beside_sent_faults
    beside_sent_aborts
    in_a_read
    in_a_receive_of_datagrams
    in_a_sandbox
}
