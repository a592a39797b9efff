//! The functions of the C library behind those of a preload library.
//!
//! # Safety
//!
//! Each is found by its name with `dlsym(RTLD_NEXT)`, once, and called with the type that its manual page gives. Nothing here allocates or locks.

use libc::{c_int, c_void};
use std::ffi::CStr;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

/// `errno` of this thread.
#[must_use]
pub fn errno() -> c_int {
    // SAFETY: the thread's own variable.
    unsafe { *libc::__errno_location() }
}

/// Sets `errno` of this thread.
pub fn set_errno(errno: c_int) {
    // SAFETY: the thread's own variable.
    unsafe { *libc::__errno_location() = errno };
}

/// The function of this name behind ours; null when there is none.
#[must_use]
pub fn find(name: &CStr) -> *mut c_void {
    // SAFETY: a name with its end.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Where the address of a function is kept once it has been found.
#[derive(Debug)]
pub struct Place {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Place {
    /// For the function of a name, which is followed by a zero byte.
    ///
    /// # Panics
    /// Where the zero byte is missing, or is not the only one.
    #[must_use]
    pub const fn new(name: &'static str) -> Place {
        match CStr::from_bytes_with_nul(name.as_bytes()) {
            Ok(name) => Place {
                name,
                found: AtomicPtr::new(std::ptr::null_mut()),
            },
            Err(_) => panic!("a name with one zero byte, its last"),
        }
    }

    /// The function's address; null when there is none.
    #[inline]
    #[must_use]
    pub fn get(&self) -> *mut c_void {
        let found = self.found.load(Relaxed);
        if found.is_null() { self.find() } else { found }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        let found = find(self.name);
        self.found.store(found, Relaxed);
        found
    }

    /// The function's address. A C library without it is none that programs were linked to with that name: they end.
    #[must_use]
    pub fn demand(&self) -> *mut c_void {
        let found = self.get();
        if found.is_null() {
            // SAFETY: takes nothing.
            unsafe { libc::abort() }
        }
        found
    }
}

/// What a function returns that the C library lacks.
pub trait Missing {
    /// The value that means failure.
    fn failure() -> Self;
}

impl Missing for i32 {
    fn failure() -> Self {
        -1
    }
}

impl Missing for i64 {
    fn failure() -> Self {
        -1
    }
}

impl Missing for isize {
    fn failure() -> Self {
        -1
    }
}

impl Missing for usize {
    fn failure() -> Self {
        0
    }
}

impl Missing for () {
    fn failure() -> Self {}
}

impl<T> Missing for *mut T {
    fn failure() -> Self {
        std::ptr::null_mut()
    }
}

/// Fails with `ENOSYS`.
#[cold]
#[must_use]
pub fn missing<T: Missing>() -> T {
    set_errno(libc::ENOSYS);
    T::failure()
}

/// `next! { "C" name(argument: type, ...) -> type; ... }` defines functions that call those behind ours by their names. One that the C library lacks
/// fails with `ENOSYS`.
#[macro_export]
macro_rules! next {
    ($abi:literal $($name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty;)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of the C library.")]
        ///
        /// # Safety
        /// As its manual page says.
        #[inline]
        pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
            static PLACE: $crate::next::Place = $crate::next::Place::new(concat!(stringify!($name), "\0"));
            let found = PLACE.get();
            if found.is_null() {
                return $crate::next::missing();
            }
            // SAFETY: the C library's function of this name has this type.
            let function = unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, unsafe extern $abi fn($($type),*) -> $result>(found)
            };
            // SAFETY: the caller's promise.
            unsafe { function($($arg),*) }
        }
    )*};
}

/// `real!(name(type, ...) -> type)` is the function behind ours, of "C".
#[macro_export]
macro_rules! real {
    ($name:ident($($arg:ty),* $(,)?) -> $result:ty) => {{
        static PLACE: $crate::next::Place = $crate::next::Place::new(concat!(stringify!($name), "\0"));
        #[allow(unused_unsafe, reason = "some callers are in an unsafe block")]
        // SAFETY: the C library's function of this name has this type.
        let function = unsafe {
            std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C" fn($($arg),*) -> $result>(PLACE.demand())
        };
        function
    }};
}

/// `interpose! { "C" fn name(argument: type, ...) -> type { ... } ... }` defines functions under their C names, for the loader. Their bodies may call what is
/// unsafe: the arguments are the program's promise.
#[macro_export]
macro_rules! interpose {
    ($abi:literal $($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $result:ty $body:block)*) => {$(
        $(#[$meta])*
        #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
        ///
        /// # Safety
        /// As the manual page says.
        // SAFETY: the library is there to have this name, with this type.
        #[unsafe(no_mangle)]
        #[allow(unreachable_pub, unused_unsafe, reason = "for the loader; some bodies say where they are unsafe")]
        pub unsafe extern $abi fn $name($($arg: $type),*) -> $result {
            // SAFETY: the caller's promise.
            unsafe { $body }
        }
    )*};
}
