//! The suite `weft-papers exs`.

use super::args::ExsArgs;
use super::blast::Run;
use super::data::{Cell, PING_PONG, Results, STREAM, SYNC_PING_PONG, SYNC_STREAM};
use super::experiment::{Base, Experiment, Figure, Point, points};
use super::figures;
use super::plan::{Lengths, Plan};
use crate::driver::{Kind, Op, Spec, Stack, Transport};
use crate::error::{BenchError, Result};
use crate::process::{Peer, Task};
use crate::progress::Progress;
use crate::scenario::{Contender, Effort, Group, run_groups, window};
use crate::usage;
use std::net::{IpAddr, Ipv4Addr};
use std::process::{Command, ExitCode};
use std::time::Duration;
use weft_link::Link;

/// The default rate of the line in the experiment over a distance.
const LINE: u64 = 4_000_000_000;
/// The default of the intermediate buffer there: more than the line holds.
const LONG_BUFFER: u32 = 64 << 20;
/// The default duration of a run there, in seconds.
const LONG_RUN: f64 = 2.0;
/// Bytes before that: TCP's windows need many round trips to open.
const LONG_WARM_UP: u64 = 256 << 20;

/// A client and a server of blast, both child processes.
struct Pair {
    client: Peer,
    /// Ends with its client.
    _server: Peer,
}

impl Pair {
    /// On this host, or at the two ends of a link.
    fn start(link: Option<&Link>) -> Result<Self> {
        let (mut server, ip) = match link {
            None => (Peer::spawn(&[])?, Ipv4Addr::LOCALHOST),
            Some(link) => {
                let spawn = |command: &mut Command| link.far().enter(|| command.spawn())?;
                (Peer::start(&[], spawn)?, weft_link::FAR)
            }
        };
        let mut client = match link {
            None => Peer::spawn(&[])?,
            Some(link) => Peer::start(&[], |command| link.near().enter(|| command.spawn())?)?,
        };
        let ip = IpAddr::V4(ip);
        server.task(Task::BlastServe, &ip)?;
        let addr = server.listening()?;
        client.task(Task::BlastConnect, &addr)?;
        client.ready()?;
        Ok(Self {
            client,
            _server: server,
        })
    }

    fn run(&mut self, plan: &Plan) -> Result<Run> {
        self.client.task(Task::Blast, plan)?;
        self.client.measured()
    }
}

/// Measures a point: in each repetition all variants, starting with another one each time.
fn measure(
    pair: &mut Option<Pair>,
    link: Option<&Link>,
    point: &Point,
    repetitions: u32,
) -> Result<Vec<Cell>> {
    let cell = |(variant, plan): &(String, Plan)| Cell {
        experiment: point.experiment,
        transport: point.transport,
        variant: variant.clone(),
        x: point.x,
        plan: plan.clone(),
        runs: Vec::new(),
    };
    let mut cells: Vec<Cell> = point.variants.iter().map(cell).collect();
    let count = cells.len();
    // After a failure the states of the two sides may differ: the pair is not put back.
    let mut working = match pair.take() {
        Some(pair) => pair,
        None => Pair::start(link)?,
    };
    for repetition in 0..repetitions {
        for turn in 0..count {
            let cell = &mut cells[(turn + repetition as usize) % count];
            let mut plan = cell.plan.clone();
            if let Lengths::Exponential { seed, .. } = &mut plan.lengths {
                *seed = u64::from(repetition) + 1;
            }
            cell.runs.push(working.run(&plan)?);
        }
    }
    *pair = Some(working);
    Ok(cells)
}

/// Runs the suite: prints tables, and writes what the options ask for.
pub(crate) fn run(args: &ExsArgs) -> Result<ExitCode> {
    let mut output = args.output.open()?;
    let wants = |figure: Figure| args.figure.is_empty() || args.figure.contains(&figure);
    let experiments = Experiment::ALL.into_iter();
    let experiments: Vec<Experiment> = experiments
        .filter(|experiment| experiment.figures().iter().any(|figure| wants(*figure)))
        .collect();
    let groups = targets(args, wants);
    let mut results = Results {
        cells: Vec::new(),
        targets: Vec::new(),
        notes: Vec::new(),
        load: usage::load_average(),
    };
    // The link first: without it the rest need not wait for the news.
    let mut link = None;
    if experiments.contains(&Experiment::Distance) {
        let mut shape = args.link.clone();
        let rate = *shape.rate.get_or_insert(LINE);
        match shape.link() {
            Ok(made) => {
                let delay = shape.delay.as_secs_f64() * 2e3;
                results.notes.push(format!(
                    "Distance: two network namespaces with a program between them that delays packets: {delay:.0} ms there and back, jitter {:.1} ms, {:.1} Gb/s.",
                    shape.jitter.as_secs_f64() * 1e3,
                    rate as f64 / 1e9
                ));
                link = Some(made);
            }
            // If the figure was requested by name, the error ends the suite.
            Err(error) if args.figure.contains(&Figure::F13) => return Err(error),
            Err(error) => results.notes.push(format!("Figure 13 is missing: {error}")),
        }
    }
    let mut all: Vec<Point> = Vec::new();
    for transport in &args.transport {
        for experiment in experiments
            .iter()
            .filter(|each| **each != Experiment::Distance)
        {
            all.extend(points(*experiment, *transport, &base(args, false)));
        }
    }
    if link.is_some() {
        all.extend(points(
            Experiment::Distance,
            Transport::Tcp,
            &base(args, true),
        ));
    }
    if all.is_empty() && groups.is_empty() {
        return Err(BenchError::Usage(
            "nothing to measure: the options leave no point".to_owned(),
        ));
    }
    let mut progress = Progress::new((all.len() + groups.len()) as u64);
    let (mut near, mut far) = (None, None);
    for point in &all {
        let what = format!(
            "{:?} {} {}",
            point.experiment,
            point.transport.name(),
            point.x
        );
        progress.at(&what);
        let distant = point.experiment == Experiment::Distance;
        let (pair, link) = if distant {
            (&mut far, link.as_ref())
        } else {
            (&mut near, None)
        };
        let repetitions = if distant {
            args.repetitions().min(3)
        } else {
            args.repetitions()
        };
        match measure(pair, link, point, repetitions) {
            Ok(cells) => {
                output.lines(cells.iter().flat_map(Cell::lines))?;
                results.cells.extend(cells);
            }
            Err(error) => output.failed(&what, &error),
        }
        progress.step();
    }
    drop((near, far));
    if let Some(link) = &link {
        let [out, back] = link.traffic();
        let dropped = out.dropped + back.dropped;
        results.notes.push(format!(
            "The link carried {:.1} GB in {} packets, and dropped {dropped}.",
            out.bytes as f64 / 1e9,
            out.packets + back.packets
        ));
    }
    let effort = Effort {
        runs: args.repetitions(),
        target: Duration::from_secs_f64(args.seconds()),
        bytes: None,
    };
    results.targets = run_groups("exs", &groups, &effort, &mut progress, &mut output)?;
    drop(progress);
    output.finish(&figures::report(&results, args))
}

fn base(args: &ExsArgs, distant: bool) -> Base {
    let sockets = weft_exs::Options::default().buffer;
    Base {
        seconds: if distant {
            args.distance_seconds.unwrap_or(LONG_RUN)
        } else {
            args.seconds()
        },
        buffer: args
            .buffer
            .unwrap_or(if distant { LONG_BUFFER } else { sockets }),
        warm_up: if distant { LONG_WARM_UP } else { 0 },
        crc: args.crc,
        quick: args.quick,
    }
}

/// The points of the targets, together with the runs that they are compared with.
fn targets(args: &ExsArgs, wants: impl Fn(Figure) -> bool) -> Vec<Group> {
    let mut groups = Vec::new();
    let mut add = |op: &'static str, stacks: &[Stack], spec: Spec| {
        for transport in &args.transport {
            let contender = |stack: &Stack| Contender {
                spec: Spec {
                    stack: *stack,
                    transport: *transport,
                    crc: args.crc,
                    op: Op::Send,
                    ..spec
                },
                case: None,
            };
            groups.push(Group {
                op,
                contenders: stacks.iter().map(contender).collect(),
            });
        }
    };
    let stream = Spec {
        bytes: 1 << 20,
        window: window(Op::Send, 1 << 20),
        ..Spec::BASE
    };
    let ping_pong = Spec {
        bytes: 64,
        kind: Kind::PingPong,
        ..Spec::BASE
    };
    if wants(Figure::Stream) {
        add(STREAM, &[Stack::Tcp, Stack::Exs, Stack::Weft], stream);
    }
    if wants(Figure::PingPong) {
        let busy = Spec {
            busy: true,
            ..ping_pong
        };
        add(PING_PONG, &[Stack::Weft, Stack::Exs, Stack::Tcp], busy);
    }
    if wants(Figure::Sync) {
        add(SYNC_STREAM, &[Stack::Tcp, Stack::ExsSync], stream);
        add(SYNC_PING_PONG, &[Stack::Tcp, Stack::ExsSync], ping_pong);
    }
    groups
}
