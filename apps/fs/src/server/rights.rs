//! Who may read, write and remove a buffer. The memory file that holds it has a mode of its own, 0600, for local users.

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

/// The rights of a buffer.
pub(crate) struct Rights {
    /// Who made it.
    owner: Who,
    keys: Vec<PublicKey>,
    /// Nine bits: those of the owner, of `keys`, and of others.
    mode: u16,
}

impl Rights {
    pub(crate) fn new(owner: Who, mode: u16) -> Self {
        let keys = Vec::new();
        Rights { owner, keys, mode }
    }

    pub(crate) fn mode(&self) -> u16 {
        self.mode
    }

    /// # Errors
    /// `EPERM` for a client that does not own the buffer.
    pub(crate) fn set_mode(&mut self, who: &Who, mode: u16) -> Result<(), Errno> {
        self.check_owner(who)?;
        self.mode = mode;
        Ok(())
    }

    /// Whether this client has the owner's rights: that is who made the buffer, and a process that could read the server's memory. A process of the
    /// server's user is one person, with a key or without.
    fn is_owner(&self, who: &Who) -> bool {
        match (&self.owner.key, &who.key) {
            (_, None) if who.is_own_user => true,
            (Some(owner), Some(key)) => owner == key,
            (None, _) if self.owner.is_own_user => who.is_own_user,
            (None, None) => true,
            _ => false,
        }
    }

    /// What this client may do: [`READ`] and [`WRITE`].
    pub(crate) fn of(&self, who: &Who) -> u16 {
        let class = match &who.key {
            _ if self.is_owner(who) => 6,
            Some(key) if self.keys.contains(key) => 3,
            _ => 0,
        };
        self.mode >> class & (READ | WRITE)
    }

    fn check_owner(&self, who: &Who) -> Result<(), Errno> {
        if self.is_owner(who) {
            Ok(())
        } else {
            Err(Errno::PERM)
        }
    }

    /// # Errors
    /// `EACCES` for a client that may not give the buffer's name to other content: neither its owner nor one that may write it.
    pub(crate) fn check_name(&self, who: &Who) -> Result<(), Errno> {
        if self.is_owner(who) || self.of(who) & WRITE != 0 {
            Ok(())
        } else {
            Err(Errno::ACCESS)
        }
    }

    /// Adds a key to those that the buffer names, or takes it out.
    ///
    /// # Errors
    /// As [`Rights::set_mode`]; `ENOSPC` beyond [`MAX_KEYS`].
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
