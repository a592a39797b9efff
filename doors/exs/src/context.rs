//! The device and the protection domain that all sockets of a program share.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_sockets::lock::lock;
use weft_verbs::any::{self, Choice};
use weft_verbs::{Device, Pd, PerProcess};

use crate::Error;
use crate::registered::Domain;

/// A device and a protection domain for sockets, queues and regions. Clones are handles of the same one.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    device: Device,
    choice: Choice,
    soft: Arc<Domain>,
    /// The RNICs that connections use.
    rnics: Mutex<Vec<Arc<Domain>>>,
}

impl Context {
    /// A context on this device.
    ///
    /// # Errors
    /// The protection domain cannot be allocated.
    pub fn new(device: Device) -> Result<Context, Error> {
        Self::with(device, Choice::Soft)
    }

    /// A context whose connections go over an RNIC of the machine where `choice` says so, and over this device otherwise.
    ///
    /// # Errors
    /// The protection domain cannot be allocated; the RNIC that is named does not exist or cannot be used.
    pub fn with(device: Device, choice: Choice) -> Result<Context, Error> {
        if let Choice::Named(_) = choice {
            let any_addr = |ip| SocketAddr::new(ip, 0);
            choice
                .rnic_at(any_addr(Ipv4Addr::UNSPECIFIED.into()))
                .or_else(|error| {
                    let with_ipv6 = choice.rnic_at(any_addr(Ipv6Addr::UNSPECIFIED.into()));
                    with_ipv6.map_err(|_| error)
                })?;
        }
        Ok(Context(Arc::new(Inner {
            soft: Domain::soft(device.alloc_pd()?),
            device,
            choice,
            rnics: Mutex::default(),
        })))
    }

    /// The context of the process, with the device that `WEFT_DEVICE` names. The first call makes it; a forked child makes another.
    ///
    /// # Errors
    /// When the device cannot be opened; the next call tries again.
    pub fn global() -> Result<Context, Errno> {
        Ok(Self::shared()?)
    }

    /// Like [`Context::global`], but returns the full error.
    ///
    /// # Errors
    /// When the device cannot be opened, for example because of an invalid setting in the environment; the next call tries again.
    pub fn shared() -> Result<Context, Error> {
        static GLOBAL: PerProcess<Inner> = PerProcess::new();
        let inner =
            GLOBAL.get(|| Ok::<_, Error>(Context::with(Device::open()?, Choice::from_env())?.0))?;
        Ok(Context(inner))
    }

    /// The soft RNIC.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The protection domain of the soft RNIC.
    pub fn pd(&self) -> &Pd {
        self.0.soft.pd()
    }

    pub(crate) fn choice(&self) -> &Choice {
        &self.0.choice
    }

    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.0.soft
    }

    /// The domain of connections through this RNIC.
    pub(crate) fn domain_of(&self, rnic: &any::Device) -> Result<Arc<Domain>, Error> {
        let mut rnics = lock(&self.0.rnics);
        // A device that was removed may have come back under its name.
        rnics.retain(|domain| !domain.is_gone());
        let named = |domain: &&Arc<Domain>| {
            let of = domain.rnic().and_then(|its| its.device.rnic());
            of == rnic.rnic()
        };
        if let Some(domain) = rnics.iter().find(named) {
            return Ok(Arc::clone(domain));
        }
        let domain = Domain::of_rnic(self.pd(), rnic)?;
        rnics.push(Arc::clone(&domain));
        Ok(domain)
    }
}
