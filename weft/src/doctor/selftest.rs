//! Every operation of verbs over loopback on a device.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use weft_nic::cm::{Connection, Incoming, Listener, Outgoing, Param};
use weft_nic::{
    Access, Channel, Context, Cq, Device, Error, Gid, Info, Mr, Op, Path, Pd, Port, Qp, QpInit,
    QpKind, SendWr, Srq, Transport, Wc, addresses_of,
};

use crate::rnics::{hindrance, with_remedy};

/// For one completion, or one step of a connection.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a message: many packets.
const LENGTH: usize = 65536;
/// In front of the payload of a datagram.
const GRH: usize = 40;
const IMMEDIATE: u32 = 0x1234_5678;
/// Bytes that every device with inline data takes.
const INLINE: usize = 32;

/// What came of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The bytes are where they belong.
    Ok,
    /// The device has said that it does not have the operation.
    Unsupported,
    /// It was not tried, for this reason.
    NotTried(String),
    /// It has failed.
    Failed(String),
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ok => f.write_str("ok"),
            Self::Unsupported => f.write_str("not supported by the device"),
            Self::NotTried(why) => write!(f, "not tried: {why}"),
            Self::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

/// Why an operation did not come to its end.
enum Trouble {
    Unsupported,
    NotTried(String),
    Failed(String),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Self::Failed(with_remedy(&error))
    }
}

type Tried<T = ()> = Result<T, Trouble>;

fn failed<T>(why: impl Into<String>) -> Tried<T> {
    Err(Trouble::Failed(why.into()))
}

impl From<Tried> for Outcome {
    fn from(tried: Tried) -> Self {
        match tried {
            Ok(()) => Self::Ok,
            Err(Trouble::Unsupported) => Self::Unsupported,
            Err(Trouble::NotTried(why)) => Self::NotTried(why),
            Err(Trouble::Failed(why)) => Self::Failed(why),
        }
    }
}

type Operation = fn(&Test<'_>) -> Tried;

/// Tries every operation on a device, each with queue pairs of its own.
pub fn run(device: &Device, info: &Info) -> Vec<(&'static str, Outcome)> {
    let Some(port) = info.ports.iter().find(|port| hindrance(port).is_none()) else {
        let why = "no port of the device can be used".to_owned();
        return vec![("connection", Outcome::NotTried(why))];
    };
    let test = Test { device, info, port };
    let operations: [(&'static str, Operation); 14] = [
        ("connection by rdma_cm", by_addresses),
        ("Send", |test| send(&test.pair(false)?, None)),
        ("Send with immediate", |test| {
            send(&test.pair(false)?, Some(IMMEDIATE))
        }),
        ("Write", |test| write(&test.pair(false)?, None)),
        ("Write with immediate", |test| {
            write(&test.pair(false)?, Some(IMMEDIATE))
        }),
        ("Read", |test| read(&test.pair(false)?)),
        ("compare and swap", |test| compare_and_swap(test)),
        ("fetch and add", |test| fetch_and_add(test)),
        ("inline data", |test| inline(&test.pair(false)?)),
        ("shared receive queue", shared_queue),
        ("completion events", |test| events(&test.pair(false)?)),
        ("datagrams (UD)", |test| datagram(test, None)),
        ("datagrams with immediate", |test| {
            datagram(test, Some(IMMEDIATE))
        }),
        ("a key that is wrong", |test| wrong_key(&test.pair(false)?)),
    ];
    let operations = operations.into_iter();
    operations
        .map(|(name, operation)| (name, operation(&test).into()))
        .collect()
}

/// The device under test.
struct Test<'a> {
    device: &'a Device,
    info: &'a Info,
    port: &'a Port,
}

/// One side: its objects, and memory for what it sends and what it receives.
struct Side {
    link: Connected,
    channel: Channel,
    cq: Cq,
    srq: Option<Srq>,
    out: Mr,
    into: Mr,
    immediates: bool,
}

enum Connected {
    ByNumber(Qp),
    /// With what ends the connection when it is dropped.
    ByCm(Qp, #[expect(dead_code, reason = "kept alive")] Connection),
}

/// What a queue pair is made of.
struct Parts {
    pd: Pd,
    channel: Channel,
    cq: Cq,
    srq: Option<Srq>,
    out: Mr,
    into: Mr,
}

impl Parts {
    fn new(context: &Context, info: &Info, shared: bool) -> Tried<Self> {
        let pd = context.alloc_pd()?;
        let channel = context.create_channel()?;
        let mut access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        access.set(Access::REMOTE_ATOMIC, info.atomics);
        Ok(Self {
            cq: context.create_cq(32, Some(&channel))?,
            channel,
            srq: shared.then(|| pd.create_srq(16, 1)).transpose()?,
            out: pd.alloc_mr(LENGTH, access)?,
            into: pd.alloc_mr(LENGTH, access)?,
            pd,
        })
    }

    fn init(&self) -> QpInit<'_> {
        QpInit {
            srq: self.srq.as_ref(),
            max_inline: INLINE as u32,
            ..QpInit::new(&self.cq)
        }
    }

    fn side(self, link: Connected, info: &Info) -> Side {
        Side {
            link,
            channel: self.channel,
            cq: self.cq,
            srq: self.srq,
            out: self.out,
            into: self.into,
            immediates: info.transport != Transport::Iwarp,
        }
    }
}

impl Test<'_> {
    fn gid(&self) -> Tried<&Gid> {
        match self.port.best_gid() {
            Some(gid) => Ok(gid),
            None => failed("the port has no GID"),
        }
    }

    /// Two connected queue pairs on the device: by their numbers, with iWARP by `rdma_cm`.
    fn pair(&self, shared: bool) -> Tried<(Side, Side)> {
        if self.info.transport == Transport::Iwarp {
            return self.pair_by_cm(shared);
        }
        let context = self.device.open()?;
        let parts = [false, shared].map(|shared| Parts::new(&context, self.info, shared));
        let [one, other] = parts;
        let (one, other) = (one?, other?);
        let (a, b) = (
            one.pd.create_qp(&one.init())?,
            other.pd.create_qp(&other.init())?,
        );
        let gid = self.gid()?;
        let path = Path::new(self.port, gid, gid.raw, self.port.lid);
        let mut access = Access::REMOTE_WRITE | Access::REMOTE_READ;
        access.set(Access::REMOTE_ATOMIC, self.info.atomics);
        for (qp, peer) in [(&a, &b), (&b, &a)] {
            qp.init(self.port, access)?;
            qp.connect(&path, peer.number())?;
        }
        let (a, b) = (Connected::ByNumber(a), Connected::ByNumber(b));
        Ok((one.side(a, self.info), other.side(b, self.info)))
    }

    /// An address by which `rdma_cm` finds this device, and a listener there.
    fn listener(&self) -> Tried<(IpAddr, Listener)> {
        let mut addresses: Vec<IpAddr> = Vec::new();
        if self.info.transport == Transport::Ib {
            let gids = self.port.gids.iter().map(Gid::ip);
            addresses.extend(gids.filter(|ip| ip.is_ipv4() && !ip.is_loopback()));
        }
        for name in self.port.netdevs() {
            addresses.extend(addresses_of(Some(name)));
        }
        if addresses.is_empty() {
            addresses = addresses_of(None);
            addresses.push(Ipv4Addr::LOCALHOST.into());
        }
        let mut others = Vec::new();
        let mut tried = HashSet::new();
        for ip in addresses.into_iter().filter(|ip| tried.insert(*ip)) {
            match Listener::bind((ip, 0).into()) {
                Ok(listener) => match listener.device() {
                    Some(name) if name == self.device.name() => return Ok((ip, listener)),
                    name => others.push(format!(
                        "{ip} belongs to {}",
                        name.as_deref().unwrap_or("no device")
                    )),
                },
                Err(error) => others.push(error.to_string()),
            }
        }
        let why = others.join(", ");
        Err(Trouble::NotTried(format!(
            "rdma_cm finds this device by no address: {why}"
        )))
    }

    fn pair_by_cm(&self, shared: bool) -> Tried<(Side, Side)> {
        let (ip, listener) = self.listener()?;
        let peer = SocketAddr::from((ip, listener.port()));
        // What fails before anybody connects must not leave the other side waiting.
        let outgoing = Outgoing::resolve(Some(ip), peer, PATIENCE)?;
        let parts = Parts::new(&outgoing.context()?, self.info, false)?;
        let qp = outgoing.create_qp(&parts.pd, &parts.init())?;
        std::thread::scope(|scope| {
            let accepting = scope.spawn(|| match listener.request(Some(PATIENCE))? {
                Some(incoming) => self.accept(incoming, shared),
                None => failed("no connection request came"),
            });
            let connected = outgoing
                .connect(&Param::default(), PATIENCE)
                .map_err(Trouble::from);
            let other = accepting.join();
            let other = other.unwrap_or_else(|_| failed("the accepting thread panicked"))?;
            Ok((
                parts.side(Connected::ByCm(qp, connected?), self.info),
                other,
            ))
        })
    }

    fn accept(&self, incoming: Incoming, shared: bool) -> Tried<Side> {
        let parts = Parts::new(&incoming.context()?, self.info, shared)?;
        let qp = incoming.create_qp(&parts.pd, &parts.init())?;
        let connection = incoming.accept(&Param::default())?;
        Ok(parts.side(Connected::ByCm(qp, connection), self.info))
    }
}

impl Side {
    fn qp(&self) -> &Qp {
        match &self.link {
            Connected::ByNumber(qp) | Connected::ByCm(qp, _) => qp,
        }
    }

    fn post_receive(&self) -> Tried {
        let sges = [self.into.sge(0..LENGTH)];
        match &self.srq {
            Some(srq) => srq.post_recv(RECEIVE, &sges)?,
            None => self.qp().post_recv(RECEIVE, &sges)?,
        }
        Ok(())
    }

    fn completion(&self, what: &str) -> Tried<Wc> {
        completion(&self.cq, what)
    }
}

/// The numbers of work requests.
const REQUEST: u64 = 1;
const RECEIVE: u64 = 2;

/// The next completion, which has to be a good one.
fn completion(cq: &Cq, what: &str) -> Tried<Wc> {
    match cq.wait(PATIENCE)? {
        None => failed(format!(
            "no completion of the {what} in {} s",
            PATIENCE.as_secs()
        )),
        Some(wc) if !wc.is_success() => {
            let (words, vendor) = (cq.words(&wc), wc.vendor_error);
            failed(format!(
                "the {what} completed with \"{words}\" (vendor's error {vendor:#x})"
            ))
        }
        Some(wc) => Ok(wc),
    }
}

/// Bytes that differ from one place to the next.
fn pattern(seed: u8, length: usize) -> Vec<u8> {
    let byte = |at: usize| (at % 251) as u8 ^ (at >> 8) as u8 ^ seed;
    (0..length).map(byte).collect()
}

fn same(what: &str, found: &[u8], wanted: &[u8]) -> Tried {
    match found.iter().zip(wanted).position(|(a, b)| a != b) {
        None if found.len() == wanted.len() => Ok(()),
        at => failed(format!(
            "{what}: wrong from byte {} on",
            at.unwrap_or(found.len())
        )),
    }
}

/// A refusal to post immediate data is an answer with iWARP, which has them only since RFC 7306.
fn post(side: &Side, op: Op<'_>, length: usize) -> Tried {
    let sges = [side.out.sge(0..length)];
    let imm = matches!(op, Op::Send(Some(_)) | Op::Write(_, Some(_)));
    match side.qp().post_send(&SendWr::new(REQUEST, op, &sges)) {
        Err(error) if error.is_unsupported() => Err(Trouble::Unsupported),
        Err(error) if imm && !side.immediates && error.errno() == Some(EINVAL) => {
            Err(Trouble::Unsupported)
        }
        other => Ok(other?),
    }
}

const EINVAL: i32 = rustix::io::Errno::INVAL.raw_os_error();

/// The receive that a Send, or a Write with immediate data, completes.
fn received(side: &Side, length: usize, imm: Option<u32>) -> Tried {
    let wc = side.completion("receive")?;
    if (wc.id, wc.len as usize, wc.imm) == (RECEIVE, length, imm) {
        return Ok(());
    }
    failed(format!(
        "the receive completed as number {}, {} bytes, immediate {:x?}",
        wc.id, wc.len, wc.imm
    ))
}

fn send((from, to): &(Side, Side), imm: Option<u32>) -> Tried {
    to.post_receive()?;
    from.out.write(0, &pattern(1, LENGTH));
    post(from, Op::Send(imm), LENGTH)?;
    from.completion("Send")?;
    received(to, LENGTH, imm)?;
    same("the message", &to.into.read(0..LENGTH), &pattern(1, LENGTH))
}

fn write((from, to): &(Side, Side), imm: Option<u32>) -> Tried {
    to.post_receive()?;
    from.out.write(0, &pattern(2, LENGTH));
    post(from, Op::Write(to.into.remote(0), imm), LENGTH)?;
    from.completion("Write")?;
    if imm.is_some() {
        received(to, LENGTH, imm)?;
        return same(
            "what was written",
            &to.into.read(0..LENGTH),
            &pattern(2, LENGTH),
        );
    }
    // The completion of a Write says nothing of the peer's memory; a Send behind it does. It brings the first byte once more.
    post(from, Op::Send(None), 1)?;
    from.completion("Send")?;
    received(to, 1, None)?;
    same(
        "what was written",
        &to.into.read(0..LENGTH),
        &pattern(2, LENGTH),
    )
}

fn read((from, to): &(Side, Side)) -> Tried {
    to.out.write(0, &pattern(3, LENGTH));
    let sges = [from.into.sge(0..LENGTH)];
    let wr = SendWr::new(REQUEST, Op::Read(to.out.remote(0)), &sges);
    from.qp().post_send(&wr)?;
    from.completion("Read")?;
    same(
        "what was read",
        &from.into.read(0..LENGTH),
        &pattern(3, LENGTH),
    )
}

/// Carries out an atomic on eight bytes that are `before`; returns what came back, and what is there then.
fn atomic(
    test: &Test<'_>,
    before: u64,
    op: impl Fn(weft_nic::Remote) -> Op<'static>,
) -> Tried<(u64, u64)> {
    if !test.info.atomics {
        return Err(Trouble::Unsupported);
    }
    let (from, to) = test.pair(false)?;
    to.into.write(0, &before.to_ne_bytes());
    let sges = [from.into.sge(0..8)];
    let wr = SendWr::new(REQUEST, op(to.into.remote(0)), &sges);
    from.qp().post_send(&wr)?;
    from.completion("atomic")?;
    let number = |mr: &Mr| mr.read(0..8).try_into().map_or(0, u64::from_ne_bytes);
    Ok((number(&from.into), number(&to.into)))
}

fn numbers(found: (u64, u64), wanted: (u64, u64)) -> Tried {
    if found == wanted {
        return Ok(());
    }
    failed(format!(
        "came back and is there: {found:?}, expected {wanted:?}"
    ))
}

fn compare_and_swap(test: &Test<'_>) -> Tried {
    let (compare, swap) = (7, 11);
    let op = |at| Op::CompareSwap { at, compare, swap };
    numbers(atomic(test, 7, op)?, (7, 11))?;
    // It must not swap what is not as expected.
    numbers(atomic(test, 8, op)?, (8, 8))
}

fn fetch_and_add(test: &Test<'_>) -> Tried {
    numbers(
        atomic(test, 40, |at| Op::FetchAdd { at, add: 2 })?,
        (40, 42),
    )
}

fn inline((from, to): &(Side, Side)) -> Tried {
    if (from.qp().max_inline() as usize) < INLINE {
        return Err(Trouble::Unsupported);
    }
    to.post_receive()?;
    from.out.write(0, &pattern(4, INLINE));
    let sges = [from.out.sge(0..INLINE)];
    let mut wr = SendWr::new(REQUEST, Op::Send(None), &sges);
    wr.inline = true;
    from.qp().post_send(&wr)?;
    // The bytes were copied by the call.
    from.out.write(0, &[0; INLINE]);
    from.completion("Send")?;
    received(to, INLINE, None)?;
    same("the message", &to.into.read(0..INLINE), &pattern(4, INLINE))
}

fn shared_queue(test: &Test<'_>) -> Tried {
    if test.info.max_srq == 0 {
        return Err(Trouble::Unsupported);
    }
    send(&test.pair(true)?, None)
}

impl Side {
    /// Whether its queue's event comes within this time.
    fn event(&self, patience: Duration) -> Tried<bool> {
        let event = self.channel.event(Some(patience))?;
        Ok(event == Some(self.cq.number()))
    }
}

fn events((from, to): &(Side, Side)) -> Tried {
    to.post_receive()?;
    to.cq.arm(false)?;
    if to.event(Duration::ZERO)? {
        return failed("an event came before the message");
    }
    post(from, Op::Send(None), 1)?;
    if !to.event(PATIENCE)? {
        return failed(format!("no event in {} s", PATIENCE.as_secs()));
    }
    received(to, 1, None)?;
    // One event for one request of it.
    to.post_receive()?;
    post(from, Op::Send(None), 1)?;
    received_without_arming(to)?;
    if to.event(Duration::ZERO)? {
        return failed("an event came that nobody had asked for");
    }
    Ok(())
}

/// As [`received`], by polling only.
fn received_without_arming(side: &Side) -> Tried {
    let end = std::time::Instant::now() + PATIENCE;
    let mut wc = [Wc::default()];
    while side.cq.poll(&mut wc)? == 0 {
        if std::time::Instant::now() > end {
            return failed("no completion of the receive");
        }
        std::thread::yield_now();
    }
    if wc[0].is_success() {
        Ok(())
    } else {
        failed(side.cq.words(&wc[0]))
    }
}

fn by_addresses(test: &Test<'_>) -> Tried {
    send(&test.pair_by_cm(false)?, None)
}

fn datagram(test: &Test<'_>, imm: Option<u32>) -> Tried {
    const QKEY: u32 = 0x1111_1111;
    if test.info.transport != Transport::Ib || test.info.max_ah == 0 {
        return Err(Trouble::Unsupported);
    }
    let (context, gid) = (test.device.open()?, test.gid()?);
    let parts = Parts::new(&context, test.info, false)?;
    let init = || QpInit {
        kind: QpKind::Ud,
        ..parts.init()
    };
    let (from, to) = (parts.pd.create_qp(&init())?, parts.pd.create_qp(&init())?);
    from.datagrams(test.port, QKEY)?;
    to.datagrams(test.port, QKEY)?;
    let ah = parts
        .pd
        .create_ah(&Path::new(test.port, gid, gid.raw, test.port.lid))?;
    let length = (test.port.mtu as usize).clamp(1, 1024);
    to.post_recv(RECEIVE, &[parts.into.sge(0..GRH + length)])?;
    parts.out.write(0, &pattern(5, length));
    let sges = [parts.out.sge(0..length)];
    let (qp, qkey) = (to.number(), QKEY);
    let op = Op::Datagram {
        to: &ah,
        qp,
        qkey,
        imm,
    };
    from.post_send(&SendWr::new(REQUEST, op, &sges))?;
    // Both complete in one queue, in either order.
    for _ in 0..2 {
        let wc = completion(&parts.cq, "datagram")?;
        if wc.id == RECEIVE && (wc.len as usize, wc.imm) != (GRH + length, imm) {
            return failed(format!("{} bytes came, immediate {:x?}", wc.len, wc.imm));
        }
    }
    same(
        "the datagram",
        &parts.into.read(GRH..GRH + length),
        &pattern(5, length),
    )
}

/// A Read with a wrong key must fail, and must not bring anything.
fn wrong_key((from, to): &(Side, Side)) -> Tried {
    to.out.write(0, &pattern(6, LENGTH));
    let sges = [from.into.sge(0..8)];
    let mut at = to.out.remote(0);
    at.rkey ^= 0x5555_5500;
    from.qp()
        .post_send(&SendWr::new(REQUEST, Op::Read(at), &sges))?;
    match from.cq.wait(PATIENCE)? {
        Some(wc) if wc.is_success() => failed("the Read was carried out"),
        Some(_) => same("the memory", &from.into.read(0..8), &[0; 8]),
        None => failed(format!("the Read did not end in {} s", PATIENCE.as_secs())),
    }
}
