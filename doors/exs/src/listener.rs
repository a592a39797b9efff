//! Listening sockets. A peer's connection is completed on arrival, up to the backlog, as a kernel does for TCP. An accept only hands it over.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::cm::{ConnParam, ConnectError, Incoming};
use weft_verbs::{Signal, any};

use crate::driver::{Conn, Link, Rnic, Slot, Target, agree};
use crate::event::{Event, EventKind};
use crate::poller::{Poller, Watched};
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

impl Parent {
    fn param(&self) -> ConnParam {
        ConnParam {
            options: self.options.link(),
            ..ConnParam::default()
        }
    }
}

type Accepted = Box<dyn Fn(Options, Arc<Signal>, Arc<Conn>) -> Socket + Send + Sync>;

pub(crate) struct Listener {
    addr: OnceLock<SocketAddr>,
    /// What listens, until it is dropped.
    listening: Mutex<Option<Box<dyn Send>>>,
    parent: Parent,
    backlog: usize,
    state: Mutex<Waiting>,
}

/// Listens on an RNIC of the machine.
struct OnRnic {
    cm: any::cm::Listener,
    poller: Arc<Poller>,
    id: OnceLock<u64>,
    listener: Weak<Listener>,
}

impl OnRnic {
    fn listen(
        device: &any::Device,
        addr: SocketAddr,
        backlog: u32,
        listener: &Arc<Listener>,
    ) -> Result<Arc<OnRnic>, Error> {
        let param = listener.parent.param();
        let cm = any::cm::Listener::bind(device, addr, backlog, &param).map_err(|error| {
            tracing::warn!(%error, "an RNIC cannot listen");
            std::io::Error::from(error)
        })?;
        let on = Arc::new(OnRnic {
            cm,
            poller: Poller::get().map_err(std::io::Error::from)?,
            id: OnceLock::new(),
            listener: Arc::downgrade(listener),
        });
        let watched: Weak<OnRnic> = Arc::downgrade(&on);
        let id = on.poller.add(on.cm.as_fd(), watched);
        let id = id.map_err(std::io::Error::from)?;
        let _ = on.id.set(id);
        on.wait().map_err(std::io::Error::from)?;
        Ok(on)
    }

    fn wait(&self) -> Result<(), Errno> {
        let id = *self.id.get().ok_or(Errno::INVAL)?;
        self.poller.arm(self.cm.as_fd(), id, EventFlags::IN)
    }
}

impl Watched for OnRnic {
    fn on_ready(&self) {
        let serve = || -> Result<(), Error> {
            while let Some(request) = self.cm.next_request(Some(Duration::ZERO))? {
                if let Some(listener) = self.listener.upgrade() {
                    listener.arrived(Arriving::Rnic(request));
                }
            }
            Ok(self.wait().map_err(std::io::Error::from)?)
        };
        if let Err(error) = serve() {
            tracing::error!(%error, "an RNIC can no longer be listened on");
            if let Some(listener) = self.listener.upgrade() {
                listener.lost(error.into());
            }
        }
    }
}

impl Drop for OnRnic {
    fn drop(&mut self) {
        if let Some(id) = self.id.get() {
            self.poller.remove(self.cm.as_fd(), *id);
        }
    }
}

/// A peer's request.
enum Arriving {
    Soft(Incoming),
    Rnic(any::cm::Request),
}

impl Arriving {
    fn private_data(&self) -> &[u8] {
        match self {
            Arriving::Soft(incoming) => incoming.private_data(),
            Arriving::Rnic(request) => request.private_data(),
        }
    }

    fn reject(self, private_data: &[u8]) {
        let rejected = match self {
            Arriving::Soft(incoming) => incoming.reject(private_data),
            Arriving::Rnic(request) => request.reject(private_data),
        };
        if let Err(error) = rejected {
            tracing::debug!(%error, "a peer went away before it was rejected");
        }
    }

    /// The queue pair for it.
    fn link(&self, context: &Context, options: &Options) -> Result<Link, Error> {
        match self {
            Arriving::Soft(_) => Link::soft(context, options),
            Arriving::Rnic(request) => {
                let domain = context.domain_of(&request.device())?;
                Rnic::new(&domain, options, |pd, init| request.create_qp(pd, init)).map(Link::rnic)
            }
        }
    }

    fn accept(self, link: &Link, param: &ConnParam) -> Result<(), ConnectError> {
        let other = || ConnectError::Invalid("a queue pair of another device".into());
        match self {
            Arriving::Soft(incoming) => incoming.accept(link.soft_qp().ok_or_else(other)?, param),
            Arriving::Rnic(request) => {
                request.accept_with(link.rnic_qp().ok_or_else(other)?, param)
            }
        }
    }
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
    /// Why no connection comes any more: it is closed, or its device is gone.
    over: Option<Errno>,
}

impl Listener {
    pub(crate) fn new(
        parent: Parent,
        addr: SocketAddr,
        backlog: u32,
    ) -> Result<Arc<Listener>, Errno> {
        let most_waiting = parent.options.most_waiting();
        let listener = Arc::new(Listener {
            addr: OnceLock::new(),
            listening: Mutex::new(None),
            parent,
            backlog: most_waiting.min(backlog as usize),
            state: Mutex::default(),
        });
        let context = &listener.parent.context;
        let rnic = context.choice().rnic_at(addr).map_err(|error| {
            tracing::warn!(%error, "no RNIC listens");
            Error::from(error)
        })?;
        let (listening, addr): (Box<dyn Send>, _) = if let Some(rnic) = rnic {
            let on = OnRnic::listen(&rnic, addr, backlog, &listener)?;
            let addr = on.cm.local_addr();
            (Box::new(on), addr)
        } else {
            let weak = Arc::downgrade(&listener);
            let param = listener.parent.param();
            let listening = context
                .device()
                .listen(addr, backlog, &param, move |incoming| {
                    if let Some(listener) = weak.upgrade() {
                        listener.arrived(Arriving::Soft(incoming));
                    }
                })
                .map_err(Error::from)?;
            let addr = listening.local_addr();
            (Box::new(listening), addr)
        };
        let _ = listener.addr.set(addr);
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

    fn arrived(&self, incoming: Arriving) {
        {
            let mut state = lock(&self.state);
            if state.over.is_some()
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
                Some(connection) if state.over.is_none() => {
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

    /// Keep the descriptor readable while connections wait, and once no more come.
    fn show(&self, state: &Waiting) {
        if state.over.is_some() || state.ready.len() > state.accepts.len() {
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
        lock(&self.state).accepts.push_back((target, token));
        self.match_up();
    }

    /// Match waiting connections with accepts. Accepts that no connection comes for end.
    fn match_up(&self) {
        let fd = self.fd();
        loop {
            let (accepted, target, token) = {
                let mut state = lock(&self.state);
                if state.ready.is_empty() {
                    let Some(errno) = state.over else { return };
                    let accepts = std::mem::take(&mut state.accepts);
                    drop(state);
                    return self.end(accepts.into(), Vec::new(), errno);
                }
                if state.accepts.is_empty() {
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
    fn take(&self, incoming: Arriving) -> Option<Socket> {
        let Parent {
            context,
            kind,
            options,
            accepted,
            ..
        } = &self.parent;
        let make = || -> Result<_, Error> {
            let signal = Arc::new(Signal::new()?);
            let link = incoming.link(context, options)?;
            let fd = signal.as_fd().as_raw_fd();
            Ok((
                Conn::prepare(context, link, *kind, options, Arc::clone(&signal), fd)?,
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
            incoming.reject(&setup.hello.emit());
            return None;
        }
        let param = setup.param(options);
        if let Err(error) = incoming.accept(setup.conn.link(), &param) {
            tracing::debug!(%error, "a peer went away before it was accepted");
            return None;
        }
        let conn = &setup.conn;
        conn.established(&setup.hello, &private_data, false).ok()?;
        Some(accepted(options.clone(), signal, setup.conn))
    }

    pub(crate) fn poll(&self, wanted: Ready, target: Target, token: u64) {
        let mut state = lock(&self.state);
        if wanted.contains(Ready::IN) && !state.ready.is_empty() {
            drop(state);
            self.tell_pollers(vec![(target, token)]);
        } else if let Some(errno) = state.over {
            drop(state);
            self.end(Vec::new(), vec![(target, token)], errno);
        } else {
            state.pollers.push((target, token));
        }
    }

    pub(crate) fn ready(&self) -> Ready {
        let state = lock(&self.state);
        let mut ready = Ready::empty();
        ready.set(Ready::IN, state.over.is_some() || !state.ready.is_empty());
        ready.set(Ready::ERR, state.over.is_some());
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

    /// No connection comes any more: what waits for one ends with this error, and so does what is asked for later.
    fn lost(&self, errno: Errno) {
        let (accepts, pollers) = {
            let mut state = lock(&self.state);
            if state.over.is_some() {
                return;
            }
            state.over = Some(errno);
            self.show(&state);
            (
                std::mem::take(&mut state.accepts),
                std::mem::take(&mut state.pollers),
            )
        };
        self.end(accepts.into(), pollers, errno);
    }

    pub(crate) fn close(&self) {
        drop(lock(&self.listening).take());
        let (accepts, pollers, ready) = {
            let mut state = lock(&self.state);
            state.over = Some(Errno::CANCELED);
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

#[cfg(test)]
mod tests {
    use std::thread;

    use weft_verbs::Device;

    use super::*;
    use crate::Queue;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// A socket that listens, with so many connections that wait, and what it listens by.
    fn listening(connections: usize) -> (Queue, Socket, Arc<Listener>) {
        let context = Context::new(Device::open().unwrap()).unwrap();
        let socket = Socket::new(&context, false, Kind::Stream).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        socket.listen(4).unwrap();
        for waiting in 0..connections {
            let peer = Socket::new(&context, false, Kind::Stream).unwrap();
            peer.connect_wait(socket.local_addr().unwrap()).unwrap();
            let listener = socket.listener().unwrap();
            while lock(&listener.state).ready.len() == waiting {
                thread::yield_now();
            }
        }
        let listener = socket.listener().unwrap();
        (Queue::new(&context, 8).unwrap(), socket, listener)
    }

    fn is_readable(socket: &Socket) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let now = Timespec::default();
        poll(
            &mut [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN)],
            Some(&now),
        )
        .unwrap()
            == 1
    }

    /// The next event.
    fn next(queue: &Queue) -> Event {
        let mut events = Vec::new();
        queue.dequeue(&mut events, 1, 1, Some(PATIENCE)).unwrap();
        events.remove(0)
    }

    #[test]
    fn a_lost_listener_is_ready_and_waits_end_with_the_error() {
        let (_, socket, listener) = listening(0);
        let waits = thread::spawn({
            let socket = socket.clone();
            move || socket.poll_wait(Ready::IN, Some(PATIENCE))
        });
        while lock(&listener.state).pollers.is_empty() {
            thread::yield_now();
        }
        listener.lost(Errno::NODEV);
        assert_eq!(waits.join().unwrap(), Err(Errno::NODEV));
        assert_eq!(socket.poll_wait(Ready::IN, None), Err(Errno::NODEV));
        assert_eq!(socket.ready(), Ready::IN | Ready::ERR);
    }

    #[test]
    fn a_lost_listener_stays_readable_after_its_last_connection() {
        let (_, socket, listener) = listening(1);
        listener.lost(Errno::NODEV);
        socket.accept_wait(Some(PATIENCE)).unwrap();
        assert!(is_readable(&socket));
        let end = socket.accept_wait(Some(PATIENCE));
        assert_eq!(end.err(), Some(Errno::NODEV));
    }

    #[test]
    fn accepts_of_a_lost_listener_end_if_there_are_fewer_connections() {
        let (queue, _socket, listener) = listening(1);
        listener.lost(Errno::NODEV);
        for token in 0..2 {
            // As `accept` in two threads, before either matches.
            let accept = Target::new(queue.sink(token)).unwrap();
            lock(&listener.state).accepts.push_back(accept);
        }
        listener.match_up();
        let ends = [(); 2].map(|()| next(&queue).result);
        assert_eq!(ends, [Ok(0), Err(Errno::NODEV)]);
    }

    #[test]
    fn a_poll_of_a_lost_listener_for_another_condition_ends() {
        let (queue, socket, listener) = listening(1);
        listener.lost(Errno::NODEV);
        socket.poll(Ready::HUP, queue.sink(1)).unwrap();
        assert_eq!(next(&queue).result, Err(Errno::NODEV));
        socket.poll(Ready::IN, queue.sink(2)).unwrap();
        assert_eq!(next(&queue).ready, Ready::IN);
    }
}
