//! libiw: the calls of `<iw.h>`, over `weft_iw`.
//!
//! # Safety
//!
//! Each call is as safe as the header and iw(7) state: pointers are null or point to what the header names, memory stays mapped until it is deregistered,
//! and a context or listener is not used after the call that frees it.
#![allow(clippy::missing_safety_doc)] // the section above is for all

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Display;
use std::ptr::null_mut;

use rustix::io::Errno;
use weft_abi::call::run;
use weft_iw::{Access, Context, CqType, Error, Flags, Listener, Lmr, Rmr, State};
use weft_verbs::{RawMemory, RemoteAddr, Sge, Wc, WcOpcode, WcStatus};

type Fallible<T> = Result<T, Errno>;

/// `iw_ctx_t`
pub struct Ctx(Context);

/// `iw_lmr_t`
#[repr(C)]
pub struct CLmr {
    addr: *mut c_void,
    size: usize,
    region: *mut Region,
}

/// The library's part of a local memory region.
pub struct Region {
    lmr: Lmr,
    /// Memory that the library has allocated, or null.
    own: *mut c_void,
}

/// `iw_rmr_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CRmr {
    addr: u64,
    rkey: u32,
    size: u32,
}

/// `iw_sge_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CSge {
    lmr: *const CLmr,
    offset: usize,
    length: usize,
}

/// `iw_wc_t`
#[repr(C)]
pub struct CWc {
    wr_id: u64,
    status: u32,
    opcode: u32,
    byte_len: u32,
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps the reason for `iw_error`.
fn because(reason: impl Display, errno: Errno) -> Errno {
    let text = reason.to_string().replace('\0', " ");
    LAST.set(CString::new(text).unwrap_or_default());
    errno
}

fn failed(error: Error) -> Errno {
    let errno = match &error {
        Error::State { .. } | Error::Range { .. } => Errno::INVAL,
        Error::Address { source, .. } => {
            Errno::from_io_error(source).unwrap_or(Errno::ADDRNOTAVAIL)
        }
        Error::Ended => Errno::NOTCONN,
        Error::Advertisements | Error::Post(_) => Errno::NOBUFS,
        Error::NotAnAdvertisement(_) => Errno::PROTO,
        Error::Memory(_) => Errno::FAULT,
        Error::Connect(weft_verbs::cm::ConnectError::Io(source)) => {
            Errno::from_io_error(source).unwrap_or(Errno::CONNREFUSED)
        }
        Error::Connect(_) => Errno::CONNREFUSED,
        Error::Verbs(_) => Errno::NOMEM,
        Error::Completion(_) | Error::Overrun(_) => Errno::IO,
    };
    because(error, errno)
}

fn null() -> Errno {
    because("a null pointer", Errno::FAULT)
}

/// # Safety
/// Null, or a live object that no other thread changes.
unsafe fn of<'a, T>(at: *const T) -> Fallible<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { at.as_ref() }.ok_or_else(null)
}

/// # Safety
/// Null, or a live object that no other thread uses.
unsafe fn of_mut<'a, T>(at: *mut T) -> Fallible<&'a mut T> {
    // SAFETY: the caller's promise.
    unsafe { at.as_mut() }.ok_or_else(null)
}

/// # Safety
/// Null, or from `Box::into_raw`, and not used again.
unsafe fn taken<T>(at: *mut T) -> Fallible<T> {
    if at.is_null() {
        return Err(null());
    }
    // SAFETY: the caller's promise.
    Ok(*unsafe { Box::from_raw(at) })
}

/// # Safety
/// Null or writable.
unsafe fn give<T>(value: T, out: *mut T) -> Fallible<c_int> {
    if out.is_null() {
        return Err(null());
    }
    // SAFETY: the caller's promise.
    unsafe { out.write(value) };
    Ok(0)
}

/// # Safety
/// Null, or text that ends with a zero.
unsafe fn host<'a>(text: *const c_char) -> Fallible<&'a str> {
    if text.is_null() {
        return Err(null());
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|error| because(error, Errno::INVAL))
}

fn access(rights: c_int) -> Fallible<Access> {
    const RIGHTS: [(c_int, Access); 3] = [
        (1, Access::LOCAL_WRITE),
        (2, Access::REMOTE_WRITE),
        (4, Access::REMOTE_READ),
    ];
    chosen(rights, &RIGHTS, Access::LOCAL_WRITE, |all, one| all | one)
}

fn flags(given: c_int) -> Fallible<Flags> {
    const FLAGS: [(c_int, Flags); 3] = [
        (1, Flags::FENCE),
        (2, Flags::SIGNALED),
        (4, Flags::SOLICITED),
    ];
    chosen(given, &FLAGS, Flags::empty(), |all, one| all | one)
}

fn chosen<T: Copy>(
    bits: c_int,
    of: &[(c_int, T)],
    none: T,
    with: impl Fn(T, T) -> T,
) -> Fallible<T> {
    let known = of.iter().fold(0, |known, (bit, _)| known | bit);
    if bits & !known != 0 {
        return Err(because(
            format!("there is no flag {:#x}", bits & !known),
            Errno::INVAL,
        ));
    }
    let set = of.iter().filter(|(bit, _)| bits & bit != 0);
    Ok(set.fold(none, |all, (_, one)| with(all, *one)))
}

impl CLmr {
    /// # Safety
    /// Null, or filled in by this library and not deregistered.
    unsafe fn lmr<'a>(at: *const CLmr) -> Fallible<&'a Lmr> {
        // SAFETY: the caller's promise.
        let region = unsafe { of(of(at)?.region) }?;
        Ok(&region.lmr)
    }

    fn new(addr: *mut c_void, lmr: Lmr, own: *mut c_void) -> CLmr {
        CLmr {
            addr,
            size: lmr.len(),
            region: Box::into_raw(Box::new(Region { lmr, own })),
        }
    }
}

impl CRmr {
    fn rmr(self) -> Rmr {
        let remote = RemoteAddr {
            addr: self.addr,
            rkey: self.rkey,
        };
        Rmr::new(remote, self.size)
    }
}

/// # Safety
/// `sgl` has `n` elements, and the memory of each is registered.
unsafe fn sges(sgl: *const CSge, n: c_int) -> Fallible<Vec<Sge>> {
    let n = usize::try_from(n).map_err(|error| because(error, Errno::INVAL))?;
    if sgl.is_null() && n > 0 {
        return Err(null());
    }
    (0..n)
        .map(|i| {
            // SAFETY: the caller's promise.
            let piece = unsafe { sgl.add(i).read() };
            // SAFETY: the caller's promise.
            let lmr = unsafe { CLmr::lmr(piece.lmr) }?;
            lmr.sge(piece.offset, piece.length).map_err(failed)
        })
        .collect()
}

fn id(posted: Result<u64, Error>) -> Fallible<i64> {
    let id = posted.map_err(failed)?;
    Ok(i64::try_from(id).unwrap_or(i64::MAX))
}

/// Makes a C call of a body that may fail.
macro_rules! exports {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: see iw(7).")]
        $(#[$doc])*
        // SAFETY: no other code has this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $result {
            run(|| -> Fallible<$result> { $body })
        }
    )*};
}

exports! {
    iw_ctx_alloc(name: *const c_char, port: u16, out: *mut *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        let name = unsafe { host(name) }?;
        let context = Context::alloc((name, port)).map_err(failed)?;
        // SAFETY: the caller's promise.
        unsafe { given(Ctx(context), out) }
    }

    iw_connect(ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { of_mut(ctx) }?.0.connect().map(|()| 0).map_err(failed)
    }

    iw_open(name: *const c_char, port: u16, out: *mut *mut Listener) -> c_int {
        // SAFETY: the caller's promise.
        let name = unsafe { host(name) }?;
        let listener = Listener::open((name, port)).map_err(failed)?;
        // SAFETY: the caller's promise.
        unsafe { given(listener, out) }
    }

    iw_port(listener: *const Listener) -> c_int {
        // SAFETY: the caller's promise.
        Ok(unsafe { of(listener) }?.local_addr().port().into())
    }

    iw_listen(listener: *mut Listener, out: *mut *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        let context = unsafe { of(listener) }?.listen().map_err(failed)?;
        // SAFETY: the caller's promise.
        unsafe { given(Ctx(context), out) }
    }

    iw_close(listener: *mut Listener) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { taken(listener) }.map(|_| 0)
    }

    iw_accept(ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { of_mut(ctx) }?.0.accept().map(|()| 0).map_err(failed)
    }

    iw_reject(ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { taken(ctx) }?.0.reject(&[]).map(|()| 0).map_err(failed)
    }

    iw_state(ctx: *const Ctx) -> c_int {
        // SAFETY: the caller's promise.
        Ok(match unsafe { of(ctx) }?.0.state() {
            State::Invalid => 0,
            State::Valid => 1,
            State::ConnReq => 2,
            State::Connected => 3,
        })
    }

    iw_disconnect(ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { taken(ctx) }?.0.disconnect().map(|()| 0).map_err(failed)
    }

    iw_await_disconnect(ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { taken(ctx) }?.0.await_disconnect().map(|_| 0).map_err(failed)
    }

    iw_ctx_free(ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { taken(ctx) }.map(|_| 0)
    }

    iw_lmr_create(size: usize, rights: c_int, out: *mut CLmr, ctx: *mut Ctx) -> c_int {
        // SAFETY: no pointers.
        let own = unsafe { libc::calloc(size.max(1), 1) };
        if own.is_null() {
            return Err(because("no memory", Errno::NOMEM));
        }
        // SAFETY: the caller's promise; the memory is freed after the region.
        let made = unsafe { register(own, size, rights, out, ctx, own) };
        // SAFETY: from `calloc`, and nothing uses it.
        made.inspect_err(|_| unsafe { libc::free(own) })
    }

    iw_lmr_register(addr: *mut c_void, size: usize, rights: c_int, out: *mut CLmr, ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { register(addr, size, rights, out, ctx, null_mut()) }
    }

    iw_lmr_deregister(lmr: *mut CLmr) -> c_int {
        // SAFETY: the caller's promise.
        let lmr = unsafe { of_mut(lmr) }?;
        // SAFETY: made by `CLmr::new`, and null after this.
        let Region { lmr: region, own } = unsafe { taken(std::mem::replace(&mut lmr.region, null_mut())) }?;
        // On an error the device may still use the memory, which then stays.
        region.deregister().map_err(failed)?;
        // SAFETY: null, or from `calloc`; no region is left of it.
        unsafe { libc::free(own) };
        lmr.addr = null_mut();
        lmr.size = 0;
        Ok(0)
    }

    iw_post_send_adv(lmr: *const CLmr, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (lmr, ctx) = unsafe { (CLmr::lmr(lmr)?, of(ctx)?) };
        id(ctx.0.post_send_adv(lmr))
    }

    iw_post_recv_adv(ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        unsafe { of(ctx) }?.0.post_recv_adv().map(|()| 0).map_err(failed)
    }

    iw_wait_recv_adv(out: *mut CRmr, ctx: *mut Ctx) -> c_int {
        // SAFETY: the caller's promise.
        let rmr = unsafe { of(ctx) }?.0.wait_recv_adv().map_err(failed)?;
        let RemoteAddr { addr, rkey } = rmr.remote();
        let size = rmr.len() as u32;
        let rmr = CRmr { addr, rkey, size };
        // SAFETY: the caller's promise.
        unsafe { give(rmr, out) }
    }

    post_send_lmr(src: *const CLmr, at: usize, len: usize, how: c_int, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (src, ctx) = unsafe { (CLmr::lmr(src)?, of(ctx)?) };
        id(ctx.0.post_send_lmr(src, at, len, flags(how)?))
    }

    post_write_lmr(src: *const CLmr, at: usize, dst: *const CRmr, to: usize, len: usize, how: c_int, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (src, dst, ctx) = unsafe { (CLmr::lmr(src)?, of(dst)?.rmr(), of(ctx)?) };
        id(ctx.0.post_write_lmr(src, at, &dst, to, len, flags(how)?))
    }

    post_read_lmr(dst: *const CLmr, to: usize, src: *const CRmr, from: usize, len: usize, how: c_int, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (dst, src, ctx) = unsafe { (CLmr::lmr(dst)?, of(src)?.rmr(), of(ctx)?) };
        id(ctx.0.post_read_lmr(dst, to, &src, from, len, flags(how)?))
    }

    post_recv_lmr(dst: *const CLmr, to: usize, len: usize, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (dst, ctx) = unsafe { (CLmr::lmr(dst)?, of(ctx)?) };
        id(ctx.0.post_recv_lmr(dst, to, len))
    }

    post_send_sgl(sgl: *const CSge, n: c_int, how: c_int, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (sgl, ctx) = unsafe { (sges(sgl, n)?, of(ctx)?) };
        id(ctx.0.post_send_sgl(&sgl, flags(how)?))
    }

    post_write_sgl(sgl: *const CSge, n: c_int, dst: *const CRmr, to: usize, how: c_int, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (sgl, dst, ctx) = unsafe { (sges(sgl, n)?, of(dst)?.rmr(), of(ctx)?) };
        id(ctx.0.post_write_sgl(&sgl, &dst, to, flags(how)?))
    }

    post_read_sgl(sgl: *const CSge, n: c_int, src: *const CRmr, from: usize, how: c_int, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (sgl, src, ctx) = unsafe { (sges(sgl, n)?, of(src)?.rmr(), of(ctx)?) };
        id(ctx.0.post_read_sgl(&sgl, &src, from, flags(how)?))
    }

    post_recv_sgl(sgl: *const CSge, n: c_int, ctx: *mut Ctx) -> i64 {
        // SAFETY: the caller's promise.
        let (sgl, ctx) = unsafe { (sges(sgl, n)?, of(ctx)?) };
        id(ctx.0.post_recv_sgl(&sgl))
    }

    await_completions(cq: c_int, n: c_int, list: *mut CWc, ctx: *mut Ctx) -> c_int {
        let cq = match cq {
            0 => CqType::Send,
            1 => CqType::Recv,
            _ => return Err(because(format!("there is no queue {cq}"), Errno::INVAL)),
        };
        let n = usize::try_from(n).map_err(|error| because(error, Errno::INVAL))?;
        if list.is_null() && n > 0 {
            return Err(null());
        }
        // SAFETY: the caller's promise.
        let ctx = unsafe { of(ctx) }?;
        // What does not come has this status.
        let none = Wc {
            status: WcStatus::GeneralErr,
            ..Wc::default()
        };
        let mut found = vec![none; n];
        let result = ctx.0.await_completions(cq, &mut found);
        for (i, wc) in found.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe { list.add(i).write(completion(wc)) };
        }
        result.map(|()| 0).map_err(failed)
    }
}

/// `iw_error`: why the last call of this thread failed. The text stays until the next one fails.
// SAFETY: no other code has this name.
#[unsafe(no_mangle)]
pub extern "C" fn iw_error() -> *const c_char {
    LAST.with_borrow(|text| text.as_ptr())
}

/// # Safety
/// `out` is null or writable.
unsafe fn given<T>(made: T, out: *mut *mut T) -> Fallible<c_int> {
    if out.is_null() {
        return Err(null());
    }
    // SAFETY: the caller's promise.
    unsafe { give(Box::into_raw(Box::new(made)), out) }
}

/// # Safety
/// As for `iw_lmr_register`.
unsafe fn register(
    addr: *mut c_void,
    size: usize,
    rights: c_int,
    out: *mut CLmr,
    ctx: *mut Ctx,
    own: *mut c_void,
) -> Fallible<c_int> {
    if out.is_null() {
        return Err(null());
    }
    // SAFETY: the caller's promise.
    let ctx = unsafe { of(ctx) }?;
    // SAFETY: the caller's promise: it stays until it is deregistered.
    let memory = unsafe { RawMemory::new(addr.cast(), size) }.ok_or_else(null)?;
    let lmr = ctx.0.lmr_register_raw(&memory, access(rights)?);
    let lmr = CLmr::new(addr, lmr.map_err(failed)?, own);
    // SAFETY: the caller's promise.
    unsafe { give(lmr, out) }
}

fn completion(wc: &Wc) -> CWc {
    CWc {
        wr_id: wc.wr_id,
        status: wc.status as u32,
        opcode: match wc.opcode {
            WcOpcode::Write => 1,
            WcOpcode::Read => 2,
            WcOpcode::Recv | WcOpcode::RecvWithImm => 128,
            _ => 0,
        },
        byte_len: wc.byte_len,
    }
}
