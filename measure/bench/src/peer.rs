//! The peer process: it carries out what the suites of its parent ask ([`crate::process`]).

use crate::children::{read_line, write_line};
use crate::driver::{Acceptor, Context, Responder};
use crate::error::{BenchError, Result};
use crate::process::{Reply, Request, Task, read_plan, value};
use crate::usage;
use crate::verbs::{memory, register, setup};
use serde_json::Value;
use std::collections::HashMap;
use std::io;

/// How a peer replies.
pub type Replies<'a> = &'a mut dyn FnMut(Reply) -> Result<()>;

/// The tasks of suites for their peer, beside operations.
pub trait Tasks {
    /// Carries out a task.
    fn task(
        &mut self,
        context: &mut Context,
        task: Value,
        plan: Value,
        reply: Replies<'_>,
    ) -> Result<()>;
}

/// The peer's side: answers requests on standard input until it ends.
pub fn serve(tasks: &mut dyn Tasks) -> Result<()> {
    let mut from = io::stdin().lock();
    let mut to = io::stdout().lock();
    let mut served = Served::default();
    loop {
        let Some(request) = read_line(&mut from)? else {
            return Ok(());
        };
        let mut reply = |reply: Reply| write_line(&mut to, &reply);
        match served.answer(request, tasks, &mut reply) {
            Err(BenchError::PeerGone(why)) => return Err(BenchError::PeerGone(why)),
            Err(error) => reply(Reply::Failed {
                why: error.to_string(),
            })?,
            Ok(()) => {}
        }
    }
}

#[derive(Default)]
struct Served {
    sessions: HashMap<u32, Box<dyn Responder>>,
    context: Context,
}

impl Served {
    fn answer(
        &mut self,
        request: Request,
        tasks: &mut dyn Tasks,
        reply: Replies<'_>,
    ) -> Result<()> {
        match request {
            Request::Open { id, spec } => {
                let acceptor = Acceptor::listen(&mut self.context, &spec)?;
                reply(Reply::Listening {
                    addr: acceptor.addr()?,
                })?;
                let responder = acceptor.accept(&mut self.context, &spec)?;
                let remote = responder.remote();
                self.sessions.insert(id, responder);
                reply(Reply::Opened { remote })
            }
            Request::Go { id, count, remote } => {
                let Some(session) = self.sessions.get_mut(&id) else {
                    return Err(BenchError::Peer(format!("there is no session {id}")));
                };
                let mut run = || {
                    session.prepare(count, remote)?;
                    let before = usage::cpu_seconds();
                    reply(Reply::Ready)?;
                    session.serve(count)?;
                    reply(Reply::Done {
                        cpu: usage::cpu_seconds() - before,
                    })
                };
                let result = run();
                if result.is_err() {
                    // The closed connection notifies the parent in the middle of a transfer.
                    self.sessions.remove(&id);
                }
                result
            }
            Request::Close { id } => {
                self.sessions.remove(&id);
                reply(Reply::Closed)
            }
            Request::Task { task, plan } => tasks.task(&mut self.context, task, plan, reply),
        }
    }
}

/// The tasks of the suite of verbs.
pub struct OfVerbs;

impl Tasks for OfVerbs {
    fn task(
        &mut self,
        context: &mut Context,
        task: Value,
        plan: Value,
        reply: Replies<'_>,
    ) -> Result<()> {
        match read_plan(task)? {
            Task::Register => {
                let rows = read_plan::<register::Plan>(plan)?.run(context)?;
                reply(Reply::Measured(value(rows)?))
            }
            Task::Setup => read_plan::<setup::Plan>(plan)?.serve(context, reply),
            Task::Hold => read_plan::<memory::Plan>(plan)?.serve(context, reply),
        }
    }
}
