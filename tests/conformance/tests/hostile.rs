//! Peers that speak MPA and then break the rules of DDP and RDMAP.
//!
//! Every attack is run with the victim as initiator and as responder, on TCP with CRC and without, and in shared memory. Each time: no byte of the victim's
//! memory changes, the Terminate that the RFCs name arrives at the attacker with the right copies of the offending headers, the victim's queues flush with its
//! code, the asynchronous event is raised, and a connection of the same device continues.

use weft_conformance::bed::tcp_device;
use weft_conformance::raw::{
    Raw, atomic_request, atomic_response, fpdu, read_request, send, send_invalidate, tagged,
    untagged, write,
};
use weft_conformance::victim::{
    Bystander, DEPTH, READ_LEN, RECV, REGION, Role, Victim, Wire, assert_copies,
};
use weft_verbs::{AsyncEvent, SendWr, WcStatus};
use weft_wire::ddp::Header;
use weft_wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, MpaError, Opcode, OperationError, ProtectionError,
    ReadRequest, TaggedError, TermError, Terminate, UntaggedError,
};

/// Segments, the last of them the offending one, and the required reaction.
struct Attack {
    error: TermError,
    /// The Terminate copies the offender's headers.
    copied: bool,
    /// Receives posted.
    recvs: u64,
    /// Their completion statuses.
    statuses: &'static [WcStatus],
}

use WcStatus::{LocLenErr as LongerThanReceive, Success, WrFlushErr as Flushed};

impl Attack {
    fn new(error: TermError) -> Self {
        Attack {
            error,
            copied: true,
            recvs: 3,
            statuses: &[Flushed; 3],
        }
    }
    fn tagged(error: TaggedError) -> Self {
        Self::new(TermError::Tagged(error))
    }
    fn untagged(error: UntaggedError) -> Self {
        Self::new(TermError::Untagged(error))
    }
    fn protection(error: ProtectionError) -> Self {
        Self::new(TermError::Protection(error))
    }
    fn operation(error: OperationError) -> Self {
        Self::new(TermError::Operation(error)).nothing_copied()
    }
    fn nothing_copied(mut self) -> Self {
        self.copied = false;
        self
    }
    fn statuses(mut self, statuses: &'static [WcStatus]) -> Self {
        (self.recvs, self.statuses) = (statuses.len() as u64, statuses);
        self
    }

    /// Runs the attack with whole FPDUs.
    fn run(&self, ulpdus: impl Fn(&Victim) -> Vec<Vec<u8>>) {
        self.run_raw(|victim, raw| {
            let ulpdus = ulpdus(victim);
            raw.send_ulpdus(&ulpdus);
            ulpdus.last().expect("an offender").clone()
        });
    }

    /// Runs the attack with any bytes; `act` returns the offending ULPDU.
    fn run_raw(&self, act: impl Fn(&Victim, &mut Raw) -> Vec<u8>) {
        for wire in Wire::ALL {
            let device = wire.device();
            let bystander = Bystander::new(&device);
            for role in [Role::Initiator, Role::Responder] {
                let (victim, mut raw) = Victim::on(&device, role, wire, self.recvs);
                let offender = act(&victim, &mut raw);
                bystander.ping();
                let terminate = raw.terminate().expect("a Terminate");
                assert_eq!(
                    terminate.error, self.error,
                    "{role:?}, {wire:?}: {terminate}"
                );
                assert_copies(&terminate, self.copied.then_some(&offender[..]));
                raw.expect_end();
                victim.assert_terminated(self.error);
                let wcs = victim.received(self.statuses.len());
                for (id, (wc, status)) in wcs.iter().zip(self.statuses).enumerate() {
                    assert_eq!(
                        (wc.wr_id, wc.status),
                        (id as u64, *status),
                        "{role:?}, {wire:?}"
                    );
                }
                let used = self.statuses.iter().filter(|s| **s == Success);
                victim.assert_untouched(used.count());
                bystander.ping();
            }
        }
    }
}

/// Every wire, and both sides of it.
fn everywhere() -> impl Iterator<Item = (Wire, Role)> {
    let roles = [Role::Initiator, Role::Responder];
    Wire::ALL
        .into_iter()
        .flat_map(move |wire| roles.map(|role| (wire, role)))
}

fn read_of(src_stag: u32, src_to: u64, size: u32) -> ReadRequest {
    ReadRequest {
        sink_stag: 0x1234_5678,
        sink_to: 0,
        size,
        src_stag,
        src_to,
    }
}

fn atomic_on(stag: u32, to: u64) -> AtomicRequest {
    AtomicRequest {
        op: AtomicOp::FetchAdd,
        request_id: 9,
        stag,
        to,
        add_or_swap: 1,
        add_or_swap_mask: 0,
        compare: 0,
        compare_mask: 0,
    }
}

#[test]
fn unknown_stag() {
    let wrong = |victim: &Victim| victim.target.rkey() ^ 0x0100;
    Attack::tagged(TaggedError::InvalidStag).run(|v| vec![write(wrong(v), 0, &[1; 8])]);
    let attack = Attack::protection(ProtectionError::InvalidStag);
    attack.run(|v| vec![read_request(1, &read_of(wrong(v), 0, 8))]);
    attack.run(|v| vec![atomic_request(1, &atomic_on(wrong(v), 0))]);
}

#[test]
fn wrong_key_of_a_good_stag() {
    let wrong = |victim: &Victim| victim.target.rkey() ^ 1;
    Attack::tagged(TaggedError::InvalidStag).run(|v| vec![write(wrong(v), 0, &[1; 8])]);
    let attack = Attack::protection(ProtectionError::InvalidStag);
    attack.run(|v| vec![read_request(1, &read_of(wrong(v), 0, 8))]);
}

#[test]
fn stale_stag() {
    Attack::tagged(TaggedError::InvalidStag).run(|v| vec![write(v.stale, 0, &[1; 8])]);
    let attack = Attack::protection(ProtectionError::InvalidStag);
    attack.run(|v| vec![read_request(1, &read_of(v.stale, 0, 8))]);
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.stale, 0))]);
}

#[test]
fn offset_past_the_end() {
    let past = REGION as u64 + 1;
    Attack::tagged(TaggedError::BaseBounds).run(|v| vec![write(v.target.rkey(), past, &[1])]);
    let attack = Attack::protection(ProtectionError::BaseBounds);
    attack.run(|v| vec![read_request(1, &read_of(v.target.rkey(), past, 1))]);
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.target.rkey(), past + 7))]);
}

#[test]
fn length_past_the_end() {
    let near = REGION as u64 - 7;
    let attack = Attack::tagged(TaggedError::BaseBounds);
    attack.run(|v| vec![write(v.target.rkey(), near, &[1; 8])]);
    // Longer than the region as a whole, and longer than a staging buffer.
    attack.run(|v| vec![write(v.target.rkey(), 0, &[1; REGION + 1])]);
    attack.run(|v| vec![write(v.target.rkey(), 0, &[1; 60_000])]);
    let attack = Attack::protection(ProtectionError::BaseBounds);
    attack.run(|v| vec![read_request(1, &read_of(v.target.rkey(), near, 8))]);
    attack.run(|v| vec![read_request(1, &read_of(v.target.rkey(), 0, u32::MAX))]);
}

#[test]
fn a_later_segment_past_the_end() {
    // The segments before it are placed, each within bounds, as they should be: they write the bytes that are there already.
    let near = REGION - 8;
    let there = weft_conformance::bed::pattern(1, REGION);
    Attack::tagged(TaggedError::BaseBounds).run(|v| {
        let stag = v.target.rkey();
        vec![
            tagged(Opcode::Write, false, stag, near as u64, &there[near..]),
            tagged(Opcode::Write, true, stag, REGION as u64, &[1; 8]),
        ]
    });
}

#[test]
fn offset_and_length_wrap() {
    let high = u64::MAX - 3;
    Attack::tagged(TaggedError::ToWrap).run(|v| vec![write(v.target.rkey(), high, &[1; 8])]);
    let attack = Attack::protection(ProtectionError::ToWrap);
    attack.run(|v| vec![read_request(1, &read_of(v.target.rkey(), high, 8))]);
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.target.rkey(), u64::MAX - 7))]);
}

#[test]
fn missing_right() {
    let attack = Attack::protection(ProtectionError::AccessRights);
    attack.run(|v| vec![write(v.read_only.rkey(), 0, &[1; 8])]);
    attack.run(|v| vec![write(v.private.rkey(), 0, &[1; 8])]);
    attack.run(|v| vec![read_request(1, &read_of(v.write_only.rkey(), 0, 8))]);
    attack.run(|v| vec![read_request(1, &read_of(v.private.rkey(), 0, 8))]);
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.write_only.rkey(), 0))]);
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.read_only.rkey(), 0))]);
}

#[test]
fn other_protection_domain() {
    let attack = Attack::tagged(TaggedError::StagNotAssociated);
    attack.run(|v| vec![write(v.foreign.rkey(), 0, &[1; 8])]);
    let attack = Attack::protection(ProtectionError::StagNotAssociated);
    attack.run(|v| vec![read_request(1, &read_of(v.foreign.rkey(), 0, 8))]);
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.foreign.rkey(), 0))]);
}

#[test]
fn invalidation_of_what_cannot_be() {
    // The message itself is placed in its receive, but never completed.
    let attack = Attack::protection(ProtectionError::CannotInvalidate).statuses(&[Flushed; 3]);
    attack.run(|v| vec![send_invalidate(1, v.target.rkey(), &[])]);
    attack.run(|v| vec![send_invalidate(1, v.stale, &[])]);
}

#[test]
fn msn_gap() {
    let attack = Attack::untagged(UntaggedError::MsnRange);
    attack.run(|_| vec![send(2, &[1; 8])]);
    attack.run(|_| vec![send(0, &[1; 8])]);
    attack.run(|_| vec![send(u32::MAX, &[1; 8])]);
    attack.run(|v| vec![read_request(2, &read_of(v.target.rkey(), 0, 8))]);
}

#[test]
fn msn_repeated() {
    let attack = Attack::untagged(UntaggedError::MsnRange).statuses(&[Success, Flushed, Flushed]);
    attack.run(|_| vec![send(1, &[1; 8]), send(1, &[2; 8])]);
}

#[test]
fn wrong_message_offset() {
    let attack = Attack::untagged(UntaggedError::InvalidMo);
    attack.run(|_| vec![untagged(Opcode::Send, true, 1, 8, &[1; 8])]);
    attack.run(|_| vec![untagged(Opcode::Send, true, 1, u32::MAX, &[1; 8])]);
    attack.run(|_| {
        vec![
            untagged(Opcode::Send, false, 1, 0, &[]),
            untagged(Opcode::Send, true, 1, 1, &[1; 8]),
        ]
    });
    attack.run(|v| {
        let mut request = read_request(1, &read_of(v.target.rkey(), 0, 8));
        request[17] = 4;
        vec![request]
    });
}

#[test]
fn message_too_long_for_its_receive() {
    let attack =
        Attack::untagged(UntaggedError::TooLong).statuses(&[LongerThanReceive, Flushed, Flushed]);
    attack.run(|_| vec![send(1, &[1; RECV + 1])]);
    attack.run(|_| vec![send(1, &[1; 60_000])]);
    attack.run(|_| {
        vec![
            untagged(Opcode::Send, false, 1, 0, &[]),
            untagged(Opcode::Send, true, 1, 0, &[1; RECV + 1]),
        ]
    });
}

#[test]
fn no_receive_posted() {
    let attack = Attack::untagged(UntaggedError::NoBuffer).statuses(&[]);
    attack.run(|_| vec![send(1, &[1; 8])]);
    attack.run(|_| vec![send(1, &[])]);
    attack.run(|_| vec![untagged(Opcode::Immediate, true, 1, 0, &[1; 8])]);
}

#[test]
fn message_within_a_message() {
    let attack = Attack::operation(OperationError::UnexpectedOpcode);
    attack.run(|_| {
        vec![
            untagged(Opcode::Send, false, 1, 0, &[]),
            untagged(Opcode::SendSe, true, 1, 0, &[]),
        ]
    });
    attack.run(|_| {
        vec![
            untagged(Opcode::Send, false, 1, 0, &[]),
            untagged(Opcode::Immediate, true, 1, 0, &[1; 8]),
        ]
    });
}

#[test]
fn bad_crc() {
    for flip in [0, 2, 5, 30, usize::MAX] {
        let device = tcp_device();
        let bystander = Bystander::new(&device);
        for role in [Role::Initiator, Role::Responder] {
            let (victim, mut raw) = Victim::new(&device, role, true, 3);
            let mut frame = fpdu(&write(victim.target.rkey(), 0, &[1; 64]), true);
            // A damaged length field makes the frame longer: send the bytes that it then announces.
            let at = flip.min(frame.len() - 1);
            frame[at] ^= 1;
            raw.send(&frame);
            if at == 0 {
                raw.send(&[0; 512]);
            }
            let terminate = raw.terminate().expect("a Terminate");
            let error = TermError::Mpa(MpaError::CrcError);
            assert_eq!(terminate.error, error, "byte {at}: {terminate}");
            assert_copies(&terminate, None);
            victim.assert_terminated(error);
            assert!(victim.received(3).iter().all(|wc| wc.status == Flushed));
            victim.assert_untouched(0);
            bystander.ping();
        }
    }
}

#[test]
fn bad_ddp_version() {
    for version in [0, 2, 3] {
        let change = |mut ulpdu: Vec<u8>| {
            ulpdu[0] = ulpdu[0] & !3 | version;
            vec![ulpdu]
        };
        let attack = Attack::tagged(TaggedError::InvalidVersion).nothing_copied();
        attack.run(|v| change(write(v.target.rkey(), 0, &[1; 8])));
        let attack = Attack::untagged(UntaggedError::InvalidVersion).nothing_copied();
        attack.run(|_| change(send(1, &[1; 8])));
    }
}

#[test]
fn bad_rdmap_version() {
    let attack = Attack::operation(OperationError::InvalidVersion);
    for version in [0x00, 0x80, 0xc0] {
        let change = |mut ulpdu: Vec<u8>| {
            ulpdu[1] = ulpdu[1] & 0x3f | version;
            vec![ulpdu]
        };
        attack.run(|v| change(write(v.target.rkey(), 0, &[1; 8])));
        attack.run(|_| change(send(1, &[1; 8])));
    }
}

#[test]
fn unknown_opcode() {
    let attack = Attack::operation(OperationError::UnexpectedOpcode);
    for opcode in 12..16 {
        let change = |mut ulpdu: Vec<u8>| {
            ulpdu[1] = 0x40 | opcode;
            vec![ulpdu]
        };
        attack.run(|v| change(write(v.target.rkey(), 0, &[1; 8])));
        attack.run(|_| change(send(1, &[1; 8])));
    }
}

#[test]
fn tagged_bit_does_not_fit() {
    let attack = Attack::operation(OperationError::UnexpectedOpcode);
    let flip = |mut ulpdu: Vec<u8>| {
        ulpdu[0] ^= 0x80;
        vec![ulpdu]
    };
    attack.run(|v| flip(write(v.target.rkey(), 0, &[1; 8])));
    attack.run(|_| flip(send(1, &[1; 8])));
}

#[test]
fn wrong_queue() {
    let attack = Attack::untagged(UntaggedError::InvalidQn).nothing_copied();
    for queue in [1, 2, 3, 4, u32::MAX] {
        attack.run(|_| {
            let mut ulpdu = send(1, &[1; 8]);
            ulpdu[6..10].copy_from_slice(&queue.to_be_bytes());
            vec![ulpdu]
        });
    }
}

#[test]
fn read_response_to_a_wrong_stag() {
    let attack = Attack::tagged(TaggedError::InvalidStag);
    let response = |stag, len: usize| tagged(Opcode::ReadResponse, true, stag, 0, &vec![1; len]);
    attack.run(|v| vec![response(v.sink ^ 1, READ_LEN)]);
    // A region that the peer may write to is not a sink either.
    attack.run(|v| vec![response(v.target.rkey(), READ_LEN)]);
    attack.run(|v| vec![response(v.private.rkey(), READ_LEN)]);
}

#[test]
fn read_response_that_does_not_fit() {
    let attack = Attack::tagged(TaggedError::BaseBounds);
    let response = |v: &Victim, last, to, len: usize| {
        tagged(Opcode::ReadResponse, last, v.sink, to, &vec![1; len])
    };
    attack.run(|v| vec![response(v, true, 0, READ_LEN + 1)]);
    attack.run(|v| vec![response(v, true, 0, READ_LEN - 1)]);
    attack.run(|v| vec![response(v, false, 0, READ_LEN)]);
    attack.run(|v| vec![response(v, true, 1, READ_LEN)]);
    attack.run(|v| vec![response(v, true, 0, 60_000)]);
}

#[test]
fn answers_nobody_asked_for() {
    for (wire, role) in everywhere() {
        let device = wire.device();
        let bystander = Bystander::new(&device);
        let (victim, mut raw) = Victim::on(&device, role, wire, 1);
        // The outstanding read is answered with exactly the requested bytes.
        let sink = victim.sink;
        let answer = tagged(Opcode::ReadResponse, true, sink, 0, &[0x77; READ_LEN]);
        raw.send_ulpdus(&[answer]);
        // Not signaled: a zero-length write after it shows that the read is complete.
        let nowhere = weft_verbs::RemoteAddr { addr: 0, rkey: 0 };
        let marker = SendWr::write(51, nowhere).signaled();
        victim.qp.post_send_one(marker).expect("post");
        let wc = weft_conformance::bed::take(&victim.scq, 1)[0];
        assert_eq!((wc.wr_id, wc.status), (51, Success));
        let sunk = REGION - READ_LEN;
        weft_conformance::bed::assert_bytes(&victim.private, sunk, &[0x77; READ_LEN], "the read");
        // The same again.
        let again = tagged(Opcode::ReadResponse, true, sink, 0, &[0x88; READ_LEN]);
        raw.send_ulpdus(std::slice::from_ref(&again));
        let terminate = raw.terminate().expect("a Terminate");
        assert_eq!(terminate.error, TermError::Tagged(TaggedError::InvalidStag));
        assert_copies(&terminate, Some(&again));
        weft_conformance::bed::assert_bytes(&victim.private, sunk, &[0x77; READ_LEN], "the read");
        bystander.ping();
    }
}

#[test]
fn atomic_response_nobody_asked_for() {
    let attack = Attack::untagged(UntaggedError::NoBuffer);
    let response = AtomicResponse {
        request_id: 0,
        original: 1,
    };
    attack.run(|_| vec![atomic_response(1, &response)]);
    attack.run(|v| {
        let request_id = v.sink;
        vec![atomic_response(
            1,
            &AtomicResponse {
                request_id,
                ..response
            },
        )]
    });
}

#[test]
fn atomic_that_is_not_aligned() {
    let attack = Attack::new(TermError::Operation(OperationError::Unspecified));
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.target.rkey(), 4))]);
    // With any key.
    attack.run(|v| vec![atomic_request(1, &atomic_on(v.target.rkey() ^ 1, 4))]);
}

#[test]
fn atomic_operation_that_is_unknown() {
    let attack = Attack::operation(OperationError::UnexpectedOpcode);
    attack.run(|v| {
        let mut ulpdu = atomic_request(1, &atomic_on(v.target.rkey(), 0));
        ulpdu[21] = 7;
        vec![ulpdu]
    });
}

#[test]
fn more_reads_than_agreed() {
    for (wire, role) in everywhere() {
        let device = wire.device();
        let bystander = Bystander::new(&device);
        let (victim, mut raw) = Victim::on(&device, role, wire, 1);
        // Answers far larger than the socket buffers, so that none of the requests is finished.
        let big = victim
            .pd
            .alloc_mr(64 << 20, weft_conformance::bed::ALL)
            .expect("a region");
        let requests: Vec<_> = (1..=u32::from(DEPTH) + 1)
            .map(|msn| read_request(msn, &read_of(big.rkey(), 0, 64 << 20)))
            .collect();
        raw.send_ulpdus(&requests);
        let terminate = raw.terminate().expect("a Terminate");
        let error = TermError::Untagged(UntaggedError::NoBuffer);
        assert_eq!(terminate.error, error, "{terminate}");
        assert_copies(&terminate, requests.last().map(Vec::as_slice));
        victim.assert_terminated(error);
        victim.assert_untouched(0);
        bystander.ping();
    }
}

#[test]
fn ulpdu_shorter_than_its_header() {
    let attack = Attack::new(TermError::DdpCatastrophic).nothing_copied();
    attack.run(|_| vec![Vec::new()]);
    attack.run(|_| vec![vec![0xc1]]);
    attack.run(|v| vec![write(v.target.rkey(), 0, &[])[..13].to_vec()]);
    attack.run(|_| vec![send(1, &[])[..17].to_vec()]);
}

#[test]
fn control_messages_of_the_wrong_length() {
    let attack = Attack::new(TermError::DdpCatastrophic).nothing_copied();
    attack.run(|v| {
        let mut ulpdu = read_request(1, &read_of(v.target.rkey(), 0, 8));
        ulpdu.pop();
        vec![ulpdu]
    });
    attack.run(|_| vec![untagged(Opcode::Immediate, true, 1, 0, &[1; 7])]);
    attack.run(|_| vec![untagged(Opcode::Immediate, false, 1, 0, &[1; 7])]);
    let attack = Attack::untagged(UntaggedError::TooLong);
    attack.run(|v| {
        let mut ulpdu = read_request(1, &read_of(v.target.rkey(), 0, 8));
        ulpdu.push(0);
        vec![ulpdu]
    });
    attack.run(|_| vec![untagged(Opcode::Terminate, true, 1, 0, &[1; 1000])]);
}

/// A peer's Terminate ends the victim: the request whose header it copies completes with its own status, the rest is flushed, and bytes after the Terminate
/// have no effect.
#[test]
fn terminates_of_all_kinds() {
    let read = |victim: &Victim| {
        // The victim's read request, as it was on the wire.
        let request = ReadRequest {
            sink_stag: victim.sink,
            sink_to: 0,
            size: READ_LEN as u32,
            src_stag: 0,
            src_to: 0,
        };
        (
            Header::parse(&read_request(1, &request)).expect("good"),
            request,
        )
    };
    let protection = |e| TermError::Protection(e);
    for (error, named, status) in [
        (
            protection(ProtectionError::InvalidStag),
            true,
            WcStatus::RemAccessErr,
        ),
        (
            protection(ProtectionError::BaseBounds),
            true,
            WcStatus::RemAccessErr,
        ),
        (
            protection(ProtectionError::AccessRights),
            true,
            WcStatus::RemAccessErr,
        ),
        (TermError::RdmapCatastrophic, true, WcStatus::RemOpErr),
        (protection(ProtectionError::AccessRights), false, Flushed),
        (TermError::RdmapCatastrophic, false, Flushed),
        (TermError::from_parts(15, 15, 255), false, Flushed),
    ] {
        for (wire, role) in everywhere() {
            let device = wire.device();
            let bystander = Bystander::new(&device);
            let (victim, mut raw) = Victim::on(&device, role, wire, 2);
            let (header, request) = read(&victim);
            let terminate = Terminate {
                error,
                ddp_segment_len: named.then_some(46),
                ddp_header: named.then_some(header),
                read_request: named.then_some(request),
            };
            let mut body = [0; Terminate::MAX_LEN];
            let n = terminate.emit(&mut body);
            let after = write(victim.target.rkey(), 0, &[0xff; 100]);
            let ulpdu = untagged(Opcode::Terminate, true, 1, 0, &body[..n]);
            raw.send_ulpdus(&[ulpdu, after]);
            // No Terminate answers a Terminate.
            assert!(raw.terminate().is_none());
            let (layer, etype, code) = error.parts();
            let reason = u32::from(layer) << 12 | u32::from(etype) << 8 | u32::from(code);
            let wc = weft_conformance::bed::take(&victim.scq, 1)[0];
            assert_eq!((wc.status, wc.vendor_err), (status, reason), "{terminate}");
            for wc in victim.received(2) {
                assert_eq!((wc.status, wc.vendor_err), (Flushed, reason));
            }
            let qp_num = victim.qp.num();
            let event = device.get_async_event(Some(weft_conformance::bed::PATIENCE));
            assert_eq!(event, Some(AsyncEvent::QpFatal { qp_num, reason }));
            victim.assert_untouched(0);
            bystander.ping();
        }
    }
}
