//! Identifiers for datagrams on RoCE: the messages of InfiniBand's connection manager that find a queue pair, by `core/rnic`.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_verbs::cm::{Found, LookupError, ServicePort};
use weft_verbs::ext::DeviceExt;
use weft_verbs::{RoceLookup, RoceLookupRequest, RocePort, RoceServing};

use super::device::Nic;
use super::patience::{FIRST_PAUSE, LONGEST_PAUSE, PATIENCE};
use super::roce_link::{addresses, not_listening, scope};
use crate::verbs::object::lock;
use crate::verbs::roce;

/// Listens until it is dropped: on each address, while the port number stays taken.
pub(super) struct RoceServer {
    _port: ServicePort,
    _serving: Vec<RoceServing>,
}

/// Listens at this address, or at all of this host.
///
/// # Errors
/// As `bind(2)` for port 4791, if no address is left.
pub(super) fn serve(
    nic: &Nic,
    port: ServicePort,
    backlog: u32,
    on_request: impl Fn(RoceLookupRequest) + Send + Sync + 'static,
) -> Result<RoceServer, Errno> {
    let addr = port.local_addr();
    let on_request = Arc::new(on_request);
    let mut serving = Vec::new();
    let mut refused = Errno::ADDRNOTAVAIL;
    for (ip, scope) in addresses(addr)? {
        let on_request = Arc::clone(&on_request);
        let at = match roce::port(&nic.native, ip, scope) {
            Ok(at) => at,
            Err(errno) => {
                refused = errno;
                continue;
            }
        };
        let made = at.serve(addr.port(), backlog, move |request| on_request(request));
        serving.push(made.map_err(|error| not_listening(error, "udp", (ip, scope), addr.port()))?);
    }
    if serving.is_empty() {
        return Err(refused);
    }
    Ok(RoceServer {
        _port: port,
        _serving: serving,
    })
}

type OnAnswer = Box<dyn FnOnce(Result<Found, LookupError>) + Send>;

/// A question under way, from a port number that stays taken.
pub(super) struct RoceInquiry {
    _port: ServicePort,
    _lookup: Arc<Mutex<Option<RoceLookup>>>,
}

/// A question, which is repeated where nobody listened yet, as [`PATIENCE`] says.
#[derive(Clone)]
struct Question {
    nic: Nic,
    at: RocePort,
    from: u16,
    dst: SocketAddr,
    private_data: Arc<[u8]>,
    until: Instant,
    pause: Duration,
    /// Those of [`RoceInquiry`]: once it has gone, no answer is wanted.
    lookup: Weak<Mutex<Option<RoceLookup>>>,
    on_answer: Arc<Mutex<Option<OnAnswer>>>,
}

impl Question {
    fn ask(self) -> Result<(), Errno> {
        let Some(place) = self.lookup.upgrade() else {
            return Ok(());
        };
        // Held until the lookup is in its place: the answer may come before.
        let mut place = lock(&place);
        let to = (self.dst, scope(self.dst));
        let (at, from) = (self.at.clone(), self.from);
        let private_data = Arc::clone(&self.private_data);
        let lookup = at.look_up(to, from, &private_data, move |answer| self.hear(answer));
        *place = Some(lookup.map_err(crate::verbs::errno)?);
        Ok(())
    }

    fn hear(mut self, answer: Result<Found, LookupError>) {
        let unseen = answer == Err(LookupError::NoService);
        if !unseen || Instant::now() >= self.until {
            return self.tell(answer);
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        let device = self.nic.native.clone();
        device.after(pause, move || {
            if self.clone().ask().is_err() {
                self.tell(answer);
            }
        });
    }

    fn tell(&self, answer: Result<Found, LookupError>) {
        let on_answer = lock(&self.on_answer).take();
        if let Some(on_answer) = on_answer {
            on_answer(answer);
        }
    }
}

/// Asks the listener at `dst` for a queue pair.
///
/// # Errors
/// As `bind(2)` for port 4791 of our address; `EINVAL` for too much private data.
pub(super) fn look_up(
    nic: &Nic,
    port: ServicePort,
    src: IpAddr,
    dst: SocketAddr,
    private_data: &[u8],
    on_answer: impl FnOnce(Result<Found, LookupError>) + Send + 'static,
) -> Result<RoceInquiry, Errno> {
    let from = port.local_addr();
    let lookup = Arc::default();
    let question = Question {
        nic: nic.clone(),
        at: roce::port(&nic.native, src.to_canonical(), scope(from))?,
        from: from.port(),
        dst,
        private_data: private_data.into(),
        until: Instant::now() + PATIENCE,
        pause: FIRST_PAUSE,
        lookup: Arc::downgrade(&lookup),
        on_answer: Arc::new(Mutex::new(Some(Box::new(on_answer)))),
    };
    question.ask()?;
    Ok(RoceInquiry {
        _port: port,
        _lookup: lookup,
    })
}
