//! The environment of a scenario: two devices of one transport, and connected pairs of queue pairs between them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use weft_verbs::cm::{ConnParam, ConnectError, Connection, Listener, connect_qp};
use weft_verbs::tls::{Identity, Tls};
use weft_verbs::{
    Access, AsyncEvent, CompChannel, Device, DeviceBuilder, LinkOptions, LocalMode, Pd, Qp, QpInit,
    RawMemory, RecvWr, Rnr, RocePort, SimFaults, SimNet, Transport, Wc, WcOpcode, WcStatus,
};

pub use crate::checks::{assert_bytes, assert_none, take};
pub use crate::objects::{Cq, Mr, Srq};
use crate::roce::{self, AnyListener, AnyQp, Door};
pub use crate::waits::{PATIENCE, until};

/// The transport of the connections.
#[derive(Clone, Copy, Debug)]
pub enum Carrier {
    /// TCP over the loopback of IPv4.
    Tcp4,
    /// TCP over the loopback of IPv6.
    Tcp6,
    /// The simulated network, with this seed and these faults.
    Sim(u64, SimFaults),
    /// RoCE v2 over the loopback of IPv4: connected queue pairs, joined by InfiniBand's connection manager.
    Roce,
}

/// The memory of the regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// The library's for zeroed regions, the program's for those with a content.
    Both,
    /// The library allocates all regions.
    Allocated,
    /// The program's own buffers, registered.
    Ordinary,
    /// The program's memory, registered where it lies, under its own addresses.
    InPlace,
}

/// How connections are made: one column of the suite.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    pub carrier: Carrier,
    /// The mode of shared memory.
    pub local: LocalMode,
    /// The memory of the regions that scenarios get from the bed.
    pub memory: Memory,
    /// Their options, the same on both sides.
    pub options: LinkOptions,
    /// True for connections over TLS.
    pub tls: bool,
    /// See [`QpInit::remote_completion`].
    pub remote_completion: bool,
    /// Longest message of the scenarios that try sizes, in bytes.
    pub largest: usize,
}

impl Setup {
    /// TCP over IPv4 with the default options, without shared memory.
    pub fn tcp() -> Self {
        Setup {
            carrier: Carrier::Tcp4,
            local: LocalMode::Off,
            memory: Memory::Both,
            options: LinkOptions::default(),
            tls: false,
            remote_completion: false,
            largest: 3 << 20,
        }
    }
    /// Shared memory for connections of TCP over IPv4; a connection without it fails.
    pub fn local(memory: Memory) -> Self {
        Setup {
            local: LocalMode::Require,
            memory,
            ..Setup::tcp()
        }
    }
    /// The simulated network.
    pub fn sim(seed: u64, faults: SimFaults) -> Self {
        Setup {
            carrier: Carrier::Sim(seed, faults),
            ..Setup::tcp()
        }
    }
    /// RoCE v2. Sends complete when the peer has received them.
    pub fn roce() -> Self {
        Setup {
            carrier: Carrier::Roce,
            remote_completion: true,
            ..Setup::tcp()
        }
    }
    /// The same with this memory for regions.
    #[must_use]
    pub fn memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
    }
    /// The same with queue pairs whose sends complete when the peer has received them.
    #[must_use]
    pub fn confirmed(mut self) -> Self {
        self.remote_completion = true;
        self
    }
    /// The same with other options.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut LinkOptions)) -> Self {
        change(&mut self.options);
        self
    }
    /// The same over TLS.
    #[must_use]
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self
    }
    /// The same over IPv6.
    #[must_use]
    pub fn v6(mut self) -> Self {
        self.carrier = Carrier::Tcp6;
        self
    }
    /// The same with shorter messages.
    #[must_use]
    pub fn largest(mut self, bytes: usize) -> Self {
        self.largest = bytes;
        self
    }
}

pub(crate) const SIZES: [usize; 20] = [
    0,
    1,
    2,
    3,
    5,
    63,
    255,
    256,
    257,
    1461,
    4095,
    16_385,
    65_514,
    65_518,
    65_519,
    65_535,
    65_536,
    65_537,
    1 << 20,
    (3 << 20) - 1,
];

/// Two devices that reach each other.
pub struct Bed {
    /// How connections are made.
    pub setup: Setup,
    /// The initiators' device.
    pub a: Device,
    /// The responders' device.
    pub b: Device,
    transport: Transport,
    /// The devices' ports of RoCE.
    ports: Vec<RocePort>,
}

/// The parameters of one side of a connection.
#[derive(Clone)]
pub struct Half {
    /// See [`QpInit::max_send_wr`].
    pub max_send_wr: u32,
    /// See [`QpInit::max_recv_wr`].
    pub max_recv_wr: u32,
    /// See [`QpInit::max_sge`].
    pub max_sge: u32,
    /// See [`QpInit::max_inline`].
    pub max_inline: u32,
    /// See [`QpInit::sq_sig_all`].
    pub sq_sig_all: bool,
    /// See [`QpInit::num`].
    pub num: Option<u32>,
    /// See [`QpInit::rnr`].
    pub rnr: Rnr,
    /// See [`QpInit::quiet_end`].
    pub quiet_end: bool,
    /// Not [`QpInit::remote_completion`], whatever the setup says.
    pub local_completion: bool,
    /// Entries of each completion queue made for it.
    pub depth: u32,
    /// Use these completion queues (send, receive), not new ones.
    pub cqs: Option<(Cq, Cq)>,
    /// New completion queues notify this channel.
    pub channel: Option<CompChannel>,
    /// Use this protection domain, not a new one.
    pub pd: Option<Pd>,
    /// Take receives from here.
    pub srq: Option<Srq>,
    /// Posted before the connection is made.
    pub recvs: Vec<RecvWr>,
    /// Depths and private data.
    pub param: ConnParam,
}

impl Default for Half {
    fn default() -> Self {
        Half {
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 8,
            max_inline: 256,
            sq_sig_all: false,
            num: None,
            rnr: Rnr::default(),
            quiet_end: false,
            local_completion: false,
            depth: 1024,
            cqs: None,
            channel: None,
            pd: None,
            srq: None,
            recvs: Vec::new(),
            param: ConnParam::default(),
        }
    }
}

fn builder(transport: &Transport, setup: Setup) -> DeviceBuilder {
    let builder = Device::builder()
        .transport(transport.clone())
        .local(setup.local);
    if !setup.tls {
        return builder;
    }
    let identity = Identity::generate().expect("a key pair");
    builder.tls(Tls::new(identity).expect("a usable key"))
}

impl Bed {
    /// Two devices. Where this machine does not support the setup, prints the reason and returns `None`.
    pub fn new(setup: Setup) -> Option<Bed> {
        if matches!(setup.carrier, Carrier::Tcp6)
            && let Err(error) = std::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0))
        {
            println!("skipped: no IPv6 loopback here ({error})");
            return None;
        }
        let transport = match setup.carrier {
            Carrier::Tcp4 | Carrier::Tcp6 | Carrier::Roce => Transport::Tcp,
            Carrier::Sim(seed, faults) => Transport::Sim(SimNet::with_faults(seed, faults)),
        };
        let open = || builder(&transport, setup).open().expect("a device");
        let (a, b) = (open(), open());
        let ports = match setup.carrier {
            Carrier::Roce => vec![roce::port(&a, &[]), roce::port(&b, &[])],
            _ => Vec::new(),
        };
        Some(Bed {
            setup,
            a,
            b,
            transport,
            ports,
        })
    }

    /// Over RoCE some promises are others: see the scenarios that ask.
    pub fn is_roce(&self) -> bool {
        matches!(self.setup.carrier, Carrier::Roce)
    }

    /// As much of this immediate data as the transport takes: InfiniBand has 32 bits.
    pub fn imm(&self, imm: u64) -> u64 {
        if self.is_roce() {
            imm & u64::from(u32::MAX)
        } else {
            imm
        }
    }

    /// One more device on the same network, with these limits.
    pub fn device(&self, limits: weft_verbs::Limits) -> Device {
        builder(&self.transport, self.setup)
            .limits(limits)
            .open()
            .expect("a device")
    }

    /// Elements of a request, at most, in the scenarios.
    pub fn max_sge(&self) -> u32 {
        Half::default().max_sge
    }

    /// A completion queue of the responders' device.
    pub fn cq(&self, depth: u32) -> Cq {
        self.b.create_cq(depth, None).expect("a CQ")
    }

    /// Any free port of the loopback.
    pub fn any_addr(&self) -> SocketAddr {
        let ip = match self.setup.carrier {
            Carrier::Tcp6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
            Carrier::Tcp4 | Carrier::Sim(..) | Carrier::Roce => IpAddr::V4(Ipv4Addr::LOCALHOST),
        };
        SocketAddr::new(ip, 0)
    }

    /// Connection parameters with the setup's options.
    pub fn param(&self) -> ConnParam {
        ConnParam {
            options: self.setup.options,
            ..ConnParam::default()
        }
    }

    /// A listener on the responders' device.
    pub fn listener(&self, backlog: u32) -> AnyListener {
        if let [_, port] = &self.ports[..] {
            return AnyListener::Roce(Door::new(port, backlog));
        }
        let listener = Listener::bind(&self.b, self.any_addr(), backlog, &self.param());
        AnyListener::Stream(listener.expect("a listener"))
    }

    pub fn end(&self, device: &Device, half: &Half) -> End {
        let pd = match &half.pd {
            Some(pd) => pd.clone(),
            None => device.alloc_pd().expect("a PD"),
        };
        let cq = || device.create_cq(half.depth, half.channel.as_ref());
        let (scq, rcq) = half
            .cqs
            .clone()
            .unwrap_or_else(|| (cq().expect("a CQ"), cq().expect("a CQ")));
        let mut init = QpInit::new(&scq, &rcq);
        init.srq.clone_from(&half.srq);
        init.max_send_wr = half.max_send_wr;
        init.max_recv_wr = half.max_recv_wr;
        init.max_sge = half.max_sge;
        init.max_inline = half.max_inline;
        init.sq_sig_all = half.sq_sig_all;
        init.num = half.num;
        init.rnr = half.rnr;
        init.remote_completion = self.setup.remote_completion && !half.local_completion;
        init.quiet_end = half.quiet_end;
        let qp = if self.is_roce() {
            // A device of a test's own has a port of its own: at a shared address the kernel may give packets to the other one first.
            let of = [&self.a, &self.b].map(roce::slot);
            let known = self.ports.iter().zip(of);
            let known = known.filter(|(_, slot)| *slot == roce::slot(device));
            let known: Vec<_> = known.map(|(port, _)| port.local_addr().ip()).collect();
            AnyQp::roce(&pd, &init, roce::port(device, &known))
        } else {
            AnyQp::Stream(pd.create_qp(&init).expect("a QP"))
        };
        if !half.recvs.is_empty() {
            qp.post_recv(&half.recvs).expect("receives");
        }
        End {
            device: device.clone(),
            pd,
            scq,
            rcq,
            qp,
            private_data: Vec::new(),
            memory: self.setup.memory,
        }
    }

    /// A connected pair through this listener.
    pub fn pair_through(&self, listener: &AnyListener, a: &Half, b: &Half) -> (End, End) {
        let (there, here) = (self.end(&self.a, a), self.end(&self.b, b));
        self.join(listener, there, here, (&a.param, &b.param))
    }

    /// Connects `there`, which asks, to `here` through this listener.
    pub fn join(
        &self,
        listener: &AnyListener,
        mut there: End,
        mut here: End,
        (asks, answers): (&ConnParam, &ConnParam),
    ) -> (End, End) {
        let listener = match listener {
            AnyListener::Stream(listener) => listener,
            AnyListener::Roce(door) => {
                (there.private_data, here.private_data) =
                    door.join(&mut there.qp, &mut here.qp, (asks, answers));
                return (there, here);
            }
        };
        std::thread::scope(|scope| {
            let dial = scope.spawn(|| self.dial(listener.local_addr(), there, asks));
            let request = listener
                .next_request(Some(PATIENCE))
                .expect("a connection request");
            let param = ConnParam {
                options: self.setup.options,
                ..answers.clone()
            };
            let here = here.over(|qp| request.accept(qp, &param)).expect("accept");
            let there = dial.join().expect("no panic").expect("connect");
            for end in [&there, &here] {
                let path = end.qp.path().expect("connected");
                let want = match (self.setup.carrier, self.setup.local) {
                    (Carrier::Sim(..), _) => "sim",
                    (_, LocalMode::Off) if self.setup.tls => "tls",
                    (_, LocalMode::Off) => "tcp",
                    _ => "local",
                };
                assert_eq!(path.transport, want, "{path:?}");
                assert_eq!(end.qp.tls().is_some(), self.setup.tls);
            }
            (there, here)
        })
    }

    /// Connects an end to `addr`.
    ///
    /// # Errors
    /// As [`connect_qp`].
    pub fn dial(&self, addr: SocketAddr, end: End, param: &ConnParam) -> Result<End, ConnectError> {
        let param = ConnParam {
            options: self.setup.options,
            ..param.clone()
        };
        let device = end.device.clone();
        end.over(|qp| connect_qp(addr, qp, &device, &param))
    }
}

/// One side of a connection, with all its objects.
pub struct End {
    pub device: Device,
    /// Its protection domain.
    pub pd: Pd,
    /// Completions of its sends.
    pub scq: Cq,
    /// Completions of its receives.
    pub rcq: Cq,
    /// Its queue pair.
    pub qp: AnyQp,
    /// The peer's private data of the connection.
    pub private_data: Vec<u8>,
    memory: Memory,
}

/// A device whose connections use TCP, also with peers on the same host: for peers that are plain sockets.
pub fn tcp_device() -> Device {
    let builder = Device::builder().local(LocalMode::Off);
    builder.open().expect("a device")
}

/// Every right that a region can have.
pub const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);

impl End {
    /// The same with this connected queue pair.
    ///
    /// # Errors
    /// Those of `connect`.
    pub fn over(
        self,
        connect: impl FnOnce(Qp) -> Result<Connection, ConnectError>,
    ) -> Result<End, ConnectError> {
        let Connection { qp, private_data } = connect(self.qp.into_stream())?;
        Ok(End {
            qp: AnyQp::Stream(qp),
            private_data,
            ..self
        })
    }

    /// A zeroed region with every right.
    pub fn mr(&self, len: usize) -> Mr {
        match self.memory {
            Memory::Both | Memory::Allocated => self.pd.alloc_mr(len, ALL),
            Memory::Ordinary => self.pd.reg_mr(vec![0; len], ALL),
            Memory::InPlace => return self.in_place(vec![0; len]),
        }
        .expect("a region")
    }

    fn in_place(&self, bytes: Vec<u8>) -> Mr {
        let memory = RawMemory::leak(bytes);
        let iova = memory.as_ptr().addr() as u64;
        let mr = self.pd.reg_raw_at(&memory, iova, ALL).expect("a region");
        assert_eq!(mr.addr(), iova);
        mr
    }

    /// A region with every right that holds these bytes.
    pub fn mr_of(&self, bytes: &[u8]) -> Mr {
        if self.memory == Memory::InPlace {
            return self.in_place(bytes.to_vec());
        }
        if self.memory != Memory::Allocated {
            return self.pd.reg_mr(bytes.to_vec(), ALL).expect("a region");
        }
        let mr = self.pd.alloc_mr(bytes.len(), ALL).expect("a region");
        mr.write(0, bytes).expect("within the region");
        mr
    }

    /// Inline bytes of a request where so many were asked for.
    pub fn max_inline(&self, asked: u32) -> u32 {
        asked
    }

    pub fn post_recv(&self, wr: RecvWr) {
        self.qp.post_recv(&[wr]).expect("post");
    }

    /// Asserts that the device's next asynchronous event is this one.
    pub fn tells(&self, is_it: impl FnOnce(&AsyncEvent) -> bool) {
        let event = self.event();
        assert!(is_it(&event), "{event:?}");
    }

    /// The device's next asynchronous event.
    pub fn event(&self) -> AsyncEvent {
        let event = self.device.get_async_event(Some(PATIENCE));
        event.expect("an asynchronous event in time")
    }
}

/// Asserts success of this request and operation.
pub fn assert_ok(wc: &Wc, id: u64, opcode: WcOpcode, len: usize) {
    assert_eq!(
        (wc.wr_id, wc.status, wc.opcode, wc.byte_len as usize),
        (id, WcStatus::Success, opcode, len),
        "{wc:?}"
    );
}

/// Bytes that differ between neighbouring offsets, and between seeds.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .collect()
}

/// A seeded random generator.
pub struct Rng(u64);

impl Rng {
    /// The same seed makes the same choices.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }
    pub fn number(&mut self) -> u64 {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// A number below `n`; 0 if `n` is.
    pub fn below(&mut self, n: usize) -> usize {
        (self.number() >> 16) as usize % n.max(1)
    }
    /// True with probability 1 in `one_in`.
    pub fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        pattern(self.number(), len)
    }
}
