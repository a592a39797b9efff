//! Both ends in one process, against an oracle.
#![cfg(not(loom))]

use proptest::prelude::*;
use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use weft_mem::{Access, Backing, PdId, RecvList, SendList, Table};
use weft_ring::{Broken, End, Front, OpenError, Ref, Role, Segment};

const RING: u32 = 16 << 10;

fn ends(ring: u32) -> (End, End) {
    let (mine, fd) = Segment::create(ring).unwrap();
    let theirs = Segment::open(fd).unwrap();
    (
        End::new(Arc::new(mine), Role::Initiator),
        End::new(Arc::new(theirs), Role::Responder),
    )
}

fn push(end: &End, bytes: &[u8]) -> usize {
    let mut list = SendList::new();
    list.push_bytes(bytes);
    end.push(&list, 0, bytes.len()).unwrap()
}

fn take(end: &End, n: usize) -> Vec<u8> {
    let mut got = vec![0; n];
    let mut list = RecvList::new();
    list.push_buf(&mut got);
    let n = end.take(&mut list, 0, n).unwrap();
    drop(list);
    got.truncate(n);
    got
}

/// What a thread that does not receive can tell of the ring.
#[test]
fn news_is_seen_without_receiving() {
    let (a, b) = ends(RING);
    assert!(!b.has_news());
    push(&a, b"one");
    assert!(!b.has_news(), "not published");
    let _ = a.publish();
    assert!(b.has_news());
    assert_eq!(b.front(), Ok(Front::Bytes(3)));
    take(&b, 1);
    assert!(b.has_news(), "the rest of it");
    take(&b, 2);
    assert!(b.has_news(), "the peer is to be told");
    let _ = b.release(true);
    assert!(!b.has_news());
    let _ = a.finish();
    assert!(b.has_news(), "the end");
}

#[test]
fn nothing_is_seen_before_it_is_published() {
    let (a, b) = ends(RING);
    assert_eq!(a.room(), Ok(RING as usize - 16));
    assert_eq!(push(&a, b"one"), 3);
    assert_eq!(push(&a, b"twotwo"), 6);
    assert_eq!(a.pushed(), 32);
    assert_eq!(b.front(), Ok(Front::Empty));
    assert!(!a.publish());
    assert!(!a.publish(), "nothing new");
    assert_eq!(b.front(), Ok(Front::Bytes(3)));
    assert_eq!(take(&b, 2), b"on");
    assert_eq!(b.front(), Ok(Front::Bytes(1)));
    assert_eq!(take(&b, 100), b"e");
    assert_eq!(take_error(&b), Broken);
    assert_eq!(b.front(), Ok(Front::Bytes(6)));
    assert_eq!(take(&b, 6), b"twotwo");
    assert_eq!(b.front(), Ok(Front::Empty));
    assert_eq!(a.consumed(), Ok(0), "not told yet");
    assert!(!b.release(false));
    assert_eq!(a.consumed(), Ok(0), "not worth it");
    assert!(!b.release(true));
    assert_eq!(a.consumed(), Ok(32));
    // The other direction is another ring.
    assert_eq!(push(&b, b"back"), 4);
    assert!(!b.publish());
    assert_eq!(a.front(), Ok(Front::Bytes(4)));
    assert_eq!(b.front(), Ok(Front::Empty));
}

fn take_error(end: &End) -> Broken {
    end.take(&mut RecvList::new(), 0, 1).unwrap_err()
}

#[test]
fn lists_are_taken_from_and_filled_at_any_byte() {
    let (a, b) = ends(RING);
    let table = Table::new(1);
    let region = table
        .register(
            PdId(1),
            Backing::Owned((0..100).collect()),
            0,
            Access::LOCAL_WRITE,
        )
        .unwrap();
    let span = table
        .local(PdId(1), region.stag(), 0, 100, Access::LOCAL_WRITE)
        .unwrap();
    let mut list = SendList::new();
    list.push_bytes(b"header");
    list.push_span(&span, 10, 50);
    assert_eq!(a.push(&list, 4, 12), Ok(12));
    assert_eq!(a.push(&list, 50, 1000), Ok(6));
    assert_eq!(a.push(&list, 56, 1), Ok(0));
    assert_eq!(a.push(&list, 1000, 1), Ok(0));
    assert!(!a.publish());
    let mut buffer = [0; 4];
    let mut into = RecvList::new();
    into.push_buf(&mut buffer);
    into.push_span(&span, 0, 8);
    assert_eq!(b.front(), Ok(Front::Bytes(12)));
    assert_eq!(b.take(&mut into, 2, 100), Ok(10), "the list's end");
    assert_eq!(b.take(&mut into, 12, 100), Ok(0));
    assert_eq!(b.front(), Ok(Front::Bytes(2)));
    assert_eq!(b.take(&mut into, 0, 1), Ok(1));
    assert_eq!(&buffer, b"\x12\0er");
    let mut got = Vec::new();
    span.extend(0, 9, &mut got);
    assert_eq!(got, [10, 11, 12, 13, 14, 15, 16, 17, 8]);
    assert_eq!(take(&b, 9), [19]);
    assert_eq!(b.front(), Ok(Front::Bytes(6)));
    assert_eq!(take(&b, 9), [54, 55, 56, 57, 58, 59]);
}

#[test]
fn references_count_down_and_are_told_at_once() {
    let (a, b) = ends(RING);
    let whole = Ref {
        space: 3,
        addr: u64::MAX - 10,
        len: 10,
    };
    assert_eq!(a.push_ref(whole), Ok(true));
    assert!(!a.publish());
    assert_eq!(b.front(), Ok(Front::Ref(whole)));
    b.advance_ref(4);
    assert!(!b.release(true));
    assert_eq!(a.consumed(), Ok(0), "the source is still in use");
    let rest = Ref {
        addr: u64::MAX - 6,
        len: 6,
        ..whole
    };
    assert_eq!(b.front(), Ok(Front::Ref(rest)));
    b.advance_ref(6);
    assert_eq!(b.front(), Ok(Front::Empty));
    assert!(!b.release(false));
    assert_eq!(a.consumed(), Ok(a.pushed()));
    // A full ring takes no more.
    while a.push_ref(whole) == Ok(true) {}
    assert_eq!(a.room(), Ok(16), "a reference takes 24");
    assert_eq!(push(&a, &[0; 100]), 16);
    assert_eq!((a.room(), push(&a, b"x")), (Ok(0), 0));
}

#[test]
fn a_full_ring_says_how_much_it_takes() {
    let (a, b) = ends(RING);
    let data: Vec<u8> = (0..2 * RING).map(|i| (i % 251) as u8).collect();
    assert_eq!(push(&a, &data), RING as usize - 16);
    assert_eq!((a.room(), push(&a, &data)), (Ok(0), 0));
    assert!(!a.publish());
    let position = a.consumed().unwrap();
    assert!(a.sleep_on_room(position));
    assert_eq!(b.front(), Ok(Front::Bytes(RING as usize - 16)));
    assert_eq!(take(&b, 20), data[..20]);
    assert!(b.release(false), "the peer waits for the least room");
    assert!(!b.release(true), "it is told once");
    a.awake();
    assert_eq!(a.consumed(), Ok(24));
    assert!(!a.sleep_on_room(position));
    assert_eq!(a.room(), Ok(16), "24 less a header");
    assert_eq!(push(&a, b"123456789abcdefgh"), 16);
    assert_eq!(a.room(), Ok(0));
    assert!(!a.publish());
    assert_eq!(take(&b, RING as usize), data[20..RING as usize - 16]);
    assert_eq!(b.front(), Ok(Front::Bytes(16)));
    assert_eq!(take(&b, 99), b"123456789abcdefg");
}

#[test]
fn ends_of_a_direction() {
    let (a, b) = ends(RING);
    push(&a, b"last");
    assert!(b.sleep_on_data());
    assert!(a.finish(), "publishes, and wakes for both");
    b.awake();
    assert!(!b.sleep_on_data());
    assert_eq!(b.front(), Ok(Front::Bytes(4)));
    take(&b, 4);
    assert_eq!(b.front(), Ok(Front::End));
    assert!(!b.sleep_on_data(), "the end is something");
    // The other direction goes on.
    push(&b, b"more");
    assert!(!b.publish());
    assert_eq!(a.front(), Ok(Front::Bytes(4)));
    assert!(!a.peer_aborted());
    assert!(a.sleep_on_room(a.pushed()));
    assert!(b.abort());
    assert!(a.peer_aborted());
    a.awake();
    assert!(!a.sleep_on_room(a.pushed()));
    take(&a, 4);
    assert_eq!(a.front(), Ok(Front::Aborted));
    assert!(!b.finish(), "an aborted end stays so");
    assert_eq!(a.front(), Ok(Front::Aborted));
}

#[test]
fn sleepers_are_woken_once() {
    let (a, b) = ends(RING);
    assert!(b.sleep_on_data());
    push(&a, b"x");
    assert!(a.publish());
    push(&a, b"y");
    assert!(!a.publish(), "it was woken already");
    assert!(!b.sleep_on_data());
    b.awake();
    take_all(&b);
    assert!(b.sleep_on_data());
    b.awake();
    push(&a, b"z");
    assert!(!a.publish(), "awake again by itself");
}

#[test]
fn writes_wake_who_dozes() {
    let (a, b) = ends(RING);
    assert!(!a.written(), "awake");
    assert!(b.sleep_on_data());
    assert!(a.peer_sleeps());
    assert!(!a.written(), "it waits for data alone");
    b.doze();
    assert!(!a.peer_sleeps());
    assert!(a.written());
    assert!(!a.written(), "it was woken already");
    b.doze();
    assert!(!a.written(), "its wake-up is under way");
    b.awake();
    assert!(b.sleep_on_data());
    b.doze();
    push(&a, b"x");
    assert!(a.publish(), "data wake it too");
    assert!(!a.written());
}

fn take_all(end: &End) -> usize {
    let mut n = 0;
    while let Ok(Front::Bytes(left)) = end.front() {
        n += take(end, left).len();
    }
    n
}

/// What was consumed and not told, a sleeper tells first: else both sides could sleep for ever.
#[test]
fn a_sleeper_leaves_nothing_untold() {
    let (a, b) = ends(RING);
    push(&a, b"x");
    assert!(!a.publish());
    assert_eq!(take_all(&b), 1);
    assert!(!b.release(false));
    assert_eq!(a.consumed(), Ok(0));
    assert!(a.sleep_on_room(0));
    assert!(!b.sleep_on_data(), "the peer is to be woken first");
    assert_eq!(a.consumed(), Ok(16));
    assert!(b.release(false));
    assert!(!b.release(false));
    assert!(b.sleep_on_data());
}

/// A sleeper may be another thread than the one that takes: it does not tell of what that one is still at work on.
#[test]
fn a_sleeper_tells_only_what_was_dealt_with() {
    let (a, b) = ends(RING);
    push(&a, b"x");
    push(&a, b"y");
    assert!(!a.publish());
    assert_eq!(b.front(), Ok(Front::Bytes(1)));
    assert_eq!(take(&b, 1), b"x");
    assert!(!b.release(false));
    assert_eq!(take_all(&b), 1);
    assert!(b.sleep_on_data());
    assert_eq!(a.consumed(), Ok(16));
    assert!(!b.release(true));
    assert_eq!(a.consumed(), Ok(a.pushed()));
}

#[test]
fn marks_doors_and_capabilities() {
    let (a, b) = ends(RING);
    assert_eq!((b.peer_mark(), b.peer_caps()), (0, 0));
    assert!(!a.peer_access_open());
    a.enter(0xffff_fff0);
    assert_eq!((b.peer_mark(), a.peer_mark()), (0xffff_fff0, 0));
    a.leave();
    assert_eq!(b.peer_mark(), 0);
    b.open_access();
    assert!(a.peer_access_open() && !b.peer_access_open());
    b.close_access();
    assert!(!a.peer_access_open());
    b.set_caps(u32::MAX);
    assert_eq!((a.peer_caps(), b.peer_caps()), (u32::MAX, 0));
}

/// A peer's file: a good one, changed at an offset of the control page.
fn changed(offset: u64, bytes: &[u8]) -> OwnedFd {
    let (_, fd) = Segment::create(RING).unwrap();
    let file = File::from(fd);
    file.write_all_at(bytes, offset).unwrap();
    file.into()
}

#[test]
fn bad_segments_are_refused() {
    let len = 4096 + 2 * u64::from(RING);
    let unsealed = || {
        let fd = rustix::fs::memfd_create("bad", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, len).unwrap();
        fd
    };
    assert!(matches!(Segment::open(unsealed()), Err(OpenError::Io(_))));
    let fd = unsealed();
    rustix::fs::fcntl_add_seals(&fd, rustix::fs::SealFlags::GROW).unwrap();
    assert!(matches!(Segment::open(fd), Err(OpenError::Io(_))));
    let fd = File::open("/proc/self/exe").unwrap().into();
    assert!(matches!(Segment::open(fd), Err(OpenError::Io(_))));

    for len in [0, 1, 4096, len - 1, 4096 + (32 << 20) + 1, 1 << 40] {
        let fd = weft_sys::memfd::create("bad", len).unwrap();
        assert!(matches!(Segment::open(fd), Err(OpenError::Size(l)) if l == len));
    }
    let fd = weft_sys::memfd::create("bad", len).unwrap();
    assert!(matches!(Segment::open(fd), Err(OpenError::Magic)));
    assert!(matches!(
        Segment::open(changed(7, b"G")),
        Err(OpenError::Magic)
    ));
    for version in [0, 2, u32::MAX] {
        let got = Segment::open(changed(8, &version.to_ne_bytes()));
        assert!(matches!(got, Err(OpenError::Version(v)) if v == version));
    }
    for ring in [0, 1, 8 << 10, RING - 8, RING + 1, 32 << 20, u32::MAX] {
        let got = Segment::open(changed(12, &ring.to_ne_bytes()));
        assert!(matches!(got, Err(OpenError::Ring(r)) if r == ring));
    }
    for ring in [2 * RING, 16 << 20] {
        let got = Segment::open(changed(12, &ring.to_ne_bytes()));
        assert!(matches!(got, Err(OpenError::Size(l)) if l == len));
    }
    assert!(Segment::open(changed(12, &RING.to_ne_bytes())).is_ok());

    for ring in [0, 8 << 10, RING + 1, 32 << 20, u32::MAX] {
        assert!(Segment::create(ring).is_err());
    }
    let (largest, fd) = Segment::create(16 << 20).unwrap();
    assert!(Segment::open(fd).is_ok());
    drop(largest);
}

/// What a peer writes that no honest one does, one word at a time.
#[test]
fn nonsense_is_broken() {
    const HEAD: u64 = 128 * 9; // the responder's
    const END: u64 = 128 * 2; // the initiator's
    const DATA: u64 = 4096; // the initiator's
    let record = |kind: u64, len: u32| kind << 32 | u64::from(len);
    type Check = fn(&End, &End);
    let sender: Check = |a, _| assert_eq!(a.consumed(), Err(Broken));
    let receiver: Check = |_, b| assert_eq!(b.front(), Err(Broken));
    let cases: &[(u64, &[u64], Check)] = &[
        (HEAD, &[32], sender), // more than was published
        (HEAD, &[4], sender),
        (HEAD, &[u64::MAX], sender),
        (HEAD, &[0], |a, b| {
            // back again
            assert_eq!(take_all(b), 8);
            assert!(!b.release(true));
            assert_eq!(a.consumed(), Ok(16));
            b.close_access();
        }),
        (END, &[3], |_, b| {
            assert_eq!(take_all(b), 8);
            assert_eq!(b.front(), Err(Broken));
            assert!(!b.sleep_on_data());
        }),
        (DATA, &[record(1, 0)], receiver),         // no bytes
        (DATA, &[record(1, RING - 15)], receiver), // more than a ring
        (DATA, &[record(1, u32::MAX)], receiver),
        (DATA, &[record(0, 8)], receiver), // no kind
        (DATA, &[record(3, 8)], receiver),
        (DATA, &[record(257, 8)], receiver),
        (DATA, &[record(2, 23), 1, 1, 1], receiver),
        (DATA, &[record(2, 24), 1, 1, 0], receiver), // an empty reference
        (DATA, &[record(2, 24), 1, 2, u64::MAX - 1], receiver), // one that wraps
        (DATA, &[record(2, 24), 1 << 32, 1, 1], receiver), // no such space
    ];
    for (at, words, check) in cases {
        let (mine, fd) = Segment::create(RING).unwrap();
        let file = File::from(fd.try_clone().unwrap());
        let a = End::new(Arc::new(mine), Role::Initiator);
        let b = End::new(Arc::new(Segment::open(fd).unwrap()), Role::Responder);
        push(&a, b"honestly");
        assert!(!a.publish());
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        file.write_all_at(&bytes, *at).unwrap();
        check(&a, &b);
    }
    // Consumption that goes back.
    let (mine, fd) = Segment::create(RING).unwrap();
    let file = File::from(fd);
    let a = End::new(Arc::new(mine), Role::Initiator);
    push(&a, b"honestly");
    assert!(!a.publish());
    file.write_all_at(&16_u64.to_ne_bytes(), HEAD).unwrap();
    assert_eq!(a.consumed(), Ok(16));
    file.write_all_at(&8_u64.to_ne_bytes(), HEAD).unwrap();
    assert_eq!((a.consumed(), a.room()), (Err(Broken), Err(Broken)));
    assert!(!a.sleep_on_room(16), "nobody would wake us");
}

#[derive(Clone, Debug)]
enum Op {
    Push(usize, usize),
    Ref(u64),
    Publish,
    Receive(usize),
    Release(bool),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..100_usize, prop_oneof![0..64_usize, 0..20_000_usize])
            .prop_map(|(skip, n)| Op::Push(skip, n)),
        1 => (1..1000_u64).prop_map(Op::Ref),
        2 => Just(Op::Publish),
        4 => prop_oneof![1..100_usize, 1..20_000_usize].prop_map(Op::Receive),
        2 => any::<bool>().prop_map(Op::Release),
    ]
}

/// A unit that the receiver is to see.
#[derive(Clone, Debug, PartialEq)]
enum Unit {
    Byte(u8),
    Ref(Ref),
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn like_a_queue(ops in proptest::collection::vec(op(), 1..200)) {
        let (a, b) = ends(RING);
        let source: Vec<u8> = (0..40_000_u32).map(|i| (i * 7 / 3) as u8).collect();
        let mut pushed = VecDeque::new(); // not yet visible
        let mut visible: VecDeque<Unit> = VecDeque::new();
        let mut refs = 0;
        for op in ops {
            match op {
                Op::Push(skip, n) => {
                    let mut list = SendList::new();
                    for piece in source[..skip + n].chunks(n / 3 + 1) {
                        list.push_bytes(piece);
                    }
                    let room = a.room().unwrap();
                    let done = a.push(&list, skip, n).unwrap();
                    prop_assert_eq!(done, room.min(n));
                    pushed.extend(source[skip..skip + done].iter().map(|&b| Unit::Byte(b)));
                }
                Op::Ref(len) => {
                    refs += 1;
                    let r = Ref { space: refs as u32, addr: refs, len };
                    let room = a.room().unwrap();
                    prop_assert_eq!(a.push_ref(r), Ok(room >= 24));
                    if room >= 24 {
                        pushed.push_back(Unit::Ref(r));
                    }
                }
                Op::Publish => {
                    prop_assert!(!a.publish());
                    visible.append(&mut pushed);
                }
                Op::Receive(n) => match b.front().unwrap() {
                    Front::Bytes(left) => {
                        let got = take(&b, n);
                        prop_assert_eq!(got.len(), n.min(left));
                        for byte in got {
                            prop_assert_eq!(visible.pop_front(), Some(Unit::Byte(byte)));
                        }
                    }
                    Front::Ref(r) => {
                        let n = r.len.min(n as u64);
                        b.advance_ref(n);
                        prop_assert_eq!(visible.pop_front(), Some(Unit::Ref(r)));
                        if n < r.len {
                            let rest = Ref { addr: r.addr + n, len: r.len - n, ..r };
                            visible.push_front(Unit::Ref(rest));
                        }
                    }
                    Front::Empty => prop_assert!(visible.is_empty()),
                    end => prop_assert!(false, "{:?}", end),
                },
                Op::Release(force) => {
                    prop_assert!(!b.release(force));
                    let consumed = a.consumed().unwrap();
                    prop_assert!(consumed <= a.pushed());
                    if force && visible.is_empty() && pushed.is_empty() {
                        prop_assert_eq!(consumed, a.pushed());
                        prop_assert_eq!(a.room(), Ok(RING as usize - 16));
                    }
                }
            }
        }
    }
}
