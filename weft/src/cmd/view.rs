//! The devices in `/sys` and `/dev` for programs under `weft verbs`: by a preload library, or in a mount namespace.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sched::{CloneFlags, unshare};
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change,
    mount_remount, unmount,
};
use rustix::process::{getegid, geteuid};

use weft_cli::failure::Failure;

/// The preload library, and the folder of its files.
pub(super) const LIBRARY: &str = "libweft-sysfs.so";
pub(super) const SETTING: &str = "WEFT_SYSFS";
/// The beginning of the names of folders; the rest is user, process and its start time.
const FOLDER: &str = "weft-sysfs";
/// A program that is asked to look at the devices once.
pub(super) const LOOK: &str = "/sys/class/infiniband";

/// How programs find the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum View {
    /// A library that intercepts the program's calls of the C library
    Preload,
    /// Mounts that only the program sees, also for Go and static programs
    Namespace,
    /// Not at all
    Off,
}

/// The folder of this process. The preload library fills it at the first access, and removes it when the process ends.
pub(super) fn folder() -> Option<PathBuf> {
    let user = geteuid().as_raw();
    let shared = shared();
    sweep(&shared, user);
    let started = started(std::process::id())?;
    Some(shared.join(format!("{FOLDER}-{user}-{}-{started}", std::process::id())))
}

fn shared() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        return memory.to_owned();
    }
    std::env::temp_dir()
}

/// Removes folders of killed processes.
fn sweep(shared: &Path, user: u32) {
    let prefix = format!("{FOLDER}-{user}-");
    for entry in fs::read_dir(shared).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let gone = || {
            let (pid, start) = name.to_str()?.strip_prefix(&prefix)?.split_once('-')?;
            let (pid, start): (u32, u64) = (pid.parse().ok()?, start.parse().ok()?);
            Some(started(pid) != Some(start))
        };
        let mine = entry.metadata().is_ok_and(|about| about.uid() == user);
        if mine && gone() == Some(true) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// The start time of a process, in the kernel's ticks since boot.
fn started(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before the last bracket can be anything; it is the second field, this is the 22nd.
    text.rsplit_once(')')?
        .1
        .split_whitespace()
        .nth(19)?
        .parse()
        .ok()
}

/// Moves this process into a mount namespace in which the devices are in `/sys` and `/dev`.
///
/// # Errors
/// The kernel's error.
pub(super) fn enter(lib: &Path, settings: &[(&'static str, OsString)]) -> Result<(), Failure> {
    let wrong = |what: &str| {
        let what = format!("--sysfs=namespace: {what}");
        move |e: io::Error| Failure::failed(format!("{what}: {e}"))
    };
    // This process would take the library's files for the machine's.
    let preloaded = std::env::var("LD_PRELOAD").is_ok_and(|list| list.contains(LIBRARY));
    if preloaded {
        let what =
            "--sysfs=namespace: this is under a `weft verbs` with the preload library already";
        return Err(
            Failure::failed(what).hint("env -u LD_PRELOAD weft verbs --sysfs=namespace -- PROGRAM")
        );
    }
    separate().map_err(|e| {
        wrong("no mount namespace")(e).hint(
            "run it as root, or allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, \
             kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile that allows unshare and mount), \
             or use --sysfs=preload",
        )
    })?;
    let stage = Stage::new().map_err(|e| {
        wrong("no folder for the files")(e).hint("set TMPDIR to a folder that can be written to")
    })?;
    let tree = stage.tree(lib, settings)?;
    stage
        .lay(Path::new("/sys"), &tree.join("sys"), true)
        .and_then(|()| stage.lay(Path::new("/dev"), &tree.join("dev"), false))
        .map_err(wrong("the files cannot be mounted"))
}

/// Creates a mount namespace; together with a user namespace if this user may not create one otherwise. The user stays the same.
fn separate() -> io::Result<()> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    if unshare(CloneFlags::CLONE_NEWNS).is_err() {
        unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS)?;
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
        fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    }
    // No mount propagates back to the original namespace.
    let how = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    Ok(mount_change("/", how)?)
}

/// A file system in memory in which the mounts are prepared. Dropping it frees its place; mounts at other places stay.
struct Stage(PathBuf);

impl Stage {
    fn new() -> io::Result<Stage> {
        let name = format!("weft-stage-{}-{}", geteuid().as_raw(), std::process::id());
        let place = std::env::temp_dir().join(name);
        match fs::remove_dir(&place) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        DirBuilder::new().mode(0o700).create(&place)?;
        let flags = MountFlags::NOSUID | MountFlags::NOEXEC;
        if let Err(e) = mount("weft", &place, "tmpfs", flags, c"mode=0755,size=16m") {
            let _ = fs::remove_dir(&place);
            return Err(e.into());
        }
        Ok(Stage(place))
    }

    /// Makes the libraries write the files, in a process that has loaded them.
    fn tree(&self, lib: &Path, settings: &[(&'static str, OsString)]) -> Result<PathBuf, Failure> {
        let wrong = |what: String| Failure::failed(format!("--sysfs=namespace: {what}"));
        let program = std::env::current_exe().map_err(|e| wrong(e.to_string()))?;
        let status = Command::new(program)
            .args(["verbs", "--look"])
            .envs(settings.iter().map(|(name, value)| (name, value)))
            .env("LD_PRELOAD", lib.join(LIBRARY))
            .env(SETTING, &self.0)
            .status()
            .map_err(|e| wrong(e.to_string()))?;
        let entries = fs::read_dir(&self.0).into_iter().flatten().flatten();
        let mut trees = entries
            .map(|entry| entry.path())
            .filter(|path| path.is_dir());
        match trees.next() {
            Some(tree) if status.success() => Ok(tree),
            _ => Err(wrong(format!(
                "{} has written no files ({status})",
                lib.join(LIBRARY).display()
            ))),
        }
    }

    /// Makes the contents of `ours` appear in `real`, by mounts on the deepest folders of the machine that do not have them.
    fn lay(&self, real: &Path, ours: &Path, read_only: bool) -> io::Result<()> {
        let (mut new, mut common) = (BTreeSet::new(), Vec::new());
        for entry in fs::read_dir(ours)? {
            let (name, path) = {
                let entry = entry?;
                (entry.file_name(), entry.path())
            };
            // A link to a file of the machine is for the other way.
            if fs::read_link(&path).is_ok_and(|to| to.is_absolute() && to != Path::new("/dev/null"))
            {
                continue;
            }
            let is_folder =
                |path: &Path| fs::symlink_metadata(path).is_ok_and(|about| about.is_dir());
            if is_folder(&path) && is_folder(&real.join(&name)) {
                common.push(name);
            } else {
                new.insert(name);
            }
        }
        if !new.is_empty() {
            let whole = self
                .0
                .join(format!("on{}", real.display()).replace('/', "-"));
            fs::create_dir(&whole)?;
            // Independent of the umask: it replaces a folder that all users can read.
            fs::set_permissions(&whole, fs::Permissions::from_mode(0o755))?;
            for entry in fs::read_dir(real)? {
                let entry = entry?;
                if !new.contains(&entry.file_name()) {
                    keep(&entry.path(), &whole.join(entry.file_name()))?;
                }
            }
            for name in new {
                fs::rename(ours.join(&name), whole.join(name))?;
            }
            mount_bind_recursive(&whole, real)?;
            if read_only {
                mount_remount(real, MountFlags::BIND | MountFlags::RDONLY, c"")?;
            }
        }
        for name in common {
            self.lay(&real.join(&name), &ours.join(&name), read_only)?;
        }
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}

/// Makes an entry of the machine appear at another place. Entries that the kernel does not let us mount are left out.
fn keep(from: &Path, to: &Path) -> io::Result<()> {
    let about = fs::symlink_metadata(from)?;
    if about.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if about.is_dir() {
        fs::create_dir(to)?;
    } else {
        File::create_new(to)?;
    }
    if mount_bind_recursive(from, to).is_err() {
        return if about.is_dir() {
            fs::remove_dir(to)
        } else {
            fs::remove_file(to)
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_process_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let user = geteuid().as_raw();
        let start = started(std::process::id()).unwrap();
        let names = [
            format!("weft-sysfs-{user}-{}-{start}", std::process::id()),
            format!("weft-sysfs-{user}-{}-{}", std::process::id(), start + 1),
            format!("weft-sysfs-{user}-4194400-1"),
            format!("weft-sysfs-{user}"),
            format!("weft-sysfs-{user}-x-1"),
        ];
        for name in &names {
            fs::create_dir_all(dir.path().join(name).join("tree/sys")).unwrap();
        }
        sweep(dir.path(), user);
        let left = names.map(|name| dir.path().join(name).exists());
        assert_eq!(left, [true, false, false, true, true]);
    }
}
