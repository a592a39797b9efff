//! Who may read, write and remove a buffer. Its nine bits are those of its memory file; here is who is of which class.

use rustix::io::Errno;
use weft_verbs::tls::PublicKey;

pub(crate) const READ: u16 = 4;
pub(crate) const WRITE: u16 = 2;
/// The rights of a new buffer: everybody who is admitted reads and writes.
pub(crate) const NEW_MODE: u16 = 0o666;
/// Those of a new buffer whose program wants it for itself.
pub(crate) const PRIVATE_MODE: u16 = 0o600;
/// Those of a file of the served folder.
pub(crate) const DISK_MODE: u16 = 0o444;
pub(crate) const DIR_MODE: u16 = 0o755;
/// The keys that a buffer names.
const MAX_KEYS: usize = 64;

/// A client, as far as the rights of buffers go.
#[derive(Clone, Default)]
pub(crate) struct Who {
    /// Its key, if that is one of those that the server admits.
    pub(crate) key: Option<PublicKey>,
    /// It is a process of the server's own user on its host.
    pub(crate) is_own_user: bool,
}

impl Who {
    /// A program of the server's user on its host.
    pub(crate) const HOST: Who = Who {
        key: None,
        is_own_user: true,
    };
}

/// The classes of a buffer.
pub(crate) struct Classes {
    /// Who made it.
    owner: Who,
    keys: Vec<PublicKey>,
}

impl Classes {
    pub(crate) fn new(owner: Who) -> Self {
        let keys = Vec::new();
        Classes { owner, keys }
    }

    /// Whether this client has the owner's rights: that is who made the buffer, and a process that could read the server's memory. A process of the
    /// server's user is one person, with a key or without.
    pub(crate) fn is_owner(&self, who: &Who) -> bool {
        match (&self.owner.key, &who.key) {
            (_, None) if who.is_own_user => true,
            (Some(owner), Some(key)) => owner == key,
            (None, _) if self.owner.is_own_user => who.is_own_user,
            (None, None) => true,
            _ => false,
        }
    }

    /// What this client may do with a buffer of this mode: [`READ`] and [`WRITE`].
    pub(crate) fn rights(&self, who: &Who, mode: u16) -> u16 {
        let class = match &who.key {
            _ if self.is_owner(who) => 6,
            Some(key) if self.keys.contains(key) => 3,
            _ => 0,
        };
        mode >> class & (READ | WRITE)
    }

    /// # Errors
    /// `EPERM` for a client that does not own the buffer.
    pub(crate) fn check_owner(&self, who: &Who) -> Result<(), Errno> {
        if self.is_owner(who) {
            Ok(())
        } else {
            Err(Errno::PERM)
        }
    }

    /// Adds a key to those that the buffer names, or takes it out.
    ///
    /// # Errors
    /// As [`Classes::check_owner`]; `ENOSPC` beyond [`MAX_KEYS`].
    pub(crate) fn share(&mut self, who: &Who, key: PublicKey, adds: bool) -> Result<(), Errno> {
        self.check_owner(who)?;
        self.keys.retain(|other| *other != key);
        if adds && self.keys.len() == MAX_KEYS {
            return Err(Errno::NOSPC);
        }
        if adds {
            self.keys.push(key);
        }
        Ok(())
    }
}
