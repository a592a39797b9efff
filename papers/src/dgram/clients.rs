//! Memory of a server of many clients: the datagram paper's fig. 12.
//!
//! Datagrams: one queue pair receives and answers a message of each client; each client is an address of 127.0.0.0/8. Connections: the same number, idle,
//! which take less memory than in use.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use weft_verbs::ext::CqExt;
use weft_verbs::{Access, Cq, Device, Mr, RecvWr, SendWr, UdDest, UdQp, UdSource, Wc, WcOpcode};

use super::end::{self, Failed};
use crate::driver::{open_ud, ud_dest};
use crate::error::{BenchError, Result, stack};
use crate::process::{Peer, Reply, Task};
use crate::record::{Metric, Record};
use crate::report::{Section, Table};
use crate::usage;
use weft_bench::verbs::memory;

const CLIENTS: u32 = 10_000;
const QUICK_CLIENTS: u32 = 1_000;
const RECVS: u32 = 1024;
const SENDS: u32 = 256;
/// Bytes of a message; the first four are the client's number.
const BYTES: usize = 256;
/// A client that was not answered asks again.
const AGAIN: Duration = Duration::from_millis(300);
const PATIENCE: Duration = Duration::from_mins(1);

/// The end, and the number of clients.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    count: u32,
    /// The server, for the clients.
    to: Option<SocketAddr>,
}

struct End {
    cq: Cq,
    qp: UdQp,
    inbox: Mr,
    outbox: Mr,
    sent: u32,
}

impl End {
    fn open(addr: SocketAddr) -> Result<End> {
        let device = Device::open().map_err(stack("open the device"))?;
        let (pd, cq, qp) = open_ud(&device, addr, 2 * RECVS, |init| {
            init.max_send_wr = SENDS;
            init.max_recv_wr = RECVS;
            init.sq_sig_all = true;
        })?;
        let region = |count: u32| pd.alloc_mr(count as usize * BYTES, Access::LOCAL_WRITE);
        let inbox = region(RECVS).map_err(stack("allocate a region"))?;
        let outbox = region(SENDS).map_err(stack("allocate a region"))?;
        let end = End {
            cq,
            qp,
            inbox,
            outbox,
            sent: 0,
        };
        for place in 0..RECVS {
            end.receive(u64::from(place))?;
        }
        Ok(end)
    }

    fn receive(&self, place: u64) -> Result<()> {
        let wr = RecvWr::new(place).sge(self.inbox.sge(place as usize * BYTES, BYTES));
        self.qp.post_recv(&[wr]).map_err(stack("post a receive"))
    }

    /// Receives the messages that have arrived: the source and the number of each.
    fn take(&self, wait: Duration) -> Result<Vec<(UdSource, u32)>> {
        let mut wcs = [Wc::default(); 64];
        let n = self.cq.wait(&mut wcs, Some(wait));
        let n = n.map_err(stack("wait for a CQ"))?;
        let mut came = Vec::new();
        for wc in wcs[..n].iter().filter(|wc| wc.opcode == WcOpcode::Recv) {
            let mut number = [0; 4];
            let at = wc.wr_id as usize * BYTES;
            self.inbox
                .read(at, &mut number)
                .map_err(stack("read a region"))?;
            came.extend(wc.source.map(|from| (from, u32::from_be_bytes(number))));
            self.receive(wc.wr_id)?;
        }
        Ok(came)
    }

    /// Sends one message. If there is no room, it is lost.
    fn send(&mut self, number: u32, to: &UdDest) -> Result<()> {
        let at = (self.sent % SENDS) as usize * BYTES;
        let begun = Instant::now();
        while self.qp.outstanding() >= SENDS - 1 && begun.elapsed() < AGAIN {
            let mut none = [];
            self.cq.look();
            self.cq
                .wait(&mut none, Some(Duration::ZERO))
                .map_err(stack("wait for a CQ"))?;
        }
        self.outbox
            .write(at, &number.to_be_bytes())
            .map_err(stack("write a region"))?;
        self.sent += 1;
        let wr = SendWr::send(0).sge(self.outbox.sge(at, BYTES));
        self.qp.post_send(&wr, to).map_err(stack("post a send"))
    }
}

/// Addresses of this host, none of them 127.0.0.1.
fn address(number: u32) -> IpAddr {
    Ipv4Addr::from(0x7f01_0001 + number).into()
}

impl Plan {
    pub(crate) fn serve(&self, reply: &mut dyn FnMut(Reply) -> Result<()>) -> Result<()> {
        let bytes = match self.to {
            None => self.server(reply)?,
            Some(to) => self.clients(to)?,
        };
        reply(Reply::Held { bytes })
    }

    fn server(&self, reply: &mut dyn FnMut(Reply) -> Result<()>) -> Result<u64> {
        let private = || usage::private_bytes().map_err(BenchError::system("read smaps_rollup"));
        let before = private()?;
        let mut end = End::open((Ipv4Addr::LOCALHOST, 0).into())?;
        reply(Reply::Listening {
            addr: end.qp.port().local_addr(),
        })?;
        let mut heard = vec![false; self.count as usize];
        let (mut left, mut last) = (self.count, Instant::now());
        // Until all clients were heard, and the last one does not ask for its answer again.
        while left > 0 || last.elapsed() < 3 * AGAIN {
            if last.elapsed() > PATIENCE {
                return Err(BenchError::Stuck(PATIENCE.as_secs(), "clients"));
            }
            for (from, number) in end.take(AGAIN)? {
                last = Instant::now();
                let known = heard.get_mut(number as usize);
                let Some(known) = known.filter(|_| from.addr.ip() == address(number)) else {
                    continue;
                };
                left -= u32::from(!std::mem::replace(known, true));
                let qp_num = from.qp_num;
                let to = UdDest {
                    qp_num,
                    ..ud_dest(from.addr)
                };
                end.send(number, &to)?;
            }
        }
        Ok(private()?.saturating_sub(before))
    }

    fn clients(&self, to: SocketAddr) -> Result<u64> {
        let mut end = End::open((Ipv4Addr::UNSPECIFIED, 0).into())?;
        let mut waiting: Vec<bool> = vec![true; self.count as usize];
        let begun = Instant::now();
        while waiting.contains(&true) {
            if begun.elapsed() > PATIENCE {
                return Err(BenchError::Stuck(PATIENCE.as_secs(), "answers"));
            }
            let ask: Vec<u32> = (0..self.count).filter(|n| waiting[*n as usize]).collect();
            for some in ask.chunks(SENDS as usize / 2) {
                for number in some {
                    let from = Some(address(*number));
                    end.send(
                        *number,
                        &UdDest {
                            from,
                            ..ud_dest(to)
                        },
                    )?;
                }
                let sent = Instant::now();
                let open = |waiting: &[bool]| some.iter().any(|n| waiting[*n as usize]);
                while open(&waiting) && sent.elapsed() < AGAIN {
                    for (_, number) in end.take(AGAIN)? {
                        if let Some(waiting) = waiting.get_mut(number as usize) {
                            *waiting = false;
                        }
                    }
                }
            }
        }
        Ok(0)
    }
}

/// The size of the kernel's own caches, in bytes, for the whole system.
fn slab() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("Slab:"))?;
    let kib: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024.0)
}

/// Bytes at the server for all clients, and in the kernel's caches for both ends.
fn measure(count: u32, datagrams: bool) -> Result<(f64, f64)> {
    let mut server = Peer::spawn(&[])?;
    let mut client = Peer::spawn(&[])?;
    let ask = |peer: &mut Peer, to| {
        if datagrams {
            peer.task(Task::Clients, &Plan { count, to })
        } else {
            peer.task(weft_bench::process::Task::Hold, &memory::Plan { count, to })
        }
    };
    let before = slab().unwrap_or(0.0);
    ask(&mut server, None)?;
    let to = Some(server.listening()?);
    ask(&mut client, to)?;
    client.bytes()?;
    let bytes = server.bytes()?;
    Ok((bytes as f64, slab().unwrap_or(0.0) - before))
}

/// The names of the measured quantities in the records.
const OPS: [&str; 2] = ["clients", "clients_slab"];

/// The figure.
pub(super) fn run(quick: bool, runs: u32, failed: &mut Failed<'_>) -> Vec<Record> {
    let count = if quick { QUICK_CLIENTS } else { CLIENTS };
    let mut records = Vec::new();
    for (transport, datagrams) in [("udp", true), ("tcp", false)] {
        let what = format!("{count} clients over {transport}");
        let one = || measure(count, datagrams);
        let Some((user, kernel)) = end::runs(&what, runs.min(3), failed, one) else {
            continue;
        };
        let stack = if datagrams { "weft-ud" } else { "weft" };
        for (op, samples) in OPS.into_iter().zip([user, kernel]) {
            let metric = Metric::memory_bytes;
            let count = count.into();
            records.extend(Record::of(op, transport, stack, count, metric, &samples));
        }
    }
    records
}

/// The figure's table.
pub(super) fn section(records: &[Record]) -> Section {
    let mb = |record: &Record| format!("{:.2}", record.summary.median / 1e6);
    let kernel = |record: &Record| {
        let mut others = records.iter().filter(|other| other.op == OPS[1]);
        let other = others.find(|other| other.transport == record.transport);
        other.map_or_else(String::new, mb)
    };
    let table = Table::of(
        records.iter().filter(|record| record.op == OPS[0]),
        &[
            ("clients", &|record| record.bytes.to_string()),
            ("over", &|record| record.transport.clone()),
            ("server, MB", &|record| mb(record)),
            ("kernel's caches, both ends, MB", &|record| kernel(record)),
        ],
    );
    Section::new("A server of many clients (fig. 12)")
        .text(
            "Private memory of the server: one datagram queue pair that has answered each client once, and as many connections that are idle. What the kernel's caches \
             (Slab in /proc/meminfo) grew by is of the whole system, and of both ends.",
        )
        .table(table)
}

/// The memory that the server saves with datagrams: in its own memory, and including the kernel's.
pub(super) fn saved(records: &[Record]) -> [Option<f64>; 2] {
    let of = |op: &str, transport: &str| {
        let mut found = records.iter().filter(|record| record.op == op);
        let found = found.find(|record| record.transport == transport)?;
        Some(found.summary.median.max(0.0))
    };
    let user = of(OPS[0], "udp").zip(of(OPS[0], "tcp"));
    let kernel = of(OPS[1], "udp").zip(of(OPS[1], "tcp"));
    let less = |(udp, tcp): (f64, f64)| 1.0 - udp / tcp;
    let both = user.zip(kernel);
    [
        user.map(less),
        both.map(|(user, kernel)| less((user.0 + kernel.0, user.1 + kernel.1))),
    ]
}
