//! `weft run --service`: the drop-in of a systemd unit, and whether its connections use rings.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use weft_run::ledger::{self, Ledger};
use weft_run::preload::without_ours;
use weft_run::sandbox::Unit;

use weft_cli::failure::Failure;

/// The name of the drop-in.
const FILE: &str = "weft-run.conf";
/// Where units are if `systemctl` does not tell.
const PLACES: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Kinds of units that are no services.
const OTHERS: [&str; 10] = [
    "automount",
    "device",
    "mount",
    "path",
    "scope",
    "slice",
    "socket",
    "swap",
    "target",
    "timer",
];

/// A unit, and the folder with its drop-ins.
pub(super) struct Service<'a> {
    name: String,
    units: &'a Path,
}

impl<'a> Service<'a> {
    /// # Errors
    /// A name that is a path.
    pub(super) fn new(name: &str, units: &'a Path) -> Result<Service<'a>, Failure> {
        let is_other = OTHERS.iter().any(|kind| {
            let rest = name.strip_suffix(kind);
            rest.is_some_and(|rest| rest.ends_with('.'))
        });
        if is_other || name.is_empty() || name.contains('/') || name.starts_with(['.', '-']) {
            return Err(Failure::usage(format!(
                "{name} is not the name of a service"
            )));
        }
        // A version may have a dot, as that of php8.2-fpm.
        let whole = name.ends_with(".service");
        let name = name.to_owned() + if whole { "" } else { ".service" };
        Ok(Service { name, units })
    }

    fn folder(&self) -> PathBuf {
        self.units.join(format!("{}.d", self.name))
    }

    fn file(&self) -> PathBuf {
        self.folder().join(FILE)
    }

    /// The unit as systemd knows it; without systemd, as its files say.
    fn unit(&self) -> Result<Unit, Failure> {
        let unknown = || Failure::failed(format!("there is no unit {}", self.name));
        let mut unit = Unit::default();
        let shown = Command::new("systemctl")
            .args(["show", "--", &self.name])
            .output();
        if let Ok(shown) = shown
            && shown.status.success()
        {
            unit.add(&String::from_utf8_lossy(&shown.stdout));
            return match unit.last("LoadState") {
                Some("not-found") => Err(unknown()),
                _ => Ok(unit),
            };
        }
        let places = [self.units].into_iter().chain(PLACES.map(Path::new));
        let mut texts = places.filter_map(|place| fs::read_to_string(place.join(&self.name)).ok());
        unit.add(&texts.next().ok_or_else(unknown)?);
        let entries = fs::read_dir(self.folder()).into_iter().flatten().flatten();
        let mut more: Vec<_> = entries.map(|entry| entry.path()).collect();
        more.sort();
        for file in more {
            unit.add(&fs::read_to_string(file).unwrap_or_default());
        }
        Ok(unit)
    }

    /// Shows the drop-in with these variables, and writes it unless it is only to be printed.
    ///
    /// # Errors
    /// No such unit; those of writing.
    pub(super) fn install(
        &self,
        variables: impl FnOnce(Option<OsString>) -> Vec<(&'static str, OsString)>,
        is_print: bool,
    ) -> Result<ExitCode, Failure> {
        let unit = self.unit()?;
        let before = unit.variable("LD_PRELOAD").unwrap_or_default().as_bytes();
        let others = without_ours(before).unwrap_or_else(|| before.to_owned());
        let before = Some(OsString::from_vec(others)).filter(|rest| !rest.is_empty());
        let variables = variables(before);
        let mut text = String::from(
            "# Written by `weft run --service`; `--remove` takes it away.\n[Service]\n",
        );
        for (name, value) in &variables {
            let value = value.to_string_lossy();
            let value = value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('%', "%%");
            let _ = writeln!(text, "Environment=\"{name}={value}\"");
        }
        let file = self.file();
        print!("{}:\n{text}", file.display());
        let library = variables.first().map(|(_, value)| value.to_string_lossy());
        // Other libraries may follow.
        let library = library.unwrap_or_default();
        let library = library.split(':').next().unwrap_or_default();
        print!("{}", about(&unit, library));
        if let Some(path) = changed_by_others(Path::new(library)) {
            println!(
                "{} can be changed by others than root: they get to run code in the service. Install weft for all users first.",
                path.display()
            );
        }
        let user = unit.last("User").filter(|user| !user.is_empty());
        println!(
            "Peers of other users need `weft run --with {}`, and this service `--with` their users.",
            user.unwrap_or("USER")
        );
        if user.is_none() {
            println!(
                "USER is root, unless the service becomes another user by itself, as memcached does."
            );
        }
        if is_print {
            return Ok(ExitCode::SUCCESS);
        }
        let wrong = |e: io::Error| Failure::failed(format!("{}: {e}", file.display()));
        fs::create_dir_all(self.folder()).map_err(wrong)?;
        fs::write(&file, text).map_err(wrong)?;
        println!(
            "Written. It holds after: systemctl daemon-reload && systemctl restart {}",
            self.name
        );
        Ok(ExitCode::SUCCESS)
    }

    /// Takes the drop-in away.
    ///
    /// # Errors
    /// Those of removing it; there is none.
    pub(super) fn remove(&self) -> Result<ExitCode, Failure> {
        let file = self.file();
        fs::remove_file(&file).map_err(|e| Failure::failed(format!("{}: {e}", file.display())))?;
        // The folder may have other drop-ins.
        let _ = fs::remove_dir(self.folder());
        println!(
            "Removed {}. It holds after: systemctl daemon-reload && systemctl restart {}",
            file.display(),
            self.name
        );
        Ok(ExitCode::SUCCESS)
    }

    fn status(&self) -> String {
        let mut text = format!("{}: ", self.name);
        let unit = match self.unit() {
            Ok(unit) => unit,
            Err(failure) => return text + &failure.to_string() + "\n",
        };
        if !self.file().exists() {
            text += "not under `weft run`: weft run --service writes the drop-in\n";
            return text;
        }
        let ledgers: Vec<_> = pids(&unit).into_iter().filter_map(ledger_of).collect();
        text += &summary(&ledgers);
        text += &about(&unit, unit.variable("LD_PRELOAD").unwrap_or_default());
        text
    }
}

/// The file, or the folder on its path, that another user than root can write to. What is in a sticky folder stays its owner's.
fn changed_by_others(file: &Path) -> Option<PathBuf> {
    let file = fs::canonicalize(file).ok()?;
    let can = |path: &&Path| {
        fs::metadata(path).is_ok_and(|about| {
            let is_sticky = about.is_dir() && about.mode() & 0o1000 != 0;
            about.uid() != 0 || about.mode() & 0o022 != 0 && !is_sticky
        })
    };
    file.ancestors().find(can).map(Path::to_owned)
}

/// What of the unit is in the way, a line each.
fn about(unit: &Unit, library: &str) -> String {
    let mut text = String::new();
    for one in unit.findings(library) {
        let mark = if one.blocks { "in the way" } else { "note" };
        let _ = writeln!(text, "  {mark}: {}: {}", one.line, one.effect);
    }
    let program = unit.program().map(Path::new);
    if let Some(why) = program.and_then(|program| plain(program, unit)) {
        let _ = writeln!(text, "  in the way: ExecStart: {why}");
    }
    text
}

/// Why the library has no effect on the program when the unit's user runs it.
fn plain(program: &Path, unit: &Unit) -> Option<&'static str> {
    let of = |key| unit.last(key).filter(|name| !name.is_empty());
    // A user that systemd makes later is not known yet, and nothing is told then.
    let (uid, gid) = super::users::ids(of("User").unwrap_or("root"), of("Group"))?;
    super::plain::plain_for(program, uid, gid)
}

fn ledger_of(pid: u32) -> Option<Ledger> {
    ledger::of_process(pid).ok().flatten()
}

/// The processes of a running service.
fn pids(unit: &Unit) -> Vec<u32> {
    let group = unit.last("ControlGroup").unwrap_or_default();
    let file = format!("/sys/fs/cgroup{group}/cgroup.procs");
    let procs = fs::read_to_string(file).ok().filter(|_| !group.is_empty());
    let text = procs.or_else(|| unit.last("MainPID").map(str::to_owned));
    let pids = text.unwrap_or_default();
    pids.lines()
        .filter_map(|pid| pid.parse().ok())
        .filter(|&pid| pid != 0)
        .collect()
}

/// How many connections of these processes use rings, and why the others do not.
fn summary(ledgers: &[Ledger]) -> String {
    if ledgers.is_empty() {
        return "no process of it under `weft run` has had a connection to look at: it does not run, was not restarted, or had only short ones\n".to_owned();
    }
    let rows = || {
        ledgers
            .iter()
            .flat_map(|ledger| &ledger.rows)
            .filter(|row| !row.udp)
    };
    let seen: u64 = ledgers.iter().map(|ledger| ledger.totals[0]).sum();
    let over: u64 = ledgers.iter().map(|ledger| ledger.totals[1]).sum();
    let mut text = format!("{seen} connections, {over} went over to shared memory\n");
    let mut reasons = BTreeMap::<String, usize>::new();
    for row in rows() {
        let Some(why) = row.about_why() else { continue };
        let why = match row.about_user() {
            Some(user) => format!("{why} ({user})"),
            None => why.to_owned(),
        };
        *reasons.entry(why).or_default() += 1;
    }
    for (why, n) in reasons {
        let _ = writeln!(text, "  {n} on TCP: {why}");
    }
    text
}

/// Prints the state of these units, or of all that have the drop-in.
///
/// # Errors
/// A name that is not a service's.
pub(super) fn status(names: &[String], units: &Path) -> Result<ExitCode, Failure> {
    let mut names = names.to_vec();
    if names.is_empty() {
        let entries = fs::read_dir(units).into_iter().flatten().flatten();
        let folders = entries.filter(|entry| entry.path().join(FILE).exists());
        let folders = folders.filter_map(|entry| entry.file_name().into_string().ok());
        names.extend(folders.filter_map(|name| name.strip_suffix(".d").map(str::to_owned)));
        names.sort();
    }
    if names.is_empty() {
        println!("No service has the drop-in: weft run --service UNIT writes it.");
    }
    for name in names {
        print!("{}", Service::new(&name, units)?.status());
    }
    Ok(ExitCode::SUCCESS)
}
