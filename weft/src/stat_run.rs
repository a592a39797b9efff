//! The connections of programs under `weft run`, as a table and as JSON.

use indicatif::HumanBytes;
use weft_run::ledger::{self, Ledger};
use weft_run::lend::Copied;

use weft_cli::terminal;

/// The ledgers of these processes, or of all that this user may look into.
pub fn ledgers(pids: &[u32]) -> Vec<Ledger> {
    if pids.is_empty() {
        return ledger::survey().unwrap_or_default();
    }
    let of = |pid: &u32| ledger::of_process(*pid).ok().flatten();
    pids.iter().filter_map(of).collect()
}

/// A JSON object a connection.
pub fn json(ledgers: &[Ledger]) -> String {
    let mut text = String::new();
    for ledger in ledgers {
        for row in &ledger.rows {
            let object = serde_json::json!({
                "door": "run",
                "pid": ledger.pid,
                "process": super::stat::process_name(Some(ledger.pid)),
                "fd": row.fd,
                "local": row.own.to_string(),
                "peer": row.peer.to_string(),
                "transport": row.via(),
                "reason": row.about_why(),
                "peer_user": row.peer_user,
                "closed": row.closed,
                "datagrams": row.datagrams,
                "dropped": row.dropped,
                "tx_ring": row.ring.0,
                "rx_ring": row.ring.1,
                "tx_tcp": row.tcp.0,
                "rx_tcp": row.tcp.1,
                "bells": row.bells,
                "sleeps": row.sleeps,
                "mode": row.lent.mode.name(),
                "tx_source": row.lent.bytes.0,
                "rx_source": row.lent.bytes.1,
                "tx_copied": row.lent.copied,
                "copied_why": Copied::of(row.lent.why).map(Copied::text).collect::<Vec<_>>(),
                "faults": row.lent.faults,
                "moved": row.lent.moved,
            });
            text += &object.to_string();
            text.push('\n');
        }
    }
    text
}

/// A table for humans that fits so many columns; empty when there is nothing to show. Closed connections are left out.
pub fn table(ledgers: &[Ledger], width: Option<u16>) -> String {
    let header = [
        ["weft run", "connection"],
        ["via", "bells, sleeps"],
        ["sent in rings", "over TCP"],
        ["received in rings", "over TCP"],
    ];
    let mut rows = Vec::new();
    for ledger in ledgers {
        let process = super::stat::process_name(Some(ledger.pid));
        for row in ledger.rows.iter().filter(|row| !row.closed) {
            let mut connection = format!("{} → {}", row.own, row.peer);
            let why = row.about_why().map(str::to_owned);
            for about in [row.about_user(), why].into_iter().flatten() {
                connection = format!("{connection}\n({about})");
            }
            if !row.lent.is_empty() {
                connection = format!("{connection}\n{}", row.lent.text());
            }
            let bytes = |n: u64| HumanBytes(n).to_string();
            rows.push([
                [format!("{process} {}", ledger.pid), connection],
                [
                    row.via().to_owned(),
                    format!("{}, {}", row.bells, row.sleeps),
                ],
                [bytes(row.ring.0), bytes(row.tcp.0)],
                [bytes(row.ring.1), bytes(row.tcp.1)],
            ]);
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let header = header.map(|pair| pair.map(str::to_owned));
    terminal::table(&header, &rows, 2, width) + "\n"
}
