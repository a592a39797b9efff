//! The device, and which one is taken.

use std::convert::Infallible;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use weft_nic::cm::{Listener, Outgoing};

use super::cq::{CompChannel, Cq};
use super::pd::Pd;
use super::qp::Limits;
use super::{Either, TWO_DEVICES, convert};
use crate::{DeviceAttr, Error};

/// How long the route to a peer may take to find.
const ROUTE: Duration = Duration::from_secs(5);

/// Which device a program wants: `soft`, `auto` or a device's name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The soft RNIC.
    #[default]
    Soft,
    /// The RNIC that the route to the peer goes through, and without one the soft RNIC.
    Auto,
    /// The RNIC with this name.
    Named(String),
}

impl FromStr for Choice {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            "" | "soft" => Self::Soft,
            "auto" => Self::Auto,
            name => Self::Named(name.to_owned()),
        })
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Soft => "soft",
            Self::Auto => "auto",
            Self::Named(name) => name,
        })
    }
}

impl Choice {
    /// What `WEFT_DEVICE` says.
    pub fn from_env() -> Self {
        let text = std::env::var("WEFT_DEVICE").unwrap_or_default();
        text.parse().unwrap_or_default()
    }

    /// The RNIC for connections to this address; `None`: the soft RNIC.
    ///
    /// # Errors
    /// The RNIC that is named does not exist, cannot be used, or has no way to the address.
    pub fn rnic_to(&self, peer: SocketAddr) -> Result<Option<Device>, Error> {
        match self {
            Self::Soft => Ok(None),
            Self::Auto if peer.ip().to_canonical().is_loopback() => Ok(None),
            Self::Auto => Ok(unless_none(
                Outgoing::resolve(None, peer, ROUTE)
                    .and_then(|outgoing| Rnic::of(&outgoing.context()?, None)),
            )),
            Self::Named(name) => {
                let same_family = |ip: &IpAddr| ip.is_ipv4() == peer.is_ipv4();
                Rnic::named(name, same_family, |local| {
                    let outgoing = Outgoing::resolve(local, peer, ROUTE)?;
                    Rnic::of(&outgoing.context()?, local)
                })
            }
        }
    }

    /// The RNIC to listen with on this address; `None`: the soft RNIC. `auto` takes the RNIC whose address it is.
    ///
    /// # Errors
    /// The RNIC that is named does not exist, cannot be used, or does not have the address.
    pub fn rnic_at(&self, local: SocketAddr) -> Result<Option<Device>, Error> {
        let at = |ip: IpAddr| {
            let listener = Listener::bind((ip, 0).into())?;
            Rnic::of(&listener.context()?, None)
        };
        let ip = local.ip();
        match self {
            Self::Soft => Ok(None),
            Self::Auto if ip.to_canonical().is_loopback() || ip.is_unspecified() => Ok(None),
            Self::Auto => Ok(unless_none(at(ip))),
            Self::Named(name) if ip.is_unspecified() => {
                let same_family = |other: &IpAddr| other.is_ipv4() == ip.is_ipv4();
                Rnic::named(name, same_family, |local| match local {
                    Some(ip) => at(ip).map(|rnic| Rnic {
                        local: Some(ip),
                        ..rnic
                    }),
                    None => at(Ipv4Addr::LOCALHOST.into()),
                })
            }
            Self::Named(name) => Rnic::named(name, |_| false, |_| at(ip)),
        }
    }
}

/// With `auto` an RNIC that cannot be used is as none.
fn unless_none(found: Result<Rnic, weft_nic::Error>) -> Option<Device> {
    match found {
        Ok(rnic) => Some(Device(Either::Rnic(rnic))),
        Err(error) => {
            tracing::info!(%error, "no RNIC is used");
            None
        }
    }
}

/// An RNIC of the machine.
#[derive(Clone)]
pub(super) struct Rnic {
    pub(super) context: weft_nic::Context,
    /// The address that connections go out from.
    pub(super) local: Option<IpAddr>,
    pub(super) limits: Limits,
    pub(super) reads: u8,
    attr: DeviceAttr,
}

impl Rnic {
    fn of(context: &weft_nic::Context, local: Option<IpAddr>) -> Result<Self, weft_nic::Error> {
        let device = weft_nic::devices()?;
        let device = device.iter().find(|device| device.name() == context.name());
        let info = device.map(weft_nic::Device::info).transpose()?;
        let info = info.as_ref();
        let defaults = crate::Limits::default();
        let limits = crate::Limits {
            max_wr: info.map_or(defaults.max_wr, |info| info.max_qp_wr),
            max_sge: info.map_or(1, |info| info.max_sge),
            max_rd_atomic: info.map_or(1, |info| info.max_rd_atomic.into()),
            ..defaults
        };
        let name = context.name().to_owned();
        context.on_port(move |change| {
            let state = if change.is_active { "up" } else { "down" };
            tracing::warn!("port {} of {name} is {state}", change.port);
        });
        let is_iwarp = info.is_some_and(|info| info.transport == weft_nic::Transport::Iwarp);
        Ok(Self {
            context: context.clone(),
            local,
            limits: Limits {
                device: context.name().to_owned(),
                max_wr: limits.max_wr,
                max_sge: limits.max_sge,
            },
            reads: limits.max_rd_atomic.clamp(1, 16) as u8,
            attr: DeviceAttr {
                limits,
                transport: "rnic",
                atomics: info.is_some_and(|info| info.atomics) && !is_iwarp,
                immediate: !is_iwarp,
                srq: info.is_some_and(|info| info.max_srq > 0),
                windows: false,
            },
        })
    }

    /// The first that `find` finds and that has this name: without an address, then with each of the device's.
    fn named(
        name: &str,
        is_good: impl Fn(&IpAddr) -> bool,
        find: impl Fn(Option<IpAddr>) -> Result<Self, weft_nic::Error>,
    ) -> Result<Option<Device>, Error> {
        let devices = weft_nic::devices().map_err(|e| convert::error(&e))?;
        let Some(device) = devices.iter().find(|device| device.name() == name) else {
            let mut names = vec!["soft"];
            names.extend(devices.iter().map(weft_nic::Device::name));
            return Err(Error::Setting(format!(
                "there is no RDMA device {name}; there are: {}; `weft doctor` says why one is missing",
                names.join(" ")
            )));
        };
        let mut addresses = vec![None];
        let info = device.info().map_err(|e| convert::error(&e))?;
        for netdev in info.ports.iter().flat_map(weft_nic::Port::netdevs) {
            let found = weft_nic::addresses_of(Some(netdev));
            addresses.extend(found.into_iter().filter(&is_good).map(Some));
        }
        let mut why = None;
        for address in addresses {
            match find(address) {
                Ok(rnic) if rnic.context.name() == name => {
                    return Ok(Some(Device(Either::Rnic(rnic))));
                }
                Ok(rnic) => {
                    let other = rnic.context.name().to_owned();
                    why.get_or_insert(Error::Setting(format!(
                        "rdma_cm finds the device {other} by that address, and not {name}: two devices share a network interface"
                    )));
                }
                Err(error) => why = Some(convert::error(&error)),
            }
        }
        Err(why.unwrap_or(Error::Invalid("an RNIC without an address")))
    }
}

/// As [`crate::Device`]. Clones are handles of the same device.
#[derive(Clone)]
pub struct Device(pub(super) Either<crate::Device, Rnic>);

impl From<crate::Device> for Device {
    fn from(device: crate::Device) -> Self {
        Self(Either::Soft(device))
    }
}

impl Device {
    /// The soft RNIC.
    pub fn soft(&self) -> Option<&crate::Device> {
        self.0.soft()
    }

    /// The name of the RNIC; `None`: the soft RNIC.
    pub fn rnic(&self) -> Option<&str> {
        match &self.0 {
            Either::Soft(_) => None,
            Either::Rnic(rnic) => Some(rnic.context.name()),
        }
    }

    /// The RNIC's own address, if it was found by one.
    pub fn address(&self) -> Option<IpAddr> {
        match &self.0 {
            Either::Soft(_) => None,
            Either::Rnic(rnic) => rnic.local,
        }
    }

    /// Whether it was removed, or has failed: then every call on it fails.
    pub fn is_gone(&self) -> bool {
        match &self.0 {
            Either::Soft(_) => false,
            Either::Rnic(rnic) => rnic.context.is_gone(),
        }
    }

    /// What it has.
    pub fn attr(&self) -> DeviceAttr {
        match &self.0 {
            Either::Soft(device) => device.attr(),
            Either::Rnic(rnic) => rnic.attr,
        }
    }

    /// As [`crate::Device::alloc_pd`].
    ///
    /// # Errors
    /// On an RNIC as `ibv_alloc_pd`.
    pub fn alloc_pd(&self) -> Result<Pd, Error> {
        Ok(Pd(match &self.0 {
            Either::Soft(device) => Either::Soft(device.alloc_pd()?),
            Either::Rnic(rnic) => {
                Either::Rnic(rnic.context.alloc_pd().map_err(|e| convert::error(&e))?)
            }
        }))
    }

    /// As [`crate::Device::create_cq`] without a channel.
    ///
    /// # Errors
    /// As there; on an RNIC as `ibv_create_comp_channel` and `ibv_create_cq`.
    pub fn create_cq(&self, depth: u32) -> Result<Cq, Error> {
        Ok(Cq(match &self.0 {
            Either::Soft(device) => Either::Soft(device.create_cq(depth, None)?),
            Either::Rnic(rnic) => {
                let channel = rnic.context.create_channel();
                let cq = channel.and_then(|channel| rnic.context.create_cq(depth, Some(&channel)));
                Either::Rnic(cq.map_err(|e| convert::error(&e))?)
            }
        }))
    }

    /// As [`crate::Device::create_cq`], with a channel.
    ///
    /// # Errors
    /// As [`Device::create_cq`]; a channel of another device.
    pub fn create_cq_on(&self, depth: u32, channel: &CompChannel) -> Result<Cq, Error> {
        Ok(Cq(match (&self.0, &channel.0) {
            (Either::Soft(device), Either::Soft(channel)) => {
                Either::Soft(device.create_cq(depth, Some(channel))?)
            }
            (Either::Rnic(rnic), Either::Rnic(channel)) => {
                let cq = rnic.context.create_cq_on(depth, channel);
                Either::Rnic(cq.map_err(|e| convert::error(&e))?)
            }
            _ => return Err(TWO_DEVICES),
        }))
    }

    /// As [`crate::Device::create_comp_channel`].
    ///
    /// # Errors
    /// As there; on an RNIC as `ibv_create_comp_channel`.
    pub fn create_comp_channel(&self) -> Result<CompChannel, Error> {
        Ok(CompChannel(match &self.0 {
            Either::Soft(device) => Either::Soft(device.create_comp_channel()?),
            Either::Rnic(rnic) => {
                let channel = rnic.context.create_channel();
                Either::Rnic(channel.map_err(|e| convert::error(&e))?)
            }
        }))
    }
}
