//! Open buffers: reads by RDMA Read, writes by RDMA Write, with read-ahead and write-behind.
//!
//! Small sequential reads are served from windows that are fetched ahead. A window is used for a second at most, so that a reader sees the writes of others.
//! Small sequential writes are gathered, and sent when there are enough, before any other operation of the file that could see them, and by [`File::sync`]. A
//! background error is reported by the next write, sync or close. Large reads and writes go straight to the caller's memory, if it can be registered
//! ([`File::pread_raw`], [`File::pwrite_raw`]).

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_verbs::any::Mr;
use weft_verbs::{Access, MemError, RawMemory, RemoteAddr, SendWr};

use crate::client::{CHUNK, Change, Client, Conn, Settle, Slot};
use crate::error::Error;
use crate::lock;
use crate::name::{Endpoint, Name};
use crate::wire::{Attr, Flags, Op, Region, Reply, Request};

/// Longer reads and writes are not gathered.
const LARGE: usize = 128 << 10;
/// The first window of read-ahead.
const FIRST_WINDOW: usize = 128 << 10;
/// How long data that was read ahead is used.
const FRESH: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, Default)]
pub struct OpenOptions {
    pub flags: Flags,
    /// Length that the first write gives a new buffer; 0: as much as is written.
    pub size: u64,
}

impl OpenOptions {
    pub fn read() -> Self {
        Self {
            flags: Flags::READ,
            size: 0,
        }
    }

    /// For writing a new buffer, or replacing an old one.
    pub fn create() -> Self {
        Self {
            flags: Flags::WRITE.with(Flags::CREATE).with(Flags::TRUNCATE),
            size: 0,
        }
    }

    /// With these flags too.
    #[must_use]
    pub fn with(self, flags: Flags) -> Self {
        Self {
            flags: self.flags.with(flags),
            ..self
        }
    }
}

/// An open buffer. Dropping it closes it, without a word of what failed.
pub struct File {
    client: Client,
    name: Mutex<Name>,
    flags: Flags,
    /// The buffer's number.
    ino: u64,
    state: Arc<Mutex<State>>,
}

/// A window of the buffer in registered memory.
struct Window {
    mr: Mr,
    off: u64,
    len: usize,
    /// Being read into or written from.
    pending: Option<u64>,
    since: Instant,
}

impl Window {
    /// Whether it contains this byte, and is recent enough.
    fn has(&self, off: u64) -> bool {
        self.len > 0
            && (self.off..self.off + self.len as u64).contains(&off)
            && self.since.elapsed() < FRESH
    }
}

#[derive(Default)]
struct State {
    /// Of the connection that the handle is of.
    epoch: u64,
    handle: u32,
    attr: Attr,
    region: Region,
    word: Region,
    error: Option<Errno>,
    /// Written, and not known to have been placed.
    unplaced: bool,
    /// Written since the last sync: the server then gives the buffer a new time.
    changed: bool,
    /// The offset of the next sequential read.
    next_read: u64,
    streak: u32,
    window: usize,
    ahead: Vec<Window>,
    behind: Vec<Window>,
    /// Which of `behind` is being filled.
    filling: usize,
    /// Another file of this process has begun a new generation of the buffer.
    outdated: bool,
    closed: bool,
}

/// The destination of bytes.
enum Sink<'a> {
    Slice(&'a mut [u8]),
    Raw(&'a RawMemory),
}

enum Source<'a> {
    Slice(&'a [u8]),
    Raw(&'a RawMemory),
}

fn local(e: MemError) -> Error {
    Error::Local(e.to_string())
}

impl Sink<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Slice(bytes) => bytes.len(),
            Self::Raw(memory) => memory.len(),
        }
    }

    fn put(&mut self, at: usize, from: &Mr, off: usize, len: usize) -> Result<(), Error> {
        match self {
            Self::Slice(bytes) => from.read(off, &mut bytes[at..at + len]),
            Self::Raw(memory) => memory
                .slice(at, len)
                .and_then(|part| from.copy_to_raw(off, &part)),
        }
        .map_err(local)
    }
}

impl Source<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Slice(bytes) => bytes.len(),
            Self::Raw(memory) => memory.len(),
        }
    }

    fn get(&self, at: usize, into: &Mr, off: usize, len: usize) -> Result<(), Error> {
        match self {
            Self::Slice(bytes) => into.write(off, &bytes[at..at + len]),
            Self::Raw(memory) => memory
                .slice(at, len)
                .and_then(|part| into.copy_from_raw(off, &part)),
        }
        .map_err(local)
    }
}

impl Client {
    /// Opens a buffer or file.
    ///
    /// # Errors
    /// As `open(2)`; `EROFS` for writing to a file of the server's folder, `ENOSPC` past its quota.
    pub fn open(&self, name: &Name, options: OpenOptions) -> Result<File, Error> {
        if options.flags.has(Flags::TRUNCATE) {
            self.settle(|_, _| true, Change::Nothing);
        }
        let mut slot = lock(&self.0.slot);
        let conn = self.0.connected(&mut slot)?;
        let reply = match conn.open(name, options.flags, options.size) {
            Ok(reply) => reply,
            Err(e) => {
                if e.is_of_connection() {
                    slot.conn = None;
                }
                return Err(e);
            }
        };
        let mut state = State {
            epoch: conn.epoch,
            handle: reply.handle,
            ..State::default()
        };
        drop(slot);
        state.take(&reply);
        let file = File {
            client: self.clone(),
            name: Mutex::new(name.clone()),
            flags: options.flags,
            ino: reply.attr.ino,
            state: Arc::new(Mutex::new(state)),
        };
        let state: Arc<dyn Settle> = Arc::clone(&file.state) as _;
        lock(&self.0.files).push((file.ino, Arc::downgrade(&state)));
        if options.flags.has(Flags::TRUNCATE) {
            file.settle(Change::Generation);
        }
        Ok(file)
    }
}

impl Settle for Mutex<State> {
    fn settle(&self, slot: &Mutex<Slot>, change: Change) {
        let mut state = lock(self);
        state.outdated |= change == Change::Generation;
        if change != Change::Nothing {
            state.forget_ahead();
        }
        if state.behind.iter().all(|window| window.len == 0) {
            return;
        }
        let mut slot = lock(slot);
        let conn = slot.conn.as_mut();
        let Some(conn) = conn.filter(|conn| conn.epoch == state.epoch) else {
            state.lose();
            return;
        };
        if let Err(e) = state.flush(conn) {
            if e.is_of_connection() {
                slot.conn = None;
                state.lose();
            }
            // Its next write, sync or close reports it.
            state.error = Some(e.errno());
        }
    }
}

impl File {
    pub fn flags(&self) -> Flags {
        self.flags
    }

    /// The buffer's number; a new buffer of the same name has another one.
    pub fn ino(&self) -> u64 {
        self.ino
    }

    pub fn endpoint(&self) -> &Endpoint {
        self.client.endpoint()
    }

    /// Sets a new name, under which it is opened again after a loss of the connection.
    pub fn renamed(&self, name: &Name) {
        *lock(&self.name) = name.clone();
    }

    fn is(&self, of: &Weak<dyn Settle>) -> bool {
        std::ptr::addr_eq(of.as_ptr(), Arc::as_ptr(&self.state))
    }

    /// This one's next operation comes after what other files of this process have gathered for the same buffer; they forget what it is about to change.
    fn settle(&self, change: Change) {
        let others = |ino, of: &Weak<_>| ino == self.ino && !self.is(of);
        self.client.settle(others, change);
    }

    /// Reads at an offset into a slice. Returns the bytes read, fewer only at the end.
    ///
    /// # Errors
    /// `EBADF` unless it was opened for reading; `EIO` if the server cannot be reached; `ESTALE` if the connection was lost and the name belongs to
    /// another buffer now.
    pub fn pread(&self, into: &mut [u8], off: u64) -> Result<usize, Error> {
        self.read(Sink::Slice(into), off)
    }

    /// As [`File::pread`], into promised memory; long reads go there without a copy.
    ///
    /// # Errors
    /// As [`File::pread`].
    pub fn pread_raw(&self, into: &RawMemory, off: u64) -> Result<usize, Error> {
        self.read(Sink::Raw(into), off)
    }

    fn read(&self, mut sink: Sink<'_>, off: u64) -> Result<usize, Error> {
        if !self.flags.has(Flags::READ) {
            return Err(Errno::BADF.into());
        }
        let end = off.checked_add(sink.len() as u64);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::INVAL.into());
        }
        self.settle(Change::Nothing);
        let mut state = lock(&self.state);
        self.run(&mut state, true, |conn, state| {
            state.flush(conn)?;
            state.read(conn, &mut sink, off)
        })
    }

    /// Writes a slice at an offset: all of it, or an error.
    ///
    /// # Errors
    /// `EBADF` unless it was opened for writing, `ENOSPC` past the server's quota, `EIO`, `ESTALE`.
    pub fn pwrite(&self, from: &[u8], off: u64) -> Result<usize, Error> {
        self.write(&Source::Slice(from), Some(off))
    }

    /// As [`File::pwrite`], from promised memory; long writes go from there without a copy.
    ///
    /// # Errors
    /// As [`File::pwrite`].
    pub fn pwrite_raw(&self, from: &RawMemory, off: u64) -> Result<usize, Error> {
        self.write(&Source::Raw(from), Some(off))
    }

    /// Appends: no other appender writes to the same place, wherever it runs.
    ///
    /// # Errors
    /// As [`File::pwrite`]; `EINVAL` unless it was opened for appending.
    pub fn append(&self, from: &[u8]) -> Result<usize, Error> {
        self.write(&Source::Slice(from), None)
    }

    /// As [`File::append`], from promised memory.
    ///
    /// # Errors
    /// As [`File::append`].
    pub fn append_raw(&self, from: &RawMemory) -> Result<usize, Error> {
        self.write(&Source::Raw(from), None)
    }

    fn write(&self, source: &Source<'_>, off: Option<u64>) -> Result<usize, Error> {
        if !self.flags.has(Flags::WRITE) {
            return Err(Errno::BADF.into());
        }
        if off.is_none() && !self.flags.has(Flags::APPEND) {
            return Err(Errno::INVAL.into());
        }
        let end = off.unwrap_or(0).checked_add(source.len() as u64);
        if end.is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::FBIG.into());
        }
        self.settle(Change::Contents);
        let mut state = lock(&self.state);
        state.report()?;
        self.run(&mut state, false, |conn, state| {
            state.write(conn, source, off)
        })
    }

    /// Sends all written data to the server, and waits until it is in place there.
    ///
    /// # Errors
    /// Background errors since the last call, and as [`File::pwrite`].
    pub fn sync(&self) -> Result<(), Error> {
        self.settle(Change::Nothing);
        let mut state = lock(&self.state);
        state.report()?;
        self.run(&mut state, false, |conn, state| {
            state.flush(conn)?;
            let op = if state.changed { Op::Sync } else { Op::Refresh };
            let reply = state.call(conn, op, 0)?;
            state.take(&reply);
            state.changed = false;
            Ok(())
        })?;
        state.report()
    }

    /// As [`File::sync`], for a caller that reports no errors: the next write, sync or close reports them.
    pub fn sync_in_background(&self) {
        if let Err(e) = self.sync() {
            lock(&self.state).error = Some(e.errno());
        }
    }

    /// The present attributes.
    ///
    /// # Errors
    /// As [`File::pread`].
    pub fn stat(&self) -> Result<Attr, Error> {
        self.settle(Change::Nothing);
        let mut state = lock(&self.state);
        self.run(&mut state, true, |conn, state| {
            state.flush(conn)?;
            state.refresh(conn)?;
            Ok(state.attr)
        })
    }

    /// Makes it exactly so long.
    ///
    /// # Errors
    /// As [`File::pwrite`].
    pub fn truncate(&self, len: u64) -> Result<(), Error> {
        if len > i64::MAX as u64 {
            return Err(Errno::INVAL.into());
        }
        self.settle(Change::Contents);
        let mut state = lock(&self.state);
        state.report()?;
        self.run(&mut state, false, |conn, state| {
            state.flush(conn)?;
            let reply = state.call(conn, Op::Truncate, len)?;
            state.take(&reply);
            Ok(())
        })?;
        drop(state);
        self.settle(Change::Generation);
        Ok(())
    }

    /// As [`Client::chmod`], also if the buffer has another name by now, or none.
    ///
    /// # Errors
    /// As [`Client::chmod`] and [`File::pread`].
    pub fn chmod(&self, mode: u32) -> Result<(), Error> {
        let mut state = lock(&self.state);
        self.run(&mut state, true, |conn, state| {
            state.flush(conn)?;
            let reply = state.call(conn, Op::Chmod, mode.into())?;
            state.take(&reply);
            Ok(())
        })
    }

    /// Makes it at least so long.
    ///
    /// # Errors
    /// As [`File::pwrite`].
    pub fn grow(&self, len: u64) -> Result<(), Error> {
        self.settle(Change::Contents);
        let mut state = lock(&self.state);
        state.report()?;
        self.run(&mut state, false, |conn, state| {
            state.flush(conn)?;
            state.changed = true;
            state.reach(conn, len)
        })
    }

    /// Closes it.
    ///
    /// # Errors
    /// Background errors since the last call; it is closed in any case.
    pub fn close(self) -> Result<(), Error> {
        let mut state = lock(&self.state);
        self.end(&mut state)
    }

    fn end(&self, state: &mut State) -> Result<(), Error> {
        if std::mem::replace(&mut state.closed, true) {
            return Ok(());
        }
        let mut slot = lock(&self.client.0.slot);
        let Some(conn) = slot.conn.as_mut().filter(|conn| conn.epoch == state.epoch) else {
            state.lose();
            drop(slot);
            return state.report();
        };
        let flushed = state.flush(conn);
        let waited = state.wait_for_background(conn);
        let closed = conn.call(&Request {
            handle: state.handle,
            ..Request::new(Op::Close)
        });
        let all = flushed.and(waited).and(closed.map(drop));
        if all.as_ref().is_err_and(Error::is_of_connection) {
            slot.conn = None;
            state.lose();
        }
        drop(slot);
        state.report().and(all)
    }

    /// Runs an operation over the connection; over a new one if there is none, and with `again` a second time if it was lost meanwhile.
    fn run<T>(
        &self,
        state: &mut State,
        again: bool,
        mut act: impl FnMut(&mut Conn, &mut State) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut slot = lock(&self.client.0.slot);
        let mut left = u32::from(again);
        loop {
            let conn = self.client.0.connected(&mut slot)?;
            let done = self.reopen(conn, state).and_then(|()| {
                // Data that was written over a lost connection may not have arrived.
                if again { Ok(()) } else { state.report() }?;
                act(conn, state)
            });
            match done {
                Err(e) if e.is_of_connection() => {
                    slot.conn = None;
                    state.lose();
                    if left == 0 {
                        return Err(e);
                    }
                    left -= 1;
                }
                done => return done,
            }
        }
    }

    /// Opens it again, if its handle is of an earlier connection. It has to be the same buffer.
    fn reopen(&self, conn: &mut Conn, state: &mut State) -> Result<(), Error> {
        if state.epoch == conn.epoch {
            if std::mem::take(&mut state.outdated) {
                state.flush(conn)?;
                state.refresh(conn)?;
            }
            return Ok(());
        }
        state.lose();
        let fresh = Flags::CREATE.with(Flags::EXCLUSIVE).with(Flags::TRUNCATE);
        let name = lock(&self.name).clone();
        let reply = conn
            .open(&name, self.flags.without(fresh), 0)
            .map_err(Error::of_reopening)?;
        if reply.attr.ino != state.attr.ino {
            conn.call(&Request {
                handle: reply.handle,
                ..Request::new(Op::Close)
            })?;
            return Err(Errno::STALE.into());
        }
        state.epoch = conn.epoch;
        state.handle = reply.handle;
        state.take(&reply);
        Ok(())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        lock(&self.client.0.files).retain(|(_, of)| !self.is(of));
        let mut state = lock(&self.state);
        let _ = self.end(&mut state);
    }
}

impl State {
    fn report(&mut self) -> Result<(), Error> {
        self.error.take().map_or(Ok(()), |errno| Err(errno.into()))
    }

    /// The connection is lost, with all operations in progress.
    fn lose(&mut self) {
        let dirty = self.behind.iter().any(|window| window.len > 0);
        if dirty || self.unplaced {
            self.error = Some(Errno::IO);
        }
        self.unplaced = false;
        self.ahead.clear();
        self.behind.clear();
        self.filling = 0;
        self.epoch = 0;
    }

    /// Takes over the state in a reply.
    fn take(&mut self, reply: &Reply) {
        if reply.attr.generation != self.attr.generation {
            self.forget_ahead();
        }
        self.attr = reply.attr;
        self.region = reply.region;
        self.word = reply.word;
        self.unplaced = false;
    }

    fn call(&mut self, conn: &mut Conn, op: Op, size: u64) -> Result<Reply, Error> {
        // The region may change: none of our operations may be in progress.
        self.wait_for_background(conn)?;
        conn.call(&Request {
            handle: self.handle,
            size,
            ..Request::new(op)
        })
    }

    fn refresh(&mut self, conn: &mut Conn) -> Result<(), Error> {
        let reply = self.call(conn, Op::Refresh, 0)?;
        self.take(&reply);
        Ok(())
    }

    /// Sees to it that the region reaches so far.
    fn reach(&mut self, conn: &mut Conn, end: u64) -> Result<(), Error> {
        if end <= self.region.len {
            return Ok(());
        }
        let reply = self.call(conn, Op::Grow, end)?;
        self.take(&reply);
        if self.region.len < end {
            return Err(Error::Foreign("a region that is too short"));
        }
        Ok(())
    }

    fn remote(&self, off: u64) -> RemoteAddr {
        RemoteAddr {
            addr: self.region.addr.wrapping_add(off),
            rkey: self.region.rkey,
        }
    }

    /// Waits for background operations.
    fn wait_for_background(&mut self, conn: &mut Conn) -> Result<(), Error> {
        for window in self.ahead.iter_mut().chain(&mut self.behind) {
            if let Some(id) = window.pending.take() {
                conn.wait(id)?;
            }
        }
        Ok(())
    }

    fn forget_ahead(&mut self) {
        for window in &mut self.ahead {
            window.len = 0;
        }
        self.streak = 0;
    }

    fn read(&mut self, conn: &mut Conn, sink: &mut Sink<'_>, off: u64) -> Result<usize, Error> {
        let end = off + sink.len() as u64;
        if end > self.region.len {
            // It may have become longer.
            self.refresh(conn)?;
        }
        let left = self.region.len.saturating_sub(off);
        let len = usize::try_from(left).map_or(sink.len(), |left| left.min(sink.len()));
        // Readers with several threads come nearly in order.
        let near = self.ahead.iter().any(|window| window.has(off));
        if off == self.next_read {
            self.streak += 1;
        } else if !near {
            self.streak = 0;
            self.window = 0;
        }
        self.next_read = off + len as u64;
        if len == 0 {
            return Ok(0);
        }
        // Data that has to be copied anyway is read ahead.
        let copied = matches!(sink, Sink::Slice(_)) && len <= CHUNK;
        if (len <= LARGE || copied) && (self.streak >= 2 || near) {
            let mut at = 0;
            while at < len {
                at += self.read_ahead(conn, sink, at, off + at as u64, len - at)?;
            }
            return Ok(len);
        }
        if let Sink::Raw(memory) = sink
            && len > LARGE
        {
            let memory = memory.slice(0, len).map_err(local)?;
            self.move_raw(conn, &memory, off, Access::LOCAL_WRITE, SendWr::read)?;
            return Ok(len);
        }
        let mut at = 0;
        while at < len {
            let part = (len - at).min(CHUNK);
            let to = conn.staging.sge(0, part);
            let from = self.remote(off + at as u64);
            let id = conn.post(SendWr::read(0, from).sge(to))?;
            conn.wait(id)?;
            sink.put(at, &conn.staging, 0, part)?;
            at += part;
        }
        Ok(len)
    }

    /// Moves the caller's memory, registered with `access`, by requests of this kind.
    fn move_raw(
        &self,
        conn: &mut Conn,
        memory: &RawMemory,
        off: u64,
        access: Access,
        request: fn(u64, RemoteAddr) -> SendWr,
    ) -> Result<(), Error> {
        let mr = conn.link.pd().reg_raw(memory, access);
        let mr = mr.map_err(|e| Error::Local(e.to_string()))?;
        let mut ids = Vec::new();
        let done = (0..memory.len()).step_by(CHUNK).try_for_each(|at| {
            let part = (memory.len() - at).min(CHUNK);
            let wr = request(0, self.remote(off + at as u64)).sge(mr.sge(at, part));
            ids.push(conn.post(wr)?);
            Ok(())
        });
        let done = done.and_then(|()| ids.into_iter().try_for_each(|id| conn.wait(id)));
        if done.is_err() {
            // Nothing of the connection touches the caller's memory after this.
            conn.link.qp.to_error();
        }
        drop(mr);
        done
    }

    /// Reads some bytes out of the window that has them, and sees to it that the next one is on its way.
    fn read_ahead(
        &mut self,
        conn: &mut Conn,
        sink: &mut Sink<'_>,
        at: usize,
        off: u64,
        len: usize,
    ) -> Result<usize, Error> {
        let here = match self.ahead.iter().position(|window| window.has(off)) {
            Some(here) => here,
            None => self.fetch(conn, 0, off)?,
        };
        let window = &mut self.ahead[here];
        if let Some(id) = window.pending.take() {
            conn.wait(id)?;
        }
        let within = (off - window.off) as usize;
        let part = len.min(window.len - within);
        sink.put(at, &window.mr, within, part)?;
        let next = window.off + window.len as u64;
        let other = 1 - here;
        let coming = self
            .ahead
            .get(other)
            .is_some_and(|window| window.len > 0 && window.off == next);
        if !coming && next < self.region.len {
            self.fetch(conn, other, next)?;
        }
        Ok(part)
    }

    /// Begins to read a window.
    fn fetch(&mut self, conn: &mut Conn, which: usize, off: u64) -> Result<usize, Error> {
        while self.ahead.len() <= which {
            let mr = conn.link.pd().alloc_mr(CHUNK, Access::LOCAL_WRITE);
            self.ahead.push(Window {
                mr: mr.map_err(|e| Error::Local(e.to_string()))?,
                off: 0,
                len: 0,
                pending: None,
                since: Instant::now(),
            });
        }
        self.window = (self.window * 2).clamp(FIRST_WINDOW, CHUNK);
        let left = self.region.len.saturating_sub(off);
        let len = usize::try_from(left).map_or(self.window, |left| left.min(self.window));
        let from = self.remote(off);
        let window = &mut self.ahead[which];
        if let Some(id) = window.pending.take() {
            conn.wait(id)?;
        }
        let id = conn.post(SendWr::read(0, from).sge(window.mr.sge(0, len)))?;
        (window.off, window.len, window.pending) = (off, len, Some(id));
        window.since = Instant::now();
        Ok(which)
    }

    fn write(
        &mut self,
        conn: &mut Conn,
        source: &Source<'_>,
        off: Option<u64>,
    ) -> Result<usize, Error> {
        self.forget_ahead();
        let len = source.len();
        if len == 0 {
            return Ok(0);
        }
        self.changed = true;
        if len <= LARGE {
            self.gather(conn, source, off)?;
            return Ok(len);
        }
        self.flush(conn)?;
        let off = match off {
            Some(off) => off,
            None => self.reserve(conn, len as u64)?,
        };
        self.reach(conn, off + len as u64)?;
        self.unplaced = true;
        if let Source::Raw(memory) = source {
            self.move_raw(conn, memory, off, Access::empty(), SendWr::write)?;
            return Ok(len);
        }
        let mut at = 0;
        while at < len {
            let part = (len - at).min(CHUNK);
            source.get(at, &conn.staging, 0, part)?;
            let to = self.remote(off + at as u64);
            let id = conn.post(SendWr::write(0, to).sge(conn.staging.sge(0, part)))?;
            conn.wait(id)?;
            at += part;
        }
        Ok(len)
    }

    /// Adds a small write to those before it, if it follows them.
    fn gather(
        &mut self,
        conn: &mut Conn,
        source: &Source<'_>,
        off: Option<u64>,
    ) -> Result<(), Error> {
        // Appended bytes have no place yet.
        let place = off.unwrap_or(u64::MAX);
        if let Some(window) = self.behind.get(self.filling)
            && window.len > 0
        {
            let follows = match off {
                Some(off) => window.off != u64::MAX && window.off + window.len as u64 == off,
                None => window.off == u64::MAX,
            };
            if !follows || window.len + source.len() > CHUNK {
                self.flush(conn)?;
            }
        }
        while self.behind.len() <= self.filling {
            let mr = conn.link.pd().alloc_mr(CHUNK, Access::LOCAL_WRITE);
            self.behind.push(Window {
                mr: mr.map_err(|e| Error::Local(e.to_string()))?,
                off: 0,
                len: 0,
                pending: None,
                since: Instant::now(),
            });
        }
        let window = &mut self.behind[self.filling];
        if let Some(id) = window.pending.take() {
            conn.wait(id)?;
        }
        if window.len == 0 {
            window.off = place;
        }
        source.get(0, &window.mr, window.len, source.len())?;
        window.len += source.len();
        Ok(())
    }

    /// Takes room at the end.
    fn reserve(&mut self, conn: &mut Conn, len: u64) -> Result<u64, Error> {
        if self.word.len != 8 {
            return Err(Error::Foreign("no word to append by"));
        }
        let word = RemoteAddr {
            addr: self.word.addr,
            rkey: self.word.rkey,
        };
        let off = conn.fetch_add(word, len)?;
        if off.checked_add(len).is_none_or(|end| end > i64::MAX as u64) {
            return Err(Errno::FBIG.into());
        }
        Ok(off)
    }

    /// Sends the gathered writes.
    fn flush(&mut self, conn: &mut Conn) -> Result<(), Error> {
        let filling = self.filling;
        let Some(window) = self.behind.get(filling) else {
            return Ok(());
        };
        let (off, len) = (window.off, window.len);
        if len == 0 {
            return Ok(());
        }
        // It counts as sent also if it fails: the caller gets the error once. After a loss of the connection a read is repeated, and reports nothing: then the
        // next write, sync or close does.
        let sent = self.send_gathered(conn, filling, off, len);
        self.unplaced |= sent.as_ref().is_err_and(Error::is_of_connection);
        if let Some(window) = self.behind.get_mut(filling) {
            window.len = 0;
        }
        self.filling = 1 - filling;
        sent
    }

    fn send_gathered(
        &mut self,
        conn: &mut Conn,
        which: usize,
        off: u64,
        len: usize,
    ) -> Result<(), Error> {
        let off = if off == u64::MAX {
            self.reserve(conn, len as u64)?
        } else {
            off
        };
        self.reach(conn, off + len as u64)?;
        self.unplaced = true;
        let to = self.remote(off);
        let window = &mut self.behind[which];
        window.pending = Some(conn.post(SendWr::write(0, to).sge(window.mr.sge(0, len)))?);
        Ok(())
    }
}
