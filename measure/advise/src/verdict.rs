//! The door of weft that fits a program, the expected gain, and the changes to make first.

use serde::Serialize;

use crate::machine::{Case, Machine};
use crate::record::{Count, Flow, Process, share};

/// Less than this share of a process's processor time is not worth a change.
const WORTH: f64 = 0.03;

/// A way into weft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Door {
    /// `weft run`, unmodified.
    Run,
    /// Porting to extended sockets.
    Exs,
    /// Datagram queue pairs of the verbs.
    Verbs,
    /// It stays as it is.
    Nothing,
}

impl Door {
    /// Returns the advice as text.
    pub fn words(self) -> &'static str {
        match self {
            Self::Run => "weft run --mode auto -- PROGRAM, on both ends",
            Self::Exs => "EXS: port its transfers to extended sockets (weft-exs, libexs)",
            Self::Verbs => "verbs: datagram queue pairs in place of its UDP sockets",
            Self::Nothing => "nothing: leave it as it is",
        }
    }
}

/// The model's prediction for `weft run` on both ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// The part of the process's processor time that goes into TCP sends and receives, 0 to 1.
    pub in_calls: f64,
    /// The time of a send and its receive in shared memory over that on TCP, at this program's sizes, from this machine's measurements.
    pub ratio: f64,
    /// The part of the process's processor time that would be saved.
    pub saved: f64,
    /// How many times as fast it would be at most, if this process's processor time is what limits it.
    pub faster: f64,
}

/// Explains to the reader how [`Gain`] is computed.
pub const MODEL: &str = "Model: the processor time in TCP calls to this host (estimated from one call in 16) shrinks by the ratio of two times that \
were measured on this machine at the program's middle sizes by one thread: a small message in weft's shared memory and two copies through a ring, \
over a send and its receive on loopback TCP. All else stays (Amdahl). Wake-ups of a sleeping peer and the time of the other end are not in the model.";

/// One line of the thesis's tables 4.2 and 4.3, for this program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Characteristic {
    /// As in the tables.
    pub name: &'static str,
    pub seen: String,
    /// True if that speaks for RDMA; `None` if it is undecided.
    pub speaks_for: Option<bool>,
}

/// The advice for one process.
#[derive(Clone, Debug, Serialize)]
pub struct Verdict {
    pub door: Door,
    pub why: Vec<String>,
    /// The predicted gain, if the model applies.
    pub gain: Option<Gain>,
    /// Changes to make in the program first.
    pub changes: Vec<String>,
    /// Tables 4.2 and 4.3.
    pub characteristics: Vec<Characteristic>,
}

fn percent(part: f64) -> String {
    format!("{:.0} %", part * 100.0)
}

/// Judges a process. Without a machine there is no gain.
pub fn judge(process: &Process, machine: Option<&Machine>) -> Verdict {
    let gain = machine.and_then(|machine| gain(process, machine));
    let (door, why) = door(process, gain.as_ref());
    Verdict {
        door,
        why,
        gain,
        changes: changes(process),
        characteristics: characteristics(process),
    }
}

/// Bytes that moved over TCP, sendfile and splice included.
fn tcp_bytes(p: &Process) -> u64 {
    let bytes = p
        .sends
        .get(Flow::Bytes)
        .saturating_add(p.receives.get(Flow::Bytes));
    bytes.saturating_add(p.get(Count::FileBytes))
}

fn same_host(p: &Process) -> Option<f64> {
    let sum = |flow| p.sends.get(flow).saturating_add(p.receives.get(flow));
    share(sum(Flow::BytesSameHost), sum(Flow::Bytes)).or_else(|| {
        let (same, other) = (p.get(Count::SameHost), p.get(Count::OtherHost));
        share(same, same.saturating_add(other))
    })
}

fn gain(p: &Process, machine: &Machine) -> Option<Gain> {
    let cpu = p.get(Count::Cpu);
    if cpu == 0 {
        return None;
    }
    let mut in_calls = 0.0;
    let mut saved = 0.0;
    for way in [&p.sends, &p.receives] {
        let worked = way.worked() as f64 / cpu as f64;
        let near = way.share(Flow::BytesSameHost, Flow::Bytes).unwrap_or(0.0);
        let size = way.middle_size();
        let (tcp, local) = (
            machine.between(Case::Tcp, size)?,
            machine.shared_memory(size)?,
        );
        let ratio = if tcp > 0.0 {
            (local / tcp).min(1.0)
        } else {
            1.0
        };
        in_calls += worked;
        saved += worked * near * (1.0 - ratio);
    }
    // An estimate of the calls can exceed what the process had in all.
    let scale = if in_calls > 1.0 { 1.0 / in_calls } else { 1.0 };
    let (in_calls, saved) = (in_calls * scale, saved * scale);
    Some(Gain {
        in_calls,
        ratio: if in_calls > 0.0 {
            1.0 - saved / in_calls
        } else {
            1.0
        },
        saved,
        faster: 1.0 / (1.0 - saved).max(0.05),
    })
}

fn door(p: &Process, gain: Option<&Gain>) -> (Door, Vec<String>) {
    let calls = |flow| p.sends.get(flow).saturating_add(p.receives.get(flow));
    let (tcp, udp) = (calls(Flow::Calls), calls(Flow::DatagramCalls));
    let tcp = tcp.saturating_add(p.get(Count::FileCalls));
    if tcp == 0 && udp == 0 {
        let unix = calls(Flow::UnixCalls);
        let why = if unix > 0 {
            format!(
                "it made {unix} calls on Unix sockets and none on TCP or UDP: weft has nothing to offer there"
            )
        } else {
            "it moved no data over TCP or UDP while it was watched".to_owned()
        };
        return (Door::Nothing, vec![why]);
    }
    if udp > tcp {
        return (
            Door::Verbs,
            vec![
                format!("{udp} of its {} calls are on UDP sockets; `weft run` follows TCP only", udp.saturating_add(tcp)),
                "datagram queue pairs keep message boundaries and need no connection, but the program has to be ported and both ends need weft".to_owned(),
            ],
        );
    }
    for (count, what) in [
        (
            Count::Uring,
            "it set up io_uring, whose transfers are neither seen here nor followed by `weft run`",
        ),
        (
            Count::Urgent,
            "it uses urgent data, with which a connection goes back to TCP",
        ),
        (
            Count::ZeroCopy,
            "it sends with MSG_ZEROCOPY, with which a connection goes back to TCP",
        ),
    ] {
        if p.get(count) > 0 {
            return (Door::Nothing, vec![what.to_owned()]);
        }
    }
    let closed = p.get(Count::Closed);
    let brief = share(p.get(Count::ShortLock), closed);
    if closed >= 10
        && let Some(brief) = brief.filter(|brief| *brief > 0.5)
    {
        return (
            Door::Nothing,
            vec![format!(
                "{} of its {closed} ended connections carried fewer than four calls and less than 64 KiB; `weft run` leaves such connections on TCP. \
                 Keep connections open first",
                percent(brief)
            )],
        );
    }
    if same_host(p).is_some_and(|near| near < 0.5) {
        let large = p.sends.middle_size().max(p.receives.middle_size()) >= 64 << 10;
        let why = "most of its bytes go to other hosts (or network namespaces), where `weft run` leaves connections on TCP".to_owned();
        return if large {
            (
                Door::Exs,
                vec![
                    why,
                    "half of its bytes move in transfers of 64 KiB and more: extended sockets send and receive these without a copy of weft's own; the \
                     gain over TCP between hosts without an RNIC is small: measure with `weft bench verbs --op send --stack exs,tcp`"
                        .to_owned(),
                ],
            )
        } else {
            (Door::Nothing, vec![why])
        };
    }
    let mut why = vec!["its TCP connections stay on this host".to_owned()];
    if let Some(gain) = gain.filter(|gain| gain.saved < WORTH) {
        why.push(format!(
            "but TCP calls that shared memory would shorten are only {} of its processor time",
            percent(gain.saved)
        ));
        return (Door::Nothing, why);
    }
    if p.get(Count::FileBytes) > tcp_bytes(p) / 2 {
        why.push("most bytes come from files (sendfile, splice): the kernel copies these once, a ring twice; splice goes back to TCP".to_owned());
    }
    if p.get(Count::Rights) > 0 {
        why.push(
            "it passes descriptors to other processes: those connections go back to TCP".to_owned(),
        );
    }
    (Door::Run, why)
}

fn changes(p: &Process) -> Vec<String> {
    let mut list = Vec::new();
    let sends = p.sends.get(Flow::Calls);
    let turns = p.get(Count::Turns);
    if let Some(usual) = p.sends.usual()
        && usual.most < 4096
        && turns > 100
        && sends / turns >= 3
    {
        list.push(format!(
            "gather: it sends {:.1} times for each answer, mostly {} to {} bytes; writev or one buffer would save calls through any door",
            sends as f64 / turns as f64,
            usual.least,
            usual.most
        ));
    }
    let empty = share(p.receives.get(Flow::Again), p.receives.get(Flow::Calls));
    if let Some(empty) = empty.filter(|empty| *empty > 0.3) {
        list.push(format!(
            "wait before it receives: {} of its receives find nothing (EAGAIN)",
            percent(empty)
        ));
    }
    let zero = share(p.get(Count::WaitsEmpty), p.get(Count::Waits));
    if p.get(Count::WaitsZero) > 1000
        && let Some(zero) = zero.filter(|zero| *zero > 0.5)
    {
        list.push(format!(
            "wait instead of asking: {} of its polls find nothing",
            percent(zero)
        ));
    }
    for (way, words) in [(&p.sends, "sends"), (&p.receives, "receives")] {
        if way.get(Flow::Calls) < 100 {
            continue;
        }
        if let Some(again) = way.share(Flow::Again1, Flow::Calls)
            && way.middle_size() >= 16 << 10
            && again + way.share(Flow::Again, Flow::Calls).unwrap_or(0.0) < 0.5
        {
            list.push(format!(
                "use buffers again: only {} of its {words} use one that was used before; registered memory pays when it stays",
                percent(again)
            ));
        }
        if let Some(there) = way
            .share(Flow::Resident, Flow::Pages)
            .filter(|there| *there < 0.9)
        {
            list.push(format!(
                "touch memory before it {words}: {} of the pages were resident at the call",
                percent(there)
            ));
        }
    }
    let (asked, receives) = (p.receives.get(Flow::Asked), p.receives.get(Flow::Calls));
    if p.receives.get(Flow::Bytes) > 64 << 20 && asked / receives.max(1) < 8192 {
        list.push(format!(
            "receive into larger buffers: it asks for {} bytes at a time on average",
            asked / receives.max(1)
        ));
    }
    let waited = p.sends.waited();
    if let Some(part) = share(waited, p.span()).filter(|part| *part > 0.3) {
        list.push(format!(
            "send without waiting: {} of its time it waits inside sends, which asynchronous sends (EXS) could overlap with its own work",
            percent(part)
        ));
    }
    list
}

fn characteristics(p: &Process) -> Vec<Characteristic> {
    let mut list = Vec::new();
    let mut add = |name, seen: String, speaks_for| {
        list.push(Characteristic {
            name,
            seen,
            speaks_for,
        });
    };
    let bytes = tcp_bytes(p);
    let middle = p.sends.middle_size().max(p.receives.middle_size());
    add(
        "large data transfers and large total volume",
        format!(
            "{:.3} GB; half of it in calls of up to {middle} B",
            bytes as f64 / 1e9
        ),
        (bytes > 0).then_some(middle >= 8 << 10 && bytes >= 1 << 30),
    );
    let again = {
        let calls = p
            .sends
            .get(Flow::Calls)
            .saturating_add(p.receives.get(Flow::Calls));
        let empty = p
            .sends
            .get(Flow::Again)
            .saturating_add(p.receives.get(Flow::Again));
        let used = p
            .sends
            .get(Flow::Again1)
            .saturating_add(p.receives.get(Flow::Again1));
        share(used, calls.saturating_sub(empty))
    };
    add(
        "able to reuse buffers",
        again.map_or_else(
            || "no transfers".to_owned(),
            |a| format!("{} of the transfers use a buffer again", percent(a)),
        ),
        again.map(|again| again > 0.8),
    );
    let usual = p.sends.usual();
    let steady = usual.and_then(|usual| {
        share(
            usual.count,
            p.sends
                .sizes
                .iter()
                .fold(0, |sum, c| sum.saturating_add(c.count)),
        )
    });
    add(
        "small data size variation",
        steady.map_or_else(
            || "no sends".to_owned(),
            |s| format!("{} of the sends are of one power of two", percent(s)),
        ),
        steady.map(|steady| steady > 0.8),
    );
    let closed = p.get(Count::Closed);
    let life = p.get(Count::Lifetime) / closed.max(1);
    let brief = share(p.get(Count::ShortLock), closed);
    let ends = p
        .get(Count::SameHost)
        .saturating_add(p.get(Count::OtherHost));
    add(
        "long lasting connections",
        match brief {
            Some(brief) => format!(
                "{ends} connections; {closed} ended after {:.3} s on average, {} of them after fewer than four calls",
                life as f64 / 1e9,
                percent(brief)
            ),
            None => format!("{ends} connections, none ended"),
        },
        (ends > 0).then_some(brief.is_none_or(|brief| brief < 0.5)),
    );
    list.extend(manner(p, bytes));
    list
}

/// Those of the tables that are about how a program works with its data and its sockets.
fn manner(p: &Process, bytes: u64) -> Vec<Characteristic> {
    let mut list = Vec::new();
    let mut add = |name, seen: String, speaks_for| {
        list.push(Characteristic {
            name,
            seen,
            speaks_for,
        });
    };
    let brief = share(p.get(Count::ShortLock), p.get(Count::Closed));
    let there = share(
        p.sends
            .get(Flow::Resident)
            .saturating_add(p.receives.get(Flow::Resident)),
        p.sends
            .get(Flow::Pages)
            .saturating_add(p.receives.get(Flow::Pages)),
    );
    let file = share(p.get(Count::FileBytes), bytes).unwrap_or(0.0);
    add(
        "data in main memory",
        there.map_or_else(
            || format!("{} from files; residency not seen", percent(file)),
            |t| {
                format!(
                    "{} of the pages resident, {} of the bytes from files",
                    percent(t),
                    percent(file)
                )
            },
        ),
        there.map(|there| there > 0.9 && file < 0.5),
    );
    let busy = share(p.get(Count::Cpu), p.span());
    add(
        "CPU intensive",
        busy.map_or_else(
            || "not seen".to_owned(),
            |b| format!("{} of its time on a processor (all threads)", percent(b)),
        ),
        busy.map(|busy| busy > 0.7),
    );
    let waits = p.get(Count::Waits);
    let waited = share(
        p.sends.waited().saturating_add(p.receives.waited()),
        p.span(),
    );
    add(
        "utilize asynchronous interface",
        waited.map_or_else(|| "not seen".to_owned(), |w| format!("{waits} calls of poll or epoll; {} of its time inside waiting sends and receives", percent(w))),
        waited.map(|waited| waits > 0 && waited < 0.2),
    );
    let gathers = p.sends.share(Flow::Gathers, Flow::Calls);
    add(
        "utilize scatter-gather list",
        gathers.map_or_else(
            || "no sends".to_owned(),
            |g| format!("{} of the sends have several pieces", percent(g)),
        ),
        gathers.map(|gathers| gathers > 0.1),
    );
    add(
        "utilize one-sided operations",
        "sockets have none".to_owned(),
        None,
    );
    add(
        "against: short-lived connections",
        brief.map_or_else(|| "none ended".to_owned(), percent),
        brief.filter(|brief| *brief > 0.5).map(|_| false),
    );
    add(
        "against: indirect buffers",
        "cannot be seen from outside; interpreters and Java copy into buffers of their own"
            .to_owned(),
        None,
    );
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Point;
    use crate::record::{self, COUNTS, FLOWS, PROCESS_BYTES};

    const HEADER: usize = 64;
    const NAME: usize = 128;

    /// A process with these counters and nothing else.
    fn process(counts: &[(Count, u64)], sends: &[(Flow, u64)]) -> Process {
        let mut bytes = vec![0; HEADER + PROCESS_BYTES];
        let mut put =
            |at: usize, value: u64| bytes[at..at + 8].copy_from_slice(&value.to_ne_bytes());
        put(0, record::MAGIC);
        put(8, PROCESS_BYTES as u64);
        put(16, 1);
        let counters = HEADER + NAME;
        put(counters, 42);
        for (count, value) in counts {
            put(counters + *count as usize * 8, *value);
        }
        let flows = counters + COUNTS * 8;
        for (flow, value) in sends {
            put(flows + *flow as usize * 8, *value);
        }
        let sizes = flows + (FLOWS + record::GAPS) * 8;
        let of = |wanted: Flow| {
            sends
                .iter()
                .find(|(flow, _)| *flow == wanted)
                .map_or(0, |x| x.1)
        };
        let (calls, moved) = (of(Flow::Calls), of(Flow::Bytes));
        if let Some(size) = moved.checked_div(calls).filter(|size| *size > 0) {
            let class = sizes + record::class(size) * 32;
            put(class, calls);
            put(class + 8, moved);
            put(class + 16, !size);
            put(class + 24, size);
        }
        record::read(&bytes).unwrap().processes.remove(0)
    }

    fn machine() -> Machine {
        let points = [(Case::Tcp, 40.0), (Case::Local, 1.0), (Case::Rings, 9.0)];
        Machine {
            points: points
                .map(|(case, us)| Point {
                    case,
                    bytes: 131_072,
                    us,
                })
                .to_vec(),
            ..Machine::default()
        }
    }

    fn bulk(near: u64) -> Process {
        process(
            &[
                (Count::Cpu, 1_000_000_000),
                (Count::Ended, 1_000_000_000),
                (Count::SameHost, near.min(1)),
            ],
            &[
                (Flow::Calls, 1000),
                (Flow::Bytes, 131_072_000),
                (Flow::BytesSameHost, near),
                (Flow::Ns, 800_000_000),
                (Flow::Sampled, 100),
                (Flow::SampledCpu, 80_000_000),
            ],
        )
    }

    #[test]
    fn bulk_on_one_host_goes_through_weft_run() {
        let verdict = judge(&bulk(131_072_000), Some(&machine()));
        assert_eq!(verdict.door, Door::Run);
        let gain = verdict.gain.unwrap();
        assert!((gain.in_calls - 0.8).abs() < 1e-6, "{gain:?}");
        // Three quarters of the time in calls go: 0.6 of all.
        assert!((gain.saved - 0.6).abs() < 1e-6, "{gain:?}");
        assert!((gain.faster - 2.5).abs() < 1e-6, "{gain:?}");
        assert_eq!(judge(&bulk(131_072_000), None).gain, None);
    }

    #[test]
    fn bulk_to_other_hosts_is_for_extended_sockets() {
        assert_eq!(judge(&bulk(0), Some(&machine())).door, Door::Exs);
    }

    #[test]
    fn what_gains_nothing_stays() {
        for counts in [
            vec![],
            vec![(Count::Uring, 1)],
            vec![(Count::Closed, 100), (Count::ShortLock, 90)],
        ] {
            let verdict = judge(&process(&counts, &[(Flow::Calls, 3)]), Some(&machine()));
            let expected = if counts.is_empty() {
                Door::Run
            } else {
                Door::Nothing
            };
            assert_eq!(verdict.door, expected, "{counts:?}");
            assert!(!verdict.why.is_empty());
        }
        assert_eq!(judge(&process(&[], &[]), None).door, Door::Nothing);
        let idle = process(
            &[(Count::Cpu, 1_000_000_000)],
            &[
                (Flow::Calls, 10),
                (Flow::Bytes, 1000),
                (Flow::BytesSameHost, 1000),
                (Flow::Ns, 1_000_000),
                (Flow::Sampled, 10),
                (Flow::SampledCpu, 1_000_000),
            ],
        );
        assert_eq!(judge(&idle, Some(&machine())).door, Door::Nothing);
    }

    #[test]
    fn datagrams_are_for_the_verbs() {
        let p = process(&[], &[(Flow::DatagramCalls, 10)]);
        assert_eq!(judge(&p, None).door, Door::Verbs);
    }

    #[test]
    fn any_numbers_give_an_advice() {
        let all: Vec<_> = (0..PROCESS_BYTES / 8).map(|_| u64::MAX).collect();
        for fill in [u64::MAX, u64::MAX / 3, 1] {
            let mut bytes: Vec<u8> = [record::MAGIC, PROCESS_BYTES as u64, 1, 0, 0, 0, 0, 0]
                .into_iter()
                .chain(all.iter().map(|_| fill))
                .flat_map(u64::to_ne_bytes)
                .collect();
            bytes.truncate(HEADER + PROCESS_BYTES);
            let record = record::read(&bytes).unwrap();
            judge(&record.processes[0], Some(&machine()));
        }
    }
}
