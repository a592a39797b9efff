//! Multicast groups that the queue pairs of identifiers are attached to.

use std::net::IpAddr;

use rustix::io::Errno;

use super::id::{Core, get};
use super::news::Membership;
use crate::verbs::gid::gids;
use crate::verbs::mcast;

impl Core {
    /// The program has fetched the event: attaches its queue pair to the group, unless the program has left the group already.
    pub(super) fn joined_group(&self, membership: Membership) -> Result<(), Errno> {
        let qp = get!(self, qp);
        let (still, src) = {
            let setup = self.setup();
            (setup.groups.contains(&membership), setup.src)
        };
        if membership.silent || qp.is_null() || !still {
            return Ok(());
        }
        let src = src.ok_or(Errno::INVAL)?.ip().to_canonical();
        let own = gids()?.into_iter().find(|gid| gid.ip == src);
        let own = own.ok_or(Errno::ADDRNOTAVAIL)?;
        mcast::attach(qp, membership.gid(), Some(own.ifindex))?;
        // Another thread may have left the group meanwhile, and found it not attached.
        if !self.hears(membership.group) {
            let _ = mcast::detach(qp, membership.gid());
        }
        Ok(())
    }

    pub(super) fn hears(&self, group: IpAddr) -> bool {
        let groups = &self.setup().groups;
        groups.iter().any(|of| of.group == group && !of.silent)
    }

    /// The queue pair is about to be destroyed, which fails while it is attached.
    pub(super) fn detach_groups(&self) {
        let groups = self.setup().groups.clone();
        for of in groups {
            let _ = mcast::detach(get!(self, qp), of.gid());
        }
    }
}
