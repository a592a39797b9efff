//! What two processes of this host and user need to meet in shared memory, and whether they do.

use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::fs::{MemfdFlags, OFlags, SealFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{DumpableBehavior, Resource, getrlimit};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::settings;
use weft_verbs::{
    Access, Cq, Device, LocalMode, Qp, QpInit, RemoteAddr, SendWr, Sge, Wc, WcStatus,
};

use super::{Check, Failed};
use crate::cp;

const SLOWER: &str = "processes of this host talk over loopback TCP, several times slower";
/// Bytes that the peer writes and reads back: enough for any way of copying.
const LEN: usize = 64 << 10;

/// Who the peer of the same-host check is.
#[derive(Debug, Clone, Copy)]
pub enum Peer<'a> {
    /// Another process, of this program: `PROGRAM doctor --peer ADDR`.
    Program(&'a Path),
    /// A thread of our own: other processes' rights are not tried then.
    Thread,
}

/// The checks, from what is needed to whether it works.
pub fn checks(peer: Peer<'_>) -> Vec<Check> {
    vec![
        environment(),
        memory_files(),
        memory_limits(),
        huge_pages(fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()),
        sockets(),
        dumpable(),
        transport(peer),
    ]
}

fn environment() -> Check {
    const NAME: &str = "WEFT_LOCAL";
    match LocalMode::from_env() {
        Ok(LocalMode::Off) => Check::warn(
            NAME,
            "off",
            SLOWER,
            "unset WEFT_LOCAL, where peers of the same user are trusted",
        ),
        Err(e) => Check::missing(
            NAME,
            e.to_string(),
            "no program can open the soft RNIC",
            "unset WEFT_LOCAL, or set it to off, auto or require",
        ),
        Ok(mode) => {
            let mode = match mode {
                LocalMode::Require => "require: connections that would stay on TCP fail",
                _ => "auto",
            };
            let Some(dir) = settings::LOCAL_DIR.path() else {
                return Check::ok(NAME, mode);
            };
            let finding = format!("{mode}; WEFT_LOCAL_DIR is {}", dir.display());
            match usable(&dir) {
                Ok(()) => Check::ok(NAME, finding),
                Err(e) => Check::warn(
                    NAME,
                    format!("{finding}: {e}"),
                    "containers that share only a directory do not meet in shared memory",
                    "name a directory that both sides can write to, with a path of at most 50 characters",
                ),
            }
        }
    }
}

/// Whether listeners can make sockets there.
fn usable(dir: &Path) -> io::Result<()> {
    // sun_path has 108 bytes; the longest file name is that of an IPv6 address.
    if dir.as_os_str().as_bytes().len() > 50 {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "the path is too long for a socket's name",
        ));
    }
    let probe = dir.join(format!("weft-doctor-{}", std::process::id()));
    fs::File::create_new(&probe)?;
    fs::remove_file(&probe)
}

fn memory_files() -> Check {
    const NAME: &str = "memory files";
    match memory_file() {
        Ok(()) => Check::ok(NAME, "memfd_create, seals and /proc/self/fd work"),
        Err(e) => Check::warn(
            NAME,
            format!("no sealed memory file that others cannot write to: {e}"),
            SLOWER,
            "use Linux 5.1 or later, mount /proc, and allow memfd_create (seccomp, sandbox)",
        ),
    }
}

fn memory_file() -> io::Result<()> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("weft-doctor", flags)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&fd, seals)?;
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    Ok(())
}

fn memory_limits() -> Check {
    const NAME: &str = "shared memory limits";
    /// Length of an arena, nearly all of it a hole.
    const ARENA: u64 = 1 << 46;
    let file = getrlimit(Resource::Fsize).current;
    let space = getrlimit(Resource::As).current;
    if let Some(limit) = file.filter(|limit| *limit < ARENA) {
        return Check::warn(
            NAME,
            format!("files may have {limit} bytes at most (RLIMIT_FSIZE)"),
            SLOWER,
            "`ulimit -f unlimited`, or LimitFSIZE=infinity of the service: arenas are long files with hardly anything in them",
        );
    }
    if let Some(limit) = space {
        return Check::warn(
            NAME,
            format!("{} MiB of address space (RLIMIT_AS)", limit >> 20),
            "a peer's memory counts in full when it is mapped: connections fall back to TCP when it does not fit",
            "`ulimit -v unlimited`",
        );
    }
    let cgroup = fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
    Check::ok(
        NAME,
        match cgroup.trim() {
            "" | "max" => "none; memory files do not count towards /dev/shm".to_owned(),
            most => format!("{most} bytes of memory in this control group, memory files included"),
        },
    )
}

/// `modes`: what the kernel says of transparent huge pages, the one that applies in brackets.
fn huge_pages(modes: Option<String>) -> Check {
    const NAME: &str = "huge pages";
    match modes {
        Some(modes) if !modes.contains("[never]") => Check::ok(
            NAME,
            "registered memory of 2 MiB and more gets them as it is touched",
        ),
        modes => Check::warn(
            NAME,
            match modes {
                Some(_) => "off (transparent_hugepage/enabled is never)",
                None => "this kernel has no transparent ones, or does not say",
            },
            "messages of a MiB and more between programs of this host take a fifth longer",
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
        ),
    }
}

fn sockets() -> Check {
    const NAME: &str = "abstract Unix sockets";
    match meet() {
        Ok(()) => Check::ok(NAME, "work"),
        Err(e) => Check::warn(
            NAME,
            format!("cannot be used: {e}"),
            SLOWER,
            "allow Unix sockets of type SOCK_SEQPACKET (seccomp, AppArmor, Landlock), or set WEFT_LOCAL_DIR",
        ),
    }
}

fn meet() -> io::Result<()> {
    let socket = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
    };
    let name = format!("weft-doctor/{}", std::process::id());
    let addr = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
    let (listener, caller) = (socket()?, socket()?);
    rustix::net::bind(&listener, &addr)?;
    rustix::net::listen(&listener, 1)?;
    rustix::net::connect(&caller, &addr)?;
    rustix::net::accept(&listener)?;
    Ok(())
}

fn dumpable() -> Check {
    const NAME: &str = "dumpable";
    match rustix::process::dumpable_behavior() {
        Ok(DumpableBehavior::Dumpable) => {
            Check::ok(NAME, "yes: peers of the same user may read our memory")
        }
        _ => Check::warn(
            NAME,
            "no: the kernel keeps other processes out of our memory",
            "memory that is not the library's own is copied once more",
            "start the program without set-user-ID and file capabilities, from a file that the user may read",
        ),
    }
}

/// What a peer found out about us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    transport: String,
    reason: Option<String>,
    /// It wrote to and read from memory of the library's by itself.
    mapped: bool,
    /// The same with memory that the program brought.
    process: bool,
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = self.reason.as_deref().unwrap_or_default();
        write!(
            f,
            "{} {} {} {reason}",
            self.transport, self.mapped, self.process
        )
    }
}

impl Probe {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(4, ' ');
        Some(Self {
            transport: words.next()?.to_owned(),
            mapped: words.next()?.parse().ok()?,
            process: words.next()?.parse().ok()?,
            reason: words.next().filter(|r| !r.is_empty()).map(str::to_owned),
        })
    }
}

fn transport(peer: Peer<'_>) -> Check {
    const NAME: &str = "same-host transport";
    const REMEDY: &str = "see the checks above: memory files, limits, sockets";
    if super::lacks_descriptors() {
        return Check::warn(
            NAME,
            "not tried: the limit on file descriptors is too low",
            SLOWER,
            super::MORE_DESCRIPTORS,
        );
    }
    let probe = match serve(peer) {
        Ok(probe) => probe,
        Err(e) => {
            return Check::warn(
                NAME,
                format!("two processes of this host could not be connected: {e}"),
                "perhaps nothing of weft works between processes of this host",
                "bring the loopback interface up (`ip link set lo up`); else set WEFT_LOCAL=off, and please report what `weft -vv doctor` says",
            );
        }
    };
    match probe {
        Probe {
            transport, reason, ..
        } if transport != "local" => Check::warn(
            NAME,
            format!(
                "two processes of this host stayed on TCP: {}",
                reason.as_deref().unwrap_or("no reason is known")
            ),
            SLOWER,
            match &reason {
                Some(reason) if reason.contains("another user") => {
                    "run both as a user of this machine"
                }
                _ => REMEDY,
            },
        ),
        Probe { mapped: false, .. } => Check::warn(
            NAME,
            "rings in shared memory work; the peer does not reach mapped memory",
            "one-sided operations need the target's help and one copy more",
            REMEDY,
        ),
        Probe { process: false, .. } => Check::warn(
            NAME,
            "rings and mapped memory work; process_vm does not",
            "memory that is not the library's own is copied once more",
            "sysctl kernel.yama.ptrace_scope=0, --cap-add SYS_PTRACE (containers), or let the library allocate the regions",
        ),
        _ => Check::ok(NAME, "rings, mapped memory and process_vm work"),
    }
}

/// A listener with two regions, and what the peer makes of it.
fn serve(peer: Peer<'_>) -> Result<Probe, Failed> {
    let device = Device::builder().local(LocalMode::Auto).open()?;
    let (pd, cq) = (device.alloc_pd()?, device.create_cq(16, None)?);
    let here = (Ipv4Addr::LOCALHOST, 0).into();
    let listener = cm::Listener::bind(&device, here, 1, &ConnParam::default())?;
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    let regions = [pd.alloc_mr(LEN, access)?, pd.reg_mr(vec![0; LEN], access)?];
    let param = ConnParam {
        private_data: regions
            .iter()
            .flat_map(|mr| mr.remote(0).rkey.to_le_bytes())
            .collect(),
        ..ConnParam::default()
    };
    let init = QpInit::new(&cq, &cq);
    let addr = listener.local_addr();
    std::thread::scope(|scope| {
        let accepting = scope.spawn(|| -> Result<_, Failed> {
            let request = listener
                .next_request(Some(cp::START_PATIENCE))
                .ok_or("no request came")?;
            Ok(request.accept(pd.create_qp(&init)?, &param)?)
        });
        let probe = match peer {
            Peer::Thread => probe(addr),
            Peer::Program(program) => run(program, addr),
        };
        let accepted = accepting
            .join()
            .map_err(|_| "the accepting thread panicked")?;
        let probe = probe?;
        let _connection = accepted?;
        Ok(probe)
    })
}

fn run(program: &Path, addr: SocketAddr) -> Result<Probe, Failed> {
    let out = Command::new(program)
        .args(["doctor", "--peer", &addr.to_string()])
        .env_remove("WEFT_LOCAL")
        .output()?;
    let text = String::from_utf8_lossy(&out.stdout);
    Probe::parse(text.trim_end())
        .ok_or_else(|| first_line(&String::from_utf8_lossy(&out.stderr)).into())
}

/// What a `weft` said that failed, without its name and its advice: the check has an advice of its own.
fn first_line(said: &str) -> &str {
    let line = said.lines().find(|line| !line.trim().is_empty());
    let line = line.unwrap_or("it said nothing");
    line.strip_prefix("weft: ").unwrap_or(line)
}

/// The peer's part: connect, and see which of the other side's memory can be reached without its help.
pub fn probe(addr: SocketAddr) -> Result<Probe, Failed> {
    let device = Device::builder().local(LocalMode::Auto).open()?;
    let (pd, cq) = (device.alloc_pd()?, device.create_cq(16, None)?);
    let buffer = pd.alloc_mr(LEN, Access::LOCAL_WRITE)?;
    buffer.fill(0, LEN, 0x5a)?;
    let connection = cm::connect(addr, &pd, &QpInit::new(&cq, &cq), &ConnParam::default())?;
    let path = connection.qp.path().ok_or("no connection")?;
    let (keys, _) = connection.private_data.as_chunks();
    let [mapped, process] = *keys else {
        return Err("what listens there is not `weft doctor`".into());
    };
    let reach = |key| {
        // The first operations can go by the ring, while the region's mapping is on its way.
        for _ in 0..20 {
            if reaches(&connection.qp, &cq, buffer.whole(), u32::from_le_bytes(key))? {
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok::<_, Failed>(false)
    };
    Ok(Probe {
        mapped: reach(mapped)?,
        process: reach(process)?,
        transport: path.transport.to_owned(),
        reason: path.reason,
    })
}

/// Write to a region and read it; whether that was done without its owner.
fn reaches(qp: &Qp, cq: &Cq, buffer: Sge, rkey: u32) -> Result<bool, Failed> {
    let before = qp.counters().one_sided;
    let remote = RemoteAddr { addr: 0, rkey };
    qp.post_send(&[
        SendWr::write(1, remote).sge(buffer),
        SendWr::read(2, remote).sge(buffer).signaled(),
    ])?;
    let mut wc = [Wc::default()];
    if cq.wait(&mut wc, Some(cp::START_PATIENCE))? == 0 {
        return Err("no completion came".into());
    }
    if wc[0].status != WcStatus::Success {
        return Err(wc[0].status.to_string().into());
    }
    Ok(qp.counters().one_sided - before == 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Verdict;

    #[test]
    fn huge_pages_are_off_where_the_kernel_says_never() {
        let verdict = |modes: &str| huge_pages(Some(modes.to_owned())).verdict;
        assert_eq!(verdict("always [madvise] never\n"), Verdict::Ok);
        assert_eq!(verdict("[always] madvise never\n"), Verdict::Ok);
        assert_eq!(verdict("always madvise [never]\n"), Verdict::Warn);
        assert_eq!(huge_pages(None).verdict, Verdict::Warn);
    }

    #[test]
    fn what_a_peer_says_is_understood() {
        let probe = Probe {
            transport: "tcp".into(),
            reason: Some("the peer runs as another user".into()),
            mapped: false,
            process: true,
        };
        assert_eq!(Probe::parse(&probe.to_string()), Some(probe.clone()));
        let probe = Probe {
            reason: None,
            ..probe
        };
        assert_eq!(Probe::parse(probe.to_string().trim_end()), Some(probe));
        assert_eq!(Probe::parse("weft: no such address"), None);
    }

    #[test]
    fn advice_of_the_peer_is_left_out() {
        let said = "\nweft: the address cannot be reached\n  try: look at `ip link`\n";
        assert_eq!(first_line(said), "the address cannot be reached");
    }

    #[test]
    fn directories_for_sockets() {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        usable(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(usable(&dir.path().join("missing")).is_err());
        assert!(usable(&dir.path().join("x".repeat(60))).is_err());
    }
}
