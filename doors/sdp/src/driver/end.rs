//! The ends of a connection.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_sockets::lock::lock;

use super::{Conn, Core, Fetch, lingering};
use crate::machine::Endpoint;
use weft_sockets::stream::Stream as _;
use weft_verbs::ext::CqExt;

/// How long a close waits for a peer that accesses the program's memory.
const INSIST: Duration = Duration::from_secs(5);
/// Between two attempts to take memory back.
const NAP: Duration = Duration::from_millis(10);

impl Conn {
    /// The queue pair has ended.
    pub(super) fn ended(core: &mut Core) {
        core.marks.clear();
        core.posted = 0;
        if core.read == Fetch::Going {
            core.read = Fetch::Failed;
        }
        if core.state.over.is_none() {
            let machine = core.machine.as_ref();
            let closed = machine.is_some_and(Endpoint::peer_closed);
            // A peer that has sent its end and disconnected has closed; sends get EPIPE.
            core.state.over = Some(Errno::CONNRESET);
            if !closed {
                tracing::debug!("the connection ended without a farewell");
                core.state.error.get_or_insert(Errno::CONNRESET);
            }
        }
        Self::drop_sources(core);
    }

    /// The program reads no more.
    pub(crate) fn shut_read(&self) -> Result<(), Errno> {
        self.with(|core| {
            if core.machine.is_none() {
                return Err(Errno::NOTCONN);
            }
            core.state.read_shut = true;
            self.wake();
            Ok(())
        })
    }

    /// The program sends no more.
    pub(crate) fn shut_write(&self) -> Result<(), Errno> {
        let connected = self.with(|core| {
            core.state.send_shut = true;
            self.wake();
            core.machine.is_some()
        });
        if !connected {
            return Err(Errno::NOTCONN);
        }
        // A sender that waits gives up now.
        let _turn = lock(&self.sender);
        self.with(|core| {
            if let Some(machine) = &mut core.machine {
                machine.shutdown();
            }
            self.act(core);
        });
        Ok(())
    }

    /// Close the queue pair if nothing is left to be done.
    pub(super) fn part(&self, core: &Core) {
        let machine = core.machine.as_ref();
        let flushed = machine.is_none_or(|m| m.is_shut() && m.is_flushed());
        if flushed && core.sources.is_empty() && core.state.over.is_none() {
            self.qp.disconnect();
        }
    }

    /// The program closes the connection. Waits up to `patience` until the peer has received everything; the rest is then sent without the
    /// program, from copies. Without patience the rest is lost, and the peer sees a reset. After the return the program owns the memory of all
    /// sends again.
    pub(crate) fn close(&self, patience: Duration) {
        if patience.is_zero() {
            self.with(|core| {
                core.state.read_shut = true;
                core.state.send_shut = true;
                self.fail(core, Errno::CONNRESET);
                Self::drop_sources(core);
                self.wake();
            });
            return;
        }
        let _ = self.shut_read();
        if self.shut_write().is_err() {
            return;
        }
        let gone = |core: &Core| core.state.over.is_some() || self.end.get().is_some();
        let deadline = Instant::now() + patience;
        self.wait_through(Some(deadline), |core| {
            let flushed = core
                .machine
                .as_ref()
                .is_none_or(|m| m.is_shut() && m.is_flushed());
            (flushed || gone(core)).then_some(())
        });
        // The peer may be reading slowly: its next bytes come from copies. One that is in the memory for long loses the connection.
        let deadline = Instant::now() + INSIST;
        loop {
            let left = self.with(|core| {
                self.take_back(core, None);
                !gone(core) && core.sources.iter().any(super::source::Source::is_programs)
            });
            if !left {
                break;
            }
            if Instant::now() >= deadline {
                self.with(|core| {
                    self.fail(core, Errno::TIMEDOUT);
                    Self::drop_sources(core);
                });
                break;
            }
            self.wait_through(Some(Instant::now() + NAP), |core| {
                let back = !core.sources.iter().any(super::source::Source::is_programs);
                (back || gone(core)).then_some(())
            });
        }
        self.with(|core| {
            if gone(core) {
                Self::drop_sources(core);
            }
        });
        if let Some(me) = self.me.upgrade() {
            let lingering = lingering();
            lock(&lingering).push(std::sync::Arc::clone(&me));
            self.with(|core| {
                core.closing = true;
                self.act(core);
            });
            self.cq.release();
            if self.end.get().is_some() || self.with(|core| core.state.over.is_some()) {
                lock(&lingering).retain(|other| !std::sync::Arc::ptr_eq(other, &me));
            }
        }
    }
}
