//! A peer's files may hold anything.

#![cfg(not(miri))] // memory files

use proptest::prelude::*;
use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use weft_mem::{Access, ExportAddr, Peer, RecvList, SendList};
use weft_sys::memfd::{self, Mapping};

/// As docs of the exported table have it: a header of a page, and 8192 buckets of 8 entries of 8 words.
const HEADER: usize = 512;
const WORDS: usize = HEADER + 8192 * 64;
/// Some pages and a bit.
const ARENA: u64 = 3 * 4096 + 100;

/// Numbers near which things go wrong.
fn number() -> impl Strategy<Value = u64> {
    let edges = [
        0,
        1,
        ARENA - 1,
        ARENA,
        4096,
        64 << 20,
        1 << 63,
        u64::MAX - 7,
        u64::MAX,
    ];
    prop_oneof![
        any::<u64>(),
        0..2 * ARENA,
        (proptest::sample::select(edges.to_vec()), 0..16_u64).prop_map(|(n, d)| n.wrapping_sub(d)),
    ]
}

struct Hostile {
    table: Mapping,
    peer: Peer,
}

impl Hostile {
    fn new(arenas: usize) -> Hostile {
        let fd = memfd::create("weft-test", WORDS as u64 * 8).unwrap();
        let table = Mapping::new(&fd, 0, WORDS * 8, true).unwrap();
        let mut fds: Vec<OwnedFd> = vec![fd];
        fds.extend((0..arenas).map(|_| memfd::create("weft-test", ARENA).unwrap()));
        word(&table, 0).store(u64::from_ne_bytes(*b"weftPD\0\x01"), Ordering::SeqCst);
        word(&table, 1).store(1, Ordering::SeqCst);
        Hostile {
            peer: Peer::open(fds).unwrap(),
            table,
        }
    }
}

fn word(table: &Mapping, i: usize) -> &AtomicU64 {
    assert!(i < WORDS);
    #[allow(clippy::cast_ptr_alignment)] // mappings begin on pages
    let words = table.as_ptr().cast::<u64>();
    // SAFETY: inside the mapping, aligned, and reached through atomics only.
    unsafe { AtomicU64::from_ptr(words.add(i)) }
}

thread_local! {
    static FOUND: Cell<u32> = const { Cell::new(0) };
    static HOSTILE: [Hostile; 2] = [Hostile::new(2), Hostile::new(3)];
}

#[test]
fn whatever_is_in_the_table_only_the_files_are_touched() {
    entries_of_all_kinds();
    assert!(FOUND.get() > 0, "nothing that is right was found");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]
    fn entries_of_all_kinds(
        stag: u32,
        slot in 0..8_usize,
        generation in prop_oneof![Just(0_u64), any::<u64>()],
        qp in 0..3_u32,
        (base, len, addr, to) in (number(), number(), number(), number()),
        rights in prop_oneof![Just(u32::MAX), any::<u32>()],
        space in prop_oneof![0..5_u32, any::<u32>()],
        n in prop_oneof![0..20_u32, Just(u32::MAX), any::<u32>()],
        need in 0..64_u32,
    ) {
        HOSTILE.with(|both| for hostile in both {
            let index = (stag >> 8) as usize;
            let entry = HEADER + (index & 8191) * 64 + slot * 8;
            let words = [
                generation,
                u64::from(stag) | u64::from(qp) << 32,
                base,
                len,
                u64::from(rights) | u64::from(space) << 32,
                addr,
            ];
            for (i, w) in words.into_iter().enumerate() {
                word(&hostile.table, entry + i).store(w, Ordering::SeqCst);
            }
            let need = Access::from_bits_truncate(need);
            for to in [to, base, base.wrapping_add(1)] {
                if let Some(target) = hostile.peer.find(1, stag, to, n, need) {
                    FOUND.with(|f| f.set(f.get() + 1));
                    assert!(qp < 2 && stag != 0);
                    assert!(Access::from_bits_truncate(rights).contains(need));
                    let ExportAddr { space, addr } = target.place();
                    assert!((1..=3).contains(&space) && addr + u64::from(n) <= ARENA);
                    let mut bytes = vec![7; n as usize];
                    let mut into = RecvList::new();
                    into.push_buf(&mut bytes);
                    hostile.peer.read(&target, &mut into).unwrap();
                    let mut from = SendList::new();
                    from.push_bytes(&bytes);
                    let written = hostile.peer.write(&target, &from);
                    assert_eq!(written.is_ok(), space == 1);
                    let counted = hostile.peer.fetch_add(&target, 0);
                    assert_eq!(counted.is_some(), space == 1 && n >= 8 && addr % 8 == 0);
                }
            }
            // A reference is believed no more than the table.
            let mut bytes = [0; 20];
            let mut into = RecvList::new();
            into.push_buf(&mut bytes);
            let pulled = hostile.peer.pull(ExportAddr { space, addr }, &mut into, 0, 20);
            let fits = addr.checked_add(20).is_some_and(|end| end <= ARENA);
            let arenas = if std::ptr::eq(hostile, &raw const both[0]) { 2 } else { 3 };
            assert_eq!(pulled.is_ok(), fits && (1..=arenas).contains(&space));
            for i in 0..6 {
                word(&hostile.table, entry + i).store(0, Ordering::SeqCst);
            }
        });
    }
}
