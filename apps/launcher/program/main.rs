//! `weft-cc`: hands a compilation to the daemon of `weft cc`, and exits or executes a program as the daemon answers. apps/cc/src/launch.rs has the messages.
//!
//! A make starts this for each source, so it has no parts that start slowly: no C library (whose start queries the processor's features, in a virtual
//! machine 20 exits to the host), no relocations, no heap. The build script compiles it separately.
//!
//! # Safety
//!
//! The kernel puts the arguments and the environment on the stack as the ABI says, and they stay: `main` and what it calls read them through raw
//! pointers, each text up to its NUL. System calls get pointers to locals that outlive them.
#![no_std]
#![no_main]

use core::arch::{asm, global_asm};

#[cfg(target_arch = "x86_64")]
mod call {
    pub const WRITE: usize = 1;
    pub const CLOSE: usize = 3;
    pub const MMAP: usize = 9;
    pub const SOCKET: usize = 41;
    pub const CONNECT: usize = 42;
    pub const RECVFROM: usize = 45;
    pub const SENDMSG: usize = 46;
    pub const GETSOCKOPT: usize = 55;
    pub const EXECVE: usize = 59;
    pub const FCNTL: usize = 72;
    pub const GETCWD: usize = 79;
    pub const UMASK: usize = 95;
    pub const GETEUID: usize = 107;
    pub const EXIT_GROUP: usize = 231;
    pub const READLINKAT: usize = 267;
}
#[cfg(target_arch = "aarch64")]
mod call {
    pub const GETCWD: usize = 17;
    pub const FCNTL: usize = 25;
    pub const CLOSE: usize = 57;
    pub const WRITE: usize = 64;
    pub const READLINKAT: usize = 78;
    pub const EXIT_GROUP: usize = 94;
    pub const UMASK: usize = 166;
    pub const GETEUID: usize = 175;
    pub const SOCKET: usize = 198;
    pub const CONNECT: usize = 203;
    pub const RECVFROM: usize = 207;
    pub const GETSOCKOPT: usize = 209;
    pub const SENDMSG: usize = 211;
    pub const EXECVE: usize = 221;
    pub const MMAP: usize = 222;
}

#[cfg(target_arch = "x86_64")]
global_asm!(".globl _start", "_start:", "mov rdi, rsp", "and rsp, -16", "call {main}", "ud2", main = sym main);
#[cfg(target_arch = "aarch64")]
global_asm!(".globl _start", "_start:", "mov x0, sp", "bl {main}", "brk 1", main = sym main);

/// Makes a system call.
unsafe fn call<const N: usize>(number: usize, given: [usize; N]) -> isize {
    let mut args = [0; 6];
    for (to, from) in args.iter_mut().zip(given) {
        *to = from;
    }
    let [a, b, c, d, e, f] = args;
    let result: isize;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: our caller's promise that the pointers among the arguments are good for this call; the registers are those that the kernel changes.
    unsafe {
        asm!("syscall", inlateout("rax") number as isize => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d, in("r8") e, in("r9") f,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!("svc 0", inlateout("x0") a as isize => result, in("x1") b, in("x2") c, in("x3") d, in("x4") e, in("x5") f, in("x8") number, options(nostack));
    }
    result
}

type Text = *const u8;

fn exit(code: u8) -> ! {
    loop {
        // SAFETY: numbers alone.
        unsafe { call(call::EXIT_GROUP, [code.into()]) };
    }
}

fn fail(what: &[u8]) -> ! {
    // SAFETY: a text of ours.
    unsafe { call(call::WRITE, [2, what.as_ptr() as usize, what.len()]) };
    exit(127)
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    fail(b"weft-cc: it has failed\n")
}

/// Up to the NUL.
unsafe fn bytes<'a>(text: Text) -> &'a [u8] {
    let mut len = 0;
    // SAFETY: our caller's promise: a text that ends with NUL and stays.
    unsafe {
        while *text.add(len) != 0 {
            len += 1;
        }
        core::slice::from_raw_parts(text, len)
    }
}

/// A text that ends with NUL, in its own buffer.
struct Path {
    bytes: [u8; 4200],
    len: usize,
}

impl Path {
    fn new(parts: &[&[u8]]) -> Option<Self> {
        let mut path = Self {
            bytes: [0; 4200],
            len: 0,
        };
        for part in parts {
            let end = path.len + part.len();
            // The last byte stays NUL.
            path.bytes[..4199]
                .get_mut(path.len..end)?
                .copy_from_slice(part);
            path.len = end;
        }
        Some(path)
    }

    fn text(&self) -> Text {
        self.bytes.as_ptr()
    }
}

/// Arguments and environment of the process.
struct Start {
    argc: usize,
    /// `argc` texts and a null, and after it those of the environment and a null.
    argv: *const Text,
}

impl Start {
    unsafe fn arg(&self, n: usize) -> &'static [u8] {
        // SAFETY: only called with n < argc.
        unsafe { bytes(*self.argv.add(n)) }
    }

    fn env(&self) -> *const Text {
        // SAFETY: there is a null after the arguments.
        unsafe { self.argv.add(self.argc + 1) }
    }

    fn env_len(&self) -> usize {
        let mut len = 0;
        // SAFETY: up to the null.
        while unsafe { !(*self.env().add(len)).is_null() } {
            len += 1;
        }
        len
    }

    /// A variable of the environment.
    fn var(&self, name: &[u8]) -> Option<&'static [u8]> {
        // SAFETY: within the environment.
        (0..self.env_len()).find_map(|n| {
            unsafe { bytes(*self.env().add(n)) }
                .strip_prefix(name)?
                .strip_prefix(b"=")
        })
    }

    /// Arguments and environment lie side by side: from where, and how many bytes.
    fn block(&self) -> (usize, usize) {
        let env = self.env_len();
        // SAFETY: the last text of all.
        let (first, last) = unsafe {
            (
                *self.argv,
                if env > 0 {
                    *self.env().add(env - 1)
                } else {
                    *self.argv.add(self.argc - 1)
                },
            )
        };
        // SAFETY: a text of the kernel's.
        let end = last as usize + unsafe { bytes(last) }.len() + 1;
        (first as usize, end.wrapping_sub(first as usize))
    }

    /// Becomes another program: these texts and the arguments from `skip` on; `more` is put into the environment.
    unsafe fn exec(&self, program: Text, before: &[Text], skip: usize, more: Text) {
        let env = self.env_len();
        let count = before.len() + self.argc + env + 3;
        // SAFETY: new private memory that nothing else uses (PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS), for `count` texts.
        unsafe {
            let room = call(
                call::MMAP,
                [0, count * size_of::<Text>(), 3, 0x22, usize::MAX, 0],
            );
            if room < 0 {
                fail(b"weft-cc: no memory\n");
            }
            let (argv, mut at) = (room as *mut Text, 0);
            let mut put = |text| {
                *argv.add(at) = text;
                at += 1;
            };
            before.iter().for_each(|text| put(*text));
            (skip..self.argc).for_each(|n| put(*self.argv.add(n)));
            put(core::ptr::null());
            (0..env).for_each(|n| put(*self.env().add(n)));
            put(more);
            put(core::ptr::null());
            let envp = argv.add(at - env - 2);
            call(
                call::EXECVE,
                [program as usize, argv as usize, envp as usize],
            );
        }
    }
}

fn base(path: &[u8]) -> &[u8] {
    path.rsplit(|&b| b == b'/').next().unwrap_or(path)
}

/// A connection to the daemon of this user.
fn connect(path: &[&[u8]]) -> Option<usize> {
    let path = Path::new(path)?;
    let mut name = [0_u8; 110];
    name[0] = 1; // AF_UNIX; both machines are little-endian.
    name[2..109]
        .get_mut(..path.len)?
        .copy_from_slice(&path.bytes[..path.len]);
    // SAFETY: locals that outlive the calls, with their lengths.
    unsafe {
        // AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC
        let fd = usize::try_from(call(call::SOCKET, [1, 0o2_000_005, 0])).ok()?;
        let mut cred = [0_u32; 3];
        let mut len = 12_u32;
        if call(call::CONNECT, [fd, name.as_ptr() as usize, path.len + 3]) == 0
            // SOL_SOCKET, SO_PEERCRED
            && call(call::GETSOCKOPT, [fd, 1, 17, cred.as_mut_ptr() as usize, (&raw mut len) as usize]) == 0
            && cred[1] as isize == call(call::GETEUID, [])
        {
            return Some(fd);
        }
        call(call::CLOSE, [fd]);
    }
    None
}

fn daemon(start: &Start) -> Option<usize> {
    if let Some(path) = start.var(b"WEFT_CC_SOCKET").filter(|path| !path.is_empty()) {
        return connect(&[path]);
    }
    if let Some(dir) = start.var(b"XDG_RUNTIME_DIR")
        && let Some(fd) = connect(&[dir, b"/weft-cc/socket"])
    {
        return Some(fd);
    }
    let mut digits = [0_u8; 10];
    let mut at = digits.len();
    // SAFETY: numbers alone.
    let mut uid = unsafe { call(call::GETEUID, []) } as u32;
    loop {
        at -= 1;
        digits[at] = b'0' + (uid % 10) as u8;
        uid /= 10;
        if uid == 0 || at == 0 {
            break;
        }
    }
    let dir = start.var(b"TMPDIR").unwrap_or(b"/tmp");
    connect(&[dir, b"/weft-cc-", &digits[at..], b"/socket"])
}

/// Sends the compilation to the daemon. Returns whether the daemon has it.
fn tell(start: &Start, fd: usize) -> bool {
    let mut head = [0_u8; 9];
    let mut cwd = [0_u8; 4096];
    let stderr = 2_i32;
    // SAFETY: locals that outlive the calls, with their lengths; the block is the kernel's.
    unsafe {
        let mask = call(call::UMASK, [0o77]);
        call(call::UMASK, [mask as usize]);
        head[1..5].copy_from_slice(&(mask as u32).to_le_bytes());
        head[5..].copy_from_slice(&(start.argc as u32).to_le_bytes());
        let len = call(call::GETCWD, [cwd.as_mut_ptr() as usize, cwd.len()]);
        if len <= 0 {
            return false;
        }
        let (block, block_len) = start.block();
        let parts = [
            head.as_ptr() as usize,
            head.len(),
            cwd.as_ptr() as usize,
            len as usize,
            block,
            block_len,
        ];
        // A header of 20 bytes, SOL_SOCKET, SCM_RIGHTS, one descriptor.
        let beside = [20_u64, 1 | 1 << 32, stderr as u64];
        let message = [
            0,
            0,
            parts.as_ptr() as usize,
            3,
            beside.as_ptr() as usize,
            24,
            0,
        ];
        // MSG_NOSIGNAL
        call(call::SENDMSG, [fd, message.as_ptr() as usize, 0x4000])
            == (head.len() + block_len) as isize + len
    }
}

/// Executes `weft cc`, which starts a daemon or reports the error: the one in this program's folder, or the first in `PATH`.
unsafe fn become_weft(start: &Start, skip: usize, name: Text) -> ! {
    let before = [b"weft\0".as_ptr(), b"cc\0".as_ptr(), name];
    let mut own = [0_u8; 4096];
    // SAFETY: as at `main`; locals that outlive the calls.
    unsafe {
        let len = call(
            call::READLINKAT,
            [
                usize::MAX - 99,
                b"/proc/self/exe\0".as_ptr() as usize,
                own.as_mut_ptr() as usize,
                own.len(),
            ],
        );
        let own = own.get(..usize::try_from(len).unwrap_or(0)).unwrap_or(&[]);
        // So that `weft cc` does not mistake this program for the compiler.
        let Some(this) = Path::new(&[b"WEFT_CC_LAUNCHER=", own]) else {
            fail(b"weft-cc: its name is too long\n")
        };
        let dir = &own[..own.len() - base(own).len()];
        if let Some(path) = Path::new(&[dir, b"weft"]) {
            start.exec(path.text(), &before, skip, this.text());
        }
        for dir in start
            .var(b"PATH")
            .unwrap_or(b"/usr/local/bin:/usr/bin")
            .split(|&b| b == b':')
        {
            if let Some(path) = Path::new(&[dir, b"/weft"]) {
                start.exec(path.text(), &before, skip, this.text());
            }
        }
    }
    fail(b"weft-cc: there is no `weft` beside it or in PATH\n")
}

/// `stack`: the number of arguments, and the texts after it.
unsafe extern "C" fn main(stack: *const usize) -> ! {
    // SAFETY: what the kernel hands a new program.
    let start = unsafe {
        Start {
            argc: *stack,
            argv: stack.add(1).cast(),
        }
    };
    if start.argc == 0 {
        fail(b"weft-cc: it has no name\n");
    }
    // SAFETY: there is this argument, and below those that `skip` leaves.
    unsafe {
        // Under its own name, the compiler's comes next.
        let skip = usize::from(base(start.arg(0)) == b"weft-cc");
        if start.argc == skip {
            fail(b"weft-cc: no compiler is named\n  try: weft-cc gcc -c FILE.c\n");
        }
        let mut answer = [0_u8; 4200];
        if let Some(fd) = daemon(&start)
            && tell(&start, fd)
            // One byte stays, so that a path ends with NUL.
            && call(call::RECVFROM, [fd, answer.as_mut_ptr() as usize, answer.len() - 1, 0, 0, 0]) > 1
        {
            let program = answer[1..].as_ptr();
            match answer[0] {
                0 => exit(answer[1]),
                held @ 1..=2 => {
                    // Its place among the compilers here ends with the process: F_SETFD, without FD_CLOEXEC.
                    if held == 2 {
                        call(call::FCNTL, [fd, 2, 0]);
                    }
                    start.exec(
                        program,
                        &[program],
                        skip + 1,
                        b"WEFT_CC_ACTIVE=1\0".as_ptr(),
                    );
                    fail(b"weft-cc: the compiler cannot be started\n");
                }
                _ => {}
            }
        }
        let mut name = *start.argv.add(skip);
        if skip == 0 {
            // A link, which may be named with its directory.
            name = base(start.arg(0)).as_ptr();
        }
        become_weft(&start, skip + 1, name)
    }
}

/// The memory functions that compilers expect. A loop in Rust would be compiled to a call of itself.
#[cfg(target_arch = "x86_64")]
mod memory {
    use core::arch::asm;

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
        // SAFETY: the contract of memcpy.
        unsafe {
            asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags))
        };
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8 {
        // SAFETY: the contract of memset.
        unsafe {
            asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") byte as u8, options(nostack, preserves_flags))
        };
        to
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod memory {
    #[unsafe(no_mangle)]
    unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
        for n in 0..len {
            // SAFETY: the contract of memcpy.
            unsafe { to.add(n).write_volatile(from.add(n).read_volatile()) };
        }
        to
    }

    #[unsafe(no_mangle)]
    unsafe extern "C" fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8 {
        for n in 0..len {
            // SAFETY: the contract of memset.
            unsafe { to.add(n).write_volatile(byte as u8) };
        }
        to
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    for n in 0..len {
        // SAFETY: the contract of bcmp.
        if unsafe { a.add(n).read_volatile() != b.add(n).read_volatile() } {
            return 1;
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn strlen(text: Text) -> usize {
    let mut len = 0;
    // SAFETY: the contract of strlen.
    while unsafe { text.add(len).read_volatile() } != 0 {
        len += 1;
    }
    len
}
