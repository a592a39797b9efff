//! The folders in which `posix_spawn` looks for a program by its relative path: those that its file actions go to.
//!
//! # Safety
//!
//! As the manual pages say. A list of actions is only a key here.

use libc::{c_char, c_int, c_void};
use std::path::PathBuf;

use crate::child_env::path;
use crate::next;
use crate::private::{Guards, Held, Private};

/// The folder of each list of actions that has one.
static FOLDERS: Private<Vec<(usize, PathBuf)>> = Private::new(Guards::Folders, Vec::new());

/// Held while a fork is made. `None`: this thread holds it already.
pub(crate) fn before_fork() -> Option<Held<Vec<(usize, PathBuf)>>> {
    FOLDERS.lock_once()
}

/// The folder of a list of actions; empty if the list leaves the caller's.
pub(crate) fn folder(actions: *const c_void) -> PathBuf {
    let folders = FOLDERS.lock();
    let found = folders.iter().find(|(of, _)| *of == actions.addr());
    found.map(|(_, folder)| folder.clone()).unwrap_or_default()
}

fn forget(actions: *const c_void) {
    FOLDERS.lock().retain(|(of, _)| *of != actions.addr());
}

/// The list has another action, which goes to a folder from the one so far.
fn goes_to(actions: *const c_void, to: PathBuf) {
    let mut folders = FOLDERS.lock();
    match folders.iter_mut().find(|(of, _)| *of == actions.addr()) {
        Some((_, folder)) => folder.push(to),
        None => folders.push((actions.addr(), to)),
    }
}

weft_sys::interpose! {
    "C-unwind"

    fn posix_spawn_file_actions_init(actions: *mut c_void) -> c_int {
        forget(actions);
        next::posix_spawn_file_actions_init(actions)
    }

    fn posix_spawn_file_actions_destroy(actions: *mut c_void) -> c_int {
        forget(actions);
        next::posix_spawn_file_actions_destroy(actions)
    }

    fn posix_spawn_file_actions_addchdir_np(actions: *mut c_void, to: *const c_char) -> c_int {
        let rc = next::posix_spawn_file_actions_addchdir_np(actions, to);
        if rc == 0 && let Some(to) = path(to) {
            goes_to(actions, to);
        }
        rc
    }

    fn posix_spawn_file_actions_addfchdir_np(actions: *mut c_void, to: c_int) -> c_int {
        let rc = next::posix_spawn_file_actions_addfchdir_np(actions, to);
        if rc == 0 {
            goes_to(actions, format!("/proc/self/fd/{to}").into());
        }
        rc
    }
}
