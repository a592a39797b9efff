//! The functions that ours stand before.
//!
//! # Safety
//!
//! The dynamic loader is asked for the next function of a name, and its address is called with the type that the C library declares.

/// `real!(name(type, ...) -> type)` is the C library's function, or the one of another preload library behind ours.
macro_rules! real {
    ($name:ident($($arg:ty),* $(,)?) -> $ret:ty) => {{
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

/// `look!("name" as type)` is the next function of a name, if there is one.
macro_rules! look {
    ($name:literal as $type:ty) => {{
        static NEXT: std::sync::atomic::AtomicPtr<libc::c_void> =
            std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
        let mut next = NEXT.load(std::sync::atomic::Ordering::Acquire);
        if next.is_null() {
            // SAFETY: a C string.
            next = unsafe { libc::dlsym(libc::RTLD_NEXT, concat!($name, "\0").as_ptr().cast()) };
            NEXT.store(next, std::sync::atomic::Ordering::Release);
        }
        // SAFETY: the function of this name has this type in the C library.
        (!next.is_null()).then(|| unsafe { std::mem::transmute::<*mut libc::c_void, $type>(next) })
    }};
}
pub(crate) use look;
