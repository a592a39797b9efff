//! Endpoints: sends and receives, with tags and without.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use smallvec::SmallVec;
use weft_fi::endpoint::{CONNECTED_THRESHOLD, Endpoint, FaultRates, Setup, THRESHOLD};
use weft_fi::machine::{PeerId, Refused, Want};
use weft_fi::wire::Meta;
use weft_verbs::RawMemory;
use weft_verbs::cm::Serving;
use weft_verbs::settings::{self, Setting};

use crate::abi::{
    CmOps, DomainFid, EpFid, EpOps, FI_ADDR_UNSPEC, FI_CLAIM, FI_CLASS_AV, FI_CLASS_CNTR,
    FI_CLASS_CQ, FI_CLASS_EP, FI_CLASS_EQ, FI_COMPLETION, FI_DELIVERY_COMPLETE, FI_DIRECTED_RECV,
    FI_DISCARD, FI_ENABLE, FI_ETOOSMALL, FI_GETOPSFLAG, FI_INJECT, FI_MATCH_COMPLETE,
    FI_MULTI_RECV, FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV, FI_PEEK, FI_RECV, FI_REMOTE_CQ_DATA,
    FI_SELECTIVE_COMPLETION, FI_SEND, FI_SETOPSFLAG, Fid, Info, Msg, MsgOps, MsgTagged, NoOps, Ops,
    TaggedOps,
};
use crate::av::{Addresses, Av, put};
use crate::counter::Cntr;
use crate::domain::Domain;
use crate::info::{self, RANGES};
use crate::object::{MISSING, fid, plain};
use crate::queue::Cq;
use crate::service;

#[repr(C)]
struct Ep {
    fid: EpFid,
    endpoint: Arc<Endpoint>,
    /// Peers that know an address and a port get the endpoint's address.
    #[allow(dead_code)] // answers until it is dropped
    serving: Option<Serving>,
    addresses: Arc<OnceLock<Arc<Addresses>>>,
    /// Peers by their index in the address vector.
    peers: Mutex<Vec<Option<PeerId>>>,
    /// Default flags of sends and receives that specify none.
    flags: Mutex<(u64, u64)>,
    /// Receives may name their sender; otherwise the sender that they name is ignored.
    directed: bool,
    /// Only sends that ask for it make completions.
    selective: Mutex<bool>,
    /// A receive of many messages with less room left than this is over.
    least: AtomicUsize,
}

static EP: Ops = Ops {
    bind,
    control,
    ..plain::<Ep>()
};
static EP_OPS: EpOps = EpOps {
    size: size_of::<EpOps>(),
    cancel,
    getopt,
    setopt,
    missing: [MISSING; 4],
};
static CM_OPS: CmOps = CmOps {
    size: size_of::<CmOps>(),
    setname: MISSING,
    getname,
    missing: [MISSING; 7],
};
static MSG_OPS: MsgOps = MsgOps {
    size: size_of::<MsgOps>(),
    recv,
    recvv,
    recvmsg,
    send,
    sendv,
    sendmsg,
    inject,
    senddata,
    injectdata,
};
static TAGGED_OPS: TaggedOps = TaggedOps {
    size: size_of::<TaggedOps>(),
    recv: trecv,
    recvv: trecvv,
    recvmsg: trecvmsg,
    send: tsend,
    sendv: tsendv,
    sendmsg: tsendmsg,
    inject: tinject,
    senddata: tsenddata,
    injectdata: tinjectdata,
};

static NO_RMA: NoOps<9> = none();
static NO_ATOMIC: NoOps<13> = none();
static NO_COLLECTIVE: NoOps<11> = none();

const fn none<const N: usize>() -> NoOps<N> {
    NoOps {
        size: size_of::<NoOps<N>>(),
        missing: [MISSING; N],
    }
}

/// Default of the least free bytes with which a receive of many messages accepts another one.
const LEAST: usize = 64;

/// Returns the faults to inject in tests, in percent.
fn weather() -> FaultRates {
    let of = |setting: &Setting| {
        let percent = setting.parse::<f64>().ok().flatten();
        (percent.unwrap_or(0.0) * 10_000.0) as u64
    };
    FaultRates {
        lost: of(&settings::FI_DROP),
        twice: of(&settings::FI_TWICE),
        late: of(&settings::FI_LATE),
    }
}

/// Default limit of connections to peers on this host; the environment can set another.
const NEAR: usize = 8;

/// Returns the limit of connections, and whether it is only for peers of this host: `WEFT_FI_RC` and `WEFT_LOCAL`.
fn connections() -> (usize, bool) {
    match settings::FI_RC.parse() {
        Ok(Some(most)) => (most, false),
        _ if settings::LOCAL.is("off") == Ok(true) => (0, true),
        _ => (NEAR, true),
    }
}

pub(crate) unsafe extern "C" fn open(
    domain: *mut DomainFid,
    info: *mut Info,
    out: *mut *mut EpFid,
    context: *mut c_void,
) -> c_int {
    // SAFETY: objects of ours, and a valid description or null.
    let (domain, info) = unsafe { (&*domain.cast::<Domain>(), info.as_ref()) };
    let (connections, near) = connections();
    let found_at = info.and_then(info::source);
    let own = found_at.filter(|at| !at.ip().is_unspecified());
    let mut addr = own.unwrap_or_else(info::usual_address);
    addr.set_port(0);
    let setup = Setup {
        addr,
        threshold: info::threshold().unwrap_or(THRESHOLD),
        connected_threshold: info::threshold().unwrap_or(CONNECTED_THRESHOLD),
        weather: weather(),
        connections,
        near,
    };
    let endpoint = match Endpoint::open(&domain.device, &setup) {
        Ok(endpoint) => Arc::new(endpoint),
        Err(error) => {
            eprintln!(
                "weft: cannot open an endpoint on {}: {error}",
                setup.addr.ip()
            );
            return -error.raw_os_error().unwrap_or(libc::EIO);
        }
    };
    let serving = found_at
        .filter(|at| at.port() != 0)
        .map(|at| service::serve(&domain.device, at, endpoint.address()))
        .transpose();
    let serving = match serving {
        Ok(serving) => serving,
        Err(error) => {
            eprintln!("weft: no peer can find the endpoint by its port: {error}");
            return -error.raw_os_error().unwrap_or(libc::EIO);
        }
    };
    // SAFETY: parts of a valid description, or null.
    let flags = unsafe {
        let tx = info.and_then(|i| i.tx_attr.as_ref());
        let rx = info.and_then(|i| i.rx_attr.as_ref());
        (
            tx.map_or(0, |tx| tx.op_flags),
            rx.map_or(0, |rx| rx.op_flags),
        )
    };
    let ep = Box::new(Ep {
        fid: EpFid {
            fid: fid(FI_CLASS_EP, context, &EP),
            ops: &raw const EP_OPS,
            cm: &raw const CM_OPS,
            msg: &raw const MSG_OPS,
            rma: &raw const NO_RMA,
            tagged: &raw const TAGGED_OPS,
            atomic: &raw const NO_ATOMIC,
            collective: &raw const NO_COLLECTIVE,
        },
        endpoint,
        serving,
        addresses: Arc::default(),
        peers: Mutex::default(),
        flags: Mutex::new(flags),
        directed: info.is_some_and(|info| info.caps & FI_DIRECTED_RECV != 0),
        selective: Mutex::new(false),
        least: AtomicUsize::new(LEAST),
    });
    // SAFETY: a place for it.
    unsafe { out.write(Box::into_raw(ep).cast()) };
    0
}

fn set<T>(place: &Mutex<T>, value: T) {
    *place.lock().unwrap_or_else(PoisonError::into_inner) = value;
}

fn get<T: Copy>(place: &Mutex<T>) -> T {
    *place.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn bind(fid: *mut Fid, other: *mut Fid, flags: u64) -> c_int {
    // SAFETY: our objects, distinguished by their class.
    unsafe {
        let ep = &*fid.cast::<Ep>();
        match (*other).fclass {
            FI_CLASS_CQ => {
                let cq = &*other.cast::<Cq>();
                let sends = (flags & FI_SEND != 0).then_some(&cq.queue);
                let receives = (flags & FI_RECV != 0).then_some(&cq.queue);
                ep.endpoint.complete_to(sends, receives);
                cq.add(&ep.endpoint, &ep.addresses);
                if flags & FI_SEND != 0 {
                    set(&ep.selective, flags & FI_SELECTIVE_COMPLETION != 0);
                }
                0
            }
            FI_CLASS_AV => {
                let av = &*other.cast::<Av>();
                match ep.addresses.set(Arc::clone(&av.addresses)) {
                    Ok(()) => 0,
                    Err(_) => -libc::EINVAL,
                }
            }
            FI_CLASS_CNTR => {
                let cntr = &*other.cast::<Cntr>();
                let counts = |flag| (flags & flag != 0).then_some(&cntr.counter);
                ep.endpoint.count_to(counts(FI_SEND), counts(FI_RECV));
                cntr.add(Arc::downgrade(&ep.endpoint));
                0
            }
            FI_CLASS_EQ => 0,
            _ => -libc::ENOSYS,
        }
    }
}

unsafe extern "C" fn control(fid: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    // SAFETY: an object of ours, and for the flags a number of 64 bits.
    unsafe {
        let ep = &*fid.cast::<Ep>();
        match command {
            FI_ENABLE => 0,
            FI_GETOPSFLAG | FI_SETOPSFLAG => {
                let arg = arg.cast::<u64>();
                let (mut tx, mut rx) = get(&ep.flags);
                let place = if *arg & FI_SEND != 0 {
                    &mut tx
                } else {
                    &mut rx
                };
                if command == FI_SETOPSFLAG {
                    *place = *arg & !(FI_SEND | FI_RECV);
                } else {
                    *arg = *place;
                }
                set(&ep.flags, (tx, rx));
                0
            }
            _ => -libc::ENOSYS,
        }
    }
}

unsafe extern "C" fn getname(fid: *mut Fid, out: *mut c_void, len: *mut usize) -> c_int {
    // SAFETY: an object of ours, and room as `len` says.
    unsafe {
        let ep = &*fid.cast::<Ep>();
        put(&ep.endpoint.address(), out, len)
    }
}

unsafe extern "C" fn cancel(fid: *mut Fid, context: *mut c_void) -> isize {
    // SAFETY: an object of ours.
    let ep = unsafe { &*fid.cast::<Ep>() };
    ep.endpoint.cancel(context as usize);
    0
}

unsafe extern "C" fn getopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut usize,
) -> c_int {
    if (level, name) != (FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV) {
        return -libc::ENOPROTOOPT;
    }
    // SAFETY: an object of ours, and room as `len` says.
    unsafe {
        if *len < size_of::<usize>() {
            return -FI_ETOOSMALL;
        }
        let least = (*fid.cast::<Ep>()).least.load(Ordering::Relaxed);
        value.cast::<usize>().write_unaligned(least);
        *len = size_of::<usize>();
    }
    0
}

unsafe extern "C" fn setopt(
    fid: *mut Fid,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: usize,
) -> c_int {
    if (level, name) != (FI_OPT_ENDPOINT, FI_OPT_MIN_MULTI_RECV) {
        return -libc::ENOPROTOOPT;
    }
    if len != size_of::<usize>() {
        return -libc::EINVAL;
    }
    // SAFETY: an object of ours, and a number of this size.
    unsafe {
        let least = value.cast::<usize>().read_unaligned();
        (*fid.cast::<Ep>()).least.store(least, Ordering::Relaxed);
    }
    0
}

impl Ep {
    fn peer(&self, addr: u64) -> Result<PeerId, c_int> {
        let index = usize::try_from(addr).map_err(|_| libc::EINVAL)?;
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&Some(peer)) = peers.get(index) {
            return Ok(peer);
        }
        let addresses = self.addresses.get().ok_or(libc::EINVAL)?;
        let address = addresses.get(addr).ok_or(libc::EINVAL)?;
        let peer = self.endpoint.peer(&address).map_err(errno)?;
        // `get` has found the index, so that the table is no longer than the vector.
        if peers.len() <= index {
            peers.resize(index + 1, None);
        }
        peers[index] = Some(peer);
        Ok(peer)
    }

    fn send(&self, ranges: &[RawMemory], to: u64, meta: Meta, flags: u64, context: usize) -> isize {
        let injected = flags & FI_INJECT != 0;
        let len = meta.len as usize;
        if injected && len > info::inject_size() || len > info::MAX_MESSAGE {
            return -(libc::EMSGSIZE as isize);
        }
        let quiet = get(&self.selective) && flags & FI_COMPLETION == 0;
        let certain = flags & (FI_DELIVERY_COMPLETE | FI_MATCH_COMPLETE) != 0 && !injected;
        let peer = match self.peer(to) {
            Ok(peer) => peer,
            Err(error) => return -(error as isize),
        };
        let context = (!quiet).then_some(context);
        match self.endpoint.send(peer, ranges, meta, context, certain) {
            Ok(()) => 0,
            Err(refused) => {
                if refused == Refused::Busy {
                    self.endpoint.progress();
                }
                -(errno(refused) as isize)
            }
        }
    }

    fn recv(
        &self,
        memory: RawMemory,
        from: u64,
        mut want: Want,
        flags: u64,
        context: usize,
    ) -> isize {
        if self.directed && from != FI_ADDR_UNSPEC {
            match self.peer(from) {
                Ok(peer) => want.peer = Some(peer),
                Err(error) => return -(error as isize),
            }
        }
        if flags & FI_DISCARD != 0 {
            return -(libc::EOPNOTSUPP as isize);
        }
        if flags & FI_PEEK != 0 {
            self.endpoint.peek(&want, flags & FI_CLAIM != 0, context);
            return 0;
        }
        if flags & FI_MULTI_RECV != 0 {
            let least = self.least.load(Ordering::Relaxed);
            self.endpoint.recv_many(memory, want, least, context);
            return 0;
        }
        let claim = (flags & FI_CLAIM != 0).then_some(context);
        if self.endpoint.recv(memory, want, claim, context) {
            0
        } else {
            -(libc::EINVAL as isize)
        }
    }
}

fn errno(refused: Refused) -> c_int {
    match refused {
        Refused::Busy => libc::EAGAIN,
        Refused::Gone => libc::ECONNRESET,
        Refused::TooMany => libc::ENOMEM,
    }
}

unsafe fn ep<'a>(fid: *mut EpFid) -> &'a Ep {
    // SAFETY: made by `open`.
    unsafe { &*fid.cast::<Ep>() }
}

/// The memory of an operation. It is the library's until the operation is complete: that is libfabric's contract, and [`RawMemory`]'s.
unsafe fn memory(ptr: *const c_void, len: usize) -> Result<RawMemory, isize> {
    // SAFETY: as said.
    unsafe { RawMemory::new(ptr.cast_mut().cast(), len) }.ok_or(-(libc::EFAULT as isize))
}

/// The memory of an operation with one range.
unsafe fn single(ptr: *const c_void, len: usize) -> Result<Ranges, isize> {
    // SAFETY: as `memory`.
    Ok(Ranges::from_iter([unsafe { memory(ptr, len) }?]))
}

/// The memory of an operation with a list of ranges.
unsafe fn several(iov: *const libc::iovec, count: usize) -> Result<Ranges, isize> {
    if count > RANGES {
        return Err(-(libc::EINVAL as isize));
    }
    (0..count)
        .map(|i| {
            // SAFETY: the list has this many entries; memory as in `memory`.
            unsafe {
                let range = &*iov.add(i);
                memory(range.iov_base, range.iov_len)
            }
        })
        .collect()
}

/// The one range of a list.
unsafe fn range(iov: *const libc::iovec, count: usize) -> Result<(*const c_void, usize), isize> {
    match count {
        0 => Ok((std::ptr::null(), 0)),
        // SAFETY: the list has one entry.
        1 => Ok(unsafe { ((*iov).iov_base.cast_const(), (*iov).iov_len) }),
        _ => Err(-(libc::EINVAL as isize)),
    }
}

type Ranges = SmallVec<[RawMemory; 2]>;

struct Outgoing {
    ranges: Result<Ranges, isize>,
    to: u64,
    tag: Option<u64>,
    data: Option<u64>,
    /// `None`: those of the endpoint.
    flags: Option<u64>,
    context: *mut c_void,
}

impl Outgoing {
    fn meta(&self, ranges: &Ranges) -> Meta {
        Meta {
            tagged: self.tag.is_some(),
            tag: self.tag.unwrap_or(0),
            data: self.data,
            len: ranges.iter().map(|range| range.len() as u64).sum(),
        }
    }
}

unsafe fn start_send(fid: *mut EpFid, out: &Outgoing) -> isize {
    // SAFETY: an object of ours.
    let ep = unsafe { ep(fid) };
    let flags = out.flags.unwrap_or_else(|| get(&ep.flags).0);
    match &out.ranges {
        Ok(ranges) => ep.send(
            ranges,
            out.to,
            out.meta(ranges),
            flags,
            out.context as usize,
        ),
        Err(error) => *error,
    }
}

/// Injected sends make no completion.
unsafe fn start_inject(fid: *mut EpFid, out: &Outgoing) -> isize {
    // SAFETY: an object of ours.
    let ep = unsafe { ep(fid) };
    let ranges = match &out.ranges {
        Ok(ranges) => ranges,
        Err(error) => return *error,
    };
    let meta = out.meta(ranges);
    if meta.len > info::inject_size() as u64 {
        return -(libc::EMSGSIZE as isize);
    }
    let started = ep.peer(out.to).map_err(|e| -(e as isize)).and_then(|peer| {
        let sent = ep.endpoint.send(peer, ranges, meta, None, false);
        sent.map_err(|refused| {
            if refused == Refused::Busy {
                ep.endpoint.progress();
            }
            -(errno(refused) as isize)
        })
    });
    started.err().unwrap_or(0)
}

struct Taken {
    ptr: *const c_void,
    len: usize,
    from: u64,
    /// Tag, and bits to ignore.
    tag: Option<(u64, u64)>,
    flags: Option<u64>,
    context: *mut c_void,
}

unsafe fn start_recv(fid: *mut EpFid, taken: &Taken) -> isize {
    // SAFETY: as `start_send`.
    unsafe {
        let ep = ep(fid);
        let (tag, ignore) = taken.tag.unwrap_or((0, 0));
        let want = Want {
            tagged: taken.tag.is_some(),
            tag,
            ignore,
            peer: None,
        };
        let flags = taken.flags.unwrap_or_else(|| get(&ep.flags).1);
        match memory(taken.ptr, taken.len) {
            Ok(memory) => ep.recv(memory, taken.from, want, flags, taken.context as usize),
            Err(error) => error,
        }
    }
}

type Ptr = *mut c_void;
type Mem = *const c_void;
type Iov = *const libc::iovec;

/// Calls of libfabric that pass the same arguments in different forms.
macro_rules! calls {
    ($($name:ident($($arg:ident: $kind:ty),*) = $start:ident($value:expr);)*) => {$(
        unsafe extern "C" fn $name(fid: *mut EpFid, $($arg: $kind),*) -> isize {
            // SAFETY: libfabric's user promises what the manual pages say.
            unsafe { $start(fid, &$value) }
        }
    )*};
}

calls! {
    send(ptr: Mem, len: usize, _desc: Ptr, to: u64, context: Ptr) =
        start_send(Outgoing { ranges: single(ptr, len), to, tag: None, data: None, flags: None, context });
    senddata(ptr: Mem, len: usize, _desc: Ptr, data: u64, to: u64, context: Ptr) =
        start_send(Outgoing { ranges: single(ptr, len), to, tag: None, data: Some(data), flags: None, context });
    inject(ptr: Mem, len: usize, to: u64) =
        start_inject(Outgoing { ranges: single(ptr, len), to, tag: None, data: None, flags: None, context: std::ptr::null_mut() });
    injectdata(ptr: Mem, len: usize, data: u64, to: u64) =
        start_inject(Outgoing { ranges: single(ptr, len), to, tag: None, data: Some(data), flags: None, context: std::ptr::null_mut() });
    tsend(ptr: Mem, len: usize, _desc: Ptr, to: u64, tag: u64, context: Ptr) =
        start_send(Outgoing { ranges: single(ptr, len), to, tag: Some(tag), data: None, flags: None, context });
    tsenddata(ptr: Mem, len: usize, _desc: Ptr, data: u64, to: u64, tag: u64, context: Ptr) =
        start_send(Outgoing { ranges: single(ptr, len), to, tag: Some(tag), data: Some(data), flags: None, context });
    tinject(ptr: Mem, len: usize, to: u64, tag: u64) =
        start_inject(Outgoing { ranges: single(ptr, len), to, tag: Some(tag), data: None, flags: None, context: std::ptr::null_mut() });
    tinjectdata(ptr: Mem, len: usize, data: u64, to: u64, tag: u64) =
        start_inject(Outgoing { ranges: single(ptr, len), to, tag: Some(tag), data: Some(data), flags: None, context: std::ptr::null_mut() });
    sendv(iov: Iov, _desc: Ptr, count: usize, to: u64, context: Ptr) =
        start_send(Outgoing { ranges: several(iov, count), to, tag: None, data: None, flags: None, context });
    sendmsg(msg: *const Msg, flags: u64) =
        start_send(Outgoing {
            ranges: several((*msg).iov, (*msg).iov_count), to: (*msg).addr, tag: None, data: data_of(flags, (*msg).data),
            flags: Some(flags), context: (*msg).context,
        });
    tsendv(iov: Iov, _desc: Ptr, count: usize, to: u64, tag: u64, context: Ptr) =
        start_send(Outgoing { ranges: several(iov, count), to, tag: Some(tag), data: None, flags: None, context });
    tsendmsg(msg: *const MsgTagged, flags: u64) =
        start_send(Outgoing {
            ranges: several((*msg).iov, (*msg).iov_count), to: (*msg).addr, tag: Some((*msg).tag),
            data: data_of(flags, (*msg).data), flags: Some(flags), context: (*msg).context,
        });
    recv(ptr: Ptr, len: usize, _desc: Ptr, from: u64, context: Ptr) =
        start_recv(Taken { ptr, len, from, tag: None, flags: None, context });
    trecv(ptr: Ptr, len: usize, _desc: Ptr, from: u64, tag: u64, ignore: u64, context: Ptr) =
        start_recv(Taken { ptr, len, from, tag: Some((tag, ignore)), flags: None, context });
}

/// As [`calls`], with a list of at most one range.
macro_rules! list_calls {
    ($($name:ident($list:expr, $count:expr; $($arg:ident: $kind:ty),*) = $start:ident($ptr:ident, $len:ident, $value:expr);)*) => {$(
        unsafe extern "C" fn $name(fid: *mut EpFid, $($arg: $kind),*) -> isize {
            // SAFETY: libfabric's user promises what the manual pages say.
            unsafe {
                match range($list, $count) {
                    Ok(($ptr, $len)) => $start(fid, &$value),
                    Err(error) => error,
                }
            }
        }
    )*};
}

list_calls! {
    recvv(iov, count; iov: Iov, _desc: Ptr, count: usize, from: u64, context: Ptr) =
        start_recv(ptr, len, Taken { ptr, len, from, tag: None, flags: None, context });
    recvmsg((*msg).iov, (*msg).iov_count; msg: *const Msg, flags: u64) =
        start_recv(ptr, len, Taken { ptr, len, from: (*msg).addr, tag: None, flags: Some(flags), context: (*msg).context });
    trecvv(iov, count; iov: Iov, _desc: Ptr, count: usize, from: u64, tag: u64, ignore: u64, context: Ptr) =
        start_recv(ptr, len, Taken { ptr, len, from, tag: Some((tag, ignore)), flags: None, context });
    trecvmsg((*msg).iov, (*msg).iov_count; msg: *const MsgTagged, flags: u64) =
        start_recv(ptr, len, Taken {
            ptr, len, from: (*msg).addr, tag: Some(((*msg).tag, (*msg).ignore)), flags: Some(flags), context: (*msg).context,
        });
}

fn data_of(flags: u64, data: u64) -> Option<u64> {
    (flags & FI_REMOTE_CQ_DATA != 0).then_some(data)
}
