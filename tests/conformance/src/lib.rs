//! One suite of verbs semantics for every transport.
//!
//! A [`bed::Setup`] says what carries the connections and how they are set up; a *scenario* is a plain function over a
//! [`bed::Bed`], and states in its doc comment what it holds the implementation to. `tests/suite.rs` instantiates every
//! scenario for every setup; a new transport is one more line there. A scenario that needs what a device does not have
//! says so and returns (see [`need!`]).
//!
//! The other half are peers that break the rules: [`raw`] speaks to a [`victim`] over plain sockets and may send any
//! bytes; with [`local`] it does so in shared memory. See `tests/hostile.rs` (frames), `tests/startup.rs` (before the first frame), `tests/pressure.rs` (floods and
//! stalls) and `tests/random.rs` (mutated traffic).
//!
//! Peers that keep to the rules while their process dies, stops, or has other namespaces are [`twin`]s.
#![forbid(unsafe_code)]

pub mod bed;
pub mod flood;
pub mod gauge;
pub mod local;
pub mod marks;
pub mod raw;
pub mod scenarios;
pub mod twin;
pub mod victim;

/// Skip the scenario, with the reason printed, unless the device has this capability.
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
