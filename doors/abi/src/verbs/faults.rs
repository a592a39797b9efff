//! `WEFT_FAULTS`: injected faults, at the same places in every run. [`weft_verbs::faults`] specifies the script.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use weft_verbs::ext::QpExt;
use weft_verbs::faults::{Action, Post, Script};
use weft_verbs::{Qp, RoceFault, RoceFaults, RoceQp, SendWr, Sge, settings};

use super::object::{PerFork, lock};
use super::port;
use super::types::IBV_WC_WR_FLUSH_ERR;
use super::which::Which;
use crate::once::ForkOnce;

/// The script that the environment names, read once.
///
/// # Errors
/// The script or its error, which opening a device reports.
pub(crate) fn script() -> Result<Option<&'static Script>, &'static str> {
    static SCRIPT: ForkOnce<Result<Option<Script>, String>> = ForkOnce::new();
    let read = || {
        let Some(path) = settings::FAULTS.path() else {
            return Ok(None);
        };
        let text = std::fs::read_to_string(&path).map_err(|e| e.to_string());
        text.and_then(|text| Script::parse(&text).map_err(|e| e.to_string()))
            .map(Some)
            .map_err(|what| format!("WEFT_FAULTS={}: {what}", path.display()))
    };
    match SCRIPT.get_or_init(read) {
        Ok(script) => Ok(script.as_ref()),
        Err(what) => Err(what),
    }
}

/// A queue pair's position in the script.
pub(crate) struct QpFaults {
    script: &'static Script,
    index: u32,
    which: Which,
    sends: AtomicU64,
    recvs: AtomicU64,
    packets: AtomicU64,
    /// The status that replaces that of the next failed send; -1: none.
    status: AtomicI32,
}

impl QpFaults {
    /// For a new queue pair.
    fn new(script: &'static Script, which: Which) -> QpFaults {
        static MADE: AtomicU32 = AtomicU32::new(0);
        QpFaults {
            script,
            index: MADE.fetch_add(1, Ordering::Relaxed) + 1,
            sends: AtomicU64::new(0),
            which,
            recvs: AtomicU64::new(0),
            packets: AtomicU64::new(0),
            status: AtomicI32::new(-1),
        }
    }

    /// The actions that the script has for a posted request.
    fn post(&self, post: Post) -> impl Iterator<Item = Action> + use<> {
        let counter = match post {
            Post::Send => &self.sends,
            Post::Recv => &self.recvs,
            Post::Packet => &self.packets,
        };
        let n = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let index = self.index;
        self.script.at(post, index, n).inspect(move |action| {
            tracing::info!("fault on purpose: {post} {n} on {index}: {action}");
        })
    }

    /// The next failed send is reported with this status.
    fn fail_with(&self, status: u32) {
        self.status.store(status as i32, Ordering::Release);
    }

    /// The status to report for a failed send.
    fn status(&self, own: u32) -> u32 {
        u32::try_from(self.status.swap(-1, Ordering::AcqRel)).unwrap_or(own)
    }
}

/// Queue pairs with rules in the script, by number.
static CONCERNED: PerFork<Mutex<HashMap<u32, Arc<QpFaults>>>> = PerFork::new();

/// True if there is a script: checked when a completion with an error is reported.
static SCRIPTED: AtomicBool = AtomicBool::new(false);

/// The faults of a new queue pair with this number, if there is a script. [`QpFaults::forget`] ends it.
pub(crate) fn of_queue_pair(num: u32, which: Which) -> Option<Arc<QpFaults>> {
    let script = script().ok()??;
    SCRIPTED.store(true, Ordering::Relaxed);
    let faults = Arc::new(QpFaults::new(script, which));
    lock(CONCERNED.get()).insert(num, Arc::clone(&faults));
    Some(faults)
}

/// The status to report for a send that failed.
pub(crate) fn reported(qp_num: u32, own: u32) -> u32 {
    if !SCRIPTED.load(Ordering::Relaxed) || own == IBV_WC_WR_FLUSH_ERR {
        return own;
    }
    let faults = lock(CONCERNED.get()).get(&qp_num).cloned();
    faults.map_or(own, |faults| faults.status(own))
}

/// The end of a queue pair that happens before the request of a rule is posted: after posting, the progress of the request would depend on timing.
pub(crate) struct End(Option<Action>);

impl End {
    pub(crate) fn carry_out(&self, qp: &Qp) {
        match self.0 {
            Some(Action::Terminate) => qp.to_error(),
            Some(Action::Die) => qp.cut(),
            _ => {}
        }
    }

    /// RoCE has no message that says it: the peer's next send fails.
    pub(crate) fn carry_out_on(&self, qp: &RoceQp) {
        if self.0.is_some() {
            qp.to_error();
        }
    }
}

impl RoceFaults for QpFaults {
    fn of_packet(&self) -> Option<RoceFault> {
        // Each of the rules is logged, and the first one is carried out.
        let faults = self.post(Post::Packet).filter_map(|action| match action {
            Action::Packet(fault) => Some(fault),
            _ => None,
        });
        faults.fold(None, |first, fault| first.or(Some(fault)))
    }

    fn is_down(&self) -> bool {
        port::of(self.which).is_down()
    }
}

impl QpFaults {
    /// Before a send: may change it or delay it.
    pub(crate) fn before_send(&self, wr: &mut SendWr) -> End {
        self.before(Post::Send, |status| {
            // An invalid key makes it fail in its turn; the status is replaced when it is reported.
            wr.inline = None;
            wr.sges.clear();
            wr.sges.push(Sge {
                addr: 0,
                len: 8,
                lkey: 0,
            });
            self.fail_with(status);
        })
    }

    /// Before a receive: may delay it.
    pub(crate) fn before_recv(&self) -> End {
        self.before(Post::Recv, |_| ())
    }

    fn before(&self, post: Post, mut fail: impl FnMut(u32)) -> End {
        let mut end = None;
        for action in self.post(post) {
            match action {
                Action::Delay(time) => std::thread::sleep(time),
                Action::Complete(status) => fail(status),
                Action::PortDown(time) => port::take_down(self.which, time),
                Action::Packet(_) => {}
                Action::Terminate | Action::Die => end = Some(action),
            }
        }
        End(end)
    }

    /// The queue pair with this number ends.
    pub(crate) fn forget(num: u32) {
        lock(CONCERNED.get()).remove(&num);
    }
}
