//! The calls of `<infiniband/weft_dgram.h>`: RDMA Write-Record and the reliable mode.

use std::ffi::c_int;

use weft_abi::verbs::dgram::{
    self, weft_dgram_attr, weft_dgram_range, weft_dgram_record, weft_dgram_reliable,
    weft_dgram_write,
};
use weft_abi::verbs::types::{ibv_ah, ibv_qp};

exports! { "", dgram:
    weft_dgram_setup(qp: *mut ibv_qp, attr: *const weft_dgram_attr) -> c_int;
    weft_dgram_post_write_record(qp: *mut ibv_qp, wr: *const weft_dgram_write) -> c_int;
    weft_dgram_take_record(qp: *mut ibv_qp, wr_id: u64, record: *mut weft_dgram_record, ranges: *mut weft_dgram_range, count: c_int) -> c_int;
    weft_dgram_validity_map(qp: *mut ibv_qp, rkey: u32, ranges: *mut weft_dgram_range, count: c_int, clear: c_int) -> c_int;
    weft_dgram_set_reliable(qp: *mut ibv_qp, attr: *const weft_dgram_reliable) -> c_int;
    weft_dgram_pair_failed(qp: *mut ibv_qp, ah: *mut ibv_ah, remote_qpn: u32) -> c_int;
    weft_dgram_reset_pair(qp: *mut ibv_qp, ah: *mut ibv_ah, remote_qpn: u32) -> c_int;
}
