//! librdmacm.

pub mod types;
