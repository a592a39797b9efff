//! The calls of `<infiniband/weft_dgram.h>`: RDMA Write-Record, long messages and the reliable mode on datagram queue pairs.

use std::ffi::c_int;
use std::time::Duration;

use rustix::io::Errno;
use weft_verbs::{QpState, RemoteAddr, SendOp, SendWr, UD_MAX_SEGMENT, UD_MTU, UdInit, UdReliable};

use super::ah;
use super::null;
use super::object::{Turn, enter, turn};
use super::params::read_param;
use super::qp::QpObj;
use super::types::*;
use super::ud::Datagrams;
use super::work::{imm, set_flags, sges};
use crate::call::{run, status};

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct weft_dgram_attr {
    pub max_message: u32,
    pub segment: u32,
    pub timeout_ms: u32,
    pub records: u32,
    pub whole_only: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_dgram_write {
    pub wr_id: u64,
    pub sg_list: *mut ibv_sge,
    pub num_sge: c_int,
    pub send_flags: u32,
    pub ah: *mut ibv_ah,
    pub remote_qpn: u32,
    pub remote_qkey: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    pub with_imm: u32,
    pub imm_data: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct weft_dgram_range {
    pub start: u64,
    pub end: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct weft_dgram_record {
    pub addr: u64,
    pub rkey: u32,
    pub length: u32,
    pub valid: u32,
    pub src_qp: u32,
    pub msn: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct weft_dgram_reliable {
    pub give_up_ms: u32,
    pub not_ready_ms: u32,
}

/// `weft_dgram_setup`
///
/// # Safety
/// As the header says.
pub unsafe fn weft_dgram_setup(qp: *mut ibv_qp, attr: *const weft_dgram_attr) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        let or = |value: u32, usual: u32| if value == 0 { usual } else { value };
        let segment = or(attr.segment, UD_MAX_SEGMENT);
        if segment > UD_MAX_SEGMENT {
            return Err(Errno::INVAL);
        }
        renew(&mut turn::<QpObj>(qp)?, |init| {
            init.max_message = or(attr.max_message, UD_MTU);
            init.segment = segment;
            init.message_timeout = Duration::from_millis(or(attr.timeout_ms, 100).into());
            init.record_depth = attr.records;
            init.partial_records = attr.whole_only == 0;
        })
    })
}

/// `weft_dgram_set_reliable`
///
/// # Safety
/// As the header says.
pub unsafe fn weft_dgram_set_reliable(qp: *mut ibv_qp, attr: *const weft_dgram_reliable) -> c_int {
    status(|| {
        // SAFETY: the caller's promise: null, or one of these.
        let attr = (!attr.is_null()).then(|| unsafe { attr.read_unaligned() });
        let millis = |ms: u32| (ms > 0).then(|| Duration::from_millis(ms.into()));
        let reliable = attr.map(|attr| UdReliable {
            give_up: millis(attr.give_up_ms).unwrap_or(UdReliable::default().give_up),
            not_ready: millis(attr.not_ready_ms),
        });
        renew(&mut turn::<QpObj>(qp)?, |init| init.reliable = reliable)
    })
}

/// `weft_dgram_pair_failed`
///
/// # Safety
/// As the header says.
pub unsafe fn weft_dgram_pair_failed(qp: *mut ibv_qp, ah: *mut ibv_ah, remote_qpn: u32) -> c_int {
    run(|| {
        // SAFETY: the caller's promise.
        let (qp, to) = unsafe { (enter::<QpObj>(qp)?, ah::dest(ah, remote_qpn, 0)?) };
        let state = qp.datagrams()?.with(|native| native.pair_state(&to))?;
        Ok((state == QpState::Error).into())
    })
}

/// `weft_dgram_reset_pair`
///
/// # Safety
/// As the header says.
pub unsafe fn weft_dgram_reset_pair(qp: *mut ibv_qp, ah: *mut ibv_ah, remote_qpn: u32) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let (qp, to) = unsafe { (enter::<QpObj>(qp)?, ah::dest(ah, remote_qpn, 0)?) };
        let was = qp.datagrams()?.with(|native| native.reset_pair(&to))?;
        was.then_some(()).ok_or(Errno::NOENT)
    })
}

/// Replaces the native queue pair of a datagram queue pair in RESET by one with changed parameters.
///
/// # Errors
/// `EINVAL` for another state or kind, `EOPNOTSUPP` on RoCE, and the errors of creating a queue pair; the queue pair then stays as it was.
fn renew(qp: &mut Turn<QpObj>, change: impl FnOnce(&mut UdInit)) -> Result<(), Errno> {
    if !qp.is_datagram() || qp.state() != IBV_QPS_RESET {
        return Err(Errno::INVAL);
    }
    let mut ud = qp.alone(|qp| qp.ud.take()).ok_or(Errno::INVAL)?;
    let renewed = renew_with(&mut ud, change);
    qp.alone(|qp| qp.ud = Some(ud));
    renewed
}

fn renew_with(ud: &mut Datagrams, change: impl FnOnce(&mut UdInit)) -> Result<(), Errno> {
    let before = ud.init()?.clone();
    change(ud.init()?);
    ud.end();
    let renewed = ud.renew();
    if renewed.is_err() {
        *ud.init()? = before;
        return ud.renew().and(renewed);
    }
    renewed
}

/// `weft_dgram_post_write_record`
///
/// # Safety
/// As the header says.
pub unsafe fn weft_dgram_post_write_record(qp: *mut ibv_qp, wr: *const weft_dgram_write) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let qp = unsafe { enter::<QpObj>(qp) }?;
        if wr.is_null() || !qp.is_datagram() {
            return Err(Errno::INVAL);
        }
        qp.datagrams()?.with(|_| ())?;
        // SAFETY: the caller's promise.
        let c = unsafe { wr.read_unaligned() };
        let remote = RemoteAddr {
            addr: c.remote_addr,
            rkey: c.rkey,
        };
        let op = if c.with_imm == 0 {
            SendOp::Write { remote }
        } else {
            let imm = imm(c.imm_data);
            SendOp::WriteImm { remote, imm }
        };
        let mut wr = SendWr::new(c.wr_id, op);
        set_flags(&mut wr, c.send_flags);
        let count = usize::try_from(c.num_sge).map_err(|_| Errno::INVAL)?;
        let bad = count > 0 && c.sg_list.is_null();
        if bad || count > qp.max_send_sge() || c.send_flags & IBV_SEND_INLINE != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise: that many elements.
        let elements = unsafe { sges(c.sg_list, count) };
        elements.for_each(|sge| wr.sges.push(sge));
        null::resolve(&mut wr.sges, true);
        // SAFETY: the caller's promise: an address handle.
        let to = unsafe { ah::dest(c.ah, c.remote_qpn, c.remote_qkey) }?;
        qp.post_datagram(&wr, &to, false)
    })
}

/// `weft_dgram_take_record`
///
/// # Safety
/// As the header says.
pub unsafe fn weft_dgram_take_record(
    qp: *mut ibv_qp,
    wr_id: u64,
    record: *mut weft_dgram_record,
    ranges: *mut weft_dgram_range,
    count: c_int,
) -> c_int {
    run(|| {
        // SAFETY: the caller's promise.
        let qp = unsafe { enter::<QpObj>(qp) }?;
        let taken = qp.datagrams()?.with(|native| native.take_record(wr_id))?;
        let taken = taken.ok_or(Errno::NOENT)?;
        if !record.is_null() {
            let c = weft_dgram_record {
                addr: taken.addr,
                rkey: taken.rkey,
                length: taken.len,
                valid: taken.valid_bytes(),
                src_qp: taken.source.qp_num,
                msn: taken.msn,
                reserved: 0,
            };
            // SAFETY: the caller's promise: room for one.
            unsafe { record.write_unaligned(c) };
        }
        let valid = taken.valid.iter().map(|range| weft_dgram_range {
            start: taken.addr.wrapping_add(range.start.into()),
            end: taken.addr.wrapping_add(range.end.into()),
        });
        // SAFETY: the caller's promise: room for `count`.
        unsafe { give(valid, ranges, count) }
    })
}

/// `weft_dgram_validity_map`
///
/// # Safety
/// As the header says.
pub unsafe fn weft_dgram_validity_map(
    qp: *mut ibv_qp,
    rkey: u32,
    ranges: *mut weft_dgram_range,
    count: c_int,
    clear: c_int,
) -> c_int {
    run(|| {
        // SAFETY: the caller's promise.
        let qp = unsafe { enter::<QpObj>(qp) }?;
        let map = qp.datagrams()?.with(|native| {
            if clear == 0 {
                native.validity_map(rkey)
            } else {
                native.take_validity_map(rkey)
            }
        })?;
        let valid = map.ranges().map(|range| weft_dgram_range {
            start: range.start,
            end: range.end,
        });
        // SAFETY: the caller's promise: room for `count`.
        unsafe { give(valid, ranges, count) }
    })
}

/// Writes the first of them, and returns their number.
///
/// # Safety
/// There is room for `count` ranges.
unsafe fn give(
    all: impl Iterator<Item = weft_dgram_range>,
    ranges: *mut weft_dgram_range,
    count: c_int,
) -> Result<c_int, Errno> {
    let room = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    if room > 0 && ranges.is_null() {
        return Err(Errno::INVAL);
    }
    let mut seen = 0;
    for (n, range) in all.enumerate() {
        if n < room {
            // SAFETY: the caller's promise.
            unsafe { ranges.add(n).write_unaligned(range) };
        }
        seen = n + 1;
    }
    c_int::try_from(seen).map_err(|_| Errno::OVERFLOW)
}
