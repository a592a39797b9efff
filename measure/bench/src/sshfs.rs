//! sshfs on this machine: a separate SSH server on the loopback interface with its own keys, and a mount.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Advice, fadvise};

use crate::children::{Running, free_port};
use crate::error::{BenchError, Result};
use crate::patience::until;

const SSHD: &str = "/usr/sbin/sshd";
/// The file's name.
const NAME: &str = "file";

/// A folder of this machine, mounted by sshfs. Server and mount end when this is dropped.
pub(crate) struct Mounted {
    mount: Mount,
    _server: Running,
}

/// A mounted folder, and the process that serves it. Both end with this.
pub(crate) struct Mount {
    pub(crate) at: PathBuf,
    pub(crate) _child: Running,
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
    }
}

/// A key pair without a passphrase.
fn key(path: &Path) -> Result<()> {
    let done = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(path)
        .stdin(Stdio::null())
        .status()
        .map_err(BenchError::system(
            "run ssh-keygen (Debian's openssh-client)",
        ))?;
    if done.success() {
        Ok(())
    } else {
        Err(BenchError::PeerGone(format!("ssh-keygen: {done}")))
    }
}

/// A program whose output is discarded.
fn quiet(mut command: Command, what: &'static str) -> Result<Running> {
    Running::start(command.stdin(Stdio::null()).stderr(Stdio::null()), what)
}

impl Mounted {
    /// Serves a file of `len` bytes from `dir`, which is made.
    pub(crate) fn new(dir: &Path, len: usize) -> Result<Self> {
        if !Path::new(SSHD).exists() {
            let why = "there is no sshd here (Debian's openssh-server)";
            return Err(BenchError::Usage(why.into()));
        }
        let system = BenchError::system;
        let (files, at) = (dir.join("files"), dir.join("mnt"));
        for dir in [&files, &at] {
            fs::create_dir_all(dir).map_err(system("make a folder"))?;
        }
        fs::write(files.join(NAME), vec![7; len]).map_err(system("write a file"))?;
        key(&dir.join("host"))?;
        key(&dir.join("user"))?;
        let port = free_port()?;
        let text = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {d}/host\nAuthorizedKeysFile {d}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n\
             PermitRootLogin yes\nSubsystem sftp internal-sftp\n",
            d = dir.display()
        );
        let config = dir.join("sshd_config");
        fs::write(&config, text).map_err(system("write sshd's settings"))?;
        // For a server that runs as root; an installed service has this directory.
        let _ = fs::create_dir_all("/run/sshd");
        let mut command = Command::new(SSHD);
        command.args(["-D", "-f"]).arg(&config);
        let server = quiet(command, "start sshd")?;
        until("sshd", || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
        })?;
        let user = Command::new("id")
            .arg("-un")
            .output()
            .map_err(system("run id"))?;
        let user = String::from_utf8_lossy(&user.stdout).trim().to_owned();
        let mut command = Command::new("sshfs");
        command
            .arg(format!("{user}@127.0.0.1:{}", files.display()))
            .arg(&at)
            .args(["-f", "-p", &port.to_string(), "-o"])
            .arg(format!(
                "IdentityFile={}/user,IdentitiesOnly=yes,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,BatchMode=yes",
                dir.display()
            ));
        let mount = Mount {
            _child: quiet(command, "start sshfs (Debian's sshfs)")?,
            at: at.clone(),
        };
        until("sshfs", || at.join(NAME).exists())?;
        Ok(Self {
            mount,
            _server: server,
        })
    }

    /// Opens the file, with none of its pages in the kernel's cache.
    pub(crate) fn open(&self) -> Result<File> {
        let file = File::open(self.mount.at.join(NAME)).map_err(BenchError::system("opening"))?;
        fadvise(&file, 0, None, Advice::DontNeed)
            .map_err(|e| BenchError::system("forgetting pages")(e.into()))?;
        Ok(file)
    }
}
