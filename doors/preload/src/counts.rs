//! The kernel's counts of a TCP connection, to which ours are compared before a direction goes over: a call that this library does not see, or
//! another process, may have moved bytes.

use libc::c_int;

use crate::kernel::asked;

/// States of `tcpi_state` in which neither end has sent a FIN, we have, or the peer has.
const ESTABLISHED: u8 = 1;
const FIN_WAIT1: u8 = 4;
const FIN_WAIT2: u8 = 5;
const CLOSE_WAIT: u8 = 8;

/// Bytes that have been sent on the socket since the beginning of the connection, by all calls and processes. `dialled`: it was connected by `connect`, and the
/// kernel counts its SYN. `None`: the kernel does not say, bytes move at this moment, or the direction has ended.
pub(crate) fn sent(fd: c_int, dialled: bool) -> Option<u64> {
    steady(fd, |state, acked, _| {
        let unacked = asked(fd, libc::TIOCOUTQ)?;
        let all = acked.checked_add(u64::try_from(unacked).ok()?)?;
        all.checked_sub(u64::from(dialled))
            .filter(|_| matches!(state, ESTABLISHED | CLOSE_WAIT))
    })
}

/// Bytes that have been received from the socket, in the same way.
pub(crate) fn received(fd: c_int) -> Option<u64> {
    steady(fd, |state, _, arrived| {
        let unread = asked(fd, libc::FIONREAD)?;
        arrived
            .checked_sub(u64::try_from(unread).ok()?)
            .filter(|_| is_receiving(state))
    })
}

/// Bytes that have arrived at the socket, received or not.
pub(crate) fn arrived(fd: c_int) -> Option<u64> {
    let (state, _, arrived) = tcp_info(fd)?;
    is_receiving(state).then_some(arrived)
}

fn is_receiving(state: u8) -> bool {
    matches!(state, ESTABLISHED | FIN_WAIT1 | FIN_WAIT2)
}

/// The value that `of` makes of the kernel's counts when they stay the same meanwhile; of a few tries.
fn steady(fd: c_int, of: impl Fn(u8, u64, u64) -> Option<u64>) -> Option<u64> {
    (0..4).find_map(|_| {
        let before = tcp_info(fd)?;
        let (state, acked, received) = before;
        let value = of(state, acked, received)?;
        (tcp_info(fd)? == before).then_some(value)
    })
}

/// `tcpi_state`, `tcpi_bytes_acked` and `tcpi_bytes_received`.
fn tcp_info(fd: c_int) -> Option<(u8, u64, u64)> {
    /// The counts' offset in `struct tcp_info`.
    const AT: usize = 120;
    let mut words = [0_u64; AT / 8 + 2];
    let mut len = size_of_val(&words) as u32;
    // SAFETY: as many bytes as it has room for.
    let rc = unsafe {
        libc::getsockopt(
            fd,
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            words.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    let state = words[0].to_ne_bytes()[0];
    (rc == 0 && len as usize == size_of_val(&words))
        .then(|| (state, words[AT / 8], words[AT / 8 + 1]))
}
