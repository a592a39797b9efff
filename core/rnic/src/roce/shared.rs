//! The part of a port that is for siblings: what comes here for them, and what they pass on.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use weft_wire::roce::cm::{Mad, Message, PortSpace, service};
use weft_wire::roce::{PORT, Route};

use super::port::{Answering, Arrival, Last, Origin, PortInner, Whose};
use super::siblings::{Claim, Envelope, Probe, Service, Shared, Siblings, host_time};
use crate::lock::lock;

/// Where a packet has the number of its queue pair (9.2.7); the upper byte is the slot.
const DEST_QP: std::ops::Range<usize> = 5..8;

impl PortInner {
    /// Siblings find it.
    pub(super) fn share(self: &Arc<Self>) {
        if let Some(siblings) = &self.siblings {
            let port: Weak<PortInner> = Arc::downgrade(self);
            siblings.open(self.name(), port);
        }
    }

    /// A number for a connection, by which siblings see whose it is.
    pub(super) fn random_id(&self) -> u32 {
        let random = self.device.random_u32();
        match &self.siblings {
            Some(siblings) => u32::from(siblings.slot()) << 24 | random & 0x00ff_ffff,
            None => random,
        }
    }

    /// Takes the packets of a train that are ours, and passes the others on.
    pub(super) fn take_or_pass(
        &self,
        siblings: &Siblings,
        arrival: &mut Arrival<'_>,
        (train, each): (&[u8], usize),
        last: &mut Last,
        answering: &mut Answering,
    ) {
        let each = each.max(1);
        // The packets before this one that are for the same sibling.
        let mut run = None;
        for (n, packet) in train.chunks(each).enumerate() {
            let slot = self.slot_of(siblings, packet, last);
            match run {
                Some((of, _)) if slot == Some(of) => continue,
                Some((of, first)) => {
                    self.pass(
                        siblings,
                        arrival,
                        of,
                        first,
                        &train[first * each..n * each],
                        each,
                    );
                }
                None => {}
            }
            run = slot.map(|slot| (slot, n));
            if slot.is_none() {
                arrival.number = n as u16;
                self.take_or_probe(siblings, arrival, packet, last, answering);
            }
        }
        if let Some((of, first)) = run {
            self.pass(siblings, arrival, of, first, &train[first * each..], each);
        }
    }

    /// The slot of the sibling that a packet is for. Numbers that programs have chosen may lie in the slot of a sibling: our queue pairs come first.
    fn slot_of(&self, siblings: &Siblings, packet: &[u8], last: &mut Last) -> Option<u8> {
        let [slot, middle, low] = packet.get(DEST_QP)?.try_into().ok()?;
        if slot == siblings.slot() || !siblings.has(slot) {
            return None;
        }
        let num = u32::from_be_bytes([0, slot, middle, low]);
        self.member(num, last).is_none().then_some(slot)
    }

    fn pass(
        &self,
        siblings: &Siblings,
        arrival: &Arrival<'_>,
        slot: u8,
        first: usize,
        packets: &[u8],
        each: usize,
    ) {
        let envelope = self.envelope(arrival, first as u16, each);
        // What it does not take is lost, as on a network.
        siblings.pass(slot, &envelope, packets);
        self.passed.fetch_add(1, Ordering::Relaxed);
        let now = arrival.now;
        let nanos = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if nanos(now) >= self.steer_at.load(Ordering::Relaxed)
            && let Ok(mut steering) = self.steering.try_lock()
        {
            let next = steering.misdirected(now, siblings, self.socket(), self.local_addr());
            self.steer_at.store(nanos(next), Ordering::Relaxed);
        }
    }

    fn envelope(&self, arrival: &Arrival<'_>, number: u16, each: usize) -> Envelope {
        Envelope {
            port: self.name(),
            from: arrival.route.src,
            traffic_class: arrival.traffic_class,
            number,
            each: each as u32,
            asked_at: None,
        }
    }

    fn take_or_probe(
        &self,
        siblings: &Siblings,
        arrival: &mut Arrival<'_>,
        packet: &[u8],
        last: &mut Last,
        answering: &mut Answering,
    ) {
        match Probe::parse(packet) {
            // From an address of this host, by one of its programs; with the sender's secret only if it is one of ours.
            Some(probe) if arrival.route.src == self.local_addr() => {
                let mut steering = lock(&self.steering);
                steering.arrived(probe, siblings, self.name(), self.socket());
            }
            _ => self.take(arrival, packet, last, answering),
        }
    }

    /// A management datagram, with its packet.
    pub(super) fn manage(&self, arrival: &Arrival<'_>, packet: &[u8], payload: &[u8]) {
        let from = arrival.route.src;
        let siblings = self.siblings.as_ref().filter(|s| !s.is_alone());
        let hear = || self.manager.hear(self, from, payload);
        let Some(siblings) = siblings else {
            return hear();
        };
        // Listeners that begin later have nothing to do with it.
        let at = match arrival.origin {
            Origin::Asked { at, .. } => at,
            Origin::Wire | Origin::Passed => host_time(),
        };
        let envelope = || self.envelope(arrival, arrival.number, packet.len());
        let question = || Envelope {
            asked_at: Some(at),
            ..envelope()
        };
        let is_asked = matches!(arrival.origin, Origin::Asked { .. });
        let whose = self.manager.whose(self, (from, at, is_asked), payload);
        let may_ask = |about_rejection| {
            let second = arrival.now.as_secs();
            lock(&self.questions).admit(second, about_rejection)
        };
        let is_heard = match (arrival.origin, whose) {
            (Origin::Asked { by, .. }, Whose::Ours) => {
                if let Some(service) = self.service_of(payload) {
                    siblings.tell_serves(by, service);
                }
                true
            }
            (Origin::Asked { .. }, whose) => whose == Whose::Anyones,
            (Origin::Wire, Whose::Anyones) => {
                if may_ask(true) {
                    siblings.ask_all(&question(), packet);
                }
                true
            }
            (Origin::Wire, Whose::Someones) => {
                let service = self.service_of(payload);
                let known = service.and_then(|service| siblings.who_serves(&service));
                if let Some(slot) = known {
                    siblings.pass(slot, &question(), packet);
                } else if may_ask(false) {
                    siblings.ask_all(&question(), packet);
                }
                false
            }
            (Origin::Wire, Whose::Of(slot)) if siblings.has(slot) => {
                siblings.pass(slot, &envelope(), packet);
                false
            }
            // Ours, or nobody's: the peer is refused, or told that the connection is over, unless a process that we do not know yet may have it.
            (Origin::Passed | Origin::Wire, _) => true,
        };
        if is_heard {
            hear();
        }
    }

    /// The service that a request is for.
    fn service_of(&self, payload: &[u8]) -> Option<Service> {
        let id = match Mad::parse(payload)?.message {
            Message::Req(req) => req.service_id,
            Message::SidrReq(req) => req.service_id,
            _ => return None,
        };
        let (space, number) = service(id)?;
        Some((space, self.name(), number))
    }

    /// Whether the connection with this number may be that of another process, also of one that has no connection with us: what it is told is not for us to
    /// say, and the peer repeats.
    pub(super) fn is_anothers(&self, id: u32) -> bool {
        let siblings = self.siblings.as_ref();
        siblings.is_some_and(|siblings| siblings.is_of_another((id >> 24) as u8))
    }

    /// Whether a process has a listener for this service: who has none does not refuse it then.
    pub(super) fn is_served(&self, service_id: u64) -> bool {
        let taken = |(space, number)| Claim::is_taken(kind(space), self.name(), number);
        service(service_id).is_some_and(taken)
    }

    /// Whose a management datagram is, where `is_known` says what the managers have: the service, or the request. A sibling that is asked says of nothing
    /// else that it is its own.
    pub(super) fn whose_is(
        &self,
        is_asked: bool,
        payload: &[u8],
        is_known: impl FnOnce(&Message<'_>) -> bool,
    ) -> Whose {
        let (Some(mad), Some(siblings)) = (Mad::parse(payload), &self.siblings) else {
            return Whose::Ours;
        };
        let of_service = |service_id| {
            if is_known(&mad.message) {
                Whose::Ours
            } else if !is_asked && self.is_served(service_id) {
                Whose::Someones
            } else {
                Whose::Nobodys
            }
        };
        let id = match &mad.message {
            Message::Req(req) => return of_service(req.service_id),
            Message::SidrReq(req) => return of_service(req.service_id),
            // A peer that gives up its request may not know our number.
            Message::Rej(rej) if rej.remote_id == 0 => return Whose::Anyones,
            _ if is_asked => return Whose::Nobodys,
            Message::Rej(rej) => rej.remote_id,
            Message::Rep(rep) => rep.remote_id,
            Message::Rtu(rtu) | Message::Drep(rtu) => rtu.remote_id,
            Message::Mra(mra) => mra.remote_id,
            Message::Dreq(dreq) => dreq.remote_id,
            Message::SidrRep(rep) => rep.request_id,
        };
        let slot = (id >> 24) as u8;
        if slot == siblings.slot() {
            Whose::Ours
        } else {
            Whose::Of(slot)
        }
    }
}

/// The port numbers of connections and those of datagrams are apart.
fn kind(space: PortSpace) -> &'static str {
    match space {
        PortSpace::Udp => "udp",
        PortSpace::Tcp => "tcp",
    }
}

impl PortInner {
    /// Takes a port number of a service for this process.
    ///
    /// # Errors
    /// `AddrInUse` if another process has it.
    pub(super) fn claim(&self, space: PortSpace, number: u16) -> std::io::Result<Claim> {
        Claim::take(kind(space), self.name(), number)
    }
}

impl Shared for PortInner {
    fn passed(&self, by: u8, envelope: &Envelope, packets: &[u8]) {
        let mut arrival = Arrival {
            port: self,
            now: self.now(),
            route: Route {
                src: envelope.from,
                dst: SocketAddr::new(self.local_addr().ip(), PORT),
            },
            traffic_class: envelope.traffic_class,
            origin: match envelope.asked_at {
                Some(at) => Origin::Asked { by, at },
                None => Origin::Passed,
            },
            number: envelope.number,
            udp_len: 0,
        };
        let (mut last, mut answering) = (None, Answering::new());
        for packet in packets.chunks(envelope.each.max(1) as usize) {
            self.take(&mut arrival, packet, &mut last, &mut answering);
            arrival.number = arrival.number.wrapping_add(1);
        }
        for member in answering {
            member.answer(false);
        }
    }

    fn probed(&self, slot: u8, probe: &Probe) {
        if slot != 0 {
            lock(&self.steering).learned(slot, probe, self.socket());
        }
    }
}
