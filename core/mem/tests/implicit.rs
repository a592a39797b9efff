//! Implicit regions: all memory of the process, of which any may be missing.

use std::sync::atomic::{AtomicBool, Ordering};

use weft_mem::{Access, MemError, PdId, RawMemory, RecvList, Region, SendList, Table};

const PD: PdId = PdId(1);
const PAGE: usize = 4096;
const RIGHTS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);

/// `None` where the system has not what it takes.
fn implicit(table: &Table) -> Option<Region> {
    // SAFETY: the tests name memory of their own mappings only.
    let Some(memory) = (unsafe { RawMemory::everything() }) else {
        eprintln!("skipped: no implicit regions on this system");
        return None;
    };
    let from = memory.as_ptr().addr() as u64;
    Some(table.register_promised(PD, &memory, from, RIGHTS).unwrap())
}

/// New pages; `at` an address, or at any.
fn map(at: usize, pages: usize, protection: libc::c_int) -> usize {
    let fixed = if at == 0 { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    let at = std::ptr::without_provenance_mut(at);
    // SAFETY: a new mapping, or one in place of our own.
    let addr = unsafe { libc::mmap(at, pages * PAGE, protection, flags, -1, 0) };
    assert_ne!(addr, libc::MAP_FAILED);
    addr.expose_provenance()
}

fn unmap(at: usize, pages: usize) {
    let at = std::ptr::with_exposed_provenance_mut(at);
    // SAFETY: a mapping of ours.
    assert_eq!(unsafe { libc::munmap(at, pages * PAGE) }, 0);
}

const RW: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

#[test]
fn what_is_mapped_is_there_and_what_is_not_is_refused() {
    let table = Table::new(8);
    let Some(region) = implicit(&table) else {
        return;
    };
    let stag = region.stag();
    let local = |at: usize, len, need| table.local(PD, stag, at as u64, len, need);
    let remote = |at: usize, len, need| table.remote(PD, 7, stag, at as u64, len, need);
    // Mapped after the registration.
    let at = map(0, 4, RW);
    let span = local(at + 10, 8000, Access::LOCAL_WRITE).unwrap();
    span.copy_in(1, b"implicit");
    let mut out = [0; 8];
    span.copy_out(1, &mut out);
    assert_eq!(&out, b"implicit");
    let mut copied = Vec::new();
    table
        .copy_local_out(PD, stag, at as u64 + 11, 8, &mut copied)
        .unwrap();
    assert_eq!(copied, b"implicit");
    let mut list = SendList::new();
    list.push_bytes(b"an ");
    list.push_span(&span, 1, 8);
    assert!(list.pieces().all(|piece| piece.place.is_none()));
    copied.clear();
    list.copy_to(&mut copied, 100);
    assert_eq!(copied, b"an implicit");
    let mut list = RecvList::new();
    list.push_span(&span, 5000, 8);
    assert_eq!(list.fill_from(b"IMPLICIT"), 8);
    span.copy_out(5000, &mut out);
    assert_eq!(&out, b"IMPLICIT");

    // No peer of this host sees it.
    assert!(remote(at, 8, Access::REMOTE_ATOMIC).is_err());
    assert!(matches!(span.fetch_add(1), Err(MemError::Access)));
    // Nothing there, in part or at all.
    unmap(at + 2 * PAGE, 2);
    for need in [Access::REMOTE_READ, Access::REMOTE_WRITE] {
        assert!(remote(at, 8192, need).is_ok());
        for (addr, len) in [(at, 8193), (at + 8192, 1), (0, 1), (16, 8), (1 << 62, 8)] {
            assert_eq!(remote(addr, len, need).err(), Some(MemError::Bounds));
        }
    }
    assert!(local(at + 8192, 0, Access::LOCAL_WRITE).is_ok());
    // To be read only.
    map(at, 1, libc::PROT_READ);
    assert!(local(at, 8, Access::empty()).is_ok());
    assert!(local(at, 8, Access::LOCAL_WRITE).is_err());
    assert!(remote(at, 8, Access::REMOTE_WRITE).is_err());

    // By a window.
    let window = table.alloc_window(PD, weft_mem::WindowType::Type2).unwrap();
    let stag = table
        .bind(
            PD,
            window.stag(),
            3,
            7,
            region.stag(),
            at as u64,
            16384,
            Access::REMOTE_READ,
        )
        .unwrap();
    let read = |at: usize| table.remote(PD, 7, stag, at as u64, 8, Access::REMOTE_READ);
    assert!(read(at).is_ok());
    assert_eq!(read(at + 8192).err(), Some(MemError::Bounds));
    drop(window);

    // Advice.
    let advise = |at: usize, fault| {
        table.prefetch(
            PD,
            region.stag(),
            (at as u64, 8),
            RIGHTS & Access::LOCAL_WRITE,
            fault,
        )
    };
    assert_eq!(advise(at + PAGE, true), Ok(()));
    assert_eq!(advise(at + 2 * PAGE, false), Ok(()));
    assert_eq!(advise(at + 2 * PAGE, true), Err(MemError::Bounds));
    unmap(at, 2);
}

/// The owner unmaps what is just being copied.
#[test]
fn memory_that_goes_after_the_look_ends_nothing() {
    let table = Table::new(8);
    let Some(region) = implicit(&table) else {
        return;
    };
    let at = map(0, 2, RW);
    let over = AtomicBool::new(false);
    let (mut there, mut gone) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                unmap(at + PAGE, 1);
                std::thread::yield_now();
                map(at + PAGE, 1, RW);
                std::thread::yield_now();
            }
        });
        let bytes = [7; PAGE];
        let begun = std::time::Instant::now();
        while (there.min(gone) < 200 || there + gone < 20_000) && begun.elapsed().as_secs() < 20 {
            let addr = (at + PAGE / 2) as u64;
            let span = table.remote(
                PD,
                7,
                region.stag(),
                addr,
                PAGE as u32,
                Access::REMOTE_WRITE,
            );
            match span {
                Ok(span) => {
                    span.copy_in(0, &bytes);
                    let mut out = vec![1];
                    span.extend(0, PAGE, &mut out);
                    assert_eq!(out.len(), PAGE + 1);
                    // Written, or gone since.
                    assert!(out[1..].iter().all(|byte| *byte == 7 || *byte == 0));
                    assert!(out[1..=PAGE / 2].iter().all(|byte| *byte == 7));
                    there += 1;
                }
                Err(error) => {
                    assert_eq!(error, MemError::Bounds);
                    gone += 1;
                }
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    assert!(there > 0 && gone > 0, "{there} {gone}");
    unmap(at, 2);
}

#[test]
fn its_end_waits_for_those_who_use_it() {
    let table = Table::new(8);
    let Some(region) = implicit(&table) else {
        return;
    };
    let at = map(0, 1, RW);
    let stag = region.stag();
    let span = table
        .local(PD, stag, at as u64, 8, Access::LOCAL_WRITE)
        .unwrap();
    let leaving = region.retire().expect_err("it is in use");
    assert!(
        table
            .local(PD, stag, at as u64, 8, Access::empty())
            .is_err()
    );
    drop(span);
    assert!(leaving.finish().is_ok());
    unmap(at, 1);
}
