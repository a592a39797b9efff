//! File sends. A separate thread reads the parts into registered regions and sends them from there, two at a time, so that
//! neither the caller nor the engine ever waits for a disk.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::PerProcess;

use crate::{Context, FilePiece, Memory, Piece, Region};

/// The most bytes that are read and sent at a time.
const CHUNK: usize = 256 << 10;
/// The smallest buffer for that: files may grow, or report a wrong size (procfs).
const LEAST: usize = 64 << 10;
/// Parts in flight at a time: one is sent while the next is read.
const PARTS: usize = 2;

/// The result of a send or receive.
pub(crate) struct Outcome {
    /// Bytes moved, or the error.
    pub(crate) result: Result<usize, Errno>,
    /// Bytes moved, also when `result` is an error.
    pub(crate) bytes: usize,
    /// The operation's memory.
    pub(crate) memory: Memory,
}

/// Reports the result of a send or receive. It must not block.
pub(crate) type Done = Box<dyn FnOnce(Outcome) + Send>;

/// A place in a socket's queue of sends, where the parts of one file send are sent. Later sends wait for
/// its release. The reading thread calls it; it may call back at once.
pub(crate) trait FileLane: Send + Sync {
    /// Send the next part. `done` is called exactly once; it neither blocks nor calls the library.
    fn send(&self, memory: Memory, done: Done);
    /// There are no more parts, and all have completed.
    fn release(&self);
    /// Like `release`, and calls `tell` in its turn, in the order of other sends' results.
    fn end(&self, tell: Box<dyn FnOnce() + Send>) {
        tell();
        self.release();
    }
}

/// Reports the result of a file send, and the bytes sent, which also count when the result is an error. It must not block.
pub(crate) type FileDone = Box<dyn FnOnce(Result<usize, Errno>, usize) + Send>;

/// A file send under way. It continues without its handle.
#[derive(Clone)]
pub(crate) struct FileSend(Arc<Shared>);

struct Shared {
    context: Context,
    lane: Arc<dyn FileLane>,
    reader: Arc<Reader>,
    state: Mutex<State>,
}

struct State {
    /// The pieces that are not read yet.
    pieces: VecDeque<Piece>,
    region: Option<Arc<Region>>,
    /// Bytes of `region` per part, and the free parts.
    chunk: usize,
    free: Vec<usize>,
    /// Parts that the lane is sending.
    out: usize,
    sent: usize,
    failed: Option<Errno>,
    /// Set when the lane accepts no more parts: the error, if there are more.
    stopped: Option<Errno>,
    /// The reader has been notified.
    called: bool,
    done: Option<FileDone>,
}

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
    pub(crate) fn next_id() -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    /// Send the pieces in order. A file shorter than requested contributes the bytes that it has, and the next piece follows. An error of
    /// a file ends the send after the bytes read before it. `done` is called once.
    ///
    /// # Errors
    /// `EAGAIN` when the thread cannot be started; then neither the lane nor `done` is called.
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

    /// Give the lane no more parts. The send ends with this error when the lane's current parts have completed. A call after the last part
    /// is harmless, and the send then succeeds.
    pub(crate) fn stop(&self, why: Errno) {
        let mut state = self.0.lock();
        if state.done.is_some() {
            state.stopped.get_or_insert(why);
            self.0.call(&mut state);
        }
    }
}

impl State {
    /// There will be no more parts. The reason is `why`, unless the send was stopped before.
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
            // This fails only when the process exits.
            let _ = self.reader.0.send(Arc::clone(self));
        }
    }

    /// One step, on the reader's thread, so that files take turns.
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
                // There is a free slot for each part that the lane is not sending.
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

    /// Read the next part of a file and send it, or find that there is none.
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

    /// The region that parts are read into, and the bytes per part.
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
