//! What a program is told of a connection that has gone over to rings, and when. Each test is one of `c/told.c`, and holds on plain TCP and UDP too.

weft_run_tests::as_on_tcp! { "told":
    edges_of_what_is_looked_at
    edges_of_room
    edges_without_a_read
    edges_of_room_again
    low_water_mark
    datagrams_fire_once
    long_lists
    datagrams_as_asked
}
