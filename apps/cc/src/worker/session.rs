//! One connection of a worker: the requests to its master, the transfers, and the compilers that run for it.

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_session::{Broken, Event, MessageChannel};
use weft_verbs::any::Mr;
use weft_verbs::{MemError, RemoteAddr, SendWr};

use super::compile::{Compiler, Ended, Leader, Unfit};
use super::view::View;
use super::watch::Watch;
use super::{LOOK, Shared, sandbox};
use crate::link::Gone;
use crate::wire::{DEPTH, Region, Report, Request, Verdict};

/// Bytes that one RDMA operation moves at most.
const CHUNK: u64 = 1 << 20;
/// The time limit for a master's answer, or for access to its memory.
const PATIENCE: Duration = Duration::from_secs(30);
/// The same for a compiler, which the master packs first: clang has 300 MB.
const PACKING: Duration = Duration::from_mins(3);

/// A connection, and the state that is kept for its jobs.
pub(super) struct Session<'a> {
    pub(super) shared: &'a Shared,
    pub(super) link: MessageChannel,
    pub(super) peer: SocketAddr,
    /// `SRC RX` of the thesis: registered once, and again only for a longer source.
    pub(super) source: Option<Mr>,
    /// The master's tree, for jobs that are preprocessed here.
    pub(super) view: Option<View>,
    /// Of the process group of its compilers, once there was one.
    leader: Option<Arc<Leader>>,
}

/// The failure of a step of a job.
pub(super) enum Stop {
    /// The job ends with this result, the connection continues.
    End(Verdict, String),
    /// The connection is over.
    Gone(Gone),
}

impl From<Gone> for Stop {
    fn from(gone: Gone) -> Self {
        Self::Gone(gone)
    }
}

impl From<Broken> for Stop {
    fn from(broken: Broken) -> Self {
        Self::Gone(broken.into())
    }
}

/// A missing resource of the worker, or an output for which it has no room.
impl From<std::io::Error> for Stop {
    fn from(e: std::io::Error) -> Self {
        match e.kind() {
            std::io::ErrorKind::FileTooLarge => {
                Self::End(Verdict::Limit, "outputs that are too long".into())
            }
            _ => trouble(&e),
        }
    }
}

/// A name of a source, or the folder of a job that cannot be made.
impl From<Unfit> for Stop {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::Name => Self::End(Verdict::Refused, "a name of a source that cannot be".into()),
            // Of the tree that the master packed.
            Unfit::Io(e) if e.kind() == std::io::ErrorKind::InvalidData => {
                Self::End(Verdict::Refused, e.to_string())
            }
            Unfit::Io(e) => e.into(),
        }
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
    pub(super) fn new(shared: &'a Shared, link: MessageChannel, peer: SocketAddr) -> Self {
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
        let watch = place.alone.then(|| Watch {
            dir: place.dir.clone(),
            bytes: self.shared.config.size_limit.saturating_mul(2),
            memory: self.shared.config.memory,
        });
        Compiler::start(place, command, self.shared.level, leader, watch)
    }

    /// Waits for the compiler's end; the end of the connection, or of its time, is the compiler's too.
    pub(super) fn wait_for(
        &mut self,
        mut compiler: Compiler,
    ) -> Result<(Ended, Duration, Option<String>), Gone> {
        loop {
            if compiler.is_over() {
                return Ok(compiler.end());
            }
            if self.shared.over() {
                return Err(gone("the worker ends"));
            }
            if compiler.began.elapsed() > self.shared.config.time_limit {
                let most = self.shared.config.time_limit.as_secs();
                compiler.kill(format!("the compiler took more than {most} s"));
            }
            compiler.look();
            if let Some(Event::Message(_)) = self.link.next(LOOK, Some(compiler.bell()))? {
                return Err(gone("a message out of turn"));
            }
        }
    }

    /// Sends a message that the master is to answer.
    pub(super) fn ask(&mut self, question: &Report) -> Result<Request, Gone> {
        self.link.send(&question.encode())?;
        let patience = match question {
            Report::Compiler { .. } => PACKING,
            _ => PATIENCE,
        };
        let end = Instant::now() + patience;
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

/// Moves `len` bytes by RDMA Reads or Writes, as many at once as the connection allows, between the beginning of a region of ours and one of the master's.
pub(super) fn transfer(
    link: &mut MessageChannel,
    mr: &Mr,
    remote: &Region,
    len: u64,
    operation: fn(u64, RemoteAddr) -> SendWr,
) -> Result<(), Gone> {
    let (mut posted, mut under_way) = (0, 0);
    let end = Instant::now() + PATIENCE + Duration::from_millis(len / 1000);
    loop {
        while posted < len && under_way < u32::from(DEPTH) {
            let n = CHUNK.min(len - posted);
            let sge = mr.sge(posted as usize, n as usize);
            let remote = RemoteAddr {
                addr: remote.addr + posted,
                rkey: remote.rkey,
            };
            link.post(operation(0, remote).sge(sge))?;
            posted += n;
            under_way += 1;
        }
        if under_way == 0 {
            return Ok(());
        }
        match link.next(end.saturating_duration_since(Instant::now()), None)? {
            Some(Event::Done(_)) => under_way -= 1,
            Some(Event::Message(_)) => return Err(gone("a message out of turn")),
            None => return Err(gone("the master's memory does not answer")),
        }
    }
}
