//! The targets of weft's server and the conclusions of the thesis's chapter 6: whether each holds here, with the
//! number.

use super::server::Kind;
use super::{Measured, Point};
use crate::aims::Limit::AtMost;
use crate::aims::{Aim, aims};
use crate::conclusions::{Conclusions, claims};
use crate::report::number;

/// The parts of the chapter that this suite does not reproduce.
pub(super) const NOT_REMADE: &str = "Not remade: the TCP offload engine's line of fig. 6.7 and the RNIC's of figs. 6.10 and 6.11 (neither is here: viewers of the \
     same host copy for themselves, as an RNIC would). Viewers and servers share one machine, so a server that is limited by the CPUs is limited earlier. \
     Figs. 6.1, 6.2, 6.5, 6.6 and 6.9 are drawings.";

/// Viewers and rate of the thesis's direct comparison, fig. 6.12.
const COMPARED: (usize, f64) = (200, 5.3);

fn same(one: f64, other: f64) -> bool {
    (one - other).abs() < f64::EPSILON
}

/// The ratio; 0 if both are 0.
fn ratio(ours: f64, theirs: f64) -> f64 {
    if ours == 0.0 { 0.0 } else { ours / theirs }
}

impl Measured {
    fn point(&self, server: Kind, viewers: usize, rate: f64, jump: Option<f64>) -> Option<&Point> {
        self.points.iter().find(|p| {
            let jumps = match (p.jump, jump) {
                (None, None) => true,
                (Some(one), Some(other)) => same(one, other),
                _ => false,
            };
            p.server == server && p.viewers == viewers && same(p.rate, rate) && jumps
        })
    }

    /// The number of viewers next to that of fig. 6.12, and among their rates the next.
    fn compared(&self, jumps: bool) -> Option<(usize, f64)> {
        let points = self.points.iter().filter(|p| p.jump.is_some() == jumps);
        let near = |p: &&Point| {
            let far = (p.rate - COMPARED.1).abs() * 1e3;
            (p.viewers.abs_diff(COMPARED.0), far as u64)
        };
        points.min_by_key(near).map(|p| (p.viewers, p.rate))
    }

    fn single(&self, experiment: &str, server: Kind) -> Option<f64> {
        let mut singles = self.singles.iter();
        let found = singles.find(|s| s.experiment == experiment && s.server == server);
        found.map(|s| s.value)
    }

    /// The points of a server at a rate without jumps, by the number of viewers, as far as all was delivered.
    fn line(&self, server: Kind, rate: f64) -> Vec<&Point> {
        let points = self.points.iter();
        points
            .filter(|p| p.server == server && same(p.rate, rate) && p.jump.is_none())
            .take_while(|p| p.delivered() > 0.9)
            .collect()
    }

    /// The largest rate at which a server was measured without jumps.
    fn top_rate(&self) -> f64 {
        let points = self.points.iter().filter(|p| p.jump.is_none());
        points.map(|p| p.rate).fold(0.0, f64::max)
    }
}

/// The targets of weft.
pub(super) fn bars(measured: &Measured) -> Vec<Aim> {
    let mut bars = Vec::new();
    if let Some((viewers, rate)) = measured.compared(false) {
        let at = format!("{viewers} viewers at {rate} Mb/s");
        let two = |ours, theirs| {
            let of = |kind| measured.point(kind, viewers, rate, None);
            of(ours).zip(of(theirs))
        };
        let local = two(Kind::Local, Kind::Sendfile);
        let beside = |other: Kind, most| {
            let what = format!("{at}: CPU per GB, TCP over {}", other.name());
            let cpu = two(Kind::Tcp, other).map(|(p, q)| ratio(p.cpu_per_gb(), q.cpu_per_gb()));
            Aim::of(what, AtMost(most), cpu)
        };
        bars.extend(aims! {
            format!("{at}: CPU, same host over nginx sendfile"), AtMost(0.1) => local.map(|(p, q)| ratio(p.cpu, q.cpu));
            format!("{at}: context switches, same host over nginx sendfile"), AtMost(0.1) =>
                local.map(|(p, q)| p.switches as f64 / q.switches.max(1) as f64);
        });
        bars.extend(beside(Kind::Sendfile, 1.25));
        bars.extend(beside(Kind::ReadWrite, 0.7));
        bars.extend(beside(Kind::Vlc, 0.3));
    }
    let single = |experiment, ours, theirs| {
        let of = |kind| measured.single(experiment, kind);
        Some(ratio(of(ours)?, of(theirs)?))
    };
    for (other, most) in [(Kind::Sendfile, 1.25), (Kind::ReadWrite, 0.7)] {
        let what = format!("1 GB at once: CPU, TCP over {}", other.name());
        bars.extend(Aim::of(
            what,
            AtMost(most),
            single("gigabyte", Kind::Tcp, other),
        ));
    }
    if let Some((viewers, rate)) = measured.compared(true) {
        for kind in [Kind::Local, Kind::Tcp] {
            let what = format!(
                "{viewers} viewers at {rate} Mb/s: CPU per GB, {}, jumps each 30 s over none",
                kind.name()
            );
            let of = |jump| Some(measured.point(kind, viewers, rate, jump)?.cpu_per_gb());
            let jumps = of(Some(30.0)).zip(of(None)).map(|(p, q)| ratio(p, q));
            bars.extend(Aim::of(what, AtMost(1.1), jumps));
        }
    }
    for kind in [Kind::Local, Kind::Tcp, Kind::Tls] {
        let what = format!(
            "seek to first byte, {} over an HTTP range of nginx",
            kind.name()
        );
        bars.extend(Aim::of(
            what,
            AtMost(0.7),
            single("seek", kind, Kind::Sendfile),
        ));
    }
    if let Some(live) = measured.live {
        let what = format!("live, {} readers: p99 of notice to data, ms", live.readers);
        bars.push(Aim::new(what, AtMost(5.0), live.p99));
    }
    for kind in [Kind::Local, Kind::Tcp] {
        let what = format!("idle viewers, {}: percent of a core", kind.name());
        bars.extend(Aim::of(what, AtMost(0.1), measured.single("idle", kind)));
    }
    bars
}

/// The chapter's conclusions.
pub(super) fn conclusions(measured: &Measured) -> Conclusions {
    let mut found = Conclusions::default();
    servers(measured, &mut found);
    loads(measured, &mut found);
    jumps(measured, &mut found);
    found
}

fn times(ratio: f64) -> String {
    format!("{} times", number(ratio))
}

/// A comparison of the servers at one number of viewers and one rate.
fn servers(measured: &Measured, found: &mut Conclusions) {
    let Some((viewers, rate)) = measured.compared(false) else {
        return;
    };
    let at = move |text: String| format!("{text} ({viewers} viewers at {rate} Mb/s)");
    let two = |one, other| {
        let of = |kind| measured.point(kind, viewers, rate, None);
        of(one).zip(of(other))
    };
    let cpu = |one, other| two(one, other).map(|(p, q)| ratio(p.cpu_per_gb(), q.cpu_per_gb()));
    let switches =
        |one, other| two(one, other).map(|(p, q)| p.switches_per_s() / q.switches_per_s().max(0.1));
    let is = |holds: fn(f64) -> bool| move |r| (holds(r), at(times(r)));
    claims! { found;
        "figs. 6.4, 6.12", "HTTP with read and write serves over 5 times as many as RTP: a GB costs RTP over 5 times the CPU" =>
            cpu(Kind::Vlc, Kind::ReadWrite).map(is(|r| r > 5.0));
        "figs. 6.3c, 6.12", "RTP has more context switches than HTTP" =>
            switches(Kind::Vlc, Kind::ReadWrite).map(is(|r| r > 1.0));
        "fig. 6.7", "sendfile takes far less CPU than read and write (half and less)" =>
            cpu(Kind::Sendfile, Kind::ReadWrite).map(is(|r| r <= 0.5));
        "fig. 6.10c", "sendfile does not reduce the context switches (less than by half)" =>
            switches(Kind::Sendfile, Kind::ReadWrite).map(is(|r| r > 0.5));
        "figs. 6.10b, 6.12", "RDMA brings the server's CPU down to almost nothing (a tenth of sendfile's): same host" =>
            cpu(Kind::Local, Kind::Sendfile).map(is(|r| r <= 0.1));
        "figs. 6.10c, 6.12", "... and the context switches by an order of magnitude: same host" =>
            switches(Kind::Local, Kind::Sendfile).map(is(|r| r <= 0.1));
        "6.4.2", "RDMA in software at the server suffers as HTTP does: over TCP its CPU is between that of sendfile and of read and write" =>
            cpu(Kind::Tcp, Kind::Sendfile).zip(cpu(Kind::Tcp, Kind::ReadWrite)).map(|(most, least)| {
                let text = format!("{} sendfile's, {} of read and write", times(most), times(least));
                (most >= 1.0 && least <= 1.0, at(text))
            });
    }
}

/// Growth with the number of viewers and the rate.
fn loads(measured: &Measured, found: &mut Conclusions) {
    let rate = measured.top_rate();
    // CPU for each viewer at the largest number of served viewers, divided by that at the smallest number from
    // 50 on.
    let growth = |kind| {
        let line = measured.line(kind, rate);
        let first = line.iter().find(|p| p.viewers >= 50)?;
        let last = line.last().filter(|p| p.viewers > first.viewers)?;
        let each = |p: &Point| p.cpu_percent() / p.viewers as f64;
        Some((ratio(each(last), each(first)), first.viewers, last.viewers))
    };
    let words = |(r, from, to): (f64, usize, usize)| {
        format!(
            "{} for each viewer, from {from} to {to} at {rate} Mb/s",
            times(r)
        )
    };
    let line = measured.line(Kind::Local, rate);
    let most = line.iter().map(|p| p.cpu_percent()).fold(0.0, f64::max);
    // The number of viewers served in time at the smallest and the largest rate.
    let served = |kind, rate| {
        let line = measured.line(kind, rate);
        line.last().map_or(0, |p| p.viewers)
    };
    let rates = || measured.points.iter().map(|p| p.rate);
    let least = rates().fold(f64::MAX, f64::min);
    let has = |kind| measured.points.iter().any(|p| p.server == kind);
    claims! { found;
        "fig. 6.10b", "HTTP with sendfile costs CPU in proportion to the viewers (within 2 times)" =>
            growth(Kind::Sendfile).map(|g| (g.0 > 0.5 && g.0 < 2.0, words(g)));
        "fig. 6.10b", "HTTP with read and write costs more than that (more for each viewer the more there are)" =>
            growth(Kind::ReadWrite).map(|g| (g.0 > 1.1, words(g)));
        "fig. 6.10b", "RDMA's CPU is a small constant, however many watch (under 1 % of a core): same host" =>
            line.last().map(|p| (most < 1.0, format!("at most {} %, to {} viewers at {rate} Mb/s", number(most), p.viewers)));
        "fig. 6.3a", "the higher the rate, the fewer viewers RTP serves" =>
            (has(Kind::Vlc) && least < rate).then(|| {
                let (low, high) = (served(Kind::Vlc, least), served(Kind::Vlc, rate));
                (high < low, format!("{low} at {least} Mb/s, {high} at {rate}"))
            });
        "figs. 6.7a, 6.10a", "RDMA serves as many as sendfile does: same host" =>
            (has(Kind::Local) && has(Kind::Sendfile)).then(|| {
                let (ours, theirs) = (served(Kind::Local, rate), served(Kind::Sendfile, rate));
                (ours >= theirs, format!("{ours} and {theirs} at {rate} Mb/s"))
            });
    }
}

fn jumps(measured: &Measured, found: &mut Conclusions) {
    let Some((viewers, rate)) = measured.compared(true) else {
        return;
    };
    let cost = |kind, jump| {
        let of = |jump| Some(measured.point(kind, viewers, rate, jump)?.cpu_per_gb());
        of(Some(jump)).zip(of(None)).map(|(p, q)| ratio(p, q))
    };
    let words = |r: (f64, f64)| {
        format!(
            "each 60 s {}, each 30 s {} ({viewers} viewers at {rate} Mb/s)",
            times(r.0),
            times(r.1)
        )
    };
    let both = |kind| cost(kind, 60.0).zip(cost(kind, 30.0));
    // The ratio of two values near zero has no meaning.
    let local = |jump| {
        let point = measured.point(Kind::Local, viewers, rate, jump)?;
        Some(point.cpu_percent())
    };
    claims! { found;
        "fig. 6.8a", "jumps cost HTTP with read and write much CPU (half as much again at 30 s)" =>
            both(Kind::ReadWrite).map(|r| (r.1 > 1.5, words(r)));
        "fig. 6.8b", "... and HTTP with sendfile (2.4 and 3.3 times there)" =>
            both(Kind::Sendfile).map(|r| (r.1 > 1.5, words(r)));
        "6.3.2", "jumps cost RTP nothing (within 1.1 times)" => both(Kind::Vlc).map(|r| (r.1 <= 1.1, words(r)));
        "fig. 6.11", "jumps cost the server nothing with RDMA (0.1 % of a core more at most): same host" =>
            local(Some(30.0)).zip(local(None)).map(|(with, without)| {
                (with - without <= 0.1, format!("{} % with, {} % without", number(with), number(without)))
            });
        "fig. 6.11", "... and over TCP in software (within 1.1 times)" =>
            both(Kind::Tcp).map(|r| (r.1 <= 1.1, words(r)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(server: Kind, viewers: usize, cpu: f64, jump: Option<f64>) -> Point {
        Point {
            server,
            viewers,
            rate: 8.0,
            jump,
            bytes: viewers as u64 * 1_000_000,
            seconds: 1.0,
            film: None,
            cpu,
            viewers_cpu: cpu,
            switches: (cpu * 1e4) as u64,
            late: 0,
            starved: 0,
        }
    }

    #[test]
    fn what_was_written_is_read_again_and_the_last_one_counts() {
        let mut measured = Measured::default();
        let mut points = [0.2, 0.4].map(|cpu| point(Kind::Tcp, 200, cpu, Some(30.0)).json());
        measured.take(points[0].take());
        measured.take(point(Kind::Tcp, 200, 0.1, None).json());
        measured.take(points[1].take());
        measured.take(serde_json::json!({"bench": "media", "aim": "of an earlier run"}));
        let seek = |us| super::super::Single::json("seek", Kind::Plain, us, 9.0);
        measured.take(seek(7.0));
        measured.take(seek(8.0));
        assert_eq!(measured.lines.len(), 3);
        let of = |jump| measured.point(Kind::Tcp, 200, 8.0, jump).unwrap().cpu;
        assert!(same(of(Some(30.0)), 0.4) && same(of(None), 0.1));
        assert_eq!(measured.single("seek", Kind::Plain), Some(8.0));
        let mut again = Measured::default();
        measured
            .lines
            .iter()
            .for_each(|line| again.take(line.clone()));
        assert_eq!(again.lines, measured.lines);
        assert_eq!(again.points.len(), 2);
    }

    #[test]
    fn verdicts_follow_the_numbers() {
        let measured = Measured {
            points: vec![
                point(Kind::Sendfile, 50, 0.05, None),
                point(Kind::Sendfile, 200, 0.2, None),
                point(Kind::ReadWrite, 200, 0.6, None),
                point(Kind::Local, 200, 0.001, None),
                point(Kind::Tcp, 200, 0.3, None),
                point(Kind::Tcp, 200, 0.36, Some(30.0)),
                point(Kind::Tcp, 200, 0.3, Some(60.0)),
                point(Kind::Tcp, 1000, 3.0, None),
            ],
            live: Some(super::super::Live {
                readers: 100,
                p50: 0.5,
                p99: 7.0,
                fetches: 9,
            }),
            ..Measured::default()
        };
        let bars = bars(&measured);
        let of = |what: &str| {
            let found = bars.iter().find(|b| b.what.contains(what));
            found.map(|b| (b.limit.holds(b.measured) == Some(true), number(b.measured)))
        };
        assert_eq!(of("CPU, same host"), Some((true, "0.0050".into())));
        assert_eq!(of("TCP over nginx-sendfile"), Some((false, "1.50".into())));
        assert_eq!(of("TCP over nginx-rw"), Some((true, "0.50".into())));
        assert_eq!(of("TCP over vlc-rtp"), None, "not measured");
        assert_eq!(of("jumps each 30 s"), Some((false, "1.20".into())));
        assert_eq!(of("p99 of notice"), Some((false, "7.00".into())));
        let found = conclusions(&measured);
        let of = |claim: &str| {
            let found = found.list.iter().find(|c| c.claim.contains(claim));
            found.map(|c| c.holds)
        };
        assert_eq!(of("sendfile takes far less CPU"), Some(true));
        assert_eq!(of("in proportion to the viewers"), Some(true));
        assert_eq!(of("in software at the server"), Some(true));
        assert_eq!(of("over TCP in software"), Some(false));
        assert_eq!(of("RTP"), None);
        assert!(super::bars(&Measured::default()).is_empty());
        assert!(conclusions(&Measured::default()).list.is_empty());
    }
}
