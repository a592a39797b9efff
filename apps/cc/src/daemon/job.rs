//! One job: on a worker, after a failure on another one, and then here.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_session::{Broken, Event};
use weft_sys::memfd;
use weft_verbs::Access;
use weft_verbs::any::Mr;

use super::files::Roots;
use super::history::CompileRecord;
use super::pool::{Conn, Pick, dial};
use super::{LOOK, Running, Shared};
use crate::Endpoint;
use crate::compiler_package;
use crate::digest::{Digest, Parts};
use crate::ipc::{JobAsk, Line, PullAsk};
use crate::link::Gone;
use crate::lock;
use crate::options::Language;
use crate::wire::{End, Job, MAX_DIAGNOSTICS, Output, Pull, Region, Report, Request, Verdict};

/// How often, and how long, one worker may answer that it is busy before the job goes to another one.
const MAX_BUSY: u32 = 25;
const MAX_BUSY_TIME: Duration = Duration::from_secs(10);
/// Characters of a worker's reason that are kept.
const MAX_REASON: usize = 200;
/// Workers that a job is tried on.
const ATTEMPTS: usize = 3;
/// Packed compilers that are kept.
const MAX_COMPILERS: usize = 8;

/// The result of a job.
pub(super) enum Outcome {
    /// A worker did it.
    Done {
        outputs: Vec<(Output, u64, u64)>,
        room: OwnedFd,
        worker: Endpoint,
    },
    /// It has to be done here, because.
    Here(String),
    /// It has to be preprocessed here, because.
    Preprocess(String),
    /// The compilation has ended.
    Cancelled,
}

/// The end of an attempt without a report of a worker.
enum Lost {
    /// The connection is over.
    Gone(String),
    /// The compilation has ended.
    Cancelled,
}

impl From<Broken> for Lost {
    fn from(broken: Broken) -> Self {
        Self::Gone(broken.to_string())
    }
}

impl From<Gone> for Lost {
    fn from(Gone(why): Gone) -> Self {
        Self::Gone(why)
    }
}

fn lacks(e: impl std::fmt::Display) -> Lost {
    Lost::Gone(format!("this machine lacks something: {e}"))
}

/// A range of a region, which fits into memory.
fn region(mr: &Mr, at: u64, len: u64) -> Region {
    let remote = mr.remote(at as usize);
    Region {
        rkey: remote.rkey,
        addr: remote.addr,
        len,
    }
}

/// The data of a job whose source its worker preprocesses.
pub(super) struct Pulling {
    pull: Pull,
    roots: Roots,
}

/// The part of a job that is the same on each worker.
struct Task<'a> {
    id: u32,
    ask: &'a JobAsk,
    /// Of the compiler, which a worker may ask for.
    digest: &'a Digest,
    source: Option<&'a OwnedFd>,
    pull: Option<&'a Pulling>,
    line: &'a Line,
    end: Instant,
}

/// A region that the worker can read, with a copy: the files may change, and become shorter, at any time.
fn export(conn: &Conn, contents: &[u8]) -> Result<Mr, Lost> {
    let access = Access::REMOTE_READ | Access::LOCAL_WRITE;
    let mr = conn.link.pd().alloc_mr(contents.len(), access);
    let mr = mr.map_err(lacks)?;
    mr.write(0, contents).map_err(lacks)?;
    Ok(mr)
}

/// Compilers that workers asked for, packed, and of the others why they are not.
#[derive(Default)]
pub(super) struct Packed(Mutex<HashMap<Digest, Result<Arc<File>, String>>>);

impl Packed {
    /// The compiler of a job. It is packed once, and others wait for it.
    fn of(&self, ask: &JobAsk, digest: &Digest) -> Result<Arc<File>, String> {
        let mut all = lock(&self.0);
        if let Some(packed) = all.get(digest) {
            return packed.clone();
        }
        // Those before have changed, mostly.
        if all.len() >= MAX_COMPILERS {
            all.clear();
        }
        let pack = || {
            let parts = Parts::find(&ask.driver, ask.language, &ask.path)?;
            let mut bytes = Vec::new();
            compiler_package::pack(&parts, digest, &mut bytes)?;
            let len = bytes.len() as u64;
            if len > compiler_package::MAX_PACKED {
                return Err(format!("it has {len} bytes"));
            }
            let told = |e: std::io::Error| e.to_string();
            let file = File::from(memfd::create("weft-cc-compiler", len).map_err(told)?);
            file.write_all_at(&bytes, 0).map_err(told)?;
            Ok(Arc::new(file))
        };
        let packed = pack();
        all.insert(*digest, packed.clone());
        packed
    }
}

/// The number of a job, listed while this is there.
struct Listed<'a>(&'a Shared, u64);

impl Listed<'_> {
    fn at(&self, worker: Option<Endpoint>) {
        if let Some(job) = lock(&self.0.state).jobs.get_mut(&self.1) {
            job.worker = worker;
        }
    }
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).jobs.remove(&self.1);
        self.0.changed.notify_all();
    }
}

/// A worker's reason for terminals and tables: one short line.
fn plain(reason: &str) -> String {
    let reason = weft_service::text::printable(reason.as_bytes());
    reason.chars().take(MAX_REASON).collect()
}

impl Shared {
    /// Enters a job into the list of those that run.
    fn list(&self, source: &str) -> Listed<'_> {
        let mut state = lock(&self.state);
        state.next += 1;
        let number = state.next;
        let running = Running {
            source: source.to_owned(),
            worker: None,
            since: Instant::now(),
        };
        state.jobs.insert(number, running);
        Listed(self, number)
    }

    /// The data for a worker that preprocesses too.
    fn pulling(&self, ask: &JobAsk, pull: &PullAsk) -> Result<Pulling, String> {
        let system = self
            .system
            .of(&ask.driver, ask.language, &pull.search, &ask.path)?;
        Ok(Pulling {
            roots: Roots::new(pull, &system),
            pull: Pull {
                cpp: pull.cpp.clone(),
                system,
            },
        })
    }

    pub(super) fn job(
        &self,
        ask: &JobAsk,
        source: Option<&OwnedFd>,
        line: &Line,
        trail: &mut CompileRecord<'_>,
    ) -> Outcome {
        let asked = self.now();
        if source.is_none() && ask.pull.is_none() {
            return Outcome::Here("the source did not come".into());
        }
        let digest = match self.digests.of(&ask.driver, ask.language, &ask.path) {
            Ok(digest) => digest,
            Err(why) => {
                return Outcome::Here(format!(
                    "the compiler here is not one that workers can have: {why}"
                ));
            }
        };
        let pull = match ask.pull.as_ref().map(|pull| self.pulling(ask, pull)) {
            None => None,
            Some(Ok(pull)) => Some(pull),
            Some(Err(why)) => return Outcome::Preprocess(why),
        };
        let listed = self.list(&ask.source);
        let number = listed.1;
        let end = Instant::now() + self.config.patience;
        let task = Task {
            id: number as u32,
            ask,
            digest: &digest,
            source,
            pull: pull.as_ref(),
            line,
            end,
        };
        let mut tried: Vec<Endpoint> = Vec::new();
        let mut busy: HashMap<Endpoint, (u32, Instant)> = HashMap::new();
        let mut why = String::new();
        while tried.len() < ATTEMPTS {
            if Instant::now() > end {
                why = "no worker did it in time".into();
                break;
            }
            let (worker, conn) = match self.pick(ask, &digest, &tried) {
                Pick::Worker(worker, conn) => (worker, conn),
                Pick::Wait => {
                    let state = lock(&self.state);
                    drop(self.changed.wait_timeout(state, LOOK));
                    if line.stirs() {
                        return Outcome::Cancelled;
                    }
                    continue;
                }
                Pick::Nobody(trouble) => {
                    if why.is_empty() {
                        why = trouble;
                    }
                    break;
                }
            };
            listed.at(Some(worker.clone()));
            let began = self.now();
            let attempt = self.attempt(&worker, conn, &task);
            listed.at(None);
            self.changed.notify_all();
            match attempt {
                Ok((end, room)) => match end.verdict {
                    Verdict::Done => {
                        lock(&self.state).done += 1;
                        trail.done(&ask.source, &worker, (asked, began), &end, ask.len);
                        return Outcome::Done {
                            outputs: end.outputs,
                            room,
                            worker,
                        };
                    }
                    // The compiler here has the last word.
                    Verdict::Failed => {
                        return Outcome::Here(format!(
                            "the compiler failed on a worker: {}",
                            end.reason
                        ));
                    }
                    Verdict::Busy => {
                        lock(&self.state).pools.of(ask.plain).busy(&worker);
                        let since = busy.entry(worker.clone()).or_insert((0, Instant::now()));
                        since.0 += 1;
                        if since.0 < MAX_BUSY && since.1.elapsed() < MAX_BUSY_TIME {
                            continue;
                        }
                        why = format!("{worker}: it stays busy");
                    }
                    Verdict::Environment => {
                        lock(&self.state)
                            .pools
                            .of(ask.plain)
                            .unfit(&worker, digest, &end.reason);
                        why = format!("{worker}: {}", end.reason);
                    }
                    Verdict::Refused if pull.is_some() => {
                        return Outcome::Preprocess(end.reason);
                    }
                    Verdict::Refused | Verdict::Limit | Verdict::Trouble => {
                        why = format!("{worker}: {}", end.reason);
                    }
                },
                Err(Lost::Gone(gone)) => why = format!("{worker}: {gone}"),
                Err(Lost::Cancelled) => return Outcome::Cancelled,
            }
            tracing::info!("{}: {why}", ask.source);
            tried.push(worker);
            lock(&self.state).again += 1;
        }
        Outcome::Here(if why.is_empty() {
            "no worker is named".into()
        } else {
            why
        })
    }

    fn pick(&self, ask: &JobAsk, digest: &Digest, tried: &[Endpoint]) -> Pick {
        let mut state = lock(&self.state);
        state.pools.of(ask.plain).pick(&ask.workers, digest, tried)
    }

    /// One job on one worker, whose slot is given back.
    fn attempt(
        &self,
        worker: &Endpoint,
        conn: Option<Conn>,
        task: &Task<'_>,
    ) -> Result<(End, OwnedFd), Lost> {
        let plain = task.ask.plain;
        // One that was kept may have ended since.
        let kept = conn.and_then(|mut conn| {
            matches!(conn.link.next(Duration::ZERO, None), Ok(None)).then_some(conn)
        });
        let kept = kept.filter(|conn| conn.link.is_alive());
        let dialled = match kept {
            Some(conn) => Ok(conn),
            None => dial(&self.device, &*self.config.keys, worker, plain),
        };
        let mut conn = match dialled {
            Ok(conn) => conn,
            Err(refusal) => {
                lock(&self.state)
                    .pools
                    .of(plain)
                    .failed(worker, &refusal.why);
                return Err(Lost::Gone(refusal.why));
            }
        };
        lock(&self.state).pools.of(plain).connected(worker, &conn);
        self.changed.notify_all();
        let done = self.drive(&mut conn, task);
        let mut state = lock(&self.state);
        match &done {
            Ok((end, _)) => state
                .pools
                .of(plain)
                .give_back(worker, conn, end, task.ask.len),
            Err(Lost::Gone(why)) => state.pools.of(plain).failed(worker, why),
            Err(Lost::Cancelled) => state.pools.of(plain).cancelled(worker),
        }
        done
    }

    /// The worker drives; here are only the two regions, and room if it asks for more.
    fn drive(&self, conn: &mut Conn, task: &Task<'_>) -> Result<(End, OwnedFd), Lost> {
        let Task { id, ask, .. } = *task;
        let len = usize::try_from(ask.at.saturating_add(ask.len)).map_err(lacks)?;
        let register = |source| conn.link.pd().reg_memfd(source, len, Access::REMOTE_READ);
        let source = task.source.map(register).transpose().map_err(lacks)?;
        let room_file = memfd::create_growing("weft-cc-room").map_err(lacks)?;
        let access = Access::REMOTE_WRITE | Access::LOCAL_WRITE;
        let make_room = |conn: &Conn, len: u64| {
            memfd::grow(&room_file, len).map_err(lacks)?;
            let mr = conn.link.pd().reg_memfd(&room_file, len as usize, access);
            mr.map_err(lacks)
        };
        let mut room = make_room(conn, self.config.room)?;
        let request = Request::Job(Job {
            id,
            cxx: ask.language == Language::Cxx,
            source: source
                .as_ref()
                .map_or_else(Region::default, |mr| region(mr, ask.at, ask.len)),
            room: region(&room, 0, self.config.room),
            digest: *task.digest,
            driver: ask.name.clone(),
            locale: ask.locale.clone(),
            cwd: ask.cwd.clone(),
            name: ask.source.clone(),
            args: ask.args.clone(),
            beside: ask.beside.clone(),
            pull: task.pull.map(|pulling| pulling.pull.clone()),
            tree: ask.tree.clone(),
        });
        let Some(bytes) = request.encode() else {
            // The connection is as good as before.
            return Ok((
                End::new(id, Verdict::Refused, "a command that is too long"),
                room_file,
            ));
        };
        let outcome = self.converse(conn, &bytes, task, &mut room, &make_room);
        if outcome.is_err() {
            // The connection uses the memory, so it ends first; and the worker learns that the job was cancelled.
            conn.link.qp.disconnect();
        }
        let limit = room.len() as u64;
        // From here on the worker reaches neither.
        drop(source);
        drop(room);
        let mut end = outcome?;
        for (what, _, len) in &mut end.outputs {
            if *what == Output::Diagnostics {
                *len = (*len).min(MAX_DIAGNOSTICS);
            }
        }
        let within = |&(_, at, len): &(Output, u64, u64)| {
            at.checked_add(len).is_some_and(|end| end <= limit)
        };
        let whole = end
            .outputs
            .iter()
            .any(|&(what, _, len)| what == Output::Object && len > 0);
        if end.verdict == Verdict::Done && !(whole && end.outputs.iter().all(within)) {
            conn.link.qp.disconnect();
            return Err(Lost::Gone("it reports outputs that cannot be".into()));
        }
        Ok((end, room_file))
    }

    fn converse(
        &self,
        conn: &mut Conn,
        request: &[u8],
        task: &Task<'_>,
        room: &mut Mr,
        make_room: &dyn Fn(&Conn, u64) -> Result<Mr, Lost>,
    ) -> Result<End, Lost> {
        let gone = |why: &str| Lost::Gone(why.into());
        let (id, pull) = (task.id, task.pull);
        conn.link.send(request)?;
        // The memory that the worker reads, until its next message.
        let mut _read = None;
        let mut unsent = None;
        loop {
            let left = task.end.saturating_duration_since(Instant::now());
            let event = conn.link.next(left, Some(task.line.as_fd()))?;
            if task.line.stirs() {
                return Err(Lost::Cancelled);
            }
            if Instant::now() > task.end {
                return Err(gone("it takes too long"));
            }
            let Some(Event::Message(bytes)) = event else {
                continue;
            };
            let answer = match Report::decode(&bytes).map_err(|e| Lost::Gone(e.to_string()))? {
                Report::End(mut end) if end.id == id => {
                    end.reason = plain(&end.reason);
                    if let Some(why) = unsent {
                        end.reason = format!("{}, and ours cannot be sent: {why}", end.reason);
                    }
                    return Ok(end);
                }
                Report::End(end) if end.id == 0 && end.verdict == Verdict::Refused => {
                    return Err(gone("our key is not authorised there"));
                }
                Report::More { id: of, need } if of == id => {
                    let granted = if need > room.len() as u64 && need <= self.config.most_room {
                        *room = make_room(conn, need)?;
                        region(room, 0, need)
                    } else {
                        Region::default()
                    };
                    Request::Room { id, room: granted }
                }
                Report::Need { id: of, paths } if of == id => {
                    let Some(pulling) = pull else {
                        return Err(gone("it asks for files of a job that needs none"));
                    };
                    let (entries, contents) = conn.served.answer(&paths, &pulling.roots);
                    _read = None;
                    let mut from = Region::default();
                    if !contents.is_empty() {
                        let mr = export(conn, &contents)?;
                        from = region(&mr, 0, contents.len() as u64);
                        _read = Some(mr);
                    }
                    Request::Files {
                        id,
                        region: from,
                        entries,
                    }
                }
                Report::Compiler { id: of } if of == id => {
                    _read = None;
                    let mut from = Region::default();
                    match self.packed.of(task.ask, task.digest) {
                        Ok(packed) => {
                            let len = packed.metadata().map_err(lacks)?.len();
                            let pd = conn.link.pd();
                            let mr = pd.reg_memfd(&*packed, len as usize, Access::REMOTE_READ);
                            let mr = mr.map_err(lacks)?;
                            from = region(&mr, 0, len);
                            _read = Some(mr);
                        }
                        Err(why) => unsent = Some(why),
                    }
                    Request::Compiler { id, region: from }
                }
                Report::Check { id: of, nodes } if of == id && pull.is_some() => {
                    let nodes = conn.served.stale(nodes);
                    Request::Stale { id, nodes }
                }
                _ => return Err(gone("a report of another job")),
            };
            conn.link.send(&answer.encode().unwrap_or_default())?;
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_reason_is_one_short_line() {
        assert_eq!(super::plain("a\n\x1b[2Jé\u{9b}b"), r"a\n\u{1b}[2Jé\u{9b}b");
        assert_eq!(super::plain(&"é".repeat(400)).chars().count(), 200);
    }
}
