//! Workers that have another compiler than the master, or none, and take the master's.

use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use weft_cc::ipc::{Answer, Ask, JobAsk, Line};
use weft_cc::options::Language;
use weft_cc::wire::Output;
use weft_cc::worker::{Accept, Config, Events, Worker, sandbox};
use weft_cc::{Endpoint, daemon, find_program};
use weft_verbs::tls::{Identity, Tls};

const TEXT: &str = "struct s { int a; double b[9]; };\nint f(struct s *s, int n)\n{\n\tfor (int i = 0; i < n; i++)\n\t\ts->b[i % 9] *= s->a / 3.7;\n\treturn s->b[1] > 0;\n}\n";

fn tls() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

/// Counts compilers that came.
#[derive(Default)]
struct Came(AtomicU64);

impl Events for Came {
    fn compiler(&self, _: std::net::SocketAddr, _: u64) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn worker(accept: Option<&Path>) -> (Worker, Endpoint, Arc<Came>) {
    let came = Arc::new(Came::default());
    let config = Config {
        slots: 2,
        accept: accept.map(|folder| Accept {
            folder: folder.into(),
            most: 1 << 30,
        }),
        ..Config::new("127.0.0.1:0".parse().unwrap(), tls())
    };
    let worker = Worker::start(config, Arc::clone(&came) as Arc<dyn Events>).unwrap();
    let endpoint = Endpoint {
        host: "127.0.0.1".into(),
        port: worker.local_addr().port(),
    };
    (worker, endpoint, came)
}

/// A daemon in this process.
struct Bed(tempfile::TempDir, Option<std::thread::JoinHandle<()>>);

impl Bed {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = daemon::Config::new(dir.path().join("socket"), Arc::new(tls()));
        let thread = std::thread::spawn(move || daemon::run(config).unwrap());
        let bed = Self(dir, Some(thread));
        while Line::connect(&bed.socket()).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        bed
    }

    fn socket(&self) -> PathBuf {
        self.0.path().join("socket")
    }

    /// The object that a worker makes with this driver, which it knows under this name; or why it is to be made here.
    fn object(
        &self,
        at: &Endpoint,
        driver: &Path,
        name: &str,
        args: &[&str],
    ) -> Result<Vec<u8>, String> {
        let fd = weft_sys::memfd::create("test", TEXT.len() as u64).unwrap();
        let file = std::fs::File::from(fd);
        file.write_all_at(TEXT.as_bytes(), 0).unwrap();
        let job = JobAsk {
            workers: vec![at.clone()],
            driver: driver.into(),
            name: name.into(),
            path: std::env::var("PATH").unwrap(),
            language: Language::C,
            cwd: self.0.path().to_str().unwrap().into(),
            source: "a.c".into(),
            locale: String::new(),
            args: args.iter().map(ToString::to_string).collect(),
            at: 0,
            len: TEXT.len() as u64,
            pull: None,
        };
        let line = Line::connect(&self.socket()).unwrap();
        line.send(&Ask::Job(Box::new(job)), &[file.as_fd()])
            .unwrap();
        match line.receive().unwrap().unwrap() {
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
    fn own(&self, driver: &Path, args: &[&str]) -> Vec<u8> {
        std::fs::write(self.0.path().join("a.c"), TEXT).unwrap();
        let mut command = Command::new(driver);
        command.args(args).args(["-o", "own.o", "a.c"]);
        assert!(
            command
                .current_dir(self.0.path())
                .status()
                .unwrap()
                .success()
        );
        std::fs::read(self.0.path().join("own.o")).unwrap()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = Line::connect(&self.socket()).and_then(|line| line.ask(&Ask::Stop, &[]));
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn a_worker_without_the_compiler_takes_the_masters() {
    let Some(gcc) = find_program("gcc") else {
        return eprintln!("skipped: there is no gcc (Debian's package gcc)");
    };
    let level = sandbox::level();
    if !level.files || !level.calls {
        return eprintln!("skipped: sent compilers need Landlock and seccomp; here is {level}");
    }
    let bed = Bed::new();
    let folder = tempfile::tempdir().unwrap();
    let args: &[&str] = &["-O2", "-g", "-c"];
    {
        let (_without, at, came) = worker(None);
        let why = bed.object(&at, &gcc, "gcc-77", args).unwrap_err();
        assert!(why.contains("there is no `gcc-77` here"), "{why}");
        assert_eq!(came.0.load(Ordering::SeqCst), 0);
    }
    let (worker_, at, came) = worker(Some(folder.path()));
    // A name that the worker does not know: twice, and the compiler comes once.
    for args in [args, &["-O2", "-fPIC", "-g1", "-c"], &["-S", "-pipe"]] {
        assert!(bed.object(&at, &gcc, "gcc-77", args).unwrap() == bed.own(&gcc, args));
    }
    assert_eq!(came.0.load(Ordering::SeqCst), 1);
    // One that the worker has is used in place.
    bed.object(&at, &gcc, "gcc", args).unwrap();
    // A name for which the worker has another version.
    if let Some(old) = find_program("gcc-11") {
        let theirs = bed.object(&at, &old, "gcc", args).unwrap();
        assert!(theirs == bed.own(&old, args) && theirs != bed.own(&gcc, args));
        assert_eq!(came.0.load(Ordering::SeqCst), 2);
    } else {
        eprintln!("not tried: another version (Debian's package gcc-11)");
    }
    // The next worker finds it in the folder.
    drop(worker_);
    let (_worker, at, came) = worker(Some(folder.path()));
    assert!(bed.object(&at, &gcc, "gcc-77", args).unwrap() == bed.own(&gcc, args));
    assert_eq!(came.0.load(Ordering::SeqCst), 0);
}

#[test]
fn a_compiler_that_is_a_script_is_not_sent() {
    let level = sandbox::level();
    if find_program("gcc").is_none() || !level.files || !level.calls {
        return eprintln!("skipped: no gcc (Debian's package gcc), no Landlock or no seccomp");
    }
    let bed = Bed::new();
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("gcc");
    std::fs::write(&script, "#!/bin/sh\nexec /usr/bin/gcc \"$@\"\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    let (_worker, at, _) = worker(Some(&folder.path().join("kept")));
    let why = bed.object(&at, &script, "gcc", &["-c"]).unwrap_err();
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
    let why = Worker::start(config, Arc::new(()))
        .err()
        .unwrap()
        .to_string();
    assert!(why.contains("masters that are known"), "{why}");
}
