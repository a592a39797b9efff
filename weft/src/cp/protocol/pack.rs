//! Many small things at once: files in a slot, names in an ASK.
//!
//! A pack is a slot full of records, one behind the other: 40 bytes, the path, attributes and the content. What is read here has been copied out of the
//! slot, and its digest is right; the peer that made it may still have meant harm.

use super::{
    ASK_NAMES, Asked, DecodeError, FileFlags, FileSpec, HEADER_LEN, Held, MAX_MESSAGE, Meta,
    Reader, RelPath, Version, attributes, put_mtime,
};

/// Bytes of a record before its path.
const RECORD: usize = 40;
/// Bytes of an ASK before its first name.
const ASK_HEADER: usize = HEADER_LEN + 4;
/// Bytes of a name before its path, and of its version.
const NAME: usize = 4;
const VERSION: usize = 20;

/// The space of a file in a pack.
pub fn record_len(spec: &FileSpec) -> u64 {
    let header = RECORD + spec.path.as_bytes().len();
    header as u64 + u64::from(spec.meta.attributes_len()) + spec.size
}

/// The bytes before the contents of a file; `None` for a file that is too long for a pack.
pub fn record(spec: &FileSpec) -> Option<Vec<u8>> {
    let path = spec.path.as_bytes();
    let mut out = Vec::with_capacity(RECORD + path.len());
    let flags = FileFlags {
        no_wait: false,
        ..spec.flags
    };
    out.extend(flags.code().to_be_bytes());
    out.extend((spec.meta.mode as u16).to_be_bytes());
    put_mtime(&mut out, spec.meta.mtime);
    out.extend(u32::try_from(spec.size).ok()?.to_be_bytes());
    out.extend((path.len() as u16).to_be_bytes());
    out.extend(spec.meta.attributes_len().to_be_bytes());
    out.extend(spec.source);
    out.extend(path);
    spec.meta.put_attributes(&mut out);
    Some(out)
}

/// Reads the files of a pack.
pub struct Records<'a>(Reader<'a>);

impl<'a> Records<'a> {
    /// Of the bytes of a slot.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(Reader(bytes))
    }

    /// The next file, and its content.
    pub fn read(&mut self) -> Result<(FileSpec, &'a [u8]), DecodeError> {
        let r = &mut self.0;
        let flags = FileFlags {
            no_wait: true,
            ..FileFlags::from_u16(r.flags(0b1110)?)
        };
        let mode = r.mode()?;
        let mtime = r.mtime()?;
        let size = r.u32()?;
        let path = usize::from(r.u16()?);
        let attributes = r.u16()?;
        let source = r.array()?;
        let path = RelPath::new(r.bytes(path)?).map_err(DecodeError::Path)?;
        let meta = Meta {
            mode,
            mtime,
            attributes: attributes::read(r, attributes)?,
        };
        let content = r.bytes(size as usize)?;
        let spec = FileSpec {
            flags,
            meta,
            size: size.into(),
            room: size.into(),
            source,
            path,
        };
        Ok((spec, content))
    }

    /// Nothing may follow.
    pub fn end(&self) -> Result<(), DecodeError> {
        self.0.end()
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

pub(super) fn put_names(out: &mut Vec<u8>, names: &[Asked]) {
    out.extend((names.len() as u16).to_be_bytes());
    out.extend([0; 2]);
    for Asked { path, version } in names {
        out.extend((path.as_bytes().len() as u16).to_be_bytes());
        out.extend(u16::from(version.is_some()).to_be_bytes());
        if let Some(version) = version {
            put_mtime(out, version.mtime);
            out.extend(version.size.to_be_bytes());
        }
        out.extend(path.as_bytes());
    }
}

fn number_of_names(r: &mut Reader<'_>) -> Result<usize, DecodeError> {
    let count = usize::from(r.u16()?);
    r.zero(2)?;
    if (1..=ASK_NAMES).contains(&count) {
        Ok(count)
    } else {
        Err(DecodeError::Value("names"))
    }
}

pub(super) fn names(r: &mut Reader<'_>) -> Result<Vec<Asked>, DecodeError> {
    let count = number_of_names(r)?;
    let name = |_| {
        let len = usize::from(r.u16()?);
        let version = if r.flags(1)? == 1 {
            let mtime = r.mtime()?;
            let size = r.size()?;
            Some(Version { size, mtime })
        } else {
            None
        };
        let path = RelPath::new(r.bytes(len)?).map_err(DecodeError::Path)?;
        Ok(Asked { path, version })
    };
    (0..count).map(name).collect()
}

pub(super) fn put_held(out: &mut Vec<u8>, held: &[Held]) {
    out.extend((held.len() as u16).to_be_bytes());
    out.extend([0; 2]);
    out.extend(held.iter().map(|&held| held as u8));
}

pub(super) fn held(r: &mut Reader<'_>) -> Result<Vec<Held>, DecodeError> {
    let count = number_of_names(r)?;
    let bytes = r.bytes(count)?;
    bytes.iter().map(|&held| Held::from_u8(held)).collect()
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
            assert_eq!(bytes.len() as u64 - before, record_len(&spec));
        }
        let mut records = Records::new(&bytes);
        for (path, content) in files {
            let (found, data) = records.read().unwrap();
            assert_eq!((found, data), (spec(path, content.len() as u64), content));
        }
        assert_eq!(records.end(), Ok(()));
        // Cut anywhere, the last one is missing.
        for cut in 1..=RECORD + 6 {
            let mut records = Records::new(&bytes[..bytes.len() - cut]);
            assert!(records.read().is_ok() && records.read().is_ok());
            assert!(records.read().is_err());
        }
    }

    #[test]
    fn a_path_in_a_pack_is_checked_as_any_other() {
        let mut bytes = record(&spec("xx/f", 0)).unwrap();
        bytes[RECORD..RECORD + 2].copy_from_slice(b"..");
        assert!(matches!(
            Records::new(&bytes).read(),
            Err(DecodeError::Path(_))
        ));
        assert_eq!(record(&spec("f", 1 << 32)), None);
    }

    #[test]
    fn names_fill_a_message_and_no_more() {
        let long = RelPath::new("x".repeat(200).as_bytes()).unwrap();
        let short = RelPath::new(b"x").unwrap();
        for (path, most) in [(long, MAX_MESSAGE / 224), (short, MAX_MESSAGE / 25)] {
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
