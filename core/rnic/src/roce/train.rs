//! Packets of one size for one destination, which the kernel gets in one system call.

use std::io;
use std::net::{IpAddr, SocketAddr};

use weft_sys::udp::TRAIN;
use weft_wire::roce::{ICRC_LEN, Icrc, Route};

use super::fault::RoceFault;
use super::port::PortInner;

/// A train has no more bytes, IP and UDP headers included.
const TRAIN_BYTES: usize = 65_000;
/// The bits of the traffic class that belong to ECN; all of them together are the mark of congestion (RFC 3168).
pub(super) const ECN: u8 = 3;

/// Packets that are made and not sent.
#[derive(Default)]
pub(super) struct Train {
    pub(super) bytes: Vec<u8>,
    /// Bytes of each; the last may be shorter.
    each: usize,
    /// Where a packet starts that is longer than those before it, or `bytes.len()`.
    end: usize,
    /// Nothing may follow.
    pub(super) closed: bool,
    /// The fault of its only packet, and of the packet that begins the next one.
    fault: Option<RoceFault>,
    next_fault: Option<RoceFault>,
}

/// Where a train goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Course {
    pub(super) to: SocketAddr,
    /// Our address, where it decides on the interface: to a group.
    pub(super) from: Option<IpAddr>,
    pub(super) traffic_class: u8,
}

/// The socket has no room.
pub(super) struct Full;

impl Train {
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether there is something that goes before what is appended next.
    pub(super) fn has_whole(&self) -> bool {
        self.end > 0
    }

    /// Whether a packet of this length may follow those that are there.
    pub(super) fn takes(&self, len: usize) -> bool {
        self.is_empty() || !self.closed && len <= self.each
    }

    /// A packet was appended that starts here.
    pub(super) fn appended(&mut self, start: usize) {
        let len = self.bytes.len() - start;
        if start == 0 {
            self.each = len;
        }
        self.end = self.bytes.len();
        if len > self.each {
            (self.end, self.closed) = (start, true);
        }
        self.closed |=
            len < self.each || self.end / self.each >= TRAIN || self.end + self.each > TRAIN_BYTES;
    }

    /// As [`Train::appended`], a packet that goes by itself.
    pub(super) fn appended_alone(&mut self, start: usize, fault: RoceFault) {
        self.closed = true;
        if start == 0 {
            (self.each, self.end) = (self.bytes.len(), self.bytes.len());
            self.fault = Some(fault);
        } else {
            self.end = start;
            self.next_fault = Some(fault);
        }
    }

    /// Drops all of it.
    pub(super) fn clear(&mut self) {
        self.bytes.clear();
        *self = Train {
            bytes: std::mem::take(&mut self.bytes),
            ..Train::default()
        };
    }

    /// So many bytes are gone. A packet that did not belong to the train begins the next one.
    fn gone(&mut self, taken: usize) {
        self.bytes.drain(..taken);
        self.end -= taken;
        if self.end == 0 {
            (self.each, self.end) = (self.bytes.len(), self.bytes.len());
            self.fault = self.next_fault.take();
            self.closed = self.fault.is_some();
        }
    }

    /// Writes the ICRC at the end of each packet. `cut`: the kernel numbers the packets of a train, else all have the identification 0.
    fn seal(&mut self, route: &Route, cut: bool) {
        for (at, packet) in self.bytes[..self.end].chunks_mut(self.each).enumerate() {
            let Some((packet, icrc)) = packet.split_last_chunk_mut::<ICRC_LEN>() else {
                continue;
            };
            let identification = if cut { at as u16 } else { 0 };
            let mut crc = Icrc::new(route, identification, packet.len());
            crc.headers(packet);
            *icrc = crc.finish();
        }
        if self.fault == Some(RoceFault::Corrupt)
            && let Some(last) = self.bytes[..self.end].last_mut()
        {
            *last ^= 1;
        }
    }

    /// Gives packets of one size to the kernel, all of them or some.
    ///
    /// # Errors
    /// [`Full`]: none went. What the kernel refuses for another reason is lost, as packets may be.
    pub(super) fn push(&mut self, port: &PortInner, course: &Course) -> Result<(), Full> {
        let Course {
            to,
            from,
            traffic_class,
        } = *course;
        let class = match self.fault {
            Some(RoceFault::Mark) => traffic_class | ECN,
            _ => traffic_class,
        };
        let route = Route {
            src: port.local_addr(),
            dst: to,
        };
        let socket = port.socket();
        let several = self.end > self.each;
        self.seal(&route, several);
        let bytes = &self.bytes[..self.end];
        let sent = if several {
            match socket.send_cut(bytes, self.each, to, from, class) {
                Ok(true) => Ok(self.end),
                Ok(false) => {
                    self.seal(&route, false);
                    let bytes = &self.bytes[..self.end];
                    socket.send_each(bytes, self.each, to, from, class)
                }
                Err(error) => Err(error),
            }
        } else {
            let sent = socket.send_marked(bytes, to, from, class);
            sent.map(|()| self.end)
        };
        match sent {
            Ok(taken) => self.gone(taken),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Full),
            Err(error) => {
                port.report(&error, to, self.each);
                self.gone(self.end);
            }
        }
        Ok(())
    }
}
