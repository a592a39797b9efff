//! The order of work requests: what waits for what, who takes turns with whom, and which one an ended connection blames.

use crate::common::{
    CONFIG, FETCH_ADD, READ, SEND, SMALL, announce, carry, fenced, flushed, hex, must_tx, ok,
    receive, received, stream, tx, wr,
};
use weft_proto::rdmap::{
    Config, Done, DoneStatus, Event, Fault, Op, Payload, Rx, State, Stream, notice, noticed,
};
use weft_wire::ddp::{Header, Tagged};
use weft_wire::rdmap::{Opcode, ProtectionError, TermError, Terminate, UntaggedError};

#[test]
fn completions_wait_for_earlier_ones() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(READ, 4));
    a.post(wr(SEND, 4));
    a.post(wr(READ, 4));
    for _ in 0..3 {
        carry(&mut a, &mut b).unwrap();
        b.accept_read();
    }
    assert_eq!(
        a.pop_completed(),
        None,
        "the Send is done, the Read before it is not"
    );
    carry(&mut b, &mut a).unwrap();
    assert_eq!(
        [a.pop_completed(), a.pop_completed(), a.pop_completed()],
        [ok(0, 4), ok(1, 4), None]
    );
    carry(&mut b, &mut a).unwrap();
    assert_eq!(a.pop_completed(), ok(2, 4));
    // Reports that make no sense change nothing.
    a.post(wr(SEND, 1));
    a.post(wr(READ, 1));
    for seq in [0, 3, 4, 5, u64::MAX] {
        a.transmitted(seq);
    }
    assert_eq!(a.pop_completed(), None);
    must_tx(&mut a);
    must_tx(&mut a);
    a.transmitted(4);
    a.transmitted(3);
    assert_eq!(
        [a.pop_completed(), a.pop_completed()],
        [ok(3, 1), None],
        "a Read is not done when sent"
    );
}

#[test]
fn a_fence_waits_for_every_earlier_answer() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(READ, 4));
    a.post(wr(FETCH_ADD, 8));
    a.post(wr(SEND, 1));
    a.post(fenced(Op::Local, 0));
    a.post(wr(SEND, 1));
    carry(&mut a, &mut b).unwrap();
    b.accept_read();
    carry(&mut a, &mut b).unwrap();
    b.atomic_done(0);
    carry(&mut a, &mut b).unwrap();
    assert!(!a.has_work());
    assert_eq!(tx(&mut a), None);
    carry(&mut b, &mut a).unwrap();
    assert_eq!(tx(&mut a), None, "one answer of two");
    carry(&mut b, &mut a).unwrap();
    assert!(a.has_work());
    let (header, local) = must_tx(&mut a);
    assert_eq!(
        (header.len(), local.payload, local.completes),
        (0, Payload::Local { seq: 3 }, Some(3))
    );
    assert_eq!(must_tx(&mut a).1.completes, Some(4));
    for _ in 0..3 {
        assert!(a.pop_completed().is_some());
    }
    assert_eq!(a.pop_completed(), None, "local work not done");
    a.transmitted(3);
    assert_eq!([a.pop_completed(), a.pop_completed()], [ok(3, 0), None]);
}

#[test]
fn ord_stops_the_queue() {
    let (mut a, mut b) = (Stream::new(Config { ord: 2, ..CONFIG }), stream());
    for op in [READ, FETCH_ADD, SEND, READ, SEND] {
        a.post(wr(op, 8));
    }
    for _ in 0..3 {
        carry(&mut a, &mut b).unwrap();
        b.accept_read();
        b.atomic_done(0);
    }
    assert_eq!(a.outbound_requests(), 2);
    assert_eq!(
        tx(&mut a),
        None,
        "two are outstanding, and the last Send may not pass the Read"
    );
    carry(&mut b, &mut a).unwrap();
    assert!(matches!(
        carry(&mut a, &mut b),
        Ok(Some(Event::ReadRequested { .. }))
    ));
    b.accept_read();
    assert_eq!(carry(&mut a, &mut b), Ok(received(8)));
}

#[test]
fn responses_and_work_requests_take_turns() {
    let (mut a, mut b) = (Stream::new(Config { ord: 4, ..SMALL }), Stream::new(SMALL));
    for _ in 0..4 {
        a.post(wr(READ, 200));
        carry(&mut a, &mut b).unwrap();
        b.accept_read();
    }
    for _ in 0..3 {
        b.post(wr(SEND, 200));
    }
    let opcodes: Vec<u8> =
        std::iter::from_fn(|| tx(&mut b).map(|(header, _)| header[1] & 0xf)).collect();
    // Whole messages of two segments each.
    assert_eq!(opcodes, [3, 3, 2, 2, 3, 3, 2, 2, 3, 3, 2, 2, 2, 2]);
    // A response that comes up while a Send is under way waits for its end.
    a.post(wr(SEND, 300));
    must_tx(&mut a);
    b.post(wr(READ, 4));
    carry(&mut b, &mut a).unwrap();
    a.accept_read();
    let opcodes: Vec<u8> =
        std::iter::from_fn(|| tx(&mut a).map(|(header, _)| header[1] & 0xf)).collect();
    assert_eq!(opcodes, [3, 3, 2]);
}

#[test]
fn answers_keep_the_order_of_requests() {
    let (mut a, mut b) = (stream(), stream());
    for op in [FETCH_ADD, READ, FETCH_ADD] {
        a.post(wr(op, 8));
        carry(&mut a, &mut b).unwrap();
        b.accept_read();
        b.atomic_done(0);
    }
    let opcodes: Vec<u8> =
        std::iter::from_fn(|| tx(&mut b).map(|(header, _)| header[1] & 0xf)).collect();
    assert_eq!(opcodes, [11, 2, 11]);
}

#[test]
fn a_responder_waits_for_the_first_segment() {
    let (mut a, mut b) = (
        stream(),
        Stream::new(Config {
            hold_until_first_rx: true,
            ..CONFIG
        }),
    );
    b.post(wr(SEND, 1));
    assert!(!b.has_work());
    assert_eq!(tx(&mut b), None);
    a.post(wr(Op::Write { stag: 0, to: 0 }, 0));
    carry(&mut a, &mut b).unwrap();
    assert!(b.has_work());
    carry(&mut b, &mut a).unwrap();
}

/// One-sided work that the initiator does itself keeps its place in the queue and in the order of completions.
#[test]
fn direct_work_keeps_its_place() {
    let (mut a, mut b) = (stream(), stream());
    let write = Op::Write { stag: 1, to: 0 };
    let write_imm = Op::WriteImm {
        stag: 1,
        to: 0,
        imm: 7,
        solicited: true,
    };
    a.post(wr(SEND, 4));
    a.post(wr(write, 10));
    a.post(wr(write_imm, 10));
    a.post(wr(READ, 4));
    assert_eq!(a.next_to_start(), Some(0));
    // A Send has to be sent; until it is cut to its end nothing else starts.
    carry(&mut a, &mut b).unwrap();
    assert_eq!(a.next_to_start(), Some(1));
    a.done_directly();
    assert_eq!(a.next_to_start(), Some(2));
    a.written_directly();
    assert_eq!(a.next_to_start(), None);
    let (bytes, tx) = must_tx(&mut a);
    assert_eq!((tx.payload, tx.completes), (Payload::None, Some(2)));
    // Only the Immediate Data is sent. It says how much was written, to a peer that can know that it was.
    assert_eq!(
        bytes,
        hex("41 49 8000000a 00000000 00000002 00000000 0000000000000007")
    );
    for (believes, written) in [(false, 0), (true, 10)] {
        let mut b = stream();
        if believes {
            b.believe_written();
        }
        receive(&mut b, &hex("41 43 00000000 00000000 00000001 00000000")).unwrap();
        let event = receive(&mut b, &bytes).unwrap();
        assert!(matches!(event, Some(Event::Received { len, .. }) if len == written));
    }
    assert_eq!(a.next_to_start(), Some(3));
    a.done_directly();
    assert_eq!(a.next_to_start(), None);
    assert_eq!(a.outbound_requests(), 0);
    for seq in [0, 2] {
        a.transmitted(seq);
    }
    let done: Vec<u64> = std::iter::from_fn(|| a.pop_completed())
        .map(|done| done.seq)
        .collect();
    assert_eq!(done, [0, 1, 2, 3]);
}

/// A notice is an empty Write between messages, and asks nothing of a peer.
#[test]
fn notices_go_before_what_is_posted_later() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(SEND, 1));
    a.notify(0x1234);
    a.notify(0x9_0000_0001);
    // In the place of the first, which has the same high half.
    a.notify(0x5678);
    a.post(wr(SEND, 1));
    assert!(!a.is_idle());
    assert_eq!(carry(&mut a, &mut b), Ok(received(1)));
    let (other, _) = must_tx(&mut a);
    assert_eq!(other, hex("c1 40 00000000 0000000900000001"));
    announce(&mut b, &other, 0).unwrap();
    assert_eq!(b.rx_placed(), None);
    let (notice, tx) = must_tx(&mut a);
    assert_eq!(notice, hex("c1 40 00000000 0000000000005678"));
    assert_eq!((tx.payload, tx.completes), (Payload::None, None));
    let placed = Rx::PlaceWrite {
        stag: 0,
        to: 0x5678,
        len: 0,
    };
    assert_eq!(announce(&mut b, &notice, 0), Ok(placed));
    assert_eq!(b.rx_placed(), None);
    assert_eq!(carry(&mut a, &mut b), Ok(received(1)));
    assert!(!a.has_work());
    for seq in 0..2 {
        a.transmitted(seq);
        a.pop_completed().unwrap();
    }
    assert!(a.is_idle());
    a.notify(1);
    assert!(a.has_work() && !a.is_idle());
}

/// A request that the initiator would carry out itself waits for a notice before it.
#[test]
fn nothing_starts_directly_before_a_notice() {
    let mut a = stream();
    a.notify(0x1234);
    a.post(wr(Op::Write { stag: 1, to: 0 }, 4096));
    assert_eq!(a.next_to_start(), None);
    let (notice, _) = must_tx(&mut a);
    assert_eq!(notice, hex("c1 40 00000000 0000000000001234"));
    assert_eq!(a.next_to_start(), Some(0));
    // One that follows it does not.
    a.notify(0x5678);
    assert_eq!(a.next_to_start(), Some(0));
}

#[test]
fn a_notice_has_a_kind_and_a_number() {
    let to = notice(*b"wXRC", 7);
    assert_eq!(to, u64::from_be_bytes(*b"wXRC\0\0\0\x07"));
    assert_eq!(noticed(*b"wXRC", to), Some(7));
    assert_eq!(
        noticed(*b"wXRC", notice(*b"wXRC", u32::MAX)),
        Some(u32::MAX)
    );
    assert_eq!(noticed(*b"wXRC", u64::from_be_bytes(*b"weftRNR\0")), None);
    assert_eq!(noticed(*b"wXRC", 0), None);
}

/// What the peer has passed before the request that its Terminate names is complete, but for answers that bring something.
#[test]
fn a_terminate_tells_what_was_received_before() {
    for (read, second) in [(0, ok(2, 1)), (4, flushed(2))] {
        let mut a = stream();
        a.complete_when_answered();
        for op in [SEND, READ, SEND, SEND] {
            a.post(wr(op, if op == READ { read } else { 1 }));
            must_tx(&mut a);
        }
        let named = "1205 c000 0013 41 43 00000000 00000000 00000003 00000000";
        let terminate = format!("41 47 00000000 00000002 00000001 00000000 {named}");
        receive(&mut a, &hex(&terminate)).unwrap();
        a.flush();
        assert_eq!(a.pop_completed(), ok(0, 1));
        a.pop_completed().unwrap();
        assert_eq!(a.pop_completed(), second);
        let last = a.pop_completed().unwrap();
        let error = TermError::Untagged(UntaggedError::TooLong);
        assert_eq!(last.status, DoneStatus::RemoteError(error));
    }
}

/// A peer that goes says what it has received: those Sends and what came before them are complete, and nothing that it cannot have.
#[test]
fn a_peer_that_goes_tells_what_it_has_received() {
    for (messages, done) in [(0, 0), (1, 1), (2, 3), (7, 3), (3 << 30, 0), (u32::MAX, 0)] {
        let mut a = stream();
        a.complete_when_answered();
        let write = Op::Write { stag: 7, to: 0 };
        for op in [SEND, write, SEND, write, SEND] {
            a.post(wr(op, 1));
        }
        for _ in 0..4 {
            must_tx(&mut a);
        }
        a.peer_received(messages);
        a.flush();
        let popped: Vec<_> = std::iter::from_fn(|| a.pop_completed()).map(Some).collect();
        let judge = |seq| if seq < done { ok(seq, 1) } else { flushed(seq) };
        let want: Vec<_> = (0..5).map(judge).collect();
        assert_eq!(popped, want, "{messages}");
    }
    let mut a = stream();
    a.post(wr(SEND, 1));
    must_tx(&mut a);
    a.peer_received(1);
    assert_eq!(a.pop_completed(), None, "complete when transmitted");
}

#[test]
fn a_cut_connection_flushes_what_is_not_done() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(SEND, 1));
    a.post(wr(READ, 1));
    a.post(wr(SEND, 1));
    a.post(wr(SEND, 1));
    for _ in 0..3 {
        carry(&mut a, &mut b).unwrap();
        b.accept_read();
    }
    a.flush();
    assert_eq!(a.outbound_requests(), 0);
    assert_eq!(a.state(), State::Closed);
    assert_eq!(tx(&mut a), None);
    assert!(!a.has_work());
    // The Send behind the unanswered Read left, but nobody knows whether it arrived.
    let popped: Vec<_> = std::iter::from_fn(|| a.pop_completed()).map(Some).collect();
    assert_eq!(popped, [ok(0, 1), flushed(1), flushed(2), flushed(3)]);
    // What is posted later is flushed too.
    assert_eq!(a.post(wr(SEND, 1)), 4);
    assert_eq!(tx(&mut a), None);
    assert_eq!(a.pop_completed(), flushed(4));
    assert_eq!(a.rx_segment(&Header::Tagged(WRITE), 14), Err(Fault::Closed));
    // The other side has a response that nobody wants.
    b.flush();
    assert_eq!(
        (tx(&mut b), b.inbound_requests(), b.pop_completed()),
        (None, 0, None)
    );
}

const WRITE: Tagged = Tagged {
    opcode: Opcode::Write,
    last: true,
    stag: 1,
    to: 0,
};

/// The work requests that a Terminate can blame, all under way, and two that are not.
fn busy() -> Stream {
    let mut a = Stream::new(Config { ord: 2, ..SMALL });
    for op in [
        READ,
        FETCH_ADD,
        Op::Write { stag: 9, to: 1000 },
        SEND,
        Op::Imm {
            imm: 1,
            solicited: false,
        },
    ] {
        a.post(wr(op, 200));
    }
    a.post(wr(READ, 200));
    a.post(wr(Op::Write { stag: 10, to: 0 }, 200));
    while let Some((_, tx)) = tx(&mut a) {
        tx.completes.into_iter().for_each(|seq| a.transmitted(seq));
    }
    a
}

fn terminate(a: &mut Stream, error: TermError, header: Option<Header>) -> Vec<DoneStatus> {
    let mut body = [0; Terminate::MAX_LEN];
    let body_len = Terminate {
        error,
        ddp_segment_len: header.map(|_| 99),
        ddp_header: header,
        read_request: None,
    }
    .emit(&mut body);
    let mut ulpdu = hex("41 47 00000000 00000002 00000001 00000000");
    ulpdu.extend_from_slice(&body[..body_len]);
    assert!(matches!(receive(a, &ulpdu), Ok(Some(Event::Terminated(t))) if t.error == error));
    assert_eq!(a.state(), State::Terminated);
    assert_eq!(tx(a), None, "a Terminate is not answered");
    a.fail(Fault::LocalCatastrophic);
    assert_eq!(tx(a), None, "a Terminate is not answered");
    assert_eq!(a.rx_segment(&Header::Tagged(WRITE), 14), Err(Fault::Closed));
    a.flush();
    std::iter::from_fn(|| a.pop_completed())
        .map(|Done { status, .. }| status)
        .collect()
}

#[test]
fn a_terminate_blames_the_request_it_names() {
    use weft_wire::ddp::Untagged;
    let error = TermError::Protection(ProtectionError::BaseBounds);
    let untagged = |opcode: Opcode, msn| {
        let qn = opcode.queue().unwrap();
        Some(Header::Untagged(Untagged {
            opcode,
            last: true,
            invalidate: 0,
            qn,
            msn,
            mo: 0,
        }))
    };
    let tagged = |stag, to| {
        Some(Header::Tagged(Tagged {
            opcode: Opcode::Write,
            last: false,
            stag,
            to,
        }))
    };
    for (header, blamed) in [
        (untagged(Opcode::ReadRequest, 1), Some(0)),
        (untagged(Opcode::AtomicRequest, 2), Some(1)),
        (tagged(9, 1000), Some(2)),
        (tagged(9, 1114), Some(2)),
        (tagged(9, 1200), Some(2)),
        (untagged(Opcode::Send, 1), Some(3)),
        (untagged(Opcode::Immediate, 2), Some(4)),
        (untagged(Opcode::ReadRequest, 3), None),
        (untagged(Opcode::Send, 3), None),
        (untagged(Opcode::Send, 0), None),
        (tagged(9, 999), None),
        (tagged(9, 1201), None),
        (tagged(8, 1000), None),
        // Not sent yet.
        (tagged(10, 0), None),
        (None, None),
    ] {
        let mut expected = [DoneStatus::Flushed; 7];
        if let Some(blamed) = blamed {
            expected[blamed] = DoneStatus::RemoteError(error);
        }
        assert_eq!(
            terminate(&mut busy(), error, header),
            expected,
            "{header:?}"
        );
    }
}

#[test]
fn a_vanished_source_is_reported_with_its_request() {
    let (mut a, mut b) = (stream(), Stream::new(SMALL));
    a.post(wr(READ, 4));
    a.post(wr(
        Op::Read {
            src_stag: 2,
            src_to: 3,
        },
        200,
    ));
    a.post(wr(SEND, 4));
    let mut second = Vec::new();
    for _ in 0..2 {
        let (ulpdu, _) = must_tx(&mut a);
        receive(&mut b, &ulpdu).unwrap();
        b.accept_read();
        second = ulpdu;
    }
    // Something else arrives in between: it is not to blame.
    carry(&mut a, &mut b).unwrap();
    carry(&mut b, &mut a).unwrap();
    assert!(matches!(
        must_tx(&mut b).1.payload,
        Payload::Source {
            stag: 2,
            to: 3,
            len: 100
        }
    ));
    b.fail_source(Fault::InvalidStag);
    assert_eq!(b.state(), State::Terminating);
    let (ulpdu, last) = must_tx(&mut b);
    assert!(last.terminate);
    assert_eq!(
        ulpdu[..18],
        hex("41 47 00000000 00000002 00000001 00000000")
    );
    assert_eq!(ulpdu[18..24], hex("0100 e000 002e"));
    assert_eq!(ulpdu[24..], second, "both headers of the request");
    assert_eq!(tx(&mut b), None);
    receive(&mut a, &ulpdu).unwrap();
    a.flush();
    let error = DoneStatus::RemoteError(TermError::Protection(ProtectionError::InvalidStag));
    let popped: Vec<_> = std::iter::from_fn(|| a.pop_completed())
        .map(|done| done.status)
        .collect();
    assert_eq!(
        popped,
        [DoneStatus::Ok { byte_len: 4 }, error, DoneStatus::Flushed]
    );
}
