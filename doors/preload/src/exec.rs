//! Calls that start a program, and `dprintf`.
//!
//! `execl`, its variants and `dprintf` are variadic. The words of an `execl` become a list; `dprintf` jumps to the function behind it, with all
//! registers that hold arguments and the stack as they were.
//!
//! # Safety
//!
//! As each call's manual page says.

use libc::{c_char, c_int, c_void, pid_t};
use std::path::Path;

use crate::child_env::{self, ChildEnv, Program};
use crate::hidden::LIMIT;
use crate::io::writes_by_stdio;
use crate::process::{before_exec, before_spawn};
use crate::{next, spawn};

weft_sys::interpose! {
    "C-unwind"

    fn execve(path: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        let _exec = before_exec();
        next::execve(path, argv, ChildEnv::of(Program::At(path), Path::new(""), envp).list())
    }

    fn execv(path: *const c_char, argv: *const *const c_char) -> c_int {
        execve(path, argv, child_env::own())
    }

    fn execvpe(file: *const c_char, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        let _exec = before_exec();
        next::execvpe(file, argv, ChildEnv::of(Program::Named(file), Path::new(""), envp).list())
    }

    fn execvp(file: *const c_char, argv: *const *const c_char) -> c_int {
        execvpe(file, argv, child_env::own())
    }

    fn fexecve(file: c_int, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        let _exec = before_exec();
        let program = Program::Below(file, c"".as_ptr(), libc::AT_EMPTY_PATH);
        next::fexecve(file, argv, ChildEnv::of(program, Path::new(""), envp).list())
    }

    fn execveat(dir: c_int, path: *const c_char, argv: *const *const c_char, envp: *const *const c_char, flags: c_int) -> c_int {
        let _exec = before_exec();
        next::execveat(dir, path, argv, ChildEnv::of(Program::Below(dir, path, flags), Path::new(""), envp).list(), flags)
    }

    fn posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        before_spawn();
        let env = ChildEnv::of(Program::At(path), &spawn::folder(actions), envp);
        let _own_limit = LIMIT.lock_once();
        next::posix_spawn(pid, path, actions, attr, argv, env.list())
    }

    fn posix_spawnp(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attr: *const c_void, argv: *const *const c_char, envp: *const *const c_char) -> c_int {
        before_spawn();
        let env = ChildEnv::of(Program::Named(path), &spawn::folder(actions), envp);
        let _own_limit = LIMIT.lock_once();
        next::posix_spawnp(pid, path, actions, attr, argv, env.list())
    }
}

/// Of the words of a variadic call: how many are in registers, and how many words are between those, saved on the stack, and the rest.
const IN_REGISTERS: usize = if cfg!(target_arch = "x86_64") { 6 } else { 8 };
const GAP: usize = if cfg!(target_arch = "x86_64") { 2 } else { 0 };

/// The words of a variadic call: its registers, saved on the stack below the rest.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Words(*const *const c_char);

impl Words {
    unsafe fn get(self, at: usize) -> *const c_char {
        let gap = if at < IN_REGISTERS { 0 } else { GAP };
        // SAFETY: the caller's promise.
        unsafe { self.0.add(at + gap).read() }
    }

    /// The list of arguments, with the null at its end.
    ///
    /// # Safety
    /// As `execl(3)`.
    unsafe fn arguments(self) -> Vec<*const c_char> {
        let mut list = Vec::new();
        for at in 1.. {
            // SAFETY: there is a null in the caller's words, and this is not behind it.
            let word = unsafe { self.get(at) };
            list.push(word);
            if word.is_null() {
                break;
            }
        }
        list
    }
}

extern "C-unwind" fn by_execl(words: Words) -> c_int {
    // SAFETY: the words of an `execl`.
    unsafe { execv(words.get(0), words.arguments().as_ptr()) }
}

extern "C-unwind" fn by_execlp(words: Words) -> c_int {
    // SAFETY: the words of an `execlp`.
    unsafe { execvp(words.get(0), words.arguments().as_ptr()) }
}

extern "C-unwind" fn by_execle(words: Words) -> c_int {
    // SAFETY: the words of an `execle`: behind the null is the environment.
    unsafe {
        let list = words.arguments();
        let envp = words.get(list.len() + 1).cast();
        execve(words.get(0), list.as_ptr(), envp)
    }
}

/// A function of the C library with arguments of any number: `called` gets those of registers.
macro_rules! naked {
    ($name:ident, $called:ident, x86_64: [$($x86_64:literal,)*], aarch64: [$($aarch64:literal,)*]) => {
        #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
        /// # Safety
        /// As the manual page says.
        // SAFETY: this library is there to have this name.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        #[allow(unreachable_pub, reason = "for the loader")]
        pub unsafe extern "C" fn $name() {
            std::arch::naked_asm!($($x86_64,)* called = sym $called)
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
            std::arch::naked_asm!($($aarch64,)* called = sym $called)
        }
    };
}

macro_rules! by_list {
    ($($name:ident, $run:ident;)*) => {$(
        naked! { $name, $run,
            x86_64: [
                "sub rsp, 8",
                "push r9", "push r8", "push rcx", "push rdx", "push rsi", "push rdi",
                "mov rdi, rsp",
                "call {called}",
                "add rsp, 56",
                "ret",
            ],
            aarch64: [
                "stp x29, x30, [sp, #-80]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "add x0, sp, #16",
                "bl {called}",
                "ldp x29, x30, [sp], #80",
                "ret",
            ]
        }
    )*};
}

by_list! {
    execl, by_execl;
    execlp, by_execlp;
    execle, by_execle;
}

macro_rules! dprintfs {
    ($($name:ident, $prepare:ident, $text:literal;)*) => {$(
        extern "C" fn $prepare(first: c_int) -> *mut c_void {
            writes_by_stdio(first);
            weft_sys::next::find($text)
        }

        naked! { $name, $prepare,
            x86_64: [
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "call {called}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
            ],
            aarch64: [
                "stp x29, x30, [sp, #-80]!",
                "stp x0, x1, [sp, #16]", "stp x2, x3, [sp, #32]", "stp x4, x5, [sp, #48]", "stp x6, x7, [sp, #64]",
                "bl {called}",
                "mov x16, x0",
                "ldp x0, x1, [sp, #16]", "ldp x2, x3, [sp, #32]", "ldp x4, x5, [sp, #48]", "ldp x6, x7, [sp, #64]",
                "ldp x29, x30, [sp], #80",
                "br x16",
            ]
        }
    )*};
}

dprintfs! {
    dprintf, prepare_dprintf, c"dprintf";
    __dprintf_chk, prepare_dprintf_chk, c"__dprintf_chk";
}
