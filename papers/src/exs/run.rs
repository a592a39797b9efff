//! The two ends of a run: the client sends as fast as it can, the server receives.

use super::plan::{Amount, Plan, pattern};
use crate::driver::{SocketContexts, Transport};
use crate::error::{BenchError, Result, failed, stack};
use crate::patience::PATIENCE;
use crate::usage;
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::time::{Duration, Instant};
use weft_exs::{Context, Event, EventKind, Memory, Queue, RecvFlags, Region, Sink, Socket};

/// Events taken from a queue at once.
const BATCH: usize = 64;

/// The statistics of a socket that the figures need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Transfers that this end sent directly into its peer's receives.
    pub direct: u64,
    /// Their bytes.
    pub direct_bytes: u64,
    /// Transfers that this end sent through its peer's buffer.
    pub indirect: u64,
    /// Their bytes.
    pub indirect_bytes: u64,
    /// Messages that carried their data with them.
    pub small: u64,
    /// Their bytes.
    pub small_bytes: u64,
    /// Sends whose bytes all went directly.
    pub direct_sends: u64,
    /// Sends with bytes that did not.
    pub indirect_sends: u64,
    /// Changes between direct and indirect, as sender.
    pub mode_switches: u64,
    /// Adverts sent.
    pub adverts_sent: u64,
    /// Adverts received.
    pub adverts_received: u64,
    /// Adverts that arrived too late and were discarded.
    pub adverts_dropped: u64,
    /// Times that a message waited for a credit.
    pub credit_stalls: u64,
    /// Times that a send waited for room in the peer's buffer.
    pub ring_stalls: u64,
}

impl Counters {
    fn of(socket: &Socket) -> Self {
        let stats = socket.stats();
        Self {
            direct: stats.direct_sent,
            direct_bytes: stats.direct_bytes_sent,
            indirect: stats.indirect_sent,
            indirect_bytes: stats.indirect_bytes_sent,
            small: stats.small_sent,
            small_bytes: stats.small_bytes_sent,
            direct_sends: stats.direct_sends,
            indirect_sends: stats.indirect_sends,
            mode_switches: stats.mode_switches,
            adverts_sent: stats.adverts_sent,
            adverts_received: stats.adverts_received,
            adverts_dropped: stats.adverts_dropped,
            credit_stalls: stats.credit_stalls,
            ring_stalls: stats.ring_stalls,
        }
    }

    /// Direct sends of all sends, as in the stream paper's table III and figs. 11b and 12b. Its indirect sends are one transfer each; ours are
    /// cut into pieces.
    pub fn direct_ratio(&self) -> f64 {
        let all = self.direct_sends + self.indirect_sends;
        self.direct_sends as f64 / (all.max(1)) as f64
    }
}

/// The end of the warm-up at the client: transfers that had completed by then do not count.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    pub(super) start: Instant,
    pub(super) messages: u64,
    pub(super) bytes: u64,
    cpu: f64,
}

impl Mark {
    fn now(messages: u64, bytes: u64) -> Self {
        let cpu = usage::cpu_seconds();
        Self {
            start: Instant::now(),
            messages,
            bytes,
            cpu,
        }
    }
}

/// The client's measurements.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) mark: Mark,
    /// Including the warm-up.
    pub(super) messages: u64,
    /// Including the warm-up.
    pub(super) bytes: u64,
    /// CPU seconds since the mark.
    pub(super) cpu: f64,
    pub(super) counters: Counters,
    /// The transport, and the reason if it was not shared memory.
    pub(super) path: String,
}

/// The server's measurements, which it reports to the client.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Received {
    /// Receives that were completed with data.
    pub(super) receives: u64,
    /// Including the warm-up.
    pub(super) bytes: u64,
    /// CPU seconds of the process, without those of the warm-up.
    pub(super) cpu: f64,
    /// Seconds from the last completion to this answer.
    pub(super) since_last: f64,
    pub(super) counters: Counters,
}

/// The sockets' devices, and the memory of the last run, for the next one.
#[derive(Default)]
pub(crate) struct Contexts {
    sockets: SocketContexts,
    kept: Option<Kept>,
}

struct Kept {
    transport: Option<Transport>,
    registered: bool,
    len: usize,
    slots: Vec<Memory>,
}

impl Contexts {
    /// See [`SocketContexts::reached_at`].
    pub(super) fn reached_at(&mut self, server: IpAddr) {
        if self.sockets.reached_at(server) {
            self.kept = None;
        }
    }

    pub(super) fn get(&mut self, transport: Option<Transport>) -> Result<Context> {
        self.sockets.get(transport)
    }

    /// Memory for `count` operations, each as long as the longest message; resident, so that no page is touched for the first time
    /// while the clock runs.
    fn slots(&mut self, plan: &Plan, count: u32) -> Result<Vec<Memory>> {
        let len = plan.lengths.max() as usize;
        let count = count as usize;
        if let Some(kept) = self.kept.take()
            && (kept.transport, kept.registered, kept.len, kept.slots.len())
                == (plan.transport, plan.registered, len, count)
        {
            return Ok(kept.slots);
        }
        if !plan.registered {
            return Ok((0..count).map(|_| Memory::Owned(vec![0x5a; len])).collect());
        }
        let context = self.get(plan.transport)?;
        let region = Region::alloc(&context, len * count).map_err(stack("allocate memory"))?;
        let page = vec![0x5a; len];
        (0..count)
            .map(|slot| {
                region.write(slot * len, &page)?;
                region.slice(slot * len, len)
            })
            .collect::<std::result::Result<_, _>>()
            .map_err(stack("touch memory"))
    }

    /// Keeps the memory of a run that went well.
    fn keep(&mut self, plan: &Plan, slots: Vec<Option<Memory>>) {
        let slots: Option<Vec<Memory>> = slots.into_iter().collect();
        self.kept = slots.map(|slots| Kept {
            transport: plan.transport,
            registered: plan.registered,
            len: plan.lengths.max() as usize,
            slots,
        });
    }
}

/// Waits for at least one event, and returns at most [`BATCH`].
fn await_events(queue: &Queue, events: &mut Vec<Event>, what: &'static str) -> Result<()> {
    events.clear();
    let count = queue
        .dequeue(events, BATCH, 1, Some(PATIENCE))
        .map_err(stack("take events"))?;
    if count == 0 {
        return Err(BenchError::Stuck(PATIENCE.as_secs(), what));
    }
    Ok(())
}

/// The slot that an event is about.
fn slot(event: &Event, slots: usize) -> Result<usize> {
    let index = usize::try_from(event.token).ok();
    index.filter(|index| *index < slots).ok_or_else(|| {
        let why = format!("an event with the number {}", event.token);
        failed("take events", why)
    })
}

fn events(context: &Context, plan: &Plan, count: u32) -> Result<Queue> {
    let queue = Queue::new(context, count as usize).map_err(stack("make an event queue"))?;
    queue.set_wait(plan.wait.exs());
    Ok(queue)
}

/// The part of a slot that a message of `len` bytes is sent from, with the contents that belong at `offset` of the stream.
fn message(plan: &Plan, memory: Memory, len: usize, offset: u64) -> Result<Memory> {
    match memory {
        Memory::Region { region, off, .. } => {
            if let Some(seed) = plan.verify {
                let mut contents = vec![0; len];
                pattern(seed, offset, &mut contents);
                region
                    .write(off, &contents)
                    .map_err(stack("write contents"))?;
            }
            Ok(Memory::Region { region, off, len })
        }
        Memory::Owned(mut bytes) => {
            // The buffer's capacity is that of the longest message: this allocates no memory, and zeroes only the bytes by which the last
            // message was shorter.
            bytes.resize(len, 0x5a);
            if let Some(seed) = plan.verify {
                pattern(seed, offset, &mut bytes);
            }
            Ok(Memory::Owned(bytes))
        }
        other => Ok(other),
    }
}

/// The messages that are not started yet: the last one is in flight when the plan's amount is.
struct Rest<L> {
    lengths: L,
    amount: Amount,
    warm_up: u64,
    /// The position of the next message in the stream.
    offset: u64,
    /// Messages and bytes begun after the warm-up.
    begun: (u64, u64),
}

impl Rest<()> {
    fn of(plan: &Plan) -> Rest<impl Iterator<Item = usize>> {
        Rest {
            lengths: plan.lengths.iter(),
            amount: plan.amount,
            warm_up: plan.warm_up,
            offset: 0,
            begun: (0, 0),
        }
    }
}

impl<L: Iterator<Item = usize>> Rest<L> {
    /// The position of the next message in the stream, and its length.
    fn next(&mut self, elapsed: impl FnOnce() -> Duration) -> Option<(u64, usize)> {
        let warm = self.offset >= self.warm_up;
        let (messages, bytes) = self.begun;
        if warm && self.amount.is_reached(messages, bytes, elapsed) {
            return None;
        }
        let len = self.lengths.next()?;
        let offset = self.offset;
        self.offset += len as u64;
        if warm {
            self.begun = (messages + 1, bytes + len as u64);
        }
        Some((offset, len))
    }
}

/// The client's end: sends all messages of the plan, then the end of the stream. `progress` is called with the messages and bytes that have
/// completed.
pub(super) fn send(
    contexts: &mut Contexts,
    plan: &Plan,
    socket: &Socket,
    progress: &mut dyn FnMut(u64, u64, Duration),
) -> Result<Sent> {
    let context = contexts.get(plan.transport)?;
    let queue = events(&context, plan, plan.sends)?;
    let mut slots: Vec<Option<Memory>> = contexts
        .slots(plan, plan.sends)?
        .into_iter()
        .map(Some)
        .collect();
    let mut rest = Rest::of(plan);
    let post = |slots: &mut [Option<Memory>], index: usize, (offset, len): (u64, usize)| {
        let memory = message(plan, slots[index].take().ok_or(LOST)?, len, offset)?;
        socket
            .send(memory, Sink::Queue(queue.clone(), index as u64))
            .map_err(stack("send"))
    };
    let mut taken = Vec::with_capacity(BATCH);
    let (mut messages, mut bytes, mut outstanding) = (0, 0, 0);
    let mut mark = Mark::now(0, 0);
    for index in 0..slots.len() {
        let Some(next) = rest.next(|| Duration::ZERO) else {
            break;
        };
        post(&mut slots, index, next)?;
        outstanding += 1;
    }
    while outstanding > 0 {
        await_events(&queue, &mut taken, "a send that completes")?;
        for event in taken.drain(..) {
            let index = slot(&event, slots.len())?;
            let sent = event.result.map_err(stack("send"))?;
            slots[index] = event.memory;
            let cold = bytes < plan.warm_up;
            messages += 1;
            bytes += sent as u64;
            if cold && bytes >= plan.warm_up {
                mark = Mark::now(messages, bytes);
            }
            // Until the mark, no time has passed.
            let elapsed = || {
                if bytes < plan.warm_up {
                    Duration::ZERO
                } else {
                    mark.start.elapsed()
                }
            };
            match rest.next(elapsed) {
                Some(next) => post(&mut slots, index, next)?,
                None => outstanding -= 1,
            }
        }
        if bytes >= plan.warm_up {
            progress(
                messages - mark.messages,
                bytes - mark.bytes,
                mark.start.elapsed(),
            );
        }
    }
    socket.shutdown().map_err(stack("shut the stream down"))?;
    let sent = Sent {
        mark,
        messages,
        bytes,
        cpu: usage::cpu_seconds() - mark.cpu,
        counters: Counters::of(socket),
        path: path(socket),
    };
    let slots = slots.into_iter();
    contexts.keep(
        plan,
        slots
            .map(|slot| slot.map(|slot| whole(plan, slot)))
            .collect(),
    );
    Ok(sent)
}

/// A slot at its full length again.
fn whole(plan: &Plan, memory: Memory) -> Memory {
    let full = plan.lengths.max() as usize;
    match memory {
        Memory::Region { region, off, .. } => Memory::Region {
            region,
            off,
            len: full,
        },
        Memory::Owned(mut bytes) => {
            bytes.resize(full, 0x5a);
            Memory::Owned(bytes)
        }
        other => other,
    }
}

fn path(socket: &Socket) -> String {
    socket
        .path()
        .map_or_else(String::new, |path| match path.reason {
            Some(why) => format!("{} ({why})", path.transport),
            None => path.transport.to_owned(),
        })
}

/// The server's receives: all outstanding before the client starts.
pub(super) struct Receiver {
    socket: Socket,
    queue: Queue,
    slots: Vec<Option<Memory>>,
    flags: RecvFlags,
    cpu: f64,
}

impl Receiver {
    pub(super) fn arm(contexts: &mut Contexts, plan: &Plan, socket: Socket) -> Result<Self> {
        let context = contexts.get(plan.transport)?;
        let slots = contexts.slots(plan, plan.receives)?;
        let mut flags = RecvFlags::empty();
        flags.set(RecvFlags::WAITALL, plan.waitall);
        flags.set(RecvFlags::IN_PLACE, plan.in_place);
        let mut receiver = Self {
            queue: events(&context, plan, plan.receives)?,
            socket,
            slots: slots.into_iter().map(Some).collect(),
            flags,
            cpu: 0.0,
        };
        for index in 0..receiver.slots.len() {
            receiver.post(index)?;
        }
        receiver.cpu = usage::cpu_seconds();
        Ok(receiver)
    }

    fn post(&mut self, index: usize) -> Result<()> {
        let memory = match &mut self.slots[index] {
            // A region is kept here too: data that was left in place does not return its memory.
            Some(region @ Memory::Region { .. }) => region.clone(),
            slot => slot.take().ok_or(LOST)?,
        };
        self.socket
            .recv(
                memory,
                self.flags,
                Sink::Queue(self.queue.clone(), index as u64),
            )
            .map_err(stack("receive"))
    }

    /// Receives until the stream ends.
    pub(super) fn run(mut self, contexts: &mut Contexts, plan: &Plan) -> Result<Received> {
        let longest = plan.lengths.max() as usize;
        let mut taken = Vec::with_capacity(BATCH);
        let (mut receives, mut bytes, mut ended) = (0, 0, false);
        let mut outstanding = self.slots.len();
        let mut last = Instant::now();
        while outstanding > 0 {
            await_events(&self.queue, &mut taken, "a receive that completes")?;
            for event in taken.drain(..) {
                let index = slot(&event, self.slots.len())?;
                let got = event.result.map_err(stack("receive"))?;
                if event.kind != EventKind::Recv || event.truncated {
                    let (kind, truncated) = (event.kind, event.truncated);
                    let why = format!("an event of {kind:?}, truncated: {truncated}");
                    return Err(failed("receive", why));
                }
                if got > 0
                    && let Some(seed) = plan.verify
                {
                    let place = event.in_place.as_ref().map(weft_exs::InPlace::memory);
                    let place = place.or(event.memory.as_ref()).ok_or(LOST)?;
                    verify(seed, bytes, place, got)?;
                }
                let left = event.in_place.is_some();
                if let Some(memory) = event.memory {
                    self.slots[index] = Some(memory);
                } else if left && !plan.registered {
                    self.slots[index] = Some(Memory::Owned(vec![0x5a; longest]));
                }
                // Data that was received in place is released here.
                drop(event.in_place);
                ended |= got == 0;
                if got > 0 {
                    let cold = bytes < plan.warm_up;
                    receives += 1;
                    bytes += got as u64;
                    last = Instant::now();
                    if cold && bytes >= plan.warm_up {
                        self.cpu = usage::cpu_seconds();
                    }
                }
                if ended {
                    outstanding -= 1;
                } else {
                    self.post(index)?;
                }
            }
        }
        let received = Received {
            receives,
            bytes,
            cpu: usage::cpu_seconds() - self.cpu,
            since_last: last.elapsed().as_secs_f64(),
            counters: Counters::of(&self.socket),
        };
        let _ = self.socket.close(Sink::Nobody);
        contexts.keep(plan, self.slots);
        Ok(received)
    }
}

/// Compares the received bytes with the sent ones.
fn verify(seed: u64, offset: u64, memory: &Memory, len: usize) -> Result<()> {
    let mut expected = vec![0; len];
    pattern(seed, offset, &mut expected);
    let got = match memory {
        Memory::Region { region, off, .. } => {
            let mut got = vec![0; len];
            region
                .read(*off, &mut got)
                .map_err(stack("read contents"))?;
            got
        }
        other => other.to_vec(),
    };
    let wrong = expected
        .iter()
        .zip(&got)
        .position(|(left, right)| left != right);
    match wrong {
        None if got.len() >= len => Ok(()),
        _ => Err(BenchError::Contents(
            offset + wrong.unwrap_or(got.len()) as u64,
        )),
    }
}

const LOST: BenchError = BenchError::Lost;

#[cfg(test)]
mod tests {
    use super::super::plan::Lengths;
    use super::*;

    #[test]
    fn a_run_begins_what_its_plan_says() {
        let begun = |amount, warm_up| {
            let plan = Plan {
                lengths: Lengths::Fixed(10),
                amount,
                warm_up,
                ..Plan::default()
            };
            let mut rest = Rest::of(&plan);
            std::iter::from_fn(|| rest.next(|| Duration::ZERO)).collect::<Vec<_>>()
        };
        assert_eq!(begun(Amount::Messages(2), 0), [(0, 10), (10, 10)]);
        assert_eq!(begun(Amount::Bytes(21), 0), [(0, 10), (10, 10), (20, 10)]);
        // Two messages are the warm-up.
        let warmed = begun(Amount::Messages(1), 11);
        assert_eq!(warmed, [(0, 10), (10, 10), (20, 10)]);
    }

    #[test]
    fn wrong_contents_are_found() {
        let mut bytes = vec![0; 1000];
        pattern(9, 77, &mut bytes);
        verify(9, 77, &Memory::Owned(bytes.clone()), 1000).unwrap();
        verify(9, 77, &Memory::Owned(bytes.clone()), 999).unwrap();
        let error = verify(9, 77, &Memory::Owned(bytes.clone()), 1001).unwrap_err();
        assert!(matches!(error, BenchError::Contents(1077)));
        bytes[10] ^= 1;
        let error = verify(9, 77, &Memory::Owned(bytes), 1000).unwrap_err();
        assert!(matches!(error, BenchError::Contents(87)));
    }
}
