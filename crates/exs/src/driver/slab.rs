//! Numbers for operations: an index, and a count that tells one user of the index from the next.

use crate::machine::OpId;

/// Some bits stay free for the tags of work requests.
const COUNT_MASK: u32 = 0x0fff_ffff;

pub(crate) struct Slab<T> {
    entries: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab {
            entries: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl<T> Slab<T> {
    pub(crate) fn insert(&mut self, value: T) -> OpId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            (self.entries.len() - 1) as u32
        });
        let entry = &mut self.entries[index as usize];
        entry.1 = Some(value);
        OpId(u64::from(entry.0) << 32 | u64::from(index))
    }

    pub(crate) fn get_mut(&mut self, id: OpId) -> Option<&mut T> {
        match self.entries.get_mut(id.0 as u32 as usize) {
            Some((count, value)) if u64::from(*count) == id.0 >> 32 => value.as_mut(),
            _ => None,
        }
    }

    pub(crate) fn remove(&mut self, id: OpId) -> Option<T> {
        let index = id.0 as u32;
        let (count, value) = self.entries.get_mut(index as usize)?;
        if u64::from(*count) != id.0 >> 32 {
            return None;
        }
        let value = value.take()?;
        *count = count.wrapping_add(1) & COUNT_MASK;
        self.free.push(index);
        Some(value)
    }

    /// As [`Slab::remove`], for what is taken apart where it is.
    #[inline]
    pub(crate) fn remove_with<R>(&mut self, id: OpId, f: impl FnOnce(&mut T) -> R) -> Option<R> {
        let index = id.0 as u32;
        let (count, value) = self.entries.get_mut(index as usize)?;
        if u64::from(*count) != id.0 >> 32 {
            return None;
        }
        let out = f(value.as_mut()?);
        *value = None;
        *count = count.wrapping_add(1) & COUNT_MASK;
        self.free.push(index);
        Some(out)
    }

    /// Those in use.
    pub(crate) fn ids(&self) -> impl Iterator<Item = (OpId, &T)> {
        self.entries
            .iter()
            .enumerate()
            .filter_map(|(index, (count, value))| {
                let id = OpId(u64::from(*count) << 32 | index as u64);
                Some((id, value.as_ref()?))
            })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }
}
