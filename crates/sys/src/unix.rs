//! Unix sockets that keep message boundaries and carry descriptors (`SOCK_SEQPACKET`), always
//! non-blocking and closed on exec.
//!
//! # Safety
//!
//! One `unsafe` call, `getsockopt(SO_PEERCRED)`: `rustix` has no room for a peer whose process number
//! cannot be seen from here.

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// The most descriptors in one message (the kernel's `SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;

/// What a socket is called.
#[derive(Clone, Copy, Debug)]
pub enum Name<'a> {
    /// A name outside the file system, gone with its socket, seen by all of the network namespace.
    Abstract(&'a [u8]),
    /// A file.
    Path(&'a Path),
}

impl Name<'_> {
    fn addr(self) -> io::Result<SocketAddrUnix> {
        Ok(match self {
            Name::Abstract(name) => SocketAddrUnix::new_abstract_name(name)?,
            Name::Path(path) => SocketAddrUnix::new(path)?,
        })
    }
}

fn socket() -> io::Result<OwnedFd> {
    Ok(net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::NONBLOCK | SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Listens on a name. A socket file is made with mode 0600, and replaces one that nobody listens on
/// any more.
///
/// # Errors
/// `AddrInUse` when somebody listens there (or the path is no socket), `InvalidInput` for a name that
/// is too long, those of making a file.
pub fn listen(name: Name<'_>, backlog: u32) -> io::Result<OwnedFd> {
    let addr = name.addr()?;
    let fd = socket()?;
    // Linux gives the file the mode that the socket has when it is bound.
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    match (net::bind(&fd, &addr), name) {
        (Err(Errno::ADDRINUSE), Name::Path(path)) if is_dead(path) => {
            rustix::fs::unlink(path)?;
            net::bind(&fd, &addr)?;
        }
        (done, _) => done?,
    }
    net::listen(&fd, i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(fd)
}

/// Whether this is a socket file that nobody listens on.
fn is_dead(path: &Path) -> bool {
    // Connecting to a plain file is refused too.
    path.symlink_metadata()
        .is_ok_and(|m| m.file_type().is_socket())
        && connect(Name::Path(path)).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused)
}

/// Connects, without ever blocking.
///
/// # Errors
/// `WouldBlock` while the listener's backlog is full, `ConnectionRefused` and `NotFound` when nobody
/// listens, `PermissionDenied`.
pub fn connect(name: Name<'_>) -> io::Result<OwnedFd> {
    let fd = socket()?;
    net::connect(&fd, &name.addr()?)?;
    Ok(fd)
}

/// Takes a waiting connection, or `None` when there is none.
///
/// # Errors
/// Those that go on until somebody acts, above all too many open files.
pub fn accept(fd: impl AsFd) -> io::Result<Option<OwnedFd>> {
    let fd = fd.as_fd();
    loop {
        match net::accept_with(fd, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(conn) => return Ok(Some(conn)),
            Err(Errno::AGAIN) => return Ok(None),
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

/// Who made the other end of a connection (as it was at `connect` or `listen`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cred {
    /// The process; `None` when our namespace has no number for it.
    pub pid: Option<u32>,
    /// The user, as our namespace numbers it.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Asks the kernel who is at the other end.
///
/// # Errors
/// `InvalidInput` when `fd` is not a Unix socket.
pub fn peer_cred(fd: impl AsFd) -> io::Result<Cred> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: u32::MAX,
        gid: u32::MAX,
    };
    let mut len = size_of_val(&cred) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `cred`, and the new length to `len`.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            &raw mut cred,
            &raw mut len,
        )
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    // A socket that is not connected, or not a Unix one, has nobody there: user -1.
    if len as usize != size_of_val(&cred) || cred.uid == u32::MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(Cred {
        pid: u32::try_from(cred.pid).ok().filter(|&pid| pid != 0),
        uid: cred.uid,
        gid: cred.gid,
    })
}

/// Sends one message with copies of some descriptors, whole or not at all.
///
/// # Errors
/// `WouldBlock` when the peer's queue is full; `InvalidInput` for no bytes or for more than [`MAX_FDS`]
/// descriptors; `BrokenPipe` (no signal).
pub fn send_with_fds(fd: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    if bytes.is_empty() || fds.len() > MAX_FDS {
        // A message of no bytes would read as the end of the stream.
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    rustix::io::retry_on_intr(|| {
        net::sendmsg(
            &fd,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )
    })?;
    Ok(())
}

/// Takes one message and at most `max_fds` descriptors, which are closed on exec. `None` is the end of the stream.
///
/// # Errors
/// `WouldBlock` when nothing has arrived; `InvalidData` when the message does not fit `buf` or came with more
/// descriptors: those that came are closed.
pub fn recv_with_fds(
    fd: impl AsFd,
    buf: &mut [u8],
    max_fds: usize,
) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    let room = rustix::cmsg_space!(ScmRights(max_fds.min(MAX_FDS)));
    let mut space = vec![MaybeUninit::uninit(); room];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        net::recvmsg(
            &fd,
            &mut [IoSliceMut::new(buf)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        )
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    if got
        .flags
        .intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC)
        || fds.len() > max_fds
    {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((got.bytes != 0).then_some((got.bytes, fds)))
}
