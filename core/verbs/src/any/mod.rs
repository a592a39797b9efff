//! The objects of verbs on any device: the soft RNIC, or an RNIC of the machine ([`Device`]).
//!
//! The names are those of the crate's root, and so are work requests, completions and errors. A program that uses these types runs on both. It asks the
//! device what it has ([`Device::attr`]). What only the soft RNIC has is reached by `soft()`, which is `None` on an RNIC. Objects of two devices in one
//! call are an error.
//!
//! What differs on an RNIC:
//!
//! * The connection manager makes the queue pair ([`cm::Dial::create_qp`], [`cm::Request::create_qp`]), because `rdma_cm` learns from the address which
//!   device is meant.
//! * [`Qp::disconnect`] ends a connection over `InfiniBand` or `RoCE` at once: sends that are not complete by then are lost. A completion means that
//!   the peer's device has the bytes.
//! * There is no TLS.
//!
//! Each object is an enum of two, and each call a `match` (docs/adr/0079).

macro_rules! either {
    ($object:expr, $it:ident => $call:expr) => {
        match $object {
            Either::Soft($it) => $call,
            Either::Rnic($it) => $call,
        }
    };
}

pub mod cm;
mod convert;
mod cq;
mod device;
mod pd;
mod qp;
mod srq;

pub use cq::{CompChannel, Cq};
pub use device::{Choice, Device};
pub use pd::{Mr, Pd};
pub use qp::{Qp, QpInit};
pub use srq::Srq;

const TWO_DEVICES: crate::Error = crate::Error::Invalid("objects of two devices");

/// An object of one of the two.
#[derive(Clone)]
enum Either<S, R> {
    Soft(S),
    Rnic(R),
}

impl<S, R> Either<S, R> {
    #[inline]
    fn soft(&self) -> Option<&S> {
        match self {
            Self::Soft(it) => Some(it),
            Self::Rnic(_) => None,
        }
    }
}
