//! The machine's numbers as sections of a report, and what they advise.

use weft_advise::machine::{Case, Critical, Machine};
use weft_report::size::human;
use weft_report::{Axis, Plot, Section, Series, Stroke, Table, number};

/// A critical size in words.
pub fn words(critical: Critical) -> String {
    match critical {
        Critical::Always => "every measured size".to_owned(),
        Critical::From(bytes) => format!("{} and more", human(bytes)),
        Critical::Never => "none of the measured sizes".to_owned(),
        Critical::Unknown => "not measured".to_owned(),
    }
}

fn table(machine: &Machine, cases: &[Case]) -> Table {
    let mut headers = vec!["size"];
    headers.extend(cases.iter().map(|case| case.words()));
    let mut table = Table::new(&headers);
    let mut sizes: Vec<u64> = cases
        .iter()
        .flat_map(|case| machine.line(*case))
        .map(|(bytes, _)| bytes)
        .collect();
    sizes.sort_unstable();
    sizes.dedup();
    for bytes in sizes {
        let times = cases.iter().map(|case| {
            machine
                .at(*case, bytes)
                .map_or_else(|| "-".to_owned(), number)
        });
        table.push([human(bytes)].into_iter().chain(times));
    }
    table
}

fn plot(machine: &Machine, title: &str, lines: &[(Case, Stroke, bool)]) -> Plot {
    let plot = Plot::new(title, Axis::bytes(), Axis::log("µs"));
    lines.iter().fold(plot, |plot, (case, stroke, dashed)| {
        let points = machine.line(*case).into_iter();
        // A logarithmic axis has no zero.
        let points = points.filter(|(_, us)| *us > 0.0);
        let points = points.map(|(bytes, us)| (bytes as f64, us)).collect();
        let series = Series::new(case.words(), *stroke, points);
        plot.series(if *dashed { series.dashed() } else { series })
    })
}

/// Tables and pictures of a machine.
pub fn sections(machine: &Machine) -> Vec<Section> {
    use Case::{
        CopyAbsent, CopyAbsentHuge, CopyCold, CopyHuge, CopyWarm, Deregister, Local, Pin,
        PinAbsent, PinAbsentHuge, PinAbsentInTurn, PinAbsentTogether, PinHuge, PinInTurn,
        PinTogether, Register, RegisterAbsent, RegisterInTurn, RegisterTogether, Rings, Tcp, Unpin,
    };
    let mut sections = vec![
        Section::new("Copy or register")
            .text("Microseconds. weft pins nothing: its registration enters a region in a table. Pinning is what a registration costs with an RNIC's driver (mlock and munlock).")
            .table(table(machine, &[CopyWarm, CopyCold, Register, Pin]))
            .table(table(machine, &[CopyAbsent, RegisterAbsent, PinAbsent]))
            .plot(plot(
                machine,
                "Copy or register, pages resident",
                &[(CopyWarm, Stroke::Tcp, false), (CopyCold, Stroke::Other, true), (Register, Stroke::Weft, false), (Pin, Stroke::WeftOther, false)],
            ))
            .plot(plot(
                machine,
                "Copy or register, pages not resident",
                &[(CopyAbsent, Stroke::Tcp, false), (RegisterAbsent, Stroke::Weft, false), (PinAbsent, Stroke::WeftOther, false)],
            )),
        Section::new("The end of a registration")
            .text("Microseconds.")
            .table(table(machine, &[Deregister, Unpin])),
    ];
    if machine.huge_pages {
        sections.push(
            Section::new("Huge pages")
                .text("Microseconds.")
                .table(table(
                    machine,
                    &[CopyHuge, CopyAbsentHuge, PinHuge, PinAbsentHuge],
                )),
        );
    }
    sections.push(
        Section::new("Several threads")
            .text(format!(
                "Microseconds for {} regions of the size; on all threads from the first one's start to the last one's end, wake-ups included.",
                machine.threads
            ))
            .table(table(
                machine,
                &[
                    RegisterInTurn,
                    RegisterTogether,
                    PinInTurn,
                    PinTogether,
                    PinAbsentInTurn,
                    PinAbsentTogether,
                ],
            )),
    );
    sections.push(
        Section::new("A message on this host")
            .text("Microseconds of one thread that sends and receives it. `weft run` needs a message and two copies through a ring.")
            .table(table(machine, &[Tcp, Local, Rings]))
            .plot(plot(
                machine,
                "A message on this host",
                &[(Tcp, Stroke::Tcp, false), (Local, Stroke::Weft, false), (Rings, Stroke::WeftOther, false)],
            )),
    );
    let mut overlap = Table::new(&["size", "transfer", "computation", "both at once", "hidden"]);
    for (bytes, _) in machine.line(Case::Both) {
        let time = |case| machine.at(case, bytes).map_or_else(String::new, number);
        let hidden = machine.overlap(bytes).unwrap_or(0.0);
        overlap.push([
            human(bytes),
            time(Case::Transfer),
            time(Case::Compute),
            time(Case::Both),
            format!("{:.0} %", hidden * 100.0),
        ]);
    }
    if !overlap.is_empty() {
        sections.push(
            Section::new("Overlap of computation and transfer")
                .text("Microseconds of an RDMA Read over loopback TCP, of a computation as long, and of both at once.")
                .table(overlap),
        );
    }
    sections
}

/// The advice that follows from the numbers, one sentence each.
pub fn advice(machine: &Machine) -> Vec<String> {
    let mut list = Vec::new();
    let critical = |quick, slow| words(machine.critical(quick, slow));
    list.push(format!(
        "weft, buffers that stay in the cache: copy below, register {}; buffers that are not in the cache: register {}.",
        critical(Case::Register, Case::CopyWarm),
        critical(Case::Register, Case::CopyCold)
    ));
    list.push(format!(
        "weft, pages not resident: registering and touching is no slower than copying at {}.",
        critical(Case::RegisterAbsent, Case::CopyAbsent)
    ));
    list.push(format!(
        "With an RNIC that pins: register {} when pages are resident, {} when they are not.",
        critical(Case::Pin, Case::CopyWarm),
        critical(Case::PinAbsent, Case::CopyAbsent)
    ));
    list.push(cache(machine));
    if let Some((bytes, hidden)) = machine
        .line(Case::Both)
        .into_iter()
        .filter_map(|(bytes, _)| Some((bytes, machine.overlap(bytes)?)))
        .max_by(|a, b| a.1.total_cmp(&b.1))
    {
        list.push(format!(
            "Overlap: at best {:.0} % of a transfer ({}) is hidden behind computation.",
            hidden * 100.0,
            human(bytes)
        ));
    }
    list.extend(
        machine
            .missing
            .iter()
            .map(|what| format!("Not measured: {what}.")),
    );
    list
}

/// Whether a registration cache pays off: a look-up of an address costs about ten nanoseconds.
fn cache(machine: &Machine) -> String {
    let most = |case| {
        let line = machine.line(case);
        line.into_iter().map(|(_, us)| us).fold(0.0, f64::max)
    };
    let own = most(Case::Register);
    let verdict = if own < 2.0 {
        "does not pay for weft"
    } else {
        "pays for weft"
    };
    let pins = machine.at(Case::Pin, 64 << 10).map_or_else(
        || "what pins cost was not measured".to_owned(),
        |us| {
            let pays = if us > 2.0 {
                "it pays"
            } else {
                "it does not pay"
            };
            format!("with pins {pays} (64 KiB: {} µs)", number(us))
        },
    );
    format!(
        "A registration cache {verdict}: a registration and its end take {} µs at most, whatever the size; {pins}.",
        number(own)
    )
}
