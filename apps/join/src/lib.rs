//! SQL joins on Data Roundabout: DataFusion's operators on every node, with rows that rotate between them.
#![forbid(unsafe_code)]

pub mod band;
mod band_rule;
pub mod batches;
pub mod bounds;
pub mod csv;
pub mod engine;
pub mod exec;
pub mod keys;
pub mod print;
pub mod rule;
pub mod shell;
pub mod sql;
pub mod talk;
pub mod worker;
