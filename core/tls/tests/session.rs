//! Two ends of a session, joined by byte vectors.

use weft_tls::{Identity, RECORD_PLAIN, Session, Tls, TlsError};

struct Side {
    session: Session,
    out: Vec<u8>,
    got: Vec<u8>,
}

impl Side {
    fn new(session: Session) -> Self {
        Side {
            session,
            out: Vec::new(),
            got: Vec::new(),
        }
    }

    fn take(&mut self, bytes: &mut Vec<u8>) -> Result<(), TlsError> {
        let got = &mut self.got;
        let used = self.session.receive(
            bytes,
            &mut |plain| {
                got.extend_from_slice(plain);
                true
            },
            &mut self.out,
        )?;
        bytes.drain(..used);
        Ok(())
    }
}

/// Carries bytes until neither side has any, and gives each side's end.
fn settle(a: &mut Side, b: &mut Side) -> (Result<(), TlsError>, Result<(), TlsError>) {
    let (mut to_a, mut to_b) = (Vec::new(), Vec::new());
    let (mut at_a, mut at_b) = (a.take(&mut to_a), Ok(()));
    while !(a.out.is_empty() && b.out.is_empty()) {
        to_b.append(&mut a.out);
        if at_b.is_ok() {
            at_b = b.take(&mut to_b);
        }
        to_a.append(&mut b.out);
        if at_a.is_ok() {
            at_a = a.take(&mut to_a);
        }
    }
    (at_a, at_b)
}

/// Seals data of any length.
fn seal(side: &mut Side, data: &[u8]) -> Result<(), TlsError> {
    for chunk in data.chunks(RECORD_PLAIN) {
        side.session
            .seal(&mut side.out, |plain| plain.extend_from_slice(chunk))?;
    }
    Ok(())
}

fn pair(initiator: &Tls, responder: &Tls) -> (Side, Side) {
    (
        Side::new(initiator.initiator().unwrap()),
        Side::new(responder.responder().unwrap()),
    )
}

fn anybody() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

#[test]
fn both_ends_know_each_other_and_data_goes_both_ways() {
    let (alice, bob) = (anybody(), anybody());
    let (mut a, mut b) = pair(&alice, &bob);
    assert_eq!(settle(&mut a, &mut b), (Ok(()), Ok(())));
    let (seen_by_a, seen_by_b) = (a.session.info().unwrap(), b.session.info().unwrap());
    assert_eq!(seen_by_a.peer, bob.public_key());
    assert_eq!(seen_by_b.peer, alice.public_key());
    assert_eq!(seen_by_a.binding, seen_by_b.binding);
    assert_eq!(seen_by_a.cipher, seen_by_b.cipher);

    for len in [0, 1, RECORD_PLAIN, RECORD_PLAIN + 1, 5 * RECORD_PLAIN - 3] {
        let data: Vec<u8> = (0..len).map(|i| i as u8).collect();
        seal(&mut a, &data).unwrap();
        seal(&mut b, &data).unwrap();
        assert_eq!(settle(&mut a, &mut b), (Ok(()), Ok(())));
        assert_eq!(std::mem::take(&mut a.got), data);
        assert_eq!(std::mem::take(&mut b.got), data);
    }

    a.session.close(&mut a.out);
    assert_eq!(settle(&mut a, &mut b), (Ok(()), Ok(())));
    assert!(b.session.peer_closed());
    seal(&mut b, b"the other direction goes on").unwrap();
    assert_eq!(settle(&mut a, &mut b), (Ok(()), Ok(())));
    assert_eq!(a.got, b"the other direction goes on");
    assert!(seal(&mut a, b"not this one").is_err());
}

#[test]
fn plaintext_is_given_record_by_record_and_stops_when_told() {
    let (mut a, mut b) = pair(&anybody(), &anybody());
    settle(&mut a, &mut b).0.unwrap();
    let data = vec![7; 3 * RECORD_PLAIN];
    seal(&mut a, &data).unwrap();
    let mut wire = std::mem::take(&mut a.out);
    let mut sizes = Vec::new();
    while !wire.is_empty() {
        let used = b
            .session
            .receive(
                &mut wire,
                &mut |plain| {
                    sizes.push(plain.len());
                    false
                },
                &mut b.out,
            )
            .unwrap();
        assert!(used > 0);
        wire.drain(..used);
    }
    assert_eq!(sizes, [RECORD_PLAIN; 3]);
}

#[test]
fn each_side_may_refuse_the_others_key() {
    let picky = || anybody().allow(|_| false).unwrap();
    let alice = anybody();
    let (mut a, mut b) = pair(&alice, &picky());
    let ends = settle(&mut a, &mut b);
    assert_eq!(ends.0, Err(TlsError::KeyRefusedByPeer));
    assert_eq!(ends.1, Err(TlsError::KeyRefused(alice.public_key())));
    assert!(b.session.info().is_none());

    let bob = anybody();
    let (mut a, mut b) = pair(&picky(), &bob);
    let ends = settle(&mut a, &mut b);
    assert_eq!(ends.0, Err(TlsError::KeyRefused(bob.public_key())));
    assert_eq!(ends.1, Err(TlsError::KeyRefusedByPeer));
    assert!(a.session.info().is_none() && b.session.info().is_none());
}

/// Every single flipped bit of a record is noticed before a byte of it is given out, and so are records that are missing or come twice.
#[test]
fn damage_and_replay_are_noticed() {
    let (mut a, mut b) = pair(&anybody(), &anybody());
    settle(&mut a, &mut b).0.unwrap();
    seal(&mut a, b"once").unwrap();
    let record = std::mem::take(&mut a.out);
    b.take(&mut record.clone()).unwrap();
    assert_eq!(b.got, b"once");
    assert!(b.take(&mut record.clone()).is_err(), "a record again");

    for bit in 0..record.len() * 8 {
        let (mut a, mut b) = pair(&anybody(), &anybody());
        settle(&mut a, &mut b).0.unwrap();
        seal(&mut a, b"once").unwrap();
        a.out[bit / 8] ^= 1 << (bit % 8);
        let outcome = b.take(&mut std::mem::take(&mut a.out));
        // A length that became longer leaves a record that is not complete.
        assert!(outcome.is_err() || b.got.is_empty(), "bit {bit}");
        assert!(b.got.is_empty(), "bit {bit}");
    }
}

#[test]
fn what_is_no_tls_is_said_to_be_none() {
    for bytes in [
        &b"MPA ID Req Frame\x40\x01\x00\x00"[..],
        b"GET / HTTP/1.1\r\n\r\n",
        &[0; 64],
    ] {
        let mut b = Side::new(anybody().responder().unwrap());
        assert_eq!(
            b.take(&mut bytes.to_vec()),
            Err(TlsError::NotTls),
            "{bytes:?}"
        );
        let mut a = Side::new(anybody().initiator().unwrap());
        assert_eq!(
            a.take(&mut bytes.to_vec()),
            Err(TlsError::NotTls),
            "{bytes:?}"
        );
    }
}

/// Somebody between the ends who has keys of his own gets two connections, with different bindings.
#[test]
fn a_relay_cannot_give_both_ends_the_same_binding() {
    let relay = anybody();
    let (mut a, mut r1) = pair(&anybody(), &relay);
    let (mut r2, mut b) = pair(&relay, &anybody());
    settle(&mut a, &mut r1).0.unwrap();
    settle(&mut r2, &mut b).0.unwrap();
    assert_ne!(
        a.session.info().unwrap().binding,
        b.session.info().unwrap().binding
    );
}
