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
use weft_verbs::{Qp, RecvWr, settings};

use super::access::rights;
use super::gid::{Gid, gids, is_link_local};
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
fn between(is_here: bool, sides: [Side; 2]) -> Choice {
    let [one, other] = sides;
    if !is_here {
        return (Wire::Roce, "the peer is on another host");
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
    Ok(ip.is_loopback() || gids()?.iter().any(|gid| !gid.is_empty() && own(gid)))
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
    let (_, ip, scope) = persona::way(&attr.ah_attr.grh)?;
    let is_here = is_here(ip, scope)?;
    let num = |num| Side { num, user: None };
    let mut sides = [num(qp.num), num(attr.dest_qp_num)];
    if is_here && sides.iter().all(|side| side.num >= FIRST_NUMBER) {
        sides = [own_side(qp.num)?, side(attr.dest_qp_num)?];
    }
    let choice = between(is_here, sides);
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
/// `EINVAL` outside of INIT; as creating a queue pair: the call may be repeated, and receives are kept until then.
fn turn_to(qp: &mut Turn<QpObj>, to: Wire) -> Result<(), Errno> {
    let has = match (&qp.native, &qp.roce) {
        (Some(_), _) => Some(Wire::Persona),
        (None, Some(_)) => Some(Wire::Roce),
        (None, None) => None,
    };
    if !qp.changes || has == Some(to) {
        return Ok(());
    }
    if qp.state() != IBV_QPS_INIT {
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
        kept.splice(..0, receives);
    }
    let access = rights(qp.attr().qp_access_flags);
    if to == Wire::Roce {
        let faults = qp.faults.clone();
        let unreliable = qp.kind == IBV_QPT_UC;
        let made = Roce::new(&qp.pd, &qp.init, unreliable, |_| faults);
        let made = Box::new(made.map_err(super::errno)?);
        made.set_access(access)?;
        qp.alone(|qp| {
            post_kept(qp, |wr| made.post_recv(wr));
            qp.roce = Some(made);
        });
    } else {
        let made = persona_qp(qp)?;
        made.set_access(access);
        qp.alone(|qp| {
            let post = |wr: &RecvWr| made.post_recv(std::slice::from_ref(wr));
            post_kept(qp, |wr| post(wr).map_err(super::refused));
            qp.native = Some(made);
        });
    }
    Ok(())
}

/// Posts the receives that were kept. There is room: they have been counted.
fn post_kept(qp: &QpObj, post: impl Fn(&RecvWr) -> Result<(), Errno>) {
    for wr in lock(&qp.kept).take().unwrap_or_default() {
        if let Err(errno) = post(&wr) {
            tracing::warn!(qp_num = qp.num, %errno, "a posted receive was lost");
            qp.places.recv.give_back(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            match self.wire {
                Wire::Auto => between(is_here, [self.side(), peer.side()]).0,
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

    #[test]
    fn an_address_of_loopback_is_here_and_one_for_documentation_is_not() {
        assert_eq!(is_here([127, 0, 0, 9].into(), 0), Ok(true));
        assert_eq!(is_here([192, 0, 2, 1].into(), 0), Ok(false));
    }
}
