//! The report of the suite: from records to tables and plots.

use super::goals::goals;
use super::register::{CASES, critical_size};
use super::setup::STEPS;
use super::view::{Line, View, median, ratio, ratios, share, spread};
use super::{peers, rnic};
use crate::args::CommonArgs;
use crate::record::{Metric, Record, Side};
use crate::report::{Axis, Plot, Report, Section, Stroke, Table, machine};
use crate::size::human;

/// Where and how results of this machine are measured.
pub(super) fn origin(common: &CommonArgs, load: &str) -> String {
    format!(
        "{}; load average {load} when the measurements began: what spins needs the CPUs for itself. Runs: {}.",
        machine(),
        common.effort.runs()
    )
}

pub(super) fn report(records: &[Record], origin: String, notes: &[String]) -> Report {
    let every = View(records.iter().collect());
    // The others have separate tables, one for each measure: here they would take too much room.
    let all = every.filter(|record| {
        let line = Line::of(record);
        let tcp = matches!(
            line.stack.as_str(),
            "tcp" | "tcp-tls" | "udp" | "udp-single"
        );
        line.is_weft() || line.is_exs() || tcp || record.op == "register"
    });
    let mut report = Report::new("weft bench verbs");
    report.intro = vec![
        origin,
        "Two processes on one machine over loopback, the stacks taking turns within each run. Numbers are medians, with \
         the smallest and largest run in brackets; ratios are medians of each run's weft over the plain TCP beside it. \
         GB is 10^9 bytes; CPU is user and system time of a whole process."
            .to_owned(),
    ];
    report.sections = [goals(&every)].into_iter().flatten().collect();
    report.sections.extend(rnic::section(&every));
    let of_no_rnic = every.filter(|record| record.transport != "rnic");
    report.sections.extend(peers::sections(&of_no_rnic, notes));
    let sections = [
        operations(&all),
        transfer(&all, "send", "Send"),
        transfer(&all, "write", "RDMA Write"),
        transfer(&all, "write_imm", "RDMA Write with immediate data"),
        transfer(&all, "read", "RDMA Read"),
        latency(&all, "send", "Send"),
        latency(&all, "write", "RDMA Write"),
        latency(&all, "write_imm", "RDMA Write with immediate data"),
        latency(&all, "read", "RDMA Read"),
        atomics(&all),
        rate(&every),
        iw(&all),
        buffers(&all),
        register(records, &all),
        setup(&all),
        memory(&all),
    ];
    report.sections.extend(sections.into_iter().flatten());
    report
}

/// All operations in one plot (thesis fig. 3.19).
fn operations(all: &View<'_>) -> Option<Section> {
    let ops = [
        ("send", "Send", Stroke::Weft),
        ("write", "Write", Stroke::WeftCrc),
        ("read", "Read", Stroke::WeftOther),
        ("write_imm", "Write with imm", Stroke::Other),
    ];
    let bandwidth = all
        .metric(Metric::bandwidth_GBps)
        .filter(|record| record.case.is_none());
    let carrier = match bandwidth.stack("weft").0.first() {
        Some(record) => record.transport.as_str(),
        None => return None,
    };
    let weft = bandwidth.stack("weft");
    let plain = weft.0.iter().find(|record| record.crc != Some(true));
    let crc = plain.map_or(Some(true), |record| record.crc);
    let mut plot = Plot::new(
        "Throughput of the operations",
        Axis::bytes(),
        Axis::linear("GB/s"),
    );
    let mut shown = 0;
    for (op, label, stroke) in ops {
        let line = bandwidth.op(op).filter(|record| {
            record.stack == "weft" && record.transport == carrier && record.crc == crc
        });
        if !line.is_empty() {
            shown += 1;
            plot = plot.series(line.series(label.to_owned(), stroke));
        }
    }
    (shown > 1).then(|| {
        Section::new("All operations")
            .text("Throughput over message size, one direction (thesis fig. 3.19).")
            .plot(plot)
    })
}

/// Throughput and CPU of one operation (thesis fig. 3.20).
fn transfer(all: &View<'_>, op: &str, name: &str) -> Option<Section> {
    let of_op = all.op(op);
    let bandwidth = of_op.metric(Metric::bandwidth_GBps);
    if bandwidth.is_empty() {
        return None;
    }
    let cpu = of_op.metric(Metric::cpu_s_per_GB);
    let lines = bandwidth.lines();
    let mut headers = vec!["size".to_owned()];
    for line in &lines {
        headers.push(format!("{} GB/s", line.label()));
        headers.extend(ratios(line).iter().map(|(header, _)| (*header).to_owned()));
    }
    for line in &lines {
        headers.push(format!("{} CPU s/GB sender + receiver", line.label()));
    }
    let mut table = Table::new(&headers);
    for bytes in bandwidth.sizes() {
        let mut row = vec![human(bytes)];
        for line in &lines {
            let record = bandwidth.line(line).at(bytes);
            row.push(spread(record));
            row.extend(ratios(line).iter().map(|(_, cell)| cell(record)));
        }
        for line in &lines {
            let side = |side| median(cpu.line(line).side(side).at(bytes));
            row.push(format!("{} + {}", side(Side::Sender), side(Side::Receiver)));
        }
        table.push(row);
    }
    let title = format!("{name}: throughput");
    let speed = bandwidth.plot(&title, Axis::linear("GB/s"), Line::label);
    let mut load = Plot::new(
        format!("{name}: CPU time for a gigabyte"),
        Axis::bytes(),
        Axis::log("CPU seconds per GB"),
    );
    for line in &lines {
        let sides = cpu.line(line);
        let label = |side| format!("{} {side}", line.label());
        load = load
            .series(
                sides
                    .side(Side::Sender)
                    .series(label("sender"), line.stroke()),
            )
            .series(
                sides
                    .side(Side::Receiver)
                    .series(label("receiver"), line.stroke())
                    .dashed(),
            );
    }
    Some(
        Section::new(format!("{name}: throughput and CPU"))
            .text(
                "Many operations in flight, one direction, until the last byte is known to be at its far end; plain TCP \
                 writes with the same size. The shaded bands are the middle half of the runs.",
            )
            .plot(speed)
            .plot(load)
            .table(table),
    )
}

fn latency(all: &View<'_>, op: &str, name: &str) -> Option<Section> {
    let of_op = all.op(op).filter(|record| record.poll.is_some());
    let middle = of_op.metric(Metric::latency_us_p50);
    let tail = of_op.metric(Metric::latency_us_p99);
    if middle.is_empty() {
        return None;
    }
    let lines = middle.lines();
    let mut headers = vec!["size".to_owned(), "waiting".to_owned()];
    for line in &lines {
        headers.push(format!("{} median µs", line.label()));
        headers.push("99 %".to_owned());
        headers.extend(ratios(line).iter().map(|(header, _)| (*header).to_owned()));
    }
    let mut table = Table::new(&headers);
    let what = if op == "read" {
        "the whole round trip"
    } else {
        "half the round trip"
    };
    let mut section = Section::new(format!("{name}: latency")).text(format!(
        "One operation at a time, {what}; both sides spin (busy) or sleep (block)."
    ));
    for (poll, words) in [("busy", "both sides spin"), ("block", "both sides sleep")] {
        let mut plot = Plot::new(
            format!("{name}: latency, {words}"),
            Axis::bytes(),
            Axis::log("µs"),
        );
        for bytes in middle.sizes() {
            let mut row = vec![human(bytes), poll.to_owned()];
            let mut any = false;
            for line in &lines {
                let record = middle.line(line).poll(poll).at(bytes);
                any |= record.is_some();
                row.push(spread(record));
                row.push(median(tail.line(line).poll(poll).at(bytes)));
                row.extend(ratios(line).iter().map(|(_, cell)| cell(record)));
            }
            if any {
                table.push(row);
            }
        }
        for line in &lines {
            plot = plot
                .series(
                    middle
                        .line(line)
                        .poll(poll)
                        .series(format!("{} median", line.label()), line.stroke()),
                )
                .series(
                    tail.line(line)
                        .poll(poll)
                        .series(format!("{} 99 %", line.label()), line.stroke())
                        .dashed(),
                );
        }
        section = section.plot(plot);
    }
    Some(section.table(table))
}

fn atomics(all: &View<'_>) -> Option<Section> {
    let mut table = Table::new(&["operation", "stack", "measure", "median (runs)", "of TCP"]);
    for op in ["fetch_add", "compare_swap", "swap"] {
        let of_op = all.op(op);
        for record in &of_op.0 {
            let measure = match (record.metric, record.poll.as_deref()) {
                (Metric::latency_us_p50, Some(poll)) => format!("latency µs, {poll}"),
                (Metric::messages_per_s, _) => "operations/s".to_owned(),
                _ => continue,
            };
            let line = Line::of(record);
            table.push([
                op.to_owned(),
                line.label(),
                measure,
                spread(Some(record)),
                ratio(Some(record)),
            ]);
        }
    }
    (!table.is_empty()).then(|| {
        Section::new("Atomics")
            .text("8 bytes; plain TCP beside them answers a request of 16 bytes with 8.")
            .table(table)
    })
}

fn rate(all: &View<'_>) -> Option<Section> {
    let of_op = all.op("rate");
    let rate = of_op.metric(Metric::messages_per_s);
    let cpu = of_op.metric(Metric::cpu_s_per_GB);
    let of_side = |line: &Line, side| median(cpu.line(line).side(side).first());
    let table = Table::of(
        rate.lines(),
        &[
            ("stack", &|line| line.label()),
            ("messages/s", &|line| spread(rate.line(line).first())),
            ("of TCP", &|line| ratio(rate.line(line).first())),
            ("CPU s/GB sender", &|line| of_side(line, Side::Sender)),
            ("CPU s/GB receiver", &|line| of_side(line, Side::Receiver)),
        ],
    );
    (!table.is_empty()).then(|| {
        Section::new("Message rate")
            .text(
                "Sends of 64 B, at most 128 in flight; plain TCP sends each message with one call.",
            )
            .table(table)
    })
}

fn iw(all: &View<'_>) -> Option<Section> {
    let of_op = all.op("iw");
    let bandwidth = of_op.metric(Metric::bandwidth_GBps);
    if bandwidth.is_empty() {
        return None;
    }
    let cpu = of_op.metric(Metric::cpu_s_per_GB);
    let sender = cpu.side(Side::Sender);
    let mut rows = Vec::new();
    for transport in bandwidth.transports() {
        let speed = bandwidth.transport(&transport);
        let load = sender.transport(&transport);
        for bytes in speed.sizes() {
            let [library, verbs] = ["weft-iw", "weft"]
                .map(|stack| (speed.stack(stack).at(bytes), load.stack(stack).at(bytes)));
            rows.push((bytes, transport.clone(), library, verbs));
        }
    }
    let middle = |record: Option<&Record>| Some(record?.summary.median);
    let table = Table::of(
        &rows,
        &[
            ("size", &|(bytes, ..)| human(*bytes)),
            ("over", &|(_, over, ..)| over.clone()),
            ("library GB/s", &|(.., library, _)| spread(library.0)),
            ("verbs GB/s", &|(.., verbs)| spread(verbs.0)),
            ("library of verbs", &|(.., library, verbs)| {
                let both = middle(library.0).zip(middle(verbs.0));
                share(both.map(|(library, verbs)| library / verbs))
            }),
            ("library CPU s/GB sender", &|(.., library, _)| {
                median(library.1)
            }),
            ("verbs CPU s/GB sender", &|(.., verbs)| median(verbs.1)),
        ],
    );
    let title = "RDMA Write over the iw library and over verbs";
    let plot = bandwidth.plot(title, Axis::linear("GB/s"), Line::label);
    Some(
        Section::new("The iw library over verbs")
            .text("RDMA Writes without CRC through the small library and through the verbs that it stands on (thesis fig. 3.21).")
            .plot(plot)
            .table(table),
    )
}

fn buffers(all: &View<'_>) -> Option<Section> {
    let of_op = all.op("buffers");
    let bandwidth = of_op.metric(Metric::bandwidth_GBps);
    if bandwidth.is_empty() {
        return None;
    }
    let cpu = of_op.metric(Metric::cpu_s_per_GB).side(Side::Sender);
    let lines = bandwidth.lines();
    let mut table = Table::new(&[
        "size",
        "reuse GB/s",
        "register anew GB/s",
        "copy GB/s",
        "reuse CPU s/GB",
        "register anew CPU s/GB",
        "copy CPU s/GB",
    ]);
    for bytes in bandwidth.sizes() {
        let mut row = vec![human(bytes)];
        row.extend(
            lines
                .iter()
                .map(|line| spread(bandwidth.line(line).at(bytes))),
        );
        row.extend(lines.iter().map(|line| median(cpu.line(line).at(bytes))));
        table.push(row);
    }
    let scheme = |line: &Line| line.case.clone().unwrap_or_default();
    let speed = bandwidth.plot("Buffer schemes: throughput", Axis::linear("GB/s"), scheme);
    let title = "Buffer schemes: CPU of the sender";
    let load = cpu.plot(title, Axis::log("CPU seconds per GB"), scheme);
    Some(
        Section::new("Buffers reused, registered anew, or copied into")
            .text("RDMA Writes without CRC, a buffer per operation in flight (thesis fig. 4.11).")
            .plot(speed)
            .plot(load)
            .table(table),
    )
}

fn register(records: &[Record], all: &View<'_>) -> Option<Section> {
    let of_op = all.op("register");
    if of_op.is_empty() {
        return None;
    }
    let mut headers = vec!["size"];
    headers.extend(CASES.iter().map(|(_, case)| *case));
    let mut table = Table::new(&headers);
    let columns = CASES.map(|(_, case)| of_op.case(case));
    for bytes in of_op.sizes() {
        let mut row = vec![human(bytes)];
        row.extend(columns.iter().map(|column| median(column.at(bytes))));
        table.push(row);
    }
    let line =
        |index: usize, stroke: Stroke| columns[index].series(CASES[index].1.to_owned(), stroke);
    let plot = |title: &str| Plot::new(title, Axis::bytes(), Axis::log("µs"));
    let critical = |register: usize, copy: usize| {
        critical_size(records, CASES[register].1, CASES[copy].1).map_or_else(
            || "none of the measured sizes".to_owned(),
            |bytes| format!("{} and more", human(bytes)),
        )
    };
    Some(
        Section::new("Registration and copying")
            .text(
                "Microseconds to register, deregister and copy (thesis figs. 4.3-4.10). weft pins nothing and asks no device: \
                 registering enters a region in a table, whatever its size, and pages that are not there are fetched by whoever \
                 touches them first. The column that registers and touches has that cost in it.",
            )
            .text(format!(
                "Critical buffer size, from which registering a buffer is not slower than copying it: resident {}; not resident {}; \
                 not resident and then touched {}.",
                critical(0, 4),
                critical(1, 5),
                critical(3, 5)
            ))
            .plot(
                plot("Registration")
                    .series(line(0, Stroke::Weft))
                    .series(line(1, Stroke::WeftOther).dashed())
                    .series(line(2, Stroke::WeftCrc)),
            )
            .plot(
                plot("Registration or copy, pages resident")
                    .series(line(0, Stroke::Weft))
                    .series(line(4, Stroke::Tcp)),
            )
            .plot(
                plot("Registration or copy, pages not resident")
                    .series(line(1, Stroke::Weft))
                    .series(line(3, Stroke::WeftOther))
                    .series(line(5, Stroke::Tcp)),
            )
            .plot(
                plot("Registration on two threads")
                    .series(line(6, Stroke::Weft))
                    .series(line(7, Stroke::Tcp))
                    .series(line(8, Stroke::WeftCrc)),
            )
            .table(table),
    )
}

fn setup(all: &View<'_>) -> Option<Section> {
    let of_op = all.op("setup");
    if of_op.is_empty() {
        return None;
    }
    let sizes = of_op.sizes();
    let columns: Vec<_> = [
        ("weft", "local", "weft, shared memory"),
        ("weft", "tcp", "weft, TCP"),
        ("tcp", "tcp", "tcp"),
    ]
    .into_iter()
    .flat_map(|column| sizes.iter().map(move |&bytes| (column, bytes)))
    .map(|((stack, transport, title), bytes)| {
        let of_stack = of_op.stack(stack);
        let measured = of_stack.filter(|record| record.transport == transport);
        (measured, bytes, format!("{title} {}", human(bytes)))
    })
    .filter(|(measured, ..)| !measured.is_empty())
    .collect();
    let mut headers = vec!["step, µs"];
    headers.extend(columns.iter().map(|(.., title)| title.as_str()));
    let mut table = Table::new(&headers);
    for step in STEPS {
        let mut row = vec![step.to_owned()];
        row.extend(
            columns
                .iter()
                .map(|(measured, bytes, _)| median(measured.case(step).at(*bytes))),
        );
        table.push(row);
    }
    Some(
        Section::new("Setting up and tearing down")
            .text(
                "The life of a connection that transfers one message (thesis table 4.1). The transfer ends when the far end's \
                 application has answered, in both stacks; plain TCP's objects are its socket, made by connect.",
            )
            .table(table),
    )
}

fn memory(all: &View<'_>) -> Option<Section> {
    let of_op = all.op("memory");
    let table = Table::of(
        &of_op.0,
        &[
            ("process", &|record| record.case.clone().unwrap_or_default()),
            ("bytes for each idle connection", &|record| {
                spread(Some(record))
            }),
        ],
    );
    (!table.is_empty()).then(|| {
        Section::new("Memory of idle connections")
            .text("Growth of private anonymous memory, divided by connections; the kernel's socket memory is not in it.")
            .table(table)
    })
}
