//! Workers that have another compiler than the master, or none, and take the master's.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::{Bed, tls};
use weft_cc::ipc::{Answer, JobAsk};
use weft_cc::wire::Output;
use weft_cc::worker::{Accept, Config, Worker, sandbox};
use weft_cc::{Endpoint, find_program};

const TEXT: &str = "struct s { int a; double b[9]; };\nint f(struct s *s, int n)\n{\n\tfor (int i = 0; i < n; i++)\n\t\ts->b[i % 9] *= s->a / 3.7;\n\treturn s->b[1] > 0;\n}\n";

fn worker(accept: Option<&Path>) -> (Worker, Endpoint) {
    let config = Config {
        slots: 2,
        size_limit: 64 << 20,
        memory: 256 << 20,
        accept: accept.map(|folder| Accept {
            folder: folder.into(),
            most: 1 << 30,
        }),
        ..Config::new("127.0.0.1:0".parse().unwrap(), tls())
    };
    let worker = Worker::start(config).unwrap();
    let endpoint = Endpoint {
        host: "127.0.0.1".into(),
        port: worker.local_addr().port(),
    };
    (worker, endpoint)
}

/// The object that a worker makes with this driver, which it knows under this name; or why it is to be made here.
fn object(
    bed: &Bed,
    at: &Endpoint,
    driver: &Path,
    name: &str,
    args: &[&str],
) -> Result<Vec<u8>, String> {
    let job = JobAsk {
        driver: driver.into(),
        name: name.into(),
        cwd: bed.dir.path().to_str().unwrap().into(),
        args: args.iter().map(ToString::to_string).collect(),
        ..Bed::job(&[at])
    };
    match bed.send(job, TEXT.as_bytes()).receive().unwrap().unwrap() {
        (Answer::Done { outputs, .. }, Some(room)) => {
            let object = outputs.iter().find(|output| output.0 == Output::Object);
            let &(_, from, len) = object.unwrap();
            let mut bytes = vec![0; len as usize];
            let room = std::fs::File::from(room);
            room.read_exact_at(&mut bytes, from).unwrap();
            Ok(bytes)
        }
        (Answer::Here(why), _) => Err(why),
        (other, _) => panic!("{other:?}"),
    }
}

/// What the driver makes here.
fn own(bed: &Bed, driver: &Path, args: &[&str]) -> Vec<u8> {
    std::fs::write(bed.path("a.c"), TEXT).unwrap();
    let mut command = Command::new(driver);
    command.args(args).args(["-o", "own.o", "a.c"]);
    command.current_dir(bed.dir.path());
    assert!(command.status().unwrap().success());
    std::fs::read(bed.path("own.o")).unwrap()
}

#[test]
fn a_acceptswithout_the_compiler_takes_the_masters() {
    let Some(gcc) = find_program("gcc") else {
        return eprintln!("skipped: there is no gcc (Debian's package gcc)");
    };
    let level = sandbox::level();
    if !level.is_complete() {
        return eprintln!("skipped: sent compilers need a complete sandbox; here is {level}");
    }
    let bed = Bed::new(16 << 20);
    let folder = tempfile::tempdir().unwrap();
    let args: &[&str] = &["-O2", "-g", "-c"];
    {
        let (without, at) = worker(None);
        let why = object(&bed, &at, &gcc, "gcc-77", args).unwrap_err();
        assert!(why.contains("there is no `gcc-77` here"), "{why}");
        assert_eq!(without.sent_compilers(), 0);
    }
    let (accepts, at) = worker(Some(folder.path()));
    // A name that the worker does not know: twice, and the compiler comes once.
    for args in [args, &["-O2", "-fPIC", "-g1", "-c"], &["-S", "-pipe"]] {
        assert!(object(&bed, &at, &gcc, "gcc-77", args).unwrap() == own(&bed, &gcc, args));
    }
    assert_eq!(accepts.sent_compilers(), 1);
    // One that the worker has is used in place.
    object(&bed, &at, &gcc, "gcc", args).unwrap();
    // A name for which the worker has another version.
    if let Some(old) = find_program("gcc-11") {
        let theirs = object(&bed, &at, &old, "gcc", args).unwrap();
        assert!(theirs == own(&bed, &old, args) && theirs != own(&bed, &gcc, args));
        assert_eq!(accepts.sent_compilers(), 2);
    } else {
        eprintln!("not tried: another version (Debian's package gcc-11)");
    }
    // The next worker finds it in the folder.
    drop(accepts);
    let (again, at) = worker(Some(folder.path()));
    assert!(object(&bed, &at, &gcc, "gcc-77", args).unwrap() == own(&bed, &gcc, args));
    assert_eq!(again.sent_compilers(), 0);
}

#[test]
fn a_compiler_that_is_a_script_is_not_sent() {
    let level = sandbox::level();
    if find_program("gcc").is_none() || !level.is_complete() {
        return eprintln!("skipped: no gcc (Debian's package gcc), no Landlock or no seccomp");
    }
    let bed = Bed::new(16 << 20);
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("gcc");
    std::fs::write(&script, "#!/bin/sh\nexec /usr/bin/gcc \"$@\"\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    let (_worker, at) = worker(Some(&folder.path().join("kept")));
    let why = object(&bed, &at, &script, "gcc", &["-c"]).unwrap_err();
    assert!(
        why.contains("is another one") && why.contains("is a script"),
        "{why}"
    );
}

#[test]
fn strangers_cannot_send_compilers() {
    let folder = tempfile::tempdir().unwrap();
    let config = Config {
        open: true,
        accept: Some(Accept {
            folder: folder.path().into(),
            most: 1 << 30,
        }),
        ..Config::new("127.0.0.1:0".parse().unwrap(), tls())
    };
    let why = Worker::start(config).err().unwrap().to_string();
    assert!(why.contains("masters that are known"), "{why}");
}

/// Compiles a C program of this folder; gives its output a name.
fn program(source: &str, into: &Path, name: &str, options: &[String]) -> PathBuf {
    let path = into.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(source);
    let mut gcc = Command::new("gcc");
    gcc.args(["-O1", "-w", "-o"]).arg(&path).args(options);
    assert!(gcc.arg(source).status().unwrap().success());
    path
}

/// A process of the worker's user, and a file of its own in a folder.
struct Bystander {
    child: Child,
    segment: String,
    place: tempfile::TempDir,
    own: (String, u32),
}

impl Bystander {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let victim = place.path().join("victim");
        std::fs::write(&victim, "a secret").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&victim, mode).unwrap();
        let program = program("bystander.c", place.path(), "bystander", &[]);
        let mut child = Command::new(program)
            .arg(victim)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut segment = String::new();
        let mut out = BufReader::new(child.stdout.as_mut().unwrap());
        out.read_line(&mut segment).unwrap();
        Self {
            child,
            segment: segment.trim().into(),
            place,
            own: Self::ours(),
        }
    }

    /// The limits and the priority of this process, which is the worker's.
    fn ours() -> (String, u32) {
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let nice = stat.rsplit_once(") ").unwrap().1.split(' ').nth(16);
        (
            limits,
            nice.unwrap().parse::<i32>().unwrap().cast_unsigned(),
        )
    }

    /// The hostile compiler of a master.
    fn attacker(&self, attack: &str, seed: u32) -> PathBuf {
        let define = |name: &str, value: &dyn std::fmt::Display| format!("-D{name}={value}");
        let options = [
            define("ATTACK", &attack),
            define("SEED", &seed),
            define("SEGMENT", &self.segment),
            define("WORKER", &std::process::id()),
            define("BYSTANDER", &self.child.id()),
            define("PLACE", &format!("\"{}\"", self.place.path().display())),
        ];
        program("escape.c", self.place.path(), "gcc", &options)
    }

    /// Nothing outside has changed.
    fn check(mut self) {
        drop(self.child.stdin.take());
        let mut told = String::new();
        let mut out = self.child.stdout.take().unwrap();
        out.read_to_string(&mut told).unwrap();
        assert_eq!(told, "looked\n");
        assert!(self.child.wait().unwrap().success());
        let victim = std::fs::read_to_string(self.place.path().join("victim"));
        assert_eq!(victim.unwrap(), "a secret");
        assert_eq!(Self::ours(), self.own);
    }
}

/// Whether these tests can run.
fn complete() -> bool {
    let level = sandbox::level();
    let complete = find_program("gcc").is_some() && level.is_complete();
    if !complete {
        eprintln!(
            "skipped: no gcc (Debian's package gcc), or no complete sandbox; here is {level}"
        );
    }
    complete
}

#[test]
fn a_sent_compiler_finds_no_way_out() {
    if !complete() {
        return;
    }
    let bed = Bed::new(16 << 20);
    let folder = tempfile::tempdir().unwrap();
    let (_worker, at) = worker(Some(folder.path()));
    let bystander = Bystander::new();
    let attacker = bystander.attacker("escape", 1);
    let report = object(&bed, &at, &attacker, "gcc-77", &["-c"]).unwrap();
    let report = String::from_utf8(report).unwrap();
    let done: Vec<_> = report
        .lines()
        .filter(|line| line.starts_with("DONE"))
        .collect();
    assert!(done.is_empty(), "{done:#?}");
    assert!(report.lines().count() > 50, "{report}");
    bystander.check();
}

#[test]
fn random_calls_of_a_sent_compiler_change_nothing_outside() {
    if !complete() {
        return;
    }
    let bed = Bed::new(16 << 20);
    let folder = tempfile::tempdir().unwrap();
    let (_worker, at) = worker(Some(folder.path()));
    for seed in [1, 77] {
        let bystander = Bystander::new();
        let attacker = bystander.attacker("fuzz", seed);
        let report = object(&bed, &at, &attacker, "gcc-77", &["-c"]);
        bystander.check();
        let report = String::from_utf8(report.unwrap()).unwrap();
        let children = report.trim().strip_suffix(" children").unwrap();
        assert!(
            children.parse::<u32>().unwrap() > 0,
            "seed {seed}: {report}"
        );
    }
}

#[test]
fn a_sent_compiler_has_a_share_of_the_machine() {
    if !complete() {
        return;
    }
    let bed = Bed::new(16 << 20);
    let folder = tempfile::tempdir().unwrap();
    let (_worker, at) = worker(Some(folder.path()));
    for (attack, why) in [
        ("hoard", "files have more than"),
        ("hide", "files have more than"),
        ("swell", "more than 268435456 bytes of memory"),
        ("bomb", "more than 128 processes"),
    ] {
        let bystander = Bystander::new();
        let attacker = bystander.attacker(attack, 1);
        let told = object(&bed, &at, &attacker, "gcc-77", &["-c"]).unwrap_err();
        assert!(told.contains(why), "{attack}: {told}");
        bystander.check();
    }
}
