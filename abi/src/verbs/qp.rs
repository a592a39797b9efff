//! Queue pairs.
//!
//! What the connection manager and the persona may call:
//!
//! * [`find`]`::<QpObj>(ptr)` and [`enter`](super::object::enter) give a guard of the object behind a program's pointer; hold it only while no other call of
//!   the same queue pair is waited for. [`Guard::name`](super::object::Guard::name) is what may be kept.
//! * [`QpObj::native`]: the queue pair below, to be dialled or accepted with. A queue pair that goes back to RESET gets another one.
//! * [`QpObj::num`], [`QpObj::is_persona`], [`QpObj::attr`] (what `ibv_modify_qp` has set so far), [`QpObj::is_srq`].
//! * [`QpObj::state`], [`QpObj::set_state`], [`QpObj::set_connected`]: C's state. They only store, so any thread may call them. The error state
//!   needs no call: it follows from the queue pair below.

use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_verbs::{Qp, QpInit, QpState, RecvWr, Rnr, SendWr, UdDest, XrcDomain};

use super::context::{Context, Ctx, Held};
use super::cq::{self, Cq};
use super::device::Which;
use super::events::{Audience, Fate, Listener, Of, Subject};
use super::ex::{Building, RC_OPS, UC_OPS, UD_OPS, builders};
use super::faults::{self, QpFaults};
use super::mr::rights;
use super::object::{Guard, Kind, Name, PerFork, Pool, Turn, find, lock, turn};
use super::pd::Pd;
use super::persona;
use super::places::{self, Both};
use super::port;
use super::post::refused;
use super::settings;
use super::srq::Srq;
use super::transitions::{allowed, remember, sound};
use super::types::*;
use super::ud::Datagrams;
use super::xrc::Xrcd;
use crate::call::{pointer, status, unsupported};

/// What an `ibv_qp` stands for.
pub(crate) struct QpObj {
    pub(crate) ctx: Arc<Ctx>,
    num: u32,
    init: QpInit,
    pd: weft_verbs::Pd,
    /// `None` only for the moment in which another one is made, and for datagrams.
    native: Option<Arc<Qp>>,
    /// In its place, for datagrams.
    pub(super) ud: Option<Box<Datagrams>>,
    state: AtomicU32,
    kind: ibv_qp_type,
    cap: ibv_qp_cap,
    attr: Mutex<ibv_qp_attr>,
    places: &'static Both,
    /// For sends and for receives.
    queues: [Option<Name<Cq>>; 2],
    pub(crate) subject: Arc<Subject>,
    /// Sends posted while the send queue was to rest (SQD). Those of datagrams are kept elsewhere, under this lock.
    resting: Mutex<Vec<SendWr>>,
    pub(crate) building: Building,
    extended: bool,
    /// What `WEFT_FAULTS` has in store for it.
    faults: Option<Arc<QpFaults>>,
    /// The persona's claim on the number. It goes after the queue pair below, which has the number too.
    _number: Option<persona::Number>,
    _held: [Option<Held>; 4],
}

impl Kind for QpObj {
    type C = ibv_qp_ex;
    type Handle = ibv_qp;
    const MARK: u32 = 0x9b9b_a132;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<QpObj>> = PerFork::new();
        POOL.get()
    }
}

impl QpObj {
    /// The queue pair below.
    ///
    /// # Errors
    /// `EINVAL` while another one is made of it.
    pub(crate) fn native(&self) -> Result<Arc<Qp>, Errno> {
        self.native.clone().ok_or(Errno::INVAL)
    }

    pub(crate) fn num(&self) -> u32 {
        self.num
    }

    pub(crate) fn is_persona(&self) -> bool {
        self.ctx.is_persona()
    }

    /// It takes its receives from a shared queue.
    pub(crate) fn is_srq(&self) -> bool {
        self.init.srq.is_some() || self.init.xrc.is_some()
    }

    /// What `ibv_modify_qp` has set so far.
    pub(crate) fn attr(&self) -> ibv_qp_attr {
        *lock(&self.attr)
    }

    /// C's state. A connection that has ended is the error state.
    pub(crate) fn state(&self) -> ibv_qp_state {
        let state = self.state.load(Ordering::Acquire);
        let ended = || {
            self.native
                .as_ref()
                .is_some_and(|qp| qp.state() == QpState::Error)
        };
        if matches!(state, IBV_QPS_RTR | IBV_QPS_RTS | IBV_QPS_SQD) && ended() {
            IBV_QPS_ERR
        } else {
            state
        }
    }

    pub(crate) fn set_state(&self, state: ibv_qp_state) {
        self.state.store(state, Ordering::Release);
    }

    /// What a query is to say: a connection of TCP has its own time limits.
    pub(crate) fn set_timeout(&self, timeout: u8) {
        lock(&self.attr).timeout = timeout;
    }

    /// The connection manager has joined it to a peer's.
    pub(crate) fn set_connected(&self) {
        self.set_state(IBV_QPS_RTS);
    }

    pub(crate) fn is_extended(&self) -> bool {
        self.extended
    }

    /// It is for datagrams.
    #[inline]
    pub(crate) fn is_datagram(&self) -> bool {
        self.kind == IBV_QPT_UD
    }

    /// What it is for datagrams.
    ///
    /// # Errors
    /// `EINVAL` for a queue pair of another kind.
    pub(crate) fn datagrams(&self) -> Result<&Datagrams, Errno> {
        self.ud.as_deref().ok_or(Errno::INVAL)
    }

    /// It has reads and atomics.
    #[inline]
    pub(crate) fn is_reliable(&self) -> bool {
        matches!(self.kind, IBV_QPT_RC | IBV_QPT_XRC_SEND)
    }

    /// Its messages name the shared receive queues that they are for.
    #[inline]
    pub(crate) fn is_xrc_send(&self) -> bool {
        self.kind == IBV_QPT_XRC_SEND
    }

    #[inline]
    pub(crate) fn max_send_sge(&self) -> usize {
        self.cap.max_send_sge as usize
    }

    #[inline]
    pub(crate) fn max_recv_sge(&self) -> usize {
        self.cap.max_recv_sge as usize
    }

    #[inline]
    pub(crate) fn max_inline(&self) -> usize {
        self.cap.max_inline_data as usize
    }

    /// Whether the send queue has room for `count` more requests.
    pub(crate) fn has_room(&self, count: usize) -> bool {
        self.places.send.has_room(count, self.cap.max_send_wr)
    }

    fn outstanding(&self) -> u32 {
        match (&self.native, &self.ud) {
            (Some(qp), _) => qp.outstanding(),
            (None, Some(ud)) => ud.outstanding(),
            (None, None) => 0,
        }
    }

    /// Post one datagram.
    pub(crate) fn post_datagram(&self, wr: &SendWr, to: &UdDest) -> Result<(), Errno> {
        let ud = self.ud.as_ref().ok_or(Errno::INVAL)?;
        let places = &self.places.send;
        places.take(self.cap.max_send_wr, || {
            let state = self.state.load(Ordering::Relaxed);
            if state != IBV_QPS_SQD {
                return ud.post(state, wr, to);
            }
            // The send queue may be going on just now.
            let _resting = lock(&self.resting);
            ud.post(self.state.load(Ordering::Relaxed), wr, to)
        })
    }

    /// Post one send.
    #[inline]
    pub(crate) fn post_one(&self, wr: &mut SendWr) -> Result<(), Errno> {
        let places = &self.places.send;
        places.take(self.cap.max_send_wr, || match &self.faults {
            None => self.post_sound(wr),
            Some(faults) => self.post_faulty(faults, wr),
        })
    }

    #[cold]
    fn post_faulty(&self, faults: &QpFaults, wr: &mut SendWr) -> Result<(), Errno> {
        let end = faults.before_send(wr, self.ctx.which);
        end.carry_out(self.native.as_ref().ok_or(Errno::INVAL)?);
        self.post_sound(wr)
    }

    /// Post one receive.
    #[inline]
    pub(crate) fn post_receive(&self, wr: &RecvWr) -> Result<(), Errno> {
        if self.is_srq() {
            return Err(Errno::INVAL);
        }
        let places = &self.places.recv;
        places.take(self.cap.max_recv_wr, || self.post_counted_receive(wr))
    }

    #[inline]
    fn post_counted_receive(&self, wr: &RecvWr) -> Result<(), Errno> {
        let native = match self.receiver() {
            Ok(native) => native,
            Err(errno) => return self.post_other_receive(wr, errno),
        };
        let wrs = std::slice::from_ref(wr);
        let Some(faults) = &self.faults else {
            return native.post_recv(wrs).map_err(refused);
        };
        let end = faults.before_recv(self.ctx.which);
        end.carry_out(native);
        native.post_recv(wrs).map_err(refused)
    }

    #[cold]
    fn post_other_receive(&self, wr: &RecvWr, errno: Errno) -> Result<(), Errno> {
        match &self.ud {
            Some(ud) if self.state.load(Ordering::Relaxed) != IBV_QPS_RESET => ud.post_recv(wr),
            _ => Err(errno),
        }
    }

    #[inline]
    fn post_sound(&self, wr: &mut SendWr) -> Result<(), Errno> {
        let native = self.native.as_ref().ok_or(Errno::INVAL)?;
        match self.state.load(Ordering::Relaxed) {
            IBV_QPS_RTS | IBV_QPS_SQE | IBV_QPS_ERR => native.post_send_from(wr).map_err(refused),
            IBV_QPS_SQD => self.post_later(native, wr),
            _ => Err(Errno::INVAL),
        }
    }

    #[cold]
    fn post_later(&self, native: &Qp, wr: &mut SendWr) -> Result<(), Errno> {
        let mut resting = lock(&self.resting);
        if self.state.load(Ordering::Relaxed) != IBV_QPS_SQD {
            drop(resting);
            return native.post_send_from(wr).map_err(refused);
        }
        // Later there is nobody to tell.
        native.check_send(wr).map_err(refused)?;
        resting.push(wr.clone());
        Ok(())
    }

    /// Post sends, in order; says how many were taken before the one that was refused.
    pub(crate) fn post(&self, wrs: &[SendWr]) -> Result<(), (usize, Errno)> {
        for (at, wr) in wrs.iter().enumerate() {
            self.post_one(&mut wr.clone())
                .map_err(|errno| (at, errno))?;
        }
        Ok(())
    }

    /// There is no queue pair below any more that makes completions: those not polled go.
    fn forget_posted(&self) {
        cq::clean(self.queues, self.num);
        self.places.clear();
    }

    /// The queue pair below, for receives.
    #[inline]
    fn receiver(&self) -> Result<&Qp, Errno> {
        if self.state.load(Ordering::Relaxed) == IBV_QPS_RESET && self.is_persona() {
            return Err(Errno::INVAL);
        }
        self.native.as_deref().ok_or(Errno::INVAL)
    }

    /// The send queue goes on.
    fn resume(&self, native: &Qp) {
        let mut resting = lock(&self.resting);
        for wr in resting.drain(..) {
            // It has room: what rests was counted. A queue pair that has failed meanwhile flushes it.
            if native.post_send_one(wr).is_err() {
                self.places.send.give_back(1);
            }
        }
        self.set_state(IBV_QPS_RTS);
    }
}

/// What a queue pair is to be: what both ways of making one have.
struct Wanted {
    common: ibv_qp_init_attr,
    pd: *mut ibv_pd,
    /// For targets of XRC, in place of that.
    xrcd: *mut ibv_xrcd,
    /// Operations that it gets calls for, when it is extended.
    ops: Option<u64>,
}

/// Of targets of XRC, which nobody posts to.
const NO_CAP: ibv_qp_cap = ibv_qp_cap {
    max_send_wr: 0,
    max_recv_wr: 0,
    max_send_sge: 0,
    max_recv_sge: 0,
    max_inline_data: 0,
};

/// Inline bytes that every queue pair has.
const LEAST_INLINE: u32 = 256;

fn check_cap(cap: &ibv_qp_cap, limits: &weft_verbs::Limits) -> Result<(), Errno> {
    let over = cap.max_send_wr > limits.max_wr
        || cap.max_recv_wr > limits.max_wr
        || cap.max_send_sge > limits.max_sge
        || cap.max_recv_sge > limits.max_sge
        || cap.max_inline_data > limits.max_inline;
    if over { Err(Errno::INVAL) } else { Ok(()) }
}

/// What a queue pair stands on.
struct Base {
    ctx: Arc<Ctx>,
    native: weft_verbs::Pd,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    /// For sends and for receives; targets of XRC have none.
    cqs: Option<[Guard<Cq>; 2]>,
    srq: Option<Guard<Srq>>,
    xrc: Option<XrcDomain>,
    held: [Option<Held>; 4],
}

impl Base {
    fn of(wanted: &Wanted) -> Result<Base, Errno> {
        let common = &wanted.common;
        if common.qp_type == IBV_QPT_XRC_RECV && !wanted.xrcd.is_null() {
            return Self::of_target(wanted);
        }
        let pd = find::<Pd>(wanted.pd)?;
        let persona = pd.ctx.which == Which::Persona;
        match common.qp_type {
            IBV_QPT_RC => {}
            IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_XRC_SEND if persona => {}
            // `ibv_create_qp` has no place for its domain.
            IBV_QPT_XRC_RECV if persona => return Err(Errno::INVAL),
            IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV
            | IBV_QPT_DRIVER => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::INVAL),
        }
        let send_cq = find::<Cq>(common.send_cq)?;
        let recv_cq = if common.qp_type == IBV_QPT_XRC_SEND {
            // It receives nothing.
            find::<Cq>(common.send_cq)?
        } else {
            find::<Cq>(common.recv_cq)?
        };
        let srq = if common.srq.is_null() {
            None
        } else {
            Some(find::<Srq>(common.srq)?)
        };
        Ok(Base {
            ctx: Arc::clone(&pd.ctx),
            native: pd.native.clone(),
            // SAFETY: a live object.
            context: unsafe { (*pd.c()).context },
            pd: pd.handle(),
            held: [
                Some(pd.users.hold()),
                Some(send_cq.users.hold()),
                Some(recv_cq.users.hold()),
                srq.as_ref().map(|srq| srq.users.hold()),
            ],
            cqs: Some([send_cq, recv_cq]),
            srq,
            xrc: None,
        })
    }

    fn of_target(wanted: &Wanted) -> Result<Base, Errno> {
        let xrcd = find::<Xrcd>(wanted.xrcd)?;
        Ok(Base {
            ctx: Arc::clone(&xrcd.ctx),
            native: xrcd.native().pd(),
            // SAFETY: a live object.
            context: unsafe { (*xrcd.c()).context },
            pd: std::ptr::null_mut(),
            cqs: None,
            srq: None,
            xrc: Some(xrcd.native().clone()),
            held: [Some(xrcd.users.hold()), None, None, None],
        })
    }

    /// How the queue pair below is to be.
    fn init(&self, wanted: &Wanted, cap: &ibv_qp_cap) -> QpInit {
        let mut init = match (&self.cqs, &self.xrc) {
            (Some([send, recv]), _) => QpInit::new(&send.native, &recv.native),
            (None, Some(domain)) => QpInit::new(&domain.cq(), &domain.cq()),
            (None, None) => unreachable!("a queue pair has completion queues, or a domain"),
        };
        init.srq = self.srq.as_ref().map(|srq| srq.native.clone());
        init.xrc.clone_from(&self.xrc);
        init.max_send_wr = cap.max_send_wr;
        init.max_recv_wr = cap.max_recv_wr;
        init.max_sge = cap.max_send_sge.max(cap.max_recv_sge);
        init.max_inline = cap.max_inline_data;
        init.sq_sig_all = wanted.common.sq_sig_all != 0;
        if self.ctx.which == Which::Persona {
            init.rnr = Rnr::Wait;
            init.quiet_end = !settings::peer_death_flushes();
            let kind = wanted.common.qp_type;
            init.remote_completion = !matches!(kind, IBV_QPT_UC | IBV_QPT_UD);
        }
        init
    }
}

fn create(wanted: &Wanted) -> Result<Guard<QpObj>, Errno> {
    let base = Base::of(wanted)?;
    let persona = base.ctx.which == Which::Persona;
    let common = &wanted.common;
    let mut cap = common.cap;
    match common.qp_type {
        // They have no receives of their own.
        _ if base.srq.is_some() => (cap.max_recv_wr, cap.max_recv_sge) = (0, 0),
        IBV_QPT_XRC_SEND => (cap.max_recv_wr, cap.max_recv_sge) = (0, 0),
        IBV_QPT_XRC_RECV => cap = NO_CAP,
        _ => {}
    }
    // Programs count on a little that they have not asked for.
    cap.max_inline_data = cap.max_inline_data.max(LEAST_INLINE);
    let device = base.native.device();
    check_cap(&cap, &device.attr().limits)?;
    let datagrams = common.qp_type == IBV_QPT_UD;
    let (number, port) = if datagrams {
        let (number, port) = persona::reserve_datagram(&device)?;
        (Some(number), Some(port))
    } else if persona {
        (Some(persona::reserve(&device)?), None)
    } else {
        (None, None)
    };
    let mut init = base.init(wanted, &cap);
    init.num = number.as_ref().map(persona::Number::get);
    let (native, ud) = match (init.num, port) {
        (_, Some(port)) => (
            None,
            Some(Datagrams::new(
                &base.native,
                &port,
                &init,
                port::of(base.ctx.which).down(),
            )?),
        ),
        (Some(_), None) => {
            let native = base.native.create_qp(&init).map_err(super::errno)?;
            (Some(native), None)
        }
        (None, None) => (Some(create_numbered(&base.native, &mut init)?), None),
    };
    let num = init.num.ok_or(Errno::INVAL)?;
    places::of(num).clear();
    let native = native.map(Arc::new);
    // SAFETY: all zeros is a value of the type.
    let mut attr: ibv_qp_attr = unsafe { std::mem::zeroed() };
    attr.path_mtu = IBV_MTU_1024;
    attr.port_num = 1;
    let faults = native.as_ref().and_then(|native| {
        let faults = faults::of_queue_pair(num)?;
        port::of(base.ctx.which).add(native);
        Some(faults)
    });
    let (names, handles) = match &base.cqs {
        Some([send, recv]) => {
            // As the program has said it.
            let handles = [send.handle(), common.recv_cq];
            ([Some(send.name()), Some(recv.name())], handles)
        }
        None => ([None, None], [std::ptr::null_mut(); 2]),
    };
    let (context, domain) = (base.context, base.pd);
    let made = QpObj::pool().make_at(
        |handle| {
            Ok(QpObj {
                ctx: Arc::clone(&base.ctx),
                num,
                _number: number,
                init,
                pd: base.native.clone(),
                native,
                ud: ud.map(Box::new),
                state: AtomicU32::new(IBV_QPS_RESET),
                kind: common.qp_type,
                cap,
                attr: Mutex::new(attr),
                places: places::of(num),
                queues: names,
                subject: Subject::new(handle),
                resting: Mutex::default(),
                building: Building::default(),
                extended: wanted.ops.is_some(),
                faults,
                _held: base.held,
            })
        },
        |c, _| {
            let qp = &mut c.qp_base;
            qp.context = context;
            qp.qp_context = common.qp_context;
            qp.pd = domain;
            [qp.send_cq, qp.recv_cq] = handles;
            qp.srq = common.srq;
            qp.handle = num;
            qp.qp_num = num;
            qp.state = IBV_QPS_RESET;
            qp.qp_type = common.qp_type;
            if let Some(ops) = wanted.ops {
                builders(c, ops, common.qp_type);
            }
        },
    )?;
    let listener = Listener {
        ctx: Arc::clone(&made.ctx),
        subject: Arc::clone(&made.subject),
        shared: made.is_srq(),
        fate: Fate::default(),
    };
    Audience::get().add(Of::Qp, num, listener);
    Ok(made)
}

/// Numbers of `weft0` count up from a place that a peer cannot foresee.
fn create_numbered(pd: &weft_verbs::Pd, init: &mut QpInit) -> Result<Qp, Errno> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    const NUMBERS: u32 = 1 << 24;
    if NEXT.load(Ordering::Relaxed) == 0 {
        // Seeded by the system for each process.
        let random = RandomState::new().hash_one(());
        let first = (random as u32 % NUMBERS) | 1;
        let _ = NEXT.compare_exchange(0, first, Ordering::Relaxed, Ordering::Relaxed);
    }
    loop {
        let num = NEXT.fetch_add(1, Ordering::Relaxed) % NUMBERS;
        // 0 and 1 are InfiniBand's own.
        if num < 2 {
            continue;
        }
        init.num = Some(num);
        match pd.create_qp(init) {
            // Another queue pair has this number: there are fewer of them than numbers.
            Err(weft_verbs::Error::Invalid(_)) => {}
            made => return made.map_err(super::errno),
        }
    }
}

/// `ibv_create_qp`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_create_qp(pd: *mut ibv_pd, init_attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    pointer(|| {
        if init_attr.is_null() {
            return Err(Errno::INVAL);
        }
        let wanted = Wanted {
            // SAFETY: the caller's promise.
            common: unsafe { *init_attr },
            pd,
            xrcd: std::ptr::null_mut(),
            ops: None,
        };
        let made = create(&wanted)?;
        // SAFETY: as above.
        unsafe { (*init_attr).cap = made.cap };
        Ok(made.handle())
    })
}

pub(crate) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    const KNOWN: u32 = IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    pointer(|| {
        find::<Context>(context)?;
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let asked = unsafe { *attr };
        if asked.comp_mask & !KNOWN != 0
            || (asked.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && asked.create_flags != 0)
        {
            return Err(Errno::OPNOTSUPP);
        }
        let target = asked.qp_type == IBV_QPT_XRC_RECV;
        let needed = if target {
            IBV_QP_INIT_ATTR_XRCD
        } else {
            IBV_QP_INIT_ATTR_PD
        };
        if asked.comp_mask & needed == 0 {
            return Err(Errno::INVAL);
        }
        let ops = if asked.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0 {
            let able = match asked.qp_type {
                IBV_QPT_UC => UC_OPS,
                IBV_QPT_UD => UD_OPS,
                IBV_QPT_XRC_RECV => 0,
                _ => RC_OPS,
            };
            if asked.send_ops_flags & !able != 0 {
                return Err(Errno::OPNOTSUPP);
            }
            Some(asked.send_ops_flags)
        } else {
            None
        };
        let wanted = Wanted {
            common: ibv_qp_init_attr {
                qp_context: asked.qp_context,
                send_cq: asked.send_cq,
                recv_cq: asked.recv_cq,
                srq: asked.srq,
                cap: asked.cap,
                qp_type: asked.qp_type,
                sq_sig_all: asked.sq_sig_all,
            },
            pd: asked.pd,
            xrcd: if target {
                asked.xrcd
            } else {
                std::ptr::null_mut()
            },
            ops,
        };
        let made = create(&wanted)?;
        // SAFETY: as above.
        unsafe { (*attr).cap = made.cap };
        Ok(made.handle())
    })
}

/// `ibv_qp_to_qp_ex`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    match find::<QpObj>(qp) {
        Ok(qp) if qp.extended => qp.c(),
        _ => std::ptr::null_mut(),
    }
}

/// `ibv_modify_qp`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int {
    status(|| {
        let mut qp = turn::<QpObj>(qp)?;
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let attr = unsafe { *attr };
        let mask = attr_mask as u32;
        let now = qp.state();
        if mask & IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != now {
            return Err(Errno::INVAL);
        }
        let to = if mask & IBV_QP_STATE != 0 {
            attr.qp_state
        } else {
            now
        };
        if qp.is_persona() {
            modify_persona(&mut qp, &attr, mask, now, to)?;
        } else {
            modify_iwarp(&mut qp, &attr, mask, now, to)?;
        }
        remember(&mut lock(&qp.attr), &attr, mask);
        // SAFETY: a live object.
        unsafe { (*qp.c()).qp_base.state = qp.state() };
        Ok(())
    })
}

fn modify_persona(
    qp: &mut Turn<QpObj>,
    attr: &ibv_qp_attr,
    mask: u32,
    now: ibv_qp_state,
    to: ibv_qp_state,
) -> Result<(), Errno> {
    let limits = qp.pd.device().attr().limits;
    if !allowed(qp.kind, now, to, mask) || !sound(attr, mask, limits.max_rd_atomic) {
        return Err(Errno::INVAL);
    }
    if mask & IBV_QP_ACCESS_FLAGS != 0 {
        qp.native()?.set_access(rights(attr.qp_access_flags));
    }
    if mask & IBV_QP_MIN_RNR_TIMER != 0 {
        let timer = persona::rnr_timer(attr.min_rnr_timer);
        qp.native()?.set_min_rnr_timer(timer);
    }
    if mask & IBV_QP_RNR_RETRY != 0 {
        qp.native()?.set_rnr_retry(attr.rnr_retry);
    }
    match (now, to) {
        (_, IBV_QPS_RESET) => return reset(qp),
        (_, IBV_QPS_ERR) => return fail(qp),
        _ if qp.is_datagram() => return modify_datagram(qp, attr, mask, to),
        (IBV_QPS_INIT, IBV_QPS_RTR) => {
            remember(&mut lock(&qp.attr), attr, mask);
            persona::rtr(&qp.native()?, attr)?;
        }
        (IBV_QPS_RTR, IBV_QPS_RTS) => {
            let patience = persona::patience(attr.timeout, attr.retry_cnt);
            persona::rts(qp.num, patience);
            port::of(qp.ctx.which).set_patience(qp.num, patience);
        }
        (IBV_QPS_SQD, IBV_QPS_RTS) => {
            qp.resume(&*qp.native()?);
            return Ok(());
        }
        (IBV_QPS_RTS, IBV_QPS_SQD) => {
            qp.set_state(to);
            if mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0
                && attr.en_sqd_async_notify != 0
                && qp.native()?.outstanding() == 0
            {
                qp.ctx.events.push(&qp.subject, IBV_EVENT_SQ_DRAINED);
            }
            return Ok(());
        }
        _ => {}
    }
    qp.set_state(to);
    Ok(())
}

fn modify_datagram(
    qp: &Turn<QpObj>,
    attr: &ibv_qp_attr,
    mask: u32,
    to: ibv_qp_state,
) -> Result<(), Errno> {
    let ud = qp.ud.as_ref().ok_or(Errno::INVAL)?;
    if to != IBV_QPS_INIT {
        let set = mask & IBV_QP_QKEY != 0;
        ud.listen(if set { attr.qkey } else { qp.attr().qkey })?;
    }
    if to == IBV_QPS_RTS {
        let _resting = lock(&qp.resting);
        qp.places.send.give_back(ud.resume());
        qp.set_state(to);
    } else {
        qp.set_state(to);
    }
    let notify = mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0 && attr.en_sqd_async_notify != 0;
    if to == IBV_QPS_SQD && notify && ud.outstanding() == 0 {
        qp.ctx.events.push(&qp.subject, IBV_EVENT_SQ_DRAINED);
    }
    Ok(())
}

/// What providers of iWARP let a program do itself. The connection manager does the rest.
fn modify_iwarp(
    qp: &mut Turn<QpObj>,
    attr: &ibv_qp_attr,
    mask: u32,
    now: ibv_qp_state,
    to: ibv_qp_state,
) -> Result<(), Errno> {
    const IGNORED: u32 = IBV_QP_ALT_PATH | IBV_QP_AV | IBV_QP_PATH_MIG_STATE;
    let limits = qp.pd.device().attr().limits;
    if !sound(attr, mask & !IGNORED, limits.max_rd_atomic) {
        return Err(Errno::INVAL);
    }
    match (now, to) {
        (_, IBV_QPS_RESET) => reset(qp),
        (_, IBV_QPS_ERR) => fail(qp),
        (IBV_QPS_RESET, IBV_QPS_INIT) => {
            qp.set_state(IBV_QPS_INIT);
            Ok(())
        }
        // The connection ends in order.
        (IBV_QPS_RTS, IBV_QPS_SQD) => {
            qp.native()?.disconnect();
            Ok(())
        }
        (now, to) if now == to => Ok(()),
        (_, IBV_QPS_RTR | IBV_QPS_RTS) => {
            tracing::warn!(
                qp_num = qp.num,
                "ibv_modify_qp cannot connect a queue pair of weft0, which is iWARP: connect it with rdma_cm (rdma_connect, rdma_accept), or use the \
                 device weft_ib0 (weft verbs --devices weft_ib0)"
            );
            Err(Errno::INVAL)
        }
        _ => Err(Errno::INVAL),
    }
}

/// To the error state: everything posted is flushed.
fn fail(qp: &Turn<QpObj>) -> Result<(), Errno> {
    let before = qp.state();
    if let Some(ud) = &qp.ud {
        {
            let _resting = lock(&qp.resting);
            qp.set_state(IBV_QPS_ERR);
            qp.places.send.give_back(ud.fail());
        }
        if before != IBV_QPS_ERR {
            Audience::get().last(qp.num);
        }
        return Ok(());
    }
    let native = qp.native()?;
    if qp.is_persona() {
        persona::reset(qp.num);
    }
    qp.set_state(IBV_QPS_ERR);
    Audience::get().asked(qp.num);
    native.to_error();
    for wr in lock(&qp.resting).drain(..) {
        // It is flushed.
        if native.post_send_one(wr).is_err() {
            qp.places.send.give_back(1);
        }
    }
    if before != IBV_QPS_ERR {
        Audience::get().last(qp.num);
    }
    Ok(())
}

/// End a queue pair below: its number is free, and it makes no completions any more, when those who are just joining it have let go of it too.
fn end(mut native: Option<Arc<Qp>>) {
    while let Some(held) = native {
        native = match Arc::try_unwrap(held) {
            Ok(last) => {
                last.destroy();
                None
            }
            Err(held) => {
                std::thread::yield_now();
                Some(held)
            }
        };
    }
}

/// To the first state: with a new queue pair below, of the same number.
fn reset(qp: &mut Turn<QpObj>) -> Result<(), Errno> {
    if qp.is_datagram() {
        let before = qp.alone(|qp| {
            qp.set_state(IBV_QPS_RESET);
            qp.ud.take()
        });
        let mut ud = before.ok_or(Errno::INVAL)?;
        ud.end();
        qp.forget_posted();
        let renewed = ud.renew();
        qp.alone(|qp| qp.ud = Some(ud));
        return renewed;
    }
    if qp.state.load(Ordering::Relaxed) == IBV_QPS_RESET && qp.native.is_some() {
        return Ok(());
    }
    if qp.is_persona() {
        persona::reset(qp.num);
    }
    let before = qp.alone(|qp| {
        qp.set_state(IBV_QPS_RESET);
        lock(&qp.resting).clear();
        qp.native.take()
    });
    // Not while others wait: it takes locks of the device, whose hooks must not wait for us.
    end(before);
    qp.forget_posted();
    Audience::get().anew(qp.num);
    let native = Arc::new(qp.pd.create_qp(&qp.init).map_err(super::errno)?);
    if qp.faults.is_some() {
        port::of(qp.ctx.which).add(&native);
    }
    qp.alone(|qp| qp.native = Some(native));
    Ok(())
}

/// `ibv_query_qp`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _attr_mask: c_int,
    init_attr: *mut ibv_qp_init_attr,
) -> c_int {
    status(|| {
        let qp = turn::<QpObj>(qp)?;
        if attr.is_null() || init_attr.is_null() {
            return Err(Errno::INVAL);
        }
        let mut filled = qp.attr();
        filled.qp_state = match qp.state() {
            // iWARP has one idle state, which its providers give as this one.
            IBV_QPS_RESET if !qp.is_persona() => IBV_QPS_INIT,
            state => state,
        };
        filled.cur_qp_state = filled.qp_state;
        filled.cap = qp.cap;
        if !qp.is_persona()
            && let Some((inbound, outbound)) = qp.native()?.depths()
        {
            filled.max_dest_rd_atomic = u8::try_from(inbound).unwrap_or(u8::MAX);
            filled.max_rd_atomic = u8::try_from(outbound).unwrap_or(u8::MAX);
        }
        let draining = filled.qp_state == IBV_QPS_SQD && qp.outstanding() > 0;
        filled.sq_draining = u8::from(draining);
        let c = qp.c();
        // SAFETY: a live object, and the caller's promise.
        unsafe {
            let base = &raw mut (*c).qp_base;
            (*base).state = filled.qp_state;
            attr.write(filled);
            init_attr.write(ibv_qp_init_attr {
                qp_context: (*base).qp_context,
                send_cq: (*base).send_cq,
                recv_cq: (*base).recv_cq,
                srq: (*base).srq,
                cap: qp.cap,
                qp_type: qp.kind,
                sq_sig_all: c_int::from(qp.init.sq_sig_all),
            });
        }
        Ok(())
    })
}

/// `ibv_query_qp_data_in_order`: nobody promises in which order bytes of one message appear.
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _op: ibv_wr_opcode,
    _flags: u32,
) -> c_int {
    0
}

/// `ibv_destroy_qp`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    status(|| {
        let qp = turn::<QpObj>(qp)?;
        if qp.ud.as_ref().is_some_and(|ud| ud.is_attached()) {
            return Err(Errno::BUSY);
        }
        Audience::get().remove(Of::Qp, qp.num);
        if qp.is_persona() {
            persona::reset(qp.num);
        }
        QpFaults::forget(qp.num());
        port::of(qp.ctx.which).remove(qp.num);
        let mut gone = qp.retire();
        end(gone.native.take());
        gone.ud = None;
        gone.forget_posted();
        Ok(())
    })
}

/// `ibv_set_ece`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_set_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    unsupported()
}

/// `ibv_query_ece`
///
/// # Safety
/// As its manual page says.
pub unsafe fn ibv_query_ece(_qp: *mut ibv_qp, _ece: *mut ibv_ece) -> c_int {
    unsupported()
}
