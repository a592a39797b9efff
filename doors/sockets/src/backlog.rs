//! Connections of a listening socket. One is made as soon as its peer comes, up to the backlog, as a kernel does it for TCP; accepting only hands
//! it over.

use std::collections::VecDeque;
use std::sync::Mutex;

use rustix::io::Errno;

use crate::bell::Bell;
use crate::lock::lock;

/// Connections that wait to be accepted.
pub struct Backlog<T> {
    most: usize,
    state: Mutex<State<T>>,
}

struct State<T> {
    ready: VecDeque<T>,
    /// Connections being made.
    making: usize,
    closed: bool,
}

impl<T> Backlog<T> {
    /// Of at most so many, and one at least.
    pub fn new(most: u32) -> Self {
        Self {
            most: most.max(1) as usize,
            state: Mutex::new(State {
                ready: VecDeque::new(),
                making: 0,
                closed: false,
            }),
        }
    }

    /// A peer has come: make its connection, unless there are too many, and ring.
    pub fn take(&self, bell: &Bell, make: impl FnOnce() -> Result<T, Errno>) {
        {
            let mut state = lock(&self.state);
            if state.closed || state.ready.len() + state.making >= self.most {
                // Dropping a request rejects it.
                return;
            }
            state.making += 1;
        }
        let made = make();
        let mut state = lock(&self.state);
        state.making -= 1;
        match made {
            Ok(made) if !state.closed => state.ready.push_back(made),
            Ok(_) => return,
            Err(error) => return tracing::debug!(%error, "a connection could not be accepted"),
        }
        drop(state);
        bell.ring();
    }

    /// The oldest one.
    ///
    /// # Errors
    /// `EINVAL` when the socket is closed.
    pub fn pop(&self) -> Option<Result<T, Errno>> {
        let mut state = lock(&self.state);
        if state.closed {
            return Some(Err(Errno::INVAL));
        }
        state.ready.pop_front().map(Ok)
    }

    /// Whether a connection waits.
    pub fn is_ready(&self) -> bool {
        !lock(&self.state).ready.is_empty()
    }

    /// Closes the backlog, and returns the connections that were not accepted.
    pub fn close(&self) -> VecDeque<T> {
        let mut state = lock(&self.state);
        state.closed = true;
        std::mem::take(&mut state.ready)
    }
}
