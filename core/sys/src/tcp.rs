//! TCP sockets, always non-blocking and closed on exec.
//!
//! # Safety
//!
//! One `unsafe` call, `getsockopt(TCP_MAXSEG)`, which `rustix` lacks.

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, sockopt};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

fn socket(addr: SocketAddr) -> io::Result<OwnedFd> {
    let family = match addr {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    Ok(net::socket_with(
        family,
        SocketType::STREAM,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Options for binding an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BindOptions {
    /// An IPv6 socket takes IPv6 peers only; else IPv4 peers come in too, as mapped addresses (`::ffff:a.b.c.d`). Default true.
    pub v6_only: bool,
    /// Other sockets may bind the same port, as long as none listens on it. Default true. A port whose old connections are in TIME-WAIT can
    /// be bound in any case.
    pub share: bool,
}

impl Default for BindOptions {
    fn default() -> Self {
        BindOptions {
            v6_only: true,
            share: true,
        }
    }
}

/// Listens on an address (port 0: chosen by the kernel), bound as by [`bind`] with its defaults.
///
/// # Errors
/// `AddrInUse`, `AddrNotAvailable`, `PermissionDenied` (low ports).
pub fn listen(addr: SocketAddr, backlog: u32) -> io::Result<OwnedFd> {
    let fd = bind(addr, BindOptions::default())?;
    listen_bound(&fd, backlog)?;
    Ok(fd)
}

/// A socket that is bound, and that neither listens nor connects yet: see [`listen_bound`] and [`connect_bound`].
///
/// # Errors
/// As [`listen`]. A shared port that another socket is only bound to is refused no sooner than when one of them listens.
pub fn bind(addr: SocketAddr, options: BindOptions) -> io::Result<OwnedFd> {
    let fd = socket(addr)?;
    if addr.is_ipv6() {
        sockopt::set_ipv6_v6only(&fd, options.v6_only)?;
    }
    if !options.share {
        match net::bind(&fd, &addr) {
            // Another socket has it, or old connections: with `SO_REUSEADDR` the kernel distinguishes these.
            Err(Errno::ADDRINUSE) => {}
            bound => return bound.map(|()| fd).map_err(io::Error::from),
        }
    }
    sockopt::set_socket_reuseaddr(&fd, true)?;
    net::bind(&fd, &addr)?;
    Ok(fd)
}

/// Listens on a bound socket.
///
/// # Errors
/// `AddrInUse`.
pub fn listen_bound(fd: impl AsFd, backlog: u32) -> io::Result<()> {
    // Connections inherit it: when they have closed, the port can be taken at once.
    sockopt::set_socket_reuseaddr(&fd, true)?;
    unpaced_on_loopback(&fd, local_addr(&fd)?);
    Ok(net::listen(fd, i32::try_from(backlog).unwrap_or(i32::MAX))?)
}

/// Accepts a waiting connection, or returns `None` if there is none.
///
/// # Errors
/// Permanent errors, above all too many open files. A connection that its peer closed before it was accepted is skipped.
pub fn accept(fd: impl AsFd) -> io::Result<Option<(OwnedFd, SocketAddr)>> {
    let fd = fd.as_fd();
    loop {
        match net::acceptfrom_with(fd, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok((conn, Some(addr))) => {
                if let Ok(addr) = SocketAddr::try_from(addr) {
                    return Ok(Some((conn, addr)));
                }
            }
            Err(Errno::AGAIN) => return Ok(None),
            // accept(2) returns network errors that are pending on the new connection; they do not concern the listener.
            Ok((_, None))
            | Err(
                Errno::INTR
                | Errno::CONNABORTED
                | Errno::PROTO
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::HOSTDOWN
                | Errno::HOSTUNREACH
                | Errno::NONET
                | Errno::NOPROTOOPT,
            ) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Starts to connect, from `bind` if given. The socket becomes writable when the attempt is over;
/// ask [`connect_result`] then.
///
/// # Errors
/// Only errors that the kernel knows at once (no route, no such local address, ...).
pub fn connect_start(addr: SocketAddr, bind: Option<SocketAddr>) -> io::Result<OwnedFd> {
    let fd = socket(addr)?;
    if let Some(local) = bind {
        net::bind(&fd, &local)?;
    }
    connect_bound(&fd, addr)?;
    Ok(fd)
}

/// As [`connect_start`], with a bound socket.
///
/// # Errors
/// As there.
pub fn connect_bound(fd: impl AsFd, addr: SocketAddr) -> io::Result<()> {
    let fd = fd.as_fd();
    // As in `listen_bound`.
    sockopt::set_socket_reuseaddr(fd, true)?;
    unpaced_on_loopback(fd, addr);
    let mut begun = net::connect(fd, &addr);
    if begun == Err(Errno::ISCONN) {
        // It listens. It gives that up, and with it a port that the kernel has chosen.
        let own = net::getsockname(fd)?;
        net::shutdown(fd, net::Shutdown::Read)?;
        let _ = net::bind(fd, &own);
        begun = net::connect(fd, &addr);
    }
    match begun {
        // An interrupted connect continues.
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// Over loopback there is no line whose bandwidth could be measured. Where the system's choice of congestion control is one that paces by it (BBR), a
/// connection keeps its timers for good once it has begun with it; so another one is chosen before. Every kernel has this one, for everybody.
fn unpaced_on_loopback(fd: impl AsFd, addr: SocketAddr) {
    if addr.ip().to_canonical().is_loopback() {
        let _ = sockopt::set_tcp_congestion(fd, "reno");
    }
}

/// The state of a started connect: `Ok(true)` connected, `Ok(false)` in progress.
///
/// # Errors
/// The reason of the failure: `ConnectionRefused`, `TimedOut`, ... The kernel reports it once.
pub fn connect_result(fd: impl AsFd) -> io::Result<bool> {
    let fd = fd.as_fd();
    sockopt::socket_error(fd)??;
    match net::getpeername(fd) {
        Ok(_) => Ok(true),
        Err(Errno::NOTCONN) => {
            // The failure may have come between the two questions.
            sockopt::socket_error(fd)??;
            Ok(false)
        }
        Err(e) => Err(e.into()),
    }
}

fn internet(addr: Option<net::SocketAddrAny>) -> io::Result<SocketAddr> {
    addr.and_then(|a| a.try_into().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not an internet socket"))
}

/// The socket's own address.
pub fn local_addr(fd: impl AsFd) -> io::Result<SocketAddr> {
    internet(Some(net::getsockname(fd)?))
}

/// The peer's address.
///
/// # Errors
/// `NotConnected`.
pub fn peer_addr(fd: impl AsFd) -> io::Result<SocketAddr> {
    internet(net::getpeername(fd)?)
}

/// Sends small segments at once (`TCP_NODELAY`).
pub fn set_nodelay(fd: impl AsFd, on: bool) -> io::Result<()> {
    Ok(sockopt::set_tcp_nodelay(fd, on)?)
}

/// Ends our direction: the peer reads the end of the stream after the sent bytes.
pub fn shutdown_write(fd: impl AsFd) -> io::Result<()> {
    Ok(net::shutdown(fd, net::Shutdown::Write)?)
}

/// Makes the close abortive: the peer gets a reset and unsent data is dropped.
pub fn set_linger0(fd: impl AsFd) -> io::Result<()> {
    Ok(sockopt::set_socket_linger(fd, Some(Duration::ZERO))?)
}

/// The maximum segment size in bytes (`TCP_MAXSEG`); before the connection is up, a guess.
pub fn mss(fd: impl AsFd) -> io::Result<u32> {
    let fd: BorrowedFd<'_> = fd.as_fd();
    let mut value: libc::c_int = 0;
    let mut len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `value`, and the new length to `len`.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_MAXSEG,
            &raw mut value,
            &raw mut len,
        )
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u32::try_from(value).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Peers that connect early wait, and the socket can still be used to connect from its address.
    #[test]
    fn a_socket_that_listens_early_connects_from_its_port() {
        let here = "127.0.0.1:0".parse().unwrap();
        let options = BindOptions::default();
        let (early, late) = (bind(here, options).unwrap(), bind(here, options).unwrap());
        for fd in [&early, &late] {
            listen_bound(fd, 8).unwrap();
        }
        let own = local_addr(&early).unwrap();
        connect_bound(&early, local_addr(&late).unwrap()).unwrap();
        while !connect_result(&early).unwrap() {}
        let (_, peer) = accept(&late).unwrap().unwrap();
        assert_eq!((peer, local_addr(&early).unwrap()), (own, own));
    }
}
