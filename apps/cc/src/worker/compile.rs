//! One compilation: a directory in memory, a compiler in the sandbox, and its end.

pub(super) mod tree;

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};
use weft_sys::EventFd;
use weft_sys::process::keep_files;

use super::remove::Scratch;
use super::sandbox;
use super::view::View;
use super::watch::{Group, Watch};
use crate::lock;
use crate::options::{Language, asks_for, is_source_name, map_path, names_further, split_beside};
use crate::wire::{Job, Output, Pull};

/// Components that a source's name may have, and bytes.
const MAX_COMPONENTS: usize = 64;
const MAX_NAME: usize = 2048;

/// The folder of coverage notes, below the job's directory.
const NOTES: &str = "notes";

/// A directory for one job, removed with this.
pub(crate) struct JobDir {
    dir: Scratch,
    /// The working directory of the compiler.
    cwd: PathBuf,
    pub(crate) source: PathBuf,
    /// The name that the compiler is given for it.
    name: PathBuf,
    absolute: bool,
}

/// Why there is none.
pub(crate) enum Unfit {
    /// The name cannot be.
    Name,
    /// The file system says no.
    Io(io::Error),
}

impl From<io::Error> for Unfit {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

impl JobDir {
    /// Makes the directories that a source of this name needs, so that the compiler sees the name that it would see on the master. No name leads out.
    pub(super) fn new(place: &Path, job: &Job) -> Result<Self, Unfit> {
        let name = &*job.name;
        let path = Path::new(name);
        let parts: Vec<_> = path.components().collect();
        let file = path.file_name().ok_or(Unfit::Name)?;
        if parts.len() > MAX_COMPONENTS
            || name.len() > MAX_NAME
            || !is_source_name(name)
            || name.ends_with('/')
        {
            return Err(Unfit::Name);
        }
        let dir = Scratch::new("weft-cc-", place)?;
        let absolute = path.is_absolute();
        let ups = parts
            .iter()
            .filter(|part| **part == Component::ParentDir)
            .count();
        // So deep that each `..` stays inside.
        let mut cwd = dir.path().join("w");
        cwd.extend(std::iter::repeat_n("w", ups));
        std::fs::create_dir_all(&cwd)?;
        let mut at = if absolute {
            dir.path().join("r")
        } else {
            cwd.clone()
        };
        // An equals sign would end the first half of a prefix map.
        if absolute && (ups > 0 || name.contains('=')) {
            return Err(Unfit::Name);
        }
        std::fs::create_dir_all(&at)?;
        for part in &parts[..parts.len() - 1] {
            match part {
                Component::Normal(part) => {
                    at.push(part);
                    std::fs::create_dir_all(&at)?;
                }
                Component::ParentDir => {
                    at.pop();
                }
                _ => {}
            }
        }
        let beside = Path::new(&job.beside);
        if asks_for(&job.args, Output::Split) {
            // The name is in the object as the master has it: the file comes below the working directory.
            let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
            if !beside.components().all(plain) || job.beside.len() > MAX_NAME {
                return Err(Unfit::Name);
            }
            std::fs::create_dir_all(cwd.join(beside.parent().unwrap_or(beside)))?;
        }
        let source = at.join(file);
        if !source.starts_with(dir.path()) {
            return Err(Unfit::Name);
        }
        let name = if absolute {
            source.clone()
        } else {
            path.into()
        };
        Ok(Self {
            dir,
            cwd,
            source,
            name,
            absolute,
        })
    }

    pub(crate) fn output(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    pub(crate) fn diagnostics(&self) -> PathBuf {
        self.dir.path().join("err")
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The output of a preprocessor here.
    pub(super) fn text(&self) -> PathBuf {
        self.dir.path().join("text")
    }

    pub(super) fn dependencies(&self) -> PathBuf {
        self.dir.path().join("deps")
    }

    /// A preprocessor that finds the master's files in `view`; `predefined` is the header that compilers include by themselves.
    pub(super) fn preprocess(
        &self,
        driver: &[OsString],
        job: &Job,
        pull: &Pull,
        view: &View,
        predefined: Option<&Path>,
        limits: &Limits,
    ) -> io::Result<Command> {
        let name = |name: &str| -> OsString {
            if name.starts_with('/') {
                view.at(Path::new(name)).into()
            } else {
                name.into()
            }
        };
        let mut command = limited(driver, limits);
        command.args(job.args.iter().filter(|arg| *arg != "-c" && *arg != "-S"));
        command.arg("-nostdinc");
        if job.cxx {
            command.arg("-nostdinc++");
        }
        if let Some(path) = predefined {
            command.arg("-include").arg(view.at(path));
        }
        let mut made = false;
        let mut cpp = pull.cpp.iter();
        while let Some(option) = cpp.next() {
            match option.as_str() {
                "-MD" | "-MMD" => {
                    made = true;
                    command.arg(option);
                }
                "-MP" | "-trigraphs" => drop(command.arg(option)),
                "-Wp,-MD," | "-Wp,-MMD," => {
                    let mut joined = OsString::from(option);
                    joined.push(self.dependencies());
                    command.arg(joined);
                }
                option => {
                    let value = cpp.next().ok_or(io::ErrorKind::InvalidInput)?;
                    let path = matches!(
                        option,
                        "-I" | "-iquote" | "-isystem" | "-idirafter" | "-include"
                    );
                    if path {
                        command.arg(option).arg(name(value));
                    } else {
                        command.arg(format!("{option}{value}"));
                    }
                }
            }
        }
        for dir in &pull.system {
            command.arg("-isystem").arg(name(dir));
        }
        if made {
            command.arg("-MF").arg(self.dependencies());
        }
        let language = if job.cxx { Language::Cxx } else { Language::C };
        command
            .args(["-E", "-fdirectives-only", "-x", language.name(), "-o"])
            .arg(self.text())
            .arg(name(&job.name));
        let cwd = view.at(Path::new(&job.cwd));
        self.surround(&mut command, job)?;
        command.current_dir(&cwd).env("PWD", cwd);
        Ok(command)
    }

    /// Environment and standard streams.
    fn surround(&self, command: &mut Command, job: &Job) -> io::Result<()> {
        let locale = if job.locale.is_empty() {
            "C"
        } else {
            &job.locale
        };
        command
            .env_clear()
            .env("PATH", crate::PATH)
            .env("LC_ALL", locale)
            .env("TMPDIR", self.dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(self.diagnostics())?);
        Ok(())
    }

    /// The assembler's list of the files that it has read.
    fn assembled(&self) -> PathBuf {
        self.dir.path().join("assembled")
    }

    /// A file of this machine that the assembler has read, by `.incbin` or `.include`: the master's may be another one. The master looks for these words in
    /// its text, but a text can make them of pieces.
    pub(super) fn foreign(&self, room: &mut u64) -> io::Result<Option<String>> {
        let list = match read_whole(&self.assembled(), room) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            list => list?,
        };
        let list = String::from_utf8_lossy(&list);
        let own = |name: &str| Path::new(name).starts_with(self.dir.path());
        // "out: a b \\\n c"; without a file, the input was a pipe.
        let mut names = list.split_whitespace().filter(|name| *name != "\\");
        Ok(names
            .find(|name| name.starts_with('/') && !own(name.trim_end_matches(':')))
            .or_else(|| list.split('/').any(|part| part == "..").then_some(".."))
            .map(str::to_owned))
    }

    /// The path of separate debug information.
    pub(super) fn split(&self, job: &Job) -> Option<PathBuf> {
        let name = format!("{}.dwo", job.beside);
        asks_for(&job.args, Output::Split).then(|| self.cwd.join(name))
    }

    /// The coverage notes, with the master's working directory; empty if they were not requested.
    pub(super) fn notes(&self, job: &Job, room: &mut u64) -> io::Result<Vec<u8>> {
        if !asks_for(&job.args, Output::Notes) {
            return Ok(Vec::new());
        }
        let bytes = read_whole(&self.dir.path().join(NOTES), room)?;
        // After four numbers comes the directory: its length, and it with a zero byte. A compiler that maps prefixes there too has written the master's.
        let text = |dir: &[u8]| [&(dir.len() as u32 + 1).to_le_bytes(), dir, b"\0"].concat();
        let own = text(self.cwd.as_os_str().as_bytes());
        let theirs = text(job.cwd.as_bytes());
        let mapped = text(map_path(&job.args, &job.cwd).as_bytes());
        let (head, rest) = bytes
            .split_at_checked(16)
            .ok_or(io::ErrorKind::InvalidData)?;
        if let Some(rest) = rest.strip_prefix(&own[..]) {
            return Ok([head, &theirs, rest].concat());
        }
        let good = rest.starts_with(&mapped);
        good.then_some(bytes)
            .ok_or_else(|| io::Error::other("notes for coverage of a form that is not known"))
    }

    pub(super) fn command(
        &self,
        driver: &[OsString],
        job: &Job,
        language: Language,
        limits: &Limits,
    ) -> Result<Command, Unfit> {
        let text = |path: &Path| path.to_str().map(str::to_owned).ok_or(Unfit::Name);
        let mut command = limited(driver, limits);
        command.args(&job.args);
        // The text has no more headers to read; its markers are an extension of which it would be warned; and the lines that it came from are not here.
        command.args(["-nostdinc", "-Wno-pedantic", "-fno-diagnostics-show-caret"]);
        command.arg(format!(
            "-ffile-prefix-map={}={}",
            text(&self.cwd)?,
            map_path(&job.args, &job.cwd)
        ));
        if self.absolute {
            command.arg(format!(
                "-ffile-prefix-map={}={}",
                text(&self.source)?,
                map_path(&job.args, &job.name)
            ));
        }
        if names_further(&job.args) && !job.beside.is_empty() {
            let (dir, name) = split_beside(&job.beside);
            command.args(["-dumpdir", dir, "-dumpbase", name]);
        }
        if asks_for(&job.args, Output::Notes) {
            let notes = text(&self.dir.path().join(NOTES))?;
            command.arg(format!("-fprofile-note={notes}"));
        }
        if !job.args.iter().any(|arg| arg == "-S") {
            command.arg(format!("-Wa,--MD,{}", text(&self.assembled())?));
        }
        command
            .args(["-x", language.name(), "-o"])
            .arg(self.output())
            .arg(&self.name);
        command.current_dir(&self.cwd);
        self.surround(&mut command, job)?;
        Ok(command)
    }
}

/// Opens a compiler's output, and returns its length. The compiler may be hostile: a link would lead out of its directory, and a FIFO would block.
pub(super) fn open_output(path: &Path) -> io::Result<(File, u64)> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || about.nlink() != 1 {
        return Err(io::Error::other("it is no file of its own"));
    }
    Ok((file, about.len()))
}

/// The beginning of a compiler's output, at most so many bytes.
pub(super) fn read_output(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let (file, _) = open_output(path)?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A compiler's output, for which there is so much room; it takes its own.
pub(super) fn read_whole(path: &Path, room: &mut u64) -> io::Result<Vec<u8>> {
    let bytes = read_output(path, room.saturating_add(1))?;
    *room = room
        .checked_sub(bytes.len() as u64)
        .ok_or(io::ErrorKind::FileTooLarge)?;
    Ok(bytes)
}

/// The kernel's limits for each process of a compiler.
pub(super) struct Limits {
    /// Bytes that it may allocate.
    pub(super) memory: u64,
    /// Bytes that a file may have.
    pub(super) size: u64,
    /// Processes of its user in its user namespace, if it has one of its own.
    pub(super) processes: Option<u64>,
}

/// A driver with these limits for its processes and their files. They are set before it starts, and inherited.
fn limited(driver: &[OsString], limits: &Limits) -> Command {
    // By its whole name: between fork and exec nothing is to be looked for.
    let prlimit = crate::find_in(crate::PATH, "prlimit", &[]);
    let mut command = Command::new(prlimit.unwrap_or_else(|| "prlimit".into()));
    let Limits {
        memory,
        size,
        processes,
    } = limits;
    command.args([format!("--data={memory}"), format!("--fsize={size}")]);
    command.arg("--core=0");
    if let Some(processes) = processes {
        command.arg(format!("--nproc={processes}"));
    }
    command.args(driver);
    command
}

/// A process that ends at once, and reserves the number of its process group: until this is dropped it stays a zombie.
pub(crate) struct Leader {
    ended: Child,
    filters: sandbox::Filters,
}

impl Leader {
    pub(crate) fn new() -> io::Result<Self> {
        let mut command = Command::new("true");
        command.process_group(0).stdin(Stdio::null());
        let ended = keep_files(&mut command).spawn();
        let ended = ended.map_err(|e| named("true", e))?;
        let filters = sandbox::Filters::new(Some(Pid::from_child(&ended)));
        Ok(Self { ended, filters })
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        let _ = self.ended.wait();
    }
}

fn named(program: &str, e: io::Error) -> io::Error {
    if e.kind() == io::ErrorKind::NotFound {
        return io::Error::other(format!("{program} is not in /usr/bin"));
    }
    e
}

pub(crate) enum Ended {
    Status(std::process::ExitStatus),
    /// It could not be started.
    NotStarted(io::Error),
}

/// A compiler that runs. Dropping it kills what runs of it, and waits.
pub(crate) struct Compiler {
    group: Arc<Mutex<Option<Group>>>,
    thread: Option<std::thread::JoinHandle<Ended>>,
    over: Arc<AtomicBool>,
    bell: Arc<EventFd>,
    killed: Option<String>,
    watch: Option<Watch>,
    pub(crate) began: Instant,
}

impl Compiler {
    /// Starts it in the group of `leader`, from a thread of its own, restricted as far as `needed` or not at all, so that it reaches `place`.
    pub(crate) fn start(
        place: sandbox::Place,
        mut command: Command,
        needed: sandbox::Level,
        leader: Arc<Leader>,
        watch: Option<Watch>,
    ) -> io::Result<Self> {
        let group = Arc::new(Mutex::new(None));
        let over = Arc::new(AtomicBool::new(false));
        let bell = Arc::new(EventFd::new()?);
        let (told, ring) = (Arc::clone(&over), Arc::clone(&bell));
        let seen = Arc::clone(&group);
        let wanted = sandbox::Level {
            spaces: place.alone && needed.spaces,
            ..needed
        };
        let mut run = move || {
            let pid = Pid::from_child(&leader.ended);
            let level = sandbox::enter(&place, &mut command, &leader.filters, wanted);
            if !level.holds(needed) {
                return Err(io::Error::other(format!(
                    "the sandbox is incomplete: {level}, not {needed}"
                )));
            }
            // Held until the group is known: a kill comes before the start, or after it.
            let mut held = lock(&seen);
            let mut child = command
                .process_group(pid.as_raw_nonzero().get())
                .spawn()
                .map_err(|e| named("prlimit", e))?;
            *held = Some(Group {
                id: pid,
                first: Pid::from_child(&child),
            });
            drop(held);
            let status = child.wait();
            // Processes that it has left behind are killed too.
            let _ = kill_process_group(pid, Signal::KILL);
            *lock(&seen) = None;
            status
        };
        let mut run = move || run().map_or_else(Ended::NotStarted, Ended::Status);
        let thread = std::thread::Builder::new()
            .name("weft-cc-compile".into())
            .spawn(move || {
                let how = run();
                told.store(true, Ordering::SeqCst);
                ring.signal();
                how
            })?;
        Ok(Self {
            group,
            thread: Some(thread),
            over,
            bell,
            killed: None,
            watch,
            began: Instant::now(),
        })
    }

    /// It can be read once [`Compiler::is_over`] is true.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    /// Kills it if its processes together have more than they may.
    pub(super) fn look(&mut self) {
        let Some(group) = *lock(&self.group) else {
            return;
        };
        if let Some(why) = self.watch.as_ref().and_then(|watch| watch.exceeded(group)) {
            self.kill(why);
        }
    }

    /// For this reason, if it is the first.
    pub(crate) fn kill(&mut self, why: String) {
        self.killed.get_or_insert(why);
        if let Some(group) = *lock(&self.group) {
            let _ = kill_process_group(group.id, Signal::KILL);
        }
    }

    /// Waits for the end; how it ended, after how long, and why it was killed here.
    pub(crate) fn end(mut self) -> (Ended, Duration, Option<String>) {
        let how = self.thread.take().and_then(|thread| thread.join().ok());
        let how = how.unwrap_or_else(|| {
            Ended::NotStarted(io::Error::other("the thread that starts it has failed"))
        });
        (how, self.began.elapsed(), self.killed.take())
    }
}

impl Drop for Compiler {
    fn drop(&mut self) {
        while let Some(thread) = self.thread.take_if(|thread| !thread.is_finished()) {
            self.kill(String::new());
            // The compiler may not have been started yet when it was to be killed.
            std::thread::sleep(Duration::from_millis(5));
            self.thread = Some(thread);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::Mode;

    /// A parent that ends when its child has written, and a child that continues and tries to be the leader of a group of its own.
    const STRAY: &str = "if (fork) { select(undef, undef, undef, 0.01) until -e 'told'; exit }
        my $left = setpgrp(0, 0) ? 1 : 0;
        open my $f, '>', 'pid'; print $f \"$$ $left\\n\"; close $f; rename 'pid', 'told';
        sleep 600";

    /// Runs a perl script in place of a compiler, in this directory; `None` without perl, or without a filter for its calls.
    fn run(dir: &Path, script: &str) -> Option<Ended> {
        Some(start(dir, script)?.end().0)
    }

    fn run_in(dir: &Path, script: &str, spaces: bool) -> Option<Ended> {
        Some(start_in(dir, script, spaces)?.end().0)
    }

    fn start(dir: &Path, script: &str) -> Option<Compiler> {
        start_in(dir, script, false)
    }

    fn start_in(dir: &Path, script: &str, spaces: bool) -> Option<Compiler> {
        let level = sandbox::level();
        if !level.calls || !Path::new("/usr/bin/perl").exists() {
            eprintln!("skipped: no seccomp, or no perl (Debian's package perl-base)");
            return None;
        }
        let place = sandbox::Place {
            dir: dir.into(),
            alone: spaces,
            ..sandbox::Place::default()
        };
        let mut command = Command::new("/usr/bin/perl");
        command.args(["-e", script]).current_dir(dir);
        let leader = Arc::new(Leader::new().unwrap());
        Some(Compiler::start(place, command, level, leader, None).unwrap())
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_compiler_reaches_no_thread_of_its_worker() {
        // tgkill(worker, thread, 0), the threads as they are once the compiler runs.
        let script = "select(undef, undef, undef, 0.01) until -e 'threads'; open my $f, '<', 'threads'; my ($worker, @threads) = split ' ', <$f>;
            for (@threads) { exit 6 if syscall(234, $worker + 0, $_ + 0, 0) == 0 } exit(@threads ? 5 : 7)";
        let dir = tempfile::tempdir().unwrap();
        let Some(compiler) = start(dir.path(), script) else {
            return;
        };
        let end = Instant::now() + Duration::from_mins(1);
        while lock(&compiler.group).is_none() {
            assert!(Instant::now() < end && !compiler.is_over());
            std::thread::yield_now();
        }
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let mut text = std::process::id().to_string();
        for thread in threads.flatten() {
            text = format!("{text} {}", thread.file_name().display());
        }
        std::fs::write(dir.path().join("new"), text).unwrap();
        std::fs::rename(dir.path().join("new"), dir.path().join("threads")).unwrap();
        let how = compiler.end().0;
        assert!(matches!(how, Ended::Status(status) if status.code() == Some(5)));
    }

    #[test]
    fn nothing_that_a_compiler_started_outlives_it() {
        let dir = tempfile::tempdir().unwrap();
        let Some(how) = run(dir.path(), STRAY) else {
            return;
        };
        assert!(matches!(how, Ended::Status(status) if status.success()));
        let told = std::fs::read_to_string(dir.path().join("told")).unwrap();
        let (pid, left) = told.trim().split_once(' ').unwrap();
        assert_eq!(left, "0", "it has left its process group");
        // Dead, or a zombie for which no process waits here.
        let end = Instant::now() + Duration::from_mins(1);
        let dead = || {
            std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .map_or(true, |text| text.contains(") Z "))
        };
        while !dead() {
            assert!(Instant::now() < end, "process {pid} outlives its job");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Set in the process that is the worker of a test: the folder, and whether its compilers have namespaces of their own.
    const WORKER: &str = "WEFT_TEST_WORKER";

    #[test]
    fn nothing_of_a_compiler_outlives_a_killed_worker() {
        // A compiler with a child; the end of a pipe shows that nobody has it open any more.
        let script = "open my $f, '>', 'alive' or exit 3; syswrite $f, fork ? 'a' : 'b'; sleep 600";
        if let Ok(text) = std::env::var(WORKER) {
            let (spaces, dir) = text.split_once(' ').unwrap();
            let how = run_in(Path::new(dir), script, spaces == "true");
            panic!("the compiler has ended: {}", how.is_some());
        }
        let level = sandbox::level();
        for spaces in [false, true] {
            if !level.calls || spaces && !level.spaces || !Path::new("/usr/bin/perl").exists() {
                eprintln!("skipped: no perl, no seccomp, or no namespaces ({spaces}); {level}");
                continue;
            }
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("alive");
            rustix::fs::mkfifoat(rustix::fs::CWD, &path, Mode::RUSR | Mode::WUSR).unwrap();
            let mut options = File::options();
            let options = options.read(true).custom_flags(libc::O_NONBLOCK);
            let mut alive = options.open(path).unwrap();
            let test = "worker::compile::tests::nothing_of_a_compiler_outlives_a_killed_worker";
            let mut worker = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", test, "--nocapture"])
                .env(WORKER, format!("{spaces} {}", dir.path().display()))
                .spawn()
                .unwrap();
            let mut said = |until: &dyn Fn(&[u8], usize) -> bool| {
                let (mut all, end) = (Vec::new(), Instant::now() + Duration::from_mins(1));
                loop {
                    let readable = [(alive.as_fd(), weft_sys::Interest::READ)];
                    weft_sys::poll_fds(&readable, Some(Duration::from_secs(1))).unwrap();
                    let mut bytes = [0; 8];
                    let n = alive.read(&mut bytes).unwrap_or(usize::MAX);
                    all.extend(bytes.iter().take(n.min(8)).filter(|&&byte| byte != 0));
                    if until(&all, n) {
                        return;
                    }
                    assert!(Instant::now() < end, "{spaces}: {all:?}");
                }
            };
            said(&|all, _| all.len() == 2);
            worker.kill().unwrap();
            worker.wait().unwrap();
            said(&|_, n| n == 0);
        }
    }

    #[test]
    fn a_compiler_has_no_descriptor_of_its_worker() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::open("/dev/null").unwrap();
        // As one that a program hands on to the worker that it starts.
        let inherited = rustix::io::fcntl_dupfd_cloexec(&file, 100).unwrap();
        rustix::io::fcntl_setfd(&inherited, rustix::io::FdFlags::empty()).unwrap();
        let script = "for (3..999) { exit 6 if open my $f, '<&', $_ } exit 5";
        for spaces in [false, true] {
            if spaces && !sandbox::level().spaces {
                continue;
            }
            let Some(how) = run_in(dir.path(), script, spaces) else {
                return;
            };
            assert!(matches!(how, Ended::Status(status) if status.code() == Some(5)));
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn compilers_get_no_name_space_of_users() {
        let dir = tempfile::tempdir().unwrap();
        // clone(CLONE_NEWUSER | SIGCHLD), by the number of x32 too, and clone3.
        let calls = [
            "56, 0x10000011, 0, 0, 0, 0",
            "0x40000038, 0x10000011, 0, 0, 0, 0",
            "435, 0, 0",
        ];
        for (call, errno) in calls.into_iter().zip(["ENOSYS", "ENOSYS", "ENOSYS"]) {
            let script = format!(
                "use Errno; my $p = syscall({call}); exit($p == -1 && $!{{{errno}}} ? 5 : 6)"
            );
            let Some(how) = run(dir.path(), &script) else {
                return;
            };
            let refused = matches!(how, Ended::Status(status) if status.code() == Some(5));
            assert!(refused, "{call}");
        }
    }

    #[test]
    fn outputs_in_memory_are_bounded_together() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        std::fs::write(&path, [b'x'; 60]).unwrap();
        let mut room = 120;
        for left in [60, 0] {
            assert_eq!(read_whole(&path, &mut room).unwrap().len(), 60);
            assert_eq!(room, left);
        }
        let e = read_whole(&path, &mut room).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn outputs_are_files_of_their_own() {
        use rustix::fs::{CWD, mkfifoat};
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("out"), b"object").unwrap();
        assert_eq!(open_output(&path("out")).unwrap().1, 6);
        std::os::unix::fs::symlink(path("out"), path("symlink")).unwrap();
        mkfifoat(CWD, path("fifo"), Mode::RUSR | Mode::WUSR).unwrap();
        for name in ["symlink", "fifo", "", "nothing"] {
            open_output(&path(name)).expect_err(name);
        }
        std::fs::hard_link(path("out"), path("link")).unwrap();
        open_output(&path("link")).unwrap_err();
    }
}
