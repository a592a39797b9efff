//! What happens to a connection at a moment when something else happens to it: another thread closes it, a process that shares it is killed, the program starts
//! another program, the peer has stopped reading. Each test is one of `c/moments.c`, and holds on plain TCP too.

weft_run_tests::as_on_tcp! { "moments":
    given_back
    given_back_beside_a_reader
    large_send_after_shut_rd
    number_is_reused_by_a_sender
    number_is_reused_by_a_receiver
    sibling_is_killed
    reset_behind_the_ring
    connects_again
    retries_without_poll
    exec_closes_sockets
    looks_for_all
    answers_name_a_socket_once
    ends_at_the_mark
    closed_beside_a_receiver
    exclusive_as_in_the_kernel
    killed_with_bytes_unread
    registrations_of_duplicates
    fired_is_registered
    tells_what_is_left
    writable_while_there_is_room
    shut_beside_a_sender
    readable_means_bytes
    error_after_a_kill
}
