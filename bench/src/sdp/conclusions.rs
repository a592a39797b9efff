//! What the paper concludes: whether it holds here, with the number.

use super::plan::{Row, SdpFigure};
use super::suite::line;
use crate::conclusions::Conclusions;
use crate::driver::Transport;
use crate::record::Record;
use crate::report::number;

/// Medium messages, in bytes.
const MEDIUM: std::ops::RangeInclusive<u64> = 16 << 10..=256 << 10;

struct Data<'a>(&'a [Record], Transport);

impl Data<'_> {
    fn at(&self, figure: SdpFigure, row: Row, place: u64) -> Option<f64> {
        line(self.0, figure, self.1, row)
            .find(|(x, _)| *x == place)
            .map(|(_, summary)| summary.median)
    }

    /// Medians of one row over those of another, place by place.
    fn ratios(&self, figure: SdpFigure, over: Row, under: Row) -> Vec<(u64, f64)> {
        line(self.0, figure, self.1, over)
            .filter_map(|(x, summary)| Some((x, summary.median / self.at(figure, under, x)?)))
            .collect()
    }

    /// The smallest and the largest of them at some places.
    fn range(
        &self,
        figure: SdpFigure,
        over: Row,
        under: Row,
        wanted: impl Fn(u64) -> bool,
    ) -> Option<(f64, f64)> {
        let ratios = self.ratios(figure, over, under);
        let mut ratios = ratios.into_iter().filter(|(x, _)| wanted(*x));
        let (_, first) = ratios.next()?;
        Some(ratios.fold((first, first), |(low, high), (_, ratio)| {
            (low.min(ratio), high.max(ratio))
        }))
    }
}

/// Everything that can be said of what was measured.
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

fn words((low, high): (f64, f64), of: &str) -> String {
    format!("{} to {} of {of}", number(low), number(high))
}

/// One connection.
fn single(data: &Data<'_>, found: &mut Conclusions) {
    use Row::{AzsdpBlock, Bsdp, Tcp, Zsdp};
    use SdpFigure::{F6a, F6b, F7a, F7b, F8a, F8b};
    let large = |x: u64| x >= 64 << 10;
    let range = data.range(F6a, Zsdp, Bsdp, large);
    found.add(
        "fig. 6a",
        "from 64 KiB on ZSDP has a lower latency than BSDP",
        range.map(|r| (r.1 < 1.0, words(r, "BSDP's"))),
    );
    let range = data.range(F6a, AzsdpBlock, Bsdp, large);
    found.add(
        "fig. 6a",
        "from 64 KiB on AZ-SDP has a lower latency than BSDP",
        range.map(|r| (r.1 < 1.0, words(r, "BSDP's"))),
    );
    let range = data.range(F6a, AzsdpBlock, Zsdp, large);
    found.add(
        "fig. 6a",
        "AZ-SDP's latency is that of ZSDP (within 15 %)",
        range.map(|r| (r.0 > 0.85 && r.1 < 1.15, words(r, "ZSDP's"))),
    );
    let range = data.range(F6b, Bsdp, Zsdp, |x| (4096..=8192).contains(&x));
    found.add(
        "fig. 6b",
        "for small messages (4 KiB) BSDP has the highest throughput",
        range.map(|r| (r.0 > 1.0, words(r, "ZSDP's"))),
    );
    let range = data.range(F6b, AzsdpBlock, Zsdp, |x| MEDIUM.contains(&x));
    found.add(
        "fig. 6b",
        "medium messages: AZ-SDP has up to 35 % more throughput than ZSDP",
        range.map(|r| (r.1 >= 1.35, words(r, "ZSDP's"))),
    );
    let range = data.range(F6b, AzsdpBlock, Bsdp, large);
    found.add(
        "fig. 6b",
        "beside it, from 64 KiB on: AZ-SDP has more throughput than BSDP",
        range.map(|r| (r.0 > 1.0, words(r, "BSDP's"))),
    );
    let range = data.range(F6b, AzsdpBlock, Tcp, large);
    found.add(
        "beside",
        "from 64 KiB on AZ-SDP has more throughput than plain TCP",
        range.map(|r| (r.0 > 1.0, words(r, "TCP's"))),
    );
    for (figure, source, claim, least) in [
        (
            F7a,
            "fig. 7a",
            "64 KiB with computation: AZ-SDP has up to twice ZSDP's throughput",
            2.0,
        ),
        (
            F7b,
            "fig. 7b",
            "1 MiB with computation: at best AZ-SDP has more throughput than ZSDP",
            1.0,
        ),
    ] {
        let range = data.range(figure, AzsdpBlock, Zsdp, |x| x > 0);
        found.add(
            source,
            claim,
            range.map(|r| (r.1 >= least, words(r, "ZSDP's"))),
        );
    }
    let kept = data
        .at(F7b, AzsdpBlock, 200)
        .zip(data.at(F7b, AzsdpBlock, 0));
    found.add(
        "fig. 7b",
        "1 MiB: 200 µs of computation cost AZ-SDP nothing (within 10 %)",
        kept.map(|(with, without)| {
            let kept = with / without;
            (
                kept > 0.9,
                format!("{} of the throughput without", number(kept)),
            )
        }),
    );
    for (figure, source) in [(F8a, "fig. 8a"), (F8b, "fig. 8b")] {
        let range = data.range(figure, AzsdpBlock, Zsdp, |x| x == 1);
        found.add(
            source,
            "a write after every send: AZ-SDP is slower than ZSDP",
            range.map(|r| (r.1 < 1.0, words(r, "ZSDP's"))),
        );
        let range = data.range(figure, Row::AzsdpCopy, AzsdpBlock, |x| x == 1);
        found.add(
            "left out by the paper",
            "a write after every send: copy on write beside block on write",
            range.map(|r| (r.0 >= 1.0, words(r, "block on write's"))),
        );
    }
}

/// Several connections.
fn several(data: &Data<'_>, found: &mut Conclusions) {
    use Row::{AzsdpBlock, Bsdp, Zsdp};
    use SdpFigure::{F9a, F9b, F10a, F10b};
    let large = |x: u64| x >= 64 << 10;
    let range = data.range(F9a, AzsdpBlock, Zsdp, large);
    found.add(
        "fig. 9a",
        "hot spot from 64 KiB on: AZ-SDP has a lower latency than ZSDP",
        range.map(|r| (r.1 < 1.0, words(r, "ZSDP's"))),
    );
    let range = data.range(F9b, AzsdpBlock, Zsdp, |x| x == 1);
    found.add(
        "fig. 9b",
        "one thread: AZ-SDP has more throughput than ZSDP",
        range.map(|r| (r.0 > 1.0, words(r, "ZSDP's"))),
    );
    let range = data.range(F9b, AzsdpBlock, Zsdp, |x| x >= 4);
    found.add(
        "fig. 9b",
        "four threads and more: ZSDP reaches AZ-SDP (within 15 %)",
        range.map(|r| (r.0 > 0.85 && r.1 < 1.15, words(r, "ZSDP's"))),
    );
    for under in [Zsdp, Bsdp] {
        let range = data.range(F10a, AzsdpBlock, under, large);
        found.add(
            "fig. 10a",
            "fan-in from 64 KiB on: AZ-SDP has more throughput",
            range.map(|r| (r.0 > 1.0, words(r, under.name()))),
        );
    }
    let range = data.range(F10b, AzsdpBlock, Zsdp, large);
    found.add(
        "fig. 10b",
        "fan-out from 64 KiB on: no such difference (within 15 %)",
        range.map(|r| (r.0 > 0.85 && r.1 < 1.15, words(r, "ZSDP's"))),
    );
}
