//! Round trips of every frame, and streams with markers cut at every place.

use proptest::collection::vec;
use proptest::prelude::*;
use weft_wire::crc::{crc32c, crc32c_append};
use weft_wire::ddp::{self, Header, Tagged, Untagged};
use weft_wire::exs;
use weft_wire::mpa::{
    CRC_LEN, Enhanced, FrameKind, MARKER_INTERVAL, MARKER_LEN, MAX_MARKED_ULPDU, MarkerInserter,
    MarkerStripper, StartFrame, fpdu_len, fpdu_pad,
};
use weft_wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Opcode, ReadRequest, TermError, Terminate,
};

fn header() -> impl Strategy<Value = Header> {
    (
        proptest::sample::select(&Opcode::ALL[..]),
        any::<bool>(),
        any::<u32>(),
        any::<u64>(),
    )
        .prop_map(|(opcode, last, stag, to)| match opcode.queue() {
            None => Header::Tagged(Tagged {
                opcode,
                last,
                stag,
                to,
            }),
            Some(qn) => {
                let invalidate = if opcode.has_ulp_field() { stag } else { 0 };
                Header::Untagged(Untagged {
                    opcode,
                    last,
                    invalidate,
                    qn,
                    msn: to as u32,
                    mo: (to >> 32) as u32,
                })
            }
        })
}

prop_compose! {
    fn read_request()(sink_stag: u32, sink_to: u64, size: u32, src_stag: u32, src_to: u64) -> ReadRequest {
        ReadRequest { sink_stag, sink_to, size, src_stag, src_to }
    }
}

prop_compose! {
    fn atomic_request()(
        op in proptest::sample::select(&[AtomicOp::FetchAdd, AtomicOp::Swap, AtomicOp::CompareSwap][..]),
        request_id: u32, stag: u32, to: u64,
        add_or_swap: u64, add_or_swap_mask: u64, compare: u64, compare_mask: u64,
    ) -> AtomicRequest {
        AtomicRequest { op, request_id, stag, to, add_or_swap, add_or_swap_mask, compare, compare_mask }
    }
}

prop_compose! {
    fn enhanced()(flags: [bool; 4], ird in 0..=Enhanced::NOT_NEGOTIATED, ord in 0..=Enhanced::NOT_NEGOTIATED) -> Enhanced {
        let [peer_to_peer, rtr_send, rtr_write, rtr_read] = flags;
        Enhanced { peer_to_peer, rtr_send, rtr_write, rtr_read, ird, ord }
    }
}

/// FPDUs one after the other, with good CRCs or none.
fn fpdus(ulpdus: &[Vec<u8>], crc: bool) -> Vec<Vec<u8>> {
    let fpdu = |ulpdu: &Vec<u8>| {
        let mut fpdu = [&(ulpdu.len() as u16).to_be_bytes()[..], ulpdu].concat();
        fpdu.resize(fpdu.len() + fpdu_pad(ulpdu.len()), 0);
        let trailer = if crc { crc32c(&fpdu) } else { 0 };
        [fpdu, trailer.to_le_bytes().to_vec()].concat()
    };
    ulpdus.iter().map(fpdu).collect()
}

fn mark(fpdus: &[Vec<u8>], crc: bool) -> Vec<u8> {
    let (mut inserter, mut out) = (MarkerInserter::new(crc), Vec::new());
    for fpdu in fpdus {
        inserter.insert(fpdu, &mut out);
    }
    out
}

/// Where markers are due, from their definition alone: every 512 bytes, pointing to the FPDU's length field.
fn mark_slowly(fpdus: &[Vec<u8>], crc: bool) -> Vec<u8> {
    let mut out = Vec::new();
    for fpdu in fpdus {
        let covered = out.len();
        let mut start = None;
        for (at, &byte) in fpdu.iter().enumerate() {
            if out.len() % MARKER_INTERVAL == 0 {
                let pointer = start.map_or(0, |start| out.len() - start) as u16;
                out.extend_from_slice(&[0, 0]);
                out.extend_from_slice(&pointer.to_be_bytes());
            }
            start.get_or_insert(out.len());
            if crc && at == fpdu.len() - CRC_LEN {
                let crc = crc32c(&out[covered..]);
                out.extend_from_slice(&crc.to_le_bytes());
                break;
            }
            out.push(byte);
        }
    }
    out
}

proptest! {
    #[test]
    fn crc_agrees_with_another(data in vec(any::<u8>(), 0..4096), cut in any::<proptest::sample::Index>()) {
        prop_assert_eq!(crc32c(&data), ::crc32c::crc32c(&data));
        let (head, tail) = data.split_at(cut.index(data.len() + 1));
        prop_assert_eq!(crc32c_append(crc32c(head), tail), crc32c(&data));
        prop_assert_eq!(crc32c_append(0, &data), crc32c(&data));
    }

    #[test]
    fn headers_come_back(header in header(), payload in vec(any::<u8>(), 0..8)) {
        let mut raw = [0xee; ddp::MAX_LEN];
        let len = header.emit(&mut raw);
        prop_assert_eq!(len, header.len());
        prop_assert!(raw[len..].iter().all(|&byte| byte == 0xee));
        let ulpdu = [&raw[..len], &payload].concat();
        prop_assert_eq!(Header::parse(&ulpdu), Ok(header));
    }

    #[test]
    fn read_requests_come_back(request in read_request()) {
        let mut raw = [0; ReadRequest::LEN];
        request.emit(&mut raw);
        prop_assert_eq!(ReadRequest::parse(&raw), Some(request));
    }

    #[test]
    fn atomics_come_back(request in atomic_request(), request_id: u32, original: u64) {
        let mut raw = [0; AtomicRequest::LEN];
        request.emit(&mut raw);
        prop_assert_eq!(AtomicRequest::parse(&raw), Some(request));
        let response = AtomicResponse { request_id, original };
        let mut raw = [0; AtomicResponse::LEN];
        response.emit(&mut raw);
        prop_assert_eq!(AtomicResponse::parse(&raw), Some(response));
    }

    #[test]
    fn terminates_come_back(
        parts: (u8, u8, u8),
        len: u16,
        header in header(),
        request in read_request(),
        copies in 0..4,
    ) {
        let error = TermError::from_parts(parts.0, parts.1, parts.2);
        // One that makes sense the wrong way round only is siw's.
        let unknown = |error| matches!(error, TermError::Other { .. });
        prop_assume!(!unknown(error) || unknown(TermError::from_parts(parts.1, parts.0, parts.2)));
        let terminate = Terminate {
            error,
            ddp_segment_len: (copies > 0).then_some(len),
            ddp_header: (copies > 1).then_some(header),
            read_request: (copies > 2).then_some(request),
        };
        let mut raw = [0; Terminate::MAX_LEN];
        let len = terminate.emit(&mut raw);
        prop_assert_eq!(Terminate::parse(&raw[..len]), Ok(terminate));
    }

    #[test]
    fn start_frames_come_back(
        reply: bool,
        flags: [bool; 3],
        revision in 1..=2_u8,
        enhanced in proptest::option::of(enhanced()),
        private_data in vec(any::<u8>(), 0..=StartFrame::max_private_data(true)),
        early in vec(any::<u8>(), 0..8),
    ) {
        let [markers, crc, reject] = flags;
        let kind = if reply { FrameKind::Reply } else { FrameKind::Request };
        let frame = StartFrame {
            kind,
            markers,
            crc,
            reject: reject && reply,
            revision,
            enhanced: enhanced.filter(|_| revision == 2),
            private_data: &private_data,
        };
        let raw = frame.emit();
        let stream = [&raw[..], &early].concat();
        prop_assert_eq!(StartFrame::parse(kind, &stream), Ok(Some((frame, raw.len()))));
    }

    #[test]
    fn fpdus_are_multiples_of_four(ulpdu_len in 0..=65535_usize) {
        prop_assert!(fpdu_pad(ulpdu_len) < 4);
        prop_assert_eq!(fpdu_len(ulpdu_len) % 4, 0);
        prop_assert_eq!(fpdu_len(ulpdu_len), 6 + ulpdu_len + fpdu_pad(ulpdu_len));
    }

    #[test]
    fn markers_go_in_and_out_at_any_cut(
        ulpdus in vec(vec(any::<u8>(), 0..1600), 1..6),
        crc: bool,
        cuts in vec(1..700_usize, 1..8),
    ) {
        let fpdus = fpdus(&ulpdus, crc);
        let marked = mark(&fpdus, crc);
        prop_assert_eq!(&marked, &mark_slowly(&fpdus, crc));
        let (mut stripper, mut out, mut rest) = (MarkerStripper::new(crc), Vec::new(), &marked[..]);
        for cut in cuts.into_iter().cycle() {
            let (piece, next) = rest.split_at(cut.min(rest.len()));
            prop_assert_eq!(stripper.strip(piece, &mut out), Ok(()));
            rest = next;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(out, fpdus.concat());
    }
}

#[test]
fn markers_come_out_at_every_split() {
    let ulpdus: Vec<Vec<u8>> = [0, 1, 499, 500, 502, 504, 506, 1018, 3, 700]
        .iter()
        .map(|&len| vec![0xa5; len])
        .collect();
    for crc in [false, true] {
        let fpdus = fpdus(&ulpdus, crc);
        let marked = mark(&fpdus, crc);
        assert_eq!(marked, mark_slowly(&fpdus, crc));
        let plain = fpdus.concat();
        for split in 0..=marked.len() {
            let (mut stripper, mut out) = (MarkerStripper::new(crc), Vec::new());
            let (head, tail) = marked.split_at(split);
            assert_eq!(stripper.strip(head, &mut out), Ok(()));
            assert_eq!(stripper.strip(tail, &mut out), Ok(()));
            assert_eq!(out, plain, "split at {split}");
        }
        let (mut stripper, mut out) = (MarkerStripper::new(crc), Vec::new());
        for &byte in &marked {
            assert_eq!(stripper.strip(&[byte], &mut out), Ok(()));
        }
        assert_eq!(out, plain, "byte by byte");
    }
}

#[test]
fn the_longest_marked_fpdu_at_every_place() {
    // The first FPDU moves the second over a whole interval.
    for first in (0..MARKER_INTERVAL).step_by(MARKER_LEN) {
        let fpdus = fpdus(&[vec![1; first], vec![2; MAX_MARKED_ULPDU]], false);
        let marked = mark(&fpdus, false);
        let mut out = Vec::new();
        assert_eq!(
            MarkerStripper::new(false).strip(&marked, &mut out),
            Ok(()),
            "after {first}"
        );
        assert_eq!(out, fpdus.concat());
    }
}

#[test]
fn an_fpdu_too_long_for_its_markers_is_refused() {
    // 65535 bytes fit the length field, but the last marker's pointer does not fit 16 bits.
    let fpdus = fpdus(&[vec![0; 65535]], false);
    let marked = mark(&fpdus, false);
    let mut out = Vec::new();
    assert!(
        MarkerStripper::new(false)
            .strip(&marked, &mut out)
            .is_err_and(|error| error.expected > 0xffff)
    );
}

fn memory() -> impl Strategy<Value = exs::Remote> {
    (any::<u32>(), any::<u64>(), 1u32..).prop_map(|(rkey, addr, len)| exs::Remote {
        addr: addr.min(u64::MAX - u64::from(len)),
        rkey,
        len,
    })
}

fn packet() -> impl Strategy<Value = exs::Packet> {
    (any::<u64>(), memory(), any::<bool>()).prop_map(|(index, memory, empty)| exs::Packet {
        index,
        addr: memory.addr,
        rkey: memory.rkey,
        len: if empty { 0 } else { memory.len },
    })
}

fn transfer() -> impl Strategy<Value = exs::Transfer> {
    proptest::sample::select(vec![
        exs::Transfer::Direct,
        exs::Transfer::Indirect,
        exs::Transfer::Packet { truncated: false },
        exs::Transfer::Packet { truncated: true },
    ])
}

fn exs_message() -> impl Strategy<Value = exs::Message> {
    use exs::Body;
    let body = prop_oneof![
        (any::<u64>(), any::<u64>(), any::<bool>(), memory()).prop_map(
            |(seq, phase, waitall, memory)| {
                Body::Advert(exs::Advert {
                    seq,
                    phase,
                    waitall,
                    memory,
                })
            }
        ),
        (1u32..).prop_map(|freed| Body::Ack { freed }),
        (0u32..3000).prop_map(|len| Body::Small { len }),
        (transfer(), any::<u32>()).prop_map(|(transfer, len)| Body::Wrote { transfer, len }),
        Just(Body::Retract),
        any::<u64>().prop_map(|seq| Body::Retracted { seq }),
        Just(Body::Fin),
        Just(Body::Credit),
        packet().prop_map(Body::PktAdvert),
        packet().prop_map(Body::Source),
        (any::<u64>(), any::<u32>()).prop_map(|(index, len)| Body::SourceDone { index, len }),
    ];
    (any::<u16>(), body).prop_map(|(credits, body)| exs::Message { credits, body })
}

fn hello() -> impl Strategy<Value = exs::Hello> {
    let kinds = vec![
        exs::Kind::Stream,
        exs::Kind::SeqPacket(exs::Design::Advert),
        exs::Kind::SeqPacket(exs::Design::Source),
    ];
    let modes = vec![exs::Mode::Dynamic, exs::Mode::Direct, exs::Mode::Indirect];
    (
        proptest::sample::select(kinds),
        proptest::sample::select(modes),
        any::<bool>(),
        0u32..8,
        any::<u32>(),
        proptest::option::of(memory()),
    )
        .prop_map(|(kind, mode, immediate, credits, small, ring)| exs::Hello {
            kind,
            mode,
            immediate,
            credits,
            small,
            ring,
        })
}

proptest! {
    #[test]
    fn exs_messages_survive_the_round_trip(message in exs_message()) {
        let mut head = [0; exs::MAX_LEN];
        let len = message.emit(&mut head);
        let mut raw = head[..len].to_vec();
        if let exs::Body::Small { len } = message.body {
            raw.resize(raw.len() + len as usize, 0x55);
        }
        prop_assert_eq!(exs::Message::parse(&raw), Ok(message));
        prop_assert_eq!(exs::Message::parse(&raw[..raw.len() - 1]), Err(exs::ParseError::Length));
        let head = &raw[..raw.len().min(exs::MAX_LEN)];
        prop_assert_eq!(exs::Message::parse_head(head, raw.len()), Ok(message));
        prop_assert_eq!(exs::Message::parse_head(head, raw.len() + 1), Err(exs::ParseError::Length));
        let small = exs::Message::parse_small(*raw.first_chunk().unwrap(), raw.len());
        prop_assert_eq!(small.is_some(), matches!(message.body, exs::Body::Small { .. }));
        prop_assert!(small.is_none_or(|small| small == message));
        raw.push(0);
        prop_assert_eq!(exs::Message::parse(&raw), Err(exs::ParseError::Length));
        let longer = exs::Message::parse_small(*raw.first_chunk().unwrap(), raw.len());
        prop_assert_eq!(longer, None);
    }

    #[test]
    fn immediate_data_survives_the_round_trip(transfer in transfer(), credits: u16, len: u32, other: u64) {
        let imm = exs::Imm { transfer, credits, len };
        prop_assert_eq!(exs::Imm::decode(imm.encode()), Ok(imm));
        if let Ok(imm) = exs::Imm::decode(other) {
            prop_assert_eq!(imm.encode(), other);
        }
    }

    #[test]
    fn both_ends_of_an_exs_connection_agree(mine in hello(), other in hello()) {
        prop_assert_eq!(exs::Hello::parse(&mine.emit()), Ok(mine));
        match (mine.agree(&other), other.agree(&mine)) {
            (Ok(a), Ok(b)) => {
                prop_assert_eq!((a.kind, a.mode, a.immediate), (b.kind, b.mode, b.immediate));
                prop_assert_eq!((a.send_credits, a.small_send), (b.recv_credits, b.small_recv));
                prop_assert_eq!((b.send_credits, b.small_send), (a.recv_credits, a.small_recv));
                prop_assert!(a.send_credits >= exs::MIN_CREDITS);
                prop_assert_eq!(a.peer_ring, other.ring);
            }
            (Err(exs::Mismatch::Kind(a, b)), verdict) => {
                prop_assert_eq!(verdict, Err(exs::Mismatch::Kind(b, a)));
            }
            (verdict, same) => prop_assert_eq!(verdict, same),
        }
    }
}
