//! The suite `weft-papers advise`.

use super::conclusions::{NOT_REMADE, conclusions};
use crate::args::{AdviseArgs, VerbsArgs};
use crate::error::{BenchError, Result, stack};
use crate::progress::Progress;
use crate::record::{Metric, Record, of_suite};
use crate::report::{Report, Section, machine as about_machine};
use crate::usage;
use clap::Parser;
use std::process::ExitCode;
use weft_advise::machine::Machine;
use weft_bench::verbs::measured;
use weft_costs::{Effort, STEPS, advice, measure, sections};

/// The options of the part that `weft bench verbs` measures.
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    verbs: VerbsArgs,
}

/// Table 4.1 and figure 4.11, as `weft bench verbs` makes them.
fn verbs(args: &AdviseArgs) -> Result<(Vec<Record>, Vec<Section>)> {
    let runs = args
        .runs
        .map_or_else(String::new, |runs| format!("--runs {runs}"));
    let quick = if args.quick {
        "--quick"
    } else {
        "--seconds 0.05"
    };
    let line = format!("advise --op setup,buffers --figure bandwidth --crc off {runs} {quick}");
    let options = Options::try_parse_from(line.split_whitespace());
    let options = options.map_err(|e| BenchError::Usage(e.to_string()))?;
    measured(&options.verbs)
}

/// Runs the suite: prints tables, and writes what the options ask for.
pub(crate) fn run(args: &AdviseArgs) -> Result<ExitCode> {
    let mut output = args.output.open()?;
    let brief = Effort::brief();
    let sizes = match &args.size {
        Some(sizes) => sizes.0.clone(),
        None if args.quick => brief.sizes,
        None => (5..=13).map(|power| 1 << (2 * power)).collect(),
    };
    if sizes.iter().any(|bytes| !(1..=1 << 30).contains(bytes)) {
        return Err(BenchError::Usage("sizes are from 1 B to 1 GiB".to_owned()));
    }
    let effort = Effort {
        sizes,
        runs: args.runs.unwrap_or(if args.quick { 5 } else { 15 }),
    };
    let load = usage::load_average();
    let mut progress = Progress::new(STEPS + 1);
    let machine = measure(&effort, |what| {
        progress.at(what);
        progress.step();
    })
    .map_err(stack("measure the machine"))?;
    progress.at("set-up and buffer schemes");
    let (mut records, more) = verbs(args)?;
    drop(progress);
    records.extend(points(&machine));
    output.lines(&records)?;
    let mut report = Report::new("weft-papers advise: hidden costs (chapter 4 of the thesis)");
    report.intro = vec![
        format!("{}; load before the run: {load}.", about_machine()),
        format!(
            "The least of {} runs of each point; set-up and buffer schemes: medians. The critical sizes are those of this machine.",
            effort.runs
        ),
    ];
    report.intro.extend(advice(&machine));
    report.sections = sections(&machine);
    report.sections.extend(more);
    let found = conclusions(&machine, &records).section("The chapter's conclusions", "thesis");
    report
        .sections
        .extend(found.map(|section| NOT_REMADE.into_iter().fold(section, Section::text)));
    output.finish(&report)
}

/// The machine's points as records.
fn points(machine: &Machine) -> Vec<Record> {
    let points = machine.points.iter();
    let records = points.filter_map(|point| {
        let (bytes, us) = (point.bytes, Metric::time_us);
        let record = Record::of("costs", "none", "machine", bytes, us, &[point.us])?;
        Some(record.with_case(point.case.words()))
    });
    of_suite("advise", records.collect())
}
