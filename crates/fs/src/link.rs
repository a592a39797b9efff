//! Control messages over a queue pair, for both sides.

use std::time::{Duration, Instant};

use weft_verbs::cm::{ConnParam, LinkOptions};
use weft_verbs::tls::Tls;
use weft_verbs::{
    Access, Cq, Device, Mr, Pd, Qp, QpInit, QpState, RecvWr, SendWr, Wc, WcOpcode, WcStatus,
};

use crate::error::Error;
use crate::wire::MAX_MESSAGE;

/// Limit for the start of a connection.
pub(crate) const START_PATIENCE: Duration = Duration::from_secs(10);
/// Receives that each side has posted: a side that has more messages under way than replies to them breaks the protocol.
const RECEIVES: u64 = 4;
/// Work requests that may be outstanding.
const SENDS: u32 = 64;
/// Messages up to this length travel inline.
const INLINE: usize = 256;
/// RDMA Reads outstanding at once.
pub(crate) const DEPTH: u16 = 32;
/// Numbers of receives have this bit.
const RECEIVE: u64 = 1 << 63;
/// The number of a message's Send, inline and from the message buffer.
const MESSAGE: u64 = 1 << 62;
const STAGED: u64 = MESSAGE | 1;

/// The parameters of one side of a connection.
pub(crate) fn param(tls: Tls, private_data: Vec<u8>) -> ConnParam {
    ConnParam {
        private_data,
        ird: DEPTH,
        ord: DEPTH,
        options: LinkOptions {
            timeout: START_PATIENCE,
            ..LinkOptions::default()
        },
        tls: Some(tls),
    }
}

/// One side's objects of one connection, in a protection domain of their own, so that keys known to one peer are useless to another.
pub(crate) struct Prepared {
    pub(crate) pd: Pd,
    cq: Cq,
    buffers: Mr,
}

impl Prepared {
    pub(crate) fn new(device: &Device) -> Result<(Self, Qp), weft_verbs::Error> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(SENDS + 2 * RECEIVES as u32, None)?;
        let buffers = pd.alloc_mr((RECEIVES as usize + 1) * MAX_MESSAGE, Access::LOCAL_WRITE)?;
        let qp = pd.create_qp(&QpInit {
            max_send_wr: SENDS,
            max_recv_wr: RECEIVES as u32,
            max_sge: 1,
            max_inline: INLINE as u32,
            ..QpInit::new(&cq, &cq)
        })?;
        let receives: Vec<_> = (0..RECEIVES).map(|i| receive(&buffers, i)).collect();
        qp.post_recv(&receives)
            .map_err(|_| weft_verbs::Error::Invalid("receives"))?;
        Ok((Self { pd, cq, buffers }, qp))
    }
}

fn receive(buffers: &Mr, index: u64) -> RecvWr {
    RecvWr::new(RECEIVE | index).sge(buffers.sge(index as usize * MAX_MESSAGE, MAX_MESSAGE))
}

/// Something that has completed.
pub(crate) enum Event {
    /// A message.
    Message(Vec<u8>),
    /// The work request with this number.
    Done(u64),
}

/// A connection.
pub(crate) struct Link {
    // Dropped first, because the connection uses the memory.
    pub(crate) qp: Qp,
    pub(crate) base: Prepared,
    /// The message buffer for sending is free.
    staging_free: bool,
}

impl Link {
    pub(crate) fn new(base: Prepared, qp: Qp) -> Self {
        Self {
            qp,
            base,
            staging_free: true,
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.qp.state() == QpState::Rts
    }

    /// Sends a message. Each side has one under way at a time.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let refused = |_| Error::Gone("cannot send");
        if bytes.len() <= INLINE {
            return self
                .qp
                .post_send_one(SendWr::send(MESSAGE).inline(bytes).signaled())
                .map_err(refused);
        }
        if !self.staging_free || bytes.len() > MAX_MESSAGE {
            return Err(Error::Gone("the last message has not gone out"));
        }
        let at = RECEIVES as usize * MAX_MESSAGE;
        let local = |e: weft_verbs::MemError| Error::Local(e.to_string());
        self.base.buffers.write(at, bytes).map_err(local)?;
        let sge = self.base.buffers.sge(at, bytes.len());
        self.qp
            .post_send_one(SendWr::send(STAGED).sge(sge).signaled())
            .map_err(refused)?;
        self.staging_free = false;
        Ok(())
    }

    /// The next event; waits up to `timeout`. `None`: nothing happened.
    pub(crate) fn next(&mut self, timeout: Duration) -> Result<Option<Event>, Error> {
        let end = Instant::now() + timeout;
        loop {
            let mut wcs = [Wc::default(); 1];
            let left = end.saturating_duration_since(Instant::now());
            let got = self
                .base
                .cq
                .wait(&mut wcs, Some(left))
                .map_err(|e| Error::Local(e.to_string()))?;
            if got == 0 {
                return Ok(None);
            }
            let wc = &wcs[0];
            if wc.status != WcStatus::Success {
                return Err(Error::Gone(match wc.status {
                    WcStatus::RemAccessErr => "the server has taken the memory back",
                    _ => "the peer closed it or went away",
                }));
            }
            if wc.opcode == WcOpcode::Recv && wc.wr_id & RECEIVE != 0 {
                let index = wc.wr_id & !RECEIVE;
                let at = index as usize * MAX_MESSAGE;
                let len = (wc.byte_len as usize).min(MAX_MESSAGE);
                let bytes = self.base.buffers.to_vec(at, len);
                let local = |e: &dyn std::fmt::Display| Error::Local(e.to_string());
                let bytes = bytes.map_err(|e| local(&e))?;
                self.qp
                    .post_recv(&[receive(&self.base.buffers, index)])
                    .map_err(|e| local(&e))?;
                return Ok(Some(Event::Message(bytes)));
            }
            if wc.wr_id & MESSAGE != 0 {
                self.staging_free |= wc.wr_id == STAGED;
                continue;
            }
            return Ok(Some(Event::Done(wc.wr_id)));
        }
    }
}
