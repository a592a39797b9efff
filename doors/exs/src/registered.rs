//! Memory that the device of a connection reaches.
//!
//! All memory is registered with the soft RNIC, which gives the copies and the lifetimes. For a connection over an RNIC of the machine it is registered
//! there as well, and work requests and peers name that registration.

use std::sync::Arc;

use weft_verbs::any;
use weft_verbs::{Access, Mr, Pd, PendingDereg, RawMemory, Sge};

use crate::Error;

/// The protection domains of a device.
pub(crate) struct Domain {
    soft: Pd,
    rnic: Option<Rnic>,
}

pub(crate) struct Rnic {
    pub(crate) device: any::Device,
    pub(crate) pd: any::Pd,
    /// For requests without bytes, which name memory all the same: an RNIC registers none without bytes.
    spare: any::Mr,
}

impl Domain {
    pub(crate) fn soft(pd: Pd) -> Arc<Domain> {
        Arc::new(Domain {
            soft: pd,
            rnic: None,
        })
    }

    /// For connections through this RNIC.
    pub(crate) fn of_rnic(soft: &Pd, device: &any::Device) -> Result<Arc<Domain>, Error> {
        let pd = device.alloc_pd()?;
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let rnic = Rnic {
            device: device.clone(),
            spare: pd.alloc_mr(8, all)?,
            pd,
        };
        Ok(Arc::new(Domain {
            soft: soft.clone(),
            rnic: Some(rnic),
        }))
    }

    pub(crate) fn pd(&self) -> &Pd {
        &self.soft
    }

    pub(crate) fn rnic(&self) -> Option<&Rnic> {
        self.rnic.as_ref()
    }

    /// Its device was removed, or has failed.
    pub(crate) fn is_gone(&self) -> bool {
        self.rnic.as_ref().is_some_and(|rnic| rnic.device.is_gone())
    }

    pub(crate) fn alloc(&self, len: usize, access: Access) -> Result<Registered, Error> {
        self.enter(self.soft.alloc_mr(len, self.on_soft(access))?, access)
    }

    pub(crate) fn reg(&self, bytes: Vec<u8>, access: Access) -> Result<Registered, Error> {
        self.enter(self.soft.reg_mr(bytes, self.on_soft(access))?, access)
    }

    pub(crate) fn reg_raw(&self, raw: &RawMemory, access: Access) -> Result<Registered, Error> {
        self.enter(self.soft.reg_raw(raw, self.on_soft(access))?, access)
    }

    /// A range of a region, with rights and keys of its own.
    pub(crate) fn part(
        &self,
        of: &Mr,
        off: usize,
        len: usize,
        access: Access,
    ) -> Result<Registered, Error> {
        let part = self.soft.reg_part(of, off, len, self.on_soft(access))?;
        self.enter(part, access)
    }

    /// Peers over an RNIC have the key of that device, and the soft RNIC admits none.
    fn on_soft(&self, access: Access) -> Access {
        match self.rnic {
            Some(_) => Access::LOCAL_WRITE,
            None => access,
        }
    }

    fn enter(&self, memory: Mr, access: Access) -> Result<Registered, Error> {
        let key = match &self.rnic {
            None => Key::Soft,
            Some(rnic) if memory.is_empty() => Key::Spare(rnic.spare.whole()),
            Some(rnic) => Key::Rnic(rnic.pd.reg_mr_of(&memory, access)?),
        };
        Ok(Registered { key, memory })
    }
}

/// The registration that requests name.
enum Key {
    Soft,
    Rnic(any::Mr),
    /// [`Rnic::spare`]; our key is the peer's too.
    Spare(Sge),
}

/// Registered memory.
pub(crate) struct Registered {
    // Dropped first: the RNIC leaves the memory.
    key: Key,
    pub(crate) memory: Mr,
}

impl Registered {
    #[inline]
    pub(crate) fn sge(&self, off: usize, len: usize) -> Sge {
        match &self.key {
            Key::Soft => self.memory.sge(off, len),
            Key::Rnic(rnic) => rnic.sge(off, len),
            Key::Spare(spare) => Sge { len: 0, ..*spare },
        }
    }

    /// Address and key for the peer.
    pub(crate) fn place(&self) -> (u64, u32) {
        match &self.key {
            Key::Soft => (self.memory.addr(), self.memory.rkey()),
            Key::Rnic(rnic) => (rnic.addr(), rnic.rkey()),
            Key::Spare(spare) => (spare.addr, spare.lkey),
        }
    }

    /// As [`Mr::retire`].
    pub(crate) fn retire(self) -> Result<Option<Vec<u8>>, PendingDereg> {
        drop(self.key);
        self.memory.retire()
    }
}
