//! The peer process and the pipe to it.
//!
//! Both sides of a benchmark are processes of their own, so that the CPU time of each is its own.
//! The parent runs its own program again with the hidden argument `bench peer` and speaks to it in
//! JSON lines over the child's standard input and output: the pipes end with either process, take
//! no port, and nobody else can reach them. The data connections are the stacks' own.

use crate::driver::{Acceptor, Context, Remote, Responder, Spec};
use crate::error::{BenchError, Result};
use crate::usage;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// How long either side waits for the other before it gives up.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until a program that was started does what is asked of it.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        if Instant::now() > end {
            return Err(BenchError::PeerGone(format!("{what} does not answer")));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// The arguments after which the program becomes the peer.
pub const PEER_ARGS: [&str; 2] = ["bench", "peer"];

/// What the parent asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Listen, accept one connection of this kind and keep it as session `id`.
    Open { id: u32, spec: Spec },
    /// Serve `count` operations of session `id`; `remote` is the parent's target buffer.
    Go {
        id: u32,
        count: u64,
        remote: Option<Remote>,
    },
    /// Forget session `id`.
    Close { id: u32 },
    /// Time registrations; see [`crate::verbs::register`].
    Register(crate::verbs::register::Plan),
    /// Accept connections one after the other; see [`crate::verbs::setup`].
    Setup(crate::verbs::setup::Plan),
    /// Accept connections and keep them idle; see [`crate::verbs::memory`].
    Hold(crate::verbs::memory::Plan),
    /// Be a server of blast at this address, for one client, until that goes.
    BlastServe { ip: IpAddr },
    /// Be a client of blast from now on.
    BlastConnect { addr: SocketAddr },
    /// As that client, do one run.
    Blast(crate::exs::Plan),
    /// Accept the connections of this plan as session `id`.
    Sdp { id: u32, plan: crate::sdp::Plan },
    /// Do the peer's part of `count` sends of session `id`.
    SdpGo { id: u32, count: u64 },
    /// Close session `id`.
    SdpClose { id: u32 },
    /// Receive over a link that loses packets; see [`crate::lossy`].
    Lossy(crate::dgram::lossy::Plan),
    /// Receive beside others; see [`crate::dgram::group`].
    Group(crate::dgram::group::Plan),
    /// Be a server of many clients, or these; see [`crate::dgram::clients`].
    Clients(crate::dgram::clients::Plan),
}

/// What the peer answers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Reply {
    /// To `Open`, `Setup`, `Hold` and `BlastServe`: connect here.
    Listening { addr: SocketAddr },
    /// The connection stands; the peer's target buffer, if it has one.
    Opened { remote: Option<Remote> },
    /// To `Go` and `BlastConnect`: ready for what comes.
    Ready,
    /// All operations are done; CPU seconds that the peer spent on them.
    Done { cpu: f64 },
    /// To `Close`; to `BlastServe`, when its client is gone.
    Closed,
    /// To `Register`.
    Registered(Vec<crate::verbs::register::Row>),
    /// To `Hold`: bytes of private memory that all connections together took.
    Held { bytes: u64 },
    /// To `Lossy`, at its end: bytes that came and were valid.
    Valid { bytes: u64 },
    /// To `Blast`.
    Blasted(Box<crate::exs::Run>),
    /// Any request can fail.
    Failed { why: String },
}

/// The parent's handle of the peer process; dropping it ends the process.
pub(crate) struct Peer {
    child: Child,
    to: Option<BufWriter<ChildStdin>>,
    from: BufReader<ChildStdout>,
    next_id: u32,
}

impl Peer {
    /// Starts this program again as the peer, with extra environment variables.
    pub(crate) fn spawn(environment: &[(&str, &str)]) -> Result<Self> {
        Self::start(environment, Command::spawn)
    }

    /// Starts it by `spawn`: in another namespace, say.
    pub(crate) fn start(
        environment: &[(&str, &str)],
        spawn: impl FnOnce(&mut Command) -> io::Result<Child>,
    ) -> Result<Self> {
        let program =
            std::env::current_exe().map_err(BenchError::system("find this program's file"))?;
        let mut command = Command::new(program);
        command
            .args(PEER_ARGS)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child =
            spawn(&mut command).map_err(BenchError::system("start the peer process"))?;
        let (Some(to), Some(from)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(BenchError::PeerGone("no pipes".to_owned()));
        };
        Ok(Self {
            child,
            to: Some(BufWriter::new(to)),
            from: BufReader::new(from),
            next_id: 0,
        })
    }

    /// A number for a new session.
    pub(crate) fn new_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    pub(crate) fn send(&mut self, request: &Request) -> Result<()> {
        let to = self
            .to
            .as_mut()
            .ok_or_else(|| BenchError::PeerGone("closed".to_owned()))?;
        write_line(to, request).map_err(|error| BenchError::PeerGone(error.to_string()))
    }

    pub(crate) fn receive(&mut self) -> Result<Reply> {
        match read_line(&mut self.from) {
            Ok(Some(Reply::Failed { why })) => Err(BenchError::Peer(why)),
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(BenchError::PeerGone("it ended".to_owned())),
            Err(error) => Err(BenchError::PeerGone(error.to_string())),
        }
    }

    /// Receives the address to connect to.
    pub(crate) fn listening(&mut self) -> Result<SocketAddr> {
        match self.receive()? {
            Reply::Listening { addr } => Ok(addr),
            other => Err(unexpected(&other)),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The end of its input is the peer's signal; killing is for one that is stuck in a transfer.
        self.to = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn unexpected(reply: &Reply) -> BenchError {
    BenchError::PeerGone(format!("it answered {reply:?}"))
}

fn write_line(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    serde_json::to_writer(&mut *to, message)?;
    to.write_all(b"\n")?;
    to.flush()
}

fn read_line<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_str(&line)?))
}

/// The peer's side: answers requests on standard input until it ends.
pub(crate) fn serve_peer() -> Result<()> {
    let mut from = io::stdin().lock();
    let mut to = io::stdout().lock();
    let mut served = Served::default();
    loop {
        let request = match read_line(&mut from) {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            Err(error) => return Err(BenchError::PeerGone(error.to_string())),
        };
        let mut reply = |reply: Reply| {
            write_line(&mut to, &reply).map_err(|error| BenchError::PeerGone(error.to_string()))
        };
        match served.answer(request, &mut reply) {
            Err(BenchError::PeerGone(why)) => return Err(BenchError::PeerGone(why)),
            Err(error) => reply(Reply::Failed {
                why: error.to_string(),
            })?,
            Ok(()) => {}
        }
    }
}

#[derive(Default)]
struct Served {
    sessions: HashMap<u32, Box<dyn Responder>>,
    context: Context,
    blast: Option<crate::exs::Client>,
    sdp: HashMap<u32, crate::sdp::Session>,
    devices: crate::sdp::Devices,
}

impl Served {
    fn answer(
        &mut self,
        request: Request,
        reply: &mut dyn FnMut(Reply) -> Result<()>,
    ) -> Result<()> {
        match request {
            Request::Open { id, spec } => {
                let acceptor = Acceptor::listen(&mut self.context, &spec)?;
                reply(Reply::Listening {
                    addr: acceptor.addr()?,
                })?;
                let responder = acceptor.accept(&mut self.context, &spec)?;
                let remote = responder.remote();
                self.sessions.insert(id, responder);
                reply(Reply::Opened { remote })
            }
            Request::Go { id, count, remote } => {
                let Some(session) = self.sessions.get_mut(&id) else {
                    return Err(BenchError::Peer(format!("there is no session {id}")));
                };
                let mut run = || {
                    session.prepare(count, remote)?;
                    let before = usage::cpu_seconds();
                    reply(Reply::Ready)?;
                    session.serve(count)?;
                    reply(Reply::Done {
                        cpu: usage::cpu_seconds() - before,
                    })
                };
                let result = run();
                if result.is_err() {
                    // Closing the connection is how the parent learns of it in the middle of a transfer.
                    self.sessions.remove(&id);
                }
                result
            }
            Request::Close { id } => {
                self.sessions.remove(&id);
                reply(Reply::Closed)
            }
            Request::Sdp { id, plan } => {
                let tell = |addr| reply(Reply::Listening { addr });
                let session = crate::sdp::Session::accept(&mut self.devices, &plan, tell)?;
                self.sdp.insert(id, session);
                reply(Reply::Ready)
            }
            Request::SdpGo { id, count } => {
                let Some(session) = self.sdp.get(&id) else {
                    return Err(BenchError::Peer(format!("there is no session {id}")));
                };
                let before = usage::cpu_seconds();
                reply(Reply::Ready)?;
                session.serve(count)?;
                reply(Reply::Done {
                    cpu: usage::cpu_seconds() - before,
                })
            }
            Request::SdpClose { id } => {
                if let Some(session) = self.sdp.remove(&id) {
                    session.close(&mut self.devices);
                }
                reply(Reply::Closed)
            }
            Request::Register(plan) => reply(Reply::Registered(plan.run(&mut self.context)?)),
            Request::Setup(plan) => plan.serve(&mut self.context, reply),
            Request::Hold(plan) => plan.serve(&mut self.context, reply),
            Request::Lossy(plan) => plan.serve(reply),
            Request::Group(plan) => plan.serve(reply),
            Request::Clients(plan) => plan.serve(reply),
            Request::BlastServe { ip } => {
                let mut server = crate::exs::Server::listen(SocketAddr::new(ip, 0))?;
                reply(Reply::Listening {
                    addr: server.local_addr()?,
                })?;
                server.serve(None, |_, _| ())?;
                reply(Reply::Closed)
            }
            Request::BlastConnect { addr } => {
                self.blast = Some(crate::exs::Client::connect(addr)?);
                reply(Reply::Ready)
            }
            Request::Blast(plan) => {
                let client = self.blast.as_mut();
                let client = client.ok_or_else(|| BenchError::Peer("not connected".to_owned()))?;
                let run = client.run(&plan, &mut |_, _, _| ())?;
                reply(Reply::Blasted(Box::new(run)))
            }
        }
    }
}
