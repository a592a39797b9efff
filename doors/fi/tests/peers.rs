//! What a machine does with peers that are silent, gone or hostile.
#![expect(
    clippy::single_range_in_vec_init,
    reason = "a list of ranges that has one"
)]

use std::ops::Range;
use std::time::Duration;

use weft_fi::machine::{Event, Host, Machine, Part, PeerId, Refused, Want};
use weft_fi::peer_stream::PeerStream;
use weft_fi::wire::{self, Body, Header, Meta, Target};

#[derive(Default)]
struct Memory {
    writes: Vec<Range<u64>>,
    events: Vec<Event>,
    /// Bytes left of the receive that takes many messages.
    left: u64,
    parts: u64,
    offers: Vec<(PeerId, u16)>,
    /// Writes of whole messages are reliable.
    reliable: bool,
}

impl Host for Memory {
    fn carve(&mut self, parent: u64, len: u64) -> Part {
        let room = self.left.min(len);
        self.left -= room;
        self.parts += 1;
        Part {
            recv: parent * 100 + self.parts,
            room,
            last: self.left == 0,
        }
    }

    fn place(&mut self, _: u64, _: u64, _: &[u8]) {}

    fn open(&mut self, _: u64, _: u64) -> Option<Target> {
        Some(Target { rkey: 1, addr: 0 })
    }

    fn close(&mut self, _: u64) {}

    fn offered(&mut self, peer: PeerId, port: u16, _: u64) {
        self.offers.push((peer, port));
    }

    fn write(
        &mut self,
        _: u64,
        _: PeerId,
        _: Target,
        range: Range<u64>,
        _: u64,
        whole: bool,
    ) -> bool {
        self.writes.push(range);
        whole && self.reliable
    }

    fn writing(&self, _: u64) -> bool {
        !self.writes.is_empty()
    }

    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

const NOW: Duration = Duration::from_secs(1);

/// Of any peer, or of one.
fn want(peer: Option<PeerId>) -> Want {
    Want {
        tagged: false,
        tag: 0,
        ignore: 0,
        peer,
    }
}

fn meta(len: u64) -> Meta {
    Meta {
        len,
        ..Meta::default()
    }
}

/// A packet of a peer comes.
fn comes(machine: &mut Machine, memory: &mut Memory, peer: PeerId, seq: u32, body: &Body<'_>) {
    let mut packet = wire::encode(body);
    wire::stamp(&mut packet, &header(seq, 1));
    machine.packet(memory, NOW, peer, &packet);
}

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
    let mut link = PeerStream::new(1);
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
        assert!(now.saturating_sub(start) < Duration::from_mins(10));
    }
    assert!(now.saturating_sub(start) >= Duration::from_mins(2) && sent > 8);
}

#[test]
fn receives_of_a_peer_that_closes_fail() {
    let mut machine = Machine::new(1, 1 << 16);
    let mut memory = Memory::default();
    let peer = machine.add_peer().unwrap();
    let tagged = Meta {
        tagged: true,
        ..meta(2)
    };
    let any_tagged = Want {
        tagged: true,
        ..want(None)
    };
    // A large message that is being written, one that has begun, and a receive of this peer alone; two messages without a receive.
    machine.recv(&mut memory, 1, want(None), 100);
    machine.recv(&mut memory, 2, want(None), 100);
    machine.recv(&mut memory, 3, want(Some(peer)), 100);
    let bodies = [
        Body::Request(meta(9), 1),
        Body::Message(tagged, b"hi"),
        Body::Request(tagged, 2),
        Body::Message(meta(9), b"begun"),
    ];
    for (seq, body) in (1..).zip(&bodies) {
        comes(&mut machine, &mut memory, peer, seq, body);
    }
    assert_eq!(memory.events, []);
    comes(&mut machine, &mut memory, peer, 0, &Body::Bye);
    let failed = |event: &Event| match event {
        Event::RecvFailed { recv, .. } => Some(*recv),
        _ => None,
    };
    let mut all: Vec<u64> = memory.events.iter().filter_map(failed).collect();
    all.sort_unstable();
    assert_eq!(all, [1, 2, 3]);
    memory.events.clear();
    machine.recv(&mut memory, 4, any_tagged, 100);
    machine.recv(&mut memory, 5, any_tagged, 100);
    let whole = Event::Received {
        recv: 4,
        peer,
        meta: tagged,
    };
    let lost = Event::RecvFailed {
        recv: 5,
        peer,
        meta: tagged,
    };
    assert_eq!(memory.events, [whole, lost]);
    assert_eq!(machine.transmit(NOW, true, &mut Vec::new()), None);
}

/// All that may go goes.
fn transmit(machine: &mut Machine) {
    let mut out = Vec::new();
    while machine.transmit(NOW, true, &mut out).is_some() {}
}

/// A machine with a large message to a peer that has said where to write it.
fn writing(mut memory: Memory) -> (Machine, Memory, PeerId) {
    let mut machine = Machine::new(1, 1000);
    let peer = machine.add_peer().unwrap();
    let all = meta(100_000);
    machine
        .send(&mut memory, 5, peer, all, false, |_, _| {})
        .unwrap();
    let ready = Body::Ready {
        id: 1,
        target_id: 9,
        target: Target { rkey: 1, addr: 0 },
        len: all.len,
    };
    comes(&mut machine, &mut memory, peer, 1, &ready);
    assert_eq!(memory.writes, [0..100_000]);
    (machine, memory, peer)
}

#[test]
fn ranges_are_not_written_twice() {
    for (ranges, sound) in [
        (vec![0..5, 5..9], true),
        (vec![0..5, 4..9], false),
        (vec![6..9, 0..5], false),
    ] {
        let (mut machine, mut memory, peer) = writing(Memory::default());
        let lacks = Body::Lacks { id: 1, ranges };
        transmit(&mut machine);
        comes(&mut machine, &mut memory, peer, 2, &lacks);
        assert_eq!(memory.events.is_empty(), sound);
        // What is being written is not queued again, but said to be written.
        assert_eq!(memory.writes.len(), 1);
        memory.writes.clear();
        transmit(&mut machine);
        comes(&mut machine, &mut memory, peer, 3, &lacks);
        assert_eq!(memory.writes.len(), if sound { 2 } else { 0 });
    }
}

#[test]
fn a_peer_that_only_asks_is_given_up() {
    let (mut machine, mut memory, peer) = writing(Memory::default());
    transmit(&mut machine);
    // Nothing is acknowledged: the answers fill the window and wait.
    for seq in 2..18 {
        assert_eq!(memory.events, []);
        let ranges = vec![0..1];
        let lacks = Body::Lacks { id: 1, ranges };
        comes(&mut machine, &mut memory, peer, seq, &lacks);
        transmit(&mut machine);
    }
    assert_eq!(memory.events, [Event::SendFailed(5)]);
}

#[test]
fn a_receive_takes_many_messages_until_its_memory_is_used_up() {
    let mut machine = Machine::new(1, 1 << 16);
    let mut memory = Memory {
        left: 20,
        ..Memory::default()
    };
    let peer = machine.add_peer().unwrap();
    let say = |machine: &mut Machine, memory: &mut Memory, seq| {
        comes(
            machine,
            memory,
            peer,
            seq,
            &Body::Message(meta(5), b"hello"),
        );
    };
    // Two wait; one comes while it is posted, a large one is fetched, and the fifth finds no room.
    say(&mut machine, &mut memory, 1);
    say(&mut machine, &mut memory, 2);
    machine.recv_many(&mut memory, 7, want(None));
    say(&mut machine, &mut memory, 3);
    comes(
        &mut machine,
        &mut memory,
        peer,
        4,
        &Body::Request(meta(9), 1),
    );
    say(&mut machine, &mut memory, 5);
    let received = |event: &Event| match event {
        Event::Received { recv, .. } => *recv,
        other => panic!("{other:?}"),
    };
    let all: Vec<u64> = memory.events.iter().map(received).collect();
    assert_eq!(all, [701, 702, 703]);
    assert_eq!((memory.left, memory.parts), (0, 4));
    machine.record(&mut memory, NOW, peer, 1, 1, [0..9]);
    assert_eq!(memory.events.last().map(received), Some(704));
    // The fifth waits for the next receive.
    machine.recv(&mut memory, 8, want(None), 100);
    assert_eq!(memory.events.last().map(received), Some(8));
}

/// A reliable write is not followed by "written", until it is not so reliable any more.
#[test]
fn what_a_broken_connection_did_not_write_is_asked_for() {
    let (mut machine, mut memory, peer) = writing(Memory {
        reliable: true,
        ..Memory::default()
    });
    let written = |machine: &mut Machine| {
        let (mut out, mut count) = (Vec::new(), 0);
        while machine.transmit(NOW, true, &mut out).is_some() {
            let (_, body) = wire::decode(&out).unwrap();
            count += usize::from(body == Body::Written { target_id: 9 });
        }
        count
    };
    assert_eq!(written(&mut machine), 0);
    machine.unsure(peer);
    machine.unsure(peer);
    assert_eq!(written(&mut machine), 1);
    memory.writes.clear();
    let ranges = vec![0..7];
    comes(
        &mut machine,
        &mut memory,
        peer,
        2,
        &Body::Lacks { id: 1, ranges },
    );
    assert_eq!(memory.writes, [0..7]);
}

#[test]
fn a_message_that_was_written_reliably_is_complete() {
    let mut machine = Machine::new(1, 1000);
    let mut memory = Memory::default();
    let (peer, other) = (machine.add_peer().unwrap(), machine.add_peer().unwrap());
    machine.recv(&mut memory, 3, want(None), 100_000);
    comes(
        &mut machine,
        &mut memory,
        peer,
        1,
        &Body::Request(meta(50_000), 1),
    );
    machine.placed(&mut memory, other, 1);
    machine.placed(&mut memory, peer, 2);
    assert_eq!(memory.events, []);
    machine.placed(&mut memory, peer, 1);
    let meta = meta(50_000);
    let received = Event::Received {
        recv: 3,
        peer,
        meta,
    };
    assert_eq!(memory.events, [received]);
}

#[test]
fn peers_that_nobody_named_have_little_room_together() {
    let mut machine = Machine::new(1, 1 << 20);
    let mut memory = Memory::default();
    let strangers: Vec<PeerId> = (0..1024).map(|_| machine.add_stranger().unwrap()).collect();
    assert!(machine.add_stranger().is_err());
    // One is named: there is room for another stranger, and its offers count.
    let offer = Body::Offer { port: 7, token: 1 };
    comes(&mut machine, &mut memory, strangers[0], 1, &offer);
    machine.name(strangers[0]);
    machine.name(strangers[0]);
    comes(&mut machine, &mut memory, strangers[0], 2, &offer);
    assert_eq!(memory.offers, [(strangers[0], 7)]);
    assert!(machine.add_stranger().is_ok());
    assert!(machine.add_stranger().is_err());
    // Each keeps less than it alone may; the last ones nothing.
    let bytes = vec![0; 8000];
    let early = Body::More(&bytes);
    for &peer in &strangers[1..] {
        for seq in 2..34 {
            comes(&mut machine, &mut memory, peer, seq, &early);
        }
    }
    let kept: usize = machine.kept_bytes();
    assert!(kept > 1 << 25 && kept < (1 << 26) + 10_000, "{kept}");
}

/// All that may go goes, but for a peer that is held.
#[test]
fn a_peer_that_is_held_gets_acknowledgements_only() {
    let mut machine = Machine::new(1, 1000);
    let mut memory = Memory::default();
    let peer = machine.add_peer().unwrap();
    machine.hold(peer, true);
    machine
        .send(&mut memory, 1, peer, meta(1), false, |_, _| {})
        .unwrap();
    comes(
        &mut machine,
        &mut memory,
        peer,
        1,
        &Body::Message(meta(2), b"hi"),
    );
    let mut out = Vec::new();
    assert!(machine.transmit(NOW, true, &mut out).is_some());
    assert_eq!(wire::decode(&out).unwrap().1, Body::Ack);
    assert_eq!(machine.transmit(NOW, true, &mut out), None);
    machine.hold(peer, false);
    let sent = machine.transmit(NOW, true, &mut out).unwrap();
    assert!(!sent.again && matches!(wire::decode(&out).unwrap().1, Body::Message(..)));
}

/// Messages without bytes take room, too; and who finds none waits, and is not ended for what others took.
#[test]
fn strangers_are_not_ended_for_what_others_took() {
    let mut machine = Machine::new(1, 1 << 20);
    let mut memory = Memory::default();
    let honest = machine.add_stranger().unwrap();
    // Requests come without bytes, and find no receive.
    let stored = |machine: &mut Machine, memory: &mut Memory, peer, count: u32| {
        for seq in 1..=count {
            comes(machine, memory, peer, seq, &Body::Request(meta(9), seq));
        }
    };
    for _ in 0..20 {
        let peer = machine.add_stranger().unwrap();
        stored(&mut machine, &mut memory, peer, 60_000);
    }
    let mut waiting = 0;
    while machine.peek(&want(None), Some(waiting)).is_some() {
        waiting += 1;
    }
    assert!((100_000..800_000).contains(&waiting), "{waiting}");
    comes(
        &mut machine,
        &mut memory,
        honest,
        1,
        &Body::Message(meta(2), b"hi"),
    );
    assert_eq!(machine.peek(&want(Some(honest)), None), None);
    // It is not acknowledged, so it comes again; and with a receive there is room for it.
    machine.recv(&mut memory, 5, want(Some(honest)), 10);
    comes(
        &mut machine,
        &mut memory,
        honest,
        1,
        &Body::Message(meta(2), b"hi"),
    );
    let received = Event::Received {
        recv: 5,
        peer: honest,
        meta: meta(2),
    };
    assert_eq!(memory.events, [received]);
}

/// Those who have gone make room for others, once nothing of theirs is left.
#[test]
fn strangers_that_have_gone_make_room() {
    let mut machine = Machine::new(1, 1 << 20);
    let mut memory = Memory::default();
    let strangers: Vec<PeerId> = (0..1024).map(|_| machine.add_stranger().unwrap()).collect();
    let bytes = vec![0; 8000];
    // The first leaves a message, the second a packet that came early, the third contradicts itself.
    comes(
        &mut machine,
        &mut memory,
        strangers[0],
        1,
        &Body::Message(meta(2), b"hi"),
    );
    comes(&mut machine, &mut memory, strangers[0], 0, &Body::Bye);
    comes(
        &mut machine,
        &mut memory,
        strangers[1],
        2,
        &Body::More(&bytes),
    );
    assert!(machine.kept_bytes() >= 8000);
    comes(&mut machine, &mut memory, strangers[1], 0, &Body::Bye);
    assert_eq!(machine.kept_bytes(), 0);
    comes(
        &mut machine,
        &mut memory,
        strangers[2],
        1,
        &Body::Message(meta(2), b"hi"),
    );
    comes(
        &mut machine,
        &mut memory,
        strangers[2],
        2,
        &Body::Done { id: 7 },
    );
    assert_eq!(machine.peek(&want(Some(strangers[2])), None), None);
    assert_eq!(machine.add_stranger(), Ok(strangers[1]));
    assert_eq!(machine.add_stranger(), Ok(strangers[2]));
    assert_eq!(machine.add_stranger(), Err(Refused::TooMany));
    // It is a new peer, whose packets count from 1.
    comes(
        &mut machine,
        &mut memory,
        strangers[1],
        1,
        &Body::Message(meta(2), b"hi"),
    );
    assert!(machine.peek(&want(Some(strangers[1])), None).is_some());
    machine.recv(&mut memory, 5, want(Some(strangers[0])), 10);
    assert_eq!(machine.add_stranger(), Ok(strangers[0]));
}
