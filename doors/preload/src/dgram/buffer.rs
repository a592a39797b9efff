//! Memory through which datagrams that may be frames are sent and received.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

/// Memory for one datagram.
pub(super) struct Buffer(pub(super) NonNull<u8>);

pub(super) const ROOM: usize = 64 << 10;
const LAYOUT: Layout = Layout::new::<[u8; ROOM]>();
/// Buffers that wait: a thread that sends or receives has one, and a handler that interrupts it another.
static SPARE: [AtomicPtr<u8>; 8] = [const { AtomicPtr::new(null_mut()) }; 8];

impl Buffer {
    pub(super) fn take() -> Option<Buffer> {
        let spare = SPARE
            .iter()
            .find_map(|spare| NonNull::new(spare.swap(null_mut(), SeqCst)));
        // SAFETY: the layout is not empty. All of it is written once, so that it is a slice of bytes.
        let new = || unsafe {
            let new = NonNull::new(alloc(LAYOUT))?;
            new.as_ptr().write_bytes(0, ROOM);
            Some(new)
        };
        spare.or_else(new).map(Buffer)
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: memory of that size, which is ours alone.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), ROOM) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let is_kept = SPARE.iter().any(|spare| {
            spare
                .compare_exchange(null_mut(), self.0.as_ptr(), SeqCst, Relaxed)
                .is_ok()
        });
        if !is_kept {
            // SAFETY: it is from `alloc`, and nobody has it.
            unsafe { dealloc(self.0.as_ptr(), LAYOUT) };
        }
    }
}
