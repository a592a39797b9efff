//! Connecting.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Weak, mpsc};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::cm::ConnectError;
use weft_verbs::{Signal, any};
use weft_wire::exs::Hello;

use super::{Inner, Socket, State};
use crate::driver::{Conn, Link, Rnic, Setup, Target, agree};
use crate::event::{Event, EventKind};
use crate::{Choice, Context, Error, Kind, Options};

/// The reason why a connect failed. A listener of another type includes its own type in the rejection.
fn refusal(hello: &Hello, error: &ConnectError) -> Errno {
    if let ConnectError::Rejected { private_data } = error
        && agree(hello, private_data).is_err_and(|errno| errno == Errno::PROTOTYPE)
    {
        return Errno::PROTOTYPE;
    }
    Errno::from_raw_os_error(error.raw_os_error())
}

/// A connect on its way: what becomes of the socket, and who is told.
struct Dialing {
    socket: Weak<Inner>,
    fd: i32,
    target: Target,
    token: u64,
}

impl Dialing {
    fn over(self, result: Result<Arc<Conn>, Errno>) {
        let errno = result.as_ref().err().copied();
        if let Some(inner) = self.socket.upgrade() {
            let mut state = lock(&inner.state);
            if matches!(*state, State::Connecting(_)) {
                *state = match result {
                    Ok(conn) => {
                        let _ = inner.conn.set(conn);
                        State::Connected
                    }
                    Err(_) => State::Idle(None),
                };
            }
        }
        let result = errno.map_or(Ok(0), Err);
        let event = Event::new(EventKind::Connect, self.token, self.fd, result);
        self.target.tell_now(event);
    }
}

/// The connection of a dial that has ended.
fn dialed(setup: Setup, dialed: Result<Vec<u8>, ConnectError>) -> Result<Arc<Conn>, Errno> {
    match dialed {
        Ok(private_data) => {
            let conn = &setup.conn;
            conn.established(&setup.hello, &private_data, true)?;
            Ok(setup.conn)
        }
        Err(error) => {
            tracing::debug!(%error, "a connection could not be made");
            Err(refusal(&setup.hello, &error))
        }
    }
}

/// What a connection is made of, before its device is known.
struct Plan {
    context: Context,
    kind: Kind,
    options: Options,
    signal: Arc<Signal>,
    addr: SocketAddr,
    source: Option<SocketAddr>,
}

impl Plan {
    fn prepare(&self, link: Link) -> Result<Setup, Error> {
        let signal = Arc::clone(&self.signal);
        let fd = signal.as_fd().as_raw_fd();
        Conn::prepare(&self.context, link, self.kind, &self.options, signal, fd)
    }

    fn prepare_soft(&self) -> Result<Setup, Error> {
        self.prepare(Link::soft(&self.context, &self.options)?)
    }

    /// Over the soft RNIC; its engine tells the result.
    fn dial_soft(&self, setup: Setup, dialing: Dialing) {
        let param = setup.param(&self.options);
        let conn = Arc::clone(&setup.conn);
        let Some(qp) = conn.link().soft_qp() else {
            return dialing.over(Err(Errno::INVAL));
        };
        let device = self.context.device();
        device.dial(self.addr, self.source, qp, &param, move |answer| {
            dialing.over(dialed(setup, answer));
        });
    }

    /// Over the device of the context's choice. Blocks until an RNIC has connected.
    fn dial(&self, dialing: Dialing) {
        let chosen = self.context.choice().rnic_to(self.addr);
        match chosen.map_err(Error::from) {
            Ok(Some(rnic)) => dialing.over(self.dial_rnic(&rnic)),
            Ok(None) => match self.prepare_soft() {
                Ok(setup) => self.dial_soft(setup, dialing),
                Err(error) => dialing.over(Err(error.errno())),
            },
            Err(error) => {
                tracing::warn!(%error, "no RNIC reaches {}", self.addr);
                dialing.over(Err(error.errno()));
            }
        }
    }

    fn dial_rnic(&self, rnic: &any::Device) -> Result<Arc<Conn>, Errno> {
        let dial = any::cm::Dial::new(rnic, self.addr, self.options.connect_timeout);
        let dial = dial.map_err(|error| {
            tracing::debug!(%error, "no route to {}", self.addr);
            Errno::from_raw_os_error(error.raw_os_error())
        })?;
        let domain = self.context.domain_of(rnic)?;
        let link = Rnic::new(&domain, &self.options, |pd, init| dial.create_qp(pd, init));
        let setup = link.and_then(|rnic| self.prepare(Link::rnic(rnic)));
        let setup = setup.map_err(|error| {
            tracing::warn!(%error, "an RNIC cannot carry the connection");
            error.errno()
        })?;
        let qp = setup.conn.link().rnic_qp().ok_or(Errno::INVAL)?;
        let answer = dial.connect_with(qp, &setup.param(&self.options));
        dialed(setup, answer)
    }
}

impl Socket {
    pub(super) fn connect_to(
        &self,
        addr: SocketAddr,
        target: Target,
        token: u64,
    ) -> Result<(), Errno> {
        let (plan, setup) = match self.begin(addr) {
            Ok(begun) => begun,
            Err(errno) => {
                target.forget();
                return Err(errno);
            }
        };
        let dialing = Dialing {
            socket: Arc::downgrade(&self.0),
            fd: self.0.fd(),
            target,
            token,
        };
        let Some(setup) = setup else {
            return self.dial_on_a_thread(plan, dialing);
        };
        plan.dial_soft(setup, dialing);
        Ok(())
    }

    fn dial_on_a_thread(&self, plan: Plan, dialing: Dialing) -> Result<(), Errno> {
        let (give, take) = mpsc::sync_channel::<(Plan, Dialing)>(1);
        let run = move || {
            if let Ok((plan, dialing)) = take.recv() {
                plan.dial(dialing);
            }
        };
        let thread = std::thread::Builder::new().name("weft-exs-dial".into());
        if let Err(error) = thread.spawn(run) {
            tracing::warn!(%error, "no thread for a connect");
            *lock(&self.0.state) = State::Idle(None);
            dialing.target.forget();
            return Err(Errno::AGAIN);
        }
        let _ = give.send((plan, dialing));
        Ok(())
    }

    /// The connection itself only if the device is known: the soft RNIC.
    fn begin(&self, addr: SocketAddr) -> Result<(Plan, Option<Setup>), Errno> {
        self.check_family(addr)?;
        let inner = &self.0;
        let mut state = lock(&inner.state);
        let bound = match &mut *state {
            State::Idle(bound) => bound,
            State::Connecting(_) => return Err(Errno::ALREADY),
            State::Connected => return Err(Errno::ISCONN),
            State::Listening(_) => return Err(Errno::INVAL),
            State::Closed => return Err(Errno::BADF),
        };
        let mut plan = Plan {
            context: inner.context.clone(),
            kind: inner.kind,
            options: self.options(),
            signal: Arc::clone(&inner.signal),
            addr,
            source: None,
        };
        let setup = match inner.context.choice() {
            Choice::Soft => Some(plan.prepare_soft()?),
            _ => None,
        };
        // Taken only now, so that a failure above does not lose the address.
        plan.source = bound.take().map(|(addr, _)| addr);
        *state = State::Connecting(setup.as_ref().map(|setup| Arc::clone(&setup.conn)));
        Ok((plan, setup))
    }
}
