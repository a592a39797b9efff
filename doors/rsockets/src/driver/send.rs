//! Sending: bytes go into the peer's receive buffer by RDMA Write, each Write with a message that says how long it was.
//!
//! Three ways: short ones in the work request; long ones of a call that waits, out of memory that stays, from where they are; all others through the
//! send buffer.

use rustix::io::Errno;
use smallvec::SmallVec;
use weft_sockets::lock::{lock, try_lock};
use weft_sockets::memory::{Source, gather, take, total};
use weft_sockets::stream::Stream as _;
use weft_sockets::wait::Wait;
use weft_verbs::{Access, InlineData, Mr, RemoteAddr, SendWr};

use super::{Conn, Core, QUIET, Sender};
use crate::machine::Write;
use crate::wire::Message;

/// From this many bytes on, a call that waits sends from the program's memory.
const DIRECT_MIN: usize = 16 << 10;
/// Bytes of one Write, at most: so that the peer can begin to read.
const CHUNK: usize = 64 << 10;
/// A send begins when the send buffer has room for this many bytes, or all.
const LOW: usize = 2048;

/// How bytes are sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Inline,
    Buffered,
    Direct,
}

/// A Write that the core has counted.
struct Claim {
    write: Write,
    way: Way,
    signaled: bool,
}

impl Conn {
    /// Send all of it; without waiting, what there is room for, and with a limit of time, or when a signal's handler ran, what there was room for until then.
    ///
    /// # Errors
    /// `EAGAIN`, `EINTR`, `ENOTCONN`, `EPIPE` after a shutdown or when the peer has closed, `ECONNRESET` and what else ended the connection.
    pub(crate) fn send(&self, from: &[Source<'_>], wait: Wait) -> Result<usize, Errno> {
        let mut sender = self.turn(wait)?;
        self.send_maps(&mut sender, wait)?;
        let message = |len| Some(Message::Data(len));
        self.stream(&mut sender, from, wait, message, |core, want| {
            self.look_for_room(core);
            Ok(core.machine.as_mut().and_then(|m| m.write(want)))
        })
    }

    /// The right to send.
    pub(super) fn turn(&self, wait: Wait) -> Result<std::sync::MutexGuard<'_, Sender>, Errno> {
        if wait.waits() {
            Ok(lock(&self.sender))
        } else {
            try_lock(&self.sender).ok_or(Errno::AGAIN)
        }
    }

    /// Send pieces to where `place` says, with the message that `message` makes of a Write's length.
    pub(super) fn stream(
        &self,
        sender: &mut Sender,
        from: &[Source<'_>],
        wait: Wait,
        message: impl Fn(u32) -> Option<Message>,
        mut place: impl FnMut(&mut Core, u32) -> Result<Option<Write>, Errno>,
    ) -> Result<usize, Errno> {
        let all = total(from);
        let direct = match from {
            // With a time limit the program wants its memory back when the limit ends.
            [Source::Raw(raw)] if wait == Wait::Forever && all >= DIRECT_MIN => {
                self.pd.reg_raw(raw, Access::empty()).ok()
            }
            _ => None,
        };
        let way = |len: usize| {
            if len <= usize::from(self.options.inline) {
                Way::Inline
            } else if direct.is_some() {
                Way::Direct
            } else {
                Way::Buffered
            }
        };
        let mut done = 0;
        let mut failed = None;
        while done < all {
            let mut claim =
                |core: &mut Core| self.claim(core, all - done, way, &mut place).transpose();
            let mut claimed = self.with(&mut claim);
            if claimed.is_none() && wait.waits() {
                claimed = Some(self.wait_until(wait.deadline(), claim).flatten());
            } else if claimed.is_none() {
                claimed = self.with(|core| {
                    self.drive(core);
                    claim(core)
                });
            }
            let posted = match claimed {
                None => break,
                Some(Err(errno)) => Err(errno),
                Some(Ok(claim)) => {
                    let len = claim.write.len;
                    self.post(sender, &claim, from, done, direct.as_ref(), message(len))
                        .map(|()| len as usize)
                }
            };
            match posted {
                Ok(len) => done += len,
                Err(errno) => {
                    failed = Some(errno);
                    break;
                }
            }
        }
        if direct.is_some() {
            // The program's memory is its own again when we return.
            self.wait_through(None, |core| {
                (core.flying.direct == 0 || core.state.over.is_some()).then_some(())
            });
        }
        match failed {
            _ if done > 0 => Ok(done),
            Some(errno) => Err(errno),
            None if all > 0 => Err(Errno::AGAIN),
            None => Ok(0),
        }
    }

    /// Why nothing can be sent.
    pub(super) fn no_send(core: &Core) -> Result<(), Errno> {
        let Some(machine) = &core.machine else {
            return Err(core.state.over.unwrap_or(Errno::NOTCONN));
        };
        if core.state.send_shut || machine.is_shut() {
            return Err(Errno::PIPE);
        }
        if let Some(errno) = core.state.over {
            return Err(errno);
        }
        if machine.peer_is_gone() {
            return Err(Errno::PIPE);
        }
        Ok(())
    }

    /// Whether a send would start now.
    pub(super) fn may_send(&self, core: &Core) -> bool {
        let machine = core.machine.as_ref();
        machine.is_some_and(crate::machine::Endpoint::can_write)
            && core.flying.messages < u32::from(self.options.send_queue)
            && self.left(core) >= LOW
    }

    /// Bytes free in the send buffer.
    fn left(&self, core: &Core) -> usize {
        (self.options.send_buffer as usize).saturating_sub(core.flying.bytes)
    }

    /// Take credit and room for the next Write; nothing while there is none.
    fn claim(
        &self,
        core: &mut Core,
        want: usize,
        way: impl Fn(usize) -> Way,
        place: impl FnOnce(&mut Core, u32) -> Result<Option<Write>, Errno>,
    ) -> Result<Option<Claim>, Errno> {
        Self::no_send(core)?;
        if core.flying.messages >= u32::from(self.options.send_queue) {
            return Ok(None);
        }
        let mut max = want.min(CHUNK);
        if way(max) == Way::Buffered {
            let left = self.left(core);
            if left < max.min(LOW) {
                return Ok(None);
            }
            max = max.min(left);
        }
        let Some(write) = place(core, max as u32)? else {
            return Ok(None);
        };
        let way = way(write.len as usize);
        core.open.messages += 1;
        core.flying.messages += 1;
        match way {
            Way::Inline => {}
            Way::Buffered => {
                core.open.bytes += write.len as usize;
                core.flying.bytes += write.len as usize;
            }
            Way::Direct => {
                core.open.direct += 1;
                core.flying.direct += 1;
            }
        }
        let quiet = QUIET.min(u32::from(self.options.send_queue) / 4);
        let signaled = way != Way::Inline || core.open.messages >= quiet;
        if signaled {
            core.marks.push_back(std::mem::take(&mut core.open));
        }
        Ok(Some(Claim {
            write,
            way,
            signaled,
        }))
    }

    /// Post a Write and its message.
    fn post(
        &self,
        sender: &mut Sender,
        claim: &Claim,
        from: &[Source<'_>],
        skip: usize,
        direct: Option<&Mr>,
        message: Option<Message>,
    ) -> Result<(), Errno> {
        let len = claim.write.len as usize;
        let remote = RemoteAddr {
            addr: claim.write.addr,
            rkey: claim.write.key,
        };
        let (order, immediate) = *self.peer.get().ok_or(Errno::NOTCONN)?;
        let mut write = match message {
            Some(message) if immediate => SendWr::write_imm(0, remote, u64::from(message.encode())),
            _ => SendWr::write(0, remote),
        };
        match (claim.way, direct) {
            (Way::Inline, _) => {
                let mut data = InlineData::from_elem(0, len);
                take(from, skip, &mut data).map_err(|_| Errno::FAULT)?;
                write.inline = Some(data);
            }
            (Way::Direct, Some(mr)) => write = write.sge(mr.sge(skip, len)),
            _ => {
                if sender.buffer.is_none() {
                    let size = self.options.send_buffer as usize;
                    let made = self.pd.alloc_mr(size, Access::LOCAL_WRITE);
                    sender.buffer = Some(made.map_err(|_| Errno::NOBUFS)?);
                }
                let buffer = sender.buffer.as_ref().ok_or(Errno::NOBUFS)?;
                let first = len.min(buffer.len() - sender.at);
                gather(from, skip, first, buffer, sender.at).map_err(|_| Errno::FAULT)?;
                write = write.sge(buffer.sge(sender.at, first));
                if first < len {
                    gather(from, skip + first, len - first, buffer, 0).map_err(|_| Errno::FAULT)?;
                    write = write.sge(buffer.sge(0, len - first));
                }
                sender.at = (sender.at + len) % buffer.len();
            }
        }
        let mut wrs: SmallVec<[SendWr; 2]> = SmallVec::new();
        wrs.push(write);
        if let Some(message) = message.filter(|_| !immediate) {
            wrs.push(SendWr::send(0).inline(&order.u32(message.encode())));
        }
        if let Some(last) = wrs.last_mut() {
            last.signaled = claim.signaled;
        }
        self.qp.post_send(&wrs).map_err(|error| {
            tracing::debug!(%error, "a send was refused");
            self.with(|core| {
                self.fail(core, Errno::CONNRESET);
                core.state.over.unwrap_or(Errno::CONNRESET)
            })
        })
    }
}
