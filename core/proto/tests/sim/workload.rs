//! What the users post: everything that works, and what the peer must refuse.

use weft_proto::rdmap::{Op, SendWr};
use weft_wire::rdmap::{AtomicOp, ProtectionError, TaggedError, TermError, UntaggedError};

use super::World;
use super::model::{DATA, FIXED, Message, Posted, SIZE, Source, WORDS};

impl World {
    pub(super) fn push(
        &mut self,
        i: usize,
        wr: SendWr,
        source: Source,
        expect: Vec<u8>,
        poison: Option<TermError>,
    ) {
        let seq = self.ends[i].stream.post(wr);
        assert_eq!(seq, self.ends[i].posted.len() as u64);
        let sink = vec![0; expect.len()];
        self.ends[i].posted.push(Posted {
            wr,
            source,
            sink,
            expect,
            started: false,
            transmitted: false,
            poison,
        });
    }

    /// Posts a random work request and executes it on the model.
    pub(super) fn post(&mut self, i: usize) {
        if self.ends[i].posted.len() - self.ends[i].next_done as usize > 24 || self.ways[i].poisoned
        {
            return;
        }
        let rng = &mut self.rng;
        let way = &mut self.ways[i];
        let mut fence = rng.one_in(8);
        let len = match rng.below(8) {
            0 => 0,
            1 => rng.below(SIZE),
            _ => rng.below(300),
        };
        let solicited = rng.one_in(2);
        match rng.below(12) {
            0..=2 => {
                let invalidate = rng.one_in(3).then(|| rng.next() as u32);
                let op = Op::Send {
                    solicited,
                    invalidate,
                };
                let read = self.ends[i]
                    .posted
                    .iter()
                    .rposition(|p| matches!(p.wr.op, Op::Read { .. }) && p.poison.is_none());
                let (source, data) = match read {
                    Some(read) if rng.one_in(4) => {
                        fence = true;
                        (
                            Source::SinkOf(read as u64),
                            self.ends[i].posted[read].expect.clone(),
                        )
                    }
                    _ => {
                        let data = rng.bytes(len);
                        (Source::Own(data.clone()), data)
                    }
                };
                let len = data.len();
                self.ends[1 - i].receives.push_back(len + rng.below(10));
                way.last_write = 0;
                way.messages.push_back(Message {
                    len: data.len(),
                    data,
                    solicited,
                    invalidate,
                    immediate: None,
                });
                self.finish(
                    i,
                    SendWr {
                        op,
                        len: len as u32,
                        fence,
                    },
                    source,
                    Vec::new(),
                );
            }
            3..=5 => {
                let offset = rng.below(SIZE - len + 1);
                let (stag, to) = (DATA.stag, DATA.base + offset as u64);
                let range = offset..offset + len;
                fence |= way
                    .unfenced
                    .iter()
                    .any(|r| r.start < range.end && range.start < r.end);
                let data = rng.bytes(len);
                way.model.data[range].copy_from_slice(&data);
                way.writes.push_back((stag, to, data.clone()));
                let imm = rng.next();
                let op = if rng.one_in(4) {
                    self.ends[1 - i].receives.push_back(0);
                    way.last_write = 0;
                    way.messages.push_back(Message {
                        len,
                        data: Vec::new(),
                        solicited,
                        invalidate: None,
                        immediate: Some(imm),
                    });
                    Op::WriteImm {
                        stag,
                        to,
                        imm,
                        solicited,
                    }
                } else {
                    way.last_write = len;
                    Op::Write { stag, to }
                };
                self.finish(
                    i,
                    SendWr {
                        op,
                        len: len as u32,
                        fence,
                    },
                    Source::Own(data),
                    Vec::new(),
                );
            }
            6 => {
                let imm = rng.next();
                self.ends[1 - i].receives.push_back(rng.below(3));
                way.messages.push_back(Message {
                    len: std::mem::take(&mut way.last_write),
                    data: Vec::new(),
                    solicited,
                    invalidate: None,
                    immediate: Some(imm),
                });
                let wr = SendWr {
                    op: Op::Imm { imm, solicited },
                    len: 0,
                    fence,
                };
                self.finish(i, wr, Source::Own(Vec::new()), Vec::new());
            }
            7..=9 => {
                let offset = rng.below(SIZE - len + 1);
                let (region, expect) = if rng.one_in(3) {
                    (FIXED, way.model.fixed[offset..offset + len].to_vec())
                } else {
                    (DATA, way.model.data[offset..offset + len].to_vec())
                };
                let op = Op::Read {
                    src_stag: region.stag,
                    src_to: region.base + offset as u64,
                };
                self.finish(
                    i,
                    SendWr {
                        op,
                        len: len as u32,
                        fence,
                    },
                    Source::Own(Vec::new()),
                    expect,
                );
                if region.stag == DATA.stag {
                    self.ways[i].unfenced.push(offset..offset + len);
                }
            }
            10 => {
                let index = rng.below(8);
                let op = [AtomicOp::FetchAdd, AtomicOp::Swap, AtomicOp::CompareSwap][rng.below(3)];
                let value = rng.next();
                let compare = if rng.one_in(2) {
                    way.model.words[index]
                } else {
                    rng.next()
                };
                let to = WORDS.base + 8 * index as u64;
                let original = way
                    .model
                    .atomic(WORDS.stag, to, op, value, compare)
                    .unwrap();
                let op = Op::Atomic {
                    op,
                    stag: WORDS.stag,
                    to,
                    add_or_swap: value,
                    add_or_swap_mask: u64::MAX,
                    compare,
                    compare_mask: u64::MAX,
                };
                let expect = original.to_be_bytes().to_vec();
                self.finish(
                    i,
                    SendWr { op, len: 8, fence },
                    Source::Own(Vec::new()),
                    expect,
                );
            }
            _ => self.finish(
                i,
                SendWr {
                    op: Op::Local,
                    len: 0,
                    fence,
                },
                Source::Own(Vec::new()),
                Vec::new(),
            ),
        }
    }

    fn finish(&mut self, i: usize, wr: SendWr, source: Source, expect: Vec<u8>) {
        if wr.fence {
            self.ways[i].unfenced.clear();
        }
        self.push(i, wr, source, expect, None);
    }

    /// Posts a work request that the peer must refuse with a known error. Nothing is posted after it.
    pub(super) fn poison(&mut self, i: usize) {
        if self.ways[i].poisoned {
            return;
        }
        let rng = &mut self.rng;
        let send = Op::Send {
            solicited: false,
            invalidate: None,
        };
        let bad = 0xdead_0001;
        let read = |src_stag, src_to| Op::Read { src_stag, src_to };
        let (op, len, error) = match rng.below(8) {
            0 => (send, 1, TermError::Untagged(UntaggedError::NoBuffer)),
            1 => {
                let room = rng.below(1000);
                self.ends[1 - i].receives.push_back(room);
                (
                    send,
                    room as u32 + 1,
                    TermError::Untagged(UntaggedError::TooLong),
                )
            }
            2 => (
                Op::Write { stag: bad, to: 0 },
                1,
                TermError::Tagged(TaggedError::InvalidStag),
            ),
            3 => (
                Op::Write {
                    stag: DATA.stag,
                    to: DATA.base + SIZE as u64,
                },
                1,
                TermError::Tagged(TaggedError::BaseBounds),
            ),
            4 => (
                Op::Write {
                    stag: FIXED.stag,
                    to: FIXED.base,
                },
                1,
                TermError::Protection(ProtectionError::AccessRights),
            ),
            5 => (
                read(bad, 0),
                5,
                TermError::Protection(ProtectionError::InvalidStag),
            ),
            6 => (
                read(DATA.stag, DATA.base - 1),
                5,
                TermError::Protection(ProtectionError::BaseBounds),
            ),
            _ => (
                read(FIXED.stag, u64::MAX - 3),
                5,
                TermError::Protection(ProtectionError::ToWrap),
            ),
        };
        if matches!(op, Op::Write { .. }) {
            self.ways[i].writes.push_back((0, 0, Vec::new()));
        }
        let expect = if op.is_answered() {
            rng.bytes(len as usize)
        } else {
            Vec::new()
        };
        let data = vec![7; len as usize];
        let fence = rng.one_in(4);
        self.ways[i].poisoned = true;
        self.push(
            i,
            SendWr { op, len, fence },
            Source::Own(data),
            expect,
            Some(error),
        );
    }
}
