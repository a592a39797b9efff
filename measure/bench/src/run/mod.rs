//! `weft bench run`: programs from Debian under `weft run`, compared with the same programs on plain TCP in the same run.
//!
//! The servers of a case run at the same time, one for each stack. The clients run in turn, so that a disturbance of the machine affects all
//! stacks. A ratio compares two neighbouring runs.

mod parts;
mod place;
mod programs;
pub mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};

pub use parts::PartArgs;
pub use programs::Program;

use crate::aims::Limit;
use crate::args::LoadArgs;
use crate::children::Load;
use crate::error::{BenchError, Result, failed};
use crate::output::{self, KEPT, OutputArgs};
use crate::progress::Progress;
use crate::report::{Bars, Mark, Report, Section, Table, machine, number};
use crate::stats::{Summary, paired_ratio};
use programs::{About, CASES, Case, Goal};
use world::{Stack, World};

const EXAMPLES: &str = "\
Examples:
  # every program that is installed, in about ten minutes
  weft bench run --html run.html
  # three short runs of each
  weft bench run --quick
  # two of them
  weft bench run --program redis,nginx
  # on a busy machine
  weft bench run --program redis --loops 8

Programs that are missing are left out with a notice. The user who runs it has to be the same for both sides; as root, postgres and pgbench run as the user postgres.
The exit status is 0 also when a ratio is below what it is to reach; it is a failure when a program could not be measured.";

/// Options of `weft bench run`.
#[derive(Args, Clone, Debug)]
#[command(after_long_help = EXAMPLES)]
pub struct RunArgs {
    /// Which programs [default: all that are installed]
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub program: Vec<Program>,
    /// Runs of each case; the stacks take turns within each [default: 10, quick: 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub runs: Option<u32>,
    /// Seconds of each run, in whole seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub seconds: u32,
    /// Few runs
    #[arg(long)]
    pub quick: bool,
    /// What runs beside.
    #[command(flatten)]
    pub load: LoadArgs,
    /// The folder of the preload library [default: as `weft run` finds it]
    #[arg(long, value_name = "DIR", env = "WEFT_RUN_LIB")]
    pub lib: Option<PathBuf>,
    /// Results of earlier runs (of --json), which the table is to have; nothing is measured
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub from: Vec<PathBuf>,
    /// Where the results go.
    #[command(flatten)]
    pub output: OutputArgs,
}

/// The values of one stack, one for each run.
struct Values {
    stack: Stack,
    each: Vec<f64>,
    /// Connections that went over in the last run.
    over: u32,
}

/// The result of a case.
struct Outcome {
    about: &'static About,
    stacks: Vec<Values>,
}

/// One of our own peers.
pub(crate) fn part(args: &PartArgs) -> Result<()> {
    parts::run(args)
}

/// Runs the suite: prints a table, and writes what the options ask for.
pub(crate) fn run_suite(args: &RunArgs) -> Result<ExitCode> {
    if !args.from.is_empty() {
        let outcomes = read(&output::read(&args.from)?);
        let mut output = args.output.open()?;
        output.lines(lines(&outcomes, "unknown"))?;
        return output.finish(&report(&outcomes, vec![KEPT.to_owned()]));
    }
    let mut output = args.output.open()?;
    let world = World::new(args.lib.as_deref(), args.seconds)?;
    let runs = args.runs.unwrap_or(if args.quick { 3 } else { 10 });
    let all = <Program as clap::ValueEnum>::value_variants();
    let chosen = all
        .iter()
        .filter(|one| args.program.is_empty() || args.program.contains(one));
    let load = Load::start(args.load.loops, args.load.loops_nice)?;
    let (mut left_out, mut outcomes) = (Vec::new(), Vec::new());
    let mut programs = Vec::new();
    for &program in chosen {
        match program.missing() {
            None => programs.push(program),
            Some(why) => {
                let line = format!("{} is left out: {why}", program.name());
                eprintln!("weft: notice: {line}");
                left_out.push(line);
            }
        }
    }
    let mut progress = Progress::new(programs.len() as u64 * u64::from(runs));
    for program in programs {
        let mut fail = |error: BenchError| {
            let name = program.name();
            output.failed(name, &error);
            left_out.push(format!("{name}: {error}"));
        };
        match program.cases(&world) {
            Ok(cases) => {
                let (done, errors) = measure(cases, runs, program.name(), &mut progress);
                outcomes.extend(done);
                errors.into_iter().for_each(fail);
            }
            Err(error) => fail(error),
        }
    }
    drop(progress);
    output.lines(lines(&outcomes, &load.text))?;
    let mut intro = vec![
        format!("{}; load before the run: {}.", machine(), load.text),
        format!(
            "{runs} runs of {} s of each program, after one that is not counted; the stacks take turns within each. Medians, and the smallest and the largest \
             run. A ratio is the median of the ratios of neighbouring runs.",
            args.seconds
        ),
    ];
    intro.extend(left_out);
    let exit = output.finish(&report(&outcomes, intro))?;
    Ok(if outcomes.is_empty() {
        ExitCode::FAILURE
    } else {
        exit
    })
}

/// Measures the cases of one program, run by run. A stack that fails twice in a row ends its case.
fn measure(
    cases: Vec<Case<'_>>,
    runs: u32,
    name: &str,
    progress: &mut Progress,
) -> (Vec<Outcome>, Vec<BenchError>) {
    let mut errors = Vec::new();
    let with_outcome = cases.into_iter().map(|Case { about, measure }| {
        let values = about.stacks.iter().map(|&stack| Values {
            stack,
            each: Vec::new(),
            over: 0,
        });
        let stacks = values.collect();
        (measure, Outcome { about, stacks })
    });
    let mut live: Vec<_> = with_outcome.collect();
    // Run 0 warms up and is not counted.
    for run in 0..=runs {
        live.retain_mut(|(measure, outcome)| {
            progress.at(&format!("{name}: {}", outcome.about.name));
            for at in 0..outcome.stacks.len() {
                // The order rotates, so that no stack always runs behind the same other one.
                let index = (at + run as usize) % outcome.stacks.len();
                let Some(of) = outcome.stacks.get_mut(index) else {
                    continue;
                };
                // A single disturbance does not cost a whole case.
                let done = measure(of.stack).or_else(|_| measure(of.stack));
                match done {
                    Ok(done) => {
                        of.over = done.over;
                        if run > 0 {
                            of.each.push(done.value);
                        }
                    }
                    Err(error) => {
                        let what = format!("{}, {}", outcome.about.name, of.stack.name());
                        errors.push(failed("measure", format!("{what}: {error}")));
                        return false;
                    }
                }
            }
            true
        });
        if run > 0 {
            progress.step();
        }
    }
    let outcomes = live.into_iter().map(|(_, outcome)| outcome);
    (outcomes.collect(), errors)
}

impl Outcome {
    fn of(&self, stack: Stack) -> Option<&Values> {
        self.stacks.iter().find(|values| values.stack == stack)
    }

    /// The two stacks of a goal.
    fn compare(&self, goal: &Goal) -> Option<Compared> {
        let (ours, beside) = (self.of(goal.stack)?, self.of(goal.beside)?);
        Some(Compared {
            ours: Summary::of(&ours.each)?,
            beside: Summary::of(&beside.each)?,
            ratio: paired_ratio(&ours.each, &beside.each),
        })
    }
}

/// The results of a goal's stack and of its reference, and the ratios of their runs.
struct Compared {
    ours: Summary,
    beside: Summary,
    ratio: Option<Summary>,
}

impl Compared {
    fn difference(&self) -> f64 {
        self.ours.median - self.beside.median
    }

    /// Whether the medians reach a goal; `None`: it has no target.
    fn reaches(&self, goal: &Goal) -> Option<bool> {
        let number = if goal.difference {
            self.difference()
        } else {
            self.ratio?.median
        };
        goal.limit.holds(number)
    }

    fn shown(&self, goal: &Goal, unit: &str) -> String {
        match &self.ratio {
            Some(ratio) if !goal.difference => spread(ratio),
            _ => format!("{:+.2} {unit}", self.difference()),
        }
    }
}

fn limit_text(goal: &Goal, unit: &str) -> String {
    if goal.difference {
        format!("{} {unit} more", goal.limit)
    } else {
        goal.limit.to_string()
    }
}

fn spread(summary: &Summary) -> String {
    format!(
        "{} ({} to {})",
        number(summary.median),
        number(summary.min),
        number(summary.max)
    )
}

fn lines(outcomes: &[Outcome], load: &str) -> Vec<Value> {
    let mut lines = Vec::new();
    for outcome in outcomes {
        for of in &outcome.stacks {
            let object = json!({
                "bench": "run", "case": outcome.about.name, "unit": outcome.about.unit, "stack": of.stack.name(), "values": of.each,
                "median": Summary::of(&of.each).map(|s| s.median), "went_over": of.over, "load": load,
            });
            lines.push(object);
        }
        for goal in outcome.about.goals {
            let Some(compared) = outcome.compare(goal) else {
                continue;
            };
            let object = json!({
                "bench": "run", "goal": goal.name, "stack": goal.stack.name(), "beside": goal.beside.name(), "ratio": compared.ratio,
                "bar": limit_text(goal, outcome.about.unit), "reached": compared.reaches(goal),
            });
            lines.push(object);
        }
    }
    lines
}

/// Reads the output of [`lines`].
fn read(lines: &[Value]) -> Vec<Outcome> {
    let values = |about: &About, stack: Stack| {
        let is = |line: &&Value| line["case"] == about.name && line["stack"] == stack.name();
        let line = lines.iter().rfind(is)?;
        Some(Values {
            stack,
            each: serde_json::from_value(line["values"].clone()).ok()?,
            over: line["went_over"].as_u64()? as u32,
        })
    };
    let outcomes = CASES.iter().map(|about| Outcome {
        about,
        stacks: about
            .stacks
            .iter()
            .filter_map(|stack| values(about, *stack))
            .collect(),
    });
    outcomes
        .filter(|outcome| !outcome.stacks.is_empty())
        .collect()
}

fn report(outcomes: &[Outcome], intro: Vec<String>) -> Report {
    let mut report = Report::new("weft bench run: unmodified programs beside plain TCP");
    report.intro = intro;
    let goals = outcomes.iter().flat_map(|outcome| {
        let goals = outcome.about.goals.iter();
        goals.filter_map(move |goal| Some((outcome, goal, outcome.compare(goal)?)))
    });
    let goals: Vec<_> = goals.collect();
    let table = Table::of(
        &goals,
        &[
            ("program", &|(_, goal, _)| goal.name.to_owned()),
            ("unit", &|(outcome, ..)| outcome.about.unit.to_owned()),
            ("beside", &|(_, goal, _)| goal.beside.name().to_owned()),
            ("", &|(.., compared)| spread(&compared.beside)),
            ("measured", &|(_, goal, _)| goal.stack.name().to_owned()),
            ("", &|(.., compared)| spread(&compared.ours)),
            ("ratio", &|(outcome, goal, compared)| {
                compared.shown(goal, outcome.about.unit)
            }),
            ("to reach", &|(outcome, goal, _)| {
                limit_text(goal, outcome.about.unit)
            }),
            ("", &|(_, goal, compared)| match compared.reaches(goal) {
                Some(true) => "reached".to_owned(),
                Some(false) => "not reached".to_owned(),
                None => String::new(),
            }),
            ("went over", &|(outcome, goal, _)| {
                let over = outcome.of(goal.stack).map_or(0, |values| values.over);
                let weft = goal.stack == Stack::Weft;
                if weft {
                    over.to_string()
                } else {
                    String::new()
                }
            }),
        ],
    );
    let ratios = goals.iter().filter(|(_, goal, _)| !goal.difference);
    let marks = ratios.filter_map(|(_, goal, compared)| {
        let reached = compared.reaches(goal) == Some(true);
        Some(mark(goal, &compared.ratio?, reached))
    });
    let marks = marks.collect();
    let mut section = Section::new("Programs").table(table);
    section = section.text(
        "The last column counts the client's connections that went over to shared memory in the last run. A one-way time is better when it is smaller, everything \
         else when it is larger.",
    );
    let bars = Bars::new("times as good as the stack beside it", marks);
    let opening = Section::new("What programs gain under weft run, and where they do not")
        .text(bars.words())
        .text(
            "Right of 1 a program is better than the stack beside it, left of 1 it is worse; of times and CPU the ratio is turned round. The thick stroke is what is to be reached: \
             blue reaches it, red does not, orange has nothing to reach. The thin line goes from the least to the most of the runs.",
        )
        .bars(bars);
    report.sections.push(opening);
    report.sections.push(section);
    report
}

/// A goal's bar. The ratio of a cost is turned round, so that every bar is better to the right.
fn mark(goal: &Goal, ratio: &Summary, reached: bool) -> Mark {
    let small = matches!(goal.limit, Limit::AtMost(_) | Limit::Below(_));
    let better = |ratio: f64| if small { 1.0 / ratio } else { ratio };
    let (one, other) = (better(ratio.min), better(ratio.max));
    Mark {
        label: goal.name.to_owned(),
        ratio: better(ratio.median),
        spread: (one.min(other), one.max(other)),
        aim: goal.limit.bound().map(better),
        reached,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(plain: &[f64], weft: &[f64], limit: Limit, difference: bool) -> Outcome {
        let values = |stack, values: &[f64]| Values {
            stack,
            each: values.to_vec(),
            over: 1,
        };
        let goal = Goal {
            name: "goal",
            stack: Stack::Weft,
            beside: Stack::Plain,
            limit,
            difference,
        };
        let about = About {
            name: "case",
            unit: "unit",
            stacks: &[Stack::Plain, Stack::Weft],
            goals: Vec::leak(vec![goal]),
        };
        Outcome {
            about: Box::leak(Box::new(about)),
            stacks: vec![values(Stack::Plain, plain), values(Stack::Weft, weft)],
        }
    }

    fn reached(outcome: &Outcome) -> Option<bool> {
        let goal = &outcome.about.goals[0];
        outcome.compare(goal).unwrap().reaches(goal)
    }

    #[test]
    fn goals_are_reached_by_the_median_of_neighbours() {
        // The last pair ran on a slower machine.
        let (plain, weft) = ([10.0, 10.0, 1.0], [25.0, 30.0, 3.0]);
        assert_eq!(
            reached(&outcome(&plain, &weft, Limit::AtLeast(2.5), false)),
            Some(true)
        );
        assert_eq!(
            reached(&outcome(&plain, &weft, Limit::AtLeast(3.1), false)),
            Some(false)
        );
        assert_eq!(
            reached(&outcome(&weft, &plain, Limit::AtMost(0.5), false)),
            Some(true)
        );
        assert_eq!(reached(&outcome(&plain, &weft, Limit::None, false)), None);
    }

    #[test]
    fn an_idle_machine_has_no_ratio() {
        let outcome = outcome(&[0.0, 0.0], &[0.1, 0.2], Limit::AtMost(0.5), true);
        assert_eq!(reached(&outcome), Some(true));
        let report = report(&[outcome], vec!["x is left out".to_owned()]);
        let text = report.to_text(None);
        assert!(
            text.contains("+0.15 unit") && text.contains("x is left out"),
            "{text}"
        );
    }

    #[test]
    fn a_page_has_the_picture_and_each_line_is_an_object() {
        let outcomes = [outcome(&[1.0], &[2.0], Limit::AtLeast(1.5), false)];
        let page = report(&outcomes, Vec::new()).to_html();
        assert!(page.contains("<rect") && page.contains("reached"), "{page}");
        for line in lines(&outcomes, "0") {
            assert_eq!(line["bench"], "run");
        }
    }
    #[test]
    fn what_was_written_is_read_again() {
        let mut outcome = outcome(&[1.0], &[2.0], Limit::None, false);
        outcome.about = &CASES[0];
        let written = lines(&[outcome], "0");
        assert_eq!(lines(&read(&written), "0"), written);
    }
}
