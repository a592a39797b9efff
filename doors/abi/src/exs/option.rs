//! Options of sockets: `getsockopt`, `setsockopt`, `exs_fcntl`, and `fcntl` for the blocking calls.

use std::ffi::{c_int, c_ulong, c_void};
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{linger, socklen_t, timeval};
use rustix::io::Errno;
use weft_exs::{Design, Kind, Mode};

use super::closing::LINGER;
use super::duplicate::fcntl_dup;
use super::queue::duration;
use super::socket::on_system;
use super::state::state;
use super::table::{Entry, Found};
use super::types::{
    EXS_DESIGN_ADVERT, EXS_DESIGN_SOURCE, EXS_F_GETBUFFER, EXS_F_GETCRC, EXS_F_GETCREDITS,
    EXS_F_GETDESIGN, EXS_F_GETMODE, EXS_F_GETSMALLPACKET, EXS_F_GETSTATS, EXS_F_SETBUFFER,
    EXS_F_SETCRC, EXS_F_SETCREDITS, EXS_F_SETDESIGN, EXS_F_SETMODE, EXS_F_SETSMALLPACKET,
    EXS_MODE_DIRECT, EXS_MODE_DYNAMIC, EXS_MODE_INDIRECT, EXS_MODE_PUBLISHED, EXS_TIMEOUT_ONCE,
    SO_ASYNC_RECV_ORDERED, SO_ASYNC_RECV_TIMEOUT, SO_ASYNC_SEND_TIMEOUT, Stats, Timeout,
};
use crate::option::{give, taken, time};

/// `ioctl`: whether the next byte is urgent.
pub(super) const SIOCATMARK: libc::Ioctl = 0x8905;

/// The direction of a time limit.
#[derive(Clone, Copy)]
enum Way {
    Send = 0,
    Recv = 1,
}

fn limit_of(entry: &Entry, way: Way) -> Option<Duration> {
    let options = entry.socket.options();
    match way {
        Way::Send => options.send_timeout,
        Way::Recv => options.recv_timeout,
    }
}

fn set_limit(entry: &Entry, way: Way, limit: timeval, once: bool) -> Result<c_int, Errno> {
    let limit = Some(duration(limit)?).filter(|limit| !limit.is_zero());
    entry.set_limit(way as usize, limit)?;
    entry.limits.once[way as usize].store(once && limit.is_some(), Ordering::Release);
    Ok(0)
}

/// `exs_getsockopt`
pub unsafe fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> Result<c_int, Errno> {
    let Some(entry) = of(fd, level, name)? else {
        let args = [level as usize, name as usize, value as usize, len as usize];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_getsockopt, fd, &args) };
    };
    let settings = entry.settings();
    let number = match (level, name) {
        (libc::SOL_SOCKET, libc::SO_ERROR) => match entry.error.swap(0, Ordering::AcqRel) {
            0 => entry.socket.take_error().map_or(0, Errno::raw_os_error),
            errno => errno,
        },
        (libc::SOL_SOCKET, libc::SO_TYPE) => match entry.socket.kind() {
            Kind::Stream => libc::SOCK_STREAM,
            Kind::SeqPacket => libc::SOCK_SEQPACKET,
        },
        (libc::SOL_SOCKET, libc::SO_DOMAIN) if settings.ipv6 => libc::AF_INET6,
        (libc::SOL_SOCKET, libc::SO_DOMAIN) => libc::AF_INET,
        (libc::SOL_SOCKET, libc::SO_PROTOCOL) => 0,
        (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => entry.listening.load(Ordering::Acquire).into(),
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => number(entry.socket.options().buffer),
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => number(entry.send_buffer() as u32),
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => settings.reuse_addr.into(),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => settings.keepalive.into(),
        (libc::SOL_SOCKET, name) if i64::from(name) == SO_ASYNC_RECV_ORDERED => 1,
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => settings.nodelay.into(),
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) if settings.ipv6 => 1,
        (libc::SOL_SOCKET, libc::SO_LINGER) => {
            let on = settings.linger;
            let linger = linger {
                l_onoff: on.is_some().into(),
                l_linger: number(on.unwrap_or_default().as_secs() as u32),
            };
            // SAFETY: the caller's promise.
            return unsafe { give(&[linger], value, len) };
        }
        (libc::SOL_SOCKET, name) => {
            let way = way(name).ok_or(Errno::NOPROTOOPT)?;
            let limit = time(limit_of(&entry, way));
            let once = entry.limits.once[way as usize].load(Ordering::Acquire);
            let whole = Timeout {
                to_time: limit,
                to_flags: if once { EXS_TIMEOUT_ONCE as c_int } else { 0 },
            };
            // A program without room for the flags gets only the time.
            // SAFETY: the caller's promise.
            return unsafe { give(&[whole], value, len) };
        }
        _ => return Err(Errno::NOPROTOOPT),
    };
    // SAFETY: the caller's promise.
    unsafe { give(&[number], value, len) }
}

fn number(value: u32) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

fn way(name: c_int) -> Option<Way> {
    match (name, i64::from(name)) {
        (libc::SO_SNDTIMEO, _) | (_, SO_ASYNC_SEND_TIMEOUT) => Some(Way::Send),
        (libc::SO_RCVTIMEO, _) | (_, SO_ASYNC_RECV_TIMEOUT) => Some(Way::Recv),
        _ => None,
    }
}

/// The socket of the option; `None`: a kernel option. Our own options on a kernel socket apply to its outstanding operations.
fn of(fd: c_int, level: c_int, name: c_int) -> Result<Option<std::sync::Arc<Entry>>, Errno> {
    let ours = [
        SO_ASYNC_RECV_ORDERED,
        SO_ASYNC_SEND_TIMEOUT,
        SO_ASYNC_RECV_TIMEOUT,
    ];
    match state().sockets.find(fd)? {
        Found::Exs(entry) => Ok(Some(entry)),
        Found::System if level == libc::SOL_SOCKET && ours.contains(&name.into()) => {
            state().operable(fd).map(Some)
        }
        Found::System => Ok(None),
    }
}

/// `exs_setsockopt`
pub unsafe fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> Result<c_int, Errno> {
    let Some(entry) = of(fd, level, name)? else {
        let args = [level as usize, name as usize, value as usize, len as usize];
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_setsockopt, fd, &args) };
    };
    if level == libc::SOL_SOCKET
        && let Some(way) = way(name)
    {
        // SAFETY: the caller's promise, here and below.
        let limit = unsafe { taken::<timeval>(value, len) }?;
        let once = if len as usize >= size_of::<Timeout>() {
            // SAFETY: as above.
            match i64::from(unsafe { taken::<Timeout>(value, len) }?.to_flags) {
                0 => false,
                EXS_TIMEOUT_ONCE => true,
                _ => return Err(Errno::INVAL),
            }
        } else {
            false
        };
        return set_limit(&entry, way, limit, once);
    }
    if (level, name) == (libc::SOL_SOCKET, libc::SO_LINGER) {
        // SAFETY: as above.
        let wanted = unsafe { taken::<linger>(value, len) }?;
        let seconds = u64::try_from(wanted.l_linger).map_err(|_| Errno::INVAL)?;
        let linger = (wanted.l_onoff != 0).then(|| Duration::from_secs(seconds));
        entry.set(|s| s.linger = linger);
        return Ok(0);
    }
    // SAFETY: as above.
    let number = unsafe { taken::<c_int>(value, len) }?;
    let on = number != 0;
    match (level, name) {
        (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
            // The kernel also uses the nearest possible value.
            let wanted = u32::try_from(number).unwrap_or(0).clamp(4096, 1 << 30);
            entry.socket.set_options(|o| o.buffer = wanted)?;
        }
        (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
            let wanted = usize::try_from(number).unwrap_or(0).max(4096);
            entry.set(|s| s.send_buffer = Some(wanted));
        }
        (libc::SOL_SOCKET, libc::SO_REUSEADDR) => entry.set(|s| s.reuse_addr = on),
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => entry.set(|s| s.keepalive = on),
        (libc::IPPROTO_TCP, libc::TCP_NODELAY) => entry.set(|s| s.nodelay = on),
        // Each socket has exactly one family.
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) if entry.settings().ipv6 && on => {}
        (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) if entry.settings().ipv6 => {
            return Err(Errno::INVAL);
        }
        (libc::SOL_SOCKET, name) if i64::from(name) == SO_ASYNC_RECV_ORDERED => {}
        _ => return Err(Errno::NOPROTOOPT),
    }
    Ok(0)
}

/// The time that a blocking close waits.
pub(super) fn linger_of(entry: &Entry) -> Duration {
    let settings = entry.settings();
    settings.linger.unwrap_or(LINGER)
}

/// `exs_fcntl`. The argument is an `int` or a pointer, depending on the command.
pub unsafe fn fcntl(fd: c_int, cmd: c_int, arg: usize) -> Result<c_int, Errno> {
    let command = i64::from(cmd);
    if !(EXS_F_GETCREDITS..=EXS_F_GETSTATS).contains(&command) {
        // SAFETY: the caller's promise.
        return unsafe { plain_fcntl(fd, cmd, arg) };
    }
    let entry = state().operable(fd)?;
    let socket = &entry.socket;
    let options = socket.options();
    let new = arg as c_int;
    let value = match command {
        EXS_F_GETCREDITS => number(options.credits).into(),
        EXS_F_GETSMALLPACKET => number(options.small_packet_max).into(),
        EXS_F_GETBUFFER => number(options.buffer).into(),
        EXS_F_GETMODE => match options.mode {
            Mode::Dynamic => EXS_MODE_DYNAMIC,
            Mode::Published => EXS_MODE_PUBLISHED,
            Mode::Direct => EXS_MODE_DIRECT,
            Mode::Indirect => EXS_MODE_INDIRECT,
        },
        EXS_F_GETDESIGN => match options.design {
            Design::Advert => EXS_DESIGN_ADVERT,
            Design::Source => EXS_DESIGN_SOURCE,
        },
        EXS_F_GETCRC => options.crc.into(),
        EXS_F_GETSTATS => {
            // SAFETY: the caller's promise.
            unsafe { stats(&entry, arg as *mut Stats) }?;
            0
        }
        EXS_F_SETCREDITS | EXS_F_SETSMALLPACKET | EXS_F_SETBUFFER => {
            let new = u32::try_from(new).map_err(|_| Errno::INVAL)?;
            socket.set_options(|o| match command {
                EXS_F_SETCREDITS => o.credits = new,
                EXS_F_SETSMALLPACKET => o.small_packet_max = new,
                _ => o.buffer = new,
            })?;
            0
        }
        EXS_F_SETMODE => {
            let mode = match i64::from(new) {
                EXS_MODE_DYNAMIC => Mode::Dynamic,
                EXS_MODE_PUBLISHED => Mode::Published,
                EXS_MODE_DIRECT => Mode::Direct,
                EXS_MODE_INDIRECT => Mode::Indirect,
                _ => return Err(Errno::INVAL),
            };
            socket.set_options(|o| o.mode = mode)?;
            0
        }
        EXS_F_SETDESIGN => {
            let design = match i64::from(new) {
                EXS_DESIGN_ADVERT => Design::Advert,
                EXS_DESIGN_SOURCE => Design::Source,
                _ => return Err(Errno::INVAL),
            };
            socket.set_options(|o| o.design = design)?;
            0
        }
        EXS_F_SETCRC => {
            socket.set_options(|o| o.crc = new != 0)?;
            0
        }
        _ => return Err(Errno::INVAL),
    };
    Ok(value as c_int)
}

/// # Safety
/// `to` is null or has room.
unsafe fn stats(entry: &Entry, to: *mut Stats) -> Result<(), Errno> {
    if to.is_null() {
        return Err(Errno::FAULT);
    }
    let stats = entry.socket.stats();
    let new = Stats {
        st_direct_sent: stats.direct_sent,
        st_direct_bytes_sent: stats.direct_bytes_sent,
        st_indirect_sent: stats.indirect_sent,
        st_indirect_bytes_sent: stats.indirect_bytes_sent,
        st_small_sent: stats.small_sent,
        st_small_bytes_sent: stats.small_bytes_sent,
        st_direct_received: stats.direct_received,
        st_direct_bytes_received: stats.direct_bytes_received,
        st_indirect_received: stats.indirect_received,
        st_indirect_bytes_received: stats.indirect_bytes_received,
        st_small_received: stats.small_received,
        st_small_bytes_received: stats.small_bytes_received,
        st_mode_switches: stats.mode_switches,
        st_adverts_sent: stats.adverts_sent,
        st_adverts_received: stats.adverts_received,
        st_adverts_dropped: stats.adverts_dropped,
        st_credit_stalls: stats.credit_stalls,
        st_ring_stalls: stats.ring_stalls,
        st_retracts: stats.retracts,
        st_acks: stats.acks,
        st_credit_messages: stats.credit_messages,
    };
    // SAFETY: the caller's promise.
    unsafe { to.write(new) };
    Ok(())
}

/// `exs_sync_fcntl`
pub unsafe fn plain_fcntl(fd: c_int, cmd: c_int, arg: usize) -> Result<c_int, Errno> {
    if matches!(cmd, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        return fcntl_dup(fd, cmd, arg);
    }
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_fcntl, fd, &[cmd as usize, arg]) };
    };
    match cmd {
        libc::F_GETFL => Ok(if entry.nonblock() {
            libc::O_RDWR | libc::O_NONBLOCK
        } else {
            libc::O_RDWR
        }),
        libc::F_SETFL => {
            let nonblock = arg as c_int & libc::O_NONBLOCK != 0;
            entry.set(|s| s.nonblock = nonblock);
            Ok(0)
        }
        // SAFETY: no pointers; the flag is the descriptor's.
        libc::F_GETFD | libc::F_SETFD => unsafe {
            on_system(libc::SYS_fcntl, fd, &[cmd as usize, arg])
        },
        _ => Err(Errno::INVAL),
    }
}

/// `exs_sync_ioctl`
pub unsafe fn ioctl(fd: c_int, request: c_ulong, arg: usize) -> Result<c_int, Errno> {
    let request = request as libc::Ioctl;
    let Found::Exs(entry) = state().sockets.find(fd)? else {
        // SAFETY: the caller's promise.
        return unsafe { on_system(libc::SYS_ioctl, fd, &[request as usize, arg]) };
    };
    let value = arg as *mut c_int;
    let answer = match request {
        libc::FIOCLEX | libc::FIONCLEX => {
            // SAFETY: no pointers; the flag is the descriptor's.
            return unsafe { on_system(libc::SYS_ioctl, fd, &[request as usize]) };
        }
        libc::FIONBIO | libc::FIONREAD | libc::TIOCOUTQ | SIOCATMARK if value.is_null() => {
            return Err(Errno::FAULT);
        }
        libc::FIONBIO => {
            // SAFETY: the caller's promise.
            let nonblock = unsafe { value.read_unaligned() } != 0;
            entry.set(|s| s.nonblock = nonblock);
            return Ok(0);
        }
        libc::FIONREAD if entry.listening.load(Ordering::Acquire) => return Err(Errno::INVAL),
        libc::FIONREAD => entry.socket.available(),
        libc::TIOCOUTQ => entry.unsent.load(Ordering::Acquire) as u64,
        // There are no urgent data.
        SIOCATMARK => 0,
        _ => return Err(Errno::NOTTY),
    };
    // SAFETY: the caller's promise.
    unsafe { value.write_unaligned(c_int::try_from(answer).unwrap_or(c_int::MAX)) };
    Ok(0)
}
