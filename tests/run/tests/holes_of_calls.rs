//! Calls that reach a socket by an unusual way (c/holes.c): what the program sees is what it sees on plain TCP.

use std::path::PathBuf;
use std::sync::OnceLock;

use weft_run_tests::compiled;

fn as_on_tcp(case: &str) {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| compiled("holes", env!("CARGO_TARGET_TMPDIR")));
    weft_run_tests::as_on_tcp(program.as_deref(), case);
}

#[test]
fn a_number_that_was_closed_unseen_is_used_anew() {
    as_on_tcp("closed_unseen");
}

#[test]
fn fclose_sends_what_the_stream_still_has() {
    as_on_tcp("fclose");
}

#[test]
fn select_looks_at_rings_of_high_descriptors() {
    as_on_tcp("big_select");
}

#[test]
fn a_dup2_or_dup3_that_fails_leaves_its_target() {
    as_on_tcp("failing_dup");
}

#[test]
fn a_child_in_the_same_memory_ends_alone() {
    as_on_tcp("clone_vm");
}

#[test]
fn signals_announce_bytes_of_a_socket_that_asks_for_them() {
    as_on_tcp("async");
}

#[test]
fn options_from_before_the_connection_hold() {
    as_on_tcp("low_water");
}

#[test]
fn sendfile_from_what_is_no_file_is_the_kernels() {
    as_on_tcp("not_a_file");
}

#[test]
fn a_thread_that_allows_itself_reads_and_writes_only_goes_on() {
    as_on_tcp("sandbox");
}

#[test]
fn an_epoll_set_with_two_names_keeps_its_connections() {
    as_on_tcp("two_names");
}
