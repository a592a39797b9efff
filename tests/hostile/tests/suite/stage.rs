//! A victim, honest witnesses beside it, the attackers, and the judge.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// How long anybody may take to answer the suite: a limit that turns a hang into a failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(90);

/// How much a victim may grow by all that is done to it. What it keeps for a peer is some hundred KiB; the allocator gives little back.
const GROWTH: u64 = 96 << 20;

/// After what time memory comes back that a peer of the same host does not leave (docs/spec/local.md, "Marks and doors").
const MEMORY_RETURNS: Duration = Duration::from_secs(3);

/// What a busy machine may add to a documented limit.
const SLACK: Duration = Duration::from_secs(3);

/// Descriptors that a victim may have more than at first, when the attackers have gone.
const DESCRIPTORS: usize = 12;

/// A program that the suite started, and talks with line by line.
pub(crate) struct Actor {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Actor {
    /// Starts it. Of what it prints, the lines that begin with `mark` are kept.
    pub(crate) fn start(name: &str, mut command: Command, mark: &'static str) -> Actor {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A program that was copied a moment ago is busy while a child that another test forked then has its descriptor.
        let begun = Instant::now();
        let mut child = loop {
            match command.spawn() {
                Err(e)
                    if e.kind() == ErrorKind::ExecutableFileBusy
                        && begun.elapsed() < Duration::from_secs(10) =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                child => break child.unwrap_or_else(|e| panic!("{command:?}: {e}")),
            }
        };
        let stdout = child.stdout.take().expect("a pipe");
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(line) = line.strip_prefix(mark) {
                    let _ = send.send(line.to_owned());
                }
            }
        });
        Actor {
            name: name.into(),
            stdin: child.stdin.take(),
            child,
            lines,
        }
    }

    pub(crate) fn role(role: &str, words: &[&str], environment: &[(&str, &str)]) -> Actor {
        let mut command = Command::new(std::env::current_exe().expect("/proc"));
        command
            .args([
                "--ignored",
                "--exact",
                "role",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("HOSTILE_ROLE", format!("{role} {}", words.join(" ")))
            .envs(environment.iter().copied());
        Actor::start(&format!("{role} {}", words.join(" ")), command, ">> ")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn line(&self) -> String {
        self.line_within(PATIENCE)
            .unwrap_or_else(|| panic!("{}: no word for {PATIENCE:?}", self.name))
    }

    pub(crate) fn line_within(&self, patience: Duration) -> Option<String> {
        self.lines.recv_timeout(patience).ok()
    }

    /// Says something; an actor that has gone does not hear it.
    pub(crate) fn tell(&mut self, line: &str) {
        if let Some(stdin) = &mut self.stdin {
            let _ = stdin.write_all(format!("{line}\n").as_bytes());
        }
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.line()
    }

    /// Waits until the kernel says that it is in this state.
    fn await_state(&self, state: char) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid()));
            let stat = stat.unwrap_or_default();
            // Behind the name, which is in brackets.
            let now = stat
                .rsplit(')')
                .next()
                .and_then(|rest| rest.trim().chars().next());
            if now == Some(state) {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{} is in state {now:?}",
                self.name
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Whether it has not ended.
    pub(crate) fn lives(&mut self) -> Result<(), String> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(format!("{} has ended: {status}", self.name)),
            Err(e) => Err(format!("{}: {e}", self.name)),
        }
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The most memory that a process has had in use since [`forget_memory`], its part of shared memory included.
pub(crate) fn memory(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// What a process has in use now is the most, for now.
fn forget_memory(pid: u32) {
    // proc_pid_clear_refs(5): 5 resets the peak.
    let _ = std::fs::write(format!("/proc/{pid}/clear_refs"), "5");
}

/// Open descriptors of a process.
pub(crate) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

/// The attacker's program.
pub(crate) fn hostile(words: &[String], environment: &[(&str, &str)]) -> Actor {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hostile"));
    command.args(words).envs(environment.iter().copied());
    Actor::start(&format!("hostile {}", words.join(" ")), command, "")
}

/// What one of the witnesses has to tell since it was last asked.
#[derive(Debug)]
pub(crate) struct Account {
    pub(crate) rounds: u64,
    pub(crate) worst_round: Duration,
    pub(crate) connects: u64,
    pub(crate) worst_connect: Duration,
    pub(crate) refused: u64,
    pub(crate) failures: u64,
    pub(crate) last: String,
}

impl Account {
    fn parse(line: &str) -> Account {
        let mut words = line.splitn(8, ' ');
        assert_eq!(words.next(), Some("report"), "{line}");
        let mut number = || -> u64 { words.next().and_then(|w| w.parse().ok()).expect("a number") };
        Account {
            rounds: number(),
            worst_round: Duration::from_millis(number()),
            connects: number(),
            worst_connect: Duration::from_millis(number()),
            refused: number(),
            failures: number(),
            last: words.next().unwrap_or_default().into(),
        }
    }
}

impl Account {
    /// What was told later.
    fn add(&mut self, later: Account) {
        self.rounds += later.rounds;
        self.worst_round = self.worst_round.max(later.worst_round);
        self.connects += later.connects;
        self.worst_connect = self.worst_connect.max(later.worst_connect);
        self.refused += later.refused;
        self.failures += later.failures;
        self.last = later.last;
    }
}

/// What a campaign may do to the honest peers beside it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bearable {
    /// The longest that a round may take.
    pub(crate) round: Duration,
    /// The longest from the wish to connect to being connected.
    pub(crate) connect: Duration,
}

impl Bearable {
    /// Nothing that they would notice, on a machine that is busy.
    pub(crate) const CALM: Bearable = Bearable {
        round: Duration::from_secs(5),
        connect: Duration::from_secs(8),
    };
    /// A wait for a peer that does not leave memory takes three seconds: nobody else may notice.
    pub(crate) const BESIDE_STOPS: Bearable = Bearable {
        round: Duration::from_secs(2),
        connect: Duration::from_secs(2),
    };
    /// While others fill the victim's places: each is free again after the limit of a start-up.
    pub(crate) const FLOOD: Bearable = Bearable {
        round: Duration::from_secs(8),
        connect: Duration::from_secs(15),
    };
}

/// A victim and all around it.
pub(crate) struct Stage {
    kind: String,
    pub(crate) victim: Actor,
    pub(crate) addr: SocketAddr,
    witnesses: Vec<Actor>,
    before: (u64, usize),
}

impl Stage {
    /// A victim of this kind, and two witnesses: in shared memory, and over TCP.
    pub(crate) fn new(kind: &str) -> Stage {
        let victim = Actor::role("victim", &[kind], &[]);
        let line = victim.line();
        let addr: SocketAddr = line
            .strip_prefix("listening ")
            .and_then(|addr| addr.parse().ok())
            .unwrap_or_else(|| panic!("{kind}: {line}"));
        let text = addr.to_string();
        let witnesses = ["auto", "off"].map(|local| {
            let witness = Actor::role("witness", &[kind, &text], &[("WEFT_LOCAL", local)]);
            assert_eq!(witness.line(), "at work");
            witness
        });
        let mut stage = Stage {
            kind: kind.into(),
            victim,
            addr,
            witnesses: witnesses.into(),
            before: (0, 0),
        };
        // Until each has been in and out a few times: then all is there that honest peers need.
        stage.work(60);
        forget_memory(stage.victim.pid());
        stage.before = (memory(stage.victim.pid()), descriptors(stage.victim.pid()));
        stage
    }

    /// Waits until each witness has done so many rounds more.
    fn work(&mut self, rounds: u64) {
        let deadline = Instant::now() + PATIENCE;
        for witness in &mut self.witnesses {
            let mut done = 0;
            while done < rounds {
                let account = Account::parse(&witness.ask("report"));
                assert_eq!(account.failures, 0, "{account:?}");
                assert!(
                    Instant::now() < deadline,
                    "{} does not go on: {account:?}",
                    witness.name
                );
                done += account.rounds;
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    /// Runs the attackers side by side, and judges the victim.
    pub(crate) fn attack(&mut self, bearable: Bearable, attacks: &[&[&str]]) {
        for witness in &mut self.witnesses {
            witness.ask("report");
        }
        let start = Instant::now();
        let attackers: Vec<Actor> = attacks
            .iter()
            .map(|words| self.attacker(words, &[]))
            .collect();
        let mut faults = Vec::new();
        for attacker in &attackers {
            faults.extend(verdict(attacker));
        }
        let took = start.elapsed();
        faults.extend(self.judge(bearable));
        // Some were to stay until here.
        drop(attackers);
        println!("{} {attacks:?} took {took:?}", self.kind);
        assert!(
            faults.is_empty(),
            "{} under {attacks:?}:\n{}",
            self.kind,
            faults.join("\n")
        );
    }

    /// Starts an attacker as the user `nobody`; `None` if this user may not.
    fn stranger(&self, attack: &str) -> Option<Actor> {
        if !rustix::process::geteuid().is_root() {
            return None;
        }
        // Where anybody can read and execute it.
        let dir = tempfile::tempdir().expect("a folder");
        let everybody = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(dir.path(), everybody).expect("ours");
        let program = dir.path().join("hostile");
        std::fs::copy(env!("CARGO_BIN_EXE_hostile"), &program).expect("a copy");
        let mut command = Command::new(&program);
        let (addr, pid) = (self.addr.to_string(), self.victim.pid().to_string());
        command
            .args([attack, &self.kind, &addr, &pid])
            .uid(65534)
            .gid(65534);
        Some(Actor::start("a stranger", command, ""))
    }

    /// Has the victim dial all that a hostile listener offers.
    pub(crate) fn dial(&mut self, listener: &Actor) -> Vec<String> {
        let mut limits = HashMap::new();
        let mut faults = Vec::new();
        loop {
            let line = listener.line();
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["dial", name, addr, limit] => {
                    let limit = Duration::from_millis(limit.parse().expect("a number"));
                    limits.insert(addr.to_owned(), (name.to_owned(), limit));
                    self.victim.tell(&format!("dial {addr}"));
                }
                ["cases", _] => break,
                _ => println!("{}: {line}", listener.name),
            }
        }
        let mut how_often = HashMap::new();
        let mut ports = Vec::new();
        while !limits.is_empty() {
            let line = self.victim.line();
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            let ["dialled", addr, millis, how] = words[..] else {
                faults.push(format!("{limits:?} to come, and the victim says {line}"));
                break;
            };
            let (name, limit) = limits.remove(addr).expect("dialled once");
            let took = Duration::from_millis(millis.parse().expect("a number"));
            if took > limit + SLACK {
                faults.push(format!("{name}: {how} after {took:?}"));
            }
            // A lie before the Join costs no more than shared memory.
            if limit < Duration::from_secs(1) && how != "connected" {
                faults.push(format!("{name}: {how}"));
            }
            *how_often.entry(how.to_owned()).or_insert(0) += 1;
            ports.push(addr.rsplit(':').next().expect("a port").to_owned());
        }
        println!("{}: {how_often:?}", listener.name);
        faults.extend(self.leave(&ports));
        // What the listener has found meanwhile.
        while let Some(line) = listener.line_within(Duration::ZERO) {
            faults.extend(line.strip_prefix("fault ").map(str::to_owned));
        }
        faults
    }

    /// Has the victim end its connections with these peers, and take back all memory.
    fn leave(&mut self, ports: &[String]) -> Option<String> {
        let left = self.victim.ask(&format!("leave {}", ports.join(",")));
        println!("{}: {left}", self.kind);
        let millis = left.strip_prefix("left ").and_then(|ms| ms.parse().ok());
        let took = Duration::from_millis(millis.expect("a number"));
        (took > MEMORY_RETURNS + SLACK).then(|| format!("{took:?} until all memory was back"))
    }

    /// The victim as the one who dials: hostile listeners of its own user, and of another.
    pub(crate) fn dial_all(&mut self, seed: &str) {
        let listener = self.attacker(&["dialled", seed], &[]);
        let mut faults = self.dial(&listener);
        if let Some(squatter) = self.stranger("squat") {
            faults.extend(self.dial(&squatter));
        }
        faults.extend(self.judge(Bearable::BESIDE_STOPS));
        assert!(
            faults.is_empty(),
            "{} dials:\n{}",
            self.kind,
            faults.join("\n")
        );
    }

    /// Another user at the door, and what the victim makes of it.
    pub(crate) fn strange(&mut self) {
        let Some(stranger) = self.stranger("stranger") else {
            eprintln!("hostile: strangers are left out: only root can be one");
            return;
        };
        let mut faults = verdict(&stranger);
        faults.extend(self.judge(Bearable::CALM));
        drop(stranger);
        assert!(
            faults.is_empty(),
            "{} under a stranger:\n{}",
            self.kind,
            faults.join("\n")
        );
    }

    /// Starts an attacker: its attack, then what comes behind the victim's kind and address.
    fn attacker(&self, words: &[&str], environment: &[(&str, &str)]) -> Actor {
        let addr = self.addr.to_string();
        let mut all = vec![words[0], &self.kind, &addr];
        all.extend(&words[1..]);
        let all: Vec<String> = all.into_iter().map(String::from).collect();
        hostile(&all, environment)
    }

    /// Attackers that stop, or end, each at one of these steps; what the victim makes of all of them at once.
    pub(crate) fn stop(&mut self, signal: &str, steps: &[&str]) {
        for witness in &mut self.witnesses {
            witness.ask("report");
        }
        let environment = [("HOSTILE_SIGNAL", signal)];
        let attackers: Vec<Actor> = steps
            .iter()
            .map(|step| self.attacker(&["stop", step], &environment))
            .collect();
        let mut ports = Vec::new();
        for attacker in &attackers {
            let line = attacker.line();
            let port = line.strip_prefix("at ").and_then(|at| at.split(' ').nth(1));
            let port = port.unwrap_or_else(|| panic!("{}: {line}", attacker.name));
            ports.push(port.to_owned());
            attacker.await_state(if signal == "stop" { 'T' } else { 'Z' });
        }
        let mut faults = Vec::new();
        // The honest ones go on beside them.
        self.work(80);
        faults.extend(self.leave(&ports));
        faults.extend(self.judge(Bearable::BESIDE_STOPS));
        drop(attackers);
        faults.extend(self.judge(Bearable::BESIDE_STOPS));
        assert!(
            faults.is_empty(),
            "{} with peers that {signal}:\n{}",
            self.kind,
            faults.join("\n")
        );
    }

    /// What is wrong with the victim now.
    pub(crate) fn judge(&mut self, bearable: Bearable) -> Vec<String> {
        let mut faults = Vec::new();
        if let Err(dead) = self.victim.lives() {
            // All else follows from that.
            return vec![dead];
        }
        self.victim.tell("check");
        match self.victim.line_within(PATIENCE) {
            Some(line) if line == "intact" => {}
            Some(line) => faults.push(line),
            None => faults.push("the victim does not answer".into()),
        }
        faults.extend(self.leftovers());
        for witness in &mut self.witnesses {
            let mut account = Account::parse(&witness.ask("report"));
            let deadline = Instant::now() + PATIENCE;
            // At least a few rounds, however short the attack was.
            while account.rounds < 10 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(10));
                account.add(Account::parse(&witness.ask("report")));
            }
            println!("{}: {account:?}", witness.name);
            if account.failures > 0
                || account.rounds < 10
                || account.worst_round > bearable.round
                || account.worst_connect > bearable.connect
            {
                faults.push(format!("{}: {account:?}", witness.name));
            }
        }
        faults
    }

    /// Memory and descriptors, once what has a limit of time has had it.
    fn leftovers(&self) -> Vec<String> {
        let pid = self.victim.pid();
        let deadline = Instant::now() + Duration::from_secs(20);
        let (memory_before, descriptors_before) = self.before;
        // A connection of a witness comes and goes meanwhile.
        while descriptors(pid) > descriptors_before + DESCRIPTORS && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
        let (memory_now, descriptors_now) = (memory(pid), descriptors(pid));
        println!(
            "memory {} -> {} KiB, descriptors {descriptors_before} -> {descriptors_now}",
            memory_before >> 10,
            memory_now >> 10
        );
        let mut faults = Vec::new();
        if memory_now > memory_before + GROWTH {
            faults.push(format!(
                "memory: {memory_before} bytes before, {memory_now} after"
            ));
        }
        if descriptors_now > descriptors_before + DESCRIPTORS {
            faults.push(format!(
                "descriptors: {descriptors_before} before, {descriptors_now} after"
            ));
        }
        faults
    }
}

/// What an attacker found.
fn verdict(attacker: &Actor) -> Vec<String> {
    let name = &attacker.name;
    let mut faults = Vec::new();
    let deadline = Instant::now() + 2 * PATIENCE;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let Some(line) = attacker.line_within(left) else {
            faults.push(format!("{name} came to no end"));
            return faults;
        };
        if let Some(fault) = line.strip_prefix("fault ") {
            faults.push(format!("{name}: {fault}"));
            continue;
        }
        println!("{name}: {line}");
        if line
            .strip_prefix("cases ")
            .is_some_and(|count| count != "0")
        {
            return faults;
        }
    }
}

/// The seed of this run: `WEFT_SEED`, or always the same.
pub(crate) fn seed() -> String {
    std::env::var("WEFT_SEED").unwrap_or_else(|_| "7".into())
}

/// How often random things are tried: `WEFT_HOSTILE_ROUNDS`, or as often as CI has time for.
pub(crate) fn rounds() -> String {
    std::env::var("WEFT_HOSTILE_ROUNDS").unwrap_or_else(|_| "24".into())
}
