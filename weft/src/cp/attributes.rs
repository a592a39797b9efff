//! Owners, special mode bits, ACLs and other extended attributes of files: reading them, and giving them to others.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{self, Gid, Mode, Stat, Uid, XattrFlags};
use rustix::io::Errno;

use super::protocol::{Attributes, Meta, Xattr};

/// Most bytes of a file's list of names, and of a value: the kernel's limits.
const MOST: usize = 64 << 10;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether the file system and the machine's policy have this attribute for themselves.
fn is_of_the_system(name: &[u8]) -> bool {
    name.starts_with(b"system.") || name == b"security.selinux"
}

/// Whether this is an attribute that a copy has too.
fn is_copied(name: &[u8]) -> bool {
    let acls = [&b"system.posix_acl_access"[..], b"system.posix_acl_default"];
    name.starts_with(b"user.")
        || acls.contains(&name)
        || is_root()
            && !is_of_the_system(name)
            && (name.starts_with(b"security.") || name.starts_with(b"trusted."))
}

/// Owner and extended attributes of an open file, and whether these are all.
pub fn of(fd: impl AsFd, stat: &Stat) -> (Attributes, bool) {
    let mut attributes = Attributes {
        uid: stat.st_uid,
        gid: stat.st_gid,
        xattrs: Vec::new(),
    };
    let mut names = vec![0; MOST];
    let len = match fs::flistxattr(&fd, &mut names) {
        Ok(len) => len,
        Err(e) => return (attributes, e == Errno::NOTSUP),
    };
    let mut value = vec![0; MOST];
    let mut whole = true;
    let names = names[..len].split(|&b| b == 0);
    for name in names.filter(|name| !name.is_empty()) {
        if !is_copied(name) {
            whole &= is_of_the_system(name);
            continue;
        }
        whole &= match fs::fgetxattr(&fd, name, &mut value) {
            Ok(len) => attributes.add(Xattr {
                name: name.to_vec(),
                value: value[..len].to_vec(),
            }),
            Err(e) => e == Errno::NODATA,
        };
    }
    (attributes, whole)
}

/// What a file was not given.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Left {
    owner: bool,
    bits: bool,
    xattrs: usize,
}

impl Left {
    /// Whether it was given everything.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = [
            self.owner.then(|| "the owner".to_owned()),
            self.bits
                .then(|| "set-user-ID, set-group-ID or sticky".to_owned()),
            (self.xattrs > 0).then(|| format!("extended attributes: {}", self.xattrs)),
        ];
        let words: Vec<_> = words.into_iter().flatten().collect();
        write!(f, "not kept: {}", words.join("; "))
    }
}

/// Gives an open file its permission bits, and what an archive keeps if that is allowed.
pub fn give(fd: BorrowedFd<'_>, meta: &Meta, is_allowed: bool) -> Result<Left, Errno> {
    let mut left = Left::default();
    let mut mode = meta.mode;
    match &meta.attributes {
        Some(attributes) if is_allowed => {
            // First, since a change of the owner takes away the bits, and capabilities.
            let (user, group) = own(attributes, |user, group| fs::fchown(fd, user, group));
            left.owner = !(user && group);
            // A program that runs as its owner must not run as somebody else.
            mode &= !(if user { 0 } else { 0o4000 } | if group { 0 } else { 0o2000 });
            for Xattr { name, value } in &attributes.xattrs {
                let given = is_copied(name)
                    && fs::fsetxattr(fd, &**name, value, XattrFlags::empty()).is_ok();
                left.xattrs += usize::from(!given);
            }
        }
        Some(attributes) => {
            left.owner = true;
            left.xattrs = attributes.xattrs.len();
            mode &= 0o777;
        }
        None => mode &= 0o777,
    }
    fs::fchmod(fd, Mode::from_raw_mode(mode))?;
    // Without a right to them the kernel drops bits and says nothing.
    let special = meta.mode & 0o7000;
    left.bits = special != 0 && fs::fstat(fd)?.st_mode & 0o7000 != special;
    Ok(left)
}

/// Gives a file its owner and its group; whether it has them now.
pub fn own(
    attributes: &Attributes,
    chown: impl Fn(Option<Uid>, Option<Gid>) -> Result<(), Errno>,
) -> (bool, bool) {
    let user = chown(Some(Uid::from_raw(attributes.uid)), None).is_ok();
    let group = chown(None, Some(Gid::from_raw(attributes.gid))).is_ok();
    (user, group)
}

/// Gives a symbolic link its owner, if that is allowed.
pub fn give_link(
    meta: &Meta,
    is_allowed: bool,
    chown: impl Fn(Option<Uid>, Option<Gid>) -> Result<(), Errno>,
) -> Left {
    let owned = meta
        .attributes
        .as_ref()
        .is_none_or(|attributes| is_allowed && own(attributes, chown) == (true, true));
    Left {
        owner: !owned,
        ..Left::default()
    }
}
