//! The conclusions of the datagram paper and the targets: whether each holds here, with the number.

use super::{clients, group, lossy, median, sipp, vlc};
use crate::aims::Limit::{AtLeast, AtMost, None as Open};
use crate::aims::{self, Aim, aims};
use crate::record::{Metric, Record};
use crate::report::Section;

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

    /// The relative reduction of one line's latency against another's: the mean of the sizes up to 2
    /// KiB.
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

    fn over_networks(&self) -> Vec<Aim> {
        aims! {
            "UD send/recv latency below RC over TCP, up to 2 KiB (paper: 18.1 %)", AtLeast(0.18) => self.gain(0, 2);
            "Write-Record latency below RC Write over TCP, up to 2 KiB (paper: 24.4 %)", AtLeast(0.18) => self.gain(1, 3);
            "Write-Record bandwidth over RC Write, 1 KiB (paper: 2.9)", AtLeast(1.5) => self.faster(1, 3, 1 << 10);
            "Write-Record bandwidth over RC Write, 512 KiB (paper: 3.6)", AtLeast(1.0) => self.faster(1, 3, 512 << 10);
            "UD send/recv bandwidth over RC, 256 KiB (paper: 1.33)", AtLeast(1.0) => self.faster(0, 2, 256 << 10);
            "bare sendmmsg over UD send/recv, the largest ratio", AtMost(1.1) => self.bare(0);
            "bare sendmmsg over Write-Record, the largest ratio", AtMost(1.1) => self.bare(1);
            "reliable datagrams' latency over UD's, 64 B", Open => self.slower(8, 0, 64);
            "reliable datagrams' bandwidth over UD's, 512 KiB", Open => self.faster(8, 0, 512 << 10);
        }
    }

    fn on_one_host(&self) -> Vec<Aim> {
        aims! {
            "shared memory: UD send/recv latency over RC's, 64 B", AtMost(1.5) => self.slower(10, 4, 64);
            "shared memory: Write-Record latency over RC Write's, 64 B", Open => self.slower(11, 5, 64);
            "UD send/recv messages a second, shared memory over UDP, 64 B", Open => self.faster(10, 0, 64);
            "UD send/recv messages a second, shared memory over bare UDP, a datagram a call, 64 B", AtLeast(10.0) =>
                self.faster(10, 14, 64);
            "UD send/recv bandwidth, shared memory over UDP, 512 KiB", Open => self.faster(10, 0, 512 << 10);
        }
    }
}

fn lossy_and_groups(records: &[Record]) -> Vec<Aim> {
    let valid = |op| lossy::share(records, op, 256 << 10, 10_000, 1400);
    let [of_one, of_each] = group::gains(records);
    aims! {
        "Write-Record, valid bytes of 256 KiB messages, 1 % loss, segments of 1,400", AtLeast(0.9) => valid("write_record");
        "the same of send/recv", Open => valid("send");
        "bandwidth of a group of three receivers over that of one", Open => of_one;
        "bandwidth of a group of three receivers over that to each in turn", Open => of_each;
    }
}

fn programs(records: &[Record]) -> Vec<Aim> {
    let [response, calls, of_tcp] = sipp::ratios(records);
    let [saved, saved_in_all] = clients::saved(records);
    let [buffering, of_plain] = vlc::ratios(records);
    aims! {
        "VLC's buffering time, UDP over HTTP, both under weft run (paper: 0.26)", AtMost(1.0) => buffering;
        "VLC's buffering time, UDP under weft run over plain UDP", Open => of_plain;
        "SIPp's mean response time under weft run over plain UDP's", AtMost(1.0) => response;
        "SIPp's calls a second under weft run over plain UDP's", AtLeast(1.2) => calls;
        "SIPp's mean response time, UDP over TCP, both under weft run (paper: 0.57)", AtMost(1.0) => of_tcp;
        "memory of a server of many clients, less with datagrams (paper: 0.241)", AtLeast(0.24) => saved;
        "the same with the kernel's caches of both ends", AtLeast(0.24) => saved_in_all;
    }
}

/// All conclusions that the measurements allow.
pub(super) fn section(records: &[Record], sizes: &[u64]) -> Option<Section> {
    let lines = Lines { records, sizes };
    let (networks, host) = (lines.over_networks(), lines.on_one_host());
    let all = [networks, host, lossy_and_groups(records), programs(records)].concat();
    aims::section("Conclusions", &all)
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

    /// A target that is reached, one that is missed, and no line for targets that were not measured.
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

    /// Points of a lossy link are not points of figs. 5 and 6.
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
