//! Costs of this machine's copies, registrations and transfers: numbers measured elsewhere, and conclusions from them.

use serde::{Deserialize, Serialize};

macro_rules! cases {
    ($($(#[$doc:meta])* $item:ident = $words:literal,)*) => {
        /// The operation that a time was measured for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Case { $($(#[$doc])* $item,)* }

        impl Case {
            /// All of them, in the tables' order.
            pub const ALL: [Self; [$(Self::$item),*].len()] = [$(Self::$item),*];

            /// Returns its description.
            pub fn words(self) -> &'static str {
                match self { $(Self::$item => $words,)* }
            }
        }
    };
}

cases! {
    /// Source and target in the cache.
    CopyWarm = "copy, cache warm",
    /// Pages resident, nothing in the cache.
    CopyCold = "copy, cache cold",
    /// The target's pages are not resident.
    CopyAbsent = "copy, target not resident",
    /// As the warm one, both on huge pages.
    CopyHuge = "copy, huge pages, cache warm",
    /// As the absent one, the target on huge pages.
    CopyAbsentHuge = "copy, target not resident, huge pages",
    /// weft's registration and its end.
    Register = "register and deregister (weft)",
    /// weft's deregistration.
    Deregister = "deregister (weft)",
    /// weft's registration of memory that is not resident, and one write to each page, which is due in any case.
    RegisterAbsent = "register and touch, not resident (weft)",
    /// mlock and munlock of resident pages: the kernel's part of an RNIC's registration.
    Pin = "pin and unpin",
    /// munlock.
    Unpin = "unpin",
    /// mlock and munlock of pages that are not resident.
    PinAbsent = "pin and unpin, not resident",
    /// mlock and munlock of resident huge pages.
    PinHuge = "pin and unpin, huge pages",
    /// mlock and munlock of huge pages that are not resident.
    PinAbsentHuge = "pin and unpin, not resident, huge pages",
    /// A region for each thread, one after the other: weft's registration.
    RegisterInTurn = "register in turn (weft)",
    /// A region for each thread, at the same time.
    RegisterTogether = "register on all threads (weft)",
    /// As in turn, pinned.
    PinInTurn = "pin in turn",
    /// At the same time.
    PinTogether = "pin on all threads",
    /// In turn, not resident.
    PinAbsentInTurn = "pin in turn, not resident",
    /// At the same time.
    PinAbsentTogether = "pin on all threads, not resident",
    /// A send and its receive over loopback TCP, both by one thread.
    Tcp = "send and receive, TCP",
    /// A send of the verbs and its receive through weft's shared memory, both by one thread.
    Local = "send and receive, weft in shared memory",
    /// Two copies by way of a ring of 256 KiB, as those of `weft run`.
    Rings = "two copies through a ring",
    /// An RDMA Read over loopback TCP from its post to its completion.
    Transfer = "RDMA Read over TCP",
    /// Computation alone, for the time of that Read.
    Compute = "the same time of computation",
    /// The Read posted, the computation, the wait for the Read.
    Both = "both at once",
    /// A round trip of one byte over loopback TCP.
    RoundTrip = "round trip, TCP, 1 B",
}

/// The time of a case at a size: the least of several, which other work on the machine disturbs least.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The measured operation.
    pub case: Case,
    /// At which size.
    pub bytes: u64,
    /// Microseconds.
    pub us: f64,
}

/// Everything measured of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Machine {
    pub points: Vec<Point>,
    /// Threads of the parallel cases.
    pub threads: usize,
    /// True if the kernel provided huge pages.
    pub huge_pages: bool,
    /// Measurements that failed, with the reason.
    pub missing: Vec<String>,
}

/// From which size on one way is at least as fast as another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Critical {
    /// At all measured sizes.
    Always,
    /// From this size on.
    From(u64),
    /// At none of the measured sizes.
    Never,
    /// Not measured.
    Unknown,
}

impl Machine {
    /// The points of a case, by size.
    pub fn line(&self, case: Case) -> Vec<(u64, f64)> {
        let points = self.points.iter().filter(|point| point.case == case);
        let mut line: Vec<_> = points.map(|point| (point.bytes, point.us)).collect();
        line.sort_unstable_by_key(|point| point.0);
        line
    }

    /// The time of a case at a measured size.
    pub fn at(&self, case: Case, bytes: u64) -> Option<f64> {
        let mut points = self.points.iter();
        let point = points.find(|point| point.case == case && point.bytes == bytes)?;
        Some(point.us)
    }

    /// The time of a case at any size: on the straight line between the measured neighbours; beyond the largest in proportion, below the
    /// smallest as there.
    pub fn between(&self, case: Case, bytes: u64) -> Option<f64> {
        let line = self.line(case);
        let after = line.iter().position(|point| point.0 >= bytes);
        match after {
            Some(0) => Some(line[0].1),
            Some(at) => {
                let (low, high) = (line[at - 1], line[at]);
                let part = (bytes - low.0) as f64 / (high.0 - low.0) as f64;
                Some(low.1 + (high.1 - low.1) * part)
            }
            None => line
                .last()
                .map(|last| last.1 * bytes as f64 / last.0.max(1) as f64),
        }
    }

    /// Returns the least time of a send and its receive under `weft run`: a small message in shared memory, and two copies of the bytes.
    pub fn shared_memory(&self, bytes: u64) -> Option<f64> {
        let message = self.line(Case::Local).first()?.1;
        Some(message + self.between(Case::Rings, bytes)?)
    }

    /// Returns the size from which on `quick` is at least as fast as `slow`, for all larger measured sizes too.
    pub fn critical(&self, quick: Case, slow: Case) -> Critical {
        let slow = self.line(slow);
        let pairs: Vec<_> = self
            .line(quick)
            .into_iter()
            .filter_map(|(bytes, us)| {
                let other = slow.iter().find(|point| point.0 == bytes)?;
                Some((bytes, us <= other.1))
            })
            .collect();
        let Some((_, wins)) = pairs.last() else {
            return Critical::Unknown;
        };
        if !wins {
            return Critical::Never;
        }
        match pairs.iter().rposition(|(_, wins)| !wins) {
            None => Critical::Always,
            Some(at) => Critical::From(pairs[at + 1].0),
        }
    }

    /// How much of the shorter of transfer and computation is hidden behind the other at a size, from 0 to 1.
    pub fn overlap(&self, bytes: u64) -> Option<f64> {
        let [transfer, compute, both] =
            [Case::Transfer, Case::Compute, Case::Both].map(|case| self.at(case, bytes));
        let (transfer, compute, both) = (transfer?, compute?, both?);
        let shorter = transfer.min(compute);
        (shorter > 0.0).then(|| ((transfer + compute - both) / shorter).clamp(0.0, 1.0))
    }

    /// The largest measured size at which a case fits into a round trip.
    pub fn hidden_by_a_round_trip(&self, case: Case) -> Option<u64> {
        let trip = self.at(Case::RoundTrip, 1)?;
        let line = self.line(case);
        let fits = line.into_iter().take_while(|(_, us)| *us <= trip);
        fits.last().map(|(bytes, _)| bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(points: &[(Case, u64, f64)]) -> Machine {
        let point = |&(case, bytes, us): &(Case, u64, f64)| Point { case, bytes, us };
        Machine {
            points: points.iter().map(point).collect(),
            ..Machine::default()
        }
    }

    #[test]
    fn the_critical_size_is_where_copying_begins_to_lose() {
        use Case::{CopyWarm, Pin, Register};
        let m = machine(&[
            (Register, 4096, 1.0),
            (CopyWarm, 4096, 0.1),
            (Register, 65536, 1.0),
            (CopyWarm, 65536, 1.5),
            (Register, 16384, 1.0),
            (CopyWarm, 16384, 1.2),
        ]);
        assert_eq!(m.critical(Register, CopyWarm), Critical::From(16384));
        assert_eq!(m.critical(CopyWarm, Register), Critical::Never);
        assert_eq!(m.critical(Register, Register), Critical::Always);
        assert_eq!(m.critical(Pin, CopyWarm), Critical::Unknown);
    }

    #[test]
    fn times_between_measured_sizes() {
        let m = machine(&[(Case::Tcp, 1024, 2.0), (Case::Tcp, 2048, 4.0)]);
        assert_eq!(m.between(Case::Tcp, 1), Some(2.0));
        assert_eq!(m.between(Case::Tcp, 1536), Some(3.0));
        assert_eq!(m.between(Case::Tcp, 4096), Some(8.0));
        assert_eq!(m.between(Case::Local, 1), None);
    }

    #[test]
    fn overlap_is_the_hidden_part_of_the_shorter() {
        use Case::{Both, Compute, Transfer};
        let m = |both| {
            let points = [(Transfer, 1, 100.0), (Compute, 1, 100.0), (Both, 1, both)];
            machine(&points).overlap(1)
        };
        assert_eq!(m(100.0), Some(1.0));
        assert_eq!(m(150.0), Some(0.5));
        assert_eq!(m(250.0), Some(0.0));
        assert_eq!(machine(&[]).overlap(1), None);
    }

    #[test]
    fn what_a_round_trip_hides() {
        use Case::{Pin, RoundTrip};
        let m = machine(&[(RoundTrip, 1, 10.0), (Pin, 4096, 5.0), (Pin, 8192, 11.0)]);
        assert_eq!(m.hidden_by_a_round_trip(Pin), Some(4096));
        assert_eq!(m.hidden_by_a_round_trip(Case::Unpin), None);
    }
}
