//! Settings of the whole process: permission for connections to leave TCP, and how soon they look for their peers.

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};

use weft_run::pace;

use crate::ledger::say;

/// `WEFT_RUN_LOOK`: after how many sends and receives a socket looks for its peer.
static FIRST_LOOK: AtomicU64 = AtomicU64::new(pace::FIRST_LOOK);

pub(crate) fn first_look() -> u64 {
    FIRST_LOOK.load(Relaxed)
}

pub(crate) fn look_after(n: u64) {
    FIRST_LOOK.store(n, Relaxed);
}

/// The process does what we cannot see: no socket leaves the kernel any more.
static OFF: AtomicBool = AtomicBool::new(false);

pub(crate) fn turn_off() {
    OFF.store(true, SeqCst);
}

/// A setting is not accepted: the process is told when it has a socket, because most processes of a script have none.
pub(crate) fn refuse(why: String) {
    if REFUSED.set(why).is_ok() {
        turn_off();
    }
}

static REFUSED: OnceLock<String> = OnceLock::new();
static TOLD: AtomicBool = AtomicBool::new(false);

pub(crate) fn is_off() -> bool {
    let off = OFF.load(Relaxed);
    if off
        && let Some(why) = REFUSED.get()
        && !TOLD.swap(true, Relaxed)
    {
        say(why);
    }
    off
}
