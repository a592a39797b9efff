//! Fetching: after the start the initiator is the receiver, and the responder the sender.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};

use super::START_PATIENCE;
use super::link::{Link, LinkError};
use super::path::printable;
use super::protocol::{About, Fetch, Hello, KEEPALIVE, Message, RelPath};
use super::receiver::{self, Totals, Watch};
use super::sender::{self, Peer, Progress, Report, SendError};
use super::store::Store;
use super::walk::{Entry, Plan, Skipped};

/// The most memory of ours that an initiator's ring takes.
const MOST_RING: u64 = 64 << 20;

/// Proves the key both ways, then receives what `request` names into `store`.
pub fn fetch(
    link: &dyn Link,
    ours: &Hello,
    theirs: &Hello,
    request: Fetch,
    store: Store,
    options: &receiver::Options,
    watch: &dyn Watch,
) -> Result<Totals, SendError> {
    let started = sender::start(link, ours, theirs, options.key.as_ref(), true).and_then(|_| {
        let ring = receiver::create_ring(link, options)?;
        link.send(&Message::Fetch(Fetch { ring, ..request }))?;
        Ok(ring)
    });
    let result = started.and_then(|ring| {
        let (totals, end) = receiver::receive_all(link, ring, store, options, true, watch);
        end?;
        Ok(totals)
    });
    link.close();
    result
}

/// Tells the initiator what it does not get.
struct Tell<'a>(&'a dyn Link);

impl Tell<'_> {
    fn skipped(&self, about: About, path: &[u8], why: &str) -> Result<(), LinkError> {
        let text = format!("{}: {why}", printable(path));
        self.0.send(&Message::Notice { about, text })
    }

    fn plan(&self, text: String) {
        let about = About::Plan;
        // The next message finds out if this does not arrive.
        let _ = self.0.send(&Message::Notice { about, text });
    }
}

impl Progress for Tell<'_> {
    fn advance(&mut self, _bytes: u64, _held: bool) {}

    fn note(&mut self, line: &str) {
        // It comes from the initiator.
        tracing::debug!("{line}");
    }

    fn failed(&mut self, entry: &Entry, why: &str) {
        // The next message finds out if this does not arrive.
        let _ = self.skipped(About::Error, entry.path.as_bytes(), why);
    }

    fn would(&mut self, what: &str, path: &RelPath) {
        self.plan(format!("{what}: {path}"));
    }

    fn planned(&mut self, report: &Report) {
        self.plan(report.planned());
    }
}

/// Sends what the initiator asks for, below [`receiver::Options::serve`].
pub(super) fn give(
    link: &dyn Link,
    options: &receiver::Options,
) -> (Totals, Result<(), LinkError>) {
    let mut totals = Totals {
        started: true,
        fetched: true,
        ..Totals::default()
    };
    let given = given(link, options).map(|report| {
        totals.files = report.written;
        totals.bytes = report.bytes;
        totals.failed = report.failed;
        totals.complete = true;
    });
    let end = given.map_err(|e| match e {
        SendError::Link(e) => e,
        e => LinkError::Gone(e.to_string()),
    });
    (totals, end)
}

fn given(link: &dyn Link, options: &receiver::Options) -> Result<Report, SendError> {
    let violation = |text: &str| LinkError::Violation(text.into());
    let Some(dir) = &options.serve else {
        return Err(violation("nothing is given").into());
    };
    let request = match link.recv(START_PATIENCE)? {
        Some(Message::Fetch(request)) => request,
        Some(_) => return Err(violation("the second message is not FETCH").into()),
        None => return Err(LinkError::Gone("the peer asked for nothing".into()).into()),
    };
    let ring = request.ring;
    if u64::from(ring.slots) * u64::from(ring.slot_len) > MOST_RING {
        return Err(violation("a ring that is too large").into());
    }
    link.use_ring(ring)?;
    let mut tell = Tell(link);
    let plan = look(link, dir, &request)?;
    for Skipped { source, why, error } in &plan.skipped {
        // Where the directory is does not concern the initiator.
        let path = source.strip_prefix(dir).unwrap_or(source);
        let path = path.as_os_str().as_bytes();
        let about = if *error { About::Error } else { About::LeftOut };
        tell.skipped(about, if path.is_empty() { b"." } else { path }, why)?;
    }
    let peer = Peer {
        ring,
        attributes: request.what.attributes,
    };
    let options = sender::Options {
        key: None,
        flags: request.flags,
        update: request.update,
        archive: request.what.attributes,
        dry_run: request.dry_run,
        limit_rate: (request.limit_rate > 0).then_some(request.limit_rate),
        patience: options.patience,
    };
    sender::send_all(link, peer, &plan, &options, &mut tell)
}

/// Looks at what is asked for, which can take long: the initiator hears that we are alive.
fn look(link: &dyn Link, dir: &Path, request: &Fetch) -> Result<Plan, LinkError> {
    std::thread::scope(|scope| {
        let (tell, found) = channel();
        scope.spawn(move || {
            // Fails only if the connection has ended.
            let _ = tell.send(Plan::beneath(dir, &request.paths, request.what));
        });
        loop {
            match found.recv_timeout(KEEPALIVE) {
                Ok(Ok(plan)) => return Ok(plan),
                Ok(Err(e)) => {
                    tracing::error!("{}: {e}", dir.display());
                    return Err(LinkError::Gone("its directory cannot be read".into()));
                }
                Err(RecvTimeoutError::Timeout) => link.keepalive()?,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(LinkError::Local("the looking thread panicked".into()));
                }
            }
        }
    })
}
