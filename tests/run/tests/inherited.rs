//! Sockets that processes share after a fork: each test is one of `c/inherited.c`, and prints the same on plain TCP and UDP.

weft_run_tests::as_on_tcp! { "inherited":
    closed_by_both_beside_a_reader
    closed_before_the_fork_beside_a_reader
    closes_beside_edges
    connected_by_the_child
}
