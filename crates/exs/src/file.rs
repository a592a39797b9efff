//! Sending files: their parts are read on a thread of their own into registered regions and sent from there, two at a time, so that
//! neither the caller nor the engine ever waits for a disk.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::PerProcess;

use crate::{Context, FilePiece, Memory, Piece, Region};

/// Most bytes that are read and sent at a time.
const CHUNK: usize = 256 << 10;
/// And the least room for that; files may grow, or lie about their size (procfs).
const LEAST: usize = 64 << 10;
/// Parts on their way at a time: one is sent while the next is read.
const PARTS: usize = 2;

/// The end of a send or receive.
pub(crate) struct Outcome {
    /// Bytes moved, or what went wrong.
    pub(crate) result: Result<usize, Errno>,
    /// Bytes moved, also when `result` is an error.
    pub(crate) bytes: usize,
    /// The operation's memory.
    pub(crate) memory: Memory,
}

/// Where a send or receive tells its end. It must not block.
pub(crate) type Done = Box<dyn FnOnce(Outcome) + Send>;

/// A place in a socket's queue of sends at which the parts of one file send are sent. Sends that were asked for later wait for
/// its release. It is called by the reading thread, and may call back at once.
pub(crate) trait FileLane: Send + Sync {
    /// Sends the next part. Exactly one end is told; that call neither blocks nor calls the library.
    fn send(&self, memory: Memory, done: Done);
    /// There are no more parts, and all have ended.
    fn release(&self);
    /// The same, and has the end told when it is the turn of it, as other sends' ends are.
    fn end(&self, tell: Box<dyn FnOnce() + Send>) {
        tell();
        self.release();
    }
}

/// Where a file send tells its end: the result, and the bytes sent also when that is an error. It must not block.
pub(crate) type FileDone = Box<dyn FnOnce(Result<usize, Errno>, usize) + Send>;

/// A file send under way. It goes on without its handle.
#[derive(Clone)]
pub(crate) struct FileSend(Arc<Shared>);

struct Shared {
    context: Context,
    lane: Arc<dyn FileLane>,
    reader: Arc<Reader>,
    state: Mutex<State>,
}

struct State {
    /// What is not read yet.
    pieces: VecDeque<Piece>,
    region: Option<Arc<Region>>,
    /// Bytes of `region` that one part has, and which parts are free.
    chunk: usize,
    free: Vec<usize>,
    /// Parts that the lane has.
    out: usize,
    sent: usize,
    failed: Option<Errno>,
    /// Set when the lane takes no more: the error, if there is more.
    stopped: Option<Errno>,
    /// The reader will look.
    called: bool,
    done: Option<FileDone>,
}

/// The thread that reads files.
struct Reader(Sender<Arc<Shared>>);

impl Reader {
    fn get() -> Result<Arc<Reader>, Errno> {
        static READER: PerProcess<Reader> = PerProcess::new();
        READER.get(|| {
            let (tx, rx): (_, Receiver<Arc<Shared>>) = channel();
            std::thread::Builder::new()
                .name("weft-exs-file".into())
                .spawn(move || {
                    for send in rx {
                        send.turn();
                    }
                })
                .map_err(|_| Errno::AGAIN)?;
            Ok(Arc::new(Reader(tx)))
        })
    }
}

impl FileSend {
    /// A number for a new one.
    pub(crate) fn next_id() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends the pieces in order. A file that is shorter than asked gives what it has, and the next piece follows; an error of
    /// a file ends the send after what was read before. `done` is called once.
    ///
    /// # Errors
    /// `EAGAIN` when the thread cannot be started; the lane is not called then, and neither is `done`.
    pub(crate) fn start(
        context: &Context,
        pieces: Vec<Piece>,
        lane: Arc<dyn FileLane>,
        done: FileDone,
    ) -> Result<FileSend, Errno> {
        let shared = Arc::new(Shared {
            context: context.clone(),
            lane,
            reader: Reader::get()?,
            state: Mutex::new(State {
                pieces: pieces.into(),
                region: None,
                chunk: 0,
                free: (0..PARTS).collect(),
                out: 0,
                sent: 0,
                failed: None,
                stopped: None,
                called: false,
                done: Some(done),
            }),
        });
        shared.call(&mut shared.lock());
        Ok(FileSend(shared))
    }

    /// The lane takes no more from now on: the end, with this error, comes when the parts that it has are through. Too late is fine, and no
    /// error where all has gone out.
    pub(crate) fn stop(&self, why: Errno) {
        let mut state = self.0.lock();
        if state.done.is_some() {
            state.stopped.get_or_insert(why);
            self.0.call(&mut state);
        }
    }
}

impl State {
    /// There will be no more parts, for this reason if it was not stopped before.
    fn fail(&mut self, why: Errno) {
        self.failed.get_or_insert(self.stopped.unwrap_or(why));
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn call(self: &Arc<Self>, state: &mut State) {
        if !state.called {
            state.called = true;
            // It fails only at the end of the process.
            let _ = self.reader.0.send(Arc::clone(self));
        }
    }

    /// One step, by the reader, so that files take turns.
    fn turn(self: &Arc<Self>) {
        let mut state = self.lock();
        state.called = false;
        if state.failed.is_some() {
            state.pieces.clear();
        }
        let Some(piece) = state.pieces.pop_front() else {
            if state.out == 0
                && let Some(done) = state.done.take()
            {
                let (result, sent) = (state.failed.map_or(Ok(state.sent), Err), state.sent);
                state.region = None;
                drop(state);
                self.lane.end(Box::new(move || done(result, sent)));
            }
            return;
        };
        if state.out == PARTS {
            state.pieces.push_front(piece);
            return;
        }
        match piece {
            Piece::Memory(memory) => {
                state.out += 1;
                drop(state);
                self.send(memory, None);
            }
            Piece::File(file) => {
                // As many are free as the lane has not got.
                let Some(slot) = state.free.pop() else {
                    state.pieces.push_front(Piece::File(file));
                    return;
                };
                drop(state);
                self.read(file, slot);
            }
        }
        let mut state = self.lock();
        self.call(&mut state);
    }

    /// Reads the next part of a file and sends it, or finds that there is none.
    fn read(self: &Arc<Self>, mut piece: FilePiece, slot: usize) {
        let part = self.room(&piece).and_then(|(region, chunk)| {
            let len = piece
                .len
                .map_or(chunk, |left| left.min(chunk as u64) as usize);
            let at = slot * chunk;
            let read = || {
                let n = region
                    .mr
                    .read_from_file(&piece.file, Some(piece.offset), at, len);
                n.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
            };
            let n = rustix::io::retry_on_intr(read)?;
            region.slice(slot * chunk, n).map_err(Errno::from)
        });
        let mut state = self.lock();
        match part {
            Ok(part) if !part.is_empty() && state.failed.is_none() => {
                let n = part.len() as u64;
                piece.offset += n;
                piece.len = piece.len.map(|left| left - n);
                state.pieces.push_front(Piece::File(piece));
                state.out += 1;
                drop(state);
                self.send(part, Some(slot));
            }
            end => {
                state.free.push(slot);
                if let Err(e) = end {
                    state.fail(e);
                }
            }
        }
    }

    /// The region that parts are read into, and the bytes of one part.
    fn room(&self, piece: &FilePiece) -> Result<(Arc<Region>, usize), Errno> {
        let mut state = self.lock();
        if let Some(region) = &state.region {
            return Ok((Arc::clone(region), state.chunk));
        }
        let size = rustix::fs::fstat(&piece.file).map_or(u64::MAX, |s| s.st_size as u64);
        let bytes = size
            .saturating_sub(piece.offset)
            .min(piece.len.unwrap_or(u64::MAX));
        // Later pieces may be longer.
        let chunk = if state.pieces.iter().any(|p| matches!(p, Piece::File(_))) {
            CHUNK
        } else {
            bytes.clamp(LEAST as u64, CHUNK as u64) as usize
        };
        let region = Region::alloc(&self.context, chunk * PARTS).map_err(Errno::from)?;
        state.region = Some(Arc::clone(&region));
        state.chunk = chunk;
        Ok((region, chunk))
    }

    fn send(self: &Arc<Self>, memory: Memory, slot: Option<usize>) {
        let me = Arc::clone(self);
        let done = move |outcome: Outcome| {
            let mut state = me.lock();
            state.out -= 1;
            state.free.extend(slot);
            state.sent += outcome.bytes;
            if let Err(e) = outcome.result {
                state.fail(e);
            }
            me.call(&mut state);
        };
        self.lane.send(memory, Box::new(done));
    }
}
