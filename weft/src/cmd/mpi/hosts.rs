//! The hosts of a job, before it begins: whether each has this weft and its libraries, and whether packets pass between any two of them.
//!
//! On each host runs `weft mpi --there` ([`super::there`]), started as the MPI will start its own programs: here as a child, elsewhere by ssh. Both ends speak
//! in lines over its standard input and output.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::str::FromStr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use weft_cli::failure::Failure;
use weft_cli::start::EXIT_NOT_FOUND;
use weft_service::text::printable;
use weft_verbs::settings::FI_ADDR;

use super::there::{FAILS, MARK, TIME as PROBES};

/// For an answer by ssh: a user may have to type a password.
const PATIENCE: Duration = Duration::from_mins(1);
/// The most bytes that are read of what a host says.
const MOST: u64 = 64 << 10;
const UNREACHED: &str = "does not reach";
/// What ssh returns when it cannot reach the host or log in.
const SSH_FAILED: i32 = 255;

/// A host, and the number of ranks that it takes if that is said: `NAME` or `NAME:SLOTS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    name: String,
    slots: Option<u32>,
}

impl FromStr for Host {
    type Err = String;

    fn from_str(text: &str) -> Result<Host, String> {
        let (name, slots) = match text.split_once(':') {
            Some((name, slots)) => (name, Some(slots)),
            None => (text, None),
        };
        let fits = |c: char| c.is_ascii_alphanumeric() || "._-@".contains(c);
        // ssh would take a name with a dash for an option.
        if name.is_empty() || name.starts_with('-') || !name.chars().all(fits) {
            return Err("it has to be a host's name or IPv4 address, NAME or NAME:SLOTS".into());
        }
        let slots = slots.map(|slots| {
            slots
                .parse()
                .map_err(|_| "SLOTS is the number of its ranks")
        });
        Ok(Host {
            name: name.to_owned(),
            slots: slots.transpose()?,
        })
    }
}

/// The list as mpirun and mpiexec take it.
pub(super) fn list(hosts: &[Host]) -> OsString {
    let one = |host: &Host| match host.slots {
        Some(slots) => format!("{}:{slots}", host.name),
        None => host.name.clone(),
    };
    hosts.iter().map(one).collect::<Vec<_>>().join(",").into()
}

/// What the hosts are asked for.
pub(super) struct Needs<'a> {
    pub(super) transport: &'static str,
    /// The folder of the libraries, which ranks are told of.
    pub(super) lib: &'a Path,
    /// The program that the MPI uses in place of ssh, and its arguments.
    pub(super) agent: Vec<String>,
}

/// Checks all hosts at once. The error names each that is not ready.
pub(super) fn check(hosts: &[Host], needs: &Needs<'_>) -> Result<(), Failure> {
    let mut names: Vec<&str> = Vec::new();
    for host in hosts {
        if !names.contains(&host.name.as_str()) {
            names.push(&host.name);
        }
    }
    let single = || {
        FI_ADDR
            .read()
            .ok()
            .flatten()
            .filter(|text| !text.contains('/'))
    };
    if names.len() > 1
        && let Some(address) = single()
    {
        let what = format!(
            "WEFT_FI_ADDR={address} is the address of one host, and the job has {}",
            names.len()
        );
        return Err(Failure::usage(what)
            .hint("name the network in which each has an address, as in WEFT_FI_ADDR=10.0.0.0/8"));
    }
    let until = Instant::now() + PATIENCE;
    let mut troubles = Vec::new();
    let mut ready = Vec::new();
    for (name, asked) in names.iter().map(|name| (*name, Asked::start(name, needs))) {
        match asked.map_err(|e| e.to_string()) {
            Ok(asked) => ready.push((name, asked)),
            Err(why) => troubles.push((name, why)),
        }
    }
    let mut at: Vec<(&str, Asked, SocketAddr)> = Vec::new();
    for (name, mut asked) in ready {
        match asked.address(until) {
            Ok(address) => match at.iter().find(|(_, _, other)| other.ip() == address.ip()) {
                Some((other, ..)) => troubles.push((name, format!(
                    "its address is {}, and so is that of {other}: say by WEFT_FI_ADDR=NETWORK/BITS in which network each has one of its own",
                    address.ip()
                ))),
                None => at.push((name, asked, address)),
            },
            Err(why) => troubles.push((name, asked.end(&why, needs))),
        }
    }
    if troubles.is_empty() {
        troubles = between(&mut at);
    }
    if troubles.is_empty() {
        return Ok(());
    }
    for (name, why) in &troubles {
        weft_cli::tell!("weft: {name}: {why}");
    }
    let unreached = troubles.iter().any(|(_, why)| why.contains(UNREACHED));
    let hint = if unreached {
        "let all TCP and UDP ports through between the hosts, which an MPI job needs; or say by WEFT_FI_ADDR=NETWORK/BITS in which network they reach each other"
    } else {
        "mend what is named above; without --hosts nothing is checked"
    };
    let mut bad: Vec<&str> = troubles.iter().map(|(name, _)| *name).collect();
    bad.dedup();
    let what = format!(
        "the job is not started: {} of {} hosts not ready",
        bad.len(),
        names.len()
    );
    Err(Failure::failed(what).hint(hint))
}

/// Lets all hosts send to each other, and returns what does not arrive.
fn between<'a>(at: &mut [(&'a str, Asked, SocketAddr)]) -> Vec<(&'a str, String)> {
    let mut token = [0; 16];
    if at.len() < 2 || getrandom::fill(&mut token).is_err() {
        return Vec::new();
    }
    let token = format!("{:032x}", u128::from_ne_bytes(token));
    let all: Vec<(&str, SocketAddr)> = at
        .iter()
        .map(|(name, _, address)| (*name, *address))
        .collect();
    let mut troubles = Vec::new();
    for (name, asked, own) in &mut *at {
        let others = all.iter().filter(|(_, address)| address != own);
        let others: Vec<String> = others.map(|(_, address)| address.to_string()).collect();
        let text = others.join("\n");
        if asked.say(&format!("{token}\n{text}\n\n")).is_err() {
            troubles.push((*name, "its check has ended early".to_owned()));
        }
    }
    let until = Instant::now() + 2 * PROBES + PATIENCE;
    for (name, asked, _) in &mut *at {
        loop {
            let line = match asked.line(until) {
                Ok(line) => line,
                Err(why) => {
                    let early = why
                        .is_empty()
                        .then(|| "its check has ended early".to_owned());
                    troubles.push((*name, early.unwrap_or(why)));
                    break;
                }
            };
            let Some((what, to)) = line.split_once(' ') else {
                break; // it has told of all
            };
            let to: Option<SocketAddr> = to.parse().ok();
            let Some((to, address)) = all
                .iter()
                .find(|(_, at)| Some(*at) == to && what.starts_with(FAILS))
            else {
                continue;
            };
            let protocol = what.trim_start_matches(FAILS).to_uppercase();
            troubles.push((
                *name,
                format!(
                    "{protocol} {UNREACHED} {to}, whose ranks have the address {}",
                    address.ip()
                ),
            ));
        }
    }
    troubles
}

/// A host that is asked.
struct Asked {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

impl Asked {
    fn start(name: &str, needs: &Needs<'_>) -> std::io::Result<Asked> {
        let program = env::current_exe()?;
        let mut command = if is_here(name) {
            let mut command = Command::new(&program);
            command.args(["mpi", "--there", env!("CARGO_PKG_VERSION")]);
            command
                .args(["--transport", needs.transport, "--lib"])
                .arg(needs.lib);
            command
        } else {
            let (agent, options) = needs
                .agent
                .split_first()
                .ok_or(std::io::ErrorKind::NotFound)?;
            let mut command = Command::new(agent);
            command.args(options).arg(name).arg(line(&program, needs));
            command
        };
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| {
                let what = format!("cannot run {}: {e}", command.get_program().display());
                std::io::Error::new(e.kind(), what)
            })?;
        let (tell, lines) = channel();
        let output = child.stdout.take();
        thread::spawn(move || {
            let output = output.map(|output| BufReader::new(output.take(MOST)));
            // What a shell's profile prints is left out.
            let said = output
                .into_iter()
                .flat_map(BufRead::lines)
                .map_while(Result::ok);
            for line in said.filter_map(|line| Some(line.strip_prefix(MARK)?.trim().to_owned())) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        let input = child.stdin.take();
        let errors = child
            .stderr
            .take()
            .map(|errors| thread::spawn(|| all(errors)));
        Ok(Asked {
            child,
            input,
            lines,
            errors,
        })
    }

    fn say(&mut self, text: &str) -> std::io::Result<()> {
        match &mut self.input {
            Some(input) => input.write_all(text.as_bytes()),
            None => Ok(()),
        }
    }

    fn line(&mut self, until: Instant) -> Result<String, String> {
        let left = until.saturating_duration_since(Instant::now());
        self.lines.recv_timeout(left).map_err(|e| match e {
            RecvTimeoutError::Timeout => format!("no answer in {} s", PATIENCE.as_secs()),
            RecvTimeoutError::Disconnected => String::new(),
        })
    }

    /// The address that ranks of the host will have, once it has found all else in place.
    fn address(&mut self, until: Instant) -> Result<SocketAddr, String> {
        let line = self.line(until)?;
        line.parse()
            .map_err(|_| format!("it says: {}", printable(line.as_bytes())))
    }

    /// Ends the check of a host that is not ready; the reason is what it said on its standard error output, if it did not run into the limit.
    fn end(mut self, why: &str, needs: &Needs<'_>) -> String {
        self.input = None;
        if !why.is_empty() {
            let _ = self.child.kill();
        }
        let status = self.child.wait().ok().and_then(|status| status.code());
        let said = self.errors.take().and_then(|errors| errors.join().ok());
        let said = said.unwrap_or_default();
        let agent = needs.agent.first().map_or("ssh", String::as_str);
        match status {
            _ if !why.is_empty() => why.to_owned(),
            Some(code) if code == i32::from(EXIT_NOT_FOUND) => {
                let dir = env::current_exe().unwrap_or_default();
                format!(
                    "there is no `weft`, neither in {} nor in the PATH that {agent} gives there: install it as on this host",
                    dir.parent().unwrap_or(Path::new("/")).display()
                )
            }
            Some(SSH_FAILED) => format!("{agent} cannot log in there: {said}"),
            // clap's: an option that it does not know.
            Some(2) => format!(
                "its weft is another version than {}: {said}",
                env!("CARGO_PKG_VERSION")
            ),
            _ if said.is_empty() => format!("{agent} ended without an answer of weft"),
            _ => said,
        }
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        // The check ends with its input, if it still runs.
        self.input = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// All of a host's errors in one line.
fn all(errors: ChildStderr) -> String {
    let mut text = Vec::new();
    let _ = errors.take(MOST).read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text);
    let lines = text
        .lines()
        .map(|line| line.trim().trim_start_matches("weft: "));
    let lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
    printable(lines.join("; ").as_bytes())
}

/// The command for a shell on another host, whose PATH is short. This weft's own folder comes first.
fn line(program: &Path, needs: &Needs<'_>) -> String {
    let folder = program.parent().map(PathBuf::from).unwrap_or_default();
    let address = match FI_ADDR.read() {
        Ok(Some(address)) => format!(" WEFT_FI_ADDR={}", quoted(&address)),
        _ => String::new(),
    };
    format!(
        "env PATH={}:\"$PATH\"{address} weft mpi --there {} --transport {} --lib {}",
        quoted(&folder.to_string_lossy()),
        env!("CARGO_PKG_VERSION"),
        needs.transport,
        quoted(&needs.lib.to_string_lossy())
    )
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Whether this is a name of this host, where no ssh is needed.
fn is_here(name: &str) -> bool {
    let own = rustix::system::uname();
    let own = own.nodename().to_string_lossy();
    let is_ours =
        |mut all: std::vec::IntoIter<SocketAddr>| all.any(|at| UdpSocket::bind(at).is_ok());
    name == own || !name.contains('@') && (name, 0).to_socket_addrs().is_ok_and(is_ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_have_names_and_slots() {
        let host = |text: &str| text.parse::<Host>();
        let two = [host("a").unwrap(), host("user@b.example:4").unwrap()];
        assert_eq!(list(&two), "a,user@b.example:4");
        for bad in [
            "",
            ":2",
            "a:",
            "a:b",
            "-oProxyCommand=x",
            "a b",
            "a;b",
            "$(a)",
            "a:1:2",
        ] {
            assert!(host(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_shell_gets_each_word_whole() {
        let needs = Needs {
            transport: "weft",
            lib: Path::new("/a b/it's"),
            agent: vec!["ssh".into()],
        };
        let line = line(Path::new("/opt/w x/weft"), &needs);
        assert!(line.starts_with("env PATH='/opt/w x':\"$PATH\""), "{line}");
        assert!(line.ends_with(r"--lib '/a b/it'\''s'"), "{line}");
    }

    #[test]
    fn this_host_is_known() {
        assert!(is_here("localhost") && is_here("127.0.0.1"));
        assert!(!is_here("192.0.2.1") && !is_here("name.invalid"));
    }
}
