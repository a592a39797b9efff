//! `weft bench busy`: ping-pongs of 64 B beside busy loops, each in turn with the same ping-pong over plain TCP whose ends sleep.
//!
//! Programs that sleep for each message are what a busy machine serves best, so they are the yardstick of those that spin as well.

use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;

use crate::aims::{Limit, verdict};
use crate::children::Load;
use crate::driver::{Context, Kind, Op, Spec, Stack, Transport, outside};
use crate::error::Result;
use crate::named::named;
use crate::output::{self, KEPT, OutputArgs};
use crate::progress::Progress;
use crate::record::{Metric, Record, of_suite};
use crate::report::{Report, Section, Table, machine, number};
use crate::scenario::{Contender, Effort, Group, run_alone};

const BYTES: u64 = 64;
/// The least that a way is to reach of plain TCP's speed.
const AIM: Limit = Limit::AtLeast(0.95);

const EXAMPLES: &str = "\
Examples:
  # every way, without other work and beside three kinds of it, in about fifteen minutes
  weft bench busy
  # two ways beside eight loops
  weft bench busy --loops 8 --way verbs-wait,exs";

/// Options of `weft bench busy`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct BusyArgs {
    /// Busy loops beside the measurement, as a list: how many, and their niceness after a colon
    #[arg(
        long,
        value_name = "N[:NICE],...",
        value_delimiter = ',',
        default_value = "0,2,2:15,8"
    )]
    pub loops: Vec<Loops>,
    /// What to measure [default: everything]
    #[arg(
        long,
        value_name = "LIST",
        value_delimiter = ',',
        hide_possible_values = false
    )]
    pub way: Vec<Way>,
    /// Pairs of runs, of plain TCP and of what is measured
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: u32,
    /// Seconds that each run should take
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3, value_parser = crate::args::seconds)]
    pub seconds: f64,
    /// Results of earlier runs (of --json), which the table is to have; nothing is measured
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub from: Vec<std::path::PathBuf>,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// Busy loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loops {
    count: u32,
    nice: i32,
}

impl FromStr for Loops {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let (count, nice) = text.split_once(':').unwrap_or((text, "0"));
        match (count.parse(), nice.parse()) {
            (Ok(count @ 0..=1024), Ok(nice @ 0..=19)) => Ok(Self { count, nice }),
            _ => Err("write a number up to 1024, or with a niceness up to 19: 2:15".to_owned()),
        }
    }
}

impl Loops {
    fn text(self) -> String {
        match (self.count, self.nice) {
            (0, _) => "nothing".to_owned(),
            (n, 0) => format!("{n} busy loops"),
            (n, nice) => format!("{n} busy loops at nice {nice}"),
        }
    }
}

named! {
    /// What is measured.
    pub enum Way {
        /// Verbs in shared memory, both ends polling.
        VerbsPoll = "verbs-poll",
        /// Verbs in shared memory, both ends asleep until a completion comes.
        VerbsWait = "verbs-wait",
        /// Verbs over TCP, both ends polling.
        VerbsTcpPoll = "verbs-tcp-poll",
        /// Verbs over TCP, both ends asleep.
        VerbsTcpWait = "verbs-tcp-wait",
        /// EXS in shared memory, events waited for.
        Exs = "exs",
        /// EXS in shared memory, blocking calls.
        ExsSync = "exs-sync",
        /// EXS over TCP, events waited for.
        ExsTcp = "exs-tcp",
        /// rsockets in shared memory (rstream under `weft verbs`), calls repeated until they succeed.
        RsocketsPoll = "rsockets-poll",
        /// rsockets in shared memory, blocking calls.
        RsocketsWait = "rsockets-wait",
        /// rsockets over TCP, calls repeated until they succeed.
        RsocketsTcpPoll = "rsockets-tcp-poll",
        /// rsockets over TCP, blocking calls.
        RsocketsTcpWait = "rsockets-tcp-wait",
        /// `ib_send_lat` under `weft verbs` in shared memory, polling.
        PerftestPoll = "perftest-poll",
        /// `ib_send_lat -e`: asleep until an event comes.
        PerftestEvents = "perftest-events",
    }
}

impl Way {
    fn spec(self) -> Spec {
        use Transport::{Local, Tcp};
        let (stack, transport, busy) = match self {
            Self::VerbsPoll => (Stack::Weft, Local, true),
            Self::VerbsWait => (Stack::Weft, Local, false),
            Self::VerbsTcpPoll => (Stack::Weft, Tcp, true),
            Self::VerbsTcpWait => (Stack::Weft, Tcp, false),
            Self::Exs => (Stack::Exs, Local, false),
            Self::ExsSync => (Stack::ExsSync, Local, false),
            Self::ExsTcp => (Stack::Exs, Tcp, false),
            Self::RsocketsPoll => (Stack::RstreamLocal, Local, true),
            Self::RsocketsWait => (Stack::RstreamLocal, Local, false),
            Self::RsocketsTcpPoll => (Stack::RstreamTcp, Tcp, true),
            Self::RsocketsTcpWait => (Stack::RstreamTcp, Tcp, false),
            Self::PerftestPoll => (Stack::PerftestLocal, Local, true),
            Self::PerftestEvents => (Stack::PerftestLocal, Local, false),
        };
        ping_pong(stack, transport, busy)
    }
}

fn ping_pong(stack: Stack, transport: Transport, busy: bool) -> Spec {
    Spec {
        stack,
        transport,
        busy,
        kind: Kind::PingPong,
        bytes: BYTES,
        ..Spec::BASE
    }
}

/// Runs the suite: prints a table, and writes what the options ask for.
pub(crate) fn run(args: &BusyArgs) -> Result<ExitCode> {
    let mut records: Vec<Record> = output::read(&args.from)?;
    let mut output = args.output.open()?;
    output.lines(&records)?;
    let mut intro = vec![KEPT.to_owned()];
    if args.from.is_empty() {
        let load = Load::start(0, 0)?;
        intro = vec![format!(
            "{}; load average {}. {} pairs of {} s.",
            machine(),
            load.text,
            args.runs,
            args.seconds
        )];
        measure(args, &mut records, &mut output, &mut intro)?;
    }
    output.finish(&report(&records, intro))
}

fn measure(
    args: &BusyArgs,
    records: &mut Vec<Record>,
    output: &mut output::Output,
    intro: &mut Vec<String>,
) -> Result<()> {
    let mut ways = args.way.clone();
    if ways.is_empty() {
        ways = <Way as clap::ValueEnum>::value_variants().to_vec();
    }
    let stacks: Vec<Stack> = ways.iter().map(|way| way.spec().stack).collect();
    let (missing, notes) = outside::inventory(&stacks);
    ways.retain(|way| !missing.contains(&way.spec().stack));
    intro.extend(notes);
    let effort = Effort {
        runs: args.runs,
        target: Duration::from_secs_f64(args.seconds),
        bytes: None,
    };
    let mut progress = Progress::new((args.loops.len() * ways.len()) as u64);
    for loops in &args.loops {
        let _load = Load::start(loops.count, loops.nice)?;
        for way in &ways {
            let what = format!("{} beside {}", way.name(), loops.text());
            progress.at(&what);
            let tcp = ping_pong(Stack::Tcp, Transport::Tcp, false);
            let group = Group {
                op: Op::Send.name(),
                contenders: [tcp, way.spec()]
                    .map(|spec| Contender { spec, case: None })
                    .into(),
            };
            let measured = run_alone(&mut Context::default(), &group, &effort).map(|outcome| {
                intro.extend(outcome.notes);
                named(outcome.records, way.name(), &loops.text())
            });
            records.extend(output.keep(&what, measured)?);
            progress.step();
        }
    }
    Ok(())
}

/// The means of a pair, named by the way (plain TCP's too) and the load.
fn named(records: Vec<Record>, way: &str, load: &str) -> Vec<Record> {
    let means = of_suite("busy", records).into_iter();
    means
        .filter(|record| record.metric == Metric::latency_us_mean)
        .map(|record| Record {
            op: way.to_owned(),
            ..record.with_case(load)
        })
        .collect()
}

fn report(records: &[Record], intro: Vec<String>) -> Report {
    let ways = records.iter().filter(|record| record.stack != "tcp");
    let tcp = |of: &Record| {
        let same = |it: &&Record| it.stack == "tcp" && it.op == of.op && it.case == of.case;
        records
            .iter()
            .find(same)
            .map(|record| record.summary.median)
    };
    let text = |of: Option<f64>| of.map_or_else(|| "-".to_owned(), number);
    // The record has the ratio of times.
    let speed = |ratio: Option<f64>| ratio.map(|ratio| 1.0 / ratio);
    let table = Table::of(
        ways,
        &[
            ("beside", &|of: &&Record| {
                of.case.clone().unwrap_or_default()
            }),
            ("way", &|of| of.op.clone()),
            ("plain TCP µs", &|of| text(tcp(of))),
            ("µs", &|of| number(of.summary.median)),
            ("of TCP's speed", &|of| text(speed(of.ratio_tcp))),
            ("least", &|of| text(speed(of.ratio_tcp_max))),
            ("most", &|of| text(speed(of.ratio_tcp_min))),
            ("met", &|of| {
                let met = speed(of.ratio_tcp).and_then(|ratio| AIM.holds(ratio));
                verdict(met).to_owned()
            }),
        ],
    );
    let mut report = Report::new("weft bench busy: 64 B ping-pongs beside busy loops");
    report.intro = intro;
    report.sections.push(
        Section::new("Beside busy loops")
            .text(format!(
                "Times are means of a run, one way; medians of the runs. A ratio compares a run with plain TCP's directly before it, both ends of that asleep: \
                 the median of the pairs is to be {AIM}."
            ))
            .table(table),
    );
    report
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Summary;

    #[test]
    fn loops_are_read() {
        let loops = |text: &str| text.parse::<Loops>().map(Loops::text);
        assert_eq!(loops("0").as_deref(), Ok("nothing"));
        assert_eq!(loops("8").as_deref(), Ok("8 busy loops"));
        assert_eq!(loops("2:15").as_deref(), Ok("2 busy loops at nice 15"));
        for bad in ["", "x", "2:", "2:20", "2000", "-1"] {
            assert!(loops(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_way_can_be_measured() {
        for way in <Way as clap::ValueEnum>::value_variants() {
            assert!(way.spec().is_possible(), "{way}");
        }
    }

    #[test]
    fn the_slower_one_has_not_met_the_aim() {
        let summary = |value| Summary::of(&[value]).unwrap();
        let record = |stack: &str, value| {
            Record::new(
                "send",
                "tcp",
                stack,
                BYTES,
                Metric::latency_us_mean,
                summary(value),
            )
        };
        let pair = |way: &str, ours| {
            let weft = record("weft", ours).with_ratio(Some(summary(ours / 10.0)));
            named(vec![record("tcp", 10.0), weft], way, "8 busy loops")
        };
        let records = [pair("verbs-poll", 20.0), pair("exs", 5.0)].concat();
        let text = report(&records, Vec::new()).to_text(None);
        let row = |way: &str| text.lines().find(|line| line.contains(way)).unwrap();
        assert!(
            row("verbs-poll").contains("0.50") && row("verbs-poll").contains("no"),
            "{text}"
        );
        assert!(
            row("exs").contains("2.0") && row("exs").contains("yes"),
            "{text}"
        );
    }
}
