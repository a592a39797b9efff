//! The network interfaces of the thread's network namespace: their addresses, and which leads to a host (`rtnetlink(7)`).

use std::ffi::{CStr, CString};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::str::FromStr;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::netlink::{self, HEADER, NLM_F_REQUEST};

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

/// An address, or a network: an address and the number of its bits that all addresses of the network share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    ip: IpAddr,
    bits: u8,
}

impl Network {
    /// The only address, if it is not a network.
    #[must_use]
    pub fn single(&self) -> Option<IpAddr> {
        (self.bits == width(self.ip)).then_some(self.ip)
    }

    /// Whether the address is in it.
    #[must_use]
    pub fn has(&self, ip: IpAddr) -> bool {
        let bits = |ip: IpAddr| match ip {
            IpAddr::V4(ip) => u128::from(u32::from(ip)) << 96,
            IpAddr::V6(ip) => u128::from(ip),
        };
        let rest = u128::BITS - u32::from(self.bits);
        let differ = bits(self.ip) ^ bits(ip);
        self.ip.is_ipv4() == ip.is_ipv4() && differ.checked_shr(rest).unwrap_or(0) == 0
    }
}

/// Bits of an address.
fn width(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

/// No network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoNetwork;

impl FromStr for Network {
    type Err = NoNetwork;

    fn from_str(text: &str) -> Result<Network, NoNetwork> {
        let (ip, bits) = match text.split_once('/') {
            Some((ip, bits)) => (ip, Some(bits.parse().map_err(|_| NoNetwork)?)),
            None => (text, None),
        };
        let ip = ip.parse().map_err(|_| NoNetwork)?;
        let bits = bits.unwrap_or(width(ip));
        let network = Network { ip, bits };
        (bits <= width(ip)).then_some(network).ok_or(NoNetwork)
    }
}

/// The address by which other hosts reach this one: the first of an interface that is up, IPv4 before IPv6, neither loopback nor link-local; with a network, the
/// first in it of any kind. `None`: this host has none.
#[must_use]
pub fn far_address(within: Option<Network>) -> Option<IpAddr> {
    if let Some(ip) = within.and_then(|network| network.single()) {
        return Some(ip);
    }
    let link_local = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => Ipv6Addr::is_unicast_link_local(&ip),
    };
    let fits = |address: &InterfaceAddress| match within {
        Some(network) => network.has(address.ip),
        None => !address.is_loopback() && !link_local(address.ip),
    };
    let all = addresses().unwrap_or_default().into_iter();
    let found = all.filter(|address| address.is_up() && fits(address));
    // The first one of the preferred family.
    found.map(|address| address.ip).min_by_key(IpAddr::is_ipv6)
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

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTA_DST: u16 = 1;
const RTA_SRC: u16 = 2;
const RTA_OIF: u16 = 4;
/// Behind `struct nlmsghdr` and `struct rtmsg`.
const BODY: usize = HEADER + 12;

/// The index of the interface by which datagrams from `own`, an address of ours, go to `peer`.
///
/// # Errors
/// The kernel's where there is no route; `InvalidInput` for addresses of two families; `InvalidData` for an invalid answer.
pub fn index_to(own: IpAddr, peer: IpAddr) -> io::Result<u32> {
    let (own, peer) = (own.to_canonical(), peer.to_canonical());
    interface(&netlink::ask(None, &question(own, peer)?)?)
}

fn question(own: IpAddr, peer: IpAddr) -> io::Result<Vec<u8>> {
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    if own.is_ipv4() != peer.is_ipv4() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let family = if own.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let mut out = vec![0; BODY];
    out[4..6].copy_from_slice(&RTM_GETROUTE.to_ne_bytes());
    out[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    out[HEADER] = family.as_raw() as u8;
    for (kind, ip) in [(RTA_DST, octets(peer)), (RTA_SRC, octets(own))] {
        out[HEADER + kind as usize] = 8 * ip.len() as u8;
        out.extend_from_slice(&(4 + ip.len() as u16).to_ne_bytes());
        out.extend_from_slice(&kind.to_ne_bytes());
        out.extend_from_slice(&ip);
    }
    let len = out.len() as u32;
    out[..4].copy_from_slice(&len.to_ne_bytes());
    Ok(out)
}

/// The outgoing interface that an answer names.
fn interface(answer: &[u8]) -> io::Result<u32> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let half = |at: usize| {
        let field = answer.get(at..at + 2)?;
        Some(u16::from_ne_bytes(field.try_into().ok()?))
    };
    let word = |at: usize| {
        let field = answer.get(at..at + 4)?;
        Some(u32::from_ne_bytes(field.try_into().ok()?))
    };
    netlink::check(answer, RTM_NEWROUTE, 0)?;
    let mut at = BODY;
    while let (Some(len @ 4..), Some(kind)) = (half(at), half(at + 2)) {
        if kind == RTA_OIF && len == 8 {
            return word(at + 4).ok_or_else(invalid);
        }
        at += usize::from(len).next_multiple_of(4);
    }
    Err(invalid())
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
    use crate::netlink::NLMSG_ERROR;

    #[test]
    fn the_loopback_interface_is_there() {
        let all = addresses().unwrap();
        let lo = all.iter().find(|address| address.is_loopback()).unwrap();
        assert!(lo.is_up() && lo.ip.is_loopback() && lo.index() == 1);
        assert_eq!(lo.name.as_c_str(), c"lo");
    }

    #[test]
    fn the_loopback_interface_leads_to_ourselves() {
        let index = |own: &str, peer: &str| index_to(own.parse().unwrap(), peer.parse().unwrap());
        assert_eq!(index("127.0.0.1", "127.0.0.2").unwrap(), 1);
        assert_eq!(index("::ffff:127.0.0.1", "127.0.0.2").unwrap(), 1);
        if std::net::UdpSocket::bind("[::1]:0").is_ok() {
            assert_eq!(index("::1", "::1").unwrap(), 1);
            assert!(index("::1", "127.0.0.1").is_err());
        }
        // Not an address of this host.
        assert!(index("240.0.0.1", "127.0.0.1").is_err());
    }

    #[test]
    fn only_whole_answers_count() {
        let mut good = vec![0; BODY];
        good[4] = RTM_NEWROUTE as u8;
        // An attribute of five bytes, and the one that counts.
        good.extend([5, 0, 9, 0, 1, 0, 0, 0]);
        good.extend([8, 0, RTA_OIF as u8, 0, 7, 0, 0, 0]);
        good[0] = good.len() as u8;
        assert_eq!(interface(&good).unwrap(), 7);
        for len in 0..good.len() {
            assert!(interface(&good[..len]).is_err(), "{len}");
            let mut short = good[..len].to_vec();
            if let Some(first) = short.first_mut() {
                *first = len as u8;
            }
            assert!(interface(&short).is_err(), "{len}");
        }
        good[4] = NLMSG_ERROR as u8;
        assert!(interface(&good).is_err());
        good[HEADER..][..4].copy_from_slice(&(-libc::ENETUNREACH).to_ne_bytes());
        let error = interface(&good).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENETUNREACH));
    }

    #[test]
    fn a_network_has_the_addresses_with_its_first_bits() {
        let has = |network: &str, ip: &str| {
            let network: Network = network.parse().unwrap();
            network.has(ip.parse().unwrap())
        };
        assert!(has("10.1.2.3/8", "10.9.9.9") && !has("10.0.0.0/8", "11.0.0.0"));
        assert!(has("0.0.0.0/0", "255.1.1.1") && !has("0.0.0.0/0", "::1"));
        assert!(has("10.0.0.1", "10.0.0.1") && !has("10.0.0.1/32", "10.0.0.0"));
        assert!(has("fd00:7::/32", "fd00:7:1::1") && !has("fd00:7::/32", "fd00:8::1"));
        assert!(has("::/0", "fd00::1") && !has("::/0", "10.0.0.1"));
        assert!(has("fd00::1/128", "fd00::1") && !has("fd00::1/128", "fd00::2"));
        for bad in [
            "",
            "/",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "10/8",
            "10.0.0.0/-1",
            "a/8",
        ] {
            assert_eq!(bad.parse::<Network>(), Err(NoNetwork), "{bad}");
        }
        let single = |text: &str| text.parse::<Network>().unwrap().single();
        assert!(single("10.0.0.1").is_some() && single("10.0.0.1/31").is_none());
        let lo = "127.0.0.0/8".parse().unwrap();
        assert_eq!(far_address(Some(lo)), Some([127, 0, 0, 1].into()));
        let reserved = "240.0.0.0/4".parse().unwrap();
        assert_eq!(far_address(Some(reserved)), None);
        assert!(far_address(None).is_none_or(|ip| !ip.is_loopback()));
    }
}
