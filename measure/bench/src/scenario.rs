//! Scenarios as data, and the one loop that runs all of them.

use crate::driver::{self, Context, Copy, Initiator, Kind, Op, Spec, Stack, Transport, outside};
use crate::error::{BenchError, Result};
use crate::output::Output;
use crate::process::{Peer, Reply, Request, unexpected};
use crate::progress::Progress;
use crate::record::{Metric, Record, Side, of_suite};
use crate::stats::{Summary, paired_ratio, percentile};
use crate::usage;
use std::time::{Duration, Instant};

/// No run posts more operations than this, whatever its time.
const MOST_OPERATIONS: u64 = 4_000_000;
/// The least number of laps of a ping-pong, so that a 99th percentile has a meaning.
const FEWEST_LAPS: u64 = 20;
/// The same for messages of [`LARGE`] bytes and more, whose laps take long.
const FEWEST_LARGE_LAPS: u64 = 5;
const LARGE: u64 = 1 << 20;

/// Connections that are measured in turn: one point of a figure.
pub struct Group {
    /// The operation as the results name it.
    pub op: &'static str,
    /// One connection per stack and variant.
    pub contenders: Vec<Contender>,
}

impl Group {
    /// A description for the progress line.
    pub fn describe(&self) -> String {
        let Some(first) = self.contenders.first() else {
            return self.op.to_owned();
        };
        let kind = match (first.spec.kind, first.spec.busy) {
            (Kind::Stream, _) => "",
            (Kind::PingPong, true) => " ping-pong, spinning",
            (Kind::PingPong, false) => " ping-pong, sleeping",
        };
        format!("{} {}{kind}", self.op, crate::size::human(first.spec.bytes))
    }
}

/// One stack in a [`Group`].
pub struct Contender {
    pub spec: Spec,
    /// The variant's name in the results, if the specification alone does not determine it.
    pub case: Option<&'static str>,
}

/// The duration and the number of runs.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    pub runs: u32,
    pub target: Duration,
    /// Bytes per run instead of a time.
    pub bytes: Option<u64>,
}

/// One run of one contender.
#[derive(Clone, Debug)]
struct Sample {
    wall: f64,
    /// CPU seconds of the initiator and of its peer, where they are known.
    cpu: Option<(f64, f64)>,
    count: u64,
    /// Microseconds.
    median: Option<f64>,
    /// The 99th percentile, in microseconds.
    tail: Option<f64>,
}

/// The mechanism that carries out a contender's operations.
enum Work {
    /// A connection to the peer process.
    Linked(Box<dyn Initiator>),
    /// This process alone.
    Copy(Copy),
    /// Processes of another library.
    Outside,
    /// None: it has failed.
    Gone,
}

/// A contender that is ready to run.
struct Session {
    id: u32,
    spec: Spec,
    case: Option<&'static str>,
    work: Work,
    count: u64,
    samples: Vec<Sample>,
}

impl Session {
    fn open(context: &mut Context, peer: &mut Peer, contender: &Contender) -> Result<Self> {
        let spec = contender.spec;
        let id = peer.new_id();
        let work = match spec.stack {
            Stack::Memcpy => Work::Copy(Copy::new(&spec)?),
            stack if outside::has(stack) => Work::Outside,
            _ => {
                peer.send(&Request::Open { id, spec })?;
                let addr = peer.listening()?;
                let mut initiator = driver::connect(context, &spec, addr)?;
                match peer.receive()? {
                    Reply::Opened { remote } => initiator.set_remote(remote),
                    other => return Err(unexpected(&other)),
                }
                Work::Linked(initiator)
            }
        };
        Ok(Self {
            id,
            spec,
            case: contender.case,
            work,
            count: 1,
            samples: Vec::new(),
        })
    }

    fn run(&mut self, peer: &mut Peer, count: u64) -> Result<Sample> {
        match &mut self.work {
            Work::Linked(initiator) => {
                let result = run_linked(initiator.as_mut(), peer, self.id, &self.spec, count);
                if result.is_err() {
                    self.work = Work::Gone;
                }
                result
            }
            Work::Copy(copy) => {
                let start = Instant::now();
                copy.drive(count);
                Ok(Sample {
                    wall: start.elapsed().as_secs_f64(),
                    cpu: None,
                    count,
                    median: None,
                    tail: None,
                })
            }
            Work::Outside => {
                let said = outside::run(&self.spec, count)?;
                let one = said.mean_us / 1e6 / share(&self.spec);
                Ok(Sample {
                    wall: one * count as f64,
                    cpu: None,
                    count,
                    median: said.median_us,
                    tail: None,
                })
            }
            Work::Gone => Err(BenchError::PeerGone("connection failed".to_owned())),
        }
    }

    /// Finds the number of operations that fill the time; also warms up.
    fn calibrate(&mut self, peer: &mut Peer, effort: &Effort) -> Result<()> {
        let fewest = match self.spec.kind {
            Kind::PingPong if self.spec.bytes >= LARGE => FEWEST_LARGE_LAPS,
            Kind::PingPong => FEWEST_LAPS,
            Kind::Stream => 2,
        };
        let given = effort.bytes.filter(|_| self.spec.kind == Kind::Stream);
        if let Some(bytes) = given {
            self.count = (bytes / self.spec.bytes.max(1)).clamp(1, MOST_OPERATIONS);
            self.run(peer, self.count)?;
            return Ok(());
        }
        let target = effort.target.as_secs_f64();
        // Starting a program takes long, so its number of operations is found in fewer steps.
        let (first, growth) = match self.work {
            Work::Outside => (fewest.max(10), 1000),
            _ => (fewest, 10),
        };
        let mut count = first;
        loop {
            let wall = self.run(peer, count)?.wall.max(1e-9);
            let wanted = (count as f64 * target / wall) as u64;
            if wall >= target / 3.0 || count >= MOST_OPERATIONS {
                self.count = wanted.clamp(fewest, MOST_OPERATIONS);
                return Ok(());
            }
            count = wanted
                .clamp(count + 1, count.saturating_mul(growth))
                .min(MOST_OPERATIONS);
        }
    }
}

fn run_linked(
    initiator: &mut dyn Initiator,
    peer: &mut Peer,
    id: u32,
    spec: &Spec,
    count: u64,
) -> Result<Sample> {
    peer.send(&Request::Go {
        id,
        count,
        remote: initiator.remote(),
    })?;
    peer.ready()?;
    let mut laps = Vec::new();
    if spec.kind == Kind::PingPong {
        laps.reserve(usize::try_from(count).unwrap_or(0));
    }
    let cpu = usage::cpu_seconds();
    let start = Instant::now();
    let driven = initiator.drive(count, &mut laps);
    let wall = start.elapsed().as_secs_f64();
    let cpu_initiator = usage::cpu_seconds() - cpu;
    if let Err(ours) = driven {
        // Without its connection the peer fails too, and its reason may be the first one.
        return Err(match peer.receive() {
            Err(theirs) => BenchError::Both(Box::new(ours), Box::new(theirs)),
            Ok(_) => ours,
        });
    }
    let cpu_peer = match peer.receive()? {
        Reply::Done { cpu } => cpu,
        other => return Err(unexpected(&other)),
    };
    laps.sort_unstable_by(f64::total_cmp);
    Ok(Sample {
        wall,
        cpu: Some((cpu_initiator, cpu_peer)),
        count,
        median: percentile(&laps, 0.5),
        tail: percentile(&laps, 0.99),
    })
}

/// The share of a lap that counts: a ping-pong's latency is half of the round trip.
fn share(spec: &Spec) -> f64 {
    if spec.kind == Kind::PingPong && !spec.op.pulls() {
        0.5
    } else {
        1.0
    }
}

/// The results of a group's runs.
pub struct Outcome {
    pub records: Vec<Record>,
    /// Why other libraries' columns do not have this point.
    pub notes: Vec<String>,
}

/// Measures a group: opens and warms up all contenders, then makes run after run, each with all of them in
/// turn.
pub fn run_group(
    context: &mut Context,
    peer: &mut Peer,
    group: &Group,
    effort: &Effort,
) -> Result<Outcome> {
    let mut notes = Vec::new();
    // A failure of another library does not end the point.
    let mut excuse = |session: &mut Session, error: BenchError| match session.work {
        Work::Outside => {
            session.work = Work::Gone;
            session.samples.clear();
            let stack = session.spec.stack.name();
            notes.push(format!("{}: {stack}: {error}", group.describe()));
            Ok(())
        }
        _ => Err(error),
    };
    let mut sessions = Vec::new();
    for contender in &group.contenders {
        let mut session = Session::open(context, peer, contender)?;
        if let Err(error) = session.calibrate(peer, effort) {
            excuse(&mut session, error)?;
        }
        sessions.push(session);
    }
    for _ in 0..effort.runs {
        for session in &mut sessions {
            if matches!(session.work, Work::Gone) {
                continue;
            }
            match session.run(peer, session.count) {
                Ok(sample) => session.samples.push(sample),
                Err(error) => excuse(session, error)?,
            }
        }
    }
    let linked = |session: &&Session| matches!(session.work, Work::Linked(_));
    let ids: Vec<u32> = sessions.iter().filter(linked).map(|each| each.id).collect();
    let records = records(group, &sessions);
    drop(sessions);
    for id in ids {
        peer.send(&Request::Close { id })?;
        peer.closed()?;
    }
    Ok(Outcome { records, notes })
}

/// Measures a group with a separate peer, so that a failure affects this point only.
pub fn run_alone(context: &mut Context, group: &Group, effort: &Effort) -> Result<Outcome> {
    run_group(context, &mut Peer::spawn(&[])?, group, effort)
}

/// Measures groups, each with a separate peer, as records of a suite; failed groups are left out.
pub fn run_groups(
    suite: &str,
    groups: &[Group],
    effort: &Effort,
    progress: &mut Progress,
    output: &mut Output,
) -> Result<Vec<Record>> {
    let mut context = Context::default();
    let mut records = Vec::new();
    for group in groups {
        let what = group.describe();
        progress.at(&what);
        let outcome = run_alone(&mut context, group, effort);
        let new = outcome.map(|outcome| of_suite(suite, outcome.records));
        records.extend(output.keep(&what, new)?);
        progress.step();
    }
    Ok(records)
}

/// A metric of a sample; `None` where it does not apply.
type Reading = fn(&Spec, &Sample) -> Option<f64>;

/// The numbers of each kind of scenario: the metric, its side, and the function that reads it from a sample.
const STREAM: &[(Metric, Option<Side>, Reading)] = &[
    (Metric::bandwidth_GBps, None, |spec, run| {
        Some(volume(spec, run) / 1e9 / run.wall)
    }),
    (Metric::messages_per_s, None, |_, run| {
        Some(run.count as f64 / run.wall)
    }),
    (Metric::cpu_s_per_GB, Some(Side::Sender), |spec, run| {
        Some(cpu(spec, run)?.0 / (volume(spec, run) / 1e9))
    }),
    (Metric::cpu_s_per_GB, Some(Side::Receiver), |spec, run| {
        Some(cpu(spec, run)?.1 / (volume(spec, run) / 1e9))
    }),
];
const PING_PONG: &[(Metric, Option<Side>, Reading)] = &[
    (Metric::latency_us_p50, None, |_, run| run.median),
    (Metric::latency_us_p99, None, |_, run| run.tail),
    (Metric::latency_us_mean, None, |spec, run| {
        Some(run.wall / run.count as f64 * 1e6 * share(spec))
    }),
    (Metric::cpu_us_per_message, None, |_, run| {
        let (initiator, peer) = run.cpu?;
        Some((initiator + peer) * 1e6 / run.count as f64)
    }),
];

fn volume(spec: &Spec, run: &Sample) -> f64 {
    run.count as f64 * spec.bytes as f64
}

/// CPU seconds of the process that sent the data and of the one that received it.
fn cpu(spec: &Spec, run: &Sample) -> Option<(f64, f64)> {
    let (initiator, peer) = run.cpu?;
    Some(if spec.op.pulls() {
        (peer, initiator)
    } else {
        (initiator, peer)
    })
}

fn records(group: &Group, sessions: &[Session]) -> Vec<Record> {
    let beside = |stack: Stack| {
        let mut sessions = sessions.iter();
        sessions.find(move |session| session.spec.stack == stack)
    };
    let (tcp, tcp_tls) = (beside(Stack::Tcp), beside(Stack::TcpTls));
    let mut records = Vec::new();
    for session in sessions {
        let spec = &session.spec;
        let readings = match spec.kind {
            Kind::Stream => STREAM,
            Kind::PingPong => PING_PONG,
        };
        for (metric, side, reading) in readings {
            let read = |session: &Session| -> Vec<f64> {
                let runs = session.samples.iter();
                runs.filter_map(|run| reading(spec, run)).collect()
            };
            let ours = read(session);
            let Some(summary) = Summary::of(&ours) else {
                continue;
            };
            let in_memory = spec.stack.has_local() && spec.transport == Transport::Local;
            let transport = if spec.stack.is_weft() || in_memory {
                spec.transport.name()
            } else {
                spec.stack.carrier()
            };
            // On datagrams a write is a different operation.
            let op = match (spec.stack, spec.op) {
                (Stack::WeftUd | Stack::WeftRd, Op::Write) => "write_record",
                _ => group.op,
            };
            let mut record = Record::new(
                op,
                transport,
                spec.stack.name(),
                spec.bytes,
                *metric,
                summary,
            );
            record.side = *side;
            record.case = session.case.map(str::to_owned);
            if spec.kind == Kind::PingPong {
                record.poll = Some(if spec.busy { "busy" } else { "block" }.to_owned());
            }
            let has_fpdus = spec.stack.is_weft() && spec.transport == Transport::Tcp;
            if has_fpdus || spec.stack == Stack::WeftTls {
                record.crc = Some(spec.crc);
            }
            let ratio_to = |other: Option<&Session>| paired_ratio(&ours, &read(other?));
            if spec.stack != Stack::Tcp {
                record = record.with_ratio(ratio_to(tcp));
            }
            if spec.stack == Stack::WeftTls {
                record = record.with_ratio_tls(ratio_to(tcp_tls));
            }
            records.push(record);
        }
    }
    records
}

/// The number of operations of this size in flight: enough to keep the stream full, and not more.
pub fn window(op: Op, bytes: u64) -> u32 {
    let most = if op.pulls() { 64 } else { 128 };
    ((1 << 20) / bytes.max(1)).clamp(4, most) as u32
}
