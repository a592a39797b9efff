//! A command in the daemon: preprocesses it here, sends its text to a worker, and writes the outputs; or answers that the local compiler
//! has to do it.

mod clang;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::SystemTime;

use rustix::process::{Pid, Signal, getpriority_process, kill_process_group, setpriority_process};
use rustix::thread::{sched_getaffinity, sched_setaffinity};
use weft_service::text::coloured_lines;
use weft_sys::{Interest, memfd, poll_fds};

use super::history::CompileRecord;
use super::{Leave, Shared, job};
use crate::Endpoint;
use crate::client::{ACTIVE, HOSTS, PLAIN, not_compilers};
use crate::ipc::{JobAsk, Line, PullAsk, with_scratch};
use crate::launch::{FROM, Launch, NAME, Next};
use crate::lock;
use crate::options::{self, ENVIRONMENT, Family, Language, Plan, SEARCH_ENVIRONMENT, dependencies};
use crate::wire::Output;

/// Whether this compilation belongs to a sample of so many percent.
fn chosen(percent: u8) -> bool {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) % 100 < percent.into()
}

/// The root directory and mount namespace of a process: a command with others would compile here with other files than it sees.
#[derive(PartialEq, Eq)]
pub(super) struct Place([(u64, u64); 2]);

impl Place {
    pub(super) fn of(process: &str) -> io::Result<Self> {
        let at = |name: &str| {
            let about = std::fs::metadata(format!("/proc/{process}/{name}"))?;
            io::Result::Ok((about.dev(), about.ino()))
        };
        Ok(Self([at("root")?, at("ns/mnt")?]))
    }
}

/// The reason why a compilation ends before there is an object.
enum Stop {
    /// The compiler does it, which takes a place among those that run here if it compiles.
    Here { reason: String, compiles: bool },
    /// The compiler does it, and it is not counted.
    Alone,
    /// The command has ended.
    Gone,
}

fn here(reason: impl Into<String>) -> Stop {
    Stop::Here {
        reason: reason.into(),
        compiles: true,
    }
}

/// A command under way.
struct Running<'a> {
    shared: &'a Shared,
    launch: &'a Launch,
    line: &'a Line,
    pid: u32,
    stderr: File,
    driver: PathBuf,
    args: &'a [OsString],
}

impl Shared {
    /// Does a command, or says that the compiler has to do it. The leave is for a command that becomes the compiler, until the connection
    /// ends. `None`: it has ended.
    pub(super) fn command<'a>(
        &'a self,
        launch: &Launch,
        stderr: OwnedFd,
        line: &Line,
        trail: &mut CompileRecord<'a>,
    ) -> Option<(Next, Option<Leave<'a>>)> {
        let mut stderr = File::from(stderr);
        let under_name = Path::new(&launch.args[0]).file_name() == Some(OsStr::new(NAME));
        let (named, args) = launch.args[usize::from(under_name)..].split_first()?;
        let pid = weft_sys::unix::peer_cred(line).ok()?.pid?;
        let Some(driver) = driver(launch, named, pid) else {
            let path = launch.var("PATH").unwrap_or(OsStr::new(crate::PATH));
            let _ = writeln!(stderr, "{}", crate::no_compiler(&launch.dir, path, named));
            return Some((Next::End(127), None));
        };
        let mut running = Running {
            shared: self,
            launch,
            line,
            pid,
            stderr,
            driver,
            args,
        };
        let mut source = String::new();
        let stop = match running.run(trail, &mut source) {
            Ok(code) => return Some((Next::End(code), None)),
            Err(stop) => stop,
        };
        let path = running.driver;
        let alone = Next::Compiler {
            path: path.clone(),
            held: false,
        };
        match stop {
            Stop::Gone => None,
            Stop::Alone => Some((alone, None)),
            Stop::Here { reason, compiles } => {
                self.note(&reason);
                // make limits links by itself; compilations take a slot of this machine.
                if !compiles {
                    return Some((alone, None));
                }
                let asked = self.now();
                let leave = self.leave(line)?;
                trail.runs_here(&source, &reason, asked);
                Some((Next::Compiler { path, held: true }, Some(leave)))
            }
        }
    }
}

/// The compiler as the command would find it: exactly this file if it is named by a path, unless that is a link to this program or its launcher, which stands
/// for the compiler of its name in `PATH`.
fn driver(launch: &Launch, named: &OsStr, pid: u32) -> Option<PathBuf> {
    let mut not = not_compilers(launch.var(FROM).map(OsStr::to_owned));
    not.extend(std::fs::read_link(format!("/proc/{pid}/exe")));
    let path = launch.var("PATH").unwrap_or(OsStr::new(crate::PATH));
    let is_link = named.as_bytes().contains(&b'/')
        && launch
            .dir
            .join(named)
            .canonicalize()
            .is_ok_and(|file| not.contains(&file));
    let name = if is_link {
        Path::new(named).file_name()?
    } else {
        named
    };
    let found = crate::find_in_dir(&launch.dir, path, name.to_str()?, &not)?;
    Some(launch.dir.join(found))
}

/// The locale that diagnostics are in.
fn locale(launch: &Launch) -> String {
    let set = |name| launch.var(name)?.to_str().filter(|value| !value.is_empty());
    set("LC_ALL")
        .or_else(|| set("LC_MESSAGES"))
        .or_else(|| set("LANG"))
        .unwrap_or_default()
        .into()
}

/// The working directory as compilers see it: `PWD`, if it is that.
fn working_directory(launch: &Launch) -> PathBuf {
    let told = launch.var("PWD").map(PathBuf::from);
    let same = |told: &PathBuf| {
        let (a, b) = (told.metadata().ok()?, launch.dir.metadata().ok()?);
        Some((a.dev(), a.ino()) == (b.dev(), b.ino()))
    };
    told.filter(|told| *told == launch.dir || (told.is_absolute() && same(told) == Some(true)))
        .unwrap_or_else(|| launch.dir.clone())
}

impl Running<'_> {
    fn text(path: &Path) -> Result<String, Stop> {
        let text = path.to_str().map(str::to_owned);
        text.ok_or_else(|| here("a name that is not UTF-8"))
    }

    /// The status that it ends with.
    fn run(&mut self, trail: &mut CompileRecord<'_>, told: &mut String) -> Result<u8, Stop> {
        let launch = self.launch;
        if launch.var(ACTIVE).is_some() {
            return Err(Stop::Alone);
        }
        let hosts = launch.var(HOSTS).and_then(OsStr::to_str);
        // A wrong list must not break a build.
        let workers = crate::workers(hosts.unwrap_or_default()).unwrap_or_else(|e| {
            let _ = writeln!(self.stderr, "weft cc: WEFT_CC_HOSTS: {e}; compiling here");
            Vec::new()
        });
        if workers.is_empty() {
            return Err(Stop::Alone);
        }
        if !Place::of(&self.pid.to_string()).is_ok_and(|theirs| theirs == self.shared.place) {
            return Err(here(
                "it sees other files than the daemon (a container, chroot)",
            ));
        }
        let name = self.driver.file_name().and_then(OsStr::to_str);
        let name = name.unwrap_or_default().to_owned();
        let family = Family::of(&name);
        // What is said of another compiler's options is not important.
        let plan = options::parse_as(family.unwrap_or(Family::Gcc), &launch.dir, self.args);
        let plan = plan.map_err(|stay| Stop::Here {
            reason: stay.reason,
            compiles: stay.compiles,
        })?;
        if let Some(name) = ENVIRONMENT.iter().find(|name| launch.var(name).is_some()) {
            return Err(here(format!("{name} is set")));
        }
        if family.is_none() {
            return Err(here(format!("`{name}` is neither gcc nor clang")));
        }
        if plan.language == Language::C && !plan.explicit && options::is_cxx(&name) {
            return Err(here(format!("`{name}` compiles C as C++")));
        }
        let source = Self::text(&plan.source)?;
        source.clone_into(told);
        if !options::is_source_name(&source) {
            return Err(here("a source whose name begins with @ or -"));
        }
        let began = SystemTime::now();
        let mut args = plan.job.clone();
        let coloured = |arg: &String| {
            ["-fdiagnostics-color", "-fcolor-diag", "-fno-color-diag"]
                .iter()
                .any(|option| arg.starts_with(option))
        };
        if self.stderr.is_terminal() && !args.iter().any(coloured) {
            args.push("-fdiagnostics-color=always".into());
        }
        let path = launch.var("PATH").unwrap_or(OsStr::new(crate::PATH));
        let cwd = Self::text(&working_directory(launch))?;
        // The object has the file of its counts by an absolute name.
        let counts = !plan.beside.is_empty() && !options::asks_for(&plan.job, Output::Split);
        let beside = if counts && !plan.beside.starts_with('/') {
            format!("{cwd}/{}", plan.beside)
        } else {
            plan.beside.clone()
        };
        let job = JobAsk {
            workers,
            driver: self.driver.clone(),
            name,
            path: Self::text(Path::new(path))?,
            language: plan.language,
            cwd,
            beside,
            source,
            locale: locale(launch),
            args,
            at: 0,
            len: 0,
            pull: None,
            tree: None,
            plain: launch.var(PLAIN).is_some_and(is_true),
        };
        let (outcome, said) = if family == Some(Family::Clang) {
            let (outcome, listed) = self.of_tree(&plan, job, trail)?;
            (outcome, Said::Tree(listed))
        } else {
            self.remote(&plan, job, trail)?
        };
        let (outputs, room, worker) = match outcome {
            job::Outcome::Done {
                outputs,
                room,
                worker,
            } => (outputs, File::from(room), worker),
            job::Outcome::Here(reason) => return Err(here(reason)),
            job::Outcome::Preprocess(_) => return Err(here("a worker's answer that cannot be")),
            job::Outcome::Cancelled => return Err(Stop::Gone),
        };
        self.deliver(&plan, &room, &outputs, &said, began)?;
        let percent = launch.var("WEFT_CC_VERIFY").and_then(OsStr::to_str);
        let percent = percent.map_or(Ok(0), |text| text.trim_end_matches('%').parse());
        if !options::is_repeatable(&plan.job) || !chosen(percent.unwrap_or(0)) {
            return Ok(0);
        }
        self.verify(&plan, &worker, &room, &outputs)
    }

    /// By a worker that preprocesses too, where that is wanted and can be; else its text is made here, with these messages.
    fn remote(
        &mut self,
        plan: &Plan,
        mut job: JobAsk,
        trail: &mut CompileRecord<'_>,
    ) -> Result<(job::Outcome, Said), Stop> {
        let shared = self.shared;
        if self.launch.var("WEFT_CC_PULL").is_some_and(is_true) {
            match self.pulled(plan, &job.cwd) {
                Ok(pull) => {
                    job.pull = Some(pull);
                    match shared.job(&job, None, self.line, trail) {
                        job::Outcome::Preprocess(why) => {
                            shared.note(&format!("preprocessed here: {why}"));
                        }
                        other => return Ok((other, Said::Pulled)),
                    }
                    job.pull = None;
                }
                Err(why) => shared.note(&format!("preprocessed here: {why}")),
            }
        }
        let leave = shared.leave(self.line).ok_or(Stop::Gone)?;
        trail.preprocesses();
        let text = self.preprocess(plan)?;
        drop(leave);
        trail.left();
        (job.at, job.len) = (text.at, text.len);
        let file = OwnedFd::from(text.file);
        let outcome = shared.job(&job, Some(&file), self.line, trail);
        Ok((outcome, Said::Here(text.said)))
    }

    /// The data that a worker needs to preprocess this.
    fn pulled(&self, plan: &Plan, cwd: &str) -> Result<PullAsk, String> {
        let var = |name: &str| self.launch.var(name).map(OsStr::to_owned);
        if let Some(name) = SEARCH_ENVIRONMENT.iter().find(|name| var(name).is_some()) {
            return Err(format!("{name} is set"));
        }
        crate::pull::ask(plan, Path::new(cwd), &var)
    }

    /// The compiler with these arguments, as the command would have started it. `None`: the command has ended, and so has the compiler.
    fn start(
        &self,
        args: &[OsString],
        stdout: Stdio,
        stderr: Stdio,
    ) -> io::Result<Option<ExitStatus>> {
        let launch = self.launch;
        let mut command = if launch.umask == self.shared.umask {
            Command::new(&self.driver)
        } else {
            let mut shell = Command::new("/bin/sh");
            let script = format!("umask {:03o}; exec \"$@\"", launch.umask);
            shell.args(["-c", &script, "sh"]).arg(&self.driver);
            shell
        };
        command
            .args(args)
            .env_clear()
            .envs(launch.env.iter().map(|(name, value)| (name, value)))
            .env(ACTIVE, "1")
            .current_dir(&launch.dir)
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0);
        // Nicer than this for good: the thread is this command's.
        let pid = Pid::from_raw(self.pid.cast_signed());
        if let (Ok(theirs), Ok(ours)) = (getpriority_process(pid), getpriority_process(None))
            && theirs > ours
        {
            let _ = setpriority_process(None, theirs);
        }
        let (theirs, ours) = (sched_getaffinity(pid), sched_getaffinity(None));
        let moved = matches!((&theirs, &ours), (Ok(a), Ok(b)) if a != b);
        let stay = |set: &rustix::io::Result<rustix::thread::CpuSet>| {
            if moved && let Ok(set) = set {
                let _ = sched_setaffinity(None, set);
            }
        };
        stay(&theirs);
        let child = command.spawn();
        stay(&ours);
        let mut child = child?;
        let ended = weft_sys::process::pidfd_open(child.id())?;
        loop {
            let both = [
                (ended.as_fd(), Interest::READ),
                (self.line.as_fd(), Interest::READ),
            ];
            let ready = poll_fds(&both, None).unwrap_or(0);
            if ready & 1 != 0 {
                return child.wait().map(Some);
            }
            if ready & 2 != 0 {
                let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
                child.wait()?;
                return Ok(None);
            }
        }
    }

    /// Standard output and standard error of the preprocessor here, both at the beginning.
    fn output_of(&self, args: &[OsString]) -> Result<(File, File), Stop> {
        let failed = |e: io::Error| here(format!("cannot preprocess: {e}"));
        let file = memfd::create_growing("weft-cc-source").map_err(failed)?;
        let said = File::from(memfd::create_growing("weft-cc-said").map_err(failed)?);
        let both = [file.try_clone(), said.try_clone().map(OwnedFd::from)];
        let [stdout, stderr] = both.map(|fd| fd.map(Stdio::from).map_err(failed));
        let status = self
            .start(args, stdout?, stderr?)
            .map_err(failed)?
            .ok_or(Stop::Gone)?;
        if !status.success() {
            // The compiler's own error message is better.
            return Err(here("preprocessing failed"));
        }
        let mut file = File::from(file);
        file.rewind().map_err(failed)?;
        Ok((file, said))
    }

    /// The preprocessor writes into the memory file that the worker reads: through a pipe each 4 KiB of its text would wake this process.
    fn preprocess(&self, plan: &Plan) -> Result<Text, Stop> {
        let failed = |e: io::Error| here(format!("cannot preprocess: {e}"));
        let (file, said) = self.output_of(&plan.preprocess)?;
        let (at, end) = judge(&file)
            .map_err(|e| here(format!("no memory for the source: {e}")))?
            .map_err(here)?;
        let len = said.metadata().map_err(failed)?.len();
        let mut text = vec![0; usize::try_from(len).unwrap_or(0)];
        said.read_exact_at(&mut text, 0).map_err(failed)?;
        Ok(Text {
            file,
            at,
            len: end - at,
            said: text,
        })
    }

    /// Writes dependencies, then the object, then the messages.
    fn deliver(
        &mut self,
        plan: &Plan,
        room: &File,
        outputs: &[(Output, u64, u64)],
        said: &Said,
        began: SystemTime,
    ) -> Result<(), Stop> {
        let dir = &self.launch.dir;
        let take = |what| Part::find(room, outputs, what);
        let object = take(Output::Object).map_err(|e| here(format!("the object: {e}")))?;
        let mode = (self.launch.umask != self.shared.umask).then_some(0o666 & !self.launch.umask);
        let write = |path: &Path, part: &Part| {
            write_whole(path, part, began, mode)
                .map_err(|e| here(format!("{}: {e}", path.display())))
        };
        let told = match &plan.rule {
            Some(rule) => Some(rule.file.clone()),
            None => dependencies(&plan.preprocess),
        };
        let told = told.map(|path| dir.join(path));
        if let Said::Tree(listed) = said {
            let rule = clang::rule(plan, listed, take(Output::Dependencies).ok())?;
            // Before the object, as below.
            if let (Some(path), Some(text)) = (&told, rule) {
                write(
                    path,
                    &Part::of(text.as_bytes()).map_err(|e| here(e.to_string()))?,
                )?;
            }
        }
        // Else the preprocessor here has written it.
        if matches!(said, Said::Pulled)
            && let (Some(path), Ok(part)) = (&told, take(Output::Dependencies))
        {
            let text = part.read().map_err(|e| here(e.to_string()))?;
            if !are_plain_rules(&text) {
                return Err(here("a worker's dependencies that are more than rules"));
            }
            // Before the object: a make that sees the one sees the other.
            write(path, &part)?;
        }
        for (what, extension) in [(Output::Split, "dwo"), (Output::Notes, "gcno")] {
            if options::asks_for(&plan.job, what) {
                let part = take(what).map_err(|e| here(format!("its .{extension}: {e}")))?;
                write(&dir.join(format!("{}.{extension}", plan.beside)), &part)?;
            }
        }
        // Messages are printed only if a compilation here would not repeat them.
        write(&dir.join(&plan.output), &object)?;
        if let Some(path) = told
            && let Err(e) = set_time(&path, began)
        {
            tracing::info!("the time of {}: {e}", path.display());
        }
        let diagnostics = take(Output::Diagnostics).and_then(|part| part.read());
        let diagnostics = coloured_lines(&diagnostics.unwrap_or_default());
        if let Said::Here(said) = said {
            let _ = self.stderr.write_all(said);
        }
        let _ = self.stderr.write_all(diagnostics.as_bytes());
        Ok(())
    }

    /// Compiles here too, and keeps that.
    fn verify(
        &mut self,
        plan: &Plan,
        worker: &Endpoint,
        room: &File,
        outputs: &[(Output, u64, u64)],
    ) -> Result<u8, Stop> {
        let failed = |e: io::Error| here(format!("cannot compare: {e}"));
        let theirs = Part::find(room, outputs, Output::Object).and_then(|part| part.read());
        let theirs = theirs.map_err(failed)?;
        let leave = self.shared.leave(self.line).ok_or(Stop::Gone)?;
        let stderr = self.stderr.try_clone().map_err(failed)?;
        let status = self
            .start(self.args, Stdio::null(), stderr.into())
            .map_err(failed)?
            .ok_or(Stop::Gone)?;
        drop(leave);
        let output = self.launch.dir.join(&plan.output);
        let same = std::fs::read(&output).unwrap_or_default() == theirs;
        let mut state = lock(&self.shared.state);
        state.verified.0 += 1;
        if !same {
            state.verified.1 += 1;
            for plain in [false, true] {
                state.pools.of(plain).distrust(worker);
            }
        }
        drop(state);
        if !same {
            let _ = writeln!(
                self.stderr,
                "weft cc: {}: the object of {worker} differs from the one that was compiled here, which is kept; {worker} gets no more jobs",
                plan.output.display()
            );
        }
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(code.unwrap_or(1))
    }
}

/// What the preprocessor here has said and written, before a worker's messages.
enum Said {
    /// Its messages. It has written the dependencies.
    Here(Vec<u8>),
    /// Nothing: the worker has preprocessed.
    Pulled,
    /// The files that clang has read.
    Tree(clang::Listed),
}

/// As the command line takes it.
fn is_true(value: &OsStr) -> bool {
    let value = value.to_ascii_lowercase();
    !["", "0", "n", "no", "f", "false", "off"]
        .iter()
        .any(|no| value == *no)
}

/// A preprocessed source.
struct Text {
    /// A memory file.
    file: File,
    /// The offset of the source in it, and its length.
    at: u64,
    len: u64,
    /// The preprocessor's messages.
    said: Vec<u8>,
}

/// Writes under another name and renames, so that there is never a partial object. Its time is that of the preprocessing: a header that was changed
/// since is newer.
fn write_whole(path: &Path, part: &Part, time: SystemTime, mode: Option<u32>) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut beside = OsString::from(".");
    beside.push(name);
    beside.push(format!(
        ".weft-{}.part",
        rustix::thread::gettid().as_raw_nonzero()
    ));
    let beside = path.with_file_name(beside);
    let done = (|| {
        let mut file = File::options().write(true).create_new(true).open(&beside)?;
        part.write_to(&mut file)?;
        file.set_modified(time)?;
        if let Some(mode) = mode {
            file.set_permissions(std::fs::Permissions::from_mode(mode))?;
        }
        std::fs::rename(&beside, path)
    })();
    if done.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    done
}

/// Bytes of a text that are looked at together; what compilers have built in comes among the first.
const PIECE: usize = 128 << 10;

/// The range of the source for a worker in a preprocessed text, or the reason why there is none. The definitions that are built into the worker's compiler
/// are cut out: the lines before them are moved to their end, where the source then begins.
fn judge(file: &File) -> io::Result<Result<(u64, u64), &'static str>> {
    with_scratch(PIECE, |piece| judge_in(piece, file))
}

fn judge_in(piece: &mut [u8], file: &File) -> io::Result<Result<(u64, u64), &'static str>> {
    let (mut begin, mut at, mut kept) = (0, 0, 0);
    loop {
        let n = match file.read_at(&mut piece[kept..], at) {
            Ok(0) => return Ok(Ok((begin, at))),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        let text = &piece[..kept + n];
        if at == 0 {
            let cut = options::built_in(text);
            begin = cut.len() as u64;
            file.write_all_at(&text[..cut.start], begin)?;
        }
        if options::stays(text).is_some() {
            // Seldom; then all of it is looked at.
            let mut whole = Vec::new();
            let mut file = file;
            file.seek(io::SeekFrom::Start(begin))?;
            let end = begin + file.read_to_end(&mut whole)? as u64;
            let why = options::stays_in_code(&whole);
            return Ok(why.map_or(Ok((begin, end)), Err));
        }
        at += n as u64;
        let all = text.len();
        kept = all.min(options::STAYS_OVERLAP);
        piece.copy_within(all - kept..all, 0);
    }
}

/// An output in the room.
struct Part {
    room: File,
    at: u64,
    len: u64,
}

impl Part {
    fn find(room: &File, outputs: &[(Output, u64, u64)], what: Output) -> io::Result<Self> {
        let found = outputs.iter().find(|&&(other, _, _)| other == what);
        let &(_, at, len) = found.ok_or(io::ErrorKind::NotFound)?;
        let room = room.try_clone()?;
        Ok(Self { room, at, len })
    }

    /// In a room of its own.
    fn of(bytes: &[u8]) -> io::Result<Self> {
        let len = bytes.len() as u64;
        let room = File::from(memfd::create("weft-cc-rule", len)?);
        room.write_all_at(bytes, 0)?;
        Ok(Self { room, at: 0, len })
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; usize::try_from(self.len).map_err(io::Error::other)?];
        self.room.read_exact_at(&mut bytes, self.at)?;
        Ok(bytes)
    }

    /// The kernel copies.
    fn write_to(&self, file: &mut File) -> io::Result<()> {
        let mut room = &self.room;
        room.seek(io::SeekFrom::Start(self.at))?;
        if io::copy(&mut room.take(self.len), file)? < self.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(())
    }
}

/// Whether make executes nothing of a worker's text: rules without recipes, and no variables, functions or directives.
fn are_plain_rules(text: &[u8]) -> bool {
    const DIRECTIVES: &[&str] = &[
        "include", "-include", "sinclude", "load", "-load", "define", "endef", "undefine", "ifdef",
        "ifndef", "ifeq", "ifneq", "else", "endif", "override", "export", "unexport", "private",
        "vpath",
    ];
    let Ok(text) = std::str::from_utf8(text) else {
        return false;
    };
    let active = |c: char| "$=;".contains(c) || (c.is_control() && c != '\n');
    let is_rule = |line: &str| {
        let first = line.split([' ', ':']).find(|word| !word.is_empty());
        line.contains(':') && first.is_some_and(|word| !DIRECTIVES.contains(&word))
    };
    let lines = text.replace("\\\n", " ");
    // Two backslashes at the end of a line do not join it with the next one.
    !text.contains("\\\\\n")
        && !text.replace("$$", "").contains(active)
        && lines
            .lines()
            .all(|line| line.trim().is_empty() || is_rule(line))
}

/// Gives a file the object's time: makes take an object that is older than its dependencies for an old one.
fn set_time(path: &Path, time: SystemTime) -> io::Result<()> {
    if !path.metadata()?.is_file() {
        return Ok(());
    }
    File::open(path)?.set_modified(time)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    #[test]
    fn a_compiler_that_is_named_by_a_path_is_that_one() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path
        };
        let (in_path, pinned) = (file("bin/gcc"), file("pinned/gcc"));
        let launch = Launch {
            umask: 0,
            dir: dir.path().into(),
            args: Vec::new(),
            env: vec![("PATH".into(), dir.path().join("bin").into())],
        };
        let of = |named: &Path| driver(&launch, named.as_os_str(), std::process::id());
        assert_eq!(of(Path::new("gcc")), Some(in_path.clone()));
        assert_eq!(of(&pinned), Some(pinned.clone()));
        assert_eq!(of(Path::new("pinned/gcc")), Some(pinned));
        assert_eq!(of(Path::new("/nonexistent/gcc")), None);
        assert_eq!(of(Path::new("none/gcc")), None);
        // A link to this program.
        let link = dir.path().join("links/gcc");
        std::fs::create_dir(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &link).unwrap();
        assert_eq!(of(&link), Some(in_path));
    }

    #[test]
    fn dependencies_are_found() {
        let of = |line: &str| {
            let args: Vec<_> = line.split(' ').map(OsString::from).collect();
            dependencies(&args)
        };
        for line in [
            "-MD -MF a.d x.c",
            "-MFa.d x.c",
            "-Wp,-MMD,a.d x.c",
            "x.c -Wp,-MD,a.d",
        ] {
            assert_eq!(of(line), Some("a.d".into()), "{line}");
        }
        assert_eq!(of("-MMD -MT a.d x.c"), None);
    }

    #[test]
    fn dependencies_of_workers_execute_nothing() {
        for good in [
            "a.o: a.c \\\n b.h /usr/include/c.h\n",
            "a.o a.d: a.c b\\ c.h p$$.h\n\nb.h:\n",
            "",
        ] {
            assert!(are_plain_rules(good.as_bytes()), "{good}");
        }
        for bad in [
            "a.o: a.c\n\ttouch x\n",
            "a.o: a.c ; touch x\n",
            "a.o: $(shell touch x)\n",
            "a.o: $$$(shell touch x)\n",
            "x != touch x\n",
            "CC := evil\n",
            "include /tmp/x\n",
            "  -include /tmp/x:y\n",
            "include\\\n /tmp/x:y\n",
            "a.o: b\\\\\ninclude /tmp/x:y\n",
            "define x:\n",
        ] {
            assert!(!are_plain_rules(bad.as_bytes()), "{bad}");
        }
    }

    #[test]
    fn an_object_is_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.o");
        let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let part = |at, len| Part {
            room: file(b"an object, and more"),
            at,
            len,
        };
        write_whole(&path, &part(3, 6), time, Some(0o640)).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"object");
        let about = path.metadata().unwrap();
        assert_eq!(
            (about.modified().unwrap(), about.mode() & 0o777),
            (time, 0o640)
        );
        write_whole(&dir.path().join("no/a.o"), &part(0, 1), time, None).unwrap_err();
        write_whole(&dir.path().join("b.o"), &part(3, 60), time, None).unwrap_err();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_source_begins_after_what_compilers_have_built_in() {
        let head = "# 0 \"a.c\"\n";
        let built_in = "# 0 \"<built-in>\"\n#define A 1\n";
        let rest = "# 0 \"<command-line>\"\n# 1 \"a.c\"\nint x;\n".repeat(PIECE / 30);
        for (text, source) in [
            (format!("{head}{built_in}{rest}"), format!("{head}{rest}")),
            (rest.clone(), rest.clone()),
            (String::new(), String::new()),
        ] {
            let file = file(text.as_bytes());
            let (at, end) = judge(&file).unwrap().unwrap();
            let mut found = vec![0; (end - at) as usize];
            file.read_exact_at(&mut found, at).unwrap();
            assert!(found == source.as_bytes());
        }
    }

    #[test]
    fn a_word_that_keeps_a_text_here_is_found_between_pieces() {
        for (word, before) in ["__TIMESTAMP__", ".incbin"]
            .into_iter()
            .flat_map(|word| (0..=word.len()).map(move |before| (word, before)))
        {
            let mut text = vec![b'x'; 2 * PIECE];
            text[PIECE - before..][..word.len()].copy_from_slice(word.as_bytes());
            judge(&file(&text)).unwrap().unwrap_err();
        }
    }
}
