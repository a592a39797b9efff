//! Unix sockets that carry descriptors, and keep message boundaries (`SOCK_SEQPACKET`) unless told otherwise, always
//! non-blocking and closed on exec.
//!
//! # Safety
//!
//! `getsockopt(SO_PEERCRED)`, `getsockopt(SO_PEERPIDFD)` and `recvmsg`: `rustix` has no room for a peer whose process number cannot be seen from
//! here, and none for its descriptor. The kernel gets pointers to values and buffers that outlive the call, with their lengths, and ancillary
//! data is walked with the C library's macros within the length that the kernel has told. Each descriptor that comes has one owner from then on.

use rustix::fs::{Mode, fchmod};
use rustix::io::Errno;
use rustix::net::{
    self, AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, UCred, sockopt,
};
use std::io::{self, IoSlice};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use crate::fork::PrivateFd;
use crate::raw::retry;
use crate::udp::set_option;

/// The most descriptors in one message (the kernel's `SCM_MAX_FD`).
pub const MAX_FDS: usize = 253;
/// The number of users that our user namespace does not know (`/proc/sys/kernel/overflowuid`).
pub const OVERFLOW_UID: u32 = 65_534;
/// A descriptor of the sender's process beside a message (Linux 6.5).
const SCM_PIDFD: i32 = 4;
/// Whether messages may bring descriptors (Linux 6.16).
const SO_PASSRIGHTS: i32 = 83;

/// How bytes are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Each message is received as a whole (`SOCK_SEQPACKET`).
    Packets,
    /// A stream of bytes (`SOCK_STREAM`).
    Stream,
    /// No connections (`SOCK_DGRAM`).
    Datagrams,
}

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

fn socket(kind: Kind) -> io::Result<OwnedFd> {
    Ok(net::socket_with(
        AddressFamily::UNIX,
        match kind {
            Kind::Packets => SocketType::SEQPACKET,
            Kind::Stream => SocketType::STREAM,
            Kind::Datagrams => SocketType::DGRAM,
        },
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
    listen_as(name, Kind::Packets, backlog, false)
}

/// As [`listen`] on an abstract name, which ends with this process: children do not get it. [`claim`] may take the same name besides.
///
/// # Errors
/// As there.
pub fn listen_alone(name: &[u8], backlog: u32) -> io::Result<PrivateFd> {
    let fd = PrivateFd::new(socket(Kind::Packets)?);
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    net::bind(&fd, &Name::Abstract(name).addr()?)?;
    net::listen(&fd, i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(fd)
}

/// The same, where anybody may connect: messages say who sent them ([`ask_for_senders`]), and bring no descriptors until [`take_rights`] says so. A connection
/// has both from its listener, since Linux 6.16 when it is made and not when it is accepted.
///
/// # Errors
/// As [`listen`].
pub fn listen_for_strangers(name: Name<'_>, kind: Kind, backlog: u32) -> io::Result<OwnedFd> {
    listen_as(name, kind, backlog, true)
}

fn listen_as(name: Name<'_>, kind: Kind, backlog: u32, strangers: bool) -> io::Result<OwnedFd> {
    let addr = name.addr()?;
    let fd = socket(kind)?;
    // Linux gives the file the mode that the socket has when it is bound.
    fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
    match (net::bind(&fd, &addr), name) {
        (Err(Errno::ADDRINUSE), Name::Path(path)) if is_dead(path) => {
            rustix::fs::unlink(path)?;
            net::bind(&fd, &addr)?;
        }
        (done, _) => done?,
    }
    if strangers {
        ask_for_senders(&fd, true)?;
        take_rights(&fd, false);
    }
    net::listen(&fd, i32::try_from(backlog).unwrap_or(i32::MAX))?;
    Ok(fd)
}

/// Whether this is a socket file that nobody listens on.
pub fn is_dead(path: &Path) -> bool {
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
    let fd = socket(Kind::Packets)?;
    net::connect(&fd, &name.addr()?)?;
    Ok(fd)
}

/// The same, where anybody may listen: no message brings descriptors until [`take_rights`] says so.
///
/// # Errors
/// As [`connect`].
pub fn connect_to_stranger(name: Name<'_>, kind: Kind) -> io::Result<OwnedFd> {
    let fd = socket(kind)?;
    take_rights(&fd, false);
    net::connect(&fd, &name.addr()?)?;
    Ok(fd)
}

/// Connects to the first of these names that takes us, for each of them one system call; see [`connect`]. Names that nobody has are passed over, those
/// with another error are told to `failed`. Children do not get the connections.
///
/// # Errors
/// Those of making a socket.
pub fn connect_to_each<N: AsRef<[u8]>>(
    names: impl IntoIterator<Item = N>,
    mut made: impl FnMut(N, PrivateFd),
    mut failed: impl FnMut(N, io::Error),
) -> io::Result<()> {
    let another = || -> io::Result<PrivateFd> { Ok(PrivateFd::new(socket(Kind::Packets)?)) };
    let mut fd = another()?;
    for name in names {
        match net::connect(&fd, &Name::Abstract(name.as_ref()).addr()?) {
            Ok(()) => made(name, std::mem::replace(&mut fd, another()?)),
            Err(Errno::CONNREFUSED) => {}
            Err(error) => failed(name, error.into()),
        }
    }
    Ok(())
}

/// Takes a name, as long as the socket lives: nothing is received. Children do not get it.
///
/// # Errors
/// `AddrInUse` if somebody has it.
pub fn claim(name: &[u8]) -> io::Result<PrivateFd> {
    let fd = PrivateFd::new(socket(Kind::Datagrams)?);
    net::bind(&fd, &Name::Abstract(name).addr()?)?;
    net::shutdown(&fd, net::Shutdown::Read)?;
    Ok(fd)
}

/// Whether somebody has taken a name with [`claim`]. If the kernel cannot be asked, it counts as taken.
pub fn is_claimed(name: &[u8]) -> bool {
    let asked = || -> io::Result<bool> {
        let fd = socket(Kind::Datagrams)?;
        let taken = net::connect(&fd, &Name::Abstract(name).addr()?);
        Ok(taken != Err(Errno::CONNREFUSED))
    };
    asked().unwrap_or(true)
}

/// Sends one message that lies in two pieces, without an allocation, whole or not at all.
///
/// # Errors
/// As [`send_with_fds`].
pub fn send_pieces(fd: impl AsFd, pieces: [&[u8]; 2]) -> io::Result<()> {
    let pieces = pieces.map(IoSlice::new);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let send = || net::sendmsg(&fd, &pieces, &mut SendAncillaryBuffer::default(), flags);
    rustix::io::retry_on_intr(send)?;
    Ok(())
}

/// Takes one message without what came beside it. `None` is the end of the stream; what does not fit is cut off.
///
/// # Errors
/// `WouldBlock` when nothing has arrived.
pub fn recv_bytes(fd: impl AsFd, into: &mut [u8]) -> io::Result<Option<usize>> {
    let recv = || net::recv(&fd, &mut *into, net::RecvFlags::DONTWAIT);
    let (len, _) = rustix::io::retry_on_intr(recv)?;
    Ok((len > 0).then_some(len))
}

/// Asks for room for so many bytes that are sent and not received yet, as far as the system allows.
pub fn set_send_room(fd: impl AsFd, bytes: usize) {
    if sockopt::set_socket_send_buffer_size_force(&fd, bytes).is_err() {
        // Not privileged: within the system's limit, or as it was.
        let _ = sockopt::set_socket_send_buffer_size(&fd, bytes);
    }
}

/// Whether messages may bring descriptors from now on; without, who sends one gets an error. Before Linux 6.16 they always may: then even the `close` of a
/// socket waits for a descriptor in its queue that is slow to close (`SO_LINGER`, a FUSE file). Returns whether the kernel knows this.
pub fn take_rights(fd: impl AsFd, on: bool) -> bool {
    let on = i32::from(on);
    set_option(fd.as_fd(), libc::SOL_SOCKET, SO_PASSRIGHTS, &on).is_ok()
}

/// Whether what waits to be received has no descriptors. Says yes of at most 64 KiB. None of them becomes one of this process.
///
/// # Errors
/// Those of `ioctl(2)` and `recv(2)`.
pub fn has_no_rights(fd: impl AsFd) -> io::Result<bool> {
    ask_for_senders(&fd, false)?;
    // A mark of urgent data would end the look before it.
    let _ = sockopt::set_socket_oobinline(&fd, true);
    let waiting = rustix::io::ioctl_fionread(&fd)?;
    let mut bytes = vec![0; 64 << 10];
    // Also of an empty queue: after this no send is under way that was let in before.
    let seen = match recv_beside(&fd, &mut bytes, (&mut [], 0), libc::MSG_PEEK) {
        Ok(seen) if seen.is_cut => return Ok(false),
        Ok(seen) => seen.len,
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => 0,
        Err(e) if e.kind() == io::ErrorKind::ConnectionReset => 0,
        Err(_) => return Ok(false),
    };
    Ok(seen as u64 >= waiting)
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

/// Who made the other end of a connection (as it was at `connect` or `listen`), or sent a message (as it was then).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cred {
    /// The process; `None` when our namespace has no number for it.
    pub pid: Option<u32>,
    /// The user, as our namespace numbers it.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

impl Cred {
    fn new(cred: libc::ucred) -> Cred {
        Cred {
            pid: u32::try_from(cred.pid).ok().filter(|&pid| pid != 0),
            uid: cred.uid,
            gid: cred.gid,
        }
    }

    /// Whether this is the user that we run as. One that our user namespace does not know is nobody in particular, and neither are we if
    /// it does not know us.
    pub fn is_same_user(&self) -> bool {
        self.uid == crate::process::uid() && self.uid != OVERFLOW_UID
    }
}

/// Who made the other end of a connection, when it did so.
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
    Ok(Cred::new(cred))
}

/// The process that made the other end of a connection, when it did so.
///
/// # Errors
/// `ENOPROTOOPT` before Linux 6.5; before 6.16 others if the process is gone.
pub fn peer_process(fd: impl AsFd) -> io::Result<OwnedFd> {
    let mut process: RawFd = -1;
    let mut len = size_of_val(&process) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes to `process`, and the new length to `len`.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_getsockopt,
            fd.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            &raw mut process,
            &raw mut len,
        )
    };
    if rc < 0 {
        return Err(io::Error::last_os_error());
    }
    if process < 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: a new descriptor that nobody else has.
    Ok(unsafe { OwnedFd::from_raw_fd(process) })
}

/// From now on messages that are received say who sent them ([`Packet::sender`]), or do not. Connections have it from their listener.
///
/// # Errors
/// None on a Unix socket.
pub fn ask_for_senders(fd: impl AsFd, on: bool) -> io::Result<()> {
    sockopt::set_socket_passcred(&fd, on)?;
    // Before Linux 6.5 there is only the number.
    let _ = set_option(
        fd.as_fd(),
        libc::SOL_SOCKET,
        libc::SO_PASSPIDFD,
        &i32::from(on),
    );
    Ok(())
}

/// Sends one message with copies of some descriptors, whole or not at all.
///
/// # Errors
/// `WouldBlock` when the peer's queue is full; `InvalidInput` for no bytes or for more than [`MAX_FDS`]
/// descriptors; `BrokenPipe` (no signal).
pub fn send_with_fds(fd: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    send(fd.as_fd(), bytes, fds, None)
}

/// The same, with our process and effective user and group: the kernel sees to it that they are ours.
///
/// # Errors
/// As [`send_with_fds`]; `InvalidInput` too when our user namespace does not know our user.
pub fn send_signed(fd: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let ourselves = UCred {
        pid: rustix::process::getpid(),
        uid: rustix::process::geteuid(),
        gid: rustix::process::getegid(),
    };
    match send(fd.as_fd(), bytes, fds, Some(ourselves)) {
        // The group has no number in our user namespace. Then the kernel names the real user and group.
        Err(e) if e.kind() == io::ErrorKind::InvalidInput => send(fd.as_fd(), bytes, fds, None),
        sent => sent,
    }
}

fn send(
    fd: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    cred: Option<UCred>,
) -> io::Result<()> {
    if bytes.is_empty() || fds.len() > MAX_FDS {
        // A message of no bytes would read as the end of the stream.
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let room = rustix::cmsg_space!(ScmRights(fds.len()), ScmCredentials(1));
    let mut space = vec![MaybeUninit::uninit(); room];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    if let Some(cred) = cred
        && !control.push(SendAncillaryMessage::ScmCredentials(cred))
    {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    rustix::io::retry_on_intr(|| {
        net::sendmsg(
            fd,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )
    })?;
    Ok(())
}

/// A message, and what came with it.
#[derive(Debug)]
pub struct Packet {
    /// Its length.
    pub len: usize,
    /// Descriptors, which are closed on exec.
    pub fds: Vec<OwnedFd>,
    /// Who sent it; `None` unless [`ask_for_senders`] asks.
    pub sender: Option<Sender>,
    /// There were more bytes or descriptors than it has; only of [`peek`].
    pub is_cut: bool,
}

/// The sender of a message, when it was sent.
#[derive(Debug)]
pub struct Sender {
    /// Its process and user.
    pub cred: Cred,
    /// Stands for the process; `None` before Linux 6.5, and when no descriptor was free.
    pub pidfd: Option<OwnedFd>,
}

/// As [`recv`], for who needs not know the sender.
///
/// # Errors
/// As there.
pub fn recv_with_fds(
    fd: impl AsFd,
    buf: &mut [u8],
    max_fds: usize,
) -> io::Result<Option<(usize, Vec<OwnedFd>)>> {
    Ok(recv(fd, buf, max_fds)?.map(|packet| (packet.len, packet.fds)))
}

/// Takes one message and at most `max_fds` descriptors. `None` is the end of the stream.
///
/// # Errors
/// `WouldBlock` when nothing has arrived; `InvalidData` when the message does not fit `buf` or came with more
/// descriptors: those that came are closed.
pub fn recv(fd: impl AsFd, buf: &mut [u8], max_fds: usize) -> io::Result<Option<Packet>> {
    match recv_as(fd, buf, max_fds)? {
        Some(packet) if packet.is_cut => Err(io::ErrorKind::InvalidData.into()),
        packet => Ok(packet),
    }
}

/// Looks at a message that stays, and duplicates its first descriptor, to a number above 2. A message that is cut is no error, so that its descriptor is the
/// caller's: each `close` of a file can take long, also that of a duplicate (`flush` of FUSE). The socket's messages say who sent them from then on.
///
/// # Errors
/// `WouldBlock` when nothing has arrived, or no number is free for the descriptor.
pub fn peek(fd: impl AsFd, buf: &mut [u8]) -> io::Result<Option<Packet>> {
    let _standard = match taken_standard(&fd) {
        Err(Errno::MFILE) => return Err(io::ErrorKind::WouldBlock.into()),
        taken => taken?,
    };
    sockopt::set_socket_passcred(&fd, true)?;
    let pass_pidfd = |on: i32| set_option(fd.as_fd(), libc::SOL_SOCKET, libc::SO_PASSPIDFD, &on);
    // Its room, behind that of descriptors, would be theirs.
    let _ = pass_pidfd(0);
    // SAFETY: these only compute.
    let room = unsafe {
        let sender = libc::CMSG_SPACE(size_of::<libc::ucred>() as u32);
        sender + libc::CMSG_LEN(size_of::<RawFd>() as u32)
    };
    let mut control = vec![0_u64; (room as usize).div_ceil(8)];
    let got = recv_beside(&fd, buf, (&mut control, room as usize), libc::MSG_PEEK);
    let _ = pass_pidfd(1);
    let got = got?;
    if got.is_cut && got.fds.is_empty() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok((got.len != 0).then_some(got))
}

/// Duplicates of a descriptor that take those of the numbers 0, 1 and 2 that are free: what came there would be the program's standard input or output.
fn taken_standard(fd: impl AsFd) -> Result<Vec<OwnedFd>, Errno> {
    let mut taken = Vec::new();
    loop {
        let next = rustix::io::fcntl_dupfd_cloexec(&fd, 0)?;
        if next.as_raw_fd() > libc::STDERR_FILENO {
            return Ok(taken);
        }
        taken.push(next);
    }
}

fn recv_as(fd: impl AsFd, buf: &mut [u8], max_fds: usize) -> io::Result<Option<Packet>> {
    let max_fds = max_fds.min(MAX_FDS);
    let sizes = [
        max_fds * size_of::<RawFd>(),
        size_of::<libc::ucred>(),
        size_of::<RawFd>(),
    ];
    // SAFETY: it only computes.
    let room = sizes.map(|size| unsafe { libc::CMSG_SPACE(size as u32) } as usize);
    // Aligned as headers are.
    let room = room.iter().sum::<usize>();
    let mut control = vec![0_u64; room.div_ceil(8)];
    let got = recv_beside(fd, buf, (&mut control, room), 0)?;
    let is_cut = got.is_cut || got.fds.len() > max_fds;
    Ok((got.len != 0).then_some(Packet { is_cut, ..got }))
}

/// What comes beside the message has this room, so many bytes of it; without any, no descriptor comes.
fn recv_beside(
    fd: impl AsFd,
    buf: &mut [u8],
    (control, room): (&mut [u64], usize),
    how: libc::c_int,
) -> io::Result<Packet> {
    let iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: all zeros is the empty message.
    let mut m: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    m.msg_iov = (&raw const iov).cast_mut();
    m.msg_iovlen = 1;
    m.msg_control = control.as_mut_ptr().cast();
    m.msg_controllen = room.min(size_of_val(control)) as _;
    let fd = fd.as_fd().as_raw_fd();
    let flags = libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT | how;
    // SAFETY: the message points at buffers that outlive the call, with their lengths.
    let len = retry(|| unsafe { libc::syscall(libc::SYS_recvmsg, fd, &raw mut m, flags) })?;
    // SAFETY: the kernel has just filled it, and nothing else takes the descriptors out of it.
    let (fds, sender) = unsafe { ancillary(&m) };
    Ok(Packet {
        len,
        fds,
        sender,
        is_cut: m.msg_flags & (libc::MSG_CTRUNC | libc::MSG_TRUNC) != 0,
    })
}

/// Takes out what came beside a message.
///
/// # Safety
/// The kernel has filled `m`, and this is called once for it: the descriptors get their owners here.
unsafe fn ancillary(m: &libc::msghdr) -> (Vec<OwnedFd>, Option<Sender>) {
    // SAFETY: our caller's promise: the number is an open descriptor of ours that has no owner yet.
    let own = |fd: RawFd| (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
    let (mut fds, mut cred, mut pidfd) = (Vec::new(), None, None);
    // SAFETY: the control data that the kernel wrote, as long as it said.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(m) };
    while !header.is_null() {
        // SAFETY: as above.
        let (level, kind, len) = unsafe {
            let header = &*header;
            (
                header.cmsg_level,
                header.cmsg_type,
                header.cmsg_len as usize,
            )
        };
        // SAFETY: these two only compute.
        let (data, before) = unsafe { (libc::CMSG_DATA(header), libc::CMSG_LEN(0) as usize) };
        let len = len.saturating_sub(before);
        match (level, kind) {
            (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                let count = len / size_of::<RawFd>();
                let number = |i| {
                    // SAFETY: so many numbers are there.
                    unsafe {
                        data.byte_add(i * size_of::<RawFd>())
                            .cast::<RawFd>()
                            .read_unaligned()
                    }
                };
                fds.extend((0..count).filter_map(|i| own(number(i))));
            }
            (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if len >= size_of::<libc::ucred>() => {
                // SAFETY: long enough, and plain numbers.
                cred = Some(unsafe { data.cast::<libc::ucred>().read_unaligned() });
            }
            // In place of a descriptor there may be an error.
            (libc::SOL_SOCKET, SCM_PIDFD) if len >= size_of::<RawFd>() => {
                // SAFETY: long enough.
                pidfd = own(unsafe { data.cast::<RawFd>().read_unaligned() });
            }
            _ => {}
        }
        // SAFETY: as above.
        header = unsafe { libc::CMSG_NXTHDR(m, header) };
    }
    let cred = cred.map(Cred::new);
    (fds, cred.map(|cred| Sender { cred, pidfd }))
}
