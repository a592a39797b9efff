//! pyverbs: rdma-core's own tests of the verbs, from Python, on both devices, and on `weft_ib0` with RoCE on the wire.
//!
//! `docs/verbs-reference.md` has the table of passing tests, and the list of tests that may fail, with the reasons. This test fails when an unlisted test fails, when a
//! listed test passes, and when fewer tests pass than the table says. `WEFT_BLESS=1` writes the table anew.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use weft_dropin::{Weft, have, say};

const PYTHON: &str = "/usr/bin/python3";
const TESTS: &str = "/usr/share/doc/rdma-core/tests";
const NEEDED: &[(&str, &str)] = &[
    (
        "/usr/lib/python3/dist-packages/pyverbs/__init__.py",
        "python3-pyverbs",
    ),
    ("/usr/share/doc/rdma-core/tests/base.py.gz", "rdma-core"),
    ("gzip", "gzip"),
];
/// Tests of one vendor's hardware or of a GPU.
const OTHERS: [&str; 3] = ["test_mlx5", "test_efa", "test_cuda"];
/// The columns of the table: a name, and the device.
const COLUMNS: [(&str, &str); 3] = [
    ("weft0", "weft0"),
    ("weft_ib0", "weft_ib0"),
    (ROCE, "weft_ib0"),
];
const ROCE: &str = "RoCE";
/// RoCE's UDP port is one of the whole host: these tests have a host of their own.
const ALONE: [&str; 5] = [
    "unshare",
    "-rn",
    "sh",
    "-c",
    "ip link set lo up && exec \"$0\" \"$@\"",
];
/// With RoCE its two processes would need one UDP port.
const TWO_PROCESSES: &str = "test_rdmacm.py";
const BEGIN: &str = "<!-- pyverbs: begin -->\n";
const END: &str = "<!-- pyverbs: end -->";
/// The time limit for all tests of one file.
const LIMIT: Duration = Duration::from_mins(1);

fn document() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/verbs-reference.md")
}

/// The tests, unpacked.
fn unpack(to: &Path) -> Vec<String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(TESTS).unwrap() {
        let from = entry.unwrap().path();
        let name = from.file_name().unwrap().to_str().unwrap();
        let data = if from.extension().is_some_and(|e| e == "gz") {
            let output = Command::new("gzip").arg("-dc").arg(&from).output().unwrap();
            assert!(output.status.success(), "{name}");
            output.stdout
        } else if from.is_file() {
            fs::read(&from).unwrap()
        } else {
            continue;
        };
        let name = name.trim_end_matches(".gz");
        fs::write(to.join(name), data).unwrap();
        if name.starts_with("test_") && !OTHERS.iter().any(|other| name.starts_with(other)) {
            files.push(name.to_owned());
        }
    }
    files.sort();
    files
}

/// The results of one file's tests: (`ok`, `fail` or `skip`; the reason) of each.
type Results = BTreeMap<String, (String, String)>;

fn run(weft: &Weft, before: &[&str], folder: &Path, device: &str, file: &str) -> Results {
    let driver = concat!(env!("CARGO_MANIFEST_DIR"), "/pyverbs/run.py");
    let folder = folder.display().to_string();
    let mut results = Results::new();
    loop {
        let mut words = before.to_vec();
        words.extend([PYTHON, driver, &folder, device, "0", file]);
        let done_before: Vec<String> = results.keys().cloned().collect();
        words.extend(done_before.iter().map(String::as_str));
        let done = weft.start_words(&words).end();
        let mut running = None;
        for line in done.text.lines().filter_map(|l| l.strip_prefix("@@ ")) {
            let mut parts = line.splitn(3, ' ');
            let (what, id) = (parts.next().unwrap(), parts.next().unwrap_or_default());
            let reason = parts.next().unwrap_or_default().to_owned();
            match what {
                "end" => return results,
                "begin" => running = Some(id.to_owned()),
                _ => {
                    results.insert(id.to_owned(), (what.to_owned(), reason));
                }
            }
        }
        // The process died in a test. The other tests still have to run.
        let Some(test) = running.filter(|id| !done_before.contains(id)) else {
            panic!("pyverbs' {file} does not run: {}", done.show());
        };
        say(&format!(
            "pyverbs on {device}: {test} ended the process\n{}",
            done.show()
        ));
        results.insert(
            test,
            (
                "fail".into(),
                format!("the process ended with {}", done.code()),
            ),
        );
    }
}

/// The allowed failures: a device, and a test or a part of its error message.
struct Allowed(Vec<(String, String)>);

impl Allowed {
    /// The list in the document: rows that begin with a cell in code quotes.
    fn read(text: &str) -> Self {
        let rows = text.lines().filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split('|').map(str::trim);
            let what = cells.next()?.strip_suffix('`')?;
            Some((cells.next()?, what))
        });
        let each = rows.flat_map(|(devices, what)| {
            let devices = devices.split(", ");
            devices.map(move |device| (device.to_owned(), what.to_owned()))
        });
        Self(each.collect())
    }

    fn names(&self, device: &str, test: &str) -> bool {
        self.0.iter().any(|(d, what)| d == device && what == test)
    }

    fn covers(&self, device: &str, test: &str, reason: &str) -> bool {
        self.names(device, test)
            || self.0.iter().any(|(d, what)| {
                d == device && !what.starts_with("tests.") && reason.contains(what)
            })
    }
}

#[test]
fn pyverbs() {
    if !have(NEEDED) {
        return;
    }
    let alone = Weft::bare().start_words(&[&ALONE[..], &["true"]].concat());
    if !alone.end().is_good() {
        return say("skipped: no network namespace may be made here");
    }
    let document = document();
    let text = fs::read_to_string(&document).unwrap();
    let (head, rest) = text.split_once(BEGIN).expect("a table");
    let (old, tail) = rest.split_once(END).expect("its end");
    let allowed = Allowed::read(tail);
    let folder = tempfile::tempdir().unwrap();
    let files = unpack(folder.path());
    let mut table = "| file |".to_owned();
    for (column, _) in COLUMNS {
        let _ = write!(table, " {column}: pass | fail | skip |");
    }
    let _ = writeln!(table, "\n|---|{}", "---|".repeat(3 * COLUMNS.len()));
    let mut sums = [0; 3 * COLUMNS.len()];
    let mut problems = String::new();
    let mut reasons: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for file in &files {
        let mut counts = [0; 3 * COLUMNS.len()];
        for (at, (column, device)) in COLUMNS.into_iter().enumerate() {
            let mut weft = Weft::on(device).limit(LIMIT);
            let mut before: &[&str] = &[];
            if column == ROCE {
                if file == TWO_PROCESSES {
                    continue;
                }
                weft = weft.env("WEFT_IB_WIRE", "roce");
                before = &ALONE;
            }
            for (test, (what, reason)) in run(&weft, before, folder.path(), device, file) {
                let place = ["ok", "fail", "skip"].iter().position(|w| *w == what);
                counts[at * 3 + place.unwrap()] += 1;
                match what.as_str() {
                    "fail" if !allowed.covers(column, &test, &reason) => {
                        let _ = writeln!(problems, "{column}: {test} fails: {reason}");
                    }
                    "ok" if allowed.names(column, &test) => {
                        let _ = writeln!(
                            problems,
                            "{column}: {test} passes, and docs/verbs-reference.md lists it as failing"
                        );
                    }
                    "skip" => *reasons.entry((column, reason)).or_default() += 1,
                    _ => {}
                }
            }
        }
        let row = |name: &str, counts: [usize; 3 * COLUMNS.len()]| {
            format!(
                "| {name} | {} |\n",
                counts.map(|n| n.to_string()).join(" | ")
            )
        };
        let name = file.trim_end_matches(".py");
        let now = row(name, counts);
        let then: Vec<usize> = old
            .lines()
            .find(|line| line.starts_with(&format!("| {name} |")))
            .map(|line| {
                line.split('|')
                    .filter_map(|n| n.trim().parse().ok())
                    .collect()
            })
            .unwrap_or_default();
        let fewer = |at: usize| counts[3 * at] < then[3 * at];
        if then.len() == counts.len() && (0..COLUMNS.len()).any(fewer) {
            let _ = writeln!(
                problems,
                "fewer tests pass than docs/verbs-reference.md says: {now}"
            );
        }
        table += &now;
        sums.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
        if file == files.last().unwrap() {
            table += &row("**all**", sums);
        }
    }
    say(&format!("pyverbs\n{table}"));
    for ((column, reason), count) in &reasons {
        say(&format!("pyverbs on {column}: {count} skipped: {reason}"));
    }
    if std::env::var_os("WEFT_BLESS").is_some() {
        fs::write(&document, format!("{head}{BEGIN}{table}{END}{tail}")).unwrap();
    }
    assert!(problems.is_empty(), "{problems}");
}
