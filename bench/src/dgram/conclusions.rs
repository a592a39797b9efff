//! What the datagram paper finds, and what is to be reached: whether it holds here, with the number.

use super::{clients, group, lossy, median, sipp, vlc};
use crate::aims::{
    self, Aim,
    Limit::{self, AtLeast, AtMost, None as Open},
};
use crate::record::{Metric, Record};
use crate::report::Section;

/// What it says, the number, if it was measured, and its target.
type Row = (&'static str, Option<f64>, Limit);

/// Figs. 5 and 6, by the lines of [`super::LINES`].
struct Lines<'a> {
    records: &'a [Record],
    sizes: &'a [u64],
}

impl Lines<'_> {
    fn latency(&self, line: usize, bytes: u64) -> Option<f64> {
        median(self.records, line, bytes, Metric::latency_us_p50)
    }

    fn speed(&self, line: usize, bytes: u64) -> Option<f64> {
        median(self.records, line, bytes, Metric::bandwidth_GBps)
    }

    /// How much shorter one line's latency is than another's: the mean of the sizes up to 2 KiB.
    fn gain(&self, ud: usize, rc: usize) -> Option<f64> {
        let small = self.sizes.iter().filter(|bytes| **bytes <= 2048);
        let gain = |bytes: &u64| Some(1.0 - self.latency(ud, *bytes)? / self.latency(rc, *bytes)?);
        let gains: Vec<f64> = small.filter_map(gain).collect();
        (!gains.is_empty()).then(|| gains.iter().sum::<f64>() / gains.len() as f64)
    }

    fn slower(&self, one: usize, other: usize, bytes: u64) -> Option<f64> {
        Some(self.latency(one, bytes)? / self.latency(other, bytes)?)
    }

    fn faster(&self, one: usize, other: usize, bytes: u64) -> Option<f64> {
        Some(self.speed(one, bytes)? / self.speed(other, bytes)?)
    }

    /// The largest ratio of bare UDP's bandwidth to a line's.
    fn bare(&self, ud: usize) -> Option<f64> {
        let ratio = |bytes: &u64| self.faster(6 + ud, ud, *bytes);
        self.sizes.iter().filter_map(ratio).reduce(f64::max)
    }

    fn over_networks(&self) -> [Row; 9] {
        [
            (
                "UD send/recv latency below RC over TCP, up to 2 KiB (paper: 18.1 %)",
                self.gain(0, 2),
                AtLeast(0.18),
            ),
            (
                "Write-Record latency below RC Write over TCP, up to 2 KiB (paper: 24.4 %)",
                self.gain(1, 3),
                AtLeast(0.18),
            ),
            (
                "Write-Record bandwidth over RC Write, 1 KiB (paper: 2.9)",
                self.faster(1, 3, 1 << 10),
                AtLeast(1.5),
            ),
            (
                "Write-Record bandwidth over RC Write, 512 KiB (paper: 3.6)",
                self.faster(1, 3, 512 << 10),
                AtLeast(1.0),
            ),
            (
                "UD send/recv bandwidth over RC, 256 KiB (paper: 1.33)",
                self.faster(0, 2, 256 << 10),
                AtLeast(1.0),
            ),
            (
                "bare sendmmsg over UD send/recv, the largest ratio",
                self.bare(0),
                AtMost(1.1),
            ),
            (
                "bare sendmmsg over Write-Record, the largest ratio",
                self.bare(1),
                AtMost(1.1),
            ),
            (
                "reliable datagrams' latency over UD's, 64 B",
                self.slower(8, 0, 64),
                Open,
            ),
            (
                "reliable datagrams' bandwidth over UD's, 512 KiB",
                self.faster(8, 0, 512 << 10),
                Open,
            ),
        ]
    }

    fn on_one_host(&self) -> [Row; 5] {
        [
            (
                "shared memory: UD send/recv latency over RC's, 64 B",
                self.slower(10, 4, 64),
                AtMost(1.5),
            ),
            (
                "shared memory: Write-Record latency over RC Write's, 64 B",
                self.slower(11, 5, 64),
                Open,
            ),
            (
                "UD send/recv messages a second, shared memory over UDP, 64 B",
                self.faster(10, 0, 64),
                Open,
            ),
            (
                "UD send/recv messages a second, shared memory over bare UDP, a datagram a call, 64 B",
                self.faster(10, 14, 64),
                AtLeast(10.0),
            ),
            (
                "UD send/recv bandwidth, shared memory over UDP, 512 KiB",
                self.faster(10, 0, 512 << 10),
                Open,
            ),
        ]
    }
}

fn lossy_and_groups(records: &[Record]) -> [Row; 4] {
    let valid = |op| lossy::share(records, op, 256 << 10, 10_000, 1400);
    let [of_one, of_each] = group::gains(records);
    [
        (
            "Write-Record, valid bytes of 256 KiB messages, 1 % loss, segments of 1,400",
            valid("write_record"),
            AtLeast(0.9),
        ),
        ("the same of send/recv", valid("send"), Open),
        (
            "bandwidth of a group of three receivers over that of one",
            of_one,
            Open,
        ),
        (
            "bandwidth of a group of three receivers over that to each in turn",
            of_each,
            Open,
        ),
    ]
}

fn programs(records: &[Record]) -> [Row; 7] {
    let [response, calls, of_tcp] = sipp::ratios(records);
    let [saved, saved_in_all] = clients::saved(records);
    let [buffering, of_plain] = vlc::ratios(records);
    [
        (
            "VLC's buffering time, UDP over HTTP, both under weft run (paper: 0.26)",
            buffering,
            AtMost(1.0),
        ),
        (
            "VLC's buffering time, UDP under weft run over plain UDP",
            of_plain,
            Open,
        ),
        (
            "SIPp's mean response time under weft run over plain UDP's",
            response,
            AtMost(1.0),
        ),
        (
            "SIPp's calls a second under weft run over plain UDP's",
            calls,
            AtLeast(1.2),
        ),
        (
            "SIPp's mean response time, UDP over TCP, both under weft run (paper: 0.57)",
            of_tcp,
            AtMost(1.0),
        ),
        (
            "memory of a server of many clients, less with datagrams (paper: 0.241)",
            saved,
            AtLeast(0.24),
        ),
        (
            "the same with the kernel's caches of both ends",
            saved_in_all,
            AtLeast(0.24),
        ),
    ]
}

/// All that can be said of what was measured.
pub(super) fn section(records: &[Record], sizes: &[u64]) -> Option<Section> {
    let lines = Lines { records, sizes };
    let rows = lines.over_networks().into_iter();
    let rows = rows.chain(lines.on_one_host());
    let rows = rows.chain(lossy_and_groups(records));
    let rows = rows.chain(programs(records));
    let measured = rows.filter_map(|(what, value, limit)| Some(Aim::new(what, limit, value?)));
    aims::section("Conclusions", &measured.collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Summary;

    fn record(op: &str, transport: &str, stack: &str, metric: Metric, value: f64) -> Record {
        let summary = Summary::of(&[value]).unwrap();
        Record::new(op, transport, stack, 64, metric, summary)
    }

    fn text(records: &[Record]) -> String {
        crate::report::Report {
            title: String::new(),
            intro: Vec::new(),
            sections: section(records, &super::super::sizes(records))
                .into_iter()
                .collect(),
        }
        .to_text(None)
    }

    /// A bar that is kept, one that is missed, and nothing of what was not measured.
    #[test]
    fn bars_are_held_against_numbers() {
        let latency = Metric::latency_us_p50;
        let mut records = vec![
            record("send", "udp", "weft-ud", latency, 8.0),
            record("send", "tcp", "weft", latency, 10.0),
        ];
        let said = text(&records);
        assert!(said.contains("18.1 %") && said.contains("yes"), "{said}");
        assert!(!said.contains("SIPp") && !said.contains("VLC"), "{said}");
        records[0].summary.median = 9.0;
        let said = text(&records);
        assert!(said.contains("0.10") && said.contains("no"), "{said}");
    }

    /// What a lossy link carried is not a point of figs. 5 and 6.
    #[test]
    fn figures_do_not_mix() {
        let speed = Metric::bandwidth_GBps;
        let mut lossy = record("send", "udp", "weft-ud", speed, 0.1);
        lossy.case = Some("loss 1 %, segments of 1400".to_owned());
        assert!(super::super::sizes(std::slice::from_ref(&lossy)).is_empty());
        let records = [lossy, record("send", "udp", "weft-ud", speed, 2.0)];
        assert_eq!(median(&records, 0, 64, speed), Some(2.0));
    }
}
