//! Blast, the stream paper's tool (IV.B): a client sends messages as fast as it can to a server.
//!
//! A plain TCP connection, in addition to the measured one, carries the control messages ([`super::control`]).
//! Each run has a new connection, because the algorithm's state belongs to the connection.

use super::control::{Answer, Ask, Control, unexpected};
use super::plan::Plan;
use super::run::{Contexts, Counters, Received, Receiver, Sent, send};
use crate::error::{BenchError, Result, stack};
use crate::patience::PATIENCE;
use serde::{Deserialize, Serialize};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};
use weft_exs::{Sink, Socket};

/// The time that the server gets to report why a run failed.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// The result of one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// Bytes of the program's messages, without the warm-up.
    pub bytes: u64,
    /// Messages sent, without the warm-up.
    pub messages: u64,
    /// Receives completed, all.
    pub receives: u64,
    /// From the start of the first transfer to the end of the last one (stream paper, equation 1).
    pub seconds: f64,
    /// CPU seconds of the client.
    pub client_cpu: f64,
    /// CPU seconds of the server.
    pub server_cpu: f64,
    /// The client's statistics.
    pub client: Counters,
    /// The server's.
    pub server: Counters,
    /// The transport, and the reason if it was not shared memory.
    pub path: String,
}

impl Run {
    fn of(sent: Sent, received: &Received, heard: Instant, half_trip: Duration) -> Result<Self> {
        if sent.bytes != received.bytes {
            return Err(BenchError::Stranger(format!(
                "{} bytes were sent and {} arrived",
                sent.bytes, received.bytes
            )));
        }
        // The server's clock differs from ours: the time of its answer is subtracted.
        let seconds = heard.duration_since(sent.mark.start).as_secs_f64()
            - received.since_last
            - half_trip.as_secs_f64();
        Ok(Self {
            bytes: sent.bytes - sent.mark.bytes,
            messages: sent.messages - sent.mark.messages,
            receives: received.receives,
            seconds: seconds.max(1e-9),
            client_cpu: sent.cpu,
            server_cpu: received.cpu,
            client: sent.counters,
            server: received.counters,
            path: sent.path,
        })
    }

    /// Gigabits (10^9 bits) of the program's messages per second.
    pub fn gigabits(&self) -> f64 {
        self.bytes as f64 * 8.0 / 1e9 / self.seconds
    }

    /// Microseconds per message.
    pub fn message_us(&self) -> f64 {
        self.seconds * 1e6 / self.messages.max(1) as f64
    }

    /// CPU of the client, in per cent of one core.
    pub fn client_percent(&self) -> f64 {
        self.client_cpu / self.seconds * 100.0
    }

    /// CPU of the server, in per cent of one core.
    pub fn server_percent(&self) -> f64 {
        self.server_cpu / self.seconds * 100.0
    }
}

/// The server.
pub struct Server {
    listener: TcpListener,
    contexts: Contexts,
}

impl Server {
    /// Listens.
    pub fn listen(addr: SocketAddr) -> Result<Self> {
        Ok(Self {
            listener: TcpListener::bind(addr).map_err(BenchError::system("listen"))?,
            contexts: Contexts::default(),
        })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        let addr = self.listener.local_addr();
        addr.map_err(BenchError::system("read a socket's address"))
    }

    /// Serves one client until it disconnects. `patience` limits the time without a request; `told` is called for
    /// each run.
    ///
    /// # Errors
    /// The error with that client; the server can serve another one.
    pub fn serve(
        &mut self,
        patience: Option<Duration>,
        mut told: impl FnMut(SocketAddr, &Plan),
    ) -> Result<()> {
        let (stream, from) = self
            .listener
            .accept()
            .map_err(BenchError::system("accept"))?;
        let mut control = Control::accept(stream, patience)?;
        loop {
            let plan = match control.hear() {
                Ok(Ask::Ping) => {
                    control.say(&Answer::Pong)?;
                    continue;
                }
                Ok(Ask::Run(plan)) => plan,
                Err(BenchError::PeerGone(_)) => return Ok(()),
                Err(error) => return Err(error),
            };
            told(from, &plan);
            match self.run(&mut control, &plan) {
                Ok(received) => control.say(&Answer::Received(received))?,
                Err(BenchError::PeerGone(why)) => return Err(BenchError::PeerGone(why)),
                Err(error) => control.say(&Answer::Failed {
                    why: error.to_string(),
                })?,
            }
        }
    }

    fn run(&mut self, control: &mut Control, plan: &Plan) -> Result<Received> {
        plan.check()?;
        let mut addr = control.local_addr()?;
        addr.set_port(0);
        self.contexts.reached_at(addr.ip());
        let context = self.contexts.get(plan.transport)?;
        let listener = Socket::new(&context, addr.is_ipv6(), plan.kind.exs())
            .map_err(stack("make a socket"))?;
        listener
            .set_options(|options| plan.set(options))
            .and_then(|()| listener.bind(addr))
            .and_then(|()| listener.listen(1))
            .map_err(stack("listen"))?;
        let port = listener.local_addr().map_err(stack("listen"))?.port();
        control.say(&Answer::Listening { port })?;
        let socket = listener
            .accept_wait(Some(PATIENCE))
            .map_err(stack("accept"))?;
        let receiver = Receiver::arm(&mut self.contexts, plan, socket)?;
        control.say(&Answer::Armed)?;
        receiver.run(&mut self.contexts, plan)
    }
}

/// The client.
pub struct Client {
    control: Control,
    addr: SocketAddr,
    contexts: Contexts,
}

impl Client {
    /// Connects to a [`Server`].
    pub fn connect(addr: SocketAddr) -> Result<Self> {
        Ok(Self {
            control: Control::connect(addr, PATIENCE)?,
            addr,
            contexts: {
                let mut contexts = Contexts::default();
                contexts.reached_at(addr.ip());
                contexts
            },
        })
    }

    /// One run. `progress` is called with the completed messages and bytes, and the time since the start.
    ///
    /// # Errors
    /// After an error the states of client and server may differ: connect anew.
    pub fn run(
        &mut self,
        plan: &Plan,
        progress: &mut dyn FnMut(u64, u64, Duration),
    ) -> Result<Run> {
        plan.check()?;
        let context = self.contexts.get(plan.transport)?;
        let mut addr = self.addr;
        match self.control.ask(&Ask::Run(plan.clone()))? {
            Answer::Listening { port } => addr.set_port(port),
            other => return Err(unexpected(&other)),
        }
        let socket = Socket::new(&context, addr.is_ipv6(), plan.kind.exs())
            .map_err(stack("make a socket"))?;
        socket
            .set_options(|options| plan.set(options))
            .map_err(stack("set a socket"))?;
        let connected = socket.connect_wait(addr).map_err(stack("connect"));
        self.either(connected)?;
        match self.control.answer()? {
            Answer::Armed => {}
            other => return Err(unexpected(&other)),
        }
        let sent = send(&mut self.contexts, plan, &socket, progress);
        let sent = self.either(sent)?;
        let answer = self.control.answer()?;
        let heard = Instant::now();
        let _ = socket.close(Sink::Nobody);
        match answer {
            Answer::Received(received) => Run::of(sent, &received, heard, self.control.half_trip()),
            other => Err(unexpected(&other)),
        }
    }

    fn reason(&mut self) -> Result<Answer> {
        self.control.set_patience(Some(LAST_WORDS))?;
        self.control.answer()
    }

    /// Adds the server's reason to a failure on this side, if the server has one.
    fn either<T>(&mut self, ours: Result<T>) -> Result<T> {
        ours.map_err(|ours| match self.reason() {
            Err(theirs @ BenchError::Peer(_)) => BenchError::Both(Box::new(ours), Box::new(theirs)),
            _ => ours,
        })
    }
}
