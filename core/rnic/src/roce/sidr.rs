//! Service ID resolution in the connection manager of a port (12.8): which datagram queue pair a program has that listens at a port number.
//!
//! Source addresses can be forged. An answer is as long as its request, and an address gets a limited number of answers in a second. A request that comes
//! again gets the same answer, so that a program sees each request once; both the requests that wait and the answers that are kept are limited.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};

use weft_proto::roce::sidr::{Inquiry, Outcome};
use weft_wire::roce::DEFAULT_PKEY;
use weft_wire::roce::cm::{self, IpHeader, Mad, Message, PortSpace, SidrRep, SidrReq, service_id};
use weft_wire::sidr::{MAX_REPLY, MAX_REQUEST, status};

use super::peer_addr;
use super::port::{PortInner, RocePort};
use super::siblings::Claim;
use crate::lock::lock;
use crate::sidr::known::{Heard, Known, Sources};
use crate::sidr::{Found, LookupError};
use crate::types::Error;

/// How long an answer is waited for, a power: 1.07 s.
const RESPONSE_TIMEOUT: u8 = 18;
/// How often a request is sent again.
const RETRIES: u8 = 7;
/// Questions of ours at once.
const MOST_INQUIRIES: usize = 65_536;

/// The requester's address, its number of the request, and the number of the exchange.
type Key = (IpAddr, u32, u64);
type OnRequest = Arc<dyn Fn(RoceLookupRequest) + Send + Sync>;
type OnAnswer = Box<dyn FnOnce(Result<Found, LookupError>) + Send>;

struct Listener {
    /// No other process has the port number.
    claim: Claim,
    known: Known<Key>,
    on_request: OnRequest,
}

struct Asking {
    inquiry: Inquiry,
    peer: SocketAddr,
    on_answer: OnAnswer,
}

/// The part of the manager's state that is for datagrams.
#[derive(Default)]
pub(super) struct Sidr {
    listeners: HashMap<u16, Listener>,
    asking: HashMap<u32, Asking>,
    sources: Option<Sources>,
}

/// What follows from a message or from a time, to be done without the lock.
#[derive(Default)]
struct Todo {
    send: Vec<(SocketAddr, Vec<u8>)>,
    tell: Vec<(OnAnswer, Result<Found, LookupError>)>,
    asked: Option<(OnRequest, RoceLookupRequest)>,
}

/// A question under way. Dropping it ends it: nothing is told then.
pub struct RoceLookup {
    port: RocePort,
    request_id: u32,
}

/// A listener for datagrams. Dropping it ends it; requests that the program has may still be answered.
pub struct RoceServing {
    port: RocePort,
    number: u16,
}

/// A request for a datagram queue pair. Dropping it refuses it.
pub struct RoceLookupRequest {
    port: RocePort,
    number: u16,
    key: Key,
    from: SocketAddr,
    service_id: u64,
    answered: bool,
    /// The addresses that the peer has named: the requester and ours.
    pub addrs: (SocketAddr, SocketAddr),
    /// Private data of the program, 180 bytes.
    pub private_data: Vec<u8>,
}

fn state_of(port: &PortInner) -> MutexGuard<'_, Sidr> {
    let state: Option<&Mutex<Sidr>> = port.manager.datagrams().downcast_ref();
    lock(state.expect("the port of an address has a manager"))
}

impl RocePort {
    /// Asks the program that listens for datagrams at this address and port number for its queue pair; `from` is the port number that it sees.
    /// `on_answer` is called once, on any thread, unless the [`RoceLookup`] is dropped before. It must not block.
    ///
    /// # Errors
    /// [`Error::Invalid`] for more than 180 bytes of private data, and for too many questions at once.
    pub fn look_up(
        &self,
        (peer, scope): (SocketAddr, u32),
        from: u16,
        private_data: &[u8],
        on_answer: impl FnOnce(Result<Found, LookupError>) + Send + 'static,
    ) -> Result<RoceLookup, Error> {
        if private_data.len() > MAX_REQUEST {
            return Err(Error::Invalid("too much private data for a request"));
        }
        let port = self.inner();
        let dst = peer.ip().to_canonical();
        let header = IpHeader {
            port: from,
            src: port.local_addr().ip(),
            dst,
        };
        let data = [&header.emit()[..], private_data].concat();
        let mut todo = Todo::default();
        let request_id = {
            let mut state = state_of(port);
            let asking = &mut state.asking;
            if asking.len() >= MOST_INQUIRIES {
                return Err(Error::Invalid(
                    "the port has as many questions as it may have",
                ));
            }
            let ids = std::iter::repeat_with(|| port.random_id());
            let Some(request_id) = { ids }.find(|id| *id != 0 && !asking.contains_key(id)) else {
                unreachable!("numbers do not end");
            };
            let req = SidrReq {
                request_id,
                pkey: DEFAULT_PKEY,
                service_id: service_id(PortSpace::Udp, peer.port()),
                private_data: &data,
            };
            let (now, transaction) = (port.now(), port.transaction());
            let mut asking_now = Asking {
                inquiry: Inquiry::new(now, transaction, &req, RESPONSE_TIMEOUT, RETRIES),
                peer: peer_addr(dst, scope),
                on_answer: Box::new(on_answer),
            };
            asking_now.collect(&mut todo);
            if let Some(at) = asking_now.inquiry.deadline() {
                port.watch_manager(port.instant(at));
            }
            asking.insert(request_id, asking_now);
            request_id
        };
        port.do_sidr(todo);
        Ok(RoceLookup {
            port: self.clone(),
            request_id,
        })
    }

    /// Takes requests for datagram queue pairs at this port number of the address. Each is given to `on_request` once, on any thread; it must not
    /// block. While `backlog` of them are unanswered, further ones are not heard, nor are more than 512 of one address in a second.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is a listener; [`Error::Os`] (`AddrInUse`) if another process that has the address too has one.
    pub fn serve(
        &self,
        number: u16,
        backlog: u32,
        on_request: impl Fn(RoceLookupRequest) + Send + Sync + 'static,
    ) -> Result<RoceServing, Error> {
        let mut state = state_of(self.inner());
        let listeners = &mut state.listeners;
        if listeners.contains_key(&number) {
            return Err(Error::Invalid("another listener has this port number"));
        }
        let claim = self.inner().claim(PortSpace::Udp, number);
        let claim = claim.map_err(Error::os("claiming the port number"))?;
        let listener = Listener {
            claim,
            known: Known::new(backlog.max(1) as usize),
            on_request: Arc::new(on_request),
        };
        listeners.insert(number, listener);
        drop(state);
        Ok(RoceServing {
            port: self.clone(),
            number,
        })
    }
}

impl Drop for RoceLookup {
    fn drop(&mut self) {
        let mut state = state_of(self.port.inner());
        let gone = state.asking.remove(&self.request_id);
        drop(state);
        drop(gone);
    }
}

impl Drop for RoceServing {
    fn drop(&mut self) {
        let mut state = state_of(self.port.inner());
        let gone = state.listeners.remove(&self.number);
        drop(state);
        drop(gone);
    }
}

impl RoceLookupRequest {
    /// Names this queue pair.
    ///
    /// # Errors
    /// [`Error::Invalid`] for private data of more than 136 bytes; the request is refused then.
    pub fn accept(mut self, qp_num: u32, qkey: u32, private_data: &[u8]) -> Result<(), Error> {
        if private_data.len() > MAX_REPLY {
            return Err(Error::Invalid("too much private data for an answer"));
        }
        self.answer(status::SUCCESS, (qp_num, qkey), private_data);
        Ok(())
    }

    /// Refuses it, with private data of at most 136 bytes; further ones are left out.
    pub fn reject(mut self, private_data: &[u8]) {
        self.answer(status::REJECT, (0, 0), private_data);
    }

    fn answer(&mut self, status: u8, (qp, qkey): (u32, u32), private_data: &[u8]) {
        self.answered = true;
        let (_, request_id, transaction) = self.key;
        let message = Message::SidrRep(SidrRep {
            request_id,
            status,
            qp,
            service_id: self.service_id,
            qkey,
            private_data,
        });
        let mad = Mad {
            transaction,
            message,
        };
        let raw = mad.emit().to_vec();
        let port = self.port.inner();
        port.send_mad(self.from, &raw);
        let mut state = state_of(port);
        if let Some(listener) = state.listeners.get_mut(&self.number) {
            listener.known.answer(self.key, raw);
        }
    }
}

impl Drop for RoceLookupRequest {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(status::NO_QP, (0, 0), &[]);
        }
    }
}

impl Asking {
    /// Takes the message that is to be sent.
    fn collect(&mut self, todo: &mut Todo) {
        if let Some(raw) = self.inquiry.take() {
            todo.send.push((self.peer, raw.to_vec()));
        }
    }
}

fn told(outcome: Outcome) -> Result<Found, LookupError> {
    match outcome {
        Outcome::Found {
            qp,
            qkey,
            private_data,
        } => Ok(Found {
            qp_num: qp,
            qkey,
            private_data,
        }),
        Outcome::Refused {
            status: status::UNSUPPORTED,
            ..
        } => Err(LookupError::NoService),
        Outcome::Refused {
            status,
            private_data,
        } => Err(LookupError::Refused {
            status,
            private_data,
        }),
        Outcome::TimedOut => Err(LookupError::TimedOut),
    }
}

impl PortInner {
    /// Whether a program listens for datagrams at this service, and has done so at this time of the host's clock.
    pub(super) fn serves(&self, service_id: u64, at: u64) -> bool {
        let Some((PortSpace::Udp, number)) = cm::service(service_id) else {
            return false;
        };
        let state = state_of(self);
        let listener = state.listeners.get(&number);
        listener.is_some_and(|listener| listener.claim.since <= at)
    }

    /// A message of this peer about datagrams. False: it is about connections.
    pub(super) fn hear_sidr(&self, from: SocketAddr, mad: &Mad<'_>) -> bool {
        let mut todo = Todo::default();
        match &mad.message {
            Message::SidrReq(req) => self.sidr_requested(from, mad.transaction, req, &mut todo),
            Message::SidrRep(rep) => {
                let mut state = state_of(self);
                let asking = &mut state.asking;
                let of_peer = |a: &&mut Asking| a.peer.ip() == from.ip();
                let found = asking.get_mut(&rep.request_id).filter(of_peer);
                let outcome = found.and_then(|a| a.inquiry.on(mad.transaction, rep));
                if let Some(outcome) = outcome
                    && let Some(over) = asking.remove(&rep.request_id)
                {
                    todo.tell.push((over.on_answer, told(outcome)));
                }
            }
            _ => return false,
        }
        self.do_sidr(todo);
        true
    }

    fn sidr_requested(
        &self,
        from: SocketAddr,
        transaction: u64,
        req: &SidrReq<'_>,
        todo: &mut Todo,
    ) {
        let Some(owner) = self.owner() else {
            return;
        };
        let mut state = state_of(self);
        let Sidr {
            listeners, sources, ..
        } = &mut *state;
        let second = self.now().as_secs();
        let sources = sources.get_or_insert_with(Sources::new);
        if !sources.admit(from.ip(), second) {
            return;
        }
        let number = match cm::service(req.service_id) {
            Some((PortSpace::Udp, number)) => Some(number),
            _ => None,
        };
        let listener = number.and_then(|number| Some((number, listeners.get_mut(&number)?)));
        let said = IpHeader::parse(req.private_data);
        // The process that has the listener and this one may not know each other yet.
        if listener.is_none() && self.is_served(req.service_id) {
            return;
        }
        let (Some((number, listener)), Some((header, data))) = (listener, said) else {
            let message = Message::SidrRep(SidrRep {
                request_id: req.request_id,
                status: status::UNSUPPORTED,
                qp: 0,
                service_id: req.service_id,
                qkey: 0,
                private_data: &[],
            });
            let mad = Mad {
                transaction,
                message,
            };
            todo.send.push((from, mad.emit().to_vec()));
            return;
        };
        let key = (from.ip(), req.request_id, transaction);
        match listener.known.hear(key) {
            Heard::Nothing => {}
            Heard::Answered(raw) => todo.send.push((from, raw)),
            Heard::New => {
                let mut requester = from;
                requester.set_port(header.port);
                let request = RoceLookupRequest {
                    port: owner,
                    number,
                    key,
                    from,
                    service_id: req.service_id,
                    answered: false,
                    addrs: (requester, SocketAddr::new(self.local_addr().ip(), number)),
                    private_data: data.to_vec(),
                };
                todo.asked = Some((Arc::clone(&listener.on_request), request));
            }
        }
    }

    /// The time of some questions has come.
    pub(super) fn sidr_expired(&self) {
        let now = self.now();
        let mut todo = Todo::default();
        {
            let mut state = state_of(self);
            let asking = &mut state.asking;
            let over = asking.extract_if(|_, a| {
                let outcome = a.inquiry.expired(now);
                a.collect(&mut todo);
                outcome.is_some()
            });
            let over: Vec<_> = over.collect();
            let tell = |(_, a): (u32, Asking)| (a.on_answer, Err(LookupError::TimedOut));
            todo.tell.extend(over.into_iter().map(tell));
            let next = asking.values().filter_map(|a| a.inquiry.deadline()).min();
            if let Some(next) = next {
                self.watch_manager(self.instant(next));
            }
        }
        self.do_sidr(todo);
    }

    fn do_sidr(&self, todo: Todo) {
        for (to, raw) in todo.send {
            self.send_mad(to, &raw);
        }
        for (tell, outcome) in todo.tell {
            tell(outcome);
        }
        if let Some((on_request, request)) = todo.asked {
            on_request(request);
        }
    }
}
