//! The attributes of the two devices. Both are the process's one soft RNIC.

use std::cell::UnsafeCell;
use std::collections::HashSet;
use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::sync::Mutex;

use rustix::io::Errno;
use weft_verbs::Limits;

use super::ah::MAX_AHS;
use super::context::Context;
use super::dm::MAX_DM;
use super::gid;
use super::mr;
use super::native::native;
use super::object::{PerFork, find, lock};
use super::params::{list, put};
use super::pd::MAX_PDS;
use super::port as ports;
use super::private::NobodysDevice;
use super::roce;
use super::types::*;
use super::ud::MAX_MEMBERS;
use super::which::Which;
use super::wire;
use crate::call::{pointer, run, status};
use crate::once::ForkOnce;

/// Not a number that IEEE has registered.
const VENDOR: u32 = 0x0077_6574;
const PARTITION: u16 = 0xffff;

/// The programs' `struct ibv_device`, which never changes after its creation.
struct Shown(UnsafeCell<NobodysDevice>, Which);

// SAFETY: weft and the programs only read it.
unsafe impl Sync for Shown {}
// SAFETY: as above.
unsafe impl Send for Shown {}

impl Shown {
    fn new(which: Which, index: usize) -> Shown {
        let mut device = ibv_device::zeroed();
        (device.node_type, device.transport_type) = match which {
            Which::Iwarp => (IBV_NODE_RNIC, IBV_TRANSPORT_IWARP),
            Which::Persona => (IBV_NODE_CA, IBV_TRANSPORT_IB),
        };
        let uverbs = format!("uverbs{index}");
        copy_str(&mut device.name, which.name());
        copy_str(&mut device.dev_name, &uverbs);
        copy_str(
            &mut device.dev_path,
            &format!("/sys/class/infiniband_verbs/{uverbs}"),
        );
        copy_str(
            &mut device.ibdev_path,
            &format!("/sys/class/infiniband/{}", which.name()),
        );
        let device = NobodysDevice {
            device,
            ops: std::ptr::null(),
        };
        Shown(UnsafeCell::new(device), which)
    }
}

fn copy_str(to: &mut [c_char], from: &str) {
    for (to, from) in to.iter_mut().zip(from.bytes()) {
        *to = from as c_char;
    }
}

/// The devices that `WEFT_DEVICES` names, in its order. The same for the whole life of the process, and for its children.
fn shown() -> &'static [Shown] {
    static SHOWN: ForkOnce<Vec<Shown>> = ForkOnce::new();
    SHOWN.get_or_init(|| {
        // With a wrong value there are both, and opening one says what is wrong.
        let names = weft_verbs::settings::DEVICES.read().ok().flatten();
        let names = names.unwrap_or_else(|| "weft0,weft_ib0".into());
        let mut shown: Vec<Shown> = Vec::new();
        for name in names.split(',') {
            let which = [Which::Iwarp, Which::Persona]
                .into_iter()
                .find(|which| which.name() == name.trim());
            if let Some(which) = which
                && shown.iter().all(|shown| shown.1 != which)
            {
                shown.push(Shown::new(which, shown.len()));
            }
        }
        shown
    })
}

/// All devices, with their kinds.
pub(super) fn each() -> impl Iterator<Item = (ibv_device, Which)> {
    // SAFETY: it is never written.
    shown()
        .iter()
        .map(|shown| (unsafe { (*shown.0.get()).device }, shown.1))
}

/// C's handles of all devices.
pub(crate) fn devices() -> impl Iterator<Item = *mut ibv_device> {
    shown().iter().map(|shown| shown.0.get().cast())
}

fn index(device: *mut ibv_device) -> Result<usize, Errno> {
    devices()
        .position(|known| std::ptr::eq(known, device))
        .ok_or(Errno::INVAL)
}

pub(crate) fn which(device: *mut ibv_device) -> Result<Which, Errno> {
    Ok(shown()[index(device)?].1)
}

/// Device lists that programs have.
static LISTS: PerFork<Mutex<HashSet<usize>>> = PerFork::new();

/// `ibv_get_device_list`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device {
    pointer(|| {
        let all: Vec<_> = devices().collect();
        // SAFETY: the caller's promise.
        let list = unsafe { list(&all, num_devices) }?;
        lock(LISTS.get()).insert(list as usize);
        Ok(list)
    })
}

/// `ibv_free_device_list`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let known = lock(LISTS.get()).remove(&(list as usize));
    if known {
        // SAFETY: `ibv_get_device_list` made it, and it was not freed yet.
        unsafe { libc::free(list.cast()) };
    }
}

/// `ibv_get_device_name`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    pointer(|| {
        index(device)?;
        // SAFETY: one of ours.
        Ok(unsafe { (&raw mut (*device).name).cast() })
    })
}

/// `ibv_get_device_index`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_get_device_index(device: *mut ibv_device) -> c_int {
    run(|| Ok(index(device)? as c_int))
}

/// `ibv_get_device_guid`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    which(device).map_or(0, |which| u64::from_ne_bytes(which.guid()))
}

/// `ibv_query_device`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    status(|| {
        let context = find::<Context>(context)?;
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        let filled = attributes(context.ctx.which)?;
        // SAFETY: the caller's promise.
        unsafe { attr.write(filled) };
        Ok(())
    })
}

/// The number, limited to the range of `int`.
fn int(number: u32) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

/// The identity of a device; the rest is zero. This starts no soft RNIC, so a program can read the files without one.
pub(super) fn identity(which: Which) -> ibv_device_attr {
    let mut attr = ibv_device_attr::zeroed();
    copy_str(&mut attr.fw_ver, env!("CARGO_PKG_VERSION"));
    let guid = u64::from_ne_bytes(which.guid());
    (attr.node_guid, attr.sys_image_guid) = (guid, guid);
    attr.vendor_id = VENDOR;
    attr.vendor_part_id = which as u32;
    attr.hw_ver = 1;
    attr
}

/// The supported features and limits.
fn attributes(which: Which) -> Result<ibv_device_attr, Errno> {
    let limits: Limits = native()?.attr().limits;
    let mut attr = identity(which);
    attr.max_mr_size = 1 << 47;
    attr.page_size_cap = !0xfff;
    attr.max_qp = int(limits.max_qp);
    attr.max_qp_wr = int(limits.max_wr);
    attr.device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_N_NOTIFY_CQ
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    if which == Which::Persona {
        attr.device_cap_flags |= IBV_DEVICE_RC_RNR_NAK_GEN;
        if wire::has_xrc() {
            attr.device_cap_flags |= IBV_DEVICE_XRC;
        }
        attr.max_ah = int(MAX_AHS);
        attr.max_mcast_grp = int(MAX_MEMBERS);
        attr.max_mcast_qp_attach = int(MAX_MEMBERS);
        attr.max_total_mcast_qp_attach = int(MAX_MEMBERS);
    }
    attr.max_sge = int(limits.max_sge);
    attr.max_sge_rd = int(limits.max_sge);
    attr.max_cq = int(limits.max_cq);
    attr.max_cqe = int(limits.max_cqe);
    attr.max_mr = int(limits.max_mr);
    attr.max_mw = int(limits.max_mr);
    attr.max_pd = int(MAX_PDS);
    attr.max_qp_rd_atom = c_int::from(limits.max_rd_atomic);
    attr.max_qp_init_rd_atom = c_int::from(limits.max_rd_atomic);
    attr.max_res_rd_atom = int(limits.max_qp).saturating_mul(c_int::from(limits.max_rd_atomic));
    // The atomics are the processor's own, which is more (IBV_ATOMIC_GLOB). Adapters promise this value, and UCX uses atomics only with it.
    attr.atomic_cap = IBV_ATOMIC_HCA;
    attr.max_srq = int(limits.max_srq);
    attr.max_srq_wr = int(limits.max_wr);
    attr.max_srq_sge = int(limits.max_sge);
    attr.max_pkeys = 1;
    attr.phys_port_cnt = 1;
    Ok(attr)
}

pub(crate) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    attr_size: usize,
) -> c_int {
    status(|| {
        let kind = match find::<Context>(context) {
            Ok(context) => context.ctx.which,
            // A forked child passes its parent's context, for which a kernel device would answer too.
            Err(errno) if !context.is_null() => {
                // SAFETY: the program has just looked into it.
                let device = unsafe { (*context).device };
                which(device).or(Err(errno))?
            }
            Err(errno) => return Err(errno),
        };
        let comp_mask = if input.is_null() {
            0
        } else {
            // SAFETY: the caller's promise.
            unsafe { (*input).comp_mask }
        };
        let least = offset_of!(ibv_device_attr_ex, comp_mask) + size_of::<u32>();
        if attr.is_null() || comp_mask != 0 || attr_size < least {
            return Err(Errno::INVAL);
        }
        let mut filled = ibv_device_attr_ex::zeroed();
        filled.orig_attr = attributes(kind)?;
        // All memory is present when it is accessed.
        filled.odp_caps.general_caps = u64::from(IBV_ODP_SUPPORT);
        if mr::has_implicit() {
            filled.odp_caps.general_caps |= u64::from(IBV_ODP_SUPPORT_IMPLICIT);
        }
        filled.odp_caps.per_transport_caps.rc_odp_caps = IBV_ODP_SUPPORT_SEND
            | IBV_ODP_SUPPORT_RECV
            | IBV_ODP_SUPPORT_WRITE
            | IBV_ODP_SUPPORT_READ
            | IBV_ODP_SUPPORT_ATOMIC
            | IBV_ODP_SUPPORT_SRQ_RECV;
        if kind == Which::Persona {
            let all = &mut filled.odp_caps.per_transport_caps;
            all.ud_odp_caps = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV;
            all.uc_odp_caps = all.ud_odp_caps | IBV_ODP_SUPPORT_WRITE;
            if wire::has_xrc() {
                filled.xrc_odp_caps = all.rc_odp_caps;
            }
        }
        filled.max_dm_size = MAX_DM as u64;
        filled.completion_timestamp_mask = u64::MAX;
        // Nanoseconds: in kHz.
        filled.hca_core_clock = 1_000_000;
        filled.device_cap_flags_ex = u64::from(filled.orig_attr.device_cap_flags);
        // Moderation may be set to any value: it is a hint.
        filled.cq_mod_caps.max_cq_count = u16::MAX;
        filled.cq_mod_caps.max_cq_period = u16::MAX;
        filled.phys_port_cnt_ex = 1;
        // SAFETY: the caller says how much room there is.
        unsafe { write_prefix(attr, &filled, attr_size) };
        Ok(())
    })
}

/// Writes a struct of which the program knows the first `size` bytes. Bytes beyond our struct are zeroed.
///
/// # Safety
/// There is room for `size` bytes.
unsafe fn write_prefix<T: Copy>(to: *mut T, from: &T, size: usize) {
    let known = size.min(size_of::<T>());
    // SAFETY: the copy covers the bytes that both structs have; the caller promises room for the rest.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(from).cast::<u8>(), to.cast(), known);
        to.cast::<u8>().add(known).write_bytes(0, size - known);
    }
}

pub(super) fn port(which: Which) -> ibv_port_attr {
    let mut attr = ibv_port_attr::zeroed();
    attr.state = if ports::of(which).is_down() {
        IBV_PORT_DOWN
    } else {
        IBV_PORT_ACTIVE
    };
    attr.max_mtu = IBV_MTU_4096;
    attr.active_mtu = if which == Which::Persona && wire::has_roce() {
        roce::active_mtu()
    } else {
        IBV_MTU_4096
    };
    attr.gid_tbl_len = gids(which).map_or(0, |gids| gid_room(which, gids.len()) as c_int);
    attr.max_msg_sz = 1 << 31;
    attr.pkey_tbl_len = 1;
    attr.max_vl_num = 1;
    // 4 lanes of 25 Gbit/s; link up.
    attr.active_width = 2;
    attr.active_speed = 32;
    attr.phys_state = 5;
    attr.link_layer = IBV_LINK_LAYER_ETHERNET as u8;
    attr.port_cap_flags = IBV_PORT_CM_SUP;
    if which == Which::Persona {
        attr.port_cap_flags |= IBV_PORT_IP_BASED_GIDS;
        attr.flags = IBV_QPF_GRH_REQUIRED;
    }
    attr
}

/// The speed in units of 100 Mbit/s, the number of lanes, and the name of a lane's speed.
pub(super) fn speed(port: &ibv_port_attr) -> (u32, u32, &'static str) {
    let lanes = match port.active_width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    let (speed, name) = match port.active_speed {
        2 => (50, " DDR"),
        4 => (100, " QDR"),
        8 => (100, " FDR10"),
        16 => (140, " FDR"),
        32 => (250, " EDR"),
        64 => (500, " HDR"),
        128 => (1000, " NDR"),
        _ => (25, ""),
    };
    (speed * lanes, lanes, name)
}

pub(crate) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port_num: u8,
    attr: *mut ibv_port_attr,
    attr_len: usize,
) -> c_int {
    status(|| {
        let context = find::<Context>(context)?;
        if port_num != 1 || attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller says how much room there is.
        unsafe { write_prefix(attr, &port(context.ctx.which), attr_len) };
        Ok(())
    })
}

/// `ibv_query_port` for programs of old releases: without the fields that were added later.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_port(
    context: *mut ibv_context,
    port_num: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        query_port(
            context,
            port_num,
            attr,
            offset_of!(ibv_port_attr, port_cap_flags2),
        )
    }
}

/// `ibv_query_port_speed`: in units of 100 Mbit/s.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_port_speed(
    context: *mut ibv_context,
    port_num: u32,
    port_speed: *mut u64,
) -> c_int {
    status(|| {
        let context = find::<Context>(context)?;
        if port_num != 1 {
            return Err(Errno::INVAL);
        }
        let speed = speed(&port(context.ctx.which)).0;
        // SAFETY: the caller's promise.
        unsafe { put(port_speed, speed.into()) }
    })
}

pub(super) fn gids(which: Which) -> Result<Vec<ibv_gid_entry>, Errno> {
    let entry = |raw, gid_type, ndev_ifindex| ibv_gid_entry {
        gid: ibv_gid { raw },
        gid_index: 0,
        port_num: 1,
        gid_type,
        ndev_ifindex,
    };
    let mut gids: Vec<ibv_gid_entry> = match which {
        // iWARP has no GIDs. Providers show an Ethernet address, and programs search for its interface.
        Which::Iwarp => {
            let mut raw = [0; 16];
            raw[..6].copy_from_slice(&which.guid()[..6]);
            let first = gid::gids()?.into_iter().find(|gid| !gid.is_empty());
            let ifindex = first.map_or(0, |gid| gid.ifindex);
            vec![entry(raw, IBV_GID_TYPE_IB, ifindex)]
        }
        Which::Persona => gid::gids()?
            .into_iter()
            .map(|gid| entry(gid.raw(), IBV_GID_TYPE_ROCE_V2, gid.ifindex))
            .collect(),
    };
    for (index, gid) in gids.iter_mut().enumerate() {
        gid.gid_index = index as u32;
    }
    Ok(gids)
}

/// Entries of the GID table. The persona's table always has an empty one, as on adapters.
fn gid_room(which: Which, used: usize) -> usize {
    const LEAST: usize = 16;
    match which {
        Which::Iwarp => used,
        Which::Persona => LEAST.max(used + 1),
    }
}

fn is_empty(gid: &ibv_gid) -> bool {
    // SAFETY: any sixteen bytes are valid.
    unsafe { gid.raw == [0; 16] }
}

/// `ibv_query_gid`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_gid(
    context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    run(|| {
        let entry = gid_entry(context, u32::from(port_num), index as u32)?;
        // SAFETY: the caller's promise.
        unsafe { put(gid, entry.gid) }.map(|()| 0)
    })
}

fn gid_entry(context: *mut ibv_context, port_num: u32, index: u32) -> Result<ibv_gid_entry, Errno> {
    let context = find::<Context>(context)?;
    if port_num != 1 {
        return Err(Errno::INVAL);
    }
    let (gids, index) = (gids(context.ctx.which)?, index as usize);
    if let Some(entry) = gids.get(index) {
        return Ok(*entry);
    }
    if index >= gid_room(context.ctx.which, gids.len()) {
        return Err(Errno::INVAL);
    }
    Ok(ibv_gid_entry::zeroed())
}

/// `_ibv_query_gid_ex`
///
/// # Safety
/// As the manual page of `ibv_query_gid_ex` says.
pub unsafe fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port_num: u32,
    gid_index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    entry_size: usize,
) -> c_int {
    status(|| {
        if flags != 0 || entry.is_null() {
            return Err(Errno::INVAL);
        }
        let found = gid_entry(context, port_num, gid_index).map_err(|errno| {
            if errno == Errno::INVAL && find::<Context>(context).is_ok() && port_num == 1 {
                Errno::NODATA
            } else {
                errno
            }
        })?;
        if is_empty(&found.gid) {
            return Err(Errno::NODATA);
        }
        // SAFETY: the caller says how much room there is.
        unsafe { write_prefix(entry, &found, entry_size) };
        Ok(())
    })
}

/// `_ibv_query_gid_table`
///
/// # Safety
/// As the manual page of `ibv_query_gid_table` says.
pub unsafe fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max_entries: usize,
    flags: u32,
    entry_size: usize,
) -> isize {
    let fill = || {
        let context = find::<Context>(context)?;
        let mut gids = gids(context.ctx.which)?;
        gids.retain(|entry| !is_empty(&entry.gid));
        if flags != 0 || gids.len() > max_entries || (entries.is_null() && !gids.is_empty()) {
            return Err(Errno::INVAL);
        }
        for (at, gid) in gids.iter().enumerate() {
            let entry = entries.wrapping_byte_add(at * entry_size);
            // SAFETY: the caller passes the number and size of the entries that fit.
            unsafe { write_prefix(entry, gid, entry_size) };
        }
        Ok(gids.len() as isize)
    };
    fill().unwrap_or_else(|errno| -(errno.raw_os_error() as isize))
}

/// `ibv_query_gid_type` (a private call): IB and RoCE v1, or RoCE v2.
///
/// # Safety
/// As for `ibv_query_gid`.
pub unsafe fn ibv_query_gid_type(
    context: *mut ibv_context,
    port_num: u8,
    index: u32,
    gid_type: *mut ibv_gid_type,
) -> c_int {
    run(|| {
        let entry = gid_entry(context, u32::from(port_num), index)?;
        // In these older terms 0 is both InfiniBand and RoCE v1, 1 is RoCE v2.
        let old = u32::from(entry.gid_type == IBV_GID_TYPE_ROCE_V2);
        // SAFETY: the caller's promise.
        unsafe { put(gid_type, old) }.map(|()| 0)
    })
}

/// `ibv_query_pkey`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_pkey(
    context: *mut ibv_context,
    port_num: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    run(|| {
        find::<Context>(context)?;
        if port_num != 1 || index != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        unsafe { put(pkey, PARTITION.to_be()) }.map(|()| 0)
    })
}

/// `ibv_get_pkey_index`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_get_pkey_index(context: *mut ibv_context, port_num: u8, pkey: u16) -> c_int {
    run(|| {
        find::<Context>(context)?;
        if port_num == 1 && pkey == PARTITION.to_be() {
            Ok(0)
        } else {
            Err(Errno::INVAL)
        }
    })
}

/// `ibv_fork_init` does nothing, because no device reads physical pages.
pub fn ibv_fork_init() -> c_int {
    0
}

pub fn ibv_is_fork_initialized() -> ibv_fork_status {
    IBV_FORK_UNNEEDED
}

/// `ibv_dontfork_range`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_dontfork_range(_base: *mut std::ffi::c_void, _size: usize) -> c_int {
    0
}

/// `ibv_dofork_range`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_dofork_range(_base: *mut std::ffi::c_void, _size: usize) -> c_int {
    0
}
