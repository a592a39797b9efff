//! The jobs of one connection, one after the other: the source is fetched, or preprocessed here, and its outputs are sent.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::process::ExitStatusExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use weft_service::Permit;
use weft_service::text::printable;
use weft_session::Event;
use weft_verbs::any::Mr;
use weft_verbs::{Access, SendWr};

use super::compile::tree::Source;
use super::compile::{Ended, JobDir, Unfit, open_output, read_whole};
use super::pull::Preprocessed;
use super::session::{Session, Stop, gone, refuse, stop, transfer, trouble};
use super::{Environment, LOOK, pressure};
use crate::compiler_package::{Found, MAX_PACKED};
use crate::link::Gone;
use crate::options::{Family, Language, check_job, is_beside, is_source_name};
use crate::tree;
use crate::wire::{End, Job, MAX_DIAGNOSTICS, Output, Region, Report, Request, Verdict};

/// A connection without a job for so long ends.
const IDLE: Duration = Duration::from_mins(10);
/// The minimum length of a region that is kept.
const KEPT: usize = 4 << 20;
/// A longer region is not kept for the next job: there may be many connections.
const KEPT_AT_MOST: usize = 64 << 20;

impl Session<'_> {
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
        self.source.take_if(|mr| mr.len() > KEPT_AT_MOST);
        end.pressure = pressure();
        end.free = self.shared.free();
        // Sends come after the Writes before them (RFC 5041 5.3): the outputs are there when this is.
        self.link.send(&Report::End(end.clone()).encode())?;
        let (peer, name) = (self.peer, printable(job.name.as_bytes()));
        if end.verdict == Verdict::Done {
            self.shared.jobs.fetch_add(1, Ordering::SeqCst);
            tracing::info!("{peer}: {name}: {:.2} s", began.elapsed().as_secs_f64());
        } else {
            tracing::info!("{peer}: {name}: {:?}: {}", end.verdict, end.reason);
        }
        Ok(true)
    }

    fn job(&mut self, job: &Job) -> Result<End, Stop> {
        let Some(family) = Family::of(&job.driver) else {
            let why = format!("`{}` is no compiler that workers start", job.driver);
            return stop(Verdict::Environment, why);
        };
        if let Err(why) = check_job(family, &job.args) {
            return refuse(why);
        }
        let is_clang = family == Family::Clang;
        if job.tree.is_some() != is_clang || is_clang && job.pull.is_some() {
            return refuse("a tree is for clang alone, and clang has a tree");
        }
        if let Some(Err(why)) = job
            .tree
            .as_ref()
            .map(|tree| tree::check_job(tree, &job.cwd, &job.name))
        {
            return refuse(why);
        }
        if !is_source_name(&job.name) || !is_beside(&job.beside) {
            return refuse("a name of a source or an output that cannot be");
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
        let Some(_permit) = Permit::take(&self.shared.running, slots) else {
            return stop(Verdict::Busy, "all slots are taken");
        };
        let language = if job.cxx { Language::Cxx } else { Language::C };
        let compiler = self.compiler(job, language)?;
        if compiler.family != family {
            return refuse("a compiler under the name of another one");
        }
        let mut end = End::new(job.id, Verdict::Done, "");
        let began = Instant::now();
        let (shop, preprocessed) = self.shop(job, &compiler)?;
        end.times[0] = micros(began.elapsed());
        let limits = self.shared.limits(&compiler);
        let made = match &job.tree {
            Some(tree) => shop.clang(&compiler.command, job, tree, &limits),
            None => shop.command(&compiler.command, job, language, &limits),
        };
        let command = match made {
            Ok(command) => command,
            Err(Unfit::Name) => {
                return stop(
                    Verdict::Trouble,
                    "the directory for jobs has a name that cannot be",
                );
            }
            Err(Unfit::Io(e)) => return Err(e.into()),
        };
        // clang finds no headers of this machine.
        let view = is_clang.then(|| shop.path());
        let running = self.start(compiler.place(&shop, view), command)?;
        let (how, took, killed) = self.wait_for(running)?;
        end.times[1] = micros(took);
        if let Some(why) = killed {
            return stop(Verdict::Limit, why);
        }
        match how {
            Ended::NotStarted(e) => {
                return Err(trouble(&format!("cannot start {}: {e}", job.driver)));
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
        if let Some(file) = shop.foreign(&mut self.shared.room())? {
            return stop(
                Verdict::Failed,
                format!("the assembler read {file}, which is of this machine"),
            );
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
            .pd()
            .alloc_mr(region.len as usize, Access::LOCAL_WRITE)?;
        transfer(&mut self.link, &mr, &region, region.len, SendWr::read)?;
        match claim.install(Contents { mr: &mr, at: 0 }) {
            Ok(kept) => {
                self.shared.sent_compilers.fetch_add(1, Ordering::SeqCst);
                tracing::info!(
                    "{}: its compiler came, {:.1} MiB packed",
                    self.peer,
                    region.len as f64 / 1_048_576.0
                );
                Ok(Environment::sent(job.digest, kept))
            }
            Err(why) => stop(
                Verdict::Environment,
                format!("the compiler that came cannot be used: {why}"),
            ),
        }
    }

    /// The folder of a job with its source, which is fetched, or preprocessed here.
    fn shop(
        &mut self,
        job: &Job,
        compiler: &Environment,
    ) -> Result<(JobDir, Option<Preprocessed>), Stop> {
        let place = self.shared.folder.path();
        if job.tree.is_some() {
            let mr = self.read_source(job)?;
            let shop = JobDir::of_tree(place, job, mr, job.source.len)?;
            return Ok((shop, None));
        }
        let shop = JobDir::new(place, job)?;
        if let Some(pull) = &job.pull {
            let preprocessed = self.preprocess(job, pull, &shop, compiler)?;
            return Ok((shop, Some(preprocessed)));
        }
        let mr = self.read_source(job)?;
        write_to(mr, 0, job.source.len, &File::create_new(&shop.source)?)?;
        Ok((shop, None))
    }

    /// RDMA Reads, as many at once as the connection allows.
    fn read_source(&mut self, job: &Job) -> Result<&Mr, Stop> {
        let Ok(len) = usize::try_from(job.source.len) else {
            return stop(Verdict::Limit, "a source that is too long");
        };
        if self.source.as_ref().is_none_or(|mr| mr.len() < len) {
            self.source = None;
            let mr = self
                .link
                .pd()
                .alloc_mr(len.max(KEPT), Access::LOCAL_WRITE)?;
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
            SendWr::read,
        )?;
        Ok(mr)
    }

    /// Agrees on room if there is too little, and writes the outputs.
    fn deliver(
        &mut self,
        job: &Job,
        shop: &JobDir,
        preprocessed: Option<Preprocessed>,
        end: &mut End,
    ) -> Result<(), Stop> {
        let left = |e: std::io::Error| trouble(&format!("the compiler left no output: {e}"));
        let mut files = vec![(Output::Object, open_output(&shop.output()).map_err(left)?)];
        if let Some(path) = shop.split(job) {
            files.push((Output::Split, open_output(&path).map_err(left)?));
        }
        let notes = match shop.notes(job, &mut self.shared.room()) {
            Err(e) if e.kind() != ErrorKind::FileTooLarge => return Err(left(e)),
            notes => notes?,
        };
        // The preprocessor's messages come first.
        let (mut said, mut dependencies) = preprocessed
            .map(|p| (p.diagnostics, p.dependencies))
            .unwrap_or_default();
        said.extend(shop.messages()?);
        said.truncate(MAX_DIAGNOSTICS as usize);
        if job.tree.is_some() {
            let mut room = self.shared.room();
            let list = shop.read_files(&mut room)?;
            dependencies = list.or_else(|why| stop(Verdict::Failed, why))?.into();
            if shop.is_named_in(&read_whole(&shop.output(), &mut room)?) {
                let why = "the object has a name of a folder of this machine in it";
                return stop(Verdict::Failed, why);
            }
        }
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
        let pd = self.link.pd();
        let mr = pd.alloc_mr(total.max(1), Access::LOCAL_WRITE)?;
        let mut at = 0;
        for (what, (file, len)) in &files {
            end.outputs.push((*what, at as u64, *len));
            let until = at + *len as usize;
            while at < until {
                match mr.read_from_file(file, None, at, until - at) {
                    Ok(0) => return stop(Verdict::Trouble, "an output became shorter"),
                    Ok(n) => at += n,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
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
        transfer(&mut self.link, &mr, &room, need, SendWr::write)?;
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
}

/// Copies a part of a region into a file.
fn write_to(mr: &Mr, at: u64, len: u64, to: &File) -> std::io::Result<()> {
    let (mut at, len) = (at as usize, len as usize);
    let end = at + len;
    while at < end {
        match mr.write_to_file(to, None, at, end - at) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(n) => at += n,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

impl Source for Mr {
    fn read(&self, at: u64, into: &mut [u8]) -> std::io::Result<usize> {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        let len = into.len().min(self.len().saturating_sub(at));
        Mr::read(self, at, &mut into[..len]).map_err(std::io::Error::other)?;
        Ok(len)
    }

    fn copy(&self, at: u64, len: u64, to: &File) -> std::io::Result<()> {
        write_to(self, at, len, to)
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

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}
