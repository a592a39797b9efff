//! The sandbox of a worker's compilers: they can read the system's programs, write in their own directory, and open no connection.
//!
//! Landlock and seccomp restrict a thread and the processes that it starts, so each job starts its compiler from a thread of its own, which is
//! restricted first.

use std::collections::BTreeMap;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::process::Pid;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
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

/// The system calls that compilers may not make.
const FORBIDDEN: &[libc::c_long] = calls! {
    SYS_socket SYS_connect SYS_bind SYS_ptrace SYS_process_vm_readv SYS_process_vm_writev SYS_mount SYS_umount2 SYS_fsopen SYS_fsmount SYS_fspick
    SYS_move_mount SYS_open_tree SYS_mount_setattr SYS_pivot_root SYS_chroot SYS_unshare SYS_setns SYS_setsid SYS_bpf SYS_perf_event_open
    SYS_userfaultfd SYS_io_uring_setup SYS_keyctl SYS_add_key SYS_request_key SYS_kexec_load SYS_init_module SYS_finit_module SYS_delete_module
    SYS_open_by_handle_at SYS_reboot SYS_swapon SYS_swapoff SYS_shmget SYS_msgget SYS_semget
};

/// The restrictions of compilers that the kernel supports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level {
    /// Landlock: files and signals.
    pub files: bool,
    /// Seccomp: system calls, among them sockets.
    pub calls: bool,
}

impl Level {
    /// Whether this includes all restrictions of the other.
    pub(crate) fn holds(self, other: Self) -> bool {
        self.files >= other.files && self.calls >= other.calls
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match (self.files, self.calls) {
            (true, true) => "Landlock and seccomp",
            (true, false) => "Landlock alone",
            (false, true) => "seccomp alone",
            (false, false) => "nothing: this kernel has neither Landlock nor seccomp",
        })
    }
}

/// The allowed system calls of compilers, in the kernel's form.
pub(crate) struct Filters(Option<[BpfProgram; 2]>);

impl Filters {
    /// Children may join the process group `group` and no other.
    pub(crate) fn new(group: Option<Pid>) -> Self {
        // `clone3` keeps its flags in memory, which no filter reads; a program that gets `ENOSYS` uses `clone`.
        let without = filter_of(
            BTreeMap::from([(libc::SYS_clone3, Vec::new())]),
            libc::ENOSYS,
        );
        Self(without.zip(filter(group)).map(|(a, b)| [a, b]))
    }
}

/// Every process stays in the group `group`, so that one signal ends all of them.
fn filter(group: Option<Pid>) -> Option<BpfProgram> {
    let mut rules: BTreeMap<i64, Vec<_>> =
        FORBIDDEN.iter().map(|&call| (call, Vec::new())).collect();
    let not = |argument, value| {
        let other =
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, value);
        SeccompRule::new(vec![other.ok()?]).ok()
    };
    let group = group.map_or(0, |group| group.as_raw_nonzero().get().unsigned_abs());
    rules.insert(libc::SYS_setpgid, vec![not(0, 0)?, not(1, group.into())?]);
    // No name spaces: a process that is root in one of its own reaches more of the kernel.
    let spaces = libc::CLONE_NEWUSER as u64;
    let make = SeccompCmpOp::MaskedEq(spaces);
    let user = SeccompCondition::new(0, SeccompCmpArgLen::Dword, make, spaces).ok()?;
    rules.insert(libc::SYS_clone, vec![SeccompRule::new(vec![user]).ok()?]);
    // The same calls by the numbers of x32, for which the kernel reports the same architecture.
    if cfg!(target_arch = "x86_64") {
        let x32: Vec<_> = rules
            .iter()
            .map(|(call, rule)| (call | 1 << 30, rule.clone()))
            .collect();
        rules.extend(x32);
        // And those that have numbers of their own there: ptrace, process_vm_readv, process_vm_writev, kexec_load.
        rules.extend([521, 539, 540, 528].map(|call| (call | 1 << 30, Vec::new())));
    }
    filter_of(rules, libc::EACCES)
}

/// Calls that these rules match fail with this error.
fn filter_of(rules: BTreeMap<i64, Vec<SeccompRule>>, errno: i32) -> Option<BpfProgram> {
    let arch = std::env::consts::ARCH.try_into().ok()?;
    let refused = SeccompAction::Errno(errno as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, arch).ok()?;
    filter.try_into().ok()
}

fn files(place: &Place) -> Result<bool, landlock::RulesetError> {
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
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
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
        .add_rules(path_beneath_rules(["/dev/null"], write))?
        .restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
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

/// Restricts this thread, and the processes that it starts, permanently.
pub(crate) fn enter(place: &Place, filters: &Filters) -> Level {
    let files = files(place).unwrap_or_else(|e| {
        tracing::warn!("no Landlock: {e}");
        false
    });
    let apply = |filter| seccompiler::apply_filter(filter).is_ok();
    let calls = filters
        .0
        .as_ref()
        .is_some_and(|filters| filters.iter().all(|filter| apply(filter)));
    Level { files, calls }
}

/// The result that `enter` would have, tried on a thread that ends at once.
pub fn level() -> Level {
    let dir = std::env::temp_dir();
    let enter = move || {
        let place = Place {
            dir,
            ..Place::default()
        };
        enter(&place, &Filters::new(None))
    };
    std::thread::spawn(enter).join().unwrap_or(Level {
        files: false,
        calls: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn less_than_at_the_start_does_not_hold() {
        let level = |files, calls| Level { files, calls };
        let all = level(true, true);
        assert!(all.holds(all) && all.holds(level(false, true)));
        assert!(level(false, false).holds(level(false, false)));
        assert!(!level(false, true).holds(all) && !level(true, false).holds(all));
        // A thread gets the same restrictions as the first one.
        let first = super::level();
        assert!(super::level().holds(first));
    }
}
