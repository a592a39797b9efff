//! The part of an endpoint for connections ([`crate::rc`]).

use std::sync::Arc;
use std::time::Duration;

use weft_verbs::cm::ConnParam;
use weft_verbs::{UdDest, Wc, WcOpcode, WcStatus};

use super::held::drive;
use super::{Inner, State, WRITES, lock};
use crate::host::PeerId;
use crate::memory::Offer;
use crate::rc::{self, News};
use crate::wire::MAX_PACKET;

impl Inner {
    pub(super) fn offer(self: &Arc<Self>, state: &mut State, now: Duration, peer: PeerId) {
        let own = self.address.addr.ip();
        let theirs = state.peers[peer].addr.ip();
        if self.near && theirs != own && !theirs.is_loopback() {
            state.connections.never(peer);
            return;
        }
        let (inbox, weak) = (Arc::clone(&self.inbox), Arc::downgrade(self));
        let asked = move |incoming| {
            rc::tell(&inbox, News::Asked(incoming));
            drive(&weak);
        };
        let mut addr = self.address.addr;
        addr.set_port(0);
        let mut token = [0; 8];
        let port = state.connections.listen(&self.device, addr, asked);
        match port {
            Ok(port) if getrandom::fill(&mut token).is_ok() => {
                let token = u64::from_be_bytes(token);
                state.connections.offered(now, peer, token);
                state.machine.offer(peer, port, token);
            }
            Ok(_) => state.connections.never(peer),
            Err(error) => {
                tracing::warn!("no connections: cannot listen: {error}");
                state.connections.never(peer);
            }
        }
    }

    /// Dials those that would take a connection.
    pub(super) fn take_offers(&self, state: &mut State) {
        for Offer { peer, port, token } in std::mem::take(&mut state.memory.offers) {
            let UdDest { mut addr, qkey, .. } = state.peers[peer];
            let ours_stands = self.address.key < qkey;
            let parts = (&state.memory.pd, &self.cq, WRITES);
            let Some(qp) = state.connections.take_offer(parts, peer, ours_stands) else {
                continue;
            };
            addr.set_port(port);
            let param = ConnParam {
                private_data: token.to_be_bytes().to_vec(),
                ..ConnParam::default()
            };
            let (inbox, weak) = (Arc::clone(&self.inbox), self.weak.clone());
            self.device.dial(addr, None, qp, &param, move |outcome| {
                let outcome = outcome.inspect_err(|e| tracing::info!("a connection: {e}"));
                rc::tell(&inbox, News::Dialled(peer, outcome.is_ok()));
                drive(&weak);
            });
        }
    }

    /// Processes the events of the connection manager.
    pub(super) fn read_news(&self, state: &mut State) {
        let news = std::mem::take(&mut *lock(&self.inbox));
        for news in news {
            let connected = match news {
                News::Asked(incoming) => {
                    let parts = (&state.memory.pd, &self.cq, WRITES);
                    let peers = &state.peers;
                    let address = |peer: PeerId| peers[peer].addr;
                    state.connections.asked(parts, incoming, address)
                }
                News::Dialled(peer, done) => state.connections.dialled(peer, done).then_some(peer),
            };
            if let Some(peer) = connected {
                state.memory.connected.insert(peer);
                let threshold = Some(self.connected_threshold);
                state.machine.set_threshold(peer, threshold);
            }
        }
    }

    /// A completion of a connection.
    pub(super) fn completed_connected(state: &mut State, now: Duration, wc: &Wc) {
        let (peer, slot) = rc::of_wr_id(wc.wr_id);
        if wc.status != WcStatus::Success {
            state.lose(peer);
            return;
        }
        let Some(rc) = state.connections.receiving(peer) else {
            return;
        };
        let memory = &mut state.memory;
        if wc.opcode == WcOpcode::Send {
            rc.free.push(slot);
            state.machine.hold(peer, false);
        } else if let Some(id) = wc.imm {
            rc.post_recv(peer, slot);
            state.machine.placed(memory, peer, id);
        } else {
            let mut packet = std::mem::take(&mut state.packet);
            packet.resize((wc.byte_len as usize).min(MAX_PACKET), 0);
            let read = rc.slots.read(slot as usize * MAX_PACKET, &mut packet);
            rc.post_recv(peer, slot);
            if read.is_ok() {
                state.machine.packet(memory, now, peer, &packet);
            }
            state.packet = packet;
        }
    }

    /// Posts the Sends of one connection.
    pub(super) fn post_connected(state: &mut State, peer: Option<PeerId>) {
        if state.connected.is_empty() {
            return;
        }
        let wrs = std::mem::take(&mut state.connected);
        if let Some(peer) = peer
            && let Some(rc) = state.connections.open(peer)
            && rc.qp.post_send(&wrs).is_err()
        {
            state.lose(peer);
        }
    }
}

impl State {
    /// Sends a packet over the connection to a peer, if there is one and it has room.
    pub(super) fn send_connected(&mut self, peer: PeerId, packet: &[u8]) -> bool {
        let Some(rc) = self.connections.open(peer) else {
            return false;
        };
        let Some(wr) = rc.packet(peer, packet) else {
            return false;
        };
        if rc.free.is_empty() {
            self.machine.hold(peer, true);
        }
        self.connected.push(wr);
        true
    }

    /// The connection to a peer is broken: it continues by datagrams.
    pub(super) fn lose(&mut self, peer: PeerId) {
        if self.connections.lose(peer) {
            tracing::info!(peer = %self.peers[peer].addr, "a connection broke; datagrams take its place");
            self.memory.connected.remove(&peer);
            self.machine.set_threshold(peer, None);
            self.machine.hold(peer, false);
            self.machine.unsure(peer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use weft_verbs::cm::{ConnParam, Incoming};
    use weft_verbs::{Device, DeviceBuilder, LocalMode, RawMemory};

    use super::super::{Endpoint, Queue, Setup, Status};
    use crate::machine::Want;
    use crate::wire::Meta;

    fn device(local: LocalMode) -> Device {
        DeviceBuilder::default().local(local).open().unwrap()
    }

    fn endpoint(device: &Device, connections: usize) -> (Endpoint, Queue) {
        let setup = Setup {
            threshold: 16 << 10,
            connected_threshold: 8 << 10,
            connections,
            ..super::super::tests::setup()
        };
        let endpoint = Endpoint::open(device, &setup).unwrap();
        let queue = Queue::default();
        endpoint.complete_to(Some(&queue), Some(&queue));
        (endpoint, queue)
    }

    fn meta(tag: u64, len: usize) -> Meta {
        Meta {
            tagged: true,
            tag,
            data: None,
            len: len as u64,
        }
    }

    /// `count` messages from one to the other, of lengths on both sides of the thresholds: all come as they were sent, in order.
    fn messages(from: &(Endpoint, Queue), to: &(Endpoint, Queue), count: u64) {
        let peer = from.0.peer(&to.0.address()).unwrap();
        // Both name each other, as MPI does.
        to.0.peer(&from.0.address()).unwrap();
        let end = Instant::now() + Duration::from_mins(1);
        for i in 0..count {
            let len = [500, 12_000, 100_000][i as usize % 3];
            let bytes: Vec<u8> = (0..len).map(|at| (at as u64 * 7 + i) as u8).collect();
            let room = RawMemory::leak(vec![0; len]);
            let want = Want {
                tagged: true,
                tag: 0,
                ignore: u64::MAX,
                peer: None,
            };
            assert!(to.0.recv(room.clone(), want, None, i as usize));
            let memory = RawMemory::leak(bytes.clone());
            let ranges = [memory];
            from.0
                .send(peer, &ranges, meta(i, len), Some(i as usize), false)
                .unwrap();
            let (mut sent, mut received) = (false, false);
            while !(sent && received) {
                assert!(Instant::now() < end, "message {i}");
                from.0.progress();
                to.0.progress();
                for queue in [&from.1, &to.1] {
                    while let Some(done) = queue.lock().pop_front() {
                        assert_eq!(done.status, Status::Done);
                        assert_eq!((done.context, done.meta.tag), (i as usize, i));
                        sent |= !done.is_recv;
                        received |= done.is_recv;
                    }
                }
            }
            let mut came = vec![0; len];
            room.read(0, &mut came).unwrap();
            assert!(came == bytes, "message {i}");
        }
    }

    fn open(endpoint: &(Endpoint, Queue)) -> usize {
        endpoint.0.connections().0
    }

    fn connects(local: LocalMode) {
        let device = device(local);
        let (a, b) = (endpoint(&device, 2), endpoint(&device, 2));
        messages(&a, &b, 20);
        let end = Instant::now() + Duration::from_secs(30);
        while open(&a) + open(&b) < 2 {
            assert!(Instant::now() < end, "they do not connect");
            messages(&a, &b, 1);
        }
        // Across the change, both ways, and over the connection.
        messages(&a, &b, 100);
        messages(&b, &a, 100);
        assert_eq!((a.0.connections(), b.0.connections()), ((1, 0), (1, 0)));
        // It breaks in the middle of things: datagrams take over.
        let peer = a.0.peer(&b.0.address()).unwrap();
        let mut state = a.0.0.state();
        state.connections.open(peer).unwrap().qp.disconnect();
        drop(state);
        messages(&a, &b, 50);
        messages(&b, &a, 50);
        assert_eq!((open(&a), open(&b)), (0, 0));
    }

    #[test]
    fn busy_peers_get_a_connection_and_go_on_without_it() {
        connects(LocalMode::Off);
    }

    #[test]
    fn busy_peers_of_one_host_meet_in_shared_memory() {
        connects(LocalMode::Auto);
    }

    #[test]
    fn a_peer_that_wants_no_connection_stays_on_datagrams() {
        let device = device(LocalMode::Off);
        let (a, b) = (endpoint(&device, 2), endpoint(&device, 0));
        messages(&a, &b, 100);
        messages(&b, &a, 10);
        assert_eq!((open(&a), open(&b)), (0, 0));
    }

    /// A peer without a token is refused, whatever it sends.
    #[test]
    fn strangers_are_not_connected() {
        let device = device(LocalMode::Off);
        let mut connections = crate::rc::Connections::new(4);
        let asked: Arc<Mutex<Vec<Incoming>>> = Arc::default();
        let sink = Arc::clone(&asked);
        let port = connections.listen(&device, SocketAddr::from(([127, 0, 0, 1], 0)), move |i| {
            super::lock(&sink).push(i);
        });
        let to = SocketAddr::from(([127, 0, 0, 1], port.unwrap()));
        connections.offered(Duration::ZERO, 3, 77);
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(1000, None).unwrap();
        for (data, expected) in [
            (vec![], None),
            (vec![1; 9], None),
            (76u64.to_be_bytes().to_vec(), None),
            (77u64.to_be_bytes().to_vec(), Some(3)),
            // A token is good for one.
            (77u64.to_be_bytes().to_vec(), None),
        ] {
            let qp = pd.create_qp(&weft_verbs::QpInit::new(&cq, &cq)).unwrap();
            let param = ConnParam {
                private_data: data,
                ..ConnParam::default()
            };
            device.dial(to, None, &qp, &param, |_| {});
            let end = Instant::now() + Duration::from_secs(30);
            let incoming = loop {
                assert!(Instant::now() < end);
                if let Some(incoming) = super::lock(&asked).pop() {
                    break incoming;
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            let local = SocketAddr::from(([127, 0, 0, 1], 1));
            let found = connections.asked((&pd, &cq, 4), incoming, |_| local);
            assert_eq!(found, expected);
        }
        assert_eq!(connections.count(), (1, 0));
    }
}
