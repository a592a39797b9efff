//! Protected zones, and the handler behind them.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use weft_sys::protect::{self, Hold, Refused, counters, guard, is_guarded, page_size, settle};
use weft_sys::{EventFd, Interest, poll_fds};

/// Pages of our own, for ever.
#[derive(Clone, Copy)]
struct Pages(NonNull<u8>, usize);

// SAFETY: reached by volatile accesses only.
unsafe impl Send for Pages {}

impl Pages {
    fn new(pages: usize) -> Pages {
        let len = pages * page_size();
        Pages(weft_sys::map::map_anonymous(len).unwrap(), len)
    }

    fn guard(self, bell: BorrowedFd<'_>) -> Result<Hold, Refused> {
        // SAFETY: mapped for ever.
        unsafe { guard(self.0, self.1, bell) }
    }

    fn write(self, at: usize, byte: u8) {
        assert!(at < self.1);
        // SAFETY: mapped for ever, and writable but while it is guarded.
        unsafe { self.0.as_ptr().add(at).write_volatile(byte) };
    }

    fn read(self, at: usize) -> u8 {
        assert!(at < self.1);
        // SAFETY: as above.
        unsafe { self.0.as_ptr().add(at).read_volatile() }
    }

    fn settle(self, off: usize, len: usize) {
        settle(self.0.as_ptr().wrapping_add(off), len);
    }

    fn is_guarded(self) -> bool {
        is_guarded(self.0.as_ptr(), self.1)
    }
}

fn bell() -> EventFd {
    EventFd::new().unwrap()
}

/// Wait until a bell rings.
fn rings(bell: &EventFd) {
    let ready = poll_fds(
        &[(bell.as_fd(), Interest::READ)],
        Some(Duration::from_secs(30)),
    );
    assert!(ready.is_ok() && bell.drain(), "nobody rang");
}

#[test]
fn a_zone_without_holds_is_lifted_at_the_fault_and_not_before() {
    let (pages, bell) = (Pages::new(4), bell());
    let hold = pages.guard(bell.as_fd()).unwrap();
    assert!(hold.is_fresh() && !hold.is_wanted());
    drop(hold);
    assert!(pages.is_guarded());
    // Sent again untouched: no system call.
    let again = pages.guard(bell.as_fd()).unwrap();
    assert!(!again.is_fresh());
    assert_eq!(pages.read(5), 0);
    drop(again);
    let before = counters();
    pages.write(page_size() + 3, 7);
    assert!(counters().faults > before.faults);
    assert!(!pages.is_guarded());
    assert_eq!(pages.read(page_size() + 3), 7);
    assert!(pages.guard(bell.as_fd()).unwrap().is_fresh());
}

/// Threads that write at once, none of which gets on while there is a hold.
fn writers_wait(spawn: impl Fn(Pages, usize, Arc<AtomicBool>) -> Box<dyn FnOnce()>) {
    let (pages, bell) = (Pages::new(16), bell());
    let first = pages.guard(bell.as_fd()).unwrap();
    let second = pages.guard(bell.as_fd()).unwrap();
    let released = Arc::new(AtomicBool::new(false));
    let threads: Vec<_> = (0..8)
        .map(|at| spawn(pages, at, Arc::clone(&released)))
        .collect();
    rings(&bell);
    assert!(first.is_wanted() && second.is_wanted());
    // Nobody gets in front of those who wait.
    assert_eq!(pages.guard(bell.as_fd()).unwrap_err(), Refused::Busy);
    drop(first);
    for at in 0..8 {
        assert_eq!(pages.read(at * page_size()), 0);
    }
    released.store(true, Ordering::SeqCst);
    drop(second);
    for join in threads {
        join();
    }
    for at in 0..8 {
        assert_eq!(pages.read(at * page_size()), 1 + at as u8);
    }
}

#[test]
fn threads_that_fault_at_once_wait_for_the_last_hold() {
    writers_wait(|pages, at, released| {
        let thread = thread::spawn(move || {
            pages.write(at * page_size(), 1 + at as u8);
            assert!(released.load(Ordering::SeqCst), "written while it was held");
        });
        Box::new(move || thread.join().unwrap())
    });
}

struct Bare(Pages, usize, Arc<AtomicBool>);

extern "C" fn bare(job: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: made from a box by the one who started the thread.
    let Bare(pages, at, released) = *unsafe { Box::from_raw(job.cast::<Bare>()) };
    pages.write(at * page_size(), 1 + at as u8);
    usize::from(released.load(Ordering::SeqCst)) as *mut libc::c_void
}

#[test]
fn threads_without_an_alternate_stack_wait_as_well() {
    writers_wait(|pages, at, released| {
        let job = Box::into_raw(Box::new(Bare(pages, at, released)));
        let mut thread = 0;
        // SAFETY: the thread takes the box.
        let made =
            unsafe { libc::pthread_create(&raw mut thread, std::ptr::null(), bare, job.cast()) };
        assert_eq!(made, 0);
        Box::new(move || {
            let mut released = null_mut();
            // SAFETY: joined once.
            assert_eq!(unsafe { libc::pthread_join(thread, &raw mut released) }, 0);
            assert!(!released.is_null(), "written while it was held");
        })
    });
}

#[test]
fn settling_waits_for_holds_and_frees_the_range() {
    let (pages, bell) = (Pages::new(2), bell());
    let hold = pages.guard(bell.as_fd()).unwrap();
    let settled = Arc::new(AtomicBool::new(false));
    let thread = thread::spawn({
        let settled = Arc::clone(&settled);
        move || {
            pages.settle(1, 1);
            settled.store(true, Ordering::SeqCst);
        }
    });
    rings(&bell);
    assert!(!settled.load(Ordering::SeqCst) && pages.is_guarded());
    drop(hold);
    thread.join().unwrap();
    assert!(!pages.is_guarded());
}

#[test]
fn zones_that_overlap_give_way_when_nothing_is_on_its_way() {
    let (pages, bell) = (Pages::new(4), bell());
    let half = Pages(pages.0, 2 * page_size());
    let hold = half.guard(bell.as_fd()).unwrap();
    assert_eq!(pages.guard(bell.as_fd()).unwrap_err(), Refused::Busy);
    drop(hold);
    let whole = pages.guard(bell.as_fd()).unwrap();
    assert!(whole.is_fresh());
    drop(whole);
    // SAFETY: not whole pages: refused before anything is done.
    let odd = unsafe { guard(pages.0, 100, bell.as_fd()) };
    assert_eq!(odd.unwrap_err(), Refused::Unaligned);
    settle(pages.0.as_ptr(), pages.1);
}

#[test]
fn stacks_shared_and_read_only_memory_are_refused() {
    let bell = bell();
    let page = page_size();
    let check = |at: usize| {
        let at = NonNull::new(std::ptr::with_exposed_provenance_mut(at / page * page)).unwrap();
        // SAFETY: mapped; it is refused before anything is done.
        unsafe { guard(at, page, bell.as_fd()) }.unwrap_err()
    };
    let local = [0_u8; 16];
    assert_eq!(
        check((&raw const local).expose_provenance()),
        Refused::Stack
    );
    assert_eq!(check(check_code as *const () as usize), Refused::ReadOnly);
    // SAFETY: a new mapping.
    let shared = unsafe {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(null_mut(), page, rights, flags, -1, 0)
    };
    assert_ne!(shared, libc::MAP_FAILED);
    assert_eq!(check(shared.expose_provenance()), Refused::Shared);
    // SAFETY: the test's own page. Its rights would be less afterwards than before.
    unsafe {
        libc::mprotect(
            shared,
            page,
            libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
        )
    };
    assert_eq!(check(shared.expose_provenance()), Refused::ReadOnly);
}

fn check_code() {}

fn map_shared(pages: usize) -> Pages {
    let len = pages * page_size();
    let mut made = null_mut();
    protect::made_shared(|| {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping.
        made = unsafe { libc::mmap(null_mut(), len, rights, flags, -1, 0) };
        Some(made.cast_const().cast())
    });
    assert_ne!(made, libc::MAP_FAILED);
    Pages(NonNull::new(made.cast()).unwrap(), len)
}

/// Another name of so many pages, from one of them on.
fn alias(of: Pages, from: usize, pages: usize) -> Pages {
    let len = pages * page_size();
    // SAFETY: the pages are mapped, and a length of 0 moves nothing.
    let made = unsafe {
        let at = of.0.as_ptr().add(from * page_size());
        libc::mremap(at.cast(), 0, len, libc::MREMAP_MAYMOVE)
    };
    assert_ne!(made, libc::MAP_FAILED);
    Pages(NonNull::new(made.cast()).unwrap(), len)
}

#[test]
fn shared_memory_of_our_own_is_protected_by_all_its_names() {
    let bell = bell();
    let whole = map_shared(6);
    let middle = Pages(
        NonNull::new(whole.0.as_ptr().wrapping_add(page_size())).unwrap(),
        2 * page_size(),
    );
    // Of the zone's pages 1 and 2 the first other name has both, the second one has one.
    let (all, some) = (alias(whole, 0, 6), alias(whole, 2, 4));
    let hold = middle.guard(bell.as_fd()).unwrap();
    let guarded = |pages: Pages, page: usize| {
        is_guarded(pages.0.as_ptr().wrapping_add(page * page_size()), 1)
    };
    let seen = [0, 1, 2, 3].map(|page| guarded(all, page));
    assert_eq!(seen, [false, true, true, false]);
    assert!(guarded(some, 0) && !guarded(some, 1));
    // A writer by another name waits, and what is settled by another name is waited for.
    let written = Arc::new(AtomicBool::new(false));
    let thread = thread::spawn({
        let written = Arc::clone(&written);
        move || {
            some.write(0, 7);
            written.store(true, Ordering::SeqCst);
        }
    });
    rings(&bell);
    assert!(!written.load(Ordering::SeqCst) && middle.read(page_size()) == 0);
    drop(hold);
    thread.join().unwrap();
    assert_eq!(
        (middle.read(page_size()), all.read(2 * page_size())),
        (7, 7)
    );
    assert!(!guarded(all, 1) && !middle.is_guarded());
    // A zone by another name is in the way of one by this name, as long as it is held.
    let other = Pages(
        NonNull::new(all.0.as_ptr().wrapping_add(page_size())).unwrap(),
        2 * page_size(),
    );
    let hold = other.guard(bell.as_fd()).unwrap();
    assert_eq!(middle.guard(bell.as_fd()).unwrap_err(), Refused::Busy);
    drop(hold);
    drop(middle.guard(bell.as_fd()).unwrap());
    // Before a new name can be used, and before a child has the memory, nothing of it is protected.
    protect::settle_shared();
    assert!(!middle.is_guarded());
    drop(middle.guard(bell.as_fd()).unwrap());
    protect::begin_sharing();
    assert!(!middle.is_guarded());
    assert_eq!(middle.guard(bell.as_fd()).unwrap_err(), Refused::Shared);
    let meanwhile = map_shared(1);
    protect::end_sharing();
    for pages in [middle, other, meanwhile] {
        assert_eq!(pages.guard(bell.as_fd()).unwrap_err(), Refused::Shared);
    }
    drop(map_shared(1).guard(bell.as_fd()).unwrap());
}

/// Memory that is mapped before anything is protected is as good as that mapped later.
#[test]
fn shared_memory_from_before_the_first_zone() {
    assert!(in_a_process("shared first").success());
}

#[test]
fn a_forked_child_writes_at_once_and_the_parent_is_not_disturbed() {
    let (pages, bell) = (Pages::new(2), bell());
    pages.write(0, 1);
    let hold = pages.guard(bell.as_fd()).unwrap();
    // SAFETY: the child writes to memory of its own, protects anew, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: if it hangs, a signal ends it.
        unsafe { libc::alarm(20) };
        pages.write(0, 9);
        let mut good = pages.read(0) == 9;
        // It may protect memory itself.
        match pages.guard(bell.as_fd()) {
            Ok(own) => {
                good &= own.is_fresh();
                drop(own);
                pages.write(1, 8);
                good &= pages.read(1) == 8;
            }
            Err(_) => good = false,
        }
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = -1;
    // SAFETY: a place for the status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child");
    assert!(!hold.is_wanted() && pages.is_guarded());
    assert_eq!(pages.read(0), 1);
    drop(hold);
    pages.write(0, 2);
}

// ---- processes of their own: the handler is a process's -------------------------------------------------------------

const ROLE: &str = "WEFT_PROTECT_ROLE";

fn in_a_process(role: &str) -> std::process::ExitStatus {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_other_process", "--nocapture"])
        .env(ROLE, role)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap()
}

static PROGRAMS: AtomicUsize = AtomicUsize::new(0);
static CAME: AtomicU32 = AtomicU32::new(0);

/// A program's own handler: opens its own page.
extern "C" fn programs(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's.
    let at = unsafe { (*info).si_addr() }.addr();
    let page = PROGRAMS.load(Ordering::SeqCst);
    if at < page || at >= page + page_size() {
        // SAFETY: a fault that is not ours.
        unsafe { libc::_exit(3) };
    }
    CAME.fetch_add(1, Ordering::SeqCst);
    let page = std::ptr::with_exposed_provenance_mut(page);
    // SAFETY: the program's own page.
    unsafe { libc::mprotect(page, page_size(), libc::PROT_READ | libc::PROT_WRITE) };
}

fn install_programs() {
    // SAFETY: a complete action.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = programs as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        assert_eq!(
            libc::sigaction(libc::SIGSEGV, &raw const action, null_mut()),
            0
        );
    }
}

fn close_programs(page: Pages) {
    PROGRAMS.store(page.0.as_ptr().expose_provenance(), Ordering::SeqCst);
    // SAFETY: the page is the program's own.
    unsafe { libc::mprotect(page.0.as_ptr().cast(), page.1, libc::PROT_NONE) };
}

#[test]
fn the_other_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let (pages, own, bell) = (Pages::new(2), Pages::new(1), bell());
    match role.as_str() {
        "own handler" => {
            install_programs();
            drop(pages.guard(bell.as_fd()).unwrap());
            close_programs(own);
            for round in 1..4 {
                own.write(0, 1);
                assert_eq!(CAME.load(Ordering::SeqCst), round);
                close_programs(own);
                pages.write(0, 1);
                assert_eq!(CAME.load(Ordering::SeqCst), round);
                drop(pages.guard(bell.as_fd()).unwrap());
            }
        }
        "shared first" => {
            let shared = map_shared(2);
            drop(shared.guard(bell.as_fd()).unwrap());
            // A child that does not say that it is one has its parent's memory.
            // SAFETY: the child calls nothing that another thread's lock could stop.
            let pid = unsafe { libc::syscall(libc::SYS_fork) };
            if pid == 0 {
                let refused = shared
                    .guard(bell.as_fd())
                    .is_err_and(|why| why == Refused::Shared);
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(!refused)) };
            }
            let mut status = 1;
            // SAFETY: waits for the child.
            unsafe { libc::waitpid(pid as i32, &raw mut status, 0) };
            assert_eq!(status, 0, "the child lends it");
        }
        "handler afterwards" => {
            drop(pages.guard(bell.as_fd()).unwrap());
            settle(pages.0.as_ptr(), pages.1);
            install_programs();
            assert_eq!(pages.guard(bell.as_fd()).unwrap_err(), Refused::Handler);
        }
        "interposed" => {
            drop(pages.guard(bell.as_fd()).unwrap());
            // SAFETY: plain data.
            let (mut new, mut old): (libc::sigaction, libc::sigaction) =
                unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
            new.sa_sigaction = programs as *const () as usize;
            new.sa_flags = libc::SA_SIGINFO;
            assert!(protect::swap_program_action(Some(&new), &mut old));
            assert_ne!(old.sa_sigaction, protect::handler_address());
            assert!(protect::swap_program_action(None, &mut old));
            assert_eq!(old.sa_sigaction, new.sa_sigaction);
            close_programs(own);
            own.write(0, 1);
            pages.write(0, 1);
            assert_eq!(CAME.load(Ordering::SeqCst), 1);
        }
        "crash" => {
            // SAFETY: the default action, not that of Rust's runtime.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            drop(pages.guard(bell.as_fd()).unwrap());
            close_programs(own);
            own.write(0, 1);
        }
        "sent" => {
            // SAFETY: as above.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            drop(pages.guard(bell.as_fd()).unwrap());
            // SAFETY: a signal that somebody sends.
            unsafe { libc::raise(libc::SIGSEGV) };
        }
        "jump" => {
            // SAFETY: as above.
            unsafe { libc::signal(libc::SIGSEGV, libc::SIG_DFL) };
            drop(pages.guard(bell.as_fd()).unwrap());
            // SAFETY: not a function; the fault is the test.
            unsafe {
                let code: extern "C" fn() = std::mem::transmute(pages.0);
                code();
            }
        }
        role => panic!("{role}"),
    }
}

#[test]
fn the_programs_own_handler_gets_its_own_faults() {
    assert!(in_a_process("own handler").success());
    assert!(in_a_process("interposed").success());
}

#[test]
fn a_handler_that_replaced_ours_is_noticed() {
    assert!(in_a_process("handler afterwards").success());
}

#[test]
fn faults_of_nobody_end_the_process_as_ever() {
    for role in ["crash", "sent", "jump"] {
        let status = in_a_process(role);
        assert_eq!(status.signal(), Some(libc::SIGSEGV), "{role}: {status}");
    }
}
