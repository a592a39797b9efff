//! TUN devices: network interfaces whose packets a program reads and writes.

use rustix::fs::{Mode, OFlags, open};
use rustix::ioctl::{IntegerSetter, Updater, ioctl};
use std::io;
use std::os::fd::OwnedFd;

/// Length of the header before each packet: `struct virtio_net_hdr`. It describes the work that the sender's kernel has left undone
/// (checksum, segmentation), and tells the receiver's kernel the same.
pub const HEADER: usize = 10;

/// `struct ifreq` of which only name and flags are used.
#[repr(C)]
struct Request {
    name: [u8; 16],
    flags: u16,
    rest: [u8; 22],
}

/// Creates the interface `name` (1 to 15 bytes) in the calling thread's network namespace; it is removed when the descriptor is closed. Each read
/// returns one packet that the namespace sends, each write delivers one to it, both with a [`HEADER`] and up to 64 KiB long, because TCP segments
/// are not divided. The descriptor is non-blocking.
///
/// # Errors
/// `NotFound` without /dev/net/tun, `PermissionDenied` without `CAP_NET_ADMIN` in the namespace, `ResourceBusy` when the
/// name is taken, `InvalidInput` for a name that is too long or empty.
pub fn open_tun(name: &str) -> io::Result<OwnedFd> {
    let mut request = Request {
        name: [0; 16],
        flags: (libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as u16,
        rest: [0; 22],
    };
    let room = request.name.len() - 1;
    if name.is_empty() || name.len() > room {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = open("/dev/net/tun", flags, Mode::empty())?;
    let offloads = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6;
    // SAFETY: TUNSETIFF reads a `struct ifreq`, 40 bytes that begin as `Request` does, and writes it back with the name filled in.
    // TUNSETOFFLOAD takes its flags in the argument itself and touches no memory.
    unsafe {
        ioctl(
            &fd,
            Updater::<{ libc::TUNSETIFF as _ }, Request>::new(&mut request),
        )?;
        ioctl(
            &fd,
            IntegerSetter::<{ libc::TUNSETOFFLOAD as _ }>::new_usize(offloads as usize),
        )?;
    }
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_is_an_ifreq() {
        assert_eq!(size_of::<Request>(), size_of::<libc::ifreq>());
        assert_eq!(std::mem::offset_of!(Request, flags), libc::IFNAMSIZ);
    }

    #[test]
    fn names_that_cannot_be() {
        for name in ["", "sixteen-bytes-xx"] {
            let error = open_tun(name).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name:?}");
        }
    }
}
