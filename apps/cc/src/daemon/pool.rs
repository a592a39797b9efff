//! Workers, their connections, and the choice of a worker for a job.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use weft_session::{DialError, Event, MessageChannel};
use weft_verbs::Device;
use weft_verbs::cm::ConnectError;
use weft_verbs::tls::{PublicKey, TlsError};

use super::Keys;
use crate::Endpoint;
use crate::digest::Digest;
use crate::ipc::WorkerStatus;
use crate::wire::{End, PROTOCOL, Status};

/// How long a worker may take to say that our key is not authorised: it says nothing if it is.
const TURNED_AWAY: Duration = Duration::from_millis(500);
/// How long a failed worker gets no jobs: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_mins(1);
/// How long a worker with another compiler is not tried again.
const UNFIT: Duration = Duration::from_mins(5);
/// How long a worker with occupied slots is not tried again.
const BUSY: Duration = Duration::from_millis(200);
/// Workers that are known at once.
const MAX_WORKERS: usize = 1024;

/// A connection, and the worker's greeting.
pub(super) struct Conn {
    pub(super) link: MessageChannel,
    pub(super) served: super::files::Served,
    pub(super) slots: u16,
    pub(super) transport: &'static str,
}

#[derive(Default)]
struct Worker {
    slots: Option<u16>,
    transport: &'static str,
    in_use: usize,
    idle: Vec<Conn>,
    paused: Option<(Instant, String)>,
    failures: u32,
    busy: Option<Instant>,
    unfit: HashMap<Digest, (Instant, String)>,
    distrusted: bool,
    pressure: u16,
    done: u64,
    lost: u64,
    bytes: (u64, u64),
    compiling: f64,
}

#[derive(Default)]
pub(super) struct Pool(BTreeMap<Endpoint, Worker>);

/// Two that share nothing: no command without `--plain` gets a connection without TLS.
#[derive(Default)]
pub(super) struct Pools {
    tls: Pool,
    plain: Pool,
}

impl Pools {
    pub(super) fn of(&mut self, plain: bool) -> &mut Pool {
        if plain {
            &mut self.plain
        } else {
            &mut self.tls
        }
    }

    pub(super) fn status(&self) -> Vec<WorkerStatus> {
        let mut all = self.tls.status();
        all.extend(self.plain.status());
        all
    }
}

/// The choice for a job.
#[expect(
    clippy::large_enum_variant,
    reason = "one at a time, which is taken apart at once"
)]
pub(super) enum Pick {
    /// This worker has a free slot, which is taken; and a connection, if one is there.
    Worker(Endpoint, Option<Conn>),
    /// All that would do are busy.
    Wait,
    /// None will do; why.
    Nobody(String),
}

impl Worker {
    fn trouble(&self, digest: Option<&Digest>) -> Option<String> {
        if self.distrusted {
            return Some("its output differed from ours".into());
        }
        let now = Instant::now();
        if let Some((until, why)) = &self.paused
            && *until > now
        {
            return Some(why.clone());
        }
        let unfit = match digest {
            Some(digest) => self.unfit.get(digest),
            None => self.unfit.values().next(),
        };
        unfit
            .filter(|(until, _)| *until > now)
            .map(|(_, why)| why.clone())
    }
}

impl Pool {
    pub(super) fn pick(&mut self, from: &[Endpoint], digest: &Digest, tried: &[Endpoint]) -> Pick {
        let now = Instant::now();
        let mut best: Option<(f64, &Endpoint)> = None;
        let mut wait = false;
        let mut why = String::new();
        for endpoint in from {
            if self.0.len() >= MAX_WORKERS && !self.0.contains_key(endpoint) {
                continue;
            }
            let worker = self.0.entry(endpoint.clone()).or_default();
            if let Some(trouble) = worker.trouble(Some(digest)) {
                if why.is_empty() {
                    why = trouble;
                }
                continue;
            }
            if tried.contains(endpoint) {
                continue;
            }
            // Until its first connection has reported its slots, one is assumed.
            let slots = usize::from(worker.slots.unwrap_or(1));
            if worker.in_use >= slots || worker.busy.is_some_and(|until| until > now) {
                wait = true;
                continue;
            }
            let load = worker.in_use as f64 / slots as f64 + f64::from(worker.pressure) / 10_000.0;
            if best.is_none_or(|(least, _)| load < least) {
                best = Some((load, endpoint));
            }
        }
        if let Some((_, endpoint)) = best
            && let Some(worker) = self.0.get_mut(endpoint)
        {
            worker.in_use += 1;
            return Pick::Worker(endpoint.clone(), worker.idle.pop());
        }
        if wait { Pick::Wait } else { Pick::Nobody(why) }
    }

    fn release(&mut self, endpoint: &Endpoint) -> Option<&mut Worker> {
        let worker = self.0.get_mut(endpoint)?;
        worker.in_use = worker.in_use.saturating_sub(1);
        Some(worker)
    }

    pub(super) fn connected(&mut self, endpoint: &Endpoint, conn: &Conn) {
        if let Some(worker) = self.0.get_mut(endpoint) {
            worker.slots = Some(conn.slots.max(1));
            worker.transport = conn.transport;
        }
    }

    /// The slot is free again, the connection stays.
    pub(super) fn give_back(&mut self, endpoint: &Endpoint, conn: Conn, end: &End, read: u64) {
        let Some(worker) = self.release(endpoint) else {
            return;
        };
        worker.idle.push(conn);
        worker.pressure = end.pressure.min(10_000);
        worker.failures = 0;
        if end.verdict == crate::wire::Verdict::Done {
            worker.done += 1;
            worker.bytes.0 += read;
            worker.bytes.1 += end.outputs.iter().map(|&(_, _, len)| len).sum::<u64>();
            worker.compiling += f64::from(end.times[1]) / 1e6;
        }
    }

    /// The slot is free again, the connection has ended.
    pub(super) fn cancelled(&mut self, endpoint: &Endpoint) {
        self.release(endpoint);
    }

    /// The connection was lost, or there was none: a pause.
    pub(super) fn failed(&mut self, endpoint: &Endpoint, why: &str) {
        let Some(worker) = self.release(endpoint) else {
            return;
        };
        worker.lost += 1;
        let pause = (FIRST_PAUSE * 2_u32.saturating_pow(worker.failures.min(6))).min(LAST_PAUSE);
        worker.failures += 1;
        worker.idle.clear();
        worker.paused = Some((Instant::now() + pause, format!("{endpoint}: {why}")));
    }

    pub(super) fn busy(&mut self, endpoint: &Endpoint) {
        if let Some(worker) = self.0.get_mut(endpoint) {
            worker.busy = Some(Instant::now() + BUSY);
        }
    }

    pub(super) fn unfit(&mut self, endpoint: &Endpoint, digest: Digest, why: &str) {
        if let Some(worker) = self.0.get_mut(endpoint) {
            worker.unfit.insert(
                digest,
                (Instant::now() + UNFIT, format!("{endpoint}: {why}")),
            );
        }
    }

    /// It gets no more jobs.
    pub(super) fn distrust(&mut self, endpoint: &Endpoint) {
        if let Some(worker) = self.0.get_mut(endpoint) {
            worker.distrusted = true;
        }
    }

    pub(super) fn status(&self) -> Vec<WorkerStatus> {
        let all = self.0.iter().map(|(endpoint, worker)| WorkerStatus {
            endpoint: endpoint.clone(),
            transport: worker.transport.into(),
            slots: worker.slots.unwrap_or(0),
            in_use: worker.in_use,
            done: worker.done,
            lost: worker.lost,
            bytes: worker.bytes,
            compiling: worker.compiling,
            pressure: f64::from(worker.pressure) / 100.0,
            trouble: worker.trouble(None).unwrap_or_default(),
        });
        all.collect()
    }
}

/// Why there is no connection to a worker.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct Refusal {
    /// In words.
    pub why: String,
    /// Its key, if that is not taken.
    pub key: Option<PublicKey>,
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self { why, key: None }
    }
}

/// What a worker that does not understand the first message may be.
const NOT_PLAIN: &str = "it ended the connection at its beginning, without TLS: only a worker that was started with --plain takes this; start it so, or leave --plain (WEFT_CC_PLAIN) away here";
const NOT_TLS: &str = "it does not speak TLS: if it is a worker with --plain, and you trust the network, give --plain (WEFT_CC_PLAIN=1) here too; else start it without";

/// Why there is no connection, in words.
fn explain(e: &DialError, plain: bool) -> String {
    let DialError::Connect(e) = e else {
        return e.to_string();
    };
    match e {
        ConnectError::Closed | ConnectError::Reset | ConnectError::Protocol(_) if plain => {
            NOT_PLAIN.into()
        }
        ConnectError::Tls(TlsError::ClosedInHandshake | TlsError::NotTls) => NOT_TLS.into(),
        e => e.to_string(),
    }
}

/// Connects to a worker, without TLS if it is to be plain.
pub(super) fn dial(
    device: &Device,
    keys: &dyn Keys,
    endpoint: &Endpoint,
    plain: bool,
) -> Result<Conn, Refusal> {
    let addrs = endpoint
        .resolve()
        .map_err(|e| format!("cannot resolve the host: {e}"))?;
    let mut last = String::new();
    for addr in addrs {
        let tls = (!plain).then(|| keys.tls(endpoint)).transpose()?;
        let param = PROTOCOL.param(tls, PROTOCOL.hello(Status::Ok, 0));
        let device = device.clone().into();
        let (link, private_data) = match MessageChannel::dial(&device, PROTOCOL, addr, &param) {
            Ok(connected) => connected,
            Err(DialError::Local(e)) => return Err(e.to_string().into()),
            Err(DialError::Connect(ConnectError::Rejected { private_data })) => {
                let why = match PROTOCOL.read_hello(&private_data) {
                    Ok(theirs) => {
                        format!("the worker turned the connection away: {}", theirs.status)
                    }
                    Err(e) => format!("what answers is no worker: {e}"),
                };
                return Err(why.into());
            }
            Err(DialError::Connect(ConnectError::Tls(TlsError::KeyRefused(key)))) => {
                let why = "its key is not known here; `weft cc check` shows it and asks".into();
                return Err(Refusal {
                    why,
                    key: Some(key),
                });
            }
            // Another address of the same host may do.
            Err(e) => {
                last = explain(&e, plain);
                continue;
            }
        };
        let theirs = PROTOCOL
            .read_hello(&private_data)
            .map_err(|e| format!("what answers is no worker: {e}"))?;
        if theirs.version != PROTOCOL.version || theirs.status != Status::Ok {
            return Err(String::from("the worker speaks another version").into());
        }
        let transport = link.qp.path().map_or("tcp", |path| path.transport);
        return Ok(Conn {
            link,
            served: super::files::Served::default(),
            slots: theirs.value,
            transport,
        });
    }
    Err(last.into())
}

/// The worker's description of itself.
#[derive(Debug)]
pub struct About {
    /// Jobs at once.
    pub slots: u16,
    /// The transport of the connection.
    pub transport: &'static str,
}

/// Connects to a worker once, to see whether it is there; without TLS if it is to be plain.
///
/// # Errors
/// Why it is not.
pub fn probe(keys: &dyn Keys, endpoint: &Endpoint, plain: bool) -> Result<About, Refusal> {
    let device = Device::open().map_err(|e| e.to_string())?;
    let mut conn = dial(&device, keys, endpoint, plain)?;
    // A worker that cannot tell our user turns us away only now.
    let end = Instant::now() + TURNED_AWAY;
    while !conn.link.qp.attests_same_user()
        && let Some(left) = end.checked_duration_since(Instant::now())
    {
        match conn.link.next(left, None) {
            Ok(Some(Event::Message(_))) => return Err(Status::UnknownPeer.to_string().into()),
            Ok(_) => {}
            Err(broken) => return Err(broken.to_string().into()),
        }
    }
    Ok(About {
        slots: conn.slots,
        transport: conn.transport,
    })
}
