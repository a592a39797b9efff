//! Who is let in at a listener: a process of another user with a key that is named, with one that is not, with none, and one of another version.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use weft_roundabout::wire::{Hello, VERSION};
use weft_roundabout::{Error, Next, Node, Ring, RingListener, Security};
use weft_verbs::cm::{self, ConnParam, ConnectError};
use weft_verbs::tls::{Identity, PublicKey, Tls};
use weft_verbs::{Device, QpInit};

const ID: [u8; 16] = [3; 16];
const NOBODY: u32 = 65_534;

fn any() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn tls() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

/// A ring of two whose nodes give an element each.
fn turn(mut node: Node) -> Result<usize, Error> {
    let (mut given, mut seen) = (false, 0);
    loop {
        match node.next(!given)? {
            Next::Room(room) => {
                drop(room.commit(100, 0, [0; 4])?);
                given = true;
            }
            Next::Element(_) => seen += 1,
            Next::Woken => {}
            Next::End => break,
        }
    }
    node.finish()?;
    Ok(seen)
}

fn ring(nodes: Vec<SocketAddr>, me: usize) -> Ring {
    Ring {
        element: 4096,
        elements: 3,
        patience: Duration::from_secs(20),
        ..Ring::new(ID, nodes, me)
    }
}

/// Not a test of its own: a node of another user, started by those below.
#[test]
fn child_of_another_user() {
    let Ok(kind) = std::env::var("RING_TEST_KEYS") else {
        return;
    };
    let tls = tls();
    let key = tls.public_key();
    let security = match kind.as_str() {
        "none" => Security::SameUser,
        _ => Security::Keys(tls, Arc::new(|_: &PublicKey| true)),
    };
    let listener = RingListener::open(any(), security, None).unwrap();
    println!("\nchild {} {key}", listener.local_addr());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let parent = line.trim().parse().unwrap();
    let joined = listener.join(&ring(vec![listener.local_addr(), parent], 0));
    match joined.and_then(turn) {
        Ok(seen) => println!("\nseen {seen}"),
        Err(error) => println!("\nfailed {error}"),
    }
}

struct Stranger {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    folder: std::path::PathBuf,
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Stranger {
    fn start(kind: &str, named: bool) -> Option<Self> {
        // Another user can run the test's program only from where everybody may.
        let name = format!("weft-ring-keys-{kind}-{named}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let program = folder.join("test");
        std::fs::create_dir(&folder).unwrap();
        crate::copy_of_this_program(&program);
        let child = Command::new(&program)
            .args(["--exact", "strangers::child_of_another_user", "--nocapture"])
            .env("RING_TEST_KEYS", kind)
            .current_dir("/")
            .uid(NOBODY)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => {
                println!("skipped: no process of another user: {error}");
                std::fs::remove_dir_all(&folder).unwrap();
                return None;
            }
        };
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Some(Self {
            child,
            lines,
            folder,
        })
    }

    fn line(&mut self, begins: &str) -> String {
        let begins = format!("{begins} ");
        let mut lines = self.lines.by_ref().map(|line| line.unwrap());
        lines
            .find_map(|line| line.strip_prefix(&begins).map(str::to_owned))
            .unwrap()
    }
}

/// What both ends say of a ring of the stranger and a listener that lets in the stranger's key, or none.
fn meet(kind: &str, named: bool) -> Option<(Result<usize, Error>, String)> {
    let mut stranger = Stranger::start(kind, named)?;
    let said = stranger.line("child");
    let (address, key) = said.split_once(' ').unwrap();
    let (address, key): (SocketAddr, PublicKey) = (address.parse().unwrap(), key.parse().unwrap());
    let admit = move |shown: &PublicKey| named && *shown == key;
    let listener = RingListener::open(any(), Security::Keys(tls(), Arc::new(admit)), None).unwrap();
    let mut to = stranger.child.stdin.take().unwrap();
    writeln!(to, "{}", listener.local_addr()).unwrap();
    let ours = listener.join(&ring(vec![address, listener.local_addr()], 1));
    let ours = ours.and_then(turn);
    let begins = if ours.is_ok() { "seen" } else { "failed" };
    Some((ours, stranger.line(begins)))
}

#[test]
fn a_key_that_is_named_is_let_in() {
    if let Some((ours, theirs)) = meet("key", true) {
        assert_eq!((ours.unwrap(), theirs.as_str()), (1, "1"));
    }
}

#[test]
fn a_key_that_is_not_named_is_kept_out() {
    if let Some((ours, theirs)) = meet("key", false) {
        assert!(matches!(ours, Err(Error::Form { node: 0, .. })), "{ours:?}");
        // It is refused, or, when the kernel cannot say whose it is before it is accepted, closed before anything is said.
        let refused = ["it belongs to user", "the connection has ended"];
        assert!(refused.iter().any(|why| theirs.contains(why)), "{theirs}");
    }
}

#[test]
fn another_user_without_a_key_is_kept_out() {
    if let Some((ours, theirs)) = meet("none", true) {
        assert!(matches!(ours, Err(Error::Form { .. })), "{ours:?}");
        assert!(theirs.contains("cannot form the ring"), "{theirs}");
    }
}

#[test]
fn a_predecessor_of_another_version_is_told_so() {
    let listener = RingListener::open(any(), Security::SameUser, None).unwrap();
    let device = Device::open().unwrap();
    let hello = Hello {
        version: VERSION + 1,
        from: 1,
        nodes: 2,
        home: false,
        exchange: 0,
        element: 4096,
        id: ID,
        agreement: 0,
        port: 1,
    };
    let settings = |private_data: Vec<u8>| ConnParam {
        private_data,
        ..ConnParam::default()
    };
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(16, None).unwrap();
    let refused = |said: Vec<u8>| {
        let connected = cm::connect(
            listener.local_addr(),
            &pd,
            &QpInit::new(&cq, &cq),
            &settings(said),
        );
        match connected {
            Err(ConnectError::Rejected { private_data }) => {
                String::from_utf8_lossy(&private_data).into_owned()
            }
            Err(other) => panic!("{other}"),
            Ok(_) => panic!("it was let in"),
        }
    };
    let why = refused(hello.encode().to_vec());
    let both = format!("versions differ: {} there, {VERSION} here", VERSION + 1);
    assert!(why.contains(&both), "{why}");
    for noise in [Vec::new(), vec![0xff; 64], hello.encode()[..40].to_vec()] {
        let why = refused(noise);
        assert!(why.contains("does not speak the protocol"), "{why}");
    }
}
