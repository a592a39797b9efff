//! The life of identifiers: creation, migration to another channel, destruction.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use rustix::io::Errno;

use super::device;
use super::id::{self, Channel, Core, Held, Place, Stage, core, set};
use super::types::{
    RDMA_PS_IB, RDMA_PS_IPOIB, RDMA_PS_TCP, RDMA_PS_UDP, rdma_cm_id, rdma_event_channel,
    rdma_port_space,
};
use crate::call::run;
use crate::verbs::object::{lock, turn};
use crate::verbs::types::{IBV_QPT_RC, IBV_QPT_UD, ibv_qp_type};

impl Core {
    fn destroy(self: &Arc<Self>) {
        let (stage, dials) = {
            let mut setup = self.setup();
            setup.port = None;
            let stage = std::mem::replace(&mut setup.stage, Stage::Gone);
            (stage, setup.dials.take())
        };
        match (stage, dials) {
            (Stage::Joined(link), _) => link.close(),
            // Nobody waits for the peer's answer.
            (Stage::Joining, Some(link)) => link.forget(),
            (other, _) => drop(other),
        }
        let Some(place) = lock(&self.place).take() else {
            return;
        };
        // Requests that the program can no longer fetch are turned away.
        match place.channel.events() {
            Ok(events) => self.subject.close(&events),
            Err(_) => self.subject.settle(),
        }
        if place.sync {
            place.channel.destroy();
        }
    }

    fn migrate(self: &Arc<Self>, to: Option<Arc<Channel>>) -> Result<(), Errno> {
        let sync = to.is_none();
        let to = match to {
            Some(to) => to,
            None => Channel::create()?,
        };
        self.ack_own();
        let old = {
            let mut place = lock(&self.place);
            let place = place.as_mut().ok_or(Errno::INVAL)?;
            let next = Place {
                channel: Arc::clone(&to),
                sync,
            };
            let old = std::mem::replace(place, next);
            if !Arc::ptr_eq(&old.channel, &to) {
                old.channel.hand_over(self, &to);
            }
            old
        };
        set!(self, channel = to.handle());
        self.subject.settle();
        if old.sync {
            old.channel.destroy();
        }
        Ok(())
    }
}

/// The program's channel, or none.
fn optional(channel: *mut rdma_event_channel) -> Result<Option<Arc<Channel>>, Errno> {
    let given = (!channel.is_null()).then(|| id::channel(channel));
    given.transpose()
}

/// `rdma_create_id(3)`.
///
/// # Safety
/// As its manual page: a place for a pointer at `id`.
pub unsafe fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: rdma_port_space,
) -> c_int {
    run(|| {
        let qp_type = match ps {
            RDMA_PS_TCP | RDMA_PS_IB => IBV_QPT_RC,
            RDMA_PS_UDP | RDMA_PS_IPOIB => IBV_QPT_UD,
            _ => return Err(Errno::PROTONOSUPPORT),
        };
        let made = new(optional(channel)?, context, ps, qp_type)?;
        if id.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        unsafe { id.write(made.handle()) };
        Ok(0)
    })
}

/// A new identifier without a destination.
pub(super) fn new(
    channel: Option<Arc<Channel>>,
    context: *mut c_void,
    ps: rdma_port_space,
    qp_type: ibv_qp_type,
) -> Result<Arc<Core>, Errno> {
    device::of(ps)?;
    id::create(channel, context, ps, qp_type, Stage::Idle)
}

/// `rdma_destroy_id(3)`.
///
/// # Safety
/// Any pointer may be given.
pub unsafe fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    run(|| destroy(id).map(|()| 0))
}

pub(super) fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    let turn = turn::<Held>(id)?;
    turn.0.ack_own();
    let Held(core) = turn.retire();
    core.destroy();
    Ok(())
}

/// `rdma_migrate_id(3)`.
///
/// # Safety
/// Any pointers may be given.
pub unsafe fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int {
    run(|| {
        let core = core(id)?;
        core.migrate(optional(channel)?).map(|()| 0)
    })
}
