//! The receiver's directory: names that stay inside it, unfinished files, journals, atomic renames.
//!
//! Paths are walked component by component with `O_NOFOLLOW`, from a descriptor of the directory; a
//! [`RelPath`] has no `..`, so nothing outside can be reached, whatever links others put in the way. A file
//! grows as `.NAME.weft-XXXX.part` (XXXX from the source's identity) and gets its name by rename only when
//! its checksum holds. A file of more than one block has a journal beside it with the digests of the blocks
//! that are in place, from which a later transfer of the same source goes on.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, RenameFlags, Timespec, Timestamps};
use rustix::io::Errno;

use super::attributes::{self, Left};
use super::digest::{BlockList, digest};
use super::protocol::{
    Asked, Code, Digest, FileFlags, FileSpec, Held, Meta, Mtime, RelPath, Version, printable,
};
use super::walk::mtime as mtime_of;

mod unfinished;

pub use unfinished::Incoming;
use unfinished::{new_temp_name, temp_name};

/// Why an entry was not written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct StoreError {
    /// The kind, as a RESULT carries it.
    pub code: Code,
    /// One sentence for a human.
    pub text: String,
}

impl StoreError {
    fn new(code: Code, text: impl Into<String>) -> Self {
        Self {
            code,
            text: text.into(),
        }
    }

    /// An error of the file system while doing `what`.
    pub fn io(what: &str, e: &io::Error) -> Self {
        let code = match Errno::from_io_error(e) {
            Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Code::NoSpace,
            Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => Code::Permission,
            Some(Errno::ISDIR) => Code::IsDirectory,
            Some(Errno::NOTDIR | Errno::LOOP) => Code::NotDirectory,
            Some(Errno::NAMETOOLONG | Errno::ILSEQ) => Code::BadPath,
            _ => Code::Io,
        };
        Self::new(code, format!("{what}: {e}"))
    }
}

fn errno(what: &'static str) -> impl Fn(Errno) -> StoreError {
    move |e| StoreError::io(what, &e.into())
}

/// The receiver's own policy, whatever a sender requests.
#[derive(Debug, Clone, Copy, Default)]
pub struct Policy {
    /// Never replace an existing file.
    pub no_clobber: bool,
    /// Bring every file to the disk before it gets its name.
    pub sync: bool,
    /// Create symbolic links with any target.
    pub any_links: bool,
    /// Give files the owners, special mode bits and extended attributes that senders name.
    pub attributes: bool,
}

/// The directory that files are received into.
pub struct Store {
    root: Arc<OwnedFd>,
    policy: Policy,
    /// The only names that entries may have in the directory.
    only: Option<Arc<[Vec<u8>]>>,
    /// The last parent directory: many small files come from one.
    last: Option<(Vec<u8>, Arc<OwnedFd>)>,
}

const WALK: OFlags = OFlags::PATH
    .union(OFlags::DIRECTORY)
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);

impl Store {
    /// Opens the directory.
    pub fn open(dir: &Path, policy: Policy) -> io::Result<Self> {
        let root = fs::open(
            dir,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Self {
            root: Arc::new(root),
            policy,
            only: None,
            last: None,
        })
    }

    /// Its policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Another handle of the same directory, for another connection.
    #[must_use]
    pub fn another(&self) -> Self {
        Self {
            root: Arc::clone(&self.root),
            policy: self.policy,
            only: self.only.clone(),
            last: None,
        }
    }

    /// Takes nothing but entries of these names in the directory, and what is below them.
    pub fn only(&mut self, names: Vec<Vec<u8>>) {
        self.only = Some(names.into());
    }

    /// The directory of the path's last component, made as needed.
    fn parent(&mut self, path: &RelPath) -> Result<Arc<OwnedFd>, StoreError> {
        self.walk(path, |at, name| {
            make_dir(at, name, Mode::from_raw_mode(0o777))
        })
    }

    /// The directory of the path's last component. `missing` directories may be created.
    fn walk(
        &mut self,
        path: &RelPath,
        missing: impl Fn(&OwnedFd, &[u8]) -> Result<(), StoreError>,
    ) -> Result<Arc<OwnedFd>, StoreError> {
        if let Some(only) = &self.only
            && !path
                .components()
                .next()
                .is_some_and(|first| only.iter().any(|name| name == first))
        {
            return Err(StoreError::new(
                Code::BadPath,
                "this name was not asked for",
            ));
        }
        let (parent, _) = path.split();
        if parent.is_empty() {
            return Ok(Arc::clone(&self.root));
        }
        if let Some((known, fd)) = &self.last
            && known == parent
        {
            return Ok(Arc::clone(fd));
        }
        let mut at = Arc::clone(&self.root);
        for name in parent.split(|&b| b == b'/') {
            let opened = match fs::openat(&at, name, WALK, Mode::empty()) {
                Err(Errno::NOENT) => {
                    missing(&at, name)?;
                    fs::openat(&at, name, WALK, Mode::empty())
                }
                other => other,
            };
            at = Arc::new(opened.map_err(|e| walk_error(name, e))?);
        }
        self.last = Some((parent.to_vec(), Arc::clone(&at)));
        Ok(at)
    }

    /// What has this name. Creates nothing.
    pub fn look(&mut self, asked: &Asked) -> Held {
        let path = &asked.path;
        let absent = |_: &OwnedFd, _: &[u8]| Err(StoreError::new(Code::Io, "not there"));
        let Ok(parent) = self.walk(path, absent) else {
            return Held::Nothing;
        };
        let (_, name) = path.split();
        let Ok(stat) = fs::statat(&parent, name, AtFlags::SYMLINK_NOFOLLOW) else {
            return Held::Nothing;
        };
        let version = Version {
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime: mtime_of(&stat),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Held::Directory,
            FileType::RegularFile if asked.version == Some(version) => Held::Same,
            _ => Held::Other,
        }
    }

    /// Makes a directory, or takes the one that is there.
    pub fn enter_directory(&mut self, path: &RelPath) -> Result<(), StoreError> {
        let parent = self.parent(path)?;
        let (_, name) = path.split();
        make_dir(&parent, name, Mode::RWXU)?;
        fs::openat(&parent, name, WALK, Mode::empty()).map_err(|e| walk_error(name, e))?;
        Ok(())
    }

    /// Gives a directory its mode and time, once its content is there.
    pub fn leave_directory(&mut self, path: &RelPath, meta: &Meta) -> Result<Left, StoreError> {
        let parent = self.parent(path)?;
        let (_, name) = path.split();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir =
            fs::openat(&parent, name, flags, Mode::empty()).map_err(|e| walk_error(name, e))?;
        fs::futimens(&dir, &times(meta.mtime)).map_err(errno("cannot set the directory's time"))?;
        attributes::give(dir.as_fd(), meta, self.policy.attributes)
            .map_err(errno("cannot set the directory's mode"))
    }

    /// Makes a symbolic link, atomically replacing a file that is there.
    pub fn make_link(
        &mut self,
        path: &RelPath,
        target: &[u8],
        flags: FileFlags,
        meta: &Meta,
    ) -> Result<Left, StoreError> {
        if !self.policy.any_links && !path.keeps_inside(target) {
            return Err(StoreError::new(
                Code::LinkOut,
                format!(
                    "a symbolic link to {} can lead out of the listener's directory, which it does not allow",
                    printable(target)
                ),
            ));
        }
        let parent = self.parent(path)?;
        let (_, name) = path.split();
        self.check_existing(&parent, name, flags)?;
        let temp = temp_name(name, &digest(target), "part");
        let _ = fs::unlinkat(&parent, &temp, AtFlags::empty());
        fs::symlinkat(target, &parent, &temp).map_err(errno("cannot make the link"))?;
        let itself = AtFlags::SYMLINK_NOFOLLOW;
        let left = attributes::give_link(meta, self.policy.attributes, |user, group| {
            fs::chownat(&parent, &temp, user, group, itself)
        });
        fs::utimensat(&parent, &temp, &times(meta.mtime), itself)
            .map_err(errno("cannot set the link's time"))
            .and_then(|()| self.name(&parent, &temp, name, flags))
            .inspect_err(|_| {
                let _ = fs::unlinkat(&parent, &temp, AtFlags::empty());
            })?;
        Ok(left)
    }

    /// Gives a file another name, atomically replacing a file that is there.
    pub fn make_hard_link(
        &mut self,
        existing: &RelPath,
        path: &RelPath,
        flags: FileFlags,
    ) -> Result<(), StoreError> {
        let gone = || StoreError::new(Code::Io, "the file that it is a hard link to is not there");
        let from = self.walk(existing, |_, _| Err(gone()))?;
        let parent = self.parent(path)?;
        let ((_, first), (_, name)) = (existing.split(), path.split());
        let is_the_file = |stat: &fs::Stat, of: &fs::Stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                && (stat.st_dev, stat.st_ino) == (of.st_dev, of.st_ino)
        };
        let look = |at: &OwnedFd, name: &[u8]| fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = look(&from, first).map_err(|_| gone())?;
        if !is_the_file(&stat, &stat) {
            return Err(gone());
        }
        // A rename of one name of a file to another does nothing.
        if look(&parent, name).is_ok_and(|there| is_the_file(&there, &stat)) {
            return Ok(());
        }
        self.check_existing(&parent, name, flags)?;
        let temp = new_temp_name(name)?;
        fs::linkat(&from, first, &parent, &temp, AtFlags::empty())
            .map_err(errno("cannot make the hard link"))?;
        // Somebody may have put something else in the file's place meanwhile.
        look(&parent, &temp)
            .ok()
            .filter(|made| is_the_file(made, &stat))
            .ok_or_else(gone)
            .and_then(|_| self.name(&parent, &temp, name, flags))
            .inspect_err(|_| {
                let _ = fs::unlinkat(&parent, &temp, AtFlags::empty());
            })
    }

    fn keeps(&self, flags: FileFlags) -> bool {
        flags.no_clobber || self.policy.no_clobber
    }

    /// Whether the existing entry of this name may be replaced.
    fn check_existing(
        &self,
        parent: &OwnedFd,
        name: &[u8],
        flags: FileFlags,
    ) -> Result<(), StoreError> {
        let stat = match fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(()),
            other => other.map_err(errno("cannot look at the name"))?,
        };
        let kind = FileType::from_raw_mode(stat.st_mode);
        if kind == FileType::Directory {
            return Err(StoreError::new(
                Code::IsDirectory,
                "a directory of this name is there",
            ));
        }
        if self.keeps(flags) {
            return Err(StoreError::new(Code::Kept, "it is there already"));
        }
        if kind == FileType::RegularFile && stat.st_mode & 0o200 == 0 && !flags.force {
            return Err(StoreError::new(
                Code::ReadOnly,
                "a read-only file of this name is there",
            ));
        }
        Ok(())
    }

    /// Gives a finished temporary its final name.
    fn name(
        &self,
        parent: &OwnedFd,
        temp: &[u8],
        name: &[u8],
        flags: FileFlags,
    ) -> Result<(), StoreError> {
        let kept = || StoreError::new(Code::Kept, "it is there already");
        if !self.keeps(flags) {
            return fs::renameat(parent, temp, parent, name)
                .map_err(errno("cannot rename to the final name"));
        }
        match fs::renameat_with(parent, temp, parent, name, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(()),
            Err(Errno::EXIST) => Err(kept()),
            // File systems without this kind of rename can still refuse to link over a name.
            Err(Errno::INVAL | Errno::NOSYS) => {
                match fs::linkat(parent, temp, parent, name, AtFlags::empty()) {
                    Err(Errno::EXIST) => return Err(kept()),
                    other => other.map_err(errno("cannot link the final name"))?,
                }
                fs::unlinkat(parent, temp, AtFlags::empty())
                    .map_err(errno("cannot remove the temporary name"))
            }
            Err(e) => Err(errno("cannot rename to the final name")(e)),
        }
    }

    /// Opens the unfinished file of a source, with the contents of an earlier transfer.
    pub fn begin(&mut self, spec: FileSpec, block_len: u32) -> Result<Incoming, StoreError> {
        let parent = self.parent(&spec.path)?;
        let (_, name) = spec.path.split();
        // A short file is there before an answer could stop it: the look before it gets its name will do, unless none is wanted.
        if !spec.flags.no_wait || self.keeps(spec.flags) {
            self.check_existing(&parent, name, spec.flags)?;
        }
        Incoming::open(parent, spec, block_len)
    }

    /// Writes a whole file, whose content is known to be right.
    pub fn put(&mut self, spec: FileSpec, content: &[u8]) -> Result<Left, StoreError> {
        let size = spec.size;
        let mut file = self.begin(spec, (content.len() as u32).max(1))?;
        let mut list = BlockList::default();
        if !content.is_empty() {
            std::os::unix::fs::FileExt::write_all_at(&file.part, content, 0)
                .map_err(|e| StoreError::io("cannot write", &e))?;
            let digest = digest(content);
            file.written(&digest)?;
            list.push(&digest);
        }
        self.commit(file, &list.complete(size))
    }

    /// Gives a complete file its name if its digest is right.
    pub fn commit(&self, mut file: Incoming, complete: &Digest) -> Result<Left, StoreError> {
        file.check_complete(complete)?;
        let spec = file.spec.clone();
        let left = attributes::give(file.part.as_fd(), &spec.meta, self.policy.attributes)
            .map_err(errno("cannot set the mode"))?;
        fs::futimens(&file.part, &times(spec.meta.mtime)).map_err(errno("cannot set the time"))?;
        let sync = self.policy.sync || spec.flags.sync;
        if sync {
            fs::fsync(&file.part).map_err(errno("cannot bring the file to the disk"))?;
        }
        let (_, name) = spec.path.split();
        if file.has_no_name() {
            match file.link_as(name) {
                // A file without a name cannot replace the existing one.
                Err(Errno::EXIST) => {
                    self.check_existing(&file.parent, name, spec.flags)?;
                    file.link_as_part()?;
                    self.name(&file.parent, &file.part_name, name, spec.flags)?;
                }
                linked => linked.map_err(errno("cannot link the final name"))?,
            }
        } else {
            // Checked again: it may have appeared while the data came.
            self.check_existing(&file.parent, name, spec.flags)?;
            self.name(&file.parent, &file.part_name, name, spec.flags)?;
        }
        if sync {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            fs::openat(&file.parent, ".", flags, Mode::empty())
                .and_then(fs::fsync)
                .map_err(errno("cannot bring the directory to the disk"))?;
        }
        Ok(left)
    }
}

fn walk_error(name: &[u8], e: Errno) -> StoreError {
    if matches!(e, Errno::NOTDIR | Errno::LOOP) {
        return StoreError::new(
            Code::NotDirectory,
            format!(
                "{} is not a directory (symbolic links are not followed)",
                printable(name)
            ),
        );
    }
    StoreError::io(
        &format!("cannot open the directory {}", printable(name)),
        &e.into(),
    )
}

fn make_dir(parent: &OwnedFd, name: &[u8], mode: Mode) -> Result<(), StoreError> {
    match fs::mkdirat(parent, name, mode) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(e) => Err(StoreError::io(
            &format!("cannot make the directory {}", printable(name)),
            &e.into(),
        )),
    }
}

fn times(mtime: Mtime) -> Timestamps {
    let t = Timespec {
        tv_sec: mtime.secs,
        tv_nsec: mtime.nanos.into(),
    };
    Timestamps {
        last_access: t,
        last_modification: t,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, MetadataExt, symlink};

    const BLOCK: u32 = 4096;

    fn spec(path: &str, size: u64, flags: FileFlags) -> FileSpec {
        let mtime = Mtime {
            secs: 1_000_000_000,
            nanos: 5,
        };
        FileSpec {
            flags,
            meta: Meta {
                mode: 0o640,
                mtime,
                attributes: None,
            },
            size,
            room: size,
            source: [7; 16],
            path: RelPath::new(path.as_bytes()).unwrap(),
        }
    }

    fn put(store: &mut Store, path: &str, data: &[u8], flags: FileFlags) -> Result<(), StoreError> {
        let no_wait = data.len() <= BLOCK as usize;
        let mut file = store.begin(
            spec(path, data.len() as u64, FileFlags { no_wait, ..flags }),
            BLOCK,
        )?;
        let mut list = BlockList::default();
        if file.waits() {
            let (blocks, _) = file.offer()?;
            assert_eq!(blocks, 0);
            file.start(0).unwrap()?;
        }
        for (i, block) in data.chunks(BLOCK as usize).enumerate() {
            add(&mut file, i as u64, block)?;
            list.push(&digest(block));
        }
        store
            .commit(file, &list.complete(data.len() as u64))
            .map(|left| assert!(left.is_empty()))
    }

    fn add(file: &mut Incoming, index: u64, block: &[u8]) -> Result<(), StoreError> {
        let (fd, at) = file
            .expect(index, block.len() as u32)
            .expect("the next block");
        rustix::io::pwrite(fd, block, at).unwrap();
        file.written(&digest(block))
    }

    fn names(dir: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(dir)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn files_get_their_name_mode_and_time_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        for size in [0, 1, 4096, 4097, 20_000] {
            let data = vec![size as u8; size];
            put(&mut store, "a/b/c", &data, FileFlags::default()).unwrap();
            let path = dir.path().join("a/b/c");
            assert_eq!(std::fs::read(&path).unwrap(), data);
            let meta = path.metadata().unwrap();
            assert_eq!(
                (meta.mode() & 0o7777, meta.mtime(), meta.mtime_nsec()),
                (0o640, 1_000_000_000, 5)
            );
            assert_eq!(
                names(&dir.path().join("a/b")),
                ["c"],
                "nothing else is left"
            );
        }
    }

    #[test]
    fn symbolic_links_are_never_followed() {
        let outside = tempfile::tempdir().unwrap();
        let dir = tempfile::tempdir().unwrap();
        symlink(outside.path(), dir.path().join("out")).unwrap();
        symlink(outside.path().join("target"), dir.path().join("file")).unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let flags = FileFlags::default();
        assert_eq!(
            put(&mut store, "out/x", b"x", flags).unwrap_err().code,
            Code::NotDirectory
        );
        let out = RelPath::new(b"out").unwrap();
        assert_eq!(
            store.enter_directory(&out).unwrap_err().code,
            Code::NotDirectory
        );
        assert_eq!(
            store
                .leave_directory(&out, &Meta::default())
                .unwrap_err()
                .code,
            Code::NotDirectory
        );
        put(&mut store, "file", b"x", flags).unwrap();
        assert!(
            dir.path()
                .join("file")
                .symlink_metadata()
                .unwrap()
                .is_file(),
            "the link itself was replaced"
        );
        assert!(names(outside.path()).is_empty());
    }

    #[test]
    fn hard_links_are_to_files_of_the_directory_alone() {
        let outside = tempfile::tempdir().unwrap();
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("precious"), "x").unwrap();
        symlink(outside.path(), dir.path().join("out")).unwrap();
        symlink(outside.path().join("precious"), dir.path().join("link")).unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        put(&mut store, "d/f", b"1", FileFlags::default()).unwrap();
        put(&mut store, "other", b"2", FileFlags::default()).unwrap();
        let mut link = |existing: &str, path: &str| {
            let [existing, path] = [existing, path].map(|p| RelPath::new(p.as_bytes()).unwrap());
            let made = store.make_hard_link(&existing, &path, FileFlags::default());
            made.map_err(|e| e.code)
        };
        for existing in ["out/precious", "link", "d", "missing", "new/missing"] {
            link(existing, "stolen").unwrap_err();
        }
        assert_eq!(link("d/f", "out/f"), Err(Code::NotDirectory));
        for _ in 0..2 {
            link("d/f", "other").unwrap();
        }
        link("d/f", "e/g").unwrap();
        assert_eq!(dir.path().join("d/f").metadata().unwrap().nlink(), 3);
        assert_eq!(std::fs::read(dir.path().join("other")).unwrap(), b"1");
        assert_eq!(names(dir.path()), ["d", "e", "link", "other", "out"]);
        assert_eq!(names(outside.path()), ["precious"]);
    }

    #[test]
    fn existing_files_follow_the_policy() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let (plain, keep) = (
            FileFlags::default(),
            FileFlags {
                no_clobber: true,
                ..FileFlags::default()
            },
        );
        put(&mut store, "f", b"1", plain).unwrap();
        assert_eq!(
            put(&mut store, "f", b"2", keep).unwrap_err().code,
            Code::Kept
        );
        put(&mut store, "f", b"3", plain).unwrap();
        assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), b"3");
        std::fs::set_permissions(
            dir.path().join("f"),
            std::os::unix::fs::PermissionsExt::from_mode(0o444),
        )
        .unwrap();
        assert_eq!(
            put(&mut store, "f", b"4", plain).unwrap_err().code,
            Code::ReadOnly
        );
        put(
            &mut store,
            "f",
            b"5",
            FileFlags {
                force: true,
                ..plain
            },
        )
        .unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        assert_eq!(
            put(&mut store, "d", b"4", plain).unwrap_err().code,
            Code::IsDirectory
        );
        assert_eq!(
            put(&mut store, "f/x", b"4", plain).unwrap_err().code,
            Code::NotDirectory
        );
        let mut strict = Store::open(
            dir.path(),
            Policy {
                no_clobber: true,
                sync: true,
                any_links: true,
                attributes: false,
            },
        )
        .unwrap();
        assert_eq!(
            put(&mut strict, "f", b"6", plain).unwrap_err().code,
            Code::Kept
        );
        put(&mut strict, "g", b"7", plain).unwrap();
        let link = RelPath::new(b"l").unwrap();
        let meta = Meta::default();
        strict
            .make_link(&link, b"/etc/passwd", plain, &meta)
            .unwrap();
        assert_eq!(
            strict
                .make_link(&link, b"other", plain, &meta)
                .unwrap_err()
                .code,
            Code::Kept
        );
        assert_eq!(names(dir.path()), ["d", "f", "g", "l"]);
    }

    #[test]
    fn a_wrong_digest_or_early_end_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let mut file = store
            .begin(spec("f", 9000, FileFlags::default()), BLOCK)
            .unwrap();
        file.offer().unwrap();
        file.start(0).unwrap().unwrap();
        add(&mut file, 0, &[1; 4096]).unwrap();
        assert!(file.expect(0, 4096).is_none(), "not the next block");
        assert!(
            file.expect(1, 4095).is_none(),
            "only the last block is short"
        );
        assert_eq!(
            store.commit(file, &[0; 16]).unwrap_err().code,
            Code::Corrupt
        );
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn an_unfinished_file_goes_on_where_it_was_right() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let blocks = [[1u8; 4096], [2; 4096], [3; 4096]];
        let begin = |store: &mut Store| {
            store
                .begin(spec("f", 4 * 4096, FileFlags::default()), BLOCK)
                .unwrap()
        };
        let mut file = begin(&mut store);
        file.offer().unwrap();
        file.start(0).unwrap().unwrap();
        for (i, b) in blocks.iter().enumerate() {
            add(&mut file, i as u64, b).unwrap();
        }
        let busy = store.begin(spec("f", 4 * 4096, FileFlags::default()), BLOCK);
        assert_eq!(busy.err().unwrap().code, Code::Busy, "locked by the first");
        drop(file);
        assert_eq!(names(dir.path()).len(), 2, "part and journal stay");

        // A block that does not match its journal is not offered.
        let part = names(dir.path())
            .into_iter()
            .find(|n| n.contains(".part"))
            .unwrap();
        let part = std::fs::OpenOptions::new()
            .write(true)
            .open(dir.path().join(part))
            .unwrap();
        part.write_all_at(&[9], 2 * 4096 + 7).unwrap();
        let mut file = begin(&mut store);
        let (held, _) = file.offer().unwrap();
        assert_eq!(held, 2);
        assert!(file.start(1).is_none(), "neither the offer nor 0");
        file.start(2).unwrap().unwrap();
        let mut list = BlockList::default();
        blocks[..2].iter().for_each(|b| list.push(&digest(b)));
        for (i, b) in [[5u8; 4096], [6; 4096]].iter().enumerate() {
            add(&mut file, i as u64 + 2, b).unwrap();
            list.push(&digest(b));
        }
        store.commit(file, &list.complete(4 * 4096)).unwrap();
        assert_eq!(names(dir.path()), ["f"]);
        assert_eq!(
            std::fs::read(dir.path().join("f")).unwrap()[2 * 4096 + 7],
            5
        );
    }

    #[test]
    fn nothing_of_an_earlier_transfer_shows_in_a_hole() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let size = 3 * u64::from(BLOCK) + 5;
        let mut file = store
            .begin(spec("f", size, FileFlags::default()), BLOCK)
            .unwrap();
        file.offer().unwrap();
        file.start(0).unwrap().unwrap();
        for index in 0..3 {
            add(&mut file, index, &[1; BLOCK as usize]).unwrap();
        }
        drop(file);
        let mut file = store
            .begin(spec("f", size, FileFlags::default()), BLOCK)
            .unwrap();
        assert_eq!(file.offer().unwrap().0, 3);
        file.start(0).unwrap().unwrap();
        add(&mut file, 0, &[2; BLOCK as usize]).unwrap();
        for (index, blocks) in [(0, 1), (2, 1), (1, 4), (1, u32::MAX)] {
            assert!(file.hole(index, blocks).is_none(), "{index} {blocks}");
        }
        file.hole(1, 3).unwrap().unwrap();
        let mut list = BlockList::default();
        list.push(&digest(&[2; BLOCK as usize]));
        (0..2).for_each(|_| list.push(&digest(&[0; BLOCK as usize])));
        list.push(&digest(&[0; 5]));
        store.commit(file, &list.complete(size)).unwrap();
        let got = std::fs::read(dir.path().join("f")).unwrap();
        assert_eq!(got.len() as u64, size);
        assert!(got[..BLOCK as usize].iter().all(|&byte| byte == 2));
        assert!(got[BLOCK as usize..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_journal_of_another_version_of_the_source_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let mut file = store
            .begin(spec("f", 9000, FileFlags::default()), BLOCK)
            .unwrap();
        file.offer().unwrap();
        file.start(0).unwrap().unwrap();
        add(&mut file, 0, &[1; 4096]).unwrap();
        drop(file);
        let mut newer = spec("f", 9000, FileFlags::default());
        newer.meta.mtime.secs += 1;
        let mut file = store.begin(newer, BLOCK).unwrap();
        assert_eq!(file.offer().unwrap().0, 0);
    }

    /// Other users who can write to the directory know the names of temporary files.
    #[test]
    fn temporary_files_of_others_are_not_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let root = rustix::process::geteuid().is_root();
        let precious = dir.path().join("precious");
        let data = [5; 9000];
        let mode = |path: &Path, mode| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
            std::fs::set_permissions(path, mode).unwrap();
        };
        let plant = |what: &str, path: &Path| match what {
            "a hard link" => std::fs::hard_link(&precious, path).unwrap(),
            "a symbolic link" => symlink(&precious, path).unwrap(),
            "a FIFO" => fs::mknodat(fs::CWD, path, FileType::Fifo, Mode::RWXU, 0).unwrap(),
            _ => {
                std::fs::write(path, "theirs").unwrap();
                if what == "writable by all" {
                    mode(path, 0o666);
                } else if root {
                    mode(path, 0o600);
                    std::os::unix::fs::chown(path, Some(1234), Some(1234)).unwrap();
                }
            }
        };
        for what in [
            "of another user",
            "writable by all",
            "a hard link",
            "a symbolic link",
            "a FIFO",
        ] {
            for suffix in ["part", "journal"] {
                std::fs::write(&precious, "precious").unwrap();
                mode(&precious, 0o600);
                let name = String::from_utf8(temp_name(b"f", &[7; 16], suffix)).unwrap();
                let path = dir.path().join(name);
                plant(what, &path);
                // Its creator still has it open, and locked.
                let held = (what != "a FIFO").then(|| std::fs::File::open(&path).unwrap());
                if let Some(held) = &held {
                    held.lock().unwrap();
                }
                let before = held.as_ref().map(|held| held.metadata().unwrap().len());
                put(&mut store, "f", &data, FileFlags::default())
                    .unwrap_or_else(|e| panic!("{what}, {suffix}: {e}"));
                let after = held.as_ref().map(|held| held.metadata().unwrap().len());
                assert_eq!(before, after, "{what}, {suffix}: nothing was written to it");
                assert_eq!(
                    std::fs::read(&precious).unwrap(),
                    b"precious",
                    "{what}, {suffix}"
                );
                assert_eq!(std::fs::read(dir.path().join("f")).unwrap(), data);
                assert_eq!(names(dir.path()), ["f", "precious"], "{what}, {suffix}");
            }
        }
    }

    #[test]
    fn no_space_is_told_before_the_first_byte() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let error = store
            .begin(spec("f", i64::MAX as u64, FileFlags::default()), BLOCK)
            .err()
            .unwrap();
        assert_eq!(error.code, Code::NoSpace);
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn long_names_have_temporaries_too() {
        let dir = tempfile::tempdir().unwrap();
        let mut store = Store::open(dir.path(), Policy::default()).unwrap();
        let name = "ü".repeat(127);
        put(&mut store, &name, b"x", FileFlags::default()).unwrap();
        assert_eq!(names(dir.path()), [name]);
    }
}
