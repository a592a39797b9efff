//! The start of a connection, and what its peer may do.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use weft_mem::Access;
use weft_proto::mpa::{Params, Rtr};
use weft_proto::rdmap;
use weft_sys::Interest;
use weft_wire::mpa::MAX_MARKED_ULPDU;

use super::convert::{max_ulpdu, zero_read, zero_write};
use super::frame::Frame;
use super::peer::Connected;
use super::rnr_queue::RNR_FOR_EVER;
use super::{QpInner, Stream, post_internal};
use crate::engine::{Registration, Source, on_engine};
use crate::transport::Llp;
use crate::types::{LinkOptions, QpState, SendWr};

/// The longest ULPDU on shared memory, in bytes: what one connection moves before others get their turn.
const LOCAL_MAX_ULPDU: u32 = 16 << 20;

/// When an initiator that has heard nothing nudges its peer, counted from the start.
const NUDGES: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(200)];

impl QpInner {
    /// Starts the queue pair on a connected link. `prefix` is sent before the first FPDU (the MPA reply), `early` was received after the
    /// peer's start-up frame.
    pub(crate) fn attach(
        self: &Arc<Self>,
        link: Llp,
        params: &Params,
        options: &LinkOptions,
        prefix: &[u8],
        early: &[u8],
    ) -> io::Result<()> {
        let initiator = !params.must_wait_for_first_fpdu;
        let marked = if params.tx_markers {
            MAX_MARKED_ULPDU as u32
        } else {
            u32::MAX
        };
        let shared = link.local().is_some();
        let (frame, max_ulpdu) = if shared {
            (Frame::Local, LOCAL_MAX_ULPDU)
        } else {
            let mpa = max_ulpdu(options.max_ulpdu, link.max_fpdu()).min(marked);
            (Frame::Mpa, mpa)
        };
        let mpa = |on: bool| on && !shared;
        // Work that other threads left meanwhile is done below, or, after an error, here.
        let enter = || -> io::Result<()> {
            let mut core = self.core.lock();
            if self.state() != QpState::Init || core.stream.is_some() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the queue pair has been connected before",
                ));
            }
            core.stream = Some(Box::new(Stream::new(rdmap::Config {
                max_ulpdu,
                ird: u32::from(params.ird),
                ord: u32::from(params.ord),
                hold_until_first_rx: params.must_wait_for_first_fpdu,
                sink_key: self.device.random_u32(),
            })));
            if let Some(stream) = core.stream.as_mut().filter(|_| shared) {
                stream.believe_written();
            }
            let _ = self.peer.depths.set(
                self.peer
                    .visible_depths((params.ird, params.ord), self.life.is_expected()),
            );
            if self.limits.remote_completion {
                core.start_confirming(&link, params.ord);
            }
            core.tx
                .start(frame, mpa(params.crc), mpa(params.tx_markers), prefix);
            core.rx
                .start(frame, mpa(params.crc), mpa(params.rx_markers), early);
            // The frame that allows the responder to send (RFC 6581 4.2).
            if let Some(rtr) = params.rtr.filter(|_| initiator) {
                let ready = match rtr {
                    Rtr::Write => zero_write(),
                    Rtr::Read => zero_read(),
                    Rtr::Send => SendWr::send(0),
                };
                post_internal(&mut core, ready);
            }
            if self.peer.rnr_retry.load(Ordering::Relaxed) < RNR_FOR_EVER {
                self.tell_rnr_retry(&mut core);
            }
            self.wake.arm();
            let registration = Registration::new(self.engine());
            let source = Arc::clone(self) as Arc<dyn Source>;
            registration.start(source, link.fd(), Interest::READ)?;
            let connected = Connected {
                link,
                registration,
                since: Instant::now(),
                linger: options.linger,
            };
            if self.peer.connected.set(connected).is_err() {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    "the queue pair has been connected before",
                ));
            }
            self.life.connect();
            if let Some(local) = self.peer.local() {
                let watch = Arc::downgrade(self);
                local.belongs_to(watch);
                self.glance.watch(local.ring());
                local.let_in(self.open_rights());
                if let Some(neighbour) = local.neighbour()
                    && !neighbour.add(Arc::downgrade(self) as _)
                {
                    local.set_dead();
                }
            }
            Ok(())
        };
        if let Err(error) = enter() {
            fence(Ordering::SeqCst);
            if self.wake.seen().is_left() {
                self.drive(true);
            }
            return Err(error);
        }
        if self.peer.refuses_reads() && self.life.is_expected() {
            self.refuse_reads();
        }
        self.drive(true);
        // The engine may have looked before there was anything to see.
        self.rearm();
        if initiator {
            self.start_nudging();
            if let Some(local) = self.peer.local() {
                local.close_tcp(options, true);
            }
        }
        Ok(())
    }

    /// The kernel's siw, as responder, overlooks FPDUs that arrive between its reply and the moment when it starts to watch the socket:
    /// they stay there until more data comes. So an initiator that has received nothing sends an empty Write, which has no effect (RFC 5040
    /// does not even check its `STag`).
    pub(super) fn start_nudging(self: &Arc<Self>) {
        let Some(connected) = self.peer.connected.get() else {
            return;
        };
        let at = NUDGES.map(|delay| Instant::now() + delay);
        self.with_core(|core| core.nudges = at.into());
        for at in at {
            connected.registration.set_timer(at);
        }
    }

    pub(super) fn nudge(self: &Arc<Self>) {
        let sent = self.with_core(|core| {
            let due = core.nudges.first().is_some_and(|at| *at <= Instant::now());
            let silent = core.ended.is_none() && core.counters.rx_fpdus == 0;
            if due {
                core.nudges.remove(0);
            }
            if due && silent {
                post_internal(core, zero_write());
            }
            due && silent
        });
        if sent {
            self.drive(false);
        }
    }

    /// From now on the peer may do this.
    pub(super) fn set_access(self: &Arc<Self>, access: Access) {
        let Some(local) = self.with_core(|core| {
            let before = self.peer.set_access(access);
            let changed = before != access && core.ended.is_none();
            let local = self.peer.local().filter(|_| changed)?;
            local.close_access();
            Some(local)
        }) else {
            return;
        };
        // Without the lock: others do not wait for a peer that stays.
        if !on_engine() {
            local.wait_until_outside();
        } else if local.is_inside() {
            // It keeps to the ring from now on.
            return;
        }
        self.with_core(|core| {
            if core.ended.is_none() {
                local.let_in(self.open_rights());
            }
        });
    }

    /// The operations that a peer on shared memory may carry out itself.
    pub(super) fn open_rights(&self) -> Access {
        if self.life.is_paused() {
            Access::empty()
        } else {
            self.peer.access()
        }
    }

    pub(super) fn set_paused(self: &Arc<Self>, paused: bool) {
        self.with_core(|core| {
            let changed = self.life.set_paused(paused);
            let local = self.peer.local();
            if let Some(local) = local.filter(|_| changed && core.ended.is_none()) {
                // A paused peer has no access: its requests wait in the ring.
                local.let_in(self.open_rights());
            }
        });
        if !paused {
            self.drive(true);
            self.rearm_and_flush();
            // Sleeping threads have to watch the transport again.
            self.send_cq.kick();
            self.recv_cq.kick();
        }
    }
}
