//! Types and numbers of libfabric's headers (`rdma/fabric.h` and its siblings), version 1.17, with C's layout. tests/layout.rs compares them.

use std::ffi::{c_char, c_int, c_void};

pub const FI_MSG: u64 = 1 << 1;
pub const FI_TAGGED: u64 = 1 << 3;
pub const FI_RECV: u64 = 1 << 10;
pub const FI_SEND: u64 = 1 << 11;
pub const FI_MULTI_RECV: u64 = 1 << 16;
pub const FI_REMOTE_CQ_DATA: u64 = 1 << 17;
pub const FI_PEEK: u64 = 1 << 19;
pub const FI_COMPLETION: u64 = 1 << 24;
pub const FI_INJECT: u64 = 1 << 25;
pub const FI_INJECT_COMPLETE: u64 = 1 << 26;
pub const FI_TRANSMIT_COMPLETE: u64 = 1 << 27;
pub const FI_DELIVERY_COMPLETE: u64 = 1 << 28;
pub const FI_MATCH_COMPLETE: u64 = 1 << 31;
pub const FI_LOCAL_COMM: u64 = 1 << 51;
pub const FI_REMOTE_COMM: u64 = 1 << 52;
pub const FI_SOURCE: u64 = 1 << 57;
pub const FI_DISCARD: u64 = 1 << 58;
/// The same bit represents `FI_CLAIM`, `FI_DIRECTED_RECV` and `FI_SELECTIVE_COMPLETION`, each in its place.
pub const FI_CLAIM: u64 = 1 << 59;
pub const FI_DIRECTED_RECV: u64 = 1 << 59;
pub const FI_SELECTIVE_COMPLETION: u64 = 1 << 59;

pub const FI_ORDER_SAS: u64 = 1 << 8;
pub const FI_ADDR_UNSPEC: u64 = u64::MAX;
/// An address format of our own.
pub const FORMAT: u32 = 1 << 31 | 0x5757;

pub const FI_EP_RDM: c_int = 3;
pub const FI_AV_TABLE: c_int = 2;
pub const FI_THREAD_SAFE: c_int = 1;
pub const FI_PROGRESS_MANUAL: c_int = 2;
pub const FI_RM_ENABLED: c_int = 2;
pub const FI_TAG_GENERIC: u64 = 0xaaaa_aaaa_aaaa_aaaa;
pub const FI_PROTO_WEFT: u32 = 1 << 31 | 0x5757;

pub const FI_CLASS_FABRIC: usize = 1;
pub const FI_CLASS_DOMAIN: usize = 2;
pub const FI_CLASS_EP: usize = 3;
pub const FI_CLASS_AV: usize = 11;
pub const FI_CLASS_EQ: usize = 13;
pub const FI_CLASS_CQ: usize = 14;
pub const FI_CLASS_CNTR: usize = 15;

pub const FI_OPT_ENDPOINT: c_int = 0;
pub const FI_OPT_MIN_MULTI_RECV: c_int = 0;
pub const FI_ENABLE: c_int = 6;
pub const FI_GETOPSFLAG: c_int = 2;
pub const FI_SETOPSFLAG: c_int = 3;

pub const FI_CQ_FORMAT_UNSPEC: c_int = 0;
pub const FI_CQ_FORMAT_CONTEXT: c_int = 1;
pub const FI_CQ_FORMAT_MSG: c_int = 2;
pub const FI_CQ_FORMAT_DATA: c_int = 3;
pub const FI_CQ_FORMAT_TAGGED: c_int = 4;
pub const FI_WAIT_UNSPEC: c_int = 1;
pub const FI_WAIT_FD: c_int = 3;
pub const FI_GETWAIT: c_int = 5;
pub const FI_GETWAITOBJ: c_int = 16;

pub const FI_ETOOSMALL: c_int = 257;
pub const FI_EAVAIL: c_int = 259;
pub const FI_ETRUNC: c_int = 265;

/// A call that is not there: `nosys`.
pub type Missing = unsafe extern "C" fn() -> isize;

#[repr(C)]
pub struct Fid {
    pub fclass: usize,
    pub context: *mut c_void,
    pub ops: *const Ops,
}

#[repr(C)]
pub struct Ops {
    pub size: usize,
    pub close: unsafe extern "C" fn(*mut Fid) -> c_int,
    pub bind: unsafe extern "C" fn(*mut Fid, *mut Fid, u64) -> c_int,
    pub control: unsafe extern "C" fn(*mut Fid, c_int, *mut c_void) -> c_int,
    pub missing: [Missing; 3],
}

#[repr(C)]
pub struct TxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub inject_size: usize,
    pub size: usize,
    pub iov_limit: usize,
    pub rma_iov_limit: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct RxAttr {
    pub caps: u64,
    pub mode: u64,
    pub op_flags: u64,
    pub msg_order: u64,
    pub comp_order: u64,
    pub total_buffered_recv: usize,
    pub size: usize,
    pub iov_limit: usize,
}

#[repr(C)]
pub struct EpAttr {
    pub kind: c_int,
    pub protocol: u32,
    pub protocol_version: u32,
    pub max_msg_size: usize,
    pub msg_prefix_size: usize,
    pub max_order: [usize; 3],
    pub mem_tag_format: u64,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub auth_key_size: usize,
    pub auth_key: *mut u8,
}

#[repr(C)]
pub struct DomainAttr {
    pub domain: *mut c_void,
    pub name: *mut c_char,
    pub threading: c_int,
    pub control_progress: c_int,
    pub data_progress: c_int,
    pub resource_mgmt: c_int,
    pub av_type: c_int,
    pub mr_mode: c_int,
    pub mr_key_size: usize,
    pub cq_data_size: usize,
    pub cq_cnt: usize,
    pub ep_cnt: usize,
    pub tx_ctx_cnt: usize,
    pub rx_ctx_cnt: usize,
    pub max_ep_tx_ctx: usize,
    pub max_ep_rx_ctx: usize,
    pub max_ep_stx_ctx: usize,
    pub max_ep_srx_ctx: usize,
    pub cntr_cnt: usize,
    pub mr_iov_limit: usize,
    pub caps: u64,
    pub mode: u64,
    pub auth_key: *mut u8,
    pub auth_key_size: usize,
    pub max_err_data: usize,
    pub mr_cnt: usize,
    pub tclass: u32,
}

#[repr(C)]
pub struct FabricAttr {
    pub fabric: *mut c_void,
    pub name: *mut c_char,
    pub prov_name: *mut c_char,
    pub prov_version: u32,
    pub api_version: u32,
}

#[repr(C)]
pub struct Info {
    pub next: *mut Info,
    pub caps: u64,
    pub mode: u64,
    pub addr_format: u32,
    pub src_addrlen: usize,
    pub dest_addrlen: usize,
    pub src_addr: *mut c_void,
    pub dest_addr: *mut c_void,
    pub handle: *mut Fid,
    pub tx_attr: *mut TxAttr,
    pub rx_attr: *mut RxAttr,
    pub ep_attr: *mut EpAttr,
    pub domain_attr: *mut DomainAttr,
    pub fabric_attr: *mut FabricAttr,
    pub nic: *mut c_void,
}

#[repr(C)]
pub struct Provider {
    pub version: u32,
    pub fi_version: u32,
    pub context: [*mut c_void; 4],
    pub name: *const c_char,
    pub getinfo: unsafe extern "C" fn(
        u32,
        *const c_char,
        *const c_char,
        u64,
        *const Info,
        *mut *mut Info,
    ) -> c_int,
    pub fabric: unsafe extern "C" fn(*mut FabricAttr, *mut *mut FabricFid, *mut c_void) -> c_int,
    pub cleanup: unsafe extern "C" fn(),
}

#[repr(C)]
pub struct FabricFid {
    pub fid: Fid,
    pub ops: *const FabricOps,
    pub api_version: u32,
}

#[repr(C)]
pub struct FabricOps {
    pub size: usize,
    pub domain:
        unsafe extern "C" fn(*mut FabricFid, *mut Info, *mut *mut DomainFid, *mut c_void) -> c_int,
    pub passive_ep: Missing,
    pub eq_open:
        unsafe extern "C" fn(*mut FabricFid, *mut c_void, *mut *mut EqFid, *mut c_void) -> c_int,
    pub wait_open: Missing,
    pub trywait: unsafe extern "C" fn(*mut FabricFid, *mut *mut Fid, c_int) -> c_int,
    pub domain2: Missing,
}

#[repr(C)]
pub struct EqFid {
    pub fid: Fid,
    pub ops: *const EqOps,
}

#[repr(C)]
pub struct EqOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut EqFid, *mut u32, *mut c_void, usize, u64) -> isize,
    pub readerr: Missing,
    pub write: unsafe extern "C" fn(*mut EqFid, u32, *const c_void, usize, u64) -> isize,
    pub sread: unsafe extern "C" fn(*mut EqFid, *mut u32, *mut c_void, usize, c_int, u64) -> isize,
    pub strerror: Missing,
}

#[repr(C)]
pub struct DomainFid {
    pub fid: Fid,
    pub ops: *const DomainOps,
    pub mr: *const MrOps,
}

#[repr(C)]
pub struct DomainOps {
    pub size: usize,
    pub av_open:
        unsafe extern "C" fn(*mut DomainFid, *mut c_void, *mut *mut AvFid, *mut c_void) -> c_int,
    pub cq_open:
        unsafe extern "C" fn(*mut DomainFid, *mut CqAttr, *mut *mut CqFid, *mut c_void) -> c_int,
    pub endpoint:
        unsafe extern "C" fn(*mut DomainFid, *mut Info, *mut *mut EpFid, *mut c_void) -> c_int,
    pub scalable_ep: Missing,
    pub cntr_open:
        unsafe extern "C" fn(*mut DomainFid, *mut c_void, *mut *mut CntrFid, *mut c_void) -> c_int,
    pub missing: [Missing; 6],
}

#[repr(C)]
pub struct MrOps {
    pub size: usize,
    pub missing: [Missing; 3],
}

#[repr(C)]
pub struct AvFid {
    pub fid: Fid,
    pub ops: *const AvOps,
}

#[repr(C)]
pub struct AvOps {
    pub size: usize,
    pub insert:
        unsafe extern "C" fn(*mut AvFid, *const c_void, usize, *mut u64, u64, *mut c_void) -> c_int,
    pub insertsvc: unsafe extern "C" fn(
        *mut AvFid,
        *const c_char,
        *const c_char,
        *mut u64,
        u64,
        *mut c_void,
    ) -> c_int,
    pub insertsym: Missing,
    pub remove: unsafe extern "C" fn(*mut AvFid, *mut u64, usize, u64) -> c_int,
    pub lookup: unsafe extern "C" fn(*mut AvFid, u64, *mut c_void, *mut usize) -> c_int,
    pub straddr:
        unsafe extern "C" fn(*mut AvFid, *const c_void, *mut c_char, *mut usize) -> *const c_char,
    pub av_set: Missing,
}

#[repr(C)]
pub struct CqAttr {
    pub size: usize,
    pub flags: u64,
    pub format: c_int,
    pub wait_obj: c_int,
    pub signaling_vector: c_int,
    pub wait_cond: c_int,
    pub wait_set: *mut c_void,
}

#[repr(C)]
pub struct CqFid {
    pub fid: Fid,
    pub ops: *const CqOps,
}

#[repr(C)]
pub struct CqOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut CqFid, *mut c_void, usize) -> isize,
    pub readfrom: unsafe extern "C" fn(*mut CqFid, *mut c_void, usize, *mut u64) -> isize,
    pub readerr: unsafe extern "C" fn(*mut CqFid, *mut CqErrEntry, u64) -> isize,
    pub sread: unsafe extern "C" fn(*mut CqFid, *mut c_void, usize, *const c_void, c_int) -> isize,
    pub sreadfrom: unsafe extern "C" fn(
        *mut CqFid,
        *mut c_void,
        usize,
        *mut u64,
        *const c_void,
        c_int,
    ) -> isize,
    pub signal: Missing,
    pub strerror:
        unsafe extern "C" fn(*mut CqFid, c_int, *const c_void, *mut c_char, usize) -> *const c_char,
}

#[repr(C)]
pub struct CntrFid {
    pub fid: Fid,
    pub ops: *const CntrOps,
}

#[repr(C)]
pub struct CntrOps {
    pub size: usize,
    pub read: unsafe extern "C" fn(*mut CntrFid) -> u64,
    pub readerr: unsafe extern "C" fn(*mut CntrFid) -> u64,
    pub add: unsafe extern "C" fn(*mut CntrFid, u64) -> c_int,
    pub set: unsafe extern "C" fn(*mut CntrFid, u64) -> c_int,
    pub wait: unsafe extern "C" fn(*mut CntrFid, u64, c_int) -> c_int,
    pub adderr: unsafe extern "C" fn(*mut CntrFid, u64) -> c_int,
    pub seterr: unsafe extern "C" fn(*mut CntrFid, u64) -> c_int,
}

/// `fi_ops_rma` and `fi_ops_atomic`: none of their calls is there.
#[repr(C)]
pub struct NoOps<const N: usize> {
    pub size: usize,
    pub missing: [Missing; N],
}

/// `fi_cq_tagged_entry`; the other formats are its beginnings.
#[repr(C)]
pub struct CqEntry {
    pub op_context: *mut c_void,
    pub flags: u64,
    pub len: usize,
    pub buf: *mut c_void,
    pub data: u64,
    pub tag: u64,
}

#[repr(C)]
pub struct CqErrEntry {
    pub entry: CqEntry,
    pub olen: usize,
    pub err: c_int,
    pub prov_errno: c_int,
    pub err_data: *mut c_void,
    pub err_data_size: usize,
}

#[repr(C)]
pub struct EpFid {
    pub fid: Fid,
    pub ops: *const EpOps,
    pub cm: *const CmOps,
    pub msg: *const MsgOps,
    pub rma: *const NoOps<9>,
    pub tagged: *const TaggedOps,
    pub atomic: *const NoOps<13>,
    pub collective: *const NoOps<11>,
}

#[repr(C)]
pub struct EpOps {
    pub size: usize,
    pub cancel: unsafe extern "C" fn(*mut Fid, *mut c_void) -> isize,
    pub getopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *mut c_void, *mut usize) -> c_int,
    pub setopt: unsafe extern "C" fn(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int,
    pub missing: [Missing; 4],
}

#[repr(C)]
pub struct CmOps {
    pub size: usize,
    pub setname: Missing,
    pub getname: unsafe extern "C" fn(*mut Fid, *mut c_void, *mut usize) -> c_int,
    pub missing: [Missing; 7],
}

#[repr(C)]
pub struct Msg {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub context: *mut c_void,
    pub data: u64,
}

#[repr(C)]
pub struct MsgTagged {
    pub iov: *const libc::iovec,
    pub desc: *mut *mut c_void,
    pub iov_count: usize,
    pub addr: u64,
    pub tag: u64,
    pub ignore: u64,
    pub context: *mut c_void,
    pub data: u64,
}

type Mem = *const c_void;
type Ptr = *mut c_void;

#[repr(C)]
pub struct MsgOps {
    pub size: usize,
    pub recv: unsafe extern "C" fn(*mut EpFid, Ptr, usize, Ptr, u64, Ptr) -> isize,
    pub recvv: unsafe extern "C" fn(*mut EpFid, *const libc::iovec, Ptr, usize, u64, Ptr) -> isize,
    pub recvmsg: unsafe extern "C" fn(*mut EpFid, *const Msg, u64) -> isize,
    pub send: unsafe extern "C" fn(*mut EpFid, Mem, usize, Ptr, u64, Ptr) -> isize,
    pub sendv: unsafe extern "C" fn(*mut EpFid, *const libc::iovec, Ptr, usize, u64, Ptr) -> isize,
    pub sendmsg: unsafe extern "C" fn(*mut EpFid, *const Msg, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut EpFid, Mem, usize, u64) -> isize,
    pub senddata: unsafe extern "C" fn(*mut EpFid, Mem, usize, Ptr, u64, u64, Ptr) -> isize,
    pub injectdata: unsafe extern "C" fn(*mut EpFid, Mem, usize, u64, u64) -> isize,
}

#[repr(C)]
pub struct TaggedOps {
    pub size: usize,
    pub recv: unsafe extern "C" fn(*mut EpFid, Ptr, usize, Ptr, u64, u64, u64, Ptr) -> isize,
    pub recvv: unsafe extern "C" fn(
        *mut EpFid,
        *const libc::iovec,
        Ptr,
        usize,
        u64,
        u64,
        u64,
        Ptr,
    ) -> isize,
    pub recvmsg: unsafe extern "C" fn(*mut EpFid, *const MsgTagged, u64) -> isize,
    pub send: unsafe extern "C" fn(*mut EpFid, Mem, usize, Ptr, u64, u64, Ptr) -> isize,
    pub sendv:
        unsafe extern "C" fn(*mut EpFid, *const libc::iovec, Ptr, usize, u64, u64, Ptr) -> isize,
    pub sendmsg: unsafe extern "C" fn(*mut EpFid, *const MsgTagged, u64) -> isize,
    pub inject: unsafe extern "C" fn(*mut EpFid, Mem, usize, u64, u64) -> isize,
    pub senddata: unsafe extern "C" fn(*mut EpFid, Mem, usize, Ptr, u64, u64, u64, Ptr) -> isize,
    pub injectdata: unsafe extern "C" fn(*mut EpFid, Mem, usize, u64, u64, u64) -> isize,
}
