//! Open devices, and protection domains.

use std::fs;
use std::ptr;
use std::sync::Arc;

use weft_cverbs::{__VERBS_ABI_IS_EXTENDED, ibv_context, ibv_context_ops, ibv_pd, verbs_context};

use crate::device::Device;
use crate::error::{Error, last};
use crate::fork;
use crate::library::Libraries;
use crate::life::{Calling, Handle, Kind, Life, PortChange};
use crate::watch::Source;

impl Device {
    /// Opens it.
    ///
    /// # Errors
    /// As `ibv_open_device`, with a remedy: the special file is missing or may not be opened.
    pub fn open(&self) -> Result<Context, Error> {
        Context::open(self)
    }
}

/// What a context is kept alive by.
pub(crate) trait Keeper: Send + Sync {}

/// `ibv_open_device`, closed when the last object of it is gone.
struct Opened {
    libraries: &'static Libraries,
    context: *mut ibv_context,
    _device: Device,
}

// SAFETY: contexts may be used by any thread (`ibv_open_device`).
unsafe impl Send for Opened {}
// SAFETY: as above.
unsafe impl Sync for Opened {}
impl Keeper for Opened {}

impl Drop for Opened {
    fn drop(&mut self) {
        // In a child of fork the objects are the parent's.
        if !fork::is_child() {
            // SAFETY: ours, once; every object of it has held it.
            unsafe { (self.libraries.verbs.ibv_close_device)(self.context) };
        }
    }
}

/// An open device. Clones are the same one.
#[derive(Clone)]
pub struct Context {
    libraries: &'static Libraries,
    context: *mut ibv_context,
    name: Arc<str>,
    life: Arc<Life>,
    _keeper: Arc<dyn Keeper>,
}

// SAFETY: as `Opened`.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(crate) fn open(device: &Device) -> Result<Self, Error> {
        let libraries = device.libraries();
        // SAFETY: a device of a list that lives.
        let context = unsafe { (libraries.verbs.ibv_open_device)(device.raw()) };
        if context.is_null() {
            return Err(refused(device, last()));
        }
        let opened = Opened {
            libraries,
            context,
            _device: device.clone(),
        };
        let keeper: Arc<dyn Keeper> = Arc::new(opened);
        Ok(Self {
            libraries,
            context,
            name: device.name().into(),
            life: Life::of_opened(libraries, context, device.name())?,
            _keeper: keeper,
        })
    }

    /// The context of an identifier of librdmacm, which is open as long as the identifier is.
    ///
    /// # Safety
    /// `context` is open as long as `keeper` lives, and as long as what `monitor` returns.
    pub(crate) unsafe fn borrowed(
        libraries: &'static Libraries,
        context: *mut ibv_context,
        keeper: Arc<dyn Keeper>,
        monitor: impl FnOnce() -> Result<Option<Arc<dyn Source>>, Error>,
    ) -> Result<Self, Error> {
        // SAFETY: an open context has a device, whose name ends with a NUL.
        let name = unsafe {
            let name = (*(*context).device).name.as_ptr();
            std::ffi::CStr::from_ptr(name)
                .to_string_lossy()
                .into_owned()
        };
        Ok(Self {
            libraries,
            context,
            life: Life::of_cm(libraries, context, &name, monitor)?,
            name: name.into(),
            _keeper: keeper,
        })
    }

    /// True if both are the same open device.
    pub(crate) fn is(&self, other: &Context) -> bool {
        ptr::eq(self.context, other.context)
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// Whether it was removed, or has failed: then every call on it fails.
    pub fn is_gone(&self) -> bool {
        self.life.over().is_some()
    }

    /// For tests: as if the device had told that it has failed (`IBV_EVENT_DEVICE_FATAL`).
    #[doc(hidden)]
    pub fn fail(&self) {
        self.life.end();
    }

    /// Before a call that makes or uses objects, or asks the device.
    pub(crate) fn enter(&self) -> Result<Calling<'_>, Error> {
        self.life.enter()
    }

    /// Calls this, on a thread of the library, when a port of the device changes. Only the first hook of a device counts, and only those of devices that
    /// [`cm`](crate::cm) has found are called.
    pub fn on_port(&self, hook: impl Fn(PortChange) + Send + Sync + 'static) {
        self.life.on_port(Box::new(hook));
    }

    pub(crate) fn libraries(&self) -> &'static Libraries {
        self.libraries
    }

    pub(crate) fn raw(&self) -> *mut ibv_context {
        self.context
    }

    /// The functions that the inline calls of the header call.
    #[inline]
    pub(crate) fn ops(&self) -> ibv_context_ops {
        // SAFETY: an open context; the library never changes its table.
        unsafe { (*self.context).ops }
    }

    /// The extended table, if the context has one that reaches back to this offset (`verbs_get_ctx_op`).
    pub(crate) fn extended(&self, offset: usize) -> Option<*const verbs_context> {
        // SAFETY: an open context is the last field of its table, if it says that there is one.
        unsafe {
            if (*self.context).abi_compat as usize != __VERBS_ABI_IS_EXTENDED {
                return None;
            }
            let back = std::mem::offset_of!(verbs_context, context);
            let table = self
                .context
                .byte_sub(back)
                .cast::<verbs_context>()
                .cast_const();
            ((*table).sz >= size_of::<verbs_context>() - offset).then_some(table)
        }
    }

    pub(crate) fn failed(&self, call: &str, errno: i32) -> Error {
        Error::call(&self.name, call, errno)
    }

    /// As [`Context::failed`], for calls that lock memory.
    pub(crate) fn lacks_memory(&self, call: &str, errno: i32, needed: usize) -> Error {
        Error::locking(&self.name, call, errno, needed)
    }

    /// A new protection domain.
    ///
    /// # Errors
    /// As `ibv_alloc_pd`.
    pub fn alloc_pd(&self) -> Result<Pd, Error> {
        let calling = self.enter()?;
        let calls = &self.libraries.verbs;
        // SAFETY: an open context.
        let pd = unsafe { (calls.ibv_alloc_pd)(self.context) };
        if pd.is_null() {
            return Err(self.failed("ibv_alloc_pd", last()));
        }
        // SAFETY: ours, once; every object in it was destroyed before.
        let destroy = move |pd| unsafe { (calls.ibv_dealloc_pd)(pd) };
        Ok(Pd(Arc::new(PdInner {
            pd: Handle::new(&self.life, &calling, Kind::Pd, pd, destroy),
            context: self.clone(),
        })))
    }
}

/// Why a device could not be opened. The library says that the device is missing, whatever the reason was: the special file knows better.
fn refused(device: &Device, errno: i32) -> Error {
    let file = device.file();
    let tried = fs::File::options().read(true).write(true).open(&file);
    let errno = tried.err().and_then(|e| e.raw_os_error()).unwrap_or(errno);
    let error = Error::call(device.name(), "ibv_open_device", errno);
    match errno {
        libc::EACCES | libc::EPERM => error.remedy(format!(
            "let this user read and write {file}: `ls -l {file}` shows its group (often `rdma`); in a container, start it with --device={file}"
        )),
        libc::ENOENT | libc::ENXIO | libc::ENODEV => error.remedy(format!(
            "{file} is missing: `modprobe ib_uverbs`, as root; in a container, start it with --device=/dev/infiniband"
        )),
        _ => error,
    }
}

/// A protection domain. Clones are the same one.
#[derive(Clone)]
pub struct Pd(Arc<PdInner>);

struct PdInner {
    pd: Handle<ibv_pd>,
    context: Context,
}

impl Pd {
    /// Its device.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    pub(crate) fn raw(&self) -> *mut ibv_pd {
        self.0.pd.raw()
    }
}
