//! Copies that a fault ends: one side may be unmapped, without the right, or behind the end of its file, and another thread may change that meanwhile.
//!
//! The handler of `SIGSEGV` and `SIGBUS` is its owner's: it goes on where [`resume`] says. Without such a handler, and on other processors than
//! x86-64, a fault is one as everywhere.
//!
//! The bytes are moved by machine code, so other threads and processes may write to either side: see `docs/adr/0001-racing-copies.md`.
//!
//! # Safety
//!
//! The code below has no stack and changes no register that a function has to keep. So it can be left at any instruction.

/// Copies `n` bytes. Returns 0 if a fault has ended that, after some of them perhaps, and `n` otherwise.
///
/// # Safety
/// All of `dst..dst + n` that is mapped and writable may be written. The two ranges do not overlap.
#[inline]
pub unsafe fn copy(dst: *mut u8, src: *const u8, n: usize) -> usize {
    // SAFETY: the caller's promise.
    if unsafe { imp::copy(dst, src, n) } {
        n
    } else {
        0
    }
}

/// Returns true if a value could be read at the address now.
#[inline]
pub fn is_readable<T>(address: *const T) -> bool {
    let size = size_of::<T>().max(1);
    let mut byte = 0_u8;
    // SAFETY: a byte of ours. The first and the last byte are on all pages of a small value.
    [0, size - 1]
        .into_iter()
        .all(|at| unsafe { imp::copy(&raw mut byte, address.cast::<u8>().wrapping_add(at), 1) })
}

/// Where a thread goes on that has faulted at the instruction of this address: `None` if it is none of these copies.
#[inline]
pub fn resume(instruction: usize) -> Option<usize> {
    imp::resume(instruction)
}

/// Whether faults of these copies can be told from others.
pub const IS_CHECKED: bool = cfg!(all(target_arch = "x86_64", not(miri)));

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use std::sync::atomic::AtomicU8;
    use std::sync::atomic::Ordering::Relaxed;

    // `weft_copy(rdi: to, rsi: from, rdx: bytes)`, and `weft_copy_wide` for more than 128 bytes and processors with registers of 32 bytes. Both return
    // 0. Their instructions that access memory lie before `weft_copy_fault`. Up to 128 bytes, and the ends of more, are moved in pieces that may overlap.
    std::arch::global_asm!(
        ".pushsection .text.weft_copy, \"ax\", @progbits",
        ".globl weft_copy, weft_copy_wide, weft_copy_fault",
        ".hidden weft_copy, weft_copy_wide, weft_copy_fault",
        ".type weft_copy, @function",
        ".type weft_copy_wide, @function",
        ".type weft_copy_fault, @function",
        ".p2align 5",
        "weft_copy:",
        ".cfi_startproc",
        "cmp rdx, 32",
        "ja 25f",
        "cmp edx, 16",
        "jae 24f",
        "cmp edx, 8",
        "jae 23f",
        "cmp edx, 4",
        "jae 22f",
        "test edx, edx",
        "jz 29f",
        "mov ecx, edx",
        "shr ecx",
        "movzx eax, byte ptr [rsi]",
        "movzx r8d, byte ptr [rsi + rcx]",
        "movzx r9d, byte ptr [rsi + rdx - 1]",
        "mov [rdi], al",
        "mov [rdi + rcx], r8b",
        "mov [rdi + rdx - 1], r9b",
        "29:",
        "xor eax, eax",
        "ret",
        "22:",
        "mov eax, [rsi]",
        "mov ecx, [rsi + rdx - 4]",
        "mov [rdi], eax",
        "mov [rdi + rdx - 4], ecx",
        "xor eax, eax",
        "ret",
        "23:",
        "mov rax, [rsi]",
        "mov rcx, [rsi + rdx - 8]",
        "mov [rdi], rax",
        "mov [rdi + rdx - 8], rcx",
        "xor eax, eax",
        "ret",
        "24:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + rdx - 16]",
        "movups [rdi], xmm0",
        "movups [rdi + rdx - 16], xmm1",
        "xor eax, eax",
        "ret",
        "25:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + rdx - 32]",
        "movups xmm3, [rsi + rdx - 16]",
        "cmp rdx, 64",
        "ja 26f",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "xor eax, eax",
        "ret",
        "26:",
        "movups xmm4, [rsi + rdx - 64]",
        "movups xmm5, [rsi + rdx - 48]",
        "cmp rdx, 128",
        "ja 27f",
        "movups xmm6, [rsi + 32]",
        "movups xmm7, [rsi + 48]",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + 32], xmm6",
        "movups [rdi + 48], xmm7",
        "28:",
        "movups [rdi + rdx - 64], xmm4",
        "movups [rdi + rdx - 48], xmm5",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "xor eax, eax",
        "ret",
        // More: 64 bytes at a time, and the last 64.
        "27:",
        "lea rcx, [rdx - 1]",
        "and rcx, -64",
        "add rsi, rcx",
        "lea r8, [rdi + rcx]",
        "neg rcx",
        "30:",
        "movups xmm0, [rsi + rcx]",
        "movups xmm1, [rsi + rcx + 16]",
        "movups xmm6, [rsi + rcx + 32]",
        "movups xmm7, [rsi + rcx + 48]",
        "movups [r8 + rcx], xmm0",
        "movups [r8 + rcx + 16], xmm1",
        "movups [r8 + rcx + 32], xmm6",
        "movups [r8 + rcx + 48], xmm7",
        "add rcx, 64",
        "jnz 30b",
        "jmp 28b",
        ".cfi_endproc",
        ".size weft_copy, . - weft_copy",
        ".p2align 5",
        "weft_copy_wide:",
        ".cfi_startproc",
        "lea r8, [rdi + rdx]",
        "vmovdqu ymm0, [rsi]",
        "vmovdqu ymm4, [rsi + rdx - 128]",
        "vmovdqu ymm5, [rsi + rdx - 96]",
        "vmovdqu ymm6, [rsi + rdx - 64]",
        "vmovdqu ymm7, [rsi + rdx - 32]",
        "vmovdqu [rdi], ymm0",
        // Stores that cross cache lines are slower.
        "mov eax, edi",
        "neg eax",
        "and eax, 31",
        "add rsi, rax",
        "add rdi, rax",
        "sub rdx, rax",
        "jmp 32f",
        ".p2align 5",
        "31:",
        "vmovdqu ymm0, [rsi]",
        "vmovdqu ymm1, [rsi + 32]",
        "vmovdqu ymm2, [rsi + 64]",
        "vmovdqu ymm3, [rsi + 96]",
        "vmovdqa [rdi], ymm0",
        "vmovdqa [rdi + 32], ymm1",
        "vmovdqa [rdi + 64], ymm2",
        "vmovdqa [rdi + 96], ymm3",
        "sub rsi, -128",
        "sub rdi, -128",
        "sub rdx, 128",
        "32:",
        "cmp rdx, 128",
        "ja 31b",
        "vmovdqu [r8 - 128], ymm4",
        "vmovdqu [r8 - 96], ymm5",
        "vmovdqu [r8 - 64], ymm6",
        "vmovdqu [r8 - 32], ymm7",
        "vzeroupper",
        "xor eax, eax",
        "ret",
        // A fault above goes on here.
        "weft_copy_fault:",
        "mov eax, 1",
        "ret",
        ".cfi_endproc",
        ".size weft_copy_wide, . - weft_copy_wide",
        ".popsection",
    );

    unsafe extern "C" {
        fn weft_copy(to: *mut u8, from: *const u8, n: usize) -> i32;
        fn weft_copy_wide(to: *mut u8, from: *const u8, n: usize) -> i32;
        fn weft_copy_fault();
    }

    /// Whether the processor has registers of 32 bytes: not known yet, no, yes.
    static WIDE: AtomicU8 = AtomicU8::new(0);

    #[cold]
    fn learn() -> u8 {
        let wide = 1 + u8::from(std::arch::is_x86_feature_detected!("avx"));
        WIDE.store(wide, Relaxed);
        wide
    }

    #[inline]
    pub(super) unsafe fn copy(to: *mut u8, from: *const u8, n: usize) -> bool {
        let is_wide = n > 128
            && match WIDE.load(Relaxed) {
                0 => learn() == 2,
                wide => wide == 2,
            };
        // SAFETY: the caller's promise. The wide one gets more than 128 bytes, and a processor that has it.
        let failed = unsafe {
            if is_wide {
                weft_copy_wide(to, from, n)
            } else {
                weft_copy(to, from, n)
            }
        };
        failed == 0
    }

    #[inline]
    pub(super) fn resume(instruction: usize) -> Option<usize> {
        let (begin, end) = (
            weft_copy as *const () as usize,
            weft_copy_fault as *const () as usize,
        );
        (begin..end).contains(&instruction).then_some(end)
    }
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod imp {
    pub(super) unsafe fn copy(to: *mut u8, from: *const u8, n: usize) -> bool {
        // SAFETY: the caller's promise.
        unsafe { crate::copy::relay(to, from, n) };
        true
    }

    pub(super) fn resume(_: usize) -> Option<usize> {
        None
    }
}
