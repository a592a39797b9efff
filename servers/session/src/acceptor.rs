//! A server's acceptor: which peers come in, how many, and a thread for each.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use weft_service::text::carrier;
use weft_service::{Admission, Entry, Permit, lock};
use weft_verbs::any::cm;
use weft_verbs::tls::{PublicKey, Tls};

use crate::{MessageChannel, Prepared, Protocol, Status};

/// How often threads check whether they have to end.
pub const LOOK: Duration = Duration::from_millis(250);
/// How long a refused peer has to read the answer.
const STRANGER_PATIENCE: Duration = Duration::from_secs(2);

/// Why a peer is refused that cannot show who it is.
pub const STRANGER: &str =
    "its key is not authorised, and the kernel does not say that it is of this user";

/// Whether the peer of a request at the soft RNIC has shown who it is: by a key that is admitted, or because the kernel attests our user. If not, only its
/// transport can still show that ([`weft_verbs::Qp::attests_same_user`]).
///
/// # Errors
/// Why it is refused: another user's.
pub fn judge(
    request: Option<&weft_verbs::cm::Request>,
    admits: impl FnOnce(&PublicKey) -> bool,
) -> Result<bool, String> {
    let Some(request) = request else {
        return Ok(false);
    };
    if request.tls().is_some_and(|tls| admits(&tls.peer)) {
        return Ok(true);
    }
    match request.peer_uid() {
        Some(uid) if uid == weft_sys::process::uid() => Ok(true),
        Some(uid) => Err(format!(
            "it belongs to user {uid}, and its key is not authorised"
        )),
        None => Ok(false),
    }
}

/// A server with a thread for each connection.
pub trait Server: Send + Sync + 'static {
    fn acceptor(&self) -> &Acceptor;

    /// Looks at a request: whether its peer has shown who it is, see [`judge`].
    ///
    /// # Errors
    /// Why it is refused.
    fn judge(&self, request: &cm::Request) -> Result<bool, String>;

    /// Serves a connection until it ends, or the acceptor is closed.
    ///
    /// # Errors
    /// Why it was not served.
    fn session(&self, request: cm::Request, entry: Entry, peer: SocketAddr) -> Result<(), String>;

    /// Called again and again, a few times a second.
    fn tick(&self) {}
}

#[derive(Debug)]
pub struct Acceptor {
    protocol: Protocol,
    admission: Admission,
    is_closed: AtomicBool,
    sessions: Mutex<Vec<JoinHandle<()>>>,
}

impl Acceptor {
    /// For this many connections of the protocol; `full` is said when all places are taken.
    pub fn new(protocol: Protocol, most: usize, full: &'static str) -> Self {
        Self {
            protocol,
            admission: Admission::new(most, full),
            is_closed: AtomicBool::new(false),
            sessions: Mutex::default(),
        }
    }

    /// Whether threads have to end.
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Lets nobody in any more, and tells all threads to end.
    pub fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
    }

    /// Waits for the threads of its connections, after the listening one has ended.
    pub fn join(&self) {
        let sessions = std::mem::take(&mut *lock(&self.sessions));
        for session in sessions {
            let _ = session.join();
        }
    }

    /// Threads of connections, of which some may have ended.
    pub fn sessions(&self) -> usize {
        lock(&self.sessions).len()
    }

    /// Accepts a request, with `value` in our hello, and gives its peer a place. A stranger that its transport does not show to be of our user gets `refusal`
    /// instead.
    ///
    /// # Errors
    /// Why it is not served.
    pub fn accept(
        &self,
        tls: Option<Tls>,
        (request, entry): (cm::Request, Entry),
        value: u16,
        refusal: &[u8],
    ) -> Result<(MessageChannel, Permit), String> {
        let peer = request.peer_addr();
        let prepared = Prepared::new(&request.device(), self.protocol, |pd, init| {
            request.create_qp(pd, init)
        });
        let (prepared, qp) = prepared.map_err(|e| e.to_string())?;
        let hello = self.protocol.hello(Status::Ok, value);
        let param = self.protocol.param(tls, hello);
        let conn = request.accept(qp, &param).map_err(|e| e.to_string())?;
        let transport = conn.qp.path().map_or("tcp", |path| path.transport);
        let mut link = prepared.connected(conn.qp);
        let place = self.seat(entry, &mut link, refusal)?;
        tracing::info!("{peer}: connected over {}", carrier(transport));
        Ok((link, place))
    }

    fn seat(
        &self,
        entry: Entry,
        link: &mut MessageChannel,
        refusal: &[u8],
    ) -> Result<Permit, String> {
        if matches!(entry, Entry::Unproven(_)) && !link.qp.attests_same_user() {
            let told = link.send(refusal);
            let end = Instant::now() + STRANGER_PATIENCE;
            while told.is_ok() && link.is_alive() && Instant::now() < end && !self.is_closed() {
                if link.next(LOOK, None).is_err() {
                    break;
                }
            }
            return Err(STRANGER.into());
        }
        Ok(self.admission.seat(entry)?)
    }

    /// Listens until the acceptor is closed, from a thread of its own.
    ///
    /// # Errors
    /// That of starting it.
    pub fn listen<S: Server>(
        server: &Arc<S>,
        listener: cm::Listener,
        name: &'static str,
    ) -> io::Result<JoinHandle<()>> {
        let server = Arc::clone(server);
        let listening = thread::Builder::new().name(name.into());
        listening.spawn(move || {
            let mut ticked = Instant::now();
            while !server.acceptor().is_closed() {
                let request = match listener.next_request(Some(LOOK)) {
                    Ok(request) => request,
                    Err(error) => {
                        tracing::error!("nobody can come any more: {error}");
                        return server.acceptor().close();
                    }
                };
                // Before each new thread: an ended one keeps its stack until it is dropped.
                lock(&server.acceptor().sessions).retain(|session| !session.is_finished());
                if ticked.elapsed() >= LOOK {
                    server.tick();
                    ticked = Instant::now();
                }
                if let Some(request) = request {
                    let peer = request.peer_addr();
                    if let Err(why) = Self::let_in(&server, request, peer, name) {
                        tracing::warn!("{peer}: turned away: {why}");
                    }
                }
            }
        })
    }

    fn admit(
        &self,
        server: &impl Server,
        request: &cm::Request,
        peer: SocketAddr,
    ) -> Result<Entry, (Status, String)> {
        let version = |why| (Status::Version, why);
        let hello = self.protocol.read_hello(request.private_data());
        let hello = hello.map_err(|e| version(e.to_string()))?;
        if hello.version != self.protocol.version {
            return Err(version(format!("it speaks version {}", hello.version)));
        }
        let is_known = server.judge(request);
        let is_known = is_known.map_err(|why| (Status::UnknownPeer, why))?;
        let entry = self.admission.admit(is_known, peer.ip());
        entry.map_err(|why| (Status::Busy, why.to_owned()))
    }

    /// A thread for each connection: the start of one does not hold up the others.
    fn let_in<S: Server>(
        server: &Arc<S>,
        request: cm::Request,
        peer: SocketAddr,
        name: &str,
    ) -> Result<(), String> {
        let acceptor = server.acceptor();
        // Before there is a thread: strangers use up neither threads nor places.
        let entry = match acceptor.admit(&**server, &request, peer) {
            Ok(entry) => entry,
            Err((status, why)) => {
                let _ = request.reject(&acceptor.protocol.hello(status, 0));
                return Err(why);
            }
        };
        let serving = Arc::clone(server);
        let session = thread::Builder::new().name(name.into()).spawn(move || {
            if let Err(why) = serving.session(request, entry, peer) {
                tracing::warn!("{peer}: turned away: {why}");
            }
        });
        let session = session.map_err(|e| format!("no thread: {e}"))?;
        lock(&acceptor.sessions).push(session);
        Ok(())
    }
}
