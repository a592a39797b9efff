//! `libweft-malloc.so`: large allocations of an unmodified program begin on a page and share none with others, so that all of a buffer can be
//! protected while it is sent (`weft run --mode azsdp --azsdp-malloc`; the malloc hook of the AZ-SDP paper, section 4.4.1).
//!
//! The memory comes from the allocator behind this library, by its `memalign`. So `free` and `malloc_usable_size` are not intercepted, memory allocated
//! before this library was loaded is valid too, and a `fork` needs nothing. Sizes below `WEFT_RUN_FROM` go to the allocator unchanged.
//!
//! # Safety
//!
//! Every exported function is as safe as its manual page says. The functions behind them are looked up at their first call; `dlsym` allocates only
//! where it fails (glibc 2.34), and an allocator has them all.

use libc::{c_int, c_void, size_t};
use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// From how many bytes on; as `weft_run::lend::FROM_BYTES`.
static FROM: AtomicUsize = AtomicUsize::new(32 << 10);
static PAGE: AtomicUsize = AtomicUsize::new(4096);
/// Cleared memory above this size is left to the allocator, which knows which memory is clear already.
const MOST_CLEARED: usize = 4 << 20;

extern "C" fn at_start() {
    // SAFETY: asks for a number; the variable's text has its end.
    unsafe {
        if let Ok(page) = usize::try_from(libc::sysconf(libc::_SC_PAGESIZE)) {
            PAGE.store(page, Relaxed);
        }
        let text = libc::getenv(c"WEFT_RUN_FROM".as_ptr());
        if !text.is_null()
            && let Ok(from) = CStr::from_ptr(text).to_str().unwrap_or_default().parse()
        {
            FROM.store(from, Relaxed);
        }
    }
}

// SAFETY: the loader calls the functions of this section at the start.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = at_start;

/// The whole pages that a large allocation gets; `None`: it is none.
fn pages(n: usize) -> Option<usize> {
    let page = PAGE.load(Relaxed);
    (n >= FROM.load(Relaxed).max(page)).then(|| n.checked_next_multiple_of(page))?
}

mod next {
    use libc::{c_int, c_void, size_t};

    weft_sys::next! {
        "C"
        malloc(n: size_t) -> *mut c_void;
        calloc(count: size_t, size: size_t) -> *mut c_void;
        realloc(at: *mut c_void, n: size_t) -> *mut c_void;
        free(at: *mut c_void) -> ();
        memalign(align: size_t, n: size_t) -> *mut c_void;
        posix_memalign(at: *mut *mut c_void, align: size_t, n: size_t) -> c_int;
        malloc_usable_size(at: *mut c_void) -> size_t;
    }
}

weft_sys::interpose! {
    "C"

    fn malloc(n: size_t) -> *mut c_void {
        match pages(n) {
            Some(whole) => next::memalign(PAGE.load(Relaxed), whole),
            None => next::malloc(n),
        }
    }

    fn calloc(count: size_t, size: size_t) -> *mut c_void {
        match count.checked_mul(size).filter(|n| *n <= MOST_CLEARED).and_then(pages) {
            Some(whole) => {
                let at = next::memalign(PAGE.load(Relaxed), whole);
                if !at.is_null() { at.write_bytes(0, whole); }
                at
            }
            None => next::calloc(count, size),
        }
    }

    fn realloc(at: *mut c_void, n: size_t) -> *mut c_void {
        let Some(whole) = pages(n) else { return next::realloc(at, n) };
        let page = PAGE.load(Relaxed);
        if at.is_null() {
            return next::memalign(page, whole);
        }
        // If it grows in place, its start does not move.
        let before = next::malloc_usable_size(at);
        let grown = next::realloc(at, whole);
        if grown.is_null() || grown.addr().is_multiple_of(page) {
            return grown;
        }
        let moved = next::memalign(page, whole);
        if moved.is_null() {
            // Valid, but it may share pages.
            return grown;
        }
        std::ptr::copy_nonoverlapping(grown.cast::<u8>(), moved.cast(), before.min(whole));
        next::free(grown);
        moved
    }

    fn reallocarray(at: *mut c_void, count: size_t, size: size_t) -> *mut c_void {
        if let Some(n) = count.checked_mul(size) {
            return realloc(at, n);
        }
        weft_sys::next::set_errno(libc::ENOMEM);
        std::ptr::null_mut()
    }

    fn memalign(align: size_t, n: size_t) -> *mut c_void {
        match pages(n) {
            Some(whole) => next::memalign(align.max(PAGE.load(Relaxed)), whole),
            None => next::memalign(align, n),
        }
    }

    fn aligned_alloc(align: size_t, n: size_t) -> *mut c_void {
        memalign(align, n)
    }

    fn posix_memalign(at: *mut *mut c_void, align: size_t, n: size_t) -> c_int {
        match pages(n) {
            Some(whole) if align.is_power_of_two() && align >= size_of::<usize>() => next::posix_memalign(at, align.max(PAGE.load(Relaxed)), whole),
            _ => next::posix_memalign(at, align, n),
        }
    }

    fn valloc(n: size_t) -> *mut c_void {
        memalign(PAGE.load(Relaxed), n)
    }
}
