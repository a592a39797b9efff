//! What a program is told of a connection that has gone over to rings, and when. Each test is one of `c/told.c`, and holds on plain TCP and UDP too.

use weft_run_tests::{as_on_tcp, weft};

weft_run_tests::as_on_tcp! { "told":
    edges_of_what_is_looked_at
    edges_of_room
    edges_without_a_read
    edges_of_room_again
    low_water_mark
    datagrams_fire_once
    long_lists
    datagrams_as_asked
    bytes_not_taken
    datagrams_to_nobody
    datagrams_to_a_dead_process
}

/// A ring stays where the new socket gets none of its datagrams.
#[test]
fn binds_elsewhere() {
    as_on_tcp(program(), "binds_elsewhere");
    let Some(program) = program() else { return };
    let done = weft().run(&format!("{} binds_elsewhere", program.display()));
    done.good();
    let rings = done.text.matches(" dropped as").count();
    assert_eq!(rings, 2, "both ends of one: {}", done.show());
}
