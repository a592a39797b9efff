//! The body of the fuzz target `sdp_machine`, and the replay of its corpus by plain `cargo test`.

use std::collections::{BTreeSet, VecDeque};

use super::{Action, Config, Endpoint, From, Next, Op, Stage};
use crate::wire::{Body, Buffer, HELLO_LEN, Hello, Message};

/// Bytes that run out as zeros.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn u8(&mut self) -> u8 {
        self.0.split_off_first().copied().unwrap_or(0)
    }

    /// Mostly small, and now and then anything.
    fn u32(&mut self) -> u32 {
        match self.u8() {
            255 => u32::from_be_bytes(std::array::from_fn(|_| self.u8())),
            254 => u32::MAX - u32::from(self.u8()),
            253 => u32::from(self.u8()) << 8,
            small => u32::from(small),
        }
    }
}

const CONFIG: Config = Config {
    send_receives: 8,
    recv_receives: 8,
    send_payload: 64,
    recv_payload: 64,
    send_buffer: 256,
    sources: 3,
    peer_sources: 3,
};

/// The expectations of driver, program and peer.
#[derive(Default)]
struct Books {
    /// Receives that are not posted.
    taken: BTreeSet<u32>,
    /// The next number of the peer's messages, and the limit that it was told.
    seq: u32,
    sent: u32,
    sources: BTreeSet<Op>,
    /// Sources that the peer knows of, and the number of its own.
    told: VecDeque<(u32, u32)>,
    next: u32,
    /// Bytes that the peer knows of.
    position: u64,
    /// Bytes in the send buffer that are being transmitted.
    out: u32,
}

/// A program that makes any calls, and a peer that sends anything: no panic, no receive is posted twice, every source completes once, the send
/// buffer is never overrun, and readable bytes are in receives.
pub fn sdp_machine(data: &[u8]) {
    if let Some((head, _)) = data.split_at_checked(HELLO_LEN)
        && let Ok(hello) = Hello::parse(head)
    {
        assert_eq!(Hello::parse(&hello.emit()), Ok(hello));
    }
    if let Ok(message) = Message::parse(data, data.len() as u32) {
        let bytes = message.emit();
        assert_eq!(&data[2..bytes.len()], &bytes[2..]);
    }
    let mut input = Input(data);
    let mut end = Endpoint::new(&CONFIG);
    let mut books = Books::default();
    for step in 0..400_u64 {
        if input.0.is_empty() || !one(&mut end, &mut books, &mut input, Op(step)) {
            return;
        }
        carry_out(&mut end, &mut books);
    }
}

/// One call or event; false: the peer broke the protocol, and the connection is over.
fn one(end: &mut Endpoint, books: &mut Books, input: &mut Input<'_>, op: Op) -> bool {
    match input.u8() % 10 {
        0 => {
            let room = end.room();
            let run = end.append(input.u32());
            assert!(run.len <= room && run.off < CONFIG.send_buffer);
        }
        1 if end.room() > 0 => {
            end.append_urgent();
        }
        1 => {}
        2 => {
            let at = buffer(input);
            end.source(op, at);
            if end.stage(op) != Stage::Gone {
                books.sources.insert(op);
            }
        }
        3 => {
            if let Some(&op) = books.sources.first() {
                end.move_source(op, buffer(input));
            }
        }
        4 => match end.look(0) {
            Next::Bytes { len, .. } | Next::Placed { len } => end.taken(input.u32().min(len)),
            Next::Source { at, .. } => end.taken(input.u32().min(at.len)),
            Next::Mark => end.pass_mark(),
            Next::End | Next::Nothing => {
                end.offer_sink(buffer(input));
            }
        },
        5 => match input.u8() % 8 {
            0 => end.shutdown(),
            1..3 => end.cancel_sink(),
            3 => end.set_inline(true),
            _ => {
                let bytes = input.u32().min(books.out);
                books.out -= bytes;
                end.transmitted(bytes);
            }
        },
        _ => return peer(end, books, input),
    }
    true
}

fn buffer(input: &mut Input<'_>) -> Buffer {
    Buffer {
        addr: u64::from(input.u32()),
        key: 1,
        len: input.u32().clamp(1, crate::wire::MAX_BUFFER),
    }
}

/// The peer says something.
fn peer(end: &mut Endpoint, books: &mut Books, input: &mut Input<'_>) -> bool {
    let Some(place) = (0..8).find(|place| !books.taken.contains(place)) else {
        return true;
    };
    // Mostly valid messages.
    let odd = input.u8() % 16 == 15;
    let index = books.next + u32::from(odd);
    let body = match input.u8() % 10 {
        0..3 => {
            let len = input.u32();
            Body::Data {
                len,
                urgent: len > 0 && input.u8().is_multiple_of(4),
            }
        }
        3 => {
            books.next += 1;
            Body::SrcAvail {
                index,
                at: buffer(input),
            }
        }
        4 => match end.look(0) {
            Next::Source { index, at, .. } => Body::SrcUpdate {
                index,
                at: Buffer {
                    addr: 1,
                    len: at.len + u32::from(odd),
                    ..at
                },
            },
            _ => Body::SrcUpdate {
                index,
                at: buffer(input),
            },
        },
        5 => {
            let (index, len) = books.told.pop_front().unwrap_or((index, 5));
            Body::RdmaRdCompl {
                index,
                len: len + u32::from(odd),
            }
        }
        6 => Body::SinkAvail {
            position: if odd { 1 } else { books.position },
            at: buffer(input),
        },
        7 => Body::RdmaWrCompl {
            len: input.u32().max(1),
        },
        8 => Body::SinkAvailCancel,
        _ if input.u8() < 128 => Body::SinkCancelAck,
        _ => Body::DisConn,
    };
    books.seq = books.seq.wrapping_add(1);
    let message = Message {
        pending: false,
        bufs: if odd { u16::from(input.u8() % 12) } else { 8 },
        seq: books.seq,
        ack: books.sent,
        body,
    };
    books.taken.insert(place);
    end.on_message(place, &message).is_ok()
}

fn carry_out(end: &mut Endpoint, books: &mut Books) {
    while let Some(action) = end.poll() {
        match action {
            Action::Repost { buffer } => assert!(books.taken.remove(&buffer), "posted twice"),
            Action::Urgent { buffer, off } => {
                assert!(books.taken.contains(&buffer) && off < CONFIG.recv_payload);
            }
            Action::Unlock { .. } => {}
            Action::SourceDone { op } => assert!(books.sources.remove(&op), "done twice"),
            Action::Send { message, payload } => {
                books.sent = books.sent.wrapping_add(1);
                assert_eq!(message.seq, books.sent);
                if let Body::SrcAvail { index, at } = message.body {
                    books.told.push_back((index, at.len));
                    books.position += u64::from(at.len);
                }
                let len = payload.map_or(0, |run| run.len);
                books.position += u64::from(len);
                assert!(len <= CONFIG.send_payload);
                books.out += len;
            }
            Action::Write { from, .. } => {
                books.sent = books.sent.wrapping_add(1);
                match from {
                    From::Ring(run) => {
                        books.out += run.len;
                        books.position += u64::from(run.len);
                    }
                    From::Source { op, last, len, .. } => {
                        books.position += u64::from(len);
                        assert!(books.sources.contains(&op));
                        if last {
                            books.sources.remove(&op);
                        }
                    }
                }
            }
        }
    }
    assert!(books.out <= CONFIG.send_buffer && end.room() <= CONFIG.send_buffer);
    let readable = end.readable();
    if let Next::Bytes { buffer, off, len } = end.look(0) {
        assert!(books.taken.contains(&buffer) && off + len <= CONFIG.recv_payload);
        assert!(u64::from(len) <= readable);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_corpus_is_replayed() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/sdp_machine");
        let mut inputs = 0;
        for file in std::fs::read_dir(dir).expect("the corpus") {
            let bytes = std::fs::read(file.expect("a file").path()).expect("its bytes");
            super::sdp_machine(&bytes);
            inputs += 1;
        }
        assert!(inputs > 0);
    }

    proptest::proptest! {
        #![proptest_config(proptest::prelude::ProptestConfig::with_cases(3000))]
        #[test]
        fn any_bytes(data in proptest::collection::vec(proptest::num::u8::ANY, 0..400)) {
            super::sdp_machine(&data);
        }
    }
}
