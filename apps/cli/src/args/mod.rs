//! Options of the applications that are programs of their own.

pub mod cc;
pub mod fs;
pub mod media;
