//! The responder: memory that goes, refusals after a placement, and numbers that wrap.

use weft_proto::roce::{Config, Connection, Rx, State};
use weft_wire::roce::{AtomicEth, Header, NakCode, Op as Wire, Opcode, Syndrome};

use super::roce_rules::{ACK, CONFIG, T0, answers, connection, packets, read, request};

const FIRST: u32 = CONFIG.rq_psn;

/// A Send that asks for an acknowledgement.
fn asks(psn: u32) -> Header {
    Header {
        ack_request: true,
        ..request(Wire::SendOnly, psn)
    }
}

/// The packets that go now: their numbers, and what they say.
fn sent(conn: &mut Connection) -> Vec<(u32, Option<Syndrome>)> {
    let said = |(header, _): &(Header, _)| (header.psn, header.aeth.map(|aeth| aeth.syndrome));
    packets(conn, T0).iter().map(said).collect()
}

/// Everything that goes now; the last packet.
fn drain(conn: &mut Connection) -> Option<Vec<u8>> {
    let (mut last, mut raw) = (None, Vec::new());
    // Long answers are interrupted once in a while.
    for _ in 0..2 {
        while conn.next_tx(T0, &mut raw).is_some() {
            last = Some(std::mem::take(&mut raw));
        }
    }
    last
}

#[test]
#[cfg_attr(miri, ignore = "sixteen million packets")]
fn a_repeated_atomic_is_not_a_read_of_the_turn_before() {
    let mut conn = Connection::new(Config {
        ord: 16,
        ird: 16,
        ..CONFIG
    });
    // Four Reads of 2^22 packets use all 2^24 numbers once.
    for turn in 0..4 {
        let read = read(FIRST + (turn << 22), 0, 1 << 30);
        assert!(matches!(conn.rx(T0, &read, 0), Rx::ReadRequested { .. }));
        conn.accept_read();
        while drain(&mut conn).is_some() {}
    }
    let atomic = Header {
        atomic: Some(AtomicEth {
            va: 8,
            rkey: 7,
            swap_add: 1,
            compare: 0,
        }),
        ..Header::new(Opcode::rc(Wire::FetchAdd), 5, FIRST)
    };
    assert!(matches!(
        conn.rx(T0, &atomic, 0),
        Rx::AtomicRequested { .. }
    ));
    conn.atomic_done(41);
    let first = drain(&mut conn).expect("an answer");
    // The answer was lost, and the request comes again.
    assert!(matches!(conn.rx(T0, &atomic, 0), Rx::Nothing));
    assert_eq!(drain(&mut conn), Some(first));
}

#[test]
fn a_message_that_is_refused_after_its_placement_is_not_acknowledged() {
    let mut conn = connection();
    let send = Header {
        ack_request: true,
        invalidate: Some(3),
        ..request(Wire::SendOnlyInvalidate, 100)
    };
    conn.rx(T0, &send, 1);
    assert!(conn.rx_placed().is_some());
    conn.refuse(NakCode::RemoteAccess);
    let nak = Syndrome::Nak(NakCode::RemoteAccess);
    assert_eq!(sent(&mut conn), [(99, Some(ACK)), (100, Some(nak))]);
}

#[test]
fn memory_that_has_gone_under_a_repeated_answer_ends_no_connection() {
    let mut conn = connection();
    let read = read(100, 0, 600);
    assert_eq!(answers(&mut conn, &[(read, 0)]).len(), 3);
    // The peer has the answer, and its repeated requests were late; or it has not, and fails.
    for _ in 0..3 {
        conn.rx(T0, &read, 0);
        conn.next_tx(T0, &mut Vec::new()).expect("the answer again");
        conn.source_gone();
        let nak = Syndrome::Nak(NakCode::RemoteAccess);
        assert_eq!(sent(&mut conn), [(100, Some(nak))]);
        assert_eq!(conn.state(), State::Open);
    }
}

/// As on a busy machine, where the peer asks again while the answer is being sent.
#[test]
fn memory_that_goes_under_an_answer_that_was_never_whole_ends_the_connection() {
    for again in [read(100, 0, 600), read(101, 256, 344)] {
        let mut conn = connection();
        conn.rx(T0, &read(100, 0, 600), 0);
        conn.accept_read();
        let mut raw = Vec::new();
        conn.next_tx(T0, &mut raw).expect("the first packet");
        conn.next_tx(T0, &mut raw).expect("the second one");
        assert_eq!(conn.rx(T0, &again, 0), Rx::Nothing);
        conn.next_tx(T0, &mut raw).expect("a packet again");
        conn.source_gone();
        let nak = Syndrome::Nak(NakCode::RemoteAccess);
        assert_eq!(sent(&mut conn), [(again.psn, Some(nak))]);
        assert_eq!(conn.state(), State::Failed);
    }
}

#[test]
fn memory_that_goes_before_a_later_refusal_is_told_of_instead() {
    let mut conn = connection();
    conn.rx(T0, &read(100, 0, 600), 0);
    conn.accept_read();
    let invalid = Header {
        reth: None,
        ..request(Wire::SendMiddle, 103)
    };
    assert_eq!(conn.rx(T0, &invalid, 256), Rx::Nothing);
    assert_eq!(conn.state(), State::Failed);
    conn.next_tx(T0, &mut Vec::new()).expect("the answer");
    conn.source_gone();
    let nak = Syndrome::Nak(NakCode::RemoteAccess);
    assert_eq!(sent(&mut conn), [(100, Some(nak))]);
}

#[test]
fn a_peer_that_asks_again_is_told_again_what_is_missing() {
    let mut conn = connection();
    let nak = [(100, Some(Syndrome::Nak(NakCode::SequenceError)))];
    // The first is lost. The others are the heels of it.
    assert_eq!(answers(&mut conn, &[(asks(101), 0)]), nak);
    assert_eq!(answers(&mut conn, &[(asks(102), 0), (asks(103), 0)]), []);
    // One that was overtaken is no question.
    assert_eq!(answers(&mut conn, &[(asks(102), 0)]), []);
    // What was said is lost, and the peer repeats the packet that it sent last.
    assert_eq!(answers(&mut conn, &[(asks(103), 0)]), nak);
    let all = [
        (asks(100), 0),
        (asks(101), 0),
        (asks(102), 0),
        (asks(103), 0),
    ];
    assert_eq!(answers(&mut conn, &all).last(), Some(&(103, Some(ACK))));
    assert_eq!(answers(&mut conn, &[(asks(105), 0)]).len(), 1);
}

#[test]
fn what_follows_a_message_without_a_receive_is_no_question() {
    let mut conn = connection();
    for _ in 0..3 {
        // Sent again, as the peer is told; and again there is no receive.
        conn.rx(T0, &asks(100), 0);
        conn.not_ready();
        conn.rx(T0, &asks(101), 0);
        assert!(matches!(
            sent(&mut conn)[..],
            [(_, Some(Syndrome::RnrNak(_)))]
        ));
    }
}

/// A question that came before what was said had gone: the peer is to wait, and not to send again at once, which costs it one of its tries.
#[test]
fn a_question_does_not_take_back_that_there_is_no_receive() {
    let mut conn = connection();
    conn.rx(T0, &asks(100), 0);
    conn.not_ready();
    conn.rx(T0, &asks(101), 0);
    conn.rx(T0, &asks(101), 0);
    assert_eq!(sent(&mut conn), [(100, Some(Syndrome::RnrNak(12)))]);
}
