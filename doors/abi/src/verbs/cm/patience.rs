//! How long the connection managers wait for a listener that is about to listen.

use std::time::Duration;

/// How long a request is repeated that no listener has taken: as long as TCP waits before it repeats a lost SYN (RFC 6298), and a fraction of `rdma_cm`'s
/// time-out for an answer, 4.3 s.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);
/// The pauses before a repetition: each is twice as long as the last one, up to a maximum.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(1);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(32);
