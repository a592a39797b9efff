//! Peers that met their victim in shared memory and then write invalid data there: into the rings, as references, over the whole segment. The victim ends in
//! order or continues, each request has one completion, no byte outside changes, and a connection of the same device is not affected.

use std::os::unix::fs::FileExt;

use weft_conformance::bed::{Rng, take, until};
use weft_conformance::local::{Local, RING, frame, head};
use weft_conformance::raw::{Raw, send, tagged, write};
use weft_conformance::victim::{Bystander, READ_ID, REGION, Role, Victim, Wire};
use weft_ring::Ref;
use weft_verbs::{Device, QpState, WcStatus};
use weft_wire::rdmap::{Opcode, TaggedError, TermError, UntaggedError};

const ROLES: [Role; 2] = [Role::Initiator, Role::Responder];

fn local(raw: &Raw) -> &Local {
    raw.local.as_ref().expect("shared memory")
}

/// Checks that the victim has ended, each request has its completion, and none of its memory has changed.
fn assert_over(victim: &Victim, what: &str) {
    until(what, || victim.qp.state() == QpState::Error);
    let wc = take(&victim.scq, 1)[0];
    assert_eq!(
        (wc.wr_id, wc.status),
        (READ_ID, WcStatus::WrFlushErr),
        "{what}: {wc:?}"
    );
    for wc in take(&victim.rcq, 3) {
        assert_eq!(wc.status, WcStatus::WrFlushErr, "{what}: {wc:?}");
    }
    victim.assert_untouched(0);
}

/// Runs an action of the peer, which then leaves; the victim has ended by then or ends because of that.
fn scribbled(device: &Device, bystander: &Bystander, what: &str, act: impl Fn(&Local, &Victim)) {
    for role in ROLES {
        let (victim, raw) = Victim::on(device, role, Wire::Local, 3);
        act(local(&raw), &victim);
        local(&raw).poke();
        bystander.ping();
        drop(raw);
        assert_over(&victim, what);

        bystander.ping();
    }
}

#[test]
fn references_to_anywhere() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    for space in [0, 1, 2, 3, 4, 9, u32::MAX] {
        for addr in [0, 8, 1 << 20, (1 << 46) - 8, 1 << 47, u64::MAX - (1 << 20)] {
            let what = format!("space {space}, address {addr:#x}");
            scribbled(&device, &bystander, &what, |local, victim| {
                // A message that fits its receive, and an allowed write: only the payload is invalid.
                local.send(&head(&write(victim.write_only.rkey(), 0, &[]), 64));
                let r = Ref {
                    space,
                    addr,
                    len: 64,
                };
                // Space 2 of an empty domain is a hole in its file, which reads as zeroes.
                if matches!(space, 1..=3) && addr < 1 << 46 {
                    return;
                }
                assert_eq!(local.end.push_ref(r), Ok(true));
                local.publish();
            });
        }
    }
}

/// A peer that shows no bytes at the address that it names may not be the process that the kernel names: its memory is not accessed by number.
#[test]
fn references_into_a_process_that_was_not_recognised() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    let secret = Box::new([0x5e; 64]);
    scribbled(&device, &bystander, "its own memory", |local, victim| {
        local.send(&head(&write(victim.write_only.rkey(), 0, &[]), 64));
        let r = Ref {
            space: 0,
            addr: secret.as_ptr() as u64,
            len: 64,
        };
        assert_eq!(local.end.push_ref(r), Ok(true));
        local.publish();
        let over = || victim.qp.state() == QpState::Error;
        until("the end", || {
            over() || local.end.consumed() == Ok(local.end.pushed())
        });
        assert!(over(), "the bytes were fetched");
    });
}

#[test]
fn references_of_any_length() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    for len in [1, 1 << 20, 1 << 40, u64::MAX - (1 << 47)] {
        scribbled(&device, &bystander, "no frame around it", |local, _| {
            let r = Ref {
                space: 7,
                addr: 1 << 40,
                len,
            };
            assert_eq!(local.end.push_ref(r), Ok(true));
            local.publish();
        });
    }
}

#[test]
fn frames_of_any_length() {
    for role in ROLES {
        for len in [1000, 65_536, 1 << 20, 1 << 30, u32::MAX] {
            let device = Wire::Local.device();
            let bystander = Bystander::new(&device);
            let (victim, mut raw) = Victim::on(&device, role, Wire::Local, 3);
            let mut bytes = frame(&write(victim.target.rkey(), REGION as u64 - 4, &[1; 8]));
            bytes[..4].copy_from_slice(&len.to_le_bytes());
            raw.send(&bytes);
            let terminate = raw.terminate().expect("a Terminate");
            let error = TermError::Tagged(TaggedError::BaseBounds);
            assert_eq!(terminate.error, error, "{len}: {terminate}");
            victim.assert_terminated(error);
            victim.assert_untouched(0);
            bystander.ping();

            let (victim, mut raw) = Victim::on(&device, role, Wire::Local, 3);
            let mut bytes = frame(&send(1, &[1; 8]));
            bytes[..4].copy_from_slice(&len.to_le_bytes());
            raw.send(&bytes);
            let terminate = raw.terminate().expect("a Terminate");
            let error = TermError::Untagged(UntaggedError::TooLong);
            assert_eq!(terminate.error, error, "{len}: {terminate}");
            victim.assert_terminated(error);
            victim.assert_untouched(0);
            bystander.ping();
        }
    }
}

#[test]
fn half_a_frame_and_the_end() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    for cut in [1, 3, 4, 5, 17, 18, 40] {
        scribbled(&device, &bystander, "half a frame", |local, victim| {
            let whole = frame(&tagged(
                Opcode::Write,
                true,
                victim.read_only.rkey(),
                0,
                &[1; 64],
            ));
            local.send(&whole[..cut.min(17)]);
            local.finish();
        });
    }
    scribbled(&device, &bystander, "its end", |local, _| local.finish());
    scribbled(&device, &bystander, "its end", |_, _| ());
}

#[test]
fn every_control_word() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    for line in 0..32 {
        for value in [1, 7, 1 << 20, u64::MAX] {
            let what = format!("line {line}, value {value:#x}");
            scribbled(&device, &bystander, &what, |local, _| {
                let bytes = u64::to_ne_bytes(value);
                local.file.write_all_at(&bytes, line * 128).expect("write");
            });
        }
    }
}

#[test]
fn nonsense_all_over() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    let mut seed = 0x5eed;
    for _ in 0..20 {
        seed += 1;
        scribbled(&device, &bystander, &format!("seed {seed}"), |local, _| {
            let mut rng = Rng::new(seed);
            let len = 4096 + 2 * RING as usize;
            for _ in 0..200 {
                let at = if rng.chance(2) {
                    rng.below(32) * 128
                } else {
                    rng.below(len / 8) * 8
                };
                let value = match rng.below(4) {
                    0 => rng.below(1 << 20) as u64,
                    1 => 1 << 32 | rng.below(200) as u64,
                    2 => 2 << 32 | 0x18,
                    _ => rng.number(),
                };
                let bytes = value.to_ne_bytes();
                local.file.write_all_at(&bytes, at as u64).expect("write");
                if rng.chance(8) {
                    local.poke();
                }
            }
        });
    }
}

#[test]
fn the_segment_keeps_its_length() {
    let device = Wire::Local.device();
    let bystander = Bystander::new(&device);
    scribbled(&device, &bystander, "truncation", |local, _| {
        local.file.set_len(0).expect_err("sealed");
        local.file.set_len(1 << 30).expect_err("sealed");
    });
}
