//! Network interfaces and their addresses.

use std::ffi::CStr;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ptr;

/// The name of the interface with this number.
pub(crate) fn name_of(index: u32) -> Option<String> {
    let mut name = [0; libc::IF_NAMESIZE];
    // SAFETY: a place for a name, which the call ends with a NUL.
    unsafe {
        if index == 0 || libc::if_indextoname(index, name.as_mut_ptr()).is_null() {
            return None;
        }
        Some(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
    }
}

/// The interface with this hardware address.
pub(crate) fn with_hardware_address(address: [u8; 6]) -> Option<String> {
    if address == [0; 6] {
        return None;
    }
    let wanted = address.map(|byte| format!("{byte:02x}")).join(":");
    let names = fs::read_dir("/sys/class/net").ok()?;
    names
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .find(|name| {
            let file = fs::read_to_string(format!("/sys/class/net/{name}/address"));
            file.is_ok_and(|text| text.trim() == wanted)
        })
}

/// The addresses of an interface, of all where none is named: IPv4 before IPv6; none of loopback, and no link-local ones.
pub fn addresses_of(interface: Option<&str>) -> Vec<IpAddr> {
    let mut list = ptr::null_mut();
    // SAFETY: a place for the list.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut at = list;
    while !at.is_null() {
        // SAFETY: an entry of the list, whose strings and addresses live as long as it.
        let entry = unsafe { *at };
        // SAFETY: as above.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        // SAFETY: as above.
        let address = unsafe { ip(entry.ifa_addr) };
        if interface.is_none_or(|wanted| name.to_bytes() == wanted.as_bytes()) {
            found.extend(address);
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list of above, once.
    unsafe { libc::freeifaddrs(list) };
    let local = |ip: &IpAddr| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    found.retain(|ip| !ip.is_loopback() && !local(ip));
    found.sort_by_key(IpAddr::is_ipv6);
    found
}

/// # Safety
/// NULL, or an address of the length of its family.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)).into())
            }
            libc::AF_INET6 => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_a_name_and_no_address_for_peers() {
        assert_eq!(name_of(1).as_deref(), Some("lo"));
        assert_eq!(name_of(0), None);
        assert_eq!(addresses_of(Some("lo")), [] as [IpAddr; 0]);
        assert_eq!(with_hardware_address([0; 6]), None);
    }
}
