//! Open devices, as their objects see them. `open` opens and closes them.

use std::ffi::c_int;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;

use super::events::EventQueue;
use super::export::Export;
use super::foreign::Foreign;
use super::object::{Kind, PerFork, Pool, find};
use super::types::*;
use super::which::Which;

/// Completion vectors of a context: one thread makes all completions that no thread of the program makes.
pub(crate) const COMP_VECTORS: c_int = 1;

/// The part that the objects of a context share.
pub(crate) struct Ctx {
    pub(crate) which: Which,
    pub(crate) events: Arc<EventQueue<ibv_event_type>>,
    /// Device and inode of the descriptor that the context can be imported by.
    pub(crate) file: (u64, u64),
    /// The table of its objects for other processes.
    pub(super) export: Option<Arc<Export>>,
    /// Set for another process' context.
    pub(super) foreign: Option<Foreign>,
}

impl Ctx {
    pub(crate) fn is_persona(&self) -> bool {
        self.which == Which::Persona
    }

    /// The handle of a new object, given this process' next one: another process may have used that one in the same context.
    pub(super) fn handle(&self, next: u32) -> u32 {
        next | u32::from(self.foreign.is_some()) << 31
    }
}

/// The object behind an `ibv_context`.
pub(crate) struct Context {
    pub(crate) ctx: Arc<Ctx>,
    /// The descriptor by which other contexts import its objects.
    pub(super) cmd: OwnedFd,
}

impl Kind for Context {
    type C = verbs_context;
    type Handle = ibv_context;
    const OFFSET: usize = offset_of!(verbs_context, context);
    const MARK: u32 = 0xc027_e087;
    fn pool() -> &'static Pool<Self> {
        static POOL: PerFork<Pool<Context>> = PerFork::new();
        POOL.get()
    }
}

pub(crate) fn is_persona(context: *mut ibv_context) -> Result<bool, Errno> {
    Ok(find::<Context>(context)?.ctx.is_persona())
}
