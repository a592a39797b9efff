//! `libweft-run.so`: the library that `weft run` preloads between an unmodified sockets program and the C library.
//!
//! TCP sockets are followed from `socket` or `accept` on. A connection whose peer runs under weft too, on this host and of this user, gets a
//! channel (link.rs): a ring of bytes for each direction in a shared segment, and a bell, which is a pair of Unix sockets whose readiness is
//! that of the rings. Each direction goes over at a moment when nothing is under way on TCP, and can go back at any time. The TCP connection
//! stays. Everything that the library does not understand stays on TCP. UDP sockets are followed too (dgram/). The formats are in `docs/spec/run.md`.
//!
//! # Layers
//!
//! A module imports modules of earlier lines, and of its own line without cycles:
//!
//! - `next`, `kernel`, `counts`, `clock`, `patience`, `lock`, `work`, `iov`, `handlers`, `signal`, `private`, `memory`, `settings`: the functions behind ours, and small tools
//! - `table`, `hidden`, `ledger`, `guests`, `meeting`: the kind of each descriptor; reports to users; peers of other users; meetings in containers
//! - `chan`, `conn`, `bell`, `peer`: a TCP socket and its channel
//! - `sets`, `long_list`, `regs`, `ring_poll`, `ready`, and `dgram`: epoll; UDP sockets
//! - `direction`, `lend`, `fetch`, `stalled_ring`: each direction onto its ring and back; large sends from the program's memory
//! - `hosts`, `containers`, `link`: how a connection comes to a channel
//! - `rx`, `return_to_tcp`, `tx`, `poll`: the ways of bytes, back to TCP too, and waiting for them
//! - `io`, `fd`, `sock`, `spawn`, `process`, `child_env`, `exec`, `privileges`, `clone`, `direct`: the C library's names, for every kind of descriptor
//!
//! # Safety
//!
//! Every exported function is as safe as its manual page says.

#![allow(
    clippy::cast_possible_wrap,
    clippy::cast_ptr_alignment,
    clippy::many_single_char_names,
    reason = "the C library's types and names"
)]

mod bell;
mod chan;
mod child_env;
mod clock;
mod clone;
mod conn;
mod containers;
mod counts;
mod dgram;
mod direct;
mod direction;
mod edges;
mod exec;
mod fd;
mod fetch;
mod guests;
mod handlers;
mod hidden;
mod hosts;
mod io;
mod iov;
mod kernel;
mod ledger;
mod lend;
mod link;
mod lock;
mod long_list;
mod meeting;
mod memory;
mod next;
mod patience;
mod peer;
mod poll;
mod private;
mod privileges;
mod process;
mod ready;
mod regs;
mod return_to_tcp;
mod ring_poll;
mod rx;
mod sets;
mod settings;
mod signal;
mod sock;
mod spawn;
mod stalled_ring;
mod state;
mod table;
mod tx;
mod work;

pub(crate) use weft_sys::next::{errno, set_errno};
use weft_sys::settings as environment;

extern "C" fn at_start() {
    lock::know_own();
    handlers::start();
    process::watch_forks();
    lend::start();
    hosts::keeps_beginnings();
    guests::peers();
    let wrong = environment::wrong(&environment::OF_RUN);
    if let Some(wrong) = wrong.first() {
        settings::refuse(format!(
            "weft run: {wrong}; this process runs on plain TCP and UDP\n"
        ));
    } else if environment::RUN.is("off") == Ok(true) {
        settings::turn_off();
    }
    dgram::frames::start(hosts::wanted().is_some());
    if let Ok(Some(n)) = environment::RUN_LOOK.parse() {
        settings::look_after(n);
    }
}

extern "C" fn at_end() {
    process::end();
    if environment::RUN_EXPLAIN.is("1") == Ok(true) {
        ledger::explain();
        ledger::explain_datagrams(&dgram::frames::explained());
    }
}

// SAFETY: the loader calls the functions of these sections, at the start and at the end.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = at_start;
// SAFETY: as above.
#[used]
#[unsafe(link_section = ".fini_array")]
static END: extern "C" fn() = at_end;
