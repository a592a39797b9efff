//! The sending side of one connection, over any [`Link`].
//!
//! The calling thread reads files into free slots and receives the peer's answers; a second one moves
//! filled slots over the wire in order. So disk reads, the wire and the peer's disk writes overlap.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use indicatif::HumanBytes;
use weft_verbs::Path;

use super::auth::{Challenge, Key, Role};
use super::link::{Link, LinkError, Parcel};
use super::opener::Opener;
use super::pace::Pace;
use super::path::printable;
use super::protocol::{
    ASKS, Code, Digest, FileFlags, Held, Hello, KEEPALIVE, Message, Meta, RelPath, RingAdvert,
    WINDOW, pack,
};
use super::walk::{Entry, FileId, Kind, Plan};
use super::{START_PATIENCE, cpu_time};

mod content;

/// The options of a sender.
#[derive(Debug, Clone)]
pub struct Options {
    /// The shared key, if the receiver has to prove one.
    pub key: Option<Key>,
    /// Treatment of files that are there already, and fsync.
    pub flags: FileFlags,
    /// Leave a file alone that the receiver has in the same version.
    pub update: bool,
    /// Keep owners, special mode bits, extended attributes and hard links.
    pub archive: bool,
    /// Send nothing, and say what would be sent.
    pub dry_run: bool,
    /// The most bytes of content a second.
    pub limit_rate: Option<u64>,
    /// How long the receiver may stay silent.
    pub patience: Duration,
}

/// Something that shows progress.
pub trait Progress {
    /// So many more bytes are in the receiver's files: over the wire, or found there (`held`).
    fn advance(&mut self, bytes: u64, held: bool);
    /// A line for the user.
    fn note(&mut self, line: &str);
    /// An entry cannot be sent.
    fn failed(&mut self, entry: &Entry, why: &str) {
        self.note(&format!("{}: {why}", shown(&entry.source)));
    }
    /// What would be done with an entry that goes to `path`.
    fn would(&mut self, what: &str, path: &RelPath);
    /// The sum of what would be done.
    fn planned(&mut self, report: &Report);
}

/// An entry without a RESULT.
struct Open {
    /// Its name in messages.
    source: PathBuf,
    /// Directories are not counted.
    counted: bool,
    /// Its sent bytes.
    bytes: u64,
    /// It is alone, or the last of a pack.
    last: bool,
    /// The file, if it has other names.
    file: Option<FileId>,
    /// Not all of its attributes are sent.
    is_partial: bool,
}

/// Small files in a slot that is being filled.
struct Packing {
    slot: u16,
    /// The entry of the first file.
    first: u32,
    count: u16,
    /// Bytes of the slot, and bytes of content in them.
    len: u32,
    content: u32,
}

/// The result of the transfer.
#[derive(Debug, Clone, Default)]
pub struct Report {
    /// Files and links written.
    pub written: u64,
    /// Files that were there already and were left alone.
    pub kept: u64,
    /// Entries that failed.
    pub failed: u64,
    /// Of the written entries, those without all that an archive keeps.
    pub partial: u64,
    /// Bytes that were sent of these files and links.
    pub bytes: u64,
    /// Bytes that were there from an earlier transfer.
    pub held: u64,
    /// Bytes of holes, which were not sent.
    pub holes: u64,
    /// CPU time of the receiver's process during the session, as it says.
    pub peer_cpu: Duration,
    /// Its transport.
    pub path: Option<Path>,
    /// Its cipher, if it was encrypted.
    pub cipher: Option<&'static str>,
}

impl Report {
    /// What a dry run has found.
    pub fn planned(&self) -> String {
        let kept = match self.kept {
            0 => String::new(),
            kept => format!("; {kept} left alone"),
        };
        let (count, bytes) = (files(self.written), HumanBytes(self.bytes));
        format!("dry run: {count}, {bytes} would be sent{kept}")
    }
}

/// A number of files in words.
pub fn files(count: u64) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} file{plural}")
}

/// Why a transfer ended early.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SendError {
    /// The connection failed.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The receiver refused to go on.
    #[error("the receiver says: {text}")]
    Refused {
        /// Why.
        code: Code,
        /// In words.
        text: String,
    },
    /// The receiver could not prove that it has the key.
    #[error("the receiver does not have the key")]
    Impostor,
}

fn shown(path: &std::path::Path) -> String {
    printable(path.as_os_str().as_bytes())
}

/// Parcels that are handed to the wire thread together, at most.
const BATCH: usize = 24;
/// A block from this length on is handed over at once: the wire need not wait for the next.
const LARGE: u32 = 64 << 10;

/// Proves the key both ways, then sends everything in `plan`.
pub fn send(
    link: &dyn Link,
    ours: &Hello,
    theirs: &Hello,
    plan: &Plan,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Report, SendError> {
    let result = start(link, ours, theirs, options.key.as_ref(), false).and_then(|peer| {
        if peer.ring.slots == 0 {
            return Err(LinkError::Violation("a ring without slots".into()).into());
        }
        link.use_ring(peer.ring)?;
        send_all(link, peer, plan, options, progress)
    });
    link.close();
    result
}

/// What a sender knows of a receiver.
#[derive(Debug, Clone, Copy)]
pub struct Peer {
    /// Its ring.
    pub ring: RingAdvert,
    /// Whether it gives files their attributes.
    pub attributes: bool,
}

/// Sends everything in `plan` to a receiver whose ring is in use.
pub fn send_all(
    link: &dyn Link,
    peer: Peer,
    plan: &Plan,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Report, SendError> {
    let path = link.path();
    std::thread::scope(|scope| {
        let (out, queue) = channel();
        let pace = options.limit_rate.map(Pace::new);
        let wire = scope.spawn(move || drive(link, &queue, pace));
        let mut sender = Sending::new(link, out, peer, options, progress);
        let sent = sender.all(plan);
        let report = Report {
            path: Some(path),
            cipher: link.cipher(),
            ..sender.report
        };
        drop(sender.out);
        if sent.is_err() {
            link.close();
        }
        let wired = wire
            .join()
            .unwrap_or_else(|_| Err(LinkError::Local("the wire thread panicked".into())));
        match (sent, wired) {
            (Ok(()), _) => Ok(report),
            // The thread that saw a connection error first has the better message.
            (Err(SendError::Link(LinkError::Gone(_))), Err(e)) => Err(e.into()),
            (Err(e), _) => Err(e),
        }
    })
}

/// The initiator's first message, and the answer.
pub(super) fn start(
    link: &dyn Link,
    ours: &Hello,
    theirs: &Hello,
    key: Option<&Key>,
    fetches: bool,
) -> Result<Peer, SendError> {
    let about = Challenge {
        initiator: ours.nonce,
        responder: theirs.nonce,
        binding: link.binding(),
    };
    let proof = key.map_or([0; 32], |k| k.prove(Role::Initiator, &about));
    link.send(&Message::Start {
        receives: link.receives(),
        fetches,
        proof,
    })?;
    match link
        .recv(START_PATIENCE)?
        .ok_or_else(|| LinkError::Gone("the receiver never answered".into()))?
    {
        Message::Ready {
            receives,
            attributes,
            ring,
            proof,
        } => {
            if let Some(key) = key
                && !key.verify(Role::Responder, &about, &proof)
            {
                return Err(SendError::Impostor);
            }
            link.set_peer_receives(receives);
            Ok(Peer { ring, attributes })
        }
        Message::Refuse { code, text } => Err(SendError::Refused { code, text }),
        _ => Err(LinkError::Violation("the first answer is not READY".into()).into()),
    }
}

/// The wire thread: sends in order, and a sign of life when there is nothing to send.
fn drive(
    link: &dyn Link,
    queue: &Receiver<Vec<Parcel>>,
    mut pace: Option<Pace>,
) -> Result<(), LinkError> {
    loop {
        let sent = match queue.recv_timeout(KEEPALIVE) {
            Ok(parcels) => match &mut pace {
                Some(pace) => pace.send_all(link, &parcels),
                None => link.send_all(&parcels),
            },
            Err(RecvTimeoutError::Timeout) => link.keepalive(),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        };
        if let Err(e) = sent {
            link.close();
            return Err(e);
        }
    }
}

/// The reason why one file was given up; the transfer continues with the next.
enum FileError {
    /// A local error; the receiver has to be told.
    Here(String),
    /// The receiver has sent the reason instead of an offer: it has forgotten the file already.
    Declined,
    /// The receiver has sent the reason, and drops the rest of the file.
    There,
    Fatal(SendError),
}

impl From<SendError> for FileError {
    fn from(e: SendError) -> Self {
        Self::Fatal(e)
    }
}

struct Sending<'a> {
    link: &'a dyn Link,
    out: Sender<Vec<Parcel>>,
    /// Parcels that were not handed over yet: see [`Sending::flush`].
    pending: Vec<Parcel>,
    ring: RingAdvert,
    options: &'a Options,
    progress: &'a mut dyn Progress,
    free: Vec<u16>,
    /// Bytes of the file that each slot in use stands for.
    in_use: Vec<Option<u64>>,
    /// Whether attributes are sent to a receiver that gives them to its files.
    gives_attributes: bool,
    /// The first of a file's names, and its entry if it was sent.
    first_names: HashMap<FileId, (Option<u32>, RelPath)>,
    /// Files whose first name is there.
    linkable: HashSet<FileId>,
    next_id: u32,
    /// Entries without a RESULT.
    open: HashMap<u32, Open>,
    /// The number of parcels and of packs.
    window: usize,
    pack: Option<Packing>,
    /// Of the plan's entries, so many have been asked for, where those that are there are left alone.
    asked: usize,
    /// Questions without an answer, with the number of names in each.
    asks: VecDeque<usize>,
    /// Answers for entries that come next.
    held: VecDeque<Held>,
    offer: Option<(u32, u64, Digest)>,
    done: bool,
    report: Report,
}

impl<'a> Sending<'a> {
    fn new(
        link: &'a dyn Link,
        out: Sender<Vec<Parcel>>,
        Peer { ring, attributes }: Peer,
        options: &'a Options,
        progress: &'a mut dyn Progress,
    ) -> Self {
        Self {
            link,
            out,
            pending: Vec::new(),
            ring,
            options,
            progress,
            free: (0..ring.slots).rev().collect(),
            in_use: vec![None; usize::from(ring.slots)],
            gives_attributes: options.archive && attributes,
            first_names: HashMap::new(),
            linkable: HashSet::new(),
            next_id: 0,
            open: HashMap::new(),
            window: 0,
            pack: None,
            asked: 0,
            asks: VecDeque::new(),
            held: VecDeque::new(),
            offer: None,
            done: false,
            report: Report::default(),
        }
    }

    fn all(&mut self, plan: &Plan) -> Result<(), SendError> {
        let mut opener = Opener::new(plan);
        self.report.partial = plan.partial;
        if self.options.archive && !self.gives_attributes {
            self.report.partial = 0;
            self.progress.note(
                "the receiver keeps no owners, special mode bits and extended attributes\n  try: start it with --attributes",
            );
        }
        for entry in &plan.entries {
            let held = if self.is_asked_for(entry) {
                self.next_held(plan)?
            } else {
                Held::Nothing
            };
            if self.options.dry_run {
                self.would(entry, held);
            } else if self.leaves_alone(entry, held) {
                self.kept(&entry.source, "it is there already");
                if let Kind::File(version) = entry.kind {
                    self.progress.advance(version.size, true);
                }
                if entry.has_names && held == Held::Same && self.options.update {
                    self.linkable.insert(entry.id);
                    let name = (None, entry.path.clone());
                    self.first_names.insert(entry.id, name);
                }
            } else {
                self.entry(entry, &mut opener)?;
            }
        }
        self.end_pack()?;
        if self.options.dry_run {
            self.progress.planned(&self.report);
        }
        self.post(Message::Done {
            cpu_us: cpu_time().as_micros() as u64,
        })?;
        while !self.done {
            self.pump()?;
        }
        if self.open.is_empty() {
            Ok(())
        } else {
            Err(LinkError::Violation("DONE came before all results".into()).into())
        }
    }

    /// Whether the receiver is asked about this entry before it is sent.
    fn is_asked_for(&self, entry: &Entry) -> bool {
        let options = self.options;
        match entry.kind {
            Kind::File(_) => options.dry_run || options.update || options.flags.no_clobber,
            Kind::Link(..) => options.dry_run || options.flags.no_clobber,
            Kind::Enter => options.dry_run,
            Kind::Leave(_) => false,
        }
    }

    /// Whether what the receiver has is not to be replaced.
    fn leaves_alone(&self, entry: &Entry, held: Held) -> bool {
        let flags = self.options.flags;
        match held {
            Held::Same => self.options.update || flags.no_clobber,
            Held::Other => flags.no_clobber && !matches!(entry.kind, Kind::Enter),
            Held::Nothing | Held::Directory => false,
        }
    }

    /// Says what would be done with an entry, and counts it.
    fn would(&mut self, entry: &Entry, held: Held) {
        let size = match entry.kind {
            Kind::File(version) => version.size,
            Kind::Enter | Kind::Leave(_) | Kind::Link(..) => 0,
        };
        let leaves_alone = self.leaves_alone(entry, held);
        let report = &mut self.report;
        let what = match (&entry.kind, held) {
            (Kind::Leave(_), _) | (Kind::Enter, Held::Directory) => return,
            (Kind::Enter, Held::Nothing) => "make the directory",
            (Kind::Enter, _) => {
                report.failed += 1;
                "not possible, no directory has the name"
            }
            (_, Held::Directory) => {
                report.failed += 1;
                "not possible, a directory has the name"
            }
            _ if leaves_alone => {
                report.kept += 1;
                "leave alone"
            }
            _ => {
                report.written += 1;
                report.bytes += size;
                if held == Held::Nothing {
                    "send"
                } else {
                    "replace"
                }
            }
        };
        self.progress.would(what, &entry.path);
    }

    /// What the receiver has of the next entry's name. Asks for many at once, and for more while answers are in flight.
    fn next_held(&mut self, plan: &Plan) -> Result<Held, SendError> {
        while self.asks.len() < ASKS && self.asked < plan.entries.len() {
            let mut names = pack::Names::default();
            let rest = &plan.entries[self.asked..];
            let fits = |entry: &&Entry| {
                let version = match entry.kind {
                    Kind::File(version) if self.options.update => Some(version),
                    _ => None,
                };
                !self.is_asked_for(entry) || names.add(&entry.path, version)
            };
            let count = rest.iter().take_while(fits).count();
            self.asked += count;
            let names = names.take();
            if !names.is_empty() {
                self.asks.push_back(names.len());
                self.post(Message::Ask { names })?;
            }
        }
        loop {
            match self.held.pop_front() {
                Some(held) => return Ok(held),
                None => self.pump()?,
            }
        }
    }

    fn kept(&mut self, source: &std::path::Path, why: &str) {
        self.report.kept += 1;
        tracing::info!("{}: left alone: {why}", source.display());
    }

    /// Begins an entry that is not in a pack.
    fn begin(&mut self, entry: &Entry, counted: bool) -> Result<u32, SendError> {
        self.end_pack()?;
        while self.window >= WINDOW {
            self.pump()?;
        }
        self.window += 1;
        Ok(self.open(entry, counted, true))
    }

    fn entry(&mut self, entry: &Entry, opener: &mut Opener<'_>) -> Result<(), SendError> {
        let path = entry.path.clone();
        match &entry.kind {
            Kind::File(version) if entry.has_names && self.hard_link(entry)? => {
                self.progress.advance(version.size, true);
            }
            Kind::File(_) => match self.file(entry, opener) {
                Ok(()) | Err(FileError::Declined | FileError::There) => {}
                Err(FileError::Here(why)) => self.fail(entry, &why),
                Err(FileError::Fatal(e)) => return Err(e),
            },
            Kind::Enter => {
                let id = self.begin(entry, false)?;
                self.post(Message::Directory {
                    id,
                    leave: false,
                    meta: Meta::default(),
                    path,
                })?;
            }
            Kind::Leave(meta) => {
                let id = self.begin(entry, false)?;
                let meta = self.sent_meta(meta);
                self.post(Message::Directory {
                    id,
                    leave: true,
                    meta,
                    path,
                })?;
            }
            Kind::Link(meta, target) => {
                let id = self.begin(entry, true)?;
                let (flags, meta) = (self.link_flags(), self.sent_meta(meta));
                self.post(Message::Link {
                    id,
                    flags,
                    meta,
                    target: target.clone(),
                    path,
                })?;
            }
        }
        Ok(())
    }

    /// Flags of an entry without content.
    fn link_flags(&self) -> FileFlags {
        FileFlags {
            no_wait: false,
            sync: false,
            ..self.options.flags
        }
    }

    /// What the receiver is told of an entry, which is less if it does not make archives.
    fn sent_meta(&self, meta: &Meta) -> Meta {
        if self.gives_attributes {
            return meta.clone();
        }
        Meta {
            mode: meta.mode & 0o777,
            mtime: meta.mtime,
            attributes: None,
        }
    }

    /// Gives a file that was sent by another name this one too; whether there is such a file.
    fn hard_link(&mut self, entry: &Entry) -> Result<bool, SendError> {
        let Some((first, existing)) = self.first_names.get(&entry.id).cloned() else {
            return Ok(false);
        };
        self.end_pack()?;
        while first.is_some_and(|first| self.open.contains_key(&first)) {
            self.pump()?;
        }
        if !self.linkable.contains(&entry.id) {
            return Ok(false);
        }
        let id = self.begin(entry, true)?;
        if let Some(open) = self.open.get_mut(&id) {
            open.is_partial = false;
        }
        self.post(Message::HardLink {
            id,
            flags: self.link_flags(),
            existing,
            path: entry.path.clone(),
        })?;
        Ok(true)
    }

    fn fail(&mut self, entry: &Entry, why: &str) {
        self.report.failed += 1;
        self.progress.failed(entry, why);
    }

    fn open(&mut self, entry: &Entry, counted: bool, last: bool) -> u32 {
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        let source = entry.source.clone();
        let file = entry.has_names.then_some(entry.id);
        // A first name that was not written is of no use.
        if file.is_some() && !self.linkable.contains(&entry.id) {
            let name = (Some(id), entry.path.clone());
            self.first_names.insert(entry.id, name);
        }
        self.open.insert(
            id,
            Open {
                source,
                counted,
                bytes: 0,
                last,
                file,
                is_partial: self.options.archive && !self.gives_attributes && counted,
            },
        );
        id
    }

    /// A slot that the receiver has emptied.
    fn free_slot(&mut self) -> Result<u16, SendError> {
        loop {
            match self.free.pop() {
                Some(slot) => return Ok(slot),
                None => self.pump()?,
            }
        }
    }

    fn post(&mut self, message: Message) -> Result<(), SendError> {
        self.queue(Parcel::Message(message))
    }

    fn queue(&mut self, parcel: Parcel) -> Result<(), SendError> {
        let large = matches!(parcel, Parcel::Block { len, .. } if len >= LARGE);
        self.pending.push(parcel);
        if large || self.pending.len() >= BATCH {
            self.flush()?;
        }
        Ok(())
    }

    /// Hands pending parcels to the wire thread: before each wait, because the wait may be for their answer.
    fn flush(&mut self) -> Result<(), SendError> {
        if self.pending.is_empty() {
            return Ok(());
        }
        self.out
            .send(std::mem::take(&mut self.pending))
            .map_err(|_| LinkError::Gone("the wire failed".into()).into())
    }

    /// Waits for a message, and processes it and those that have arrived with it.
    fn pump(&mut self) -> Result<(), SendError> {
        self.flush()?;
        let began = Instant::now();
        loop {
            if let Some(message) = self.link.recv(KEEPALIVE.min(self.options.patience))? {
                self.handle(message)?;
                // An offer waits to be taken before the next one can come.
                while self.offer.is_none()
                    && let Some(message) = self.link.heard()
                {
                    self.handle(message)?;
                }
                return Ok(());
            }
            if began.elapsed() >= self.options.patience {
                return Err(LinkError::Gone("the receiver stopped answering".into()).into());
            }
        }
    }

    /// Processes received messages without waiting, because the receiver may have to wait for us otherwise.
    fn drain(&mut self) -> Result<(), SendError> {
        self.flush()?;
        while let Some(message) = self.link.recv(Duration::ZERO)? {
            self.handle(message)?;
        }
        Ok(())
    }

    /// An entry is at the receiver.
    fn arrived(&mut self, open: &Open) {
        self.report.written += u64::from(open.counted);
        self.report.bytes += open.bytes;
        self.report.partial += u64::from(open.is_partial);
        self.linkable.extend(open.file);
    }

    fn handle(&mut self, message: Message) -> Result<(), SendError> {
        let violation = |text: &str| Err(LinkError::Violation(text.into()).into());
        match message {
            Message::Credit => {}
            Message::Free { slot } => {
                let Some(len) = self
                    .in_use
                    .get_mut(usize::from(slot))
                    .and_then(Option::take)
                else {
                    return violation("a slot was freed that is not in use");
                };
                self.free.push(slot);
                self.progress.advance(len, false);
            }
            Message::Offer { id, blocks, digest } => self.offer = Some((id, blocks, digest)),
            Message::Packed { id, count } => {
                for id in (0..u32::from(count)).map(|i| id.wrapping_add(i)) {
                    let Some(open) = self.open.remove(&id) else {
                        return violation("a result for nothing");
                    };
                    self.window -= usize::from(open.last);
                    self.arrived(&open);
                }
            }
            Message::Held { held } => {
                if self.asks.pop_front() != Some(held.len()) {
                    return violation("an answer to no question");
                }
                self.held.extend(held);
            }
            Message::Result { id, code, text } => {
                let Some(mut open) = self.open.remove(&id) else {
                    return violation("a result for nothing");
                };
                self.window -= usize::from(open.last);
                match code {
                    Code::Written => self.arrived(&open),
                    Code::Partly => {
                        open.is_partial = true;
                        self.arrived(&open);
                        tracing::info!("{}: {text}", open.source.display());
                    }
                    Code::Kept => self.kept(&open.source, &text),
                    Code::Abandoned => {}
                    _ => {
                        self.report.failed += 1;
                        self.progress.note(&format!(
                            "{}: the receiver says: {text}{}",
                            shown(&open.source),
                            advice(code)
                        ));
                    }
                }
            }
            Message::Done { cpu_us } => {
                self.report.peer_cpu = Duration::from_micros(cpu_us);
                self.done = true;
            }
            Message::Refuse { code, text } => return Err(SendError::Refused { code, text }),
            _ => return violation("a message that only a sender sends"),
        }
        Ok(())
    }
}

/// Advice to the user for a result.
fn advice(code: Code) -> &'static str {
    match code {
        Code::NoSpace => "\n  try: free some space there, or send to another disk",
        Code::Permission => "\n  try: run the listener as a user who can write there",
        Code::ReadOnly => "\n  try: --force replaces it",
        Code::IsDirectory | Code::NotDirectory => {
            "\n  try: another directory, or move away what is there"
        }
        Code::BadPath => "\n  try: another name",
        Code::LinkOut => "\n  try: make it relative, or start the listener with --any-links",
        Code::Corrupt => "\n  try: send it again; it was damaged on the way or changed meanwhile",
        Code::Busy => "\n  try: again when the other transfer is over",
        _ => "",
    }
}
