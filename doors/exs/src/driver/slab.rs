//! Ids of operations: an index, and a count that distinguishes successive users of the index.

use crate::machine::OpId;

/// The upper bits stay free for the tags of work requests.
const COUNT_MASK: u32 = 0x0fff_ffff;

pub(crate) struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
    inserted: u64,
}

struct Entry<T> {
    count: u32,
    /// Number of values inserted before it.
    born: u64,
    value: Option<T>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab {
            entries: Vec::new(),
            free: Vec::new(),
            inserted: 0,
        }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> OpId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(Entry {
                count: 0,
                born: 0,
                value: None,
            });
            (self.entries.len() - 1) as u32
        });
        let entry = &mut self.entries[index as usize];
        entry.value = Some(value);
        entry.born = self.inserted;
        self.inserted += 1;
        OpId(u64::from(entry.count) << 32 | u64::from(index))
    }

    pub(crate) fn get_mut(&mut self, id: OpId) -> Option<&mut T> {
        match self.entries.get_mut(id.0 as u32 as usize) {
            Some(entry) if u64::from(entry.count) == id.0 >> 32 => entry.value.as_mut(),
            _ => None,
        }
    }

    pub(crate) fn remove(&mut self, id: OpId) -> Option<T> {
        let index = id.0 as u32;
        let entry = self.entries.get_mut(index as usize)?;
        if u64::from(entry.count) != id.0 >> 32 {
            return None;
        }
        let value = entry.value.take()?;
        entry.count = entry.count.wrapping_add(1) & COUNT_MASK;
        self.free.push(index);
        Some(value)
    }

    /// Like [`Slab::remove`], but `f` takes the value apart in place.
    #[inline]
    pub(crate) fn remove_with<R>(&mut self, id: OpId, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        let index = id.0 as u32;
        let entry = self.entries.get_mut(index as usize)?;
        if u64::from(entry.count) != id.0 >> 32 {
            return None;
        }
        let out = f(entry.value.as_mut()?);
        entry.value = None;
        entry.count = entry.count.wrapping_add(1) & COUNT_MASK;
        self.free.push(index);
        Some(out)
    }

    /// The values in use, with their ids.
    pub(crate) fn ids(&self) -> impl Iterator<Item = (OpId, &T)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(index, entry)| {
                let id = OpId(u64::from(entry.count) << 32 | index as u64);
                Some((id, entry.value.as_ref()?))
            })
    }

    /// The ids of the values that `wanted` selects, in order of insertion.
    pub(crate) fn oldest_first(&self, wanted: impl Fn(&T) -> bool) -> Vec<OpId> {
        let wanted = self.ids().filter(|(_, value)| wanted(value));
        let mut ids: Vec<OpId> = wanted.map(|(id, _)| id).collect();
        ids.sort_by_key(|id| self.entries[id.0 as u32 as usize].born);
        ids
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_come_first_wherever_they_are() {
        let mut slab = Slab::default();
        let ids: Vec<OpId> = (0..4).map(|n| slab.insert(n)).collect();
        slab.remove(ids[0]);
        slab.remove(ids[2]);
        slab.insert(4);
        slab.insert(5);
        let ids = slab.oldest_first(|_| true).into_iter();
        let values = ids.filter_map(|id| slab.remove(id));
        assert_eq!(values.collect::<Vec<_>>(), [1, 3, 4, 5]);
    }
}
