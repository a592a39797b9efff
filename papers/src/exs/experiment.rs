//! The papers' experiments as data.

use super::plan::{Amount, Design, Kind, Lengths, Mode, Plan};
use crate::driver::Transport;
use crate::named::named;

/// Outstanding operations in figs. 9, 10 and 13.
const OPERATIONS: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Message sizes of fig. 11.
const THREE_SIZES: [u64; 3] = [128 << 10, 512 << 10, 2 << 20];
/// Receives outstanding in fig. 11.
const MANY: u32 = 32;
/// The mean and the most of random lengths.
const MEAN: u64 = 1 << 20;
const MOST: u64 = 4 << 20;
/// Bytes of warm-up for each receive in direct mode over a distance: some round trips.
const WINDOW: u64 = 16 << 20;
/// Data travels in small packets up to this size, where these are enabled, and up to that of the messages if it is more.
const SMALL: u32 = 64 << 10;
/// The most bytes of control receives.
const CONTROL: u64 = 256 << 20;
/// The longest message of the interface paper.
const LONGEST: u64 = 10_000_000;

named! {
    /// The values of `--figure`: the papers' figures, and the targets.
    pub enum Figure {
        /// Stream paper: mode switches and direct ratio over outstanding operations
        Table3 = "table3",
        /// Throughput over outstanding operations, as many sends as receives
        F9a = "9a",
        /// ... half as many sends as receives
        F9b = "9b",
        /// CPU of the receiver, as many sends as receives
        F10a = "10a",
        /// ... half as many sends as receives
        F10b = "10b",
        /// Throughput over outstanding sends at 32 receives
        F11a = "11a",
        /// ... direct transfers of all
        F11b = "11b",
        /// Throughput over message size
        F12a = "12a",
        /// ... direct transfers of all
        F12b = "12b",
        /// Throughput over outstanding operations over a distance
        F13 = "13",
        /// Interface paper: throughput over message size with and without small packets
        Interface2 = "if2",
        /// ... CPU
        Interface3 = "if3",
        /// Targets: 1 MiB streams beside plain TCP
        Stream = "stream",
        /// Targets: 64 B ping-pong beside raw verbs
        PingPong = "ping-pong",
        /// Targets: blocking calls beside plain sockets
        Sync = "sync",
    }
}

/// Measurements that several figures show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Experiment {
    /// As many sends as receives.
    Equal,
    /// Half as many sends as receives.
    Half,
    /// Sends vary, 32 receives.
    Sends,
    /// Sizes vary, 4 receives and 2 sends.
    Sizes,
    /// As `Equal`, over a long link.
    Distance,
    /// Small packets on and off.
    Small,
}

impl Experiment {
    pub(crate) const ALL: [Self; 6] = [
        Self::Equal,
        Self::Half,
        Self::Sends,
        Self::Sizes,
        Self::Small,
        Self::Distance,
    ];

    /// The figures that it makes.
    pub(crate) fn figures(self) -> &'static [Figure] {
        match self {
            Self::Equal => &[Figure::Table3, Figure::F9a, Figure::F10a],
            Self::Half => &[Figure::Table3, Figure::F9b, Figure::F10b],
            Self::Sends => &[Figure::F11a, Figure::F11b],
            Self::Sizes => &[Figure::F12a, Figure::F12b],
            Self::Distance => &[Figure::F13],
            Self::Small => &[Figure::Interface2, Figure::Interface3],
        }
    }
}

/// The plans that are measured in turn, at one place of the horizontal axis.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) experiment: Experiment,
    pub(crate) transport: Transport,
    /// Outstanding sends, or bytes of a message.
    pub(crate) x: u64,
    /// The name and the plan of each variant.
    pub(crate) variants: Vec<(String, Plan)>,
}

/// The options that all plans share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base {
    pub(crate) seconds: f64,
    pub(crate) buffer: u32,
    /// Bytes before the clock starts, if that is more than each receive once.
    pub(crate) warm_up: u64,
    pub(crate) crc: bool,
    pub(crate) quick: bool,
}

/// The points of an experiment on a transport.
pub(crate) fn points(experiment: Experiment, transport: Transport, base: &Base) -> Vec<Point> {
    let plan = Plan {
        transport: Some(transport),
        amount: Amount::Seconds(base.seconds),
        buffer: base.buffer,
        crc: base.crc,
        ..Plan::default()
    };
    let thin = |index: &usize| !base.quick || index.is_multiple_of(2);
    let modes = |plan: &Plan| -> Vec<(String, Plan)> {
        let with = |mode: Mode| {
            let plan = Plan {
                mode,
                ..plan.clone()
            };
            (mode.name().to_owned(), plan)
        };
        [Mode::Dynamic, Mode::Published, Mode::Direct, Mode::Indirect]
            .map(with)
            .into()
    };
    let point = |x: u64, mut variants: Vec<(String, Plan)>| {
        // The memory of each receive and of each control receive is mapped and touched before the clock starts.
        for (_, plan) in &mut variants {
            let receives = plan.lengths.max().saturating_mul(plan.receives.into());
            plan.warm_up = receives.max(base.warm_up);
            if plan.lengths.max() <= plan.small.into() {
                let control = plan.lengths.max() * u64::from(plan.credits);
                plan.warm_up = plan.warm_up.max(control.min(CONTROL));
            }
            if experiment == Experiment::Distance && plan.mode == Mode::Direct {
                // At most the receives are in flight at a time, so windows open up to their size; a longer warm-up would take
                // long.
                plan.warm_up = plan.warm_up.min(u64::from(plan.receives) * WINDOW);
            }
        }
        Point {
            experiment,
            transport,
            x,
            variants,
        }
    };
    let random = Lengths::Exponential {
        mean: MEAN,
        max: MOST,
        seed: 0,
    };
    let operations = OPERATIONS.into_iter().enumerate();
    let operations = operations.filter(|(index, _)| thin(index)).map(|(_, n)| n);
    let powers =
        |from: u32, to: u32, step: usize| (from..=to).step_by(step).map(|power| 1u64 << power);
    let with = |lengths: Lengths, sends: u32, receives: u32| Plan {
        lengths,
        sends,
        receives,
        ..plan.clone()
    };
    match experiment {
        Experiment::Equal | Experiment::Distance => operations
            .map(|n| point(n.into(), modes(&with(random, n, n))))
            .collect(),
        Experiment::Half => operations
            .filter(|n| *n < MANY)
            .map(|n| point(n.into(), modes(&with(random, n, 2 * n))))
            .collect(),
        Experiment::Sends => operations
            .map(|n| {
                let of = |size| {
                    (
                        crate::size::human(size),
                        with(Lengths::Fixed(size), n, MANY),
                    )
                };
                point(n.into(), THREE_SIZES.map(of).into())
            })
            .collect(),
        Experiment::Sizes => powers(10, 24, if base.quick { 2 } else { 1 })
            .map(|size| point(size, modes(&with(Lengths::Fixed(size), 2, 4))))
            .collect(),
        Experiment::Small => powers(4, 22, if base.quick { 4 } else { 2 })
            .chain([LONGEST])
            .map(|size| {
                let of = |(name, small): (&str, u32)| {
                    let plan = Plan {
                        lengths: Lengths::Fixed(size),
                        kind: Kind::Seqpacket,
                        design: Design::Source,
                        small,
                        ..plan.clone()
                    };
                    (name.to_owned(), plan)
                };
                let small = SMALL.max(size as u32);
                point(size, [("small", small), ("not small", 0)].map(of).into())
            })
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;

    #[test]
    fn every_plan_can_be_and_every_figure_has_an_experiment() {
        for quick in [false, true] {
            let base = Base {
                seconds: 0.1,
                buffer: 1 << 20,
                warm_up: 0,
                crc: false,
                quick,
            };
            for experiment in Experiment::ALL {
                for transport in [Transport::Tcp, Transport::Local] {
                    let points = points(experiment, transport, &base);
                    assert!(points.len() >= 3, "{experiment:?}");
                    for (_, plan) in points.iter().flat_map(|point| &point.variants) {
                        plan.check().unwrap();
                    }
                }
            }
        }
        let made = Experiment::ALL.iter().flat_map(|each| each.figures());
        let made: std::collections::HashSet<_> = made.collect();
        let targets = [Figure::Stream, Figure::PingPong, Figure::Sync];
        for figure in Figure::value_variants() {
            assert!(
                made.contains(figure) != targets.contains(figure),
                "{figure:?}"
            );
        }
    }
}
