//! One direction of the link: packets out of one TUN device, and into the other when they are due.

use crate::Traffic;
use crate::shape::Shaper;
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use weft_sys::tun::HEADER;
use weft_sys::{EventFd, Interest, poll_fds};

/// The longest IP packet, with its header.
const LONGEST: usize = HEADER + 65_535;
/// Packets read before those that are due are looked after.
const BATCH: usize = 32;
/// Bytes on the way, at most: what a link without a rate can be made to hold. Packets beyond are dropped.
const MOST_ON_THE_WAY: usize = 1 << 30;

/// Counts of one direction.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) packets: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) dropped: AtomicU64,
}

impl Counters {
    pub(crate) fn traffic(&self) -> Traffic {
        Traffic {
            packets: self.packets.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            dropped: self.dropped.load(Ordering::Relaxed),
        }
    }
}

/// Where packets go.
pub(crate) enum Way {
    Link(Arc<OwnedFd>),
    /// By their IPv4 address; others to no device.
    Switch(Vec<(Ipv4Addr, Arc<OwnedFd>)>),
}

impl Way {
    fn of(&self, packet: &[u8]) -> Option<&OwnedFd> {
        match self {
            Way::Link(to) => Some(to),
            Way::Switch(table) => {
                let header = packet.get(HEADER..HEADER + 20)?;
                let address: [u8; 4] = header[16..].try_into().ok()?;
                let mut table = table.iter();
                let found = table.find(|(host, _)| host.octets() == address)?;
                (header[0] >> 4 == 4).then_some(&*found.1)
            }
        }
    }
}

pub(crate) struct Direction {
    pub(crate) from: Arc<OwnedFd>,
    pub(crate) to: Way,
    pub(crate) stop: Arc<EventFd>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) shaper: Shaper,
}

impl Direction {
    /// Forwards until `stop` is signalled.
    pub(crate) fn run(mut self) {
        let epoch = Instant::now();
        let mut scratch = vec![0; LONGEST];
        let mut way: VecDeque<(Duration, Box<[u8]>)> = VecDeque::new();
        let mut on_the_way = 0;
        loop {
            let wait = way
                .front()
                .map(|(due, _)| due.saturating_sub(epoch.elapsed()));
            let fds = [
                (self.stop.as_fd(), Interest::READ),
                (self.from.as_fd(), Interest::READ),
            ];
            let ready = match poll_fds(&fds, wait) {
                Ok(ready) => ready,
                Err(error) if error.kind() == ErrorKind::Interrupted => 0,
                // Without the stop signal the thread could never be joined.
                Err(_) => return,
            };
            if ready & 1 != 0 {
                return;
            }
            for _ in 0..BATCH {
                let len = match rustix::io::read(&*self.from, &mut scratch[..]) {
                    Ok(len) => len,
                    Err(Errno::INTR) => continue,
                    Err(_) => break,
                };
                let packet = len.saturating_sub(HEADER);
                let due = self.shaper.admit(epoch.elapsed(), packet);
                match due.filter(|_| on_the_way + len <= MOST_ON_THE_WAY) {
                    Some(due) => {
                        on_the_way += len;
                        way.push_back((due, scratch[..len].into()));
                    }
                    None => self.count_drop(),
                }
            }
            let now = epoch.elapsed();
            while let Some((_, packet)) = way.pop_front_if(|(due, _)| *due <= now) {
                on_the_way -= packet.len();
                // Neighbours and routers that a host looks for by IPv6 are not there.
                let Some(to) = self.to.of(&packet) else {
                    continue;
                };
                match rustix::io::write(to, &packet) {
                    Ok(_) => {
                        let bytes = packet.len().saturating_sub(HEADER) as u64;
                        self.counters.packets.fetch_add(1, Ordering::Relaxed);
                        self.counters.bytes.fetch_add(bytes, Ordering::Relaxed);
                    }
                    Err(_) => self.count_drop(),
                }
            }
        }
    }

    fn count_drop(&self) {
        self.counters.dropped.fetch_add(1, Ordering::Relaxed);
    }
}
