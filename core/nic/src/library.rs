//! The system's libraries, loaded at run time.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use weft_cverbs::cm::{
    rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_conn_param, rdma_event_channel,
    rdma_port_space,
};
use weft_cverbs::{
    ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_gid, ibv_gid_entry, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr, ibv_srq, ibv_srq_init_attr, ibv_wc_status,
};

use crate::error::Error;
use crate::fork;

/// The variable that names a folder with `libibverbs.so.1` and `librdmacm.so.1`, in place of the system's. Only from there weft's own drop-in libraries
/// are accepted, as a device for tests.
pub const FOLDER: &str = "WEFT_NIC_LIB";

const VERBS: &str = "libibverbs.so.1";
const CM: &str = "librdmacm.so.1";
/// A name that only weft's own libibverbs has.
const OWN: &CStr = c"weft_dgram_setup";

/// A library; never closed, because drivers keep pointers into it.
struct Handle(*mut c_void);

impl Handle {
    fn open(path: &Path) -> Result<Self, Error> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::new(None, format!("{}: not a file name", path.display())))?;
        // SAFETY: a string. The initialisers of the library are trusted, as the rest of it.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            let error = Error::new(None, format!("cannot load {}: {}", path.display(), why()));
            return Err(error.remedy(
                "install the system's RDMA libraries: libibverbs1, ibverbs-providers and librdmacm1 (Debian, Ubuntu), rdma-core (others)",
            ));
        }
        Ok(Self(handle))
    }

    /// The address of a name, in this version where one is given.
    fn address(&self, name: &CStr, version: Option<&CStr>) -> Option<*mut c_void> {
        // SAFETY: an open library, and strings.
        let address = unsafe {
            match version {
                Some(version) => libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()),
                None => libc::dlsym(self.0, name.as_ptr()),
            }
        };
        (!address.is_null()).then_some(address)
    }

    /// # Safety
    /// `F` is the type of the function's pointer.
    unsafe fn function<F: Copy>(
        &self,
        library: &str,
        name: &CStr,
        version: &CStr,
    ) -> Result<F, Error> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        let address = self.address(name, Some(version)).ok_or_else(|| {
            let [name, version] = [name, version].map(CStr::to_string_lossy);
            let what = format!("{library} has no {name} of {version}");
            Error::new(None, what).remedy("install rdma-core of version 32 or later")
        })?;
        // SAFETY: the caller's promise; the sizes are equal.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }

    /// The file that was loaded.
    fn path(&self) -> Option<PathBuf> {
        let function = self.address(c"ibv_get_device_list", None)?;
        // SAFETY: a struct of numbers and pointers.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: an address in the library, and a place for the answer, whose strings stay as long as the library.
        let name = unsafe {
            if libc::dladdr(function, &raw mut info) == 0 || info.dli_fname.is_null() {
                return None;
            }
            CStr::from_ptr(info.dli_fname)
        };
        Some(PathBuf::from(OsStr::from_bytes(name.to_bytes())))
    }
}

// SAFETY: the loader's functions may be called by any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// The loader's words for the last failure.
fn why() -> String {
    // SAFETY: the string stays until this thread's next call of the loader.
    unsafe {
        let text = libc::dlerror();
        if text.is_null() {
            "no reason given".to_owned()
        } else {
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }
}

/// Functions of a library by their names, each with its version.
macro_rules! functions {
    ($table:ident of $library:ident: $($version:literal $name:ident($($arg:ty),*) $(-> $of:ty)?;)*) => {
        pub(crate) struct $table {
            $(pub(crate) $name: unsafe extern "C" fn($($arg),*) $(-> $of)?,)*
        }

        impl $table {
            fn of(handle: &Handle) -> Result<Self, Error> {
                Ok(Self {
                    $($name: {
                        const NAME: &str = concat!(stringify!($name), "\0");
                        let name = CStr::from_bytes_with_nul(NAME.as_bytes()).expect("one NUL");
                        // SAFETY: the prototype of its manual page.
                        unsafe { handle.function($library, name, $version)? }
                    },)*
                })
            }
        }
    };
}

functions! { VerbsCalls of VERBS:
    c"IBVERBS_1.1" ibv_fork_init() -> c_int;
    c"IBVERBS_1.1" ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
    c"IBVERBS_1.1" ibv_ack_async_event(*mut ibv_async_event);
    c"IBVERBS_1.1" ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    c"IBVERBS_1.1" ibv_free_device_list(*mut *mut ibv_device);
    c"IBVERBS_1.1" ibv_get_device_guid(*mut ibv_device) -> u64;
    c"IBVERBS_1.1" ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    c"IBVERBS_1.1" ibv_close_device(*mut ibv_context) -> c_int;
    c"IBVERBS_1.1" ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    c"IBVERBS_1.1" ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    c"IBVERBS_1.1" ibv_query_gid(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    c"IBVERBS_1.1" ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    c"IBVERBS_1.1" ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    c"IBVERBS_1.1" ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    c"IBVERBS_1.1" ibv_dereg_mr(*mut ibv_mr) -> c_int;
    c"IBVERBS_1.0" ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
    c"IBVERBS_1.0" ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
    c"IBVERBS_1.1" ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    c"IBVERBS_1.1" ibv_destroy_cq(*mut ibv_cq) -> c_int;
    c"IBVERBS_1.1" ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    c"IBVERBS_1.1" ibv_ack_cq_events(*mut ibv_cq, c_uint);
    c"IBVERBS_1.1" ibv_create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    c"IBVERBS_1.1" ibv_destroy_srq(*mut ibv_srq) -> c_int;
    c"IBVERBS_1.1" ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    c"IBVERBS_1.1" ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    c"IBVERBS_1.1" ibv_destroy_qp(*mut ibv_qp) -> c_int;
    c"IBVERBS_1.1" ibv_create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    c"IBVERBS_1.1" ibv_destroy_ah(*mut ibv_ah) -> c_int;
    c"IBVERBS_1.1" ibv_wc_status_str(ibv_wc_status) -> *const c_char;
    c"IBVERBS_1.11" _ibv_query_gid_table(*mut ibv_context, *mut ibv_gid_entry, usize, u32, usize) -> isize;
}

functions! { CmCalls of CM:
    c"RDMACM_1.0" rdma_create_event_channel() -> *mut rdma_event_channel;
    c"RDMACM_1.0" rdma_destroy_event_channel(*mut rdma_event_channel);
    c"RDMACM_1.0" rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, rdma_port_space) -> c_int;
    c"RDMACM_1.0" rdma_destroy_id(*mut rdma_cm_id) -> c_int;
    c"RDMACM_1.0" rdma_bind_addr(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
    c"RDMACM_1.0" rdma_resolve_addr(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    c"RDMACM_1.0" rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
    c"RDMACM_1.0" rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
    c"RDMACM_1.0" rdma_destroy_qp(*mut rdma_cm_id);
    c"RDMACM_1.0" rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
    c"RDMACM_1.0" rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    c"RDMACM_1.0" rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
    c"RDMACM_1.0" rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
    c"RDMACM_1.0" rdma_disconnect(*mut rdma_cm_id) -> c_int;
    c"RDMACM_1.0" rdma_migrate_id(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
    c"RDMACM_1.0" rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
    c"RDMACM_1.0" rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
    c"RDMACM_1.0" rdma_event_str(rdma_cm_event_type) -> *const c_char;
    c"RDMACM_1.0" rdma_get_src_port(*mut rdma_cm_id) -> u16;
}

/// The system's libraries, which stay loaded for the life of the process.
pub struct Libraries {
    pub(crate) verbs: VerbsCalls,
    cm: Result<CmCalls, Error>,
    path: Option<PathBuf>,
}

impl Libraries {
    /// Loads them at the first call.
    ///
    /// # Errors
    /// libibverbs is not there, is too old, or is weft's own.
    pub fn get() -> Result<&'static Libraries, Error> {
        let folder = std::env::var_os(FOLDER).filter(|folder| !folder.is_empty());
        Self::of(folder.as_deref().map(Path::new))
    }

    /// As [`Libraries::get`], of this folder, whichever libraries are there; of none: the system's. They are loaded once.
    ///
    /// # Errors
    /// As there.
    pub fn of(folder: Option<&Path>) -> Result<&'static Libraries, Error> {
        static LIBRARIES: OnceLock<Result<Libraries, Error>> = OnceLock::new();
        if fork::is_child() {
            return Err(fork::error("RDMA devices"));
        }
        let libraries = LIBRARIES.get_or_init(|| Self::load(folder));
        libraries.as_ref().map_err(Clone::clone)
    }

    fn load(folder: Option<&Path>) -> Result<Self, Error> {
        let file = |name: &str| folder.map_or_else(|| name.into(), |folder| folder.join(name));
        let verbs = Handle::open(&file(VERBS))?;
        let path = verbs.path();
        if folder.is_none() && verbs.address(OWN, None).is_some() {
            let path = path.map_or_else(|| VERBS.into(), |path| path.display().to_string());
            let error = Error::new(
                None,
                format!("{path} is weft's own, which hides the system's"),
            );
            return Err(
                error.remedy("start weft without LD_LIBRARY_PATH, and not under `weft verbs`")
            );
        }
        let calls = VerbsCalls::of(&verbs)?;
        // Before the first registration: children of this process must not change which pages the device has. Kernels from 5.12 on need nothing for that.
        // SAFETY: no arguments.
        unsafe { (calls.ibv_fork_init)() };
        fork::mark_children();
        Ok(Self {
            verbs: calls,
            cm: Handle::open(&file(CM)).and_then(|cm| CmCalls::of(&cm)),
            path,
        })
    }

    /// The file of libibverbs.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The words of libibverbs for the status of a completion.
    pub(crate) fn words(&self, status: ibv_wc_status) -> String {
        // SAFETY: the library returns a string that stays, or NULL.
        unsafe {
            let text = (self.verbs.ibv_wc_status_str)(status);
            if text.is_null() {
                return format!("status {status}");
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    pub(crate) fn cm(&self) -> Result<&CmCalls, Error> {
        self.cm.as_ref().map_err(Clone::clone)
    }
}
