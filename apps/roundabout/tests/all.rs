//! The tests of this crate.

mod joins;
mod ring;
mod strangers;

/// Copies this program by another process: a child that another test starts meanwhile would inherit our descriptor for
/// writing, and the copy could not be executed (`ETXTBSY`).
fn copy_of_this_program(to: &std::path::Path) {
    let this = std::env::current_exe().unwrap();
    let cp = std::process::Command::new("cp").args([&*this, to]).status();
    assert!(cp.unwrap().success());
}
