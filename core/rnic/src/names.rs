//! The Unix sockets by which peers of one host find a listener (docs/spec/local.md).

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use weft_sys::unix::{self, Name};

/// Names of a listener's Unix socket, the most likely first.
pub(crate) struct Names {
    pub(crate) abstracts: Vec<Vec<u8>>,
    pub(crate) paths: Vec<PathBuf>,
}

impl Names {
    /// For connecting to `addr`: that very address, or a listener on all of them.
    pub(crate) fn to(addr: SocketAddr, dir: Option<&std::path::Path>) -> Names {
        let ip = addr.ip().to_canonical().to_string();
        let hosts = [ip.as_str(), "any"];
        Names {
            abstracts: hosts.map(|host| abstract_name(host, addr.port())).into(),
            paths: dir
                .map(|dir| hosts.map(|host| path_name(dir, host, addr.port())).into())
                .unwrap_or_default(),
        }
    }

    /// For listening on `addr`.
    pub(crate) fn at(addr: SocketAddr, dir: Option<&std::path::Path>) -> Names {
        let ip = addr.ip().to_canonical();
        let host = if ip.is_unspecified() {
            "any".to_owned()
        } else {
            ip.to_string()
        };
        Names {
            abstracts: vec![abstract_name(&host, addr.port())],
            paths: dir
                .map(|dir| vec![path_name(dir, &host, addr.port())])
                .unwrap_or_default(),
        }
    }

    pub(crate) fn connect(&self) -> io::Result<OwnedFd> {
        let mut last = io::ErrorKind::ConnectionRefused.into();
        let abstracts = self.abstracts.iter().map(|name| Name::Abstract(name));
        for name in abstracts.chain(self.paths.iter().map(|path| Name::Path(path))) {
            match unix::connect(name) {
                Ok(fd) => return Ok(fd),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// The user whose process listens for peers of this host at this TCP address; for an unspecified one, on all addresses. The kernel answers, from the names of
/// this network namespace: no process is asked, and none can say anything else. `None` if nobody listens, or not for shared memory (`WEFT_LOCAL=off`).
///
/// # Errors
/// `WouldBlock` while the listener is too busy to be told its user; those of making a socket. Neither is an answer.
pub fn listening_user(addr: SocketAddr) -> io::Result<Option<u32>> {
    let names = if addr.ip().is_unspecified() {
        Names::at(addr, None)
    } else {
        Names::to(addr, None)
    };
    for name in names.abstracts {
        match unix::connect(Name::Abstract(&name)) {
            Ok(fd) => {
                let user = unix::peer_cred(fd)?.uid;
                return Ok(Some(user).filter(|&user| user != unix::OVERFLOW_UID));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

fn abstract_name(host: &str, port: u16) -> Vec<u8> {
    format!("weft/1/{host}/{port}").into_bytes()
}

/// An IPv6 address has colons, which are fine in a file's name.
fn path_name(dir: &std::path::Path, host: &str, port: u16) -> PathBuf {
    dir.join(format!("weft-{host}-{port}.sock"))
}
