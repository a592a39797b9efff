//! Connections to receivers: their keys judged, hellos exchanged, refusals explained.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use weft_verbs::Path;
use weft_verbs::any::cm::{Connection, Dial};
use weft_verbs::any::{Choice, Device};
use weft_verbs::cm::{ConnParam, ConnectError, LinkOptions};
use weft_verbs::tls::{Tls, TlsError};

use super::START_PATIENCE;
use super::auth::fill_random;
use super::fetch;
use super::link::{Link, LinkError};
use super::protocol::{Code, DecodeError, Fetch, HELLO_LEN, Hello, Status, VERSION};
use super::rdma::{Prepared, RdmaLink};
use super::receiver::{self, Totals, Watch};
use super::sender::{self, Progress, Report, SendError};
use super::store::Store;
use super::target::Target;
use super::tcp::TcpLink;
use super::walk::Plan;
use weft_cli::address::resolve;
use weft_cli::failure::Failure;
use weft_cli::identity::credentials::Credentials;
use weft_session::Via;

/// The transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wire {
    /// One-sided RDMA Writes, by TLS where they leave shared memory.
    #[default]
    Rdma,
    /// A plain TCP stream, to compare with, on this host alone.
    PlainTcp,
}

impl Wire {
    /// A plain stream is for comparisons: nothing protects it on a network.
    pub(super) fn allow(self, addr: SocketAddr) -> Result<(), Failure> {
        if self == Self::PlainTcp && !weft_cli::identity::reach::is_of_this_machine(addr) {
            return Err(Failure::usage(format!(
                "--plain-tcp is neither encrypted nor authenticated, and {addr} is not a loopback address"
            ))
            .hint("leave --plain-tcp away"));
        }
        Ok(())
    }
}

/// The device of a connection; `find` finds the RNIC.
pub(super) fn device(
    via: &Via,
    find: impl FnOnce(&Choice) -> Result<Option<Device>, weft_verbs::Error>,
) -> Result<Device, Failure> {
    let device = via.device(find, weft_verbs::Device::open);
    device.map_err(|why| Failure::from(&why))
}

/// The parameters of a connection, by TLS unless the user wants none.
pub(super) fn param(tls: Option<Tls>, private_data: Vec<u8>) -> ConnParam {
    let options = LinkOptions {
        timeout: START_PATIENCE,
        ..LinkOptions::default()
    };
    ConnParam {
        private_data,
        options,
        tls,
        ..ConnParam::default()
    }
}

pub(super) fn hello(key: bool, status: Status) -> Result<Hello, Failure> {
    let mut nonce = [0; 32];
    fill_random(&mut nonce)?;
    Ok(Hello {
        version: VERSION,
        status,
        key,
        nonce,
    })
}

pub(super) fn is_us(uid: u32) -> bool {
    uid == rustix::process::geteuid().as_raw()
}

/// A connection to a receiver that has let us in.
pub struct Receiver {
    addr: SocketAddr,
    link: Box<dyn Link>,
    ours: Hello,
    theirs: Hello,
    who: Credentials,
}

/// Connects to a receiver, once it is clear that it is the one that is meant: its key is known, or our own, or the user says so.
pub fn connect(
    target: &Target,
    wire: Wire,
    via: &Via,
    options: &sender::Options,
    who: Credentials,
) -> Result<Receiver, Failure> {
    let has_key = options.key.is_some();
    let mut last = None;
    for addr in resolve(&target.server)? {
        wire.allow(addr)?;
        let ours = hello(has_key, Status::Ok)?;
        let dialled = match wire {
            Wire::Rdma => dial(addr, via, &ours, options.patience, &who),
            Wire::PlainTcp => dial_plain(addr, &ours, options.patience),
        };
        match dialled {
            Ok((link, reply)) => {
                let theirs = check_reply(addr, &reply, has_key, &who)?;
                return Ok(Receiver {
                    addr,
                    link,
                    ours,
                    theirs,
                    who,
                });
            }
            Err(Dialed::Next(failure)) => last = Some(failure),
            Err(Dialed::Final(failure)) => return Err(failure),
        }
    }
    Err(last.expect("a resolved host has an address"))
}

impl Receiver {
    /// Sends everything in `plan`.
    pub fn send(
        &self,
        plan: &Plan,
        options: &sender::Options,
        progress: &mut dyn Progress,
    ) -> Result<Report, Failure> {
        sender::send(
            &*self.link,
            &self.ours,
            &self.theirs,
            plan,
            options,
            progress,
        )
        .map_err(|e| explain(self.addr, &e, &self.who))
    }
}

impl Receiver {
    /// Receives what `request` names: the other side is the sender then.
    pub fn fetch(
        &self,
        request: Fetch,
        store: Store,
        options: &receiver::Options,
        watch: &dyn Watch,
    ) -> Result<Totals, Failure> {
        let (link, ours, theirs) = (&*self.link, &self.ours, &self.theirs);
        fetch::fetch(link, ours, theirs, request, store, options, watch)
            .map_err(|e| explain(self.addr, &e, &self.who))
    }

    /// Its transport.
    pub fn path(&self) -> Path {
        self.link.path()
    }
}

/// Whether to try another address of the same host.
enum Dialed {
    Next(Failure),
    Final(Failure),
}

impl From<Failure> for Dialed {
    fn from(failure: Failure) -> Self {
        Self::Final(failure)
    }
}

fn unreachable(addr: SocketAddr, e: &dyn std::fmt::Display) -> Dialed {
    Dialed::Next(
        Failure::peer(format!("cannot reach {addr}: {e}")).hint(format!(
            "check the address and that `weft cp --listen DIR --bind {addr}` runs there"
        )),
    )
}

fn dial_plain(
    addr: SocketAddr,
    ours: &Hello,
    patience: Duration,
) -> Result<(Box<dyn Link>, Vec<u8>), Dialed> {
    let stream =
        TcpStream::connect_timeout(&addr, START_PATIENCE).map_err(|e| unreachable(addr, &e))?;
    let link = TcpLink::new(stream, patience).map_err(|e| unreachable(addr, &e))?;
    let reply = link
        .send_hello(&ours.encode())
        .and_then(|()| link.recv_hello(START_PATIENCE))
        .map_err(|e| unreachable(addr, &e))?;
    Ok((Box::new(link), reply.to_vec()))
}

fn dial(
    addr: SocketAddr,
    via: &Via,
    ours: &Hello,
    patience: Duration,
    who: &Credentials,
) -> Result<(Box<dyn Link>, Vec<u8>), Dialed> {
    let device = device(via, |choice| choice.rnic_to(addr))?;
    who.connect(|| {
        let dial = Dial::new(&device, addr, START_PATIENCE)
            .map_err(|e| refused(addr, ours.key, e, who))?;
        let (prepared, qp) =
            Prepared::new(&device, |pd, init| dial.create_qp(pd, init)).map_err(|e| {
                Failure::failed(format!("cannot make the objects of a connection: {e}"))
                    .hint("`weft doctor` says what this machine does not support")
            })?;
        let tls = if via.plain { None } else { Some(who.tls()?) };
        match dial.connect(qp, &param(tls, ours.encode().to_vec())) {
            Ok(Connection { qp, private_data }) => {
                let link: Box<dyn Link> = Box::new(RdmaLink::new(prepared, qp, patience));
                Ok(Ok((link, private_data)))
            }
            // Nothing was sent: the connection ended in its handshake.
            Err(ConnectError::Tls(TlsError::KeyRefused(key))) => Ok(Err(key)),
            Err(e) => Err(refused(addr, ours.key, e, who)),
        }
    })
}

/// Why there is no connection.
fn refused(addr: SocketAddr, has_key: bool, e: ConnectError, who: &Credentials) -> Dialed {
    let port = "check the port; `weft cp --listen` prints the one that it uses";
    Dialed::Final(match e {
        ConnectError::Rejected { private_data } => {
            match check_reply(addr, &private_data, has_key, who) {
                Err(failure) => failure,
                Ok(_) => {
                    Failure::refused(format!("{addr} refused the connection without a reason"))
                }
            }
        }
        ConnectError::Tls(TlsError::ClosedInHandshake | TlsError::NotTls)
        | ConnectError::Closed
        | ConnectError::Reset => Failure::refused(format!(
            "what listens on {addr} does not speak iWARP by TLS: it is not `weft cp`, or not this version of it"
        ))
        .hint(port),
        ConnectError::Tls(e) => Failure::refused(format!(
            "the connection to {addr} cannot be protected, nothing was sent: {e}"
        ))
        .hint("use the same version on both sides; if they are, somebody on the way may be tampering with the connection"),
        ConnectError::Protocol(e) => {
            Failure::refused(format!("what listens on {addr} does not speak iWARP: {e}")).hint(port)
        }
        ConnectError::TimedOut => {
            return Dialed::Next(
                Failure::peer(format!(
                    "no answer from {addr} within {} s",
                    START_PATIENCE.as_secs()
                ))
                .hint("check the address and the port, and that no firewall drops the packets"),
            );
        }
        e => return unreachable(addr, &e),
    })
}

/// Checks a receiver's hello.
fn check_reply(
    addr: SocketAddr,
    reply: &[u8],
    key: bool,
    who: &Credentials,
) -> Result<Hello, Failure> {
    let reply = &reply[..reply.len().min(HELLO_LEN)];
    let theirs = Hello::decode(reply).map_err(|e| match e {
        // A listener that cannot accept has no room for words either.
        DecodeError::Short if reply.is_empty() => Failure::refused(format!(
            "what listens on {addr} turned the connection away without a reason"
        ))
        .hint("if it is `weft cp`, see what it prints: it may lack descriptors or memory; otherwise check the port"),
        DecodeError::Magic | DecodeError::Short => Failure::refused(format!(
            "what listens on {addr} speaks iWARP and is not `weft cp`"
        ))
        .hint("check the port; `weft cp --listen` prints the one that it uses"),
        e => Failure::refused(format!("{addr} sent a malformed hello: {e}"))
            .hint("use the same version on both sides"),
    })?;
    let wants_key = || {
        Failure::refused(format!("the receiver at {addr} wants a key"))
            .hint("pass the key file that it uses with --key FILE")
    };
    match theirs.status {
        _ if theirs.version != VERSION => Err(Failure::refused(format!(
            "the receiver at {addr} speaks version {} of the protocol, this program version {VERSION}",
            theirs.version
        ))
        .hint("install the same version of weft on both sides")),
        Status::Version => Err(Failure::refused(format!("the receiver at {addr} does not take version {VERSION}"))
            .hint("install the same version of weft on both sides")),
        Status::Busy => Err(full(addr)),
        Status::KeyWanted => Err(wants_key()),
        Status::Ok if theirs.key && !key => Err(wants_key()),
        Status::NoKey => Err(no_key(addr)),
        Status::UnknownPeer => Err(stranger(addr, who)),
        Status::Ok if key && !theirs.key => Err(no_key(addr)),
        Status::Ok => Ok(theirs),
    }
}

fn no_key(addr: SocketAddr) -> Failure {
    Failure::refused(format!("the receiver at {addr} has no key to prove"))
        .hint("start it with --key FILE, or leave --key away here")
}

fn full(addr: SocketAddr) -> Failure {
    Failure::peer(format!(
        "the receiver at {addr} serves as many senders as it may"
    ))
    .hint("try again later, or start it with a greater --max-senders")
}

fn stranger(addr: SocketAddr, who: &Credentials) -> Failure {
    let failure = Failure::refused(format!(
        "the receiver at {addr} takes files only from its own user on its machine, and from those whose keys it knows"
    ));
    who.unknown_there(failure)
}

/// The cause of a transfer's end, for the sender's user.
fn explain(addr: SocketAddr, e: &SendError, who: &Credentials) -> Failure {
    match e {
        SendError::Link(LinkError::Gone(why)) => {
            Failure::peer(format!("the connection to {addr} ended: {why}"))
                .hint("run the same command again: files that had begun go on where they were")
        }
        SendError::Link(LinkError::Violation(why)) => {
            Failure::refused(format!("the receiver at {addr} broke the protocol: {why}"))
                .hint("use the same version on both sides")
        }
        SendError::Link(LinkError::Local(why)) => {
            Failure::failed(why.clone()).hint("`weft doctor` says what is missing")
        }
        SendError::Refused {
            code: Code::KeyWrong,
            ..
        }
        | SendError::Impostor => {
            Failure::refused(format!(
                "the key is not the one of the receiver at {addr}, or somebody between the two relays the connection"
            ))
            .hint("copy the receiver's key file here again; the key itself was not sent, nor any file")
        }
        SendError::Refused {
            code: Code::UnknownPeer,
            ..
        } => stranger(addr, who),
        SendError::Refused {
            code: Code::Full, ..
        } => full(addr),
        SendError::Refused {
            code: Code::NotServed,
            ..
        } => Failure::refused(format!("the listener at {addr} gives no files"))
            .hint("start it with --serve DIR, or send the files from there"),
        SendError::Refused { text, .. } => {
            Failure::refused(format!("the receiver at {addr} says: {text}"))
                .hint("run the same command again: files that had begun go on where they were")
        }
    }
}
