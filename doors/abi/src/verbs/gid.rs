//! The GID table of `weft_ib0`: the addresses of this host.
//!
//! Programs ask for GIDs with every address handle and connection. The table is therefore read from the system once, and again when the system has reported a
//! change. If it cannot be read, for example without a free descriptor, it stays as it was.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recv, socket_with};
use weft_sys::interfaces;
use weft_verbs::cm::gid_of;

use super::object::{PerFork, lock};

/// An address of this host, as a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gid {
    pub(crate) ip: IpAddr,
    pub(crate) ifindex: u32,
}

impl Gid {
    const EMPTY: Gid = Gid {
        ip: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        ifindex: 0,
    };

    /// True if there is no address at this index.
    pub(crate) fn is_empty(self) -> bool {
        self == Gid::EMPTY
    }

    pub(crate) fn raw(self) -> [u8; 16] {
        gid_of(self.ip)
    }

    /// Order of the table: addresses that remote hosts reach first, and IPv4 before IPv6. Programs use index 0 by default.
    fn rank(self) -> u8 {
        match self.ip {
            ip if ip.is_loopback() => 3,
            IpAddr::V4(_) => 0,
            ip if is_link_local(ip) => 2,
            IpAddr::V6(_) => 1,
        }
    }
}

pub(crate) fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The GID table of this process. An address keeps its index: new ones are appended. The entry of a removed address is empty ([`Gid::is_empty`]) until the
/// address comes back.
///
/// # Errors
/// As `socket(2)`, while the addresses could not be read even once.
pub(crate) fn gids() -> Result<Vec<Gid>, Errno> {
    let shown = |(gid, there): &(Gid, bool)| if *there { *gid } else { Gid::EMPTY };
    with_table(|table| table.known.iter().map(shown).collect())
}

/// Calls `is` with every address of this host, once for each interface that has it, also those of interfaces that are down.
///
/// # Errors
/// As [`gids`].
pub(crate) fn among_addresses<T>(is: impl FnOnce(&[Gid]) -> T) -> Result<T, Errno> {
    with_table(|table| is(&table.all))
}

fn with_table<T>(read: impl FnOnce(&Table) -> T) -> Result<T, Errno> {
    static TABLE: PerFork<Mutex<Table>> = PerFork::new();
    let mut table = lock(TABLE.get());
    // Checked before the addresses are read: a change during the reading is noticed the next time.
    let changed = table.has_changed();
    table.refresh(changed, addresses)?;
    Ok(read(&table))
}

#[derive(Default)]
struct Table {
    /// Every address so far, and whether it is present.
    known: Vec<(Gid, bool)>,
    /// The addresses of all interfaces.
    all: Vec<Gid>,
    /// The system's reports of changes.
    news: Option<News>,
    /// `news` reports every change since the addresses were read.
    current: bool,
}

impl Table {
    /// True if the addresses may have changed since they were read.
    fn has_changed(&mut self) -> bool {
        if self.news.is_none() {
            self.news = News::new()
                .inspect_err(|errno| tracing::debug!(%errno, "the addresses of this host are read each time"))
                .ok();
        }
        let silent = self.news.as_ref().is_some_and(News::is_silent);
        !(self.current && silent)
    }

    fn refresh(
        &mut self,
        changed: bool,
        read: impl FnOnce() -> Result<Addresses, Errno>,
    ) -> Result<(), Errno> {
        if !changed {
            return Ok(());
        }
        self.current = false;
        match read() {
            Ok(now) => {
                update(&mut self.known, &now.gids);
                self.all = now.all;
                self.current = self.news.is_some();
                Ok(())
            }
            Err(errno) if self.known.is_empty() => Err(errno),
            Err(errno) => {
                tracing::debug!(%errno, "the addresses of this host are taken to be those of before");
                Ok(())
            }
        }
    }
}

/// Reports of addresses and interfaces that come and go, in the network namespace of the thread that made it (rtnetlink(7)).
struct News(OwnedFd);

impl News {
    fn new() -> Result<News, Errno> {
        const GROUPS: libc::c_int =
            libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        // Protocol 0 is NETLINK_ROUTE.
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        bind(&fd, &SocketAddrNetlink::new(0, GROUPS as u32))?;
        Ok(News(fd))
    }

    /// True if there was no report since the last call.
    fn is_silent(&self) -> bool {
        /// The limit of one call; the rest waits for the next one.
        const MANY: usize = 256;
        let mut silent = true;
        for _ in 0..MANY {
            // The content does not matter, nor does an overflow of the socket's buffer.
            match recv(&self.0, &mut [0; 16], RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN) => break,
                Ok(_) | Err(_) => silent = false,
            }
        }
        silent
    }
}

/// The number of values of a GID index.
const MAX_GIDS: usize = 256;

fn update(table: &mut Vec<(Gid, bool)>, now: &[Gid]) {
    for (gid, there) in table.iter_mut() {
        *there = now.contains(gid);
    }
    for gid in now {
        if table.iter().any(|(known, _)| known == gid) {
            continue;
        }
        if table.len() < MAX_GIDS {
            table.push((*gid, true));
        } else if let Some(free) = table.iter_mut().find(|(_, there)| !there) {
            *free = (*gid, true);
        }
    }
}

/// The addresses of this host.
struct Addresses {
    /// Those of the interfaces that are up, each once, in the order of the table.
    gids: Vec<Gid>,
    /// Those of all interfaces.
    all: Vec<Gid>,
}

/// # Errors
/// Those of `getifaddrs(3)`.
fn addresses() -> Result<Addresses, Errno> {
    let found = interfaces::addresses();
    let found = found.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    let (mut gids, mut all): (Vec<Gid>, Vec<Gid>) = Default::default();
    for address in found {
        let gid = Gid {
            ip: address.ip,
            ifindex: address.index(),
        };
        all.push(gid);
        if address.is_up() && gids.iter().all(|known| known.ip != gid.ip) {
            gids.push(gid);
        }
    }
    gids.sort_by_key(|gid| gid.rank());
    Ok(Addresses { gids, all })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_gids() {
        let gids = gids().unwrap();
        let local = gids.iter().position(|gid| gid.ip.is_loopback());
        let local = local.expect("every host has a loopback address");
        assert!(gids[local].ifindex > 0);
        assert!(gids[local..].iter().all(|gid| gid.ip.is_loopback()));
        for gid in &gids {
            assert_eq!(weft_verbs::cm::ip_of(gid.raw()), gid.ip);
        }
    }

    #[test]
    fn addresses_keep_their_index() {
        let gid = |last: u8| Gid {
            ip: [192, 0, 2, last].into(),
            ifindex: 2,
        };
        let mut table = Vec::new();
        update(&mut table, &[gid(1), gid(2)]);
        update(&mut table, &[gid(0), gid(2)]);
        assert_eq!(table, [(gid(1), false), (gid(2), true), (gid(0), true)]);
        update(&mut table, &[gid(1), gid(2)]);
        assert_eq!(table, [(gid(1), true), (gid(2), true), (gid(0), false)]);
        let many: Vec<Gid> = (0..=255).map(gid).collect();
        update(&mut table, &many);
        assert_eq!(table.len(), MAX_GIDS);
        update(&mut table, &[Gid::EMPTY]);
        assert_eq!(table.len(), MAX_GIDS, "a place that was free");
    }

    #[test]
    fn addresses_are_read_when_they_may_have_changed() {
        let gid = |last: u8| Gid {
            ip: [192, 0, 2, last].into(),
            ifindex: 2,
        };
        let now = |gid| Addresses {
            gids: vec![gid],
            all: vec![gid],
        };
        let mut table = Table::default();
        assert_eq!(
            table.refresh(true, || Err(Errno::MFILE)),
            Err(Errno::MFILE),
            "nothing is known yet"
        );
        assert!(table.has_changed(), "they were never read");
        assert!(table.news.is_some());
        table.refresh(true, || Ok(now(gid(1)))).unwrap();
        assert!(table.current);
        table
            .refresh(false, || unreachable!("nothing has changed"))
            .unwrap();
        table.refresh(true, || Err(Errno::MFILE)).unwrap();
        assert_eq!(table.known, [(gid(1), true)], "those of before");
        assert!(table.has_changed(), "they could not be read");
        table.refresh(true, || Ok(now(gid(2)))).unwrap();
        assert_eq!(table.known, [(gid(1), false), (gid(2), true)]);
    }
}
