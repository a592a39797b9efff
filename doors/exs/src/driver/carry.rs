//! Carries out the machine's actions: posts work requests, copies bytes, and reports completed operations.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::{Access, INLINE_DATA, InlineData, RemoteAddr, SendWr};
use weft_wire::exs::{Advert, Body, HEADER_LEN, MAX_LEN, Message};

use super::conn::{Conn, HEADER_SLOT};
use super::op::{End, Op};
use super::state::{ALWAYS_GO, Core, Head, INLINE_MAX, Io, TAG_HEADER};
use crate::event::{InPlace, Place};
use crate::late::Late;
use crate::machine::policy::Verdict;
use crate::machine::{Action, Completion, Endpoint, OpId, Outcome, packet};
use crate::queue::Member;
use crate::registered::Domain;
use crate::{Error, Memory};

/// Transfers of at least this many bytes are posted at once, because the work after them takes a while.
const LARGE: u32 = 32 << 10;

impl Conn {
    /// Carry out the machine's actions. Returns true if something was sent.
    pub(super) fn pump(&self, core: &mut Core) -> bool {
        if core.machine.as_ref().is_some_and(Endpoint::is_still) {
            return self.flush(core);
        }
        let mut sent = false;
        while let Some(action) = self.next_action(core) {
            let Some(machine) = &mut core.machine else {
                break;
            };
            if let Err(error) = self.carry_out(machine, &mut core.io, action) {
                tracing::warn!(%error, "an operation cannot be carried out");
                let errno = error.errno();
                self.fail(core, errno);
                return sent;
            }
            if core.io.sends.len() >= 64 || std::mem::take(&mut core.io.hurry) {
                sent |= self.flush(core);
            }
        }
        sent |= self.flush(core);
        if let (Some(meter), Some(machine)) = (&mut core.policy, &core.machine) {
            meter.look(machine.stats(), core.io.sending);
        }
        sent
    }

    /// The machine's next action; the policy decides how to send.
    fn next_action(&self, core: &mut Core) -> Option<Action> {
        let Core {
            machine, policy, ..
        } = core;
        let machine = machine.as_mut()?;
        let Some(meter) = policy else {
            return machine.poll(true);
        };
        let short = |left| left <= ALWAYS_GO;
        if meter.policy.goes()
            || machine.stats().adverts_received == 0
            || machine.wants_indirect().is_some_and(short)
        {
            return machine.poll(true);
        }
        let action = machine.poll(false);
        let left = match machine.wants_indirect() {
            Some(left) if action.is_none() => left,
            _ => return action,
        };
        let now = meter.now(machine.stats());
        match meter.policy.verdict(now, left) {
            Verdict::Go => machine.poll(true),
            Verdict::Wait(until) => {
                if !meter.timer {
                    meter.timer = true;
                    let at = meter.start + Duration::from_nanos(until);
                    let set = self.call_at(at, |conn| {
                        conn.with(|core| {
                            if let Some(meter) = &mut core.policy {
                                meter.timer = false;
                            }
                        });
                    });
                    if set.is_err() {
                        meter.timer = false;
                        return machine.poll(true);
                    }
                }
                None
            }
        }
    }

    /// Post the batches to the queue pair. Receives go first, because the messages announce them. Returns true if there were sends.
    fn flush(&self, core: &mut Core) -> bool {
        let io = &mut core.io;
        let mut refused = false;
        if !io.recvs.is_empty() {
            refused |= self.link.post_recv(&io.recvs).is_err();
            io.recvs.clear();
        }
        if io.sends.is_empty() && !refused {
            return false;
        }
        if io.over.is_none() {
            refused |= self.link.post_send(&io.sends).is_err();
        }
        io.sends.clear();
        if refused {
            // The queue pair has ended, and its end is about to be reported.
            self.fail(core, Errno::CONNRESET);
        }
        true
    }

    /// Send these bytes in a message now, if nothing precedes them. `None`: use the normal path.
    pub(super) fn post_promptly(
        &self,
        core: &mut Core,
        memory: &Memory,
    ) -> Option<Result<(), Errno>> {
        let Core {
            machine: Some(machine),
            io,
            ..
        } = core
        else {
            return None;
        };
        if io.closing || io.no_send().is_some() || !(io.sends.is_empty() && io.recvs.is_empty()) {
            return None;
        }
        if io.has_waiting_send() {
            // Its completion would be reported before theirs.
            return None;
        }
        let len = memory.len();
        let bytes = io.prompt.inline.get_or_insert_default();
        bytes.resize(HEADER_LEN + len, 0);
        memory.read(0, &mut bytes[HEADER_LEN..]).ok()?;
        let mut head = [0; MAX_LEN];
        machine.send_now(len as u64)?.emit(&mut head);
        bytes[..HEADER_LEN].copy_from_slice(&head[..HEADER_LEN]);
        if self
            .link
            .post_send(std::slice::from_ref(&io.prompt))
            .is_err()
        {
            self.fail(core, Errno::CONNRESET);
            return Some(Err(Errno::CONNRESET));
        }
        Some(Ok(()))
    }

    fn carry_out(&self, machine: &mut Endpoint, io: &mut Io, action: Action) -> Result<(), Error> {
        let domain = self.link.domain();
        match action {
            Action::Send(message) => {
                // The peer waits for buffer space, and a long copy may follow here.
                io.hurry |= matches!(message.body, Body::Ack { .. });
                io.send_message(&message);
            }
            Action::Advertise { .. }
            | Action::AdvertisePacket { .. }
            | Action::AdvertiseSource { .. } => io.carry_advert(domain, action)?,
            Action::Write {
                op,
                off,
                len,
                addr,
                rkey,
                imm,
                ..
            } => {
                let remote = RemoteAddr { addr, rkey };
                let mut wr = if io.immediate {
                    SendWr::write_imm(op.0, remote, imm.encode())
                } else {
                    SendWr::write(op.0, remote)
                };
                if let Some(it) = io.ops.get_mut(op) {
                    it.sges(domain, off as usize, len as usize, &mut wr.sges)?;
                }
                io.sends.push(wr.signaled());
                if !io.immediate {
                    io.send_message(&imm.message());
                }
                io.hurry |= len >= LARGE;
            }
            Action::SendSmall {
                op,
                off,
                len,
                header,
                ..
            } => {
                if io.send_small(domain, op, (off as usize, len as usize), &header)? {
                    // The bytes are copied, so there is nothing to wait for.
                    machine.on_transferred(op);
                }
            }
            Action::Read {
                op,
                len,
                addr,
                rkey,
            } => {
                let mut wr = SendWr::read(op.0, RemoteAddr { addr, rkey }).signaled();
                if let Some(it) = io.ops.get_mut(op) {
                    if domain.rnic().is_some() {
                        wr.sges.push(it.sink(domain, len as usize)?);
                    } else {
                        it.sges(domain, 0, len as usize, &mut wr.sges)?;
                    }
                }
                io.sends.push(wr);
            }
            Action::Copy {
                op,
                off,
                ring_off,
                len,
            } => {
                if let (Some(ring), Some(it)) = (&io.ring, io.ops.get_mut(op)) {
                    it.fill(off as usize, &ring.memory, ring_off as usize, len as usize)?;
                }
            }
            Action::CopySmall {
                op,
                off,
                buffer,
                buf_off,
                len,
            } => {
                if let Some(it) = io.ops.get_mut(op) {
                    let from = buffer as usize * io.slot + HEADER_LEN + buf_off as usize;
                    it.fill(off as usize, &io.ctrl.mr, from, len as usize)?;
                }
            }
            Action::Repost { buffer } => io.repost(buffer),
            Action::Complete(Completion {
                op,
                len,
                outcome,
                in_place,
            }) => {
                let place = in_place.map(|at| {
                    InPlace(Box::new(Place {
                        recycle: Some(self.recycler(at.buffer)),
                        memory: Memory::Region {
                            region: Arc::clone(&io.ctrl),
                            off: at.buffer as usize * io.slot + HEADER_LEN + at.off as usize,
                            len: len as usize,
                        },
                    }))
                });
                io.complete(op, len as usize, outcome, place);
            }
        }
        Ok(())
    }

    /// Report completed operations, and update the connection accordingly. Returns true if the queue pair must be closed now.
    pub(super) fn settle_ends(&self, core: &mut Core) -> bool {
        self.tell_ends(core);
        let mut close = core.look_around(|| self.link.is_delivered());
        // A close may wait for the reports just made.
        while self.tell_ends(core) {
            close |= core.look_around(|| self.link.is_delivered());
        }
        close
    }

    /// Report completed operations in order. An operation whose memory is still in use delays those behind it. Returns true if any was reported.
    fn tell_ends(&self, core: &mut Core) -> bool {
        let mut told = false;
        for lane in 0..core.io.ends.len() {
            while let Some(parked) = core.io.ends[lane].next() {
                let parked = match parked.try_tell() {
                    Ok((late, is_slot)) => {
                        told = true;
                        core.io.woken |= is_slot;
                        core.io.late.extend(late);
                        continue;
                    }
                    Err(parked) => parked,
                };
                core.io.ends[lane].waiting = true;
                let me = self.me.clone();
                parked.wait(move |late, is_slot| match me.upgrade() {
                    Some(conn) => conn.with(|core| {
                        core.io.ends[lane].waiting = false;
                        core.io.woken |= is_slot;
                        core.io.late.extend(late);
                    }),
                    None => late.into_iter().for_each(Late::run),
                });
            }
        }
        told
    }

    /// A function that returns an in-place buffer. It can be called under any lock.
    fn recycler(&self, buffer: u32) -> Box<dyn FnOnce() + Send + Sync> {
        let me = self.me.clone();
        Box::new(move || {
            if let Some(conn) = me.upgrade() {
                let mut recycled = lock(&conn.recycled);
                recycled.push(buffer);
                conn.has_recycled.store(true, Ordering::Release);
                drop(recycled);
                conn.settle();
            }
        })
    }
}

impl Io {
    /// Open memory of an operation to the peer, and send its address.
    fn carry_advert(&mut self, domain: &Domain, action: Action) -> Result<(), Error> {
        match action {
            Action::Advertise {
                op,
                off,
                len,
                seq,
                phase,
                waitall,
                credits,
            } => {
                let body = |memory| {
                    Body::Advert(Advert {
                        seq,
                        phase,
                        waitall,
                        memory,
                    })
                };
                self.advertise(domain, op, (off, len), Access::REMOTE_WRITE, credits, body)
            }
            Action::AdvertisePacket {
                op,
                index,
                len,
                credits,
            } => {
                let body = |memory| Body::PktAdvert(packet(index, memory));
                self.advertise(domain, op, (0, len), Access::REMOTE_WRITE, credits, body)
            }
            Action::AdvertiseSource {
                op,
                index,
                len,
                credits,
            } => {
                let body = |memory| Body::Source(packet(index, memory));
                self.advertise(domain, op, (0, len), Access::REMOTE_READ, credits, body)
            }
            _ => unreachable!("what advertises nothing"),
        }
    }

    /// Send a header and these bytes of a send in one message. True: the bytes have been copied out of the send's memory.
    fn send_small(
        &mut self,
        domain: &Arc<Domain>,
        op: OpId,
        (off, len): (usize, usize),
        header: &Message,
    ) -> Result<bool, Error> {
        let mut head = [0; MAX_LEN];
        let n = header.emit(&mut head);
        let Some(it) = self.ops.get_mut(op) else {
            return Ok(false);
        };
        if n + len > INLINE_MAX {
            let mut wr = SendWr::send(TAG_HEADER | op.0).signaled();
            let (sge, place) = if let Some(slot) = self.free_headers.pop()
                && let Some(headers) = &self.headers
            {
                let at = slot as usize * HEADER_SLOT;
                headers.memory.write(at, &head[..n])?;
                (headers.sge(at, n), Head::Slot(slot))
            } else {
                // All slots are in use.
                let mr = domain.reg(head[..n].to_vec(), Access::LOCAL_WRITE)?;
                (mr.sge(0, n), Head::Own(mr))
            };
            wr = wr.sge(sge);
            self.used_headers.push_back(place);
            it.sges(domain, off, len, &mut wr.sges)?;
            self.sends.push(wr);
            return Ok(false);
        }
        let mut wr = SendWr::send(0);
        let mut short = [0; INLINE_DATA];
        wr.inline = Some(if let Some(room) = short.get_mut(..n + len) {
            room[..n].copy_from_slice(&head[..n]);
            it.read(off, &mut room[n..])?;
            InlineData::from_slice(room)
        } else {
            InlineData::from_vec(joined(&head[..n], it, off, len)?)
        });
        self.sends.push(wr);
        Ok(true)
    }

    fn complete(&mut self, op: OpId, bytes: usize, outcome: Outcome, in_place: Option<InPlace>) {
        let in_grace = self.ops.get_mut(op).is_some_and(|op| op.grace.is_some());
        let timed_out = in_grace && !self.nobody_wants(op);
        let result = match outcome {
            Outcome::Canceled if timed_out => Err(Errno::TIMEDOUT),
            Outcome::Canceled => Err(Errno::CANCELED),
            Outcome::Done | Outcome::Truncated | Outcome::Eof => Ok(bytes),
        };
        let end = End {
            result,
            bytes,
            truncated: outcome == Outcome::Truncated,
            in_place,
        };
        self.finish(op, end);
    }
}

/// A header, followed by bytes of the operation.
fn joined(head: &[u8], op: &Op, off: usize, len: usize) -> Result<Vec<u8>, Error> {
    let mut data = vec![0; head.len() + len];
    data[..head.len()].copy_from_slice(head);
    op.read(off, &mut data[head.len()..])?;
    Ok(data)
}
