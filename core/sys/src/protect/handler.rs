//! The handler of `SIGSEGV`.
//!
//! # Safety
//!
//! The handler is async-signal-safe: it reads static atomics and makes system calls. It passes the kernel's arguments on to the program's
//! handler.

use super::{FAULTS, FREE, HOLDS, PHASE, Refused, Zone, in_use, is_here};
use std::mem::{MaybeUninit, zeroed};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

type Sigaction =
    unsafe extern "C" fn(libc::c_int, *const libc::sigaction, *mut libc::sigaction) -> libc::c_int;

/// Ours is installed.
static INSTALLED: AtomicBool = AtomicBool::new(false);
/// The program's action; leaked, because a handler may be reading it. Null: the default action.
static PROGRAM: AtomicPtr<libc::sigaction> = AtomicPtr::new(null_mut());
/// The function that installs actions, where it is not `sigaction`.
static CHANGE: AtomicUsize = AtomicUsize::new(0);

/// Install actions by this function from now on: for a library that replaces `sigaction` itself, and hands the C library's here.
pub fn use_sigaction(function: Sigaction) {
    CHANGE.store(function as usize, Ordering::SeqCst);
}

fn change() -> Sigaction {
    match CHANGE.load(Ordering::SeqCst) {
        0 => libc::sigaction,
        // SAFETY: stored by `use_sigaction`, from a function of this type.
        given => unsafe { std::mem::transmute::<usize, Sigaction>(given) },
    }
}

/// The handler's address, by which an interposed `sigaction` knows it.
pub fn handler_address() -> usize {
    on_segv as *const () as usize
}

/// Put the program's action of `SIGSEGV` in the place of the one that faults go to which are not ours, and return that one: for an interposed
/// `sigaction`. `None` returns it only. Until ours is installed there is none: false says so, and nothing has changed.
pub fn swap_program_action(new: Option<&libc::sigaction>, old: &mut libc::sigaction) -> bool {
    if !INSTALLED.load(Ordering::SeqCst) {
        return false;
    }
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: null, or leaked before it was stored.
    *old = match unsafe { PROGRAM.load(Ordering::SeqCst).as_ref() } {
        Some(action) => *action,
        // SAFETY: plain data, and zeros are the default action.
        None => unsafe { zeroed() },
    };
    if let Some(new) = new {
        PROGRAM.store(Box::into_raw(Box::new(*new)), Ordering::SeqCst);
    }
    true
}

/// Install it, once. After that, say whether it is still there.
pub(super) fn install() -> Result<(), Refused> {
    let change = change();
    // SAFETY: plain data.
    let mut now: libc::sigaction = unsafe { zeroed() };
    if INSTALLED.load(Ordering::SeqCst) {
        // SAFETY: asks, and changes nothing.
        let asked = unsafe { change(libc::SIGSEGV, null(), &raw mut now) };
        return if asked == 0 && now.sa_sigaction == handler_address() {
            Ok(())
        } else {
            Err(Refused::Handler)
        };
    }
    // SAFETY: the action is complete; the handler is async-signal-safe. What was there before is kept before ours can run: asked for first.
    unsafe {
        if change(libc::SIGSEGV, null(), &raw mut now) != 0 {
            return Err(Refused::System);
        }
        PROGRAM.store(Box::into_raw(Box::new(now)), Ordering::SeqCst);
        let mut ours: libc::sigaction = zeroed();
        ours.sa_sigaction = handler_address();
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigfillset(&raw mut ours.sa_mask);
        if change(libc::SIGSEGV, &raw const ours, null_mut()) != 0 {
            return Err(Refused::System);
        }
    }
    INSTALLED.store(true, Ordering::SeqCst);
    Ok(())
}

unsafe extern "C" fn on_segv(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the thread's own.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: what the kernel gave us.
    if !unsafe { is_ours(info, context) } {
        // SAFETY: as above.
        unsafe { pass_on(signal, info, context) };
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

/// Whether the fault was one of ours, and is handled.
unsafe fn is_ours(info: *mut libc::siginfo_t, context: *mut libc::c_void) -> bool {
    const SEGV_ACCERR: libc::c_int = 2;
    // SAFETY: the kernel's, for the time of the handler.
    let (code, at) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // SAFETY: as above.
    if code != SEGV_ACCERR || !unsafe { was_write(context, at) } {
        return false;
    }
    let mut ours = false;
    while let Some((zone, state)) = find(at) {
        if !is_here() {
            // A child: nothing of its memory is on its way.
            return zone.unprotect();
        }
        if !ours {
            FAULTS.fetch_add(1, Ordering::Relaxed);
        }
        ours = true;
        if !zone.resolve(state) {
            return false;
        }
    }
    // Another thread may have lifted it between the fault and now.
    ours || is_writable(at)
}

fn find(at: usize) -> Option<(&'static Zone, u64)> {
    in_use().iter().find_map(|zone| {
        let state = zone.state.load(Ordering::SeqCst);
        let here = state & PHASE != FREE && zone.overlaps(at, at + 1);
        // The borders are those of this age, if it is still the same.
        let same = zone.state.load(Ordering::SeqCst) & !(PHASE | HOLDS) == state & !(PHASE | HOLDS);
        (here && same).then_some((zone, state))
    })
}

/// Whether the fault was a write.
#[cfg(target_arch = "x86_64")]
unsafe fn was_write(context: *mut libc::c_void, _at: usize) -> bool {
    const WRITE: i64 = 2;
    // SAFETY: the kernel's, for the time of the handler.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    registers[libc::REG_ERR as usize] & WRITE != 0
}

/// Whether the fault was a write, or at least no jump.
#[cfg(target_arch = "aarch64")]
unsafe fn was_write(context: *mut libc::c_void, at: usize) -> bool {
    // SAFETY: the kernel's, for the time of the handler.
    let pc = unsafe { (*context.cast::<libc::ucontext_t>()).uc_mcontext.pc };
    pc != at as u64
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn was_write(_context: *mut libc::c_void, _at: usize) -> bool {
    true
}

/// Whether a byte can be written now: by an atomic operation of the kernel on its word that changes nothing.
fn is_writable(at: usize) -> bool {
    // FUTEX_OP(FUTEX_OP_OR, 0, FUTEX_OP_CMP_EQ, 0)
    const OR_NOTHING: u32 = 2 << 28;
    static WORD: AtomicU32 = AtomicU32::new(0);
    let word: *mut u32 = std::ptr::with_exposed_provenance_mut(at & !3);
    // SAFETY: wakes nobody at either word; the second is changed by nothing, and checked by the kernel.
    let made = unsafe {
        libc::syscall(
            libc::SYS_futex,
            WORD.as_ptr(),
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0,
            0_usize,
            word,
            OR_NOTHING,
        )
    };
    made >= 0
}

/// Carries out the program's action.
unsafe fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: null, or leaked before it was stored.
    let action = unsafe { PROGRAM.load(Ordering::SeqCst).as_ref() };
    // SAFETY: the kernel's, for the time of the handler. Codes up to 0 are of signals that somebody has sent.
    let sent = unsafe { (*info).si_code } <= 0;
    let action = match action {
        Some(action) if action.sa_sigaction == libc::SIG_IGN && sent => return,
        Some(action)
            if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN =>
        {
            *action
        }
        // The kernel does not let faults be ignored.
        _ => {
            // SAFETY: the default action. A fault happens again when we return; a signal that was sent is sent again.
            unsafe {
                let mut default: libc::sigaction = zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                change()(signal, &raw const default, null_mut());
                if sent {
                    libc::raise(signal);
                }
            }
            return;
        }
    };
    // SAFETY: as the kernel would have called it, with its mask; the pointers are the kernel's.
    unsafe {
        if action.sa_flags & libc::SA_RESETHAND != 0 {
            PROGRAM.store(null_mut(), Ordering::SeqCst);
        }
        // The signals blocked before, those that the action blocks, and the signal itself.
        let mut mask = (*context.cast::<libc::ucontext_t>()).uc_sigmask;
        for other in 1..=64 {
            if libc::sigismember(&raw const action.sa_mask, other) == 1 {
                libc::sigaddset(&raw mut mask, other);
            }
        }
        if action.sa_flags & libc::SA_NODEFER == 0 {
            libc::sigaddset(&raw mut mask, signal);
        }
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, before.as_mut_ptr());
        if action.sa_flags & libc::SA_SIGINFO != 0 {
            let handler = std::mem::transmute::<
                usize,
                unsafe extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void),
            >(action.sa_sigaction);
            handler(signal, info, context);
        } else {
            let handler = std::mem::transmute::<usize, unsafe extern "C" fn(libc::c_int)>(
                action.sa_sigaction,
            );
            handler(signal);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), null_mut());
    }
}
