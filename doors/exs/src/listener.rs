//! Listening sockets. A peer's connection is completed on arrival, up to the backlog, as a kernel does for TCP. An accept only hands it over.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, OnceLock};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::Signal;
use weft_verbs::cm::{ConnParam, Incoming, Listening};

use crate::driver::{Conn, Slot, Target, agree};
use crate::event::{Event, EventKind};
use crate::{Context, Error, Kind, Options, Ready, Socket};

/// The socket that listens.
pub(crate) struct Parent {
    pub(crate) context: Context,
    pub(crate) kind: Kind,
    pub(crate) signal: Arc<Signal>,
    pub(crate) options: Options,
    /// Makes the socket of a connection, with its options and its signal.
    pub(crate) accepted: Accepted,
}

type Accepted = Box<dyn Fn(Options, Arc<Signal>, Arc<Conn>) -> Socket + Send + Sync>;

pub(crate) struct Listener {
    addr: OnceLock<SocketAddr>,
    listening: Mutex<Option<Listening>>,
    parent: Parent,
    backlog: usize,
    state: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    /// Connections that wait to be accepted.
    ready: VecDeque<Socket>,
    /// Number of connections that are being set up.
    making: usize,
    /// Accepts that wait for a connection.
    accepts: VecDeque<(Target, u64)>,
    pollers: Vec<(Target, u64)>,
    closed: bool,
}

impl Listener {
    pub(crate) fn new(
        parent: Parent,
        addr: SocketAddr,
        backlog: u32,
    ) -> Result<Arc<Listener>, Errno> {
        let listener = Arc::new(Listener {
            addr: OnceLock::new(),
            listening: Mutex::new(None),
            parent,
            backlog: backlog as usize,
            state: Mutex::default(),
        });
        let link = ConnParam {
            options: listener.parent.options.link(),
            ..ConnParam::default()
        };
        let weak = Arc::downgrade(&listener);
        let device = listener.parent.context.device();
        let listening = device
            .listen(addr, backlog, &link, move |incoming| {
                if let Some(listener) = weak.upgrade() {
                    listener.arrived(incoming);
                }
            })
            .map_err(Error::from)?;
        let _ = listener.addr.set(listening.local_addr());
        *lock(&listener.listening) = Some(listening);
        Ok(listener)
    }

    pub(crate) fn local_addr(&self) -> SocketAddr {
        self.addr
            .get()
            .copied()
            .unwrap_or_else(|| SocketAddr::from(([0, 0, 0, 0], 0)))
    }

    fn fd(&self) -> i32 {
        self.parent.signal.as_fd().as_raw_fd()
    }

    fn arrived(&self, incoming: Incoming) {
        {
            let mut state = lock(&self.state);
            if state.closed
                || state.ready.len() + state.making >= self.backlog.max(state.accepts.len())
            {
                // Dropping a request rejects it.
                return;
            }
            state.making += 1;
        }
        let made = self.take(incoming);
        let told = {
            let mut state = lock(&self.state);
            state.making -= 1;
            match made {
                Some(connection) if !state.closed => {
                    state.ready.push_back(connection);
                    self.show(&state);
                    std::mem::take(&mut state.pollers)
                }
                _ => Vec::new(),
            }
        };
        self.tell_pollers(told);
        self.match_up();
    }

    /// Keep the descriptor readable while connections wait.
    fn show(&self, state: &Waiting) {
        if state.ready.len() > state.accepts.len() {
            self.parent.signal.raise();
        } else {
            self.parent.signal.clear();
        }
    }

    fn tell_pollers(&self, pollers: Vec<(Target, u64)>) {
        let fd = self.fd();
        for (target, token) in pollers {
            let mut event = Event::new(EventKind::Poll, token, fd, Ok(0));
            event.ready = Ready::IN;
            target.tell_now(event);
        }
    }

    pub(crate) fn accept(&self, target: Target, token: u64) {
        let mut state = lock(&self.state);
        if state.closed {
            drop(state);
            return self.end(vec![(target, token)], Vec::new(), Errno::CANCELED);
        }
        state.accepts.push_back((target, token));
        drop(state);
        self.match_up();
    }

    /// Match waiting connections with accepts.
    fn match_up(&self) {
        let fd = self.fd();
        loop {
            let (accepted, target, token) = {
                let mut state = lock(&self.state);
                if state.accepts.is_empty() || state.ready.is_empty() {
                    return;
                }
                let (Some(accepted), Some((target, token))) =
                    (state.ready.pop_front(), state.accepts.pop_front())
                else {
                    return;
                };
                self.show(&state);
                (accepted, target, token)
            };
            let mut event = Event::new(EventKind::Accept, token, fd, Ok(0));
            event.accepted = Some(accepted);
            target.tell_now(event);
        }
    }

    /// Set up the connection; `None` when the peer does not fit or has gone, or resources are short.
    fn take(&self, incoming: Incoming) -> Option<Socket> {
        let Parent {
            context,
            kind,
            options,
            accepted,
            ..
        } = &self.parent;
        let make = || -> Result<_, Error> {
            let signal = Arc::new(Signal::new()?);
            let fd = signal.as_fd().as_raw_fd();
            Ok((
                Conn::prepare(context, *kind, options, Arc::clone(&signal), fd)?,
                signal,
            ))
        };
        let (setup, signal) = match make() {
            Ok(made) => made,
            Err(error) => {
                tracing::warn!(%error, "no room for a connection");
                return None;
            }
        };
        let private_data = incoming.private_data().to_vec();
        if agree(&setup.hello, &private_data).is_err() {
            let _ = incoming.reject(&setup.hello.emit());
            return None;
        }
        let param = setup.param(options);
        if let Err(error) = incoming.accept(setup.conn.qp(), &param) {
            tracing::debug!(%error, "a peer went away before it was accepted");
            return None;
        }
        setup.conn.established(&setup.hello, &private_data).ok()?;
        Some(accepted(options.clone(), signal, setup.conn))
    }

    pub(crate) fn poll(&self, wanted: Ready, target: Target, token: u64) {
        let now = {
            let mut state = lock(&self.state);
            if state.closed {
                drop(state);
                return self.end(Vec::new(), vec![(target, token)], Errno::CANCELED);
            }
            if state.ready.is_empty() || !wanted.contains(Ready::IN) {
                state.pollers.push((target, token));
                return;
            }
            vec![(target, token)]
        };
        self.tell_pollers(now);
    }

    pub(crate) fn ready(&self) -> Ready {
        let mut ready = Ready::empty();
        ready.set(Ready::IN, !lock(&self.state).ready.is_empty());
        ready
    }

    pub(crate) fn cancel(&self, token: Option<u64>) -> usize {
        let wanted = |t: &(Target, u64)| token.is_none_or(|token| t.1 == token);
        let (accepts, pollers) = {
            let mut state = lock(&self.state);
            let (out, keep): (Vec<_>, VecDeque<_>) =
                split(std::mem::take(&mut state.accepts), wanted);
            state.accepts = keep;
            let (polls, keep): (Vec<_>, Vec<_>) = split(std::mem::take(&mut state.pollers), wanted);
            state.pollers = keep;
            (out, polls)
        };
        let n = accepts.len() + pollers.len();
        self.end(accepts, pollers, Errno::CANCELED);
        n
    }

    fn end(&self, accepts: Vec<(Target, u64)>, pollers: Vec<(Target, u64)>, errno: Errno) {
        let fd = self.fd();
        let all = accepts.into_iter().map(|a| (EventKind::Accept, a));
        for (kind, (target, token)) in all.chain(pollers.into_iter().map(|p| (EventKind::Poll, p)))
        {
            target.tell_now(Event::new(kind, token, fd, Err(errno)));
        }
    }

    /// Withdraw a blocking call. False when it has been completed, or is about to be.
    pub(crate) fn withdraw(&self, slot: &Arc<Slot>) -> bool {
        let mut state = lock(&self.state);
        let before = state.accepts.len() + state.pollers.len();
        state.accepts.retain(|(target, _)| !target.is(slot));
        state.pollers.retain(|(target, _)| !target.is(slot));
        state.accepts.len() + state.pollers.len() < before
    }

    pub(crate) fn close(&self) {
        drop(lock(&self.listening).take());
        let (accepts, pollers, ready) = {
            let mut state = lock(&self.state);
            state.closed = true;
            (
                std::mem::take(&mut state.accepts),
                std::mem::take(&mut state.pollers),
                std::mem::take(&mut state.ready),
            )
        };
        drop(ready);
        self.end(accepts.into(), pollers, Errno::CANCELED);
    }
}

fn split<T, A: Default + Extend<T>, B: Default + Extend<T>>(
    all: impl IntoIterator<Item = T>,
    first: impl Fn(&T) -> bool,
) -> (A, B) {
    let (mut a, mut b) = (A::default(), B::default());
    for one in all {
        if first(&one) {
            a.extend(std::iter::once(one));
        } else {
            b.extend(std::iter::once(one));
        }
    }
    (a, b)
}
