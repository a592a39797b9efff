//! Connections of the connection manager are made and ended whatever the network loses, doubles or delays.

use std::collections::BTreeMap;
use std::time::Duration;

use weft_proto::dgram::Now;
use weft_proto::roce::cm::{Event, Exchange, LEAST_WAIT, MOST_DELAY, MOST_WAIT, Phase, timeout};
use weft_wire::roce::cm::{
    About, MAD_LEN, Mad, Message, PortSpace, Rej, Rep, Req, Rtu, reason, service_id,
};

const T0: Now = Now::from_secs(1);
/// 4.2 ms.
const POWER: u8 = 10;

const REQ: Req<'static> = Req {
    local_id: 5,
    service_id: service_id(PortSpace::Tcp, 7),
    ca_guid: 1,
    qp: 0x11,
    responder_resources: 2,
    initiator_depth: 3,
    remote_timeout: POWER,
    local_timeout: POWER,
    service: 0,
    psn: 77,
    retry_count: 7,
    rnr_retry: 7,
    pkey: 0xffff,
    mtu: 3,
    max_cm_retries: 15,
    srq: false,
    local_gid: [1; 16],
    remote_gid: [2; 16],
    ack_timeout: 14,
    private_data: b"hello",
};
const REP: Rep<'static> = Rep {
    local_id: 0,
    remote_id: 0,
    qp: 0x22,
    psn: 88,
    responder_resources: 3,
    initiator_depth: 2,
    ack_delay: 14,
    rnr_retry: 6,
    srq: false,
    ca_guid: 2,
    private_data: b"welcome",
};

/// The message that goes next.
fn next(exchange: &mut Exchange) -> [u8; MAD_LEN] {
    *exchange.take().expect("a message")
}

fn give(exchange: &mut Exchange, now: Now, raw: &[u8]) -> Option<Event> {
    exchange.on(now, &Mad::parse(raw).expect("a message"))
}

fn responder(raw: &[u8]) -> Exchange {
    let mad = Mad::parse(raw).expect("a message");
    let Message::Req(req) = mad.message else {
        panic!("{mad:?}");
    };
    Exchange::requested(mad.transaction, 6, &req)
}

/// Both sides, connected.
fn pair() -> (Exchange, Exchange) {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.accept(T0, &REP);
    let rep = next(&mut b);
    assert!(matches!(give(&mut a, T0, &rep), Some(Event::Replied(_))));
    a.ready(b"");
    assert_eq!(give(&mut b, T0, &next(&mut a)), Some(Event::Ready));
    assert_eq!((a.ids(), b.ids()), ((5, 6), (6, 5)));
    (a, b)
}

#[test]
fn an_answer_brings_what_the_queue_pair_needs() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.accept(T0, &REP);
    let Some(Event::Replied(reply)) = give(&mut a, T0, &next(&mut b)) else {
        panic!("{a:?}");
    };
    assert_eq!((reply.qp, reply.psn, reply.rnr_retry), (0x22, 88, 6));
    assert_eq!((reply.responder_resources, reply.initiator_depth), (3, 2));
    assert_eq!(reply.private_data[..7], *b"welcome");
    assert_eq!(a.deadline(), None, "the program decides");
}

#[test]
fn nobody_answers() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut sent = 0;
    let (now, event) = loop {
        sent += std::iter::from_fn(|| a.take()).count();
        let now = a.deadline().expect("a time");
        if let Some(event) = a.expired(now) {
            break (now, event);
        }
    };
    assert_eq!((event, sent, a.phase()), (Event::TimedOut, 16, Phase::Over));
    assert_eq!(now, T0 + timeout(POWER) * 16);
    let raw = next(&mut a);
    let about = Mad::parse(&raw).unwrap().message;
    assert!(
        matches!(about, Message::Rej(rej) if rej.reason == reason::TIMEOUT && rej.ari == [0, 0, 0, 0, 0, 0, 0, 1])
    );
}

#[test]
fn a_peer_that_needs_time_is_given_it() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.delay(20);
    assert_eq!(give(&mut a, T0, &next(&mut b)), None);
    assert_eq!(a.deadline(), Some(T0 + timeout(POWER) + timeout(20)));
}

#[test]
fn both_sides_can_refuse() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.reject(reason::CONSUMER, b"no");
    assert_eq!(b.phase(), Phase::Over);
    let Some(Event::Rejected {
        reason: why,
        private_data,
    }) = give(&mut a, T0, &next(&mut b))
    else {
        panic!("{a:?}");
    };
    assert_eq!((why, &private_data[..2]), (reason::CONSUMER, &b"no"[..]));

    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.accept(T0, &REP);
    give(&mut a, T0, &next(&mut b));
    a.reject(reason::CONSUMER, b"");
    let refusal = give(&mut b, T0, &next(&mut a));
    assert!(matches!(refusal, Some(Event::Rejected { .. })));
    assert_eq!((a.phase(), b.phase()), (Phase::Over, Phase::Over));
}

#[test]
fn messages_of_another_connection_change_nothing() {
    let (mut a, mut b) = pair();
    let (mut c, _) = pair();
    c.disconnect(T0, 20, REP.qp);
    let mut dreq = next(&mut c);
    // The sender's number.
    dreq[24 + 3] = 99;
    assert_eq!(give(&mut a, T0, &dreq), None);
    assert_eq!(give(&mut b, T0, &dreq), None);
    assert_eq!((a.phase(), b.phase()), (Phase::Ready, Phase::Ready));
}

#[test]
fn data_says_that_the_answer_has_come() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.accept(T0, &REP);
    assert_eq!(b.heard(), Some(Event::Ready));
    assert_eq!(b.heard(), None);
    assert_eq!(b.deadline(), None);
}

#[test]
fn an_end_is_confirmed_again_to_who_did_not_hear_it() {
    let (mut a, mut b) = pair();
    a.disconnect(T0, 20, REP.qp);
    let dreq = next(&mut a);
    assert_eq!(give(&mut b, T0, &dreq), Some(Event::Disconnected));
    let lost = next(&mut b);
    assert_eq!(give(&mut b, T0, &dreq), None);
    assert_eq!(next(&mut b), lost);
    assert_eq!(give(&mut a, T0, &lost), Some(Event::Disconnected));
    assert_eq!(a.deadline(), None);
}

/// The two sides over a network that loses a third of the messages and doubles a third of the rest.
#[test]
fn a_bad_network_delays_and_no_more() {
    for seed in 1..500u64 {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut random = move |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        let mut now = T0;
        let mut sides = [Some(Exchange::request(now, 9, &REQ)), None];
        let mut on_way: BTreeMap<(Now, u32), (usize, [u8; MAD_LEN])> = BTreeMap::new();
        let mut count = 0;
        let mut seen = [Vec::new(), Vec::new()];
        let mut ended = false;
        loop {
            for (from, side) in sides.iter_mut().enumerate() {
                while let Some(raw) = side.as_mut().and_then(Exchange::take) {
                    for _ in 0..[0, 1, 2][random(3) as usize] {
                        count += 1;
                        let at = now + Duration::from_micros(random(6000));
                        on_way.insert((at, count), (1 - from, *raw));
                    }
                }
            }
            let ready = |side: &Option<Exchange>| {
                side.as_ref()
                    .is_some_and(|side| side.phase() == Phase::Ready)
            };
            if !ended && sides.iter().all(ready) && random(2) == 0 {
                ended = true;
                let who = random(2) as usize;
                let peers = [REP.qp, REQ.qp][who];
                let side = sides[who].as_mut().unwrap();
                side.disconnect(now, 30, peers);
                continue;
            }
            let deadlines = sides.iter().flatten().filter_map(Exchange::deadline);
            let arrival = on_way.first_key_value().map(|((at, _), _)| *at);
            let Some(at) = deadlines.chain(arrival).min() else {
                break;
            };
            now = now.max(at);
            if arrival != Some(at) {
                for (side, seen) in sides.iter_mut().zip(&mut seen) {
                    seen.extend(side.as_mut().and_then(|side| side.expired(now)));
                }
                continue;
            }
            let (_, (to, raw)) = on_way.pop_first().unwrap();
            let Some(side) = &mut sides[to] else {
                let mut side = responder(&raw);
                side.accept(now, &REP);
                sides[to] = Some(side);
                continue;
            };
            let event = give(side, now, &raw);
            if matches!(event, Some(Event::Replied(_))) {
                side.ready(b"");
            }
            seen[to].extend(event);
        }
        let [Some(a), Some(b)] = &sides else {
            panic!("seed {seed}: nothing came");
        };
        // Sixteen tries that all fail are less than one in a million.
        let phases = (a.phase(), b.phase());
        let both = (Phase::Ready, Phase::Ready);
        assert!(
            phases == both || phases == (Phase::Over, Phase::Over),
            "seed {seed}: {phases:?}"
        );
        assert_eq!(phases == both, !ended, "seed {seed}");
        let ends = |seen: &[Event]| seen.iter().filter(|e| **e == Event::Disconnected).count();
        assert!(
            seen.iter().all(|seen| ends(seen) == usize::from(ended)),
            "seed {seed}: {seen:?}"
        );
    }
}

#[test]
fn an_end_is_told_in_every_phase_that_has_a_peer() {
    // The peer accepts, and ends the connection before our program says that it is ready.
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.accept(T0, &REP);
    give(&mut a, T0, &next(&mut b));
    b.disconnect(T0, 20, REQ.qp);
    assert_eq!(give(&mut a, T0, &next(&mut b)), Some(Event::Disconnected));
    assert_eq!(a.phase(), Phase::Over);
}

#[test]
fn an_end_for_another_queue_pair_or_from_nobody_is_not_believed() {
    let (mut a, mut b) = pair();
    a.disconnect(T0, 20, REP.qp + 1);
    assert_eq!(give(&mut b, T0, &next(&mut a)), None);
    assert_eq!(b.phase(), Phase::Ready);
    let (mut c, _) = pair();
    c.disconnect(T0, 20, REQ.qp);
    let mut forged = next(&mut c);
    forged[24..28].fill(0);
    let mut waiting = Exchange::request(T0, 9, &REQ);
    assert_eq!(give(&mut waiting, T0, &forged), None);
    assert_eq!(waiting.phase(), Phase::ReqSent);
}

#[test]
fn each_message_has_all_its_tries() {
    let mut a = Exchange::request(T0, 9, &REQ);
    for _ in 0..15 {
        let due = a.deadline().unwrap();
        assert_eq!(a.expired(due), None);
    }
    let raws: Vec<_> = std::iter::from_fn(|| a.take()).collect();
    let mut b = responder(&raws[0][..]);
    b.accept(T0, &REP);
    give(&mut a, T0, &next(&mut b));
    a.ready(b"");
    next(&mut a);
    a.disconnect(T0, 20, REP.qp);
    for _ in 0..15 {
        let due = a.deadline().unwrap();
        assert_eq!(a.expired(due), None);
    }
    let due = a.deadline().unwrap();
    assert_eq!(a.expired(due), Some(Event::Disconnected));
}

#[test]
fn a_refusal_is_told_again() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let req = next(&mut a);
    let mut b = responder(&req);
    b.reject(reason::CONSUMER, b"no");
    let rej = next(&mut b);
    assert_eq!(give(&mut b, T0, &req), None);
    assert_eq!(next(&mut b), rej);
}

#[test]
fn more_time_is_given_once() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.delay(20);
    let mra = next(&mut b);
    give(&mut a, T0, &mra);
    let due = a.deadline();
    give(&mut a, T0 + Duration::from_secs(1), &mra);
    assert_eq!(a.deadline(), due);
}

#[test]
fn a_strangers_patience_is_not_ours() {
    for (said, waited) in [(31, MOST_WAIT), (0, LEAST_WAIT)] {
        let req = Req {
            local_timeout: said,
            ..REQ
        };
        let mut a = Exchange::request(T0, 9, &req);
        let mut b = responder(&next(&mut a));
        b.accept(T0, &REP);
        assert_eq!(b.deadline(), Some(T0 + timeout(waited)), "{said}");
    }
    // An MRA with the longest time there is: two hours and a half.
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.delay(31);
    give(&mut a, T0, &next(&mut b));
    let most = timeout(POWER) + timeout(MOST_DELAY);
    assert_eq!(a.deadline(), Some(T0 + most));
}

#[test]
fn a_refusal_ends_what_one_side_believes_made() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.accept(T0, &REP);
    give(&mut a, T0, &next(&mut b));
    a.ready(b"");
    next(&mut a);
    // None of its words arrives.
    let event = loop {
        while a.take().or_else(|| b.take()).is_some() {}
        let due = b.deadline().expect("a time");
        if let Some(event) = b.expired(due) {
            break event;
        }
    };
    assert_eq!((event, a.phase()), (Event::TimedOut, Phase::Ready));
    let refusal = next(&mut b);
    assert_eq!(give(&mut a, T0, &refusal), Some(Event::Disconnected));
    assert_eq!((a.phase(), a.deadline()), (Phase::Over, None));
    assert_eq!(give(&mut a, T0, &refusal), None, "once");
}

/// The program takes its time: the peer learns that, each time it asks, and no second request comes of it.
#[test]
fn who_asks_again_learns_that_the_program_has_not_decided() {
    let mut a = Exchange::request(T0, 9, &REQ);
    let req = next(&mut a);
    let mut b = responder(&req);
    for _ in 0..2 {
        assert_eq!(give(&mut b, T0, &req), None);
        let raw = next(&mut b);
        let Message::Mra(mra) = Mad::parse(&raw).unwrap().message else {
            panic!("{b:?}");
        };
        assert_eq!((mra.local_id, mra.remote_id, mra.about), (6, 5, About::Req));
        give(&mut a, T0, &raw);
    }
    b.accept(T0, &REP);
    assert!(matches!(
        give(&mut a, T0, &next(&mut b)),
        Some(Event::Replied(_))
    ));
}

#[test]
fn what_was_given_up_is_not_made() {
    // The word that it was given up is lost; the answer comes later.
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    a.abandon();
    assert_eq!((a.phase(), a.deadline()), (Phase::Over, None));
    let lost = next(&mut a);
    let lost = Mad::parse(&lost).unwrap().message;
    assert!(
        matches!(lost, Message::Rej(rej) if (rej.reason, rej.about) == (reason::TIMEOUT, About::Req)),
        "{lost:?}"
    );
    b.accept(T0, &REP);
    assert_eq!(give(&mut a, T0, &next(&mut b)), None);
    let refusal = give(&mut b, T0, &next(&mut a));
    let id = reason::INVALID_ID;
    assert!(
        matches!(refusal, Some(Event::Rejected { reason, .. }) if reason == id),
        "{refusal:?}"
    );
    // It arrives in time.
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    a.abandon();
    let refusal = give(&mut b, T0, &next(&mut a));
    assert!(matches!(refusal, Some(Event::Rejected { .. })));
    // The answer waits for the program, which goes.
    let mut a = Exchange::request(T0, 9, &REQ);
    let mut b = responder(&next(&mut a));
    b.accept(T0, &REP);
    give(&mut a, T0, &next(&mut b));
    a.abandon();
    let refusal = give(&mut b, T0, &next(&mut a));
    assert!(matches!(refusal, Some(Event::Rejected { .. })));
}

/// A host that has forged its address knows its own number and not ours.
#[test]
fn a_message_without_our_number_is_not_believed() {
    let raw = |message| {
        Mad {
            transaction: 9,
            message,
        }
        .emit()
    };
    for guess in [0, 7] {
        let ids = Rtu {
            local_id: 5,
            remote_id: guess,
            private_data: &[],
        };
        let mut a = Exchange::request(T0, 9, &REQ);
        let mut b = responder(&next(&mut a));
        b.accept(T0, &REP);
        assert_eq!(give(&mut b, T0, &raw(Message::Rtu(ids))), None);
        assert_eq!(b.phase(), Phase::RepSent);
        let (_, mut b) = pair();
        let rej = Rej {
            local_id: 5,
            remote_id: guess,
            about: About::Other,
            reason: reason::TIMEOUT,
            ari: &[],
            private_data: &[],
        };
        assert_eq!(give(&mut b, T0, &raw(Message::Rej(rej))), None);
        assert_eq!(b.phase(), Phase::Ready);
        b.disconnect(T0, 30, REQ.qp);
        assert_eq!(give(&mut b, T0, &raw(Message::Drep(ids))), None);
        assert_eq!(b.phase(), Phase::DreqSent);
    }
}

/// The peer has started again, and its first connection has a number that it had before.
#[test]
fn another_request_with_the_same_number_is_not_a_repetition() {
    let (_, mut b) = pair();
    let mut other = Exchange::request(T0, 10, &REQ);
    assert_eq!(give(&mut b, T0, &next(&mut other)), None);
    assert!(b.take().is_none(), "it has no answer to that one");
}

/// The refusal of a peer that gives up without our number is one of its request's transaction; a forged one knows neither number.
#[test]
fn a_request_is_given_up_in_its_own_transaction() {
    for accepted in [false, true] {
        let mut a = Exchange::request(T0, 9, &REQ);
        let mut b = responder(&next(&mut a));
        if accepted {
            b.accept(T0, &REP);
            next(&mut b);
        }
        let before = b.phase();
        let rej = |transaction| Mad {
            transaction,
            message: Message::Rej(Rej {
                local_id: 5,
                remote_id: 0,
                about: About::Req,
                reason: reason::TIMEOUT,
                ari: &[0; 8],
                private_data: &[],
            }),
        };
        assert_eq!(b.on(T0, &rej(10)), None);
        assert_eq!(b.phase(), before);
        assert!(b.on(T0, &rej(9)).is_some());
        assert_eq!(b.phase(), Phase::Over);
    }
}
