//! Creation of queue pairs: the checks of a program's request, the objects that a queue pair uses, and its number.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use weft_verbs::{Qp, QpInit, Rnr, XrcDomain};

use super::batch::Building;
use super::context::{Context, Ctx};
use super::cq::Cq;
use super::event_router::{EventRouter, Listener, Of};
use super::events::Subject;
use super::ex::{RC_OPS, UC_OPS, UD_OPS, builders};
use super::faults;
use super::object::{Guard, Kind, find};
use super::params::read_param;
use super::pd::Pd;
use super::persona;
use super::places;
use super::port;
use super::qp::{NO_CAP, QpObj};
use super::roce::{self, Roce};
use super::settings;
use super::srq::Srq;
use super::types::*;
use super::ud::Datagrams;
use super::users::Held;
use super::which::Which;
use super::wire::{self, Wire};
use super::xrc::Xrcd;
use crate::call::pointer;

/// The parameters of a new queue pair that both ways of creation have.
struct Wanted {
    common: ibv_qp_init_attr,
    pd: *mut ibv_pd,
    /// For targets of XRC, in place of the domain.
    xrcd: *mut ibv_xrcd,
    /// The operations of the extended calls, for an extended queue pair.
    ops: Option<u64>,
    /// It does not receive its own multicast messages.
    deaf_to_itself: bool,
}

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

/// The objects that a queue pair uses.
struct Base {
    ctx: Arc<Ctx>,
    native: weft_verbs::Pd,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    /// The queues of sends and of receives; targets of XRC have none.
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
            IBV_QPT_UC | IBV_QPT_UD if persona => {}
            IBV_QPT_XRC_SEND if persona => wire::needs_xrc()?,
            // `ibv_create_qp` cannot pass its XRC domain.
            IBV_QPT_XRC_RECV if persona => return Err(Errno::INVAL),
            IBV_QPT_UC | IBV_QPT_UD | IBV_QPT_RAW_PACKET | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV
            | IBV_QPT_DRIVER => return Err(Errno::OPNOTSUPP),
            _ => return Err(Errno::INVAL),
        }
        let send_cq = find::<Cq>(common.send_cq)?;
        let recv_cq = if common.qp_type == IBV_QPT_XRC_SEND {
            // It has no receives.
            find::<Cq>(common.send_cq)?
        } else {
            find::<Cq>(common.recv_cq)?
        };
        let srq = (!common.srq.is_null()).then(|| find::<Srq>(common.srq));
        let srq = srq.transpose()?;
        Ok(Base {
            ctx: Arc::clone(&pd.ctx),
            native: pd.native.clone(),
            context: pd.context(),
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

    /// The parameters of the native queue pair.
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

/// The native queue pair, one of three, and the persona's claim on its number.
#[derive(Default)]
struct Natives {
    number: Option<persona::Number>,
    native: Option<Arc<Qp>>,
    ud: Option<Box<Datagrams>>,
    roce: Option<Box<Roce>>,
}

/// Numbers of listeners that are tried for one that no datagram queue pair has.
const TRIES: usize = 1 << 12;

/// Makes the native queue pair, and writes its number to `init`.
fn natives(base: &Base, wanted: &Wanted, init: &mut QpInit) -> Result<Natives, Errno> {
    let (pd, kind) = (&base.native, wanted.common.qp_type);
    let device = pd.device();
    let persona = base.ctx.which == Which::Persona;
    let mut made = Natives::default();
    if kind == IBV_QPT_UD && wire::has_roce() {
        let down = port::of(base.ctx.which).down();
        let make = |init: &QpInit| Datagrams::on_roce(pd, init, down, wanted.deaf_to_itself);
        made.ud = Some(Box::new(roce::numbered(&device, init, make)?));
    } else if kind == IBV_QPT_UD {
        let (number, port) = persona::reserve_datagram(&device)?;
        init.num = Some(number.get());
        made.number = Some(number);
        let down = port::of(base.ctx.which).down();
        let ud = Datagrams::new(pd, &port, init, down, wanted.deaf_to_itself);
        let ud = ud.map_err(super::errno)?;
        made.ud = Some(Box::new(ud));
    } else if persona && wire::asked() == Wire::Roce && matches!(kind, IBV_QPT_RC | IBV_QPT_UC) {
        let which = base.ctx.which;
        let faults = |num| faults::of_queue_pair(num, which);
        let make = |init: &QpInit| Roce::new(pd, init, kind == IBV_QPT_UC, faults);
        made.roce = Some(Box::new(roce::numbered(&device, init, make)?));
    } else if persona {
        // Those that datagram queue pairs of RoCE have, which count in the same range under `auto`.
        let mut taken = Vec::new();
        let (number, native) = loop {
            let number = persona::reserve(&device)?;
            init.num = Some(number.get());
            match pd.create_qp(init) {
                Err(weft_verbs::Error::Invalid(_)) if wire::has_roce() && taken.len() < TRIES => {
                    taken.push(number);
                }
                made => break (number, made.map_err(super::errno)?),
            }
        };
        made.number = Some(number);
        made.native = Some(Arc::new(native));
    } else {
        let native = numbered(init, |init| pd.create_qp(init))?;
        made.native = Some(Arc::new(native));
    }
    Ok(made)
}

fn create(wanted: &Wanted) -> Result<Guard<QpObj>, Errno> {
    let base = Base::of(wanted)?;
    let common = &wanted.common;
    let mut cap = common.cap;
    match common.qp_type {
        // Their receives come from the shared queue.
        _ if base.srq.is_some() => (cap.max_recv_wr, cap.max_recv_sge) = (0, 0),
        IBV_QPT_XRC_SEND => (cap.max_recv_wr, cap.max_recv_sge) = (0, 0),
        IBV_QPT_XRC_RECV => cap = NO_CAP,
        _ => {}
    }
    // Programs rely on some inline data without a request for it.
    cap.max_inline_data = cap.max_inline_data.max(LEAST_INLINE);
    let device = base.native.device();
    check_cap(&cap, &device.attr().limits)?;
    let mut init = base.init(wanted, &cap);
    init.comp_counters = Some(Arc::default());
    let Natives {
        number,
        native,
        ud,
        roce,
    } = natives(&base, wanted, &mut init)?;
    let num = init.num.ok_or(Errno::INVAL)?;
    places::of(num).clear();
    let mut attr = ibv_qp_attr::zeroed();
    attr.path_mtu = IBV_MTU_1024;
    attr.port_num = 1;
    let which = base.ctx.which;
    let changes = which == Which::Persona
        && wire::asked() == Wire::Auto
        && matches!(common.qp_type, IBV_QPT_RC | IBV_QPT_UC);
    let faults = native.as_ref().and_then(|native| {
        let faults = faults::of_queue_pair(num, which)?;
        port::of(which).add(native);
        Some(faults)
    });
    let faults = faults.or_else(|| roce.as_ref()?.faults());
    let (names, handles) = match &base.cqs {
        Some([send, recv]) => {
            // The handles that the program passed.
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
                ud,
                roce,
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
                held: base.held,
                counted: Mutex::default(),
                further: false,
                changes,
                kept: Mutex::default(),
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
    let listener = Listener::new(&made.ctx, &made.subject, made.is_srq());
    EventRouter::get().add(Of::Qp, num, listener);
    Ok(made)
}

/// Makes a queue pair with a number of its own. Those of `weft0` count up from a start that a peer cannot predict.
fn numbered<T>(
    init: &mut QpInit,
    mut make: impl FnMut(&QpInit) -> Result<T, weft_verbs::Error>,
) -> Result<T, Errno> {
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
        // InfiniBand reserves 0 and 1.
        if num < 2 {
            continue;
        }
        init.num = Some(num);
        match make(init) {
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
            deaf_to_itself: false,
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
        // SAFETY: the caller's promise.
        let asked = unsafe { read_param(attr) }?;
        let flags = if asked.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 {
            asked.create_flags
        } else {
            0
        };
        let able = match asked.qp_type {
            IBV_QPT_UD => IBV_QP_CREATE_BLOCK_SELF_MCAST_LB,
            _ => 0,
        };
        if asked.comp_mask & !KNOWN != 0 || flags & !able != 0 {
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
            deaf_to_itself: flags & IBV_QP_CREATE_BLOCK_SELF_MCAST_LB != 0,
        };
        let made = create(&wanted)?;
        // SAFETY: as above.
        unsafe { (*attr).cap = made.cap };
        Ok(made.handle())
    })
}
