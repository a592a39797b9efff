//! libibverbs and librdmacm: exports their calls under their names. `weft_abi::verbs` implements them. The calls of librdmacm and its rsockets are exported
//! with the prefix `weft_cm_`; the librdmacm that `cargo xtask verbs` makes jumps to them.
//!
//! # Safety
//!
//! Each call is as safe as its manual page says: see `weft_abi`.

/// Exports calls, each of which calls the function of the same name in `$from`. `$prefix` is put before the names for C.
macro_rules! exports {
    ($prefix:literal, $from:ident: $($calls:tt)*) => { exports! { @"C" $prefix, $from: $($calls)* } };
    // Calls in which a waiting thread may be cancelled: that unwinds.
    ($prefix:literal, waiting $from:ident: $($calls:tt)*) => { exports! { @"C-unwind" $prefix, $from: $($calls)* } };
    (@$abi:literal $prefix:literal, $from:ident: $($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: see its manual page.")]
        /// # Safety
        /// As the manual page says.
        // SAFETY: no other code has this name.
        #[unsafe(export_name = concat!($prefix, stringify!($name)))]
        #[allow(unused_unsafe)] // some of them are safe
        pub unsafe extern $abi fn $name($($arg: $type),*) $(-> $result)? {
            // SAFETY: the caller's promise.
            unsafe { $from::$name($($arg),*) }
        }
    )*};
}

pub mod cm;
pub mod dgram;
pub mod private;
pub mod rsock;
pub mod verbs;
