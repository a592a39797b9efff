//! Types and constants of `<sys/exs.h>`, which documents them. A test compares the two, as a C compiler sees them.

use std::ffi::{c_int, c_short, c_void};

use libc::{off_t, size_t, sockaddr, socklen_t, timeval};

macro_rules! constants {
    ($($name:ident = $value:expr;)*) => {
        $(pub const $name: i64 = $value;)*
        /// Every constant with its value, for the test of the header.
        pub const CONSTANTS: &[(&str, i64)] = &[$((stringify!($name), $value)),*];
    };
}

constants! {
    EXS_VERSION1 = 1;
    EXS_VERSION = 1;
    EXS_QHANDLE_INVALID = -1;
    EXS_MHANDLE_INVALID = -1;
    EXS_MHANDLE_UNREGISTERED = 0;
    EXS_MRF_SHARED = 0x1;
    EXS_IN_PLACE = 0x0100_0000;
    EXS_CAF_FILDES = 0x1;
    EXS_CAF_AHANDLE = 0x2;
    EXS_SHUT_WR = 1;
    EXS_POLLIN = 0x01;
    EXS_POLLOUT = 0x04;
    EXS_POLLERR = 0x08;
    EXS_POLLHUP = 0x10;
    EXS_FDV_TO_END = -1;
    EXS_IOVEC = 1;
    EXS_FDVEC = 2;
    EXS_EVT_POLL = 1;
    EXS_EVT_CONNECT = 2;
    EXS_EVT_ACCEPT = 3;
    EXS_EVT_SEND = 4;
    EXS_EVT_RECV = 5;
    EXS_EVT_SENDMSG = 6;
    EXS_EVT_RECVMSG = 7;
    EXS_EVT_SENDFILE = 8;
    EXS_EVT_SENDTIMEOUT = 9;
    EXS_EVT_RECVTIMEOUT = 10;
    EXS_EVT_SHUTDOWN = 11;
    EXS_EVT_CLOSE = 12;
    EXS_EVF_IN_PLACE = 0x1;
    EXS_EVF_TRUNC = 0x2;
    EXS_EVTVEC_MAX = 4096;
    EXS_QATTR_DEPTH = 1;
    EXS_QATTR_SIGNAL = 2;
    EXS_QATTR_EVENTS = 3;
    EXS_QATTR_WAIT = 4;
    EXS_SIG_DISABLE = 0;
    EXS_SIG_ENABLE = 1;
    EXS_WAIT_ADAPTIVE = 0;
    EXS_WAIT_NOTIFY = 1;
    EXS_WAIT_BUSY_POLL = 2;
    SO_ASYNC_RECV_ORDERED = 0x4501;
    SO_ASYNC_SEND_TIMEOUT = 0x4502;
    SO_ASYNC_RECV_TIMEOUT = 0x4503;
    EXS_TIMEOUT_ONCE = 0x1;
    EXS_F_GETCREDITS = 0x4501;
    EXS_F_SETCREDITS = 0x4502;
    EXS_F_GETSMALLPACKET = 0x4503;
    EXS_F_SETSMALLPACKET = 0x4504;
    EXS_F_GETBUFFER = 0x4505;
    EXS_F_SETBUFFER = 0x4506;
    EXS_F_GETMODE = 0x4507;
    EXS_F_SETMODE = 0x4508;
    EXS_F_GETDESIGN = 0x4509;
    EXS_F_SETDESIGN = 0x450a;
    EXS_F_GETCRC = 0x450b;
    EXS_F_SETCRC = 0x450c;
    EXS_F_GETSTATS = 0x450d;
    EXS_MODE_DYNAMIC = 0;
    EXS_MODE_PUBLISHED = 3;
    EXS_MODE_DIRECT = 1;
    EXS_MODE_INDIRECT = 2;
    EXS_DESIGN_ADVERT = 0;
    EXS_DESIGN_SOURCE = 1;
}

pub type Version = c_int;
pub type QHandle = c_int;
pub type MHandle = c_int;

/// A value of the program. It is never followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct AHandle(pub *mut c_void);
// SAFETY: only carried along and compared.
unsafe impl Send for AHandle {}
// SAFETY: as above.
unsafe impl Sync for AHandle {}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct IoVec {
    pub iov_base: *mut c_void,
    pub iov_len: size_t,
    pub iov_mhandle: MHandle,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct FdVec {
    pub fdv_fd: c_int,
    pub fdv_offset: off_t,
    pub fdv_len: size_t,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct MsgHdr {
    pub msg_name: *mut c_void,
    pub msg_namelen: socklen_t,
    pub msg_iovlen: c_int,
    pub msg_iov: *mut IoVec,
    pub msg_flags: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub union XferVec {
    pub xf_iovec: IoVec,
    pub xf_fdvec: FdVec,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct XferFile {
    pub xf_type: c_int,
    pub xf_vec: XferVec,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct AcceptAddr {
    pub aa_addr: *mut sockaddr,
    pub aa_addrlen: socklen_t,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct PollFd {
    pub pfd_fd: c_int,
    pub pfd_events: c_short,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct EvtAccept {
    pub exs_evt_new_socket: c_int,
    pub exs_evt_addr: *mut AcceptAddr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct EvtPoll {
    pub exs_evt_events: c_short,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct EvtXfer {
    pub exs_evt_buffer: *mut c_void,
    pub exs_evt_length: size_t,
    pub exs_evt_mhandle: MHandle,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct EvtXferMsg {
    pub exs_evt_msg: *mut MsgHdr,
    pub exs_evt_length: size_t,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct EvtXferFile {
    pub exs_evt_vec: *const XferFile,
    pub exs_evt_veclen: c_int,
    pub exs_evt_length: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub union EvtUnion {
    pub exs_evt_accept: EvtAccept,
    pub exs_evt_poll: EvtPoll,
    pub exs_evt_xfer: EvtXfer,
    pub exs_evt_xfermsg: EvtXferMsg,
    pub exs_evt_xferfile: EvtXferFile,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Event {
    pub exs_evt_type: c_int,
    pub exs_evt_errno: c_int,
    pub exs_evt_socket: c_int,
    pub exs_evt_flags: c_int,
    pub exs_evt_ahandle: AHandle,
    pub exs_evt_union: EvtUnion,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Signal {
    pub sig_action: c_int,
    pub sig_fd: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct Timeout {
    pub to_time: timeval,
    pub to_flags: c_int,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Stats {
    pub st_direct_sent: u64,
    pub st_direct_bytes_sent: u64,
    pub st_indirect_sent: u64,
    pub st_indirect_bytes_sent: u64,
    pub st_small_sent: u64,
    pub st_small_bytes_sent: u64,
    pub st_direct_received: u64,
    pub st_direct_bytes_received: u64,
    pub st_indirect_received: u64,
    pub st_indirect_bytes_received: u64,
    pub st_small_received: u64,
    pub st_small_bytes_received: u64,
    pub st_mode_switches: u64,
    pub st_adverts_sent: u64,
    pub st_adverts_received: u64,
    pub st_adverts_dropped: u64,
    pub st_credit_stalls: u64,
    pub st_ring_stalls: u64,
    pub st_retracts: u64,
    pub st_acks: u64,
    pub st_credit_messages: u64,
}
