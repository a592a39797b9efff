//! Calls that reach a socket by an unusual way (c/holes.c): what the program sees is what it sees on plain TCP.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use weft_run_tests::{compiled, plain, same_lines, weft};

/// Runs a case of the program on plain TCP and on rings.
fn as_on_tcp(case: &str) {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let program = PROGRAM.get_or_init(|| compiled("holes", env!("CARGO_TARGET_TMPDIR")));
    let Some(program) = program else { return };
    let line = format!("{} {case}", program.display());
    let expected = plain().run(&line);
    expected.good();
    let done = weft().limit(Duration::from_mins(1)).run(&line);
    done.good();
    same_lines(&expected.text, &done.text, case);
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
