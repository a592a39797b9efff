//! The buffers of a server, their folders, and the files of a folder of the file system.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Bound;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::{self, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use weft_sys::limits;
use weft_verbs::tls::PublicKey;

use super::memory::{End, Memory, Quota, errno};
use super::rights::{DIR_MODE, DISK_MODE, NEW_MODE, PRIVATE_MODE, READ, Rights, WRITE, Who};
use crate::lock;
use crate::name::{MAX_COMPONENT, Name};
use crate::wire::{Attr, Entry, Flags};

/// Buffers and folders that there may be.
const MAX_NAMES: usize = 65_536;
/// How long a buffer outlives a connection that ended without closing it: its program may have executed another one, which opens it again.
const GRACE: Duration = Duration::from_secs(2);
/// The numbers of buffers and folders are not below this.
const FIRST: u64 = 1 << 62;
/// Entries of one answer; more are asked for again.
const MAX_ENTRIES: usize = 512;
/// Entries of a folder of the file system that are looked at.
const MAX_DISK_ENTRIES: usize = 1 << 20;

/// Nanoseconds since 1970.
fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| u64::try_from(since.as_nanos()).unwrap_or(0))
}

/// A named buffer, or a file of the folder that was loaded.
pub(crate) struct Buffer {
    pub(crate) ino: u64,
    pub(crate) read_only: bool,
    state: Mutex<State>,
}

struct State {
    memory: Arc<Memory>,
    generation: u32,
    /// By clients with a connection.
    opens: u32,
    /// Programs of this host may have it open.
    lent: bool,
    /// When a connection ended that had it open.
    lost: Option<Instant>,
    /// Under a name.
    linked: bool,
    mtime: u64,
    /// Length that the first write gives it.
    hint: u64,
    /// The page with the word that appenders count with; it lasts as long as the generation.
    word: Option<Arc<End>>,
    appenders: u32,
    rights: Rights,
}

impl Buffer {
    fn new(
        ino: u64,
        memory: Arc<Memory>,
        mtime: u64,
        read_only: bool,
        rights: Rights,
        hint: u64,
    ) -> Arc<Self> {
        Arc::new(Self {
            ino,
            read_only,
            state: Mutex::new(State {
                memory,
                generation: 0,
                opens: 0,
                lent: false,
                lost: None,
                linked: !read_only,
                mtime,
                hint,
                word: None,
                appenders: 0,
                rights,
            }),
        })
    }

    /// # Errors
    /// `EACCES` if this client has not these rights.
    fn check(&self, who: &Who, rights: u16) -> Result<(), Errno> {
        if lock(&self.state).rights.of(who) & rights == rights {
            Ok(())
        } else {
            Err(Errno::ACCESS)
        }
    }

    /// Whether this client may read it.
    pub(crate) fn is_readable(&self, who: &Who) -> bool {
        self.check(who, READ).is_ok()
    }

    /// As [`Store::chmod`].
    pub(crate) fn chmod(&self, who: &Who, mode: u64) -> Result<(), Errno> {
        let mode = u16::try_from(mode).ok().filter(|mode| *mode <= 0o777);
        let mode = mode.ok_or(Errno::INVAL)?;
        if self.read_only {
            return Err(Errno::ROFS);
        }
        lock(&self.state).rights.set_mode(who, mode)
    }

    /// Its attributes, as this client has them.
    pub(crate) fn attr(&self, who: &Who) -> Attr {
        let state = lock(&self.state);
        Attr {
            dir: false,
            writable: !self.read_only,
            size: state.memory.size(),
            mtime: state.mtime,
            ino: self.ino,
            generation: state.generation,
            mode: state.rights.mode(),
            rights: state.rights.of(who),
        }
    }

    /// The newest generation.
    pub(crate) fn current(&self) -> (u32, Arc<Memory>) {
        let state = lock(&self.state);
        (state.generation, Arc::clone(&state.memory))
    }

    /// Notes a change.
    pub(crate) fn touch(&self) {
        lock(&self.state).mtime = now();
    }

    /// A description of the newest generation for a program of this host.
    fn lend(&self, flags: Flags) -> Result<OwnedFd, Errno> {
        let mut state = lock(&self.state);
        // The kernel shows when it is no longer open.
        state.lent = true;
        state.memory.lend(how(flags))
    }

    /// Extends the newest generation to at least this length; at the first write to the length that was given at its creation.
    pub(crate) fn grow(&self, to: u64) -> Result<(), Errno> {
        let mut state = lock(&self.state);
        let hint = std::mem::take(&mut state.hint);
        state.grow(to.max(hint))
    }

    /// Begins a generation of exactly this length, with the contents of the old one. Readers of the old one continue with it.
    pub(crate) fn truncate(&self, to: u64, quota: &Arc<Quota>) -> Result<(), Errno> {
        loop {
            let (generation, old) = {
                let mut state = lock(&self.state);
                if to >= state.memory.size() {
                    return state.grow(to);
                }
                (state.generation, Arc::clone(&state.memory))
            };
            // Without a lock: others list, open and close meanwhile.
            let memory = Memory::new(quota).map_err(|e| errno(&e))?;
            if to > 0 {
                memory.grow(to)?;
                memory.fill_from(old.fd(), to)?;
            }
            let mut state = lock(&self.state);
            // Another truncation was quicker: this one comes after it.
            if state.generation != generation {
                continue;
            }
            state.memory = memory;
            state.generation = state.generation.wrapping_add(1);
            state.word = None;
            state.appenders = 0;
            state.mtime = now();
            return Ok(());
        }
    }

    /// The counter of one more appender.
    pub(crate) fn append_word(&self) -> Result<(Arc<End>, u32), Errno> {
        let mut state = lock(&self.state);
        let word = match &state.word {
            Some(word) => Arc::clone(word),
            None => Arc::new(End::new(state.memory.quota()).map_err(|e| errno(&e))?),
        };
        if state.appenders == 0 {
            word.set(state.memory.size());
        }
        state.word = Some(Arc::clone(&word));
        state.appenders += 1;
        Ok((word, state.generation))
    }

    /// One appender of this generation less.
    pub(crate) fn end_append(&self, generation: u32) {
        let mut state = lock(&self.state);
        if state.generation == generation {
            state.appenders = state.appenders.saturating_sub(1);
        }
    }
}

impl State {
    /// Makes it longer. What is there then is not an appender's to write to.
    fn grow(&mut self, to: u64) -> Result<(), Errno> {
        self.memory.grow(to)?;
        self.mtime = now();
        if let Some(word) = &self.word {
            word.raise(self.memory.size());
        }
        Ok(())
    }

    /// Whether no client has it open.
    fn is_idle(&mut self) -> bool {
        if self.lent && !self.memory.is_lent() {
            self.lent = false;
        }
        let lost = self.lost.is_some_and(|since| since.elapsed() < GRACE);
        self.opens == 0 && !self.lent && !lost
    }
}

#[derive(Clone)]
enum Node {
    Dir { ino: u64, mtime: u64 },
    Buffer(Arc<Buffer>),
}

struct Tree {
    nodes: BTreeMap<Name, Node>,
    next: u64,
}

/// The identity of a file's state: device, inode, length, time of its last change.
type FileState = (u64, u64, u64, i64, u64);

/// A file of the folder that clients have open. Its lock is held while it is loaded.
type Loaded = Mutex<Weak<Buffer>>;

/// The buffers and files of a server.
pub(crate) struct Store {
    tree: Mutex<Tree>,
    pub(crate) quota: Arc<Quota>,
    /// Keep buffers that no client has open.
    pub(crate) keeps: bool,
    folder: Option<OwnedFd>,
    loaded: Mutex<HashMap<FileState, Arc<Loaded>>>,
}

pub(crate) enum Opened {
    Buffer(Arc<Buffer>),
    /// For a program of this host.
    File(OwnedFd, Attr),
}

impl Store {
    pub(crate) fn new(quota: u64, keeps: bool, folder: Option<OwnedFd>) -> io::Result<Self> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|e| io::Error::other(e.to_string()))?;
        Ok(Self {
            tree: Mutex::new(Tree {
                nodes: BTreeMap::new(),
                // No number of this run is one of an earlier run.
                next: (u64::from_ne_bytes(random) >> 1) | FIRST,
            }),
            // The rest is for connections.
            quota: Quota::new(quota, limits::nofile().0 as usize / 2),
            keeps,
            folder,
            loaded: Mutex::default(),
        })
    }

    /// Gives a buffer a new generation of this length, and lends it to a program of this host that has it open for writing: the rights are those of
    /// the moment when it opened it.
    pub(crate) fn truncate_for_host(
        &self,
        name: &Name,
        size: u64,
    ) -> Result<(OwnedFd, Attr), Errno> {
        let tree = lock(&self.tree);
        let buffer = match tree.nodes.get(name) {
            Some(Node::Buffer(buffer)) => Arc::clone(buffer),
            Some(Node::Dir { .. }) => return Err(Errno::ISDIR),
            None => return Err(self.not_ours(&tree, name)),
        };
        drop(tree);
        buffer.truncate(size, &self.quota)?;
        let file = buffer.lend(Flags::READ.with(Flags::WRITE))?;
        Ok((file, buffer.attr(&Who::HOST)))
    }

    /// Gives a buffer these rights, nine bits. Programs that have it open keep what they have. Folders have none: that succeeds, and changes nothing.
    ///
    /// # Errors
    /// `EPERM` for a client that does not own it; `EROFS` for a file of the served folder; those of a name.
    pub(crate) fn chmod(&self, name: &Name, who: &Who, mode: u64) -> Result<(), Errno> {
        match self.owned(name)? {
            Some(buffer) => buffer.chmod(who, mode),
            None => Ok(()),
        }
    }

    /// As [`Store::chmod`], of the buffer with this number. One that has no name any more cannot be opened again: there is nothing to change.
    pub(crate) fn chmod_number(&self, ino: u64, who: &Who, mode: u64) -> Result<(), Errno> {
        if ino < FIRST {
            // A file of the served folder.
            return Err(Errno::ROFS);
        }
        let tree = lock(&self.tree);
        let buffer = tree.nodes.values().find_map(|node| match node {
            Node::Buffer(buffer) if buffer.ino == ino => Some(Arc::clone(buffer)),
            _ => None,
        });
        drop(tree);
        buffer.map_or(Ok(()), |buffer| buffer.chmod(who, mode))
    }

    /// Adds a key to those that a buffer names, or takes it out.
    ///
    /// # Errors
    /// As [`Store::chmod`]; `EISDIR` for a folder; `ENOSPC` for the 65th key.
    pub(crate) fn share(
        &self,
        name: &Name,
        who: &Who,
        key: PublicKey,
        adds: bool,
    ) -> Result<(), Errno> {
        match self.owned(name)? {
            Some(buffer) => lock(&buffer.state).rights.share(who, key, adds),
            None => Err(Errno::ISDIR),
        }
    }

    /// The buffer of a name whose rights are to change; `None` for a folder.
    fn owned(&self, name: &Name) -> Result<Option<Arc<Buffer>>, Errno> {
        let tree = lock(&self.tree);
        match tree.nodes.get(name) {
            Some(Node::Buffer(buffer)) => Ok(Some(Arc::clone(buffer))),
            Some(Node::Dir { .. }) => Ok(None),
            None if name.is_root() => Ok(None),
            None => match self.on_disk(&tree, name, OFlags::PATH)?.1 {
                stat if FileType::from_raw_mode(stat.st_mode).is_dir() => Ok(None),
                _ => Err(Errno::ROFS),
            },
        }
    }

    /// Opens a buffer or file, and counts that: [`Store::close`] takes it back. With `lend`, for a program of this host.
    pub(crate) fn open(
        &self,
        name: &Name,
        flags: Flags,
        hint: u64,
        who: &Who,
        lend: bool,
    ) -> Result<Opened, Errno> {
        if name.is_root() {
            return Err(Errno::ISDIR);
        }
        let mut tree = lock(&self.tree);
        let writes = flags.has(Flags::WRITE);
        // Appenders write behind what is there: a length in advance would be a hole in front of them.
        let hint = if flags.has(Flags::APPEND) { 0 } else { hint };
        let buffer = match tree.nodes.get(name) {
            Some(Node::Dir { .. }) => return Err(Errno::ISDIR),
            Some(Node::Buffer(_)) if flags.has(Flags::CREATE.with(Flags::EXCLUSIVE)) => {
                return Err(Errno::EXIST);
            }
            Some(Node::Buffer(buffer)) => {
                let reads = READ * u16::from(flags.has(Flags::READ));
                let changes = writes || flags.has(Flags::TRUNCATE);
                let changes = WRITE * u16::from(changes);
                buffer.check(who, reads | changes)?;
                Arc::clone(buffer)
            }
            None => match self.on_disk(&tree, name, OFlags::RDONLY) {
                Ok(_) if flags.has(Flags::CREATE.with(Flags::EXCLUSIVE)) => {
                    return Err(Errno::EXIST);
                }
                Ok((_, stat)) if FileType::from_raw_mode(stat.st_mode).is_dir() => {
                    return Err(Errno::ISDIR);
                }
                Ok(_) if writes || flags.has(Flags::TRUNCATE) => return Err(Errno::ROFS),
                Ok((file, stat)) => {
                    drop(tree);
                    let attr = disk_attr(&stat)?;
                    return if lend {
                        Ok(Opened::File(file, attr))
                    } else {
                        self.load(&file, &stat).map(Opened::Buffer)
                    };
                }
                Err(Errno::NOENT) if flags.has(Flags::CREATE) => {
                    self.check_parent(&tree, name)?;
                    if hint > self.quota.limit.saturating_sub(self.quota.used()) {
                        return Err(Errno::NOSPC);
                    }
                    let ino = tree.number()?;
                    let mode = if flags.has(Flags::PRIVATE) {
                        PRIVATE_MODE
                    } else {
                        NEW_MODE
                    };
                    let rights = Rights::new(who.clone(), mode);
                    let memory = Memory::new(&self.quota).map_err(|e| errno(&e))?;
                    let buffer = Buffer::new(ino, memory, now(), false, rights, hint);
                    tree.nodes
                        .insert(name.clone(), Node::Buffer(Arc::clone(&buffer)));
                    buffer
                }
                Err(e) => return Err(e),
            },
        };
        if writes && flags.has(Flags::TRUNCATE) {
            buffer.truncate(0, &self.quota)?;
            lock(&buffer.state).hint = hint;
        }
        let mut state = lock(&buffer.state);
        if !lend {
            state.opens += 1;
            drop(state);
            return Ok(Opened::Buffer(buffer));
        }
        let hint = std::mem::take(&mut state.hint);
        if writes && hint > 0 {
            state.grow(hint)?;
        }
        drop(state);
        let file = buffer.lend(flags)?;
        let attr = buffer.attr(who);
        Ok(Opened::File(file, attr))
    }

    /// One client has closed the buffer, or its connection is lost. The last close frees, unless buffers are kept.
    pub(crate) fn close(&self, buffer: &Arc<Buffer>, lost: bool) {
        let mut tree = lock(&self.tree);
        {
            let mut state = lock(&buffer.state);
            state.opens = state.opens.saturating_sub(1);
            if lost {
                state.lost = Some(Instant::now());
            }
        }
        let freed = self.free(&mut tree, |other| Arc::ptr_eq(other, buffer));
        drop(tree);
        drop(freed);
    }

    /// Frees buffers that programs of this host have closed.
    pub(crate) fn sweep(&self) {
        let freed = self.free(&mut lock(&self.tree), |_| true);
        drop(freed);
        // Who loads it has another reference, so nobody waits for a lock here.
        lock(&self.loaded)
            .retain(|_, file| Arc::strong_count(file) > 1 || lock(file).strong_count() > 0);
    }

    /// Takes buffers out of the tree. The caller drops them without the lock: the kernel frees their memory then, which may take long.
    fn free(&self, tree: &mut Tree, which: impl Fn(&Arc<Buffer>) -> bool) -> Vec<Arc<Buffer>> {
        let mut freed = Vec::new();
        if self.keeps {
            return freed;
        }
        tree.nodes.retain(|_, node| match node {
            Node::Buffer(buffer) if which(buffer) => {
                let mut state = lock(&buffer.state);
                let idle = state.is_idle();
                state.linked &= !idle;
                drop(state);
                if idle {
                    freed.push(Arc::clone(buffer));
                }
                !idle
            }
            _ => true,
        });
        freed
    }

    pub(crate) fn stat(&self, name: &Name, who: &Who) -> Result<Attr, Errno> {
        if name.is_root() {
            return Ok(dir_attr(1, 0));
        }
        let tree = lock(&self.tree);
        match tree.nodes.get(name) {
            Some(Node::Dir { ino, mtime }) => Ok(dir_attr(*ino, *mtime)),
            Some(Node::Buffer(buffer)) => Ok(buffer.attr(who)),
            None => disk_attr(&self.on_disk(&tree, name, OFlags::PATH)?.1),
        }
    }

    /// Removes a buffer. That changes what others find under its name, so it is for its owner and for those who may write it.
    pub(crate) fn unlink(&self, name: &Name, who: &Who) -> Result<(), Errno> {
        let mut tree = lock(&self.tree);
        match tree.nodes.get(name) {
            Some(Node::Dir { .. }) => Err(Errno::ISDIR),
            Some(Node::Buffer(buffer)) => {
                let mut state = lock(&buffer.state);
                state.rights.check_name(who)?;
                state.linked = false;
                drop(state);
                let freed = tree.nodes.remove(name);
                drop(tree);
                drop(freed);
                Ok(())
            }
            None if name.is_root() => Err(Errno::ISDIR),
            None => Err(self.not_ours(&tree, name)),
        }
    }

    /// Gives a buffer or folder another name. All buffers whose names change, and one that is replaced, have to be the client's, or such that it may write
    /// them.
    pub(crate) fn rename(&self, from: &Name, to: &Name, who: &Who) -> Result<(), Errno> {
        let mut tree = lock(&self.tree);
        let node = match tree.nodes.get(from) {
            Some(node) => node.clone(),
            None if from.is_root() => return Err(Errno::BUSY),
            None => return Err(self.not_ours(&tree, from)),
        };
        if to.is_root() {
            return Err(Errno::BUSY);
        }
        if from == to {
            return Ok(());
        }
        self.check_parent(&tree, to)?;
        let mut changed = tree.inside(from);
        changed.extend([from.clone(), to.clone()]);
        for name in changed {
            if let Some(Node::Buffer(buffer)) = tree.nodes.get(&name) {
                lock(&buffer.state).rights.check_name(who)?;
            }
        }
        match (&node, tree.nodes.get(to)) {
            (_, None) => {
                if self.on_disk(&tree, to, OFlags::PATH).is_ok() {
                    return Err(Errno::ROFS);
                }
            }
            (Node::Buffer(_), Some(Node::Dir { .. })) => return Err(Errno::ISDIR),
            (Node::Dir { .. }, Some(_)) => return Err(Errno::EXIST),
            (Node::Buffer(_), Some(Node::Buffer(old))) => lock(&old.state).linked = false,
        }
        if let Node::Dir { .. } = node {
            if to.as_bytes().starts_with(&from.below()) {
                return Err(Errno::INVAL);
            }
            let inside = tree.inside(from).into_iter();
            let moved = |old: Name| Some(old.renamed(from, to)?.map(|new| (old, new)));
            // Nothing moves if one of the new names is too long.
            let inside: Result<Vec<_>, Errno> = inside.filter_map(moved).collect();
            for (old, moved) in inside? {
                if let Some(node) = tree.nodes.remove(&old) {
                    tree.nodes.insert(moved, node);
                }
            }
        }
        tree.nodes.remove(from);
        let freed = tree.nodes.insert(to.clone(), node);
        drop(tree);
        drop(freed);
        Ok(())
    }

    pub(crate) fn mkdir(&self, name: &Name) -> Result<(), Errno> {
        let mut tree = lock(&self.tree);
        if name.is_root() || tree.nodes.contains_key(name) {
            return Err(Errno::EXIST);
        }
        match self.on_disk(&tree, name, OFlags::PATH) {
            Ok(_) => return Err(Errno::EXIST),
            Err(Errno::NOENT) => {}
            Err(e) => return Err(e),
        }
        self.check_parent(&tree, name)?;
        let (ino, mtime) = (tree.number()?, now());
        tree.nodes.insert(name.clone(), Node::Dir { ino, mtime });
        Ok(())
    }

    pub(crate) fn rmdir(&self, name: &Name) -> Result<(), Errno> {
        let mut tree = lock(&self.tree);
        match tree.nodes.get(name) {
            Some(Node::Dir { .. }) if !tree.inside(name).is_empty() => Err(Errno::NOTEMPTY),
            Some(Node::Dir { .. }) => {
                tree.nodes.remove(name);
                Ok(())
            }
            Some(Node::Buffer(_)) => Err(Errno::NOTDIR),
            None if name.is_root() => Err(Errno::BUSY),
            None => Err(self.not_ours(&tree, name)),
        }
    }

    /// Entries of a folder after a name, in byte order.
    pub(crate) fn list(&self, name: &Name, after: &[u8], who: &Who) -> Result<Vec<Entry>, Errno> {
        // The folder of the file system is read without the lock: it may have a million entries.
        let on_disk = self.disk_entries(name, after);
        let tree = lock(&self.tree);
        let known = match tree.nodes.get(name) {
            Some(Node::Buffer(_)) => return Err(Errno::NOTDIR),
            Some(Node::Dir { .. }) => true,
            None => name.is_root(),
        };
        let mut found = match on_disk {
            Ok(entries) => entries,
            Err(Errno::NOENT) if known => BTreeMap::new(),
            Err(Errno::NOENT) if tree.has_buffer_above(name) => return Err(Errno::NOTDIR),
            Err(e) => return Err(e),
        };
        let below = name.below();
        let start = Name::raw([&below, after].concat());
        for (path, node) in tree
            .nodes
            .range((Bound::Excluded(start), Bound::Unbounded))
            .take_while(|(path, _)| path.as_bytes().starts_with(&below))
        {
            let last = &path.as_bytes()[below.len()..];
            if last.contains(&b'/') || last.is_empty() {
                continue;
            }
            let attr = match node {
                Node::Dir { ino, mtime } => dir_attr(*ino, *mtime),
                Node::Buffer(buffer) => buffer.attr(who),
            };
            found.insert(last.to_vec(), attr);
            if found.len() > MAX_ENTRIES && found.pop_last().is_some_and(|(most, _)| most == last) {
                // All further ones come after it.
                break;
            }
        }
        let entries = found.into_iter();
        Ok(entries.map(|(name, attr)| Entry { name, attr }).collect())
    }

    /// The folder that a new name would be in is there.
    fn check_parent(&self, tree: &Tree, name: &Name) -> Result<(), Errno> {
        let parent = name.parent();
        match tree.nodes.get(&parent) {
            Some(Node::Dir { .. }) => Ok(()),
            Some(Node::Buffer(_)) => Err(Errno::NOTDIR),
            None if parent.is_root() => Ok(()),
            None => {
                let (_, stat) = self.on_disk(tree, &parent, OFlags::PATH)?;
                if FileType::from_raw_mode(stat.st_mode).is_dir() {
                    Ok(())
                } else {
                    Err(Errno::NOTDIR)
                }
            }
        }
    }

    /// Why a name that is not in the tree cannot be changed.
    fn not_ours(&self, tree: &Tree, name: &Name) -> Errno {
        match self.on_disk(tree, name, OFlags::PATH) {
            Ok(_) => Errno::ROFS,
            Err(e) => e,
        }
    }

    /// A file or folder below the served folder, by no symbolic link. `ENOTDIR` where a buffer of the tree stands on the way.
    fn on_disk(&self, tree: &Tree, name: &Name, flags: OFlags) -> Result<(OwnedFd, Stat), Errno> {
        let folder = self.folder.as_ref().ok_or(Errno::NOENT);
        let file = folder
            .and_then(|folder| beneath(folder, name, flags))
            .map_err(|e| match e {
                Errno::NOENT if tree.has_buffer_above(name) => Errno::NOTDIR,
                e => e,
            })?;
        let stat = fs::fstat(&file)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Directory => Ok((file, stat)),
            _ => Err(Errno::ACCESS),
        }
    }

    fn disk_entries(&self, name: &Name, after: &[u8]) -> Result<BTreeMap<Vec<u8>, Attr>, Errno> {
        let Some(folder) = &self.folder else {
            return Err(Errno::NOENT);
        };
        let dir = if name.is_root() {
            fs::openat(
                folder,
                ".",
                OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?
        } else {
            beneath(folder, name, OFlags::RDONLY | OFlags::DIRECTORY)?
        };
        let mut found = BTreeMap::new();
        for entry in fs::Dir::read_from(&dir)?.take(MAX_DISK_ENTRIES) {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name <= after || matches!(name, b"." | b"..") || name.len() > MAX_COMPONENT {
                continue;
            }
            let stat = fs::statat(&dir, entry.file_name(), fs::AtFlags::SYMLINK_NOFOLLOW);
            if let Some(attr) = stat.ok().and_then(|stat| disk_attr(&stat).ok()) {
                found.insert(name.to_vec(), attr);
                if found.len() > MAX_ENTRIES {
                    found.pop_last();
                }
            }
        }
        Ok(found)
    }

    /// Loads a file into memory, once as long as a client has it open and it does not change.
    fn load(&self, file: &OwnedFd, stat: &Stat) -> Result<Arc<Buffer>, Errno> {
        let attr = disk_attr(stat)?;
        let key = (
            stat.st_dev,
            stat.st_ino,
            attr.size,
            stat.st_mtime,
            stat.st_mtime_nsec,
        );
        let file_of = Arc::clone(lock(&self.loaded).entry(key).or_default());
        // Only those who want the same file wait while it is loaded.
        let mut loaded = lock(&file_of);
        let buffer = if let Some(buffer) = loaded.upgrade() {
            buffer
        } else {
            let memory = Memory::new(&self.quota).map_err(|e| errno(&e))?;
            memory.grow(attr.size)?;
            memory.fill_from(file, attr.size)?;
            let rights = Rights::new(Who::default(), DISK_MODE);
            let buffer = Buffer::new(attr.ino, memory, attr.mtime, true, rights, 0);
            *loaded = Arc::downgrade(&buffer);
            buffer
        };
        lock(&buffer.state).opens += 1;
        Ok(buffer)
    }
}

impl Tree {
    fn number(&mut self) -> Result<u64, Errno> {
        if self.nodes.len() >= MAX_NAMES {
            return Err(Errno::NOSPC);
        }
        self.next = self.next.wrapping_add(1);
        Ok(self.next)
    }

    fn has_buffer_above(&self, name: &Name) -> bool {
        let parents = std::iter::successors(Some(name.parent()), |name| Some(name.parent()));
        let mut above = parents.take_while(|name| !name.is_root());
        above.any(|name| matches!(self.nodes.get(&name), Some(Node::Buffer(_))))
    }

    fn inside(&self, folder: &Name) -> Vec<Name> {
        let below = folder.below();
        self.nodes
            .range((Bound::Excluded(Name::raw(below.clone())), Bound::Unbounded))
            .map(|(name, _)| name)
            .take_while(|name| name.as_bytes().starts_with(&below))
            .cloned()
            .collect()
    }
}

/// The flags of `open(2)`.
fn how(flags: Flags) -> OFlags {
    let mut how = match (flags.has(Flags::READ), flags.has(Flags::WRITE)) {
        (true, true) => OFlags::RDWR,
        (false, true) => OFlags::WRONLY,
        _ => OFlags::RDONLY,
    };
    how.set(OFlags::APPEND, flags.has(Flags::APPEND));
    how
}

fn beneath(folder: impl AsFd, name: &Name, flags: OFlags) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    // NONBLOCK: a pipe is not served, and opening one must not wait for its writer.
    let flags = if flags.contains(OFlags::PATH) {
        flags.difference(OFlags::NONBLOCK)
    } else {
        flags
    };
    match fs::openat2(&folder, name.as_bytes(), flags, Mode::empty(), resolve) {
        // A symbolic link is not followed, and its target is not disclosed.
        Err(Errno::LOOP | Errno::XDEV) => Err(Errno::ACCESS),
        other => other,
    }
}

fn dir_attr(ino: u64, mtime: u64) -> Attr {
    Attr {
        dir: true,
        writable: true,
        mtime,
        ino,
        mode: DIR_MODE,
        rights: READ | WRITE,
        ..Attr::default()
    }
}

fn disk_attr(stat: &Stat) -> Result<Attr, Errno> {
    let kind = FileType::from_raw_mode(stat.st_mode);
    if !kind.is_dir() && !kind.is_file() {
        return Err(Errno::ACCESS);
    }
    let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
    Ok(Attr {
        dir: kind.is_dir(),
        writable: kind.is_dir(),
        size: if kind.is_dir() {
            0
        } else {
            stat.st_size as u64
        },
        mtime: seconds
            .saturating_mul(1_000_000_000)
            .saturating_add(stat.st_mtime_nsec),
        ino: stat.st_ino,
        generation: 0,
        mode: if kind.is_dir() { DIR_MODE } else { DISK_MODE },
        rights: READ,
    })
}

#[cfg(test)]
mod tests;
