//! Datagrams to other hosts as Sends of datagram-iWARP, on the program's own socket (`--datagrams`).
//!
//! Addresses, readiness, errors and order stay the kernel's. A send whose receiver takes frames goes as one; every other goes as it is. What a socket
//! receives is looked at from the start of the process on, whether or not it has told the broker of that socket: so a thread that waits already and a
//! program that has been started again take frames as well. A socket that two processes share takes none: one of them may read it in its own way.
//! `weft_run::ud` has frames and messages.
//!
//! # Safety
//!
//! The program's buffers are as its call says.

use libc::{c_int, c_void, iovec, socklen_t, ssize_t};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

use weft_ring::checked;
use weft_run::dgram::{self as rules, Route};
use weft_run::meet::Why;
use weft_run::ud::{self, Frame, Heard, Kind, LEASE_MS, MESSAGE, Message, Note};
use weft_sys::{settings as environment, unix};

use super::addr::{EASY, To, connected, source};
use super::buffer::Buffer;
use super::{Dgram, now_ms};
use crate::hidden::Own;
use crate::iov::{copy_pieces, total};
use crate::kernel::{self, borrowed};
use crate::private::{Guards, Held, Private};
use crate::{handlers, ledger, next, set_errno, settings, signal};

/// Destinations of one socket, and of the process, that are followed.
const DESTS: usize = 16 << 10;
const ROUTES: usize = 64 << 10;
/// Hosts that are asked.
const HOSTS: usize = 64;
/// A host without a broker, and a broker that is gone, are not tried for this time.
const AGAIN_MS: u64 = 60_000;
/// The same after one that has answered.
const SOON_MS: u64 = 1000;
/// The first pause before a destination is asked for again that takes no frames, and the longest.
const PAUSE_MS: u64 = 250;
const LONGEST_PAUSE_MS: u64 = 64_000;
/// How long a datagram that may be a frame waits for the broker's `Q_Key`, once in a process.
const KEY_MS: c_int = 200;
/// Frames up to this length, with the headers of UDP and IP, are one packet on all paths: IPv6's least MTU.
const SAFE_MTU: usize = 1280;
/// Answers read at a time.
const ANSWERS: usize = 256;

static WANTED: AtomicBool = AtomicBool::new(false);
/// The broker's `Q_Key` and the one before; [`NO_KEY`]: none.
static QKEYS: [AtomicU64; 2] = [const { AtomicU64::new(NO_KEY) }; 2];
const NO_KEY: u64 = u64::MAX;
/// Of the frames that this process sends.
static INCARNATION: AtomicU32 = AtomicU32::new(0);
/// Whether a datagram has waited for the key.
static AWAITED: AtomicBool = AtomicBool::new(false);
/// Number of the session in which sockets are told of now; 0: there is none, and the next is not tried before the other.
static NUMBER: AtomicU32 = AtomicU32::new(0);
static NEXT_SESSION: AtomicU64 = AtomicU64::new(0);
/// When the answers were last looked for.
static LOOKED: AtomicU64 = AtomicU64::new(0);
pub(super) static COUNTS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
const SENT: usize = 0;
pub(super) const RECEIVED: usize = 1;
pub(super) const REFUSED: usize = 2;

/// What is known of a destination; answers are written by whichever thread reads them.
#[derive(Default)]
struct Answer {
    qkey: AtomicU32,
    /// The answer counts until this time; 0: there is none.
    until: AtomicU64,
    /// The next question is due then, after this pause.
    next: AtomicU64,
    pause: AtomicU64,
    /// The longest datagram that is one packet as far as the kernel knows; looked at with each question.
    packet: AtomicUsize,
}

struct Dest {
    count: u64,
    /// From where, and what is known of it; `None`: it stays plain, or is not looked at yet.
    way: Option<Way>,
}

struct Way {
    route: Route,
    answer: Arc<Answer>,
}

/// A socket's destinations.
#[derive(Default)]
pub(crate) struct Dests(HashMap<SocketAddr, Dest>);

struct Host {
    ip: IpAddr,
    /// The way of the questions; `None`: no broker there.
    wire: Option<Own>,
    /// The broker there has answered.
    has_answered: bool,
    /// It is not asked before.
    next: u64,
}

/// The process's ties to its broker.
pub(crate) struct Process {
    pub(super) session: Option<Own>,
    /// Sessions so far: sockets are told of in each.
    sessions: u32,
    hosts: Vec<Host>,
    routes: Option<HashMap<Route, Arc<Answer>>>,
}

static PROCESS: Private<Process> = Private::new(
    Guards::Frames,
    Process {
        session: None,
        sessions: 0,
        hosts: Vec::new(),
        routes: None,
    },
);

/// At the start of the process, which follows connections to other hosts if `hosts`.
pub(crate) fn start(hosts: bool) {
    let on = hosts && environment::RUN_DATAGRAMS.is("on") == Ok(true);
    WANTED.store(on, SeqCst);
}

#[inline]
fn is_wanted() -> bool {
    WANTED.load(Relaxed) && !settings::is_off()
}

/// A socket is new: from the first one on the process asks for the broker's `Q_Key`.
pub(crate) fn followed() {
    if is_wanted() && NUMBER.load(Relaxed) == 0 {
        with_process(Process::open_session);
    }
}

/// Number of the session in which sockets are told of now; 0: none.
pub(super) fn number() -> u32 {
    NUMBER.load(SeqCst)
}

pub(super) fn with_process<T>(f: impl FnOnce(&mut Process) -> T) -> Option<T> {
    let mut process = PROCESS.lock_once()?;
    let errno = crate::errno();
    let done = f(&mut process);
    set_errno(errno);
    Some(done)
}

/// Returns true if what sockets receive is looked at.
#[inline]
pub(crate) fn are_taken() -> bool {
    // In a sandbox no call may be made that the program does not make.
    WANTED.load(Relaxed) && !handlers::are_given_back()
}

/// Returns true if what this socket receives is looked at.
#[inline]
pub(crate) fn looks_at(d: &Dgram) -> bool {
    are_taken() && !d.own_calls.load(Relaxed)
}

#[inline]
pub(super) fn has_key() -> bool {
    QKEYS[0].load(Relaxed) != NO_KEY
}

pub(super) fn qkeys() -> [u32; 2] {
    let [now, before] = [&QKEYS[0], &QKEYS[1]].map(|key| key.load(Relaxed));
    [now, if before == NO_KEY { now } else { before }].map(|key| key as u32)
}

/// A program that was started in the place of another one gets that one's frames before its broker's first word.
#[cold]
pub(super) fn await_key() {
    if !is_wanted() || AWAITED.swap(true, SeqCst) {
        return;
    }
    let wire = with_process(|process| {
        process.open_session();
        process.session.as_ref().map(|wire| wire.0)
    });
    if let Some(Some(wire)) = wire {
        let errno = crate::errno();
        kernel::poll_one(wire, libc::POLLIN, KEY_MS);
        set_errno(errno);
        with_process(Process::hear);
    }
}

impl Process {
    /// Greets the broker, if that is due. Nobody waits for its answer.
    fn open_session(&mut self) {
        let now = now_ms();
        if self.session.is_some() || now < NEXT_SESSION.load(Relaxed) {
            return;
        }
        NEXT_SESSION.store(now + SOON_MS, Relaxed);
        match ud::session() {
            Ok(Some(wire)) => {
                self.session = Own::new(wire);
                if INCARNATION.load(Relaxed) == 0 {
                    INCARNATION.store(ud::incarnation(), Relaxed);
                }
                self.hear();
            }
            Ok(None) => ledger::datagrams_stay(Why::NoBroker),
            Err(why) => {
                NEXT_SESSION.store(now + AGAIN_MS, Relaxed);
                ledger::datagrams_stay(why);
            }
        }
    }

    /// The broker is gone, or does not understand us: in a next session sockets are told of again.
    fn end_session(&mut self) {
        self.session = None;
        NUMBER.store(0, SeqCst);
    }

    /// Reads what the broker has said: its key, and which sockets that have parted had been found.
    fn hear(&mut self) {
        self.hear_left(|_, _| {});
    }

    pub(super) fn hear_left(&mut self, mut left: impl FnMut(u64, bool)) {
        while let Some(wire) = &self.session {
            match ud::heard(wire) {
                Ok(None) => break,
                Ok(Some(Heard::Key(qkey))) => self.learn(qkey),
                Ok(Some(Heard::Left { cookie, was_found })) => left(cookie, was_found),
                Err(_) => self.end_session(),
            }
        }
    }

    fn learn(&mut self, qkey: u32) {
        let before = QKEYS[0].load(Relaxed);
        if before != u64::from(qkey) {
            QKEYS[1].store(before, SeqCst);
            QKEYS[0].store(qkey.into(), SeqCst);
        }
        self.sessions = self.sessions.wrapping_add(1).max(1);
        NUMBER.store(self.sessions, SeqCst);
    }

    /// Tells the broker of a socket. One that is behind is left, which takes all sockets out.
    pub(super) fn tell(&mut self, note: Note) -> bool {
        let told = (self.session.as_ref()).is_some_and(|wire| ud::tell(wire, note).is_ok());
        if !told {
            self.end_session();
        }
        told
    }

    /// Takes a socket out, with this word. Returns true if the broker hears it.
    pub(super) fn leave(&mut self, d: &Dgram, note: impl FnOnce(u64) -> Note) -> bool {
        d.frameless.store(true, SeqCst);
        let told = d.told.swap(0, SeqCst);
        let is_now = told != 0 && told == NUMBER.load(SeqCst);
        let is_heard = is_now && self.tell(note(d.cookie.load(Relaxed)));
        if told != 0 && !is_heard {
            d.doubt();
        }
        is_heard
    }

    /// Reads what has come.
    fn read(&mut self) {
        self.hear();
        let routes = self.routes.get_or_insert_default();
        for host in &mut self.hosts {
            let Some(wire) = &host.wire else { continue };
            for _ in 0..ANSWERS {
                let mut bytes = [0; MESSAGE + 1];
                match unix::recv_bytes(wire, &mut bytes) {
                    Ok(Some(n)) => {
                        host.has_answered = true;
                        let told = Message::parse(&bytes[..n]);
                        let known = told.and_then(|it| Some((it, routes.get(&it.route)?)));
                        if let Some((message, answer)) = known {
                            answer.hear(&message);
                        }
                    }
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                    Ok(None) | Err(_) => {
                        host.wire = None;
                        // One that was there may have been started again, or ours.
                        let pause = if host.has_answered { SOON_MS } else { AGAIN_MS };
                        host.next = now_ms() + pause;
                        let of = routes.iter().filter(|(route, _)| route.to.ip() == host.ip);
                        of.for_each(|(_, answer)| answer.lose(host.next));
                        break;
                    }
                }
            }
        }
    }

    /// The answer for datagrams on this route.
    fn answer(&mut self, route: &Route) -> Option<Arc<Answer>> {
        let routes = self.routes.get_or_insert_default();
        if let Some(answer) = routes.get(route) {
            return Some(Arc::clone(answer));
        }
        if routes.len() >= ROUTES {
            routes.retain(|_, answer| Arc::strong_count(answer) > 1);
        }
        if routes.len() >= ROUTES {
            return None;
        }
        let answer = Arc::new(Answer::default());
        routes.insert(*route, Arc::clone(&answer));
        Some(answer)
    }

    fn ask(&mut self, route: &Route) -> Result<(), Why> {
        let (now, ip) = (now_ms(), route.to.ip());
        let at = match self.hosts.iter().position(|host| host.ip == ip) {
            Some(at) => at,
            None if self.hosts.len() >= HOSTS => {
                let idle = self.hosts.iter().position(|host| host.wire.is_none());
                self.hosts.swap_remove(idle.ok_or(Why::Descriptors)?);
                self.add_host(ip)
            }
            None => self.add_host(ip),
        };
        let host = &mut self.hosts[at];
        if host.wire.is_none() {
            if now < host.next {
                return Err(Why::PlainHost);
            }
            host.next = now + AGAIN_MS;
            host.has_answered = false;
            let wire = ud::ask_host(ip)?.ok_or(Why::NoBroker)?;
            host.wire = Some(Own::new(wire).ok_or(Why::Descriptors)?);
        }
        let question = Message {
            kind: Kind::Find,
            qkey: 0,
            route: *route,
        };
        if let Some(wire) = &host.wire {
            // A broker that is behind, or gone, is asked again when the next question is due.
            let _ = unix::send_pieces(wire, [&question.emit(), &[]]);
        }
        Ok(())
    }

    fn add_host(&mut self, ip: IpAddr) -> usize {
        self.hosts.push(Host {
            ip,
            wire: None,
            has_answered: false,
            next: 0,
        });
        self.hosts.len() - 1
    }

    fn descriptors(&mut self) -> impl Iterator<Item = &mut Own> {
        let wires = self.hosts.iter_mut().filter_map(|host| host.wire.as_mut());
        wires.chain(&mut self.session)
    }
}

impl Answer {
    fn hear(&self, message: &Message) {
        let now = now_ms();
        if message.kind == Kind::Found {
            self.qkey.store(message.qkey, SeqCst);
            self.pause.store(PAUSE_MS, Relaxed);
            self.next.store(now + LEASE_MS / 2, Relaxed);
            self.until.store(now + LEASE_MS, SeqCst);
            return;
        }
        if message.kind == Kind::Lost {
            return self.lose(now + PAUSE_MS);
        }
        self.until.store(0, SeqCst);
    }

    /// It does not count any more, and the next question is due then.
    fn lose(&self, next: u64) {
        self.until.store(0, SeqCst);
        self.pause.store(PAUSE_MS, Relaxed);
        self.next.store(next, Relaxed);
    }

    /// Returns true if the next question is due, which the caller asks.
    fn is_due(&self, now: u64) -> bool {
        let next = self.next.load(Relaxed);
        let pause = self.pause.load(Relaxed).max(PAUSE_MS);
        if now < next {
            return false;
        }
        let again = (now + pause).max(1);
        let mine = self
            .next
            .compare_exchange(next, again, SeqCst, Relaxed)
            .is_ok();
        if mine {
            self.pause.store((2 * pause).min(LONGEST_PAUSE_MS), Relaxed);
        }
        mine
    }
}

/// Reads the answers that have come, at most once in a tick of the clock.
fn tick() {
    let now = now_ms();
    if LOOKED.load(Relaxed) == now || LOOKED.swap(now, Relaxed) == now {
        return;
    }
    with_process(Process::read);
}

/// Returns true if a socket may send frames.
#[inline]
pub(crate) fn may_go(d: &Dgram) -> bool {
    is_wanted() && are_taken() && !d.frameless.load(Relaxed)
}

/// A datagram was received or sent by a socket of which the broker is to know.
pub(crate) fn used(fd: c_int, d: &'static Dgram) {
    if !may_go(d) {
        return;
    }
    tick();
    let number = NUMBER.load(Relaxed);
    let is_told = number != 0 && d.told.load(Relaxed) == number;
    if is_told || number == 0 && now_ms() < NEXT_SESSION.load(Relaxed) {
        return;
    }
    with_process(|process| {
        process.open_session();
        let number = NUMBER.load(Relaxed);
        // Under the lock: who takes the socket out comes before or after.
        if number == 0 || d.frameless.load(SeqCst) || !d.is(fd) {
            return;
        }
        let before = d.told.load(Relaxed);
        if before != number
            && let Ok(cookie) = rules::cookie(borrowed(fd))
            && process.tell(Note::Takes(cookie))
        {
            d.cookie.store(cookie, Relaxed);
            d.told.store(number, SeqCst);
            // This broker does not know whom the one before has told.
            if before != 0 {
                d.doubt();
            }
        }
    });
}

/// Takes the socket out: its datagrams are plain from now on, and its peers hear so. Frames under way are still taken.
pub(crate) fn leave(d: &'static Dgram) {
    d.frameless.store(true, SeqCst);
    if !are_taken() {
        return;
    }
    // Under the lock, although most are not told of: another thread may be about to.
    with_process(|process| {
        let was_told = d.told.load(SeqCst) != 0;
        process.leave(d, Note::Gone);
        // Peers may have sent frames.
        if was_told {
            d.doubt();
        }
    });
}

/// Held over a fork. Both processes have the sockets from then on, so none takes frames any more.
pub(crate) fn before_fork() -> Option<Held<Process>> {
    PROCESS.lock_once()
}

/// The parent's ties are not the child's.
pub(crate) fn in_child(process: Option<Held<Process>>) {
    if let Some(mut process) = process {
        process.end_session();
        process.hosts.clear();
        process.routes = None;
        NEXT_SESSION.store(0, Relaxed);
    }
}

/// The program wants the number of a descriptor of ours.
pub(crate) fn own_moves(fd: c_int, to: c_int) -> bool {
    let Some(mut process) = PROCESS.lock_once() else {
        return false;
    };
    let found = process.descriptors().find(|own| own.0 == fd);
    found.is_some_and(|own| {
        own.0 = to;
        true
    })
}

impl Dests {
    fn dest(&mut self, addr: SocketAddr) -> Option<&mut Dest> {
        if self.0.len() >= DESTS && !self.0.contains_key(&addr) {
            // Those that get no frames make room.
            let now = now_ms();
            let gets_frames = |way: &Way| now < way.answer.until.load(Relaxed);
            self.0
                .retain(|_, dest| dest.way.as_ref().is_some_and(gets_frames));
            if self.0.len() >= DESTS {
                return None;
            }
        }
        let new = || Dest {
            count: 0,
            way: None,
        };
        Some(self.0.entry(addr).or_insert_with(new))
    }
}

/// The route of a datagram. The socket is bound to the port of `from`.
fn way(from: SocketAddr, to: SocketAddr) -> Option<Way> {
    let route = Route::new(from, to);
    if !route.may_be_remote() {
        return None;
    }
    let answer = PROCESS.lock_once()?.answer(&route)?;
    Some(Way { route, answer })
}

/// The longest datagram to there that is one packet.
fn packet(to: SocketAddr) -> Option<usize> {
    let (level, name, headers) = match to {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU, 28),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU, 48),
    };
    let socket = connected(to)?;
    let mtu = kernel::option_number(std::os::fd::AsRawFd::as_raw_fd(&socket), level, name)?;
    usize::try_from(mtu).ok()?.checked_sub(headers)
}

/// Returns true if a datagram of `len` bytes is as likely to arrive when it has `more` bytes. What the kernel knows to be one packet need not be one on a
/// narrower part of the path, and what tells of that may be filtered. Longer ones are in fragments, which routers may divide further.
fn is_as_safe(len: usize, more: usize, packet: usize, is_v6: bool) -> bool {
    let headers = if is_v6 { 48 } else { 28 };
    // The program's length may be any number.
    if len > ud::MAX_PAYLOAD {
        return false;
    }
    if len <= packet {
        return len + more <= packet.min(SAFE_MTU - headers);
    }
    // IPv6 has a header in each fragment.
    let room = (packet + if is_v6 { 0 } else { 8 }) & !7;
    let fragments = |len: usize| (len + 8).div_ceil(room.max(8));
    fragments(len) == fragments(len + more)
}

/// What a send needs to know.
struct Plan {
    frame: Frame,
    packet: usize,
    is_v6: bool,
}

/// Sends a datagram as a frame. `None`: it goes as it is.
///
/// # Safety
/// The vector is readable, and `name` is the program's.
pub(crate) unsafe fn transmit(
    fd: c_int,
    d: &'static Dgram,
    to: To,
    iov: &[iovec],
    flags: c_int,
    (name, name_len): (*const c_void, socklen_t),
) -> Option<ssize_t> {
    if !may_go(d) {
        return None;
    }
    if flags & libc::MSG_MORE != 0 {
        // It is a part of a datagram, and so is the next send.
        leave(d);
        return None;
    }
    let plan = plan(fd, d, to)?;
    let len = total(iov);
    let (front, more) = ud::overhead(len);
    if flags & !EASY != 0 || !is_as_safe(len, more, plan.packet, plan.is_v6) {
        return None;
    }
    // A handler that left by a jump would not give the buffer back. So this does not wait either.
    let _busy = signal::begin_once();
    let mut buffer = Buffer::take()?;
    let room = buffer.bytes();
    let payload = room.get_mut(front..front + len)?;
    let copied = copy_pieces(iov, 0, len, |from, len, done| {
        let to = payload[done..][..len].as_mut_ptr();
        // SAFETY: the program's memory, into the place for it.
        unsafe { checked::copy(to, from, len) }
    });
    if copied < len {
        // The kernel says so.
        return None;
    }
    let frame = plan.frame.complete(room, len)?;
    let flags = flags | libc::MSG_DONTWAIT;
    let from = room.as_ptr().cast();
    // SAFETY: our buffer; the address is the program's.
    let n = unsafe {
        if name.is_null() {
            next::send(fd, from, frame, flags)
        } else {
            next::sendto(fd, from, frame, flags, name.cast(), name_len)
        }
    };
    if n >= 0 {
        COUNTS[SENT].fetch_add(1, Relaxed);
        return Some(len as ssize_t);
    }
    // Without the frame it may fit, or wait.
    (![libc::EMSGSIZE, libc::EAGAIN].contains(&crate::errno())).then_some(-1)
}

fn plan(fd: c_int, d: &'static Dgram, to: To) -> Option<Plan> {
    // A handler's datagram does not wait for the work that it interrupts.
    let _busy = signal::enter_idle(d)?;
    tick();
    let now = now_ms();
    let mut tx = d.tx();
    if !d.is(fd) {
        return None;
    }
    let addr = match to {
        To::Connected => tx.connected(fd, d.is_deaf())?,
        To::Addr(addr) => addr,
        To::Unclear => return None,
    };
    let dest = tx.frames.dest(addr)?;
    dest.count += 1;
    let first = settings::first_look();
    if dest.count < first {
        return None;
    }
    if dest.count == first {
        let errno = crate::errno();
        match source(fd, addr) {
            // Its first datagram binds it.
            Some(from) if from.port() == 0 => dest.count -= 1,
            from => dest.way = from.and_then(|from| way(from, addr)),
        }
        set_errno(errno);
    }
    let way = dest.way.as_ref()?;
    if way.answer.is_due(now) {
        with_process(|process| {
            let packet = packet(addr).unwrap_or(0);
            way.answer.packet.store(packet, Relaxed);
            if let Err(why) = process.ask(&way.route) {
                ledger::datagrams_stay(why);
            }
        });
    }
    if now >= way.answer.until.load(SeqCst) {
        return None;
    }
    let frame = Frame {
        from: ud::number(way.route.from.port()),
        to: ud::number(addr.port()),
        qkey: way.answer.qkey.load(SeqCst),
        incarnation: INCARNATION.load(Relaxed),
        msn: d.msn.fetch_add(1, Relaxed).wrapping_add(1),
    };
    let packet = way.answer.packet.load(Relaxed);
    drop(tx);
    used(fd, d);
    Some(Plan {
        frame,
        packet,
        is_v6: addr.is_ipv6(),
    })
}

/// The socket was bound or connected.
pub(crate) fn readdressed(d: &Dgram) {
    d.number.store(0, Relaxed);
}

/// For `--explain`; empty where the program did not ask for frames.
pub(crate) fn explained() -> String {
    let [sent, received, refused] = [SENT, RECEIVED, REFUSED].map(|at| COUNTS[at].load(Relaxed));
    if !WANTED.load(Relaxed) {
        return String::new();
    }
    format!(
        "  datagram-iWARP: {sent} datagrams sent, {received} received, {refused} given as they are: damaged, or not for the socket\n"
    )
}

#[cfg(test)]
mod tests {
    use super::is_as_safe;

    #[test]
    fn frames_are_as_many_packets_as_their_datagrams_on_every_path() {
        for (len, packet, is_v6, is_safe) in [
            (0, 1472, false, true),
            (1216, 1472, false, true),
            // A router may have an MTU of 1,280.
            (1217, 1472, false, false),
            (1472, 1472, false, false),
            (1196, 1452, true, true),
            (1197, 1452, true, false),
            (900, 920, false, false),
            // In two fragments, and at the end of the second.
            (1473, 1472, false, true),
            (2916, 1472, false, true),
            (2917, 1472, false, false),
            (60_000, 65_507, false, false),
            (5000, 1472, false, true),
            (usize::MAX - 2, 1472, false, false),
            (usize::MAX - 2, usize::MAX, true, false),
        ] {
            let got = is_as_safe(len, 36, packet, is_v6);
            assert_eq!(got, is_safe, "{len} of {packet}");
        }
    }
}
