//! Extended sockets: blast, and the papers' experiments with it.

mod args;
mod blast;
mod conclusions;
mod control;
mod data;
mod experiment;
mod figures;
mod plan;
mod run;
mod suite;
mod summary;

pub use args::ExsArgs;
pub use blast::{Client, Run, Server};
pub use experiment::Figure;
pub use plan::{Amount, Design, Kind, Lengths, Mode, Plan, Wait};
pub use run::Counters;
pub(crate) use suite::run as run_suite;
pub use summary::{describe, json_lines, report};
