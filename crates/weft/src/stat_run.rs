//! The connections of programs under `weft run`, as a table and as JSON.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use indicatif::HumanBytes;
use weft_run::ledger::{self, Ledger};
use weft_run::meet::Why;

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
            let reason = (row.why != Why::None).then(|| row.why.text());
            let object = serde_json::json!({
                "door": "run",
                "pid": ledger.pid,
                "process": super::stat::process_name(Some(ledger.pid)),
                "fd": row.fd,
                "local": row.own.to_string(),
                "peer": row.peer.to_string(),
                "transport": row.via(),
                "reason": reason,
                "closed": row.closed,
                "datagrams": row.datagrams,
                "dropped": row.dropped,
                "tx_ring": row.ring.0,
                "rx_ring": row.ring.1,
                "tx_tcp": row.tcp.0,
                "rx_tcp": row.tcp.1,
                "bells": row.bells,
                "sleeps": row.sleeps,
            });
            text += &object.to_string();
            text.push('\n');
        }
    }
    text
}

/// A table for humans; empty when there is nothing to show. Closed connections are left out.
pub fn table(ledgers: &[Ledger]) -> String {
    let mut table = Table::new();
    table
        .load_preset(presets::UTF8_BORDERS_ONLY)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header([
            "weft run",
            "connection",
            "via",
            "sent in rings",
            "received",
            "sent over TCP",
            "received",
            "bells, sleeps",
        ]);
    let mut any = false;
    for ledger in ledgers {
        let process = super::stat::process_name(Some(ledger.pid));
        for row in ledger.rows.iter().filter(|row| !row.closed) {
            any = true;
            let mut connection = format!("{} → {}", row.own, row.peer);
            if row.why != Why::None {
                connection = format!("{connection}\n({})", row.why.text());
            }
            let bytes = |n: u64| HumanBytes(n).to_string();
            table.add_row([
                format!("{process} {}", ledger.pid),
                connection,
                row.via().to_owned(),
                bytes(row.ring.0),
                bytes(row.ring.1),
                bytes(row.tcp.0),
                bytes(row.tcp.1),
                format!("{}, {}", row.bells, row.sleeps),
            ]);
        }
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    if any {
        format!("{table}\n")
    } else {
        String::new()
    }
}
