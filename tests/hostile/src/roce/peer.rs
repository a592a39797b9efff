//! What a peer does on a connection of its own.

use std::io;
use std::time::Duration;

use super::packet::{
    ACK, ATOMIC_ACK, BITS, COMPARE_SWAP, CONGESTION, FETCH_ADD, Packet, READ_REQUEST,
    READ_RESPONSE_ONLY, SEND_FIRST, SEND_LAST, SEND_MIDDLE, SEND_ONLY, SEND_ONLY_IMM,
    SEND_ONLY_INVALIDATE, WRITE_FIRST, WRITE_LAST, WRITE_MIDDLE, WRITE_ONLY, Wire,
};
use super::session::{MTU, Session, Target};
use super::{PORT, own_address};
use crate::report::Report;
use crate::rng::Rng;
use crate::target::{Place, Told};

/// How long a victim on a busy machine may take for an answer.
const REACTION: Duration = Duration::from_secs(10);
/// Nothing comes any more.
const SILENCE: Duration = Duration::from_millis(300);

type Lie = Box<dyn Fn(&mut Session, &mut Rng) -> io::Result<()>>;

/// What comes of a lie.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Expect {
    /// A NAK, and the end of the connection.
    Refused,
    /// Nothing: the connection goes on.
    Ignored,
    /// Either; the suite looks at the victim's memory.
    Any,
}

struct Case {
    name: String,
    expect: Expect,
    lie: Lie,
}

fn case(
    expect: Expect,
    name: impl Into<String>,
    lie: impl Fn(&mut Session, &mut Rng) -> io::Result<()> + 'static,
) -> Case {
    Case {
        name: name.into(),
        expect,
        lie: Box::new(lie),
    }
}

/// Sends the packet that the closure makes.
fn one(
    expect: Expect,
    name: impl Into<String>,
    make: impl Fn(&mut Session) -> Packet + 'static,
) -> Case {
    case(expect, name, move |session, _| {
        let packet = make(session);
        session.say(&packet)
    })
}

pub fn run(target: Target, seed: u64, rounds: usize, report: &mut Report) {
    let mut rng = Rng::new(seed);
    let mut wire = Some(Wire::new(own_address(62), PORT, target.ip).expect("a port of our own"));
    let only = std::env::var("HOSTILE_ONLY").unwrap_or_default();
    for case in cases(rounds) {
        if !case.name.contains(only.as_str()) {
            continue;
        }
        let outcome = tell(target, &case, &mut wire, &mut rng);
        report.case(&case.name, outcome.map_err(|e| e.to_string()));
        if wire.is_none() {
            wire = Wire::new(own_address(62), PORT, target.ip).ok();
        }
    }
}

fn tell(target: Target, case: &Case, wire: &mut Option<Wire>, rng: &mut Rng) -> io::Result<()> {
    let fresh = wire.take().ok_or_else(|| io::Error::other("no port"))?;
    let mut session = Session::join(target, fresh, rng)?;
    if !session.echo(b"before", REACTION)? {
        return Err(io::Error::other("an honest beginning failed"));
    }
    (case.lie)(&mut session, rng)?;
    match case.expect {
        Expect::Any => {}
        Expect::Ignored => {
            if !session.echo(b"behind", REACTION)? {
                return Err(io::Error::other("the connection does not go on"));
            }
        }
        Expect::Refused => {
            loop {
                let Some(answer) = session.hear(REACTION)? else {
                    return Err(io::Error::other("it is not refused"));
                };
                // A negative acknowledgement that is none of a missing packet.
                let syndrome = answer.rest.first().copied().unwrap_or_default();
                if answer.opcode == ACK && syndrome >> 5 == 3 && syndrome & 0x1f != 0 {
                    break;
                }
            }
            if session.echo(b"behind", SILENCE)? {
                return Err(io::Error::other("the connection goes on"));
            }
        }
    }
    *wire = Some(session.leave()?);
    Ok(())
}

fn told(session: &Session, what: Told) -> Place {
    session.told[what as usize]
}

/// Memory that is not open for it.
fn memory(out: &mut Vec<Case>) {
    use Told::{Closed, Foreign, Open, ReadOnly, Stale, Whole};
    let lie = [0xee; 16];
    for (name, what) in [
        ("closed", Closed),
        ("another domain's", Foreign),
        ("stale", Stale),
    ] {
        out.push(one(Expect::Refused, format!("read {name}"), move |s| {
            let place = told(s, what);
            s.next(READ_REQUEST).reth(place.addr, place.stag, 16)
        }));
        out.push(one(Expect::Refused, format!("add {name}"), move |s| {
            let place = told(s, what);
            s.next(FETCH_ADD).atomic(place.addr, place.stag, 1, 0)
        }));
    }
    for (name, what) in [
        ("closed", Closed),
        ("read only", ReadOnly),
        ("another domain's", Foreign),
        ("stale", Stale),
    ] {
        out.push(one(Expect::Refused, format!("write {name}"), move |s| {
            let place = told(s, what);
            let write = s.next(WRITE_ONLY).reth(place.addr, place.stag, 16);
            write.payload(&lie)
        }));
    }
    out.push(one(Expect::Refused, "swap read only", |s| {
        let place = told(s, ReadOnly);
        s.next(COMPARE_SWAP).atomic(place.addr, place.stag, 1, 0)
    }));
    out.push(one(Expect::Refused, "add at an odd place", |s| {
        let place = told(s, Whole);
        s.next(FETCH_ADD).atomic(place.addr + 4, place.stag, 1, 0)
    }));
    for (name, by) in [("before", 0_u64.wrapping_sub(1)), ("behind", 1)] {
        out.push(one(
            Expect::Refused,
            format!("write {name} the open place"),
            move |s| {
                let place = told(s, Open);
                let addr = match by {
                    1 => place.addr + u64::from(place.len) - 15,
                    by => place.addr.wrapping_add(by),
                };
                s.next(WRITE_ONLY).reth(addr, place.stag, 16).payload(&lie)
            },
        ));
        out.push(one(
            Expect::Refused,
            format!("read {name} the open place"),
            move |s| {
                let place = told(s, Open);
                let addr = match by {
                    1 => place.addr + u64::from(place.len) - 15,
                    by => place.addr.wrapping_add(by),
                };
                s.next(READ_REQUEST).reth(addr, place.stag, 16)
            },
        ));
    }
    out.push(one(
        Expect::Refused,
        "an address that overflows",
        move |s| {
            let place = told(s, Open);
            let write = s.next(WRITE_ONLY).reth(u64::MAX - 7, place.stag, 16);
            write.payload(&lie)
        },
    ));
    out.push(one(Expect::Refused, "a read of 4 GiB", |s| {
        let place = told(s, Open);
        s.next(READ_REQUEST).reth(place.addr, place.stag, u32::MAX)
    }));
    out.push(case(
        Expect::Refused,
        "a write that leaves its place on its way",
        |s, _| {
            let place = told(s, Open);
            let addr = place.addr + u64::from(place.len) - MTU as u64;
            let first = s.next(WRITE_FIRST).reth(addr, place.stag, 2 * MTU as u32);
            s.say(&first.payload(&[0xee; MTU]))?;
            let last = s.next(WRITE_LAST).payload(&[0xee; MTU]);
            s.say(&last)
        },
    ));
    out.push(one(
        Expect::Refused,
        "the key of another is invalidated",
        |s| {
            let key = told(s, Foreign).stag;
            let mut send = s.next(SEND_ONLY_INVALIDATE);
            send.rest.extend(key.to_be_bytes());
            send.payload(b"E")
        },
    ));
}

/// Messages that are no messages.
fn messages(out: &mut Vec<Case>) {
    for (name, opcode) in [
        ("a middle of a send", SEND_MIDDLE),
        ("a middle of a write", WRITE_MIDDLE),
    ] {
        out.push(one(
            Expect::Refused,
            format!("{name} without a first"),
            move |s| s.next(opcode).payload(&[0xee; MTU]),
        ));
    }
    out.push(one(Expect::Refused, "a last without a first", |s| {
        s.next(SEND_LAST).payload(b"E")
    }));
    out.push(one(Expect::Refused, "a first that is short", |s| {
        s.next(SEND_FIRST).payload(b"E")
    }));
    out.push(one(
        Expect::Refused,
        "a send that is too long for the receive",
        |s| s.next(SEND_ONLY).payload(&[0xee; 65]),
    ));
    out.push(one(
        Expect::Refused,
        "a packet that is longer than the path MTU",
        |s| s.next(SEND_ONLY).payload(&[0xee; MTU + 4]),
    ));
    for (name, said) in [("more", 15), ("less", 17)] {
        out.push(one(
            Expect::Refused,
            format!("a write of {name} than it says"),
            move |s| {
                let place = told(s, Told::Open);
                let write = s.next(WRITE_ONLY).reth(place.addr, place.stag, said);
                write.payload(&[0xee; 16])
            },
        ));
    }
    out.push(case(
        Expect::Refused,
        "a send in the middle of a write",
        |s, _| {
            let place = told(s, Told::Whole);
            let first = s
                .next(WRITE_FIRST)
                .reth(place.addr, place.stag, 2 * MTU as u32);
            s.say(&first.payload(&[0xee; MTU]))?;
            let send = s.next(SEND_LAST).payload(b"E");
            s.say(&send)
        },
    ));
    out.push(one(
        Expect::Refused,
        "a request to read with a payload",
        |s| {
            let place = told(s, Told::Open);
            s.next(READ_REQUEST)
                .reth(place.addr, place.stag, 16)
                .payload(&[0; 4])
        },
    ));
    out.push(one(Expect::Any, "immediate data that are cut off", |s| {
        let mut send = s.next(SEND_ONLY_IMM);
        send.rest.push(1);
        send
    }));
}

/// Answers that nobody asked for, and packets that do not belong there.
fn floods(out: &mut Vec<Case>, rounds: usize) {
    out.push(case(
        Expect::Ignored,
        "acknowledgements of what was not sent",
        move |s, rng| {
            for _ in 0..rounds * 10 {
                let far = 2 + rng.below(1 << 22) as u32;
                let psn = s.expected.wrapping_add(far) & BITS;
                s.say(&Packet::new(ACK, s.qp, psn).aeth(0x1f, rng.next() as u32))?;
            }
            Ok(())
        },
    ));
    out.push(case(Expect::Ignored, "a flood of NAKs", move |s, rng| {
        for _ in 0..rounds * 10 {
            let far = 2 + rng.below(1 << 22) as u32;
            let psn = s.expected.wrapping_add(far) & BITS;
            let syndrome = [0x60, 0x61, 0x62, 0x63, 0x20, 0x3f, 0x7f][rng.below(7)];
            s.say(&Packet::new(ACK, s.qp, psn).aeth(syndrome, 0))?;
        }
        Ok(())
    }));
    out.push(case(
        Expect::Ignored,
        "answers that nobody asked for",
        move |s, rng| {
            for n in 0..rounds * 4 {
                let psn = s.expected.wrapping_sub(n as u32 & 1) & BITS;
                let read = Packet::new(READ_RESPONSE_ONLY, s.qp, psn).aeth(0x1f, 0);
                s.say(&read.payload(&[0xee; 64]))?;
                let mut atomic = Packet::new(ATOMIC_ACK, s.qp, psn).aeth(0x1f, 0);
                atomic.rest.extend(rng.bytes(8));
                s.say(&atomic)?;
            }
            Ok(())
        },
    ));
    out.push(case(
        Expect::Ignored,
        "packets from far ahead",
        move |s, rng| {
            for _ in 0..rounds * 10 {
                let far = 1 + rng.below(1 << 22) as u32;
                let psn = s.psn.wrapping_add(far);
                s.say(&Packet::new(SEND_ONLY, s.qp, psn).payload(b"Eforged"))?;
            }
            Ok(())
        },
    ));
    out.push(case(
        Expect::Ignored,
        "packets from long ago",
        move |s, rng| {
            for _ in 0..rounds * 10 {
                let far = 2 + rng.below(1 << 22) as u32;
                let psn = s.psn.wrapping_sub(far);
                let place = told(s, Told::Closed);
                let opcode = [SEND_ONLY, WRITE_ONLY, READ_REQUEST, FETCH_ADD][rng.below(4)];
                let packet = Packet::new(opcode, s.qp, psn);
                let packet = match opcode {
                    FETCH_ADD => packet.atomic(place.addr, place.stag, 1, 0),
                    SEND_ONLY => packet.payload(b"Eforged"),
                    READ_REQUEST => packet.reth(place.addr, place.stag, 16),
                    _ => packet.reth(place.addr, place.stag, 16).payload(&[0xee; 16]),
                };
                s.say(&packet)?;
            }
            Ok(())
        },
    ));
    out.push(case(Expect::Ignored, "wrong CRCs", move |s, rng| {
        for _ in 0..rounds * 10 {
            let mut bytes = Packet::new(SEND_ONLY, s.qp, s.psn)
                .payload(b"Eforged")
                .emit();
            let crc = rng.bytes(4);
            // Over IPv4 one CRC in 65,536 is taken for that of another identification: not one whose last bytes are these.
            bytes.extend([crc[0], crc[1], 0, 0]);
            s.wire.send_raw(&bytes)?;
        }
        Ok(())
    }));
    out.push(case(
        Expect::Ignored,
        "other partitions, services and opcodes",
        move |s, _| {
            for opcode in 0..=255 {
                if matches!(opcode, 0x00..=0x17 | CONGESTION) {
                    continue;
                }
                s.say(&Packet::new(opcode, s.qp, s.psn).payload(&[0xee; 32]))?;
            }
            let mut other = Packet::new(SEND_ONLY, s.qp, s.psn).payload(b"Eforged");
            other.pkey = 0x8001;
            s.say(&other)
        },
    ));
    out.push(case(
        Expect::Ignored,
        "packets that are cut off",
        move |s, _| {
            let place = told(s, Told::Open);
            let whole = Packet::new(WRITE_ONLY, s.qp, s.psn).reth(place.addr, place.stag, 16);
            let whole = whole.payload(&[0xee; 16]).emit();
            for len in 0..12 + 16 {
                s.wire.send_bytes(whole[..len].to_vec())?;
                s.wire.send_raw(&whole[..len])?;
            }
            Ok(())
        },
    ));
    out.push(case(
        Expect::Ignored,
        "a flood of congestion notifications",
        move |s, _| {
            for _ in 0..rounds * 10 {
                let mut packet = Packet::new(CONGESTION, s.qp, 0);
                packet.rest.extend([0; 16]);
                s.say(&packet)?;
            }
            Ok(())
        },
    ));
}

fn cases(rounds: usize) -> Vec<Case> {
    let mut out = Vec::new();
    memory(&mut out);
    messages(&mut out);
    floods(&mut out, rounds);
    out.push(case(Expect::Any, "many reads at once", |s, _| {
        for _ in 0..64 {
            let place = told(s, Told::Whole);
            let read = s.next(READ_REQUEST).reth(place.addr, place.stag, place.len);
            s.say(&read)?;
        }
        Ok(())
    }));
    for n in 0..rounds {
        out.push(case(Expect::Any, format!("noise {n}"), |s, rng| {
            for _ in 0..20 {
                let opcode = rng.below(0x18) as u8;
                let mut packet = s.next(opcode);
                packet.flags = rng.next() as u8;
                let place = s.told[rng.below(s.told.len())];
                if rng.below(2) == 0 {
                    let len = rng.below(3 * MTU) as u32;
                    packet = packet.reth(place.addr, place.stag, len);
                }
                let len = rng.below(MTU + 8);
                packet.rest.extend(std::iter::repeat_n(0xee, len));
                s.say(&packet)?;
            }
            Ok(())
        }));
    }
    out
}
