//! sshfs on this machine: a server of SSH of its own on the loopback interface, with keys of its own, and a mount.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::fs::{Advice, fadvise};

use crate::error::{BenchError, Result};
use crate::patience::until;

const SSHD: &str = "/usr/sbin/sshd";
/// The file's name.
const NAME: &str = "file";

/// A folder of this machine, mounted by sshfs. Server and mount end with this.
pub(crate) struct Mounted {
    children: Vec<Child>,
    at: PathBuf,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.at).output();
        for child in self.children.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
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
        // Free now; nobody else here takes it before sshd does, most likely.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|listener| listener.local_addr())
            .map_err(system("find a free port"))?
            .port();
        let text = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {d}/host\nAuthorizedKeysFile {d}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n\
             PermitRootLogin yes\nSubsystem sftp internal-sftp\n",
            d = dir.display()
        );
        let config = dir.join("sshd_config");
        fs::write(&config, text).map_err(system("write sshd's settings"))?;
        // Of a server that runs as root; an installed service has it.
        let _ = fs::create_dir_all("/run/sshd");
        let mut mounted = Self {
            children: Vec::new(),
            at: at.clone(),
        };
        let server = Command::new(SSHD)
            .args(["-D", "-f"])
            .arg(&config)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(system("start sshd"))?;
        mounted.children.push(server);
        until("sshd", || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
        })?;
        let user = Command::new("id")
            .arg("-un")
            .output()
            .map_err(system("run id"))?;
        let user = String::from_utf8_lossy(&user.stdout).trim().to_owned();
        let client = Command::new("sshfs")
            .arg(format!("{user}@127.0.0.1:{}", files.display()))
            .arg(&at)
            .args(["-f", "-p", &port.to_string(), "-o"])
            .arg(format!(
                "IdentityFile={}/user,IdentitiesOnly=yes,StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,BatchMode=yes",
                dir.display()
            ))
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(system("start sshfs (Debian's sshfs)"))?;
        mounted.children.push(client);
        until("sshfs", || at.join(NAME).exists())?;
        Ok(mounted)
    }

    /// The file, with nothing of it in the kernel's cache.
    pub(crate) fn open(&self) -> Result<File> {
        let file = File::open(self.at.join(NAME)).map_err(BenchError::system("opening"))?;
        fadvise(&file, 0, None, Advice::DontNeed)
            .map_err(|e| BenchError::system("forgetting pages")(e.into()))?;
        Ok(file)
    }
}
