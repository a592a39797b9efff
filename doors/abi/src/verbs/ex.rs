//! Extended objects: completion queues that are polled field by field, queue pairs whose requests are built call by call.

use std::ffi::{c_int, c_uint, c_void};

use rustix::io::Errno;
use weft_verbs::{InlineData, RemoteAddr, SendOp, SendWr, UdDest, Wc};

use super::ah;
use super::batch::Wrs;
use super::context::Context;
use super::cq::{Cq, Wanted, create};
use super::mw::{Mw, binding, show_bound};
use super::null;
use super::object::{Visit, enter, find, lock};
use super::params::read_param;
use super::qp::QpObj;
use super::types::*;
use super::work::{self, sges};
use crate::call::{pointer, status};

const CLOCKS: u64 =
    (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

/// The time. (rustix asks the kernel's own library, which debuggers such as valgrind hide.)
fn now(clock: libc::clockid_t) -> libc::timespec {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a place for the time.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    now
}

pub(crate) unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    status(|| {
        find::<Context>(context)?;
        // SAFETY: NULL, or what the caller promises.
        if values.is_null() || unsafe { (*values).comp_mask } & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
            return Err(Errno::INVAL);
        }
        let now = now(libc::CLOCK_MONOTONIC);
        // SAFETY: the caller's promise.
        unsafe {
            if (*values).comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0 {
                (*values).raw_clock = now;
            }
        }
        Ok(())
    })
}

fn nanoseconds(clock: libc::clockid_t) -> u64 {
    let libc::timespec { tv_sec, tv_nsec } = now(clock);
    (tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(tv_nsec as u64)
}

/// `ibv_create_cq_ex`
pub(crate) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    const KNOWN: u32 = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
    const FLAGS: u32 = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    pointer(|| {
        // SAFETY: the caller's promise.
        let attr = unsafe { read_param(attr) }?;
        let fields = u64::from(IBV_WC_STANDARD_FLAGS) | CLOCKS;
        if attr.comp_mask & !KNOWN != 0
            || (attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 && attr.flags & !FLAGS != 0)
            || attr.wc_flags & !fields != 0
        {
            return Err(Errno::OPNOTSUPP);
        }
        if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0 {
            find::<super::pd::Pd>(attr.parent_domain)?;
        }
        let wanted = Wanted {
            cqe: attr.cqe,
            cq_context: attr.cq_context,
            channel: attr.channel,
            comp_vector: attr.comp_vector,
            extended: true,
        };
        let made = create(context, &wanted, |c| {
            c.start_poll = Some(start_poll);
            c.next_poll = Some(next_poll);
            c.end_poll = Some(end_poll);
            c.read_opcode = Some(read_opcode);
            c.read_vendor_err = Some(read_vendor_err);
            c.read_byte_len = Some(read_byte_len);
            c.read_imm_data = Some(read_imm_data);
            c.read_qp_num = Some(read_qp_num);
            c.read_src_qp = Some(read_src_qp);
            c.read_wc_flags = Some(read_wc_flags);
            c.read_slid = Some(read_slid);
            c.read_sl = Some(read_sl);
            c.read_dlid_path_bits = Some(read_dlid_path_bits);
            c.read_completion_ts = Some(read_completion_ts);
            c.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        })?;
        lock(&made.polling.at).clocks = attr.wc_flags & CLOCKS;
        Ok(made.c())
    })
}

/// The queue behind an extended handle.
///
/// # Safety
/// As for [`enter`].
unsafe fn queue(cq: *mut ibv_cq_ex) -> Result<Visit<Cq>, Errno> {
    // SAFETY: the caller's promise.
    let queue = unsafe { enter::<Cq>(cq.cast()) }?;
    if queue.extended {
        Ok(queue)
    } else {
        Err(Errno::INVAL)
    }
}

/// Takes the next completion. `ENOENT` when there is none.
fn take(queue: &Visit<Cq>) -> Result<(), Errno> {
    let mut wc = [Wc::default()];
    if queue.poll(&mut wc)? == 0 {
        return Err(Errno::NOENT);
    }
    let mut at = lock(&queue.polling.at);
    at.wc = wc[0];
    if at.clocks & u64::from(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) != 0 {
        at.taken = nanoseconds(libc::CLOCK_MONOTONIC);
    }
    if at.clocks & u64::from(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) != 0 {
        at.wall = nanoseconds(libc::CLOCK_REALTIME);
    }
    let c = queue.c();
    // SAFETY: a live object, and polling is ours until the end of the poll.
    unsafe {
        (*c).wr_id = at.wc.wr_id;
        (*c).status = work::wc_status(&at.wc);
    }
    Ok(())
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    status(|| {
        // SAFETY: the program has just looked into it.
        let queue = unsafe { queue(cq) }?;
        // SAFETY: NULL, or what the caller promises.
        if attr.is_null() || unsafe { (*attr).comp_mask } != 0 {
            return Err(Errno::INVAL);
        }
        queue.polling.busy.lock();
        take(&queue).inspect_err(|_| queue.polling.busy.unlock())
    })
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the program has just looked into it.
    status(|| take(&unsafe { queue(cq) }?))
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the program has just looked into it.
    if let Ok(queue) = unsafe { queue(cq) } {
        queue.polling.busy.unlock();
    }
}

macro_rules! readers {
    ($($name:ident -> $of:ty = |$at:ident| $value:expr;)*) => {$(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $of {
            // SAFETY: the program has just looked into it.
            let Ok(queue) = (unsafe { queue(cq) }) else {
                return 0;
            };
            let $at = *lock(&queue.polling.at);
            $value
        }
    )*};
}

readers! {
    read_opcode -> ibv_wc_opcode = |at| work::wc_opcode(&at.wc);
    read_vendor_err -> u32 = |at| at.wc.vendor_err;
    read_byte_len -> u32 = |at| at.wc.byte_len;
    read_imm_data -> u32 = |at| work::wc_extra(&at.wc).0;
    read_qp_num -> u32 = |at| at.wc.qp_num;
    read_src_qp -> u32 = |at| work::wc_source(&at.wc);
    read_wc_flags -> c_uint = |at| work::wc_extra(&at.wc).1;
    read_slid -> u32 = |_at| 0;
    read_sl -> u8 = |at| work::wc_sl(&at.wc);
    read_dlid_path_bits -> u8 = |_at| 0;
    read_completion_ts -> u64 = |at| at.taken;
    read_completion_wallclock_ns -> u64 = |at| at.wall;
}

impl Wrs {
    fn post_datagrams(&self, qp: &QpObj) -> Result<(), Errno> {
        let dests: Option<Vec<UdDest>> = self.dests.iter().copied().collect();
        let dests = dests.ok_or(Errno::INVAL)?;
        for (at, (wr, to)) in self.requests.iter().zip(&dests).enumerate() {
            let more = at + 1 < dests.len();
            qp.post_datagram(wr, to, more)
                .inspect_err(|_| qp.no_more_datagrams())?;
        }
        Ok(())
    }
}

/// The operations that can be built.
pub(crate) const RC_OPS: u64 = (IBV_QP_EX_WITH_RDMA_WRITE
    | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
    | IBV_QP_EX_WITH_SEND
    | IBV_QP_EX_WITH_SEND_WITH_IMM
    | IBV_QP_EX_WITH_RDMA_READ
    | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_LOCAL_INV
    | IBV_QP_EX_WITH_BIND_MW
    | IBV_QP_EX_WITH_SEND_WITH_INV) as u64;
/// Those of unreliable connections.
pub(crate) const UC_OPS: u64 = RC_OPS
    & !((IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) as u64);

/// Those of datagrams.
pub(crate) const UD_OPS: u64 = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;

/// Sets a queue pair's calls for its operations.
pub(crate) fn builders(c: &mut ibv_qp_ex, ops: u64, kind: ibv_qp_type) {
    let has = |op: u32| ops & u64::from(op) != 0;
    c.wr_start = Some(wr_start);
    c.wr_complete = Some(wr_complete);
    c.wr_abort = Some(wr_abort);
    c.wr_set_ud_addr = (kind == IBV_QPT_UD).then_some(wr_set_ud_addr);
    c.wr_set_xrc_srqn = (kind == IBV_QPT_XRC_SEND).then_some(wr_set_xrc_srqn);
    c.wr_set_sge = Some(wr_set_sge);
    c.wr_set_sge_list = Some(wr_set_sge_list);
    c.wr_set_inline_data = Some(wr_set_inline_data);
    c.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    c.wr_rdma_write = has(IBV_QP_EX_WITH_RDMA_WRITE).then_some(wr_rdma_write);
    c.wr_rdma_write_imm = has(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM).then_some(wr_rdma_write_imm);
    c.wr_send = has(IBV_QP_EX_WITH_SEND).then_some(wr_send);
    c.wr_send_imm = has(IBV_QP_EX_WITH_SEND_WITH_IMM).then_some(wr_send_imm);
    c.wr_send_inv = has(IBV_QP_EX_WITH_SEND_WITH_INV).then_some(wr_send_inv);
    c.wr_rdma_read = has(IBV_QP_EX_WITH_RDMA_READ).then_some(wr_rdma_read);
    c.wr_atomic_cmp_swp = has(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP).then_some(wr_atomic_cmp_swp);
    c.wr_atomic_fetch_add = has(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD).then_some(wr_atomic_fetch_add);
    c.wr_local_inv = has(IBV_QP_EX_WITH_LOCAL_INV).then_some(wr_local_inv);
    c.wr_bind_mw = has(IBV_QP_EX_WITH_BIND_MW).then_some(wr_bind_mw);
}

/// The queue pair behind an extended handle.
///
/// # Safety
/// As for [`enter`].
unsafe fn pair(qp: *mut ibv_qp_ex) -> Result<Visit<QpObj>, Errno> {
    // SAFETY: the caller's promise.
    let qp = unsafe { enter::<QpObj>(qp.cast()) }?;
    if qp.extended {
        Ok(qp)
    } else {
        Err(Errno::INVAL)
    }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the program has just looked into it.
    if let Ok(qp) = unsafe { pair(qp) } {
        qp.building.busy.lock();
        let mut list = lock(&qp.building.list);
        list.requests.clear();
        list.dests.clear();
        list.wrong = None;
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    status(|| {
        // SAFETY: the program has just looked into it.
        let qp = unsafe { pair(qp) }?;
        let result = {
            let list = lock(&qp.building.list);
            match list.wrong {
                Some(wrong) => Err(wrong),
                // All or nothing.
                None if !qp.has_room(list.requests.len()) => Err(Errno::NOMEM),
                None if qp.is_datagram() => list.post_datagrams(&qp),
                None => qp.post(&list.requests).map_err(|(_, errno)| errno),
            }
        };
        qp.building.busy.unlock();
        result
    })
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the program has just looked into it.
    if let Ok(qp) = unsafe { pair(qp) } {
        lock(&qp.building.list).requests.clear();
        qp.building.busy.unlock();
    }
}

/// Appends a request with the number and the flags that the program has set in the queue pair.
///
/// # Safety
/// As for [`enter`].
unsafe fn begin(qp: *mut ibv_qp_ex, op: impl FnOnce(&QpObj) -> Result<SendOp, Errno>) {
    // SAFETY: the caller's promise.
    let Ok(pair) = (unsafe { pair(qp) }) else {
        return;
    };
    // SAFETY: a live object.
    let (id, flags) = unsafe { ((*qp).wr_id, (*qp).wr_flags) };
    let made = op(&pair);
    let mut list = lock(&pair.building.list);
    match made {
        Ok(op) => {
            let mut wr = SendWr::new(id, op);
            work::set_flags(&mut wr, flags);
            list.requests.push(wr);
            list.dests.push(None);
        }
        Err(errno) => list.wrong = list.wrong.or(Some(errno)),
    }
}

/// Changes the latest request.
///
/// # Safety
/// As for [`enter`].
unsafe fn set(qp: *mut ibv_qp_ex, change: impl FnOnce(&QpObj, &mut SendWr) -> Result<(), Errno>) {
    // SAFETY: the caller's promise.
    let Ok(pair) = (unsafe { pair(qp) }) else {
        return;
    };
    let mut list = lock(&pair.building.list);
    let done = match list.requests.last_mut() {
        Some(wr) => change(&pair, wr),
        None => Err(Errno::INVAL),
    };
    if let Err(errno) = done {
        list.wrong = list.wrong.or(Some(errno));
    }
}

macro_rules! beginners {
    ($($name:ident($($arg:ident: $of:ty),*) = $op:expr;)*) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex, $($arg: $of),*) {
            // SAFETY: the program has just looked into it.
            unsafe { begin(qp, |_| Ok($op)) }
        }
    )*};
}

const fn at(rkey: u32, addr: u64) -> RemoteAddr {
    RemoteAddr { addr, rkey }
}

beginners! {
    wr_send() = SendOp::Send;
    wr_send_imm(imm: u32) = SendOp::SendImm { imm: work::imm(imm) };
    wr_send_inv(rkey: u32) = SendOp::SendInvalidate { rkey };
    wr_rdma_write(rkey: u32, addr: u64) = SendOp::Write { remote: at(rkey, addr) };
    wr_rdma_write_imm(rkey: u32, addr: u64, imm: u32) = SendOp::WriteImm { remote: at(rkey, addr), imm: work::imm(imm) };
    wr_rdma_read(rkey: u32, addr: u64) = SendOp::Read { remote: at(rkey, addr) };
    wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64) = SendOp::CompareSwap { remote: at(rkey, addr), compare, swap };
    wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64) = SendOp::FetchAdd { remote: at(rkey, addr), add };
    wr_local_inv(rkey: u32) = SendOp::LocalInvalidate { rkey };
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    let op = |_: &QpObj| {
        let mw = find::<Mw>(mw)?;
        if !mw.is_type_2() || info.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let op = binding(&mw, rkey, &unsafe { *info })?;
        show_bound(&mw, rkey);
        Ok(op)
    };
    // SAFETY: the program has just looked into it.
    unsafe { begin(qp, op) }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: the program has just looked into it.
    let Ok(pair) = (unsafe { pair(qp) }) else {
        return;
    };
    // SAFETY: the caller's promise.
    let dest = unsafe { ah::dest(ah, qpn, qkey) };
    let mut list = lock(&pair.building.list);
    match (dest, list.dests.last_mut()) {
        (Ok(dest), Some(last)) => *last = Some(dest),
        (Err(errno), _) => list.wrong = list.wrong.or(Some(errno)),
        (Ok(_), None) => list.wrong = list.wrong.or(Some(Errno::INVAL)),
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: the program has just looked into it.
    unsafe {
        set(qp, |_, wr| {
            wr.srq = Some(remote_srqn);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = ibv_sge { addr, length, lkey };
    // SAFETY: one element, of our own.
    unsafe { wr_set_sge_list(qp, 1, &raw const sge) }
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, sg_list: *const ibv_sge) {
    let change = |pair: &QpObj, wr: &mut SendWr| {
        if num_sge > pair.max_send_sge() || (sg_list.is_null() && num_sge > 0) {
            return Err(Errno::INVAL);
        }
        wr.sges.clear();
        wr.inline = None;
        // SAFETY: the caller's promise.
        let elements = unsafe { sges(sg_list, num_sge) };
        elements.for_each(|sge| wr.sges.push(sge));
        null::resolve(&mut wr.sges, !wr.op.is_sink());
        Ok(())
    };
    // SAFETY: the program has just looked into it.
    unsafe { set(qp, change) }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buf = ibv_data_buf { addr, length };
    // SAFETY: one buffer, as the caller promises.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const buf) }
}

unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    num_buf: usize,
    buf_list: *const ibv_data_buf,
) {
    let change = |pair: &QpObj, wr: &mut SendWr| {
        if buf_list.is_null() && num_buf > 0 {
            return Err(Errno::INVAL);
        }
        let mut data = InlineData::new();
        for n in 0..num_buf {
            // SAFETY: the caller's promise.
            let buf = unsafe { *buf_list.add(n) };
            // SAFETY: as above.
            unsafe { work::append(&mut data, buf.addr as u64, buf.length, pair.max_inline()) }?;
        }
        wr.sges.clear();
        wr.inline = Some(data);
        Ok(())
    };
    // SAFETY: the program has just looked into it.
    unsafe { set(qp, change) }
}
