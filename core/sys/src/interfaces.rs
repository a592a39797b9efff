//! Addresses of the network interfaces of the thread's network namespace.

use std::ffi::{CStr, CString};
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// An IP address of an interface.
#[derive(Clone, Debug)]
pub struct InterfaceAddress {
    /// The interface's name.
    pub name: CString,
    /// The address.
    pub ip: IpAddr,
    flags: u32,
}

impl InterfaceAddress {
    /// Whether the interface is up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.flags & libc::IFF_UP as u32 != 0
    }

    /// Whether the interface is the loopback interface.
    #[must_use]
    pub fn is_loopback(&self) -> bool {
        self.flags & libc::IFF_LOOPBACK as u32 != 0
    }

    /// The longest IP packet of the interface, in bytes; `None` if it has gone since.
    #[must_use]
    pub fn mtu(&self) -> Option<u32> {
        // SAFETY: plain numbers, and a union of such.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        let (name, room) = (self.name.as_bytes_with_nul(), &mut request.ifr_name);
        for (to, from) in room.get_mut(..name.len())?.iter_mut().zip(name) {
            *to = from.cast_signed();
        }
        let (family, kind) = (AddressFamily::INET, SocketType::DGRAM);
        let fd = socket_with(family, kind, SocketFlags::CLOEXEC, None).ok()?;
        let (fd, number) = (fd.as_raw_fd(), libc::SIOCGIFMTU);
        // SAFETY: a name that ends with a NUL, and a place for a number.
        let rc = unsafe { libc::syscall(libc::SYS_ioctl, fd, number, &raw mut request) };
        // SAFETY: the kernel has written this member.
        let mtu = unsafe { request.ifr_ifru.ifru_mtu };
        (rc == 0).then(|| u32::try_from(mtu).ok()).flatten()
    }

    /// The interface's number; 0 if it has gone since.
    #[must_use]
    pub fn index(&self) -> u32 {
        // SAFETY: a C string.
        unsafe { libc::if_nametoindex(self.name.as_ptr()) }
    }
}

/// The IP addresses of all interfaces, in the kernel's order. An address that two interfaces have is there twice.
///
/// # Errors
/// Those of getifaddrs(3).
pub fn addresses() -> io::Result<Vec<InterfaceAddress>> {
    let mut list = null_mut();
    // SAFETY: a place for one pointer.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut all = Vec::new();
    let mut next = list;
    // SAFETY: null, or an entry of the list, which lives until it is freed below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: null, or an address as long as its family says.
        let Some(ip) = (unsafe { ip(entry.ifa_addr) }) else {
            continue;
        };
        // SAFETY: each entry has a name, which ends with a NUL.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_owned();
        let flags = entry.ifa_flags;
        all.push(InterfaceAddress { name, ip, flags });
    }
    // SAFETY: the list of above, which nothing refers to any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(all)
}

/// # Safety
/// Null, or an address as long as its family says.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: every address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an address of this family.
            let v4 = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(v4.sin_addr.s_addr.to_ne_bytes().into())
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family.
            let v6 = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(v6.sin6_addr.s6_addr.into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_there() {
        let all = addresses().unwrap();
        let lo = all.iter().find(|address| address.is_loopback()).unwrap();
        assert!(lo.is_up() && lo.ip.is_loopback() && lo.index() == 1);
        assert_eq!(lo.name.as_c_str(), c"lo");
    }
}
