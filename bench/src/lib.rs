//! The scenarios, drivers and reports of `weft bench`.
#![forbid(unsafe_code)]

pub mod record;
pub mod report;
pub mod size;
pub mod stats;
