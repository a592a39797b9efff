//! What a port does with its pipes: see [`crate::ud::local`].

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use super::{PortInner, ROOM, Rx};
use crate::ud::intake::{Answering, Feed, HEADROOM, Intake, Last};
use crate::ud::local::{Looks, Pipe, Taken};
use crate::ud::{Came, UdDest};

/// Datagrams of one pipe before the others get their turn.
const TURN: usize = 64;
/// When a knock that could not be sent is sent again.
const KNOCK_AGAIN: Duration = Duration::from_millis(1);

/// What is in a pipe, at most a [`TURN`] of it.
struct Flow<'a> {
    pipe: &'a Pipe,
    buffer: &'a mut [u8],
    /// Of the datagram in the buffer.
    len: usize,
    count: usize,
    bytes: usize,
    over: bool,
}

impl Feed for Flow<'_> {
    fn advance(&mut self) -> bool {
        if self.count == TURN {
            return false;
        }
        match self.pipe.take(&mut self.buffer[HEADROOM..]) {
            Taken::Datagram(len) => {
                self.len = len;
                self.count += 1;
                self.bytes += len;
                true
            }
            Taken::Nothing => false,
            Taken::Over => {
                self.over = true;
                false
            }
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer[..HEADROOM + self.len]
    }
}

impl PortInner {
    fn refresh(&self, rx: &mut Rx) {
        let changes = self.locals.changes();
        if rx.changes != changes {
            rx.changes = changes;
            rx.pipes = self.locals.pipes();
            rx.datagram.resize(HEADROOM + ROOM, 0);
        }
    }

    /// Takes in what is in the pipes.
    pub(super) fn receive_local(&self, rx: &mut Rx) {
        self.refresh(rx);
        let Rx {
            batch,
            datagram,
            pipes,
            turn,
            last,
            ..
        } = rx;
        *turn += 1;
        let mut answering = Answering::new();
        for at in 0..pipes.len() {
            let pipe = &pipes[(*turn + at) % pipes.len()];
            if pipe.begins() {
                self.receive_some(batch, last);
            }
            let over = self.receive_pipe(pipe, datagram, last, &mut answering);
            if over {
                self.locals.remove(pipe);
            } else if pipe.has_room() {
                self.resume(|to, _| to == pipe.peer);
            }
        }
        for member in answering {
            member.answer();
        }
    }

    /// Whether the pipe is over.
    fn receive_pipe(
        &self,
        pipe: &Pipe,
        buffer: &mut [u8],
        last: &mut Last,
        answering: &mut Answering,
    ) -> bool {
        let (now, mut known) = (Came::default(), None);
        let mut intake = Intake {
            port: self,
            feed: Flow {
                pipe,
                buffer,
                len: 0,
                count: 0,
                bytes: 0,
                over: false,
            },
            from: pipe.peer,
            to: pipe.ours.ip(),
            traffic_class: 0,
            now: &now,
        };
        intake.take_all(last, &mut known, answering);
        let Flow {
            count, bytes, over, ..
        } = intake.feed;
        if pipe.release(count, bytes) {
            self.locals.knock(pipe);
        }
        over
    }

    /// Nobody polls from here on: whoever puts something into a pipe has to knock.
    pub(super) fn doze(&self) {
        self.dozing.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let Some(mut rx) = self.rx.try_lock() else {
            return;
        };
        self.dozing.store(false, Ordering::SeqCst);
        self.refresh(&mut rx);
        let mut asleep = true;
        for pipe in &rx.pipes {
            asleep &= pipe.sleep();
        }
        drop(rx);
        if !asleep {
            self.registration.poke();
        }
    }

    /// Put datagrams of one size into the pipe to their destination, if there is one: that which the sender knows already, mostly.
    pub(super) fn send_local(
        &self,
        bytes: &[u8],
        each: usize,
        dest: &UdDest,
        known: Option<Arc<Pipe>>,
    ) -> bool {
        let known = known.filter(|pipe| pipe.is_open());
        let Some(pipe) = known.or_else(|| self.locals.pipe(dest)) else {
            return false;
        };
        match pipe.push(bytes, each) {
            Some(false) => true,
            Some(true) => {
                self.locals.knock(&pipe);
                true
            }
            None => {
                // One whose peer has gone is emptied first.
                if pipe.is_open() {
                    self.locals.remove(&pipe);
                }
                false
            }
        }
    }
}

impl Looks for PortInner {
    fn look_again(&self) {
        self.registration.poke();
    }
    fn knock_later(&self) {
        self.registration.set_timer(Instant::now() + KNOCK_AGAIN);
    }
}
