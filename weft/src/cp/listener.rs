//! A receiver that listens: admission, and senders served in parallel.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use weft_service::{Admission, Entry};
use weft_session::{Via, acceptor};
use weft_verbs::any::cm;
use weft_verbs::tcp_peer_uid;
use weft_verbs::tls::{Identity, PublicKey, Tls};

use super::START_PATIENCE;
use super::fetch;
use super::link::{Link, LinkError};
use super::protocol::{Code, HELLO_LEN, Hello, Status, VERSION};
use super::rdma::{Prepared, RdmaLink};
use super::receiver::{self, Totals, Watch};
use super::session::{self, Wire, hello, is_us, param};
use super::store::{Policy, Store, StoreError};
use super::tcp::TcpLink;
use weft_cli::failure::Failure;
use weft_cli::identity::authorized::Authorized;
use weft_cli::identity::keypair;
use weft_cli::identity::reach::{self, Words};

/// The configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// The directory for files.
    pub dir: PathBuf,
    /// Address and port to listen on.
    pub bind: SocketAddr,
    /// The transport.
    pub wire: Wire,
    /// The device of RDMA.
    pub via: Via,
    /// The policy for existing files, whatever senders request.
    pub policy: Policy,
    /// How each sender is served.
    pub serve: receiver::Options,
    /// The key pair that senders know this listener by.
    pub identity: Identity,
    /// Whether anybody may send. Otherwise only who has the shared key, and without one only processes of this user on this host, and
    /// whose keys are authorised.
    pub open: bool,
    /// The authorised keys.
    pub authorized: Option<Authorized>,
    /// Stop after the first sender.
    pub once: bool,
    /// Senders served at the same time.
    pub max_senders: usize,
}

/// The events of a listener.
pub trait Events: Sync + Send {
    /// A sender connected.
    fn connected(&self, peer: SocketAddr);
    /// An entry of a sender was not written.
    fn entry_failed(&self, peer: SocketAddr, path: &str, error: &StoreError);
    /// A sender is done or has disconnected.
    fn finished(
        &self,
        peer: SocketAddr,
        totals: Totals,
        took: Duration,
        end: Result<(), LinkError>,
    );
}

enum Incoming {
    Rdma(Box<cm::Listener>, Option<Tls>),
    Plain(TcpListener),
}

/// A receiver that listens.
pub struct Listener(Arc<Inner>);

struct Inner {
    incoming: Incoming,
    store: Store,
    config: Config,
    admission: Admission,
    /// When a refused key was named last.
    named: Mutex<Option<Instant>>,
}

fn cannot_listen(dir: &Path, e: &std::io::Error) -> Failure {
    Failure::failed(format!("cannot receive into {}: {e}", dir.display()))
        .hint("name a directory that exists and that you can write to")
}

impl Listener {
    /// Opens the directory and listens. On an address other than loopback the admitted senders have to be named.
    pub fn bind(config: Config) -> Result<Self, Failure> {
        config.wire.allow(config.bind)?;
        let words = Words {
            peers: "senders",
            may: &format!("write into {}", config.dir.display()),
            or: " or give both sides a shared key with --key FILE;",
        };
        let is_open = config.open || config.serve.key.is_some();
        reach::check(config.bind, config.authorized.as_ref(), is_open, words)?;
        let dir_error = |e: std::io::Error| cannot_listen(&config.dir, &e);
        let store = Store::open(&config.dir, config.policy).map_err(dir_error)?;
        rustix::fs::access(
            &config.dir,
            rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK,
        )
        .map_err(|e| dir_error(e.into()))?;
        let bind_error = |e: &dyn std::fmt::Display| {
            Failure::listen(
                &config.bind,
                e,
                "--bind ADDR:PORT chooses, port 0 takes a free one",
            )
        };
        let incoming = if config.wire == Wire::PlainTcp {
            Incoming::Plain(TcpListener::bind(config.bind).map_err(|e| bind_error(&e))?)
        } else {
            let device = session::device(&config.via, |choice| choice.rnic_at(config.bind))?;
            // A sender's key is checked later, when the sender can be told the reason for a refusal.
            let tls = Tls::new(config.identity.clone()).map_err(|e| keypair::unusable(&e))?;
            let tls = (!config.via.plain).then_some(tls);
            if device.rnic().is_some() && !is_open {
                return Err(Failure::usage("on an RNIC senders cannot show their keys")
                    .hint("give both sides a shared key with --key FILE, or let everybody in with --open"));
            }
            let listener =
                cm::Listener::bind(&device, config.bind, 64, &param(tls.clone(), Vec::new()))
                    .map_err(|e| bind_error(&e.source))?;
            Incoming::Rdma(Box::new(listener), tls)
        };
        let places = if config.once { 1 } else { config.max_senders };
        let admission = Admission::new(places, "as many senders are served as may be");
        Ok(Self(Arc::new(Inner {
            incoming,
            store,
            config,
            admission,
            named: Mutex::default(),
        })))
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        match &self.0.incoming {
            Incoming::Rdma(listener, _) => listener.local_addr(),
            Incoming::Plain(listener) => listener.local_addr().unwrap_or(self.0.config.bind),
        }
    }

    /// Serves senders: for ever, or with [`Config::once`] until the first one has ended, whose result is returned.
    pub fn run(self, events: Arc<dyn Events>) -> Result<(), Failure> {
        let once = self.0.config.once;
        let (tell, outcomes) = channel();
        let thread = std::thread::Builder::new().name("weft-cp-accept".into());
        thread
            .spawn(move || {
                let end = loop {
                    if let Err(failure) = self.0.admit_next(&events, &tell) {
                        break failure;
                    }
                };
                let _ = tell.send(News::Deaf(end));
            })
            .map_err(|e| {
                Failure::failed(format!("cannot start a thread: {e}"))
                    .hint("raise the limit of threads (`ulimit -u`)")
            })?;
        loop {
            match outcomes.recv() {
                Ok(News::Ended(end)) if once => return end,
                Ok(News::Ended(_)) => {}
                Ok(News::Deaf(failure)) => return Err(failure),
                Err(_) => {
                    return Err(Failure::failed("the listening thread has ended")
                        .hint("report this with the lines above"));
                }
            }
        }
    }
}

/// What [`Listener::run`] learns.
enum News {
    /// How a sender's session ended.
    Ended(Result<(), Failure>),
    /// No sender can come any more.
    Deaf(Failure),
}

impl Inner {
    /// Whether every connection is admitted at this point: with a shared key the proof decides later.
    fn anybody(&self) -> bool {
        self.config.serve.key.is_some() || self.config.open
    }

    /// Whether this key may send.
    fn is_authorized(&self, key: &PublicKey) -> bool {
        let authorized = self.config.authorized.as_ref();
        authorized.is_some_and(|authorized| authorized.admits(&key.fingerprint()))
    }

    /// Names a key that is refused, and how to admit it. At most once a second, so that strangers do not fill a log.
    fn name_refused(&self, peer: SocketAddr, key: Option<&PublicKey>) {
        let (Some(key), Some(authorized)) = (key, &self.config.authorized) else {
            return;
        };
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        if named.is_none_or(|last| last.elapsed() >= Duration::from_secs(1)) {
            *named = Some(Instant::now());
            tracing::warn!(
                "{peer}: refused: its key is not authorised; to admit it, add the line {} to {}",
                key.fingerprint(),
                authorized.path().display()
            );
        }
    }

    /// Accepts the next connection, and serves it in a thread of its own, which reports how a sender's session ended.
    ///
    /// # Errors
    /// No connection can come any more.
    fn admit_next(
        self: &Arc<Self>,
        events: &Arc<dyn Events>,
        tell: &Sender<News>,
    ) -> Result<(), Failure> {
        let arrived = match &self.incoming {
            Incoming::Rdma(listener, tls) => {
                let request = listener.next_request(None).map_err(|e| {
                    Failure::failed(format!("cannot listen any more: {e}"))
                        .hint("`weft doctor` says which devices there are; start it again")
                })?;
                let Some(request) = request else {
                    return Ok(());
                };
                let peer = request.peer_addr();
                (
                    self.greet(tls.as_ref(), request)
                        .map(|(link, met)| (link, Greeted::Met(met))),
                    peer,
                )
            }
            Incoming::Plain(listener) => match listener.accept() {
                Ok((stream, peer)) => (self.greet_plain(stream), peer),
                Err(e) => {
                    // Without descriptors accept fails at once and again: give others time to end.
                    tracing::warn!("accept: {e}");
                    std::thread::sleep(Duration::from_millis(100));
                    return Ok(());
                }
            },
        };
        let (link, greeted) = match arrived {
            (Ok(greeted), _) => greeted,
            (Err(why), peer) => {
                tracing::info!("{peer}: turned away: {why}");
                return Ok(());
            }
        };
        let peer = arrived.1;
        let weak = Arc::downgrade(&link);
        let leave = move || {
            tracing::info!("{peer}: made room for a newer connection");
            if let Some(link) = weak.upgrade() {
                link.close();
            }
        };
        let entry = match self.admission.admit_for_now(peer.ip(), leave) {
            Ok(entry) => entry,
            Err(why) => {
                tracing::info!("{peer}: turned away: {why}");
                return Ok(());
            }
        };
        let session = Session {
            entry: Mutex::new(Some(entry)),
            inner: Arc::clone(self),
            events: Arc::clone(events),
            link,
            peer,
        };
        let tell = tell.clone();
        // Without a thread the session is dropped, which closes the connection.
        let spawned = std::thread::Builder::new()
            .name("weft-cp".into())
            .spawn(move || {
                if let Some(end) = session.serve(greeted) {
                    // Fails only if the result is no longer wanted.
                    let _ = tell.send(News::Ended(end));
                }
            });
        if let Err(e) = spawned {
            tracing::warn!("{peer}: turned away: {e}");
        }
        Ok(())
    }

    /// Reads the initiator's hello and answers it, without waiting for anything.
    fn greet(
        &self,
        tls: Option<&Tls>,
        request: cm::Request,
    ) -> Result<(Arc<dyn Link>, Met), String> {
        let data = request.private_data();
        let has_key = self.config.serve.key.is_some();
        let key = request.tls().map(|tls| tls.peer);
        let verdict = judge(&data[..data.len().min(HELLO_LEN)], has_key).and_then(|met| {
            // On an RNIC anybody may, see `bind`.
            let known = if self.anybody() {
                Ok(true)
            } else {
                acceptor::judge(request.soft(), |key| self.is_authorized(key))
            };
            Ok((met, known.map_err(|why| (Status::UnknownPeer, why))?))
        });
        let (met, is_known) = match verdict {
            Ok(met) => met,
            Err((status, why)) => {
                if status == Status::UnknownPeer {
                    self.name_refused(request.peer_addr(), key.as_ref());
                }
                let _ = request.reject(&refusal(status));
                return Err(why);
            }
        };
        let create = |pd: &_, init: &_| request.create_qp(pd, init);
        let (prepared, qp) = Prepared::new(&request.device(), create).map_err(|e| {
            // It is not the sender's fault, and whoever runs this listener can mend it.
            let peer = request.peer_addr();
            tracing::warn!(
                "{}",
                Failure::failed(format!("{peer}: cannot be served: {e}"))
            );
            e.to_string()
        })?;
        let param = param(tls.cloned(), met.ours.encode().to_vec());
        let peer = request.peer_addr();
        let conn = request.accept(qp, &param).map_err(|e| e.to_string())?;
        let stranger = !is_known && !conn.qp.attests_same_user();
        let link = RdmaLink::new(prepared, conn.qp, self.config.serve.patience);
        if stranger {
            self.name_refused(peer, key.as_ref());
        }
        Ok((Arc::new(link), Met { stranger, ..met }))
    }

    fn greet_plain(&self, stream: TcpStream) -> Result<(Arc<dyn Link>, Greeted), String> {
        let stranger =
            !self.anybody() && !tcp_peer_uid(&stream).is_ok_and(|u| u.is_some_and(is_us));
        let link = TcpLink::new(stream, self.config.serve.patience).map_err(|e| e.to_string())?;
        let link = Arc::new(link);
        Ok((
            Arc::clone(&link) as Arc<dyn Link>,
            Greeted::Plain(link, stranger),
        ))
    }
}

/// The hellos of both sides.
struct Met {
    theirs: Hello,
    ours: Hello,
    /// Nothing shows that it is of our user, and no other user is admitted.
    stranger: bool,
}

/// The state of a connection.
enum Greeted {
    Met(Met),
    /// Its hello has not come yet. Whether it is a stranger.
    Plain(Arc<TcpLink>, bool),
}

/// One connection's session.
struct Session {
    inner: Arc<Inner>,
    events: Arc<dyn Events>,
    link: Arc<dyn Link>,
    peer: SocketAddr,
    /// Among the strangers, until it has proved itself.
    entry: Mutex<Option<Entry>>,
}

impl Watch for Session {
    fn proved(&self) -> Result<(), &'static str> {
        let mut entry = self.entry.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(stranger) = entry.take() {
            *entry = Some(Entry::Known(self.inner.admission.seat(stranger)?));
        }
        Ok(())
    }

    fn entry_failed(&self, path: &str, error: &StoreError) {
        self.events.entry_failed(self.peer, path, error);
    }
}

impl Session {
    /// Serves the connection; `None` if it never became a sender's.
    fn serve(self, greeted: Greeted) -> Option<Result<(), Failure>> {
        let met = match greeted {
            Greeted::Met(met) => self.not_a_stranger(met),
            Greeted::Plain(link, stranger) => self.hear(&link, stranger),
        };
        let Met { theirs, ours, .. } = match met {
            Ok(met) => met,
            Err(why) => {
                tracing::info!("{}: turned away: {why}", self.peer);
                self.link.close();
                return None;
            }
        };
        self.events.connected(self.peer);
        let began = Instant::now();
        let config = &self.inner.config;
        let store = self.inner.store.another();
        let (totals, end) = serve(&*self.link, &ours, &theirs, store, &config.serve, &self);
        self.events
            .finished(self.peer, totals, began.elapsed(), end.clone());
        if !totals.started {
            return None;
        }
        Some(match end {
            Err(e) => Err(Failure::peer(format!("{}: {e}", self.peer))
                .hint("send again: what had begun goes on")),
            Ok(()) if !totals.complete || totals.failed > 0 => Err(Failure::failed(format!(
                "{}: failed entries: {}",
                self.peer, totals.failed
            ))
            .hint("see the lines above")),
            Ok(()) => Ok(()),
        })
    }

    fn not_a_stranger(&self, met: Met) -> Result<Met, String> {
        if !met.stranger {
            return Ok(met);
        }
        let _ = receiver::refuse(&*self.link, Code::UnknownPeer, acceptor::STRANGER);
        Err(acceptor::STRANGER.into())
    }

    /// Reads the hello of a connection over plain TCP, and answers it.
    fn hear(&self, link: &TcpLink, stranger: bool) -> Result<Met, String> {
        let has_key = self.inner.config.serve.key.is_some();
        let data = link.recv_hello(START_PATIENCE).map_err(|e| e.to_string())?;
        let verdict = judge(&data, has_key).and_then(|met| {
            let why = || "the kernel does not say that it is of this user".to_owned();
            (!stranger)
                .then_some(met)
                .ok_or_else(|| (Status::UnknownPeer, why()))
        });
        let (reply, met) = match verdict {
            Ok(met) => (met.ours.encode(), Ok(met)),
            Err((status, why)) => (refusal(status), Err(why)),
        };
        link.send_hello(&reply).map_err(|e| e.to_string())?;
        met
    }
}

/// Proves the key in both directions, then receives, or gives what is fetched, until the initiator is done or has disconnected. `ours` and `theirs` are the exchanged
/// hellos.
fn serve(
    link: &dyn Link,
    ours: &Hello,
    theirs: &Hello,
    store: Store,
    options: &receiver::Options,
    watch: &dyn Watch,
) -> (Totals, Result<(), LinkError>) {
    let attributes = store.policy().attributes;
    let started = receiver::start(link, ours, theirs, options, attributes, watch);
    let (totals, result) = match started {
        Ok(Some(ring)) => receiver::receive_all(link, ring, store, options, false, watch),
        Ok(None) => fetch::give(link, options),
        Err(e) => (Totals::default(), Err(e)),
    };
    match &result {
        Err(e) => receiver::end(link, e),
        Ok(()) => link.close(),
    }
    (totals, result)
}

fn refusal(status: Status) -> [u8; HELLO_LEN] {
    Hello {
        version: VERSION,
        status,
        key: false,
        nonce: [0; 32],
    }
    .encode()
}

/// The answer to a hello: ours, or a refusal and the reason for the log.
fn judge(theirs: &[u8], has_key: bool) -> Result<Met, (Status, String)> {
    let theirs = Hello::decode(theirs).map_err(|e| (Status::Version, e.to_string()))?;
    if theirs.version != VERSION {
        return Err((
            Status::Version,
            format!("it speaks version {}", theirs.version),
        ));
    }
    match (has_key, theirs.key) {
        (true, false) => Err((Status::KeyWanted, "it has no key".into())),
        (false, true) => Err((
            Status::NoKey,
            "it wants a key, and there is none here".into(),
        )),
        _ => {
            let ours = hello(has_key, Status::Ok).map_err(|e| (Status::Busy, e.to_string()))?;
            Ok(Met {
                theirs,
                ours,
                stranger: false,
            })
        }
    }
}
