//! Steering: the kernel is told which socket of an address has which slot, so that packets come to the right process at once.
//!
//! The kernel numbers the sockets, and does not tell the numbers; they change when a process ends. So a process that has to pass packets on sends probes to
//! its own address: a probe names the number of the socket that it is to reach, and whoever gets it tells the sender, with the sender's secret. When all have
//! answered, the kernel is told. What is learned is an advice: a packet that comes to the wrong process is passed on.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use weft_proto::dgram::Now;
use weft_sys::udp::{Choice, UdpSocket};

use super::probe::{DIRECT, Probe};
use super::{PortName, Siblings};

/// Where a packet has the slot: the first byte of the destination's number.
const SLOT_BYTE: u32 = 5;
/// The time between rounds of probes while packets go wrong; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What a port knows of the sockets that share its address.
#[derive(Default)]
pub(in crate::roce) struct Steering {
    epoch: u32,
    secret: u64,
    /// The number of each slot's socket: what the kernel was told, and what the probes under way have found.
    told: BTreeMap<u8, u8>,
    found: BTreeMap<u8, u8>,
    /// The probes of the round under way, and the answers to them.
    sent: u32,
    answered: u32,
    /// The kernel has a rule of ours, or another process's in its place.
    has_told: bool,
    next: Now,
    pause: Duration,
    /// The kernel takes no rule.
    is_off: bool,
}

impl Steering {
    pub(in crate::roce) fn new(secret: u64) -> Steering {
        Steering {
            secret,
            pause: FIRST_PAUSE,
            ..Steering::default()
        }
    }

    /// The kernel is told nothing any more.
    pub(in crate::roce) fn stop(&mut self) {
        self.is_off = true;
    }

    /// Packets for another process have come here. Returns when this is to be told again.
    pub(in crate::roce) fn misdirected(
        &mut self,
        now: Now,
        siblings: &Siblings,
        socket: &UdpSocket,
        addr: SocketAddr,
    ) -> Now {
        if self.is_off || now < self.next {
            return self.next;
        }
        let calm = now.saturating_sub(self.next) > LONGEST_PAUSE;
        self.pause = if calm {
            FIRST_PAUSE
        } else {
            (self.pause * 2).min(LONGEST_PAUSE)
        };
        self.next = now + self.pause;
        // Answers of the round before are lost, or their process is stopped.
        if self.is_under_way() {
            self.settle(socket);
        }
        self.begin_round();
        // A number that no socket has reaches any of them, which answers for a smaller number as well.
        let most = u8::try_from(siblings.count()).unwrap_or(u8::MAX);
        for index in 0..=most {
            let probe = self.probe(siblings.slot(), index);
            if self.is_off || socket.send(&probe.emit(), addr, None).is_err() {
                break;
            }
            self.sent += 1;
        }
        if self.is_off { Now::MAX } else { self.next }
    }

    fn begin_round(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.found.clear();
        (self.sent, self.answered) = (0, 0);
    }

    fn probe(&self, slot: u8, index: u8) -> Probe {
        Probe {
            slot,
            index,
            epoch: self.epoch,
            secret: self.secret,
        }
    }

    /// Some probes are not answered yet.
    fn is_under_way(&self) -> bool {
        self.answered < self.sent
    }

    /// A probe has come here.
    pub(in crate::roce) fn arrived(
        &mut self,
        probe: Probe,
        siblings: &Siblings,
        port: PortName,
        socket: &UdpSocket,
    ) {
        if probe.slot == siblings.slot() {
            self.learned(probe.slot, &probe, socket);
        } else {
            siblings.tell_probed(probe.slot, port, probe);
        }
    }

    /// This probe has come to the socket of this slot. Anybody on the host can send what looks like one, but for the secret.
    pub(in crate::roce) fn learned(&mut self, slot: u8, probe: &Probe, socket: &UdpSocket) {
        let is_ours = (probe.epoch, probe.secret) == (self.epoch, self.secret);
        if self.is_off || !is_ours || !self.is_under_way() {
            return;
        }
        let best = self.found.entry(slot).or_insert(probe.index);
        *best = probe.index.min(*best);
        self.answered += 1;
        if !self.is_under_way() {
            self.settle(socket);
        }
    }

    /// The round is over. What the kernel was told before, also by another process, stays until then: packets keep their order.
    fn settle(&mut self, socket: &UdpSocket) {
        let is_whole = !self.is_under_way();
        (self.sent, self.answered) = (0, 0);
        let found = std::mem::take(&mut self.found);
        if is_whole && found.len() > 1 {
            self.told = found;
        } else if is_whole || found.is_empty() {
            // All came to one socket: the kernel has no rule that looks at probes. The next round has one.
            if found.is_empty() && self.has_told {
                return;
            }
            self.told.clear();
        } else {
            // Nobody else has these numbers any more.
            let has = |index: &u8| found.values().any(|of| of == index);
            self.told.retain(|_, index| !has(index));
            self.told.extend(found);
        }
        self.tell(socket);
    }

    fn tell(&mut self, socket: &UdpSocket) {
        let members = self.told.iter();
        let members: Vec<_> = members
            .map(|(slot, index)| (*slot, u32::from(*index)))
            .collect();
        let choice = Choice {
            direct: DIRECT,
            byte: SLOT_BYTE,
            members: &members,
        };
        self.has_told = true;
        if let Err(error) = socket.choose_by(&choice) {
            tracing::debug!(%error, "the kernel does not choose among processes with RoCE: packets are passed on");
            self.is_off = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// A socket of a group of two, and what it knows after a round that has found both.
    fn settled() -> (Steering, [UdpSocket; 2]) {
        let first = UdpSocket::bind_in_group((Ipv4Addr::LOCALHOST, 0).into(), 1 << 16).unwrap();
        let addr = first.local_addr().unwrap();
        let second = UdpSocket::bind_in_group(addr, 1 << 16).unwrap();
        let mut steering = Steering::new(0x005e_c2e7);
        round(&mut steering, &first, &[(7, 0), (9, 1)]);
        assert_eq!(steering.told, BTreeMap::from([(7, 0), (9, 1)]));
        (steering, [first, second])
    }

    fn round(steering: &mut Steering, socket: &UdpSocket, answers: &[(u8, u8)]) {
        steering.begin_round();
        steering.sent = answers.len() as u32;
        for (slot, index) in answers {
            let probe = steering.probe(7, *index);
            steering.learned(*slot, &probe, socket);
        }
    }

    /// Which of the two gets a packet for this slot.
    fn who_gets(sockets: &[UdpSocket; 2], slot: u8) -> usize {
        let to = sockets[0].local_addr().unwrap();
        let packet = [4, 0, 0, 0, 0, slot, 1, 2];
        sockets[0].send(&packet, to, None).unwrap();
        let mut into = [0; 64];
        let got = |socket: &UdpSocket| socket.recv(&mut into).is_ok();
        sockets.iter().position(got).expect("one of them has it")
    }

    #[test]
    fn what_has_not_the_secret_or_comes_late_teaches_nothing() {
        let (mut steering, sockets) = settled();
        let before = steering.told.clone();
        // The round is over.
        let late = steering.probe(7, 0);
        steering.learned(9, &late, &sockets[0]);
        assert_eq!((&steering.told, steering.found.len()), (&before, 0));
        steering.begin_round();
        steering.sent = 2;
        let mut forged = steering.probe(7, 0);
        forged.secret ^= 1;
        let mut old = steering.probe(7, 0);
        old.epoch -= 1;
        for probe in [forged, old] {
            steering.learned(9, &probe, &sockets[0]);
            assert_eq!((steering.answered, steering.found.len()), (0, 0));
        }
        assert_eq!(steering.told, before);
    }

    /// One that comes knows nothing of what the others have told the kernel, and leaves it until it knows as much.
    #[test]
    fn a_round_leaves_the_rule_until_it_is_over() {
        let (_, sockets) = settled();
        let mut other = Steering::new(1);
        other.begin_round();
        other.sent = 3;
        for (n, (slot, index)) in [(9, 1), (7, 0), (9, 2)].into_iter().enumerate() {
            assert_eq!((who_gets(&sockets, 7), who_gets(&sockets, 9)), (0, 1));
            assert!(!other.has_told, "after {n} answers");
            let probe = other.probe(9, index);
            other.learned(slot, &probe, &sockets[1]);
        }
        assert_eq!(other.told, BTreeMap::from([(7, 0), (9, 1)]));
        assert_eq!((who_gets(&sockets, 7), who_gets(&sockets, 9)), (0, 1));
    }

    #[test]
    fn one_that_does_not_answer_keeps_its_number_unless_another_one_has_it() {
        let (mut steering, sockets) = settled();
        steering.begin_round();
        steering.sent = 2;
        let probe = steering.probe(7, 0);
        steering.learned(7, &probe, &sockets[0]);
        steering.settle(&sockets[0]);
        assert_eq!(steering.told, BTreeMap::from([(7, 0), (9, 1)]));
        steering.begin_round();
        steering.sent = 2;
        let probe = steering.probe(7, 1);
        steering.learned(7, &probe, &sockets[0]);
        steering.settle(&sockets[0]);
        assert_eq!(steering.told, BTreeMap::from([(7, 1)]));
    }

    /// Without a rule one socket gets all probes, and says nothing about numbers.
    #[test]
    fn where_one_socket_gets_all_probes_there_is_no_rule() {
        let (mut steering, sockets) = settled();
        round(&mut steering, &sockets[0], &[(9, 0), (9, 1)]);
        assert!(steering.told.is_empty() && steering.has_told);
    }
}
