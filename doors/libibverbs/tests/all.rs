//! The tests of the two libraries.

#[path = "../../libexs/tests/common/mod.rs"]
mod common;

mod conformance;
mod dgram;
mod dist;
mod later;
mod prototypes;
