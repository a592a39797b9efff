//! One suite of verbs semantics for every transport.
//!
//! A [`bed::Setup`] selects the transport of the connections and their options. A *scenario* is a plain function over a [`bed::Bed`]; its doc comment states
//! the behaviour that it checks. `tests/suite.rs` instantiates every scenario for every setup; a new transport is one more line there. A scenario that needs an
//! unsupported feature of a device prints that and returns (see [`need!`]).
//!
//! The other half are peers that break the rules: [`raw`] attacks a [`victim`] over plain sockets and may send any bytes; with [`local`] it does so in shared
//! memory. See `tests/hostile.rs` (frames), `tests/startup.rs` (before the first frame), `tests/pressure.rs` (floods and stalls) and `tests/random.rs` (mutated
//! traffic).
//!
//! [`twin`]s are peers that follow the rules while their process dies, stops, or has other namespaces.
#![forbid(unsafe_code)]

pub mod any;
/// Those of the soft RNIC.
mod objects {
    pub use weft_verbs::{Cq, Mr, Srq};
}
pub mod bed;
mod checks;
pub mod flood;
pub mod gauge;
pub mod local;
pub mod marks;
mod pairs;
pub mod raw;
pub mod roce;
pub mod scenarios;
pub mod twin;
pub mod victim;
pub mod waits;

/// Skips the scenario and prints the reason, unless the device has this capability.
#[macro_export]
macro_rules! need {
    ($bed:expr, $capability:ident) => {
        if !$bed.a.attr().$capability {
            println!(
                "skipped: the {} transport has no {}",
                $bed.a.attr().transport,
                stringify!($capability)
            );
            return;
        }
    };
}
