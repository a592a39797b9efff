//! Each operation, segment by segment.

use crate::common::{
    CONFIG, FETCH_ADD, READ, SEND, SMALL, announce, carry, hex, must_tx, ok, receive, received,
    stream, tx, wr,
};
use weft_proto::rdmap::{Config, Event, Op, Payload, Rx, Stream};
use weft_wire::rdmap::{AtomicOp, AtomicRequest};

#[test]
fn a_send_is_cut_at_the_ulpdu_limit() {
    let (mut a, mut b) = (Stream::new(SMALL), stream());
    assert_eq!(a.post(wr(SEND, 220)), 0);
    let (header, first) = must_tx(&mut a);
    assert_eq!(header, hex("01 43 00000000 00000000 00000001 00000000"));
    assert_eq!(
        first.payload,
        Payload::Wr {
            seq: 0,
            offset: 0,
            len: 110
        }
    );
    assert_eq!((first.completes, first.terminate), (None, false));
    assert_eq!(
        announce(&mut b, &header, 110),
        Ok(Rx::PlaceRecv {
            first: true,
            mo: 0,
            len: 110
        })
    );
    assert_eq!(b.rx_placed(), None);

    let (header, second) = must_tx(&mut a);
    assert_eq!(header, hex("41 43 00000000 00000000 00000001 0000006e"));
    assert_eq!(
        second.payload,
        Payload::Wr {
            seq: 0,
            offset: 110,
            len: 110
        }
    );
    assert_eq!(second.completes, Some(0));
    assert_eq!(
        announce(&mut b, &header, 110),
        Ok(Rx::PlaceRecv {
            first: false,
            mo: 110,
            len: 110
        })
    );
    assert_eq!(b.rx_placed(), received(220));
    assert_eq!(b.rx_placed(), None, "only once");

    assert_eq!(tx(&mut a), None);
    assert_eq!(a.pop_completed(), None, "not with the transport yet");
    a.transmitted(0);
    assert_eq!(a.pop_completed(), ok(0, 220));
    assert_eq!(a.pop_completed(), None);

    // A payload that fills the segment exactly is one segment, and the next message has the next number.
    a.post(wr(SEND, 110));
    let (header, tx) = must_tx(&mut a);
    assert_eq!(header, hex("41 43 00000000 00000000 00000002 00000000"));
    assert_eq!(tx.payload.len(), 110);
}

/// The immediate data is at the front of the first segment, and message offsets count it (docs/spec/rdmap-extensions.md).
#[test]
fn a_send_with_immediate_is_one_message() {
    let (mut a, mut b) = (Stream::new(SMALL), stream());
    let op = |solicited| Op::SendImm {
        imm: 0x0102_0304_0506_0708,
        solicited,
    };
    a.post(wr(op(false), 150));
    let (header, first) = must_tx(&mut a);
    let (immediate, n) = ("01020304 05060708", 76);
    assert_eq!(
        header,
        hex(&format!(
            "01 48 00000001 00000000 00000001 00000000 {immediate}"
        ))
    );
    let payload = |offset, len| Payload::Wr {
        seq: 0,
        offset,
        len,
    };
    assert_eq!((first.payload, first.completes), (payload(0, n), None));
    let place = |first, mo, len| Ok(Rx::PlaceRecv { first, mo, len });
    assert_eq!(announce(&mut b, &header, n as usize), place(true, 0, n));
    b.rx_immediate([1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(b.rx_placed(), None);
    let (header, second) = must_tx(&mut a);
    assert_eq!(header, hex("41 48 00000001 00000000 00000001 00000054"));
    assert_eq!(
        (second.payload, second.completes),
        (payload(n, 150 - n), Some(0))
    );
    let left = 150 - n;
    assert_eq!(
        announce(&mut b, &header, left as usize),
        place(false, n, left)
    );
    let event = Event::Received {
        len: 150,
        solicited: false,
        invalidate: None,
        immediate: Some(0x0102_0304_0506_0708),
    };
    assert_eq!(b.rx_placed(), Some(event));
    a.transmitted(0);
    assert_eq!(a.pop_completed(), ok(0, 150));

    a.post(wr(op(true), 1));
    let (header, one) = must_tx(&mut a);
    assert_eq!(
        header,
        hex(&format!(
            "41 49 00000001 00000000 00000002 00000000 {immediate}"
        ))
    );
    assert_eq!(one.completes, Some(1));
    assert_eq!(announce(&mut b, &header, 1), place(true, 0, 1));
}

#[test]
fn segments_of_a_message_are_even_and_need_no_padding() {
    for (len, pieces) in [
        (110, vec![110]),
        (111, vec![56, 55]),
        (200, vec![100, 100]),
        (330, vec![110, 110, 110]),
        (331, vec![84, 84, 84, 79]),
    ] {
        let mut a = Stream::new(SMALL);
        a.post(wr(SEND, len));
        let sent: Vec<u32> =
            std::iter::from_fn(|| tx(&mut a).map(|(_, tx)| tx.payload.len())).collect();
        assert_eq!(sent, pieces);
    }
}

#[test]
fn the_four_sends() {
    let (mut a, mut b) = (stream(), stream());
    for (i, (solicited, invalidate, control)) in [
        (false, None, "41 43 00000000"),
        (false, Some(0xabcd_ef01), "41 44 abcdef01"),
        (true, None, "41 45 00000000"),
        (true, Some(0), "41 46 00000000"),
    ]
    .into_iter()
    .enumerate()
    {
        a.post(wr(
            Op::Send {
                solicited,
                invalidate,
            },
            3,
        ));
        let (mut ulpdu, _) = must_tx(&mut a);
        assert_eq!(
            ulpdu,
            hex(&format!("{control} 00000000 {:08x} 00000000", i + 1))
        );
        ulpdu.extend_from_slice(b"abc");
        let event = Event::Received {
            len: 3,
            solicited,
            invalidate,
            immediate: None,
        };
        assert_eq!(receive(&mut b, &ulpdu), Ok(Some(event)));
    }
}

#[test]
fn a_write_is_tagged() {
    let (mut a, mut b) = (Stream::new(SMALL), stream());
    a.post(wr(
        Op::Write {
            stag: 0x0102_0304,
            to: 0x1000,
        },
        2 * 114,
    ));
    let (header, first) = must_tx(&mut a);
    assert_eq!(header, hex("81 40 01020304 0000000000001000"));
    assert_eq!(
        first.payload,
        Payload::Wr {
            seq: 0,
            offset: 0,
            len: 114
        }
    );
    assert_eq!(
        announce(&mut b, &header, 114),
        Ok(Rx::PlaceWrite {
            stag: 0x0102_0304,
            to: 0x1000,
            len: 114
        })
    );
    assert_eq!(b.rx_placed(), None);
    let (header, second) = must_tx(&mut a);
    assert_eq!(header, hex("c1 40 01020304 0000000000001072"));
    assert_eq!(
        (second.payload, second.completes),
        (
            Payload::Wr {
                seq: 0,
                offset: 114,
                len: 114
            },
            Some(0)
        )
    );
    assert_eq!(
        announce(&mut b, &header, 114),
        Ok(Rx::PlaceWrite {
            stag: 0x0102_0304,
            to: 0x1072,
            len: 114
        })
    );
    assert_eq!(b.rx_placed(), None);
    a.transmitted(0);
    assert_eq!(a.pop_completed(), ok(0, 228));
}

#[test]
fn a_write_with_immediate_is_two_messages_and_one_completion() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(
        Op::WriteImm {
            stag: 5,
            to: 6,
            imm: 0x1122_3344_5566_7788,
            solicited: true,
        },
        2,
    ));
    let (header, write) = must_tx(&mut a);
    assert_eq!(header, hex("c1 40 00000005 0000000000000006"));
    assert_eq!((write.payload.len(), write.completes), (2, None));
    assert_eq!(
        announce(&mut b, &header, 2),
        Ok(Rx::PlaceWrite {
            stag: 5,
            to: 6,
            len: 2
        })
    );
    assert_eq!(b.rx_placed(), None);
    let (ulpdu, imm) = must_tx(&mut a);
    assert_eq!(
        ulpdu,
        hex("41 49 00000000 00000000 00000001 00000000 1122334455667788")
    );
    assert_eq!((imm.payload, imm.completes), (Payload::None, Some(0)));
    let event = Event::Received {
        len: 2,
        solicited: true,
        invalidate: None,
        immediate: Some(0x1122_3344_5566_7788),
    };
    assert_eq!(receive(&mut b, &ulpdu), Ok(Some(event)));
    a.transmitted(0);
    assert_eq!(a.pop_completed(), ok(0, 2));

    a.post(wr(
        Op::Imm {
            imm: 9,
            solicited: false,
        },
        77,
    ));
    let (ulpdu, _) = must_tx(&mut a);
    assert_eq!(
        ulpdu,
        hex("41 48 00000000 00000000 00000002 00000000 0000000000000009")
    );
    let event = Event::Received {
        len: 0,
        solicited: false,
        invalidate: None,
        immediate: Some(9),
    };
    assert_eq!(receive(&mut b, &ulpdu), Ok(Some(event)));
    a.transmitted(1);
    assert_eq!(a.pop_completed(), ok(1, 8));
}

#[test]
fn a_read_is_answered_in_its_own_sink() {
    let (mut a, mut b) = (stream(), Stream::new(SMALL));
    a.post(wr(READ, 120));
    let (ulpdu, request) = must_tx(&mut a);
    assert_eq!(
        (request.payload, request.completes),
        (Payload::None, Some(0))
    );
    assert_eq!(
        ulpdu[..18],
        hex("41 41 00000000 00000001 00000001 00000000")
    );
    let sink = ulpdu[18..22].to_vec();
    assert_eq!(
        ulpdu[22..],
        hex("0000000000000000 00000078 11223344 0000000000005566")
    );
    assert_eq!(
        announce(&mut b, &ulpdu[..18], 28),
        Ok(Rx::Control { len: 28 })
    );
    let asked = Event::ReadRequested {
        stag: 0x1122_3344,
        to: 0x5566,
        len: 120,
    };
    assert_eq!(b.rx_control(&ulpdu[18..]), Ok(Some(asked)));
    assert!(!b.has_work());
    b.accept_read();
    assert_eq!((b.has_work(), b.inbound_requests()), (true, 1));

    let (header, first) = must_tx(&mut b);
    let mut expected = hex("81 42");
    expected.extend(&sink);
    assert_eq!(header, [&expected[..], &hex("0000000000000000")].concat());
    assert_eq!(
        first.payload,
        Payload::Source {
            stag: 0x1122_3344,
            to: 0x5566,
            len: 60
        }
    );
    assert_eq!(
        announce(&mut a, &header, 60),
        Ok(Rx::PlaceRead {
            seq: 0,
            offset: 0,
            len: 60
        })
    );
    assert_eq!(a.rx_placed(), None);
    let (header, last) = must_tx(&mut b);
    expected[0] = 0xc1;
    assert_eq!(header, [&expected[..], &hex("000000000000003c")].concat());
    assert_eq!(
        last.payload,
        Payload::Source {
            stag: 0x1122_3344,
            to: 0x55a2,
            len: 60
        }
    );
    assert_eq!((last.completes, b.inbound_requests()), (None, 0));

    a.transmitted(0);
    assert_eq!(
        announce(&mut a, &header, 60),
        Ok(Rx::PlaceRead {
            seq: 0,
            offset: 60,
            len: 60
        })
    );
    assert_eq!(
        (a.pop_completed(), a.outbound_requests()),
        (None, 1),
        "not in place yet"
    );
    assert_eq!(a.rx_placed(), None);
    assert_eq!((a.pop_completed(), a.outbound_requests()), (ok(0, 120), 0));
    // The next Read has another sink.
    a.post(wr(READ, 120));
    assert_ne!(must_tx(&mut a).0[18..22], sink);
}

#[test]
fn an_atomic_brings_the_original_value() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(
        Op::Atomic {
            op: AtomicOp::CompareSwap,
            stag: 0x1122_3344,
            to: 0x5568,
            add_or_swap: 1,
            add_or_swap_mask: 2,
            compare: 3,
            compare_mask: 4,
        },
        8,
    ));
    let (ulpdu, request) = must_tx(&mut a);
    assert_eq!(
        (request.payload, request.completes),
        (Payload::None, Some(0))
    );
    assert_eq!(
        ulpdu[..22],
        hex("41 4a 00000000 00000001 00000001 00000000 00000002")
    );
    assert_eq!(
        ulpdu[26..],
        hex(
            "11223344 0000000000005568 0000000000000001 0000000000000002 0000000000000003 0000000000000004"
        )
    );
    let Ok(Some(Event::AtomicRequested(asked))) = receive(&mut b, &ulpdu) else {
        panic!()
    };
    assert_eq!(asked, AtomicRequest::parse(&ulpdu[18..]).unwrap());
    b.atomic_done(0x0a0b);
    let (answer, _) = must_tx(&mut b);
    assert_eq!(
        answer[..18],
        hex("41 4b 00000000 00000003 00000001 00000000")
    );
    assert_eq!(answer[18..22], ulpdu[22..26], "the request identifier");
    assert_eq!(answer[22..], hex("0000000000000a0b"));
    assert_eq!(
        receive(&mut a, &answer),
        Ok(Some(Event::AtomicResult {
            seq: 0,
            original: 0x0a0b
        }))
    );
    assert_eq!(a.pop_completed(), ok(0, 8));
    // Numbers go on, in both queues.
    a.post(wr(FETCH_ADD, 8));
    assert!(matches!(
        carry(&mut a, &mut b),
        Ok(Some(Event::AtomicRequested(_)))
    ));
    b.atomic_done(0);
    assert_eq!(
        carry(&mut b, &mut a),
        Ok(Some(Event::AtomicResult {
            seq: 1,
            original: 0
        }))
    );
}

#[test]
fn nothing_is_too_short() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(SEND, 0));
    a.post(wr(
        Op::Write {
            stag: 1,
            to: u64::MAX,
        },
        0,
    ));
    a.post(wr(READ, 0));
    a.post(wr(
        Op::WriteImm {
            stag: 1,
            to: 2,
            imm: 3,
            solicited: false,
        },
        0,
    ));
    let (header, tx) = must_tx(&mut a);
    assert_eq!((tx.payload, tx.completes), (Payload::None, Some(0)));
    assert_eq!(
        announce(&mut b, &header, 0),
        Ok(Rx::PlaceRecv {
            first: true,
            mo: 0,
            len: 0
        })
    );
    assert_eq!(b.rx_placed(), received(0));
    let (header, tx) = must_tx(&mut a);
    assert_eq!((tx.payload, tx.completes), (Payload::None, Some(1)));
    assert_eq!(
        announce(&mut b, &header, 0),
        Ok(Rx::PlaceWrite {
            stag: 1,
            to: u64::MAX,
            len: 0
        })
    );
    assert_eq!(b.rx_placed(), None);
    assert!(matches!(
        carry(&mut a, &mut b),
        Ok(Some(Event::ReadRequested { len: 0, .. }))
    ));
    b.accept_read();
    let (answer, tx) = must_tx(&mut b);
    assert_eq!(tx.payload, Payload::None);
    assert_eq!(
        announce(&mut a, &answer, 0),
        Ok(Rx::PlaceRead {
            seq: 2,
            offset: 0,
            len: 0
        })
    );
    assert_eq!(a.rx_placed(), None);
    assert_eq!(carry(&mut a, &mut b), Ok(None));
    assert!(matches!(
        carry(&mut a, &mut b),
        Ok(Some(Event::Received {
            immediate: Some(3),
            ..
        }))
    ));
    assert!(!a.has_work());
    for seq in 0..2 {
        a.transmitted(seq);
    }
    assert_eq!(
        [a.pop_completed(), a.pop_completed(), a.pop_completed()],
        [ok(0, 0), ok(1, 0), ok(2, 0)]
    );
}

/// A peer may begin a message with a segment that carries nothing: it takes one receive all the same.
#[test]
fn an_empty_first_segment_opens_the_message() {
    let mut b = stream();
    for (header, payload, first, event) in [
        ("01 43 00000000 00000000 00000001 00000000", 0, true, None),
        ("01 43 00000000 00000000 00000001 00000000", 0, false, None),
        (
            "41 43 00000000 00000000 00000001 00000000",
            5,
            false,
            received(5),
        ),
    ] {
        let rx = announce(&mut b, &hex(header), payload);
        let len = payload as u32;
        assert_eq!(rx, Ok(Rx::PlaceRecv { first, mo: 0, len }));
        assert_eq!(b.rx_placed(), event);
    }
}

#[test]
fn the_ulpdu_limit_has_limits() {
    for (asked, used) in [
        (0, 128),
        (127, 128),
        (129, 129),
        (65_535, 65_535),
        (1 << 24, 1 << 24),
    ] {
        let mut a = Stream::new(Config {
            max_ulpdu: asked,
            ..CONFIG
        });
        a.post(wr(SEND, 2 * (used - 18)));
        assert_eq!(must_tx(&mut a).1.payload.len(), used - 18);
    }
    // The longest message there is.
    let mut a = stream();
    a.post(wr(
        Op::Write {
            stag: 1,
            to: u64::MAX,
        },
        u32::MAX,
    ));
    let mut sent = 0;
    let last = loop {
        let (header, tx) = must_tx(&mut a);
        sent += u64::from(tx.payload.len());
        if tx.completes.is_some() {
            break header;
        }
    };
    assert_eq!(sent, u64::from(u32::MAX));
    assert_eq!(last[0], 0xc1);
}
