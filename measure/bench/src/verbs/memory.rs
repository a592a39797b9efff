//! Bytes of user-space memory for an idle connected QP.
//!
//! Both ends are fresh processes: in a process that has measured before, freed memory would be
//! reused and hide the memory of a connection.

use crate::args::CommonArgs;
use crate::driver::{Context, Transport, accept_one, param};
use crate::error::{BenchError, Result, stack};
use crate::process::{Peer, Reply, Task};
use crate::record::{Metric, Record};
use crate::usage;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use weft_verbs::QpInit;
use weft_verbs::cm::{self, Listener};

/// Connections in each of the two processes.
const QPS: u32 = 5_000;
const QUICK_QPS: u32 = 1_000;
/// Descriptors that a process needs in addition to those of its connections.
const OTHER_DESCRIPTORS: u64 = 64;

/// The end, and the number of connections to hold.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    pub count: u32,
    /// The address to connect to; `None`: accept.
    pub to: Option<SocketAddr>,
}

pub fn measure(common: &CommonArgs) -> Result<Vec<Record>> {
    let count = if common.effort.quick { QUICK_QPS } else { QPS };
    // A process's memory hardly varies: a few runs show that it does not.
    let runs = common.effort.runs().min(3);
    let (mut accepting, mut connecting) = (Vec::new(), Vec::new());
    for _ in 0..runs {
        let mut server = Peer::spawn(&[])?;
        let mut client = Peer::spawn(&[])?;
        server.task(Task::Hold, &Plan { count, to: None })?;
        let to = Some(server.listening()?);
        client.task(Task::Hold, &Plan { count, to })?;
        for (peer, samples) in [
            (&mut client, &mut connecting),
            (&mut server, &mut accepting),
        ] {
            samples.push(peer.bytes()? as f64 / f64::from(count));
        }
    }
    let record = |case: &str, samples: &[f64]| {
        let record = Record::of("memory", "tcp", "weft", 0, Metric::bytes_per_qp, samples)?;
        Some(record.with_case(format!("{case}, {count} connections")))
    };
    Ok([("connecting", connecting), ("accepting", accepting)]
        .iter()
        .filter_map(|(case, samples)| record(case, samples))
        .collect())
}

/// Lets this process have as many descriptors as `count` connections need.
fn allow_descriptors(count: u32) -> Result<()> {
    let need = u64::from(count) * 2 + OTHER_DESCRIPTORS;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < need) {
        limit.current = limit.maximum;
        setrlimit(Resource::Nofile, limit)
            .map_err(|error| BenchError::system("raise the limit of descriptors")(error.into()))?;
    }
    Ok(())
}

impl Plan {
    /// Holds the connections until the process ends.
    pub fn serve(
        &self,
        context: &mut Context,
        reply: &mut dyn FnMut(Reply) -> Result<()>,
    ) -> Result<()> {
        allow_descriptors(self.count)?;
        let (device, pd) = context.device(Transport::Tcp)?;
        let listener = if self.to.is_some() {
            None
        } else {
            let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            let listener =
                Listener::bind(device, addr, 128, &param(true)).map_err(stack("listen"))?;
            reply(Reply::Listening {
                addr: listener.local_addr(),
            })?;
            Some(listener)
        };
        let cq = device.create_cq(1024, None).map_err(stack("create a CQ"))?;
        let init = QpInit::new(&cq, &cq);
        let mut held = Vec::with_capacity(self.count as usize);
        let connection = || match (&listener, self.to) {
            (Some(listener), _) => {
                let qp = pd.create_qp(&init).map_err(stack("create a QP"))?;
                accept_one(listener, qp, true)
            }
            (None, Some(to)) => cm::connect(to, pd, &init, &param(true)).map_err(stack("connect")),
            (None, None) => Err(BenchError::Usage("neither end".to_owned())),
        };
        let before = usage::private_bytes().map_err(BenchError::system("read smaps_rollup"))?;
        for _ in 0..self.count {
            held.push(connection()?);
        }
        let after = usage::private_bytes().map_err(BenchError::system("read smaps_rollup"))?;
        context.hold(held);
        reply(Reply::Held {
            bytes: after.saturating_sub(before),
        })
    }
}
