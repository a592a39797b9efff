//! The server: admission of clients, and their sessions.

mod memory;
mod rights;
mod session;
mod store;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use weft_service::{Entry, Permit};
use weft_session::acceptor::{self, Acceptor, LOOK};
use weft_session::{Event, MessageChannel, NoDevice, Via};
use weft_sys::{Interest, poll_fds};
use weft_verbs::Device;
use weft_verbs::any::cm;
use weft_verbs::tls::{PublicKey, Tls};

use crate::local_server as host;
use crate::wire::{Flags, Op, PROTOCOL, Reply, Request};
use rights::Who;
use session::Handles;
use store::{Opened, Store};

/// Connections of programs of this host that are served at once.
const MAX_LOCAL: usize = 64;

/// The keys that are admitted, in addition to processes of the server's own user on its host.
pub type Admit = Arc<dyn Fn(&PublicKey) -> bool + Send + Sync>;

#[derive(Clone)]
pub struct Config {
    /// Address and port; port 0 takes a free one.
    pub bind: SocketAddr,
    /// Files below it can be read.
    pub dir: Option<PathBuf>,
    /// Bytes that all buffers, and the files that clients have open, may have together.
    pub quota: u64,
    /// Keep buffers that no client has open, until they are removed.
    pub keeps: bool,
    /// Clients with a connection at once.
    pub max_clients: usize,
    /// The key pair that clients know the server by.
    pub tls: Tls,
    /// The keys that are admitted.
    pub admit: Admit,
    /// Everybody is let in.
    pub open: bool,
    /// The device, and whether connections are encrypted.
    pub via: Via,
}

impl Config {
    fn tls(&self) -> Option<Tls> {
        (!self.via.plain).then(|| self.tls.clone())
    }
}

struct Shared {
    config: Config,
    store: Arc<Store>,
    acceptor: Acceptor,
    locals: Arc<AtomicUsize>,
}

/// Why a server does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No device carries its connections.
    #[error("{0}")]
    Device(#[from] NoDevice),
    /// It would refuse everybody.
    #[error("on an RNIC clients cannot show their keys")]
    NotOpen,
    /// The folder, the address or a thread.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// A running server. Dropping it ends its connections.
pub struct Server {
    shared: Arc<Shared>,
    addr: SocketAddr,
    threads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Listens and serves from threads of its own.
    ///
    /// # Errors
    /// Those of opening the folder, of listening, and of starting threads.
    pub fn start(config: Config) -> Result<Self, StartError> {
        let folder = match &config.dir {
            Some(dir) => Some(
                rustix::fs::open(
                    dir,
                    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                    Mode::empty(),
                )
                .map_err(io::Error::from)?,
            ),
            None => None,
        };
        let store = Arc::new(Store::new(config.quota, config.keeps, folder)?);
        let device = config
            .via
            .device(|choice| choice.rnic_at(config.bind), Device::open)?;
        if device.rnic().is_some() && !config.open {
            return Err(StartError::NotOpen);
        }
        let param = PROTOCOL.param(config.tls(), Vec::new());
        let listener = cm::Listener::bind(&device, config.bind, 64, &param);
        let listener = listener.map_err(io::Error::from)?;
        let addr = listener.local_addr();
        // Another process of this host can take the name: then programs of this host use RDMA.
        let local = host::listen(addr.port())
            .inspect_err(|e| {
                tracing::warn!(
                    "no local server for programs of this host beside port {}: {e}",
                    addr.port()
                );
            })
            .ok();
        let clients = Acceptor::new(PROTOCOL, config.max_clients, "too many clients");
        let shared = Arc::new(Shared {
            config,
            store,
            acceptor: clients,
            locals: Arc::default(),
        });
        let mut server = Self {
            shared: Arc::clone(&shared),
            addr,
            threads: Vec::new(),
        };
        let listening = Acceptor::listen(&shared, listener, "weft-fs")?;
        server.threads.push(listening);
        if let Some(local) = local {
            let thread = thread::Builder::new().name("weft-fs-local".into());
            let serving = thread.spawn(move || shared.serve_host(&local))?;
            server.threads.push(serving);
        }
        Ok(server)
    }

    /// The address, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Bytes that count against the quota now.
    pub fn used(&self) -> u64 {
        self.shared.store.sweep();
        self.shared.store.quota.used()
    }

    /// Serves for ever.
    pub fn wait(mut self) {
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.acceptor.close();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        self.shared.acceptor.join();
    }
}

impl acceptor::Server for Shared {
    fn acceptor(&self) -> &Acceptor {
        &self.acceptor
    }

    fn judge(&self, request: &cm::Request) -> Result<bool, String> {
        if self.config.open {
            return Ok(true);
        }
        acceptor::judge(request.soft(), |key| (self.config.admit)(key))
    }

    fn session(&self, request: cm::Request, entry: Entry, peer: SocketAddr) -> Result<(), String> {
        // A stranger waits for a reply, and gets one that it has not asked for.
        let refusal = Reply::failed(0, Errno::ACCESS).encode();
        let keeps = self.config.keeps.into();
        let has_atomics = request.device().attr().atomics;
        let who = self.who(&request);
        let accepted = self
            .acceptor
            .accept(self.config.tls(), (request, entry), keeps, &refusal);
        let (mut link, _permit) = accepted?;
        let began = Instant::now();
        let mut handles = Handles::new(&self.store, link.pd(), who, has_atomics);
        while !self.acceptor.is_closed() && Self::turn(&mut link, &mut handles) {}
        // The connection uses the memory, so it ends first.
        link.qp.disconnect();
        drop(link);
        drop(handles);
        tracing::info!("{peer}: gone after {:.1} s", began.elapsed().as_secs_f64());
        Ok(())
    }

    fn tick(&self) {
        self.store.sweep();
    }
}

impl Shared {
    /// The client of a request.
    fn who(&self, request: &cm::Request) -> Who {
        let Some(request) = request.soft() else {
            return Who::default();
        };
        let key = request.tls().map(|tls| tls.peer);
        Who {
            // A key that is not admitted may be one of this run only: what it owned would be nobody's afterwards.
            key: key.filter(|key| (self.config.admit)(key)),
            is_own_user: request.peer_uid() == Some(weft_sys::process::uid()),
        }
    }

    /// Serves the next request; false at the end.
    fn turn(link: &mut MessageChannel, handles: &mut Handles) -> bool {
        let bytes = match link.next(4 * LOOK, None) {
            Ok(Some(Event::Message(bytes))) => bytes,
            Ok(_) => return link.is_alive(),
            Err(_) => return false,
        };
        let reply = match Request::decode(&bytes) {
            Ok((id, Ok(request))) => Reply {
                id,
                ..handles.answer(&request)
            },
            Ok((id, Err(error))) => Reply::failed(id, error),
            Err(e) => {
                tracing::info!("a client broke the protocol: {e}");
                return false;
            }
        };
        link.send(&reply.encode()).is_ok()
    }

    /// Serves programs of this host, and frees buffers that they have closed.
    fn serve_host(self: &Arc<Self>, acceptor: &OwnedFd) {
        let mut swept = Instant::now();
        while !self.acceptor.is_closed() {
            let ready = poll_fds(&[(acceptor.as_fd(), Interest::READ)], Some(LOOK));
            if swept.elapsed() >= LOOK {
                self.store.sweep();
                swept = Instant::now();
            }
            if !ready.is_ok_and(|ready| ready != 0) {
                continue;
            }
            match host::accept(acceptor) {
                Ok(Some(conn)) => {
                    let shared = Arc::clone(self);
                    let spawned =
                        thread::Builder::new()
                            .name("weft-fs-host".into())
                            .spawn(move || {
                                if let Some(_permit) = Permit::take(&shared.locals, MAX_LOCAL) {
                                    shared.answer_host(&conn);
                                }
                            });
                    if let Err(e) = spawned {
                        tracing::warn!("a program of this host was turned away: {e}");
                    }
                }
                Ok(None) => {}
                // Without descriptors accept fails at once and again: give others time to end.
                Err(_) => thread::sleep(LOOK),
            }
        }
    }

    fn answer_host(&self, conn: &OwnedFd) {
        let Ok((bytes, _)) = host::receive(conn, 0) else {
            return;
        };
        let (reply, file) = match Request::decode(&bytes) {
            Ok((id, Ok(request))) => self
                .for_host(&request)
                .unwrap_or_else(|e| (Reply::failed(id, e), None)),
            Ok((id, Err(error))) => (Reply::failed(id, error), None),
            Err(_) => return,
        };
        let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        let _ = host::send(conn, &reply.encode(), &fds);
    }

    fn for_host(&self, request: &Request) -> Result<(Reply, Option<OwnedFd>), Errno> {
        match request.op {
            Op::Open => self.open_for_host(request),
            // By name: programs of this host have no handles. The new generation comes with the reply.
            Op::Truncate => {
                let (file, attr) = self.store.truncate_for_host(&request.name, request.size)?;
                let ok = Reply::ok(request.id);
                Ok((Reply { attr, ..ok }, Some(file)))
            }
            _ => Ok((session::names(&self.store, &Who::HOST, request), None)),
        }
    }

    fn open_for_host(&self, request: &Request) -> Result<(Reply, Option<OwnedFd>), Errno> {
        let flags = request.flags;
        if !flags.has(Flags::READ) && !flags.has(Flags::WRITE) {
            return Err(Errno::INVAL);
        }
        let (name, hint) = (&request.name, request.size);
        match self.store.open(name, flags, hint, &Who::HOST, true)? {
            Opened::File(file, attr) => {
                let reply = Reply {
                    attr,
                    ..Reply::ok(request.id)
                };
                Ok((reply, Some(file)))
            }
            Opened::Buffer(_) => Err(Errno::IO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{Client, Settings};
    use crate::name::Endpoint;
    use weft_verbs::tls::Identity;

    #[test]
    fn ended_connections_leave_no_threads_while_others_come() {
        let tls = || Tls::new(Identity::generate().unwrap()).unwrap();
        let config = Config {
            bind: "127.0.0.1:0".parse().unwrap(),
            dir: None,
            quota: 1 << 20,
            keeps: false,
            max_clients: 8,
            tls: tls(),
            admit: Arc::new(|_| false),
            open: false,
            via: Via::default(),
        };
        let server = Server::start(config).unwrap();
        let endpoint = Endpoint {
            host: "127.0.0.1".into(),
            port: server.local_addr().port(),
        };
        let connect = || drop(Client::connect(&endpoint, Settings::new(Arc::new(tls()))));
        let kept = || server.shared.acceptor.sessions();
        for _ in 0..20 {
            connect();
        }
        // The last ones may still be ending. No pause: one connection comes after the other.
        let gone = (0..50).any(|_| {
            connect();
            kept() < 8
        });
        assert!(gone, "{} threads are kept", kept());
    }
}
