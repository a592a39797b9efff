//! The conclusions of chapter 5 and the targets of `weft cc`, and whether they hold here.

use super::scaling::Point;
use super::systems::System;
use crate::aims::Limit::{AtLeast, AtMost, Within};
use crate::aims::{Aim, aims};

pub(super) fn median(values: &[f64]) -> f64 {
    crate::stats::Summary::of(values).map_or(f64::NAN, |summary| summary.median)
}

/// The aims for the points with most workers, and for those with fewer.
pub(super) fn of_points(points: &[Point]) -> Vec<Aim> {
    let most = points.iter().map(|p| p.workers).max().unwrap_or(0);
    let at = |system, workers| {
        points
            .iter()
            .find(|p| p.system == system && p.workers == workers)
    };
    let of = |system| at(system, most);
    let tcp = of(System::TcpMemory);
    let rate = |system, over: Option<&Point>| Some(of(system)?.rate / over?.rate);
    let seven = at(System::TcpMemory, 7).filter(|_| most > 7);
    let own = || Some(of(System::Rdma)?.own() / tcp?.own());
    let all = |over: Option<&Point>| {
        Some(of(System::Pull).filter(|_| tcp.is_some())?.all() / over?.all())
    };
    let pump = of(System::Pump);
    let of_pump = all(pump).map(|ratio| match pump {
        Some(pump) if pump.fell_back() => f64::NAN,
        _ => ratio,
    });
    aims! {
        "5.4.1: disk or memory makes no difference: jobs/s, disk over memory", Within(0.9, 1.1) => rate(System::TcpDisk, tcp);
        "5.4.2: software RDMA alone changes little: jobs/s over distcc's", Within(0.85, 1.15) => rate(System::Rdma, tcp);
        "5.4.2: distcc scales to 7 workers only: jobs/s with most over those with 7", AtMost(1.2) => rate(System::TcpMemory, seven);
        "5.4.3: RDMA on a processor of its own: jobs/s over distcc's", AtLeast(2.0) => rate(System::RdmaCore, tcp);
        "5.4.4: distcc's master spends most on transfers and management (87 %): part without preprocessor", AtLeast(0.5) =>
            tcp.map(|tcp| tcp.own() / tcp.all());
        "5.4.4: distcc's master has no time left: idle", AtMost(0.05) => tcp.map(|tcp| tcp.idle);
        "5.4.4: distcc cannot keep its workers busy (79.8 %): part of their time in compilers", AtMost(0.8) => tcp.map(|tcp| tcp.busy);
        "aim: master's CPU for a job without preprocessor, weft cc over distcc", AtMost(0.5) => own();
        "aim: all of the master's CPU for a job, weft cc --pull over distcc", AtMost(0.3) => all(tcp);
        "aim: all of the master's CPU for a job, weft cc --pull over distcc-pump", AtMost(0.7) => of_pump;
        "aim: jobs/s with most workers, weft cc --pull over distcc", AtLeast(2.0) => rate(System::Pull, tcp);
    }
}

/// A build with two workers takes at most as long as distcc's.
pub(super) fn of_builds(times: &[(System, Vec<f64>)]) -> Vec<Aim> {
    let of = |system| times.iter().find(|t| t.0 == system).map(|t| median(&t.1));
    let of_distcc = |system| Some(of(system)? / of(System::TcpMemory)?);
    aims! {
        "aim: time of a build, weft cc over distcc", AtMost(1.0) => of_distcc(System::Rdma);
        "aim: time of a build, weft cc --pull over distcc", AtMost(1.0) => of_distcc(System::Pull);
    }
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
