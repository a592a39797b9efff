//! The declarations of `<infiniband/verbs.h>` and the headers that it includes (rdma-core 44), with C's names and layout; those of librdmacm are in [`cm`].
//! `doors/abi` gives them to C programs, `core/nic` calls the system's libraries with them. The manual pages of rdma-core say what the types mean.
//! `tests/verbs_layout.rs` of `doors/abi` compares them with the headers, both ways.
//!
//! Enumerations are integers here, because a program or a library may pass any value.
#![allow(non_camel_case_types, non_snake_case)] // C's names; the manual pages have the words
#![allow(clippy::pub_underscore_fields, clippy::wildcard_imports)] // C's names again; one vocabulary in two files

pub mod cm;
pub mod constants;
pub mod structs;

pub use constants::*;
pub use structs::*;

/// A type's layout, for the test against the headers.
pub struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub align: usize,
    pub fields: &'static [Field],
}

/// A field's offset in its struct or union.
pub struct Field {
    pub name: &'static str,
    /// The type as it is written here.
    pub of: &'static str,
    pub offset: usize,
    pub size: usize,
}

/// An enumeration with its values; the name is empty where C has none.
pub struct Enumeration {
    pub name: Option<&'static str>,
    pub size: usize,
    pub values: &'static [(&'static str, i128)],
}

/// A type of C for which all zeros is a valid value.
///
/// # Safety
/// All zeros is a valid value of the type.
pub unsafe trait Zeroed: Copy {
    fn zeroed() -> Self {
        // SAFETY: that is what the trait says.
        unsafe { std::mem::zeroed() }
    }
}

/// Declares structs and unions as C does, of numbers and pointers, and `LAYOUTS` of them.
macro_rules! c_structs {
    ($($kind:ident $name:ident { $($field:ident: $of:ty),* $(,)? })*) => {
        $(
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub $kind $name { $(pub $field: $of),* }
            // SAFETY: numbers and pointers, which may be NULL.
            unsafe impl $crate::Zeroed for $name {}
        )*
        pub const LAYOUTS: &[$crate::Layout] = &[$($crate::Layout {
            name: stringify!($name),
            size: size_of::<$name>(),
            align: align_of::<$name>(),
            fields: &[$($crate::Field {
                name: stringify!($field),
                of: stringify!($of),
                offset: std::mem::offset_of!($name, $field),
                size: size_of::<$of>(),
            }),*],
        }),*];
    };
}

/// Declares the integer type of each enumeration, its values, and `ENUMERATIONS` of them.
macro_rules! c_enums {
    (@name) => { None };
    (@name $name:ident) => { Some(stringify!($name)) };
    ($(enum $($name:ident)?: $of:ident { $($value:ident = $number:expr),* $(,)? })*) => {
        $(
            $(pub type $name = $of;)?
            $(pub const $value: $of = $number;)*
        )*
        pub const ENUMERATIONS: &[$crate::Enumeration] = &[$($crate::Enumeration {
            name: c_enums!(@name $($name)?),
            size: size_of::<$of>(),
            values: &[$((stringify!($value), $value as i128)),*],
        }),*];
    };
}

/// Declares the numbers that are macros in C, and `MACROS` of them.
macro_rules! c_constants {
    ($($name:ident: $of:ty = $value:expr),* $(,)?) => {
        $(pub const $name: $of = $value;)*
        pub const MACROS: &[(&str, i128)] = &[$((stringify!($name), $name as i128)),*];
    };
}

/// A C function pointer, which may be NULL.
macro_rules! call {
    (($($args:tt)*)) => { Option<unsafe extern "C" fn($($args)*)> };
    (($($args:tt)*) -> $of:ty) => { Option<unsafe extern "C" fn($($args)*) -> $of> };
}

pub(crate) use {c_constants, c_enums, c_structs, call};
