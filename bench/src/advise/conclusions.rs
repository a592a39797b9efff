//! What the thesis's chapter 4 concludes: whether it holds here, with the number.

use super::show::words;
use crate::conclusions::Conclusions;
use crate::record::{Metric, Record, Side};
use crate::report::number;
use crate::size::human;
use weft_advise::machine::{Case, Critical, Machine};

/// What of the chapter this suite does not remake.
pub(super) const NOT_REMADE: [&str; 3] = [
    "Not remade: the RNIC's lines of figs. 4.3 to 4.5 and 4.8 to 4.10 (there is no RNIC; pinning stands for its driver's part, without the device's), and \
     fig. 4.7 (it compares several machines; run the suite on each).",
    "Tables 4.2 and 4.3 are about programs: `weft advise -- PROGRAM` fills them in.",
    "Figs. 4.1 and 4.2 are drawings.",
];

/// Sizes that the chapter calls large.
const LARGE: u64 = 1 << 20;

struct Data<'a>(&'a Machine, &'a [Record]);

impl Data<'_> {
    /// The ratios of two cases, by size.
    fn ratios(&self, over: Case, under: Case) -> Vec<(u64, f64)> {
        let line = self.0.line(over).into_iter();
        line.filter_map(|(bytes, us)| Some((bytes, us / self.0.at(under, bytes)?)))
            .filter(|(_, ratio)| ratio.is_finite())
            .collect()
    }

    /// The largest ratio at sizes from `least` on.
    fn largest(&self, over: Case, under: Case, least: u64) -> Option<(u64, f64)> {
        let ratios = self.ratios(over, under).into_iter();
        ratios
            .filter(|(bytes, _)| *bytes >= least)
            .max_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// A step of table 4.1, µs.
    fn step(&self, stack: &str, bytes: u64, step: &str) -> Option<f64> {
        let mut records = self.1.iter().filter(|record| record.op == "setup");
        let found = records.find(|record| {
            record.stack == stack && record.bytes == bytes && record.case.as_deref() == Some(step)
        });
        found.map(|record| record.summary.median)
    }

    /// The ratio of two buffer schemes at the sizes from 1 MiB on: least and most.
    fn schemes(&self, metric: Metric, over: &str, under: &str) -> Option<(f64, f64)> {
        let line = |case: &str| {
            let records = self.1.iter().filter(move |record| {
                record.op == "buffers"
                    && record.metric == metric
                    && record.stack == "weft"
                    && record.side != Some(Side::Receiver)
                    && record.bytes >= LARGE
            });
            let case = case.to_owned();
            let line = records.filter(move |record| record.case.as_deref() == Some(&case));
            line.map(|record| (record.bytes, record.summary.median))
                .collect::<Vec<_>>()
        };
        let below = line(under);
        let ratios = line(over).into_iter().filter_map(|(bytes, value)| {
            let other = below.iter().find(|point| point.0 == bytes)?.1;
            Some(value / other)
        });
        ratios.fold(None, |range, ratio| {
            let (low, high) = range.unwrap_or((ratio, ratio));
            Some((low.min(ratio), high.max(ratio)))
        })
    }
}

fn size_of(critical: Critical) -> Option<u64> {
    match critical {
        Critical::Always => Some(0),
        Critical::From(bytes) => Some(bytes),
        Critical::Never => Some(u64::MAX),
        Critical::Unknown => None,
    }
}

/// Everything that can be said of what was measured.
pub(super) fn conclusions(machine: &Machine, records: &[Record]) -> Conclusions {
    let mut found = Conclusions::default();
    let data = Data(machine, records);
    set_up(&data, &mut found);
    registration(&data, &mut found);
    strategies(&data, &mut found);
    overlaps(&data, &mut found);
    schemes(&data, &mut found);
    found
}

fn set_up(data: &Data<'_>, found: &mut Conclusions) {
    let first = |stack| data.step(stack, 1, "total");
    found.add(
        "table 4.1",
        "the time to the first byte is two thousand times TCP's",
        first("weft").zip(first("tcp")).map(|(ours, tcp)| {
            let ratio = ours / tcp;
            (
                ratio > 1000.0,
                format!(
                    "{} µs against {}: {} times",
                    number(ours),
                    number(tcp),
                    number(ratio)
                ),
            )
        }),
    );
    let part = data
        .step("weft", LARGE, "connect")
        .zip(data.step("weft", LARGE, "total"));
    found.add(
        "table 4.1",
        "up to 1 MB connecting is the dominant cost",
        part.map(|(connect, total)| {
            let part = connect / total;
            (
                part > 0.5,
                format!("{:.0} % of the whole at 1 MiB", part * 100.0),
            )
        }),
    );
}

fn registration(data: &Data<'_>, found: &mut Conclusions) {
    use Case::{CopyAbsent, CopyWarm, Deregister, Pin, PinAbsent, PinHuge, Register, Unpin};
    let growth = |case| {
        let line = data.0.line(case);
        let (first, last) = (line.first()?, line.last()?);
        (first.0 < last.0).then(|| (last.1 / first.1, first.0, last.0))
    };
    let words_of = |(ratio, low, high): (f64, u64, u64)| {
        format!(
            "{} times from {} to {}",
            number(ratio),
            human(low),
            human(high)
        )
    };
    found.add(
        "fig. 4.3",
        "registration grows with the number of pages: pins",
        growth(Pin).map(|g| (g.0 > 10.0, words_of(g))),
    );
    found.add(
        "fig. 4.4",
        "the same in software: weft",
        growth(Register).map(|g| (g.0 > 10.0, words_of(g))),
    );
    found.add(
        "fig. 4.3",
        "at about 2 MB pages that are not resident cost almost an order of magnitude more (5 times and more): pins",
        data.largest(PinAbsent, Pin, LARGE)
            .map(|(bytes, r)| (r >= 5.0, format!("{} times at {}", number(r), human(bytes)))),
    );
    found.add(
        "4.3.2",
        "huge pages save up to 40 % of the registration: pins",
        data.largest(Pin, PinHuge, 0).map(|(bytes, r)| {
            let saved = 1.0 - 1.0 / r;
            (
                saved >= 0.4,
                format!("{:.0} % at {}", saved * 100.0, human(bytes)),
            )
        }),
    );
    for (end, both, claim) in [
        (
            Unpin,
            Pin,
            "deregistration is cheaper than registration: pins",
        ),
        (
            Deregister,
            Register,
            "deregistration is cheaper than registration: weft",
        ),
    ] {
        found.add(
            "fig. 4.3",
            claim,
            data.largest(end, both, 0).map(|(bytes, r)| {
                (
                    r < 0.5,
                    format!(
                        "at most {:.0} % of both together ({})",
                        r * 100.0,
                        human(bytes)
                    ),
                )
            }),
        );
    }
    found.add(
        "fig. 4.5",
        "registration in software is cheaper than with a device: weft beside pins",
        data.largest(Register, Pin, 0).map(|(bytes, r)| {
            (
                r < 1.0,
                format!("at most {} of it ({})", number(r), human(bytes)),
            )
        }),
    );
    found.add(
        "fig. 4.6",
        "up to 2 KB are copied in less than 1 µs",
        data.0
            .between(CopyWarm, 2048)
            .map(|us| (us < 1.0, format!("{} µs", number(us)))),
    );
    let copies = data.largest(CopyAbsent, CopyWarm, LARGE);
    let pins = data.largest(PinAbsent, Pin, LARGE);
    found.add(
        "fig. 4.6",
        "residency matters to copies, less than to registration (pins)",
        copies.zip(pins).map(|(copies, pins)| {
            (
                copies.1 > 1.0 && copies.1 < pins.1,
                format!("{} times against {}", number(copies.1), number(pins.1)),
            )
        }),
    );
}

fn strategies(data: &Data<'_>, found: &mut Conclusions) {
    use Case::{CopyAbsent, CopyHuge, CopyWarm, Pin, PinAbsent, PinHuge, Register, RegisterAbsent};
    let machine = data.0;
    let resident = machine.critical(Pin, CopyWarm);
    let absent = machine.critical(PinAbsent, CopyAbsent);
    found.add(
        "fig. 4.8",
        "there is a critical size (256 KB there): copy below, register above: pins",
        size_of(resident).map(|bytes| (bytes > 0 && bytes < u64::MAX, words(resident))),
    );
    let own = machine.critical(Register, CopyWarm);
    found.add(
        "4.4.1",
        "in software the critical size is smaller (16 KB): weft beside pins",
        size_of(own).zip(size_of(resident)).map(|(own_size, pins)| {
            (
                own_size < pins,
                format!("{}; pins: {}", words(own), words(resident)),
            )
        }),
    );
    found.add(
        "fig. 4.8",
        "at 4 MB copying takes almost an order of magnitude longer (5 times and more): pins",
        data.largest(CopyWarm, Pin, 4 << 20)
            .map(|(bytes, r)| (r >= 5.0, format!("{} times at {}", number(r), human(bytes)))),
    );
    found.add(
        "fig. 4.8",
        "the same: weft",
        data.largest(CopyWarm, Register, 4 << 20)
            .map(|(bytes, r)| (r >= 5.0, format!("{} times at {}", number(r), human(bytes)))),
    );
    found.add(
        "fig. 4.9",
        "when pages are not resident the critical size is smaller (32 KB): pins",
        size_of(absent).zip(size_of(resident)).map(|(a, r)| {
            (
                a < r,
                format!("{}; resident: {}", words(absent), words(resident)),
            )
        }),
    );
    let touched = machine.critical(RegisterAbsent, CopyAbsent);
    found.add(
        "fig. 4.9",
        "the same: weft, with the touch of each page",
        size_of(touched).zip(size_of(own)).map(|(a, r)| {
            (
                a <= r,
                format!("{}; resident: {}", words(touched), words(own)),
            )
        }),
    );
    let huge = machine.critical(PinHuge, CopyHuge);
    found.add(
        "4.4.1",
        "huge pages do not move the critical size: pins",
        size_of(huge).zip(size_of(resident)).map(|(h, r)| {
            (
                (h == 0 && r <= 2 << 20) || h == r,
                format!(
                    "{} (measured from 2 MiB on); small pages: {}",
                    words(huge),
                    words(resident)
                ),
            )
        }),
    );
}

/// What a round trip, computation and several threads hide.
fn overlaps(data: &Data<'_>, found: &mut Conclusions) {
    use Case::{
        Pin, PinAbsent, PinAbsentInTurn, PinAbsentTogether, PinInTurn, PinTogether, Register, Unpin,
    };
    let machine = data.0;
    for (case, claim, least) in [
        (
            Pin,
            "a round trip hides the registration of 64 KB: pins",
            64 << 10,
        ),
        (
            PinAbsent,
            "... of 8 KB whose pages are not resident: pins",
            4 << 10,
        ),
        (Unpin, "... the deregistration of 1 MB: pins", 1 << 20),
        (
            Register,
            "... and weft's own registration of any size",
            16 << 20,
        ),
    ] {
        let trip = machine.at(Case::RoundTrip, 1);
        found.add(
            "4.4.2",
            claim,
            trip.filter(|_| !machine.line(case).is_empty()).map(|trip| {
                let hidden = machine.hidden_by_a_round_trip(case);
                let number = hidden.map_or_else(|| "nothing".to_owned(), human);
                (
                    hidden.unwrap_or(0) >= least,
                    format!("{number} in {} µs (TCP, loopback)", self::number(trip)),
                )
            }),
        );
    }
    let overlap = machine.line(Case::Both).into_iter();
    let best = overlap
        .filter_map(|(bytes, _)| Some((bytes, machine.overlap(bytes)?)))
        .max_by(|a, b| a.1.total_cmp(&b.1));
    found.add(
        "4.2.1",
        "communication overlaps with computation (more than half of it is hidden)",
        best.map(|(bytes, part)| {
            (
                part > 0.5,
                format!("at best {:.0} % ({})", part * 100.0, human(bytes)),
            )
        }),
    );
    for (together, in_turn, claim, wanted) in [
        (
            PinTogether,
            PinInTurn,
            "several threads register faster when pages are resident: pins",
            true,
        ),
        (
            PinAbsentTogether,
            PinAbsentInTurn,
            "... and hardly faster when they are not: pins",
            false,
        ),
    ] {
        let ratios = data.ratios(together, in_turn).into_iter();
        let best = ratios.min_by(|a, b| a.1.total_cmp(&b.1));
        found.add(
            "fig. 4.10",
            claim,
            best.map(|(bytes, r)| {
                (
                    (r < 0.8) == wanted,
                    format!(
                        "at best {} of the time in turn ({}, {} threads)",
                        number(r),
                        human(bytes),
                        machine.threads
                    ),
                )
            }),
        );
    }
}

fn schemes(data: &Data<'_>, found: &mut Conclusions) {
    let range = |(low, high): (f64, f64)| format!("{} to {}", number(low), number(high));
    for (scheme, metric, claim, limits) in [
        (
            "reregister",
            Metric::bandwidth_GBps,
            "large buffers registered anew: 8 % less throughput (within 15 %)",
            0.85..=f64::MAX,
        ),
        (
            "reregister",
            Metric::cpu_s_per_GB,
            "... for 1.7 times the CPU",
            1.3..=2.5,
        ),
        (
            "copy",
            Metric::bandwidth_GBps,
            "large buffers copied: up to 36 % less throughput",
            0.0..=0.8,
        ),
        (
            "copy",
            Metric::cpu_s_per_GB,
            "... for 6 times the CPU",
            3.0..=f64::MAX,
        ),
    ] {
        found.add(
            "fig. 4.11",
            claim,
            data.schemes(metric, scheme, "reuse").map(|r| {
                let value = if metric == Metric::bandwidth_GBps {
                    r.0
                } else {
                    r.1
                };
                (limits.contains(&value), format!("{} of reuse", range(r)))
            }),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_advise::machine::Point;

    #[test]
    fn verdicts_follow_the_numbers() {
        let point = |case, bytes, us| Point { case, bytes, us };
        let machine = Machine {
            points: vec![
                point(Case::Pin, 4096, 1.0),
                point(Case::Pin, 4 << 20, 100.0),
                point(Case::PinAbsent, 4096, 2.0),
                point(Case::PinAbsent, 4 << 20, 600.0),
                point(Case::CopyWarm, 4096, 0.1),
                point(Case::CopyWarm, 4 << 20, 300.0),
            ],
            ..Machine::default()
        };
        let found = conclusions(&machine, &[]);
        let of = |claim: &str| {
            let mut found = found.list.iter().filter(|each| each.claim.contains(claim));
            found.next().map(|each| (each.holds, each.number.as_str()))
        };
        assert_eq!(
            of("number of pages: pins"),
            Some((true, "100 times from 4 KiB to 4 MiB"))
        );
        assert_eq!(of("not resident cost"), Some((true, "6.00 times at 4 MiB")));
        assert_eq!(
            of("there is a critical size"),
            Some((true, "4 MiB and more"))
        );
        assert_eq!(
            of("order of magnitude longer"),
            Some((false, "3.00 times at 4 MiB"))
        );
        assert_eq!(of("in software the critical size"), None, "not measured");
        assert!(conclusions(&Machine::default(), &[]).list.is_empty());
    }
}
