//! The structs and unions of `<infiniband/verbs.h>`, `verbs_api.h`, `sa.h` and `tm_types.h`, in their order.
//!
//! A field that C leaves without a name, or a member without a type name, is named after its struct. Where two fields of one size share a place, there is one
//! field here, with a comment.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libc::{pthread_cond_t, pthread_mutex_t, timespec};

use super::constants::*;
use super::{c_structs, call};

c_structs! {
    struct ibv_gid_global { subnet_prefix: u64, interface_id: u64 }
    union ibv_gid { raw: [u8; 16], global: ibv_gid_global }
    struct ibv_gid_entry {
        gid: ibv_gid, gid_index: u32, port_num: u32, gid_type: u32, ndev_ifindex: u32,
    }
    struct ibv_alloc_dm_attr { length: usize, log_align_req: u32, comp_mask: u32 }
    struct ibv_dm {
        context: *mut ibv_context,
        memcpy_to_dm: call!((*mut ibv_dm, dm_offset: u64, *const c_void, length: usize) -> c_int),
        memcpy_from_dm: call!((*mut c_void, *mut ibv_dm, dm_offset: u64, length: usize) -> c_int),
        comp_mask: u32, handle: u32,
    }
    struct ibv_device_attr {
        fw_ver: [c_char; 64], node_guid: u64, sys_image_guid: u64, max_mr_size: u64, page_size_cap: u64, vendor_id: u32,
        vendor_part_id: u32, hw_ver: u32, max_qp: c_int, max_qp_wr: c_int, device_cap_flags: c_uint, max_sge: c_int,
        max_sge_rd: c_int, max_cq: c_int, max_cqe: c_int, max_mr: c_int, max_pd: c_int, max_qp_rd_atom: c_int,
        max_ee_rd_atom: c_int, max_res_rd_atom: c_int, max_qp_init_rd_atom: c_int, max_ee_init_rd_atom: c_int,
        atomic_cap: ibv_atomic_cap, max_ee: c_int, max_rdd: c_int, max_mw: c_int, max_raw_ipv6_qp: c_int,
        max_raw_ethy_qp: c_int, max_mcast_grp: c_int, max_mcast_qp_attach: c_int, max_total_mcast_qp_attach: c_int,
        max_ah: c_int, max_fmr: c_int, max_map_per_fmr: c_int, max_srq: c_int, max_srq_wr: c_int, max_srq_sge: c_int,
        max_pkeys: u16, local_ca_ack_delay: u8, phys_port_cnt: u8,
    }
    struct ibv_query_device_ex_input { comp_mask: u32 }
    struct ibv_odp_caps_per_transport_caps { rc_odp_caps: u32, uc_odp_caps: u32, ud_odp_caps: u32 }
    struct ibv_odp_caps { general_caps: u64, per_transport_caps: ibv_odp_caps_per_transport_caps }
    struct ibv_tso_caps { max_tso: u32, supported_qpts: u32 }
    struct ibv_rss_caps {
        supported_qpts: u32, max_rwq_indirection_tables: u32, max_rwq_indirection_table_size: u32, rx_hash_fields_mask: u64,
        rx_hash_function: u8,
    }
    struct ibv_packet_pacing_caps { qp_rate_limit_min: u32, qp_rate_limit_max: u32, supported_qpts: u32 }
    struct ibv_tm_caps {
        max_rndv_hdr_size: u32, max_num_tags: u32, flags: u32, max_ops: u32, max_sge: u32,
    }
    struct ibv_cq_moderation_caps { max_cq_count: u16, max_cq_period: u16 }
    struct ibv_pci_atomic_caps { fetch_add: u16, swap: u16, compare_swap: u16 }
    struct ibv_device_attr_ex {
        orig_attr: ibv_device_attr, comp_mask: u32, odp_caps: ibv_odp_caps, completion_timestamp_mask: u64,
        hca_core_clock: u64, device_cap_flags_ex: u64, tso_caps: ibv_tso_caps, rss_caps: ibv_rss_caps, max_wq_type_rq: u32,
        packet_pacing_caps: ibv_packet_pacing_caps, raw_packet_caps: u32, tm_caps: ibv_tm_caps,
        cq_mod_caps: ibv_cq_moderation_caps, max_dm_size: u64, pci_atomic_caps: ibv_pci_atomic_caps, xrc_odp_caps: u32,
        phys_port_cnt_ex: u32,
    }
    struct ibv_port_attr {
        state: ibv_port_state, max_mtu: ibv_mtu, active_mtu: ibv_mtu, gid_tbl_len: c_int, port_cap_flags: u32,
        max_msg_sz: u32, bad_pkey_cntr: u32, qkey_viol_cntr: u32, pkey_tbl_len: u16, lid: u16, sm_lid: u16, lmc: u8,
        max_vl_num: u8, sm_sl: u8, subnet_timeout: u8, init_type_reply: u8, active_width: u8, active_speed: u8,
        phys_state: u8, link_layer: u8, flags: u8, port_cap_flags2: u16,
    }
    union ibv_async_event_element {
        cq: *mut ibv_cq, qp: *mut ibv_qp, srq: *mut ibv_srq, wq: *mut ibv_wq, port_num: c_int,
    }
    struct ibv_async_event { element: ibv_async_event_element, event_type: ibv_event_type }
    struct ibv_wc {
        wr_id: u64, status: ibv_wc_status, opcode: ibv_wc_opcode, vendor_err: u32, byte_len: u32,
        imm_data: u32, // or invalidated_rkey
        qp_num: u32, src_qp: u32, wc_flags: c_uint, pkey_index: u16, slid: u16, sl: u8, dlid_path_bits: u8,
    }
    struct ibv_mw_bind_info { mr: *mut ibv_mr, addr: u64, length: u64, mw_access_flags: c_uint }
    struct ibv_pd { context: *mut ibv_context, handle: u32 }
    struct ibv_td_init_attr { comp_mask: u32 }
    struct ibv_td { context: *mut ibv_context }
    struct ibv_xrcd_init_attr { comp_mask: u32, fd: c_int, oflags: c_int }
    struct ibv_xrcd { context: *mut ibv_context }
    struct ibv_mr {
        context: *mut ibv_context, pd: *mut ibv_pd, addr: *mut c_void, length: usize, handle: u32, lkey: u32, rkey: u32,
    }
    struct ibv_mw {
        context: *mut ibv_context, pd: *mut ibv_pd, rkey: u32, handle: u32, r#type: ibv_mw_type,
    }
    struct ibv_global_route {
        dgid: ibv_gid, flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8,
    }
    struct ibv_grh {
        version_tclass_flow: u32, paylen: u16, next_hdr: u8, hop_limit: u8, sgid: ibv_gid, dgid: ibv_gid,
    }
    struct ibv_ah_attr {
        grh: ibv_global_route, dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8,
    }
    struct ibv_srq_attr { max_wr: u32, max_sge: u32, srq_limit: u32 }
    struct ibv_srq_init_attr { srq_context: *mut c_void, attr: ibv_srq_attr }
    struct ibv_tm_cap { max_num_tags: u32, max_ops: u32 }
    struct ibv_srq_init_attr_ex {
        srq_context: *mut c_void, attr: ibv_srq_attr, comp_mask: u32, srq_type: ibv_srq_type, pd: *mut ibv_pd,
        xrcd: *mut ibv_xrcd, cq: *mut ibv_cq, tm_cap: ibv_tm_cap,
    }
    struct ibv_wq_init_attr {
        wq_context: *mut c_void, wq_type: ibv_wq_type, max_wr: u32, max_sge: u32, pd: *mut ibv_pd, cq: *mut ibv_cq,
        comp_mask: u32, create_flags: u32,
    }
    struct ibv_wq_attr {
        attr_mask: u32, wq_state: ibv_wq_state, curr_wq_state: ibv_wq_state, flags: u32, flags_mask: u32,
    }
    struct ibv_rwq_ind_table {
        context: *mut ibv_context, ind_tbl_handle: c_int, ind_tbl_num: c_int, comp_mask: u32,
    }
    struct ibv_rwq_ind_table_init_attr { log_ind_tbl_size: u32, ind_tbl: *mut *mut ibv_wq, comp_mask: u32 }
    struct ibv_qp_cap {
        max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32,
    }
    struct ibv_qp_init_attr {
        qp_context: *mut c_void, send_cq: *mut ibv_cq, recv_cq: *mut ibv_cq, srq: *mut ibv_srq, cap: ibv_qp_cap,
        qp_type: ibv_qp_type, sq_sig_all: c_int,
    }
    struct ibv_rx_hash_conf {
        rx_hash_function: u8, rx_hash_key_len: u8, rx_hash_key: *mut u8, rx_hash_fields_mask: u64,
    }
    struct ibv_qp_init_attr_ex {
        qp_context: *mut c_void, send_cq: *mut ibv_cq, recv_cq: *mut ibv_cq, srq: *mut ibv_srq, cap: ibv_qp_cap,
        qp_type: ibv_qp_type, sq_sig_all: c_int, comp_mask: u32, pd: *mut ibv_pd, xrcd: *mut ibv_xrcd, create_flags: u32,
        max_tso_header: u16, rwq_ind_tbl: *mut ibv_rwq_ind_table, rx_hash_conf: ibv_rx_hash_conf, source_qpn: u32,
        send_ops_flags: u64,
    }
    struct ibv_qp_open_attr {
        comp_mask: u32, qp_num: u32, xrcd: *mut ibv_xrcd, qp_context: *mut c_void, qp_type: ibv_qp_type,
    }
    struct ibv_qp_attr {
        qp_state: ibv_qp_state, cur_qp_state: ibv_qp_state, path_mtu: ibv_mtu, path_mig_state: ibv_mig_state, qkey: u32,
        rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: c_uint, cap: ibv_qp_cap, ah_attr: ibv_ah_attr,
        alt_ah_attr: ibv_ah_attr, pkey_index: u16, alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8,
        max_rd_atomic: u8, max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8,
        rnr_retry: u8, alt_port_num: u8, alt_timeout: u8, rate_limit: u32,
    }
    struct ibv_qp_rate_limit_attr { rate_limit: u32, max_burst_sz: u32, typical_pkt_sz: u16, comp_mask: u32 }
    struct ibv_data_buf { addr: *mut c_void, length: usize }
    struct ibv_sge { addr: u64, length: u32, lkey: u32 }
    struct ibv_send_wr_wr_rdma { remote_addr: u64, rkey: u32 }
    struct ibv_send_wr_wr_atomic { remote_addr: u64, compare_add: u64, swap: u64, rkey: u32 }
    struct ibv_send_wr_wr_ud { ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32 }
    union ibv_send_wr_wr {
        rdma: ibv_send_wr_wr_rdma, atomic: ibv_send_wr_wr_atomic, ud: ibv_send_wr_wr_ud,
    }
    struct ibv_send_wr_qp_type_xrc { remote_srqn: u32 }
    union ibv_send_wr_qp_type { xrc: ibv_send_wr_qp_type_xrc }
    struct ibv_send_wr_op_bind_mw { mw: *mut ibv_mw, rkey: u32, bind_info: ibv_mw_bind_info }
    struct ibv_send_wr_op_tso { hdr: *mut c_void, hdr_sz: u16, mss: u16 }
    union ibv_send_wr_op { bind_mw: ibv_send_wr_op_bind_mw, tso: ibv_send_wr_op_tso }
    struct ibv_send_wr {
        wr_id: u64, next: *mut ibv_send_wr, sg_list: *mut ibv_sge, num_sge: c_int, opcode: ibv_wr_opcode,
        send_flags: c_uint,
        imm_data: u32, // or invalidate_rkey
        wr: ibv_send_wr_wr, qp_type: ibv_send_wr_qp_type, op: ibv_send_wr_op,
    }
    struct ibv_recv_wr { wr_id: u64, next: *mut ibv_recv_wr, sg_list: *mut ibv_sge, num_sge: c_int }
    struct ibv_ops_wr_tm_add {
        recv_wr_id: u64, sg_list: *mut ibv_sge, num_sge: c_int, tag: u64, mask: u64,
    }
    struct ibv_ops_wr_tm { unexpected_cnt: u32, handle: u32, add: ibv_ops_wr_tm_add }
    struct ibv_ops_wr {
        wr_id: u64, next: *mut ibv_ops_wr, opcode: ibv_ops_wr_opcode, flags: c_int, tm: ibv_ops_wr_tm,
    }
    struct ibv_mw_bind { wr_id: u64, send_flags: c_uint, bind_info: ibv_mw_bind_info }
    struct ibv_srq {
        context: *mut ibv_context, srq_context: *mut c_void, pd: *mut ibv_pd, handle: u32, mutex: pthread_mutex_t,
        cond: pthread_cond_t, events_completed: u32,
    }
    struct ibv_wq {
        context: *mut ibv_context, wq_context: *mut c_void, pd: *mut ibv_pd, cq: *mut ibv_cq, wq_num: u32, handle: u32,
        state: ibv_wq_state, wq_type: ibv_wq_type,
        post_recv: call!((*mut ibv_wq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int),
        mutex: pthread_mutex_t, cond: pthread_cond_t, events_completed: u32, comp_mask: u32,
    }
    struct ibv_qp {
        context: *mut ibv_context, qp_context: *mut c_void, pd: *mut ibv_pd, send_cq: *mut ibv_cq, recv_cq: *mut ibv_cq,
        srq: *mut ibv_srq, handle: u32, qp_num: u32, state: ibv_qp_state, qp_type: ibv_qp_type, mutex: pthread_mutex_t,
        cond: pthread_cond_t, events_completed: u32,
    }
    struct ibv_qp_ex {
        qp_base: ibv_qp, comp_mask: u64, wr_id: u64, wr_flags: c_uint,
        wr_atomic_cmp_swp: call!((*mut ibv_qp_ex, rkey: u32, remote_addr: u64, compare: u64, swap: u64)),
        wr_atomic_fetch_add: call!((*mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64)),
        wr_bind_mw: call!((*mut ibv_qp_ex, *mut ibv_mw, rkey: u32, *const ibv_mw_bind_info)),
        wr_local_inv: call!((*mut ibv_qp_ex, invalidate_rkey: u32)),
        wr_rdma_read: call!((*mut ibv_qp_ex, rkey: u32, remote_addr: u64)),
        wr_rdma_write: call!((*mut ibv_qp_ex, rkey: u32, remote_addr: u64)),
        wr_rdma_write_imm: call!((*mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm_data: u32)),
        wr_send: call!((*mut ibv_qp_ex)),
        wr_send_imm: call!((*mut ibv_qp_ex, imm_data: u32)),
        wr_send_inv: call!((*mut ibv_qp_ex, invalidate_rkey: u32)),
        wr_send_tso: call!((*mut ibv_qp_ex, *mut c_void, hdr_sz: u16, mss: u16)),
        wr_set_ud_addr: call!((*mut ibv_qp_ex, *mut ibv_ah, remote_qpn: u32, remote_qkey: u32)),
        wr_set_xrc_srqn: call!((*mut ibv_qp_ex, remote_srqn: u32)),
        wr_set_inline_data: call!((*mut ibv_qp_ex, *mut c_void, length: usize)),
        wr_set_inline_data_list: call!((*mut ibv_qp_ex, num_buf: usize, *const ibv_data_buf)),
        wr_set_sge: call!((*mut ibv_qp_ex, lkey: u32, addr: u64, length: u32)),
        wr_set_sge_list: call!((*mut ibv_qp_ex, num_sge: usize, *const ibv_sge)),
        wr_start: call!((*mut ibv_qp_ex)),
        wr_complete: call!((*mut ibv_qp_ex) -> c_int),
        wr_abort: call!((*mut ibv_qp_ex)),
        wr_atomic_write: call!((*mut ibv_qp_ex, rkey: u32, remote_addr: u64, *const c_void)),
    }
    struct ibv_ece { vendor_id: u32, options: u32, comp_mask: u32 }
    struct ibv_comp_channel { context: *mut ibv_context, fd: c_int, refcnt: c_int }
    struct ibv_cq {
        context: *mut ibv_context, channel: *mut ibv_comp_channel, cq_context: *mut c_void, handle: u32, cqe: c_int,
        mutex: pthread_mutex_t, cond: pthread_cond_t, comp_events_completed: u32, async_events_completed: u32,
    }
    struct ibv_poll_cq_attr { comp_mask: u32 }
    struct ibv_wc_tm_info { tag: u64, r#priv: u32 }
    struct ibv_cq_ex {
        context: *mut ibv_context, channel: *mut ibv_comp_channel, cq_context: *mut c_void, handle: u32, cqe: c_int,
        mutex: pthread_mutex_t, cond: pthread_cond_t, comp_events_completed: u32, async_events_completed: u32,
        comp_mask: u32, status: ibv_wc_status, wr_id: u64,
        start_poll: call!((*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int),
        next_poll: call!((*mut ibv_cq_ex) -> c_int),
        end_poll: call!((*mut ibv_cq_ex)),
        read_opcode: call!((*mut ibv_cq_ex) -> ibv_wc_opcode),
        read_vendor_err: call!((*mut ibv_cq_ex) -> u32),
        read_byte_len: call!((*mut ibv_cq_ex) -> u32),
        read_imm_data: call!((*mut ibv_cq_ex) -> u32),
        read_qp_num: call!((*mut ibv_cq_ex) -> u32),
        read_src_qp: call!((*mut ibv_cq_ex) -> u32),
        read_wc_flags: call!((*mut ibv_cq_ex) -> c_uint),
        read_slid: call!((*mut ibv_cq_ex) -> u32),
        read_sl: call!((*mut ibv_cq_ex) -> u8),
        read_dlid_path_bits: call!((*mut ibv_cq_ex) -> u8),
        read_completion_ts: call!((*mut ibv_cq_ex) -> u64),
        read_cvlan: call!((*mut ibv_cq_ex) -> u16),
        read_flow_tag: call!((*mut ibv_cq_ex) -> u32),
        read_tm_info: call!((*mut ibv_cq_ex, *mut ibv_wc_tm_info)),
        read_completion_wallclock_ns: call!((*mut ibv_cq_ex) -> u64),
    }
    struct ibv_moderate_cq { cq_count: u16, cq_period: u16 }
    struct ibv_modify_cq_attr { attr_mask: u32, moderate: ibv_moderate_cq }
    struct ibv_ah { context: *mut ibv_context, pd: *mut ibv_pd, handle: u32 }
    struct ibv_flow_eth_filter { dst_mac: [u8; 6], src_mac: [u8; 6], ether_type: u16, vlan_tag: u16 }
    struct ibv_flow_spec_eth {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_eth_filter, mask: ibv_flow_eth_filter,
    }
    struct ibv_flow_ipv4_filter { src_ip: u32, dst_ip: u32 }
    struct ibv_flow_spec_ipv4 {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_ipv4_filter, mask: ibv_flow_ipv4_filter,
    }
    struct ibv_flow_ipv4_ext_filter {
        src_ip: u32, dst_ip: u32, proto: u8, tos: u8, ttl: u8, flags: u8,
    }
    struct ibv_flow_spec_ipv4_ext {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_ipv4_ext_filter, mask: ibv_flow_ipv4_ext_filter,
    }
    struct ibv_flow_ipv6_filter {
        src_ip: [u8; 16], dst_ip: [u8; 16], flow_label: u32, next_hdr: u8, traffic_class: u8, hop_limit: u8,
    }
    struct ibv_flow_spec_ipv6 {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_ipv6_filter, mask: ibv_flow_ipv6_filter,
    }
    struct ibv_flow_esp_filter { spi: u32, seq: u32 }
    struct ibv_flow_spec_esp {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_esp_filter, mask: ibv_flow_esp_filter,
    }
    struct ibv_flow_tcp_udp_filter { dst_port: u16, src_port: u16 }
    struct ibv_flow_spec_tcp_udp {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_tcp_udp_filter, mask: ibv_flow_tcp_udp_filter,
    }
    struct ibv_flow_gre_filter { c_ks_res0_ver: u16, protocol: u16, key: u32 }
    struct ibv_flow_spec_gre {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_gre_filter, mask: ibv_flow_gre_filter,
    }
    struct ibv_flow_mpls_filter { label: u32 }
    struct ibv_flow_spec_mpls {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_mpls_filter, mask: ibv_flow_mpls_filter,
    }
    struct ibv_flow_tunnel_filter { tunnel_id: u32 }
    struct ibv_flow_spec_tunnel {
        r#type: ibv_flow_spec_type, size: u16, val: ibv_flow_tunnel_filter, mask: ibv_flow_tunnel_filter,
    }
    struct ibv_flow_spec_action_tag { r#type: ibv_flow_spec_type, size: u16, tag_id: u32 }
    struct ibv_flow_spec_action_drop { r#type: ibv_flow_spec_type, size: u16 }
    struct ibv_flow_spec_action_handle { r#type: ibv_flow_spec_type, size: u16, action: *const ibv_flow_action }
    struct ibv_flow_spec_counter_action { r#type: ibv_flow_spec_type, size: u16, counters: *mut ibv_counters }
    struct ibv_flow_spec_hdr { r#type: ibv_flow_spec_type, size: u16 }
    union ibv_flow_spec {
        hdr: ibv_flow_spec_hdr, eth: ibv_flow_spec_eth, ipv4: ibv_flow_spec_ipv4, tcp_udp: ibv_flow_spec_tcp_udp,
        ipv4_ext: ibv_flow_spec_ipv4_ext, ipv6: ibv_flow_spec_ipv6, esp: ibv_flow_spec_esp, tunnel: ibv_flow_spec_tunnel,
        gre: ibv_flow_spec_gre, mpls: ibv_flow_spec_mpls, flow_tag: ibv_flow_spec_action_tag,
        drop: ibv_flow_spec_action_drop, handle: ibv_flow_spec_action_handle, flow_count: ibv_flow_spec_counter_action,
    }
    struct ibv_flow_attr {
        comp_mask: u32, r#type: ibv_flow_attr_type, size: u16, priority: u16, num_of_specs: u8, port: u8, flags: u32,
    }
    struct ibv_flow { comp_mask: u32, context: *mut ibv_context, handle: u32 }
    struct ibv_flow_action { context: *mut ibv_context }
    struct ibv_flow_action_esp_attr {
        esp_attr: *mut ibv_flow_action_esp, keymat_proto: ibv_flow_action_esp_keymat, keymat_len: u16,
        keymat_ptr: *mut c_void, replay_proto: ibv_flow_action_esp_replay, replay_len: u16, replay_ptr: *mut c_void,
        esp_encap: *mut ibv_flow_action_esp_encap, comp_mask: u32, esn: u32,
    }
    struct _ibv_device_ops {
        _dummy1: call!((*mut ibv_device, cmd_fd: c_int) -> *mut ibv_context),
        _dummy2: call!((*mut ibv_context)),
    }
    struct ibv_device {
        _ops: _ibv_device_ops, node_type: ibv_node_type, transport_type: ibv_transport_type,
        name: [c_char; IBV_SYSFS_NAME_MAX as usize], dev_name: [c_char; IBV_SYSFS_NAME_MAX as usize],
        dev_path: [c_char; IBV_SYSFS_PATH_MAX as usize], ibdev_path: [c_char; IBV_SYSFS_PATH_MAX as usize],
    }
    struct ibv_context_ops {
        _compat_query_device: call!((*mut ibv_context, *mut ibv_device_attr) -> c_int),
        _compat_query_port: call!((*mut ibv_context, port_num: u8, *mut c_void) -> c_int),
        _compat_alloc_pd: call!(() -> *mut c_void),
        _compat_dealloc_pd: call!(() -> *mut c_void),
        _compat_reg_mr: call!(() -> *mut c_void),
        _compat_rereg_mr: call!(() -> *mut c_void),
        _compat_dereg_mr: call!(() -> *mut c_void),
        alloc_mw: call!((*mut ibv_pd, r#type: ibv_mw_type) -> *mut ibv_mw),
        bind_mw: call!((*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int),
        dealloc_mw: call!((*mut ibv_mw) -> c_int),
        _compat_create_cq: call!(() -> *mut c_void),
        poll_cq: call!((*mut ibv_cq, num_entries: c_int, *mut ibv_wc) -> c_int),
        req_notify_cq: call!((*mut ibv_cq, solicited_only: c_int) -> c_int),
        _compat_cq_event: call!(() -> *mut c_void),
        _compat_resize_cq: call!(() -> *mut c_void),
        _compat_destroy_cq: call!(() -> *mut c_void),
        _compat_create_srq: call!(() -> *mut c_void),
        _compat_modify_srq: call!(() -> *mut c_void),
        _compat_query_srq: call!(() -> *mut c_void),
        _compat_destroy_srq: call!(() -> *mut c_void),
        post_srq_recv: call!((*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int),
        _compat_create_qp: call!(() -> *mut c_void),
        _compat_query_qp: call!(() -> *mut c_void),
        _compat_modify_qp: call!(() -> *mut c_void),
        _compat_destroy_qp: call!(() -> *mut c_void),
        post_send: call!((*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int),
        post_recv: call!((*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int),
        _compat_create_ah: call!(() -> *mut c_void),
        _compat_destroy_ah: call!(() -> *mut c_void),
        _compat_attach_mcast: call!(() -> *mut c_void),
        _compat_detach_mcast: call!(() -> *mut c_void),
        _compat_async_event: call!(() -> *mut c_void),
    }
    struct ibv_context {
        device: *mut ibv_device, ops: ibv_context_ops, cmd_fd: c_int, async_fd: c_int, num_comp_vectors: c_int,
        mutex: pthread_mutex_t, abi_compat: *mut c_void,
    }
    struct ibv_cq_init_attr_ex {
        cqe: u32, cq_context: *mut c_void, channel: *mut ibv_comp_channel, comp_vector: u32, wc_flags: u64, comp_mask: u32,
        flags: u32, parent_domain: *mut ibv_pd,
    }
    struct ibv_parent_domain_init_attr {
        pd: *mut ibv_pd, td: *mut ibv_td, comp_mask: u32,
        alloc: call!((*mut ibv_pd, *mut c_void, size: usize, alignment: usize, resource_type: u64) -> *mut c_void),
        free: call!((*mut ibv_pd, *mut c_void, *mut c_void, resource_type: u64)),
        pd_context: *mut c_void,
    }
    struct ibv_counters_init_attr { comp_mask: u32 }
    struct ibv_counters { context: *mut ibv_context }
    struct ibv_counter_attach_attr { counter_desc: ibv_counter_description, index: u32, comp_mask: u32 }
    struct ibv_values_ex { comp_mask: u32, raw_clock: timespec }
    struct verbs_context {
        query_port: call!((*mut ibv_context, port_num: u8, *mut ibv_port_attr, port_attr_len: usize) -> c_int),
        advise_mr: call!((*mut ibv_pd, advice: ibv_advise_mr_advice, flags: u32, *mut ibv_sge, num_sges: u32) -> c_int),
        alloc_null_mr: call!((*mut ibv_pd) -> *mut ibv_mr),
        read_counters: call!((*mut ibv_counters, *mut u64, ncounters: u32, flags: u32) -> c_int),
        attach_counters_point_flow: call!((*mut ibv_counters, *mut ibv_counter_attach_attr, *mut ibv_flow) -> c_int),
        create_counters: call!((*mut ibv_context, *mut ibv_counters_init_attr) -> *mut ibv_counters),
        destroy_counters: call!((*mut ibv_counters) -> c_int),
        reg_dm_mr: call!((*mut ibv_pd, *mut ibv_dm, dm_offset: u64, length: usize, access: c_uint) -> *mut ibv_mr),
        alloc_dm: call!((*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm),
        free_dm: call!((*mut ibv_dm) -> c_int),
        modify_flow_action_esp: call!((*mut ibv_flow_action, *mut ibv_flow_action_esp_attr) -> c_int),
        destroy_flow_action: call!((*mut ibv_flow_action) -> c_int),
        create_flow_action_esp: call!((*mut ibv_context, *mut ibv_flow_action_esp_attr) -> *mut ibv_flow_action),
        modify_qp_rate_limit: call!((*mut ibv_qp, *mut ibv_qp_rate_limit_attr) -> c_int),
        alloc_parent_domain: call!((*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd),
        dealloc_td: call!((*mut ibv_td) -> c_int),
        alloc_td: call!((*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td),
        modify_cq: call!((*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int),
        post_srq_ops: call!((*mut ibv_srq, *mut ibv_ops_wr, *mut *mut ibv_ops_wr) -> c_int),
        destroy_rwq_ind_table: call!((*mut ibv_rwq_ind_table) -> c_int),
        create_rwq_ind_table: call!((*mut ibv_context, *mut ibv_rwq_ind_table_init_attr) -> *mut ibv_rwq_ind_table),
        destroy_wq: call!((*mut ibv_wq) -> c_int),
        modify_wq: call!((*mut ibv_wq, *mut ibv_wq_attr) -> c_int),
        create_wq: call!((*mut ibv_context, *mut ibv_wq_init_attr) -> *mut ibv_wq),
        query_rt_values: call!((*mut ibv_context, *mut ibv_values_ex) -> c_int),
        create_cq_ex: call!((*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex),
        r#priv: *mut c_void,
        query_device_ex: call!(
            (*mut ibv_context, *const ibv_query_device_ex_input, *mut ibv_device_attr_ex, attr_size: usize) -> c_int
        ),
        ibv_destroy_flow: call!((*mut ibv_flow) -> c_int),
        ABI_placeholder2: call!(()),
        ibv_create_flow: call!((*mut ibv_qp, *mut ibv_flow_attr) -> *mut ibv_flow),
        ABI_placeholder1: call!(()),
        open_qp: call!((*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp),
        create_qp_ex: call!((*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp),
        get_srq_num: call!((*mut ibv_srq, *mut u32) -> c_int),
        create_srq_ex: call!((*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq),
        open_xrcd: call!((*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd),
        close_xrcd: call!((*mut ibv_xrcd) -> c_int),
        _ABI_placeholder3: u64, sz: usize, context: ibv_context,
    }
    struct ibv_flow_action_esp_keymat_aes_gcm {
        iv: u64, iv_algo: u32, salt: u32, icv_len: u32, key_len: u32, aes_key: [u32; 8],
    }
    struct ibv_flow_action_esp_replay_bmp { size: u32 }
    struct ibv_flow_action_esp_encap {
        val_ptr: *mut c_void, next_ptr: *mut ibv_flow_action_esp_encap, len: u16, r#type: u16,
    }
    struct ibv_flow_action_esp {
        spi: u32, seq: u32, tfc_pad: u32, flags: u32, hard_limit_pkts: u64,
    }
    struct ibv_sa_path_rec {
        dgid: ibv_gid, sgid: ibv_gid, dlid: u16, slid: u16, raw_traffic: c_int, flow_label: u32, hop_limit: u8,
        traffic_class: u8, reversible: c_int, numb_path: u8, pkey: u16, sl: u8, mtu_selector: u8, mtu: u8,
        rate_selector: u8, rate: u8, packet_life_time_selector: u8, packet_life_time: u8, preference: u8,
    }
    struct ibv_sa_mcmember_rec {
        mgid: ibv_gid, port_gid: ibv_gid, qkey: u32, mlid: u16, mtu_selector: u8, mtu: u8, traffic_class: u8, pkey: u16,
        rate_selector: u8, rate: u8, packet_life_time_selector: u8, packet_life_time: u8, sl: u8, flow_label: u32,
        hop_limit: u8, scope: u8, join_state: u8, proxy_join: c_int,
    }
    struct ibv_sa_service_rec {
        id: u64, gid: ibv_gid, pkey: u16, lease: u32, key: [u8; 16], name: [u8; 64], data8: [u8; 16], data16: [u16; 8],
        data32: [u32; 4], data64: [u64; 2],
    }
    struct ibv_path_record {
        service_id: u64, dgid: ibv_gid, sgid: ibv_gid, dlid: u16, slid: u16, flowlabel_hoplimit: u32, tclass: u8,
        reversible_numpath: u8, pkey: u16, qosclass_sl: u16, mtu: u8, rate: u8, packetlifetime: u8, preference: u8,
        reserved: [u8; 6],
    }
    struct ibv_path_data { flags: u32, reserved: u32, path: ibv_path_record }
    struct ibv_tmh { opcode: u8, reserved: [u8; 3], app_ctx: u32, tag: u64 }
    struct ibv_rvh { va: u64, rkey: u32, len: u32 }
}
