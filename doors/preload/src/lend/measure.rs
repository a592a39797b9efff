//! Measures if one copy by the receiver is faster than two through the ring, on this machine and for this kind of memory. Runs once, at the first
//! large send under `--mode auto`.
//!
//! # Safety
//!
//! Reads and writes memory that it allocates itself.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use weft_sys::pages::Pages;
use weft_sys::process::read_memory;

/// Bytes copied for the measurement.
const BYTES: usize = 1 << 20;
/// Largest time in percent of the ring's: the fetch has to be faster by a margin, because the sender waits meanwhile.
const MARGIN: u128 = 80;

/// By kind of pages: ordinary ones, huge ones.
#[derive(Clone, Copy, Default)]
struct Faster {
    small: bool,
    huge: bool,
}

fn best(mut f: impl FnMut()) -> u128 {
    let times = (0..5).map(|_| {
        let begun = Instant::now();
        f();
        begun.elapsed().as_nanos()
    });
    times.min().unwrap_or(u128::MAX)
}

fn compare(huge: bool) -> Option<bool> {
    let mut from = Pages::new(4 << 20, huge).ok()?;
    let mut to = Pages::new(4 << 20, huge).ok()?;
    from.touch();
    to.touch();
    let mut ring = vec![1_u8; 256 << 10];
    let address = from.bytes().as_ptr().expose_provenance() as u64;
    let own = crate::lock::own();
    let mut is_done = true;
    let fetch = best(|| is_done &= read_memory(own, address, &mut to.bytes()[..BYTES]).is_ok());
    let copy = best(|| {
        for at in (0..BYTES).step_by(ring.len()) {
            let n = ring.len();
            ring.copy_from_slice(&from.bytes()[at..at + n]);
            to.bytes()[at..at + n].copy_from_slice(&ring);
        }
        std::hint::black_box(to.bytes());
    });
    Some(is_done && fetch * 100 < copy * MARGIN)
}

/// Two threads at once may both measure.
fn measured() -> Faster {
    const SMALL: u8 = 1;
    const HUGE: u8 = 2;
    const IS_KNOWN: u8 = 4;
    static MEASURED: AtomicU8 = AtomicU8::new(0);
    let mut known = MEASURED.load(Relaxed);
    if known == 0 {
        let bit = |huge, bit| u8::from(compare(huge).unwrap_or(false)) * bit;
        known = IS_KNOWN | bit(false, SMALL) | bit(true, HUGE);
        MEASURED.store(known, Relaxed);
    }
    Faster {
        small: known & SMALL != 0,
        huge: known & HUGE != 0,
    }
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
#[derive(Default)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// Returns true if all of a range is in huge pages (`PAGEMAP_SCAN`, Linux 6.7 and later; false on older kernels).
fn is_huge(start: *mut u8, len: usize) -> bool {
    use std::os::fd::AsRawFd;
    const HUGE: u64 = 1 << 6;
    // _IOWR('f', 16, struct pm_scan_arg)
    const PAGEMAP_SCAN: libc::c_ulong =
        3 << 30 | (size_of::<Scan>() as libc::c_ulong) << 16 | 0x66 << 8 | 0x10;
    let page = weft_sys::protect::page_size();
    let from = start.addr() / page * page;
    let to = (start.addr() + len).next_multiple_of(page);
    let Ok(map) = std::fs::File::open("/proc/self/pagemap") else {
        return false;
    };
    let mut region = Region::default();
    let mut scan = Scan {
        size: size_of::<Scan>() as u64,
        start: from as u64,
        end: to as u64,
        vec: (&raw mut region).expose_provenance() as u64,
        vec_len: 1,
        category_mask: HUGE,
        return_mask: HUGE,
        ..Scan::default()
    };
    // SAFETY: the kernel fills the structure and one region, both ours.
    let n = unsafe {
        libc::syscall(
            libc::SYS_ioctl,
            map.as_raw_fd(),
            PAGEMAP_SCAN,
            &raw mut scan,
        )
    };
    n == 1 && region.start <= from as u64 && region.end >= to as u64
}

/// Returns true if a send of this memory is faster when the receiver fetches it.
pub(super) fn is_faster(start: *mut u8, len: usize) -> bool {
    // Less is not worth the two threads' meeting.
    if len < BYTES / 2 {
        return false;
    }
    let faster = measured();
    faster.small || (faster.huge && is_huge(start, len))
}
