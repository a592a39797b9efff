//! The same-host transport: rings in shared memory, references to large payloads, which the receiver copies, and one-sided operations that
//! the initiator carries out itself (docs/spec/local.md).

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use weft_mem::{
    Access, ExportAddr, KeySpan, LastStretch, PEER_LIMIT, Reader, RecvList, SendList, Target,
};
use weft_ring::{Broken, End, Front, Ref};
use weft_sys::{Interest, wake};
use weft_tls::TlsInfo;

use super::{ByteStream, Received};
use crate::lock::lock;
use crate::neighbours::{Neighbour, PeerWatch};
use crate::types::LinkOptions;

/// Bytes of each ring.
pub(crate) const RING_BYTES: u32 = 256 * 1024;
/// Payloads from here on are referenced where the receiver has the memory mapped: one copy in place of two.
pub(crate) const REF_MAPPED: usize = 4 * 1024;
/// The same where each pull is a system call.
const REF_PROCESS: usize = 16 * 1024;
/// The maximum of one pull, so that no thread waits for long.
const PULL_MAX: u64 = 4 << 20;
/// Writes to memory that is not mapped: shorter ones go through the ring, which costs less than a system call as long as the
/// peer is awake.
pub(crate) const PROCESS_MIN: u32 = 1024;
/// Bytes of the peer's memory that are touched under one mark at most: a peer that takes it back waits for no more.
pub(crate) const TOUCH_MAX: u32 = 16 << 20;
/// Bytes that are written under one mark, in several Writes, before the mark is set again.
const MARK_MAX: usize = 256 << 10;
/// Looks at the peer's mark, one after the other, before it counts as more than passing.
const MOMENT: u32 = 64;

/// No ring position.
const HAS_ROOM: u64 = u64::MAX;

/// [`End::set_caps`]: this side can read the other's process.
pub(crate) const CAN_READ: u32 = 1;
/// [`End::set_caps`]: the operations that this side's queue pair denies to the peer.
const DENIES: [(Access, u32); 3] = [
    (Access::REMOTE_READ, 2),
    (Access::REMOTE_WRITE, 4),
    (Access::REMOTE_ATOMIC, 8),
];

/// The bits for [`End::set_caps`].
fn caps(process: bool, access: Access) -> u32 {
    let denied = DENIES.iter().filter(|(right, _)| !access.contains(*right));
    denied.fold(if process { CAN_READ } else { 0 }, |caps, (_, bit)| {
        caps | bit
    })
}

/// A reference that the peer has not pulled: the ring position after its record, the position of its bytes in the stream, and the payload.
struct Lent {
    ring: u64,
    stream: u64,
    what: Ref,
}

/// The parameters that both ends have agreed on in the handshake.
pub(crate) struct Joint {
    pub(crate) end: Arc<End>,
    pub(crate) peer: Arc<weft_mem::Peer>,
    /// The Unix socket on which they met: from now on it carries wake-ups, and ends with the peer.
    pub(crate) wire: OwnedFd,
    /// The TCP connection, which keeps the addresses taken as long as it is open.
    pub(crate) tcp: Mutex<Option<Arc<dyn ByteStream>>>,
    /// Its addresses: ours and the peer's.
    pub(crate) addrs: [SocketAddr; 2],
    /// The peer's TLS identity, if the connection was made by TLS.
    pub(crate) tls: Option<TlsInfo>,
    /// The two queue pairs' numbers.
    pub(crate) own_qp: u32,
    pub(crate) peer_qp: u32,
    /// We can read and write the peer's process.
    pub(crate) process: bool,
    /// The peer has our arena of regions without remote rights.
    pub(crate) trusted: bool,
}

pub(crate) struct LocalLink {
    joint: Joint,
    /// Bytes of the stream handed over so far; only the sender's.
    stream: AtomicU64,
    /// References that are out, oldest first, and how many, for a look without the lock.
    lending: Mutex<VecDeque<Lent>>,
    lent: AtomicUsize,
    /// The peer's position when the ring was last full: there is room when it has advanced. `HAS_ROOM`: sending stopped for another reason.
    blocked_at: AtomicU64,
    /// A thread may have been woken since the wire was drained.
    watched: AtomicBool,
    /// No more references: their payloads are about to be returned to the owner.
    lends_no_more: AtomicBool,
    /// Whether the peer sees what was taken.
    tells: AtomicBool,
    dead: AtomicBool,
    /// The peer stayed in memory that was taken back: its later actions are ignored.
    cut_off: AtomicBool,
    /// Our direction has ended in order.
    finished: AtomicBool,
    neighbour: Option<Arc<Neighbour>>,
    /// The connection's owner.
    owner: OnceLock<Weak<dyn PeerWatch>>,
}

impl LocalLink {
    pub(crate) fn new(joint: Joint, neighbour: Option<Arc<Neighbour>>) -> Arc<LocalLink> {
        joint.end.set_caps(caps(joint.process, Access::empty()));
        Arc::new(LocalLink {
            joint,
            stream: AtomicU64::new(0),
            lending: Mutex::default(),
            lent: AtomicUsize::new(0),
            blocked_at: AtomicU64::new(0),
            watched: AtomicBool::new(false),
            lends_no_more: AtomicBool::new(false),
            tells: AtomicBool::new(true),
            dead: AtomicBool::new(false),
            cut_off: AtomicBool::new(false),
            finished: AtomicBool::new(false),
            neighbour,
            owner: OnceLock::new(),
        })
    }

    /// It is this queue pair's from now on.
    pub(crate) fn belongs_to(&self, qp: Weak<dyn PeerWatch>) {
        let _ = self.owner.set(qp);
    }

    /// Our side of the rings.
    pub(crate) fn ring(&self) -> &Arc<End> {
        &self.joint.end
    }

    /// The peer's process, when it is not our own.
    pub(crate) fn neighbour(&self) -> Option<&Neighbour> {
        self.neighbour.as_deref()
    }

    /// The peer has no access and touches nothing: allows it to access our memory in these ways from now on. For denied operations it sends a
    /// request through the ring, which is refused.
    pub(crate) fn let_in(&self, access: Access) {
        let end = &self.joint.end;
        end.set_caps(caps(self.joint.process, access));
        if DENIES.iter().any(|(right, _)| access.intersects(*right)) {
            end.open_access();
        }
    }

    /// The peer's queue pair lets us do this.
    fn allowed(&self, need: Access) -> bool {
        let caps = self.joint.end.peer_caps();
        !DENIES
            .iter()
            .any(|(right, bit)| need.intersects(*right) && caps & bit != 0)
    }

    /// The peer may not access our memory any more. If it [is inside](Self::is_inside) after this call, it finishes soon; otherwise it stays
    /// outside.
    pub(crate) fn close_access(&self) {
        self.joint.end.close_access();
    }

    /// Copies everything that is sent from now on.
    pub(crate) fn lend_no_more(&self) {
        self.lends_no_more.store(true, Ordering::Relaxed);
    }

    /// Access is closed: whether the peer, which may have seen them open, stays longer than a moment.
    pub(crate) fn is_inside(&self) -> bool {
        let inside = |_| self.joint.end.peer_mark() != 0;
        (0..MOMENT).all(inside) && self.counts()
    }

    /// Wait until the peer is outside. One that stays is cut off.
    pub(crate) fn wait_until_outside(&self) {
        let start = Instant::now();
        while self.is_inside() {
            if start.elapsed() >= PEER_LIMIT {
                self.cut_off();
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether the peer's mark is valid: the kernel reports its process alive, and it was not cut off.
    fn counts(&self) -> bool {
        !self.is_dead() && self.neighbour().is_none_or(Neighbour::is_alive)
    }

    /// The TCP connection carries nothing more: closes it, unless it has to keep its addresses. The initiator resets it, because it has sent the last
    /// message; so neither side keeps the port occupied.
    pub(crate) fn close_tcp(&self, options: &LinkOptions, initiator: bool) {
        if options.keep_tcp {
            return;
        }
        let tcp = lock(&self.joint.tcp).take();
        if let Some(tcp) = tcp.filter(|_| initiator) {
            tcp.cut();
        }
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// The peer's process has ended.
    pub(crate) fn set_dead(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Checks whether the wire has ended. Consumes its wake-ups: the caller checks next what they are about.
    pub(crate) fn check(&self) {
        self.drain_wire();
    }

    /// The ring takes a frame of this size.
    pub(crate) fn has_room(&self, n: usize) -> bool {
        !self.is_dead() && self.joint.end.fits(n) == Ok(true)
    }

    /// Put a frame into the ring that has room for it; [`LocalLink::flush`] shows it to the peer. How many bytes it took.
    pub(crate) fn push_frame(&self, list: &SendList<'_>) -> usize {
        // An error here occurs again at the next send, and ends the connection there.
        let n = self.joint.end.push(list, 0, list.len_bytes()).unwrap_or(0);
        let stream = self.stream.load(Ordering::Relaxed) + n as u64;
        self.stream.store(stream, Ordering::Relaxed);
        n
    }

    /// Publishes the bytes in the ring to the peer.
    pub(crate) fn flush(&self) {
        if self.joint.end.publish() {
            self.wake();
        }
    }

    /// The sender stops of itself: it can go on at once.
    pub(crate) fn come_back(&self) {
        self.blocked_at.store(HAS_ROOM, Ordering::Relaxed);
    }

    /// Sets whether the peer sees what is taken.
    pub(crate) fn tell(&self, on: bool) {
        self.tells.store(on, Ordering::Relaxed);
    }

    /// Whether the peer polls its ring only after a wake-up.
    pub(crate) fn peer_sleeps(&self) -> bool {
        self.joint.end.peer_sleeps()
    }

    /// One-sided operations have changed the peer's memory: wakes it if it looks for that.
    pub(crate) fn written(&self) {
        if self.joint.end.written() {
            self.wake();
        }
    }

    /// See [`End::doze`].
    pub(crate) fn doze(&self) {
        self.joint.end.doze();
    }

    /// References that the peer has not pulled are out.
    pub(crate) fn lends(&self) -> bool {
        self.lent.load(Ordering::Relaxed) > 0
    }

    /// Our position in the ring, behind all that was handed over. The peer has taken all of it when [`LocalLink::consumed`] says the same.
    pub(crate) fn pushed(&self) -> u64 {
        self.joint.end.pushed()
    }

    /// The peer's position. An invalid position ends the connection, and later ones are ignored.
    pub(crate) fn consumed(&self) -> u64 {
        self.joint.end.consumed().unwrap_or_else(|Broken| {
            self.set_dead();
            0
        })
    }

    /// The peer's queue pair.
    pub(crate) fn peer_qp(&self) -> u32 {
        self.joint.peer_qp
    }

    /// Do something with `len` bytes of the peer's memory, if its table allows that (`None` if not).
    pub(crate) fn touch<R>(
        &self,
        stag: u32,
        to: u64,
        len: u32,
        need: Access,
        f: impl FnOnce(&weft_mem::Peer, &Target) -> R,
    ) -> Option<R> {
        let Joint {
            end, peer, peer_qp, ..
        } = &self.joint;
        end.enter(stag);
        let out = (end.peer_access_open() && self.allowed(need) && !self.is_dead())
            .then(|| peer.find(*peer_qp, stag, to, len, need))
            .flatten()
            .map(|target| f(peer, &target));
        end.leave();
        out
    }

    /// Begin to use memory of the peer's that is remembered; see [`Marked`].
    pub(crate) fn marked(&self) -> Marked<'_> {
        Marked {
            link: self,
            stag: 0,
            bytes: 0,
        }
    }

    fn wake(&self) {
        // Full: there are enough wake-ups. Closed: no wake-up is needed.
        let _ = wake::poke(&self.joint.wire);
    }

    fn drain_wire(&self) {
        if !wake::drain(&self.joint.wire) {
            self.set_dead();
        }
    }

    /// The place from which the peer should copy a payload itself.
    fn reference(&self, place: Option<ExportAddr>, len: usize) -> Option<Ref> {
        let ExportAddr { space, addr } = place?;
        let reachable = match space {
            0 => len >= REF_PROCESS && self.joint.end.peer_caps() & CAN_READ != 0,
            1 | 2 => len >= REF_MAPPED,
            _ => len >= REF_MAPPED && self.joint.trusted,
        };
        reachable.then_some(Ref {
            space,
            addr,
            len: len as u64,
        })
    }

    /// Put bytes and references into the ring, from byte `from` of the list on; how many bytes of the stream it took.
    fn push(&self, list: &SendList<'_>, from: usize) -> Result<usize, Broken> {
        let end = &self.joint.end;
        let total = list.len_bytes();
        if total < REF_MAPPED || self.lends_no_more.load(Ordering::Relaxed) {
            return end.push(list, from, total - from);
        }
        let base = self.stream.load(Ordering::Relaxed);
        // Bytes before `done` are in the ring, those up to `at` have to be copied there.
        let (mut done, mut at) = (from, 0);
        for piece in list.pieces() {
            let start = at;
            at += piece.len;
            if at <= done {
                continue;
            }
            let Some(reference) = self
                .reference(piece.place, piece.len)
                .filter(|_| start >= done)
            else {
                continue;
            };
            if start > done {
                done += end.push(list, done, start - done)?;
                if done < start {
                    return Ok(done - from);
                }
            }
            if !end.push_ref(reference)? {
                return Ok(done - from);
            }
            let mut lending = lock(&self.lending);
            lending.push_back(Lent {
                ring: end.pushed(),
                stream: base + done as u64,
                what: reference,
            });
            self.lent.store(lending.len(), Ordering::Relaxed);
            done = at;
        }
        if done < total {
            done += end.push(list, done, total - done)?;
        }
        Ok(done - from)
    }

    fn pull(&self, from: Ref, list: &mut RecvList<'_>, skip: usize) -> io::Result<usize> {
        let end = &self.joint.end;
        let room = (list.len_bytes() - skip) as u64;
        let n = from.len.min(room).min(PULL_MAX) as usize;
        let place = ExportAddr {
            space: from.space,
            addr: from.addr,
        };
        self.joint.peer.pull(place, list, skip, n)?;
        // A pull is valid only if the sender had not taken the payload back.
        if end.peer_aborted() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        end.advance_ref(n as u64);
        Ok(n)
    }

    /// Takes available data; returns (bytes, drained, ended).
    fn take(&self, list: &mut RecvList<'_>) -> io::Result<(usize, bool, bool)> {
        let end = &self.joint.end;
        let mut n = 0;
        while n < list.len_bytes() {
            match end.front().map_err(broken)? {
                Front::Empty => return Ok((n, true, false)),
                Front::End => return Ok((n, n == 0, n == 0)),
                // Frames that were published before are received, as after any other end.
                Front::Aborted if n > 0 => return Ok((n, false, false)),
                Front::Aborted => return Err(io::ErrorKind::ConnectionReset.into()),
                Front::Bytes(there) => {
                    let want = there.min(list.len_bytes() - n);
                    n += end.take(list, n, want).map_err(broken)?;
                }
                // A payload of its own: the receiver has to name its destination first.
                Front::Ref(_) if n > 0 => break,
                Front::Ref(from) => {
                    let got = self.pull(from, list, n)?;
                    n += got;
                    if got as u64 == PULL_MAX {
                        break;
                    }
                }
            }
        }
        Ok((n, false, false))
    }
}

/// Writes to memory of the peer's that is remembered from an earlier one. The mark stays from one Write to the next of the same region, for
/// as long as this is there: a peer that takes its memory back waits for it.
pub(crate) struct Marked<'a> {
    link: &'a LocalLink,
    /// 0: no mark.
    stag: u32,
    /// Bytes written under this mark.
    bytes: usize,
}

impl Marked<'_> {
    /// False: nothing was done, and there is no mark.
    #[inline]
    pub(crate) fn write(
        &mut self,
        last: &LastStretch,
        stag: u32,
        to: u64,
        from: &KeySpan<'_>,
    ) -> bool {
        let Joint { end, peer, .. } = &self.link.joint;
        if self.stag != stag || self.bytes > MARK_MAX {
            end.enter(stag);
            (self.stag, self.bytes) = (stag, 0);
        }
        self.bytes += from.len();
        let written = end.peer_access_open()
            && self.link.allowed(Access::REMOTE_WRITE)
            && !self.link.is_dead()
            && peer.write_known(last, stag, to, from);
        if !written {
            self.leave();
        }
        written
    }

    /// Take the mark away: other ways of using the peer's memory have marks of their own.
    #[inline]
    pub(crate) fn leave(&mut self) {
        if self.stag != 0 {
            self.stag = 0;
            self.link.joint.end.leave();
        }
    }
}

impl Drop for Marked<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

fn broken(_: Broken) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the peer broke the shared ring")
}

impl Reader for LocalLink {
    fn uses(&self, stag: u32) -> bool {
        self.joint.end.peer_mark() == stag && self.counts()
    }

    fn serves(&self, qp: u32) -> bool {
        self.joint.own_qp == qp
    }

    fn borrows(&self, place: ExportAddr, len: u64) -> bool {
        let end = place.addr.saturating_add(len);
        let overlaps = |lent: &Lent| {
            let Ref { space, addr, len } = lent.what;
            space == place.space && addr < end && place.addr < addr.saturating_add(len)
        };
        !self.is_dead() && lock(&self.lending).iter().any(overlaps)
    }

    fn cut_off(&self) {
        if self.cut_off.swap(true, Ordering::SeqCst) {
            return;
        }
        tracing::warn!(
            peer = %self.peer_addr(),
            "a peer stayed in memory that was taken back: its connection ends"
        );
        self.set_dead();
        if let Some(qp) = self.owner.get().and_then(Weak::upgrade) {
            qp.peer_died();
        }
    }
}

/// The calls for [`Llp`](super::Llp).
impl LocalLink {
    pub(super) fn tls(&self) -> Option<&TlsInfo> {
        self.joint.tls.as_ref()
    }
    pub(super) fn send(&self, list: &SendList<'_>) -> io::Result<usize> {
        if self.is_dead() || self.joint.end.peer_aborted() {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let mut n = self.push(list, 0).map_err(broken)?;
        if n < list.len_bytes() {
            // Looked at before the second try: if that falls short too, there is no room before the peer has moved on.
            let consumed = self.joint.end.consumed().map_err(broken)?;
            self.blocked_at.store(consumed, Ordering::Relaxed);
            n += self.push(list, n).map_err(broken)?;
        }
        let stream = self.stream.load(Ordering::Relaxed) + n as u64;
        self.stream.store(stream, Ordering::Relaxed);
        if self.joint.end.publish() {
            self.wake();
        }
        if n == 0 && list.len_bytes() > 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(n)
    }

    pub(super) fn recv(&self, list: &mut RecvList<'_>) -> io::Result<Received> {
        if self.watched.load(Ordering::Relaxed) && self.watched.swap(false, Ordering::Relaxed) {
            self.drain_wire();
        }
        // Checked first: data that a peer wrote before its death is still received.
        let dead = self.is_dead();
        if dead && self.cut_off.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let (n, drained, ended) = self.take(list)?;
        // With bytes the peer is notified in `placed`: its direct operations in our memory must not come before them.
        if n == 0 && self.tells.load(Ordering::Relaxed) && self.joint.end.release(true) {
            self.wake();
        }
        if n == 0 && !ended && !dead {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        Ok(Received { n, drained })
    }

    pub(super) fn placed(&self) {
        if self.joint.end.release(false) {
            self.wake();
        }
    }

    pub(super) fn pause(&self) -> bool {
        self.drain_wire();
        self.is_dead() || self.joint.end.peer_aborted()
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.joint.wire.as_fd()
    }

    pub(super) fn watch(&self, interest: Interest) -> Option<Interest> {
        let end = &self.joint.end;
        self.watched.store(true, Ordering::SeqCst);
        let mut quiet = !self.is_dead()
            && if interest.contains(Interest::READ) {
                end.sleep_on_data()
            } else {
                !end.peer_aborted()
            };
        if interest.contains(Interest::WRITE) {
            let at = self.blocked_at.load(Ordering::Relaxed);
            quiet &= at != HAS_ROOM && end.sleep_on_room(at);
        } else if self.lends() {
            let first = lock(&self.lending).front().map(|lent| lent.ring);
            quiet &= first.is_none_or(|ring| end.sleep_on_room(ring - 1));
        }
        quiet.then_some(Interest::READ)
    }

    pub(super) fn copied(&self, sent: u64) -> u64 {
        if !self.lends() {
            return sent;
        }
        let consumed = self.consumed();
        let mut lending = lock(&self.lending);
        while lending.front().is_some_and(|lent| lent.ring <= consumed) {
            lending.pop_front();
        }
        self.lent.store(lending.len(), Ordering::Relaxed);
        lending.front().map_or(sent, |lent| lent.stream)
    }

    pub(super) fn shutdown_write(&self) {
        self.finished.store(true, Ordering::SeqCst);
        if self.joint.end.finish() {
            self.wake();
        }
    }

    pub(super) fn abort(&self) {
        self.joint.end.close_access();
        // After an end in order the peer may read to it, unless memory is lent that is about to be taken back.
        if !self.finished.load(Ordering::SeqCst) || self.lends() {
            let _ = self.joint.end.abort();
        }
        self.wake();
        if let Some(tcp) = &*lock(&self.joint.tcp) {
            tcp.abort();
        }
    }

    pub(super) fn local_addr(&self) -> SocketAddr {
        self.joint.addrs[0]
    }

    pub(super) fn peer_addr(&self) -> SocketAddr {
        self.joint.addrs[1]
    }
}
