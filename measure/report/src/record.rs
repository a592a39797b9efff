//! The results as JSON, one object a line.

use crate::named::named;
use crate::stats::Summary;
use serde::{Deserialize, Serialize};

named! {
    /// The quantity of a record's numbers. The name contains the unit (GB is 10^9 bytes).
    #[allow(non_camel_case_types)]
    pub enum Metric {
        bandwidth_GBps = "bandwidth_GBps",
        latency_us_p50 = "latency_us_p50",
        latency_us_p99 = "latency_us_p99",
        latency_us_mean = "latency_us_mean",
        messages_per_s = "messages_per_s",
        cpu_s_per_GB = "cpu_s_per_GB",
        cpu_us_per_message = "cpu_us_per_message",
        instructions_per_byte = "instructions_per_byte",
        bytes_per_qp = "bytes_per_qp",
        time_us = "time_us",
        valid_share = "valid_share",
        memory_bytes = "memory_bytes",
    }
}

/// The process that a number belongs to, where the two differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The process that the data leaves.
    Sender,
    /// The process that the data reaches.
    Receiver,
}

/// One measured point: one line of `--json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The suite: `verbs`.
    pub bench: String,
    /// The operation: `send`, `write`, `read`, ...
    pub op: String,
    /// The transport of the bytes: `tcp`, `local`, `sim`.
    pub transport: String,
    /// The measured stack: `weft`, `weft-tls`, `weft-iw`, `tcp`, `tcp-tls`, `memcpy`, `vm`, `ucx-posix`, `fi-shm`,
    /// ...
    pub stack: String,
    /// Message size.
    pub bytes: u64,
    /// The quantity of the numbers.
    pub metric: Metric,
    /// Median, min, max, quartiles and runs.
    #[serde(flatten)]
    pub summary: Summary,
    /// Whether FPDUs carried a CRC; `None` if there are no FPDUs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub crc: Option<bool>,
    /// `busy` or `block`: how both sides waited, where it was chosen.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub poll: Option<String>,
    /// The side that the number belongs to, where the two differ.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub side: Option<Side>,
    /// The variant within the operation: a buffer scheme, a step of the set-up.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub case: Option<String>,
    /// Median of the ratios of this stack's runs to the neighbouring plain TCP runs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio_tcp: Option<f64>,
    /// Smallest of those ratios.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio_tcp_min: Option<f64>,
    /// Largest of those ratios.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio_tcp_max: Option<f64>,
    /// Median of the ratios of weft's runs with TLS to the neighbouring runs of TCP with TLS.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio_tcp_tls: Option<f64>,
    /// Smallest of those ratios.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio_tcp_tls_min: Option<f64>,
    /// Largest of those ratios.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ratio_tcp_tls_max: Option<f64>,
}

impl Record {
    /// A record without the optional fields.
    pub fn new(
        op: &str,
        transport: &str,
        stack: &str,
        bytes: u64,
        metric: Metric,
        summary: Summary,
    ) -> Self {
        Self {
            bench: "verbs".to_owned(),
            op: op.to_owned(),
            transport: transport.to_owned(),
            stack: stack.to_owned(),
            bytes,
            metric,
            summary,
            crc: None,
            poll: None,
            side: None,
            case: None,
            ratio_tcp: None,
            ratio_tcp_min: None,
            ratio_tcp_max: None,
            ratio_tcp_tls: None,
            ratio_tcp_tls_min: None,
            ratio_tcp_tls_max: None,
        }
    }

    /// A record of samples; `None` where there are none.
    pub fn of(
        op: &str,
        transport: &str,
        stack: &str,
        bytes: u64,
        metric: Metric,
        samples: &[f64],
    ) -> Option<Self> {
        let summary = Summary::of(samples)?;
        Some(Self::new(op, transport, stack, bytes, metric, summary))
    }

    /// Adds the variant within the operation.
    #[must_use]
    pub fn with_case(mut self, case: impl Into<String>) -> Self {
        self.case = Some(case.into());
        self
    }

    /// Adds the ratio to plain TCP.
    #[must_use]
    pub fn with_ratio(mut self, ratio: Option<Summary>) -> Self {
        self.ratio_tcp = ratio.map(|ratio| ratio.median);
        self.ratio_tcp_min = ratio.map(|ratio| ratio.min);
        self.ratio_tcp_max = ratio.map(|ratio| ratio.max);
        self
    }

    /// Adds the ratio to TCP with TLS.
    #[must_use]
    pub fn with_ratio_tls(mut self, ratio: Option<Summary>) -> Self {
        self.ratio_tcp_tls = ratio.map(|ratio| ratio.median);
        self.ratio_tcp_tls_min = ratio.map(|ratio| ratio.min);
        self.ratio_tcp_tls_max = ratio.map(|ratio| ratio.max);
        self
    }
}

/// Marks records as those of another suite than the verbs'.
pub fn of_suite(suite: &str, mut records: Vec<Record>) -> Vec<Record> {
    for record in &mut records {
        suite.clone_into(&mut record.bench);
    }
    records
}

/// Reads records, one JSON object a line.
pub fn read_lines(text: &str) -> Result<Vec<Record>, serde_json::Error> {
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(serde_json::from_str)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let summary = Summary::of(&[1.0, 2.0, 4.0]).unwrap();
        Record::new(
            "write",
            "tcp",
            "weft",
            1 << 20,
            Metric::bandwidth_GBps,
            summary,
        )
    }

    #[test]
    fn one_object_a_line_with_the_agreed_names() {
        let mut with_crc = record().with_ratio(Summary::of(&[0.9, 1.1]));
        with_crc.crc = Some(true);
        with_crc.side = Some(Side::Receiver);
        let text: String = [record(), with_crc.clone()]
            .map(|record| serde_json::to_string(&record).unwrap() + "\n")
            .concat();
        let lines: Vec<serde_json::Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 2);
        for key in [
            "bench",
            "op",
            "transport",
            "stack",
            "bytes",
            "metric",
            "median",
            "min",
            "max",
            "runs",
        ] {
            assert!(lines[0].get(key).is_some(), "{key} is missing in {text}");
        }
        assert!(lines[0].get("crc").is_none());
        assert_eq!(lines[0]["metric"], "bandwidth_GBps");
        assert_eq!(lines[0]["median"], 2.0);
        assert_eq!(lines[0]["runs"], 3);
        assert_eq!(lines[1]["crc"], true);
        assert_eq!(lines[1]["side"], "receiver");
        assert_eq!(lines[1]["ratio_tcp"], 1.0);
        assert_eq!(read_lines(&text).unwrap(), [record(), with_crc]);
    }

    #[test]
    fn metric_names_are_their_json() {
        for metric in <Metric as clap::ValueEnum>::value_variants() {
            assert_eq!(serde_json::to_value(metric).unwrap(), metric.name());
        }
    }
}
