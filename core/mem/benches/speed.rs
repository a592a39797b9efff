//! What the hot paths of this crate cost: `cargo bench -p weft-mem`.
//!
//! Copies are compared with a plain `copy_from_slice` of the same size in the same run, alternating, and
//! the median of the rounds is printed.

use std::hint::black_box;
use std::time::Instant;
use weft_mem::{Access, Backing, PdId, Peer, Process, SendList, Table};
use weft_sys::liveness::{Liveness, PeerLiveness};
use weft_sys::process;

const PD: PdId = PdId(1);

/// Nanoseconds of one call: the median over rounds, for each of the contenders in turn.
fn race<const N: usize>(calls: u32, mut contenders: [&mut dyn FnMut(); N]) -> [f64; N] {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..41 {
        for (f, t) in contenders.iter_mut().zip(&mut times) {
            let start = Instant::now();
            for _ in 0..calls {
                f();
            }
            t.push(start.elapsed().as_secs_f64() * 1e9 / f64::from(calls));
        }
    }
    times.map(|mut t| {
        t.sort_by(f64::total_cmp);
        t[t.len() / 2]
    })
}

fn main() {
    let table = Table::new(1 << 20);
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;

    println!("copy          plain ns   in ns  ratio  out ns  ratio");
    for size in [8, 64, 256, 1024, 4096, 65536, 1 << 20] {
        let region = table
            .register(PD, Backing::Anonymous(size), 0, rights)
            .unwrap();
        let shared = table
            .remote(PD, 1, region.stag(), 0, size as u32, rights)
            .unwrap();
        // All on pages of their own, so that alignment is the same for each.
        let page = size.next_multiple_of(4096);
        let private = table
            .register(PD, Backing::Anonymous(3 * page), 0, rights)
            .unwrap();
        let part = |i| {
            // SAFETY: disjoint parts of a region that nothing else uses and that outlives them.
            unsafe { std::slice::from_raw_parts_mut(private.as_ptr().add(i * page), size) }
        };
        let (src, dst, dst2) = (part(0), part(1), part(2));
        private.fill(0, private.len(), 7).unwrap();
        region.fill(0, size, 7).unwrap();
        let calls = (40_000_000 / (size as u32 + 400)).max(50);
        let [plain, write, read] = race(
            calls,
            [
                &mut || dst.copy_from_slice(black_box(src)),
                &mut || shared.copy_in(0, black_box(src)),
                &mut || shared.copy_out(0, black_box(dst2)),
            ],
        );
        println!(
            "{size:>8} B {plain:>11.1} {write:>7.1} {:>6.2} {read:>7.1} {:>6.2}",
            write / plain,
            read / plain
        );
    }

    for regions in [1, 1000, 100_000] {
        let held: Vec<_> = (0..regions)
            .map(|_| {
                table
                    .register(PD, Backing::Owned(vec![0; 64]), 0, rights)
                    .unwrap()
            })
            .collect();
        let stags: Vec<_> = held.iter().map(weft_mem::Region::stag).collect();
        let mut next = 0;
        let [t] = race(
            100_000,
            [&mut || {
                next = (next + 1) % stags.len();
                black_box(table.remote(PD, 1, stags[next], 8, 32, Access::REMOTE_WRITE)).unwrap();
            }],
        );
        println!("remote + drop, {regions} regions: {t:.1} ns");
    }

    let region = table
        .register(PD, Backing::Anonymous(1 << 16), 0, rights)
        .unwrap();
    let span = table
        .local(PD, region.stag(), 0, 1 << 16, Access::empty())
        .unwrap();
    let header = [0; 20];
    let [t] = race(
        100_000,
        [&mut || {
            let mut list = SendList::new();
            for i in 0..16 {
                list.push_bytes(black_box(&header));
                list.push_span(&span, i * 1024, 1024);
            }
            black_box(&list);
        }],
    );
    println!("SendList of 32 entries: {t:.1} ns");

    let buffer = std::cell::Cell::new(vec![0; 4096]);
    let [t] = race(
        20_000,
        [&mut || {
            let r = table
                .register(PD, Backing::Owned(buffer.take()), 0, rights)
                .unwrap();
            buffer.set(r.deregister().unwrap().unwrap());
        }],
    );
    println!("register + deregister: {t:.0} ns");

    peers();
}

/// What a peer of the same host pays, with this very process as the peer.
fn peers() {
    let table = Table::new(1 << 20);
    let domain = table.domain(PD).unwrap();
    let fds = domain.fds(true);
    let fds = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap());
    let peer = Peer::open(fds.collect()).unwrap();
    let liveness = Liveness::start().unwrap();
    let pid = std::process::id();
    peer.set_process(Process {
        pid,
        pidfd: process::pidfd_open(pid).unwrap(),
        liveness: PeerLiveness::open(liveness.fd()).unwrap(),
    });
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;

    println!(
        "peer           plain us  mapped  ratio  process_vm us    weft  ratio  first write us"
    );
    for size in [4096, 1 << 16, 1 << 20, 16 << 20] {
        let region = |backing| table.register(PD, backing, 0, rights).unwrap();
        let target = |stag| {
            let found = peer.find(1, stag, 0, size as u32, Access::REMOTE_WRITE);
            found.unwrap()
        };
        let source = region(Backing::Anonymous(size));
        source.fill(0, size, 7).unwrap();
        let span = table
            .local(PD, source.stag(), 0, size as u32, Access::empty())
            .unwrap();
        let mut list = SendList::new();
        list.push_span(&span, 0, size);
        let private = region(Backing::Anonymous(size));
        private.fill(0, size, 7).unwrap();
        // SAFETY: regions that nothing else uses while these are used, and that outlive them.
        let (dst, src) = unsafe {
            (
                std::slice::from_raw_parts_mut(private.as_ptr(), size),
                std::slice::from_raw_parts(source.as_ptr(), size),
            )
        };
        let arena = region(Backing::Shared(size));
        let mapped = target(arena.stag());
        let other = region(Backing::Anonymous(size));
        let by_kernel = target(other.stag());
        peer.write(&mapped, &list).unwrap();
        peer.write(&by_kernel, &list).unwrap();
        let vec = |p: *mut u8| libc::iovec {
            iov_base: p.cast(),
            iov_len: size,
        };
        let (local, remote) = ([vec(source.as_ptr())], [vec(other.as_ptr())]);
        let [plain, write, bare, vm] = race(
            (40_000_000 / size as u32).clamp(4, 1000),
            [
                &mut || dst.copy_from_slice(black_box(src)),
                &mut || peer.write(black_box(&mapped), &list).unwrap(),
                // SAFETY: both ranges are registered memory of this process.
                &mut || unsafe {
                    process::vm_writev(pid, black_box(&local), &remote).unwrap();
                },
                &mut || peer.write(black_box(&by_kernel), &list).unwrap(),
            ],
        )
        .map(|ns| ns / 1000.0);
        let mut first: Vec<_> = (0..21)
            .map(|_| {
                let fresh = region(Backing::Shared(size));
                let target = target(fresh.stag());
                // The page tables of its owner are not what is measured.
                fresh.fill(0, size, 1).unwrap();
                let start = Instant::now();
                peer.write(&target, &list).unwrap();
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        first.sort_by(f64::total_cmp);
        println!(
            "{size:>8} B {plain:>11.2} {write:>7.2} {:>6.2} {bare:>14.2} {vm:>7.2} {:>6.2} {:>15.1}",
            write / plain,
            vm / bare,
            first[first.len() / 2]
        );
    }

    for regions in [1, 1000, 20_000] {
        let held: Vec<_> = (0..regions)
            .map(|_| {
                table
                    .register(PD, Backing::Anonymous(64), 0, rights)
                    .unwrap()
            })
            .collect();
        let stags: Vec<_> = held.iter().map(weft_mem::Region::stag).collect();
        let mut next = 0;
        let [t] = race(
            100_000,
            [&mut || {
                next = (next + 1) % stags.len();
                // Some of many find their bucket full, and are not there.
                black_box(peer.find(1, stags[next], 8, 32, Access::REMOTE_WRITE));
            }],
        );
        println!("find, {regions} regions: {t:.1} ns");
    }
    let word = table
        .register(PD, Backing::Shared(8), 0, rights | Access::REMOTE_ATOMIC)
        .unwrap();
    let [t] = race(
        100_000,
        [&mut || {
            let target = peer.find(1, word.stag(), 0, 8, Access::REMOTE_ATOMIC);
            black_box(peer.fetch_add(&target.unwrap(), 1)).unwrap();
        }],
    );
    println!("find + fetch_add: {t:.1} ns");
    let buffer = std::cell::Cell::new(vec![0; 4096]);
    let [t] = race(
        20_000,
        [&mut || {
            let r = table
                .register(PD, Backing::Owned(buffer.take()), 0, rights)
                .unwrap();
            buffer.set(r.deregister().unwrap().unwrap());
        }],
    );
    println!("register + deregister in a domain that is shown: {t:.0} ns");
}
