//! The requests that an endpoint posts: packets of the machine, and Writes.

use std::time::Duration;

use weft_verbs::{Access, RemoteAddr, SendWr};

use super::{BATCH, Inner, State, WRITE, WRITES};
use crate::machine::Outbound;
use crate::memory::{Way, Write};
use crate::wire::MAX_PACKET;

impl Inner {
    /// As [`Inner::flush`], but packets of a burst are collected: a window of messages goes in few datagram trains. The program's next call for
    /// completions posts them, or the engine when the previous packets are acknowledged.
    pub(super) fn flush_burst(&self, state: &mut State, now: Duration) {
        if state.memory.writes.is_empty() && state.machine.gathers(now) {
            state.start_clock();
            return;
        }
        self.flush(state, now, false);
    }

    /// Posts the machine's packets, and Writes.
    pub(super) fn flush(&self, state: &mut State, now: Duration, at_once: bool) {
        let mut packet = std::mem::take(&mut state.packet);
        let mut last = None;
        while let Some(slot) = state.free.pop() {
            let outbound = state.machine.transmit(now, at_once, &mut packet);
            if outbound.map(|o| o.peer) != last {
                Self::post_connected(state, last);
                last = outbound.map(|o| o.peer);
            }
            let Some(Outbound { peer, again }) = outbound else {
                state.free.push(slot);
                break;
            };
            if !again && state.send_connected(peer, &packet) {
                state.free.push(slot);
                continue;
            }
            let at = slot as usize * MAX_PACKET;
            if state.sky.loses() || self.go.write(at, &packet).is_err() {
                state.free.push(slot);
                continue;
            }
            let sge = self.go.sge(at, packet.len());
            let wr = SendWr::send(slot.into()).sge(sge).signaled();
            state.batch.push((wr, state.peers[peer]));
            if state.batch.len() == BATCH {
                self.post(state);
            }
        }
        state.packet = packet;
        Self::post_connected(state, last);
        self.post(state);
        while state.writing < WRITES
            && let Some(write) = state.memory.writes.pop_front()
        {
            self.post_write(state, &write);
        }
        state.start_clock();
    }

    fn post(&self, state: &mut State) {
        if state.batch.is_empty() {
            return;
        }
        if let Err(error) = self.qp.post_sends(&state.batch) {
            // Packets that were not posted count as lost, and are retransmitted in time.
            tracing::warn!("packets: {error}");
            let rest = state.batch.iter().skip(error.index);
            state.free.extend(rest.map(|(wr, _)| wr.id as u32));
        }
        state.batch.clear();
    }

    fn post_write(&self, state: &mut State, write: &Write) {
        let Some(send) = state.memory.sends.get_mut(&write.send) else {
            return;
        };
        let (start, len) = (write.range.start, write.range.end - write.range.start);
        if let (None, Some(memory)) = (&send.mr, &send.memory) {
            let mr = state.memory.pd.reg_raw(memory, Access::empty());
            let mr = mr.inspect_err(|e| tracing::warn!("memory to send from: {e}"));
            send.mr = mr.ok();
        }
        let lost = write.way == Way::Datagrams && state.sky.loses();
        let connections = &mut state.connections;
        let posted = send.mr.as_ref().filter(|_| !lost).is_some_and(|mr| {
            let remote = RemoteAddr {
                addr: write.target.addr.wrapping_add(start),
                rkey: write.target.rkey,
            };
            let id = write.send | WRITE;
            let wr = match write.way {
                Way::Connection { last: false } => SendWr::write(id, remote),
                _ => SendWr::write_imm(id, remote, write.id),
            };
            let wr = wr.sge(mr.sge(start as usize, len as usize)).signaled();
            if write.way != Way::Datagrams {
                // Without it the peer asks again.
                let rc = connections.open(write.to);
                return rc.is_some_and(|rc| rc.qp.post_send_one(wr).is_ok());
            }
            let posted = self.qp.post_send(&wr, &state.peers[write.to]);
            posted
                .inspect_err(|e| tracing::warn!("RDMA Write-Record: {e}"))
                .is_ok()
        });
        if posted {
            state.writing += 1;
        } else {
            // The peer will request the missing bytes.
            state.written(write.send);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use weft_verbs::{DeviceBuilder, LocalMode, RawMemory};

    use super::super::tests::setup;
    use super::super::{Endpoint, FaultInjector, FaultRates, Queue};
    use crate::machine::Want;
    use crate::wire::Meta;

    fn endpoint() -> (Endpoint, Queue) {
        // Each with an engine of its own.
        let device = DeviceBuilder::default().local(LocalMode::Off).open();
        let endpoint = Endpoint::open(&device.unwrap(), &setup()).unwrap();
        let queue = Queue::default();
        endpoint.complete_to(Some(&queue), Some(&queue));
        (endpoint, queue)
    }

    fn meta(tag: u64) -> Meta {
        Meta {
            tagged: true,
            tag,
            data: None,
            len: 8,
        }
    }

    /// Receives the message with this tag, of 8 bytes with its value; it does not depend on calls of the sender's program.
    fn receive(to: &(Endpoint, Queue), tag: u64, end: Instant) {
        let want = Want {
            tagged: true,
            tag,
            ignore: 0,
            peer: None,
        };
        let room = RawMemory::leak(vec![9; 8]);
        assert!(to.0.recv(room.clone(), want, None, tag as usize));
        while to.1.lock().pop_front().is_none() {
            assert!(Instant::now() < end, "message {tag}");
            to.0.progress();
        }
        let mut came = [0; 8];
        room.read(0, &mut came).unwrap();
        assert_eq!(came, [tag as u8; 8]);
    }

    /// The program sends, the packet is lost, and the program waits for something else from then on.
    #[test]
    fn what_was_lost_is_sent_again_without_another_call() {
        let (a, b) = (endpoint(), endpoint());
        let peer = a.0.peer(&b.0.address()).unwrap();
        b.0.peer(&a.0.address()).unwrap();
        for tag in 0..3 {
            let lost = FaultRates {
                lost: 1_000_000,
                ..FaultRates::default()
            };
            a.0.0.state().sky = FaultInjector::new(lost, 1);
            let bytes = [RawMemory::leak(vec![tag as u8; 8])];
            a.0.send(peer, &bytes, meta(tag), None, false).unwrap();
            a.0.0.state().sky = FaultInjector::new(FaultRates::default(), 1);
            receive(&b, tag, Instant::now() + Duration::from_secs(20));
        }
    }

    /// The program sends and computes from then on: collected packets are sent when the previous ones are acknowledged.
    #[test]
    fn what_waits_for_company_goes_without_another_call() {
        let (a, b) = (endpoint(), endpoint());
        let peer = a.0.peer(&b.0.address()).unwrap();
        b.0.peer(&a.0.address()).unwrap();
        let end = Instant::now() + Duration::from_mins(1);
        for _burst in 0..20 {
            for tag in 0..4 {
                let bytes = [RawMemory::leak(vec![tag as u8; 8])];
                a.0.send(peer, &bytes, meta(tag), None, false).unwrap();
            }
            for tag in 0..4 {
                receive(&b, tag, end);
            }
        }
    }
}
