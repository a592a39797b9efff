//! weft's verbs, used as by an RDMA programmer.
//!
//! Several work requests share a doorbell, and only the last of each batch is signaled. A send needs a posted
//! receive, so the receiver posts [`RECVS`] and notifies the sender of every [`GRANT`] that it has reposted.
//! The application at the far end acknowledges the end of a stream.

use super::family::{Family, Posts, Queue, Region, Soft};
use super::roce::Pair;
use super::{
    Initiator, Kind, Memory, Op, Patience, Remote, Responder, Scheme, Spec, Stack, Transport, lap,
    roce,
};
use crate::error::{BenchError, Result, failed, stack};
use crate::patience::PATIENCE;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;
use weft_verbs::cm::{self, ConnParam, Connection, LinkOptions, Listener};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{
    Access, Cq, Device, LocalMode, Mr, Pd, Qp, QpInit, RecvWr, RemoteAddr, SendWr, Wc, WcOpcode,
    WcStatus,
};

/// Posted receives at the far end of sends.
pub(super) const RECVS: u32 = 512;
/// Receives after which the receiver notifies the sender.
const GRANT: u32 = RECVS / 2;
/// Receives beyond [`RECVS`], so that used ones can be posted again several at a time.
pub(super) const SPARE: u32 = 64;
/// Length of the note that grants [`GRANT`] more sends.
const NOTE_GRANT: usize = 1;
/// Length of the note that ends a run: the initiator's end of data, or the peer's confirmation.
pub(super) const NOTE_END: usize = 2;
/// Completions taken at a time.
const BATCH: usize = 64;
/// In a ping-pong one of this many posts is signaled, to free their slots.
const SIGNAL_EVERY: u64 = 32;
/// Smallest buffer: notes and atomics fit in it.
const SMALLEST: usize = 16;

/// The devices of this process, one for each transport, each with a protection domain; opened when first used.
#[derive(Default)]
pub struct Context {
    open: Vec<(Transport, (Device, Pd))>,
    held: Vec<Connection>,
    /// The key pair for the stacks with TLS.
    tls: Option<Tls>,
    /// The device of RoCE.
    roce: Option<roce::Host>,
    /// The devices of the extended sockets.
    pub(super) exs: super::exs::SocketContexts,
}

impl Context {
    /// Keeps connections until the process ends.
    pub fn hold(&mut self, connections: Vec<Connection>) {
        self.held.extend(connections);
    }

    /// A key pair of this process. It accepts any key of its peer.
    pub(super) fn tls(&mut self) -> Result<&Tls> {
        if self.tls.is_none() {
            let identity = Identity::generate().map_err(stack("make a key pair"))?;
            self.tls = Some(Tls::new(identity).map_err(stack("set up TLS"))?);
        }
        self.tls
            .as_ref()
            .ok_or_else(|| BenchError::Usage("no TLS".to_owned()))
    }

    pub(super) fn roce(&mut self) -> Result<&roce::Host> {
        let made = match self.roce.take() {
            Some(host) => host,
            None => roce::Host::open()?,
        };
        Ok(self.roce.insert(made))
    }

    fn param(&mut self, spec: &Spec) -> Result<ConnParam> {
        let mut param = param(spec.crc);
        if spec.stack == Stack::WeftTls {
            param.tls = Some(self.tls()?.clone());
        }
        Ok(param)
    }

    pub fn device(&mut self, transport: Transport) -> Result<&(Device, Pd)> {
        let open = self.open.iter().position(|(of, _)| *of == transport);
        let index = if let Some(index) = open {
            index
        } else {
            let device = open_device(transport)?;
            let pd = device.alloc_pd().map_err(stack("allocate a PD"))?;
            self.open.push((transport, (device, pd)));
            self.open.len() - 1
        };
        Ok(&self.open[index].1)
    }
}

/// A device that uses this transport and no other.
pub fn open_device(transport: Transport) -> Result<Device> {
    let mode = match transport {
        Transport::Tcp => LocalMode::Off,
        Transport::Local => LocalMode::Require,
    };
    let device = Device::builder().local(mode).open();
    device.map_err(stack("open the device"))
}

pub struct Listening(pub Listener);

pub(super) fn listen(context: &mut Context, spec: &Spec) -> Result<Listening> {
    let param = context.param(spec)?;
    let (device, _) = context.device(spec.transport)?;
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Listener::bind(device, addr, 128, &param)
        .map(Listening)
        .map_err(stack("listen"))
}

impl Listening {
    pub(super) fn addr(&self) -> SocketAddr {
        self.0.local_addr()
    }
}

pub fn param(crc: bool) -> ConnParam {
    ConnParam {
        options: LinkOptions {
            crc,
            ..LinkOptions::default()
        },
        ..ConnParam::default()
    }
}

/// Queues as deep as `spec` needs.
fn queues(device: &Device, spec: &Spec) -> Result<(Cq, QpInit)> {
    let (max_send_wr, max_recv_wr) = (spec.window + 64, RECVS + SPARE);
    let cq = device
        .create_cq(max_send_wr + max_recv_wr, None)
        .map_err(stack("create a CQ"))?;
    let mut init = QpInit::new(&cq, &cq);
    init.max_send_wr = max_send_wr;
    init.max_recv_wr = max_recv_wr;
    Ok((cq, init))
}

pub(super) fn connect(
    context: &mut Context,
    spec: &Spec,
    addr: SocketAddr,
) -> Result<Box<dyn Initiator>> {
    let param = context.param(spec)?;
    let (device, pd) = context.device(spec.transport)?;
    let (cq, init) = queues(device, spec)?;
    let connection = cm::connect(addr, pd, &init, &param).map_err(stack("connect"))?;
    let pair = iwarp(connection.qp, spec)?;
    Ok(Box::new(End::<Soft>::new(
        pd,
        cq,
        pair,
        spec,
        Role::Initiator,
    )?))
}

/// As [`connect`], over RoCE v2.
pub(super) fn connect_roce(
    context: &mut Context,
    spec: &Spec,
    addr: SocketAddr,
) -> Result<Box<dyn Initiator>> {
    let host = context.roce()?;
    let (cq, init) = queues(&host.device, spec)?;
    let pair = Pair::Roce(host.connect(&init, spec, addr)?);
    Ok(Box::new(End::<Soft>::new(
        &host.pd,
        cq,
        pair,
        spec,
        Role::Initiator,
    )?))
}

pub(super) fn accept_roce(
    context: &mut Context,
    listening: &roce::Listening,
    spec: &Spec,
) -> Result<Box<dyn Responder>> {
    let host = context.roce()?;
    let (cq, init) = queues(&host.device, spec)?;
    let pair = Pair::Roce(host.accept(&init, spec, listening)?);
    Ok(Box::new(End::<Soft>::new(
        &host.pd,
        cq,
        pair,
        spec,
        Role::Peer,
    )?))
}

pub(super) fn accept(
    context: &mut Context,
    listening: &Listening,
    spec: &Spec,
) -> Result<Box<dyn Responder>> {
    let (device, pd) = context.device(spec.transport)?;
    let (cq, init) = queues(device, spec)?;
    let qp = pd.create_qp(&init).map_err(stack("create a QP"))?;
    let connection = accept_one(&listening.0, qp, spec.crc)?;
    let pair = iwarp(connection.qp, spec)?;
    Ok(Box::new(End::<Soft>::new(pd, cq, pair, spec, Role::Peer)?))
}

/// Accepts the next connection on `qp`.
pub fn accept_one(listener: &Listener, qp: Qp, crc: bool) -> Result<Connection> {
    let request = listener
        .next_request(Some(PATIENCE))
        .ok_or(BenchError::Stuck(PATIENCE.as_secs(), "a connection"))?;
    request.accept(qp, &param(crc)).map_err(stack("accept"))
}

/// The result of a round of completions.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Own operations that are complete.
    done: u64,
    /// Messages received.
    messages: u64,
    grants: u32,
    ends: u32,
}

/// The end of the connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Initiator,
    Peer,
}

pub(super) struct End<F: Family> {
    qp: F::Qp,
    cq: F::Cq,
    spec: Spec,
    pd: F::Pd,
    /// Receives complete with notes, not with the measured messages.
    notes: bool,
    /// The source of outgoing data, and the destination of pulled data.
    source: F::Mr,
    /// The destination of the other end's data.
    target: F::Mr,
    remote: Option<RemoteAddr>,
    recvs: Vec<RecvWr>,
    to_repost: usize,
    wcs: Vec<Wc>,
    /// Sends that the other end has room for.
    credit: u32,
    since_grant: u32,
    /// Ping-pongs posted so far, for signaling now and then and for the flag byte of writes.
    turn: u64,
    ring: Vec<Slot<F::Mr>>,
}

/// A buffer of a stream whose [`Scheme`] is not the single buffer.
struct Slot<M> {
    /// Taken out while it is registered anew.
    mr: Option<M>,
    /// The application's data ([`Scheme::Copy`]).
    data: Vec<u8>,
}

/// Deregisters a buffer that was passed to [`Pd::reg_mr`].
pub fn deregister(mr: Mr) -> Result<Vec<u8>> {
    taken_back(mr)
}

fn taken_back(mr: impl Region) -> Result<Vec<u8>> {
    mr.deregister()
        .map_err(stack("deregister memory"))?
        .ok_or_else(|| BenchError::Usage("the buffer did not come back".to_owned()))
}

/// A registered buffer with resident pages.
fn resident<F: Family>(pd: &F::Pd, memory: Memory, len: usize, access: Access) -> Result<F::Mr> {
    let mr = match memory {
        Memory::Allocated => F::alloc(pd, len, access),
        Memory::Ordinary => F::register(pd, vec![0; len], access),
    }
    .map_err(stack("allocate a memory region"))?;
    mr.fill(0, len, 0).map_err(stack("fill a memory region"))?;
    Ok(mr)
}

/// The environment can enable TLS everywhere, but a row must match its name.
fn iwarp(qp: Qp, spec: &Spec) -> Result<Pair> {
    let tls = qp.tls().is_some();
    if tls != (spec.stack == Stack::WeftTls) && spec.transport == Transport::Tcp {
        return Err(BenchError::Usage(format!(
            "{} is measured {} TLS: unset WEFT_TLS",
            spec.stack.name(),
            if tls { "without" } else { "with" }
        )));
    }
    Ok(Pair::Iwarp(qp))
}

impl<F: Family> End<F> {
    pub(super) fn new(pd: &F::Pd, cq: F::Cq, qp: F::Qp, spec: &Spec, role: Role) -> Result<Self> {
        let len = spec.len()?.max(SMALLEST);
        let rights = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let target = resident::<F>(pd, spec.memory, len, rights)?;
        let recv = RecvWr::new(0).sge(target.sge(0, len));
        let takes_receives = matches!(spec.op, Op::Send | Op::WriteImm);
        let mut end = Self {
            qp,
            cq,
            spec: *spec,
            pd: pd.clone(),
            notes: match role {
                Role::Initiator => spec.kind == Kind::Stream || !takes_receives,
                Role::Peer => !takes_receives,
            },
            source: resident::<F>(pd, spec.memory, len, Access::LOCAL_WRITE)?,
            target,
            remote: None,
            recvs: vec![recv; (RECVS + SPARE) as usize],
            to_repost: 0,
            wcs: vec![Wc::default(); BATCH],
            credit: RECVS,
            since_grant: 0,
            turn: 0,
            ring: Vec::new(),
        };
        if role == Role::Initiator && spec.scheme != Scheme::Single {
            end.fill_ring()?;
        }
        end.repost(end.recvs.len())?;
        Ok(end)
    }

    /// The queue pair, to be connected.
    pub(super) fn qp(&self) -> &F::Qp {
        &self.qp
    }

    fn fill_ring(&mut self) -> Result<()> {
        let len = self.spec.len()?;
        for _ in 0..self.spec.window {
            let mr = F::register(&self.pd, vec![1; len], Access::LOCAL_WRITE)
                .map_err(stack("register memory"))?;
            let data = match self.spec.scheme {
                Scheme::Copy => vec![2; len],
                _ => Vec::new(),
            };
            self.ring.push(Slot { mr: Some(mr), data });
        }
        Ok(())
    }

    fn repost(&mut self, count: usize) -> Result<()> {
        self.qp
            .post_recv(&self.recvs[..count])
            .map_err(stack("post receives"))
    }

    fn here(&self) -> Remote {
        let remote = self.target.remote(0);
        Remote {
            addr: remote.addr,
            rkey: remote.rkey,
        }
    }

    fn there(&self) -> Result<RemoteAddr> {
        self.remote
            .ok_or_else(|| BenchError::Usage("no target buffer".to_owned()))
    }

    fn learn(&mut self, remote: Option<Remote>) {
        self.remote = remote.map(|Remote { addr, rkey }| RemoteAddr { addr, rkey });
    }

    /// One operation, unsignaled; its identifier counts the operations that its completion stands for.
    fn operation(&self) -> Result<SendWr> {
        let sge = self.source.sge(0, self.spec.len()?);
        Ok(match self.spec.op {
            Op::Send => SendWr::send(1).sge(sge),
            Op::Write => SendWr::write(1, self.there()?).sge(sge),
            Op::WriteImm => SendWr::write_imm(1, self.there()?, 7).sge(sge),
            Op::Read => SendWr::read(1, self.there()?).sge(sge),
            Op::FetchAdd => SendWr::fetch_add(1, self.there()?, 1).sge(sge),
            Op::CompareSwap => SendWr::compare_swap(1, self.there()?, 0, 0).sge(sge),
            Op::Swap => SendWr::swap(1, self.there()?, 1).sge(sge),
        })
    }

    fn post(&self, wrs: &[SendWr]) -> Result<()> {
        self.qp.post_send(wrs).map_err(stack("post operations"))
    }

    fn note(&self, len: usize) -> Result<()> {
        let sge = self.source.sge(0, len);
        self.post(&[SendWr::send(0).sge(sge).signaled()])
    }

    /// Handles completions: spins or sleeps until there is at least one.
    fn progress(&mut self) -> Result<Progress> {
        let count = if self.spec.busy {
            let mut patience = Patience::new();
            loop {
                match self.cq.poll(&mut self.wcs).map_err(stack("poll"))? {
                    0 => patience.spin("completions")?,
                    count => break count,
                }
            }
        } else {
            self.cq
                .wait(&mut self.wcs, Some(PATIENCE))
                .map_err(stack("wait for completions"))?
        };
        if count == 0 {
            return Err(BenchError::Stuck(PATIENCE.as_secs(), "completions"));
        }
        self.account(count)
    }

    /// Checks and counts the first `count` completions and posts their receives again.
    fn account(&mut self, count: usize) -> Result<Progress> {
        let mut progress = Progress::default();
        for wc in &self.wcs[..count] {
            if wc.status != WcStatus::Success {
                let why = format!("{:?} of {:?}", wc.status, wc.opcode);
                return Err(failed("complete an operation", why));
            }
            match wc.opcode {
                opcode @ (WcOpcode::Recv | WcOpcode::RecvWithImm) => {
                    self.to_repost += 1;
                    let notes = self.notes && opcode == WcOpcode::Recv;
                    match wc.byte_len as usize {
                        NOTE_GRANT if notes => progress.grants += 1,
                        NOTE_END if notes => progress.ends += 1,
                        _ => progress.messages += 1,
                    }
                }
                _ => progress.done += wc.wr_id,
            }
        }
        if self.to_repost >= SPARE as usize / 2 {
            let due = std::mem::take(&mut self.to_repost);
            self.repost(due)?;
        }
        self.credit += progress.grants * GRANT;
        Ok(progress)
    }

    fn await_end(&mut self) -> Result<()> {
        while self.progress()?.ends == 0 {}
        Ok(())
    }

    /// Posts `count` operations, `window` in flight, in batches with one doorbell and one signal each.
    fn stream(&mut self, count: u64) -> Result<()> {
        let window = u64::from(self.spec.window);
        let needs_credit = matches!(self.spec.op, Op::Send | Op::WriteImm);
        let wr = self.operation()?;
        let mut batch = vec![wr.clone(); (window / 4).max(1) as usize];
        let full = batch.len() as u64;
        let (mut posted, mut done, mut ends) = (0, 0, 0);
        while done < count {
            loop {
                let len = full.min(count - posted);
                let credit = !needs_credit || u64::from(self.credit) >= len;
                if len == 0 || posted - done + len > window || !credit {
                    break;
                }
                let last = len as usize - 1;
                batch[last] = wr.clone().signaled();
                batch[last].id = len;
                if self.spec.one_by_one {
                    for wr in &batch[..=last] {
                        self.post(std::slice::from_ref(wr))?;
                    }
                } else {
                    self.post(&batch[..=last])?;
                }
                batch[last] = wr.clone();
                posted += len;
                if needs_credit {
                    self.credit -= len as u32;
                }
            }
            let progress = self.progress()?;
            done += progress.done;
            ends += progress.ends;
        }
        if !needs_credit {
            self.note(NOTE_END)?;
        }
        if ends == 0 {
            self.await_end()?;
        }
        Ok(())
    }

    /// The same with a buffer per operation in flight, which is used again, registered anew or copied into.
    fn stream_ring(&mut self, count: u64) -> Result<()> {
        let window = self.ring.len() as u64;
        let (len, remote) = (self.spec.len()?, self.there()?);
        let (mut posted, mut done) = (0, 0);
        while done < count {
            while posted < count && posted - done < window {
                let slot = &mut self.ring[(posted % window) as usize];
                let mut mr = slot
                    .mr
                    .take()
                    .ok_or_else(|| BenchError::Usage("no buffer".to_owned()))?;
                match self.spec.scheme {
                    Scheme::Reregister => {
                        let data = taken_back(mr)?;
                        mr = F::register(&self.pd, data, Access::LOCAL_WRITE)
                            .map_err(stack("register memory"))?;
                    }
                    Scheme::Copy => mr.write(0, &slot.data).map_err(stack("copy data"))?,
                    Scheme::Reuse | Scheme::Single => {}
                }
                let wr = SendWr::write(1, remote).sge(mr.sge(0, len)).signaled();
                slot.mr = Some(mr);
                self.post(&[wr])?;
                posted += 1;
            }
            done += self.progress()?.done;
        }
        self.note(NOTE_END)?;
        self.await_end()
    }

    /// The operation of a ping-pong, made once: without and with a signal.
    fn ball(&self) -> Result<[SendWr; 2]> {
        let wr = self.operation()?;
        Ok([wr.clone(), wr.signaled()])
    }

    /// Posts one operation of a ping-pong.
    fn ping(&mut self, ball: &[SendWr; 2]) -> Result<()> {
        self.turn += 1;
        let signaled = self.turn.is_multiple_of(SIGNAL_EVERY);
        self.post(std::slice::from_ref(&ball[usize::from(signaled)]))
    }

    fn await_message(&mut self) -> Result<()> {
        while self.progress()?.messages == 0 {}
        Ok(())
    }

    /// Clears the flag of a former run, so that it does not count as the first write of this one.
    fn clear_flag(&self) -> Result<()> {
        let last = self.spec.len()?.max(1) - 1;
        self.target
            .fill(last, 1, 0)
            .map_err(stack("fill a memory region"))
    }

    /// Spins until the other end's write has stored `flag` in the last byte.
    fn await_flag(&mut self, flag: u8) -> Result<()> {
        let last = self.spec.len()?.max(1) - 1;
        let mut patience = Patience::new();
        loop {
            let count = self.cq.poll(&mut self.wcs).map_err(stack("poll"))?;
            if count > 0 {
                self.account(count)?;
            }
            let seen = self
                .target
                .load_u8(last)
                .map_err(stack("read a memory region"))?;
            if seen == flag {
                return Ok(());
            }
            patience.spin("a write")?;
        }
    }

    /// Writes `flag` as the last byte of the message.
    fn ping_flag(&mut self, ball: &[SendWr; 2], flag: u8) -> Result<()> {
        let last = self.spec.len()?.max(1) - 1;
        self.source
            .fill(last, 1, flag)
            .map_err(stack("fill a memory region"))?;
        self.ping(ball)
    }
}

/// The last byte of the `turn`th write of a ping-pong: never that of the write before it.
fn flag(turn: u64) -> u8 {
    (turn % 255) as u8 + 1
}

impl<F: Family> Initiator for End<F> {
    fn set_remote(&mut self, remote: Option<Remote>) {
        self.learn(remote);
    }

    fn remote(&self) -> Option<Remote> {
        Some(self.here())
    }

    fn drive(&mut self, count: u64, laps: &mut Vec<f64>) -> Result<()> {
        if self.spec.kind == Kind::Stream {
            return if self.ring.is_empty() {
                self.stream(count)
            } else {
                self.stream_ring(count)
            };
        }
        self.clear_flag()?;
        let ball = self.ball()?;
        let mut start = Instant::now();
        for turn in 0..count {
            let share = match self.spec.op {
                Op::Send | Op::WriteImm => {
                    self.ping(&ball)?;
                    self.await_message()?;
                    0.5
                }
                Op::Write => {
                    self.ping_flag(&ball, flag(turn))?;
                    self.await_flag(flag(turn))?;
                    0.5
                }
                Op::Read | Op::FetchAdd | Op::CompareSwap | Op::Swap => {
                    self.post(&ball[1..])?;
                    while self.progress()?.done == 0 {}
                    1.0
                }
            };
            laps.push(lap(&mut start) * share);
        }
        if self.spec.op.pulls() {
            self.note(NOTE_END)?;
            self.await_end()?;
        }
        Ok(())
    }
}

impl<F: Family> Responder for End<F> {
    fn remote(&self) -> Option<Remote> {
        Some(self.here())
    }

    fn prepare(&mut self, _count: u64, remote: Option<Remote>) -> Result<()> {
        self.learn(remote);
        self.clear_flag()
    }

    fn serve(&mut self, count: u64) -> Result<()> {
        match (self.spec.kind, self.spec.op) {
            (Kind::Stream, Op::Send | Op::WriteImm) => {
                let mut received = 0;
                while received < count {
                    let messages = self.progress()?.messages;
                    received += messages;
                    self.since_grant += messages as u32;
                    while self.since_grant >= GRANT {
                        self.since_grant -= GRANT;
                        self.note(NOTE_GRANT)?;
                    }
                }
                self.note(NOTE_END)
            }
            (Kind::PingPong, Op::Send | Op::WriteImm) => {
                let ball = self.ball()?;
                for _ in 0..count {
                    self.await_message()?;
                    self.ping(&ball)?;
                }
                Ok(())
            }
            (Kind::PingPong, Op::Write) => {
                let ball = self.ball()?;
                for turn in 0..count {
                    self.await_flag(flag(turn))?;
                    self.ping_flag(&ball, flag(turn))?;
                }
                Ok(())
            }
            _ => {
                self.await_end()?;
                self.note(NOTE_END)
            }
        }
    }
}
