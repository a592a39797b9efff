//! Lies in shared memory, on a connection that has moved there.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use crate::frames::{Tagged, opcode};
use crate::network::Case;
use crate::network::headers;
use crate::rng::Rng;
use crate::shared::files::{ARENA, Entry};
use crate::shared::ring::{BYTES, REFERENCE, Ring, header, word};
use crate::target::{Kind, Session};

/// All of them, and those of the headers, which shared memory can bring as TCP can.
pub fn cases(kind: Kind, seed: u64, rounds: usize) -> Vec<Case> {
    let mut all = headers::segments(kind, seed, rounds);
    all.extend(records());
    all.extend(references());
    all.extend(words());
    all.extend(sockets());
    all.extend(scribbles(seed, rounds));
    if kind == Kind::Verbs {
        all.extend(entries());
        all.push(arena());
    }
    all
}

fn ring(s: &mut Session) -> &mut Ring {
    s.peer.ring.as_mut().expect("a session in shared memory")
}

/// Something that the victim does not mind, through the ring: so that it looks.
fn look(s: &mut Session) -> io::Result<()> {
    let write = Tagged::write(s.open.stag, s.open.addr, &[0xee; 8]);
    s.peer.tagged(&write)
}

fn records() -> Vec<Case> {
    let mut cases = Vec::new();
    for kind in [0_u32, 3, 4, 0x8000_0001, !0] {
        cases.push(Case::ends(
            format!("a record of kind {kind:#x}"),
            move |s| ring(s).record(header(kind, 8), &[0; 8]),
        ));
    }
    let most = crate::meeting::RING - 16;
    for len in [0, most + 1, crate::meeting::RING, 1 << 24, 0x8000_0000, !0] {
        cases.push(Case::ends(format!("a record of {len} bytes"), move |s| {
            ring(s).record(header(BYTES, len), &[0; 64])
        }));
    }
    cases.push(Case::any(
        "a record that is longer than what was pushed",
        move |s| ring(s).record(header(BYTES, most), &[0; 64]),
    ));
    for len in [0, 8, 23, 25, 32, !0] {
        cases.push(Case::ends(
            format!("a reference of {len} bytes"),
            move |s| ring(s).record(header(REFERENCE, len), &[1; 32]),
        ));
    }
    for len in [0_u32, 1, 13, (16 << 20) + 1, 0x7fff_ffff, !0] {
        cases.push(Case::ends(format!("a frame of {len} bytes"), move |s| {
            ring(s).bytes(&len.to_le_bytes())?;
            ring(s).bytes(&[0xee; 64])
        }));
    }
    cases.push(Case::any("a frame of 16 MiB, and nothing of it", |s| {
        ring(s).bytes(&(16_u32 << 20).to_le_bytes())
    }));
    cases.push(Case::any("a frame byte by byte", |s| {
        let ulpdu = Tagged::write(s.open.stag, s.open.addr, &[0xee; 40]).bytes();
        ring(s).bytes(&(ulpdu.len() as u32).to_le_bytes())?;
        ulpdu.iter().try_for_each(|byte| ring(s).bytes(&[*byte]))
    }));
    cases
}

fn references() -> Vec<Case> {
    let mut cases = Vec::new();
    for (name, space, addr, len) in [
        ("of nothing", 1_u64, 0_u64, 0_u64),
        ("that wraps", 1, !0 - 8, 64),
        ("that wraps by one", 1, 1, !0),
        ("of space 2^32", 1 << 32, 0, 64),
        ("of the last space", !0, 0, 64),
    ] {
        cases.push(Case::ends(format!("a reference {name}"), move |s| {
            ring(s).reference(space, addr, len)
        }));
    }
    // What a frame's length and header would be is up to the memory there: zeros, or nothing that can be had.
    for (name, space, addr, len) in [
        ("to a space that there is not", 4_u64, 0_u64, 64_u64),
        ("to space 2^32 - 1", 0xffff_ffff, 0, 64),
        ("to a hole", 1, 1 << 40, 64),
        ("to the end of an arena", 1, ARENA - 8, 8),
        ("over the end of an arena", 1, ARENA - 8, 64),
        ("behind an arena", 1, ARENA, 64),
        ("far behind an arena", 1, 1 << 62, 64),
        ("to all of memory", 0, 0, !0),
        ("to address 0", 0, 0, 64),
        ("to the kernel", 0, 0xffff_8000_0000_0000, 64),
        ("to the private arena's last page", 3, ARENA - 4096, 4096),
    ] {
        cases.push(Case::any(format!("a reference {name}"), move |s| {
            ring(s).reference(space, addr, len)
        }));
        cases.push(Case::any(
            format!("a payload by reference {name}"),
            move |s| {
                let ulpdu = Tagged::write(s.open.stag, s.open.addr, &[]).bytes();
                let whole = (ulpdu.len() as u64).saturating_add(len).min(16 << 20) as u32;
                ring(s).bytes(&whole.to_le_bytes())?;
                ring(s).bytes(&ulpdu)?;
                ring(s).reference(space, addr, len)
            },
        ));
    }
    cases.push(Case::any("a thousand references of a byte", |s| {
        (0..1000).try_for_each(|n| ring(s).reference(1, n, 1))
    }));
    cases
}

/// References to all of an arena: whoever reads it to the end makes its holes into memory.
pub fn holes() -> Vec<Case> {
    vec![
        Case::any("a reference to a whole arena", |s| {
            ring(s).reference(1, 0, ARENA)
        }),
        Case::any("a payload by reference to a whole arena", |s| {
            let ulpdu = Tagged::write(s.open.stag, s.open.addr, &[]).bytes();
            ring(s).bytes(&(16_u32 << 20).to_le_bytes())?;
            ring(s).bytes(&ulpdu)?;
            ring(s).reference(1, 0, ARENA)
        }),
        Case::any(
            "a reference to more of a reading arena than there is",
            |s| ring(s).reference(2, 1, ARENA),
        ),
        Case::any("a Terminate, and a reference to a whole arena", |s| {
            s.peer.message(opcode::TERMINATE, 2, &[0x01, 0x00, 0, 0])?;
            ring(s).reference(1, 0, ARENA)
        }),
    ]
}

fn words() -> Vec<Case> {
    let mut cases = Vec::new();
    for value in [3_u64, 4, 1 << 32, !0] {
        cases.push(Case::ends(format!("an end of {value:#x}"), move |s| {
            ring(s).store(word::END, value)?;
            ring(s).wake()
        }));
    }
    for value in [1_u64, 2] {
        cases.push(Case::any(
            format!("an end of {value}, and data behind it"),
            move |s| {
                ring(s).store(word::END, value)?;
                look(s)?;
                look(s)
            },
        ));
    }
    for value in [1_u64, 8, 12, 4096, 1 << 20, 1 << 63, !0, !7] {
        cases.push(Case::any(format!("a head of {value:#x}"), move |s| {
            ring(s).store(word::HEAD, value)?;
            // Until the victim wants to know how much room it has: answers (of the verbs victim), or nothing.
            for _ in 0..1500 {
                s.peer
                    .send(b"E??????????????????????????????????????????????")?;
                ring(s).store(word::HEAD, value)?;
            }
            Ok(())
        }));
    }
    cases.push(Case::any("a head that goes back", |s| {
        s.peer.send(b"E1")?;
        let _ = s.peer.receive(Duration::from_millis(200));
        for _ in 0..1500 {
            s.peer
                .send(b"E??????????????????????????????????????????????")?;
            ring(s).store(word::HEAD, 0)?;
        }
        Ok(())
    }));
    for (name, which) in [
        ("want_data", word::WANT_DATA),
        ("want_room", word::WANT_ROOM),
        ("doors", word::DOORS),
        ("caps", word::CAPS),
        ("mark", word::MARK),
    ] {
        for value in [1_u64, 0xff, !0] {
            cases.push(Case::any(
                format!("{name} is {value:#x} all the time"),
                move |s| {
                    for _ in 0..200 {
                        ring(s).store(which, value)?;
                        look(s)?;
                    }
                    s.peer.send(b"E")
                },
            ));
        }
    }
    cases.push(Case::any("a mark on what is open, left there", |s| {
        let stag = u64::from(s.open.stag);
        ring(s).store(word::MARK, stag)?;
        look(s)
    }));
    cases.push(Case::any("words of the victim's side", |s| {
        let theirs = ring(s).words.1;
        for word in (0..1024).step_by(128) {
            let segment = &ring(s).segment;
            segment.write_all_at(&[0xff; 8], theirs + word)?;
            look(s)?;
        }
        Ok(())
    }));
    cases.push(Case::any("another head of the segment", |s| {
        ring(s).segment.write_all_at(&[0xff; 16], 0)?;
        look(s)
    }));
    cases
}

/// What comes by the two sockets of a connection that has left them.
fn sockets() -> Vec<Case> {
    let mut cases = Vec::new();
    cases.push(Case::any("wake-ups without end", |s| {
        (0..20_000).try_for_each(|_| ring(s).wake())
    }));
    for len in [2_usize, 256, 257, 4000] {
        cases.push(Case::any(format!("packets of {len} bytes"), move |s| {
            let bytes = vec![b'w'; len];
            for _ in 0..50 {
                let _ = ring(s).socket.send(&bytes, &[]);
            }
            Ok(())
        }));
    }
    cases.push(Case::any("wake-ups with descriptors", |s| {
        let zero = std::fs::File::open("/dev/zero")?;
        for count in [1, 8, 200] {
            let fds = vec![zero.as_fd(); count];
            for _ in 0..20 {
                let _ = ring(s).socket.send(&[1], &fds);
            }
        }
        look(s)
    }));
    cases.push(Case::any("messages of a meeting when it is over", |s| {
        let ring = ring(s);
        for kind in 0..8 {
            let message = crate::shared::unix_socket::message(
                crate::shared::unix_socket::VERSION,
                kind,
                &[0; 64],
            );
            let _ = ring.socket.send(&message, &[]);
        }
        Ok(())
    }));
    cases.push(Case::any("frames by TCP", |s| {
        for _ in 0..20 {
            s.peer.raw(&crate::frames::fpdu(&[0xee; 100]))?;
        }
        look(s)
    }));
    cases.push(Case::any("the end of TCP", |s| {
        s.peer.tcp.shutdown(std::net::Shutdown::Both)?;
        look(s)
    }));
    cases
}

/// Random bytes over random parts of the segment, again and again.
fn scribbles(seed: u64, rounds: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for round in 0..rounds as u64 {
        let seed = seed.wrapping_mul(53).wrapping_add(round);
        cases.push(Case::any(format!("scribbles, seed {seed}"), move |s| {
            let mut rng = Rng::new(seed);
            look(s)?;
            for _ in 0..60 {
                let ring = ring(s);
                let all = 4096 + 2 * ring.len;
                // Mostly the words, then the beginnings of the rings.
                let at = match rng.below(4) {
                    0 => rng.below(2048) as u64 & !7,
                    1 => 128 * rng.below(16) as u64,
                    2 => 4096 + (rng.below(2) as u64) * ring.len + (rng.below(64) as u64) * 8,
                    _ => rng.next() % (all - 64),
                };
                let bytes = match rng.below(3) {
                    0 => (rng.next() >> rng.below(64)).to_ne_bytes().to_vec(),
                    1 => header(1 + rng.below(2) as u32, rng.below(100) as u32)
                        .to_ne_bytes()
                        .to_vec(),
                    _ => {
                        let len = rng.below(64);
                        rng.bytes(len)
                    }
                };
                ring.segment.write_all_at(&bytes, at)?;
                ring.wake()?;
            }
            Ok(())
        }));
    }
    cases
}

/// Entries of our table that lead elsewhere, for a victim that writes to us and reads from us.
fn entries() -> Vec<Case> {
    let good = Entry {
        generation: 2,
        stag: 0x0012_3401,
        qp: 0,
        base: 0,
        len: 4096,
        rights: !0,
        space: 1,
        at: 1 << 20,
    };
    let bad = [
        ("that is right", good),
        (
            "that is always being written",
            Entry {
                generation: 3,
                ..good
            },
        ),
        ("of a space that there is not", Entry { space: 4, ..good }),
        ("of space 2^32 - 1", Entry { space: !0, ..good }),
        ("that is only for reading", Entry { space: 2, ..good }),
        ("that is private", Entry { space: 3, ..good }),
        (
            "over the arena's end",
            Entry {
                at: ARENA - 100,
                ..good
            },
        ),
        ("behind the arena", Entry { at: ARENA, ..good }),
        (
            "that wraps",
            Entry {
                at: !0 - 100,
                ..good
            },
        ),
        (
            "whose length wraps",
            Entry {
                len: !0,
                at: 4096,
                ..good
            },
        ),
        (
            "whose base wraps",
            Entry {
                base: !0 - 100,
                len: !0,
                ..good
            },
        ),
        (
            "of the address 0",
            Entry {
                space: 0,
                at: 0,
                ..good
            },
        ),
        (
            "of the kernel",
            Entry {
                space: 0,
                at: 0xffff_8000_0000_0000,
                ..good
            },
        ),
        (
            "of the last address",
            Entry {
                space: 0,
                at: !0 - 4095,
                ..good
            },
        ),
        ("of no length", Entry { len: 0, ..good }),
        (
            "of another queue pair",
            Entry {
                qp: 0x00ff_ffff,
                ..good
            },
        ),
        ("without rights", Entry { rights: 0, ..good }),
    ];
    let mut cases = Vec::new();
    for (name, entry) in bad {
        for order in [b'W', b'R'] {
            let name = format!("an entry {name}, {}", order as char);
            cases.push(Case::any(name, move |s| {
                let files = s.files.as_ref().expect("a session in shared memory");
                files.own.0.write_all_at(&entry.bytes(), entry.place())?;
                let mut message = vec![order];
                message.extend(entry.stag.to_be_bytes());
                message.extend(64_u64.to_be_bytes());
                message.extend(1024_u32.to_be_bytes());
                s.peer.send(&message)?;
                // It goes through the ring, or is done: "done". (An answer to a Read would have to come from us.)
                let _ = s.peer.receive(Duration::from_millis(30));
                s.peer.message(opcode::SEND, 0, b"E")
            }));
        }
    }
    cases
}

/// All of the arena that we may write, written: regions of this domain change, and nothing else. (`Told::Open` lies in memory without remote
/// rights, which is in another arena; so do those of the witnesses.)
fn arena() -> Case {
    Case::any("the whole arena overwritten", |s| {
        let rw = std::fs::File::from(ring(s).theirs[2].try_clone()?);
        let mut at = 0;
        // Where there is data, not in the holes between.
        while let Ok(data) = rustix::fs::seek(&rw, rustix::fs::SeekFrom::Data(at)) {
            rw.write_all_at(&[0xee; 4096], data & !4095)?;
            at = (data & !4095) + 4096;
        }
        look(s)
    })
}
