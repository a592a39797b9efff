//! Clients with keys as `weft cp` has them, and a server with the same.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use weft_fs::client::Keys;
use weft_fs::name::{Endpoint, Name, RemotePath};
use weft_fs::server::{Admit, Config, Server, StartError};
use weft_fs::wire::Status;
use weft_fs::{Client, DEFAULT_PORT, Errno, Error, Settings};
use weft_session::Via;
use weft_verbs::cm::ConnectError;
use weft_verbs::tls::{Fingerprint, Tls, TlsError};

use weft_cli::args::ClientKeys;
use weft_cli::args::fs::{Common, ServeArgs};
use weft_cli::failure::Failure;
use weft_cli::identity::authorized::Authorized;
use weft_cli::identity::credentials::Credentials;
use weft_cli::identity::reach::{self, Words};
use weft_cli::identity::{Folder, keypair};

/// What the preload library finds in a program's environment.
pub(crate) fn environment(
    who: &ClientKeys,
) -> Result<Vec<(&'static str, std::ffi::OsString)>, Failure> {
    let mut settings = Vec::new();
    let folder = Folder::of_user().ok();
    // Read here: what is wrong with it is said before the program runs.
    if keypair::own(who.identity.as_deref())?.is_some() {
        let usual = folder.as_ref().map(Folder::key);
        if let Some(path) = who.identity.clone().or(usual) {
            settings.push((weft_fs::keys::KEY, path.into_os_string()));
        }
    }
    if let Some(folder) = &folder {
        settings.push((weft_fs::keys::KNOWN, folder.known_peers().into_os_string()));
    }
    if !who.peers.is_empty() {
        let peers: Vec<_> = who.peers.iter().map(ToString::to_string).collect();
        settings.push((weft_fs::keys::PEERS, peers.join(",").into()));
    }
    Ok(settings)
}

/// TLS with one server.
struct OneServer(Tls);

impl Keys for OneServer {
    fn tls(&self, _: &Endpoint) -> Result<Tls, Error> {
        Ok(self.0.clone())
    }
}

/// Reads `/rdma/HOST:PORT/NAME`.
pub(crate) fn parse(path: &Path) -> Result<RemotePath, Failure> {
    use std::os::unix::ffi::OsStrExt;
    RemotePath::parse(path.as_os_str().as_bytes()).map_err(|e| {
        let what = match e {
            Errno::NAMETOOLONG => "its name is too long",
            Errno::NOENT => "it does not begin with /rdma/",
            _ => "its host, port, name or size is missing or wrong",
        };
        Failure::usage(format!("{}: {what}", path.display())).hint(
            "write /rdma/HOST:PORT/NAME or /rdma/HOST:PORT/NAME:SIZE, IPv6 addresses in brackets",
        )
    })
}

/// Connects, once it is clear that it is the server that is meant: its key is known, or our own, or the user says so.
pub(crate) fn connect(endpoint: &Endpoint, common: &Common) -> Result<Client, Failure> {
    let (who, patience) = (&common.keys, Duration::from_secs(common.timeout));
    let via = Via::from(&common.via);
    if via.plain && !who.peers.is_empty() {
        return Err(Failure::usage(
            "without encryption a server shows no key: --peer and --plain exclude each other",
        ));
    }
    let name = endpoint.to_string();
    let credentials = Credentials::new(name, who.identity.as_deref(), who.peers.clone())?;
    credentials.connect(|| {
        let settings = Settings {
            patience,
            via: via.clone(),
            ..Settings::new(Arc::new(OneServer(credentials.tls()?)))
        };
        // Some servers tell strangers only when they ask.
        let connected =
            Client::connect(endpoint, settings).and_then(|client| client.usage().map(|_| client));
        match connected {
            Ok(client) => Ok(Ok(client)),
            Err(Error::Connect(ConnectError::Tls(TlsError::KeyRefused(key)))) => Ok(Err(key)),
            Err(e) => Err(refused(endpoint, &e, &credentials)),
        }
    })
}

fn refused(endpoint: &Endpoint, e: &Error, credentials: &Credentials) -> Failure {
    match e {
        Error::Rejected(Status::UnknownPeer) => {
            credentials.unknown_there(Failure::refused(format!(
                "the server at {endpoint} serves only its own user on its machine, and those whose keys it knows"
            )))
        }
        Error::Rejected(Status::Busy) => Failure::peer(format!(
            "the server at {endpoint} serves as many clients as it may"
        ))
        .hint("try again later, or start it with a greater --max-clients"),
        Error::Rejected(_) | Error::Foreign(_) => {
            Failure::refused(format!("{endpoint}: {e}"))
                .hint("check the port; `weft fs serve` prints the one that it uses, and use the same version on both sides")
        }
        Error::Connect(ConnectError::Tls(_) | ConnectError::Closed | ConnectError::Reset | ConnectError::Protocol(_)) => {
            Failure::refused(format!(
                "what listens on {endpoint} does not speak iWARP by TLS, or turns our key away: {e}"
            ))
            .hint("check the port; `weft fs serve` prints the one that it uses")
        }
        Error::Device(why) => why.into(),
        Error::Local(_) => {
            Failure::failed(e.to_string()).hint("`weft doctor` says what this machine does not support")
        }
        _ => Failure::peer(format!("cannot reach {endpoint}: {e}")).hint(format!(
            "check the address, and that `weft fs serve --bind ADDR:{}` runs there",
            endpoint.port
        )),
    }
}

/// What failed with a name, for the user.
pub(crate) fn explain(path: &RemotePath, e: &Error) -> Failure {
    let shown = format!("/rdma/{}/{}", path.endpoint, path.name);
    match e {
        Error::Errno(Errno::NOSPC) => {
            Failure::failed(format!("{shown}: the server's quota is used up"))
                .hint("remove buffers, or start the server with a greater --quota")
        }
        Error::Errno(Errno::ROFS) => Failure::failed(format!(
            "{shown}: files of the server's folder cannot be changed"
        ))
        .hint("use another name: new buffers are in the server's memory"),
        Error::Errno(Errno::MFILE | Errno::NFILE) => {
            Failure::failed(format!("{shown}: the server has as many buffers, or open files, as it may"))
                .hint("remove buffers, or raise the server's limit of descriptors: `ulimit -n` where it is started")
        }
        Error::Errno(Errno::STALE) => Failure::failed(format!(
            "{shown}: the server was started anew, and what was open is gone"
        )),
        Error::Errno(errno) => {
            let failure = Failure::failed(format!("{shown}: {}", std::io::Error::from(*errno)));
            match *errno {
                Errno::NOENT => failure.hint(format!(
                    "`weft fs ls /rdma/{}` lists what is there",
                    path.endpoint
                )),
                _ => failure,
            }
        }
        e => Failure::peer(format!("{shown}: {e}")),
    }
}

/// A quarter of the machine's memory.
fn quarter() -> u64 {
    let info = rustix::system::sysinfo();
    (info.totalram as u64).saturating_mul(info.mem_unit.into()) / 4
}

/// A server that runs, and what its user is told.
pub(crate) struct Serving {
    /// It.
    pub(crate) server: Server,
    /// The file that its key pair was made in just now.
    pub(crate) made: Option<PathBuf>,
    /// What clients elsewhere compare; `None` without encryption.
    pub(crate) fingerprint: Option<Fingerprint>,
}

/// Starts a server. On any but a loopback address it has to be said who is let in.
pub(crate) fn serve(args: &ServeArgs) -> Result<Serving, Failure> {
    let bind = args
        .bind
        .unwrap_or((Ipv4Addr::LOCALHOST, DEFAULT_PORT).into());
    if let Some(dir) = &args.dir
        && let Err(e) = std::fs::read_dir(dir)
    {
        return Err(
            Failure::failed(format!("cannot offer the files of {}: {e}", dir.display()))
                .hint("name a directory that exists and that you can read"),
        );
    }
    let authorized = Authorized::named_or_usual(args.keys.authorized.as_deref());
    let (identity, made) = if args.via.plain {
        check_plain(bind, args)?;
        (keypair::generate()?, None)
    } else {
        let words = Words {
            peers: "clients",
            may: "use this one's memory",
            or: "",
        };
        let path = keypair::file_of(args.keys.identity.as_deref())?;
        reach::check(bind, authorized.as_ref(), args.open, words)?;
        let (identity, made) = keypair::read_or_make(&path)?;
        (identity, made.then_some(path))
    };
    let fingerprint = (!args.via.plain).then(|| identity.public_key().fingerprint());
    let admit: Admit = Arc::new(move |key| {
        authorized
            .as_ref()
            .is_some_and(|authorized| authorized.admits(&key.fingerprint()))
    });
    let tls = Tls::new(identity).map_err(|e| keypair::unusable(&e))?;
    let config = Config {
        bind,
        dir: args.dir.clone(),
        quota: args.quota.unwrap_or_else(quarter),
        keeps: args.keep,
        max_clients: args.max_clients,
        tls,
        admit,
        open: args.open,
        via: (&args.via).into(),
    };
    let server = Server::start(config).map_err(|e| match e {
        StartError::Device(why) => (&why).into(),
        StartError::NotOpen => Failure::usage(e.to_string()).hint(OPEN),
        StartError::Io(e) => Failure::listen(
            &bind,
            &e,
            "--bind ADDR:PORT chooses, port 0 takes a free one",
        ),
    })?;
    Ok(Serving {
        server,
        made,
        fingerprint,
    })
}

const OPEN: &str = "--open lets everybody in who can reach the address";

/// Without encryption only processes of the server's own user on its machine are known, by the kernel.
fn check_plain(bind: SocketAddr, args: &ServeArgs) -> Result<(), Failure> {
    let what = if args.keys.authorized.is_some() {
        "without encryption a client shows no key: --authorized and --plain exclude each other"
    } else if !args.open && !reach::is_of_this_machine(bind) {
        "without encryption no client can show its key, and the address can be reached from other machines"
    } else {
        return Ok(());
    };
    Err(Failure::usage(what).hint(OPEN))
}

/// Whether a path is a folder of the server.
pub(crate) fn is_dir(client: &Client, path: &RemotePath) -> bool {
    path.name.is_root() || client.stat(&path.name).is_ok_and(|attr| attr.dir)
}

/// The name below a folder for a local file: the folder's own entry where the target is a folder or ends with a slash.
pub(crate) fn target(client: &Client, path: &RemotePath, source: &Path) -> Result<Name, Failure> {
    use std::os::unix::ffi::OsStrExt;
    if !is_dir(client, path) {
        return Ok(path.name.clone());
    }
    let last = source
        .file_name()
        .ok_or_else(|| Failure::usage(format!("{} has no name", source.display())))?;
    path.name
        .join(last.as_bytes())
        .map_err(|e| explain(path, &e.into()))
}
