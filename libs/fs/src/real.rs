//! The functions that ours stand before.
//!
//! # Safety
//!
//! The dynamic loader is asked for the next function of a name, and its address is called with the type that the C library declares.

/// `real!(name(type, ...) -> type)` is the C library's function, or the one of another preload library behind ours.
macro_rules! real {
    ($name:ident($($arg:ty),*) -> $ret:ty) => {{
        static NEXT: std::sync::atomic::AtomicPtr<libc::c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        let mut next = NEXT.load(std::sync::atomic::Ordering::Acquire);
        if next.is_null() {
            next = $crate::real::find(concat!(stringify!($name), "\0"));
            NEXT.store(next, std::sync::atomic::Ordering::Release);
        }
        #[allow(unused_unsafe, reason = "some callers are in an unsafe block")]
        // SAFETY: the function of this name has this type in the C library.
        let next = unsafe {
            std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn($($arg),*) -> $ret>(next)
        };
        next
    }};
}
pub(crate) use real;

/// The address of a function. A C library without it is none that programs were linked to with that name.
pub(crate) fn find(name: &'static str) -> *mut libc::c_void {
    // SAFETY: a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr().cast()) };
    if found.is_null() {
        // SAFETY: takes nothing.
        unsafe { libc::abort() }
    }
    found
}

/// Sets `errno`.
pub(crate) fn set_errno(errno: i32) {
    // SAFETY: the C library's own word for this thread.
    unsafe { *libc::__errno_location() = errno }
}

/// `errno` of this thread.
pub(crate) fn get_errno() -> i32 {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}
