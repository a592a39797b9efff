//! Warnings that a peer can cause at any rate: a bounded number of lines a second.

use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use smallvec::SmallVec;

use crate::engine::Engine;
use crate::lock::lock;
use crate::timer;

/// The least time between two lines.
const PERIOD: Duration = Duration::from_secs(1);

/// The warnings of one listener. The first is logged at once. Those that follow within [`PERIOD`] are counted, and one line at its end has
/// the number of each kind. This repeats until a period passes without a warning.
#[derive(Default)]
pub(crate) struct Warnings(Mutex<Issued>);

impl Warnings {
    /// Log or count a warning: what happened, the peer that it is about, and the error behind it.
    pub(crate) fn warn(
        self: &Arc<Self>,
        engine: &Arc<Engine>,
        what: &'static str,
        peer: Option<SocketAddr>,
        error: Option<&dyn Display>,
    ) {
        if lock(&self.0).count(what, peer) {
            return;
        }
        let peer = peer.map(tracing::field::display);
        let error = error.map(tracing::field::display);
        tracing::warn!(peer, error, "{what}");
        let warnings = Arc::clone(self);
        timer::after(engine, PERIOD, move || {
            let counted = lock(&warnings.0).take()?;
            let last_peer = counted.last_peer.map(tracing::field::display);
            let count = counted.kinds.iter().map(|(_, n)| n).sum::<u64>();
            tracing::warn!(count, last_peer, "more within a second: {counted}");
            Some(PERIOD)
        });
    }
}

/// The counts since the last line.
#[derive(Default)]
struct Issued {
    /// A period has begun and not ended: warnings are counted.
    counts: bool,
    counted: Counted,
}

#[derive(Default)]
struct Counted {
    kinds: SmallVec<[(&'static str, u64); 4]>,
    last_peer: Option<SocketAddr>,
}

impl Issued {
    /// Counts a warning. False: it begins a period, and has to be logged.
    fn count(&mut self, what: &'static str, peer: Option<SocketAddr>) -> bool {
        if !std::mem::replace(&mut self.counts, true) {
            return false;
        }
        let counted = &mut self.counted;
        match counted.kinds.iter_mut().find(|(kind, _)| *kind == what) {
            Some((_, n)) => *n += 1,
            None => counted.kinds.push((what, 1)),
        }
        counted.last_peer = peer.or(counted.last_peer);
        true
    }

    /// The period ends. `None`: nothing was counted in it, and the next warning is logged at once.
    fn take(&mut self) -> Option<Counted> {
        let counted = std::mem::take(&mut self.counted);
        self.counts = !counted.kinds.is_empty();
        self.counts.then_some(counted)
    }
}

impl Display for Counted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (kind, n)) in self.kinds.iter().enumerate() {
            let comma = if i > 0 { ", " } else { "" };
            write!(f, "{comma}{kind} ({n} times)")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_at_once_then_one_line_a_period() {
        let peer = |port| Some(SocketAddr::from(([127, 0, 0, 1], port)));
        let mut issued = Issued::default();
        assert!(!issued.count("full", peer(1)), "the first is logged");
        for port in 2..=10_000 {
            let what = if port % 2 == 0 { "full" } else { "no TLS" };
            assert!(issued.count(what, peer(port)));
        }
        assert!(issued.count("full", None), "of a peer without an address");
        let counted = issued.take().expect("more followed");
        assert_eq!(
            counted.to_string(),
            "full (5001 times), no TLS (4999 times)"
        );
        assert_eq!(counted.last_peer, peer(10_000));
        assert!(issued.count("full", peer(1)), "the flood goes on");
        assert_eq!(
            issued.take().expect("one more").to_string(),
            "full (1 times)"
        );
        assert!(issued.take().is_none(), "it is over");
        assert!(!issued.count("full", peer(1)), "a first one again");
    }
}
