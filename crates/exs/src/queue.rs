//! Event queues.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use crate::{Context, Event};

/// How a queue's owner waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Look for a while, then sleep.
    Adaptive,
    /// Sleep at once.
    Notify,
    /// Never sleep.
    BusyPoll,
}

/// A queue of events.
#[derive(Clone)]
pub struct Queue(pub(crate) Arc<QueueInner>);

pub(crate) struct QueueInner {}

#[allow(missing_docs, clippy::todo, unused_variables)]
impl Queue {
    pub fn new(context: &Context, depth: usize) -> Result<Queue, Errno> {
        todo!()
    }
    pub fn dequeue(
        &self,
        out: &mut Vec<Event>,
        max: usize,
        at_least: usize,
        timeout: Option<Duration>,
    ) -> Result<usize, Errno> {
        todo!()
    }
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        todo!()
    }
    pub fn set_wait(&self, wait: Wait) {
        todo!()
    }
    pub fn wait_mode(&self) -> Wait {
        todo!()
    }
    pub fn set_signal(&self, on: bool) {
        todo!()
    }
    pub fn signal(&self) -> bool {
        todo!()
    }
    pub fn set_depth(&self, depth: usize) -> Result<(), Errno> {
        todo!()
    }
    pub fn depth(&self) -> usize {
        todo!()
    }
    pub fn waiting(&self) -> usize {
        todo!()
    }
    pub fn outstanding(&self) -> usize {
        todo!()
    }
    pub fn delete(&self) {
        todo!()
    }
}
