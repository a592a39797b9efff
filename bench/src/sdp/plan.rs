//! The experiments as data.

use crate::driver::Transport;
use crate::record::Record;
use crate::stats::Summary;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use weft_sdp::Mode;

/// The suite's name in its records.
pub(super) const RECORDS: &str = "sdp";

/// What is measured beside each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Row {
    /// Buffered SDP
    Bsdp,
    /// Zero-copy SDP, one source in flight, the sender waits
    Zsdp,
    /// Asynchronous zero-copy SDP, block on write
    AzsdpBlock,
    /// Asynchronous zero-copy SDP, copy on write
    AzsdpCopy,
    /// Plain TCP sockets
    Tcp,
}

impl Row {
    pub(crate) const ALL: [Row; 5] = [
        Row::Bsdp,
        Row::Zsdp,
        Row::AzsdpBlock,
        Row::AzsdpCopy,
        Row::Tcp,
    ];

    /// The name as in the results.
    pub(crate) fn name(self) -> &'static str {
        self.mode().map_or("tcp", Mode::name)
    }

    /// How SDP sends; `None` for plain TCP.
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

/// What `--figure` selects: the paper's table and figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum SdpFigure {
    /// What a send costs before it returns
    #[value(name = "table1")]
    Table1,
    /// Ping-pong latency
    #[value(name = "6a")]
    F6a,
    /// Throughput in one direction
    #[value(name = "6b")]
    F6b,
    /// Throughput with computation between the sends, 64 KiB
    #[value(name = "7a")]
    F7a,
    /// ... 1 MiB
    #[value(name = "7b")]
    F7b,
    /// Throughput when the sender writes to its buffer after so many sends, 64 KiB
    #[value(name = "8a")]
    F8a,
    /// ... 1 MiB
    #[value(name = "8b")]
    F8b,
    /// Ping-pong of one server with four clients
    #[value(name = "9a")]
    F9a,
    /// Throughput of several threads, 64 KiB
    #[value(name = "9b")]
    F9b,
    /// Throughput of four clients to one server
    #[value(name = "10a")]
    F10a,
    /// ... of one server to four clients
    #[value(name = "10b")]
    F10b,
}

impl SdpFigure {
    /// Those that are measured over connections.
    pub(crate) const MEASURED: [SdpFigure; 10] = [
        SdpFigure::F6a,
        SdpFigure::F6b,
        SdpFigure::F7a,
        SdpFigure::F7b,
        SdpFigure::F8a,
        SdpFigure::F8b,
        SdpFigure::F9a,
        SdpFigure::F9b,
        SdpFigure::F10a,
        SdpFigure::F10b,
    ];

    /// The operation's name in the results.
    pub(crate) fn op(self) -> &'static str {
        match self {
            SdpFigure::Table1 => "costs",
            SdpFigure::F6a => "ping_pong",
            SdpFigure::F6b => "throughput",
            SdpFigure::F7a => "overlap_64k",
            SdpFigure::F7b => "overlap_1m",
            SdpFigure::F8a => "faults_64k",
            SdpFigure::F8b => "faults_1m",
            SdpFigure::F9a => "hot_spot",
            SdpFigure::F9b => "multi_stream",
            SdpFigure::F10a => "fan_in",
            SdpFigure::F10b => "fan_out",
        }
    }

    /// Heading.
    pub(crate) fn title(self) -> &'static str {
        match self {
            SdpFigure::Table1 => "Table 1: costs of a send",
            SdpFigure::F6a => "Fig. 6a: ping-pong latency",
            SdpFigure::F6b => "Fig. 6b: throughput in one direction",
            SdpFigure::F7a => "Fig. 7a: computation between sends of 64 KiB",
            SdpFigure::F7b => "Fig. 7b: computation between sends of 1 MiB",
            SdpFigure::F8a => "Fig. 8a: page faults, sends of 64 KiB",
            SdpFigure::F8b => "Fig. 8b: page faults, sends of 1 MiB",
            SdpFigure::F9a => "Fig. 9a: hot spot, one server and four clients",
            SdpFigure::F9b => "Fig. 9b: several threads, sends of 64 KiB",
            SdpFigure::F10a => "Fig. 10a: fan-in, four clients to one server",
            SdpFigure::F10b => "Fig. 10b: fan-out, one server to four clients",
        }
    }

    /// What the horizontal axis is.
    pub(crate) fn axis(self) -> &'static str {
        match self {
            SdpFigure::F7a | SdpFigure::F7b => "computation, µs",
            SdpFigure::F8a | SdpFigure::F8b => "sends between writes",
            SdpFigure::F9b => "threads",
            _ => "size",
        }
    }

    /// Whether the number is a time: less is better.
    pub(crate) fn is_latency(self) -> bool {
        matches!(self, SdpFigure::F6a | SdpFigure::F9a)
    }

    /// The places on the horizontal axis, and what is run there.
    pub(crate) fn points(self, quick: bool) -> Vec<(u64, Plan)> {
        let plan = Plan::BASE;
        let sizes = |from: u32, to: u32| {
            (from..=to)
                .step_by(if quick { 4 } else { 2 })
                .map(|power| 1_u64 << power)
        };
        let every = |all: &'static [u64]| {
            let step = if quick { 2 } else { 1 };
            all.iter().copied().step_by(step)
        };
        match self {
            SdpFigure::Table1 => Vec::new(),
            SdpFigure::F6a => sizes(6, 20)
                .map(|bytes| (bytes, plan.of(Shape::PingPong, bytes)))
                .collect(),
            SdpFigure::F6b => sizes(6, 20)
                .map(|bytes| (bytes, plan.of(Shape::Out, bytes)))
                .collect(),
            SdpFigure::F7a | SdpFigure::F7b => every(&[0, 50, 100, 200, 400])
                .map(|compute| {
                    let bytes = if self == SdpFigure::F7a {
                        64 << 10
                    } else {
                        1 << 20
                    };
                    let plan = Plan {
                        compute,
                        ..plan.of(Shape::Out, bytes)
                    };
                    (compute, plan)
                })
                .collect(),
            SdpFigure::F8a | SdpFigure::F8b => every(&[1, 2, 4, 8, 16])
                .map(|window| {
                    let bytes = if self == SdpFigure::F8a {
                        64 << 10
                    } else {
                        1 << 20
                    };
                    let plan = Plan {
                        window,
                        ..plan.of(Shape::Out, bytes)
                    };
                    (window, plan)
                })
                .collect(),
            SdpFigure::F9a => sizes(10, 20)
                .map(|bytes| {
                    let plan = Plan {
                        connections: 4,
                        ..plan.of(Shape::HotSpot, bytes)
                    };
                    (bytes, plan)
                })
                .collect(),
            SdpFigure::F9b => every(&[1, 2, 4, 8])
                .map(|threads| {
                    let plan = Plan {
                        connections: threads as u32,
                        ..plan.of(Shape::Threads, 64 << 10)
                    };
                    (threads, plan)
                })
                .collect(),
            SdpFigure::F10a | SdpFigure::F10b => sizes(12, 20)
                .map(|bytes| {
                    let shape = if self == SdpFigure::F10a {
                        Shape::FanIn
                    } else {
                        Shape::FanOut
                    };
                    let plan = Plan {
                        connections: 4,
                        ..plan.of(shape, bytes)
                    };
                    (bytes, plan)
                })
                .collect(),
        }
    }
}

/// Who sends, and how.
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

/// What is run, as both ends must know it.
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
    /// The sender writes to its buffer after so many sends; 0: never.
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

    fn of(self, shape: Shape, bytes: u64) -> Plan {
        Plan {
            shape,
            bytes,
            ..self
        }
    }
}

/// What was measured in a figure over a transport by a row: places and medians.
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
