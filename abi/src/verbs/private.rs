//! What libibverbs exports for its drivers. There are none here: programs that load libmlx5, libefa or another one for its own
//! calls find all names, and that none of the devices is theirs. Which name does what is in libs/ibverbs/symbols.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use super::types::ibv_device;

/// An `ibv_device` that no driver takes for its own: they look for the address of their own table of functions behind it
/// (rdma-core's `verbs_device.ops`). A device that is handed to a program begins with this.
#[repr(C)]
pub struct NobodysDevice {
    /// What the program sees.
    pub device: ibv_device,
    /// NULL, which is nobody's table.
    pub ops: *const c_void,
}

fn fail<T>(errno: c_int, result: T) -> T {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    result
}

/// What nobody is to answer, as a driver's offer of itself in the constructor of its library.
pub fn weft_ignored() {}

/// The answer of drivers' calls into the kernel, and of libibverbs before 2007.
pub fn weft_unsupported() -> c_int {
    fail(libc::EOPNOTSUPP, libc::EOPNOTSUPP)
}

/// The same for calls that return a pointer.
pub fn weft_unsupported_pointer() -> *mut c_void {
    fail(libc::EOPNOTSUPP, null_mut())
}

/// The same for calls that return -1.
pub fn weft_failed() -> c_int {
    fail(libc::EOPNOTSUPP, -1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `mlx5dv_is_supported` and its like in Debian 12 compare what is 0x298 bytes from the device's beginning.
    #[test]
    fn drivers_look_right_behind_the_device() {
        assert_eq!(std::mem::offset_of!(NobodysDevice, ops), 0x298);
    }
}
