//! `weft cc summary`: the daemon's records of the last build, as text and as a picture.

use std::collections::BTreeMap;
use std::fmt::Write;

use comfy_table::{ColumnConstraint, ContentArrangement, Table, presets};
use weft_cc::ipc::{Answer, Ask, Line, Past};

use weft_cli::args::cc::SummaryArgs;
use weft_cli::failure::{Exit, Failure, write_file};
use weft_cli::{say, terminal};

/// Seconds without a compilation that separate two builds.
const PAUSE: f64 = 30.0;
/// The number of slowest sources that are listed.
const LONGEST: usize = 10;
/// Dimensions of the picture.
const WIDTH: f64 = 1100.0;
const LEFT: f64 = 190.0;
const LANE: f64 = 15.0;

/// The daemon's records.
fn fetch(line: &Line) -> Result<Vec<Past>, Failure> {
    let gone =
        |e: &dyn std::fmt::Display| Failure::peer(format!("the daemon does not answer: {e}"));
    let mut all = Vec::new();
    let mut next = 0;
    loop {
        match line.ask(&Ask::Past(next), &[]).map_err(|e| gone(&e))?.0 {
            Answer::Past { past, .. } if past.is_empty() => return Ok(all),
            Answer::Past { from, past } => {
                next = from.saturating_add(past.len() as u64);
                all.extend(past);
            }
            _ => return Err(gone(&"something else came")),
        }
    }
}

/// The time of a compilation's first event.
fn first(past: &Past) -> f64 {
    past.preprocessed.map_or(past.asked, |(began, _)| began)
}

/// The compilations after the last pause.
fn last_build(mut all: Vec<Past>) -> Vec<Past> {
    all.sort_by(|a, b| first(a).total_cmp(&first(b)));
    let mut begin = 0;
    let mut end = f64::NEG_INFINITY;
    for (index, past) in all.iter().enumerate() {
        if first(past) > end + PAUSE {
            begin = index;
        }
        end = end.max(past.ended);
    }
    all.split_off(begin)
}

fn who(past: &Past) -> String {
    past.worker
        .as_ref()
        .map_or_else(|| "here".into(), ToString::to_string)
}

/// The totals of one worker, or of this machine.
#[derive(Default)]
struct Sum {
    count: usize,
    compiling: f64,
    /// Time of its jobs apart from the compiler: source, outputs, messages.
    beside: f64,
    waited: f64,
    bytes: (u64, u64),
}

fn sums(build: &[Past]) -> BTreeMap<String, Sum> {
    let mut all: BTreeMap<String, Sum> = BTreeMap::new();
    for past in build {
        let sum = all.entry(who(past)).or_default();
        let took = past.ended - past.began;
        let compiled = if past.worker.is_some() {
            past.worker_times.1.min(took)
        } else {
            took
        };
        sum.count += 1;
        sum.compiling += compiled;
        sum.beside += took - compiled;
        sum.waited += past.began - past.asked;
        sum.bytes.0 += past.bytes.0;
        sum.bytes.1 += past.bytes.1;
    }
    all
}

/// Runs the command.
pub(crate) fn run(args: &SummaryArgs, line: &Line) -> Result<Exit, Failure> {
    let mut build = fetch(line)?;
    if !args.all {
        build = last_build(build);
    }
    if args.json {
        for past in &build {
            let text = serde_json::to_string(past);
            say(text.map_err(|e| Failure::failed(e.to_string()))?);
        }
    } else if build.is_empty() {
        say("nothing was compiled since the daemon was started");
    } else {
        show(&build);
    }
    if let Some(path) = &args.html {
        write_file(path, &page(&build))?;
    }
    Ok(Exit::Ok)
}

fn span(build: &[Past]) -> (f64, f64) {
    let begin = build.iter().map(first).fold(f64::INFINITY, f64::min);
    let end = build.iter().map(|past| past.ended).fold(0.0, f64::max);
    (begin, end.max(begin))
}

fn show(build: &[Past]) {
    let (begin, end) = span(build);
    let preprocessed: f64 = build
        .iter()
        .filter_map(|past| past.preprocessed)
        .map(|(from, to)| to - from)
        .sum();
    say(format_args!(
        "{} compilations in {:.1} s; preprocessors ran here for {preprocessed:.1} s",
        build.len(),
        end - begin
    ));
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    if let Some(width) = terminal::width() {
        table
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(width);
    }
    table.set_header([
        "where",
        "objects",
        "compiling",
        "at once",
        "transfers, messages",
        "waited before",
        "read",
        "written",
    ]);
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / 1_048_576.0);
    for (name, sum) in sums(build) {
        table.add_row([
            name,
            sum.count.to_string(),
            format!("{:.1} s", sum.compiling),
            format!("{:.1}", sum.compiling / (end - begin).max(1e-9)),
            format!("{:.2} s", sum.beside),
            format!("{:.1} s", sum.waited),
            mib(sum.bytes.0),
            mib(sum.bytes.1),
        ]);
    }
    if let Some(names) = table.column_mut(0) {
        names.set_constraint(ColumnConstraint::ContentWidth);
    }
    say(table);
    say("longest:");
    let mut longest: Vec<&Past> = build.iter().collect();
    longest.sort_by(|a, b| (b.ended - b.began).total_cmp(&(a.ended - a.began)));
    for past in longest.into_iter().take(LONGEST) {
        let took = past.ended - past.began;
        let name = if past.source.is_empty() {
            &past.reason
        } else {
            &past.source
        };
        say(format_args!("{took:7.2} s  {}  {name}", who(past)));
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

/// Assigns a lane to each interval, so that overlapping ones are in different lanes; returns the lanes and their number.
fn lanes(intervals: &[(f64, f64)]) -> (Vec<usize>, usize) {
    let mut free: Vec<f64> = Vec::new();
    let numbers = intervals.iter().map(|&(begin, end)| {
        let lane = free.iter().position(|&until| until <= begin);
        let lane = lane.unwrap_or_else(|| {
            free.push(0.0);
            free.len() - 1
        });
        free[lane] = end;
        lane
    });
    let numbers = numbers.collect();
    (numbers, free.len())
}

/// One bar: start, end, class, label.
type Bar = (f64, f64, &'static str, String);

/// The bars of one compilation on its worker: transfer of the source, compiler, transfer of the outputs.
fn on_worker(past: &Past) -> Vec<Bar> {
    let name = format!(
        "{}: {:.2} s on {}, compiler {:.2} s, waited {:.2} s, {} bytes read, {} written",
        past.source,
        past.ended - past.began,
        who(past),
        past.worker_times.1,
        past.began - past.asked,
        past.bytes.0,
        past.bytes.1
    );
    let compiles = (past.began + past.worker_times.0).min(past.ended);
    let compiled = (compiles + past.worker_times.1).min(past.ended);
    vec![
        (past.began, compiles, "move", name.clone()),
        (compiles, compiled, "compile", name.clone()),
        (compiled, past.ended, "move", name),
    ]
}

/// Groups of compilations with a title: waiting and preprocessing here, compiling here, each worker.
fn groups(build: &[Past]) -> Vec<(String, Vec<Vec<Bar>>)> {
    let mut preprocessed = Vec::new();
    let mut waiting = Vec::new();
    let mut workers: BTreeMap<String, Vec<Vec<Bar>>> = BTreeMap::new();
    let mut here = Vec::new();
    for past in build {
        if let Some((from, to)) = past.preprocessed {
            let name = format!("{}: preprocessed here, {:.3} s", past.source, to - from);
            preprocessed.push(vec![(from, to, "preprocess", name)]);
        }
        let waited = past.began - past.asked;
        if waited > 0.01 {
            let name = format!("{}: waited {waited:.2} s", past.source);
            waiting.push(vec![(past.asked, past.began, "wait", name)]);
        }
        if past.worker.is_some() {
            workers.entry(who(past)).or_default().push(on_worker(past));
        } else {
            let name = format!("{} here: {}", past.source, past.reason);
            here.push(vec![(past.began, past.ended, "here", name)]);
        }
    }
    let mut all = vec![
        ("preprocessed here".to_owned(), preprocessed),
        ("waiting for a worker".to_owned(), waiting),
    ];
    all.extend(workers);
    all.push(("compiled here".to_owned(), here));
    all.retain(|group| !group.1.is_empty());
    all
}

/// The picture: time from left to right, a lane for each simultaneous activity.
fn picture(build: &[Past]) -> String {
    let (begin, end) = span(build);
    let x = |at: f64| LEFT + (at - begin) / (end - begin).max(1e-9) * (WIDTH - LEFT - 10.0);
    let mut body = String::new();
    let mut top = 20.0;
    for (title, mut group) in groups(build) {
        group.sort_by(|a, b| a[0].0.total_cmp(&b[0].0));
        let intervals: Vec<_> = group
            .iter()
            .map(|bars| (bars[0].0, bars[bars.len() - 1].1))
            .collect();
        let (numbers, count) = lanes(&intervals);
        let _ = writeln!(
            body,
            "<text x=\"0\" y=\"{:.0}\">{}</text><path class=\"line\" d=\"M0 {:.0}H{WIDTH}\"/>",
            top + LANE - 3.0,
            escape(&title),
            top - 3.0
        );
        for (bars, lane) in group.iter().zip(numbers) {
            let y = top + lane as f64 * LANE;
            for (from, to, class, name) in bars {
                // Bars that are too small to see are left out.
                let width = x(*to) - x(*from);
                if width < 0.05 {
                    continue;
                }
                let _ = writeln!(
                    body,
                    "<rect class=\"{class}\" x=\"{:.1}\" y=\"{y:.0}\" width=\"{width:.1}\" height=\"{:.0}\"><title>{}</title></rect>",
                    x(*from),
                    LANE - 2.0,
                    escape(name)
                );
            }
        }
        top += count as f64 * LANE + 8.0;
    }
    for tick in 0..=10 {
        let seconds = (end - begin) * f64::from(tick) / 10.0;
        let _ = writeln!(
            body,
            "<text class=\"tick\" x=\"{:.0}\" y=\"12\">{seconds:.1} s</text>",
            x(begin + seconds)
        );
    }
    format!(
        "<svg role=\"img\" aria-label=\"who compiled what, when\" viewBox=\"0 0 {WIDTH} {top:.0}\" xmlns=\"http://www.w3.org/2000/svg\">\n{body}</svg>\n"
    )
}

/// The page: without scripts and without references to other sites.
fn page(build: &[Past]) -> String {
    let (begin, end) = if build.is_empty() {
        (0.0, 0.0)
    } else {
        span(build)
    };
    let mut rows = String::new();
    for (name, sum) in sums(build) {
        let _ = writeln!(
            rows,
            "<tr><td>{}</td><td>{}</td><td>{:.1} s</td><td>{:.1}</td><td>{:.2} s</td><td>{:.1} s</td></tr>",
            escape(&name),
            sum.count,
            sum.compiling,
            sum.compiling / (end - begin).max(1e-9),
            sum.beside,
            sum.waited
        );
    }
    let drawn = if build.is_empty() {
        String::new()
    } else {
        picture(build)
    };
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>weft cc summary</title><style>\
         :root{{color-scheme:light dark}}body{{font:15px/1.5 system-ui,sans-serif;margin:2rem;background:Canvas;color:CanvasText}}\
         td,th{{padding:.2rem .8rem;text-align:right}}td:first-child,th:first-child{{text-align:left}}svg{{width:100%;height:auto;margin-top:1rem}}\
         svg text{{font:10px system-ui,sans-serif;fill:currentColor}}.tick{{text-anchor:middle}}.line{{stroke:#8885;fill:none}}\
         .compile{{fill:#2f7ed8}}.move{{fill:#9b59b6}}.preprocess{{fill:#16a085}}.wait{{fill:#bbb}}.here{{fill:#e67e22}}</style></head><body>\n\
         <h1>{} compilations in {:.1} s</h1>\n<p>Blue: a worker's compiler. Violet: source and outputs on their way. Green: the preprocessor here. Grey: waiting. Orange: compiled here.</p>\n\
         <table><tr><th>where</th><th>objects</th><th>compiling</th><th>at once</th><th>transfers, messages</th><th>waited before</th></tr>\n{rows}</table>\n{drawn}</body></html>\n",
        build.len(),
        end - begin
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use weft_cc::Endpoint;

    fn past(source: &str, at: f64, worker: bool) -> Past {
        Past {
            source: source.into(),
            worker: worker.then(|| Endpoint::parse("[::1]:9", 1).unwrap()),
            preprocessed: worker.then_some((at, at + 0.1)),
            asked: at + 0.1,
            began: at + 0.2,
            ended: at + 1.2,
            worker_times: (0.1, 0.8),
            bytes: (10, 20),
            reason: if worker { "" } else { "<linking>" }.into(),
        }
    }

    #[test]
    fn a_build_ends_with_a_pause() {
        let all = vec![past("b.c", 50.0, true), past("a.c", 1.0, true)];
        let build = last_build(all);
        assert_eq!(build.len(), 1);
        assert_eq!(build[0].source, "b.c");
        assert!(last_build(Vec::new()).is_empty());
    }

    #[test]
    fn what_overlaps_has_lanes_of_its_own() {
        assert_eq!(
            lanes(&[(0.0, 2.0), (1.0, 3.0), (2.0, 4.0)]),
            (vec![0, 1, 0], 2)
        );
    }

    #[test]
    fn a_page_has_every_compilation_and_no_markup_of_theirs() {
        let build = [past("a<b>.c", 0.0, true), past("", 0.5, false)];
        let page = page(&build);
        assert!(page.contains("a&lt;b&gt;.c") && !page.contains("a<b>"));
        assert!(page.contains("&lt;linking&gt;") && page.contains("[::1]:9"));
        for class in ["compile", "move", "preprocess", "wait", "here"] {
            assert!(
                page.contains(&format!("<rect class=\"{class}\"")),
                "{class}"
            );
        }
        assert!(!page.contains("<script") && super::page(&[]).contains("0 compilations"));
        let sum = &sums(&build)["[::1]:9"];
        assert!((sum.compiling - 0.8).abs() < 1e-9 && (sum.beside - 0.2).abs() < 1e-9);
    }
}
