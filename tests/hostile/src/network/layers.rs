//! Lies in the messages of what stands on the verbs: EXS and rsockets. The frames that carry them are right.

use std::io;

use crate::frames::{Tagged, opcode};
use crate::network::Case;
use crate::peer::PATIENCE;
use crate::rng::Rng;
use crate::target::{Kind, Session};

/// Those for this victim.
pub fn cases(kind: Kind, seed: u64, rounds: usize) -> Vec<Case> {
    let groups = match kind {
        Kind::Verbs => vec![answers()],
        Kind::Exs => vec![exs_messages(), exs_streams(), exs_noise(seed, rounds)],
        Kind::Packets => vec![exs_messages(), exs_packets(), exs_noise(seed, rounds)],
        Kind::Rsockets => vec![rsockets_messages(), rsockets_noise(seed, rounds)],
    };
    groups.into_iter().flatten().collect()
}

// ---- verbs: lies in answers ----

/// What the verbs victim reads from us, as it asks for it.
struct Asked {
    sink: (u32, u64),
    len: u32,
}

/// Has the victim read from us.
fn asked(s: &mut Session, len: u32) -> io::Result<Asked> {
    let mut order = vec![b'R'];
    order.extend(0x0011_2233_u32.to_be_bytes());
    order.extend(0_u64.to_be_bytes());
    order.extend(len.to_be_bytes());
    s.peer.send(&order)?;
    loop {
        let came = s.peer.segment(PATIENCE)?;
        if came.opcode == opcode::READ_REQUEST && came.payload.len() == 28 {
            let p = &came.payload;
            return Ok(Asked {
                sink: (
                    u32::from_be_bytes(p[..4].try_into().expect("four")),
                    u64::from_be_bytes(p[4..12].try_into().expect("eight")),
                ),
                len: u32::from_be_bytes(p[12..16].try_into().expect("four")),
            });
        }
    }
}

fn response(sink: (u32, u64), len: usize) -> Tagged {
    let mut segment = Tagged::write(sink.0, sink.1, &vec![0xee; len]);
    segment.opcode = opcode::READ_RESPONSE;
    segment
}

fn answers() -> Vec<Case> {
    type Lie = fn(&mut Session, &Asked) -> io::Result<()>;
    let lies: [(&str, Lie); 12] = [
        ("with another STag", |s, a| {
            s.peer.tagged(&response((a.sink.0 ^ 0x100, a.sink.1), 64))
        }),
        ("into the open region", |s, a| {
            s.peer
                .tagged(&response((s.open.stag, s.open.addr), a.len as usize))
        }),
        ("a byte before its place", |s, a| {
            s.peer
                .tagged(&response((a.sink.0, a.sink.1.wrapping_sub(1)), 64))
        }),
        ("a byte behind its place", |s, a| {
            s.peer.tagged(&response((a.sink.0, a.sink.1 + 1), 64))
        }),
        ("a byte too long", |s, a| {
            s.peer.tagged(&response(a.sink, a.len as usize + 1))
        }),
        ("far too long", |s, a| {
            s.peer.tagged(&response(a.sink, 60_000))
        }),
        ("too short", |s, a| {
            s.peer.tagged(&response(a.sink, a.len as usize - 1))
        }),
        ("of no bytes", |s, a| s.peer.tagged(&response(a.sink, 0))),
        ("in segments of which one comes twice", |s, a| {
            let mut segment = response(a.sink, 16);
            segment.last = false;
            s.peer.tagged(&segment)?;
            s.peer.tagged(&segment)
        }),
        ("that wraps", |s, a| {
            s.peer.tagged(&response((a.sink.0, !0), 64))
        }),
        ("twice", |s, a| {
            s.peer.tagged(&response(a.sink, a.len as usize))?;
            s.peer.tagged(&response(a.sink, a.len as usize))
        }),
        ("that goes on when all is there", |s, a| {
            let mut segment = response(a.sink, a.len as usize);
            segment.last = false;
            s.peer.tagged(&segment)?;
            segment.to += u64::from(a.len);
            s.peer.tagged(&segment)
        }),
    ];
    let mut cases = Vec::new();
    for (name, lie) in lies {
        cases.push(Case::ends(format!("a Read's answer {name}"), move |s| {
            let asked = asked(s, 64)?;
            lie(s, &asked)
        }));
    }
    cases.push(Case::any("a Read that is never answered", |s| {
        asked(s, 64).map(drop)
    }));
    cases.push(Case::ends("an atomic's answer for a Read", |s| {
        asked(s, 64)?;
        s.peer.message(opcode::ATOMIC_RESPONSE, 3, &[0; 12])
    }));
    cases.push(Case::any("a Terminate for a Read", |s| {
        asked(s, 64)?;
        s.peer.message(opcode::TERMINATE, 2, &[0x01, 0x01, 0, 0])
    }));
    cases
}

// ---- EXS ----

fn exs(kind: u8, flags: u8, credits: u16, len: u32, rest: &[u8]) -> Vec<u8> {
    let mut out = vec![kind, flags];
    out.extend(credits.to_be_bytes());
    out.extend(len.to_be_bytes());
    out.extend(rest);
    out
}

fn advert(len: u32, seq: u64, phase: u64, addr: u64) -> Vec<u8> {
    let mut rest = seq.to_be_bytes().to_vec();
    rest.extend(phase.to_be_bytes());
    rest.extend(addr.to_be_bytes());
    rest.extend(0x1234_5678_u32.to_be_bytes());
    rest.extend([0; 4]);
    exs(1, 0, 0, len, &rest)
}

/// A PktAdvert or a Source.
fn indexed(kind: u8, len: u32, index: u64, addr: u64) -> Vec<u8> {
    let mut rest = index.to_be_bytes().to_vec();
    rest.extend(addr.to_be_bytes());
    rest.extend(0x1234_5678_u32.to_be_bytes());
    rest.extend([0; 4]);
    exs(kind, 0, 0, len, &rest)
}

/// The immediate data that tells of a Write.
fn told(s: &mut Session, transfer: u8, credits: u16, len: u32) -> io::Result<()> {
    let mut imm = vec![transfer, 0];
    imm.extend(credits.to_be_bytes());
    imm.extend(len.to_be_bytes());
    s.peer.message(opcode::IMMEDIATE, 0, &imm)
}

/// One message, after which the connection ends.
fn message(name: &str, bytes: Vec<u8>) -> Case {
    Case::ends(name, move |s| s.peer.send(&bytes))
}

/// What neither kind of socket can say.
fn exs_messages() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [0, 12, 13, 100, 255] {
        cases.push(message(&format!("kind {kind}"), exs(kind, 0, 0, 0, &[])));
    }
    let bodies = [32_usize, 0, 4, 0, 0, 8, 0, 0, 24, 24, 8];
    for (kind, body) in (1_u8..).zip(bodies) {
        for len in [body + 1, body + 100, body.saturating_sub(1), body / 2] {
            if len != body {
                let name = format!("kind {kind} with a body of {len} bytes");
                cases.push(message(&name, exs(kind, 0, 0, 4, &vec![0; len])));
            }
        }
        let name = format!("kind {kind} with unknown flags");
        cases.push(message(&name, exs(kind, 0x80, 0, 4, &vec![0; body])));
    }
    for len in 0..8 {
        cases.push(message(&format!("a message of {len} bytes"), vec![8; len]));
    }
    for credits in [65, 1000, 0xffff] {
        let name = format!("{credits} credits that were never taken");
        cases.push(message(&name, exs(8, 0, credits, 0, &[])));
    }
    cases.push(Case::ends("messages without credits", |s| {
        // An Ack of nothing is refused: Small ones are right, but for their number. The victim gives credits back meanwhile:
        // so many outrun it somewhere.
        for _ in 0..20_000 {
            s.peer.send(&exs(3, 0, 0, 1, b"x"))?;
        }
        Ok(())
    }));
    // Each is answered by credits sooner or later, so that it depends on the victim how many it takes.
    cases.push(Case::any("Credits without end", |s| {
        for _ in 0..2000 {
            s.peer.send(&exs(8, 0, 0, 0, &[]))?;
        }
        Ok(())
    }));
    for len in [257_u32, 1000, 60_000] {
        let name = format!("a Small of {len} bytes");
        cases.push(message(&name, exs(3, 0, 0, len, &vec![0xee; len as usize])));
    }
    cases.push(message("a Small that says less", exs(3, 0, 0, 3, b"four")));
    cases.push(message(
        "a Small that says more",
        exs(3, 0, 0, 0xffff_fff0, b"four"),
    ));
    cases.push(message(
        "Retracted, which nobody asked for",
        exs(6, 0, 0, 0, &[0; 8]),
    ));
    cases.push(Case::ends("Fin, then data", |s| {
        s.peer.send(&exs(7, 0, 0, 0, &[]))?;
        s.peer.send(&exs(3, 0, 0, 1, b"x"))
    }));
    cases.push(Case::ends("Fin twice", |s| {
        s.peer.send(&exs(7, 0, 0, 0, &[]))?;
        s.peer.send(&exs(7, 0, 0, 0, &[]))
    }));
    for transfer in [0_u8, 4, 5, 6, 8, 255] {
        cases.push(Case::ends(
            format!("immediate data of transfer {transfer}"),
            move |s| told(s, transfer, 0, 1),
        ));
    }
    cases.push(Case::ends("immediate data with credits", |s| {
        told(s, 2, 0xffff, 1)
    }));
    cases
}

fn exs_streams() -> Vec<Case> {
    let mut cases = vec![
        message("an advert of nothing", advert(0, 0, 0, 0)),
        message("an advert that wraps", advert(64, 0, 0, !0 - 8)),
        message("an advert of an odd phase", advert(64, 0, 1, 0)),
        message("an advert of a phase far ahead", advert(64, 0, 1000, 0)),
        message("an advert of the last phase", advert(64, 0, !1, 0)),
        message("an Ack of what is not used", exs(2, 0, 0, 1, &[])),
        message("an Ack of all there is", exs(2, 0, 0, !0, &[])),
        message("an Ack of nothing", exs(2, 0, 0, 0, &[])),
        message("an advert of packets", indexed(9, 64, 0, 0)),
        message("a source of packets", indexed(10, 64, 0, 0)),
        message("the end of a source", exs(11, 0, 0, 4, &[0; 8])),
        message("a Wrote of a packet", exs(4, 3, 0, 4, &[])),
    ];
    cases.push(Case::ends("an advert of a phase that is over", |s| {
        s.peer.send(&advert(64, 0, 2, 0))?;
        s.peer.send(&advert(64, 0, 0, 0))
    }));
    cases.push(Case::any("adverts of places that there are not", |s| {
        // The victim echoes what it gets, into these.
        for n in 0..20 {
            s.peer.send(&advert(1 << 30, n, 0, 0x7fff_0000_0000 << n))?;
        }
        s.peer.send(&exs(3, 0, 0, 100, &[0xee; 100]))
    }));
    cases.push(Case::ends(
        "a second Retract before the answer to the first",
        |s| {
            for _ in 0..50 {
                s.peer.send(&exs(5, 0, 0, 0, &[]))?;
            }
            Ok(())
        },
    ));
    for len in [0_u32, 1 << 20, (1 << 20) + 1, !0] {
        let name = format!("{len} bytes written to the buffer");
        let lie = move |s: &mut Session| told(s, 2, 0, len);
        // All of the buffer is what an honest peer may write: it never wrote it, which only hurts itself.
        cases.push(if len == 1 << 20 {
            Case::any(name, lie)
        } else {
            Case::ends(name, lie)
        });
    }
    cases.push(Case::ends(
        "more written to the buffer than it takes",
        |s| {
            for _ in 0..64 {
                told(s, 2, 0, 1 << 19)?;
            }
            Ok(())
        },
    ));
    cases.push(Case::ends(
        "a direct transfer of more than was advertised",
        |s| told(s, 1, 0, !0),
    ));
    cases.push(Case::ends("a direct transfer of nothing", |s| {
        told(s, 1, 0, 0)
    }));
    cases
}

fn exs_packets() -> Vec<Case> {
    vec![
        message("an advert of a stream", advert(64, 0, 0, 0)),
        message("an Ack", exs(2, 0, 0, 1, &[])),
        message("an advert of packets that wraps", indexed(9, 64, 0, !0 - 8)),
        message("an advert of packets out of order", indexed(9, 64, 7, 0)),
        message("the last advert of packets", indexed(9, 64, !0, 0)),
        message("a source where the receiver adverts", indexed(10, 64, 0, 0)),
        message(
            "the end of a source where there is none",
            exs(11, 0, 0, 4, &[0; 8]),
        ),
        message("a Wrote into the buffer", exs(4, 2, 0, 4, &[])),
        Case::ends("an indirect transfer", |s| told(s, 2, 0, 16)),
        Case::ends("a packet longer than any advert", |s| told(s, 3, 0, !0)),
        Case::any("adverts that nobody can reach", |s| {
            for n in 0..20 {
                s.peer.send(&indexed(9, 0x4000_0000, n, 0x7fff_0000_0000))?;
            }
            s.peer.send(&exs(3, 0, 0, 100, &[0xee; 100]))
        }),
    ]
}

fn exs_noise(seed: u64, rounds: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for round in 0..rounds as u64 {
        let seed = seed.wrapping_mul(31).wrapping_add(round);
        cases.push(Case::any(
            format!("random messages, seed {seed}"),
            move |s| {
                let mut rng = Rng::new(seed);
                for _ in 0..40 {
                    let (len, small) = (rng.below(300) as u32, rng.below(200));
                    let number = rng.next() >> rng.below(64);
                    let bytes = match rng.below(8) {
                        0 => advert(len, number, number & !1, number),
                        1 => indexed(9, len, number, number),
                        2 => exs(2, 0, 0, len, &[]),
                        3 => exs(3, 0, 0, small as u32, &vec![0xee; small]),
                        4 => exs(5, 0, 0, 0, &[]),
                        5 => exs(6, 0, 0, 0, &number.to_be_bytes()),
                        6 => {
                            let write = Tagged::write(s.open.stag, s.open.addr, &vec![0xee; small]);
                            s.peer.tagged(&write)?;
                            told(s, 1 + rng.below(3) as u8, 0, small as u32)?;
                            continue;
                        }
                        _ => {
                            let kind = rng.next() as u8;
                            let rest = rng.bytes(small);
                            exs(kind, rng.next() as u8 & 1, 0, len, &rest)
                        }
                    };
                    s.peer.send(&bytes)?;
                }
                Ok(())
            },
        ));
    }
    cases
}

// ---- rsockets ----

fn word(s: &mut Session, kind: u32, value: u32) -> io::Result<()> {
    s.peer.send(&(kind << 29 | value).to_le_bytes())
}

/// Bytes of a half of the victim's receive buffer.
fn half(s: &Session) -> u32 {
    s.open.len / 2
}

/// Writes an entry of the victim's table: address, key, length.
fn entry(s: &mut Session, index: u64, addr: u64, key: u32, len: u32) -> io::Result<()> {
    let table = u64::from_be_bytes(s.reply[8..16].try_into().expect("eight"));
    let stag = u32::from_be_bytes(s.reply[16..20].try_into().expect("four"));
    let mut bytes = addr.to_le_bytes().to_vec();
    bytes.extend(key.to_le_bytes());
    bytes.extend(len.to_le_bytes());
    s.peer
        .tagged(&Tagged::write(stag, table + 16 * index, &bytes))
}

fn rsockets_messages() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [1, 2, 3, 5] {
        cases.push(Case::ends(
            format!("kind {kind}, which is reserved"),
            move |s| word(s, kind, 1),
        ));
    }
    for value in [3, 4, 100, 0x1fff_ffff] {
        cases.push(Case::ends(format!("Control {value}"), move |s| {
            word(s, 7, value)
        }));
    }
    for len in [0_usize, 1, 3, 5, 8, 100, 4096] {
        cases.push(Case::ends(format!("a Send of {len} bytes"), move |s| {
            s.peer.send(&vec![0; len])
        }));
    }
    for more in [1_u32, 100, 0x1000_0000] {
        cases.push(Case::ends(
            format!("Data of {more} bytes more than there is room for"),
            move |s| {
                let len = 2 * half(s) + more;
                word(s, 0, len & 0x1fff_ffff)
            },
        ));
    }
    cases.push(Case::ends("Data beyond what was granted", |s| {
        let half = half(s);
        for _ in 0..1000 {
            word(s, 0, half)?;
        }
        Ok(())
    }));
    // The victim sends back what it reads, until there is no more room for that: then it reads no more, and gives no credits back.
    cases.push(Case::ends("Data without credits", |s| {
        for _ in 0..5000 {
            word(s, 0, 128)?;
        }
        Ok(())
    }));
    // Of these each gives its credit back at once, so that it depends on the victim how many it takes.
    cases.push(Case::any("Data of no bytes without end", |s| {
        for _ in 0..5000 {
            word(s, 0, 0)?;
        }
        Ok(())
    }));
    for index in [4_u32, 5, 127, 128, 0x1fff_ffff] {
        cases.push(Case::ends(format!("Map of entry {index}"), move |s| {
            word(s, 6, index)
        }));
    }
    cases.push(Case::ends("an entry behind the tables", |s| {
        entry(s, 64, 1, 2, 3)
    }));
    cases.push(Case::any("a map whose offset and length wrap", |s| {
        let table = u64::from_be_bytes(s.reply[8..16].try_into().expect("eight"));
        let stag = u32::from_be_bytes(s.reply[16..20].try_into().expect("four"));
        s.peer
            .tagged(&Tagged::write(stag, table + 32, &[0xff; 24]))?;
        word(s, 6, 0)?;
        word(s, 6, 0)
    }));
    type Table = (&'static str, u64, u32);
    let tables: [Table; 5] = [
        ("of no bytes", 0x1000, 0),
        ("of 4 GiB", 0x1000, !0),
        ("that wrap", !0 - 4, 4096),
        ("of one byte", 0x1000, 1),
        ("at 0", 0, 65536),
    ];
    for (name, addr, len) in tables {
        cases.push(Case::any(format!("an echo into halves {name}"), move |s| {
            // The echo fills the half of the greeting, then goes on with entry 1, then 0, and so on.
            for round in 0..8_u64 {
                entry(s, round & 1, addr, 0x1234_5601, len)?;
                word(s, 4, 384 + round as u32)?;
                let data = vec![0xee; 8192];
                s.peer.tagged(&Tagged::write(
                    s.open.stag,
                    s.open.addr + 8192 * round,
                    &data,
                ))?;
                word(s, 0, 8192)?;
            }
            Ok(())
        }));
    }
    for credit in [0_u32, 1, 0x8000, 0xffff, 0x1_0000, 0x1fff_ffff] {
        cases.push(Case::any(format!("Credit {credit:#x}"), move |s| {
            word(s, 4, credit)?;
            s.peer
                .tagged(&Tagged::write(s.open.stag, s.open.addr, &[0xee; 100]))?;
            word(s, 0, 100)?;
            word(s, 4, credit)
        }));
    }
    cases.push(Case::any("Credits without end", |s| {
        for n in 0..2000 {
            word(s, 4, n)?;
        }
        Ok(())
    }));
    for control in 0..3 {
        cases.push(Case::any(
            format!("Control {control} again and again, and Data behind it"),
            move |s| {
                for _ in 0..20 {
                    word(s, 7, control)?;
                }
                word(s, 0, 1)
            },
        ));
    }
    cases
}

fn rsockets_noise(seed: u64, rounds: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for round in 0..rounds as u64 {
        let seed = seed.wrapping_mul(37).wrapping_add(round);
        cases.push(Case::any(
            format!("random messages, seed {seed}"),
            move |s| {
                let mut rng = Rng::new(seed);
                for _ in 0..60 {
                    match rng.below(6) {
                        0 => {
                            let (addr, len) =
                                (rng.next() >> rng.below(64), rng.below(70_000) as u32);
                            let key = rng.next() as u32;
                            entry(s, rng.below(2) as u64, addr, key, len)?;
                        }
                        1 => word(s, 4, rng.below(0x1_0000) as u32)?,
                        2 => word(s, 0, rng.below(200) as u32)?,
                        3 => word(s, 6, rng.below(6) as u32)?,
                        4 => {
                            let len = rng.below(200) as u32;
                            let imm = u64::from(len).to_be_bytes();
                            s.peer.message(opcode::IMMEDIATE, 0, &imm)?;
                        }
                        _ => word(s, rng.below(8) as u32, rng.below(8) as u32)?,
                    }
                }
                Ok(())
            },
        ));
    }
    cases
}
