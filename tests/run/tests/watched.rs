//! What watchers of an epoll set see of connections on rings: each test is one of `c/watched.c`, and prints the same on plain TCP.

weft_run_tests::as_on_tcp! { "watched":
    select_on_a_set
    set_that_is_passed_on
    sleeper_before_the_first_connection
    sleeper_and_a_connection_that_returns
    sleeper_beside_an_older_set
    none_starves_at_1
    none_starves_at_1_by_edges
    none_starves_at_1_without_waits
    none_starves_at_4
    none_starves_at_4_by_edges
    none_starves_at_4_without_waits
}
