//! Which state of a file it is.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

/// Device, inode, length, time of the last change.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    file: [u64; 5],
    /// When the inode changed, which nobody can set back.
    inode: (i64, i64),
    links: u64,
}

impl Stamp {
    /// # Errors
    /// As `fstat(2)`.
    pub fn of(file: &File) -> io::Result<Self> {
        let meta = file.metadata()?;
        Ok(Self {
            file: [
                meta.dev(),
                meta.ino(),
                meta.len(),
                meta.mtime().cast_unsigned(),
                meta.mtime_nsec().cast_unsigned(),
            ],
            inode: (meta.ctime(), meta.ctime_nsec()),
            links: meta.nlink(),
        })
    }

    /// Whether a file with this stamp now has the bytes that it had: the inode is the same, or it has lost a name, as a file does that is replaced.
    pub fn is_still(self, now: Self) -> bool {
        self.file == now.file && (self.inode == now.inode || now.links < self.links)
    }

    /// The length of the file.
    pub fn length(self) -> u64 {
        self.file[2]
    }

    /// The same for the same state of the same file; others differ but by chance (FNV-1a, 128 bits).
    pub fn version(self) -> [u8; 16] {
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        let inode = [self.inode.0, self.inode.1].map(i64::cast_unsigned);
        for byte in self
            .file
            .iter()
            .chain(&inode)
            .flat_map(|word| word.to_be_bytes())
        {
            hash =
                (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
        hash.to_be_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_that_is_set_back_is_a_change_and_a_lost_name_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, "one").unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let (before, then) = (Stamp::of(&file).unwrap(), file.metadata().unwrap());
        // Clocks of inodes tick slowly.
        let pause = || std::thread::sleep(std::time::Duration::from_millis(30));
        pause();
        std::fs::write(&path, "two").unwrap();
        file.set_modified(then.modified().unwrap()).unwrap();
        let after = Stamp::of(&file).unwrap();
        assert!(before.version() != after.version() && !before.is_still(after));
        pause();
        std::fs::write(dir.path().join("b"), "three").unwrap();
        std::fs::rename(dir.path().join("b"), &path).unwrap();
        let replaced = Stamp::of(&file).unwrap();
        assert!(after.is_still(replaced) && after != replaced);
    }
}
