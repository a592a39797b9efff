//! Sends that wait for room in the socket, or for the next poll.

use std::sync::atomic::Ordering;

use super::port::PortInner;
use crate::lock::lock;

impl PortInner {
    /// Send what waits for the next poll, or for room.
    pub(super) fn flush_deferred(&self) {
        if self.blocked.load(Ordering::Relaxed) {
            self.flush();
        }
    }

    pub(super) fn flush(&self) {
        if !self.blocked.swap(false, Ordering::SeqCst) {
            return;
        }
        loop {
            let Some(first) = lock(&self.waiting).pop_front() else {
                return;
            };
            if first.upgrade().is_some_and(|member| !member.send_on()) {
                // It waits again, and the others still do.
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::time::{Duration, Instant};

    use crate::types::{SendWr, Wc};
    use crate::ud::{UdDest, UdInit, UdPort, UdQp};
    use crate::{Cq, Device};

    struct Bed {
        port: UdPort,
        cq: Cq,
        sender: UdQp,
        /// It has no receives, and counts arriving datagrams.
        receiver: UdQp,
        posted: u64,
    }

    impl Bed {
        fn new() -> Bed {
            let device = Device::open().unwrap();
            let here = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
            let port = device.bind_ud(here).unwrap();
            let cq = device.create_cq(256, None).unwrap();
            let init = UdInit {
                gather: true,
                ..UdInit::new(&port, 1, &cq, &cq)
            };
            let qp = || device.alloc_pd().unwrap().create_ud_qp(&init).unwrap();
            let (sender, receiver) = (qp(), qp());
            Bed {
                port,
                cq,
                sender,
                receiver,
                posted: 0,
            }
        }

        fn poll(&self) {
            self.cq.poll(&mut [Wc::default()]).unwrap();
        }

        /// As a program that polls: whether some of it waits.
        fn burst(&mut self) -> bool {
            let dest = UdDest {
                addr: self.port.local_addr(),
                qp_num: self.receiver.num(),
                qkey: 1,
                from: None,
                traffic_class: 0,
            };
            self.poll();
            for id in 0..8 {
                let wr = SendWr::send(id).inline(&[0; 64]);
                self.sender.post_send(&wr, &dest).unwrap();
            }
            self.posted += 8;
            self.sender.counters().sent < self.posted
        }

        /// The next burst of which some waits. On a busy machine the pause between two posts may be too long.
        fn held(&mut self) {
            until(|| self.burst());
        }
    }

    fn until(mut done: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_mins(1);
        while !done() {
            assert!(Instant::now() < end, "it never comes to that");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_burst_goes_with_the_next_poll() {
        let mut bed = Bed::new();
        bed.held();
        // The engine may be at it.
        until(|| {
            bed.poll();
            bed.sender.counters().sent == bed.posted && bed.sender.outstanding() == 0
        });
    }

    /// A program that sends and computes does not keep its peer.
    #[test]
    fn a_burst_goes_without_another_poll() {
        let mut bed = Bed::new();
        bed.held();
        until(|| bed.sender.counters().sent == bed.posted);
        until(|| bed.receiver.counters().no_recv == bed.posted);
    }

    /// Requests posted before the queue pair was dropped are sent.
    #[test]
    fn a_burst_goes_before_its_queue_pair() {
        let mut bed = Bed::new();
        bed.held();
        let (posted, receiver) = (bed.posted, bed.receiver);
        drop(bed.sender);
        until(|| receiver.counters().no_recv == posted);
        let mut bed = Bed::new();
        bed.held();
        bed.sender.to_error();
        until(|| bed.receiver.counters().no_recv == bed.posted);
    }

    /// The send queue's room is not taken by what waits.
    #[test]
    fn a_full_send_queue_sends_what_waits() {
        let mut bed = Bed::new();
        for _ in 0..100 {
            bed.burst();
        }
        until(|| bed.receiver.counters().no_recv == bed.posted);
    }

    /// A program that requests an event and sleeps leaves the port to the engine; one that requests it and continues to poll does not.
    #[test]
    fn a_poller_that_has_asked_for_an_event_keeps_the_lease() {
        let bed = Bed::new();
        let armed = || bed.port.inner().lease.is_armed();
        bed.cq.req_notify(true);
        for _ in 0..3 {
            bed.poll();
            assert!(armed(), "it may sleep now");
        }
        let keeps = || {
            (0..20).for_each(|_| bed.poll());
            !armed()
        };
        until(keeps);
        until(armed);
        until(keeps);
        bed.cq.req_notify(true);
        assert!(armed(), "it may sleep now");
    }

    /// Who asks for an event and looks now and then, by a timer say, sleeps in between: the event is not to wait for the tick.
    #[test]
    fn a_program_that_looks_now_and_then_leaves_the_port_to_the_engine() {
        let bed = Bed::new();
        bed.cq.req_notify(false);
        for look in 0..40 {
            bed.poll();
            let armed = bed.port.inner().lease.is_armed();
            assert!(armed, "look {look}");
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}
