//! Copies between registered (shared) memory, which others may change during the copy, and private memory.
//!
//! # Safety
//!
//! A plain `memcpy` in Rust assumes that no other thread writes its source: with a racing writer it is undefined behaviour, whatever the
//! bytes are used for. Here the bytes are moved by machine code that the compiler cannot analyse: an `asm!` block that calls the C
//! library's `memmove`, or that stores each byte of registered memory once. A read that races with a write then returns *some* bytes, as for the kernel or a DMA engine. Elsewhere (miri, other
//! processors) relaxed byte atomics do the same, slowly. See `docs/adr/0001-racing-copies.md`. The kernel copies memory of implicit
//! regions, which may be unmapped at any moment (`docs/adr/0069-implicit-regions.md`).

use weft_sys::map::populate;
use weft_sys::process::{vm_readv, vm_writev};

#[cfg(all(not(miri), any(target_arch = "x86_64", target_arch = "aarch64")))]
mod imp {
    use std::arch::asm;
    #[cfg(target_arch = "x86_64")]
    use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

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

    /// Whether the processor has registers of 32 bytes: not known yet, no, yes.
    #[cfg(target_arch = "x86_64")]
    static WIDE: AtomicU8 = AtomicU8::new(0);

    /// [`store_once`] of 128 bytes and more: blocks of 128 bytes, then pieces.
    ///
    /// # Safety
    /// As there.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    unsafe fn blocks(mut dst: *mut u8, mut src: *const u8, mut n: usize) {
        if n >= 512 && !dst.addr().is_multiple_of(32) {
            // Stores that cross cache lines are slower.
            let head = dst.addr().wrapping_neg() % 32;
            // SAFETY: the caller's promise; `head` is less than `n`.
            unsafe {
                pieces(dst, src, head);
                (dst, src, n) = (dst.add(head), src.add(head), n - head);
            }
        }
        // SAFETY: each round touches the next 128 bytes of the ranges, and there are `n / 128` rounds, one at least. The block with wide
        // registers runs on processors that have them.
        unsafe {
            match WIDE.load(Relaxed) {
                0 => return know_and_go_on(dst, src, n),
                1 => {
                    for at in (0..n & !127).step_by(64) {
                        pieces(dst.add(at), src.add(at), 64);
                    }
                    (dst, src) = (dst.add(n & !127), src.add(n & !127));
                }
                _ => asm!(
                    "2:",
                    "vmovdqu ymm0, [{s}]",
                    "vmovdqu ymm1, [{s} + 32]",
                    "vmovdqu ymm2, [{s} + 64]",
                    "vmovdqu ymm3, [{s} + 96]",
                    "vmovdqu [{d}], ymm0",
                    "vmovdqu [{d} + 32], ymm1",
                    "vmovdqu [{d} + 64], ymm2",
                    "vmovdqu [{d} + 96], ymm3",
                    "sub {s}, -128",
                    "sub {d}, -128",
                    "add {left}, -128",
                    "jnz 2b",
                    "vzeroupper",
                    s = inout(reg) src, d = inout(reg) dst, left = inout(reg) n & !127 => _,
                    out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _,
                    options(nostack),
                ),
            }
            if !n.is_multiple_of(128) {
                pieces(dst, src, n % 128);
            }
        }
    }

    /// # Safety
    /// As [`blocks`].
    #[cfg(target_arch = "x86_64")]
    #[cold]
    #[inline(never)]
    unsafe fn know_and_go_on(dst: *mut u8, src: *const u8, n: usize) {
        let wide = std::arch::is_x86_feature_detected!("avx");
        WIDE.store(1 + u8::from(wide), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { blocks(dst, src, n) }
    }

    /// [`store_once`] of less than 128 bytes: a piece for each bit of the length.
    ///
    /// # Safety
    /// As there.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    unsafe fn pieces(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: the pieces lie one behind the other, and are `n` bytes together.
        unsafe {
            asm!(
                "test {n:e}, 0x70",
                "jz 5f",
                "test {n:e}, 64",
                "jz 2f",
                "movups {a}, [{s}]",
                "movups {b}, [{s} + 16]",
                "movups {c}, [{s} + 32]",
                "movups {e}, [{s} + 48]",
                "movups [{d}], {a}",
                "movups [{d} + 16], {b}",
                "movups [{d} + 32], {c}",
                "movups [{d} + 48], {e}",
                "test {n:e}, 63",
                "jz 9f",
                "add {s}, 64",
                "add {d}, 64",
                "2:",
                "test {n:e}, 32",
                "jz 3f",
                "movups {a}, [{s}]",
                "movups {b}, [{s} + 16]",
                "movups [{d}], {a}",
                "movups [{d} + 16], {b}",
                "add {s}, 32",
                "add {d}, 32",
                "3:",
                "test {n:e}, 16",
                "jz 4f",
                "movups {a}, [{s}]",
                "movups [{d}], {a}",
                "add {s}, 16",
                "add {d}, 16",
                "4:",
                "test {n:e}, 15",
                "jz 9f",
                "5:",
                "test {n:e}, 8",
                "jz 6f",
                "mov {t}, [{s}]",
                "mov [{d}], {t}",
                "test {n:e}, 7",
                "jz 9f",
                "add {s}, 8",
                "add {d}, 8",
                "6:",
                "test {n:e}, 4",
                "jz 7f",
                "mov {t:e}, [{s}]",
                "mov [{d}], {t:e}",
                "add {s}, 4",
                "add {d}, 4",
                "7:",
                "test {n:e}, 2",
                "jz 8f",
                "movzx {t:e}, word ptr [{s}]",
                "mov [{d}], {t:x}",
                "add {s}, 2",
                "add {d}, 2",
                "8:",
                "test {n:e}, 1",
                "jz 9f",
                "movzx {t:e}, byte ptr [{s}]",
                "mov [{d}], {t:l}",
                "9:",
                s = inout(reg) src => _, d = inout(reg) dst => _, n = in(reg) n, t = out(reg) _,
                a = out(xmm_reg) _, b = out(xmm_reg) _, c = out(xmm_reg) _, e = out(xmm_reg) _,
                options(nostack),
            );
        }
    }

    /// Moves bytes upwards and stores each of them once. A program that waits for a word of its memory, takes it and clears it would see the
    /// word again if it were stored twice, as `memmove` does with bytes at both ends of a range.
    ///
    /// # Safety
    /// As [`opaque_move`], and `dst` must not begin inside the source.
    #[cfg(target_arch = "x86_64")]
    #[inline]
    unsafe fn store_once(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            if n < 128 {
                pieces(dst, src, n);
            } else {
                blocks(dst, src, n);
            }
        }
    }

    #[inline]
    pub(super) unsafe fn store(dst: *mut u8, src: *const u8, n: usize) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's promise; private memory is no registered memory.
        unsafe {
            store_once(dst, src, n);
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: the caller's promise.
        unsafe {
            opaque_move(dst, src, n);
        }
    }

    #[inline]
    pub(super) unsafe fn load(dst: *mut u8, src: *const u8, n: usize) {
        // SAFETY: the caller's promise.
        unsafe { opaque_move(dst, src, n) }
    }

    #[inline]
    pub(super) unsafe fn relay(dst: *mut u8, src: *const u8, n: usize) {
        #[cfg(target_arch = "x86_64")]
        if dst.addr().wrapping_sub(src.addr()) >= n {
            // SAFETY: the caller's promise.
            return unsafe { store_once(dst, src, n) };
        }
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
                moved_like_memmove::<ROOM>(from, to, len);
            }
        }
    }

    /// Lengths of blocks with all kinds of rests, at targets of different alignment.
    #[test]
    #[cfg_attr(miri, ignore = "bytes move one by one there")]
    fn long_ranges_move_like_memmove() {
        for len in (60..700).chain([1023, 1024, 1025, 1535]) {
            for (from, to) in [
                (0, 1600),
                (1603, 7),
                (33, 32),
                (200, 31),
                (32, 33),
                (31, 200),
            ] {
                moved_like_memmove::<3200>(from, to, len);
            }
        }
    }

    fn moved_like_memmove<const ROOM: usize>(from: usize, to: usize, len: usize) {
        let mut bytes: Vec<u8> = (0..ROOM).map(|i| (i % 251) as u8).collect();
        let mut want = bytes.clone();
        want.copy_within(from..from + len, to);
        let base = bytes.as_mut_ptr();
        // SAFETY: both ranges are inside the vector, which no other thread uses.
        unsafe { relay(base.add(to), base.add(from), len) };
        assert_eq!(bytes, want, "{len} bytes from {from} to {to}");
    }

    /// Counts the stores into memory: the processor stops after each instruction, and what has changed is counted and set back.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    mod stores {
        use std::arch::asm;
        use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering::SeqCst};

        use super::super::{CopyFn, relay, store};

        const ROOM: usize = 1200;
        static MEMORY: AtomicPtr<u8> = AtomicPtr::new(std::ptr::null_mut());
        static INSTRUCTIONS: AtomicUsize = AtomicUsize::new(0);
        static STORES: [AtomicU8; ROOM] = [const { AtomicU8::new(0) }; ROOM];

        extern "C" fn after_an_instruction(_: libc::c_int) {
            INSTRUCTIONS.fetch_add(1, SeqCst);
            let memory = MEMORY.load(SeqCst);
            for (i, stores) in STORES.iter().enumerate() {
                // SAFETY: the test's memory, of as many bytes, which only its thread uses, and that thread is here.
                unsafe {
                    if memory.add(i).read_volatile() != 0 {
                        memory.add(i).write_volatile(0);
                        stores.fetch_add(1, SeqCst);
                    }
                }
            }
        }

        fn stores_of(copy: CopyFn, at: usize, len: usize) -> Vec<u8> {
            let from = [1_u8; ROOM];
            let to = MEMORY.load(SeqCst).wrapping_add(at);
            for stores in &STORES {
                stores.store(0, SeqCst);
            }
            // SAFETY: the trap flag has a handler; both ranges are mapped for `len` bytes.
            unsafe {
                asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq");
                copy(to, from.as_ptr(), len);
                asm!("pushfq", "and qword ptr [rsp], -0x101", "popfq");
            }
            STORES.iter().map(|stores| stores.load(SeqCst)).collect()
        }

        #[test]
        fn each_byte_is_stored_once() {
            let mut memory = vec![0_u64; ROOM / 8];
            MEMORY.store(memory.as_mut_ptr().cast(), SeqCst);
            let handler = after_an_instruction as extern "C" fn(libc::c_int);
            // SAFETY: the handler touches atomics and the memory above only.
            unsafe { libc::signal(libc::SIGTRAP, handler as libc::sighandler_t) };
            let copies: [(&str, CopyFn); 2] = [("store", store), ("relay", relay)];
            for (name, copy) in copies {
                for len in (1..=200).chain([255, 256, 511, 512, 513, 600, 1000, 1024]) {
                    for at in [0, 8, 13] {
                        let stores = stores_of(copy, at, len);
                        let wrong =
                            (0..ROOM).find(|i| stores[*i] != u8::from((at..at + len).contains(i)));
                        assert_eq!(
                            wrong.map(|i| (i - at, stores[i])),
                            None,
                            "{name}: {len} bytes at {at}: byte, stores of it"
                        );
                    }
                }
            }
            assert!(INSTRUCTIONS.load(SeqCst) > 1000, "the processor stopped");
        }
    }
}
