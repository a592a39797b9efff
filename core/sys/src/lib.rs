//! System calls, and what preload libraries share.
//!
//! All calls of the kernel are here: readiness ([`Epoll`], [`EventFd`], [`poll_fds`]), TCP, UDP and Unix sockets ([`tcp`], [`udp`], [`unix`]), the identity of
//! their peers ([`diag`]), vectored I/O on raw memory ([`raw`]), page mappings ([`map`]), shared memory ([`memfd`]), other processes ([`process`], [`liveness`]),
//! objects that a forked child must create again ([`PerProcess`]), network interfaces ([`interfaces`], [`tun`]), and the machine's limits ([`limits`], [`cpu`]).
//! Preload libraries find the functions behind theirs by [`mod@next`]; [`elf`] tells which programs can load one. [`settings`] reads the variables of the environment.
//!
//! Calls go to the kernel through `rustix` or [`libc::syscall`], never through the libc wrappers
//! that a preload library replaces (`send`, `recv`, `poll`, `epoll_wait`...): weft may itself run
//! below such a library.
//!
//! # Safety
//!
//! The functions of [`raw`], the copying ones of [`process`] and the unmapping ones of [`map`] take raw memory
//! from their caller and are `unsafe`; all else is safe to call.
#![warn(missing_docs)]

pub mod cpu;
pub mod diag;
pub mod elf;
mod epoll;
mod eventfd;
mod fork;
pub mod interfaces;
pub mod limits;
pub mod liveness;
pub mod map;
pub mod memfd;
mod netlink;
pub mod next;
pub mod pages;
mod poll;
pub mod process;
pub mod protect;
pub mod raw;
pub mod settings;
pub mod spin;
pub mod tcp;
pub mod thread;
pub mod tun;
pub mod udp;
pub mod unix;
pub mod wake;

pub use epoll::{Epoll, Event, Interest};
pub use eventfd::EventFd;
pub use fork::{PerProcess, PrivateFd, Withheld, withhold};
pub use poll::poll_fds;
pub use raw::{preadv_raw, pwritev_raw, read_raw, recv_raw, send_file, send_raw, write_raw};

pub use cpu::{cpu_count, cpu_pressure, rusage_self, rusage_thread};

use rustix::event::Timespec;
use std::time::Duration;

/// A kernel time-out; a duration too long for the kernel becomes the longest it takes.
fn timespec(d: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: d.subsec_nanos().into(),
    }
}
