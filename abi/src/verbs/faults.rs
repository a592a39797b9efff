//! `WEFT_FAULTS`: faults that happen on purpose, at the same places in every run.
//!
//! A script has one rule a line; what stands behind `#` is a remark.
//!
//! ```text
//! seed 7                                   # for `random`; 0 unless given
//! send 100 on 1: complete RETRY_EXC_ERR    # the 100th send posted on the first queue pair made ends with this status
//! send every 1000: delay 5ms               # on each queue pair, each 1000th call that posts returns late
//! send random 0.0001: die                  # one in ten thousand: the connection breaks, without a word
//! recv 10 on 2: terminate                  # the connection is ended by an error, the peer is told
//! send 5000: port down 200ms               # IBV_EVENT_PORT_ERR, and IBV_EVENT_PORT_ACTIVE after that time
//! ```
//!
//! Requests are counted for each queue pair from 1, queue pairs in the order in which they were made. Nothing depends on time or threads but the
//! order in which the program itself makes its calls, so that a run can be repeated. `docs/verbs.md` has the text for users.

use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use weft_verbs::{Qp, SendWr, Sge};

use super::context::Context;
use super::device::Which;
use super::events::Subject;
use super::object::{Kind, PerFork, lock};
use super::types::{
    IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR, IBV_WC_WR_FLUSH_ERR, ibv_event_type,
};
use crate::made::Made;

/// What a rule counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Post {
    Send,
    Recv,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// The request with this number, from 1.
    Nth(u64),
    Every(u64),
    /// With this probability.
    Random(f64),
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// The call that posts the request takes that much longer.
    Delay(Duration),
    /// The request ends with this `IBV_WC_` status, and the queue pair is in the error state.
    Complete(u32),
    /// The connection is ended by an error that the peer is told of.
    Terminate,
    /// The connection breaks.
    Die,
    /// The port goes down, and comes up again after the time.
    PortDown(Option<Duration>),
}

#[derive(Clone, Debug, PartialEq)]
struct Rule {
    post: Post,
    when: When,
    /// The queue pair, counted from 1; `None`: each of them.
    on: Option<u32>,
    action: Action,
}

/// A script.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Script {
    seed: u64,
    rules: Vec<Rule>,
}

/// What is wrong with a script, and where.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mistake {
    line: usize,
    what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

/// The statuses by their names in `ibv_wc_status`, without `IBV_WC_`; the place is the value.
const STATUSES: [&str; 23] = [
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
    "TM_ERR",
];

impl Script {
    pub(crate) fn parse(text: &str) -> Result<Script, Mistake> {
        let mut script = Script::default();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let at = |what: String| Mistake { line: number, what };
            if let Some(seed) = line.strip_prefix("seed ") {
                script.seed = number_of(seed).map_err(at)?;
            } else {
                script.rules.push(rule(line).map_err(at)?);
            }
        }
        Ok(script)
    }

    /// What happens to request `n` of queue pair `qp`, in the order of the script.
    fn at(&self, post: Post, qp: u32, n: u64) -> impl Iterator<Item = Action> {
        let hits = move |(index, rule): (usize, &Rule)| {
            let counted = rule.post == post && rule.on.is_none_or(|on| on == qp);
            let now = match rule.when {
                When::Nth(nth) => n == nth,
                When::Every(every) => n.is_multiple_of(every),
                When::Random(chance) => self.draw(index as u64, qp, n) < chance,
            };
            (counted && now).then_some(rule.action)
        };
        self.rules.iter().enumerate().filter_map(hits)
    }

    /// From 0 up to 1: the same for the same request of the same run.
    fn draw(&self, rule: u64, qp: u32, n: u64) -> f64 {
        let mut x = self.seed;
        for part in [rule, u64::from(qp), n] {
            // SplitMix64's step and finaliser.
            x = (x ^ part).wrapping_add(0x9e37_79b9_7f4a_7c15);
            x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^= x >> 31;
        }
        (x >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn rule(line: &str) -> Result<Rule, String> {
    const FORM: &str = "a rule reads `send|recv N|every N|random P [on QP]: ACTION`";
    let (left, action) = line.split_once(':').ok_or(FORM)?;
    let mut words = left.split_whitespace();
    let post = match words.next() {
        Some("send") => Post::Send,
        Some("recv") => Post::Recv,
        _ => return Err(FORM.into()),
    };
    let when = match words.next().ok_or(FORM)? {
        "every" => When::Every(positive(words.next().ok_or(FORM)?)?),
        "random" => {
            let chance = words.next().ok_or(FORM)?;
            match chance.parse() {
                Ok(p) if (0.0..=1.0).contains(&p) => When::Random(p),
                _ => return Err(format!("{chance} is not a probability from 0 to 1")),
            }
        }
        nth => When::Nth(positive(nth)?),
    };
    let on = match words.next() {
        None => None,
        Some("on") => {
            let qp = positive(words.next().ok_or(FORM)?)?;
            Some(u32::try_from(qp).map_err(|_| FORM)?)
        }
        Some(_) => return Err(FORM.into()),
    };
    if words.next().is_some() {
        return Err(FORM.into());
    }
    let action = action_of(action)?;
    if post == Post::Recv && matches!(action, Action::Complete(_)) {
        return Err("only sends can be completed with a status".into());
    }
    Ok(Rule {
        post,
        when,
        on,
        action,
    })
}

fn action_of(text: &str) -> Result<Action, String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    match *words.as_slice() {
        ["delay", time] => Ok(Action::Delay(time_of(time)?)),
        ["complete", status] => {
            let name = status.strip_prefix("IBV_WC_").unwrap_or(status);
            match STATUSES.iter().position(|s| *s == name) {
                Some(value) if value > 0 => Ok(Action::Complete(value as u32)),
                _ => Err(format!("{status} is not an error of ibv_wc_status")),
            }
        }
        ["terminate"] => Ok(Action::Terminate),
        ["die"] => Ok(Action::Die),
        ["port", "down"] => Ok(Action::PortDown(None)),
        ["port", "down", time] => Ok(Action::PortDown(Some(time_of(time)?))),
        _ => Err(format!(
            "`{}` is not an action: delay TIME, complete STATUS, terminate, die, port down [TIME]",
            text.trim()
        )),
    }
}

fn number_of(text: &str) -> Result<u64, String> {
    let text = text.trim();
    text.parse().map_err(|_| format!("{text} is not a number"))
}

fn positive(text: &str) -> Result<u64, String> {
    match number_of(text)? {
        0 => Err("requests and queue pairs are counted from 1".into()),
        n => Ok(n),
    }
}

fn time_of(text: &str) -> Result<Duration, String> {
    let mistake = || format!("{text} is not a time such as 200us, 5ms or 2s");
    let digits = text.trim_end_matches(char::is_alphabetic);
    let n: u64 = digits.parse().map_err(|_| mistake())?;
    match &text[digits.len()..] {
        "us" => Ok(Duration::from_micros(n)),
        "ms" => Ok(Duration::from_millis(n)),
        "s" => Ok(Duration::from_secs(n)),
        _ => Err(mistake()),
    }
}

/// The script that the environment names, read once.
///
/// # Errors
/// What is wrong with it; for whoever opens the device.
pub(crate) fn script() -> Result<Option<&'static Script>, &'static str> {
    static SCRIPT: Made<Result<Option<Script>, String>> = Made::new();
    let read = || {
        let Some(path) = std::env::var_os("WEFT_FAULTS").filter(|path| !path.is_empty()) else {
            return Ok(None);
        };
        let path = PathBuf::from(path);
        let text = std::fs::read_to_string(&path).map_err(|e| e.to_string());
        text.and_then(|text| Script::parse(&text).map_err(|e| e.to_string()))
            .map(Some)
            .map_err(|what| format!("WEFT_FAULTS={}: {what}", path.display()))
    };
    match SCRIPT.get_or_make(read) {
        Ok(script) => Ok(script.as_ref()),
        Err(what) => Err(what),
    }
}

/// A queue pair's place in the script.
pub(crate) struct QpFaults {
    script: &'static Script,
    index: u32,
    sends: AtomicU64,
    recvs: AtomicU64,
    /// The status that the next failure of a send is reported with; -1: its own.
    status: AtomicI32,
}

impl QpFaults {
    /// For a queue pair that is made now.
    fn new(script: &'static Script) -> QpFaults {
        static MADE: AtomicU32 = AtomicU32::new(0);
        QpFaults {
            script,
            index: MADE.fetch_add(1, Ordering::Relaxed) + 1,
            sends: AtomicU64::new(0),
            recvs: AtomicU64::new(0),
            status: AtomicI32::new(-1),
        }
    }

    /// A request is posted: what happens to it.
    fn post(&self, post: Post) -> impl Iterator<Item = Action> + use<> {
        let counter = match post {
            Post::Send => &self.sends,
            Post::Recv => &self.recvs,
        };
        let n = counter.fetch_add(1, Ordering::Relaxed) + 1;
        let index = self.index;
        self.script.at(post, index, n).inspect(move |action| {
            tracing::info!(queue_pair = index, ?post, n, ?action, "fault on purpose");
        })
    }

    /// The next send that fails is to be reported with this status.
    fn fail_with(&self, status: u32) {
        self.status.store(status as i32, Ordering::Release);
    }

    /// The status that a failed send is reported with.
    fn status(&self, own: u32) -> u32 {
        u32::try_from(self.status.swap(-1, Ordering::AcqRel)).unwrap_or(own)
    }
}

/// Queue pairs that have something coming, by number.
static CONCERNED: PerFork<Mutex<HashMap<u32, Arc<QpFaults>>>> = PerFork::new();

/// Whether there is a script at all: looked at where a completion with an error is reported.
static SCRIPTED: AtomicBool = AtomicBool::new(false);

/// The faults of a queue pair that is made with this number, if there is a script. [`QpFaults::forget`] ends it.
pub(crate) fn of_queue_pair(num: u32) -> Option<Arc<QpFaults>> {
    let script = script().ok()??;
    SCRIPTED.store(true, Ordering::Relaxed);
    let faults = Arc::new(QpFaults::new(script));
    lock(CONCERNED.get()).insert(num, Arc::clone(&faults));
    Some(faults)
}

/// The status with which a send that failed is reported.
pub(crate) fn reported(qp_num: u32, own: u32) -> u32 {
    if !SCRIPTED.load(Ordering::Relaxed) || own == IBV_WC_WR_FLUSH_ERR {
        return own;
    }
    let faults = lock(CONCERNED.get()).get(&qp_num).cloned();
    faults.map_or(own, |faults| faults.status(own))
}

/// What becomes of a queue pair before the request of a rule is posted: afterwards it would be a matter of time how far that comes.
pub(crate) struct End(Option<Action>);

impl End {
    pub(crate) fn carry_out(&self, qp: &Qp) {
        match self.0 {
            Some(Action::Terminate) => qp.to_error(),
            Some(Action::Die) => qp.cut(),
            _ => {}
        }
    }
}

impl QpFaults {
    /// Before a send: may change it, may take its time.
    pub(crate) fn before_send(&self, wr: &mut SendWr, which: Which) -> End {
        self.before(Post::Send, which, |status| {
            // Memory that is nobody's makes it fail in its turn; the status is exchanged when it is reported.
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

    /// Before a receive: may take its time.
    pub(crate) fn before_recv(&self, which: Which) -> End {
        self.before(Post::Recv, which, |_| ())
    }

    fn before(&self, post: Post, which: Which, mut fail: impl FnMut(u32)) -> End {
        let mut end = None;
        for action in self.post(post) {
            match action {
                Action::Delay(time) => std::thread::sleep(time),
                Action::Complete(status) => fail(status),
                Action::PortDown(time) => port_down(which, time),
                Action::Terminate | Action::Die => end = Some(action),
            }
        }
        End(end)
    }

    /// The queue pair with this number goes.
    pub(crate) fn forget(num: u32) {
        lock(CONCERNED.get()).remove(&num);
    }
}

/// Ports that are down: those of the two devices, by `Which`.
static DOWN: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

/// Whether the port of a device is down.
pub(crate) fn is_port_down(which: Which) -> bool {
    DOWN[which as usize].load(Ordering::Relaxed)
}

fn port_down(which: Which, time: Option<Duration>) {
    if DOWN[which as usize].swap(true, Ordering::Relaxed) {
        return;
    }
    tell_port(which, IBV_EVENT_PORT_ERR);
    if let Some(time) = time {
        let up = move || {
            std::thread::sleep(time);
            DOWN[which as usize].store(false, Ordering::Relaxed);
            tell_port(which, IBV_EVENT_PORT_ACTIVE);
        };
        if let Err(error) = std::thread::Builder::new().spawn(up) {
            tracing::warn!(%error, "no thread to bring the port up again");
        }
    }
}

/// An event of port 1, for whoever has the device open.
fn tell_port(which: Which, event: ibv_event_type) {
    const PORT: *mut u8 = std::ptr::without_provenance_mut(1);
    for context in Context::pool().all().filter(|c| c.ctx.which == which) {
        context.ctx.events.push(&Subject::new(PORT), event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
        seed 7   # a remark
        send 100 on 1: complete RETRY_EXC_ERR
        send every 1000: delay 5ms
        recv 10 on 2: terminate
        send random 0.25 on 3: die
        send 5000: port down 200ms
    ";

    fn at(script: &Script, post: Post, qp: u32, n: u64) -> Vec<Action> {
        script.at(post, qp, n).collect()
    }

    #[test]
    fn rules_hit_their_requests() {
        let script = Script::parse(TEXT).expect("as documented");
        assert_eq!(at(&script, Post::Send, 1, 100), [Action::Complete(12)]);
        assert_eq!(at(&script, Post::Send, 2, 100), []);
        assert_eq!(at(&script, Post::Recv, 1, 100), []);
        assert_eq!(at(&script, Post::Recv, 2, 10), [Action::Terminate]);
        let late = Action::Delay(Duration::from_millis(5));
        assert_eq!(at(&script, Post::Send, 2, 3000), [late]);
        let down = Action::PortDown(Some(Duration::from_millis(200)));
        assert_eq!(at(&script, Post::Send, 1, 5000), [late, down]);
    }

    #[test]
    fn chance_is_the_same_in_every_run() {
        let hits = |seed: u64| -> Vec<u64> {
            let script = Script {
                seed,
                ..Script::parse(TEXT).expect("as documented")
            };
            (1..=999)
                .filter(|&n| at(&script, Post::Send, 3, n).contains(&Action::Die))
                .collect()
        };
        assert_eq!(hits(7), hits(7));
        assert_ne!(hits(7), hits(8));
        let count = hits(7).len();
        assert!((200..300).contains(&count), "a quarter of 999: {count}");
    }

    #[test]
    fn mistakes_name_their_line() {
        for (text, line, what) in [
            ("send 1: explode", 1, "not an action"),
            ("\n\nsend 0: die", 3, "counted from 1"),
            ("send random 2: die", 1, "probability"),
            ("recv 1: complete RETRY_EXC_ERR", 1, "only sends"),
            ("send 1: complete SUCCESS", 1, "not an error"),
            ("send 1: delay 5", 1, "not a time"),
            ("send 1 on: die", 1, "a rule reads"),
            ("send 1 on 1 2: die", 1, "a rule reads"),
            ("seed x", 1, "not a number"),
            ("die", 1, "a rule reads"),
        ] {
            let mistake = Script::parse(text).expect_err(text);
            assert_eq!(mistake.line, line, "{text}");
            assert!(mistake.what.contains(what), "{text}: {}", mistake.what);
        }
    }
}
