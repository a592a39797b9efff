//! A domain, which is a device.

use weft_verbs::Device;

use crate::abi::DomainFid;

#[repr(C)]
pub(crate) struct Domain {
    pub fid: DomainFid,
    pub device: Device,
}
