//! One question to the kernel and its answer, by a socket of `netlink(7)`.

use std::io;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, recvfrom, sendto,
    socket_with,
};

/// `struct nlmsghdr`.
pub(crate) const HEADER: usize = 16;
pub(crate) const NLM_F_REQUEST: u16 = 1;
pub(crate) const NLMSG_ERROR: u16 = 2;

/// Sends a request to the kernel, and returns its answer, which is there as soon as the request is sent. `None`: the protocol is `NETLINK_ROUTE`.
pub(crate) fn ask(protocol: Option<Protocol>, request: &[u8]) -> io::Result<Vec<u8>> {
    let (family, kind) = (AddressFamily::NETLINK, SocketType::RAW);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, protocol)?;
    let kernel = SocketAddrNetlink::new(0, 0);
    sendto(&socket, request, SendFlags::empty(), &kernel)?;
    let mut bytes = [0; 4096];
    let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
    let (_, len, from) = recvfrom(&socket, &mut bytes, flags)?;
    let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
    let bytes = bytes.get(..len).filter(|_| from == Some(kernel));
    Ok(bytes.ok_or(io::ErrorKind::InvalidData)?.to_vec())
}

/// Checks that these bytes are one whole answer of this kind to the request with this number.
///
/// # Errors
/// Those that the kernel answers; `InvalidData` for any other answer.
pub(crate) fn check(bytes: &[u8], kind: u16, sequence: u32) -> io::Result<()> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let word = |at: usize| {
        let field = bytes.get(at..at + 4)?;
        Some(u32::from_ne_bytes(field.try_into().ok()?))
    };
    let got = bytes.get(4..6).ok_or_else(invalid)?;
    if word(0) != u32::try_from(bytes.len()).ok() || word(8) != Some(sequence) {
        return Err(invalid());
    }
    if got == NLMSG_ERROR.to_ne_bytes() {
        let errno = word(HEADER).and_then(|errno| errno.cast_signed().checked_neg());
        let errno = errno.filter(|errno| *errno > 0).ok_or_else(invalid)?;
        return Err(io::Error::from_raw_os_error(errno));
    }
    if got == kind.to_ne_bytes() {
        Ok(())
    } else {
        Err(invalid())
    }
}
