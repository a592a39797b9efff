//! The peer process and the pipe to it.
//!
//! Each side of a benchmark is a separate process, so that its CPU time is counted separately. The
//! parent runs its own program again with the hidden argument `peer`, and exchanges JSON
//! lines over the child's standard input and output. These pipes end with either process, need no
//! port, and are unreachable for other processes. The data connections are the stacks' own.

use crate::children::{Talk, this_program};
use crate::driver::{Remote, Spec};
use crate::error::{BenchError, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io;
use std::net::SocketAddr;
use std::process::{Child, Command};

/// The arguments after which the program becomes the peer.
pub const PEER_ARGS: [&str; 1] = ["peer"];

/// The tasks that the suite of verbs has for its peer, beside operations.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Task {
    /// Time registrations.
    Register,
    /// Accept connections one after the other.
    Setup,
    /// Accept connections and keep them idle.
    Hold,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
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
    /// Another task of a suite for its peer, with its parameters.
    Task { task: Value, plan: Value },
}

/// The answers of the peer.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To `Open`, and to tasks whose peer listens: connect here.
    Listening { addr: SocketAddr },
    /// The connection is established. `remote` is the peer's target buffer, if it has one.
    Opened { remote: Option<Remote> },
    /// To `Go`, and to tasks with several steps: ready for the run.
    Ready,
    /// All operations are done; CPU seconds that the peer spent on them.
    Done { cpu: f64 },
    /// To `Close`, and to tasks that end with a connection.
    Closed,
    /// To `Hold`: bytes of private memory that all connections together took.
    Held { bytes: u64 },
    /// To a task that receives: the valid bytes that arrived.
    Valid { bytes: u64 },
    /// To tasks that measure: the measurements.
    Measured(Value),
    /// Any request can fail.
    Failed { why: String },
}

/// The parent's handle of the peer process; dropping it ends the process.
pub struct Peer {
    talk: Talk,
    next_id: u32,
}

impl Peer {
    /// Starts this program again as the peer, with extra environment variables.
    pub fn spawn(environment: &[(&str, &str)]) -> Result<Self> {
        Self::start(environment, Command::spawn)
    }

    /// Starts it through `spawn`, for example in another namespace.
    pub fn start(
        environment: &[(&str, &str)],
        spawn: impl FnOnce(&mut Command) -> io::Result<Child>,
    ) -> Result<Self> {
        let mut command = Command::new(this_program()?);
        command.args(PEER_ARGS).envs(environment.iter().copied());
        Ok(Self {
            talk: Talk::start(&mut command, spawn)?,
            next_id: 0,
        })
    }

    /// A number for a new session.
    pub fn new_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id
    }

    pub fn send(&mut self, request: &Request) -> Result<()> {
        self.talk.say(request)
    }

    /// Requests a task that only its suite knows.
    pub fn task(&mut self, task: impl Serialize, plan: &impl Serialize) -> Result<()> {
        let (task, plan) = (value(task)?, value(plan)?);
        self.send(&Request::Task { task, plan })
    }

    /// Receives what a suite's task has measured.
    pub fn measured<T: DeserializeOwned>(&mut self) -> Result<T> {
        match self.receive()? {
            Reply::Measured(value) => read_plan(value),
            other => Err(unexpected(&other)),
        }
    }

    pub fn receive(&mut self) -> Result<Reply> {
        match self.talk.hear()? {
            Reply::Failed { why } => Err(BenchError::Peer(why)),
            reply => Ok(reply),
        }
    }

    /// Receives the peer's `Ready`.
    pub fn ready(&mut self) -> Result<()> {
        match self.receive()? {
            Reply::Ready => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Receives the peer's `Closed`.
    pub fn closed(&mut self) -> Result<()> {
        match self.receive()? {
            Reply::Closed => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Receives a number of bytes, used or transferred.
    pub fn bytes(&mut self) -> Result<u64> {
        match self.receive()? {
            Reply::Held { bytes } | Reply::Valid { bytes } => Ok(bytes),
            other => Err(unexpected(&other)),
        }
    }

    /// Receives the address to connect to.
    pub fn listening(&mut self) -> Result<SocketAddr> {
        match self.receive()? {
            Reply::Listening { addr } => Ok(addr),
            other => Err(unexpected(&other)),
        }
    }
}

pub fn unexpected(reply: &Reply) -> BenchError {
    BenchError::PeerGone(format!("it answered {reply:?}"))
}

/// Encodes a task, its plan or its result.
pub fn value(of: impl Serialize) -> Result<Value> {
    serde_json::to_value(of).map_err(|e| BenchError::PeerGone(e.to_string()))
}

/// Decodes the plan or the result of a task.
pub fn read_plan<T: DeserializeOwned>(value: Value) -> Result<T> {
    serde_json::from_value(value).map_err(|e| BenchError::PeerGone(e.to_string()))
}
