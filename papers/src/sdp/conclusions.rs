//! The conclusions of the paper: whether each holds here, with the number.

use super::plan::{Row, SdpFigure, line};
use crate::aims::Limit::{self, Above, AtLeast, Below};
use crate::conclusions::{Conclusions, Range, Verdict, claims};
use crate::driver::Transport;
use crate::record::Record;
use crate::report::number;
use std::ops::RangeInclusive;

/// Sizes, computations or threads of a figure.
type Places = &'static RangeInclusive<u64>;

const LARGE: Places = &(64 << 10..=u64::MAX);
const SOME: Places = &(1..=u64::MAX);
const ONE: Places = &(1..=1);
/// Within 15 %.
const SAME: Limit = Limit::Within(0.85, 1.15);

struct Data<'a>(&'a [Record], Transport);

impl Data<'_> {
    fn at(&self, figure: SdpFigure, row: Row, place: u64) -> Option<f64> {
        line(self.0, figure, self.1, row)
            .find(|(x, _)| *x == place)
            .map(|(_, summary)| summary.median)
    }

    /// Medians of one row over those of another at some places.
    fn range(&self, figure: SdpFigure, [over, under]: [Row; 2], at: Places) -> Option<Range> {
        let ratios = line(self.0, figure, self.1, over)
            .filter_map(|(x, summary)| Some((x, summary.median / self.at(figure, under, x)?)));
        Range::of(ratios.filter(|(x, _)| at.contains(x)))
    }

    /// Whether all ratios reach the target.
    fn all(&self, figure: SdpFigure, rows: [Row; 2], at: Places, limit: Limit) -> Verdict {
        Some(self.range(figure, rows, at)?.all(limit, whose(rows[1])))
    }

    /// Whether the largest ratio reaches the target.
    fn best(&self, figure: SdpFigure, rows: [Row; 2], at: Places, limit: Limit) -> Verdict {
        let range = self.range(figure, rows, at)?;
        Some(range.largest(limit, whose(rows[1])))
    }
}

/// All conclusions that the measurements allow.
pub(super) fn conclusions(records: &[Record], transports: &[Transport]) -> Conclusions {
    let mut found = Conclusions::default();
    for &transport in transports {
        found.over(transport);
        let data = Data(records, transport);
        single(&data, &mut found);
        several(&data, &mut found);
    }
    found
}

fn whose(row: Row) -> &'static str {
    match row {
        Row::Tcp => " of TCP's",
        Row::Bsdp => " of BSDP's",
        Row::Zsdp => " of ZSDP's",
        _ => " of block on write's",
    }
}

/// One connection.
fn single(data: &Data<'_>, found: &mut Conclusions) {
    use Row::{AzsdpBlock as Az, AzsdpCopy, Bsdp, Tcp, Zsdp};
    use SdpFigure::{F6a, F6b, F7a, F7b, F8a, F8b};
    let kept = data.at(F7b, Az, 200).zip(data.at(F7b, Az, 0));
    let kept = kept.map(|(with, without)| with / without);
    claims! { found;
        "fig. 6a", "from 64 KiB on ZSDP has a lower latency than BSDP" =>
            data.all(F6a, [Zsdp, Bsdp], LARGE, Below(1.0));
        "fig. 6a", "from 64 KiB on AZ-SDP has a lower latency than BSDP" =>
            data.all(F6a, [Az, Bsdp], LARGE, Below(1.0));
        "fig. 6a", "AZ-SDP's latency is that of ZSDP (within 15 %)" =>
            data.all(F6a, [Az, Zsdp], LARGE, SAME);
        "fig. 6b", "for small messages (4 KiB) BSDP has the highest throughput" =>
            data.all(F6b, [Bsdp, Zsdp], &(4096..=8192), Above(1.0));
        "fig. 6b", "medium messages: AZ-SDP has up to 35 % more throughput than ZSDP" =>
            data.best(F6b, [Az, Zsdp], &(16 << 10..=256 << 10), AtLeast(1.35));
        "fig. 6b", "beside it, from 64 KiB on: AZ-SDP has more throughput than BSDP" =>
            data.all(F6b, [Az, Bsdp], LARGE, Above(1.0));
        "beside", "from 64 KiB on AZ-SDP has more throughput than plain TCP" =>
            data.all(F6b, [Az, Tcp], LARGE, Above(1.0));
        "fig. 7a", "64 KiB with computation: AZ-SDP has up to twice ZSDP's throughput" =>
            data.best(F7a, [Az, Zsdp], SOME, AtLeast(2.0));
        "fig. 7b", "1 MiB with computation: at best AZ-SDP has more throughput than ZSDP" =>
            data.best(F7b, [Az, Zsdp], SOME, AtLeast(1.0));
        "fig. 7b", "1 MiB: 200 µs of computation cost AZ-SDP nothing (within 10 %)" =>
            kept.map(|kept| (kept > 0.9, format!("{} of the throughput without", number(kept))));
    }
    for (figure, source) in [(F8a, "fig. 8a"), (F8b, "fig. 8b")] {
        claims! { found;
            source, "a write after every send: AZ-SDP is slower than ZSDP" =>
                data.all(figure, [Az, Zsdp], ONE, Below(1.0));
            "left out by the paper", "a write after 1 to 16 sends: copy on write is no slower than block on write" =>
                data.all(figure, [AzsdpCopy, Az], SOME, AtLeast(1.0));
        }
    }
}

/// Several connections.
fn several(data: &Data<'_>, found: &mut Conclusions) {
    use Row::{AzsdpBlock as Az, Bsdp, Zsdp};
    use SdpFigure::{F9a, F9b, F10a, F10b};
    claims! { found;
        "fig. 9a", "hot spot from 64 KiB on: AZ-SDP has a lower latency than ZSDP" =>
            data.all(F9a, [Az, Zsdp], LARGE, Below(1.0));
        "fig. 9b", "one thread: AZ-SDP has more throughput than ZSDP" =>
            data.all(F9b, [Az, Zsdp], ONE, Above(1.0));
        "fig. 9b", "four threads and more: ZSDP reaches AZ-SDP (within 15 %)" =>
            data.all(F9b, [Az, Zsdp], &(4..=u64::MAX), SAME);
        "fig. 10a", "fan-in from 64 KiB on: AZ-SDP has more throughput than ZSDP" =>
            data.all(F10a, [Az, Zsdp], LARGE, Above(1.0));
        "fig. 10a", "fan-in from 64 KiB on: AZ-SDP has more throughput than BSDP" =>
            data.all(F10a, [Az, Bsdp], LARGE, Above(1.0));
        "fig. 10b", "fan-out from 64 KiB on: no such difference (within 15 %)" =>
            data.all(F10b, [Az, Zsdp], LARGE, SAME);
    }
}
