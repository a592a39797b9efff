//! The machine's own RDMA devices, through the system's `libibverbs.so.1` and `librdmacm.so.1`.
//!
//! [`devices`] lists them and [`Device::open`] opens one. The objects of verbs are [`Pd`], [`Mr`], [`Channel`], [`Cq`], [`Srq`], [`Ah`] and [`Qp`]; [`cm`]
//! connects queue pairs by addresses. Both libraries are loaded at the first call, and nothing is linked. weft's own drop-in libraries have the same
//! file names: [`Libraries`] refuses them, unless the folder in [`FOLDER`] holds them.
//!
//! # Safety
//!
//! The libraries are trusted to do what their manual pages say. Each object keeps alive what it was made of, so that the order in which a program drops them
//! does not matter. Registered memory belongs to its [`Mr`]: programs reach it by copies only, because a peer can change it at any time, and it is freed
//! only after `ibv_dereg_mr` has succeeded, after which the device refuses its keys. A work request borrows its memory for the call that posts it, in which
//! the library may read it (inline data).
#![warn(missing_docs)]
#![allow(clippy::cast_possible_wrap)] // C counts in `int`
#![allow(clippy::struct_field_names)] // a handle of C has the name of its kind

mod address;
mod channel;
pub mod cm;
mod context;
mod device;
mod error;
mod fork;
mod info;
mod library;
mod life;
mod memory;
mod qp;
mod queue;
mod srq;
mod watch;

pub use address::addresses_of;
pub use channel::Channel;
pub use context::{Context, Pd};
pub use device::{Device, Transport, devices, unlisted};
pub use error::Error;
pub use info::{Gid, GidKind, Info, Link, Port};
pub use library::{FOLDER, Libraries};
pub use life::PortChange;
pub use memory::{Access, Mr, Named, Remote, Sge};
pub use qp::{Ah, Data, LIST, Op, Path, Qp, QpInit, QpKind, Request, SendWr};
pub use queue::{Cq, Wc};
pub use srq::Srq;
pub use watch::End;
