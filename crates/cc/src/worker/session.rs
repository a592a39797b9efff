//! One connection of a worker: its jobs, one after the other.

use std::fs::File;
use std::io::Read;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_verbs::{Access, MemError, Mr, RemoteAddr, SendWr};

use super::compile::{Compiler, Ended, Leader, Unfit, Workshop};
use super::pull::Preprocessed;
use super::view::View;
use super::{Environment, LOOK, Shared, Taken, pressure, sandbox};
use crate::link::{DEPTH, Event, Gone, Link};
use crate::options::{Language, check_job, is_source_name};
use crate::travel::{Found, MAX_PACKED};
use crate::wire::{End, Job, MAX_DIAGNOSTICS, Output, Region, Report, Request, Verdict};

/// Bytes that one RDMA operation moves at most.
const CHUNK: u64 = 1 << 20;
/// How long a master may take to answer, or to let us reach its memory.
const PATIENCE: Duration = Duration::from_secs(30);
/// A connection without a job for so long ends.
const IDLE: Duration = Duration::from_mins(10);
/// What a region that is kept has at least.
const KEPT: usize = 4 << 20;

pub(super) struct Session<'a> {
    pub(super) shared: &'a Shared,
    pub(super) link: Link,
    peer: SocketAddr,
    /// `SRC RX` of the thesis: registered once, and again only for a longer source.
    source: Option<Mr>,
    /// The master's tree, for jobs that are to be preprocessed here.
    pub(super) view: Option<View>,
    /// Of the process group of its compilers, once there was one.
    leader: Option<Arc<Leader>>,
}

/// How a step of a job goes wrong.
pub(super) enum Stop {
    /// The job ends like this, the connection goes on.
    End(Verdict, String),
    /// The connection is over.
    Gone(Gone),
}

impl From<Gone> for Stop {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}

/// What the worker lacks.
impl From<std::io::Error> for Stop {
    fn from(e: std::io::Error) -> Self {
        trouble(&e)
    }
}

impl From<weft_verbs::Error> for Stop {
    fn from(e: weft_verbs::Error) -> Self {
        trouble(&e)
    }
}

impl From<MemError> for Stop {
    fn from(e: MemError) -> Self {
        trouble(&e)
    }
}

pub(super) fn stop<T>(verdict: Verdict, reason: impl Into<String>) -> Result<T, Stop> {
    Err(Stop::End(verdict, reason.into()))
}

pub(super) fn refuse<T>(reason: impl Into<String>) -> Result<T, Stop> {
    stop(Verdict::Refused, reason)
}

pub(super) fn trouble(e: &dyn std::fmt::Display) -> Stop {
    Stop::End(Verdict::Trouble, e.to_string())
}

pub(super) fn gone(why: &str) -> Gone {
    Gone(why.into())
}

impl<'a> Session<'a> {
    pub(super) fn new(shared: &'a Shared, link: Link, peer: SocketAddr) -> Self {
        Self {
            shared,
            link,
            peer,
            source: None,
            view: None,
            leader: None,
        }
    }

    /// Starts a compiler in this place.
    pub(super) fn start(
        &mut self,
        place: sandbox::Place,
        command: Command,
    ) -> std::io::Result<Compiler> {
        let leader = match &self.leader {
            Some(leader) => Arc::clone(leader),
            None => Arc::clone(self.leader.insert(Arc::new(Leader::new()?))),
        };
        Compiler::start(place, command, self.shared.level, leader)
    }

    /// Until the connection ends; why it did.
    pub(super) fn run(mut self) -> String {
        let mut last = Instant::now();
        let why = loop {
            if self.shared.over() {
                break "the worker ends".into();
            }
            if last.elapsed() > IDLE {
                break "nothing was asked for long".into();
            }
            match self.turn() {
                Ok(true) => last = Instant::now(),
                Ok(false) => {}
                Err(Gone(why)) => break why,
            }
        };
        self.link.qp.disconnect();
        why
    }

    /// Whether there was a job.
    fn turn(&mut self) -> Result<bool, Gone> {
        let Some(Event::Message(bytes)) = self.link.next(LOOK, None)? else {
            return Ok(false);
        };
        let request = Request::decode(&bytes).map_err(|e| Gone(e.to_string()))?;
        let Request::Job(job) = request else {
            return Err(gone("room that was not asked for"));
        };
        let began = Instant::now();
        let mut end = match self.job(&job) {
            Ok(end) => end,
            Err(Stop::End(verdict, reason)) => End::new(job.id, verdict, reason),
            Err(Stop::Gone(gone)) => return Err(gone),
        };
        end.pressure = pressure();
        end.free = self.shared.free();
        // Sends come after the Writes before them (RFC 5041 5.3): the outputs are there when this is.
        self.link.send(&Report::End(end.clone()).encode())?;
        if end.verdict == Verdict::Done {
            self.shared.jobs.fetch_add(1, Ordering::SeqCst);
        }
        self.shared
            .events
            .job(self.peer, &job.name, &end, began.elapsed());
        Ok(true)
    }

    fn job(&mut self, job: &Job) -> Result<End, Stop> {
        if let Err(why) = check_job(&job.args) {
            return refuse(why);
        }
        if !is_source_name(&job.name) {
            return refuse("a name of a source that cannot be");
        }
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.@".contains(c);
        if !job.locale.chars().all(good)
            || job.locale.len() > 64
            || !job.cwd.starts_with('/')
            || job.cwd.contains('=')
        {
            return refuse("a locale or working directory that cannot be");
        }
        if (job.source.len == 0) != job.pull.is_some()
            || job.source.len > self.shared.config.size_limit
        {
            return stop(
                Verdict::Limit,
                format!("a source of {} bytes", job.source.len),
            );
        }
        let slots = self.shared.config.slots.into();
        let Some(_place) = Taken::take(&self.shared.running, slots) else {
            return stop(Verdict::Busy, "all slots are taken");
        };
        let language = if job.cxx { Language::Cxx } else { Language::C };
        let compiler = self.compiler(job, language)?;
        let shop = match Workshop::new(self.shared.folder.path(), job) {
            Ok(shop) => shop,
            Err(Unfit::Name) => {
                return refuse("a name of a source that cannot be");
            }
            Err(Unfit::Io(e)) => return Err(e.into()),
        };
        let mut end = End::new(job.id, Verdict::Done, "");
        let began = Instant::now();
        let preprocessed = if let Some(pull) = &job.pull {
            Some(self.preprocess(job, pull, &shop, &compiler)?)
        } else {
            self.read_source(job, &shop)?;
            None
        };
        end.times[0] = micros(began.elapsed());
        let config = &self.shared.config;
        let command = match shop.command(
            &compiler.command,
            job,
            language,
            config.memory,
            config.size_limit,
        ) {
            Ok(command) => command,
            Err(Unfit::Name) => {
                return stop(
                    Verdict::Trouble,
                    "the directory for jobs has a name that cannot be",
                );
            }
            Err(Unfit::Io(e)) => return Err(e.into()),
        };
        let running = self.start(compiler.place(&shop, None), command)?;
        let (how, took, killed) = self.wait_for(running)?;
        end.times[1] = micros(took);
        match how {
            Ended::NotStarted(e) => {
                return Err(trouble(&format!("cannot start {}: {e}", job.driver)));
            }
            Ended::Status(_) if killed => {
                return stop(
                    Verdict::Limit,
                    format!(
                        "the compiler took more than {} s",
                        self.shared.config.time_limit.as_secs()
                    ),
                );
            }
            Ended::Status(status) if !status.success() => {
                let reason = match status.signal() {
                    Some(signal) => format!("the compiler was ended by signal {signal}"),
                    None => format!(
                        "the compiler ended with status {}",
                        status.code().unwrap_or(-1)
                    ),
                };
                return stop(Verdict::Failed, reason);
            }
            Ended::Status(_) => {}
        }
        self.deliver(job, &shop, preprocessed, &mut end)?;
        Ok(end)
    }

    /// Our own compiler if it is the master's, or the master's.
    fn compiler(&mut self, job: &Job, language: Language) -> Result<Environment, Stop> {
        let why = match self.shared.environment(&job.driver, language) {
            Ok(own) if own.digest == job.digest => return Ok(own),
            Ok(_) => format!("its {} is another one", job.driver),
            Err(why) => why,
        };
        let Some(cache) = &self.shared.compilers else {
            return stop(Verdict::Environment, why);
        };
        let claim = match cache.find(&job.digest) {
            Found::There(kept) => return Ok(Environment::sent(job.digest, kept)),
            Found::Coming => {
                let why = "another connection brings the compiler";
                return stop(Verdict::Busy, why);
            }
            Found::Missing(claim) => claim,
        };
        let region = match self.ask(&Report::Compiler { id: job.id })? {
            Request::Compiler { id, region } if id == job.id => region,
            _ => return Err(gone("another message than a compiler").into()),
        };
        if region.len == 0 {
            return stop(Verdict::Environment, why);
        }
        if region.len > MAX_PACKED {
            let why = format!("a compiler of {} bytes", region.len);
            return stop(Verdict::Environment, why);
        }
        let mr = self
            .link
            .pd
            .alloc_mr(region.len as usize, Access::LOCAL_WRITE)?;
        transfer(
            &mut self.link,
            &mr,
            &region,
            region.len,
            |_, sge, remote| SendWr::read(0, remote).sge(sge),
        )?;
        match claim.install(Contents { mr: &mr, at: 0 }) {
            Ok(kept) => {
                self.shared.events.compiler(self.peer, region.len);
                Ok(Environment::sent(job.digest, kept))
            }
            Err(why) => stop(
                Verdict::Environment,
                format!("the compiler that came cannot be used: {why}"),
            ),
        }
    }

    /// RDMA Reads, as many at once as the connection allows; then the compiler's file.
    fn read_source(&mut self, job: &Job, shop: &Workshop) -> Result<(), Stop> {
        let Ok(len) = usize::try_from(job.source.len) else {
            return stop(Verdict::Limit, "a source that is too long");
        };
        if self.source.as_ref().is_none_or(|mr| mr.len() < len) {
            self.source = None;
            let mr = self.link.pd.alloc_mr(len.max(KEPT), Access::LOCAL_WRITE)?;
            self.source = Some(mr);
        }
        let Some(mr) = &self.source else {
            return stop(Verdict::Trouble, "no memory");
        };
        transfer(
            &mut self.link,
            mr,
            &job.source,
            job.source.len,
            |_, sge, remote| SendWr::read(0, remote).sge(sge),
        )?;
        let file = File::create_new(&shop.source)?;
        let mut at = 0;
        while at < len {
            match mr.write_to_file(&file, None, at, len - at) {
                Ok(0) => return stop(Verdict::Trouble, "no space for the source"),
                Ok(n) => at += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(trouble(&e)),
            }
        }
        Ok(())
    }

    /// Waits for the compiler's end; the end of the connection, or of its time, is the compiler's too.
    pub(super) fn wait_for(
        &mut self,
        mut compiler: Compiler,
    ) -> Result<(Ended, Duration, bool), Gone> {
        loop {
            if compiler.is_over() {
                return Ok(compiler.end());
            }
            if self.shared.over() {
                return Err(gone("the worker ends"));
            }
            if compiler.began.elapsed() > self.shared.config.time_limit {
                compiler.kill();
            }
            if let Some(Event::Message(_)) = self.link.next(LOOK, Some(compiler.bell()))? {
                return Err(gone("a message out of turn"));
            }
        }
    }

    /// Agrees on room if there is too little, and writes the outputs.
    fn deliver(
        &mut self,
        job: &Job,
        shop: &Workshop,
        preprocessed: Option<Preprocessed>,
        end: &mut End,
    ) -> Result<(), Stop> {
        let left = |e: std::io::Error| trouble(&format!("the compiler left no output: {e}"));
        let mut files = vec![(Output::Object, open_output(&shop.output()).map_err(left)?)];
        if let Some(path) = shop.split(job) {
            files.push((Output::Split, open_output(&path).map_err(left)?));
        }
        let notes = shop.notes(job).map_err(left)?;
        let (text, text_len) = open_output(&shop.diagnostics())?;
        // What the preprocessor said comes first.
        let (mut said, dependencies) = preprocessed
            .map(|p| (p.diagnostics, p.dependencies))
            .unwrap_or_default();
        text.take(MAX_DIAGNOSTICS.min(text_len))
            .read_to_end(&mut said)?;
        said.truncate(MAX_DIAGNOSTICS as usize);
        let lens = files.iter().map(|(_, (_, len))| *len);
        let lens = lens.chain([&said, &dependencies, &notes].map(|bytes| bytes.len() as u64));
        let need = lens.fold(0, u64::saturating_add);
        if need > self.shared.config.size_limit {
            return stop(Verdict::Limit, format!("outputs of {need} bytes"));
        }
        let room = if need > job.room.len {
            self.ask_for_room(job, need)?
        } else {
            job.room
        };
        let total = usize::try_from(need).unwrap_or(usize::MAX);
        // `OBJ TX`: registered for each object.
        let pd = &self.link.pd;
        let mr = pd.alloc_mr(total.max(1), Access::LOCAL_WRITE)?;
        let mut at = 0;
        for (what, (file, len)) in &files {
            end.outputs.push((*what, at as u64, *len));
            let until = at + *len as usize;
            while at < until {
                match mr.read_from_file(file, None, at, until - at) {
                    Ok(0) => return stop(Verdict::Trouble, "an output became shorter"),
                    Ok(n) => at += n,
                    Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e.into()),
                }
            }
        }
        for (bytes, what) in [
            (said, Output::Diagnostics),
            (dependencies, Output::Dependencies),
            (notes, Output::Notes),
        ] {
            if !bytes.is_empty() {
                mr.write(at, &bytes)?;
                end.outputs.push((what, at as u64, bytes.len() as u64));
                at += bytes.len();
            }
        }
        transfer(&mut self.link, &mr, &room, need, |_, sge, remote| {
            SendWr::write(0, remote).sge(sge)
        })?;
        Ok(())
    }

    fn ask_for_room(&mut self, job: &Job, need: u64) -> Result<Region, Stop> {
        match self.ask(&Report::More { id: job.id, need })? {
            Request::Room { id, room } if id == job.id && room.len >= need => Ok(room),
            Request::Room { id, room } if id == job.id && room.len == 0 => stop(
                Verdict::Limit,
                format!("the master has no room for {need} bytes"),
            ),
            _ => Err(gone("another message than room").into()),
        }
    }

    /// Sends a message that the master is to answer.
    pub(super) fn ask(&mut self, question: &Report) -> Result<Request, Gone> {
        self.link.send(&question.encode())?;
        let end = Instant::now() + PATIENCE;
        loop {
            if Instant::now() > end || self.shared.over() {
                return Err(gone("the master does not answer"));
            }
            if let Some(Event::Message(bytes)) = self.link.next(LOOK, None)? {
                return Request::decode(&bytes).map_err(|e| Gone(e.to_string()));
            }
        }
    }
}

/// The contents of a region, from the beginning.
struct Contents<'a> {
    mr: &'a Mr,
    at: usize,
}

impl Read for Contents<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let len = into.len().min(self.mr.len() - self.at);
        self.mr
            .read(self.at, &mut into[..len])
            .map_err(std::io::Error::other)?;
        self.at += len;
        Ok(len)
    }
}

/// Opens what a compiler left under this name, and its length. The compiler may be hostile: a link would lead out of its directory, and a FIFO would block.
pub(super) fn open_output(path: &Path) -> std::io::Result<(File, u64)> {
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    let about = file.metadata()?;
    if !about.is_file() || about.nlink() != 1 {
        return Err(std::io::Error::other("it is no file of its own"));
    }
    Ok((file, about.len()))
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// Moves `len` bytes between the beginning of a region of ours and one of the master's.
pub(super) fn transfer(
    link: &mut Link,
    mr: &Mr,
    remote: &Region,
    len: u64,
    wr: impl Fn(u64, weft_verbs::Sge, RemoteAddr) -> SendWr,
) -> Result<(), Gone> {
    let (mut posted, mut under_way) = (0, 0);
    let end = Instant::now() + PATIENCE + Duration::from_millis(len / 1000);
    loop {
        while posted < len && under_way < u32::from(DEPTH) {
            let n = CHUNK.min(len - posted);
            let sge = mr.sge(posted as usize, n as usize);
            link.post(wr(
                posted,
                sge,
                RemoteAddr {
                    addr: remote.addr + posted,
                    rkey: remote.rkey,
                },
            ))?;
            posted += n;
            under_way += 1;
        }
        if under_way == 0 {
            return Ok(());
        }
        match link.next(end.saturating_duration_since(Instant::now()), None)? {
            Some(Event::Done) => under_way -= 1,
            Some(Event::Message(_)) => return Err(gone("a message out of turn")),
            None => return Err(gone("the master's memory does not answer")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_are_files_of_their_own() {
        use rustix::fs::{CWD, Mode, mkfifoat};
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
