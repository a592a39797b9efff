//! The sandbox of a worker's compilers: they can read the system's programs, write in their own directory, and make the system calls of a compiler.
//!
//! A compiler restricts itself between its fork and its exec. No thread of the worker is restricted: the compiler could send it signals, as
//! Landlock allows signals to whatever has the same restrictions. A compiler that a master has sent also gets namespaces of its own, where the
//! kernel allows them.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope, path_beneath_rules,
};
use rustix::process::Pid;
use seccompiler::{
    SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use weft_sys::process::{
    Restrictions, end_with_us, in_own_spaces, keep_files, landlock_abi, restrict,
};

/// The folders that compilers may read and run.
const READ: &[&str] = words! {
    "/usr" "/lib" "/lib64" "/lib32" "/bin" "/opt" "/etc/alternatives" "/etc/ld.so.cache" "/etc/ld.so.preload"
};

/// The same where the compiler is to find a master's headers, and not those of this machine.
const PROGRAMS: &[&str] = words! {
    "/usr/bin" "/usr/lib" "/usr/lib32" "/usr/lib64" "/usr/libexec" "/lib" "/lib64" "/lib32" "/bin" "/opt" "/etc/alternatives" "/etc/ld.so.cache"
    "/etc/ld.so.preload"
};

/// The same where the compiler has brought all that it needs: what its limits are set with.
const LIMITER: &[&str] = words! {
    "/usr/bin" "/bin" "/usr/lib" "/usr/lib64" "/lib" "/lib64"
};

macro_rules! calls {
    ($($name:ident)*) => { &[$(libc::$name),*] };
}

/// The system calls that compilers may make with any arguments: those of a compiler, an assembler and objcopy, of the C libraries below them, and of a
/// thread that starts them and ends. None changes a file's owner, mode, attributes or times, another process, or anything that processes
/// share beyond files and pipes.
const ALLOWED: &[libc::c_long] = calls! {
    SYS_read SYS_write SYS_readv SYS_writev SYS_pread64 SYS_pwrite64 SYS_preadv SYS_pwritev SYS_preadv2 SYS_pwritev2 SYS_lseek SYS_copy_file_range SYS_sendfile
    SYS_openat SYS_openat2 SYS_close SYS_close_range SYS_dup SYS_dup3 SYS_pipe2 SYS_fstat SYS_newfstatat SYS_statx SYS_statfs SYS_fstatfs
    SYS_faccessat SYS_faccessat2 SYS_readlinkat SYS_getcwd SYS_chdir SYS_fchdir SYS_getdents64 SYS_umask SYS_truncate SYS_ftruncate SYS_fallocate
    SYS_fsync SYS_fdatasync SYS_fadvise64 SYS_renameat SYS_renameat2 SYS_mkdirat SYS_unlinkat
    SYS_mprotect SYS_munmap SYS_mremap SYS_madvise SYS_brk SYS_msync SYS_mincore SYS_membarrier SYS_rseq SYS_set_robust_list SYS_set_tid_address
    SYS_futex SYS_sched_yield SYS_sched_getaffinity SYS_getcpu SYS_ppoll SYS_pselect6
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigpending SYS_rt_sigsuspend SYS_rt_sigtimedwait SYS_sigaltstack SYS_restart_syscall
    SYS_kill SYS_tgkill SYS_execve SYS_exit SYS_exit_group SYS_wait4 SYS_waitid SYS_getpid SYS_getppid SYS_gettid SYS_getpgid SYS_getsid
    SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid SYS_getresgid SYS_getgroups SYS_getrlimit SYS_setrlimit SYS_getrusage SYS_times
    SYS_setitimer SYS_getitimer SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep SYS_nanosleep SYS_gettimeofday SYS_getrandom SYS_uname SYS_sysinfo
};

/// Those that only this architecture has.
#[cfg(target_arch = "x86_64")]
const OLD: &[libc::c_long] = calls! {
    SYS_open SYS_creat SYS_stat SYS_lstat SYS_access SYS_readlink SYS_dup2 SYS_pipe SYS_getdents SYS_rename SYS_mkdir SYS_rmdir SYS_unlink SYS_poll
    SYS_select SYS_pause SYS_alarm SYS_getpgrp SYS_fork SYS_vfork SYS_time SYS_arch_prctl
};
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[libc::c_long] = &[];

/// The requests of `fcntl`, `ioctl` and `prctl` that compilers may make.
const FCNTL: &[libc::c_int] = calls! {
    F_DUPFD F_DUPFD_CLOEXEC F_GETFD F_SETFD F_GETFL F_SETFL F_GETLK F_SETLK F_SETLKW
};
const IOCTL: &[libc::Ioctl] = calls! { TCGETS TIOCGWINSZ FIONREAD FIOCLEX FIONCLEX };
const PRCTL: &[libc::c_int] = calls! { PR_SET_NAME PR_GET_NAME PR_SET_VMA };

/// Flags of `clone` that compilers may not use: new namespaces, and a child of the worker's process.
const NOT_CLONED: libc::c_int = libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWNS
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_PARENT;

/// How far Landlock goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Files {
    /// The kernel does not have it.
    Free,
    /// Files, but not all of truncation, device requests and signals (before Linux 6.12).
    Partly,
    /// All that this sandbox asks for.
    Kept,
}

impl Files {
    /// With this version of Landlock: truncation came with the third one, device requests with the fifth, signals with the sixth.
    pub(crate) fn of(abi: u32) -> Self {
        match abi {
            0 => Self::Free,
            1..6 => Self::Partly,
            _ => Self::Kept,
        }
    }
}

/// The restrictions of compilers that the kernel supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// Landlock: files and signals.
    pub files: Files,
    /// Seccomp: a list of the system calls that are allowed.
    pub calls: bool,
    /// Namespaces of their own for masters' compilers.
    pub spaces: bool,
}

impl Level {
    /// Whether this includes all restrictions of the other. A job that is to have namespaces does not start without.
    pub(crate) fn holds(self, other: Self) -> bool {
        self.files >= other.files && self.calls >= other.calls
    }

    /// Whether programs that masters send may run.
    pub fn is_complete(self) -> bool {
        self.files == Files::Kept && self.calls
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match (self.files, self.calls) {
            (Files::Kept, true) => "Landlock and seccomp",
            (Files::Partly, true) => "an old Landlock (before Linux 6.12) and seccomp",
            (Files::Kept, false) => "Landlock alone",
            (Files::Partly, false) => "an old Landlock (before Linux 6.12) alone",
            (Files::Free, true) => "seccomp alone",
            (Files::Free, false) => "nothing: this kernel has neither Landlock nor seccomp",
        })?;
        if self.spaces {
            f.write_str(", and namespaces for masters' compilers")?;
        }
        Ok(())
    }
}

type Program = Vec<libc::sock_filter>;

/// The allowed system calls of compilers, in the kernel's form.
pub(crate) struct Filters {
    /// For processes that all stay in one group, so that one signal ends them.
    group: Option<Program>,
    /// For namespaces of their own, whose end ends them. A number of a group means another one there.
    spaces: Option<Program>,
}

impl Filters {
    /// Children may join the process group `group` and no other.
    pub(crate) fn new(group: Option<Pid>) -> Self {
        Self {
            group: filter(group),
            spaces: filter(None),
        }
    }
}

/// A list of what is allowed; the rest fails with `ENOSYS`, after which the C libraries try older calls. `clone3` is not in it, because it keeps its flags
/// in memory, which no filter reads; nor are the numbers of x32.
fn filter(group: Option<Pid>) -> Option<Program> {
    type Rules = Vec<SeccompRule>;
    let is = |argument, how: SeccompCmpOp, value: u64| {
        SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, value).ok()
    };
    let rule = |conditions: Vec<SeccompCondition>| SeccompRule::new(conditions).ok();
    let one_of = |argument, values: &[u64]| -> Option<Rules> {
        let one = |value: &u64| rule(vec![is(argument, SeccompCmpOp::Eq, *value)?]);
        values.iter().map(one).collect()
    };
    let numbers = |values: &[libc::c_int]| -> Vec<u64> {
        values
            .iter()
            .map(|value| value.unsigned_abs().into())
            .collect()
    };
    let mut rules: BTreeMap<i64, Rules> = ALLOWED
        .iter()
        .chain(OLD)
        .map(|&call| (call, Vec::new()))
        .collect();
    let not_cloned = u64::from(NOT_CLONED.unsigned_abs());
    let uncounted = libc::MAP_ANONYMOUS | libc::MAP_SHARED | libc::MAP_GROWSDOWN;
    let uncounted = u64::from(uncounted.unsigned_abs());
    let anonymous = u64::from(libc::MAP_ANONYMOUS.unsigned_abs());
    rules.extend([
        (libc::SYS_fcntl, one_of(1, &numbers(FCNTL))?),
        (libc::SYS_ioctl, one_of(1, IOCTL)?),
        (libc::SYS_prctl, one_of(0, &numbers(PRCTL))?),
        // Limits of its own.
        (libc::SYS_prlimit64, one_of(0, &[0])?),
        (
            libc::SYS_clone,
            vec![rule(vec![is(0, SeccompCmpOp::MaskedEq(not_cloned), 0)?])?],
        ),
        // Shared memory without a file, and stacks, do not count against the limit of memory.
        (
            libc::SYS_mmap,
            vec![
                rule(vec![is(3, SeccompCmpOp::MaskedEq(anonymous), 0)?])?,
                rule(vec![is(3, SeccompCmpOp::MaskedEq(uncounted), anonymous)?])?,
            ],
        ),
    ]);
    if let Some(group) = group {
        let group = group.as_raw_nonzero().get().unsigned_abs();
        let own = is(0, SeccompCmpOp::Eq, 0)?;
        let same = is(1, SeccompCmpOp::Eq, group.into())?;
        rules.insert(libc::SYS_setpgid, vec![rule(vec![own, same])?]);
    }
    let arch = std::env::consts::ARCH.try_into().ok()?;
    let refused = SeccompAction::Errno(libc::ENOSYS as u32);
    let filter = SeccompFilter::new(rules, refused, SeccompAction::Allow, arch).ok()?;
    let program: seccompiler::BpfProgram = filter.try_into().ok()?;
    let raw = |one: seccompiler::sock_filter| libc::sock_filter {
        code: one.code,
        jt: one.jt,
        jf: one.jf,
        k: one.k,
    };
    Some(program.into_iter().map(raw).collect())
}

/// The ruleset for a place; `None` where the kernel has no Landlock.
fn ruleset(place: &Place, how: CompatLevel) -> Result<Option<OwnedFd>, RulesetError> {
    let abi = ABI::V6;
    let write = AccessFs::from_file(abi) & !AccessFs::Execute;
    // A compiler makes files and directories, and nothing that leads elsewhere.
    let own = AccessFs::from_all(abi)
        & !(AccessFs::Execute
            | AccessFs::MakeSym
            | AccessFs::MakeFifo
            | AccessFs::MakeSock
            | AccessFs::MakeChar
            | AccessFs::MakeBlock);
    let programs = match place {
        Place { alone: true, .. } => LIMITER,
        Place { view: Some(_), .. } => PROGRAMS,
        _ => READ,
    };
    let created = Ruleset::default()
        .set_compatibility(how)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(programs, AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules(&place.tools, AccessFs::from_read(abi)))?
        .add_rules(path_beneath_rules(
            &place.view,
            AccessFs::ReadFile | AccessFs::ReadDir,
        ))?
        .add_rules(path_beneath_rules([&place.dir], own))?
        .add_rules(path_beneath_rules(["/dev/null"], write))?;
    Ok(created.into())
}

fn files(place: &Place) -> (Files, Option<OwnedFd>) {
    let possible = Files::of(landlock_abi());
    let how = if possible == Files::Kept {
        CompatLevel::HardRequirement
    } else {
        CompatLevel::BestEffort
    };
    match ruleset(place, how) {
        Ok(Some(rules)) => (possible, Some(rules)),
        Ok(None) => (Files::Free, None),
        Err(e) => {
            tracing::warn!("no Landlock: {e}");
            (Files::Free, None)
        }
    }
}

/// The files that a compiler may access in addition to the system's programs.
#[derive(Default)]
pub(crate) struct Place {
    /// It writes here.
    pub(crate) dir: PathBuf,
    /// It reads here: a master's headers.
    pub(crate) view: Option<PathBuf>,
    /// A folder to read and run: a compiler that is not the system's.
    pub(crate) tools: Option<PathBuf>,
    /// The compiler needs nothing else.
    pub(crate) alone: bool,
}

/// Makes the command start restricted: with a filter of its calls and with namespaces as far as `wanted` says, and with Landlock as far as the
/// kernel has it. It gets no descriptor of this process but its standard streams. It and its process group are killed with the thread that
/// starts it.
pub(crate) fn enter(
    place: &Place,
    command: &mut Command,
    filters: &Filters,
    wanted: Level,
) -> Level {
    let (files, ruleset) = files(place);
    let filter = if wanted.spaces {
        &filters.spaces
    } else {
        &filters.group
    };
    let filter = filter.clone().filter(|_| wanted.calls);
    let level = Level {
        files,
        calls: filter.is_some(),
        ..wanted
    };
    let restrictions = Restrictions { ruleset, filter };
    // Before the namespaces: there its parent has no number.
    end_with_us(keep_files(command));
    if wanted.spaces {
        in_own_spaces(command, restrictions);
    } else {
        restrict(command, restrictions);
    }
    level
}

/// The restrictions that compilers can have here: the first ones with which a program runs.
pub fn level() -> Level {
    let tried = |(calls, spaces)| {
        let wanted = Level {
            files: Files::Free,
            calls,
            spaces,
        };
        let place = Place {
            dir: std::env::temp_dir(),
            ..Place::default()
        };
        let mut command = Command::new("true");
        // A group that may be killed.
        command.stdin(Stdio::null()).env_clear().process_group(0);
        let level = enter(&place, &mut command, &Filters::new(None), wanted);
        let runs = command.status().is_ok_and(|status| status.success());
        runs.then_some(level)
    };
    let ways = [(true, true), (true, false), (false, false)];
    ways.into_iter().find_map(tried).unwrap_or(Level {
        files: Files::Free,
        calls: false,
        spaces: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_than_at_the_start_does_not_hold() {
        let level = |files, calls| Level {
            files,
            calls,
            spaces: false,
        };
        let all = level(Files::Kept, true);
        assert!(all.holds(all) && all.holds(level(Files::Partly, true)));
        assert!(level(Files::Free, false).holds(level(Files::Free, false)));
        for less in [
            level(Files::Free, true),
            level(Files::Partly, true),
            level(Files::Kept, false),
        ] {
            assert!(!less.holds(all) && !less.is_complete(), "{less}");
        }
        // A job gets the same restrictions as the first one.
        let first = super::level();
        assert!(super::level().holds(first));
    }
}
