//! The one soft RNIC of the process. Both devices use it.

use std::sync::Mutex;

use rustix::io::Errno;
use weft_verbs::{Device, settings};

use super::event_router::EventRouter;
use super::object::{PerFork, lock};
use super::visit;

/// The soft RNIC of this process.
pub(crate) fn native() -> Result<Device, Errno> {
    static NATIVE: PerFork<Mutex<Option<Device>>> = PerFork::new();
    let mut native = lock(NATIVE.get());
    if let Some(device) = &*native {
        return Ok(device.clone());
    }
    // Before the device starts a thread.
    visit::register();
    let device = Device::builder()
        .numbers_with_ports(settings::IB_WIRE.is("auto") == Ok(true))
        .open()
        .map_err(super::errno)?;
    let audience = EventRouter::get();
    device.on_async_event(|event| audience.hear(event));
    *native = Some(device.clone());
    Ok(device)
}
