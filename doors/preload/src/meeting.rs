//! One end's state of a meeting through a folder.

use libc::c_int;
use std::path::PathBuf;

use weft_run::folder::{Acceptor, Dialled};

use crate::hidden::Own;
#[derive(Debug)]
pub(crate) enum Meeting {
    Dialler(Own, Dialled),
    Acceptor(SocketFile, Acceptor<Own>),
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

    /// Another process has the socket, and may go on: the file stays.
    pub(crate) fn leave(mut self) {
        if let Meeting::Acceptor(file, _) = &mut self {
            file.0 = None;
        }
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
pub(crate) struct SocketFile(pub(crate) Option<PathBuf>);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}
