//! Names of states, events and results for people, and rates of links. The texts are rdma-core's: scripts search for them.

use std::ffi::{CStr, c_char, c_int};

use super::cm::types::rdma_cm_event_type;
use super::types::{
    IBV_RATE_MAX, ibv_event_type, ibv_node_type, ibv_port_state, ibv_rate, ibv_wc_status,
    ibv_wr_opcode,
};

const NODE_TYPES: &[&CStr] = &[
    c"unknown",
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

const PORT_STATES: &[&CStr] = &[
    c"no state change (NOP)",
    c"down",
    c"init",
    c"armed",
    c"active",
    c"active defer",
];

const EVENTS: &[&CStr] = &[
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

const STATUSES: &[&CStr] = &[
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

const OPCODES: &[&CStr] = &[
    c"rdma-write",
    c"rdma-write-with-imm",
    c"send",
    c"send-with-imm",
    c"rdma-read",
    c"atomic-cmp-and-swp",
    c"atomic-fetch-and-add",
    c"local-inv",
    c"bind-mw",
    c"send-with-inv",
    c"tso",
    c"driver1",
    c"unknown",
    c"unknown",
    c"flush",
    c"atomic-write",
];

const CM_EVENTS: &[&CStr] = &[
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
    c"RDMA_CM_EVENT_ADDRINFO_RESOLVED",
    c"RDMA_CM_EVENT_ADDRINFO_ERROR",
    c"RDMA_CM_EVENT_USER",
];

/// Each rate: its code, the data rate on the wire in Mbit/s, and the multiple of 2.5 Gbit/s where rdma-core knows one.
const RATES: &[(ibv_rate, c_int, Option<c_int>)] = &[
    (2, 2_500, Some(1)),
    (3, 10_000, Some(4)),
    (4, 30_000, Some(12)),
    (5, 5_000, Some(2)),
    (6, 20_000, Some(8)),
    (7, 40_000, Some(16)),
    (8, 60_000, Some(24)),
    (9, 80_000, Some(32)),
    (10, 120_000, Some(48)),
    (11, 14_062, None),
    (12, 56_250, None),
    (13, 112_500, None),
    (14, 168_750, None),
    (15, 25_781, None),
    (16, 103_125, None),
    (17, 206_250, None),
    (18, 309_375, None),
    (19, 28_125, Some(11)),
    (20, 53_125, Some(20)),
    (21, 425_000, Some(160)),
    (22, 637_500, Some(240)),
    (23, 850_000, Some(320)),
    (24, 1_275_000, Some(480)),
];

fn pick(
    names: &[&'static CStr],
    index: Result<usize, impl Sized>,
    other: &'static CStr,
) -> *const c_char {
    let name = index.ok().and_then(|index| names.get(index));
    name.copied().unwrap_or(other).as_ptr()
}

pub fn ibv_node_type_str(node_type: ibv_node_type) -> *const c_char {
    pick(NODE_TYPES, usize::try_from(node_type), c"unknown")
}

pub fn ibv_port_state_str(port_state: ibv_port_state) -> *const c_char {
    pick(PORT_STATES, usize::try_from(port_state), c"unknown")
}

/// The name of an asynchronous event.
pub fn ibv_event_type_str(event: ibv_event_type) -> *const c_char {
    pick(EVENTS, usize::try_from(event), c"unknown")
}

/// The status of a work completion.
pub fn ibv_wc_status_str(status: ibv_wc_status) -> *const c_char {
    pick(STATUSES, usize::try_from(status), c"unknown")
}

/// The opcode of a work request; drivers call this function.
pub fn ibv_wr_opcode_str(opcode: ibv_wr_opcode) -> *const c_char {
    pick(OPCODES, usize::try_from(opcode), c"unknown")
}

/// The name of an event of the connection manager.
pub fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    pick(CM_EVENTS, usize::try_from(event), c"UNKNOWN EVENT")
}

/// A rate as a multiple of 2.5 Gbit/s, or -1.
pub fn ibv_rate_to_mult(rate: ibv_rate) -> c_int {
    let found = RATES.iter().find(|known| known.0 == rate);
    found.and_then(|known| known.2).unwrap_or(-1)
}

/// The rate of `mult` times 2.5 Gbit/s, or `IBV_RATE_MAX`.
pub fn mult_to_ibv_rate(mult: c_int) -> ibv_rate {
    let found = RATES.iter().find(|known| known.2 == Some(mult));
    found.map_or(IBV_RATE_MAX, |known| known.0)
}

/// A rate in Mbit/s, or -1.
pub fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int {
    let found = RATES.iter().find(|known| known.0 == rate);
    found.map_or(-1, |known| known.1)
}

/// The rate of `mbps` Mbit/s, or `IBV_RATE_MAX`.
pub fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate {
    let found = RATES.iter().find(|known| known.1 == mbps);
    found.map_or(IBV_RATE_MAX, |known| known.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Library(*mut libc::c_void);

    impl Library {
        fn of_the_system(name: &CStr) -> Option<Self> {
            // SAFETY: a string.
            let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            if library.is_null() {
                eprintln!("skipped: there is no {name:?}");
                return None;
            }
            Some(Self(library))
        }

        fn call<F: Copy>(&self, name: &CStr) -> F {
            assert_eq!(size_of::<F>(), size_of::<usize>());
            // SAFETY: strings, and an open library; F is the function's type.
            unsafe {
                let address = libc::dlsym(self.0, name.as_ptr());
                assert!(!address.is_null(), "{name:?}");
                std::mem::transmute_copy(&address)
            }
        }
    }

    fn same(ours: fn(u32) -> *const c_char, theirs: &Library, name: &CStr) {
        let theirs: extern "C" fn(u32) -> *const c_char = theirs.call(name);
        // all there are, and some that there are not
        for value in (0..300).chain([u32::MAX, i32::MAX as u32, 1 << 31]) {
            // SAFETY: both return strings that stay.
            let (ours, theirs) =
                unsafe { (CStr::from_ptr(ours(value)), CStr::from_ptr(theirs(value))) };
            assert_eq!(ours, theirs, "{name:?}({value})");
        }
    }

    #[test]
    fn the_words_are_those_of_the_systems_libraries() {
        if let Some(verbs) = Library::of_the_system(c"libibverbs.so.1") {
            same(
                |value| ibv_node_type_str(value as i32),
                &verbs,
                c"ibv_node_type_str",
            );
            same(ibv_port_state_str, &verbs, c"ibv_port_state_str");
            same(ibv_event_type_str, &verbs, c"ibv_event_type_str");
            same(ibv_wc_status_str, &verbs, c"ibv_wc_status_str");
        }
        if let Some(rdmacm) = Library::of_the_system(c"librdmacm.so.1") {
            // The last three came with rdma-core 57 and 62.
            let of_old = |event| rdma_event_str(if event < 16 { event } else { u32::MAX });
            same(of_old, &rdmacm, c"rdma_event_str");
        }
    }

    #[test]
    fn the_rates_are_those_of_the_systems_library() {
        let Some(verbs) = Library::of_the_system(c"libibverbs.so.1") else {
            return;
        };
        let to_mult: extern "C" fn(u32) -> c_int = verbs.call(c"ibv_rate_to_mult");
        let to_mbps: extern "C" fn(u32) -> c_int = verbs.call(c"ibv_rate_to_mbps");
        for rate in 0..300 {
            assert_eq!(ibv_rate_to_mult(rate), to_mult(rate), "{rate}");
            assert_eq!(ibv_rate_to_mbps(rate), to_mbps(rate), "{rate}");
        }
        let of_mult: extern "C" fn(c_int) -> u32 = verbs.call(c"mult_to_ibv_rate");
        let of_mbps: extern "C" fn(c_int) -> u32 = verbs.call(c"mbps_to_ibv_rate");
        for value in -10..1_300_000 {
            assert_eq!(mult_to_ibv_rate(value), of_mult(value), "{value}");
            assert_eq!(mbps_to_ibv_rate(value), of_mbps(value), "{value}");
        }
    }

    #[test]
    fn what_is_unknown_has_a_name_too() {
        // SAFETY: strings that stay.
        let text = |name: *const c_char| unsafe { CStr::from_ptr(name) };
        assert_eq!(text(ibv_node_type_str(-1)), c"unknown");
        assert_eq!(text(ibv_port_state_str(6)), c"unknown");
        assert_eq!(text(rdma_event_str(u32::MAX)), c"UNKNOWN EVENT");
        assert_eq!(ibv_rate_to_mult(11), -1);
        assert_eq!(mbps_to_ibv_rate(1), IBV_RATE_MAX);
    }
}
