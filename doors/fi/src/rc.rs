//! Connections to the few busiest peers (the hybrid of datagrams and connections). Between processes of one host they use shared memory.
//!
//! A connection is another path for the same packets: their numbers keep the order, and packets that a broken connection has lost are retransmitted by
//! datagrams. The endpoint that wants one offers a TCP port and a token; the peer dials, or ignores the offer.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use weft_verbs::cm::{ConnParam, Incoming, Listening};
use weft_verbs::{Access, Cq, Device, Error, Mr, Pd, Qp, QpInit, RecvWr, Rnr, SendWr};

use crate::host::PeerId;
use crate::peer_stream::Now;
use crate::wire::MAX_PACKET;

/// Packets that may come before they are looked at: as many as a peer may have on their way.
const RECVS: u32 = 64;
/// Packets on their way into the connection.
const SENDS: u32 = 32;
/// Completions that a connection may have waiting, with `writes` Writes.
pub(crate) const fn depth(writes: u32) -> u32 {
    RECVS + SENDS + writes
}
/// The threshold of a busy peer: bytes sent to it, with an addition for each message.
const BUSY: u64 = 128 << 10;
const MESSAGE: u64 = 2048;
/// A peer that has not dialled after so long stays on datagrams.
const PATIENCE: Duration = Duration::from_secs(10);
/// Marks the number of a request of a connection; the peer and the slot are in it.
pub(crate) const RC: u64 = 1 << 62;

pub(crate) struct Rc {
    pub(crate) qp: Qp,
    /// Memory of the packets that come, then of those that go.
    pub(crate) slots: Mr,
    pub(crate) free: Vec<u32>,
}

enum Standing {
    Offered {
        token: u64,
        until: Now,
    },
    Dialling(Rc),
    Open(Rc),
    /// It refused, or the connection broke.
    Never,
}

/// Events of the connection manager, on the engine's thread.
pub(crate) enum News {
    Asked(Incoming),
    Dialled(PeerId, bool),
}

pub(crate) type Inbox = Arc<Mutex<Vec<News>>>;

#[derive(Default)]
pub(crate) struct Connections {
    /// The maximum number.
    most: usize,
    taken: usize,
    of: HashMap<PeerId, Standing>,
    traffic: HashMap<PeerId, u64>,
    tokens: HashMap<u64, PeerId>,
    listening: Option<Listening>,
    /// Their memory may still be needed.
    broken: Vec<Rc>,
}

/// The number of a request of a connection.
pub(crate) fn wr_id(peer: PeerId, slot: u32) -> u64 {
    RC | (peer as u64) << 16 | u64::from(slot)
}

/// Peer and slot of such a number.
pub(crate) fn of_wr_id(id: u64) -> (PeerId, u32) {
    (((id & !RC) >> 16) as PeerId, u32::from(id as u16))
}

impl Rc {
    fn new(pd: &Pd, cq: &Cq, peer: PeerId, writes: u32) -> Result<Rc, Error> {
        let init = QpInit {
            max_send_wr: SENDS + writes,
            max_recv_wr: RECVS,
            rnr: Rnr::Wait,
            ..QpInit::new(cq, cq)
        };
        let qp = pd.create_qp(&init)?;
        qp.set_access(Access::REMOTE_WRITE);
        let rc = Rc {
            qp,
            slots: pd.alloc_mr((RECVS + SENDS) as usize * MAX_PACKET, Access::LOCAL_WRITE)?,
            free: (RECVS..RECVS + SENDS).collect(),
        };
        for slot in 0..RECVS {
            rc.post_recv(peer, slot);
        }
        Ok(rc)
    }

    pub(crate) fn post_recv(&self, peer: PeerId, slot: u32) {
        let sge = self.slots.sge(slot as usize * MAX_PACKET, MAX_PACKET);
        let wr = RecvWr::new(wr_id(peer, slot)).sge(sge);
        // A queue pair that has failed takes none, and says so in its completions.
        let _ = self.qp.post_recv(&[wr]);
    }

    /// A Send of a packet, if there is room.
    pub(crate) fn packet(&mut self, peer: PeerId, packet: &[u8]) -> Option<SendWr> {
        let slot = self.free.pop()?;
        let at = slot as usize * MAX_PACKET;
        if self.slots.write(at, packet).is_err() {
            self.free.push(slot);
            return None;
        }
        let sge = self.slots.sge(at, packet.len());
        Some(SendWr::send(wr_id(peer, slot)).sge(sge).signaled())
    }
}

impl Connections {
    pub(crate) fn new(most: usize) -> Connections {
        Connections {
            most,
            ..Connections::default()
        }
    }

    /// Counts a send to a peer. Returns whether to offer it a connection now.
    pub(crate) fn sent(&mut self, peer: PeerId, len: u64) -> bool {
        if self.taken >= self.most || self.of.contains_key(&peer) {
            return false;
        }
        let traffic = self.traffic.entry(peer).or_default();
        *traffic = traffic.saturating_add(MESSAGE).saturating_add(len);
        *traffic >= BUSY
    }

    /// The port at which peers are to dial.
    pub(crate) fn listen(
        &mut self,
        device: &Device,
        addr: SocketAddr,
        asked: impl Fn(Incoming) + Send + Sync + 'static,
    ) -> std::io::Result<u16> {
        if let Some(listening) = &self.listening {
            return Ok(listening.local_addr().port());
        }
        let backlog = u32::try_from(self.most).unwrap_or(64);
        let listening = device.listen(addr, backlog, &ConnParam::default(), asked)?;
        let port = listening.local_addr().port();
        self.listening = Some(listening);
        Ok(port)
    }

    pub(crate) fn offered(&mut self, now: Now, peer: PeerId, token: u64) {
        self.taken += 1;
        let until = now + PATIENCE;
        self.of.insert(peer, Standing::Offered { token, until });
        self.tokens.insert(token, peer);
    }

    /// No further attempt is made.
    pub(crate) fn never(&mut self, peer: PeerId) {
        self.of.insert(peer, Standing::Never);
    }

    /// Withdraws expired offers.
    pub(crate) fn tick(&mut self, now: Now) {
        for standing in self.of.values_mut() {
            if let Standing::Offered { token, until } = standing
                && now >= *until
            {
                self.tokens.remove(token);
                self.taken -= 1;
                *standing = Standing::Never;
            }
        }
    }

    /// A peer has made an offer: returns the queue pair to dial with, if it is accepted. If both have made one, the offer of the smaller key
    /// is used.
    pub(crate) fn take_offer(
        &mut self,
        (pd, cq, writes): (&Pd, &Cq, u32),
        peer: PeerId,
        ours_stands: bool,
    ) -> Option<&Qp> {
        match self.of.get(&peer) {
            Some(Standing::Offered { .. }) if ours_stands => return None,
            Some(Standing::Offered { token, .. }) => {
                self.tokens.remove(token);
            }
            Some(_) => return None,
            None if self.taken >= self.most => return None,
            None => self.taken += 1,
        }
        let rc = Rc::new(pd, cq, peer, writes);
        let rc = rc.inspect_err(|e| tracing::warn!("no connection: {e}"));
        let standing = rc.map_or(Standing::Never, Standing::Dialling);
        self.of.insert(peer, standing);
        if let Some(Standing::Dialling(rc)) = self.of.get(&peer) {
            Some(&rc.qp)
        } else {
            self.taken -= 1;
            None
        }
    }

    pub(crate) fn dialled(&mut self, peer: PeerId, done: bool) -> bool {
        match self.of.remove(&peer) {
            Some(Standing::Dialling(rc)) if done => {
                self.of.insert(peer, Standing::Open(rc));
                return true;
            }
            Some(Standing::Dialling(_)) => {
                self.taken -= 1;
                self.never(peer);
            }
            Some(other) => {
                self.of.insert(peer, other);
            }
            None => {}
        }
        false
    }

    /// A peer dials. Returns it if it has one of our tokens and its address is `of` it; it is connected then.
    pub(crate) fn asked(
        &mut self,
        (pd, cq, writes): (&Pd, &Cq, u32),
        incoming: Incoming,
        of: impl FnOnce(PeerId) -> SocketAddr,
    ) -> Option<PeerId> {
        let token = u64::from_be_bytes(incoming.private_data().try_into().ok()?);
        let peer = *self.tokens.get(&token)?;
        if incoming.peer_addr().ip().to_canonical() != of(peer).ip().to_canonical() {
            return None;
        }
        self.tokens.remove(&token);
        let rc = Rc::new(pd, cq, peer, writes).ok().and_then(|rc| {
            let accepted = incoming.accept(&rc.qp, &ConnParam::default());
            let accepted = accepted.inspect_err(|e| tracing::info!("a connection: {e}"));
            accepted.is_ok().then_some(rc)
        });
        let Some(rc) = rc else {
            self.taken -= 1;
            self.never(peer);
            return None;
        };
        self.of.insert(peer, Standing::Open(rc));
        Some(peer)
    }

    pub(crate) fn open(&mut self, peer: PeerId) -> Option<&mut Rc> {
        match self.of.get_mut(&peer) {
            Some(Standing::Open(rc)) => Some(rc),
            _ => None,
        }
    }

    /// As [`Connections::open`], also for a connection that this side does not know to be open yet.
    pub(crate) fn receiving(&mut self, peer: PeerId) -> Option<&mut Rc> {
        match self.of.get_mut(&peer) {
            Some(Standing::Open(rc) | Standing::Dialling(rc)) => Some(rc),
            _ => None,
        }
    }

    /// The connection to a peer is broken. Whether it was open.
    pub(crate) fn lose(&mut self, peer: PeerId) -> bool {
        match self.of.remove(&peer) {
            Some(Standing::Open(rc)) => {
                self.broken.push(rc);
                self.never(peer);
                true
            }
            Some(other) => {
                self.of.insert(peer, other);
                false
            }
            None => false,
        }
    }

    /// Connections there are, and those that were.
    pub(crate) fn count(&self) -> (usize, usize) {
        let open = |standing: &&Standing| matches!(standing, Standing::Open(_));
        (self.of.values().filter(open).count(), self.broken.len())
    }
}

/// Queues news for the driving thread.
pub(crate) fn tell(inbox: &Inbox, news: News) {
    inbox
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(news);
}
