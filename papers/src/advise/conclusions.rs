//! The conclusions of the thesis's chapter 4: whether each holds on this machine, with the number.

use crate::aims::Limit;
use crate::conclusions::{Conclusions, Range, Verdict, claims};
use crate::record::{Metric, Record, Side};
use crate::report::number;
use crate::size::human;
use weft_advise::machine::{Case, Critical, Machine};
use weft_costs::words;

/// The parts of the chapter that this suite does not reproduce.
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

    /// The ratios of two buffer schemes at the sizes from 1 MiB on.
    fn schemes(&self, metric: Metric, over: &str, under: &str) -> Option<Range> {
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
        Range::of(line(over).into_iter().filter_map(|(bytes, value)| {
            let other = below.iter().find(|point| point.0 == bytes)?.1;
            Some((bytes, value / other))
        }))
    }

    /// Whether one case takes five times as long as another at some size of at least `least`.
    fn five_times(&self, over: Case, under: Case, least: u64) -> Verdict {
        let (bytes, ratio) = self.largest(over, under, least)?;
        let words = format!("{} times at {}", number(ratio), human(bytes));
        Some((ratio >= 5.0, words))
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

/// All conclusions that the measurements allow.
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
    let large = |step| data.step("weft", LARGE, step);
    claims! { found;
        "table 4.1", "the time to the first byte is two thousand times TCP's" =>
            first("weft").zip(first("tcp")).map(|(ours, tcp)| {
                let [weft, theirs, times] = [ours, tcp, ours / tcp].map(number);
                (ours / tcp > 1000.0, format!("{weft} µs against {theirs}: {times} times"))
            });
        "table 4.1", "up to 1 MB connecting is the dominant cost" =>
            large("connect").zip(large("total")).map(|(connect, total)| {
                let part = connect / total;
                (part > 0.5, format!("{:.0} % of the whole at 1 MiB", part * 100.0))
            });
    }
}

fn registration(data: &Data<'_>, found: &mut Conclusions) {
    use Case::{CopyAbsent, CopyWarm, Deregister, Pin, PinAbsent, PinHuge, Register, Unpin};
    let growth = |case| {
        let line = data.0.line(case);
        let (first, last) = (line.first()?, line.last()?);
        let ratio = last.1 / first.1;
        let [low, high] = [first.0, last.0].map(human);
        let words = format!("{} times from {low} to {high}", number(ratio));
        (first.0 < last.0).then_some((ratio > 10.0, words))
    };
    let part = |end, both| {
        data.largest(end, both, 0).map(|(bytes, r)| {
            let (percent, at) = (r * 100.0, human(bytes));
            (
                r < 0.5,
                format!("at most {percent:.0} % of both together ({at})"),
            )
        })
    };
    let copies = data.largest(CopyAbsent, CopyWarm, LARGE);
    let pins = data.largest(PinAbsent, Pin, LARGE);
    claims! { found;
        "fig. 4.3", "registration grows with the number of pages: pins" => growth(Pin);
        "fig. 4.4", "the same in software: weft" => growth(Register);
        "fig. 4.3", "at about 2 MB pages that are not resident cost almost an order of magnitude more (5 times and more): pins" =>
            data.five_times(PinAbsent, Pin, LARGE);
        "4.3.2", "huge pages save up to 40 % of the registration: pins" =>
            data.largest(Pin, PinHuge, 0).map(|(bytes, r)| {
                let saved = 1.0 - 1.0 / r;
                (saved >= 0.4, format!("{:.0} % at {}", saved * 100.0, human(bytes)))
            });
        "fig. 4.3", "deregistration is cheaper than registration: pins" => part(Unpin, Pin);
        "fig. 4.3", "deregistration is cheaper than registration: weft" => part(Deregister, Register);
        "fig. 4.5", "registration in software is cheaper than with a device: weft beside pins" =>
            data.largest(Register, Pin, 0)
                .map(|(bytes, r)| (r < 1.0, format!("at most {} of it ({})", number(r), human(bytes))));
        "fig. 4.6", "up to 2 KB are copied in less than 1 µs" =>
            data.0.between(CopyWarm, 2048).map(|us| (us < 1.0, format!("{} µs", number(us))));
        "fig. 4.6", "residency matters to copies, less than to registration (pins)" =>
            copies.zip(pins).map(|((_, copies), (_, pins))| {
                let words = format!("{} times against {}", number(copies), number(pins));
                (copies > 1.0 && copies < pins, words)
            });
    }
}

fn strategies(data: &Data<'_>, found: &mut Conclusions) {
    use Case::{CopyAbsent, CopyHuge, CopyWarm, Pin, PinAbsent, PinHuge, Register, RegisterAbsent};
    let critical = |register, copy| data.0.critical(register, copy);
    let resident = critical(Pin, CopyWarm);
    let absent = critical(PinAbsent, CopyAbsent);
    let own = critical(Register, CopyWarm);
    let touched = critical(RegisterAbsent, CopyAbsent);
    let huge = critical(PinHuge, CopyHuge);
    let two = |one, name, other, holds: fn(u64, u64) -> bool| {
        let sizes = size_of(one).zip(size_of(other));
        sizes.map(|(a, b)| {
            (
                holds(a, b),
                format!("{}{name}: {}", words(one), words(other)),
            )
        })
    };
    claims! { found;
        "fig. 4.8", "there is a critical size (256 KB there): copy below, register above: pins" =>
            size_of(resident).map(|bytes| (bytes > 0 && bytes < u64::MAX, words(resident)));
        "4.4.1", "in software the critical size is smaller (16 KB): weft beside pins" =>
            two(own, "; pins", resident, |own, pins| own < pins);
        "fig. 4.8", "at 4 MB copying takes almost an order of magnitude longer (5 times and more): pins" =>
            data.five_times(CopyWarm, Pin, 4 << 20);
        "fig. 4.8", "the same: weft" => data.five_times(CopyWarm, Register, 4 << 20);
        "fig. 4.9", "when pages are not resident the critical size is smaller (32 KB): pins" =>
            two(absent, "; resident", resident, |absent, resident| absent < resident);
        "fig. 4.9", "the same: weft, with the touch of each page" =>
            two(touched, "; resident", own, |touched, own| touched <= own);
        "4.4.1", "huge pages do not move the critical size: pins" =>
            two(huge, " (measured from 2 MiB on); small pages", resident,
                |huge, small| (huge == 0 && small <= 2 << 20) || huge == small);
    }
}

/// The overlap of transfers with a round trip, with computation and between several threads.
fn overlaps(data: &Data<'_>, found: &mut Conclusions) {
    use Case::{
        Pin, PinAbsent, PinAbsentInTurn, PinAbsentTogether, PinInTurn, PinTogether, Register, Unpin,
    };
    let machine = data.0;
    let hidden = |case, least| {
        let trip = machine.at(Case::RoundTrip, 1);
        trip.filter(|_| !machine.line(case).is_empty()).map(|trip| {
            let hidden = machine.hidden_by_a_round_trip(case);
            let size = hidden.map_or_else(|| "nothing".to_owned(), human);
            let words = format!("{size} in {} µs (TCP, loopback)", number(trip));
            (hidden.unwrap_or(0) >= least, words)
        })
    };
    let overlap = machine.line(Case::Both).into_iter();
    let best = overlap
        .filter_map(|(bytes, _)| Some((bytes, machine.overlap(bytes)?)))
        .max_by(|a, b| a.1.total_cmp(&b.1));
    let faster = |together, in_turn, wanted| {
        let ratios = data.ratios(together, in_turn).into_iter();
        let best = ratios.min_by(|a, b| a.1.total_cmp(&b.1));
        best.map(|(bytes, r)| {
            let (ratio, size, threads) = (number(r), human(bytes), machine.threads);
            let words = format!("at best {ratio} of the time in turn ({size}, {threads} threads)");
            ((r < 0.8) == wanted, words)
        })
    };
    claims! { found;
        "4.4.2", "a round trip hides the registration of 64 KB: pins" => hidden(Pin, 64 << 10);
        "4.4.2", "... of 8 KB whose pages are not resident: pins" => hidden(PinAbsent, 4 << 10);
        "4.4.2", "... the deregistration of 1 MB: pins" => hidden(Unpin, 1 << 20);
        "4.4.2", "... and weft's own registration of any size" => hidden(Register, 16 << 20);
        "4.2.1", "communication overlaps with computation (more than half of it is hidden)" =>
            best.map(|(bytes, part)| (part > 0.5, format!("at best {:.0} % ({})", part * 100.0, human(bytes))));
        "fig. 4.10", "several threads register faster when pages are resident: pins" =>
            faster(PinTogether, PinInTurn, true);
        "fig. 4.10", "... and hardly faster when they are not: pins" =>
            faster(PinAbsentTogether, PinAbsentInTurn, false);
    }
}

fn schemes(data: &Data<'_>, found: &mut Conclusions) {
    use Metric::{bandwidth_GBps, cpu_s_per_GB};
    let of_reuse = |scheme, metric, limit: Limit| {
        data.schemes(metric, scheme, "reuse").map(|range| {
            // The worst: the least throughput, the most CPU.
            let worst = if metric == bandwidth_GBps {
                range.low.0
            } else {
                range.high.0
            };
            let holds = limit.holds(worst) == Some(true);
            (holds, format!("{} of reuse", range.words()))
        })
    };
    claims! { found;
        "fig. 4.11", "large buffers registered anew: 8 % less throughput (within 15 %)" =>
            of_reuse("reregister", bandwidth_GBps, Limit::AtLeast(0.85));
        "fig. 4.11", "... for 1.7 times the CPU" =>
            of_reuse("reregister", cpu_s_per_GB, Limit::Within(1.3, 2.5));
        "fig. 4.11", "large buffers copied: up to 36 % less throughput" =>
            of_reuse("copy", bandwidth_GBps, Limit::AtMost(0.8));
        "fig. 4.11", "... for 6 times the CPU" => of_reuse("copy", cpu_s_per_GB, Limit::AtLeast(3.0));
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
