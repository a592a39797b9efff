//! What an archive keeps of a file beside its content, its permission bits and its time.

use super::{DecodeError, Mtime, Reader};

/// The longest [`Attributes`] in bytes, encoded.
pub const MAX_ATTRIBUTES: usize = 4000;
/// Bytes of owner and group.
const OWNER: usize = 8;

/// An extended attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Xattr {
    /// Its name, 1 to 255 bytes without a NUL.
    pub name: Vec<u8>,
    /// Its value.
    pub value: Vec<u8>,
}

/// Owner and extended attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
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
}

fn xattr_len(xattr: &Xattr) -> usize {
    3 + xattr.name.len() + xattr.value.len()
}

/// What a file, a directory or a link has beside its content.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Meta {
    /// Permission bits with set-user-ID, set-group-ID and sticky, 0 to 0o7777.
    pub mode: u32,
    /// Modification time.
    pub mtime: Mtime,
    /// What an archive keeps besides, from a sender that makes one to a receiver that takes it.
    pub attributes: Option<Attributes>,
}

impl Meta {
    /// Length of the attributes in bytes, 0 without.
    pub(super) fn attributes_len(&self) -> u16 {
        self.attributes.as_ref().map_or(0, |a| a.len() as u16)
    }

    pub(super) fn put_attributes(&self, out: &mut Vec<u8>) {
        let Some(attributes) = &self.attributes else {
            return;
        };
        out.extend(attributes.uid.to_be_bytes());
        out.extend(attributes.gid.to_be_bytes());
        for Xattr { name, value } in &attributes.xattrs {
            out.push(name.len() as u8);
            out.extend((value.len() as u16).to_be_bytes());
            out.extend(name);
            out.extend(value);
        }
    }
}

/// Reads `len` bytes of attributes.
pub(super) fn read(r: &mut Reader<'_>, len: u16) -> Result<Option<Attributes>, DecodeError> {
    let len = usize::from(len);
    if len > MAX_ATTRIBUTES {
        return Err(DecodeError::Value("attributes"));
    }
    if len == 0 {
        return Ok(None);
    }
    let mut r = Reader(r.bytes(len)?);
    let (uid, gid) = (r.u32()?, r.u32()?);
    // For the kernel this is "leave it as it is".
    if uid == u32::MAX || gid == u32::MAX {
        return Err(DecodeError::Value("owner"));
    }
    let mut xattrs = Vec::new();
    while r.end().is_err() {
        let (name, value) = (usize::from(r.u8()?), usize::from(r.u16()?));
        let (name, value) = (r.bytes(name)?.to_vec(), r.bytes(value)?.to_vec());
        if name.is_empty() || name.contains(&0) {
            return Err(DecodeError::Value("attribute's name"));
        }
        xattrs.push(Xattr { name, value });
    }
    Ok(Some(Attributes { uid, gid, xattrs }))
}
