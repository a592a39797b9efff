//! Paths that a peer sends, and text of it that is shown.

use std::fmt;

use serde::{Deserialize, Serialize};

pub use weft_service::text::printable;

/// The longest relative path in bytes (`PATH_MAX` less its NUL).
pub const MAX_PATH: usize = 4095;

/// Why a path is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    /// No component at all.
    #[error("it is empty")]
    Empty,
    /// Begins with a slash.
    #[error("it is absolute")]
    Absolute,
    /// Has a `.` or `..` or empty component.
    #[error("it has a `.`, `..` or empty component")]
    Dots,
    /// Has a NUL byte.
    #[error("it has a NUL byte")]
    Nul,
    /// A component is longer than 255 bytes or the whole is longer than [`MAX_PATH`].
    #[error("it is too long")]
    Long,
    /// The last component has the form of our own temporary files.
    #[error("the form `.NAME.weft-XXXX.part` is kept for unfinished files")]
    OwnName,
}

/// A relative path that cannot express an escape: one or more components, none of them empty, `.` or `..`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "&[u8]")]
pub struct RelPath(Vec<u8>);

impl TryFrom<&[u8]> for RelPath {
    type Error = PathError;

    fn try_from(bytes: &[u8]) -> Result<Self, PathError> {
        Self::new(bytes)
    }
}

impl RelPath {
    /// Checks `bytes` and takes them as a path.
    pub fn new(bytes: &[u8]) -> Result<Self, PathError> {
        if bytes.is_empty() {
            return Err(PathError::Empty);
        }
        if bytes.len() > MAX_PATH {
            return Err(PathError::Long);
        }
        if bytes[0] == b'/' {
            return Err(PathError::Absolute);
        }
        for part in bytes.split(|&b| b == b'/') {
            if part.is_empty() || part == b"." || part == b".." {
                return Err(PathError::Dots);
            }
            if part.contains(&0) {
                return Err(PathError::Nul);
            }
            if part.len() > 255 {
                return Err(PathError::Long);
            }
            if is_own_name(part) {
                return Err(PathError::OwnName);
            }
        }
        Ok(Self(bytes.to_vec()))
    }

    /// The path's bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The components in order, the last of them the name.
    pub fn components(&self) -> impl Iterator<Item = &[u8]> {
        self.0.split(|&b| b == b'/')
    }

    /// Whether a symbolic link of this path with that target leads to a place below the same directory, as long as other links do:
    /// `..` comes before all names, since after a name that is a link it would lead out of that link's target.
    pub fn keeps_inside(&self, target: &[u8]) -> bool {
        let (parent, _) = self.split();
        let mut up = parent.split(|&b| b == b'/').filter(|name| !name.is_empty());
        let mut names = false;
        target.first() != Some(&b'/')
            && target.split(|&b| b == b'/').all(|part| match part {
                b"" | b"." => true,
                b".." => !names && up.next().is_some(),
                _ => {
                    names = true;
                    true
                }
            })
    }

    /// The parent's components and the name.
    pub fn split(&self) -> (&[u8], &[u8]) {
        match self.0.iter().rposition(|&b| b == b'/') {
            Some(at) => (&self.0[..at], &self.0[at + 1..]),
            None => (&[], &self.0),
        }
    }
}

impl fmt::Display for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&printable(&self.0))
    }
}

impl fmt::Debug for RelPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", printable(&self.0))
    }
}

/// Whether a name has the form of our temporary files and journals.
fn is_own_name(name: &[u8]) -> bool {
    name.first() == Some(&b'.')
        && (name.ends_with(b".part") || name.ends_with(b".journal"))
        && name.windows(6).any(|w| w == b".weft-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_escape_are_refused() {
        for (bytes, why) in [
            (&b""[..], PathError::Empty),
            (b"/etc/passwd", PathError::Absolute),
            (b"../x", PathError::Dots),
            (b"a/../../x", PathError::Dots),
            (b"a//b", PathError::Dots),
            (b"a/", PathError::Dots),
            (b"./a", PathError::Dots),
            (b"a\0b", PathError::Nul),
            (&[b'a'; 256], PathError::Long),
            (b"d/.x.weft-0011.part", PathError::OwnName),
        ] {
            assert_eq!(RelPath::new(bytes), Err(why), "{bytes:?}");
        }
        assert_eq!(RelPath::new(&b"ab/".repeat(1400)), Err(PathError::Long));
        assert_eq!(RelPath::new(b"...").unwrap().as_bytes(), b"...");
    }
}
