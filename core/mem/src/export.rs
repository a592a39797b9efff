//! The exported table: the `STag`s of a protection domain, for peers of this host.
//!
//! A file of memory that its owner writes and peers read while it changes:
//!
//! ```text
//!    0  magic, version               8 bytes  "weftPD\0\1"
//!    8  state                        8        1 while the owner keeps it up to date
//!   16  name of the domain          16
//! 4096  8192 buckets of 8 entries of 64 bytes, found by the STag's index (its upper 24 bits)
//!
//! entry   0  generation              8        odd while the rest is being written
//!         8  STag, queue pair      4 + 4      STag 0: free; queue pair 0: any
//!        16  base                    8        the address of the first byte, as peers count
//!        24  length                  8
//!        32  rights, space         4 + 4
//!        40  address                 8        where the first byte is in the space
//!        48  unused                 16
//! ```
//!
//! All numbers are in the host's byte order. An entry that finds its bucket full is not exported; its bytes are
//! then reached as over a wire.

use crate::{Access, ExportAddr};
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Bytes before the first bucket, in words.
const HEADER: usize = 4096 / 8;
const ENTRY: usize = 8;
const SLOTS: usize = 8;
const BUCKET: usize = SLOTS * ENTRY;
const BUCKETS: usize = 8192;
/// The file's length in bytes.
pub(crate) const BYTES: usize = (HEADER + BUCKETS * BUCKET) * 8;

const MAGIC: u64 = u64::from_ne_bytes(*b"weftPD\0\x01");
/// How often a changing entry is read again before it counts as absent.
const TRIES: u32 = 8;

/// The meaning of one `STag`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) stag: u32,
    /// 0 for any.
    pub(crate) qp: u32,
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) rights: Access,
    pub(crate) place: ExportAddr,
}

/// An exported table's words. Nothing read from them is trusted.
#[derive(Clone, Copy)]
pub(crate) struct Words<'a>(&'a [AtomicU64]);

impl<'a> Words<'a> {
    /// The words must be a header and a power of two of buckets.
    pub(crate) fn new(words: &'a [AtomicU64]) -> Words<'a> {
        let buckets = words.len().saturating_sub(HEADER) / BUCKET;
        assert!(buckets.is_power_of_two() && words.len() == HEADER + buckets * BUCKET);
        Words(words)
    }

    /// # Safety
    /// `ptr` must be mapped for [`BYTES`] bytes for the life of the result, aligned to 8, and reached
    /// through atomics only.
    pub(crate) unsafe fn of(ptr: *const u8) -> Words<'a> {
        #[allow(clippy::cast_ptr_alignment)] // the caller's promise
        let words = ptr.cast::<AtomicU64>();
        // SAFETY: the caller's promise.
        Words::new(unsafe { std::slice::from_raw_parts(words, BYTES / 8) })
    }

    /// The entries that an `STag` may be in, the likeliest first.
    #[inline]
    fn bucket(self, stag: u32) -> impl Iterator<Item = &'a [AtomicU64; ENTRY]> {
        let index = (stag >> 8) as usize;
        let buckets = (self.0.len() - HEADER) / BUCKET;
        let bucket = &self.0[HEADER + (index & (buckets - 1)) * BUCKET..][..BUCKET];
        let (entries, _) = bucket.as_chunks();
        // Bits that do not choose the bucket.
        let first = index >> 21;
        (0..SLOTS).map(move |i| &entries[(first + i) % SLOTS])
    }

    /// Makes an empty table known as `id`.
    pub(crate) fn begin(self, id: [u8; 16]) {
        let (id, _) = id.as_chunks();
        self.0[2].store(u64::from_ne_bytes(id[0]), Ordering::Relaxed);
        self.0[3].store(u64::from_ne_bytes(id[1]), Ordering::Relaxed);
        self.0[0].store(MAGIC, Ordering::Relaxed);
        self.0[1].store(1, Ordering::Release);
    }

    /// Marks the table as no longer updated: all its entries are invalid.
    pub(crate) fn end(self) {
        self.0[1].store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// The name it was given, if it is a table in use.
    pub(crate) fn id(self) -> Option<[u8; 16]> {
        let [magic, state, a, b] = std::array::from_fn(|i| load(&self.0[i]).to_ne_bytes());
        let mut id = [0; 16];
        id[..8].copy_from_slice(&a);
        id[8..].copy_from_slice(&b);
        (u64::from_ne_bytes(magic) == MAGIC && u64::from_ne_bytes(state) == 1).then_some(id)
    }

    /// Writes an entry, over an older one with the same index if there is one. One writer at a time.
    pub(crate) fn publish(self, new: &Entry) -> bool {
        let (mut slot, mut free) = (None, None);
        for entry in self.bucket(new.stag) {
            let stag = entry[1].load(Ordering::Relaxed) as u32;
            if stag == 0 {
                free = free.or(Some(entry));
            } else if stag >> 8 == new.stag >> 8 {
                slot = Some(entry);
                break;
            }
        }
        let Some(slot) = slot.or(free) else {
            return false;
        };
        write(
            slot,
            [
                u64::from(new.stag) | u64::from(new.qp) << 32,
                new.base,
                new.len,
                u64::from(new.rights.bits()) | u64::from(new.place.space) << 32,
                new.place.addr,
            ],
        );
        true
    }

    /// Removes an entry. One writer at a time. A peer that looks it up later does not find it; a correct peer that found it before has
    /// published its use before this fence.
    pub(crate) fn retract(self, stag: u32) {
        if let Some(slot) = self
            .bucket(stag)
            .find(|e| e[1].load(Ordering::Relaxed) as u32 == stag)
        {
            write(slot, [0; 5]);
        }
        fence(Ordering::SeqCst);
    }

    /// The meaning of an `STag`, if it is in the table. Lock-free, and safe on any bytes.
    #[inline]
    pub(crate) fn look(self, stag: u32) -> Option<Entry> {
        if stag == 0 || load(&self.0[1]) != 1 {
            return None;
        }
        self.bucket(stag)
            .filter(|e| e[1].load(Ordering::Relaxed) as u32 == stag)
            .find_map(|e| read(e).map(|(_, e)| e).filter(|e| e.stag == stag))
    }

    /// As [`Self::look`], with the entry's place among the words and its generation.
    pub(crate) fn look_at(self, stag: u32) -> Option<(usize, u64, Entry)> {
        if stag == 0 || load(&self.0[1]) != 1 {
            return None;
        }
        self.bucket(stag).find_map(|slot| {
            let (generation, entry) = read(slot).filter(|(_, e)| e.stag == stag)?;
            let place = std::ptr::from_ref(slot).addr() - self.0.as_ptr().addr();
            Some((place / size_of::<AtomicU64>(), generation, entry))
        })
    }

    /// Whether the entry that [`Self::look_at`] found has not changed since.
    #[inline]
    pub(crate) fn is_still(self, entry: usize, generation: u64) -> bool {
        load(&self.0[1]) == 1
            && self
                .0
                .get(entry)
                .is_some_and(|word| load(word) == generation)
    }
}

fn write(slot: &[AtomicU64; ENTRY], words: [u64; 5]) {
    let generation = slot[0].load(Ordering::Relaxed);
    slot[0].store(generation.wrapping_add(1), Ordering::Relaxed);
    fence(Ordering::Release);
    for (to, word) in slot[1..].iter().zip(words) {
        to.store(word, Ordering::Relaxed);
    }
    slot[0].store(generation.wrapping_add(2), Ordering::Release);
}

/// Loads a word with acquire order. Peers map the table for reading only, and there only relaxed loads are certain to be plain ones
/// (see `std::sync::atomic` on read-only memory).
#[inline]
fn load(word: &AtomicU64) -> u64 {
    let value = word.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    value
}

#[inline]
fn read(slot: &[AtomicU64; ENTRY]) -> Option<(u64, Entry)> {
    for _ in 0..TRIES {
        let before = load(&slot[0]);
        let [name, base, len, kind, addr] =
            std::array::from_fn(|i| slot[1 + i].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if before.is_multiple_of(2) && slot[0].load(Ordering::Relaxed) == before {
            let entry = Entry {
                stag: name as u32,
                qp: (name >> 32) as u32,
                base,
                len,
                rights: Access::from_bits_truncate(kind as u32),
                place: ExportAddr {
                    space: (kind >> 32) as u32,
                    addr,
                },
            };
            return Some((before, entry));
        }
        std::hint::spin_loop();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::{BUCKET, Entry, HEADER, Words};
    use crate::{Access, ExportAddr};
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    fn table(buckets: usize) -> Vec<AtomicU64> {
        let table: Vec<_> = (0..HEADER + buckets * BUCKET)
            .map(|_| AtomicU64::new(0))
            .collect();
        Words::new(&table).begin(*b"sixteen bytes id");
        table
    }

    /// Every field follows from the `STag` and one number, so that a torn read shows.
    fn entry(stag: u32, n: u64) -> Entry {
        let mix = |k: u64| (u64::from(stag) << 32 ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ k);
        Entry {
            stag,
            qp: n as u32,
            base: mix(1),
            len: mix(2),
            rights: Access::from_bits_truncate(mix(3) as u32),
            place: ExportAddr {
                space: mix(4) as u32,
                addr: mix(5),
            },
        }
    }

    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }
    }

    #[test]
    fn a_table_has_a_name_until_its_end() {
        let words = table(1);
        let t = Words::new(&words);
        assert_eq!(t.id(), Some(*b"sixteen bytes id"));
        assert!(t.publish(&entry(0x100, 1)));
        assert_eq!(t.look(0x100), Some(entry(0x100, 1)));
        assert_eq!(t.look(0), None);
        t.end();
        assert_eq!(t.id(), None);
        assert_eq!(t.look(0x100), None);
        words[1].store(1, Ordering::Relaxed);
        words[0].fetch_add(1, Ordering::Relaxed);
        assert_eq!(t.id(), None);
    }

    #[test]
    fn a_window_that_is_bound_again_keeps_its_place() {
        let words = table(1);
        let t = Words::new(&words);
        for stag in 1..9 {
            assert!(t.publish(&entry(stag << 8, 1)));
        }
        assert!(!t.publish(&entry(0x900, 1)), "the bucket is full");
        assert!(t.publish(&entry(0x1ff, 2)));
        assert_eq!(t.look(0x1ff), Some(entry(0x1ff, 2)));
        assert_eq!(t.look(0x100), None);
        t.retract(0x200);
        assert!(t.publish(&entry(0x900, 1)));
    }

    #[test]
    fn churn_agrees_with_a_map_while_somebody_reads() {
        let words = table(4);
        let t = Words::new(&words);
        let stop = AtomicBool::new(false);
        let steps = if cfg!(miri) { 300 } else { 300_000 };
        let seen = std::thread::scope(|s| {
            let reader = s.spawn(|| {
                let mut random = Random(77);
                let mut seen = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    let stag = (1 + random.next() as u32 % 64) << 8 | 5;
                    if let Some(found) = t.look(stag) {
                        assert_eq!(found, entry(stag, found.qp.into()));
                        seen += 1;
                    }
                }
                seen
            });
            let mut random = Random(99);
            let mut oracle = HashMap::new();
            for n in 0..steps {
                let stag = (1 + random.next() as u32 % 64) << 8 | 5;
                if random.next().is_multiple_of(2) {
                    if t.publish(&entry(stag, n)) {
                        oracle.insert(stag, n);
                    } else {
                        let mates = |s: &&u32| (**s >> 8) % 4 == (stag >> 8) % 4;
                        assert_eq!(oracle.keys().filter(mates).count(), 8);
                        assert!(!oracle.contains_key(&stag));
                    }
                } else {
                    t.retract(stag);
                    oracle.remove(&stag);
                }
                let expected = oracle.get(&stag).map(|&n| entry(stag, n));
                assert_eq!(t.look(stag), expected);
            }
            stop.store(true, Ordering::Relaxed);
            reader.join().unwrap()
        });
        assert!(cfg!(miri) || seen > 0);
    }

    #[test]
    fn scribbles_are_read_without_harm() {
        let words = table(2);
        let t = Words::new(&words);
        let mut random = Random(5);
        let mut found = 0;
        for _ in 0..if cfg!(miri) { 10 } else { 2000 } {
            for w in &words[HEADER..] {
                // Requested STags, and generations of both kinds.
                w.store(random.next() & 0xffff_ffff_0000_0703, Ordering::Relaxed);
            }
            for stag in [1, 0x100, 0x201, 0x302, 0x703] {
                found += u32::from(t.look(stag).is_some_and(|e| e.stag == stag));
            }
        }
        assert!(found > 0);
    }
}
