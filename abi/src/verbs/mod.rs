//! libibverbs and librdmacm on the soft RNIC.

pub mod cm;
pub mod private;
pub mod strings;
pub mod sysfs;
pub mod types;

#[allow(dead_code)]
mod faults;
pub(crate) mod object;
#[allow(dead_code)]
mod persona;
