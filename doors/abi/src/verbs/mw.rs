//! Memory windows. A separate call binds those of type 1, work requests bind those of type 2.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use weft_verbs::{SendOp, SendWr};

use super::access::rights;

use super::mr::Mr;
use super::object::{Guard, Kind as _, find, kind, turn};
use super::pd::Pd;
use super::qp::QpObj;
use super::types::*;
use super::users::{Held, end};
use super::work::set_flags;
use crate::call::{pointer, status};

/// The object behind an `ibv_mw`.
pub(crate) struct Mw {
    native: weft_verbs::Mw,
    kind: ibv_mw_type,
    /// The key of the latest posted bind of type 1.
    posted: AtomicU32,
    _held: Held,
}

kind!(Mw as ibv_mw, 0x3e30_1419);

impl Mw {
    pub(crate) fn is_type_2(&self) -> bool {
        self.kind == IBV_MW_TYPE_2
    }

    pub(crate) fn key(&self) -> u32 {
        self.native.rkey()
    }
}

pub(crate) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    pointer(|| {
        if !matches!(kind, IBV_MW_TYPE_1 | IBV_MW_TYPE_2) {
            return Err(Errno::INVAL);
        }
        let pd = find::<Pd>(pd)?;
        let native = if kind == IBV_MW_TYPE_1 {
            pd.native.alloc_mw_type_1()
        } else {
            pd.native.alloc_mw()
        };
        let native = native.map_err(super::errno)?;
        let key = native.rkey();
        let body = Mw {
            native,
            kind,
            posted: AtomicU32::new(key),
            _held: pd.users.hold(),
        };
        let made = Mw::pool().make(body, |c, _| {
            c.context = pd.context();
            c.pd = pd.handle();
            c.rkey = key;
            c.handle = key;
            c.r#type = kind;
        })?;
        Ok(made.handle())
    })
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    end::<Mw>(mw)
}

/// The operation that binds a window, as the program describes it.
///
/// # Errors
/// `EINVAL` when it is not a region, or for flags that windows cannot have.
pub(crate) fn binding(
    window: &Mw,
    new_rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<SendOp, Errno> {
    // A window is for peers: its local rights have no effect.
    const FLAGS: u32 = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_ZERO_BASED;
    if info.mw_access_flags & !FLAGS != 0 {
        return Err(Errno::INVAL);
    }
    let unbinds = !window.is_type_2() && info.length == 0;
    let region = if unbinds {
        0
    } else {
        find::<Mr>(info.mr)?.key()?
    };
    Ok(SendOp::BindMw {
        window: window.key(),
        new_rkey,
        region,
        addr: info.addr,
        len: info.length,
        access: rights(info.mw_access_flags & !IBV_ACCESS_LOCAL_WRITE),
    })
}

pub(crate) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    status(|| {
        let mw = turn::<Mw>(mw)?;
        let qp = find::<QpObj>(qp)?;
        if mw.is_type_2() || bind.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let bind = unsafe { *bind };
        let key = mw.posted.load(Ordering::Relaxed);
        let new_key = key & !0xff | key.wrapping_add(1) & 0xff;
        let mut wr = SendWr::new(bind.wr_id, binding(&mw, new_key, &bind.bind_info)?);
        set_flags(&mut wr, bind.send_flags);
        qp.post_one(&mut wr)?;
        mw.posted.store(new_key, Ordering::Relaxed);
        show_key(&mw, new_key);
        Ok(())
    })
}

/// Posts a request that binds a window of type 2. The window shows its new key at once, as with `irdma`.
///
/// # Safety
/// As for `ibv_post_send`.
#[cold]
pub(crate) unsafe fn post_bind(qp: &QpObj, c: *const ibv_send_wr) -> Result<(), Errno> {
    // SAFETY: the caller's promise.
    let c = unsafe { *c };
    // SAFETY: the opcode selects this member of the union.
    let bind = unsafe { c.op.bind_mw };
    let mw = find::<Mw>(bind.mw)?;
    if !mw.is_type_2() || qp.is_datagram() {
        return Err(Errno::INVAL);
    }
    let mut wr = SendWr::new(c.wr_id, binding(&mw, bind.rkey, &bind.bind_info)?);
    set_flags(&mut wr, c.send_flags);
    qp.post_one(&mut wr)?;
    show_bound(&mw, bind.rkey);
    Ok(())
}

/// Shows the key of a window of type 2 after a bind: the program chooses its low 8 bits only.
pub(crate) fn show_bound(mw: &Guard<Mw>, asked: u32) {
    show_key(mw, mw.key() & !0xff | asked & 0xff);
}

fn show_key(mw: &Guard<Mw>, key: u32) {
    // SAFETY: a live object; the program reads the key after the call.
    unsafe { (*mw.c()).rkey = key };
}
