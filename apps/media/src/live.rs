//! A live server: a ring of fragments in registered memory, in which new fragments overwrite the oldest.
//!
//! The region holds an index of slots, room for the init segment, and the ring. The server first clears the generations of the fragments
//! that it is about to overwrite, then writes the bytes, then the slot, and its generation last. A viewer Reads the slot before and after
//! the bytes: the bytes are valid if the generation is the same both times. Sends announce the newest fragment; they carry no data, and a
//! viewer that misses some loses nothing.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use weft_service::lock;
use weft_verbs::{Access, Cq, Device, Error, MemError, Mr, Pd, Qp, SendWr};

use crate::names::Title;
use crate::shelf::Movie;
use crate::viewers::{Caller, Host, SENDS, drain};
use crate::wire::{
    Content, Format, Grant, Layout, MAX_INIT, Notice, Refusal, Request, SLOT_LEN, Slot,
};

/// Slots of the index: fragments that the ring holds at most.
pub const SLOTS: u32 = 1024;
/// The default length of the ring in bytes.
pub const RING: u64 = 64 << 20;
/// How often the server retries notifications of viewers that had no receive.
const AGAIN: Duration = Duration::from_millis(20);

/// Microseconds since the epoch.
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_micros()).unwrap_or(0))
}

/// The region, and its contents.
struct Ring {
    mr: Mr,
    layout: Layout,
    /// The next fragment's sequence number, and its place.
    next: u64,
    at: u64,
    /// Fragments that are there, oldest first: sequence number, offset, end.
    there: VecDeque<(u64, u64, u64)>,
    format: Option<Format>,
}

impl Ring {
    fn new(pd: &Pd, data_len: u64) -> Result<Self, Error> {
        let index = u64::from(SLOTS) * SLOT_LEN as u64;
        let data_at = index + u64::from(MAX_INIT);
        let layout = Layout {
            format: Format::Mp4,
            slots: SLOTS,
            init_at: index,
            init_len: 0,
            data_at,
            data_len,
        };
        let len = usize::try_from(data_at + data_len).map_err(|_| Error::Invalid("ring length"))?;
        Ok(Self {
            mr: pd.alloc_mr(len, Access::REMOTE_READ)?,
            layout,
            next: 0,
            at: 0,
            there: VecDeque::new(),
            format: None,
        })
    }

    fn slot_at(&self, sequence: u64) -> usize {
        (sequence % u64::from(self.layout.slots)) as usize * SLOT_LEN
    }

    /// Forgets the oldest fragment.
    fn retire(&mut self) -> Result<(), MemError> {
        if let Some((sequence, ..)) = self.there.pop_front() {
            self.mr.store_u64(self.slot_at(sequence), 0)?;
        }
        Ok(())
    }

    /// Puts a fragment into the ring; its generation.
    fn push(&mut self, bytes: &[u8], key: bool, time: u64, duration: u64) -> Result<u64, MemError> {
        let len = bytes.len() as u64;
        if len == 0 || len > self.layout.data_len {
            return Err(MemError::Bounds);
        }
        let wraps = self.at + len > self.layout.data_len;
        let start = if wraps { 0 } else { self.at };
        let end = start + len;
        // The ring is in the order of time, so the fragments in the way are the oldest; this includes the unused rest at its end.
        while let Some(&(_, from, to)) = self.there.front() {
            let in_the_way = from < end && start < to || wraps && from >= self.at;
            if !in_the_way && self.there.len() < self.layout.slots as usize {
                break;
            }
            self.retire()?;
        }
        // A viewer that sees a byte of the new fragment also sees that the old generations are cleared.
        fence(Ordering::SeqCst);
        self.mr
            .write((self.layout.data_at + start) as usize, bytes)?;
        let slot = Slot {
            generation: self.next + 1,
            offset: start,
            len: bytes.len() as u32,
            key,
            time,
            duration: u32::try_from(duration).unwrap_or(0),
        };
        let at = self.slot_at(self.next);
        self.mr.write(at + 8, &slot.encode()[8..])?;
        self.mr
            .store_u64(at, u64::from_ne_bytes(slot.generation.to_be_bytes()))?;
        self.there.push_back((self.next, start, end));
        (self.at, self.next) = (end, self.next + 1);
        Ok(slot.generation)
    }
}

struct Listener {
    qp: Weak<Qp>,
    told: u64,
    outstanding: u32,
}

struct State {
    ring: Ring,
    listeners: HashMap<u64, Listener>,
    next_listener: u64,
    /// When the newest fragment was complete.
    at: u64,
    ended: bool,
    closed: bool,
}

pub struct Live {
    title: String,
    pd: Pd,
    device: Device,
    version: [u8; 16],
    state: Mutex<State>,
    news: Condvar,
}

impl Live {
    /// A stream without fragments; `cq` is where the sends of its viewers' queue pairs complete.
    ///
    /// # Errors
    /// [`Error`] without memory or a thread.
    pub fn new(device: &Device, title: &str, ring: u64, cq: &Cq) -> Result<Arc<Self>, Error> {
        let pd = device.alloc_pd()?;
        let mut version = [0; 16];
        version[..8].copy_from_slice(&now().to_be_bytes());
        version[8..12].copy_from_slice(&std::process::id().to_be_bytes());
        let live = Arc::new(Self {
            title: title.into(),
            state: Mutex::new(State {
                ring: Ring::new(&pd, ring)?,
                listeners: HashMap::new(),
                next_listener: 0,
                at: 0,
                ended: false,
                closed: false,
            }),
            pd,
            device: device.clone(),
            version,
            news: Condvar::new(),
        });
        let (this, cq) = (Arc::clone(&live), cq.clone());
        std::thread::Builder::new()
            .name("weft-media-news".into())
            .spawn(move || this.tell(&cq))
            .map_err(|source| Error::Os {
                what: "starting a thread",
                source,
            })?;
        Ok(live)
    }

    /// Puts the init segment in its place; viewers are let in from then on.
    ///
    /// # Errors
    /// [`MemError::Bounds`] for one that is too long.
    pub fn begin(&self, format: Format, init: &[u8]) -> Result<(), MemError> {
        let mut state = lock(&self.state);
        let ring = &mut state.ring;
        if init.len() > MAX_INIT as usize {
            return Err(MemError::Bounds);
        }
        ring.mr.write(ring.layout.init_at as usize, init)?;
        ring.layout.init_len = init.len() as u32;
        ring.layout.format = format;
        ring.format = Some(format);
        Ok(())
    }

    /// Adds a fragment and notifies the viewers.
    ///
    /// # Errors
    /// [`MemError::Bounds`] for one that does not fit into the ring.
    pub fn push(&self, bytes: &[u8], key: bool, time: u64, duration: u64) -> Result<(), MemError> {
        let mut state = lock(&self.state);
        state.ring.push(bytes, key, time, duration)?;
        state.at = now();
        self.news.notify_all();
        Ok(())
    }

    /// Notifies the viewers of the end, and waits until they have disconnected, at most for this time.
    pub fn end(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut state = lock(&self.state);
        state.ended = true;
        self.news.notify_all();
        while Instant::now() < deadline {
            state.listeners.retain(|_, l| l.qp.strong_count() > 0);
            if state.listeners.is_empty() {
                break;
            }
            let waited = self.news.wait_timeout(state, AGAIN);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.closed = true;
        self.news.notify_all();
    }

    pub fn viewers(&self) -> usize {
        let state = lock(&self.state);
        let there = state.listeners.values();
        there.filter(|l| l.qp.strong_count() > 0).count()
    }

    /// Notifies each viewer of the newest fragment. A viewer without a receive is notified later, and then of the newest only.
    fn tell(&self, cq: &Cq) {
        let mut state = lock(&self.state);
        while !state.closed {
            let (newest, at, ended) = (state.ring.next, state.at, state.ended);
            let listeners = &mut state.listeners;
            drain(cq, |wc| {
                if let Some(listener) = listeners.get_mut(&wc.wr_id) {
                    listener.outstanding = listener.outstanding.saturating_sub(1);
                }
            });
            listeners.retain(|_, l| l.qp.strong_count() > 0);
            let target = newest + u64::from(ended);
            let message = Notice { newest, ended, at }.encode();
            let mut behind = false;
            for (id, listener) in listeners.iter_mut() {
                if listener.told >= target {
                    continue;
                }
                if listener.outstanding == SENDS {
                    behind = true;
                    continue;
                }
                let Some(qp) = listener.qp.upgrade() else {
                    continue;
                };
                let send = SendWr::send(*id).inline(&message).signaled();
                if qp.post_send_one(send).is_ok() {
                    listener.outstanding += 1;
                    listener.told = target;
                }
            }
            state = if behind {
                let waited = self.news.wait_timeout(state, AGAIN);
                waited.unwrap_or_else(PoisonError::into_inner).0
            } else if state.ring.next == newest && state.ended == ended {
                let waited = self.news.wait(state);
                waited.unwrap_or_else(PoisonError::into_inner)
            } else {
                state
            };
        }
    }

    fn catalogue(&self) -> Result<Arc<Movie>, Refusal> {
        let title = Title {
            name: self.title.clone(),
            size: 0,
            modified: (now() / 1_000_000).cast_signed(),
            picture: None,
            live: true,
        };
        let text = serde_json::to_vec(&[title]).map_err(|_| Refusal::Unreadable)?;
        Movie::of_bytes(&self.device, Content::Catalogue, &text)
            .map(Arc::new)
            .map_err(|_| Refusal::NoRoom)
    }
}

impl Host for Live {
    fn answer(self: Arc<Self>, caller: Caller, request: Request) {
        let grant = match request {
            Request::Catalogue => {
                match self.catalogue() {
                    Ok(list) => drop(caller.grant(list.pd(), &list.grant(), list.clone())),
                    Err(why) => caller.refuse(why),
                }
                return;
            }
            Request::Title(name) if name != self.title => {
                caller.refuse(Refusal::NoSuchTitle);
                return;
            }
            Request::Title(_) => {
                let state = lock(&self.state);
                if state.ring.format.is_none() || state.ring.next == 0 || state.closed {
                    drop(state);
                    caller.refuse(Refusal::NotYet);
                    return;
                }
                Grant {
                    content: Content::Live(state.ring.layout),
                    at: state.ring.mr.remote(0),
                    len: state.ring.mr.len() as u64,
                    version: self.version,
                }
            }
        };
        let keep: Arc<Self> = Arc::clone(&self);
        if let Some(qp) = caller.grant(&self.pd, &grant, keep) {
            let mut state = lock(&self.state);
            let id = state.next_listener;
            state.next_listener += 1;
            state.listeners.insert(
                id,
                Listener {
                    qp: Arc::downgrade(&qp),
                    told: 0,
                    outstanding: 0,
                },
            );
            self.news.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(len: u64) -> (Device, Pd, Ring) {
        let device = Device::open().unwrap();
        let pd = device.alloc_pd().unwrap();
        let ring = Ring::new(&pd, len).unwrap();
        (device, pd, ring)
    }

    fn slot(ring: &Ring, sequence: u64) -> Option<Slot> {
        let bytes = ring.mr.to_vec(ring.slot_at(sequence), SLOT_LEN).unwrap();
        Slot::decode(bytes.first_chunk().unwrap(), &ring.layout)
    }

    #[test]
    fn whatever_a_slot_names_is_whole() {
        let (_device, _pd, mut ring) = ring(10_000);
        let bytes_of = |sequence: u64| {
            let len = 1 + (sequence * 7919 % 4000) as usize;
            vec![sequence as u8; len]
        };
        for sequence in 0..3000 {
            let generation = ring.push(&bytes_of(sequence), sequence % 5 == 0, sequence, 1);
            assert_eq!(generation.unwrap(), sequence + 1);
            let mut there = 0;
            for old in sequence.saturating_sub(40)..=sequence {
                let Some(slot) = slot(&ring, old).filter(|s| s.sequence() == old) else {
                    assert!(old < sequence, "the newest is there");
                    continue;
                };
                there += 1;
                let at = (ring.layout.data_at + slot.offset) as usize;
                assert_eq!(
                    ring.mr.to_vec(at, slot.len as usize).unwrap(),
                    bytes_of(old)
                );
                assert_eq!((slot.key, slot.time), (old % 5 == 0, old));
            }
            assert_eq!(there, ring.there.len());
        }
        assert!(ring.push(&[0; 10_001], true, 0, 0).is_err());
        assert!(ring.push(&[], true, 0, 0).is_err());
    }

    #[test]
    fn the_index_is_not_longer_than_its_slots() {
        let (_device, _pd, mut ring) = ring(1 << 20);
        for sequence in 0..u64::from(SLOTS) * 2 + 3 {
            ring.push(&[1], true, 0, 0).unwrap();
            assert!(ring.there.len() <= SLOTS as usize);
            assert_eq!(slot(&ring, sequence).unwrap().sequence(), sequence);
        }
    }
}
