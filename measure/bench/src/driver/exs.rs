//! Extended sockets, used as by their programmers: asynchronously with an event queue, or through the blocking calls.
//!
//! All of them are streams. Receives stay outstanding from one run to the next; the end of a run is acknowledged by a byte.

use super::{Initiator, Kind, Responder, Spec, Transport, lap};
use crate::error::{BenchError, Result, failed, stack};
use crate::patience::PATIENCE;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;
use weft_exs::{
    Choice, Context, Event, EventKind, Memory, Queue, RecvFlags, Region, Sink, Socket, Wait,
};
use weft_verbs::{Device, LocalMode};

/// Receives outstanding in a ping-pong.
const BALLS: usize = 4;
/// Events taken at once.
const BATCH: usize = 64;
/// Length of the acknowledgement at the end of a stream.
const ACK: usize = 1;

pub struct Listening(Socket);

/// The sockets' devices, one for each transport, opened when first used.
#[derive(Default)]
pub struct SocketContexts {
    /// The server's address, if connections beyond this host need TLS.
    server: Option<IpAddr>,
    open: Vec<(Option<Transport>, Context)>,
}

impl SocketContexts {
    /// Sets the server's address. Both ends know it, so both use TLS if it is beyond this host. Returns true if the address has changed;
    /// connections made until now are then useless.
    pub fn reached_at(&mut self, server: IpAddr) -> bool {
        let server = Some(server.to_canonical());
        let other = self.server != server;
        if other {
            self.open.clear();
        }
        self.server = server;
        other
    }

    pub fn get(&mut self, transport: Option<Transport>) -> Result<Context> {
        if let Some((_, context)) = self.open.iter().find(|(of, _)| *of == transport) {
            return Ok(context.clone());
        }
        let mut builder = match transport {
            None => Device::builder(),
            Some(Transport::Tcp) => Device::builder().local(LocalMode::Off),
            Some(Transport::Local) => Device::builder().local(LocalMode::Require),
        };
        if let Some(server) = self.server {
            builder = builder
                .tls_beyond_host(server)
                .map_err(stack("make a key"))?;
        }
        let device = builder.open().map_err(stack("open the device"))?;
        let choice = match transport {
            None => Choice::from_env(),
            Some(_) => Choice::Soft,
        };
        let context = Context::with(device, choice).map_err(stack("make a context"))?;
        self.open.push((transport, context.clone()));
        Ok(context)
    }
}

fn socket(contexts: &mut SocketContexts, spec: &Spec) -> Result<Socket> {
    let context = contexts.get(Some(spec.transport))?;
    let socket = Socket::new(&context, false, weft_exs::Kind::Stream).map_err(stack("a socket"))?;
    socket
        .set_options(|options| {
            options.crc = spec.crc;
            if spec.stack == super::Stack::ExsSync {
                // The others wait at their queue, which has a limit itself.
                options.send_timeout = Some(PATIENCE);
                options.recv_timeout = Some(PATIENCE);
            }
        })
        .map_err(stack("set a socket"))?;
    Ok(socket)
}

pub(super) fn listen(contexts: &mut SocketContexts, spec: &Spec) -> Result<Listening> {
    let socket = socket(contexts, spec)?;
    let addr = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket
        .bind(addr)
        .and_then(|()| socket.listen(1))
        .map_err(stack("listen"))?;
    Ok(Listening(socket))
}

impl Listening {
    pub(super) fn addr(&self) -> Result<SocketAddr> {
        self.0.local_addr().map_err(stack("listen"))
    }
}

pub(super) fn connect(
    contexts: &mut SocketContexts,
    spec: &Spec,
    addr: SocketAddr,
) -> Result<Box<dyn Initiator>> {
    let socket = socket(contexts, spec)?;
    socket.connect_wait(addr).map_err(stack("connect"))?;
    Ok(if spec.stack == super::Stack::ExsSync {
        Box::new(Blocking::new(contexts, spec, socket)?)
    } else {
        Box::new(End::new(contexts, spec, socket, true)?)
    })
}

pub(super) fn accept(
    contexts: &mut SocketContexts,
    listening: &Listening,
    spec: &Spec,
) -> Result<Box<dyn Responder>> {
    let socket = listening.0.accept_wait(Some(PATIENCE));
    let socket = socket.map_err(stack("accept"))?;
    Ok(if spec.stack == super::Stack::ExsSync {
        Box::new(Blocking::new(contexts, spec, socket)?)
    } else {
        Box::new(End::new(contexts, spec, socket, false)?)
    })
}

/// Resident memory of the library for `count` messages.
fn slots(
    contexts: &mut SocketContexts,
    spec: &Spec,
    len: usize,
    count: usize,
) -> Result<Vec<Memory>> {
    let context = contexts.get(Some(spec.transport))?;
    let region = Region::alloc(&context, len * count).map_err(stack("allocate memory"))?;
    let contents = vec![0x5a; len];
    let slot = |index: usize| {
        region.write(index * len, &contents)?;
        region.slice(index * len, len)
    };
    let slots: std::result::Result<_, _> = (0..count).map(slot).collect();
    slots.map_err(stack("touch memory"))
}

/// With an event queue.
struct End {
    socket: Socket,
    queue: Queue,
    spec: Spec,
    /// The memory of sends; the event's number is the index.
    sources: Vec<Memory>,
    /// The memory of receives, which are always outstanding.
    sinks: Vec<Memory>,
    flags: RecvFlags,
    events: Vec<Event>,
    /// Completed receives of a ping-pong. They are reposted while the answer is in flight; raw verbs repost theirs several at a time.
    spent: Vec<usize>,
    sent: u64,
    received: u64,
}

impl End {
    fn new(
        contexts: &mut SocketContexts,
        spec: &Spec,
        socket: Socket,
        initiator: bool,
    ) -> Result<Self> {
        let len = spec.len()?.max(ACK);
        let window = spec.window as usize;
        let ping_pong = spec.kind == Kind::PingPong;
        // The only message back in a stream is the acknowledgement; there are twice as many receives as sends.
        let (sends, receives, receive_len) = match (ping_pong, initiator) {
            (true, _) => (1, BALLS, len),
            (false, true) => (window, 1, ACK),
            (false, false) => (1, 2 * window, len),
        };
        let context = contexts.get(Some(spec.transport))?;
        let queue = Queue::new(&context, sends + receives).map_err(stack("make a queue"))?;
        queue.set_wait(if spec.busy {
            Wait::BusyPoll
        } else {
            Wait::Notify
        });
        let mut flags = RecvFlags::empty();
        flags.set(RecvFlags::WAITALL, ping_pong);
        let end = Self {
            socket,
            queue,
            spec: *spec,
            sources: slots(contexts, spec, len, sends)?,
            sinks: slots(contexts, spec, receive_len, receives)?,
            flags,
            events: Vec::with_capacity(BATCH),
            spent: Vec::with_capacity(BALLS),
            sent: 0,
            received: 0,
        };
        for index in 0..end.sinks.len() {
            end.receive(index)?;
        }
        Ok(end)
    }

    fn receive(&self, index: usize) -> Result<()> {
        let sink = Sink::Queue(self.queue.clone(), index as u64);
        let memory = self.sinks[index].clone();
        self.socket
            .recv(memory, self.flags, sink)
            .map_err(stack("receive"))
    }

    /// Sends `len` bytes from a slot whose last send has completed.
    fn send(&self, slot: usize, len: usize) -> Result<()> {
        let memory = match self.sources[slot].clone() {
            Memory::Region { region, off, .. } => Memory::Region { region, off, len },
            other => other,
        };
        let sink = Sink::Queue(self.queue.clone(), slot as u64);
        self.socket.send(memory, sink).map_err(stack("send"))
    }

    /// Waits for events and handles them: counts bytes, reposts receives, and sends from free slots as long as `more` returns true.
    fn step(&mut self, mut more: impl FnMut() -> bool) -> Result<()> {
        let mut events = std::mem::take(&mut self.events);
        let count = self.queue.dequeue(&mut events, BATCH, 1, Some(PATIENCE));
        if count.map_err(stack("take events"))? == 0 {
            return Err(BenchError::Stuck(PATIENCE.as_secs(), "an event"));
        }
        for event in events.drain(..) {
            let bytes = event.result.map_err(stack("complete an operation"))?;
            let slot = event.token as usize;
            if event.kind == EventKind::Send {
                self.sent += 1;
                if more() {
                    self.send(slot, self.spec.len()?)?;
                }
            } else if bytes == 0 {
                return Err(BenchError::PeerGone("connection closed".to_owned()));
            } else {
                self.received += bytes as u64;
                if self.spec.kind == Kind::PingPong {
                    self.spent.push(slot);
                } else {
                    self.receive(slot)?;
                }
            }
        }
        self.events = events;
        Ok(())
    }

    /// Sends the ball back.
    fn hit(&mut self, len: usize) -> Result<()> {
        self.send(0, len)?;
        while let Some(slot) = self.spent.pop() {
            self.receive(slot)?;
        }
        Ok(())
    }

    /// Waits until this many bytes have arrived since the connection was made.
    fn await_bytes(&mut self, bytes: u64) -> Result<()> {
        while self.received < bytes {
            self.step(|| false)?;
        }
        Ok(())
    }

    fn await_sent(&mut self, count: u64) -> Result<()> {
        while self.sent < count {
            self.step(|| false)?;
        }
        Ok(())
    }
}

impl Initiator for End {
    fn drive(&mut self, count: u64, laps: &mut Vec<f64>) -> Result<()> {
        let (sent, received) = (self.sent, self.received);
        let len = self.spec.len()?;
        if self.spec.kind == Kind::PingPong {
            let mut start = Instant::now();
            for turn in 1..=count {
                self.hit(len)?;
                self.await_bytes(received + turn * len as u64)?;
                self.await_sent(sent + turn)?;
                laps.push(lap(&mut start) / 2.0);
            }
            return Ok(());
        }
        let first = count.min(self.sources.len() as u64);
        for slot in 0..first {
            self.send(slot as usize, len)?;
        }
        let mut left = count - first;
        while self.sent < sent + count {
            self.step(|| {
                let more = left > 0;
                left -= u64::from(more);
                more
            })?;
        }
        self.await_bytes(received + ACK as u64)
    }
}

impl Responder for End {
    fn serve(&mut self, count: u64) -> Result<()> {
        let (sent, received) = (self.sent, self.received);
        let len = self.spec.len()?;
        if self.spec.kind == Kind::PingPong {
            for turn in 1..=count {
                self.await_bytes(received + turn * len as u64)?;
                self.hit(len)?;
                self.await_sent(sent + turn)?;
            }
            return Ok(());
        }
        self.await_bytes(received + count * len as u64)?;
        self.send(0, ACK)?;
        self.await_sent(sent + 1)
    }
}

/// With blocking calls, one message at a time.
struct Blocking {
    socket: Socket,
    spec: Spec,
    message: Memory,
}

impl Blocking {
    fn new(contexts: &mut SocketContexts, spec: &Spec, socket: Socket) -> Result<Self> {
        let len = spec.len()?.max(ACK);
        let message = slots(contexts, spec, len, 1)?.swap_remove(0);
        Ok(Self {
            socket,
            spec: *spec,
            message,
        })
    }

    fn part(&self, len: usize) -> Memory {
        match self.message.clone() {
            Memory::Region { region, off, .. } => Memory::Region { region, off, len },
            other => other,
        }
    }

    fn send(&self, len: usize) -> Result<()> {
        let sent = self.socket.send_wait(self.part(len));
        match sent.map_err(stack("send"))? {
            all if all == len => Ok(()),
            part => Err(failed("send", format!("{part} of {len} bytes"))),
        }
    }

    fn receive(&self, len: usize) -> Result<()> {
        let memory = self.part(len);
        let mut left = len;
        // As with `recv` on a stream: reads what is available, and repeats.
        while left > 0 {
            let memory = match &memory {
                Memory::Region { region, off, .. } => Memory::Region {
                    region: region.clone(),
                    off: off + len - left,
                    len: left,
                },
                other => other.clone(),
            };
            let got = self.socket.recv_wait(&memory, RecvFlags::empty());
            match got.map_err(stack("receive"))? {
                0 => return Err(BenchError::PeerGone("connection closed".to_owned())),
                some => left -= some.min(left),
            }
        }
        Ok(())
    }
}

impl Initiator for Blocking {
    fn drive(&mut self, count: u64, laps: &mut Vec<f64>) -> Result<()> {
        let len = self.spec.len()?;
        if self.spec.kind == Kind::Stream {
            for _ in 0..count {
                self.send(len)?;
            }
            return self.receive(ACK);
        }
        let mut start = Instant::now();
        for _ in 0..count {
            self.send(len)?;
            self.receive(len)?;
            laps.push(lap(&mut start) / 2.0);
        }
        Ok(())
    }
}

impl Responder for Blocking {
    fn serve(&mut self, count: u64) -> Result<()> {
        let len = self.spec.len()?;
        for _ in 0..count {
            self.receive(len)?;
            if self.spec.kind == Kind::PingPong {
                self.send(len)?;
            }
        }
        if self.spec.kind == Kind::Stream {
            self.send(ACK)?;
        }
        Ok(())
    }
}
