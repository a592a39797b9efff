//! The repetitions of a plan, summarized: tables, plots, JSON.

use super::blast::Run;
use super::plan::{Lengths, Plan};
use super::run::Counters;
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine, number};
use crate::size::human;
use crate::stats::Mean;
use serde::Serialize;

/// A quantity of a run: its name in JSON, its label, its unit, and the function that reads it.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    words: &'static str,
    unit: &'static str,
    pub(crate) read: fn(&Run) -> f64,
}

/// A table of figures, in the order in which they are shown.
macro_rules! figures {
    ($($figure:ident: $name:literal, $words:literal, $unit:literal => $read:expr;)*) => {
        $(pub(crate) const $figure: Figure = Figure { name: $name, words: $words, unit: $unit, read: $read };)*
        pub(crate) const FIGURES: &[Figure] = &[$($figure),*];
    };
}

figures! {
    GIGABITS: "throughput_Gbps", "throughput", "Gb/s" => Run::gigabits;
    MESSAGE: "message_us", "time per message", "µs" => Run::message_us;
    CLIENT_CPU: "cpu_percent_sender", "CPU of the sender", "%" => Run::client_percent;
    SERVER_CPU: "cpu_percent_receiver", "CPU of the receiver", "%" => Run::server_percent;
    DIRECT_RATIO: "direct_ratio", "direct sends of all", "" => |run| run.client.direct_ratio();
    DIRECT: "direct", "direct transfers", "" => |run| run.client.direct as f64;
    INDIRECT: "indirect", "indirect transfers", "" => |run| run.client.indirect as f64;
    SMALL: "small", "small packets", "" => |run| run.client.small as f64;
    SWITCHES: "mode_switches", "mode switches", "" => |run| run.client.mode_switches as f64;
    ADVERTS: "adverts", "adverts sent", "" => |run| both(run, |side| side.adverts_sent);
    DROPPED: "adverts_dropped", "adverts dropped as stale", "" => |run| both(run, |side| side.adverts_dropped);
    CREDIT: "credit_stalls", "waits for a credit, both sides", "" => |run| both(run, |side| side.credit_stalls);
    RING: "ring_stalls", "waits for room in the buffer", "" => |run| run.client.ring_stalls as f64;
}

/// A counter of both ends.
fn both(run: &Run, of: fn(&Counters) -> u64) -> f64 {
    (of(&run.client) + of(&run.server)) as f64
}

impl Figure {
    /// The label with its unit.
    pub(crate) fn label(&self) -> String {
        if self.unit.is_empty() {
            self.words.to_owned()
        } else {
            format!("{} ({})", self.words, self.unit)
        }
    }

    pub(crate) fn mean(&self, runs: &[Run]) -> Option<Mean> {
        Mean::of(&runs.iter().map(self.read).collect::<Vec<_>>())
    }
}

/// A mean with its interval, as people write it.
pub(crate) fn with_interval(mean: &Mean) -> String {
    match mean.ci95 {
        Some(half) => format!("{} ± {}", number(mean.mean), number(half)),
        None => number(mean.mean),
    }
}

/// A repetition, or a mean of all, as a line of JSON.
#[derive(Serialize)]
struct Line<'a, T> {
    bench: &'static str,
    plan: &'a Plan,
    #[serde(flatten)]
    what: T,
}

#[derive(Serialize)]
struct Repetition<'a> {
    repetition: usize,
    #[serde(flatten)]
    run: &'a Run,
}

#[derive(Serialize)]
struct Metric {
    metric: &'static str,
    #[serde(flatten)]
    mean: Mean,
}

/// The repetitions of a plan, and their means, one JSON object a line.
pub fn json_lines(plan: &Plan, runs: &[Run]) -> serde_json::Result<String> {
    fn line(plan: &Plan, what: impl Serialize) -> serde_json::Result<String> {
        let bench = "blast";
        Ok(serde_json::to_string(&Line { bench, plan, what })? + "\n")
    }
    let mut out = String::new();
    for (repetition, run) in runs.iter().enumerate() {
        out += &line(plan, Repetition { repetition, run })?;
    }
    for figure in FIGURES {
        if let Some(mean) = figure.mean(runs) {
            let metric = figure.name;
            out += &line(plan, Metric { metric, mean })?;
        }
    }
    Ok(out)
}

/// A description of a plan in one line.
pub fn describe(plan: &Plan) -> String {
    let lengths = match plan.lengths {
        Lengths::Fixed(len) => format!("messages of {}", human(len)),
        Lengths::Exponential { mean, max, seed } => format!(
            "messages of an exponential distribution (mean {}, at most {}, seed {seed})",
            human(mean),
            human(max)
        ),
    };
    let mut words = vec![
        format!("{} {}", plan.kind.name(), plan.mode.name()),
        lengths,
        format!(
            "{} sends, {} receives outstanding",
            plan.sends, plan.receives
        ),
        format!("buffer {}", human(plan.buffer.into())),
        format!("small packets up to {} B", plan.small),
        format!("{} credits", plan.credits),
        format!("wait: {}", plan.wait.name()),
    ];
    if plan.kind == super::Kind::Seqpacket {
        words[0] = format!("seqpacket, design {}", plan.design.name());
    }
    for (is, word) in [
        (plan.waitall, "WAITALL"),
        (plan.in_place, "in place"),
        (!plan.registered, "ordinary memory"),
        (plan.crc, "CRC"),
    ] {
        if is {
            words.push(word.to_owned());
        }
    }
    words.join(", ")
}

/// Tables and plots of the repetitions of a plan.
pub fn report(plan: &Plan, runs: &[Run]) -> Report {
    let mut report = Report::new("weft-papers blast");
    report.intro.push(describe(plan));
    report.intro.push(machine());
    if let Some(run) = runs.first() {
        let path = match run.path.strip_prefix("local") {
            Some(why) => format!("shared memory{why}"),
            None => run.path.clone(),
        };
        report.intro.push(format!("Over {path}."));
    }
    if plan.verify.is_some() {
        report.intro.push(
            "Every byte was compared with what was sent, while the clock ran: times mean little."
                .to_owned(),
        );
    }
    let mut table = Table::new(&["figure", "mean, 95 % confidence", "unit"]);
    for figure in FIGURES {
        if let Some(mean) = figure.mean(runs) {
            table.push([figure.words, &with_interval(&mean), figure.unit]);
        }
    }
    let title = match runs.len() {
        1 => "One repetition".to_owned(),
        many => format!("Means of {many} repetitions"),
    };
    let mut section = Section::new(title).table(table);
    for (figure, title) in [
        (&GIGABITS, "Throughput of each repetition"),
        (&DIRECT_RATIO, "Direct ratio of each repetition"),
        (&SWITCHES, "Mode switches of each repetition"),
    ] {
        let points = runs.iter().enumerate();
        let points = points.map(|(index, run)| ((index + 1) as f64, (figure.read)(run)));
        let line = Series::new(figure.words, Stroke::Weft, points.collect());
        let plot = Plot::new(
            title,
            Axis::linear("repetition"),
            Axis::linear(&figure.label()),
        );
        section = section.plot(plot.series(line));
    }
    report.sections.push(section);
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(seconds: f64) -> Run {
        Run {
            bytes: 1_000_000_000,
            messages: 1000,
            receives: 1000,
            seconds,
            client_cpu: 0.5,
            server_cpu: 1.0,
            client: Counters {
                direct: 3,
                indirect: 4,
                direct_sends: 3,
                indirect_sends: 1,
                ..Counters::default()
            },
            server: Counters::default(),
            path: "tcp".to_owned(),
        }
    }

    #[test]
    fn the_figures_of_a_run() {
        let run = run(2.0);
        let close = |left: f64, right: f64| assert!((left - right).abs() < 1e-9, "{left} {right}");
        close(run.gigabits(), 4.0);
        close(run.message_us(), 2000.0);
        close(run.client_percent(), 25.0);
        close(run.server_percent(), 50.0);
        close(run.client.direct_ratio(), 0.75);
    }

    #[test]
    fn lines_and_pages() {
        let runs = [run(1.0), run(2.0), run(1.5)];
        let plan = Plan::default();
        let lines = json_lines(&plan, &runs).unwrap();
        let lines: Vec<serde_json::Value> = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 3 + FIGURES.len());
        assert_eq!(lines[2]["repetition"], 2);
        assert_eq!(lines[2]["seconds"], 1.5);
        assert_eq!(lines[3]["metric"], "throughput_Gbps");
        assert!(lines[3]["ci95"].as_f64().unwrap() > 0.0);
        assert_eq!(lines[3]["plan"]["mode"], "dynamic");
        let report = report(&plan, &runs);
        assert!(report.to_text(None).contains("5.78 ±"));
        assert!(report.to_html().contains("<svg"));
    }
}
