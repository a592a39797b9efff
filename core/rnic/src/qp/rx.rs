//! The receive side: bytes become segments, which are placed (see the module `place`), or wait for a receive.
//!
//! Headers and small payloads are read into a staging buffer, which the connection borrows while it has bytes to process. A large payload
//! goes straight to its place in the next `recvmsg`, which also fetches its trailer and the next header. With CRC every FPDU is staged,
//! checked, and only then placed: no part of a damaged FPDU reaches memory (docs/adr/0003).

use std::io;
use std::sync::Arc;

use smallvec::SmallVec;
use weft_mem::RecvList;
use weft_proto::rdmap::Fault;
use weft_wire::crc::crc32c;
use weft_wire::ddp::{Header, HeaderError, UNTAGGED_LEN};
use weft_wire::mpa::CRC_LEN;

use super::end::EndReason;
use super::frame::Frame;
use super::place::{ROUNDS, Rx, Segment, Stop, Target, before_payload};
use super::rnr::Wait;
use super::{Core, QpInner};
use crate::transport::{Llp, Received};
use crate::types::{QpState, WcStatus};

/// Segments up to this length are looked at only when they are there as a whole: every control message is shorter.
const WHOLE: usize = 256;
/// An FPDU longer than this announces bulk: of what follows only [`AHEAD`] is read, so that its payload is not staged.
const BULK: usize = 16 * 1024;
/// FPDUs longer than this announce more bulk than one FPDU. So a number of shorter ones in a row does not end the bulk state, because a
/// message ends with a short one, and the Send that announces it is short, too. (At 16 to 24 KiB another system call costs as much as the
/// copy.)
const LONG_BULK: usize = 32 * 1024;
const LONG_BULK_LASTS: u8 = 4;
/// Bytes read beyond the known bulk: the end of a message, the message that announces it, and the next header.
const AHEAD: usize = 192;
/// The maximum bytes of one drive, for the same reason; the last fetch may exceed it.
const DRIVE_BYTES: usize = 16 << 20;

impl QpInner {
    /// Receive until the transport has nothing more. Says whether bytes moved.
    pub(super) fn pump_rx(self: &Arc<Self>, core: &mut Core, link: &Llp) -> bool {
        let mut moved = false;
        core.rx.borrow(self.device.pool());
        let mut drained = false;
        let mut bytes = 0;
        for round in 0.. {
            // The bytes of the last system call are processed in any case, because no wake-up would follow for them.
            let outcome = match self.parse(core) {
                // Waiting messages are not done: the peer is not notified.
                Ok(()) if core.rx.held.stopped => match (link.pause(), self.state()) {
                    (false, _) => {
                        if !core.rx.held.closed && link.is_closed_behind() {
                            core.rx.held.close();
                        }
                        break;
                    }
                    (true, QpState::Closing) => Err(Stop::Eof),
                    (true, _) => Err(Stop::Lost),
                },
                Ok(()) => {
                    if round > 0 && !core.rx.held.waits {
                        link.placed();
                    }
                    if drained || round == ROUNDS || bytes >= DRIVE_BYTES {
                        break;
                    }
                    self.receive(core, link)
                }
                // Data after the fault is not placed, and the peer is not notified before access is closed.
                Err(stop) => Err(stop),
            };
            match outcome {
                Ok(Some(received)) => {
                    (moved, drained) = (true, received.drained);
                    bytes += received.n;
                }
                Ok(None) => break,
                Err(Stop::Eof) if core.rx.held.waits && self.state() != QpState::Closing => {
                    core.rx.held.close();
                    break;
                }
                Err(stop) => {
                    self.stop(core, stop);
                    return true;
                }
            }
            if core.done.recv.len() >= 64 {
                self.deliver(core);
            }
        }
        core.rx.give_back(self.device.pool());
        moved
    }

    fn stop(self: &Arc<Self>, core: &mut Core, stop: Stop) {
        match stop {
            Stop::Fault(fault) => self.fault(core, fault),
            Stop::Recv(fault, status) => {
                if let Some(wr) = core.rx.recv.take() {
                    core.done.recv_urgent = true;
                    core.done.recv.push(self.recv_wc(wr.id, status, 0));
                }
                self.fault(core, fault);
            }
            Stop::Sink(seq) => {
                let stream = core.stream.as_mut();
                if let Some(slot) = stream.and_then(|s| s.request_mut(seq)) {
                    slot.fault = Some(WcStatus::LocProtErr);
                }
                self.fault(core, Fault::LocalCatastrophic);
            }
            Stop::Terminated => {}
            Stop::Lost => self.end(core, EndReason::Lost),
            Stop::Eof => {
                core.rx.eof = true;
                let whole =
                    core.stream.as_ref().is_none_or(|s| !s.mid_message()) && !core.send_failed;
                let reason = if whole {
                    EndReason::Disconnected
                } else {
                    EndReason::Lost
                };
                self.end(core, reason);
            }
        }
    }

    /// One system call.
    fn receive(&self, core: &mut Core, link: &Llp) -> Result<Option<Received>, Stop> {
        core.counters.rx_syscalls += 1;
        if core.rx.markers.is_some() {
            return core.rx.receive_marked(link);
        }
        let spans = match &core.rx.direct {
            Some(direct) => self.spans(core, direct.target, direct.left)?,
            None => SmallVec::new(),
        };
        let Core { rx, counters, .. } = core;
        let in_frame = rx.in_frame();
        let Some(buf) = &mut rx.buf else {
            return Ok(None);
        };
        let next_header = rx.frame.header_len() + UNTAGGED_LEN;
        let mut list = RecvList::new();
        let placed_max = if let Some(direct) = &rx.direct {
            for span in &spans {
                list.push_span(span, 0, span.len());
            }
            if let Target::Held = direct.target {
                let partial = &mut rx.held.partial;
                let at = partial.len() - direct.left as usize;
                list.push_buf(&mut partial[at..]);
            }
            // Bulk: little more than the trailer; the following data has its own place.
            let tail = if self.life.waits_for_receives() && rx.frame == Frame::Local {
                // The peer has to be notified of this payload, independent of the next message.
                0
            } else if direct.bulk {
                (rx.trailer + AHEAD).min(buf.len())
            } else {
                buf.len()
            };
            list.push_buf(&mut buf[..tail]);
            direct.left as usize
        } else {
            if rx.start > 0 {
                buf.copy_within(rx.start..rx.end, 0);
                rx.end -= rx.start;
                rx.start = 0;
            }
            // Bulk: little more than the rest of this FPDU. Further staged bytes would have to be copied or moved later.
            let room = if rx.need > BULK {
                (rx.need + next_header).min(buf.len())
            } else if rx.bulk > 0 && !rx.crc {
                (rx.trailer + rx.need.max(rx.end) + AHEAD).min(buf.len())
            } else {
                buf.len()
            };
            list.push_buf(&mut buf[rx.end..room]);
            0
        };
        let received = receive_from(link, &mut list, in_frame)?;
        drop(list);
        let Some(Received { n, .. }) = received else {
            return Ok(None);
        };
        let placed = n.min(placed_max);
        counters.rx_direct += placed as u64;
        if let Some(direct) = &mut rx.direct {
            direct.target.advance(placed as u32);
            direct.left -= placed as u32;
        }
        rx.end += n - placed;
        Ok(received)
    }

    /// Look at everything in the staging buffer.
    fn parse(self: &Arc<Self>, core: &mut Core) -> Result<(), Stop> {
        loop {
            if core.ended.is_some() {
                return Err(Stop::Terminated);
            }
            if let Some(direct) = &core.rx.direct {
                if direct.left > 0 {
                    return Ok(());
                }
                let held = matches!(direct.target, Target::Held);
                core.rx.direct = None;
                if held {
                    core.rx.held.fetched();
                } else {
                    self.placed(core)?;
                }
            }
            if core.rx.held.waits {
                self.go_on(core)?;
                if core.rx.held.stopped {
                    return Ok(());
                }
            }
            let rx = &mut core.rx;
            let skip = rx.trailer.min(rx.end - rx.start);
            rx.trailer -= skip;
            rx.start += skip;
            if rx.start == rx.end {
                (rx.start, rx.end) = (0, 0);
            }
            if rx.trailer > 0 {
                return Ok(());
            }
            // The buffer is out of the connection while payloads are placed from it.
            let Some(buf) = rx.buf.take() else {
                return Ok(());
            };
            let outcome = self.segment(core, &buf);
            core.rx.buf = Some(buf);
            if !outcome? {
                return Ok(());
            }
        }
    }

    /// The next segment, if enough of it is there. `Ok(false)`: more bytes are needed.
    fn segment(self: &Arc<Self>, core: &mut Core, buf: &[u8]) -> Result<bool, Stop> {
        let have = &buf[core.rx.start..core.rx.end];
        let frame = core.rx.frame;
        let Some((ulpdu_len, rest)) = frame.parse(have) else {
            return Ok(false);
        };
        let total = frame.total(ulpdu_len);
        let whole = have.len() >= total;
        core.rx.need = 0;
        if !whole && (core.rx.crc || total <= WHOLE || core.rx.markers.is_some()) {
            core.rx.need = total;
            return Ok(false);
        }
        if core.rx.crc {
            let (covered, trailer) = have[..total].split_at(total - CRC_LEN);
            if crc32c(covered).to_le_bytes() != trailer {
                return Err(Fault::Crc.into());
            }
        }
        let ulpdu = &rest[..ulpdu_len.min(rest.len())];
        let header = match Header::parse(ulpdu) {
            Ok(header) => header,
            Err(HeaderError::Short) if ulpdu.len() < ulpdu_len => return Ok(false),
            Err(error) => return Err(Fault::from(error).into()),
        };
        if !whole && ulpdu.len() < header.len() + before_payload(&header) {
            core.rx.need = frame.header_len() + header.len() + before_payload(&header);
            return Ok(false);
        }
        let segment = Segment {
            header,
            ulpdu,
            len: ulpdu_len,
            total,
            whole,
            room: buf.len(),
        };
        if self.life.waits_for_receives() {
            match self.must_wait(core, &segment) {
                Wait::No => {}
                Wait::Kept => return Ok(true),
                Wait::Here => return Ok(false),
            }
        }
        core.rx.bulk = if total > LONG_BULK {
            LONG_BULK_LASTS
        } else if total > BULK {
            core.rx.bulk.max(1)
        } else {
            core.rx.bulk.saturating_sub(1)
        };
        self.take_in(core, &segment)
    }
}

impl Rx {
    /// With markers: stages the raw bytes, and keeps the rest without markers.
    fn receive_marked(&mut self, link: &Llp) -> Result<Option<Received>, Stop> {
        let rx = self;
        let in_frame = rx.in_frame();
        let Some(buf) = &mut rx.buf else {
            return Ok(None);
        };
        buf.copy_within(rx.start..rx.end, 0);
        rx.end -= rx.start;
        rx.start = 0;
        let mut list = RecvList::new();
        list.push_buf(&mut buf[rx.end..]);
        let received = receive_from(link, &mut list, in_frame)?;
        drop(list);
        let Some(Received { n, .. }) = received else {
            return Ok(None);
        };
        let mut plain = Vec::with_capacity(n);
        if let Some(stripper) = &mut rx.markers {
            stripper
                .strip(&buf[rx.end..rx.end + n], &mut plain)
                .map_err(|_| Fault::Marker)?;
        }
        buf[rx.end..rx.end + plain.len()].copy_from_slice(&plain);
        rx.end += plain.len();
        Ok(received)
    }

    /// Bytes of an FPDU have come, but not all of them.
    fn in_frame(&self) -> bool {
        self.direct.is_some() || self.trailer > 0 || self.end > self.start
    }
}

/// One system call. `None`: nothing there now.
fn receive_from(
    link: &Llp,
    list: &mut RecvList<'_>,
    in_frame: bool,
) -> Result<Option<Received>, Stop> {
    match link.recv(list) {
        Ok(received) if received.n == 0 => Err(if in_frame { Stop::Lost } else { Stop::Eof }),
        Ok(received) => Ok(Some(received)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
        Err(error) => {
            tracing::debug!(%error, "receiving failed");
            Err(Stop::Lost)
        }
    }
}
