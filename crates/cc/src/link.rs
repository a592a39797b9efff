//! Control messages over a queue pair, for both sides.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use weft_sys::{Interest, poll_fds};
use weft_verbs::above::CqAbove;
use weft_verbs::cm::{ConnParam, LinkOptions};
use weft_verbs::tls::Tls;
use weft_verbs::{
    Access, CompChannel, Cq, Device, MemError, Mr, Pd, Qp, QpInit, QpState, RecvWr, SendWr, Wc,
    WcOpcode, WcStatus,
};

use crate::wire::MAX_MESSAGE;

/// Limit for the start of a connection.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// Receives that each side has posted.
const RECEIVES: u64 = 4;
/// Work requests that may be outstanding.
pub(crate) const SENDS: u32 = 64;
/// RDMA Reads outstanding at once.
pub(crate) const DEPTH: u16 = 16;
const RECEIVE: u64 = 1 << 63;
const MESSAGE: u64 = 1 << 62;

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

/// The reason why a connection is unusable.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Gone(pub(crate) String);

impl From<MemError> for Gone {
    fn from(e: MemError) -> Self {
        Self(e.to_string())
    }
}

/// Something that has completed.
pub(crate) enum Event {
    /// A message.
    Message(Vec<u8>),
    /// One of our work requests is done.
    Done,
}

/// One side of a connection, in a protection domain of its own, so that keys known to one peer are useless to another.
pub(crate) struct Link {
    // Dropped first, because the connection uses the memory.
    pub(crate) qp: Qp,
    pub(crate) pd: Pd,
    cq: Cq,
    channel: CompChannel,
    buffers: Mr,
    sending: bool,
}

impl Link {
    pub(crate) fn new(device: &Device) -> Result<Self, weft_verbs::Error> {
        let pd = device.alloc_pd()?;
        let channel = device.create_comp_channel()?;
        let cq = device.create_cq(SENDS + 2 * RECEIVES as u32, Some(&channel))?;
        let buffers = pd.alloc_mr((RECEIVES as usize + 1) * MAX_MESSAGE, Access::LOCAL_WRITE)?;
        let qp = pd.create_qp(&QpInit {
            max_send_wr: SENDS,
            max_recv_wr: RECEIVES as u32,
            max_sge: 1,
            ..QpInit::new(&cq, &cq)
        })?;
        let receives: Vec<_> = (0..RECEIVES).map(|i| receive(&buffers, i)).collect();
        qp.post_recv(&receives)
            .map_err(|_| weft_verbs::Error::Invalid("receives"))?;
        Ok(Self {
            qp,
            pd,
            cq,
            channel,
            buffers,
            sending: false,
        })
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.qp.state() == QpState::Rts
    }

    /// Sends a message. Each side has one under way at a time.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<(), Gone> {
        let end = Instant::now() + START_PATIENCE;
        while self.sending {
            if Instant::now() > end {
                return Err(Gone("the peer takes no messages".into()));
            }
            // Only our own completion can come: a peer that sends now breaks the protocol.
            if let Some(Event::Message(_)) = self.next(Duration::from_secs(1), None)? {
                return Err(Gone("a message out of turn".into()));
            }
        }
        if bytes.len() > MAX_MESSAGE {
            return Err(Gone("a message that is too long".into()));
        }
        let at = RECEIVES as usize * MAX_MESSAGE;
        self.buffers.write(at, bytes)?;
        self.post(SendWr::send(MESSAGE).sge(self.buffers.sge(at, bytes.len())))?;
        self.sending = true;
        Ok(())
    }

    /// Posts a work request; its completion is an [`Event::Done`].
    pub(crate) fn post(&mut self, wr: SendWr) -> Result<(), Gone> {
        self.qp
            .post_send_one(wr.signaled())
            .map_err(|e| Gone(format!("the connection has ended: {e}")))
    }

    /// The next event; waits up to `timeout`, or until `other` can be read. `None`: nothing happened here.
    ///
    /// Compilers run long, and most of the time nothing comes: so the engine looks after the connection, and no thread keeps it by polling.
    pub(crate) fn next(
        &mut self,
        timeout: Duration,
        other: Option<BorrowedFd<'_>>,
    ) -> Result<Option<Event>, Gone> {
        let end = Instant::now() + timeout;
        loop {
            if let Some(event) = self.take()? {
                return Ok(Some(event));
            }
            // Later completions raise an event.
            self.cq.req_notify(false);
            if let Some(event) = self.take()? {
                return Ok(Some(event));
            }
            let Some(left) = end
                .checked_duration_since(Instant::now())
                .filter(|left| !left.is_zero())
            else {
                return Ok(None);
            };
            let channel = (self.channel.as_fd(), Interest::READ);
            let ready = match other {
                Some(other) => poll_fds(&[channel, (other, Interest::READ)], Some(left)),
                None => poll_fds(&[channel], Some(left)),
            };
            // A signal's handler ran: look again.
            let ready = ready.unwrap_or(0);
            if ready & 1 != 0 {
                while self.channel.get_event(Some(Duration::ZERO)).is_some() {}
            }
            if ready & 2 != 0 {
                return self.take();
            }
        }
    }

    fn take(&mut self) -> Result<Option<Event>, Gone> {
        let mut wcs = [Wc::default(); 1];
        while self.cq.take(&mut wcs).map_err(|e| Gone(e.to_string()))? > 0 {
            let wc = &wcs[0];
            if wc.status != WcStatus::Success {
                return Err(Gone(match wc.status {
                    WcStatus::RemAccessErr => "the peer does not let us reach its memory".into(),
                    _ => "the peer closed the connection or went away".into(),
                }));
            }
            if wc.opcode == WcOpcode::Recv && wc.wr_id & RECEIVE != 0 {
                let index = wc.wr_id & !RECEIVE;
                let bytes = self.buffers.to_vec(
                    index as usize * MAX_MESSAGE,
                    (wc.byte_len as usize).min(MAX_MESSAGE),
                )?;
                self.qp
                    .post_recv(&[receive(&self.buffers, index)])
                    .map_err(|e| Gone(e.to_string()))?;
                return Ok(Some(Event::Message(bytes)));
            }
            if wc.wr_id == MESSAGE {
                self.sending = false;
                continue;
            }
            return Ok(Some(Event::Done));
        }
        Ok(None)
    }
}

fn receive(buffers: &Mr, index: u64) -> RecvWr {
    RecvWr::new(RECEIVE | index).sge(buffers.sge(index as usize * MAX_MESSAGE, MAX_MESSAGE))
}
