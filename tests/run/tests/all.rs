//! Programs under `weft run` and `weft advise`, but for the random ones (differ.rs).

mod advise;
mod containers;
mod cpython;
mod faults;
mod forks;
mod guests;
mod holes_of_calls;
mod inherited;
mod lend;
mod lies;
mod meetings;
mod moments;
mod programs;
mod servers;
mod signals;
mod starts;
mod told;
mod udp;
mod unusual;
mod users;
mod waits;
mod watched;
