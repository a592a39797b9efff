//! Deregistered regions that are still in use.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::device::PdInner;
use crate::engine::guarded;
use crate::timer;

/// Between two looks: at first, and from [`SOON`] on.
const LOOK: Duration = Duration::from_millis(1);
const LOOK_LATER: Duration = Duration::from_millis(10);
const SOON: Duration = Duration::from_millis(50);

/// The result of [`Mr::retire`](crate::Mr::retire): a region without keys, whose memory a peer of this host or a thread of this process
/// still uses. Dropping it is as dropping the region.
pub struct PendingDereg {
    pub(crate) region: weft_mem::PendingRelease,
    pub(crate) pd: Arc<PdInner>,
}

impl PendingDereg {
    /// Calls `done` on the engine's thread when the memory is no longer used, with the buffer if it was a region of one. The connection of
    /// a peer that still uses it after three seconds ends.
    pub fn then(self, done: impl FnOnce(Option<Vec<u8>>) + Send + 'static) {
        let engine = Arc::clone(&self.pd.device.engine);
        let since = Instant::now();
        let mut left = Some((self, done));
        timer::after(&engine, LOOK, move || {
            let (PendingDereg { region, pd }, done) = left.take()?;
            match region.finish() {
                Ok(buffer) => {
                    guarded(|| done(buffer));
                    None
                }
                Err(region) => {
                    left = Some((PendingDereg { region, pd }, done));
                    let late = since.elapsed() > SOON;
                    Some(if late { LOOK_LATER } else { LOOK })
                }
            }
        });
    }
}
