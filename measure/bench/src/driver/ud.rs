//! weft's datagram queue pairs: Send into posted receives, and RDMA Write-Record.
//!
//! Delivery is not guaranteed, except in the reliable mode. After a stream the initiator asks how many messages have arrived, and sends as many as are
//! missing: only messages that arrived are measured.

use super::{Initiator, Kind, Op, Patience, Remote, Responder, Spec, Stack, Transport, lap};
use crate::error::{BenchError, Result, stack};
use crate::patience::PATIENCE;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};
use weft_verbs::{
    Access, Cq, Device, LocalMode, Mr, Pd, RecvWr, RemoteAddr, SendWr, UdDest, UdInit, UdQp,
    UdReliable, UdSource, Wc, WcOpcode, WcStatus,
};

const QKEY: u32 = 0x00be_0c4e;
/// Posted receives.
const RECVS: u32 = 4096;
/// Sends posted at most, and posted at a time.
const SENDS: u32 = 512;
const BATCH: usize = 64;
const RECORDS: u32 = 4096;
/// A question is repeated after this time.
const AGAIN: Duration = Duration::from_millis(50);

/// The meaning of a note's immediate data. Data messages have none.
const HELLO: u64 = 1;
const END: u64 = 2;
const COUNT: u64 = 3;

/// One queue pair, before its peer is known.
pub struct Listening {
    pd: Pd,
    cq: Cq,
    qp: UdQp,
    spec: Spec,
}

/// One end that knows its peer.
struct End {
    cq: Cq,
    qp: UdQp,
    spec: Spec,
    len: usize,
    /// Sent from.
    source: Mr,
    /// Received, or written, to.
    target: Mr,
    peer: UdDest,
    remote: Option<RemoteAddr>,
    /// The number of the last question.
    question: u32,
    wcs: Vec<Wc>,
}

/// The result of one poll.
#[derive(Clone, Copy, Default)]
struct News {
    messages: u64,
    note: Option<Note>,
}

#[derive(Clone, Copy)]
struct Note {
    what: u64,
    question: u32,
    value: u32,
    from: UdSource,
}

pub(super) fn listen(spec: &Spec) -> Result<Listening> {
    let mode = match spec.transport {
        Transport::Local => LocalMode::Auto,
        Transport::Tcp => LocalMode::Off,
    };
    let device = Device::builder().local(mode).open();
    let device = device.map_err(stack("open the device"))?;
    let depth = 2 * RECVS + SENDS + RECORDS;
    let addr = (Ipv4Addr::LOCALHOST, 0).into();
    let (pd, cq, qp) = open(&device, addr, depth, |init| {
        init.max_send_wr = SENDS;
        init.max_recv_wr = RECVS;
        init.record_depth = RECORDS;
        init.reliable = (spec.stack == Stack::WeftRd).then(UdReliable::default);
    })?;
    Ok(Listening {
        pd,
        cq,
        qp,
        spec: *spec,
    })
}

/// A datagram queue pair at a port for itself, which identifies it to its peer; `with` adjusts its settings.
pub fn open(
    device: &Device,
    addr: SocketAddr,
    depth: u32,
    with: impl FnOnce(&mut UdInit),
) -> Result<(Pd, Cq, UdQp)> {
    let pd = device.alloc_pd().map_err(stack("allocate a PD"))?;
    let cq = device.create_cq(depth, None);
    let cq = cq.map_err(stack("create a CQ"))?;
    let port = device.bind_ud(addr);
    let port = port.map_err(BenchError::system("bind a UDP port"))?;
    let mut init = UdInit::new(&port, QKEY, &cq, &cq);
    init.num = Some(port.local_addr().port().into());
    with(&mut init);
    let qp = pd.create_ud_qp(&init);
    Ok((pd, cq, qp.map_err(stack("create a queue pair"))?))
}

impl Listening {
    pub(super) fn addr(&self) -> SocketAddr {
        self.qp.port().local_addr()
    }

    fn end(self, addr: SocketAddr) -> Result<End> {
        let len = self.spec.len()?;
        let room = len.max(16);
        let alloc = |access| {
            let mr = self.pd.alloc_mr(room, access);
            let mr = mr.map_err(stack("allocate a region"))?;
            mr.fill(0, room, 0x5a).map_err(stack("fill a region"))?;
            Ok(mr)
        };
        let source = alloc(Access::LOCAL_WRITE)?;
        let target = alloc(Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let end = End {
            cq: self.cq,
            qp: self.qp,
            spec: self.spec,
            len,
            source,
            target,
            peer: dest(addr),
            remote: None,
            question: 0,
            wcs: vec![Wc::default(); BATCH],
        };
        end.post_recvs(RECVS as usize)?;
        Ok(end)
    }

    /// Waits for the peer's first note.
    pub(super) fn accept(self) -> Result<Box<dyn Responder>> {
        let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
        let mut end = self.end(nobody)?;
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if let Some(Note {
                what: HELLO, from, ..
            }) = end.news(AGAIN)?.note
            {
                end.peer = dest(from.addr);
                end.note(HELLO, 0, 0)?;
                return Ok(Box::new(end));
            }
        }
        Err(BenchError::Stuck(PATIENCE.as_secs(), "the peer's datagram"))
    }
}

pub(super) fn connect(spec: &Spec, addr: SocketAddr) -> Result<Box<dyn Initiator>> {
    let mut end = listen(spec)?.end(addr)?;
    let (start, mut heard) = (Instant::now(), false);
    while start.elapsed() < PATIENCE {
        end.note(HELLO, 0, 0)?;
        if let Some(Note { what: HELLO, .. }) = end.news(AGAIN)?.note {
            heard = true;
        }
        let waits = spec.transport == Transport::Local && end.qp.port().local_peers().is_empty();
        if heard && !waits {
            return Ok(Box::new(end));
        }
    }
    Err(BenchError::Stuck(PATIENCE.as_secs(), "the peer's datagram"))
}

/// The queue pair behind a port, which has the port's number.
pub fn dest(addr: SocketAddr) -> UdDest {
    UdDest {
        addr,
        qp_num: addr.port().into(),
        qkey: QKEY,
        from: None,
        traffic_class: 0,
    }
}

impl End {
    fn post_recvs(&self, count: usize) -> Result<()> {
        let wr = RecvWr::new(0).sge(self.target.sge(0, self.target.len()));
        let wrs = vec![wr; count];
        self.qp.post_recv(&wrs).map_err(stack("post receives"))
    }

    fn note(&mut self, what: u64, question: u32, value: u32) -> Result<()> {
        let imm = what << 48 | u64::from(question & 0xffff) << 32 | u64::from(value);
        self.room(1)?;
        let wr = SendWr::send_imm(0, imm);
        self.qp
            .post_send(&wr, &self.peer)
            .map_err(stack("send a note"))
    }

    /// Waits until `count` sends may be posted. Messages that arrive meanwhile are ignored.
    fn room(&mut self, count: u32) -> Result<()> {
        let mut patience = Patience::new();
        while self.qp.outstanding() + count > SENDS {
            self.look()?;
            patience.spin("sends that are to go out")?;
        }
        Ok(())
    }

    fn data(&self) -> Result<SendWr> {
        let wr = match self.spec.op {
            Op::Send => SendWr::send(0),
            Op::Write => {
                let remote = self.remote;
                let unknown = || BenchError::PeerGone("it has no buffer".to_owned());
                SendWr::write(0, remote.ok_or_else(unknown)?)
            }
            _ => {
                return Err(BenchError::Usage(
                    "datagrams are sent or written".to_owned(),
                ));
            }
        };
        Ok(wr.sge(self.source.sge(0, self.len)))
    }

    /// Polls once.
    fn look(&mut self) -> Result<News> {
        let n = self.cq.poll(&mut self.wcs).map_err(stack("poll a CQ"))?;
        self.count(n)
    }

    /// Polls or waits until something arrives or the time is over.
    fn news(&mut self, limit: Duration) -> Result<News> {
        let start = Instant::now();
        let mut looks = 0_u32;
        loop {
            let news = if self.spec.busy || self.spec.kind == Kind::Stream {
                looks = looks.wrapping_add(1);
                self.look()?
            } else {
                let n = self.cq.wait(&mut self.wcs, Some(limit));
                self.count(n.map_err(stack("wait for a CQ"))?)?
            };
            let some = news.messages > 0 || news.note.is_some();
            if some || looks.is_multiple_of(1024) && start.elapsed() > limit {
                return Ok(news);
            }
        }
    }

    /// Counts the first `n` completions.
    fn count(&mut self, n: usize) -> Result<News> {
        let (mut news, mut recvs) = (News::default(), 0);
        for wc in &self.wcs[..n] {
            if wc.status != WcStatus::Success {
                return Err(stack("a datagram")(wc.status));
            }
            match (wc.opcode, wc.imm, wc.source) {
                (WcOpcode::Recv, Some(imm), Some(from)) => {
                    recvs += 1;
                    news.note = Some(Note {
                        what: imm >> 48,
                        question: (imm >> 32) as u32 & 0xffff,
                        value: imm as u32,
                        from,
                    });
                }
                (WcOpcode::Recv, ..) => {
                    recvs += 1;
                    news.messages += 1;
                }
                (WcOpcode::WriteRecord, ..) => {
                    let record = self.qp.take_record(wc.wr_id);
                    news.messages += u64::from(record.is_some_and(|record| record.is_complete()));
                }
                _ => {}
            }
        }
        if recvs > 0 {
            self.post_recvs(recvs)?;
        }
        Ok(news)
    }

    fn stream(&mut self, count: u64) -> Result<()> {
        let batch = u64::from(self.spec.window).clamp(1, BATCH as u64);
        let wrs = vec![(self.data()?, self.peer); batch as usize];
        let mut left = count;
        loop {
            while left > 0 {
                let now = left.min(batch);
                self.room(now as u32)?;
                let wrs = &wrs[..now as usize];
                self.qp.post_sends(wrs).map_err(stack("post sends"))?;
                left -= now;
            }
            self.room(SENDS)?;
            self.question += 1;
            let question = self.question & 0xffff;
            let start = Instant::now();
            left = loop {
                self.note(END, question, 0)?;
                if let Some(missing) = self.answer(question)? {
                    break missing.into();
                }
                if start.elapsed() > PATIENCE {
                    return Err(BenchError::Stuck(PATIENCE.as_secs(), "an answer"));
                }
            };
            if left == 0 {
                return Ok(());
            }
        }
    }

    fn answer(&mut self, to: u32) -> Result<Option<u32>> {
        let start = Instant::now();
        while start.elapsed() < AGAIN {
            if let Some(Note {
                what: COUNT,
                question,
                value,
                ..
            }) = self.news(AGAIN)?.note
                && question == to
            {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    fn serve_stream(&mut self, count: u64) -> Result<()> {
        let (mut got, mut last) = (0, Instant::now());
        loop {
            let news = self.news(AGAIN)?;
            got += news.messages;
            if news.messages > 0 {
                last = Instant::now();
            } else if last.elapsed() > PATIENCE {
                return Err(BenchError::Stuck(PATIENCE.as_secs(), "datagrams"));
            }
            if let Some(Note {
                what: END,
                question,
                ..
            }) = news.note
            {
                let missing = u32::try_from(count.saturating_sub(got)).unwrap_or(u32::MAX);
                // The last answer is sent three times, because this end does not wait for a repeated question.
                for _ in 0..if missing == 0 { 3 } else { 1 } {
                    self.note(COUNT, question, missing)?;
                }
                if missing == 0 {
                    return self.room(SENDS);
                }
            }
        }
    }

    fn message(&mut self) -> Result<()> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            if self.news(PATIENCE)?.messages > 0 {
                return Ok(());
            }
        }
        Err(BenchError::Stuck(PATIENCE.as_secs(), "a datagram"))
    }
}

impl Initiator for End {
    fn set_remote(&mut self, remote: Option<Remote>) {
        self.remote = remote.map(|r| RemoteAddr {
            addr: r.addr,
            rkey: r.rkey,
        });
    }

    fn remote(&self) -> Option<Remote> {
        let remote = self.target.remote(0);
        Some(Remote {
            addr: remote.addr,
            rkey: remote.rkey,
        })
    }

    fn drive(&mut self, count: u64, laps: &mut Vec<f64>) -> Result<()> {
        if self.spec.kind == Kind::Stream {
            return self.stream(count);
        }
        let wr = self.data()?;
        let mut start = Instant::now();
        for _ in 0..count {
            self.qp
                .post_send(&wr, &self.peer)
                .map_err(stack("post a send"))?;
            self.message()?;
            laps.push(lap(&mut start) / 2.0);
        }
        Ok(())
    }
}

impl Responder for End {
    fn remote(&self) -> Option<Remote> {
        Initiator::remote(self)
    }

    fn prepare(&mut self, _count: u64, remote: Option<Remote>) -> Result<()> {
        self.set_remote(remote);
        Ok(())
    }

    fn serve(&mut self, count: u64) -> Result<()> {
        if self.spec.kind == Kind::Stream {
            return self.serve_stream(count);
        }
        let wr = self.data()?;
        for _ in 0..count {
            self.message()?;
            self.qp
                .post_send(&wr, &self.peer)
                .map_err(stack("post a send"))?;
        }
        Ok(())
    }
}
