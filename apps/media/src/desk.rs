//! Where viewers of movies in blocks ask: one thread takes their messages, and some read blocks from files.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use weft_service::lock;
use weft_verbs::{Access, Cq, Device, Error, Mr, Qp, RecvWr, SendWr, Wc, WcOpcode, WcStatus};

use crate::blocks::Film;
use crate::blocks::cache::{Action, Asked};
use crate::shelf::Movie;
use crate::viewers::{Caller, Receiving};
use crate::wire::{ASK_LEN, ASKS, Answer, Ask, Denial, Place, Refusal};

/// Blocks that are read at the same time.
const READERS: usize = 2;
/// Viewers of movies in blocks.
const SEATS: usize = 8192;
/// Room for the completions of all their messages, and of those that are leaving.
const COMPLETIONS: u32 = SEATS as u32 * 2 * ASKS * 2;
/// How often requests that wait for a slot are looked at.
const AGAIN: Duration = Duration::from_millis(20);
/// In a `wr_id`, below the viewer's number: an answer, and which of the viewer's messages.
const SENT: u64 = 4;
const MESSAGE: u64 = 3;
const NUMBER: u32 = 3;

/// Serves the viewers of movies in blocks. It has no threads before the first.
pub struct Desk {
    device: Device,
    /// With the number of its threads.
    counter: Mutex<Option<(Arc<Counter>, usize)>>,
}

struct Counter {
    cq: Cq,
    next: AtomicU64,
    seats: Mutex<HashMap<u64, Arc<Seat>>>,
    jobs: Mutex<VecDeque<Job>>,
    work: Condvar,
    /// Movies whose viewers wait for slots.
    waiting: Mutex<Vec<Arc<Movie>>>,
}

/// A block to be read.
struct Job {
    movie: Arc<Movie>,
    block: u64,
    place: Place,
}

struct Seat {
    movie: Arc<Movie>,
    /// Room for the viewer's messages.
    messages: Mr,
    qp: OnceLock<Weak<Qp>>,
}

/// What a viewer's connection keeps. Its drop is the viewer's leaving.
struct Kept {
    counter: Arc<Counter>,
    id: u64,
    seat: Arc<Seat>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        lock(&self.counter.seats).remove(&self.id);
        let leave = |film: &Film| lock(&film.cache).leave(Instant::now(), self.id);
        let actions = self.seat.movie.film().map(leave);
        self.counter
            .carry_out(&self.seat.movie, actions.unwrap_or_default());
    }
}

impl Desk {
    pub fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            counter: Mutex::default(),
        }
    }

    /// Grants a caller a movie in blocks.
    pub fn seat(&self, caller: Caller, movie: &Arc<Movie>) {
        let counter = match self.counter() {
            Ok(counter) => counter,
            Err(e) => {
                tracing::warn!("cannot serve movies in blocks: {e}");
                return caller.refuse(Refusal::Full);
            }
        };
        let messages = vec![0; ASKS as usize * ASK_LEN];
        let messages = match movie.pd().reg_mr(messages, Access::LOCAL_WRITE) {
            Ok(messages) => messages,
            Err(e) => {
                tracing::warn!("no room for a viewer's messages: {e}");
                return caller.refuse(Refusal::Full);
            }
        };
        let seat = Arc::new(Seat {
            movie: Arc::clone(movie),
            messages,
            qp: OnceLock::new(),
        });
        let id = counter.next.fetch_add(1, Ordering::Relaxed);
        {
            let mut seats = lock(&counter.seats);
            if seats.len() >= SEATS {
                drop(seats);
                return caller.refuse(Refusal::Full);
            }
            seats.insert(id, Arc::clone(&seat));
        }
        let kept = Arc::new(Kept {
            counter: Arc::clone(&counter),
            id,
            seat: Arc::clone(&seat),
        });
        let receiving = Receiving {
            cq: &counter.cq,
            receives: ASKS,
        };
        if let Some(qp) = caller.grant_and_hear(movie.pd(), &movie.grant(), kept, Some(&receiving))
        {
            // A message that came before waits for its receive.
            let _ = seat.qp.set(Arc::downgrade(&qp));
            let receives: Vec<_> = (0..ASKS.into()).map(|n| seat.receive(id, n)).collect();
            // Fails only if the viewer has gone already.
            let _ = qp.post_recv(&receives);
        }
    }

    fn counter(&self) -> Result<Arc<Counter>, Error> {
        let mut kept = lock(&self.counter);
        let (counter, started) = match &mut *kept {
            Some(kept) => kept,
            none => {
                let counter = Counter {
                    cq: self.device.create_cq(COMPLETIONS, None)?,
                    next: AtomicU64::new(0),
                    seats: Mutex::default(),
                    jobs: Mutex::default(),
                    work: Condvar::new(),
                    waiting: Mutex::default(),
                };
                none.insert((Arc::new(counter), 0))
            }
        };
        // Those that cannot be started now are started for the next viewer.
        while *started <= READERS {
            let this = Arc::clone(counter);
            let (name, run): (_, fn(&Counter)) = match *started {
                0 => ("weft-media-ask", Counter::hear),
                _ => ("weft-media-read", Counter::read),
            };
            let thread = std::thread::Builder::new().name(name.into());
            let thread = thread.spawn(move || run(&this));
            thread.map_err(|source| Error::Os {
                what: "starting a thread",
                source,
            })?;
            *started += 1;
        }
        Ok(Arc::clone(counter))
    }
}

impl Seat {
    fn receive(&self, id: u64, message: u64) -> RecvWr {
        let at = message as usize * ASK_LEN;
        RecvWr::new(id << NUMBER | message).sge(self.messages.sge(at, ASK_LEN))
    }

    fn qp(&self) -> Option<Arc<Qp>> {
        self.qp.get().and_then(Weak::upgrade)
    }
}

impl Counter {
    /// Takes messages, for ever.
    fn hear(&self) {
        let mut wcs = [Wc::default(); 64];
        loop {
            let is_waiting = !lock(&self.waiting).is_empty();
            let got = self.cq.wait(&mut wcs, is_waiting.then_some(AGAIN));
            let got = got.unwrap_or_else(|e| {
                // There is room for what all viewers may send.
                tracing::error!("messages of viewers were lost: {e}");
                std::thread::sleep(AGAIN);
                0
            });
            for wc in &wcs[..got] {
                self.completed(wc);
            }
            let waiting = std::mem::take(&mut *lock(&self.waiting));
            for movie in waiting {
                let advance = |film: &Film| lock(&film.cache).advance(Instant::now());
                let actions = movie.film().map(advance);
                self.carry_out(&movie, actions.unwrap_or_default());
            }
        }
    }

    fn completed(&self, wc: &Wc) {
        let (id, message) = (wc.wr_id >> NUMBER, wc.wr_id & MESSAGE);
        let seat = lock(&self.seats).get(&id).cloned();
        let Some(seat) = seat.filter(|_| wc.status == WcStatus::Success) else {
            return;
        };
        if wc.wr_id & SENT != 0 {
            if let Some(qp) = seat.qp() {
                // Fails only if the viewer has gone.
                let _ = qp.post_recv(&[seat.receive(id, message)]);
            }
            return;
        }
        if wc.opcode != WcOpcode::Recv {
            return;
        }
        let len = (wc.byte_len as usize).min(ASK_LEN);
        let bytes = seat.messages.to_vec(message as usize * ASK_LEN, len);
        let ask = bytes.ok().and_then(|bytes| Ask::decode(&bytes).ok());
        let asked = Asked {
            viewer: id,
            message: message as u8,
            // There is none of this number.
            block: ask.map_or(u64::MAX, |ask| ask.block),
            ahead: ask.is_some_and(|ask| ask.ahead),
        };
        let Some(film) = seat.movie.film() else {
            return;
        };
        let mut actions = lock(&film.cache).ask(Instant::now(), asked);
        // It may have left before it asked, and nothing would say so again.
        if !lock(&self.seats).contains_key(&id) {
            actions.extend(lock(&film.cache).leave(Instant::now(), id));
        }
        self.carry_out(&seat.movie, actions);
    }

    fn carry_out(&self, movie: &Arc<Movie>, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Answer(asked, place) => self.answer(asked, place),
                Action::Fill { block, place } => {
                    lock(&self.jobs).push_back(Job {
                        movie: Arc::clone(movie),
                        block,
                        place,
                    });
                    self.work.notify_one();
                }
            }
        }
        if movie
            .film()
            .is_some_and(|film| lock(&film.cache).is_waiting())
        {
            let mut waiting = lock(&self.waiting);
            if !waiting.iter().any(|other| Arc::ptr_eq(other, movie)) {
                waiting.push(Arc::clone(movie));
            }
        }
    }

    fn answer(&self, asked: Asked, place: Result<Place, Denial>) {
        let seat = lock(&self.seats).get(&asked.viewer).cloned();
        let Some(qp) = seat.and_then(|seat| seat.qp()) else {
            return;
        };
        let block = asked.block;
        let answer = Answer { block, place }.encode();
        let id = asked.viewer << NUMBER | SENT | u64::from(asked.message);
        // Fails only if the viewer has gone: its next message has no receive before this is complete.
        let _ = qp.post_send_one(SendWr::send(id).inline(&answer).signaled());
    }

    /// Reads blocks, for ever.
    fn read(&self) {
        loop {
            let mut jobs = lock(&self.jobs);
            let job = loop {
                match jobs.pop_front() {
                    Some(job) => break job,
                    None => jobs = self.work.wait(jobs).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(jobs);
            let Job {
                movie,
                block,
                place,
            } = job;
            let Some(film) = movie.film() else { continue };
            let how = film.fill(movie.mr(), block, place);
            let actions = lock(&film.cache).filled(Instant::now(), place, how);
            self.carry_out(&movie, actions);
        }
    }
}
