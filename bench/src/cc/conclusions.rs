//! What chapter 5 concludes, what `weft cc` is to reach, and whether that holds here.

use super::scaling::Point;
use super::systems::System;
use crate::aims::{Aim, Limit};

pub(super) fn median(values: &[f64]) -> f64 {
    crate::stats::Summary::of(values).map_or(f64::NAN, |summary| summary.median)
}

/// Of the points with most workers, and of those with fewer.
pub(super) fn of_points(points: &[Point]) -> Vec<Aim> {
    let most = points.iter().map(|p| p.workers).max().unwrap_or(0);
    let at = |system, workers| {
        points
            .iter()
            .find(|p| p.system == system && p.workers == workers)
    };
    let of = |system| at(system, most);
    let mut all = Vec::new();
    if let (Some(disk), Some(memory)) = (of(System::TcpDisk), of(System::TcpMemory)) {
        all.push(Aim::new(
            "5.4.1: disk or memory makes no difference: jobs/s, disk over memory",
            Limit::Within(0.9, 1.1),
            disk.rate / memory.rate,
        ));
    }
    let Some(tcp) = of(System::TcpMemory) else {
        return all;
    };
    if let Some(rdma) = of(System::Rdma) {
        all.push(Aim::new(
            "5.4.2: software RDMA alone changes little: jobs/s over distcc's",
            Limit::Within(0.85, 1.15),
            rdma.rate / tcp.rate,
        ));
    }
    if let Some(seven) = at(System::TcpMemory, 7).filter(|_| most > 7) {
        all.push(Aim::new(
            "5.4.2: distcc scales to 7 workers only: jobs/s with most over those with 7",
            Limit::AtMost(1.2),
            tcp.rate / seven.rate,
        ));
    }
    if let Some(apart) = of(System::RdmaCore) {
        all.push(Aim::new(
            "5.4.3: RDMA on a processor of its own: jobs/s over distcc's",
            Limit::AtLeast(2.0),
            apart.rate / tcp.rate,
        ));
    }
    all.push(Aim::new("5.4.4: distcc's master spends most on transfers and management (87 %): part without preprocessor", Limit::AtLeast(0.5),
        tcp.own() / tcp.all(),
    ));
    all.push(Aim::new(
        "5.4.4: distcc's master has no time left: idle",
        Limit::AtMost(0.05),
        tcp.idle,
    ));
    all.push(Aim::new(
        "5.4.4: distcc cannot keep its workers busy (79.8 %): part of their time in compilers",
        Limit::AtMost(0.8),
        tcp.busy,
    ));
    if let Some(rdma) = of(System::Rdma) {
        all.push(Aim::new(
            "aim: master's CPU for a job without preprocessor, weft cc over distcc",
            Limit::AtMost(0.5),
            rdma.own() / tcp.own(),
        ));
    }
    if let Some(pull) = of(System::Pull) {
        all.push(Aim::new(
            "aim: all of the master's CPU for a job, weft cc --pull over distcc",
            Limit::AtMost(0.3),
            pull.all() / tcp.all(),
        ));
        if let Some(pump) = of(System::Pump) {
            let ratio = pull.all() / pump.all();
            all.push(Aim::new(
                "aim: all of the master's CPU for a job, weft cc --pull over distcc-pump",
                Limit::AtMost(0.7),
                if pump.fell_back() { f64::NAN } else { ratio },
            ));
        }
        all.push(Aim::new(
            "aim: jobs/s with most workers, weft cc --pull over distcc",
            Limit::AtLeast(2.0),
            pull.rate / tcp.rate,
        ));
    }
    all
}

/// A build with two workers takes no longer than distcc's.
pub(super) fn of_builds(times: &[(System, Vec<f64>)]) -> Vec<Aim> {
    let of = |system| times.iter().find(|t| t.0 == system).map(|t| median(&t.1));
    let Some(distcc) = of(System::TcpMemory) else {
        return Vec::new();
    };
    let verdict =
        |system, what: &str| Some(Aim::new(what, Limit::AtMost(1.0), of(system)? / distcc));
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
        let aim = |other| {
            let points = [
                point(System::TcpMemory, 1.0, 0),
                point(System::Pump, 1.0, other),
                point(System::Pull, 0.5, 0),
            ];
            let all = of_points(&points);
            let found = all
                .into_iter()
                .find(|aim| aim.what.ends_with("distcc-pump"));
            found.unwrap()
        };
        let measured = aim(1);
        assert_eq!((measured.measured, measured.holds()), (0.5, Some(true)));
        let missing = aim(20).json("cc");
        assert!(missing["holds"].is_null() && missing["measured"].is_null());
    }
}
