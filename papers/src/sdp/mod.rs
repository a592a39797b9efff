//! BSDP, ZSDP and AZ-SDP compared with plain TCP: the experiments of the AZ-SDP paper.

mod args;
mod conclusions;
mod costs;
mod plan;
mod run;
mod suite;

pub(crate) use args::SdpArgs;
pub(crate) use plan::Plan;
pub(crate) use run::{Devices, Session};
pub(crate) use suite::run as run_suite;
