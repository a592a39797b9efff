//! A peer that breaks the protocol: each violation is detected before it changes any state.

use weft_exs::machine::{
    Action, Body, Config, Design, Endpoint, Imm, Kind, MAX_ADVERTS, MAX_TRANSFER, Message, Mode,
    OpId, RecvFlags, Remote, Rules, Transfer, Violation,
};
use weft_wire::exs::{Advert, Packet};

const RING: u32 = 1000;

fn config(kind: Kind) -> Config {
    Config {
        kind,
        mode: Mode::Dynamic,
        send_credits: 5000,
        recv_credits: 5000,
        small_send: 16,
        small_recv: 16,
        peer_ring: Some(Remote {
            addr: 0x1000,
            rkey: 1,
            len: RING,
        }),
        own_ring_len: RING,
        immediate: true,
        rules: Rules::default(),
    }
}

fn stream() -> Endpoint {
    Endpoint::new(&config(Kind::Stream))
}

fn packets(design: Design) -> Endpoint {
    Endpoint::new(&config(Kind::SeqPacket(design)))
}

fn drain(end: &mut Endpoint) -> Vec<Action> {
    std::iter::from_fn(|| end.poll(true)).collect()
}

fn say(end: &mut Endpoint, body: Body) -> Result<(), Violation> {
    let verdict = end.on_message(0, &Message { credits: 0, body });
    drain(end);
    verdict
}

fn notify(end: &mut Endpoint, transfer: Transfer, len: u32) -> Result<(), Violation> {
    let verdict = end.on_imm(
        0,
        Imm {
            transfer,
            credits: 0,
            len,
        },
    );
    drain(end);
    verdict
}

fn advert(seq: u64, phase: u64, len: u32) -> Body {
    Body::Advert(Advert {
        seq,
        phase,
        waitall: false,
        memory: Remote {
            addr: 0x8000,
            rkey: 9,
            len,
        },
    })
}

fn packet(index: u64, len: u32) -> Packet {
    Packet {
        index,
        addr: 0x8000,
        rkey: 9,
        len,
    }
}

fn recv(end: &mut Endpoint, op: u64, len: u64) {
    end.recv(OpId(op), len, RecvFlags::default());
    drain(end);
}

fn send(end: &mut Endpoint, op: u64, len: u64) -> Vec<Action> {
    end.send(OpId(op), len).unwrap();
    drain(end)
}

#[test]
fn credits() {
    let mut end = Endpoint::new(&Config {
        recv_credits: 3,
        send_credits: 3,
        ..config(Kind::Stream)
    });
    let credit = Message {
        credits: 0,
        body: Body::Credit,
    };
    for _ in 0..3 {
        assert_eq!(end.on_message(0, &credit), Ok(()));
    }
    // No receive is posted again before `poll` has requested it.
    assert_eq!(end.on_message(0, &credit), Err(Violation::NoCredit));

    let mut end = stream();
    send(&mut end, 1, 100);
    let returned = |credits| Message {
        credits,
        body: Body::Credit,
    };
    assert_eq!(end.on_message(0, &returned(1)), Ok(()));
    assert_eq!(end.on_message(0, &returned(1)), Err(Violation::Credits));
    assert_eq!(
        stream().on_message(0, &returned(u16::MAX)),
        Err(Violation::Credits)
    );
}

#[test]
fn messages_of_another_kind_of_socket() {
    for body in [
        Body::PktAdvert(packet(0, 10)),
        Body::Source(packet(0, 10)),
        Body::SourceDone { index: 0, len: 0 },
        Body::Retracted { seq: 0 },
    ] {
        assert_eq!(
            say(&mut stream(), body),
            Err(Violation::Unexpected),
            "{body:?}"
        );
    }
    for design in [Design::Advert, Design::Source] {
        for body in [
            advert(0, 0, 10),
            Body::Ack { freed: 1 },
            Body::Retracted { seq: 0 },
        ] {
            assert_eq!(
                say(&mut packets(design), body),
                Err(Violation::Unexpected),
                "{body:?}"
            );
        }
    }
    let mut end = packets(Design::Source);
    assert_eq!(
        say(&mut end, Body::PktAdvert(packet(0, 10))),
        Err(Violation::Unexpected)
    );
    assert_eq!(say(&mut end, Body::Retract), Err(Violation::Unexpected));
    let mut end = packets(Design::Advert);
    assert_eq!(
        say(&mut end, Body::Source(packet(0, 10))),
        Err(Violation::Unexpected)
    );
    assert_eq!(
        say(&mut end, Body::SourceDone { index: 0, len: 0 }),
        Err(Violation::Unexpected)
    );
    assert_eq!(
        notify(&mut end, Transfer::Direct, 1),
        Err(Violation::Unexpected)
    );
    assert_eq!(
        notify(&mut stream(), Transfer::Packet { truncated: false }, 1),
        Err(Violation::Unexpected)
    );
    let wrote = Body::Wrote {
        transfer: Transfer::Indirect,
        len: 1,
    };
    assert_eq!(
        say(&mut stream(), wrote),
        Err(Violation::Unexpected),
        "with immediate data"
    );
}

#[test]
fn what_the_mode_rules_out() {
    let only = |mode| {
        Endpoint::new(&Config {
            mode,
            ..config(Kind::Stream)
        })
    };
    let mut end = only(Mode::Direct);
    assert_eq!(
        notify(&mut end, Transfer::Indirect, 1),
        Err(Violation::Unexpected)
    );
    assert_eq!(
        say(&mut end, Body::Small { len: 1 }),
        Err(Violation::Unexpected)
    );
    let mut end = only(Mode::Indirect);
    recv(&mut end, 1, 100);
    assert_eq!(say(&mut end, advert(0, 0, 1)), Err(Violation::Unexpected));
    assert_eq!(say(&mut end, Body::Retract), Err(Violation::Unexpected));
    assert_eq!(
        notify(&mut end, Transfer::Direct, 1),
        Err(Violation::NoAdvert)
    );
}

#[test]
fn direct_transfers_that_no_advert_allows() {
    let direct = Transfer::Direct;
    assert_eq!(
        notify(&mut stream(), direct, 1),
        Err(Violation::NoAdvert),
        "no receive"
    );
    let mut end = stream();
    recv(&mut end, 1, 100);
    recv(&mut end, 2, 100);
    assert_eq!(
        notify(&mut end, direct, 101),
        Err(Violation::NoAdvert),
        "too long"
    );
    assert_eq!(notify(&mut end, direct, 0), Err(Violation::Length));
    assert_eq!(notify(&mut end, direct, 100), Ok(()));
    assert_eq!(notify(&mut end, Transfer::Indirect, 10), Ok(()));
    assert_eq!(
        notify(&mut end, direct, 10),
        Err(Violation::NoAdvert),
        "the phase is over"
    );

    let mut end = stream();
    recv(&mut end, 1, 10);
    assert_eq!(
        notify(&mut end, direct, 10),
        Err(Violation::NoAdvert),
        "short receives have no advert"
    );

    let mut end = stream();
    let flags = RecvFlags {
        waitall: true,
        in_place: false,
    };
    end.recv(OpId(1), 100, flags);
    drain(&mut end);
    assert_eq!(notify(&mut end, direct, 60), Ok(()));
    assert_eq!(
        notify(&mut end, direct, 41),
        Err(Violation::NoAdvert),
        "more than is left"
    );
    assert_eq!(notify(&mut end, direct, 40), Ok(()));
}

#[test]
fn too_much_for_the_buffer() {
    let indirect = Transfer::Indirect;
    for len in [0, RING + 1, u32::MAX] {
        assert!(notify(&mut stream(), indirect, len).is_err(), "{len}");
    }
    let mut end = stream();
    assert_eq!(notify(&mut end, indirect, RING - 10), Ok(()));
    assert_eq!(notify(&mut end, indirect, 11), Err(Violation::Overfilled));
    assert_eq!(notify(&mut end, indirect, 10), Ok(()));
    assert_eq!(notify(&mut end, indirect, 1), Err(Violation::Overfilled));
    // Copied, but less than the acknowledgement threshold: the peer cannot know.
    recv(&mut end, 1, 100);
    assert_eq!(end.readable(), u64::from(RING) - 100);
    assert_eq!(notify(&mut end, indirect, 100), Err(Violation::Overfilled));
    recv(&mut end, 2, 200);
    assert_eq!(notify(&mut end, indirect, 300), Ok(()));
    recv(&mut end, 3, 900);
    assert_eq!(
        notify(&mut end, indirect, 701),
        Err(Violation::Overfilled),
        "across the wrap"
    );
    assert_eq!(notify(&mut end, indirect, 700), Ok(()));

    let mut none = Endpoint::new(&Config {
        own_ring_len: 0,
        ..config(Kind::Stream)
    });
    assert_eq!(notify(&mut none, indirect, 1), Err(Violation::Overfilled));
    assert_eq!(
        say(&mut stream(), Body::Small { len: 17 }),
        Err(Violation::Length)
    );
    assert_eq!(
        say(&mut stream(), Body::Small { len: 0 }),
        Err(Violation::Length)
    );
}

#[test]
fn acknowledgements_of_what_was_never_sent() {
    let mut end = stream();
    assert_eq!(say(&mut end, Body::Ack { freed: 1 }), Err(Violation::Ack));
    send(&mut end, 1, 100);
    for freed in [0, 101, u32::MAX] {
        assert_eq!(say(&mut end, Body::Ack { freed }), Err(Violation::Ack));
    }
    assert_eq!(say(&mut end, Body::Ack { freed: 100 }), Ok(()));
    assert_eq!(say(&mut end, Body::Ack { freed: 1 }), Err(Violation::Ack));
    let mut none = Endpoint::new(&Config {
        peer_ring: None,
        ..config(Kind::Stream)
    });
    assert_eq!(say(&mut none, Body::Ack { freed: 1 }), Err(Violation::Ack));
}

#[test]
fn adverts_that_cannot_be() {
    for phase in [1, 2, 4, u64::MAX, u64::MAX - 1] {
        assert_eq!(
            say(&mut stream(), advert(0, phase, 1)),
            Err(Violation::Phase),
            "{phase}"
        );
    }
    let wraps = Body::Advert(Advert {
        seq: 0,
        phase: 0,
        waitall: false,
        memory: Remote {
            addr: u64::MAX,
            rkey: 0,
            len: 2,
        },
    });
    assert_eq!(say(&mut stream(), wraps), Err(Violation::Memory));
    assert_eq!(say(&mut stream(), advert(0, 0, 0)), Err(Violation::Memory));

    // In an indirect phase an advert may be one phase ahead. It may be neither further ahead nor behind.
    let mut end = stream();
    send(&mut end, 1, 100);
    assert_eq!(say(&mut end, advert(100, 4, 1)), Err(Violation::Phase));
    assert_eq!(say(&mut end, advert(100, 2, 1)), Ok(()));
    assert_eq!(say(&mut end, advert(100, 0, 1)), Err(Violation::Phase));
    assert_eq!(say(&mut end, advert(101, 2, 1)), Ok(()));
}

#[test]
fn an_advert_of_a_position_not_reached_is_not_used() {
    let mut end = stream();
    send(&mut end, 1, 100);
    assert_eq!(say(&mut end, advert(u64::MAX, 2, 1000)), Ok(()));
    let actions = send(&mut end, 2, 100);
    assert!(actions.iter().any(
        |action| matches!(action, Action::Write { imm, addr: 0x1064, .. } if imm.transfer == Transfer::Indirect)
    ));
}

#[test]
fn adverts_without_end() {
    let mut end = stream();
    for seq in 0..MAX_ADVERTS as u64 {
        assert_eq!(say(&mut end, advert(seq, 0, 1)), Ok(()));
    }
    assert_eq!(say(&mut end, advert(0, 0, 1)), Err(Violation::TooMany));

    let mut end = packets(Design::Advert);
    for index in 0..MAX_ADVERTS as u64 {
        assert_eq!(say(&mut end, Body::PktAdvert(packet(index, 1))), Ok(()));
    }
    let next = packet(MAX_ADVERTS as u64, 1);
    assert_eq!(
        say(&mut end, Body::PktAdvert(next)),
        Err(Violation::TooMany)
    );

    let mut end = packets(Design::Source);
    for index in 0..MAX_ADVERTS as u64 {
        assert_eq!(say(&mut end, Body::Source(packet(index, 1))), Ok(()));
    }
    assert_eq!(say(&mut end, Body::Source(next)), Err(Violation::TooMany));
}

#[test]
fn taking_adverts_back() {
    let mut end = stream();
    recv(&mut end, 1, 100);
    assert_eq!(
        say(&mut end, Body::Retracted { seq: 0 }),
        Err(Violation::Unexpected)
    );
    end.cancel(OpId(1));
    drain(&mut end);
    assert_eq!(
        say(&mut end, Body::Retracted { seq: 1 }),
        Err(Violation::Order)
    );
    assert_eq!(say(&mut end, Body::Retracted { seq: 0 }), Ok(()));
    assert_eq!(
        say(&mut end, Body::Retracted { seq: 0 }),
        Err(Violation::Unexpected)
    );

    // A second Retract before the answer to the first: an honest receiver waits.
    let mut end = stream();
    let retract = Message {
        credits: 0,
        body: Body::Retract,
    };
    assert_eq!(end.on_message(0, &retract), Ok(()));
    assert_eq!(end.on_message(0, &retract), Err(Violation::Unexpected));
}

#[test]
fn after_the_end() {
    for mut end in [stream(), packets(Design::Advert), packets(Design::Source)] {
        recv(&mut end, 1, 100);
        assert_eq!(say(&mut end, Body::Fin), Ok(()));
        assert!(end.peer_closed());
        assert_eq!(say(&mut end, Body::Fin), Err(Violation::AfterFin));
        assert_eq!(
            say(&mut end, Body::Small { len: 1 }),
            Err(Violation::AfterFin)
        );
    }
    for transfer in [Transfer::Direct, Transfer::Indirect] {
        let mut end = stream();
        recv(&mut end, 1, 100);
        assert_eq!(say(&mut end, Body::Fin), Ok(()));
        assert_eq!(notify(&mut end, transfer, 1), Err(Violation::AfterFin));
    }
    let mut end = packets(Design::Source);
    assert_eq!(say(&mut end, Body::Fin), Ok(()));
    assert_eq!(
        say(&mut end, Body::Source(packet(0, 1))),
        Err(Violation::AfterFin)
    );
    let mut end = packets(Design::Advert);
    assert_eq!(say(&mut end, Body::Fin), Ok(()));
    let written = Transfer::Packet { truncated: false };
    assert_eq!(notify(&mut end, written, 1), Err(Violation::AfterFin));
}

#[test]
fn messages_that_do_not_fit_their_receives() {
    let written = |truncated| Transfer::Packet { truncated };
    let mut end = packets(Design::Advert);
    assert_eq!(
        notify(&mut end, written(false), 0),
        Err(Violation::NoAdvert)
    );
    recv(&mut end, 1, 100);
    assert_eq!(
        notify(&mut end, written(false), 101),
        Err(Violation::Length)
    );
    assert_eq!(
        notify(&mut end, written(true), 99),
        Err(Violation::Length),
        "cut short of the end"
    );
    assert_eq!(notify(&mut end, written(true), 100), Ok(()));
    assert_eq!(
        notify(&mut end, written(false), 1),
        Err(Violation::NoAdvert)
    );
    assert_eq!(
        say(&mut end, Body::Small { len: 17 }),
        Err(Violation::Length)
    );
}

#[test]
fn messages_out_of_order() {
    let mut end = packets(Design::Advert);
    let wraps = Packet {
        addr: u64::MAX,
        ..packet(0, 1)
    };
    assert_eq!(
        say(&mut end, Body::PktAdvert(wraps)),
        Err(Violation::Memory)
    );
    for index in [1, u64::MAX] {
        assert_eq!(
            say(&mut end, Body::PktAdvert(packet(index, 1))),
            Err(Violation::Order)
        );
    }
    assert_eq!(say(&mut end, Body::PktAdvert(packet(0, 1))), Ok(()));
    assert_eq!(
        say(&mut end, Body::PktAdvert(packet(0, 1))),
        Err(Violation::Order)
    );

    let mut end = packets(Design::Source);
    assert_eq!(say(&mut end, Body::Source(wraps)), Err(Violation::Memory));
    assert_eq!(
        say(&mut end, Body::Source(packet(1, 1))),
        Err(Violation::Order)
    );
    assert_eq!(
        say(&mut end, Body::Source(packet(0, MAX_TRANSFER + 1))),
        Err(Violation::Length)
    );
    assert_eq!(
        say(&mut end, Body::SourceDone { index: 0, len: 0 }),
        Err(Violation::Unexpected)
    );
    send(&mut end, 1, 100);
    assert_eq!(
        say(&mut end, Body::SourceDone { index: 1, len: 0 }),
        Err(Violation::Order)
    );
    assert_eq!(
        say(&mut end, Body::SourceDone { index: 0, len: 101 }),
        Err(Violation::Length)
    );
    assert_eq!(
        say(&mut end, Body::SourceDone { index: 0, len: 100 }),
        Ok(())
    );
    assert!(end.is_idle());
}

/// Not a hostile peer, but lengths that no test has the memory for: an advert covers at most [`MAX_TRANSFER`] bytes, and
/// a later receive waits until a WAITALL is covered to its end.
#[test]
fn receives_longer_than_an_advert() {
    let mut end = stream();
    let flags = RecvFlags {
        waitall: true,
        in_place: false,
    };
    let piece = u64::from(MAX_TRANSFER);
    end.recv(OpId(1), 2 * piece + 100, flags);
    end.recv(OpId(2), 5 * piece, RecvFlags::default());
    let adverts = |end: &mut Endpoint| -> Vec<_> {
        let advert = |action| match action {
            Action::Advertise {
                op, off, len, seq, ..
            } => Some((op.0, off, u64::from(len), seq)),
            _ => None,
        };
        drain(end).into_iter().filter_map(advert).collect()
    };
    let whole = Imm {
        transfer: Transfer::Direct,
        credits: 0,
        len: MAX_TRANSFER,
    };
    assert_eq!(adverts(&mut end), [(1, 0, piece, 0)]);
    assert_eq!(end.on_imm(0, whole), Ok(()));
    assert_eq!(adverts(&mut end), [(1, piece, piece, piece)]);
    assert_eq!(end.on_imm(0, whole), Ok(()));
    assert_eq!(
        adverts(&mut end),
        [
            (1, 2 * piece, 100, 2 * piece),
            (2, 0, piece, 2 * piece + 100)
        ]
    );
    assert_eq!(notify(&mut end, Transfer::Direct, 100), Ok(()));
    assert_eq!(notify(&mut end, Transfer::Direct, 1), Ok(()));
    assert!(end.is_idle());

    // A send longer than any advert or the buffer is sent in pieces, and completes once.
    assert_eq!(say(&mut end, advert(0, 0, u32::MAX)), Ok(()));
    let mut lens = vec![];
    end.send(OpId(3), 3 * piece).unwrap();
    while let Some(action) = end.poll(true) {
        if let Action::Write { len, last, .. } = action {
            lens.push((len, last));
        }
    }
    assert_eq!(lens, [(MAX_TRANSFER, false), (RING, false)]);
}
