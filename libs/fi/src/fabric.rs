//! The fabric and the objects opened from it: event queues and domains, which open everything else.

use std::ffi::{c_int, c_void};

use weft_verbs::Device;

use crate::abi::{
    DomainFid, DomainOps, EqFid, EqOps, FI_CLASS_DOMAIN, FI_CLASS_EQ, FI_CLASS_FABRIC, FabricAttr,
    FabricFid, FabricOps, Info, MrOps, Ops,
};
use crate::domain::Domain;
use crate::object::{MISSING, fid, plain};
use crate::{av, counter, ep, queue};

static FABRIC: Ops = plain::<FabricFid>();
static FABRIC_OPS: FabricOps = FabricOps {
    size: size_of::<FabricOps>(),
    domain: open_domain,
    passive_ep: MISSING,
    eq_open,
    wait_open: MISSING,
    trywait: queue::trywait,
    domain2: MISSING,
};

/// See `fi_fabric(3)`.
pub(crate) unsafe extern "C" fn fabric(
    attr: *mut FabricAttr,
    out: *mut *mut FabricFid,
    context: *mut c_void,
) -> c_int {
    // SAFETY: a valid structure or null.
    let api_version = unsafe { attr.as_ref() }.map_or(0, |attr| attr.api_version);
    let fabric = Box::new(FabricFid {
        fid: fid(FI_CLASS_FABRIC, context, &FABRIC),
        ops: &raw const FABRIC_OPS,
        api_version,
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(fabric)) };
    0
}

static EQ: Ops = plain::<EqFid>();
static EQ_OPS: EqOps = EqOps {
    size: size_of::<EqOps>(),
    read: nothing,
    readerr: nothing,
    write: MISSING,
    sread: nothing,
    strerror: MISSING,
};

/// There are no events: nothing here is connected.
unsafe extern "C" fn nothing() -> isize {
    -(libc::EAGAIN as isize)
}

unsafe extern "C" fn eq_open(
    _: *mut FabricFid,
    _: *mut c_void,
    out: *mut *mut EqFid,
    context: *mut c_void,
) -> c_int {
    let eq = Box::new(EqFid {
        fid: fid(FI_CLASS_EQ, context, &EQ),
        ops: &raw const EQ_OPS,
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(eq)) };
    0
}

static DOMAIN: Ops = plain::<Domain>();
static DOMAIN_OPS: DomainOps = DomainOps {
    size: size_of::<DomainOps>(),
    av_open: av::open,
    cq_open: queue::open,
    endpoint: ep::open,
    scalable_ep: MISSING,
    cntr_open: counter::open,
    missing: [MISSING; 6],
};
static MR_OPS: MrOps = MrOps {
    size: size_of::<MrOps>(),
    missing: [MISSING; 3],
};

unsafe extern "C" fn open_domain(
    _: *mut FabricFid,
    _: *mut Info,
    out: *mut *mut DomainFid,
    context: *mut c_void,
) -> c_int {
    let device = match Device::open() {
        Ok(device) => device,
        Err(error) => {
            eprintln!("weft: cannot open the device: {error}");
            return -libc::ENODEV;
        }
    };
    let domain = Box::new(Domain {
        fid: DomainFid {
            fid: fid(FI_CLASS_DOMAIN, context, &DOMAIN),
            ops: &raw const DOMAIN_OPS,
            mr: &raw const MR_OPS,
        },
        device,
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(domain).cast()) };
    0
}
