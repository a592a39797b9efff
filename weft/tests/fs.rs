//! `weft fs` as its users have it: scripts, keys, and a mounted server.

use crate::common;

use std::fs;
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use crate::common::{Output, as_user, names, noise, until, weft};

/// A running `weft fs serve`.
pub(crate) struct Server {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    addr: String,
    /// Empty with `--plain`.
    fingerprint: String,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        Self::start_with(&mut weft(), args)
    }

    pub(crate) fn start_with(command: &mut Command, args: &[&str]) -> Self {
        let mut child = command
            .args(["fs", "serve", "--bind", "127.0.0.1:0"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut after = |start: &str| {
            let mut said = lines.by_ref().map_while(Result::ok);
            let found = said.find_map(|line| line.strip_prefix(start).map(str::to_owned));
            let rest = found.expect(start);
            rest.split([',', ';']).next().unwrap().to_owned()
        };
        let addr = after("serving on ");
        let fingerprint = if args.contains(&"--plain") {
            String::new()
        } else {
            after("the key of this server is ")
        };
        Self {
            child,
            lines,
            addr,
            fingerprint,
        }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        format!("/rdma/{}/{name}", self.addr)
    }

    /// Ends it, and returns what it has said beside its address and key.
    pub(crate) fn said(mut self) -> Vec<String> {
        self.kill();
        self.lines.by_ref().map_while(Result::ok).collect()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(args: &[&str]) -> Output {
    Output::of(weft().arg("fs").args(args))
}

#[test]
fn scripts_put_list_get_and_remove() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::create_dir(file("offered")).unwrap();
    fs::write(file("offered/film"), noise(700_000, 1)).unwrap();
    let bytes = noise(3_000_001, 2);
    fs::write(file("in"), &bytes).unwrap();
    let server = Server::start(&["--keep", "--quota", "16M", &file("offered")]);
    run(&["put", &file("in"), &server.path("")]).ok();
    run(&["mkdir", &server.path("d")]).ok();
    run(&["put", &file("in"), &server.path("d")]).ok();
    run(&["put", &file("in"), &server.path("hinted:4M")]).ok();
    let listed = run(&["ls", "--json", &server.path("")]);
    listed.ok();
    let entries: Vec<serde_json::Value> = listed
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let short: Vec<_> = entries
        .iter()
        .map(|e| {
            let text = |key: &str| e[key].as_str().unwrap().to_owned();
            (text("name"), text("kind"), e["size"].as_u64().unwrap())
        })
        .collect();
    let expected = [
        ("d", "folder", 0),
        ("film", "file", 700_000),
        ("hinted", "buffer", 4 << 20),
        ("in", "buffer", 3_000_001),
    ];
    let expected = expected.map(|(name, kind, size)| (name.to_owned(), kind.to_owned(), size));
    assert_eq!(short, expected);
    for (name, wanted) in [
        ("in", &bytes),
        ("d/in", &bytes),
        ("film", &noise(700_000, 1)),
    ] {
        run(&["get", &server.path(name), &file("out")]).ok();
        assert!(fs::read(file("out")).unwrap() == *wanted, "{name}");
        fs::remove_file(file("out")).unwrap();
    }
    run(&["get", &server.path("film"), dir.path().to_str().unwrap()]).ok();
    assert_eq!(
        names(dir.path()),
        ["film", "in", "offered"],
        "nothing half-done is left"
    );

    // Standard input and output, and appending.
    for (flag, text) in [("--no-progress", "one\n"), ("--append", "two\n")] {
        let mut child = weft()
            .args(["fs", "put", flag, "-", &server.path("log")])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }
    let cat = run(&["cat", &server.path("log"), &server.path("log")]);
    cat.ok();
    assert_eq!(cat.stdout, "one\ntwo\none\ntwo\n");
    // Few bytes without the end of a line stay in a buffer until the end: that they are lost is told.
    fs::write(file("few"), "few").unwrap();
    run(&["put", &file("few"), &server.path("few")]).ok();
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut cat = weft();
    let cat = cat.args(["fs", "cat", &server.path("few")]).stdout(full);
    assert_eq!(cat.status().unwrap().code(), Some(1));
    // A pipe or a device stays what it is.
    fs::remove_file(file("few")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, file("few"), 0o600.into()).unwrap();
    let pipe = file("few");
    let reader = std::thread::spawn(move || fs::read(pipe).unwrap());
    run(&["get", &server.path("few"), &file("few")]).ok();
    assert_eq!(reader.join().unwrap(), b"few");
    fs::remove_file(file("few")).unwrap();
    run(&["rm", &server.path("few")]).ok();
    // Names are shown as they are.
    run(&["put", &file("in"), &server.path("m\u{fc}ll")]).ok();
    let listed = run(&["ls", &server.path("")]);
    assert!(listed.stdout.contains("m\u{fc}ll"), "{}", listed.stdout);
    run(&["rm", &server.path("m\u{fc}ll")]).ok();
    run(&[
        "rm",
        &server.path("log"),
        &server.path("d/in"),
        &server.path("d"),
    ])
    .ok();

    // In JSON a name is as it is; on a terminal it drives nothing.
    fs::write(file("in"), "odd").unwrap();
    let odd = format!("{}/o\u{1b}]d\n", server.path("odd"));
    run(&["mkdir", &server.path("odd")]).ok();
    run(&["put", &file("in"), &odd]).ok();
    let listed = run(&["ls", "--json", &server.path("odd")]).stdout;
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["name"], "o\u{1b}]d\n");
    let listed = run(&["ls", &server.path("odd")]).stdout;
    assert!(listed.contains("o\\u{1b}]d\\n"), "{listed}");
    run(&["rm", &odd, &server.path("odd")]).ok();

    // What cannot be.
    fs::write(file("big"), vec![0; 17 << 20]).unwrap();
    for (args, code, what) in [
        (vec!["put", &file("big"), &server.path("big")], 1, "--quota"),
        (
            vec!["put", &file("in"), &file("big"), &server.path("one")],
            2,
            "is no folder",
        ),
        (
            vec!["put", &file("offered"), &server.path("x")],
            2,
            "is a directory",
        ),
        // Nothing is left of the one that did not fit.
        (vec!["get", &server.path("big")], 1, "weft fs ls"),
        (vec!["get", &server.path("nosuch")], 1, "weft fs ls"),
        (
            vec!["put", &file("in"), &server.path("film")],
            1,
            "cannot be changed",
        ),
        (vec!["cat", &server.path("log")], 1, "No such file"),
        (vec!["rm", &server.path("film")], 1, "cannot be changed"),
        (vec!["cat", &server.path("../x")], 2, "/rdma/HOST:PORT/NAME"),
        (
            vec!["cat", "/rdma/127.0.0.1:0/x"],
            2,
            "/rdma/HOST:PORT/NAME",
        ),
        (vec!["cat", "/tmp/x"], 2, "/rdma/"),
        (vec!["cat", "/rdma/127.0.0.1:1/x"], 3, "weft fs serve"),
        (
            vec![
                "serve",
                "--bind",
                "0.0.0.0:0",
                "--authorized",
                "/nonexistent",
            ],
            2,
            "--open",
        ),
    ] {
        let out = run(&args);
        assert!(
            out.code == code && out.stderr.contains(what),
            "{args:?}: {out:?}"
        );
    }
}

#[test]
fn a_server_that_frees_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("in");
    fs::write(&file, "x").unwrap();
    let server = Server::start(&[]);
    let out = run(&["put", file.to_str().unwrap(), &server.path("x")]);
    assert!(out.code == 1 && out.stderr.contains("--keep"), "{out:?}");
}

#[test]
fn strangers_are_let_in_by_their_keys_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(
        dir.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    let authorized = dir.path().join("authorized");
    fs::write(&authorized, "").unwrap();
    let server = Server::start(&["--keep", "--authorized", authorized.to_str().unwrap()]);
    let Some(mut other) = as_user(dir.path(), 1234) else {
        return;
    };
    let key = Output::of(other.arg("key"));
    key.ok();
    let line = key
        .stdout
        .lines()
        .find(|line| line.contains("weft-"))
        .or(key.stdout.lines().next())
        .unwrap()
        .to_owned();
    let list = |peer: &str| {
        let mut other = as_user(dir.path(), 1234).unwrap();
        other.args(["fs", "ls", &server.path("")]);
        if !peer.is_empty() {
            other.args(["--peer", peer]);
        }
        Output::of(&mut other)
    };
    let unknown = list("");
    assert!(
        unknown.code == 4 && unknown.stderr.contains(&server.fingerprint),
        "{unknown:?}"
    );
    let wrong = list("SHA256:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA");
    assert!(
        wrong.code == 4 && wrong.stderr.contains("--peer"),
        "{wrong:?}"
    );
    let stranger = list(&server.fingerprint);
    assert!(
        stranger.code == 4 && stranger.stderr.contains("authorized_keys"),
        "{stranger:?}"
    );
    fs::write(&authorized, line).unwrap();
    list(&server.fingerprint).ok();
}

/// A mounted server.
struct Mounted {
    child: Child,
    dir: PathBuf,
}

impl Mounted {
    fn mount(server: &Server, dir: &Path) -> Option<Self> {
        let dir = dir.join("mnt");
        fs::create_dir_all(&dir).unwrap();
        let opened = fs::File::options().read(true).write(true).open("/dev/fuse");
        if let Err(e) = opened {
            println!("skipped: /dev/fuse: {e}");
            return None;
        }
        let fusermount = std::env::var_os("PATH").is_some_and(|path| {
            std::env::split_paths(&path).any(|dir| dir.join("fusermount3").exists())
        });
        if !rustix::process::geteuid().is_root() && !fusermount {
            println!("skipped: neither root nor fusermount3");
            return None;
        }
        let mut child = weft()
            .args(["fs", "mount", &server.path(""), dir.to_str().unwrap()])
            // Over TLS, as from another host.
            .env("WEFT_LOCAL", "off")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        if !line.starts_with("mounted ") {
            let mut said = String::new();
            let mut stderr = BufReader::new(child.stderr.take().unwrap());
            while stderr.read_line(&mut said).unwrap_or(0) > 0 {}
            let _ = child.wait();
            // Where there is the device and no right to mount: a container.
            assert!(said.contains("not permitted"), "{said}");
            println!("skipped: {said}");
            return None;
        }
        Some(Self { child, dir })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn sh(&self, script: &str) -> String {
        let out = Command::new("timeout")
            .args(["-k", "1", "60", "bash", "-euc", script])
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{script}: {}\n{said}", out.status);
        String::from_utf8(out.stdout).unwrap()
    }

    /// Ends it as Ctrl-C does; what is left of the mount goes.
    fn end(&mut self) -> Option<i32> {
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        until("it ends", || {
            self.child.try_wait().unwrap().map(|status| status.code())
        })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = rustix::mount::unmount(&self.dir, rustix::mount::UnmountFlags::DETACH);
    }
}

fn has(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).exists()));
    if !found {
        println!("skipped: there is no {program}");
    }
    found
}

#[test]
fn programs_on_a_mounted_server() {
    let dir = tempfile::tempdir().unwrap();
    let offered = dir.path().join("offered");
    fs::create_dir(&offered).unwrap();
    let film = noise(3_000_000, 9);
    fs::write(offered.join("film"), &film).unwrap();
    let server = Server::start(&["--keep", "--quota", "256M", offered.to_str().unwrap()]);
    let Some(mut mounted) = Mounted::mount(&server, dir.path()) else {
        return;
    };
    assert!(fs::read(mounted.file("film")).unwrap() == film);
    assert!(fs::write(mounted.file("film"), "x").is_err());
    mounted.sh(
        "cp film a; cmp film a; dd if=film of=b bs=3000 status=none; cmp film b; mkdir -p d/e; mv b d/e/c; cmp film d/e/c
         mv d f; cmp film f/e/c; tar -cf t.tar f; mkdir x; tar -C x -xf t.tar; diff -r f x/f; rm -r x f t.tar
         echo hi > s; echo more >> s; test \"$(cat s)\" = \"hi\nmore\"; truncate -s 1 s; test \"$(cat s)\" = h; rm s
         exec 5>gone; echo x >&5; rm gone; echo y >&5; exec 5>&-; test ! -e gone",
    );
    // A reader changes no time, a writer does. The kernel keeps attributes for 100 ms.
    mounted.sh(
        "t() { sleep .15; stat -c %.Y in; }; echo 1 > in; was=$(t); cat in; cp in out; test $(t) = $was; echo 2 >> in; test $(t) != $was; rm in out",
    );
    // The server refuses, also what the kernel would let root do.
    mounted.sh(
        "no() { ! (\"$@\") 2>/dev/null; }; set_r() { echo $1 > r; }; echo x > r; chmod 444 r; test $(stat -c %a r) = 555
         test $(cat r) = x; no set_r y; cp -p r r2; mv r2 r; chmod 200 r; no cat r; set_r z; chmod 644 r; test $(cat r) = z
         exec 5<r; chmod 200 r; no cat r; exec 5<&-; chmod 400 r; rm -f r; no chmod 600 film; test $(cat film | wc -c) = 3000000
         (umask 077; echo p > p); test $(stat -c %a p) = 711; rm p",
    );
    if has("python3") {
        let said = mounted.sh("python3 -c \"
import os
def tries(what, *how):
    try: return what(*how)
    except OSError as error: return error.strerror
f = os.open('f', os.O_CREAT | os.O_RDWR, 0o644)
g = os.open('g', os.O_CREAT | os.O_RDWR, 0o600)
os.rename('g', 'f')
os.fchmod(f, 0o640)
print(oct(os.stat('f').st_mode & 0o666))
os.unlink('f')
os.fchmod(g, 0o644)
h = os.open('h', os.O_CREAT | os.O_RDWR, 0o644)
os.chmod('h', 0o200)
print(tries(os.open, 'h', os.O_RDWR), os.access('h', os.R_OK), os.access('h', os.W_OK))
os.chmod('h', 0o400)
print(tries(os.truncate, 'h', 0))
os.ftruncate(h, 7)
r = os.open('h', os.O_RDONLY)
os.close(h)
os.chmod('h', 0o600)
os.truncate('h', 3)
print(os.stat('h').st_size)
os.unlink('h')\"");
        let expected = "0o600\nPermission denied False True\nPermission denied\n3\n";
        assert_eq!(said, expected);
    }
    assert_eq!(mounted.sh("ls"), "a\nfilm\n");
    // What is written elsewhere is seen when a file is opened again.
    let elsewhere = dir.path().join("elsewhere");
    fs::write(&elsewhere, "from elsewhere").unwrap();
    run(&["put", elsewhere.to_str().unwrap(), &server.path("a")]).ok();
    until("the kernel looks again", || {
        (fs::read(mounted.file("a")).unwrap() == b"from elsewhere").then_some(())
    });
    if has("sqlite3") {
        let said = mounted.sh(
            "sqlite3 t.db \"create table t(a, b); insert into t values(1, 'x'), (2, 'y'); begin; insert into t select a + 10, b from t; commit;\"
             sqlite3 t.db \"delete from t where a = 1; vacuum; select a || b from t order by a; pragma integrity_check;\"; rm t.db",
        );
        assert_eq!(said, "2y\n11x\n12y\nok\n");
    }
    if has("busybox") {
        let said = mounted.sh("busybox cp film bb; busybox cmp film bb; busybox wc -c < bb; rm bb");
        assert_eq!(said.trim(), "3000000");
    }
    // A Go program: its system calls do not go through a C library.
    if has("gofmt") {
        let said = mounted.sh(
            "printf 'package main\\nfunc main(){println(1)}\\n' > g.go; gofmt -w g.go; cat g.go; rm g.go",
        );
        assert_eq!(said, "package main\n\nfunc main() { println(1) }\n");
    }
    if has("python3") {
        let said = mounted.sh("python3 -c \"
import mmap
f = open('m', 'w+b'); f.truncate(10000)
m = mmap.mmap(f.fileno(), 10000); m[5000:5005] = b'hello'; m.flush(); m.close(); f.close()
assert open('m', 'rb').read()[5000:5005] == b'hello'
print('mapped')\"; rm m");
        assert_eq!(said, "mapped\n");
    }
    if has("fio") {
        mounted.sh(
            "fio --name=v --filename=fio --size=8m --bs=4k-64k --rw=randrw --verify=crc32c --ioengine=psync --output=/dev/null; rm fio",
        );
    }
    assert_eq!(mounted.end(), Some(0));
    assert!(names(&mounted.dir).is_empty(), "it is unmounted");
}

#[test]
fn a_killed_server_is_an_error_and_not_a_wait() {
    let dir = tempfile::tempdir().unwrap();
    let offered = dir.path().join("offered");
    fs::create_dir(&offered).unwrap();
    let film = fs::File::create(offered.join("film")).unwrap();
    film.set_len(64 << 20).unwrap();
    let mut server = Server::start(&[offered.to_str().unwrap()]);
    let Some(mut mounted) = Mounted::mount(&server, dir.path()) else {
        return;
    };
    let file = fs::File::open(mounted.file("film")).unwrap();
    let mut part = [1; 4096];
    file.read_exact_at(&mut part, 0).unwrap();
    assert_eq!(part, [0; 4096]);
    server.kill();
    let began = Instant::now();
    let error = file.read_exact_at(&mut part, 50 << 20).unwrap_err();
    println!("an error after {:?}", began.elapsed());
    assert_eq!(
        error.raw_os_error(),
        Some(rustix::io::Errno::IO.raw_os_error())
    );
    drop(file);
    assert_eq!(mounted.end(), Some(0));
}

#[test]
fn three_hosts_share_a_buffer() {
    if !["ip", "unshare", "nsenter"].into_iter().all(has) {
        return;
    }
    let Some(library) = common::fs_library() else {
        println!("skipped: libweft-fs.so is not built (cargo build -p weft-libfs)");
        return;
    };
    let spaces = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
    let mut unshare = vec!["unshare"];
    if !rustix::process::geteuid().is_root() {
        unshare.extend(["--user", "--map-root-user"]);
    }
    unshare.extend(spaces);
    let probe = Command::new(unshare[0])
        .args(&unshare[1..])
        .arg("true")
        .status();
    if !probe.is_ok_and(|status| status.success()) {
        println!("skipped: no namespaces to be had");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let out = Command::new("timeout")
        .args(["-k", "1", "60"])
        .args(&unshare)
        .args(["bash", "-c", include_str!("three_hosts.sh")])
        .env("WEFT", env!("CARGO_BIN_EXE_weft"))
        .env("WEFT_FS_LIB", library)
        .env("DIR", dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    assert!(
        out.status.success() && said.contains("all is well"),
        "{}: {said}{}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
}
