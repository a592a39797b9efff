//! The peer process of the suites: the tasks that it carries out for them.

use crate::dgram::{clients, group, lossy};
use crate::error::{BenchError, Result};
use crate::process::{Reply, Task, read_plan, value};
use crate::{exs, sdp, usage};
use serde_json::Value;
use std::collections::HashMap;
use std::net::SocketAddr;
use weft_bench::driver::Context;
use weft_bench::peer::{OfVerbs, Replies, Tasks};

/// What the peer keeps between the tasks of a suite.
#[derive(Default)]
pub(crate) struct Served {
    blast: Option<exs::Client>,
    sdp: HashMap<u32, sdp::Session>,
    devices: sdp::Devices,
}

impl Tasks for Served {
    fn task(
        &mut self,
        context: &mut Context,
        task: Value,
        plan: Value,
        reply: Replies<'_>,
    ) -> Result<()> {
        let Ok(ours) = read_plan(task.clone()) else {
            return OfVerbs.task(context, task, plan, reply);
        };
        match ours {
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
                reply(Reply::Measured(value(run)?))
            }
        }
    }
}
