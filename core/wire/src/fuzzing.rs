//! Bodies of the fuzz targets in `fuzz/`, and the replay of their corpora by plain `cargo test`.
//!
//! To add a target to this crate or another: write its body (a function of bytes that panics on a finding), replay it in a
//! test with [`replay`], and add `fuzz/fuzz_targets/NAME.rs` and its line in `fuzz/Cargo.toml`.

use std::path::Path;

use crate::crc::{crc32c, crc32c_append};
use crate::ddp::{self, Header};
use crate::dgram;
use crate::exs;
use crate::local;
use crate::mpa::{CRC_LEN, FrameKind, MarkerInserter, MarkerStripper, StartFrame, fpdu_len};
use crate::rdmap::{AtomicRequest, AtomicResponse, ReadRequest, TermError, Terminate};
use crate::roce;
use crate::sidr;

/// Runs `body` on every file of `fuzz/corpus/NAME`, and fails if there is none.
pub fn replay(name: &str, body: impl Fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(name);
    let mut seeds = 0;
    for entry in std::fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display())) {
        let path = entry.expect("a directory entry").path();
        let seed = std::fs::read(&path).expect("a readable seed");
        // Shown by the test harness if the body panics.
        println!("{}", path.display());
        body(&seed);
        seeds += 1;
    }
    assert_ne!(seeds, 0, "no seeds in {}", dir.display());
}

/// Any bytes as a message of service ID resolution: what parses comes back from `emit`.
pub fn sidr(data: &[u8]) {
    if let Some(message) = sidr::Message::parse(data) {
        let raw = message.emit().expect("no longer than it was");
        assert_eq!(sidr::Message::parse(&raw), Some(message));
    }
    // The CRC keeps nearly everything out: with a right one.
    let mut sealed = data.to_vec();
    sealed.extend_from_slice(&crc32c(data).to_le_bytes());
    if let Some(message) = sidr::Message::parse(&sealed) {
        let raw = message.emit().expect("no longer than it was");
        assert_eq!(sidr::Message::parse(&raw), Some(message));
    }
}

/// Any bytes as a RoCE packet, and as a management datagram: what parses comes back from `emit`.
pub fn roce_packet(data: &[u8]) {
    if let Ok((header, payload)) = roce::Header::parse(data) {
        let mut raw = Vec::new();
        header.emit(&mut raw);
        raw.extend_from_slice(payload);
        raw.extend_from_slice(&[0; 3][..header.pad.into()]);
        assert_eq!(roce::Header::parse(&raw), Ok((header, payload)));
        assert!(!header.to_string().is_empty());
        mad(payload);
    }
    mad(data);
}

fn mad(data: &[u8]) {
    if let Some(mad) = roce::cm::Mad::parse(data) {
        assert_eq!(roce::cm::Mad::parse(&mad.emit()), Some(mad));
        let private_data = match mad.message {
            roce::cm::Message::Req(req) => req.private_data,
            roce::cm::Message::SidrReq(req) => req.private_data,
            _ => return,
        };
        if let Some((header, _)) = roce::cm::IpHeader::parse(private_data) {
            let raw = header.emit();
            assert_eq!(roce::cm::IpHeader::parse(&raw), Some((header, &[][..])));
        }
    }
}

/// Any bytes as a message of two processes that meet: what parses comes back from `emit`.
pub fn meeting(data: &[u8]) {
    if let Some(message) = local::Message::parse(data) {
        let mut raw = Vec::new();
        message.emit(&mut raw);
        assert!(raw.len() <= local::MAX_LEN);
        // A reason is text for people: invalid UTF-8 is replaced, and the text may be cut.
        if !matches!(message, local::Message::Decline(_)) {
            assert_eq!(local::Message::parse(&raw), Some(message));
        }
    }
}

/// Any bytes as a start-up frame: what parses comes back from `emit`, and cutting the input never changes a verdict.
pub fn start_frame(data: &[u8]) {
    for kind in [FrameKind::Request, FrameKind::Reply] {
        let verdict = StartFrame::parse(kind, data);
        match verdict {
            Ok(Some((frame, len))) => {
                let raw = frame.emit();
                assert_eq!(raw.len(), len);
                assert_eq!(StartFrame::parse(kind, &raw), Ok(Some((frame, len))));
                // Byte 16 has the reserved bits.
                assert_eq!(raw[..16], data[..16]);
                assert_eq!(raw[17..], data[17..len]);
                assert!(len > 0 && StartFrame::parse(kind, &data[..len - 1]) == Ok(None));
                assert!(!frame.to_string().is_empty());
            }
            Ok(None) => {}
            Err(error) => {
                let mut longer = data.to_vec();
                longer.push(0);
                assert_eq!(StartFrame::parse(kind, &longer), Err(error));
            }
        }
        for cut in 0..data.len().min(64) {
            match StartFrame::parse(kind, &data[..cut]) {
                Ok(None) => {}
                done => assert_eq!(
                    done.map(|d| d.map(|(_, len)| len)),
                    verdict.map(|d| d.map(|(_, len)| len))
                ),
            }
        }
    }
}

/// Any bytes as a DDP header: what parses comes back from `emit`, but for reserved bits.
pub fn ddp_header(data: &[u8]) {
    let Ok(header) = Header::parse(data) else {
        return;
    };
    let mut raw = [0; ddp::MAX_LEN];
    let len = header.emit(&mut raw);
    assert_eq!(len, header.len());
    assert_eq!(Header::parse(&raw[..len]), Ok(header));
    assert_eq!(Header::parse(&data[..len]), Ok(header));
    let mut expected = data[..len].to_vec();
    expected[0] &= 0xc3;
    expected[1] &= 0xcf;
    if matches!(header, Header::Untagged(_)) && !header.opcode().has_ulp_field() {
        expected[2..6].fill(0);
    }
    assert_eq!(raw[..len], expected);
    assert!(!header.to_string().is_empty());
}

/// Any bytes as a Terminate: a parsed one is encoded to the same bytes.
pub fn terminate(data: &[u8]) {
    let Ok(terminate) = Terminate::parse(data) else {
        assert!(data.len() < 4);
        return;
    };
    let mut raw = [0; Terminate::MAX_LEN];
    let len = terminate.emit(&mut raw);
    // As it came, or as siw means it: layer and type swapped.
    let swapped = [data[0].rotate_left(4), data[1]];
    assert!(raw[..2] == data[..2] || raw[..2] == swapped);
    // Codes that no RFC defines are never sent, and may look like siw's different order of the fields.
    if !matches!(terminate.error, TermError::Other { .. }) {
        assert_eq!(Terminate::parse(&raw[..len]), Ok(terminate));
    }
    assert!(!terminate.to_string().is_empty());
}

/// Any bytes as the header of a Read Request, an Atomic Request or an Atomic Response.
pub fn control(data: &[u8]) {
    if let Some(request) = ReadRequest::parse(data) {
        let mut raw = [0; ReadRequest::LEN];
        request.emit(&mut raw);
        assert_eq!(raw, data);
        assert!(!request.to_string().is_empty());
    }
    if let Some(request) = AtomicRequest::parse(data) {
        let mut raw = [0; AtomicRequest::LEN];
        request.emit(&mut raw);
        assert_eq!(raw[3], data[3] & 0xf);
        assert_eq!(raw[4..], data[4..]);
        assert!(!request.to_string().is_empty());
    }
    if let Some(response) = AtomicResponse::parse(data) {
        let mut raw = [0; AtomicResponse::LEN];
        response.emit(&mut raw);
        assert_eq!(raw, data);
        assert!(!response.to_string().is_empty());
    }
}

/// Any bytes as a control message, a greeting and immediate data of EXS: what parses comes back from `emit`, all of it.
pub fn exs_message(data: &[u8]) {
    if let Ok(message) = exs::Message::parse(data) {
        let mut raw = [0; exs::MAX_LEN];
        let len = message.emit(&mut raw);
        assert_eq!(raw[..len], data[..len]);
        assert!(len == data.len() || matches!(message.body, exs::Body::Small { .. }));
        assert!(!message.to_string().is_empty());
    }
    if let Some(&head) = data.first_chunk() {
        let small = exs::Message::parse_small(head, data.len());
        let whole = exs::Message::parse(data).ok();
        assert_eq!(
            small,
            whole.filter(|m| matches!(m.body, exs::Body::Small { .. }))
        );
    }
    // The head of a long one is as good as all of it.
    if let Some(head) = data.get(..exs::MAX_LEN) {
        let from_head = exs::Message::parse_head(head, data.len());
        assert_eq!(from_head.ok(), exs::Message::parse(data).ok());
    }
    if let Ok(hello) = exs::Hello::parse(data) {
        assert_eq!(hello.emit(), data);
        assert!(!hello.to_string().is_empty());
    }
    if let Some((&imm, _)) = data.split_first_chunk() {
        let raw = u64::from_be_bytes(imm);
        if let Ok(imm) = exs::Imm::decode(raw) {
            assert_eq!(imm.encode(), raw);
            assert!(!imm.to_string().is_empty());
        }
    }
}

/// Any bytes as a datagram, as they are and with a right CRC: what parses comes back from `emit`, but for reserved bits.
pub fn datagram(data: &[u8]) {
    let mut sealed = data.to_vec();
    dgram::seal(&mut sealed);
    for raw in [data, &sealed] {
        let Ok((header, payload)) = dgram::parse(raw) else {
            continue;
        };
        assert!(payload.len() <= dgram::MAX_PAYLOAD);
        assert_eq!(payload.end + dgram::CRC_LEN, raw.len());
        let mut again = Vec::new();
        header.emit(&mut again);
        assert_eq!(again.len(), payload.start);
        again.extend_from_slice(&raw[payload]);
        dgram::seal(&mut again);
        assert_eq!(dgram::parse(&again).map(|(header, _)| header), Ok(header));
        assert!(!header.to_string().is_empty());
    }
    for raw in [data, &sealed] {
        match dgram::read(raw) {
            Ok(dgram::Datagram::Segment(segment, payload)) => {
                let end = u64::from(segment.offset) + payload.len() as u64;
                assert!(end <= u64::from(segment.len));
                let mut again = Vec::new();
                segment.emit(payload.len(), &mut again);
                assert_eq!(again.len(), payload.start);
                again.extend_from_slice(&raw[payload.clone()]);
                dgram::seal(&mut again);
                let same = Ok(dgram::Datagram::Segment(segment, payload));
                assert_eq!(dgram::read(&again), same);
                assert!(!segment.to_string().is_empty());
            }
            Ok(dgram::Datagram::Control(control)) => {
                let mut again = Vec::new();
                control.emit(&mut again);
                assert_eq!(again.len(), raw.len());
                let same = Ok(dgram::Datagram::Control(control));
                assert_eq!(dgram::read(&again), same);
                assert!(!control.to_string().is_empty());
            }
            Ok(dgram::Datagram::Message(..)) => assert!(dgram::parse(raw).is_ok()),
            Err(_) => assert!(dgram::parse(raw).is_err()),
        }
    }
    if let Some(raw) = data.first_chunk()
        && let Some(grh) = dgram::Grh::parse(raw)
    {
        let mut again = [0; dgram::Grh::LEN];
        grh.emit(0, &mut again);
        assert_eq!(dgram::Grh::parse(&again), Some(grh));
    }
}

/// Cuts `data` into pieces whose lengths `cuts` gives, over and over.
fn pieces<'a>(mut data: &'a [u8], cuts: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let mut cuts = cuts.iter().cycle();
    std::iter::from_fn(move || {
        let len = cuts
            .next()
            .map_or(data.len(), |&cut| usize::from(cut).max(1))
            .min(data.len());
        let (piece, rest) = data.split_at(len);
        data = rest;
        (len != 0).then_some(piece)
    })
}

/// Any bytes as a stream with markers: the output does not depend on the segmentation, and a stream with inserted markers comes out
/// unchanged. The input is `flags | number of cuts | cuts | stream`.
pub fn markers(data: &[u8]) {
    let Some((&[flags, cuts], rest)) = data.split_first_chunk() else {
        return;
    };
    let crc = flags & 1 != 0;
    let (cuts, stream) = rest.split_at(usize::from(cuts).min(rest.len()));
    let strip = |stream: &[u8], cuts: &[u8]| {
        let mut stripper = MarkerStripper::new(crc);
        let mut out = Vec::new();
        let verdict = pieces(stream, cuts).try_for_each(|piece| stripper.strip(piece, &mut out));
        (verdict, out)
    };
    let whole = strip(stream, &[]);
    assert!(whole.1.len() <= stream.len());
    assert_eq!(whole, strip(stream, cuts));

    // The same bytes as FPDUs, at lengths that the flags spread.
    let step = 1 + usize::from(flags >> 1) * 16;
    let mut plain = Vec::new();
    let mut marked = Vec::new();
    let mut inserter = MarkerInserter::new(crc);
    for ulpdu in stream.chunks(step).take(64) {
        let fpdu = fpdu(ulpdu, crc);
        inserter.insert(&fpdu, &mut marked);
        plain.extend_from_slice(&fpdu);
    }
    assert_eq!(marked.len(), plain.len() + 4 * marked.len().div_ceil(512));
    assert_eq!(strip(&marked, cuts), (Ok(()), plain));
}

/// Any bytes as an ULPDU, its first byte saying where to cut: the CRC against a slow one, and no bad CRC gets better on
/// its way through markers.
pub fn fpdu_crc(data: &[u8]) {
    let Some((&cut, ulpdu)) = data.split_first() else {
        return;
    };
    let ulpdu = &ulpdu[..ulpdu.len().min(4096)];
    let (head, tail) = ulpdu.split_at(usize::from(cut).min(ulpdu.len()));
    assert_eq!(crc32c(ulpdu), slow_crc32c(ulpdu));
    assert_eq!(crc32c_append(crc32c(head), tail), crc32c(ulpdu));

    let mut bad = fpdu(ulpdu, true);
    let at = bad.len() - 1 - usize::from(cut).min(bad.len() - 3);
    bad[at] ^= 1 << (cut % 8);
    let (body, trailer) = bad.split_at(bad.len() - CRC_LEN);
    assert_ne!(crc32c(body).to_le_bytes(), trailer);
    let (mut marked, mut out) = (Vec::new(), Vec::new());
    MarkerInserter::new(true).insert(&bad, &mut marked);
    let (body, trailer) = marked.split_at(marked.len() - CRC_LEN);
    assert_ne!(crc32c(body).to_le_bytes(), trailer);
    assert_eq!(MarkerStripper::new(true).strip(&marked, &mut out), Ok(()));
    assert_eq!(out, bad);
}

/// The FPDU that carries `ulpdu`.
pub fn fpdu(ulpdu: &[u8], crc: bool) -> Vec<u8> {
    let mut fpdu = (ulpdu.len() as u16).to_be_bytes().to_vec();
    fpdu.extend_from_slice(ulpdu);
    fpdu.resize(fpdu_len(ulpdu.len()) - CRC_LEN, 0);
    let trailer = if crc { crc32c(&fpdu) } else { 0 };
    fpdu.extend_from_slice(&trailer.to_le_bytes());
    fpdu
}

/// CRC-32C bit by bit, as the polynomial is written down.
fn slow_crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc: u32, _| {
            crc >> 1 ^ if crc & 1 != 0 { 0x82f6_3b78 } else { 0 }
        })
    })
}

#[cfg(test)]
mod tests {
    macro_rules! replays {
        ($($target:ident),*) => {
            $(
                #[test]
                fn $target() {
                    super::replay(stringify!($target), super::$target);
                }
            )*
        };
    }

    replays!(
        start_frame,
        ddp_header,
        datagram,
        roce_packet,
        sidr,
        meeting,
        terminate,
        control,
        exs_message,
        markers,
        fpdu_crc
    );
}
