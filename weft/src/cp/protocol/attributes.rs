//! What an archive keeps of a file beside its content, its permission bits and its time.

use serde::{Deserialize, Serialize};

use super::{DecodeError, Mtime};

/// The longest [`Attributes`] in bytes, encoded, where each length and number takes as many as it can.
pub const MAX_ATTRIBUTES: usize = 4000;
/// Bytes of owner, group and the number of extended attributes.
const OWNER: usize = 12;

/// An extended attribute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Xattr {
    /// Its name, 1 to 255 bytes without a NUL.
    pub name: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
}

/// Owner and extended attributes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attributes {
    /// The owner's number, not `u32::MAX`.
    pub uid: u32,
    /// The group's number, not `u32::MAX`.
    pub gid: u32,
    /// Extended attributes.
    pub xattrs: Vec<Xattr>,
}

impl Attributes {
    /// Adds an extended attribute, if there is room for it.
    pub fn add(&mut self, xattr: Xattr) -> bool {
        let long = !(1..=255).contains(&xattr.name.len());
        if long || self.len() + xattr_len(&xattr) > MAX_ATTRIBUTES {
            return false;
        }
        self.xattrs.push(xattr);
        true
    }

    fn len(&self) -> usize {
        OWNER + self.xattrs.iter().map(xattr_len).sum::<usize>()
    }

    /// Whether its values can be.
    pub(super) fn check(&self) -> Result<(), DecodeError> {
        // For the kernel `u32::MAX` is "leave it as it is".
        if self.uid == u32::MAX || self.gid == u32::MAX {
            return Err(DecodeError::Value("owner"));
        }
        if self.len() > MAX_ATTRIBUTES {
            return Err(DecodeError::Value("attributes"));
        }
        let is_name = |name: &[u8]| (1..=255).contains(&name.len()) && !name.contains(&0);
        if self.xattrs.iter().all(|xattr| is_name(&xattr.name)) {
            Ok(())
        } else {
            Err(DecodeError::Value("attribute's name"))
        }
    }
}

fn xattr_len(xattr: &Xattr) -> usize {
    4 + xattr.name.len() + xattr.value.len()
}

/// What a file, a directory or a link has beside its content.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Meta {
    /// Permission bits with set-user-ID, set-group-ID and sticky, 0 to 0o7777.
    pub mode: u32,
    /// Modification time.
    pub mtime: Mtime,
    /// What an archive keeps besides, from a sender that makes one to a receiver that takes it.
    pub attributes: Option<Attributes>,
}

impl Meta {
    /// Length of the attributes in bytes, at most; 0 without.
    pub(super) fn attributes_len(&self) -> usize {
        self.attributes.as_ref().map_or(0, Attributes::len)
    }
}
