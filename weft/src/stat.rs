//! The connections of this host's weft processes, as tables and as JSON.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use indicatif::HumanBytes;
use weft_verbs::stat::{Connection, Survey};
use weft_verbs::{ConnCounters, QpState};

use weft_cli::terminal::{self, Pairs};
use weft_service::text::printable;

/// What stays the same of a connection as long as it lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    pid: Option<u32>,
    device: u32,
    qp: u32,
    local: SocketAddr,
    peer: SocketAddr,
}

/// A connection, its process, and what it moved in the time that is shown.
#[derive(Debug, Clone)]
pub struct Row {
    key: Key,
    uid: u32,
    process: String,
    connection: Connection,
    /// Its counters one look earlier, and how long ago that was.
    before: Option<(ConnCounters, Duration)>,
}

/// Looks in turn, and remembers the last one for rates.
#[derive(Debug, Default)]
pub struct Watch(HashMap<Key, Connection>);

impl Watch {
    /// The connections of these processes, of all when none is named.
    pub fn rows(&mut self, survey: Survey, pids: &[u32]) -> Vec<Row> {
        let mut now = HashMap::new();
        let mut rows = Vec::new();
        let asked = |pid: Option<u32>| pids.is_empty() || pid.is_some_and(|p| pids.contains(&p));
        for device in survey.devices {
            if !asked(device.pid) {
                continue;
            }
            let process = process_name(device.pid);
            for connection in device.connections {
                let key = Key {
                    pid: device.pid,
                    device: device.device,
                    qp: connection.qp,
                    local: connection.local,
                    peer: connection.peer,
                };
                let before = self.0.get(&key).map(|earlier| {
                    let time = connection.age.saturating_sub(earlier.age);
                    (earlier.counters, time)
                });
                now.insert(key, connection.clone());
                rows.push(Row {
                    key,
                    uid: device.uid,
                    process: process.clone(),
                    connection,
                    before,
                });
            }
        }
        self.0 = now;
        rows
    }
}

/// What the kernel calls a process; the text is the process's own choice.
pub(crate) fn process_name(pid: Option<u32>) -> String {
    let name = pid.and_then(|pid| fs::read(format!("/proc/{pid}/comm")).ok());
    match name {
        Some(name) => printable(name.trim_ascii_end()),
        None => "?".to_owned(),
    }
}

fn state(state: QpState) -> &'static str {
    match state {
        QpState::Init => "init",
        QpState::Rts => "connected",
        QpState::Closing => "closing",
        QpState::Error => "ended",
    }
}

/// The counters with their names in JSON.
fn by_name(counters: &ConnCounters) -> [(&'static str, u64); 10] {
    [
        ("tx_direct", counters.tx_direct),
        ("tx_copied", counters.tx_copied),
        ("rx_direct", counters.rx_direct),
        ("rx_copied", counters.rx_copied),
        ("tx_fpdus", counters.tx_fpdus),
        ("rx_fpdus", counters.rx_fpdus),
        ("tx_syscalls", counters.tx_syscalls),
        ("rx_syscalls", counters.rx_syscalls),
        ("one_sided", counters.one_sided),
        ("one_sided_bytes", counters.one_sided_bytes),
    ]
}

impl Row {
    /// A JSON object. With an earlier look, `per_s` has what each counter grew by in a second.
    pub fn json(&self) -> String {
        let Connection {
            qp,
            local,
            peer,
            transport,
            cipher,
            reason,
            age,
            counters,
            ..
        } = &self.connection;
        let since = SystemTime::now()
            .checked_sub(*age)
            .and_then(|since| since.duration_since(UNIX_EPOCH).ok())
            .map(|since| (since.as_secs_f64() * 1e3).round() / 1e3);
        let mut object = serde_json::json!({
            "pid": self.key.pid,
            "process": self.process,
            "uid": self.uid,
            "device": self.key.device,
            "qp": qp,
            "state": state(self.connection.state),
            "local": local.to_string(),
            "peer": peer.to_string(),
            "transport": transport,
            "cipher": cipher,
            "reason": reason,
            "since": since,
            "age_s": age.as_secs_f64(),
        });
        for (name, value) in by_name(counters) {
            object[name] = value.into();
        }
        if self.before.is_some() {
            for (name, rate) in self.rates() {
                object["per_s"][name] = rate.into();
            }
        }
        object.to_string()
    }

    fn cells(&self, rates: bool) -> Pairs<5> {
        let c = &self.connection;
        let values: Vec<f64> = if rates {
            self.rates().map(|(_, rate)| rate).collect()
        } else {
            by_name(&c.counters).map(|(_, total)| total as f64).to_vec()
        };
        let [
            tx_direct,
            tx_copied,
            rx_direct,
            rx_copied,
            tx_fpdus,
            rx_fpdus,
            tx_calls,
            rx_calls,
            one_sided,
            one_sided_bytes,
        ] = values[..]
        else {
            unreachable!("there are ten counters")
        };
        let bytes = |n: f64| HumanBytes(n as u64).to_string();
        let both = |out: f64, inward: f64| format!("{}, {}", count(out), count(inward));
        let mut connection = format!("{} → {}", c.local, c.peer);
        if c.state != QpState::Rts {
            connection = format!("{connection}, {}", state(c.state));
        }
        if let Some(reason) = &c.reason {
            connection = format!("{connection}\n({reason})");
        }
        let pid = self.key.pid.map_or("?".to_owned(), |pid| pid.to_string());
        let via = match &c.cipher {
            Some(cipher) => format!("{}\n{cipher}", c.transport),
            None => c.transport.clone(),
        };
        [
            [format!("{} {pid}, {}", self.process, c.qp), connection],
            [via, age(c.age)],
            [bytes(tx_direct + tx_copied), bytes(rx_direct + rx_copied)],
            [
                bytes(tx_copied + rx_copied),
                format!("{}, {}", count(one_sided), bytes(one_sided_bytes)),
            ],
            [both(tx_fpdus, rx_fpdus), both(tx_calls, rx_calls)],
        ]
    }

    /// What each counter grew by in a second, since the last look or (a new connection) since its start.
    fn rates(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let now = &self.connection;
        let (before, time) = self.before.unwrap_or((ConnCounters::default(), now.age));
        let seconds = time.as_secs_f64().max(1e-3);
        let pairs = by_name(&now.counters).into_iter().zip(by_name(&before));
        pairs.map(move |((name, now), (_, before))| {
            (name, now.saturating_sub(before) as f64 / seconds)
        })
    }
}

/// How long, in two units at most.
fn age(age: Duration) -> String {
    let s = age.as_secs();
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        _ => format!("{} d {} h", s / 86_400, s / 3600 % 24),
    }
}

/// A count that fits a column.
fn count(n: f64) -> String {
    match n {
        n if n >= 9.995e8 => format!("{:.2} G", n / 1e9),
        n if n >= 9.995e5 => format!("{:.2} M", n / 1e6),
        n if n >= 9_999.5 => format!("{:.1} k", n / 1e3),
        n => format!("{n:.0}"),
    }
}

/// The rows as a table for humans that fits so many columns: totals, or (`rates`) what moved in a second.
pub fn table(rows: &[Row], rates: bool, width: Option<u16>) -> String {
    let per = if rates { "/s" } else { "" };
    let header = [
        ["process, QP".to_owned(), "connection".to_owned()],
        ["via".to_owned(), "for".to_owned()],
        [format!("sent{per}"), format!("received{per}")],
        [format!("copied{per}"), format!("one-sided{per}")],
        [format!("FPDUs{per}"), format!("calls{per}")],
    ];
    let rows: Vec<_> = rows.iter().map(|row| row.cells(rates)).collect();
    terminal::table(&header, &rows, 2, width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_verbs::stat::DeviceStat;

    fn survey(seconds: u64, sent: u64) -> Survey {
        let connection = Connection {
            qp: 7,
            state: QpState::Rts,
            local: "127.0.0.1:1".parse().unwrap(),
            peer: "127.0.0.1:2".parse().unwrap(),
            transport: "tcp".into(),
            cipher: None,
            reason: Some("the peer is on another host".into()),
            age: Duration::from_secs(seconds),
            counters: ConnCounters {
                tx_direct: sent,
                ..ConnCounters::default()
            },
        };
        Survey {
            devices: vec![DeviceStat {
                pid: None,
                uid: 0,
                device: 0,
                connections: vec![connection],
            }],
            ..Survey::default()
        }
    }

    #[test]
    fn rates_are_between_two_looks() {
        let mut watch = Watch::default();
        let first = watch.rows(survey(10, 1000), &[]);
        let text = table(&first, true, None);
        assert!(text.contains("sent/s") && text.contains("100 B"), "{text}");
        assert!(!first[0].json().contains("per_s"));
        let second = watch.rows(survey(12, 5000), &[]);
        let json: serde_json::Value = serde_json::from_str(&second[0].json()).unwrap();
        assert_eq!(json["per_s"]["tx_direct"], 2000.0);
        assert_eq!(json["tx_direct"], 5000);
        assert_eq!(json["pid"], serde_json::Value::Null);
        // Counters that go back belong to another connection of the same name.
        let third = watch.rows(survey(1, 10), &[]);
        assert_eq!(third[0].rates().next(), Some(("tx_direct", 0.0)));
        assert!(watch.rows(survey(2, 10), &[4711]).is_empty());
    }

    #[test]
    fn the_table_says_why() {
        let rows = Watch::default().rows(survey(4000, 5 << 20), &[]);
        let text = table(&rows, false, None);
        for part in [
            "127.0.0.1:1 → 127.0.0.1:2",
            "another host",
            "5.00 MiB",
            "1 h 6 min",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let narrow = table(&rows, false, Some(80));
        assert!(
            narrow.lines().all(|line| line.chars().count() <= 80),
            "{narrow}"
        );
        assert_eq!(count(999_999.0), "1.00 M");
        assert_eq!(count(9_999.0), "9999");
        assert_eq!(count(10_000.0), "10.0 k");
    }
}
