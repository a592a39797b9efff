//! Start-up: both machines, fed pieces of bytes.

use weft_proto::mpa::{
    self, InitStep, Initiator, Params, RespStep, Responder, Revision, Rtr, RtrSet,
};

use super::model::Rng;

fn random_config(rng: &mut Rng) -> mpa::Config {
    mpa::Config {
        crc: rng.one_in(2),
        recv_markers: rng.one_in(3),
        revision: if rng.one_in(4) {
            Revision::One
        } else {
            Revision::Two
        },
        ird: 1 + rng.below(6) as u16,
        ord: 1 + rng.below(6) as u16,
        peer_to_peer: None,
    }
}

/// Both start-up machines over pieces of bytes.
pub(super) fn start(rng: &mut Rng) -> [Params; 2] {
    let (mut ours, mut theirs) = (random_config(rng), random_config(rng));
    if rng.one_in(2) && ours.revision == Revision::Two && theirs.revision == Revision::Two {
        let set = RtrSet {
            send: false,
            write: true,
            read: rng.one_in(2),
        };
        (ours.peer_to_peer, theirs.peer_to_peer) = (
            Some(set),
            Some(RtrSet {
                send: rng.one_in(2),
                ..set
            }),
        );
    }
    // Without negotiation the users must agree by other means; here the initiator's limits fit.
    if ours.revision == Revision::One || theirs.revision == Revision::One {
        (ours.ird, ours.ord) = (theirs.ord, theirs.ird);
    }
    let len = rng.below(509);
    let data = rng.bytes(len);
    let (initiator, request) = Initiator::new(ours, &data).unwrap();
    let mut given = 0;
    let pending = loop {
        match Responder::new(theirs).on_bytes(&request[..given]).unwrap() {
            RespStep::NeedMore => given += 1 + rng.below(request.len() - given),
            RespStep::Request(pending) => break pending,
        }
    };
    assert_eq!(
        (pending.private_data(), pending.consumed()),
        (&data[..], request.len())
    );
    let len = rng.below(pending.max_private_data() + 1);
    let data = rng.bytes(len);
    let (theirs, mut reply) = pending.accept(&data, theirs.ird, theirs.ord).unwrap();
    let reply_len = reply.len();
    reply.extend_from_slice(b"early");
    let mut given = 0;
    let ours = loop {
        match initiator.on_bytes(&reply[..given]).unwrap() {
            InitStep::NeedMore => given += 1 + rng.below(reply.len() - given),
            InitStep::Accepted {
                params,
                private_data,
                consumed,
            } => {
                assert_eq!((private_data, consumed), (data, reply_len));
                break params;
            }
            InitStep::Rejected { .. } => panic!("rejected"),
        }
    };
    assert_eq!(
        (ours.crc, ours.tx_markers, ours.rx_markers),
        (theirs.crc, theirs.rx_markers, theirs.tx_markers)
    );
    assert!(
        ours.ord <= theirs.ird && theirs.ord <= ours.ird,
        "{ours:?} {theirs:?}"
    );
    assert_eq!(ours.rtr, theirs.rtr);
    assert!(matches!(ours.rtr, None | Some(Rtr::Write | Rtr::Read)));
    [ours, theirs]
}
