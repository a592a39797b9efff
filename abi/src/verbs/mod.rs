//! libibverbs and librdmacm on the soft RNIC.

pub mod cm;
pub mod types;

pub(crate) mod object;
