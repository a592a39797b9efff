//! Open devices, as their objects know them. `open` opens and closes them.

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

/// Completion vectors of a context: one thread makes all completions that no program's thread makes.
pub(crate) const COMP_VECTORS: c_int = 1;

/// What the objects of a context share.
pub(crate) struct Ctx {
    pub(crate) which: Which,
    /// Asynchronous events.
    pub(crate) events: Arc<EventQueue<ibv_event_type>>,
    /// Device and inode of the descriptor that the context can be imported by.
    pub(crate) file: (u64, u64),
    /// Where other processes see its objects.
    pub(super) export: Option<Arc<Export>>,
    /// It is another process' context.
    pub(super) foreign: Option<Foreign>,
}

impl Ctx {
    pub(crate) fn is_persona(&self) -> bool {
        self.which == Which::Persona
    }

    /// The handle of an object that was made in it, given that of this process: another process may have used that one in the same context.
    pub(super) fn handle(&self, next: u32) -> u32 {
        next | u32::from(self.foreign.is_some()) << 31
    }
}

/// What an `ibv_context` stands for.
pub(crate) struct Context {
    pub(crate) ctx: Arc<Ctx>,
    /// What other contexts of the same objects are made by.
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

/// Whether a context is of the InfiniBand persona.
pub(crate) fn is_persona(context: *mut ibv_context) -> Result<bool, Errno> {
    Ok(find::<Context>(context)?.ctx.is_persona())
}
