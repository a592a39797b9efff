//! The traits through which lower layers see a queue pair.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use weft_sys::{Event, Interest};

use super::QpInner;
use crate::cq::{Glance, Member, Poller};
use crate::engine::{Drive, Driven, Engine, Lease, Next, Source};
use crate::neighbours::PeerWatch;
use crate::report::Connection;
use crate::srq::SrqConsumer;

impl Source for QpInner {
    fn stat(self: Arc<Self>) -> Option<Connection> {
        let connected = self.peer.connected.get()?;
        Some(Connection {
            qp: self.num,
            state: self.state(),
            local: connected.link.local_addr(),
            peer: connected.link.peer_addr(),
            transport: connected.link.name().to_owned(),
            cipher: connected.link.cipher().map(str::to_owned),
            reason: self.peer.reason.get().cloned(),
            age: connected.since.elapsed(),
            counters: self.with_core(|core| core.counters),
        })
    }

    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if !self.wake.disarm() {
            return Next::Done;
        }
        match self.lease_state() {
            Lease::Polled | Lease::Asleep => Next::Lent(self),
            Lease::Idle => {
                QpInner::drive_engine(&self);
                Next::Hot(self)
            }
        }
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.nudge();
        self.rnr_expired();
        self.linger_expired();
    }

    fn panicked(self: Arc<Self>) {
        // Its progress is unknown: program and peer are notified of the end.
        self.life.fail();
        self.cut();
    }
}

impl Driven for QpInner {
    fn lease_state(&self) -> Lease {
        QpInner::lease_state(self)
    }
    fn drive_engine(self: Arc<Self>) -> Drive {
        QpInner::drive_engine(&self)
    }
    fn has_deferred(&self) -> bool {
        QpInner::has_deferred(self)
    }
    fn is_awake(&self) -> bool {
        QpInner::is_awake(self)
    }
    fn enter_leased(&self) -> bool {
        QpInner::enter_leased(self)
    }
    fn take_back(self: Arc<Self>) {
        QpInner::take_back(&self);
    }
    fn leave_driven(self: Arc<Self>) {
        QpInner::leave_driven(&self);
    }
    fn rearm_and_flush(self: Arc<Self>) {
        QpInner::rearm_and_flush(&self);
    }
    fn check_peer(self: Arc<Self>) {
        QpInner::check_peer(&self);
    }
}

impl Member for QpInner {
    fn glance(&self) -> &Arc<Glance> {
        &self.glance
    }
    fn drive_polled(self: Arc<Self>, empty_polls: u32, poller: Option<&mut Poller<'_>>) {
        QpInner::drive_polled(&self, empty_polls, poller);
    }
    fn drive_awaited(self: Arc<Self>) {
        QpInner::drive_awaited(&self);
    }
    fn drive_unleased(self: Arc<Self>) {
        QpInner::drive_unleased(&self);
    }
    fn flush_deferred(self: Arc<Self>) {
        QpInner::flush_deferred(&self);
    }
    fn release_lease(self: Arc<Self>) {
        QpInner::release_lease(&self);
    }
    fn begin_wait(self: Arc<Self>) -> bool {
        QpInner::begin_wait(&self)
    }
    fn wait_on(&self) -> Option<(BorrowedFd<'_>, Option<Interest>)> {
        QpInner::wait_on(self)
    }
    fn doze(&self) {
        QpInner::doze(self);
    }
    fn end_wait(&self) {
        QpInner::end_wait(self);
    }
}

impl SrqConsumer for QpInner {
    fn feed(self: Arc<Self>) {
        QpInner::feed(&self);
    }
}

impl PeerWatch for QpInner {
    fn peer_died(self: Arc<Self>) {
        QpInner::peer_died(&self);
    }
}
