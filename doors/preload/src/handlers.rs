//! The program's signal handlers, each behind a function of ours that puts it off while the thread works: see signal.rs.
//!
//! A signal that is put off is blocked in the thread, and sent to it again when the work is done, so that the handler finds the program's own context. The signals of
//! the C library are the kernel's as before. A fault is not put off; a signal of its number that another process or thread sends is, and the thread does not block it.
//!
//! `SIGSEGV` and `SIGBUS` have a function of ours too, from the start on: a copy from or to memory of the program that is not there ends with `EFAULT`. All
//! other faults go on to the program's handler, with the mask, the stack and the arguments that the kernel has given them, or end the process as by default.
//!
//! # Safety
//!
//! As `sigaction(2)`. What a handler calls here is async-signal-safe.

use std::cell::Cell;
use std::mem::{MaybeUninit, transmute, zeroed};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize};

use libc::{c_int, c_long, c_void, sighandler_t, siginfo_t, sigset_t};
use weft_ring::checked;
use weft_sys::protect;

use crate::iov::is_optional;
use crate::next;
use crate::work::is_busy;

/// The program's handler of a signal, its flags, and the signals that it blocks.
struct Action {
    handler: AtomicUsize,
    flags: AtomicI32,
    mask: AtomicU64,
}

const SIGNALS: usize = 65;

static ACTIONS: [Action; SIGNALS] = [const {
    Action {
        handler: AtomicUsize::new(libc::SIG_DFL),
        flags: AtomicI32::new(0),
        mask: AtomicU64::new(0),
    }
}; SIGNALS];

const FAULTS: [c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];
/// Those of memory, where [`checked`] can tell its own from others.
const MEMORY: &[c_int] = if checked::IS_CHECKED {
    &[libc::SIGSEGV, libc::SIGBUS]
} else {
    &[]
};
/// Of the C library.
const OWN: [c_int; 2] = [32, 33];

fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

/// The kernel's part of a set: a bit for each signal.
fn bits(set: &sigset_t) -> u64 {
    // SAFETY: a set begins with these bits, and is aligned for them.
    unsafe { std::ptr::from_ref(set).cast::<u64>().read() }
}

fn set_of(bits: u64) -> sigset_t {
    // SAFETY: all zeros are an empty set, which begins with these bits.
    unsafe {
        let mut set: sigset_t = zeroed();
        (&raw mut set).cast::<u64>().write(bits);
        set
    }
}

/// What our function blocks as it begins: no other arrives before the mask of what it has interrupted says so.
fn every() -> sigset_t {
    let open = FAULTS.iter().chain(&OWN).fold(0, |bits, &n| bits | bit(n));
    set_of(!open)
}

fn set_mask(how: c_int, bits: u64) {
    let set = set_of(bits);
    // SAFETY: a set of this thread.
    unsafe { next::pthread_sigmask(how, &raw const set, null_mut()) };
}

/// What is kept of signals that bring more than their number.
const KEPT: usize = 4;

struct PutOff {
    /// A bit for each signal.
    signals: Cell<u64>,
    kept: [Cell<(c_int, MaybeUninit<siginfo_t>)>; KEPT],
}

/// What the handlers that have run during a wait mean for it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Ran {
    /// None has run, or one that was not installed by `sigaction` or `signal`.
    None,
    /// The wait goes on (`SA_RESTART`).
    Restart,
    /// It ends.
    Interrupt,
}

thread_local! {
    static RAN: Cell<Ran> = const { Cell::new(Ran::None) };
    static PUT_OFF: PutOff = const {
        PutOff {
            signals: Cell::new(0),
            kept: [const { Cell::new((0, MaybeUninit::uninit())) }; KEPT],
        }
    };
}

/// `None`: a signal of the C library.
fn action(signal: c_int) -> Option<&'static Action> {
    let index = usize::try_from(signal)
        .ok()
        .filter(|n| (1..SIGNALS).contains(n));
    index
        .filter(|_| !OWN.contains(&signal))
        .map(|n| &ACTIONS[n])
}

/// Flags that are the program's and not those of our function.
const OWN_FLAGS: c_int = libc::SA_SIGINFO | libc::SA_RESETHAND;
/// The flags of our function where the program has no handler: it may have a stack for faults, and waits go on after a signal without effect.
const DEFAULT_FLAGS: c_int = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESTART;

fn is_handler(handler: sighandler_t) -> bool {
    ![libc::SIG_DFL, libc::SIG_IGN].contains(&handler)
}

/// Our function for the signal.
fn function(signal: c_int) -> sighandler_t {
    if FAULTS.contains(&signal) {
        faults as *const () as sighandler_t
    } else {
        arrives as *const () as sighandler_t
    }
}

/// The program's handlers are the kernel's alone: see [`give_back`].
static GIVEN_BACK: AtomicBool = AtomicBool::new(false);

/// Returns true if our function is installed for this action of the program.
fn is_behind_ours(signal: c_int, handler: sighandler_t) -> bool {
    let may_be = is_handler(handler) || handler == libc::SIG_DFL && MEMORY.contains(&signal);
    may_be && !are_given_back()
}

pub(crate) fn are_given_back() -> bool {
    GIVEN_BACK.load(SeqCst)
}

/// Gives the program's actions to the kernel for good: our functions make system calls, which the program does not allow from now on.
pub(crate) fn give_back() {
    if GIVEN_BACK.swap(true, SeqCst) {
        return;
    }
    for signal in (1..).take(SIGNALS - 1) {
        // SAFETY: an action that is asked for, and the program's in place of ours.
        unsafe {
            let mut now: libc::sigaction = zeroed();
            let is_known = install(signal, null(), &raw mut now) == 0;
            if is_known && now.sa_sigaction == function(signal) {
                change(signal, null(), &raw mut now);
                change(signal, &raw const now, null_mut());
            }
        }
    }
}

/// Makes of the program's action, which is noted in ours, the one that the kernel gets.
fn put_before(signal: c_int, action: &Action, it: &mut libc::sigaction) {
    action.flags.store(it.sa_flags, SeqCst);
    action.mask.store(bits(&it.sa_mask), SeqCst);
    action.handler.store(it.sa_sigaction, SeqCst);
    it.sa_flags = if is_handler(it.sa_sigaction) {
        (it.sa_flags | libc::SA_SIGINFO) & !libc::SA_RESETHAND
    } else {
        DEFAULT_FLAGS
    };
    if !FAULTS.contains(&signal) {
        it.sa_mask = every();
    }
    it.sa_sigaction = function(signal);
}

/// `sigaction` behind ours, and behind the handler of protected pages.
unsafe fn install(signal: c_int, new: *const libc::sigaction, old: *mut libc::sigaction) -> c_int {
    // SAFETY: all zeros are an action.
    let mut before: libc::sigaction = unsafe { zeroed() };
    // SAFETY: the caller's promise.
    if signal == libc::SIGSEGV && protect::swap_program_action(unsafe { new.as_ref() }, &mut before)
    {
        // SAFETY: as above.
        if let Some(old) = unsafe { old.as_mut() } {
            *old = before;
        }
        return 0;
    }
    // SAFETY: as above.
    unsafe { next::sigaction(signal, new, old) }
}

/// `sigaction`.
///
/// # Safety
/// As its manual page says.
pub(crate) unsafe fn change(
    signal: c_int,
    new: *const libc::sigaction,
    old: *mut libc::sigaction,
) -> c_int {
    let Some(action) = action(signal).filter(|_| is_optional(new)) else {
        // SAFETY: the caller's promise.
        return unsafe { next::sigaction(signal, new, old) };
    };
    let (handler, flags) = (action.handler.load(SeqCst), action.flags.load(SeqCst));
    let mask = action.mask.load(SeqCst);
    // SAFETY: the caller's promise.
    let given = unsafe { new.as_ref() };
    let mut ours = given.copied();
    if let Some(ours) = ours
        .as_mut()
        .filter(|it| is_behind_ours(signal, it.sa_sigaction))
    {
        put_before(signal, action, ours);
    }
    let new = ours.as_ref().map_or(null(), std::ptr::from_ref);
    // SAFETY: the program's action, or ours in its place.
    let rc = unsafe { install(signal, new, old) };
    if rc != 0 {
        action.flags.store(flags, SeqCst);
        action.mask.store(mask, SeqCst);
        action.handler.store(handler, SeqCst);
    // SAFETY: the kernel has written there.
    } else if let Some(old) = unsafe { old.as_mut() }
        && old.sa_sigaction == function(signal)
    {
        old.sa_sigaction = handler;
        old.sa_mask = set_of(mask);
        old.sa_flags = if is_handler(handler) {
            old.sa_flags & !OWN_FLAGS | flags & OWN_FLAGS
        } else {
            flags
        };
    }
    rc
}

/// `signal`.
///
/// # Safety
/// As its manual page says.
pub(crate) unsafe fn change_by_signal(number: c_int, handler: sighandler_t) -> sighandler_t {
    let Some(action) =
        action(number).filter(|_| is_behind_ours(number, handler) && handler != libc::SIG_ERR)
    else {
        // SAFETY: the caller's promise.
        let before = unsafe { next::signal(number, handler) };
        return told(number, before);
    };
    // The C library knows the flags that this function has by `siginterrupt`.
    // SAFETY: the caller's promise.
    let before = told(number, unsafe { next::signal(number, handler) });
    if before == libc::SIG_ERR {
        return before;
    }
    // SAFETY: all zeros are an action.
    let mut now: libc::sigaction = unsafe { zeroed() };
    // SAFETY: asks.
    unsafe { next::sigaction(number, null(), &raw mut now) };
    put_before(number, action, &mut now);
    // SAFETY: the program's action with our function.
    unsafe { next::sigaction(number, &raw const now, null_mut()) };
    before
}

/// `siginterrupt` has been called.
pub(crate) fn restarts(signal: c_int, does: bool) {
    if let Some(action) = action(signal) {
        if does {
            action.flags.fetch_or(libc::SA_RESTART, SeqCst);
        } else {
            action.flags.fetch_and(!libc::SA_RESTART, SeqCst);
        }
    }
}

/// What the program is told of a handler: its own where the kernel names our function.
pub(crate) fn told(signal: c_int, handler: sighandler_t) -> sighandler_t {
    match action(signal) {
        Some(action) if handler == function(signal) => action.handler.load(SeqCst),
        _ => handler,
    }
}

/// Finds the functions behind ours, before a handler needs them, and takes the faults of memory.
pub(crate) fn start() {
    // SAFETY: an action that is asked for and set again; the others ask only.
    unsafe {
        let mut now: libc::sigaction = zeroed();
        for &signal in MEMORY {
            if change(signal, null(), &raw mut now) == 0 {
                change(signal, &raw const now, null_mut());
            }
        }
        let mut mask: sigset_t = zeroed();
        next::pthread_sigmask(libc::SIG_BLOCK, null(), &raw mut mask);
        next::syscall(libc::SYS_getpid, 0, 0, 0, 0, 0, 0);
    }
}

/// Returns true if the program handles the signal by a handler that was installed without `SA_RESTART`.
pub(crate) fn interrupts(signal: c_int) -> bool {
    // SAFETY: all zeros are an action.
    let mut now: libc::sigaction = unsafe { zeroed() };
    // SAFETY: asks.
    let rc = unsafe { next::sigaction(signal, null(), &raw mut now) };
    rc == 0 && is_handler(now.sa_sigaction) && now.sa_flags & libc::SA_RESTART == 0
}

extern "C-unwind" fn arrives(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    if is_busy() {
        put_off(signal, info, context.cast());
        return;
    }
    let Some(action) = action(signal) else { return };
    let is_deferred = action.flags.load(SeqCst) & libc::SA_NODEFER == 0;
    let own = if is_deferred { bit(signal) } else { 0 };
    // SAFETY: the kernel's frame.
    let interrupted = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_sigmask };
    let blocked = bits(interrupted) | action.mask.load(SeqCst) | own;
    set_mask(libc::SIG_SETMASK, blocked);
    run(signal, info, context);
}

/// A fault, or a signal of that number that was sent.
extern "C-unwind" fn faults(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: what the kernel has passed.
    if unsafe { has_ended_copy(signal, &*info, context.cast()) } {
        return;
    }
    // SAFETY: as above.
    if is_busy() && unsafe { can_wait(signal, &*info) } {
        keep(signal, info);
        return;
    }
    let Some(action) = action(signal) else { return };
    if is_handler(action.handler.load(SeqCst)) {
        return run(signal, info, context);
    }
    // SAFETY: all zeros are the default action.
    let default: libc::sigaction = unsafe { zeroed() };
    // The signal comes again as soon as this function returns, at the same instruction.
    // SAFETY: the default action, and what the kernel has passed.
    unsafe {
        install(signal, &raw const default, null_mut());
        send_to_self(signal, info);
    }
}

/// Ends the copy that this fault has interrupted, if there is one.
///
/// # Safety
/// The context is the kernel's.
#[cfg(target_arch = "x86_64")]
unsafe fn has_ended_copy(signal: c_int, info: &siginfo_t, context: *mut libc::ucontext_t) -> bool {
    /// Memory has failed that the thread does not use now.
    const BUS_MCEERR_AO: c_int = 5;
    let is_sent = info.si_code <= 0;
    if is_sent || signal == libc::SIGBUS && info.si_code == BUS_MCEERR_AO {
        return false;
    }
    // SAFETY: the caller's promise.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    let instruction = &mut registers[libc::REG_RIP as usize];
    let after = checked::resume(*instruction as usize);
    if let Some(after) = after {
        *instruction = after as i64;
    }
    after.is_some()
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn has_ended_copy(_: c_int, _: &siginfo_t, _: *mut libc::ucontext_t) -> bool {
    false
}

/// Calls the program's handler.
fn run(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    let Some(action) = action(signal) else {
        return;
    };
    let (handler, flags) = (action.handler.load(SeqCst), action.flags.load(SeqCst));
    if !is_handler(handler) {
        return;
    }
    if flags & libc::SA_RESETHAND != 0 {
        // SAFETY: all zeros are the default action.
        let mut default: libc::sigaction = unsafe { zeroed() };
        default.sa_flags = flags;
        default.sa_mask = set_of(action.mask.load(SeqCst));
        // SAFETY: what the kernel does for this flag.
        unsafe { change(signal, &raw const default, null_mut()) };
    }
    // SAFETY: the program's function, by the type that its flags give.
    unsafe {
        if flags & libc::SA_SIGINFO == 0 {
            transmute::<sighandler_t, unsafe extern "C-unwind" fn(c_int)>(handler)(signal);
        } else {
            transmute::<
                sighandler_t,
                unsafe extern "C-unwind" fn(c_int, *mut siginfo_t, *mut c_void),
            >(handler)(signal, info, context);
        }
    }
    if flags & libc::SA_RESTART == 0 {
        let _ = RAN.try_with(|ran| ran.set(Ran::Interrupt));
    } else {
        let _ = RAN.try_with(|ran| ran.set(ran.get().max(Ran::Restart)));
    }
}

/// A wait begins.
#[inline]
pub(crate) fn forget_ran() {
    RAN.set(Ran::None);
}

/// The handlers that have run since.
pub(crate) fn ran() -> Ran {
    RAN.get()
}

/// Returns true if the signal is no fault of the interrupted instruction: it was sent, and not by `abort`, which does not go on without the handler.
unsafe fn can_wait(signal: c_int, info: &siginfo_t) -> bool {
    let by_abort = signal == libc::SIGABRT
        && info.si_code == libc::SI_TKILL
        // SAFETY: it is there in a signal of this kind.
        && unsafe { info.si_pid() }.cast_unsigned() == std::process::id();
    info.si_code <= 0 && !by_abort
}

/// The signal is blocked in this thread as soon as this handler returns.
fn put_off(signal: c_int, info: *const siginfo_t, context: *mut libc::ucontext_t) {
    // SAFETY: the kernel's frame, from which it restores the mask.
    unsafe { libc::sigaddset(&raw mut (*context).uc_sigmask, signal) };
    keep(signal, info);
}

/// The signal comes again when this thread's work ends. One that the thread does not block, as a fault may follow, can come several times until then, and counts once.
fn keep(signal: c_int, info: *const siginfo_t) {
    let _ = PUT_OFF.try_with(|off| {
        let signals = off.signals.get();
        if signals & bit(signal) != 0 {
            return;
        }
        off.signals.set(signals | bit(signal));
        if let Some(free) = off.kept.iter().find(|kept| kept.get().0 == 0) {
            // SAFETY: what the kernel has passed, for our function asks for it.
            free.set((signal, MaybeUninit::new(unsafe { *info })));
        }
    });
}

/// Returns true if handlers wait for this thread's work to end.
#[inline]
pub(crate) fn are_put_off() -> bool {
    PUT_OFF
        .try_with(|off| off.signals.get() != 0)
        .unwrap_or(false)
}

/// Runs them. Returns true if one of them interrupts a call.
#[cold]
pub(crate) fn deliver() -> bool {
    let errno = crate::errno();
    forget_ran();
    let _ = PUT_OFF.try_with(|off| {
        // One at a time: a handler may leave by a jump, and calls of its own handle the others.
        while off.signals.get() != 0 {
            let signals = off.signals.get();
            let signal = signals.trailing_zeros().cast_signed() + 1;
            off.signals.set(signals & !bit(signal));
            handle(off, signal);
            // This thread has blocked it for the handler's sake alone.
            if !FAULTS.contains(&signal) {
                set_mask(libc::SIG_UNBLOCK, bit(signal));
            }
        }
    });
    crate::set_errno(errno);
    ran() == Ran::Interrupt
}

/// Handles a signal that was put off, with what came with it. A signal of which several can wait (`SIGRTMIN` on) is handled here, before those that wait behind it: if it
/// were sent again, it would come after them, or find no room.
fn handle(off: &PutOff, signal: c_int) {
    let kept = off.kept.iter().find(|kept| kept.get().0 == signal);
    let kept = kept.map(|kept| kept.replace((0, MaybeUninit::uninit())).1);
    match kept {
        Some(info) if signal >= libc::SIGRTMIN() => handle_here(signal, info),
        kept => send_again(signal, kept.as_ref()),
    }
}

/// Calls a handler as the kernel does: with the signals of its mask blocked, and its own, which is blocked already.
fn handle_here(signal: c_int, mut info: MaybeUninit<siginfo_t>) {
    let Some(action) = action(signal) else { return };
    let mask = set_of(action.mask.load(SeqCst));
    // SAFETY: all zeros are a set and a context, which the calls fill in.
    unsafe {
        let mut before: sigset_t = zeroed();
        let mut context: libc::ucontext_t = zeroed();
        next::pthread_sigmask(libc::SIG_BLOCK, &raw const mask, &raw mut before);
        libc::getcontext(&raw mut context);
        run(signal, info.as_mut_ptr(), (&raw mut context).cast());
        next::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut());
    }
}

/// Sends a signal to this thread.
fn send_again(signal: c_int, info: Option<&MaybeUninit<siginfo_t>>) {
    // SAFETY: what the kernel has told of it.
    unsafe { send_to_self(signal, info.map_or(null(), MaybeUninit::as_ptr)) };
}

/// The same, with what came with it, or null.
unsafe fn send_to_self(signal: c_int, info: *const siginfo_t) {
    let (process, number) = (c_long::from(std::process::id()), c_long::from(signal));
    // SAFETY: a signal of this process to this thread.
    unsafe {
        let thread = next::syscall(libc::SYS_gettid, 0, 0, 0, 0, 0, 0);
        if info.is_null() {
            next::syscall(libc::SYS_tgkill, process, thread, number, 0, 0, 0);
        } else {
            let (call, info) = (libc::SYS_rt_tgsigqueueinfo, info as c_long);
            next::syscall(call, process, thread, number, info, 0, 0);
        }
    };
}
