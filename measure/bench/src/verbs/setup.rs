//! The steps of a connection's life: thesis table 4.1, compared with a TCP connection.

use crate::args::CommonArgs;
use crate::driver::{
    Context, Stack, Transport, accept_one, deregister, open_device, param, tcp_transfer_whole,
};
use crate::error::{BenchError, Result, failed, stack};
use crate::patience::PATIENCE;
use crate::process::{Peer, Reply, Task};
use crate::record::{Metric, Record};
use crate::stats::paired_ratio;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Instant;
use weft_verbs::cm::{self, Listener};
use weft_verbs::{Access, Cq, QpInit, RecvWr, SendWr, Wc, WcStatus};

const SIZES: &str = "1,1K,1M,1G";
const QUICK_SIZES: &str = "1,1K,1M";
/// The steps in the thesis's order; the last is their sum.
pub(crate) const STEPS: [&str; 8] = [
    "obj create",
    "buf create",
    "connect",
    "send data",
    "disconnect",
    "buf destroy",
    "obj destroy",
    "total",
];

/// The number of connections to accept, and the bytes to receive on each.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    stack: Stack,
    transport: Transport,
    bytes: u64,
    connections: u32,
    crc: bool,
}

pub(crate) fn measure(context: &mut Context, common: &CommonArgs) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    // The engine's own start is not part of a connection's life.
    for &transport in &common.transport {
        context.device(transport)?;
    }
    for bytes in common.effort.sizes(SIZES, QUICK_SIZES) {
        // Both ends of 1 GiB need much memory and several seconds: fewer runs suffice.
        let runs = if bytes >= 1 << 28 {
            common.effort.runs().min(5)
        } else {
            common.effort.runs()
        };
        let mut ends = Vec::new();
        let contenders = common.stacks().iter().flat_map(|&stack| {
            let ways = match stack {
                Stack::Weft => common.transport.clone(),
                Stack::Tcp => vec![Transport::Tcp],
                _ => Vec::new(),
            };
            ways.into_iter().map(move |way| (stack, way))
        });
        for (which, transport) in contenders {
            let mut peer = Peer::spawn(&[])?;
            // The first connection warms up.
            let plan = Plan {
                stack: which,
                transport,
                bytes,
                connections: runs + 1,
                crc: common.crc.values().contains(&true),
            };
            peer.task(Task::Setup, &plan)?;
            let addr = peer.listening()?;
            ends.push(((which, transport), peer, addr, Vec::new()));
        }
        for run in 0..=runs {
            for (which, _, addr, samples) in &mut ends {
                let times = match which {
                    (Stack::Tcp, _) => tcp_life(*addr, bytes)?,
                    (_, way) => weft_life(*addr, *way, bytes, common.crc.values().contains(&true))?,
                };
                if run > 0 {
                    samples.push(times);
                }
            }
        }
        let column = |samples: &[[f64; STEPS.len()]], step: usize| -> Vec<f64> {
            samples.iter().map(|times| times[step]).collect()
        };
        let tcp = ends.iter().find(|end| end.0.0 == Stack::Tcp);
        for ((which, transport), _, _, samples) in &ends {
            for (step, name) in STEPS.iter().enumerate() {
                let ours = column(samples, step);
                let (over, stack, us) = (transport.name(), which.name(), Metric::time_us);
                let record = Record::of("setup", over, stack, bytes, us, &ours);
                let Some(mut record) = record.map(|record| record.with_case(*name)) else {
                    continue;
                };
                if *which != Stack::Tcp {
                    record.crc = Some(common.crc.values().contains(&true));
                    let theirs = tcp.map(|end| column(&end.3, step)).unwrap_or_default();
                    record = record.with_ratio(paired_ratio(&ours, &theirs));
                }
                records.push(record);
            }
        }
    }
    Ok(records)
}

/// Returns the time between calls, in microseconds.
struct Watch(Instant);

impl Watch {
    fn lap(&mut self) -> f64 {
        let now = Instant::now();
        let lap = now.duration_since(self.0).as_secs_f64() * 1e6;
        self.0 = now;
        lap
    }
}

fn with_total(mut times: [f64; STEPS.len()]) -> [f64; STEPS.len()] {
    let total: f64 = times[..STEPS.len() - 1].iter().sum();
    times[STEPS.len() - 1] = total;
    times
}

fn length(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| BenchError::Usage("the size is too large".to_owned()))
}

fn tcp_life(addr: SocketAddr, bytes: u64) -> Result<[f64; STEPS.len()]> {
    let mut watch = Watch(Instant::now());
    let objects = watch.lap();
    let mut buffer = vec![1; length(bytes)?];
    let create = watch.lap();
    let stream = TcpStream::connect(addr).map_err(BenchError::system("connect"))?;
    let connect = watch.lap();
    tcp_transfer_whole(&stream, &mut buffer, true)?;
    let send = watch.lap();
    drop(stream);
    let disconnect = watch.lap();
    drop(buffer);
    let destroy = watch.lap();
    Ok(with_total([
        objects, create, connect, send, disconnect, destroy, 0.0, 0.0,
    ]))
}

fn weft_life(
    addr: SocketAddr,
    transport: Transport,
    bytes: u64,
    crc: bool,
) -> Result<[f64; STEPS.len()]> {
    let mut watch = Watch(Instant::now());
    let device = open_device(transport)?;
    let pd = device.alloc_pd().map_err(stack("allocate a PD"))?;
    let cq = device.create_cq(16, None).map_err(stack("create a CQ"))?;
    let init = QpInit::new(&cq, &cq);
    let objects = watch.lap();
    let len = length(bytes)?;
    let mr = pd
        .reg_mr(vec![1; len], Access::LOCAL_WRITE)
        .map_err(stack("register memory"))?;
    let create = watch.lap();
    let connection = cm::connect(addr, &pd, &init, &param(crc)).map_err(stack("connect"))?;
    let connect = watch.lap();
    let qp = connection.qp;
    // The answer lands in the first byte of the same buffer, which the send has left by then.
    qp.post_recv(&[RecvWr::new(1).sge(mr.sge(0, 1))])
        .map_err(stack("post a receive"))?;
    qp.post_send(&[SendWr::send(0).sge(mr.sge(0, len)).signaled()])
        .map_err(stack("post a send"))?;
    await_completion(&cq, 1)?;
    let send = watch.lap();
    qp.disconnect();
    let disconnect = watch.lap();
    drop(deregister(mr)?);
    let destroy = watch.lap();
    drop((init, qp, cq, pd, device));
    let objects_end = watch.lap();
    Ok(with_total([
        objects,
        create,
        connect,
        send,
        disconnect,
        destroy,
        objects_end,
        0.0,
    ]))
}

/// Waits for the completion `id`; others may come before it.
fn await_completion(cq: &Cq, id: u64) -> Result<()> {
    let mut wcs = [Wc::default(); 4];
    loop {
        let count = cq
            .wait(&mut wcs, Some(PATIENCE))
            .map_err(stack("wait for completions"))?;
        if count == 0 {
            return Err(BenchError::Stuck(PATIENCE.as_secs(), "a completion"));
        }
        for wc in &wcs[..count] {
            if wc.status != WcStatus::Success {
                return Err(failed("complete an operation", format!("{:?}", wc.status)));
            }
        }
        if wcs[..count].iter().any(|wc| wc.wr_id == id) {
            return Ok(());
        }
    }
}

impl Plan {
    /// Accepts the connections one after the other; in the peer process.
    pub(crate) fn serve(
        &self,
        context: &mut Context,
        reply: &mut dyn FnMut(Reply) -> Result<()>,
    ) -> Result<()> {
        let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let len = length(self.bytes)?;
        if self.stack == Stack::Tcp {
            let listener = TcpListener::bind(addr).map_err(BenchError::system("listen"))?;
            let addr = listener
                .local_addr()
                .map_err(BenchError::system("listen"))?;
            let mut buffer = vec![1; len];
            reply(Reply::Listening { addr })?;
            for _ in 0..self.connections {
                let (stream, _) = listener.accept().map_err(BenchError::system("accept"))?;
                tcp_transfer_whole(&stream, &mut buffer, false)?;
            }
            return Ok(());
        }
        let (device, pd) = context.device(self.transport)?;
        let listener =
            Listener::bind(device, addr, 16, &param(self.crc)).map_err(stack("listen"))?;
        let mr = pd
            .reg_mr(vec![1; len.max(1)], Access::LOCAL_WRITE)
            .map_err(stack("register memory"))?;
        reply(Reply::Listening {
            addr: listener.local_addr(),
        })?;
        for _ in 0..self.connections {
            let cq = device.create_cq(16, None).map_err(stack("create a CQ"))?;
            let qp = pd
                .create_qp(&QpInit::new(&cq, &cq))
                .map_err(stack("create a QP"))?;
            qp.post_recv(&[RecvWr::new(1).sge(mr.sge(0, len))])
                .map_err(stack("post a receive"))?;
            let qp = accept_one(&listener, qp, self.crc)?.qp;
            await_completion(&cq, 1)?;
            qp.post_send(&[SendWr::send(2).sge(mr.sge(0, 1)).signaled()])
                .map_err(stack("post a send"))?;
            await_completion(&cq, 2)?;
            qp.disconnect();
        }
        Ok(())
    }
}
