//! One operation: its memory, its registrations, and the target of its result.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::io::Errno;
use smallvec::SmallVec;
use weft_sockets::lock::lock;
use weft_verbs::{Access, Mr, PendingDereg, Sge};

use super::timer::Grace;
use crate::bell::Bell;
use crate::event::{Event, EventKind, InPlace, Sink};
use crate::file::FileDone;
use crate::late::Late;
use crate::memory::copy_slice;
use crate::registered::{Domain, Registered};
use crate::{Error, Memory, Queue};

/// The destination of an operation's result.
pub(crate) enum Target {
    Queue(Queue),
    Call(Box<dyn FnOnce(Event) + Send>),
    Slot(Arc<Slot>),
    /// A part of a file send, which the program does not see.
    Part(Box<Part>),
    /// Drops the second value when the result has been reported.
    Guarded(Box<(Target, Box<dyn Send>)>),
    Nobody,
}

/// A part of a file send.
pub(crate) struct Part {
    /// The file send is stopped: it sends no more parts.
    pub(super) stopped: Arc<AtomicBool>,
    pub(super) told: Box<dyn FnOnce(Event) + Send>,
}

/// The object that a blocking call waits for.
#[derive(Default)]
pub(crate) struct Slot {
    event: Mutex<Option<Event>>,
    done: AtomicBool,
    bell: Bell,
}

impl Slot {
    pub(crate) fn fill(&self, event: Event) {
        *lock(&self.event) = Some(event);
        self.done.store(true, Ordering::Release);
        self.bell.ring();
    }
    pub(crate) fn is_done(&self) -> bool {
        self.done.load(Ordering::Acquire)
    }
    /// Sleep until it is filled.
    ///
    /// # Errors
    /// `EAGAIN` when the time is up, `EINTR` when a signal's handler ran.
    pub(crate) fn sleep(&self, deadline: Option<Instant>) -> Result<(), Errno> {
        loop {
            let rings = self.bell.rings();
            if self.is_done() {
                return Ok(());
            }
            self.bell.sleep(rings, deadline)?;
        }
    }
    pub(crate) fn take(&self) -> Option<Event> {
        lock(&self.event).take()
    }
}

impl Target {
    /// Reserve the resources that the sink needs for a later report.
    pub(crate) fn new(sink: Sink) -> Result<(Target, u64), Errno> {
        match sink {
            Sink::Queue(queue, token) => {
                queue.0.reserve()?;
                Ok((Target::Queue(queue), token))
            }
            Sink::Call(call, token) => Ok((Target::Call(call), token)),
            Sink::Nobody => Ok((Target::Nobody, 0)),
        }
    }

    /// True if a blocking call waits for it.
    pub(crate) fn is_slot(&self) -> bool {
        matches!(self, Target::Slot(_))
    }

    pub(crate) fn is(&self, slot: &Arc<Slot>) -> bool {
        matches!(self, Target::Slot(own) if Arc::ptr_eq(own, slot))
    }

    pub(crate) fn is_part(&self) -> bool {
        matches!(self, Target::Part(_))
    }

    pub(crate) fn is_part_of(&self, file: &Arc<AtomicBool>) -> bool {
        matches!(self, Target::Part(part) if Arc::ptr_eq(&part.stopped, file))
    }

    pub(crate) fn is_stopped(&self) -> bool {
        matches!(self, Target::Part(part) if part.stopped.load(Ordering::Relaxed))
    }

    /// Drop the target without a report.
    pub(crate) fn forget(self) {
        match self {
            Target::Queue(queue) => queue.0.release(),
            Target::Guarded(guarded) => guarded.0.forget(),
            _ => {}
        }
    }

    /// Report the event; no lock may be held.
    pub(crate) fn tell_now(self, event: Event) {
        if let Some(late) = self.tell(event) {
            late.run();
        }
    }

    /// Report the event. Calls are returned, for the time when all locks are released.
    #[inline]
    pub(crate) fn tell(self, event: Event) -> Option<Late> {
        match self {
            Target::Queue(queue) => return queue.0.push(event),
            Target::Guarded(guarded) => {
                let (target, guard) = *guarded;
                let late = target.tell(event);
                // The drop of the guard runs the program's code too.
                return Some(Late::new(move || {
                    late.into_iter().for_each(Late::run);
                    drop(guard);
                }));
            }
            Target::Slot(slot) => slot.fill(event),
            Target::Call(call) => return Some(Late::new(move || call(event))),
            Target::Part(part) => return Some(Late::new(move || (part.told)(event))),
            Target::Nobody => {}
        }
        None
    }
}

/// For a file send: the function that reports its end to this target, and one that takes the target back if that has not happened.
pub(crate) fn file_end(target: Target, token: u64, fd: i32) -> (FileDone, impl FnOnce() -> Target) {
    let shared = Arc::new(Mutex::new(Some(target)));
    let told = Arc::clone(&shared);
    let done = Box::new(move |result, bytes| {
        let target = lock(&told).take();
        if let Some(target) = target {
            let mut event = Event::new(EventKind::SendFile, token, fd, result);
            event.bytes = bytes;
            target.tell_now(event);
        }
    });
    let take_back = move || lock(&shared).take().unwrap_or(Target::Nobody);
    (done, take_back)
}

/// An operation of the machine.
pub(crate) struct Op {
    pub(crate) kind: EventKind,
    pub(crate) token: u64,
    pub(crate) target: Target,
    pub(crate) memory: Memory,
    /// The end of its time limit or of its grace period.
    pub(crate) deadline: Option<Instant>,
    /// Set when its time limit has expired, or no caller wants it any more, and it has not ended.
    pub(super) grace: Option<Box<Grace>>,
    /// Number of bytes copied in.
    pub(crate) filled: usize,
    /// State that small operations do not need.
    more: Option<Box<More>>,
}

/// The result of an operation.
pub(super) struct End {
    pub(super) result: Result<usize, Errno>,
    /// Bytes moved, also when `result` is an error.
    pub(super) bytes: usize,
    pub(super) truncated: bool,
    pub(super) in_place: Option<InPlace>,
}

impl End {
    pub(super) fn new(result: Result<usize, Errno>, bytes: usize) -> End {
        End {
            result,
            bytes,
            truncated: false,
            in_place: None,
        }
    }
}

/// The registrations through which work requests and the peer access the memory of an operation.
#[derive(Default)]
struct More {
    /// The buffer that receives a list of pieces before they are scattered.
    bounce: Option<Vec<u8>>,
    /// Local registrations, one for each piece, made on first use.
    local: SmallVec<[Option<Registered>; 1]>,
    /// A whole list in one registration, for a peer that reads it.
    gathered: Option<Registered>,
    /// The registration that is open to the peer.
    open: Option<Registered>,
    /// Ended registrations whose memory is still in use, oldest first, and the pieces that they were for.
    pending: SmallVec<[(PendingDereg, Option<usize>); 1]>,
    /// The buffers returned by the local registrations.
    buffers: SmallVec<[Option<Vec<u8>>; 1]>,
}

impl More {
    /// Close the memory to the peer. Returns true if the memory is no longer in use.
    fn close(&mut self) -> bool {
        if let Some(Err(pending)) = self.open.take().map(Registered::retire) {
            self.pending.push((pending, None));
        }
        self.pending.is_empty()
    }

    /// Like `close`, and also end all local registrations.
    fn end(&mut self) -> bool {
        self.close();
        self.buffers.resize_with(self.local.len(), || None);
        for (i, slot) in self.local.iter_mut().enumerate() {
            match slot.take().map(Registered::retire) {
                Some(Ok(buffer)) => self.buffers[i] = buffer,
                Some(Err(pending)) => self.pending.push((pending, Some(i))),
                None => {}
            }
        }
        self.pending.is_empty()
    }

    /// The buffer of a piece, if it was registered.
    fn buffer(&mut self, piece: usize) -> Option<Vec<u8>> {
        self.buffers.get_mut(piece)?.take()
    }
}

impl Op {
    /// Lists of more than `max_pieces` to send are gathered into one buffer first.
    ///
    /// # Errors
    /// `ENOMEM` when the buffer for a list of pieces cannot be allocated; the target is returned.
    pub(crate) fn new(
        kind: EventKind,
        memory: Memory,
        target: Target,
        token: u64,
        max_pieces: usize,
    ) -> Result<Op, (Errno, Target)> {
        let mut memory = memory;
        let mut bounce = None;
        if let Memory::List(list) = &memory {
            if matches!(kind, EventKind::RecvMsg) {
                let len = memory.len();
                // The length that the program claims may be wrong or larger than the available memory.
                if Vec::<u8>::new().try_reserve_exact(len).is_err() {
                    return Err((Errno::NOMEM, target));
                }
                bounce = Some(vec![0; len]);
            } else if list.len() > max_pieces || list.iter().any(|m| matches!(m, Memory::List(_))) {
                // More pieces than a work request can hold: one copy.
                bounce = Some(memory.to_vec());
            }
        }
        if let (None, Memory::List(list)) = (&bounce, &mut memory) {
            list.retain(|piece| !piece.is_empty());
        }
        let more = bounce.map(|bounce| {
            Box::new(More {
                bounce: Some(bounce),
                ..More::default()
            })
        });
        Ok(Op {
            kind,
            token,
            target,
            memory,
            deadline: None,
            grace: None,
            filled: 0,
            more,
        })
    }

    pub(crate) fn is_send(&self) -> bool {
        matches!(self.kind, EventKind::Send | EventKind::SendMsg)
    }

    /// Copy `out.len()` bytes at offset `off`.
    pub(crate) fn read(&self, off: usize, out: &mut [u8]) -> Result<(), Error> {
        let mut off = off;
        let mut local: &[Option<Registered>] = &[];
        if let Some(more) = &self.more {
            if let Some(bounce) = &more.bounce {
                return copy_slice(bounce, off, out);
            }
            local = &more.local;
        }
        if let Some(Some(mr)) = local.first()
            && !matches!(self.memory, Memory::List(_) | Memory::Region { .. })
        {
            return Ok(mr.memory.read(off, out)?);
        }
        match &self.memory {
            Memory::List(list) => {
                let mut done = 0;
                for (i, piece) in list.iter().enumerate() {
                    let len = piece.len();
                    if off >= len {
                        off -= len;
                        continue;
                    }
                    let n = (len - off).min(out.len() - done);
                    let part = &mut out[done..done + n];
                    match local.get(i) {
                        Some(Some(mr)) => mr.memory.read(off, part)?,
                        _ => piece.read(off, part)?,
                    }
                    done += n;
                    off = 0;
                    if done == out.len() {
                        break;
                    }
                }
                if done == out.len() {
                    Ok(())
                } else {
                    Err(Error::Bounds)
                }
            }
            one => one.read(off, out),
        }
    }

    /// Copy `len` bytes at `from` of a region to offset `off`.
    pub(crate) fn fill(
        &mut self,
        off: usize,
        src: &Mr,
        from: usize,
        len: usize,
    ) -> Result<(), Error> {
        self.filled = self.filled.max(off + len);
        if let Some(more) = &mut self.more {
            if let Some(bounce) = &mut more.bounce {
                let Some(dst) = bounce.get_mut(off..off.saturating_add(len)) else {
                    return Err(Error::Bounds);
                };
                return Ok(src.read(from, dst)?);
            }
            if let Some(Some(mr)) = more.local.first() {
                return Ok(src.copy_to(from, &mr.memory, off, len)?);
            }
        }
        match &mut self.memory {
            Memory::Region {
                region, off: start, ..
            } => Ok(src.copy_to(from, &region.mr, *start + off, len)?),
            Memory::Raw(raw) => Ok(src.copy_to_raw(from, &raw.slice(off, len)?)?),
            Memory::Owned(bytes) => match bytes.get_mut(off..off.saturating_add(len)) {
                Some(dst) => Ok(src.read(from, dst)?),
                None => Err(Error::Bounds),
            },
            Memory::List(_) => Err(Error::Bounds),
        }
    }

    /// The elements of a work request for `len` bytes at offset `off`; registers the memory if needed.
    pub(crate) fn sges(
        &mut self,
        domain: &Arc<Domain>,
        off: usize,
        len: usize,
        out: &mut SmallVec<[Sge; 2]>,
    ) -> Result<(), Error> {
        let access = self.local_access(domain);
        let more = self.more.get_or_insert_default();
        if let Some(bounce) = more.bounce.take() {
            // For sends only: from now on the buffer is the one piece.
            self.memory = Memory::Owned(bounce);
        }
        let (mut off, mut len) = (off, len);
        match &mut self.memory {
            Memory::List(list) => {
                more.local.resize_with(list.len(), || None);
                for (piece, slot) in list.iter_mut().zip(&mut more.local) {
                    let whole = slot.as_ref().map_or(piece.len(), |mr| mr.memory.len());
                    if off >= whole {
                        off -= whole;
                        continue;
                    }
                    if len == 0 {
                        break;
                    }
                    let n = (whole - off).min(len);
                    out.push(name(domain, piece, slot, (off, n), access)?);
                    len -= n;
                    off = 0;
                }
                Ok(())
            }
            one => {
                more.local.resize_with(1, || None);
                let slot = &mut more.local[0];
                out.push(name(domain, one, slot, (off, len), access)?);
                Ok(())
            }
        }
    }

    /// Open exactly the `len` bytes at offset `off` to the peer. Returns their address and key.
    pub(crate) fn open(
        &mut self,
        domain: &Domain,
        off: usize,
        len: usize,
        access: Access,
    ) -> Result<(u64, u32), Error> {
        Ok(self.open_range(domain, off, len, access)?.place())
    }

    /// The element of a Read into its first `len` bytes. iWARP reads by a Write of the peer's device, which needs the right to write.
    pub(crate) fn sink(&mut self, domain: &Domain, len: usize) -> Result<Sge, Error> {
        let open = self.open_range(domain, 0, len, Access::REMOTE_WRITE)?;
        Ok(open.sge(0, len))
    }

    fn open_range(
        &mut self,
        domain: &Domain,
        off: usize,
        len: usize,
        access: Access,
    ) -> Result<&Registered, Error> {
        let more = self.more.get_or_insert_default();
        if let Some(bounce) = more.bounce.take() {
            more.local
                .push(Some(domain.reg(bounce, Access::LOCAL_WRITE)?));
        }
        let access = access | Access::LOCAL_WRITE;
        // The earlier registration ends here; the peer must have left it.
        if !more.close() {
            return Err(Error::Io(Errno::PROTO.into()));
        }
        let mr = if let Some(Some(mr)) = more.local.first() {
            domain.part(&mr.memory, off, len, access)?
        } else {
            match &mut self.memory {
                Memory::Region {
                    region, off: start, ..
                } => domain.part(&region.mr, *start + off, len, access)?,
                Memory::Raw(raw) => domain.reg_raw(&raw.slice(off, len)?, access)?,
                Memory::Owned(bytes) => {
                    let bytes = std::mem::take(bytes);
                    more.local
                        .push(Some(domain.reg(bytes, Access::LOCAL_WRITE)?));
                    let Some(Some(mr)) = more.local.first() else {
                        return Err(Error::Bounds);
                    };
                    domain.part(&mr.memory, off, len, access)?
                }
                Memory::List(_) if access.contains(Access::REMOTE_WRITE) => {
                    return Err(Error::Bounds);
                }
                list @ Memory::List(_) => {
                    let whole = domain.reg(list.to_vec(), Access::LOCAL_WRITE)?;
                    let part = domain.part(&whole.memory, off, len, access)?;
                    more.gathered = Some(whole);
                    part
                }
            }
        };
        Ok(more.open.insert(mr))
    }

    /// The rights of its memory for work requests of this side. An RNIC pins memory for what it may do with it, and a program may send what is read-only.
    fn local_access(&self, domain: &Domain) -> Access {
        if domain.rnic().is_some() && self.is_send() {
            Access::empty()
        } else {
            Access::LOCAL_WRITE
        }
    }

    /// End the operation: close its memory, and report its result.
    ///
    /// # Errors
    /// The memory is still in use: the result must be reported later.
    #[inline]
    pub(super) fn finish(&mut self, fd: i32, end: End) -> Result<Option<Late>, Box<Parked>> {
        if self.more.as_mut().is_some_and(|more| !more.end()) {
            return Err(self.park(fd, end));
        }
        if let Some(mut more) = self.more.take() {
            self.take_memory_back(&mut more, end.bytes);
        }
        let memory = std::mem::replace(&mut self.memory, Memory::Owned(Vec::new()));
        let target = std::mem::replace(&mut self.target, Target::Nobody);
        Ok(target.tell(Event {
            bytes: end.bytes,
            truncated: end.truncated,
            memory: end.in_place.is_none().then_some(memory),
            in_place: end.in_place,
            ..Event::new(self.kind, self.token, fd, end.result)
        }))
    }

    /// The oldest ended registration whose memory is still in use, and its piece.
    fn next_leaving(&mut self) -> Option<(PendingDereg, Option<usize>)> {
        let more = self.more.as_mut().filter(|m| !m.pending.is_empty())?;
        Some(more.pending.remove(0))
    }

    fn is_used(&self) -> bool {
        self.more.as_ref().is_some_and(|m| !m.pending.is_empty())
    }

    /// Store the returned buffer of a piece.
    fn came_back(&mut self, piece: Option<usize>, buffer: Option<Vec<u8>>) {
        if let (Some(more), Some(piece)) = (&mut self.more, piece) {
            more.buffers[piece] = buffer;
        }
    }

    /// Move its state out, to report its result later.
    pub(super) fn park(&mut self, fd: i32, end: End) -> Box<Parked> {
        let mut more = self.more.take();
        if let Some(more) = &mut more {
            more.end();
        }
        let op = Op {
            kind: self.kind,
            token: self.token,
            target: std::mem::replace(&mut self.target, Target::Nobody),
            memory: std::mem::replace(&mut self.memory, Memory::Owned(Vec::new())),
            deadline: None,
            grace: None,
            filled: self.filled,
            more,
        };
        Box::new(Parked { op, fd, end })
    }

    /// Restore its memory in its original form, with the received data.
    fn take_memory_back(&mut self, more: &mut More, bytes: usize) {
        let is_list = matches!(self.memory, Memory::List(_));
        if !self.is_send() && is_list {
            if let Some(bounce) = more.bounce.take().or_else(|| more.buffer(0)) {
                self.scatter(&bounce, bytes);
            }
        } else if let Memory::List(list) = &mut self.memory {
            for (i, piece) in list.iter_mut().enumerate() {
                if let (Memory::Owned(bytes), Some(buffer)) = (piece, more.buffer(i)) {
                    *bytes = buffer;
                }
            }
        } else if let Memory::Owned(bytes) = &mut self.memory
            && let Some(buffer) = more.buffer(0)
        {
            *bytes = buffer;
        }
    }

    /// Distribute the received data over the pieces.
    fn scatter(&mut self, bounce: &[u8], bytes: usize) {
        let mut rest = &bounce[..bytes.min(bounce.len())];
        if let Memory::List(list) = &mut self.memory {
            for piece in list {
                let (now, later) = rest.split_at(piece.len().min(rest.len()));
                match piece {
                    Memory::Owned(bytes) => bytes[..now.len()].copy_from_slice(now),
                    Memory::Raw(raw) => drop(raw.write(0, now)),
                    Memory::Region { region, off, .. } => drop(region.mr.write(*off, now)),
                    Memory::List(_) => {}
                }
                rest = later;
            }
        }
    }
}

/// A completed operation, reported when its memory is no longer in use. A peer that keeps using it loses its connection.
pub(super) struct Parked {
    op: Op,
    fd: i32,
    end: End,
}

impl Parked {
    /// Report it now, if its memory is not in use. Returns the call to make, and true if a blocking call waits for it.
    pub(super) fn try_tell(self: Box<Self>) -> Result<(Option<Late>, bool), Box<Parked>> {
        if self.op.is_used() {
            return Err(self);
        }
        let waiting = self.op.target.is_slot();
        let Parked { mut op, fd, end } = *self;
        // No registration is left, so this cannot fail.
        let late = op.finish(fd, end).ok();
        Ok((late.flatten(), waiting))
    }

    /// Call `told` when its memory is free, on the engine's thread, with the call to make.
    pub(super) fn wait(
        mut self: Box<Self>,
        told: impl FnOnce(Option<Late>, bool) + Send + 'static,
    ) {
        // In order: a registration of a part keeps the whole one alive.
        if let Some((pending, piece)) = self.op.next_leaving() {
            pending.then(move |buffer| {
                self.op.came_back(piece, buffer);
                self.wait(told);
            });
            return;
        }
        if let Ok((late, waiting)) = self.try_tell() {
            told(late, waiting);
        }
    }
}

/// One element of a work request.
fn name(
    domain: &Arc<Domain>,
    piece: &mut Memory,
    slot: &mut Option<Registered>,
    (off, len): (usize, usize),
    access: Access,
) -> Result<Sge, Error> {
    if let Memory::Region {
        region, off: start, ..
    } = piece
    {
        return region.sge(domain, *start + off, len);
    }
    let mr = match slot {
        Some(mr) => mr,
        None => slot.insert(match piece {
            Memory::Raw(raw) => domain.reg_raw(raw, access)?,
            Memory::Owned(bytes) => domain.reg(std::mem::take(bytes), access)?,
            Memory::Region { .. } | Memory::List(_) => return Err(Error::Bounds),
        }),
    };
    Ok(mr.sge(off, len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moves_with_each_short_message_is_small() {
        // Past 128 bytes a move is a call of `memmove`.
        assert!(size_of::<Op>() <= 128, "{}", size_of::<Op>());
        assert!(size_of::<Event>() <= 128, "{}", size_of::<Event>());
    }
}
