//! Progress of a UDP port: a thread that polls a completion queue of one of its queue pairs receives for all of them; the engine does it while no
//! thread polls. A polling thread's lease is as in [`crate::engine`], with a timer for the tick.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Instant;

use weft_sys::Event;
use weft_sys::udp::RecvBatch;

use super::inbound::ArrivalTime;
use super::intake::{Answering, Feed, Intake, Train};
use super::local::{Pipe, Taken};
use super::port::{HEADROOM, Last, PortInner, Rx, member_id};
use crate::cq::Port;
use crate::engine::{Engine, Next, Source};
use crate::lock::lock;

/// System calls of one drive, so that a flood cannot keep a polling thread from its completions.
const BATCH: usize = 8;
/// A poller of a port with pipes looks at the kernel's socket once in so many polls: every 3 µs or so.
const SOCKET_EVERY: u32 = 64;
/// Datagrams of one pipe before the others get their turn.
const TURN: usize = 64;

/// The contents of a pipe, at most a [`TURN`] of it.
struct PipeFeed<'a> {
    pipe: &'a Pipe,
    buffer: &'a mut [u8],
    /// Of the datagram in the buffer.
    len: usize,
    count: usize,
    bytes: usize,
    over: bool,
}

impl Feed for PipeFeed<'_> {
    fn advance(&mut self) -> bool {
        if self.count == TURN {
            return false;
        }
        match self.pipe.take(&mut self.buffer[HEADROOM..]) {
            Taken::Datagram(len) => {
                self.len = len;
                self.count += 1;
                self.bytes += len;
                true
            }
            Taken::Nothing => false,
            Taken::Over => {
                self.over = true;
                false
            }
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer[..HEADROOM + self.len]
    }
}

impl PortInner {
    fn watch_lease(&self) {
        if let Some(at) = self.lease.watch() {
            self.registration.set_timer(at);
        }
    }

    /// As [`Port::drive`], with the kernel's socket or without.
    /// `false`: another thread is receiving.
    fn drive_some(&self, socket: bool) -> bool {
        self.flush_deferred();
        if self.due.load(Ordering::Relaxed) && self.due.swap(false, Ordering::SeqCst) {
            let now = Instant::now();
            self.resume(|_, until| until <= now);
        }
        let Some(mut rx) = self.rx.try_lock() else {
            return false;
        };
        if socket {
            let Rx { batch, last, .. } = &mut *rx;
            self.receive_some(batch, last);
        }
        if self.locals.any() || !rx.pipes.is_empty() {
            self.receive_local(&mut rx);
            drop(rx);
            // A thread that tried meanwhile to put the pipes to sleep has left that to us.
            fence(Ordering::SeqCst);
            if self.dozing.load(Ordering::SeqCst) {
                self.doze();
            }
        }
        true
    }

    fn receive_some(&self, batch: &mut RecvBatch, last: &mut Last) {
        for _ in 0..BATCH {
            if !self.receive(batch, last) {
                break;
            }
        }
    }

    /// Processes available datagrams; returns whether there may be more.
    fn receive(&self, batch: &mut RecvBatch, last: &mut Last) -> bool {
        match self.socket.recv_batch(batch) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
            Err(error) => {
                // This may be the fate of a datagram that we sent; the error concerns its sender, and is reported once.
                tracing::debug!(%error, "receiving datagrams");
                return true;
            }
        }
        let now = ArrivalTime::default();
        let (mut answering, mut known) = (Answering::new(), None);
        for at in 0..batch.len() {
            let Some((train, buffer)) = batch.get(at) else {
                continue;
            };
            let arrival = train.arrival;
            let mut intake = Intake {
                port: self,
                feed: Train::new(buffer, train.each),
                from: arrival.from,
                to: arrival.to.unwrap_or_else(|| self.addr.ip()),
                traffic_class: arrival.traffic_class,
                now: &now,
            };
            intake.take_all(last, &mut known, &mut answering);
        }
        // One answer to a sender for all that was here of it.
        for member in answering {
            member.answer();
        }
        batch.len() == batch.places()
    }

    /// Processes the datagrams in the pipes.
    fn receive_local(&self, rx: &mut Rx) {
        self.refresh(rx);
        let Rx {
            batch,
            datagram,
            pipes,
            turn,
            last,
            ..
        } = rx;
        *turn += 1;
        let mut answering = Answering::new();
        for at in 0..pipes.len() {
            let pipe = &pipes[(*turn + at) % pipes.len()];
            if pipe.begins() {
                self.receive_some(batch, last);
            }
            let over = self.receive_pipe(pipe, datagram, last, &mut answering);
            if over {
                self.locals.remove(pipe);
            } else if pipe.has_room() {
                self.resume(|to, _| to == pipe.peer);
            }
        }
        for member in answering {
            member.answer();
        }
    }

    /// Whether the pipe has ended.
    fn receive_pipe(
        &self,
        pipe: &Pipe,
        buffer: &mut [u8],
        last: &mut Last,
        answering: &mut Answering,
    ) -> bool {
        let (now, mut known) = (ArrivalTime::default(), None);
        let mut intake = Intake {
            port: self,
            feed: PipeFeed {
                pipe,
                buffer,
                len: 0,
                count: 0,
                bytes: 0,
                over: false,
            },
            from: pipe.peer,
            to: pipe.ours.ip(),
            traffic_class: 0,
            now: &now,
        };
        intake.take_all(last, &mut known, answering);
        let PipeFeed {
            count, bytes, over, ..
        } = intake.feed;
        if pipe.release(count, bytes) {
            self.locals.knock(pipe);
        }
        over
    }

    fn ring_alarms(&self) {
        let now = Instant::now();
        // For these no report has come.
        self.resume(|_, until| until <= now);
        let next = {
            let mut paced = lock(&self.paced);
            paced.timer.take_if(|timer| *timer <= now);
            paced.of.values().map(|paced| paced.until).min()
        };
        if let Some(next) = next {
            self.paced_by(next);
        }
        let mut due = HashMap::new();
        lock(&self.alarms).retain(|(at, member)| {
            if *at <= now {
                due.insert(member_id(member), member.clone());
            }
            *at > now
        });
        for member in due.values().filter_map(Weak::upgrade) {
            member.alarm(now);
        }
    }
}

impl Port for PortInner {
    fn drive(&self) {
        self.drive_some(true);
    }
    fn drive_leased(&self) {
        if self.lease.poll() {
            self.watch_lease();
        }
        let looks = self.lease.polls().is_multiple_of(SOCKET_EVERY);
        self.drive_some(looks || !self.locals.any());
    }
    fn flush_deferred(&self) {
        PortInner::flush_deferred(self);
    }
    fn release_lease(&self) {
        self.flush_deferred();
        if !self.lease.is_armed() {
            self.rearm();
        }
    }
}

impl Source for PortInner {
    fn ready(self: Arc<Self>, _engine: &Arc<Engine>, _event: Event) -> Next {
        if self.lease.disarm() {
            if self.drive_some(true) {
                self.rearm();
            } else {
                // The socket stays readable while a polling thread takes a burst out of it. An armed socket would call the engine again and again,
                // on a core that another thread needs.
                self.watch_lease();
            }
        }
        Next::Done
    }

    fn expired(self: Arc<Self>, _engine: &Arc<Engine>) {
        self.ring_alarms();
        if self.locals.any() {
            self.locals.knock_again();
        }
        if self.lease.expired() != Some(false) {
            return;
        }
        self.flush_deferred();
        // A thread that has been receiving since the last check counts as polling.
        if self.lease.is_over() && self.rx.try_lock().is_some() {
            self.rearm();
        } else {
            self.watch_lease();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};
    use std::time::Duration;

    use weft_wire::dgram::{self, Control, Datagram};

    use super::*;
    use crate::types::SendWr;
    use crate::{Cq, Device, UdDest, UdInit, UdPort, UdQp, UdReliable};

    const HERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

    struct Bed {
        device: Device,
        port: UdPort,
        cq: Cq,
        /// It takes nothing, and answers nothing.
        silent: std::net::UdpSocket,
    }

    impl Bed {
        fn new() -> Bed {
            let device = Device::open().unwrap();
            let port = device.bind_ud(HERE).unwrap();
            let cq = device.create_cq(256, None).unwrap();
            let silent = std::net::UdpSocket::bind(HERE).unwrap();
            Bed {
                device,
                port,
                cq,
                silent,
            }
        }

        fn qp(&self, reliable: Option<UdReliable>) -> UdQp {
            let init = UdInit {
                max_send_wr: 1024,
                max_inline: 4096,
                reliable,
                ..UdInit::new(&self.port, 1, &self.cq, &self.cq)
            };
            self.device.alloc_pd().unwrap().create_ud_qp(&init).unwrap()
        }

        fn silent(&self) -> UdDest {
            UdDest {
                addr: self.silent.local_addr().unwrap(),
                qp_num: 1,
                qkey: 1,
                from: None,
                traffic_class: 0,
            }
        }

        /// Queues more than the pacing allows to a destination that reports nothing.
        fn stall(&self, qp: &UdQp) {
            let dest = self.silent();
            for _ in 0..1000 {
                let wr = SendWr::send(1).inline(&[0; 256]);
                qp.post_send(&wr, &dest).unwrap();
            }
        }
    }

    /// A sender that waits for a report of its destination waits once, however often it has tried.
    #[test]
    fn one_wait_for_each_destination() {
        let bed = Bed::new();
        let qp = bed.qp(None);
        let port = bed.port.inner();
        bed.stall(&qp);
        for _ in 0..20 {
            port.resume(|_, _| true);
            let waits = lock(&port.paced).of.len();
            assert!(waits <= 1, "{waits}");
            assert!(lock(&port.alarms).is_empty());
        }
    }

    /// A hostile receiver accepts a flow, reports that it has no room, and then sends nothing: the engine serves others meanwhile, and the queue
    /// does not grow.
    #[test]
    fn a_receiver_that_takes_nothing_does_not_keep_the_engine() {
        let bed = Bed::new();
        let give_up = Duration::from_hours(1);
        let not_ready = None;
        let qp = bed.qp(Some(UdReliable { give_up, not_ready }));
        let other = bed.device.bind_ud(HERE).unwrap();
        let port = bed.port.inner();
        let dest = bed.silent();
        for id in 0..200 {
            let wr = SendWr::send(id).inline(&[0; 4096]).signaled();
            qp.post_send(&wr, &dest).unwrap();
        }
        let mut answers = 0;
        let mut bytes = [0; 8192];
        while answers < 2 {
            let (len, from) = bed.silent.recv_from(&mut bytes).unwrap();
            let answer = match dgram::read(&bytes[..len]) {
                Ok(Datagram::Control(Control::Hello { flow, .. })) => {
                    let (dst_qp, src_qp) = (flow.src_qp, flow.dst_qp);
                    let flow = dgram::Flow {
                        dst_qp,
                        src_qp,
                        ..flow
                    };
                    Control::Welcome { flow, cookie: 7 }
                }
                Ok(Datagram::Control(Control::Probe { cookie, sent })) => {
                    let room = 0;
                    Control::Report { cookie, sent, room }
                }
                _ => continue,
            };
            let mut raw = Vec::new();
            answer.emit(&mut raw);
            bed.silent.send_to(&raw, from).unwrap();
            answers += 1;
        }
        // Long enough for some time-outs, each twice as long as the one before.
        let start = Instant::now();
        let end = start + Duration::from_mins(1);
        while start.elapsed() < Duration::from_secs(3) {
            // The engine takes another port's datagrams, though no thread polls.
            let before = other.counters().malformed;
            bed.silent.send_to(b"?", other.local_addr()).unwrap();
            while other.counters().malformed == before {
                assert!(Instant::now() < end, "the engine does nothing else");
                std::thread::sleep(Duration::from_millis(1));
            }
            let waits = (lock(&port.paced).of.len(), lock(&port.alarms).len());
            assert!(waits.0 <= 1 && waits.1 <= 16, "{waits:?}");
        }
    }

    /// One that waits for its destination is not in the way of those that wait for the socket.
    #[test]
    fn room_in_the_socket_is_for_all_that_wait_for_it() {
        let bed = Bed::new();
        let (a, b) = (bed.qp(None), bed.qp(None));
        let port = bed.port.inner();
        // A poller has the port, not the engine.
        port.lease.disarm();
        port.lease.watch();
        bed.stall(&a);
        for qp in [&a, &b] {
            let members = port.members.read().unwrap();
            port.wait_for_room(Weak::clone(&members[&qp.num()]));
        }
        port.flush();
        assert!(lock(&port.waiting).is_empty());
    }

    /// While a thread takes a burst out of the socket, the engine leaves the port alone; afterwards it takes the rest.
    #[test]
    fn the_engine_does_not_turn_round_beside_who_receives() {
        let bed = Bed::new();
        let port = bed.port.inner();
        let held = port.rx.try_lock().unwrap();
        bed.silent.send_to(b"?", bed.port.local_addr()).unwrap();
        let end = Instant::now() + Duration::from_mins(1);
        while port.lease.is_armed() {
            assert!(Instant::now() < end, "the engine does not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        for _ in 0..50 {
            std::thread::sleep(Duration::from_millis(1));
            assert!(!port.lease.is_armed(), "it is called again");
        }
        drop(held);
        while port.malformed.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < end, "nobody takes it");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
