//! The rules of a RoCE connection, one by one: what is refused, when something is sent again, and when a connection fails.

use std::time::Duration;

use weft_proto::dgram::Now;
use weft_proto::rdmap::{Op, Payload, SendWr};
use weft_proto::roce::{Config, Connection, Done, Received, Rx, State, Status, supports};
use weft_wire::rdmap::AtomicOp;
use weft_wire::roce::{
    Aeth, AtomicEth, DEFAULT_PKEY, Header, NakCode, Op as Wire, Opcode, Reth, Service, Syndrome,
    rnr_delay,
};

pub(super) const T0: Now = Now::from_secs(1);
pub(super) const TICK: Duration = Duration::from_nanos(1);
pub(super) const CONFIG: Config = Config {
    service: Service::Rc,
    dest_qp: 9,
    pkey: DEFAULT_PKEY,
    mtu: 256,
    sq_psn: 0xff_fffe,
    rq_psn: 100,
    ord: 2,
    ird: 2,
    timeout: 14,
    retry_count: 2,
    rnr_retry: 1,
    rnr_timer: 12,
    window: 64,
};
pub(super) const SEND: Op = Op::Send {
    solicited: false,
    invalidate: None,
};
pub(super) const READ: Op = Op::Read {
    src_stag: 1,
    src_to: 0x100,
};

pub(super) fn connection() -> Connection {
    Connection::new(CONFIG)
}

pub(super) fn post(conn: &mut Connection, op: Op, len: u32) -> u64 {
    let fence = false;
    conn.post_with(SendWr { op, len, fence }, ())
}

/// The packets that go now.
pub(super) fn packets(conn: &mut Connection, now: Now) -> Vec<(Header, Payload)> {
    let mut all = Vec::new();
    loop {
        let mut raw = Vec::new();
        let Some(tx) = conn.next_tx(now, &mut raw) else {
            return all;
        };
        let len = tx.payload.len() as usize + usize::from(tx.pad);
        raw.resize(raw.len() + len, 0);
        let (header, _) = Header::parse(&raw).expect("a packet");
        all.push((header, tx.payload));
    }
}

pub(super) fn psns(conn: &mut Connection, now: Now) -> Vec<u32> {
    packets(conn, now)
        .iter()
        .map(|(header, _)| header.psn)
        .collect()
}

pub(super) fn dones(conn: &mut Connection) -> Vec<Status> {
    std::iter::from_fn(|| conn.pop())
        .map(|(done, ())| done.status)
        .collect()
}

pub(super) fn request(op: Wire, psn: u32) -> Header {
    Header::new(Opcode::rc(op), 5, psn)
}

pub(super) fn read(psn: u32, va: u64, len: u32) -> Header {
    Header {
        reth: Some(Reth { va, rkey: 7, len }),
        ..request(Wire::ReadRequest, psn)
    }
}

pub(super) fn answer(syndrome: Syndrome, psn: u32) -> Header {
    Header {
        aeth: Some(Aeth { syndrome, msn: 0 }),
        ..request(Wire::Ack, psn)
    }
}

pub(super) const ACK: Syndrome = Syndrome::Ack(31);
pub(super) const LOST: Syndrome = Syndrome::Nak(NakCode::SequenceError);

/// What the responder answers to these packets of these lengths, each placed if it may be.
pub(super) fn answers(
    conn: &mut Connection,
    requests: &[(Header, u32)],
) -> Vec<(u32, Option<Syndrome>)> {
    for (header, len) in requests {
        match conn.rx(T0, header, *len) {
            Rx::PlaceWrite { .. } | Rx::PlaceRecv { .. } => {
                conn.rx_placed();
            }
            Rx::ReadRequested { .. } => conn.accept_read(),
            Rx::AtomicRequested { .. } => conn.atomic_done(0),
            _ => {}
        }
    }
    packets(conn, T0)
        .iter()
        .map(|(header, _)| (header.psn, header.aeth.map(|aeth| aeth.syndrome)))
        .collect()
}

#[test]
fn numbers_wrap_and_one_acknowledgement_covers_all() {
    let mut conn = connection();
    post(&mut conn, SEND, 600);
    post(&mut conn, Op::Write { stag: 3, to: 7 }, 0);
    let sent = packets(&mut conn, T0);
    let ops: Vec<_> = sent
        .iter()
        .map(|(h, _)| (h.psn, h.opcode.op, h.ack_request))
        .collect();
    assert_eq!(
        ops,
        [
            (0xff_fffe, Wire::SendFirst, false),
            (0xff_ffff, Wire::SendMiddle, false),
            (0, Wire::SendLast, true),
            (1, Wire::WriteOnly, true),
        ]
    );
    assert_eq!(sent[2].0.pad, 0);
    conn.rx(T0, &answer(ACK, 0xff_ffff), 0);
    assert_eq!(dones(&mut conn), []);
    conn.rx(T0, &answer(ACK, 1), 0);
    assert_eq!(
        dones(&mut conn),
        [Status::Ok { byte_len: 600 }, Status::Ok { byte_len: 0 }]
    );
    assert_eq!(conn.deadline(), None);
}

#[test]
fn what_was_lost_is_sent_again_from_there() {
    let mut conn = connection();
    post(&mut conn, SEND, 256 * 4);
    psns(&mut conn, T0);
    conn.rx(T0, &answer(LOST, 0), 0);
    assert_eq!(psns(&mut conn, T0), [0, 1]);
    conn.rx(T0, &answer(ACK, 1), 0);
    assert_eq!(dones(&mut conn), [Status::Ok { byte_len: 1024 }]);
}

#[test]
fn without_an_answer_the_connection_fails_after_the_tries() {
    let mut conn = connection();
    let patience = Duration::from_nanos(4096 << 14);
    post(&mut conn, SEND, 1);
    post(&mut conn, SEND, 1);
    assert_eq!(psns(&mut conn, T0).len(), 2);
    // The questions meanwhile use no try.
    let asks_until = |conn: &mut Connection, due: Now| {
        while conn.deadline() != Some(due) {
            let at = conn.deadline().expect("a time");
            assert!(at < due, "{at:?} {due:?}");
            conn.expired(at);
            assert_eq!(psns(conn, at), [0xff_ffff], "the last packet");
        }
    };
    // Each wait is twice as long as the one before.
    for waits in [1, 3] {
        let due = T0 + patience * waits;
        asks_until(&mut conn, due);
        conn.expired(due.saturating_sub(TICK));
        assert_eq!(psns(&mut conn, due), [], "too early");
        conn.expired(due);
        assert_eq!(psns(&mut conn, due), [0xff_fffe, 0xff_ffff]);
    }
    asks_until(&mut conn, T0 + patience * 7);
    conn.expired((T0 + patience * 7).saturating_sub(TICK));
    assert_eq!(conn.state(), State::Open);
    conn.expired(T0 + patience * 7);
    assert_eq!(conn.state(), State::Failed);
    conn.flush();
    assert_eq!(dones(&mut conn), [Status::RetryExceeded, Status::Flushed]);
}

/// The last packet of a burst, or the acknowledgement, is lost: nothing that comes later shows it.
#[test]
fn a_missing_acknowledgement_is_asked_for_long_before_the_timer_ends() {
    let us = Duration::from_micros;
    let mut conn = connection();
    post(&mut conn, SEND, 256);
    psns(&mut conn, T0);
    conn.rx(T0 + us(50), &answer(ACK, 0xff_fffe), 0);
    assert_eq!(dones(&mut conn).len(), 1);
    let sent = T0 + us(100);
    post(&mut conn, SEND, 256 * 3);
    assert_eq!(psns(&mut conn, sent), [0xff_ffff, 0, 1]);
    let asked = sent + Duration::from_millis(4);
    assert_eq!(conn.deadline(), Some(asked));
    conn.expired(asked);
    let again = packets(&mut conn, asked);
    assert_eq!((again.len(), again[0].0.psn), (1, 1));
    assert!(again[0].0.ack_request);
    let last = Payload::Wr {
        seq: 1,
        offset: 512,
        len: 256,
    };
    assert_eq!(again[0].1, last);
    // Each question in vain doubles the wait for the next one.
    assert_eq!(conn.deadline(), Some(sent + Duration::from_millis(8)));
    // The peer misses the packet before it.
    conn.rx(asked + us(50), &answer(LOST, 0), 0);
    assert_eq!(psns(&mut conn, asked + us(50)), [0, 1]);
    conn.rx(asked + us(100), &answer(ACK, 1), 0);
    assert_eq!(dones(&mut conn), [Status::Ok { byte_len: 768 }]);
    // A Read is asked for again from what is missing on.
    post(&mut conn, READ, 700);
    let begun = asked + us(200);
    assert_eq!(psns(&mut conn, begun), [2]);
    let due = conn.deadline().expect("a time");
    assert!(
        due < begun + Duration::from_millis(5),
        "{:?}",
        due.saturating_sub(begun)
    );
    let first = Header {
        aeth: Some(Aeth {
            syndrome: ACK,
            msn: 1,
        }),
        ..request(Wire::ReadResponseFirst, 2)
    };
    conn.rx(begun, &first, 256);
    conn.rx_placed();
    let due = conn.deadline().expect("a time");
    conn.expired(due);
    let again = packets(&mut conn, due);
    let reth = Reth {
        va: 0x200,
        rkey: 1,
        len: 444,
    };
    assert_eq!((again[0].0.psn, again[0].0.reth), (3, Some(reth)));
    assert_eq!(again.len(), 1);
}

/// Requests of one size go to the network together: what is owed to the peer follows them.
#[test]
fn an_acknowledgement_follows_the_requests_of_its_time() {
    let mut conn = connection();
    conn.rx(
        T0,
        &Header {
            ack_request: true,
            ..request(Wire::SendOnly, 100)
        },
        0,
    );
    conn.rx_placed();
    assert!(conn.may_rest());
    for _ in 0..3 {
        post(&mut conn, SEND, 256);
    }
    assert!(!conn.may_rest());
    let sent = packets(&mut conn, T0);
    let ops: Vec<Wire> = sent.iter().map(|(header, _)| header.opcode.op).collect();
    assert_eq!(
        ops,
        [Wire::SendOnly, Wire::SendOnly, Wire::SendOnly, Wire::Ack]
    );
    assert!(!conn.may_rest(), "nothing is left");
    // A peer that sends without end does not keep its acknowledgement from going.
    conn.rx(
        T0,
        &Header {
            ack_request: true,
            ..request(Wire::SendOnly, 101)
        },
        0,
    );
    conn.rx_placed();
    for _ in 0..40 {
        post(&mut conn, SEND, 256);
    }
    let sent = packets(&mut conn, T0);
    let at = sent
        .iter()
        .position(|(header, _)| header.opcode.op == Wire::Ack);
    assert_eq!(at, Some(16));
}

#[test]
fn a_peer_that_is_not_ready_is_given_its_time() {
    let mut conn = connection();
    post(&mut conn, SEND, 1);
    psns(&mut conn, T0);
    conn.rx(T0, &answer(Syndrome::RnrNak(20), 0xff_fffe), 0);
    let until = T0 + rnr_delay(20);
    assert_eq!(conn.deadline(), Some(until));
    assert_eq!(psns(&mut conn, until.saturating_sub(TICK)), []);
    assert_eq!(psns(&mut conn, until), [0xff_fffe]);
    conn.rx(until, &answer(Syndrome::RnrNak(20), 0xff_fffe), 0);
    assert_eq!(conn.state(), State::Failed);
    conn.flush();
    assert_eq!(dones(&mut conn), [Status::RnrRetryExceeded]);
}

#[test]
fn seven_tries_for_a_peer_that_is_not_ready_are_without_end() {
    let mut conn = Connection::<()>::new(Config {
        rnr_retry: 7,
        ..CONFIG
    });
    post(&mut conn, SEND, 1);
    let mut now = T0;
    for _ in 0..100 {
        assert_eq!(psns(&mut conn, now), [0xff_fffe]);
        conn.rx(now, &answer(Syndrome::RnrNak(1), 0xff_fffe), 0);
        now += rnr_delay(1);
    }
    assert_eq!(conn.state(), State::Open);
}

#[test]
fn a_refusal_names_its_request_and_ends_the_rest() {
    let mut conn = connection();
    for _ in 0..3 {
        post(&mut conn, Op::Write { stag: 3, to: 7 }, 1);
    }
    psns(&mut conn, T0);
    conn.rx(
        T0,
        &answer(Syndrome::Nak(NakCode::RemoteAccess), 0xff_ffff),
        0,
    );
    assert_eq!(conn.state(), State::Failed);
    assert_eq!(psns(&mut conn, T0), []);
    conn.flush();
    assert_eq!(
        dones(&mut conn),
        [
            Status::Ok { byte_len: 1 },
            Status::Refused(NakCode::RemoteAccess),
            Status::Flushed
        ]
    );
}

#[test]
fn what_is_not_on_its_way_cannot_be_answered() {
    let mut conn = connection();
    post(&mut conn, SEND, 1);
    psns(&mut conn, T0);
    for psn in [0xff_ffff, 0, 100, 0x7f_ffff, 0x80_0000, 0xff_fffc] {
        for syndrome in [
            ACK,
            LOST,
            Syndrome::RnrNak(1),
            Syndrome::Nak(NakCode::RemoteAccess),
        ] {
            assert_eq!(conn.rx(T0, &answer(syndrome, psn), 0), Rx::Nothing);
        }
        let original = Header {
            original: Some(1),
            ..request(Wire::AtomicAck, psn)
        };
        assert_eq!(conn.rx(T0, &original, 0), Rx::Nothing);
        let read = request(Wire::ReadResponseOnly, psn);
        assert_eq!(conn.rx(T0, &read, 1), Rx::Nothing);
    }
    // Nor is a Send answered by a Read's answer.
    let read = request(Wire::ReadResponseOnly, 0xff_fffe);
    assert_eq!(conn.rx(T0, &read, 1), Rx::Nothing);
    assert_eq!((conn.state(), psns(&mut conn, T0)), (State::Open, vec![]));
    assert_eq!(dones(&mut conn), []);
}

#[test]
fn a_read_is_asked_again_for_what_is_missing() {
    let mut conn = connection();
    post(&mut conn, READ, 700);
    post(&mut conn, SEND, 1);
    let sent = packets(&mut conn, T0);
    assert_eq!(
        sent[0].0.reth,
        Some(Reth {
            va: 0x100,
            rkey: 1,
            len: 700
        })
    );
    // Its answer has three packets, so the Send comes three numbers later.
    assert_eq!((sent[0].0.psn, sent[1].0.psn), (0xff_fffe, 1));
    let part = |op, psn| Header {
        aeth: Some(Aeth {
            syndrome: ACK,
            msn: 1,
        }),
        ..request(op, psn)
    };
    let (seq, len) = (0, 256);
    assert_eq!(
        conn.rx(T0, &part(Wire::ReadResponseFirst, 0xff_fffe), 256),
        Rx::PlaceRead {
            seq,
            offset: 0,
            len
        }
    );
    conn.rx_placed();
    // The second is lost.
    assert_eq!(
        conn.rx(T0, &part(Wire::ReadResponseLast, 0), 188),
        Rx::Nothing
    );
    let again = packets(&mut conn, T0);
    assert_eq!(
        again[0].0.reth,
        Some(Reth {
            va: 0x200,
            rkey: 1,
            len: 444
        })
    );
    assert_eq!(again[0].0.psn, 0xff_ffff);
    // An answer to the Send does not complete the Read.
    conn.rx(T0, &answer(ACK, 1), 0);
    assert_eq!(dones(&mut conn), []);
    assert_eq!(
        conn.rx(T0, &part(Wire::ReadResponseFirst, 0xff_ffff), 256),
        Rx::PlaceRead {
            seq,
            offset: 256,
            len
        }
    );
    conn.rx_placed();
    // An answer of another length.
    conn.rx(T0, &part(Wire::ReadResponseLast, 0), 187);
    assert_eq!(conn.state(), State::Failed);
    conn.flush();
    assert_eq!(dones(&mut conn), [Status::BadResponse, Status::Flushed]);
}

#[test]
fn reads_wait_for_their_turn_and_fences_for_reads() {
    let mut conn = connection();
    for _ in 0..3 {
        post(&mut conn, READ, 1);
    }
    assert_eq!(psns(&mut conn, T0).len(), 2, "as many as agreed");
    let mut conn = connection();
    post(&mut conn, READ, 1);
    let fence = true;
    conn.post_with(
        SendWr {
            op: SEND,
            len: 1,
            fence,
        },
        (),
    );
    assert_eq!(psns(&mut conn, T0).len(), 1);
    conn.rx(T0, &request(Wire::ReadResponseOnly, 0xff_fffe), 1);
    conn.rx_placed();
    assert_eq!(psns(&mut conn, T0), [0xff_ffff]);
}

#[test]
fn a_responder_acknowledges_what_it_has() {
    let mut conn = connection();
    let wants = |op, psn| Header {
        ack_request: true,
        ..request(op, psn)
    };
    let requests = [
        (request(Wire::SendFirst, 100), 256),
        (wants(Wire::SendLast, 101), 3),
        (wants(Wire::SendOnly, 102), 0),
    ];
    assert_eq!(answers(&mut conn, &requests), [(102, Some(ACK))]);
    // Sent again: the answer was lost.
    assert_eq!(answers(&mut conn, &requests[1..2]), [(102, Some(ACK))]);
    // A gap is reported once, and again after it was closed.
    let later = [
        (wants(Wire::SendOnly, 104), 0),
        (wants(Wire::SendOnly, 105), 0),
    ];
    assert_eq!(answers(&mut conn, &later), [(103, Some(LOST))]);
    assert_eq!(
        answers(&mut conn, &[(wants(Wire::SendOnly, 103), 0)]),
        [(103, Some(ACK))]
    );
    assert_eq!(answers(&mut conn, &later[1..]), [(104, Some(LOST))]);
}

#[test]
fn a_message_is_complete_with_its_last_packet() {
    let mut conn = connection();
    let first = Header {
        reth: Some(Reth {
            va: 64,
            rkey: 7,
            len: 300,
        }),
        ..request(Wire::WriteFirst, 100)
    };
    let last = Header {
        immediate: Some(8),
        solicited: true,
        ..request(Wire::WriteLastImm, 101)
    };
    let place = |va, len, takes_receive| Rx::PlaceWrite {
        rkey: 7,
        va,
        len,
        takes_receive,
    };
    assert_eq!(conn.rx(T0, &first, 256), place(64, 256, false));
    assert_eq!(conn.rx_placed(), None);
    // Without a receive it waits, and comes again.
    assert_eq!(conn.rx(T0, &last, 44), place(320, 44, true));
    conn.not_ready();
    let nak = packets(&mut conn, T0);
    assert_eq!(
        (nak[0].0.psn, nak[0].0.aeth.unwrap().syndrome),
        (101, Syndrome::RnrNak(12))
    );
    assert_eq!(conn.rx(T0, &last, 44), place(320, 44, true));
    let received = Received {
        len: 300,
        solicited: true,
        invalidate: None,
        immediate: Some(8),
        write: true,
    };
    assert_eq!(conn.rx_placed(), Some(received));
}

#[test]
fn requests_that_are_not_valid_are_refused() {
    let reth = |va, len| Some(Reth { va, rkey: 7, len });
    let write = |op, va, len| Header {
        reth: reth(va, len),
        ..request(op, 100)
    };
    let atomic = |va| Header {
        atomic: Some(AtomicEth {
            va,
            rkey: 7,
            swap_add: 1,
            compare: 0,
        }),
        ..request(Wire::FetchAdd, 100)
    };
    let last = request(Wire::SendLast, 101);
    let bad: [&[(Header, u32)]; 11] = [
        &[(request(Wire::SendMiddle, 100), 256)],
        &[(request(Wire::SendLast, 100), 1)],
        &[(request(Wire::SendFirst, 100), 255)],
        &[(request(Wire::SendOnly, 100), 257)],
        &[
            (request(Wire::SendFirst, 100), 256),
            (request(Wire::SendFirst, 101), 256),
        ],
        &[
            (request(Wire::SendFirst, 100), 256),
            (request(Wire::WriteLast, 101), 1),
        ],
        &[(request(Wire::SendFirst, 100), 256), (last, 0)],
        &[(write(Wire::WriteOnly, 0, 5), 4)],
        &[(write(Wire::WriteFirst, 0, 256), 256)],
        &[(write(Wire::ReadRequest, 0, u32::MAX), 0)],
        &[(atomic(12), 0)],
    ];
    // Memory that no key has.
    let beyond: [&[(Header, u32)]; 2] = [
        &[(write(Wire::WriteOnly, u64::MAX - 1, 2), 2)],
        &[(write(Wire::ReadRequest, u64::MAX - 1, 2), 0)],
    ];
    let invalid = bad.map(|requests| (requests, NakCode::InvalidRequest));
    let beyond = beyond.map(|requests| (requests, NakCode::RemoteAccess));
    for (requests, code) in invalid.into_iter().chain(beyond) {
        let mut conn = connection();
        let (header, _) = requests.last().unwrap();
        let nak = Syndrome::Nak(code);
        assert_eq!(
            answers(&mut conn, requests),
            [(header.psn, Some(nak))],
            "{requests:?}"
        );
        assert_eq!(conn.state(), State::Failed);
        assert_eq!(conn.rx(T0, &request(Wire::SendOnly, 100), 0), Rx::Nothing);
    }
}

#[test]
fn more_reads_at_once_than_agreed_are_refused() {
    let mut conn = connection();
    for psn in 100..103 {
        let read = read(psn, 0, 9);
        let rx = conn.rx(T0, &read, 0);
        assert_eq!(rx == Rx::Nothing, psn == 102);
        conn.accept_read();
    }
    assert_eq!(conn.state(), State::Failed);
}

#[test]
fn a_repeated_read_is_answered_as_it_was_asked_first() {
    let mut conn = connection();
    let first = answers(&mut conn, &[(read(100, 0x1000, 600), 0)]);
    assert_eq!(
        first.iter().map(|(psn, _)| *psn).collect::<Vec<_>>(),
        [100, 101, 102]
    );
    // Once, however often it is asked; and from the middle.
    let twice = [(read(100, 0x1000, 600), 0); 2];
    assert_eq!(answers(&mut conn, &twice).len(), 3);
    assert_eq!(answers(&mut conn, &[(read(101, 0x1100, 344), 0)]).len(), 2);
    // Not other memory, nor more of it.
    for other in [
        read(100, 0x1100, 600),
        read(101, 0x1100, 600),
        read(99, 0x1000, 600),
    ] {
        assert_eq!(answers(&mut conn, &[(other, 0)]), []);
    }
    assert_eq!(conn.state(), State::Open);
}

#[test]
fn an_answer_whose_memory_has_gone_is_a_refusal() {
    let mut conn = connection();
    let read = read(100, 0, 600);
    conn.rx(T0, &read, 0);
    conn.accept_read();
    let mut raw = Vec::new();
    conn.next_tx(T0, &mut raw).unwrap();
    conn.next_tx(T0, &mut raw).unwrap();
    conn.source_gone();
    let nak = Syndrome::Nak(NakCode::RemoteAccess);
    let sent = packets(&mut conn, T0);
    assert_eq!(sent.len(), 1);
    assert_eq!(
        (sent[0].0.psn, sent[0].0.aeth.unwrap().syndrome),
        (101, nak)
    );
}

#[test]
fn packets_of_another_partition_or_service_are_not_looked_at() {
    let mut conn = connection();
    let pkey = 0x8001;
    let other = Header {
        pkey,
        ..request(Wire::SendOnly, 100)
    };
    assert_eq!(conn.rx(T0, &other, 0), Rx::Nothing);
    let uc = Header::new(Opcode::uc(Wire::SendOnly), 5, 100);
    assert_eq!(conn.rx(T0, &uc, 0), Rx::Nothing);
    assert_eq!(packets(&mut conn, T0), []);
    // A limited member of the same partition.
    let limited = Header {
        pkey: 0x7fff,
        ..request(Wire::SendOnly, 100)
    };
    assert_ne!(conn.rx(T0, &limited, 0), Rx::Nothing);
}

#[test]
fn an_unreliable_connection_loses_messages_and_goes_on() {
    let config = Config {
        service: Service::Uc,
        ..CONFIG
    };
    let mut conn = Connection::<()>::new(config);
    assert!(!supports(Service::Uc, &READ));
    post(&mut conn, SEND, 600);
    assert_eq!(psns(&mut conn, T0).len(), 3);
    assert_eq!(
        conn.pop().map(|(done, ())| done),
        Some(Done {
            seq: 0,
            status: Status::Ok { byte_len: 600 }
        })
    );
    assert_eq!(conn.deadline(), None);

    let uc = |op, psn| Header::new(Opcode::uc(op), 5, psn);
    let first = |offset, len| Rx::PlaceRecv {
        first: offset == 0,
        offset,
        len,
    };
    assert_eq!(conn.rx(T0, &uc(Wire::SendFirst, 100), 256), first(0, 256));
    assert_eq!(conn.rx_placed(), None);
    // 101 is lost, and its message with it.
    assert_eq!(conn.rx(T0, &uc(Wire::SendLast, 102), 256), Rx::Nothing);
    assert_eq!(conn.rx(T0, &uc(Wire::SendOnly, 103), 8), first(0, 8));
    assert!(conn.rx_placed().is_some());
    assert_eq!(conn.rx(T0, &uc(Wire::SendOnly, 110), 8), first(0, 8));
    conn.not_ready();
    assert_eq!(conn.rx(T0, &uc(Wire::SendOnly, 111), 8), first(0, 8));
    assert!(conn.rx_placed().is_some());
    assert_eq!(packets(&mut conn, T0), []);
}

#[test]
fn operations_that_roce_does_not_have_are_named() {
    let atomic = |op, mask| Op::Atomic {
        op,
        stag: 0,
        to: 0,
        add_or_swap: 0,
        add_or_swap_mask: mask,
        compare: 0,
        compare_mask: u64::MAX,
    };
    assert!(supports(Service::Rc, &atomic(AtomicOp::FetchAdd, 0)));
    assert!(supports(
        Service::Rc,
        &atomic(AtomicOp::CompareSwap, u64::MAX)
    ));
    assert!(!supports(Service::Rc, &atomic(AtomicOp::FetchAdd, 1)));
    assert!(!supports(Service::Rc, &atomic(AtomicOp::CompareSwap, 1)));
    assert!(!supports(Service::Rc, &atomic(AtomicOp::Swap, u64::MAX)));
    assert!(!supports(Service::Uc, &atomic(AtomicOp::FetchAdd, 0)));
}

/// A window that is full has asked for an acknowledgement, also after it has shrunk: both sides would wait for ever else.
#[test]
fn a_full_window_has_asked_for_an_acknowledgement() {
    for window in [1, 8, 15, 17, 64] {
        let mut conn = Connection::<()>::new(Config {
            window,
            timeout: 0,
            sq_psn: 1,
            ..CONFIG
        });
        post(&mut conn, SEND, 256 * 500);
        let mut turns = 0;
        while dones(&mut conn).is_empty() {
            let sent = packets(&mut conn, T0);
            let asked = sent.iter().rev().find(|(header, _)| header.ack_request);
            let (asked, _) = asked.expect("one that asks");
            conn.congested();
            conn.rx(T0, &answer(ACK, asked.psn), 0);
            turns += 1;
            assert!(turns < 500, "window {window}");
        }
    }
}

#[test]
fn an_answer_that_cannot_be_placed_fails_its_request_alone() {
    let mut conn = connection();
    post(&mut conn, SEND, 1);
    post(&mut conn, READ, 8);
    psns(&mut conn, T0);
    let read = request(Wire::ReadResponseOnly, 0xff_ffff);
    assert!(matches!(
        conn.rx(T0, &read, 8),
        Rx::PlaceRead { seq: 1, .. }
    ));
    // The Send is complete, the Read not before it is in place.
    assert_eq!(dones(&mut conn), [Status::Ok { byte_len: 1 }]);
    conn.refuse(NakCode::RemoteAccess);
    assert_eq!(
        (conn.state(), packets(&mut conn, T0)),
        (State::Failed, vec![])
    );
    conn.flush();
    assert_eq!(dones(&mut conn), [Status::LocalError]);
}

#[test]
fn a_long_answer_is_interrupted() {
    let mut conn = connection();
    let read = read(100, 0, 256 * 1000);
    conn.rx(T0, &read, 0);
    conn.accept_read();
    assert_eq!(psns(&mut conn, T0).len(), 64);
    assert!(conn.is_interrupted());
    // The peer has lost the first packet: what is sent next is that one.
    conn.rx(T0, &read, 0);
    assert_eq!(psns(&mut conn, T0)[0], 100);
}

/// A peer whose timer was early has the first answer, and goes on.
#[test]
fn repeated_answers_do_not_count_as_the_peers_requests() {
    let read = |psn| read(psn, 0, 9);
    let mut conn = connection();
    assert_eq!(
        answers(&mut conn, &[(read(100), 0), (read(101), 0)]).len(),
        2
    );
    let again = [100, 101, 102, 103].map(|psn| (read(psn), 0));
    let sent = answers(&mut conn, &again);
    assert_eq!(
        sent.iter().map(|(psn, _)| *psn).collect::<Vec<_>>(),
        [102, 103]
    );
    assert_eq!(conn.state(), State::Open);
}

#[test]
fn local_work_that_takes_long_holds_up_what_follows_and_no_more() {
    let mut conn = connection();
    post(&mut conn, SEND, 1);
    let local = post(&mut conn, Op::Local, 0);
    post(&mut conn, SEND, 1);
    let sent = packets_and_local(&mut conn);
    assert_eq!(sent, [Some(0xff_fffe), None]);
    conn.rx(T0, &answer(LOST, 0xff_fffe), 0);
    assert_eq!(packets_and_local(&mut conn), [Some(0xff_fffe)]);
    conn.rx(T0, &answer(ACK, 0xff_fffe), 0);
    conn.local_done(local);
    assert_eq!(dones(&mut conn).len(), 2);
    assert_eq!(psns(&mut conn, T0), [0xff_ffff]);
    post(&mut conn, SEND, 1);
    assert_eq!(psns(&mut conn, T0), [0]);
}

/// The numbers of the packets that go now; `None` for local work, which is not done here.
fn packets_and_local(conn: &mut Connection) -> Vec<Option<u32>> {
    std::iter::from_fn(|| {
        let mut raw = Vec::new();
        let tx = conn.next_tx(T0, &mut raw)?;
        if matches!(tx.payload, Payload::Local { .. }) {
            return Some(None);
        }
        raw.resize(
            raw.len() + tx.payload.len() as usize + usize::from(tx.pad),
            0,
        );
        Some(Some(Header::parse(&raw).expect("a packet").0.psn))
    })
    .collect()
}

#[test]
fn a_peer_cannot_make_answers_pile_up() {
    let mut conn = connection();
    answers(&mut conn, &[(request(Wire::SendOnly, 100), 0)]);
    for _ in 0..1000 {
        conn.rx(T0, &request(Wire::SendOnly, 100), 0);
        conn.rx(T0, &request(Wire::SendOnly, 101), 0);
        conn.not_ready();
    }
    assert_eq!(packets(&mut conn, T0).len(), 2);
}
