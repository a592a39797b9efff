//! What chapter 5 concludes, what `weft cc` is to reach, and whether that holds here.

use serde_json::{Value, json};

use super::scaling::Point;
use super::systems::System;
use crate::report::{Section, Table};

/// One of them.
pub(super) struct Verdict {
    what: &'static str,
    /// In words.
    target: String,
    /// `None`: what was to be compared did not do what its name says.
    measured: Option<f64>,
    holds: bool,
}

impl Verdict {
    fn at_most(what: &'static str, limit: f64, measured: f64) -> Self {
        Self {
            what,
            target: format!("at most {limit}"),
            measured: Some(measured),
            holds: measured <= limit,
        }
    }

    fn at_least(what: &'static str, limit: f64, measured: f64) -> Self {
        Self {
            what,
            target: format!("at least {limit}"),
            measured: Some(measured),
            holds: measured >= limit,
        }
    }

    fn within(what: &'static str, low: f64, high: f64, measured: f64) -> Self {
        Self {
            what,
            target: format!("{low} to {high}"),
            measured: Some(measured),
            holds: (low..=high).contains(&measured),
        }
    }

    /// As it is where nothing was measured.
    fn unless(self, missing: bool) -> Self {
        Self {
            measured: self.measured.filter(|_| !missing),
            holds: self.holds && !missing,
            ..self
        }
    }

    fn word(&self) -> &'static str {
        match self.measured {
            None => "not measured",
            Some(_) if self.holds => "holds",
            Some(_) => "does not hold",
        }
    }

    pub(super) fn json(&self) -> Value {
        let holds = self.measured.map(|_| self.holds);
        json!({"bench": "cc", "verdict": self.what, "target": self.target, "measured": self.measured, "holds": holds})
    }
}

pub(super) fn median(values: &[f64]) -> f64 {
    crate::stats::Summary::of(values).map_or(f64::NAN, |summary| summary.median)
}

/// Of the points with most workers, and of those with fewer.
pub(super) fn of_points(points: &[Point]) -> Vec<Verdict> {
    let most = points.iter().map(|p| p.workers).max().unwrap_or(0);
    let at = |system, workers| {
        points
            .iter()
            .find(|p| p.system == system && p.workers == workers)
    };
    let of = |system| at(system, most);
    let mut all = Vec::new();
    if let (Some(disk), Some(memory)) = (of(System::TcpDisk), of(System::TcpMemory)) {
        all.push(Verdict::within(
            "5.4.1: disk or memory makes no difference: jobs/s, disk over memory",
            0.9,
            1.1,
            disk.rate / memory.rate,
        ));
    }
    let Some(tcp) = of(System::TcpMemory) else {
        return all;
    };
    if let Some(rdma) = of(System::Rdma) {
        all.push(Verdict::within(
            "5.4.2: software RDMA alone changes little: jobs/s over distcc's",
            0.85,
            1.15,
            rdma.rate / tcp.rate,
        ));
    }
    if let Some(seven) = at(System::TcpMemory, 7).filter(|_| most > 7) {
        all.push(Verdict::at_most(
            "5.4.2: distcc scales to 7 workers only: jobs/s with most over those with 7",
            1.2,
            tcp.rate / seven.rate,
        ));
    }
    if let Some(apart) = of(System::RdmaCore) {
        all.push(Verdict::at_least(
            "5.4.3: RDMA on a processor of its own: jobs/s over distcc's",
            2.0,
            apart.rate / tcp.rate,
        ));
    }
    all.push(Verdict::at_least(
        "5.4.4: distcc's master spends most on transfers and management (87 %): part without preprocessor",
        0.5,
        tcp.own() / tcp.all(),
    ));
    all.push(Verdict::at_most(
        "5.4.4: distcc's master has no time left: idle",
        0.05,
        tcp.idle,
    ));
    all.push(Verdict::at_most(
        "5.4.4: distcc cannot keep its workers busy (79.8 %): part of their time in compilers",
        0.8,
        tcp.busy,
    ));
    if let Some(rdma) = of(System::Rdma) {
        all.push(Verdict::at_most(
            "aim: master's CPU for a job without preprocessor, weft cc over distcc",
            0.5,
            rdma.own() / tcp.own(),
        ));
    }
    if let Some(pull) = of(System::Pull) {
        all.push(Verdict::at_most(
            "aim: all of the master's CPU for a job, weft cc --pull over distcc",
            0.3,
            pull.all() / tcp.all(),
        ));
        if let Some(pump) = of(System::Pump) {
            let verdict = Verdict::at_most(
                "aim: all of the master's CPU for a job, weft cc --pull over distcc-pump",
                0.7,
                pull.all() / pump.all(),
            );
            all.push(verdict.unless(pump.fell_back()));
        }
        all.push(Verdict::at_least(
            "aim: jobs/s with most workers, weft cc --pull over distcc",
            2.0,
            pull.rate / tcp.rate,
        ));
    }
    all
}

/// A build with two workers takes no longer than distcc's.
pub(super) fn of_builds(times: &[(System, Vec<f64>)]) -> Vec<Verdict> {
    let of = |system| times.iter().find(|t| t.0 == system).map(|t| median(&t.1));
    let Some(distcc) = of(System::TcpMemory) else {
        return Vec::new();
    };
    let verdict = |system, what| Some(Verdict::at_most(what, 1.0, of(system)? / distcc));
    [
        verdict(System::Rdma, "aim: time of a build, weft cc over distcc"),
        verdict(
            System::Pull,
            "aim: time of a build, weft cc --pull over distcc",
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

pub(super) fn section(verdicts: &[Verdict]) -> Section {
    let mut table = Table::new(&["conclusion or aim", "holds if", "measured", ""]);
    for v in verdicts {
        table.push([
            v.what.to_owned(),
            v.target.clone(),
            v.measured.map_or("-".into(), |n| format!("{n:.2}")),
            v.word().to_owned(),
        ]);
    }
    Section::new("The chapter's conclusions, and what weft cc is to reach").table(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(system: System, cpu: f64, other: u64) -> Point {
        Point {
            system,
            workers: 14,
            rate: 10.0,
            jobs: 20,
            client: cpu,
            preprocess: 0.0,
            daemon: 0.0,
            idle: 0.0,
            busy: 0.5,
            other,
        }
    }

    #[test]
    fn a_pump_that_preprocesses_itself_is_not_compared() {
        let verdict = |other| {
            let points = [
                point(System::TcpMemory, 1.0, 0),
                point(System::Pump, 1.0, other),
                point(System::Pull, 0.5, 0),
            ];
            let all = of_points(&points);
            let found = all.into_iter().find(|v| v.what.ends_with("distcc-pump"));
            found.unwrap()
        };
        let measured = verdict(1);
        assert_eq!((measured.measured, measured.word()), (Some(0.5), "holds"));
        assert_eq!(measured.json()["holds"], true);
        let missing = verdict(20);
        assert_eq!((missing.measured, missing.word()), (None, "not measured"));
        assert!(missing.json()["holds"].is_null() && missing.json()["measured"].is_null());
    }
}
