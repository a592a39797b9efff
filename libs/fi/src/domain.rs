//! Fabric, domain, event queue and address vector.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weft_fi::endpoint::{ADDRESS, Address};
use weft_verbs::Device;

use crate::abi::{
    AvFid, AvOps, DomainFid, DomainOps, EqFid, EqOps, FI_ADDR_UNSPEC, FI_CLASS_AV, FI_CLASS_DOMAIN,
    FI_CLASS_EQ, FI_CLASS_FABRIC, FI_ETOOSMALL, FabricAttr, FabricFid, FabricOps, Fid, Info, MrOps,
    Ops,
};
use crate::{MISSING, counter, ep, no_bind, no_control, queue};

/// What `close` does for most: the box goes.
///
/// # Safety
/// `T` is the type of the box that the pointer was made of, and begins with a [`Fid`].
pub(crate) unsafe extern "C" fn close<T>(fid: *mut Fid) -> c_int {
    // SAFETY: as said, and libfabric's user gives it up.
    drop(unsafe { Box::from_raw(fid.cast::<T>()) });
    0
}

const fn plain<T>() -> Ops {
    Ops {
        size: size_of::<Ops>(),
        close: close::<T>,
        bind: no_bind,
        control: no_control,
        missing: [MISSING; 3],
    }
}

fn fid(fclass: usize, context: *mut c_void, ops: &'static Ops) -> Fid {
    Fid {
        fclass,
        context,
        ops,
    }
}

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

#[repr(C)]
pub(crate) struct Domain {
    fid: DomainFid,
    pub device: Device,
}

static DOMAIN: Ops = plain::<Domain>();
static DOMAIN_OPS: DomainOps = DomainOps {
    size: size_of::<DomainOps>(),
    av_open,
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

/// The addresses of a vector, by their index, and back.
#[derive(Default)]
struct Table {
    list: Vec<Option<Address>>,
    index: HashMap<Address, u64>,
}

/// The addresses of a vector.
#[derive(Default)]
pub(crate) struct Addresses(Mutex<Table>);

impl Addresses {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, index: u64) -> Option<Address> {
        *self.lock().list.get(usize::try_from(index).ok()?)?
    }

    pub(crate) fn index(&self, address: &Address) -> Option<u64> {
        self.lock().index.get(address).copied()
    }
}

#[repr(C)]
pub(crate) struct Av {
    fid: AvFid,
    pub addresses: Arc<Addresses>,
}

static AV: Ops = plain::<Av>();
static AV_OPS: AvOps = AvOps {
    size: size_of::<AvOps>(),
    insert,
    insertsvc: MISSING,
    insertsym: MISSING,
    remove,
    lookup,
    straddr,
    av_set: MISSING,
};

unsafe extern "C" fn av_open(
    _: *mut DomainFid,
    _: *mut c_void,
    out: *mut *mut AvFid,
    context: *mut c_void,
) -> c_int {
    let av = Box::new(Av {
        fid: AvFid {
            fid: fid(FI_CLASS_AV, context, &AV),
            ops: &raw const AV_OPS,
        },
        addresses: Arc::default(),
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(av).cast()) };
    0
}

unsafe fn addresses<'a>(av: *mut AvFid) -> &'a Addresses {
    // SAFETY: made by `av_open`.
    &unsafe { &*av.cast::<Av>() }.addresses
}

unsafe extern "C" fn insert(
    av: *mut AvFid,
    addr: *const c_void,
    count: usize,
    out: *mut u64,
    _: u64,
    _: *mut c_void,
) -> c_int {
    // SAFETY: an object of ours.
    let mut table = unsafe { addresses(av) }.lock();
    let mut inserted = 0;
    for i in 0..count {
        // SAFETY: the caller gives so many addresses.
        let bytes = unsafe { addr.cast::<[u8; ADDRESS]>().add(i).read_unaligned() };
        let address = Address::from_bytes(&bytes);
        let index = if let Some(address) = address {
            inserted += 1;
            let index = table.list.len() as u64;
            table.list.push(Some(address));
            // Inserted twice, it has two indices; messages are of the first.
            table.index.entry(address).or_insert(index);
            index
        } else {
            FI_ADDR_UNSPEC
        };
        if !out.is_null() {
            // SAFETY: room for so many.
            unsafe { out.add(i).write(index) };
        }
    }
    inserted
}

unsafe extern "C" fn remove(av: *mut AvFid, addr: *mut u64, count: usize, _: u64) -> c_int {
    // SAFETY: an object of ours.
    let mut table = unsafe { addresses(av) }.lock();
    for i in 0..count {
        // SAFETY: the caller gives so many.
        let index = unsafe { addr.add(i).read() };
        let entry = usize::try_from(index).ok();
        let entry = entry.and_then(|i| table.list.get_mut(i));
        let Some(entry) = entry else {
            return -libc::EINVAL;
        };
        if let Some(address) = entry.take()
            && table.index.get(&address) == Some(&index)
        {
            table.index.remove(&address);
        }
    }
    0
}

unsafe extern "C" fn lookup(
    av: *mut AvFid,
    index: u64,
    out: *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: an object of ours.
    match unsafe { addresses(av) }.get(index) {
        // SAFETY: the caller says how much room there is.
        Some(address) => unsafe { put(&address, out, len) },
        None => -libc::EINVAL,
    }
}

/// Writes an address as far as there is room, and its length.
///
/// # Safety
/// `len` says how many bytes may be written to `out`.
pub(crate) unsafe fn put(address: &Address, out: *mut c_void, len: *mut usize) -> c_int {
    let bytes = address.to_bytes();
    // SAFETY: as said.
    unsafe {
        let room = len.read();
        len.write(ADDRESS);
        if !out.is_null() {
            let part = room.min(ADDRESS);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), out.cast(), part);
        }
        if room < ADDRESS { -FI_ETOOSMALL } else { 0 }
    }
}

unsafe extern "C" fn straddr(
    _: *mut AvFid,
    addr: *const c_void,
    buf: *mut c_char,
    len: *mut usize,
) -> *const c_char {
    // SAFETY: an address, and as much room as `len` says.
    unsafe {
        let bytes = addr.cast::<[u8; ADDRESS]>().read_unaligned();
        let text = match Address::from_bytes(&bytes) {
            Some(address) => format!("weft://{}/{:08x}\0", address.addr, address.key),
            None => "no address\0".to_owned(),
        };
        let room = len.read();
        len.write(text.len());
        if room > 0 && !buf.is_null() {
            let part = room.min(text.len());
            std::ptr::copy_nonoverlapping(text.as_ptr(), buf.cast(), part);
            buf.add(part - 1).write(0);
        }
    }
    buf
}
