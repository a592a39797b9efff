//! A connection of RoCE on any packets and calls.

use weft_wire::rdmap::AtomicOp;
use weft_wire::roce::{
    Aeth, AtomicEth, DEFAULT_PKEY, Header, NakCode, Op as Wire, Opcode, Reth, Service, Syndrome,
};

use super::Input;
use crate::dgram::Now;
use crate::rdmap::{Op, Payload, SendWr};
use crate::roce::{Config, Connection, Rx, State, Status, supports};

struct Caller {
    conn: Connection,
    config: Config,
    now: Now,
    posted: Vec<SendWr>,
    popped: usize,
    /// Packets of answers that the peer has asked for and that were not sent, at most.
    owed: u64,
}

/// A connection fed arbitrary packets and calls: no panic, nothing to place where it must not go, no more answers than were asked for, and every
/// request complete in the end.
pub fn roce_connection(data: &[u8]) {
    let mut input = Input(data);
    let flags = input.u8();
    let config = Config {
        service: if flags & 1 == 0 {
            Service::Rc
        } else {
            Service::Uc
        },
        dest_qp: 7,
        pkey: DEFAULT_PKEY,
        mtu: 256 << (flags >> 1 & 3),
        sq_psn: input.u32(),
        rq_psn: input.u32(),
        ord: (input.u8() % 4).into(),
        ird: (input.u8() % 4).into(),
        timeout: input.u8(),
        retry_count: flags >> 3 & 7,
        rnr_retry: input.u8() & 7,
        rnr_timer: input.u8(),
        window: input.u8().into(),
    };
    let mut caller = Caller {
        conn: Connection::new(config),
        config,
        now: Now::ZERO,
        posted: Vec::new(),
        popped: 0,
        owed: 0,
    };
    while !input.0.is_empty() {
        match input.u8() % 8 {
            0 => caller.post(&mut input),
            1 | 2 => caller.transmit(&mut input),
            3..=6 => caller.receive(&mut input),
            _ => {
                caller.now += Now::from_micros(input.u16().into());
                match input.u8() {
                    0 => caller.conn.flush(),
                    1 => caller.conn.congested(),
                    _ => caller.conn.expired(caller.now),
                }
            }
        }
        caller.reap();
    }
    caller.conn.flush();
    caller.reap();
    assert_eq!(caller.popped, caller.posted.len());
    assert_eq!(caller.conn.next_tx(caller.now, &mut Vec::new()), None);
}

impl Caller {
    fn post(&mut self, input: &mut Input<'_>) {
        let flags = input.u8();
        let solicited = flags & 0x20 != 0;
        let (stag, to) = (1, u64::from(flags).wrapping_neg());
        let op = match flags & 7 {
            0 => Op::Send {
                solicited,
                invalidate: (flags & 8 != 0).then_some(3),
            },
            1 => Op::SendImm { imm: 5, solicited },
            2 => Op::Write { stag, to },
            3 => Op::WriteImm {
                stag,
                to,
                imm: 5,
                solicited,
            },
            4 | 5 => Op::Read {
                src_stag: stag,
                src_to: to,
            },
            6 => Op::Atomic {
                op: AtomicOp::FetchAdd,
                stag,
                to,
                add_or_swap: 1,
                add_or_swap_mask: 0,
                compare: 0,
                compare_mask: 0,
            },
            _ => Op::Local,
        };
        if supports(self.config.service, &op) {
            let wr = SendWr {
                op,
                len: input.u16().into(),
                fence: flags & 0x10 != 0,
            };
            let seq = if flags & 0x40 == 0 {
                self.conn.post_with(wr, ())
            } else {
                self.conn.post_unsignaled(wr, ())
            };
            assert_eq!(seq, self.posted.len() as u64);
            self.posted.push(wr);
        }
    }

    fn transmit(&mut self, input: &mut Input<'_>) {
        for _ in 0..=input.u8() {
            let mut raw = Vec::new();
            let Some(tx) = self.conn.next_tx(self.now, &mut raw) else {
                return;
            };
            let mut len = tx.payload.len() as usize;
            assert!(len <= self.config.mtu as usize);
            match tx.payload {
                Payload::Local { seq } => {
                    assert!(raw.is_empty());
                    self.conn.local_done(seq);
                    continue;
                }
                Payload::Wr { seq, offset, len } => {
                    assert!(offset + len <= self.posted[seq as usize].len);
                }
                Payload::Source { .. } | Payload::None => {}
            }
            len += usize::from(tx.pad);
            raw.resize(raw.len() + len, 0);
            let (header, payload) = Header::parse(&raw).expect("a packet of ours parses");
            assert_eq!(payload.len(), tx.payload.len() as usize);
            assert!(len.is_multiple_of(4) && header.dest_qp == 7);
            if header.opcode.op.is_response() {
                self.owed = self
                    .owed
                    .checked_sub(1)
                    .expect("an answer that was asked for");
            }
            if matches!(tx.payload, Payload::Source { .. }) && input.u8() == 0 {
                let open = self.conn.state() == State::Open;
                self.conn.source_gone();
                if open && self.conn.state() == State::Failed {
                    self.owed = 1;
                }
            }
        }
    }

    fn receive(&mut self, input: &mut Input<'_>) {
        let [op, psn, flags, size] = input.take();
        let op = Wire::ALL[usize::from(op) % Wire::ALL.len()];
        let response = op.is_response();
        let base = if response {
            self.config.sq_psn
        } else {
            self.config.rq_psn
        };
        let len = match size {
            0..=15 => size.into(),
            16..=200 => self.config.mtu,
            _ => u32::from(size) * 9,
        };
        let reth_len = input.u16().into();
        let va = if flags & 8 != 0 {
            u64::MAX - 100
        } else {
            0x1000
        };
        let header = Header {
            solicited: flags & 1 != 0,
            ack_request: flags & 2 != 0,
            reth: op.has_reth().then_some(Reth {
                va,
                rkey: 1,
                len: reth_len,
            }),
            atomic: op.is_atomic().then_some(AtomicEth {
                va: va & !7,
                rkey: 1,
                swap_add: 1,
                compare: 0,
            }),
            aeth: op.has_aeth().then_some(Aeth {
                syndrome: match flags >> 4 {
                    0..=7 => Syndrome::Ack(31),
                    8..=10 => Syndrome::Nak(NakCode::SequenceError),
                    11..=13 => Syndrome::RnrNak(flags & 31),
                    14 => Syndrome::Nak(NakCode::RemoteAccess),
                    _ => Syndrome::Nak(NakCode::InvalidRequest),
                },
                msn: 0,
            }),
            original: Some(9),
            immediate: op.has_immediate().then_some(1),
            invalidate: op.invalidates().then_some(1),
            ..Header::new(
                Opcode {
                    service: self.config.service,
                    op,
                },
                5,
                base.wrapping_add(psn.into()).wrapping_sub(3) & 0xff_ffff,
            )
        };
        let open = self.conn.state() == State::Open;
        let rx = self.conn.rx(self.now, &header, len);
        if !response && open {
            // A request is answered by one packet, or a Read by those of its length.
            let read = header.reth.filter(|_| op == Wire::ReadRequest);
            let packets = read.map_or(1, |reth| reth.len.div_ceil(self.config.mtu).max(1));
            self.owed += u64::from(packets);
        }
        let ready = input.u8();
        match rx {
            Rx::Nothing => {}
            Rx::PlaceWrite {
                va, len: placed, ..
            } => {
                assert!(placed == len && va.checked_add(len.into()).is_some());
                self.place(ready);
            }
            Rx::PlaceRead { seq, offset, len } => {
                assert!(offset + len <= self.posted[seq as usize].len);
                if ready == 0 {
                    self.conn.refuse(NakCode::RemoteAccess);
                } else {
                    assert_eq!(self.conn.rx_placed(), None);
                }
            }
            Rx::PlaceRecv { first, offset, .. } => {
                assert!(first || offset > 0);
                self.place(ready);
            }
            Rx::ReadRequested { va, len, .. } => {
                assert!(va.checked_add(len.into()).is_some());
                if ready == 0 {
                    self.conn.refuse(NakCode::RemoteAccess);
                } else {
                    self.conn.accept_read();
                }
            }
            Rx::AtomicRequested { va, .. } => {
                assert!(va.is_multiple_of(8));
                self.conn.atomic_done(3);
            }
            Rx::AtomicResult { seq, original } => {
                assert_eq!(original, 9);
                assert!(matches!(self.posted[seq as usize].op, Op::Atomic { .. }));
                assert_eq!(self.conn.rx_placed(), None);
            }
        }
    }

    fn place(&mut self, ready: u8) {
        match ready {
            0 => self.conn.refuse(NakCode::InvalidRequest),
            1..=40 => self.conn.not_ready(),
            _ => {
                self.conn.rx_placed();
            }
        }
    }

    fn reap(&mut self) {
        let mut failed = self.conn.state() == State::Open;
        while let Some((done, ())) = self.conn.pop() {
            assert_eq!(done.seq, self.popped as u64);
            self.popped += 1;
            // One request fails for a reason of its own, the rest with it.
            match done.status {
                Status::Ok { .. } | Status::Flushed => {}
                _ => assert!(!std::mem::replace(&mut failed, true)),
            }
        }
    }
}
