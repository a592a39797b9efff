//! A hostile peer of the same host: it meets its victim as docs/spec/local.md has it, and lies in shared memory.

pub mod forged;
pub mod lies;
pub mod reuse;
pub mod stops;
pub mod stranger;
