//! SQL joins on Data Roundabout: DataFusion's operators on every node, with rows that rotate between them.
#![forbid(unsafe_code)]

pub mod band;
mod band_rule;
pub mod batches;
pub mod bounds;
pub mod csv;
pub mod engine;
pub mod exec;
mod index;
mod indexed;
pub mod keys;
mod load;
pub mod loaded;
mod orders;
mod place;
pub mod print;
mod pull;
pub mod rule;
pub mod session;
pub mod shell;
mod space;
pub mod sql;
pub mod store;
pub mod tables;
pub mod talk;
pub mod visit;
pub mod worker;
