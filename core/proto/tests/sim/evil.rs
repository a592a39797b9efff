//! A peer that alters its own segments, with a good CRC, so that the receiver must refuse them.

use weft_proto::rdmap::Fault;
use weft_wire::ddp::{Header, Tagged, UNTAGGED_LEN, Untagged};
use weft_wire::rdmap::{Opcode, QN_ATOMIC_RESPONSE, QN_SEND, QN_TERMINATE};

use super::model::Rng;

/// Makes `ulpdu` a segment that must be refused, and says with which fault; `before` is the segment sent before it.
///
/// It may instead return a segment to send first, which must be refused.
pub(super) fn alter(
    rng: &mut Rng,
    before: Option<(Header, Vec<u8>)>,
    ulpdu: &mut Vec<u8>,
) -> Option<(Fault, Option<Vec<u8>>)> {
    let header = Header::parse(ulpdu).ok()?;
    let within_write = before
        .as_ref()
        .is_some_and(|(header, _)| header.opcode() == Opcode::Write && !header.is_last());
    let fault = match (header, rng.below(7)) {
        (Header::Untagged(h), _) if h.qn == QN_TERMINATE => return None,
        // The segment before, once more.
        (_, 0) => {
            let (header, segment) = before?;
            let fault = match (header.opcode(), header.is_last()) {
                (Opcode::ReadResponse, _) | (Opcode::Write, true) => return None,
                (Opcode::Write, false) => Fault::Bounds,
                (_, true) => Fault::MsnRange,
                (_, false) => Fault::InvalidMo,
            };
            return Some((fault, Some(segment)));
        }
        (Header::Untagged(h), 1) => {
            let step = if rng.one_in(2) { 1 } else { u32::MAX };
            rewrite(
                ulpdu,
                Header::Untagged(Untagged {
                    msn: h.msn.wrapping_add(step),
                    ..h
                }),
            );
            Fault::MsnRange
        }
        (Header::Untagged(h), 2) => {
            rewrite(ulpdu, Header::Untagged(Untagged { mo: h.mo ^ 4, ..h }));
            Fault::InvalidMo
        }
        (Header::Untagged(h), 3) if h.qn != QN_SEND => {
            rewrite(ulpdu, Header::Untagged(Untagged { last: false, ..h }));
            Fault::ReceiveTooSmall
        }
        (Header::Untagged(h), 3) if h.mo != 0 => {
            // Another kind of Send from here on: Solicited Event or not.
            let flip = |a: Opcode, b: Opcode| a.code() ^ b.code();
            ulpdu[1] ^= if h.opcode.invalidates() {
                flip(Opcode::SendInvalidate, Opcode::SendSeInvalidate)
            } else {
                flip(Opcode::Send, Opcode::SendSe)
            };
            Fault::UnexpectedOpcode
        }
        (Header::Untagged(h), 4) if h.qn != QN_SEND => {
            ulpdu.push(0);
            Fault::ReceiveTooSmall
        }
        (Header::Untagged(h), 5) if h.qn == QN_ATOMIC_RESPONSE => {
            ulpdu[UNTAGGED_LEN] ^= 1;
            Fault::AtomicMismatch
        }
        (Header::Tagged(h), 1) if h.opcode == Opcode::ReadResponse || within_write => {
            rewrite(
                ulpdu,
                Header::Tagged(Tagged {
                    stag: h.stag ^ 1,
                    ..h
                }),
            );
            Fault::InvalidStag
        }
        (Header::Tagged(h), 2) if h.opcode == Opcode::ReadResponse || within_write => {
            rewrite(ulpdu, Header::Tagged(Tagged { to: h.to + 1, ..h }));
            Fault::Bounds
        }
        (Header::Tagged(h), 3) if h.opcode == Opcode::ReadResponse => {
            rewrite(ulpdu, Header::Tagged(Tagged { last: !h.last, ..h }));
            Fault::Bounds
        }
        (Header::Tagged(h), 3) if within_write => {
            rewrite(
                ulpdu,
                Header::Tagged(Tagged {
                    opcode: Opcode::ReadResponse,
                    ..h
                }),
            );
            Fault::UnexpectedOpcode
        }
        (Header::Tagged(h), 4 | 5) if h.opcode == Opcode::ReadResponse && h.last => {
            ulpdu.push(0);
            let last = rng.one_in(2);
            rewrite(ulpdu, Header::Tagged(Tagged { last, ..h }));
            Fault::Bounds
        }
        // Rather wait for a segment where there is more to break.
        _ if !rng.one_in(4) => return None,
        (Header::Untagged(_), _) => {
            ulpdu[1] |= 0x0f;
            Fault::UnexpectedOpcode
        }
        (Header::Tagged(_), 5) => {
            ulpdu[0] ^= 0x02;
            Fault::DdpVersion { tagged: true }
        }
        (Header::Tagged(_), _) => {
            ulpdu[1] ^= 0x80;
            Fault::RdmapVersion
        }
    };
    Some((fault, None))
}

fn rewrite(ulpdu: &mut [u8], header: Header) {
    let mut raw = [0; UNTAGGED_LEN];
    let len = header.emit(&mut raw);
    ulpdu[..len].copy_from_slice(&raw[..len]);
}
