//! `execl`, its variants and `dprintf` are variadic: each function here does its preparation and then jumps to the function behind it.
//!
//! # Safety
//!
//! As `execl(3)` and `dprintf(3)`. Each function keeps all registers that hold arguments, and leaves the stack as it was.

use libc::{c_int, c_void};

use crate::io::writes_by_stdio;
use crate::process::before_exec_for_good;

macro_rules! variadic {
    ($($name:ident, $prepare:ident, $before:expr, $text:literal;)*) => {$(
        extern "C" fn $prepare(first: c_int) -> *mut c_void {
            $before(first);
            weft_sys::next::find($text)
        }

        #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
        /// # Safety
        /// As the manual page says.
        // SAFETY: this library is there to have this name.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        #[allow(unreachable_pub, reason = "for the loader")]
        pub unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "call {prepare}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                prepare = sym $prepare,
            )
        }

        #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
        /// # Safety
        /// As the manual page says.
        // SAFETY: this library is there to have this name.
        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        #[allow(unreachable_pub, reason = "for the loader")]
        pub unsafe extern "C" fn $name() {
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-80]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "bl {prepare}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]", "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                "ldp x29, x30, [sp], #80",
                "br x16",
                prepare = sym $prepare,
            )
        }
    )*};
}

variadic! {
    execl, prepare_execl, |_| before_exec_for_good(), c"execl";
    execlp, prepare_execlp, |_| before_exec_for_good(), c"execlp";
    execle, prepare_execle, |_| before_exec_for_good(), c"execle";
    dprintf, prepare_dprintf, writes_by_stdio, c"dprintf";
    __dprintf_chk, prepare_dprintf_chk, writes_by_stdio, c"__dprintf_chk";
}
