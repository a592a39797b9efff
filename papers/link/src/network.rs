//! Several hosts on a switch: a line of one shape from each host to it. The switch itself, and its lines to the hosts, take no time.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::thread::JoinHandle;

use weft_sys::EventFd;

use crate::forward::{Counters, Direction, Way};
use crate::shape::{Shape, Shaper};
use crate::{LinkError, Namespace, Traffic, system};

/// The most hosts of a network.
pub const MOST_HOSTS: u8 = 16;

/// The address of a host; they are counted from 0.
#[must_use]
pub fn host_address(host: u8) -> Ipv4Addr {
    Ipv4Addr::new(198, 18, 1, host.saturating_add(1))
}

/// Hosts on a switch. When it is dropped packets stop; the namespaces go with their last process.
#[derive(Debug)]
pub struct Network {
    hosts: Vec<Namespace>,
    counters: Vec<Arc<Counters>>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Network {
    /// Makes the namespaces and starts forwarding. `shape` is that of a line from a host to the switch.
    ///
    /// # Errors
    /// Without privilege, without TUN devices, without `ip`.
    pub fn new(shape: Shape, mtu: u32, hosts: u8) -> Result<Self, LinkError> {
        let hosts = 0..hosts.min(MOST_HOSTS);
        let ends = hosts.clone().map(|host| {
            let address = format!("{}/24", host_address(host));
            let (namespace, device) = Namespace::create(&[&address], mtu)?;
            Ok((namespace, Arc::new(device)))
        });
        let (namespaces, devices): (Vec<_>, Vec<_>) = ends
            .collect::<Result<Vec<_>, LinkError>>()?
            .into_iter()
            .unzip();
        let table: Vec<_> = hosts.map(host_address).zip(devices.clone()).collect();
        let mut network = Self {
            hosts: namespaces,
            counters: Vec::new(),
            stop: Arc::new(EventFd::new().map_err(system("make an event descriptor"))?),
            threads: Vec::new(),
        };
        for (index, from) in devices.into_iter().enumerate() {
            let counters = Arc::<Counters>::default();
            network.counters.push(Arc::clone(&counters));
            let direction = Direction {
                from,
                to: Way::Switch(table.clone()),
                stop: Arc::clone(&network.stop),
                counters,
                shaper: Shaper::new(shape, index as u64),
            };
            let thread = std::thread::Builder::new().name(format!("weft-link-{index}"));
            let thread = thread.spawn(|| direction.run());
            network
                .threads
                .push(thread.map_err(system("start a thread"))?);
        }
        Ok(network)
    }

    /// The hosts, whose addresses are those of [`host_address`].
    #[must_use]
    pub fn hosts(&self) -> &[Namespace] {
        &self.hosts
    }

    /// The forwarded traffic from each host.
    #[must_use]
    pub fn traffic(&self) -> Vec<Traffic> {
        self.counters
            .iter()
            .map(|counters| counters.traffic())
            .collect()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.stop.signal();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
