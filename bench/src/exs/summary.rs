//! What the repetitions of a plan say together: tables, plots, JSON.

use super::blast::Run;
use super::plan::{Lengths, Plan};
use crate::report::{Axis, Plot, Report, Section, Series, Stroke, Table, machine, number};
use crate::size::human;
use crate::stats::Mean;
use serde::Serialize;

/// A figure of a run: its name in JSON, in words, its unit, and how it is read.
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    words: &'static str,
    unit: &'static str,
    pub(crate) read: fn(&Run) -> f64,
}

pub(crate) const GIGABITS: Figure = Figure {
    name: "throughput_Gbps",
    words: "throughput",
    unit: "Gb/s",
    read: Run::gigabits,
};
pub(crate) const SERVER_CPU: Figure = Figure {
    name: "cpu_percent_receiver",
    words: "CPU of the receiver",
    unit: "%",
    read: Run::server_percent,
};
pub(crate) const CLIENT_CPU: Figure = Figure {
    name: "cpu_percent_sender",
    words: "CPU of the sender",
    unit: "%",
    read: Run::client_percent,
};
pub(crate) const DIRECT_RATIO: Figure = Figure {
    name: "direct_ratio",
    words: "direct sends of all",
    unit: "",
    read: |run| run.client.direct_ratio(),
};
pub(crate) const SWITCHES: Figure = Figure {
    name: "mode_switches",
    words: "mode switches",
    unit: "",
    read: |run| run.client.mode_switches as f64,
};

/// All figures, in the order in which they are shown.
pub(crate) const FIGURES: [Figure; 13] = [
    GIGABITS,
    Figure {
        name: "message_us",
        words: "time per message",
        unit: "µs",
        read: Run::message_us,
    },
    CLIENT_CPU,
    SERVER_CPU,
    DIRECT_RATIO,
    Figure {
        name: "direct",
        words: "direct transfers",
        unit: "",
        read: |run| run.client.direct as f64,
    },
    Figure {
        name: "indirect",
        words: "indirect transfers",
        unit: "",
        read: |run| run.client.indirect as f64,
    },
    Figure {
        name: "small",
        words: "small packets",
        unit: "",
        read: |run| run.client.small as f64,
    },
    SWITCHES,
    Figure {
        name: "adverts",
        words: "adverts sent",
        unit: "",
        read: |run| (run.server.adverts_sent + run.client.adverts_sent) as f64,
    },
    Figure {
        name: "adverts_dropped",
        words: "adverts dropped as stale",
        unit: "",
        read: |run| (run.server.adverts_dropped + run.client.adverts_dropped) as f64,
    },
    Figure {
        name: "credit_stalls",
        words: "waits for a credit, both sides",
        unit: "",
        read: |run| (run.server.credit_stalls + run.client.credit_stalls) as f64,
    },
    Figure {
        name: "ring_stalls",
        words: "waits for room in the buffer",
        unit: "",
        read: |run| run.client.ring_stalls as f64,
    },
];

impl Figure {
    /// In words, with its unit.
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
    for figure in &FIGURES {
        if let Some(mean) = figure.mean(runs) {
            let metric = figure.name;
            out += &line(plan, Metric { metric, mean })?;
        }
    }
    Ok(out)
}

/// A plan in one line of words.
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
    let mut report = Report::new("weft blast");
    report.intro.push(describe(plan));
    report.intro.push(machine());
    if let Some(run) = runs.first() {
        report.intro.push(format!("Over {}.", run.path));
    }
    if plan.verify.is_some() {
        report.intro.push(
            "Every byte was compared with what was sent, while the clock ran: times mean little."
                .to_owned(),
        );
    }
    let mut table = Table::new(&["figure", "mean, 95 % confidence", "unit"]);
    for figure in &FIGURES {
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
    use super::super::Counters;
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
