//! A hostile peer of the same host: it meets its victim as docs/spec/local.md has it, and lies in shared memory.
//!
//! Files of memory are read and written by system calls, not mapped: so there is no unsafe code here, and what another process does to them cannot
//! end this one.

pub mod door;
pub mod files;
pub mod forged;
pub mod lies;
pub mod meeting;
pub mod reuse;
pub mod ring;
pub mod stops;
pub mod stranger;
