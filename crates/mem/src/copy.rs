//! Copies between registered (shared) memory, which others may change during the copy, and private memory.
//!
//! # Safety
//!
//! A plain `memcpy` in Rust assumes that no other thread writes its source: with a racing writer it is undefined behaviour, whatever the
//! bytes are used for. Here the bytes are moved by machine code that the compiler cannot analyse: an `asm!` block that calls the C
//! library's `memmove`. A read that races with a write then returns *some* bytes, as for the kernel or a DMA engine. Elsewhere (miri, other
//! processors) relaxed byte atomics do the same, slowly. See `docs/adr/0001-racing-copies.md`. The kernel copies memory of implicit
//! regions, which may be unmapped at any moment (`docs/adr/0069-implicit-regions.md`).

use weft_sys::map::populate;
use weft_sys::process::{vm_readv, vm_writev};

#[cfg(all(not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod imp {
    use std::arch::asm;

    /// Up to so many bytes are moved without a call.
    #[cfg(target_arch = "x86_64")]
    const SHORT: usize = 64;

    /// As [`opaque_move`], of 1 to 64 bytes: all is loaded before anything is stored, in two halves that may overlap. A call takes as long as
    /// all of this, and every register from the code around it.
    ///
    /// # Safety
    /// As there.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    unsafe fn short_move(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: each block touches the first and the last bytes of the ranges, as many as the branch says that there are, and
        // nothing else.
        unsafe {
            if n > 32 {
                asm!(
                    "movups {a}, [{s}]",
                    "movups {b}, [{s} + 16]",
                    "movups {c}, [{s} + {n} - 32]",
                    "movups {e}, [{s} + {n} - 16]",
                    "movups [{d}], {a}",
                    "movups [{d} + 16], {b}",
                    "movups [{d} + {n} - 32], {c}",
                    "movups [{d} + {n} - 16], {e}",
                    s = in(reg) src, d = in(reg) dst, n = in(reg) n,
                    a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, e = out(xmm_reg) _,
                    options(nostack, preserves_flags),
                );
            } else if n >= 16 {
                asm!(
                    "movups {a}, [{s}]",
                    "movups {b}, [{s} + {n} - 16]",
                    "movups [{d}], {a}",
                    "movups [{d} + {n} - 16], {b}",
                    s = in(reg) src, d = in(reg) dst, n = in(reg) n,
                    a = out(xmm_reg) _, b = out(xmm_reg) _,
                    options(nostack, preserves_flags),
                );
            } else if n >= 8 {
                asm!(
                    "mov {a}, [{s}]",
                    "mov {b}, [{s} + {n} - 8]",
                    "mov [{d}], {a}",
                    "mov [{d} + {n} - 8], {b}",
                    s = in(reg) src, d = in(reg) dst, n = in(reg) n,
                    a = out(reg) _, b = out(reg) _,
                    options(nostack, preserves_flags),
                );
            } else if n >= 4 {
                asm!(
                    "mov {a:e}, [{s}]",
                    "mov {b:e}, [{s} + {n} - 4]",
                    "mov [{d}], {a:e}",
                    "mov [{d} + {n} - 4], {b:e}",
                    s = in(reg) src, d = in(reg) dst, n = in(reg) n,
                    a = out(reg) _, b = out(reg) _,
                    options(nostack, preserves_flags),
                );
            } else {
                asm!(
                    "mov {a}, [{s}]",
                    "mov {b}, [{s} + {h}]",
                    "mov {c}, [{s} + {n} - 1]",
                    "mov [{d}], {a}",
                    "mov [{d} + {h}], {b}",
                    "mov [{d} + {n} - 1], {c}",
                    s = in(reg) src, d = in(reg) dst, n = in(reg) n, h = in(reg) n / 2,
                    a = out(reg_byte) _, b = out(reg_byte) _, c = out(reg_byte) _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }

    /// `memmove` as an opaque block of machine code.
    ///
    /// # Safety
    /// Both ranges must be mapped for `n` bytes, `src` readable and `dst` writable.
    #[inline]
    unsafe fn opaque_move(dst: *mut u8, src: *const u8, n: usize) {
        #[cfg(target_arch = "x86_64")]
        if n.wrapping_sub(1) < SHORT {
            // SAFETY: the caller's promise.
            return unsafe { short_move(dst, src, n) };
        }
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the block follows the C calling convention: arguments in their registers, every
        // register a C function may change declared so, the stack aligned (no `nostack`).
        unsafe {
            asm!(
                "call {f}@PLT",
                f = sym libc::memmove,
                inlateout("rdi") dst => _,
                inlateout("rsi") src => _,
                inlateout("rdx") n => _,
                clobber_abi("C"),
            );
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        unsafe {
            asm!(
                "bl {f}",
                f = sym libc::memmove,
                inlateout("x0") dst => _,
                inlateout("x1") src => _,
                inlateout("x2") n => _,
                clobber_abi("C"),
            );
        }
    }

    #[inline]
    pub(super) unsafe fn store(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { opaque_move(dst, src, n) }
    }

    #[inline]
    pub(super) unsafe fn load(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { opaque_move(dst, src, n) }
    }

    #[inline]
    pub(super) unsafe fn relay(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: the caller's promise; `memmove` minds no race on either side.
        unsafe { opaque_move(dst, src, n) }
    }

    #[inline]
    pub(super) unsafe fn fill(dst: *mut u8, byte: u8, n: usize) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as in `opaque_move`, with memset's arguments.
        unsafe {
            asm!(
                "call {f}@PLT",
                f = sym libc::memset,
                inlateout("rdi") dst => _,
                inlateout("rsi") usize::from(byte) => _,
                inlateout("rdx") n => _,
                clobber_abi("C"),
            );
        }
        #[cfg(target_arch = "aarch64")]
        // SAFETY: as above.
        unsafe {
            asm!(
                "bl {f}",
                f = sym libc::memset,
                inlateout("x0") dst => _,
                inlateout("x1") usize::from(byte) => _,
                inlateout("x2") n => _,
                clobber_abi("C"),
            );
        }
    }
}

#[cfg(not(all(not(miri), any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod imp {
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

    pub(super) unsafe fn store(dst: *mut u8, src: *const u8, n: usize) {
        for i in 0..n {
            // SAFETY: `i < n`, and the caller promises both ranges; shared bytes are only ever
            // reached through atomics.
            unsafe { AtomicU8::from_ptr(dst.add(i)).store(*src.add(i), Relaxed) }
        }
    }

    pub(super) unsafe fn load(dst: *mut u8, src: *const u8, n: usize) {
        for i in 0..n {
            // SAFETY: as in `store`; `dst` may be uninitialised, so it is written, not assigned.
            unsafe {
                let shared = AtomicU8::from_ptr(src.add(i).cast_mut());
                dst.add(i).write(shared.load(Relaxed));
            }
        }
    }

    pub(super) unsafe fn relay(dst: *mut u8, src: *const u8, n: usize) {
        let one = |i: usize| {
            // SAFETY: `i < n`, and the caller promises both ranges, which are only ever reached through atomics.
            unsafe {
                let byte = AtomicU8::from_ptr(src.add(i).cast_mut()).load(Relaxed);
                AtomicU8::from_ptr(dst.add(i)).store(byte, Relaxed);
            }
        };
        // As `memmove`: the end first where the target begins inside the source.
        if dst.addr() > src.addr() {
            (0..n).rev().for_each(one);
        } else {
            (0..n).for_each(one);
        }
    }

    pub(super) unsafe fn fill(dst: *mut u8, byte: u8, n: usize) {
        for i in 0..n {
            // SAFETY: as in `store`.
            unsafe { AtomicU8::from_ptr(dst.add(i)).store(byte, Relaxed) }
        }
    }
}

type CopyFn = unsafe fn(*mut u8, *const u8, usize);

/// Copies `n` private bytes at `src` to shared memory at `dst`.
///
/// # Safety
/// `dst..dst + n` must be registered memory that stays mapped, `src..src + n` readable and not
/// changed meanwhile.
#[inline]
pub unsafe fn store(dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's promise.
    unsafe { imp::store(dst, src, n) }
}

/// Copies `n` shared bytes at `src` to private memory at `dst`, which may be uninitialised.
///
/// # Safety
/// `src..src + n` must be registered memory that stays mapped, `dst..dst + n` writable and ours
/// alone.
#[inline]
pub unsafe fn load(dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's promise.
    unsafe { imp::load(dst, src, n) }
}

/// Copies `n` bytes of which source and target both may change meanwhile. They may overlap.
///
/// # Safety
/// Both ranges must be registered memory that stays mapped.
#[inline]
pub(crate) unsafe fn relay(dst: *mut u8, src: *const u8, n: usize) {
    // SAFETY: the caller's promise.
    unsafe { imp::relay(dst, src, n) }
}

/// Sets `n` shared bytes at `dst`.
///
/// # Safety
/// `dst..dst + n` must be registered memory that stays mapped.
#[inline]
pub(crate) unsafe fn fill(dst: *mut u8, byte: u8, n: usize) {
    // SAFETY: the caller's promise.
    unsafe { imp::fill(dst, byte, n) }
}

/// Copies to `dst` by `copy`, which is [`store`] or [`relay`]; if the target is `implicit` memory, to as much of it as is mapped.
///
/// # Safety
/// As for `copy`; `implicit` memory need not be mapped.
#[inline]
pub(crate) unsafe fn to(implicit: bool, dst: *mut u8, src: *const u8, n: usize, copy: CopyFn) {
    // SAFETY: the caller's promise.
    unsafe {
        if implicit {
            by_kernel(dst, src, n, true);
        } else {
            copy(dst, src, n);
        }
    }
}

/// Copies from `src` by `copy`, which is [`load`] or [`relay`]; if the source is `implicit` memory, unmapped bytes are read as zeros.
///
/// # Safety
/// As for `copy`; `implicit` memory need not be mapped.
#[inline]
pub(crate) unsafe fn from(implicit: bool, dst: *mut u8, src: *const u8, n: usize, copy: CopyFn) {
    // SAFETY: the caller's promise.
    unsafe {
        if implicit {
            let done = by_kernel(dst, src, n, false);
            fill(dst.add(done), 0, n - done);
        } else {
            copy(dst, src, n);
        }
    }
}

/// A copy that stops at unmapped memory; returns how many bytes it has copied. `to`: the target may be unmapped, otherwise the source.
///
/// # Safety
/// The other range must be mapped. No reference to the target may exist.
#[cold]
unsafe fn by_kernel(dst: *mut u8, src: *const u8, n: usize, to: bool) -> usize {
    let pid = std::process::id();
    let range = |base: *mut u8, done: usize| libc::iovec {
        iov_base: base.wrapping_add(done).cast(),
        iov_len: n - done,
    };
    let mut done = 0;
    while done < n {
        let (dst, src) = (range(dst, done), range(src.cast_mut(), done));
        // SAFETY: the caller's promise for what is named as ours; the kernel checks the other range, which is of this process too.
        let now = unsafe {
            if to {
                vm_writev(pid, &[src], &[dst])
            } else {
                vm_readv(pid, &[dst], &[src])
            }
        };
        match now {
            Ok(now @ 1..) => done += now,
            _ => break,
        }
    }
    done
}

/// Whether this system has the calls that implicit regions need: making pages present without a signal, and copies by the kernel.
pub(crate) fn is_careful() -> bool {
    let (from, mut to) = (7_u8, 0_u8);
    let there = !cfg!(miri) && populate((&raw mut to).addr(), 1, true).is_ok();
    // SAFETY: two bytes of our own.
    there && unsafe { by_kernel(&raw mut to, &raw const from, 1, false) } == 1
}

#[cfg(test)]
mod tests {
    use super::relay;

    /// Every length up to where the C library takes over, and all ways to overlap.
    #[test]
    fn short_ranges_move_like_memmove() {
        const ROOM: usize = 160;
        let lens = if cfg!(miri) { 0..20 } else { 0..70 };
        for len in lens {
            for (from, to) in [
                (0, 80),
                (80, 0),
                (40, 40 + len / 2),
                (40 + len / 2, 40),
                (40, 41),
                (41, 40),
            ] {
                let mut bytes: Vec<u8> = (0..ROOM as u8).collect();
                let mut want = bytes.clone();
                want.copy_within(from..from + len, to);
                let base = bytes.as_mut_ptr();
                // SAFETY: both ranges are inside the vector, which no other thread uses.
                unsafe { relay(base.add(to), base.add(from), len) };
                assert_eq!(bytes, want, "{len} bytes from {from} to {to}");
            }
        }
    }
}
