//! Rights of regions and windows in C's flags.

use std::ffi::c_uint;

use rustix::io::Errno;
use weft_verbs::Access;

use super::types::*;

/// The rights that have an effect here.
const RIGHTS: c_uint = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_ZERO_BASED;
/// Hints about page tables, which no device needs.
const WISHES: c_uint = IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE;

/// The rights behind the flags. The native flags have the same values.
pub(crate) fn rights(flags: c_uint) -> Access {
    Access::from_bits_truncate(flags & RIGHTS)
}

/// Checks that a region can have these flags.
///
/// # Errors
/// `EINVAL` for flags that no region has.
pub(super) fn check_access(flags: c_uint) -> Result<(), Errno> {
    if flags & !(RIGHTS | WISHES) != 0 {
        return Err(Errno::INVAL);
    }
    // The owner must have every right to change memory that a peer has.
    if flags & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0
        && flags & IBV_ACCESS_LOCAL_WRITE == 0
    {
        return Err(Errno::INVAL);
    }
    Ok(())
}
