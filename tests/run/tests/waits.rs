//! How long calls wait, and what they report when nothing came: each test is one of `c/waits.c`, and prints the same on plain TCP.

weft_run_tests::as_on_tcp! { "waits":
    limit_of_a_send
    limit_of_a_receive
    signal_in_a_receive
    poll_tells_of_a_kill
    select_for_exceptions
    what_failures_leave
    waits_without_descriptors
    waits_without_descriptors_by_another
    datagrams_without_descriptors
    datagrams_without_descriptors_by_another
    poll_of_all_descriptors
}
