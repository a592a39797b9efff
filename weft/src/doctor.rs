//! What weft needs of this machine, and what to do where something is missing.

pub mod rnic;
pub mod same_host;
pub mod selftest;

use std::borrow::Cow;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use comfy_table::{ContentArrangement, Table, presets};
use rustix::process::{Resource, getrlimit};
use weft_verbs::cm::{self, ConnParam};
use weft_verbs::{Access, Device, LocalMode, QpInit, SendWr, Wc, WcStatus};

use crate::cp;
use weft_cli::failure::{self, MORE_DESCRIPTORS};
use weft_cli::terminal;

/// How a check came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// All that weft wants.
    Ok,
    /// Works, at a cost.
    Warn,
    /// Essential, and not there.
    Missing,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "OK",
            Self::Warn => "WARN",
            Self::Missing => "MISSING",
        }
    }
}

/// One check.
#[derive(Debug, Clone)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub verdict: Verdict,
    /// What was found.
    pub finding: String,
    /// What does not work, or is slower, for that reason; empty when all is well.
    pub cost: &'static str,
    /// What to do about it; empty when all is well.
    pub remedy: Cow<'static, str>,
}

impl Check {
    fn ok(name: &'static str, finding: impl Into<String>) -> Self {
        Self {
            verdict: Verdict::Ok,
            ..Self::warn(name, finding, "", "")
        }
    }

    fn warn(
        name: &'static str,
        finding: impl Into<String>,
        cost: &'static str,
        remedy: &'static str,
    ) -> Self {
        let finding = finding.into();
        Self {
            name,
            verdict: Verdict::Warn,
            remedy: failure::shortage(&finding).unwrap_or(remedy).into(),
            finding: failure::without_numbers(&finding),
            cost,
        }
    }

    fn missing(
        name: &'static str,
        finding: impl Into<String>,
        cost: &'static str,
        remedy: &'static str,
    ) -> Self {
        Self {
            verdict: Verdict::Missing,
            ..Self::warn(name, finding, cost, remedy)
        }
    }

    /// The check as a JSON object.
    pub fn json(&self) -> String {
        serde_json::json!({
            "check": self.name,
            "verdict": self.verdict.name(),
            "finding": self.finding,
            "cost": self.cost,
            "remedy": self.remedy,
        })
        .to_string()
    }
}

/// Why a check could not be made.
pub type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Runs every check; `peer` is who the same-host transport is tried with, `ports` are those of subcommands.
pub fn all(peer: same_host::Peer<'_>, ports: &[(&'static str, u16)]) -> Vec<Check> {
    let mut checks = vec![
        rdma(),
        cpus(),
        crc32c(),
        memory_access(),
        memlock(),
        descriptors(),
        io_uring(),
        ipv6(),
    ];
    checks.extend(rnic::checks());
    checks.extend(same_host::checks(peer));
    checks.extend(ports.iter().map(|(name, number)| port(name, *number)));
    checks.extend(mtus());
    checks.push(user_namespaces());
    checks
}

/// The checks as a table for humans.
pub fn table(checks: &[Check]) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::UTF8_BORDERS_ONLY)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(terminal::width().map_or(110, |width| width.min(110)))
        .set_header(["check", "verdict", "what was found"]);
    for check in checks {
        let mut finding = check.finding.clone();
        if !check.cost.is_empty() {
            finding = format!("{finding}\ncost: {}\ntry: {}", check.cost, check.remedy);
        }
        table.add_row([check.name, check.verdict.name(), &finding]);
    }
    weft_report::terminal::in_locale(&table.to_string()).into_owned()
}

/// Descriptors that both ends of a connection and their devices take, with some to spare.
const ESSENTIAL_DESCRIPTORS: u64 = 64;

/// Whether this process has too few descriptors for a connection to be tried at all.
fn lacks_descriptors() -> bool {
    getrlimit(Resource::Nofile)
        .current
        .is_some_and(|limit| limit < ESSENTIAL_DESCRIPTORS)
}

/// The one essential: a connection to ourselves and a one-sided Write over it.
fn rdma() -> Check {
    const NAME: &str = "RDMA over loopback";
    const COST: &str = "nothing of weft works";
    if lacks_descriptors() {
        return Check::missing(
            NAME,
            "not tried: the limit on file descriptors is too low",
            COST,
            MORE_DESCRIPTORS,
        );
    }
    let Err(e) = write_to_self() else {
        return Check::ok(NAME, "a connection to this machine carried an RDMA Write");
    };
    let remedy = if LocalMode::from_env().is_err() {
        "unset WEFT_LOCAL, or set it to off, auto or require"
    } else {
        "check that the loopback interface is up and that sockets and epoll are allowed (seccomp, sandbox)"
    };
    Check::missing(
        NAME,
        format!("an RDMA Write to this machine failed: {e}"),
        COST,
        remedy,
    )
}

fn write_to_self() -> Result<(), Box<dyn std::error::Error>> {
    let device = Device::open()?;
    let (pd, cq) = (device.alloc_pd()?, device.create_cq(16, None)?);
    let listener = cm::Listener::bind(
        &device,
        (Ipv4Addr::LOCALHOST, 0).into(),
        1,
        &ConnParam::default(),
    )?;
    let target = pd.alloc_mr(
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
    )?;
    let addr = listener.local_addr();
    let init = QpInit::new(&cq, &cq);
    std::thread::scope(|scope| -> Result<(), Box<dyn std::error::Error>> {
        let accepting = scope.spawn(|| -> Result<_, Box<dyn std::error::Error + Send + Sync>> {
            let request = listener
                .next_request(Some(cp::START_PATIENCE))
                .ok_or("no request came")?;
            let qp = pd.create_qp(&init)?;
            Ok(request.accept(qp, &ConnParam::default())?)
        });
        let connection = cm::connect(addr, &pd, &init, &ConnParam::default())?;
        let _accepted = accepting
            .join()
            .map_err(|_| "the accepting thread panicked")?
            .map_err(|e| e.to_string())?;
        let source = pd.alloc_mr(4096, Access::LOCAL_WRITE)?;
        source.fill(0, 4096, 0x5a)?;
        connection.qp.post_send(&[
            SendWr::write(1, target.remote(0)).sge(source.whole()),
            // Reading back proves that the Write has been placed.
            SendWr::read(2, target.remote(0))
                .sge(source.whole())
                .signaled(),
        ])?;
        let mut wc = [Wc::default()];
        if cq.wait(&mut wc, Some(cp::START_PATIENCE))? == 0 {
            return Err("no completion came".into());
        }
        if wc[0].status != WcStatus::Success {
            return Err(wc[0].status.to_string().into());
        }
        if target.load_u8(4095)? == 0x5a {
            Ok(())
        } else {
            Err("the bytes are not there".into())
        }
    })
}

fn cpus() -> Check {
    let n = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    if n > 1 {
        Check::ok("CPUs", format!("{n}"))
    } else {
        Check::warn(
            "CPUs",
            "1",
            "peers on this machine take turns: polling does not help, a message costs a switch of tasks",
            "give the machine or container a second CPU",
        )
    }
}

fn crc32c() -> Check {
    #[cfg(target_arch = "x86_64")]
    let (hardware, fast) = (
        is_x86_feature_detected!("sse4.2"),
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq"),
    );
    #[cfg(target_arch = "aarch64")]
    let (hardware, fast) = (
        std::arch::is_aarch64_feature_detected!("crc"),
        std::arch::is_aarch64_feature_detected!("aes"),
    );
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let (hardware, fast) = (false, false);
    match (hardware, fast) {
        (true, true) => Check::ok("CRC32C", "the processor computes it, with wide vectors"),
        (true, false) => Check::ok("CRC32C", "the processor computes it"),
        (false, _) => Check::warn(
            "CRC32C",
            "in software",
            "checksums of FPDUs take most of the CPU time of a transfer",
            "leave the CRC off where both ends and the network are trusted (the default of `weft cp`)",
        ),
    }
}

/// Kills its child when dropped.
struct Sleeper(Child);

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `/proc/PID/mem` asks the kernel the same question as `process_vm_readv` (`ptrace_may_access`).
fn read_child() -> std::io::Result<()> {
    let child = Command::new("sleep")
        .arg("60")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()?;
    let child = Sleeper(child);
    let pid = child.0.id();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let address = maps
        .split('-')
        .next()
        .and_then(|a| u64::from_str_radix(a, 16).ok());
    let address = address.ok_or(std::io::ErrorKind::InvalidData)?;
    let mut mem = fs::File::open(format!("/proc/{pid}/mem"))?;
    mem.seek(SeekFrom::Start(address))?;
    mem.read_exact(&mut [0; 16])
}

fn read_number(path: &str) -> Option<i64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Whether a seccomp filter is in force, which may forbid single system calls.
fn filtered() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status
        .lines()
        .any(|l| l.strip_prefix("Seccomp:").is_some_and(|v| v.trim() == "2"))
}

fn memory_access() -> Check {
    const NAME: &str = "same-user memory access";
    const COST: &str = "processes of one host cannot copy straight from each other's memory; \
                        memory that is not the library's own is copied once more";
    let scope = read_number("/proc/sys/kernel/yama/ptrace_scope");
    let root = rustix::process::geteuid().is_root();
    match (read_child(), scope) {
        (Err(e), _) => Check::warn(
            NAME,
            format!("the memory of a child cannot be read: {e}"),
            COST,
            "run with --cap-add SYS_PTRACE (containers), and with the same user on both sides",
        ),
        (Ok(()), Some(scope @ 1..)) if !root => Check::warn(
            NAME,
            format!("yama's ptrace_scope is {scope}: only for children"),
            COST,
            "sysctl kernel.yama.ptrace_scope=0, where other programs of the same user are trusted",
        ),
        (Ok(()), _) if filtered() => Check::ok(
            NAME,
            "allowed, though a seccomp filter is in force and may forbid process_vm_readv",
        ),
        (Ok(()), _) => Check::ok(NAME, "allowed"),
    }
}

fn memlock() -> Check {
    let limit = match getrlimit(Resource::Memlock).current {
        None => "no limit".to_owned(),
        Some(bytes) => format!("{} KiB", bytes / 1024),
    };
    Check::ok(
        "memlock limit",
        format!(
            "{limit}; the soft RNIC registers memory without locking it, except by the lock option; an RNIC locks all that is registered on it"
        ),
    )
}

fn descriptors() -> Check {
    let limit = getrlimit(Resource::Nofile);
    let show = |v: Option<u64>| v.map_or("no limit".to_owned(), |n| n.to_string());
    let finding = format!(
        "{} now, {} at most; a connection takes one, with a peer of this host two",
        show(limit.current),
        show(limit.maximum)
    );
    if lacks_descriptors() {
        return Check::missing(
            "file descriptors",
            finding,
            "nothing of weft works",
            MORE_DESCRIPTORS,
        );
    }
    if limit.maximum.is_none_or(|n| n >= 4096) {
        Check::ok("file descriptors", finding)
    } else {
        Check::warn(
            "file descriptors",
            finding,
            "fewer connections in one process",
            "raise the hard limit: `ulimit -Hn 65536` as root, or LimitNOFILE= of the service",
        )
    }
}

fn io_uring() -> Check {
    const COST: &str =
        "none today: weft uses epoll; a later transport over io_uring would stay off here";
    const REMEDY: &str = "sysctl kernel.io_uring_disabled=0, where local users are trusted";
    match read_number("/proc/sys/kernel/io_uring_disabled") {
        Some(0) if filtered() => Check::ok(
            "io_uring",
            "the kernel allows it; a seccomp filter is in force and may forbid it",
        ),
        Some(0) => Check::ok("io_uring", "the kernel allows it"),
        Some(1) if rustix::process::geteuid().is_root() => {
            Check::ok("io_uring", "allowed for root and its group")
        }
        Some(_) => Check::warn("io_uring", "the kernel forbids it", COST, REMEDY),
        // Kernels before 6.6 have no switch, those before 5.1 no io_uring.
        None if fs::exists("/proc/sys/kernel/io_uring_group").unwrap_or(false) => {
            Check::ok("io_uring", "the kernel allows it")
        }
        None => Check::ok(
            "io_uring",
            "this kernel has no switch for it; not used by weft today",
        ),
    }
}

fn ipv6() -> Check {
    match TcpListener::bind((Ipv6Addr::LOCALHOST, 0)) {
        Ok(_) => Check::ok("IPv6", "the loopback address ::1 can be used"),
        Err(e) => Check::warn(
            "IPv6",
            format!("::1 cannot be used: {e}"),
            "peers that have only IPv6 addresses cannot be reached",
            "bring the loopback interface up (`ip link set lo up`); sysctl net.ipv6.conf.all.disable_ipv6=0, or the container's IPv6 option",
        ),
    }
}

fn port(name: &'static str, port: u16) -> Check {
    match TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port))) {
        Ok(_) => Check::ok(name, format!("{port} is free")),
        Err(e) => Check::warn(
            name,
            format!("{port} cannot be bound: {e}"),
            "the default port does not work; perhaps weft itself uses it",
            "give another port, or stop the program that has it (`ss -ltnp`)",
        ),
    }
}

fn mtus() -> Vec<Check> {
    // /sys shows the network namespace that it was mounted in, /proc the one of this process.
    let ours = fs::read_to_string("/proc/self/net/dev");
    let is_ours = |name: &str| {
        ours.as_ref().map_or(true, |list| {
            list.lines()
                .any(|line| line.trim_start().split(':').next() == Some(name))
        })
    };
    let mut names: Vec<_> = fs::read_dir("/sys/class/net")
        .map(|list| {
            list.filter_map(|e| e.ok()?.file_name().into_string().ok())
                .filter(|name| is_ours(name))
                .collect()
        })
        .unwrap_or_default();
    names.sort();
    let mut found = Vec::new();
    let mut small = false;
    for name in names {
        let base = format!("/sys/class/net/{name}");
        let up = fs::read_to_string(format!("{base}/operstate")).is_ok_and(|s| s.trim() != "down");
        if let Some(mtu) = read_number(&format!("{base}/mtu")).filter(|_| up) {
            small |= mtu < 1280;
            found.push(format!("{name} {mtu}"));
        }
    }
    let finding = found.join(", ");
    let check = if found.is_empty() {
        Check::warn(
            "MTU",
            "no interface is up, or /sys is not there",
            "perhaps no peer can be reached",
            "mount /sys, or look with `ip link`",
        )
    } else if small {
        Check::warn(
            "MTU",
            finding,
            "FPDUs are cut into many segments, and IPv6 does not work below 1280",
            "raise the interface's MTU: `ip link set DEV mtu 1500`",
        )
    } else {
        Check::ok("MTU", finding)
    };
    vec![check]
}

fn user_namespaces() -> Check {
    let most = read_number("/proc/sys/user/max_user_namespaces");
    let clone = read_number("/proc/sys/kernel/unprivileged_userns_clone");
    let apparmor = read_number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns");
    if most.is_some_and(|n| n > 0) && clone != Some(0) && apparmor != Some(1) {
        Check::ok("user namespaces", "allowed (optional)")
    } else {
        Check::warn(
            "user namespaces",
            "not for unprivileged users (optional)",
            "some tests that make their own network are skipped",
            "run these tests as root",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_lack_has_its_cost_and_remedy() {
        let checks = all(same_host::Peer::Thread, &[]);
        assert!(checks.len() >= 16);
        for check in &checks {
            assert!(!check.finding.is_empty(), "{}", check.name);
            let lack = check.verdict != Verdict::Ok;
            assert_eq!(
                (check.cost.is_empty(), check.remedy.is_empty()),
                (!lack, !lack),
                "{}",
                check.name
            );
            let json: serde_json::Value = serde_json::from_str(&check.json()).unwrap();
            assert_eq!(json["check"], check.name);
        }
        assert_eq!(checks[0].verdict, Verdict::Ok, "{}", checks[0].finding);
        let text = table(&checks);
        assert!(checks.iter().all(|c| text.contains(c.name)));
    }
}
