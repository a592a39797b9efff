//! The wire of `weft_ib0` (`WEFT_IB_WIRE`), and which one a connected queue pair takes under `auto` (docs/spec/persona.md, "Which wire").
//!
//! Under `auto` a queue pair begins as the persona's: its number has the port of a listener, and is good for RoCE too. Once its peer is known it stays that,
//! or a queue pair of RoCE takes its place, with the same number and the receives that are posted.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use weft_verbs::cm::FIRST_NUMBER;
use weft_verbs::ext::{QpExt, listening_user};
use weft_verbs::{Qp, QpState, RecvWr, settings};

use super::access::rights;
use super::faults::End;
use super::gid::{Gid, among_addresses, is_link_local};
use super::object::{Name, PerFork, Turn, lock, turn};
use super::qp::{QpObj, end};
use super::roce::Roce;
use super::types::*;
use super::{os_errno, persona, port};
use crate::once::ForkOnce;

/// How long a step to RTR waits for the kernel to name the user of a listener that is too busy.
const BUSY: Duration = Duration::from_secs(1);

/// What queue pairs of `weft_ib0` put on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    /// iWARP or shared memory, as docs/spec/persona.md says.
    Persona,
    Roce,
    /// A connected queue pair takes the one of the two that its peer needs; datagrams are RoCE.
    Auto,
}

/// The wire that the environment asks for.
pub(crate) fn asked() -> Wire {
    static ASKED: ForkOnce<Wire> = ForkOnce::new();
    let read = || match settings::IB_WIRE {
        wire if wire.is("roce") == Ok(true) => Wire::Roce,
        wire if wire.is("auto") == Ok(true) => Wire::Auto,
        _ => Wire::Persona,
    };
    *ASKED.get_or_init(read)
}

/// True if datagrams of `weft_ib0` are RoCE, and connected queue pairs may be.
pub(crate) fn has_roce() -> bool {
    asked() != Wire::Persona
}

/// True if `weft_ib0` has XRC, which is iWARP or shared memory and reaches only peers on weft: with RoCE alone that is not what the program was promised.
pub(crate) fn has_xrc() -> bool {
    asked() != Wire::Roce
}

/// `EOPNOTSUPP`, with what to do, on a device without XRC.
pub(crate) fn needs_xrc() -> Result<(), Errno> {
    if has_xrc() {
        return Ok(());
    }
    tracing::warn!(
        "XRC is not supported over RoCE: use RC, or WEFT_IB_WIRE=auto (`--wire auto`), where XRC reaches peers on weft"
    );
    Err(Errno::OPNOTSUPP)
}

/// A choice, and the reason for it.
pub(crate) type Choice = (Wire, &'static str);

/// One of two queue pairs that are joined by number.
#[derive(Clone, Copy, Debug)]
struct Side {
    num: u32,
    /// The user that listens on all addresses of this host at the port in the number.
    user: Option<u32>,
}

/// The wire between two queue pairs that are joined by number. It depends on the unordered pair and on what the kernel says of both, so each side comes to the
/// same result, whenever it asks.
fn between(apart: Option<&'static str>, sides: [Side; 2]) -> Choice {
    let [one, other] = sides;
    if let Some(why) = apart {
        return (Wire::Roce, why);
    }
    if sides.iter().any(|side| side.num < FIRST_NUMBER) {
        return (
            Wire::Roce,
            "a queue pair on this host has a number of RoCE alone",
        );
    }
    match (one.user, other.user) {
        (Some(one), Some(other)) if one == other => {
            (Wire::Persona, "the peer is on this host, and of our user")
        }
        (Some(_), Some(_)) => (Wire::Roce, "the peer on this host is another user's"),
        _ => (
            Wire::Roce,
            "a side does not listen for peers of this host (WEFT_LOCAL=off, or the peer is no process of weft)",
        ),
    }
}

/// True if this is an address of this host; `scope` is the interface of a link-local one.
pub(crate) fn is_here(ip: IpAddr, scope: u32) -> Result<bool, Errno> {
    let own = |gid: &Gid| gid.ip == ip && (!is_link_local(ip) || gid.ifindex == scope);
    Ok(ip.is_loopback() || among_addresses(|all| all.iter().any(own))?)
}

/// Why the queue pairs behind these two GIDs are not on one host, or do not count as that. On one host both sides say the same: a link-local GID of the peer is
/// looked for without our own interface, which may be another one than the peer's.
fn apart(own: IpAddr, peer: IpAddr, all: &[Gid]) -> Option<&'static str> {
    let at = |ip| all.iter().filter(move |gid| gid.ip == ip);
    let together = match [own, peer].map(is_link_local) {
        [false, false] => peer.is_loopback() || at(peer).next().is_some(),
        [true, true] => {
            let interfaces = |ip| at(ip).map(|gid| gid.ifindex);
            interfaces(own).count() == 1 && interfaces(own).eq(interfaces(peer))
        }
        _ => return Some("one GID is link-local and the other one is not"),
    };
    (!together).then_some("the peer is on another host")
}

/// The side with this number.
///
/// # Errors
/// `EAGAIN` for a listener that stays too busy; as `socket(2)`. A guess would be worse: the peer may come to the other result.
fn side(num: u32) -> Result<Side, Errno> {
    let at = SocketAddr::from((Ipv4Addr::UNSPECIFIED, (num >> 8) as u16));
    let until = Instant::now() + BUSY;
    loop {
        match listening_user(at) {
            Ok(user) => return Ok(Side { num, user }),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if Instant::now() >= until {
                    tracing::warn!(
                        num,
                        "the process of this queue pair does not run, or is too busy: try again"
                    );
                    return Err(Errno::AGAIN);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(os_errno(&error)),
        }
    }
}

/// The side of our own queue pair. Its socket is there as long as the process, so one answer is enough: a job that joins thousands of queue pairs at once does
/// not fill the queue that its peers need.
fn own_side(num: u32) -> Result<Side, Errno> {
    static OWN: PerFork<Mutex<HashMap<u32, u32>>> = PerFork::new();
    let port = num >> 8;
    if let Some(&user) = lock(OWN.get()).get(&port) {
        let user = Some(user);
        return Ok(Side { num, user });
    }
    let side = side(num)?;
    if let Some(user) = side.user {
        lock(OWN.get()).insert(port, user);
    }
    Ok(side)
}

/// Before RTR: the queue pair takes the wire for the peer that `attr` names.
///
/// # Errors
/// `EINVAL` for an impossible peer; `EAGAIN`; as creating a queue pair.
pub(super) fn take_for(qp: &mut Turn<QpObj>, attr: &ibv_qp_attr) -> Result<(), Errno> {
    let (own, ip, _) = persona::way(&attr.ah_attr.grh)?;
    let apart = among_addresses(|all| apart(own.ip, ip, all))?;
    let num = |num| Side { num, user: None };
    let mut sides = [num(qp.num), num(attr.dest_qp_num)];
    if apart.is_none() && sides.iter().all(|side| side.num >= FIRST_NUMBER) {
        sides = [own_side(qp.num)?, side(attr.dest_qp_num)?];
    }
    let choice = between(apart, sides);
    say(qp.num, ip, choice);
    turn_to(qp, choice.0)
}

/// The log of a choice.
fn say(qp_num: u32, peer: IpAddr, (wire, why): Choice) {
    let wire = if wire == Wire::Roce { "roce" } else { "weft" };
    tracing::info!(qp_num, %peer, wire, why, "WEFT_IB_WIRE=auto");
}

/// The queue pair of a program takes the wire that was chosen for it.
///
/// # Errors
/// As [`turn_to`]; `EINVAL` if it has been destroyed.
pub(crate) fn take(name: Name<QpObj>, peer: IpAddr, choice: Choice) -> Result<(), Errno> {
    let handle = name.get()?.handle();
    let mut qp = turn::<QpObj>(handle)?;
    if qp.name() != name {
        return Err(Errno::INVAL);
    }
    say(qp.num, peer, choice);
    turn_to(&mut qp, choice.0)
}

/// A native queue pair of the persona for this object.
pub(super) fn persona_qp(qp: &QpObj) -> Result<Arc<Qp>, Errno> {
    let native = Arc::new(qp.pd.create_qp(&qp.init).map_err(super::errno)?);
    if qp.faults.is_some() {
        port::of(qp.ctx.which).add(&native);
    }
    Ok(native)
}

/// Replaces the native queue pair by one of this wire, if it has another one. Its receives move.
///
/// # Errors
/// `EINVAL` outside of INIT, and if it has failed; as creating a queue pair: the call may be repeated, and the receives are still there.
fn turn_to(qp: &mut Turn<QpObj>, to: Wire) -> Result<(), Errno> {
    let has = match (&qp.native, &qp.roce) {
        (Some(_), _) => Some(Wire::Persona),
        (None, Some(_)) => Some(Wire::Roce),
        (None, None) => None,
    };
    if !qp.changes || has == Some(to) {
        return Ok(());
    }
    let ended = qp.native.as_ref().map(|native| native.state()) == Some(QpState::Error)
        || qp.roce.as_ref().is_some_and(|roce| roce.has_failed());
    if qp.state() != IBV_QPS_INIT || ended {
        return Err(Errno::INVAL);
    }
    let (native, roce) = qp.alone(|qp| {
        // Other threads may go on to post.
        lock(&qp.kept).get_or_insert_default();
        (qp.native.take(), qp.roce.take())
    });
    // Not while other threads wait: it takes locks of the device, whose hooks must not wait for us.
    let mut receives = Vec::new();
    if let Some(native) = native {
        persona::reset(qp.num);
        port::of(qp.ctx.which).remove(qp.num);
        receives = native.take_receives();
        end(Some(native));
    }
    if let Some(mut roce) = roce {
        receives = roce.take_receives();
        roce.end();
    }
    if let Some(kept) = &mut *lock(&qp.kept) {
        kept.splice(..0, receives.into_iter().map(|wr| (wr, None)));
    }
    let made = put(qp, to);
    if made.is_err()
        && let Err(errno) = put(qp, Wire::Persona)
    {
        tracing::warn!(qp_num = qp.num, %errno, "posted receives wait for the next step of this queue pair");
    }
    made
}

/// True if [`turn_to`] could make no native queue pair.
pub(super) fn is_missing(qp: &QpObj) -> bool {
    qp.changes && qp.native.is_none() && qp.roce.is_none()
}

/// Makes the native queue pair of this wire, where there is none, and posts what was kept.
///
/// # Errors
/// As creating a queue pair.
pub(super) fn put(qp: &mut Turn<QpObj>, to: Wire) -> Result<(), Errno> {
    let access = rights(qp.attr().qp_access_flags);
    if to == Wire::Roce {
        let faults = qp.faults.clone();
        let unreliable = qp.kind == IBV_QPT_UC;
        let made = Roce::new(&qp.pd, &qp.init, unreliable, |_| faults);
        let made = Box::new(made.map_err(super::errno)?);
        made.set_access(access)?;
        let native = made.native()?;
        persona::refuse(qp.num);
        let ends = qp.alone(|qp| {
            let ends = post_kept(qp, |wr| made.post_recv(wr));
            qp.roce = Some(made);
            ends
        });
        for end in &ends {
            end.carry_out_on(&native);
        }
    } else {
        let made = persona_qp(qp)?;
        // It may have been RoCE's, and its peer is let in from now on.
        persona::reset(qp.num);
        made.set_access(access);
        let native = Arc::clone(&made);
        let ends = qp.alone(|qp| {
            let post = |wr: &RecvWr| made.post_recv(std::slice::from_ref(wr));
            let ends = post_kept(qp, |wr| post(wr).map_err(super::refused));
            qp.native = Some(made);
            ends
        });
        for end in &ends {
            end.carry_out(&native);
        }
    }
    Ok(())
}

/// Posts the receives that were kept. There is room: they have been counted. Returns the ends that `WEFT_FAULTS` has for them, to be carried out when other
/// threads no longer wait.
fn post_kept(qp: &QpObj, post: impl Fn(&RecvWr) -> Result<(), Errno>) -> Vec<End> {
    let mut ends = Vec::new();
    for (wr, end) in lock(&qp.kept).take().unwrap_or_default() {
        ends.extend(end);
        if let Err(errno) = post(&wr) {
            tracing::warn!(qp_num = qp.num, %errno, "a posted receive was lost");
            qp.places.recv.give_back(1);
        }
    }
    ends
}

#[cfg(test)]
#[allow(clippy::undocumented_unsafe_blocks)] // every call is as its manual page says
mod tests {
    use std::ffi::CStr;
    use std::ptr::null_mut;

    use super::super::{
        ibv_alloc_pd, ibv_create_cq, ibv_create_qp, ibv_destroy_qp, ibv_free_device_list,
        ibv_get_device_list, ibv_get_device_name, ibv_modify_qp, ibv_open_device,
    };
    use super::*;

    /// A queue pair of `weft_ib0` in INIT that can take two wires, and its completion queue.
    fn undecided() -> (*mut ibv_qp, *mut ibv_cq) {
        let (qp, cq) = unsafe {
            let list = ibv_get_device_list(null_mut());
            let mut at = list;
            while CStr::from_ptr(ibv_get_device_name(*at)) != c"weft_ib0" {
                at = at.add(1);
            }
            let ctx = ibv_open_device(*at);
            ibv_free_device_list(list);
            let pd = ibv_alloc_pd(ctx);
            let cq = ibv_create_cq(ctx, 8, null_mut(), null_mut(), 0);
            let mut init = ibv_qp_init_attr::zeroed();
            (init.send_cq, init.recv_cq, init.qp_type) = (cq, cq, IBV_QPT_RC);
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (4, 1);
            (ibv_create_qp(pd, &raw mut init), cq)
        };
        turn::<QpObj>(qp).unwrap().alone(|qp| qp.changes = true);
        let mut attr = ibv_qp_attr::zeroed();
        (attr.qp_state, attr.port_num) = (IBV_QPS_INIT, 1);
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        assert_eq!(unsafe { ibv_modify_qp(qp, &raw mut attr, mask as i32) }, 0);
        (qp, cq)
    }

    fn to_error(qp: *mut ibv_qp) -> i32 {
        let mut attr = ibv_qp_attr::zeroed();
        attr.qp_state = IBV_QPS_ERR;
        unsafe { ibv_modify_qp(qp, &raw mut attr, IBV_QP_STATE as i32) }
    }

    #[test]
    fn a_queue_pair_that_cannot_take_a_wire_keeps_its_receives() {
        let (handle, cq) = undecided();
        let mut qp = turn::<QpObj>(handle).unwrap();
        qp.post_receive(&RecvWr::new(1)).unwrap();
        // No number of RoCE: the persona's comes back.
        let num = qp.alone(|qp| qp.init.num.replace(1));
        assert!(turn_to(&mut qp, Wire::Roce).is_err());
        assert!(!is_missing(&qp));
        qp.post_receive(&RecvWr::new(2)).unwrap();
        let posted = qp.native().unwrap().take_receives();
        assert_eq!(posted.iter().map(|wr| wr.id).collect::<Vec<_>>(), [1, 2]);
        for wr in posted {
            qp.native().unwrap().post_recv(&[wr]).unwrap();
        }
        // Neither can be made.
        let most = qp.alone(|qp| {
            qp.init.num = num;
            std::mem::replace(&mut qp.init.max_sge, u32::MAX)
        });
        assert!(turn_to(&mut qp, Wire::Roce).is_err());
        assert!(is_missing(&qp));
        qp.post_receive(&RecvWr::new(3)).unwrap();
        drop(qp);
        assert_ne!(to_error(handle), 0);
        let mut qp = turn::<QpObj>(handle).unwrap();
        assert_eq!(
            qp.state(),
            IBV_QPS_INIT,
            "a call that failed changes nothing"
        );
        qp.alone(|qp| qp.init.max_sge = most);
        drop(qp);
        assert_eq!(to_error(handle), 0);
        let mut wcs = [ibv_wc::zeroed(); 4];
        let got = unsafe { (*(*cq).context).ops.poll_cq.unwrap()(cq, 4, wcs.as_mut_ptr()) };
        assert_eq!(got, 3);
        assert_eq!(wcs.map(|wc| wc.wr_id)[..3], [1, 2, 3]);
        assert!(wcs[..3].iter().all(|wc| wc.status == IBV_WC_WR_FLUSH_ERR));
        assert_eq!(unsafe { ibv_destroy_qp(handle) }, 0);
    }

    /// A queue pair whose end `WEFT_FAULTS` has brought is not replaced by one that lives.
    #[test]
    fn a_queue_pair_that_has_failed_takes_no_wire() {
        let (handle, _) = undecided();
        let mut qp = turn::<QpObj>(handle).unwrap();
        qp.native().unwrap().to_error();
        assert_eq!(turn_to(&mut qp, Wire::Roce), Err(Errno::INVAL));
        drop(qp);
        assert_eq!(to_error(handle), 0);
        assert_eq!(unsafe { ibv_destroy_qp(handle) }, 0);
    }

    /// What a process asks for, and its user. Whoever has the persona has its listener from the creation of the queue pair on.
    #[derive(Clone, Copy, Debug)]
    struct Process {
        wire: Wire,
        user: u32,
        local: bool,
        upper: bool,
    }

    impl Process {
        fn all() -> impl Iterator<Item = Process> {
            (0..24).map(|n: u32| Process {
                wire: [Wire::Persona, Wire::Roce, Wire::Auto][n as usize % 3],
                user: n / 3 % 2,
                local: (n / 6).is_multiple_of(2),
                upper: n / 12 == 0,
            })
        }

        /// What the other side can see of its queue pair.
        fn side(self) -> Side {
            let upper = self.upper && self.wire != Wire::Roce;
            let listens = self.local && self.wire != Wire::Roce;
            Side {
                num: if upper { FIRST_NUMBER | 7 } else { 7 },
                user: listens.then_some(self.user),
            }
        }

        /// The wire that it takes for this peer.
        fn takes(self, is_here: bool, peer: Process) -> Wire {
            let apart = (!is_here).then_some("the peer is on another host");
            match self.wire {
                Wire::Auto => between(apart, [self.side(), peer.side()]).0,
                wire => wire,
            }
        }
    }

    /// Nothing in the rule changes between the creation of both queue pairs and their steps to RTR, so the order of these does not matter: all pairs of
    /// processes are all cases.
    #[test]
    fn both_sides_take_the_same_wire() {
        let mut met = 0;
        for is_here in [true, false] {
            for one in Process::all() {
                for other in Process::all() {
                    let (a, b) = (one.takes(is_here, other), other.takes(is_here, one));
                    let autos = [one, other].map(|side| side.wire == Wire::Auto);
                    let persona = |side: Process| side.wire == Wire::Persona;
                    match autos {
                        [true, true] => assert_eq!(a, b, "{one:?} {other:?}"),
                        [false, false] => {}
                        // Everybody who is not the persona's is reached.
                        _ if !persona(one) && !persona(other) => {
                            assert_eq!((a, b), (Wire::Roce, Wire::Roce));
                        }
                        // The persona alone is reached where shared memory is possible.
                        _ => {
                            let can = is_here
                                && one.user == other.user
                                && [one, other].iter().all(|side| side.local && side.upper);
                            assert_eq!(a == b, can, "{one:?} {other:?}");
                            met += u32::from(can);
                        }
                    }
                    let shared = is_here
                        && one.user == other.user
                        && [one, other]
                            .iter()
                            .all(|side| side.wire == Wire::Auto && side.local && side.upper);
                    if shared {
                        assert_eq!(a, Wire::Persona, "{one:?} {other:?}");
                    }
                }
            }
        }
        assert_eq!(met, 4);
    }

    /// Whatever addresses the interfaces of a host have, its two queue pairs come to the same result.
    #[test]
    fn both_sides_are_apart_or_neither() {
        let ips = ["fe80::1", "fe80::2", "fd00::1", "192.0.2.1", "127.0.0.1"];
        let ips = ips.map(|ip| ip.parse::<IpAddr>().unwrap());
        let places: Vec<_> = (0..10)
            .map(|n| Gid {
                ip: ips[n / 2],
                ifindex: 1 + n as u32 % 2,
            })
            .collect();
        let mut together = 0;
        for has in 0..1_u32 << places.len() {
            let those = places.iter().enumerate().filter(|(n, _)| has >> n & 1 == 1);
            let all: Vec<Gid> = those.map(|(_, gid)| *gid).collect();
            for own in &all {
                for peer in &all {
                    let (one, other) = (apart(own.ip, peer.ip, &all), apart(peer.ip, own.ip, &all));
                    assert_eq!(one, other, "{own:?} {peer:?} {all:?}");
                    together += u32::from(one.is_none());
                    if one.is_none() && is_link_local(own.ip) {
                        assert_eq!(own.ifindex, peer.ifindex);
                    }
                }
            }
            assert_eq!(
                apart(ips[2], [192, 0, 2, 9].into(), &all),
                Some("the peer is on another host")
            );
        }
        assert!(together > 0);
    }

    #[test]
    fn an_address_of_loopback_is_here_and_one_for_documentation_is_not() {
        assert_eq!(is_here([127, 0, 0, 9].into(), 0), Ok(true));
        assert_eq!(is_here([192, 0, 2, 1].into(), 0), Ok(false));
    }
}
