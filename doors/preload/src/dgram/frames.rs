//! Datagrams to other hosts as Sends of datagram-iWARP, on the program's own socket (`--datagrams`).
//!
//! Addresses, readiness, errors and order stay the kernel's. A send whose receiver takes frames goes as one; every other goes as it is. What a socket
//! receives is looked at as soon as the process has the broker's `Q_Key`, whether or not it has told the broker of that socket: so a thread that waits
//! already, a program that has been started again and one that shares the socket take frames as well. `weft_run::ud` has frames and messages.
//!
//! # Safety
//!
//! The program's buffers are as its call says.

use libc::{c_int, c_void, iovec, msghdr, socklen_t, ssize_t};
use std::alloc::{Layout, alloc, dealloc};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

use weft_ring::checked;
use weft_run::dgram::{self as rules, Route};
use weft_run::meet::Why;
use weft_run::ud::{self, Frame, Kind, LEASE_MS, MESSAGE, Message, Note, Opened};
use weft_sys::{settings as environment, unix};

use super::addr::{EASY, To, source};
use super::rings::Out;
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
/// The first pause before a destination is asked for again that takes no frames, and the longest.
const PAUSE_MS: u64 = 250;
const LONGEST_PAUSE_MS: u64 = 64_000;
/// How long the first UDP socket waits for the broker's `Q_Key`; without it datagrams are plain.
const KEY_MS: c_int = 200;
/// A socket that others are to read gets no frames any more after this time, if its peers' brokers are there.
const PARTING_NS: i64 = 50_000_000;
/// Answers read at a time.
const ANSWERS: usize = 256;

static WANTED: AtomicBool = AtomicBool::new(false);
/// The broker's `Q_Key` and the one before; [`NO_KEY`]: none.
static QKEYS: [AtomicU64; 2] = [const { AtomicU64::new(NO_KEY) }; 2];
const NO_KEY: u64 = u64::MAX;
/// Of the frames that this process sends.
static INCARNATION: AtomicU32 = AtomicU32::new(0);
/// When the answers were last looked for.
static LOOKED: AtomicU64 = AtomicU64::new(0);
static COUNTS: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
const SENT: usize = 0;
const RECEIVED: usize = 1;
const REFUSED: usize = 2;

/// What is known of a destination; answers are written by whichever thread reads them.
#[derive(Default)]
struct Answer {
    qkey: AtomicU32,
    /// The answer counts until this time; 0: there is none.
    until: AtomicU64,
    /// The next question is due then, after this pause.
    next: AtomicU64,
    pause: AtomicU64,
}

struct Dest {
    count: u64,
    /// The longest datagram of one packet, from where, and what is known of it; `None`: it stays plain, or is not looked at yet.
    way: Option<Way>,
}

struct Way {
    packet: usize,
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
    /// It is not asked before.
    next: u64,
}

/// The process's ties to its broker.
pub(crate) struct Process {
    session: Option<Own>,
    /// Number of the session: sockets are told of in each.
    number: u32,
    next: u64,
    hosts: Vec<Host>,
    routes: Option<HashMap<Route, Arc<Answer>>>,
}

static PROCESS: Private<Process> = Private::new(
    Guards::Frames,
    Process {
        session: None,
        number: 0,
        next: 0,
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

/// A socket is new: from the first one on the process has the broker's `Q_Key`.
pub(crate) fn followed() {
    if is_wanted()
        && QKEYS[0].load(Relaxed) == NO_KEY
        && let Some(mut process) = PROCESS.lock_once()
    {
        let errno = crate::errno();
        process.open_session();
        set_errno(errno);
    }
}

/// Returns true if what sockets receive is looked at.
#[inline]
pub(crate) fn are_taken() -> bool {
    // In a sandbox no call may be made that the program does not make.
    QKEYS[0].load(Relaxed) != NO_KEY && !handlers::are_given_back()
}

fn qkeys() -> [u32; 2] {
    let [now, before] = [&QKEYS[0], &QKEYS[1]].map(|key| key.load(Relaxed));
    [now, if before == NO_KEY { now } else { before }].map(|key| key as u32)
}

impl Process {
    fn open_session(&mut self) {
        let now = now_ms();
        if self.session.is_some() || now < self.next {
            return;
        }
        self.next = now + 1000;
        match self.try_session() {
            Ok(true) => {}
            Ok(false) => ledger::datagrams_stay(Why::NoBroker),
            Err(why) => {
                // It is there, and does not answer: no other socket waits for it soon.
                self.next = now + AGAIN_MS;
                ledger::datagrams_stay(why);
            }
        }
    }

    fn try_session(&mut self) -> Result<bool, Why> {
        let Some(wire) = ud::session()? else {
            return Ok(false);
        };
        let wire = Own::new(wire).ok_or(Why::Descriptors)?;
        kernel::poll_one(wire.0, libc::POLLIN, KEY_MS);
        let qkey = ud::key(&wire)?.ok_or(Why::NoBroker)?;
        let before = QKEYS[0].load(Relaxed);
        if before != u64::from(qkey) {
            QKEYS[1].store(before, SeqCst);
            QKEYS[0].store(qkey.into(), SeqCst);
        }
        if INCARNATION.load(Relaxed) == 0 {
            INCARNATION.store(ud::incarnation(), Relaxed);
        }
        self.number = self.number.wrapping_add(1).max(1);
        self.session = Some(wire);
        Ok(true)
    }

    /// Reads what has come.
    fn read(&mut self) {
        if let Some(wire) = &self.session
            && ud::key(wire).is_err()
        {
            self.session = None;
        }
        let routes = self.routes.get_or_insert_default();
        for host in &mut self.hosts {
            let Some(wire) = &host.wire else { continue };
            for _ in 0..ANSWERS {
                let mut bytes = [0; MESSAGE + 1];
                match unix::recv_bytes(wire, &mut bytes) {
                    Ok(Some(n)) => {
                        let told = Message::parse(&bytes[..n]);
                        let known = told.and_then(|it| Some((it, routes.get(&it.route)?)));
                        if let Some((message, answer)) = known {
                            answer.hear(&message);
                        }
                    }
                    Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => break,
                    Ok(None) | Err(_) => {
                        host.wire = None;
                        host.next = now_ms() + AGAIN_MS;
                        let of = routes.iter().filter(|(route, _)| route.to.ip() == host.ip);
                        of.for_each(|(_, answer)| answer.until.store(0, SeqCst));
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
        self.until.store(0, SeqCst);
        if message.kind == Kind::Lost {
            self.pause.store(PAUSE_MS, Relaxed);
            self.next.store(now + PAUSE_MS, Relaxed);
        }
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
    if let Some(mut process) = PROCESS.lock_once() {
        let errno = crate::errno();
        process.read();
        set_errno(errno);
    }
}

/// Returns true if a socket may send frames.
#[inline]
pub(crate) fn may_go(d: &Dgram) -> bool {
    are_taken() && is_wanted() && !d.frameless.load(Relaxed)
}

/// A datagram was received or sent by a socket of which the broker is to know.
pub(crate) fn used(fd: c_int, d: &'static Dgram) {
    if !may_go(d) {
        return;
    }
    tick();
    let told = d.told.load(Relaxed);
    if told != 0 && told == NUMBER.load(Relaxed) {
        return;
    }
    let Some(mut process) = PROCESS.lock_once() else {
        return;
    };
    let errno = crate::errno();
    process.open_session();
    NUMBER.store(process.number, Relaxed);
    if let Some(wire) = &process.session
        && d.told.load(Relaxed) != process.number
        && let Ok(cookie) = rules::cookie(borrowed(fd))
        && ud::tell(wire, Note::Takes(cookie)).is_ok()
    {
        d.cookie.store(cookie, Relaxed);
        d.told.store(process.number, Relaxed);
    }
    set_errno(errno);
}

/// Number of the present session, for a look without the lock.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Takes the socket out: its datagrams are plain from now on, and its peers hear so. Frames under way are still taken. Returns true if peers may send frames.
pub(crate) fn leave(d: &'static Dgram) -> bool {
    d.frameless.store(true, SeqCst);
    let told = d.told.swap(0, SeqCst);
    if told == 0 || handlers::are_given_back() {
        return false;
    }
    if let Some(process) = PROCESS.lock_once()
        && let Some(wire) = &process.session
        && told == process.number
    {
        let errno = crate::errno();
        let _ = ud::tell(wire, Note::Gone(d.cookie.load(Relaxed)));
        set_errno(errno);
    }
    true
}

/// Others read the socket from now on: frames that wait in it are dropped, with all other datagrams that do.
pub(crate) fn hand_over(fd: c_int, d: &'static Dgram) {
    if leave(d) {
        let errno = crate::errno();
        kernel::nap(PARTING_NS);
        let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
        // SAFETY: no memory is written.
        while unsafe { next::recv(fd, null_mut(), 0, flags) } >= 0 {}
        set_errno(errno);
    }
}

/// Held over a fork.
pub(crate) fn before_fork() -> Option<Held<Process>> {
    PROCESS.lock_once()
}

/// The parent's ties are not the child's.
pub(crate) fn in_child(process: Option<Held<Process>>) {
    if let Some(mut process) = process {
        process.session = None;
        process.next = 0;
        process.hosts.clear();
        process.routes = None;
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

/// Memory for one datagram.
struct Buffer(NonNull<u8>);

const ROOM: usize = 64 << 10;
const LAYOUT: Layout = Layout::new::<[u8; ROOM]>();
/// Buffers that wait: a thread that sends or receives has one, and a handler that interrupts it another.
static SPARE: [AtomicPtr<u8>; 8] = [const { AtomicPtr::new(null_mut()) }; 8];

impl Buffer {
    fn take() -> Option<Buffer> {
        let spare = SPARE
            .iter()
            .find_map(|spare| NonNull::new(spare.swap(null_mut(), SeqCst)));
        // SAFETY: the layout is not empty. All of it is written once, so that it is a slice of bytes.
        let new = || unsafe {
            let new = NonNull::new(alloc(LAYOUT))?;
            new.as_ptr().write_bytes(0, ROOM);
            Some(new)
        };
        spare.or_else(new).map(Buffer)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: memory of that size, which is ours alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), ROOM) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let is_kept = SPARE.iter().any(|spare| {
            spare
                .compare_exchange(null_mut(), self.0.as_ptr(), SeqCst, Relaxed)
                .is_ok()
        });
        if !is_kept {
            // SAFETY: it is from `alloc`, and nobody has it.
            unsafe { dealloc(self.0.as_ptr(), LAYOUT) };
        }
    }
}

impl Dests {
    fn dest(&mut self, addr: SocketAddr) -> Option<&mut Dest> {
        if self.0.len() >= DESTS && !self.0.contains_key(&addr) {
            // Those that stayed plain make room.
            self.0.retain(|_, dest| dest.way.is_some());
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

/// The route of a datagram, and the longest datagram that is one packet on it. The socket is bound to the port of `from`.
fn way(from: SocketAddr, to: SocketAddr) -> Option<Way> {
    let route = Route::new(from, to);
    if !route.may_be_remote() {
        return None;
    }
    let packet = packet(to)?;
    let answer = PROCESS.lock_once()?.answer(&route)?;
    Some(Way {
        packet,
        route,
        answer,
    })
}

/// The longest datagram to there that is one packet.
fn packet(to: SocketAddr) -> Option<usize> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
    let (family, level, name, headers) = match to {
        SocketAddr::V4(_) => (AddressFamily::INET, libc::IPPROTO_IP, libc::IP_MTU, 28),
        SocketAddr::V6(_) => (AddressFamily::INET6, libc::IPPROTO_IPV6, libc::IPV6_MTU, 48),
    };
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    connect(&socket, &to).ok()?;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
    let mtu = kernel::option_number(fd, level, name)?;
    usize::try_from(mtu).ok()?.checked_sub(headers)
}

/// What a send needs to know.
struct Plan {
    frame: Frame,
    packet: usize,
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
    // What is one packet stays one.
    let splits = len <= plan.packet && len + more > plan.packet;
    if flags & !EASY != 0 || len > ud::MAX_PAYLOAD || splits {
        return None;
    }
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
    // Without the frame it may fit.
    (crate::errno() != libc::EMSGSIZE).then_some(-1)
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
    if way.answer.is_due(now)
        && let Some(mut process) = PROCESS.lock_once()
    {
        let errno = crate::errno();
        if let Err(why) = process.ask(&way.route) {
            ledger::datagrams_stay(why);
        }
        set_errno(errno);
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
    let packet = way.packet;
    drop(tx);
    used(fd, d);
    Some(Plan { frame, packet })
}

/// The queue pair number of a socket.
fn own_number(fd: c_int, d: &Dgram) -> Option<u32> {
    let known = d.number.load(Relaxed);
    if known != 0 {
        return Some(known);
    }
    let errno = crate::errno();
    let number = kernel::local_port(fd).map(ud::number);
    set_errno(errno);
    d.number.store(number.unwrap_or(0), Relaxed);
    number
}

/// The socket was bound or connected.
pub(crate) fn readdressed(d: &Dgram) {
    d.number.store(0, Relaxed);
}

/// Receives a datagram from the kernel, and takes it out of its frame. With `MSG_PEEK` too.
///
/// # Safety
/// As `recvmsg(2)`.
pub(crate) unsafe fn receive(fd: c_int, d: &Dgram, out: &Out<'_>, flags: c_int) -> ssize_t {
    loop {
        let Some(mut buffer) = Buffer::take() else {
            set_errno(libc::ENOMEM);
            return -1;
        };
        // SAFETY: the caller's promise.
        if let Some(n) = unsafe { receive_into(&mut buffer, fd, d, out, flags) } {
            return n;
        }
    }
}

/// `None`: the datagram was dropped.
unsafe fn receive_into(
    buffer: &mut Buffer,
    fd: c_int,
    d: &Dgram,
    out: &Out<'_>,
    flags: c_int,
) -> Option<ssize_t> {
    let whole = iovec {
        iov_base: buffer.0.as_ptr().cast(),
        iov_len: ROOM,
    };
    // SAFETY: all zeros is the empty message; the rest is the caller's promise.
    let (n, message) = unsafe {
        let mut message: msghdr = std::mem::zeroed();
        if let Some(header) = out.header.as_ref() {
            message = *header;
        } else if !out.name.is_null() && !out.name_len.is_null() {
            message.msg_name = out.name.cast();
            message.msg_namelen = *out.name_len;
        }
        message.msg_iov = (&raw const whole).cast_mut();
        message.msg_iovlen = 1;
        let n = next::recvmsg(fd, &raw mut message, flags & !libc::MSG_TRUNC);
        (n, message)
    };
    let Ok(n) = usize::try_from(n) else {
        return Some(-1);
    };
    let datagram = &buffer.bytes()[..n.min(ROOM)];
    let payload = match ud::open(datagram, &qkeys(), || own_number(fd, d)) {
        Opened::Plain => datagram,
        Opened::Payload(range) => {
            if flags & libc::MSG_PEEK == 0 {
                COUNTS[RECEIVED].fetch_add(1, Relaxed);
            }
            &datagram[range]
        }
        Opened::Refused => {
            drop_peeked(fd, flags);
            return None;
        }
    };
    let (len, room) = (payload.len(), total(out.iov));
    let given = len.min(room);
    let copied = copy_pieces(out.iov, 0, given, |to, piece, done| {
        let from = payload[done..][..piece].as_ptr();
        // SAFETY: into the program's memory.
        unsafe { checked::copy(to, from.cast_mut(), piece) }
    });
    if copied < given {
        set_errno(libc::EFAULT);
        return Some(-1);
    }
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(header) = out.header.as_mut() {
            header.msg_namelen = message.msg_namelen;
            header.msg_controllen = message.msg_controllen;
            header.msg_flags = message.msg_flags & !libc::MSG_TRUNC;
            if len > room {
                header.msg_flags |= libc::MSG_TRUNC;
            }
        } else if !out.name.is_null() && !out.name_len.is_null() {
            *out.name_len = message.msg_namelen;
        }
    }
    let told = if flags & libc::MSG_TRUNC != 0 {
        len
    } else {
        given
    };
    Some(told as ssize_t)
}

/// Counts a datagram that is dropped, and takes it out of the socket if it was only looked at.
fn drop_peeked(fd: c_int, flags: c_int) {
    COUNTS[REFUSED].fetch_add(1, Relaxed);
    if flags & libc::MSG_PEEK != 0 {
        // SAFETY: no memory is written. Where another thread has taken it, another datagram is lost.
        unsafe { next::recv(fd, null_mut(), 0, libc::MSG_DONTWAIT) };
    }
}

/// The length of the kernel's next datagram without its frame. `None`: there is none.
pub(crate) fn next_len(fd: c_int, d: &Dgram) -> Option<usize> {
    let errno = crate::errno();
    let mut buffer = Buffer::take()?;
    let nobody = Out {
        iov: &[],
        name: null_mut(),
        name_len: null_mut(),
        header: null_mut(),
    };
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    let len = loop {
        // SAFETY: nothing of the program's is written.
        if let Some(n) = unsafe { receive_into(&mut buffer, fd, d, &nobody, flags) } {
            break usize::try_from(n).ok();
        }
    };
    set_errno(errno);
    len
}

/// For `--explain`; empty where the program did not ask for frames.
pub(crate) fn explained() -> String {
    let [sent, received, refused] = [SENT, RECEIVED, REFUSED].map(|at| COUNTS[at].load(Relaxed));
    if !WANTED.load(Relaxed) {
        return String::new();
    }
    format!(
        "  datagram-iWARP: {sent} datagrams sent, {received} received, {refused} dropped as damaged or not for a socket\n"
    )
}
