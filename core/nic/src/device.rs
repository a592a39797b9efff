//! The devices of the machine.

use std::ffi::{c_char, c_int};
use std::fs;
use std::sync::Arc;

use weft_cverbs::{IBV_TRANSPORT_IB, IBV_TRANSPORT_IWARP, ibv_device};

use crate::error::Error;
use crate::library::Libraries;

/// `ibv_get_device_list`, freed when the last [`Device`] of it is gone.
struct List {
    libraries: &'static Libraries,
    list: *mut *mut ibv_device,
}

// SAFETY: nobody writes the list, and the library's calls may come from any thread.
unsafe impl Send for List {}
// SAFETY: as above.
unsafe impl Sync for List {}

impl Drop for List {
    fn drop(&mut self) {
        // SAFETY: our list, once.
        unsafe { (self.libraries.verbs.ibv_free_device_list)(self.list) }
    }
}

/// An RDMA device of this machine.
#[derive(Clone)]
pub struct Device {
    list: Arc<List>,
    device: *mut ibv_device,
    name: Arc<str>,
}

// SAFETY: the device is as the list.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// All devices that libibverbs finds.
///
/// # Errors
/// As [`Libraries::get`], or the list cannot be had.
pub fn devices() -> Result<Vec<Device>, Error> {
    let libraries = Libraries::get()?;
    let mut count: c_int = 0;
    // SAFETY: a place for the number.
    let list = unsafe { (libraries.verbs.ibv_get_device_list)(&raw mut count) };
    if list.is_null() {
        let errno = crate::error::last();
        // Kernels without RDMA have no /sys/class/infiniband_verbs.
        return match errno {
            libc::ENOSYS | libc::ENOENT => Ok(Vec::new()),
            _ => Err(Error::call("libibverbs", "ibv_get_device_list", errno)),
        };
    }
    let list = Arc::new(List { libraries, list });
    let found = (0..usize::try_from(count).unwrap_or(0)).map(|at| {
        // SAFETY: the list has `count` devices, which live as long as it.
        let (device, name) = unsafe {
            let device = *list.list.add(at);
            (device, text(&(*device).name))
        };
        Device {
            list: Arc::clone(&list),
            device,
            name: name.into(),
        }
    });
    Ok(found.collect())
}

/// Why the kernel has RDMA devices that libibverbs does not list.
pub fn unlisted(known: &[Device]) -> Vec<Error> {
    let names = names_in("/sys/class/infiniband");
    let unlisted = names.filter(|name| known.iter().all(|device| device.name() != name));
    unlisted.map(|name| why_unlisted(&name)).collect()
}

fn names_in(folder: &str) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok())
}

fn why_unlisted(name: &str) -> Error {
    let is_of = |uverbs: &String| {
        let device = fs::read_to_string(format!("/sys/class/infiniband_verbs/{uverbs}/ibdev"));
        device.is_ok_and(|device| device.trim() == name)
    };
    let Some(uverbs) = names_in("/sys/class/infiniband_verbs").find(is_of) else {
        let error = Error::new(Some(name), "the kernel does not offer it to programs");
        return error.remedy("`modprobe ib_uverbs`, as root");
    };
    let file = format!("/dev/infiniband/{uverbs}");
    match fs::metadata(&file) {
        Err(e) => Error::call(name, &file, e.raw_os_error().unwrap_or(0)).remedy(format!(
            "programs reach the device by {file}: in a container, start it with --device={file}"
        )),
        Ok(_) => Error::new(Some(name), "libibverbs has no driver for it")
            .remedy("install the drivers of rdma-core (ibverbs-providers)"),
    }
}

/// The text up to the NUL.
pub(crate) fn text(chars: &[c_char]) -> String {
    let bytes = chars.iter().map(|c| *c as u8).take_while(|b| *b != 0);
    String::from_utf8_lossy(&bytes.collect::<Vec<_>>()).into_owned()
}

/// What carries the device's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// InfiniBand's, also on Ethernet (`RoCE`).
    Ib,
    /// iWARP.
    Iwarp,
    /// Another one, which weft does not know.
    Other,
}

impl Device {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn raw(&self) -> *mut ibv_device {
        self.device
    }

    pub(crate) fn libraries(&self) -> &'static Libraries {
        self.list.libraries
    }

    /// What carries its messages.
    pub fn transport(&self) -> Transport {
        // SAFETY: the device lives as long as its list.
        match unsafe { (*self.device).transport_type } {
            IBV_TRANSPORT_IB => Transport::Ib,
            IBV_TRANSPORT_IWARP => Transport::Iwarp,
            _ => Transport::Other,
        }
    }

    /// Its globally unique identifier.
    pub fn guid(&self) -> u64 {
        // SAFETY: as above. The number is in network order.
        u64::from_be(unsafe { (self.list.libraries.verbs.ibv_get_device_guid)(self.device) })
    }

    /// The special file by which programs reach it.
    pub(crate) fn file(&self) -> String {
        // SAFETY: as above.
        let name = text(unsafe { &(*self.device).dev_name });
        format!("/dev/infiniband/{name}")
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Device").field(&self.name).finish()
    }
}
