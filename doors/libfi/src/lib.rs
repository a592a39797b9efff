//! `libweft-fi.so`: weft's datagrams as a provider of libfabric, found through `FI_PROVIDER_PATH` (docs/mpi.md).
//!
//! Reliable datagram endpoints (`FI_EP_RDM`) with messages and tags. Missing calls (one-sided calls, atomics, wait sets) return
//! `-FI_ENOSYS`. The protocol is in `weft-fi`; this library has libfabric's types and their conversion.
//!
//! # Safety
//!
//! libfabric's contract is that of C: pointers are what its manual pages say, and objects are closed after those that are bound to them. Each object is
//! a box whose first field is libfabric's structure, so that a pointer to one is a pointer to the other. Objects hold the objects that they need by
//! reference counts, so that a wrong order of closing is harmless.

pub mod abi;
mod av;
mod counter;
mod domain;
mod ep;
mod eq;
mod fabric;
mod info;
mod object;
mod queue;
mod service;

use std::cell::UnsafeCell;
use std::ffi::c_void;

use abi::Provider;

unsafe extern "C" fn cleanup() {}

/// libfabric writes to `context`.
#[repr(transparent)]
struct Shared(UnsafeCell<Provider>);

// SAFETY: only libfabric writes to it, under its own lock; we never read it.
unsafe impl Sync for Shared {}

static PROVIDER: Shared = Shared(UnsafeCell::new(Provider {
    version: 1 << 16,
    fi_version: OLDEST,
    context: [std::ptr::null_mut(); 4],
    name: info::NAME.as_ptr(),
    getinfo: info::getinfo,
    fabric: fabric::fabric,
    cleanup,
}));

/// The interface that `abi.rs` has. Later ones only add to its structures, of which libfabric hands us its own.
const OLDEST: u32 = (1 << 16) + 17;
/// Of the last major version whose structures we know.
const NEWEST: u32 = (2 << 16) + 0xffff;

/// The interface version of the libfabric in this process. It accepts no later provider, and offers no earlier one to programs that ask for
/// its own.
fn version() -> u32 {
    // SAFETY: it has long been loaded, or is not found; `fi_version` is of this type.
    unsafe {
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
        let library = libc::dlopen(c"libfabric.so.1".as_ptr(), flags);
        if library.is_null() {
            return OLDEST;
        }
        let symbol = libc::dlsym(library, c"fi_version".as_ptr());
        let found = if symbol.is_null() {
            OLDEST
        } else {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u32>(symbol)()
        };
        libc::dlclose(library);
        found.clamp(OLDEST, NEWEST)
    }
}

/// The entry point that libfabric calls after it has loaded the library.
#[unsafe(no_mangle)]
pub extern "C" fn fi_prov_ini() -> *mut Provider {
    let level = weft_verbs::settings::LOG.parse().ok().flatten();
    let level = level.unwrap_or(tracing_subscriber::filter::LevelFilter::OFF);
    // The program may have a subscriber already, if it is one of ours.
    let _ = tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_target(false)
        .try_init();
    let provider = PROVIDER.0.get();
    // SAFETY: libfabric does not know it yet.
    unsafe { (&raw mut (*provider).fi_version).write(version()) };
    provider
}
