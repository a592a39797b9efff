//! How the functions are defined that stand before the C library's.

/// Defines functions under their C names.
macro_rules! doors {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
        /// # Safety
        /// As the manual page says.
        // SAFETY: this library is there to have this name.
        #[unsafe(no_mangle)]
        #[allow(unreachable_pub, reason = "for the loader")]
        pub unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
            // SAFETY: the caller's promise.
            unsafe { $body }
        }
    )*};
}
pub(crate) use doors;
