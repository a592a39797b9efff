//! Shared memory as docs/spec/local.md has it: the socket at which processes meet, the files that they exchange, and the rings.
//!
//! Files of memory are read and written by system calls, not mapped: so there is no unsafe code here, and what another process does to them cannot
//! end this one.

pub mod files;
pub mod ring;
pub mod unix_socket;
