//! Extended sockets: blast, and the papers' experiments with it.

mod blast;
mod control;
mod plan;
mod run;
mod summary;

pub use blast::{Client, Run, Server};
pub use plan::{Amount, Design, Kind, Lengths, Mode, Plan, Wait};
pub(crate) use run::Contexts;
pub use run::Counters;
pub use summary::{describe, json_lines, report};
