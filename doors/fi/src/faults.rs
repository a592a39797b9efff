//! Simulated faults of a network, for tests: packets are lost, duplicated, or delivered after later ones.

use std::mem::take;
use std::net::SocketAddr;

/// Of each million packets so many.
#[derive(Clone, Copy, Debug, Default)]
pub struct FaultRates {
    /// Are lost; pieces of large messages too.
    pub lost: u64,
    /// Come twice.
    pub twice: u64,
    /// Come after the next one.
    pub late: u64,
}

/// A packet, and its sender.
pub(crate) type Packet = (SocketAddr, u32, Vec<u8>);

/// The faults, and delayed packets.
pub(crate) struct FaultInjector {
    weather: FaultRates,
    random: u64,
    late: Option<Packet>,
}

impl FaultInjector {
    pub(crate) fn new(weather: FaultRates, seed: u64) -> FaultInjector {
        FaultInjector {
            weather,
            random: seed | 1,
            late: None,
        }
    }

    fn happens(&mut self, per_million: u64) -> bool {
        if per_million == 0 {
            return false;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 11) % 1_000_000 < per_million
    }

    /// Whether a packet to be sent is lost.
    pub(crate) fn loses(&mut self) -> bool {
        self.happens(self.weather.lost)
    }

    /// How often a received packet is delivered now, and a delayed one after it. A delayed packet with no successor is lost.
    pub(crate) fn came(
        &mut self,
        from: SocketAddr,
        num: u32,
        packet: &[u8],
    ) -> (u32, Option<Packet>) {
        let before = take(&mut self.late);
        if before.is_none() && self.happens(self.weather.late) {
            self.late = Some((from, num, packet.to_vec()));
            return (0, None);
        }
        (1 + u32::from(self.happens(self.weather.twice)), before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_come_late_and_twice() {
        let all = |weather: FaultRates| {
            let mut sky = FaultInjector::new(weather, 7);
            let (from, mut seen) = ("127.0.0.1:9".parse().unwrap(), Vec::new());
            for number in 0..100u8 {
                let (times, late) = sky.came(from, 9, &[number]);
                seen.extend((0..times).map(|_| number));
                seen.extend(late.map(|(_, _, packet)| packet[0]));
            }
            seen
        };
        let fair = all(FaultRates::default());
        assert!(fair.iter().copied().eq(0..100));
        let late = all(FaultRates {
            late: 300_000,
            ..FaultRates::default()
        });
        assert!(late.len() >= 99 && !late.is_sorted());
        let twice = all(FaultRates {
            twice: 300_000,
            ..FaultRates::default()
        });
        assert!(twice.len() > 110 && twice.is_sorted());
    }
}
