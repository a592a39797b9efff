//! A node of a ring: receives elements, passes them to the caller, and forwards them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use crate::kept::Kept;
use crate::link::{Failure, In, LOOK, Out, Ring, Slot, Trouble};
use crate::wire::{Header, Kind};
use crate::{Error, lock, rdma};

/// How long a node that has sent its goodbye waits for its predecessor to close.
const CLOSING: Duration = Duration::from_secs(5);

#[derive(Default)]
struct State {
    free: Vec<Slot>,
    /// Have come and not been looked at.
    ready: VecDeque<(Slot, Header)>,
    /// Elements to forward.
    outgoing: VecDeque<(Slot, Header)>,
    failed: Option<Failure>,
    /// Number of our next element.
    seq: u32,
    woken: bool,
    /// The query thread has nothing more to forward.
    finished: bool,
    load: Load,
}

/// The statistics of a node in a turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Load {
    /// Elements that came from the predecessor.
    pub received: u64,
    /// Bytes in them.
    pub received_bytes: u64,
    /// Elements that went to the successor.
    pub sent: u64,
    /// Bytes in them.
    pub sent_bytes: u64,
    /// How long the query thread waited for the ring.
    pub waited: Duration,
}

pub(crate) struct Shared {
    ring: Ring,
    memory: Option<Arc<rdma::Memory>>,
    state: Mutex<State>,
    changed: Condvar,
    kept: Arc<Kept>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.memory.is_none() {
            self.kept.keep(lock(&self.state).free.drain(..));
        }
    }
}

impl Shared {
    pub(crate) fn fail(&self, node: usize, why: impl Into<String>) {
        let mut state = lock(&self.state);
        if state.failed.is_none() {
            let why = why.into();
            state.failed = Some(Failure { node, why });
        }
        drop(state);
        self.changed.notify_all();
    }

    fn failed(&self) -> Option<Failure> {
        lock(&self.state).failed.clone()
    }

    fn stop(&self) -> bool {
        lock(&self.state).failed.is_some()
    }

    fn release(&self, slot: Slot) {
        lock(&self.state).free.push(slot);
        self.changed.notify_all();
    }

    /// Forwards the element, or ends its journey.
    fn pass(&self, slot: Slot, header: Header) {
        if header.hop >= self.ring.limit() {
            return self.release(slot);
        }
        lock(&self.state).outgoing.push_back((slot, header));
        self.changed.notify_all();
    }

    fn blame(&self, neighbour: usize, trouble: Trouble) {
        match trouble {
            Trouble::Gone(why) => self.fail(neighbour, format!("died or cannot be reached: {why}")),
            Trouble::Protocol(why) => self.fail(neighbour, format!("broke the protocol: {why}")),
            Trouble::Told(failure) => self.fail(failure.node, failure.why),
            Trouble::Local(why) => self.fail(self.ring.me, why),
            Trouble::Stopped => {}
        }
    }

    /// The transmitter thread.
    fn transmit(&self, mut out: Box<dyn Out>) {
        if let Err(trouble) = self.forward(out.as_mut()) {
            self.blame(self.ring.next(), trouble);
        }
        match self.failed() {
            Some(failure) => out.tell(&failure),
            None => out.close(),
        }
    }

    fn forward(&self, out: &mut dyn Out) -> Result<(), Trouble> {
        let mut goodbye = false;
        loop {
            let mut state = lock(&self.state);
            let item = loop {
                if state.failed.is_some() {
                    return Err(Trouble::Stopped);
                }
                if let Some(item) = state.outgoing.pop_front() {
                    break Some(item);
                }
                if state.finished {
                    break None;
                }
                let (held, time) = self
                    .changed
                    .wait_timeout(state, LOOK)
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                state = held;
                if time.timed_out() && state.outgoing.is_empty() && !goodbye {
                    drop(state);
                    // It can have everything while our query thread still looks at its last element.
                    goodbye = out.poll(Duration::ZERO)?;
                    state = lock(&self.state);
                }
            };
            drop(state);
            let Some((slot, mut header)) = item else {
                // The successor has everything when it says so.
                while !goodbye {
                    if self.stop() {
                        return Err(Trouble::Stopped);
                    }
                    goodbye = out.poll(LOOK)?;
                }
                return Ok(());
            };
            if goodbye {
                return Err(Trouble::Protocol("a goodbye before the end"));
            }
            header.hop += 1;
            out.send(&slot, &header, &|| self.stop())?;
            let mut state = lock(&self.state);
            state.load.sent += u64::from(header.kind == Kind::Payload);
            state.load.sent_bytes += u64::from(header.len);
            state.free.push(slot);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// The receiver thread.
    fn receive(&self, mut from: Box<dyn In>) {
        match self.collect(from.as_mut()) {
            Ok(()) => {
                from.closed(CLOSING);
            }
            Err(trouble) => {
                self.blame(self.ring.previous(), trouble);
                if let Some(failure) = self.failed() {
                    from.tell(&failure);
                }
            }
        }
    }

    fn collect(&self, from: &mut dyn In) -> Result<(), Trouble> {
        let mut journeys = OriginProgress::new(&self.ring);
        while !journeys.over() {
            if !from.request(LOOK)? {
                if self.stop() {
                    return Err(Trouble::Stopped);
                }
                continue;
            }
            let mut held = false;
            let mut slot = loop {
                let mut state = lock(&self.state);
                if state.failed.is_some() {
                    return Err(Trouble::Stopped);
                }
                if let Some(slot) = state.free.pop() {
                    break slot;
                }
                if held {
                    let waited = self.changed.wait_timeout(state, LOOK);
                    drop(waited);
                } else {
                    drop(state);
                }
                from.hold()?;
                held = true;
            };
            let header = from.take(&mut slot, &|| self.stop())?;
            journeys.check(&header).map_err(Trouble::Protocol)?;
            let mut state = lock(&self.state);
            state.load.received += u64::from(header.kind == Kind::Payload);
            state.load.received_bytes += u64::from(header.len);
            state.ready.push_back((slot, header));
            drop(state);
            self.changed.notify_all();
        }
        from.goodbye()
    }
}

/// The elements seen from each origin: they come in order, over the right number of links, and none after the end.
struct OriginProgress {
    me: usize,
    nodes: usize,
    limit: usize,
    element: usize,
    next: Vec<u32>,
    ended: Vec<bool>,
}

impl OriginProgress {
    fn new(ring: &Ring) -> Self {
        let nodes = ring.nodes.len();
        Self {
            me: ring.me,
            nodes,
            limit: ring.limit().into(),
            element: ring.element,
            next: vec![0; nodes],
            ended: vec![false; nodes],
        }
    }

    fn over(&self) -> bool {
        self.ended.iter().filter(|&&ended| ended).count() == self.limit
    }

    fn check(&mut self, header: &Header) -> Result<(), &'static str> {
        let origin = usize::from(header.origin);
        if origin >= self.nodes {
            return Err("an origin that is no node");
        }
        let links = match (self.me + self.nodes - origin) % self.nodes {
            0 => self.nodes,
            links => links,
        };
        if usize::from(header.hop) != links || links > self.limit {
            return Err("an element on the wrong way");
        }
        if self.ended[origin] || header.seq != self.next[origin] {
            return Err("an element out of order");
        }
        if header.len as usize > self.element {
            return Err("a length beyond the element");
        }
        match header.kind {
            Kind::Payload => self.next[origin] = header.seq.wrapping_add(1),
            Kind::End => self.ended[origin] = true,
            _ => return Err("a message out of place"),
        }
        Ok(())
    }
}

/// An element of the ring while the query thread looks at it. Dropping it passes it on.
pub struct Element {
    slot: Option<Slot>,
    header: Header,
    shared: Arc<Shared>,
}

impl Element {
    /// Bytes of data.
    pub fn len(&self) -> usize {
        self.header.len as usize
    }
    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.header.len == 0
    }
    /// The node that it comes from.
    pub fn origin(&self) -> usize {
        self.header.origin.into()
    }
    /// Whether it is our own and has returned ([`Ring::home`]).
    pub fn is_home(&self) -> bool {
        self.header.hop != 0 && usize::from(self.header.origin) == self.shared.ring.me
    }
    /// Data of its origin: eight bits.
    pub fn flags(&self) -> u8 {
        self.header.flags
    }
    /// Data of its origin: four words.
    pub fn user(&self) -> [u64; 4] {
        self.header.user
    }

    /// Copies bytes out. A copy, because registered memory is never borrowed (ADR 1); a node looks at each element once.
    ///
    /// # Errors
    /// [`Error::Local`] out of bounds.
    pub fn read(&self, off: usize, out: &mut [u8]) -> Result<(), Error> {
        let bounds = || Error::Local("read past the end of an element".into());
        if off
            .checked_add(out.len())
            .is_none_or(|end| end > self.len())
        {
            return Err(bounds());
        }
        let Some(slot) = &self.slot else {
            return Err(bounds());
        };
        if let Some(memory) = &self.shared.memory {
            return memory.read(slot, off, out).map_err(Error::Local);
        }
        out.copy_from_slice(&slot.plain.as_bytes()[off..off + out.len()]);
        Ok(())
    }

    /// Its data as words of this machine, where it is not registered memory. Bytes beyond the last whole word are left out.
    pub fn in_place(&self) -> Option<&[u64]> {
        let slot = self.slot.as_ref()?;
        let words = self.len() / 8;
        self.shared.memory.is_none().then(|| &slot.plain[..words])
    }

    /// As [`Element::read`], of words of this machine, from this word on.
    ///
    /// # Errors
    /// As [`Element::read`].
    pub fn read_words(&self, off: usize, out: &mut [u64]) -> Result<(), Error> {
        self.read(off.saturating_mul(8), out.as_mut_bytes())
    }
}

impl Drop for Element {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.shared.pass(slot, self.header);
        }
    }
}

/// A free element for our own data. Dropping it gives it back.
pub struct Room {
    slot: Option<Slot>,
    shared: Arc<Shared>,
}

impl Room {
    /// Bytes that it takes.
    pub fn capacity(&self) -> usize {
        self.shared.ring.element
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// [`Error::Local`] out of bounds.
    pub fn write(&mut self, off: usize, bytes: &[u8]) -> Result<(), Error> {
        let end = off.checked_add(bytes.len());
        let (Some(end), Some(slot)) = (end.filter(|&end| end <= self.capacity()), &mut self.slot)
        else {
            return Err(Error::Local("written past the end of an element".into()));
        };
        if let Some(memory) = &self.shared.memory {
            return memory.write(slot, off, bytes).map_err(Error::Local);
        }
        slot.plain.as_mut_bytes()[off..end].copy_from_slice(bytes);
        Ok(())
    }

    /// The first `len` bytes are an element of ours, which can be processed like those of others.
    ///
    /// # Errors
    /// [`Error::Local`] out of bounds.
    pub fn commit(mut self, len: usize, flags: u8, user: [u64; 4]) -> Result<Element, Error> {
        if len > self.capacity() {
            return Err(Error::Local("more than an element".into()));
        }
        let seq = {
            let mut state = lock(&self.shared.state);
            let seq = state.seq;
            state.seq = seq.wrapping_add(1);
            seq
        };
        let header = Header {
            flags,
            origin: self.shared.ring.me as u16,
            seq,
            len: len as u32,
            user,
            ..Header::new(Kind::Payload)
        };
        Ok(Element {
            slot: self.slot.take(),
            header,
            shared: Arc::clone(&self.shared),
        })
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            self.shared.release(slot);
        }
    }
}

/// The data that a node contributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Own {
    /// Data that is there: room is asked for.
    Now,
    /// Perhaps later: a [`Waker`] says when.
    Later,
    /// Nothing from here on.
    Never,
}

/// The next action of a node.
pub enum Next {
    /// Process an element of another node (or one of ours that has returned).
    Element(Element),
    /// Fill an element of our own.
    Room(Room),
    /// A [`Waker`] was used.
    Woken,
    /// All nodes' elements have been here.
    End,
}

/// A node in one turn of a ring.
pub struct Node {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    end_sent: bool,
    ends: usize,
    expected: usize,
    over: bool,
}

impl Node {
    pub(crate) fn start(
        ring: Ring,
        memory: Option<Arc<rdma::Memory>>,
        links: Option<(Box<dyn In>, Box<dyn Out>)>,
        kept: &Arc<Kept>,
    ) -> Result<Self, Error> {
        let words = if memory.is_some() {
            0
        } else {
            ring.element / 8
        };
        let free = (0..ring.elements)
            .map(|index| Slot {
                index,
                plain: kept.plain(words),
            })
            .collect();
        let expected = ring.limit().into();
        let shared = Arc::new(Shared {
            ring,
            memory,
            state: Mutex::new(State {
                free,
                ..State::default()
            }),
            changed: Condvar::new(),
            kept: Arc::clone(kept),
        });
        let mut node = Self {
            shared,
            threads: Vec::new(),
            end_sent: false,
            ends: 0,
            expected,
            over: false,
        };
        if let Some((from, out)) = links {
            let (a, b) = (Arc::clone(&node.shared), Arc::clone(&node.shared));
            node.spawn("weft-ring-rx", move || a.receive(from))?;
            node.spawn("weft-ring-tx", move || b.transmit(out))?;
        }
        Ok(node)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let thread = thread::Builder::new().name(name.into()).spawn(run);
        self.threads
            .push(thread.map_err(|e| Error::Local(format!("no thread: {e}")))?);
        Ok(())
    }

    pub fn ring(&self) -> &Ring {
        &self.shared.ring
    }

    /// The statistics of this node so far.
    pub fn load(&self) -> Load {
        lock(&self.shared.state).load
    }

    /// Waits for the next action. With `more`, this node has further data to contribute, which is requested as long as the ring has room. After a call
    /// without it no more can be contributed. Elements of others come first.
    ///
    /// # Errors
    /// [`Error::Failed`] if a node has failed or given up.
    pub fn next(&mut self, more: bool) -> Result<Next, Error> {
        self.next_with(if more { Own::Now } else { Own::Never })
    }

    /// A handle that ends a wait with [`Next::Woken`].
    pub fn waker(&self) -> Waker {
        Waker(Arc::downgrade(&self.shared))
    }

    /// Checks whether the turn has failed.
    ///
    /// # Errors
    /// [`Error::Failed`] if it has.
    pub fn check(&self) -> Result<(), Error> {
        match self.shared.failed() {
            Some(failure) => Err(self.shared.ring.failure(&failure)),
            None => Ok(()),
        }
    }

    /// As [`Node::next`], for data of our own that is made meanwhile.
    ///
    /// # Errors
    /// [`Error::Failed`] when a node has died or given up.
    pub fn next_with(&mut self, own: Own) -> Result<Next, Error> {
        let more = own == Own::Now;
        let shared = &self.shared;
        let mut began = None;
        let mut state = lock(&shared.state);
        let next = loop {
            if let Some(failure) = &state.failed {
                return Err(shared.ring.failure(failure));
            }
            if let Some((slot, header)) = state.ready.pop_front() {
                if header.kind == Kind::End {
                    self.ends += 1;
                    if header.hop >= shared.ring.limit() {
                        state.free.push(slot);
                    } else {
                        state.outgoing.push_back((slot, header));
                    }
                    shared.changed.notify_all();
                    continue;
                }
                break Next::Element(Element {
                    slot: Some(slot),
                    header,
                    shared: Arc::clone(shared),
                });
            }
            // A ring whose elements are all full cannot move. So a node that adds an element leaves one free: then one is free somewhere at
            // any time, and its predecessor can send.
            let room = state.free.len() >= 2 || (self.expected == 0 && !state.free.is_empty());
            if more && !self.end_sent && room {
                break Next::Room(Room {
                    slot: state.free.pop(),
                    shared: Arc::clone(shared),
                });
            }
            if !self.end_sent && own == Own::Never && (room || self.expected == 0) {
                self.end_sent = true;
                if self.expected > 0
                    && let Some(slot) = state.free.pop()
                {
                    let header = Header {
                        origin: shared.ring.me as u16,
                        seq: state.seq,
                        ..Header::new(Kind::End)
                    };
                    state.outgoing.push_back((slot, header));
                    shared.changed.notify_all();
                }
                continue;
            }
            if std::mem::take(&mut state.woken) {
                break Next::Woken;
            }
            if self.end_sent && self.ends == self.expected {
                self.over = true;
                break Next::End;
            }
            began.get_or_insert_with(Instant::now);
            state = shared
                .changed
                .wait(state)
                .unwrap_or_else(std::sync::PoisonError::into_inner);
        };
        if let Some(began) = began {
            state.load.waited += began.elapsed();
        }
        Ok(next)
    }

    /// Passes on what still comes without looking at it, and gives nothing of our own.
    ///
    /// # Errors
    /// As [`Node::next`].
    pub fn drain(&mut self) -> Result<(), Error> {
        while !matches!(self.next_with(Own::Never)?, Next::End) {}
        Ok(())
    }

    /// Ends the turn after [`Next::End`]: returns when the neighbours have everything.
    ///
    /// # Errors
    /// As [`Node::next`]; [`Error::Local`] before the end.
    pub fn finish(mut self) -> Result<Load, Error> {
        if !self.over {
            return Err(Error::Local("the turn is not over".into()));
        }
        lock(&self.shared.state).finished = true;
        self.shared.changed.notify_all();
        self.join();
        let state = lock(&self.shared.state);
        match &state.failed {
            Some(failure) => Err(self.shared.ring.failure(failure)),
            None => Ok(state.load),
        }
    }

    /// Ends the turn for all nodes, with this reason.
    pub fn give_up(self, why: &str) {
        self.shared
            .fail(self.shared.ring.me, format!("gave up: {why}"));
    }

    /// A handle that can end the turn from another thread.
    pub fn canceller(&self) -> Canceller {
        Canceller(Arc::downgrade(&self.shared))
    }

    /// A handle through which another thread sees the node's progress.
    pub fn watch(&self) -> Watch {
        Watch(Arc::downgrade(&self.shared))
    }

    fn join(&mut self) {
        for thread in self.threads.drain(..) {
            // A thread that panicked has failed the turn for the neighbours by closing its link.
            if thread.join().is_err() {
                self.shared.fail(self.shared.ring.me, "a thread panicked");
            }
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !self.over {
            self.shared.fail(self.shared.ring.me, "gave up");
        }
        lock(&self.shared.state).finished = true;
        self.shared.changed.notify_all();
        self.join();
    }
}

/// Ends a turn from another thread.
#[derive(Clone)]
pub struct Canceller(std::sync::Weak<Shared>);

impl Canceller {
    /// Ends the turn for all nodes, with this reason.
    pub fn cancel(&self, why: &str) {
        if let Some(shared) = self.0.upgrade() {
            shared.fail(shared.ring.me, format!("gave up: {why}"));
        }
    }
}

/// Looks on from another thread.
#[derive(Clone)]
pub struct Watch(std::sync::Weak<Shared>);

impl Watch {
    /// The statistics of the node so far; `None` if it has ended.
    pub fn load(&self) -> Option<Load> {
        self.0.upgrade().map(|shared| lock(&shared.state).load)
    }
}

/// Ends a wait of the query thread.
#[derive(Clone)]
pub struct Waker(std::sync::Weak<Shared>);

impl Waker {
    /// Does so now, or the next one.
    pub fn wake(&self) {
        if let Some(shared) = self.0.upgrade() {
            lock(&shared.state).woken = true;
            shared.changed.notify_all();
        }
    }
}
