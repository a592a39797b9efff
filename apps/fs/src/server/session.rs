//! One client's connection: its handles, and its requests.

use std::collections::HashMap;
use std::sync::Arc;

use rustix::io::Errno;
use weft_verbs::Access;
use weft_verbs::any::{Mr, Pd};

use super::memory::{End, Memory};
use super::rights::Who;
use super::store::{Buffer, Opened, Store};
use crate::wire::{Attr, Flags, Op, Region, Reply, Request, buffer_number, named_key};

/// Handles of one client.
const MAX_HANDLES: usize = 1024;

/// An open buffer of one client.
struct Handle {
    buffer: Arc<Buffer>,
    flags: Flags,
    /// The rights of the region.
    access: Access,
    generation: u32,
    /// Keeps the quota of the generation that is registered.
    memory: Option<Arc<Memory>>,
    mr: Option<Mr>,
    word: Option<(Mr, u32)>,
}

/// The handles of one client. Dropping it closes them.
pub(crate) struct Handles {
    store: Arc<Store>,
    pd: Pd,
    who: Who,
    /// Whether clients can append, which needs atomics.
    has_atomics: bool,
    open: HashMap<u32, Handle>,
    next: u32,
}

impl Handles {
    pub(crate) fn new(store: &Arc<Store>, pd: &Pd, who: Who, has_atomics: bool) -> Self {
        Self {
            store: Arc::clone(store),
            pd: pd.clone(),
            who,
            has_atomics,
            open: HashMap::new(),
            next: 1,
        }
    }

    /// Carries a request out.
    pub(crate) fn answer(&mut self, request: &Request) -> Reply {
        let done = match request.op {
            Op::Open => self.open(request),
            Op::Close => self.close(request.handle),
            Op::Refresh | Op::Sync => self.with(request, |_, _| Ok(())),
            Op::Grow => self.with(request, |handle, _| {
                handle.check_writable()?;
                handle.buffer.grow(request.size)
            }),
            Op::Chmod if request.handle != 0 => {
                let who = self.who.clone();
                self.with(request, |handle, _| handle.buffer.chmod(&who, request.size))
            }
            Op::Truncate => self.with(request, |handle, store| {
                handle.check_writable()?;
                handle.buffer.truncate(request.size, &store.quota)
            }),
            _ => return names(&self.store, &self.who, request),
        };
        done.unwrap_or_else(|e| Reply::failed(request.id, e))
    }

    fn open(&mut self, request: &Request) -> Result<Reply, Errno> {
        if self.open.len() >= MAX_HANDLES {
            return Err(Errno::MFILE);
        }
        let flags = request.flags;
        if !flags.has(Flags::READ) && !flags.has(Flags::WRITE) {
            return Err(Errno::INVAL);
        }
        if flags.has(Flags::APPEND) && !self.has_atomics {
            return Err(Errno::OPNOTSUPP);
        }
        let opened = self
            .store
            .open(&request.name, flags, request.size, &self.who, false)?;
        let Opened::Buffer(buffer) = opened else {
            return Err(Errno::IO);
        };
        // A writer reads the bytes beside what it writes, if it may. The region gives what the client may do, and nothing else does.
        let mut access = Access::empty();
        if flags.has(Flags::WRITE) {
            access |= Access::REMOTE_WRITE | Access::LOCAL_WRITE;
        }
        if flags.has(Flags::READ) || buffer.is_readable(&self.who) {
            access |= Access::REMOTE_READ;
        }
        let mut handle = Handle {
            buffer,
            flags,
            access,
            generation: 0,
            memory: None,
            mr: None,
            word: None,
        };
        if let Err(e) = handle.renew(&self.pd) {
            self.store.close(&handle.buffer, false);
            return Err(e);
        }
        while self.open.contains_key(&self.next) || self.next == 0 {
            self.next = self.next.wrapping_add(1);
        }
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        let reply = Reply {
            handle: number,
            ..handle.reply(request.id, &self.who)
        };
        self.open.insert(number, handle);
        Ok(reply)
    }

    fn close(&mut self, number: u32) -> Result<Reply, Errno> {
        let handle = self.open.remove(&number).ok_or(Errno::BADF)?;
        give_up(&self.store, handle, false);
        Ok(Reply::ok(0))
    }

    fn with(
        &mut self,
        request: &Request,
        act: impl FnOnce(&Handle, &Store) -> Result<(), Errno>,
    ) -> Result<Reply, Errno> {
        let handle = self.open.get_mut(&request.handle).ok_or(Errno::BADF)?;
        act(handle, &self.store)?;
        if request.op == Op::Sync && handle.flags.has(Flags::WRITE) {
            handle.buffer.touch();
        }
        handle.renew(&self.pd)?;
        Ok(Reply {
            handle: request.handle,
            ..handle.reply(request.id, &self.who)
        })
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        for (_, handle) in self.open.drain() {
            give_up(&self.store, handle, true);
        }
    }
}

fn give_up(store: &Store, mut handle: Handle, lost: bool) {
    handle.drop_word();
    // The region is deregistered before the buffer is freed, so that its quota is free before the reply.
    handle.mr = None;
    handle.memory = None;
    store.close(&handle.buffer, lost);
}

impl Handle {
    fn check_writable(&self) -> Result<(), Errno> {
        if self.flags.has(Flags::WRITE) {
            Ok(())
        } else {
            Err(Errno::BADF)
        }
    }

    fn drop_word(&mut self) {
        if let Some((_, generation)) = self.word.take() {
            self.buffer.end_append(generation);
        }
    }

    /// Registers the newest generation as far as it reaches now.
    fn renew(&mut self, pd: &Pd) -> Result<(), Errno> {
        let (generation, memory) = self.buffer.current();
        let len = usize::try_from(memory.size()).map_err(|_| Errno::FBIG)?;
        let stale = generation != self.generation;
        if stale || self.mr.as_ref().map_or(0, Mr::len) != len {
            self.mr = None;
            if len > 0 {
                let mr = pd.reg_memfd(memory.fd(), len, self.access);
                self.mr = Some(mr.map_err(|_| Errno::NOMEM)?);
            }
        }
        self.memory = Some(memory);
        self.generation = generation;
        if self.flags.has(Flags::APPEND.with(Flags::WRITE))
            && self.word.as_ref().is_none_or(|&(_, of)| of != generation)
        {
            self.drop_word();
            let (word, generation) = self.buffer.append_word()?;
            let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            let Ok(mr) = pd.reg_memfd(word.page(), End::LEN, access) else {
                self.buffer.end_append(generation);
                return Err(Errno::NOMEM);
            };
            self.word = Some((mr, generation));
        }
        Ok(())
    }

    fn reply(&self, id: u32, who: &Who) -> Reply {
        let at = |mr: &Mr, len: u64| {
            let remote = mr.remote(0);
            Region {
                rkey: remote.rkey,
                addr: remote.addr,
                len,
            }
        };
        let region = self.mr.as_ref().map(|mr| at(mr, mr.len() as u64));
        let word = self.word.as_ref().map(|(mr, _)| at(mr, 8));
        let attr = self.buffer.attr(who);
        Reply {
            attr: Attr {
                // The size of the region, if it has changed since.
                size: region.map_or(0, |region| region.len),
                generation: self.generation,
                ..attr
            },
            region: region.unwrap_or_default(),
            word: word.unwrap_or_default(),
            ..Reply::ok(id)
        }
    }
}

/// Carries out what needs no handle.
pub(crate) fn names(store: &Store, who: &Who, request: &Request) -> Reply {
    let (name, other) = (&request.name, &request.other);
    let ok = Reply::ok(request.id);
    let done = match request.op {
        Op::Stat => store.stat(name, who).map(|attr| Reply { attr, ..ok }),
        Op::Unlink => store.unlink(name, who).map(|()| ok),
        Op::Rename => store.rename(name, other, who).map(|()| ok),
        Op::Chmod if name.is_root() && !other.is_root() => buffer_number(other)
            .ok_or(Errno::INVAL)
            .and_then(|ino| store.chmod_number(ino, who, request.size))
            .map(|()| ok),
        Op::Chmod => store.chmod(name, who, request.size).map(|()| ok),
        Op::Share => named_key(other)
            .ok_or(Errno::INVAL)
            .and_then(|key| store.share(name, who, key, request.size != 0))
            .map(|()| ok),
        Op::Mkdir => store.mkdir(name).map(|()| ok),
        Op::Rmdir => store.rmdir(name).map(|()| ok),
        Op::List => store
            .list(name, other.as_bytes(), who)
            .map(|entries| Reply { entries, ..ok }),
        Op::Usage => Ok(Reply {
            attr: Attr {
                size: store.quota.limit.min(i64::MAX as u64),
                ..Attr::default()
            },
            region: Region {
                len: store.quota.used(),
                ..Region::default()
            },
            ..ok
        }),
        _ => Err(Errno::INVAL),
    };
    done.unwrap_or_else(|e| Reply::failed(request.id, e))
}
