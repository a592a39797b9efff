//! Options of sockets: `rsetsockopt`, `rgetsockopt`, `rfcntl`.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::time::Duration;

use libc::{linger, socklen_t, timeval};
use rustix::io::Errno;
use weft_rsockets::{Options, Socket};

use super::table::{Entry, Kind, Settings, find};
use crate::call::{run, system};
use crate::once::ForkOnce;
use crate::option::{give, taken, time};
use crate::verbs::settings;

/// Options of RDMA, at this level.
const SOL_RDMA: c_int = 0x1_0000;
/// Entries of the send queue.
const RDMA_SQSIZE: c_int = 0;
/// Entries of the receive queue.
const RDMA_RQSIZE: c_int = 1;
/// Bytes in a work request.
const RDMA_INLINE: c_int = 2;
/// Mappings that the peer may make.
const RDMA_IOMAPSIZE: c_int = 3;
/// The path of the connection. There is one only: a value that is set is only returned again.
const RDMA_ROUTE: c_int = 4;

/// The value of `TCP_MAXSEG`; rsockets have no segments.
const MAX_SEGMENT: c_int = 2048;
/// The longest path record that is kept.
const MOST_ROUTE: usize = 4096;

/// The administrator's settings for all sockets, from the files of the manual page.
pub(super) fn defaults(options: &mut Options) {
    static FILES: ForkOnce<Options> = ForkOnce::new();
    *options = *FILES.get_or_init(|| {
        let number = |name: &str| -> Option<u32> {
            let text = std::fs::read_to_string(format!("/etc/rdma/rsocket/{name}")).ok()?;
            text.trim().parse().ok()
        };
        let short = |name: &str| Some(u16::try_from(number(name)?).unwrap_or(u16::MAX));
        let mut options = Options {
            link: settings::link(),
            ..Options::default()
        };
        let Options {
            recv_buffer,
            send_buffer,
            send_queue,
            recv_queue,
            inline,
            maps,
            ..
        } = &mut options;
        *recv_buffer = number("mem_default").unwrap_or(*recv_buffer);
        *send_buffer = number("wmem_default").unwrap_or(*send_buffer);
        *send_queue = short("sqsize_default").unwrap_or(*send_queue);
        *recv_queue = short("rqsize_default").unwrap_or(*recv_queue);
        *inline = short("inline_default").unwrap_or(*inline);
        *maps = short("iomap_size").unwrap_or(*maps);
        options
    });
}

/// The default interval of keep-alive messages, the system's for TCP.
fn usual_pulse() -> Duration {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_keepalive_time");
    let seconds = text.ok().and_then(|text| text.trim().parse().ok());
    Duration::from_secs(seconds.unwrap_or(7200))
}

impl Entry {
    /// Starts or stops keep-alive messages, as the settings require.
    fn pulse(&self, settings: &Settings) -> Result<(), Errno> {
        let idle = settings.keep_idle.map_or_else(usual_pulse, |s| {
            Duration::from_secs(s.unsigned_abs().into())
        });
        let every = settings.keep_alive.then_some(idle);
        match &self.socket {
            Kind::Stream(socket) => socket.set_keep_alive(every),
            Kind::Datagram(_) => Ok(()),
        }
    }
}

/// Twice the number of bytes, as the system reports it.
fn doubled(bytes: c_int) -> u32 {
    bytes.max(0).unsigned_abs().saturating_mul(2)
}

fn short(number: c_int) -> u16 {
    u16::try_from(number.max(0)).unwrap_or(u16::MAX)
}

/// A time limit as in `socket(7)`: zero for none; a negative one does not wait.
fn limit(time: timeval) -> Result<Option<Duration>, Errno> {
    let micros = u32::try_from(time.tv_usec).ok();
    let micros = micros.filter(|micros| *micros < 1_000_000);
    let micros = micros.ok_or(Errno::DOM)?;
    let Ok(seconds) = u64::try_from(time.tv_sec) else {
        return Ok(Some(Duration::from_nanos(1)));
    };
    Ok(Some(Duration::new(seconds, micros * 1000)).filter(|limit| !limit.is_zero()))
}

/// `rsetsockopt`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rsetsockopt(
    socket: c_int,
    level: c_int,
    optname: c_int,
    optval: *const c_void,
    optlen: socklen_t,
) -> c_int {
    run(|| {
        let entry = find(socket)?;
        let socket = &entry.socket;
        if (level, optname) == (libc::SOL_SOCKET, libc::SO_LINGER) {
            // SAFETY: the caller's promise.
            let wish: linger = unsafe { taken(optval, optlen) }?;
            let seconds = u64::from(wish.l_linger.max(0).unsigned_abs());
            let on = wish.l_onoff != 0;
            if let Kind::Stream(socket) = socket {
                socket.set_linger(on.then(|| Duration::from_secs(seconds)));
            }
            entry.settings().linger = Some(wish);
            return Ok(0);
        }
        if level == libc::SOL_SOCKET && matches!(optname, libc::SO_RCVTIMEO | libc::SO_SNDTIMEO) {
            // SAFETY: the caller's promise.
            let limit = limit(unsafe { taken(optval, optlen) }?)?;
            if optname == libc::SO_RCVTIMEO {
                socket.set_recv_timeout(limit);
            } else {
                socket.set_send_timeout(limit);
            }
            return Ok(0);
        }
        if (level, optname) == (SOL_RDMA, RDMA_ROUTE) {
            let len = optlen as usize;
            if optval.is_null() || len > MOST_ROUTE {
                return Err(Errno::INVAL);
            }
            // SAFETY: the caller's promise.
            let route = (0..len).map(|i| unsafe { optval.cast::<u8>().add(i).read() });
            entry.settings().route = route.collect();
            return Ok(0);
        }
        if level == libc::IPPROTO_TCP {
            socket.stream()?;
        }
        // SAFETY: the caller's promise.
        let value: c_int = unsafe { taken(optval, optlen) }?;
        let on = value != 0;
        let mut settings = entry.settings();
        match (level, optname) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => settings.reuse_addr = on,
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => settings.oob_inline = on,
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => {
                settings.keep_alive = on;
                entry.pulse(&settings)?;
            }
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => {
                socket.set_options(|o| o.recv_buffer = doubled(value));
            }
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => {
                socket.set_options(|o| o.send_buffer = doubled(value));
            }
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => settings.no_delay = on,
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG | libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL) => {}
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => {
                if value <= 0 {
                    return Err(Errno::INVAL);
                }
                settings.keep_idle = Some(value);
                if settings.keep_alive {
                    entry.pulse(&settings)?;
                }
            }
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => settings.v6_only = on,
            (SOL_RDMA, RDMA_SQSIZE..=RDMA_IOMAPSIZE) => {
                if socket.has_begun() {
                    return Err(Errno::INVAL);
                }
                let value = short(value);
                socket.set_options(|o| match optname {
                    RDMA_SQSIZE => o.send_queue = value,
                    RDMA_RQSIZE => o.recv_queue = value,
                    RDMA_INLINE => o.inline = value,
                    _ => o.maps = value,
                });
            }
            _ => return Err(Errno::OPNOTSUPP),
        }
        Ok(0)
    })
}

/// `rgetsockopt`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rgetsockopt(
    socket: c_int,
    level: c_int,
    optname: c_int,
    optval: *mut c_void,
    optlen: *mut socklen_t,
) -> c_int {
    run(|| {
        let entry = find(socket)?;
        let socket = &entry.socket;
        if level == libc::IPPROTO_TCP {
            socket.stream()?;
        }
        let options = socket.options();
        let settings = entry.settings();
        let datagrams = matches!(socket, Kind::Datagram(_));
        let value = match (level, optname) {
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let none = linger {
                    l_onoff: 0,
                    l_linger: 0,
                };
                // SAFETY: the caller's promise.
                return unsafe { give(&[settings.linger.unwrap_or(none)], optval, optlen) };
            }
            (libc::SOL_SOCKET, libc::SO_RCVTIMEO) => {
                // SAFETY: the caller's promise.
                return unsafe { give(&[time(socket.recv_timeout())], optval, optlen) };
            }
            (libc::SOL_SOCKET, libc::SO_SNDTIMEO) => {
                // SAFETY: the caller's promise.
                return unsafe { give(&[time(socket.send_timeout())], optval, optlen) };
            }
            (SOL_RDMA, RDMA_ROUTE) => {
                // SAFETY: the caller's promise.
                return unsafe { give(&settings.route, optval, optlen) };
            }
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => settings.reuse_addr.into(),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => settings.keep_alive.into(),
            (libc::SOL_SOCKET, libc::SO_OOBINLINE) => settings.oob_inline.into(),
            (libc::SOL_SOCKET, libc::SO_RCVBUF) => options.recv_buffer as c_int,
            (libc::SOL_SOCKET, libc::SO_SNDBUF) => options.send_buffer as c_int,
            (libc::SOL_SOCKET, libc::SO_ERROR) => {
                socket.take_error().map_or(0, Errno::raw_os_error)
            }
            (libc::SOL_SOCKET, libc::SO_TYPE) if datagrams => libc::SOCK_DGRAM,
            (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) if datagrams => libc::IPPROTO_UDP,
            (libc::SOL_SOCKET, libc::SO_PROTOCOL) => libc::IPPROTO_TCP,
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => {
                socket.stream().is_ok_and(Socket::is_listening).into()
            }
            (libc::SOL_SOCKET, libc::SO_DOMAIN) => {
                if socket.is_ipv6() {
                    libc::AF_INET6
                } else {
                    libc::AF_INET
                }
            }
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT | libc::TCP_KEEPINTVL) => 1,
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => settings
                .keep_idle
                .unwrap_or_else(|| usual_pulse().as_secs() as c_int),
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => settings.no_delay.into(),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => MAX_SEGMENT,
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY) => settings.v6_only.into(),
            (SOL_RDMA, RDMA_SQSIZE) => options.send_queue.into(),
            (SOL_RDMA, RDMA_RQSIZE) => options.recv_queue.into(),
            (SOL_RDMA, RDMA_INLINE) => options.inline.into(),
            (SOL_RDMA, RDMA_IOMAPSIZE) => options.maps.into(),
            _ => return Err(Errno::OPNOTSUPP),
        };
        // SAFETY: the caller's promise.
        unsafe { give(&[value], optval, optlen) }
    })
}

/// `rfcntl`
///
/// # Safety
/// As its manual page says.
pub unsafe fn rfcntl(socket: c_int, cmd: c_int, arg: usize) -> c_int {
    run(|| {
        let entry = find(socket)?;
        match cmd {
            libc::F_GETFL => Ok(entry.flags.load(Ordering::Relaxed)),
            libc::F_SETFL => {
                entry.set_nonblock(arg as c_int & libc::O_NONBLOCK != 0);
                Ok(0)
            }
            libc::F_GETFD | libc::F_SETFD => {
                // SAFETY: no pointers with these.
                let result = unsafe {
                    system(
                        libc::SYS_fcntl,
                        [entry.fd as usize, cmd as usize, arg, 0, 0, 0],
                    )
                }?;
                Ok(result as c_int)
            }
            _ => Err(Errno::OPNOTSUPP),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::{rclose, rsocket};
    use super::*;

    fn set(fd: c_int, option: c_int, time: timeval) -> Option<Errno> {
        let len = size_of::<timeval>() as socklen_t;
        // SAFETY: the value and its length.
        let result =
            unsafe { rsetsockopt(fd, libc::SOL_SOCKET, option, (&raw const time).cast(), len) };
        (result != 0).then(|| Errno::from_io_error(&std::io::Error::last_os_error()).unwrap())
    }

    fn get(fd: c_int, option: c_int) -> (i64, i64) {
        let mut time = timeval {
            tv_sec: -1,
            tv_usec: -1,
        };
        let mut len = size_of::<timeval>() as socklen_t;
        let place = (&raw mut time).cast();
        // SAFETY: room for the value, and its length.
        let result = unsafe { rgetsockopt(fd, libc::SOL_SOCKET, option, place, &raw mut len) };
        assert_eq!((result, len as usize), (0, size_of::<timeval>()));
        (time.tv_sec, time.tv_usec)
    }

    #[test]
    fn limits_of_time_are_kept_as_sockets_keep_them() {
        let fd = rsocket(libc::AF_INET, libc::SOCK_STREAM, 0);
        assert!(fd >= 0);
        let time = |tv_sec, tv_usec| timeval { tv_sec, tv_usec };
        for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
            assert_eq!(get(fd, option), (0, 0));
            assert_eq!(set(fd, option, time(3, 250_000)), None);
            assert_eq!(get(fd, option), (3, 250_000));
            assert_eq!(set(fd, option, time(1, 1_000_000)), Some(Errno::DOM));
            assert_eq!(get(fd, option), (3, 250_000));
            assert_eq!(set(fd, option, time(0, 0)), None);
            assert_eq!(get(fd, option), (0, 0));
        }
        assert_eq!(rclose(fd), 0);
    }
}
