//! UDP sockets over a fork, and before another program is executed.
//!
//! A ring has one reader. So senders cannot find a socket that two processes share any more. The parent keeps its outgoing rings, and the
//! child begins anew.

use std::cell::Cell;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use weft_run::meet::Why;

use super::{Dgram, POOL, Pool, frames, parting};
use crate::private::Held;
use crate::table::{Entry, each_socket, put};
use crate::{kernel, ledger, signal};

/// Released in this order: that of frames is the first that is taken, and puts off the program's signal handlers, which may need the pool.
type Both = (Option<Held<Pool>>, Option<Held<frames::Process>>);

thread_local! {
    /// Held from before a fork until after it.
    static HELD: Cell<Option<Both>> = const { Cell::new(None) };
}

pub(crate) fn before() {
    each_socket(|_, d: &'static Dgram| {
        if !d.is_deaf() {
            d.deafen();
            ledger::datagrams_stay(Why::Forked);
        }
    });
    // In this order: a lock of frames is taken by threads that hold none of the pool.
    let mut process = frames::before_fork();
    let pool = POOL.lock_once();
    // Under the locks no socket becomes new.
    parting::shared(&mut process);
    let _ = HELD.try_with(|held| held.set(Some((pool, process))));
}

pub(crate) fn in_parent() {
    let _ = HELD.try_with(Cell::take);
}

pub(crate) fn in_child() {
    if let Ok(Some((pool, process))) = HELD.try_with(Cell::take) {
        drop(pool);
        frames::in_child(process);
    }
    let mut fresh: Vec<(&'static Dgram, &'static Dgram)> = Vec::new();
    each_socket(|fd, old: &'static Dgram| {
        let known = fresh.iter().find(|(of, _)| std::ptr::eq(*of, old));
        let new = known.map_or_else(
            || {
                let new = Dgram::new(old.v6.load(Relaxed), old.nonblock.load(Relaxed));
                new.refs.store(0, Relaxed);
                new.deaf.store(true, Relaxed);
                new.plain.store(old.plain.load(Relaxed), Relaxed);
                new.frameless.store(old.frameless.load(Relaxed), Relaxed);
                new.doubtful.store(old.doubtful.load(Relaxed), Relaxed);
                new.own_calls.store(old.own_calls.load(Relaxed), Relaxed);
                new.msn.store(old.msn.load(Relaxed), Relaxed);
                old.abandon();
                new
            },
            |&(_, new)| new,
        );
        if known.is_none() {
            fresh.push((old, new));
        }
        new.refs.fetch_add(1, SeqCst);
        put(fd, Entry::socket(new));
    });
}

impl Dgram {
    /// The rings are the parent's: what this process has of them goes, where no thread of the parent's was at work on it.
    fn abandon(&self) {
        if let Ok(mut tx) = self.tx.try_lock() {
            tx.abandon();
        }
        if let Ok(mut rx) = self.rx.try_lock() {
            *rx = super::rings::Rx::default();
        }
        if let Ok(mut slow) = self.slow.try_lock() {
            *slow = super::Slow::default();
        }
        let bell = self.bell.swap(-1, SeqCst);
        if bell >= 0 {
            crate::hidden::close(bell);
        }
    }
}

/// This process ends, or becomes another program: senders go back to the kernel, which refuses their datagrams when the socket is closed.
pub(crate) fn at_end() {
    each_socket(|_, d: &'static Dgram| {
        if !d.is_deaf() && !signal::is_inside(d) {
            d.rx().close_all();
        }
    });
}

/// Another program may get our sockets.
pub(crate) fn before_exec() {
    let mut inherited = Vec::new();
    each_socket(|number, d: &'static Dgram| {
        if !kernel::closes_on_exec(number) {
            inherited.push((number, d));
        }
    });
    parting::hand_over(&inherited);
    for (_, d) in inherited {
        d.plain(Why::Exec);
    }
}
