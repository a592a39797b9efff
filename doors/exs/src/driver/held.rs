//! The state of a connection's file sends, and of the operations that wait behind them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::op::Target;
use super::timer::Alarms;
use crate::file::FileSend;
use crate::{Memory, Piece};

/// An operation that waits behind a file send.
pub(super) enum Held {
    Send(Memory, Target, u64, Option<Instant>),
    File(Waiting),
    Shutdown(Option<(Target, u64)>),
    Close(Option<(Target, u64)>),
}

/// A file send that has not started.
pub(super) struct Waiting {
    pub(super) pieces: Vec<Piece>,
    pub(super) target: Target,
    pub(super) token: u64,
    pub(super) deadline: Option<Instant>,
}

/// The current file send, and the operations behind it.
#[derive(Default)]
pub(super) struct Files {
    pub(super) current: Option<Current>,
    pub(super) behind: VecDeque<Held>,
    pub(super) alarms: Alarms,
}

#[derive(Clone)]
pub(super) struct Current {
    pub(super) token: u64,
    pub(super) deadline: Option<Instant>,
    pub(super) send: FileSend,
    /// No more parts are accepted; changed under the lock of the connection.
    pub(super) stopped: Arc<AtomicBool>,
}

impl Held {
    /// The token and the deadline, for operations that can be cancelled.
    pub(super) fn terms(&self) -> Option<(u64, Option<Instant>)> {
        match self {
            Held::Send(_, _, token, deadline) => Some((*token, *deadline)),
            Held::File(file) => Some((file.token, file.deadline)),
            Held::Shutdown(_) | Held::Close(_) => None,
        }
    }
}
