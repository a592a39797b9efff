//! `weft cp` between two network namespaces, with somebody between them.
//!
//! The test runs itself again in a third namespace, which has a cable to each of the two: what it does there with the bytes of a
//! connection is what somebody on the way can do.

use crate::common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, poll};

use crate::common::{Listener, Output, names, noise};
use weft::cp::protocol::{Hello, Status, VERSION};
use weft_verbs::Device;
use weft_verbs::cm::{self, ConnParam, ConnectError};
use weft_verbs::tls::{Identity, PublicKey, Session, Tls};

const SENDER: &str = "10.78.1.2";
const MIDDLE: &str = "10.78.1.1";
const MIDDLE_FAR: &str = "10.78.2.1";
const RECEIVER: &str = "10.78.2.2";
const LEN: usize = 400_000;

fn run(command: &mut Command) -> Result<String, String> {
    let what = format!("{command:?}");
    let out = command.output().map_err(|e| format!("{what}: {e}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    Err(format!("{what}: {}\n{stderr}", out.status))
}

/// A network namespace, kept by a process, with a cable to ours.
struct Side {
    keeper: Child,
}

impl Side {
    fn new(name: &str, ours: &str, theirs: &str) -> Result<Self, String> {
        let keeper = Command::new("unshare")
            .args(["--net", "cat"])
            .stdin(Stdio::piped())
            .spawn()
            .map_err(|e| format!("unshare: {e}"))?;
        let mut side = Self { keeper };
        let comm = format!("/proc/{}/comm", side.keeper.id());
        common::until("the namespace", || {
            let ended = side.keeper.try_wait().is_ok_and(|status| status.is_some());
            let there = fs::read_to_string(&comm).is_ok_and(|name| name.trim() == "cat");
            (ended || there).then_some(())
        });
        let pid = side.keeper.id();
        for line in [
            format!("ip link add {name} type veth peer name cable netns {pid}"),
            format!("ip addr add {ours}/24 dev {name}"),
            format!("ip link set {name} up"),
        ] {
            let mut words = line.split(' ');
            run(Command::new(words.next().unwrap()).args(words))?;
        }
        for line in [
            format!("ip addr add {theirs}/24 dev cable"),
            "ip link set cable up".into(),
            "ip link set lo up".into(),
        ] {
            run(side.enter().args(line.split(' ')))?;
        }
        Ok(side)
    }

    /// The start of a command that runs there.
    fn enter(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.keeper.id().to_string(), "--net"]);
        command.stdin(Stdio::null());
        command
    }

    fn weft(&self, config: &Path) -> Command {
        let mut command = self.enter();
        command
            .arg(env!("CARGO_BIN_EXE_weft"))
            .env("XDG_CONFIG_HOME", config);
        command
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

/// What somebody in the middle does with bytes: of the sender (`true`) or of the receiver, from this position on.
type Meddle = Box<dyn FnMut(bool, usize, &mut [u8]) -> bool + Send>;

fn door() -> (TcpListener, SocketAddr) {
    let door = TcpListener::bind((MIDDLE, 0)).unwrap();
    let at = door.local_addr().unwrap();
    (door, at)
}

/// Carries the bytes of each connection to the receiver and back, until `meddle` says no.
fn relay(to: SocketAddr, meddle: Meddle) -> SocketAddr {
    let (door, at) = door();
    relay_from(door, to, meddle);
    at
}

fn relay_from(door: TcpListener, to: SocketAddr, mut meddle: Meddle) {
    std::thread::spawn(move || {
        for near in door.incoming().map_while(Result::ok) {
            let far = TcpStream::connect(to).unwrap();
            let mut position = [0, 0];
            let mut buf = vec![0; 64 << 10];
            'all: loop {
                for from_sender in wait(&near, &far) {
                    let (mut from, mut to) = if from_sender {
                        (&near, &far)
                    } else {
                        (&far, &near)
                    };
                    let Ok(n @ 1..) = from.read(&mut buf) else {
                        break 'all;
                    };
                    let position = &mut position[usize::from(from_sender)];
                    if !meddle(from_sender, *position, &mut buf[..n])
                        || to.write_all(&buf[..n]).is_err()
                    {
                        break 'all;
                    }
                    *position += n;
                }
            }
            let _ = near.shutdown(Shutdown::Both);
            let _ = far.shutdown(Shutdown::Both);
        }
    });
}

/// Which of the two has something to read.
fn wait(near: &TcpStream, far: &TcpStream) -> Vec<bool> {
    let mut fds = [near.as_fd(), far.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    let _ = poll(&mut fds, None);
    let ready = |i: usize| !fds[i].revents().is_empty();
    [(true, ready(0)), (false, ready(1))]
        .into_iter()
        .filter_map(|(side, ready)| ready.then_some(side))
        .collect()
}

/// One TLS connection of a relay that has one with each side.
struct Leg {
    stream: TcpStream,
    session: Session,
    incoming: Vec<u8>,
}

impl Leg {
    /// Reads, if there is something, and answers. What it says in the clear, or `None` at the end.
    fn read(&mut self, ready: bool) -> Option<Vec<u8>> {
        if ready {
            let mut buf = [0; 16 << 10];
            match self.stream.read(&mut buf) {
                Ok(n @ 1..) => self.incoming.extend_from_slice(&buf[..n]),
                _ => return None,
            }
        }
        let (mut plain, mut out) = (Vec::new(), Vec::new());
        let mut take = |bytes: &[u8]| {
            plain.extend_from_slice(bytes);
            true
        };
        let used = self
            .session
            .receive(&mut self.incoming, &mut take, &mut out);
        self.stream.write_all(&out).ok()?;
        self.incoming.drain(..used.ok()?);
        Some(plain)
    }

    fn write(&mut self, plain: &mut Vec<u8>) -> Option<()> {
        if plain.is_empty() || self.session.info().is_none() {
            return Some(());
        }
        let mut out = Vec::new();
        for piece in plain.chunks(8192) {
            let sealed = self
                .session
                .seal(&mut out, |to| to.extend_from_slice(piece));
            sealed.ok()?;
        }
        plain.clear();
        self.stream.write_all(&out).ok()
    }
}

/// A relay that speaks TLS with both sides, with a key of its own, and reads along.
fn impostor(door: TcpListener, to: SocketAddr) -> (PublicKey, Arc<Mutex<Vec<u8>>>) {
    let identity = Identity::generate().unwrap();
    let public = identity.public_key();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    std::thread::spawn(move || {
        let tls = Tls::new(identity).unwrap();
        for near in door.incoming().map_while(Result::ok) {
            let leg = |stream, session| Leg {
                stream,
                session,
                incoming: Vec::new(),
            };
            let mut near = leg(near, tls.responder().unwrap());
            let mut far = leg(TcpStream::connect(to).unwrap(), tls.initiator().unwrap());
            let (mut up, mut down) = (Vec::new(), Vec::new());
            let _ = far.read(false);
            loop {
                let ready = wait(&near.stream, &far.stream);
                let (Some(more), Some(back)) = (
                    near.read(ready.contains(&true)),
                    far.read(ready.contains(&false)),
                ) else {
                    break;
                };
                notes.lock().unwrap().extend_from_slice(&more);
                up.extend(more);
                down.extend(back);
                if far.write(&mut up).is_none() || near.write(&mut down).is_none() {
                    break;
                }
            }
            // What it has to say first; then the other side sees the end.
            let _ = near.write(&mut down);
            let _ = near.stream.shutdown(Shutdown::Both);
            let _ = far.stream.shutdown(Shutdown::Both);
        }
    });
    (public, seen)
}

/// A sender, a receiver, and a file.
struct Stage {
    sender: Side,
    receiver: Side,
    listener: Listener,
    /// What senders know of the receiver.
    public: String,
    dir: PathBuf,
}

impl Stage {
    fn new(dir: &Path) -> Result<Self, String> {
        let sender = Side::new("near", MIDDLE, SENDER)?;
        let receiver = Side::new("far", MIDDLE_FAR, RECEIVER)?;
        fs::write("/proc/sys/net/ipv4/ip_forward", "1").map_err(|e| e.to_string())?;
        for (side, via) in [(&sender, MIDDLE), (&receiver, MIDDLE_FAR)] {
            run(side
                .enter()
                .args(["ip", "route", "add", "default", "via", via]))?;
        }
        for name in ["to", "sender/weft", "receiver/weft"] {
            fs::create_dir_all(dir.join(name)).unwrap();
        }
        let line = |side: &Side, who: &str| {
            let out = run(side.weft(&dir.join(who)).arg("key")).unwrap();
            out.lines().next().unwrap().to_owned()
        };
        let ours = line(&sender, "sender");
        let public = line(&receiver, "receiver");
        fs::write(dir.join("receiver/weft/authorized_keys"), ours + "\n").unwrap();
        fs::write(dir.join("file"), noise(LEN, 1)).unwrap();
        let mut command = receiver.weft(&dir.join("receiver"));
        let listener = listen(&mut command, &dir.join("to"), &[]);
        Ok(Self {
            sender,
            receiver,
            listener,
            public,
            dir: dir.into(),
        })
    }

    fn send(&self, at: SocketAddr, args: &[&str]) -> Output {
        Output::of(&mut self.sending(at, args, &["setsid", "--wait"]))
    }

    /// `weft cp` on the sender's side, with no terminal to ask on.
    fn sending(&self, at: SocketAddr, args: &[&str], wrapper: &[&str]) -> Command {
        let mut command = self.sender.enter();
        command
            .args(wrapper)
            .arg(env!("CARGO_BIN_EXE_weft"))
            .env("XDG_CONFIG_HOME", self.dir.join("sender"))
            .args(["cp", "--no-progress", "--timeout", "3"])
            .args(args)
            .arg(self.dir.join("file"))
            .arg(format!("{at}:"));
        command
    }

    fn peer(&self) -> [&str; 2] {
        ["--peer", self.listener.fingerprint()]
    }

    /// The next attack finds an empty directory, and a sender that knows nobody.
    fn reset(&self) {
        for name in names(&self.dir.join("to")) {
            fs::remove_file(self.dir.join("to").join(name)).unwrap();
        }
        let _ = fs::remove_file(self.dir.join("sender/weft/known_peers"));
    }

    #[track_caller]
    fn arrived(&self) {
        assert!(fs::read(self.dir.join("to/file")).unwrap() == noise(LEN, 1));
        self.reset();
    }

    #[track_caller]
    fn nothing_came(&self) {
        assert!(names(&self.dir.join("to")).is_empty());
    }
}

fn listen(command: &mut Command, to: &Path, args: &[&str]) -> Listener {
    let args = [&["--timeout", "3"], args].concat();
    Listener::start_with(command, to, &format!("{RECEIVER}:0"), &args)
}

#[track_caller]
fn refused(out: &Output, why: &str) {
    assert_eq!(out.code, 4, "{out:?}");
    assert!(out.stderr.contains(why), "{why}: {out:?}");
}

/// Runs [`inside`] in a network namespace of its own.
#[test]
fn man_in_the_middle() {
    for program in ["ip", "unshare", "nsenter", "setsid", "script"] {
        if let Err(e) = Command::new(program).arg("-V").output() {
            println!("skipped: no {program}: {e}");
            return;
        }
    }
    let mut unshare = vec!["--net"];
    if !rustix::process::geteuid().is_root() {
        unshare.extend(["--user", "--map-root-user"]);
    }
    let probe = Command::new("unshare").args(&unshare).arg("true").status();
    if !probe.is_ok_and(|status| status.success()) {
        println!("skipped: no network namespaces to be had");
        return;
    }
    let out = Command::new("unshare")
        .args(&unshare)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "mitm::inside", "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    println!("{said}\n{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && said.contains("@done"));
}

#[test]
#[ignore = "started by man_in_the_middle, in a namespace of its own"]
fn inside() {
    run(Command::new("ip").args("link set lo up".split(' '))).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let stage = Stage::new(dir.path()).unwrap();
    nobody_meddles(&stage);
    programs_for_trying_out(&stage);
    first_use(&stage);
    own_key(&stage);
    shared_key(&stage);
    flips(&stage);
    replay(&stage);
    downgrade(&stage);
    cut(&stage);
    // The receiver has seen all that, and goes on.
    stage.send(stage.listener.addr(), &stage.peer()).ok();
    stage.arrived();
    println!("@done");
}

/// Directly, and through somebody who only reads: he learns nothing of names and content.
fn nobody_meddles(stage: &Stage) {
    let to = stage.listener.addr();
    stage.send(to, &stage.peer()).ok();
    stage.arrived();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    let at = relay(
        to,
        Box::new(move |_, _, bytes| {
            notes.lock().unwrap().extend_from_slice(bytes);
            true
        }),
    );
    let out = stage.send(at, &stage.peer());
    out.ok();
    assert!(out.stdout.contains("over TCP by TLS"), "{out:?}");
    stage.arrived();
    let seen = seen.lock().unwrap();
    let content = noise(LEN, 1);
    for secret in [
        &b"weft-cp"[..],
        b"MPA ID",
        b"file",
        &content[..16],
        &content[LEN - 16..],
    ] {
        assert!(
            !seen.windows(secret.len()).any(|w| w == secret),
            "{secret:?}"
        );
    }
}

/// `weft hello` between hosts is protected as well, unless both sides say that it need not be.
fn programs_for_trying_out(stage: &Stage) {
    for (tls, text) in [(None, false), (Some("off"), true)] {
        let set = |command: &mut Command| {
            command.envs(tls.map(|tls| ("WEFT_TLS", tls)));
        };
        let mut command = stage.receiver.weft(&stage.dir);
        command.args(["hello", &format!("--listen={RECEIVER}:0")]);
        set(&mut command);
        let (mut responder, at) = announced(&mut command, "responder: listening on ");
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = Arc::clone(&seen);
        let at = relay(
            at,
            Box::new(move |_, _, bytes| {
                notes.lock().unwrap().extend_from_slice(bytes);
                true
            }),
        );
        let mut command = stage.sender.weft(&stage.dir);
        command.args(["hello", &at.to_string()]);
        set(&mut command);
        let out = Output::of(&mut command);
        out.ok();
        assert_eq!(out.stdout.contains("TLS"), tls.is_none(), "{out:?}");
        let secret = b"Hello iWARP!";
        let seen = seen.lock().unwrap();
        assert_eq!(seen.windows(secret.len()).any(|w| w == secret), text);
        assert!(responder.0.wait().unwrap().success());
    }
}

/// A program that ends with the test.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program that says where it listens.
fn announced(command: &mut Command, what: &str) -> (Program, SocketAddr) {
    let child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut program = Program(child);
    let mut line = String::new();
    let stdout = program.0.stdout.take().unwrap();
    let mut lines = BufReader::new(stdout);
    lines.read_line(&mut line).unwrap();
    // What else it says is not wanted, but it must be able to say it.
    std::thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
    let at = line.trim_end().strip_prefix(what);
    (program, at.expect(&line).parse().unwrap())
}

/// The user is asked once, and a key that changes then is no question any more.
fn first_use(stage: &Stage) {
    let to = stage.listener.addr();
    let (door, at) = door();
    relay_from(door.try_clone().unwrap(), to, Box::new(|_, _, _| true));
    let ask = |answer: &str| {
        let line = stage
            .sending(at, &[], &[])
            .get_args()
            .map(|word| word.to_str().unwrap().to_owned())
            .collect::<Vec<_>>()
            .join(" ");
        let mut child = Command::new("script")
            .args(["-qec", &format!("nsenter {line}"), "/dev/null"])
            .env("XDG_CONFIG_HOME", stage.dir.join("sender"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Kept open: its end would be the terminal's.
        let mut input = child.stdin.take().unwrap();
        input.write_all(answer.as_bytes()).unwrap();
        let mut said = String::new();
        child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        (child.wait().unwrap().code(), said)
    };
    let (code, said) = ask("no\n");
    assert_eq!(code, Some(4), "{said}");
    assert!(said.contains(stage.listener.fingerprint()), "{said}");
    stage.nothing_came();
    let (code, said) = ask("yes\n");
    assert_eq!(code, Some(0), "{said}");
    assert!(fs::read(stage.dir.join("to/file")).unwrap() == noise(LEN, 1));
    stage.send(at, &[]).ok();
    let known = fs::read_to_string(stage.dir.join("sender/weft/known_peers")).unwrap();
    assert!(known.starts_with(&format!("{at} weft-ed25519 ")), "{known}");
    stage.reset();
}

/// Somebody who speaks TLS with both, with a key of his own.
fn own_key(stage: &Stage) {
    let to = stage.listener.addr();
    let (door, at) = door();
    let (public, seen) = impostor(door, to);
    let shown = public.fingerprint().to_string();

    let out = stage.send(at, &[]);
    refused(&out, "is not known yet, and there is no terminal");
    assert!(out.stderr.contains(&shown), "{out:?}");
    refused(
        &stage.send(at, &stage.peer()),
        "not the one given with --peer",
    );
    let known = stage.dir.join("sender/weft/known_peers");
    fs::write(&known, format!("{at} {}\n", stage.public)).unwrap();
    let out = stage.send(at, &[]);
    refused(&out, "HAS CHANGED");
    for part in [
        &shown,
        "known_peers, line 1",
        &format!("weft key forget {at}"),
    ] {
        assert!(out.stderr.contains(part), "{part}: {out:?}");
    }
    assert!(seen.lock().unwrap().is_empty(), "nothing was sent");

    // A sender who is deceived does not deceive the receiver.
    let out = stage.send(at, &["--peer", &shown]);
    refused(&out, "takes files only from its own user");
    assert!(!seen.lock().unwrap().windows(4).any(|w| w == b"file"));
    stage.nothing_came();
    stage.reset();
}

/// The same where both prove a shared key, which he relays.
fn shared_key(stage: &Stage) {
    let key = stage.dir.join("shared").to_str().unwrap().to_owned();
    run(stage
        .sender
        .weft(&stage.dir)
        .args(["cp", "--gen-key", &key]))
    .unwrap();
    let mut command = stage.receiver.weft(&stage.dir.join("receiver"));
    let listener = listen(&mut command, &stage.dir.join("to"), &["--key", &key]);
    let (door, at) = door();
    let (_, seen) = impostor(door, listener.addr());
    let out = stage.send(at, &["--key", &key]);
    refused(&out, "the key is not the one of the receiver");
    assert!(out.stderr.contains("relays the connection"), "{out:?}");
    assert!(
        seen.lock().unwrap().starts_with(b"MPA ID Req"),
        "he read along"
    );
    assert!(!seen.lock().unwrap().windows(4).any(|w| w == b"file"));
    stage.nothing_came();
    let at = relay(listener.addr(), Box::new(|_, _, _| true));
    stage.send(at, &["--key", &key]).ok();
    stage.arrived();
}

/// One bit, in each part of the handshake and of the records after it, in both directions.
fn flips(stage: &Stage) {
    let to = stage.listener.addr();
    // Type, version and length of a record; hello: version, random, extensions; keys and proofs; start-up; records of data, and
    // their tags. (The low byte of the version of a hello's record means nothing, RFC 8446 5.1.)
    let sender = [
        0, 1, 3, 5, 9, 20, 60, 100, 200, 300, 400, 500, 700, 1_500, 9_000, 17_000, 300_000,
    ];
    let receiver = [
        0, 1, 5, 11, 44, 60, 100, 130, 140, 200, 300, 400, 500, 600, 700,
    ];
    let all = sender.map(|at| (true, at)).into_iter();
    for (side, offset) in all.chain(receiver.map(|at| (false, at))) {
        let hit = Arc::new(AtomicBool::new(false));
        let done = Arc::clone(&hit);
        let at = relay(
            to,
            Box::new(move |from_sender, position, bytes| {
                if from_sender == side && (position..position + bytes.len()).contains(&offset) {
                    bytes[offset - position] ^= 0x08;
                    done.store(true, Ordering::SeqCst);
                }
                true
            }),
        );
        let what = format!(
            "byte {offset} of the {}",
            if side { "sender" } else { "receiver" }
        );
        let out = stage.send(at, &stage.peer());
        println!("{what}: {}: {}", out.code, out.stderr);
        assert!(hit.load(Ordering::SeqCst), "{what}: never came");
        assert!([3, 4].contains(&out.code), "{what}: {out:?}");
        let reasons = [
            "tampered with",
            "tampering with",
            "cut the connection",
            "does not speak iWARP by TLS",
            "no answer from",
        ];
        assert!(
            reasons.iter().any(|why| out.stderr.contains(why)),
            "{what}: {out:?}"
        );
        // What came before the change may have been all that is needed, and only the answer is lost.
        if let Ok(there) = fs::read(stage.dir.join("to/file")) {
            assert!(!side && there == noise(LEN, 1), "{what}: it was accepted");
        }
        stage.reset();
    }
}

/// What a sender said in a good session, said again.
fn replay(stage: &Stage) {
    let to = stage.listener.addr();
    let tape = Arc::new(Mutex::new(Vec::new()));
    let recorder = Arc::clone(&tape);
    let at = relay(
        to,
        Box::new(move |from_sender, _, bytes| {
            if from_sender {
                recorder.lock().unwrap().extend_from_slice(bytes);
            }
            true
        }),
    );
    stage.send(at, &stage.peer()).ok();
    stage.arrived();
    let mut again = TcpStream::connect(to).unwrap();
    // It may be closed before all of it is said.
    let _ = again.write_all(&tape.lock().unwrap());
    let _ = again.read_to_end(&mut Vec::new());
    stage.nothing_came();
}

/// Somebody who would like to talk without TLS, to either of them.
fn downgrade(stage: &Stage) {
    let device = Device::open().unwrap();
    let plain = ConnParam::default();
    let door =
        cm::Listener::bind(&device, format!("{MIDDLE}:0").parse().unwrap(), 8, &plain).unwrap();
    let out = stage.send(door.local_addr(), &stage.peer());
    refused(&out, "does not speak iWARP by TLS");

    let hello = Hello {
        version: VERSION,
        status: Status::Ok,
        key: false,
        nonce: [1; 32],
    };
    let (pd, cq) = (
        device.alloc_pd().unwrap(),
        device.create_cq(4, None).unwrap(),
    );
    let param = ConnParam {
        private_data: hello.encode().to_vec(),
        ..plain
    };
    let init = weft_verbs::QpInit::new(&cq, &cq);
    match cm::connect(stage.listener.addr(), &pd, &init, &param) {
        Err(ConnectError::Protocol(why)) => assert!(why.contains("TLS"), "{why}"),
        other => panic!("{:?}", other.err()),
    }
    stage.nothing_came();
}

/// The end of the TCP connection is not the end of the file, and the next attempt goes on.
fn cut(stage: &Stage) {
    let cut_at = LEN / 2;
    let at = relay(
        stage.listener.addr(),
        Box::new(move |from_sender, position, _| !from_sender || position < cut_at),
    );
    let out = stage.send(at, &stage.peer());
    assert_eq!(out.code, 3, "{out:?}");
    assert!(out.stderr.contains("cut the connection"), "{out:?}");
    assert!(!stage.dir.join("to/file").exists());
    stage.reset();
}
