//! The life of a stream (RFC 5040 section 6, seen from one side).
//!
//! ```text
//!              fail: our Terminate is queued
//!      Open ----------------------------------> Terminating
//!       | \                                          |
//!       |  \  the peer's Terminate                   |
//!       |   `-----------------> Terminated           |
//!       |                           |                |
//!       | flush                     | flush          | flush
//!       v                           v                v
//!     Closed <-----------------------------------------
//! ```
//!
//! | from \ input | `Fail`        | `PeerTerminate` | `Flush`  |
//! |--------------|---------------|-----------------|----------|
//! | Open         | `Terminating` | `Terminated`    | `Closed` |
//! | Terminating  | stay          | stay            | `Closed` |
//! | Terminated   | stay          | stay            | `Closed` |
//! | Closed       | stay          | stay            | stay     |

/// The state of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Work flows both ways.
    Open,
    /// We found a fault: our Terminate is queued or handed out, nothing else is sent or accepted.
    Terminating,
    /// The peer sent a Terminate: nothing is sent or accepted.
    Terminated,
    /// [`flush`](super::Stream::flush) was called: every work request is or becomes complete.
    Closed,
}

/// The events that change a stream's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    Fail,
    PeerTerminate,
    Flush,
}

impl State {
    pub(super) const fn on(self, input: Input) -> Self {
        match (self, input) {
            (Self::Open, Input::Fail) => Self::Terminating,
            (Self::Open, Input::PeerTerminate) => Self::Terminated,
            (_, Input::Flush) => Self::Closed,
            (state, Input::Fail | Input::PeerTerminate) => state,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Input, State};

    /// Reads the table of the module's own documentation, so that neither can change alone.
    #[test]
    fn the_table_in_the_documentation_is_the_machine() {
        let inputs = [Input::Fail, Input::PeerTerminate, Input::Flush];
        let states = [
            State::Open,
            State::Terminating,
            State::Terminated,
            State::Closed,
        ];
        let mut rows = 0;
        for line in include_str!("state.rs").lines() {
            let Some(row) = line.strip_prefix("//! | ") else {
                continue;
            };
            let cells: Vec<&str> = row
                .split('|')
                .map(|cell| cell.trim().trim_matches('`'))
                .collect();
            let Some(from) = states.iter().find(|s| format!("{s:?}") == cells[0]) else {
                continue;
            };
            rows += 1;
            for (input, cell) in inputs.iter().zip(&cells[1..]) {
                let expected = if *cell == "stay" {
                    format!("{from:?}")
                } else {
                    (*cell).to_owned()
                };
                assert_eq!(
                    format!("{:?}", from.on(*input)),
                    expected,
                    "{from:?} on {input:?}"
                );
            }
        }
        assert_eq!(rows, states.len());
    }
}
