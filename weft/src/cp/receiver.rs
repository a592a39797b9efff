//! The receiving side of one connection, over any [`Link`].
//!
//! Two threads: the one that calls `receive_all` receives control messages and checks them, a worker writes
//! slots to files and answers. Disk and wire overlap, and the work that can be queued is bounded by the
//! ring and by [`WINDOW`], which a peer cannot exceed.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::attributes::Left;
use super::auth::{Challenge, Key, Role};
use super::digest::digest;
use super::link::{Link, LinkError, Parcel, write_extents, write_slot};
use super::protocol::pack::Records;
use super::protocol::{
    ASKS, About, Code, Digest, FileSpec, Hello, KEEPALIVE, Message, RelPath, RingAdvert, WINDOW,
};
use super::store::{Incoming, Store, StoreError};
use super::{LOCAL_SLOT_LEN, START_PATIENCE, cpu_time};

/// The options of a receiver.
#[derive(Debug, Clone)]
pub struct Options {
    /// The shared key, if peers have to prove one.
    pub key: Option<Key>,
    /// Slots in each sender's ring.
    pub slots: u16,
    /// Length of a slot in bytes.
    pub slot_len: u32,
    /// The directory whose files initiators may fetch.
    pub serve: Option<PathBuf>,
    /// How long a sender may stay silent.
    pub patience: Duration,
}

/// The result of one connection.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Files written.
    pub files: u64,
    /// Their bytes that came over the wire.
    pub bytes: u64,
    /// Entries that could not be written.
    pub failed: u64,
    /// Entries that were written without some of their attributes.
    pub partial: u64,
    /// Entries that the other side of a fetch leaves out, without an error.
    pub left_out: u64,
    /// Whether the sender proved itself and the transfer began.
    pub started: bool,
    /// Whether the sender has completed.
    pub complete: bool,
    /// The files went to an initiator that fetched them.
    pub fetched: bool,
}

/// The interface to the listener while a connection is served.
pub trait Watch: Sync {
    /// The sender has proved itself, and takes a place; or why there is none.
    fn proved(&self) -> Result<(), &'static str>;
    /// An entry was not written.
    fn entry_failed(&self, path: &str, error: &StoreError);
    /// What the other side of a fetch tells the user.
    fn notice(&self, _about: About, _text: &str) {}
}

/// Receives until the sender is done or has disconnected.
pub(super) fn receive_all(
    link: &dyn Link,
    ring: RingAdvert,
    store: Store,
    options: &Options,
    fetches: bool,
    watch: &dyn Watch,
) -> (Totals, Result<(), LinkError>) {
    let shared = Shared::new(ring.slots);
    shared.count(|t| t.started = true);
    let result = std::thread::scope(|scope| {
        let (jobs, queue) = channel();
        let worker = Worker {
            link,
            store,
            slot_len: ring.slot_len,
            shared: &shared,
            watch,
            current: Current::None,
            answers: Vec::new(),
            since: Instant::now(),
            cpu: cpu_time(),
        };
        let worker = scope.spawn(move || worker.run(&queue));
        let fetching = fetches.then_some(watch);
        let received = receive(link, ring, options.patience, &shared, &jobs, fetching);
        drop(jobs);
        // A worker may wait for credits that no longer come.
        if let Err(e) = &received {
            end(link, e);
        }
        let worked = worker
            .join()
            .unwrap_or_else(|_| Err(LinkError::Local("the writing thread panicked".into())));
        // The worker's reason is the cause when both have one: it closes the link under the other.
        worked.and(received)
    });
    (shared.totals(), result)
}

/// The ring for a sender.
pub(super) fn create_ring(link: &dyn Link, options: &Options) -> Result<RingAdvert, LinkError> {
    let slot_len = match link.path().transport {
        "local" => options.slot_len.min(LOCAL_SLOT_LEN),
        _ => options.slot_len,
    };
    link.create_ring(options.slots, slot_len)
}

/// Ends the connection, and reports a breach of the protocol to the peer.
pub(super) fn end(link: &dyn Link, e: &LinkError) {
    if let LinkError::Violation(text) = e {
        let _ = link.send(&Message::Refuse {
            code: Code::Violation,
            text: text.clone(),
        });
    }
    link.close();
}

/// Reports to a peer that the connection ends here, and the reason.
pub fn refuse(link: &dyn Link, code: Code, text: &str) -> Result<(), LinkError> {
    link.send(&Message::Refuse {
        code,
        text: text.into(),
    })?;
    // The peer reads the refusal and closes; a silent one is not waited for any longer than this.
    let _ = link.recv(Duration::from_secs(1));
    Ok(())
}

/// The first messages: START with the initiator's proof, READY with ours. `None` for an initiator that fetches.
pub(super) fn start(
    link: &dyn Link,
    ours: &Hello,
    theirs: &Hello,
    options: &Options,
    attributes: bool,
    watch: &dyn Watch,
) -> Result<Option<RingAdvert>, LinkError> {
    let first = link
        .recv(START_PATIENCE)?
        .ok_or_else(|| LinkError::Gone("the peer never started".into()))?;
    let Message::Start {
        receives,
        fetches,
        proof,
    } = first
    else {
        return Err(LinkError::Violation(
            "the first message is not START".into(),
        ));
    };
    link.set_peer_receives(receives);
    let about = Challenge {
        initiator: theirs.nonce,
        responder: ours.nonce,
        binding: link.binding(),
    };
    let mut ready_proof = [0; 32];
    if let Some(key) = &options.key {
        if !key.verify(Role::Initiator, &about, &proof) {
            refuse(
                link,
                Code::KeyWrong,
                "the key is not the one that is wanted here",
            )?;
            return Err(LinkError::Gone("the peer does not have the key".into()));
        }
        ready_proof = key.prove(Role::Responder, &about);
    }
    // Only a peer that has proved itself takes a place, and costs the memory of a ring.
    if let Err(text) = watch.proved() {
        refuse(link, Code::Full, text)?;
        return Err(LinkError::Gone(format!("it was turned away: {text}")));
    }
    if fetches && options.serve.is_none() {
        let text = "it gives no files: it was started without --serve DIR";
        refuse(link, Code::NotServed, text)?;
        return Err(LinkError::Gone(
            "it wanted files, and --serve was not given".into(),
        ));
    }
    let created = if fetches {
        Ok(RingAdvert::default())
    } else {
        create_ring(link, options)
    };
    let ring = match created {
        Ok(ring) => ring,
        Err(e) => {
            link.send(&Message::Refuse {
                code: Code::Resources,
                text: e.to_string(),
            })?;
            return Err(e);
        }
    };
    link.send(&Message::Ready {
        receives: link.receives(),
        attributes,
        ring,
        proof: ready_proof,
    })?;
    Ok((!fetches).then_some(ring))
}

/// The state of both threads.
struct Shared {
    /// Slots that hold a block which the worker has not written yet.
    busy: Vec<AtomicBool>,
    /// Entries and packs whose answer has not been sent.
    open: AtomicUsize,
    /// ASKs that have not been answered.
    asks: AtomicUsize,
    /// Jobs that the worker has not finished: it is busy even if it says nothing.
    queued: AtomicUsize,
    totals: Mutex<Totals>,
}

impl Shared {
    fn new(slots: u16) -> Self {
        Self {
            busy: (0..slots).map(|_| AtomicBool::new(false)).collect(),
            open: AtomicUsize::new(0),
            asks: AtomicUsize::new(0),
            queued: AtomicUsize::new(0),
            totals: Mutex::default(),
        }
    }

    fn totals(&self) -> Totals {
        *self
            .totals
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The sender has filled this slot: whether it may.
    fn fill(&self, slot: u16, len: u32, ring: RingAdvert) -> Result<(), &'static str> {
        let Some(busy) = self.busy.get(usize::from(slot)) else {
            return Err("a block outside the ring");
        };
        if len > ring.slot_len {
            return Err("a block longer than a slot");
        }
        if busy.swap(true, Ordering::AcqRel) {
            return Err("a block in a slot that is in use");
        }
        Ok(())
    }

    fn count(&self, f: impl FnOnce(&mut Totals)) {
        f(&mut self
            .totals
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner));
    }
}

/// Receives and checks messages until DONE and the end of the connection.
fn receive(
    link: &dyn Link,
    ring: RingAdvert,
    patience: Duration,
    shared: &Shared,
    jobs: &Sender<Message>,
    fetching: Option<&dyn Watch>,
) -> Result<(), LinkError> {
    let violation = |text: &str| Err(LinkError::Violation(text.into()));
    let mut next_id = 0u32;
    let (mut heard, mut said) = (Instant::now(), Instant::now());
    let mut done = false;
    loop {
        // The worker may be busy for long without a message: checking existing files, fsync.
        if said.elapsed() >= KEEPALIVE && shared.queued.load(Ordering::Acquire) > 0 {
            link.keepalive()?;
            said = Instant::now();
        }
        let message = match link.recv(KEEPALIVE.min(patience)) {
            Ok(Some(message)) => message,
            Ok(None) => {
                if heard.elapsed() >= patience {
                    return Err(LinkError::Gone("the sender stopped answering".into()));
                }
                continue;
            }
            Err(LinkError::Gone(_)) if done && shared.totals().complete => return Ok(()),
            Err(e) => return Err(e),
        };
        heard = Instant::now();
        if done {
            // Only signs of life while the last files are finished.
            if message == Message::Credit {
                continue;
            }
            return violation("a message follows DONE");
        }
        match &message {
            Message::Credit => continue,
            Message::Notice { about, text } => {
                let Some(watch) = fetching else {
                    return violation("a message of a fetch");
                };
                shared.count(|t| {
                    t.failed += u64::from(*about == About::Error);
                    t.left_out += u64::from(*about == About::LeftOut);
                });
                watch.notice(*about, text);
                continue;
            }
            Message::File { id, .. }
            | Message::Directory { id, .. }
            | Message::Link { id, .. }
            | Message::HardLink { id, .. }
            | Message::Pack { id, .. } => {
                if *id != next_id {
                    return violation("an entry out of order");
                }
                let mut entries = 1;
                if let Message::Pack { count, .. } = &message {
                    entries = u32::from(*count);
                }
                next_id = next_id.wrapping_add(entries);
                if shared.open.fetch_add(1, Ordering::AcqRel) >= WINDOW {
                    return violation("more entries than the window allows");
                }
            }
            Message::Ask { .. } => {
                if shared.asks.fetch_add(1, Ordering::AcqRel) >= ASKS {
                    return violation("more questions than may be open");
                }
            }
            // At most one more job for each entry or slot; the worker refuses any that does not fit its state, and
            // the bound below holds whatever a peer sends.
            Message::From { .. }
            | Message::Block { .. }
            | Message::Sparse { .. }
            | Message::Hole { .. }
            | Message::End { .. }
            | Message::Abandon { .. } => {}
            Message::Done { .. } => done = true,
            Message::Refuse { text, .. } => {
                return Err(LinkError::Gone(format!("the sender says: {text}")));
            }
            _ => return violation("a message that only a receiver sends"),
        }
        if let Some((slot, len)) = message.filled() {
            shared
                .fill(slot, len, ring)
                .map_err(|text| LinkError::Violation(text.into()))?;
        }
        if shared.queued.fetch_add(1, Ordering::AcqRel) > 4 * WINDOW + shared.busy.len() {
            return violation("more messages than the window allows");
        }
        if jobs.send(message).is_err() {
            // The worker has ended the connection and has the reason.
            return Ok(());
        }
    }
}

/// The file that blocks go to.
enum Current {
    None,
    /// OFFER is out, FROM has to come.
    Offered(u32, Incoming),
    Open(u32, Incoming),
    /// RESULT with an error was sent; messages that the sender had sent before are dropped.
    Failed(u32),
}

/// The entry that a block or a hole belongs to.
fn content_of(message: &Message) -> Option<u32> {
    match message {
        Message::Block { id, .. } | Message::Sparse { id, .. } | Message::Hole { id, .. } => {
            Some(*id)
        }
        _ => None,
    }
}

/// Answers that are sent together, at most.
const BATCH: usize = 24;
/// How long an answer may wait for others while there is work.
const LATE: Duration = Duration::from_micros(300);

struct Worker<'a> {
    link: &'a dyn Link,
    store: Store,
    slot_len: u32,
    shared: &'a Shared,
    watch: &'a dyn Watch,
    current: Current,
    /// Answers that were not sent yet, and since when there are any.
    answers: Vec<Parcel>,
    since: Instant,
    /// CPU time of the process when the session began.
    cpu: Duration,
}

impl Worker<'_> {
    fn run(mut self, queue: &Receiver<Message>) -> Result<(), LinkError> {
        loop {
            let message = match queue.try_recv() {
                Ok(message) => message,
                Err(_) => match self.flush().map(|()| queue.recv()) {
                    Ok(Ok(message)) => message,
                    Ok(Err(_)) => return Ok(()),
                    Err(e) => return self.give_up(e),
                },
            };
            let done = self.handle(message).and_then(|()| self.flush_late());
            self.shared.queued.fetch_sub(1, Ordering::AcqRel);
            if let Err(e) = done {
                return self.give_up(e);
            }
        }
    }

    fn give_up(&mut self, e: LinkError) -> Result<(), LinkError> {
        if matches!(e, LinkError::Violation(_)) {
            let _ = self.flush();
        }
        end(self.link, &e);
        Err(e)
    }

    /// Has an answer sent with others: no later than when there is nothing else to do.
    fn answer(&mut self, message: Message) {
        if self.answers.is_empty() {
            self.since = Instant::now();
        }
        self.answers.push(Parcel::Message(message));
    }

    fn flush_late(&mut self) -> Result<(), LinkError> {
        let wait =
            self.answers.is_empty() || self.answers.len() < BATCH && self.since.elapsed() < LATE;
        if wait { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> Result<(), LinkError> {
        let answers = std::mem::take(&mut self.answers);
        self.link.send_all(&answers)
    }

    fn handle(&mut self, message: Message) -> Result<(), LinkError> {
        let violation = |text: &str| Err(LinkError::Violation(text.into()));
        if let Message::Ask { names } = &message {
            let held = names.iter().map(|name| self.store.look(name)).collect();
            self.shared.asks.fetch_sub(1, Ordering::AcqRel);
            self.answer(Message::Held { held });
            return Ok(());
        }
        let current = std::mem::replace(&mut self.current, Current::None);
        match (message, current) {
            (
                Message::Pack {
                    id,
                    slot,
                    count,
                    len,
                    digest,
                },
                Current::None,
            ) => self.unpack(id, slot, count, len, &digest)?,
            (Message::File { id, spec }, Current::None) => {
                if spec.flags.no_wait && spec.size > u64::from(self.slot_len) {
                    return violation("a file of several blocks has to wait for its OFFER");
                }
                self.begin_file(id, spec);
            }
            (Message::From { id, block }, Current::Offered(ours, mut file)) if id == ours => {
                match file.start(block) {
                    None => return violation("FROM is neither the offer nor 0"),
                    Some(Ok(())) => self.current = Current::Open(id, file),
                    Some(Err(e)) => self.fail_current(id, file, &e),
                }
            }
            (message, Current::Open(ours, mut file)) if content_of(&message) == Some(ours) => {
                let wrote = self.write(&mut file, &message)?;
                match wrote {
                    Ok(()) => self.current = Current::Open(ours, file),
                    Err(e) => self.fail_current(ours, file, &e),
                }
                self.free_slot_of(&message);
            }
            (message, Current::Failed(ours)) if content_of(&message) == Some(ours) => {
                self.current = Current::Failed(ours);
                self.free_slot_of(&message);
            }
            (Message::End { id, digest }, Current::Open(ours, file)) if id == ours => {
                let path = file.path();
                match self.store.commit(file, &digest) {
                    Ok(left) => self.written(id, &left),
                    Err(e) => self.failed(id, &path, &e),
                }
            }
            (Message::Abandon { id }, Current::Open(ours, file) | Current::Offered(ours, file))
                if id == ours =>
            {
                let error = StoreError {
                    code: Code::Abandoned,
                    text: "the sender gave it up".into(),
                };
                self.failed(id, &file.path(), &error);
            }
            (Message::End { id, .. } | Message::Abandon { id }, Current::Failed(ours))
                if id == ours => {}
            (
                Message::Directory {
                    id,
                    leave,
                    meta,
                    path,
                },
                Current::None,
            ) => {
                let made = if leave {
                    self.store.leave_directory(&path, &meta)
                } else {
                    self.store.enter_directory(&path).map(|()| Left::default())
                };
                self.told(id, &path, made, Self::done);
            }
            (
                Message::Link {
                    id,
                    flags,
                    meta,
                    target,
                    path,
                },
                Current::None,
            ) => {
                let made = self.store.make_link(&path, &target, flags, &meta);
                self.told(id, &path, made, Self::written);
            }
            (
                Message::HardLink {
                    id,
                    flags,
                    existing,
                    path,
                },
                Current::None,
            ) => {
                let made = self.store.make_hard_link(&existing, &path, flags);
                self.told(id, &path, made.map(|()| Left::default()), Self::written);
            }
            (Message::Done { .. }, Current::None) => {
                self.shared.count(|t| t.complete = true);
                self.answer(Message::Done {
                    cpu_us: cpu_time().saturating_sub(self.cpu).as_micros() as u64,
                });
            }
            _ => return violation("a message that does not fit the state of the file"),
        }
        Ok(())
    }

    /// A file begins: opened, and offered unless its blocks come without being asked for.
    fn begin_file(&mut self, id: u32, spec: FileSpec) {
        let (no_wait, path) = (spec.flags.no_wait, spec.path.to_string());
        match self.store.begin(spec, self.slot_len) {
            Ok(file) if no_wait => self.current = Current::Open(id, file),
            Ok(mut file) => match file.offer() {
                Ok((blocks, digest)) => {
                    self.answer(Message::Offer { id, blocks, digest });
                    self.current = Current::Offered(id, file);
                }
                Err(e) => self.failed(id, &path, &e),
            },
            Err(e) => {
                self.failed(id, &path, &e);
                if no_wait {
                    self.current = Current::Failed(id);
                }
            }
        }
    }

    /// Reports an entry without contents.
    fn told(
        &mut self,
        id: u32,
        path: &RelPath,
        made: Result<Left, StoreError>,
        good: fn(&mut Self, u32, &Left),
    ) {
        match made {
            Ok(left) => good(self, id, &left),
            Err(e) => self.failed(id, &path.to_string(), &e),
        }
    }

    /// Writes the files of a pack. An error ends the connection.
    fn unpack(
        &mut self,
        first: u32,
        slot: u16,
        count: u16,
        len: u32,
        expected: &Digest,
    ) -> Result<(), LinkError> {
        let mut bytes = vec![0; len as usize];
        let copied = self.link.slot_to_buf(slot, 0, &mut bytes);
        self.free(slot);
        let ids = (0..u32::from(count)).map(|i| first.wrapping_add(i));
        let wrong = match copied {
            Ok(()) if digest(&bytes) == *expected => None,
            Ok(()) => Some(StoreError {
                code: Code::Corrupt,
                text: "the checksum of a pack of small files does not match".into(),
            }),
            Err(e) => Some(StoreError::io("cannot read the slot", &e)),
        };
        let mut records = Records::new(&bytes);
        // Files that were written one after the other are reported together.
        let (mut from, mut written) = (first, 0);
        for id in ids {
            let outcome = if let Some(e) = &wrong {
                Err(("a small file".into(), e.clone()))
            } else {
                let (spec, content) = records
                    .read()
                    .map_err(|e| LinkError::Violation(format!("in a pack: {e}")))?;
                let path = spec.path.clone();
                let put = self.store.put(spec, content);
                put.map(|left| (content.len(), left))
                    .map_err(|e| (path.to_string(), e))
            };
            match outcome {
                Ok((len, left)) => {
                    self.shared.count(|t| {
                        t.files += 1;
                        t.bytes += len as u64;
                    });
                    if left.is_empty() {
                        written += 1;
                    } else {
                        self.packed(from, written);
                        let message = self.good(id, &left);
                        self.answer(message);
                        (from, written) = (id.wrapping_add(1), 0);
                    }
                }
                Err((path, e)) => {
                    self.packed(from, written);
                    self.not_written(id, &path, &e);
                    (from, written) = (id.wrapping_add(1), 0);
                }
            }
        }
        if wrong.is_none() {
            records
                .end()
                .map_err(|e| LinkError::Violation(format!("in a pack: {e}")))?;
        }
        self.shared.open.fetch_sub(1, Ordering::AcqRel);
        self.packed(from, written);
        Ok(())
    }

    fn packed(&mut self, id: u32, count: u16) {
        if count > 0 {
            self.answer(Message::Packed { id, count });
        }
    }

    /// Writes a block from its slot and checks the written bytes, or leaves a hole; the outer error ends the connection.
    fn write(
        &self,
        file: &mut Incoming,
        message: &Message,
    ) -> Result<Result<(), StoreError>, LinkError> {
        let out_of_order =
            || LinkError::Violation("a block that is not the next one of its file".into());
        let (index, digest, in_slot, wrote) = match message {
            Message::Block {
                slot,
                index,
                len,
                digest,
                ..
            } => {
                let (fd, at) = file.expect(*index, *len).ok_or_else(out_of_order)?;
                let wrote = write_slot(self.link, *slot, fd, at, *len);
                (index, digest, *len, wrote)
            }
            Message::Sparse {
                slot,
                index,
                len,
                digest,
                extents,
                ..
            } => {
                let (fd, at) = file.expect(*index, *len).ok_or_else(out_of_order)?;
                let wrote = write_extents(self.link, *slot, fd, at, *len, extents);
                let in_slot = extents.iter().map(|extent| extent.len).sum();
                (index, digest, in_slot, wrote)
            }
            Message::Hole { index, blocks, .. } => {
                return file.hole(*index, *blocks).ok_or_else(out_of_order);
            }
            _ => return Err(out_of_order()),
        };
        // A wrong block is in the file then, and not in its journal.
        match wrote {
            Ok(written) if written == *digest => {}
            Ok(_) => {
                return Ok(Err(StoreError {
                    code: Code::Corrupt,
                    text: format!("the checksum of block {index} does not match"),
                }));
            }
            Err(e) => return Ok(Err(StoreError::io("cannot write", &e))),
        }
        self.shared.count(|t| t.bytes += u64::from(in_slot));
        Ok(file.written(digest))
    }

    fn free_slot_of(&mut self, message: &Message) {
        if let Some((slot, _)) = message.filled() {
            self.free(slot);
        }
    }

    fn fail_current(&mut self, id: u32, file: Incoming, e: &StoreError) {
        self.failed(id, &file.path(), e);
        // A full disk should not stay full because of a file that cannot be finished.
        if e.code == Code::NoSpace {
            file.discard();
        }
        self.current = Current::Failed(id);
    }

    fn free(&mut self, slot: u16) {
        // Before the message, because the sender may use the slot as soon as it gets it.
        self.shared.busy[usize::from(slot)].store(false, Ordering::Release);
        self.answer(Message::Free { slot });
    }

    fn written(&mut self, id: u32, left: &Left) {
        self.shared.count(|t| t.files += 1);
        self.done(id, left);
    }

    fn failed(&mut self, id: u32, path: &str, e: &StoreError) {
        self.shared.open.fetch_sub(1, Ordering::AcqRel);
        self.not_written(id, path, e);
    }

    fn not_written(&mut self, id: u32, path: &str, e: &StoreError) {
        if e.code != Code::Kept {
            self.shared.count(|t| t.failed += 1);
            self.watch.entry_failed(path, e);
        }
        self.answer(Message::Result {
            id,
            code: e.code,
            text: e.text.clone(),
        });
    }

    fn done(&mut self, id: u32, left: &Left) {
        self.shared.open.fetch_sub(1, Ordering::AcqRel);
        let message = self.good(id, left);
        self.answer(message);
    }

    /// The answer for an entry that was written.
    fn good(&self, id: u32, left: &Left) -> Message {
        let (code, text) = if left.is_empty() {
            (Code::Written, String::new())
        } else {
            self.shared.count(|t| t.partial += 1);
            (Code::Partly, left.to_string())
        };
        Message::Result { id, code, text }
    }
}
