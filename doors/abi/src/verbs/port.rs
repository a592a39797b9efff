//! The ports of the two devices. A script of faults can take a port down: it then sends and receives nothing.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use weft_verbs::ext::QpExt;
use weft_verbs::{Qp, WcStatus};

use super::context::Context;
use super::events::Subject;
use super::object::{Inherited, Kind, PerFork, lock};
use super::types::{IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, ibv_event_type};
use super::which::Which;

/// The interval of the checks for sends that wait for a port.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Default)]
pub(crate) struct Port {
    /// Datagrams are lost while this is set.
    down: AtomicBool,
    /// Connected queue pairs by number, of processes that have a script. Held while the port goes down or comes up.
    members: Mutex<HashMap<u32, Member>>,
}

struct Member {
    qp: Weak<Qp>,
    /// How long a send may wait; `None`: for ever.
    patience: Option<Duration>,
    /// The start of the present wait of sends.
    waiting: Option<Instant>,
}

#[derive(Default)]
struct Ports([Port; 2]);

impl Inherited for Ports {}

pub(crate) fn of(which: Which) -> &'static Port {
    static PORTS: PerFork<Ports> = PerFork::new();
    &PORTS.get().0[which as usize]
}

impl Port {
    pub(crate) fn is_down(&self) -> bool {
        self.down.load(Ordering::Relaxed)
    }

    /// The flag that datagram queue pairs check.
    pub(crate) fn down(&'static self) -> &'static AtomicBool {
        &self.down
    }

    /// Adds this queue pair, in place of another one of its number.
    pub(crate) fn add(&self, qp: &Arc<Qp>) {
        let mut members = lock(&self.members);
        let member = Member {
            qp: Arc::downgrade(qp),
            patience: None,
            waiting: None,
        };
        members.insert(qp.num(), member);
        if self.is_down() {
            qp.pause(true);
        }
    }

    /// The queue pair with this number ends.
    pub(crate) fn remove(&self, num: u32) {
        lock(&self.members).remove(&num);
    }

    /// Sets how long its sends wait before they fail: the transport timer with its retries.
    pub(crate) fn set_patience(&self, num: u32, patience: Duration) {
        if let Some(member) = lock(&self.members).get_mut(&num) {
            member.patience = Some(patience);
        }
    }

    /// Sets the state; returns true if it was different.
    fn set(&self, which: Which, down: bool) -> bool {
        let members = lock(&self.members);
        if self.down.swap(down, Ordering::Relaxed) == down {
            return false;
        }
        // Before any of its consequences.
        if !down {
            tell(which, IBV_EVENT_PORT_ACTIVE);
        }
        for qp in members.values().filter_map(|member| member.qp.upgrade()) {
            qp.pause(down);
        }
        if down {
            tell(which, IBV_EVENT_PORT_ERR);
        }
        true
    }

    /// Queue pairs whose sends have waited too long.
    fn late(&self, now: Instant) -> Vec<Arc<Qp>> {
        let mut members = lock(&self.members);
        let late = members.values_mut().filter_map(|member| {
            let qp = member.qp.upgrade()?;
            if qp.outstanding() == 0 {
                member.waiting = None;
                return None;
            }
            let since = *member.waiting.get_or_insert(now);
            let patience = member.patience?;
            (now.saturating_duration_since(since) >= patience).then_some(qp)
        });
        late.collect()
    }
}

/// Takes the port down, and up again after this time, or never. Does nothing when it is down already.
pub(crate) fn take_down(which: Which, time: Option<Duration>) {
    let port = of(which);
    if !port.set(which, true) {
        return;
    }
    let up = time.and_then(|time| Instant::now().checked_add(time));
    let watch = move || {
        loop {
            let now = Instant::now();
            if up.is_some_and(|up| up <= now) {
                port.set(which, false);
                return;
            }
            for qp in port.late(now) {
                qp.fail(WcStatus::RetryExcErr);
            }
            let left = up.map_or(LOOK, |up| up.saturating_duration_since(now));
            std::thread::sleep(left.min(LOOK));
        }
    };
    if let Err(error) = std::thread::Builder::new().spawn(watch) {
        tracing::warn!(%error, "no thread to bring the port up again: it is up now");
        port.set(which, false);
    }
}

/// Raises an event of port 1 in every open context of the device.
fn tell(which: Which, event: ibv_event_type) {
    const PORT: *mut u8 = std::ptr::without_provenance_mut(1);
    for context in Context::pool().all().filter(|c| c.ctx.which == which) {
        context.ctx.events.push(&Subject::new(PORT), event);
    }
}
