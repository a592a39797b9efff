//! The memory of elements, kept from one turn to the next: its pages are resident, and neighbours of this host have them mapped.

use std::sync::{Arc, Mutex};

use weft_verbs::Device;

use crate::link::{Ring, Slot};
use crate::lock;
use crate::rdma::Memory;

/// The memory that a listener keeps from the latest turn.
#[derive(Default)]
pub(crate) struct Kept {
    registered: Mutex<Option<Arc<Memory>>>,
    plain: Mutex<Vec<Box<[u64]>>>,
}

impl Kept {
    /// Registered memory for a turn: that of the latest one, if that is over and had the same form.
    pub(crate) fn registered(
        &self,
        device: &Device,
        ring: &Ring,
    ) -> Result<Arc<Memory>, weft_verbs::Error> {
        let mut kept = lock(&self.registered);
        if let Some(memory) = kept.as_ref()
            && Arc::strong_count(memory) == 1
            && memory.fits(ring)
        {
            return Ok(Arc::clone(memory));
        }
        // Unused memory is dropped first.
        *kept = None;
        let memory = Arc::new(Memory::new(device, ring)?);
        *kept = Some(Arc::clone(&memory));
        Ok(memory)
    }

    /// Memory for an element of so many words that is not registered.
    pub(crate) fn plain(&self, words: usize) -> Box<[u64]> {
        let kept = lock(&self.plain).pop();
        let fits = kept.filter(|kept| kept.len() == words);
        fits.unwrap_or_else(|| vec![0; words].into_boxed_slice())
    }

    /// A turn is over, and has these left.
    pub(crate) fn keep(&self, slots: impl Iterator<Item = Slot>) {
        let mut kept = lock(&self.plain);
        kept.clear();
        kept.extend(slots.map(|slot| slot.plain));
    }
}
