//! The wire of connections under `WEFT_IB_WIRE=auto` (docs/spec/persona.md, "Which wire"): the side that connects chooses, and a listener hears both wires.
//!
//! On one host the kernel's names of sockets say who listens at an address: for the persona the name that its peers look for anyway, for RoCE one that is
//! bound here. A listener of both has the persona's first, and they are read in the other order, so its peers never miss it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_verbs::ext::{DeviceExt, listening_user};

use super::connect::{Begin, Wish};
use super::device::Nic;
use super::id::{Core, Setup, Stage, get};
use super::link;
use super::news::News;
use super::patience::{FIRST_PAUSE, LONGEST_PAUSE, PATIENCE};
use super::roce_link::scope;
use super::roce_name::RoceName;
use super::types::RDMA_CM_EVENT_CONNECT_ERROR;
use crate::verbs::object::Name;
use crate::verbs::os_errno;
use crate::verbs::qp::QpObj;
use crate::verbs::wire::{self, Choice, Wire};

/// Whether a listener of the persona is there.
fn has_persona(addr: SocketAddr) -> Result<bool, Errno> {
    match listening_user(addr) {
        Ok(user) => Ok(user.is_some()),
        // It is there, and busy.
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Ok(true),
        Err(error) => Err(os_errno(&error)),
    }
}

/// The wire to the listener at this address; `None` while nobody listens there.
///
/// # Errors
/// As `socket(2)`.
fn wire_to(addr: SocketAddr) -> Result<Option<Choice>, Errno> {
    if !wire::is_here(addr.ip().to_canonical(), scope(addr))? {
        return Ok(Some((Wire::Roce, "the listener is on another host")));
    }
    let roce = RoceName::is_there(addr)?;
    Ok(if has_persona(addr)? {
        Some((Wire::Persona, "the listener is on this host"))
    } else if roce {
        let why = "the listener is on this host, and hears RoCE alone";
        Some((Wire::Roce, why))
    } else {
        None
    })
}

impl Core {
    /// Its queue pair, if that can take either wire.
    fn undecided(&self) -> Option<Name<QpObj>> {
        let name = link::name(get!(self, qp)).ok()?;
        let changes = name.get().is_ok_and(|qp| qp.changes());
        changes.then_some(name)
    }

    /// Its queue pair takes the wire of the request that it answers.
    pub(super) fn take_wire_of_request(&self) -> Result<(), Errno> {
        let (is_roce, peer) = match &self.setup().stage {
            Stage::Requested(request) => (request.is_roce(), request.addrs().1),
            _ => return Err(Errno::INVAL),
        };
        let choice = if is_roce {
            (Wire::Roce, "the request came by RoCE")
        } else {
            (Wire::Persona, "the request came by TCP")
        };
        let undecided = self.undecided();
        undecided.map_or(Ok(()), |qp| wire::take(qp, peer.ip(), choice))
    }

    /// Whether a connection is RoCE's whose program moves its queue pair itself: as the request came, or as the wire to the listener is.
    pub(super) fn goes_by_roce(&self) -> Result<bool, Errno> {
        let dst = match &*self.setup() {
            Setup {
                stage: Stage::Requested(request),
                ..
            } => return Ok(request.is_roce()),
            setup => setup.dst,
        };
        Ok(match wire::asked() {
            Wire::Roce => true,
            Wire::Persona => false,
            Wire::Auto => {
                let choice = wire_to(dst.ok_or(Errno::INVAL)?)?;
                choice.is_some_and(|(wire, _)| wire == Wire::Roce)
            }
        })
    }

    /// Connects, once it is known by which wire. The call does not wait for a listener that is about to listen.
    pub(super) fn choose_and_connect(
        self: &Arc<Self>,
        nic: &Nic,
        wish: Wish,
        named: bool,
    ) -> Result<(), Errno> {
        let dst = self.setup().dst;
        let (Some(dst), Some(qp)) = (dst, self.undecided()) else {
            return self.connect_with(nic, wish, named, &Begin::now());
        };
        {
            let mut setup = self.setup();
            if !matches!(setup.stage, Stage::Routed) {
                return Err(Errno::INVAL);
            }
            setup.stage = Stage::Choosing;
        }
        let choosing = Choosing {
            core: Arc::clone(self),
            nic: nic.clone(),
            qp,
            dst,
            wish,
            named,
            until: Instant::now() + PATIENCE,
            pause: FIRST_PAUSE,
        };
        let done = match wire_to(dst) {
            Ok(Some(choice)) => choosing.connect(choice),
            Ok(None) => {
                choosing.wait();
                Ok(())
            }
            Err(errno) => Err(errno),
        };
        done.inspect_err(|_| {
            let mut setup = self.setup();
            if matches!(setup.stage, Stage::Choosing) {
                setup.stage = Stage::Routed;
            }
        })
    }

    fn is_choosing(&self) -> bool {
        matches!(self.setup().stage, Stage::Choosing)
    }

    /// No connection comes of it, and the program learns it by an event.
    fn cannot_connect(self: &Arc<Self>, errno: Errno) {
        let over = {
            let mut setup = self.setup();
            let over = matches!(setup.stage, Stage::Choosing | Stage::Routed);
            if over {
                setup.stage = Stage::Over(None);
            }
            over
        };
        if over {
            let status = -errno.raw_os_error();
            self.tell(News::status(RDMA_CM_EVENT_CONNECT_ERROR, status));
        }
    }
}

/// A request of an identifier in [`Stage::Choosing`].
struct Choosing {
    core: Arc<Core>,
    nic: Nic,
    qp: Name<QpObj>,
    dst: SocketAddr,
    wish: Wish,
    named: bool,
    until: Instant,
    pause: Duration,
}

impl Choosing {
    /// Looks again after a pause.
    fn wait(mut self) {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        let native = self.nic.native.clone();
        native.after(pause, move || self.look());
    }

    /// On the engine's thread.
    fn look(self) {
        if !self.core.is_choosing() {
            return;
        }
        let choice = match wire_to(self.dst) {
            Ok(Some(choice)) => choice,
            Ok(None) if Instant::now() < self.until => return self.wait(),
            // TCP says the same again, and that is the outcome.
            Ok(None) => (Wire::Persona, "nobody listens"),
            Err(errno) => return self.core.cannot_connect(errno),
        };
        // Not here: a thread that has the queue pair may wait for the engine.
        let core = Arc::clone(&self.core);
        let go_on = move || {
            let core = Arc::clone(&self.core);
            if let Err(errno) = self.connect(choice) {
                core.cannot_connect(errno);
            }
        };
        let thread = thread::Builder::new().name("weft-cm-wire".into());
        if let Err(error) = thread.spawn(go_on) {
            core.cannot_connect(os_errno(&error));
        }
    }

    fn connect(self, choice: Choice) -> Result<(), Errno> {
        wire::take(self.qp, self.dst.ip(), choice)?;
        let begin = Begin::chosen(self.until);
        self.core
            .connect_with(&self.nic, self.wish, self.named, &begin)
    }
}
