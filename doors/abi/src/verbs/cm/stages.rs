//! The steps of a connection that both kinds of wire have: made, failed, and its end.

use std::sync::Arc;
use std::time::Duration;

use weft_verbs::ext::DeviceExt;

use super::device;
use super::id::{Core, Stage};
use super::link::Link;
use super::news::News;
use super::qp::ACK_TIMEOUT;
use super::types::{RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_TIMEWAIT_EXIT};
use crate::verbs::types::IBV_QPS_RTS;

/// How long packets of a connection that both sides have left may be on their way: 4.096 µs · 2^17, Linux's value for RoCE.
const TIME_WAIT: Duration = Duration::from_nanos(4096 << 17);

/// Reports the connection's end, also when the queue pair ends without one.
pub(super) struct Ending(pub(super) Arc<Core>);

impl Drop for Ending {
    fn drop(&mut self) {
        let mut left = false;
        let old = {
            let mut setup = self.0.setup();
            match std::mem::replace(&mut setup.stage, Stage::Over(None)) {
                Stage::Joined(link) => {
                    setup.stage = Stage::Over(Some(link));
                    None
                }
                Stage::Leaving => {
                    left = true;
                    None
                }
                // Probably destroyed.
                other => Some(std::mem::replace(&mut setup.stage, other)),
            }
        };
        if old.is_none() {
            self.0.tell(News::new(RDMA_CM_EVENT_DISCONNECTED));
        }
        if left {
            self.0.wait_out();
        }
    }
}

impl Core {
    /// The connection is established. False: the identifier does not exist any more.
    pub(super) fn joined(&self, link: Link) -> bool {
        let qp = match &link {
            Link::Program(name) => name.get().ok(),
            Link::Roce(link) => link.object().ok(),
            Link::Carrier(_) => None,
        };
        if let Some(qp) = qp {
            let (retries, timeout) = {
                let setup = self.setup();
                (setup.retries, setup.ack_timeout)
            };
            if qp.is_persona() {
                qp.show_connection(retries.count, retries.rnr, timeout.unwrap_or(ACK_TIMEOUT));
            }
            qp.set_state(IBV_QPS_RTS);
        }
        let mut setup = self.setup();
        let waits = matches!(setup.stage, Stage::Joining);
        if waits {
            setup.stage = Stage::Joined(link);
        }
        waits
    }

    /// The connection has failed. False: the identifier does not exist any more.
    pub(super) fn failed(&self) -> bool {
        let mut setup = self.setup();
        let waits = matches!(setup.stage, Stage::Joining);
        if waits {
            setup.stage = Stage::Over(None);
        }
        waits
    }

    /// Both sides have left the connection: InfiniBand's connection managers keep its queue pair number for a while, and report when that is over.
    pub(super) fn wait_out(self: &Arc<Self>) {
        if let Ok(nic) = device::of(self.ps)
            && nic.persona
        {
            let core = Arc::downgrade(self);
            nic.native.after(TIME_WAIT, move || {
                if let Some(core) = core.upgrade() {
                    core.tell(News::new(RDMA_CM_EVENT_TIMEWAIT_EXIT));
                }
            });
        }
    }
}
