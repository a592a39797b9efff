//! One end's state of a meeting through a folder.

use libc::c_int;
use std::path::PathBuf;

use weft_run::folder::{Acceptor, Dialled};

use crate::hidden::Own;
use crate::lock;

#[derive(Debug)]
pub(crate) enum Meeting {
    Dialler(Own, Dialled),
    Acceptor(
        #[expect(dead_code, reason = "it is removed with the meeting")] SocketFile,
        Acceptor<Own>,
    ),
}

impl Meeting {
    /// The numbers of its wires.
    pub(crate) fn wires(&mut self) -> impl Iterator<Item = &mut c_int> {
        let (dialled, accepted) = match self {
            Meeting::Dialler(wire, _) => (Some(wire), None),
            Meeting::Acceptor(_, acceptor) => (None, Some(acceptor.wires())),
        };
        let wires = dialled.into_iter().chain(accepted.into_iter().flatten());
        wires.map(|own| &mut own.0)
    }

    /// Whether its next step is due.
    pub(crate) fn is_under_way(&self) -> bool {
        match self {
            Meeting::Dialler(..) => true,
            Meeting::Acceptor(_, acceptor) => acceptor.has_diallers(),
        }
    }
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
