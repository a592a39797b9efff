//! Sockets of several processes at one address and port, of which the kernel gives each datagram to one (`SO_REUSEPORT`), and the rule by which it chooses.
//!
//! # Safety
//!
//! `setsockopt` with a classic BPF program: the program outlives the call, with its length. The kernel checks it before it runs it.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};

use super::UdpSocket;
use crate::raw::retry;
use crate::tcp::BindOptions;

const LOAD_BYTE: u16 = (libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16;
const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
/// `BPF_RET | BPF_A`: the byte that was loaded.
const RETURN_BYTE: u16 = (libc::BPF_RET | 0x10) as u16;
/// No socket has this index: the kernel chooses by its hash of the addresses.
const NO_INDEX: u32 = u32::MAX;

/// Which socket of a group gets a datagram. The kernel numbers the sockets from 0 in the order in which they were bound. When one is closed, the last one
/// gets its number. Where the rule names no socket, the kernel chooses one by its hash of the addresses.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'a> {
    /// A datagram that starts with this byte goes to the socket whose number is the second byte.
    pub direct: u8,
    /// The place of the byte that decides about all others.
    pub byte: u32,
    /// Its values, and the sockets that they stand for.
    pub members: &'a [(u8, u32)],
}

impl UdpSocket {
    /// As [`UdpSocket::bind`], and other sockets of this user that are bound by this function may have the same address and port. Children that are forked do
    /// not get it, unless [too many descriptors](crate::withhold) are withheld.
    ///
    /// # Errors
    /// As there; `AddrInUse` where another user has the port, or a socket that does not share it.
    pub fn bind_in_group(addr: SocketAddr, buffer: usize) -> io::Result<UdpSocket> {
        let options = BindOptions {
            v6_only: true,
            share: false,
        };
        UdpSocket::make(addr, buffer, options, true)
    }

    /// Whether it is a socket of a group, and children do not get it.
    pub fn is_withheld(&self) -> bool {
        self.withheld.is_some()
    }

    /// From now on the kernel chooses in this way which socket of the group gets a datagram.
    ///
    /// # Errors
    /// `EINVAL` of a socket that is not in a group, `ENOMEM` for more members than the system's limit has room for.
    pub fn choose_by(&self, choice: &Choice<'_>) -> io::Result<()> {
        let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
        let mut program = vec![
            step(LOAD_BYTE, 0, 0),
            step(JUMP_IF_EQUAL, 2, choice.direct.into()),
            step(LOAD_BYTE, 0, 1),
            step(RETURN_BYTE, 0, 0),
            step(LOAD_BYTE, 0, choice.byte),
        ];
        for &(value, index) in choice.members {
            program.push(step(JUMP_IF_EQUAL, 1, value.into()));
            program.push(step(RETURN, 0, index));
        }
        program.push(step(RETURN, 0, NO_INDEX));
        let program = libc::sock_fprog {
            len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
            filter: program.as_mut_ptr(),
        };
        let fd = self.as_fd().as_raw_fd();
        let len = size_of_val(&program);
        // SAFETY: the program outlives the call, with its length.
        retry(|| unsafe {
            libc::syscall(
                libc::SYS_setsockopt,
                fd,
                libc::SOL_SOCKET,
                libc::SO_ATTACH_REUSEPORT_CBPF,
                &raw const program,
                len,
            )
        })?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> [UdpSocket; 3] {
        let first = UdpSocket::bind_in_group((std::net::Ipv4Addr::LOCALHOST, 0).into(), 1 << 16);
        let first = first.expect("a port");
        let addr = first.local_addr().expect("its address");
        let further = || UdpSocket::bind_in_group(addr, 1 << 16).expect("the same port");
        let (second, third) = (further(), further());
        [first, second, third]
    }

    fn who_gets(sockets: &[UdpSocket], bytes: &[u8]) -> usize {
        let to = sockets[0].local_addr().expect("an address");
        sockets[0].send(bytes, to, None).expect("sent");
        let mut into = [0; 64];
        let got = |socket: &UdpSocket| socket.recv(&mut into).is_ok();
        sockets.iter().position(got).expect("one of them has it")
    }

    #[test]
    fn a_byte_chooses_the_socket() {
        let sockets = pair();
        let choice = Choice {
            direct: 0xff,
            byte: 5,
            members: &[(7, 2), (9, 1), (40, 0)],
        };
        sockets[1].choose_by(&choice).expect("a program");
        for (slot, index) in [(7, 2), (9, 1), (40, 0), (7, 2)] {
            let bytes = [4, 0, 0, 0, 0, slot, 1, 2];
            assert_eq!(who_gets(&sockets, &bytes), index);
        }
        for index in 0..3 {
            assert_eq!(who_gets(&sockets, &[0xff, index, 0, 0, 0, 0]), index.into());
        }
        // Other values, and what is too short, reach one of them.
        who_gets(&sockets, &[4, 0, 0, 0, 0, 1]);
        who_gets(&sockets, &[4]);
    }

    #[test]
    fn the_last_socket_takes_the_number_of_one_that_is_closed() {
        let [first, second, third] = pair();
        let choice = Choice {
            direct: 0xff,
            byte: 5,
            members: &[],
        };
        first.choose_by(&choice).expect("a program");
        drop(first);
        assert_eq!(who_gets(&[third, second], &[0xff, 0]), 0);
    }

    #[test]
    fn a_port_that_is_not_shared_is_taken() {
        let alone = UdpSocket::bind((std::net::Ipv4Addr::LOCALHOST, 0).into(), 1 << 16);
        let alone = alone.expect("a port");
        let addr = alone.local_addr().expect("its address");
        let refused = UdpSocket::bind_in_group(addr, 1 << 16).expect_err("taken");
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
    }
}
