//! Lies in the headers of MPA, DDP and RDMAP.

use crate::frames::{Tagged, Untagged, atomic_request, fpdu, fpdu_with, opcode, read_request};
use crate::network::Case;
use crate::rng::Rng;
use crate::target::{Kind, Place, Session, Told};

/// What is written where nothing may be written.
const BAD: u8 = 0xee;

/// All that TCP can bring.
pub fn cases(kind: Kind, seed: u64, rounds: usize) -> Vec<Case> {
    let mut all = frames();
    all.extend(segments(kind, seed, rounds));
    all.extend(noise(seed, rounds));
    all
}

/// Those in whole segments, which shared memory can bring as well.
pub fn segments(kind: Kind, seed: u64, rounds: usize) -> Vec<Case> {
    let mut all = controls();
    all.extend(messages());
    all.extend(places(seed));
    if kind == Kind::Verbs {
        all.extend(told());
    }
    all.extend(reads());
    all.extend(floods());
    all.extend(mutations(seed, rounds));
    all
}

/// A Write into the open place, as it should be.
fn good(session: &Session) -> Tagged {
    Tagged::write(session.open.stag, session.open.addr, &[BAD; 8])
}

fn frames() -> Vec<Case> {
    let mut cases = Vec::new();
    for len in 0..18_usize {
        cases.push(Case::ends(
            format!("untagged header of {len} bytes"),
            move |s| {
                let whole = Untagged::new(opcode::SEND, 0, s.peer.msn[0], &[]).bytes();
                s.peer.fpdu(&whole[..len])
            },
        ));
    }
    for len in 1..14_usize {
        cases.push(Case::ends(
            format!("tagged header of {len} bytes"),
            move |s| {
                let whole = good(s).bytes();
                s.peer.fpdu(&whole[..len])
            },
        ));
    }
    for error in [1, 1 << 31, !0] {
        cases.push(Case::ends(format!("CRC with error {error:#x}"), move |s| {
            let ulpdu = good(s).bytes();
            let frame = fpdu_with(ulpdu.len() as u16, &ulpdu, 0, error);
            s.peer.raw(&frame)
        }));
    }
    for by in [1_u16, 2, 4, 0xff00] {
        cases.push(Case::ends(
            format!("length {by} too long, then more"),
            move |s| {
                let ulpdu = good(s).bytes();
                let frame = fpdu_with(ulpdu.len() as u16 + by, &ulpdu, 0, 0);
                s.peer.raw(&frame)?;
                s.peer.raw(&vec![BAD; usize::from(by) + 64])
            },
        ));
    }
    cases.push(Case::ends("length too short", |s| {
        let ulpdu = good(s).bytes();
        s.peer.raw(&fpdu_with(14, &ulpdu, 0, 0))?;
        s.peer.raw(&[BAD; 64])
    }));
    cases.push(Case::any("pad that is not zero", |s| {
        let mut segment = good(s);
        segment.payload.push(BAD);
        let ulpdu = segment.bytes();
        s.peer.raw(&fpdu_with(ulpdu.len() as u16, &ulpdu, 0xff, 0))
    }));
    for keep in [1_usize, 2, 3, 10, 20, 27] {
        cases.push(Case::any(
            format!("cut after {keep} bytes of a frame"),
            move |s| {
                let frame = fpdu(&good(s).bytes());
                s.peer.raw(&frame[..keep])
            },
        ));
    }
    cases
}

fn controls() -> Vec<Case> {
    let mut cases = Vec::new();
    for version in [0_u8, 2, 3] {
        cases.push(Case::ends(
            format!("DDP version {version}, tagged"),
            move |s| {
                let mut ulpdu = good(s).bytes();
                ulpdu[0] = ulpdu[0] & !3 | version;
                s.peer.fpdu(&ulpdu)
            },
        ));
        cases.push(Case::ends(
            format!("DDP version {version}, untagged"),
            move |s| {
                let mut ulpdu = Untagged::new(opcode::SEND, 0, s.peer.msn[0], b"E").bytes();
                ulpdu[0] = ulpdu[0] & !3 | version;
                s.peer.fpdu(&ulpdu)
            },
        ));
        cases.push(Case::ends(
            format!("RDMAP version {version}, tagged"),
            move |s| {
                let mut ulpdu = good(s).bytes();
                ulpdu[1] = ulpdu[1] & 0x3f | version << 6;
                s.peer.fpdu(&ulpdu)
            },
        ));
        cases.push(Case::ends(
            format!("RDMAP version {version}, untagged"),
            move |s| {
                let mut ulpdu = Untagged::new(opcode::SEND, 0, s.peer.msn[0], b"E").bytes();
                ulpdu[1] = ulpdu[1] & 0x3f | version << 6;
                s.peer.fpdu(&ulpdu)
            },
        ));
    }
    for code in 0..16_u8 {
        if code != opcode::WRITE {
            cases.push(Case::ends(format!("opcode {code}, tagged"), move |s| {
                let segment = Tagged {
                    opcode: code,
                    ..good(s)
                };
                s.peer.tagged(&segment)
            }));
        }
        for queue in [0_u32, 1, 2, 3, 4, 0x8000_0000, !0] {
            let lie = move |s: &mut Session| {
                // The number is the right one, so that nothing else is wrong.
                let msn = if queue == 0 { s.peer.msn[0] } else { 1 };
                let mut segment = Untagged::new(code, queue, msn, &[BAD; 8]);
                segment.word = 0x0bad_0bad;
                s.peer.untagged(&segment)
            };
            let name = format!("opcode {code} on queue {queue:#x}");
            let legal = queue == 0 && matches!(code, 3 | 5 | 8 | 9);
            cases.push(if legal {
                Case::any(name, lie)
            } else {
                Case::ends(name, lie)
            });
        }
    }
    cases
}

fn messages() -> Vec<Case> {
    let mut cases = Vec::new();
    for by in [-1_i32, 1, 2, 1000, i32::MAX, i32::MIN] {
        cases.push(Case::ends(
            format!("sequence number off by {by}"),
            move |s| {
                let msn = s.peer.msn[0].wrapping_add_signed(by);
                s.peer.untagged(&Untagged::new(opcode::SEND, 0, msn, b"E"))
            },
        ));
    }
    for mo in [1_u32, 4, 0x7fff_ffff, 0x8000_0000, !0 - 3, !0] {
        for last in [true, false] {
            cases.push(Case::ends(
                format!("begins at offset {mo:#x}, last {last}"),
                move |s| {
                    let mut segment = Untagged::new(opcode::SEND, 0, s.peer.msn[0], b"Elies");
                    segment.mo = mo;
                    segment.last = last;
                    s.peer.untagged(&segment)
                },
            ));
        }
    }
    for second in [0_u32, 3, 5, 0xffff_fff0] {
        cases.push(Case::ends(
            format!("four bytes, then offset {second:#x}"),
            move |s| {
                let mut segment = Untagged::new(opcode::SEND, 0, s.peer.msn[0], b"Elie");
                segment.last = false;
                s.peer.untagged(&segment)?;
                segment.mo = second;
                segment.last = true;
                s.peer.untagged(&segment)
            },
        ));
    }
    cases.push(Case::ends("a message that never ends", |s| {
        let mut segment = Untagged::new(opcode::SEND, 0, s.peer.msn[0], &[b'E'; 1024]);
        segment.last = false;
        for _ in 0..4096 {
            s.peer.untagged(&segment)?;
            segment.mo = segment.mo.wrapping_add(1024);
        }
        Ok(())
    }));
    cases.push(Case::ends(
        "one longer than any receive, in one segment",
        |s| s.peer.send(&vec![b'E'; 60000]),
    ));
    cases.push(Case::any("segments of no bytes without end", |s| {
        let mut segment = Untagged::new(opcode::SEND, 0, s.peer.msn[0], &[]);
        segment.last = false;
        for _ in 0..2000 {
            s.peer.untagged(&segment)?;
        }
        Ok(())
    }));
    cases.push(Case::ends("another opcode in the second segment", |s| {
        let mut segment = Untagged::new(opcode::SEND, 0, s.peer.msn[0], b"Elie");
        segment.last = false;
        s.peer.untagged(&segment)?;
        segment.opcode = opcode::IMMEDIATE;
        segment.mo = 4;
        segment.last = true;
        s.peer.untagged(&segment)
    }));
    for len in [0_usize, 1, 7] {
        cases.push(Case::ends(
            format!("immediate data of {len} bytes"),
            move |s| s.peer.message(opcode::IMMEDIATE, 0, &vec![BAD; len]),
        ));
    }
    for to_open in [true, false] {
        cases.push(Case::ends(
            format!("invalidates a region, open {to_open}"),
            move |s| {
                let word = if to_open { s.open.stag } else { 0x7777_7777 };
                let mut segment = Untagged::new(opcode::SEND_INVALIDATE, 0, s.peer.msn[0], b"E");
                segment.word = word;
                s.peer.untagged(&segment)
            },
        ));
    }
    for len in 0..24_usize {
        cases.push(Case::any(format!("Terminate of {len} bytes"), move |s| {
            let bytes: Vec<u8> = (0..len).map(|n| if n == 2 { 0xe0 } else { BAD }).collect();
            s.peer.message(opcode::TERMINATE, 2, &bytes)
        }));
    }
    cases
}

/// Writes to places that are not open.
fn places(seed: u64) -> Vec<Case> {
    let mut cases = Vec::new();
    let mut write = |name: String, at: Box<dyn Fn(&Place) -> Tagged>| {
        cases.push(Case::ends(name, move |s| {
            let segment = at(&s.open);
            s.peer.tagged(&segment)
        }));
    };
    type Where = fn(&Place) -> (u64, usize);
    let edges: [(&str, Where); 11] = [
        ("a byte before it", |p| (p.addr.wrapping_sub(1), 1)),
        ("over its beginning", |p| (p.addr.wrapping_sub(4), 8)),
        ("over its end", |p| {
            ((p.addr + u64::from(p.len)).wrapping_sub(4), 8)
        }),
        ("right behind it", |p| (p.addr + u64::from(p.len), 1)),
        ("a page before it", |p| (p.addr.wrapping_sub(4096), 64)),
        ("a page behind it", |p| {
            (p.addr + u64::from(p.len) + 4096, 64)
        }),
        ("4 GiB further", |p| (p.addr.wrapping_add(1 << 32), 8)),
        ("half of all memory further", |p| {
            (p.addr.wrapping_add(1 << 63), 8)
        }),
        ("the last byte of all", |_| (!0, 1)),
        ("over the end of all", |_| (!0 - 3, 16)),
        ("an end that wraps to it", |p| (p.addr.wrapping_sub(8), 16)),
    ];
    for (name, at) in edges {
        write(
            format!("Write {name}"),
            Box::new(move |p| {
                let (to, len) = at(p);
                Tagged::write(p.stag, to, &vec![BAD; len.min(65000)])
            }),
        );
    }
    let mut rng = Rng::new(seed);
    let mut changes: Vec<u32> = (0..32).map(|bit| 1 << bit).collect();
    changes.extend([0xff, 0xff00, 0xffff_ff00, !0]);
    changes.extend((0..24).map(|_| rng.next() as u32 | 1));
    for change in changes {
        write(
            format!("Write with STag ^ {change:#x}"),
            Box::new(move |p| Tagged::write(p.stag ^ change, p.addr, &[BAD; 8])),
        );
    }
    for stag in [0, 1, 0xff, 0x100, !0] {
        write(
            format!("Write with STag {stag:#x}"),
            Box::new(move |p| Tagged::write(stag, p.addr, &[BAD; 8])),
        );
    }
    cases.push(Case::ends(
        "the second segment of a Write behind its end",
        |s| {
            let mut segment = good(s);
            segment.last = false;
            s.peer.tagged(&segment)?;
            segment.to = s.open.addr + u64::from(s.open.len);
            segment.last = true;
            s.peer.tagged(&segment)
        },
    ));
    cases.push(Case::any("a Write of no bytes to nowhere", |s| {
        s.peer.tagged(&Tagged::write(0x0bad_0bad, !0, &[]))
    }));
    cases.push(Case::any("a Write that never ends", |s| {
        let mut segment = good(s);
        segment.last = false;
        for _ in 0..2000 {
            s.peer.tagged(&segment)?;
        }
        Ok(())
    }));
    cases
}

/// STags that the verbs victim told, used against their rights.
fn told() -> Vec<Case> {
    let mut cases = Vec::new();
    for which in [Told::ReadOnly, Told::Closed, Told::Foreign, Told::Stale] {
        let at = move |s: &Session| s.told[which as usize];
        cases.push(Case::ends(format!("Write to {which:?}"), move |s| {
            let place = at(s);
            s.peer
                .tagged(&Tagged::write(place.stag, place.addr, &[BAD; 64]))
        }));
        cases.push(Case::ends(format!("FetchAdd at {which:?}"), move |s| {
            let place = at(s);
            let ask = atomic_request(0, 1, place.stag, place.addr, [1, 0, 0, 0]);
            s.peer.message(opcode::ATOMIC_REQUEST, 1, &ask)
        }));
        cases.push(Case::ends(
            format!("Read Response to {which:?}"),
            move |s| {
                let place = at(s);
                let mut segment = Tagged::write(place.stag, place.addr, &[BAD; 64]);
                segment.opcode = opcode::READ_RESPONSE;
                s.peer.tagged(&segment)
            },
        ));
        if which != Told::ReadOnly {
            cases.push(Case::ends(format!("Read from {which:?}"), move |s| {
                let place = at(s);
                let ask = read_request((1, 0), 64, (place.stag, place.addr));
                s.peer.message(opcode::READ_REQUEST, 1, &ask)
            }));
        }
        cases.push(Case::ends(
            format!("Send that invalidates {which:?}"),
            move |s| {
                let place = at(s);
                let mut segment = Untagged::new(opcode::SEND_INVALIDATE, 0, s.peer.msn[0], b"E");
                segment.word = place.stag;
                s.peer.untagged(&segment)
            },
        ));
    }
    cases
}

fn reads() -> Vec<Case> {
    let mut cases = Vec::new();
    for len in [0_usize, 4, 27, 29, 100] {
        cases.push(Case::ends(
            format!("Read Request of {len} bytes"),
            move |s| {
                let mut ask = read_request((1, 0), 8, (s.open.stag, s.open.addr));
                ask.resize(len, 0);
                s.peer.message(opcode::READ_REQUEST, 1, &ask)
            },
        ));
    }
    for (size, off) in [
        (!0_u32, 0_u64),
        (1 << 31, 0),
        (8, !0),
        (8, !7),
        (!0, !0),
        (1, 1 << 40),
    ] {
        cases.push(Case::ends(
            format!("Read of {size:#x} bytes at {off:#x}"),
            move |s| {
                let source = (s.open.stag, s.open.addr.wrapping_add(off));
                s.peer
                    .message(opcode::READ_REQUEST, 1, &read_request((1, 0), size, source))
            },
        ));
    }
    cases.push(Case::ends("a Read Request that goes on", |s| {
        let ask = read_request((1, 0), 8, (s.open.stag, s.open.addr));
        let mut segment = Untagged::new(opcode::READ_REQUEST, 1, 1, &ask);
        segment.last = false;
        s.peer.untagged(&segment)?;
        segment.mo = 28;
        segment.last = true;
        s.peer.untagged(&segment)
    }));
    cases.push(Case::ends("the second Read Request first", |s| {
        let ask = read_request((1, 0), 8, (s.open.stag, s.open.addr));
        s.peer
            .untagged(&Untagged::new(opcode::READ_REQUEST, 1, 2, &ask))
    }));
    for len in [0_usize, 12, 51, 53] {
        cases.push(Case::ends(
            format!("Atomic Request of {len} bytes"),
            move |s| {
                let mut ask = atomic_request(0, 1, s.open.stag, s.open.addr, [1, 0, 0, 0]);
                ask.resize(len, 0);
                s.peer.message(opcode::ATOMIC_REQUEST, 1, &ask)
            },
        ));
    }
    for (name, off, code) in [
        ("FetchAdd that is not aligned", 1_u64, 0_u32),
        ("FetchAdd over the end", u64::MAX, 0),
        ("CompareSwap that is not aligned", 4, 1),
        ("FetchAdd before the beginning", 0_u64.wrapping_sub(8), 0),
        ("unknown atomic operation", 0, 15),
    ] {
        cases.push(Case::ends(name, move |s| {
            let end = u64::from(s.open.len);
            let off = if off == u64::MAX { end } else { off };
            let to = s.open.addr.wrapping_add(off);
            let ask = atomic_request(code, 1, s.open.stag, to, [!0; 4]);
            s.peer.message(opcode::ATOMIC_REQUEST, 1, &ask)
        }));
    }
    cases.push(Case::ends("Atomic Response that nobody asked for", |s| {
        s.peer.message(opcode::ATOMIC_RESPONSE, 3, &[BAD; 12])
    }));
    cases
}

/// More of what is allowed than is allowed.
fn floods() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.push(Case::ends(
        "2,000 Sends, whatever receives there are",
        |s| {
            for _ in 0..2000 {
                // Nothing that a victim would take for a whole message of its own protocol and answer.
                s.peer.send(&[b'?'; 4])?;
            }
            Ok(())
        },
    ));
    for size in [0_u32, 1, 4096] {
        cases.push(Case::any(
            format!("2,000 Reads of {size} bytes, and nothing fetched"),
            move |s| {
                let ask = read_request((1, 0), size, (s.open.stag, s.open.addr));
                for _ in 0..2000 {
                    s.peer.message(opcode::READ_REQUEST, 1, &ask)?;
                }
                Ok(())
            },
        ));
    }
    cases.push(Case::any("2,000 FetchAdds, and nothing fetched", |s| {
        for n in 0..2000 {
            let ask = atomic_request(0, n, s.open.stag, s.open.addr, [1, 0, 0, 0]);
            s.peer.message(opcode::ATOMIC_REQUEST, 1, &ask)?;
        }
        Ok(())
    }));
    cases.push(Case::any("2,000 Terminates", |s| {
        for _ in 0..2000 {
            s.peer.message(opcode::TERMINATE, 2, &[0x01, 0x00, 0, 0])?;
        }
        Ok(())
    }));
    cases.push(Case::any("a Terminate for each FPDU of our own", |s| {
        for _ in 0..500 {
            let write = good(s);
            s.peer.tagged(&write)?;
            s.peer.message(opcode::TERMINATE, 2, &[0x11, 0x01, 0, 0])?;
        }
        Ok(())
    }));
    cases
}

/// Frames that were right, with some bytes changed and the CRC made good again.
fn mutations(seed: u64, rounds: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for round in 0..rounds as u64 {
        let seed = seed.wrapping_mul(1_000_003).wrapping_add(round);
        cases.push(Case::any(format!("changed bytes, seed {seed}"), move |s| {
            let mut rng = Rng::new(seed);
            for _ in 0..6 {
                let mut ulpdu = match rng.below(4) {
                    0 => Untagged::new(opcode::SEND, 0, s.peer.msn[0], &rng.bytes(24)).bytes(),
                    1 => {
                        let ask = read_request((1, 0), 16, (s.open.stag, s.open.addr));
                        Untagged::new(opcode::READ_REQUEST, 1, 1, &ask).bytes()
                    }
                    2 => {
                        let ask = atomic_request(0, 1, s.open.stag, s.open.addr, [1, 0, 0, 0]);
                        Untagged::new(opcode::ATOMIC_REQUEST, 1, 1, &ask).bytes()
                    }
                    _ => Tagged::write(s.open.stag, s.open.addr, &rng.bytes(32)).bytes(),
                };
                for _ in 0..=rng.below(3) {
                    let at = rng.below(ulpdu.len());
                    ulpdu[at] = rng.next() as u8;
                }
                s.peer.fpdu(&ulpdu)?;
            }
            Ok(())
        }));
    }
    cases
}

/// Bytes of no meaning at all.
fn noise(seed: u64, rounds: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for round in 0..rounds as u64 / 4 {
        let seed = seed.wrapping_mul(1_000_033).wrapping_add(round);
        cases.push(Case::any(format!("noise, seed {seed}"), move |s| {
            let mut rng = Rng::new(seed);
            let len = 1 + rng.below(3000);
            s.peer.raw(&rng.bytes(len))
        }));
    }
    cases
}
