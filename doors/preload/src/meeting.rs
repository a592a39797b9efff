//! One end's state of a meeting through a folder.

use libc::c_int;
use std::path::PathBuf;

use weft_run::folder::{Acceptor, Dialled};

use crate::lock;

#[derive(Debug)]
pub(crate) enum Meeting {
    /// With the wire, hidden.
    Dialler(c_int, Dialled),
    Acceptor(
        #[expect(dead_code, reason = "it is removed with the meeting")] SocketFile,
        Acceptor,
    ),
}

/// The listening socket's file, which is removed with this.
#[derive(Debug)]
pub(crate) struct SocketFile {
    path: PathBuf,
    process: u32,
}

impl SocketFile {
    pub(crate) fn new(path: PathBuf) -> SocketFile {
        let process = lock::own();
        SocketFile { path, process }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // What a child of a fork has is its parent's.
        if self.process == lock::own() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
