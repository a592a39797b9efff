//! Calls that reach a socket by an unusual way (c/holes.c): what the program sees is what it sees on plain TCP.

weft_run_tests::as_on_tcp! { "holes":
    a_number_that_was_closed_unseen_is_used_anew
    fclose_sends_what_the_stream_still_has
    select_looks_at_rings_of_high_descriptors
    a_dup2_or_dup3_that_fails_leaves_its_target
    a_child_in_the_same_memory_ends_alone
    signals_announce_bytes_of_a_socket_that_asks_for_them
    options_from_before_the_connection_hold
    sendfile_from_what_is_no_file_is_the_kernels
    a_thread_that_allows_itself_reads_and_writes_only_goes_on
    an_epoll_set_with_two_names_keeps_its_connections
    waits_by_their_numbers_write_the_time_that_is_left
    a_send_has_the_room_that_poll_announces
    a_wait_for_room_in_a_ring_that_is_exactly_full_ends
    limits_of_the_rate_and_filters_hold
}
