//! The addresses of groups: IP multicast and IPv4 broadcast (docs/spec/dgram.md).

use std::net::{IpAddr, Ipv4Addr};

use weft_sys::udp::is_broadcast;
use weft_verbs::cm::ip_of;

use super::roce;
use super::wire;

/// The upper half of a group's UDP port; the lower is the last byte of its GID.
const PORT: u16 = 0x5700;
/// The prefix of an IPv4 group in RoCE's first version. The second version maps the group into IPv6.
const ROCE_V1: [u8; 12] = [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// The group behind a GID, if it is one.
pub(crate) fn group_of(gid: [u8; 16]) -> Option<IpAddr> {
    if let Some(last) = gid.strip_prefix(&ROCE_V1)
        && let Ok(octets) = <[u8; 4]>::try_from(last)
    {
        let group = Ipv4Addr::from(octets);
        return group.is_multicast().then_some(group.into());
    }
    Some(ip_of(gid)).filter(|ip| ip.is_multicast() || is_broadcast(*ip).unwrap_or(false))
}

pub(crate) fn port_of(group: IpAddr) -> u16 {
    if wire::has_roce() {
        return roce::PORT;
    }
    let last = match group {
        IpAddr::V4(group) => group.octets()[3],
        IpAddr::V6(group) => group.octets()[15],
    };
    PORT | u16::from(last)
}

#[cfg(test)]
mod tests {
    use weft_verbs::cm::gid_of;

    use super::*;

    #[test]
    fn groups_are_told_from_addresses() {
        let gid = |text: &str| gid_of(text.parse().unwrap());
        let group: IpAddr = "239.1.2.3".parse().unwrap();
        assert_eq!(group_of(gid("239.1.2.3")), Some(group));
        assert_eq!(group_of(gid("ff0e::ffff:239.1.2.3")), Some(group));
        assert_eq!(group_of(gid("ff0e::ffff:10.1.2.3")), None);
        let group6: IpAddr = "ff0e::1:239.1.2.3".parse().unwrap();
        assert_eq!(group_of(gid("ff0e::1:239.1.2.3")), Some(group6));
        for none in ["10.1.2.3", "::", "fe80::1", "127.0.0.1", "0.0.0.0"] {
            assert_eq!(group_of(gid(none)), None, "{none}");
        }
        // The loopback interface has a broadcast address, too.
        for broadcast in ["255.255.255.255", "127.255.255.255"] {
            assert_eq!(group_of(gid(broadcast)), broadcast.parse().ok());
        }
        assert_eq!((port_of(group), port_of(group6)), (0x5703, 0x5703));
    }
}
