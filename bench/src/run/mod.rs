//! `weft bench run`: programs from Debian under `weft run`, beside themselves on plain TCP in the same run.
//!
//! Each case has its servers running side by side, one for each stack; clients take turns, so that a disturbance of the machine meets all stacks.
//! A ratio is that of two neighbouring runs.

mod parts;
mod programs;
pub(crate) mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;

pub use parts::PartArgs;
pub use programs::Program;

use crate::aims::Limit;
use crate::error::{BenchError, Result};
use crate::output::OutputArgs;
use crate::progress::Progress;
use crate::report::{Bars, Mark, Report, Section, Table, machine, number};
use crate::stats::{Summary, paired_ratio};
use crate::usage;
use programs::{Case, Goal};
use world::{Stack, World};

const EXAMPLES: &str = "\
Examples:
  # every program that is installed, in about ten minutes
  weft bench run --html run.html
  # three short runs of each
  weft bench run --quick
  # two of them
  weft bench run --program redis,nginx

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
    /// The folder of the preload library [default: as `weft run` finds it]
    #[arg(long, value_name = "DIR", env = "WEFT_RUN_LIB")]
    pub lib: Option<PathBuf>,
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

/// What a case came to.
struct Outcome {
    name: &'static str,
    unit: &'static str,
    goals: Vec<Goal>,
    stacks: Vec<Values>,
}

/// A peer of our own.
pub(crate) fn part(args: &PartArgs) -> Result<()> {
    parts::run(args)
}

/// Runs the suite: prints a table, and writes what the options ask for.
pub(crate) fn run_suite(args: &RunArgs) -> Result<ExitCode> {
    let mut output = args.output.open()?;
    let world = World::new(args.lib.as_deref(), args.seconds)?;
    let runs = args.runs.unwrap_or(if args.quick { 3 } else { 10 });
    let all = <Program as clap::ValueEnum>::value_variants();
    let chosen = all
        .iter()
        .filter(|one| args.program.is_empty() || args.program.contains(one));
    let load = usage::load_average();
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
            output.failed(&name, &error);
            left_out.push(format!("{name}: {error}"));
        };
        match program.cases(&world) {
            Ok(cases) => {
                let (done, errors) = measure(cases, runs, &program.name(), &mut progress);
                outcomes.extend(done);
                errors.into_iter().for_each(fail);
            }
            Err(error) => fail(error),
        }
    }
    drop(progress);
    output.lines(lines(&outcomes, &load))?;
    let exit = output.finish(&report(&outcomes, &left_out, runs, args.seconds, &load))?;
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
    let (mut outcomes, mut errors) = (Vec::new(), Vec::new());
    let mut live: Vec<(Case<'_>, Outcome)> = Vec::new();
    for mut case in cases {
        let values = case.stacks.iter().map(|&stack| Values {
            stack,
            each: Vec::new(),
            over: 0,
        });
        let outcome = Outcome {
            name: case.name,
            unit: case.unit,
            stacks: values.collect(),
            goals: std::mem::take(&mut case.goals),
        };
        live.push((case, outcome));
    }
    // Run 0 warms up and is not counted.
    for run in 0..=runs {
        live.retain_mut(|(case, outcome)| {
            progress.at(&format!("{name}: {}", case.name));
            for at in 0..outcome.stacks.len() {
                // No stack always has the turn behind another.
                let index = (at + run as usize) % outcome.stacks.len();
                let Some(of) = outcome.stacks.get_mut(index) else {
                    continue;
                };
                // A single disturbance does not cost a whole case.
                let done = (case.measure)(of.stack).or_else(|_| (case.measure)(of.stack));
                match done {
                    Ok(done) => {
                        of.over = done.over;
                        if run > 0 {
                            of.each.push(done.value);
                        }
                    }
                    Err(error) => {
                        let what = format!("{}, {}", case.name, of.stack.name());
                        errors.push(world::failed("measure", format!("{what}: {error}")));
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
    outcomes.extend(live.into_iter().map(|(_, outcome)| outcome));
    (outcomes, errors)
}

impl Outcome {
    fn of(&self, stack: Stack) -> Option<&Values> {
        self.stacks.iter().find(|values| values.stack == stack)
    }

    /// The two summaries and the ratio of a goal.
    fn compare(&self, goal: &Goal) -> Option<(Summary, Summary, Option<Summary>)> {
        let (ours, beside) = (self.of(goal.stack)?, self.of(goal.beside)?);
        let ratio = paired_ratio(&ours.each, &beside.each);
        Some((Summary::of(&ours.each)?, Summary::of(&beside.each)?, ratio))
    }
}

/// Whether a goal is reached, by its medians; `None`: there is nothing to reach.
fn is_reached(
    goal: &Goal,
    ours: &Summary,
    beside: &Summary,
    ratio: Option<&Summary>,
) -> Option<bool> {
    let number = if goal.difference {
        ours.median - beside.median
    } else {
        ratio?.median
    };
    goal.limit.holds(number)
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

fn lines(outcomes: &[Outcome], load: &str) -> Vec<serde_json::Value> {
    let mut lines = Vec::new();
    for outcome in outcomes {
        for of in &outcome.stacks {
            let object = serde_json::json!({
                "bench": "run", "case": outcome.name, "unit": outcome.unit, "stack": of.stack.name(), "values": of.each,
                "median": Summary::of(&of.each).map(|s| s.median), "went_over": of.over, "load": load,
            });
            lines.push(object);
        }
        for goal in &outcome.goals {
            let Some((ours, beside, ratio)) = outcome.compare(goal) else {
                continue;
            };
            let object = serde_json::json!({
                "bench": "run", "goal": goal.name, "stack": goal.stack.name(), "beside": goal.beside.name(), "ratio": ratio,
                "bar": limit_text(goal, outcome.unit), "reached": is_reached(goal, &ours, &beside, ratio.as_ref()),
            });
            lines.push(object);
        }
    }
    lines
}

fn report(
    outcomes: &[Outcome],
    left_out: &[String],
    runs: u32,
    seconds: u32,
    load: &str,
) -> Report {
    let mut report = Report::new("weft bench run: unmodified programs beside plain TCP");
    report.intro = vec![
        format!("{}; load before the run: {load}.", machine()),
        format!(
            "{runs} runs of {seconds} s of each program, after one that is not counted; the stacks take turns within each. Medians, and the smallest and the largest \
             run. A ratio is the median of the ratios of neighbouring runs."
        ),
    ];
    report.intro.extend(left_out.iter().cloned());
    let mut table = Table::new(&[
        "program",
        "unit",
        "beside",
        "",
        "measured",
        "",
        "ratio",
        "to reach",
        "",
        "went over",
    ]);
    let mut marks = Vec::new();
    for outcome in outcomes {
        for goal in &outcome.goals {
            let Some((ours, beside, ratio)) = outcome.compare(goal) else {
                continue;
            };
            let reached = is_reached(goal, &ours, &beside, ratio.as_ref());
            let shown = match &ratio {
                Some(ratio) if !goal.difference => spread(ratio),
                _ => format!("{:+.2} {}", ours.median - beside.median, outcome.unit),
            };
            let over = outcome.of(goal.stack).map_or(0, |values| values.over);
            table.push([
                goal.name.to_owned(),
                outcome.unit.to_owned(),
                goal.beside.name().to_owned(),
                spread(&beside),
                goal.stack.name().to_owned(),
                spread(&ours),
                shown,
                limit_text(goal, outcome.unit),
                match reached {
                    Some(true) => "reached".to_owned(),
                    Some(false) => "not reached".to_owned(),
                    None => String::new(),
                },
                if goal.stack == Stack::Weft {
                    over.to_string()
                } else {
                    String::new()
                },
            ]);
            if let Some(ratio) = ratio.filter(|_| !goal.difference) {
                marks.push(mark(goal, &ratio, reached == Some(true)));
            }
        }
    }
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

    fn outcome(plain: &[f64], weft: &[f64], limit: Limit) -> Outcome {
        let values = |stack, values: &[f64]| Values {
            stack,
            each: values.to_vec(),
            over: 1,
        };
        Outcome {
            name: "case",
            unit: "unit",
            goals: vec![Goal {
                name: "goal",
                stack: Stack::Weft,
                beside: Stack::Plain,
                limit,
                difference: false,
            }],
            stacks: vec![values(Stack::Plain, plain), values(Stack::Weft, weft)],
        }
    }

    fn reached(outcome: &Outcome) -> Option<bool> {
        let goal = &outcome.goals[0];
        let (ours, beside, ratio) = outcome.compare(goal).unwrap();
        is_reached(goal, &ours, &beside, ratio.as_ref())
    }

    #[test]
    fn goals_are_reached_by_the_median_of_neighbours() {
        // The last pair ran on a slower machine.
        let (plain, weft) = ([10.0, 10.0, 1.0], [25.0, 30.0, 3.0]);
        assert_eq!(
            reached(&outcome(&plain, &weft, Limit::AtLeast(2.5))),
            Some(true)
        );
        assert_eq!(
            reached(&outcome(&plain, &weft, Limit::AtLeast(3.1))),
            Some(false)
        );
        assert_eq!(
            reached(&outcome(&weft, &plain, Limit::AtMost(0.5))),
            Some(true)
        );
        assert_eq!(reached(&outcome(&plain, &weft, Limit::None)), None);
    }

    #[test]
    fn an_idle_machine_has_no_ratio() {
        let mut outcome = outcome(&[0.0, 0.0], &[0.1, 0.2], Limit::AtMost(0.5));
        outcome.goals[0].difference = true;
        assert_eq!(reached(&outcome), Some(true));
        let report = report(&[outcome], &["x is left out".to_owned()], 2, 1, "0.5");
        let text = report.to_text(None);
        assert!(
            text.contains("+0.15 unit") && text.contains("x is left out"),
            "{text}"
        );
    }

    #[test]
    fn a_page_has_the_picture_and_each_line_is_an_object() {
        let outcomes = [outcome(&[1.0], &[2.0], Limit::AtLeast(1.5))];
        let page = report(&outcomes, &[], 1, 1, "0").to_html();
        assert!(page.contains("<rect") && page.contains("reached"), "{page}");
        for line in lines(&outcomes, "0") {
            assert_eq!(line["bench"], "run");
        }
    }
}
