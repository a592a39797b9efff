//! The device of a connection.

use weft_verbs::any::{Choice, Device};
use weft_verbs::{Error, any};

/// The device of a connection, and whether it may be one that cannot encrypt.
#[derive(Debug, Clone, Default)]
pub struct Via {
    /// The device.
    pub device: Choice,
    /// Without encryption and keys.
    pub plain: bool,
}

/// Why no device carries a connection.
#[derive(Debug, thiserror::Error)]
pub enum NoDevice {
    /// The one that is named.
    #[error("cannot use the device {0}: {1}")]
    Unusable(Choice, Error),
    /// It would have to.
    #[error("the RNIC {0} cannot encrypt what it sends")]
    CannotEncrypt(String),
    /// The soft RNIC cannot be opened.
    #[error("cannot open the device: {0}")]
    NoSoft(Error),
}

impl NoDevice {
    /// What a user can do.
    pub fn hint(&self) -> &'static str {
        match self {
            Self::Unusable(..) => "`weft doctor` says what this machine's devices need",
            Self::CannotEncrypt(_) => {
                "add --plain on both sides if you trust the network between, or leave --device away"
            }
            Self::NoSoft(_) => "`weft doctor` says what this machine does not support",
        }
    }
}

impl Via {
    /// The device; `find` finds the RNIC, `open` opens the soft one. This one is taken in place of an RNIC that nobody has named, and that cannot encrypt.
    ///
    /// # Errors
    /// [`NoDevice`].
    pub fn device(
        &self,
        find: impl FnOnce(&Choice) -> Result<Option<any::Device>, Error>,
        open: impl FnOnce() -> Result<weft_verbs::Device, Error>,
    ) -> Result<Device, NoDevice> {
        let rnic = match (&self.device, self.plain) {
            (Choice::Auto, false) => None,
            (choice, _) => find(choice).map_err(|e| NoDevice::Unusable(choice.clone(), e))?,
        };
        match rnic.as_ref().and_then(Device::rnic) {
            Some(name) if !self.plain => return Err(NoDevice::CannotEncrypt(name.to_owned())),
            Some(name) => tracing::info!("the RNIC {name} carries the files, not encrypted"),
            None => tracing::info!("the soft RNIC carries the files"),
        }
        match rnic {
            Some(rnic) => Ok(rnic),
            None => Ok(open().map_err(NoDevice::NoSoft)?.into()),
        }
    }
}
