//! `fi_getinfo`: the provider's offer, if it fits the request.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::net::{Ipv4Addr, SocketAddr};

use weft_fi::endpoint::{ADDRESS, Address, THRESHOLD};
use weft_verbs::settings;

use crate::abi::{
    DomainAttr, EpAttr, FI_AV_TABLE, FI_COMPLETION, FI_DELIVERY_COMPLETE, FI_DIRECTED_RECV,
    FI_EP_RDM, FI_INJECT, FI_INJECT_COMPLETE, FI_LOCAL_COMM, FI_MATCH_COMPLETE, FI_MSG,
    FI_MULTI_RECV, FI_ORDER_SAS, FI_PROGRESS_MANUAL, FI_PROTO_WEFT, FI_RECV, FI_REMOTE_COMM,
    FI_RM_ENABLED, FI_SEND, FI_SOURCE, FI_TAG_GENERIC, FI_TAGGED, FI_THREAD_SAFE,
    FI_TRANSMIT_COMPLETE, FORMAT, FabricAttr, Info, RxAttr, TxAttr,
};
use crate::service;

/// Ranges of memory of one send.
pub(crate) const RANGES: usize = 8;

/// The name of provider, fabric and domain.
pub(crate) const NAME: &CStr = c"weft";

const CAPS: u64 = FI_MSG
    | FI_TAGGED
    | FI_MULTI_RECV
    | FI_SOURCE
    | FI_SEND
    | FI_RECV
    | FI_DIRECTED_RECV
    | FI_LOCAL_COMM
    | FI_REMOTE_COMM;
const TX_FLAGS: u64 = FI_COMPLETION
    | FI_INJECT
    | FI_INJECT_COMPLETE
    | FI_TRANSMIT_COMPLETE
    | FI_DELIVERY_COMPLETE
    | FI_MATCH_COMPLETE;
/// The longest message, in bytes.
pub(crate) const MAX_MESSAGE: usize = 1 << 40;
const QUEUE: usize = 1024;
/// Newer versions of libfabric have longer structures: they find zeros there.
const SPARE: usize = 512;

/// Messages that are longer go by RDMA Write: `WEFT_FI_RENDEZVOUS`, in bytes.
pub(crate) fn threshold() -> Option<u64> {
    settings::FI_RENDEZVOUS.parse().ok().flatten()
}

/// The longest message whose memory is the caller's again as the call returns.
pub(crate) fn inject_size() -> usize {
    usize::try_from(threshold().unwrap_or(THRESHOLD)).map_or(4096, |bytes| bytes.min(4096))
}

/// Memory that `fi_freeinfo` frees.
///
/// # Safety
/// `T` may be all zeros.
unsafe fn zeroed<T>() -> *mut T {
    // SAFETY: a size above 0.
    unsafe { libc::calloc(1, size_of::<T>() + SPARE) }.cast()
}

unsafe fn free(info: *mut Info) {
    // SAFETY: the caller hands it over; all parts are from `calloc` and `strdup`, or null.
    unsafe {
        for part in [
            (*info).tx_attr.cast::<c_void>(),
            (*info).rx_attr.cast(),
            (*info).ep_attr.cast(),
            (*info).domain_attr.cast(),
            (*info).fabric_attr.cast(),
            (*info).src_addr,
            (*info).dest_addr,
        ] {
            libc::free(part);
        }
        libc::free(info.cast());
    }
}

/// Returns true if a name is ours or null.
///
/// # Safety
/// A string or null.
unsafe fn is_ours(name: *const c_char) -> bool {
    // SAFETY: as said.
    name.is_null() || unsafe { CStr::from_ptr(name) } == NAME
}

/// Returns true if this provider meets the hints.
///
/// # Safety
/// Valid as libfabric passes it.
unsafe fn fits(hints: &Info) -> bool {
    // SAFETY: each part is a valid structure or null.
    let (ep, domain, fabric, tx, rx) = unsafe {
        (
            hints.ep_attr.as_ref(),
            hints.domain_attr.as_ref(),
            hints.fabric_attr.as_ref(),
            hints.tx_attr.as_ref(),
            hints.rx_attr.as_ref(),
        )
    };
    let optional = |value: c_int, ours: c_int| value == 0 || value == ours;
    // SAFETY: names are strings.
    let names =
        unsafe { domain.is_none_or(|d| is_ours(d.name)) && fabric.is_none_or(|f| is_ours(f.name)) };
    names
        && hints.caps & !CAPS == 0
        && (hints.addr_format == 0 || hints.addr_format == FORMAT)
        && ep.is_none_or(|ep| {
            optional(ep.kind, FI_EP_RDM)
                && (ep.protocol == 0 || ep.protocol == FI_PROTO_WEFT)
                && ep.max_msg_size <= MAX_MESSAGE
                && ep.tx_ctx_cnt <= 1
                && ep.rx_ctx_cnt <= 1
                && ep.auth_key_size == 0
        })
        && domain
            .is_none_or(|d| d.cq_data_size <= 8 && d.caps & !(FI_LOCAL_COMM | FI_REMOTE_COMM) == 0)
        && tx.is_none_or(|tx| {
            tx.caps & !CAPS == 0
                && tx.op_flags & !TX_FLAGS == 0
                && tx.msg_order & !FI_ORDER_SAS == 0
                && tx.comp_order == 0
                && tx.inject_size <= inject_size()
                && tx.size <= QUEUE
                && tx.iov_limit <= RANGES
                && tx.rma_iov_limit == 0
        })
        && rx.is_none_or(|rx| {
            rx.caps & !CAPS == 0
                && rx.op_flags & !(FI_COMPLETION | FI_MULTI_RECV) == 0
                && rx.msg_order & !FI_ORDER_SAS == 0
                && rx.comp_order == 0
                && rx.size <= QUEUE
                && rx.iov_limit <= 1
        })
}

/// See `fi_getinfo(3)`.
pub(crate) unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const Info,
    out: *mut *mut Info,
) -> c_int {
    // SAFETY: a valid structure or null.
    let hints = unsafe { hints.as_ref() };
    // SAFETY: as above.
    if hints.is_some_and(|hints| !unsafe { fits(hints) }) {
        return -libc::ENODATA;
    }
    let (mut from, mut to) = (None, None);
    if !node.is_null() || flags & FI_SOURCE != 0 {
        // SAFETY: strings or null.
        let Some(addr) = (unsafe { service::named(node, service) }) else {
            return -libc::ENODATA;
        };
        if flags & FI_SOURCE != 0 {
            from = Some(addr);
        } else if addr.port() != 0 {
            to = Some(addr);
        } else {
            // Nothing leads to an endpoint without a port.
            return -libc::ENODATA;
        }
    }
    // SAFETY: all of these may be zeros, and are freed below or by libfabric.
    unsafe {
        let info: *mut Info = zeroed();
        if info.is_null() {
            return -libc::ENOMEM;
        }
        (*info).tx_attr = zeroed();
        (*info).rx_attr = zeroed();
        (*info).ep_attr = zeroed();
        (*info).domain_attr = zeroed();
        (*info).fabric_attr = zeroed();
        (*info).src_addr = libc::calloc(1, ADDRESS);
        let parts = [
            (*info).tx_attr.is_null(),
            (*info).rx_attr.is_null(),
            (*info).ep_attr.is_null(),
            (*info).domain_attr.is_null(),
            (*info).fabric_attr.is_null(),
            (*info).src_addr.is_null(),
        ];
        if parts.contains(&true) {
            free(info);
            return -libc::ENOMEM;
        }
        describe(&mut *info, hints, version);
        let from = from.filter(|from| !from.ip().is_unspecified() || from.port() != 0);
        let from = from.or_else(|| hints.and_then(source));
        let from = from.unwrap_or_else(usual_address);
        let bytes = |addr| Address { addr, key: 0 }.to_bytes();
        (*info).src_addr.cast::<[u8; ADDRESS]>().write(bytes(from));
        (*info).src_addrlen = ADDRESS;
        if let Some(to) = to {
            (*info).dest_addr = libc::calloc(1, ADDRESS);
            if (*info).dest_addr.is_null() {
                free(info);
                return -libc::ENOMEM;
            }
            (*info).dest_addr.cast::<[u8; ADDRESS]>().write(bytes(to));
            (*info).dest_addrlen = ADDRESS;
        }
        out.write(info);
    }
    0
}

/// The address that a description asks for as the endpoint's own; its port is one at which peers find the endpoint, 0: none. Its key means nothing.
pub(crate) fn source(info: &Info) -> Option<SocketAddr> {
    if info.src_addr.is_null() || info.src_addrlen != ADDRESS {
        return None;
    }
    // SAFETY: `ADDRESS` bytes are there.
    let mut bytes: [u8; ADDRESS] = unsafe { info.src_addr.cast::<[u8; ADDRESS]>().read() };
    let none = bytes[16..18] == [0; 2];
    if none {
        // An address has a port.
        bytes[17] = 1;
    }
    let mut addr = Address::from_bytes(&bytes)?.addr;
    if none {
        addr.set_port(0);
    }
    Some(addr)
}

unsafe fn describe(info: &mut Info, hints: Option<&Info>, version: u32) {
    let asked = hints.map_or(0, |hints| hints.caps);
    let caps = if asked == 0 {
        CAPS
    } else {
        asked | FI_SEND | FI_RECV | FI_LOCAL_COMM | FI_REMOTE_COMM
    };
    info.caps = caps;
    info.addr_format = FORMAT;
    // SAFETY: the caller has made all of them; hints are valid or null.
    unsafe {
        let of_tx = hints.and_then(|h| h.tx_attr.as_ref());
        let of_rx = hints.and_then(|h| h.rx_attr.as_ref());
        info.tx_attr.write(TxAttr {
            caps: caps & !(FI_RECV | FI_DIRECTED_RECV | FI_MULTI_RECV | FI_SOURCE),
            mode: 0,
            op_flags: of_tx.map_or(0, |tx| tx.op_flags),
            msg_order: FI_ORDER_SAS,
            comp_order: 0,
            inject_size: inject_size(),
            size: QUEUE,
            iov_limit: RANGES,
            rma_iov_limit: 0,
            tclass: 0,
        });
        info.rx_attr.write(RxAttr {
            caps: caps & !FI_SEND,
            mode: 0,
            op_flags: of_rx.map_or(0, |rx| rx.op_flags),
            msg_order: FI_ORDER_SAS,
            comp_order: 0,
            total_buffered_recv: 0,
            size: QUEUE,
            iov_limit: 1,
        });
        let ep: &mut EpAttr = &mut *info.ep_attr;
        ep.kind = FI_EP_RDM;
        ep.protocol = FI_PROTO_WEFT;
        ep.protocol_version = 1;
        ep.max_msg_size = MAX_MESSAGE;
        ep.mem_tag_format = FI_TAG_GENERIC;
        ep.tx_ctx_cnt = 1;
        ep.rx_ctx_cnt = 1;
        let of_domain = hints.and_then(|h| h.domain_attr.as_ref());
        let asked = |get: fn(&DomainAttr) -> c_int, ours: c_int| {
            of_domain.map(get).filter(|v| *v != 0).unwrap_or(ours)
        };
        let domain: &mut DomainAttr = &mut *info.domain_attr;
        domain.name = libc::strdup(NAME.as_ptr());
        // Any model of threads and any kind of progress will do.
        domain.threading = asked(|d| d.threading, FI_THREAD_SAFE);
        domain.control_progress = asked(|d| d.control_progress, FI_PROGRESS_MANUAL);
        domain.data_progress = asked(|d| d.data_progress, FI_PROGRESS_MANUAL);
        domain.resource_mgmt = FI_RM_ENABLED;
        domain.av_type = asked(|d| d.av_type, FI_AV_TABLE);
        domain.mr_key_size = 8;
        domain.cq_data_size = 8;
        domain.cq_cnt = 1024;
        domain.ep_cnt = 1024;
        domain.tx_ctx_cnt = 1024;
        domain.rx_ctx_cnt = 1024;
        domain.cntr_cnt = 1024;
        domain.max_ep_tx_ctx = 1;
        domain.max_ep_rx_ctx = 1;
        domain.mr_iov_limit = 1;
        domain.caps = FI_LOCAL_COMM | FI_REMOTE_COMM;
        let fabric: &mut FabricAttr = &mut *info.fabric_attr;
        fabric.name = libc::strdup(NAME.as_ptr());
        // libfabric fills in the provider's name.
        fabric.api_version = version;
    }
}

/// Default address of an endpoint: `WEFT_FI_ADDR`, the first one of this host that others can reach, or the loopback address.
pub(crate) fn usual_address() -> SocketAddr {
    // Opening the domain refuses what is wrong.
    let ip = settings::mpi_address().unwrap_or(Ipv4Addr::LOCALHOST.into());
    SocketAddr::from((ip, 0))
}
