//! A viewer's connection: it requests a title, and fetches parts of it by RDMA Reads.

mod known;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use weft_verbs::cm::{self, ConnectError};
use weft_verbs::tls::{Tls, TlsError};
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, Qp, QpInit, RecvWr, RemoteAddr, Rnr, SendWr, Wc, WcOpcode, WcStatus,
};

use crate::viewers::{READS, param};
use crate::wire::{
    self, ASKS, Answer, Ask, Content, Denial, Grant, NOTICE_LEN, Notice, Refusal, Request,
    WORD_LEN, WireError,
};
use known::{Known, Target};

/// Shortest Read in bytes, but for the end of a title (thesis 6.4.1).
pub const MIN_READ: u32 = 8 << 10;
/// The default length of a Read.
pub const READ: u32 = 128 << 10;
/// The default number of outstanding Reads.
pub const DEPTH: u16 = 8;
/// Receives for notices, and for answers.
const RECEIVES: u64 = 32;
/// The first Read after a seek is short, because its bytes are shown first.
const FIRST: u32 = 32 << 10;

/// Why there is no viewer.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is no connection.
    #[error(transparent)]
    Connect(ConnectError),
    /// The server says no.
    #[error("{}", .0.text())]
    Refused(Refusal),
    /// The server speaks another protocol.
    #[error("what listens there speaks iWARP and is not `weft media`: {0}")]
    Protocol(WireError),
    /// A resource is missing here.
    #[error("{0}")]
    Local(String),
}

/// Why a title cannot be fetched any further.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ViewError {
    /// The connection ended; the text says how as far as known.
    #[error("the connection ended: {0}")]
    Gone(String),
    /// Nothing came for so long.
    #[error("the server did not answer for {} s", .0.as_secs())]
    Stalled(Duration),
    /// The server does not give a part of the movie. The connection goes on.
    #[error("{}", .0.text())]
    Denied(Denial),
    /// The server sent what cannot be.
    #[error("the server broke the protocol: {0}")]
    Violation(&'static str),
    /// A resource is missing here.
    #[error("{0}")]
    Local(String),
}

/// The parameters of a connection.
#[derive(Clone)]
pub struct Dial {
    /// The server's address.
    pub addr: SocketAddr,
    /// By TLS; `None` in the clear.
    pub tls: Option<Tls>,
    /// Bytes of a Read, at least [`MIN_READ`].
    pub read: u32,
    /// Reads outstanding at once, 1 to [`READS`].
    pub depth: u16,
    /// The time limit for a connection, and then for each Read.
    pub patience: Duration,
}

impl Dial {
    /// With the usual Reads.
    pub fn new(addr: SocketAddr, tls: Option<Tls>) -> Self {
        Self {
            addr,
            tls,
            read: READ,
            depth: DEPTH,
            patience: Duration::from_secs(30),
        }
    }
}

/// A connection to a server that has granted a title.
pub struct Viewer {
    // Dropped first, because the connection uses the memory.
    qp: Qp,
    cq: Cq,
    /// A slot for each Read, and one for the piece that is being looked at; of a movie in blocks, also for pieces whose words are being read.
    slots: Mr,
    /// For a movie in blocks, a word for each slot: the generation after the Read.
    words: Mr,
    notices: Mr,
    slot_len: u32,
    /// Reads of bytes outstanding at once.
    depth: usize,
    count: u64,
    /// Slots used, in all.
    used: u64,
    grant: Grant,
    /// Of a movie in blocks.
    known: Option<Known>,
    patience: Duration,
    /// Reads posted, and complete, in all.
    posted: u64,
    done: u64,
    /// The end of the last range that was read completely.
    reached: u64,
    /// How often a block was taken away before it was read.
    lost: u64,
    inbox: VecDeque<Notice>,
    end: Option<ViewError>,
    opened: Instant,
    _pd: Pd,
}

/// Bytes that have come: a Read's slot, until the next piece is asked for.
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    slot: usize,
    /// Their offset in the title.
    pub offset: u64,
    /// Their number.
    pub len: u32,
}

fn local(e: impl std::fmt::Display) -> OpenError {
    OpenError::Local(e.to_string())
}

impl Viewer {
    /// Connects and asks.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(device: &Device, dial: &Dial, request: &Request) -> Result<Self, OpenError> {
        let pd = device.alloc_pd().map_err(local)?;
        let slot_len = dial.read.max(MIN_READ);
        let depth = dial.depth.clamp(1, READS);
        let cq = device
            .create_cq(4 * (u32::from(depth) + RECEIVES as u32), None)
            .map_err(local)?;
        let notices = pd
            .alloc_mr(RECEIVES as usize * NOTICE_LEN, Access::LOCAL_WRITE)
            .map_err(local)?;
        let init = QpInit {
            // Reads of bytes, and for twice as many slots those of words.
            max_send_wr: 3 * (u32::from(depth) + 1) + ASKS,
            max_recv_wr: RECEIVES as u32,
            max_sge: 1,
            // A notice that finds no receive waits: it is a slow viewer's, and no reason to end.
            rnr: Rnr::Wait,
            ..QpInit::new(&cq, &cq)
        };
        let qp = pd.create_qp(&init).map_err(local)?;
        // The peer has no business in our memory.
        qp.set_access(Access::empty());
        let receives: Vec<_> = (0..RECEIVES).map(|i| receive(&notices, i)).collect();
        qp.post_recv(&receives).map_err(local)?;
        let param = param(dial.tls.clone(), request.encode(), dial.patience);
        let connection = match cm::connect_qp(dial.addr, qp, device, &param) {
            Ok(connection) => connection,
            Err(ConnectError::Rejected { private_data }) => {
                return Err(match wire::decode_reply(&private_data) {
                    Ok(Err(refusal)) => OpenError::Refused(refusal),
                    Ok(Ok(_)) => OpenError::Protocol(WireError::Field("status")),
                    Err(e) => OpenError::Protocol(e),
                });
            }
            Err(e) => return Err(OpenError::Connect(e)),
        };
        let grant = match wire::decode_reply(&connection.private_data) {
            Ok(Ok(grant)) => grant,
            Ok(Err(refusal)) => return Err(OpenError::Refused(refusal)),
            Err(e) => return Err(OpenError::Protocol(e)),
        };
        let known = match grant.content {
            Content::Blocks(blocks) => Some(Known::new(grant.at, blocks)),
            _ => None,
        };
        let count = u64::from(depth) * if known.is_some() { 2 } else { 1 } + 1;
        let words = pd
            .alloc_mr((count * WORD_LEN) as usize, Access::LOCAL_WRITE)
            .map_err(local)?;
        let slots = pd
            .alloc_mr(count as usize * slot_len as usize, Access::LOCAL_WRITE)
            .map_err(local)?;
        Ok(Self {
            known,
            qp: connection.qp,
            cq,
            slots,
            words,
            notices,
            slot_len,
            depth: depth.into(),
            count,
            used: 0,
            grant,
            patience: dial.patience,
            posted: 0,
            done: 0,
            reached: 0,
            lost: 0,
            inbox: VecDeque::new(),
            end: None,
            opened: Instant::now(),
            _pd: pd,
        })
    }

    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// The time since the title was granted.
    pub fn age(&self) -> Duration {
        self.opened.elapsed()
    }

    /// How often a block of the movie was taken away before it was read, and asked for again.
    pub fn lost_blocks(&self) -> u64 {
        self.lost
    }

    /// The transport of the connection: `local`, `tcp` or `tls`.
    pub fn transport(&self) -> &'static str {
        self.qp.path().map_or("tcp", |path| path.transport)
    }

    /// The pieces of a range of the title, in order; a range past the end is cut there.
    pub fn range(&mut self, from: u64, to: u64) -> Range<'_> {
        let end = to.min(self.grant.len);
        Range {
            next: from.min(end),
            end,
            waiting: VecDeque::new(),
            seek: from != self.reached,
            first: true,
            again: None,
            viewer: self,
        }
    }

    /// A copy of a range of the title, which must lie within it.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn fetch(&mut self, from: u64, len: usize) -> Result<Vec<u8>, ViewError> {
        let mut out = Vec::with_capacity(len);
        let mut range = self.range(from, from.saturating_add(len as u64));
        while let Some(piece) = range.next()? {
            range.append(&piece, &mut out)?;
        }
        if out.len() == len {
            Ok(out)
        } else {
            Err(ViewError::Violation("a range past the end"))
        }
    }

    /// The bytes of a piece.
    ///
    /// # Errors
    /// [`ViewError::Local`].
    pub fn append(&self, piece: &Piece, out: &mut Vec<u8>) -> Result<(), ViewError> {
        let at = out.len();
        out.resize(at + piece.len as usize, 0);
        let read = self.slots.read(piece.slot, &mut out[at..]);
        read.map_err(|e| ViewError::Local(e.to_string()))
    }

    /// The next notice of a live server; `None` when none comes for so long.
    ///
    /// # Errors
    /// [`ViewError`].
    pub fn notice(&mut self, timeout: Duration) -> Result<Option<Notice>, ViewError> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(notice) = self.inbox.pop_front() {
                return Ok(Some(notice));
            }
            if !self.pump(Some(deadline))? {
                return Ok(None);
            }
        }
    }

    /// The next slot, and a Read into it of at most its length.
    fn read(&mut self, (offset, len): (u64, u32), target: Option<&Target>) -> (usize, SendWr) {
        let slot = (self.used % self.count) as usize * self.slot_len as usize;
        let remote = target.map_or_else(
            || RemoteAddr {
                addr: self.grant.at.addr + offset,
                rkey: self.grant.at.rkey,
            },
            |target| target.remote,
        );
        let sge = self.slots.sge(slot, len as usize);
        let read = SendWr::read(self.used, remote).sge(sge).signaled();
        self.used += 1;
        (slot, read)
    }

    /// Where the word of a piece goes.
    fn word_at(&self, piece: &Piece) -> usize {
        piece.slot / self.slot_len as usize * WORD_LEN as usize
    }

    /// Whether a word that was read is that of the bytes that were asked for.
    fn is_there(&self, check: &Check) -> Result<bool, ViewError> {
        let mut word = [0; WORD_LEN as usize];
        let read = self.words.read(check.at, &mut word);
        read.map_err(|e| ViewError::Local(e.to_string()))?;
        Ok(u64::from_be_bytes(word) == check.generation)
    }

    /// Asks for the block of this byte, unless it is known or asked for; nothing of a movie that is not in blocks.
    fn ask(&mut self, offset: u64, ahead: bool) -> Result<(), ViewError> {
        let Some(known) = &mut self.known else {
            return Ok(());
        };
        let block = known.block_of(offset);
        if !known.must_ask(block, ahead) {
            return Ok(());
        }
        let message = Ask { block, ahead }.encode();
        let send = SendWr::send(block).inline(&message).signaled();
        let sent = self.qp.post_send_one(send);
        sent.map_err(|e| self.ended(ViewError::Gone(e.to_string())))
    }

    /// Waits until the server has said where the block of this byte is.
    fn wait_for(&mut self, offset: u64) -> Result<(), ViewError> {
        let deadline = Instant::now() + self.patience;
        if let Some(known) = &mut self.known {
            // That of a range that was given up.
            known.take_denial(known.block_of(offset));
        }
        while let Some(known) = &mut self.known
            && known.find(offset).is_none()
        {
            let block = known.block_of(offset);
            if let Some(why) = known.take_denial(block) {
                return Err(ViewError::Denied(why));
            }
            self.ask(offset, false)?;
            if !self.pump(Some(deadline))? {
                return Err(self.ended(ViewError::Stalled(self.patience)));
            }
        }
        Ok(())
    }

    /// Posts Reads; the caller has seen that there are slots.
    fn post(&mut self, reads: &[SendWr]) -> Result<(), ViewError> {
        match self.qp.post_send(reads) {
            Ok(()) => {
                self.posted += reads.len() as u64;
                Ok(())
            }
            Err(e) => Err(self.ended(ViewError::Gone(e.to_string()))),
        }
    }

    /// Waits until so many Reads are complete.
    fn complete(&mut self, reads: u64) -> Result<(), ViewError> {
        let deadline = Instant::now() + self.patience;
        while self.done < reads {
            if !self.pump(Some(deadline))? {
                return Err(self.ended(ViewError::Stalled(self.patience)));
            }
        }
        Ok(())
    }

    /// Takes completions; false if none has come until the deadline.
    fn pump(&mut self, deadline: Option<Instant>) -> Result<bool, ViewError> {
        if let Some(end) = &self.end {
            return Err(end.clone());
        }
        let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
        let mut wcs = [Wc::default(); 32];
        let got = self
            .cq
            .wait(&mut wcs, left)
            .map_err(|e| ViewError::Local(e.to_string()))?;
        for wc in &wcs[..got] {
            if wc.status != WcStatus::Success {
                let why = self.why(wc);
                return Err(self.ended(why));
            }
            match wc.opcode {
                WcOpcode::Read => self.done += 1,
                WcOpcode::Recv => self.receive(wc).map_err(|e| self.ended(e))?,
                _ => {}
            }
        }
        Ok(got > 0)
    }

    fn receive(&mut self, wc: &Wc) -> Result<(), ViewError> {
        let local = |e: &dyn std::fmt::Display| ViewError::Local(e.to_string());
        let mut bytes = [0; NOTICE_LEN];
        let at = (wc.wr_id % RECEIVES) as usize * NOTICE_LEN;
        self.notices.read(at, &mut bytes).map_err(|e| local(&e))?;
        self.qp
            .post_recv(&[receive(&self.notices, wc.wr_id % RECEIVES)])
            .map_err(|e| local(&e))?;
        let len = (wc.byte_len as usize).min(NOTICE_LEN);
        if let Some(known) = &mut self.known {
            let answer = Answer::decode(&bytes[..len], known.layout());
            let answer = answer.map_err(|_| ViewError::Violation("a malformed answer"))?;
            return known.answered(&answer);
        }
        let notice =
            Notice::decode(&bytes[..len]).map_err(|_| ViewError::Violation("a short notice"))?;
        // A newer one says all that the older ones did.
        self.inbox.clear();
        self.inbox.push_back(notice);
        Ok(())
    }

    fn ended(&mut self, why: ViewError) -> ViewError {
        self.end.get_or_insert(why).clone()
    }

    fn why(&self, wc: &Wc) -> ViewError {
        let text = match (wc.status, self.qp.tls_error()) {
            (_, Some(TlsError::Truncated)) => "the server went away, or somebody cut it".into(),
            (_, Some(e)) => format!("it was damaged or tampered with on the way ({e})"),
            (WcStatus::RemAccessErr, None) => "the server does not allow this any more".into(),
            (WcStatus::WrFlushErr, None) => "the server closed it or went away".into(),
            (status, None) => status.to_string(),
        };
        ViewError::Gone(text)
    }
}

fn receive(notices: &Mr, index: u64) -> RecvWr {
    RecvWr::new(index).sge(notices.sge(index as usize * NOTICE_LEN, NOTICE_LEN))
}

/// A Read that was posted.
struct Waiting {
    piece: Piece,
    /// The number of Reads that have to be complete.
    reads: u64,
    /// Of a movie in blocks.
    check: Option<Check>,
}

/// The Read of the word that says whether bytes of a slot are right. It is posted when they have come: the server's stack may make a response
/// of so few bytes before it takes the bytes of an earlier one from memory.
#[derive(Clone, Copy)]
struct Check {
    word: RemoteAddr,
    /// What the word has if the bytes are right.
    generation: u64,
    /// Where it goes.
    at: usize,
    /// The number of Reads that have to be complete; `None` before it is posted.
    reads: Option<u64>,
}

/// A range that is being fetched, some Reads ahead. Dropping it lets those end.
pub struct Range<'v> {
    viewer: &'v mut Viewer,
    next: u64,
    end: u64,
    waiting: VecDeque<Waiting>,
    first: bool,
    /// It does not go on where the last one has ended.
    seek: bool,
    /// Since when each block that came was taken away before it was read.
    again: Option<Instant>,
}

impl Range<'_> {
    /// The next piece; `None` at the end. The one before is void from here on: its slot is used again.
    ///
    /// # Errors
    /// [`ViewError`].
    #[allow(clippy::should_implement_trait)] // a piece borrows a slot that the next one may use
    pub fn next(&mut self) -> Result<Option<Piece>, ViewError> {
        let mut deadline = Instant::now() + self.viewer.patience;
        loop {
            self.post()?;
            let Some(Waiting {
                piece,
                reads,
                check,
            }) = self.waiting.front()
            else {
                self.viewer.reached = self.end;
                return Ok(None);
            };
            let (piece, reads) = (*piece, check.map_or(Some(*reads), |check| check.reads));
            if reads.is_none_or(|reads| self.viewer.done < reads) {
                if !self.viewer.pump(Some(deadline))? {
                    let why = ViewError::Stalled(self.viewer.patience);
                    return Err(self.viewer.ended(why));
                }
                continue;
            }
            if check.map_or(Ok(true), |check| self.viewer.is_there(&check))? {
                self.waiting.pop_front();
                self.again = None;
                self.ask_ahead(piece.offset)?;
                return Ok(Some(piece));
            }
            self.go_back(&piece)?;
            deadline = Instant::now() + self.viewer.patience;
        }
    }

    /// Asks for the block after that of this byte: the server then reads it while this one is fetched.
    fn ask_ahead(&mut self, offset: u64) -> Result<(), ViewError> {
        let Some(known) = &self.viewer.known else {
            return Ok(());
        };
        let ahead = offset.saturating_add(known.layout().block.into());
        let begin = ahead - ahead % u64::from(known.layout().block);
        if begin < self.end {
            self.viewer.ask(begin, true)?;
        }
        Ok(())
    }

    /// The block of a piece was taken away before it was read: begins anew with it.
    fn go_back(&mut self, piece: &Piece) -> Result<(), ViewError> {
        self.viewer.lost += 1;
        let patience = self.viewer.patience;
        let since = *self.again.get_or_insert_with(Instant::now);
        if since.elapsed() > patience {
            return Err(self.viewer.ended(ViewError::Stalled(patience)));
        }
        if let Some(known) = &mut self.viewer.known {
            known.forget(known.block_of(piece.offset));
        }
        self.waiting.clear();
        (self.next, self.first) = (piece.offset, true);
        Ok(())
    }

    fn post(&mut self) -> Result<(), ViewError> {
        if self.first && self.next < self.end {
            // Reads of an earlier range that was dropped may still be outstanding.
            let posted = self.viewer.posted;
            self.viewer.complete(posted)?;
        }
        let depth = self.viewer.depth;
        let most = self.viewer.count as usize - 1;
        let done = self.viewer.done;
        let mut unread = self.waiting.iter().filter(|w| w.reads > done).count();
        // Several together wake a server over TCP once; until then the other half is watched.
        let room = most - self.waiting.len() >= depth - depth / 2;
        let front = self.waiting.front();
        let due =
            front.is_some_and(|w| w.reads <= done && w.check.is_some_and(|c| c.reads.is_none()));
        if !self.first && (unread > depth / 2 || !room && !due) {
            return Ok(());
        }
        if self.waiting.is_empty() && self.next < self.end {
            self.viewer.wait_for(self.next)?;
        }
        let mut reads = self.checks();
        while self.next < self.end && unread < depth && self.waiting.len() < most {
            let known = self.viewer.known.as_ref();
            let target = match known.map(|known| known.find(self.next)) {
                None => None,
                Some(Some(target)) => Some(target),
                // What is there is given first. The block is asked for, or will be.
                Some(None) => break,
            };
            let soon = self.first && self.seek;
            let most = if soon {
                FIRST.min(self.viewer.slot_len)
            } else {
                self.viewer.slot_len
            };
            self.first = false;
            let left = (self.end - self.next).min(target.as_ref().map_or(u64::MAX, |t| t.most));
            let len = u32::try_from(left).map_or(most, |left| left.min(most));
            let (slot, read) = self.viewer.read((self.next, len), target.as_ref());
            reads.push(read);
            let piece = Piece {
                slot,
                offset: self.next,
                len,
            };
            let check = target.map(|target| Check {
                word: target.word,
                generation: target.generation,
                at: self.viewer.word_at(&piece),
                reads: None,
            });
            self.waiting.push_back(Waiting {
                piece,
                reads: self.viewer.posted + reads.len() as u64,
                check,
            });
            unread += 1;
            self.next += u64::from(len);
            if soon && check.is_some() {
                // Its word would come behind all others.
                break;
            }
        }
        if reads.is_empty() {
            return Ok(());
        }
        self.viewer.post(&reads)
    }

    /// The Reads of the words of all bytes that have come: one for those of a slot of the server.
    fn checks(&mut self) -> Vec<SendWr> {
        let mut reads = Vec::new();
        let done = self.viewer.done;
        // The last piece of a slot is given last, so its place for a word is kept for all of them.
        let mut last: Option<Check> = None;
        for waiting in self.waiting.iter_mut().rev() {
            let Some(check) = &mut waiting.check else {
                continue;
            };
            if waiting.reads > done || check.reads.is_some() {
                continue;
            }
            let same = last.filter(|last| last.generation == check.generation);
            *check = same.unwrap_or_else(|| {
                let word = self.viewer.words.sge(check.at, WORD_LEN as usize);
                reads.push(SendWr::read(0, check.word).sge(word).signaled());
                Check {
                    reads: Some(self.viewer.posted + reads.len() as u64),
                    ..*check
                }
            });
            last = Some(*check);
        }
        reads
    }

    /// The bytes of a piece.
    ///
    /// # Errors
    /// [`ViewError::Local`].
    pub fn append(&self, piece: &Piece, out: &mut Vec<u8>) -> Result<(), ViewError> {
        self.viewer.append(piece, out)
    }

    /// Writes a piece to a file or pipe, from where it has come to.
    ///
    /// # Errors
    /// As `write(2)`.
    pub fn write_to(&self, piece: &Piece, fd: impl AsFd) -> io::Result<()> {
        let mut done = 0;
        while done < piece.len as usize {
            let left = piece.len as usize - done;
            match self
                .viewer
                .slots
                .write_to_file(&fd, None, piece.slot + done, left)
            {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
