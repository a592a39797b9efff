//! The device and the protection domain that all sockets of a program share.

use std::sync::Arc;

use rustix::io::Errno;
use weft_verbs::PerProcess;
use weft_verbs::{Device, Pd};

use crate::Error;

/// A device and a protection domain for sockets, queues and regions. Clones are handles of the same one.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

struct Inner {
    device: Device,
    pd: Pd,
}

impl Context {
    /// A context on this device.
    ///
    /// # Errors
    /// The protection domain cannot be allocated.
    pub fn new(device: Device) -> Result<Context, Error> {
        let pd = device.alloc_pd()?;
        Ok(Context(Arc::new(Inner { device, pd })))
    }

    /// The context of the process. The first call makes it; a forked child makes another.
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
        let inner = GLOBAL.get(|| Ok::<_, Error>(Context::new(Device::open()?)?.0))?;
        Ok(Context(inner))
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The protection domain.
    pub fn pd(&self) -> &Pd {
        &self.0.pd
    }
}
