//! One compilation: preprocess here, hand over, take what comes back, or do it here.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::SystemTime;

use weft_sys::memfd;

use crate::ipc::{Answer, Ask, JobAsk, Line, PullAsk};
use crate::link::Endpoint;
use crate::options::{self, Plan};
use crate::wire::Output;

/// How to compile.
pub struct Settings {
    /// Workers.
    pub workers: Vec<Endpoint>,
    /// Percent of the objects that are compiled here too, and compared.
    pub verify: u8,
    /// Workers preprocess too, where they can.
    pub pull: bool,
    /// Connects to the daemon, which is started if it is not there.
    pub line: Box<dyn Fn() -> io::Result<Line>>,
}

/// What became of a command.
pub enum Compiled {
    /// A worker did it.
    There(Endpoint),
    /// It ran here, and ended so.
    Here(ExitStatus),
}

/// Environment variables that change what a preprocessor reads or writes.
const SEARCH_ENVIRONMENT: &[&str] = &[
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "DEPENDENCIES_OUTPUT",
    "SUNPRO_DEPENDENCIES",
];
/// Environment variables that change what a compiler is.
const ENVIRONMENT: &[&str] = &["GCC_EXEC_PREFIX", "COMPILER_PATH", "GCC_COMPARE_DEBUG"];

/// Set for the compilers that are started from here: one that is a script which calls `weft cc` again would wait for a place that it has itself.
pub(crate) const ACTIVE: &str = "WEFT_CC_ACTIVE";

/// Why a remote compilation was given up, with the leave to go on here.
struct Back {
    reason: String,
    line: Option<Line>,
    /// There is no daemon, and it is not to be asked for leave.
    alone: bool,
}

/// Compiles. Where it is to run here, this process becomes the compiler, unless there is something to compare.
///
/// # Errors
/// The compiler could not be started.
pub fn compile(driver: &Path, args: &[OsString], settings: &Settings) -> io::Result<Compiled> {
    if std::env::var_os(ACTIVE).is_some() {
        return Err(become_compiler(driver, args, None));
    }
    let here = |reason: String, compiles: bool, line: Option<Line>| {
        tracing::info!("here: {reason}");
        // What links is for make's own count; what compiles takes a place of this machine's.
        let line = match line {
            Some(line) => Some(line),
            None if settings.workers.is_empty() => None,
            None => (settings.line)().ok().filter(|line| {
                let told = if compiles {
                    line.ask(&Ask::Here(reason), &[]).map(drop)
                } else {
                    line.send(&Ask::Note(reason), &[])
                };
                told.is_ok() && compiles
            }),
        };
        become_compiler(driver, args, line)
    };
    let plan = match options::parse(args) {
        Ok(plan) => plan,
        Err(stay) => return Err(here(stay.reason, stay.compiles, None)),
    };
    let changed = ENVIRONMENT
        .iter()
        .find(|name| std::env::var_os(name).is_some());
    if let Some(name) = changed {
        return Err(here(format!("{name} is set"), true, None));
    }
    if settings.workers.is_empty() {
        return Err(here(
            "no worker is named (WEFT_CC_HOSTS)".into(),
            true,
            None,
        ));
    }
    match remote(driver, &plan, settings) {
        Ok((worker, line, object)) => {
            if !options::is_repeatable(&plan.job) || !chosen(settings.verify) {
                return Ok(Compiled::There(worker));
            }
            let object = object.read()?;
            let status = Command::new(driver).args(args).env(ACTIVE, "1").status()?;
            let ours = std::fs::read(&plan.output).unwrap_or_default();
            let same = ours == object;
            let _ = line.send(
                &Ask::Verified {
                    worker: worker.clone(),
                    same,
                },
                &[],
            );
            if !same {
                eprintln!(
                    "weft cc: {}: the object of {worker} differs from the one that was compiled here, which is kept; {worker} gets no more jobs",
                    plan.output.display()
                );
            }
            Ok(Compiled::Here(status))
        }
        Err(back) if back.alone => {
            tracing::info!("here: {}", back.reason);
            Err(become_compiler(driver, args, None))
        }
        Err(Back { reason, line, .. }) => Err(here(reason, true, line)),
    }
}

/// Becomes the compiler; only a failure comes back. The leave ends with the process.
fn become_compiler(driver: &Path, args: &[OsString], line: Option<Line>) -> io::Error {
    if let Some(line) = line {
        let _ = rustix::io::fcntl_setfd(&line.0, rustix::io::FdFlags::empty());
        std::mem::forget(line.0);
    }
    Command::new(driver).args(args).env(ACTIVE, "1").exec()
}

/// Whether this one is among so many percent.
fn chosen(percent: u8) -> bool {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0) % 100 < percent.into()
}

/// The locale that diagnostics are in.
fn locale() -> String {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    set("LC_ALL")
        .or_else(|| set("LC_MESSAGES"))
        .or_else(|| set("LANG"))
        .unwrap_or_default()
}

/// The working directory as compilers see it: `PWD`, if it is that.
fn working_directory() -> io::Result<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let real = std::env::current_dir()?;
    let told = std::env::var_os("PWD")
        .map(PathBuf::from)
        .filter(|told| told.is_absolute());
    let same = |told: &PathBuf| {
        let (a, b) = (told.metadata().ok()?, real.metadata().ok()?);
        Some((a.dev(), a.ino()) == (b.dev(), b.ino()))
    };
    Ok(told.filter(|told| same(told) == Some(true)).unwrap_or(real))
}

fn remote(driver: &Path, plan: &Plan, settings: &Settings) -> Result<(Endpoint, Line, Part), Back> {
    let back = |reason: String| Back {
        reason,
        line: None,
        alone: false,
    };
    let name = driver
        .file_name()
        .and_then(OsStr::to_str)
        .unwrap_or_default();
    if !options::is_driver(name) {
        return Err(back(format!("`{name}` is not gcc")));
    }
    let text = |path: &Path| {
        path.to_str()
            .map(str::to_owned)
            .ok_or_else(|| back("a name that is not UTF-8".into()))
    };
    let (cwd, source) = (
        working_directory().map_err(|e| back(e.to_string()))?,
        text(&plan.source)?,
    );
    if !options::is_source_name(&source) {
        return Err(back("a source whose name begins with @ or -".into()));
    }
    let cwd = text(&cwd)?;
    let path = std::env::var_os("PATH").unwrap_or_else(|| crate::PATH.into());
    let path = text(Path::new(&path))?;
    let line = (settings.line)().map_err(|e| Back {
        alone: true,
        ..back(format!("no daemon: {e}"))
    })?;
    let lost = |e: io::Error| back(format!("the daemon: {e}"));
    let began = SystemTime::now();
    let mut args = plan.job.clone();
    let colours = std::io::IsTerminal::is_terminal(&io::stderr())
        && !args
            .iter()
            .any(|arg| arg.starts_with("-fdiagnostics-color"));
    if colours {
        args.push("-fdiagnostics-color=always".into());
    }
    let mut job = JobAsk {
        workers: settings.workers.clone(),
        driver: driver.into(),
        name: name.into(),
        path,
        language: plan.language,
        cwd,
        source,
        locale: locale(),
        args,
        at: 0,
        len: 0,
        pull: None,
    };
    let mut said = Vec::new();
    let mut answer = None;
    if settings.pull {
        match pulled(plan, &job.cwd) {
            Ok(pull) => {
                job.pull = Some(pull);
                let ask = Ask::Job(Box::new(job.clone()));
                answer = match line.ask(&ask, &[]).map_err(lost)? {
                    (Answer::Preprocess(reason), _) => {
                        tracing::info!("preprocessed here: {reason}");
                        None
                    }
                    other => Some(other),
                };
                job.pull = None;
            }
            Err(why) => line
                .send(&Ask::Note(format!("preprocessed here: {why}")), &[])
                .map_err(lost)?,
        }
    }
    let answer = if let Some(answer) = answer {
        answer
    } else {
        line.ask(&Ask::Preprocess, &[]).map_err(lost)?;
        let text = preprocess(driver, plan).map_err(back)?;
        said = text.said;
        (job.at, job.len) = (text.at, text.len);
        line.ask(&Ask::Job(Box::new(job)), &[text.file.as_fd()])
            .map_err(lost)?
    };
    let (outputs, worker, room) = match answer {
        (Answer::Done { outputs, worker }, Some(room)) => (outputs, worker, room),
        (Answer::Here(reason), _) => {
            return Err(Back {
                reason,
                line: Some(line),
                alone: false,
            });
        }
        _ => return Err(back("the daemon gave an answer that cannot be".into())),
    };
    let room = File::from(room);
    let take = |what| Part::find(&room, &outputs, what);
    let object = take(Output::Object).map_err(|e| back(format!("the object: {e}")))?;
    let told = dependencies(&plan.preprocess);
    if let (Some(path), Ok(part)) = (&told, take(Output::Dependencies)) {
        // Before the object: a make that sees the one sees the other.
        write_whole(path, &part, began).map_err(|e| back(format!("{}: {e}", path.display())))?;
    }
    // Nothing is said that a compilation here would say again.
    write_whole(&plan.output, &object, began)
        .map_err(|e| back(format!("{}: {e}", plan.output.display())))?;
    if let Some(path) = told
        && let Err(e) = set_time(&path, began)
    {
        tracing::info!("the time of {}: {e}", path.display());
    }
    let diagnostics = take(Output::Diagnostics).and_then(|part| part.read());
    let diagnostics = diagnostics.unwrap_or_default();
    let _ = io::stderr().write_all(&said);
    let _ = io::stderr().write_all(&printable(&diagnostics));
    Ok((worker, line, object))
}

/// What a worker needs to preprocess this.
fn pulled(plan: &Plan, cwd: &str) -> Result<PullAsk, String> {
    if let Some(name) = SEARCH_ENVIRONMENT
        .iter()
        .find(|name| std::env::var_os(name).is_some())
    {
        return Err(format!("{name} is set"));
    }
    let crate::pull::Asked { cpp, search, roots } = crate::pull::ask(plan, Path::new(cwd))?;
    Ok(PullAsk { cpp, search, roots })
}

/// A preprocessed source.
struct Text {
    /// A memory file.
    file: File,
    /// Where in it the source begins, and its length.
    at: u64,
    len: u64,
    /// What the preprocessor said.
    said: Vec<u8>,
}

/// The preprocessor writes into the memory file that the worker reads: through a pipe each 4 KiB of its text would wake this process.
fn preprocess(driver: &Path, plan: &Plan) -> Result<Text, String> {
    let failed = |e: io::Error| format!("cannot preprocess: {e}");
    let file = memfd::create_growing("weft-cc-source").map_err(failed)?;
    let preprocessed = Command::new(driver)
        .args(&plan.preprocess)
        .env(ACTIVE, "1")
        .stdin(Stdio::null())
        .stdout(file.try_clone().map_err(failed)?)
        .stderr(Stdio::piped())
        .spawn()
        .and_then(std::process::Child::wait_with_output)
        .map_err(failed)?;
    if !preprocessed.status.success() {
        // It says what is wrong better when it compiles.
        return Err("preprocessing failed".into());
    }
    let file = File::from(file);
    let (at, end) = judge(&file)
        .map_err(|e| format!("no memory for the source: {e}"))?
        .map_err(str::to_owned)?;
    Ok(Text {
        file,
        at,
        len: end - at,
        said: preprocessed.stderr,
    })
}

/// Bytes of a text that are looked at together; what compilers have built in comes among the first.
const PIECE: usize = 128 << 10;

/// Where the source for a worker begins and ends in a preprocessed text, or why there is none. What the worker's compiler has built in is overwritten by the lines
/// before it, and the source begins there.
fn judge(file: &File) -> io::Result<Result<(u64, u64), &'static str>> {
    let mut piece = vec![0; PIECE];
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
        if let Some(why) = options::stays(text) {
            return Ok(Err(why));
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

/// Writes beside the name and renames: there is never half an object. Its time is that of the preprocessing: a header that was changed since is newer.
fn write_whole(path: &Path, part: &Part, time: SystemTime) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let mut beside = OsString::from(".");
    beside.push(name);
    beside.push(format!(".weft-{}.part", std::process::id()));
    let beside = path.with_file_name(beside);
    let done = (|| {
        let mut file = File::options().write(true).create_new(true).open(&beside)?;
        part.write_to(&mut file)?;
        file.set_modified(time)?;
        std::fs::rename(&beside, path)
    })();
    if done.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    done
}

/// Where the preprocessor writes dependencies.
fn dependencies(preprocess: &[OsString]) -> Option<PathBuf> {
    let mut found = None;
    let mut args = preprocess.iter();
    while let Some(arg) = args.next() {
        let arg = arg.as_bytes();
        let joined = [&b"-Wp,-MD,"[..], b"-Wp,-MMD,", b"-MF"]
            .iter()
            .find_map(|prefix| arg.strip_prefix(*prefix));
        match joined {
            Some(b"") => found = args.next().map(PathBuf::from),
            Some(name) => found = Some(OsStr::from_bytes(name).into()),
            None => {}
        }
    }
    found
}

/// Gives a file the object's time: makes take an object that is older than its dependencies for an old one.
fn set_time(path: &Path, time: SystemTime) -> io::Result<()> {
    if !path.metadata()?.is_file() {
        return Ok(());
    }
    File::open(path)?.set_modified(time)
}

/// Diagnostics of a worker for a terminal: text, and the sequences that colour it, but no others.
fn printable(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&b, after)) = rest.split_first() {
        rest = after;
        match b {
            b'\n' | b'\t' | b' '..=b'~' | 0x80.. => out.push(b),
            0x1b => {
                let body = after.strip_prefix(b"[").unwrap_or_default();
                let len = body
                    .iter()
                    .take_while(|b| b.is_ascii_digit() || **b == b';')
                    .count();
                if matches!(body.get(len), Some(b'm' | b'K')) && len < 32 {
                    out.extend([0x1b, b'[']);
                    out.extend(&body[..=len]);
                    rest = &body[len + 1..];
                }
            }
            _ => {}
        }
    }
    out
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
    fn a_terminal_is_told_colours_alone() {
        assert_eq!(
            printable(b"\x1b[01;31m\x1b[Kerror\x1b[m\n"),
            b"\x1b[01;31m\x1b[Kerror\x1b[m\n"
        );
        assert_eq!(
            printable(b"\x1b]0;title\x07a\x1b[2Jb\x1b"),
            b"]0;titlea[2Jb"
        );
        assert_eq!(printable("‘x’".as_bytes()), "‘x’".as_bytes());
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
    fn an_object_is_whole_or_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.o");
        let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000);
        let part = |at, len| Part {
            room: file(b"an object, and more"),
            at,
            len,
        };
        write_whole(&path, &part(3, 6), time).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"object");
        assert_eq!(path.metadata().unwrap().modified().unwrap(), time);
        write_whole(&dir.path().join("no/a.o"), &part(0, 1), time).unwrap_err();
        write_whole(&dir.path().join("b.o"), &part(3, 60), time).unwrap_err();
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
