//! When a requester asks for acknowledgements, and what their absence and a receiver without a receive cost it.

use std::time::Duration;

use weft_proto::dgram::Now;
use weft_proto::rdmap::{Op, SendWr};
use weft_proto::roce::{Config, Connection, State, Status};
use weft_wire::roce::{Op as Wire, Syndrome};

use super::roce_rules::{
    ACK, CONFIG, LOST, READ, SEND, T0, TICK, answer, answers, connection, dones, packets, post,
    psns, request,
};

fn post_unsignaled(conn: &mut Connection, op: Op, len: u32) {
    let fence = false;
    conn.post_unsignaled(SendWr { op, len, fence }, ());
}

/// A connection whose round trip is known, and the time then.
fn connection_that_has_measured(config: Config) -> (Connection, Now) {
    let mut conn = Connection::new(config);
    post(&mut conn, SEND, 1);
    packets(&mut conn, T0);
    let now = T0 + Duration::from_micros(10);
    conn.rx(now, &answer(ACK, config.sq_psn), 0);
    assert_eq!(dones(&mut conn), [Status::Ok { byte_len: 1 }]);
    (conn, now)
}

/// Each sixteenth packet asks for the messages whose completions nobody waits for, and else a question does, once nothing more has been sent for a while.
#[test]
fn unsignaled_messages_share_an_acknowledgement() {
    let (mut conn, mut now) = connection_that_has_measured(Config {
        sq_psn: 1,
        ..CONFIG
    });
    let step = Duration::from_millis(3);
    let mut asked = Vec::new();
    for _ in 0..30 {
        now += step;
        // Where nothing is awaited, the time of the question begins with each message.
        conn.expired(now);
        post_unsignaled(&mut conn, SEND, 8);
        let sent = packets(&mut conn, now);
        assert_eq!(sent.len(), 1);
        let header = &sent[0].0;
        if header.ack_request {
            asked.push(header.psn);
            conn.rx(now, &answer(ACK, header.psn), 0);
        }
    }
    assert_eq!(asked, [16]);
    assert_eq!(dones(&mut conn).len(), 15);
    let deadline = conn.deadline().expect("the question");
    assert!(deadline > now && deadline < now + Duration::from_millis(20));
    conn.expired(deadline);
    let sent = packets(&mut conn, deadline);
    assert_eq!(sent.len(), 1);
    assert_eq!((sent[0].0.psn, sent[0].0.ack_request), (31, true));
    conn.rx(deadline, &answer(ACK, 31), 0);
    assert_eq!(dones(&mut conn).len(), 15);
    assert_eq!(conn.deadline(), None);
}

/// The answer to a question that was asked before the peer said that it has no receive: what it names is sent again after the wait anyway.
#[test]
fn a_wait_for_a_receive_costs_no_try() {
    let mut conn = Connection::new(Config {
        retry_count: 1,
        rnr_retry: 7,
        ..CONFIG
    });
    post(&mut conn, SEND, 8);
    post(&mut conn, SEND, 8);
    let mut now = T0;
    for _ in 0..10 {
        assert_eq!(psns(&mut conn, now), [0xff_fffe, 0xff_ffff]);
        conn.rx(now, &answer(Syndrome::RnrNak(12), 0xff_fffe), 0);
        conn.rx(now, &answer(LOST, 0xff_fffe), 0);
        assert_eq!(psns(&mut conn, now), []);
        now = conn.deadline().expect("the end of the wait");
    }
    assert_eq!(conn.state(), State::Open);
}

/// What a question brings to light costs no try, once: a peer that loses packets for a while would be given up within some questions.
#[test]
fn the_answer_to_a_question_costs_no_try() {
    let (mut conn, mut now) = connection_that_has_measured(Config {
        retry_count: 0,
        sq_psn: 1,
        ..CONFIG
    });
    post(&mut conn, SEND, 8);
    post(&mut conn, SEND, 8);
    assert_eq!(psns(&mut conn, now), [2, 3]);
    let mut wait = Duration::ZERO;
    for _ in 0..3 {
        let question = conn.deadline().expect("the question");
        assert!(question > now + wait, "each later than the one before");
        (wait, now) = (question.saturating_sub(now), question);
        conn.expired(now);
        assert_eq!(psns(&mut conn, now), [3]);
        conn.rx(now, &answer(LOST, 2), 0);
        assert_eq!(psns(&mut conn, now), [2, 3]);
    }
    assert_eq!(conn.state(), State::Open);
    conn.rx(now, &answer(LOST, 2), 0);
    assert_eq!(conn.state(), State::Failed);
}

/// A peer that says that it has no receive is there: what was lost before, or came late, is not counted against it.
#[test]
fn a_peer_without_a_receive_answers() {
    let mut conn = Connection::new(Config {
        retry_count: 1,
        rnr_retry: 7,
        ..CONFIG
    });
    post(&mut conn, SEND, 8);
    let mut now = T0;
    for _ in 0..10 {
        assert_eq!(psns(&mut conn, now), [0xff_fffe]);
        // The question, and at last the timer.
        now += Duration::from_nanos(4096 << 14);
        conn.expired(now);
        assert_eq!(psns(&mut conn, now), [0xff_fffe]);
        conn.rx(now, &answer(Syndrome::RnrNak(12), 0xff_fffe), 0);
        now = conn.deadline().expect("the end of the wait");
    }
    assert_eq!(conn.state(), State::Open);
}

/// A message that is waited for asks for those before it, and its time begins with it.
#[test]
fn a_signaled_message_asks_for_those_before_it() {
    let (mut conn, now) = connection_that_has_measured(CONFIG);
    post_unsignaled(&mut conn, SEND, 8);
    assert!(!packets(&mut conn, now)[0].0.ack_request);
    let later = conn.deadline().unwrap().saturating_sub(TICK);
    post(&mut conn, SEND, 8);
    let sent = packets(&mut conn, later);
    assert!(sent[0].0.ack_request);
    assert!(conn.deadline().unwrap() > later + Duration::from_millis(3));
    conn.rx(later, &answer(ACK, sent[0].0.psn), 0);
    assert_eq!(dones(&mut conn).len(), 2);
}

/// Without a question that costs no retry, and for what is sent again or brings an answer, nothing is put off.
#[test]
fn who_cannot_ask_later_asks_at_once() {
    let asks = |conn: &mut Connection, now| {
        let sent = packets(conn, now);
        sent.last().expect("a packet").0.ack_request
    };
    let mut unmeasured = connection();
    post_unsignaled(&mut unmeasured, SEND, 8);
    assert!(asks(&mut unmeasured, T0));
    // Without an end, and over before the question.
    for timeout in [0, 5] {
        let config = Config { timeout, ..CONFIG };
        let (mut conn, now) = connection_that_has_measured(config);
        post_unsignaled(&mut conn, SEND, 8);
        assert!(asks(&mut conn, now), "timeout {timeout}");
    }
    let (mut conn, now) = connection_that_has_measured(CONFIG);
    post_unsignaled(&mut conn, READ, 8);
    assert!(asks(&mut conn, now));
    let config = Config {
        sq_psn: 1,
        ..CONFIG
    };
    let (mut conn, now) = connection_that_has_measured(config);
    post_unsignaled(&mut conn, SEND, 8);
    post_unsignaled(&mut conn, SEND, 8);
    assert!(!asks(&mut conn, now));
    conn.rx(now, &answer(LOST, 2), 0);
    assert!(asks(&mut conn, now));
}

/// Who receives what it is not asked about says so before the end, once.
#[test]
fn the_end_acknowledges_what_nobody_asked_about() {
    let mut conn = connection();
    let send = |psn| (request(Wire::SendOnly, psn), 8);
    assert_eq!(answers(&mut conn, &[send(100), send(101)]), []);
    conn.acknowledge_unasked();
    assert_eq!(answers(&mut conn, &[]), [(101, Some(ACK))]);
    conn.acknowledge_unasked();
    assert_eq!(answers(&mut conn, &[]), []);
}
