//! A thin driver per stack: how one stack carries out a scenario's operations, at either end.

mod device;
mod exs;
mod family;
mod iw;
mod memory;
pub mod outside;
mod roce;
mod tcp;
mod tls;
mod ud;
mod udp;
mod weft;

use crate::error::{BenchError, Result};
use crate::named::named;
use crate::patience::PATIENCE;
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::time::Instant;

pub use device::{choose as choose_device, environment as device_environment};
pub use exs::SocketContexts;
pub use memory::Copy;
pub use tcp::{prepare_stream as tcp_prepare, transfer_whole as tcp_transfer_whole};
pub use ud::{dest as ud_dest, open as open_ud};
pub use weft::{Context, accept_one, deregister, open_device, param};

named! {
    /// The software that carries the bytes.
    pub enum Stack {
        /// weft's verbs.
        Weft = "weft",
        /// weft's verbs over TCP with TLS 1.3.
        WeftTls = "weft-tls",
        /// weft's verbs over RoCE v2.
        WeftRoce = "weft-roce",
        /// The same where one packet in a thousand is lost, in either direction.
        WeftRoceLossy = "weft-roce-lossy",
        /// weft's verbs on the machine's RNIC of --device, both ends.
        Device = "device",
        /// weft's small iWARP library over the verbs.
        WeftIw = "weft-iw",
        /// weft's datagram queue pairs: a write is an RDMA Write-Record.
        WeftUd = "weft-ud",
        /// The same in the reliable mode.
        WeftRd = "weft-rd",
        /// weft's extended sockets, asynchronously.
        Exs = "exs",
        /// Their blocking calls.
        ExsSync = "exs-sync",
        /// Plain TCP sockets.
        Tcp = "tcp",
        /// TCP sockets with rustls.
        TcpTls = "tcp-tls",
        /// Plain UDP sockets: sendmmsg and recvmmsg, cut and joined by the kernel.
        Udp = "udp",
        /// Plain UDP sockets: one datagram a system call.
        UdpSingle = "udp-single",
        /// `memcpy` in one process.
        Memcpy = "memcpy",
        /// Bare `process_vm_writev` from one process into the other.
        Vm = "vm",
        /// UCX over POSIX shared memory, by its `ucx_perftest`.
        UcxPosix = "ucx-posix",
        /// UCX over POSIX shared memory and `process_vm_readv`/`writev`.
        UcxCma = "ucx-cma",
        /// UCX over TCP.
        UcxTcp = "ucx-tcp",
        /// libfabric over shared memory, by its `fi_pingpong`.
        FiShm = "fi-shm",
        /// libfabric over TCP.
        FiTcp = "fi-tcp",
        /// perftest on weft's libibverbs, over shared memory.
        PerftestLocal = "perftest-local",
        /// The same over TCP.
        PerftestTcp = "perftest-tcp",
        /// perftest on the machine's own libibverbs, on the RNIC of --device.
        PerftestDevice = "perftest-device",
        /// rstream on weft's librdmacm, over shared memory: rsockets.
        RstreamLocal = "rstream-local",
        /// The same over TCP.
        RstreamTcp = "rstream-tcp",
    }
}

impl Stack {
    /// Whether it can use shared memory, if the transport may be chosen.
    pub fn has_local(self) -> bool {
        self.is_weft() || matches!(self, Self::WeftUd | Self::WeftRd)
    }

    /// Whether the benchmark chooses the transport, the CRC and the kind of memory.
    pub fn is_weft(self) -> bool {
        matches!(self, Self::Weft | Self::WeftIw | Self::Exs | Self::ExsSync)
    }

    /// The name in the results of a transport that cannot be chosen.
    pub fn carrier(self) -> &'static str {
        match self {
            Self::WeftRoce
            | Self::WeftRoceLossy
            | Self::WeftUd
            | Self::WeftRd
            | Self::Udp
            | Self::UdpSingle => "udp",
            Self::Memcpy
            | Self::Vm
            | Self::UcxPosix
            | Self::UcxCma
            | Self::FiShm
            | Self::PerftestLocal
            | Self::RstreamLocal => "local",
            Self::Device | Self::PerftestDevice => "rnic",
            _ => "tcp",
        }
    }
}

named! {
    /// The transport of weft's bytes.
    pub enum Transport {
        /// iWARP over TCP.
        Tcp = "tcp",
        /// Shared memory between processes of one host and user.
        Local = "local",
    }
}

named! {
    /// The allocation of weft's regions.
    pub enum Memory {
        /// Allocated by the library for the purpose.
        Allocated = "allocated",
        /// The program's own heap memory, registered.
        Ordinary = "ordinary",
    }
}

named! {
    /// One operation. The plain TCP run for comparison has the same direction of the data: for `Read` and
    /// the atomics the peer answers a request, for the others the initiator pushes.
    pub enum Op {
        /// Send into a posted receive.
        Send = "send",
        /// RDMA Write.
        Write = "write",
        /// RDMA Write with immediate data, which completes a receive (RFC 7306).
        WriteImm = "write_imm",
        /// RDMA Read.
        Read = "read",
        /// Atomic fetch and add of 8 bytes (RFC 7306).
        FetchAdd = "fetch_add",
        /// Atomic compare and swap of 8 bytes (RFC 7306).
        CompareSwap = "compare_swap",
        /// Atomic swap of 8 bytes (RFC 7306).
        Swap = "swap",
    }
}

impl Op {
    /// Whether the data (or the old value) flows to the initiator.
    pub fn pulls(self) -> bool {
        matches!(
            self,
            Self::Read | Self::FetchAdd | Self::CompareSwap | Self::Swap
        )
    }
}

named! {
    /// The initiator's use of its buffer between two transfers (thesis fig. 4.11).
    pub enum Scheme {
        /// One registered buffer for all operations in flight.
        Single = "single",
        /// A registered buffer per operation in flight, used again and again.
        Reuse = "reuse",
        /// Registers the buffer before each transfer and deregisters it after.
        Reregister = "reregister",
        /// Copies the data into a registered buffer before each transfer.
        Copy = "copy",
    }
}

/// The timed quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Many operations in flight, one direction, until the last byte is known to be at its far end.
    Stream,
    /// One operation at a time, back and forth.
    PingPong,
}

/// The parameters of one connection of a scenario, for both ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Spec {
    /// The stack that carries it.
    pub stack: Stack,
    /// Over what (weft's stacks).
    pub transport: Transport,
    pub op: Op,
    /// The timed quantity.
    pub kind: Kind,
    /// Message size in bytes.
    pub bytes: u64,
    /// The allocation of the buffers (weft's stacks).
    pub memory: Memory,
    /// FPDUs carry a CRC (weft's stacks, over TCP).
    pub crc: bool,
    /// Both ends spin instead of sleeping.
    pub busy: bool,
    /// Operations in flight at most ([`Kind::Stream`]).
    pub window: u32,
    /// Every operation has a separate doorbell, as in the library ([`Kind::Stream`]).
    pub one_by_one: bool,
    /// The initiator's buffer ([`Kind::Stream`] writes).
    pub scheme: Scheme,
}

impl Spec {
    /// A send of one byte by weft over TCP, to be changed.
    pub const BASE: Self = Self {
        stack: Stack::Weft,
        transport: Transport::Tcp,
        op: Op::Send,
        kind: Kind::Stream,
        bytes: 1,
        memory: Memory::Allocated,
        crc: false,
        busy: false,
        window: 1,
        one_by_one: false,
        scheme: Scheme::Single,
    };

    /// Whether the stack supports the operation. weft and TCP support all of them.
    pub fn is_possible(&self) -> bool {
        match self.stack {
            Stack::Weft | Stack::WeftTls | Stack::WeftIw | Stack::Tcp | Stack::TcpTls => true,
            // RoCE has no such operation.
            Stack::WeftRoce | Stack::WeftRoceLossy => self.op != Op::Swap,
            // The operations that every RNIC has.
            Stack::Device => matches!(self.op, Op::Send | Op::Write | Op::Read),
            Stack::Exs | Stack::ExsSync => self.op == Op::Send,
            Stack::WeftUd | Stack::WeftRd | Stack::Udp | Stack::UdpSingle => {
                matches!(self.op, Op::Send | Op::Write)
            }
            Stack::Memcpy | Stack::Vm => self.op == Op::Write && self.kind == Kind::Stream,
            _ => outside::measures(self),
        }
    }

    /// The message size as a length in memory.
    #[allow(
        clippy::len_without_is_empty,
        reason = "a message of no bytes is one too"
    )]
    pub fn len(&self) -> Result<usize> {
        usize::try_from(self.bytes)
            .map_err(|_| BenchError::Usage("the size is too large".to_owned()))
    }
}

/// A buffer at the other end that one-sided operations name; for `process_vm_writev` the key is a process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Remote {
    pub addr: u64,
    pub rkey: u32,
}

/// The end that posts the operations and measures the time.
pub trait Initiator {
    /// Learns the peer's target buffer.
    fn set_remote(&mut self, _remote: Option<Remote>) {}

    /// This end's target buffer.
    fn remote(&self) -> Option<Remote> {
        None
    }

    /// Carries out `count` operations and returns when the last one's data is at its far end.
    /// [`Kind::PingPong`] appends each operation's time in microseconds to `laps`: half the round trip when
    /// the initiator pushes, the whole when it pulls.
    fn drive(&mut self, count: u64, laps: &mut Vec<f64>) -> Result<()>;
}

/// The end that answers.
pub trait Responder {
    /// This end's target buffer.
    fn remote(&self) -> Option<Remote> {
        None
    }

    /// Gets ready for `count` operations; the initiator starts after it.
    fn prepare(&mut self, _count: u64, _remote: Option<Remote>) -> Result<()> {
        Ok(())
    }

    /// Answers `count` operations.
    fn serve(&mut self, count: u64) -> Result<()>;
}

/// Connects to an [`Acceptor`] in the peer process.
pub fn connect(context: &mut Context, spec: &Spec, addr: SocketAddr) -> Result<Box<dyn Initiator>> {
    match spec.stack {
        Stack::Tcp => tcp::connect(spec, addr),
        Stack::TcpTls => tls::connect(context.tls()?, spec, addr),
        Stack::Weft | Stack::WeftTls => weft::connect(context, spec, addr),
        Stack::WeftRoce | Stack::WeftRoceLossy => weft::connect_roce(context, spec, addr),
        Stack::Device => device::connect(spec, addr),
        Stack::WeftUd | Stack::WeftRd => ud::connect(spec, addr),
        Stack::Udp | Stack::UdpSingle => udp::connect(spec, addr),
        Stack::WeftIw => iw::connect(context, spec, addr),
        Stack::Exs | Stack::ExsSync => exs::connect(&mut context.exs, spec, addr),
        Stack::Vm => memory::connect(spec, addr),
        _ => Err(unconnected(spec.stack)),
    }
}

fn unconnected(stack: Stack) -> BenchError {
    BenchError::Usage(format!("{} has no connection of ours", stack.name()))
}

/// A listening end for one connection.
pub enum Acceptor {
    Tcp(std::net::TcpListener),
    Weft(weft::Listening),
    Roce(roce::Listening),
    Device(Box<device::Listening>),
    Exs(exs::Listening),
    Ud(Box<ud::Listening>),
    Udp(Box<udp::Listening>),
}

impl Acceptor {
    pub fn listen(context: &mut Context, spec: &Spec) -> Result<Self> {
        match spec.stack {
            Stack::Tcp | Stack::TcpTls | Stack::Vm => Ok(Self::Tcp(tcp::listen()?)),
            Stack::Weft | Stack::WeftTls | Stack::WeftIw => {
                Ok(Self::Weft(weft::listen(context, spec)?))
            }
            Stack::WeftRoce | Stack::WeftRoceLossy => Ok(Self::Roce(context.roce()?.listen()?)),
            Stack::Device => Ok(Self::Device(Box::new(device::listen()?))),
            Stack::Exs | Stack::ExsSync => Ok(Self::Exs(exs::listen(&mut context.exs, spec)?)),
            Stack::WeftUd | Stack::WeftRd => Ok(Self::Ud(Box::new(ud::listen(spec)?))),
            Stack::Udp | Stack::UdpSingle => Ok(Self::Udp(Box::new(udp::listen(spec)?))),
            _ => Err(unconnected(spec.stack)),
        }
    }

    pub fn addr(&self) -> Result<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener
                .local_addr()
                .map_err(BenchError::system("read a socket's address")),
            Self::Weft(listening) => Ok(listening.addr()),
            Self::Roce(listening) => Ok(listening.addr()),
            Self::Device(listening) => Ok(listening.addr()),
            Self::Exs(listening) => listening.addr(),
            Self::Ud(listening) => Ok(listening.addr()),
            Self::Udp(listening) => listening.addr(),
        }
    }

    pub fn accept(self, context: &mut Context, spec: &Spec) -> Result<Box<dyn Responder>> {
        match self {
            Self::Tcp(listener) if spec.stack == Stack::Vm => memory::accept(&listener, spec),
            Self::Tcp(listener) if spec.stack == Stack::TcpTls => {
                tls::accept(context.tls()?, &listener, spec)
            }
            Self::Tcp(listener) => tcp::accept(&listener, spec),
            Self::Weft(listening) => weft::accept(context, &listening, spec),
            Self::Roce(listening) => weft::accept_roce(context, &listening, spec),
            Self::Device(listening) => listening.accept(spec),
            Self::Exs(listening) => exs::accept(&mut context.exs, &listening, spec),
            Self::Ud(listening) => listening.accept(),
            Self::Udp(listening) => listening.accept(),
        }
    }
}

/// Microseconds since `start`, which is set to now: one clock read for each lap.
fn lap(start: &mut Instant) -> f64 {
    let now = Instant::now();
    let lap = now.duration_since(*start).as_secs_f64() * 1e6;
    *start = now;
    lap
}

/// Ends a spin that lasts longer than [`PATIENCE`]. It reads the clock only now and then, and never in a
/// short spin: a read takes as long as a small message.
pub struct Patience {
    until: Option<Instant>,
    spins: u32,
}

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

impl Patience {
    pub fn new() -> Self {
        Self {
            until: None,
            spins: 0,
        }
    }

    pub fn spin(&mut self, waiting_for: &'static str) -> Result<()> {
        std::hint::spin_loop();
        self.spins = self.spins.wrapping_add(1);
        if self.spins.is_multiple_of(1 << 16) {
            let now = Instant::now();
            if now > *self.until.get_or_insert(now + PATIENCE) {
                return Err(BenchError::Stuck(PATIENCE.as_secs(), waiting_for));
            }
        }
        Ok(())
    }
}
