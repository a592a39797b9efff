//! What a connection keeps of file sends, and of what waits behind them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::op::Target;
use super::timer::Alarms;
use crate::file::FileSend;
use crate::{Memory, Piece};

/// What waits behind a file send.
pub(super) enum Held {
    Send(Memory, Target, u64, Option<Instant>),
    File(Waiting),
    Shutdown(Option<(Target, u64)>),
    Close(Option<(Target, u64)>),
}

/// A file send that has not begun.
pub(super) struct Waiting {
    pub(super) pieces: Vec<Piece>,
    pub(super) target: Target,
    pub(super) token: u64,
    pub(super) deadline: Option<Instant>,
}

/// The file send that has the way, and those behind it.
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
    /// No more parts are taken; changes under the lock of the connection.
    pub(super) stopped: Arc<AtomicBool>,
}

impl Held {
    /// The token and the deadline of what can be cancelled.
    pub(super) fn terms(&self) -> Option<(u64, Option<Instant>)> {
        match self {
            Held::Send(_, _, token, deadline) => Some((*token, *deadline)),
            Held::File(file) => Some((file.token, file.deadline)),
            Held::Shutdown(_) | Held::Close(_) => None,
        }
    }
}
