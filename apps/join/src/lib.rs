//! SQL joins on Data Roundabout: DataFusion's operators on every node, with rows that rotate between them.
#![forbid(unsafe_code)]

pub mod batches;
pub mod exec;
pub mod rule;
pub mod shell;
pub mod talk;
pub mod worker;
