//! The declarations of `<rdma/rdma_cma.h>` and `<rdma/rsocket.h>` (rdma-core 44), as those of verbs in [`crate`].

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::{
    c_constants, c_enums, c_structs, ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid,
    ibv_pd, ibv_qp, ibv_qp_type, ibv_sa_path_rec, ibv_srq,
};

c_constants! {
    RDMA_IB_IP_PS_MASK: u64 = 0xFFFF_FFFF_FFFF_0000,
    RDMA_IB_IP_PORT_MASK: u64 = 0xFFFF,
    RDMA_IB_IP_PS_TCP: u64 = 0x0106_0000,
    RDMA_IB_IP_PS_UDP: u64 = 0x0111_0000,
    RDMA_IB_PS_IB: u64 = 0x013F_0000,
    RDMA_UDP_QKEY: u32 = 0x0123_4567,
    RAI_PASSIVE: c_int = 1,
    RAI_NUMERICHOST: c_int = 2,
    RAI_NOROUTE: c_int = 4,
    RAI_FAMILY: c_int = 8,
    SOL_RDMA: c_int = 0x1_0000,
}

c_enums! {
    enum rdma_cm_event_type: c_uint {
        RDMA_CM_EVENT_ADDR_RESOLVED = 0, RDMA_CM_EVENT_ADDR_ERROR = 1, RDMA_CM_EVENT_ROUTE_RESOLVED = 2,
        RDMA_CM_EVENT_ROUTE_ERROR = 3, RDMA_CM_EVENT_CONNECT_REQUEST = 4, RDMA_CM_EVENT_CONNECT_RESPONSE = 5,
        RDMA_CM_EVENT_CONNECT_ERROR = 6, RDMA_CM_EVENT_UNREACHABLE = 7, RDMA_CM_EVENT_REJECTED = 8,
        RDMA_CM_EVENT_ESTABLISHED = 9, RDMA_CM_EVENT_DISCONNECTED = 10, RDMA_CM_EVENT_DEVICE_REMOVAL = 11,
        RDMA_CM_EVENT_MULTICAST_JOIN = 12, RDMA_CM_EVENT_MULTICAST_ERROR = 13, RDMA_CM_EVENT_ADDR_CHANGE = 14,
        RDMA_CM_EVENT_TIMEWAIT_EXIT = 15,
    }
    enum rdma_port_space: c_uint { RDMA_PS_IPOIB = 2, RDMA_PS_TCP = 0x106, RDMA_PS_UDP = 0x111, RDMA_PS_IB = 0x13f }
    enum: c_uint { RDMA_MAX_RESP_RES = 255, RDMA_MAX_INIT_DEPTH = 255 }
    enum rdma_cm_join_mc_attr_mask: c_uint {
        RDMA_CM_JOIN_MC_ATTR_ADDRESS = 1 << 0, RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS = 1 << 1,
        RDMA_CM_JOIN_MC_ATTR_RESERVED = 1 << 2,
    }
    enum rdma_cm_mc_join_flags: c_uint {
        RDMA_MC_JOIN_FLAG_FULLMEMBER = 0, RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER = 1, RDMA_MC_JOIN_FLAG_RESERVED = 2,
    }
    enum: c_uint { RDMA_OPTION_ID = 0, RDMA_OPTION_IB = 1 }
    enum: c_uint {
        RDMA_OPTION_ID_TOS = 0, RDMA_OPTION_ID_REUSEADDR = 1, RDMA_OPTION_ID_AFONLY = 2, RDMA_OPTION_ID_ACK_TIMEOUT = 3,
    }
    enum: c_uint { RDMA_OPTION_IB_PATH = 1 }
    enum: c_uint { RDMA_SQSIZE = 0, RDMA_RQSIZE = 1, RDMA_INLINE = 2, RDMA_IOMAPSIZE = 3, RDMA_ROUTE = 4 }
}

c_structs! {
    struct rdma_ib_addr { sgid: ibv_gid, dgid: ibv_gid, pkey: u16 }
    union rdma_addr_src {
        src_addr: sockaddr, src_sin: sockaddr_in, src_sin6: sockaddr_in6, src_storage: sockaddr_storage,
    }
    union rdma_addr_dst {
        dst_addr: sockaddr, dst_sin: sockaddr_in, dst_sin6: sockaddr_in6, dst_storage: sockaddr_storage,
    }
    union rdma_addr_addr { ibaddr: rdma_ib_addr }
    struct rdma_addr { src: rdma_addr_src, dst: rdma_addr_dst, addr: rdma_addr_addr }
    struct rdma_route { addr: rdma_addr, path_rec: *mut ibv_sa_path_rec, num_paths: c_int }
    struct rdma_event_channel { fd: c_int }
    struct rdma_cm_id {
        verbs: *mut ibv_context, channel: *mut rdma_event_channel, context: *mut c_void, qp: *mut ibv_qp, route: rdma_route,
        ps: rdma_port_space, port_num: u8, event: *mut rdma_cm_event, send_cq_channel: *mut ibv_comp_channel,
        send_cq: *mut ibv_cq, recv_cq_channel: *mut ibv_comp_channel, recv_cq: *mut ibv_cq, srq: *mut ibv_srq,
        pd: *mut ibv_pd, qp_type: ibv_qp_type,
    }
    struct rdma_conn_param {
        private_data: *const c_void, private_data_len: u8, responder_resources: u8, initiator_depth: u8, flow_control: u8,
        retry_count: u8, rnr_retry_count: u8, srq: u8, qp_num: u32,
    }
    struct rdma_ud_param {
        private_data: *const c_void, private_data_len: u8, ah_attr: ibv_ah_attr, qp_num: u32, qkey: u32,
    }
    union rdma_cm_event_param { conn: rdma_conn_param, ud: rdma_ud_param }
    struct rdma_cm_event {
        id: *mut rdma_cm_id, listen_id: *mut rdma_cm_id, event: rdma_cm_event_type, status: c_int,
        param: rdma_cm_event_param,
    }
    struct rdma_addrinfo {
        ai_flags: c_int, ai_family: c_int, ai_qp_type: c_int, ai_port_space: c_int, ai_src_len: socklen_t,
        ai_dst_len: socklen_t, ai_src_addr: *mut sockaddr, ai_dst_addr: *mut sockaddr, ai_src_canonname: *mut c_char,
        ai_dst_canonname: *mut c_char, ai_route_len: usize, ai_route: *mut c_void, ai_connect_len: usize,
        ai_connect: *mut c_void, ai_next: *mut rdma_addrinfo,
    }
    struct rdma_cm_join_mc_attr_ex { comp_mask: u32, join_flags: u32, addr: *mut sockaddr }
}
