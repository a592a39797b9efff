//! Names of buffers, and the paths that users type.

use std::fmt;

use rustix::io::Errno;
pub use weft_service::endpoint::Endpoint;

/// The beginning of remote paths.
pub const PREFIX: &[u8] = b"/rdma/";
/// The longest name in bytes.
pub const MAX_NAME: usize = 1024;
/// The longest component of a name in bytes.
pub const MAX_COMPONENT: usize = 255;

/// A relative path that cannot express an escape: components that are neither empty nor `.` nor `..`. The empty name is the root.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Name(Vec<u8>);

impl Name {
    /// Checks `bytes` and takes them as a name.
    ///
    /// # Errors
    /// `ENAMETOOLONG`; `EINVAL` for a component that is empty, `.` or `..`, and for a NUL byte.
    pub fn new(bytes: &[u8]) -> Result<Self, Errno> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        let too_long = |part: &[u8]| part.len() > MAX_COMPONENT;
        if bytes.len() > MAX_NAME || bytes.split(|&b| b == b'/').any(too_long) {
            return Err(Errno::NAMETOOLONG);
        }
        let bad = |part: &[u8]| matches!(part, b"" | b"." | b"..") || part.contains(&0);
        if bytes.split(|&b| b == b'/').any(bad) {
            return Err(Errno::INVAL);
        }
        Ok(Self(bytes.into()))
    }

    /// As [`Name::new`] for what users write: repeated slashes and `.` count for nothing, `..` takes a component back, and not the root.
    ///
    /// # Errors
    /// As there.
    pub fn lenient(bytes: &[u8]) -> Result<Self, Errno> {
        let mut parts: Vec<&[u8]> = Vec::new();
        for part in bytes.split(|&b| b == b'/') {
            match part {
                b"" | b"." => {}
                b".." => {
                    parts.pop().ok_or(Errno::INVAL)?;
                }
                part => parts.push(part),
            }
        }
        Self::new(&parts.join(&b'/'))
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether it is the root.
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The folder that it is in; the root is in itself.
    #[must_use]
    pub fn parent(&self) -> Self {
        let slash = self.0.iter().rposition(|&b| b == b'/').unwrap_or(0);
        Self(self.0[..slash].into())
    }

    pub fn last(&self) -> &[u8] {
        self.0.rsplit(|&b| b == b'/').next().unwrap_or_default()
    }

    /// The name of an entry in this folder.
    ///
    /// # Errors
    /// As [`Name::new`].
    pub fn join(&self, entry: &[u8]) -> Result<Self, Errno> {
        if entry.is_empty() || entry.contains(&b'/') {
            return Err(Errno::INVAL);
        }
        if self.is_root() {
            return Self::new(entry);
        }
        Self::new(&[&self.0, b"/".as_slice(), entry].concat())
    }

    /// The beginning of names below this folder.
    pub(crate) fn below(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        if !bytes.is_empty() {
            bytes.push(b'/');
        }
        bytes
    }

    /// This name after a rename of `from` to `to`; `None` if that does not change it.
    ///
    /// # Errors
    /// As [`Name::new`].
    pub fn renamed(&self, from: &Self, to: &Self) -> Option<Result<Self, Errno>> {
        let rest = self.0.strip_prefix(from.as_bytes())?;
        let is_inside = rest.is_empty() || rest.starts_with(b"/");
        is_inside.then(|| Self::new(&[to.as_bytes(), rest].concat()))
    }

    pub(crate) fn raw(bytes: Vec<u8>) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&weft_service::text::printable(&self.0))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({self})")
    }
}

/// `/rdma/<host>:<port>/<name>[:<size>]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemotePath {
    pub endpoint: Endpoint,
    /// The buffer, or the root.
    pub name: Name,
    /// Length in bytes that the first write gives a new buffer; 0: as much as is written.
    pub size: u64,
}

impl RemotePath {
    /// Whether a program's path names a server.
    pub fn is_remote(path: &[u8]) -> bool {
        path.starts_with(PREFIX) && path.len() > PREFIX.len()
    }

    /// The path, without a size.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut path = format!("/rdma/{}", self.endpoint).into_bytes();
        if !self.name.is_root() {
            path.push(b'/');
            path.extend(self.name.as_bytes());
        }
        path
    }

    /// Parses the path. A `:` in the last component begins the size, in bytes or with K, M, G or T (powers of 1024).
    ///
    /// # Errors
    /// `ENOENT` where it is no path of this kind, `EINVAL` where its host, port, size or name can never be.
    pub fn parse(path: &[u8]) -> Result<Self, Errno> {
        let rest = path.strip_prefix(PREFIX).ok_or(Errno::NOENT)?;
        let slash = rest.iter().position(|&b| b == b'/').unwrap_or(rest.len());
        let endpoint = std::str::from_utf8(&rest[..slash]).map_err(|_| Errno::INVAL)?;
        let endpoint = Endpoint::parse(endpoint, crate::DEFAULT_PORT).map_err(|_| Errno::INVAL)?;
        let name = &rest[slash..];
        let last = name.iter().rposition(|&b| b == b'/').map_or(0, |at| at + 1);
        let (name, size) = match name[last..].iter().rposition(|&b| b == b':') {
            Some(colon) => {
                let size = std::str::from_utf8(&name[last + colon + 1..]);
                let size = weft_service::size::parse(size.map_err(|_| Errno::INVAL)?)
                    .map_err(|_| Errno::INVAL)?;
                if colon == 0 {
                    return Err(Errno::INVAL);
                }
                (&name[..last + colon], size)
            }
            None => (name, 0),
        };
        Ok(Self {
            endpoint,
            name: Name::lenient(name)?,
            size,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_escape() {
        for good in ["a", "a/b", "a b/..c", "a:b", "ä"] {
            assert_eq!(
                Name::new(good.as_bytes()).unwrap().as_bytes(),
                good.as_bytes()
            );
        }
        for bad in ["/a", "a/", "a//b", ".", "..", "a/../b", "a/.", "a\0b"] {
            assert_eq!(Name::new(bad.as_bytes()), Err(Errno::INVAL), "{bad:?}");
        }
        assert_eq!(Name::new(&[b'a'; 256]), Err(Errno::NAMETOOLONG));
        assert_eq!(
            Name::new(&[b"a/".repeat(600), b"a".to_vec()].concat()),
            Err(Errno::NAMETOOLONG)
        );
        assert_eq!(Name::lenient(b"//a/./b/../c/").unwrap().as_bytes(), b"a/c");
        assert_eq!(Name::lenient(b"a/../.."), Err(Errno::INVAL));
        let name = Name::new(b"a/b/c").unwrap();
        assert_eq!(
            (name.parent().as_bytes(), name.last()),
            (&b"a/b"[..], &b"c"[..])
        );
        assert!(Name::new(b"a").unwrap().parent().is_root());
        assert_eq!(Name::default().join(b"x").unwrap().as_bytes(), b"x");
        assert!(name.join(b"..").is_err() && name.join(b"x/y").is_err());
        let odd = Name::new(b"m\xc3\xbcll\n\xff").unwrap();
        assert_eq!(odd.to_string(), "m\u{fc}ll\\n\\xff");
    }

    #[test]
    fn paths_of_users() {
        let parse = |path: &str| RemotePath::parse(path.as_bytes());
        let full = parse("/rdma/host2:4711/buf0:64K").unwrap();
        assert_eq!(full.endpoint.to_string(), "host2:4711");
        assert_eq!((full.name.as_bytes(), full.size), (&b"buf0"[..], 65_536));
        let v6 = parse("/rdma/[2001:db8::7]:4711/a/b").unwrap();
        assert_eq!(v6.endpoint.to_string(), "[2001:db8::7]:4711");
        assert_eq!((v6.name.as_bytes(), v6.size), (&b"a/b"[..], 0));
        let zoned = parse("/rdma/[fe80::1%eth0]:7474/a").unwrap();
        assert_eq!(zoned.endpoint.host, "fe80::1%eth0");
        assert_eq!(
            parse("/rdma/h/x").unwrap().endpoint.port,
            crate::DEFAULT_PORT
        );
        assert!(parse("/rdma/h:1").unwrap().name.is_root());
        for bad in [
            "/rdma/",
            "/rdma//x",
            "/rdma/:1/x",
            "/rdma/h:/x",
            "/rdma/h:0/x",
            "/rdma/h:65536/x",
            "/rdma/h:+1/x",
            "/rdma/h:1x/x",
            "/rdma/h:1/x:",
            "/rdma/h:1/x:-1",
            "/rdma/h:1/x:1Q",
            "/rdma/h:1/x:1KK",
            "/rdma/h:1/x:99999999999999999999",
            "/rdma/h:1/x:9999999999G",
            "/rdma/h:1/:5",
            "/rdma/h:1/../x",
            "/rdma/[::1/x",
            "/rdma/[zz]:1/x",
            "/rdma/h h:1/x",
        ] {
            assert_eq!(parse(bad).unwrap_err(), Errno::INVAL, "{bad}");
        }
        assert_eq!(parse("/tmp/x").unwrap_err(), Errno::NOENT);
        assert!(!RemotePath::is_remote(b"/rdma/") && !RemotePath::is_remote(b"/rdmax/y"));
    }
}
