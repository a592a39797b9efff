//! The functions that libibverbs exports for its drivers. weft has no drivers: programs that load libmlx5, libefa or another one for its own calls find all
//! names, and find that no device belongs to the driver. doors/libibverbs/symbols has the function of each name.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;

use super::types::ibv_device;

/// An `ibv_device` that every driver recognizes as foreign: drivers look for the address of their own function table behind it (rdma-core's
/// `verbs_device.ops`). A device that is handed to a program begins with this.
#[repr(C)]
pub struct NobodysDevice {
    /// The program's part.
    pub device: ibv_device,
    /// NULL, which is no driver's table.
    pub ops: *const c_void,
}

fn fail<T>(errno: c_int, result: T) -> T {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    result
}

/// Ignores a call, such as a driver's registration in the constructor of its library.
pub fn weft_ignored() {}

/// The result of drivers' calls into the kernel, and of the calls of libibverbs before 2007.
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

    /// `mlx5dv_is_supported` and similar calls in Debian 12 compare the pointer at offset 0x298 of the device.
    #[test]
    fn drivers_look_right_behind_the_device() {
        assert_eq!(std::mem::offset_of!(NobodysDevice, ops), 0x298);
    }
}
