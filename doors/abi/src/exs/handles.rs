//! Handle numbers for the objects of a program.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, RwLock};

use rustix::io::Errno;

/// Objects by number. A number is an index (low 16 bits) and a generation (the 15 bits above). So it stays invalid for a long time
/// after its object is gone. Numbers are above zero.
pub(crate) struct Handles<T>(RwLock<Inner<T>>);

struct Inner<T> {
    slots: Vec<Slot<T>>,
    /// Oldest first, so that an index is reused as late as possible.
    free: VecDeque<u16>,
}

struct Slot<T> {
    generation: u16,
    object: Option<Arc<T>>,
}

const GENERATIONS: u16 = 0x7fff;

impl<T> Handles<T> {
    pub(crate) const fn new() -> Handles<T> {
        Handles(RwLock::new(Inner {
            slots: Vec::new(),
            free: VecDeque::new(),
        }))
    }

    /// A number for the object.
    ///
    /// # Errors
    /// `EMFILE` when 65,536 are in use.
    pub(crate) fn insert(&self, object: Arc<T>) -> Result<i32, Errno> {
        let mut inner = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let place = if let Some(place) = inner.free.pop_front() {
            place
        } else {
            let place = u16::try_from(inner.slots.len()).map_err(|_| Errno::MFILE)?;
            inner.slots.push(Slot {
                generation: 0,
                object: None,
            });
            place
        };
        let slot = &mut inner.slots[usize::from(place)];
        slot.generation = slot.generation % GENERATIONS + 1;
        slot.object = Some(object);
        Ok(i32::from(slot.generation) << 16 | i32::from(place))
    }

    /// The object.
    ///
    /// # Errors
    /// `EBADF` for a number that was never assigned, or whose object is gone.
    pub(crate) fn get(&self, handle: i32) -> Result<Arc<T>, Errno> {
        let (generation, place) = split(handle)?;
        let inner = self.0.read().unwrap_or_else(PoisonError::into_inner);
        inner
            .slots
            .get(place)
            .filter(|slot| slot.generation == generation)
            .and_then(|slot| slot.object.clone())
            .ok_or(Errno::BADF)
    }

    /// Removes the object if `may` allows it; the number is invalid from then on.
    ///
    /// # Errors
    /// As in [`Self::get`], or those of `may`.
    pub(crate) fn remove(
        &self,
        handle: i32,
        may: impl FnOnce(&T) -> Result<(), Errno>,
    ) -> Result<Arc<T>, Errno> {
        let (generation, place) = split(handle)?;
        let mut inner = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let slot = inner.slots.get_mut(place).ok_or(Errno::BADF)?;
        if slot.generation != generation {
            return Err(Errno::BADF);
        }
        may(slot.object.as_ref().ok_or(Errno::BADF)?)?;
        let object = slot.object.take().ok_or(Errno::BADF)?;
        inner.free.push_back(place as u16);
        Ok(object)
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        let inner = self.0.read().unwrap_or_else(PoisonError::into_inner);
        inner
            .slots
            .iter()
            .filter_map(|slot| slot.object.clone())
            .collect()
    }
}

fn split(handle: i32) -> Result<(u16, usize), Errno> {
    let handle = u32::try_from(handle).map_err(|_| Errno::BADF)?;
    Ok(((handle >> 16) as u16, (handle & 0xffff) as usize))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(table: &Handles<u32>, handle: i32) -> bool {
        table.get(handle).is_err_and(|e| e == Errno::BADF)
            && table
                .remove(handle, |_| Ok(()))
                .is_err_and(|e| e == Errno::BADF)
    }

    #[test]
    fn a_removed_handle_stays_bad_while_its_place_is_used_again() {
        let table = Handles::new();
        let first = table.insert(Arc::new(0_u32)).unwrap();
        assert!(first > 0);
        let mut old = first;
        assert_eq!(*table.remove(old, |_| Ok(())).unwrap(), 0);
        for i in 1..u32::from(GENERATIONS) {
            let next = table.insert(Arc::new(i)).unwrap();
            assert_eq!(next & 0xffff, first & 0xffff, "one place serves");
            assert!(gone(&table, old) && gone(&table, first));
            assert_eq!(*table.get(next).unwrap(), i);
            table.remove(next, |_| Ok(())).unwrap();
            old = next;
        }
        assert_eq!(table.insert(Arc::new(1)).unwrap(), first, "and around");
    }

    #[test]
    fn what_was_never_given_out_is_bad() {
        let table = Handles::new();
        table.insert(Arc::new(1)).unwrap();
        for handle in [-1, 0, 1, i32::MIN, i32::MAX, 0x1_0001, 0x2_0000] {
            assert!(gone(&table, handle), "{handle:#x}");
        }
    }

    #[test]
    fn a_refused_removal_changes_nothing_and_the_table_has_an_end() {
        let table = Handles::new();
        let handle = table.insert(Arc::new(7)).unwrap();
        let refused = table.remove(handle, |_| Err(Errno::BUSY));
        assert_eq!(refused.unwrap_err(), Errno::BUSY);
        assert_eq!(*table.get(handle).unwrap(), 7);
        for i in 1..65_536 {
            table.insert(Arc::new(i)).unwrap();
        }
        assert_eq!(table.insert(Arc::new(0)), Err(Errno::MFILE));
        assert_eq!(table.all().len(), 65_536);
    }
}
