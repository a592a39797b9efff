//! Workers that have another compiler than the master, or none, and take the master's.

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{Bed, tls};
use weft_cc::ipc::{Answer, JobAsk};
use weft_cc::wire::Output;
use weft_cc::worker::{Accept, Config, Events, Worker, sandbox};
use weft_cc::{Endpoint, find_program};

const TEXT: &str = "struct s { int a; double b[9]; };\nint f(struct s *s, int n)\n{\n\tfor (int i = 0; i < n; i++)\n\t\ts->b[i % 9] *= s->a / 3.7;\n\treturn s->b[1] > 0;\n}\n";

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
fn a_worker_without_the_compiler_takes_the_masters() {
    let Some(gcc) = find_program("gcc") else {
        return eprintln!("skipped: there is no gcc (Debian's package gcc)");
    };
    let level = sandbox::level();
    if !level.files || !level.calls {
        return eprintln!("skipped: sent compilers need Landlock and seccomp; here is {level}");
    }
    let bed = Bed::new(16 << 20);
    let folder = tempfile::tempdir().unwrap();
    let args: &[&str] = &["-O2", "-g", "-c"];
    {
        let (_without, at, came) = worker(None);
        let why = object(&bed, &at, &gcc, "gcc-77", args).unwrap_err();
        assert!(why.contains("there is no `gcc-77` here"), "{why}");
        assert_eq!(came.0.load(Ordering::SeqCst), 0);
    }
    let (worker_, at, came) = worker(Some(folder.path()));
    // A name that the worker does not know: twice, and the compiler comes once.
    for args in [args, &["-O2", "-fPIC", "-g1", "-c"], &["-S", "-pipe"]] {
        assert!(object(&bed, &at, &gcc, "gcc-77", args).unwrap() == own(&bed, &gcc, args));
    }
    assert_eq!(came.0.load(Ordering::SeqCst), 1);
    // One that the worker has is used in place.
    object(&bed, &at, &gcc, "gcc", args).unwrap();
    // A name for which the worker has another version.
    if let Some(old) = find_program("gcc-11") {
        let theirs = object(&bed, &at, &old, "gcc", args).unwrap();
        assert!(theirs == own(&bed, &old, args) && theirs != own(&bed, &gcc, args));
        assert_eq!(came.0.load(Ordering::SeqCst), 2);
    } else {
        eprintln!("not tried: another version (Debian's package gcc-11)");
    }
    // The next worker finds it in the folder.
    drop(worker_);
    let (_worker, at, came) = worker(Some(folder.path()));
    assert!(object(&bed, &at, &gcc, "gcc-77", args).unwrap() == own(&bed, &gcc, args));
    assert_eq!(came.0.load(Ordering::SeqCst), 0);
}

#[test]
fn a_compiler_that_is_a_script_is_not_sent() {
    let level = sandbox::level();
    if find_program("gcc").is_none() || !level.files || !level.calls {
        return eprintln!("skipped: no gcc (Debian's package gcc), no Landlock or no seccomp");
    }
    let bed = Bed::new(16 << 20);
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("gcc");
    std::fs::write(&script, "#!/bin/sh\nexec /usr/bin/gcc \"$@\"\n").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).unwrap();
    let (_worker, at, _) = worker(Some(&folder.path().join("kept")));
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
    let why = Worker::start(config, Arc::new(()))
        .err()
        .unwrap()
        .to_string();
    assert!(why.contains("masters that are known"), "{why}");
}
