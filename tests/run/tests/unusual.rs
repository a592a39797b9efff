//! Calls that few programs make, on a connection that has gone over. Each test is one of `c/unusual.c`, and holds on plain TCP too.

weft_run_tests::as_on_tcp! { "unusual":
    names_of_sends
    limit_is_the_programs
    messages_of_fast_open
    recvmmsg_ends_at_its_limit
    set_of_a_fork
    sendmmsg_stops_at_a_part
    splice_takes_what_it_gives
    bytes_before_io_uring
    execveat_passes_the_socket
    every_number_is_free
    many_sockets_of_few_numbers
    most_numbers_are_left
    numbers_below_the_limit_are_left
    listener_of_another_kind
    descriptors_of_a_thread
    control_data_is_checked
    file_past_the_page_cache
}
