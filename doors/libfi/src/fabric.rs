//! The fabric and the domains, which open everything else.

use std::ffi::{c_int, c_void};

use weft_verbs::{Device, settings};

use crate::abi::{
    DomainFid, DomainOps, FI_CLASS_DOMAIN, FI_CLASS_FABRIC, FabricAttr, FabricFid, FabricOps, Info,
    MrOps, Ops,
};
use crate::domain::Domain;
use crate::object::{MISSING, fid, plain};
use crate::{av, counter, ep, eq, queue};

static FABRIC: Ops = plain::<FabricFid>();
static FABRIC_OPS: FabricOps = FabricOps {
    size: size_of::<FabricOps>(),
    domain: open_domain,
    passive_ep: MISSING,
    eq_open: eq::open,
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
    let mut wrong = settings::wrong(&settings::OF_FI);
    if wrong.is_empty() {
        wrong.extend(settings::mpi_address().err());
    }
    for wrong in &wrong {
        eprintln!("weft: {wrong}");
    }
    if !wrong.is_empty() {
        return -libc::EINVAL;
    }
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
