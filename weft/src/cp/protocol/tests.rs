use super::*;
use proptest::prelude::*;

fn path() -> impl Strategy<Value = RelPath> {
    "[a-z]{1,9}(/[ -.0-~]{1,20}x){0,4}"
        .prop_filter_map("a path", |s| RelPath::new(s.as_bytes()).ok())
}

fn mtime() -> impl Strategy<Value = Mtime> {
    (any::<i64>(), 0..1_000_000_000u32).prop_map(|(secs, nanos)| Mtime { secs, nanos })
}

fn asked() -> impl Strategy<Value = Asked> {
    let version = (0..1u64 << 62, mtime()).prop_map(|(size, mtime)| Version { size, mtime });
    (path(), prop::option::of(version)).prop_map(|(path, version)| Asked { path, version })
}

fn meta(xattrs: usize) -> impl Strategy<Value = Meta> {
    let xattr = (
        "user[.][a-z]{1,250}",
        prop::collection::vec(any::<u8>(), 0..99),
    );
    let xattr = xattr.prop_map(|(name, value)| Xattr {
        name: name.into_bytes(),
        value,
    });
    let xattrs = prop::collection::vec(xattr, 0..=xattrs);
    let attributes = (0..u32::MAX, 0..u32::MAX, xattrs);
    let attributes = attributes.prop_map(|(uid, gid, xattrs)| Attributes { uid, gid, xattrs });
    (0..=0o7777u32, mtime(), prop::option::of(attributes)).prop_map(|(mode, mtime, attributes)| {
        Meta {
            mode,
            mtime,
            attributes,
        }
    })
}

fn file_flags(bits: u8) -> FileFlags {
    FileFlags {
        no_wait: bits & 1 != 0,
        no_clobber: bits & 2 != 0,
        force: bits & 4 != 0,
        sync: bits & 8 != 0,
    }
}

fn fetch(ring: impl Strategy<Value = RingAdvert>) -> impl Strategy<Value = Fetch> {
    let paths = prop::collection::vec(prop::option::of(path()), 1..40);
    (0..8u8, 0..32u8, ring, any::<u64>(), paths).prop_map(|(f, bits, ring, limit_rate, paths)| {
        Fetch {
            flags: file_flags(f << 1),
            update: bits & 1 != 0,
            dry_run: bits & 16 != 0,
            what: What {
                recursive: bits & 2 != 0,
                links: bits & 4 != 0,
                attributes: bits & 8 != 0,
            },
            ring,
            limit_rate,
            paths,
        }
    })
}

fn flags() -> impl Strategy<Value = FileFlags> {
    (0..16u8).prop_map(file_flags)
}

fn code() -> impl Strategy<Value = Code> {
    prop::sample::select(vec![
        Code::Written,
        Code::Kept,
        Code::Partly,
        Code::Violation,
        Code::NotServed,
    ])
}

/// Messages of names, packs and the end.
fn of_names() -> impl Strategy<Value = Message> {
    prop_oneof![
        (any::<u32>(), any::<bool>(), meta(3), path()).prop_map(|(id, leave, meta, path)| {
            Message::Directory {
                id,
                leave,
                meta,
                path,
            }
        }),
        (any::<u32>(), 0..4u8, meta(0), "[a-z/.]{1,40}", path()).prop_map(
            |(id, f, meta, target, path)| Message::Link {
                id,
                flags: file_flags(f << 1),
                meta,
                target: target.into_bytes(),
                path,
            }
        ),
        (any::<u32>(), 0..4u8, path(), path()).prop_map(|(id, f, existing, path)| {
            Message::HardLink {
                id,
                flags: file_flags(f << 1),
                existing,
                path,
            }
        }),
        (
            any::<u32>(),
            any::<u16>(),
            1..=PACK_FILES,
            0..=PACK_LEN,
            any::<Digest>()
        )
            .prop_map(|(id, slot, count, len, digest)| Message::Pack {
                id,
                slot,
                count,
                len,
                digest
            }),
        (any::<u32>(), 1..=PACK_FILES).prop_map(|(id, count)| Message::Packed { id, count }),
        prop::collection::vec(asked(), 1..40).prop_map(|names| Message::Ask { names }),
        prop::collection::vec(
            prop::sample::select(vec![
                Held::Nothing,
                Held::Other,
                Held::Same,
                Held::Directory
            ]),
            1..40
        )
        .prop_map(|held| Message::Held { held }),
        Just(Message::Credit),
        any::<u64>().prop_map(|cpu_us| Message::Done { cpu_us }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let ring = (1..=64u16, 4096..=1u32 << 24, any::<u32>(), 0..1u64 << 40).prop_map(
        |(slots, slot_len, rkey, addr)| RingAdvert {
            slots,
            slot_len,
            rkey,
            addr,
        },
    );
    let spec = (flags(), meta(3), 0..1u64 << 62, any::<Digest>(), path()).prop_map(
        |(flags, meta, size, source, path)| FileSpec {
            flags,
            meta,
            size,
            room: size / 3,
            source,
            path,
        },
    );
    prop_oneof![
        (4..=4096u16, any::<bool>(), any::<[u8; 32]>()).prop_map(|(receives, fetches, proof)| {
            Message::Start {
                receives,
                fetches,
                proof,
            }
        }),
        fetch(ring.clone()).prop_map(Message::Fetch),
        (any::<bool>(), "[ -~]{0,80}").prop_map(|(is_plan, text)| Message::Notice {
            about: if is_plan { About::Plan } else { About::Error },
            text
        }),
        (4..=4096u16, any::<bool>(), ring, any::<[u8; 32]>()).prop_map(
            |(receives, attributes, ring, proof)| Message::Ready {
                receives,
                attributes,
                ring,
                proof,
            }
        ),
        (code(), "[ -~]{0,80}").prop_map(|(code, text)| Message::Refuse { code, text }),
        (any::<u32>(), spec).prop_map(|(id, spec)| Message::File { id, spec }),
        (any::<u32>(), any::<u64>(), any::<Digest>())
            .prop_map(|(id, blocks, digest)| Message::Offer { id, blocks, digest }),
        (any::<u32>(), any::<u64>()).prop_map(|(id, block)| Message::From { id, block }),
        (
            any::<u32>(),
            any::<u16>(),
            any::<u64>(),
            1..=1u32 << 24,
            any::<Digest>()
        )
            .prop_map(|(id, slot, index, len, digest)| Message::Block {
                id,
                slot,
                index,
                len,
                digest
            }),
        any::<u16>().prop_map(|slot| Message::Free { slot }),
        (
            any::<u32>(),
            any::<u16>(),
            any::<u64>(),
            any::<Digest>(),
            prop::collection::vec((1..9u32, 1..9u32), 1..=EXTENTS)
        )
            .prop_map(|(id, slot, index, digest, pieces)| {
                let mut len = 0;
                let extents = pieces.into_iter().map(|(hole, piece)| {
                    let at = len + hole;
                    len = at + piece;
                    Extent { at, len: piece }
                });
                let extents = extents.collect();
                Message::Sparse {
                    id,
                    slot,
                    index,
                    len,
                    digest,
                    extents,
                }
            }),
        (any::<u32>(), any::<u16>(), any::<u64>(), 1..=HOLE_BLOCKS).prop_map(
            |(id, slot, index, blocks)| Message::Hole {
                id,
                slot,
                index,
                blocks
            }
        ),
        (any::<u32>(), any::<Digest>()).prop_map(|(id, digest)| Message::End { id, digest }),
        any::<u32>().prop_map(|id| Message::Abandon { id }),
        (any::<u32>(), code(), "[ -~]{0,80}").prop_map(|(id, code, text)| Message::Result {
            id,
            code,
            text
        }),
        of_names(),
    ]
}

proptest! {
    #[test]
    fn every_message_survives_the_wire(m in message(), credits: u16) {
        let mut bytes = Vec::new();
        m.encode(credits, &mut bytes);
        prop_assert!(bytes.len() <= MAX_MESSAGE);
        prop_assert_eq!(Message::decode(&bytes), Ok((credits, m)));
    }

    #[test]
    fn a_message_cut_anywhere_is_refused(m in message(), cut in 0.0..1.0f64) {
        let mut bytes = Vec::new();
        m.encode(0, &mut bytes);
        bytes.truncate((bytes.len() as f64 * cut) as usize);
        prop_assert!(Message::decode(&bytes).is_err());
    }

    #[test]
    fn what_decodes_is_the_same_when_it_is_sent_again(m in message(), at: usize, to: u8) {
        let mut bytes = Vec::new();
        m.encode(7, &mut bytes);
        let at = at % bytes.len();
        bytes[at] = to;
        if let Ok((credits, m)) = Message::decode(&bytes) {
            let mut again = Vec::new();
            m.encode(credits, &mut again);
            prop_assert_eq!(Message::decode(&again), Ok((credits, m)));
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        let _ = Message::decode(&bytes);
        let _ = Hello::decode(&bytes);
    }

    #[test]
    fn arbitrary_packs_never_panic(bytes: Vec<u8>) {
        let mut records = pack::Records::new(&bytes);
        while records.read().is_ok() {}
    }

    #[test]
    fn a_path_never_climbs(bytes in "[./a]{0,12}") {
        if let Ok(p) = RelPath::new(bytes.as_bytes()) {
            prop_assert!(!bytes.starts_with('/'));
            prop_assert!(p.components().all(|c| !c.is_empty() && c != b".." && c != b"."));
        }
    }
}

#[test]
fn literal_bytes() {
    let mut out = Vec::new();
    let digest = [0xdd; 16];
    Message::Block {
        id: 1,
        slot: 2,
        index: 3,
        len: 4096,
        digest,
    }
    .encode(5, &mut out);
    assert_eq!(
        out,
        [
            &[0, 5, 0, 0, 0, 0, 0, 30][..],
            // The kind, the entry, the slot, the index, the length in seven bits each.
            &[6, 1, 2, 3, 0x80, 0x20],
            &digest
        ]
        .concat()
    );
    let hello = Hello {
        version: VERSION,
        status: Status::KeyWanted,
        key: true,
        nonce: [9; 32],
    };
    let mut expected = b"weft-cp\0\x00\x06\x00\x03\x00\x01\x00\x00".to_vec();
    expected.extend([9; 32]);
    assert_eq!(hello.encode()[..], expected);
    assert_eq!(Hello::decode(&expected), Ok(hello));
}

#[test]
fn a_hello_of_another_version_still_tells_its_version() {
    let mut bytes = Hello {
        version: 9,
        status: Status::Version,
        key: true,
        nonce: [1; 32],
    }
    .encode()
    .to_vec();
    bytes.extend([7; 20]);
    let hello = Hello::decode(&bytes).unwrap();
    assert_eq!((hello.version, hello.status), (9, Status::Version));
    assert_eq!(
        Hello::decode(b"SSH-2.0-OpenSSH_9.2"),
        Err(DecodeError::Magic)
    );
}
