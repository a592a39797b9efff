//! The experiments as data.

use crate::driver::Transport;
use crate::named::named;
use crate::record::Record;
use crate::stats::Summary;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use weft_sdp::Mode;

/// The suite's name in its records.
pub(super) const RECORDS: &str = "sdp";

named! {
    /// The compared rows.
    pub enum Row {
        /// Buffered SDP
        Bsdp = "bsdp",
        /// Zero-copy SDP, one source in flight, the sender waits
        Zsdp = "zsdp",
        /// Asynchronous zero-copy SDP, block on write
        AzsdpBlock = "azsdp-block",
        /// Asynchronous zero-copy SDP, copy on write
        AzsdpCopy = "azsdp-copy",
        /// Plain TCP sockets
        Tcp = "tcp",
    }
}

impl Row {
    /// The sending mode of SDP; `None` for plain TCP.
    pub(crate) fn mode(self) -> Option<Mode> {
        Some(match self {
            Row::Bsdp => Mode::Bsdp,
            Row::Zsdp => Mode::Zsdp,
            Row::AzsdpBlock => Mode::AzBlock,
            Row::AzsdpCopy => Mode::AzCopy,
            Row::Tcp => return None,
        })
    }
}

named! {
    /// The values of `--figure`: the paper's table and figures.
    pub enum SdpFigure {
        /// What a send costs before it returns
        Table1 = "table1",
        /// Ping-pong latency
        F6a = "6a",
        /// Throughput in one direction
        F6b = "6b",
        /// Throughput with computation between the sends, 64 KiB
        F7a = "7a",
        /// ... 1 MiB
        F7b = "7b",
        /// Throughput when the sender writes to its buffer after so many sends, 64 KiB
        F8a = "8a",
        /// ... 1 MiB
        F8b = "8b",
        /// Ping-pong of one server with four clients
        F9a = "9a",
        /// Throughput of several threads, 64 KiB
        F9b = "9b",
        /// Throughput of four clients to one server
        F10a = "10a",
        /// ... of one server to four clients
        F10b = "10b",
    }
}

/// The description of a figure: its operation in the results, its heading, and its horizontal axis.
type About = (&'static str, &'static str, Places);

/// The quantity of a horizontal axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Places {
    Sizes,
    Computation,
    Sends,
    Threads,
}

impl Places {
    pub(crate) fn words(self) -> &'static str {
        match self {
            Places::Sizes => "size",
            Places::Computation => "computation, µs",
            Places::Sends => "sends between writes",
            Places::Threads => "threads",
        }
    }
}

impl SdpFigure {
    /// The figures that are measured over connections.
    pub(crate) fn measured() -> impl Iterator<Item = SdpFigure> {
        let all = SdpFigure::value_variants().iter().copied();
        all.filter(|figure| *figure != SdpFigure::Table1)
    }

    #[rustfmt::skip]
    const fn about(self) -> About {
        match self {
            SdpFigure::Table1 => ("costs", "Table 1: costs of a send", Places::Sizes),
            SdpFigure::F6a => ("ping_pong", "Fig. 6a: ping-pong latency", Places::Sizes),
            SdpFigure::F6b => ("throughput", "Fig. 6b: throughput in one direction", Places::Sizes),
            SdpFigure::F7a => ("overlap_64k", "Fig. 7a: computation between sends of 64 KiB", Places::Computation),
            SdpFigure::F7b => ("overlap_1m", "Fig. 7b: computation between sends of 1 MiB", Places::Computation),
            SdpFigure::F8a => ("faults_64k", "Fig. 8a: page faults, sends of 64 KiB", Places::Sends),
            SdpFigure::F8b => ("faults_1m", "Fig. 8b: page faults, sends of 1 MiB", Places::Sends),
            SdpFigure::F9a => ("hot_spot", "Fig. 9a: hot spot, one server and four clients", Places::Sizes),
            SdpFigure::F9b => ("multi_stream", "Fig. 9b: several threads, sends of 64 KiB", Places::Threads),
            SdpFigure::F10a => ("fan_in", "Fig. 10a: fan-in, four clients to one server", Places::Sizes),
            SdpFigure::F10b => ("fan_out", "Fig. 10b: fan-out, one server to four clients", Places::Sizes),
        }
    }

    /// The operation's name in the results.
    pub(crate) fn op(self) -> &'static str {
        self.about().0
    }

    /// Heading.
    pub(crate) fn title(self) -> &'static str {
        self.about().1
    }

    /// The horizontal axis.
    pub(crate) fn axis(self) -> Places {
        self.about().2
    }

    /// Whether the number is a time, so that less is better.
    pub(crate) fn is_latency(self) -> bool {
        matches!(self, SdpFigure::F6a | SdpFigure::F9a)
    }

    /// The places on the horizontal axis, with their plans.
    pub(crate) fn points(self, quick: bool) -> Vec<(u64, Plan)> {
        let step = if quick { 2 } else { 1 };
        let sizes = |from: u32| -> Vec<u64> {
            let powers = (from..=20).step_by(2 * step);
            powers.map(|power| 1 << power).collect()
        };
        let every = |all: &[u64]| all.iter().copied().step_by(step).collect();
        let (shape, connections, places) = match self {
            SdpFigure::Table1 => return Vec::new(),
            SdpFigure::F6a => (Shape::PingPong, 1, sizes(6)),
            SdpFigure::F6b => (Shape::Out, 1, sizes(6)),
            SdpFigure::F7a | SdpFigure::F7b => (Shape::Out, 1, every(&[0, 50, 100, 200, 400])),
            SdpFigure::F8a | SdpFigure::F8b => (Shape::Out, 1, every(&[1, 2, 4, 8, 16])),
            SdpFigure::F9a => (Shape::HotSpot, 4, sizes(10)),
            SdpFigure::F9b => (Shape::Threads, 1, every(&[1, 2, 4, 8])),
            SdpFigure::F10a => (Shape::FanIn, 4, sizes(12)),
            SdpFigure::F10b => (Shape::FanOut, 4, sizes(12)),
        };
        let bytes = match self {
            SdpFigure::F7b | SdpFigure::F8b => 1 << 20,
            _ => 64 << 10,
        };
        let at = |x: u64| {
            let mut plan = Plan {
                shape,
                bytes,
                connections,
                ..Plan::BASE
            };
            match self.axis() {
                Places::Sizes => plan.bytes = x,
                Places::Computation => plan.compute = x,
                Places::Sends => plan.window = x,
                Places::Threads => plan.connections = x as u32,
            }
            (x, plan)
        };
        places.into_iter().map(at).collect()
    }
}

/// The senders and the pattern of their messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Shape {
    /// One connection, there and back.
    PingPong,
    /// One connection, to the peer.
    Out,
    /// A thread for each connection, to the peer.
    Threads,
    /// Threads of the peer ask one server, which answers them in turn.
    HotSpot,
    /// Threads of the peer send to one thread.
    FanIn,
    /// One thread sends to threads of the peer in turn.
    FanOut,
}

/// The parameters of a run, for both ends.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) row: Row,
    pub(crate) transport: Transport,
    pub(crate) shape: Shape,
    /// Bytes of a send.
    pub(crate) bytes: u64,
    pub(crate) connections: u32,
    /// Microseconds of computation before each send.
    pub(crate) compute: u64,
    /// The sender writes to its buffer after this many sends; 0: never.
    pub(crate) window: u64,
}

impl Plan {
    const BASE: Plan = Plan {
        row: Row::Tcp,
        transport: Transport::Tcp,
        shape: Shape::Out,
        bytes: 1,
        connections: 1,
        compute: 0,
        window: 0,
    };
}

/// The measurements of a row in a figure over a transport: places and medians.
pub(super) fn line(
    records: &[Record],
    figure: SdpFigure,
    transport: Transport,
    row: Row,
) -> impl Iterator<Item = (u64, &Summary)> {
    records.iter().filter_map(move |record| {
        let (beside, x) = record.case.as_deref()?.split_once(':')?;
        let same =
            record.op == figure.op() && record.stack == row.name() && beside == transport.name();
        same.then(|| Some((x.parse().ok()?, &record.summary)))?
    })
}
