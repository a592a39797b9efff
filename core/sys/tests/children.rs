//! What a child and its parent have of each other. These tests are a program of their own: until a child has ended, or runs its own program, it keeps a
//! copy of every descriptor, so that a test beside it would wait in vain for the end of a socket.

use std::sync::{Arc, Barrier};
use weft_sys::PerProcess;
use weft_sys::process::{pidfd_open, shares_user_namespace};

/// As [`PerProcess::get`] with something that cannot fail.
fn get(one: &'static PerProcess<u32>, make: impl FnOnce() -> u32) -> u32 {
    let made = one.get(|| Ok::<_, std::convert::Infallible>(Arc::new(make())));
    *made.unwrap()
}

#[test]
fn a_child_waits_for_no_thread_of_its_parent() {
    static ONE: PerProcess<u32> = PerProcess::new();
    static TURNS: Barrier = Barrier::new(2);
    let slow = std::thread::spawn(|| {
        get(&ONE, || {
            TURNS.wait();
            TURNS.wait();
            1
        })
    });
    TURNS.wait();
    // SAFETY: the child makes a value and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above; if it hangs, a signal ends it.
        unsafe {
            libc::alarm(20);
            libc::_exit(i32::from(get(&ONE, || 2) != 2 || get(&ONE, || 3) != 2));
        }
    }
    let mut status = -1;
    // SAFETY: a place for the status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    TURNS.wait();
    assert_eq!(status, 0, "the child made its own");
    assert_eq!((slow.join().unwrap(), get(&ONE, || 4)), (1, 1));
}

#[test]
fn a_process_that_has_ended_shares_no_namespace() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let gone = pidfd_open(child.id()).unwrap();
    child.wait().unwrap();
    assert!(!shares_user_namespace(&gone));
}
