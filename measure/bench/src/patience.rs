//! Time limits of a benchmark for the programs that it has started.

use crate::error::{BenchError, Result};
use std::time::{Duration, Instant};

/// The time that either side waits for the other before it gives up.
pub const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until a condition on a started program holds.
pub fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        if Instant::now() > end {
            return Err(BenchError::PeerGone(format!("{what} does not answer")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
