//! Memory windows. Those of type 1 are bound by a call of their own, those of type 2 by work requests.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;
use weft_verbs::{SendOp, SendWr};

use super::context::Held;
use super::mr::{Mr, rights};
use super::object::{Kind, PerFork, Pool, find, turn};
use super::pd::Pd;
use super::qp::QpObj;
use super::types::*;
use crate::call::{pointer, status};

/// What an `ibv_mw` stands for.
pub(crate) struct Mw {
    native: weft_verbs::Mw,
    kind: ibv_mw_type,
    /// A window of type 1 has been bound by a request that was posted.
    bound: AtomicBool,
    _held: Held,
}

impl Kind for Mw {
    type C = ibv_mw;
    type Handle = ibv_mw;
    const MARK: u32 = 0x3e30_1419;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Mw>> = PerFork::new();
        POOL.get()
    }
}

impl Mw {
    pub(crate) fn is_type_2(&self) -> bool {
        self.kind == IBV_MW_TYPE_2
    }

    /// The key that it has now.
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
        let body = Mw {
            native: pd.native.alloc_mw().map_err(super::errno)?,
            kind,
            bound: AtomicBool::new(false),
            _held: pd.users.hold(),
        };
        let key = body.key();
        // SAFETY: a live object.
        let context = unsafe { (*pd.c()).context };
        let made = Mw::pool().make(body, |c, _| {
            c.context = context;
            c.pd = pd.handle();
            c.rkey = key;
            c.handle = key;
            c.r#type = kind;
        })?;
        Ok(made.handle())
    })
}

pub(crate) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    status(|| {
        drop(turn::<Mw>(mw)?.retire());
        Ok(())
    })
}

/// The operation that binds a window, as the program describes it.
///
/// # Errors
/// `EINVAL` for what is no region or has flags that windows cannot have.
pub(crate) fn binding(
    window: &Mw,
    new_rkey: u32,
    info: &ibv_mw_bind_info,
) -> Result<SendOp, Errno> {
    // A window is for peers: what it says of ourselves means nothing.
    const FLAGS: u32 = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_ZERO_BASED;
    if info.mw_access_flags & !FLAGS != 0 {
        return Err(Errno::INVAL);
    }
    Ok(SendOp::BindMw {
        window: window.key(),
        new_rkey,
        region: find::<Mr>(info.mr)?.key()?,
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
        let info = &bind.bind_info;
        if info.length > 0 && info.mr.is_null() {
            return Err(Errno::INVAL);
        }
        let key = mw.key();
        let invalidate = SendOp::LocalInvalidate { rkey: key };
        let new_key = key & !0xff | key.wrapping_add(1) & 0xff;
        let mut wrs = Vec::new();
        if info.length == 0 {
            wrs.push(SendWr::new(bind.wr_id, invalidate));
        } else {
            if mw.bound.load(Ordering::Relaxed) {
                wrs.push(SendWr::new(bind.wr_id, invalidate));
            }
            wrs.push(SendWr::new(bind.wr_id, binding(&mw, new_key, info)?));
        }
        if let Some(last) = wrs.last_mut() {
            last.signaled = bind.send_flags & IBV_SEND_SIGNALED != 0;
            last.fence = bind.send_flags & IBV_SEND_FENCE != 0;
        }
        qp.post(&wrs).map_err(|(_, errno)| errno)?;
        mw.bound.store(info.length > 0, Ordering::Relaxed);
        if info.length > 0 {
            // SAFETY: a live object; the program reads the key after this call.
            unsafe { (*mw.c()).rkey = new_key };
        }
        Ok(())
    })
}
