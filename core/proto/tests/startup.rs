//! MPA start-up, byte by byte (RFC 5044 section 7.1, RFC 6581).

use crate::common::hex;
use weft_proto::mpa::{
    AcceptError, Config, InitStep, Initiator, MAX_FRAME, Params, RespStep, Responder, Revision,
    Rtr, RtrSet, StartError, TooLong,
};
use weft_wire::mpa::StartError as FrameError;
use weft_wire::rdmap::{MpaError, TermError};

const ONE: Config = Config {
    crc: false,
    recv_markers: false,
    revision: Revision::One,
    ird: 5,
    ord: 6,
    peer_to_peer: None,
};
const TWO: Config = Config {
    revision: Revision::Two,
    ..ONE
};
const ALL: RtrSet = RtrSet {
    send: true,
    write: true,
    read: true,
};

/// "MPA ID Req Frame" or "MPA ID Rep Frame", then what is given.
fn frame(kind: &str, rest: &str) -> Vec<u8> {
    let mut bytes = format!("MPA ID {kind} Frame").into_bytes();
    bytes.extend(hex(rest));
    bytes
}

fn pending(config: Config, request: &[u8]) -> weft_proto::mpa::PendingRequest {
    match Responder::new(config).on_bytes(request).unwrap() {
        RespStep::Request(pending) => pending,
        RespStep::NeedMore => panic!("need more"),
    }
}

fn accepted(config: Config, reply: &[u8]) -> Result<Params, StartError> {
    let (initiator, _) = Initiator::new(config, b"").unwrap();
    match initiator.on_bytes(reply)? {
        InitStep::Accepted {
            params, consumed, ..
        } => {
            assert_eq!(consumed, reply.len());
            Ok(params)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn revision_one_start_up() {
    let (initiator, request) = Initiator::new(
        Config {
            crc: true,
            recv_markers: true,
            ..ONE
        },
        b"hi",
    )
    .unwrap();
    assert_eq!(request, frame("Req", "c0 01 0002 6869"));

    let pending = pending(ONE, &request);
    assert_eq!(
        (
            pending.private_data(),
            pending.enhanced(),
            pending.consumed()
        ),
        (&b"hi"[..], None, 22)
    );
    let (theirs, reply) = pending.accept(b"yes", 8, 9).unwrap();
    // C is set in the reply because the request has it; markers are each side's own.
    assert_eq!(reply, frame("Rep", "40 01 0003 796573"));
    let expected = Params {
        crc: true,
        tx_markers: true,
        rx_markers: false,
        ird: 8,
        ord: 9,
        revision: 1,
        rtr: None,
        must_wait_for_first_fpdu: true,
    };
    assert_eq!(theirs, expected);

    let ours = Params {
        tx_markers: false,
        rx_markers: true,
        ird: 5,
        ord: 6,
        must_wait_for_first_fpdu: false,
        ..expected
    };
    let step = initiator.on_bytes(&reply).unwrap();
    assert_eq!(
        step,
        InitStep::Accepted {
            params: ours,
            private_data: b"yes".to_vec(),
            consumed: 23
        }
    );
}

#[test]
fn enhanced_start_up_limits_the_depths() {
    let (initiator, request) = Initiator::new(TWO, b"").unwrap();
    assert_eq!(request, frame("Req", "10 02 0004 0005 0006"));

    // The initiator has ORD 6: an IRD of 16 is cut to what it needs. Its IRD is 5: an ORD of 7 is cut to it.
    let (theirs, reply) = pending(TWO, &request).accept(b"", 16, 7).unwrap();
    assert_eq!(reply, frame("Rep", "10 02 0004 0006 0005"));
    assert_eq!((theirs.ird, theirs.ord, theirs.revision), (6, 5, 2));

    // The responder has less: the initiator cuts its ORD.
    let (theirs, reply) = pending(TWO, &request).accept(b"", 2, 1).unwrap();
    assert_eq!(reply, frame("Rep", "10 02 0004 0002 0001"));
    assert_eq!((theirs.ird, theirs.ord), (2, 1));
    let InitStep::Accepted { params, .. } = initiator.on_bytes(&reply).unwrap() else {
        panic!()
    };
    assert_eq!(
        (
            params.ird,
            params.ord,
            params.rtr,
            params.must_wait_for_first_fpdu
        ),
        (5, 2, None, false)
    );
}

#[test]
fn all_ones_leaves_the_depths_to_the_users() {
    let request = frame("Req", "10 02 0004 3fff 3fff");
    let (theirs, reply) = pending(TWO, &request).accept(b"", 16, 7).unwrap();
    assert_eq!(reply, frame("Rep", "10 02 0004 3fff 3fff"));
    assert_eq!((theirs.ird, theirs.ord), (16, 7));
    let params = accepted(TWO, &reply).unwrap();
    assert_eq!((params.ird, params.ord), (5, 6));
    // Nobody asks for it by accident.
    let huge = Config {
        ird: 0x4001,
        ord: 0xffff,
        ..TWO
    };
    assert_eq!(
        Initiator::new(huge, b"").unwrap().1,
        frame("Req", "10 02 0004 3ffe 3ffe")
    );
    let request = frame("Req", "10 02 0004 3ffe 3ffe");
    let (_, reply) = pending(TWO, &request).accept(b"", 0xffff, 0x3fff).unwrap();
    assert_eq!(reply, frame("Rep", "10 02 0004 3ffe 3ffe"));
}

#[test]
fn a_responder_that_wants_more_than_our_ird_is_refused() {
    let error = accepted(TWO, &frame("Rep", "10 02 0004 0006 0006")).unwrap_err();
    assert_eq!(
        error,
        StartError::InsufficientIrd {
            peer_ord: 6,
            ird: 5
        }
    );
    assert_eq!(
        error.term_error(),
        Some(TermError::Mpa(MpaError::InsufficientIrd))
    );
}

#[test]
fn peer_to_peer_picks_one_message() {
    let ours = Config {
        peer_to_peer: Some(ALL),
        ..TWO
    };
    let (_, request) = Initiator::new(ours, b"").unwrap();
    assert_eq!(request, frame("Req", "10 02 0004 c005 c006"));
    for (known, rtr, reply) in [
        (ALL, Rtr::Write, "10 02 0004 8006 8005"),
        (
            RtrSet {
                write: false,
                ..ALL
            },
            Rtr::Read,
            "10 02 0004 8006 4005",
        ),
        (
            RtrSet {
                send: true,
                ..RtrSet::default()
            },
            Rtr::Send,
            "10 02 0004 c006 0005",
        ),
    ] {
        let theirs = Config {
            peer_to_peer: Some(known),
            ..TWO
        };
        let (params, bytes) = pending(theirs, &request).accept(b"", 9, 9).unwrap();
        assert_eq!(bytes, frame("Rep", reply));
        assert_eq!(params.rtr, Some(rtr));
        assert!(params.must_wait_for_first_fpdu);
        assert_eq!(accepted(ours, &bytes).unwrap().rtr, Some(rtr));
    }
    // A ready-to-receive Read needs room for one Read on both sides, even where users want none.
    let read = RtrSet {
        read: true,
        ..RtrSet::default()
    };
    let none = Config {
        peer_to_peer: Some(read),
        ird: 0,
        ord: 0,
        ..TWO
    };
    let (_, request) = Initiator::new(none, b"").unwrap();
    let (theirs, reply) = pending(none, &request).accept(b"", 0, 0).unwrap();
    assert_eq!((theirs.ird, accepted(none, &reply).unwrap().ord), (1, 1));
}

#[test]
fn peer_to_peer_without_agreement() {
    let write = RtrSet {
        write: true,
        ..RtrSet::default()
    };
    let read = RtrSet {
        read: true,
        ..RtrSet::default()
    };
    let ours = Config {
        peer_to_peer: Some(write),
        ..TWO
    };
    let (_, request) = Initiator::new(ours, b"").unwrap();
    let theirs = Config {
        peer_to_peer: Some(read),
        ..TWO
    };
    assert_eq!(
        pending(theirs, &request).accept(b"", 9, 9),
        Err(AcceptError::NoMatchingRtr)
    );
    // A responder that does not do peer-to-peer says so with A clear.
    let (params, reply) = pending(TWO, &request).accept(b"", 9, 9).unwrap();
    assert_eq!(params.rtr, None);
    assert_eq!(reply, frame("Rep", "10 02 0004 0006 0005"));
    for reply in [
        reply,
        frame("Rep", "10 02 0004 8006 4005"),
        frame("Rep", "10 02 0004 8006 0005"),
    ] {
        let error = accepted(ours, &reply).unwrap_err();
        assert_eq!(error, StartError::NoMatchingRtr);
        assert_eq!(
            error.term_error(),
            Some(TermError::Mpa(MpaError::NoMatchingRtr))
        );
    }
}

#[test]
fn revisions_meet() {
    // Revision 2 asks, revision 1 answers: the users' depths hold.
    let (_, request) = Initiator::new(TWO, b"x").unwrap();
    let pending_one = pending(ONE, &request);
    assert_eq!(
        (pending_one.private_data(), pending_one.enhanced()),
        (&b"x"[..], None)
    );
    let (theirs, reply) = pending_one.accept(b"", 8, 9).unwrap();
    assert_eq!(reply, frame("Rep", "00 01 0000"));
    assert_eq!((theirs.ird, theirs.ord, theirs.revision), (8, 9, 1));
    let params = accepted(TWO, &reply).unwrap();
    assert_eq!((params.ird, params.ord, params.revision), (5, 6, 1));
    // Revision 1 asks: the answer is revision 1 whatever we know.
    let (_, request) = Initiator::new(ONE, b"").unwrap();
    assert_eq!(
        pending(TWO, &request).accept(b"", 8, 9).unwrap().1,
        frame("Rep", "00 01 0000")
    );
    // Revision 2 that is not enhanced is answered in kind.
    let request = frame("Req", "00 02 0000");
    assert_eq!(
        pending(TWO, &request).accept(b"", 8, 9).unwrap().1,
        frame("Rep", "00 02 0000")
    );
    // Answers that do not fit.
    assert_eq!(
        accepted(ONE, &frame("Rep", "00 02 0000")),
        Err(StartError::BadReply)
    );
    assert_eq!(
        accepted(TWO, &frame("Rep", "00 02 0000")),
        Err(StartError::BadReply)
    );
    assert_eq!(
        StartError::BadReply.term_error(),
        Some(TermError::Mpa(MpaError::InvalidFrame))
    );
}

#[test]
fn a_reject_carries_private_data() {
    let (initiator, request) = Initiator::new(TWO, b"").unwrap();
    let reply = pending(TWO, &request).reject(b"no").unwrap();
    assert_eq!(reply, frame("Rep", "30 02 0006 0000 0000 6e6f"));
    let step = initiator.on_bytes(&reply).unwrap();
    assert_eq!(
        step,
        InitStep::Rejected {
            private_data: b"no".to_vec(),
            consumed: 26
        }
    );
    let (_, request) = Initiator::new(ONE, b"").unwrap();
    assert_eq!(
        pending(ONE, &request).reject(b"").unwrap(),
        frame("Rep", "20 01 0000")
    );
}

#[test]
fn crc_is_on_if_either_side_asks() {
    for (ours, theirs) in [(false, false), (false, true), (true, false), (true, true)] {
        let ours = Config { crc: ours, ..TWO };
        let theirs = Config { crc: theirs, ..TWO };
        let (_, request) = Initiator::new(ours, b"").unwrap();
        let (params, reply) = pending(theirs, &request).accept(b"", 1, 1).unwrap();
        assert_eq!(params.crc, ours.crc || theirs.crc);
        assert_eq!(reply[16] & 0x40 != 0, params.crc);
        assert_eq!(accepted(ours, &reply).unwrap().crc, params.crc);
    }
    // Even if a responder forgets to say so.
    assert!(
        accepted(Config { crc: true, ..ONE }, &frame("Rep", "00 01 0000"))
            .unwrap()
            .crc
    );
}

#[test]
fn frames_come_in_pieces_and_with_more_behind() {
    let (initiator, mut request) = Initiator::new(TWO, &[7; 508]).unwrap();
    assert_eq!(request.len(), MAX_FRAME);
    let responder = Responder::new(TWO);
    for have in 0..request.len() {
        assert_eq!(
            responder.on_bytes(&request[..have]),
            Ok(RespStep::NeedMore),
            "{have}"
        );
    }
    request.extend_from_slice(b"an early FPDU");
    let pending = pending(TWO, &request);
    assert_eq!(
        (pending.consumed(), pending.max_private_data()),
        (MAX_FRAME, 508)
    );
    let (_, mut reply) = pending.accept(&[8; 508], 1, 1).unwrap();
    for have in 0..reply.len() {
        assert_eq!(
            initiator.on_bytes(&reply[..have]),
            Ok(InitStep::NeedMore),
            "{have}"
        );
    }
    reply.extend_from_slice(&[0; 100]);
    let step = initiator.on_bytes(&reply).unwrap();
    assert!(
        matches!(
            step,
            InitStep::Accepted {
                consumed: MAX_FRAME,
                ..
            }
        ),
        "{step:?}"
    );
}

#[test]
fn private_data_has_a_limit() {
    assert!(Initiator::new(ONE, &[0; 512]).is_ok());
    assert_eq!(
        Initiator::new(ONE, &[0; 513]).unwrap_err(),
        TooLong { len: 513, max: 512 }
    );
    assert_eq!(
        Initiator::new(TWO, &[0; 509]).unwrap_err(),
        TooLong { len: 509, max: 508 }
    );
    let (_, request) = Initiator::new(TWO, b"").unwrap();
    let too_long = TooLong { len: 509, max: 508 };
    assert_eq!(
        pending(TWO, &request).accept(&[0; 509], 1, 1),
        Err(too_long.into())
    );
    assert_eq!(pending(TWO, &request).reject(&[0; 509]), Err(too_long));
}

#[test]
fn other_protocols_are_found_out() {
    let responder = Responder::new(TWO);
    let key: StartError = FrameError::Key.into();
    assert_eq!(responder.on_bytes(b"G"), Err(key));
    assert_eq!(responder.on_bytes(b"MPA ID Rep"), Err(key));
    assert_eq!(key.term_error(), None);
    let (initiator, request) = Initiator::new(TWO, b"").unwrap();
    assert_eq!(initiator.on_bytes(b"SSH-2.0"), Err(key));
    assert_eq!(
        initiator.on_bytes(&request),
        Err(key),
        "a peer that also initiates"
    );
    for (rest, error) in [
        ("00 03 0000", FrameError::Revision(3)),
        ("00 01 0201", FrameError::PrivateDataTooLong(513)),
        ("10 02 0003 000000", FrameError::EnhancedTooShort),
    ] {
        assert_eq!(responder.on_bytes(&frame("Req", rest)), Err(error.into()));
        assert_eq!(initiator.on_bytes(&frame("Rep", rest)), Err(error.into()));
        assert_eq!(
            StartError::from(error).term_error(),
            Some(TermError::Mpa(MpaError::InvalidFrame))
        );
    }
}
