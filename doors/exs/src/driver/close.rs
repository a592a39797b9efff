//! How a connection is closed: what is left to send is sent, and what arrives meanwhile is discarded.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::io::Errno;
use weft_sockets::lock::lock;

use super::conn::Conn;
use super::held::Held;
use super::op::Target;
use super::state::Core;
use crate::Memory;
use crate::event::{Event, EventKind, Ready};
use crate::machine::{Endpoint, RecvFlags as Wishes};
use crate::options::LINGER;
use crate::queue::Member;

/// Bytes that a closed connection receives and discards at a time.
const DRAINED: usize = 64 << 10;

impl Conn {
    /// Close the sending direction after all queued data; `told` is notified when the Fin has been handed to the transport.
    pub(crate) fn shutdown(&self, told: Option<(Target, u64)>) -> Result<(), (Errno, Target)> {
        match self.hold_back(Held::Shutdown(told)) {
            Err(Held::Shutdown(told)) => self.shutdown_now(told),
            _ => Ok(()),
        }
    }

    pub(super) fn shutdown_now(&self, told: Option<(Target, u64)>) -> Result<(), (Errno, Target)> {
        self.with(|core| match &mut core.machine {
            Some(machine) if core.io.over.is_none() => {
                if !core.io.shut {
                    core.io.shut = true;
                    machine.shutdown();
                }
                let told = told.map(|(target, token)| (EventKind::Shutdown, target, token));
                core.io.shutting.extend(told);
                Ok(())
            }
            _ => Err((Errno::NOTCONN, told.map_or(Target::Nobody, |t| t.0))),
        })
    }

    /// Close the socket: queued data is sent, then the connection is closed.
    pub(crate) fn close(&self, told: Option<(Target, u64)>) {
        let behind_a_file = self.holding.load(Ordering::SeqCst);
        self.with(|core| self.end_receives(core, behind_a_file));
        match self.hold_back(Held::Close(told)) {
            Err(Held::Close(told)) => self.close_now(told),
            // The file has yet to be sent.
            _ => self.linger(),
        }
    }

    /// End all receives and polls of a closed socket. While there is data to send, the memory of an advertised receive is retracted first,
    /// because a peer that wrote there would get an access error, which breaks the connection.
    fn end_receives(&self, core: &mut Core, more: bool) {
        core.io.unwanted = true;
        for id in core.io.ops.oldest_first(|op| !op.is_send()) {
            if (more || core.io.sending > 0) && self.call_back(core, id) {
                continue;
            }
            if let Some(machine) = &core.machine {
                core.io.take_away(machine, id);
            }
        }
        for (_, target, token) in std::mem::take(&mut core.io.pollers) {
            let ended = Err(Errno::CANCELED);
            core.io
                .tell(EventKind::Poll, target, token, ended, Ready::empty());
        }
    }

    pub(super) fn close_now(&self, told: Option<(Target, u64)>) {
        self.with(|core| {
            self.end_receives(core, false);
            core.io.closing = true;
            self.drain(core, Memory::Owned(vec![0; DRAINED]));
            let told = told.map(|(target, token)| (EventKind::Close, target, token));
            core.io.shutting.extend(told);
            if let Some(machine) = &mut core.machine
                && !core.io.shut
            {
                core.io.shut = true;
                machine.shutdown();
            }
        });
        self.linger();
    }

    /// Receive and discard further data. Otherwise two closed ends with data left to send would wait for each other's receives, and for the credits
    /// of messages that no program receives.
    fn drain(&self, core: &mut Core, memory: Memory) {
        let more = |machine: &&mut Endpoint| !machine.peer_closed() || machine.readable() > 0;
        let Some(machine) = core.machine.as_mut().filter(more) else {
            return;
        };
        let me = self.me.clone();
        let again = move |event: Event| {
            if let (Ok(_), Some(memory), Some(conn)) = (event.result, event.memory, me.upgrade()) {
                conn.with(|core| conn.drain(core, memory));
            }
        };
        let target = Target::Call(Box::new(again));
        let len = memory.len() as u64;
        if let Ok(id) = core.io.begin(EventKind::Recv, memory, target, 0) {
            machine.recv(id, len, Wishes::default());
        }
    }

    /// Keep the connection alive until it is closed, as long as data is being sent.
    fn linger(&self) {
        // The thread that closes does not drive the connection again.
        self.leave();
        let Some(me) = self.me.upgrade() else { return };
        if self.with(|core| core.io.closed) {
            return;
        }
        if lock(&self.lingering).replace(Arc::clone(&me)).is_some() {
            return;
        }
        if self.look_again_at(self.link.moved_out()).is_err() || self.with(|core| core.io.closed) {
            self.stop_lingering();
        }
    }

    pub(super) fn stop_lingering(&self) {
        // This may be the last reference: drop it outside the lock, which it owns.
        let me = lock(&self.lingering).take();
        drop(me);
    }

    /// Let a timer end the connection if the transport has accepted no more than `sent` bytes by then.
    fn look_again_at(&self, sent: u64) -> Result<(), Errno> {
        self.call_at(Instant::now() + LINGER, move |conn| {
            let moved = conn.with(|core| {
                let now = conn.link.moved_out();
                if core.io.closed || now > sent {
                    return (!core.io.closed).then_some(now);
                }
                conn.fail(core, Errno::TIMEDOUT);
                None
            });
            if let Some(now) = moved {
                let _ = conn.look_again_at(now);
            }
        })
    }
}
