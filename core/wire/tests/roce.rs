//! RoCE v2: a packet of the kernel's `rxe`, and round trips of every header and message.

use proptest::collection::vec;
use proptest::prelude::*;
use weft_wire::roce::cm::{
    self, About, Dreq, IpHeader, Mad, Message, Mra, PortSpace, Rej, Rep, Req, Rtu, SidrRep, SidrReq,
};
use weft_wire::roce::{
    Aeth, AtomicEth, Deth, Header, ICRC_LEN, Icrc, MASK_24, NakCode, Op, Opcode, Reth, Route,
    Service, Syndrome,
};

/// What `rping` sent through `rxe` of Linux 6.1 to connect, from its BTH on.
const REQUEST: &str = "6400ffff0000000180000000800100000000000101070203000000000000000226934bba0010000000000000\
    ba4b9326000000000000000001061c06505400fffe12345600000000000000000000110100000001000000a0\
    f11982a7ffff37f0ffffffff00000000000000000000ffff0a00020f00000000000000000000ffff0a000202\
    16a7b00000400098000000000000000000000000000000000000000000000000000000000000000000000000\
    000000000000000000408eeb0000000000000000000000000a00020f0000000000000000000000000a000202\
    0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000\
    00000000000000000000000092c4eabb";
/// The identification of its IPv4 header, which its ICRC covers.
const IDENTIFICATION: u16 = 0xe71a;

fn request() -> Vec<u8> {
    let digits: Vec<u32> = REQUEST.chars().filter_map(|c| c.to_digit(16)).collect();
    digits
        .chunks_exact(2)
        .map(|pair| (pair[0] << 4 | pair[1]) as u8)
        .collect()
}

fn route() -> Route {
    Route {
        src: "10.0.2.15:55410".parse().unwrap(),
        dst: "10.0.2.2:4791".parse().unwrap(),
    }
}

#[test]
fn the_icrc_is_that_of_rxe() {
    let raw = request();
    let (packet, icrc) = raw.split_last_chunk::<ICRC_LEN>().unwrap();
    let of = |identification| {
        let mut icrc = Icrc::new(&route(), identification, packet.len());
        icrc.headers(&packet[..20]);
        icrc.update(&packet[20..]);
        icrc
    };
    assert_eq!(of(IDENTIFICATION).finish(), *icrc);
    assert!(of(0).is_valid(*icrc));
}

#[test]
fn a_congestion_notification_names_its_queue_pair() {
    let mut packet = [0; 28];
    packet[0] = 0x81;
    packet[4..8].copy_from_slice(&[0x40, 0, 0, 0x11]);
    assert_eq!(Header::congested_qp(&packet), Some(0x11));
    assert_eq!(Header::congested_qp(&packet[..11]), None);
    packet[0] = 0x04;
    assert_eq!(Header::congested_qp(&packet), None);
}

#[test]
fn a_request_of_rxe_is_understood() {
    let raw = request();
    let (header, payload) = Header::parse(&raw[..raw.len() - ICRC_LEN]).unwrap();
    let expected = Header {
        migrated: false,
        ack_request: true,
        deth: Some(Deth {
            qkey: cm::QKEY,
            src_qp: cm::QP,
        }),
        ..Header::new(Opcode::ud(Op::SendOnly), cm::QP, 0)
    };
    assert_eq!(header, expected);
    let mad = Mad::parse(payload).unwrap();
    assert_eq!(mad.transaction, 0x2_2693_4bba);
    let Message::Req(req) = mad.message else {
        panic!("{mad:?}");
    };
    let gid = |last| {
        let mut gid = [0; 16];
        gid[10..].copy_from_slice(&[0xff, 0xff, 10, 0, 2, last]);
        gid
    };
    assert_eq!(
        req,
        Req {
            local_id: 0xba4b_9326,
            service_id: cm::service_id(PortSpace::Tcp, 7174),
            ca_guid: 0x5054_00ff_fe12_3456,
            qp: 0x11,
            responder_resources: 1,
            initiator_depth: 1,
            remote_timeout: 20,
            local_timeout: 20,
            service: 0,
            psn: 0x00f1_1982,
            retry_count: 7,
            rnr_retry: 7,
            pkey: 0xffff,
            mtu: 3,
            max_cm_retries: 15,
            srq: false,
            local_gid: gid(15),
            remote_gid: gid(2),
            ack_timeout: 19,
            private_data: &payload[164..],
        }
    );
    assert_eq!(cm::service(req.service_id), Some((PortSpace::Tcp, 7174)));
    let (ip, rest) = IpHeader::parse(req.private_data).unwrap();
    let expected = IpHeader {
        port: 0x8eeb,
        src: "10.0.2.15".parse().unwrap(),
        dst: "10.0.2.2".parse().unwrap(),
    };
    assert_eq!(ip, expected);
    assert_eq!(ip.emit(), req.private_data[..IpHeader::LEN]);
    assert!(rest.iter().all(|byte| *byte == 0));
    // Ours differs in the flow label and the rate of the path, which RoCE does not use.
    let mut ours = mad.emit();
    assert_eq!(ours[112..116], [0; 4]);
    ours[112..116].copy_from_slice(&payload[112..116]);
    assert_eq!(ours, payload);
}

prop_compose! {
    fn opcode()(op in proptest::sample::select(&Op::ALL[..]), service in 0..3u8) -> Option<Opcode> {
        let service = [Service::Rc, Service::Uc, Service::Ud][usize::from(service)];
        Opcode::from_byte(Opcode { service, op }.to_byte())
    }
}

/// A datagram and the two messages that find its queue pair, byte by byte (9.3.1, 12.8).
#[test]
fn datagrams_and_their_messages_have_their_bytes() {
    let seed = |name: &str| {
        let dir = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../fuzz/corpus/roce_packet/"
        );
        std::fs::read(format!("{dir}{name}")).unwrap()
    };
    let raw = seed("ud_send_imm");
    let (header, payload) = Header::parse(&raw).unwrap();
    assert_eq!(header.opcode, Opcode::ud(Op::SendOnlyImm));
    assert_eq!(
        (header.dest_qp, header.immediate, payload),
        (0xab_cdef, Some(0xcafe), &b"hello"[..])
    );
    let deth = Deth {
        qkey: 0x0123_4567,
        src_qp: 0x11,
    };
    assert_eq!(header.deth, Some(deth));
    let raw = seed("sidr_request");
    let (header, payload) = Header::parse(&raw).unwrap();
    assert_eq!(header.dest_qp, cm::QP);
    let Some(Mad {
        transaction: 0x1122_3344_5566_7788,
        message: Message::SidrReq(req),
    }) = Mad::parse(payload)
    else {
        panic!("another message");
    };
    assert_eq!((req.request_id, req.pkey), (0x55, 0xffff));
    assert_eq!(
        cm::service(req.service_id),
        Some((cm::PortSpace::Udp, 7174))
    );
    let (addresses, data) = cm::IpHeader::parse(req.private_data).unwrap();
    assert_eq!(addresses.port, 4711);
    assert_eq!(addresses.src.to_string(), "192.0.2.1");
    assert_eq!((data.len(), &data[..8]), (180, &b"question"[..]));
    let raw = seed("sidr_reply");
    let (_, payload) = Header::parse(&raw).unwrap();
    let Some(Mad {
        message: Message::SidrRep(rep),
        ..
    }) = Mad::parse(payload)
    else {
        panic!("another message");
    };
    assert_eq!((rep.request_id, rep.status), (0x55, 0));
    assert_eq!((rep.qp, rep.qkey), (0x12_3456, 0x0123_4567));
    assert_eq!(
        (rep.private_data.len(), &rep.private_data[..6]),
        (136, &b"answer"[..])
    );
}

fn syndrome() -> impl Strategy<Value = Syndrome> {
    prop_oneof![
        (0..32u8).prop_map(Syndrome::Ack),
        (0..32u8).prop_map(Syndrome::RnrNak),
        proptest::sample::select(vec![
            Syndrome::Nak(NakCode::SequenceError),
            Syndrome::Nak(NakCode::InvalidRequest),
            Syndrome::Nak(NakCode::RemoteAccess),
            Syndrome::Nak(NakCode::RemoteOperation),
        ]),
    ]
}

fn header() -> impl Strategy<Value = Header> {
    let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<u32>());
    let flags = (any::<[bool; 5]>(), 0..4u8, any::<u16>());
    (opcode(), numbers, flags, syndrome()).prop_filter_map(
        "not an opcode of the service",
        |(opcode, (a, b, c, d), (flags, pad, pkey), syndrome)| {
            let opcode = opcode?;
            let op = opcode.op;
            let [solicited, migrated, fecn, becn, ack_request] = flags;
            Some(Header {
                solicited,
                migrated,
                pad,
                pkey,
                fecn,
                becn,
                ack_request,
                deth: (opcode.service == Service::Ud).then_some(Deth {
                    qkey: d,
                    src_qp: c as u32 & MASK_24,
                }),
                reth: op.has_reth().then_some(Reth {
                    va: a,
                    rkey: d,
                    len: b as u32,
                }),
                atomic: op.is_atomic().then_some(AtomicEth {
                    va: a,
                    rkey: d,
                    swap_add: b,
                    compare: c,
                }),
                aeth: op.has_aeth().then_some(Aeth {
                    syndrome,
                    msn: d & MASK_24,
                }),
                original: (op == Op::AtomicAck).then_some(c),
                immediate: op.has_immediate().then_some(d),
                invalidate: op.invalidates().then_some(d),
                ..Header::new(opcode, a as u32 & MASK_24, b as u32 & MASK_24)
            })
        },
    )
}

fn message() -> impl Strategy<Value = (u64, u8, [u32; 4], [u8; 8], [u8; 16])> {
    (
        any::<u64>(),
        0..9u8,
        any::<[u32; 4]>(),
        any::<[u8; 8]>(),
        any::<[u8; 16]>(),
    )
}

/// One message of each kind, its fields from random numbers.
fn of(
    kind: u8,
    long: u64,
    [a, b, c, d]: [u32; 4],
    bytes: [u8; 8],
    gid: [u8; 16],
    private_data: &[u8],
) -> Message<'_> {
    let (local_id, remote_id, qp, psn) = (a, b, c & MASK_24, d & MASK_24);
    let (about, five) = (
        [About::Req, About::Rep, About::Other][usize::from(bytes[0] % 3)],
        bytes[1] & 31,
    );
    match kind {
        0 => Message::Req(Req {
            local_id,
            service_id: long,
            ca_guid: !long,
            qp,
            responder_resources: bytes[0],
            initiator_depth: bytes[1],
            remote_timeout: bytes[2] & 31,
            local_timeout: bytes[3] & 31,
            service: bytes[4] & 3,
            psn,
            retry_count: bytes[5] & 7,
            rnr_retry: bytes[6] & 7,
            pkey: b as u16,
            mtu: bytes[7] & 15,
            max_cm_retries: bytes[7] >> 4,
            srq: bytes[6] & 8 != 0,
            local_gid: gid,
            remote_gid: gid.map(|byte| !byte),
            ack_timeout: five,
            private_data: &private_data[..92],
        }),
        1 => Message::Rep(Rep {
            local_id,
            remote_id,
            qp,
            psn,
            responder_resources: bytes[0],
            initiator_depth: bytes[1],
            ack_delay: bytes[2] & 31,
            rnr_retry: bytes[3] & 7,
            srq: bytes[4] & 1 != 0,
            ca_guid: long,
            private_data: &private_data[..196],
        }),
        2 | 3 => {
            let rtu = Rtu {
                local_id,
                remote_id,
                private_data,
            };
            if kind == 2 {
                Message::Rtu(rtu)
            } else {
                Message::Drep(rtu)
            }
        }
        4 => Message::Rej(Rej {
            local_id,
            remote_id,
            about,
            reason: c as u16,
            ari: &private_data[148..148 + usize::from(bytes[2] % 73)],
            private_data: &private_data[..148],
        }),
        5 => Message::Mra(Mra {
            local_id,
            remote_id,
            about,
            service_timeout: five,
            private_data: &private_data[..222],
        }),
        6 => Message::Dreq(Dreq {
            local_id,
            remote_id,
            remote_qp: qp,
            private_data: &private_data[..220],
        }),
        7 => Message::SidrReq(SidrReq {
            request_id: a,
            pkey: b as u16,
            service_id: long,
            private_data: &private_data[..216],
        }),
        _ => Message::SidrRep(SidrRep {
            request_id: a,
            status: bytes[0],
            qp,
            service_id: long,
            qkey: d,
            private_data: &private_data[..136],
        }),
    }
}

proptest! {
    #[test]
    fn headers_come_back(header in header(), payload in vec(any::<u8>(), 0..64)) {
        let mut raw = Vec::new();
        header.emit(&mut raw);
        raw.extend_from_slice(&payload);
        raw.extend_from_slice(&[0; 3][..header.pad.into()]);
        prop_assert_eq!(Header::parse(&raw), Ok((header, &payload[..])));
        prop_assert!(!header.to_string().is_empty());
        let headers = raw.len() - payload.len() - usize::from(header.pad);
        prop_assert!(headers <= weft_wire::roce::MAX_HEADER);
        for cut in 0..headers {
            prop_assert!(Header::parse(&raw[..cut]).is_err());
        }
    }

    #[test]
    fn messages_come_back(
        (long, kind, words, bytes, gid) in message(),
        private_data in vec(any::<u8>(), 224),
    ) {
        let mad = Mad { transaction: !long, message: of(kind, long, words, bytes, gid, &private_data) };
        let raw = mad.emit();
        prop_assert_eq!(Mad::parse(&raw), Some(mad));
        prop_assert_eq!(Mad::parse(&raw[..cm::MAD_LEN - 1]), None);
    }
}

/// A BTH of opcode 0x81 with BECN, and 16 reserved bytes (annex A17.9.3).
#[test]
fn a_congestion_notification_names_the_queue_pair_that_is_to_send_less() {
    let mut raw = Vec::new();
    Header::emit_congestion(0xff12_3456, 0xffff, &mut raw);
    let bth = [0x81, 0x40, 0xff, 0xff, 0x40, 0x12, 0x34, 0x56, 0, 0, 0, 0];
    assert_eq!(raw, [&bth[..], &[0; 16]].concat());
    assert_eq!(Header::congested_qp(&raw), Some(0x12_3456));
    assert_eq!(Header::congested_qp(&raw[..11]), None);
}
