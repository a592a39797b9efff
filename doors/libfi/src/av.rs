//! Address vectors.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use weft_fi::endpoint::{ADDRESS, Address};
use weft_verbs::Device;

use crate::abi::{AvFid, AvOps, DomainFid, FI_ADDR_UNSPEC, FI_CLASS_AV, FI_ETOOSMALL, Ops};
use crate::domain::Domain;
use crate::object::{MISSING, fid, plain};
use crate::service;

/// The addresses of a vector, by their index, and back.
#[derive(Default)]
struct Table {
    list: Vec<Option<Address>>,
    index: HashMap<Address, u64>,
}

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
    device: Device,
}

static AV: Ops = plain::<Av>();
static AV_OPS: AvOps = AvOps {
    size: size_of::<AvOps>(),
    insert,
    insertsvc,
    insertsym: MISSING,
    remove,
    lookup,
    straddr,
    av_set: MISSING,
};

/// See `fi_av_open(3)`.
pub(crate) unsafe extern "C" fn open(
    domain: *mut DomainFid,
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
        // SAFETY: an object of ours.
        device: unsafe { &*domain.cast::<Domain>() }.device.clone(),
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(av).cast()) };
    0
}

unsafe fn addresses<'a>(av: *mut AvFid) -> &'a Addresses {
    // SAFETY: made by [`open`].
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
    let device = &unsafe { &*av.cast::<Av>() }.device;
    let mut inserted = 0;
    for i in 0..count {
        // SAFETY: the caller passes `count` addresses.
        let bytes = unsafe { addr.cast::<[u8; ADDRESS]>().add(i).read_unaligned() };
        let address = Address::from_bytes(&bytes);
        let address = address.and_then(|address| service::resolved(device, address));
        // SAFETY: an object of ours.
        let mut table = unsafe { addresses(av) }.lock();
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
            // SAFETY: room for `count` indexes.
            unsafe { out.add(i).write(index) };
        }
    }
    inserted
}

unsafe extern "C" fn insertsvc(
    av: *mut AvFid,
    node: *const c_char,
    service: *const c_char,
    out: *mut u64,
    flags: u64,
    context: *mut c_void,
) -> c_int {
    // SAFETY: strings or null.
    let Some(addr) = (unsafe { service::named(node, service) }) else {
        return -libc::EINVAL;
    };
    let bytes = Address { addr, key: 0 }.to_bytes();
    // SAFETY: as for this call.
    unsafe { insert(av, bytes.as_ptr().cast(), 1, out, flags, context) }
}

unsafe extern "C" fn remove(av: *mut AvFid, addr: *mut u64, count: usize, _: u64) -> c_int {
    // SAFETY: an object of ours.
    let mut table = unsafe { addresses(av) }.lock();
    for i in 0..count {
        // SAFETY: the caller passes `count` indexes.
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
/// `out` has room for `len` bytes.
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
