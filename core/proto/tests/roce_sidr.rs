//! A question of service ID resolution has one outcome, whatever the network loses or doubles and strangers say.

use std::time::Duration;

use weft_proto::dgram::Now;
use weft_proto::roce::cm::timeout;
use weft_proto::roce::sidr::{Inquiry, Outcome};
use weft_wire::roce::cm::{Mad, Message, PortSpace, SidrRep, SidrReq, service_id};
use weft_wire::sidr::status;

const T0: Now = Now::from_secs(1);
/// 4.2 ms.
const POWER: u8 = 10;
const RETRIES: u8 = 7;

const REQ: SidrReq<'static> = SidrReq {
    request_id: 5,
    pkey: 0xffff,
    service_id: service_id(PortSpace::Udp, 7),
    private_data: b"hello",
};
const REP: SidrRep<'static> = SidrRep {
    request_id: 5,
    status: status::SUCCESS,
    qp: 0x22,
    service_id: REQ.service_id,
    qkey: 0x0123_4567,
    private_data: b"welcome",
};

fn inquiry() -> Inquiry {
    Inquiry::new(T0, 9, &REQ, POWER, RETRIES)
}

/// The request that is to be sent now.
fn sent(inquiry: &mut Inquiry) -> bool {
    let Some(raw) = inquiry.take() else {
        return false;
    };
    let mad = Mad::parse(raw).expect("a message");
    let Message::SidrReq(req) = mad.message else {
        panic!("{mad:?}");
    };
    assert_eq!(
        (mad.transaction, req.request_id, req.service_id),
        (9, 5, REQ.service_id)
    );
    assert_eq!(&req.private_data[..5], b"hello");
    true
}

#[test]
fn an_answer_names_the_queue_pair_once() {
    let mut inquiry = inquiry();
    assert!(sent(&mut inquiry) && !sent(&mut inquiry));
    let found = Outcome::Found {
        qp: 0x22,
        qkey: 0x0123_4567,
        private_data: b"welcome".to_vec(),
    };
    assert_eq!(inquiry.on(9, &REP), Some(found));
    assert_eq!(inquiry.deadline(), None);
    // The network has doubled it.
    assert_eq!(inquiry.on(9, &REP), None);
    assert_eq!(inquiry.expired(T0 + Duration::from_hours(1)), None);
    assert!(!sent(&mut inquiry));
}

#[test]
fn a_refusal_has_its_reason() {
    for status in 1..=255 {
        let rep = SidrRep { status, ..REP };
        let refused = Outcome::Refused {
            status,
            private_data: b"welcome".to_vec(),
        };
        assert_eq!(inquiry().on(9, &rep), Some(refused));
    }
}

#[test]
fn a_sender_that_has_not_seen_the_request_is_not_believed() {
    let mut inquiry = inquiry();
    for request_id in [0, 4, 6, u32::MAX] {
        assert_eq!(inquiry.on(9, &SidrRep { request_id, ..REP }), None);
    }
    for transaction in [0, 8, 10, u64::MAX] {
        assert_eq!(inquiry.on(transaction, &REP), None);
    }
    assert_eq!(inquiry.deadline(), Some(T0 + timeout(POWER)));
    assert!(inquiry.on(9, &REP).is_some());
}

#[test]
fn a_lost_request_is_sent_again_until_nobody_is_there() {
    let mut inquiry = inquiry();
    let (mut now, mut times) = (T0, 0);
    let outcome = loop {
        times += u32::from(sent(&mut inquiry));
        let due = inquiry.deadline().expect("it waits");
        assert_eq!(due, now + timeout(POWER));
        // Not before.
        assert_eq!(
            inquiry.expired(due.saturating_sub(Duration::from_nanos(1))),
            None
        );
        assert!(!sent(&mut inquiry));
        now = due;
        if let Some(outcome) = inquiry.expired(now) {
            break outcome;
        }
    };
    assert_eq!(outcome, Outcome::TimedOut);
    assert_eq!(times, u32::from(RETRIES) + 1);
    assert_eq!(inquiry.on(9, &REP), None, "too late");
}
