//! What all sockets of a program share: a device and a protection domain.

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
    /// Sockets on this device.
    ///
    /// # Errors
    /// Without room for a protection domain.
    pub fn new(device: Device) -> Result<Context, Error> {
        let pd = device.alloc_pd()?;
        Ok(Context(Arc::new(Inner { device, pd })))
    }

    /// The program's own, made when it is first asked for; a forked child makes its own.
    ///
    /// # Errors
    /// When the device cannot be opened; the next call tries again.
    pub fn global() -> Result<Context, Errno> {
        Ok(Self::shared()?)
    }

    /// As [`Context::global`], and says why not.
    ///
    /// # Errors
    /// When the device cannot be opened, as with a setting in the environment that means nothing; the next call tries again.
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
