//! Access to registered memory in a hold of the lock of a queue pair of datagrams or of RoCE, which copy each packet.

use smallvec::SmallVec;
use weft_mem::{Access, KeySpan, Keys, MemError, PdId, Table};

use crate::types::{Sge, sub_list};

/// Copies bytes to their place in a scatter list that has room for them.
///
/// # Errors
/// Those of the list; nothing was copied then.
pub(crate) fn scatter(
    keys: &Keys,
    pd: PdId,
    sges: &[Sge],
    offset: u32,
    bytes: &[u8],
) -> Result<(), MemError> {
    let need = Access::LOCAL_WRITE;
    if let [one] = sges
        && let Some(room) = one.len.checked_sub(offset)
        && bytes.len() <= room as usize
        && let Some(span) = keys.known(pd, one.lkey, one.addr, one.len, need)
    {
        span.copy_in_at(offset as usize, bytes);
        return Ok(());
    }
    let local = |sge: Sge| keys.local(pd, sge.lkey, sge.addr, sge.len, need);
    let mut ranges = sub_list(sges, offset, bytes.len() as u32);
    let Some(first) = ranges.next() else {
        return Ok(());
    };
    let first = local(first)?;
    // All are looked at before the first byte is placed.
    let others: SmallVec<[KeySpan<'_>; 2]> = ranges.map(local).collect::<Result<_, _>>()?;
    let mut rest = bytes;
    for span in std::iter::once(&first).chain(&others) {
        let (here, behind) = rest.split_at(span.len().min(rest.len()));
        span.copy_in(here);
        rest = behind;
    }
    Ok(())
}

/// Copies bytes to the memory that a peer names (key, address, length), `skip` behind its beginning; all of it has to be the peer's to write.
/// `whose`: our domain and queue pair.
///
/// # Errors
/// Those of the key; nothing was copied then.
pub(crate) fn write_remote(
    table: &Table,
    keys: &Keys,
    whose: (PdId, u32),
    (key, to, len): (u32, u64, u32),
    skip: usize,
    bytes: &[u8],
) -> Result<(), MemError> {
    let need = Access::REMOTE_WRITE;
    let (pd, qp) = whose;
    if let Some(span) = keys.known(pd, key, to, len, need) {
        span.copy_in_at(skip, bytes);
        return Ok(());
    }
    match keys.local(pd, key, to, len, need) {
        // No region: a window.
        Err(MemError::InvalidStag) => {
            let span = table.remote(pd, qp, key, to, len, need)?;
            span.copy_in(skip, bytes);
        }
        span => span?.copy_in_at(skip, bytes),
    }
    Ok(())
}
