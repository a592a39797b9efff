//! `STags`, rights, bounds and windows: every way the table says no.

use weft_mem::{Access, Backing, MemError, PdId, RawMemory, Region, Span, Table, WindowType};

const PD: PdId = PdId(1);
const OTHER: PdId = PdId(2);
const QP: u32 = 7;
const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);

fn region(table: &Table, len: usize, iova: u64, access: Access) -> Region {
    table
        .register(PD, Backing::Owned(vec![0; len]), iova, access)
        .unwrap()
}

fn err<T: std::fmt::Debug>(r: Result<T, MemError>) -> MemError {
    r.expect_err("refused")
}

fn bytes(span: &Span) -> Vec<u8> {
    let mut v = Vec::new();
    span.extend(0, span.len(), &mut v);
    v
}

#[test]
fn a_buffer_comes_back_with_what_was_placed() {
    let table = Table::new(4);
    let mut buffer = Vec::with_capacity(100);
    buffer.extend_from_slice(b"0123456789");
    let at = buffer.as_ptr();
    let r = table
        .register(PD, Backing::Owned(buffer), 1000, ALL)
        .unwrap();
    assert_eq!((r.len(), r.iova(), r.pd(), r.access()), (10, 1000, PD, ALL));
    let span = table
        .remote(PD, QP, r.stag(), 1002, 3, Access::REMOTE_WRITE)
        .unwrap();
    span.copy_in(0, b"ab");
    span.copy_in(2, b"c");
    let mut two = [0; 2];
    span.copy_out(1, &mut two);
    assert_eq!(&two, b"bc");
    drop(span);
    r.fill(8, 2, b'z').unwrap();
    let back = r.deregister().unwrap().unwrap();
    assert_eq!(back, b"01abc567zz");
    assert_eq!((back.as_ptr(), back.capacity()), (at, 100), "no copy");
}

#[test]
fn stags_must_match_whole() {
    let table = Table::new(4);
    let r = region(&table, 8, 0, ALL);
    let stag = r.stag();
    assert_ne!(stag >> 8, 0);
    for bit in 0..32 {
        let wrong = stag ^ 1 << bit;
        assert_eq!(
            err(table.local(PD, wrong, 0, 1, Access::empty())),
            MemError::InvalidStag
        );
        assert_eq!(
            err(table.remote(PD, QP, wrong, 0, 1, Access::empty())),
            MemError::InvalidStag
        );
        assert_eq!(err(table.invalidate(PD, QP, wrong)), MemError::InvalidStag);
    }
    assert!(table.remote(PD, QP, stag, 0, 8, ALL).is_ok());
    r.deregister().unwrap();
    assert_eq!(
        err(table.remote(PD, QP, stag, 0, 1, Access::empty())),
        MemError::InvalidStag
    );
    let r = region(&table, 8, 0, ALL);
    let stag = r.stag();
    drop(r);
    assert_eq!(
        err(table.local(PD, stag, 0, 1, Access::empty())),
        MemError::InvalidStag
    );
}

#[test]
fn freed_stags_rest() {
    let table = Table::new(4);
    let mut last = std::collections::VecDeque::new();
    for _ in 0..if cfg!(miri) { 300 } else { 100_000 } {
        let index = region(&table, 0, 0, ALL).stag() >> 8;
        assert!(!last.contains(&index));
        last.push_back(index);
        if last.len() > 256 {
            last.pop_front();
        }
    }
}

#[test]
fn a_region_can_come_back_under_its_stag() {
    let table = Table::new(16);
    let first = region(&table, 8, 0, ALL);
    let stag = first.stag();
    let memory = RawMemory::leak(vec![7; 16]);
    // While it is in use, the other one gets a new STag.
    let other = table.register_again(PD, &memory, 0, ALL, stag).unwrap();
    assert_ne!(other.stag() >> 8, stag >> 8);
    first.deregister().map_err(|(_, e)| e).unwrap();
    let access = Access::REMOTE_READ;
    let again = table
        .register_again(OTHER, &memory, 0x100, access, stag)
        .unwrap();
    assert_eq!(again.stag(), stag);
    let span = table.remote(OTHER, QP, stag, 0x108, 8, access).unwrap();
    assert_eq!(bytes(&span), [7; 8]);
    assert_eq!(
        err(table.remote(PD, QP, stag, 0x108, 8, access)),
        MemError::Pd
    );
    assert_eq!(
        err(table.remote(OTHER, QP, stag, 0x108, 8, Access::REMOTE_WRITE)),
        MemError::Access
    );
    // 0 is no STag that anybody can have.
    let zero = table.register_again(PD, &memory, 0, ALL, 0).unwrap();
    assert_ne!(zero.stag() >> 8, 0);
    drop((span, other, again, zero));
    // SAFETY: the vector of above; nothing is registered on it any more.
    drop(unsafe { Vec::from_raw_parts(memory.as_ptr(), memory.len(), memory.len()) });
}

#[test]
fn rights_and_domains() {
    let table = Table::new(8);
    let rights = [
        Access::LOCAL_WRITE,
        Access::REMOTE_WRITE,
        Access::REMOTE_READ,
        Access::REMOTE_ATOMIC,
        Access::MW_BIND,
    ];
    for missing in rights {
        if missing == Access::LOCAL_WRITE {
            continue; // refused at registration, below
        }
        let r = region(&table, 8, 0, ALL - missing);
        for need in rights {
            let remote = table.remote(PD, QP, r.stag(), 0, 8, need);
            let local = table.local(PD, r.stag(), 0, 8, need);
            if need == missing {
                assert_eq!(err(remote), MemError::Access);
                assert_eq!(err(local), MemError::Access);
            } else {
                assert!(remote.is_ok() && local.is_ok());
            }
        }
        // The owner may always read; the domain is judged before the rights.
        assert!(table.local(PD, r.stag(), 0, 8, Access::empty()).is_ok());
        assert_eq!(
            err(table.remote(OTHER, QP, r.stag(), 0, 8, missing)),
            MemError::Pd
        );
        assert_eq!(
            err(table.local(OTHER, r.stag(), 0, 8, missing)),
            MemError::Pd
        );
    }
    for access in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let r = table.register(PD, Backing::Owned(vec![0; 8]), 0, access);
        assert_eq!(err(r), MemError::NeedsLocalWrite);
    }
    assert!(
        table
            .register(PD, Backing::Owned(vec![0; 8]), 0, Access::REMOTE_READ)
            .is_ok()
    );
}

#[test]
fn bounds() {
    let table = Table::new(8);
    let at = |r: &Region, to: u64, len: u32| {
        let remote = table.remote(PD, QP, r.stag(), to, len, Access::REMOTE_READ);
        let local = table.local(PD, r.stag(), to, len, Access::empty());
        assert_eq!(
            remote.as_ref().map(Span::len),
            local.as_ref().map(Span::len)
        );
        remote.map(|s| s.len())
    };
    let r = region(&table, 10, 100, ALL);
    assert_eq!(at(&r, 100, 10), Ok(10));
    assert_eq!(at(&r, 109, 1), Ok(1));
    assert_eq!(at(&r, 110, 0), Ok(0), "nothing, at the end");
    assert_eq!(at(&r, 100, 0), Ok(0));
    for (to, len) in [
        (99, 1),
        (99, 0),
        (100, 11),
        (110, 1),
        (111, 0),
        (0, u32::MAX),
        (u64::MAX, 1),
        (u64::MAX, 0),
    ] {
        assert_eq!(at(&r, to, len), Err(MemError::Bounds), "{to}+{len}");
    }
    assert_eq!(at(&r, u64::MAX, 2), Err(MemError::Wrap));
    assert_eq!(at(&r, u64::MAX - 5, u32::MAX), Err(MemError::Wrap));

    let top = region(&table, 10, u64::MAX - 10, ALL);
    assert_eq!(at(&top, u64::MAX - 10, 10), Ok(10));
    assert_eq!(at(&top, u64::MAX - 1, 1), Ok(1));
    assert_eq!(at(&top, u64::MAX - 1, 2), Err(MemError::Bounds));
    assert_eq!(at(&top, u64::MAX - 1, 3), Err(MemError::Wrap));
    let r = table.register(PD, Backing::Owned(vec![0; 10]), u64::MAX - 9, ALL);
    assert_eq!(err(r), MemError::Wrap);
    let r = table.register(PD, Backing::Owned(vec![0; 10]), 1, ALL | Access::ZERO_BASED);
    assert_eq!(err(r), MemError::BadArgument);

    for empty in [Backing::Owned(Vec::new()), Backing::Anonymous(0)] {
        let r = table.register(PD, empty, 5, ALL).unwrap();
        assert!(r.is_empty());
        r.lock_pages().unwrap();
        assert_eq!(at(&r, 5, 0), Ok(0));
        assert_eq!(at(&r, 5, 1), Err(MemError::Bounds));
        r.write(0, &[]).unwrap();
        r.deregister().unwrap();
    }
}

#[test]
fn the_owner_stays_inside_too() {
    let table = Table::new(8);
    let r = region(&table, 16, 0, ALL);
    let mut one = [0];
    for off in [16, 17, usize::MAX] {
        assert_eq!(r.write(off, &[1]), Err(MemError::Bounds));
        assert_eq!(r.read(off, &mut one), Err(MemError::Bounds));
        assert_eq!(r.fill(off, 1, 0), Err(MemError::Bounds));
        assert_eq!(r.load_u8(off), Err(MemError::Bounds));
        assert_eq!(r.load_u64(off), Err(MemError::Bounds));
    }
    assert_eq!(r.fill(1, usize::MAX, 0), Err(MemError::Bounds));
    assert_eq!(r.store_u64(9, 1), Err(MemError::Bounds));
    let odd = r.as_ptr().align_offset(8) + 1;
    assert_eq!(r.store_u64(odd, 1), Err(MemError::Misaligned));
    assert_eq!(r.load_u64(odd), Err(MemError::Misaligned));
    r.store_u64(odd - 1, 0x0102_0304_0506_0708).unwrap();
    assert_eq!(r.load_u64(odd - 1), Ok(0x0102_0304_0506_0708));
}

#[test]
#[should_panic(expected = "outside a span")]
fn a_span_has_an_end() {
    let table = Table::new(8);
    let r = region(&table, 16, 0, ALL);
    let span = table
        .local(PD, r.stag(), 0, 8, Access::LOCAL_WRITE)
        .unwrap();
    span.copy_in(7, &[1, 2]);
}

#[test]
fn the_table_has_an_end() {
    let table = Table::new(2);
    let a = region(&table, 1, 0, ALL);
    let w = table.alloc_window(PD, WindowType::Type2).unwrap();
    let full = table.register(PD, Backing::Owned(vec![1]), 0, ALL);
    assert_eq!(err(full), MemError::Limit);
    assert_eq!(
        err(table.alloc_window(PD, WindowType::Type2)),
        MemError::Limit
    );
    drop(w);
    let b = region(&table, 1, 0, ALL);
    a.deregister().unwrap();
    drop(b);
    let _pair = (region(&table, 1, 0, ALL), region(&table, 1, 0, ALL));
}

#[test]
fn a_window_from_bind_to_invalidate() {
    let table = Table::new(8);
    let r = region(&table, 100, 1000, ALL);
    r.write(0, &(0..100).collect::<Vec<_>>()).unwrap();
    let w = table.alloc_window(PD, WindowType::Type2).unwrap();
    let get = |stag, to, len| table.remote(PD, QP, stag, to, len, Access::REMOTE_READ);

    let first = w.stag();
    assert_eq!(err(get(first, 1000, 1)), MemError::InvalidStag);
    assert_eq!(err(table.invalidate(PD, QP, first)), MemError::InvalidStag);
    let stag = table
        .bind(PD, first, 0xA5, QP, r.stag(), 1010, 20, Access::REMOTE_READ)
        .unwrap();
    assert_eq!((stag & 0xFF, stag >> 8), (0xA5, first >> 8));
    assert_eq!(w.stag(), stag);

    assert_eq!(bytes(&get(stag, 1010, 3).unwrap()), [10, 11, 12]);
    assert_eq!(bytes(&get(stag, 1029, 1).unwrap()), [29]);
    assert!(get(stag, 1030, 0).is_ok());
    for (to, len) in [(1009, 1), (1010, 21), (1030, 1), (1031, 0), (10, 1), (0, 0)] {
        assert_eq!(err(get(stag, to, len)), MemError::Bounds, "{to}+{len}");
    }
    assert_eq!(err(get(stag, u64::MAX, 2)), MemError::Wrap);
    let write = table.remote(PD, QP, stag, 1010, 1, Access::REMOTE_WRITE);
    assert_eq!(err(write), MemError::Access);
    assert_eq!(
        err(table.remote(PD, QP + 1, stag, 1010, 1, Access::REMOTE_READ)),
        MemError::Pd
    );
    assert_eq!(
        err(table.remote(OTHER, QP, stag, 1010, 1, Access::REMOTE_READ)),
        MemError::Pd
    );
    assert_eq!(
        err(table.local(PD, stag, 1010, 1, Access::empty())),
        MemError::InvalidStag,
        "a window has no local use"
    );

    // A bound window is not bound again, and holds its region.
    let again = table.bind(PD, stag, 1, QP, r.stag(), 1000, 1, Access::REMOTE_READ);
    assert_eq!(err(again), MemError::InUse);
    let (r, e) = r.deregister().expect_err("a window is bound");
    assert_eq!(e, MemError::InUse);
    assert!(get(r.stag(), 1000, 1).is_ok(), "nothing has changed");

    assert_eq!(err(table.invalidate(PD, QP + 1, stag)), MemError::Pd);
    assert_eq!(err(table.invalidate(OTHER, QP, stag)), MemError::Pd);
    assert_eq!(
        err(table.invalidate(PD, QP, stag ^ 1)),
        MemError::InvalidStag
    );
    assert_eq!(
        err(table.invalidate(PD, QP, r.stag())),
        MemError::CannotInvalidate
    );
    assert_eq!(err(table.invalidate(OTHER, QP, r.stag())), MemError::Pd);
    table.invalidate(PD, QP, stag).unwrap();
    assert_eq!(err(get(stag, 1010, 1)), MemError::InvalidStag);
    assert_eq!(err(table.invalidate(PD, QP, stag)), MemError::InvalidStag);

    // The new key counts, the old one is dead; addresses from 0 this time.
    let zero = Access::REMOTE_READ | Access::ZERO_BASED;
    let new = table
        .bind(PD, stag, 0xA6, QP, r.stag(), 1050, 50, zero)
        .unwrap();
    assert_eq!(err(get(stag, 0, 1)), MemError::InvalidStag);
    assert_eq!(bytes(&get(new, 49, 1).unwrap()), [99]);
    assert_eq!(err(get(new, 50, 1)), MemError::Bounds);
    drop(w);
    assert_eq!(err(get(new, 0, 1)), MemError::InvalidStag);
    r.deregister().unwrap();
}

#[test]
fn a_window_of_a_domain() {
    let table = Table::new(8);
    let (one, two) = (region(&table, 10, 100, ALL), region(&table, 10, 200, ALL));
    let w = table.alloc_window(PD, WindowType::Type1).unwrap();
    let read = Access::REMOTE_READ;
    let bind = |key, qp, region: u32, addr, len| {
        table.bind(PD, w.stag(), key, qp, region, addr, len, read)
    };
    let get = |qp, stag, to| table.remote(PD, qp, stag, to, 1, read).map(drop);
    let first = bind(1, QP, one.stag(), 105, 5).unwrap();
    for qp in [QP, QP + 1] {
        assert_eq!(get(qp, first, 105), Ok(()));
        let invalidated = table.invalidate(PD, qp, first);
        assert_eq!(invalidated, Err(MemError::CannotInvalidate));
    }
    let foreign = table.remote(OTHER, QP, first, 105, 1, read);
    assert_eq!(err(foreign), MemError::Pd);
    // What cannot be leaves it as it is.
    assert_eq!(err(bind(1, QP, two.stag(), 200, 1)), MemError::BadArgument);
    assert_eq!(err(bind(2, QP, two.stag(), 200, 11)), MemError::Bounds);
    assert_eq!(
        err(bind(2, QP, two.stag() ^ 1, 200, 1)),
        MemError::InvalidStag
    );
    let other = table.bind(OTHER, w.stag(), 2, QP, two.stag(), 200, 1, read);
    assert_eq!(err(other), MemError::Pd);
    assert_eq!((get(QP, first, 105), w.stag()), (Ok(()), first));
    // By another queue pair, to another region: the first one is free.
    let second = bind(2, QP + 1, two.stag(), 200, 10).unwrap();
    assert_eq!(get(QP, first, 105), Err(MemError::InvalidStag));
    assert_eq!(get(QP, second, 200), Ok(()));
    one.deregister().unwrap();
    let none = bind(3, QP, 0, 0, 0).unwrap();
    for stag in [second, none] {
        assert_eq!(get(QP, stag, 200), Err(MemError::InvalidStag));
    }
    two.deregister().unwrap();
    assert_eq!(bind(4, QP, 0, 0, 0), Ok(w.stag()));
}

#[test]
fn binds_refused() {
    let table = Table::new(8);
    let r = region(&table, 10, 100, ALL);
    let w = table.alloc_window(PD, WindowType::Type2).unwrap();
    let bind = |window, region: u32, addr, len, access| {
        table.bind(PD, window, 1, QP, region, addr, len, access)
    };
    let read = Access::REMOTE_READ;
    let s = r.stag();
    assert_eq!(err(bind(s, s, 100, 1, read)), MemError::InvalidStag);
    assert_eq!(
        err(bind(w.stag() ^ 1 << 30, s, 100, 1, read)),
        MemError::InvalidStag
    );
    assert_eq!(
        err(bind(w.stag(), s ^ 1, 100, 1, read)),
        MemError::InvalidStag
    );
    assert_eq!(
        err(bind(w.stag(), w.stag(), 100, 1, read)),
        MemError::InvalidStag
    );
    assert_eq!(err(bind(w.stag(), s, 100, 0, read)), MemError::BadArgument);
    for wrong in [Access::LOCAL_WRITE, Access::MW_BIND] {
        assert_eq!(err(bind(w.stag(), s, 100, 1, wrong)), MemError::BadArgument);
    }
    assert_eq!(err(bind(w.stag(), s, 99, 1, read)), MemError::Bounds);
    assert_eq!(err(bind(w.stag(), s, 100, 11, read)), MemError::Bounds);
    assert_eq!(err(bind(w.stag(), s, 109, u64::MAX, read)), MemError::Wrap);

    let foreign = table.alloc_window(OTHER, WindowType::Type2).unwrap();
    assert_eq!(err(bind(foreign.stag(), s, 100, 1, read)), MemError::Pd);
    let unbindable = region(&table, 10, 100, ALL - Access::MW_BIND);
    assert_eq!(
        err(bind(w.stag(), unbindable.stag(), 100, 1, read)),
        MemError::Access
    );
    let readable = region(&table, 10, 100, read | Access::MW_BIND);
    for change in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        assert_eq!(
            err(bind(w.stag(), readable.stag(), 100, 1, change)),
            MemError::Access
        );
    }
    // None of the refusals left a window counted.
    for r in [r, unbindable, readable] {
        r.deregister().unwrap();
    }
}

#[test]
fn a_dropped_region_takes_its_windows_along() {
    let table = Table::new(40);
    let r = region(&table, 10, 0, ALL);
    let other = region(&table, 10, 0, ALL);
    let windows: Vec<_> = (0..20)
        .map(|i| {
            let w = table.alloc_window(PD, WindowType::Type2).unwrap();
            let to = if i % 2 == 0 { &r } else { &other };
            table
                .bind(PD, w.stag(), 0, QP, to.stag(), 0, 10, Access::REMOTE_READ)
                .unwrap();
            w
        })
        .collect();
    drop(r);
    for (i, w) in windows.iter().enumerate() {
        let get = table.remote(PD, QP, w.stag(), 0, 1, Access::REMOTE_READ);
        assert_eq!(get.is_ok(), i % 2 == 1);
    }
    // Unbound, not bound to something dead: it binds again.
    table
        .bind(
            PD,
            windows[0].stag(),
            3,
            QP,
            other.stag(),
            0,
            1,
            Access::REMOTE_READ,
        )
        .unwrap();
    drop(windows);
    other.deregister().unwrap();
}

/// Whether the kernel has been asked for huge pages (`hg`) where this byte is; `None` where it does not say.
fn prefers_huge_pages(at: usize) -> Option<bool> {
    let maps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let mut inside = false;
    for line in maps.lines() {
        let range = line.split(' ').next()?.split_once('-');
        let number = |text| usize::from_str_radix(text, 16).ok();
        if let Some((Some(from), Some(to))) = range.map(|(a, b)| (number(a), number(b))) {
            inside = (from..to).contains(&at);
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
            return Some(flags.split(' ').any(|flag| flag == "hg"));
        }
    }
    None
}

#[test]
#[cfg_attr(miri, ignore = "asks the kernel")]
fn large_regions_ask_for_huge_pages() {
    if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        eprintln!("skipped: the kernel has no transparent huge pages");
        return;
    }
    let table = Table::new(8);
    let (large, small) = (8 << 20, 1 << 20);
    let middle = |r: &Region| prefers_huge_pages(r.as_ptr() as usize + r.len() / 2);
    let owned = region(&table, large, 0, ALL);
    assert_eq!(middle(&owned), Some(true));
    let anonymous = table.register(PD, Backing::Anonymous(large), 0, ALL);
    assert_eq!(middle(&anonymous.unwrap()), Some(true));
    let memory = RawMemory::leak(vec![0; large]);
    let promised = table.register_promised(PD, &memory, 0, ALL).unwrap();
    assert_eq!(middle(&promised), Some(true));
    let short = table.register(PD, Backing::Anonymous(small), 0, ALL);
    assert_eq!(middle(&short.unwrap()), Some(false));
}
