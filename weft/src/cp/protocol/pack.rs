//! Many small things at once: files in a slot, names in an ASK.
//!
//! A pack is a slot full of records, one behind the other: what is said of a file, and its content. What is read here has been copied out of the
//! slot, and its digest is right; the peer that made it may still have meant harm.

use super::{
    ASK_NAMES, Asked, DecodeError, Digest, FileFlags, FileSpec, HEADER_LEN, MAX_MESSAGE, Meta,
    RelPath, Version,
};

/// Bytes of a record without its path, attributes and content, at most.
const RECORD: usize = 48;
/// Bytes of an ASK without its names, at most.
const ASK_HEADER: usize = HEADER_LEN + 4;
/// Bytes of a name without its path, and of its version, at most.
const NAME: usize = 3;
const VERSION: usize = 25;

/// What comes before the content of a file: flags, meta-data, size, source and path.
type Record = (FileFlags, Meta, u32, Digest, RelPath);

/// The space of a file in a pack, at most.
pub fn record_len(spec: &FileSpec) -> u64 {
    let header = RECORD + spec.path.as_bytes().len() + spec.meta.attributes_len();
    header as u64 + spec.size
}

/// The bytes before the contents of a file; `None` for a file that is too long for a pack.
pub fn record(spec: &FileSpec) -> Option<Vec<u8>> {
    let flags = FileFlags {
        no_wait: false,
        ..spec.flags
    };
    let size = u32::try_from(spec.size).ok()?;
    postcard::to_allocvec(&(flags, &spec.meta, size, &spec.source, &spec.path)).ok()
}

/// Reads the files of a pack.
pub struct Records<'a>(&'a [u8]);

impl<'a> Records<'a> {
    /// Of the bytes of a slot.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next file, and its content.
    pub fn read(&mut self) -> Result<(FileSpec, &'a [u8]), DecodeError> {
        let read = postcard::take_from_bytes::<Record>(self.0);
        let ((flags, meta, size, source, path), rest) = read.map_err(|_| DecodeError::Malformed)?;
        let content = rest.split_at_checked(size as usize);
        let (content, rest) = content.ok_or(DecodeError::Short)?;
        if flags.no_wait {
            return Err(DecodeError::Value("flags"));
        }
        let size = u64::from(size);
        let spec = FileSpec {
            flags: FileFlags {
                no_wait: true,
                ..flags
            },
            meta,
            size,
            room: size,
            source,
            path,
        };
        spec.check()?;
        self.0 = rest;
        Ok((spec, content))
    }

    /// Nothing may follow.
    pub fn end(&self) -> Result<(), DecodeError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(DecodeError::Trailing)
        }
    }
}

/// The names of one ASK.
#[derive(Default)]
pub struct Names {
    names: Vec<Asked>,
    len: usize,
}

impl Names {
    /// Adds a name, if there is room for it.
    pub fn add(&mut self, path: &RelPath, version: Option<Version>) -> bool {
        let len = self.len + NAME + version.map_or(0, |_| VERSION) + path.as_bytes().len();
        let fits = self.names.len() < ASK_NAMES && ASK_HEADER + len <= MAX_MESSAGE;
        if fits {
            let path = path.clone();
            self.names.push(Asked { path, version });
            self.len = len;
        }
        fits
    }

    /// All of them.
    pub fn take(self) -> Vec<Asked> {
        self.names
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cp::protocol::Mtime;

    fn spec(path: &str, size: u64) -> FileSpec {
        FileSpec {
            flags: FileFlags {
                no_wait: true,
                sync: true,
                ..FileFlags::default()
            },
            meta: Meta {
                mode: 0o4751,
                mtime: Mtime { secs: -5, nanos: 7 },
                attributes: None,
            },
            size,
            room: size,
            source: [3; 16],
            path: RelPath::new(path.as_bytes()).unwrap(),
        }
    }

    #[test]
    fn files_come_out_as_they_went_in() {
        let files = [("a/b", &b"content"[..]), ("c", b""), ("d/e/f", b"x")];
        let mut bytes = Vec::new();
        for (path, content) in files {
            let spec = spec(path, content.len() as u64);
            let before = bytes.len() as u64;
            bytes.extend(record(&spec).unwrap());
            bytes.extend(content);
            assert!(bytes.len() as u64 - before <= record_len(&spec));
        }
        let mut records = Records::new(&bytes);
        for (path, content) in files {
            let (found, data) = records.read().unwrap();
            assert_eq!((found, data), (spec(path, content.len() as u64), content));
        }
        assert_eq!(records.end(), Ok(()));
        // Cut anywhere, the last one is missing.
        for cut in 1..=record(&spec("d/e/f", 1)).unwrap().len() {
            let mut records = Records::new(&bytes[..bytes.len() - cut]);
            assert!(records.read().is_ok() && records.read().is_ok());
            assert!(records.read().is_err());
        }
    }

    #[test]
    fn a_path_in_a_pack_is_checked_as_any_other() {
        let mut bytes = record(&spec("xx/f", 0)).unwrap();
        assert!(Records::new(&bytes).read().is_ok());
        let path = bytes.len() - 4;
        bytes[path..path + 2].copy_from_slice(b"..");
        let read = Records::new(&bytes).read();
        assert_eq!(read, Err(DecodeError::Malformed));
        assert_eq!(record(&spec("f", 1 << 32)), None);
    }

    #[test]
    fn names_fill_a_message_and_no_more() {
        let long = RelPath::new("x".repeat(200).as_bytes()).unwrap();
        let short = RelPath::new(b"x").unwrap();
        for (path, most) in [(long, MAX_MESSAGE / 228), (short, MAX_MESSAGE / 29)] {
            let (size, mtime) = (7, Mtime { secs: 1, nanos: 2 });
            let version = Some(Version { size, mtime });
            let mut names = Names::default();
            let add = || names.add(&path, version);
            let added = std::iter::repeat_with(add).take_while(|&fits| fits);
            let added = added.count();
            assert!(added.abs_diff(most) <= 1, "{added} of {most}");
            let mut bytes = Vec::new();
            super::super::Message::Ask {
                names: names.take(),
            }
            .encode(0, &mut bytes);
            assert!(bytes.len() <= MAX_MESSAGE);
        }
    }
}
