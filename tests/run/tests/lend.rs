//! Sends from the program's own memory: `--mode zsdp` and `--mode azsdp`.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use weft_ring::Role;
use weft_ring::source::Terms;
use weft_ring::stream::{Published, Stream};
use weft_run::meet::{self, Ends};
use weft_run::peers::Peers;
use weft_run_tests::{
    Done, PYTHON, Weft, compiled, free_port, have, iperf3, library, pattern, plain, python, say,
    weft,
};

/// Each mode: its name here, and the two variables.
const MODES: [(&str, &str, &str); 3] = [
    ("zsdp", "zsdp", "block"),
    ("azsdp, block on write", "azsdp", "block"),
    ("azsdp, copy on write", "azsdp", "copy"),
];

fn lending((_, mode, on_write): (&str, &str, &str)) -> Weft {
    weft().env("WEFT_RUN", mode).env("WEFT_RUN_AZSDP", on_write)
}

/// The traps, compiled once.
fn traps() -> Option<&'static Path> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    FILE.get_or_init(|| compiled("lend", env!("CARGO_TARGET_TMPDIR")))
        .as_deref()
}

/// Libraries that `--azsdp-malloc` preloads, alone and behind the other library.
fn malloc_hook() -> [String; 2] {
    let both = library().display().to_string();
    let alone = both.replace("libweft-run.so", "libweft-malloc.so");
    [alone.clone(), format!("{both}:{alone}")]
}

/// A number before a text, summed over all lines.
fn sum(text: &str, after: &str) -> u64 {
    let counts = text.match_indices(after).filter_map(|(at, _)| {
        let before = text[..at].trim_end();
        before.rsplit([' ', '\n']).next()?.parse::<u64>().ok()
    });
    counts.sum()
}

fn lent(text: &str) -> u64 {
    sum(text, "B sent from the program's memory")
}

fn fetched(text: &str) -> u64 {
    sum(text, "B fetched from the peer's memory")
}

const SCENARIOS: [&str; 39] = [
    "stream",
    "again",
    "overwrite",
    "both",
    "alarm",
    "killed",
    "unmap",
    "advise",
    "free",
    "fork",
    "exec",
    "spawn",
    "exit",
    "_exit",
    "close",
    "slowclose",
    "shutdown",
    "ended",
    "segv",
    "threads",
    "calls",
    "kinds",
    "nonblock",
    "epoll",
    "vector",
    "stopped",
    "splice",
    "command",
    "busy",
    "droprx",
    "droptx",
    "nobuf",
    "trim",
    "anon",
    "names",
    "renamed",
    "heirs",
    "others",
    "twins",
];

fn run_traps(side: &Weft, program: &Path) -> Vec<Done> {
    let run = |name: &&str| {
        let done = side.run(&format!("{} {name}", program.display()));
        done.good().says(&format!("ok {name}"));
        done
    };
    SCENARIOS.iter().map(run).collect()
}

#[test]
fn the_traps_are_passed_on_plain_tcp() {
    if let Some(program) = traps() {
        run_traps(&plain(), program);
        // And through the rings, which copy.
        let done = run_traps(&weft(), program);
        assert!(done.iter().all(|done| lent(&done.text) == 0));
    }
}

fn traps_in(mode: (&str, &str, &str)) {
    let Some(program) = traps() else { return };
    for (done, name) in run_traps(&lending(mode), program).iter().zip(SCENARIOS) {
        let n = lent(&done.text) + fetched(&done.text);
        assert!(n > 1 << 20, "{}, {name}: {}", mode.0, done.show());
    }
}

#[test]
fn every_byte_is_that_of_the_send_when_it_waits() {
    traps_in(MODES[0]);
}

#[test]
fn every_byte_is_that_of_the_send_when_a_write_waits() {
    traps_in(MODES[1]);
}

#[test]
fn every_byte_is_that_of_the_send_when_a_write_copies() {
    traps_in(MODES[2]);
}

/// `azsdp` lends shared memory that no other process can have, and all shared memory if the user declares that no other process writes to it.
#[test]
fn shared_memory_is_lent_where_nobody_else_writes_to_it() {
    let Some(program) = traps() else { return };
    const OTHERS: &str = "other processes can have the shared memory";
    let mib = |done: &Done| lent(&done.text) >> 20;
    for mode in [MODES[1], MODES[2]] {
        let run = |name: &str, trust: bool| {
            let side = lending(mode);
            let side = if trust {
                side.env("WEFT_RUN_SHARED", "trust")
            } else {
                side
            };
            let done = side.run(&format!("{} {name}", program.display()));
            done.good().says(&format!("ok {name}"));
            done
        };
        // In addition to the 1.5 MiB of the first steps. Sends with too many faults are copied for a while.
        for (name, least) in [("anon", 8), ("names", 8), ("renamed", 6), ("heirs", 4)] {
            let done = run(name, false);
            assert!(mib(&done) >= least, "{}, {name}: {}", mode.0, done.show());
        }
        for name in ["others", "twins"] {
            let done = run(name, false);
            done.says(OTHERS);
            assert!(mib(&done) < 4, "{}, {name}: {}", mode.0, done.show());
        }
        let done = run("twins", true);
        assert!(!done.text.contains(OTHERS), "{}", done.show());
        assert!(mib(&done) >= 8, "{}: {}", mode.0, done.show());
    }
}

#[test]
fn large_allocations_get_pages_of_their_own() {
    let Some(program) = compiled("pages", env!("CARGO_TARGET_TMPDIR")) else {
        return;
    };
    let program = program.display();
    plain().run(&program.to_string()).good().says("ok");
    for preload in malloc_hook() {
        let side = lending(MODES[2]).env("LD_PRELOAD", preload);
        side.run(&format!("{program} own")).good().says("ok");
    }
}

/// 16 pages from malloc(3): without the hook they begin behind the allocator's words, and only the 15 whole pages in them are lent.
#[test]
fn whole_buffers_are_lent_with_the_malloc_hook() {
    let Some(program) = traps() else { return };
    let line = format!("{} whole", program.display());
    let [_, both] = malloc_hook();
    let done = lending(MODES[1]).env("LD_PRELOAD", &both).run(&line);
    done.good().says("ok whole");
    // The first steps lend 48 pages at a time.
    let bytes = lent(&done.text);
    assert!(
        bytes > 4 << 20 && bytes.is_multiple_of(65536),
        "{}",
        done.show()
    );
    for name in ["stream", "free", "trim", "threads", "vector", "fork"] {
        let side = lending(MODES[2]).env("LD_PRELOAD", &both);
        let done = side.run(&format!("{} {name}", program.display()));
        done.good().says(&format!("ok {name}"));
    }
}

#[test]
fn memory_under_way_is_protected_and_says_so() {
    let Some(program) = traps() else { return };
    let line = format!("{} overwrite", program.display());
    let block = lending(MODES[1]).run(&line);
    assert!(sum(&block.good().text, " faults") > 0, "{}", block.show());
    let copy = lending(MODES[2]).run(&line);
    let moved = sum(&copy.good().text, "B moved while under way");
    assert!(moved > 1 << 20, "{}", copy.show());
}

#[test]
fn a_program_that_writes_too_soon_is_copied_for_a_while() {
    let Some(program) = traps() else { return };
    let line = format!("{} faulty", program.display());
    let done = lending(MODES[2]).run(&line);
    let often = "the program wrote to memory under way too often";
    assert!(done.good().text.contains(often), "{}", done.show());
}

#[test]
fn random_calls_are_as_on_tcp() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = python("lend_stress.py");
    // `WEFT_STRESS_SECONDS` runs other seeds for this time.
    let seconds = std::env::var("WEFT_STRESS_SECONDS").ok();
    let seconds: Option<u64> = seconds.and_then(|text| text.parse().ok());
    let begun = Instant::now();
    let goes_on = |seed: &u64| match seconds {
        Some(seconds) => begun.elapsed().as_secs() < seconds,
        None => *seed <= 2,
    };
    for seed in (1..).take_while(goes_on) {
        if seconds.is_some() {
            say(&format!("seed {seed}"));
        }
        let line = format!("{script} {seed} =25");
        let lines = |done: &Done| {
            let ours = |line: &&str| line.starts_with("> ");
            let text = done.good().text.lines().filter(ours);
            text.map(str::to_owned).collect::<Vec<_>>()
        };
        let expected = lines(&plain().run(&line));
        assert!(expected.len() > 200);
        for mode in MODES {
            let done = lending(mode).run(&line);
            assert!(fetched(&done.text) > 1 << 20, "{}", done.show());
            for (at, (got, one)) in lines(&done).iter().zip(&expected).enumerate() {
                let before = expected[at.saturating_sub(30)..at].join("\n");
                assert_eq!(
                    got, one,
                    "{}, seed {seed}, line {at}, after\n{before}",
                    mode.0
                );
            }
            assert_eq!(lines(&done).len(), expected.len());
        }
    }
}

#[test]
fn iperf3_and_redis_and_nginx_move_large_data() {
    let dir = tempfile::tempdir().unwrap();
    for mode in MODES {
        let mut n = 0;
        if have(&[("iperf3", "iperf3")]) {
            let (server, port) = iperf3(&lending(mode));
            let client = format!("iperf3 -c 127.0.0.1 -p {port} -n 100M -l 1M --forceflush");
            let done = lending(mode).run(&client);
            done.good().says("iperf Done.");
            n += lent(&done.text);
            server.end().good();
        }
        if have(&[
            ("redis-server", "redis-server"),
            ("redis-cli", "redis-tools"),
        ]) {
            let port = free_port();
            let server = format!(
                "redis-server --port {port} --dir {} --save ",
                dir.path().display()
            );
            let running = lending(mode).start(&(server + "900 1")).listens(port);
            let script = dir.path().join("commands.sh");
            let commands = format!(
                "set -e; cd {}; head -c 5000000 /dev/urandom | base64 -w0 > big
                 for n in 1 2 3; do redis-cli -p {port} -x SET big$n < big; redis-cli -p {port} BGSAVE || true; done
                 for n in 1 2 3; do redis-cli -p {port} GET big$n | tr -d '\\n' | cmp - big && echo same; done",
                dir.path().display()
            );
            fs::write(&script, commands).unwrap();
            let done = lending(mode).run(&format!("sh {}", script.display()));
            done.good();
            assert_eq!(done.text.matches("same").count(), 3, "{}", done.show());
            let served = running.interrupt();
            n += lent(&done.text) + lent(&served.text);
        }
        if have(&[("/usr/sbin/nginx", "nginx"), ("curl", "curl")]) {
            nginx(mode, dir.path());
        }
        say(&format!("{}: {n} B sent from memory", mode.0));
        assert!(n > 0 || mode.1 == "zsdp", "{}", mode.0);
    }
}

/// Proxied and buffered answers, so that nginx sends from its own memory and not from a file.
fn nginx(mode: (&str, &str, &str), dir: &Path) {
    let port = free_port();
    let body = pattern(3_000_000);
    fs::write(dir.join("body"), &body).unwrap();
    let conf = format!(
        "daemon off; master_process off; pid {0}/nginx.pid; error_log stderr;
         events {{ }}
         http {{ access_log off; sendfile off; output_buffers 2 1m; client_body_temp_path {0}/a; proxy_temp_path {0}/b;
           fastcgi_temp_path {0}/c; uwsgi_temp_path {0}/d; scgi_temp_path {0}/e;
           server {{ listen 127.0.0.1:{port}; root {0}; }} }}",
        dir.display()
    );
    let file = dir.join("nginx.conf");
    fs::write(&file, conf).unwrap();
    let running = lending(mode)
        .start(&format!("/usr/sbin/nginx -c {}", file.display()))
        .listens(port);
    let url = format!("http://127.0.0.1:{port}/body");
    let out = dir.join("out");
    let urls = [url.as_str(); 4].join(" ");
    let outs: String = ["-o ", out.to_str().unwrap(), " "].concat().repeat(4);
    let done = lending(mode).run(&format!("curl -s -S -f {outs} {urls}"));
    done.good();
    assert!(fs::read(&out).unwrap() == body, "{}", mode.0);
    running.interrupt();
}

/// The liar meets victims of every user.
pub(crate) fn everybody() -> Peers {
    Peers::with("any").unwrap()
}

/// A peer that knows the formats and lies.
pub(crate) struct Liar {
    pub(crate) tcp: TcpStream,
    pub(crate) stream: Stream,
    pub(crate) role: Role,
    pub(crate) bell: UnixStream,
    /// Bytes that the victim has sent over TCP.
    pub(crate) count: u64,
}

/// Offers a victim that has opened its listener a ring of so many bytes. `dialled`: by what this has begun to.
pub(crate) fn offer(
    tcp: &TcpStream,
    ends: &Ends,
    bytes: u32,
    dialled: &mut Option<OwnedFd>,
) -> Option<(Stream, UnixStream)> {
    let wire = let_in(ends, dialled)?;
    let (stream, segment) = Stream::create_filled(bytes).unwrap();
    make_offer(tcp, &wire, segment.as_fd());
    Some((stream, wire.into()))
}

/// Dials a victim, and returns the wire when it lets us in.
pub(crate) fn let_in(ends: &Ends, dialled: &mut Option<OwnedFd>) -> Option<OwnedFd> {
    if dialled.is_none() {
        let new = meet::dial(ends, &everybody()).ok().flatten();
        *dialled = new.map(|new| new.wire);
    }
    match meet::is_let_in(dialled.as_ref()?) {
        None => None,
        Some(true) => dialled.take(),
        Some(false) => {
            *dialled = None;
            None
        }
    }
}

pub(crate) fn make_offer(tcp: &TcpStream, wire: &OwnedFd, segment: BorrowedFd<'_>) {
    let cookie = meet::peer(tcp, &everybody()).unwrap().unwrap().cookie;
    meet::offer(wire, tcp, cookie, segment).unwrap();
}

impl Liar {
    /// Meets a victim, and goes over to the ring for what it sends.
    pub(crate) fn meet(port: u16) -> Liar {
        let mut tcp = TcpStream::connect(("127.0.0.1", port)).unwrap();
        tcp.set_nodelay(true).unwrap();
        let ends = Ends::of(&tcp).unwrap();
        let role = ends.role();
        let listener = (role == Role::Responder).then(|| meet::listen(&ends).unwrap());
        let (mut pending, mut dialled) = (meet::Pending::<OwnedFd>::new(), None);
        let mut met = None;
        let mut count = 0;
        while met.is_none() {
            assert!(count < 30, "the victim did not come");
            tcp.write_all(b"x").unwrap();
            count += 1;
            tcp.read_exact(&mut [0]).unwrap();
            for _ in 0..20 {
                if met.is_some() {
                    break;
                }
                met = match &listener {
                    Some(listener) => meet::take(listener, &mut pending, &tcp, &everybody())
                        .unwrap()
                        .map(|offer| (Stream::open(offer.segment).unwrap(), offer.bell.into())),
                    None => offer(&tcp, &ends, 1 << 18, &mut dialled),
                };
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let (stream, bell) = met.unwrap();
        stream.join(role, count);
        // By TCP, counted, until the victim switches.
        while !stream.has_switched(role) {
            assert!(count < 60, "the victim does not switch");
            if stream.begin_tcp(role) {
                tcp.write_all(b"y").unwrap();
                stream.end_tcp(role, 1);
                count += 1;
                tcp.read_exact(&mut [0]).unwrap();
                // It looks when it comes for the next.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        Liar {
            tcp,
            stream,
            role,
            bell,
            count,
        }
    }

    pub(crate) fn until(what: impl Fn() -> bool) {
        let begun = Instant::now();
        while !what() {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "the victim does not go on"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn publish(&self, from: u64, to: u64) {
        if self.stream.publish(self.role, from, to) == Ok(Published::Ring) {
            (&self.bell).write_all(b"!").unwrap();
        }
    }
}

/// Its name, what it does, and what the victim says.
type Lie<'a> = (&'a str, &'a dyn Fn(&Liar), &'a str);

#[test]
fn a_peer_that_lies_gets_a_reset_and_nothing_else() {
    if !have(&[PYTHON]) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("py/victim.py");
    let mut victim = Command::new(PYTHON.0)
        .arg(script)
        .env("LD_PRELOAD", library())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(victim.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    let port = line.trim().strip_prefix("port ").unwrap().parse().unwrap();

    static PROOF: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0x1234_5678);
    let truth = vec![7_u8; 100_000];
    let here = truth.as_ptr().expose_provenance() as u64;
    let proof = (&raw const PROOF).expose_provenance() as u64;
    let lies: [Lie<'_>; 8] = [
        (
            "none",
            &|l| l.stream.offer_source(l.role, 0, 1, here, 100_000),
            "end after 100000",
        ),
        (
            "no such memory",
            &|l| l.stream.offer_source(l.role, 0, 1, 4096, 100_000),
            "ECONNRESET after 0",
        ),
        (
            "the kernel's memory",
            &|l| {
                l.stream
                    .offer_source(l.role, 0, 1, u64::MAX - 200_000, 100_000);
            },
            "ECONNRESET after 0",
        ),
        (
            "an end before the beginning",
            &|l| l.stream.offer_source(l.role, 0, 1, u64::MAX - 10, 100_000),
            "ECONNRESET after 0",
        ),
        (
            "too long",
            &|l| l.stream.offer_source(l.role, 0, 1, here, 1 << 40),
            "ECONNRESET after 0",
        ),
        (
            "too many",
            &|l| l.stream.offer_source(l.role, 900, 1, here, 100),
            "ECONNRESET after 0",
        ),
        (
            "another proof",
            &|l| {
                l.stream.prove(l.role, here, 99);
                l.stream.offer_source(l.role, 0, 1, here, 100);
            },
            "ECONNRESET after 0",
        ),
        (
            "a lock that is never given back",
            &|l| {
                l.stream.offer_source(l.role, 0, 1, here, 100);
                assert_eq!(
                    l.stream.move_source(l.role, 0),
                    weft_ring::source::Move::Mine(0)
                );
            },
            "ECONNRESET after 0",
        ),
    ];
    for (name, lie, end) in lies {
        let liar = Liar::meet(port);
        liar.stream.prove(liar.role, proof, 0x1234_5678);
        liar.stream.put_slice(liar.role, 0, b"G");
        liar.publish(0, 1);
        Liar::until(|| liar.stream.terms(liar.role) == Terms::Ready);
        lie(&liar);
        liar.publish(1, 2);
        if name == "none" {
            Liar::until(|| liar.stream.completed_sources(liar.role) == 1);
        }
        if name.starts_with("a lock") {
            std::thread::sleep(Duration::from_millis(100));
        }
        if name == "none" || name.starts_with("a lock") {
            let Liar {
                tcp, stream, bell, ..
            } = liar;
            drop(tcp);
            drop(bell);
            drop(stream);
        }
        line.clear();
        said.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), end, "{name}");
    }
    // It is still there.
    let mut last = TcpStream::connect(("127.0.0.1", port)).unwrap();
    last.write_all(b"Gbye").unwrap();
    assert!(victim.wait().unwrap().success());

    assert_eq!(truth.len(), 100_000);
}
