//! Memory shown to peers of this host: within one process, where every interleaving can be arranged.

#![cfg(not(miri))] // memory files

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Instant;
use weft_mem::{
    Access, Backing, Domain, ExportAddr, KeyLock, Keys, LastStretch, MemError, PEER_LIMIT, PdId,
    Peer, PendingRelease, Piece, Reader, RecvList, Region, SendList, Table, WindowType,
};
use weft_sys::memfd::{self, Mapping};

const PD: PdId = PdId(3);
const QP: u32 = 7;
const LOCAL: Access = Access::LOCAL_WRITE.union(Access::MW_BIND);
const WRITE: Access = LOCAL.union(Access::REMOTE_WRITE);
const ALL: Access = WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

fn copies(domain: &Domain, trusted: bool) -> Vec<OwnedFd> {
    let fds = domain.fds(trusted);
    fds.iter()
        .map(|fd| fd.try_clone_to_owned().unwrap())
        .collect()
}

/// A table, what it shows, and a peer that sees it.
fn shown(trusted: bool) -> (Table, Arc<Domain>, Peer) {
    let table = Table::new(1000);
    let domain = table.domain(PD).unwrap();
    let peer = Peer::open(copies(&domain, trusted)).unwrap();
    assert_eq!(peer.id(), Some(domain.id()));
    (table, domain, peer)
}

fn shared(table: &Table, len: usize, access: Access) -> Region {
    table.register(PD, Backing::Shared(len), 0, access).unwrap()
}

fn write(peer: &Peer, stag: u32, to: u64, bytes: &[u8]) -> Option<()> {
    let target = peer.find(QP, stag, to, bytes.len() as u32, Access::REMOTE_WRITE)?;
    let mut list = SendList::new();
    let (a, b) = bytes.split_at(bytes.len() / 3);
    list.push_bytes(a);
    list.push_bytes(b);
    peer.write(&target, &list).unwrap();
    Some(())
}

fn read(peer: &Peer, stag: u32, to: u64, bytes: &mut [u8]) -> Option<()> {
    let target = peer.find(QP, stag, to, bytes.len() as u32, Access::REMOTE_READ)?;
    let mut list = RecvList::new();
    let (a, b) = bytes.split_at_mut(bytes.len() / 3);
    list.push_buf(a);
    list.push_buf(b);
    peer.read(&target, &mut list).unwrap();
    Some(())
}

#[test]
fn a_peer_writes_reads_and_counts_in_shared_memory() {
    let (table, _domain, peer) = shown(false);
    // Longer than a window of the peer's mappings, and not at its beginning.
    let _first = shared(&table, 5, ALL);
    let len = (65 << 20) + 10;
    let r = shared(&table, len, ALL);
    let text: Vec<u8> = (0..200_000_u32).map(|i| (i % 251) as u8).collect();
    for to in [0, 1, (64 << 20) - 70_000, len - text.len()] {
        write(&peer, r.stag(), to as u64, &text).unwrap();
        let mut here = vec![0; text.len()];
        r.read(to, &mut here).unwrap();
        assert!(here == text, "written to {to}");
        r.write(to, b"changed").unwrap();
        read(&peer, r.stag(), to as u64, &mut here).unwrap();
        assert!(here.starts_with(b"changed") && here[7..] == text[7..]);
    }
    write(&peer, r.stag(), len as u64, b"").unwrap();

    let word = |to| {
        peer.find(QP, r.stag(), to, 8, Access::REMOTE_ATOMIC)
            .unwrap()
    };
    r.store_u64(64, 40).unwrap();
    assert_eq!(peer.fetch_add(&word(64), 2), Some(40));
    assert_eq!(peer.compare_swap(&word(64), 42, 7), Some(42));
    assert_eq!(peer.compare_swap(&word(64), 42, 8), Some(7));
    assert_eq!(peer.swap(&word(64), 9), Some(7));
    assert_eq!(r.load_u64(64), Ok(9));
    assert_eq!(peer.fetch_add(&word(65), 2), None);
    let short = peer
        .find(QP, r.stag(), 64, 7, Access::REMOTE_ATOMIC)
        .unwrap();
    assert_eq!(peer.swap(&short, 2), None);
    let mut long = SendList::new();
    long.push_bytes(b"too long");
    assert!(peer.write(&short, &long).is_err());
    assert_eq!(r.load_u64(64), Ok(9));
}

#[test]
fn a_peer_finds_what_the_table_would_allow() {
    let (table, _domain, peer) = shown(true);
    let find = |qp, stag, to, len, need| peer.find(qp, stag, to, len, need).is_some();
    let (w, rd) = (Access::REMOTE_WRITE, Access::REMOTE_READ);

    let r = table
        .register(PD, Backing::Shared(100), 1000, WRITE)
        .unwrap();
    assert!(find(QP, r.stag(), 1000, 100, w) && find(0, r.stag(), 1100, 0, w));
    assert!(!find(QP, r.stag(), 999, 1, w) && !find(QP, r.stag(), 1000, 101, w));
    assert!(!find(QP, r.stag(), 1099, 2, w) && !find(QP, r.stag(), u64::MAX, 2, w));
    assert!(!find(QP, r.stag(), 1000, 1, rd) && !find(QP, r.stag() ^ 1, 1000, 1, w));
    assert!(!find(QP, r.stag() ^ 0x100, 1000, 1, w) && !find(QP, 0, 0, 0, w));

    // Heap memory is not reachable while no process is known.
    let heap = table
        .register(PD, Backing::Owned(vec![0; 8]), 0, ALL)
        .unwrap();
    assert!(!find(QP, heap.stag(), 0, 1, rd));
    // Nor is another domain's.
    let other = table
        .register(PdId(99), Backing::Shared(8), 0, ALL)
        .unwrap();
    assert!(!find(QP, other.stag(), 0, 1, rd));

    // A window speaks for its queue pair and range; memory that peers may not change is not changed through it.
    let window = table.alloc_window(PD, WindowType::Type2).unwrap();
    let bound = |stag, len, rights| {
        let base = table
            .local(PD, stag, 1000, 1, Access::empty())
            .map_or(0, |_| 1000);
        table
            .bind(PD, window.stag(), 5, QP, stag, base + 10, len, rights)
            .unwrap()
    };
    let stag = bound(r.stag(), 20, w | Access::ZERO_BASED);
    assert!(find(QP, stag, 0, 20, w));
    assert!(!find(QP + 1, stag, 0, 20, w) && !find(QP, stag, 1, 20, w) && !find(0, stag, 0, 1, w));
    write(&peer, stag, 0, b"window").unwrap();
    let mut here = [0; 6];
    r.read(10, &mut here).unwrap();
    assert_eq!(&here, b"window");
    table.invalidate(PD, QP, stag).unwrap();
    assert!(!find(QP, stag, 0, 20, w));
    let private = shared(&table, 100, LOCAL);
    let stag = bound(private.stag(), 20, w | rd);
    assert!(find(QP, stag, 10, 20, rd) && !find(QP, stag, 10, 20, w));
    drop(window);
    assert!(!find(QP, stag, 10, 20, rd));
    // One of type 1 for all queue pairs, until it is bound anew.
    let window = table.alloc_window(PD, WindowType::Type1).unwrap();
    let bind = |key, len| {
        table
            .bind(PD, window.stag(), key, QP, r.stag(), 1000, len, w)
            .unwrap()
    };
    let (first, second) = (bind(1, 20), bind(2, 30));
    assert!(!find(QP, first, 1000, 1, w));
    assert!(find(QP, second, 1000, 30, w) && find(QP + 1, second, 1000, 30, w));
    let none = bind(3, 0);
    assert!(!find(QP, second, 1000, 1, w) && !find(QP, none, 1000, 1, w));

    let stag = r.stag();
    r.deregister().unwrap();
    assert!(!find(QP, stag, 1000, 1, w));
}

struct Holding(Keys);

impl AsMut<Keys> for Holding {
    fn as_mut(&mut self) -> &mut Keys {
        &mut self.0
    }
}

/// What is remembered of a write is used where the table would allow it now, and nowhere else.
#[test]
fn what_is_remembered_is_what_the_table_says() {
    let (table, _domain, peer) = shown(false);
    let own = Table::new(10);
    let source = own
        .register(PD, Backing::Owned((0..200).collect()), 0, Access::empty())
        .unwrap();
    let lock = KeyLock::new(Holding(Keys::new(&own)));
    let mut last = LastStretch::default();
    // Whether nothing was looked up; the same bytes are there either way.
    let mut write = |stag: u32, to: u64, len: u32| -> Option<bool> {
        let held = lock.lock();
        let span = |keys: &Keys| {
            let known = keys.known(PD, source.stag(), 3, len, Access::empty());
            known.map_or_else(
                || {
                    keys.local(PD, source.stag(), 3, len, Access::empty())
                        .map(|_| false)
                },
                |span| Ok(peer.write_known(&last, stag, to, &span)),
            )
        };
        let target = peer.find(QP, stag, to, len, Access::REMOTE_WRITE);
        if span(&held.0).unwrap() {
            assert!(target.is_some(), "{stag:x} is not to be written at {to}");
            return Some(true);
        }
        let span = held
            .0
            .local(PD, source.stag(), 3, len, Access::empty())
            .unwrap();
        let mut list = SendList::new();
        list.push_key(&span);
        let all = (0, len as usize);
        peer.write_by((QP, stag), &target?, &list, all, &mut last)
            .unwrap();
        Some(false)
    };
    let check = |region: &Region, at: usize, len: usize| {
        let mut here = vec![0; len];
        region.read(at, &mut here).unwrap();
        let want: Vec<u8> = (3..3 + len as u8).collect();
        assert_eq!(here, want);
        region.fill(at, len, 0).unwrap();
    };

    let r = table
        .register(PD, Backing::Shared(100), 1000, WRITE)
        .unwrap();
    assert_eq!(write(r.stag(), 1010, 20), Some(false));
    check(&r, 10, 20);
    for (to, len) in [(1000, 100), (1010, 20), (1099, 1), (1001, 65)] {
        assert_eq!(write(r.stag(), to, len), Some(true));
        check(&r, (to - 1000) as usize, len as usize);
    }
    for (to, len) in [
        (999, 1),
        (999, 2),
        (1000, 101),
        (1099, 2),
        (1101, 1),
        (u64::MAX, 2),
        (0, 1),
    ] {
        assert_eq!(write(r.stag(), to, len), None);
    }
    // Another region takes its place, and it takes it back.
    let other = table
        .register(PD, Backing::Shared(100), 1000, WRITE)
        .unwrap();
    let reader = table
        .register(PD, Backing::Shared(100), 0, Access::REMOTE_READ)
        .unwrap();
    for region in [&other, &r] {
        assert_eq!(write(region.stag(), 1000, 8), Some(false));
        assert_eq!(write(region.stag(), 1000, 8), Some(true));
        assert_eq!(write(reader.stag(), 0, 8), None);
        check(region, 0, 8);
    }
    // A window over it: bound, used, invalid, and bound to less.
    let window = table.alloc_window(PD, WindowType::Type2).unwrap();
    let bind = |key, len| {
        let way = Access::REMOTE_WRITE | Access::ZERO_BASED;
        table
            .bind(PD, window.stag(), key, QP, r.stag(), 1010, len, way)
            .unwrap()
    };
    let stag = bind(5, 20);
    assert_eq!(write(stag, 0, 20), Some(false));
    assert_eq!(write(stag, 4, 16), Some(true));
    check(&r, 14, 16);
    table.invalidate(PD, QP, stag).unwrap();
    assert_eq!(write(stag, 0, 8), None);
    assert_eq!(write(bind(5, 10), 0, 10), Some(false));
    assert_eq!(write(stag, 0, 11), None);
    // One that does not lie in one window of the mappings.
    let long = table
        .register(PD, Backing::Shared(130 << 20), 0, WRITE)
        .unwrap();
    for at in [0, 63 << 20, 65 << 20, (130 << 20) - 100, 5] {
        write(long.stag(), at, 100).unwrap();
        check(&long, at as usize, 100);
        if write(long.stag(), at, 100).unwrap() {
            check(&long, at as usize, 100);
        }
    }
    let mut looked_up = 0;
    for at in (0..130 << 20).step_by(1 << 20) {
        looked_up += u32::from(!write(long.stag(), at, 100).unwrap());
        check(&long, at as usize, 100);
    }
    assert!(looked_up <= 4, "{looked_up} of 130");
    drop(window);
    let stag = r.stag();
    assert_eq!(write(stag, 1000, 8), Some(false));
    assert_eq!(write(stag, 1000, 8), Some(true));
    r.deregister().unwrap();
    assert_eq!(write(stag, 1000, 8), None);
}

#[test]
fn a_domain_shows_what_was_there_before_it() {
    let table = Table::new(100);
    let before = table.register(PD, Backing::Anonymous(100), 0, ALL).unwrap();
    let region = shared(&table, 100, ALL);
    let window = table.alloc_window(PD, WindowType::Type2).unwrap();
    let stag = table
        .bind(
            PD,
            window.stag(),
            1,
            QP,
            region.stag(),
            0,
            9,
            Access::REMOTE_READ,
        )
        .unwrap();
    let domain = table.domain(PD).unwrap();
    assert!(Arc::ptr_eq(&domain, &table.domain(PD).unwrap()));
    let peer = Peer::open(copies(&domain, true)).unwrap();
    for stag in [region.stag(), stag] {
        assert!(peer.find(QP, stag, 0, 9, Access::REMOTE_READ).is_some());
    }
    assert!(
        peer.find(QP, before.stag(), 0, 9, Access::REMOTE_READ)
            .is_none()
    );
    let other = table.domain(PdId(8)).unwrap();
    assert_ne!(other.id(), domain.id());
    // With the last hold the table is void.
    drop((domain, window));
    assert!(
        peer.find(QP, region.stag(), 0, 9, Access::REMOTE_READ)
            .is_some()
    );
    drop(region);
    assert_eq!(peer.id(), None);
    drop(other);
}

#[test]
fn references_are_pulled_from_where_they_say() {
    let (table, _domain, peer) = shown(true);
    let shared = shared(&table, 1000, LOCAL);
    shared.write(0, &[1; 1000]).unwrap();
    shared.write(500, b"referenced").unwrap();
    let span = |r: &Region| table.local(PD, r.stag(), 0, 1000, Access::empty()).unwrap();
    let (arena, heap) = (span(&shared), vec![7; 1000]);
    let at = heap.as_ptr().addr() as u64;
    let heap = table.register(PD, Backing::Owned(heap), 0, LOCAL).unwrap();
    let own = span(&heap);
    let mut list = SendList::new();
    list.push_bytes(b"plain");
    list.push_span(&arena, 500, 10);
    list.push_span(&own, 3, 4);
    let pieces: Vec<Piece> = list.pieces().collect();
    let place = |space, addr| Some(ExportAddr { space, addr });
    let base = arena.place();
    assert_eq!(base.space, 3);
    assert_eq!(
        pieces.iter().map(|p| (p.place, p.len)).collect::<Vec<_>>(),
        [
            (None, 5),
            (place(3, base.addr + 500), 10),
            (place(0, at + 3), 4)
        ]
    );
    let (mut x, mut y) = ([0; 3], [0; 12]);
    let mut into = RecvList::new();
    into.push_buf(&mut x);
    into.push_buf(&mut y);
    peer.pull(pieces[1].place.unwrap(), &mut into, 1, 10)
        .unwrap();
    // Nobody said whose address space it would be.
    let e = peer.pull(pieces[2].place.unwrap(), &mut into, 0, 4);
    assert_eq!(e.unwrap_err().kind(), std::io::ErrorKind::Unsupported);
    assert!(peer.pull(base, &mut into, 6, 10).is_err());
    for (space, addr) in [(1, 1 << 46), (2, u64::MAX), (4, 0), (u32::MAX, 0)] {
        let nonsense = ExportAddr { space, addr };
        assert!(peer.pull(nonsense, &mut into, 0, 10).is_err());
    }
    assert_eq!((&x, &y), (b"\0re", b"ferenced\0\0\0\0"));

    // A peer that is not trusted does not get memory without remote rights.
    let peer = Peer::open(copies(&table.domain(PD).unwrap(), false)).unwrap();
    let mut into = RecvList::new();
    into.push_buf(&mut x);
    assert!(peer.pull(base, &mut into, 0, 1).is_err());
}

/// A peer's mark: which `STag` it uses. Once cut off it counts no more.
#[derive(Default)]
struct Mark(AtomicU32, AtomicBool);

impl Reader for Mark {
    fn uses(&self, stag: u32) -> bool {
        self.0.load(Ordering::SeqCst) == stag && !self.1.load(Ordering::SeqCst)
    }
    fn serves(&self, qp: u32) -> bool {
        qp == QP
    }
    fn borrows(&self, _place: ExportAddr, _len: u64) -> bool {
        false
    }
    fn cut_off(&self) {
        self.1.store(true, Ordering::SeqCst);
    }
}

fn mark(domain: &Domain) -> Arc<Mark> {
    let mark = Arc::new(Mark::default());
    let weak: Weak<dyn Reader> = Arc::downgrade(&(mark.clone() as Arc<dyn Reader>));
    domain.add_reader(weak);
    mark
}

/// What the writers write in one go.
/// Long enough for the owner to come in between.
const BLOCK: usize = 1 << 20;

/// Ends the writers, also when their owner panics.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Writers do as peers do: mark, fence, find, copy, unmark.
fn writers(domain: &Domain, peer: &Peer, run: impl FnOnce(&AtomicU32, &dyn Fn(u64))) {
    let marks = [mark(domain), mark(domain)];
    let (stag, stop) = (AtomicU32::new(0), AtomicBool::new(false));
    let attempts: Vec<_> = marks.iter().map(|_| AtomicU64::new(0)).collect();
    let hits = AtomicU64::new(0);
    std::thread::scope(|s| {
        for (mark, attempts) in marks.iter().zip(&attempts) {
            let (stag, stop, hits) = (&stag, &stop, &hits);
            s.spawn(move || {
                let (mut n, mut bytes) = (0_u8, vec![0; BLOCK]);
                while !stop.load(Ordering::Relaxed) {
                    n = n.wrapping_add(1);
                    bytes.fill(n);
                    let stag = stag.load(Ordering::SeqCst);
                    mark.0.store(stag, Ordering::SeqCst);
                    fence(Ordering::SeqCst);
                    if stag != 0 && write(peer, stag, 0, &bytes).is_some() {
                        hits.fetch_add(1, Ordering::Relaxed);
                    }
                    mark.0.store(0, Ordering::SeqCst);
                    attempts.fetch_add(1, Ordering::SeqCst);
                    std::thread::yield_now();
                }
            });
        }
        let wait = |more: u64| {
            let now: Vec<_> = attempts.iter().map(|a| a.load(Ordering::SeqCst)).collect();
            for (a, now) in attempts.iter().zip(now) {
                while a.load(Ordering::SeqCst) < now + more {
                    std::thread::yield_now();
                }
            }
        };
        let _stop = Stop(&stop);
        run(&stag, &wait);
    });
    assert!(hits.load(Ordering::Relaxed) > 0, "nothing was written");
}

/// Some time, shorter than what a copy takes.
fn spin(round: u64) {
    for _ in 0..round * 97 % 2000 {
        std::hint::spin_loop();
    }
}

#[test]
fn nothing_is_written_after_a_window_is_invalid() {
    let (table, domain, peer) = shown(false);
    let region = shared(&table, BLOCK, WRITE);
    let window = table.alloc_window(PD, WindowType::Type2).unwrap();
    writers(&domain, &peer, |stag, wait| {
        for round in 0..400 {
            let rights = Access::REMOTE_WRITE | Access::ZERO_BASED;
            let bound = table
                .bind(
                    PD,
                    window.stag(),
                    round as u8,
                    QP,
                    region.stag(),
                    0,
                    BLOCK as u64,
                    rights,
                )
                .unwrap();
            stag.store(bound, Ordering::SeqCst);
            wait(round % 2);
            spin(round);
            if table.invalidate(PD, QP, bound).is_err() {
                while table.is_overdue(PD, bound) {
                    std::thread::yield_now();
                }
            }
            let (mut then, mut later) = (vec![0; BLOCK], vec![0; BLOCK]);
            region.read(0, &mut then).unwrap();
            wait(3);
            region.read(0, &mut later).unwrap();
            assert!(then == later, "written in round {round}");
        }
    });
}

#[test]
fn nothing_is_written_after_a_region_is_deregistered() {
    let (table, domain, peer) = shown(false);
    writers(&domain, &peer, |stag, wait| {
        for round in 0..400 {
            let region = shared(&table, BLOCK, WRITE);
            let place = table
                .local(PD, region.stag(), 0, 1, Access::empty())
                .unwrap()
                .place();
            stag.store(region.stag(), Ordering::SeqCst);
            wait(round % 2);
            spin(round);
            assert!(region.deregister().is_ok());
            // A hole, and it stays one.
            let look = Mapping::new(domain.fds(false)[1], place.addr, BLOCK, false).unwrap();
            for _ in 0..2 {
                for i in (0..BLOCK).step_by(512) {
                    // SAFETY: inside the mapping; no references.
                    let byte = unsafe { look.as_ptr().add(i).read_volatile() };
                    assert_eq!(byte, 0, "round {round}");
                }
                wait(2);
            }
        }
    });
}

#[test]
fn memory_comes_back_after_its_peer_is_out_of_it() {
    let (table, domain, _peer) = shown(false);
    let mark = mark(&domain);
    let region = |n| {
        table
            .register(PD, Backing::Owned(vec![n; 64]), 0, WRITE)
            .unwrap()
    };
    let uses = |stag| mark.0.store(stag, Ordering::SeqCst);
    let came = |r: Result<Option<Vec<u8>>, PendingRelease>| r.map_err(|_| "in use");

    // It can be asked for, or waited for.
    let r = region(1);
    uses(r.stag());
    let leaving = r.retire().expect_err("the peer is in it");
    let leaving = leaving.finish().expect_err("it still is");
    uses(0);
    assert_eq!(came(leaving.finish()), Ok(Some(vec![1; 64])));
    let r = region(2);
    uses(r.stag());
    std::thread::scope(|s| {
        let waiting = s.spawn(|| r.deregister());
        std::thread::yield_now();
        uses(0);
        assert_eq!(waiting.join().unwrap().unwrap(), Some(vec![2; 64]));
    });

    // So through a window, which is gone at once. The peers of other queue pairs are not asked.
    let r = region(3);
    let w = table.alloc_window(PD, WindowType::Type2).unwrap();
    let bind = |key, qp| {
        table
            .bind(PD, w.stag(), key, qp, r.stag(), 0, 64, Access::REMOTE_WRITE)
            .unwrap()
    };
    let stag = bind(1, QP + 1);
    uses(stag);
    assert_eq!(table.invalidate(PD, QP + 1, stag), Ok(()));
    let stag = bind(2, QP);
    uses(stag);
    assert_eq!(table.invalidate(PD, QP, stag), Err(MemError::InUse));
    assert_eq!(table.invalidate(PD, QP, stag), Err(MemError::InvalidStag));
    assert!(table.is_overdue(PD, stag));
    bind(3, QP);
    drop(w);
    // One of type 1 is bound anew all the same, and then every peer is asked.
    let w = table.alloc_window(PD, WindowType::Type1).unwrap();
    let anew = |key| {
        table.bind(
            PD,
            w.stag(),
            key,
            QP + 1,
            r.stag(),
            0,
            64,
            Access::REMOTE_WRITE,
        )
    };
    let first = anew(1).unwrap();
    uses(first);
    assert_eq!(anew(2), Err(MemError::InUse));
    assert_eq!(w.stag() & 0xff, 2);
    assert!(table.is_overdue(PD, first));
    drop(w);
    let leaving = r.retire().expect_err("the peer is in the old window");
    uses(0);
    assert!(!table.is_overdue(PD, stag));
    assert_eq!(came(leaving.finish()), Ok(Some(vec![3; 64])));

    // Nobody waits for memory that is dropped: it stays until the peer is out.
    let r = region(4);
    let p = r.as_ptr();
    uses(r.stag());
    drop(r);
    // SAFETY: the peer has not left.
    assert_eq!(unsafe { p.read_volatile() }, 4);
    uses(0);

    // Memory that peers were never let into is not asked about.
    let r = table
        .register(PD, Backing::Owned(vec![5; 64]), 0, Access::LOCAL_WRITE)
        .unwrap();
    uses(r.stag());
    assert_eq!(came(r.retire()), Ok(Some(vec![5; 64])));

    // A peer that is gone is not asked.
    let r = region(6);
    uses(r.stag());
    drop(mark);
    assert_eq!(r.deregister().unwrap(), Some(vec![6; 64]));
}

/// A peer that stays is waited for so long, and then cut off.
#[test]
fn no_peer_keeps_memory_for_ever() {
    let cut = |mark: &Mark| mark.1.swap(false, Ordering::SeqCst);
    std::thread::scope(|s| {
        for way in 0..4 {
            s.spawn(move || {
                let (table, domain, _peer) = shown(false);
                let mark = mark(&domain);
                let uses = |stag| mark.0.store(stag, Ordering::SeqCst);
                let mut bytes = [0_u8; 64];
                // SAFETY: `bytes` is not touched until the region is gone.
                let raw =
                    unsafe { table.register_raw(PD, bytes.as_mut_ptr(), 64, 0, WRITE) }.unwrap();
                let part = table.register_part(&raw, 0, 8, 0, WRITE).unwrap();
                let start = Instant::now();
                match way {
                    0 => {
                        uses(raw.stag());
                        drop(part);
                        assert!(raw.deregister().is_ok());
                    }
                    1 => {
                        uses(raw.stag());
                        drop(part);
                        drop(raw);
                    }
                    // The memory of a part is the whole's.
                    2 => {
                        uses(part.stag());
                        let mut leaving = part.retire().expect_err("the peer is in it");
                        while let Err(again) = leaving.finish() {
                            leaving = again;
                            std::thread::yield_now();
                        }
                        drop(raw);
                    }
                    _ => {
                        let window = table.alloc_window(PD, WindowType::Type2).unwrap();
                        let rights = Access::REMOTE_WRITE;
                        let stag = window.stag();
                        let stag = table.bind(PD, stag, 1, QP, raw.stag(), 0, 8, rights);
                        uses(stag.unwrap());
                        drop(window);
                        drop(part);
                    }
                }
                assert!(cut(&mark), "{way}: given up too early");
                assert!(start.elapsed() < PEER_LIMIT * 3, "{way}");
            });
        }
    });
}

#[test]
fn strange_files_are_no_domain() {
    let (_table, domain, _peer) = shown(true);
    let open = |change: &dyn Fn(&mut Vec<OwnedFd>)| {
        let mut fds = copies(&domain, true);
        change(&mut fds);
        Peer::open(fds).map(|_| ()).map_err(|e| e.kind())
    };
    let bad = Err(std::io::ErrorKind::InvalidData);
    assert_eq!(open(&|_| {}), Ok(()));
    assert_eq!(open(&|fds| fds.truncate(2)), bad);
    assert_eq!(open(&|fds| fds.push(fds[0].try_clone().unwrap())), bad);
    assert_eq!(open(&|fds| fds.swap(0, 1)), bad, "an arena is no table");
    let plain = std::fs::File::open("/proc/self/exe").unwrap();
    assert_eq!(open(&|fds| fds[2] = plain.try_clone().unwrap().into()), bad);
    assert_eq!(open(&|fds| fds[0] = plain.try_clone().unwrap().into()), bad);
    assert_eq!(
        open(&|fds| fds[0] = memfd::create("weft-test", 4096).unwrap()),
        bad
    );
    assert_eq!(
        open(&|fds| fds[0] = memfd::create("weft-test", 1 << 24).unwrap()),
        bad
    );
}

#[test]
fn read_only_files_cannot_be_mapped_for_writing() {
    let (_table, domain, _peer) = shown(true);
    let fds = domain.fds(true);
    for (i, writable) in [false, true, false, false].into_iter().enumerate() {
        let fd = fds[i].as_fd();
        assert_eq!(Mapping::new(fd, 0, 4096, true).is_ok(), writable, "{i}");
        assert!(Mapping::new(fd, 0, 4096, false).is_ok(), "{i}");
    }
}

/// A connected pair of TCP sockets; the first does not block.
fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    sender.set_nonblocking(true).unwrap();
    (sender, listener.accept().unwrap().0)
}

#[test]
fn frozen_memory_is_sent_whole_in_order_and_cannot_be_written() {
    const LEN: usize = 3 << 20;
    let (table, ..) = shown(false);
    let region = shared(&table, LEN, Access::REMOTE_READ);
    let bytes: Vec<u8> = (0..LEN).map(|i| (i % 251) as u8).collect();
    region.write(0, &bytes).unwrap();
    region.freeze().unwrap();
    assert_eq!(region.write(0, b"x"), Err(MemError::Access));
    assert_eq!(region.fill(0, 1, 0), Err(MemError::Access));
    assert_eq!(region.store_u64(0, 0), Err(MemError::Access));
    assert!(region.compare_swap(0, 0, 0).is_err());
    let open = shared(&table, 8, Access::LOCAL_WRITE);
    assert_eq!(open.freeze(), Err(MemError::Access));

    // Large and small pieces at odd places, through a socket that takes parts of them.
    let (sender, mut receiver) = sockets();
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        receiver.read_to_end(&mut all).unwrap();
        all
    });
    let mut expected = Vec::new();
    let mut pieces = Vec::new();
    for (at, len) in [
        (1, 2_000_001),
        (5, 70_000),
        (4096, 16 << 10),
        (9, 100),
        (LEN - 65_519, 65_519),
    ] {
        expected.extend(b"head");
        expected.extend(&bytes[at..][..len]);
        pieces.extend([(None, 4), (Some(at), len)]);
    }
    while !pieces.is_empty() {
        let spans: Vec<_> = pieces
            .iter()
            .map(|&(at, len): &(Option<usize>, usize)| {
                let span =
                    |at| table.local(PD, region.stag(), at as u64, len as u32, Access::empty());
                at.map(|at| span(at).unwrap())
            })
            .collect();
        let mut list = SendList::new();
        for (span, (_, len)) in spans.iter().zip(&pieces) {
            match span {
                Some(span) => list.push_span(span, 0, *len),
                None => list.push_bytes(&b"head"[4 - len..]),
            }
        }
        let mut n = match list.send(sender.as_fd(), false) {
            Ok(n) => n,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {
                std::thread::yield_now();
                continue;
            }
            Err(e) => panic!("{e}"),
        };
        pieces.retain_mut(|(at, len)| {
            let taken = n.min(*len);
            n -= taken;
            *len -= taken;
            *at = at.map(|at| at + taken);
            *len > 0
        });
    }
    drop(sender);
    assert!(reader.join().unwrap() == expected);
}

#[test]
fn frozen_memory_is_not_copied_and_outlives_its_region_in_a_socket() {
    const LEN: usize = 64 << 10;
    let (table, ..) = shown(false);
    let (sender, mut receiver) = sockets();
    let send = |fill: u8, freeze: bool| {
        let region = shared(&table, LEN, Access::REMOTE_READ);
        region.fill(0, LEN, fill).unwrap();
        if freeze {
            region.freeze().unwrap();
        }
        let rights = Access::empty();
        let span = table
            .local(PD, region.stag(), 0, LEN as u32, rights)
            .unwrap();
        let mut list = SendList::new();
        list.push_span(&span, 0, LEN);
        assert_eq!(list.send(sender.as_fd(), false).unwrap(), LEN);
        region
    };
    let mut got = vec![0; LEN];
    for (freeze, seen) in [(false, 1), (true, 2)] {
        let region = send(1, freeze);
        // SAFETY: inside the region, to which nobody else writes. The promise is broken to see who copies.
        unsafe { region.as_ptr().write_bytes(2, LEN) };
        receiver.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|b| *b == seen), "frozen: {freeze}");
    }
    drop(send(3, true));
    drop(send(4, false));
    for seen in [3, 4] {
        receiver.read_exact(&mut got).unwrap();
        assert!(got.iter().all(|b| *b == seen));
    }
}
