//! Receiving: bytes are copied from receives, fetched from sources, or written by the peer to a sink.

use rustix::io::Errno;
use weft_sockets::lock::{lock, try_lock};
use weft_sockets::memory::{Sink, room, scatter};
use weft_sockets::stream::Stream as _;
use weft_sockets::wait::Wait;
use weft_verbs::{Access, Mr, RawMemory, RemoteAddr, SendWr, protect};

use super::{Conn, Core, Fetch, TAG_READ};
use crate::RecvFlags;
use crate::machine::policy::Mode;
use crate::machine::{Endpoint, Next};
use crate::wire::{Buffer, locks};

/// Bytes fetched at once for memory that cannot be fetched into.
const BOUNCE: usize = 256 << 10;

/// State of the receiving thread only.
#[derive(Default)]
pub(super) struct Receiver {
    /// A buffer for fetched bytes that are then copied.
    bounce: Option<Mr>,
}

/// The next bytes to receive.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Bytes {
        at: usize,
        len: usize,
    },
    Source {
        index: u32,
        at: Buffer,
    },
    Placed(usize),
    /// This call returns what it has.
    Stop,
    End,
}

impl Conn {
    /// Receive: what there is, at least one byte; 0 at the end of the stream. Stops before an urgent byte.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ENOTCONN`, `ECONNRESET` and what else ended the connection.
    pub(crate) fn recv(
        &self,
        to: &mut [Sink<'_>],
        flags: RecvFlags,
        wait: Wait,
    ) -> Result<usize, Errno> {
        let want = room(to);
        if want == 0 {
            return Ok(0);
        }
        let peek = flags.contains(RecvFlags::PEEK);
        let mut receiver = if wait.waits() {
            lock(&self.receiver)
        } else {
            try_lock(&self.receiver).ok_or(Errno::AGAIN)?
        };
        let mut done = 0;
        while done < want {
            let skip = if peek { done } else { 0 };
            let fresh = done == 0;
            let mut found = self.with(|core| self.find_next(core, skip, fresh));
            let more = fresh || flags.contains(RecvFlags::WAITALL);
            if found.is_none() && more && wait.waits() {
                let sink = self.open_sink(to, done, peek, wait);
                let waited =
                    self.wait_until(wait.deadline(), |core| self.find_next(core, skip, fresh));
                found = Some(waited.flatten());
                if let Some(region) = sink {
                    found = Some(self.close_sink(region, found, fresh));
                }
            } else if found.is_none() && more {
                found = self.with(|core| {
                    self.drive(core);
                    self.find_next(core, skip, fresh)
                });
            }
            let left = want - done;
            if matches!(found, Some(Ok(Found::Bytes { .. } | Found::Source { .. }))) {
                settle_all(to);
            }
            let step = match found {
                None if fresh => Err(Errno::AGAIN),
                None | Some(Ok(Found::Stop | Found::End)) => break,
                Some(Err(errno)) => Err(errno),
                Some(Ok(Found::Bytes { at, len })) => {
                    let n = len.min(left);
                    // No other thread reads, and the receive is not posted again before it is empty.
                    let copied = scatter(&self.inbox, at, n, to, done);
                    copied.map(|()| n).map_err(|_| Errno::FAULT)
                }
                Some(Ok(Found::Source { index, at })) => {
                    self.fetch(&mut receiver, to, done, index, at, peek)
                }
                Some(Ok(Found::Placed(len))) => Ok(len.min(left)),
            };
            match step {
                Ok(n) => {
                    done += n;
                    if !peek {
                        self.with(|core| {
                            if let Some(machine) = &mut core.machine {
                                machine.taken(n as u32);
                            }
                            self.act(core);
                        });
                    }
                }
                Err(errno) if fresh => return Err(errno),
                Err(_) => break,
            }
        }
        self.with(|core| core.send_stats.received_bytes += if peek { 0 } else { done as u64 });
        Ok(done)
    }

    /// The bytes to receive after the next `skip`; `None` while more may come. `fresh`: the call has no bytes yet, so it may pass a mark.
    fn find_next(&self, core: &mut Core, skip: usize, fresh: bool) -> Option<Result<Found, Errno>> {
        let over = core.state.over;
        let Some(machine) = &mut core.machine else {
            return Some(Err(over.unwrap_or(Errno::NOTCONN)));
        };
        if core.state.read_shut {
            return Some(Ok(Found::End));
        }
        loop {
            return match machine.look(skip as u64) {
                Next::Mark if fresh => {
                    machine.pass_mark();
                    continue;
                }
                Next::Mark => Some(Ok(Found::Stop)),
                Next::Bytes { buffer, off, len } => Some(Ok(Found::Bytes {
                    at: self.payload(buffer, off),
                    len: len as usize,
                })),
                // The sender is about to say where it is now: its lock says so, as far as it can be trusted.
                Next::Source { index, .. }
                    if over.is_none()
                        && self.locks.load_u64(self.lock_at(index))
                            == Ok(locks::word(index, locks::WRITER)) =>
                {
                    None
                }
                Next::Source { .. } if over.is_some() => over.map(Err),
                Next::Source { index, at, .. } => Some(Ok(Found::Source { index, at })),
                Next::Placed { len } => Some(Ok(Found::Placed(len as usize))),
                Next::End => Some(Ok(Found::End)),
                Next::Nothing => over.map(Err),
            };
        }
    }

    /// Fetch the beginning of a source into the program's memory at `done`: bytes fetched, perhaps none because the sender was faster.
    fn fetch(
        &self,
        receiver: &mut Receiver,
        to: &mut [Sink<'_>],
        done: usize,
        index: u32,
        at: Buffer,
        peek: bool,
    ) -> Result<usize, Errno> {
        let place = self.lock_at(index);
        let free = locks::word(index, locks::FREE);
        let ours = locks::word(index, locks::READER);
        match self.locks.compare_swap(place, free, ours) {
            Ok(was) if was == free => {}
            Ok(was) if was == locks::word(index, locks::WRITER) => return Ok(0),
            // weft as the peer writes nothing else there.
            _ => {
                self.with(|core| self.fail(core, Errno::PROTO));
                return Err(Errno::PROTO);
            }
        }
        // The source may have moved since the last check; now it cannot.
        let now = self.with(|core| {
            let machine = core.machine.as_ref()?;
            let skip = if peek { done as u64 } else { 0 };
            match machine.look(skip) {
                Next::Source { index: of, at, .. } if of == index => Some(at),
                _ => None,
            }
        });
        let at = now.unwrap_or(at);
        let fetched = match direct_part(to, done) {
            Some(memory) if memory.len() >= LOCAL_MIN || memory.len() >= at.len as usize => {
                let len = memory.len().min(at.len as usize);
                self.fetch_direct(&memory, len, at)
            }
            _ => self.fetch_by_copy(receiver, to, done, at),
        };
        let len = *fetched.as_ref().unwrap_or(&0);
        let next = if len == at.len as usize && !peek {
            locks::word(
                index.wrapping_add(u32::from(self.options.sources)),
                locks::FREE,
            )
        } else {
            free
        };
        let _ = self.store_lock(index, next);
        if fetched.is_ok() && !peek {
            self.with(|core| core.send_stats.fetched_bytes += len as u64);
        }
        fetched
    }

    fn fetch_direct(&self, memory: &RawMemory, len: usize, from: Buffer) -> Result<usize, Errno> {
        let part = memory.slice(0, len).map_err(|_| Errno::FAULT)?;
        let region = self.pd.reg_raw(&part, Access::LOCAL_WRITE);
        let region = region.map_err(|error| weft_sockets::error::errno(&error))?;
        let read = self.read(&region, len, from);
        // After the region is dropped, the peer cannot write to the memory.
        drop(region);
        read.map(|()| len)
    }

    fn fetch_by_copy(
        &self,
        receiver: &mut Receiver,
        to: &mut [Sink<'_>],
        done: usize,
        from: Buffer,
    ) -> Result<usize, Errno> {
        let len = (room(to) - done).min(from.len as usize).min(BOUNCE);
        if receiver.bounce.is_none() {
            let made = self.pd.alloc_mr(BOUNCE, Access::LOCAL_WRITE);
            receiver.bounce = Some(made.map_err(|_| Errno::NOBUFS)?);
        }
        let bounce = receiver.bounce.as_ref().ok_or(Errno::NOBUFS)?;
        self.read(bounce, len, from)?;
        scatter(bounce, 0, len, to, done).map_err(|_| Errno::FAULT)?;
        Ok(len)
    }

    /// RDMA Read, until it is complete.
    fn read(&self, to: &Mr, len: usize, from: Buffer) -> Result<(), Errno> {
        let remote = RemoteAddr {
            addr: from.addr,
            rkey: from.key,
        };
        let wr = SendWr::read(TAG_READ, remote)
            .sge(to.sge(0, len))
            .signaled();
        self.with(|core| {
            if let Some(errno) = core.state.over {
                return Err(errno);
            }
            core.read = Fetch::Going;
            self.qp.post_send_one(wr).map_err(|error| {
                tracing::debug!(%error, "a read was refused");
                self.fail(core, Errno::CONNRESET);
                Errno::CONNRESET
            })
        })?;
        let done = self.wait_through(None, |core| {
            let failed = core.state.over.unwrap_or(Errno::CONNRESET);
            match core.read {
                Fetch::Done => {
                    core.read = Fetch::None;
                    Some(Ok(()))
                }
                Fetch::Failed => Some(Err(failed)),
                _ if self.end.get().is_some() => Some(Err(failed)),
                _ => None,
            }
        });
        done.unwrap_or(Err(Errno::CONNRESET))
    }

    // ---- sinks -----------------------------------------------------------------------------------------------------

    /// Open the memory that a call waits for to the peer.
    fn open_sink(&self, to: &[Sink<'_>], done: usize, peek: bool, wait: Wait) -> Option<Mr> {
        if peek || wait != Wait::Forever || !self.options.sinks {
            return None;
        }
        let memory = direct_part(to, done).filter(|it| it.len() >= self.options.zero_copy)?;
        if protect::is_guarded(memory.as_ptr(), memory.len()) {
            // Bytes of it may be on their way still.
            return None;
        }
        self.with(|core| {
            if core.policy.mode() == Mode::Bsdp || core.state.over.is_some() {
                return None;
            }
            let machine = core.machine.as_mut()?;
            let most = crate::wire::MAX_BUFFER as usize;
            let memory = memory.slice(0, memory.len().min(most)).ok()?;
            let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            let region = self.pd.reg_raw(&memory, rights).ok()?;
            let at = Buffer {
                addr: region.addr(),
                key: region.rkey(),
                len: region.len() as u32,
            };
            if !machine.offer_sink(at) {
                return None;
            }
            self.act(core);
            Some(region)
        })
    }

    /// The memory is the program's own again.
    fn close_sink(
        &self,
        region: Mr,
        found: Option<Result<Found, Errno>>,
        fresh: bool,
    ) -> Result<Found, Errno> {
        let open = self.with(|core| {
            let machine = core.machine.as_mut()?;
            if machine.has_sink() && core.state.over.is_none() {
                machine.cancel_sink();
                self.act(core);
            }
            Some(())
        });
        if open.is_some() {
            self.wait_through(None, |core| {
                let machine = core.machine.as_ref();
                let closed = machine.is_none_or(|machine| !machine.has_sink());
                (closed || core.state.over.is_some()).then_some(())
            });
        }
        drop(region);
        // Bytes that arrived meanwhile have been received, in place if they were written directly.
        let found = match found {
            Some(Ok(found)) => Ok(found),
            Some(Err(errno)) => {
                let now = self.with(|core| self.find_next(core, 0, fresh));
                now.unwrap_or(Err(errno))
            }
            None => Err(Errno::AGAIN),
        };
        if let Ok(Found::Placed(len)) = found {
            self.with(|core| core.send_stats.sunk_bytes += len as u64);
        }
        found
    }

    /// Takes the urgent byte.
    ///
    /// # Errors
    /// `EINVAL` if there is none, `EAGAIN` if the peer has announced one.
    pub(crate) fn take_urgent(&self, peek: bool) -> Result<u8, Errno> {
        self.with(|core| {
            self.drive(core);
            let byte = if peek {
                core.urgent
            } else {
                core.urgent.take()
            };
            let pends = core.machine.as_ref().is_some_and(Endpoint::urgent_pends);
            byte.ok_or(if pends { Errno::AGAIN } else { Errno::INVAL })
        })
    }

    /// Whether the next byte is the urgent one.
    pub(crate) fn at_mark(&self) -> bool {
        self.with(|core| {
            self.drive(core);
            core.machine
                .as_ref()
                .is_some_and(|m| m.look(0) == Next::Mark)
        })
    }

    /// Bytes that can be received.
    pub(crate) fn readable(&self) -> u64 {
        self.with(|core| {
            self.drive(core);
            core.machine.as_ref().map_or(0, Endpoint::readable)
        })
    }
}

/// Less memory than this is not worth a registration of its own.
const LOCAL_MIN: usize = 4096;

/// We are about to write to memory that may be protected, and could wait for ourselves.
fn settle_all(to: &[Sink<'_>]) {
    for sink in to {
        let (at, len) = sink.place();
        if protect::is_guarded(at, len) {
            protect::settle(at, len);
        }
    }
}

/// The rest of the piece at `done`, if bytes can be put straight into it.
fn direct_part(to: &[Sink<'_>], mut done: usize) -> Option<RawMemory> {
    for piece in to {
        let (_, len) = piece.place();
        if done < len {
            return match piece {
                Sink::Raw(raw) => raw.slice(done, len - done).ok(),
                Sink::Bytes(_) => None,
            };
        }
        done -= len;
    }
    None
}
