//! Datagrams that a socket receives are taken out of their frames.
//!
//! # Safety
//!
//! The program's buffers are as its call says.

use libc::{c_int, c_void, iovec, msghdr, socklen_t, ssize_t};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_ring::checked;
use weft_run::ud::{self, Opened};

use super::buffer::{Buffer, ROOM};
use super::frames::{COUNTS, RECEIVED, REFUSED, await_key, has_key, qkeys};
use super::rings::Out;
use super::{Dgram, ready};
use crate::iov::{copy_pieces, is_bad, one, total};
use crate::kernel::entry;
use crate::{kernel, next, set_errno, signal};

/// The queue pair number of a socket.
fn own_number(fd: c_int, d: &Dgram) -> Option<u32> {
    let known = d.number.load(Relaxed);
    if known != 0 {
        return Some(known);
    }
    let errno = crate::errno();
    let number = kernel::local_port(fd).map(ud::number);
    set_errno(errno);
    d.number.store(number.unwrap_or(0), Relaxed);
    number
}

/// Receives a datagram from the kernel, and takes it out of its frame. With `MSG_PEEK` too.
///
/// # Safety
/// As `recvmsg(2)`; the pointers beside a header may be bad.
pub(crate) unsafe fn receive(fd: c_int, d: &'static Dgram, out: &Out<'_>, flags: c_int) -> ssize_t {
    let failed = d.failed.swap(0, SeqCst);
    if failed != 0 {
        set_errno(failed);
        return -1;
    }
    let may_wait = may_wait(d, flags);
    loop {
        // SAFETY: the caller's promise.
        let n = unsafe { receive_now(fd, d, out, flags | libc::MSG_DONTWAIT) };
        if n >= 0 || crate::errno() != libc::EAGAIN {
            return n;
        }
        d.is_empty();
        if !may_wait {
            return n;
        }
        match await_one(fd, flags) {
            Awaited::Datagram => {}
            // SAFETY: the caller's promise.
            Awaited::End => return unsafe { receive_now(fd, d, out, flags) },
            Awaited::Error => return -1,
        }
    }
}

fn may_wait(d: &Dgram, flags: c_int) -> bool {
    // What two processes have is not followed in each of them.
    flags & libc::MSG_DONTWAIT == 0 && (!d.nonblock.load(Relaxed) || d.is_deaf())
}

/// Returns true if a call that has received a datagram goes on with the next one, for which it may wait. An error is left to the next call, in the kernel,
/// where others see it too.
pub(super) fn has_more(fd: c_int, d: &'static Dgram, flags: c_int) -> bool {
    let Some(_waiting) = ready::kernel_alone(d) else {
        return true;
    };
    let mut list = [entry(fd, libc::POLLIN)];
    let n = if may_wait(d, flags) {
        let limit = match d.patience.load(Relaxed) {
            0 => -1,
            ms => c_int::try_from(ms).unwrap_or(c_int::MAX),
        };
        signal::outside(|| kernel::poll(&mut list, limit))
    } else {
        kernel::look(&mut list, 0);
        c_int::from(list[0].revents != 0)
    };
    n > 0 && list[0].revents & libc::POLLERR == 0
}

enum Awaited {
    Datagram,
    /// The socket is shut down for reading.
    End,
    Error,
}

/// Waits for a datagram as a receive of the kernel's does, with its time limit, and holds nothing meanwhile: a signal handler may leave by a jump.
fn await_one(fd: c_int, flags: c_int) -> Awaited {
    let mut name = [0_u8; size_of::<libc::sockaddr_storage>()];
    // SAFETY: all zeros is the empty message.
    let mut message: msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = name.len() as socklen_t;
    let flags = flags | libc::MSG_PEEK;
    // SAFETY: a message without a buffer, and with room for a name.
    let n = signal::outside(|| unsafe { next::recvmsg(fd, &raw mut message, flags) });
    match n {
        ..0 => Awaited::Error,
        // Every datagram has a sender.
        _ if message.msg_namelen == 0 => Awaited::End,
        _ => Awaited::Datagram,
    }
}

unsafe fn receive_now(fd: c_int, d: &'static Dgram, out: &Out<'_>, flags: c_int) -> ssize_t {
    // A handler that left by a jump would not give the buffer back.
    let _busy = signal::begin_once();
    let Some(mut buffer) = Buffer::take() else {
        set_errno(libc::ENOMEM);
        return -1;
    };
    let whole = iovec {
        iov_base: buffer.0.as_ptr().cast(),
        iov_len: ROOM,
    };
    let mut name = [0_u8; size_of::<libc::sockaddr_storage>()];
    // SAFETY: all zeros is the empty message; the rest is the caller's promise.
    let (n, message) = unsafe {
        let mut message: msghdr = std::mem::zeroed();
        if let Some(header) = out.header.as_ref() {
            message = *header;
        } else if !out.name.is_null() {
            message.msg_name = name.as_mut_ptr().cast();
            message.msg_namelen = name.len() as socklen_t;
        }
        message.msg_iov = (&raw const whole).cast_mut();
        message.msg_iovlen = 1;
        let n = next::recvmsg(fd, &raw mut message, flags & !libc::MSG_TRUNC);
        (n, message)
    };
    let Ok(n) = usize::try_from(n) else {
        return -1;
    };
    let datagram = &buffer.bytes()[..n.min(ROOM)];
    let payload = unframed(fd, d, datagram, flags);
    let (len, room) = (payload.len(), total(out.iov));
    let given = len.min(room);
    let copied = copy_pieces(out.iov, 0, given, |to, piece, done| {
        let from = payload[done..][..piece].as_ptr();
        // SAFETY: into the program's memory.
        unsafe { checked::copy(to, from.cast_mut(), piece) }
    });
    if copied < given {
        set_errno(libc::EFAULT);
        return -1;
    }
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(header) = out.header.as_mut() {
            header.msg_namelen = message.msg_namelen;
            header.msg_controllen = message.msg_controllen;
            header.msg_flags = message.msg_flags & !libc::MSG_TRUNC;
            if len > room {
                header.msg_flags |= libc::MSG_TRUNC;
            }
        } else if !out.name.is_null()
            && let Err(errno) = give_name(out, &name, message.msg_namelen)
        {
            set_errno(errno);
            return -1;
        }
    }
    let told = if flags & libc::MSG_TRUNC != 0 {
        len
    } else {
        given
    };
    told as ssize_t
}

fn unframed<'a>(fd: c_int, d: &Dgram, datagram: &'a [u8], flags: c_int) -> &'a [u8] {
    if !ud::may_be_frame(datagram) {
        return datagram;
    }
    if !has_key() {
        await_key();
    }
    if !has_key() {
        return datagram;
    }
    let (payload, count) = match ud::open(datagram, &qkeys(), || own_number(fd, d)) {
        Opened::Plain => return datagram,
        Opened::Payload(range) => (&datagram[range], RECEIVED),
        // To drop it would let a receive wait after `poll` has announced it.
        Opened::Refused => (datagram, REFUSED),
    };
    if flags & libc::MSG_PEEK == 0 {
        COUNTS[count].fetch_add(1, Relaxed);
    }
    payload
}

/// Copies to memory of the program, which may not be there.
unsafe fn put(to: *mut c_void, bytes: &[u8]) -> Result<(), c_int> {
    let copied = copy_pieces(&one(to, bytes.len()), 0, bytes.len(), |to, len, done| {
        // SAFETY: as above.
        unsafe { checked::copy(to, bytes[done..][..len].as_ptr().cast_mut(), len) }
    });
    if copied == bytes.len() {
        Ok(())
    } else {
        Err(libc::EFAULT)
    }
}

/// Writes the sender's address as the kernel does.
unsafe fn give_name(out: &Out<'_>, name: &[u8], len: socklen_t) -> Result<(), c_int> {
    if is_bad(out.name_len) {
        return Err(libc::EFAULT);
    }
    // SAFETY: it was readable just now.
    let room = unsafe { out.name_len.read_unaligned() };
    if room > i32::MAX as socklen_t {
        return Err(libc::EINVAL);
    }
    // SAFETY: `put` takes any address.
    unsafe {
        put(out.name.cast(), &name[..room.min(len) as usize])?;
        put(out.name_len.cast(), &len.to_ne_bytes())
    }
}

/// The length of the kernel's next datagram without its frame. `None`: there is none, or an error of another datagram is to be told first.
pub(crate) fn next_len(fd: c_int, d: &'static Dgram) -> Option<usize> {
    let errno = crate::errno();
    let nobody = Out {
        iov: &[],
        name: null_mut(),
        name_len: null_mut(),
        header: null_mut(),
    };
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // A look would take the error away.
    let has_failed = kernel::poll_one(fd, 0, 0) & libc::POLLERR != 0;
    let len = if has_failed {
        None
    } else {
        // SAFETY: nothing of the program's is written.
        usize::try_from(unsafe { receive_now(fd, d, &nobody, flags) }).ok()
    };
    if len.is_none() && !has_failed && crate::errno() != libc::EAGAIN {
        // It came meanwhile: the next receive tells it.
        d.failed.store(crate::errno(), SeqCst);
    }
    set_errno(errno);
    len
}
