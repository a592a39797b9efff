//! The observations of the programs that `weft advise` watched, as sections of a report and as JSON.

use serde::Serialize;
use weft_advise::machine::Machine;
use weft_advise::record::{Count, Flow, GAP_ENDS, Process, Record, Way};
use weft_advise::verdict::{self, MODEL, Verdict};
use weft_report::size::human;
use weft_report::{Axis, Plot, Section, Series, Stroke, Table, number};

/// The product's own measurements, for comparison with the model.
const FIGURES: &str = "Measured before with both ends under `weft run`, of plain TCP (docs/figures): iperf3 128 KiB 2.3, 1 MiB 1.4; redis-benchmark 50 \
clients 1.17, one client 1.10.";

/// A size class of the JSON.
#[derive(Serialize)]
struct Size {
    least: u64,
    most: u64,
    count: u64,
    bytes: u64,
}

/// One way of the JSON; times in nanoseconds.
#[derive(Serialize)]
struct WayFacts {
    calls: u64,
    bytes: u64,
    bytes_same_host: u64,
    time_ns: u64,
    waited_ns: u64,
    found_nothing: u64,
    failed: u64,
    partial: u64,
    several_pieces: u64,
    page_aligned: u64,
    buffer_again: u64,
    area_again: u64,
    overlap_ns: u64,
    pages_looked_at: u64,
    pages_resident: u64,
    datagrams: u64,
    datagram_bytes: u64,
    unix_calls: u64,
    sizes: Vec<Size>,
}

impl WayFacts {
    fn of(way: &Way) -> Self {
        let sizes = way.sizes.iter().filter(|class| class.count > 0);
        Self {
            calls: way.get(Flow::Calls),
            bytes: way.get(Flow::Bytes),
            bytes_same_host: way.get(Flow::BytesSameHost),
            time_ns: way.get(Flow::Ns),
            waited_ns: way.waited(),
            found_nothing: way.get(Flow::Again),
            failed: way.get(Flow::Failed),
            partial: way.get(Flow::Short),
            several_pieces: way.get(Flow::Gathers),
            page_aligned: way.get(Flow::Aligned),
            buffer_again: way.get(Flow::Again1),
            area_again: way.get(Flow::AreaAgain),
            overlap_ns: way.get(Flow::OverlapNs),
            pages_looked_at: way.get(Flow::Pages),
            pages_resident: way.get(Flow::Resident),
            datagrams: way.get(Flow::DatagramCalls),
            datagram_bytes: way.get(Flow::DatagramBytes),
            unix_calls: way.get(Flow::UnixCalls),
            sizes: sizes
                .map(|class| Size {
                    least: class.least,
                    most: class.most,
                    count: class.count,
                    bytes: class.bytes,
                })
                .collect(),
        }
    }
}

/// A process of the JSON.
#[derive(Serialize)]
struct Watched {
    pid: u64,
    parent: u64,
    program: String,
    seconds: f64,
    cpu_seconds: f64,
    threads: u64,
    forks: u64,
    connections_same_host: u64,
    connections_other_hosts: u64,
    connects: u64,
    accepts: u64,
    closed: u64,
    brief: u64,
    turns: u64,
    waits: u64,
    waits_empty: u64,
    wait_ns: u64,
    file_bytes: u64,
    observer_ns: u64,
    sends: WayFacts,
    receives: WayFacts,
    verdict: Verdict,
}

/// The whole advice as JSON.
#[derive(Serialize)]
pub(crate) struct Findings {
    #[serde(skip_serializing_if = "Option::is_none")]
    machine: Option<Machine>,
    advice: Vec<String>,
    model: &'static str,
    programs_started: u64,
    forks: u64,
    not_recorded: u64,
    processes: Vec<Watched>,
}

impl Findings {
    /// Everything that is known.
    pub(crate) fn new(record: &Record, machine: Option<&Machine>) -> Self {
        Self {
            machine: machine.cloned(),
            advice: machine.map(weft_costs::advice).unwrap_or_default(),
            model: MODEL,
            programs_started: record.images,
            forks: record.forks,
            not_recorded: record.lost,
            processes: record
                .processes
                .iter()
                .map(|p| watched(p, machine))
                .collect(),
        }
    }
}

fn watched(p: &Process, machine: Option<&Machine>) -> Watched {
    Watched {
        pid: p.get(Count::Pid),
        parent: p.get(Count::Parent),
        program: p.name.clone(),
        seconds: p.span() as f64 / 1e9,
        cpu_seconds: p.get(Count::Cpu) as f64 / 1e9,
        threads: p.get(Count::Threads),
        forks: p.get(Count::Forks),
        connections_same_host: p.get(Count::SameHost),
        connections_other_hosts: p.get(Count::OtherHost),
        connects: p.get(Count::Connects),
        accepts: p.get(Count::Accepts),
        closed: p.get(Count::Closed),
        brief: p.get(Count::ShortLock),
        turns: p.get(Count::Turns),
        waits: p.get(Count::Waits),
        waits_empty: p.get(Count::WaitsEmpty),
        wait_ns: p.get(Count::WaitNs),
        file_bytes: p.get(Count::FileBytes),
        observer_ns: p.own_cost(),
        sends: WayFacts::of(&p.sends),
        receives: WayFacts::of(&p.receives),
        verdict: verdict::judge(p, machine),
    }
}

fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "-".to_owned(), |part| format!("{:.0} %", part * 100.0))
}

fn seconds(ns: u64) -> String {
    format!("{} s", number(ns as f64 / 1e9))
}

fn short(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// The sections of a record: one for all, and one for each process that moved data.
pub(crate) fn sections(record: &Record, machine: Option<&Machine>) -> Vec<Section> {
    let mut list = vec![overview(record)];
    for process in &record.processes {
        if process.calls() > 0 {
            list.push(of_process(process, machine));
        }
    }
    list
}

fn overview(record: &Record) -> Section {
    let mut table = Table::new(&[
        "process",
        "program",
        "parent",
        "seconds",
        "CPU",
        "threads",
        "forks",
        "sent",
        "received",
        "the observer took",
    ]);
    for p in &record.processes {
        let files = p.get(Count::FileBytes);
        let sum = |way: &Way| {
            let flows = [Flow::Bytes, Flow::DatagramBytes, Flow::UnixBytes];
            flows
                .iter()
                .fold(0u64, |sum, flow| sum.saturating_add(way.get(*flow)))
        };
        let cpu = p.get(Count::Cpu);
        table.push([
            p.get(Count::Pid).to_string(),
            short(&p.name).to_owned(),
            p.get(Count::Parent).to_string(),
            number(p.span() as f64 / 1e9),
            seconds(cpu),
            p.get(Count::Threads).to_string(),
            p.get(Count::Forks).to_string(),
            human(sum(&p.sends).saturating_add(files)),
            human(sum(&p.receives)),
            format!(
                "{} ({} of its CPU time)",
                seconds(p.own_cost()),
                percent(weft_advise::record::share(p.own_cost(), cpu))
            ),
        ]);
    }
    let mut section = Section::new("Processes that made socket calls").text(format!(
        "Programs started with the observer: {}; forks seen: {}. Programs that were started without its environment, or that make system \
         calls of their own (static ones, Go, io_uring), are not seen.",
        record.images, record.forks
    ));
    if record.lost > 0 {
        section = section.text(format!(
            "{} more processes made socket calls; the record has room for {}.",
            record.lost,
            weft_advise::record::PROCESSES
        ));
    }
    section.table(table)
}

fn of_process(p: &Process, machine: Option<&Machine>) -> Section {
    let verdict = verdict::judge(p, machine);
    let mut section = Section::new(format!("{} ({})", short(&p.name), p.get(Count::Pid)));
    section = section.text(format!("Advice: {}.", verdict.door.words()));
    for why in &verdict.why {
        section = section.text(format!("- {why}."));
    }
    if let Some(gain) = verdict.gain {
        section = section.text(format!(
            "Gain by the model: {} of its processor time is in TCP calls; shared memory takes {} of that; {} of the processor time is saved, at most \
             {} times as fast. {MODEL} {FIGURES}",
            percent(Some(gain.in_calls)),
            percent(Some(gain.ratio)),
            percent(Some(gain.saved)),
            number(gain.faster)
        ));
    }
    for (at, change) in verdict.changes.iter().enumerate() {
        section = section.text(format!("Change {}: {change}.", at + 1));
    }
    section = section.table(facts(p));
    section = section.table(sizes(p)).plot(histogram(p));
    let mut table = Table::new(&[
        "characteristic (thesis tables 4.2, 4.3)",
        "seen",
        "for RDMA",
    ]);
    for each in &verdict.characteristics {
        let speaks = match each.speaks_for {
            Some(true) => "yes",
            Some(false) => "no",
            None => "cannot be told",
        };
        table.push([each.name, &each.seen, speaks]);
    }
    section.table(table)
}

fn facts(p: &Process) -> Table {
    let mut table = Table::new(&["TCP", "sends", "receives"]);
    let mut row = |name: &str, of: &dyn Fn(&Way) -> String| {
        table.push([name.to_owned(), of(&p.sends), of(&p.receives)]);
    };
    row("calls", &|w| w.get(Flow::Calls).to_string());
    row("bytes", &|w| human(w.get(Flow::Bytes)));
    row("to or from this host", &|w| {
        percent(w.share(Flow::BytesSameHost, Flow::Bytes))
    });
    row("time in the calls", &|w| seconds(w.get(Flow::Ns)));
    row("of that, waiting (of a sample)", &|w| seconds(w.waited()));
    row("found nothing or no room (EAGAIN)", &|w| {
        percent(w.share(Flow::Again, Flow::Calls))
    });
    row("buffer used before", &|w| percent(again(w, Flow::Again1)));
    row("64 KiB around it used before", &|w| {
        percent(again(w, Flow::AreaAgain))
    });
    row("buffer begins on a page", &|w| {
        percent(again(w, Flow::Aligned))
    });
    row("pages resident (of a sample)", &|w| {
        percent(w.share(Flow::Resident, Flow::Pages))
    });
    row("several pieces", &|w| {
        percent(w.share(Flow::Gathers, Flow::Calls))
    });
    row("could overlap: until the buffer's next call", &|w| {
        seconds(w.get(Flow::OverlapNs))
    });
    row("time between calls with one buffer", &|w| {
        let all: u64 = w.gaps.iter().fold(0, |sum, n| sum.saturating_add(*n));
        let below = w.gaps.iter().zip(GAP_ENDS).map(|(n, end)| {
            let share = weft_advise::record::share(*n, all);
            format!("<{} µs {}", end / 1000, percent(share))
        });
        if all == 0 {
            return "-".to_owned();
        }
        below.collect::<Vec<_>>().join(", ")
    });
    let waits = p.get(Count::Waits);
    let connections = p
        .get(Count::SameHost)
        .saturating_add(p.get(Count::OtherHost));
    table.push([
        "connections".to_owned(),
        format!("{connections}: {} to this host", p.get(Count::SameHost)),
        format!(
            "{} connects, {} accepts",
            p.get(Count::Connects),
            p.get(Count::Accepts)
        ),
    ]);
    table.push([
        "poll, select, epoll".to_owned(),
        format!("{waits} calls, {} empty", p.get(Count::WaitsEmpty)),
        format!("{} in them", seconds(p.get(Count::WaitNs))),
    ]);
    for (count, name) in [
        (Count::FileCalls, "sendfile, splice"),
        (Count::Turns, "turns (a send after a receive)"),
        (Count::Datagrams, "UDP sockets"),
        (Count::Unix, "Unix sockets"),
        (Count::Peeks, "receives that only look"),
        (Count::Rights, "messages that pass descriptors"),
        (Count::ZeroCopy, "sends with MSG_ZEROCOPY"),
        (Count::Uring, "io_uring set up"),
        (Count::Direct, "socket calls by syscall(), not recorded"),
    ] {
        if p.get(count) > 0 {
            table.push([name.to_owned(), p.get(count).to_string(), String::new()]);
        }
    }
    table
}

/// The share of calls that moved something.
fn again(way: &Way, flow: Flow) -> Option<f64> {
    let none = way.get(Flow::Again).saturating_add(way.get(Flow::Failed));
    weft_advise::record::share(way.get(flow), way.get(Flow::Calls).saturating_sub(none))
}

fn sizes(p: &Process) -> Table {
    let mut table = Table::new(&["size", "sends", "bytes", "receives", "bytes received"]);
    for (out, into) in p.sends.sizes.iter().zip(&p.receives.sizes) {
        if out.count == 0 && into.count == 0 {
            continue;
        }
        let used = [out, into].into_iter().filter(|class| class.count > 0);
        let least = used.clone().map(|class| class.least).min().unwrap_or(0);
        let most = used.map(|class| class.most).max().unwrap_or(0);
        let range = if least == most {
            human(least)
        } else {
            format!("{} to {}", human(least), human(most))
        };
        table.push([
            range,
            out.count.to_string(),
            human(out.bytes),
            into.count.to_string(),
            human(into.bytes),
        ]);
    }
    table
}

fn histogram(p: &Process) -> Plot {
    let title = format!("Bytes by size of the call, {}", short(&p.name));
    let line = |way: &Way| {
        let classes = way
            .sizes
            .iter()
            .filter(|class| class.count > 0 && class.most > 0);
        classes
            .map(|class| (class.most as f64, class.bytes as f64 / 1e6))
            .collect()
    };
    Plot::new(title, Axis::bytes(), Axis::linear("MB"))
        .series(Series::new("sends", Stroke::Weft, line(&p.sends)))
        .series(Series::new("receives", Stroke::Tcp, line(&p.receives)))
}
