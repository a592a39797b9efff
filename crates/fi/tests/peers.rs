//! What a machine does with peers that are silent, gone or hostile.

use std::time::Duration;

use weft_fi::link::Link;
use weft_fi::wire::{self, Body, Header};

fn header(seq: u32, ack: u32) -> Header {
    Header {
        key: 2,
        seq,
        ack,
        sack: 0,
    }
}

#[test]
fn a_program_that_computes_for_long_keeps_its_peers() {
    let mut link = Link::new(1);
    let mut now = Duration::from_secs(1);
    link.push(wire::encode(&Body::Done { id: 1 }));
    assert!(link.transmit(now).is_some());
    now += Duration::from_mins(3);
    assert!(link.tick(now), "nothing was sent again yet");
    assert!(link.transmit(now).is_some(), "sent again");
    link.acknowledged(now, &header(0, 2));
    assert!(link.is_idle());
    // A peer that is silent is given up in the end.
    link.push(wire::encode(&Body::Done { id: 2 }));
    let (start, mut sent) = (now, 0);
    loop {
        sent += usize::from(link.transmit(now).is_some());
        now += Duration::from_secs(3);
        if !link.tick(now) {
            break;
        }
        assert!(now - start < Duration::from_mins(10));
    }
    assert!(now - start >= Duration::from_mins(2) && sent > 8);
}
