//! Scenarios as data, and the one loop that runs them all.

use crate::driver::{self, Context, Initiator, Kind, Op, Spec, Stack};
use crate::error::{BenchError, Result};
use crate::process::{Peer, Reply, Request, unexpected};
use crate::record::{Metric, Record, Side};
use crate::stats::{Summary, paired_ratio, percentile};
use crate::usage;
use std::time::{Duration, Instant};

/// No run posts more operations than this, whatever its time.
const MOST_OPERATIONS: u64 = 4_000_000;
/// No run of a ping-pong takes fewer laps, so that a 99th percentile means something.
const FEWEST_LAPS: u64 = 20;
/// The same for messages of [`LARGE`] bytes and more, whose laps take long.
const FEWEST_LARGE_LAPS: u64 = 5;
const LARGE: u64 = 1 << 20;

/// Connections that are measured turn by turn: one point of a figure.
pub(crate) struct Group {
    /// The operation as the results name it.
    pub(crate) op: &'static str,
    /// One connection per stack and variant.
    pub(crate) contenders: Vec<Contender>,
}

impl Group {
    /// What is measured, for the progress line.
    pub(crate) fn describe(&self) -> String {
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
pub(crate) struct Contender {
    pub(crate) spec: Spec,
    /// The variant's name in the results, where the specification alone does not tell.
    pub(crate) case: Option<&'static str>,
}

/// How long and how often.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) runs: u32,
    pub(crate) target: Duration,
    /// Bytes per run instead of a time.
    pub(crate) bytes: Option<u64>,
}

/// One run of one contender.
#[derive(Clone, Debug)]
struct Sample {
    wall: f64,
    cpu_initiator: f64,
    cpu_peer: f64,
    count: u64,
    /// Microseconds: median and 99th percentile.
    laps: Option<(f64, f64)>,
}

/// An open connection of a contender.
struct Session {
    id: u32,
    spec: Spec,
    /// Gone once it has failed.
    initiator: Option<Box<dyn Initiator>>,
    count: u64,
    samples: Vec<Sample>,
}

impl Session {
    fn open(context: &mut Context, peer: &mut Peer, spec: Spec) -> Result<Self> {
        let id = peer.new_id();
        peer.send(&Request::Open { id, spec })?;
        let addr = peer.listening()?;
        let mut initiator = driver::connect(context, &spec, addr)?;
        match peer.receive()? {
            Reply::Opened { remote } => initiator.set_remote(remote),
            other => return Err(unexpected(&other)),
        }
        Ok(Self {
            id,
            spec,
            initiator: Some(initiator),
            count: 1,
            samples: Vec::new(),
        })
    }

    fn run(&mut self, peer: &mut Peer, count: u64) -> Result<Sample> {
        let Some(initiator) = &mut self.initiator else {
            return Err(BenchError::PeerGone("connection failed".to_owned()));
        };
        peer.send(&Request::Go {
            id: self.id,
            count,
            remote: initiator.remote(),
        })?;
        match peer.receive()? {
            Reply::Ready => {}
            other => return Err(unexpected(&other)),
        }
        let mut laps = Vec::new();
        if self.spec.kind == Kind::PingPong {
            laps.reserve(usize::try_from(count).unwrap_or(0));
        }
        let cpu = usage::cpu_seconds();
        let start = Instant::now();
        let driven = initiator.drive(count, &mut laps);
        let wall = start.elapsed().as_secs_f64();
        let cpu_initiator = usage::cpu_seconds() - cpu;
        if let Err(ours) = driven {
            // Without its connection the peer fails too, and its reason may be the first one.
            self.initiator = None;
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
        let laps = percentile(&laps, 0.5).zip(percentile(&laps, 0.99));
        Ok(Sample {
            wall,
            cpu_initiator,
            cpu_peer,
            count,
            laps,
        })
    }

    /// Finds how many operations fill the time; warms everything up on the way.
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
        let mut count = fewest;
        loop {
            let wall = self.run(peer, count)?.wall.max(1e-9);
            let wanted = (count as f64 * target / wall) as u64;
            if wall >= target / 3.0 || count >= MOST_OPERATIONS {
                self.count = wanted.clamp(fewest, MOST_OPERATIONS);
                return Ok(());
            }
            count = wanted
                .clamp(count + 1, count.saturating_mul(10))
                .min(MOST_OPERATIONS);
        }
    }
}

/// Measures a group: all contenders open, warmed up, then run after run, each run turning through all of them.
pub(crate) fn run_group(
    context: &mut Context,
    peer: &mut Peer,
    group: &Group,
    effort: &Effort,
) -> Result<Vec<Record>> {
    let mut sessions = Vec::new();
    for contender in &group.contenders {
        let mut session = Session::open(context, peer, contender.spec)?;
        session.calibrate(peer, effort)?;
        sessions.push(session);
    }
    for _ in 0..effort.runs {
        for session in &mut sessions {
            let sample = session.run(peer, session.count)?;
            session.samples.push(sample);
        }
    }
    let ids: Vec<u32> = sessions.iter().map(|session| session.id).collect();
    let records = records(group, &sessions);
    drop(sessions);
    for id in ids {
        peer.send(&Request::Close { id })?;
        match peer.receive()? {
            Reply::Closed => {}
            other => return Err(unexpected(&other)),
        }
    }
    Ok(records)
}

/// A metric of a sample; `None` where it does not apply.
type Reading = fn(&Spec, &Sample) -> Option<f64>;

/// The numbers of each kind of scenario: metric, whose, how it is read from a sample.
const STREAM: &[(Metric, Option<Side>, Reading)] = &[
    (Metric::bandwidth_GBps, None, |spec, run| {
        Some(volume(spec, run) / 1e9 / run.wall)
    }),
    (Metric::messages_per_s, None, |_, run| {
        Some(run.count as f64 / run.wall)
    }),
    (Metric::cpu_s_per_GB, Some(Side::Sender), |spec, run| {
        Some(cpu(spec, run).0 / (volume(spec, run) / 1e9))
    }),
    (Metric::cpu_s_per_GB, Some(Side::Receiver), |spec, run| {
        Some(cpu(spec, run).1 / (volume(spec, run) / 1e9))
    }),
];
const PING_PONG: &[(Metric, Option<Side>, Reading)] = &[
    (Metric::latency_us_p50, None, |_, run| {
        run.laps.map(|laps| laps.0)
    }),
    (Metric::latency_us_p99, None, |_, run| {
        run.laps.map(|laps| laps.1)
    }),
    (Metric::cpu_us_per_message, None, |_, run| {
        Some((run.cpu_initiator + run.cpu_peer) * 1e6 / run.count as f64)
    }),
];

fn volume(spec: &Spec, run: &Sample) -> f64 {
    run.count as f64 * spec.bytes as f64
}

/// CPU seconds of the process that the data left and of the one it reached.
fn cpu(spec: &Spec, run: &Sample) -> (f64, f64) {
    if spec.op.pulls() {
        (run.cpu_peer, run.cpu_initiator)
    } else {
        (run.cpu_initiator, run.cpu_peer)
    }
}

fn records(group: &Group, sessions: &[Session]) -> Vec<Record> {
    let tcp = sessions
        .iter()
        .find(|session| session.spec.stack == Stack::Tcp);
    let mut records = Vec::new();
    for (session, contender) in sessions.iter().zip(&group.contenders) {
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
            let transport = spec.transport.name();
            let mut record = Record::new(
                group.op,
                transport,
                spec.stack.name(),
                spec.bytes,
                *metric,
                summary,
            );
            record.side = *side;
            record.case = contender.case.map(str::to_owned);
            if spec.kind == Kind::PingPong {
                record.poll = Some(if spec.busy { "busy" } else { "block" }.to_owned());
            }
            if spec.stack != Stack::Tcp {
                record.crc = Some(spec.crc);
                record = record.with_ratio(tcp.and_then(|tcp| paired_ratio(&ours, &read(tcp))));
            }
            records.push(record);
        }
    }
    records
}

/// How many operations of this size fly at once: enough to keep the stream full, not more.
pub(crate) fn window(op: Op, bytes: u64) -> u32 {
    let most = if op.pulls() { 64 } else { 128 };
    ((1 << 20) / bytes.max(1)).clamp(4, most) as u32
}
