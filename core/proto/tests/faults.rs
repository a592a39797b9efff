//! Every fault by a literal bad segment, and the exact Terminate that answers it.

use crate::common;

use crate::common::{
    CONFIG, FETCH_ADD, READ, announce, carry, hex, must_tx, receive, stream, tx, wr,
};
use weft_proto::rdmap::{Config, Event, Fault, Op, State, Stream};
use weft_wire::ddp::{Header, Tagged, Untagged};
use weft_wire::rdmap::Opcode;

const TERMINATE: &str = "41 47 00000000 00000002 00000001 00000000";
/// The body of a Read Request: sink, sink offset, size, source, source offset.
const READ_BODY: &str = "aaaaaaaa 0000000000000000 00000010 00000007 0000000000000100";

/// The stream must answer with this Terminate body, then fall silent.
fn answers(b: &mut Stream, body: &str) {
    assert_eq!(b.state(), State::Terminating);
    assert!(b.has_work());
    let (ulpdu, last) = must_tx(b);
    assert!(last.terminate && last.completes.is_none() && last.payload.is_empty());
    assert_eq!(ulpdu, hex(&format!("{TERMINATE} {body}")));
    assert_eq!(tx(b), None);
    assert!(!b.has_work());
    assert_eq!(
        announce(b, &hex("c1 40 00000001 0000000000000000"), 4),
        Err(Fault::Closed)
    );
    b.fail(Fault::Crc);
    assert_eq!(tx(b), None, "only the first fault counts");
    b.flush();
    assert_eq!(b.state(), State::Closed);
}

/// The last of these ULPDUs must be refused with this fault and this Terminate body.
fn refuses(ulpdus: &[&str], fault: Fault, body: &str) {
    refuses_by(stream(), ulpdus, fault, body);
}

fn refuses_by(mut b: Stream, ulpdus: &[&str], fault: Fault, body: &str) {
    let (bad, good) = ulpdus.split_last().unwrap();
    for ulpdu in good {
        let event = receive(&mut b, &hex(ulpdu));
        assert!(event.is_ok(), "{event:?} for {ulpdu}");
        b.accept_read();
        b.atomic_done(0);
    }
    let bad = hex(bad);
    assert_eq!(receive(&mut b, &bad), Err(fault));
    b.fail(fault);
    answers(&mut b, body);
}

#[test]
fn versions_and_opcodes() {
    // No header is copied where its layout is unknown.
    refuses(
        &["c2 40 00000001 0000000000000000"],
        Fault::DdpVersion { tagged: true },
        "1104 0000",
    );
    refuses(
        &["40 43 00000000 00000000 00000001 00000000"],
        Fault::DdpVersion { tagged: false },
        "1206 0000",
    );
    refuses(
        &["41 83 00000000 00000000 00000001 00000000"],
        Fault::RdmapVersion,
        "0205 0000",
    );
    refuses(
        &["41 4c 00000000 00000000 00000001 00000000"],
        Fault::UnexpectedOpcode,
        "0206 0000",
    );
    refuses(
        &["c1 43 00000000 0000000000000000"],
        Fault::UnexpectedOpcode,
        "0206 0000",
    );
    refuses(
        &["41 40 00000000 00000000 00000001 00000000"],
        Fault::UnexpectedOpcode,
        "0206 0000",
    );
    // Also not the header of an earlier, innocent segment.
    let good = "41 43 00000000 00000000 00000001 00000000";
    refuses(
        &[good, "41 43 00000000 00000001 00000002 00000000"],
        Fault::InvalidQn,
        "1201 0000",
    );
    refuses(
        &[good, "41 43 00000000 00000007 00000002 00000000"],
        Fault::InvalidQn,
        "1201 0000",
    );
    refuses(&[good, "c1 42 00"], Fault::BadFrame, "1000 0000");
    for (bad, fault, body) in [
        (
            "c2 40 00000001 0000000000000000",
            Fault::DdpVersion { tagged: true },
            "1104 0000",
        ),
        (
            "40 43 00000000 00000000 00000002 00000000",
            Fault::DdpVersion { tagged: false },
            "1206 0000",
        ),
        (
            "41 83 00000000 00000000 00000002 00000000",
            Fault::RdmapVersion,
            "0205 0000",
        ),
        (
            "41 4c 00000000 00000000 00000002 00000000",
            Fault::UnexpectedOpcode,
            "0206 0000",
        ),
    ] {
        refuses(&[good, bad], fault, body);
    }
}

#[test]
fn headers_that_no_parser_makes() {
    let tagged = Header::Tagged(Tagged {
        opcode: Opcode::Send,
        last: true,
        stag: 0,
        to: 0,
    });
    assert_eq!(
        stream().rx_segment(&tagged, 14),
        Err(Fault::UnexpectedOpcode)
    );
    let untagged = Untagged {
        opcode: Opcode::Write,
        last: true,
        invalidate: 0,
        qn: 0,
        msn: 1,
        mo: 0,
    };
    assert_eq!(
        stream().rx_segment(&Header::Untagged(untagged), 18),
        Err(Fault::UnexpectedOpcode)
    );
    let queue = Untagged {
        opcode: Opcode::Send,
        qn: 1,
        ..untagged
    };
    assert_eq!(
        stream().rx_segment(&Header::Untagged(queue), 18),
        Err(Fault::InvalidQn)
    );
    let fine = Header::Untagged(Untagged {
        opcode: Opcode::Send,
        ..untagged
    });
    assert_eq!(stream().rx_segment(&fine, 17), Err(Fault::BadFrame));
    assert!(stream().rx_segment(&fine, 65_535).is_ok());
    // Shared memory carries longer frames, up to what a message can be.
    let longest = u32::MAX as usize + 18;
    assert!(stream().rx_segment(&fine, longest).is_ok());
    assert_eq!(
        stream().rx_segment(&fine, longest + 1),
        Err(Fault::BadFrame)
    );
}

#[test]
fn message_numbers() {
    let send = |msn| format!("41 43 00000000 00000000 {msn:08x} 00000000 00");
    for (earlier, msn) in [
        (0, 0),
        (0, 2),
        (1, 1),
        (1, 3),
        (1, 0x8000_0002),
        (2, u32::MAX),
    ] {
        let mut ulpdus: Vec<String> = (1..=earlier).map(send).collect();
        ulpdus.push(send(msn));
        let ulpdus: Vec<&str> = ulpdus.iter().map(String::as_str).collect();
        let body = format!("1203 c000 0013 41 43 00000000 00000000 {msn:08x} 00000000");
        refuses(&ulpdus, Fault::MsnRange, &body);
    }
    // The queues count apart.
    let read = |msn| format!("41 41 00000000 00000001 {msn:08x} 00000000 {READ_BODY}");
    refuses(
        &[&send(1), &read(1), &read(2), &send(2), &read(2)],
        Fault::MsnRange,
        "1203 c000 002e 41 41 00000000 00000001 00000002 00000000",
    );
    refuses(
        &["41 47 00000000 00000002 00000002 00000000 01000000"],
        Fault::MsnRange,
        "1203 c000 0016 41 47 00000000 00000002 00000002 00000000",
    );
}

#[test]
fn message_offsets() {
    let first = "01 43 00000000 00000000 00000001 00000000 0102";
    for mo in [0_u32, 1, 3, u32::MAX] {
        let second = format!("41 43 00000000 00000000 00000001 {mo:08x} 03");
        let body = format!("1204 c000 0013 41 43 00000000 00000000 00000001 {mo:08x}");
        refuses(&[first, &second], Fault::InvalidMo, &body);
    }
    refuses(
        &["41 43 00000000 00000000 00000001 00000001 03"],
        Fault::InvalidMo,
        "1204 c000 0013 41 43 00000000 00000000 00000001 00000001",
    );
    refuses(
        &[&format!(
            "41 41 00000000 00000001 00000001 00000004 {READ_BODY}"
        )],
        Fault::InvalidMo,
        "1204 c000 002e 41 41 00000000 00000001 00000001 00000004",
    );
    // The next message starts at 0 again.
    refuses(
        &[
            first,
            "41 43 00000000 00000000 00000001 00000002 03",
            "41 43 00000000 00000000 00000002 00000003 03",
        ],
        Fault::InvalidMo,
        "1204 c000 0013 41 43 00000000 00000000 00000002 00000003",
    );
}

#[test]
fn messages_are_not_interleaved() {
    let send = "01 43 00000000 00000000 00000001 00000000 0102";
    refuses(
        &[send, "41 45 00000000 00000000 00000001 00000002 03"],
        Fault::UnexpectedOpcode,
        "0206 0000",
    );
    let imm = "41 48 00000000 00000000 00000001 00000000 0102030405060708";
    refuses(&[send, imm], Fault::UnexpectedOpcode, "0206 0000");
    let write = "81 40 00000007 0000000000000100 0102";
    refuses(
        &[write, "c1 42 00000007 0000000000000102 03"],
        Fault::UnexpectedOpcode,
        "0206 0000",
    );
    refuses(
        &[write, "c1 40 00000008 0000000000000102 03"],
        Fault::InvalidStag,
        "1100 c000 000f c1 40 00000008 0000000000000102",
    );
    refuses(
        &[write, "c1 40 00000007 0000000000000103 03"],
        Fault::Bounds,
        "1101 c000 000f c1 40 00000007 0000000000000103",
    );
    // Messages of other queues may come between, as siw allows too.
    let mut b = stream();
    let read = format!("41 41 00000000 00000001 00000001 00000000 {READ_BODY}");
    for (ulpdu, done) in [
        (write, false),
        (send, false),
        (&*read, true),
        ("c1 40 00000007 0000000000000102 03", false),
        ("41 43 00000000 00000000 00000001 00000002 03", true),
    ] {
        let event = receive(&mut b, &hex(ulpdu)).unwrap();
        assert_eq!(event.is_some(), done, "{ulpdu}");
        b.accept_read();
    }
}

#[test]
fn offsets_that_wrap() {
    refuses(
        &["c1 40 00000007 ffffffffffffffff 01"],
        Fault::ToWrap,
        "1103 c000 000f c1 40 00000007 ffffffffffffffff",
    );
    for body in [
        "aaaaaaaa 0000000000000000 00000010 00000007 fffffffffffffff0",
        "aaaaaaaa fffffffffffffff0 00000010 00000007 0000000000000000",
    ] {
        let header = "41 41 00000000 00000001 00000001 00000000";
        refuses(
            &[&format!("{header} {body}")],
            Fault::ToWrap,
            &format!("0104 e000 002e {header} {body}"),
        );
    }
    let header = "41 4a 00000000 00000001 00000001 00000000";
    let zeros = "00".repeat(32);
    refuses(
        &[&format!(
            "{header} 00000000 00000001 00000007 fffffffffffffff8 {zeros}"
        )],
        Fault::ToWrap,
        &format!("0104 c000 0046 {header}"),
    );
    // The last byte that has an offset can be read.
    let mut b = stream();
    let body = "aaaaaaaa 0000000000000000 0000000f 00000007 fffffffffffffff0";
    let event = receive(
        &mut b,
        &hex(&format!("41 41 00000000 00000001 00000001 00000000 {body}")),
    );
    assert!(
        matches!(event, Ok(Some(Event::ReadRequested { len: 15, .. }))),
        "{event:?}"
    );
    // A Send cannot grow beyond what its offset can say: 65,537 full segments.
    let mut b = stream();
    let mut mo = 0_u32;
    let fault = loop {
        let header = Untagged {
            opcode: Opcode::Send,
            last: false,
            invalidate: 0,
            qn: 0,
            msn: 1,
            mo,
        };
        match b.rx_segment(&Header::Untagged(header), 65_535) {
            Ok(_) => mo += 65_535 - 18,
            Err(fault) => break fault,
        }
        assert_eq!(b.rx_placed(), None);
    };
    assert_eq!(fault, Fault::ReceiveTooSmall);
}

#[test]
fn control_messages_have_one_size() {
    for (header, len) in [
        ("41 41 00000000 00000001 00000001 00000000", 28),
        ("41 4a 00000000 00000001 00000001 00000000", 52),
    ] {
        let longer = format!("{header} {}", "00".repeat(len + 1));
        let total = 18 + len + 1;
        refuses(
            &[&longer],
            Fault::ReceiveTooSmall,
            &format!("1205 c000 {total:04x} {header}"),
        );
        let shorter = format!("{header} {}", "00".repeat(len - 1));
        refuses(&[&shorter], Fault::BadFrame, "1000 0000");
        let open = header.replacen("41", "01", 1);
        let part = format!("{open} {}", "00".repeat(len));
        let total = 18 + len;
        refuses(
            &[&part],
            Fault::ReceiveTooSmall,
            &format!("1205 c000 {total:04x} {open}"),
        );
    }
    // Immediate Data may go on, as a Send with immediate data, but the eight bytes come first and together.
    for header in [
        "41 48 00000000 00000000 00000001 00000000",
        "01 48 00000000 00000000 00000001 00000000",
    ] {
        let shorter = format!("{header} {}", "00".repeat(7));
        refuses(&[&shorter], Fault::BadFrame, "1000 0000");
    }
    let begun = format!(
        "01 48 00000000 00000000 00000001 00000000 {}",
        "00".repeat(8)
    );
    let other = "41 43 00000000 00000000 00000001 00000008";
    refuses(&[&begun, other], Fault::UnexpectedOpcode, "0206 0000");
    let elsewhere = "41 48 00000000 00000000 00000001 00000000";
    refuses(
        &[&begun, elsewhere],
        Fault::InvalidMo,
        &format!("1204 c000 0012 {elsewhere}"),
    );
    // A Terminate has 4 to 52 bytes.
    let header = TERMINATE;
    refuses(&[&format!("{header} 010000")], Fault::BadFrame, "1000 0000");
    let long = format!("{header} {}", "00".repeat(53));
    refuses(
        &[&long],
        Fault::ReceiveTooSmall,
        &format!("1205 c000 0047 {header}"),
    );
    // An operation that does not exist.
    let header = "41 4a 00000000 00000001 00000001 00000000";
    refuses(
        &[&format!("{header} 00000003 {}", "00".repeat(48))],
        Fault::UnexpectedOpcode,
        "0206 0000",
    );
}

#[test]
fn more_requests_than_ird() {
    let read = |msn| format!("41 41 00000000 00000001 {msn:08x} 00000000 {READ_BODY}");
    let atomic = |msn| {
        format!(
            "41 4a 00000000 00000001 {msn:08x} 00000000 {}",
            "00".repeat(52)
        )
    };
    let two = || Stream::new(Config { ird: 2, ..CONFIG });
    let body =
        |op: &str, len| format!("1202 c000 {len:04x} 41 {op} 00000000 00000001 00000003 00000000");
    refuses_by(
        two(),
        &[&read(1), &atomic(2), &read(3)],
        Fault::TooManyReads,
        &body("41", 46),
    );
    refuses_by(
        two(),
        &[&read(1), &atomic(2), &atomic(3)],
        Fault::TooManyReads,
        &body("4a", 70),
    );
    let none = Stream::new(Config { ird: 0, ..CONFIG });
    refuses_by(
        none,
        &[&read(1)],
        Fault::TooManyReads,
        "1202 c000 002e 41 41 00000000 00000001 00000001 00000000",
    );
    // An answer makes room.
    let mut b = two();
    for msn in 1..=2 {
        receive(&mut b, &hex(&read(msn))).unwrap();
        b.accept_read();
    }
    must_tx(&mut b);
    assert!(receive(&mut b, &hex(&read(3))).is_ok());
}

/// A stream with a Read of 200 bytes outstanding, and its sink.
fn reading() -> (Stream, String) {
    let mut a = stream();
    a.post(wr(READ, 200));
    let (request, _) = must_tx(&mut a);
    (
        a,
        format!(
            "{:08x}",
            u32::from_be_bytes(request[18..22].try_into().unwrap())
        ),
    )
}

#[test]
fn read_responses_must_be_what_was_asked() {
    let whole = |control: &str, stag: &str, to: u64, len: usize| {
        format!("{control} {stag} {to:016x} {}", "00".repeat(len))
    };
    for (control, other, to, len, fault, code) in [
        ("c1 42", true, 0, 200, Fault::InvalidStag, "1100"),
        ("c1 42", false, 1, 200, Fault::Bounds, "1101"),
        ("c1 42", false, 0, 199, Fault::Bounds, "1101"),
        ("c1 42", false, 0, 201, Fault::Bounds, "1101"),
        ("81 42", false, 0, 200, Fault::Bounds, "1101"),
        ("81 42", false, 0, 201, Fault::Bounds, "1101"),
        ("c1 42", false, 0, 0, Fault::Bounds, "1101"),
    ] {
        let (a, sink) = reading();
        let stag = if other { "00000007" } else { &sink };
        let ulpdu = whole(control, stag, to, len);
        refuses_by(
            a,
            &[&ulpdu],
            fault,
            &format!(
                "{code} c000 {:04x} {}",
                14 + len,
                whole(control, stag, to, 0)
            ),
        );
    }
    // The second segment goes on where the first ended, and not beyond the end.
    for (control, to, len) in [
        ("c1 42", 0, 100),
        ("c1 42", 99, 100),
        ("c1 42", 100, 101),
        ("81 42", 100, 100),
    ] {
        let (a, sink) = reading();
        let (first, second) = (
            whole("81 42", &sink, 0, 100),
            whole(control, &sink, to, len),
        );
        let body = format!(
            "1101 c000 {:04x} {}",
            14 + len,
            whole(control, &sink, to, 0)
        );
        refuses_by(a, &[&first, &second], Fault::Bounds, &body);
    }
    // An answer comes once, and not unasked.
    let (a, sink) = reading();
    let answer = whole("c1 42", &sink, 0, 200);
    let body = format!("1100 c000 00d6 {}", whole("c1 42", &sink, 0, 0));
    refuses_by(a, &[&answer, &answer], Fault::InvalidStag, &body);
    refuses(&[&answer], Fault::InvalidStag, &body);
}

#[test]
fn answers_out_of_order() {
    // Two Reads: the second's answer may not come first.
    let (mut a, mut b) = (stream(), stream());
    for _ in 0..2 {
        a.post(wr(READ, 4));
        carry(&mut a, &mut b).unwrap();
        b.accept_read();
    }
    must_tx(&mut b);
    assert_eq!(carry(&mut b, &mut a), Err(Fault::InvalidStag));
    // A Read Response where an Atomic Response is due, and the other way round.
    for ops in [[FETCH_ADD, READ], [READ, FETCH_ADD]] {
        let (mut a, mut b) = (stream(), stream());
        for op in ops {
            a.post(wr(op, 4));
            carry(&mut a, &mut b).unwrap();
            b.accept_read();
            b.atomic_done(0);
        }
        must_tx(&mut b);
        let fault = if ops[0] == READ {
            Fault::NoReceive
        } else {
            Fault::InvalidStag
        };
        assert_eq!(carry(&mut b, &mut a), Err(fault));
        a.fail(fault);
        let expected = if ops[0] == READ { "1202" } else { "1100" };
        assert_eq!(must_tx(&mut a).0[18..20], hex(expected));
    }
}

#[test]
fn atomic_responses_must_be_what_was_asked() {
    let header = "41 4b 00000000 00000003 00000001 00000000";
    let unasked = format!("{header} 00000001 0000000000000000");
    refuses(
        &[&unasked],
        Fault::NoReceive,
        &format!("1202 c000 001e {header}"),
    );
    let mut a = stream();
    a.post(wr(FETCH_ADD, 8));
    let (request, _) = must_tx(&mut a);
    let id = u32::from_be_bytes(request[22..26].try_into().unwrap());
    // Nor can the identifier serve as the sink of a Read.
    let tagged = Header::Tagged(Tagged {
        opcode: Opcode::ReadResponse,
        last: true,
        stag: id,
        to: 0,
    });
    assert_eq!(a.rx_segment(&tagged, 14), Err(Fault::InvalidStag));
    let other = format!("{header} {:08x} 0000000000000000", id ^ 1);
    refuses_by(
        a,
        &[&other],
        Fault::AtomicMismatch,
        &format!("02ff c000 001e {header}"),
    );
}

/// An atomic's address is a multiple of 8, whatever else is wrong with it.
#[test]
fn misaligned_atomics() {
    let header = "41 4a 00000000 00000001 00000001 00000000";
    for to in [1, 4, 7, 0x104, u64::MAX - 3] {
        let body = format!("00000000 00000001 00000007 {to:016x} {}", "00".repeat(32));
        let frame = format!("{header} {body}");
        let expected = format!("02ff c000 0046 {header}");
        refuses(&[&frame], Fault::Misaligned, &expected);
    }
}

/// What the caller finds, in the segment that it found it in.
#[test]
fn faults_of_the_caller() {
    let write = "c1 40 00000007 0000000000000100";
    let send = "41 44 00000009 00000000 00000001 00000000";
    let read = "41 41 00000000 00000001 00000001 00000000";
    let atomic = "41 4a 00000000 00000001 00000001 00000000";
    let atomic_body = format!(
        "00000000 00000001 00000007 0000000000000100 {}",
        "00".repeat(32)
    );
    for (fault, of_write, of_send, of_request) in [
        (Fault::InvalidStag, "1100", "0100", "0100"),
        (Fault::Bounds, "1101", "0101", "0101"),
        (Fault::AccessRights, "0102", "0102", "0102"),
        (Fault::StagNotAssociated, "1102", "0103", "0103"),
        (Fault::ToWrap, "1103", "0104", "0104"),
        (Fault::CannotInvalidate, "0109", "0109", "0109"),
        (Fault::NoReceive, "1202", "1202", "1202"),
        (Fault::ReceiveTooSmall, "1205", "1205", "1205"),
    ] {
        let mut b = stream();
        announce(&mut b, &hex(write), 5).unwrap();
        b.fail(fault);
        answers(&mut b, &format!("{of_write} c000 0013 {write}"));

        let mut b = stream();
        announce(&mut b, &hex(send), 5).unwrap();
        b.fail(fault);
        answers(&mut b, &format!("{of_send} c000 0017 {send}"));

        // The Read Request's own header goes with what RDMAP found in it.
        let mut b = stream();
        receive(&mut b, &hex(&format!("{read} {READ_BODY}"))).unwrap();
        b.fail(fault);
        let (control, body) = if of_request.starts_with('0') {
            ("e000", READ_BODY)
        } else {
            ("c000", "")
        };
        answers(
            &mut b,
            &format!("{of_request} {control} 002e {read} {body}"),
        );

        let mut b = stream();
        receive(&mut b, &hex(&format!("{atomic} {atomic_body}"))).unwrap();
        b.fail(fault);
        answers(&mut b, &format!("{of_request} c000 0046 {atomic}"));
    }
    // A Send is judged after the Read Request before it: that one's header is not copied.
    let mut b = stream();
    receive(&mut b, &hex(&format!("{read} {READ_BODY}"))).unwrap();
    b.accept_read();
    announce(&mut b, &hex(send), 5).unwrap();
    b.fail(Fault::CannotInvalidate);
    answers(&mut b, &format!("0109 c000 0017 {send}"));
    // Below DDP, and on our own side: no header.
    for (fault, code) in [
        (Fault::Crc, "2002"),
        (Fault::Marker, "2003"),
        (Fault::InsufficientIrd, "2006"),
        (Fault::NoMatchingRtr, "2007"),
        (Fault::BadFrame, "1000"),
        (Fault::LocalCatastrophic, "0000"),
    ] {
        let mut b = stream();
        receive(&mut b, &hex(&format!("{write} 00"))).unwrap();
        b.fail(fault);
        answers(&mut b, &format!("{code} 0000"));
    }
    // Before any segment.
    let mut b = Stream::new(Config {
        hold_until_first_rx: true,
        ..CONFIG
    });
    b.fail(Fault::NoMatchingRtr);
    answers(&mut b, "2007 0000");
}

#[test]
fn a_failed_stream_completes_nothing_more() {
    let (mut a, mut b) = (stream(), stream());
    a.post(wr(READ, 4));
    a.post(wr(Op::Local, 0));
    carry(&mut a, &mut b).unwrap();
    b.accept_read();
    a.fail(Fault::LocalCatastrophic);
    assert!(must_tx(&mut a).1.terminate);
    let (header, _) = must_tx(&mut b);
    assert_eq!(announce(&mut a, &header, 4), Err(Fault::Closed));
    assert_eq!(a.rx_placed(), None);
    assert_eq!(a.pop_completed(), None);
    a.flush();
    assert_eq!(
        [a.pop_completed(), a.pop_completed()],
        [common::flushed(0), common::flushed(1)]
    );
}

/// Calls out of turn are refused, not believed.
#[test]
fn a_confused_caller_does_no_harm() {
    let write = hex("c1 40 00000007 0000000000000100");
    let mut b = stream();
    assert_eq!(b.rx_control(&[]), Err(Fault::LocalCatastrophic));
    assert_eq!(b.rx_placed(), None);
    b.accept_read();
    b.atomic_done(0);
    assert!(!b.has_work());
    announce(&mut b, &write, 1).unwrap();
    assert_eq!(
        announce(&mut b, &write, 1),
        Err(Fault::LocalCatastrophic),
        "the first is not placed"
    );
    assert_eq!(b.rx_control(&[]), Err(Fault::LocalCatastrophic));
    // A work request of which half was handed out is not done.
    let mut a = stream();
    a.post(wr(Op::Write { stag: 1, to: 0 }, 100_000));
    must_tx(&mut a);
    a.transmitted(0);
    assert_eq!(a.pop_completed(), None);
    assert_eq!(must_tx(&mut a).1.completes, Some(0));
    let mut b = stream();
    let read = hex(&format!(
        "41 41 00000000 00000001 00000001 00000000 {READ_BODY}"
    ));
    announce(&mut b, &read[..18], 28).unwrap();
    assert_eq!(b.rx_placed(), None);
    assert_eq!(
        b.rx_control(&read[18..45]),
        Err(Fault::LocalCatastrophic),
        "not the length announced"
    );
    assert!(b.rx_control(&read[18..]).is_ok());
    b.atomic_done(0);
    assert_eq!(
        announce(&mut b, &write, 1),
        Err(Fault::LocalCatastrophic),
        "the Read is not answered"
    );
    b.accept_read();
    b.accept_read();
    assert_eq!(b.inbound_requests(), 1);
}
