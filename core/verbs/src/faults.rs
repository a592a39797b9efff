//! Fault scripts: faults injected at the same places in every run (`WEFT_FAULTS` of the drop-in libraries).
//!
//! A script has one rule a line; text after `#` is a comment.
//!
//! ```
//! let script = weft_verbs::faults::Script::parse("
//!     seed 7                                   # for `random`; default 0
//!     send 100 on 1: complete RETRY_EXC_ERR    # the 100th send posted on the first queue pair completes with this status
//!     send every 1000: delay 5ms               # on each queue pair, each 1000th call that posts returns late
//!     send random 0.0001: die                  # one in ten thousand: the connection breaks, without a message to the peer
//!     recv 10 on 2: terminate                  # an error ends the connection, with a Terminate message to the peer
//!     send 5000: port down 200ms               # nothing is sent or received during that time
//!     packet random 0.001: drop                # RoCE on the wire: one packet in a thousand is lost
//! ");
//! assert!(script.is_ok());
//! ```
//!
//! Requests, and packets sent, are counted for each queue pair from 1, queue pairs in the order in which they were made. Nothing depends on time or threads but the
//! order in which the program itself makes its calls, so that a run can be repeated. `docs/verbs.md` has the text for users.

use std::fmt;
use std::time::Duration;

use weft_rnic::RoceFault;

/// What a rule counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Post {
    /// Sends of any kind.
    Send,
    /// Receives.
    Recv,
    /// Packets that a queue pair of RoCE sends.
    Packet,
}

impl fmt::Display for Post {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Post::Send => "send",
            Post::Recv => "recv",
            Post::Packet => "packet",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// The request with this number, from 1.
    Nth(u64),
    Every(u64),
    /// With this probability.
    Random(f64),
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The call that posts the request takes that much longer.
    Delay(Duration),
    /// The request ends with this `IBV_WC_` status, and the queue pair is in the error state.
    Complete(u32),
    /// An error ends the connection; the peer gets a Terminate message.
    Terminate,
    /// The connection breaks.
    Die,
    /// The port goes down, and comes up after the time. `None`: it stays down.
    PortDown(Option<Duration>),
    /// The packet has this fault.
    Packet(RoceFault),
}

/// As scripts have it.
impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Delay(time) => write!(f, "delay {time:?}"),
            Action::Complete(status) => {
                let name = STATUSES.get(*status as usize);
                write!(f, "complete {}", name.unwrap_or(&"an unknown status"))
            }
            Action::Terminate => f.write_str("terminate"),
            Action::Die => f.write_str("die"),
            Action::PortDown(None) => f.write_str("port down"),
            Action::PortDown(Some(time)) => write!(f, "port down {time:?}"),
            Action::Packet(fault) => {
                let name = PACKET_FAULTS.iter().find(|(_, known)| known == fault);
                f.write_str(name.map_or("an unknown fault", |(name, _)| name))
            }
        }
    }
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
pub struct Script {
    seed: u64,
    rules: Vec<Rule>,
}

/// An error in a script, and its line.
#[derive(Debug, PartialEq, Eq)]
pub struct Mistake {
    line: usize,
    what: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for Mistake {}

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

const PACKET_FAULTS: [(&str, RoceFault); 5] = [
    ("drop", RoceFault::Drop),
    ("duplicate", RoceFault::Duplicate),
    ("reorder", RoceFault::Reorder),
    ("corrupt", RoceFault::Corrupt),
    ("mark", RoceFault::Mark),
];

impl Script {
    /// Parses a script.
    ///
    /// # Errors
    /// The first invalid line, and what it should contain.
    pub fn parse(text: &str) -> Result<Script, Mistake> {
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

    /// The faults of request `n` of queue pair `qp`, both counted from 1, in the order of the script.
    pub fn at(&self, post: Post, qp: u32, n: u64) -> impl Iterator<Item = Action> {
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
    const FORM: &str = "a rule reads `send|recv|packet N|every N|random P [on QP]: ACTION`";
    let (left, action) = line.split_once(':').ok_or(FORM)?;
    let mut words = left.split_whitespace();
    let post = match words.next() {
        Some("send") => Post::Send,
        Some("recv") => Post::Recv,
        Some("packet") => Post::Packet,
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
    let of_packets = matches!(action, Action::Packet(_));
    if of_packets != (post == Post::Packet) {
        return Err(format!("`{action}` is no action of a `{post}` rule"));
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
        [name] if let Some((_, fault)) = PACKET_FAULTS.iter().find(|(known, _)| *known == name) => {
            Ok(Action::Packet(*fault))
        }
        _ => Err(format!(
            "`{}` is not an action: delay TIME, complete STATUS, terminate, die, port down [TIME]; of packets: drop, duplicate, reorder, corrupt, mark",
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
        packet every 3 on 4: drop
        packet 2 on 4: mark
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
        let lost = Action::Packet(RoceFault::Drop);
        assert_eq!(at(&script, Post::Packet, 4, 6), [lost]);
        assert_eq!(
            at(&script, Post::Packet, 4, 2),
            [Action::Packet(RoceFault::Mark)]
        );
        assert_eq!(at(&script, Post::Send, 4, 6), []);
        for (action, text) in [
            (lost, "drop"),
            (Action::Packet(RoceFault::Corrupt), "corrupt"),
            (late, "delay 5ms"),
            (down, "port down 200ms"),
            (Action::Complete(12), "complete RETRY_EXC_ERR"),
        ] {
            assert_eq!(action.to_string(), text);
            assert_eq!(action_of(text), Ok(action));
        }
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
            ("send 1: drop", 1, "no action of a `send` rule"),
            ("packet 1: die", 1, "no action of a `packet` rule"),
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
