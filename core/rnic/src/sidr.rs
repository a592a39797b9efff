//! Service ID resolution: finds the datagram queue pair of a program that listens on a UDP port (docs/spec/dgram.md).
//!
//! A request is repeated until it is answered. A repeated request gets the same answer as the first one, so that programs see each request
//! once. All of this happens on the engine's thread.
//!
//! Source addresses can be forged. Therefore an answer is never longer than its request, and the number of answers to an address in a second is
//! limited.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use weft_sys::tcp::BindOptions;
use weft_sys::udp::{Arrival, UdpSocket};
use weft_sys::{Event, Interest};
use weft_wire::sidr::{self, Body, Message, status};

use crate::device::{Device, DeviceInner, Transport};
use crate::engine::{Engine, Next, Registration, Source, guarded};
use crate::lock::lock;

pub(crate) mod known;

use known::{Heard, Key, Known, Sources};

/// Room for messages that wait to be looked at, in bytes as the kernel counts them.
const RECEIVE_BUFFER: usize = 1 << 20;
/// Messages of one look, so that a flood does not keep the engine from everything else.
const BATCH: usize = 32;
/// One byte more than the longest message: a longer one shows.
const ROOM: usize = sidr::MAX_LEN + 1;
/// This many requests may be answered by "port unreachable": the program may be about to listen. 750 ms in all.
const REFUSALS: u32 = 5;
/// A request is sent so often again, as InfiniBand's connection manager does.
const RETRIES: u32 = 15;
/// Pauses before that: the first, doubled each time, and the longest. 12.55 seconds in all.
const PAUSES: [Duration; 2] = [Duration::from_millis(50), Duration::from_secs(1)];

/// The queue pair that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its number.
    pub qp_num: u32,
    /// Its `Q_Key`.
    pub qkey: u32,
    /// The program's private data.
    pub private_data: Vec<u8>,
}

/// Why a queue pair was not found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// No program listens there.
    #[error("nobody listens there")]
    NoService,
    /// The listening program refused.
    #[error("refused with status {status}")]
    Refused {
        /// InfiniBand's number of the reason (12.8.2): 2 where the program has rejected the request.
        status: u8,
        /// The program's private data.
        private_data: Vec<u8>,
    },
    /// No answer.
    #[error("no answer")]
    TimedOut,
}

/// A UDP address that is taken, to listen there or to ask from there: see [`Device::bind_service`]. Dropping it gives it back.
pub struct ServicePort {
    device: Arc<DeviceInner>,
    socket: UdpSocket,
    addr: SocketAddr,
}

impl Device {
    /// Binds a UDP address (port 0: any free one), never shared: sockets that share it would also share the requests, whatever
    /// [`BindOptions::share`] says.
    ///
    /// # Errors
    /// As `bind(2)`; `Unsupported` on a simulated network.
    pub fn bind_service(&self, addr: SocketAddr, options: BindOptions) -> io::Result<ServicePort> {
        if !matches!(self.0.transport, Transport::Tcp) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let alone = BindOptions {
            share: false,
            ..options
        };
        let socket = UdpSocket::bind_with(addr, RECEIVE_BUFFER, alone)?;
        Ok(ServicePort {
            device: Arc::clone(&self.0),
            addr: socket.local_addr()?,
            socket,
        })
    }
}

impl ServicePort {
    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Take requests. Each is given to `on_request` once, from the engine's thread: it must not block. While `backlog` of them
    /// are unanswered, further ones are not heard, nor are more than 512 of one address in a second.
    ///
    /// # Errors
    /// As `epoll_ctl(2)`.
    pub fn serve(
        self,
        backlog: u32,
        on_request: impl Fn(LookupRequest) + Send + Sync + 'static,
    ) -> io::Result<Serving> {
        let service = Arc::new(Service {
            registration: Registration::new(&self.device.engine),
            port: self,
            known: Mutex::new(Known::new(backlog.max(1) as usize)),
            sources: Mutex::new(Sources::new()),
            start: Instant::now(),
            on_request: Box::new(on_request),
        });
        let source = Arc::clone(&service) as Arc<dyn Source>;
        let registration = &service.registration;
        registration.start(source, service.port.fd(), Interest::READ)?;
        Ok(Serving(service))
    }

    /// Asks the program that listens at `dst` for a queue pair. The engine's thread calls `on_answer` once (it must not block), unless the
    /// [`Lookup`] is dropped before.
    ///
    /// # Errors
    /// `InvalidInput` for private data of more than 180 bytes; the kernel's error about the route.
    pub fn look_up(
        self,
        dst: SocketAddr,
        private_data: &[u8],
        on_answer: impl FnOnce(Result<Found, LookupError>) + Send + 'static,
    ) -> io::Result<Lookup> {
        self.ask(dst, private_data, PAUSES, Box::new(on_answer))
    }

    fn ask(
        self,
        dst: SocketAddr,
        private_data: &[u8],
        [pause, longest]: [Duration; 2],
        on_answer: OnAnswer,
    ) -> io::Result<Lookup> {
        // Room for the longest answer.
        let mut private_data = private_data.to_vec();
        private_data.resize(private_data.len().max(sidr::MAX_REPLY), 0);
        // An answer without it comes from a sender that has not seen the request.
        let transaction = RandomState::new().hash_one(dst);
        let request = Message {
            transaction,
            body: Body::Request,
            private_data: &private_data,
        };
        let request = request.emit().ok_or(io::ErrorKind::InvalidInput)?;
        self.socket.connect(dst)?;
        let asking = Arc::new(Asking {
            registration: Registration::new(&self.device.engine),
            port: self,
            dst,
            request,
            transaction,
            state: Mutex::new(Some(Waiting {
                on_answer,
                sent: 1,
                pause,
                longest,
            })),
        });
        let source = Arc::clone(&asking) as Arc<dyn Source>;
        let registration = &asking.registration;
        registration.start(source, asking.port.fd(), Interest::READ)?;
        registration.set_timer(Instant::now() + pause);
        asking.send();
        Ok(Lookup(asking))
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

type OnRequest = Box<dyn Fn(LookupRequest) + Send + Sync>;

struct Service {
    port: ServicePort,
    registration: Registration,
    known: Mutex<Known>,
    sources: Mutex<Sources>,
    start: Instant,
    on_request: OnRequest,
}

impl Service {
    /// False: there is nothing more.
    fn receive(self: &Arc<Self>) -> bool {
        let mut buffer = [0; ROOM];
        let arrival = match self.port.socket.recv(&mut buffer) {
            Ok(arrival) => arrival,
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        };
        let Arrival { len, from, to, .. } = arrival;
        let datagram = buffer.get(..len).unwrap_or_default();
        let Some(Message {
            transaction,
            body: Body::Request,
            private_data,
        }) = Message::parse(datagram)
        else {
            tracing::debug!(%from, "no request: dropped");
            return true;
        };
        let second = self.start.elapsed().as_secs();
        if !lock(&self.sources).admit(from.ip(), second) {
            return true;
        }
        let key = (from, transaction);
        let heard = lock(&self.known).hear(key);
        match heard {
            Heard::New => {
                let request = LookupRequest {
                    service: Arc::clone(self),
                    key,
                    to,
                    private_data: private_data.to_vec(),
                    room: len,
                    answered: false,
                };
                guarded(|| (self.on_request)(request));
            }
            Heard::Answered(answer) if answer.len() <= len => self.send(&answer, from, to),
            Heard::Nothing | Heard::Answered(_) => {}
        }
        true
    }

    /// A lost answer is requested again.
    fn send(&self, answer: &[u8], to: SocketAddr, from: Option<IpAddr>) {
        if let Err(error) = self.port.socket.send(answer, to, from) {
            tracing::debug!(%error, %to, "an answer is lost");
        }
    }
}

impl Source for Service {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        for _ in 0..BATCH {
            if !self.receive() {
                break;
            }
        }
        self.registration.arm(self.port.fd(), Interest::READ);
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {}
}

/// Requests are taken until this is dropped. Those that are unanswered then may still be answered.
pub struct Serving(Arc<Service>);

impl Serving {
    /// The address at which requests are taken.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.port.addr
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.registration.release(self.0.port.fd());
    }
}

/// A request for a queue pair. Dropping it refuses the request.
pub struct LookupRequest {
    service: Arc<Service>,
    key: Key,
    /// Our address to which the request was sent.
    to: Option<IpAddr>,
    private_data: Vec<u8>,
    /// The longest answer, in bytes: as long as the request was.
    room: usize,
    answered: bool,
}

impl LookupRequest {
    /// The private data of the requesting program, padded with zeros to at least 136 bytes.
    pub fn private_data(&self) -> &[u8] {
        &self.private_data
    }

    /// The address of the requester.
    pub fn peer_addr(&self) -> SocketAddr {
        self.key.0
    }

    /// The address that was asked.
    pub fn local_addr(&self) -> SocketAddr {
        let addr = self.service.port.addr;
        match self.to {
            Some(to) => SocketAddr::new(to, addr.port()),
            None => addr,
        }
    }

    /// Name this queue pair.
    ///
    /// # Errors
    /// `InvalidInput` for private data of more than 136 bytes, or of more than came with the request, which weft fills up.
    pub fn accept(mut self, qp_num: u32, qkey: u32, private_data: &[u8]) -> io::Result<()> {
        let body = Body::Reply {
            status: status::SUCCESS,
            qp_num,
            qkey,
        };
        self.answer(body, private_data)
    }

    /// Refuse.
    ///
    /// # Errors
    /// As for [`LookupRequest::accept`].
    pub fn reject(mut self, private_data: &[u8]) -> io::Result<()> {
        self.answer(refusal(status::REJECT), private_data)
    }

    fn answer(&mut self, body: Body, private_data: &[u8]) -> io::Result<()> {
        let message = Message {
            transaction: self.key.1,
            body,
            private_data,
        };
        let answer = message.emit().filter(|answer| answer.len() <= self.room);
        let answer = answer.ok_or(rustix::io::Errno::INVAL)?;
        self.answered = true;
        self.service.send(&answer, self.key.0, self.to);
        lock(&self.service.known).answer(self.key, answer);
        Ok(())
    }
}

fn refusal(status: u8) -> Body {
    Body::Reply {
        status,
        qp_num: 0,
        qkey: 0,
    }
}

impl Drop for LookupRequest {
    fn drop(&mut self) {
        if !self.answered {
            // Without private data it is never too long, nor longer than a request.
            let _ = self.answer(refusal(status::NO_QP), &[]);
        }
    }
}

type OnAnswer = Box<dyn FnOnce(Result<Found, LookupError>) + Send>;

struct Waiting {
    on_answer: OnAnswer,
    /// How often the request has been sent.
    sent: u32,
    pause: Duration,
    longest: Duration,
}

struct Asking {
    port: ServicePort,
    dst: SocketAddr,
    request: Vec<u8>,
    transaction: u64,
    registration: Registration,
    /// `None` after an answer, or if no answer is wanted.
    state: Mutex<Option<Waiting>>,
}

impl Asking {
    fn send(&self) {
        let send = || self.port.socket.send(&self.request, self.dst, None);
        // The error of an earlier request may be reported here, in which case this one was not sent.
        let sent = send().or_else(|error| match error.kind() {
            io::ErrorKind::ConnectionRefused => send(),
            _ => Err(error),
        });
        if let Err(error) = sent {
            // It is asked for again.
            tracing::debug!(%error, dst = %self.dst, "a request is lost");
        }
    }

    /// The network reports that no program listens there.
    fn refused(&self) {
        let sent = lock(&self.state).as_ref().map_or(0, |waiting| waiting.sent);
        if sent >= REFUSALS {
            self.end(Err(LookupError::NoService));
        }
    }

    fn end(&self, answer: Result<Found, LookupError>) {
        let waiting = lock(&self.state).take();
        if let Some(waiting) = waiting {
            self.registration.release(self.port.fd());
            guarded(|| (waiting.on_answer)(answer));
        }
    }

    fn receive(&self) -> bool {
        let mut buffer = [0; ROOM];
        let arrival = match self.port.socket.recv(&mut buffer) {
            Ok(arrival) => arrival,
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                self.refused();
                return true;
            }
            Err(error) => return error.kind() != io::ErrorKind::WouldBlock,
        };
        // A datagram from before the socket was connected may be from any sender. IPv4 addresses come as such.
        let from = (arrival.from.ip(), arrival.from.port());
        let asked = (self.dst.ip().to_canonical(), self.dst.port());
        let datagram = buffer.get(..arrival.len).unwrap_or_default();
        match Message::parse(datagram) {
            Some(Message {
                transaction,
                body:
                    Body::Reply {
                        status,
                        qp_num,
                        qkey,
                    },
                private_data,
            }) if transaction == self.transaction && from == asked => {
                let private_data = private_data.to_vec();
                self.end(match status {
                    status::SUCCESS => Ok(Found {
                        qp_num,
                        qkey,
                        private_data,
                    }),
                    status::UNSUPPORTED => Err(LookupError::NoService),
                    status => Err(LookupError::Refused {
                        status,
                        private_data,
                    }),
                });
                false
            }
            _ => true,
        }
    }
}

impl Source for Asking {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        for _ in 0..BATCH {
            if !self.receive() {
                break;
            }
        }
        if lock(&self.state).is_some() {
            self.registration.arm(self.port.fd(), Interest::READ);
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        let again = match &mut *lock(&self.state) {
            None => return,
            Some(waiting) if waiting.sent > RETRIES => None,
            Some(waiting) => {
                waiting.sent += 1;
                waiting.pause = (waiting.pause * 2).min(waiting.longest);
                Some(waiting.pause)
            }
        };
        match again {
            Some(pause) => {
                self.registration.set_timer(Instant::now() + pause);
                self.send();
            }
            None => self.end(Err(LookupError::TimedOut)),
        }
    }
}

/// A question that is under way. Dropping it takes it back.
pub struct Lookup(Arc<Asking>);

impl Lookup {
    /// The address that it is asked from.
    pub fn local_addr(&self) -> SocketAddr {
        self.0.port.addr
    }
}

impl Drop for Lookup {
    fn drop(&mut self) {
        let waiting = lock(&self.0.state).take();
        self.0.registration.release(self.0.port.fd());
        drop(waiting);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::known::PER_SECOND;
    use super::*;

    const LOCAL: &str = "127.0.0.1:0";

    fn device() -> Device {
        Device::open().unwrap()
    }

    const ALONE: BindOptions = BindOptions {
        v6_only: false,
        share: false,
    };

    fn port(device: &Device) -> ServicePort {
        device.bind_service(LOCAL.parse().unwrap(), ALONE).unwrap()
    }

    /// An address of this host on which no program listens, and whose port no other test takes.
    fn nobody(device: &Device, number: u8) -> SocketAddr {
        let [.., high, low] = std::process::id().to_be_bytes();
        let own = SocketAddr::from(([127, 100 + number, high, low], 0));
        device.bind_service(own, ALONE).unwrap().local_addr()
    }

    /// The next one; a test that waits too long fails.
    fn next<T>(from: &mpsc::Receiver<T>) -> T {
        from.recv_timeout(Duration::from_mins(1)).unwrap()
    }

    fn serve(device: &Device, backlog: u32) -> (Serving, mpsc::Receiver<LookupRequest>) {
        let (tx, rx) = mpsc::channel();
        let on_request = move |request| drop(tx.send(request));
        (port(device).serve(backlog, on_request).unwrap(), rx)
    }

    type Outcome = mpsc::Receiver<Result<Found, LookupError>>;

    fn ask(device: &Device, dst: SocketAddr, data: &[u8]) -> (Lookup, Outcome) {
        let (tx, rx) = mpsc::channel();
        let on_answer = move |answer| drop(tx.send(answer));
        let lookup = port(device).look_up(dst, data, on_answer).unwrap();
        (lookup, rx)
    }

    #[test]
    fn who_listens_names_its_queue_pair() {
        let device = device();
        let (serving, requests) = serve(&device, 4);
        let (lookup, answer) = ask(&device, serving.local_addr(), b"hello");
        let request = next(&requests);
        let said = request.private_data().strip_prefix(b"hello").unwrap();
        assert_eq!(said, [0; sidr::MAX_REPLY - 5], "it is filled up");
        assert_eq!(request.peer_addr(), lookup.local_addr());
        assert_eq!(request.local_addr(), serving.local_addr());
        request.accept(0x1234, 0x11, b"hi").unwrap();
        let found = Found {
            qp_num: 0x1234,
            qkey: 0x11,
            private_data: b"hi".to_vec(),
        };
        assert_eq!(next(&answer), Ok(found));
        assert!(answer.recv().is_err(), "once only");
    }

    #[test]
    fn a_refusal_says_so() {
        let device = device();
        let (serving, requests) = serve(&device, 4);
        let (_lookup, answer) = ask(&device, serving.local_addr(), b"");
        next(&requests).reject(b"no").unwrap();
        let refused = |status, said: &[u8]| {
            Err(LookupError::Refused {
                status,
                private_data: said.to_vec(),
            })
        };
        assert_eq!(next(&answer), refused(status::REJECT, b"no"));
        let (_lookup, answer) = ask(&device, serving.local_addr(), b"");
        drop(next(&requests));
        assert_eq!(next(&answer), refused(status::NO_QP, b""));
        let (_lookup, answer) = ask(&device, serving.local_addr(), b"");
        let request = next(&requests);
        let long = [0; sidr::MAX_REPLY + 1];
        assert!(request.accept(1, 1, &long).is_err());
        assert_eq!(next(&answer), refused(status::NO_QP, b""));
    }

    #[test]
    fn nobody_there_is_told() {
        let device = device();
        let gone = nobody(&device, 1);
        let (_lookup, answer) = ask(&device, gone, b"");
        assert_eq!(next(&answer), Err(LookupError::NoService));
        assert!(port(&device).look_up(gone, &[0; 181], |_| {}).is_err());
    }

    #[test]
    fn who_listens_a_little_later_is_found() {
        let device = device();
        let addr = nobody(&device, 2);
        let (tx, answer) = mpsc::channel();
        // More patient than others, so that there is time even on a busy host.
        let lookup = port(&device)
            .ask(
                addr,
                b"",
                PAUSES.map(|pause| pause * 4),
                Box::new(move |answer| drop(tx.send(answer))),
            )
            .unwrap();
        let asking = Arc::clone(&lookup.0);
        let sent = || lock(&asking.state).as_ref().map(|waiting| waiting.sent);
        while sent() == Some(1) {
            std::thread::yield_now();
        }
        let (tx, requests) = mpsc::channel();
        let port = device.bind_service(addr, ALONE).unwrap();
        let _serving = port.serve(1, move |r| drop(tx.send(r))).unwrap();
        next(&requests).accept(9, 9, b"").unwrap();
        assert_eq!(next(&answer).unwrap().qp_num, 9);
    }

    /// As programs get it from `getaddrinfo(3)` with `AI_V4MAPPED`.
    #[test]
    fn a_mapped_address_is_one_of_ipv4() {
        let device = device();
        let Ok(asker) = device.bind_service("[::]:0".parse().unwrap(), ALONE) else {
            return; // This host has no IPv6.
        };
        let (serving, requests) = serve(&device, 1);
        let SocketAddr::V4(at) = serving.local_addr() else {
            panic!("it listens at {}", serving.local_addr());
        };
        let mapped = SocketAddr::from((at.ip().to_ipv6_mapped(), at.port()));
        let (tx, answer) = mpsc::channel();
        let on_answer = move |answer| drop(tx.send(answer));
        let _lookup = asker.look_up(mapped, b"", on_answer).unwrap();
        next(&requests).accept(5, 5, b"").unwrap();
        assert_eq!(next(&answer).unwrap().qp_num, 5);
    }

    #[test]
    fn requests_are_not_shared() {
        let device = device();
        let shared = BindOptions {
            share: true,
            ..ALONE
        };
        let first = device.bind_service(nobody(&device, 3), shared).unwrap();
        let second = device.bind_service(first.local_addr(), shared);
        assert_eq!(second.err().unwrap().kind(), io::ErrorKind::AddrInUse);
    }

    /// An error that the network reports for one request does not prevent the next one from being sent.
    #[test]
    fn a_refusal_that_was_not_read_costs_no_request() {
        let device = device();
        let (tx, wait) = mpsc::channel::<()>();
        let (busy, is_busy) = mpsc::channel();
        let wait = Mutex::new(wait);
        let on_request = move |_| {
            let _ = busy.send(());
            let _ = lock(&wait).recv();
        };
        let serving = port(&device).serve(1, on_request).unwrap();
        let (_first, _) = ask(&device, serving.local_addr(), b"");
        next(&is_busy);
        // The engine reads nothing from here on.
        let dst = nobody(&device, 4);
        let (lookup, _answer) = ask(&device, dst, b"");
        let listener = UdpSocket::bind(dst, 1 << 16).unwrap();
        lookup.0.send();
        let heard = listener.recv(&mut [0; ROOM]);
        drop(tx);
        assert!(heard.is_ok(), "{heard:?}");
    }

    /// The same request again: the answer again, and nothing for the program.
    #[test]
    fn a_request_that_comes_again_is_answered_again() {
        let device = device();
        let (serving, requests) = serve(&device, 2);
        let peer = UdpSocket::bind(LOCAL.parse().unwrap(), 1 << 16).unwrap();
        let send = |transaction| {
            let request = Message {
                transaction,
                body: Body::Request,
                private_data: b"again",
            };
            let raw = request.emit().unwrap();
            peer.send(&raw, serving.local_addr(), None).unwrap();
        };
        let receive = || {
            let mut buffer = [0; ROOM];
            weft_sys::poll_fds(&[(peer.as_fd(), Interest::READ)], None).unwrap();
            let len = peer.recv(&mut buffer).unwrap().len;
            Message::parse(&buffer[..len]).unwrap().transaction
        };
        // Invalid requests have no effect.
        for junk in [&b""[..], b"WSR1", &[0xff; 4000]] {
            peer.send(junk, serving.local_addr(), None).unwrap();
        }
        send(1);
        next(&requests).accept(7, 7, b"").unwrap();
        assert_eq!(receive(), 1);
        send(2);
        send(2);
        send(3);
        // The backlog is full.
        send(4);
        send(1);
        assert_eq!(receive(), 1);
        for expected in [2, 3] {
            next(&requests).accept(7, 7, b"").unwrap();
            assert_eq!(receive(), expected);
        }
        assert!(requests.try_recv().is_err(), "2 once, 4 not at all");
        send(4);
        drop(next(&requests));
        assert_eq!(receive(), 4);
    }

    /// A sender with a forged address causes no more traffic to that address than it sends itself.
    #[test]
    fn an_answer_is_no_longer_than_its_request() {
        let device = device();
        let (serving, requests) = serve(&device, 4);
        let peer = UdpSocket::bind(LOCAL.parse().unwrap(), 1 << 16).unwrap();
        let send = |transaction, private_data| {
            let request = Message {
                transaction,
                body: Body::Request,
                private_data,
            };
            let raw = request.emit().unwrap();
            peer.send(&raw, serving.local_addr(), None).unwrap();
            raw.len()
        };
        let mut buffer = [0; ROOM];
        let mut answer = || {
            weft_sys::poll_fds(&[(peer.as_fd(), Interest::READ)], None).unwrap();
            peer.recv(&mut buffer).unwrap().len
        };
        let most = [7; sidr::MAX_REPLY];
        let asked = send(1, b"short");
        assert!(next(&requests).accept(7, 7, &most).is_err());
        assert!(answer() <= asked, "it is refused");
        let asked = send(2, &[0; sidr::MAX_REPLY]);
        next(&requests).accept(7, 7, &most).unwrap();
        assert_eq!(answer(), asked);
        // The same one again, but shorter.
        send(2, b"");
        send(3, b"");
        next(&requests).accept(7, 7, b"").unwrap();
        assert_eq!(answer(), sidr::MAX_LEN - sidr::MAX_REQUEST, "that of 3");
        // Our own requests leave room for every answer.
        let (_lookup, found) = ask(&device, serving.local_addr(), b"");
        next(&requests).accept(7, 7, &most).unwrap();
        assert_eq!(next(&found).unwrap().private_data, most);
    }

    #[test]
    fn an_address_asks_so_often_in_a_second() {
        let device = device();
        let (serving, requests) = serve(&device, 1);
        let peer = UdpSocket::bind(LOCAL.parse().unwrap(), 1 << 20).unwrap();
        let raw = Message {
            transaction: 1,
            body: Body::Request,
            private_data: b"",
        };
        let raw = raw.emit().unwrap();
        let start = Instant::now();
        let send = || peer.send(&raw, serving.local_addr(), None).unwrap();
        send();
        next(&requests).accept(7, 7, b"").unwrap();
        let mut answers = 0;
        let mut count = |wait| {
            let ready = weft_sys::poll_fds(&[(peer.as_fd(), Interest::READ)], Some(wait));
            while peer.recv(&mut [0; ROOM]).is_ok() {
                answers += 1;
            }
            ready.is_ok_and(|ready| ready == 1)
        };
        for _ in 0..8 * PER_SECOND {
            send();
            count(Duration::ZERO);
        }
        // Answers come soon or not at all.
        while count(Duration::from_millis(100)) {}
        let seconds = start.elapsed().as_secs() as u32;
        assert!(
            answers <= PER_SECOND * (seconds + 2),
            "{answers} in {seconds} s"
        );
    }

    #[test]
    fn one_who_is_not_answered_asks_again_and_gives_up() {
        let device = device();
        let silent = UdpSocket::bind(LOCAL.parse().unwrap(), 1 << 16).unwrap();
        let (tx, rx) = mpsc::channel();
        let on_answer = Box::new(move |answer| drop(tx.send(answer)));
        let dst = silent.local_addr().unwrap();
        let _lookup = port(&device)
            .ask(dst, b"", [Duration::from_millis(1); 2], on_answer)
            .unwrap();
        assert_eq!(next(&rx), Err(LookupError::TimedOut));
        let mut buffer = [0; ROOM];
        let asked = std::iter::from_fn(|| silent.recv(&mut buffer).ok()).count();
        assert_eq!(asked, 1 + RETRIES as usize);
    }

    #[test]
    fn answers_of_others_are_not_believed() {
        let device = device();
        let service = UdpSocket::bind(LOCAL.parse().unwrap(), 1 << 16).unwrap();
        let other = UdpSocket::bind(LOCAL.parse().unwrap(), 1 << 16).unwrap();
        let (lookup, answer) = ask(&device, service.local_addr().unwrap(), b"");
        let mut buffer = [0; ROOM];
        weft_sys::poll_fds(&[(service.as_fd(), Interest::READ)], None).unwrap();
        let len = service.recv(&mut buffer).unwrap().len;
        let transaction = Message::parse(&buffer[..len]).unwrap().transaction;
        let reply = |transaction, qp_num| {
            let body = Body::Reply {
                status: status::SUCCESS,
                qp_num,
                qkey: 1,
            };
            let reply = Message {
                transaction,
                body,
                private_data: b"",
            };
            reply.emit().unwrap()
        };
        let to = lookup.local_addr();
        other.send(&reply(transaction, 1), to, None).unwrap();
        service.send(&reply(transaction ^ 1, 2), to, None).unwrap();
        service.send(b"nonsense", to, None).unwrap();
        service.send(&buffer[..len], to, None).unwrap();
        service.send(&reply(transaction, 3), to, None).unwrap();
        assert_eq!(next(&answer).unwrap().qp_num, 3);
    }
}
