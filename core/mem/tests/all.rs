//! The tests of this crate but for those that fork and set limits, which are a program of their own (processes.rs).

mod implicit;
mod io;
mod lifetime;
mod scribble;
mod share;
mod table;
