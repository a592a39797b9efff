//! Links over verbs: a queue pair between neighbours, and the three messages of the link protocol.

use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_verbs::{
    Access, Cq, Device, Mr, Pd, Qp, QpInit, QpState, RecvWr, Rnr, SendWr, Wc, WcOpcode, WcStatus,
};

use crate::link::{Failure, In, LOOK, Out, Ring, Slot, Trouble};
use crate::wire::{self, HEADER, Header, Kind, SMALL};

/// Receives for small messages that each side has posted.
const SMALLS: usize = 8;
/// Work requests that may be outstanding.
const DEPTH: u32 = 32;
/// The receive or Send of an element has this bit; the rest is the element's number.
const ELEMENT: u64 = 1 << 32;
/// The number of a small message's Send.
const MESSAGE: u64 = 1 << 33;
/// How long a node that reports a failure waits for the neighbour to close.
const LINGER: Duration = Duration::from_secs(2);

fn local(error: impl std::fmt::Display) -> Trouble {
    Trouble::Local(error.to_string())
}

/// The elements of a node and their control data, registered once for the turn. Peers have no right to it: they only Send.
pub(crate) struct Memory {
    pub(crate) pd: Pd,
    data: Mr,
    control: Mr,
    element: usize,
}

impl Memory {
    pub(crate) fn new(device: &Device, ring: &Ring) -> Result<Self, weft_verbs::Error> {
        let pd = device.alloc_pd()?;
        let data = pd.alloc_mr(ring.element * ring.elements, Access::LOCAL_WRITE)?;
        let control = pd.alloc_mr(HEADER * ring.elements, Access::LOCAL_WRITE)?;
        Ok(Self {
            pd,
            data,
            control,
            element: ring.element,
        })
    }

    /// Whether it is what this ring needs.
    pub(crate) fn fits(&self, ring: &Ring) -> bool {
        (self.element, self.data.len()) == (ring.element, ring.element * ring.elements)
    }

    pub(crate) fn read(&self, slot: &Slot, off: usize, out: &mut [u8]) -> Result<(), String> {
        let at = slot.index * self.element + off;
        self.data.read(at, out).map_err(|e| e.to_string())
    }

    pub(crate) fn write(&self, slot: &Slot, off: usize, bytes: &[u8]) -> Result<(), String> {
        let at = slot.index * self.element + off;
        self.data.write(at, bytes).map_err(|e| e.to_string())
    }
}

/// A queue pair with receives posted for small messages.
pub(crate) struct Prepared {
    cq: Cq,
    small: Mr,
    receives: usize,
}

impl Prepared {
    fn new(memory: &Memory, receives: usize) -> Result<(Self, Qp), weft_verbs::Error> {
        let cq = memory.pd.device().create_cq(4 * DEPTH, None)?;
        let small = memory.pd.alloc_mr(SMALLS * SMALL, Access::LOCAL_WRITE)?;
        let qp = memory.pd.create_qp(&QpInit {
            max_send_wr: DEPTH,
            max_recv_wr: DEPTH,
            max_sge: 2,
            max_inline: SMALL as u32,
            // A message may come before its receive is posted: a busy node is not a dead one.
            rnr: Rnr::Wait,
            ..QpInit::new(&cq, &cq)
        })?;
        let wrs: Vec<_> = (0..receives).map(|i| receive(&small, i)).collect();
        qp.post_recv(&wrs)
            .map_err(|_| weft_verbs::Error::Invalid("receives"))?;
        Ok((
            Self {
                cq,
                small,
                receives,
            },
            qp,
        ))
    }

    /// For the link to the successor.
    pub(crate) fn out(memory: &Memory) -> Result<(Self, Qp), weft_verbs::Error> {
        Self::new(memory, SMALLS)
    }

    /// For the link from the predecessor: its messages take their receives in order, so only the first can be small.
    pub(crate) fn from(memory: &Memory) -> Result<(Self, Qp), weft_verbs::Error> {
        Self::new(memory, 1)
    }
}

fn receive(small: &Mr, index: usize) -> RecvWr {
    RecvWr::new(index as u64).sge(small.sge(index * SMALL, SMALL))
}

enum Event {
    Small(Header),
    /// An element's receive holds this many bytes.
    Element(u32),
    Sent,
}

/// The common part of both directions.
struct Link {
    // Dropped first, because the connection uses the memory.
    qp: Qp,
    cq: Cq,
    small: Mr,
    /// The next small receive that is not posted.
    next: usize,
    memory: Arc<Memory>,
}

impl Link {
    fn new(base: Prepared, qp: Qp, memory: Arc<Memory>) -> Self {
        Self {
            qp,
            cq: base.cq,
            small: base.small,
            next: base.receives % SMALLS,
            memory,
        }
    }

    fn event(&mut self, wait: Duration) -> Result<Option<Event>, Trouble> {
        let end = Instant::now() + wait;
        loop {
            let mut wcs = [Wc::default(); 1];
            let left = end.saturating_duration_since(Instant::now());
            if self.cq.wait(&mut wcs, Some(left)).map_err(local)? == 0 {
                if self.qp.state() != QpState::Rts {
                    return Err(Trouble::Gone("the connection has ended".into()));
                }
                return Ok(None);
            }
            let wc = &wcs[0];
            match wc.status {
                WcStatus::Success => {}
                WcStatus::LocLenErr => return Err(Trouble::Protocol("a message that is too long")),
                WcStatus::WrFlushErr => {
                    return Err(Trouble::Gone("the connection has ended".into()));
                }
                other => return Err(Trouble::Gone(other.to_string())),
            }
            if wc.opcode != WcOpcode::Recv {
                if wc.wr_id & ELEMENT != 0 {
                    return Ok(Some(Event::Sent));
                }
                continue;
            }
            if wc.wr_id & ELEMENT != 0 {
                return Ok(Some(Event::Element(wc.byte_len)));
            }
            let (at, len) = (wc.wr_id as usize * SMALL, (wc.byte_len as usize).min(SMALL));
            let bytes = self.small.to_vec(at, len).map_err(local)?;
            let header =
                Header::decode(&bytes).ok_or(Trouble::Protocol("a message that is none"))?;
            if header.len as usize != len - HEADER {
                return Err(Trouble::Protocol("a length that is not the message's"));
            }
            if header.kind == Kind::Fail {
                return Err(Trouble::Told(Failure {
                    node: header.origin.into(),
                    why: wire::failure_text(&bytes[HEADER..]),
                }));
            }
            return Ok(Some(Event::Small(header)));
        }
    }

    fn expect_small(&mut self) -> Result<(), Trouble> {
        let wr = receive(&self.small, self.next);
        self.next = (self.next + 1) % SMALLS;
        self.qp.post_recv(&[wr]).map_err(refused)
    }

    /// The neighbour may have sent the reason before it closed.
    fn reason(&mut self, trouble: Trouble) -> Trouble {
        if matches!(trouble, Trouble::Gone(_)) {
            for _ in 0..2 * DEPTH {
                match self.event(Duration::ZERO) {
                    Err(told @ Trouble::Told(_)) => return told,
                    Ok(None) => break,
                    _ => {}
                }
            }
        }
        trouble
    }

    fn message(&self, bytes: &[u8]) -> Result<(), Trouble> {
        self.qp
            .post_send_one(SendWr::send(MESSAGE).inline(bytes).signaled())
            .map_err(refused)
    }

    fn tell(&mut self, failure: &Failure) {
        let bytes = wire::encode_failure(failure.node, &failure.why);
        if self.message(&bytes).is_ok() {
            // A neighbour that has reported a failure needs no report; two of them would wait for each other to close.
            let end = Instant::now() + LINGER;
            while self.qp.state() == QpState::Rts && Instant::now() < end {
                if self.event(LOOK).is_err() {
                    break;
                }
            }
        }
        self.qp.disconnect();
    }

    /// Waits for the neighbour to close.
    fn linger(&mut self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        let mut wcs = [Wc::default(); 4];
        while self.qp.state() == QpState::Rts {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.cq.wait(&mut wcs, Some(left.min(LOOK))).is_err() {
                return false;
            }
        }
        true
    }
}

fn refused(error: weft_verbs::PostError) -> Trouble {
    Trouble::Gone(format!("cannot post: {error}"))
}

/// The link to the successor.
pub(crate) struct RdmaOut {
    link: Link,
    goodbye: bool,
}

impl RdmaOut {
    pub(crate) fn new(base: Prepared, qp: Qp, memory: Arc<Memory>) -> Self {
        Self {
            link: Link::new(base, qp, memory),
            goodbye: false,
        }
    }

    /// Waits for a confirmation; whether a filler is wanted.
    fn confirmation(&mut self, stop: &dyn Fn() -> bool) -> Result<bool, Trouble> {
        loop {
            match self.link.event(LOOK)? {
                Some(Event::Small(header)) if header.kind == Kind::Confirm => {
                    self.link.expect_small()?;
                    return Ok(header.flags & 1 != 0);
                }
                Some(Event::Small(_)) => return Err(Trouble::Protocol("no confirmation")),
                _ if stop() => return Err(Trouble::Stopped),
                _ => {}
            }
        }
    }
}

impl RdmaOut {
    fn forward(
        &mut self,
        slot: &Slot,
        header: &Header,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let request = Header::new(Kind::Request).encode();
        self.link.message(&request)?;
        if self.confirmation(stop)? {
            let filler = Header::new(Kind::Filler).encode();
            self.link.message(&filler)?;
        }
        let memory = &self.link.memory;
        let at = slot.index * HEADER;
        memory.control.write(at, &header.encode()).map_err(local)?;
        let data = memory
            .data
            .sge(slot.index * memory.element, header.len as usize);
        let wr = SendWr::send(ELEMENT | slot.index as u64)
            .sge(memory.control.sge(at, HEADER))
            .sge(data)
            .signaled();
        self.link.qp.post_send_one(wr).map_err(refused)?;
        loop {
            match self.link.event(LOOK)? {
                Some(Event::Sent) => return Ok(()),
                // The successor may have received everything before our Send completes.
                Some(Event::Small(header)) if header.kind == Kind::Bye && !self.goodbye => {
                    self.goodbye = true;
                }
                Some(_) => return Err(Trouble::Protocol("a message out of place")),
                None if stop() => return Err(Trouble::Stopped),
                None => {}
            }
        }
    }
}

impl Out for RdmaOut {
    fn send(
        &mut self,
        slot: &Slot,
        header: &Header,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), Trouble> {
        let sent = self.forward(slot, header, stop);
        sent.map_err(|trouble| self.link.reason(trouble))
    }

    fn poll(&mut self, wait: Duration) -> Result<bool, Trouble> {
        if self.goodbye {
            return Ok(true);
        }
        match self.link.event(wait)? {
            Some(Event::Small(header)) if header.kind == Kind::Bye => {
                self.goodbye = true;
                Ok(true)
            }
            Some(Event::Small(_)) => Err(Trouble::Protocol("a message out of place")),
            _ => Ok(false),
        }
    }

    fn tell(&mut self, failure: &Failure) {
        self.link.tell(failure);
    }

    fn close(&mut self) {
        self.link.qp.disconnect();
    }
}

/// The link from the predecessor.
pub(crate) struct RdmaIn {
    link: Link,
    /// A receive was posted for a failure while no element was free; a filler has to come for it.
    late: bool,
}

impl RdmaIn {
    pub(crate) fn new(base: Prepared, qp: Qp, memory: Arc<Memory>) -> Self {
        Self {
            link: Link::new(base, qp, memory),
            late: false,
        }
    }
}

impl RdmaIn {
    fn place(&mut self, slot: &Slot, stop: &dyn Fn() -> bool) -> Result<Header, Trouble> {
        let memory = Arc::clone(&self.link.memory);
        let at = slot.index * HEADER;
        let wr = RecvWr::new(ELEMENT | slot.index as u64)
            .sge(memory.control.sge(at, HEADER))
            .sge(memory.data.sge(slot.index * memory.element, memory.element));
        self.link.qp.post_recv(&[wr]).map_err(refused)?;
        self.link.expect_small()?;
        let mut filler = self.late;
        self.late = false;
        let confirm = Header {
            flags: filler.into(),
            ..Header::new(Kind::Confirm)
        };
        self.link.message(&confirm.encode())?;
        let len = loop {
            match self.link.event(LOOK)? {
                Some(Event::Element(len)) => break len as usize,
                Some(Event::Small(header)) if filler && header.kind == Kind::Filler => {
                    filler = false;
                }
                Some(Event::Small(_)) => return Err(Trouble::Protocol("no element")),
                _ if stop() => return Err(Trouble::Stopped),
                _ => {}
            }
        };
        let bytes = memory.control.to_vec(at, HEADER).map_err(local)?;
        let header = (len >= HEADER)
            .then(|| Header::decode(&bytes))
            .flatten()
            .ok_or(Trouble::Protocol("an element without control data"))?;
        if header.len as usize != len - HEADER {
            return Err(Trouble::Protocol("a length that is not the element's"));
        }
        if header.kind == Kind::Fail {
            let mut text = vec![0; (len - HEADER).min(SMALL - HEADER)];
            memory.read(slot, 0, &mut text).map_err(Trouble::Local)?;
            return Err(Trouble::Told(Failure {
                node: header.origin.into(),
                why: wire::failure_text(&text),
            }));
        }
        Ok(header)
    }
}

impl In for RdmaIn {
    fn request(&mut self, wait: Duration) -> Result<bool, Trouble> {
        match self.link.event(wait)? {
            Some(Event::Small(header)) if header.kind == Kind::Request => Ok(true),
            Some(Event::Small(_)) => Err(Trouble::Protocol("no request")),
            _ => Ok(false),
        }
    }

    fn hold(&mut self) -> Result<(), Trouble> {
        if !self.late {
            self.late = true;
            self.link.expect_small()?;
        }
        match self.link.event(Duration::ZERO)? {
            Some(Event::Small(_)) => Err(Trouble::Protocol("no patience for a confirmation")),
            _ => Ok(()),
        }
    }

    fn take(&mut self, slot: &mut Slot, stop: &dyn Fn() -> bool) -> Result<Header, Trouble> {
        let placed = self.place(slot, stop);
        placed.map_err(|trouble| self.link.reason(trouble))
    }

    fn goodbye(&mut self) -> Result<(), Trouble> {
        self.link.message(&Header::new(Kind::Bye).encode())
    }

    fn closed(&mut self, wait: Duration) -> bool {
        self.link.linger(wait)
    }

    fn tell(&mut self, failure: &Failure) {
        // Between a request and its confirmation no receive is posted that the predecessor's own word could take.
        let _ = self.link.expect_small();
        self.link.tell(failure);
    }
}
