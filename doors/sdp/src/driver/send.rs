//! Sending: through the send buffer, or as sources.

use std::time::Instant;

use rustix::io::Errno;
use weft_sockets::lock::{lock, try_lock};
use weft_sockets::memory::{Source, gather, take, total};
use weft_sockets::stream::Stream as _;
use weft_sockets::wait::Wait;
use weft_verbs::ext::CqExt;
use weft_verbs::{InlineData, RawMemory, protect};

use super::{Conn, Core, INLINE, LOW};
use crate::machine::Endpoint;
use crate::machine::policy::Way;
use crate::wire::HEADER_LEN;

/// Bytes of one source, at most: so that the peer can begin to fetch, and copies stay small.
const SOURCE_MAX: usize = 16 << 20;
/// Answers that are waited for when threads ring: as many as a few sources of one buffer need.
const AT_ONCE: u32 = 8;
/// Bytes copied into the send buffer before they may go out.
const STEP: u32 = 64 << 10;

impl Conn {
    /// Send all of it; without waiting, what there is room for, and with a limit of time, or when a signal's handler ran, what there was room for until then.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ENOTCONN`, `EPIPE` after a shutdown or when the peer has closed, `ECONNRESET` and what else ended the connection.
    pub(crate) fn send(&self, from: &[Source<'_>], wait: Wait) -> Result<usize, Errno> {
        let _turn = self.turn(wait)?;
        let len = total(from);
        if len <= INLINE - HEADER_LEN
            && let Some(sent) = self.send_now(from, len)
        {
            return sent;
        }
        let [Source::Raw(memory)] = from else {
            return self.buffered(from, wait);
        };
        if wait == Wait::Not {
            // A call that does not wait could not know when the program owns the memory again.
            return self.buffered(from, wait);
        }
        let mut done = 0;
        while done < len {
            let part = memory
                .slice(done, (len - done).min(SOURCE_MAX))
                .map_err(|_| Errno::FAULT)?;
            match self.send_part(&part, wait) {
                Ok(n) => {
                    done += n;
                    if n < part.len() {
                        break;
                    }
                }
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        Ok(done)
    }

    fn turn(&self, wait: Wait) -> Result<std::sync::MutexGuard<'_, ()>, Errno> {
        if wait.waits() {
            Ok(lock(&self.sender))
        } else {
            try_lock(&self.sender).ok_or(Errno::AGAIN)
        }
    }

    fn send_part(&self, memory: &RawMemory, wait: Wait) -> Result<usize, Errno> {
        let pages = protect::whole_pages(memory);
        let way = self.with(|core| {
            core.policy
                .way(memory.len(), pages.map_or(0, |(_, len)| len))
        });
        match (way, pages) {
            (Way::Buffered, _) => self.buffered(&[Source::Raw(memory)], wait),
            (Way::Async, Some((off, len))) => self.asynchronous(memory, off, len, wait),
            _ => self.synchronous(memory, wait),
        }
    }

    /// Why nothing can be sent.
    fn no_send(core: &Core) -> Result<(), Errno> {
        let Some(machine) = &core.machine else {
            return Err(core.state.over.unwrap_or(Errno::NOTCONN));
        };
        if core.state.send_shut || machine.is_shut() {
            return Err(Errno::PIPE);
        }
        match core.state.over {
            Some(_) if machine.peer_closed() => Err(Errno::PIPE),
            Some(errno) => Err(errno),
            None => Ok(()),
        }
    }

    /// The short way of a small send with nothing before it.
    fn send_now(&self, from: &[Source<'_>], len: usize) -> Option<Result<usize, Errno>> {
        self.with(|core| {
            if let Err(errno) = Self::no_send(core) {
                return Some(Err(errno));
            }
            if core.posted >= super::MOST_POSTED {
                return None;
            }
            // Its credits are those of all that has come.
            self.drive(core);
            let message = core.machine.as_mut()?.send_now(len as u32)?;
            let mut data = InlineData::from_slice(&message.emit());
            let head = data.len();
            data.resize(head + len, 0);
            let copied = take(from, 0, &mut data[head..]);
            self.post_now(core, data);
            core.send_stats.buffered_bytes += len as u64;
            core.send_stats.buffered_sends += 1;
            if copied.is_err() {
                // The message has taken its number.
                self.fail(core, Errno::FAULT);
                return Some(Err(Errno::FAULT));
            }
            Some(Ok(len))
        })
    }

    /// BSDP.
    fn buffered(&self, from: &[Source<'_>], wait: Wait) -> Result<usize, Errno> {
        let all = total(from);
        let mut done = 0;
        while done < all {
            let left = u32::try_from(all - done).unwrap_or(u32::MAX);
            let put = |core: &mut Core| -> Option<Result<usize, Errno>> {
                if let Err(errno) = Self::no_send(core) {
                    return Some(Err(errno));
                }
                let machine = core.machine.as_mut()?;
                let room = machine.room();
                if room < left.min(LOW) {
                    return None;
                }
                let run = machine.append(left.min(room).min(STEP));
                let (off, len) = (run.off as usize, run.len as usize);
                let first = len.min(self.ring.len() - off);
                let copied = gather(from, done, first, &self.ring, off).and_then(|()| {
                    if first < len {
                        gather(from, done + first, len - first, &self.ring, 0)
                    } else {
                        Ok(())
                    }
                });
                if copied.is_err() {
                    self.fail(core, Errno::FAULT);
                    return Some(Err(Errno::FAULT));
                }
                core.send_stats.buffered_bytes += len as u64;
                self.act(core);
                Some(Ok(len))
            };
            match self.find(wait, put) {
                Ok(len) => done += len,
                Err(errno) if done == 0 => return Err(errno),
                Err(_) => break,
            }
        }
        self.with(|core| core.send_stats.buffered_sends += 1);
        Ok(done)
    }

    /// Look once, and then as long as the call waits.
    fn find<T>(
        &self,
        wait: Wait,
        mut look: impl FnMut(&mut Core) -> Option<Result<T, Errno>>,
    ) -> Result<T, Errno> {
        let found = self.with(&mut look);
        if let Some(found) = found {
            return found;
        }
        if wait.waits() {
            return self.wait_until(wait.deadline(), look).flatten();
        }
        let found = self.with(|core| {
            self.drive(core);
            look(core)
        });
        found.unwrap_or(Err(Errno::AGAIN))
    }

    /// Sends one urgent byte after the bytes that were sent.
    pub(crate) fn send_urgent(&self, byte: u8, wait: Wait) -> Result<(), Errno> {
        let _turn = self.turn(wait)?;
        self.find(wait, |core| {
            if let Err(errno) = Self::no_send(core) {
                return Some(Err(errno));
            }
            let machine = core.machine.as_mut().filter(|m| m.room() > 0)?;
            let run = machine.append_urgent();
            let put = self.ring.write(run.off as usize, &[byte]);
            self.act(core);
            Some(put.map_err(|_| Errno::IO))
        })
    }

    /// Wait until the machine takes another source, and queue it.
    fn queue_source(
        &self,
        memory: &RawMemory,
        mut hold: Option<protect::Hold>,
        wait: Wait,
    ) -> Result<crate::machine::Op, Errno> {
        self.find(wait, |core| {
            if let Err(errno) = Self::no_send(core) {
                return Some(Err(errno));
            }
            if !Self::may_source(core) {
                return None;
            }
            Some(self.add_source(core, memory, hold.take()))
        })
    }

    /// ZSDP: the receiver fetches while we wait.
    fn synchronous(&self, memory: &RawMemory, wait: Wait) -> Result<usize, Errno> {
        let len = memory.len();
        let op = self.queue_source(memory, None, wait)?;
        self.with(|core| {
            core.send_stats.sync_bytes += len as u64;
            core.send_stats.sync_sends += 1;
        });
        let back = |core: &mut Core| {
            (core.state.over.is_some() || Self::is_back(core, op)).then_some(core.state.over)
        };
        let patience = self
            .options
            .patience
            .and_then(|p| Instant::now().checked_add(p));
        let deadline = match (wait.deadline(), patience) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        let mut over = self.wait_until(deadline, back);
        if over == Err(Errno::AGAIN) && wait.deadline().is_none_or(|end| end > Instant::now()) {
            // The receiver does not come: both ends may be sending. As long as there is room for a copy, this one returns.
            over = self.wait_until(wait.deadline(), |core| {
                if self.may_copy(core, len) || Self::is_back(core, op) {
                    self.take_back(core, Some(op));
                }
                back(core)
            });
        }
        let over = over.unwrap_or_else(|_| {
            // Out of time, or a signal came: the bytes are as good as sent.
            self.insist(op);
            self.with(|core| core.state.over)
        });
        match over {
            None => Ok(len),
            Some(errno) => {
                // After the regions are dropped, the peer cannot read the memory.
                self.with(Self::drop_sources);
                Err(errno)
            }
        }
    }

    /// Wait until a source's memory is the program's, and see to it.
    fn insist(&self, op: crate::machine::Op) {
        let nap = std::time::Duration::from_millis(1);
        loop {
            let back = self.wait_through(Some(Instant::now() + nap), |core| {
                (core.state.over.is_some() || Self::is_back(core, op)).then_some(())
            });
            if back.is_some() {
                return;
            }
            self.with(|core| self.take_back(core, Some(op)));
        }
    }

    /// AZ-SDP: the whole pages are protected and fetched after we have returned; the ends go through the send buffer.
    fn asynchronous(
        &self,
        memory: &RawMemory,
        off: usize,
        len: usize,
        wait: Wait,
    ) -> Result<usize, Errno> {
        let slice = |off, len| memory.slice(off, len).map_err(|_| Errno::FAULT);
        let pages = slice(off, len)?;
        let hold = self.doorbell()?.with_fd(|fd| protect::guard(&pages, fd));
        let hold = match hold {
            Some(Ok(hold)) => hold,
            refused => {
                let why = match refused {
                    Some(Err(why)) => why,
                    _ => protect::Refused::System,
                };
                self.with(|core| core.send_stats.refused.count(why));
                return self.synchronous(memory, wait);
            }
        };
        let mut done = 0;
        if off > 0 {
            let head = slice(0, off)?;
            done = self.buffered(&[Source::Raw(&head)], wait)?;
            if done < off {
                return Ok(done);
            }
        }
        let fresh = hold.is_fresh();
        match self.queue_source(&pages, Some(hold), wait) {
            Ok(_) => done += len,
            Err(errno) if done == 0 => return Err(errno),
            Err(_) => return Ok(done),
        }
        self.with(|core| {
            core.policy.sent();
            core.send_stats.async_bytes += len as u64;
            core.send_stats.async_sends += 1;
            core.send_stats.still_protected += u64::from(!fresh);
        });
        let rest = slice(off + len, memory.len() - off - len)?;
        if !rest.is_empty() {
            done += self.buffered(&[Source::Raw(&rest)], wait).unwrap_or(0);
        }
        if !self.is_local() {
            // The program may compute now: the engine answers the peer's fetches.
            self.cq.release();
        }
        Ok(done)
    }

    /// The doorbell for threads that wait for our memory.
    fn doorbell(&self) -> Result<&weft_verbs::Doorbell, Errno> {
        if let Some(bell) = self.doorbell.get() {
            return Ok(bell);
        }
        let me = self.me.clone();
        let made = self.pd.device().doorbell(move || {
            if let Some(conn) = me.upgrade() {
                conn.wanted.store(true, std::sync::atomic::Ordering::SeqCst);
                conn.make_progress();
                // In shared memory the answer to an atomic is there at once.
                for _ in 0..AT_ONCE {
                    if !conn.cq.look() {
                        break;
                    }
                    conn.make_progress();
                }
                // A waiting thread does not drive the connection.
                conn.cq.release();
            }
        });
        let made = made.map_err(|error| weft_sockets::error::errno(&error))?;
        // This thread has the sender's turn, so no other thread creates one.
        let _ = self.doorbell.set(made);
        self.doorbell.get().ok_or(Errno::NOBUFS)
    }

    /// Whether a send would start now.
    pub(crate) fn may_send(&self) -> bool {
        self.with(|core| {
            core.machine
                .as_ref()
                .is_some_and(|m: &Endpoint| m.room() >= LOW)
        })
    }
}
