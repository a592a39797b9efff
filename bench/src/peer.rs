//! The peer process: it carries out what the suites of its parent ask ([`crate::process`]).

use crate::children::{read_line, write_line};
use crate::dgram::{clients, group, lossy};
use crate::driver::{Acceptor, Context, Responder};
use crate::error::{BenchError, Result};
use crate::process::{Reply, Request, Task, read_plan};
use crate::verbs::{memory, register, setup};
use crate::{exs, sdp, usage};
use serde::Serialize;
use serde_json::Value;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;

/// The peer's side: answers requests on standard input until it ends.
pub(crate) fn serve() -> Result<()> {
    let mut from = io::stdin().lock();
    let mut to = io::stdout().lock();
    let mut served = Served::default();
    loop {
        let Some(request) = read_line(&mut from)? else {
            return Ok(());
        };
        let mut reply = |reply: Reply| write_line(&mut to, &reply);
        match served.answer(request, &mut reply) {
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
    blast: Option<exs::Client>,
    sdp: HashMap<u32, sdp::Session>,
    devices: sdp::Devices,
}

impl Served {
    fn answer(
        &mut self,
        request: Request,
        reply: &mut dyn FnMut(Reply) -> Result<()>,
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
            Request::Task { task, plan } => self.task(task, plan, reply),
        }
    }

    /// The requests of suites other than operations.
    fn task(
        &mut self,
        task: Task,
        plan: Value,
        reply: &mut dyn FnMut(Reply) -> Result<()>,
    ) -> Result<()> {
        match task {
            Task::Register => {
                let rows = read_plan::<register::Plan>(plan)?.run(&mut self.context)?;
                reply(measured(&rows)?)
            }
            Task::Setup => read_plan::<setup::Plan>(plan)?.serve(&mut self.context, reply),
            Task::Hold => read_plan::<memory::Plan>(plan)?.serve(&mut self.context, reply),
            Task::Lossy => read_plan::<lossy::Plan>(plan)?.serve(reply),
            Task::Group => read_plan::<group::Plan>(plan)?.serve(reply),
            Task::Clients => read_plan::<clients::Plan>(plan)?.serve(reply),
            Task::Sdp => {
                let (id, plan): (u32, sdp::Plan) = read_plan(plan)?;
                let tell = |addr| reply(Reply::Listening { addr });
                let session = sdp::Session::accept(&mut self.devices, &plan, tell)?;
                self.sdp.insert(id, session);
                reply(Reply::Ready)
            }
            Task::SdpGo => {
                let (id, count): (u32, u64) = read_plan(plan)?;
                let Some(session) = self.sdp.get(&id) else {
                    return Err(BenchError::Peer(format!("there is no session {id}")));
                };
                let before = usage::cpu_seconds();
                reply(Reply::Ready)?;
                session.serve(count)?;
                reply(Reply::Done {
                    cpu: usage::cpu_seconds() - before,
                })
            }
            Task::SdpClose => {
                if let Some(session) = self.sdp.remove(&read_plan(plan)?) {
                    session.close(&mut self.devices);
                }
                reply(Reply::Closed)
            }
            Task::BlastServe => {
                let mut server = exs::Server::listen(SocketAddr::new(read_plan(plan)?, 0))?;
                reply(Reply::Listening {
                    addr: server.local_addr()?,
                })?;
                server.serve(None, |_, _| ())?;
                reply(Reply::Closed)
            }
            Task::BlastConnect => {
                self.blast = Some(exs::Client::connect(read_plan(plan)?)?);
                reply(Reply::Ready)
            }
            Task::Blast => {
                let client = self.blast.as_mut();
                let client = client.ok_or_else(|| BenchError::Peer("not connected".to_owned()))?;
                let run = client.run(&read_plan(plan)?, &mut |_, _, _| ())?;
                reply(measured(&run)?)
            }
        }
    }
}

fn measured(what: &impl Serialize) -> Result<Reply> {
    let value = serde_json::to_value(what).map_err(|e| BenchError::PeerGone(e.to_string()))?;
    Ok(Reply::Measured(value))
}
