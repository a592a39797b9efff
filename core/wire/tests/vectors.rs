//! Frames as literal bytes, put together by hand from the RFCs' figures. tshark 4.0 dissects each of them as what it says
//! here, with a good CRC (it has no names for Immediate Data and Swap).

use weft_wire::crc::crc32c;
use weft_wire::ddp::{self, Header, HeaderError, Tagged, Untagged};
use weft_wire::exs;
use weft_wire::mpa::{
    CRC_LEN, Enhanced, FPDU_HEADER_LEN, FrameKind, MarkerError, MarkerInserter, MarkerStripper,
    StartError, StartFrame, fpdu_len,
};
use weft_wire::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, MpaError, Opcode, OperationError, ProtectionError,
    ReadRequest, TaggedError, TermError, Terminate,
};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).expect("a hex digit") as u8)
        .collect();
    digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}

/// Takes an FPDU apart as a receiver does: length, CRC, DDP header, payload.
fn open(fpdu: &[u8]) -> (Header, Vec<u8>) {
    let len = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
    assert_eq!(fpdu.len(), fpdu_len(len));
    let (body, trailer) = fpdu.split_at(fpdu.len() - CRC_LEN);
    assert_eq!(crc32c(body).to_le_bytes(), trailer);
    let ulpdu = &body[FPDU_HEADER_LEN..][..len];
    let header = Header::parse(ulpdu).expect("a header");
    (header, ulpdu[header.len()..].to_vec())
}

/// Both ways: the bytes parse to the header and payload, and these make the bytes.
fn check(text: &str, header: Header, payload: &[u8], printed: &str) {
    let fpdu = hex(text);
    assert_eq!(open(&fpdu), (header, payload.to_vec()), "{header}");
    assert_eq!(header.to_string(), printed);
    let mut raw = [0; ddp::MAX_LEN];
    let len = header.emit(&mut raw);
    assert_eq!(raw[..len], fpdu[FPDU_HEADER_LEN..][..len], "{header}");
}

fn tagged(opcode: Opcode, stag: u32, to: u64) -> Header {
    Header::Tagged(Tagged {
        opcode,
        last: true,
        stag,
        to,
    })
}

fn untagged(opcode: Opcode, qn: u32, msn: u32, invalidate: u32) -> Header {
    Header::Untagged(Untagged {
        opcode,
        last: true,
        invalidate,
        qn,
        msn,
        mo: 0,
    })
}

const READ_REQUEST: ReadRequest = ReadRequest {
    sink_stag: 0x1122_3344,
    sink_to: 0x0102_0304_0506_0708,
    size: 4096,
    src_stag: 0x5566_7788,
    src_to: 0x1112_1314_1516_1718,
};

#[test]
fn crc_of_the_iscsi_examples() {
    // RFC 3720 B.4, as they stand there in the order of transmission.
    let up: Vec<u8> = (0..32).collect();
    let down: Vec<u8> = (0..32).rev().collect();
    for (data, crc) in [
        (&[0; 32][..], "aa36918a"),
        (&[0xff; 32], "43aba862"),
        (&up, "4e79dd46"),
        (&down, "5cdb3f11"),
    ] {
        assert_eq!(crc32c(data).to_le_bytes(), hex(crc)[..]);
    }
}

#[test]
fn write() {
    check(
        "0011 c1 40 11223344 0102030405060708 616263 00 ca5192e6",
        tagged(Opcode::Write, 0x1122_3344, 0x0102_0304_0506_0708),
        b"abc",
        "Write, stag 0x11223344, to 0x102030405060708, last",
    );
}

#[test]
fn read_response() {
    check(
        "0014 c1 42 11223344 0000000000000010 616263646566 0000 602f4fad",
        tagged(Opcode::ReadResponse, 0x1122_3344, 0x10),
        b"abcdef",
        "Read Response, stag 0x11223344, to 0x10, last",
    );
}

#[test]
fn sends() {
    check(
        "0012 41 43 00000000 00000000 00000001 00000000 587be8c4",
        untagged(Opcode::Send, 0, 1, 0),
        b"",
        "Send, qn 0, msn 1, mo 0, last",
    );
    check(
        "0013 41 44 deadbeef 00000000 00000002 00000000 78 000000 ee08e404",
        untagged(Opcode::SendInvalidate, 0, 2, 0xdead_beef),
        b"x",
        "Send with Invalidate, qn 0, msn 2, mo 0, invalidate 0xdeadbeef, last",
    );
    check(
        "0014 41 45 00000000 00000000 00000003 00000000 7879 0000 b320d9c8",
        untagged(Opcode::SendSe, 0, 3, 0),
        b"xy",
        "Send with SE, qn 0, msn 3, mo 0, last",
    );
    check(
        "0015 41 46 deadbeef 00000000 00000004 00000000 78797a 00 2a3031da",
        untagged(Opcode::SendSeInvalidate, 0, 4, 0xdead_beef),
        b"xyz",
        "Send with SE and Invalidate, qn 0, msn 4, mo 0, invalidate 0xdeadbeef, last",
    );
}

#[test]
fn immediate_data() {
    check(
        "001a 41 48 00000000 00000000 00000005 00000000 0102030405060708 922360c6",
        untagged(Opcode::Immediate, 0, 5, 0),
        &[1, 2, 3, 4, 5, 6, 7, 8],
        "Immediate Data, qn 0, msn 5, mo 0, last",
    );
    check(
        "001a 41 49 00000000 00000000 00000006 00000000 0102030405060708 a0a022b9",
        untagged(Opcode::ImmediateSe, 0, 6, 0),
        &[1, 2, 3, 4, 5, 6, 7, 8],
        "Immediate Data with SE, qn 0, msn 6, mo 0, last",
    );
}

#[test]
fn read_request() {
    let (header, payload) = open(&hex("002e 41 41 00000000 00000001 00000001 00000000 \
         11223344 0102030405060708 00001000 55667788 1112131415161718 fc4dfb71"));
    assert_eq!(header, untagged(Opcode::ReadRequest, 1, 1, 0));
    assert_eq!(ReadRequest::parse(&payload), Some(READ_REQUEST));
    let mut raw = [0; ReadRequest::LEN];
    READ_REQUEST.emit(&mut raw);
    assert_eq!(raw, payload[..]);
    assert_eq!(
        READ_REQUEST.to_string(),
        "4096 bytes, from 0x55667788+0x1112131415161718 to 0x11223344+0x102030405060708"
    );
    assert_eq!(ReadRequest::parse(&payload[1..]), None);
}

#[test]
fn atomics() {
    let fetch_add = AtomicRequest {
        op: AtomicOp::FetchAdd,
        request_id: 7,
        stag: 0x5566_7788,
        to: 0x40,
        add_or_swap: 1,
        add_or_swap_mask: u64::MAX,
        compare: 0,
        compare_mask: 0,
    };
    let swap = AtomicRequest {
        op: AtomicOp::Swap,
        ..fetch_add
    };
    let compare_swap = AtomicRequest {
        op: AtomicOp::CompareSwap,
        compare: 2,
        compare_mask: u64::MAX,
        ..fetch_add
    };
    for (text, msn, request, printed) in [
        (
            "0046 41 4a 00000000 00000001 00000002 00000000 00000002 00000007 55667788 0000000000000040 \
             0000000000000001 ffffffffffffffff 0000000000000002 ffffffffffffffff bebdb2ea",
            2,
            compare_swap,
            "CmpSwap, id 7, 0x55667788+0x40, 0x1 mask 0xffffffffffffffff, compare 0x2 mask 0xffffffffffffffff",
        ),
        (
            "0046 41 4a 00000000 00000001 00000003 00000000 00000000 00000007 55667788 0000000000000040 \
             0000000000000001 ffffffffffffffff 0000000000000000 0000000000000000 00e9a430",
            3,
            fetch_add,
            "FetchAdd, id 7, 0x55667788+0x40, 0x1 mask 0xffffffffffffffff",
        ),
        (
            "0046 41 4a 00000000 00000001 00000004 00000000 00000001 00000007 55667788 0000000000000040 \
             0000000000000001 ffffffffffffffff 0000000000000000 0000000000000000 c653109d",
            4,
            swap,
            "Swap, id 7, 0x55667788+0x40, 0x1 mask 0xffffffffffffffff",
        ),
    ] {
        let (header, payload) = open(&hex(text));
        assert_eq!(header, untagged(Opcode::AtomicRequest, 1, msn, 0));
        assert_eq!(AtomicRequest::parse(&payload), Some(request));
        assert_eq!(request.to_string(), printed);
        let mut raw = [0; AtomicRequest::LEN];
        request.emit(&mut raw);
        assert_eq!(raw, payload[..]);
        let mut unknown = payload;
        unknown[3] = 3;
        assert_eq!(AtomicRequest::parse(&unknown), None);
    }
    let (header, payload) = open(&hex(
        "001e 41 4b 00000000 00000003 00000001 00000000 00000007 0000000000000002 5cce9b51",
    ));
    assert_eq!(header, untagged(Opcode::AtomicResponse, 3, 1, 0));
    let response = AtomicResponse {
        request_id: 7,
        original: 2,
    };
    assert_eq!(AtomicResponse::parse(&payload), Some(response));
    let mut raw = [0; AtomicResponse::LEN];
    response.emit(&mut raw);
    assert_eq!(raw, payload[..]);
}

#[test]
fn terminates() {
    for (text, terminate, printed) in [
        (
            "0046 41 47 00000000 00000002 00000001 00000000 01 01 e000 002e \
             41 41 00000000 00000001 00000003 00000000 \
             11223344 0102030405060708 00001000 55667788 1112131415161718 dd302ce5",
            Terminate {
                error: TermError::Protection(ProtectionError::BaseBounds),
                ddp_segment_len: Some(46),
                ddp_header: Some(untagged(Opcode::ReadRequest, 1, 3, 0)),
                read_request: Some(READ_REQUEST),
            },
            "RDMAP protection: base or bounds violation, segment of 46 bytes: Read Request, qn 1, msn 3, mo 0, last: \
             4096 bytes, from 0x55667788+0x1112131415161718 to 0x11223344+0x102030405060708",
        ),
        (
            "0026 41 47 00000000 00000002 00000001 00000000 11 00 c000 0014 \
             c1 40 00000099 0000000000000000 df2e3889",
            Terminate {
                error: TermError::Tagged(TaggedError::InvalidStag),
                ddp_segment_len: Some(20),
                ddp_header: Some(tagged(Opcode::Write, 0x99, 0)),
                read_request: None,
            },
            "DDP tagged: invalid STag, segment of 20 bytes: Write, stag 0x00000099, to 0x0, last",
        ),
        (
            "0016 41 47 00000000 00000002 00000001 00000000 20 02 0000 7fe42585",
            Terminate::bare(TermError::Mpa(MpaError::CrcError)),
            "MPA: CRC error",
        ),
    ] {
        let (header, payload) = open(&hex(text));
        assert_eq!(header, untagged(Opcode::Terminate, 2, 1, 0));
        assert_eq!(Terminate::parse(&payload), Ok(terminate));
        assert_eq!(terminate.to_string(), printed);
        let mut raw = [0; Terminate::MAX_LEN];
        let len = terminate.emit(&mut raw);
        assert_eq!(raw[..len], payload[..]);
    }
}

#[test]
fn terminates_of_siw_on_little_endian_hosts_are_read_as_meant() {
    // As the kernel's siw (6.1) answers a Read of an unknown STag: layer and type swapped, M, D and R in the low bits.
    let read = hex("10 00 0700 002e 41 41 00000000 00000001 00000001 00000000 \
         11111111 0000000000000000 00000064 0bad5700 0000000000001000");
    let terminate = Terminate::parse(&read).expect("a Terminate");
    let wanted = TermError::Protection(ProtectionError::InvalidStag);
    assert_eq!(terminate.error, wanted);
    assert_eq!(terminate.ddp_segment_len, Some(0x2e));
    assert_eq!(
        terminate.read_request.map(|r| r.src_stag),
        Some(0x0bad_5700)
    );
    // Without copies only the layer and type give it away, where they make no sense the right way round.
    let bare = Terminate::parse(&hex("20 09 0000")).expect("a Terminate");
    let wanted = TermError::Operation(OperationError::CannotInvalidate);
    assert_eq!(bare, Terminate::bare(wanted));
    // What does is taken at its word.
    let crc = Terminate::parse(&hex("20 02 0000")).expect("a Terminate");
    assert_eq!(crc.error, TermError::Mpa(MpaError::CrcError));
}

#[test]
fn terminate_with_senseless_copies_still_says_why() {
    // siw sets R for a Send, whose RDMAP header is empty.
    let siw = hex("01 02 e000 0013 41 43 00000000 00000000 00000002 00000000");
    let terminate = Terminate::parse(&siw).expect("a Terminate");
    assert_eq!(
        terminate.error,
        TermError::Protection(ProtectionError::AccessRights)
    );
    assert_eq!(terminate.ddp_header, Some(untagged(Opcode::Send, 0, 2, 0)));
    assert_eq!(terminate.read_request, None);
    // The header was the error.
    let bad = hex("01 02 e000 0013 43 43 00000000 00000000 00000002 00000000");
    let terminate = Terminate::parse(&bad).expect("a Terminate");
    assert_eq!(
        (terminate.ddp_segment_len, terminate.ddp_header),
        (Some(0x13), None)
    );
    // Cut short at every place.
    for len in 0..siw.len() {
        assert_eq!(Terminate::parse(&siw[..len]).is_ok(), len >= 4);
    }
}

#[test]
fn term_errors_have_the_numbers_of_the_rfcs() {
    use weft_wire::rdmap::{
        OperationError as O, ProtectionError as P, TaggedError as T, UntaggedError as U,
    };
    for (error, parts) in [
        (TermError::RdmapCatastrophic, (0, 0, 0x00)),
        (TermError::Protection(P::InvalidStag), (0, 1, 0x00)),
        (TermError::Protection(P::BaseBounds), (0, 1, 0x01)),
        (TermError::Protection(P::AccessRights), (0, 1, 0x02)),
        (TermError::Protection(P::StagNotAssociated), (0, 1, 0x03)),
        (TermError::Protection(P::ToWrap), (0, 1, 0x04)),
        (TermError::Protection(P::CannotInvalidate), (0, 1, 0x09)),
        (TermError::Protection(P::Unspecified), (0, 1, 0xff)),
        (TermError::Operation(O::InvalidVersion), (0, 2, 0x05)),
        (TermError::Operation(O::UnexpectedOpcode), (0, 2, 0x06)),
        (TermError::Operation(O::CatastrophicStream), (0, 2, 0x07)),
        (TermError::Operation(O::CatastrophicGlobal), (0, 2, 0x08)),
        (TermError::Operation(O::CannotInvalidate), (0, 2, 0x09)),
        (TermError::Operation(O::Unspecified), (0, 2, 0xff)),
        (TermError::DdpCatastrophic, (1, 0, 0x00)),
        (TermError::Tagged(T::InvalidStag), (1, 1, 0x00)),
        (TermError::Tagged(T::BaseBounds), (1, 1, 0x01)),
        (TermError::Tagged(T::StagNotAssociated), (1, 1, 0x02)),
        (TermError::Tagged(T::ToWrap), (1, 1, 0x03)),
        (TermError::Tagged(T::InvalidVersion), (1, 1, 0x04)),
        (TermError::Untagged(U::InvalidQn), (1, 2, 0x01)),
        (TermError::Untagged(U::NoBuffer), (1, 2, 0x02)),
        (TermError::Untagged(U::MsnRange), (1, 2, 0x03)),
        (TermError::Untagged(U::InvalidMo), (1, 2, 0x04)),
        (TermError::Untagged(U::TooLong), (1, 2, 0x05)),
        (TermError::Untagged(U::InvalidVersion), (1, 2, 0x06)),
        (TermError::Mpa(MpaError::TcpClosed), (2, 0, 0x01)),
        (TermError::Mpa(MpaError::CrcError), (2, 0, 0x02)),
        (TermError::Mpa(MpaError::MarkerMismatch), (2, 0, 0x03)),
        (TermError::Mpa(MpaError::InvalidFrame), (2, 0, 0x04)),
        (TermError::Mpa(MpaError::LocalCatastrophic), (2, 0, 0x05)),
        (TermError::Mpa(MpaError::InsufficientIrd), (2, 0, 0x06)),
        (TermError::Mpa(MpaError::NoMatchingRtr), (2, 0, 0x07)),
        (
            TermError::Other {
                layer: 0,
                etype: 0,
                code: 0xff,
            },
            (0, 0, 0xff),
        ),
        (
            TermError::Other {
                layer: 15,
                etype: 15,
                code: 1,
            },
            (15, 15, 1),
        ),
    ] {
        assert_eq!(error.parts(), parts, "{error}");
        assert_eq!(TermError::from_parts(parts.0, parts.1, parts.2), error);
    }
    for (layer, etype, code) in
        (0..16).flat_map(|l| (0..16).flat_map(move |e| (0..=255).map(move |c| (l, e, c))))
    {
        assert_eq!(
            TermError::from_parts(layer, etype, code).parts(),
            (layer, etype, code)
        );
    }
    let siw = TermError::from_parts(0, 0, 0xff);
    assert_eq!(
        siw.to_string(),
        "RDMAP catastrophic: layer 0, type 0, code 0xff"
    );
}

#[test]
fn bad_headers() {
    let good = hex("41 43 00000000 00000000 00000001 00000000");
    let with = |at: usize, byte: u8| {
        let mut bad = good.clone();
        bad[at] = byte;
        Header::parse(&bad)
    };
    assert!(Header::parse(&good).is_ok());
    for len in 0..good.len() {
        assert_eq!(Header::parse(&good[..len]), Err(HeaderError::Short));
    }
    assert_eq!(
        Header::parse(&hex("c1 40 11223344 01020304050607")),
        Err(HeaderError::Short)
    );
    assert_eq!(
        with(0, 0x42),
        Err(HeaderError::DdpVersion { tagged: false })
    );
    assert_eq!(with(0, 0xc0), Err(HeaderError::DdpVersion { tagged: true }));
    assert_eq!(with(1, 0x03), Err(HeaderError::RdmapVersion));
    assert_eq!(with(1, 0x83), Err(HeaderError::RdmapVersion));
    assert_eq!(with(1, 0x4c), Err(HeaderError::Opcode(12)));
    assert_eq!(with(1, 0x40), Err(HeaderError::Model(Opcode::Write)));
    assert_eq!(with(0, 0xc1), Err(HeaderError::Model(Opcode::Send)));
    assert_eq!(
        with(9, 1),
        Err(HeaderError::Queue {
            opcode: Opcode::Send,
            qn: 1
        })
    );
    // Reserved bits and a reserved STag are not looked at.
    assert_eq!(with(0, 0x7d), Header::parse(&good));
    assert_eq!(with(1, 0x73), Header::parse(&good));
    assert_eq!(with(5, 1), Header::parse(&good));
    // Not the last segment.
    assert!(with(0, 0x01).is_ok_and(|header| !header.is_last()));
}

const ENHANCED: Enhanced = Enhanced {
    peer_to_peer: true,
    rtr_send: false,
    rtr_write: true,
    rtr_read: true,
    ird: 16,
    ord: 32,
};

#[test]
fn start_frames() {
    let frame = StartFrame {
        kind: FrameKind::Request,
        markers: false,
        crc: true,
        reject: false,
        revision: 1,
        enhanced: None,
        private_data: b"hello",
    };
    for (text, frame, printed) in [
        (
            // "MPA ID Req Frame"
            "4d504120494420526571204672616d65 40 01 0005 68656c6c6f",
            frame,
            "MPA Request, rev 1, crc, private data 5 bytes",
        ),
        (
            "4d504120494420526571204672616d65 50 02 0009 8010 c020 68656c6c6f",
            StartFrame {
                revision: 2,
                enhanced: Some(ENHANCED),
                ..frame
            },
            "MPA Request, rev 2, crc, ird 16, ord 32, peer-to-peer, rtr write, rtr read, private data 5 bytes",
        ),
        (
            // "MPA ID Rep Frame", rejecting
            "4d504120494420526570204672616d65 e0 01 0000",
            StartFrame {
                kind: FrameKind::Reply,
                markers: true,
                reject: true,
                private_data: b"",
                ..frame
            },
            "MPA Reply, rev 1, markers, crc, reject, private data 0 bytes",
        ),
        (
            "4d504120494420526570204672616d65 10 02 0004 7fff 3fff",
            StartFrame {
                kind: FrameKind::Reply,
                crc: false,
                revision: 2,
                enhanced: Some(Enhanced {
                    peer_to_peer: false,
                    rtr_send: true,
                    rtr_write: false,
                    rtr_read: false,
                    ird: Enhanced::NOT_NEGOTIATED,
                    ord: Enhanced::NOT_NEGOTIATED,
                }),
                private_data: b"",
                ..frame
            },
            "MPA Reply, rev 2, ird 16383, ord 16383, rtr send, private data 0 bytes",
        ),
    ] {
        let raw = hex(text);
        assert_eq!(frame.emit(), raw);
        assert_eq!(frame.to_string(), printed);
        for len in 0..raw.len() {
            assert_eq!(StartFrame::parse(frame.kind, &raw[..len]), Ok(None));
        }
        let mut more = raw.clone();
        more.extend_from_slice(b"first FPDU");
        assert_eq!(
            StartFrame::parse(frame.kind, &more),
            Ok(Some((frame, raw.len())))
        );
    }
}

#[test]
fn bad_start_frames() {
    let request = |rest: &str| {
        let raw = [&b"MPA ID Req Frame"[..], &hex(rest)].concat();
        StartFrame::parse(FrameKind::Request, &raw).map(|done| done.map(|(_, len)| len))
    };
    assert_eq!(request("00 00 0000"), Err(StartError::Revision(0)));
    assert_eq!(request("00 03 0000"), Err(StartError::Revision(3)));
    assert_eq!(
        request("00 01 0201"),
        Err(StartError::PrivateDataTooLong(513))
    );
    assert_eq!(request("00 01 0200"), Ok(None));
    assert_eq!(request("10 02 0003"), Err(StartError::EnhancedTooShort));
    // In revision 1 the S bit is reserved; in a Request so is R.
    assert_eq!(request("3f 01 0003 010203"), Ok(Some(23)));
    // Another protocol is found out at its first byte that differs.
    assert_eq!(
        StartFrame::parse(FrameKind::Request, b"G"),
        Err(StartError::Key)
    );
    assert_eq!(
        StartFrame::parse(FrameKind::Request, b"MPA ID Rep"),
        Err(StartError::Key)
    );
    assert_eq!(
        StartFrame::parse(FrameKind::Request, b"MPA ID Re"),
        Ok(None)
    );
    assert_eq!(
        StartFrame::parse(FrameKind::Reply, b"MPA ID Req Frame"),
        Err(StartError::Key)
    );
}

#[test]
#[should_panic(expected = "private data of 509 bytes")]
fn too_much_private_data_for_an_enhanced_frame() {
    let frame = StartFrame {
        kind: FrameKind::Reply,
        markers: false,
        crc: true,
        reject: false,
        revision: 2,
        enhanced: Some(ENHANCED),
        private_data: &[0; StartFrame::max_private_data(true) + 1],
    };
    let _ = frame.emit();
}

#[test]
fn first_marker() {
    // The stream starts with a marker, pointer 0, which the CRC covers.
    let marked = hex("0000 0000 0012 c1 40 11223344 0102030405060708 61626364 bf4c51b6");
    let mut plain = hex("0012 c1 40 11223344 0102030405060708 61626364");
    let crc = crc32c(&plain);
    plain.extend_from_slice(&crc.to_le_bytes());
    let mut out = Vec::new();
    MarkerInserter::new(true).insert(&plain, &mut out);
    assert_eq!(out, marked);
    out.clear();
    assert_eq!(MarkerStripper::new(true).strip(&marked, &mut out), Ok(()));
    assert_eq!(out, plain);
}

#[test]
fn markers_point_back_to_the_fpdu() {
    // 512 bytes of FPDU, then 508, then 512: markers at 0, in the first FPDU, right before the third, in the third.
    let mut inserter = MarkerInserter::new(false);
    let mut marked = Vec::new();
    for len in [506_u16, 502, 506] {
        let mut fpdu = len.to_be_bytes().to_vec();
        fpdu.resize(fpdu_len(usize::from(len)), 0x55);
        inserter.insert(&fpdu, &mut marked);
    }
    let marker = |at: usize| u32::from_be_bytes(marked[at..][..4].try_into().expect("four bytes"));
    // First FPDU from 4 to 520 with the marker at 512, 508 bytes on; it falls right before the CRC.
    assert_eq!((marker(0), marker(512)), (0, 508));
    // Second from 520 to 1032 with the marker at 1024, 504 bytes on; third from 1032, its marker at 1536.
    assert_eq!((marker(1024), marker(1536)), (504, 504));
    assert_eq!(marked.len(), 512 + 508 + 512 + 4 * 4);

    // A wrong pointer is an error, for good; the bytes before it have come out.
    let mut bad = marked.clone();
    bad[1027] ^= 4;
    let error = Err(MarkerError {
        expected: 504,
        found: 508,
    });
    let (mut stripper, mut out) = (MarkerStripper::new(false), Vec::new());
    assert_eq!(stripper.strip(&bad, &mut out), error);
    assert_eq!(out.len(), 1024 - 8);
    assert_eq!(stripper.strip(&marked, &mut out), error);
    assert_eq!(out.len(), 1024 - 8);

    // Reserved bits are not looked at.
    let mut odd = marked.clone();
    odd[1024..1026].fill(0xff);
    odd[1027] |= 3;
    out.clear();
    assert_eq!(MarkerStripper::new(false).strip(&odd, &mut out), Ok(()));
    assert_eq!(out.len(), 512 + 508 + 512);
}

/// Both ways: the bytes parse to the message, and it makes the bytes.
fn check_exs(text: &str, body: exs::Body, printed: &str) {
    let raw = hex(text);
    let message = exs::Message { credits: 2, body };
    assert_eq!(exs::Message::parse(&raw), Ok(message), "{message}");
    assert_eq!(message.to_string(), printed);
    let mut head = [0; exs::MAX_LEN];
    let len = message.emit(&mut head);
    assert_eq!(head[..len], raw[..len], "{message}");
}

#[test]
fn exs_messages() {
    use exs::Body;
    let memory = exs::Remote {
        addr: 0x7f00_0000_1000,
        rkey: 0x8001,
        len: 4096,
    };
    let packet = exs::Packet {
        index: 7,
        addr: 0x2000,
        rkey: 0x8002,
        len: 16,
    };
    check_exs(
        "01010002 00001000 0000000000000100 0000000000000002 00007f0000001000 00008001 00000000",
        Body::Advert(exs::Advert {
            seq: 256,
            phase: 2,
            waitall: true,
            memory,
        }),
        "Advert, seq 256 phase 2, 4096 bytes at 0x7f0000001000 stag 0x00008001, waitall, 2 credits",
    );
    check_exs(
        "02000002 00000400",
        Body::Ack { freed: 1024 },
        "Ack, 1024 bytes freed, 2 credits",
    );
    check_exs(
        "03000002 00000003 616263",
        Body::Small { len: 3 },
        "Small, 3 bytes, 2 credits",
    );
    check_exs(
        "04020002 00000064",
        Body::Wrote {
            transfer: exs::Transfer::Indirect,
            len: 100,
        },
        "Wrote, indirect, 100 bytes, 2 credits",
    );
    check_exs("05000002 00000000", Body::Retract, "Retract, 2 credits");
    check_exs(
        "06000002 00000000 0000000000000102",
        Body::Retracted { seq: 258 },
        "Retracted, seq 258, 2 credits",
    );
    check_exs("07000002 00000000", Body::Fin, "Fin, 2 credits");
    check_exs("08000002 00000000", Body::Credit, "Credit, 2 credits");
    check_exs(
        "09000002 00000010 0000000000000007 0000000000002000 00008002 00000000",
        Body::PktAdvert(packet),
        "PktAdvert 7, 16 bytes at 0x2000 stag 0x00008002, 2 credits",
    );
    check_exs(
        "0a000002 00000010 0000000000000007 0000000000002000 00008002 00000000",
        Body::Source(packet),
        "Source 7, 16 bytes at 0x2000 stag 0x00008002, 2 credits",
    );
    check_exs(
        "0b000002 0000000f 0000000000000007",
        Body::SourceDone { index: 7, len: 15 },
        "SourceDone 7, 15 bytes, 2 credits",
    );
}

#[test]
fn exs_messages_that_are_not() {
    use exs::ParseError::{Kind, Length, Reserved};
    for (text, error) in [
        ("", Length),
        ("08000002 000000", Length),
        ("00000002 00000000", Kind(0)),
        ("0c000002 00000000", Kind(12)),
        // Flags that nothing has.
        ("08010002 00000000", Reserved),
        (
            "01020002 00000001 0000000000000000 0000000000000000 0000000000000000 00000000 00000000",
            Reserved,
        ),
        // An Ack of nothing, a Credit with a length, a Small that is cut.
        ("02000002 00000000", Reserved),
        ("08000002 00000001", Reserved),
        ("03000002 00000003 6162", Length),
        // Transfers that there are not.
        ("04000002 00000001", Kind(0)),
        ("04050002 00000001", Kind(5)),
        // Adverts of nothing, of memory that wraps, with a last word.
        (
            "01000002 00000000 0000000000000000 0000000000000000 0000000000001000 00000001 00000000",
            Reserved,
        ),
        (
            "01000002 00000002 0000000000000000 0000000000000000 ffffffffffffffff 00000001 00000000",
            Reserved,
        ),
        (
            "01000002 00000002 0000000000000000 0000000000000000 0000000000001000 00000001 00000001",
            Reserved,
        ),
        (
            "0a000002 00000002 0000000000000000 ffffffffffffffff 00000001 00000000",
            Reserved,
        ),
        (
            "09000002 00000002 0000000000000000 0000000000001000 00000001",
            Length,
        ),
        ("06000002 00000001 0000000000000000", Reserved),
    ] {
        assert_eq!(exs::Message::parse(&hex(text)), Err(error), "{text}");
    }
    assert_eq!(exs::Imm::decode(1 << 48 | 1 << 56), Err(Reserved));
    assert_eq!(exs::Imm::decode(0), Err(Kind(0)));
}

#[test]
fn exs_greeting() {
    let text = "77657873 01 01 00 07 00000010 00000100 00007f0000002000 00008003 00010000";
    let hello = exs::Hello {
        kind: exs::Kind::Stream,
        mode: exs::Mode::Dynamic,
        immediate: true,
        credits: 16,
        small: 256,
        ring: Some(exs::Remote {
            addr: 0x7f00_0000_2000,
            rkey: 0x8003,
            len: 65536,
        }),
    };
    assert_eq!(hello.emit(), hex(text)[..]);
    assert_eq!(exs::Hello::parse(&hex(text)), Ok(hello));
    assert_eq!(
        hello.to_string(),
        "Hello, stream, Dynamic, immediate, 16 credits, small 256, buffer 65536 bytes at 0x7f0000002000 stag 0x00008003"
    );
    for (at, value, error) in [
        (0, b'W', exs::ParseError::Magic),
        (4, 2, exs::ParseError::Version(2)),
        (5, 3, exs::ParseError::Kind(3)),
        (6, 1, exs::ParseError::Kind(1)),
        (7, 4, exs::ParseError::Reserved),
        (7, 0x17, exs::ParseError::Reserved),
        (16, 0xff, exs::ParseError::Reserved),
        (29, 0, exs::ParseError::Reserved),
    ] {
        let mut raw = hello.emit();
        raw[at] = value;
        if at == 16 {
            raw[16..24].fill(0xff);
        }
        assert_eq!(exs::Hello::parse(&raw), Err(error), "byte {at}");
    }
    for cut in 0..exs::HELLO_LEN {
        assert_eq!(
            exs::Hello::parse(&hello.emit()[..cut]),
            Err(exs::ParseError::Length)
        );
    }
}

#[test]
fn exs_ends_that_cannot_talk() {
    let hello = exs::Hello {
        kind: exs::Kind::Stream,
        mode: exs::Mode::Direct,
        immediate: true,
        credits: 16,
        small: 256,
        ring: None,
    };
    let packets = exs::Kind::SeqPacket(exs::Design::Source);
    let other = exs::Hello {
        kind: packets,
        ..hello
    };
    assert_eq!(
        hello.agree(&other),
        Err(exs::Mismatch::Kind(exs::Kind::Stream, packets))
    );
    let indirect = exs::Hello {
        mode: exs::Mode::Indirect,
        ..hello
    };
    assert_eq!(hello.agree(&indirect), Err(exs::Mismatch::Mode));
    // The policy of the paper is one end's matter: its greeting is that of Dynamic.
    let published = exs::Hello {
        mode: exs::Mode::Published,
        ..hello
    };
    let dynamic = exs::Hello {
        mode: exs::Mode::Dynamic,
        ..hello
    };
    assert_eq!(published.emit(), dynamic.emit());
    let mode = |mine: &exs::Hello, peer| mine.agree(peer).map(|agreed| agreed.mode);
    assert_eq!(mode(&published, &dynamic), Ok(exs::Mode::Published));
    assert_eq!(mode(&dynamic, &published), Ok(exs::Mode::Dynamic));
    assert_eq!(mode(&published, &hello), Ok(hello.mode));
    assert_eq!(mode(&hello, &published), Ok(hello.mode));
    assert_eq!(indirect.agree(&indirect), Err(exs::Mismatch::NoRing));
    let few = exs::Hello {
        credits: 2,
        ..hello
    };
    assert_eq!(few.agree(&hello), Err(exs::Mismatch::Credits(2)));
    assert_eq!(hello.agree(&few), Err(exs::Mismatch::Credits(2)));
}
