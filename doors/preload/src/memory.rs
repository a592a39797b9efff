//! The memory of the library, which does not come from the program's `malloc`: a handler may have interrupted that, and may call `poll`, or fork.
//!
//! Blocks have sizes that are powers of two. Freed blocks of a size are in a list. Longer ones are mappings of their own.
//!
//! # Safety
//!
//! A block in a list is used by nobody, and begins with the address of the next one.

use std::alloc::{GlobalAlloc, Layout};
use std::ptr::null_mut;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::private::{Guards, Private};

const PAGE: usize = 4096;
const SMALLEST: usize = 16;
const LARGEST: usize = 32 << 10;
const SIZES: usize = (LARGEST / SMALLEST).trailing_zeros() as usize + 1;
/// Blocks are cut from mappings of this size.
const CHUNK: usize = 128 << 10;

pub(crate) struct Blocks {
    free: [*mut u8; SIZES],
    /// What is left of the last mapping.
    next: *mut u8,
    left: usize,
}

// SAFETY: the addresses belong to the whole process.
unsafe impl Send for Blocks {}

pub(crate) static BLOCKS: Private<Blocks> = Private::new(
    Guards::Memory,
    Blocks {
        free: [null_mut(); SIZES],
        next: null_mut(),
        left: 0,
    },
);

/// A new mapping; null: there is none.
fn map(len: usize) -> *mut u8 {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: memory that nobody has.
    unsafe { mmap_anonymous(null_mut(), len, prot, flags) }.map_or(null_mut(), <*mut _>::cast)
}

/// The size of a block of this layout; `None`: a mapping.
fn block(layout: Layout) -> Option<usize> {
    let len = layout.size().max(layout.align()).max(SMALLEST);
    (len <= LARGEST).then(|| len.next_power_of_two())
}

fn list(size: usize) -> usize {
    (size / SMALLEST).trailing_zeros() as usize
}

impl Blocks {
    fn take(&mut self, size: usize) -> *mut u8 {
        let first = &mut self.free[list(size)];
        if !first.is_null() {
            let block = *first;
            // SAFETY: a block in a list.
            *first = unsafe { block.cast::<*mut u8>().read() };
            return block;
        }
        let gap = self.next.align_offset(size.min(PAGE));
        if self.left < size + gap {
            (self.next, self.left) = (map(CHUNK), CHUNK);
            if self.next.is_null() {
                self.left = 0;
                return null_mut();
            }
            return self.cut(0, size);
        }
        self.cut(gap, size)
    }

    fn cut(&mut self, gap: usize, size: usize) -> *mut u8 {
        let block = self.next.wrapping_add(gap);
        self.next = block.wrapping_add(size);
        self.left -= gap + size;
        block
    }

    fn give(&mut self, block: *mut u8, size: usize) {
        let first = &mut self.free[list(size)];
        // SAFETY: a block that its user has freed.
        unsafe { block.cast::<*mut u8>().write(*first) };
        *first = block;
    }
}

struct Own;

#[global_allocator]
static OWN: Own = Own;

// SAFETY: a block or a mapping has one user, and is as long and as aligned as asked for.
unsafe impl GlobalAlloc for Own {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.align() > PAGE {
            return null_mut();
        }
        let Some(size) = block(layout) else {
            return map(layout.size());
        };
        // A fault's handler, which has interrupted this very function, gets a mapping, of which the block's size is used.
        BLOCKS
            .lock_once()
            .map_or_else(|| map(size), |mut blocks| blocks.take(size))
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        let Some(size) = block(layout) else {
            // SAFETY: a mapping of this length.
            let _ = unsafe { munmap(at.cast(), layout.size()) };
            return;
        };
        if let Some(mut blocks) = BLOCKS.lock_once() {
            blocks.give(at, size);
        }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        let new = unsafe { Layout::from_size_align_unchecked(len, layout.align()) };
        if block(layout).is_some() && block(layout) == block(new) {
            return at;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let to = self.alloc(new);
            if !to.is_null() {
                at.copy_to_nonoverlapping(to, layout.size().min(len));
                self.dealloc(at, layout);
            }
            to
        }
    }
}
