//! Unmodified programs with the preload library: with a server of this host and user, whose memory they map, and the same as if it were on another host.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_fs::server::{Config, Server};
use weft_verbs::tls::{Identity, Tls};

/// The library, as cargo has just built it.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let deps = test.parent().unwrap();
    let file = "libweft_fs_preload.so";
    let places = [deps.join(file), deps.parent().unwrap().join(file)];
    let built = places.into_iter().filter(|path| path.exists());
    let age = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
    built.max_by_key(age).expect("the library is built")
}

struct World {
    server: Server,
    fingerprint: String,
    dir: tempfile::TempDir,
}

/// Place of the server, as programs find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Where {
    Here,
    Elsewhere,
}

const BOTH: [Where; 2] = [Where::Here, Where::Elsewhere];

impl World {
    fn new(keeps: bool, quota: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let offered = dir.path().join("offered");
        std::fs::create_dir(&offered).unwrap();
        std::fs::write(offered.join("film"), pattern(1_300_000, 5)).unwrap();
        let identity = Identity::generate().unwrap();
        let fingerprint = identity.public_key().fingerprint().to_string();
        let server = Server::start(Config {
            bind: "127.0.0.1:0".parse().unwrap(),
            dir: Some(offered),
            quota,
            keeps,
            max_clients: 64,
            tls: Tls::new(identity).unwrap(),
            admit: Arc::new(|_| false),
            open: false,
            via: weft_fs::Via::default(),
        })
        .unwrap();
        Self {
            server,
            fingerprint,
            dir,
        }
    }

    fn path(&self, name: &str) -> String {
        format!("/rdma/{}/{name}", self.server.local_addr())
    }

    fn file(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().into()
    }

    fn command(&self, place: Where, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command
            .args(["-k", "1", "60", program])
            .env("LD_PRELOAD", library())
            .env("WEFT_FS_PEERS", &self.fingerprint)
            .env(
                "WEFT_LOCAL",
                if place == Where::Here { "auto" } else { "off" },
            )
            .env("R", self.path(""))
            .env("D", self.dir.path())
            .current_dir(self.dir.path())
            .stdin(Stdio::null());
        command
    }

    /// Runs a script of the shell, and returns what it prints. It has to succeed.
    fn sh(&self, place: Where, script: &str) -> String {
        let out = self.try_sh(place, script);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(
            out.status.success(),
            "{place:?}: {script}: {}\n{said}",
            out.status
        );
        String::from_utf8(out.stdout).unwrap()
    }

    fn try_sh(&self, place: Where, script: &str) -> Output {
        self.command(place, "bash")
            .args(["-euc", script])
            .output()
            .unwrap()
    }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut x = seed | 1;
    std::iter::repeat_with(|| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    })
    .take(len)
    .collect()
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
fn cp_dd_tar_and_the_shell() {
    let world = World::new(true, 256 << 20);
    std::fs::write(world.file("in"), pattern(5_000_001, 3)).unwrap();
    for place in BOTH {
        let said = world.sh(
            place,
            r"
            cp in ${R}a; cp ${R}a out; cmp in out
            dd if=in of=${R}b bs=60000 status=none; dd if=${R}b of=out bs=7000 status=none; cmp in out
            cat ${R}a | cmp - in
            cmp ${R}film offered/film
            mkdir -p t/sub; cp in t/sub; echo y > t/y
            tar -cf ${R}t.tar t; mkdir -p x; tar -C x -xf ${R}t.tar; diff -r t x/t
            cp -r t ${R}tree; diff -r t ${R}tree; rm -r ${R}tree
            mv ${R}b ${R}c; test ! -e ${R}b; test -f ${R}c; rm ${R}c
            ls ${R}
            echo one > ${R}s; echo two >> ${R}s; cat < ${R}s
            exec 5<${R}s; read -u 5 x; echo first $x; cat <&5; exec 5<&-
            stat -c '%s %F' ${R}s
            : > ${R}s; wc -c < ${R}s
            rm ${R}s ${R}a ${R}t.tar
            ",
        );
        assert_eq!(
            said, "a\nfilm\nt.tar\none\ntwo\nfirst one\ntwo\n8 regular file\n0\n",
            "{place:?}"
        );
    }
}

#[test]
fn python_reads_writes_maps_and_forks() {
    if !has("python3") {
        return;
    }
    let world = World::new(true, 64 << 20);
    let script = world.file("script.py");
    std::fs::File::create(&script)
        .unwrap()
        .write_all(
            br#"
import mmap, os, subprocess, sys
R = os.environ["R"]
p = R + "py"
open(p, "w").write("hello\n" * 1000)
with open(p, "a") as f: f.write("end")
assert open(p).read() == "hello\n" * 1000 + "end"
f = open(p, "r+b")
f.seek(5); f.write(b"X"); f.flush(); os.fsync(f.fileno()); f.seek(0)
assert f.read(7) == b"helloXh"
f.truncate(10)
assert os.fstat(f.fileno()).st_size == 10
f.seek(0, 2); assert f.tell() == 10
f.close()
assert os.path.getsize(p) == 10
os.mkdir(R + "d"); os.rename(p, R + "d/q")
assert os.listdir(R + "d") == ["q"]
os.unlink(R + "d/q"); os.rmdir(R + "d")
film = open(R + "film", "rb")
m = mmap.mmap(film.fileno(), 0, prot=mmap.PROT_READ)
assert m[:] == open("offered/film", "rb").read()
for bad, kind in ((R + "none", FileNotFoundError), (R + "none/x", FileNotFoundError), (R + "a/../../x", OSError)):
    try: open(bad)
    except kind: pass
    else: assert False, bad
# Descriptors: dup, fork and exec share the offset.
fd = os.open(R + "shared", os.O_RDWR | os.O_CREAT)
os.write(fd, b"0123456789"); os.fsync(fd)
other = os.dup(fd)
os.lseek(fd, 2, os.SEEK_SET)
assert os.read(other, 2) == b"23"
assert os.dup2(fd, 77) == 77 and os.read(77, 1) == b"4"
if os.fork() == 0:
    assert os.read(fd, 2) == b"56"
    os._exit(0)
assert os.wait()[1] == 0
assert subprocess.run(["head", "-c1"], stdin=fd, stdout=subprocess.PIPE).stdout == b"7"
os.lseek(fd, 8, os.SEEK_SET)
subprocess.run([sys.executable, "-c", "import os; os.write(5, b'AB')" .replace("5", str(other))], pass_fds=[other], check=True)
os.closerange(77, 78)
os.close(other)
assert os.pread(fd, 10, 0) == b"01234567AB", os.pread(fd, 10, 0)
os.close(fd)
os.unlink(R + "shared")
print("done")
"#,
        )
        .unwrap();
    for place in BOTH {
        assert_eq!(world.sh(place, "python3 script.py"), "done\n", "{place:?}");
    }
}

#[test]
fn a_name_that_another_buffer_has_by_now_is_not_written_to() {
    if !has("python3") {
        return;
    }
    let world = World::new(true, 1 << 20);
    std::fs::write(
        world.file("script.py"),
        r#"
import errno, os
R = os.environ["R"]
here = os.environ["WEFT_LOCAL"] == "auto"
def replace(p):
    # Under the name is another buffer, and not by a rename of this program.
    assert os.system(f"mv {p} {p}.old && printf other > {p}") == 0
def attempt(act, *args):
    try: act(*args)
    except OSError as e: return e.errno
    return 0
def in_child(act, *args):
    child = os.fork()
    if child == 0: os._exit(attempt(act, *args))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

fd = os.open(R + "a", os.O_RDWR | os.O_CREAT)
os.write(fd, b"before"); os.fsync(fd)
replace(R + "a")
assert in_child(os.write, fd, b"child") == (0 if here else errno.ESTALE)
assert attempt(os.ftruncate, fd, 1) == (errno.ESTALE if here else 0)
assert open(R + "a").read() == "other"
os.unlink(R + "a")
if not here: assert in_child(os.write, fd, b"child") == errno.ESTALE

# A rename of this program is followed, also of a folder above.
os.mkdir(R + "d")
fd = os.open(R + "d/a:4K", os.O_RDWR | os.O_CREAT)
other = os.open(R + "d/a", os.O_RDWR)
os.write(fd, b"before"); os.fsync(fd)
os.rename(R + "d/a", R + "d/b"); os.rename(R + "d", R + "e")
os.mkdir(R + "d"); open(R + "d/a", "w").write("other")
assert in_child(os.pwrite, fd, b"child.", 0) == 0
os.ftruncate(fd, 5)
assert os.pread(other, 10, 0) == b"child", os.pread(other, 10, 0)
assert open(R + "d/a").read() == "other"
print("done")
"#,
    )
    .unwrap();
    for place in BOTH {
        let said = world.sh(place, "python3 script.py; rm -r ${R}a.old ${R}d ${R}e");
        assert_eq!(said, "done\n", "{place:?}");
    }
}

#[test]
fn the_last_close_frees_and_a_pipeline_shares_a_buffer() {
    let world = World::new(false, 64 << 20);
    for place in BOTH {
        let size = world.sh(
            place,
            "exec 5>${R}buf; exec 6<${R}buf; seq 1000 >&5; exec 5>&-; sort -n <&6 | tail -1",
        );
        assert_eq!(size, "1000\n", "{place:?}");
        let end = Instant::now() + Duration::from_secs(30);
        while world.server.used() > 0 {
            assert!(Instant::now() < end, "{place:?}: the last close frees");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!world.try_sh(place, "cat ${R}buf").status.success());
        // The last command replaces the shell, and its open descriptors stay open.
        let read = world.sh(place, "exec 5>${R}buf 6<${R}buf; echo kept >&5; exec 5>&-; exec bash -c 'sleep 0.5; exec cat <&6'");
        assert_eq!(read, "kept\n", "{place:?}");
    }
}

#[test]
fn what_cannot_be_says_why() {
    let world = World::new(true, 1 << 20);
    for place in BOTH {
        for (script, why) in [
            (
                "head -c 2000000 /dev/zero > x; cp x ${R}big",
                "No space left",
            ),
            ("echo x > ${R}film", "Read-only file system"),
            ("cat ${R}none", "No such file"),
            ("cat ${R}../x", "Invalid argument"),
            ("cat /rdma/127.0.0.1:0/x", "Invalid argument"),
            ("cat /rdma/127.0.0.1:99999/x", "Invalid argument"),
            ("cat /rdma/[::1/x", "Invalid argument"),
            ("echo x > ${R}x:12Q", "Invalid argument"),
            ("cat /rdma/127.0.0.1:1/x", "Connection refused"),
            ("cat /rdma/no-such-host.invalid:1/x", "No such file"),
        ] {
            // No quota applies to programs of this host: the memory is their own user's.
            if place == Where::Here && script.contains("big") {
                continue;
            }
            let out = world.try_sh(place, script);
            let said = String::from_utf8_lossy(&out.stderr);
            assert!(
                !out.status.success() && said.contains(why),
                "{place:?}: {script}: {said}"
            );
        }
    }
}

#[test]
fn fio_and_ffmpeg_find_what_was_written() {
    let world = World::new(true, 256 << 20);
    let escaped = world.path("fio").replace(':', "\\:");
    for place in BOTH {
        if has("fio") {
            let fio = format!(
                "fio --name=v --filename='{escaped}' --size=8m --bs=4k-64k --rw=randrw --verify=crc32c --ioengine=psync --thread \
                 --output=/dev/null; rm ${{R}}fio"
            );
            world.sh(place, &fio);
        }
        if has("ffmpeg") {
            world.sh(
                place,
                "ffmpeg -v error -f lavfi -i testsrc=duration=2:size=160x120:rate=10 -c:v mpeg4 -y v.mp4; cp v.mp4 ${R}v.mp4
                 ffmpeg -v error -i ${R}v.mp4 -f framemd5 - > remote; ffmpeg -v error -i v.mp4 -f framemd5 - > local; cmp remote local",
            );
        }
    }
}

/// The same script in an ordinary folder, without the library, and in a server's; `$F` is the folder.
fn as_in_an_ordinary_folder(world: &World, script: &str) {
    let plain = world.file("folder");
    for place in BOTH {
        std::fs::create_dir(&plain).unwrap();
        let in_folder = |folder: &str, out: Output| {
            let mut said = out.stdout;
            said.extend(out.stderr);
            String::from_utf8_lossy(&said).replace(folder, "FOLDER")
        };
        let want = world
            .command(place, "bash")
            .args(["-c", script])
            .env_remove("LD_PRELOAD")
            .env("F", &plain)
            .output()
            .unwrap();
        let folder = world.path("folder");
        world.sh(place, "mkdir ${R}folder");
        let got = world
            .command(place, "bash")
            .args(["-c", script])
            .env("F", &folder)
            .output()
            .unwrap();
        assert_eq!(
            in_folder(&folder, got),
            in_folder(&plain, want),
            "{place:?}"
        );
        world.sh(place, "rm -r ${R}folder");
        std::fs::remove_dir_all(&plain).unwrap();
    }
}

#[test]
fn calls_inside_the_c_library_reach_servers() {
    if !has("cc") {
        return;
    }
    let world = World::new(true, 64 << 20);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/calls.c");
    let built = Command::new("cc")
        .args(["-w", "-o", &world.file("calls")])
        .arg(source)
        .status();
    assert!(built.unwrap().success());
    as_in_an_ordinary_folder(&world, "./calls $F");
}

#[test]
fn programs_that_replace_their_files_work() {
    let world = World::new(true, 64 << 20);
    for (program, script) in [
        ("sed", "echo one > $F/a; sed -i s/one/two/ $F/a; cat $F/a; ls $F"),
        ("perl", "echo one > $F/a; perl -i -pe 's/one/two/' $F/a; cat $F/a; ls $F"),
        ("sort", "printf '3\n1\n2\n' > $F/a; sort -o $F/a $F/a; cat $F/a; ls $F"),
        (
            "ar",
            "echo one > x; echo two > y; ar rcD $F/l.a x y; ar t $F/l.a; echo more >> x; ar rD $F/l.a x; ar p $F/l.a x; ar dD $F/l.a y; ls $F",
        ),
        (
            "rsync",
            "mkdir -p t/u; echo one > t/a; seq 9999 > t/u/b; rsync -r --no-whole-file t/ $F/t && diff -r t $F/t; echo more >> t/u/b
             rsync -r --no-whole-file t/ $F/t; diff -r t $F/t; rm -rf b; rsync -r $F/t/ b; diff -r t b; ls $F $F/t",
        ),
        (
            "find",
            "cd $F && mkdir d && echo one > d/a && find . | sort; cd d; cat a; pwd; cat ../d/a; bash -c 'pwd; cat a'; cd /; cat $F/d/a",
        ),
        (
            "install",
            "mkdir -p $F/a/b/c; mkdir $F/a; install -D /bin/true $F/x/y/true; cd $F; find . | sort; cmp x/y/true /bin/true; mkdir -p a/b/c",
        ),
        ("cp", "mkdir -p t/u; echo one > t/a; echo two > t/u/b; cp -a t $F/ && diff -r t $F/t"),
        (
            "git",
            "export HOME=$PWD GIT_AUTHOR_DATE='1 +0000' GIT_COMMITTER_DATE='1 +0000'; git config --global user.name me; git config --global user.email me@here
             cd $F && git init -q . && echo one > a && git add a && git commit -qm first && git log --oneline && git fsck && git status --short",
        ),
    ] {
        if has(program) {
            as_in_an_ordinary_folder(&world, script);
        }
    }
    assert!(!Path::new("/rdma").exists());
}

/// chmod(1) and stat(1) change and show rights, and a program that has none is told so.
#[test]
fn chmod_does_what_it_says() {
    let world = World::new(true, 8 << 20);
    for place in BOTH {
        let said = world.sh(
            place,
            "echo one >${R}a; chmod 444 ${R}a; stat -c %a ${R}a; (echo two >${R}a) 2>&1 || echo refused
             cat ${R}a; python3 -c 'import os, sys; os.chmod(sys.argv[1], 0o600)' ${R}a; stat -c %a ${R}a
             echo two >${R}a; cat ${R}a; chmod 200 ${R}a; stat -c %a ${R}a; (cat ${R}a) 2>&1 || chmod 666 ${R}a
             before=$(stat -c %a ${R}film); chmod 700 ${R}film 2>&1 && exit 9; [ $(stat -c %a ${R}film) = $before ]",
        );
        let lines: Vec<&str> = said.lines().collect();
        assert!(lines[1].ends_with("Permission denied"), "{place:?}: {said}");
        assert!(lines[7].ends_with("Permission denied"), "{place:?}: {said}");
        assert!(
            lines[8].ends_with("Read-only file system"),
            "{place:?}: {said}"
        );
        let rest = [lines[0], lines[2], lines[3], lines[4], lines[5], lines[6]];
        let expected = ["444", "refused", "one", "600", "two", "200"];
        assert_eq!(rest, expected, "{place:?}");
    }
}

/// A descriptor changes the rights of its buffer, under whatever name that is by now, and keeps its own.
#[test]
fn descriptors_change_rights_and_keep_theirs() {
    let world = World::new(true, 8 << 20);
    for place in BOTH {
        let script = "
import os, subprocess, sys, tempfile
path = sys.argv[1] + 'd'
fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
os.write(fd, b'0123456789')
os.rename(path, path + '2')
os.fchmod(fd, 0o444)
print(oct(os.fstat(fd).st_mode & 0o777), oct(os.stat(path + '2').st_mode & 0o777))
print(os.access(path + '2', os.R_OK), os.access(path + '2', os.W_OK))
os.ftruncate(fd, 4)
os.fchmod(fd, 0o200)
os.ftruncate(fd, 2)
print(os.pread(fd, 9, 0), oct(os.fstat(fd).st_mode & 0o777))
os.fchmod(fd, 0)
os.rename(path + '2', path)
os.fchmod(fd, 0o666)
subprocess.run(['sh', '-c', ': >' + path + '; echo secret >' + path], check=True)
os.fchmod(fd, 0o640)
print(oct(os.stat(path).st_mode & 0o777))
film = os.open(sys.argv[1] + 'film', os.O_RDONLY)
try:
    os.fchmod(film, 0o600)
except OSError as error:
    print(error.strerror)
os.unlink(path)
os.close(fd)
fd, name = tempfile.mkstemp(dir=sys.argv[1])
print(oct(os.stat(name).st_mode & 0o777))
os.close(fd)
os.unlink(name)";
        std::fs::write(world.dir.path().join("rights.py"), script).unwrap();
        let said = world.sh(place, "python3 rights.py ${R}");
        let expected =
            "0o444 0o444\nTrue False\nb'01' 0o200\n0o640\nRead-only file system\n0o600\n";
        assert_eq!(said, expected, "{place:?}");
        world.sh(
            place,
            "echo one >${R}p; chmod 444 ${R}p; cp -p ${R}p q; stat -c %a q | grep -x 444; cp -p q ${R}r
             stat -c %a ${R}r | grep -x 444; cmp q ${R}r; rm -f ${R}p ${R}r q",
        );
    }
}

/// Links, special files and extended attributes are refused with the errors of a file system that has none.
#[test]
fn what_servers_lack_is_refused_as_by_other_file_systems() {
    let world = World::new(true, 64 << 20);
    for place in BOTH {
        let refused = |script: &str, why: &str| {
            let out = world.try_sh(place, script);
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            assert!(
                !out.status.success() && said.contains(why),
                "{place:?} {script}: {said}"
            );
        };
        world.sh(place, "echo one > ${R}a; echo here > h; rm -f h2");
        for (script, why) in [
            ("ln -s a ${R}l", "Operation not permitted"),
            ("ln ${R}a ${R}l", "Operation not permitted"),
            ("ln h ${R}l", "Invalid cross-device link"),
            ("ln ${R}a h2", "Invalid cross-device link"),
            ("mkfifo ${R}f", "Operation not permitted"),
            ("mkfifo ${R}a", "File exists"),
            ("mkdir /rdma", "File exists"),
            ("mkdir ${R%/}", "File exists"),
            ("rmdir /rdma", "busy"),
        ] {
            refused(script, why);
        }
        if has("setfattr") {
            refused("setfattr -n user.a -v b ${R}a", "Operation not supported");
            refused("setfattr -x user.a ${R}a", "Operation not supported");
        }
        world.sh(place, "(test -d /rdma && ls -d /rdma && cd ${R%/} && df . && df ..) >&2; rm ${R}a; test -e h; test ! -e h2; rm h");
    }
    assert!(!Path::new("/rdma").exists());
}

#[test]
fn descriptors_of_one_program_see_each_others_writes() {
    if !has("python3") {
        return;
    }
    let world = World::new(true, 64 << 20);
    std::fs::write(
        world.file("order.py"),
        br#"
import os
R = os.environ["R"]
a = os.open(R + "o", os.O_RDWR | os.O_CREAT); b = os.open(R + "o", os.O_RDWR)
os.write(a, b"one"); os.write(a, b"two")
assert os.read(b, 10) == b"onetwo"
assert os.path.getsize(R + "o") == 6 and os.fstat(b).st_size == 6
# What was read ahead is not used again.
os.pwrite(a, b"x" * 100_000, 0)
for i in range(10): assert os.pread(b, 1000, 1000 * i) == b"x" * 1000
os.pwrite(a, b"y" * 50_000, 10_000)
assert os.pread(b, 1000, 10_000) == b"y" * 1000
os.ftruncate(a, 5)
assert os.pread(b, 10, 0) == b"xxxxx"
os.pwrite(b, b"zz", 0)
assert os.pread(a, 10, 0) == b"zzxxx"
os.close(os.open(R + "o", os.O_WRONLY | os.O_TRUNC))
os.pwrite(b, b"new", 0)
assert os.pread(a, 10, 0) == b"new"
e = os.open(R + "e", os.O_RDWR | os.O_CREAT | os.O_APPEND)
os.write(e, b"one"); assert os.lseek(e, 0, os.SEEK_CUR) == 3
os.write(e, b"two"); assert os.read(e, 9) == b""
os.lseek(e, 1, os.SEEK_SET); os.write(e, b"!")
if os.fork() == 0: os._exit(os.lseek(e, 0, os.SEEK_CUR))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
os.lseek(e, 1, os.SEEK_SET); assert os.read(e, 9) == b"netwo!"
c = os.open(R + "l", os.O_WRONLY | os.O_CREAT | os.O_APPEND); d = os.open(R + "l", os.O_WRONLY | os.O_APPEND)
for i in range(4): os.write((c, d)[i % 2], b"%d" % i)
assert open(R + "l").read() == "0123", open(R + "l").read()
print("done")
"#,
    )
    .unwrap();
    for place in BOTH {
        assert_eq!(
            world.sh(place, "python3 order.py; rm ${R}o ${R}l ${R}e"),
            "done\n",
            "{place:?}"
        );
    }
}

#[test]
fn ordinary_files_are_left_alone() {
    let world = World::new(true, 1 << 20);
    std::fs::create_dir_all(world.dir.path().join("rdma")).unwrap();
    let said = world.sh(
        Where::Here,
        "echo a > f; cat f; ls rdma; mkdir e; ls -d e; tar cf e/t.tar f; tar tf e/t.tar; rm -r e; test ! -e e",
    );
    assert_eq!(said, "a\ne\nf\n");
    assert!(Path::new(&world.file("f")).exists());
}
