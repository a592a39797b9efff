//! The body of the fuzz target `exs_machine`, and the replay of its corpus by plain `cargo test`.

use std::collections::{BTreeMap, BTreeSet};

use weft_wire::exs::{Advert, Packet};

use super::{
    Action, Body, Config, Design, Endpoint, Imm, Kind, MAX_TRANSFER, Message, Mode, OpId, Outcome,
    RecvFlags, Remote, Rules, Transfer,
};

/// Input bytes; past their end there are zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn u8(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    /// Mostly a small value, sometimes any value.
    fn u64(&mut self) -> u64 {
        match self.u8() {
            255 => u64::from_be_bytes(std::array::from_fn(|_| self.u8())),
            254 => u64::MAX - u64::from(self.u8()),
            253 => u64::from(self.u8()) << 8,
            small => u64::from(small),
        }
    }

    fn u32(&mut self) -> u32 {
        self.u64() as u32
    }
}

/// The state against which the machine is checked.
#[derive(Default)]
struct Books {
    sends: BTreeMap<OpId, u64>,
    /// Bytes of each send that were handed over.
    out: BTreeMap<OpId, u64>,
    /// Length of each receive, and the bytes that were copied or read into it.
    recvs: BTreeMap<OpId, (u64, u64)>,
    /// Transfers in flight, by operation.
    transfers: Vec<OpId>,
    /// Control receives that are not posted.
    taken: BTreeSet<u32>,
    held: Vec<u32>,
    /// Bytes that the peer has reported as written to our buffer.
    indirect: u64,
}

/// A program that makes arbitrary calls, against a peer that sends arbitrary messages. Nothing may panic. Every operation is reported once, with no
/// more bytes than it has room for. Only received data is copied, and no buffer is posted twice.
pub fn exs_machine(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let config = Config {
        kind: match flags & 3 {
            2 => Kind::SeqPacket(Design::Advert),
            3 => Kind::SeqPacket(Design::Source),
            _ => Kind::Stream,
        },
        mode: match flags >> 2 & 3 {
            2 => Mode::Direct,
            3 => Mode::Indirect,
            1 => Mode::Published,
            _ => Mode::Dynamic,
        },
        send_credits: 3 + u32::from(flags >> 6 & 1) * 20,
        recv_credits: 3 + u32::from(flags >> 7) * 20,
        small_send: u32::from(input.u8() & 63),
        small_recv: u32::from(input.u8() & 63),
        peer_ring: (flags & 16 != 0).then_some(Remote {
            addr: 0x1000,
            rkey: 1,
            len: 100,
        }),
        own_ring_len: if flags & 32 != 0 { 100 } else { 0 },
        immediate: true,
        rules: Rules::default(),
    };
    let mut end = Endpoint::new(&config);
    let mut books = Books::default();
    for op in (0..400).map(OpId) {
        if input.0.is_empty() {
            break;
        }
        match input.u8() % 16 {
            choice @ (0 | 1) => {
                let len = input.u64();
                if choice == 1 && end.send_now(len).is_some() {
                    assert!(len <= config.small_send.into() && books.sends.is_empty());
                } else if end.send(op, len).is_ok() {
                    books.sends.insert(op, len);
                }
            }
            2..4 => {
                let (len, flags) = (input.u64(), input.u8());
                let flags = RecvFlags {
                    waitall: flags & 1 != 0,
                    in_place: flags & 2 != 0,
                };
                end.recv(op, len, flags);
                books.recvs.insert(op, (len, 0));
            }
            4 => {
                end.cancel(OpId(input.u64()));
            }
            5 => match input.u8() {
                0..16 => end.shutdown(),
                _ => {
                    if let Some(buffer) = books.held.pop() {
                        assert!(end.recycle(buffer));
                    }
                }
            },
            6 | 7 => {
                if !books.transfers.is_empty() {
                    end.on_transferred(books.transfers.remove(0));
                }
            }
            8..14 => {
                let buffer = (0..config.recv_credits).find(|buffer| !books.taken.contains(buffer));
                let Some(buffer) = buffer else { continue };
                books.taken.insert(buffer);
                if !hear(&mut end, &mut input, buffer, &mut books) {
                    return;
                }
            }
            _ => {
                let may = input.u8() & 1 == 0;
                assert!(!end.is_still() || end.clone().poll(true).is_none());
                for _ in 0..input.u8() {
                    let Some(action) = end.poll(may) else { break };
                    books.note(&action, config.own_ring_len);
                }
            }
        }
        let _ = (end.readable(), end.wants_indirect(), end.is_idle());
    }
}

/// A message from the peer arrives. False when it ended the connection.
fn hear(end: &mut Endpoint, input: &mut Input<'_>, buffer: u32, books: &mut Books) -> bool {
    let credits = u16::from(input.u8() & 3);
    let transfer = |kind| match kind {
        0 => Transfer::Direct,
        1 => Transfer::Indirect,
        2 => Transfer::Packet { truncated: false },
        _ => Transfer::Packet { truncated: true },
    };
    let kind = input.u8() % 16;
    let memory = |input: &mut Input<'_>| Remote {
        addr: input.u64(),
        rkey: 5,
        len: input.u32(),
    };
    let packet = |input: &mut Input<'_>| Packet {
        index: input.u64(),
        addr: input.u64(),
        rkey: 5,
        len: input.u32(),
    };
    let body = match kind {
        0..4 => {
            let imm = Imm {
                transfer: transfer(kind),
                credits,
                len: input.u32(),
            };
            let verdict = end.on_imm(buffer, imm).is_ok();
            if verdict && imm.transfer == Transfer::Indirect {
                books.indirect += u64::from(imm.len);
            }
            return verdict;
        }
        4 | 5 => Body::Advert(Advert {
            seq: input.u64(),
            phase: input.u64(),
            waitall: input.u8() & 1 != 0,
            memory: memory(input),
        }),
        6 => Body::Ack { freed: input.u32() },
        7 => Body::Small { len: input.u32() },
        8 => {
            let len = input.u32();
            let body = Body::Small { len };
            let message = Message { credits, body };
            match end.take_now(&message) {
                Err(_) => return false,
                Ok(Some(op)) => {
                    let (room, copied) = books.recvs.remove(&op).expect("a receive");
                    assert!(u64::from(len) <= room && copied == 0);
                    books.taken.remove(&buffer);
                    return true;
                }
                Ok(None) => body,
            }
        }
        9 => Body::Retract,
        10 => Body::Retracted { seq: input.u64() },
        11 => Body::Fin,
        12 => Body::PktAdvert(packet(input)),
        13 => Body::Source(packet(input)),
        14 => Body::SourceDone {
            index: input.u64(),
            len: input.u32(),
        },
        _ => Body::Credit,
    };
    end.on_message(buffer, &Message { credits, body }).is_ok()
}

impl Books {
    fn note(&mut self, action: &Action, ring: u32) {
        match *action {
            Action::Send(_) => {}
            Action::Advertise { op, off, len, .. } => self.check_room(op, off, len),
            Action::AdvertisePacket { op, len, .. } => self.check_room(op, 0, len),
            Action::AdvertiseSource { op, len, .. } => {
                assert!(self.sends[&op] == u64::from(len));
            }
            Action::Write {
                op, off, len, addr, ..
            } => {
                assert!(off + u64::from(len) <= self.sends[&op] && len <= MAX_TRANSFER);
                assert!(addr.checked_add(len.into()).is_some());
                self.hand_over(op, off, len);
                self.transfers.push(op);
            }
            Action::SendSmall { op, off, len, .. } => {
                assert!(off + u64::from(len) <= self.sends[&op]);
                self.hand_over(op, off, len);
                self.transfers.push(op);
            }
            Action::Read { op, len, .. } => {
                self.fill(op, 0, len);
                self.transfers.push(op);
            }
            Action::Copy {
                op,
                off,
                ring_off,
                len,
            } => {
                assert!(len != 0 && ring_off + len <= ring);
                self.indirect = self
                    .indirect
                    .checked_sub(len.into())
                    .expect("bytes that came");
                self.fill(op, off, len);
            }
            Action::CopySmall {
                op,
                off,
                buffer,
                buf_off,
                len,
            } => {
                assert!(len != 0 && buf_off + len <= 63 && self.taken.contains(&buffer));
                self.fill(op, off, len);
            }
            Action::Repost { buffer } => assert!(self.taken.remove(&buffer)),
            Action::Complete(told) => {
                if let Some(len) = self.sends.remove(&told.op) {
                    let out = self.out.remove(&told.op).unwrap_or(0);
                    let moved = match told.outcome {
                        Outcome::Canceled => out,
                        _ => len,
                    };
                    assert_eq!(told.len, moved);
                    return;
                }
                let (room, copied) = self.recvs.remove(&told.op).expect("an operation");
                assert!(told.len <= room);
                if let Some(at) = told.in_place {
                    assert!(copied == 0 && self.taken.contains(&at.buffer));
                    self.held.push(at.buffer);
                } else {
                    assert!(copied <= told.len);
                }
            }
        }
    }

    fn hand_over(&mut self, op: OpId, off: u64, len: u32) {
        let out = self.out.entry(op).or_default();
        assert_eq!(*out, off, "in order");
        *out += u64::from(len);
    }

    fn check_room(&self, op: OpId, off: u64, len: u32) {
        assert!(off + u64::from(len) <= self.recvs[&op].0 && len <= MAX_TRANSFER);
    }

    fn fill(&mut self, op: OpId, off: u64, len: u32) {
        self.check_room(op, off, len);
        let (_, copied) = self.recvs.get_mut(&op).expect("a receive");
        *copied += u64::from(len);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::exs_machine;

    #[test]
    fn corpus() {
        weft_wire::fuzzing::replay("exs_machine", exs_machine);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn any_peer(data in proptest::collection::vec(any::<u8>(), 0..600)) {
            exs_machine(&data);
        }
    }
}
