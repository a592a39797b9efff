//! Remote memory as files: the file abstraction of section 3.3.4 of "iWARP Applicability" (P. W. Frey, 2010).
//!
//! A [`server::Server`] holds named buffers and offers the files of a folder. A [`Client`] opens them by name; it reads by RDMA Read and writes by RDMA
//! Write, and control messages travel by Send ([`wire`], `docs/spec/fs.md`). Programs of the server's own host and user get a descriptor of the memory
//! file through a Unix socket ([`local_server`]): the kernel handles everything after `open` then.
//!
//! A name is a [`name::Name`] below a server; users write [`name::RemotePath`], `/rdma/<host>:<port>/<name>[:<size>]`.
//!
//! Nothing here interacts with a user, and nothing writes to the file system.
#![forbid(unsafe_code)]

pub mod client;
mod error;
pub mod file;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod keys;
pub mod local_server;
pub mod name;
pub mod server;
pub mod wire;

pub use client::{Client, Settings};
pub use error::Error;
pub use file::{File, OpenOptions};
pub use rustix::io::Errno;

pub use weft_service::endpoint::port::FS as DEFAULT_PORT;
use weft_service::lock;
pub use weft_session::Via;
