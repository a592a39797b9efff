//! What the tests of the program share.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test program uses its own part"
)]

pub mod http;
pub mod media;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant, SystemTime};

use weft::cp::link::Link;
use weft::cp::protocol::{Hello, Message, RingAdvert, Status, VERSION};
use weft::cp::rdma::{Prepared, RdmaLink};
use weft_verbs::Device;
use weft_verbs::any::cm::Dial;
use weft_verbs::cm::ConnParam;
use weft_verbs::tls::{Identity, Tls};

/// The programs that `weft` starts for its subcommands, and their folders below `apps/`.
const APPLICATIONS: [(&str, &str); 3] = [
    ("weft-ccd", "cc"),
    ("weft-fs", "fs"),
    ("weft-media", "media"),
];

/// The applications beside `weft`. They are of other packages: a test would not notice that one is missing or older than its source.
fn applications() -> &'static [PathBuf] {
    static FOUND: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOUND.get_or_init(|| {
        let beside = Path::new(env!("CARGO_BIN_EXE_weft"));
        APPLICATIONS
            .iter()
            .map(|(name, folder)| {
                let file = beside.with_file_name(name);
                let built = file.metadata().and_then(|about| about.modified()).ok();
                let is_new = ["cli", folder].iter().all(|folder| {
                    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../apps");
                    built >= Some(newest(&source.join(folder).join("src")))
                });
                assert!(
                    is_new,
                    "{} is missing or older than its source: cargo build -p weft-cc -p weft-fs -p weft-media",
                    file.display()
                );
                file
            })
            .collect()
    })
}

/// When the last of the files below a folder was written.
fn newest(folder: &Path) -> SystemTime {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let times = entries.map(|entry| match entry.metadata().unwrap() {
        about if about.is_dir() => newest(&entry.path()),
        about => about.modified().unwrap(),
    });
    times.max().unwrap_or(SystemTime::UNIX_EPOCH)
}

/// The program.
pub fn weft() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weft"));
    applications();
    command.stdin(Stdio::null());
    // Keys of the tests, not of who runs them.
    command.env("XDG_CONFIG_HOME", config());
    command
}

fn config() -> PathBuf {
    let user = rustix::process::geteuid().as_raw();
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("config-{user}"))
}

/// The preload library of `weft fs run`, if it has been built: it is another package's.
pub fn fs_library() -> Option<PathBuf> {
    let program = PathBuf::from(env!("CARGO_BIN_EXE_weft"));
    let beside = program.parent().unwrap();
    let file = "libweft_fs_preload.so";
    let places = [beside.join("deps").join(file), beside.join(file)];
    let age = |path: &PathBuf| path.metadata().unwrap().modified().unwrap();
    places
        .into_iter()
        .filter(|path| path.exists())
        .max_by_key(age)
}

/// The program as user 1234, if this is root; else there is nothing that root could do and we cannot.
pub fn unprivileged(dir: &Path) -> Option<Command> {
    as_user(dir, 1234)
}

/// The program as another user, if this is root.
pub fn as_user(dir: &Path, user: u32) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: needs root, to become another user");
        return None;
    }
    // The program may lie where that user cannot go.
    let copy = dir.join("weft");
    if !copy.exists() {
        copy_program(env!("CARGO_BIN_EXE_weft"), &copy);
        for file in applications() {
            copy_program(file, &dir.join(file.file_name().unwrap()));
        }
    }
    let mut command = Command::new(copy);
    std::os::unix::process::CommandExt::uid(&mut command, user);
    std::os::unix::process::CommandExt::gid(&mut command, user);
    command.stdin(Stdio::null()).current_dir("/");
    let config = dir.join(format!("config-{user}"));
    if !config.exists() {
        fs::create_dir(&config).unwrap();
        std::os::unix::fs::chown(&config, Some(user), Some(user)).unwrap();
    }
    command.env("XDG_CONFIG_HOME", config);
    Some(command)
}

/// Copies a program by another process: a child that another test starts meanwhile would inherit our descriptor for writing,
/// and the copy could not be executed (`ETXTBSY`).
pub fn copy_program(from: impl AsRef<Path>, to: &Path) {
    let cp = Command::new("cp").arg(from.as_ref()).arg(to).status();
    assert!(cp.unwrap().success());
}

/// What a finished program said.
#[derive(Debug)]
pub struct Output {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    pub fn of(command: &mut Command) -> Self {
        let out = command.output().unwrap();
        Self {
            code: out.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&out.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&out.stderr).into_owned(),
        }
    }

    #[track_caller]
    pub fn ok(&self) {
        assert_eq!(self.code, 0, "{self:?}");
    }
}

/// Sends with `weft cp ARGS... TARGET`.
pub fn send(args: &[&str], target: &str) -> Output {
    Output::of(weft().arg("cp").args(args).arg(target))
}

/// A running `weft cp --listen`.
pub struct Listener {
    pub child: Child,
    addr: SocketAddr,
    fingerprint: String,
}

impl Listener {
    pub fn start(dir: &Path, args: &[&str]) -> Self {
        Self::start_on(dir, "127.0.0.1:0", args)
    }

    pub fn start_on(dir: &Path, bind: &str, args: &[&str]) -> Self {
        Self::start_with(&mut weft(), dir, bind, args)
    }

    pub fn start_with(command: &mut Command, dir: &Path, bind: &str, args: &[&str]) -> Self {
        let mut child = command
            .args(["cp", "--bind", bind, "--listen", dir.to_str().unwrap()])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let addr = line
            .strip_prefix("listening on ")
            .and_then(|l| l.split(',').next())
            .expect(&line)
            .parse()
            .unwrap();
        let mut fingerprint = String::new();
        if !args
            .iter()
            .any(|arg| ["--key", "--plain-tcp", "--plain"].contains(arg))
        {
            let mut lines = (&mut stdout).lines().map_while(Result::ok);
            let found = lines.find_map(|line| {
                let rest = line.strip_prefix("the key of this listener is ")?;
                rest.split(';').next().map(str::to_owned)
            });
            fingerprint = found.expect("its fingerprint");
        }
        // Read on, so that it never waits for us.
        std::thread::spawn(move || stdout.lines().count());
        Self {
            child,
            addr,
            fingerprint,
        }
    }

    /// Of its key, which it shows.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn port(&self) -> u16 {
        self.addr.port()
    }

    pub fn target(&self, dir: &str) -> String {
        format!("{}:{dir}", self.addr)
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Names in a directory, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .filter_map(|e| e.ok()?.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}

/// Bytes that look random and are the same each time.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend(state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Looks again and again, up to 30 s, until there is something.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "in vain: {what}");
        std::thread::yield_now();
    }
}

/// A small file system of its own.
pub struct Tmpfs(PathBuf);

impl Tmpfs {
    pub fn mount(size: u64) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap().keep();
        let data = std::ffi::CString::new(format!("size={size}")).unwrap();
        match rustix::mount::mount(
            "tmpfs",
            &dir,
            "tmpfs",
            rustix::mount::MountFlags::empty(),
            data.as_c_str(),
        ) {
            Ok(()) => Some(Self(dir)),
            Err(e) => {
                println!("skipped: cannot mount a small tmpfs: {e}");
                let _ = fs::remove_dir(&dir);
                None
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}

/// Carries bytes both ways between two connections until both have ended, in threads of its own.
pub fn relay(near: TcpStream, far: TcpStream) {
    let pairs = [
        (near.try_clone().unwrap(), far.try_clone().unwrap()),
        (far, near),
    ];
    for (mut from, mut to) in pairs {
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(std::net::Shutdown::Write);
        });
    }
}

/// A sender that speaks the protocol by hand.
pub struct RawSender {
    pub link: RdmaLink,
    pub ring: RingAdvert,
}

impl RawSender {
    pub fn start(addr: SocketAddr) -> Self {
        Self::start_with(addr, |ring| ring)
    }

    /// Starts and uses another ring than it is told of.
    pub fn start_with(addr: SocketAddr, ring_of: impl FnOnce(RingAdvert) -> RingAdvert) -> Self {
        let link = dial(addr);
        link.send(&Message::Start {
            receives: link.receives(),
            fetches: false,
            proof: [0; 32],
        })
        .unwrap();
        let Some(Message::Ready { receives, ring, .. }) =
            link.recv(Duration::from_secs(10)).unwrap()
        else {
            panic!("not READY")
        };
        link.set_peer_receives(receives);
        link.use_ring(ring_of(ring)).unwrap();
        Self { link, ring }
    }

    /// Writes bytes to slot 0, then sends a message.
    pub fn put(&self, bytes: &[u8], message: &Message) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let len = bytes.len() as u32;
        assert_eq!(
            self.link
                .slot_from_file(0, 0, file.as_fd(), 0, len)
                .unwrap(),
            bytes.len()
        );
        self.link.push(0, len, message).unwrap();
    }

    /// The next message that is not a credit, or `None` when the connection has ended.
    pub fn next(&self) -> Option<Message> {
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(20) {
            match self.link.recv(Duration::from_secs(1)) {
                Ok(Some(Message::Credit) | None) => {}
                Ok(Some(message)) => return Some(message),
                Err(e) => {
                    println!("ended: {e}");
                    return None;
                }
            }
        }
        panic!("the receiver says nothing and does not go");
    }

    /// What the receiver says before it ends the connection.
    pub fn refusal(&self) -> Option<String> {
        let mut refusal = None;
        while let Some(message) = self.next() {
            if let Message::Refuse { text, .. } = message {
                refusal = Some(text);
            }
        }
        refusal
    }
}

/// TLS with a key of its own, and with anybody.
pub fn tls() -> Tls {
    Tls::new(Identity::generate().unwrap()).unwrap()
}

/// A connection to a receiver, hellos exchanged.
pub fn dial(addr: SocketAddr) -> RdmaLink {
    let device = Device::open().unwrap().into();
    let dial = Dial::new(&device, addr, Duration::from_secs(10)).unwrap();
    let (prepared, qp) = Prepared::new(&device, |pd, init| dial.create_qp(pd, init)).unwrap();
    let hello = Hello {
        version: VERSION,
        status: Status::Ok,
        key: false,
        nonce: [1; 32],
    };
    let param = ConnParam {
        private_data: hello.encode().to_vec(),
        tls: Some(tls()),
        ..ConnParam::default()
    };
    let connection = dial.connect(qp, &param).unwrap();
    RdmaLink::new(prepared, connection.qp, Duration::from_secs(2))
}
