//! The keys of `weft key`, for servers and for viewers.

use std::net::SocketAddr;
use std::path::PathBuf;

use weft_media::client::{Dial, OpenError, Viewer};
use weft_media::viewers::Gate;
use weft_media::wire::{Refusal, Request};
use weft_session::acceptor;
use weft_verbs::Device;
use weft_verbs::cm::{self, ConnectError};
use weft_verbs::tls::{Identity, Tls, TlsError};

use super::PATIENCE;
use super::url::Url;
use weft_cli::address::resolve;
use weft_cli::args::media::{DialArgs, ListenArgs};
use weft_cli::failure::Failure;
use weft_cli::identity::authorized::Authorized;
use weft_cli::identity::credentials::Credentials;
use weft_cli::identity::keypair;
use weft_cli::identity::reach::{self, Words};
use weft_cli::say;

fn plain_only_on_loopback(addr: SocketAddr) -> Result<(), Failure> {
    if reach::is_of_this_machine(addr) {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "--plain is neither encrypted nor authenticated, and {addr} is not a loopback address"
    ))
    .hint("leave --plain away"))
}

/// The keys of a listener.
pub(super) struct Listening {
    identity: Option<Identity>,
    made: Option<PathBuf>,
    authorized: Option<Authorized>,
    open: bool,
}

impl Listening {
    pub(super) fn new(args: &ListenArgs, bind: SocketAddr) -> Result<Self, Failure> {
        if args.plain {
            plain_only_on_loopback(bind)?;
        }
        let authorized = Authorized::named_or_usual(args.keys.authorized.as_deref())
            .filter(|_| !args.open && !args.plain);
        let words = Words {
            peers: "viewers",
            may: "watch",
            or: "",
        };
        reach::check(bind, authorized.as_ref(), args.open, words)?;
        let (identity, made) = if args.plain {
            (None, None)
        } else {
            let path = keypair::file_of(args.keys.identity.as_deref())?;
            let (identity, made) = keypair::read_or_make(&path)?;
            (Some(identity), made.then_some(path))
        };
        Ok(Self {
            identity,
            made,
            authorized,
            open: args.open,
        })
    }

    pub(super) fn tls(&self) -> Result<Option<Tls>, Failure> {
        let Some(identity) = &self.identity else {
            return Ok(None);
        };
        // A viewer's key is checked later, when the viewer can be told the reason for a refusal.
        Tls::new(identity.clone())
            .map(Some)
            .map_err(|e| keypair::unusable(&e))
    }

    pub(super) fn gate(&self) -> UserGate {
        UserGate {
            authorized: self.authorized.clone(),
            open: self.open,
        }
    }

    pub(super) fn say(&self) {
        if let Some(path) = &self.made {
            say(format_args!("made a key pair in {}", path.display()));
        }
        if let Some(identity) = &self.identity {
            say(format_args!(
                "the key of this listener is {}; viewers elsewhere are asked to compare it",
                identity.public_key().fingerprint()
            ));
        }
    }
}

/// Admits processes of this user on this host, and peers whose keys are authorised.
pub(super) struct UserGate {
    authorized: Option<Authorized>,
    open: bool,
}

impl Gate for UserGate {
    fn admit(&self, request: &cm::Request) -> Result<(), String> {
        if self.open {
            return Ok(());
        }
        let authorized = self.authorized.as_ref();
        let is_known = acceptor::judge(Some(request), |key| {
            authorized.is_some_and(|authorized| authorized.admits(&key.fingerprint()))
        })?;
        if is_known {
            Ok(())
        } else {
            Err(acceptor::STRANGER.into())
        }
    }
}

/// The parameters of repeated connections to one server.
#[derive(Clone)]
pub(super) struct Caller {
    url: Url,
    args: DialArgs,
    credentials: Credentials,
}

impl Caller {
    pub(super) fn new(args: &DialArgs, url: &Url) -> Result<Self, Failure> {
        let name = url.server.to_string();
        let identity = args.keys.identity.as_deref();
        Ok(Self {
            url: url.clone(),
            args: args.clone(),
            credentials: Credentials::new(name, identity, args.keys.peers.clone())?,
        })
    }

    fn tls(&self) -> Result<Option<Tls>, Failure> {
        if self.args.plain {
            return Ok(None);
        }
        self.credentials.tls().map(Some)
    }

    /// Connects to one of the host's addresses.
    pub(super) fn dial(&self, addr: SocketAddr) -> Result<Dial, Failure> {
        if self.args.plain {
            plain_only_on_loopback(addr)?;
        }
        Ok(Dial {
            read: self.args.read,
            depth: self.args.depth,
            patience: PATIENCE,
            ..Dial::new(addr, self.tls()?)
        })
    }

    /// Connects, and asks the user about an unknown key.
    pub(super) fn open(&self, device: &Device, request: &Request) -> Result<Viewer, Failure> {
        let mut last = None;
        for addr in resolve(&self.url.server)? {
            let connected = self.credentials.connect(|| {
                match Viewer::open(device, &self.dial(addr)?, request) {
                    Ok(viewer) => Ok(Ok(Ok(viewer))),
                    Err(OpenError::Connect(ConnectError::Tls(TlsError::KeyRefused(key)))) => {
                        Ok(Err(key))
                    }
                    Err(
                        e @ OpenError::Connect(
                            ConnectError::Refused
                            | ConnectError::Unreachable
                            | ConnectError::TimedOut,
                        ),
                    ) => Ok(Ok(Err(self.explain(addr, &e, request)))),
                    Err(e) => Err(self.explain(addr, &e, request)),
                }
            });
            match connected? {
                Ok(viewer) => return Ok(viewer),
                // Another address of the same host may do.
                Err(failure) => last = Some(failure),
            }
        }
        Err(last
            .unwrap_or_else(|| Failure::peer(format!("{} has no address", self.url.server.host))))
    }

    /// The reason for a failed connection, for the user.
    pub(super) fn explain(&self, addr: SocketAddr, e: &OpenError, request: &Request) -> Failure {
        let port = "check the port; `weft media serve` prints the one that it uses";
        match e {
            OpenError::Refused(Refusal::NoSuchTitle) => {
                let Request::Title(name) = request else {
                    return Failure::refused(format!("{addr} has no catalogue")).hint(port);
                };
                Failure::failed(format!("{addr} has no title `{name}`"))
                    .hint(format!("`weft media list {}` lists them", self.url.server))
            }
            OpenError::Refused(Refusal::UnknownPeer) => self
                .credentials
                .unknown_there(Failure::refused(format!("{addr}: {e}"))),
            OpenError::Refused(Refusal::Malformed) => Failure::refused(format!("{addr}: {e}"))
                .hint("install the same version of weft on both sides"),
            OpenError::Refused(_) => Failure::peer(format!("{addr}: {e}")).hint("try again later"),
            OpenError::Protocol(_) => Failure::refused(format!("{addr}: {e}")).hint(port),
            OpenError::Connect(
                ConnectError::Tls(TlsError::ClosedInHandshake | TlsError::NotTls)
                | ConnectError::Closed
                | ConnectError::Reset,
            ) => Failure::refused(format!(
                "what listens on {addr} does not speak iWARP by TLS"
            ))
            .hint(port),
            OpenError::Connect(ConnectError::Tls(e)) => Failure::refused(format!(
                "the connection to {addr} cannot be protected, nothing was sent: {e}"
            ))
            .hint("use the same version on both sides"),
            OpenError::Connect(ConnectError::Protocol(e)) => {
                Failure::refused(format!("what listens on {addr} does not speak iWARP: {e}"))
                    .hint(port)
            }
            OpenError::Connect(e) => {
                Failure::peer(format!("cannot reach {addr}: {e}")).hint(format!(
                    "check the address and that `weft media serve DIR --bind {addr}` runs there"
                ))
            }
            OpenError::Local(e) => Failure::failed(e.clone())
                .hint("`weft doctor` says what this machine does not support"),
        }
    }
}
